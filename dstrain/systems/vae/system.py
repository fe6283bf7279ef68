"""The base class of both kinds of autoencoder: the loss, reconstructions in place of samples, and loading of weights.

The loss of a sample is its reconstruction error (a mean over the values of its image) plus kl_weight * KL in nats /
number of these values. With kl_weight 1 and a log likelihood this is minus the evidence lower bound by value, so that
weights carry over between image sizes.
"""

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dstrain import rng
from dstrain.nn.adversarial import compute_picture_gradient, record_layer_inputs
from dstrain.nn.fitting import Fitted, Remedies
from dstrain.nn.picture_loss import LastLayer, PictureLoss, make_loss_from_value_and_gradient
from dstrain.nn.pixels import convert_to_uint8, require_model_input_shape
from dstrain.recipe import ConfigError
from dstrain.systems.base import Batch, Example, Nets, System, Terms
from dstrain.systems.vae import weights
from dstrain.systems.vae.config import Config


class AutoencoderSystem(System):
    """An autoencoder, the part `autoencoder`. If the config has a discriminator, it is the part `discriminator`, which
    learns from its start step on.
    """

    generates = False
    encodes = True
    in_pipeline = "vae"
    starts_from_data = True
    averaged = ("autoencoder",)
    remedies: dict[str, Remedies]  # by part: pattern of the name of a weight that does not fit -> fields to set

    def __init__(self, config: Config) -> None:
        self.config = config
        self.picture_loss = PictureLoss(config.variant.perceptual, config.variant.discriminator)
        self.parts = self.picture_loss.collect_part_and_discriminator_losses(
            "autoencoder", self.compute_autoencoder_loss
        )
        self.values = config.channels * config.image_size**2  # number of values of an image
        self.side = config.image_size // config.downsampling_factor  # side of the latents or tokens

    def networks(self) -> dict[str, nn.Module]:
        """Builds the new networks by part: "autoencoder" and, if the config has one, "discriminator"."""
        return {"autoencoder": self.build_autoencoder()} | self.picture_loss.build_networks(self.config.channels)

    @abstractmethod
    def build_autoencoder(self) -> nn.Module:
        """Builds the network of the part `autoencoder`, with new weights."""

    def frozen(self) -> tuple[nn.Module, ...]:
        """Returns the frozen network of the perceptual loss; () if the config has no such loss, or its weights are
        missing here.
        """
        return self.picture_loss.list_frozen_networks()

    def turns(self, step: int) -> tuple[str, ...]:
        """Returns the parts that learn at `step`: "autoencoder" and, from its start step on, "discriminator"."""
        return self.picture_loss.begin_step_and_list_parts("autoencoder", step)

    def compute_autoencoder_loss(self, nets: Nets, example: Example) -> Terms:
        """Returns the terms of the autoencoder's turn. `loss` is a scalar with gradient. The others are (B,) each,
        without gradient: the reconstruction error, the terms of the codes and, once the discriminator learns, the
        adversarial terms.
        """
        discriminator, last = self.config.variant.discriminator, self.get_last_decoder_layer(nets)
        by_last_layer = self.picture_loss.adversarial and discriminator.balance == "last_layer"
        with record_layer_inputs(last) if by_last_layer else nullcontext([]) as entered:
            out, terms, coding = self.decode_and_compute_code_loss(nets, example)
        if not self.picture_loss.adversarial:
            terms |= self.compute_reconstruction_terms(nets, out, example)
            loss = (self.picture_loss.compute_reconstruction_loss(terms) + coding).mean()
        else:
            leaf = out.detach().requires_grad_()
            terms |= self.compute_reconstruction_terms(nets, leaf, example)
            of_distance = compute_picture_gradient(self.picture_loss.compute_reconstruction_loss(terms), leaf)
            layer = LastLayer(entered[0], last.kernel_size[0]) if by_last_layer else None
            critique, of_critique = self.picture_loss.compute_critique_terms_and_gradient(
                nets, example, self.convert_to_picture(nets, leaf), example["x_start"], of_distance, leaf, layer
            )
            terms |= critique
            value = (
                self.picture_loss.compute_reconstruction_loss(terms)
                + terms["critique_weight"] * terms["critique"]
                + coding
            )
            pull = (out * (of_distance + of_critique)).flatten(1).sum(1) + coding
            loss = make_loss_from_value_and_gradient(value, pull)
        return {name: term.detach() for name, term in terms.items()} | {"loss": loss}

    @abstractmethod
    def decode_and_compute_code_loss(self, nets: Nets, example: Example) -> tuple[Tensor, Terms, Tensor]:
        """Runs the network. Returns three values: the decoder's output (B, ...), the terms of the codes by name, (B,)
        each, and the codes' part of the loss, (B,).
        """

    @abstractmethod
    def compute_reconstruction_terms(self, nets: Nets, decoder_output: Tensor, example: Example) -> Terms:
        """Returns the terms that compare the decoder's output with the image, (B,) each: `recon`, the reconstruction
        error, and `perceptual`, if the config has a perceptual loss.
        """

    @abstractmethod
    def convert_to_picture(self, nets: Nets, decoder_output: Tensor) -> Tensor:
        """Converts the decoder's output to pictures (B, C, H, W) in about [-1, 1]."""

    @abstractmethod
    def get_last_decoder_layer(self, nets: Nets) -> nn.Conv2d:
        """Returns the decoder's last convolution, whose output is the decoder's."""

    @torch.no_grad()
    def encode(self, batch: Batch) -> Example:
        """Replaces "image" in a batch by "x_start", float32 (B, C, H, W) in [-1, 1]. Raises ConfigError if the images
        have another shape than the model's.
        """
        require_model_input_shape(batch["image"], self.config.image_shape, "channels")
        return super().encode(batch)

    def make_pictures(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """Returns {"reconstruction": uint8 (B, C, H, n * W)}: each original with its n - 1 reconstructions to the
        right.
        """
        shown = torch.cat([example["x_start"], *self.make_reconstructions(nets, example)], dim=3)  # (B, C, H, n W)
        return {"reconstruction": convert_to_uint8(shown)}

    @abstractmethod
    def make_reconstructions(self, nets: Nets, example: Example) -> list[Tensor]:
        """Returns a list of reconstructions of the example's images, one for each way to decode, (B, C, H, W) each, in
        about [-1, 1].
        """

    def adapt_weights(self, part: str, state: dict[str, Tensor]) -> Fitted:
        """Returns weights that another trainer may have saved, fitted to the part's network, and notes for the user,
        see weights.adapt_weights.
        """
        return weights.adapt_weights(state, self.build_part_on_meta(part), self.remedies[part])

    def from_diffusers(self, state: dict[str, Tensor], diffusers_config: Mapping[str, Any]) -> Fitted:
        """Returns the weights unchanged, since diffusers uses the same names, and no notes. Raises ConfigError if
        config.json does not fit the network.
        """
        weights.require_same_config(diffusers_config, getattr(self.build_part_on_meta("autoencoder"), "config", {}))
        return state, []

    def require_expressible_in_diffusers(self) -> None:
        """Raises ConfigError, since diffusers has no class for a discrete VAE. KLSystem overrides this."""
        raise ConfigError("diffusers has a class for model.kl alone, not for a discrete VAE: take --format safetensors")

    def synthetic(self, batch_size: int) -> Batch:
        """Returns a batch of random images uint8, with the samples' keys and positions, for benchmarks, exports and
        tests.
        """
        positions = torch.arange(batch_size)
        key = rng.keys(0, 0, positions)
        image = rng.integers(key, "image", 256, self.config.image_shape).to(torch.uint8)
        return {"key": key, "position": positions, "image": image}
