"""A training step timed against a plain PyTorch loop over the same network, loss, optimizer and averages, in one run.

    dstrain      the loop's own take_step and EmaShadow.update, under the DeepSpeed config asked for
    plain        the plain loop: the same network in the same precision (bf16 weights with fp32 masters), AdamW, fused
                 on a GPU, gradient clipping, one foreach lerp an average; compiled by block where dstrain compiles
    matmul       the largest rate of a square matrix product on this device, in the same precision

Both sides get the same synthetic batch at every step, so that no loader is timed. They take turns, A B A B; the
smallest and the median time of a step are reported. The plain loop is one process: on several ranks dstrain runs alone.

2026-11-22, two cores of an AMD EPYC with AVX512_BF16, shared with other work, dit-small, zero1.json, one thread, one
rank: a step of dstrain took 1.05 times a plain one (0.186 s against 0.177 s). Attention: launch/bench_attention.py.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dstrain import systems
from dstrain.engine.blocks import compiles, prepare
from dstrain.engine.ema import EmaShadow
from dstrain.engine.engines import Engines
from dstrain.engine.initial import build
from dstrain.engine.settings import precision
from dstrain.engine.start import start
from dstrain.ranks import group
from dstrain.recipe import Run
from dstrain.systems.base import Batch, System
from dstrain.train import take_step

ROUNDS, STEPS, WARM_UP = 6, 8, 4
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Repeated:
    """What take_step reads of Batches: the same micro-batch, `accumulation` times a step."""

    batch: Batch
    accumulation: int

    def at(self, step: int) -> list[Batch]:
        return [dict(self.batch) for _ in range(self.accumulation)]


class NoTracker:
    """What take_step calls of a Tracker; reports nothing."""

    def add(self, part: str, terms: dict[str, torch.Tensor]) -> None:
        pass


def bench(run: Run, settings: dict[str, Any]) -> dict[str, float]:
    """Times both sides, prints and returns the figures by name: seconds a step and rates."""
    start()
    device, dtype = group.device(), _DTYPES[precision(settings)]
    system = systems.build(run.system, run.model)
    for network in system.frozen():
        network.to(device)
    micro, accumulation = settings["train_micro_batch_size_per_gpu"], settings["gradient_accumulation_steps"]
    batch = {name: tensor.to(device) for name, tensor in system.synthetic(micro).items()}
    batch |= {"position": torch.arange(micro, device=device), "step": torch.zeros_like(batch["key"])}
    sides, flops = {"dstrain": dstrain_side(run, settings, system, Repeated(batch, accumulation))[1]}, 0
    if group.world() == 1 and len(system.parts) == 1:
        _, sides["plain"], flops = plain_side(run, system, batch, accumulation, dtype)
    seconds = _alternate(sides, device, run.steps // 2)                   # by then an adversary has joined
    figures = {f"{name} {kind} s": value for name, times in seconds.items()
               for kind, value in (("least", min(times)), ("median", statistics.median(times)))}
    figures |= {f"{name} samples/s": run.batch.global_ / min(times) for name, times in seconds.items()}
    if "plain" in seconds:
        peak = _matmul_rate(device, dtype)
        figures |= {"dstrain / plain": min(seconds["dstrain"]) / min(seconds["plain"]), "matmul TFLOP/s": peak / 1e12,
                    "dstrain share of matmul": flops / min(seconds["dstrain"]) / peak}
    if device.type == "cuda":
        figures["peak memory of both GB"] = torch.cuda.max_memory_allocated() / 1e9
    if group.rank() == 0:
        print(f"{run.name}, {precision(settings)}, batch {run.batch.global_} on {group.world()} ranks of {device.type}")
        print("\n".join(f"  {name:28} {value:.4g}" for name, value in figures.items()))
    return figures


def dstrain_side(run: Run, settings: dict[str, Any], system: System,
                 batches: Repeated) -> tuple[Engines, Callable[[int], None]]:
    """The engines and a step of the loop."""
    engines = Engines(system.networks, run, settings, system.decays, system.blocks())
    ema = EmaShadow(engines.masters, run.ema, system.averaged)

    def step(number: int) -> None:
        take_step(number, run, system, engines, batches, NoTracker())
        ema.update(number, engines.applied())

    return engines, step


def plain_side(run: Run, system: System, batch: Batch, accumulation: int,
               dtype: torch.dtype) -> tuple[list[nn.Parameter], Callable[[int], None], int]:
    """The plain loop's fp32 weights, its step, and the floating-point operations of a step by torch's own count."""
    (part, (network, values)), = build(system.networks, run.seed).items()
    network.load_state_dict(dict(values()), strict=False, assign=True)
    nhwc = run.channels_last and all(weight.ndim < 5 for weight in network.parameters())       # of images alone
    network.to(batch["key"].device, memory_format=torch.channels_last if nhwc else torch.preserve_format)
    prepare(network, system.blocks(), run.model["recompute"], compiles(run))
    weights = list(network.parameters())
    masters = [nn.Parameter(weight.detach().clone()) for weight in weights] if dtype != torch.float32 else weights
    for weight in weights if dtype != torch.float32 else ():
        weight.data = weight.data.to(dtype)
    shadows = [[master.detach().clone() for master in masters] for _ in run.ema.decays]
    named = list(zip(masters, (name for name, _ in network.named_parameters())))
    groups = [{"params": [master for master, name in named if system.decays(name, master) == decayed],
               "weight_decay": run.optimizer.weight_decay * decayed} for decayed in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=run.optimizer.lr, betas=run.optimizer.betas, eps=run.optimizer.eps,
                                  fused=torch.cuda.is_available() or None)

    def backward() -> None:
        with torch.no_grad():
            example = system.encode(dict(batch))
        (system.loss(part, {part: network}, example)["loss"] / accumulation).backward()

    def step(number: int) -> None:
        for param_group in optimizer.param_groups:
            param_group["lr"] = run.optimizer.lr_at(number, run.steps)
        for _ in range(accumulation):
            backward()
        for master, weight in zip(masters, weights) if masters is not weights else ():
            master.grad, weight.grad = weight.grad.float(), None
        if run.optimizer.clip:
            nn.utils.clip_grad_norm_(masters, run.optimizer.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            if masters is not weights:
                torch._foreach_copy_([weight.data for weight in weights], [master.data for master in masters])
            for decay, shadow in zip(run.ema.decays, shadows):
                torch._foreach_lerp_(shadow, [master.data for master in masters], 1 - run.ema.decay_at(decay, number))

    with FlopCounterMode(display=False) as counter:
        backward()
    network.zero_grad()
    return masters, step, counter.get_total_flops() * accumulation


def _alternate(sides: dict[str, Callable[[int], None]], device: torch.device, number: int) -> dict[str, list[float]]:
    """Seconds a step of each round, the sides in turn, from step `number` on."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(ROUNDS + 1):                          # the first warms up: compilation, buffers, moments
        steps = range(number, number + (STEPS if round_ else WARM_UP))
        for name, step in sides.items():
            taken = _seconds(lambda: [step(number) for number in steps], device)
            if round_:
                seconds[name].append(taken / STEPS)
        number += STEPS
    return seconds


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of the best of several square products of random data."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size ** 3 / min(_seconds(lambda: a @ b, device) for _ in range(12))


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begun = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begun
