"""Images in tars, zips, arrays and LMDB: pixels, labels, captions and order of the folder that was packed."""

import gzip
import io
import json
import pickle
import struct
import tarfile
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import braceexpand
import lmdb
import numpy as np
import pytest
import torch
import torchvision
import webdataset
from PIL import Image

from dstrain.data.decode.clips import Cut
from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.files import zipped as zip_files
from dstrain.data.files.local import LocalFiles, expanded
from dstrain.data.formats import LAYOUTS, recognised
from dstrain.data.formats.base import Request
from dstrain.data.formats.lmdbs import _values
from dstrain.data.formats.pickled import as_array, read_pickle
from dstrain.data.open import open_sources
from dstrain.data.source import BadSample
from dstrain.data.sources.images import open_images
from dstrain.data.sources.videos import open_videos
from dstrain.encoders.text import captions_of
from dstrain.recipe import ConfigError, Data
from tests.support.clips import moving, write
from tests.support.pictures import folder, picture

CLASSES, EACH = 3, 4


@pytest.fixture
def plain(tmp_path) -> Path:
    """A folder with classes whose order by whole paths is another one than by class: a-b/x comes before a/x."""
    for number, name in enumerate(("a", "a-b", "c d")[:CLASSES]):
        (tmp_path / "plain" / name).mkdir(parents=True)
        for i in range(EACH):
            suffix = (".png", ".webp", ".JPEG")[i % 3]
            picture(100 * number + i, 40 + i, 30).save(tmp_path / "plain" / name / f"{i:03}{suffix}")
    return tmp_path / "plain"


def files_of(root: Path) -> list[Path]:
    """The images, in the order of open_images."""
    source = open_images(root, 16)
    return [root / source.name(i) for i in range(len(source))]


def assert_equal(path: str | Path, root: Path, names: bool = True, classes: bool = True, **more) -> None:
    """That a container holds what a folder holds, sample by sample."""
    source, expected = open_images(path, 16, **more), open_images(root, 16)
    source = pickle.loads(pickle.dumps(source))  # as in a worker
    assert len(source) == len(expected)
    for i in range(len(expected)):
        assert torch.equal(source[i]["image"], expected[i]["image"])
        assert source[i]["label"] == (expected[i]["label"] if classes else 0)
        if names:
            assert source.name(i) == expected.name(i)
    assert len(source.classes) == (len(expected.classes) if classes else 0)


def test_webdataset(tmp_path, plain):
    """Oracle: the folder, packed by webdataset's own writer, with labels in .cls and in .json; its reader's keys."""
    files = files_of(plain)
    labels = {name: label for label, name in enumerate(sorted({path.parent.name for path in files}))}
    with webdataset.ShardWriter(str(tmp_path / "out-%05d.tar"), maxcount=5, verbose=0) as writer:
        for number, path in enumerate(files):
            label = labels[path.parent.name]
            texts = {"cls": label} if number < 5 else {"json": {"label": label, "caption": f"no. {number}"}}
            writer.write({"__key__": f"{number:04}", path.suffix[1:].lower(): path.read_bytes(), **texts})
    shards = sorted(tmp_path.glob("*.tar"))
    assert len(shards) == 3
    (tmp_path / "shards").mkdir()
    for path in shards:
        path.rename(tmp_path / "shards" / path.name)
    for path in (tmp_path / "shards", tmp_path / "shards" / "out-{00000..00002}.tar"):
        assert_equal(path, plain, names=False)
    source = open_images(tmp_path / "shards", 16)
    theirs = webdataset.WebDataset([str(tmp_path / "shards" / path.name) for path in shards], shardshuffle=False)
    keys = [sample["__key__"] for sample in theirs]
    assert [source.name(i).partition(".tar/")[2] for i in range(len(source))] == keys
    some, request = tmp_path / "shards" / "out-{00001..00002}.tar", Request(SUFFIXES, captions=True)
    captioned = open_images(some, 16, request=request)
    assert captions_of(torch.stack([captioned[i]["caption"] for i in range(len(captioned))])) == [
        f"no. {i}" for i in range(5, len(files))
    ]
    whole = open_images(tmp_path / "shards", 16, request=request)
    assert whole.layout.notes == {"uncaptioned": 5} and len(whole) == len(files) - 5
    layout = whole.layout
    for _ in (0, 1):  # as when a large index moves to a disk
        assert sum(1 for part in layout.parts() for _ in layout.samples(part)) == len(whole)
        assert layout.watched() and layout.notes == {"uncaptioned": 5}
    (tmp_path / "shards" / "out-00002.tar").rename(tmp_path / "LAST.TAR")
    assert len(last := open_images(tmp_path / "LAST.TAR", 16)) == len(files) - 10 and last[0]


@pytest.mark.parametrize("damaged", [{"cls": b""}, {"json": b'{"label": 1'}])
def test_damaged_labels_in_tars(tmp_path, damaged):
    """Oracle: the contract: beside labelled samples, a label that cannot be read is named; without
    labels none is read.
    """
    image = io.BytesIO()
    picture(3).save(image, "PNG")
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        writer.write({"__key__": "0", "png": image.getvalue(), "cls": b"1"})
        writer.write({"__key__": "1", "png": image.getvalue(), **damaged})
    with pytest.raises(ConfigError, match=r"a.tar: 1\.\w+ is empty or damaged"):
        open_images(tmp_path / "a.tar", 16)
    assert len(open_images(tmp_path / "a.tar", 16, request=Request(SUFFIXES, labels="none"))) == 2


def test_tars_of_others(tmp_path):
    """Oracle: webdataset's rules by hand: keys end at the first dot, several suffixes, names of classes, videos."""
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for key, label in (("b/1", "dog"), ("b/0", "cat")):
            image = io.BytesIO()
            picture(3).save(image, "PNG")
            writer.write(
                {
                    "__key__": key,
                    "png": image.getvalue(),
                    "seg.png": b"mask",
                    "mp4": b"film",
                    "cls": label.encode(),
                    "txt": b" a text \n another \n",
                    "json": b"[1]",
                }
            )

    def samples(suffixes, **more):
        layout = recognised(str(tmp_path), LocalFiles(tmp_path), Request(suffixes, **more))
        return [
            (sample.place.name, sample.label, sample.captions, layout.read(sample.place))
            for part in layout.parts()
            for sample in layout.samples(part)
        ]

    assert [row[:3] for row in samples(SUFFIXES)] == [("a.tar/b/0", "cat", ()), ("a.tar/b/1", "dog", ())]
    assert samples((".mp4", ".png"), noun="clips", captions=True, labels="none") == [
        (f"a.tar/b/{number}", None, ("a text", "another"), b"film") for number in (0, 1)
    ]


@pytest.mark.parametrize(
    "name, words",
    [
        ("0.png", r"a.tar is no readable tar file \(it has two members 0.png"),
        ("1.v2.png", r"a.tar: 1.v2.png has several dots"),
    ],
)
def test_images_that_would_be_lost_without_a_word(tmp_path, name, words):
    """Oracle: the contract: an image that has no key of its own is named."""
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for member in ("0.png", name):
            archive.addfile(tarfile.TarInfo(member))
    with pytest.raises(ConfigError, match=words):
        open_images(tmp_path / "a.tar", 16)


def test_columns_are_of_tables(tmp_path):
    """Oracle: the contract: what data.columns names and the data cannot have is refused; in a mixture others may."""
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        image = io.BytesIO()
        picture(3).save(image, "PNG")
        writer.write({"__key__": "0", "png": image.getvalue()})
    columns = {"caption": "alt"}
    for path in (tmp_path / "a.tar", "builtin:fashion"):
        with pytest.raises(ConfigError, match="data.columns"):
            open_sources(Data(path=str(path), columns=columns))
    (tmp_path / "list.csv").write_text("path,alt\na.png,text\n")
    picture(3).save(tmp_path / "a.png")
    mixture = [{"path": str(tmp_path / name)} for name in ("a.tar", "list.csv")]
    assert len(open_sources(Data(mixture=mixture, columns=columns))[0]) == 2


@pytest.mark.parametrize(
    "name, command", [("a.tar.gz", "gunzip "), ("a.tgz", "gunzip "), ("a.tar.zst", "unzstd --rm ")]
)
def test_a_compressed_tar_is_refused(tmp_path, name, command):
    """Oracle: the command that unpacks it, as its manual says."""
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    with pytest.raises(ConfigError, match=f"unpack it, {command}{tmp_path / name}"):
        open_images(tmp_path, 16)


@pytest.mark.parametrize("pattern", ["x/{00..12}.tar", "{a,b}/{0..10}.tar", "x{008..011}_{x,y}.tar", "plain.tar"])
def test_patterns(pattern):
    """Oracle: braceexpand, which webdataset takes."""
    assert expanded(pattern) == list(braceexpand.braceexpand(pattern))


@pytest.mark.parametrize("pattern", ["x/{9..0}.tar", "x/{0..9", "{0..999999999}", "{0..9999}{0..9999}", "x{}}"])
def test_wrong_patterns(pattern):
    """Oracle: what a shell leaves as it is, or would not end to expand."""
    with pytest.raises(ConfigError):
        expanded(pattern)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("labels", ["numbers", "null", "folders", "a folder around"])
def test_zips(tmp_path, plain, method, labels):
    """Oracle: the folder, packed by zipfile as EDM2's dataset_tool does it, or as people do."""
    path, files = tmp_path / "out.zip", files_of(plain)
    rows = [[path.relative_to(plain).as_posix(), ord(path.parent.name[-1]) % 7] for path in files]
    with zipfile.ZipFile(path, "w", method) as archive:
        for file in reversed(files):
            around = "data/" if labels == "a folder around" else ""
            archive.writestr(f"{around}{file.relative_to(plain).as_posix()}", file.read_bytes())
        archive.writestr("__MACOSX/a/._0.png", b"no image")
        if labels in ("numbers", "null"):
            archive.writestr("dataset.json", json.dumps({"labels": rows if labels == "numbers" else None}))
    if labels in ("numbers", "null"):
        (plain / "dataset.json").write_text(json.dumps({"labels": rows if labels == "numbers" else None}))
    assert_equal(path, plain)
    assert open_images(path, 16).classes == open_images(plain, 16).classes


def test_a_zip64_and_a_comment(tmp_path, plain, monkeypatch):
    """Oracle: the folder, in a zip file whose directory has 64-bit fields, behind other bytes and before a comment."""
    files = files_of(plain)
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 2)
    with zipfile.ZipFile(tmp_path / "out.zip", "w") as archive:
        for file in files:
            archive.writestr(file.relative_to(plain).as_posix(), file.read_bytes())
        archive.comment = b"PK" * 99
    content = (tmp_path / "out.zip").read_bytes()
    assert b"PK\x06\x06" in content and b"PK\x06\x07" in content
    assert_equal(tmp_path / "out.zip", plain)
    with zipfile.ZipFile(tmp_path / "behind.zip", "w") as archive:
        pass
    monkeypatch.undo()
    (tmp_path / "behind.zip").write_bytes(b"#!/bin/sh\n" * 50)
    with zipfile.ZipFile(tmp_path / "behind.zip", "a") as archive:
        for file in files:
            archive.writestr(file.relative_to(plain).as_posix(), file.read_bytes())
    assert_equal(tmp_path / "behind.zip", plain)


def test_altered_members_are_bad_samples(tmp_path, plain):
    """Oracle: the check sum that zipfile has written."""
    with zipfile.ZipFile(tmp_path / "out.zip", "w") as archive:
        for file in files_of(plain):
            archive.writestr(file.relative_to(plain).as_posix(), file.read_bytes())
        place = archive.infolist()[1].header_offset + 200
    content = bytearray((tmp_path / "out.zip").read_bytes())
    content[place] ^= 1
    (tmp_path / "out.zip").write_bytes(content)
    source = open_images(tmp_path / "out.zip", 16)
    with pytest.raises(BadSample, match="altered"):
        source[1]
    assert source[0] and source[2]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("labels", [True, False])
def test_npz(tmp_path, save, labels, monkeypatch):
    """Oracle: the folder of the same pixels; numpy wrote the file as ADM does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = folder(tmp_path / "plain", 2, 5)
    pixels = [np.asarray(Image.open(path)) for path in files_of(root)]
    numbers = np.repeat([0, 1], 5)
    save(tmp_path / "samples_10x30x40x3.npz", np.stack(pixels), *([numbers] if labels else []))
    assert_equal(tmp_path / "samples_10x30x40x3.npz", root, names=False, classes=labels)
    unpacked = list((tmp_path / "cache").rglob("*.npy"))
    assert len(unpacked) == (save is np.savez_compressed)
    for path in unpacked:  # once, and anew where the file has changed
        np.testing.assert_array_equal(np.load(path), np.stack(pixels))
        save(tmp_path / "samples_10x30x40x3.npz", np.stack(pixels[::-1]))
        anew = open_images(tmp_path / "samples_10x30x40x3.npz", 16)
        assert torch.equal(anew[0]["image"], open_images(root, 16)[9]["image"])


@pytest.mark.parametrize(
    "labels", [[0.5, 1.7], [0, np.nan], [0, np.inf], [[0, 0], [0, 1]], [[0.3, 0.7], [0, 1]], [[3], [2]]]
)
def test_labels_of_an_npz_that_are_none(tmp_path, labels):
    """Oracle: the contract: labels are whole numbers or one-hot rows, and nothing else is rounded to one."""
    np.savez(tmp_path / "a.npz", np.zeros((2, 8, 8, 3), np.uint8), np.array(labels))
    with pytest.raises(ConfigError, match="neither whole numbers .* nor one-hot"):
        open_images(tmp_path / "a.npz", 16)


def test_a_label_below_zero_in_a_tar(tmp_path):
    """Oracle: the contract: -1 is no class, and no name of one."""
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        writer.write({"__key__": "a", "png": b"", "cls": b"-1"})
    with pytest.raises(ConfigError, match="has the label -1"):
        open_images(tmp_path, 16)


def cifar(root: Path, hundred: bool, draw: np.random.Generator) -> None:
    """What torchvision unpacks: batches by the pickle of Python 2, protocol 2, whose texts are bytes."""
    names = ["train", "test"] if hundred else [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    root.mkdir(parents=True)
    for name in names:
        data = draw.integers(0, 256, (20, 3072), dtype=np.uint8)
        labels = draw.integers(0, 100 if hundred else 10, 20).tolist()
        batch = {"data": data, "filenames": [f"{i}.png" for i in range(20)]}
        (root / name).write_bytes(of_python_2(batch | {"fine_labels" if hundred else "labels": labels}))
        (root / f"{name}.bin").write_bytes(
            b"".join(bytes([0] * hundred + [label]) + row.tobytes() for label, row in zip(labels, data))
        )
    classes = [f"class {i}" for i in range(100 if hundred else 10)]
    meta = {"fine_label_names" if hundred else "label_names": classes}
    (root / ("meta" if hundred else "batches.meta")).write_bytes(of_python_2(meta))


def of_python_2(content: dict) -> bytes:
    """A pickle as Python 2 wrote it: every text and the bytes of an array are its `str`, opcodes U and T."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value

    def value(item: object) -> bytes:
        if isinstance(item, str):
            return text(item.encode())
        if isinstance(item, int):
            return b"K" + bytes([item])
        if isinstance(item, list):
            return b"](" + b"".join(map(value, item)) + b"e"
        if isinstance(item, dict):
            return b"}(" + b"".join(value(key) + value(inner) for key, inner in item.items()) + b"u"
        rows, columns = item.shape
        return (
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\x01b\x87R(K\x01M"
            + struct.pack("<H", rows)
            + b"M"
            + struct.pack("<H", columns)
            + b"\x86cnumpy\ndtype\nU\x02u1K\0K"
            b"\x01\x87R(K\x03U\x01|NNN"
            b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89" + text(item.tobytes()) + b"tb"
        )

    return b"\x80\x02" + value(content) + b"."


@pytest.mark.parametrize("hundred", [False, True])
def test_cifar(tmp_path, hundred, monkeypatch):
    """Oracle: torchvision's own reader of the same files (its check of the download's MD5 apart); the binary files."""
    name = "cifar-100-python" if hundred else "cifar-10-batches-py"
    cifar(tmp_path / name, hundred, np.random.default_rng(1))
    kind = torchvision.datasets.CIFAR100 if hundred else torchvision.datasets.CIFAR10
    monkeypatch.setattr(kind, "_check_integrity", lambda self: True)
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda *_: True)
    binary = tmp_path / "bin" / ("cifar-100-binary" if hundred else "cifar-10-batches-bin")
    binary.mkdir(parents=True)
    for path in sorted((tmp_path / name).glob("*.bin")):
        path.rename(binary / path.name)
    names = [f"class_{i}\n" for i in range(100 if hundred else 10)]
    (binary / ("fine_label_names.txt" if hundred else "batches.meta.txt")).write_text("".join(names))
    for path in (tmp_path, tmp_path / name, binary.parent, binary):
        train, unseen = open_sources(Data(path=str(path), image_size=32))
        for source, of_train in ((train, True), (unseen, False)):
            expected = kind(str(tmp_path), train=of_train)
            assert len(source) == len(expected)
            for i in (0, 7, len(expected) - 1):
                image, label = expected[i]
                assert torch.equal(source[i]["image"], torch.from_numpy(np.array(image)).permute(2, 0, 1))
                assert source[i]["label"] == label
            assert [text.replace("_", " ") for text in source.classes] == expected.classes
    own = open_sources(Data(path=str(tmp_path), image_size=32, held_out=0.5))[1]
    assert 0 < len(own) < len(train) and own.name(0).startswith(("data_batch", "train"))
    (tmp_path / name / ("train" if hundred else "data_batch_1")).write_bytes(
        pickle.dumps({"data": Path("x"), "labels": [0]})
    )
    with pytest.raises(
        ConfigError,
        match="cannot be read as a file of CIFAR: it holds no plain array where one is expected; fetch it anew",
    ):
        open_sources(Data(path=str(tmp_path / name), image_size=32))


@pytest.mark.parametrize("protocol", range(2, 6))
def test_pickles_of_python_3(protocol):
    """Oracle: pickle itself. Protocol 2 writes the bytes as a text that stands for them, which has no place."""
    data = np.arange(64, dtype=np.uint8).reshape(4, 16)
    content = pickle.dumps({"data": data, "labels": [1, 2, 3, 2**40], "more": (None, True, 1.5, [], {})}, protocol)
    value = read_pickle(content)
    assert value["labels"] == [1, 2, 3, 2**40] and value["more"] == (None, True, 1.5, [], {})
    if protocol == 2:
        with pytest.raises(ConfigError, match="write it with protocol=4"):
            as_array(value["data"])
        return
    array = as_array(value["data"])
    assert array[:2] == ((4, 16), np.uint8) and content[array.place : array.place + 64] == data.tobytes()


@pytest.mark.parametrize(
    "below, ending",
    [("MNIST/raw", ""), ("EMNIST/raw", ""), ("FashionMNIST/raw", ".gz"), ("KMNIST/raw", ""), ("", ".gz")],
)
def test_idx(tmp_path, below, ending, monkeypatch):
    """Oracle: torchvision's reader of the same files, and numpy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    draw, prefix = np.random.default_rng(2), "emnist-letters-" if below == "EMNIST/raw" else ""
    (tmp_path / "data" / below).mkdir(parents=True)
    expected = {}
    for split, number in (("train", 30), ("test" if prefix else "t10k", 12)):
        images = draw.integers(0, 256, (number, 28, 20), dtype=np.uint8)
        labels = draw.integers(0, 10, number, dtype=np.uint8)
        labels[0] = 9
        expected[split] = images, labels
        for kind, header, array in (
            ("images-idx3", (0x803, *images.shape), images),
            ("labels-idx1", (0x801, number), labels),
        ):
            content = struct.pack(f">{len(header)}I", *header) + array.tobytes()
            path = tmp_path / "data" / below / f"{prefix}{split}-{kind}-ubyte{ending}"
            path.write_bytes(gzip.compress(content) if ending else content)
    sources = open_sources(Data(path=str(tmp_path / "data"), image_size=20, channels=1))
    for source, (split, (images, labels)) in zip(sources, expected.items()):
        assert len(source) == len(images) and source.labels.tolist() == labels.tolist()
        for i in range(len(source)):
            np.testing.assert_array_equal(source[i]["image"][0], images[i, 4:24])
    if below == "MNIST/raw":
        theirs = torchvision.datasets.MNIST(str(tmp_path / "data"))
        np.testing.assert_array_equal(theirs.data, expected["train"][0])
    unpacked = list((tmp_path / "cache").rglob("*-ubyte"))
    assert len(unpacked) == (2 if ending else 0)
    again = open_sources(Data(path=str(tmp_path / "data"), image_size=20, channels=1))[0]
    assert torch.equal(again[3]["image"], sources[0][3]["image"]) and again.fingerprint() == sources[0].fingerprint()


def environment(path: Path, values: dict[bytes, bytes]) -> None:
    with lmdb.open(str(path), map_size=1 << 26) as env, env.begin(write=True) as transaction:
        for key, value in values.items():
            transaction.put(key, value)


def test_lsun(tmp_path, plain):
    """Oracle: the folder, of which each class became an environment by the lmdb package; LSUN's names of splits."""
    root = tmp_path / "lsun"
    root.mkdir()
    for name in sorted(path.name for path in plain.iterdir()):
        values = {file.name.encode(): file.read_bytes() for file in (plain / name).iterdir()}
        environment(root / f"{name}_train_lmdb", values | {b"length": b"4"})
        environment(root / f"{name}_val_lmdb", dict(list(values.items())[:1]))
    environment(root / "test_lmdb", values)
    assert_equal(root, plain)
    for file in root.rglob("lock.mdb"):
        file.unlink()
    train, unseen = open_sources(Data(path=str(root), image_size=16))
    assert len(unseen) == CLASSES and unseen.classes == train.classes and sorted(unseen.labels) == [0, 1, 2]
    one, none = open_sources(Data(path=str(root / "a_train_lmdb"), image_size=16))
    assert len(one) == EACH and one.classes == () and none is None
    assert not list(root.rglob("lock.mdb"))
    with lmdb.open(str(tmp_path / "a.lmdb"), map_size=1 << 26, subdir=False, lock=False) as env:
        with env.begin(write=True) as transaction:
            for file in (plain / "a").iterdir():
                transaction.put(file.name.encode(), file.read_bytes())
    alone = open_images(tmp_path / "a.lmdb", 16)
    assert len(alone) == EACH and all(torch.equal(alone[i]["image"], one[i]["image"]) for i in range(EACH))


def test_lmdb_pages(tmp_path):
    """Oracle: the lmdb package's cursor over a tree of three levels, with values in pages and in pages of their own."""
    draw = np.random.default_rng(5)
    values = {draw.bytes(20).hex().encode(): draw.bytes(100 if i % 5 else 5000 + i) for i in range(3000)}
    environment(tmp_path / "a", values)
    environment(tmp_path / "a", {key: value[::-1] for key, value in list(values.items())[:700]})  # pages used again
    with (
        lmdb.open(str(tmp_path / "a"), readonly=True, lock=False) as env,
        env.begin() as transaction,
        open(tmp_path / "a" / "data.mdb", "rb") as file,
    ):
        assert env.stat()["depth"] == 3
        rows = list(_values(file))
        expected = list(transaction.cursor())
        assert [key for key, _, _ in rows] == [key for key, _ in expected]
        for (_, place, size), (_, value) in zip(rows, expected):
            file.seek(place)
            assert file.read(size) == value


def test_one_form_each(tmp_path, plain):
    """Oracle: the table of layouts: a plain folder with an archive of itself beside its classes stays a folder."""
    (plain / "all.tar").write_bytes(b"")
    (plain / "all.zip").write_bytes(b"")
    assert len(open_images(plain, 16)) == CLASSES * EACH
    names = [layout.__name__ for layout in LAYOUTS]
    assert len(set(names)) == len(names)


def test_labels_and_class_list(tmp_path, plain):
    """Oracle: the folder with the same entries of the recipe: classes by a list, by the prefix of a name, and none."""
    (tmp_path / "list.txt").write_text("c d\nx\na\na-b\n")
    for file in files_of(plain):
        file.rename(file.with_name(f"{file.parent.name}_{file.name}"))
    with zipfile.ZipFile(tmp_path / "out.zip", "w") as archive, webdataset.TarWriter(str(tmp_path / "out.tar")) as tar:
        for file in files_of(plain):
            archive.writestr(file.relative_to(plain).as_posix(), file.read_bytes())
            tar.write(
                {
                    "__key__": f"{file.parent.name}/{file.stem}",
                    "png": file.read_bytes(),
                    "cls": file.parent.name.encode(),
                }
            )
    for labels, class_list in (("auto", "list.txt"), ("prefix", "list.txt"), ("prefix", None), ("none", None)):
        request = Request(SUFFIXES, labels=labels, class_list=class_list and str(tmp_path / class_list))
        expected = open_images(plain, 16, request=request)
        by_stem = {Path(expected.name(i)).stem: expected[i]["label"] for i in range(len(expected))}
        zipped = open_images(tmp_path / "out.zip", 16, request=request)
        assert [zipped.name(i) for i in range(len(zipped))] == [expected.name(i) for i in range(len(expected))]
        for path in (tmp_path / "out.zip", tmp_path / "out.tar"):
            source = open_images(path, 16, request=request)
            assert {Path(source.name(i)).stem: source[i]["label"] for i in range(len(source))} == by_stem
            assert source.classes == expected.classes
    (tmp_path / "list.txt").write_text("c d\na\n")
    for path in (tmp_path / "out.zip", tmp_path / "out.tar"):
        with pytest.raises(ConfigError, match="'a-b' is not among the 2 of data.class_list"):
            open_images(path, 16, request=Request(SUFFIXES, class_list=str(tmp_path / "list.txt")))


def test_clips_in_tars(tmp_path):
    """Oracle: the folder of the same clips and captions beside them."""
    root = tmp_path / "plain"
    root.mkdir()
    with webdataset.TarWriter(str(tmp_path / "out.tar")) as tar:
        for number in range(3):
            content = write(root / f"{number}.mp4", moving(5 + number, seed=number), "mpeg4").read_bytes()
            (root / f"{number}.txt").write_text(f"clip {number}")
            tar.write({"__key__": str(number), "jpg": b"a picture of it", "mp4": content, "txt": f"clip {number}"})
    cut = Cut(3, 16, 16, 3)
    source, expected = open_videos(tmp_path / "out.tar", cut), open_videos(root, cut)
    assert len(source) == len(expected) == 3
    for i in range(3):
        assert all(torch.equal(source[i][name], expected[i][name]) for name in ("video", "caption"))


def test_bombs_beside_each_other_inflate_in_turn(monkeypatch):
    """Oracle: a count of the threads that inflate more than a picture has at a time."""
    writer, most = zlib.compressobj(9, zlib.DEFLATED, -15), 2 * zip_files._LARGE
    bomb, now, together = writer.compress(bytes(most)) + writer.flush(), [], []

    class Watched:
        def __init__(self, *words):
            self.stream, self.calls = decompressobj(*words), 0

        def decompress(self, content, limit):
            self.calls += 1
            now.extend([None] * (self.calls == 2))
            together.append(len(now))
            inflated = self.stream.decompress(content, limit)
            del now[: self.calls == 2]
            return inflated

        def __getattr__(self, name):
            return getattr(self.stream, name)

    decompressobj = zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", Watched)
    with ThreadPoolExecutor(4) as threads:
        assert all(len(content) == most for content in threads.map(lambda _: zip_files.inflated(bomb, most), range(8)))
    assert max(together) == 1
