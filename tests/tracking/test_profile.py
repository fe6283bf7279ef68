"""What --profile records of a training, in one process without the launcher."""

import gzip
import json

import pytest
import torch

from dstrain import recipe
from dstrain.distributed import group
from dstrain.tracking.profile import Profile
from tests.support.tracking import time_run


@pytest.fixture
def steps(tmp_path):
    """Takes the steps of a run from `first` on, in which step n multiplies matrices of n rows; the
    files, and the log.
    """

    def take(window, first=0, count=6, end=True):
        run, lines = recipe.load_recipe(None, [f"folder={tmp_path}"]), []
        made = time_run(run, first, window=window, note=lines.append)
        for done in range(first + 1, first + count + 1):
            torch.ones(done, 3) @ torch.ones(3, 3)
            made.record_step_end(done)
        if end:
            made.close()
        return sorted(path.name for path in (tmp_path / "profile").glob("*")), lines

    return take


def rows(path) -> list[int]:
    """Rows of the products that a trace holds, in the order of time."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    found = [event for event in events if event.get("name") == "aten::mm"]
    return [event["args"]["Input Dims"][0][0] for event in sorted(found, key=lambda event: event["ts"])]


@pytest.mark.parametrize(
    "window, first, expected",
    [((2, 4, 1), 0, [3, 4]), ((0, 1, 1), 0, [1]), ((3, 5, 1), 3, [4, 5]), ((4, 20, 1), 0, [5, 6])],
)
def test_the_steps_of_the_window_are_recorded(steps, tmp_path, window, first, expected):
    """Oracle: the shapes of the products in the trace: B - A steps after step A, also from the first step on, where the
    run went on, and where it ended early.
    """
    files, lines = steps(window, first)
    assert files == [f"steps_{window[0]}-{window[1]}_rank_0.json.gz"] and len(lines) == 1
    assert str(tmp_path / "profile") in lines[0]
    assert rows(tmp_path / "profile" / files[0]) == expected


@pytest.mark.parametrize("window, first", [((2, 4, 1), 3), ((2, 4, 1), 4), ((2, 4, 1), 60)])
def test_a_window_that_has_begun_is_left_out(steps, window, first):
    """Oracle: the same command again, from within the window, its end and far behind it: no file,
    one line, and no end.
    """
    files, lines = steps(window, first)
    assert files == [] and lines == [f"--profile: steps 3 to 4 are not recorded: the run goes on from step {first}"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a trace of kernels needs a GPU")
def test_kernels_are_those_of_the_window(tmp_path):
    """Oracle: kernels that spin for half a second, one in each step: the trace of one step holds one of them."""
    made = Profile(tmp_path, (1, 2, 1), 0, print)
    for done in (1, 2, 3):
        torch.cuda._sleep(1_000_000_000)
        made.start_or_stop_recording(done)
    [path] = (tmp_path / "profile").glob("*.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert len([event for event in events if event.get("cat") == "kernel" and "spin" in event["name"]]) == 1


def test_other_ranks_and_commands_record_nothing(steps, monkeypatch):
    """Oracle: no file of a command without --profile, and of rank 3 where every second one is asked for."""
    assert steps(None) == ([], [])
    monkeypatch.setattr(group, "rank", lambda: 3)
    assert steps((2, 4, 2)) == ([], [])
    assert steps((2, 4, 3))[0] == ["steps_2-4_rank_3.json.gz"]


def test_a_folder_that_cannot_be_written_ends_nothing(steps, tmp_path):
    """Oracle: a file in the place of the folder: one line in the log, and the steps go on."""
    (tmp_path / "profile").write_text("")
    files, lines = steps((2, 4, 1))
    assert files == [] and len(lines) == 1 and "cannot be written" in lines[0]
