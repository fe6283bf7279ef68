"""Captions of any length: the same text in training, in caches, in encoding and as prompts; what is cut is said."""

from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from dstrain import systems
from dstrain.commands.encode import encode_data
from dstrain.commands.options.encode import EncodeOptions
from dstrain.data.cached import shards
from dstrain.data.cached.latents import Latents
from dstrain.data.decode.clips import Cut
from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.formats.base import Request
from dstrain.data.mixture import Mixture
from dstrain.data.source import Source, describe_truncated_captions, read_evenly_spaced_captions
from dstrain.data.sources.images import open_images
from dstrain.data.sources.videos import open_videos
from dstrain.data.views import Shuffled, Spread
from dstrain.disk.sealed import render_json_with_hash
from dstrain.encoders.text import TextEncoder, unpack_captions
from tests.support import first_stage, towers
from tests.support.pictures import picture
from tests.systems.phenaki.test_phenaki_system import TINY

TEXTS = ["a", "\u732b" * 240, "x" * 511, "x" * 512, "x" * 513, "long " * 4000 + "END", "\u00e9" * 300, "b"]


def folder(root: Path, texts: list[str]) -> Path:
    root.mkdir(parents=True)
    for number, text in enumerate(texts):
        picture(number).save(root / f"{number}.png")
        (root / f"{number}.txt").write_text(text, encoding="utf-8")
    return root


def open_texts(root: Path) -> Source:
    return open_images(root, 16, split="all", request=Request(SUFFIXES, captions=True))


def test_captions_are_whole(tmp_path):
    """Oracle: the texts in the files, in items, batches, views and mixtures; a batch is as wide as its longest."""
    source = open_texts(folder(tmp_path / "a", TEXTS))
    assert [unpack_captions(source[n]["caption"][None])[0] for n in range(8)] == TEXTS
    batch, _ = source.read_batch(torch.arange(8))
    assert unpack_captions(batch["caption"]) == TEXTS and batch["caption"].shape == (8, 20003)
    assert source.read_batch(torch.tensor([7, 0]))[0]["caption"].shape == (2, 1)
    other = open_texts(folder(tmp_path / "b", ["y" * 700]))
    mixed = Mixture([source, other], ["a", "b"], None, ())
    assert unpack_captions(mixed.read_batch(torch.tensor([8, 0, 1]))[0]["caption"]) == ["y" * 700, *TEXTS[:2]]
    assert read_evenly_spaced_captions(mixed) == [*TEXTS, "y" * 700]
    assert read_evenly_spaced_captions(Spread(source, 2)) == [TEXTS[0], TEXTS[4]]
    assert sorted(read_evenly_spaced_captions(Shuffled(source, 0))) == sorted(TEXTS)
    assert len(read_evenly_spaced_captions(source, 3)) == 3


@pytest.mark.parametrize("several", [1, 2])
def test_captions_of_a_cache(tmp_path, several):
    """Oracle: the texts in the files, through shards with and without long ones, of 3 samples each. A cache of an older
    version is read, and says that captions were cut; the same command makes those shards anew.
    """
    root = folder(tmp_path / "data", TEXTS)
    options = EncodeOptions(
        out=tmp_path / "codes",
        first_stage=str(first_stage.save(tmp_path / "vae")),
        data=str(root),
        image_size=16,
        shard_size=3,
        batch=2,
        num_captions=several,
    )
    index = encode_data(options)
    cache = Latents(options.out)
    assert unpack_captions(cache.read_codes(torch.arange(8))["caption"]) == TEXTS
    assert [unpack_captions(cache[n]["caption"][None])[0] for n in (5, 0, 7)] == [TEXTS[5], "a", "b"]
    assert cache.wide == {0: 720, 1: 20003, 2: 600} and "cut" not in cache.describe_samples()
    assert read_evenly_spaced_captions(cache) == TEXTS
    new = {path.name: path.read_bytes() for path in options.out.glob("*.*s*")}

    records = []
    for path in sorted(options.out.glob("shard_*")):  # as before captions were stored whole
        facts = shards.read_unverified_metadata(path)
        arrays = load_file(path)
        arrays["caption"] = arrays["caption"][..., :512]
        old = {name: facts[name] for name in ("encoding", "number", "sums", "bad")}
        path.write_bytes(shards.pack_shard(arrays, old))
        records.append(shards.make_shard_record(path, shards.verify_and_parse_metadata(path.read_bytes())))
    body = shards.make_index_body(index["encoding"], index["classes"], records, index["versions"])
    (options.out / "index.json").write_bytes(
        render_json_with_hash({k: v for k, v in body.items() if k != "whole_captions"})
    )
    cache = Latents(options.out)
    assert "captions beyond 512 bytes were cut by the dstrain that encoded them" in cache.describe_samples()
    assert read_evenly_spaced_captions(cache) == [text.encode()[:512].decode(errors="replace") for text in TEXTS]
    encode_data(options)
    assert {path.name: path.read_bytes() for path in options.out.glob("*.*s*")} == new


@pytest.mark.parametrize("words", [4, 64])
def test_training_and_encoding_say_what_is_cut(tmp_path, words):
    """Oracle: the numbers of words in the texts and of those that the model reads."""
    texts = ["one two three four", "one two three four five", "a " * 70]
    clips = tmp_path / "clips"
    clips.mkdir()
    for number, text in enumerate(texts):
        picture(number).convert("L").resize((32, 32)).save(clips / f"{number}.gif")
        (clips / f"{number}.txt").write_text(text)
    system = systems.build("phenaki", TINY | {"max_text_len": words})
    source = open_videos(clips, Cut(1, 32, 32))
    (line,) = describe_truncated_captions(source, system)
    assert line.startswith(f"captions: {2 if words == 4 else 1} of 3 are cut: {words} words of a text are read")
    assert describe_truncated_captions(source, systems.build("phenaki", TINY | {"max_text_len": 70})) == []
    towers.sentences(tmp_path / "text")
    (line,) = describe_truncated_captions(source, TextEncoder(str(tmp_path / "text"), 8))
    assert line.startswith("captions: 1 of 3 are cut: 8 tokens of a text are read, and they have up to 72")
