"""Computes the loss on a first stage's pictures beside the reconstruction loss: a perceptual distance and a
discriminator's critique.

The two engines of an adversarial run stay apart: an engine hooks the outputs of its network, so no graph may contain
two. The graph of the first stage's loss therefore ends at its picture. The gradients with respect to the picture, from
the reconstruction and from the discriminator, are computed on a detached copy, and the sum of picture * gradient is
minimized. The discriminator learns from that same picture, detached, which the first stage's turn stores in the
example: a second pass would cost as much again, and after an update the last micro-batch would have another picture
than those before.
"""

import os
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from dstrain import rng
from dstrain.nn import adversarial, perceptual
from dstrain.nn.perceptual import PerceptualDistance
from dstrain.recipe import ConfigError, Section, format_value

Nets = Mapping[str, Callable[..., Tensor]]  # part -> its engine, or its bare network
Loss = Callable[[Nets, dict[str, Tensor]], dict[str, Tensor]]
_MOST = 1e4  # VQGAN's bound of the critique's weight at the last layer


class Perceptual(Section):
    path: str
    """A folder or file with torchvision's VGG-16 and the heads of LPIPS 0.1, or builtin:fashion: a small classifier."""
    weight: float = Field(1.0, ge=0)
    """Of LPIPS, beside the reconstruction (of a clip: of one random real frame); 0 leaves it out."""


class Discriminator(Section):
    start: int = Field(50_000, ge=0)
    """First optimizer step at which it learns and is learned from."""
    weight: float = Field(0.5, ge=0)
    """Length of the adversarial gradient / length of the reconstruction's, by sample, for pictures of any size."""
    n_layers: int = Field(3, ge=1, le=16)
    """Halvings of the side; a patch is about 2 ** (n_layers + 2) pixels wide (3: 70)."""
    base_channels: int = Field(64, ge=1)
    """Width of the first layer."""


class Penalty(Section):
    """R1 (Mescheder et al. 2018): half the weight times the discriminator's squared gradient at real pictures."""

    form: Literal["approximate", "exact"] = "approximate"
    """approximate: from one random step away, anywhere. exact: by double backward, where no weights are scattered."""
    weight: float = Field(1.0, ge=0)
    """Of the squared gradient; times `every`, since it stands for the steps in between."""
    every: int = Field(4, ge=1)
    """Steps from one penalty to the next."""
    sigma: float = Field(0.1, gt=0)
    """approximate: length of the step, in standard deviations of a pixel in [-1, 1]."""


def require_suitable_picture_shape(
    judge: Perceptual | None, discriminator: Discriminator | None, shape: tuple[int, int, int], prefix: str = ""
) -> None:
    """Raises ConfigError if the perceptual distance (section `judge`) or the discriminator cannot take pictures of
    `shape` (C, H, W). A section that is None is not checked. `prefix` is put before the keys in the message.
    """
    channels, height, width = shape
    if judge and channels == 4:
        raise ConfigError(f"{prefix}perceptual sees 1 or 3 channels, channels is 4: leave it out, or take RGB")
    if judge and min(height, width) < 16:
        raise ConfigError(f"{prefix}perceptual halves the side four times, image_size is {height} x {width}: take 16")
    if discriminator and min(height, width) < (least := adversarial.compute_min_picture_side(discriminator.n_layers)):
        raise ConfigError(
            f"{prefix}discriminator.n_layers {discriminator.n_layers} needs pictures of {least} pixels, "
            f"image_size is {height} x {width}: take fewer layers"
        )


def describe_missing_perceptual_weights(judge: Perceptual | None, key: str) -> list[str]:
    """Returns [one error message] if the recipe uses a perceptual distance whose weights are not on this machine; []
    otherwise. `judge` is the recipe's section of the distance or None, and `key` the name of this section, for the
    message.
    """
    if judge is None or not judge.weight or judge.path == perceptual.BUILTIN:
        return []
    if judge.path and os.path.exists(os.path.expanduser(judge.path)):
        return []
    return [f"{key}.path={format_value(judge.path)}: no weights are there: {perceptual.REMEDY}"]


class LastLayer(NamedTuple):
    """Describes a first stage's last convolution, which has stride 1 and keeps the size of its input."""

    entered: Tensor  # its input, without a graph: (B, c, H, W)
    side: int  # of its filters


class PictureLoss:
    """Computes the perceptual and the adversarial loss of a first stage. If a section is None, its loss is left out.

    Attributes: perceives, whether there is a perceptual term; adversarial, whether there is a discriminator and, after
    `begin_step_and_list_parts`, whether it learns at that step.
    """

    def __init__(
        self, judge: Perceptual | None, discriminator: Discriminator | None, penalty: Penalty | None = None
    ) -> None:
        self.judge, self.discriminator, self.penalty = judge, discriminator, penalty
        self.perceives = judge is not None and judge.weight > 0
        self.adversarial, self._penalized = discriminator is not None, penalty is not None
        self.network: PerceptualDistance | None = None  # loaded where it is first needed

    def collect_part_and_discriminator_losses(self, part: str, part_loss: Loss) -> dict[str, Loss]:
        """Returns the loss function of each part: {part: part_loss} for the first stage and, if there is a
        discriminator, {"discriminator": compute_discriminator_loss}.
        """
        return {part: part_loss} | ({"discriminator": self.compute_discriminator_loss} if self.discriminator else {})

    def build_networks(self, channels: int) -> dict[str, nn.Module]:
        """Returns {"discriminator": a new discriminator for pictures of `channels` channels}; {} if the recipe has
        none.
        """
        if self.discriminator is None:
            return {}
        return {
            "discriminator": adversarial.PatchDiscriminator(
                channels, self.discriminator.base_channels, self.discriminator.n_layers
            )
        }

    def begin_step_and_list_parts(self, part: str, step: int) -> tuple[str, ...]:
        """Returns the names of the parts that learn at `step`, in order: `part`, the first stage, and from step
        discriminator.start on also "discriminator". Also stores, for the losses of this step, whether the discriminator
        learns and whether an R1 penalty is due.
        """
        # Remembered here, where the host knows the step: reading example["step"] would wait for the device.
        self.adversarial = self.discriminator is not None and step >= self.discriminator.start
        self._penalized = self.adversarial and self.penalty is not None and step % self.penalty.every == 0
        return (part, "discriminator") if self.adversarial else (part,)

    def measure_perceptual_distance(self, picture: Tensor, truth: Tensor) -> dict[str, Tensor]:
        """Returns {"perceptual": distance (B,)} between pictures and their truth, (B, C, H, W) each; {} if the recipe
        has no such loss. The first call loads the network, which is moved to the pictures' device.
        """
        if not self.perceives:
            return {}
        network = self._load_perceptual_distance()
        if next(network.parameters()).device != picture.device:  # also where a recipe's shapes are checked on meta
            network.to(picture.device)
        return {"perceptual": network(picture, truth)}

    def list_frozen_networks(self) -> tuple[nn.Module, ...]:
        """Returns (the frozen network of the perceptual distance,); () if the recipe has no such loss, or the network's
        weights are not on this machine.
        """
        return (
            (self._load_perceptual_distance(),)
            if self.perceives and not describe_missing_perceptual_weights(self.judge, "")
            else ()
        )

    def _load_perceptual_distance(self) -> PerceptualDistance:
        """Returns the network of the perceptual distance, which is loaded at the first call."""
        if self.network is None:
            self.network = perceptual.load_perceptual_distance(self.judge.path)
        return self.network

    def compute_reconstruction_loss(self, terms: Mapping[str, Tensor]) -> Tensor:
        """Returns the loss (B,): the term "recon", plus the weighted term "perceptual" if the recipe has this loss."""
        return terms["recon"] + self.judge.weight * terms["perceptual"] if self.perceives else terms["recon"]

    def compute_critique_terms_and_gradient(
        self,
        nets: Nets,
        example: dict[str, Tensor],
        picture: Tensor,
        truth: Tensor,
        reconstruction_gradient: Tensor,
        out: Tensor | None = None,
        last_layer: LastLayer | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Computes the adversarial loss of a first stage, balanced with its reconstruction loss. Stores `picture` and
        `truth` in `example` for the discriminator's turn.

        picture     the reconstruction that the discriminator judges, computed from `out`.
        truth       the original.
        reconstruction_gradient
                    the gradient of the reconstruction loss with respect to `out`.
        out         the decoder's output; None: `picture` itself.
        last_layer  the layer that computed `out`: the two gradients are balanced at its filters. None: they are
                    balanced at `out`.

        Returns (terms, gradient): the gradient of critique_weight * critique with respect to `out`, and the terms, (B,)
        each:

        critique         minus the mean logit.
        critique_weight  the weight that balances the critique.
        critique_share   length of the weighted critique's gradient / length of the reconstruction loss's gradient.
        """
        critique = -nets["discriminator"](picture).flatten(1).mean(1)
        of_critique = adversarial.compute_picture_gradient(critique, picture if out is None else out)
        if last_layer is None:
            factor, share = adversarial.compute_balance_factor_and_ratio(reconstruction_gradient, of_critique)
        else:
            factor, share = adversarial.compute_balance_factor_and_ratio(
                *(
                    adversarial.compute_filter_gradient(last_layer.entered, of_output, last_layer.side)
                    for of_output in (reconstruction_gradient, of_critique)
                ),
                max_factor=_MOST,
            )
        weight = self.discriminator.weight * factor
        example["original"], example["reconstruction"] = truth, picture.detach()
        terms = {
            "critique": critique.detach().float(),
            "critique_weight": weight,
            "critique_share": self.discriminator.weight * share,
        }
        return terms, weight.view(-1, 1, 1, 1) * of_critique

    def compute_discriminator_loss(self, nets: Nets, example: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the discriminator's terms for the originals and reconstructions that the first stage's turn has
        stored in `example`:

        loss        a scalar with gradient, the hinge loss and, in steps in which one is due, the R1 penalty.
        real, fake  (B,), its mean logits of originals and of reconstructions.
        slope       (B,), the squared slope at the originals; only in steps with a penalty.
        """
        assert "reconstruction" in example, "the first stage's turn comes before the discriminator's"
        truth, network, penalty = example["original"], nets["discriminator"], self.penalty
        both, count = torch.cat((truth, example["reconstruction"])), len(truth)
        if not self._penalized:
            logits = network(both)
        elif penalty.form == "exact":
            logits, slope = network(both, count)
        else:
            step = penalty.sigma * rng.normal(example["key"], "penalty", tuple(truth.shape[1:]))
            logits = network(torch.cat((both, truth + step)))
            slope = adversarial.estimate_squared_slope(logits[:count], logits[2 * count :], penalty.sigma)
        real, fake = logits[:count], logits[count : 2 * count]
        loss = adversarial.compute_hinge_loss(real, fake)
        terms = {name: logit.detach().flatten(1).mean(1).float() for name, logit in (("real", real), ("fake", fake))}
        if self._penalized:
            loss = loss + penalty.every * penalty.weight / 2 * slope
            terms["slope"] = slope.detach().float()
        return terms | {"loss": loss.mean().float()}


def make_loss_from_value_and_gradient(value: Tensor, gradient_source: Tensor) -> Tensor:
    """Returns a scalar loss whose value is the mean of `value` (B,), and whose gradient is that of the mean of
    `gradient_source` (B,).
    """
    return (value.detach() + (gradient_source - gradient_source.detach())).mean()
