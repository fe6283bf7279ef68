"""Checkpoints at other stages and numbers of ranks; on one rank in this process."""

import json

import pytest

from tests.engine import check_elastic
from tests.engine.check_elastic import BEFORE, PAIRS
from tests.support.launch import launch


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elastic")
    launch("tests/engine/check_elastic.py", "save", folder, num=2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2, 4])
def test_loads_bit_for_bit_and_goes_on(saved, num):
    """Oracle: the run that saved, on 2 ranks: its masters, moments, averages and buffers, and its next ten losses."""
    out = saved / f"on{num}.json"
    launch("tests/engine/check_elastic.py", "load", saved, out, num=num)
    figures = json.loads(out.read_text())
    refused = [figures.pop(name) for name in list(figures) if name.startswith("refused")]
    assert len(figures) == len(PAIRS) + (3 if num == 2 else 0)
    assert all("save.format=fragments" in text for text in refused) and len(refused) == (0 if num == 2 else 3)
    assert_same(figures)


def test_on_one_rank(alone, tmp_path):
    """Oracle: the run that saved, at other stages: the same values and losses; DeepSpeed's own files at their stage."""
    check_elastic.save(tmp_path)
    check_elastic.load(tmp_path, tmp_path / "out.json")
    figures = json.loads((tmp_path / "out.json").read_text())
    assert len(figures) == len(PAIRS) + 3
    assert_same(figures)


def assert_same(figures: dict) -> None:
    for pair, found in figures.items():
        assert found["step"] == BEFORE
        assert found["differ"] == [], pair
        assert found["losses"] < 1e-5, pair
        assert not found["trivial"]
