"""The processes that read ahead: how they start, which signals they hear, when they die, what they
leave behind.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dstrain.data import workers
from dstrain.data.batches import Batches
from dstrain.recipe import NotRead
from tests.support.sources import Slow

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, sys, time
print("main runs", flush=True)  # no guard: a worker that imported this would start itself anew
from dstrain.data.batches import Batches
from tests.support.sources import Slow
folder, seconds, steps, sleep = sys.argv[1], *map(float, sys.argv[2:])
batches = Batches(Slow(1000, folder, seconds), global_batch=2, micro_batch=2, seed=0, num_workers=2)
for step in range(int(steps)):
    list(batches.read_step(step))
if steps < 0:                         # leave them busy
    batches._restart_workers(0)
    while len(os.listdir(folder)) < 2:
        time.sleep(0.02)
print("ready", flush=True)
time.sleep(sleep)
"""
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


def launch(tmp_path, seconds, steps, sleep):
    """Starts SCRIPT as a file of its own and returns it with the folder of its workers' pids."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "pids").mkdir()
    command = [sys.executable, "-W", "ignore", tmp_path / "script.py", tmp_path / "pids"]
    return subprocess.Popen(
        [*command, str(seconds), str(steps), str(sleep)],
        text=True,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def pids(folder):
    return [int(path.name) for path in Path(folder).iterdir()]


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(numbers, seconds):
    """Whether all processes end within `seconds`."""
    until = time.monotonic() + seconds
    while any(map(alive, numbers)):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def shared_memory(numbers):
    """Files in /dev/shm that the processes hold and that would outlive a kill of all of them."""
    lines = [line for pid in numbers for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [line for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")]


def test_workers_die_with_a_killed_rank(tmp_path):
    """Oracle: /proc: workers and their server vanish after kill -9 of the rank; the rank leaves
    nothing in /dev/shm.
    """
    rank = launch(tmp_path, 0, 20, 60)
    assert [rank.stdout.readline(), rank.stdout.readline()] == ["main runs\n", "ready\n"]
    started = pids(tmp_path / "pids")
    server = parent(started[0])
    assert len(started) == 2 and server != rank.pid and all(map(alive, [*started, server]))
    assert shared_memory([rank.pid, *started, server]) == []
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    assert gone([*started, server], 30)
    assert rank.stdout.read() == ""  # closed by all: nobody is left, and main ran once


def test_a_rank_ends_while_its_workers_are_busy(tmp_path):
    """Oracle: exit code 0 within seconds, though each sample takes ten minutes and SIGTERM is not
    heard.
    """
    rank = launch(tmp_path, 600, -1, 0)
    assert [rank.stdout.readline(), rank.stdout.readline()] == ["main runs\n", "ready\n"]
    start = time.monotonic()
    assert rank.wait(timeout=60) == 0 and time.monotonic() - start < 15  # torch alone: 21 s
    assert len(pids(tmp_path / "pids")) == 2 and gone(pids(tmp_path / "pids"), 10)


def test_workers_hear_no_signal(tmp_path):
    """Oracle: the batches of an undisturbed run; every process gets SIGTERM, SIGINT, SIGUSR1 and
    SIGHUP meanwhile.
    """

    def run(disturb):
        with Batches(Slow(100, tmp_path), global_batch=4, micro_batch=4, seed=0, num_workers=2) as batches:
            labels = []
            for step in range(12):
                labels += [batch["label"].tolist() for batch in batches.read_step(step)]
                if disturb and step == 3:
                    started = [pid for pid in pids(tmp_path) if alive(pid)]
                    for pid in {*started, parent(started[0])}:
                        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
                            os.kill(pid, number)
            started = [pid for pid in pids(tmp_path) if alive(pid)]
            assert [(tmp_path / str(pid)).read_text() for pid in started] == ["1", "1"]
        assert gone(started, 0.5)
        return labels

    assert run(True) == run(False)


def test_signals_wait_while_workers_start():
    """Oracle: a handler of ours: not called inside `starting`, called after it; the main module is
    whole again.
    """
    heard, main = [], sys.modules["__main__"]
    names = set(main.__dict__)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with workers.guard_worker_start():
            # To this thread: of a process's signals the kernel may give one to a thread of some library.
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
            time.sleep(0.01)
            assert heard == [] and not hasattr(main, "__file__") and main.__spec__ is None
        time.sleep(0.01)
        assert heard == [signal.SIGUSR1]
        assert set(main.__dict__) == names
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_dead_server_is_replaced(tmp_path):
    """Oracle: an error that says what to do, and no hang, when the server is killed; the same step works when asked for
    again.
    """
    with Batches(Slow(100, tmp_path), global_batch=4, micro_batch=4, seed=0, num_workers=1) as batches:
        expected = [batch["label"].tolist() for batch in batches.read_step(0)]
        os.kill(parent(pids(tmp_path)[0]), signal.SIGKILL)
        assert gone(pids(tmp_path), 5)
        with pytest.raises(NotRead, match="a process that reads the data was ended: .* give the same command again"):
            for step in range(1, 9):
                list(batches.read_step(step))
        assert [batch["label"].tolist() for batch in batches.read_step(0)] == expected
