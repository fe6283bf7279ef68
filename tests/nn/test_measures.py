"""Measures of pictures and codebooks."""

import math

import pytest
import torch

from dstrain.nn.measures import (
    compute_perplexity_and_unused_share,
    compute_psnr,
    compute_ssim,
    measure_relative_error,
    measure_token_shares,
)


def test_relative_error():
    """Oracle: by hand: 0.5 of 4; nothing between zeros, much between zeros and something."""
    zeros = torch.zeros(3)
    assert measure_relative_error(torch.tensor([1.0, -3.5, 2.0]), torch.tensor([1.0, -4.0, 2.0])) == 0.125
    assert measure_relative_error(zeros, zeros) == 0 and measure_relative_error(zeros + 1e-3, zeros) > 1e6


def test_psnr():
    """Oracle: the formula for an error of one size everywhere; 100 dB where equal; sample by sample."""
    truth = torch.full((3, 3, 4, 4), 0.5)
    picture = truth + torch.tensor([0.1, 0.01, 0.0]).view(3, 1, 1, 1)
    torch.testing.assert_close(compute_psnr(picture, truth), torch.tensor([20.0, 40.0, 100.0]), rtol=1e-4, atol=1e-3)


def by_hand(a, b):
    """SSIM of one channel, window by window, in Python floats."""
    height, width = len(a), len(a[0])
    window = [math.exp(-((i - 5) ** 2) / 4.5) for i in range(11)]
    total = sum(window) ** 2
    values = []
    for top in range(height - 10):
        for left in range(width - 10):
            cells = [
                (window[i] * window[j] / total, a[top + i][left + j], b[top + i][left + j])
                for i in range(11)
                for j in range(11)
            ]
            mean_a, mean_b = sum(w * x for w, x, _ in cells), sum(w * y for w, _, y in cells)
            var_a = sum(w * (x - mean_a) ** 2 for w, x, _ in cells)
            var_b = sum(w * (y - mean_b) ** 2 for w, _, y in cells)
            both = sum(w * (x - mean_a) * (y - mean_b) for w, x, y in cells)
            values.append(
                (2 * mean_a * mean_b + 1e-4)
                * (2 * both + 9e-4)
                / ((mean_a**2 + mean_b**2 + 1e-4) * (var_a + var_b + 9e-4))
            )
    return sum(values) / len(values)


def test_ssim_by_hand():
    """Oracle: Wang et al.'s definition, window by window in Python; channels are averaged."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(2, 2, 14, 12, generator=generator, dtype=torch.float64)
    picture = (truth + 0.2 * torch.randn(truth.shape, generator=generator, dtype=torch.float64)).clamp(0, 1)
    expected = [sum(by_hand(p.tolist(), t.tolist()) for p, t in zip(ps, ts)) / 2 for ps, ts in zip(picture, truth)]
    torch.testing.assert_close(compute_ssim(picture, truth), torch.tensor(expected, dtype=torch.float64))


def test_ssim_of_planes():
    """Oracle: closed forms: 1 where equal; of two grey levels the luminance term alone, in a small picture, too."""
    for side in (16, 8):
        grey, dark = torch.full((1, 1, side, side), 0.6), torch.full((1, 1, side, side), 0.2)
        assert float(compute_ssim(grey, grey)) == pytest.approx(1, abs=1e-4)
        assert float(compute_ssim(grey, dark)) == pytest.approx((2 * 0.12 + 1e-4) / (0.4 + 1e-4), abs=1e-3)


def test_histogram():
    """Oracle: torch.bincount of each sample."""
    tokens = torch.randint(0, 9, (4, 5, 5))
    expected = torch.stack([torch.bincount(row.flatten(), minlength=9) / 25 for row in tokens])
    torch.testing.assert_close(measure_token_shares(tokens, 9), expected)
    counted = torch.zeros(4, 5, 5, dtype=torch.bool)
    counted[:, :2] = True
    torch.testing.assert_close(measure_token_shares(tokens, 9, counted), measure_token_shares(tokens[:, :2], 9))


def test_usage_does_not_depend_on_the_batch():
    """Oracle: the histogram of all tokens at once."""
    tokens = torch.randint(0, 6, (8, 4, 4))
    whole = torch.bincount(tokens.flatten(), minlength=6) / tokens.numel()
    torch.testing.assert_close(measure_token_shares(tokens, 6).mean(0), whole)


@pytest.mark.parametrize(
    "shares, perplexity, dead",
    [
        ([0.25, 0.25, 0.25, 0.25], 4, 0),
        ([1, 0, 0, 0], 1, 0.75),
        ([0.5, 0.5, 0, 0], 2, 0.5),
        ([2, 1, 1], math.exp(0.5 * math.log(2) + 0.5 * math.log(4)), 0),
    ],
)
def test_codebook_usage(shares, perplexity, dead):
    """Oracle: exp of the entropy, by hand; counts do as well as shares."""
    found = compute_perplexity_and_unused_share(torch.tensor(shares, dtype=torch.float32))
    assert found[0] == pytest.approx(perplexity) and found[1] == dead
