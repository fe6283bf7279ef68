"""Joins the process group of the launcher, whichever it is, or begins one of a single process."""

import functools
import io
import os
import re
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import timedelta
from pathlib import Path

import torch

from dstrain.distributed import group
from dstrain.distributed.launcher import Place
from dstrain.distributed.presence import make_launch_folder_name
from dstrain.distributed.progress import get_phases
from dstrain.distributed.stops import get_stops
from dstrain.engine.patches import import_deepspeed, replace_current_stream_lookup, set_default_group_timeout
from dstrain.recipe import ConfigError

_OPERATOR = "deepspeed_shm_comm"  # also the name of its folder
exchanged = False  # Whether this process has begun a process group, whose threads may outlive it.


def start_process_group(timeout_minutes: float = 30) -> None:
    """Joins the process group of the launcher (deepspeed, torchrun, Slurm), or begins one of this process alone. Sets
    the environment variables of rank and world size, and imports DeepSpeed. Does not join again if a group is started.

    From now on, an exchange that waits for other ranks longer than `timeout_minutes` raises an error, which
    group.explain_lost_ranks explains. Raises ConfigError if the port is taken.
    """
    get_phases().enter_phase("importing DeepSpeed, whose operator is compiled anew for another Python or torch")
    place = _set_rank_variables()
    _warn_of_shared_torchrun_store()
    deepspeed = import_deepspeed()
    if torch.cuda.is_available():
        torch.cuda.set_device(group.device())
        replace_current_stream_lookup(group.device().index)
    if not group.is_started():
        global exchanged
        exchanged = True
        timeout = timedelta(minutes=timeout_minutes)
        set_default_group_timeout(timeout)
        try:
            if place.world > 1:
                get_phases().enter_phase(f"meeting {place.world - 1} other ranks at {os.environ['MASTER_ADDR']}")
            _start_process_group_of_launch(deepspeed.get_accelerator().communication_backend_name(), timeout)
            with (
                _announce_operator_compilation(),
                redirect_stdout(io.StringIO()),
            ):  # each rank would print a line of DeepSpeed's own
                deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, timeout=timeout)
        except torch.distributed.DistNetworkError as error:
            raise (_make_taken_port_error() if _is_taken_port_error(error) else error) from None
        group.barrier()
        _unlink_shared_memory_buffers()
        if place.world > 1:
            get_stops().set_store(group.open_group_store())


def _set_rank_variables() -> Place:
    """Sets the environment variables from which DeepSpeed reads the ranks. Returns rank and world size of this process.

    RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are what the launcher says, or rank 0 of 1. MASTER_ADDR and
    MASTER_PORT, if they are missing, follow from Slurm's job. A single process gets 127.0.0.1 and mostly a free port,
    even if they are set.
    """
    place = group.read_rank_and_world()
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_world),
    )
    if place.world == 1:  # It meets nobody, whatever host a shell or a job names.
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    elif "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = _find_host_of_rank_0()
    # Launchers name the same port for every run, so that two runs of one rank would fight for it, which nobody else
    # needs. Only torchrun's agent listens at the port that it names.
    alone = place.world == 1 and not group.is_started() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if alone or "MASTER_PORT" not in os.environ:
        # Several ranks must know one port without a word between them: it follows from Slurm's job, so that two jobs on
        # one host seldom meet.
        job = os.environ.get("SLURM_JOB_ID", "0")
        number = int(job) if job.isdecimal() else zlib.crc32(job.encode())
        os.environ["MASTER_PORT"] = str(_find_free_port() if place.world == 1 else 20000 + number % 10000)
    return place


def _warn_of_shared_torchrun_store() -> None:
    """Prints a note if torchrun lets machines join later (--nnodes MIN:MAX) and its agents share their store with the
    ranks. A machine that joins later would then hang.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    with suppress(OSError):  # a system without /proc
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
        if re.search(r"--nnodes[ =]\d+:", " ".join(words)):
            get_phases().print_lines(
                "note: a machine that joins later hangs (github.com/pytorch/pytorch/issues/135712): start torchrun "
                "with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all machines"
            )


@contextmanager
def _announce_operator_compilation() -> Iterator[None]:
    """Prints, before the block, that DeepSpeed will compile its operator for exchanges on the CPU inside the block, and
    after the block how long it took. Prints nothing on a GPU, or if the operator is compiled already.
    """
    module = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / _OPERATOR / f"{_OPERATOR}.so"
    if group.device().type != "cpu" or module.exists():
        yield
        return
    began = time.monotonic()
    get_phases().print_lines(
        "compiling DeepSpeed's operator for exchanges between ranks on the CPU, once: about a minute"
    )
    get_phases().enter_phase("compiling DeepSpeed's operator, or waiting for another process that does")
    yield
    get_phases().print_lines(f"compiled in {time.monotonic() - began:.0f} s")


def _start_process_group_of_launch(backend: str, timeout: timedelta) -> None:
    """Starts torch's process group over a store that only this launch uses. Does nothing if DeepSpeed can start the
    group itself: for one rank, and with torchrun. But if torchrun has restarted the ranks and its store still holds the
    addresses of earlier ones, starts the group, too.

    Raises ConfigError if another launch has taken the port, DistStoreError if rank 0 does not come in time.
    """
    attempt, place = os.environ.get("TORCHELASTIC_RESTART_COUNT"), group.read_rank_and_world()
    # A store that torchrun's agents share with the ranks lives on, with the addresses of ranks that are gone. Otherwise
    # each launch has one, and attempts tell launches apart no longer: a machine that joins the others counts from 0.
    lives_on = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and attempt not in (None, "0")
    if not lives_on and (place.world == 1 or attempt is not None):
        return
    if lives_on:
        store, _, _ = next(torch.distributed.rendezvous("env://", timeout=timeout))
        store = torch.distributed.PrefixStore(f"attempt_{attempt}", store)
    else:
        store = open_launch_store()
        if place.rank == 0:
            store.set("dstrain/ready", "")
        if not group.wait_for_first_rank(store, "dstrain/ready", timeout.total_seconds()):
            raise torch.distributed.DistStoreError("timeout: rank 0 does not come")
        store.set_timeout(timeout)
    torch.distributed.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world,
        timeout=timeout,
        device_id=group.device() if torch.cuda.is_available() else None,
    )


@functools.cache
def open_launch_store() -> torch.distributed.Store:
    """Returns a connection to the store of rank 0, through which the ranks exchange small values. The first call makes
    the connection, and waits for rank 0; later calls return the same one.

    Raises ConfigError if the port is taken, or if the store belongs to another launch on the same host.
    """
    # A launcher that starts several ranks on a host is the parent of them all. So a rank on rank 0's host with another
    # parent belongs to another launch that uses the same port.
    place = _set_rank_variables()
    try:
        store = torch.distributed.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=place.rank == 0,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=torch.distributed.distributed_c10d.default_pg_timeout,
        )
    except torch.distributed.DistNetworkError as error:
        raise (_make_taken_port_error() if _is_taken_port_error(error) else error) from None
    host, launch = socket.gethostname(), make_launch_folder_name() if place.local_world > 1 else ""
    if place.rank == 0:
        store.set("dstrain/launch", f"{host} {launch}")
    elif (first := store.get("dstrain/launch").decode()).startswith(f"{host} ") and first != f"{host} {launch}":
        raise _make_taken_port_error()
    get_stops().set_store(store.clone())
    return store


def _is_taken_port_error(error: Exception) -> bool:
    return "EADDRINUSE" in str(error) or "in use" in str(error)


def _make_taken_port_error() -> ConfigError:
    return ConfigError(
        f"port {os.environ['MASTER_PORT']} is taken, perhaps by another run here: give the launcher another, deepspeed "
        "--master_port PORT ..."
    )


def _unlink_shared_memory_buffers() -> None:
    """Removes the files in /dev/shm by which DeepSpeed shares buffers between ranks on the CPU, 69 MB for each rank;
    DeepSpeed would leave them there. Does nothing on a GPU.

    Every rank has mapped them by now, so the memory is freed when the last process ends.
    """
    if group.device().type == "cpu":
        name = f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_*"
        for path in Path("/dev/shm").glob(name):
            path.unlink(missing_ok=True)


def _find_host_of_rank_0() -> str:
    """Returns the host of rank 0: the first host of Slurm's step or job, or 127.0.0.1 without Slurm. Raises ConfigError
    if scontrol does not tell Slurm's hosts.
    """
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        return "127.0.0.1"
    import subprocess

    try:
        listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
        return listed.stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise ConfigError(
            f"MASTER_ADDR is not set, and scontrol does not name the hosts of Slurm's {nodes} ({error}): set "
            "MASTER_ADDR to the host of rank 0, the first of `scontrol show hostnames $SLURM_JOB_NODELIST`"
        ) from None


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
