"""The index of data: what it holds, that it is found again, goes on, notices changes, and costs a process nothing."""

import itertools
import json
import os
import pickle
import shutil
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dstrain.commands.index import format_report, index_and_summarize_data
from dstrain.data import formats
from dstrain.data.batches import Batches
from dstrain.data.decode.pixels import SUFFIXES, read_image
from dstrain.data.files.local import Files
from dstrain.data.formats.base import Layout, Place, Request, Sample
from dstrain.data.formats.folders import Folders
from dstrain.data.index.build import make_index_files_once, open_index
from dstrain.data.index.index import Index
from dstrain.data.index.verified import Verified, write_checksums_beside
from dstrain.data.source import pad_and_stack_texts
from dstrain.data.sources import sizes
from dstrain.data.sources.images import Images, open_images
from dstrain.data.sources.sizes import measure_image_sizes
from dstrain.encoders.text import unpack_captions
from dstrain.recipe import ConfigError, Data, NotRead
from tests.data.index import check_index_scale
from tests.support import gloo
from tests.support.clips import moving, write_pictures
from tests.support.launch import here
from tests.support.pictures import folder, picture

WORDS = st.text("ab\u00e9Z_.-", min_size=1, max_size=4).filter(lambda name: name.strip(".") and name[0] != ".")
TREES = st.dictionaries(
    WORDS, st.lists(st.lists(WORDS, min_size=1, max_size=3), min_size=1, max_size=5), min_size=1, max_size=4
)


def plain(root: Path) -> tuple[list[str], list[int], tuple[str, ...]]:
    """Names, labels and classes of class folders, as os.walk lists them."""
    classes = sorted(os.listdir(root))
    of_class = [
        sorted(
            os.path.relpath(os.path.join(place, name), root)
            for place, _, names in os.walk(root / folder)
            for name in names
        )
        for folder in classes
    ]
    return [*itertools.chain(*of_class)], [label for label, names in enumerate(of_class) for _ in names], tuple(classes)


@settings(max_examples=25, deadline=None)
@given(tree=TREES, share=st.sampled_from([0.0, 0.3]))
def test_what_it_holds(tmp_path_factory, tree, share):
    """Oracle: os.walk, sorted, and blake2b of each name; in memory, on the disk, and found there again."""
    work = tmp_path_factory.mktemp("tree")
    for name, paths in tree.items():
        for path in paths:
            file = work.joinpath("data", f"{name}x", *(f"{word}d" for word in path[:-1]), f"{path[-1]}.png")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"")
    names, labels, classes = plain(work / "data")
    unseen = [
        int.from_bytes(blake2b(os.fsencode(name), digest_size=8).digest(), "little") < share * 2.0**64 for name in names
    ]
    for split in ("train", "held_out") if share else ("train",):
        own = [place for place in range(len(names)) if unseen[place] == (split == "held_out")]
        for kept in (None, work / "index", work / "index"):
            if not own:
                with pytest.raises(ConfigError, match="leaves no image of"):
                    open_images(work / "data", 16, split=split, held_out=share, index=kept)
                continue
            source = open_images(work / "data", 16, split=split, held_out=share, index=kept)
            assert [source.name_sample(place) for place in range(len(source))] == [names[place] for place in own]
            assert source.labels.tolist() == [labels[place] for place in own] and source.classes == classes
            assert (
                source.count_samples_by_class().tolist() == np.bincount(source.labels, minlength=len(classes)).tolist()
            )


def test_one_source_wherever_it_is_kept(tmp_path):
    """Oracle: the source in memory: fingerprint, batches with and without workers, and a second pass of Pillow."""
    root = folder(tmp_path / "d", 3, 8)
    picture(5).save(undecodable := os.path.join(root, "c1", os.fsdecode(b"\xff.png")))
    for share in (0.0, 0.3):
        memory, disk = (open_images(root, 16, held_out=share, index=kept) for kept in (None, tmp_path / "i"))
        assert memory.index.folder is None and disk.index.folder is not None
        assert share or memory.name_sample(16) == os.path.relpath(undecodable, root) == disk.name_sample(16)
        assert (
            memory.compute_fingerprint() == disk.compute_fingerprint()
            and memory.compute_full_fingerprint() == disk.compute_full_fingerprint()
        )
        batches = []
        for source, num_workers in ((memory, 0), (disk, 0), *([(disk, 2)] if share else [])):
            with Batches(source, global_batch=8, micro_batch=4, seed=3, num_workers=num_workers) as both:
                batches.append(
                    [
                        {name: value.clone() for name, value in batch.items()}
                        for step in range(4)
                        for batch in both.read_step(step)
                    ]
                )
        for others in batches[1:]:
            assert all(torch.equal(one[name], other[name]) for one, other in zip(batches[0], others) for name in one)


def test_found_again_until_the_data_change(tmp_path, monkeypatch, capsys):
    """Oracle: a count of the listings: none where nothing changed; a new file and a new folder below are met, and it is
    said where; a run's folder keeps the index that launch/index.py has made in the cache.
    """
    root, listed, samples = folder(tmp_path / "d", 2, 3), [], Folders.iterate_samples
    (root / "c1" / "deep").mkdir()
    monkeypatch.setattr(Folders, "iterate_samples", lambda self, part: listed.append(part) or samples(self, part))

    def opened():
        return len(open_images(root, 16, index=tmp_path / "i"))

    assert opened() == 6 and listed == ["c0", "c1"] and opened() == 6 and len(listed) == 2
    picture(1).save(root / "c1" / "deep" / "a.png")
    assert opened() == 7 and len(listed) == 4 and "c1/deep changed since" in capsys.readouterr().out
    (root / "c2").mkdir()
    picture(1).save(root / "c2" / "a.png")
    assert opened() == 8 and opened() == 8 and len(listed) == 7
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    index_and_summarize_data(Data(path=str(root)))
    assert len(listed) == 10
    assert len(open_images(root, 16, run=tmp_path / "run")) == 8 and len(listed) == 10
    name = next((tmp_path / "i").glob("*/names.bin"))
    for column, damage in (
        ("names", lambda content: content[:-1]),
        ("names", lambda content: content[:-1] + b"h"),
        ("label", lambda content: content[:-4] + bytes(4)),
        ("name_ends", lambda content: b"\0" + content[1:]),
        ("name_hash", lambda content: content[:20] + bytes((content[20] ^ 1,)) + content[21:]),
    ):
        damaged = name.with_name(f"{column}.bin")  # it is noticed, and made anew
        content, before = damaged.read_bytes(), len(listed)
        damaged.write_bytes(damage(content))
        assert opened() == 8 and len(listed) == before + 3 and damaged.read_bytes() == content
    pickled = pickle.dumps(open_images(root, 16, index=tmp_path / "i"))
    picture(1).save(root / "c2" / "b.png")
    opened()
    with pytest.raises(ConfigError, match="made anew meanwhile"):
        pickle.loads(pickled).name_sample(0)


def test_damaged_splits_and_those_of_other_data_are_made_anew(tmp_path):
    """Oracle: the source in memory: splits that are cut off, gone, of other data or without their header."""
    root, kept, other = folder(tmp_path / "d", 2, 20), tmp_path / "i", folder(tmp_path / "e", 2, 20)
    (other / "c0" / "000.png").rename(other / "c0" / "x.png")

    def opened(path):
        return open_images(path, 16, index=kept, held_out=0.3)

    expected = open_images(root, 16, held_out=0.3)
    names = [expected.name_sample(place) for place in range(len(expected))]
    foreign, splits = (opened(path).index.folder / "held_out-0.3" for path in (other, root))
    train, header = splits / "train.bin", splits / "index.json"
    mapped = opened(root)
    for damage in (
        lambda: os.truncate(train, 4),
        train.unlink,
        lambda: (splits / "held_out.bin").write_bytes(b"ab"),
        lambda: train.write_bytes(bytes((train.read_bytes()[0] ^ 1,)) + train.read_bytes()[1:]),
        header.unlink,
        lambda: shutil.copytree(foreign, splits, dirs_exist_ok=True),
    ):
        shutil.copy(train, tmp_path / "train.bin")
        os.replace(tmp_path / "train.bin", train)  # `mapped` keeps its own file: a shared one would be cut off
        damage()
        again = opened(root)
        assert [again.name_sample(place) for place in range(len(again))] == names
        assert (
            again.compute_fingerprint() == expected.compute_fingerprint()
            and mapped.name_sample(len(mapped) - 1) == names[-1]
        )
    os.truncate(train, 4)
    with pytest.raises(ConfigError, match="train.bin is not to be seen from here, or damaged: remove"):
        pickle.loads(pickle.dumps(again))


def test_a_flipped_byte_of_a_large_index_is_found_when_it_is_used(tmp_path, monkeypatch):
    """Oracle: the values that were written: each is read, or refused with its file; what a batch needs of the altered
    part ends the reading and counts no picture as broken; removing what the message says makes it anew.
    """
    root, kept = folder(tmp_path / "d", 2, 20), tmp_path / "i"
    monkeypatch.setattr("dstrain.data.index.verified.CHECKED", 0)  # large enough not to be read at the start
    monkeypatch.setattr("dstrain.data.index.verified._BLOCK", 64)

    def opened():
        return open_images(root, 16, index=kept, held_out=0.3)

    whole = opened()
    names = [whole.name_sample(place) for place in range(len(whole))]
    for file in ("names.bin", "name_ends.bin", "label.bin", "held_out-0.3/train.bin"):
        path = whole.index.folder / file
        content = path.read_bytes()
        path.unlink()  # `whole` keeps its own
        path.write_bytes(content[:70] + bytes((content[70] ^ 16,)) + content[71:])
        again, found, refused = opened(), [], []
        for place in range(len(again)):
            try:
                found.append((again.name_sample(place), again[place]["label"]) == (names[place], whole[place]["label"]))
            except NotRead as error:
                refused.append(str(error))
        assert all(found) and found and refused and len(found) + len(refused) == len(names), file
        assert f"{path} was altered after it was written (from byte 64 on): remove {path.parent}" in refused[0]
        with (
            Batches(again, global_batch=28, micro_batch=28, seed=1) as batches,
            pytest.raises(NotRead, match="altered"),
        ):
            next(batches.read_step(0))
        shutil.rmtree(path.parent)
        assert [opened().name_sample(place) for place in range(len(names))] == names and path.read_bytes() == content


@pytest.mark.parametrize("dtype", [None, np.int32, np.uint64])
def test_verified_columns(tmp_path, dtype):
    """Oracle: the values themselves by int, slice and array; a byte at either end of blocks, of more than are summed at
    once and of the rest behind them, is found where it stands and nowhere else.
    """
    content = np.random.default_rng(0).integers(0, 256, 300 * 4096 + 24, np.uint8).tobytes()
    values, path = content if dtype is None else np.frombuffer(content, dtype), tmp_path / "a.bin"
    width = len(content) // len(values)
    path.write_bytes(content)
    write_checksums_beside(path, values)
    column = Verified(path, dtype, len(content))
    assert len(column) == len(values) and column.matches_checksums_if_small()
    assert column[5] == values[5] and column[len(values) - 1] == values[-1] and not len(column[7:7])
    assert np.array_equal(column[3:99999], values[3:99999])
    if dtype is not None:
        assert np.array_equal(column[np.array([9, 0, len(values) - 1])], values[[9, 0, -1]])
    for place in (0, 4095, 4096, 256 * 4096, 300 * 4096 - 1, 300 * 4096, len(content) - 1):
        path.unlink()  # the old one is still mapped
        path.write_bytes(content[:place] + bytes((content[place] ^ 128,)) + content[place + 1 :])
        column = Verified(path, dtype, len(content))
        assert not column.matches_checksums_if_small()
        for block in {0, 1, 2, 255, 256, 299, 300, place // 4096}:
            first = block * 4096 // width
            if block == place // 4096:
                for key in (first, slice(first, first + 1), slice(0, None), *[np.array([first])] * (dtype is not None)):
                    with pytest.raises(NotRead, match=f"from byte {block * 4096:,} on"):
                        column[key]
            else:
                assert column[first] == values[first]
    path.unlink()
    path.write_bytes(bytes(byte ^ 128 * (place in (7, 15)) for place, byte in enumerate(content[:16])) + content[16:])
    assert not Verified(path, dtype, len(content)).matches_checksums_if_small()  # the upper bits of two words
    for file, damage in ((path, b"x"), (path.with_suffix(".sums"), b"x" * 4)):
        file.write_bytes(file.read_bytes() + damage)
        with pytest.raises(ValueError, match="bytes"):
            Verified(path, dtype, len(content))
        file.write_bytes(file.read_bytes()[: -len(damage)])


def test_two_commands_read_one_table(tmp_path, monkeypatch):
    """Oracle: the pixels of the images, each of which is read once: the second command waits for the first."""
    layout, index = open_index(folder(tmp_path / "d", 2, 20), Request(SUFFIXES), tmp_path / "i")
    asked, size_of = [], sizes.read_image_size
    monkeypatch.setattr(
        sizes, "read_image_size", lambda *place: (asked.append(place), time.sleep(0.01), size_of(*place))[-1]
    )
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: sizes.measure_image_sizes(layout, index), range(2))
    assert len(asked) == 40 and np.array_equal(first[:], second[:])
    assert first[:].tolist() == [list(size_of(layout, index.read_place(row))) for row in range(40)]


def test_two_commands_write_the_same_splits(tmp_path, monkeypatch):
    """Oracle: the splits of one command: the second one waits for the first, and writes nothing of its own."""
    root, writes, write = folder(tmp_path / "d", 2, 20), [], Index.write_splits
    _layout, index = open_index(root, Request(SUFFIXES), tmp_path / "i")

    def slow(self, held_out: float) -> None:
        writes.append(held_out)
        second.start()
        second.join(0.3)
        assert second.is_alive()
        write(self, held_out)

    monkeypatch.setattr(Index, "write_splits", slow)

    def write_splits(index: Index) -> None:
        make_index_files_once(index, lambda: index.has_splits(0.3), lambda: index.write_splits(0.3))

    second = threading.Thread(target=write_splits, args=(Index.open(index.folder),))
    write_splits(index)
    second.join()
    memory = open_index(root, Request(SUFFIXES))[1]
    assert writes == [0.3]
    assert index.open_split("train", 0.3).members[:].tolist() == memory.open_split("train", 0.3).members.tolist()


def test_an_interrupted_listing_goes_on(tmp_path, monkeypatch):
    """Oracle: the index of an uninterrupted listing, byte for byte; parts that were listed are not listed again, unless
    the data have changed.
    """
    root, samples, listed = folder(tmp_path / "d", 4, 5), Folders.iterate_samples, []
    whole = open_images(root, 16, index=tmp_path / "whole").index.folder

    def interrupted(self, part: str) -> Iterator[Sample]:
        listed.append(part)
        for number, sample in enumerate(samples(self, part)):
            if part == "c2" and number == 3 and listed.count(part) == 1:
                raise KeyboardInterrupt
            yield sample

    monkeypatch.setattr(Folders, "iterate_samples", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_images(root, 16, index=tmp_path / "i")
    made = open_images(root, 16, index=tmp_path / "i").index.folder
    assert listed == ["c0", "c1", "c2", "c2", "c3"]
    assert {file.name: file.read_bytes() for file in made.iterdir()} == {
        file.name: file.read_bytes() for file in whole.iterdir()
    }
    listed.clear()
    with pytest.raises(KeyboardInterrupt):
        open_images(root, 16, index=tmp_path / "j")
    picture(1).save(root / "c0" / "new.png")
    assert len(open_images(root, 16, index=tmp_path / "j")) == 21 and listed[3:] == ["c0", "c1", "c2", "c3"]


class Bundle(Layout):
    """Encoded pictures one behind the other, with a line OFFSET SIZE LABEL CAPTIONS in bundle.jsonl for each."""

    kind = "bundle of a test"

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        return any(name == "bundle.jsonl" for name, _ in files.list_names())

    def list_partitions(self) -> list[str]:
        return ["bundle.bin"]

    def iterate_samples(self, part: str) -> Iterator[Sample]:
        for line in self.files.open("bundle.jsonl").read().splitlines():
            name, offset, size, label, captions = json.loads(line)
            yield Sample(Place(name, 0, offset, size), label, tuple(captions))

    def read(self, place: Place) -> bytes:
        return self.files.read_span("bundle.bin", place.offset, place.size)


def bundle(root: Path, labels: list, captions: list[list[str]]) -> Path:
    root.mkdir()
    offset = 0
    with open(root / "bundle.bin", "wb") as file, open(root / "bundle.jsonl", "w") as rows:
        for number, (label, own) in enumerate(zip(labels, captions)):
            picture(number).save(file, "PNG")
            rows.write(json.dumps([f"n{number}", offset, file.tell() - offset, label, own]) + "\n")
            offset = file.tell()
    return root


@pytest.mark.parametrize("labels", [["dog", "cat", "ox", "cat"], [2, 0, 0, 2], [None] * 4])
def test_places_labels_and_captions(tmp_path, monkeypatch, labels):
    """Oracle: what the layout has listed: bytes by their places, names of classes in sorted order, numbers as they are,
    any of several captions; in memory and on the disk, and pixels as of a file.
    """
    monkeypatch.setattr(formats, "LAYOUTS", (Bundle, *formats.LAYOUTS))
    texts = [["one"], ["a", "b\u00e9"], ["y", "x"], ["four", "4", "iv"]]
    root = bundle(tmp_path / "d", labels, texts)
    request = Request(SUFFIXES, captions=True)
    for kept in (None, tmp_path / "i", tmp_path / "i"):
        source = open_images(root, 16, index=kept, request=request)
        names = sorted(set(labels)) if labels[0] == "dog" else ["0", "1", "2"] if labels[0] == 2 else []
        assert source.classes == tuple(names) and source.captioned and source.chance_name == "caption"
        expected = [names.index(label) if isinstance(label, str) else label or 0 for label in labels]
        for row in range(4):
            assert source.index.read_captions(row) == tuple(texts[row])
            items = [source.read(row, chance) for chance in (0.0, 0.34, 0.67, 0.99)]
            numbers = [int(chance * len(texts[row])) for chance in (0.0, 0.34, 0.67, 0.99)]
            assert unpack_captions(pad_and_stack_texts([item["caption"] for item in items])) == [
                texts[row][n] for n in numbers
            ]
            picture(row).save(tmp_path / "same.png")
            assert torch.equal(items[0]["image"], read_image(tmp_path / "same.png", 16))
            assert items[0]["label"] == expected[row]
    changed = open_images(root, 16, request=request).compute_fingerprint()
    (root / "bundle.jsonl").write_text((root / "bundle.jsonl").read_text().replace("four", "five"))
    assert open_images(root, 16, request=request).compute_fingerprint() != changed


def test_more_samples_than_are_kept_in_memory(tmp_path, monkeypatch):
    """Oracle: what was listed: from 50,001 samples on the index stands on the disk, in the user's cache, or in the
    folder of the run where there is one; classes that are met in any order are numbered in theirs.
    """
    monkeypatch.setattr("dstrain.data.formats.LAYOUTS", (Bundle,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root, names = bundle(tmp_path / "d", [], []), ("ox", "cat", "dog")
    rows = [json.dumps([f"n{number}", 0, 9, names[number * 7 % 3], [str(number)]]) for number in range(50_001)]
    (root / "bundle.jsonl").write_text("\n".join(rows[:-1]))
    request = Request(SUFFIXES, captions=True)
    assert open_index(root, request)[1].folder is None
    (root / "bundle.jsonl").write_text("\n".join(rows))
    for run, kept in ((None, "cache/dstrain/index"), (tmp_path / "run", "run/index")):
        _, index = open_index(root, request, run=run)
        assert index.folder.parent == tmp_path / kept and index.classes == ("cat", "dog", "ox") and len(index) == 50_001
        for row in (0, 1, 2, 25_000, 50_000):
            assert index.read_captions(row) == (str(row),) and index.read_place(row) == (f"n{row}", 0, 0, 9)
            assert index.classes[index.read_label(row)] == names[row * 7 % 3]
        shutil.rmtree(tmp_path / kept)


def test_an_index_is_not_kept_among_the_data(tmp_path):
    """Oracle: the contract: it would be one more class the next time; nothing is written there."""
    root = folder(tmp_path / "data", 2, 2)
    for kept in (root / "index", root):
        with pytest.raises(ConfigError, match="data.index=.* lies in data.path=.*name a folder beside it"):
            open_images(root, 16, index=kept)
    assert sorted(path.name for path in root.iterdir()) == ["c0", "c1"]
    assert len(open_images(root, 16, index=tmp_path / "data index")) == 4


def test_faults_of_the_storage(tmp_path, monkeypatch):
    """Oracle: the contract: an index that cannot be written is the user's to mend; data that cannot be read are not."""
    root = folder(tmp_path / "d", 1, 2)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file cannot be written .*data.index=FOLDER"):
        open_images(root, 16, index=tmp_path / "file")

    def failing(self, part: str) -> Iterator[Sample]:
        raise NotRead("the storage fails")
        yield

    monkeypatch.setattr(Folders, "iterate_samples", failing)
    for kept in (None, tmp_path / "i"):
        with pytest.raises(NotRead):
            open_images(root, 16, index=kept)


@pytest.mark.parametrize(
    "labels, texts, message",
    [
        ([1, None], [["a"], ["b"]], "n1 has no label, and those before it a number"),
        ([1, "x"], [["a"], ["b"]], "n1 has a class as its label"),
        ([1, -1], [["a"], ["b"]], "n1 has the label -1"),
        ([1, 1], [["a"], []], "n1 has no caption, unlike those before"),
        ([], [], "no images in it"),
    ],
)
def test_samples_are_alike(tmp_path, monkeypatch, labels, texts, message):
    """Oracle: the contract: the first sample that differs is named, in memory and on the disk."""
    monkeypatch.setattr(formats, "LAYOUTS", (Bundle,))
    root = bundle(tmp_path / "d", labels, texts)
    for kept in (None, tmp_path / "i"):
        with pytest.raises(ConfigError, match=message):
            open_index(root, Request(SUFFIXES, captions=True), kept)


def test_pixel_sizes(tmp_path):
    """Oracle: Pillow; 0 where there is no picture; the second time, no file is opened."""
    root = folder(tmp_path / "d", 2, 3)
    picture(1, 50, 20).save(root / "c0" / "x.png")
    (root / "c1" / "000.png").write_bytes(b"no picture")
    source = open_images(root, 16, index=tmp_path / "i")
    sizes = measure_image_sizes(source.layout, source.index)[:].copy()
    assert sizes.dtype == np.int32 and sizes.tolist() == [
        [0, 0] if name == "c1/000.png" else list(Image.open(root / name).size)
        for name in map(source.name_sample, range(len(source)))
    ]
    content = (root / "c0" / "x.png").read_bytes()
    (root / "c0" / "x.png").write_bytes(b"")
    assert measure_image_sizes(source.layout, source.index)[3].tolist() == [50, 20]
    (root / "c0" / "x.png").write_bytes(content)
    table = source.index.folder / "upright_sizes.bin"
    table.write_bytes(b"\1" + table.read_bytes()[1:])  # altered, it is made anew
    assert np.array_equal(measure_image_sizes(source.layout, source.index)[:], sizes)


def test_one_of_a_kind(tmp_path, monkeypatch, capsys):
    """Oracle: English: one sample, one shard, one tar."""
    picture(0).save(tmp_path / "0.png")
    data = Data(path=str(tmp_path / "0.csv"), index=str(tmp_path / "i"))
    (tmp_path / "0.csv").write_text("path\n0.png\n")
    assert format_report(index_and_summarize_data(data)).splitlines()[0].endswith(", 1 sample")
    for number, words in enumerate((["--format", "tar"], [])):
        code, out, error = here("pack.py", [data.path, "--out", tmp_path / str(number), *words], monkeypatch, capsys)
        assert code == 0 and f": 1 {'shard' if number else 'tar'}, " in out, out + error


def test_the_description(tmp_path):
    """Oracle: counting by hand: a truncated picture shows when it is read whole, one without a header at once."""
    root = folder(tmp_path / "d", 2, 3)
    picture(1, 50, 20).save(root / "c0" / "x.png")
    (root / "c1" / "000.png").write_bytes(b"no picture")
    content = (root / "c1" / "001.png").read_bytes()
    (root / "c1" / "001.png").write_bytes(content[: len(content) // 2])
    data = Data(path=str(root), index=str(tmp_path / "i"))
    quick, whole = (index_and_summarize_data(data, check_samples=check) for check in (False, True))
    assert json.loads(json.dumps(whole)) == whole
    assert (quick["samples"], quick["classes"]["smallest"], quick["captions"]) == (7, {"c1": 3, "c0": 4}, None)
    assert quick["sizes"] == {"40x30": 5, "50x20": 1} and quick["aspect_ratios"] == {"4:3": 5, "2:1": 1}
    assert quick["shorter_sides"] == {"below 32": 6}
    listed = index_and_summarize_data(data, with_captions=True)
    assert "none in the index; --captions lists" in format_report(quick) and "--captions" not in format_report(listed)
    assert [name for name, _ in quick["unreadable_names"]] == ["c1/000.png"]
    assert [name for name, _ in whole["unreadable_names"]] == ["c1/000.png", "c1/001.png"] and whole["unreadable"] == 2
    assert "sizes: 40x30 5, 50x20 1" in format_report(quick) and "truncated" in format_report(whole)


def test_the_description_of_clips(tmp_path):
    """Oracle: counting by hand: how many clips are as long as each bucket, with a stride of 2, and the broken one."""
    for number, frames in enumerate((3, 9, 10, 17, 18, 40)):
        (tmp_path / "d").mkdir(exist_ok=True)
        write_pictures(tmp_path / "d" / f"{number}.gif", moving(frames, 16, 16))
    (tmp_path / "d" / "6.gif").write_bytes(b"no clip")
    data = Data(path=str(tmp_path / "d"), index=str(tmp_path / "i"), num_frames=9, buckets=[9, 5], frame_stride=2)
    quick = index_and_summarize_data(data)
    assert quick["frames"] == {"9 or more": 3, "5 or more": 2, "fewer": 1} and quick["unreadable"] == 1
    assert "frames: 9 or more 3, 5 or more 2, fewer 1" in format_report(quick) and "6.gif" in format_report(quick)
    assert index_and_summarize_data(data.model_copy(update={"buckets": None}))["unreadable"] is None


def _rank(root: Path, kept: Path | None) -> tuple:
    listed, samples = [], Folders.iterate_samples
    Folders.iterate_samples = lambda self, part: listed.append(part) or samples(self, part)
    try:
        source = open_images(root, 16, held_out=0.3, index=kept)
    except ConfigError as error:
        return listed, str(error)
    finally:
        Folders.iterate_samples = samples
    return listed, source.compute_fingerprint(), [source.name_sample(place) for place in range(len(source))]


def _ranks(rank: int, root: Path, kept: Path, empty: Path) -> list[tuple]:
    return [_rank(root, None), _rank(root, kept), _rank(empty, kept)]


def test_what_is_built_in_has_no_index():
    """Oracle: by hand: the data of the package are named, and not looked for as a folder."""
    with pytest.raises(
        ConfigError, match="^data.path=builtin:fashion is in the package, and neither listed nor packed"
    ):
        index_and_summarize_data(Data(path="builtin:fashion"))


def test_one_rank_lists(tmp_path):
    """Oracle: a count of the listings on each of two ranks; both have the same source, or the same error."""
    root, empty = folder(tmp_path / "d", 2, 5), folder(tmp_path / "e", 1, 1)
    (empty / "c7").mkdir()
    first, second = gloo.run(tmp_path, _ranks, root, tmp_path / "i", empty)
    for case in range(2):
        assert first[case][0] == ["c0", "c1"] and second[case][0] == [] and first[case][1:] == second[case][1:]
    assert first[2][1] == second[2][1] and "without images: c7" in first[2][1]


def test_many_samples_cost_a_process_nothing(tmp_path):
    """Oracle: the sizes: of 300,000 samples, a pickled source has 4 kB, and opening it and reading from it takes less
    than a list of their names would; samples and order are those of any number of ranks and workers.
    """
    root = folder(tmp_path / "d", check_index_scale.CLASSES, check_index_scale.FILES // check_index_scale.CLASSES)
    check_index_scale.make_index(root, 300_000, tmp_path / "i")
    open_images(root, 16, index=tmp_path / "i", held_out=0.1)  # makes the split
    tracemalloc.start()
    source: Images = open_images(root, 16, index=tmp_path / "i", held_out=0.1)
    assert isinstance(source.index, Index) and 250_000 < len(source) < 290_000
    again = pickle.loads(pickled := pickle.dumps(source))
    for place in range(0, len(source), 5000):
        assert again.name_sample(place) == source.name_sample(place) and again[place]["label"] == source[place]["label"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(pickled) < 4096 and peak < 2 << 20
    check_index_scale.require_one_order(open_images(root, 16, index=tmp_path / "i"), ((2, 0), (4, 0)))
