"""report.html beside a run that trains: a real process writes it."""

import contextlib
import os
import random
import resource
import signal

import numpy as np
import psutil
import pytest
import torch

from dstrain.tracking import machine
from dstrain.tracking.page import Page
from tests.tracking.report.folder import made


def states() -> list:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


def test_it_is_written_when_it_is_due(tmp_path):
    """Oracle: the steps 4 and 9 by hand; no state of a generator of this process changes, so
    training goes on as ever.
    """
    made(tmp_path / "run", steps=8)
    notes, report, before = [], tmp_path / "run" / "report.html", states()
    page = Page(tmp_path / "run", 4, 0, notes.append)
    page.write_report_if_due(3)
    assert page._starter is None
    page.write_report_if_due(4)
    assert page._wait_for_writer(300) and report.exists()
    report.unlink()
    page.write_last_report(9, seconds=300)
    assert notes == [] and "</html>" in report.read_text() and states() == before
    assert machine.read_git_commit().get("commit", "")[:12] in report.read_text()
    written = report.stat().st_mtime_ns
    page.write_last_report(9, 300)  # nothing new: a run that was complete already
    Page(tmp_path / "run", 0, 0, notes.append).write_last_report(9, 300)  # never
    assert report.stat().st_mtime_ns == written


def test_a_rank_with_many_files_waits_for_it(tmp_path):
    """Oracle: the report of a run whose rank has more than the 1024 files that select(2) knows, such as the connections
    of a large world.
    """
    made(tmp_path / "run", steps=8)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2000, limits[0]), limits[1]))
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1100):
            held.enter_context(open(os.devnull))
        page = Page(tmp_path / "run", 4, 0, pytest.fail)
        page.write_report_if_due(4)
        assert page._wait_for_writer(300) and (tmp_path / "run" / "report.html").exists()


def test_it_outlives_its_run_and_gives_way_to_a_later_one(tmp_path):
    """Oracle: what DeepSpeed's launcher ends with a rank, by psutil: all that descends from it. A writer that is
    suspended would never end: the one of the last step takes its place.
    """
    made(tmp_path / "run", steps=8)
    notes: list[str] = []
    page = Page(tmp_path / "run", 4, 0, notes.append)
    page.write_report_if_due(4)
    page._starter.wait(60)
    group = page._starter.pid
    assert [child for child in psutil.Process().children(recursive=True) if os.getpgid(child.pid) == group] == []
    os.killpg(group, signal.SIGSTOP)  # it is there
    page.write_report_if_due(8)
    page.write_last_report(9, seconds=300)
    assert notes == [] and "</html>" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("ruin, reason", [("plotly", "pip install plotly"), ("folder", "holds no run.yaml")])
def test_a_fault_is_one_note(tmp_path, monkeypatch, ruin, reason):
    """Oracle: one line that names the remedy, however often it fails; a plotly that cannot be
    imported is a real one.
    """
    made(tmp_path / "run", steps=8)
    if ruin == "plotly":
        (tmp_path / "plotly").mkdir()
        (tmp_path / "plotly" / "__init__.py").write_text("raise ImportError")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    else:
        (tmp_path / "run" / "run.yaml").unlink()
    notes: list[str] = []
    page = Page(tmp_path / "run", 4, 0, notes.append)
    for done in (4, 8):
        page.write_last_report(done, seconds=300)
    assert len(notes) == 1 and notes[0].startswith("report.html was not written, and training goes on: ")
    assert reason in notes[0] and not (tmp_path / "run" / "report.html").exists()
