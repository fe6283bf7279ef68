"""Tars, zips, arrays and LMDB that were made to do harm, given to layouts and converters; see test_hostile_files.py."""

import contextlib
import gzip
import io
import json
import os
import pickle
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest

from dstrain.commands.convert import ConvertOptions, convert_data
from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.files.local import LocalFiles
from dstrain.data.formats import recognise_layout
from dstrain.data.formats.base import Request
from dstrain.data.formats.labels import ClassList
from dstrain.data.formats.tars import MAX_BYTES
from dstrain.data.source import BadSample
from dstrain.data.sources.images import open_images
from dstrain.recipe import ConfigError
from launch.convert.lsun import read_lsun
from tests.faults.test_hostile_files import BOMB, GOOD, MARK, TARS, Evil, npy, outcome, picture, tar, zipped

Content = bytes | Callable[[], bytes]
CONVERTED = {  # kind of `dstrain convert` -> the file
    "npz": "a.npz",
    "cifar10": "data_batch_2",
    "mnist": "train-images-idx3-ubyte",
    "mnist.gz": "train-images-idx3-ubyte.gz",
    "lsun": "data.mdb",
}


def first_image(path: Path) -> object:
    """The first sample that can be read, of the file or of the folder around it."""
    kind = next((kind for kind, name in CONVERTED.items() if name == path.name), None)
    root = path if path.suffix in (".zip", ".npz") else path.parent
    if kind is not None:
        root = Path(os.environ["XDG_CACHE_HOME"], "out")
        convert_data(ConvertOptions(kind.removesuffix(".gz"), path if kind == "npz" else path.parent, root))
    source = open_images(root, 16)
    return len(source), source.read_first_readable()["image"].shape


def changed(content: bytes, place: int, new: bytes) -> bytes:
    return content[:place] + new + content[place + len(new) :]


def header(name: str, size: bytes, kind: bytes = b"0") -> bytes:
    """A tar header whose check sum is right, whatever it says."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    block[124:136], block[156:157], block[148:156] = size, kind, b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


TEN_GB = b"\x80" + (10 << 30).to_bytes(11, "big")
MINUS = b"\xff" * 10 + b"\xfc\x00"  # -1,024
MORE_TARS: dict[str, bytes] = {
    "attributes of 10 GB": header("a", TEN_GB, b"x") + tar(*GOOD),
    "a name of 10 GB": header("a", TEN_GB, b"L") + tar(*GOOD),
    "minus 1,024 bytes": tar(*GOOD)[:-1024] + header("b.png", MINUS) + tar(*GOOD),
    "minus 1,024 bytes of attributes": tar(*GOOD)[:-1024] + header("b", MINUS, b"x") + tar(*GOOD),
    "a deep json": tar(("a.json", b"[" * 100_000, {}), *GOOD),
    "a long label": tar(("a.cls", b"9" * 100_000, {}), *GOOD),
    "gzip": gzip.compress(tar(*GOOD)),
    "cut in the last picture": tar(*GOOD, ("b.png", picture(), {}))[:2100],
}


PNG = {"a.png": picture(), "b.png": picture()}


def entries(content: bytes) -> list[int]:
    """Where the entries of a zip file's directory begin."""
    return [place for place in range(len(content)) if content[place : place + 4] == b"PK\1\2"]


def with_entry(place: int, new: bytes, number: int = 0, members: dict = PNG) -> bytes:
    """A zip file with other bytes in an entry of its directory."""
    content = zipped(members)
    return changed(content, entries(content)[number] + place, new)


def overlapping() -> bytes:
    """Both entries lead to the first member's bytes."""
    content = zipped(PNG)
    first, second = entries(content)
    return changed(content, second + 42, content[first + 42 : first + 46])


def half_overlapping() -> bytes:
    """The first member's bytes hold the second member, as in bombs that do not nest."""
    content = zipped(PNG)
    first, _ = entries(content)
    return changed(content, first + 20, struct.pack("<I", 200))


def table(labels: object) -> dict[str, bytes]:
    return PNG | {"dataset.json": labels if isinstance(labels, bytes) else json.dumps(labels).encode()}


ZIPS: dict[str, Content] = {
    "empty": b"",
    "noise": bytes(range(256)) * 40,
    "cut": lambda: zipped(PNG)[:-30],
    "no directory": lambda: zipped(PNG)[:200],
    "cut in the middle": lambda: zipped(PNG)[:80] + zipped(PNG)[120:],
    "a bomb": lambda: zipped({"a.png": 2 * BOMB + 1, "b.png": picture()}),
    "a bomb of labels": lambda: with_entry(24, struct.pack("<I", 2**32 - 2), 2, table([])),
    "a bomb that lies": lambda: with_entry(24, struct.pack("<I", 20), 2, PNG | {"dataset.json": BOMB}),
    "overlapping": overlapping,
    "half overlapping": half_overlapping,
    "encrypted": lambda: with_entry(8, b"\1\0"),
    "by a method": lambda: with_entry(10, struct.pack("<H", 99)),
    "beyond the end": lambda: with_entry(20, struct.pack("<I", 1 << 30)),
    "far away": lambda: with_entry(42, b"\xfe\xff\xff\xff"),
    "without 64 bits": lambda: with_entry(42, b"\xff\xff\xff\xff"),
    "one of several": lambda: zipped(PNG)[:-18] + b"\1\0" + zipped(PNG)[-16:],
    "long names": lambda: with_entry(28, b"\xff\xff"),
    "another local header": lambda: zipped(PNG).replace(b"PK\3\4", b"PK\3\5", 1),
    "a long local name": lambda: changed(zipped(PNG), 26, b"\xff\xff"),
    "above": lambda: zipped({f"../../{MARK}.png": picture(), "b.png": picture()}),
    "absolute": lambda: zipped({f"/tmp/{MARK}.png": picture(), "b.png": picture()}),
    "a NUL": lambda: zipped({"a.png": picture(), "bXc.png": picture()}).replace(b"bXc", b"b\0c"),
    "a pickle": lambda: zipped({"a.png": pickle.dumps(Evil()), "b.png": picture()}),
    "deep labels": lambda: zipped(table(b"[" * 100_000)),
    "labels as words": lambda: zipped(table({"labels": [["a.png", "x"]]})),
    "labels of others": lambda: zipped(table({"labels": [["x.png", 1]]})),
    "a list": lambda: zipped(table([1])),
    "huge labels": lambda: zipped(table({"labels": [["a.png", 10**30], ["b.png", 1]]})),
    "64 bits of nothing": lambda: (
        zipped(PNG)[:-22] + struct.pack("<4sIQI", b"PK\6\7", 0, 1 << 62, 1) + zipped(PNG)[-22:]
    ),
}


def _npz(save: Callable = np.savez, **arrays: object) -> bytes:
    file = io.BytesIO()
    save(file, **arrays)
    return file.getvalue()


IMAGES = np.zeros((4, 32, 32, 3), np.uint8)
NPZS: dict[str, Content] = {
    "objects": lambda: _npz(arr_0=np.array([Evil()] * 4, object)),
    "labels as objects": lambda: _npz(arr_0=IMAGES, arr_1=np.array([Evil()] * 4, object)),
    "2**40 rows": lambda: zipped({"arr_0.npy": npy((2**40, 32, 32, 3), "|u1")}),
    "2**70 rows": lambda: zipped({"arr_0.npy": npy((2**70, 32, 32, 3), "|u1")}),
    "negative rows": lambda: zipped({"arr_0.npy": npy((-4, 32, 32, 3), "|u1")}),
    "a program as header": lambda: zipped(
        {"arr_0.npy": b"\x93NUMPY\1\0\x40\0" + b"__import__('os').system('touch EXECUTED')".ljust(64)}
    ),
    "a deep header": lambda: zipped({"arr_0.npy": b"\x93NUMPY\2\0" + struct.pack("<I", 60000) + b"[" * 60000}),
    "a bomb": lambda: zipped({"arr_0.npy": BOMB}),
    "noise": bytes(range(256)) * 9,
    "empty": b"",
    "no arrays": lambda: zipped({}),
    "columns": lambda: _npz(arr_0=np.asfortranarray(np.ones((4, 32, 32, 3), np.uint8))),
    "floats": lambda: _npz(arr_0=IMAGES / 1.0),
    "other labels": lambda: _npz(arr_0=IMAGES, arr_1=np.zeros((3, 2, 2))),
    "cut": lambda: _npz(arr_0=IMAGES)[:5000],
    "no rows": lambda: _npz(arr_0=IMAGES[:0]),
    "cut when packed": lambda: _npz(np.savez_compressed, arr_0=IMAGES)[:100],
    "a lie when packed": lambda: with_entry(
        24,
        struct.pack("<I", 128 + 2 * IMAGES.size),
        0,
        {"arr_0.npy": npy((8, 32, 32, 3), "|u1")[:-64] + bytes(IMAGES.size)},
    ),
    "100,000 members": lambda: zipped({f"{i}.npy": b"" for i in range(2000)}),
}


def batch(**changes: object) -> bytes:
    return pickle.dumps({"data": np.zeros((4, 3072), np.uint8), "labels": [1, 2, 3, 4]} | changes, 4)


CIFARS: dict[str, Content] = {
    "a program": lambda: pickle.dumps(Evil()),
    "a program in it": lambda: batch(labels=Evil()),
    "a program beside": lambda: batch(x=Evil()),
    "a memo of 16 GB": b"\x80\2}r\xff\xff\xff\x7f" + batch()[2:],
    "deep": b"\x80\2" + b"(" * 200_000 + b"l.",
    "deep lists": b"\x80\2" + b"]" * 20_000 + b"a" * 19_999 + b".",
    "a long text": b"\x80\4\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
    "an extension": b"\x80\2\x82\1.",
    "a persistent name": b"\x80\2Uxxx" + b"Q.",
    "an old class": b"(i__main__\nEvil\n.",
    "empty": b"",
    "noise": bytes(range(256)),
    "cut": lambda: batch()[:3000],
    "objects": lambda: batch(data=np.array([Evil()] * 4, object)),
    "other labels": lambda: batch(labels=["a"] * 4),
    "fewer labels": lambda: batch(labels=[1]),
    "a list": lambda: pickle.dumps([1]),
    "no stop": b"\x80\2}",
    "builds a dict": b"\x80\2}}b.",
    "numbers of a megabyte": b"I" + b"9" * 1_000_000 + b"\n.",
}
IDXS: dict[str, Content] = {
    "2**32 images": struct.pack(">4I", 0x803, 2**32 - 1, 28, 28) + bytes(784),
    "0 px": struct.pack(">4I", 0x803, 4, 0, 28),
    "cut": struct.pack(">4I", 0x803, 4, 28, 28) + bytes(3000),
    "more": struct.pack(">4I", 0x803, 4, 28, 28) + bytes(4000),
    "2**30 px": struct.pack(">4I", 0x803, 1, 2**15, 2**15),
    "empty": b"",
    "noise": bytes(range(256)),
}
PACKED: dict[str, Content] = {
    name: (lambda content: lambda: gzip.compress(content))(content) for name, content in IDXS.items()
} | {
    "a bomb": lambda: gzip.compress(struct.pack(">4I", 0x803, 4, 28, 28) + bytes(BOMB)),
    "no gzip": bytes(range(256)),
    "cut packed": lambda: gzip.compress(struct.pack(">4I", 0x803, 4, 28, 28) + np.random.default_rng(0).bytes(3136))[
        :2000
    ],
}


def environment() -> bytes:
    """An LMDB of two levels with pictures of some kilobytes and keys whose values are numbers."""
    with tempfile.TemporaryDirectory() as folder:
        with lmdb.open(folder, map_size=1 << 24) as env, env.begin(write=True) as transaction:
            for i in range(200):
                transaction.put(b"%04d" % i, (picture() + bytes(100 if i % 2 else 5000)) if i % 5 else b"4")
        return Path(folder, "data.mdb").read_bytes()


def in_meta(place: int, value: int) -> Callable[[], bytes]:
    """An LMDB with another number in its newer meta page."""
    return lambda: changed(environment(), 4096 + place, struct.pack("<Q", value))


LMDBS: dict[str, Content] = {
    "empty": b"",
    "zeros": bytes(8192),
    "noise": bytes(range(256)) * 32,
    "cut": lambda: environment()[:100_000],
    "another root": in_meta(128, 1 << 40),
    "the root is a meta page": in_meta(128, 0),
    "more pages": in_meta(136, 1 << 50),
    "a circle": lambda: in_circle(),
    "no pictures": lambda: environment().replace(picture()[:8], b"pickle!!"),
}


def in_circle() -> bytes:
    """An LMDB whose branches all lead to their root."""
    content = bytearray(environment())
    root = struct.unpack_from("<Q", content, 4096 + 128)[0]
    page = root * 4096
    assert struct.unpack_from("<H", content, page + 10)[0] & 1
    for place in range(16, struct.unpack_from("<H", content, page + 12)[0], 2):
        node = page + struct.unpack_from("<H", content, page + place)[0]
        struct.pack_into("<HH", content, node, root, 0)
    return bytes(content)


CASES: dict[str, tuple[str, Content]] = {
    **{f"tar: {name}": ("d/0.tar", content) for name, content in (TARS | MORE_TARS).items()},
    **{f"zip: {name}": ("d/a.zip", content) for name, content in ZIPS.items()},
    **{f"npz: {name}": ("d/a.npz", content) for name, content in NPZS.items()},
    **{f"cifar: {name}": ("d/data_batch_2", content) for name, content in CIFARS.items()},
    **{f"idx: {name}": ("d/train-images-idx3-ubyte", content) for name, content in IDXS.items()},
    **{f"idx.gz: {name}": ("d/train-images-idx3-ubyte.gz", content) for name, content in PACKED.items()},
    **{f"lmdb: {name}": ("d/data.mdb", content) for name, content in LMDBS.items()},
}
# Where a value is right: another sample stands in for a bad one, or what the harm is in is not read at all.
VALUES = (
    {
        f"tar: {name}"
        for name in (
            "above",
            "absolute",
            "a link",
            "a hard link",
            "a pipe",
            "sparse",
            "a long name",
            "a NUL",
            "a deep json",
        )
    }
    | {
        f"zip: {name}"
        for name in (
            "a bomb",
            "another local header",
            "a long local name",
            "above",
            "absolute",
            "a NUL",
            "a pickle",
            "a list",
        )
    }
    | {"cifar: a program beside"}
)


def prepare(path: Path) -> None:
    """What makes a whole of a hostile file, beside it."""
    for name in (*(f"data_batch_{i}" for i in (1, 3, 4, 5)), "test_batch") if path.name == "data_batch_2" else ():
        (path.parent / name).write_bytes(batch())
    if path.name == "data_batch_2":
        (path.parent / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    if path.name.startswith("train-images"):
        (path.parent / "train-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, 4) + bytes(4))


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_container_does_nothing(tmp_path, tmp_path_factory, case, monkeypatch):
    """Oracle: the folders, in which a command or a copy would leave a file; the limits of time and memory; the name."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    name, content = CASES[case]
    path = tmp_path / "work" / name
    path.parent.mkdir(parents=True)
    prepare(path)
    path.write_bytes(content() if callable(content) else content)
    before = sorted(tmp_path.rglob("*"))
    text = outcome(first_image, path)
    assert text.startswith("value: " if case in VALUES else "refused: ") and len(text) < 2000, text[-3000:]
    assert case in VALUES or path.name in text or "no images in it" in text
    assert sorted(tmp_path.rglob("*")) == before
    assert case in VALUES or not [file for file in cache.rglob("*") if file.name == "pack.json"]
    assert not list(cache.rglob(MARK))


def test_the_harm_is_real(tmp_path, monkeypatch):
    """Oracle: what unpacks without care: Python's unpickler executes the payload, zipfile inflates the bomb."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(CIFARS["a program in it"]())
    assert (tmp_path / MARK).exists()
    with zipfile.ZipFile(io.BytesIO(ZIPS["a bomb"]())) as archive:
        assert len(archive.read("a.png")) > MAX_BYTES and len(ZIPS["a bomb"]()) < 1 << 20


def all_of(path: Path) -> object:
    """Lists and reads whatever there is, by the layout or the converter alone."""
    if path.name == "data.mdb":
        return sum(len(content) for _, content, _ in read_lsun(path.parent, ClassList())["train"].samples)
    layout = recognise_layout(str(path.parent), LocalFiles(path.parent), Request(SUFFIXES))
    return sum(
        len(layout.read(sample.place)) for part in layout.list_partitions() for sample in layout.iterate_samples(part)
    )


@pytest.mark.parametrize(
    "name, sound", [("data.mdb", environment), ("0.tar", lambda: tar(*GOOD)), ("a.zip", lambda: zipped(PNG))]
)
def test_damaged_containers(tmp_path, name, sound):
    """Oracle: the same without damage; of 30 with some bytes altered each is read, or refused by one sentence."""
    content = sound()
    (tmp_path / name).write_bytes(content)
    assert outcome(all_of, tmp_path / name).startswith("value: ")

    def read_damaged(path: Path) -> str:
        """Reads 30 damaged files one after another. Raises the first error that is no refusal."""
        draw = np.random.default_rng(3)
        for _ in range(30):
            damaged = bytearray(content)
            for place in draw.integers(0, len(content), 40):
                damaged[place] = draw.integers(256)
            path.write_bytes(damaged)
            with contextlib.suppress(ConfigError, BadSample):
                all_of(path)
        return "30 files"

    text = outcome(read_damaged, tmp_path / name)
    assert text == "value: 30 files", text
