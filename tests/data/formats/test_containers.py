"""Images in tars, zips, arrays and LMDB: pixels, labels, captions and order of the folder that was packed."""

import io
import json
import pickle
import tarfile
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import braceexpand
import pytest
import torch
import webdataset

from dstrain.data.decode.clips import Cut
from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.files import zipped as zip_files
from dstrain.data.files.local import LocalFiles, expand_braces
from dstrain.data.formats import recognise_layout
from dstrain.data.formats.base import UNCAPTIONED, Request
from dstrain.data.open import open_sources
from dstrain.data.source import BadSample, pad_and_stack_texts
from dstrain.data.sources.images import open_images
from dstrain.data.sources.videos import open_videos
from dstrain.encoders.text import unpack_captions
from dstrain.recipe import ConfigError, Data
from tests.support.clips import moving, write
from tests.support.pictures import picture

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
    return [root / source.name_sample(i) for i in range(len(source))]


def assert_equal(path: str | Path, root: Path, names: bool = True, classes: bool = True, **more) -> None:
    """That a container holds what a folder holds, sample by sample."""
    source, expected = open_images(path, 16, **more), open_images(root, 16)
    source = pickle.loads(pickle.dumps(source))  # as in a worker
    assert len(source) == len(expected)
    for i in range(len(expected)):
        assert torch.equal(source[i]["image"], expected[i]["image"])
        assert source[i]["label"] == (expected[i]["label"] if classes else 0)
        if names:
            assert source.name_sample(i) == expected.name_sample(i)
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
    assert [source.name_sample(i).partition(".tar/")[2] for i in range(len(source))] == keys
    some, request = tmp_path / "shards" / "out-{00001..00002}.tar", Request(SUFFIXES, captions=True)
    captioned = open_images(some, 16, request=request)
    assert unpack_captions(pad_and_stack_texts([captioned[i]["caption"] for i in range(len(captioned))])) == [
        f"no. {i}" for i in range(5, len(files))
    ]
    (tmp_path / "all{0..1}").symlink_to("shards")  # a name of its own, and no pattern
    assert len(open_images(tmp_path / "all{0..1}", 16)) == len(files)
    whole = open_images(tmp_path / "shards", 16, request=request)
    assert whole.layout.left_out_counts == {UNCAPTIONED: 5} and len(whole) == len(files) - 5
    layout = whole.layout
    for _ in (0, 1):  # as when a large index moves to a disk
        layout.notes.clear()
        assert sum(1 for part in layout.list_partitions() for _ in layout.iterate_samples(part)) == len(whole)
        assert layout.list_files_watched_for_changes() and layout.left_out_counts == {UNCAPTIONED: 5}
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
        layout = recognise_layout(str(tmp_path), LocalFiles(tmp_path), Request(suffixes, **more))
        return [
            (sample.place.name, sample.label, sample.captions, layout.read(sample.place))
            for part in layout.list_partitions()
            for sample in layout.iterate_samples(part)
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
    assert expand_braces(pattern) == list(braceexpand.braceexpand(pattern))


@pytest.mark.parametrize("pattern", ["x/{9..0}.tar", "x/{0..9", "{0..999999999}", "{0..9999}{0..9999}", "x{}}"])
def test_wrong_patterns(pattern):
    """Oracle: what a shell leaves as it is, or would not end to expand."""
    with pytest.raises(ConfigError):
        expand_braces(pattern)


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


def test_a_label_below_zero_in_a_tar(tmp_path):
    """Oracle: the contract: -1 is no class, and no name of one."""
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        writer.write({"__key__": "a", "png": b"", "cls": b"-1"})
    with pytest.raises(ConfigError, match="the label -1 is no number from 0"):
        open_images(tmp_path, 16)


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
        by_stem = {Path(expected.name_sample(i)).stem: expected[i]["label"] for i in range(len(expected))}
        zipped = open_images(tmp_path / "out.zip", 16, request=request)
        assert [zipped.name_sample(i) for i in range(len(zipped))] == [
            expected.name_sample(i) for i in range(len(expected))
        ]
        for path in (tmp_path / "out.zip", tmp_path / "out.tar"):
            source = open_images(path, 16, request=request)
            assert {Path(source.name_sample(i)).stem: source[i]["label"] for i in range(len(source))} == by_stem
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
        assert all(len(content) == most for content in threads.map(lambda _: zip_files.inflate(bomb, most), range(8)))
    assert max(together) == 1
