"""A few gloo processes on this machine, for tests of collective operations.

They are forked from the test's process, which has imported what they need: fresh ones would import it again, for
seconds each. Where there is a GPU, which forks cannot share, they are fresh.
"""

import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dstrain.distributed import group


def _enter(rank: int, world: int, meeting: Path, work: Callable, arguments: tuple) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    result = work(rank, *arguments)
    _result(meeting, rank).write_bytes(pickle.dumps(result))
    group.leave_process_group()


def _result(meeting: Path, rank: int) -> Path:
    return meeting.with_name(f"{meeting.name}-result{rank}")


def run(folder: Path, work: Callable, *arguments: Any, world: int = 2) -> list[Any]:
    """work(rank, *arguments) in `world` processes of their own: its results in rank order.

    `folder` is where the processes meet.
    """
    meeting = folder / f"meeting{len(list(folder.glob('meeting*')))}"
    gc.collect()
    gc.freeze()  # a garbage collection in a fork would copy all this
    mp.start_processes(
        _enter,
        (world, meeting, work, arguments),
        world,
        start_method="spawn" if torch.cuda.is_available() else "fork",
    )
    return [pickle.loads(_result(meeting, rank).read_bytes()) for rank in range(world)]
