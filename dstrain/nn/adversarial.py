"""Implements a discriminator of patches, its hinge loss and R1 penalty, and a weight that balances it against a
reconstruction loss.

Sources: Isola et al. 2017 (PatchGAN: a small strided network, each of whose outputs judges a patch), Lim & Ye 2017
(hinge loss), Esser et al. 2021 (VQGAN: the balance), Mescheder et al. 2018 (R1: the squared slope at real pictures as a
penalty), Lin et al. 2025 (arXiv:2501.08316: the slope from a small random step). The slope is the gradient of a
picture's summed logits with respect to the picture.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain.recipe import ConfigError

_LEAK = 0.2  # slope of the leaky units below 0
_LEAST_RISE = 1e-3  # of the mean logit, by a step of length 1 in each value


class PatchDiscriminator(nn.Module):
    """Judges patches of pictures (B, C, H, W): one logit for each patch, above 0 for real, float64 (B, 1, h, w).

    n_layers layers halve the side, two more have stride 1. Each layer doubles the channels, from base_channels on, but
    at most thrice.

    The published network normalizes by BatchNorm. Its statistics would make a sample's loss depend on the other samples
    of its rank, so that the same global batch would train differently on two ranks than on one, and its running
    averages would differ by rank; synchronized, they would still differ by micro-batch. GroupNorm sees single samples.
    Its groups have about 16 channels, since a channel that is normalized alone would lose its mean and contrast.
    """

    def __init__(self, channels: int = 3, base_channels: int = 64, n_layers: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = [FilterConvolution(channels, base_channels, stride=2), nn.LeakyReLU(_LEAK)]
        for number in range(1, n_layers + 1):
            before, after = (base_channels * min(2**power, 8) for power in (number - 1, number))
            stride = 2 if number < n_layers else 1
            groups = math.gcd(after, max(after // 16, 1))
            layers += [
                FilterConvolution(before, after, stride, bias=False),
                nn.GroupNorm(groups, after),
                nn.LeakyReLU(_LEAK),
            ]
        self.main = nn.Sequential(*layers, LogitConvolution(after, 1, stride=1))

    def forward(self, x: Tensor, num_slopes: int = 0) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the discriminator's logits (B, 1, h, w) of pictures x (B, C, H, W). If `num_slopes` is above 0,
        returns a pair instead: the logits, and the squared slope at each of the first `num_slopes` pictures,
        (num_slopes,).

        The squared slope is the squared length of the gradient of a picture's summed logits with respect to the
        picture, divided by the number of patches (as R1 needs it). It can be differentiated again. Raises ConfigError
        if `num_slopes` is above 0 and ZeRO-3 has partitioned the weights.
        """
        if not num_slopes:
            return self._compute_logits(x)
        if any(weight.numel() == 0 for weight in self.parameters()):
            raise ConfigError("penalty.form: exact needs whole weights; take approximate, or ZeRO 0 to 2")
        with torch.enable_grad():
            pictures = x[:num_slopes].detach().requires_grad_()
            logits = self._compute_logits(torch.cat((pictures, x[num_slopes:])))
            slope = torch.autograd.grad(logits[:num_slopes].sum(), pictures, create_graph=True)[0]
        return logits, slope.square().flatten(1).sum(1) / logits[0].numel()

    def _compute_logits(self, x: Tensor) -> Tensor:
        """Returns the logits (B, 1, h, w) of pictures (B, C, H, W), which are cast to the dtype of the
        weights first.
        """
        return self.main(x.to(self.main[0].weight.dtype))


class FilterConvolution(nn.Conv2d):
    """A convolution of 4 x 4; weights start normal with deviation 0.02, as published."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, bias: bool = True) -> None:
        super().__init__(in_channels, out_channels, kernel_size=4, stride=stride, padding=1, bias=bias)

    def reset_parameters(self) -> None:
        """Draws the weight from a normal distribution of mean 0 and standard deviation 0.02, and sets the bias, if any,
        to 0.
        """
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class LogitConvolution(FilterConvolution):
    """The last convolution, whose bias is added in float64.

    Within the hinge loss's margins real and fake patches pull at the bias with equal and opposite weights. A sum in
    fp32 leaves rounding, which depends on the number of ranks and of which Adam makes whole steps; here it is 0.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Returns the convolution of x (B, C, H, W), with the bias added in float64: float64 (B, 1, h, w)."""
        return self._conv_forward(x, self.weight, None).double() + self.bias.double().view(-1, 1, 1)


def compute_min_picture_side(n_layers: int) -> int:
    """Returns the smallest height and width, in pixels, of pictures that a PatchDiscriminator with `n_layers` can
    judge: its output is then at least 1 x 1.
    """
    return 3 * 2**n_layers


def compute_hinge_loss(real: Tensor, fake: Tensor) -> Tensor:
    """Returns the discriminator's hinge loss of each sample: the mean over patches of (relu(1 - real) + relu(1 + fake))
    / 2. `real` and `fake` are logits (B, ...) of real and of generated pictures; the result is (B,).
    """
    return (F.relu(1 - real) + F.relu(1 + fake)).flatten(1).mean(1) / 2


def estimate_squared_slope(logits: Tensor, stepped_logits: Tensor, sigma: float) -> Tensor:
    """Returns an estimate (B,) of the squared slope that PatchDiscriminator.forward computes exactly, without a
    backward pass.

    logits          the discriminator's output (B, ...) at the pictures.
    stepped_logits  its output (B, ...) at the pictures + sigma * standard normal noise.

    The smaller sigma is, the closer the estimate's mean over noise is to the squared slope.
    """
    return ((stepped_logits - logits) / sigma).flatten(1).sum(1).square() / logits[0].numel()


def compute_balance_factor_and_ratio(
    reconstruction_gradient: Tensor, critique_gradient: Tensor, max_factor: float | None = None
) -> tuple[Tensor, Tensor]:
    """Balances two gradients of each sample, (B, ...) each, by their lengths. Returns (factor, ratio), (B,) each: the
    factor scales the critique's gradient to the length of the reconstruction's; the ratio is the scaled length, divided
    by the reconstruction's. The ratio is about 1 unless the factor was bounded.

    The factor is that of a critique that rises by at least 0.001 along a
    step whose root mean square is 1, since a flatter critique's gradient may be rounding. Both gradients are those of
    means over values, so that this bound does not depend on the number of values.

    max_factor  None, or the factor's upper bound; then 1e-4 is added to the length of the critique's gradient
                instead, as VQGAN does for gradients with respect to its last layer.
    """
    reconstruction, critique = (
        values.flatten(1).norm(dim=1) for values in (reconstruction_gradient, critique_gradient)
    )
    if max_factor is None:
        factor = reconstruction / critique.clamp(min=_LEAST_RISE / critique_gradient[0].numel() ** 0.5)
    else:
        factor = (reconstruction / (critique + 1e-4)).clamp(max=max_factor)
    return factor, factor * critique / reconstruction.clamp(min=1e-30)


@contextmanager
def record_layer_inputs(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Yields an empty list. Inside the block, each call of `layer` appends its first input, detached, to this list."""
    recorded: list[Tensor] = []
    with layer.register_forward_pre_hook(lambda module, inputs: recorded.append(inputs[0].detach())):
        yield recorded


def compute_filter_gradient(layer_input: Tensor, output_gradient: Tensor, side: int) -> Tensor:
    """Returns the gradient of each sample's loss with respect to the weight of a convolution with stride 1, padding
    side // 2 and filters of side x side: float32 (B, C, c, side, side). No weight is needed, so ZeRO-3 may scatter it.

    layer_input      the input of the convolution, (B, c, H, W).
    output_gradient  the gradient of the loss with respect to the convolution's output, (B, C, H, W).
    """
    (batch, before), after = layer_input.shape[:2], output_gradient.shape[1]
    of_all = torch.nn.grad.conv2d_weight(
        layer_input.float().reshape(1, -1, *layer_input.shape[2:]),
        (batch * after, before, side, side),
        output_gradient.float().reshape(1, -1, *output_gradient.shape[2:]),
        padding=side // 2,
        groups=batch,
    )
    return of_all.view(batch, after, before, side, side)


def compute_picture_gradient(values: Tensor, picture: Tensor) -> Tensor:
    """Returns the gradient of each sample's value with respect to its own picture. `values` (B,) were computed from
    `picture` (B, C, H, W); the result is (B, C, H, W).
    """
    return torch.autograd.grad(values.sum(), picture)[0]
