"""Saving beside training: what is written, how long training waits, what a failure leaves."""

import json
import re
import resource
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dstrain.checkpoint import saver as module
from dstrain.checkpoint.fragments import Fragment, Shards, write_shard
from dstrain.checkpoint.saver import Saver
from dstrain.checkpoint.store import Store
from dstrain.distributed import group
from dstrain.recipe import NotSaved

SIZE = 5000


class Trial:
    """A saver of one live tensor, whose writer waits until it is let go."""

    def __init__(self, folder: Path, asynchronous: bool = True):
        self.values, self.reports, self.saved, self.gate = torch.zeros(SIZE), [], [], threading.Event()
        self.gate.set()
        self.saver = Saver(Store(folder, keep=2), asynchronous, self.reports.append, self.saved.append)

    def save(self, step: int, last: bool = False, score: float | None = None) -> None:
        whole = Fragment("weight", (SIZE,), 0, SIZE)
        self.saver.save(
            step, {"net": [("master", whole, self.values)]}, self.write, need_bytes=4 * SIZE, score=score, last=last
        )

    def write(self, folder: Path, entries: dict) -> None:
        assert self.gate.wait(60)
        write_shard(folder / f"net-{group.rank():05d}-of-{group.world():05d}.safetensors", entries["net"])

    def read(self, step: int) -> torch.Tensor:
        with Shards(self.saver.store.folder / f"step_{step:08d}", "net") as shards:
            return shards.read("master", "weight")


@contextmanager
def no_room():
    """The disk takes 4096 bytes of a file and no more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_is_saved_is_what_was_there(tmp_path):
    """Oracle: the values at each call, changed while the writer waits; the second save waits for the first."""
    trial = Trial(tmp_path)
    trial.gate.clear()
    trial.values.fill_(1.0)
    trial.save(1)
    assert trial.saver.store.list_steps() == [] and trial.saver.newest == 0
    trial.values.fill_(2.0)
    letting_go = threading.Timer(0.5, trial.gate.set)
    letting_go.start()
    began = time.perf_counter()
    trial.save(2)
    assert time.perf_counter() - began > 0.4 and trial.saver.newest == 1, "two saves were in flight"
    trial.values.fill_(3.0)
    trial.saver.wait_for_save()
    trial.save(3, last=True)
    assert trial.saver.newest == 3 and trial.saved == [1, 2, 3] and trial.saver.store.list_steps() == [2, 3]
    assert torch.equal(trial.read(2), torch.full((SIZE,), 2.0)) and torch.equal(trial.read(3), trial.values)
    assert [line.split(" in ")[0] for line in trial.reports] == ["saved step 1", "saved step 2", "saved step 3"]


def test_a_full_disk_leaves_the_old_checkpoint_whole(tmp_path):
    """Oracle: the limit on a file's size: reported, nothing left, the older step verifies, the next save succeeds."""
    trial = Trial(tmp_path)
    trial.save(1)
    trial.saver.wait_for_save()
    with no_room():
        trial.save(2)
        trial.saver.wait_for_save()
    assert "saving step 2 failed: OSError" in trial.reports[-1] and "File too large" in trial.reports[-1]
    assert trial.saver.newest == 1 and trial.saved == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest", "step_00000001"]
    assert Store(tmp_path).find_newest_checkpoint()[0] == 1
    trial.save(3)
    trial.saver.wait_for_save()
    assert trial.saver.newest == 3 and Store(tmp_path).find_newest_checkpoint()[0] == 3


@pytest.mark.parametrize("asynchronous", [True, False])
def test_three_failures_in_a_row_end_the_run(tmp_path, asynchronous):
    """Oracle: the count by hand: a success between failures begins it anew; a third save with room succeeds."""
    trial = Trial(tmp_path, asynchronous)
    for step in (1, 2, 4, 5):
        with no_room():
            trial.save(step)
            trial.saver.wait_for_save()
        if step % 3 == 2:
            trial.save(step + 1)
            trial.saver.wait_for_save()
    assert Store(tmp_path).find_newest_checkpoint()[0] == 6 and trial.saved == [3, 6]
    with no_room():
        trial.save(7)
        trial.save(8)
        with pytest.raises(NotSaved, match=r"step 9 could not be saved: .*File too large.* same command again"):
            trial.save(9)
    with no_room(), pytest.raises(NotSaved, match="step 10 could not be saved"):
        Trial(tmp_path, asynchronous).save(10, last=True)
    assert Store(tmp_path).find_newest_checkpoint()[0] == 6


def test_no_memory_and_no_thread(tmp_path, monkeypatch):
    """Oracle: what the system refuses: the step is saved before save comes back, and nothing waits for ever."""
    trial = Trial(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(module.HostCopies, "_allocate_host_buffer", lambda self, numel: torch.empty(1 << 60))
        trial.save(1)
    assert trial.saver.newest == 1 and "no memory for a copy" in trial.reports[0]
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", a_thread_less(threading.Thread.start))
        trial = Trial(tmp_path)
        trial.save(2)
        assert trial.saver.store.list_steps() == [1, 2] and not trial.saver.is_writing
        assert trial.saver._pending.waited == trial.saver._pending.seconds > 0  # training waited for all of it
    trial.saver.wait_for_save()
    assert trial.saver.newest == 2


def a_thread_less(start):
    def started(thread: threading.Thread) -> None:
        if thread.name.startswith("save-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    return started


def test_what_cannot_be_written_down(tmp_path):
    """Oracle: the checkpoint, which is whole although nobody could note it."""
    trial = Trial(tmp_path)
    trial.saver._saved = lambda step: (tmp_path / "none" / "saved").write_text(str(step))
    trial.save(1, last=True)
    assert trial.saver.newest == 1 and "saved step 1" in trial.reports[0] and "not written down" in trial.reports[0]


def test_the_save_in_flight_counts_as_the_best(tmp_path):
    """Oracle: the lowest score so far by hand, while its checkpoint is still being written."""
    trial = Trial(tmp_path)
    trial.save(1, score=0.5)
    trial.saver.wait_for_save()
    trial.gate.clear()
    trial.save(2, score=0.3)
    assert trial.saver.store.list_steps() == [1]
    assert (
        not trial.saver.is_improvement(0.4) and not trial.saver.is_improvement(0.3) and trial.saver.is_improvement(0.2)
    )
    trial.gate.set()
    trial.saver.wait_for_save()
    assert not trial.saver.is_improvement(0.3) and trial.saver.is_improvement(0.2)
    with no_room():
        trial.save(3, score=0.1)
        while trial.saver.is_writing:
            time.sleep(0.01)
    assert trial.saver.is_improvement(0.2) and not trial.saver.is_improvement(0.3), "what could not be saved counts"


def test_a_score_that_is_not_finite(tmp_path):
    """Oracle: finding B2: after a NaN, pending or saved, any finite score improves and no other; the 0.3 is kept."""
    trial, nan = Trial(tmp_path), float("nan")
    assert (
        not trial.saver.is_improvement(nan)
        and not trial.saver.is_improvement(float("inf"))
        and trial.saver.is_improvement(9.0)
    )
    trial.save(1, score=nan)
    assert trial.saver.is_improvement(0.3) and not trial.saver.is_improvement(nan)
    for step, score in ((2, 0.3), (3, nan), (4, 0.4), (5, nan), (6, nan)):
        trial.save(step, score=score)
        trial.saver.wait_for_save()
        assert (
            trial.saver.store.find_best_checkpoint() == (2, 0.3)
            and trial.saver.is_improvement(0.2)
            and not trial.saver.is_improvement(0.3)
        )
    assert trial.saver.store.list_steps() == [2, 5, 6]


def test_an_error_lets_the_save_end(tmp_path):
    """Oracle: the folder after an error has ended training, and after an interrupt, which waits for nothing."""
    for error, steps in ((FloatingPointError, [1]), (KeyboardInterrupt, [])):
        trial = Trial(tmp_path / error.__name__)
        trial.gate.clear()
        letting_go = threading.Timer(0.5, trial.gate.set)
        with pytest.raises(error):
            try:
                trial.save(1)
                letting_go.start()
                raise error
            finally:
                trial.saver.close()
                found = trial.saver.store.list_steps()
        assert found == steps
        letting_go.join()
        trial.saver.wait_for_save()


def test_a_host_without_memory_saves_at_once(tmp_path, monkeypatch):
    """Oracle: a host that says it has less than the copy needs: the step is there when save comes back."""
    enough = Trial(tmp_path / "enough")
    with monkeypatch.context() as patched:  # four fifths of the memory, and not a byte more
        patched.setattr(module, "measure_free_host_memory", lambda: 5 * SIZE)
        enough.gate.clear()
        enough.save(1)
        assert enough.saver.is_writing and enough.reports == []
        enough.gate.set()
        enough.saver.wait_for_save()
    monkeypatch.setattr(module, "measure_free_host_memory", lambda: 5 * SIZE - 1)
    trial = Trial(tmp_path)
    trial.save(1)
    assert trial.saver.store.list_steps() == [1]
    assert "training waits for each save" in trial.reports[0] and "has no room" in trial.reports[0]
    trial.save(2)
    assert trial.saver.newest == 2 and len(trial.reports) == 3


def test_memory_of_a_container(tmp_path, monkeypatch):
    """Oracle: the limit, the use and the reclaimable cache that the container's files say; psutil for the host."""
    psutil = pytest.importorskip("psutil")
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    assert abs(module.measure_free_host_memory() - psutil.virtual_memory().available) < 1e9
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 700\n")
    (tmp_path / "memory.max").write_text("8000\n")
    assert module.measure_free_host_memory() == 8000 - 5000 + 700
    (tmp_path / "memory.max").write_text("max\n")
    assert module.measure_free_host_memory() > 1e6
    read = Path.read_text
    for text, bytes_ in (("Total: 9 kB\nMemAvailable:    3000 kB\n", 3000 * 1024), ("Total: 9 kB\n", sys.maxsize)):
        monkeypatch.setattr(Path, "read_text", lambda path: text if str(path) == "/proc/meminfo" else read(path))
        assert module.measure_free_host_memory() == bytes_


def talk_while_saving(folder: Path) -> None:
    trial, rank = Trial(folder / "checkpoints"), group.rank()
    right = True
    for step in range(1, 6):
        trial.values.fill_(10 * step + rank)
        trial.save(step)
        for number in range(200):
            right &= group.compute_max_over_ranks(number + rank) == number + 1
            right &= group.broadcast_from_first((step, number, "main")) == (step, number, "main")
        if rank == 1:
            time.sleep(0.02 * step)  # the ranks' threads and main threads drift apart
    with no_room() if rank == 1 else open("/dev/null"):
        trial.save(6)
        trial.saver.wait_for_save()
    result = {"right": right, "steps": trial.saver.store.list_steps(), "newest": trial.saver.newest}
    (folder / f"{rank}.json").write_text(json.dumps(result))


def test_words_of_two_threads_do_not_mix(tmp_path, on_ranks):
    """Oracle: the values sent by two ranks' main threads while saves are in flight; one rank's full disk fails both."""
    on_ranks(2, talk_while_saving, tmp_path)
    for rank in (0, 1):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert result == {"right": True, "steps": [4, 5], "newest": 5}


def test_a_save_is_reported_once(tmp_path):
    """Oracle: by hand: one line, however often one looks before the next save."""
    trial = Trial(tmp_path)
    trial.save(1)
    while trial.saver.is_writing:
        time.sleep(0.01)
    for _ in range(3):
        trial.saver.report_finished_save()
    trial.saver.wait_for_save()
    trial.saver.report_finished_save()
    assert len(trial.reports) == 1


def test_how_long_training_waited(tmp_path):
    """Oracle: the clock around the call: no save takes training longer than it takes, and none less than nothing."""
    for asynchronous in (True, False):
        trial = Trial(tmp_path / str(asynchronous), asynchronous)
        began = time.perf_counter()
        trial.save(1)
        trial.saver.wait_for_save()
        took = time.perf_counter() - began
        seconds, waited = map(
            float, re.fullmatch(r"saved step 1 in ([\d.]+) s; training waited ([\d.]+) s", trial.reports[0]).groups()
        )
        assert waited <= took + 0.01 and seconds <= took + 0.1
        assert asynchronous or abs(waited - seconds) <= 0.06  # one is rounded to a tenth
