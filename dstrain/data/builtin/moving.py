"""The built-in clips: Fashion-MNIST items moving over a black canvas, captioned: "an ankle boot moving left".

A sample (see videos.py for what items hold) is a function of its index alone: which item, which of the five motions,
how fast, from where. A straight motion covers 0.6 to 1 of the free length, which is the canvas without the item's side;
a bouncing item covers 1.2 to 2.2 of it along each axis, so that it turns at least once. An item that is not at whole
pixels is blended with its background.
"""

from dataclasses import dataclass
from hashlib import blake2b
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dstrain import rng
from dstrain.data.builtin.fashion import FASHION, Fashion
from dstrain.data.cached.rows import pack_caption
from dstrain.data.left_out import match_captions
from dstrain.data.order import Order
from dstrain.data.source import Item, Source
from dstrain.recipe import ConfigError

MOVING = "builtin:moving-fashion"
MOTIONS = {
    "moving left": (-1, 0),
    "moving right": (1, 0),
    "moving up": (0, -1),
    "moving down": (0, 1),
    "bouncing": (1, 1),
}  # direction along x and along y, where y grows downwards
_VERSION = 1  # of the clips, for the fingerprint


@dataclass
class MovingFashion(Source):
    """Holds every item in every motion, in a fixed shuffled order: 10,000 training clips, and 2,500 of the held-out
    items.

    num_frames, height, width: of the clips. Items are squares with two thirds of the shorter side; smaller ones would
    leave most of a clip black. split: "train" or "held_out". leave_out: patterns of captions; clips whose caption fits
    one are left out. Raises ConfigError if a side is so short that items have fewer than 5 pixels.
    """

    num_frames: int
    height: int = 32
    width: int = 32
    channels: int = 1
    split: str = "train"
    leave_out: tuple[str, ...] = ()
    noun = "clips"
    classes = FASHION
    captioned = True
    light = True

    def __post_init__(self) -> None:
        key, shorter = min(("image_size", self.width), ("height", self.height), key=itemgetter(1))
        side = 2 * shorter // 3
        if side < 5:
            raise ConfigError(f"data.{key}={shorter} leaves items of {side} pixels: give at least 8, better 24")
        self.items = Fashion(side, 1, self.split)
        number = len(self.items) * len(MOTIONS)
        self.permutation = Order(number).find_sample_index(np.arange(number)).astype(np.int32)
        if self.leave_out:
            fits = match_captions([[self.compose_caption(index)] for index in range(number)], self.leave_out)
            self.left_out = tuple(zip(self.leave_out, fits.sum(1).tolist()))
            self.permutation = self.permutation[~fits.any(0)]

    def __len__(self) -> int:
        return len(self.permutation)

    def __getitem__(self, index: int) -> Item:
        item = self.items[self._find_item_and_motion(index)[0]]
        x, y = self._compute_item_positions(index)
        video = _draw_moving_item(item["image"][0], x, y, self.height, self.width)  # (T, H, W)
        return {
            "video": video[:, None].expand(-1, self.channels, -1, -1),
            "frames": self.num_frames,
            "caption": pack_caption(self.compose_caption(index)),
            "label": item["label"],
        }

    def compose_caption(self, index: int) -> str:
        """Returns the caption of a clip, such as "an ankle boot moving left". Raises IndexError if there is no such
        clip.
        """
        number, motion = self._find_item_and_motion(index)
        return make_caption(FASHION[int(self.items.labels[number])], motion)

    def _find_item_and_motion(self, index: int) -> tuple[int, str]:
        """Returns (index in `items` of the clothing item that a clip shows, name of its motion, such as "moving left").
        Raises IndexError if there is no such clip.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        number, motion = divmod(int(self.permutation[index]), len(MOTIONS))
        return number, list(MOTIONS)[motion]

    def _compute_item_positions(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns x and y of the item's upper left corner in each frame of a clip, in pixels: float32 (T,) each."""
        key = rng.keys_of_seeds(torch.tensor([int(self.permutation[index])]))
        speed, start, across, quadrant = rng.uniform(key, "motion", (4,))[0].tolist()  # all in [0, 1)
        side = self.items.image_size
        lengths = self.width - side, self.height - side  # the largest x and y
        time = torch.linspace(0, 1, self.num_frames) if self.num_frames > 1 else torch.full((1,), 0.5)
        directions, positions = MOTIONS[self._find_item_and_motion(index)[1]], []
        for axis, (length, direction) in enumerate(zip(lengths, directions)):
            if all(directions):  # bouncing, with one speed along both axes
                distance = (1.2 + speed) * max(lengths)
                direction = 1 if int(quadrant * 4) >> axis & 1 else -1
                period = 2 * length  # to the other side and back
                position = ((start, across)[axis] * period + direction * distance * time) % period
                positions.append(length - (position - length).abs())
            elif direction:
                distance = (0.6 + 0.4 * speed) * length
                position = start * (length - distance) + distance * time
                positions.append(position if direction > 0 else length - position)
            else:
                positions.append(torch.full_like(time, across * length))
        return positions[0], positions[1]

    def name_sample(self, index: int) -> str:
        return f"{MOVING}/{self.split}/{index}"

    def count_samples_by_class(self) -> np.ndarray:
        """Returns the number of clips of each class, int64 (10,)."""
        return np.bincount(self.items.labels[self.permutation // len(MOTIONS)], minlength=len(FASHION))

    def compute_fingerprint(self) -> str:
        """Returns a short string that changes if the clips change. If data.leave_out is set, it includes a hash of the
        clips that are left.
        """
        left_out = (
            f" left out={blake2b(self.permutation.tobytes(), digest_size=8).hexdigest()}" if self.leave_out else ""
        )
        return f"{MOVING} {_VERSION} n={len(self)} of {self.items.compute_fingerprint()}{left_out}"


def make_caption(name: str, motion: str) -> str:
    """Returns the caption of an item and a motion, such as "an ankle boot moving left"."""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name} {motion}"


def map_captions_to_item_and_motion() -> dict[str, tuple[int, int]]:
    """Returns {caption: (index into FASHION, index into MOTIONS)} of every caption of the built-in clips, motion by
    motion.
    """
    return {
        make_caption(name, motion): (item, number)
        for number, motion in enumerate(MOTIONS)
        for item, name in enumerate(FASHION)
    }


def _draw_moving_item(item: Tensor, x: Tensor, y: Tensor, height: int, width: int) -> Tensor:
    """Draws a clothing item into each frame of a black video, and returns the video, uint8 (T, height, width).
    Interpolates the item bilinearly between whole pixels.

    item: uint8 (S, S)
    x, y: the item's upper left corner in each frame, in pixels, float32 (T,) each
    """
    side, frames = len(item), torch.zeros(len(x), height + 1, width + 1)
    near = F.pad(item.float(), (1, 1, 1, 1))  # (S + 2, S + 2)
    columns, tops = x.long(), y.long()
    right, down = (x - columns)[:, None, None], (y - tops)[:, None, None]
    # Shifted by a fraction of a pixel, pixel s shows a blend of the pixels s - 1 and s of the item.
    rows = (1 - down) * near[1:] + down * near[:-1]  # (T, S + 1, S + 2)
    shifted = (1 - right) * rows[:, :, 1:] + right * rows[:, :, :-1]  # (T, S + 1, S + 1)
    for frame, patch, left, top in zip(frames, shifted, columns.tolist(), tops.tolist()):
        frame[top : top + side + 1, left : left + side + 1] = patch
    return frames[:, :height, :width].round().byte()
