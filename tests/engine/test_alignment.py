"""Alignments, routed tokens, texts and clips under ZeRO 0 to 3, on 1, 2 and 4 ranks."""

import json

import pytest

from tests.engine import check_alignment
from tests.engine.check_alignment import EVERY, SAMPLE
from tests.support import towers
from tests.support.sample import sampled, wants_all

NAMES = sampled(
    *(
        [f"{case}-{world}-{stage}" for world, pairs in cases.items() for case, stage in pairs]
        for cases in (EVERY, SAMPLE)
    )
)


@pytest.fixture(scope="module")
def figures(tmp_path_factory, on_ranks, request):
    folder = tmp_path_factory.mktemp("alignment")
    towers.dinov2(folder / "encoder")
    found = {}
    for world, cases in (EVERY if wants_all(request) else SAMPLE).items():
        on_ranks(world, check_alignment.main, folder, folder / "encoder", cases)
        found |= json.loads((folder / f"figures-{world}.json").read_text())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_sharded_alignments(figures, name):
    """Oracle: single-process torch AdamW on the whole batch, clipped, past the step that ends the alignment: weights
    within 1e-6, losses within 1e-5. Going on from a checkpoint before that step is uninterrupted, to the bit. The
    projectors are the network's, and the encoder is in no file.
    """
    found = figures[name]
    assert found["felt"] > 0.7
    assert found["weights"] < 1e-6 < 1e-4 < found["moved"] and found["losses"] < 1e-5
    assert found["resumed"] and not found["encoder"]
    assert found["projectors"] == (6 if name.startswith("repa") else 0)
