"""The KL autoencoder as a system: Rombach et al. 2022 (LDM).

All randomness is drawn from the samples' keys, under the name latent.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dstrain import rng
from dstrain.encoders.autoencoder import read_encoding_config_and_weights
from dstrain.nn.measures import measure_psnr_and_ssim
from dstrain.systems.base import Example, Nets, Terms
from dstrain.systems.vae import kl, losses
from dstrain.systems.vae.config import Config
from dstrain.systems.vae.kl import KLAutoencoder, Pass
from dstrain.systems.vae.system import AutoencoderSystem


class KLSystem(AutoencoderSystem):
    remedies = {  # noqa: RUF012 (a table)
        "discriminator": (
            (r"main\.0\.", "channels and kl.discriminator.base_channels"),
            (r"", "kl.discriminator.base_channels and n_layers"),
        ),
        "autoencoder": (
            (r"^codebook", "model.discrete (the file is of a discrete VAE) or"),
            (r"conv_in|conv_out", "channels, kl.latent_channels and kl.block_out_channels"),
            (r"quant_conv", "kl.latent_channels and kl.quant_conv"),
            (r"mid_block\.attentions", "kl.mid_block_add_attention and kl.block_out_channels"),
            (r"", "kl.block_out_channels and kl.layers_per_block"),
        ),
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.kl = config.kl
        self.latent_shape = (self.kl.latent_channels, self.side, self.side)

    def build_autoencoder(self) -> nn.Module:
        config = self.kl
        return KLAutoencoder(
            self.config.channels,
            config.block_out_channels,
            config.layers_per_block,
            config.latent_channels,
            config.norm_num_groups,
            config.quant_conv,
            config.mid_block_add_attention,
        )

    def compute_output_and_code_loss(self, nets: Nets, example: Example) -> tuple[Tensor, Terms, Tensor]:
        """Runs the network. Returns the picture (B, C, H, W), the term kl (B,) in nats, summed over a sample's latents,
        and the KL's part of the loss, (B,).
        """
        passed = self._run_network(nets, example)
        kl = _compute_kl_to_normal(passed)
        return passed.picture, {"kl": kl}, self._weight_kl(kl)

    def convert_to_picture(self, nets: Nets, out: Tensor) -> Tensor:
        return out

    def find_last_layer(self, nets: Nets) -> nn.Conv2d:
        return nets["autoencoder"].decoder.conv_out

    @torch.no_grad()
    def evaluate(self, nets: Nets, example: Example) -> Terms:
        """Returns the terms of each sample, (B,), without those of the discriminator, psnr and ssim of the
        reconstruction, and latent_mean and latent_square by channel, (B, c), see `_compute_latent_mean_and_square`.
        """
        passed = self._run_network(nets, example)
        terms = {"kl": _compute_kl_to_normal(passed)} | self.compute_distance(nets, passed.picture, example)
        loss = self.picture_loss.compute_reconstruction_loss(terms) + self._weight_kl(terms["kl"])
        return (
            terms
            | {"loss": loss}
            | measure_psnr_and_ssim(passed.picture, example["x_start"])
            | _compute_latent_mean_and_square(passed)
        )

    def digest(self, means: dict[str, Tensor]) -> dict[str, float]:
        """Returns latent_std, the standard deviation of latents over all held-out samples, positions and channels, and
        scaling_factor, 1 / latent_std, which brings latents to unit variance.
        """
        std = compute_latent_std(means)
        return {"latent_std": std, "scaling_factor": 1 / std}

    def reconstruct(self, nets: Nets, example: Example) -> list[Tensor]:
        """Returns two reconstructions, (B, C, H, W) each: from a sample of the posterior, and from its mean."""
        passed = self._run_network(nets, example)
        return [passed.picture, nets["autoencoder"].decode(passed.mean)]

    def _run_network(self, nets: Nets, example: Example) -> Pass:
        return nets["autoencoder"](example["x_start"], rng.normal(example["key"], "latent", self.latent_shape))

    def compute_distance(self, nets: Nets, out: Tensor, example: Example) -> Terms:
        x = example["x_start"]
        return {
            "recon": losses.compute_mean_error(self.kl.reconstruction, out, x)
        } | self.picture_loss.measure_perceptual_distance(out, x)

    def _weight_kl(self, kl: Tensor) -> Tensor:
        return self.kl.kl_weight * kl / self.values

    @torch.no_grad()
    def codes(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """Returns the mean and standard deviation of the posterior, {"latent_mean", "latent_std"}, float32 (B, c, h, w)
        each.
        """
        mean, log_variance = nets["autoencoder"].encode(example["x_start"])
        return {"latent_mean": mean, "latent_std": torch.exp(0.5 * log_variance)}

    @torch.no_grad()
    def decode(self, nets: Nets, codes: Tensor) -> Tensor:
        return nets["autoencoder"].decode(codes).clamp(-1, 1)

    def identity(self, nets: Nets) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the config and weights by name that an AutoencoderKL with these weights has. So the hash of an
        exported one is that of the trained one.
        """
        return read_encoding_config_and_weights(nets["autoencoder"])

    def require_expressible(self) -> None:
        """Does nothing: AutoencoderKL can express every choice of model.kl."""

    def blocks(self) -> tuple[type[nn.Module], ...]:
        return kl.list_block_classes()


def compute_latent_std(means: dict[str, Tensor]) -> float:
    """Returns the standard deviation of latents over all samples, positions and channels. `means` has the averages over
    all samples of latent_mean and latent_square, (c,) each, see `_compute_latent_mean_and_square`.
    """
    variance = means["latent_square"].double().mean() - means["latent_mean"].double().mean().square()
    return variance.sqrt().item()


def _compute_kl_to_normal(passed: Pass) -> Tensor:
    """Returns the KL divergence of the posterior from the standard normal, in nats, summed over a sample's latents:
    (B,).
    """
    mean, log_variance = passed.mean, passed.log_variance
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).flatten(1).sum(1)


def _compute_latent_mean_and_square(passed: Pass) -> Terms:
    """Returns latent_mean and latent_square, (B, c) each: the means over positions of the expected value and the
    expected square of the latents. Both follow from the posterior's moments; nothing is drawn.
    """
    square = passed.mean.square() + passed.log_variance.exp()
    return {"latent_mean": passed.mean.mean((2, 3)), "latent_square": square.mean((2, 3))}
