"""Checkpoints at other stages and numbers of ranks: 4 launched ranks, 2 forked ones, one in this process."""

import json
import math

import pytest

from dstrain.checkpoint.fragments import IndexedShards, Shards, open_shards
from tests.engine import check_elastic
from tests.engine.check_elastic import BEFORE, PAIRS
from tests.support.launch import launch


@pytest.fixture(scope="module")
def saved(tmp_path_factory, on_ranks):
    folder = tmp_path_factory.mktemp("elastic")
    on_ranks(2, check_elastic.save, folder)
    return folder


@pytest.mark.parametrize("num", [2, 1, pytest.param(4, marks=pytest.mark.slow)])
def test_loads_bit_for_bit_and_goes_on(request, saved, on_ranks, num):
    """Oracle: the run that saved, on 2 ranks: its masters, moments, averages and buffers, and its next ten losses."""
    out = saved / f"on{num}.json"
    if num == 1:
        request.getfixturevalue("alone")
        check_elastic.load(saved, out)
    elif num == 2:
        on_ranks(2, check_elastic.load, saved, out)
    else:
        launch("tests/engine/check_elastic.py", "load", saved, out, num=num)
    figures = json.loads(out.read_text())
    refused = [figures.pop(name) for name in list(figures) if name.startswith("refused")]
    assert len(figures) == len(PAIRS) + (3 if num == 2 else 0)
    assert all("save.format=fragments" in text for text in refused) and len(refused) == (0 if num == 2 else 3)
    for pair, found in figures.items():
        assert found["step"] == BEFORE
        assert found["differ"] == [], pair
        assert found["losses"] < 1e-5, pair
        assert not found["trivial"]


def test_both_ranks_write(saved):
    """Oracle: the sizes of the shards: at stage 0, where each rank holds everything, they share the work."""
    sizes = [path.stat().st_size for path in (saved / "stage0" / f"step_{BEFORE:08d}").glob("tiny-*")]
    assert len(sizes) == 2 and max(sizes) < 3 * min(sizes)


@pytest.mark.parametrize("stage", range(4))
def test_the_index_says_what_the_headers_say(saved, stage):
    """Oracle: the headers of all shards: kinds, names, shapes, and the bytes of any run of elements."""
    folder = saved / f"stage{stage}" / f"step_{BEFORE:08d}"
    headers, index = Shards(folder, "tiny"), open_shards(folder, "tiny")
    assert isinstance(index, IndexedShards) and index.list_value_kinds() == headers.list_value_kinds()
    for kind in headers.list_value_kinds():
        assert set(index.list_tensor_names(kind)) == set(headers.list_tensor_names(kind)) and not index.has_tensor(
            kind, "w"
        )
        for name in headers.list_tensor_names(kind):
            shape = headers.find_tensor_shape(name)
            numel = math.prod(shape)
            assert index.find_tensor_shape(name) == shape
            for start, end in ((0, numel), (numel // 3, numel // 2), (numel - 1, numel), (numel, numel)):
                assert index.find_byte_spans(kind, name, start, end) == headers.find_byte_spans(kind, name, start, end)
