"""report.html beside a run that trains: a real process writes it."""

import random

import numpy as np
import pytest
import torch

from dstrain.track import machine
from dstrain.track.page import Page
from tests.report.folder import made


def states() -> list:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


def test_it_is_written_when_it_is_due(tmp_path):
    """Oracle: the steps 4 and 9 by hand; no state of a generator of this process changes, so training goes on as ever."""
    made(tmp_path / "run", steps=8)
    notes, report, before = [], tmp_path / "run" / "report.html", states()
    page = Page(tmp_path / "run", 4, 0, notes.append)
    page.at(3)
    assert page._process is None
    page.at(4)
    first = page._process
    page.at(8)                                                   # the first one is at work still, or has just ended
    page.finish(9, seconds=300)
    assert first.returncode == 0 and notes == [] and "</html>" in report.read_text() and states() == before
    assert machine.commit().get("commit", "")[:12] in report.read_text()
    written = report.stat().st_mtime_ns
    page.finish(9, 300)                                               # nothing new: a run that was complete already
    Page(tmp_path / "run", 0, 0, notes.append).finish(9, 300)    # never
    assert report.stat().st_mtime_ns == written


@pytest.mark.parametrize("ruin, reason", [("plotly", "pip install plotly"), ("folder", "holds no run.yaml")])
def test_a_fault_is_one_note(tmp_path, monkeypatch, ruin, reason):
    """Oracle: one line that names the remedy, however often it fails; a plotly that cannot be imported is a real one."""
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
        page.finish(done, seconds=300)
    assert len(notes) == 1 and notes[0].startswith("report.html was not written, and training goes on: ")
    assert reason in notes[0] and not (tmp_path / "run" / "report.html").exists()
