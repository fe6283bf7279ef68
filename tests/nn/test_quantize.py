"""Categorical latents that gradients pass."""

import math

import pytest
import torch
import torch.nn.functional as F

from dstrain import rng
from dstrain.nn.quantize import (
    Codebook,
    compute_kl_to_uniform,
    draw_gumbel_noise,
    draw_relaxed_tokens,
    upcast_to_float32,
)

LOGITS = torch.tensor([0.7, -0.4, 0.1], dtype=torch.float64)


def jacobian_softmax(p):
    return torch.diag(p) - torch.outer(p, p)


def test_gumbel():
    """Oracle: mean (Euler's constant) and variance (pi^2 / 6) of the distribution; all are finite."""
    noise = draw_gumbel_noise(torch.arange(500), "gumbel", (400,)).double()
    assert float(noise.mean()) == pytest.approx(0.5772156649, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.01)
    assert bool(noise.isfinite().all()) and noise.shape == (500, 400)


def test_gumbel_at_the_least_uniform(monkeypatch):
    """Oracle: -log(-log(u)) at 2^-25, where a uniform is 0."""
    monkeypatch.setattr(rng, "uniform", lambda key, name, shape: torch.zeros(1, *shape))
    assert float(draw_gumbel_noise(torch.zeros(1), "g", (1,))) == pytest.approx(-math.log(25 * math.log(2)))


def test_hard_samples_have_the_distribution():
    """Oracle: softmax of the logits, whatever the temperature."""
    noise = draw_gumbel_noise(torch.arange(20000), "gumbel", (3,)).double()
    for sampling in ("straight_through", "reinmax"):
        drawn = draw_relaxed_tokens(LOGITS.expand(20000, 3), noise, torch.full((20000,), 0.3), sampling)
        assert set(drawn.unique().tolist()) == {0.0, 1.0} and bool((drawn.sum(1) == 1).all())
        torch.testing.assert_close(drawn.mean(0), LOGITS.softmax(0), rtol=0, atol=0.015)


def test_soft_is_torchs():
    """Oracle: F.gumbel_softmax with the same noise, value and gradient; a temperature for each sample."""
    logits = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    noise = torch.randn(2, 5, 3, dtype=torch.float64)
    found = draw_relaxed_tokens(logits, noise, torch.tensor([0.5, 2.0]), "soft")
    expected = torch.stack([((logits[0] + noise[0]) / 0.5).softmax(0), ((logits[1] + noise[1]) / 2.0).softmax(0)])
    torch.testing.assert_close(found, expected)
    value = torch.randn_like(found)
    (ours,) = torch.autograd.grad((found * value).sum(), logits, retain_graph=True)
    (theirs,) = torch.autograd.grad((expected * value).sum(), logits)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_straight_through_gradient(temperature):
    """Oracle: the closed form J(softmax((theta + g) / temperature)) / temperature times the gradient at the token."""
    noise = torch.tensor([[0.3, 1.1, -0.2]], dtype=torch.float64)
    logits = LOGITS[None].clone().requires_grad_()
    value = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    drawn = draw_relaxed_tokens(logits, noise, torch.tensor([temperature]), "straight_through")
    (found,) = torch.autograd.grad((drawn * value).sum(), logits)
    soft = ((LOGITS + noise[0]) / temperature).softmax(0)
    torch.testing.assert_close(found[0], jacobian_softmax(soft) @ value[0] / temperature)
    assert torch.equal(drawn.detach(), F.one_hot((LOGITS + noise[0]).argmax(), 3)[None].double())


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_reinmax_gradient(temperature):
    """Oracle: the closed form (2 J((pi_temperature + D) / 2) - J(pi) / 2) times the gradient at the token."""
    value = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    for token in range(3):
        logits = LOGITS[None].clone().requires_grad_()
        noise = 50 * F.one_hot(torch.tensor([token]), 3).double()
        drawn = draw_relaxed_tokens(logits, noise, torch.tensor([temperature]), "reinmax")
        (found,) = torch.autograd.grad((drawn * value).sum(), logits)
        hard = F.one_hot(torch.tensor(token), 3).double()
        halfway = ((LOGITS / temperature).softmax(0) + hard) / 2
        expected = (2 * jacobian_softmax(halfway) - jacobian_softmax(LOGITS.softmax(0)) / 2) @ value[0]
        torch.testing.assert_close(found[0], expected, rtol=1e-6, atol=1e-9)
        assert torch.equal(drawn.detach()[0], hard)


def test_reinmax_is_of_second_order():
    """Oracle: the exact gradient of E f(D) for a quadratic f, by enumeration; the straight-through one is off."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    slope = torch.randn(3, generator=generator, dtype=torch.float64)

    def loss(point):
        return point @ matrix @ point + slope @ point

    logits = LOGITS.clone().requires_grad_()
    tokens = torch.eye(3, dtype=torch.float64)
    (exact,) = torch.autograd.grad((logits.softmax(0) * torch.stack([loss(token) for token in tokens])).sum(), logits)
    pi, means = LOGITS.softmax(0), {"reinmax": 0, "straight_through": 0}
    for token in range(3):
        for sampling in means:
            theta = LOGITS[None].clone().requires_grad_()
            if sampling == "reinmax":
                drawn = draw_relaxed_tokens(theta, 50 * tokens[token][None], torch.ones(1), sampling)
            else:  # without noise in its Jacobian, as the estimator is analysed
                drawn = tokens[token] + theta.softmax(1) - theta.softmax(1).detach()
            means[sampling] = means[sampling] + pi[token] * torch.autograd.grad(loss(drawn[0]), theta)[0][0]
    torch.testing.assert_close(means["reinmax"], exact, rtol=1e-9, atol=1e-9)
    assert float((means["straight_through"] - exact).abs().max()) > 0.05


def test_reinmax_of_sure_tokens():
    """Oracle: finite gradients where softmax underflows, in float32."""
    logits = torch.tensor([[200.0, -200.0, 0.0]], requires_grad=True)
    draw_relaxed_tokens(logits, torch.zeros(1, 3), torch.tensor([0.1]), "reinmax")[0, 1].backward()
    assert bool(logits.grad.isfinite().all())


def test_unknown_sampling():
    """Oracle: a ValueError that lists what exists."""
    with pytest.raises(ValueError, match="'hard' is unknown; one of soft, straight_through, reinmax"):
        draw_relaxed_tokens(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1), "hard")


def test_divergence():
    """Oracle: ln K - entropy by torch.distributions, summed over positions; 0 of uniform, ln K of a sure token."""
    logits = torch.randn(2, 7, 3, 3, dtype=torch.float64)
    entropy = torch.distributions.Categorical(logits=logits.permute(0, 2, 3, 1)).entropy()
    torch.testing.assert_close(compute_kl_to_uniform(logits), (math.log(7) - entropy).sum((1, 2)))
    assert float(compute_kl_to_uniform(torch.ones(1, 7, 1))) == pytest.approx(0, abs=1e-6)
    assert float(
        compute_kl_to_uniform(1e4 * F.one_hot(torch.tensor([[2]]), 7).permute(0, 2, 1).double())
    ) == pytest.approx(math.log(7))


def test_codebook():
    """Oracle: rows of the table by tokens, and by one-hot weights of them; a mixture is the mean of its rows."""
    codebook = Codebook(5, 3)
    tokens = torch.tensor([[[0, 4], [2, 2]], [[1, 1], [3, 0]]])
    expected = codebook.weight[tokens].permute(0, 3, 1, 2)
    torch.testing.assert_close(codebook(tokens), expected)
    weights = F.one_hot(tokens, 5).permute(0, 3, 1, 2)
    torch.testing.assert_close(codebook(weights.float()), expected)
    halves = torch.zeros(1, 5, 1, 1)
    halves[0, 1:3] = 0.5
    torch.testing.assert_close(codebook(halves)[0, :, 0, 0], codebook.weight[1:3].mean(0))
    assert codebook(weights.double()).dtype == torch.float32  # the table's own precision


def test_wide():
    """Oracle: the precisions, by hand."""
    kinds = [
        upcast_to_float32(torch.ones(1, dtype=dtype)).dtype for dtype in (torch.bfloat16, torch.float32, torch.float64)
    ]
    assert kinds == [torch.float32, torch.float32, torch.float64]
