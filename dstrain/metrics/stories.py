"""Stories of the built-in clips: whether a long clip keeps its item from scene to scene, and moves as each scene says.

Notation: N stories of S scenes. A scene's frames are those that it drew, without those that it goes on from. The item
is read off by the classifier in the package, and the motion in closed form (clips.py).
"""

import torch
from torch import Tensor

from dstrain import rng
from dstrain.data.builtin.moving import MOTIONS, captions
from dstrain.metrics.clips import grey, motions
from dstrain.metrics.network import Features

SCENES = 4


def story(seeds: Tensor) -> tuple[Tensor, Tensor]:
    """What the stories of seeds int64 (N,) tell: the item (N,), which come in turn, and the motions (N, SCENES), all
    different; int64 both.
    """
    items = seeds % (len(captions()) // len(MOTIONS))
    return items, rng.uniform(rng.keys_of_seeds(seeds), "motions", (len(MOTIONS),)).argsort(1)[:, :SCENES]


def compared(network: Features, videos: Tensor, ends: list[int], items: Tensor, asked: Tensor) -> Tensor:
    """Sums over stories, float64 (6, S), from which `figures` makes shares; sums of several ranks may be added.

    videos uint8 (N, T, C, H, W); ends: the frame behind each scene; items (N,) and motions `asked` (N, S), int64.
    """
    shades = grey(videos)
    jumps = shades.diff(dim=1).abs().mean((2, 3))  # (N, T - 1)
    columns, first = [], None
    for number, (begin, end) in enumerate(zip([0, *ends], ends)):
        shown = network(videos[:, begin:end])[1].argmax(1)
        first = shown if first is None else first
        moves = motions(shades[:, begin:end]) == asked[:, number].to(shown.device)
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


def figures(sums: Tensor) -> dict[str, tuple[float, None]]:
    """Of all scenes and by scene: the shares of stories whose item is right, is that of the first scene, and moves as
    told; and the seam, the change from a scene's last frame to the next one's first, as a multiple of the mean change
    between frames within scenes. 1 is best of all four.
    """
    stories, item, kept, motion, seam, within = sums
    values = {
        "item": item / stories,
        "kept": kept[1:] / stories[1:],
        "motion": motion / stories,
        "seam": seam[1:] / within.mean(),
    }
    result = {f"scenes_{name}": (by_scene.mean().item(), None) for name, by_scene in values.items()}
    return result | {
        f"scenes_{name}/{number}": (value, None)
        for name, by_scene in values.items()
        for number, value in enumerate(by_scene.tolist(), 1 + len(item) - len(by_scene))
    }
