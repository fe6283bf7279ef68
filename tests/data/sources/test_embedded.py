"""Images with their embeddings: the built-in emoji, and folders that launch/encode.py --image-encoder has embedded."""

import json
import shutil

import numpy as np
import pytest
import torch

from dstrain.commands.encoding import embeddings as caches
from dstrain.commands.options.encode import EncodeOptions
from dstrain.data.builtin.emoji import EMOJI, Emoji
from dstrain.data.cached.embeddings import BUILTIN, open_builtin_pairs, open_pairs
from dstrain.data.open import fill_in_codes_entry, open_sources
from dstrain.encoders.image import ImageEncoder
from dstrain.recipe import ConfigError, Data
from tests.support import towers
from tests.support.pictures import picture


def test_builtin_emoji():
    """Oracle: the pairs: what a prior trains on is what the decoder trains on, each picture with its own embedding."""
    train, unseen = open_sources(fill_in_codes_entry(Data(path=EMOJI, embeddings=BUILTIN)))
    pairs = open_pairs(BUILTIN, (0.8, 0.1, 0.1), "train")
    assert train.whole.rows.tolist() == pairs.rows.tolist() and (len(train), len(unseen)) == (1528, 382)
    assert not {*train.whole.rows.tolist()} & {*unseen.whole.rows.tolist()}
    for index in (0, 77, 381):
        item = unseen[index]
        assert torch.equal(
            item["image_embed"],
            torch.from_numpy(open_builtin_pairs().tables["image_embed"][unseen.whole.find_row_of_sample(index)]),
        )
        assert item["image"].shape == (3, 32, 32) and item["image"].dtype == torch.uint8
    assert train.compute_fingerprint() != unseen.compute_fingerprint() and BUILTIN not in Emoji().compute_fingerprint()
    batch, bad = train.read_batch(torch.tensor([3, 5]), mirrored=torch.tensor([True, False]))
    assert not bad and torch.equal(batch["image"][0], train[3]["image"].flip(-1))
    assert torch.equal(batch["image_embed"][0], train[3]["image_embed"])
    grey = Emoji(16, 1, "all")
    assert len(grey) == 1910 and grey[0]["image"].shape == (1, 16, 16)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of eleven captioned pictures and one without, and its pairs by a tiny CLIP."""
    root = tmp_path_factory.mktemp("embedded")
    for number in range(11):
        stem = root / "data" / "ab"[number % 2] / f"{number:03}"
        stem.parent.mkdir(parents=True, exist_ok=True)
        picture(number, 24, 20).save(stem.with_suffix(".png"))
        stem.with_suffix(".txt").write_text(f"the {towers.WORDS[number % 9]}\n")
    picture(99).save(root / "data" / "a" / "alone.png")
    towers.clip(root / "clip")
    tower = str(root / "clip")
    caches.embed_image_caption_pairs(
        EncodeOptions(
            root / "pairs",
            data=str(root / "data"),
            image_encoder=tower,
            text_encoder=tower,
            batch=3,
            shard_size=4,
            dtype="float32",
        )
    )
    return root


def data_of(root, **changes) -> Data:
    return Data(
        **{
            "path": str(root / "data"),
            "embeddings": str(root / "pairs"),
            "image_size": 16,
            "held_out": 0.3,
            "workers": 0,
        }
        | changes
    )


def test_a_folder(made):
    """Oracle: the encoder itself on each picture, in both splits; the picture without a caption is left out."""
    train, unseen = open_sources(fill_in_codes_entry(data_of(made)))
    assert len(train) + len(unseen) == 11 and len(unseen) == 2
    encoder = ImageEncoder(str(made / "clip"))
    for source in (train, unseen):
        for item in (source[i] for i in range(len(source))):
            assert set(item) == {"image", "label", "image_embed"}
            expected = encoder.encode(item["image"][None])[0]
            torch.testing.assert_close(item["image_embed"], expected, rtol=1e-4, atol=1e-5)
    assert (
        "embeddings of width 12" in train.describe_samples()
        and len({train.name_sample(i) for i in range(len(train))}) == 9
    )


def test_other_images_are_refused(made, tmp_path):
    """Oracle: a ConfigError that names data.embeddings and the remedy."""
    shutil.copytree(made / "data", tmp_path / "data")
    (tmp_path / "data" / "a" / "000.png").rename(tmp_path / "data" / "a" / "0.png")
    (tmp_path / "data" / "a" / "000.txt").rename(tmp_path / "data" / "a" / "0.txt")
    for folder in ("other", "half"):
        shutil.copytree(made / "pairs", tmp_path / folder)
    (tmp_path / "other" / "pairs.json").unlink()
    plan = json.loads((tmp_path / "half" / "pairs.json").read_text())
    (tmp_path / "half" / "pairs.json").write_text(json.dumps(plan | {"complete": False}))
    np.save(tmp_path / "no.npy", np.zeros(3))
    for changes, message in (
        ({"path": str(tmp_path / "data")}, "data.embeddings=.*pairs is not of these images: .*or of other names"),
        ({"path": EMOJI, "held_out": 0}, "is not of these images: builtin:emoji-pairs goes with"),
        ({"embeddings": BUILTIN}, "is not of these images: builtin:emoji-pairs goes with"),
        ({"embeddings": str(tmp_path / "other")}, "does not say of which images it is"),
        ({"embeddings": str(tmp_path / "half")}, "data.embeddings=.*half is not embedded to the end"),
        ({"embeddings": str(tmp_path)}, "data.embeddings=.* holds no embedding pairs"),
        ({"path": str(made / "pairs"), "held_out": 0}, "goes with images, and .* holds others"),
        ({"buckets": [[16, 16]]}, "one source of squares"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_sources(fill_in_codes_entry(data_of(made, **changes)))
