"""A few gloo processes on this machine, for tests of collective operations."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dstrain.ranks import group


def _enter(rank: int, world: int, meeting: str, results: Any, work: Callable,
           arguments: tuple) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    results[rank] = work(rank, *arguments)
    group.leave()


def run(folder: Path, work: Callable, *arguments: Any, world: int = 2) -> list[Any]:
    """work(rank, *arguments) in `world` fresh processes: its results in rank order.

    `folder` is where the processes meet.
    """
    with mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        number = len(list(folder.glob("meeting*")))
        mp.spawn(_enter, (world, str(folder / f"meeting{number}"), results, work, arguments),
                 nprocs=world)
        return [results[rank] for rank in range(world)]
