"""Paths between data and noise: a path, what a network predicts on it, and the space in which its loss is measured.

Notation: t in [0, 1], 0 is data and 1 is noise,

    x_t = alpha x + sigma eps            velocity = dx_t / dt = alpha' x + sigma' eps            score = -eps / sigma

x, eps, the velocity and x_t are four combinations of x and eps, so any one is a combination of any other and x_t: a
prediction and a loss are chosen apart. Sources: Albergo & Vanden-Eijnden 2022; Ma et al. 2024 (SiT), sections 2 and 3,
which counts t the other way; Li & He 2025 (JiT), who predict x and measure velocities.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dstrain.diffusion.likelihood import average_each_sample

Coefficients = tuple[Tensor, Tensor, Tensor, Tensor]  # alpha, sigma and their derivatives, (B, 1, ...) or scalars
PREDICTIONS = ("velocity", "x", "eps", "score")
LOSSES = ("velocity", "x", "eps", "likelihood")
_VP_LOW, _VP_HIGH = 0.1, 20.0  # betas at both ends


def compute_linear_path_coefficients(t: Tensor) -> Coefficients:
    """Returns alpha, sigma and their derivatives at times t on the straight path, x_t = (1 - t) x + t eps."""
    one = torch.ones_like(t)
    return 1 - t, t, -one, one


def compute_gvp_path_coefficients(t: Tensor) -> Coefficients:
    """Returns alpha, sigma and their derivatives at times t on SiT's path of constant variance: alpha = cos(pi t / 2),
    sigma = sin(pi t / 2).
    """
    angle = math.pi / 2 * t
    alpha, sigma = angle.cos(), angle.sin()
    return alpha, sigma, -math.pi / 2 * sigma, math.pi / 2 * alpha


def compute_vp_path_coefficients(t: Tensor) -> Coefficients:
    """Returns alpha, sigma and their derivatives at times t on the VP-SDE's path (Song et al. 2020): DDPM's linear
    betas, 0.1 to 20, in continuous time.
    """
    half_log = -(t.square()) * (_VP_HIGH - _VP_LOW) / 4 - t * _VP_LOW / 2
    slope = -t * (_VP_HIGH - _VP_LOW) / 2 - _VP_LOW / 2
    alpha = half_log.exp()
    sigma = (-torch.expm1(2 * half_log)).sqrt()
    return alpha, sigma, slope * alpha, -slope * alpha.square() / sigma


PATHS: dict[str, Callable[[Tensor], Coefficients]] = {
    "linear": compute_linear_path_coefficients,
    "gvp": compute_gvp_path_coefficients,
    "vp": compute_vp_path_coefficients,
}


def compute_time_of_noise_ratio(path: str, noise_ratio: float) -> float:
    """Returns the time t at which sigma / alpha of a path equals `noise_ratio`. `path` is linear, gvp or vp."""
    if path == "linear":
        return noise_ratio / (1 + noise_ratio)
    if path == "gvp":
        return 2 / math.pi * math.atan(noise_ratio)
    slope, curvature = _VP_LOW / 2, (_VP_HIGH - _VP_LOW) / 4
    return (math.sqrt(slope**2 + 2 * curvature * math.log1p(noise_ratio**2)) - slope) / (2 * curvature)


class Interpolant:
    """Holds a path between data and noise, the quantity that the network predicts, and the space of the loss.

    path         linear, gvp or vp.
    prediction   velocity, x, eps or score: the network's output.
    loss         the space of squared errors: velocity, x, eps; or likelihood, SiT's weight of a bound. None: the
                 prediction's own, and eps for a score.
    t_min        conversions that divide by sigma or alpha take no t nearer to 0 or 1 than this. 0: any.
    cosine       weight of LightningDiT's term, 1 - the cosine over channels of prediction and target.
    """

    def __init__(
        self,
        path: str = "linear",
        prediction: str = "velocity",
        loss: str | None = None,
        t_min: float = 0.0,
        cosine: float = 0.0,
    ) -> None:
        self.path, self.prediction, self.t_min, self.cosine = path, prediction, t_min, cosine
        self._space = {"score": "eps"}.get(prediction, prediction)  # a score is taken as the noise that it stands for
        self.loss = loss or self._space

    def compute_coefficients(self, t: Tensor, like: Tensor) -> Coefficients:
        """Returns alpha, sigma and their derivatives at times t (B,), (B, 1, ...) each, with the dtype and as many axes
        as `like`.
        """
        return PATHS[self.path](t.to(like.dtype).view(-1, *(1,) * (like.ndim - 1)))

    def compute_alpha_and_sigma(self, t: float) -> tuple[float, float]:
        """Returns alpha and sigma at time t, as Python numbers."""
        alpha, sigma, _, _ = PATHS[self.path](torch.tensor(t, dtype=torch.float64))
        return float(alpha), float(sigma)

    def mix_noise(self, x_start: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Returns x_t = alpha * x_start + sigma * noise at times t (B,)."""
        if self.path == "linear":
            t = t.to(x_start.dtype).view(-1, *(1,) * (x_start.ndim - 1))
            return torch.lerp(x_start, noise.to(x_start.dtype), t)
        alpha, sigma, _, _ = self.compute_coefficients(t, x_start)
        return alpha * x_start + sigma * noise

    def convert_prediction(self, out: Tensor, x_t: Tensor, t: Tensor, target_quantity: str) -> Tensor:
        """Converts the network's output `out` at x_t and times t (B,) to `target_quantity`: velocity, x, eps or
        score.
        """
        if target_quantity == self.prediction:
            return out
        coefficients = self.compute_coefficients(self._clamp_times(t), out)
        if self.prediction == "score":  # it is infinite at the data, and the noise that it stands for is not
            out = -coefficients[1] * out
        if target_quantity == self._space:
            return out
        of_x_t, of_out = self._compute_conversion_weights(coefficients, target_quantity)
        return of_x_t * x_t + of_out * out

    def compute_losses(self, out: Tensor, x_start: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Returns the loss of each sample, (B,): the mean squared error of the network's output `out` (B, C, ...) at
        times t (B,), as an error of the quantity that the attribute `loss` names.

        For loss=likelihood it is the error of eps, multiplied by SiT's weight. If the attribute `cosine` is not 0,
        cosine * (1 - cosine similarity of output and target over channels) is added.
        """
        coefficients = self.compute_coefficients(self._clamp_times(t), out)
        alpha, sigma, alpha_slope, sigma_slope = coefficients
        if self.prediction == "velocity":
            target = noise - x_start if self.path == "linear" else alpha_slope * x_start + sigma_slope * noise
        elif self.prediction == "score":
            out, target = -sigma * out, noise
        else:
            target = x_start if self.prediction == "x" else noise
        error = out - target
        wanted = "eps" if self.loss == "likelihood" else self.loss
        if wanted != self._space:
            error = self._compute_conversion_weights(coefficients, wanted)[1] * error
        losses = average_each_sample(error.square())
        if self.loss == "likelihood":
            losses = losses * ((sigma_slope - sigma * alpha_slope / alpha) / sigma).flatten()
        if self.cosine:
            losses = losses + self.cosine * average_each_sample(1 - torch.cosine_similarity(out, target, dim=1))
        return losses

    def _clamp_times(self, t: Tensor) -> Tensor:
        """Clamps times t (B,) to at least t_min from an end of [0, 1] where a conversion would divide by 0:

        from 1  if the network predicts eps or a score, or for loss=likelihood.
        from 0  if the network predicts x, if the path is vp, or for loss=likelihood.
        """
        likelihood = self.loss == "likelihood"
        low = self.t_min if self.prediction == "x" or self.path == "vp" or likelihood else 0.0
        high = 1 - self.t_min if self.prediction in ("eps", "score") or likelihood else 1.0
        return t.clamp(low, high) if self.t_min else t

    def _compute_conversion_weights(self, coefficients: Coefficients, target_quantity: str) -> tuple[Tensor, Tensor]:
        """Returns factors a and b such that a * x_t + b * prediction is the `target_quantity`: velocity, x, eps or
        score.
        """
        alpha, sigma, alpha_slope, sigma_slope = coefficients
        zero, one = torch.zeros_like(alpha), torch.ones_like(alpha)
        of_x_and_eps = {
            "velocity": (alpha_slope, sigma_slope),
            "x": (one, zero),
            "eps": (zero, one),
            "score": (zero, -1 / sigma),
        }
        x_given, eps_given = of_x_and_eps[self._space]
        x_wanted, eps_wanted = of_x_and_eps[target_quantity]
        scale = alpha * eps_given - sigma * x_given
        return (x_wanted * eps_given - eps_wanted * x_given) / scale, (alpha * eps_wanted - sigma * x_wanted) / scale
