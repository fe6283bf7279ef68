"""Finite scalar quantization against closed forms."""

import itertools
import math

import pytest
import torch

from dstrain.nn.finite_scalar import (
    FiniteScalar,
    bound_numbers_to_levels,
    convert_numbers_to_tokens,
    convert_tokens_to_numbers,
    require_valid_levels,
    scale_rounded_numbers_to_unit,
)

LEVELS = [(8, 6, 5), (3, 4), (4, 4, 4, 4), (1000,), (999,)]


@pytest.mark.parametrize("levels", LEVELS)
def test_tokens_count_the_levels(levels):
    """Oracle: all combinations in the order of a mixed-radix number whose first digit changes fastest, and back."""
    digits = [range(-(size // 2), (size + 1) // 2) for size in reversed(levels)]
    every = torch.tensor([combination[::-1] for combination in itertools.product(*digits)], dtype=torch.float32)
    tokens = torch.arange(math.prod(levels))
    assert torch.equal(convert_numbers_to_tokens(every, levels), tokens)
    assert torch.equal(convert_tokens_to_numbers(tokens, levels), every)
    code = scale_rounded_numbers_to_unit(every, levels)
    assert float(code.min()) == -1 and float(code.max()) <= 1


@pytest.mark.parametrize("levels", LEVELS)
def test_bound(levels):
    """Oracle: the paper's formula at its ends and its middle: every level can be reached, none beyond, 0 stays 0."""
    far = torch.full((1, len(levels)), 30.0)
    low, high, middle = (bound_numbers_to_levels(z, levels) for z in (-far, far, 0 * far))
    sizes = torch.tensor(levels)
    assert torch.equal(low.round()[0], -(sizes // 2).float()) and torch.equal(
        high.round()[0], ((sizes - 1) // 2).float()
    )
    torch.testing.assert_close(middle, 0 * far, rtol=0, atol=1e-6)
    assert convert_numbers_to_tokens(high, levels).tolist() == [math.prod(levels) - 1]
    assert convert_numbers_to_tokens(low, levels).tolist() == [0]
    # Between two levels, where the bound is half-way: atanh of that share of its range.
    z = torch.full((1, len(levels)), 0.7)
    half, even = (sizes - 1) * 1.001 / 2, 0.5 * (1 - sizes % 2)
    torch.testing.assert_close(
        bound_numbers_to_levels(z, levels)[0], half * torch.tanh(0.7 + torch.atanh(even / half)) - even
    )


def test_encode_decode_and_gradient():
    """Oracle: the one forward pass; the derivative of the bound, which passes straight through the rounding."""
    torch.manual_seed(0)
    quantizer, x = FiniteScalar(12, (8, 6, 5)), torch.randn(2, 3, 4, 12, requires_grad=True)
    passed = quantizer(x, torch.ones(2, 3, 4))
    assert torch.equal(quantizer.encode(x), passed.tokens) and passed.tokens.shape == (2, 3, 4)
    torch.testing.assert_close(quantizer.decode(passed.tokens), passed.x, rtol=1e-5, atol=1e-6)
    smooth = quantizer.project_out(
        scale_rounded_numbers_to_unit(bound_numbers_to_levels(quantizer.project_in(x), (8, 6, 5)), (8, 6, 5))
    )
    weights = torch.randn_like(smooth)
    ours, theirs = (torch.autograd.grad((out * weights).sum(), x)[0] for out in (passed.x, smooth))
    torch.testing.assert_close(ours, theirs)
    half = quantizer.bfloat16()(x.detach().bfloat16(), torch.ones(2, 3, 4))
    assert half.x.dtype == torch.bfloat16 and half.commitment.tolist() == [0, 0]


@pytest.mark.parametrize(
    "levels, words",
    [
        ((8, 2), "give 3 to 1000 levels"),
        ((), "give 3 to 1000 levels"),
        ((1001,), "give 3 to 1000 levels"),
        ((8, 6, 5), "make 240 tokens and num_tokens is 256: write num_tokens=240"),
    ],
)
def test_levels_that_do_not_fit(levels, words):
    """Oracle: a ValueError with both numbers and the remedy."""
    with pytest.raises(ValueError, match=words):
        require_valid_levels(levels, 256, "num_tokens")


def test_tokens_of_what_is_no_number():
    """Oracle: the law that tokens lie in the codebook, also of a pass that failed, since evaluation counts them."""
    quantizer, x = FiniteScalar(4, (8, 6, 5)), torch.randn(6, 4)
    x[:2], x[2] = torch.nan, torch.inf
    tokens = quantizer.encode(x)
    assert int(tokens.min()) >= 0 and int(tokens.max()) < 240
