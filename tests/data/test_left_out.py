"""data.leave_out: samples by their captions, which are neither trained on nor held out."""

from collections.abc import Sequence
from fnmatch import fnmatch
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from dstrain.data.batches import iterate_held_out
from dstrain.data.builtin.fashion import Fashion
from dstrain.data.builtin.moving import MOTIONS, MovingFashion
from dstrain.data.open import describe_data, open_sources
from dstrain.data.source import Source
from dstrain.recipe import ConfigError, Data
from tests.support import gloo
from tests.support.clips import moving, write_pictures
from tests.support.pictures import picture

TEXTS = [f"{word} {name}" for name in ("hat", "Bag", "shoe", "coat \u732b") for word in ("a dark", "a light", "an old")]
COMMON = {"image_size": 16, "flip": False, "captioned": True}


def captioned(root: Path, texts: Sequence[str] = TEXTS * 5) -> Path:
    """A folder with a picture for each text; the lines of a text are several captions."""
    root.mkdir(parents=True)
    for number, text in enumerate(texts):
        picture(number % 7).save(root / f"{number:03}.png")
        (root / f"{number:03}.txt").write_text(text, encoding="utf-8")
    return root


def kept(texts: Sequence[str], patterns: Sequence[str], share: float, unseen: bool) -> list[str]:
    """Names of a split by Python's fnmatch over the files' texts, and by blake2b of the names."""
    names = []
    for number, text in enumerate(texts):
        name = f"{number:03}.png"
        held = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") < share * 2.0**64
        lines = [line.lower() for line in text.split("\n")]
        if held == unseen and not any(fnmatch(line, pattern.lower()) for pattern in patterns for line in lines):
            names.append(name)
    return names


def names_of(source: Source) -> list[str]:
    return [source.name_sample(place) for place in range(len(source))]


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize(
    "patterns", [["a dark hat"], ["A DARK *", "*old bag"], ["* coat ?", "* [hs]*"]], ids=["one", "capitals", "signs"]
)
def test_samples_by_their_captions(tmp_path, patterns, share):
    """Oracle: fnmatch over the texts in the files, in memory, on the disk, and found there again, with the same
    fingerprint, which is not that of other patterns; every held-out sample is passed once.
    """
    texts = [*TEXTS * 5, "a light hat\nan old bag"]
    path, prints = str(captioned(tmp_path / "d", texts)), []
    for index in (None, str(tmp_path / "i"), str(tmp_path / "i")):
        data = Data(path=path, held_out=share, leave_out=patterns, index=index, **COMMON)
        train, unseen = open_sources(data)
        assert names_of(train) == kept(texts, patterns, share, False)
        assert (unseen is None) == (not share)
        prints.append(train.compute_fingerprint())
        if unseen is not None:
            assert names_of(unseen) == kept(texts, patterns, share, True)
            passed = [batch["position"][batch["valid"]].tolist() for batch in iterate_held_out(unseen, 4)]
            assert sum(passed, []) == list(range(len(unseen)))
        for pattern in patterns:
            number = sum(any(fnmatch(t.lower(), pattern.lower()) for t in text.split("\n")) for text in texts)
            assert f"{pattern} {number}" in describe_data(data, train, unseen)[0]
    other = Data(path=path, held_out=share, leave_out=["a light shoe"], index=str(tmp_path / "i"), **COMMON)
    whole = Data(path=path, held_out=share, index=str(tmp_path / "i"), **COMMON)
    assert len({*prints, *(open_sources(d)[0].compute_fingerprint() for d in (other, whole))}) == 3


def names_on(rank: int, path: str, index: str) -> list[list[str]]:
    data = Data(path=path, held_out=0.3, leave_out=["*dark*"], index=index, **COMMON)
    return [names_of(source) for source in open_sources(data)]


def test_ranks_leave_out_the_same(tmp_path):
    """Oracle: one process, which finds what two have written."""
    words = str(captioned(tmp_path / "d")), str(tmp_path / "i")
    first, second = gloo.run(tmp_path, names_on, *words)
    assert first == second == names_on(0, *words) and first[0] and first[1]


def test_captions_in_several_chunks(tmp_path, monkeypatch):
    """Oracle: the same folder in one chunk."""
    path = captioned(tmp_path / "d")
    data = Data(path=str(path), leave_out=["*dark*"], **COMMON)
    whole = names_of(open_sources(data)[0])
    monkeypatch.setattr("dstrain.data.index.index.CHUNK", 7)
    assert names_of(open_sources(data)[0]) == whole
    on_disk = open_sources(data.model_copy(update={"index": str(tmp_path / "i")}))[0]
    assert names_of(on_disk) == whole and dict(on_disk.left_out) == {"*dark*": 20}


def test_held_out_data_of_their_own(tmp_path):
    """Oracle: fnmatch; a pattern that fits no caption there is no mistake."""
    texts = ["a dark hat", "a light hat", "a light bag"]
    data = Data(
        path=str(captioned(tmp_path / "a")),
        held_out_path=str(captioned(tmp_path / "b", texts)),
        leave_out=["a dark hat", "an old*"],
        **COMMON,
    )
    train, unseen = open_sources(data)
    assert names_of(train) == kept(TEXTS * 5, data.leave_out, 0, False)
    assert names_of(unseen) == ["001.png", "002.png"]


def test_one_source_of_a_mixture_has_the_captions(tmp_path):
    """Oracle: fnmatch over both folders; a pattern has to fit a caption of one of them."""
    texts = ["a red hat", "a red bag"]
    paths = [captioned(tmp_path / "a"), captioned(tmp_path / "b", texts)]
    mixture = [{"path": str(path)} for path in paths]
    data = Data(mixture=mixture, path=str(paths[0]), leave_out=["*red hat", "*dark*"], **COMMON)
    train, _ = open_sources(data)
    expected = [f"a/{name}" for name in kept(TEXTS * 5, data.leave_out, 0, False)]
    assert names_of(train) == [*expected, "b/001.png"]
    assert dict(train.left_out) == {"*red hat": 1, "*dark*": 20}
    with pytest.raises(ConfigError, match=r"data.leave_out: '\*green\*' fits no caption of data.mixture, such as 'a"):
        open_sources(data.model_copy(update={"leave_out": ("*red hat", "*green*")}))


@pytest.mark.parametrize("learns", [True, False], ids=["texts", "labels"])
def test_built_in_images(learns):
    """Oracle: the captions of all built-in images, with their pixels; also where the model reads labels alone."""
    patterns = ("A dark sandal", "*light bag")
    for split, source in zip(("train", "held_out"), open_sources(Data(captioned=learns, leave_out=patterns))):
        whole = Fashion(32, 3, split, captioned=True)
        texts = [whole.read_captions(place)[0] for place in range(len(whole))]
        own = [place for place, text in enumerate(texts) if text not in ("a dark sandal", "a light bag")]
        assert len(source) == len(own) < len(whole)
        assert np.array_equal(source.labels, whole.labels[own]) and (source.images == whole.images[own]).all()
        assert [source.read_captions(place)[0] for place in range(len(source))] == [texts[place] for place in own]
        assert dict(source.left_out) == {
            patterns[0]: texts.count("a dark sandal"),
            patterns[1]: texts.count("a light bag"),
        }
        assert source.compute_fingerprint() != whole.compute_fingerprint()


def test_built_in_clips():
    """Oracle: the whole data, in their order, by their captions."""
    data = Data(path="builtin:moving-fashion", num_frames=3, image_size=24, channels=1, flip=False)
    whole = MovingFashion(3, 24, 24)
    texts = [whole.compose_caption(index) for index in range(len(whole))]
    source, unseen = open_sources(data.model_copy(update={"leave_out": ("a bag moving *", "an ankle boot bouncing")}))
    own = [index for index, text in enumerate(texts) if not fnmatch(text, "a bag moving *") and "boot b" not in text]
    assert [source.compose_caption(index) for index in range(len(source))] == [texts[index] for index in own]
    assert (source[5]["video"] == whole[own[5]]["video"]).all()
    assert source.count_samples_by_class().tolist() == np.bincount([whole[i]["label"] for i in own]).tolist()
    assert len(unseen) == 50 * (10 * len(MOTIONS) - 5)
    others = data.model_copy(update={"leave_out": ("an ankle boot moving *", "a bag bouncing")})
    found = {open_sources(section)[0].compute_fingerprint() for section in (data, others)}
    assert len({*found, source.compute_fingerprint(), MovingFashion(3, 24, 24).compute_fingerprint()}) == 3


def test_clips_with_a_file_of_captions(tmp_path):
    """Oracle: the lines of the file. Captions that no index lists are refused with what lists them."""
    root = tmp_path / "clips"
    root.mkdir()
    for number in range(6):
        write_pictures(root / f"{number}.gif", moving(3, 16, 16, number))
    texts = [f"a {word} thing goes {way}" for word in ("red", "blue") for way in ("left", "right", "up")]
    lines = "".join(f"{number}.gif\t{text}\n" for number, text in enumerate(texts))
    (tmp_path / "captions.tsv").write_text(lines)
    section = {"path": str(root), "num_frames": 2, "image_size": 16, "flip": False, "leave_out": ["*red*left"]}
    train, _ = open_sources(Data(captions=str(tmp_path / "captions.tsv"), **section))
    assert names_of(train) == [f"{number}.gif" for number in range(1, 6)]
    (tmp_path / "stills").mkdir()  # images beside the clips, whose captions count, too
    for number in range(3):
        picture(number).save(tmp_path / "stills" / f"{number}.png")
    mixed = section | {
        "captions": str(tmp_path / "captions.tsv"),
        "captioned": True,
        "images": str(tmp_path / "stills"),
    }
    with pytest.raises(ConfigError, match="'a hat' fits no caption of .*: a pattern fits a whole caption"):
        open_sources(Data(**mixed | {"leave_out": ["a hat"]}))
    for number in range(3):
        (tmp_path / "stills" / f"{number}.txt").write_text("a hat")
    with pytest.raises(ConfigError, match="captions of data.images=.* files beside them.*metadata.csv"):
        open_sources(Data(**mixed))
    for path in (tmp_path / "stills").glob("*.txt"):
        path.unlink()
    (tmp_path / "stills" / "metadata.csv").write_text("file_name,text\n0.png,a hat\n1.png,a hat\n2.png,a coat\n")
    train, _ = open_sources(Data(**mixed | {"leave_out": ["a hat", "*red*left"]}))
    assert train.left_out == (("a hat", 2), ("*red*left", 1))
    with pytest.raises(ConfigError, match="data.leave_out: no captions are listed of data.path=.*data.captions, or"):
        open_sources(Data(**section))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"leave_out": ["dark hat"]}, "'dark hat' fits no caption of .*, such as 'a dark hat': a pattern fits a whole"),
        ({"leave_out": ["*"]}, "data.leave_out fits all captions of data.path=.*: give patterns that fit fewer"),
        ({"leave_out": ["*"], "path": "builtin:fashion"}, "data.leave_out fits all captions of builtin:fashion: give"),
        ({"path": "bare"}, "data.leave_out: no captions are listed of data.path=.*bare: add captions, or leave it out"),
        (
            {"path": "builtin:emoji", "captioned": False},
            r"data.leave_out: builtin:emoji has no captions that are listed \(caches have none, .*emoji\): remove",
        ),
        (
            {"path": "builtin:emoji-pairs"},
            r"data.leave_out: builtin:emoji-pairs has no captions that are listed \(caches",
        ),
    ],
)
def test_what_cannot_be_left_out(tmp_path, changes, message):
    """Oracle: the message names the key, the fault and the remedy."""
    captioned(tmp_path / "d")
    (tmp_path / "bare").mkdir()
    for number in range(3):
        picture(number).save(tmp_path / "bare" / f"{number}.png")
    section = {"path": str(tmp_path / "d"), "leave_out": ["a dark hat"], **COMMON} | changes
    if section["path"] == "bare":
        section["path"] = str(tmp_path / "bare")
    with pytest.raises(ConfigError, match=message):
        open_sources(Data(**section))
