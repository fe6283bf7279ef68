"""Folders of clips: captions, classes, windows by the key, images mixed in, and what becomes of broken files."""

import json
import pickle
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from dstrain import rng
from dstrain.data.batches import iterate_held_out
from dstrain.data.decode.clips import Cut
from dstrain.data.formats.clips import read_captions_file
from dstrain.data.open import open_sources, require_learnable_contents
from dstrain.data.order import Order
from dstrain.data.source import BadSample, pad_and_stack_texts
from dstrain.data.sources import videos
from dstrain.data.sources.videos import Mixed, open_videos
from dstrain.data.views import Spread
from dstrain.encoders.text import unpack_captions
from dstrain.recipe import Data
from tests.support.clips import moving, write_pictures
from tests.support.pictures import folder as folder_of_images
from tests.support.pictures import picture
from tests.support.sources import global_batches, same

CUT = Cut(5, 16, 16)
LONG = (11, 5, 3, 1, 20, 9)  # frames of the clips

twelve = partial(global_batches, global_batch=12, micro_batch=3)


def folder(root: Path, classes: tuple[str, ...] = (), texts: bool = False) -> Path:
    """Clips of LONG frames, in all classes in turn, or flat."""
    for number, count in enumerate(LONG):
        there = root / classes[number % len(classes)] if classes else root
        there.mkdir(parents=True, exist_ok=True)
        write_pictures(there / f"v{number}.webp", moving(count, 16, 16, seed=number))
        if texts:
            (there / f"v{number}.txt").write_text(f"clip {number}, a b\n")
    return root


def test_items_of_a_flat_folder(tmp_path):
    """Oracle: the frames that were written: the middle window, short clips with their last frame repeated."""
    source = open_videos(folder(tmp_path), CUT)
    assert (len(source), source.classes, source.captioned) == (6, (), False)
    for index, count in enumerate(LONG):
        item, written = source[index], torch.from_numpy(moving(count, 16, 16, seed=index)).permute(0, 3, 1, 2)
        assert item.keys() == {"video", "frames"} and item["frames"] == min(count, 5)
        start = max(0, count - 5) // 2
        numbers = [min(start + i, count - 1) for i in range(5)]
        assert torch.equal(item["video"], written[numbers])
        assert source.name_sample(index) == f"v{index}.webp"


@pytest.mark.parametrize("classes", [(), ("cat", "big_dog")])
def test_captions_beside_the_clips(tmp_path, classes):
    """Oracle: the texts that were written, and labels by the sorted names of the folders where there are such."""
    source = open_videos(folder(tmp_path, classes, texts=True), CUT)
    assert source.captioned and source.classes == tuple(sorted(classes))
    items = [source[index] for index in range(6)]
    numbers = [int(source.name_sample(index).split("v")[-1][0]) for index in range(6)]
    assert unpack_captions(pad_and_stack_texts([item["caption"] for item in items])) == [
        f"clip {n}, a b" for n in numbers
    ]
    assert [item.get("label") for item in items] == [1 - n % 2 if classes else None for n in numbers]


def test_the_class_is_the_caption_where_there_is_none(tmp_path):
    """Oracle: the contract."""
    source = open_videos(folder(tmp_path, ("cat", "big_dog")), CUT)
    items = [source[index] for index in range(6)]
    assert [item["label"] for item in items] == [0, 0, 0, 1, 1, 1]
    assert unpack_captions(pad_and_stack_texts([item["caption"] for item in items])) == ["big dog"] * 3 + ["cat"] * 3


@pytest.mark.parametrize("suffix", [".txt", ".tsv", ".csv", ".jsonl"])
def test_a_captions_file(tmp_path, suffix):
    """Oracle: the captions that were written, commas, quotes and all, in another order than the clips."""
    texts = {f"v{n}.webp": f'"{n}", a caf\u00e9' for n in reversed(range(6))}
    lines = {
        ".csv": ["caption,length,file", *('"""{}"", a caf\u00e9",7,{}'.format(n, f"v{n}.webp") for n in range(6))],
        ".jsonl": [json.dumps({"file": name, "caption": text, "other": 1}) for name, text in texts.items()],
    }
    rows = lines.get(suffix, [f"{name}\t{text}" for name, text in texts.items()])
    (tmp_path / f"captions{suffix}").write_text("\n".join(rows) + "\n\n", encoding="utf-8")
    source = open_videos(folder(tmp_path), CUT, captions=tmp_path / f"captions{suffix}")
    assert unpack_captions(pad_and_stack_texts([source[n]["caption"] for n in range(6)])) == [
        texts[f"v{n}.webp"] for n in range(6)
    ]
    plain = open_videos(tmp_path, CUT)
    assert source.compute_fingerprint() != plain.compute_fingerprint()


def test_fingerprint_notices_changes(tmp_path):
    """Oracle: the same folder and a copy give the same string; another text beside a clip, or another clip of the same
    name, another one."""
    source = open_videos(folder(tmp_path / "a", texts=True), CUT)
    before = source.compute_fingerprint()
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=shutil.copyfile)
    copy = open_videos(tmp_path / "b", CUT)
    assert copy.compute_fingerprint() == before == copy.compute_full_fingerprint()
    (tmp_path / "b" / "v3.txt").write_text("clip 3, a c\n")
    assert copy.compute_fingerprint() != before
    write_pictures(tmp_path / "a" / "v5.webp", moving(4, 16, 16, seed=9))
    assert source.compute_fingerprint() != before


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.txt", "v0.webp\tx\nv1.webp\ty\n", "no caption of v2.webp and 3 more, of 6 clips"),
        ("a.txt", "".join(f"v{n}.webp\tx\n" for n in range(8)), "v6.webp and 1 more not among the 6"),
        ("a.txt", "v0.webp x\n", "line 1: no file and caption"),
        ("a.txt", "v0.webp\t \n", "line 1: no file and caption"),
        ("a.txt", "v0.webp\tx\n\nv0.webp\ty\n", "line 3: v0.webp a second time"),
        ("a.csv", "name,caption\nv0.webp,x\n", "line 2: no file and caption"),
        ("a.jsonl", '{"file": "v0.webp"}\n', "line 1: no file and caption"),
        ("a.jsonl", "[1]\n", "line 1"),
        ("a.jsonl", "nonsense\n", "line 1"),
        ("a.txt", b"\xff\xfe\t\n", "no UTF-8.*iconv -f UTF-16"),
        (None, "", "cannot be read"),
    ],
)
def test_a_captions_file_that_does_not_fit(tmp_path, name, text, message):
    """Oracle: the contract: refused, with the first file or line and the count."""
    folder(tmp_path)
    if name:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        open_videos(tmp_path, CUT, captions=tmp_path / (name or "none.txt"))


def test_captions_all_or_none(tmp_path):
    """Oracle: the contract: a clip without its .txt is named, with the count; an empty one is a bad sample."""
    folder(tmp_path, texts=True)
    (tmp_path / "v3.txt").write_text(" \n")
    with pytest.raises(BadSample, match="caption is empty"):
        open_videos(tmp_path, CUT)[3]
    for number in (1, 4):
        (tmp_path / f"v{number}.txt").unlink()
    with pytest.raises(ValueError, match="beside v1.webp and 1 more, of 6 clips"):
        open_videos(tmp_path, CUT)


def test_two_clips_of_one_name(tmp_path):
    """Oracle: the contract: a thumbnail is no second clip, and no caption belongs to two."""
    folder(tmp_path)
    picture(0).save(tmp_path / "v2.jpg")
    with pytest.raises(ValueError, match="v2.jpg and v2.webp have one name"):
        open_videos(tmp_path, CUT)


# -------------------------------------------------------------------------------------------------------------- batches


def test_windows_are_drawn_by_the_key(tmp_path):
    """Oracle: the formula: start = floor(rng.uniform(key, "clip") * starts) in what was written, then the flip."""
    source = open_videos(folder(tmp_path), CUT)
    starts = set()
    for step, batch in enumerate(twelve(source, range(8))):
        key = rng.keys(3, step, torch.arange(12))
        chance, flip = rng.uniform(key, "clip"), rng.uniform(key, "flip") < 0.5
        index = Order(6, 3).find_sample_index(step * 12 + torch.arange(12))
        for row in range(12):
            number, count = int(index[row]), LONG[index[row]]
            start = int(chance[row].double() * max(1, count - 4))
            starts.add((number, start))
            written = torch.from_numpy(moving(count, 16, 16, seed=number)).permute(0, 3, 1, 2)
            expected = written[[min(start + i, count - 1) for i in range(5)]]
            assert torch.equal(batch["video"][row], expected.flip(-1) if flip[row] else expected)
            assert batch["frames"][row] == min(count, 5)
    assert len(starts) > 20  # of 7 + 1 + 1 + 1 + 16 + 5


@pytest.mark.parametrize("mixed", [False, True])
def test_same_at_any_world_resumed_and_with_workers(tmp_path, mixed):
    """Oracle: one rank without workers from the beginning; two ranks, two workers, and a start in the middle."""
    images = folder_of_images(tmp_path / "images", 1, 9) if mixed else None
    source = open_videos(folder(tmp_path / "clips", texts=not mixed), CUT, images=images, image_share=0.4)
    expected = twelve(source, range(6))
    assert same(twelve(source, range(6), world=2), expected)
    assert same(twelve(source, range(4, 6)), expected[4:])
    assert same(twelve(source, range(3, 6), world=2, num_workers=1), expected[3:])
    assert not same(expected[:1], expected[3:4])


def test_held_out_batches_are_the_middle(tmp_path):
    """Oracle: plain indexing."""
    source = open_videos(folder(tmp_path), CUT)
    batch = next(iterate_held_out(Spread(source), 6))
    assert torch.equal(batch["video"], torch.stack([source[index]["video"] for index in range(6)]))
    assert batch["frames"].tolist() == [min(count, 5) for count in LONG] and batch["valid"].all()


def test_a_broken_clip_is_replaced_and_listed(tmp_path):
    """Oracle: the next index that reads, by the same draw; the list names each broken file once."""
    source = open_videos(folder(tmp_path / "clips"), CUT)
    for number, content in ((1, b""), (2, b"no clip")):
        (tmp_path / f"clips/v{number}.webp").write_bytes(content)
    batches = twelve(source, range(3), folder=tmp_path / "run", max_bad_fraction=0.4, flip=False)
    lines = (tmp_path / "run/bad_files.txt").read_text().splitlines()
    assert sorted(line.split("\t")[0] for line in lines) == ["v1.webp", "v2.webp"]
    for step, batch in enumerate(batches):
        index = Order(6, 3).find_sample_index(step * 12 + torch.arange(12)).tolist()
        for row, number in enumerate(index):
            chance = rng.uniform(rng.keys(3, step, torch.tensor([row])), "clip").item()
            expected = source.read({1: 3, 2: 3}.get(number, number), chance)
            assert torch.equal(batch["video"][row], expected["video"])


def test_a_source_travels_light(tmp_path):
    """Oracle: the same items after pickling, though what was found out about files stays behind."""
    source = open_videos(folder(tmp_path), CUT)
    item = source[0]
    there = pickle.loads(pickle.dumps(source))
    assert source._listings and not there._listings
    assert torch.equal(there[0]["video"], item["video"])


def test_what_is_known_of_files_is_bounded(tmp_path, monkeypatch):
    """Oracle: counting, over two epochs whose items are equal."""
    monkeypatch.setattr(videos, "_MAX_LISTINGS", 4)
    source = open_videos(folder(tmp_path), CUT)
    first, second = ([source[index]["video"] for index in range(6)] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second)) and list(source._listings) == [2, 3, 4, 5]


# ------------------------------------------------------------------------------------------------------- images, splits


def test_images_are_mixed_in(tmp_path):
    """Oracle: counting over epochs: the share exactly, every video once an epoch, every image in its turn by chance."""
    images = folder_of_images(tmp_path / "images", 1, 7)
    source = open_videos(folder(tmp_path / "clips"), CUT, images=images, image_share=0.4)
    assert isinstance(source, Mixed) and len(source) == 10  # 6 / (1 - 0.4)
    pictures = [source.images[index]["video"] for index in range(7)]
    assert all(torch.equal(video, video[:1].expand_as(video)) for video in pictures)
    met = np.zeros(7, int)
    batches = twelve(source, range(50), flip=False)  # 60 epochs
    index = Order(10, 3).find_sample_index(torch.arange(600))
    for row, number in enumerate(index.tolist()):
        batch, at = batches[row // 12], row % 12
        if number >= 6:
            assert batch["frames"][at] == 1
            met[[torch.equal(batch["video"][at], video) for video in pictures].index(True)] += 1
        else:
            assert batch["frames"][at] == min(LONG[number], 5)
    assert met.sum() == 240 and met.min() > 15
    assert source.name_sample(6) != source.name_sample(7)


def test_broken_images_are_replaced_by_others(tmp_path):
    """Oracle: the contract: neighbouring slots differ, also for one draw, so that a broken image ends no run."""
    images = folder_of_images(tmp_path / "images", 1, 3)
    source = open_videos(folder(tmp_path / "clips"), CUT, images=images, image_share=0.5)
    (images / "c0/001.png").write_bytes(b"")
    batches = twelve(source, range(4), max_bad_fraction=0.1, folder=tmp_path / "run")
    assert all(batch["video"].shape == (12, 5, 3, 16, 16) for batch in batches)
    assert (tmp_path / "run/bad_files.txt").read_text().startswith("c0/001.png\t")


def test_mixed_items_hold_what_both_have(tmp_path):
    """Oracle: the contract: captions where both have some; images' classes must be the videos'."""
    clips, images = folder(tmp_path / "clips", ("c0", "c1")), folder_of_images(tmp_path / "images", 2, 2)
    both = open_videos(clips, CUT, images=images, image_share=0.5)
    assert both.captioned and both.classes == ("c0", "c1")
    assert all(both[i].keys() == {"video", "frames", "caption", "label"} for i in range(len(both)))
    flat = open_videos(clips, CUT, images=images / "c0", image_share=0.5)
    assert not flat.captioned and flat.classes == ()
    assert all(flat[i].keys() == {"video", "frames"} for i in range(len(flat)))
    (images / "c1").rename(images / "other")
    with pytest.raises(ValueError, match="data.images=.*class folders other"):
        open_videos(clips, CUT, images=images, image_share=0.5)


def test_images_alone(tmp_path):
    """Oracle: a folder of images with num_frames=1 is one of clips of one frame, cropped as images are."""
    root = folder_of_images(tmp_path, 2, 3)
    clips, images = (open_sources(Data(path=str(root), image_size=16, num_frames=count))[0] for count in (1, None))
    for index in range(6):
        item, image = clips[index], images[index]
        assert torch.equal(item["video"], image["image"][None]) and item["frames"] == 1
        assert item["label"] == image["label"]


def test_splits(tmp_path):
    """Oracle: set arithmetic on names; a second folder is the other split, with the classes of the first."""
    root = tmp_path / "clips"
    for number in range(40):
        (root / "c1").mkdir(parents=True, exist_ok=True)
        picture(number, 16, 16).save(root / "c1" / f"{number}.png")
    data = Data(path=str(root), image_size=16, num_frames=2, held_out=0.25)
    train, unseen = open_sources(data)
    names = [{source.name_sample(i) for i in range(len(source))} for source in (train, unseen)]
    assert not names[0] & names[1] and len(names[0] | names[1]) == 40 and 3 < len(names[1]) < 20
    train, unseen = open_sources(
        Data(path=str(folder(tmp_path / "a", ("c0", "c1"))), image_size=16, num_frames=2, held_out_path=str(root))
    )
    assert len(train) == 6 and len(unseen) == 40 and unseen[0]["label"] == 1
    with pytest.raises(ValueError, match="data.held_out_path=.*no captions"):
        open_videos(folder(tmp_path / "b", texts=True), CUT, split="held_out", held_out_path=folder(tmp_path / "c"))


# -------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "given, message",
    [
        ({"frame_stride": 2}, "data.frame_stride: of clips"),
        ({"captions": "x", "height": 8}, "data.height, data.captions"),
        ({"num_frames": 5, "channels": 4}, "channels=3"),
        ({"num_frames": 0}, "num_frames"),
        ({"num_frames": 5, "images": "x", "image_share": 1.0}, "image_share=1 lies between"),
    ],
)
def test_sections_that_mean_nothing(given, message):
    """Oracle: the contract: refused with the key and the remedy."""
    with pytest.raises(ValueError, match=message):
        Data(**given)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"path": "builtin:fashion", "num_frames": 5}, "data.path=builtin:moving-fashion"),
        ({"path": "builtin:moving-fashion", "flip": False}, "data.num_frames=17"),
        ({"path": "builtin:moving-fashion", "num_frames": 5}, "data.flip=false"),
        (
            {"path": "builtin:moving-fashion", "num_frames": 5, "frame_stride": 2, "images": "x"},
            "data.frame_stride, data.images: builtin",
        ),
        ({"path": "builtin:moving-fashion", "num_frames": 5, "flip": False, "image_size": 6}, "at least 8"),
        ({"path": "{clips}"}, "holds videos: write data.num_frames=17"),
        ({"path": "{clips}/none", "num_frames": 5}, "does not exist"),
        ({"path": "{empty}", "num_frames": 5}, "no clips in it"),
    ],
)
def test_data_that_do_not_fit(tmp_path, given, message):
    """Oracle: the contract: refused with the key and the remedy."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/readme").touch()
    (tmp_path / "clips").mkdir()
    write_pictures(tmp_path / "clips/a.gif", moving(3, 16, 16))
    path = given["path"].format(clips=tmp_path / "clips", empty=tmp_path / "empty")
    with pytest.raises(ValueError, match=message):
        open_sources(Data(**given | {"path": path}))


def learners(kind):
    """Systems by what they learn from: written here, since the function under test is given them."""
    return {"clips": ["phenaki"], "clip_tokens": ["phenaki"], "latents": ["dit"]}.get(kind, [])


def test_clips_are_for_systems_of_clips():
    """Oracle: the contract: dit learns from images and latents, phenaki from clips and their tokens."""
    clips, images = Data(path="builtin:moving-fashion", num_frames=5, flip=False), Data()
    require_learnable_contents(clips, "x", ["clips"], learners)
    require_learnable_contents(images, "x", ["images"], learners)
    require_learnable_contents(images, "x", ["clips", "images"], learners)
    with pytest.raises(ValueError, match="data.num_frames=5: dit learns from images, .*, or choose system=phenaki$"):
        require_learnable_contents(Data(num_frames=5), "dit", ["images"], learners)
    with pytest.raises(ValueError, match="learns from clips: write data.num_frames=17"):
        require_learnable_contents(images, "phenaki", ["clips"], learners)


def test_what_the_system_does_not_learn_from_is_told_first(tmp_path):
    """Oracle: the contract: videos are for no system of images, tokens for none that encodes; the remedy is one."""
    write_pictures(tmp_path / "a.gif", moving(3, 16, 16))
    for path in ("builtin:moving-fashion", str(tmp_path)):
        with pytest.raises(ValueError, match="holds videos, and dit learns from images: .*system=phenaki$"):
            require_learnable_contents(Data(path=path, flip=False), "dit", ["images"], learners)
    cached = {"flips": 1, "scaling_factor": None, "first_stage": "x"}
    for kind, shape, own, message in (
        ("tokens", (2, 4, 4), "clips", "tokens of videos, and x learns from videos: .*, or choose system=phenaki$"),
        ("tokens", (4, 4), "images", "tokens of images, and x learns from images: give a folder of images$"),
        ("latents", (4, 4, 4), "images", "latents, and x learns from images: .*, or choose system=dit$"),
    ):
        with pytest.raises(ValueError, match=f"holds cached {message}"):
            require_learnable_contents(Data(codes=dict(cached, kind=kind, shape=shape)), "x", [own], learners)


def test_what_a_captions_file_may_hold(tmp_path):
    """Oracle: by hand: a byte order mark, Windows line ends, tabs in captions, half a surrogate pair."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa.mp4\tone\ttwo\r\nb.mp4\tthree\r\n")
    assert read_captions_file(tmp_path / "a.txt") == {"a.mp4": "one\ttwo", "b.mp4": "three"}
    (tmp_path / "a.jsonl").write_text('{"file": "a", "caption": "x \\ud800"}')
    assert read_captions_file(tmp_path / "a.jsonl") == {"a": "x ?"}


def test_still_pictures_are_named(tmp_path):
    """Oracle: by hand: pictures where clips are expected are said to be such; animated ones, and
    single frames, are not.
    """
    for number in range(3):
        picture(number, 16, 16).save(tmp_path / f"{number}.png")
    words = "; they are named as still pictures: one frame each, repeated"
    assert open_videos(tmp_path, CUT).describe_samples() == f"3 clips, no classes, no captions{words}"
    assert words not in open_videos(tmp_path, Cut(1, 16, 16)).describe_samples()
    write_pictures(tmp_path / "3.gif", moving(3))
    assert open_videos(tmp_path, CUT).describe_samples() == "4 clips, no classes, no captions"
