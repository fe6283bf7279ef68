"""Averages whose weights grow as a power of time, and how those of any width are made of a few others.

    profile    p(s) = (gamma + 1) s^gamma / t^(gamma + 1) on 0 .. t; s and t count updates
    update     average <- beta(t) average + (1 - beta(t)) weights, beta(t) = (1 - 1/t)^(gamma + 1). The weights of
               update s then count by the integral of p over s - 1 .. s, and what the average began with not at all
    width      sigma_rel, the standard deviation of p in units of t

An average of another width, or at another time, is the combination of those at hand whose profile is nearest to its
own in L2. All inner products are closed forms; everything is float64.

Source: Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion Models" (EDM2), section 3 and
appendix C, arXiv:2312.02696.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Average(NamedTuple):
    """An average by its time, in updates, and its relative width."""

    time: float
    width: float


class Solution(NamedTuple):
    """Averages combined into another one.

    coefficients   of each of the averages
    misfit         L2 distance of the combined profile from the wanted one, as a share of the wanted one's norm
    """

    coefficients: list[float]
    misfit: float

    def normalise_coefficients(self) -> "Solution":
        """Returns a solution whose coefficients are divided by their sum, so that they sum to 1. Its misfit is that of
        the divided coefficients.
        """
        # Averaged weights differ from each other by far less than they are long: coefficients that sum to 0.99 would
        # scale the weights by far more than the misfit says.
        total = sum(self.coefficients)
        shift = (1 - self.misfit**2) * (1 - 1 / total) ** 2  # the residual is orthogonal to the profile made
        return Solution([value / total for value in self.coefficients], (self.misfit**2 + shift) ** 0.5)


def solve_profile_exponent(width: float) -> float:
    """Returns the exponent gamma of an average in which step t has a weight in proportion to t^gamma. `width` is the
    relative width of the average: above 0 and at most 1 / sqrt(12). Solves width^2 = (gamma + 1) / ((gamma + 2)^2
    (gamma + 3)).
    """
    inverse = float(width) ** -2
    return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())


def solve_combination_coefficients(averages: Sequence[Average], target: Average) -> Solution:
    """Returns the coefficients by which `averages` are combined to be as near as possible to `target`. The distance is
    that of their profiles (the weights that an average gives to the times of training), in L2. No two of `averages` may
    have both the same time and the same width.
    """
    times, gammas = (
        np.array([average.time for average in averages]),
        np.array([solve_profile_exponent(a.width) for a in averages]),
    )
    time, gamma = np.array([target.time]), np.array([solve_profile_exponent(target.width)])
    length = np.sqrt(_compute_profile_inner_products(time, gamma, time, gamma).item())
    lengths = np.sqrt(
        np.diagonal(_compute_profile_inner_products(times, gammas, times, gammas))
    )  # unit profiles: better conditioned
    products = _compute_profile_inner_products(times, gammas, times, gammas) / np.outer(lengths, lengths)
    cosines = _compute_profile_inner_products(times, gammas, time, gamma)[:, 0] / (lengths * length)
    found = np.linalg.solve(products, cosines)
    misfit = np.sqrt(max(1 - 2 * cosines @ found + found @ products @ found, 0.0))
    return Solution((found * length / lengths).tolist(), float(misfit))


def _compute_profile_inner_products(
    times: np.ndarray, gammas: np.ndarray, other_times: np.ndarray, other_gammas: np.ndarray
) -> np.ndarray:
    """Returns the inner products (N, M) of N profiles with M profiles. A profile says how much each time of training
    weighs in an average: in proportion to time^exponent, up to the time at which the average was taken. The inner
    product is the integral of two profiles' product.

    times, gammas               times and exponents of the N profiles, (N,)
    other_times, other_gammas   times and exponents of the M profiles, (M,)
    """
    times, gammas = times[:, None], gammas[:, None]
    powers = (
        (gammas + other_gammas + 1) * np.log(np.minimum(times, other_times))
        - (gammas + 1) * np.log(times)
        - (other_gammas + 1) * np.log(other_times)
    )
    return (gammas + 1) * (other_gammas + 1) / (gammas + other_gammas + 1) * np.exp(powers)
