"""Ranks that hang, as real processes: four that exchange a number in each step, over gloo."""

import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.forks import Child, child
from tests.support.launch import ROOT, environment, free_port, wait_for

# A rank. Its steps take some milliseconds; from step 30 on, what the test asks for happens in one of them.
RANK = """
import ctypes, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from dstrain.distributed import group
from dstrain.distributed.presence import get_presence
from dstrain.distributed.watchdog import Watchdog
folder, fault, at_fault = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
get_presence().announce_and_watch_ranks()
class Noted:  # the ranks' store, which notes what the watchdog asks it for, and whether its rank is overdue then
    def __init__(self, store):
        self.store, self.set, self.multi_get = store, store.set, store.multi_get
    def check(self, keys):
        with open(folder / f"asked{group.rank()}", "a") as file:
            print(int(watchdog._overdue), *(key.rpartition("/")[2] for key in keys), file=file)
        return self.store.check(keys)
opened = group.open_group_store
def open_noted():
    store = opened()
    return None if store is None else Noted(store)  # a rank alone has none
group.open_group_store = open_noted
def hang():
    time.sleep(600)
with Watchdog(folder, 20, float(sys.argv[4]), 600) as watchdog:
    dist.init_process_group("gloo")
    watchdog.start_status_exchange()
    for step in range(1, 10 ** 9):
        watchdog.enter_phase(step)
        if step == 40 and fault == "slow":
            watchdog.enter_phase(step, "save of step")
        if step == 40 and group.rank() == at_fault:
            (folder / "reached").touch()
            if fault == "sleep":
                watchdog._run_with_timeout(600, hang)                  # as where a loader gives no batch
            if fault == "frozen":
                ctypes.PyDLL(None).sleep(600)                # holds the interpreter's lock
            if fault == "slow":
                time.sleep(float(sys.argv[5]))
        if fault == "slow":
            watchdog.enter_phase(step)
        group.is_true_on_any_rank(False)
        if fault == "slow" and step == 60:
            break
        time.sleep(0.01)
    get_presence().mark_ended_and_clean_up()
    group.leave_process_group()
print("complete", flush=True)
"""


@pytest.fixture
def ranks(tmp_path):
    """start(world, *words): the ranks' processes; killed in the end."""
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "run.yaml").touch()
    started = []

    def start(world: int, *words: object) -> list[Child]:
        shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in range(world):
            started.append(
                child(
                    [str(tmp_path / "rank.py"), str(tmp_path), *map(str, words)],
                    environment(RANK=str(rank), **shared),
                    tmp_path / f"output{rank}",
                )
            )
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()


def ends(processes: list[Child], folder: Path) -> tuple[list[int], list[str]]:
    """Exit codes and output of all ranks."""
    return (
        [process.wait(120) for process in processes],
        [(folder / f"output{rank}").read_text() for rank in range(len(processes))],
    )


@pytest.mark.parametrize("at_fault", [0, 2])
def test_a_suspended_rank_is_named_and_ended(ranks, tmp_path, at_fault):
    """Oracle: the pid that SIGSTOP suspended: all others write their stacks, name it and end with 4; it is killed.

    Rank 0 holds the store through which ranks hear of each other.
    """
    processes = ranks(4, "none", at_fault, 6)
    wait_for(tmp_path / "reached")
    processes[at_fault].send_signal(signal.SIGSTOP)
    codes, outputs = ends(processes, tmp_path)
    others = [rank for rank in range(4) if rank != at_fault]
    assert [codes[rank] for rank in others] == [4] * 3 and codes[at_fault] == -signal.SIGKILL, outputs
    name = f"rank {at_fault} on {socket.gethostname()} (process {processes[at_fault].pid}) is stopped, by SIGSTOP"
    assert any(name in outputs[rank] for rank in others), outputs
    assert "and the run ends: rank" in (tmp_path / "log.txt").read_text()
    stacks = {path.name: path.read_text() for path in (tmp_path / "stacks").iterdir()}
    assert sorted(name[-10:] for name in stacks) == [f"rank_{rank}.txt" for rank in others]
    assert all("all_reduce" in text and "in _watch" in text for text in stacks.values())


def test_a_rank_that_does_not_come_is_named(ranks, tmp_path):
    """Oracle: the rank that sleeps in a step while the others wait in their exchange, and dstrain's line that waits.
    Ranks ask where the others stand only when they are overdue; before, once, for rank 0 alone.
    """
    processes = ranks(3, "sleep", 1, 4)
    codes, outputs = ends(processes, tmp_path)
    assert codes == [4, 4, 4], outputs
    name = (
        rf"rank 1 on {socket.gethostname()} \(process {processes[1].pid}\) is in step 40 at watchdog.py:\d+ "
        r"\(_run_with_timeout\), and the others wait for it"
    )
    assert any(re.search(name, output) for output in outputs), outputs
    assert "hang" in (tmp_path / "stacks" / "step_00000040_rank_1.txt").read_text()
    for rank in (0, 1, 2):
        lines = [line.split() for line in (tmp_path / f"asked{rank}").read_text().splitlines()]
        others = [str(other) for other in range(3) if other != rank]
        early = [words for late, *words in lines if late == "0"]
        assert early in ([["0"][:rank]], [["0"], ["0"]]), lines  # twice where rank 0 had not spoken yet
        assert next(words for late, *words in lines if late == "1") == others, lines


def test_a_frozen_rank_is_named_and_ended(ranks, tmp_path):
    """Oracle: a rank in a C call that lets none of its threads run: its peer names it, has it write, and ends it."""
    processes = ranks(2, "frozen", 1, 4)
    codes, (output, frozen) = ends(processes, tmp_path)
    assert codes == [4, -signal.SIGKILL], output + frozen
    assert f"rank 1 on {socket.gethostname()} (process {processes[1].pid}) does not answer" in output
    assert "most recent call first" in frozen and "rank.py" in frozen


def test_a_slow_phase_of_one_rank_is_waited_for(ranks, tmp_path):
    """Oracle: completion: one rank takes twice the limit of a step in a phase of its own, and the others wait."""
    codes, outputs = ends(ranks(3, "slow", 0, 4, 9), tmp_path)
    assert codes == [0, 0, 0] and all(output == "complete\n" for output in outputs), outputs


def test_a_suspended_run_goes_on(ranks, tmp_path):
    """Oracle: completion: all ranks are suspended for twice the limit of a step, and continued."""
    processes = ranks(2, "slow", 0, 4, 0)
    wait_for(tmp_path / "reached")
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    time.sleep(9)
    for process in processes:
        process.send_signal(signal.SIGCONT)
    codes, outputs = ends(processes, tmp_path)
    assert codes == [0, 0], outputs


def test_stacks_on_request(ranks, tmp_path):
    """Oracle: kill -USR2: the stacks of all threads on stderr, and the rank goes on."""
    processes = ranks(1, "none", 0, 600)
    wait_for(tmp_path / "reached")
    processes[0].send_signal(signal.SIGUSR2)
    time.sleep(1)
    assert processes[0].poll() is None
    processes[0].kill()
    _, (output,) = ends(processes, tmp_path)
    assert "most recent call first" in output and "in _watch" in output and "rank.py" in output


def test_stacks_of_a_start_on_request(tmp_path):
    """Oracle: kill -USR2 at the first line, before torch is there: stacks on stderr, and the end that it has anyway."""
    words = ["--recipe", "none.yaml", f"folder={tmp_path / 'run'}"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "launch" / "train.py"), *words],
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline().startswith("dstrain ")
        process.send_signal(signal.SIGUSR2)
        text = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    assert "most recent call first" in text and "train.py" in text and process.returncode == 2, text


def test_the_limit_of_a_step(tmp_path):
    """Oracle: the median by hand: 20 times 10 s, at least 120 s, at most the timeout; phases have the timeout alone."""
    from dstrain.distributed.watchdog import Watchdog

    with Watchdog(tmp_path, 20, 120, 1800) as watchdog:
        watchdog._steps += [1, 10, 10, 900]
        assert watchdog._choose_hang_limit("step") == 1810  # too few steps for a median
        watchdog._steps.append(3)
        assert watchdog._choose_hang_limit("step") == 200 and watchdog._choose_hang_limit("save of step") == 1810
        watchdog._steps += [0.1] * 20
        assert watchdog._choose_hang_limit("step") == 120
        watchdog._steps += [500] * 1001
        assert watchdog._choose_hang_limit("step") == 1810
