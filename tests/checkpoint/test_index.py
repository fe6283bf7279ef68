"""Where the elements of a checkpoint's tensors lie: bytes, headers and names, without reading a value."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from dstrain.checkpoint import safetensors_io
from dstrain.checkpoint.fragments import Shards, write_shard
from dstrain.checkpoint.layout import (
    RECONSTRUCTED,
    Fragment,
    Index,
    collect_average_decays,
    find_reconstructed_average,
    iterate_buffers,
    make_damage_error,
    make_shard_file_name,
)
from dstrain.checkpoint.safetensors_io import (
    Entry,
    Span,
    Stored,
    read_safetensors_header,
    render_safetensors_header,
    split_entries_into_files,
)
from dstrain.recipe import ConfigError


def piece(start: int, end: int, name: str = "w", kind: str = "master") -> tuple:
    return kind, Fragment(name, (3, 4), start, end - start), torch.arange(12.0)[start:end]


def data_of(path: Path) -> tuple[int, dict]:
    """Where the data of a safetensors file begin, and its header, by the format's description."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return 8 + length, json.loads(raw[8 : 8 + length])


def test_bytes_of_a_run(tmp_path):
    """Oracle: by hand: of fragments that overlap the earliest and longest is taken, each element once, as bytes behind
    the header; the file holds the fragments in the order of writing, under names that count them.
    """
    path = tmp_path / make_shard_file_name("net", 0, 1)
    write_shard(path, [piece(4, 8), piece(0, 5), piece(0, 3), piece(5, 5), piece(8, 12), piece(0, 12, "b")])
    begin, header = data_of(path)
    assert [key for key in header if key != "__metadata__"] == [
        "master/w",
        "master/w#1",
        "master/w#2",
        "master/w#3",
        "master/b",
    ]
    index = Index(tmp_path, "net", [path.name])

    def span(at, count):
        return Span(path, begin + 4 * at, 4 * count)

    assert index.find_byte_spans("master", "w") == [
        span(4, 5),
        span(1, 3),
        span(12, 4),
    ]  # 0..5 of the second, 5..8, 8..12
    assert index.find_byte_spans("master", "w", 1, 4) == [span(5, 3)] and index.find_byte_spans(
        "master", "w", 5, 8
    ) == [span(1, 3)]
    assert index.find_byte_spans("master", "w", 4, 9) == [span(8, 1), span(1, 3), span(12, 1)]
    assert index.find_byte_spans("master", "w", 7, 7) == [] and index.find_byte_spans("master", "b", 0, 1) == [
        span(16, 1)
    ]
    assert index.find_byte_spans("master", "w", 12) == [] and index.find_tensor_shape("w") == (3, 4)
    for start, end in ((-1, 3), (4, 3), (0, 13)):
        with pytest.raises(ConfigError, match=rf"net: elements {start} .. {end} of w are outside of shape \(3, 4\)"):
            index.find_byte_spans("master", "w", start, end)


def test_gaps(tmp_path):
    """Oracle: by hand: the first run of elements that lies in no shard, up to the next fragment or to the end."""
    path = tmp_path / make_shard_file_name("net", 0, 1)
    write_shard(path, [piece(2, 4), piece(6, 8)])
    index = Index(tmp_path, "net", [path.name])
    for start, end, gap in ((0, 4, "0 .. 2"), (2, 8, "4 .. 6"), (2, 5, "4 .. 5"), (6, 12, "8 .. 12"), (3, 7, "4 .. 6")):
        with pytest.raises(ConfigError, match=rf"net: elements {gap} of master/w \(3, 4\) are in no shard of"):
            index.find_byte_spans("master", "w", start, end)
    assert len(index.find_byte_spans("master", "w", 2, 4)) == 1


@pytest.mark.parametrize(
    "kinds, counts, message",
    [
        (("float32", "float32"), (12, 12), None),
        (("bfloat16", "bfloat16"), (12, 12), None),
        (("bfloat16", "float32"), (12, 12), r"m/b is F32 \[12\], its index says BF16 \[12\]"),
        (("float32", "bfloat16"), (12, 12), r"m/b is BF16 \[12\], its index says F32 \[12\]"),
        (("float16", "float16"), (12, 12), r"m/a is F16 \[12\], its index says F32 \[12\]"),
        (("float32", "float32"), (12, 11), r"m/b is F32 \[11\], its index says F32 \[12\]"),
        (("bfloat16", "bfloat16"), (11, 12), r"m/a is BF16 \[11\], its index says BF16 \[12\]"),
    ],
)
def test_types_and_sizes_of_fragments(tmp_path, kinds, counts, message):
    """Oracle: the safetensors library's files, by hand: float32 or bfloat16, one type in a part; as many elements as
    the index says.
    """
    named = {
        key: torch.zeros(count, dtype=getattr(torch, kind)) for key, kind, count in zip(("m/a", "m/b"), kinds, counts)
    }
    path = tmp_path / make_shard_file_name("net", 0, 1)
    path.write_bytes(save(named, {"fragments": json.dumps({key: [[3, 4], 0, 12] for key in named})}))
    if message is None:
        size = 4 if kinds[0] == "float32" else 2
        assert [span.nbytes for span in Index(tmp_path, "net", [path.name]).find_byte_spans("m", "b")] == [12 * size]
        return
    with pytest.raises(ConfigError, match=f"is not a shard of named fragments: {message}"):
        Index(tmp_path, "net", [path.name])


@pytest.mark.parametrize(
    "kind, name",
    [
        (torch.float16, "F32"),
        (torch.bfloat16, "F32"),
        (torch.float32, "F32"),
        (torch.float64, "F64"),
        (torch.int64, "I64"),
        (torch.bool, "BOOL"),
        (torch.uint8, "U8"),
    ],
)
def test_types_of_buffers(tmp_path, kind, name):
    """Oracle: the contract: floating buffers are written in float32 at least, others as they are; of one part alone."""
    named = {"buffer/net/a": torch.ones(3, dtype=kind), "buffer/other/a": torch.ones(3), "system/a": torch.ones(3)}
    (tmp_path / "common.safetensors").write_bytes(save(named))
    (entry,) = iterate_buffers(tmp_path, "net")
    assert (entry.name, entry.dtype, entry.source.numel) == ("a", name, 3)


def test_a_file_that_ends_within_a_span(tmp_path):
    """Oracle: the bytes by hand, and the message where there are fewer than the span has."""
    (tmp_path / "file").write_bytes(b"abcdef")
    into = memoryview(bytearray(3))
    with safetensors_io.Files() as files:
        files.read_span(Span(tmp_path / "file", 2, 3), into)
        assert bytes(into) == b"cde"
        with pytest.raises(ConfigError, match="file ends early: it is truncated"):
            files.read_span(Span(tmp_path / "file", 4, 3), into)


def test_averages_made_afterwards(tmp_path):
    """Oracle: the folders by hand: of the step asked for, else the newest; other names and widths are none, and what a
    checkpoint holds itself, of any part and in any shard, is taken from there.
    """
    for name in ("step_00000009", "step_00000010", "step_x"):
        (tmp_path / RECONSTRUCTED / "0.1" / name).mkdir(parents=True)

    def at(step, width=0.1):
        return find_reconstructed_average(tmp_path, width, step, None)

    assert [at(None).name, at(9).name] == ["step_00000010", "step_00000009"]
    assert at(8) is None and at(None, 0.2) is None
    own = tmp_path / "own"
    own.mkdir()
    assert (
        collect_average_decays(own) == set()
        and find_reconstructed_average(tmp_path, 0.1, None, own).name == "step_00000010"
    )
    for part, rank, kinds in (
        ("a", 0, ("master", "ema.0.9")),
        ("a", 1, ("ema.0.9", "ema.0.3")),
        ("b-c", 0, ("ema.0.1",)),
    ):
        write_shard(own / make_shard_file_name(part, rank, 2), [piece(0, 12, kind=kind) for kind in kinds])
    assert (
        collect_average_decays(own) == {0.9, 0.3, 0.1} and find_reconstructed_average(tmp_path, 0.1, None, own) is None
    )


def test_kinds_and_names(tmp_path):
    """Oracle: what was written, in that order; the averages' decays as numbers."""
    path = tmp_path / make_shard_file_name("net", 0, 1)
    write_shard(
        path,
        [piece(0, 12, name, kind) for kind in ("master", "ema.0.9999", "ema.0.5") for name in ("b", "a")],
        {"step": "3"},
    )
    index = Index(tmp_path, "net", [path.name])
    assert index.list_value_kinds() == ["master", "ema.0.9999", "ema.0.5"] and index.list_average_decays() == [
        0.9999,
        0.5,
    ]
    assert index.list_tensor_names("ema.0.5") == ["b", "a"] and index.list_tensor_names("ema.0.7") == []
    with pytest.raises(ConfigError, match="net: the checkpoint .* holds no tensor named c$"):
        index.find_tensor_shape("c")
    assert "checkpoint a/b is damaged (torn): take an older one with --step" in str(
        make_damage_error(Path("a/b"), "torn")
    )


@pytest.mark.parametrize(
    "ranks, message",
    [
        ([], "no file net-.-of-..safetensors in"),
        ([(0, 2)], r"lacks net-00001-of-00002.safetensors \(1 of 2 shards\)"),
        ([(1, 2)], r"lacks net-00000-of-00002.safetensors"),
        ([(0, 1), (2, 1)], r"lacks  \(2 of 1 shards\)"),
        ([(0, 2), (0, 1)], r"several world sizes: \[1, 2\]"),
        ([(7, 8)], r"lacks net-00000-of-00008.safetensors, .*net-00004-of-00008.safetensors \(1 of 8 shards\)"),
    ],
)
def test_sets_of_shards(tmp_path, ranks, message):
    """Oracle: by hand: a shard of every rank of one world, no more; at most five that are missing are named."""
    for rank, world in ranks:
        write_shard(tmp_path / make_shard_file_name("net", rank, world), [piece(0, 12)])
    with pytest.raises(ConfigError, match=message):
        Shards(tmp_path, "net")


def test_fragments_lie_within_their_tensor():
    """Oracle: the contract: 0 <= start <= start + numel <= the tensor's size."""
    for start, numel in ((0, 12), (0, 0), (12, 0), (11, 1)):
        assert Fragment("w", (3, 4), start, numel).numel == numel
    for start, numel in ((-1, 2), (0, 13), (12, 1), (3, -1)):
        with pytest.raises(ConfigError, match=f"w: elements {start} .. {start + numel} are"):
            Fragment("w", (3, 4), start, numel)


def test_headers(tmp_path, monkeypatch):
    """Oracle: the format of safetensors by hand: a length of 8 bytes, JSON padded to 8, offsets in a row."""
    path, kinds = tmp_path / "a.safetensors", [("a", "F32", (2, 3)), ("b", "BF16", (5,)), ("c", "I64", ())]
    header = render_safetensors_header(path, kinds, {"x": "y"})
    assert len(header) % 8 == 0
    path.write_bytes(header + bytes(24 + 10 + 8))
    begin, entries = data_of(path)
    assert begin == len(header) and [entries[name]["data_offsets"] for name in "abc"] == [[0, 24], [24, 34], [34, 42]]
    tensors, metadata = read_safetensors_header(path)
    assert metadata == {"x": "y"} and tensors == {
        "a": Stored("F32", (2, 3), (Span(path, begin, 24),)),
        "b": Stored("BF16", (5,), (Span(path, begin + 24, 10),)),
        "c": Stored("I64", (), (Span(path, begin + 34, 8),)),
    }
    for old, new in ((b"[2,3]", b"[2,4]"), (b"[24,34]", b"[24,33]"), (b"[24,34]", b"[24,35]")):
        path.write_bytes(header.replace(old, new) + bytes(42))
        with pytest.raises(ConfigError, match="no readable safetensors file .offsets that do not fit a shape"):
            read_safetensors_header(path)
    for old, new in (
        (b"[34,42]", b"[35,43]"),
        (b"[34,42]", b"[90,98]"),
        (b"[0,24]", b"[24,0]"),
        (b"[0,24]", b"[-4,20]"),
    ):
        path.write_bytes(header.replace(old, new) + bytes(42))
        with pytest.raises(ConfigError, match="no readable safetensors file .*(offsets outside of the file|delimiter)"):
            read_safetensors_header(path)
    length = len(header) - 8
    for limit, fits in ((length, True), (length - 1, False)):
        monkeypatch.setattr(safetensors_io, "_MAX_HEADER", limit)
        path.write_bytes(header + bytes(42))
        if fits:
            assert read_safetensors_header(path)[0] == tensors
            assert render_safetensors_header(path, kinds, {"x": "y"}) == header
            continue
        with pytest.raises(ConfigError, match=f"a header of {length} bytes"):
            read_safetensors_header(path)
        with pytest.raises(ConfigError, match=f"a header of {length} bytes, readers take {limit}: one file"):
            render_safetensors_header(path, kinds, {"x": "y"})


@pytest.mark.parametrize(
    "length, message",
    [(10**8, "no readable safetensors file .Expecting value"), (10**8 + 1, "a header of 100000001 bytes")],
)
def test_the_longest_header(tmp_path, length, message):
    """Oracle: the safetensors library, which refuses the same lengths for being too large, and no shorter ones."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b" " * 8)
    with pytest.raises(ConfigError, match=message):
        read_safetensors_header(path)
    with pytest.raises(SafetensorError) as error, safe_open(path, "pt"):
        pass
    assert ("too large" in str(error.value)) == (length > 10**8)


@pytest.mark.parametrize(
    "sizes, room, files",
    [
        ([2, 2, 2], 16, [2, 1]),
        ([2, 2, 2], 15, [1, 1, 1]),
        ([9, 1, 1], 8, [1, 2]),
        ([1, 9, 1], 8, [1, 1, 1]),
        ([1, 1], 8, [2]),
        ([3], 1, [1]),
        ([], 8, [0]),
        ([1, 1, 2, 1], 16, [3, 1]),
    ],
)
def test_files_of_a_size(sizes, room, files):
    """Oracle: by hand: float32 tensors of so many elements, in order, in files of at most `room` bytes."""
    entries = [Entry(str(number), Stored("F32", (size,), ()), "F32") for number, size in enumerate(sizes)]
    dealt = split_entries_into_files(entries, room)
    assert [len(part) for part in dealt] == files and [entry for part in dealt for entry in part] == entries


def test_bytes_an_element():
    """Oracle: what the safetensors library writes of one element of every type of torch."""
    kinds = (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
    written = save({str(kind): torch.zeros(1, dtype=kind) for kind in kinds})[8:]
    header = json.loads(written.partition(b"}}")[0] + b"}}")
    sizes = {entry["dtype"]: entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values()}
    assert sizes == safetensors_io.SIZES
