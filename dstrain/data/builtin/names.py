"""Which of the built-in pictures and clips a run learns from, also where it learns from codes of them."""

from dstrain.data.builtin.fashion import FASHION_PATH, Fashion
from dstrain.data.builtin.moving import MOVING, MovingFashion
from dstrain.data.cached.latents import Latents, is_encoded
from dstrain.data.source import Source
from dstrain.recipe import Data


def name_of(data: Data) -> str:
    """data.path, or what the codes there were made of, where that is built in."""
    if data.mixture:
        return "a mixture"
    if is_encoded(data.path):
        return Latents(data.path).encoding["data"].split()[0]  # a fingerprint, which begins with the name
    return data.path


def built_in(data: Data, split: str) -> Source | None:
    """The train or held_out split of the built-in data that `data` name or were encoded from; None of all others."""
    name = name_of(data)
    if name == FASHION_PATH:
        return Fashion(data.image_size, data.channels, split)
    if name == MOVING:
        return MovingFashion(data.num_frames, data.height or data.image_size, data.image_size, data.channels, split)
    return None
