"""A run's beginning: how often weights are drawn, and how many bytes a rank holds at most until its first step ends."""

import json

import pytest

from tests.engine import check_start_memory
from tests.engine.check_start_memory import BUCKET, DEPTH, WIDTH

WEIGHTS = DEPTH * (WIDTH * WIDTH + WIDTH)


def kept(figures: dict, stepped: bool) -> int:
    """Bytes of weights, masters and one average; at stage 3 of DeepSpeed's shares of gradients and its bucket; after a
    step of two moments, and of gradients: all of them up to stage 1, a rank's own and the bucket at stage 2. At stage 0
    in fp32 the masters are the weights.
    """
    stage, own, width = figures["stage"], figures["own"], figures["bytes"]
    elements = WEIGHTS if stage < 3 else 2 * own + BUCKET
    if stepped and stage < 3:
        elements += WEIGHTS if stage < 2 else own + BUCKET
    return width * elements + 4 * own * ((1 if stage == 0 else 2) + 2 * stepped)


@pytest.mark.parametrize("world", (1, 32))
def test_what_a_rank_draws_and_holds(in_fork, tmp_path, world):
    """Oracle: the sum of what it keeps, times 1.2; one draw of each layer of which it owns a part, and of no other;
    none of what a checkpoint or init_from holds; the values that one process draws for the whole network.
    """
    in_fork(check_start_memory.main, tmp_path / "figures.json", world)
    starts = json.loads((tmp_path / "figures.json").read_text())
    assert sum("resumed" in figures for figures in starts) == (2 if world == 1 else 0)
    for figures in starts:
        assert figures["own"] == pytest.approx(WEIGHTS / (world if figures["stage"] else 1), rel=0.02)
        assert figures["begun"] <= 1.2 * kept(figures, stepped=False), figures
        assert figures["peak"] <= 1.2 * kept(figures, stepped=True), figures
        assert figures["drawn"] == {str(layer): 1 for layer in figures["layers"]} and figures["equal"], figures
        assert len(figures["layers"]) == (DEPTH if world == 1 or figures["stage"] == 3 else 1)
        if "resumed" in figures:
            assert figures["as in files"] and figures["resumed"] == figures["all"] == []
            assert figures["half"] == [layer for layer in range(DEPTH) if layer % 2]
