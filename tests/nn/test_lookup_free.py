"""Lookup-free and cosine quantizers against closed forms."""

import itertools
import math

import pytest
import torch

from dstrain.nn import lookup_free
from dstrain.nn.lookup_free import (
    CodeUsage,
    CosineQuantizer,
    LookupFree,
    average_code_probabilities,
    choose_bit_group_sizes,
    compute_codebook_bits,
    convert_signs_to_tokens,
    convert_tokens_to_signs,
)


def signs_of(bits):
    """All codes, the highest bit first."""
    return torch.tensor(list(itertools.product((-1.0, 1.0), repeat=bits)))


def posterior(z, inv_temperature):
    """p(c|z) over all codes, from squared distances: (B, N, d) -> (B, N, 2 ** d)."""
    distance = (z[:, :, None] - signs_of(z.shape[-1])).square().sum(-1)
    return (-inv_temperature * distance).softmax(-1)


@pytest.mark.parametrize("bits", [1, 3, 6])
def test_tokens_are_the_binary_code_of_signs(bits):
    """Oracle: all codes in the order of the binary numbers, and back."""
    every = torch.arange(2**bits)
    assert torch.equal(convert_signs_to_tokens(signs_of(bits)), every) and torch.equal(
        convert_tokens_to_signs(every, bits), signs_of(bits)
    )
    assert convert_signs_to_tokens(torch.tensor([[-0.1, 3.0, 0.0]])).tolist() == [2]  # 0 counts as below


def test_encode_and_decode():
    """Oracle: the one forward pass."""
    torch.manual_seed(0)
    for quantizer in (LookupFree(12, 32), CosineQuantizer(12, 32, 5)):
        x = torch.randn(2, 3, 4, 4, 12)
        found = quantizer(x, torch.ones(2, 3, 4, 4))
        assert torch.equal(quantizer.encode(x), found.tokens) and found.tokens.shape == (2, 3, 4, 4)
        assert int(found.tokens.min()) >= 0 and int(found.tokens.max()) < 32
        torch.testing.assert_close(quantizer.decode(found.tokens), found.x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inv_temperature", [1.0, 0.3])
def test_entropies(inv_temperature):
    """Oracle: the softmax of squared distances to all 16 codes, summed by hand."""
    torch.manual_seed(0)
    quantizer, x = LookupFree(8, 16, inv_temperature), torch.randn(2, 7, 8)
    found = quantizer(x, torch.ones(2, 7))
    p = posterior(quantizer.project_in(x), inv_temperature)
    torch.testing.assert_close(found.entropy, torch.special.entr(p).sum(-1).mean(1))
    torch.testing.assert_close(found.shares, p.mean(1))
    z = quantizer.project_in(x)
    torch.testing.assert_close(found.commitment, (z.abs() - 1).square().mean((1, 2)))


def test_shares_by_group():
    """Oracle: marginals of the softmax over all 2048 codes; as many bits in a group as are told apart jointly."""
    assert [choose_bit_group_sizes(bits) for bits in (1, 10, 11, 13, 18, 21)] == [
        [1],
        [10],
        [6, 5],
        [7, 6],
        [9, 9],
        [7, 7, 7],
    ]
    torch.manual_seed(0)
    z = torch.randn(2, 5, 11) * 0.3
    p = posterior(z, 1.0).mean(1).view(2, 64, 32)
    expected = torch.cat((p.sum(2), p.sum(1)), dim=1)
    torch.testing.assert_close(average_code_probabilities(4 * z, torch.ones(2, 5)), expected)


def test_padding_counts_nothing():
    """Oracle: the terms of the tokens that count, alone."""
    torch.manual_seed(0)
    for quantizer in (LookupFree(6, 16), CosineQuantizer(6, 9, 3)):
        x, weight = torch.randn(2, 4, 6), torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 1]])
        whole, alone = quantizer(x, weight), quantizer(x[:1, :2], torch.ones(1, 2))
        for name in ("commitment", "codebook", "entropy", "shares"):
            torch.testing.assert_close(getattr(whole, name)[:1], getattr(alone, name))


def test_diversity_has_the_gradient_of_the_entropy_of_the_mean(monkeypatch):
    """Oracle: autograd through that entropy, over all samples at once."""
    monkeypatch.setattr(lookup_free, "_UNIFORM", 0.0)
    torch.manual_seed(0)
    z = torch.randn(6, 5, 4, requires_grad=True)
    shares = average_code_probabilities(4 * z, torch.ones(6, 5))
    expected = torch.autograd.grad(torch.special.entr(shares.mean(0)).sum(), z, retain_graph=True)[0]
    usage = CodeUsage(4, decay=0.0)
    usage.update_shares(shares.detach())
    diversity = usage.compute_cross_entropy(shares)
    torch.testing.assert_close(torch.autograd.grad(diversity.mean(), z, retain_graph=True)[0], expected)
    torch.testing.assert_close(diversity.mean(), torch.special.entr(shares.mean(0)).sum())
    # However the batch is split, the mean over samples is the same.
    halves = [usage.compute_cross_entropy(half).mean() for half in shares.chunk(2)]
    torch.testing.assert_close(sum(halves) / 2, diversity.mean())


def test_usage():
    """Oracle: the running mean by hand; what is not finite moves nothing; at first all codes are as frequent."""
    usage = CodeUsage(2, decay=0.5)
    assert usage.q.tolist() == [0.25] * 4
    usage.update_shares(torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0]]))
    torch.testing.assert_close(usage.q, torch.tensor([0.375, 0.375, 0.125, 0.125]))
    before = usage.q.clone()
    usage.update_shares(torch.tensor([[math.nan, 0, 0, 0], [0, 1, 0, 0]]))
    assert torch.equal(usage.q, before)
    never = CodeUsage(1, decay=0.0)
    never.update_shares(torch.tensor([[1.0, 0.0]]))
    assert bool(never.compute_cross_entropy(torch.tensor([[0.5, 0.5]])).isfinite())


def test_diversity_spreads_codes():
    """Oracle: a projection that gives every sample one code; descending the terms, all 16 are in use."""
    torch.manual_seed(0)
    quantizer, usage, weight = LookupFree(8, 16), CodeUsage(4), torch.ones(256, 1)
    with torch.no_grad():
        quantizer.project_in.bias.fill_(4.0)
    optimizer = torch.optim.Adam(quantizer.project_in.parameters(), lr=0.05)
    x = torch.randn(256, 1, 8)
    assert len(quantizer.encode(x).unique()) == 1
    for _ in range(200):
        found = quantizer(x, weight)
        loss = found.entropy - usage.compute_cross_entropy(found.shares) + 0.1 * found.commitment
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        usage.update_shares(found.shares.detach())
    counts = quantizer.encode(x).flatten().bincount(minlength=16) / 256
    assert torch.special.entr(counts).sum().exp() > 14


def test_straight_through():
    """Oracle: the gradient passes from the code to what was quantized unchanged."""
    torch.manual_seed(0)
    quantizer, x = LookupFree(6, 16), torch.randn(1, 3, 6, requires_grad=True)
    g = torch.randn(1, 3, 6)
    (quantizer(x, torch.ones(1, 3)).x * g).sum().backward()
    torch.testing.assert_close(x.grad, g @ quantizer.project_out.weight @ quantizer.project_in.weight)


def test_cosine(monkeypatch):
    """Oracle: cosine similarity with every entry; each loss moves its own side; many tokens go in parts."""
    torch.manual_seed(0)
    quantizer, x = CosineQuantizer(6, 20, 4), torch.randn(2, 9, 6)
    z, table = quantizer.project_in(x), quantizer.codebook.weight
    near = torch.cosine_similarity(z[:, :, None], table, dim=-1)
    found = quantizer(x, torch.ones(2, 9))
    assert torch.equal(found.tokens, near.argmax(-1))
    torch.testing.assert_close(found.commitment, (2 - 2 * near.max(-1).values).mean(1))
    torch.testing.assert_close(found.commitment, found.codebook)
    weights = [quantizer.project_in.weight, table]
    for term, moved in (("commitment", (True, False)), ("codebook", (False, True))):
        found = quantizer(x, torch.ones(2, 9))
        grads = torch.autograd.grad(getattr(found, term).sum(), weights, allow_unused=True)
        assert tuple(grad is not None and bool(grad.abs().sum() > 0) for grad in grads) == moved
    monkeypatch.setattr(lookup_free, "_CELLS", 60)
    assert torch.equal(quantizer.encode(x), near.argmax(-1))


def test_precision():
    """Oracle: terms in float32; what comes out has the weights' type."""
    torch.manual_seed(0)
    for quantizer in (LookupFree(16, 64).bfloat16(), CosineQuantizer(16, 50, 8).bfloat16()):
        found = quantizer(torch.randn(2, 5, 16).bfloat16(), torch.ones(2, 5))
        assert found.x.dtype == torch.bfloat16
        assert all(
            getattr(found, name).dtype == torch.float32 for name in ("commitment", "codebook", "entropy", "shares")
        )


@pytest.mark.parametrize(("size", "remedy"), [(1000, "take 512 or 1024"), (3, "take 2 or 4"), (1, "take 2 or 4")])
def test_no_power_of_two(size, remedy):
    """Oracle: the ValueError, with the powers on both sides."""
    with pytest.raises(ValueError, match=f"codebook_size: {size} is no power of two.*{remedy}, or quantizer cosine"):
        compute_codebook_bits(size)
