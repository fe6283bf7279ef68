"""The built-in clips: what moves, where to, and what the captions say of it."""

import collections

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dstrain.data.batches import Batches
from dstrain.data.builtin.fashion import Fashion
from dstrain.data.builtin.moving import MOTIONS, MovingFashion
from dstrain.data.open import open_sources
from dstrain.encoders.text import unpack_captions
from dstrain.recipe import ConfigError, Data

DIRECTIONS = {"moving left": (-1, 0), "moving right": (1, 0), "moving up": (0, -1), "moving down": (0, 1)}


def centre(video: torch.Tensor) -> torch.Tensor:
    """The centre of mass of each frame, (x, y) in pixels: (T, C, H, W) -> float64 (T, 2)."""
    mass = video.double().sum(1)  # (T, H, W)
    y, x = (torch.arange(size, dtype=torch.float64) for size in mass.shape[1:])
    total = mass.sum((1, 2))
    return torch.stack(((mass.sum(1) * x).sum(1) / total, (mass.sum(2) * y).sum(1) / total), dim=1)


@settings(max_examples=60, deadline=None)
@given(
    index=st.integers(0, 9999),
    num_frames=st.sampled_from([2, 5, 17]),
    height=st.sampled_from([32, 48]),
    width=st.sampled_from([32, 40, 64]),
)
def test_it_moves_where_the_caption_says(index, num_frames, height, width):
    """Oracle: the centre of mass: monotonic in the caption's direction and far, still across; a bouncing one turns."""
    source = MovingFashion(num_frames, height, width)
    item = source[index]
    assert item["video"].shape == (num_frames, 1, height, width) and item["frames"] == num_frames
    caption = unpack_captions(item["caption"][None])[0]
    step = centre(item["video"]).diff(dim=0)  # (T - 1, 2)
    way = torch.tensor([width, height]) - 2 * min(width, height) // 3
    for words, direction in DIRECTIONS.items():
        if caption.endswith(words):
            along = direction.index(next(part for part in direction if part))
            forward = step[:, along] * direction[along]
            assert (forward > 0).all() and 0.55 * way[along] < forward.sum() < 1.05 * way[along]
            assert step[:, 1 - along].abs().max() < 0.1
            break
    else:
        assert caption.endswith(" bouncing")
        if num_frames == 17:
            moved = step.abs().sum(0)
            assert (moved > 0.8 * way.min()).all()
            assert ((step > 0).any(0) & (step < 0).any(0))[way.argmax()]  # turns at a border


def test_every_item_in_every_motion_once():
    """Oracle: counting, and the items of the built-in images; captions with their articles."""
    source = MovingFashion(2)
    captions = [source.compose_caption(index) for index in range(len(source))]
    assert len(source) == 10_000 and len(MovingFashion(2, split="held_out")) == 2_500
    counts = collections.Counter(captions)
    assert len(counts) == 50 and set(counts.values()) == {200}
    for caption in ("a sneaker moving left", "an ankle boot moving up", "a bag bouncing", "a trouser moving right"):
        assert caption in counts
    assert len({source._find_item_and_motion(index) for index in range(10_000)}) == 10_000
    for index in range(0, 10_000, 997):
        item = source[index]
        assert source.classes[item["label"]] in source.compose_caption(index)
        assert item["label"] == source.items.labels[source._find_item_and_motion(index)[0]]
    first = [source.compose_caption(index).split(" ", 1)[1] for index in range(50)]
    assert len({words.split(" ")[-1] for words in first}) == len(MOTIONS) and len(set(first)) > 25  # a part is varied


def test_an_item_that_rests_on_a_pixel_is_itself():
    """Oracle: the built-in image at two thirds of the size, found in the canvas; black around it; grey as RGB."""
    source = MovingFashion(5, 24, 24, 3)
    image = Fashion(16, 1)[0]["image"][0]
    for index in range(200):
        item, (x, y) = source[index], source._compute_item_positions(index)
        assert torch.equal(item["video"][:, 0], item["video"][:, 2])
        for frame, left, top in zip(item["video"][:, 0], x.tolist(), y.tolist()):
            assert 0 <= left <= 8 and 0 <= top <= 8
            outside = frame.clone()
            outside[int(top) : int(top) + 17, int(left) : int(left) + 17] = 0
            assert not outside.any()
    from dstrain.data.builtin.moving import _draw_moving_item

    placed = _draw_moving_item(image, torch.tensor([3.0, 3.5]), torch.tensor([7.0, 16.0]), 32, 32)
    assert torch.equal(placed[0, 7:23, 3:19], image) and placed[0].sum() == image.sum()
    between = (image[:, 1:].float() + image[:, :-1]) / 2
    assert (placed[1, 16:, 4:19].float() - between).abs().max() <= 0.5  # halfway


def test_a_function_of_the_index():
    """Oracle: another object, the other split and another index: equal where they should be, else different."""
    one, two, unseen = MovingFashion(5), MovingFashion(5), MovingFashion(5, split="held_out")
    for index in (0, 7, 2_499):
        assert torch.equal(one[index]["video"], two[index]["video"])
        assert not torch.equal(one[index]["video"], unseen[index]["video"])
    assert one.compute_fingerprint() == two.compute_fingerprint() != unseen.compute_fingerprint()
    assert not torch.equal(one[0]["video"], one[1]["video"])
    with pytest.raises(IndexError):
        one[10_000]
    still = MovingFashion(1)[3]
    assert still["video"].shape == (1, 1, 32, 32) and still["video"].any()


def test_batches_of_the_recipe():
    """Oracle: plain indexing in the order of the labels that come back."""
    data = Data(path="builtin:moving-fashion", num_frames=5, channels=1, flip=False, height=48)
    train, unseen = open_sources(data)
    assert len(unseen) == 2_500
    with Batches(train, global_batch=8, micro_batch=8, seed=0, flip=data.flip) as batches:
        batch = next(batches.read_step(3))
    index = batches._stream.order.find_sample_index(torch.arange(24, 32))
    assert batch["video"].shape == (8, 5, 1, 48, 32) and batch["frames"].tolist() == [5] * 8
    samples = [train[i] for i in index.tolist()]
    assert torch.equal(batch["video"], torch.stack([sample["video"] for sample in samples]))
    texts = [bytes(row.numpy()).rstrip(b"\0") for row in batch["caption"]]
    assert texts == [bytes(sample["caption"].numpy()).rstrip(b"\0") for sample in samples]


@pytest.mark.parametrize("sides, named", [((7, 32), "data.height=7"), ((32, 6), "data.image_size=6")])
def test_small_items_are_refused(sides, named):
    """Oracle: a ConfigError that names the key of the shorter side, of which items take two thirds."""
    with pytest.raises(ConfigError, match=f"{named} leaves items of {2 * min(sides) // 3} pixels"):
        MovingFashion(9, *sides)
