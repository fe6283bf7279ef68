"""The folder of a run: what it holds, and whether a command may go on in it.

run.yaml           the whole recipe as resolved          ds_config.json   the whole DeepSpeed config as resolved
data.txt           fingerprint of the data               saved            the last step that was saved; 0: none yet
checkpoints/       step_N/, see dstrain/checkpoint/store.py  samples/         step_N.png, grids from the EMA
averages/          snapshots of averages by width        reconstructed/   others, made of these
metrics.jsonl      a line per report                     log.txt          what was printed
bad_files.txt      unreadable files, with reasons        wandb/           the tracker's own
events.jsonl       starts and rollbacks                 report.html      all of it for a person
earlier_N/         --from-scratch, --step put it here   stop             make this file to stop the run
index/             the list of samples of large data  .run, .lease-N     whose the folder is, see disk/owner.py
"""

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from dstrain.disk import atomic, owner, small
from dstrain.disk.modes import apply_umask
from dstrain.distributed import group
from dstrain.distributed.progress import get_phases
from dstrain.recipe import (
    ConfigError,
    Run,
    dump_run,
    explain_write_errors,
    list_refused_changes,
    load_recipe,
    make_refusal,
    require_known_keys,
    reword_errors,
)
from dstrain.runs.lineage import (
    ANCESTORS,
    claim_checkpoints,
    note_ancestors,
    require_own_checkpoints,
    require_own_link,
)
from dstrain.runs.resume import Resume
from dstrain.systems import find_config_class

# All that a run writes; --from-scratch moves this and nothing else.
OF_RUN = (
    *("run.yaml", "ds_config.json", "data.txt", "saved", "metrics.jsonl", "events.jsonl", owner.IDENTITY),
    *("checkpoints", "averages", "reconstructed", "samples", "evaluation", "log.txt", "bad_files.txt", "restarts.log"),
    *("report.html", "wandb", "wandb_id", "tensorboard", "profile", "stacks", "stop", ANCESTORS),
)
_MARKS = OF_RUN[:7]  # two of them, or one beside checkpoints, are a run's
_BESIDE = re.compile(  # what may lie beside a run, and stays
    r"\..*|earlier_.*|index.*|generated(_\d+)?|metrics_data_.*\.npz"
)


def check_start(run: Run, fingerprint: str, resume: Resume) -> None:
    """Checks that this run may start or go on in its folder; changes nothing. Raises ConfigError with the remedy.

    What was lost is never trained again in silence: `saved` is 0 from the start until the first checkpoint, so without
    it, or without the checkpoint that it names, something has been taken away.
    """
    folder = run.directory
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"folder={folder} is a file; name a folder")
    if not folder.exists():
        return
    strangers = sorted(
        path.name for path in folder.iterdir() if not _BESIDE.fullmatch(path.name) and path.name not in OF_RUN
    )
    if not _is_run(folder) and (strangers or any((folder / name).exists() for name in OF_RUN)):
        names = strangers or sorted(path.name for path in folder.iterdir() if path.name in OF_RUN)
        raise ConfigError(
            f"folder={folder} is not a run's: it holds {', '.join(names[:3])}; name another folder, since nothing of "
            "this is moved"
        )
    if resume.from_scratch:
        return
    require_no_links(folder)
    require_own_link(folder)
    if (folder / "checkpoints" / "step_00000000").is_dir():
        raise ConfigError(
            f"folder={folder} holds imported weights, and no moments to go on with: train in another "
            f"folder= with init_from={folder}"
        )
    if not (folder / "run.yaml").exists():
        if any(os.path.lexists(folder / name) for name in OF_RUN if name != owner.IDENTITY):
            raise ConfigError(
                f"folder={folder} holds what is left of a run, and no run.yaml: put it back from a copy, or begin anew "
                "with --from-scratch, which moves the rest aside"
            )
        return
    if lost := _describe_lost_checkpoints(folder):
        raise ConfigError(
            f"{folder} {lost}: put back what is gone, or begin anew with --from-scratch, which moves the rest aside"
        )
    if not resume.allow_change:
        require_own_checkpoints(folder, resume.step)
    if resume.allow_change or not read_last_saved_step(folder):  # without a saved step, no run would be changed
        return
    if changes := list_refused_changes(read_recipe(folder), run, system := find_config_class(run.system)):
        raise make_refusal(changes, folder / "run.yaml", system)
    if not (earlier := small.read_line(folder / "data.txt")):
        raise ConfigError(
            f"{folder / 'data.txt'} is gone or damaged, and it says on which data the run was trained: "
            f"put it back, or give --allow-change, if these are data.path={run.data.path}"
        )
    if not is_same_data(earlier, fingerprint):
        raise ConfigError(
            f"data.path={run.data.path} is not what {folder} was trained on: {fingerprint!r} now, "
            f"{earlier!r} before; put the files back, name another folder=, or give --allow-change"
        )


def _is_run(folder: Path) -> bool:
    """Returns whether a folder holds, or has held, a run. Names such as samples/ alone are of any program."""
    marks = sum(os.path.lexists(folder / name) for name in _MARKS)
    if marks > 1 or (marks > 0 and _list_steps(folder)):
        return True
    return owner.read_identity(folder) is not None and not any(folder.glob("step_*"))  # else another's checkpoints


def require_no_links(folder: Path) -> None:
    """Raises ConfigError if a file in a run's folder is a link, through which others' files would be written.

    The folder of checkpoints may be one, to a larger disk, but not to another run's.
    """
    for path in (folder / name for name in (*OF_RUN, "index")):
        if not path.is_symlink():
            continue
        target = path.resolve()
        if path.name != "checkpoints" or (target.parent != folder.resolve() and (target.parent / "run.yaml").exists()):
            raise _make_link_error(path)


def _make_link_error(path: Path) -> ConfigError:
    return ConfigError(
        f"{path.parent}: {path.name} is a link to {path.resolve()}, and nothing is written through a link: put what it "
        "names in its place, or remove it"
    )


def prepare_start(run: Run, fingerprint: str, resume: Resume) -> None:
    """Checks that a run may start in its folder, which this process has locked; then moves an earlier run aside if
    `resume` asks for it, and gives the folder its identity.
    """
    check_start(run, fingerprint, resume)
    folder, checkpoints = run.directory, run.directory / "checkpoints"
    with report_disk_errors(folder):
        if resume.from_scratch:
            _require_unread(checkpoints.glob("step_*"))
            set_run_aside(folder)
        if linked := checkpoints.is_symlink():
            claim_checkpoints(checkpoints)
            require_own_link(folder)
        earlier = owner.read_identity(folder)
        if not resume.from_scratch:
            note_ancestors(folder, resume.allow_change)
        if owner.identify_folder(folder).identity != earlier and earlier:
            (folder / "wandb_id").unlink(missing_ok=True)  # it came here with a copy of another run
        if linked:
            owner.identify_folder(checkpoints, folder)


def _describe_lost_checkpoints(folder: Path) -> str | None:
    """Describes the files which show that a run has been trained further here than its checkpoints say; None: there are
    none.
    """
    checkpoints, steps, noted = folder / "checkpoints", _list_steps(folder), _read_saved_file(folder)
    if checkpoints.is_symlink() and not checkpoints.exists():
        return f"has the link checkpoints, and {os.readlink(checkpoints)} is not there"
    if checkpoints.exists() and not checkpoints.is_dir():
        return "has a file checkpoints where the folder of this name belongs"
    if steps or noted == 0:
        return None
    if noted:
        return f"has saved step {noted} and holds no checkpoint now"
    if (folder / "saved").exists():
        return "holds no checkpoint, and its file `saved`, which names the last one, is damaged"
    reports, pictures = folder / "metrics.jsonl", folder / "samples"
    if (reports.is_file() and reports.stat().st_size) or (pictures.is_dir() and any(pictures.iterdir())):
        return "holds what training has reported, and neither a checkpoint nor the file `saved`"
    return None


def read_recipe(folder: Path) -> Run:
    """Reads the recipe that a run was trained with, as resolved. Its folder is the one where it lies now.

    Raises ConfigError if it cannot be read, or says nothing, or the folder holds links.
    """
    require_no_links(folder)
    if small.read_line(folder / "run.yaml", small.MEGABYTE) == "":
        raise ConfigError(f"{folder / 'run.yaml'} is empty: put it back from a copy, or train anew with --from-scratch")
    with reword_errors(options={"--recipe ": ""}):
        run = load_recipe(folder / "run.yaml")
    with reword_errors(f"{folder}: "):
        system = find_config_class(run.system)
        run = run.model_copy(update={"folder": folder, "model": system.recorded(run.model)})
        require_known_keys(run, system)
    return run


def is_same_data(earlier: str, fingerprint: str) -> bool:
    """Returns whether a saved fingerprint is of the same data. Earlier versions saved the beginning of today's."""
    return f"{fingerprint} ".startswith(f"{earlier} ")


class Claimed:
    """A folder that this process alone writes into, until `close`."""

    def __init__(self, folder: Path, lock: IO[str]) -> None:
        self._folder, self._lock = folder, lock

    def close(self) -> None:
        """Gives the folder back."""
        if not self._lock.closed:
            owner.release_folder(self._folder / "checkpoints")  # claimed where it is a link
            owner.release_folder(self._folder)
            self._lock.close()

    def __enter__(self) -> "Claimed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lock_folder(folder: Path, patience: float = 60.0, busy: str | None = None, verb: str = "train") -> Claimed:
    """Claims the folder for this process, by a lock and by a lease (disk/owner.py); on rank 0 only.

    The lock ends with its process, and earlier versions know it; the lease holds where a file system has no locks.
    Ranks of an earlier command may still be saving, so they are waited for. Raises ConfigError if another process still
    has the folder after `patience` seconds; `busy` replaces the message.
    """
    get_phases().enter_phase(f"waiting for another command in {folder}, {patience:g} s at most")
    end = time.monotonic() + patience
    file = _take_lock(folder)
    while True:
        holder = ""
        try:
            with _pass_without_locks():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:
                with report_disk_errors(folder):
                    owner.claim_folder(folder, verb)
                    os.utime(file.fileno())  # when this command began, for tracking/report/state.py
                return Claimed(folder, file)
            file.close()  # its last holder removed the folder, and with it this file
            file = _take_lock(folder)
        except owner.Held as held:
            holder = f" ({held})"
        except BlockingIOError:
            pass
        if time.monotonic() > end:
            file.close()
            raise ConfigError(
                busy
                or f"folder={folder}: another process trains in it{holder}; name another folder=, or "
                f"stop that one first (touch {folder / 'stop'})"
            ) from None
        time.sleep(0.5)


@contextmanager
def _pass_without_locks() -> Iterator[None]:
    """Ignores the error with which a file system without locks answers to one who asks for a lock."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError:
        pass


@contextmanager
def claim_output(out: Path, named: str, verb: str) -> Iterator[None]:
    """Makes the folder `out` and keeps other commands from writing into it; on all ranks together. Removes it if
    nothing is written.

    Raises ConfigError, which begins with `named`, if another command writes into it, or the folder cannot be written.
    """
    problem, is_new = None, False
    if group.rank() == 0:
        is_new = not out.exists()
        try:
            with explain_write_errors(named, "name a folder that can be written"):
                out.mkdir(parents=True, exist_ok=True)
                owner.claim_folder(out, verb)
        except owner.Held as held:
            problem = f"{named}: another command writes there, {held}; wait for its end, or name another folder"
        except ConfigError as error:
            problem = str(error)
    try:
        if problem := group.broadcast_from_first(problem):
            raise ConfigError(problem)
        share_claim(out)
        yield
        group.barrier()
    finally:
        owner.release_folder(out)
        if is_new:
            with suppress(OSError):  # it holds something
                out.rmdir()


def share_claim(folder: Path) -> None:
    """Lets all ranks compare rank 0's claim on the folder before they write; on all ranks together.

    A network file system may show another machine the new identity seconds later.
    """
    claim, end = group.broadcast_from_first(owner.find_claim(folder)), time.monotonic() + 20
    while claim and claim.identity and owner.read_identity(folder) != claim.identity and time.monotonic() < end:
        time.sleep(0.2)
    owner.adopt_claim(folder, claim)


def _take_lock(folder: Path) -> IO[str]:
    with report_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / ".lock").is_symlink():
            raise _make_link_error(folder / ".lock")
        # Without waiting for the reader of a pipe, and through no link.
        return open(
            folder / ".lock",
            "a",
            encoding="utf-8",
            opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666),
        )


def report_disk_errors(folder: Path) -> AbstractContextManager[None]:
    """Turns an OSError raised inside into a ConfigError: full, over quota, read-only, or not to be written."""
    return explain_write_errors(f"folder={folder}", "make room there, or name another folder=")


def remove_unused_folder(folder: Path) -> None:
    """Removes a folder that holds nothing but the lock and the lease; on rank 0 only."""
    if all(path.name.startswith((".lock", ".lease-")) for path in folder.iterdir()):
        shutil.rmtree(folder)


def write_run(run: Run, settings: dict[str, Any], fingerprint: str) -> None:
    """Writes the resolved run into its folder; on rank 0 only, after `check_start`. Raises ConfigError if it cannot be
    written.
    """
    folder = run.directory
    with report_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if _read_saved_file(folder) is None:
            note_saved_step(folder, read_last_saved_step(folder))
        for name, text in (
            ("run.yaml", dump_run(run)),
            ("data.txt", fingerprint + "\n"),
            ("ds_config.json", json.dumps(settings, indent=2) + "\n"),
        ):
            atomic.write_file(folder / name, text)


@contextmanager
def make_folder(out: Path) -> Iterator[Path]:
    """Yields a temporary folder to fill, which becomes `out` in the end, or after an error is gone.

    Raises ConfigError if `out` is there already and no empty folder, or cannot be written.
    """
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ConfigError(f"--out {out} is there already: name a new folder")
    try:
        with atomic.replace_folder(out) as temporary:
            yield temporary
            apply_umask(temporary)
    except (OSError, SafetensorError) as error:  # a full disk raises either
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST) and out.exists():
            raise ConfigError(f"--out {out} was made by another command meanwhile: name a new folder") from None
        raise ConfigError(
            f"--out {out} cannot be written ({getattr(error, 'strerror', None) or error}): name a folder "
            "that can be written and has room"
        ) from None


def require_steps(run: Run, step: int) -> None:
    """Raises ConfigError if the run is further than its recipe goes."""
    if step > run.steps:
        raise ConfigError(
            f"steps={run.steps}, and {run.directory / 'checkpoints'} is at step {step} already; raise "
            "steps=, or begin anew with --from-scratch"
        )


def read_last_saved_step(folder: Path) -> int:
    """Returns the step that was saved last; 0: none was."""
    return max(_read_saved_file(folder) or 0, *_list_steps(folder), 0)


def _read_saved_file(folder: Path) -> int | None:
    """Reads the step in the file `saved`; None: it is absent or damaged."""
    text = small.read_line(folder / "saved") or ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _list_steps(folder: Path) -> list[int]:
    """Lists steps that have a checkpoint, whole or not; half-written ones end in .tmp."""
    names = [path.name for path in (folder / "checkpoints").glob("step_*[0-9]") if path.is_dir()]
    return [int(name[5:]) for name in names if name[5:].isdigit()]


def read_earlier_settings(folder: Path) -> dict[str, Any]:
    """Reads the DeepSpeed config that a run with something saved was resolved to; {}: there is none to go on with."""
    try:
        settings = small.read_json(folder / "ds_config.json") if read_last_saved_step(folder) else {}
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def note_saved_step(folder: Path, step: int) -> None:
    """Writes the newest saved step into the file `saved` of a run's folder."""
    atomic.write_file(folder / "saved", f"{step}\n", make=False)  # a run's folder that was taken away stays so


def set_run_aside(folder: Path) -> None:
    """Moves what an earlier run has written into earlier_N, so that beginning anew loses nothing. What else lies there
    stays. Raises OSError if it cannot be moved.
    """
    if old := [folder / name for name in OF_RUN if os.path.lexists(folder / name)]:
        earlier = _make_folder_for_earlier_run(folder)
        for path in old:
            if path.is_symlink():  # a relative one would name another place from there
                (earlier / path.name).symlink_to(os.path.realpath(path))
                path.unlink()
            else:
                path.rename(earlier / path.name)


def set_newer_aside(folder: Path, step: int) -> None:
    """Moves checkpoints and averages after `step` into earlier_N, the newest first, with a copy of metrics.jsonl."""
    newer = [
        path
        for kind in ("checkpoints", "averages", "reconstructed/*")
        for path in folder.glob(f"{kind}/step_*")
        if (number := path.name[5:].partition(".")[0]).isdecimal() and int(number) > step and path.suffix != ".tmp"
    ]
    if not newer:
        return
    _require_unread(newer)
    with report_disk_errors(folder):
        earlier = _make_folder_for_earlier_run(folder)
        if (folder / "metrics.jsonl").is_file():
            shutil.copyfile(folder / "metrics.jsonl", earlier / "metrics.jsonl")
        if (folder / "checkpoints").is_symlink():  # on another disk, where they stay
            (earlier / "checkpoints").symlink_to(_make_folder_for_earlier_run((folder / "checkpoints").resolve()))
        for path in sorted(newer, key=lambda path: int(path.name[5:].partition(".")[0]), reverse=True):
            (target := earlier / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        note_saved_step(folder, step)


def _require_unread(paths: Iterable[Path]) -> None:
    """Raises ConfigError if another command reads something that is to be moved aside."""
    for path in paths:
        if owner.is_held(path):
            raise ConfigError(f"{path} is being read by another command: wait for its end, and give this one again")


def _make_folder_for_earlier_run(folder: Path) -> Path:
    number = 1 + sum(1 for _ in folder.glob("earlier_*"))
    while (folder / f"earlier_{number}").exists():
        number += 1
    (folder / f"earlier_{number}").mkdir()
    return folder / f"earlier_{number}"


def describe_end(
    run: Run, folder: Path, first: int, done: int, saved: int, reason: str | None, left: bool = False
) -> str:
    """Returns the last line of training: how the run ended, and what to do next. `reason`: why it was stopped early;
    `left`: before what is due after the last step was drawn and measured.
    """
    if first == run.steps and not left:
        return f"{folder} is complete: {run.steps} steps. Raise steps= to train on, or name another folder."
    if done == run.steps and not left:
        drawn = f", samples in {folder / 'samples'}" if (folder / "samples").is_dir() else ""
        return f"complete: {done} steps, saved in {folder / 'checkpoints'}{drawn}"
    reason = reason or "another rank was stopped"
    return f"stopped at step {done} ({reason}), step {saved} is saved; the same command goes on"
