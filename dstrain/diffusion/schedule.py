"""Noise schedules of discrete-time diffusion: betas by name, and the subset of timesteps that a short chain visits.

Notation of Ho et al. 2020 (DDPM): beta_t is the variance added between x_{t-1} and x_t, alphas_cumprod the product of
(1 - beta). Index 0 is one step of noise, not none. Everything here is float64 on the CPU; gaussian.py moves it.

Sources: linear, quad, warmup, const and jsd are those of DDPM's experiments; quadratic and sigmoid are among those of
the DALL-E 2 prior of lucidrains/DALLE2-pytorch; cosine is Nichol & Dhariwal 2021 (Equation 17); respacing is their
section 4 ("Improving Sampling Speed"), `ddimN` the stride of Song et al. 2020.
"""

import itertools
import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from dstrain.recipe import ConfigError

SCHEDULES = (
    "linear",
    "cosine",
    "squaredcos_cap_v2",
    "quad",
    "warmup10",
    "warmup50",
    "const",
    "jsd",
    "quadratic",
    "sigmoid",
)
SPACINGS = ("leading", "trailing", "linspace", "karras")
LARGEST_NOISE = 80.0  # sigma / alpha from which EDM begins
FEW = 6  # steps below which EDM's spacing leaves none for the middle
BETA_START, BETA_END = 1e-4, 0.02  # DDPM, for 1000 steps


def make_betas(name: str, num_timesteps: int) -> Tensor:
    """Returns the betas of the noise schedule `name` over `num_timesteps` steps, float64 (num_timesteps,).

    The betas of linear, quadratic and sigmoid are scaled by 1000 / num_timesteps, so that they end at about the same
    noise for any length. Raises ConfigError if the name is unknown, num_timesteps is below 1, or a beta is not in (0,
    1].
    """
    if num_timesteps < 1:
        raise ConfigError(f"num_steps: {num_timesteps} is not a number of timesteps; give 1 or more")
    if name not in SCHEDULES:
        raise ConfigError(f"schedule: {name!r} is unknown; one of {', '.join(SCHEDULES)}")

    def make_linear_values(start: float, end: float) -> Tensor:
        """Returns num_timesteps evenly spaced values from start to end, float64."""
        return torch.linspace(start, end, num_timesteps, dtype=torch.float64)

    scale, quad = 1000 / num_timesteps, make_linear_values(BETA_START**0.5, BETA_END**0.5) ** 2
    table = {
        "linear": make_linear_values(scale * BETA_START, scale * BETA_END),
        "cosine": _make_cosine_betas(num_timesteps),
        "squaredcos_cap_v2": _make_cosine_betas(num_timesteps),
        "quad": quad,
        "warmup10": _make_warmup_betas(num_timesteps, 0.1),
        "warmup50": _make_warmup_betas(num_timesteps, 0.5),
        "const": make_linear_values(BETA_END, BETA_END),
        "jsd": 1 / make_linear_values(num_timesteps, 1),  # 1/T, 1/(T-1), ..., 1
        "quadratic": scale * quad,
        "sigmoid": scale
        * (BETA_START + (BETA_END - BETA_START) * make_linear_values(-6, 6).sigmoid()),  # the ends are not reached
    }[name]
    if not bool(((table > 0) & (table <= 1)).all()):
        raise ConfigError(
            f"schedule: {name!r} over {num_timesteps} steps leaves (0, 1]: its largest beta is "
            f"{float(table.max()):.3g}; take more steps or the cosine schedule"
        )
    return table


def _make_warmup_betas(num_timesteps: int, fraction: float) -> Tensor:
    """Returns betas that rise linearly over this fraction of the timesteps and then stay at the largest,
    float64 (T,).
    """
    table = torch.full((num_timesteps,), BETA_END, dtype=torch.float64)
    length = max(int(num_timesteps * fraction), 1)
    table[:length] = torch.linspace(BETA_START, BETA_END, length, dtype=torch.float64)
    return table


def _make_cosine_betas(num_timesteps: int, offset: float = 0.008, largest: float = 0.999) -> Tensor:
    """Returns betas whose alphas_cumprod is a squared cosine (IDDPM, Equation 17), float64 (T,). No beta is above
    `largest`.
    """
    time = torch.arange(num_timesteps + 1, dtype=torch.float64) / num_timesteps
    remaining = torch.cos((time + offset) / (1 + offset) * (math.pi / 2)) ** 2
    return (1 - remaining[1:] / remaining[:-1]).clamp(max=largest)


def space_timesteps(num_timesteps: int, spec: str | Sequence[int]) -> list[int]:
    """Returns the timesteps of a chain of `num_timesteps` that a shorter chain visits, ascending. `spec` says which:

    ""          all.
    "250"       250 evenly spaced ones, with the first and the last.
    "10,15,20"  10, 15 and 20 evenly spaced ones from three equal sections of the chain; also as a list [10, 15, 20].
    "ddim50"    50 at a constant stride from 0 on.

    Raises ConfigError if the spec cannot be read, a section has too few timesteps, or no stride gives the number after
    ddim.
    """
    if isinstance(spec, str):
        spec = spec.replace(" ", "")
        if not re.fullmatch(r"(ddim\d+|\d+(,\d+)*)?", spec):
            raise ConfigError(f"respacing: {spec!r} is neither a number, numbers with commas, nor ddim and a number")
        if spec.startswith("ddim"):
            count = int(spec.removeprefix("ddim"))
            if timesteps := _choose_strided_timesteps(num_timesteps, count):
                return timesteps
            raise ConfigError(
                f"respacing: no integer stride takes {count} of {num_timesteps} timesteps, as {spec} "
                f"asks; take a divisor of {num_timesteps}, or '{count}' without ddim"
            )
        spec = [int(part) for part in spec.split(",")] if spec else [num_timesteps]
    size, larger = divmod(num_timesteps, len(spec))
    timesteps, start = [], 0
    for section, count in enumerate(spec):
        length = size + (section < larger)
        if not 0 < count <= length:
            raise ConfigError(f"respacing: {count} timesteps of section {section}: ask for 1 to its {length}")
        stride = (length - 1) / (count - 1) if count > 1 else 1.0
        # The stride is summed, not multiplied: published chains were rounded from this very sum.
        places = itertools.accumulate(itertools.repeat(stride, count - 1), initial=0.0)
        timesteps += [start + round(place) for place in places]
        start += length
    return sorted(set(timesteps))


def _choose_strided_timesteps(num_timesteps: int, count: int) -> list[int]:
    """Returns exactly `count` timesteps at a constant stride from 0 on; [] if no stride gives so many."""
    chains = (range(0, num_timesteps, stride) for stride in range(1, num_timesteps + 1))
    return next((list(chain) for chain in chains if len(chain) == count), [])


def make_even_respacing_spec(num_timesteps: int, count: int, strided: bool = False) -> str:
    """Returns the `spec` with which `space_timesteps` gives `count` evenly spaced timesteps: "ddimN" if `strided` is
    true and a constant stride gives so many, else "N". Raises ConfigError unless count is between 1 and num_timesteps.
    """
    if not 1 <= count <= num_timesteps:
        raise ConfigError(f"num_steps: {count} is not between 1 and the {num_timesteps} timesteps of the chain")
    return f"ddim{count}" if strided and _choose_strided_timesteps(num_timesteps, count) else str(count)


def choose_timesteps_by_spacing(noise_ratios: Sequence[float], count: int, spacing: str) -> list[int]:
    """Returns `count` timesteps of a chain, ascending. `noise_ratios` (T,) is sigma / alpha of each of its timesteps.
    `spacing` is one of:

    leading   multiples of T // count, from 0 on.
    trailing  evenly spaced, with the last timestep.
    linspace  evenly spaced, with the first and the last timestep.
    karras    the last timestep, then EDM's noise levels, from LARGEST_NOISE or less to the noise of t = 0.

    A single timestep is the last one. Raises ConfigError if the spacing is unknown, or count is not between 1 and T.
    Sources: Lin et al. 2023, Table 2; Karras et al. 2022 (EDM), Equation 5.
    """
    if spacing not in SPACINGS:
        raise ConfigError(f"spacing={spacing} is none of {', '.join(SPACINGS)}: name one of them")
    total = len(noise_ratios)
    make_even_respacing_spec(total, count)  # refuses other numbers
    if count == 1:
        return [total - 1]
    if spacing == "leading":
        return [i * (total // count) for i in range(count)]
    if spacing == "trailing":
        return [round((i + 1) * total / count) - 1 for i in range(count)]
    if spacing == "linspace":
        return space_timesteps(total, str(count))
    values = make_noise_levels_after_first_step(count, noise_ratios[0], min(LARGEST_NOISE, noise_ratios[-1]))[::-1]
    nearest = [min(range(total), key=lambda t: abs(math.log(noise_ratios[t] / value))) for value in values] + [
        total - 1
    ]
    # Where the chain is coarser than the spacing, timesteps fall together: each then takes the next free one.
    timesteps = list(itertools.accumulate(nearest, lambda before, t: max(before + 1, t)))
    return [min(t, total - count + i) for i, t in enumerate(timesteps)]


def make_karras_noise_levels(count: int, lowest: float, highest: float, rho: float = 7.0) -> list[float]:
    """Returns `count` noise levels sigma / alpha, descending from `highest` to `lowest` in ever smaller steps (EDM,
    Equation 5).
    """
    first, last = highest ** (1 / rho), lowest ** (1 / rho)
    return [(first + i / max(count - 1, 1) * (last - first)) ** rho for i in range(count)]


def make_noise_levels_after_first_step(count: int, lowest: float, highest: float) -> list[float]:
    """Returns count - 1 noise levels sigma / alpha, descending, at which the steps after the first of `count` sampling
    steps begin. The first step begins at pure noise.

    They are EDM's count - 1 levels from `highest` to `lowest`. If `count` is less than FEW, they are the inner ones of
    EDM's count + 1 levels, so that neither `highest` nor `lowest` is among them.
    """
    return (
        make_karras_noise_levels(count + 1, lowest, highest)[1:-1]
        if count < FEW
        else make_karras_noise_levels(count - 1, lowest, highest)
    )


def respace_betas(original: Tensor, timesteps: Sequence[int]) -> Tensor:
    """Returns the betas, float64 (K,), of a chain that visits only K `timesteps` of the original one and has the same
    alphas_cumprod there. `original` holds the betas (T,) of the original chain.
    """
    alphas_cumprod = torch.cumprod(1 - original.double(), dim=0)[list(timesteps)]
    previous = torch.cat((torch.ones(1, dtype=torch.float64), alphas_cumprod[:-1]))
    return 1 - alphas_cumprod / previous
