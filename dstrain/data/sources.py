"""The data section of a recipe, opened."""

from typing import Any

from dstrain.config import Data
from dstrain.data.images import open_images


def open_sources(data: Data) -> tuple[Any, Any | None]:
    """The training source and the held-out one, None where a folder holds nothing out. ValueError as `open_images`."""
    common = dict(channels=data.channels, held_out=data.held_out, held_out_path=data.held_out_path, draft=data.draft)
    train = open_images(data.path, data.image_size, split="train", **common)
    if data.path.startswith("builtin:") or data.held_out or data.held_out_path:
        return train, open_images(data.path, data.image_size, split="held_out", **common)
    return train, None
