"""Ranks of one machine, as real processes: what they know of each other before they have met."""

import os
import signal
import time

import pytest

from tests.support.forks import Child, child
from tests.support.launch import environment, free_port, wait_for

# A rank under run_main_with_exit_code, which waits for the others as in the start of training, or does nothing of
# the kind.
RANK = """
import os, sys, time
from pathlib import Path
from dstrain.commands.exits import run_main_with_exit_code
from dstrain.distributed.presence import get_presence
get_presence()._patience = 2
def main():
    (Path(sys.argv[1]) / os.environ["RANK"]).touch()
    if sys.argv[2] == "meet":
        from dstrain.engine.start import start_process_group
        start_process_group(timeout_minutes=10)
    while len(sys.argv) > 3 and not (Path(sys.argv[1]) / sys.argv[3]).exists():
        time.sleep(0.05)
    raise SystemExit(int(sys.argv[4]) if len(sys.argv) > 4 else 0)
run_main_with_exit_code(main)
"""


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """start(number, *words): a rank of two of one launch, with its own folder for temporary files."""
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "temporary").mkdir()
    shared = environment(
        WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), TMPDIR=str(tmp_path / "temporary")
    )
    started = []

    def start(number: int, *words: object) -> Child:
        started.append(
            child(
                [str(tmp_path / "rank.py"), str(tmp_path), *map(str, words)],
                {**shared, "RANK": str(number), "LOCAL_RANK": str(number)},
                tmp_path / "output",
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_rank_killed_before_they_meet_ends_the_others(rank, tmp_path):
    """Oracle: the exit code and message of the survivor, which would wait ten minutes for the killed one."""
    killed, survivor = rank(1, "wait", "never"), rank(0, "meet")
    wait_for(tmp_path / "1")
    wait_for(tmp_path / "0")
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    code, output = survivor.wait(120), (tmp_path / "output").read_text()
    assert code == 1, output
    assert f"error: rank 1 (process {killed.pid})" in output and "has ended, and rank 0 ends, too" in output


@pytest.mark.parametrize("code, survives", [(75, True), (2, False)])
def test_a_rank_that_ends_as_it_should_ends_nobody(rank, tmp_path, code, survives):
    """Oracle: exit codes: 75 is the end of a run, and the other rank may still be at work; a fault is one of all."""
    other = rank(0, "wait", "go")
    wait_for(tmp_path / "0")
    assert rank(1, "wait", "0", code).wait(120) == code
    if survives:
        time.sleep(6)  # three times what it has to end by itself
        (tmp_path / "go").touch()
    assert other.wait(120) == (0 if survives else 1), (tmp_path / "output").read_text()


def test_a_rank_that_died_before_another_began_ends_it(rank, tmp_path):
    """Oracle: the exit code and message of a rank that begins when its peer of the same launch is dead already."""
    killed = rank(1, "wait", "never")
    wait_for(tmp_path / "1")
    killed.kill()
    killed.wait()
    time.sleep(2)
    assert rank(0, "meet").wait(120) == 1
    assert f"error: rank 1 (process {killed.pid})" in (tmp_path / "output").read_text()


def test_an_earlier_launch_is_no_sibling(rank, tmp_path):
    """Oracle: completion: ranks that were killed in an earlier launch, of one parent and over the same port, are not
    those that have died.
    """
    killed = [rank(number, "wait", "never") for number in (1, 0)]
    for process in killed:
        wait_for(tmp_path / "1")
        wait_for(tmp_path / "0")
        process.kill()
        process.wait()
    assert len(list((tmp_path / "temporary").glob("dstrain-*/*/0/*"))) == 2
    later = rank(0, "wait", "go")
    time.sleep(6)
    (tmp_path / "go").touch()
    assert later.wait(120) == 0, (tmp_path / "output").read_text()


def test_a_wrong_command_beside_a_run_ends_nobody(rank, tmp_path):
    """Oracle: completion: a second start of the same ranks, over the same port, fails while the first is at work."""
    ranks = [rank(number, "wait", "go") for number in (0, 1)]
    for number in (0, 1):
        wait_for(tmp_path / str(number))
    time.sleep(3)  # they have seen each other
    wrong = [rank(number, "wait", "0", 2) for number in (0, 1)]
    assert [process.wait(120) for process in wrong] == [2, 2]
    time.sleep(6)
    (tmp_path / "go").touch()
    assert [process.wait(120) for process in ranks] == [0, 0], (tmp_path / "output").read_text()
