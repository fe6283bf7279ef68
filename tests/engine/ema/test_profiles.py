"""The profiles of averages by a power of time, and which combination of some is nearest to another: numbers alone."""

import numpy as np
import pytest

from dstrain.engine.ema.profiles import Average, solve_combination_coefficients, solve_profile_exponent

TIMES = [4.0 * number for number in range(1, 16)]
AVERAGES = [Average(time, width) for time in TIMES for width in (0.05, 0.10)]


def published(width: float) -> float:
    """gamma by bisection of the paper's equation for sigma_rel."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        wide = np.sqrt((middle + 1) / ((middle + 2) ** 2 * (middle + 3))) > width
        low, high = (middle, high) if wide else (low, middle)
    return low


def published_solution(averages: list[tuple[float, float]], time: float, width: float) -> np.ndarray:
    """The paper's appendix C in its own terms: A x = b with inner products by ratios of times, unscaled."""

    def product(t_a: float, g_a: float, t_b: float, g_b: float) -> float:
        power = g_b if t_a < t_b else -g_a
        return (g_a + 1) * (g_b + 1) * (t_a / t_b) ** power / ((g_a + g_b + 1) * max(t_a, t_b))

    known = [(t, published(w)) for t, w in averages]
    matrix = np.array([[product(*a, *b) for b in known] for a in known])
    return np.linalg.solve(matrix, np.array([product(*a, time, published(width)) for a in known]))


@pytest.mark.parametrize("width", [0.01, 0.05, 0.1, 0.25, 0.288])
def test_width(width):
    """Oracle: the standard deviation of the profile by numeric integration, and bisection of the published equation."""
    gamma = solve_profile_exponent(width)
    assert gamma == pytest.approx(published(width), rel=1e-9, abs=1e-6)
    s = (np.arange(10**6) + 0.5) / 10**6
    p = (gamma + 1) * s**gamma / 10**6
    assert p.sum() == pytest.approx(1, rel=1e-6)
    assert np.sqrt((p * s**2).sum() - (p * s).sum() ** 2) == pytest.approx(width, rel=1e-5)


def test_published_figures():
    """Oracle: the paper's text: gamma = 16.97 and 6.94 for widths of 5 % and 10 % (section 3.1)."""
    assert [round(solve_profile_exponent(width), 2) for width in (0.05, 0.10)] == [16.97, 6.94]


@pytest.mark.parametrize("time, width", [(60, 0.03), (60, 0.075), (60, 0.15), (60, 0.25), (44, 0.12), (57, 0.08)])
def test_solution(time, width):
    """Oracle: the published linear system, set up independently and solved by numpy; its misfit by
    numeric integration.
    """
    solution, expected = (
        solve_combination_coefficients(AVERAGES, Average(time, width)),
        published_solution(AVERAGES, time, width),
    )
    assert solution.coefficients == pytest.approx(expected, rel=1e-6, abs=1e-9)
    s = (np.arange(200_000) + 0.5) * max(TIMES) / 200_000

    def profile(t, w):
        return np.where(s <= t, (published(w) + 1) * s ** published(w) / t ** (published(w) + 1), 0)

    target = profile(time, width)
    made = sum(x * profile(*average) for x, average in zip(expected, AVERAGES))
    misfit = np.sqrt(((made - target) ** 2).sum() / (target**2).sum())
    assert solution.misfit == pytest.approx(misfit, rel=1e-2, abs=1e-5)


def test_a_sum_of_one():
    """Oracle: the sum; the misfit of the divided coefficients by numeric integration."""
    averages = [Average(time, width) for time in (15, 30, 45, 60) for width in (0.05, 0.10)]
    plain = solve_combination_coefficients(averages, Average(60, 0.2))
    solution = plain.normalise_coefficients()
    assert abs(sum(plain.coefficients) - 1) > 0.01 and sum(solution.coefficients) == pytest.approx(1, abs=1e-12)
    assert solution.coefficients == pytest.approx(np.array(plain.coefficients) / sum(plain.coefficients), rel=1e-9)
    s = (np.arange(200_000) + 0.5) * 60 / 200_000

    def profile(t, w):
        return np.where(s <= t, (published(w) + 1) * s ** published(w) / t ** (published(w) + 1), 0)

    made = sum(x * profile(*average) for x, average in zip(solution.coefficients, averages))
    target = profile(60, 0.2)
    misfit = np.sqrt(((made - target) ** 2).sum() / (target**2).sum())
    assert solution.misfit == pytest.approx(misfit, rel=1e-3) and solution.misfit > 1.005 * plain.misfit


def test_what_is_at_hand():
    """Oracle: the average itself: a profile among those at hand is taken alone; a single one far away misses."""
    solution = solve_combination_coefficients(AVERAGES, Average(40, 0.10))
    index = AVERAGES.index(Average(40, 0.10))
    assert solution.coefficients == pytest.approx(np.eye(len(AVERAGES))[index], abs=1e-9) and solution.misfit < 1e-6
    assert solve_combination_coefficients([Average(60, 0.05)], Average(60, 0.25)).misfit > 0.5
    times = [Average(10.0**8 * number, width) for number in (1, 2) for width in (0.002, 0.2)]  # no overflow
    assert np.isfinite(solve_combination_coefficients(times, Average(2e8, 0.1)).misfit)
