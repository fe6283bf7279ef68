"""Who may write where: leases among processes, identity of a run, holds, links, and what dead processes have left."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dstrain.checkpoint.store import Store
from dstrain.disk import atomic, lines, owner
from tests.support.launch import environment

CLAIM = """
import sys, time
from pathlib import Path
from dstrain.disk import owner
try:
    owner.claim_folder(Path(sys.argv[1]), "train")
except owner.Held:
    sys.exit(3)
print("claimed", flush=True)
time.sleep(float(sys.argv[2]))
"""
OTHER = "0123abcd-77-1000-{}"  # a mark of another machine


def begin(program: str, *words: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, words)], env=environment(), stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def claimed(tmp_path):
    """A run's folder that this process has claimed."""
    folder = tmp_path / "run"
    folder.mkdir()
    owner.claim_folder(folder, "train")
    owner.write_folder_identity(folder)
    yield folder
    owner.release_folder_claim(folder)


def test_one_of_many_has_the_folder(tmp_path):
    """Oracle: six processes that begin at once, without any lock: one claims, and the others are refused."""
    processes = [begin(CLAIM, tmp_path, 5) for _ in range(6)]
    codes = [process.wait(60) for process in processes]
    assert sorted(codes) == [0, 3, 3, 3, 3, 3]
    owner.claim_folder(tmp_path, "train")
    owner.release_folder_claim(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_killed_owner_gives_way_at_once(tmp_path):
    """Oracle: the process, alive and then killed; a refusal names it."""
    process = begin(CLAIM, tmp_path, 60)
    process.stdout.readline()
    with pytest.raises(owner.Held, match=rf"train \(process {process.pid} on "):
        owner.claim_folder(tmp_path, "train")
    process.kill()
    process.wait()
    owner.claim_folder(tmp_path, "train")
    owner.release_folder_claim(tmp_path)


@pytest.mark.parametrize("silent, free", [(1, False), (owner.SILENT_SECONDS + 60, True)])
def test_an_owner_on_another_machine_is_known_by_its_touch(tmp_path, silent, free):
    """Oracle: the age of a lease whose process nobody here can look for."""
    lease = tmp_path / ".lease-7"
    lease.write_text(OTHER.format("00000000") + "\nelsewhere\ntrain\n")
    os.utime(lease, (time.time() - silent,) * 2)
    if free:
        assert owner.claim_folder(tmp_path, "train").number == 8
        owner.release_folder_claim(tmp_path)
    else:
        with pytest.raises(owner.Held, match="process 77 on elsewhere"):
            owner.claim_folder(tmp_path, "train")


def test_a_living_owner_touches_its_marks(claimed, monkeypatch):
    """Oracle: the time of the lease, set back by an hour."""
    monkeypatch.setattr(owner, "BEAT_SECONDS", 0.05)
    hold = owner.Hold(claimed / "step")
    (mark,) = claimed.glob("*.hold")
    os.utime(mark, (1, 1))
    for _ in range(100):
        if mark.stat().st_mtime > 1:
            break
        time.sleep(0.05)
    assert mark.stat().st_mtime > 1
    hold.release()
    assert not mark.exists()


WRITES = {
    "a file": lambda folder: atomic.write_file(folder / "saved", "5"),
    "a file in a folder": lambda folder: atomic.write_file(folder / "samples" / "a.png", b"5"),
    "a line": lambda folder: lines.append_lines(folder / "log.txt", "5\n"),
    "a folder": lambda folder: _fill(folder / "out"),
    "a checkpoint": lambda folder: _save(folder),
}


def _fill(out: Path) -> None:
    with atomic.create_folder_atomically(out) as temporary:
        (temporary / "a").write_text("5")


def _save(folder: Path) -> None:
    store = Store(folder / "checkpoints")
    if not store.save(
        len(store.list_steps()) + 1, lambda path: (path / "a-00000-of-00001.bin").write_bytes(b"5") and None
    ):
        raise owner.TakenAway(store.error)


def _replace(folder: Path, identity: str | None) -> None:
    folder.rename(folder.with_name("moved"))
    folder.mkdir()
    if identity:
        (folder / ".run").write_text(identity + "\n")


TAKEN = {
    "moved": lambda folder: folder.rename(folder.with_name("moved")),
    "removed": shutil.rmtree,
    "replaced by an empty one": lambda folder: _replace(folder, None),
    "replaced by another run": lambda folder: _replace(folder, "0" * 32),
    "taken over": lambda folder: (folder / ".lease-2").write_text(OTHER.format("00000000") + "\nelsewhere\ntrain\n"),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("taken", TAKEN)
def test_nothing_is_written_into_what_is_no_longer_ours(claimed, write, taken):
    """Oracle: by hand: the folder and all beside it, before and after the write, which raises TakenAway."""
    WRITES[write](claimed)
    TAKEN[taken](claimed)
    before = sorted((path, path.is_file() and path.read_bytes()) for path in claimed.parent.rglob("*"))
    with pytest.raises(owner.TakenAway):
        WRITES[write](claimed)
    assert before == sorted((path, path.is_file() and path.read_bytes()) for path in claimed.parent.rglob("*"))


def test_hidden_files_may_be_cleared_away(claimed):
    """Oracle: a run whose lease somebody has removed: the identity is enough."""
    (claimed / ".lease-1").unlink()
    for write in WRITES.values():
        write(claimed)


def test_storage_that_fails_is_no_other_run(claimed, monkeypatch):
    """Oracle: EIO on a read of the identity: the write fails by it, and the next one succeeds."""
    read = owner._read_text

    def fail(path):
        if path.name == owner.IDENTITY:
            raise OSError(5, "Input/output error")
        return read(path)

    monkeypatch.setattr(owner, "_read_text", fail)
    with pytest.raises(OSError, match="Input/output error") as raised:
        atomic.write_file(claimed / "saved", "5")
    assert not isinstance(raised.value, owner.TakenAway)
    monkeypatch.undo()
    atomic.write_file(claimed / "saved", "5")


def test_a_run_keeps_its_identity(tmp_path):
    """Oracle: the folder's file: the same in a second claim and after a move; another one in another folder."""
    found = []
    for name in ("a", "a", "moved", "b"):
        if name == "moved":
            (tmp_path / "a").rename(tmp_path / "moved")
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        owner.claim_folder(folder, "train")
        found.append(owner.write_folder_identity(folder).identity)
        owner.release_folder_claim(folder)
    assert len(set(found[:3])) == 1 and found[3] != found[0]


def test_links_and_pipes_are_not_written_through(tmp_path):
    """Oracle: the file that the links name, and where they stood: a whole file, or an error that says what it is."""
    mine, link = tmp_path / "mine", tmp_path / "log.txt"
    mine.write_text("mine\n")
    link.symlink_to(mine)
    with pytest.raises(OSError, match="it is a link, which nothing is written through"):
        lines.append_lines(link, "more\n")
    with pytest.raises(OSError, match="it is a link"):
        lines.remove_partial_last_line(link)
    atomic.write_file(link, "new")
    assert not link.is_symlink() and link.read_text() == "new" and mine.read_text() == "mine\n"
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(OSError, match="it is no file"):
        lines.append_lines(tmp_path / "events.jsonl", "more\n")


def test_what_dead_processes_have_left_goes_and_no_other(tmp_path):
    """Oracle: by hand: temporary files and folders of a killed process, a living one, and another machine's."""
    program = """
import os, signal, sys
from pathlib import Path
from dstrain.disk import owner
path = Path(sys.argv[1])
owner.make_hidden_path(path / "a").write_text("half")
owner.make_hidden_path(path / "out").mkdir()
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = begin(program, tmp_path)
    assert process.wait(60) == -signal.SIGKILL
    stays = [owner.make_hidden_path(tmp_path / "a"), *(tmp_path / f".a.{OTHER.format('0' * 7 + n)}.tmp" for n in "12")]
    stays += [tmp_path / name for name in (".a.tmp", "a.tmp", ".notes.0-0-0-0.tmp")]
    for path in stays:
        path.write_text("half")
    os.utime(stays.pop(2), (1, 1))  # so old that nobody writes it
    assert len(os.listdir(tmp_path)) == 8
    atomic.write_file(tmp_path / "b", "whole")
    assert sorted(tmp_path.iterdir()) == sorted([*stays, tmp_path / "b"])


def test_a_checkpoint_that_is_read_stays(tmp_path):
    """Oracle: the steps that a store of one step keeps: the held one, too, until it is released or its reader dies."""
    store = Store(tmp_path, keep=1)

    def save(step):
        assert store.save(step, lambda path: (path / "a-00000-of-00001.bin").write_bytes(b"5") and None), store.error

    save(1)
    hold = owner.Hold(tmp_path / "step_00000001")
    save(2)
    assert store.list_steps() == [1, 2]
    hold.release()
    save(3)
    assert store.list_steps() == [3]
    program = "import sys, time\nfrom pathlib import Path\nfrom dstrain.disk.owner import Hold\n"
    reader = begin(program + "Hold(Path(sys.argv[1]))\nprint(flush=True)\ntime.sleep(60)", tmp_path / "step_00000003")
    reader.stdout.readline()
    save(4)
    assert store.list_steps() == [3, 4]
    reader.kill()
    reader.wait()
    save(5)
    assert store.list_steps() == [5] and not list(tmp_path.glob("*.hold"))


def claim(folder: Path, *more: object) -> owner.Claim:
    """Claims a folder, identifies it, and gives it back."""
    owner.claim_folder(folder, "train")
    try:
        return owner.write_folder_identity(folder, *more)
    finally:
        owner.release_folder_claim(folder)


def test_a_copy_is_a_run_of_its_own(tmp_path):
    """Oracle: by hand: another identity in a copy, the same one after a move and at the old path, with the old inode
    or, as from a backup, without.
    """
    first = tmp_path / "a"
    first.mkdir()
    identity = claim(first).identity
    shutil.copytree(first, tmp_path / "b")
    assert claim(tmp_path / "b").identity not in (None, identity) and claim(first).identity == identity
    first.rename(tmp_path / "moved")
    assert claim(tmp_path / "moved").identity == identity
    shutil.copytree(tmp_path / "moved", tmp_path / "backup")
    shutil.rmtree(tmp_path / "moved")
    (tmp_path / "backup").rename(tmp_path / "moved")
    assert claim(tmp_path / "moved").identity == identity


def pretend_inode(folder: Path, name: str) -> None:
    """Writes the folder's own inode into a record that was copied there, as if the original's were the same number."""
    lines = (folder / name).read_text().splitlines()
    place = next(number for number, line in enumerate(lines) if line.replace(":", "").isdigit() and ":" in line)
    lines[place] = f"{lines[place].partition(':')[0]}:{os.stat(folder).st_ino}"
    (folder / name).write_text("\n".join(lines) + "\n")


def test_a_copy_with_the_same_inode_is_no_move(claimed):
    """Oracle: two disks, which count inodes alike: the original is still there, and the copy is none of it, neither by
    its identity nor by the lease that came along.
    """
    before, copy = owner.read_run_identity(claimed), claimed.with_name("copy")
    shutil.copytree(claimed, copy)
    for name in (".run", ".lease-1"):
        pretend_inode(copy, name)
    assert owner.find_other_owning_run(copy, copy) == str(claimed)
    assert claim(copy).identity not in (None, before)


def test_of_a_backup_and_what_it_was_made_of_one_is_the_run(tmp_path):
    """Oracle: by hand: `mv m m.bak; cp -r m.bak m`: one of the two keeps the identity, whichever begins first."""
    for name, turn in (("a", ("", ".bak")), ("b", (".bak", ""))):
        run = tmp_path / name
        run.mkdir()
        identity = claim(run).identity
        run.rename(tmp_path / f"{name}.bak")
        shutil.copytree(tmp_path / f"{name}.bak", run)
        found = [claim(tmp_path / f"{name}{end}").identity for end in turn]
        assert found.count(identity) == 1 and None not in found


def test_a_copy_of_a_living_run_is_free(claimed):
    """Oracle: the lease that came along names a living process, which writes elsewhere."""
    copy = claimed.with_name("copy")
    shutil.copytree(claimed, copy)
    assert (copy / ".lease-1").is_file()
    claim(copy)
    with pytest.raises(owner.Held):
        owner.claim_folder(claimed, "train")
    claimed.rename(moved := claimed.with_name("moved"))
    with pytest.raises(owner.Held):
        owner.claim_folder(moved, "train")
    moved.rename(claimed)


LEASES = {
    "empty": lambda lease: lease.touch(),
    "a folder": lambda lease: lease.mkdir(),
    "another machine's": lambda lease: lease.write_text(OTHER.format("00000000") + "\nelsewhere\ntrain\n"),
}


@pytest.mark.parametrize("kind", LEASES)
@pytest.mark.parametrize("ahead", [-3600, 0, 3600])
def test_a_lease_that_nobody_touches_gives_way(tmp_path, monkeypatch, kind, ahead):
    """Oracle: the clock: whatever a lease is and says of its time, the next has the folder; till then it is named."""
    monkeypatch.setattr(owner, "SILENT_SECONDS", 0.5)
    LEASES[kind](lease := tmp_path / ".lease-3")
    os.utime(lease, (time.time() + ahead,) * 2)
    if ahead == 0:
        with pytest.raises(owner.Held, match=r"\.lease-3"):
            owner.claim_folder(tmp_path, "train")
        time.sleep(1)
    assert owner.claim_folder(tmp_path, "train").number == 4
    owner.release_folder_claim(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_lease_ahead_of_the_clock_that_is_touched_stays(tmp_path, monkeypatch):
    """Oracle: a lease whose time moves, an hour ahead."""
    monkeypatch.setattr(owner, "SILENT_SECONDS", 1.0)
    LEASES["another machine's"](lease := tmp_path / ".lease-3")
    os.utime(lease, (time.time() + 3600,) * 2)
    timer = threading.Timer(0.3, os.utime, (lease, (time.time() + 3605,) * 2))
    timer.start()
    with pytest.raises(owner.Held, match="process 77 on elsewhere"):
        owner.claim_folder(tmp_path, "train")
    timer.join()


def test_an_identity_that_was_cleared_away_comes_again(claimed):
    """Oracle: the file before, as long as the lease stands; without both the folder is nobody's."""
    before = (claimed / ".run").read_bytes()
    for write in WRITES.values():
        (claimed / ".run").unlink()
        write(claimed)
        assert (claimed / ".run").read_bytes() == before
    (claimed / ".run").unlink()
    (claimed / ".lease-1").unlink()
    with pytest.raises(owner.TakenAway):
        WRITES["a file"](claimed)


def test_a_full_disk_leaves_no_lease(tmp_path, monkeypatch):
    """Oracle: the folder, empty as before."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match="No space left"):
        owner.claim_folder(tmp_path, "train")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []
