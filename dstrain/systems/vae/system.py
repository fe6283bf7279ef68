"""What both kinds of autoencoder share: they need data, show reconstructions in place of samples, and load by name.

The loss of a sample is reconstruction (a mean over the values of its image) plus kl_weight * KL in nats / values of its
image: the evidence lower bound of the image, divided by its number of values, so that weights carry over between sizes.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dstrain import rng
from dstrain.nn.fitting import Fitted, Remedies
from dstrain.nn.pixels import require_shape, to_uint8
from dstrain.recipe import ConfigError
from dstrain.systems.base import Batch, Example, Nets, System
from dstrain.systems.vae import weights
from dstrain.systems.vae.config import Config


class AutoencoderSystem(System):
    """The part `autoencoder` and what is measured and shown of it. `config` says what each choice means."""

    generates = False
    encodes = True
    in_pipeline = "vae"
    starts_from_data = True
    averaged = ("autoencoder",)
    remedies: dict[str, Remedies]                 # by part, for weights that do not fit: pattern of a name -> fields

    def __init__(self, config: Config) -> None:
        self.config = config
        self.values = config.channels * config.image_size ** 2                    # of an image
        self.side = config.image_size // config.factor                            # of the latents or tokens

    @torch.no_grad()
    def encode(self, batch: Batch) -> Example:
        """x_start in [-1, 1]. ConfigError: images of another shape than the model's."""
        require_shape(batch["image"], self.config.shape, "channels")
        return super().encode(batch)

    def pictures(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """reconstruction: each original and, to the right of it, its reconstructions."""
        shown = torch.cat([example["x_start"], *self.reconstructions(nets, example)], dim=3)      # (B, C, H, n W)
        return {"reconstruction": to_uint8(shown)}

    @abstractmethod
    def reconstructions(self, nets: Nets, example: Example) -> list[Tensor]:
        """What is shown beside the original, float (B, C, H, W) in [-1, 1] each."""

    def adapt(self, part: str, state: dict[str, Tensor]) -> Fitted:
        """Files of the original trainers, see weights.py."""
        return weights.adapt(state, self.on_meta(part), self.remedies[part])

    def from_diffusers(self, state: dict[str, Tensor], diffusers_config: Mapping[str, Any]) -> Fitted:
        """Names stay as they are."""
        weights.require_same(diffusers_config, getattr(self.on_meta("autoencoder"), "config", {}))
        return state, []

    def require_expressible(self) -> None:
        raise ConfigError("diffusers has a class for model.kl alone, not for a discrete VAE: take --format safetensors")

    def synthetic(self, batch_size: int) -> Batch:
        """Pixels with keys, of step 0."""
        positions = torch.arange(batch_size)
        key = rng.keys(0, 0, positions)
        image = rng.integers(key, "image", 256, self.config.shape).to(torch.uint8)
        return {"key": key, "position": positions, "image": image}
