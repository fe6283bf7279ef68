"""Samplers over a GaussianDiffusion: ancestral (DDPM), DDIM and its inverse, solvers by name; and guidance.

Notation as in gaussian.py. The i-th draw of noise is `noise(i)`, i = 0, 1, ... in the order of the chain. It is drawn
at t = 0, too, where it is not used: the number of draws is the number of steps. Every step is one call of the network,
with the same shapes on all ranks, so that they call alike.

Sources: Ho et al. 2020, Algorithm 2; Song et al. 2020 (DDIM), Equations 12 and 16; Ho & Salimans 2022 (guidance), Lin
et al. 2023 (its rescale), Kynkaanniemi et al. 2024 (its interval), Karras et al. 2024 (autoguidance).
"""

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dstrain.diffusion import schedule
from dstrain.diffusion.gaussian import GaussianDiffusion, Network, Noise, Progress, upcast_output_to_float32
from dstrain.diffusion.solvers import SOLVERS, Level, choose_eta, count_solver_steps, run_solver
from dstrain.recipe import ConfigError


@torch.no_grad()
def sample_ancestral(
    diffusion: GaussianDiffusion,
    network: Network,
    x: Tensor,
    noise: Noise,
    clip_denoised: bool = False,
    progress: Progress = iter,
) -> Tensor:
    """Returns samples x_start, made from noise x (B, C, ...) by ancestral sampling (DDPM, Algorithm 2), with one call
    of the network for each timestep of the chain. noise(i) is the noise that step i adds.
    """
    for draw, (step, t) in enumerate(_iterate_timesteps(diffusion, x, progress)):
        mean, log_variance, _ = diffusion.p_mean_variance(network, x, t, clip_denoised)
        eps = noise(draw)
        x = mean + torch.exp(0.5 * log_variance) * eps if step > 0 else mean
    return x


@torch.no_grad()
def sample_ddim(
    diffusion: GaussianDiffusion,
    network: Network,
    x: Tensor,
    noise: Noise | None = None,
    eta: float = 0.0,
    clip_denoised: bool = False,
    progress: Progress = iter,
) -> Tensor:
    """Returns samples x_start, made from noise x (B, C, ...) by DDIM, with one call of the network for each timestep of
    the chain. eta 0 adds no noise; eta 1 adds as much as DDPM, noise(i) in step i. Raises ConfigError if eta is above 0
    and `noise` is None.
    """
    if eta and noise is None:
        raise ConfigError("eta: above 0 DDIM draws noise at each step; pass `noise`, or eta 0")
    for draw, (step, t) in enumerate(_iterate_timesteps(diffusion, x, progress)):
        _, _, x_start = diffusion.p_mean_variance(network, x, t, clip_denoised)
        direction = diffusion.predict_eps(x_start, x, t)
        current, previous = diffusion._gather_coefficients(t, x, "alphas_cumprod", "alphas_cumprod_previous")
        sigma = eta * ((1 - previous) / (1 - current) * (1 - current / previous)).sqrt()  # Equation 16
        x = x_start * previous.sqrt() + (1 - previous - sigma.square()).clamp(min=0).sqrt() * direction
        if eta:
            eps = noise(draw)
            x = x + sigma * eps if step > 0 else x
    return x


CHAINS: dict[str, Callable[..., Tensor]] = {"ddpm": sample_ancestral, "ddim": sample_ddim}
SAMPLERS = (*SOLVERS, *CHAINS)  # names, the usual one last


def choose_timesteps(
    diffusion: GaussianDiffusion, sampler: str, num_calls: int, spacing: str | None = None
) -> list[int]:
    """Returns the timesteps, ascending, that a sampler visits with `num_calls` calls of the network.

    spacing  one of schedule.SPACINGS: leading, trailing, linspace, karras. None: the sampler's usual timesteps. For a
             solver these are karras, or trailing below 6 steps; for ddim every k-th timestep, if a whole k gives the
             number; for ddim without such a k, and for ddpm, even steps that are rounded. A single step is at the last
             timestep.

    Raises ConfigError if the chain has fewer timesteps, or the spacing is unknown.
    """
    total, count = diffusion.num_timesteps, count_solver_steps(sampler, num_calls)
    if spacing is None and (sampler in SOLVERS or count == 1):
        spacing = "trailing" if count < schedule.FEW else "karras"
    if spacing is None:
        return schedule.space_timesteps(
            total, schedule.make_even_respacing_spec(total, count, strided=sampler == "ddim")
        )
    return schedule.choose_timesteps_by_spacing(
        diffusion.tables["sqrt_recipm1_alphas_cumprod"].tolist(), count, spacing
    )


def sample_chain(
    diffusion: GaussianDiffusion,
    network: Network,
    x: Tensor,
    noise: Noise,
    sampler: str,
    timesteps: Sequence[int],
    eta: float | None = None,
    clip_denoised: bool = False,
    progress: Progress = iter,
) -> Tensor:
    """Returns samples x_start, made from noise x (B, C, ...) by the named sampler.

    noise          noise(i) returns the noise that step i adds.
    timesteps      the timesteps of the chain that are visited, in ascending order.
    eta            how much noise is added; None: the sampler's usual amount.
    clip_denoised  whether the predicted x_start is kept in [-1, 1].

    Raises ConfigError if eta is given to a sampler that has none, such as ddpm, whose noise is fixed.
    """
    eta = choose_eta(sampler, eta)
    if sampler in CHAINS:
        arguments = {"eta": eta} if sampler == "ddim" else {}
        return CHAINS[sampler](
            diffusion.respace_to_timesteps(timesteps),
            network,
            x,
            noise,
            clip_denoised=clip_denoised,
            progress=progress,
            **arguments,
        )
    denoise = ChainDenoiser(diffusion, network, clip_denoised)
    levels = [*map(denoise.make_noise_level, reversed(timesteps)), Level.make_noise_free_level()]
    return run_solver(sampler, denoise, levels, x, noise, eta, progress)


def invert_chain(
    diffusion: GaussianDiffusion,
    network: Network,
    x_start: Tensor,
    sampler: str,
    timesteps: Sequence[int],
    eta: float | None = None,
) -> Tensor:
    """Returns the noise from which `sample_chain`, with the same arguments, makes about x_start. Raises ConfigError
    unless the sampler is ddim and eta is None or 0.
    """
    if sampler != "ddim" or eta:
        raise ConfigError(
            f"sampler={sampler}{f', eta={eta:g}' if eta else ''} cannot be inverted: take --sampler ddim with eta 0"
        )
    return invert_ddim(diffusion.respace_to_timesteps(timesteps), network, x_start)


class ChainDenoiser:
    """Adapts a chain's network to the interface of solvers.Denoiser. Its noise levels are the chain's timesteps."""

    def __init__(self, diffusion: GaussianDiffusion, network: Network, clip_denoised: bool = False) -> None:
        self.diffusion, self.network, self.clip_denoised = diffusion, network, clip_denoised
        names = ("sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod")
        self.alphas, self.sigmas = (diffusion.tables[name].tolist() for name in names)

    def make_noise_level(self, t: int) -> Level:
        """Returns the noise level of timestep t."""
        return Level(self.alphas[t], self.sigmas[t], t)

    def find_nearest_noise_level(self, noise_ratio: float) -> Level:
        """Returns the level of the timestep whose sigma / alpha is nearest to `noise_ratio`."""
        above = bisect.bisect_left(
            range(len(self.alphas) - 1), noise_ratio, key=lambda t: self.make_noise_level(t).noise_ratio
        )
        candidates = [self.make_noise_level(t) for t in (max(above - 1, 0), above)]
        return min(candidates, key=lambda level: abs(level.noise_ratio - noise_ratio))

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        t = torch.full((len(x),), level.time, device=x.device)
        x_start = self.diffusion.predict_x_start(self.diffusion.call_network(self.network, x, t)[0], x, t)
        return x_start.clamp(-1, 1) if self.clip_denoised else x_start


@torch.no_grad()
def invert_ddim(diffusion: GaussianDiffusion, network: Network, x_start: Tensor, clip_denoised: bool = False) -> Tensor:
    """Returns the noise from which `sample_ddim` with eta 0 makes about x_start, by DDIM's steps from data to noise."""
    x = x_start
    for step in range(diffusion.num_timesteps):
        t = torch.full((len(x),), step, device=x.device)
        _, _, predicted = diffusion.p_mean_variance(network, x, t, clip_denoised)
        direction = diffusion.predict_eps(predicted, x, t)
        following = diffusion._gather_coefficients(t, x, "alphas_cumprod_next")[0]
        x = predicted * following.sqrt() + (1 - following).sqrt() * direction
    return x


def _iterate_timesteps(diffusion: GaussianDiffusion, x: Tensor, progress: Progress) -> Iterator[tuple[int, Tensor]]:
    """Yields the chain's timesteps from the last to 0, each as a number and as int64 (B,), where B is the batch size of
    x.
    """
    for step in progress(range(diffusion.num_timesteps - 1, -1, -1)):
        yield step, torch.full((len(x),), step, device=x.device)


def make_guided_network(
    network: Callable[..., Tensor],
    conditions: Mapping[str, Tensor],
    null: Mapping[str, Tensor],
    scale: float,
    channels: int | None = None,
    *,
    rescale: float = 0.0,
    guide: Callable[..., Tensor] | None = None,
    active: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Network:
    """Returns a function (x_t, t) -> output that adds guidance to `network`: weaker + scale * (conditional - weaker).
    Here `conditional` is the network's output with `conditions`, and `weaker` its output with `null` (classifier-free
    guidance) or, if given, the output of `guide` with `conditions` (autoguidance).

    conditions  keyword arguments of the network, (B, ...) each; `null` has the same names, for no condition.
    scale       1: no guidance, and the network is called with `conditions` alone.
    channels    number of first output channels that are guided; None: as many as x_t has. All others, such as learned
                variances, come from `conditional`.
    rescale     0 to 1: how far the guided output's standard deviation is brought to that of `conditional`.
    active      (x_t, t) -> bool (B, 1, ...): which samples are guided; None: all. If it is False for all, `weaker` is
                not computed.
    """
    if scale == 1.0:
        return lambda x_t, t: network(x_t, t, **conditions)
    both = {name: torch.cat((value, null[name])) for name, value in conditions.items()}

    def call_guided_network(x_t: Tensor, t: Tensor) -> Tensor:
        """Returns the guided output at x_t (B, C, ...) and times t (B,)."""
        count = channels or x_t.shape[1]
        acts = None if active is None else active(x_t, t)
        if acts is not None and not acts.any():
            return upcast_output_to_float32(network(x_t, t, **conditions))
        if guide is None:
            out = upcast_output_to_float32(
                network(torch.cat((x_t, x_t)), torch.cat((t, t)), **both)
            )  # (2B, C or 2C, ...)
            conditional, weaker = out.chunk(2)
        else:
            conditional, weaker = (upcast_output_to_float32(net(x_t, t, **conditions)) for net in (network, guide))
        plain = conditional[:, :count]
        leading = torch.lerp(weaker[:, :count], plain, scale)
        if rescale:

            def compute_standard_deviation(out: Tensor) -> Tensor:
                """Returns the standard deviation of each sample's output, (B, 1, ...)."""
                return out.flatten(1).std(dim=1).view(-1, *(1,) * (out.ndim - 1))

            leading = torch.lerp(
                leading, leading * (compute_standard_deviation(plain) / compute_standard_deviation(leading)), rescale
            )
        if acts is not None:
            leading = torch.where(acts, leading, plain)
        return torch.cat((leading, conditional[:, count:]), dim=1)

    return call_guided_network


def make_guidance_mask_function(
    interval: tuple[float, float] | None, compute_noise_ratio: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Returns a function (x_t, t) -> bool (B, 1, ...), which says whether a sample's sigma / alpha lies in `interval`
    (low, high): the argument `active` of `make_guided_network`. Returns None if interval is None: all are guided.

    compute_noise_ratio  (x_t, t) -> sigma / alpha (B, 1, ...), for t as the network sees it.
    """
    if interval is None:
        return None

    def compute_guidance_mask(x_t: Tensor, t: Tensor) -> Tensor:
        """Returns whether sigma / alpha of each sample lies in the interval, bool (B, 1, ...)."""
        ratio = compute_noise_ratio(x_t, t)
        return (interval[0] <= ratio) & (ratio <= interval[1])

    return compute_guidance_mask
