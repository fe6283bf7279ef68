"""The KL autoencoder as a system: Rombach et al. 2022 (LDM).

All randomness is drawn from the samples' keys, under the name latent.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dstrain import rng
from dstrain.encoders.autoencoder import get_config_and_weights_to_hash
from dstrain.nn.measures import measure_psnr_and_ssim
from dstrain.systems.base import Example, Nets, Terms
from dstrain.systems.vae import kl, losses
from dstrain.systems.vae.config import Config
from dstrain.systems.vae.kl import KLAutoencoder, KLOutput
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
        """Builds the KL autoencoder that the config describes."""
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

    def decode_and_compute_code_loss(self, nets: Nets, example: Example) -> tuple[Tensor, Terms, Tensor]:
        """Runs the network. Returns the picture (B, C, H, W), {"kl": (B,), in nats, summed over a sample's latents},
        and the KL's part of the loss, (B,).
        """
        outputs = self._run_network(nets, example)
        kl = _compute_kl_to_normal(outputs)
        return outputs.picture, {"kl": kl}, self._compute_kl_loss(kl)

    def convert_to_picture(self, nets: Nets, decoder_output: Tensor) -> Tensor:
        """Returns the decoder's output unchanged: it is the picture already, in about [-1, 1]."""
        return decoder_output

    def get_last_decoder_layer(self, nets: Nets) -> nn.Conv2d:
        """Returns the decoder's last convolution, whose output is the decoder's."""
        return nets["autoencoder"].decoder.conv_out

    @torch.no_grad()
    def evaluate(self, nets: Nets, example: Example) -> Terms:
        """Returns terms of held-out images:

        loss                        (B,), and the terms that it consists of, (B,) each; the discriminator has no part in
                                    it.
        psnr, ssim                  (B,), of the reconstruction.
        latent_mean, latent_square  (B, c), by channel, see `_compute_latent_mean_and_square`.
        """
        outputs = self._run_network(nets, example)
        terms = {"kl": _compute_kl_to_normal(outputs)} | self.compute_reconstruction_terms(
            nets, outputs.picture, example
        )
        loss = self.picture_loss.compute_reconstruction_loss(terms) + self._compute_kl_loss(terms["kl"])
        return (
            terms
            | {"loss": loss}
            | measure_psnr_and_ssim(outputs.picture, example["x_start"])
            | _compute_latent_mean_and_square(outputs)
        )

    def compute_figures(self, means: dict[str, Tensor]) -> dict[str, float]:
        """Returns latent_std, the standard deviation of all latents of all held-out samples, and scaling_factor, 1 /
        latent_std, by which latents get unit variance.
        """
        std = compute_latent_std(means)
        return {"latent_std": std, "scaling_factor": 1 / std}

    def make_reconstructions(self, nets: Nets, example: Example) -> list[Tensor]:
        """Returns two reconstructions, (B, C, H, W) each, in about [-1, 1]: from a draw from the posterior, and from
        its mean.
        """
        outputs = self._run_network(nets, example)
        return [outputs.picture, nets["autoencoder"].decode(outputs.mean)]

    def _run_network(self, nets: Nets, example: Example) -> KLOutput:
        """Returns the network's outputs for the example's images, with latents drawn from the posterior by the samples'
        keys.
        """
        return nets["autoencoder"](example["x_start"], rng.normal(example["key"], "latent", self.latent_shape))

    def compute_reconstruction_terms(self, nets: Nets, decoder_output: Tensor, example: Example) -> Terms:
        """Returns `recon`, the reconstruction error (B,), and, if the config has a perceptual loss, `perceptual`, (B,),
        of the decoder's output.
        """
        x = example["x_start"]
        return {
            "recon": losses.compute_mean_error(self.kl.reconstruction, decoder_output, x)
        } | self.picture_loss.measure_perceptual_distance(decoder_output, x)

    def _compute_kl_loss(self, kl: Tensor) -> Tensor:
        """Returns the KL's part of the loss, (B,): kl_weight * kl / number of values of an image. `kl` (B,)
        is in nats.
        """
        return self.kl.kl_weight * kl / self.values

    @torch.no_grad()
    def compute_codes(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """Returns the mean and the standard deviation of the posterior: {"latent_mean", "latent_std": float32 (B, c, h,
        w)}.
        """
        mean, log_variance = nets["autoencoder"].encode(example["x_start"])
        return {"latent_mean": mean, "latent_std": torch.exp(0.5 * log_variance)}

    @torch.no_grad()
    def decode(self, nets: Nets, codes: Tensor) -> Tensor:
        """Decodes latents (B, c, h, w) to images (B, C, H, W) in [-1, 1]."""
        return nets["autoencoder"].decode(codes).clamp(-1, 1)

    def describe_identity(self, nets: Nets) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the config and the weights by name, as an exported AutoencoderKL has them. So the hash of the
        exported network equals that of the trained one.
        """
        return get_config_and_weights_to_hash(nets["autoencoder"])

    def require_expressible_in_diffusers(self) -> None:
        """Does nothing, since diffusers' AutoencoderKL can express every choice of model.kl."""

    def list_block_classes(self) -> tuple[type[nn.Module], ...]:
        """Returns diffusers' classes of the network's blocks."""
        return kl.get_block_classes()


def compute_latent_std(means: dict[str, Tensor]) -> float:
    """Returns the standard deviation of all latents of all samples. `means` holds latent_mean and latent_square of
    KLSystem.evaluate, averaged over samples, (c,) each.
    """
    variance = means["latent_square"].double().mean() - means["latent_mean"].double().mean().square()
    return variance.sqrt().item()


def _compute_kl_to_normal(outputs: KLOutput) -> Tensor:
    """Returns the KL divergence of each sample's posterior from the standard normal, in nats, summed over latents:
    (B,).
    """
    mean, log_variance = outputs.mean, outputs.log_variance
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).flatten(1).sum(1)


def _compute_latent_mean_and_square(outputs: KLOutput) -> Terms:
    """Returns latent_mean and latent_square, (B, c) each: the expected latent and its expected square under the
    posterior, averaged over positions.
    """
    square = outputs.mean.square() + outputs.log_variance.exp()
    return {"latent_mean": outputs.mean.mean((2, 3)), "latent_square": square.mean((2, 3))}
