"""Gaussian diffusion against the original's tables and against the textbook formulas, written out here."""

import math

import pytest
import torch

from dstrain.diffusion import gaussian, likelihood, schedule
from dstrain.diffusion.gaussian import GaussianDiffusion
from dstrain.diffusion.likelihood import can_read_without_device_sync
from tests.support import golden

SHAPE = (5, 2, 4, 4)


def randn(seed, shape=SHAPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def data():
    x_start = (randn(1) * 0.5).clamp(-1, 1)
    return x_start, torch.tensor([0, 1, 20, 48, 49]), randn(2)


def chain(**kwargs):
    return GaussianDiffusion(schedule.make_betas("cosine", 50), **kwargs)


def network_of(diffusion, seed=3):
    """A fixed random "network": what it says depends on x_t smoothly."""
    weights = randn(seed, (2, SHAPE[1] * (1 + diffusion.learns_variance), 1, 1))

    def network(x, t):
        double = torch.cat((x, x), dim=1) if diffusion.learns_variance else x
        return torch.tanh(double * weights[0] + weights[1])

    return network


def test_tables_of_iddpm():
    """Oracle: the original's tables at T = 100, cosine."""
    tensors, _ = golden.load("iddpm_hybrid_cosine")
    tables = GaussianDiffusion(schedule.make_betas("cosine", 100)).tables
    for name, table in tensors.items():
        if name.startswith("table."):
            torch.testing.assert_close(tables[name[6:]], table, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("variance", ["fixed_small", "fixed_large"])
def test_fixed_variance_at_the_first_timestep(variance):
    """Oracle: by hand: the posterior's of t = 1 at t = 0, where it is 0, in both; from there on beta's, where large."""
    betas = schedule.make_betas("linear", 50)
    log_variance = GaussianDiffusion(betas, variance=variance).tables["fixed_log_variance"]
    cumulative = torch.cumprod(1 - betas, 0)
    posterior = betas[1] * (1 - cumulative[0]) / (1 - cumulative[1])
    assert float(log_variance[0]) == pytest.approx(math.log(posterior))
    assert float(log_variance[1]) == pytest.approx(math.log(posterior if variance == "fixed_small" else betas[1]))


def test_q_sample_and_posterior(data):
    """Oracle: Equations 4 and 7 of DDPM; at t = 0 the posterior is x_start itself."""
    x_start, t, noise = data
    diffusion = chain()
    betas = schedule.make_betas("cosine", 50)
    alphas = torch.cumprod(1 - betas, 0)
    before = torch.cat((torch.ones(1).double(), alphas[:-1]))
    a, b, p = (table[t].view(-1, 1, 1, 1) for table in (alphas, betas, before))
    x_t = diffusion.q_sample(x_start, t, noise)
    torch.testing.assert_close(x_t, a.sqrt() * x_start + (1 - a).sqrt() * noise)
    mean, log_variance = diffusion.q_posterior(x_start, x_t, t)
    torch.testing.assert_close(mean, (p.sqrt() * b * x_start + (1 - b).sqrt() * (1 - p) * x_t) / (1 - a))
    torch.testing.assert_close(mean[0], x_start[0])
    torch.testing.assert_close(log_variance[1:], (b * (1 - p) / (1 - a)).log()[1:])
    assert torch.equal(diffusion.q_posterior(x_start, x_t, t * 0)[1], diffusion.q_posterior(x_start, x_t, t * 0 + 1)[1])


@pytest.mark.parametrize("prediction", gaussian.PREDICTIONS)
def test_conventions_agree(data, prediction):
    """Oracle: a network that predicts its target means x_start exactly, in every convention."""
    x_start, t, noise = data
    diffusion = chain(prediction=prediction, variance="fixed_small")
    x_t = diffusion.q_sample(x_start, t, noise)
    target = diffusion.compute_training_target(x_start, x_t, t, noise)
    mean, _, predicted = diffusion.p_mean_variance(lambda x, times: target, x_t, t)
    torch.testing.assert_close(predicted, x_start, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mean, diffusion.q_posterior(x_start, x_t, t)[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(diffusion.predict_eps(x_start, x_t, t), noise, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("prediction", gaussian.PREDICTIONS)
@pytest.mark.parametrize("variance", gaussian.VARIANCES)
def test_bound(data, prediction, variance):
    """Oracle: KL of torch.distributions between posterior and p, both formed in full; at t = 0 the decoder's NLL."""
    x_start, t, noise = data
    diffusion = chain(prediction=prediction, variance=variance, loss="kl")
    network = network_of(diffusion)
    terms = diffusion.training_losses(network, x_start, t, noise)
    x_t = diffusion.q_sample(x_start, t, noise)
    mean, log_variance, _ = diffusion.p_mean_variance(network, x_t, t)
    true_mean, true_log = diffusion.q_posterior(x_start, x_t, t)

    def normal(mean, log):
        return torch.distributions.Normal(mean, (0.5 * log).exp().expand_as(mean))

    kl = torch.distributions.kl_divergence(normal(true_mean, true_log), normal(mean, log_variance))
    nll = -likelihood.compute_discretized_log_likelihood(x_start, mean, 0.5 * log_variance)
    expected = torch.where(t.view(-1, 1, 1, 1) == 0, nll, kl).flatten(1).mean(1) / math.log(2)
    torch.testing.assert_close(terms["vb"], expected, rtol=1e-6, atol=1e-8)
    scaled = chain(prediction=prediction, variance=variance, loss="rescaled_kl")
    torch.testing.assert_close(scaled.training_losses(network, x_start, t, noise)["loss"], expected * 50)


@pytest.mark.parametrize("prediction", gaussian.PREDICTIONS)
def test_hybrid_gradient(data, prediction):
    """Oracle: the bound moves only the variance channels, the mse only the others."""
    x_start, t, noise = data
    for loss, factor in (("mse", 1.0), ("rescaled_mse", 50 / 1000)):
        diffusion = chain(prediction=prediction, loss=loss)
        out = randn(4, (5, 4, 4, 4)).requires_grad_()
        terms = diffusion.training_losses(lambda x, times: out, x_start, t, noise)
        torch.testing.assert_close(terms["loss"].detach(), terms["mse"] + terms["vb"])
        terms["loss"].sum().backward()
        target = diffusion.compute_training_target(x_start, diffusion.q_sample(x_start, t, noise), t, noise)
        means = out.detach()[:, :2]
        torch.testing.assert_close(out.grad[:, :2], 2 * (means - target) / means[0].numel())
        kl = chain(prediction=prediction, loss="kl")
        other = out.detach().requires_grad_()
        kl.training_losses(lambda x, times: other, x_start, t, noise)["loss"].sum().backward()
        torch.testing.assert_close(out.grad[:, 2:], factor * other.grad[:, 2:])


def test_accelerator_path_is_the_same(data, monkeypatch):
    """Oracle: the path that may read t, values and gradients."""
    x_start, t, noise = data
    diffusion, found = chain(loss="kl"), []
    for readable in (True, False):
        monkeypatch.setattr(gaussian, "can_read_without_device_sync", lambda t, readable=readable: readable)
        out = randn(4, (5, 4, 4, 4)).requires_grad_()
        terms = diffusion.training_losses(lambda x, times: out, x_start, t, noise)
        terms["loss"].sum().backward()
        found.append((terms["loss"].detach(), out.grad))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_what_the_host_may_read():
    """Oracle: by hand: plain tensors on the CPU; not those of a device or of a kind of their own."""
    assert can_read_without_device_sync(torch.ones(1)) and not can_read_without_device_sync(
        torch.ones(1, device="meta")
    )
    assert not can_read_without_device_sync(torch.nn.Parameter(torch.ones(1)))


def test_expm1():
    """Oracle: torch's own in float64; finite differences for both derivatives; infinities without a warning."""
    x = torch.cat((torch.linspace(-90, 88, 1001), torch.logspace(-30, 0, 301), -torch.logspace(-30, 0, 301)))
    torch.testing.assert_close(likelihood.compute_expm1(x).double(), torch.expm1(x.double()), rtol=5e-7, atol=0)
    ends = torch.tensor([-torch.inf, 1000.0, torch.inf, torch.nan])
    assert torch.equal(likelihood.compute_expm1(ends)[:3], torch.tensor([-1, torch.inf, torch.inf]))
    assert bool(likelihood.compute_expm1(ends)[3].isnan())
    assert likelihood.compute_expm1(torch.ones(2, device="meta")).shape == (2,)  # no value of a device is read
    few = torch.tensor([-3.0, -1e-3, 0.0, 0.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(likelihood.compute_expm1, few) and torch.autograd.gradgradcheck(
        likelihood.compute_expm1, few
    )


def test_discretized_likelihood_sums_to_one():
    """Oracle: the probabilities of all 256 levels sum to 1."""
    levels = torch.linspace(-1, 1, 256, dtype=torch.float64)[:, None]
    mean, log_scale = torch.tensor([[-0.98, 0.1, 0.7]]).double(), torch.tensor([[-2.0, -3.0, 0.0]]).double()
    total = likelihood.compute_discretized_log_likelihood(levels, mean, log_scale).exp().sum(0)
    torch.testing.assert_close(total, torch.ones(3).double(), rtol=1e-6, atol=1e-6)


def test_discretized_likelihood_is_a_gaussians():
    """Oracle: torch's normal distribution at the upper end of each level but the last; the tanh is
    within 3e-4 of it.
    """
    levels, scales = (
        torch.linspace(-1, 1, 256, dtype=torch.float64)[:, None],
        torch.tensor([[-2.0, -1.0, 0.5]]).double(),
    )
    below = (
        likelihood.compute_discretized_log_likelihood(levels, torch.tensor([[-0.5, 0.1, 0.7]]), scales).exp().cumsum(0)
    )
    exact = torch.special.ndtr((levels + 1 / 255 - torch.tensor([[-0.5, 0.1, 0.7]])) / scales.exp())
    assert float((below - exact)[:-1].abs().max()) < 3e-4


def test_the_least_likelihood():
    """Oracle: by hand: a level that is impossible in float32 has the probability 1e-12, as where
    bits were published.
    """
    x = torch.tensor([-1.0, 0.0, 1.0])
    found = likelihood.compute_discretized_log_likelihood(x, -x.sign() + (x == 0), torch.full((3,), -9.0))
    assert found.tolist() == pytest.approx([math.log(1e-12)] * 3)


def test_float32_agrees_with_float64(data):
    """Oracle: the same losses in float64."""
    x_start, t, noise = data
    diffusion = GaussianDiffusion(schedule.make_betas("linear", 1000))
    t = torch.tensor([0, 1, 400, 998, 999])
    network = network_of(diffusion)
    single = diffusion.training_losses(
        lambda x, times: network(x.double(), times).float(), x_start.float(), t, noise.float()
    )
    for name, term in diffusion.training_losses(network, x_start, t, noise).items():
        torch.testing.assert_close(single[name].double(), term, rtol=1e-4, atol=1e-6)


def test_network_sees_the_original_timesteps(data):
    """Oracle: the map of the respacing; with rescaling, t * 1000 / T of the original chain."""
    x_start, _, noise = data
    seen = []

    def network(x, t):
        seen.append(t)
        return torch.cat((x, x), dim=1)

    for rescale in (False, True):
        diffusion = chain(rescale_timesteps=rescale).respace("5")
        diffusion.training_losses(network, x_start, torch.arange(5), noise)
        assert diffusion.respace("").timestep_map == diffusion.timestep_map
    assert seen[0].tolist() == [0, 12, 24, 37, 49] and seen[0].dtype == torch.int64
    assert seen[1].tolist() == [0, 240, 480, 740, 980] and seen[1].dtype == torch.float32


def test_bits_per_dim_of_a_perfect_network(data):
    """Oracle: a network that knows x_start leaves no KL above t = 0, and mse 0; the total is the sum of its parts."""
    x_start, _, noise = data
    diffusion = chain(prediction="x_start", variance="fixed_small")
    shown = []
    terms = diffusion.compute_bits_per_dim(
        lambda x, t: x_start, x_start, lambda i: noise, progress=lambda steps: (shown.append(s) or s for s in steps)
    )
    assert shown == list(range(49, -1, -1)) and terms["vb"].shape == (5, 50)
    assert float(terms["vb"][:, :-1].abs().max()) < 1e-12 and float(terms["mse"].max()) < 1e-12
    torch.testing.assert_close(terms["total"], terms["vb"].sum(1) + terms["prior"])
    assert bool((terms["prior"] > 0).all()) and float(terms["prior"].max()) < 1e-3


def test_wrong_choices():
    """Oracle: a ValueError that lists what exists, or says what to set."""
    for key in ("prediction", "variance", "loss"):
        with pytest.raises(ValueError, match=f"{key}: 'x' is unknown"):
            chain(**{key: "x"})
    with pytest.raises(ValueError, match="prediction: eps tells nothing of x_start at the last timestep"):
        GaussianDiffusion(schedule.make_betas("jsd", 10))
    assert GaussianDiffusion(schedule.make_betas("jsd", 10), prediction="v").num_timesteps == 10
    with pytest.raises(ValueError, match="learn_sigma"):
        chain().training_losses(lambda x, t: x, randn(1), torch.zeros(5, dtype=torch.int64), randn(2))


def test_short_chains():
    """Oracle: by hand: the log variance at t = 0 is that of the posterior at t = 1, in a chain of one step log beta."""
    b0, b1 = 0.1, 0.3
    for betas, expected in (([b0], [b0]), ([b0, b1], [b1 * b0 / (1 - (1 - b0) * (1 - b1))] * 2)):
        tables = GaussianDiffusion(torch.tensor(betas, dtype=torch.float64)).tables
        found = tables["posterior_log_variance_clipped"].exp()
        assert found.tolist() == pytest.approx(expected) and tables["posterior_variance"][0] == 0


def test_one_step_chain(data):
    """Oracle: everything is finite where the chain has a single timestep."""
    x_start, t, noise = data
    for variance in gaussian.VARIANCES:
        diffusion = chain(variance=variance).respace("1")
        terms = diffusion.training_losses(network_of(diffusion), x_start, t * 0, noise)
        assert all(bool(term.isfinite().all()) for term in terms.values())
