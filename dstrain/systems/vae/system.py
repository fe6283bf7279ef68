"""What both kinds of autoencoder share: they need data, show reconstructions in place of samples, and load by name.

The loss of a sample is reconstruction (a mean over the values of its image) plus kl_weight * KL in nats / values of its
image: the evidence lower bound of the image, divided by its number of values, so that weights carry over between sizes.
"""

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dstrain import rng
from dstrain.nn.adversarial import gradient_of_picture, record_inputs
from dstrain.nn.fitting import Fitted, Remedies
from dstrain.nn.picture_loss import LastLayer, PictureLoss, descend_by
from dstrain.nn.pixels import require_shape, to_uint8
from dstrain.recipe import ConfigError
from dstrain.systems.base import Batch, Example, Nets, System, Terms
from dstrain.systems.vae import weights
from dstrain.systems.vae.config import Config


class AutoencoderSystem(System):
    """The part `autoencoder` and, where the config has one, the part `discriminator`, which waits for its start.

    `config` says what each choice means.
    """

    generates = False
    encodes = True
    in_pipeline = "vae"
    starts_from_data = True
    averaged = ("autoencoder",)
    remedies: dict[str, Remedies]  # by part, for weights that do not fit: pattern of a name -> fields

    def __init__(self, config: Config) -> None:
        self.config = config
        self.picture_loss = PictureLoss(config.kind.perceptual, config.kind.discriminator)
        self.parts = self.picture_loss.parts("autoencoder", self.learn)
        self.values = config.channels * config.image_size**2  # of an image
        self.side = config.image_size // config.factor  # of the latents or tokens

    def networks(self) -> dict[str, nn.Module]:
        return {"autoencoder": self.autoencoder()} | self.picture_loss.networks(self.config.channels)

    @abstractmethod
    def autoencoder(self) -> nn.Module:
        """Returns the network of this kind."""

    def frozen(self) -> tuple[nn.Module, ...]:
        return self.picture_loss.frozen()

    def turns(self, step: int) -> tuple[str, ...]:
        return self.picture_loss.turns("autoencoder", step)

    def learn(self, nets: Nets, example: Example) -> Terms:
        """Computes reconstruction and what its code costs; from the discriminator's start on its critique, too."""
        discriminator, last = self.config.kind.discriminator, self.last_layer(nets)
        by_last_layer = self.picture_loss.adversarial and discriminator.balance == "last_layer"
        with record_inputs(last) if by_last_layer else nullcontext([]) as entered:
            out, terms, coding = self.passed(nets, example)
        if not self.picture_loss.adversarial:
            terms |= self.distance(nets, out, example)
            loss = (self.picture_loss.total(terms) + coding).mean()
        else:
            leaf = out.detach().requires_grad_()
            terms |= self.distance(nets, leaf, example)
            of_distance = gradient_of_picture(self.picture_loss.total(terms), leaf)
            layer = LastLayer(entered[0], last.kernel_size[0]) if by_last_layer else None
            critique, of_critique = self.picture_loss.critique(
                nets, example, self.picture(nets, leaf), example["x_start"], of_distance, leaf, layer
            )
            terms |= critique
            value = self.picture_loss.total(terms) + terms["critique_weight"] * terms["critique"] + coding
            pull = (out * (of_distance + of_critique)).flatten(1).sum(1) + coding
            loss = descend_by(value, pull)
        return {name: term.detach() for name, term in terms.items()} | {"loss": loss}

    @abstractmethod
    def passed(self, nets: Nets, example: Example) -> tuple[Tensor, Terms, Tensor]:
        """Makes one pass: the decoder's output (B, ...), terms of the code (B,) and what they add to the loss, (B,)."""

    @abstractmethod
    def distance(self, nets: Nets, out: Tensor, example: Example) -> Terms:
        """Returns the terms recon and, where it counts, perceptual, (B,), of the decoder's output."""

    @abstractmethod
    def picture(self, nets: Nets, out: Tensor) -> Tensor:
        """Returns the decoder's output as pictures (B, C, H, W), about in [-1, 1]."""

    @abstractmethod
    def last_layer(self, nets: Nets) -> nn.Conv2d:
        """Returns the layer that makes the decoder's output."""

    @torch.no_grad()
    def encode(self, batch: Batch) -> Example:
        """Sets x_start in [-1, 1]. Raises ConfigError for images of another shape than the model's."""
        require_shape(batch["image"], self.config.shape, "channels")
        return super().encode(batch)

    def pictures(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """Returns reconstruction: each original and, to the right of it, its reconstructions."""
        shown = torch.cat([example["x_start"], *self.reconstructions(nets, example)], dim=3)  # (B, C, H, n W)
        return {"reconstruction": to_uint8(shown)}

    @abstractmethod
    def reconstructions(self, nets: Nets, example: Example) -> list[Tensor]:
        """Returns what is shown beside the original, float (B, C, H, W) in [-1, 1] each."""

    def adapt(self, part: str, state: dict[str, Tensor]) -> Fitted:
        """Fits files of the original trainers, see weights.py."""
        return weights.adapt_weights(state, self.on_meta(part), self.remedies[part])

    def from_diffusers(self, state: dict[str, Tensor], diffusers_config: Mapping[str, Any]) -> Fitted:
        """Returns the state dict itself: its names are the same in diffusers."""
        weights.require_same(diffusers_config, getattr(self.on_meta("autoencoder"), "config", {}))
        return state, []

    def require_expressible(self) -> None:
        raise ConfigError("diffusers has a class for model.kl alone, not for a discrete VAE: take --format safetensors")

    def synthetic(self, batch_size: int) -> Batch:
        """Returns random pixels with keys, of step 0."""
        positions = torch.arange(batch_size)
        key = rng.keys(0, 0, positions)
        image = rng.integers(key, "image", 256, self.config.shape).to(torch.uint8)
        return {"key": key, "position": positions, "image": image}
