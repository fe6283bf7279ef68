"""Oracle: the tensors that were saved; for the format, the safetensors library."""

import itertools
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dstrain.checkpoint import safetensors_io
from dstrain.checkpoint.fragments import Fragment, Shards, make_shard_file_name, write_shard
from dstrain.checkpoint.layout import Fragments
from dstrain.checkpoint.manifest import hash_files

SHAPES = {"blocks.0.weight": (3, 4), "blocks.0.bias": (4,), "scale": (), "pos_embed": (1, 5, 2)}


def numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def cut(name: str, whole: torch.Tensor, start: int, end: int) -> tuple[Fragment, torch.Tensor]:
    return Fragment(name, tuple(whole.shape), start, end - start), whole.flatten()[start:end]


def write(folder: Path, kinds: dict[str, dict[str, torch.Tensor]], bounds=lambda n: [0, n], world: int = 1) -> None:
    """Run i of every tensor, between neighbouring bounds, goes to rank i of world, and around."""
    entries: list[list] = [[] for _ in range(world)]
    for kind, named in kinds.items():
        for name, whole in named.items():
            edges = bounds(whole.numel())
            for i, (a, b) in enumerate(itertools.pairwise(edges)):
                entries[i % world].append((kind, *cut(name, whole, a, b)))
    for rank, some in enumerate(entries):
        write_shard(folder / make_shard_file_name("net", rank, world), some)


edges = st.lists(st.integers(0, 12), max_size=6)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_partition_loads_into_any_other(data):
    """Oracle: the whole tensors that were cut over up to 4 shards, read back whole and by other drawn cuts."""
    world = data.draw(st.integers(1, 4))
    kinds = {"master": tensors(0), "ema.0.9999": tensors(1)}
    with TemporaryDirectory() as folder:
        write(Path(folder), kinds, lambda n: sorted({0, n, *(e for e in data.draw(edges) if e < n)}), world)
        with Shards(folder, "net") as shards:
            assert set(shards.list_value_kinds()) == set(kinds)
            for kind, named in kinds.items():
                assert set(shards.list_tensor_names(kind)) == set(SHAPES)
                for name, whole in named.items():
                    assert shards.find_tensor_shape(name) == SHAPES[name]
                    cuts = sorted({0, whole.numel(), *(e for e in data.draw(edges) if e < whole.numel())})
                    read = [shards.read(kind, name, a, b - a) for a, b in itertools.pairwise(cuts)]
                    assert torch.equal(torch.cat(read), whole.flatten())
                    assert torch.equal(shards.read(kind, name), whole.flatten())


def test_overlapping_fragments_are_read_once(tmp_path):
    """Oracle: arange(12), sliced by torch; four fragments that overlap."""
    whole = torch.arange(12.0)
    write_shard(
        tmp_path / make_shard_file_name("net", 0, 1),
        [("master", *cut("w", whole, a, b)) for a, b in ((0, 7), (2, 4), (5, 12), (0, 3))],
    )
    assert torch.equal(Shards(tmp_path, "net").read("master", "w", 1, 10), whole[1:11])


def test_the_safetensors_library_opens_our_file(tmp_path, synced):
    """Oracle: safetensors' load_file and safe_open: values, keys and metadata; the file itself for size and hash, and
    it is whole when it is forced to the disk.
    """
    path = tmp_path / make_shard_file_name("net", 0, 1)
    named = tensors()
    entry = write_shard(path, [("master", *cut(n, w, 0, w.numel())) for n, w in named.items()], {"step": "7"})
    assert entry == hash_files(tmp_path, [path.name])[path.name] and entry["size"] == path.stat().st_size
    assert synced == {path.name: entry["size"]}
    loaded = load_file(path)
    assert {key: value.tolist() for key, value in loaded.items()} == {
        f"master/{name}": whole.flatten().tolist() for name, whole in named.items()
    }
    with safe_open(path, "pt") as file:
        assert file.metadata()["step"] == "7"


def test_we_open_the_safetensors_library_s_file(tmp_path):
    """Oracle: a slice of what safetensors' save_file wrote, under an index written by hand."""
    named = {"master/w": torch.arange(6.0), "exp_avg/w": -torch.arange(6.0)}
    index = '{"master/w": [[2, 3], 0, 6], "exp_avg/w": [[2, 3], 0, 6]}'
    save_file(named, tmp_path / make_shard_file_name("net", 0, 1), {"fragments": index})
    shards = Shards(tmp_path, "net")
    assert torch.equal(shards.read("exp_avg", "w", 2, 3), named["exp_avg/w"][2:5])


def test_pieces_larger_than_a_chunk_and_strided_values(tmp_path, monkeypatch):
    """Oracle: the strided column that was written, three chunks of at most 4 elements, to the last bit."""
    import dstrain.checkpoint.fragments as fragments

    monkeypatch.setattr(fragments, "_CHUNK_ELEMENTS", 4)
    whole = torch.randn(11, 2)[:, 0]
    write_shard(tmp_path / make_shard_file_name("net", 0, 1), [("master", Fragment("w", (11,), 0, 11), whole)])
    assert torch.equal(Shards(tmp_path, "net").read("master", "w"), whole)


def test_a_shard_that_owns_nothing_and_more_shards_than_open_files(tmp_path, monkeypatch):
    """Oracle: the tensors that were dealt out by single elements, two of 14 shards empty; 2 files open."""
    monkeypatch.setattr(safetensors_io, "_OPEN_FILES", 2)
    write(tmp_path, {"master": tensors()}, lambda n: list(range(n + 1)), world=14)
    shards = Shards(tmp_path, "net")
    for name, whole in tensors().items():
        assert torch.equal(shards.read("master", name), whole.flatten())
    assert len(shards._files._open) == 2
    with shards:
        files = list(shards._files._open.values())
    assert not shards._files._open and all(file.closed for file in files)


def test_part_names_do_not_mix(tmp_path):
    """Oracle: the value written to each part, where one part's name begins with the other's."""
    for part, value in (("net", 1.0), ("net-ema", 2.0)):
        write_shard(
            tmp_path / make_shard_file_name(part, 0, 1), [("master", Fragment("w", (1,), 0, 1), torch.tensor([value]))]
        )
    assert Shards(tmp_path, "net").read("master", "w").item() == 1
    assert Shards(tmp_path, "net-ema").read("master", "w").item() == 2


def refusal(message: str):
    return pytest.raises(ValueError, match=re.escape(message))


def test_faults_name_what_is_wrong(tmp_path):
    """Oracle: messages written by hand, for each fault; arange for the elements that a gap leaves readable."""
    whole = torch.arange(12.0).view(3, 4)
    path = tmp_path / make_shard_file_name("net", 0, 1)
    with refusal("no file net-*-of-*.safetensors in"):
        Shards(tmp_path, "net")
    write_shard(
        path, [("master", *cut("blocks.0.weight", whole, 0, 5)), ("master", *cut("blocks.0.weight", whole, 8, 12))]
    )
    shards = Shards(tmp_path, "net")
    with refusal("elements 5 .. 8 of master/blocks.0.weight (3, 4) are in no shard"):
        shards.read("master", "blocks.0.weight")
    with refusal(f"checkpoint {tmp_path} is damaged (net: elements 5 .. 8 of master/blocks.0.weight (3, 4) are in no"):
        list(Fragments(tmp_path, "net", [path.name]).iterate_tensors("master"))
    assert torch.equal(shards.read("master", "blocks.0.weight", 8, 4), torch.arange(8.0, 12.0))
    with refusal("holds no master named block.0.weight; the nearest is blocks.0.weight"):
        shards.read("master", "block.0.weight")
    with refusal("holds no exp_avg named blocks.0.weight"):
        shards.read("exp_avg", "blocks.0.weight")
    with refusal("blocks.0.weight has shape (4, 3), the checkpoint"):
        shards.read("master", "blocks.0.weight", shape=(4, 3))
    with refusal("elements 10 .. 13 of blocks.0.weight are outside of shape (3, 4)"):
        shards.read("master", "blocks.0.weight", 10, 3)
    with refusal("outside of shape (2,)"):
        Fragment("w", (2,), 1, 2)
    with refusal("expected float32 (2,), got torch.float64 (2,)"):
        write_shard(path, [("master", Fragment("w", (2,), 0, 2), torch.zeros(2, dtype=torch.float64))])
    with refusal("a kind has no '/'"):
        write_shard(path, [("a/b", Fragment("w", (2,), 0, 2), torch.zeros(2))])


def test_damaged_sets_of_shards_are_refused(tmp_path):
    """Oracle: messages written by hand, for a set of two shards damaged in each way."""
    whole = torch.arange(4.0)
    write(tmp_path, {"master": {"w": whole}}, lambda n: [0, 2, n], world=2)
    second = tmp_path / make_shard_file_name("net", 1, 2)
    data = second.read_bytes()
    second.unlink()
    with refusal("lacks net-00001-of-00002.safetensors (1 of 2 shards)"):
        Shards(tmp_path, "net")
    write_shard(second, [("master", Fragment("w", (2, 2), 2, 2), whole[2:])])
    with refusal("w has shape (4,) in one shard and (2, 2) in"):
        Shards(tmp_path, "net")
    for wrong in (b"", data[:20], b"\xff" * 40, b"\x02" + 7 * b"\0" + b"{}", b"\x02" + 7 * b"\0" + b"[]"):
        second.write_bytes(wrong)
        with refusal("is not a shard of named fragments"):
            Shards(tmp_path, "net")
    second.write_bytes(data[:-4])
    with refusal("is truncated"):
        Shards(tmp_path, "net").read("master", "w")
    second.write_bytes(data)
    write_shard(tmp_path / make_shard_file_name("net", 0, 1), [])
    with refusal("of several world sizes: [1, 2]"):
        Shards(tmp_path, "net")
