"""Paths, predictions, losses and densities of times. Oracle: SiT's, JiT's, LightningDiT's and RAE's own, run live."""

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import kstest, norm
from torch import Tensor

from dstrain.diffusion.densities import DENSITIES, compute_time_shift_by_dimension
from dstrain.diffusion.flow import FlowMatching
from dstrain.diffusion.interpolant import PATHS, PREDICTIONS, Interpolant, compute_time_of_noise_ratio

GOLDEN = Path(__file__).parents[1] / "golden" / "dit"
OURS = {"velocity": "velocity", "noise": "eps", "score": "score"}  # SiT's words for predictions
SIT = load_file(GOLDEN / "sit_losses.safetensors")


@pytest.mark.parametrize("key", sorted(key for key in SIT if key.endswith("/loss")))
def test_sit_losses(key: str) -> None:
    """Oracle: SiT's losses of three paths, predictions and weights; it counts time from the noise."""
    _, path, target, weight, _ = key.split("/")
    out = -SIT["in/model_output"] if target == "velocity" else SIT["in/model_output"]
    interpolant = Interpolant(path.lower(), OURS[target], None if weight == "none" else weight)
    losses = interpolant.compute_losses(out, SIT["in/x1_data"], SIT["in/x0_noise"], 1 - SIT["in/t"])
    torch.testing.assert_close(losses, SIT[key], rtol=1e-5, atol=0)


@pytest.mark.parametrize(("path", "target"), [*product(("Linear", "GVP", "VP"), OURS)])
def test_sit_drifts_and_scores(path: str, target: str) -> None:
    """Oracle: what SiT takes a prediction to mean as the drift of its ODE, which runs backwards here, and as score."""
    interpolant, t = Interpolant(path.lower(), OURS[target]), 1 - SIT["in/t"]
    out = -SIT["in/model_output"] if target == "velocity" else SIT["in/model_output"]
    x_t = interpolant.mix_noise(SIT["in/x1_data"], SIT["in/x0_noise"], t)
    torch.testing.assert_close(x_t, SIT[f"out/{path}/xt"], rtol=1e-5, atol=1e-6)
    for wanted, name, sign in (("velocity", "drift", -1), ("score", "score", 1)):
        expected = SIT[f"out/{path}/{target}/{name}"]
        found = sign * interpolant.convert_prediction(out, x_t, t, wanted)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("path", "given", "wanted"), [*product(PATHS, PREDICTIONS, PREDICTIONS)])
def test_conversions_invert_each_other(path: str, given: str, wanted: str) -> None:
    """Oracle: the inverse: a prediction turned into another one and back is itself, and the truth stays true."""
    generator = torch.Generator().manual_seed(0)
    x, eps = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64)
    t = torch.linspace(0.05, 0.95, 6, dtype=torch.float64)
    there, back = Interpolant(path, given), Interpolant(path, wanted)
    x_t = there.mix_noise(x, eps, t)
    out = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    again = back.convert_prediction(there.convert_prediction(out, x_t, t, wanted), x_t, t, given)
    torch.testing.assert_close(again, out, rtol=1e-9, atol=1e-9)
    _, sigma, alpha_slope, sigma_slope = there.compute_coefficients(t, x)
    truth = {"velocity": alpha_slope * x + sigma_slope * eps, "x": x, "eps": eps, "score": -eps / sigma}
    torch.testing.assert_close(
        there.convert_prediction(truth[given], x_t, t, wanted), truth[wanted], rtol=1e-9, atol=1e-9
    )
    loss = Interpolant(path, given, "x").compute_losses(truth[given], x, eps, t)
    assert loss.abs().max() < 1e-18


@pytest.mark.parametrize("path", PATHS)
def test_times_of_noise(path: str) -> None:
    """Oracle: the path's own sigma / alpha, and central differences for its derivatives."""
    for t in (0.01, 0.3, 0.9):
        alpha, sigma = Interpolant(path).compute_alpha_and_sigma(t)
        assert compute_time_of_noise_ratio(path, sigma / alpha) == pytest.approx(t, rel=1e-9)
    t, step = torch.tensor([0.2, 0.7], dtype=torch.float64), 1e-6
    above, below, here = (PATHS[path](at) for at in (t + step, t - step, t))
    for value in (0, 1):
        torch.testing.assert_close((above[value] - below[value]) / (2 * step), here[value + 2], rtol=1e-7, atol=1e-8)


def test_jit_losses_and_times() -> None:
    """Oracle: JiT: predictions of x, measured as velocities whose divisor is clipped, and logit-normal times."""
    tensors = load_file(GOLDEN / "jit.safetensors")
    interpolant = Interpolant("linear", "x", "velocity", t_min=0.05)
    losses = interpolant.compute_losses(
        tensors["out/x_pred"], tensors["in/x"], tensors["in/noise"], 1 - tensors["in/t"]
    )
    torch.testing.assert_close(losses.mean(), tensors["out/loss"].squeeze(), rtol=1e-5, atol=0)
    uniforms = torch.special.ndtr(
        -tensors["in/time_normals"].double()
    )  # its normal numbers, its time counts from noise
    times = FlowMatching(0.8, 0.8).draw_times(uniforms)
    torch.testing.assert_close(1 - times.float(), tensors["out/times"], rtol=1e-5, atol=1e-6)


def test_rae_times_and_losses() -> None:
    """Oracle: RAE: logit-normal times up to 0.999, shifted by the dimension of its latents."""
    tensors = load_file(GOLDEN / "rae_transport.safetensors")
    shift = compute_time_shift_by_dimension(768 * 16 * 16)
    assert shift == pytest.approx(6.928203)
    flow = FlowMatching(shift=shift, t_max=0.999, time_scale=1)
    times = flow.draw_times(tensors["in/uniform"])
    torch.testing.assert_close(times, tensors["out/t"], rtol=1e-5, atol=1e-6)
    losses = Interpolant().compute_losses(tensors["in/model_output"], tensors["in/data"], tensors["in/noise"], times)
    torch.testing.assert_close(losses, tensors["out/loss"], rtol=1e-5, atol=0)


def test_lightningdit_losses() -> None:
    """Oracle: LightningDiT's loss with its cosine over channels."""
    tensors = load_file(GOLDEN / "lightningdit_losses.safetensors")
    inputs = (-tensors["in/model_output"], tensors["in/x1_data"], tensors["in/x0_noise"], 1 - tensors["in/t"])
    torch.testing.assert_close(Interpolant().compute_losses(*inputs), tensors["out/loss"], rtol=1e-5, atol=0)
    both = Interpolant(cosine=1.0).compute_losses(*inputs)
    torch.testing.assert_close(both, tensors["out/loss"] + tensors["out/cos_loss"], rtol=1e-5, atol=0)


def logit(t: Tensor) -> Tensor:
    return (t / (1 - t)).log()


def mode(t: Tensor) -> Tensor:
    """The distribution of SD3's mode density, by inverting its map on a fine grid."""
    u = torch.linspace(0, 1, 200_001, dtype=torch.float64)
    times = 1 - u - 1.29 * ((math.pi / 2 * u).cos().square() - 1 + u)
    order = times.argsort()
    place = torch.searchsorted(times[order], t.double()).clamp(max=len(u) - 1)
    return torch.linspace(0, 1, len(u), dtype=torch.float64)[place]


@pytest.mark.parametrize(
    ("density", "arguments", "distribution"),
    [
        ("uniform", (0.0, 1.0), lambda t: t),
        ("uniform", (0.0, 1.0, 0.9), lambda t: t / 0.9),
        ("logit_normal", (0.3, 0.8), lambda t: norm.cdf((logit(t) - 0.3) / 0.8)),
        (
            "logit_normal",
            (0.0, 1.0, 0.7),
            lambda t: norm.cdf(logit(t)) / norm.cdf(math.log(0.7 / 0.3)),
        ),
        ("mode", (0.0, 1.29), mode),
        ("cosmap", (0.0, 1.0), lambda t: 2 / math.pi * torch.atan(t / (1 - t))),
        ("cosmap", (0.0, 1.0, 0.6), lambda t: torch.atan(t / (1 - t)) / math.atan(0.6 / 0.4)),
    ],
)
def test_densities(density: str, arguments: tuple, distribution) -> None:
    """Oracle: the closed form of each distribution, by Kolmogorov and Smirnov's test; and the sample's number alone."""
    uniforms = torch.rand(20_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    times = DENSITIES[density](uniforms, *arguments)
    assert times.min() >= 0 and times.max() <= (arguments[2] if len(arguments) > 2 else 1)
    assert kstest(times.numpy(), lambda t: np.asarray(distribution(torch.from_numpy(t)))).pvalue > 1e-3
    assert torch.equal(DENSITIES[density](uniforms[7:8], *arguments), times[7:8])


def test_ends_of_densities() -> None:
    """Oracle: the interval itself: uniform numbers of both ends give times within [0, 1], none of them NaN."""
    uniforms = torch.tensor([0.0, 1 - 2**-24])
    for density in DENSITIES:
        times = DENSITIES[density](uniforms, 0.0, 1.0)
        assert times.isfinite().all() and times.min() >= 0 and times.max() <= 1, density


@pytest.mark.parametrize(
    ("path", "prediction", "loss"),
    [*product(PATHS, PREDICTIONS, (None, "velocity", "x", "likelihood"))],
)
def test_losses_at_the_ends(path: str, prediction: str, loss: str | None) -> None:
    """Oracle: finiteness: with t_min no time of training, 0 and 1 among them, divides by 0; nor does a velocity."""
    generator = torch.Generator().manual_seed(0)
    x, noise, out = torch.randn(3, 4, 3, 2, 2, generator=generator)
    t = torch.tensor([0.0, 1e-6, 1 - 1e-6, 1.0])
    interpolant = Interpolant(path, prediction, loss, t_min=0.05)
    assert interpolant.compute_losses(out, x, noise, t).isfinite().all()
    assert interpolant.convert_prediction(out, interpolant.mix_noise(x, noise, t), t, "velocity").isfinite().all()
    if prediction == "velocity" and path != "vp" and loss != "likelihood":
        assert Interpolant(path, prediction, loss).compute_losses(out, x, noise, t).isfinite().all()
