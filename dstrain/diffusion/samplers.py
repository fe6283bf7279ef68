"""Chains from noise to data over a (respaced) GaussianDiffusion: ancestral (DDPM), DDIM, its inverse, and guidance.

Notation as in gaussian.py. The i-th draw of noise is `noise(i)`, i = 0, 1, ... in the order of the chain. It is drawn
at t = 0, too, where it is not used: the number of draws is the number of steps. Every step is one call of the network
with the same shapes, so that all ranks call alike.

Sources: Ho et al. 2020, Algorithm 2; Song et al. 2020 (DDIM), Equations 12 and 16; Ho & Salimans 2022 (guidance).
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from dstrain.diffusion.gaussian import GaussianDiffusion, Network, Noise, Progress, at_boundary
from dstrain.recipe import ConfigError


@torch.no_grad()
def ancestral(diffusion: GaussianDiffusion, network: Network, x: Tensor, noise: Noise, clip_denoised: bool = False,
              progress: Progress = iter) -> Tensor:
    """x_start drawn from noise x (B, C, ...) by the chain's own conditionals. DDPM, Algorithm 2."""
    for draw, (step, t) in enumerate(_descending(diffusion, x, progress)):
        mean, log_variance, _ = diffusion.p_mean_variance(network, x, t, clip_denoised)
        eps = noise(draw)
        x = mean + torch.exp(0.5 * log_variance) * eps if step > 0 else mean
    return x


@torch.no_grad()
def ddim(diffusion: GaussianDiffusion, network: Network, x: Tensor, noise: Noise | None = None, eta: float = 0.0,
         clip_denoised: bool = False, progress: Progress = iter) -> Tensor:
    """x_start from noise x (B, C, ...): eta 0 is a deterministic map that needs no noise, eta 1 is as noisy as DDPM."""
    if eta and noise is None:
        raise ConfigError("eta: above 0 DDIM draws noise at each step; pass `noise`, or eta 0")
    for draw, (step, t) in enumerate(_descending(diffusion, x, progress)):
        _, _, x_start = diffusion.p_mean_variance(network, x, t, clip_denoised)
        direction = diffusion.eps_of(x_start, x, t)
        current, previous = diffusion._at(t, x, "alphas_cumprod", "alphas_cumprod_previous")
        sigma = eta * ((1 - previous) / (1 - current) * (1 - current / previous)).sqrt()          # Equation 16
        x = x_start * previous.sqrt() + (1 - previous - sigma.square()).clamp(min=0).sqrt() * direction
        if eta:
            eps = noise(draw)
            x = x + sigma * eps if step > 0 else x
    return x


# By name, as calls with the same arguments (diffusion, network, x, noise, ...). DDIM with its eta of 0 draws no noise.
SAMPLERS: dict[str, Callable[..., Tensor]] = {"ddpm": ancestral, "ddim": ddim}


@torch.no_grad()
def encode_ddim(diffusion: GaussianDiffusion, network: Network, x_start: Tensor, clip_denoised: bool = False,
                progress: Progress = iter) -> Tensor:
    """The noise that `ddim` with eta 0 maps to about x_start: the same ODE run from data to noise."""
    x = x_start
    for step in progress(range(diffusion.num_timesteps)):
        t = torch.full((len(x),), step, device=x.device)
        _, _, predicted = diffusion.p_mean_variance(network, x, t, clip_denoised)
        direction = diffusion.eps_of(predicted, x, t)
        following = diffusion._at(t, x, "alphas_cumprod_next")[0]
        x = predicted * following.sqrt() + (1 - following).sqrt() * direction
    return x


def _descending(diffusion: GaussianDiffusion, x: Tensor, progress: Progress) -> Iterator[tuple[int, Tensor]]:
    """Timesteps from the last to 0, as a number and as int64 (B,)."""
    for step in progress(range(diffusion.num_timesteps - 1, -1, -1)):
        yield step, torch.full((len(x),), step, device=x.device)


def guided(network: Callable[..., Tensor], conditions: Mapping[str, Tensor], null: Mapping[str, Tensor], scale: float,
           channels: int | None = None) -> Network:
    """The network with classifier-free guidance: null + scale * (conditional - null), in one call of twice the batch.

    conditions  keyword arguments of the network, (B, ...) each; `null` those without the condition.
    scale       1 means no guidance, and a call of the plain batch.
    channels    how many leading output channels are guided; None means as many as the input has. All others (learned
                variances) are taken from the conditional half.
    """
    if scale == 1.0:
        return lambda x_t, t: network(x_t, t, **conditions)
    both = {name: torch.cat((value, null[name])) for name, value in conditions.items()}

    def guided_network(x_t: Tensor, t: Tensor) -> Tensor:
        out = at_boundary(network(torch.cat((x_t, x_t)), torch.cat((t, t)), **both))              # (2B, C or 2C, ...)
        conditional, unconditional = out.chunk(2)
        count = channels or x_t.shape[1]
        leading = torch.lerp(unconditional[:, :count], conditional[:, :count], scale)
        return torch.cat((leading, conditional[:, count:]), dim=1)

    return guided_network
