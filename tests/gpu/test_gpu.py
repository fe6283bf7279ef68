"""Training on a GPU that computes nothing (build.py): torch itself reports where a host waits or devices differ."""

import json
import subprocess
import sys

import pytest

from kit import jobs
from tests.gpu.build import missing
from tests.support.launch import KIT_PATH, ROOT, environment
from tests.support.sample import sampled, wants_all

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=missing() or "")]

# The stages of each system; of them CI's, where each system takes one.
EVERY = dict.fromkeys(jobs.STEPPED, (1, 3))
SAMPLE = {system: ((1, 3)[number % 2],) for number, system in enumerate(jobs.STEPPED)}
STAGES = sampled(*([(system, stage) for system, stages in own.items() for stage in stages] for own in (EVERY, SAMPLE)))


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("gpu")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.gpu",
            "tests/gpu/check_gpu.py",
            folder,
            json.dumps(EVERY if wants_all(request) else SAMPLE),
        ],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=900,
        env=environment(PYTHONPATH=KIT_PATH, HOME=str(folder)),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


def test_waits_are_reported(found):
    """Oracle: waits made by hand, of each kind that torch's debug mode is to report: without them nothing is shown."""
    assert found["unseen"] == []


@pytest.mark.parametrize("place", STAGES, ids=lambda place: "{}-{}".format(*place))
def test_no_step_waits(found, place):
    """Oracle: torch's debug mode for synchronization, which raises; and a count of waits that it does not see."""
    system, stage = place
    rows = {what: row for what, row in found["steps"][system].items() if what.startswith(f"stage {stage}: ")}
    assert len(rows) == 3 and all(ok is not False for _, ok in rows.values()), rows
    assert rows[f"stage {stage}: host reads a step"][0] == 0


@pytest.mark.parametrize("system", ["iddpm", "tokenizer"])
def test_saved_and_resumed(found, system):
    """Oracle: a copy of all values at the save; torch finds every tensor on its device, and copies are page-locked."""
    rows = found["saves"][system]
    assert rows["stage 1: page-locked copies"] == [1, True]
    assert len(rows) == 10 and all(ok for _, ok in rows.values()), rows


def test_the_device_waits_for_reductions(found):
    """Oracle: stage3.py of DeepSpeed, which reads the gradients after this wait, on the current stream."""
    assert found["followed"]


def test_page_locked_memory_is_given_back(found):
    """Oracle: CUDA's codes: 0 for memory that is registered, 713 for memory that is not, since its owner is gone."""
    assert found["registered"] == [0, 713]
