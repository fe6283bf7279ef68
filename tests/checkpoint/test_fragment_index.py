"""The file that tells where all fragments of a part lie, and weights that are read by slices with it."""

import itertools
import random
import struct

import numpy as np
import pytest
import torch
from safetensors import safe_open

from dstrain.checkpoint import safetensors_io
from dstrain.checkpoint.fragment_index import (
    FragmentIndex,
    Rows,
    make_index_file_name,
    make_shard_index_rows,
    write_index_file,
)
from dstrain.checkpoint.fragments import (
    Fragment,
    IndexedShards,
    Shards,
    StoredWeight,
    make_lazily_read_weights,
    make_shard_file_name,
    open_shards,
    read_flattened_slice,
    write_shard,
)
from dstrain.checkpoint.manifest import NAME, hash_files
from dstrain.disk.sealed import render_json_with_hash
from dstrain.recipe import ConfigError

SHAPES = {"a": (7, 5), "b": (), "c": (64,), "d.weight": (3, 1, 4)}
KINDS = ("master", "exp_avg", "ema.0.99")


def write(folder, world: int, seed: int = 0, kinds=KINDS, leave_out: int = -1) -> dict[tuple[str, str], torch.Tensor]:
    """Shards of random cuts, with codes of 8 bits that one rank holds, and their index; the values of each tensor."""
    draws, by_rank, truth = random.Random(seed), [[] for _ in range(world)], {}
    for kind, (name, shape) in itertools.product(kinds, SHAPES.items()):
        values = truth[kind, name] = torch.randn(shape, generator=torch.Generator().manual_seed(len(truth)))
        numel = values.numel()
        cuts = sorted({0, numel, *(draws.randrange(numel + 1) for _ in range(world - 1))})
        for number, (start, end) in enumerate(itertools.pairwise(cuts)):
            if number != leave_out:
                fragment = Fragment(name, shape, start, end - start)
                by_rank[draws.randrange(world)].append((kind, fragment, values.flatten()[start:end]))
    codes = torch.arange(9.0)
    by_rank[-1].append(("state1", Fragment("0ff1ce-0.state1", (9,), 0, 9), codes))
    truth["state1", "0ff1ce-0.state1"] = codes
    own = []
    for rank, entries in enumerate(by_rank):
        entries.sort(key=lambda entry: kinds.index(entry[0]) if entry[0] in kinds else len(kinds))
        own.append(
            make_shard_index_rows(
                entries, write_shard(folder / make_shard_file_name("net", rank, world), entries, {"part": "net"})
            )
        )
    assert {make_index_file_name("net"): write_index_file(folder, "net", own, SHAPES)} == hash_files(
        folder, [make_index_file_name("net")]
    )
    seal(folder)
    return truth


def seal(folder) -> None:
    body = {"files": hash_files(folder, [path.name for path in folder.glob("*.safetensors")]), "step": 1, "world": 1}
    (folder / NAME).write_bytes(render_json_with_hash(body))


@pytest.mark.parametrize("world", (1, 2, 5))
def test_every_run_of_elements(tmp_path, world):
    """Oracle: torch's own slices of the tensors that were written, and the headers; codes are known by their rows."""
    truth = write(tmp_path, world)
    index, headers = open_shards(tmp_path, "net"), Shards(tmp_path, "net")
    assert isinstance(index, IndexedShards) and set(index.list_value_kinds()) == {*KINDS, "state1"} == set(
        headers.list_value_kinds()
    )
    assert (
        index.list_average_decays() == [0.99]
        and index.list_tensor_names("master") == list(SHAPES)
        and index.list_tensor_names("state1") == []
    )
    with index:
        for (kind, name), values in truth.items():
            assert index.has_tensor(kind, name) and torch.equal(index.read(kind, name), values.flatten())
            assert name not in SHAPES or index.find_tensor_shape(name) == tuple(values.shape)
            for start, end in itertools.combinations(range(0, values.numel() + 1, 3), 2):
                assert torch.equal(index.read(kind, name, start, end - start), values.flatten()[start:end])
                assert index.find_byte_spans(kind, name, start, end) == headers.find_byte_spans(kind, name, start, end)
    for kind, name, message in (("master", "d.weigth", "nearest is d.weight"), ("ema.0.5", "a", "no ema.0.5 named a")):
        with pytest.raises(ConfigError, match=message):
            index.read(kind, name)
    with pytest.raises(ConfigError, match="elements 3 .. 65 of c are outside of shape"):
        index.find_byte_spans("master", "c", 3, 65)
    shard = tmp_path / make_shard_file_name("net", world - 1, world)
    write_shard(shard, [("master", Fragment("z", (2,), 0, 2), torch.ones(2))])  # somebody's own shard, sealed
    seal(tmp_path)
    other = open_shards(tmp_path, "net")
    assert type(other) is Shards and other.read("master", "z").tolist() == [1.0, 1.0]
    (tmp_path / make_index_file_name("net")).unlink()  # as earlier versions have written checkpoints
    assert type(open_shards(tmp_path, "net")) is Shards


def test_the_library_reads_it(tmp_path, synced):
    """Oracle: the safetensors library, and the order by key and first element; forced to the disk as a whole."""
    write(tmp_path, 3)
    assert synced[make_index_file_name("net")] == (tmp_path / make_index_file_name("net")).stat().st_size
    with safe_open(tmp_path / make_index_file_name("net"), "np") as file:
        table = file.get_tensor("fragments")
    assert table.shape[0] == 5 and set(table[3]) == {0, 1, 2}
    assert np.array_equal(np.lexsort((table[1], table[0])), np.arange(table.shape[1]))


def test_gaps_and_nothing(tmp_path):
    """Oracle: by hand: what no rank has written is named as the headers name it; a part may have no fragments."""
    write(tmp_path, 4, seed=3, leave_out=1)
    messages = []
    for shards in (Shards(tmp_path, "net"), FragmentIndex(tmp_path, "net")):
        with pytest.raises(ConfigError, match="are in no shard of") as error:
            shards.find_byte_spans("master", "c")
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    write_index_file(tmp_path, "none", [Rows([], np.zeros((0, 5), np.int64), "")], {})
    nothing = FragmentIndex(tmp_path, "none")
    assert nothing.list_value_kinds() == nothing.list_tensor_names("master") == [] and not nothing.has_tensor(
        "master", "a"
    )


@pytest.mark.parametrize("row, value", [(3, 7), (3, -1), (2, -5), (4, -8)])
def test_rows_that_lie(tmp_path, row, value):
    """Oracle: by hand: a shard or a place that there is not is refused before a file is opened."""
    write(tmp_path, 1)
    path = tmp_path / make_index_file_name("net")
    table = np.array(FragmentIndex(tmp_path, "net")._table)
    table[row] = value
    raw = path.read_bytes()
    path.write_bytes(raw[: -table.nbytes] + table.tobytes())
    with pytest.raises(ConfigError, match="names elements beyond the shards: it is damaged"):
        FragmentIndex(tmp_path, "net").find_byte_spans("master", "a")
    path.write_bytes(raw.replace(b'"shards":"1"', b'"shards":"%d"' % 10**15, 1))  # no list of so many is made
    path.write_bytes(
        (len(path.read_bytes()) - len(raw) + int.from_bytes(raw[:8], "little")).to_bytes(8, "little")
        + path.read_bytes()[8:]
    )
    assert not FragmentIndex(tmp_path, "net").matches_shards({path.name: {"hash": ""}})


def test_files_that_are_none(tmp_path):
    """Oracle: by hand: truncated, another tensor, no metadata, metadata of other types."""
    write(tmp_path, 1)
    path = tmp_path / make_index_file_name("net")
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    for bad in (
        b"",
        raw[:-1],
        raw.replace(b'"I64"', b'"F64"'),
        raw.replace(b'"kinds"', b'"kynds"'),
        raw.replace(b'"shards":"1"', b'"shards":"x"'),
        raw.replace(b'"seal"', b'"seel"'),
        raw.replace(b'"fragments"', b'"fragmentz"'),
        raw[:8] + b"[" * length + raw[8 + length :],
    ):
        path.write_bytes(bad)
        with pytest.raises(ConfigError, match="is no index of fragments"):
            FragmentIndex(tmp_path, "net")


def test_stored_weights(tmp_path, monkeypatch):
    """Oracle: torch on the tensors that were written; and the bytes that a slice reads."""
    truth = write(tmp_path, 3)
    weights = make_lazily_read_weights(open_shards(tmp_path, "net"), "ema.0.99")
    assert list(weights) == list(SHAPES) and all(isinstance(weight, StoredWeight) for weight in weights.values())
    for name, weight in weights.items():
        values = truth["ema.0.99", name]
        assert weight.shape == values.shape and weight.dtype == torch.float32 and weight.is_floating_point()
        assert weight.float() is weight and torch.equal(weight.clone(), values) and torch.equal(weight, values)
        assert torch.equal(weight.double() * 2, values.double() * 2)
        assert torch.equal(torch.cat((weight.reshape(-1), values.flatten())), torch.cat((values.flatten(),) * 2))
        copied = torch.nn.Parameter(torch.zeros_like(values))
        copied.data.copy_(weight)
        assert torch.equal(copied, values) and "ema.0.99/" in repr(weight)
    assert torch.equal(weights["a"][2:4, 1], truth["ema.0.99", "a"][2:4, 1])
    with pytest.raises(TypeError, match="write into a clone"):
        weights["a"].zero_()
    sizes, read = [], safetensors_io.Files.read_span
    monkeypatch.setattr(
        safetensors_io.Files, "read_span", lambda self, span, into: (sizes.append(span.nbytes), read(self, span, into))
    )
    plain = truth["ema.0.99", "c"]
    assert torch.equal(read_flattened_slice(weights["c"], 5, 20), plain[5:25]) and sum(sizes) == 4 * 20
    assert torch.equal(read_flattened_slice(truth["ema.0.99", "a"], 5, 20), truth["ema.0.99", "a"].flatten()[5:25])
