"""Pictures from a trained run: PNGs, a grid, and the .npz that ADM's evaluation reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from dstrain import ranks, systems
from dstrain.config import ConfigError, Run
from dstrain.engine.checkpoint import read_weights
from dstrain.engine.store import Store
from dstrain.recipe import load
from dstrain.sampling import class_columns, draw
from dstrain.systems.base import Request, System
from dstrain.track.pictures import grid, save_png
from dstrain.weights import checkpoint_kind, whole


@dataclass(frozen=True)
class Order:
    """What to generate; None takes the run's own choice (its `samples` section, its newest checkpoint)."""

    folder: Path                               # of the run
    num: int = 16
    labels: tuple[int, ...] | None = None      # repeated to num; None: every class in turn
    num_steps: int | None = None               # network evaluations for each picture
    sampler: str | None = None
    guidance_scale: float | None = None
    seed: int = 0                              # picture i is a function of seed + i alone
    ema: float | None = None                   # decay; None: the run's choice
    raw: bool = False                          # the training weights instead of an average
    step: int | None = None                    # checkpoint; None: the newest whole one
    batch: int = 16                            # pictures of one rank at a time
    out: Path | None = None                    # None: FOLDER/generated
    pngs: bool = True                          # one file for each picture, beside the grid and the .npz


def generate(order: Order) -> Path:
    """Draws and writes what is ordered, on all ranks together; the folder it wrote. ConfigError: what cannot be."""
    run = load(_recipe(order.folder))
    system = systems.build(run.system, run.model)
    checkpoint = _checkpoint(order)
    networks = _networks(system, checkpoint, order, run)
    request = _request(order, run, system)
    out = ranks.from_first(_out(order) if ranks.rank() == 0 else None)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be made ({error.strerror}): name a folder that can be written") from None
    ranks.barrier()
    kept: list[Tensor] = []
    with tqdm(total=order.num, unit="picture", disable=ranks.rank() != 0) as bar:
        for numbers, images in draw(system, networks, request, min(order.batch, order.num)):
            for number, image in zip(numbers.tolist(), images) if order.pngs else ():
                if number % ranks.world() == ranks.rank():
                    save_png(out / f"{order.seed + number:06d}.png", image.permute(1, 2, 0).numpy())
            if ranks.rank() == 0:
                kept.append(images)
            bar.update(len(numbers))
    if ranks.rank() == 0:
        pictures = torch.cat(kept)
        save_png(out / "grid.png", grid(pictures[:256], class_columns(request)))
        _save_npz(out, pictures)
    ranks.barrier()
    return out


def _out(order: Order) -> Path:
    """The folder to write into: the one asked for, or the first of generated, generated_2, ... without pictures."""
    def used(path: Path) -> bool:
        return path.is_dir() and any(path.glob("samples_*.npz"))

    if order.out is not None:
        if used(order.out):
            raise ConfigError(f"--out {order.out} holds pictures of another order: name another folder, or empty it")
        return order.out
    number, path = 1, order.folder / "generated"
    while used(path):
        number += 1
        path = order.folder / f"generated_{number}"
    return path


def _recipe(folder: Path) -> Path:
    if not (folder / "run.yaml").exists():
        raise ConfigError(f"{folder} is not a run's folder: it holds no run.yaml; name one that training has made, for "
                          "example runs/dit-small")
    return folder / "run.yaml"


def _checkpoint(order: Order) -> Path:
    store = Store(order.folder / "checkpoints")
    if order.step is not None:
        if order.step not in store.steps():
            there = ", ".join(map(str, store.steps())) or "none"
            raise ConfigError(f"--checkpoint {order.step}: {order.folder} holds no checkpoint of that step; it holds "
                              f"{there}")
        return whole(store.folder / f"step_{order.step:08d}")
    newest = store.newest()
    if newest is None:
        raise ConfigError(f"{order.folder} holds no whole checkpoint yet: train first")
    return newest[1]


def _networks(system: System, checkpoint: Path, order: Order, run: Run) -> dict[str, nn.Module]:
    """The system's networks with the weights asked for, on this rank's device; in bf16 where that is a GPU."""
    dtype = torch.bfloat16 if ranks.device().type == "cuda" else torch.float32
    networks = system.networks()
    for part, network in networks.items():
        kind = "master" if order.raw else checkpoint_kind(checkpoint, part, run.samples.ema if order.ema is None
                                                          else order.ema) if part in system.averaged else "master"
        network.load_state_dict(read_weights(checkpoint, part, kind))
        buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
        network.to(ranks.device(), dtype).eval()
        for name, buffer in network.named_buffers():                      # tables keep their own precision
            buffer.data = buffers[name].to(ranks.device())
    for network in system.frozen():
        network.to(ranks.device())
    return networks


def _request(order: Order, run: Run, system: System) -> Request:
    wanted = run.samples

    def choice(given: Any, own: Any) -> Any:
        return own if given is None else given

    conditions = system.conditions(order.num, choice(order.labels, wanted.labels))
    return Request(order.seed + torch.arange(order.num), conditions, choice(order.num_steps, wanted.num_steps),
                   choice(order.sampler, wanted.sampler), choice(order.guidance_scale, wanted.guidance_scale))


def _save_npz(out: Path, pictures: Tensor) -> None:
    """`arr_0` uint8 (N, H, W, 3), the layout of ADM's evaluator; grey is repeated."""
    array = pictures.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()
    np.savez(out / f"samples_{'x'.join(map(str, array.shape))}.npz", arr_0=array)
