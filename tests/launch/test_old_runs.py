"""Runs of an older dstrain go on: small folders of every system that commit fe4c14d made, and what it made of them.

golden/old_runs/README.md says how they were made. expected.json holds the figures of commands.py as that commit found
them.
"""

import json
import shutil
import tarfile

import pytest

from tests.golden.old_runs.commands import RUNS, TEXTS, commands, figures
from tests.support.launch import ROOT, command
from tests.support.runs import finish

pytestmark = pytest.mark.slow
OLD = ROOT / "tests" / "golden" / "old_runs"
EXPECTED = json.loads((OLD / "expected.json").read_text())


@pytest.mark.parametrize("run", RUNS)
def test_a_run_of_fe4c14d_goes_on(tmp_path, monkeypatch, run):
    """Oracle: fe4c14d itself, which resumed, evaluated, drew, exported and consolidated the same folder on another CPU:
    the same figures to 0.2 % (a drawn picture's level may turn), and the same tensors.
    """
    with tarfile.open(OLD / "runs.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    for other in set(RUNS) - {run, "tokenizer"}:
        shutil.rmtree(tmp_path / other)
    (tmp_path / "texts.txt").write_text(TEXTS)
    monkeypatch.chdir(tmp_path)
    for script, *words in commands(run, str(ROOT / "ds_configs" / "zero2_fp32.json")):
        finish(command(f"launch/{script}", *words, num=1))
    found = figures(run, tmp_path)
    assert found.keys() == EXPECTED[run].keys()
    assert found == pytest.approx(EXPECTED[run], rel=2e-3, abs=1e-5)
