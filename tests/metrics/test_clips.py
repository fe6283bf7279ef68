"""The closed forms of the built-in clips: where the item is, and how it moves."""

import pytest
import torch
from torch.nn import functional as F

from dstrain.data.builtin.fashion import FASHION
from dstrain.data.builtin.moving import MOTIONS, MovingFashion, map_captions_to_item_and_motion
from dstrain.metrics.clips import NO_MOTION, average_channels, classify_motions, crop_around_items


def clips(source: MovingFashion, step: int) -> tuple[torch.Tensor, list[str]]:
    """Every `step`-th clip and its caption."""
    numbers = range(0, len(source), step)
    return torch.stack([source[number]["video"] for number in numbers]), [
        source.compose_caption(number) for number in numbers
    ]


@pytest.mark.parametrize(
    "frames, height, width, channels, split",
    [(9, 24, 24, 1, "train"), (5, 24, 24, 3, "held_out"), (9, 24, 32, 1, "train"), (17, 40, 32, 1, "held_out")],
)
def test_motions_of_true_clips(frames, height, width, channels, split):
    """Oracle: the captions of the clips, which say how they were made, bouncing included; all are right."""
    source = MovingFashion(frames, height, width, channels, split)
    videos, texts = clips(source, len(source) // 200)
    assert classify_motions(average_channels(videos)).tolist() == [
        map_captions_to_item_and_motion()[text][1] for text in texts
    ]


def test_captions_are_those_of_the_clips():
    """Oracle: the source's own captions and labels: every one is known, with its item."""
    source = MovingFashion(2, 8, 8, 1, "held_out")
    assert {source.compose_caption(number) for number in range(len(source))} == set(map_captions_to_item_and_motion())
    for number in range(0, len(source), 97):
        item, motion = map_captions_to_item_and_motion()[source.compose_caption(number)]
        assert item == source[number]["label"] and source.compose_caption(number).endswith(
            f"{FASHION[item]} {list(MOTIONS)[motion]}"
        )


def test_what_does_not_move():
    """Oracle: no motion by definition: black clips, still ones, and noise around one place; a shift of half is one."""
    video = torch.zeros(4, 6, 24, 24)
    video[1:, :, 8:16, 8:16] = 1
    video[2] += 0.02 * torch.rand(6, 24, 24, generator=torch.Generator().manual_seed(0))
    video[3] = torch.stack([torch.roll(video[1, 0], shift, 1) for shift in range(6)])
    assert classify_motions(video).tolist() == [NO_MOTION] * 3 + [list(MOTIONS).index("moving right")]


@pytest.mark.parametrize("height, width", [(48, 48), (42, 60)])
def test_items_are_cut_out(height, width):
    """Oracle: a square of known place, cut out by hand: the item's inner 28/32, found wherever it lies."""
    side = 2 * min(height, width) // 3  # 32 and 28
    item = torch.zeros(side, side)
    item[4:-4, 2:-2] = torch.rand(side - 8, side - 4, generator=torch.Generator().manual_seed(1)) / 2 + 0.5
    frames = torch.zeros(3, height, width)
    places = [(0, 0), (5, 3), (height - side, width - side)]
    for frame, (top, left) in zip(frames, places):
        frame[top : top + side, left : left + side] = item
    border = side / 16
    inner = F.grid_sample(
        item[None, None],
        torch.stack(
            torch.meshgrid(
                *[(2 * (border + (torch.arange(28) + 0.5) * (side - 2 * border) / 28) / side - 1)] * 2, indexing="ij"
            )[::-1],
            -1,
        )[None],
        align_corners=False,
    )[0]
    found = crop_around_items(frames)
    assert found.shape == (3, 1, 28, 28)
    assert (found - inner).abs().mean() < 0.05  # edges of brightness are not quite the square's
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=0)  # and the place does not matter
    torch.testing.assert_close(found[0], found[2], atol=1e-4, rtol=0)
