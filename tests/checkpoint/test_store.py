"""Oracle: the bytes that were saved; which checkpoint must survive is counted beside the store."""

import errno
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstrain.checkpoint import store as store_module
from dstrain.checkpoint.manifest import NAME, Digest, hash_files, read_manifest
from dstrain.checkpoint.store import ROUTINE, STOP, TROUBLE, Store
from dstrain.disk import sealed
from dstrain.distributed import group


def content(step: int, name: str) -> bytes:
    return random.Random(f"{step} {name}").randbytes(200 + len(name))


NAMES = ("net-00000-of-00001.safetensors", "common.safetensors", "deeper/state.bin")


def write(step: int):
    def into(folder: Path) -> None:
        for name in NAMES:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content(step, name))

    return into


def whole(store: Store, step: int) -> bool:
    return all((store.folder / f"step_{step:08d}" / n).read_bytes() == content(step, n) for n in NAMES)


def save(store: Store, *steps: int) -> None:
    for step in steps:
        assert store.save(step, write(step), {"loss": step / 7}), store.error


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_newest_is_what_was_saved_last(tmp_path):
    """Oracle: the steps, bytes and extra that were saved, entries of the folder by hand, json for the manifest."""
    store = Store(tmp_path / "run" / "checkpoints", keep=2)
    assert store.find_newest_checkpoint() is None and store.list_steps() == []
    save(store, 5, 10, 15)
    assert store.find_newest_checkpoint() == (15, store.folder / "step_00000015")
    assert whole(store, 15) and whole(store, 10)
    assert entries(store.folder) == {"step_00000010", "step_00000015", "newest"}
    assert (store.folder / "newest").read_text() == "step_00000015\n"
    said = read_manifest(store.folder / "step_00000015")
    assert said["step"] == 15 and said["world"] == 1 and said["extra"] == {"loss": 15 / 7}
    assert said["files"].keys() == set(NAMES)
    assert json.loads((store.folder / "step_00000015" / "manifest.json").read_bytes())["body"] == said


def test_a_step_that_verifies_is_not_written_again(tmp_path):
    """Oracle: the manifest's stat before; a writer that fails the test when it is called."""
    store = Store(tmp_path)
    save(store, 5)
    path = tmp_path / "step_00000005" / "manifest.json"
    before = path.stat().st_mtime_ns, path.stat().st_ino
    assert Store(tmp_path).save(5, lambda folder: pytest.fail("written again"))
    assert Store(tmp_path).begin_save(5) is None
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before


def test_a_damaged_step_is_written_anew(tmp_path):
    """Oracle: the step and file that were damaged; after another save its bytes and the folder's entries."""
    store = Store(tmp_path)
    save(store, 5, 10)
    (tmp_path / "step_00000010" / NAMES[0]).unlink()
    again, said = Store(tmp_path), []
    assert again.find_newest_checkpoint(said.append)[0] == 5
    assert NAMES[0] + " is missing" in said[0] and "step_00000010" in said[0]
    save(again, 10)
    assert again.find_newest_checkpoint()[0] == 10 and whole(again, 10)
    assert entries(tmp_path) == {"step_00000005", "step_00000010", "newest"}


def test_failures_leave_nothing_behind(tmp_path):
    """Oracle: the folder's entries before each failure; the errno raised, and a need of 2^60 bytes."""
    store = Store(tmp_path)
    save(store, 5)
    before = entries(tmp_path)

    def fail(folder: Path) -> None:
        (folder / "half").write_bytes(b"1")
        raise OSError(28, "No space left on device")

    assert not store.save(10, fail)
    assert store.error == "OSError: [Errno 28] No space left on device"
    assert entries(tmp_path) == before
    assert store.begin_save(10, need_bytes=1 << 60) is None
    assert "MB free" in store.error and entries(tmp_path) == before
    assert store.find_newest_checkpoint()[0] == 5
    save(store, 10)
    assert store.error is None


def test_leftovers_are_ignored_and_removed(tmp_path):
    """Oracle: the step that is whole, beside a half-written one, a false hint and a renamed folder."""
    store = Store(tmp_path)
    save(store, 5)
    (tmp_path / "step_00000010.tmp").mkdir()
    (tmp_path / "step_00000010.tmp" / "half").write_bytes(b"1")
    (tmp_path / "newest").write_text("step_00000010\n")
    assert store.find_newest_checkpoint()[0] == 5
    save(store, 10)
    assert not (tmp_path / "step_00000010" / "half").exists()
    shutil.move(tmp_path / "step_00000010", tmp_path / "step_00000012")
    said = []
    assert store.find_newest_checkpoint(said.append)[0] == 5 and "manifest.json is of step 10" in said[0]


def test_a_thousand_corruptions_are_found(tmp_path):
    """Oracle: the file that was damaged, which is named; the older step, and the newest once it is restored."""
    chance = random.Random(0)
    store = Store(tmp_path)
    save(store, 5, 10)
    newest = tmp_path / "step_00000010"
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    assert len(files) == len(NAMES) + 1
    for trial in range(1000):
        path = chance.choice(files)
        data = path.read_bytes()
        fault = chance.choice(("truncate", "flip", "delete", "grow"))
        at = chance.randrange(len(data))
        if fault == "delete":
            path.unlink()
        elif fault == "truncate":
            path.write_bytes(data[:at])
        elif fault == "grow":
            path.write_bytes(data[:at] + chance.randbytes(1) + data[at:])
        else:
            path.write_bytes(data[:at] + bytes([data[at] ^ chance.randrange(1, 256)]) + data[at + 1 :])
        said: list[str] = []
        assert store.find_newest_checkpoint(said.append) == (5, tmp_path / "step_00000005"), (trial, path, fault, at)
        assert len(said) == 1 and path.relative_to(newest).as_posix() in said[0]
        path.write_bytes(data)
    assert store.find_newest_checkpoint()[0] == 10


def test_blocks_of_a_large_file_are_all_hashed(tmp_path, monkeypatch):
    """Oracle: a flip of each byte in turn and a swap of two blocks: the only step no longer counts."""
    import dstrain.checkpoint.manifest as module

    monkeypatch.setattr(module, "_BLOCK_BYTES", 64)
    store = Store(tmp_path)
    save(store, 5)
    path = tmp_path / "step_00000005" / NAMES[0]
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert store.find_newest_checkpoint(lambda text: None) is None
    path.write_bytes(data[64:128] + data[:64] + data[128:])
    assert store.find_newest_checkpoint(lambda text: None) is None


@pytest.mark.parametrize("size", [0, 1 << 26, (1 << 26) + 1])
def test_hashes_of_any_version(tmp_path, size):
    """Oracle: hashlib on the zeros of a file, by the words of manifest.py: blake2b of the blake2b
    of blocks of 64 MB.
    """
    with open(tmp_path / "file", "wb") as file:
        file.truncate(size)
    whole = hashlib.blake2b(digest_size=32)
    for count in [min(size, 1 << 26), *([size - (1 << 26)] if size > 1 << 26 else [])]:
        whole.update(hashlib.blake2b(bytes(count), digest_size=32).digest())
    assert hash_files(tmp_path, ["file"]) == {"file": {"size": size, "hash": whole.hexdigest()}}


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 200), max_size=12), threads=st.integers(0, 3))
def test_hashes_while_writing(sizes, threads):
    """Oracle: hash_files of the file that holds the same bytes, for pieces of any sizes, with and without threads."""
    import dstrain.checkpoint.manifest as module

    with (
        TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        ThreadPoolExecutor(threads or 1) as pool,
    ):
        patch.setattr(module, "_BLOCK_BYTES", 64)
        digest, pieces = Digest(pool if threads else None), [random.Random(size).randbytes(size) for size in sizes]
        for piece in pieces:
            digest.update(memoryview(piece))
        (Path(folder) / "file").write_bytes(b"".join(pieces))
        assert {"file": digest.make_manifest_entry()} == hash_files(Path(folder), ["file"])


def test_a_file_that_was_hashed_while_it_was_written_is_not_read(tmp_path):
    """Oracle: the bytes that the kernel counts as read; the file's own for its hash; one byte less, or another byte."""
    store, data = Store(tmp_path), memoryview(random.Random(0).randbytes(1 << 22))

    def write(folder: Path, hashed: bool = True) -> dict[str, dict]:
        digest = Digest()
        digest.update(data)
        (folder / NAMES[0]).write_bytes(data)
        return {NAMES[0]: digest.make_manifest_entry()} if hashed else {}

    def truncated(folder: Path) -> dict[str, dict]:
        hashes = write(folder)
        os.truncate(folder / NAMES[0], len(data) - 1)
        return hashes

    for step, hashed in ((1, True), (2, False)):
        before = bytes_read()
        assert store.save(step, lambda folder: write(folder, hashed)), store.error
        assert (bytes_read() - before < len(data)) == hashed
        assert read_manifest(tmp_path / f"step_{step:08d}")["files"] == hash_files(
            tmp_path / f"step_{step:08d}", [NAMES[0]]
        )
    assert not store.save(3, truncated) and "has another size than was written" in store.error
    assert store.find_newest_checkpoint()[0] == 2
    path = tmp_path / "step_00000002" / NAMES[0]
    path.write_bytes(bytes(data[:-1]) + bytes([data[-1] ^ 1]))
    assert store.find_newest_checkpoint(lambda text: None)[0] == 1


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@settings(max_examples=40, deadline=None)
@given(
    gaps=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    keep=st.integers(2, 4),
    keep_every=st.sampled_from([0, 5, 8]),
    scores=st.lists(st.sampled_from([None, 1.0, 2.0, 3.0, 0.5]), min_size=12, max_size=12),
    damage=st.sets(st.integers(0, 11)),
)
def test_what_is_kept(gaps, keep, keep_every, scores, damage):
    """Oracle: the rule (newest keep, multiples, lowest score) counted beside the store, over drawn gaps and damage."""
    with TemporaryDirectory() as folder:
        store, step, saved, broken, scored, there = Store(folder, keep, keep_every), 0, [], set(), {}, set()
        for i, gap in enumerate(gaps):
            step += gap
            assert store.save(step, write(step), {"score": scores[i]}), store.error
            saved.append(step)
            if scores[i] is not None:
                scored[step] = scores[i]
            whole_steps = [s for s in saved if s not in broken]
            there.add(step)  # what has been deleted cannot be the best again
            best = min(there & scored.keys() - broken, key=lambda s: (scored[s], s), default=None)
            expected = {*whole_steps[-keep:], *(s for s in whole_steps if keep_every and s % keep_every == 0)} | (
                {best} - {None}
            )
            assert set(store.list_steps()) == expected
            there = expected
            assert store.find_best_checkpoint() == (None if best is None else (best, scored[best]))
            assert best is None or (store.folder / "best").read_text() == f"step_{best:08d}\n"
            if i in damage:
                (store.folder / f"step_{step:08d}" / NAMES[1]).unlink()
                broken.add(step)
                scored.pop(step, None)
                store.find_newest_checkpoint(lambda text: None)
        fine = [s for s in saved if s not in broken and s in store.list_steps()]
        assert (store.find_newest_checkpoint(lambda text: None) or [None])[0] == (fine[-1] if fine else None)


@settings(max_examples=25, deadline=None)
@given(
    kinds=st.lists(st.sampled_from([ROUTINE, ROUTINE, STOP, TROUBLE]), min_size=1, max_size=10), keep=st.integers(2, 3)
)
def test_what_is_saved_in_trouble_pushes_out_nothing(kinds, keep):
    """Oracle: lists beside the store: the newest `keep` that are good, and that are routine; of trouble the newest."""
    with TemporaryDirectory() as folder:
        store, good, routine = Store(folder, keep), [], []
        for step, kind in enumerate(kinds, 1):
            assert store.save(step, write(step), {"kind": kind}), store.error
            good += [step] * (kind != TROUBLE)
            routine += [step] * (kind == ROUTINE)
            kept = sorted({*good[-keep:], *routine[-keep:], step})
            assert store.list_steps() == kept
            of = {wanted: [s for s in kept if kinds[s - 1] == wanted] for wanted in (ROUTINE, STOP)}
            assert store.list_possible_rollback_steps(step) == (of[ROUTINE] or of[STOP])
            if of[ROUTINE]:
                last = of[ROUTINE].pop()
                assert store.list_possible_rollback_steps(step, latest_rollback=last) == (
                    of[ROUTINE] or [s for s in of[STOP] if s < last]
                )


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.sampled_from([None, 1.0, 0.5, float("nan"), float("inf"), -float("inf"), "0.1", [1]]), min_size=1, max_size=8
    )
)
def test_the_best_score_is_finite(scores):
    """Oracle: min of the finite numbers among the checkpoints that are there; a NaN neither is the
    best nor hides it.
    """
    with TemporaryDirectory() as folder:
        store, best = Store(folder), None
        for step, score in enumerate(scores, 1):
            assert store.save(step, write(step), {"score": score}), store.error
            if score in (1.0, 0.5) and (best is None or score < best[1]):
                best = step, score
            assert store.find_best_checkpoint() == best and (best is None or best[0] in store.list_steps())


def test_scores_of_another_metric_do_not_count(tmp_path):
    """Oracle: the lowest score of each metric by hand, where a run went on with another save.best;
    no name is a loss.
    """
    extras = [
        {"score": 0.5},
        {"score": 0.1, "metric": "loss"},
        {"score": 40.0, "metric": "fd"},
        {"score": 30.0, "metric": "fd"},
        {"score": 35.0, "metric": "fd"},
    ]
    for step, extra in enumerate(extras, 1):
        assert Store(tmp_path, keep=5).save(step, write(step), extra)
    for metric, best in (("loss", (2, 0.1)), ("fd", (4, 30.0)), ("accuracy", None)):
        store = Store(tmp_path, keep=2, metric=metric)
        assert store.find_best_checkpoint() == best
    assert Store(tmp_path, keep=2, metric="loss").save(6, write(6), {"score": 36.0, "metric": "fd"})
    assert store.list_steps() == [2, 5, 6] and (tmp_path / "best").read_text() == "step_00000002\n"


SEALED = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 9) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=80, deadline=None)
@given(
    key=st.sampled_from(["files", "step", "world", "extra", "versions", "size", "hash", "name", "all"]),
    value=SEALED,
    absent=st.booleans(),
)
def test_a_sealed_manifest_may_say_anything(key, value, absent):
    """Oracle: the step before, and a line that names the one passed over; or the step itself where it is sound."""
    with TemporaryDirectory() as folder:
        store = Store(folder)
        save(store, 5, 10)
        path = Path(folder) / "step_00000010" / NAME
        body = read_manifest(path.parent)
        entry = body["files"][NAMES[0]]
        if key == "all":
            body = value
        elif key == "name":
            body["files"] = {f"../{NAMES[0]}": entry}
        else:
            place = entry if key in ("size", "hash") else body
            before = place.pop(key)
            if not absent:
                place[key] = value
            if not absent and value == before and type(value) is type(before):
                return
        path.write_bytes(sealed.render_json_with_hash(body))
        lines: list[str] = []
        newest = store.find_newest_checkpoint(lines.append)
        sound = key in ("extra", "versions") or (key == "world" and type(value) is int and value > 0 and not absent)
        if newest[0] == 10:
            assert sound or (key == "files" and value == {} and not absent)
        else:
            assert newest[0] == 5 and len(lines) == 1 and "step_00000010" in lines[0]
        assert store.find_best_checkpoint() is None and store.list_possible_rollback_steps(10)


def test_a_manifest_that_storage_cannot_give(tmp_path, monkeypatch):
    """Oracle: the system's error itself, which is no damage: what it hides may be whole."""
    save(Store(tmp_path), 5)

    def read_bytes(path, most):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("dstrain.disk.small.read_bytes", read_bytes)
    with pytest.raises(OSError, match="Input/output error"):
        read_manifest(tmp_path / "step_00000005")


@pytest.mark.parametrize("name", [NAME, NAMES[0]])
@pytest.mark.parametrize("kind", ["pipe", "endless", "sparse", "folder"])
def test_only_plain_files_of_bounded_size_are_read(tmp_path, name, kind):
    """Oracle: the step before, at once: a pipe, /dev/zero, a file of 4 TB and a folder in the place of a file."""
    store = Store(tmp_path)
    save(store, 5, 10)
    path = tmp_path / "step_00000010" / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with open(path, "wb") as file:
            file.truncate(1 << 42)
    lines: list[str] = []
    assert store.find_newest_checkpoint(lines.append)[0] == 5 and name in lines[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_while_checkpoints_are_put_aside(tmp_path):
    """Oracle: kill -9 after each renaming: what is left is what was there at an earlier time, and nothing is lost."""
    for renames in range(4):
        store = Store(tmp_path / str(renames), keep=9)
        save(store, 5, 10, 15, 20)

        def put_aside() -> None:
            rename, left = os.rename, [renames]

            def counted(*paths) -> None:
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                rename(*paths)

            os.rename = counted
            store.set_newer_steps_aside(5)

        os.waitpid(in_child(put_aside), 0)
        assert (
            store.list_steps() == [5, 10, 15, 20][: 4 - renames]
            and store.list_steps_put_aside() == [5, 10, 15, 20][4 - renames :]
        )
        assert store.find_newest_checkpoint(pytest.fail)[0] == store.list_steps()[-1]
    save(store, 10)  # reached anew: what was put aside up to it goes
    assert store.list_steps() == [5, 10] and store.list_steps_put_aside() == [15, 20] and whole(store, 10)
    store.restore_step_put_aside(20)
    assert store.find_newest_checkpoint(pytest.fail)[0] == 20 and whole(store, 20)


@pytest.mark.parametrize("aside", [False, True])
def test_a_step_that_is_a_link(tmp_path, aside):
    """Oracle: by hand: a step put elsewhere goes as others do, and the next save succeeds; its files stay there."""
    store, elsewhere = Store(tmp_path / "checkpoints", keep=1), tmp_path / "elsewhere"
    save(store, 5, 10)
    path = store.folder / "step_00000010"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    if aside:
        save(Store(store.folder, keep=2), 15)
        for _ in range(2):  # the second time, one put aside earlier gives way
            store.set_newer_steps_aside(5)
            path.symlink_to(elsewhere)
        path.unlink()
    save(store, 20, 25)
    assert entries(store.folder) == {"newest", "step_00000025"} and entries(elsewhere) >= {NAME}


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_a_folder_that_was_taken_away_is_not_made_again(tmp_path, when):
    """Oracle: by hand: the run's folder is renamed before a save, within it, or once its step has its name."""
    run, away = tmp_path / "run", tmp_path / "away"
    run.mkdir()
    store = Store(run / "checkpoints")
    save(store, 5)
    if when == "before":
        run.rename(away)
        assert not store.save(10, write(10)) and "No such file" in store.error
    elif when == "between":
        write(10)(store.begin_save(10))
        store._finish = lambda folder: run.rename(away) and {}  # as everything is written
        assert not store.commit_save(10)
    else:
        seal = store._publish_step
        store._publish_step = lambda *words: (seal(*words), run.rename(away))
        save(store, 10)
    newest, _ = Store(away / "checkpoints").find_newest_checkpoint(pytest.fail)
    assert entries(tmp_path) == {"away"} and newest == (10 if when == "after" else 5)


def test_an_error_is_of_the_latest_save(tmp_path):
    """Oracle: by hand: after a save that failed, a step that is there already is no failure."""
    store = Store(tmp_path)
    save(store, 5)
    assert not store.save(10, lambda folder: 1 / 0) and store.error
    assert store.save(5, write(5)) and store.error is None


def test_a_step_is_put_aside_again(tmp_path):
    """Oracle: the content of the later of two checkpoints of one step."""
    store = Store(tmp_path, keep=5)
    save(store, 5, 10)
    store.set_newer_steps_aside(5)
    (tmp_path / "step_00000010.aside" / "of the first time").touch()
    save(store, 10)
    store.set_newer_steps_aside(5)
    assert store.list_steps() == [5] and store.list_steps_put_aside() == [10]
    assert not (tmp_path / "step_00000010.aside" / "of the first time").exists()


def in_child(work) -> int:
    """Runs work() in a forked process, which ends with it: its process id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_at_any_moment_loses_at_most_one_interval(tmp_path):
    """Oracle: the last step the killed process said was saved, or the one after it; its bytes."""
    chance = random.Random(0)
    inside = 0
    for _ in range(30):
        reading, writing = os.pipe()

        def save_forever() -> None:
            store = Store(tmp_path)
            step = (store.find_newest_checkpoint() or (0, None))[0]
            while True:
                step += 1
                save(store, step)
                os.write(writing, step.to_bytes(4, "little"))

        child = in_child(save_forever)
        os.close(writing)
        first = os.read(reading, 4)  # it saves: from here on, at any moment
        time.sleep(chance.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        with open(reading, "rb") as pipe:
            data = first + pipe.read()
        last = int.from_bytes(data[-4:], "little")
        inside += any(name.endswith(".tmp") for name in entries(tmp_path))
        found = Store(tmp_path).find_newest_checkpoint(pytest.fail)
        assert (found[0] if found else 0) in (last, last + 1)
        assert found is None or whole(Store(tmp_path), found[0])
    assert inside > 3, "the kills did not meet a save"
    save(Store(tmp_path), found[0] + 1)
    assert not [name for name in entries(tmp_path) if name.endswith(".tmp")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("files, size", [(1, 65536), (60, 100)], ids=["in a shard", "in the manifest"])
def test_a_full_disk_leaves_the_older_checkpoint(tmp_path, files, size):
    """Oracle: the kernel's limit on a file's size, hit by a save; entries and bytes of the others."""
    save(Store(tmp_path), 5)
    before = entries(tmp_path)

    def write_much(folder: Path) -> None:
        for i in range(files):
            (folder / f"{i}.bin").write_bytes(bytes(size))

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        store = Store(tmp_path)
        assert not store.save(10, write_much)
        assert "File too large" in store.error, store.error
        assert store.save(15, write(15)), store.error  # training went on, and so does saving

    assert os.waitpid(in_child(fill), 0)[1] == 0
    assert Store(tmp_path).find_newest_checkpoint(pytest.fail)[0] == 15 and whole(Store(tmp_path), 5)
    assert entries(tmp_path) == before | {"step_00000015"}


def together(folder: str) -> None:
    """What one of two ranks sees: saves, one that fails on rank 1, the newest after damage; into a file of its own."""
    store, seen, rank = Store(folder), [], group.rank()

    def write_mine(path: Path) -> None:
        (path / f"net-{rank:05d}-of-00002.safetensors").write_bytes(bytes([rank] * 100))
        if rank == 0:
            (path / "common.safetensors").write_bytes(b"common")

    def fail_on_second(path: Path) -> None:
        write_mine(path)
        if rank == 1:
            raise OSError(28, "No space left on device")

    for step in (1, 2, 3):
        seen.append((store.save(step, write_mine, {"from": rank}), store.error))
    seen.append((store.save(4, fail_on_second), store.error))
    seen.append((store.begin_save(4, need_bytes=1 << 60 if rank else 0), "free" in store.error))
    seen.append(store.find_newest_checkpoint())
    path = Path(folder)
    for name in ("step_00000003/net-00001-of-00002.safetensors", "step_00000002/manifest.json"):
        if rank == 0:
            data = bytearray((path / name).read_bytes())
            data[50] ^= 4
            (path / name).write_bytes(bytes(data))
        said: list[str] = []
        seen.append(store.find_newest_checkpoint(said.append))
        passed_over = 1 if seen[-1] else 2
        assert len(said) == (0 if rank else passed_over), said
    Path(f"{folder}.{rank}").write_bytes(pickle.dumps(seen))


def test_two_ranks_agree(tmp_path, on_ranks):
    """Oracle: the other rank's view, and both against a list written by hand; entries and manifest of the folder."""
    folder = tmp_path / "checkpoints"
    on_ranks(2, together, str(folder))
    first, second = (pickle.loads(Path(f"{folder}.{rank}").read_bytes()) for rank in (0, 1))
    assert first == second
    fine = (True, None)
    assert first == [
        fine,
        fine,
        fine,
        (False, "rank 1: OSError: [Errno 28] No space left on device"),
        (None, True),
        (3, folder / "step_00000003"),
        (2, folder / "step_00000002"),
        None,
    ]
    assert entries(folder) == {"step_00000002", "step_00000003", "newest"}
    assert read_manifest(folder / "step_00000003")["extra"] == {"from": 0}
    assert len(read_manifest(folder / "step_00000003")["files"]) == 3


@pytest.mark.parametrize("count", range(1, 6))
def test_how_many_faults_are_named(tmp_path, count):
    """Oracle: by hand: three of them by name, and the number of the others."""
    store = Store(tmp_path)
    assert store.save(1, lambda path: [(path / f"{number}.bin").write_bytes(b"x") for number in range(6)] and None)
    for number in range(count):
        (tmp_path / "step_00000001" / f"{number}.bin").unlink()
    reason = store.find_checkpoint_fault(1)
    assert reason.count("is missing") == min(count, 3)
    assert reason.endswith("is missing" if count <= 3 else f" and {count - 3} more")


def test_a_hash_that_is_taken_while_writing(tmp_path, monkeypatch):
    """Oracle: the hash of the finished file, at every size around two borders of blocks; each file is synced once."""
    synced: list[int] = []
    monkeypatch.setattr("dstrain.checkpoint.manifest._BLOCK_BYTES", 8)
    monkeypatch.setattr(os, "fsync", synced.append)
    for size in range(20):
        data, digest = bytes(range(size)), Digest()
        for start in range(0, size, 5):
            digest.update(memoryview(data[start : start + 5]))
        (tmp_path / "a").write_bytes(data)
        assert {"a": digest.make_manifest_entry()} == hash_files(tmp_path, ["a"], sync=True) and len(synced) == size + 1


def test_a_file_that_another_rank_sees(tmp_path):
    """Oracle: by hand: a name that a rank has listed, and that this one does not see; and a folder
    where all see all.
    """
    (tmp_path / "a").write_bytes(b"x")
    assert store_module._merge_hashes_of_ranks(tmp_path, [({}, ["a"], None)]) == ({}, ["a"], None)
    assert "b is not seen by all ranks" in store_module._merge_hashes_of_ranks(tmp_path, [({}, ["a", "b"], None)])[2]
