"""Packing: what is read from shards and tars is what was packed, whoever packs and however often it is interrupted."""

import io
import json
import os
import shutil
import tarfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load_file

from dstrain.commands.pack import PackOptions, _write_tar, pack_data
from dstrain.data.cached import rows
from dstrain.data.decode.clips import Cut
from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.files.local import LocalFiles
from dstrain.data.formats import recognise_layout
from dstrain.data.formats.base import Request
from dstrain.data.formats.packed import PackedFiles, ShardWriter, iterate_packed_samples, name_shard
from dstrain.data.source import BadSample
from dstrain.data.sources.images import open_images
from dstrain.data.sources.videos import open_videos
from dstrain.disk import sealed
from dstrain.recipe import ConfigError
from tests.support import gloo
from tests.support.clips import moving, write_pictures
from tests.support.pictures import break_file, folder, picture

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def packed(path, out, **options):
    return pack_data(PackOptions(str(path), out=out, **{"shard_bytes": 30_000, **options}))


def files(out):
    return {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.name[0] != "."}


def require_same(one, other):
    """Names, labels, classes and pixels of two sources are equal, in order."""
    assert len(one) == len(other) and one.classes == other.classes
    for i in range(len(one)):
        assert one.name_sample(i) == other.name_sample(i)
        a, b = one[i], other[i]
        assert a["label"] == b["label"] and torch.equal(a["image"], b["image"])


def test_shards_are_the_folder(tmp_path):
    """Oracle: the plain folder: order, names, labels, classes, pixels, held-out names; and safetensors' own reader: the
    bytes are the files'.
    """
    root = folder(tmp_path / "data", 3, 20)
    Image.open(root / "c1" / "007.png").save(root / "c1" / "007.jpg")
    (root / "c1" / "007.png").unlink()
    index = packed(root, tmp_path / "out")
    assert len(index["shards"]) > 3 and index["number"] == 60
    shards, plain = open_images(tmp_path / "out", 32), open_images(root, 32)
    assert isinstance(shards.layout, PackedFiles)
    require_same(plain, shards)
    require_same(
        open_images(root, 32, split="held_out", held_out=0.3),
        open_images(tmp_path / "out", 32, split="held_out", held_out=0.3),
    )
    whole = b"".join((root / plain.name_sample(i)).read_bytes() for i in range(60))
    arrays = [load_file(tmp_path / "out" / shard["name"]) for shard in index["shards"]]
    assert b"".join(array["bytes"][: array["ends"][-1]].tobytes() for array in arrays) == whole
    # What was packed is packed again to the same.
    packed(tmp_path / "out", tmp_path / "again")
    assert files(tmp_path / "again").keys() == files(tmp_path / "out").keys()
    require_same(plain, open_images(tmp_path / "again", 32))


def test_interrupted_and_damaged(tmp_path):
    """Oracle: the files of an uninterrupted command, to the byte: after shards were lost, cut and altered, before and
    after the end.
    """
    root = folder(tmp_path / "data", 2, 30)
    for kind in ("shards", "tar"):
        index = packed(root, tmp_path / kind, format=kind)
        whole, names = files(tmp_path / kind), [shard["name"] for shard in index["shards"]]
        assert len(names) >= 4
        for end in (True, False):
            out = tmp_path / f"{kind}{end}"
            shutil.copytree(tmp_path / kind, out)
            if not end:  # as if it had been killed: records, and no index
                last = next(name for name in whole if name in ("pack.json", "tars.json"))
                (out / last).unlink()
                (out / ".records").mkdir()
                for number, shard in enumerate(index["shards"][:-1]):
                    (out / ".records" / f"{number}.json").write_bytes(sealed.render_json_with_hash(shard))
            (out / names[0]).unlink()
            os.truncate(out / names[1], 5000)
            content = bytearray(whole[names[2]])
            content[len(content) // 2] ^= 1
            (out / names[2]).write_bytes(content)
            kept = os.stat(out / names[3]).st_mtime_ns
            packed(root, out, format=kind)
            assert files(out) == whole and not (out / ".records").exists()
            assert os.stat(out / names[3]).st_mtime_ns == kept  # what was whole was not written again


def _work(rank, root, out):
    packed(root, out)


def test_two_ranks_write_the_same(tmp_path):
    """Oracle: one process's files."""
    root = folder(tmp_path / "data", 2, 30)
    packed(root, tmp_path / "one")
    gloo.run(tmp_path, _work, root, tmp_path / "two")
    assert files(tmp_path / "two") == files(tmp_path / "one")


def test_unreadable_files_keep_their_place(tmp_path):
    """Oracle: the plain folder: a file whose bytes cannot be read is a bad sample there and here, and replaced by the
    same one; broken pictures are copied as they are.
    """
    root = folder(tmp_path / "data", 2, 20)
    (root / "c0" / "004.png").write_bytes(b"")
    break_file(root / "c1" / "003.png", "text")
    index = packed(root, tmp_path / "out", max_bad_fraction=0.1)
    assert [bad[0] for shard in index["shards"] for bad in shard["bad"]] == ["c0/004.png"]
    plain, shards = open_images(root, 32), open_images(tmp_path / "out", 32)
    for place, name in ((4, "c0/004.png"), (23, "c1/003.png")):
        for source in (plain, shards):
            with pytest.raises(BadSample) as caught:
                source[place]
            assert caught.value.path == name
    batch, bad = shards.read_batch(torch.arange(40))
    assert torch.equal(batch["image"], plain.read_batch(torch.arange(40))[0]["image"]) and len(bad) == 2
    with pytest.raises(ConfigError, match="1 of 40 files cannot be read.*--max-bad-fraction 0"):
        packed(root, tmp_path / "strict", max_bad_fraction=0.0)


@given(
    samples=st.lists(
        st.tuples(
            TEXTS, st.binary(max_size=50), st.integers(0, 2**40), st.lists(TEXTS, min_size=1, max_size=4).map(tuple)
        ),
        min_size=1,
        max_size=30,
    ),
    labelled=st.booleans(),
    captioned=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_shard_holds_what_was_added(tmp_path_factory, samples, labelled, captioned):
    """Oracle: the samples themselves, with any names, bytes, labels and numbers of captions; safetensors reads it."""
    path = tmp_path_factory.mktemp("shard") / name_shard(0)
    with open(path, "wb") as file:
        writer = ShardWriter(file)
        for name, content, label, captions in samples:
            writer.add_sample(name, content, label if labelled else None, captions if captioned else ())
        writer.close()
    content, load = path.read_bytes(), list(iterate_packed_samples(LocalFiles(path.parent), path.name))
    assert [(one.name, content[one.offset : one.offset + one.size], one.label, one.captions) for one in load] == [
        (name, bytes, label if labelled else None, captions if captioned else ())
        for name, bytes, label, captions in samples
    ]
    assert load_file(path)["ends"].tolist() == np.cumsum([len(bytes) for _, bytes, _, _ in samples]).tolist()


def test_tars_are_as_webdataset_writes_them(tmp_path):
    """Oracle: tarfile: members in order, with the files' bytes, numbers of classes, captions; classes' names beside;
    and the plain folder: labels and pixels of the tars as data.
    """
    root = folder(tmp_path / "data", 2, 20)
    index = packed(root, tmp_path / "out", format="tar", shard_bytes=20_000)
    plain, number = open_images(root, 32), 0
    for shard in index["shards"]:
        with tarfile.open(tmp_path / "out" / shard["name"]) as archive:
            members = archive.getmembers()
            for image, label in zip(members[::2], members[1::2]):
                assert (image.name, label.name) == (f"{number:09d}.png", f"{number:09d}.cls")
                assert archive.extractfile(image).read() == (root / plain.name_sample(number)).read_bytes()
                assert int(archive.extractfile(label).read()) == plain[number]["label"]
                number += 1
    assert number == 40 and (tmp_path / "out" / "classes.txt").read_text() == "c0\nc1\n"
    tars = open_images(tmp_path / "out", 32)
    for i in range(40):
        assert tars[i]["label"] == plain[i]["label"] and torch.equal(tars[i]["image"], plain[i]["image"])
    _write_tar(
        file := io.BytesIO(),
        [("x", (root / "c0/000.png").read_bytes(), None, ("a cat",)), ("y.JPG", b"jpeg", None, ("one", "two"))],
        7,
        SUFFIXES,
    )
    file.seek(0)
    with tarfile.open(fileobj=file) as archive:
        texts = {member.name: archive.extractfile(member).read() for member in archive}
    assert list(texts) == ["000000007.png", "000000007.txt", "000000008.jpg", "000000008.json"]
    assert texts["000000007.txt"] == b"a cat" and json.loads(texts["000000008.json"]) == {"caption": ["one", "two"]}


def test_what_is_refused(tmp_path):
    """Oracle: the contract: foreign folders, other data, unfinished and damaged shards are named, with the remedy."""
    root, out = folder(tmp_path / "data", 2, 20), tmp_path / "out"
    for path, message in ((root, "lies in .*data, where the shards would count"), (tmp_path, "holds data, which")):
        with pytest.raises(ConfigError, match=message):
            packed(root, path)
    with pytest.raises(ConfigError, match="what is built in is not packed"):
        packed("builtin:fashion", out)
    index = packed(root, out)
    for entry in ({"labels": "prefix"}, {"class_list": "names.txt"}):
        with pytest.raises(ConfigError, match=rf"keeps the labels .* data.{next(iter(entry))} is of no use here"):
            open_images(out, 32, request=Request(SUFFIXES, **entry))
    with pytest.raises(ConfigError, match="holds other shards: shard_bytes 30000 there, 50000 here"):
        packed(root, out, shard_bytes=50_000)
    (root / "c0" / "000.png").write_bytes((root / "c0" / "001.png").read_bytes())
    with pytest.raises(ConfigError, match="holds other shards: data images n=40"):
        packed(root, out)
    first = out / index["shards"][0]["name"]
    whole, listing = first.read_bytes(), (out / "pack.json").read_bytes()
    os.truncate(first, 5000)
    with pytest.raises(ConfigError, match=r"files_00000.safetensors has 5000 bytes instead of \d+: give the command"):
        open_images(out, 32)
    for header in (
        b"",
        b"null",
        b'{"bytes": {"data_offsets": [0, 9]}}',
        b'{"bytes": 1}',
        b'{"bytes": {"data_offsets": [0, 99]}, "ends": {"data_offsets": [0, 1099511627776]}}',
        b'{"bytes": {"data_offsets": [0, 9]}, "ends": {"data_offsets": [0, 12]}}',
        b"[" * 2000,
    ):
        first.write_bytes(whole[:8] + header.ljust(4088) + whole[4096:])
        with pytest.raises(ConfigError, match="files_00000.safetensors is no shard of `dstrain pack`, or is damaged"):
            open_images(out, 32)
    first.unlink()
    with pytest.raises(ConfigError, match="files_00000.safetensors is missing"):
        open_images(out, 32)
    first.write_bytes(whole)
    (out / "pack.json").write_bytes(listing.replace(b"c1", b"c2"))
    with pytest.raises(ConfigError, match="pack.json that is truncated or altered"):
        open_images(out, 32)
    for body in ({}, {"noun": "images", "classes": [], "shards": [{"name": "../x", "size": 1}]}):
        (out / "pack.json").write_bytes(sealed.render_json_with_hash({"format": 1} | body))
        with pytest.raises(ConfigError, match="pack.json that `dstrain pack` has not written"):
            open_images(out, 32)
    (out / "pack.json").unlink()
    with pytest.raises(ConfigError, match="is not packed to the end: give the command"):
        open_images(out, 32)
    (out / "pack.json").write_bytes(listing)
    layout = recognise_layout(str(out), LocalFiles(out), Request((".mp4",), "clips"))
    with pytest.raises(ConfigError, match="holds images, not clips: leave data.num_frames out"):
        layout.list_partitions()


@pytest.mark.parametrize("kind", ["shards", "tar"])
def test_captions_beside_clips(tmp_path, kind):
    """Oracle: the texts that were written beside the clips; one that cannot be read is a bad file, and a text that was
    changed is other data.
    """
    for number in range(3):
        (tmp_path / "d").mkdir(exist_ok=True)
        write_pictures(tmp_path / "d" / f"{number}.gif", moving(3, 16, 16, seed=number))
        (tmp_path / "d" / f"{number}.txt").write_text(f" a thing, {number} times\n")
    entries = ("data.num_frames=3", f"data.index={tmp_path / 'i'}")
    options = PackOptions(str(tmp_path / "d"), entries, tmp_path / "out", kind)
    pack_data(options)
    source = open_videos(tmp_path / "out", Cut(3, 16, 16))
    assert all(torch.equal(source[n]["caption"], rows.pack_caption(f"a thing, {n} times")) for n in range(3))
    (tmp_path / "d" / "1.txt").write_text("another thing")
    with pytest.raises(ConfigError, match="holds other shards: data"):
        pack_data(options)
    for number in (1, 2):
        (tmp_path / "d" / f"{number}.txt").unlink()
        (tmp_path / "d" / f"{number}.txt").mkdir()
    with pytest.raises(ConfigError, match="2 of 3"):
        pack_data(PackOptions(str(tmp_path / "d"), entries, tmp_path / "again", kind))


@pytest.mark.parametrize("kind", ["tar", "shards"])
def test_captions_of_any_kind(tmp_path, kind):
    """Oracle: the captions in the list that is packed: with line breaks and other separators, long ones, several."""
    marks = ("\n", "\r\n", "\r", "\u2028", "\x85", "\x0b", "\x0c", "\t", '"', "\\n")
    texts = [*(f"a cat{mark}on a mat" for mark in marks), "x" * 3000, "y" * (1 << 20) + "END", ["one", "two\nlines"]]
    (tmp_path / "in").mkdir()
    for number in range(len(texts)):
        picture(number).save(tmp_path / "in" / f"{number:02}.png")
    rows = [{"file_name": f"{number:02}.png", "caption": text} for number, text in enumerate(texts)]
    (tmp_path / "in" / "l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    packed(tmp_path / "in" / "l.jsonl", tmp_path / "out", format=kind, captions=True)
    source = open_images(tmp_path / "out", 16, split="all", request=Request(SUFFIXES, captions=True))
    assert [source.read_captions(n) for n in range(len(texts))] == [
        tuple(text) if isinstance(text, list) else (text,) for text in texts
    ]


def test_what_is_left_out_is_said(tmp_path, capsys):
    """Oracle: counting by hand: pictures without a caption, and of other types, are in no shard."""
    folder(tmp_path / "d", 3)
    names = sorted(path for path in (tmp_path / "d").rglob("*") if path.suffix.lower() in SUFFIXES)
    names[0].with_suffix(".TXT").write_text("a cat")
    (tmp_path / "d" / "x.tif").write_bytes(b"x")
    assert packed(tmp_path / "d", tmp_path / "out", captions=True)["number"] == 1
    said = capsys.readouterr().out
    assert f"1 images, 1 class of 1, captions; {len(names) - 1} without a caption are left out; files of" in said, said
    assert ".tif 1" in said
