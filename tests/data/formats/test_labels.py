"""Classes: what names them, what is refused instead of being taken for one, and the lines that say what was found."""

import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from dstrain.commands.job import JobOptions, prepare_job
from dstrain.data.cached.latents import Latents
from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.formats.base import Request
from dstrain.data.open import describe_data, open_sources
from dstrain.data.sources.images import open_images
from dstrain.data.sources.videos import open_videos
from dstrain.data.views import Spread, Windows
from dstrain.recipe import ConfigError, Data
from tests.data.cached.test_latents import write
from tests.data.sources.test_videos import CUT
from tests.data.sources.test_videos import folder as folder_of_clips
from tests.support.launch import ROOT
from tests.support.pictures import folder, picture

TINY = ["data.image_size=28", "data.channels=1"]


def flat(root: Path, names: tuple[str, ...] = ("0.png", "1.png", "2.png", "3.png")) -> Path:
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(root / name)
    return root


def lines(name: str, *words: object) -> list[str]:
    """What a start with a recipe says, or the lines of its refusal."""
    options = JobOptions(
        ROOT / "launch" / "recipes" / f"{name}.yaml",
        ROOT / "ds_configs" / "zero1.json",
        tuple(map(str, words)),
        dry_run=True,
    )
    try:
        return prepare_job(options, 1, "cpu").remarks
    except ConfigError as error:
        return error.problems


def test_another_number_of_classes(tmp_path):
    """Oracle: the folders themselves: fewer classes, more and none are refused by a model of several, with a remedy
    that then holds; a model without labels takes every folder, and says that there are no classes.
    """
    two, one = folder(tmp_path / "two"), flat(tmp_path / "one")
    run = f"folder={tmp_path / 'run'}"
    for data, number, remedy in (
        (two, 10, "model.num_classes=2"),
        (two, 1, "model.num_classes=2"),
        (one, 10, "model.num_classes=1"),
        (one, 2, "model.num_classes=1"),
    ):
        words = [run, f"data.path={data}", f"model.num_classes={number}"]
        (problem,) = lines("dit-small", *words)
        assert problem.startswith(f"data.path={data} has ") and remedy in problem, problem
        counted = "2 classes of 10" if data == two else "no classes"
        assert any(f"{data}: " in line and counted in line for line in lines("dit-small", *words, remedy))
    (problem,) = lines("iddpm-small", run, f"data.path={one}")
    remedy = "model.class_cond=false samples.guidance_scale=1"
    assert "no classes" in problem and f"write {remedy} for a model without labels" in problem
    for data in (one, two):
        assert lines("iddpm-small", run, f"data.path={data}", *remedy.split())[0].startswith(f"data: {data}")
        assert lines("vae-small", run, f"data.path={data}")[0].startswith(f"data: {data}")
    write(tmp_path / "codes", classes=("a",) * 3)  # of a cache, too
    words = [run, f"data.path={tmp_path / 'codes'}", "data.image_size=16", "data.channels=1", "model.patch_size=1"]
    assert "has 3 classes" in lines("dit-small", *words, "every.sample=0")[0]


def test_held_out_images_without_classes(tmp_path):
    """Oracle: the folders: refused beside classes that are learned, taken where labels say nothing."""
    two, val = folder(tmp_path / "two"), flat(tmp_path / "unseen")
    words = [f"folder={tmp_path / 'run'}", f"data.path={two}", f"data.held_out_path={val}"]
    (problem,) = lines("dit-small", *words, "model.num_classes=2")
    assert problem.startswith("the held-out data have no classes") and str(two) in problem
    assert lines("vae-small", *words)[:2] == [
        f"data: {two}: 20 images, 2 classes of 10, no captions",
        f"held out: {val}: 4 images, no classes, no captions",
    ]
    assert open_images(two, 16, split="held_out", held_out_path=val).classes == ()
    for seen in (
        two,
        next(path for path in two.iterdir() if path.is_dir()),
        two.parent,
    ):  # samples that would be trained on
        (problem,) = lines("vae-small", *words[:2], f"data.held_out_path={seen}")
        assert problem.startswith(f"data.held_out_path={seen} and data.path={two} share files")


@pytest.mark.parametrize(
    "names, expected",
    [
        (
            ("train", "val"),
            "train and val are splits, not classes: write data.path={0}/train, and for evaluation "
            "data.held_out_path={0}/val",
        ),
        (("Test", "Train", "Valid"), "data.path={0}/Train, and for evaluation data.held_out_path={0}/Valid"),
        (("train2017", "val2017"), "data.path={0}/train2017, and for evaluation data.held_out_path={0}/val2017"),
        (("training", "test", "cats"), "data.path={0}/training"),
        (("train",), "train are splits, not classes: write data.path={0}/train"),
        (("seg_train", "seg_test"), "data.path={0}/seg_train, and for evaluation data.held_out_path={0}/seg_test"),
        (("trainA", "testA"), "data.path={0}/trainA"),
        (("training_set", "test_set"), "data.path={0}/training_set"),
        (("train", "bus", "car"), None),
        (("trains", "tests"), None),
        (("freight_train", "test_tube"), None),
    ],
)
def test_splits_are_no_classes(tmp_path, names, expected):
    """Oracle: the names: splits are refused with the paths to write, for images and clips; one `train` among other
    vehicles is a class.
    """
    for name in names:
        flat(tmp_path / name / "deeper")
    data = Data(path=str(tmp_path), image_size=16)
    for section in (data, data.model_copy(update={"num_frames": 1})):
        if expected is None:
            assert open_sources(section)[0].classes == tuple(sorted(names))
        else:
            with pytest.raises(ConfigError) as caught:
                open_sources(section)
            assert expected.format(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "names, expected",
    [
        (
            ("images/train", "images/val"),
            "write data.path={0}/images/train, and for evaluation data.held_out_path={0}/images/val",
        ),
        (("cat/train", "cat/val", "dog/train"), "the folder cat holds the splits train and val"),
    ],
)
def test_splits_within_a_class(tmp_path, names, expected):
    """Oracle: the names, a folder deeper: held-out images are never learned from in silence."""
    for name in names:
        flat(tmp_path / name)
    with pytest.raises(ConfigError) as caught:
        open_sources(Data(path=str(tmp_path), image_size=16))
    assert expected.format(tmp_path) in str(caught.value)


def test_names_that_begin_with_classes(tmp_path):
    """Oracle: ADM's convention: cat_1.png in one folder is no class here, and the refusal names what was not read."""
    names = [f"{kind}_{number}.png" for kind in ("cat", "dog") for number in range(3)]
    (problem,) = lines("dit-small", f"folder={tmp_path / 'r'}", f"data.path={flat(tmp_path / 'a', tuple(names))}")
    assert "what file names begin with, cat, dog, is not read" in problem
    names = tuple(f"IMG_{number}.png" for number in range(6))
    (problem,) = lines("dit-small", f"folder={tmp_path / 'r'}", f"data.path={flat(tmp_path / 'b', names)}")
    assert "has no classes" in problem and "begin with" not in problem


def test_labels_in_dataset_json(tmp_path):
    """Oracle: the file as StyleGAN's dataset_tool writes it: its numbers are the labels, its folders are no classes."""
    names = ("00000/img0.png", "00000/img1.png", "00001/img2.png", "img3.png")
    root = flat(tmp_path / "d", names)
    path = root / "dataset.json"
    path.write_text(json.dumps({"labels": [[name, label] for name, label in zip(names, (4, 0, 4, 2))]}))
    source = open_images(root, 16)
    assert source.classes == ("0", "1", "2", "3", "4") and source.count_samples_by_class().tolist() == [1, 0, 1, 0, 2]
    assert {source.name_sample(i): source[i]["label"] for i in range(4)} == dict(zip(names, (4, 0, 4, 2)))
    unseen = flat(tmp_path / "unseen", ("a.png",))
    (unseen / "dataset.json").write_text('{"labels": [["a.png", 2]]}')
    held = open_images(root, 16, split="held_out", held_out_path=unseen)
    assert held.classes == source.classes and held[0]["label"] == 2
    path.write_text('{"labels": null}')  # then folders are no classes either
    assert open_images(root, 16).classes == () and len(open_images(root, 16)) == 4
    for text, message in (
        ('{"labels": [["00000/img0.png", 1]]}', "no label of 00000/img1.png and 2 more"),
        ('{"labels": [["a", [0.5, 1]]]}', "no whole numbers"),
        ('{"labels": [["a", -1]]}', "numbers"),
        ('{"labels": [3, 4]}', "no whole numbers"),
        ('{"labels": [["a", 1], ["a", 2]]}', "a file twice"),
        ('{"labels"', "cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            open_images(root, 16)
        assert f"data.path={root}" in str(caught.value)
    path.write_text('{"name": "my data"}')  # someone else's file
    (root / "img3.png").unlink()
    assert open_images(root, 16).classes == ("00000", "00001")


def test_folders_of_other_programs(tmp_path):
    """Oracle: the same folder without them: what macOS and Synology leave beside the classes is none of them."""
    said = [open_images(folder(tmp_path / name), 16).describe_samples() for name in "ab"]
    for other in ("__MACOSX", "c0/@eaDir", ".ipynb_checkpoints"):
        (tmp_path / "b" / other).mkdir()
        picture(0).save(tmp_path / "b" / other / "000.png")
    assert [open_images(tmp_path / name, 16).describe_samples() for name in "ab"] == said and said[0] == said[1]


def test_what_was_found_is_said(tmp_path):
    """Oracle: counting by hand."""
    root = folder(tmp_path / "d", 3, 4)
    picture(0).save(root / "c1" / "more.png")
    (root / "c2" / "000.png").unlink()
    data = Data(path=str(root), image_size=16)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "bad_files.txt").write_text("c1/a.png\tx\nc0/b.png\ty\nc1/a.png\tx\n")
    assert describe_data(data, *open_sources(data), tmp_path / "run") == [
        f"data: {root}: 12 images, 3 classes of 3 (c2) to 5 (c1), no captions; 2 unreadable files are listed in "
        f"{tmp_path / 'run' / 'bad_files.txt'}",
        "held out: nothing",
    ]
    fashion = Data(image_size=28)
    assert describe_data(fashion, *open_sources(fashion)) == [
        "data: builtin:fashion: 2,000 images, 10 classes of 200, no captions",
        "held out: 500 images, 10 classes of 50, no captions",
    ]
    clips = open_videos(folder_of_clips(tmp_path / "v", ("a", "b"), texts=True), CUT)
    assert clips.describe_samples() == "6 clips, 2 classes of 3, captions beside them"
    assert Windows(clips, 2).describe_samples() == f"12 windows of {clips.describe_samples()}"
    assert (
        Spread(clips, 2).describe_samples() == f"2 of {clips.describe_samples()}"
        and Spread(clips).describe_samples() == clips.describe_samples()
    )
    assert (
        Spread(clips, 1200).describe_samples()
        == f"{clips.describe_samples()}; 1,200 are asked for, and there are no more"
    )
    alone = open_videos(folder_of_clips(tmp_path / "w"), CUT, images=root, image_share=0.25)
    assert alone.describe_samples() == (
        "6 clips, no classes, no captions; 25% of the samples are images: 12 images, 3 classes "
        "of 3 (c2) to 5 (c1), the classes as captions"
    )
    moving = Data(path="builtin:moving-fashion", num_frames=3, image_size=24, channels=1, flip=False)
    assert describe_data(moving, *open_sources(moving)) == [
        "data: builtin:moving-fashion: 10,000 clips, 10 classes of 1,000, captions",
        "held out: 2,500 clips, 10 classes of 250, captions",
    ]
    pairs = Data(path="builtin:emoji-pairs")
    assert "held out: 286 of 1,910 embedding pairs: image_embed, text_embed" in describe_data(
        pairs, *open_sources(pairs)
    )
    write(tmp_path / "x")
    held = Latents(tmp_path / "x", "held_out", 0.3)
    labels = np.bincount([held[i]["label"] for i in range(len(held))], minlength=3)
    assert held.count_samples_by_class().tolist() == labels.tolist() and held.describe_samples().startswith(
        f"{len(held)} cached images"
    )
    assert Latents(tmp_path / "x").describe_samples() == (
        "50 cached images (latents 3 x 4 x 4), 3 classes of 16 (c) to 17 (a), no captions"
    )


@pytest.mark.parametrize("captions, labels", [(False, "auto"), (False, "none"), (True, "auto")])
def test_files_of_other_types_are_said(tmp_path, captions, labels):
    """Oracle: counting by hand, in folders of any depth, from a fresh listing and from an index; none is a sample."""
    root = folder(tmp_path / "d", 2, 3) if labels == "auto" else tmp_path / "d" / "deep"
    deep = root / "c1" / "deep" if labels == "auto" else root
    deep.mkdir(parents=True)
    if labels == "none":
        with pytest.raises(ConfigError, match="no images in it, and no other file"):
            open_images(root, 16, request=Request(SUFFIXES, labels=labels))
        flat(root)
    for name in ("a.HEIC", "b.heic", "c.tiff", "notes.md", ".d.tiff", "e.mp4"):
        (deep / name).write_text("x")
    if captions:
        for file in root.rglob("*.png"):
            file.with_suffix(".txt").write_text("a thing")
    words = (
        "; files of other types are left out, .heic 2, .mp4 1, .tiff 1: convert pictures to PNG or JPEG, read "
        "videos by data.num_frames, if they are samples"
    )
    request = Request(SUFFIXES, captions=captions, labels=labels)
    for _ in range(2):
        source = open_images(root, 16, request=request, index=tmp_path / "index")
        source.compute_fingerprint()
        assert len(source) == (6 if labels == "auto" else 4) and source.describe_samples().endswith(words)
    (flat(tmp_path / "flat") / "folder.gif").mkdir()
    for name in ("x.tif", ".y.tif", "folder.gif/z.tif"):
        (tmp_path / "flat" / name).write_text("x")
    assert (
        open_images(tmp_path / "flat", 16)
        .describe_samples()
        .endswith("; files of other types are left out, .tif 2: convert pictures to PNG or JPEG, if they are samples")
    )
    clips = open_videos(folder_of_clips(tmp_path / "v", ("a", "b"), texts=True), CUT)
    (tmp_path / "v" / "a" / "x.tif").write_text("x")
    assert "left out" not in clips.describe_samples(), "texts are captions"
    assert "; files of other types are left out, .tif 1: convert" in open_videos(tmp_path / "v", CUT).describe_samples()


def test_links_and_unreadable_folders(tmp_path):
    """Oracle: POSIX: a link to itself leads nowhere (ELOOP), links in a circle are followed once, each file is listed
    once; a folder that may not be listed is named.
    """
    root = folder(tmp_path / "d", 2, 2)
    (root / "c0" / "deep").mkdir()
    picture(9).save(root / "c0" / "deep" / "9.png")
    for link, target in (
        ("loop", "loop"),
        ("self", "."),
        ("c0/loop.png", "loop.png"),
        ("c0/up", ".."),
        ("c0/deep/up", "../../c0"),
        ("c1/c0", "../c0"),
    ):
        os.symlink(target, root / link)
    os.symlink(root / "c1", root / "c0" / "c1")
    names = [source.name_sample(i) for source in [open_images(root, 16)] for i in range(len(source))]
    assert names == [
        "c0/000.png",
        "c0/001.png",
        "c0/c1/000.png",
        "c0/c1/001.png",
        "c0/deep/9.png",
        "c0/loop.png",
        "c1/000.png",
        "c1/001.png",
        "c1/c0/000.png",
        "c1/c0/001.png",
        "c1/c0/deep/9.png",
        "c1/c0/loop.png",
    ]
    with pytest.raises(ConfigError, match="data.path=.*does not exist"):
        open_images(root / "loop", 16)
    data, (soft, hard) = Data(path=str(root), image_size=16), resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))  # root may list everything, but not so
    try:
        for section in (data, data.model_copy(update={"held_out_path": str(root)})):
            with pytest.raises(ConfigError, match=f"data.path={root}: {root} cannot be listed .Too many open files"):
                open_sources(section)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
