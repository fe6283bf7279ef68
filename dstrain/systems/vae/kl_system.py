"""The KL autoencoder as a system: Rombach et al. 2022 (LDM), with a perceptual distance and an adversary where wanted.

Both engines of an adversarial run stay apart: an engine hooks what its network gives out, so no graph may hold two. The
autoencoder's loss therefore ends at its picture: the gradients that it receives there, from the reconstruction and from
the discriminator, are taken on a detached copy, and the sum of picture * gradient is what descends. The discriminator
learns from that same picture, detached, which the first turn leaves in the example: a second pass would cost as much
again, and after an update give another picture in the last micro-batch than in those before.

All randomness is drawn from the samples' keys by name: latent.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dstrain import rng
from dstrain.encoders.autoencoder import identity
from dstrain.nn import adversarial
from dstrain.nn.adversarial import PatchDiscriminator
from dstrain.nn.measures import likeness
from dstrain.nn.perceptual import Perceptual
from dstrain.systems.base import Example, Nets, Terms
from dstrain.systems.vae import kl, losses
from dstrain.systems.vae.config import Config
from dstrain.systems.vae.kl import KLAutoencoder, Pass
from dstrain.systems.vae.system import AutoencoderSystem


class KLSystem(AutoencoderSystem):
    """The part `autoencoder` and, where the config has one, the part `discriminator`, which waits for its start."""

    encodes = True

    remedies = {"discriminator": (
        (r"main\.0\.", "channels and kl.discriminator.base_channels"),
        (r"", "kl.discriminator.base_channels and n_layers"),
    ), "autoencoder": (
        (r"^codebook", "model.discrete (the file is of a discrete VAE) or"),
        (r"conv_in|conv_out", "channels, kl.latent_channels and kl.block_out_channels"),
        (r"quant_conv", "kl.latent_channels and kl.quant_conv"),
        (r"mid_block\.attentions", "kl.mid_block_add_attention and kl.block_out_channels"),
        (r"", "kl.block_out_channels and kl.layers_per_block"),
    )}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.kl = config.kl
        self.parts = {"autoencoder": self.learn}
        if self.kl.discriminator:
            self.parts["discriminator"] = self.discriminate
        self._perceptual: Perceptual | None = None                        # loaded where it is first needed
        self._adversarial = self.kl.discriminator is not None             # at the step that `turns` was asked for
        side = config.image_size // config.factor
        self.latent_shape = (self.kl.latent_channels, side, side)

    def networks(self) -> dict[str, nn.Module]:
        config = self.kl
        networks: dict[str, nn.Module] = {"autoencoder": KLAutoencoder(
            self.config.channels, config.block_out_channels, config.layers_per_block, config.latent_channels,
            config.norm_num_groups, config.quant_conv, config.mid_block_add_attention)}
        if config.discriminator:
            networks["discriminator"] = PatchDiscriminator(
                self.config.channels, config.discriminator.base_channels, config.discriminator.n_layers)
        return networks

    # ------------------------------------------------------------------------------------------------------- training

    def turns(self, step: int) -> tuple[str, ...]:
        """The discriminator learns, and is learned from, from its start on."""
        # Kept from here, where the step is known to the host: a look at example["step"] would wait for the device.
        self._adversarial = self.kl.discriminator is not None and step >= self.kl.discriminator.start
        return ("autoencoder", "discriminator") if self._adversarial else ("autoencoder",)

    def learn(self, nets: Nets, example: Example) -> Terms:
        """Reconstruction and divergence (kl, in nats a sample); from the discriminator's start on its critique, too."""
        x = example["x_start"]
        passed = self._pass(nets, example)
        terms = {"kl": _divergence(passed)}
        if not self._adversarial:
            terms |= self._distance(passed.picture, x)
            terms["loss"] = self._bound(terms)
            return {name: term.detach() for name, term in terms.items()} | {"loss": terms["loss"].mean()}
        picture = passed.picture.detach().requires_grad_()
        terms |= self._distance(picture, x)
        terms["critique"] = -nets["discriminator"](picture).flatten(1).mean(1)
        of_distance = adversarial.gradient(self._sum(terms), picture)
        of_critique = adversarial.gradient(terms["critique"], picture)
        weight = adversarial.critique_weight(of_distance, of_critique, self.kl.discriminator.weight, self.values)
        pull = of_distance + weight.view(-1, 1, 1, 1) * of_critique
        descended = (passed.picture * pull).flatten(1).sum(1) + self._kl_share(terms["kl"])
        terms = {name: term.detach() for name, term in terms.items()} | {"critique_weight": weight}
        value = self._bound(terms) + weight * terms["critique"]
        example["reconstruction"] = passed.picture.detach()
        return terms | {"loss": (value + (descended - descended.detach())).mean()}

    def discriminate(self, nets: Nets, example: Example) -> Terms:
        """The hinge loss on the originals and on what the autoencoder made of them in its turn; mean logits of both."""
        assert "reconstruction" in example, "the autoencoder's turn comes before the discriminator's"
        both = torch.cat((example["x_start"], example["reconstruction"]))
        real, fake = nets["discriminator"](both).chunk(2)
        return {"loss": adversarial.hinge(real, fake).mean(), "real": real.detach().flatten(1).mean(1),
                "fake": fake.detach().flatten(1).mean(1)}

    @torch.no_grad()
    def evaluate(self, nets: Nets, example: Example) -> Terms:
        """Terms without the adversary; psnr and ssim of the reconstruction; moments of posterior samples by channel."""
        passed = self._pass(nets, example)
        terms = {"kl": _divergence(passed)} | self._distance(passed.picture, example["x_start"])
        return terms | {"loss": self._bound(terms)} | likeness(passed.picture, example["x_start"]) | _moments(passed)

    def digest(self, means: dict[str, Tensor]) -> dict[str, float]:
        """latent_std over all samples and channels, and scaling_factor, 1 / latent_std, which gives unit variance."""
        std = latent_std(means)
        return {"latent_std": std, "scaling_factor": 1 / std}

    def reconstructions(self, nets: Nets, example: Example) -> list[Tensor]:
        """By a sample of the posterior, and by its mean."""
        passed = self._pass(nets, example)
        return [passed.picture, nets["autoencoder"].decode(passed.mean)]

    def _pass(self, nets: Nets, example: Example) -> Pass:
        return nets["autoencoder"](example["x_start"], rng.normal(example["key"], "latent", self.latent_shape))

    def _distance(self, picture: Tensor, x: Tensor) -> Terms:
        terms = {"recon": getattr(losses, self.kl.reconstruction)(picture, x)}
        if self.kl.perceives:
            if self._perceptual is None:          # encoding and exporting a finished run do without
                self._perceptual = Perceptual(self.kl.perceptual.path).to(x.device)
            terms["perceptual"] = self._perceptual(picture, x)
        return terms

    def _sum(self, terms: Terms) -> Tensor:
        """What a picture costs: (B,)."""
        if self.kl.perceives:
            return terms["recon"] + self.kl.perceptual.weight * terms["perceptual"]
        return terms["recon"]

    def _kl_share(self, nats: Tensor) -> Tensor:
        return self.kl.kl_weight * nats / self.values

    def _bound(self, terms: Terms) -> Tensor:
        return self._sum(terms) + self._kl_share(terms["kl"])

    # ------------------------------------------------------------------------------------------------------------ facts

    @torch.no_grad()
    def codes(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """latent_mean and latent_std of the posterior, float32 (B, c, h, w) each."""
        mean, log_variance = nets["autoencoder"].encode(example["x_start"])
        return {"latent_mean": mean, "latent_std": torch.exp(0.5 * log_variance)}

    @torch.no_grad()
    def decode(self, nets: Nets, codes: Tensor) -> Tensor:
        return nets["autoencoder"].decode(codes).clamp(-1, 1)

    def identity(self, nets: Nets) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """As of the AutoencoderKL that has these weights, so that an exported one is the same first stage."""
        return identity(nets["autoencoder"])

    def blocks(self) -> tuple[type[nn.Module], ...]:
        return kl.blocks()


def latent_std(means: dict[str, Tensor]) -> float:
    """The standard deviation over all places and channels, from the means over data of `_moments`, (c,) each."""
    variance = means["latent_square"].double().mean() - means["latent_mean"].double().mean().square()
    return variance.sqrt().item()


def _divergence(passed: Pass) -> Tensor:
    """KL of the posterior from the standard normal, in nats, summed over the latents: (B,)."""
    mean, log_variance = passed.mean, passed.log_variance
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).flatten(1).sum(1)


def _moments(passed: Pass) -> Terms:
    """Of posterior samples, means over places: latent_mean and latent_square, (B, c) each; exact rather than drawn."""
    square = passed.mean.square() + passed.log_variance.exp()
    return {"latent_mean": passed.mean.mean((2, 3)), "latent_square": square.mean((2, 3))}
