"""The two sides of a comparison: dstrain's own step, and the plain PyTorch loop over the same networks and batches.

    dstrain      the loop's take_step and EmaShadow.update_averages, under a DeepSpeed config
    plain        bf16 weights with fp32 masters (or fp32), fused AdamW, gradient clipping, one foreach lerp an
                 average; compiled by block where dstrain compiles. One process, any number of networks.

Rivals that others use stand in rivals.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dstrain import systems
from dstrain.distributed import group
from dstrain.engine.blocks import should_compile, wrap_block_forwards
from dstrain.engine.ema.shadow import EmaShadow
from dstrain.engine.initial import build_networks
from dstrain.planning.synthetic import NoTracker, Repeated
from dstrain.recipe import Run
from dstrain.systems.base import Batch, System
from dstrain.train import build_engines, take_step

Losses = dict[str, list[Tensor]]  # of a step: a value a micro-batch, by part
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Dstrain:
    """The engines, their averages, and a step of the loop."""

    def __init__(self, run: Run, settings: dict[str, Any], system: System, batches: Repeated):
        self.run, self.system, self.batches = run, system, batches
        self.engines = build_engines(run, settings, system)
        self.ema = EmaShadow(self.engines.masters, run.ema, system.averaged)

    def step(self, number: int) -> Losses:
        """The losses of each network, one a micro-batch."""
        losses = take_step(number, self.run, self.system, self.engines, self.batches, NoTracker())
        self.ema.update_averages(number, self.engines.collect_part_change_flags())
        return losses


def system_of(run: Run) -> System:
    """The system of a recipe, with its frozen networks on the device."""
    system = systems.build(run.system, run.model)
    for network in system.frozen():
        network.to(group.device())
    return system


@dataclass
class _Network:
    """A network of the plain loop with its optimizer."""

    module: nn.Module
    masters: list[nn.Parameter]  # fp32; the weights themselves in fp32
    weights: list[nn.Parameter]  # what the module computes with
    shadows: list[list[Tensor]]  # one a decay, where the part is averaged
    optimizer: torch.optim.Optimizer

    @torch.no_grad()
    def update(self, number: int, run: Run) -> None:
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = run.optimizer.compute_lr(number, run.steps)
        wide = self.masters is not self.weights
        for master, weight in zip(self.masters, self.weights) if wide else ():
            master.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None
        if run.optimizer.clip:
            nn.utils.clip_grad_norm_(self.masters, run.optimizer.clip, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        masters = [master.data for master in self.masters]
        if wide:
            torch._foreach_copy_([weight.data for weight in self.weights], masters)
        for decay, shadow in zip(run.ema.decays, self.shadows):
            torch._foreach_lerp_(shadow, masters, 1 - run.ema.compute_effective_decay(decay, number))


class Plain:
    """The plain loop."""

    def __init__(self, run: Run, system: System, batches: Repeated, dtype: torch.dtype):
        self.run, self.system, self.batches = run, system, batches
        self.networks = {
            part: self._network(part, *built, dtype)
            for part, built in build_networks(system.networks, run.seed).items()
        }

    def _network(self, part: str, module: nn.Module, values: Any, dtype: torch.dtype) -> _Network:
        run = self.run
        module.load_state_dict(dict(values()), strict=False, assign=True)
        nhwc = run.channels_last and all(weight.ndim < 5 for weight in module.parameters())  # of images alone
        module.to(group.device(), memory_format=torch.channels_last if nhwc else torch.preserve_format)
        wrap_block_forwards(
            module, self.system.list_block_classes(), run.model["recompute"], should_compile(run.compile)
        )
        weights = list(module.parameters())
        masters = [nn.Parameter(weight.detach().clone()) for weight in weights] if dtype != torch.float32 else weights
        for weight in weights if dtype != torch.float32 else ():
            weight.data = weight.data.to(dtype)
        decays = run.ema.decays if part in self.system.averaged else ()
        return _Network(
            module,
            masters,
            weights,
            [[master.detach().clone() for master in masters] for _ in decays],
            adamw(run, self.system, module, masters),
        )

    def step(self, number: int) -> Losses:
        """One optimizer step; the losses of each network, one a micro-batch."""
        losses: Losses = {}
        watched: list[dict[str, Tensor]] = []
        for micro, batch in enumerate(self.batches.read_step(number), 1):
            for part, loss in self._backward(number, batch, watched, micro == self.batches.accumulation).items():
                losses.setdefault(part, []).append(loss)
        if watched:
            self.system.observe({name: torch.cat([rows[name] for rows in watched]) for name in watched[0]})
        return losses

    def _backward(
        self, number: int, batch: Batch, watched: list[dict[str, Tensor]], update: bool = False
    ) -> dict[str, Tensor]:
        """Backward of each network whose turn it is, and with `update` its step before the next one's turn."""
        with torch.no_grad():
            example = self.system.encode(dict(batch))
        nets = {part: network.module for part, network in self.networks.items()}
        losses = {}
        for part in self.system.turns(number):
            for name, module in nets.items() if len(nets) > 1 else ():
                module.requires_grad_(name == part)
            terms = self.system.loss(part, nets, example)
            (terms["loss"] / self.batches.accumulation).backward()
            losses[part] = terms["loss"].detach()
            if rows := {name: terms[name].detach() for name in self.system.watched if name in terms}:
                watched.append(rows)
            if update:
                self.networks[part].update(number, self.run)
        return losses


def adamw(
    run: Run, system: System, module: nn.Module, weights: list[nn.Parameter], fused: bool = True
) -> torch.optim.AdamW:
    """torch's AdamW over `weights`, the module's parameters or copies of them, in two groups of decay."""
    named = list(zip(weights, (name for name, _ in module.named_parameters())))
    groups = [
        {
            "params": [weight for weight, name in named if system.has_weight_decay(name, weight) == decayed],
            "weight_decay": run.optimizer.weight_decay * decayed,
        }
        for decayed in (True, False)
    ]
    return torch.optim.AdamW(
        [own for own in groups if own["params"]],
        lr=run.optimizer.lr,
        betas=run.optimizer.betas,
        eps=run.optimizer.eps,
        fused=fused,
    )


def apart(ours: Sequence[Losses], theirs: Sequence[Losses]) -> float:
    """The largest difference of two curves of losses, as a share of the largest loss of its part."""
    most = 0.0
    for part in theirs[-1]:
        a, b = (
            torch.stack([sum(losses[part]).double() for losses in curve if part in losses]) for curve in (ours, theirs)
        )
        most = max(most, ((a - b).abs().max() / b.abs().max()).item())
    return most
