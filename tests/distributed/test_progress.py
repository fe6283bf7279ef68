"""What a run says while it is silent, by real threads."""

import io
import os
import threading
import time

import pytest

from dstrain.commands.exits import run_main_with_exit_code
from dstrain.distributed import progress
from dstrain.distributed.progress import Bar, Phases


@pytest.fixture
def words(monkeypatch):
    """A Phases that speaks after 10 ms, and what it says next, as a function."""
    monkeypatch.setattr(progress, "_TICK", 0.01)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    read, write = os.pipe()
    monkeypatch.setattr(progress, "_write_to_stderr", lambda text: os.write(write, f"{text}\n".encode()))
    with os.fdopen(read, buffering=1) as lines:
        yield Phases(quiet=0.01), lines
    os.close(write)


def wait_for_others(until: threading.Event, name: str) -> None:
    """Stands where torch.distributed would: the frame says so by its file."""
    program = compile("def barrier(until):\n    until.wait(60)\n", f"/lib/{name}/group.py", "exec")
    space: dict = {}
    exec(program, space)
    space["barrier"](until)


def test_silence_is_broken_by_what_the_main_thread_is_at(words):
    """Oracle: the phase that was named, the line of this file that the thread stands at, and
    whether it exchanges data.
    """
    one, lines = words
    with one:
        one.enter_phase("listing data/images")
        seen = lines.readline()  # while this thread stands here
        assert "listing data/images" in seen and "test_phases.py" not in seen.partition(", at ")[0]
        assert lines.readline().startswith("still listing data/images, for 0 s")  # again, and for how long
        one.enter_phase("step 7")
        while "step 7" not in (seen := lines.readline()):
            pass
        assert "waiting for other ranks" not in seen
        ends = threading.Event()
        threading.Timer(1.0, ends.set).start()
        wait_for_others(ends, "torch/distributed")
        one.enter_phase("the end")
        seen = [lines.readline()]
        while "the end" not in seen[-1]:
            seen.append(lines.readline())
        assert any("waiting for other ranks" in line for line in seen)


def test_steps_that_are_reported_need_no_word(monkeypatch):
    """Oracle: times by hand, in seconds: a step after 30 of silence; from the first report on only
    one that lasts 20.
    """
    one, now = Phases(quiet=20), 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    one.postpone_next_heartbeat_line()
    now = 1019.0
    one.enter_phase("step 7")
    assert [one._is_heartbeat_due(when) for when in (1019, 1020, 1038, 1039)] == [False, True, True, True]
    one.print_fewer_heartbeat_lines()
    assert [one._is_heartbeat_due(when) for when in (1019, 1020, 1038, 1039)] == [False, False, False, True]
    now = 1030.0
    one.enter_phase("step 7")  # still
    assert one._is_heartbeat_due(1039)
    one.enter_phase("step 8")
    assert not one._is_heartbeat_due(1039) and one._is_heartbeat_due(1050)


def test_lines_are_kept_for_the_log(capsys, monkeypatch):
    """Oracle: the lines that were said, once, on rank 0 alone."""
    one = Phases()
    one.print_lines("a", "b")
    assert one.take_printed_lines() == ["a", "b"] and one.take_printed_lines() == []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    one.print_lines("c")
    assert one.take_printed_lines() == [] and capsys.readouterr().out == "a\nb\n"


@pytest.mark.parametrize("speaks", [True, False])
def test_every_verb_speaks(speaks):
    """Oracle: the threads of this process while a script's main runs, and afterwards."""

    def listeners() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "phases"]

    for thread in listeners():  # of earlier tests, which end a moment later
        thread.join(60)
    during = []
    run_main_with_exit_code(lambda: during.extend(listeners()), speaks)
    assert len(during) == speaks
    for thread in during:
        thread.join(60)
    assert listeners() == []


def test_a_bar_on_a_terminal_is_a_phase():
    """Oracle: by hand: 3 of 10, as beside the bar itself."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    with Bar("drawing", total=10, file=Terminal()) as bar:
        assert not bar.disable
        bar.update(3)
        assert bar.n == 3 and progress.get_phases()._phase[0] == "drawing: 3 of 10"


def test_a_hidden_bar_is_a_phase():
    """Oracle: by hand: 3 of 10, then 7, although no bar is drawn."""
    with Bar("drawing", total=10, show=False) as bar:
        bar.update(3)
        assert bar.n == 3 and progress.get_phases()._phase[0] == "drawing: 3 of 10"
        bar.update(7)
        assert bar.n == 10 and progress.get_phases()._phase[0] == "drawing: 10 of 10"
