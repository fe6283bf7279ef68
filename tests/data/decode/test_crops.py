"""Crops of images: as published, by numbers that belong to a key."""

import math
import random

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from dstrain import rng
from dstrain.data.batches import Batches
from dstrain.data.decode.crops import Crop
from dstrain.data.decode.pixels import crop_center
from dstrain.data.open import open_sources
from dstrain.recipe import ConfigError, Data
from tests.support import pictures


def image(width, height, mode="RGB", seed=0):
    return pictures.picture(seed, width, height, mode)


def numbers(count, seed):
    return rng.uniform(torch.tensor([seed]), "crop", (count,))[0].tolist()


def reference_random(picture, size, draws, least=0.8, most=1.0):
    """ADM's random crop in its own words: a side, then rows, then columns, each uniform among whole numbers."""

    def pick(count):
        return int(draws.pop(0) * count)

    low, high = math.ceil(size / most), math.ceil(size / least)
    side = low + pick(high - low + 1)
    while min(picture.size) >= 2 * side:
        picture = picture.resize(tuple(x // 2 for x in picture.size), Image.Resampling.BOX)
    scale = side / min(picture.size)
    array = np.array(picture.resize(tuple(round(x * scale) for x in picture.size), Image.Resampling.BICUBIC))
    y = pick(array.shape[0] - size + 1)
    x = pick(array.shape[1] - size + 1)
    return array[y : y + size, x : x + size]


@pytest.mark.parametrize(
    "width, height, size", [(100, 75, 32), (75, 180, 32), (32, 32, 32), (20, 33, 32), (500, 375, 64)]
)
def test_random(width, height, size):
    """Oracle: ADM's rule, by the same draws."""
    for seed in range(6):
        draws = numbers(3, seed)
        cut = Crop("random")(image(width, height), size, size, draws)
        assert np.array_equal(cut.image, reference_random(image(width, height), size, draws))


@pytest.mark.parametrize("scale, ratio", [(None, None), ((0.75, 1.0), (1.0, 1.0)), ((0.99, 1.0), (3.0, 3.0))])
def test_random_resized(monkeypatch, scale, ratio):
    """Oracle: torchvision's RandomResizedCrop, which is given the same draws; at the last two, no try fits at times."""
    theirs = transforms.RandomResizedCrop((24, 24), scale or (0.08, 1.0), ratio or (3 / 4, 4 / 3))
    for seed in range(12):
        draws = numbers(22, seed)
        uniforms, places = iter(draws), iter(draws[20:])
        with monkeypatch.context() as patch:
            patch.setattr(
                torch.Tensor, "uniform_", lambda _, low, high: torch.tensor([low + next(uniforms) * (high - low)])
            )
            patch.setattr(torch, "randint", lambda low, high, size: torch.tensor([int(next(places) * high)]))
            truth = theirs(image(90, 60 + seed))
        assert np.array_equal(Crop("random_resized", scale, ratio)(image(90, 60 + seed), 24, 24, draws).image, truth)


def test_dalle():
    """Oracle: the rule of the paper's listing: a square of the shorter side, reduced by areas to 36 to 48 pixels for
    32, and 32 of them; a side of 64 is halved to means of 2 x 2."""
    array = np.arange(64 * 80 * 3).reshape(64, 80, 3) % 251
    cut = Crop("dalle")(Image.fromarray(array.astype(np.uint8)), 24, 24, [0.0, 0.99, 0.55, 0.99, 0.0])
    means = array[:, 16:].reshape(32, 2, 32, 2, 3).mean((1, 3))[8:, :24]
    assert np.abs(np.asarray(cut.image).astype(int) - means).max() <= 1  # Pillow rounds twice
    assert (cut.top, cut.left) == (8, 8)
    sides = {Crop("dalle")(image(100, 90), 32, 32, [0, 0, draw / 100, 0.999, 0.999]).top + 32 for draw in range(100)}
    assert sides == set(range(36, 49))
    assert Crop("dalle")(image(20, 25), 32, 32, [0.5] * 5).image.size == (32, 32)


@pytest.mark.parametrize("kind", ["random", "random_resized", "dalle"])
def test_a_crop_lies_within(kind):
    """Oracle: the corner and what is left on the right add up to the scaled whole; without numbers it is the centre."""
    for seed in range(20):
        generator = random.Random(seed)
        picture = image(generator.randint(10, 200), generator.randint(10, 200), "RGBA" if seed % 2 else "L")
        size = (32, 32) if kind == "dalle" or seed % 3 else (40, 16)
        crop = Crop(kind)
        cut = crop(picture, *size, numbers(crop.num_random_numbers, seed))
        assert cut.image.size == size and cut.image.mode == picture.mode and min(cut.top, cut.left, cut.right) >= 0
        plain = crop(picture, *size)
        assert np.array_equal(plain.image, crop_center(picture, *size))


def test_none():
    """Oracle: the image itself; a ValueError where it has another size."""
    assert np.array_equal(Crop("none")(image(32, 24), 32, 24).image, image(32, 24))
    with pytest.raises(ValueError, match="40 x 24 pixels, and data.crop=none takes 32 x 24"):
        Crop("none")(image(40, 24), 32, 24)


def test_a_crop_belongs_to_the_key(tmp_path):
    """Oracle: one rank that reads by itself; a sample's crop changes from epoch to epoch and is the same on any rank
    and worker, and after a resume."""
    source = open_sources(Data(path=str(pictures.folder(tmp_path / "data")), image_size=16, crop="random"))[0]

    def of(rank, world, **more):
        return Batches(
            source, global_batch=10, micro_batch=10 // world, seed=1, rank=rank, world=world, steps=4, **more
        )

    alone = [next(of(0, 1).read_step(step)) for step in range(4)]
    for rank in range(2):
        with of(rank, 2, num_workers=1) as batches:
            for step in (2, 3):
                part = next(batches.read_step(step))
                assert torch.equal(part["image"], alone[step]["image"][5 * rank : 5 * rank + 5])
    index = [
        source.make_sample_order(10, 1).find_sample_index(torch.arange(20) + 20 * epoch).tolist() for epoch in range(2)
    ]
    first, second = (torch.cat([batch["image"] for batch in alone[2 * epoch : 2 * epoch + 2]]) for epoch in range(2))
    flips = [
        torch.cat([rng.uniform(batch["key"], "flip") < 0.5 for batch in alone[2 * epoch : 2 * epoch + 2]])
        for epoch in range(2)
    ]
    first[flips[0]], second[flips[1]] = first[flips[0]].flip(-1), second[flips[1]].flip(-1)
    changed = [not torch.equal(first[row], second[index[1].index(index[0][row])]) for row in range(20)]
    assert sum(changed) >= 15


@pytest.mark.parametrize(
    "entries, words",
    [({"crop": "random"}, "28 x 28 pixels, which are not cropped"), ({"size_conditions": True}, "not cropped")],
)
def test_of_the_built_in_images(entries, words):
    with pytest.raises(ConfigError, match=words):
        open_sources(Data(**entries))


@pytest.mark.parametrize(
    "entries, words",
    [
        ({"crop_scale": [0.5, 1]}, "is of data.crop=random"),
        ({"crop": "random", "draft": True}, "data.draft=false"),
        ({"crop": "random", "crop_scale": [1, 0.5]}, "lower number"),
        ({"crop": "random", "crop_ratio": [1, 2]}, "resized"),
        ({"crop": "dalle", "buckets": [[32, 32]]}, "cuts squares"),
        ({"max_upscale": 2}, "data.buckets"),
        ({"buckets": [[32, 32], [32, 32]]}, "twice"),
        ({"buckets": {"pixels": 9}}, "makes no shape"),
        ({"buckets": {"pixel": 9}}, "a rule is"),
        ({"num_frames": 5, "crop": "random"}, "not of clips"),
    ],
)
def test_entries_that_do_not_fit(entries, words):
    """Oracle: an error that names the entry and the remedy."""
    with pytest.raises(ValueError, match=words):
        Data(**entries)


def test_the_rule_of_buckets():
    """Oracle: by hand, of 64 pixels in steps of 2 and sides at most twice as long as the others."""
    assert Data(buckets={"pixels": 64, "step": 2}).buckets == ((10, 6), (8, 8), (6, 10))
    assert Data(buckets={"pixels": 65536, "step": 16, "ratio": 4}).buckets[0] == (512, 128)
    for wide, high in Data(buckets={"pixels": 65536, "step": 16, "ratio": 2}).buckets:
        assert wide * high <= 65536 and wide % 16 == high % 16 == 0 and 0.5 <= wide / high <= 2
