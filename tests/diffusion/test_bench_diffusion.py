"""The benchmark's two sides are the same arithmetic and the same distribution, and its script prints what it says."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from dstrain.diffusion import schedule
from dstrain.diffusion.gaussian import GaussianDiffusion
from dstrain.diffusion.timesteps import LossSecondMomentSampler, UniformSampler
from launch.bench import diffusion as bench_diffusion
from tests.support.launch import ROOT, environment


def test_losses_are_the_same():
    """Oracle: each other: q_sample, every term and the gradient; with t = 0 and T - 1 among the timesteps."""
    betas = schedule.make_betas("cosine", bench_diffusion.STEPS)
    sides = bench_diffusion.PlainDiffusion(betas.numpy()), GaussianDiffusion(betas, loss="rescaled_mse")
    x_start, (t, *_), noise, out = bench_diffusion.problem(8, 8)
    x_start = x_start.mul(1.2).clamp(-1, 1)  # the end levels, too
    t[:3] = torch.tensor([0, bench_diffusion.STEPS - 1, 1])
    found = []
    for side in sides:
        out.grad = None
        terms = side.training_losses(lambda x_t, times: out, x_start, t, noise)
        terms["loss"].sum().backward()
        found.append(
            [side.q_sample(x_start, t, noise), *(terms[name].detach() for name in ("loss", "mse", "vb")), out.grad]
        )
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-4, atol=2e-6)


def test_every_line_times_the_shape_that_it_names():
    """Oracle: the shape of what each line of q_sample returns, once all lines are known, as when they are timed."""
    for name, *sides, _ in [line for line in bench_diffusion.losses() if line[0].startswith("q_sample")]:
        assert ["x".join(map(str, work(0).shape)) for work in sides] == [name.split()[1]] * 2


def test_histories_are_the_same():
    """Oracle: each other: losses kept, probabilities, and timesteps at the same uniform numbers, cold and warm."""
    random = np.random.RandomState(1)
    plain, ours = bench_diffusion.PlainLossAware(30), LossSecondMomentSampler(30)
    for length in (40, 7, 600, 250):
        t, losses = torch.from_numpy(random.randint(0, 30, length)), torch.from_numpy(random.rand(length) + 0.1)
        plain.observe(t, losses)
        ours.observe(t, losses)
        kept = ours.state_dict()["history"].numpy()
        assert (np.sort(kept) == np.sort(plain.history)).all()
        weights = plain.weights()
        np.testing.assert_allclose(ours.get_probabilities().numpy(), weights / weights.sum(), rtol=1e-12)
        agree(plain, ours)
    assert (plain.counts == 10).all()
    agree(bench_diffusion.PlainUniform(1000), UniformSampler(1000))


def agree(plain: bench_diffusion.PlainUniform, ours: UniformSampler | LossSecondMomentSampler) -> None:
    """The same draws from the same numbers, but for those that float32 moves across the end of a timestep."""
    plain.random = np.random.RandomState(7)
    numbers = np.random.RandomState(7).random_sample(5000)  # what choice() takes from its generator
    t, weights = plain.sample(5000)
    same_t, same_weights = ours.sample(torch.from_numpy(numbers).float())
    alike = t == same_t
    assert float(alike.float().mean()) > 0.999
    torch.testing.assert_close(weights[alike], same_weights[alike])


@pytest.mark.slow
def test_the_script():
    """Oracle: the lines that its docstring gives figures for, each with two times above zero and their ratio."""
    done = subprocess.run(
        [sys.executable, ROOT / "launch/bench/diffusion.py", "--rounds", "3"],
        env=environment(),
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.rsplit(maxsplit=4) for line in done.stdout.splitlines()[1:]]
    figures = {name.strip(): [float(word) for word in words] for name, *words in rows}
    for name in (
        "q_sample 32x3x64x64",
        "training_losses 2x3x64x64",
        "UniformSampler 2048",
        "LossSecondMoment observe 2048 of 4000",
        "sample again 2048 of 1000",
    ):
        plain, ours, fastest, _ = figures[name]
        assert plain > 0 and ours > 0 and fastest == pytest.approx(plain / ours, rel=0.05)
