"""Crops of images, by the kinds of data.crop. A random crop is a function of random numbers of the sample's key.

    center          ADM's, see `crop_center`
    random          ADM's random crop (Dhariwal and Nichol 2021): the image is scaled so that the crop keeps a share of
                    its shorter side, `scale` = 0.8 to 1, and is cut out anywhere
    random_resized  torchvision's RandomResizedCrop (Szegedy et al. 2014): a part of `scale` = 0.08 to 1 of the area, of
                    an aspect of `ratio` = 3/4 to 4/3 times the target's, brought to the target's size
    dalle           of DALL-E's dVAE (Ramesh et al. 2021, listing 1): a square of the shorter side anywhere, reduced by
                    areas to 9/8 to 12/8 of the target, and the target anywhere in it; of square targets
    none            the image as it is, which must have the size

Without these numbers, as in evaluation, a random crop is the centre crop.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from PIL import Image

from dstrain.data.decode.pixels import crop_center, halve_towards_target_size
from dstrain.recipe import Data

_TRIES = 10  # parts that random_resized draws before it takes the largest part in the middle
_NUMBERS = {"random": 3, "random_resized": 2 * _TRIES + 2, "dalle": 5}  # random numbers that a crop takes
_SCALES = {"random": (0.8, 1.0), "random_resized": (0.08, 1.0)}


class Cut(NamedTuple):
    """A cropped image, and the distances of the crop from the top, the left and the right edge of the whole image, in
    pixels of the crop's scale.
    """

    image: Image.Image
    top: int
    left: int
    right: int


@dataclass(frozen=True)
class Crop:
    """Crops RGB, RGBA and L images to a size. kind: a value of data.crop, see above. scale, ratio: ranges of random
    crops, see above; None: the published ones.
    """

    kind: str = "center"
    scale: tuple[float, float] | None = None
    ratio: tuple[float, float] | None = None

    @classmethod
    def from_data_section(cls, data: Data) -> "Crop":
        """Returns the crop that a recipe's data section sets: data.crop, data.crop_scale and data.crop_ratio."""
        return cls(data.crop, data.crop_scale, data.crop_ratio)

    @property
    def num_random_numbers(self) -> int:
        """Returns how many random numbers a call of this crop needs, each in [0, 1); 0 if the crop is not random."""
        return _NUMBERS.get(self.kind, 0)

    def __call__(
        self, image: Image.Image, width: int, height: int, random_numbers: Sequence[float] | None = None
    ) -> Cut:
        """Returns a crop of `width` x `height` pixels. random_numbers: `num_random_numbers` random numbers in [0, 1),
        which choose scale and position; None gives the centre crop.

        Raises ValueError if the kind is `none` and the image does not have this size.
        """
        if self.kind == "none":
            if image.size != (width, height):
                raise ValueError(f"{image.width} x {image.height} pixels, and data.crop=none takes {width} x {height}")
            return Cut(image, 0, 0, 0)
        if image.mode == "RGBA":  # colours weighted by opacity: invisible ones never show at an edge
            cut = self(image.convert("RGBa"), width, height, random_numbers)
            return cut._replace(image=cut.image.convert("RGBA"))
        if self.kind == "center" or random_numbers is None:
            return _crop_center(image, width, height)
        make = {"random": self._crop_random, "random_resized": self._crop_random_resized, "dalle": _crop_dalle}[
            self.kind
        ]
        return make(image, width, height, random_numbers)

    def _crop_random(self, image: Image.Image, width: int, height: int, random_numbers: Sequence[float]) -> Cut:
        """Returns ADM's random crop: scales the image by a random factor, then cuts it at a random place.
        random_numbers: 3 in [0, 1).
        """
        least, most = self.scale or _SCALES["random"]
        shorter = min(width, height)
        low, high = math.ceil(shorter / most), math.ceil(shorter / least)
        side = low + int(random_numbers[0] * (high - low + 1))
        cover = width * side / shorter, height * side / shorter
        image = halve_towards_target_size(image, *cover)
        scale = max(cover[0] / image.width, cover[1] / image.height)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
        return _crop_at_random_place(image, width, height, random_numbers[1:])

    def _crop_random_resized(self, image: Image.Image, width: int, height: int, random_numbers: Sequence[float]) -> Cut:
        """Returns torchvision's RandomResizedCrop: a part of random area and aspect, resized to the target. Takes the
        first of 10 random parts that lies within the image; if none does, the largest allowed part in the middle.
        """
        least, most = self.scale or _SCALES["random_resized"]
        low, high = (math.log(ratio * width / height) for ratio in self.ratio or (3 / 4, 4 / 3))
        for number in range(_TRIES):
            area = image.width * image.height * (least + random_numbers[2 * number] * (most - least))
            aspect = math.exp(low + random_numbers[2 * number + 1] * (high - low))
            wide, tall = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < wide <= image.width and 0 < tall <= image.height:
                return _resize_crop(_crop_at_random_place(image, wide, tall, random_numbers[-2:]), width, height)
        aspect = min(max(image.width / image.height, math.exp(low)), math.exp(high))
        wide, tall = min(image.width, round(image.height * aspect)), min(image.height, round(image.width / aspect))
        top, left = (image.height - tall) // 2, (image.width - wide) // 2
        part = image.crop((left, top, left + wide, top + tall))
        return _resize_crop(Cut(part, top, left, image.width - wide - left), width, height)


def _crop_center(image: Image.Image, width: int, height: int) -> Cut:
    """Returns ADM's centre crop, see `crop_center`, with its distances from the edges."""
    wide, high = image.size
    while wide >= 2 * width and high >= 2 * height:  # as `crop_center` halves
        wide, high = wide // 2, high // 2
    scale = max(width / wide, height / high)
    x, y = round(wide * scale) - width, round(high * scale) - height
    return Cut(crop_center(image, width, height), y // 2, x // 2, x - x // 2)


def _crop_dalle(image: Image.Image, width: int, height: int, random_numbers: Sequence[float]) -> Cut:
    """Returns DALL-E's random crop: cuts a random square, resizes it to a random size not below the target's, then cuts
    the target at a random place. random_numbers: 5 in [0, 1).
    """
    shorter, target = min(image.size), max(width, height)
    square = _crop_at_random_place(image, shorter, shorter, random_numbers)
    low, high = min(shorter, round(9 / 8 * target)), min(shorter, round(12 / 8 * target))
    side = max(low + int(random_numbers[2] * (high - low + 1)), target)  # a smaller image is enlarged
    whole = _resize_crop(square, side, side, Image.Resampling.BOX)
    part = _crop_at_random_place(whole.image, width, height, random_numbers[3:])
    return Cut(part.image, part.top + whole.top, part.left + whole.left, part.right + whole.right)


def _crop_at_random_place(image: Image.Image, width: int, height: int, random_numbers: Sequence[float]) -> Cut:
    """Returns a part of the image of width x height pixels, not resized. The first two of `random_numbers`, in [0, 1),
    choose its distance from the top and from the left.
    """
    top = int(random_numbers[0] * (image.height - height + 1))
    left = int(random_numbers[1] * (image.width - width + 1))
    return Cut(image.crop((left, top, left + width, top + height)), top, left, image.width - width - left)


def _resize_crop(crop: Cut, width: int, height: int, resampling: Image.Resampling = Image.Resampling.BILINEAR) -> Cut:
    """Returns a crop resized to width x height pixels. Scales its distances from the image's edges by the same factors,
    and rounds them to pixels.
    """
    across, down = width / crop.image.width, height / crop.image.height
    return Cut(
        crop.image.resize((width, height), resampling),
        round(crop.top * down),
        round(crop.left * across),
        round(crop.right * across),
    )
