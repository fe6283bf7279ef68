"""The discrete VAE as a system: relaxed tokens, annealed; Ramesh et al. 2021 (DALL-E) and DALLE-pytorch.

All randomness is drawn from the samples' keys by name: gumbel.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dstrain.nn.measures import codebook_usage, histogram, likeness
from dstrain.nn.quantize import gumbel, kl_to_uniform
from dstrain.systems.base import Example, Nets, Terms
from dstrain.systems.vae import losses
from dstrain.systems.vae.config import Config
from dstrain.systems.vae.discrete import DiscreteVAE, Down, Relaxed, ResBlock, Up, default_normalization
from dstrain.systems.vae.schedules import final_temperature, temperature_at, weight_at
from dstrain.systems.vae.system import AutoencoderSystem


class DiscreteSystem(AutoencoderSystem):
    """One part, `autoencoder`."""

    remedies = {"autoencoder": (
        (r"^codebook", "discrete.num_tokens and discrete.codebook_dim"),
        (r"\.net\.", "discrete.num_resnet_blocks, num_layers and hidden_dim"),
        (r"", "discrete.num_layers, num_resnet_blocks, hidden_dim, num_tokens, codebook_dim and channels"),
    )}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.parts = {"autoencoder": self.learn}
        self.discrete = config.discrete
        self.codebook_size = self.discrete.num_tokens
        self.latent_shape = (self.codebook_size, self.side, self.side)

    def networks(self) -> dict[str, nn.Module]:
        discrete = self.discrete
        return {"autoencoder": DiscreteVAE(
            self.config.image_size, discrete.num_tokens, discrete.codebook_dim, discrete.num_layers,
            discrete.num_resnet_blocks, discrete.hidden_dim, self.config.channels, sampling=discrete.sampling,
            logit_laplace=discrete.reconstruction == "logit_laplace", normalization=discrete.normalization)}

    def learn(self, nets: Nets, example: Example) -> Terms:
        """Reconstruction of one relaxed sample and the divergence of the tokens from uniform (kl, in nats a sample)."""
        terms, _ = self._terms(nets, example)
        loss = terms["loss"].mean()
        if self.discrete.kl_form == "legacy":     # the original divides by nothing: nats of the whole micro-batch
            loss = terms["recon"].mean() + (terms["kl_weight"] * terms["kl"]).sum()
        return {name: term.detach() for name, term in terms.items()} | {"loss": loss}

    @torch.no_grad()
    def evaluate(self, nets: Nets, example: Example) -> Terms:
        """Terms at the final temperature and weight; psnr and ssim by the likeliest tokens; their usage (B, K)."""
        terms, passed = self._terms(nets, example)
        tokens = passed.logits.argmax(1)
        usage = histogram(tokens, self.codebook_size)
        return terms | likeness(self.decode(nets, tokens), example["x_start"]) | {"usage": usage}

    def digest(self, means: dict[str, Tensor]) -> dict[str, float]:
        """perplexity of the codebook over all samples, and dead_tokens, the fraction that none of them used."""
        return dict(zip(("perplexity", "dead_tokens"), codebook_usage(means["usage"])))

    def reconstructions(self, nets: Nets, example: Example) -> list[Tensor]:
        """By a relaxed sample at the final temperature, and by the likeliest tokens."""
        network, passed = nets["autoencoder"], self._terms(nets, example)[1]
        return [2 * picture - 1 for picture in (network.pixels(passed.out), network.decode(passed.logits.argmax(1)))]

    def _terms(self, nets: Nets, example: Example) -> tuple[Terms, Relaxed]:
        """The terms by sample (B,), with their graph, and the pass that they are of."""
        discrete, x = self.discrete, (example["x_start"] + 1) / 2
        if "step" in example:
            temperature = temperature_at(discrete.temperature, example["step"])
            weight = weight_at(discrete.kl_weight, discrete.kl_warmup, example["step"])
        else:                                     # held-out data: the ends of both schedules
            temperature, weight = (torch.full_like(x[:, 0, 0, 0], value) for value in (
                final_temperature(discrete.temperature), discrete.kl_weight))
        passed = nets["autoencoder"](x, gumbel(example["key"], "gumbel", self.latent_shape), temperature)
        if discrete.reconstruction == "logit_laplace":
            recon = losses.logit_laplace(passed.out, x)
        else:
            recon = losses.error(discrete.reconstruction, passed.out, passed.target)
        kl = kl_to_uniform(passed.logits)
        # legacy weighs undivided nats; by sample that is a batch of one.
        unit = 1 if discrete.kl_form == "legacy" else self.values
        return {"loss": recon + weight * kl / unit, "recon": recon, "kl": kl, "kl_weight": weight,
                "temperature": temperature}, passed

    @torch.no_grad()
    def codes(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """tokens: the likeliest, int64 (B, h, w)."""
        return {"tokens": nets["autoencoder"].encode((example["x_start"] + 1) / 2)}

    @torch.no_grad()
    def decode(self, nets: Nets, codes: Tensor) -> Tensor:
        return 2 * nets["autoencoder"].decode(codes) - 1

    def identity(self, nets: Nets) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Architecture and normalization, and all weights."""
        names = ("num_tokens", "codebook_dim", "num_layers", "num_resnet_blocks", "hidden_dim")
        architecture = {name: getattr(self.discrete, name) for name in names} | {
            "channels": self.config.channels,
            "normalization": self.discrete.normalization or default_normalization(self.config.channels)}
        return architecture, nets["autoencoder"].state_dict()

    def blocks(self) -> tuple[type[nn.Module], ...]:
        return (Down, Up, ResBlock) if self.discrete.num_resnet_blocks else (Down, Up)
