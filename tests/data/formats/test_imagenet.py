"""ImageNet's roots and its development kit, lists of classes, classes in names, captions beside images."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat
from torchvision.datasets import imagenet as original

from dstrain.commands.convert import ConvertOptions, convert_data
from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.formats.base import UNCAPTIONED, Request
from dstrain.data.formats.imagenet import read_class_titles
from dstrain.data.open import describe_data, open_sources
from dstrain.data.source import BadSample, Source
from dstrain.data.sources.images import open_images
from dstrain.encoders.text import unpack_captions
from dstrain.recipe import ConfigError, Data
from tests.data.formats.test_labels import TINY, flat, lines
from tests.support.pictures import picture

SYNSETS = ("n01440764", "n01443537", "n02123045", "n04254680")
WORDS = ("tench, Tinca tinca", "goldfish", "tabby", "soccer ball")
OF_VAL = (2, 0, 3, 3, 1, 0)  # the class of each validation image


def imagenet(root: Path, val_in_folders: bool) -> Path:
    """train/ and val/ of four classes, pictures by number."""
    for synset in SYNSETS:
        for number in range(3):
            flat(root / "train" / synset, (f"{synset}_{number}.JPEG",))
    for number, label in enumerate(OF_VAL, 1):
        folder = root / "val" / SYNSETS[label] if val_in_folders else root / "val"
        folder.mkdir(parents=True, exist_ok=True)
        picture(number).save(folder / f"ILSVRC2012_val_{number:08}.JPEG")
    return root


def write_kit(root: Path) -> None:
    """The development kit: identifiers that are not in the order of the synsets, and a class that has children."""
    data = root / "ILSVRC2012_devkit_t12" / "data"
    data.mkdir(parents=True)
    numbers = (3, 1, 4, 2)  # ILSVRC2012_ID of each synset
    rows = np.zeros(5, [(name, object) for name in ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children")])
    for place, (number, synset, word) in enumerate(zip(numbers, SYNSETS, WORDS)):
        rows[place] = (number, synset, word, "what it is", 0)
    rows[4] = (5, "n00001740", "entity", "all there is", 4)
    savemat(data / "meta.mat", {"synsets": rows})
    (data / "ILSVRC2012_validation_ground_truth.txt").write_text("".join(f"{numbers[label]}\n" for label in OF_VAL))


def write_solution(root: Path) -> None:
    """Kaggle's, whose rows are in no order."""
    rows = [
        f"ILSVRC2012_val_{number:08},{SYNSETS[label]} 1 2 3 4 {SYNSETS[label]} 5 6 7 8 \n"
        for number, label in enumerate(OF_VAL, 1)
    ]
    (root / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + "".join(sorted(rows, key=hash)))


def write_synsets(root: Path) -> None:
    (root / "imagenet_2012_validation_synset_labels.txt").write_text("".join(f"{SYNSETS[label]}\n" for label in OF_VAL))


def labels_of(source: Source) -> dict[str, int]:
    return {source.name_sample(index).rpartition("/")[2]: source[index]["label"] for index in range(len(source))}


@pytest.mark.parametrize("tree", ["", "ILSVRC/Data/CLS-LOC"])
@pytest.mark.parametrize("truth", [None, write_kit, write_solution, write_synsets])
def test_the_root_of_imagenet(tmp_path, tree, truth):
    """Oracle: data.path=ROOT/train with data.held_out_path=ROOT/val or a share, and a val/ that is sorted into folders:
    the same samples and labels.
    """
    root = imagenet(tmp_path / "d" / tree, truth is None) and tmp_path / "d"
    sorted_val = imagenet(tmp_path / "sorted", True)
    (root / tree / "test").mkdir()
    val = root / tree / "val"
    if truth:
        truth(root)
        with pytest.raises(ConfigError, match=f"data.held_out_path={val} holds ImageNet's validation images"):
            open_sources(Data(path=str(root), image_size=16))
        val = listed(val)
    for section in (Data(path=str(root), image_size=16), Data(path=str(root), image_size=16, held_out=0.3)):
        train, unseen = open_sources(section)
        own = section.model_copy(
            update={
                "path": str(root / tree / "train"),
                "held_out_path": None if section.held_out else str(val),
            }
        )
        plain, share = open_sources(own)
        assert train.compute_fingerprint() == plain.compute_fingerprint() and train.classes == SYNSETS
        assert unseen.compute_fingerprint() == share.compute_fingerprint()
        if section.held_out:
            continue
        expected = {f"ILSVRC2012_val_{number:08}.JPEG": label for number, label in enumerate(OF_VAL, 1)}
        assert labels_of(unseen) == expected and unseen.classes == SYNSETS
        by_folder = open_images(root / tree / "train", 16, split="held_out", held_out_path=sorted_val / "val")
        assert labels_of(by_folder) == expected
        assert describe_data(section, train, unseen)[1].startswith("held out: 6 images, 4 classes of 1 ")
    assert labels_of(open_images(root, 16, split="held_out")) == expected
    with pytest.raises(ConfigError, match=f"splits, not classes: write data.path={root / tree / 'train'}"):
        open_images(root, 16, split="all")


def test_what_is_not_like_imagenet(tmp_path):
    """Oracle: the contract: refused as before where val/ has other classes, or others stand beside, with any labels;
    a run takes its own held-out data where these are named.
    """
    for names in (
        ("train/a", "train/b", "val/a", "val/c"),
        ("train/a", "train/b", "val/a", "other/c"),
        ("train/a", "val/a"),
        ("train", "val"),
    ):
        shutil.rmtree(tmp_path / "d", ignore_errors=True)
        for name in names:
            flat(tmp_path / "d" / name)
        for labels in ("auto", "none"):
            with pytest.raises(ConfigError, match=f"are splits, not classes: write data.path={tmp_path / 'd/train'}"):
                open_sources(Data(path=str(tmp_path / "d"), image_size=16, labels=labels))
    root = imagenet(tmp_path / "in", True)
    other = flat(tmp_path / "own" / SYNSETS[2])
    train, unseen = open_sources(Data(path=str(root), image_size=16, held_out_path=str(other.parent)))
    assert len(train) == 12 and set(labels_of(unseen).values()) == {2}
    assert lines("dit-small", f"folder={tmp_path / 'r'}", f"data.path={root}", "model.num_classes=4", *TINY)[:2] == [
        f"data: {root}: 12 images, 4 classes of 3, no captions",
        "held out: 6 images, 4 classes of 1 (n01443537) to 2 (n01440764), no captions",
    ]


def listed(val: Path) -> Path:
    """The table beside val/ that the command of its refusal writes."""
    with pytest.raises(ConfigError) as caught:
        open_sources(Data(path=str(val), image_size=16))
    command = shlex.split(re.search(r"`dstrain convert (.*?)`", str(caught.value)).group(1))
    assert command == ["imagenet-kit", str(val), "--out", f"{val}.csv"]
    assert convert_data(ConvertOptions(command[0], Path(command[1]), Path(command[3]))).startswith("6 images in")
    return Path(command[3])


def test_the_kit_as_torchvision_reads_it(tmp_path, monkeypatch):
    """Oracle: torchvision's own reader of the kit; the images that were written."""
    root = imagenet(tmp_path / "d", False)
    write_kit(root)
    shutil.make_archive(str(tmp_path / "kit"), "gztar", root, "ILSVRC2012_devkit_t12")
    monkeypatch.setattr(original, "_verify_archive", lambda *names: None)  # by the hash of the real one
    original.parse_devkit_archive(tmp_path, "kit.tar.gz")
    _, synsets = original.load_meta_file(tmp_path)
    source, unlabelled = open_images(listed(root / "val"), 16), Request(SUFFIXES, labels="none")
    assert [source.classes[source[index]["label"]] for index in range(len(OF_VAL))] == synsets
    plain = open_images(root / "val", 16, request=unlabelled)
    for index in range(len(OF_VAL)):
        assert source.name_sample(index) == f"val/{plain.name_sample(index)}"
        assert torch.equal(source[index]["image"], plain[index]["image"])


def test_a_kit_that_does_not_fit(tmp_path):
    """Oracle: the contract: a sentence names the file and what is wrong; without a kit val/ has no classes, and an
    index made before the kit was there is not taken.
    """
    root = imagenet(tmp_path / "d", False)
    section = Data(path=str(root / "val"), image_size=16, index=str(tmp_path / "index"))
    assert open_sources(section)[0].classes == ()
    options = ConvertOptions("imagenet-kit", root / "val", tmp_path / "out.csv")
    with pytest.raises(ConfigError, match="put its labels beside or above it: ILSVRC2012_devkit_t12/"):
        convert_data(options)
    write_kit(root)
    with pytest.raises(ConfigError, match="validation images without class folders: list them once with"):
        open_sources(section)
    convert_data(options)
    table = Data(path=str(options.out), image_size=16)
    assert set(labels_of(open_sources(table)[0]).values()) == {0, 1, 2, 3}
    options.out.unlink()
    data = root / "ILSVRC2012_devkit_t12" / "data"
    truth = data / "ILSVRC2012_validation_ground_truth.txt"
    for content, message in (
        ("3\n1\n", "no label of ILSVRC2012_val_00000003.JPEG, only of 2 images"),
        ("3\n5\n" * 3, "no synset such as n01440764 for image 2"),
        (b"\xff\xfe", "cannot be read"),
        ("", "no synset such as"),
    ):
        truth.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ConfigError, match=message):
            convert_data(options)
    (data / "meta.mat").write_bytes(b"MATLAB 5.0 MAT-file" + bytes(200))
    truth.write_text("1\n" * 6)
    with pytest.raises(ConfigError, match="meta.mat cannot be read"):
        convert_data(options)
    assert not options.out.exists()


@pytest.mark.parametrize(
    "text", ["{0}\n{1}\n{2}\n{3}\n", "{0} great white\n{1} a, b\n{2} c\n{3} d e\n\n", "{0},x\n{1},\n{2}\n{3}\n"]
)
def test_a_list_of_classes(tmp_path, text):
    """Oracle: the order of the lines is the label; a class without images keeps its number."""
    order = (SYNSETS[2], SYNSETS[0], "n09999999", SYNSETS[3])
    (tmp_path / "order").write_text(text.format(*order))
    root = imagenet(tmp_path / "d", False)
    shutil.rmtree(root / "train" / SYNSETS[1])
    data = Data(path=str(root / "train"), image_size=16, class_list=str(tmp_path / "order"))
    source, plain = open_sources(data)[0], open_images(root / "train", 16)
    assert source.classes == order and source.count_samples_by_class().tolist() == [3, 3, 0, 3]
    for index in range(9):
        item, other = source[index], plain[index]
        assert source.name_sample(index) == plain.name_sample(index) and torch.equal(item["image"], other["image"])
        assert order[item["label"]] == plain.classes[other["label"]]
    named = ("great white", "a, b", "c", "d e") if "great" in text else order
    assert read_class_titles(str(root / "train"), str(tmp_path / "order"), source.classes) == named
    flat(root / "train" / "n00000001")
    for changes, message in (
        ({}, "class folders n00000001 are not among the 4 of data.class_list="),
        ({"class_list": str(tmp_path / "no")}, "data.class_list=.*cannot be read"),
        ({"path": str(flat(tmp_path / "flat"))}, "no class folders.*data.labels=prefix"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_sources(data.model_copy(update=changes))
    for content, message in (("", "has no lines"), ("a\n\nb\n", "an empty line"), ("a\nb\na\n", "names a twice")):
        (tmp_path / "order").write_text(content)
        with pytest.raises(ConfigError, match=message):
            open_sources(data)


def test_titles_from_the_kit(tmp_path):
    """Oracle: LOC_synset_mapping.txt above the data; names of classes where no such file names all of them."""
    root = imagenet(tmp_path / "d" / "ILSVRC/Data/CLS-LOC", True)
    (tmp_path / "d" / "LOC_synset_mapping.txt").write_text("".join(f"{n} {w}\n" for n, w in zip(SYNSETS, WORDS)))
    assert read_class_titles(str(root), None, SYNSETS[::-1]) == WORDS[::-1]
    assert read_class_titles(str(root), None, ("cat", "dog")) == ("cat", "dog")


def test_classes_in_names(tmp_path):
    """Oracle: ADM's rule written anew: sorted prefixes before the first `_` are the classes, flat and nested."""
    names = ("dog_1_a.png", "cat_7.png", "deep/dog_2.png", "deep/er/ant_cat_3.png", "cat_/bird_0.png")
    root = flat(tmp_path / "d", names)
    data = Data(path=str(root), image_size=16, labels="prefix")
    source = open_sources(data)[0]
    classes = sorted({os.path.basename(name).split("_")[0] for name in names})
    assert source.classes == tuple(classes) and [source.name_sample(index) for index in range(5)] == sorted(names)
    plain = open_images(root, 16, request=Request(SUFFIXES, labels="none"))
    for index, name in enumerate(sorted(names)):
        assert source[index]["label"] == classes.index(os.path.basename(name).split("_")[0])
        assert torch.equal(source[index]["image"], plain[index]["image"]) and plain.name_sample(index) == name
    flat(tmp_path / "unseen", ("cat_9.png",))
    unseen = open_sources(data.model_copy(update={"held_out_path": str(tmp_path / "unseen")}))[1]
    assert unseen.classes == source.classes and unseen[0]["label"] == classes.index("cat")
    assert (
        open_sources(data.model_copy(update={"labels": "none"}))[0].describe_samples()
        == "5 images, no classes, no captions"
    )
    flat(root, ("plain.png",))
    with pytest.raises(ConfigError, match="plain.png does not begin with its class, as cat_1.png does"):
        open_sources(data)
    pets = flat(tmp_path / "p", (*names[:2], "dog_5.png", "cat_8.png"))
    words = [f"folder={tmp_path / 'r'}", f"data.path={pets}", *TINY]
    (problem,) = lines("dit-small", *words)
    assert "write data.labels=prefix" in problem
    assert "2 classes of 2" in lines("dit-small", *words, "data.labels=prefix", "model.num_classes=2")[0]


def test_captions_beside_images(tmp_path):
    """Oracle: the texts that were written; images without one are left out, an empty one is a bad sample."""
    texts = {
        "a/0.png": "one\n\n two \n",
        "a/1.png": {"caption": "three", "width": 5},
        "a/2.png": None,
        "b/3.png": {"prompt": ["four", "five"]},
        "b/4.png": " \n",
        "b/5.png": {"width": 3},
        "b/c/6.png": b"\xff\xfe",
    }
    root = flat(tmp_path / "d", tuple(texts))
    for name, text in texts.items():
        if isinstance(text, dict):
            (root / name).with_suffix(".json").write_text(json.dumps(text))
        elif text is not None:
            (root / name).with_suffix(".txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    request = Request(SUFFIXES, captions=True)
    source = open_images(root, 16, request=request)
    captioned = ["a/0.png", "a/1.png", "b/3.png", "b/4.png", "b/c/6.png"]
    assert [source.name_sample(index) for index in range(len(source))] == captioned
    assert source.layout.left_out_counts == {UNCAPTIONED: 2} and source.classes == ("a", "b")
    plain = {plain.name_sample(index): plain[index] for plain in [open_images(root, 16)] for index in range(7)}
    for index, caption, label in ((0, "one", 0), (1, "three", 0), (2, "four", 1)):
        item = source[index]
        assert unpack_captions(item["caption"][None]) == [caption] and item["label"] == label
        assert torch.equal(item["image"], plain[source.name_sample(index)]["image"])
    assert unpack_captions(source.read(0, 0.7)["caption"][None]) == ["two"]
    for index in (3, 4):
        with pytest.raises(BadSample, match="caption is empty, or cannot be read"):
            source[index]
    assert open_images(root, 16, request=Request(SUFFIXES, captions=True, labels="none")).classes == ()
    picture(0).save(root / "flat.png")
    (root / "flat.txt").write_text("in no folder")
    assert open_images(root, 16, request=request).classes == ()
