"""The discriminator of patches and the balance of its gradient."""

import pytest
import torch

from dstrain.nn.adversarial import (
    PatchDiscriminator,
    compute_balance_factor_and_ratio,
    compute_filter_gradient,
    compute_hinge_loss,
    compute_min_picture_side,
    compute_picture_gradient,
    estimate_squared_slope,
    record_layer_inputs,
)


def test_receptive_field_and_size():
    """Oracle: the published network: 70 x 70 pixels for three layers, 30 x 30 logits of 256 pixels, 2.8 M weights."""
    network = PatchDiscriminator()
    assert network(torch.zeros(1, 3, 256, 256)).shape == (1, 1, 30, 30)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == pytest.approx(2.77e6, rel=0.01)
    # Without norms, which look at the whole picture, what a logit sees is what the convolutions reach.
    convolutions = torch.nn.Sequential(*(layer for layer in network.main if isinstance(layer, torch.nn.Conv2d)))
    x = torch.zeros(1, 3, 128, 128, requires_grad=True)
    convolutions(x)[0, 0, 7, 7].backward()
    rows = x.grad.abs().sum((0, 1, 3)).nonzero()
    assert int(rows.max() - rows.min()) + 1 == 70


@pytest.mark.parametrize("n_layers", [1, 2, 3])
def test_least_size(n_layers):
    """Oracle: one logit at that size, and none below."""
    network = PatchDiscriminator(1, 8, n_layers)
    side = compute_min_picture_side(n_layers)
    assert network(torch.zeros(1, 1, side, side)).shape == (1, 1, 1, 1)
    with pytest.raises(RuntimeError):
        network(torch.zeros(1, 1, side - 2**n_layers, side - 2**n_layers))


def test_a_sample_is_judged_alone():
    """Oracle: the same sample among others; BatchNorm would differ."""
    torch.manual_seed(0)
    network, x = PatchDiscriminator(3, 16, 2), torch.randn(5, 3, 24, 24)
    torch.testing.assert_close(network(x)[2:3], network(x[2:3]), rtol=1e-5, atol=1e-6)
    assert not any("running" in name for name, _ in network.named_buffers())


def test_hinge():
    """Oracle: by hand."""
    real, fake = torch.tensor([[2.0, 0.0], [-1.0, 1.0]]), torch.tensor([[-2.0, 0.5], [-1.0, -3.0]])
    assert compute_hinge_loss(real, fake).tolist() == [(0.5 + 0.75) / 2, (1.0 + 0.0) / 2]


def test_balance():
    """Oracle: lengths by hand; the bound of a flat critique; each sample by itself; VQGAN's bounds where asked for."""
    one, other = torch.zeros(3, 1, 2, 2), torch.zeros(3, 1, 2, 2)
    one[:, 0, 0], other[:, 0, 1, 0] = 3.0, torch.tensor([1.5, 0.0, 1e-6])
    one[0, 0, 0, 1] = 4.0
    factor, share = compute_balance_factor_and_ratio(one, other)
    torch.testing.assert_close(factor, torch.tensor([5 / 1.5, 18**0.5 / 5e-4, 18**0.5 / 5e-4]))
    torch.testing.assert_close(share, torch.tensor([1.0, 0.0, 1e-6 / 5e-4]))
    factor, share = compute_balance_factor_and_ratio(one, other, max_factor=7e3)
    torch.testing.assert_close(factor, torch.tensor([5 / 1.5001, 7e3, 7e3]), rtol=1e-5, atol=0)
    torch.testing.assert_close(share, torch.tensor([1.5 / 1.5001, 0.0, 7e-3 / 18**0.5]), rtol=1e-5, atol=0)
    assert compute_balance_factor_and_ratio(0 * one, other)[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("flatness", [1.0, 1e-6])
def test_the_share_has_no_scale(flatness):
    """Oracle: the closed form of losses that are means over places: a picture with each pixel repeated k times along
    both axes, and losses in another unit, leave the share of the critique as it is, also where its bound holds.
    """
    torch.manual_seed(0)
    x, truth = torch.rand(2, 3, 8, 8), torch.rand(2, 3, 8, 8)

    def share(k, of_loss=1.0):
        larger, target = (values.repeat_interleave(k, 2).repeat_interleave(k, 3) for values in (x, truth))
        larger.requires_grad_()
        reconstruction = of_loss * (larger - target).abs().mean((1, 2, 3))
        critique = flatness * (larger[:, 0] * larger[:, 1].sin()).mean((1, 2))
        return compute_balance_factor_and_ratio(
            compute_picture_gradient(reconstruction, larger), compute_picture_gradient(critique, larger)
        )[1]

    expected = share(1)
    assert bool((expected == 1).all()) if flatness == 1 else bool((expected < 0.01).all())
    for other in (share(4), share(32), share(4, 3e3), share(1, 1e-4)):
        torch.testing.assert_close(other, expected)


@pytest.mark.parametrize("side", [1, 3])
def test_gradient_of_filters(side):
    """Oracle: autograd, a sample at a time; what entered the layer has no graph."""
    torch.manual_seed(0)
    layer, x = torch.nn.Conv2d(4, 5, side, padding=side // 2), torch.randn(3, 4, 6, 6)
    before = layer(x).detach()
    with record_layer_inputs(layer) as entered:
        out = layer(x.clone().requires_grad_())
    layer(x)
    assert len(entered) == 1 and not entered[0].requires_grad and torch.equal(entered[0], x)
    of_output = torch.randn_like(before)
    each = [
        torch.autograd.grad((layer(x[number : number + 1]) * of_output[number]).sum(), layer.weight)[0]
        for number in range(3)
    ]
    torch.testing.assert_close(compute_filter_gradient(entered[0], of_output, side), torch.stack(each))
    torch.testing.assert_close(out.detach(), before)


def test_gradient():
    """Oracle: the derivative of a square, each sample's of its own value only."""
    x = torch.randn(3, 1, 2, 2, requires_grad=True)
    torch.testing.assert_close(compute_picture_gradient(x.square().flatten(1).sum(1), x), 2 * x.detach())


def test_slope():
    """Oracle: autograd from outside, its gradient in a weight by finite differences, and logits as without it."""
    torch.manual_seed(0)
    network, x = PatchDiscriminator(1, 16, 1).double(), torch.randn(3, 1, 12, 12, dtype=torch.float64)
    network._compute_logits = network.main  # in float64 throughout
    logits, slope = network(x, 2)
    assert torch.equal(logits, network(x)) and slope.shape == (2,)
    at = x[:2].clone().requires_grad_()
    expected = torch.autograd.grad(network(at).sum(), at)[0].square().sum((1, 2, 3)) / logits[0].numel()
    torch.testing.assert_close(slope, expected)
    weight = network.main[2].weight
    moved = torch.autograd.grad(slope.sum(), weight)[0][1, 2, 3, 0]
    ends = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            weight[1, 2, 3, 0] += step
        ends.append(network(x, 2)[1].sum())
        with torch.no_grad():
            weight[1, 2, 3, 0] -= step
    torch.testing.assert_close((ends[0] - ends[1]) / 2e-5, moved, rtol=1e-4, atol=1e-8)


def test_slope_between():
    """Oracle: the exact slope, which the mean over many small steps approaches."""
    torch.manual_seed(0)
    network, x = PatchDiscriminator(1, 16, 1), torch.randn(1, 1, 12, 12)
    exact = network(x, 1)[1]
    stepped = x + 0.01 * torch.randn(8000, 1, 12, 12)
    with torch.no_grad():
        found = estimate_squared_slope(network(x).expand(8000, -1, -1, -1), network(stepped), 0.01)
    torch.testing.assert_close(found.mean().float(), exact[0].detach(), rtol=0.08, atol=0.0)


@pytest.mark.parametrize("penalized", [False, True])
def test_the_last_bias_is_pulled_by_whole_patches(penalized):
    """Oracle: by hand: within the hinge loss's margins the gradient of the last bias is 0, and a slope has none. In
    fp32 it is rounding, of which Adam makes whole steps that differ with the number of ranks.
    """
    torch.manual_seed(0)
    network, pictures = PatchDiscriminator(3, 16, 2), torch.randn(15, 3, 26, 26)
    judge = network.main[-1]
    torch.nn.init.normal_(judge.weight, std=0.005)
    logits = network(pictures)
    assert logits.abs().max() < 1 and logits[0].numel() == 16 and logits.dtype == torch.float64
    loss = compute_hinge_loss(logits[:5], logits[5:10])
    if penalized:
        loss = loss + estimate_squared_slope(logits[:5], logits[10:], 0.1)
    loss.mean().backward()
    assert judge.bias.grad.abs().item() < 1e-12 < 1e-5 < judge.weight.grad.abs().max()


def test_slope_of_scattered_weights():
    """Oracle: the refusal, with the remedy."""
    network = PatchDiscriminator(1, 16, 1)
    network.main[0].weight.data = torch.empty(0)
    with pytest.raises(ValueError, match="penalty.form: exact needs whole weights; take approximate"):
        network(torch.zeros(1, 1, 12, 12), 1)
