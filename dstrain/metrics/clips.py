"""Reads the built-in clips without a network: where the item is, and which of the five motions it makes.

The clips (data/builtin/moving.py) show one bright item on black, whose side is two thirds of the canvas's shorter one.

A story is a long clip of S scenes. Two questions are asked of it: whether it keeps its item from scene to scene, and
whether it moves as each scene says. A scene's frames are those that it drew, without those that it goes on from.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dstrain import rng
from dstrain.data.builtin.moving import MOTIONS, list_captions
from dstrain.metrics.network import Features

SCENES = 4
NO_MOTION = -1
_LEAST = 0.2  # of the free length: a displacement below it is no motion
_BOTH = 0.5  # of the longer axis's path: with one as long on the shorter axis, the item bounces
_EDGE = 0.01  # of the brightness lies beyond either edge of an item


def average_colours(videos: Tensor) -> Tensor:
    """Averages the colours of uint8 (N, T, C, H, W): float32 (N, T, H, W) in [0, 1]."""
    return videos.float().mean(2) / 255


def cut_items(frames: Tensor, side: int = 28) -> Tensor:
    """Cuts the item out of each frame float32 (N, H, W), as the built-in classifier takes it: float32 (N, 1, side,
    side).

    The item's square is as wide as the clips are made, and lies around the middle between its edges. Its inner 28/32
    are taken, the rest being the border that the data have at any size but 28.
    """
    height, width = frames.shape[-2:]
    shown = 2 * min(height, width) // 3 * 28 / 32  # pixels
    steps = (torch.arange(side, device=frames.device) + 0.5) / side - 0.5  # (side,)
    axes = [
        2 * (_find_middle(frames.sum(dim))[:, None] + shown * steps) / length - 1
        for dim, length in ((1, width), (2, height))
    ]  # x and y: (N, side) each
    grid = torch.stack((axes[0][:, None, :].expand(-1, side, -1), axes[1][:, :, None].expand(-1, -1, side)), -1)
    return F.grid_sample(frames[:, None], grid, mode="bilinear", align_corners=False)


def find_motions(videos: Tensor) -> Tensor:
    """Finds the motion of clips float32 (N, T, H, W), T >= 2: its index in MOTIONS, or NO_MOTION if the item hardly
    moves or a frame is black, int64 (N,).

    The centre of brightness stands for the item. An item bounces if its paths along both axes are of similar length;
    else it moves along the axis of the larger displacement. All true clips of five frames or more on a square are
    right; an oblong canvas needs more frames, since a fast item turns between two of them.
    """
    height, width = videos.shape[-2:]
    free = min(height, width) - 2 * min(height, width) // 3
    places = torch.stack([_find_centre(videos.sum(2)), _find_centre(videos.sum(3))], -1)  # (N, T, 2): x, y in pixels
    paths = places.diff(dim=1).abs().sum(1)  # (N, 2)
    net = places[:, -1] - places[:, 0]
    axis = net.abs().argmax(1)  # (N,)
    ahead = net.gather(1, axis[:, None])[:, 0] > 0
    left, right, up, down, bouncing = range(len(MOTIONS))
    straight = torch.where(axis == 0, torch.where(ahead, right, left), torch.where(ahead, down, up))
    result = torch.where(paths.amin(1) >= _BOTH * paths.amax(1), bouncing, straight)
    still = torch.where(result == bouncing, paths.amax(1), net.abs().amax(1)) < _LEAST * free
    return torch.where(still | ~places.isfinite().all(2).all(1), NO_MOTION, result)


def _find_centre(profile: Tensor) -> Tensor:
    """Returns the centre of brightness along the last axis, in pixels; NaN if all values are 0."""
    return (profile * (torch.arange(profile.shape[-1], device=profile.device) + 0.5)).sum(-1) / profile.sum(-1)


def _find_middle(profile: Tensor) -> Tensor:
    """Returns the middle between the edges of the item, in pixels (N,), from brightness (N, L) along one axis; L / 2 if
    all values are 0.
    """
    share = profile.cumsum(1) / profile.sum(1, keepdim=True)  # up to the right edge of a pixel
    share = torch.where(share.isfinite(), share, torch.linspace(0, 1, profile.shape[1], device=profile.device))
    before = torch.cat((torch.zeros_like(share[:, :1]), share[:, :-1]), 1)
    edges = []
    for level in (_EDGE, 1 - _EDGE):
        pixel = (share < level).sum(1, keepdim=True).clamp(max=profile.shape[1] - 1)  # that the level lies in
        low, high = before.gather(1, pixel), share.gather(1, pixel)
        edges.append((pixel + (level - low) / (high - low).clamp(min=1e-6))[:, 0])
    return (edges[0] + edges[1]) / 2


def make_stories(seeds: Tensor) -> tuple[Tensor, Tensor]:
    """Makes one story for each seed, int64 (N,). Returns their items (N,), which go through all items in turn, and the
    motions of their scenes (N, SCENES), of which no two in a story are equal; int64 both.
    """
    items = seeds % (len(list_captions()) // len(MOTIONS))
    return items, rng.uniform(rng.keys_of_seeds(seeds), "motions", (len(MOTIONS),)).argsort(1)[:, :SCENES]


def sum_scenes(network: Features, videos: Tensor, ends: list[int], items: Tensor, asked: Tensor) -> Tensor:
    """Returns, for each of S scenes, sums over stories from which `score_scenes` computes the scores: float64 (6, S).
    Sums of several ranks may be added.

    The rows count stories, right items, items equal to that of the first scene and right motions, and add up the change
    at the seam before the scene and the mean change between frames within it.

    videos        uint8 (N, T, C, H, W).
    ends          the number of the frame behind each scene.
    items, asked  the items (N,) and the motions (N, S) that were asked for, int64.
    """
    shades = average_colours(videos)
    jumps = shades.diff(dim=1).abs().mean((2, 3))  # (N, T - 1)
    columns, first = [], None
    for number, (begin, end) in enumerate(zip([0, *ends], ends)):
        shown = network(videos[:, begin:end])[1].argmax(1)
        first = shown if first is None else first
        moves = find_motions(shades[:, begin:end]) == asked[:, number].to(shown.device)
        seam = jumps[:, begin - 1] if begin else torch.zeros_like(jumps[:, 0])
        columns.append(
            torch.stack(
                [
                    row.double().sum()
                    for row in (
                        torch.ones_like(shown),
                        shown == items.to(shown.device),
                        shown == first,
                        moves,
                        seam,
                        jumps[:, begin : end - 1].mean(1),
                    )
                ]
            )
        )
    return torch.stack(columns, 1)


def score_scenes(sums: Tensor) -> dict[str, tuple[float, float | None]]:
    """Computes scores from the sums of `sum_scenes`: (score, None) by name, scenes_NAME the mean over scenes and
    scenes_NAME/I of scene I. The best value of all four is 1.

    item, kept, motion  shares of stories whose item is right, is that of the first scene, or moves as asked for.
    seam                change from the last frame of the scene before to the first one, divided by the mean change
                        between frames within scenes.
    """
    stories, item, kept, motion, seam, within = sums
    values = {
        "item": item / stories,
        "kept": kept[1:] / stories[1:],
        "motion": motion / stories,
        "seam": seam[1:] / within.mean(),
    }
    result: dict[str, tuple[float, float | None]] = {}
    result |= {f"scenes_{name}": (by_scene.mean().item(), None) for name, by_scene in values.items()}
    return result | {
        f"scenes_{name}/{number}": (value, None)
        for name, by_scene in values.items()
        for number, value in enumerate(by_scene.tolist(), 1 + len(item) - len(by_scene))
    }
