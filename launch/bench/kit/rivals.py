"""What others train with, over the same network, loss and batches as sides.py: one network, one process.

stock        DeepSpeed as its documentation has it: a plain JSON with AdamW, the precision and the stage, its
             defaults for all else, and the averages of DiT's train.py, a Python loop over the parameters
accelerate   accelerate in the manner of diffusers' training scripts: fp32 weights under autocast, prepare,
             accumulate, clip, AdamW, diffusers' EMAModel, the loss read at every step
fast-DiT     as fast-DiT's train.py: fp32 weights under autocast, torch's AdamW with its defaults, every block
             recomputed, averages by a Python loop, the loss read at every step
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dstrain.distributed import group
from dstrain.engine.blocks import should_compile
from dstrain.engine.initial import build_networks
from dstrain.engine.settings import read_precision
from dstrain.planning.synthetic import Repeated
from dstrain.recipe import ConfigError, Run
from dstrain.systems.base import System
from kit.sides import DTYPES, adamw


class Rival(NamedTuple):
    """A loop of others: the network that it trains, and one optimizer step."""

    network: nn.Module
    step: Callable[[int], None]


def rivals(
    run: Run, settings: dict[str, Any], system: System, batches: Repeated, names: tuple[str, ...]
) -> dict[str, Rival]:
    """The rivals of these names. ConfigError: accelerate is not installed."""
    if len(system.parts) > 1:
        raise ConfigError(f"the rivals train one network, and {run.system} has {len(system.parts)}")
    return {name: _RIVALS[name](run, settings, system, batches) for name in names}


def available(name: str) -> str | None:
    """Why a rival cannot run here, with the remedy; None where it can."""
    if name == "accelerate" and importlib.util.find_spec("accelerate") is None:
        return "accelerate is not installed: pip install -e '.[bench]'"
    return None


def _network(run: Run, system: System) -> tuple[str, nn.Module]:
    """The only network, with its initial weights, fp32, on the device."""
    ((part, (network, values)),) = build_networks(system.networks, run.seed).items()
    network.load_state_dict(dict(values()), strict=False, assign=True)
    return part, network.to(group.device())


def _compile(run: Run, system: System, network: nn.Module) -> None:
    for module in network.modules():
        if should_compile(run.compile) and isinstance(module, system.list_block_classes()):
            module.compile()


def _loss(system: System, part: str, network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        example = system.encode(dict(batch))
    return system.loss(part, {part: network}, example)["loss"]


def _averages(run: Run, network: nn.Module) -> list[tuple[float, dict[str, Tensor]]]:
    return [
        (decay, {name: weight.detach().float().clone() for name, weight in network.named_parameters()})
        for decay in run.ema.decays
    ]


@torch.no_grad()
def _average(averages: list[tuple[float, dict[str, Tensor]]], network: nn.Module) -> None:
    for decay, shadow in averages:
        for name, weight in network.named_parameters():
            shadow[name].mul_(decay).add_(weight.data, alpha=1 - decay)


def _stock(run: Run, settings: dict[str, Any], system: System, batches: Repeated) -> Rival:
    import deepspeed

    part, network = _network(run, system)
    _compile(run, system, network)
    own = {} if _compiles_adamw() else {"torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": batches.micro,
        "gradient_accumulation_steps": batches.accumulation,
        "gradient_clipping": run.optimizer.clip,
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "AdamW",
            "params": own
            | {
                "lr": run.optimizer.lr,
                "betas": list(run.optimizer.betas),
                "eps": run.optimizer.eps,
                "weight_decay": run.optimizer.weight_decay,
            },
        },
        "zero_optimization": {"stage": settings.get("zero_optimization", {}).get("stage", 0)},
    }
    if read_precision(settings) != "fp32":
        config[read_precision(settings)] = {"enabled": True}
    engine = deepspeed.initialize(
        model=network, model_parameters=network.parameters(), config=config, dist_init_required=False
    )[0]
    averages = _averages(run, engine.module)

    def step(number: int) -> None:
        for batch in batches.read_step(number):
            engine.backward(_loss(system, part, engine, batch))
            engine.step()
        _average(averages, engine.module)

    return Rival(engine.module, step)


def _compiles_adamw() -> bool:
    """Whether DeepSpeed's own AdamW is to be had: nvcc compiles it for a GPU. On a CPU it takes 40 s, and torch's is as
    good.
    """
    if not torch.cuda.is_available():
        return False
    from deepspeed.ops.op_builder import FusedAdamBuilder

    try:
        FusedAdamBuilder().load(verbose=False)
    except Exception as error:  # no nvcc, or headers that it lacks
        print(f"stock: torch's AdamW, since DeepSpeed's cannot be compiled here: {str(error)[:100]}", file=sys.stderr)
        return False
    return True


def _accelerate(run: Run, settings: dict[str, Any], system: System, batches: Repeated) -> Rival:
    if reason := available("accelerate"):
        raise ConfigError(reason)
    from accelerate import Accelerator
    from diffusers.training_utils import EMAModel

    part, network = _network(run, system)
    _compile(run, system, network)
    with _as_one_process():
        accelerator = Accelerator(
            mixed_precision={"fp32": "no"}.get(read_precision(settings), read_precision(settings)),
            gradient_accumulation_steps=batches.accumulation,
            cpu=not torch.cuda.is_available(),
        )
        model, optimizer = accelerator.prepare(network, adamw(run, system, network, list(network.parameters()), False))
    averages = [EMAModel(network.parameters(), decay=decay) for decay in run.ema.decays]

    def step(number: int) -> None:
        for batch in batches.read_step(number):
            with accelerator.accumulate(model):
                loss = _loss(system, part, model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients and run.optimizer.clip:
                    accelerator.clip_grad_norm_(model.parameters(), run.optimizer.clip)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                for average in averages:
                    average.step(model.parameters())
            loss.detach().item()  # as their progress bars show it

    return Rival(network, step)


def _fast_dit(run: Run, settings: dict[str, Any], system: System, batches: Repeated) -> Rival:
    part, network = _network(run, system)
    for module in network.modules():
        if isinstance(module, system.list_block_classes()):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    optimizer = torch.optim.AdamW(network.parameters(), lr=run.optimizer.lr, weight_decay=run.optimizer.weight_decay)
    average, dtype = _averages(run, network)[:1], DTYPES[read_precision(settings)]
    kind = group.device().type

    def step(number: int) -> None:
        optimizer.zero_grad()
        for batch in batches.read_step(number):
            with torch.autocast(kind, dtype, enabled=dtype != torch.float32):
                loss = _loss(system, part, network, batch)
            (loss / batches.accumulation).backward()
            loss.item()
        optimizer.step()
        _average(average, network)

    return Rival(network, step)


_RIVALS = {"stock": _stock, "accelerate": _accelerate, "fast-DiT": _fast_dit}


@contextmanager
def _as_one_process() -> Iterator[None]:
    """Hides the launcher's variables, by which accelerate would wrap the network of a single process in DDP."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
