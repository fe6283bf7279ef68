"""The network that measures pictures of the built-in emoji's names: the image tower in this package."""

import torch
from torch import Tensor

from dstrain.encoders import emoji
from dstrain.encoders.precision import computing
from dstrain.metrics.network import Features, three_channels
from dstrain.recipe import ConfigError


class Emoji(Features):
    """Embeddings of the tower, comparable with those of the built-in pairs' captions."""

    name = "emoji"
    size = emoji.DIM

    def __init__(self, device: torch.device) -> None:
        self.tower, self._device = emoji.EmojiTower(device), device
        self.fingerprint = self.tower.fingerprint

    def __call__(self, images: Tensor) -> tuple[Tensor, None]:
        with computing("fp32"):
            return self.tower.encode(three_channels(images)), None

    def texts(self, captions: list[str]) -> Tensor:
        embeds = emoji.text_embeds(captions)
        if embeds is None:
            raise ConfigError(
                "--features emoji: it knows the names of the built-in emoji alone, and one of these "
                "captions is none of them: draw for those names, or take --features clip:FOLDER"
            )
        return embeds.to(self._device)
