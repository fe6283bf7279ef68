"""Computes the loss on a first stage's pictures beside the reconstruction loss: a perceptual distance and a
discriminator's critique.

The two engines of an adversarial run stay apart: an engine hooks the outputs of its network, so no graph may contain
two. The graph of the first stage's loss therefore ends at its picture. The gradients with respect to the picture, from
the reconstruction and from the discriminator, are computed on a detached copy, and the sum of picture * gradient is
minimized. The discriminator learns from that same picture, detached, which the first stage's turn stores in the
example: a second pass would cost as much again, and after an update the last micro-batch would have another picture
than those before.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from dstrain import rng
from dstrain.nn import adversarial, perceptual
from dstrain.nn.perceptual import Distance
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


def require_suitable_pictures(
    judge: Perceptual | None, discriminator: Discriminator | None, shape: tuple[int, int, int], prefix: str = ""
) -> None:
    """Raises ConfigError if the perceptual distance `judge` or the discriminator cannot take pictures of this shape (C,
    H, W). One that is None is not checked. The keys in the message begin with `prefix`.
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


def describe_missing_weights(judge: Perceptual | None, key: str) -> list[str]:
    """Returns a list with one message if the perceptual distance is used and its weights are not on this machine, else
    []. Called by a system's SystemConfig.conflicts. `key` is the recipe's section of the distance.
    """
    if judge is None or not judge.weight or judge.path == perceptual.BUILTIN:
        return []
    if judge.path and Path(judge.path).expanduser().exists():  # pathlib takes "" for the present folder
        return []
    return [f"{key}.path={format_value(judge.path)}: no weights are there: {perceptual.REMEDY}"]


class LastLayer(NamedTuple):
    """Describes a first stage's last convolution, which has stride 1 and keeps the size of its input."""

    entered: Tensor  # its input, without a graph: (B, c, H, W)
    side: int  # of its filters


class PictureLoss:
    """Computes the perceptual and the adversarial loss of a first stage. If a section is None, its loss is left out.

    Attributes: perceives, whether there is a perceptual term; adversarial, whether there is a discriminator and, after
    `list_turns`, whether it learns at that step.
    """

    def __init__(
        self, judge: Perceptual | None, discriminator: Discriminator | None, penalty: Penalty | None = None
    ) -> None:
        self.judge, self.discriminator, self.penalty = judge, discriminator, penalty
        self.perceives = judge is not None and judge.weight > 0
        self.adversarial, self._penalized = discriminator is not None, penalty is not None
        self.network: Distance | None = None  # loaded where it is first needed

    def list_part_losses(self, part: str, learn: Loss) -> dict[str, Loss]:
        """Returns the loss function of each part: `learn` for the first stage, whose name is `part`, and, if there is a
        discriminator, its own.
        """
        return {part: learn} | ({"discriminator": self.compute_discriminator_loss} if self.discriminator else {})

    def build_networks(self, channels: int) -> dict[str, nn.Module]:
        """Returns {"discriminator": a new discriminator of pictures with that many channels}; {} if there is none."""
        if self.discriminator is None:
            return {}
        return {
            "discriminator": adversarial.PatchDiscriminator(
                channels, self.discriminator.base_channels, self.discriminator.n_layers
            )
        }

    def list_turns(self, part: str, step: int) -> tuple[str, ...]:
        """Returns the parts that learn at `step`: the first stage and, from discriminator.start on, the discriminator.
        Also stores, for the losses of this step, whether the first stage learns from the discriminator, and whether a
        penalty is due.
        """
        # Remembered here, where the host knows the step: reading example["step"] would wait for the device.
        self.adversarial = self.discriminator is not None and step >= self.discriminator.start
        self._penalized = self.adversarial and self.penalty is not None and step % self.penalty.every == 0
        return (part, "discriminator") if self.adversarial else (part,)

    def compute_perceptual(self, picture: Tensor, truth: Tensor) -> dict[str, Tensor]:
        """Returns the term perceptual, the distance (B,) between pictures and their truth (B, C, H, W); {} if its
        weight is 0 or there is none. Loads the distance at the first call, and moves it to the pictures' device.
        """
        if not self.perceives:
            return {}
        network = self._load_distance()
        if next(network.parameters()).device != picture.device:  # also where a recipe's shapes are checked on meta
            network.to(picture.device)
        return {"perceptual": network(picture, truth)}

    def list_frozen(self) -> tuple[nn.Module, ...]:
        """Returns the frozen perceptual distance; () if it is not used, or its weights are not on this machine, since a
        finished run encodes and exports without it.
        """
        return (self._load_distance(),) if self.perceives and not describe_missing_weights(self.judge, "") else ()

    def _load_distance(self) -> Distance:
        if self.network is None:
            self.network = perceptual.load_distance(self.judge.path)
        return self.network

    def compute_reconstruction_loss(self, terms: Mapping[str, Tensor]) -> Tensor:
        """Returns the term recon, plus the weighted term perceptual if there is one: (B,)."""
        return terms["recon"] + self.judge.weight * terms["perceptual"] if self.perceives else terms["recon"]

    def compute_critique(
        self,
        nets: Nets,
        example: dict[str, Tensor],
        picture: Tensor,
        truth: Tensor,
        of_mean: Tensor,
        out: Tensor | None = None,
        last: LastLayer | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Lets the discriminator judge `picture`. Returns the terms critique, critique_weight and critique_share, (B,)
        each, and the gradient of critique_weight * critique with respect to `out`, of which `picture` was computed;
        None: to the picture.

        of_mean   the gradient of the reconstruction with respect to `out`, with which the critique's is balanced.
        last      the layer that computed `out`, with respect to whose filters the two are balanced; None: to `out`
                  itself.

        critique_share is the length of the weighted critique's gradient divided by that of the reconstruction's. Leaves
        picture and truth in the example for the discriminator's turn.
        """
        critique = -nets["discriminator"](picture).flatten(1).mean(1)
        of_critique = adversarial.compute_picture_gradient(critique, picture if out is None else out)
        if last is None:
            factor, share = adversarial.compute_balance_factor(of_mean, of_critique)
        else:
            factor, share = adversarial.compute_balance_factor(
                *(
                    adversarial.compute_filter_gradient(last.entered, of_output, last.side)
                    for of_output in (of_mean, of_critique)
                ),
                most=_MOST,
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
        """Returns the discriminator's mean loss on the originals and the reconstructions that the first stage's turn
        has stored in the example; the mean logits of both, `real` and `fake` (B,); and, if a penalty is due in this
        step, `slope` (B,), the squared slope at the originals.
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


def make_loss_with_gradient(value: Tensor, pull: Tensor) -> Tensor:
    """Returns a scalar loss whose value is the mean of `value` (B,), and whose gradient is that of the mean of `pull`
    (B,).
    """
    return (value.detach() + (pull - pull.detach())).mean()
