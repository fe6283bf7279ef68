"""Coordinates which process may write where: marks of living processes, leases on folders, and holds on files being
read.

A mark is a file that names its owner, MACHINE-PID-START-RANDOM: no other process can have this name, and any process
can tell whether the owner still lives. On the owner's machine (one boot, one container) the pid is looked up. Elsewhere
a mark is dead when nobody has touched it for long: leases and holds are touched every few seconds by a thread.

    FOLDER/.lease-N           its owner alone writes into FOLDER. The next owner makes N + 1, which one process can
    FOLDER/.run               the identity of a run, and the device, inode and path of its folder, which a copy lacks.
                              In a folder that RUN/checkpoints is a link to: RUN's, and then its own device, ...
    FOLDER/.NAME.MARK.hold    a process reads FOLDER/NAME, which must not be removed
    FOLDER/.NAME.MARK.tmp     NAME while it is written, see atomic.py

Every write through dstrain/disk into a folder that this process has claimed first compares lease and identity. So a
process whose folder was removed, moved or taken over by a new run writes nothing more. This module needs only the
standard library, and no locks of the file system.
"""

import atexit
import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

BEAT_SECONDS = 5.0  # between two touches of a lease or hold
SILENT_SECONDS = 30.0  # a lease or hold of another machine is dead after so long without a touch
_STALE_SECONDS = 86_400.0  # a temporary file of another machine is dead so long after its last write
_MARK = r"(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d*)-[0-9a-f]{8}"
_NAMED = re.compile(rf"\.(?P<name>.+)\.(?P<mark>{_MARK})\.(?P<kind>tmp|hold)", re.DOTALL)
_LEASE = re.compile(r"\.lease-(\d+)")
IDENTITY = ".run"
_MOST = 16_384  # bytes of a lease or an identity

_touched: dict[str, threading.Event] = {}  # marks that threads of this process touch, and the event that ends each
_claims: dict[str, "Claim"] = {}  # by absolute folder
_holds: list["Hold"] = []  # of this process
_swept: set[str] = set()  # folders that this process has looked through for files of dead processes


class TakenAway(OSError):
    """Raised if a claimed folder was removed or moved, or now belongs to another command."""


class Held(Exception):
    """Raised if a folder belongs to another living process; the message names that process."""


@dataclass(frozen=True)
class Claim:
    """A claim of this process on a folder: the values to compare with the folder before each write into it."""

    mark: str  # of the lease
    number: int
    identity: str | None = None  # of the run; None if the folder has none, or does not belong to a run
    record: str = ""  # what `.run` holds


def make_owner_mark() -> str:
    """Returns a new unique name that says which process made it: MACHINE-PID-START-RANDOM, where START is the time when
    the process started.
    """
    pid = os.getpid()
    return f"{_hash_machine_identity()}-{pid}-{_read_start_time(pid)}-{secrets.token_hex(4)}"


def make_hidden_path(path: Path, kind: str = "tmp") -> Path:
    """Returns a new path beside `path`: ".NAME.MARK.KIND", with a new mark of this process (see `make_owner_mark`).
    NAME is the name of `path`, cut to 180 characters. Creates nothing.
    """
    return path.with_name(f".{path.name[:180]}.{make_owner_mark()}.{kind}")


def parse_final_name_from_temporary(path: Path) -> str | None:
    """Returns NAME of a temporary file or folder ".NAME.MARK.tmp": the name that it gets when it is complete. Returns
    None if `path` has no such name.
    """
    match = _NAMED.fullmatch(path.name)
    return match["name"] if match and match["kind"] == "tmp" else None


def remove_abandoned_files(folder: Path, name: str | None = None) -> None:
    """Removes the temporary files and folders in `folder` whose processes have ended. Ignores errors of the disk.

    name: removes only those that were to be renamed to `name`; None: removes all, but only at the first call for this
        folder in this process
    """
    if name is None:
        if (key := os.path.abspath(folder)) in _swept:
            return
        _swept.add(key)
    with suppress(OSError):
        for path in list(folder.iterdir()):
            target = parse_final_name_from_temporary(path)
            if target is not None and name in (None, target) and _is_owner_dead(path, _STALE_SECONDS):
                remove_path(path)


def remove_path(path: Path) -> None:
    """Removes a file, a folder with its content, or a link (not its target). Does nothing if nothing exists at
    `path`.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


class Hold:
    """Protects `path`, such as a checkpoint, from removal while this process reads it, until `release` is called or the
    process ends.

    Any process that wants to remove a path calls `is_held_by_reader` first. If the folder cannot be written, there is
    no protection.
    """

    def __init__(self, path: Path) -> None:
        self._mark: Path | None = make_hidden_path(path, "hold")
        try:
            _create_file(self._mark, "")
            _start_touching(self._mark)
            if not _holds:
                atexit.register(release_all_holds)
            _holds.append(self)
        except OSError:
            self._mark = None

    def release(self) -> None:
        """Ends the protection, so that other processes may remove the path. Does nothing if it has ended."""
        if self._mark is not None:
            _stop_touching_and_remove(self._mark)
            self._mark = None


def release_all_holds() -> None:
    """Releases every Hold of this process, which are marks on paths that it reads."""
    while _holds:
        _holds.pop().release()


def is_held_by_reader(path: Path) -> bool:
    """Returns whether a living process, perhaps this one, protects `path` by a Hold while it reads there. Returns False
    if the folder of `path` cannot be read. Removes the Holds of dead processes.
    """
    held = False
    with suppress(OSError):
        for mark in list(path.parent.iterdir()):
            match = _NAMED.fullmatch(mark.name)
            if match and match["kind"] == "hold" and match["name"] == path.name:
                if _is_owner_dead(mark, SILENT_SECONDS):
                    mark.unlink(missing_ok=True)
                else:
                    held = True
    return held


def claim_folder(folder: Path, command_name: str) -> Claim:
    """Claims an existing folder for this process by a file in it, the lease, and returns the claim. No other process
    may claim the folder until `release_folder_claim`. command_name: the name of this command, for the messages of other
    processes.

    Raises Held if a living process has claimed the folder, OSError if nothing can be written there.
    """
    folder = Path(os.path.abspath(folder))
    while True:
        earlier = _find_leases(folder)
        for path in earlier.values():
            if not _is_owner_dead(path, SILENT_SECONDS):
                raise Held(_describe_lease_owner(path))
        number, mark = max(earlier, default=0) + 1, make_owner_mark()
        path = folder / f".lease-{number}"
        try:
            _create_file(path, f"{mark}\n{socket.gethostname()}\n{command_name}\n{_describe_folder_identity(folder)}")
        except FileExistsError:  # another command was quicker
            time.sleep(0.05)
            continue
        if later := _find_leases(folder).keys() - earlier.keys() - {number}:
            path.unlink(missing_ok=True)  # two began at once, after a third had ended: each gives way
            raise Held(_describe_lease_owner(folder / f".lease-{max(later)}"))
        for dead in earlier.values():
            remove_path(dead)
        _start_touching(path)
        register_claim(folder, claim := Claim(mark, number))
        return claim


def write_folder_identity(folder: Path, run: Path | None = None) -> Claim:
    """Writes the file .run, which holds the identity of a run, into a folder that this process has claimed. Keeps the
    identity that the folder has. Makes a new one if it has none, or if it is a copy of another run's folder.

    run: the folder of a run, also claimed, whose identity to write instead, since `folder` will hold its files

    Returns the claim with this identity. Later writes check that the folder still has it.
    """
    identity = None if find_other_owning_run(folder, folder) else read_run_identity(folder)
    known = _claims[os.path.abspath(run)].record if run else f"{identity or secrets.token_hex(16)}\n"
    record = known + _describe_folder_identity(folder)
    os.replace(_create_file(make_hidden_path(folder / IDENTITY), record), folder / IDENTITY)
    register_claim(folder, claim := replace(_claims[os.path.abspath(folder)], identity=known[:32], record=record))
    return claim


def find_other_owning_run(folder: Path, run: Path) -> str | None:
    """Returns the path of the run to which `folder` belongs, as its file .run says, if this is another run than that in
    the folder `run`. Returns None if it is the same run, if there is no .run, if `folder` is a copy, or if something
    else now lies at the path in .run.

    A run that was moved is still the same run: its folder has the same inode, or it is on another disk and nothing is
    left at its former path.
    """
    identity, place, path, own, own_path = _read_first_lines(folder / IDENTITY)
    if _is_recorded_folder(run, place, path, IDENTITY, identity) or not _is_recorded_folder(
        folder, own, own_path, IDENTITY, identity
    ):
        return None
    left = os.path.exists(path) or not place.startswith(f"{os.stat(run).st_dev}:")
    return None if left and read_run_identity(Path(path)) != identity else path


def _describe_folder_identity(folder: Path) -> str:
    """Returns two lines by which a folder can be told from a copy of it: DEVICE:INODE, and its real path."""
    return f"{os.stat(folder).st_dev}:{os.stat(folder).st_ino}\n{os.path.realpath(folder)}\n"


def _is_recorded_folder(folder: Path, device_inode: str, recorded_path: str, name: str, mark: str) -> bool:
    """Returns whether `folder` is the folder that a record describes, and not a copy: it has the recorded path, or was
    moved and has the recorded inode. Returns True if `recorded_path` is empty, as in records of earlier versions.

    device_inode: the recorded "DEVICE:INODE"
    recorded_path: the recorded path
    name, mark: if the file `name` at `recorded_path` still begins with the line `mark`, `folder` is a copy
    """
    if recorded_path in ("", os.path.realpath(folder)):
        return True
    with suppress(OSError):
        if os.path.samefile(recorded_path, folder):  # mounted twice
            return True
        if _read_owner_mark(Path(recorded_path) / name) == mark:
            return False
    return str(os.stat(folder).st_ino) == device_inode.partition(":")[2]


def read_run_identity(folder: Path) -> str | None:
    """Returns the identity of the run in a folder, 32 hex digits from its file .run; None if it has none, as in runs of
    earlier versions.
    """
    text = _read_first_lines(folder / IDENTITY)[0]
    return text if re.fullmatch(r"[0-9a-f]{32}", text) else None


def find_claim(folder: Path) -> Claim | None:
    """Returns this process's claim on a folder; None if there is none. A claim on a parent folder does not count."""
    return _claims.get(os.path.abspath(folder))


def register_claim(folder: Path, claim: Claim | None) -> None:
    """Registers a claim on a folder, made by this process or another rank. From then on, each write of this process
    into the folder first checks that the claim still holds. Does nothing if `claim` is None.
    """
    if claim is not None:
        _claims[os.path.abspath(folder)] = claim


def release_folder_claim(folder: Path) -> None:
    """Gives up this process's claim on a folder. Removes the lease file if this process has written it, but not if
    another rank has. Does nothing without a claim.
    """
    folder = Path(os.path.abspath(folder))
    claim = _claims.pop(str(folder), None)
    if claim is None:
        return
    path = folder / f".lease-{claim.number}"
    with suppress(OSError):
        if str(path) in _touched and _read_owner_mark(path) == claim.mark:
            _stop_touching_and_remove(path)
    _stop_touching(path)


def require_claim_not_lost(path: str | os.PathLike) -> None:
    """Raises TakenAway if `path` lies in a folder that this process has claimed, and that was since removed, moved or
    claimed by another process. Does nothing for other paths. Writes the file .run again if it is missing from the
    folder.
    """
    place = os.path.abspath(path)
    for folder, claim in list(_claims.items()):
        if place == folder or place.startswith(folder + os.sep):
            _require_intact_claim(Path(folder), claim)


def _require_intact_claim(folder: Path, claim: Claim) -> None:
    gone = TakenAway(errno.ESTALE, "it was removed or moved since this command writes there", str(folder))
    own, later = (folder / f".lease-{number}" for number in (claim.number, claim.number + 1))
    if not folder.is_dir() or (claim.identity is None and not own.exists()):
        raise gone
    with suppress(FileNotFoundError):  # somebody has cleared hidden files away, or another command has come and gone
        if later.exists() or _read_owner_mark(own) != claim.mark:
            raise TakenAway(
                errno.ESTALE, f"it now belongs to {_describe_lease_owner(later if later.exists() else own)}"
            )
    try:
        identity = claim.identity and _read_owner_mark(folder / IDENTITY)
    except FileNotFoundError:  # other errors are the storage's, and may pass
        if not own.exists():
            raise gone from None
        os.replace(_create_file(make_hidden_path(folder / IDENTITY), claim.record), folder / IDENTITY)
        identity = claim.identity
    if identity != claim.identity:
        raise TakenAway(errno.ESTALE, "another run lies there now", str(folder))


def _find_leases(folder: Path) -> dict[int, Path]:
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if match := _LEASE.fullmatch(entry.name):
                found[int(match[1])] = folder / entry.name
    return dict(sorted(found.items()))


def _describe_lease_owner(path: Path) -> str:
    """Returns a phrase about the owner of the lease file `path`: "COMMAND (process PID on HOST), by PATH"."""
    mark, host, verb, *_ = _read_first_lines(path)
    match = re.fullmatch(_MARK, mark)
    return f"{verb or 'a command'} (process {match['pid']} on {host}), by {path}" if match else f"somebody, by {path}"


def _create_file(path: Path, text: str) -> Path:
    """Creates a small file that holds `text`, and returns `path`. Raises OSError if anything exists at `path`, even a
    link, or if the file cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        os.write(descriptor, text.encode("utf-8", "surrogateescape"))
    except OSError:  # such as a full disk
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return path


def _read_text(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MOST).decode("utf-8", "surrogateescape")
    finally:
        os.close(descriptor)


def _read_owner_mark(path: Path) -> str:
    return _read_text(path).partition("\n")[0].strip()


def _read_first_lines(path: Path) -> list[str]:
    """Returns the first five lines of a lease or a file .run: "" for each line that is missing, five times "" if the
    file cannot be read.
    """
    with suppress(OSError):
        return (_read_text(path).split("\n") + [""] * 5)[:5]
    return [""] * 5


def _is_owner_dead(path: Path, patience: float) -> bool:
    """Returns whether the process that made a mark (a lease, a hold or a temporary file) has ended, or whether the mark
    is a copy, made with its folder. Returns False if the mark no longer exists.

    patience: for a mark that names no process of this machine: it is dead if nobody has touched it for so many seconds
    """
    try:
        named = _NAMED.fullmatch(path.name)
        mark, _, _, place, where = [named["mark"], *[""] * 4] if named else _read_first_lines(path)
        match = re.fullmatch(_MARK, mark)
        if match and match["start"] and match["machine"] == _hash_machine_identity():
            return _read_start_time(int(match["pid"])) != match["start"] or not _is_recorded_folder(
                path.parent, place, where, path.name, mark
            )
        age = _measure_seconds_since_write(path)
        return age > patience or (age < -patience and _is_untouched_after_wait(path))
    except OSError:  # it has just gone
        return False


def _is_untouched_after_wait(path: Path) -> bool:
    """Waits SILENT_SECONDS (30). Returns whether nobody has changed the file in this time. Use it for a file whose time
    of change lies in the future, so that it has no age.
    """
    before = os.lstat(path).st_mtime_ns
    time.sleep(SILENT_SECONDS)
    return os.lstat(path).st_mtime_ns == before


def _measure_seconds_since_write(path: Path) -> float:
    """Returns the seconds since the last write to a file, or to any file of a folder. Takes the present time from the
    file system, or from this machine's clock if nothing can be written beside `path`.
    """
    newest = os.lstat(path).st_mtime
    for place, _, names in os.walk(path):
        newest = max([newest, *(os.lstat(os.path.join(place, name)).st_mtime for name in names)])
    probe = path.parent / f".{make_owner_mark()}.clock"
    try:
        _create_file(probe, "")
        now = os.lstat(probe).st_mtime
        probe.unlink()
    except OSError:  # not to be written
        now = time.time()
    return now - newest


def _start_touching(path: Path) -> None:
    """Starts a thread that renews the file's time of change every BEAT_SECONDS (5), until `_stop_touching`."""
    _touched[str(path)] = ended = threading.Event()

    def touch_until_ended() -> None:
        while not ended.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(path, follow_symlinks=False)

    threading.Thread(target=touch_until_ended, name=f"touch {path.name}", daemon=True).start()


def _stop_touching(path: Path) -> None:
    if ended := _touched.pop(str(path), None):
        ended.set()


def _stop_touching_and_remove(path: Path) -> None:
    _stop_touching(path)
    with suppress(OSError):
        path.unlink()


@cache
def _hash_machine_identity() -> str:
    """Returns 8 hex digits: a hash of host name, boot and container. Among processes with the same hash, a process id
    is unique.
    """
    words = [socket.gethostname()]
    with suppress(OSError):
        words.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        words.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:8]


def _read_start_time(pid: int) -> str:
    """Returns when a process started, in clock ticks since boot, as text; "" if it has ended or if there is no
    /proc.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
