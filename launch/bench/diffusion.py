"""Times the arithmetic around the network against plain implementations in the original's manner, on this machine.

    python launch/bench/diffusion.py [--rounds 60] [--only WORD]

plain    as the original does it, written here by its definitions: float64 tables in numpy, uploaded and expanded for
         every coefficient; the bound by mean and variance of both distributions, the decoder's likelihood of every
         sample; a history that a loop with .item() fills; weights and numpy's choice anew for every draw
fast     dstrain/diffusion; tests/diffusion/test_bench_diffusion.py shows that both sides compute the same

Both sides are timed in turn, A B A B, on one thread. The ratios plain / fast are of the fastest times and of the
medians. Measured 2026-11-21 on two cores of an AMD EPYC (Zen 5, AVX-512) that other work kept busy, fastest:

    q_sample              2.7 (2x3x64x64), 2.2 (8), 2.0 (32); 2.3 (32x3x32x32). Target 2.3, missed by large batches:
                          fast passes over the data twice, plain three times. Where both wait for memory, that is the
                          whole gain; a single pass needs a compiler.
    training_losses       6.1 (2x3x64x64), 7.9 (8), 10 (32); 7.6 (32x3x32x32). Target 5.
      with its gradient   4.5 (2x3x64x64), 7.1 (8), 9.9 (32); 6.6 (32x3x32x32): a batch of two is mostly calls.
    UniformSampler        29. Target 25. The uniform numbers themselves cost 0.08 ms for 2048 samples, since each
                          belongs to its sample; with them the ratio is 1.8.
    LossSecondMoment      observe 30 to 38 at T = 1000, 25 to 31 at T = 4000 (target 30), where half of the time goes
                          into the weights of all t; sample 7.4 and 7.6 after an update, 10 and 14 again (target 5).
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dstrain import rng
from dstrain.diffusion import schedule
from dstrain.diffusion.gaussian import GaussianDiffusion
from dstrain.diffusion.timesteps import LossSecondMomentSampler, UniformSampler

# With these the allocator keeps its pages; without them page faults are what is measured.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
    "OMP_NUM_THREADS": "1",
}
STEPS = 1000  # of the chain whose losses are timed
DRAWN = 2048  # timesteps in a draw or an update
VARIED = 16  # inputs in turn, so that no branch predictor learns them
Work = Callable[[int], object]  # does the work on input number i
Line = tuple[str, Work, Work, Work]  # name, plain, fast, and what comes before each call


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="pairs of timings of each line")
    parser.add_argument("--only", default="", help="lines whose name contains this")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, sys.orig_argv, os.environ | ENVIRONMENT)
    torch.set_num_threads(1)
    lines = [*losses(), *timesteps()]
    chosen = [line for line in lines if options.only in line[0]]
    if not chosen:
        parser.error(f"--only {options.only}: no line has this in its name, of {', '.join(name for name, *_ in lines)}")
    print(f"{'microseconds, and plain / fast':42}{'plain':>10}{'fast':>10}{'fastest':>10}{'median':>10}")
    for name, *line in chosen:
        seconds = timed(*line, options.rounds)
        plain, fast = (1e6 * min(side) for side in seconds)
        median = statistics.median(seconds[0]) / statistics.median(seconds[1])
        print(f"{name:42}{plain:10.1f}{fast:10.1f}{plain / fast:10.2f}{median:10.2f}", flush=True)


def timed(plain: Work, fast: Work, before: Work, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each side on the same inputs, A B A B; `before` prepares input i and is not timed.

    An untimed call precedes each timed one. Otherwise a side would pay for what the other one has left in caches and in
    the allocator, such as thousands of freed scalars after a loop of .item().
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(-3, rounds):
        for side, work in zip(seconds, (plain, fast)):
            work((number + 1) % VARIED)
            before(number % VARIED)
            start = time.perf_counter()
            work(number % VARIED)
            side.append(time.perf_counter() - start)
    return seconds[0][3:], seconds[1][3:]


def nothing(number: int) -> None:
    """What comes before most calls."""


# ------------------------------------------------------------------------------------------------------------- losses


def problem(batch: int, size: int, seed: int = 0) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """x_start (B, 3, S, S), VARIED timesteps (B,), noise, and an output of a network (B, 6, S, S), a leaf."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, 3, size, size)
    x_start = torch.rand(shape, generator=generator) * 2 - 1
    t = [torch.randint(0, STEPS, (batch,), generator=generator) for _ in range(VARIED)]
    out = torch.randn(batch, 6, size, size, generator=generator)
    out[:, 3:].tanh_()
    return x_start, t, torch.randn(shape, generator=generator), out.requires_grad_()


def losses() -> Iterator[Line]:
    """q_sample and the hybrid loss of a learned variance; the network is a constant, so that arithmetic is timed."""
    betas = schedule.make_betas("cosine", STEPS)
    plain, fast = PlainDiffusion(betas.numpy()), GaussianDiffusion(betas, loss="rescaled_mse")
    for batch, size in ((2, 64), (8, 64), (32, 64), (32, 32)):
        yield from of_shape(plain, fast, batch, size)


def of_shape(plain: "PlainDiffusion", fast: GaussianDiffusion, batch: int, size: int) -> Iterator[Line]:
    """The lines of one shape. They are a function of their own, since each keeps its inputs until it is timed."""
    x_start, t, noise, out = problem(batch, size)

    def drawn(chain: PlainDiffusion | GaussianDiffusion, i: int) -> Tensor:
        return chain.q_sample(x_start, t[i], noise)

    def forward(chain: PlainDiffusion | GaussianDiffusion, i: int) -> Tensor:
        return chain.training_losses(lambda x_t, times: out, x_start, t[i], noise)["loss"]

    def both(chain: PlainDiffusion | GaussianDiffusion, i: int) -> None:
        out.grad = None
        forward(chain, i).mean().backward()

    for name, work in (("q_sample", drawn), ("training_losses", forward), ("  with its gradient", both)):
        yield f"{name} {batch}x3x{size}x{size}", partial(work, plain), partial(work, fast), nothing


class PlainDiffusion:
    """The hybrid loss by its definitions: float64 tables in numpy, brought over and expanded for every coefficient.

    Predicts eps, variance in the learned range; the bound through mean and variance of both distributions, the
    decoder's likelihood of every sample, then a choice by t. Scaled as rescaled_mse.
    """

    def __init__(self, betas: np.ndarray) -> None:
        cumulative = np.cumprod(1 - betas)
        before = np.append(1.0, cumulative[:-1])
        variance = betas * (1 - before) / (1 - cumulative)
        self.num_timesteps = len(betas)
        self.signal, self.sigma = np.sqrt(cumulative), np.sqrt(1 - cumulative)
        self.inverse, self.inverse_less = np.sqrt(1 / cumulative), np.sqrt(1 / cumulative - 1)
        self.first = betas * np.sqrt(before) / (1 - cumulative)
        self.second = (1 - before) * np.sqrt(1 - betas) / (1 - cumulative)
        self.posterior_log = np.log(np.append(variance[1], variance[1:]))
        self.beta_log = np.log(betas)

    def at(self, table: np.ndarray, t: Tensor, like: Tensor) -> Tensor:
        values = torch.from_numpy(table).to(t.device)[t].float()
        while values.ndim < like.ndim:
            values = values[..., None]
        return values.expand(like.shape)

    def q_sample(self, x_start: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        return self.at(self.signal, t, x_start) * x_start + self.at(self.sigma, t, x_start) * noise

    def posterior_mean(self, x_start: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        return self.at(self.first, t, x_t) * x_start + self.at(self.second, t, x_t) * x_t

    def training_losses(self, network: Callable, x_start: Tensor, t: Tensor, noise: Tensor) -> dict[str, Tensor]:
        x_t = self.q_sample(x_start, t, noise)
        eps, values = network(x_t, t).split(x_t.shape[1], dim=1)
        bound = self.bound(eps.detach(), values, x_start, x_t, t) * (self.num_timesteps / 1000)
        mse = flat((noise - eps) ** 2)
        return {"loss": mse + bound, "mse": mse, "vb": bound}

    def bound(self, eps: Tensor, values: Tensor, x_start: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        true_mean, true_log = self.posterior_mean(x_start, x_t, t), self.at(self.posterior_log, t, x_t)
        low, high = self.at(self.posterior_log, t, x_t), self.at(self.beta_log, t, x_t)
        share = (values + 1) / 2
        log = share * high + (1 - share) * low
        predicted = self.at(self.inverse, t, x_t) * x_t - self.at(self.inverse_less, t, x_t) * eps
        mean = self.posterior_mean(predicted, x_t, t)
        kl = 0.5 * (-1.0 + log - true_log + torch.exp(true_log - log) + (true_mean - mean) ** 2 * torch.exp(-log))
        nll = -self.likelihood(x_start, mean, 0.5 * log)
        return torch.where(t == 0, flat(nll) / math.log(2), flat(kl) / math.log(2))

    def likelihood(self, x: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
        def normal(x):
            return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))

        centered, sharpness = x - mean, torch.exp(-log_scale)
        upper, lower = normal(sharpness * (centered + 1 / 255)), normal(sharpness * (centered - 1 / 255))
        log_upper, log_rest = torch.log(upper.clamp(min=1e-12)), torch.log((1 - lower).clamp(min=1e-12))
        log_middle = torch.log((upper - lower).clamp(min=1e-12))
        return torch.where(x < -0.999, log_upper, torch.where(x > 0.999, log_rest, log_middle))


def flat(values: Tensor) -> Tensor:
    return values.mean(dim=list(range(1, values.ndim)))


# ---------------------------------------------------------------------------------------------------------- timesteps


def timesteps() -> Iterator[Line]:
    """Draws and updates of DRAWN timesteps; fast draws from uniform numbers that belong to the samples."""
    keys = [rng.keys(0, step, torch.arange(DRAWN)) for step in range(VARIED)]
    uniforms = [rng.uniform(key, "timestep") for key in keys]
    plain, fast = PlainUniform(STEPS), UniformSampler(STEPS)
    yield f"UniformSampler {DRAWN}", lambda i: plain.sample(DRAWN), lambda i: fast.sample(uniforms[i]), nothing
    yield (
        f"  with its uniform numbers {DRAWN}",
        lambda i: plain.sample(DRAWN),
        lambda i: fast.sample(rng.uniform(keys[i], "timestep")),
        nothing,
    )
    for total in (1000, 4000):
        yield from warm(total, uniforms)


def warm(total: int, uniforms: list[Tensor]) -> Iterator[Line]:
    """The loss-aware sampler at `total` timesteps, its history full."""
    plain, fast = PlainLossAware(total), LossSecondMomentSampler(total)
    generator = torch.Generator().manual_seed(0)
    for _ in range(fast.history_per_term):
        losses = torch.rand(total, generator=generator) + 0.1
        plain.observe(torch.arange(total), losses)
        fast.observe(torch.arange(total), losses)
    t = [fast.sample(numbers)[0] for numbers in uniforms]
    observed = [torch.rand(DRAWN, generator=generator) + 0.1 for _ in uniforms]

    def update(i):
        return fast.observe(t[i], observed[i])

    name = f"{DRAWN} of {total}"
    yield f"LossSecondMoment observe {name}", lambda i: plain.observe(t[i], observed[i]), update, nothing
    yield f"  sample after an update {name}", lambda i: plain.sample(DRAWN), lambda i: fast.sample(uniforms[i]), update
    yield f"  sample again {name}", lambda i: plain.sample(DRAWN), lambda i: fast.sample(uniforms[i]), nothing


class PlainUniform:
    """Draws by numpy from weights that are normalized anew for every draw."""

    def __init__(self, num_timesteps: int, seed: int = 0) -> None:
        self.num_timesteps, self.random = num_timesteps, np.random.RandomState(seed)

    def weights(self) -> np.ndarray:
        return np.ones(self.num_timesteps)

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        weights = self.weights()
        p = weights / np.sum(weights)
        drawn = self.random.choice(len(p), size=(count,), p=p)
        return torch.from_numpy(drawn).long(), torch.from_numpy(1 / (len(p) * p[drawn])).float()


class PlainLossAware(PlainUniform):
    """A history in numpy that a loop over the losses shifts along, and weights computed anew for every draw."""

    def __init__(self, num_timesteps: int, history_per_term: int = 10, uniform_prob: float = 0.001) -> None:
        super().__init__(num_timesteps)
        self.history_per_term, self.uniform_prob = history_per_term, uniform_prob
        self.history = np.zeros((num_timesteps, history_per_term))
        self.counts = np.zeros(num_timesteps, dtype=int)

    def observe(self, t: Tensor, losses: Tensor) -> None:
        for step, loss in zip([step.item() for step in t], [loss.item() for loss in losses]):
            if self.counts[step] == self.history_per_term:
                self.history[step, :-1] = self.history[step, 1:]
                self.history[step, -1] = loss
            else:
                self.history[step, self.counts[step]] = loss
                self.counts[step] += 1

    def weights(self) -> np.ndarray:
        if not (self.counts == self.history_per_term).all():
            return np.ones(self.num_timesteps)
        weights = np.sqrt(np.mean(self.history**2, axis=1))
        weights = weights / np.sum(weights)
        return weights * (1 - self.uniform_prob) + self.uniform_prob / self.num_timesteps


if __name__ == "__main__":
    main()
