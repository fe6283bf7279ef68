"""Clocks: seconds of work that takes turns, what other programs did meanwhile, and the rates of the device."""

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

_QUIET = 0.05  # share of the machine's cores that others may take beside a wall clock


@dataclass
class Times:
    """Seconds of one piece of work, a value for each round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # of all threads of this process

    def least(self, clock: str) -> float:
        return min(getattr(self, clock))

    def median(self, clock: str) -> float:
        return statistics.median(getattr(self, clock))


@dataclass
class Machine:
    """Which clock to trust: the wall's on a GPU and on a quiet machine, else CPU time. Begins when it is made."""

    device: torch.device

    def __post_init__(self) -> None:
        self._began = time.perf_counter(), time.process_time(), _busy()

    def others(self) -> float:
        """The share of this machine's cores that other processes have taken so far."""
        wall, own, busy = (
            now - then for now, then in zip((time.perf_counter(), time.process_time(), _busy()), self._began)
        )
        return max(busy - own, 0.0) / max(wall * (os.cpu_count() or 1), 1e-9)

    def clock(self) -> str:
        return "wall" if self.device.type == "cuda" or self.others() < _QUIET else "cpu"

    def described(self) -> str:
        """The clock and why it was taken."""
        if self.device.type == "cuda":
            return "wall time, with the GPU's work awaited"
        why = f"other programs took {100 * self.others():.0f} % of the cores"
        return f"{'wall time' if self.clock() == 'wall' else 'CPU time of all threads'}: {why}"


def measured(work: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Wall and CPU seconds of one call, with the device's work."""
    _wait(device)
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    _wait(device)
    return time.perf_counter() - wall, time.process_time() - cpu


def alternate(
    sides: Mapping[str, Callable[[int], Any]],
    device: torch.device,
    first: int,
    *,
    rounds: int,
    steps: int,
    warm_up: int,
) -> dict[str, Times]:
    """Times of a step, the sides in turn, A B A B, from step `first` on, after `warm_up` steps of each."""

    def take_steps(step: Callable[[int], Any], numbers: range) -> None:
        for number in numbers:
            step(number)

    times = {name: Times() for name in sides}
    for round_ in range(rounds + 1):  # the first warms up: compilation, buffers, moments
        numbers = range(first, first + (steps if round_ else warm_up))
        for name, step in sides.items():
            wall, cpu = measured(partial(take_steps, step, numbers), device)
            if round_:
                times[name].wall.append(wall / steps)
                times[name].cpu.append(cpu / steps)
        first = numbers.stop
    return times


def copy_rate(device: torch.device, numel: int = 0) -> float:
    """Bytes a second of a copy within the device, those read and those written counted."""
    numel = numel or (2**30 if device.type == "cuda" else 2**24)
    source = torch.randn(numel, device=device)
    target = torch.empty_like(source)
    return 8 * numel / min(measured(lambda: target.copy_(source), device)[0] for _ in range(10))


def keep_memory() -> None:
    """Has glibc keep what is freed, where this is glibc: else page faults of large tensors are what is measured."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 2**28)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
            libc.mallopt(option, value)


def _busy() -> float:
    """CPU seconds of all processes since the machine started; this process's own where the system does not say."""
    try:
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
        return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return time.process_time()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
