"""Finds the item and its motion, one of five, in the built-in clips without a network, and scores long clips.

The clips (data/builtin/moving.py) show one bright item on black, whose side is two thirds of the canvas's shorter one.

A story is a long clip of S scenes, each drawn with its own motion. Its scores say whether the item stays the same from
scene to scene, and whether each scene shows its motion. The frames of the previous scene that a scene was conditioned
on do not belong to it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dstrain import rng
from dstrain.data.builtin.moving import MOTIONS, map_captions_to_item_and_motion
from dstrain.metrics.network import Features

SCENES = 4
NO_MOTION = -1
_LEAST = 0.2  # of the free length: a displacement below it is no motion
_BOTH = 0.5  # of the longer axis's path: with one as long on the shorter axis, the item bounces
_EDGE = 0.01  # of the brightness lies beyond either edge of an item


def average_channels(videos: Tensor) -> Tensor:
    """Converts clips uint8 (N, T, C, H, W) to their mean over channels, float32 (N, T, H, W) in [0, 1]."""
    return videos.float().mean(2) / 255


def crop_around_items(frames: Tensor, side: int = 28) -> Tensor:
    """Crops each frame, float32 (N, H, W), to a square around the item that it shows. Resizes this to the input of the
    built-in classifier: float32 (N, 1, side, side). The crop is centred between the item's edges, and is 7/12 as wide
    as the frame's shorter side (rounded), as the pictures of items in built-in clips.
    """
    height, width = frames.shape[-2:]
    shown = 2 * min(height, width) // 3 * 28 / 32  # pixels
    steps = (torch.arange(side, device=frames.device) + 0.5) / side - 0.5  # (side,)
    axes = [
        2 * (_compute_item_middle(frames.sum(dim))[:, None] + shown * steps) / length - 1
        for dim, length in ((1, width), (2, height))
    ]  # x and y: (N, side) each
    grid = torch.stack((axes[0][:, None, :].expand(-1, side, -1), axes[1][:, :, None].expand(-1, -1, side)), -1)
    return F.grid_sample(frames[:, None], grid, mode="bilinear", align_corners=False)


def classify_motions(videos: Tensor) -> Tensor:
    """Returns the motion of the item in each clip, float32 (N, T, H, W) with T >= 2: int64 (N,), an index into MOTIONS,
    or NO_MOTION if the item hardly moves or a frame is black.

    The item's position is its centre of brightness. The item bounces if its paths along both axes are of similar
    length; else it moves along the axis of the larger displacement. For all square built-in clips of five or more
    frames the result is right; other shapes need more frames, since a fast item turns between two frames.
    """
    height, width = videos.shape[-2:]
    free = min(height, width) - 2 * min(height, width) // 3
    places = torch.stack(
        [_compute_brightness_centre(videos.sum(2)), _compute_brightness_centre(videos.sum(3))], -1
    )  # (N, T, 2): x, y in pixels
    paths = places.diff(dim=1).abs().sum(1)  # (N, 2)
    net = places[:, -1] - places[:, 0]
    axis = net.abs().argmax(1)  # (N,)
    ahead = net.gather(1, axis[:, None])[:, 0] > 0
    left, right, up, down, bouncing = range(len(MOTIONS))
    straight = torch.where(axis == 0, torch.where(ahead, right, left), torch.where(ahead, down, up))
    result = torch.where(paths.amin(1) >= _BOTH * paths.amax(1), bouncing, straight)
    still = torch.where(result == bouncing, paths.amax(1), net.abs().amax(1)) < _LEAST * free
    return torch.where(still | ~places.isfinite().all(2).all(1), NO_MOTION, result)


def _compute_brightness_centre(profile: Tensor) -> Tensor:
    """Returns the centre of brightness, in pixels along the last axis, of brightness profiles (..., L): (...,). It is
    NaN for a profile of zeros.
    """
    return (profile * (torch.arange(profile.shape[-1], device=profile.device) + 0.5)).sum(-1) / profile.sum(-1)


def _compute_item_middle(profile: Tensor) -> Tensor:
    """Returns the point halfway between the edges of the item, in pixels (N,), from the brightness (N, L) along one
    axis. It is L / 2 if all values are 0.
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


def choose_story_items_and_motions(seeds: Tensor) -> tuple[Tensor, Tensor]:
    """Chooses a story, a clip of several scenes, for each seed (N,). Returns int64 (N,), the item that it shows (the
    seed modulo the number of items), and int64 (N, SCENES), the motion in each scene. The scenes of a story have
    different motions.
    """
    items = seeds % (len(map_captions_to_item_and_motion()) // len(MOTIONS))
    return items, rng.uniform(rng.keys_of_seeds(seeds), "motions", (len(MOTIONS),)).argsort(1)[:, :SCENES]


def sum_scene_measurements(
    network: Features, videos: Tensor, scene_ends: list[int], right_items: Tensor, right_motions: Tensor
) -> Tensor:
    """Returns float64 (6, S): for each of S scenes, sums over N stories, from which `compute_scene_scores` computes the
    scores. Add the sums of several batches or ranks to get those of all stories. The rows:

    0   number of stories
    1   stories in which the scene shows the right item
    2   stories in which the scene shows the same item as the first scene
    3   stories in which the scene shows the right motion
    4   mean absolute change of pixels from the frame before the scene to its first frame; 0 for the first scene
    5   mean absolute change of pixels between the frames within the scene

    videos          uint8 (N, T, C, H, W)
    scene_ends      for each scene, the index of the first frame after it
    right_items     int64 (N,), the right items
    right_motions   int64 (N, S), the right motions
    """
    shades = average_channels(videos)
    jumps = shades.diff(dim=1).abs().mean((2, 3))  # (N, T - 1)
    columns, first = [], None
    for number, (begin, end) in enumerate(zip([0, *scene_ends], scene_ends)):
        shown = network(videos[:, begin:end])[1].argmax(1)
        first = shown if first is None else first
        moves = classify_motions(shades[:, begin:end]) == right_motions[:, number].to(shown.device)
        seam = jumps[:, begin - 1] if begin else torch.zeros_like(jumps[:, 0])
        columns.append(
            torch.stack(
                [
                    row.double().sum()
                    for row in (
                        torch.ones_like(shown),
                        shown == right_items.to(shown.device),
                        shown == first,
                        moves,
                        seam,
                        jumps[:, begin : end - 1].mean(1),
                    )
                ]
            )
        )
    return torch.stack(columns, 1)


def compute_scene_scores(sums: Tensor) -> dict[str, tuple[float, float | None]]:
    """Returns {name: (score, None)} from the sums of `sum_scene_measurements`. There are four scores, each best at 1.
    scenes_NAME is a score's mean over scenes; scenes_NAME/I is that of scene I, counted from 1.

    item     share of stories whose item is right
    kept     share of stories whose item is that of the first scene; not for the first scene
    motion   share of stories that show the right motion
    seam     change of pixels where a scene begins, divided by the mean change within scenes; not for the first scene
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
