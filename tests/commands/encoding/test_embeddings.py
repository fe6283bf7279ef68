"""launch/encode.py for a prior: pairs from folders and tar shards, the same bytes on any number of ranks, resumed."""

import hashlib
import io
import json
import pickle
import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from dstrain.commands.encoding import embeddings
from dstrain.commands.options.encode import EncodeOptions
from dstrain.data.cached.embeddings import open_pairs
from dstrain.data.sources.captioned import open_captioned_source
from dstrain.encoders.image import ImageEncoder
from dstrain.encoders.text import TextEncoder, unpack_captions
from dstrain.recipe import ConfigError
from tests.support import gloo, towers
from tests.support.launch import launch
from tests.support.pictures import break_file, picture

COUNT = 11


def caption(number: int) -> str:
    return f"the {towers.WORDS[1 + number % 3]} {towers.WORDS[4 + number % 3]}"


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    towers.clip(folder)
    return str(folder)


def pairs(root: Path) -> Path:
    """Eleven pairs in two folders, and a picture without a caption."""
    for number in range(COUNT):
        stem = root / f"part{number % 2}" / f"{number:03}"
        stem.parent.mkdir(parents=True, exist_ok=True)
        picture(number, 24, 20).save(stem.with_suffix(".png"))
        stem.with_suffix(".txt").write_text(caption(number) + "\n")
    picture(99).save(root / "alone.png")
    return root


def tars(root: Path, source: Path) -> Path:
    """The same pairs as two tar shards, among members that must not be read."""
    root.mkdir()
    for part in (0, 1):
        with tarfile.open(root / f"{part:05}.tar", "w") as archive:
            for file in sorted((source / f"part{part}").iterdir()):
                archive.add(file, f"part{part}/{file.name}")
            for name in ("../../escape.png", "/tmp/escape.txt"):
                info = tarfile.TarInfo(name)
                info.size = 4
                archive.addfile(info, io.BytesIO(b"evil"))
            link = tarfile.TarInfo(f"part{part}/link.png")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(link)
            archive.addfile(tarfile.TarInfo(f"part{part}/link.txt"))
    return root


def options(out: Path, data: Path, tower: str, **changes) -> EncodeOptions:
    return EncodeOptions(out, data=str(data), image_encoder=tower, text_encoder=tower, batch=3, shard_size=4, **changes)


def files(out: Path) -> dict[str, str]:
    return {
        str(path.relative_to(out)): hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def _embed(rank: int, wanted: EncodeOptions) -> int:
    return embeddings.embed_image_caption_pairs(wanted)["pairs"]


def test_pairs_of_a_folder(tmp_path, tower):
    """Oracle: the encoders themselves, one pair at a time; the layout is read back by data/cached/embeddings.py."""
    data = pairs(tmp_path / "data")
    plan = embeddings.embed_image_caption_pairs(
        options(tmp_path / "out", data, tower, dtype="float32", text_encodings=True)
    )
    assert (plan["pairs"], plan["complete"], plan["without_caption"]) == (COUNT, True, 1)
    source, made = open_captioned_source(data, 16), open_pairs(tmp_path / "out", (1.0, 0.0, 0.0), "train")
    image, text = ImageEncoder(tower), TextEncoder(tower)
    for place, row in enumerate(made.rows.tolist()):
        item, found = source[row], made[place]
        texts = text.encode(unpack_captions(item["caption"][None]))
        torch.testing.assert_close(found["image_embed"], image.encode(item["image"][None])[0], rtol=1e-4, atol=1e-5)
        for name in ("text_embed", "text_encodings", "text_mask"):
            torch.testing.assert_close(found[name], texts[name][0], rtol=1e-4, atol=1e-5)
    for name in ("text_emb", "text_encodings", "text_mask"):
        shutil.rmtree(tmp_path / "out" / name)
    captions = open_pairs(tmp_path / "out", (1.0, 0.0, 0.0), "train")
    for place, row in enumerate(captions.rows.tolist()):
        assert unpack_captions(captions[place]["caption"][None]) == unpack_captions(source[row]["caption"][None])


def test_tar_shards(tmp_path, tower):
    """Oracle: the folder that the shards were packed from; strangers and links change nothing."""
    data = pairs(tmp_path / "data")
    (data / "alone.png").unlink()
    source, plain = open_captioned_source(tars(tmp_path / "tars", data), 16), open_captioned_source(data, 16)
    assert len(source) == len(plain) == COUNT and source.num_uncaptioned == 2
    by_name = {plain.name_sample(i): plain[i] for i in range(COUNT)}
    for i in range(COUNT):
        key = source.name_sample(i).split("/", 1)[1]
        expected = by_name[f"{key}.png"]
        assert all(torch.equal(source[i][name], expected[name]) for name in ("image", "caption"))
    plan = embeddings.embed_image_caption_pairs(options(tmp_path / "out", tmp_path / "tars", tower))
    assert plan["pairs"] == COUNT and not Path("/tmp/escape.txt").exists()
    with open(tmp_path / "tars" / "00001.tar", "r+b") as file:
        file.truncate(2000)
    with pytest.raises(ValueError, match="00001.tar is no readable tar file"):
        open_captioned_source(tmp_path / "tars", 16)


def test_the_same_bytes_on_any_number_of_ranks(tmp_path, tower):
    """Oracle: the bytes that one process writes, by two and three ranks and after a loss of files."""
    data = pairs(tmp_path / "data")
    one = tmp_path / "one"
    embeddings.embed_image_caption_pairs(options(one, data, tower))
    expected = files(one)
    for world in (2, 3):
        out = tmp_path / f"ranks{world}"
        assert gloo.run(tmp_path, _embed, options(out, data, tower), world=world) == [COUNT] * world
        assert files(out) == expected
    again = tmp_path / "ranks2"
    before = {path: path.stat().st_mtime_ns for path in again.rglob("*_00000.*")}
    (again / "done" / "shard_00002.json").unlink()
    (again / "text_emb" / "text_emb_00001.npy").write_bytes(b"flipped")
    (again / "img_emb" / "img_emb_00001.npy.tmp").write_bytes(b"half a file")
    embeddings.embed_image_caption_pairs(options(again, data, tower))
    assert files(again) == expected
    assert before == {path: path.stat().st_mtime_ns for path in again.rglob("*_00000.*")}


def test_unfinished_and_other_embeddings_are_refused(tmp_path, tower):
    """Oracle: a ValueError that says what to do; nothing is overwritten."""
    data, out = pairs(tmp_path / "data"), tmp_path / "out"
    embeddings.embed_image_caption_pairs(options(out, data, tower))
    plan = json.loads((out / "pairs.json").read_text())
    (out / "pairs.json").write_text(json.dumps(plan | {"complete": False}))
    with pytest.raises(ValueError, match="not embedded to the end"):
        open_pairs(out, (1.0, 0.0, 0.0), "train")
    other = tmp_path / "other"
    towers.clip(other, seed=1)
    for changes, words in (
        ({"dtype": "float32"}, "dtype float16 there, float32 here"),
        ({"text_encodings": True}, "text_encodings"),
    ):
        with pytest.raises(ConfigError, match=words):
            embeddings.embed_image_caption_pairs(options(out, data, tower, **changes))
    with pytest.raises(ConfigError, match="image_encoder .* there"):
        embeddings.embed_image_caption_pairs(options(out, data, str(other)))
    with pytest.raises(ConfigError, match="and no pairs.json"):
        embeddings.embed_image_caption_pairs(options(data, data, tower))
    with pytest.raises(ValueError, match="no image with a caption"):
        embeddings.embed_image_caption_pairs(options(tmp_path / "new", other, tower))


def test_other_pairs_of_the_same_names(tmp_path, tower):
    """Oracle: the bytes of the first time, kept for a copied folder and what an earlier version wrote down alone."""
    data, out = pairs(tmp_path / "data"), tmp_path / "out"
    embeddings.embed_image_caption_pairs(options(out, data, tower))
    shutil.copytree(data, tmp_path / "copy", copy_function=shutil.copyfile)
    plan = json.loads((out / "pairs.json").read_text())
    earlier = plan | {"data": plan["data"].split(" bytes=")[0]}
    assert earlier != plan
    (out / "pairs.json").write_text(json.dumps(earlier))
    embeddings.embed_image_caption_pairs(options(out, tmp_path / "copy", tower))
    assert json.loads((out / "pairs.json").read_text()) == plan
    before = files(out)
    (data / "part0" / "002.txt").write_text("another text")
    picture(3, 40, 40).save(tmp_path / "copy" / "part1" / "003.png")
    for changed in (data, tmp_path / "copy"):
        with pytest.raises(ConfigError, match="holds other embeddings: data captioned n=11 .* there, captioned n=11 "):
            embeddings.embed_image_caption_pairs(options(out, changed, tower))
    assert files(out) == before
    said = []
    for text in ("the cat", "the dog"):  # tar members of the same sizes and places
        (data / "part0" / "002.txt").write_text(text)
        source = open_captioned_source(tars(tmp_path / text, data), 16)
        assert len(pickle.loads(pickle.dumps(source))) == COUNT
        said.append(source.compute_fingerprint())
    assert said[0] != said[1] and said[0].split(" contents=")[0] == said[1].split(" contents=")[0]


def test_unreadable_pairs(tmp_path, tower):
    """Oracle: the next pair in its place up to the bound, then a ConfigError with the numbers."""
    data = pairs(tmp_path / "data")
    break_file(data / "part0" / "004.png", "truncated")
    (data / "part1" / "003.txt").write_text("  ")
    with pytest.raises(ConfigError, match="2 of 11 pairs cannot be read"):
        embeddings.embed_image_caption_pairs(options(tmp_path / "strict", data, tower))
    out = tmp_path / "out"
    assert embeddings.embed_image_caption_pairs(options(out, data, tower, max_bad_fraction=0.2))["unreadable"] == 2
    before = files(out)
    assert (
        embeddings.embed_image_caption_pairs(options(out, data, tower, max_bad_fraction=0.2))["unreadable"] == 2
    )  # nothing is made anew
    assert files(out) == before
    named = {name for note in (out / "done").iterdir() for name, _ in json.loads(note.read_text())["unreadable"]}
    assert named == {"part0/004.png", "part1/003.png"}
    source, made = open_captioned_source(data, 16), open_pairs(out, (1.0, 0.0, 0.0), "train").stored
    names = [source.name_sample(i) for i in range(COUNT)]
    bad = names.index("part0/004.png")
    assert torch.equal(made.read_row(bad)["image_embed"], made.read_row(bad + 1)["image_embed"])
    with pytest.raises(ConfigError, match="2 of 11 pairs cannot be read"):  # also of shards that are there
        embeddings.embed_image_caption_pairs(options(out, data, tower))


@pytest.mark.slow
def test_the_command(tmp_path, tower):
    """Oracle: the bytes of a call in this process, by the real launcher on 2 ranks; wrong words end with a message."""
    data = pairs(tmp_path / "data")
    embeddings.embed_image_caption_pairs(options(tmp_path / "one", data, tower))
    words = ("--image-encoder", tower, "--text-encoder", tower, "--data", data, "--batch", "3", "--shard-size", "4")
    said = launch("launch/encode.py", *words, "--out", tmp_path / "two").stdout
    assert "11 pairs in" in said and files(tmp_path / "two") == files(tmp_path / "one")
    for wrong, message in (
        (words[:2], "--out"),
        (("--text-encoder", tower, "--data", data, "--out", "x"), "both towers"),
        ((*words, "--out", "x", "--no-flip"), "flip: not for embedding pairs"),
    ):
        done = launch("launch/encode.py", *wrong, num=1, check=False)
        assert done.returncode != 0 and message in done.stdout and "Traceback" not in done.stdout
