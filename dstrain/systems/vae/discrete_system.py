"""The discrete VAE as a system: tokens relaxed at a falling temperature (Ramesh et al. 2021, DALL-E, and
DALLE-pytorch), or vectors that are rounded to tokens.

All randomness is drawn from the samples' keys, under the name gumbel.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dstrain.nn.measures import compute_perplexity_and_unused_share, measure_psnr_and_ssim, measure_token_shares
from dstrain.nn.quantize import compute_kl_to_uniform, draw_gumbel_noise
from dstrain.systems.base import Example, Nets, Terms
from dstrain.systems.vae import losses
from dstrain.systems.vae.config import Config
from dstrain.systems.vae.discrete import (
    DiscreteVAE,
    Down,
    RelaxedOutput,
    ResBlock,
    RoundedOutput,
    Up,
    get_default_normalization,
)
from dstrain.systems.vae.schedules import compute_kl_weight, compute_temperature, get_final_temperature
from dstrain.systems.vae.system import AutoencoderSystem


class DiscreteSystem(AutoencoderSystem):
    remedies = {  # noqa: RUF012 (a table)
        "discriminator": (
            (r"main\.0\.", "channels and discrete.discriminator.base_channels"),
            (r"", "discrete.discriminator.base_channels and n_layers"),
        ),
        "autoencoder": (
            (r"^codebook", "discrete.num_tokens, discrete.codebook_dim and discrete.quantizer"),
            (r"^quantizer", "discrete.quantizer, levels, num_tokens, codebook_dim and hidden_dim"),
            (r"\.net\.", "discrete.num_resnet_blocks, num_layers and hidden_dim"),
            (r"", "discrete.num_layers, num_resnet_blocks, hidden_dim, num_tokens, codebook_dim and channels"),
        ),
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.discrete, self.relaxed = config.discrete, config.discrete.quantizer == "gumbel"
        self.codebook_size = self.discrete.num_tokens
        self.latent_shape = (self.codebook_size, self.side, self.side)

    def build_autoencoder(self) -> nn.Module:
        """Builds the network of the discrete VAE that the config describes."""
        discrete = self.discrete
        return DiscreteVAE(
            self.config.image_size,
            discrete.num_tokens,
            discrete.codebook_dim,
            discrete.num_layers,
            discrete.num_resnet_blocks,
            discrete.hidden_dim,
            self.config.channels,
            quantizer=discrete.quantizer,
            levels=discrete.levels or (),
            sampling=discrete.sampling,
            logit_laplace=discrete.reconstruction == "logit_laplace",
            normalization=discrete.normalization,
        )

    def decode_and_compute_code_loss(self, nets: Nets, example: Example) -> tuple[Tensor, Terms, Tensor]:
        """Runs the network. Returns three values:

        output  the decoder's output (B, C or 2C, H, W).
        terms   the terms of the tokens by name, (B,) each, see `_compute_code_terms`.
        loss    the tokens' part of the loss, (B,). With the quantizer gumbel and kl_form=legacy it is multiplied by B.
        """
        outputs = self._run_network(nets, example)
        terms, coding = self._compute_code_terms(outputs, example)
        if self.relaxed and self.discrete.kl_form == "legacy":  # makes the mean over samples a sum over the micro-batch
            coding = len(coding) * coding
        return outputs.out, terms, coding

    @torch.no_grad()
    def evaluate(self, nets: Nets, example: Example) -> Terms:
        """Returns terms of held-out images, at the final temperature and KL weight:

        loss        (B,), and the terms of the reconstruction and the tokens, (B,) each.
        psnr, ssim  (B,), of the image that is decoded from the tokens (with gumbel from the most likely ones).
        usage       (B, K), the share of each of the K tokens.
        """
        outputs = self._run_network(nets, example)
        terms, coding = self._compute_code_terms(outputs, example)
        terms |= self.compute_reconstruction_terms(nets, outputs.out, example)
        tokens, loss = self._get_tokens(outputs), self.picture_loss.compute_reconstruction_loss(terms) + coding
        usage = measure_token_shares(tokens, self.codebook_size)
        return (
            terms
            | {"loss": loss}
            | measure_psnr_and_ssim(self.decode(nets, tokens), example["x_start"])
            | {"usage": usage}
        )

    def compute_figures(self, means: dict[str, Tensor]) -> dict[str, float]:
        """Returns two figures over all held-out samples: `perplexity` of the codebook, from 1 to K, and `dead_tokens`,
        the share of tokens that never occur.
        """
        return dict(zip(("perplexity", "dead_tokens"), compute_perplexity_and_unused_share(means["usage"])))

    def make_reconstructions(self, nets: Nets, example: Example) -> list[Tensor]:
        """Returns a list of reconstructions, (B, C, H, W) each, in [-1, 1]. With gumbel two: from relaxed tokens at the
        final temperature, and from the most likely tokens. With other quantizers one, from the tokens.
        """
        outputs = self._run_network(nets, example)
        relaxed = [self.convert_to_picture(nets, outputs.out).clamp(-1, 1)] if self.relaxed else []
        return [*relaxed, self.decode(nets, self._get_tokens(outputs))]

    def _run_network(self, nets: Nets, example: Example) -> RelaxedOutput | RoundedOutput:
        """Returns the network's outputs for the example's images. With gumbel, the noise is drawn from the samples'
        keys.
        """
        x = (example["x_start"] + 1) / 2
        if not self.relaxed:
            return nets["autoencoder"](x)
        noise = draw_gumbel_noise(example["key"], "gumbel", self.latent_shape)
        return nets["autoencoder"](x, noise, self._compute_temperature_and_kl_weight(example)[0])

    def _compute_temperature_and_kl_weight(self, example: Example) -> tuple[Tensor, Tensor]:
        """Returns the temperature and the KL weight of each sample, (B,) each, at example["step"]; if the example has
        no step, as held-out data, the final values of both schedules.
        """
        discrete = self.discrete
        if "step" in example:
            return (
                compute_temperature(discrete.temperature, example["step"]),
                compute_kl_weight(discrete.kl_weight, discrete.kl_warmup, example["step"]),
            )
        return tuple(
            torch.full_like(example["x_start"][:, 0, 0, 0], value)
            for value in (get_final_temperature(discrete.temperature), discrete.kl_weight)
        )

    def _compute_code_terms(self, outputs: RelaxedOutput | RoundedOutput, example: Example) -> tuple[Terms, Tensor]:
        """Returns the terms of the tokens by name, (B,) each, and their part of the loss, (B,). The terms by quantizer:

        gumbel  kl, the divergence from a uniform distribution in nats, summed over a sample; kl_weight; temperature.
        cosine  commitment and codebook, squared distances between the vectors and their codebook entries.
        fsq     none.
        """
        if self.relaxed:
            temperature, weight = self._compute_temperature_and_kl_weight(example)
            kl = compute_kl_to_uniform(outputs.logits)
            unit = (
                1 if self.discrete.kl_form == "legacy" else self.values
            )  # legacy does not divide by the values of an image
            return {"kl": kl, "kl_weight": weight, "temperature": temperature}, weight * kl / unit
        terms = (
            {} if self.discrete.quantizer == "fsq" else {"commitment": outputs.commitment, "codebook": outputs.codebook}
        )
        return terms, self.discrete.commitment_weight * outputs.commitment + outputs.codebook

    def _get_tokens(self, outputs: RelaxedOutput | RoundedOutput) -> Tensor:
        """Returns the tokens, int64 (B, h, w), of a forward pass; with gumbel the most likely ones."""
        return outputs.logits.argmax(1) if self.relaxed else outputs.tokens

    def compute_reconstruction_terms(self, nets: Nets, decoder_output: Tensor, example: Example) -> Terms:
        """Returns `recon`, the reconstruction error (B,), and, if the config has a perceptual loss, `perceptual`, (B,),
        of the decoder's output.
        """
        x, kind = (example["x_start"] + 1) / 2, self.discrete.reconstruction
        recon = (
            losses.compute_logit_laplace_loss(decoder_output, x)
            if kind == "logit_laplace"
            else losses.compute_mean_error(kind, decoder_output, nets["autoencoder"].normalize.normalize(x))
        )
        if not self.picture_loss.perceives:
            return {"recon": recon}
        return {"recon": recon} | self.picture_loss.measure_perceptual_distance(
            self.convert_to_picture(nets, decoder_output), example["x_start"]
        )

    def convert_to_picture(self, nets: Nets, decoder_output: Tensor) -> Tensor:
        """Converts the decoder's output (B, C or 2C, H, W) to pictures (B, C, H, W) in about [-1, 1]."""
        return 2 * nets["autoencoder"].convert_to_pixels(decoder_output) - 1

    def get_last_decoder_layer(self, nets: Nets) -> nn.Conv2d:
        """Returns the decoder's last convolution, whose output is the decoder's."""
        return nets["autoencoder"].decoder[-1]

    @torch.no_grad()
    def compute_codes(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """Encodes the example's images: {"tokens": int64 (B, h, w)}, with gumbel the most likely ones."""
        return {"tokens": nets["autoencoder"].encode((example["x_start"] + 1) / 2)}

    @torch.no_grad()
    def decode(self, nets: Nets, codes: Tensor) -> Tensor:
        """Decodes tokens int64 (B, h, w) to images (B, C, H, W) in [-1, 1]."""
        return 2 * nets["autoencoder"].decode(codes) - 1

    def describe_identity(self, nets: Nets) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns all that the tokens of an image depend on: the architecture with its normalization, and the weights
        by name.
        """
        names = ("num_tokens", "codebook_dim", "num_layers", "num_resnet_blocks", "hidden_dim")
        architecture = {name: getattr(self.discrete, name) for name in names} | {
            "channels": self.config.channels,
            "normalization": self.discrete.normalization or get_default_normalization(self.config.channels),
        }
        if not self.relaxed:
            architecture |= {"quantizer": self.discrete.quantizer, "levels": list(self.discrete.levels or ())}
        return architecture, nets["autoencoder"].state_dict()

    def list_block_classes(self) -> tuple[type[nn.Module], ...]:
        """Returns the classes of the network's repeated layers."""
        return (Down, Up, ResBlock) if self.discrete.num_resnet_blocks else (Down, Up)
