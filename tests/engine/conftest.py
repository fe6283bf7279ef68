"""Process groups without a launch: this process alone as a rank, or ranks that are forked from it."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dstrain.distributed import group
from tests.support.launch import free_port
from tests.support.preload import preload
from tests.support.spawn import place


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """This process is the only rank, as after start(); no group, variable or state of DeepSpeed is left behind."""
    from dstrain.engine.patches import forget_process_groups_at_end
    from dstrain.engine.start import start_process_group

    environment = dict(os.environ)
    preload()
    with forget_process_groups_at_end():
        start_process_group(timeout_minutes=1)
        yield
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def synced(monkeypatch) -> dict[str, int]:
    """By name of the files that are forced to the disk from now on: the bytes that have left the program by then."""
    sync, sizes = os.fsync, {}

    def fsync(descriptor: int) -> None:
        sizes[os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))] = os.fstat(descriptor).st_size
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return sizes


@pytest.fixture(scope="session")
def on_ranks() -> Callable[..., None]:
    """on_ranks(world, work, *arguments) calls work(*arguments) on forked ranks, and ends them all where one fails.

    Where there is a GPU, which forks cannot share, the ranks are fresh processes.
    """
    return lambda world, work, *arguments: _fork(world, _enter, world, str(free_port()), work, arguments)


@pytest.fixture(scope="session")
def in_fork() -> Callable[..., None]:
    """in_fork(work, *arguments) calls work(*arguments) in a process of its own, which starts a
    process group or none.
    """
    return lambda work, *arguments: _fork(1, _alone, work, arguments)


def _fork(processes: int, enter: Callable[..., None], *arguments: Any) -> None:
    preload()
    mp.start_processes(enter, arguments, processes, start_method="spawn" if torch.cuda.is_available() else "fork")


def _alone(_: int, work: Callable[..., Any], arguments: tuple) -> None:
    torch.set_num_threads(1)
    work(*arguments)


def _enter(rank: int, world: int, port: str, work: Callable[..., Any], arguments: tuple) -> None:
    from dstrain.engine.start import start_process_group

    os.environ.update(place(rank, world, port))
    torch.set_num_threads(1)
    start_process_group(timeout_minutes=1)
    work(*arguments)
    group.leave_process_group()
