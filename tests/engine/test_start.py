"""The beginning of a process: its environment, and how ranks meet. Launchers themselves: tests/launch."""

import importlib
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dstrain.distributed import group
from dstrain.distributed.progress import Phases
from dstrain.engine import set_deepspeed_environment
from dstrain.engine.start import _announce_operator_compilation, start_process_group
from dstrain.recipe import ConfigError
from tests.support.launch import ROOT, SPAWN, environment, free_port

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="forks cannot share a GPU")

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "TORCHELASTIC_")


def forked(world: int, work: Callable[[int], None], **variables: str) -> None:
    """work(rank) in `world` forks without a launcher's variables, but for these."""
    set_deepspeed_environment()
    importlib.import_module("deepspeed")  # once, for all the forks
    mp.start_processes(_enter, (work, variables), world, start_method="fork")


def _enter(rank: int, work: Callable[[int], None], variables: dict[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        del os.environ[name]
    os.environ.update(variables)
    torch.set_num_threads(1)
    work(rank)


def ranks(rank: int, world: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}


def meet(rank: int, world: int) -> None:
    """Starts, and finds every other rank; no shared buffer is left under a name."""
    start_process_group(timeout_minutes=0.5)
    assert (group.is_started(), group.rank(), group.world()) == (True, rank, world)
    assert group.sum_over_ranks(torch.tensor([2.0**rank])).item() == 2**world - 1
    address = f"{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}"
    group.barrier()
    assert not list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{address}_*"))
    start_process_group(timeout_minutes=0.5)  # once more changes nothing
    assert group.world() == world
    group.leave_process_group()


def watched() -> list[str]:
    """What this process says it is at, from now on."""
    seen, at = [], Phases.enter_phase
    Phases.enter_phase = lambda self, phase: (seen.append(phase), at(self, phase))
    return seen


def alone(rank: int) -> None:
    seen = watched()
    start_process_group(timeout_minutes=3)
    assert not any("meeting" in phase for phase in seen)
    assert {name: os.environ[name] for name in ranks(0, 1)} == ranks(0, 1)
    assert os.environ["MASTER_ADDR"] == "127.0.0.1" and 1024 <= int(os.environ["MASTER_PORT"]) < 65536
    assert os.environ["MASTER_PORT"] != "20000"  # which jobs of Slurm without a number share
    assert group.is_started() and group.world() == 1
    assert dist.distributed_c10d.default_pg_timeout == timedelta(minutes=3)
    store = dist.distributed_c10d._get_default_store()
    assert store.timeout == timedelta(minutes=3)


def test_a_process_alone():
    """Oracle: the variables of torch's env:// rendezvous; the timeout holds for groups that are made later, too; it
    waits for nobody.
    """
    forked(1, alone)


def named(rank: int) -> None:
    os.environ.update(ranks(rank, 2))
    port = os.environ["MASTER_PORT"]
    seen = watched()
    import deepspeed

    own, other = (Path(f"/dev/shm/deepspeed_allreduce_buffer_{rank}_localhost_{number}_x") for number in (port, "0"))
    init = deepspeed.init_distributed

    def mapped_late(**words) -> None:
        init(**words)
        own.touch()
        other.touch()
        if rank == 1:
            time.sleep(0.3)
            assert own.exists()  # nobody else has removed it before this rank has mapped it

    deepspeed.init_distributed = mapped_late
    try:
        meet(rank, 2)
        assert other.exists()  # of another run
    finally:
        other.unlink()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("localhost", port)
    assert seen.count("meeting 1 other ranks at localhost") == 1


def test_two_ranks_that_are_told_where():
    """Oracle: the launcher's own address and port, which stay; a sum over both ranks; the names in /dev/shm, of which
    those of this run go when the last rank has used its own.
    """
    forked(2, named, MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))


def slurm(rank: int) -> None:
    os.environ.update(SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
    meet(rank, 2)
    assert os.environ["MASTER_ADDR"] == "127.0.0.2"  # 127.0.0.1 is taken where Slurm names no host
    assert int(os.environ["MASTER_PORT"]) == 20000 + int(os.environ["SLURM_JOB_ID"]) - 70000


def meets_nowhere(rank: int) -> None:
    os.environ.update(ranks(rank, 2))
    with pytest.raises(ConfigError, match=r"MASTER_ADDR is not set, and scontrol .* set MASTER_ADDR to the host"):
        start_process_group(timeout_minutes=0.05)


def test_slurm_without_scontrol():
    """Oracle: a container in a job: one process meets nobody and starts, also where the job names a host that has no
    address; several are told what to set.
    """
    forked(1, alone, SLURM_JOB_NODELIST="n1", PATH="/none/here")
    forked(1, alone, MASTER_ADDR="nowhere.invalid")
    forked(1, meets_nowhere, SLURM_JOB_NODELIST="n[1-2]", PATH="/none/here")


@pytest.mark.parametrize("name", ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"])
def test_two_ranks_of_slurm(tmp_path, name):
    """Oracle: the first host that scontrol names, and a port that follows from the job."""
    script = '#!/bin/sh\n[ "$*" = "show hostnames some[1-2]" ] && echo "127.0.0.2\nelsewhere"\n'
    (tmp_path / "scontrol").write_text(script)
    (tmp_path / "scontrol").chmod(0o755)
    while not 20000 <= (port := free_port()) < 30000:
        pass
    forked(
        2,
        slurm,
        SLURM_NTASKS="2",
        SLURM_STEP_ID="0",
        SLURM_JOB_ID=str(port - 20000 + 70000),
        SLURM_TASKS_PER_NODE="2",
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        **{name: "some[1-2]"},
    )


@pytest.mark.parametrize("there", [False, True])
def test_the_minute_of_compiling(tmp_path, monkeypatch, there):
    """Oracle: by hand: two lines and a phase where DeepSpeed's operator is not there yet, else none."""
    lines, seen = [], []
    monkeypatch.setattr(Phases, "enter_phase", lambda self, phase: seen.append(phase))
    monkeypatch.setattr(Phases, "print_lines", lambda self, line: lines.append(line))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "deepspeed_shm_comm").mkdir()
    if there:
        (tmp_path / "deepspeed_shm_comm" / "deepspeed_shm_comm.so").touch()
    with _announce_operator_compilation():
        lines.append("inside")
    if there:
        assert lines == ["inside"] and seen == []
        return
    assert [line.split(",")[0] for line in lines] == [
        "compiling DeepSpeed's operator for exchanges between ranks on the CPU",
        "inside",
        "compiled in 0 s",
    ]
    assert seen == ["compiling DeepSpeed's operator, or waiting for another process that does"]


def taken(rank: int) -> None:
    os.environ.update(ranks(0, 2))
    with pytest.raises(ConfigError, match=f"port {os.environ['MASTER_PORT']} is taken, .*--master_port PORT"):
        start_process_group(timeout_minutes=0.05)


def lonely(rank: int) -> None:
    os.environ.update(ranks(1, 2))
    with pytest.raises(dist.DistError) as caught:
        start_process_group(timeout_minutes=0.02)
    assert not isinstance(caught.value, ConfigError)


def test_addresses_that_do_not_serve():
    """Oracle: a socket that listens on the port, which a rank alone does not need: two runs on one machine, whose
    launchers name the same port; and a rank 0 that never comes, which is no fault of a port.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
        forked(1, taken, **port)
        forked(1, alone, **port)
    forked(1, lonely, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))


def again(rank: int) -> None:
    os.environ.update(ranks(rank, 2))
    meet(rank, 2)


def test_ranks_that_torchrun_has_restarted():
    """Oracle: a store that outlives the ranks, as torchrun's does: those of each attempt meet one another."""
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    for attempt in ("0", "1", "2"):
        forked(
            2,
            again,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(store.port),
            TORCHELASTIC_RESTART_COUNT=attempt,
            TORCHELASTIC_USE_AGENT_STORE="True",
        )


def joined(rank: int) -> None:
    os.environ.update(ranks(rank, 2), TORCHELASTIC_RESTART_COUNT=str(1 - rank))
    meet(rank, 2)


def test_a_machine_that_joins_others():
    """Oracle: torch's elastic agents, each of which counts its own restarts: the others have restarted once by then."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    forked(2, joined, TORCHELASTIC_USE_AGENT_STORE="False", **variables)


@pytest.mark.parametrize("nodes, shared, said", [("1:3", "True", 1), ("1:3", "False", 0), ("2", "True", 0)])
def test_machines_that_join_later(nodes, shared, said):
    """Oracle: torch's elastic agents, the parents of ranks, which share their store with these unless the variable says
    otherwise, and then give a machine that joins another port: one line, where machines may join.
    """
    program = "from dstrain.engine.start import _warn_of_shared_torchrun_store; _warn_of_shared_torchrun_store()"
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -c "{program}"; exit $?', "--nnodes", nodes],
        env=environment(TORCHELASTIC_USE_AGENT_STORE=shared),
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all machines\n") == said


MEETS = """
import os, sys, time
from dstrain.commands.exits import run_main_with_exit_code
from dstrain.distributed import group
from dstrain.engine.patches import import_deepspeed
from dstrain.engine.start import start_process_group
def main():
    import_deepspeed()
    open(f"{sys.argv[1]}{os.environ['RANK']}", "w").close()
    while len(os.listdir(os.path.dirname(sys.argv[1]))) < 5:
        time.sleep(0.05)
    time.sleep(2 * int(sys.argv[2][int(os.environ["RANK"])]))
    start_process_group(timeout_minutes=1)
    print(group.gather_objects(sys.argv[1][-1]), flush=True)
    group.leave_process_group()
run_main_with_exit_code(main)
"""


def test_launches_on_one_port(tmp_path):
    """Oracle: exit codes and the ranks that met: of two launches that begin at once the one whose rank 0 came later is
    told that the port is taken, though its rank 1 came before the other's.
    """
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "meets.py").write_text(MEETS)
    port, launches = str(free_port()), {}
    for name, delays in (("a", "02"), ("b", "11")):
        words = [SPAWN, "2", port, str(tmp_path / "here" / "meets.py"), str(tmp_path / "here" / name), delays]
        launches[name] = subprocess.Popen(
            [sys.executable, *words], env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    outputs = {name: process.communicate(timeout=120)[0] for name, process in launches.items()}
    assert [process.returncode for process in launches.values()] == [0, 2], outputs
    assert outputs["a"].count("['a', 'a']") == 2 and f"port {port} is taken" in outputs["b"]
    assert "Traceback" not in outputs["a"] + outputs["b"]


def test_a_start_without_compiler():
    """Oracle: the modules of a fresh interpreter in which DeepSpeed asks whether an optimizer is known to it; what it
    compiles later, it compiles.
    """
    program = """
import sys, torch
from dstrain.engine.patches import import_deepspeed
from dstrain.engine.start import start_process_group
start_process_group(timeout_minutes=1)
deepspeed = import_deepspeed()
known = deepspeed.runtime.zero.utils.is_zero_supported_optimizer(torch.optim.AdamW([torch.zeros(1)]))
print(known, "torch._inductor.compile_fx" in sys.modules, deepspeed.runtime.compiler.compile() is torch.compile)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), text=True, capture_output=True, cwd=ROOT, timeout=120
    )
    assert done.stdout.split() == ["True", "False", "True"], done.stdout + done.stderr


def test_the_environment_of_deepspeed(monkeypatch, tmp_path):
    """Oracle: by hand: what the user has set stays; one folder of extensions for each environment; ninja is found."""
    for name in ("DS_ACCELERATOR", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(name, raising=False)
    beside = str(Path(sys.executable).parent)
    monkeypatch.setenv(
        "PATH", os.pathsep.join(folder for folder in os.environ["PATH"].split(os.pathsep) if folder != beside)
    )
    without = os.environ["PATH"]
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.NOTSET)
    set_deepspeed_environment()
    assert logging.getLogger("torch.utils.cpp_extension").level == logging.ERROR  # else it warns
    folder = os.environ["TORCH_EXTENSIONS_DIR"]
    assert os.environ["DS_ACCELERATOR"] == "cpu" and os.environ["PATH"] == beside + os.pathsep + without
    assert Path(folder).parent == Path.home() / ".cache" / "torch_extensions"
    assert re.fullmatch(r"dstrain-[0-9a-f]{12}", Path(folder).name)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "own"))
    set_deepspeed_environment()
    assert os.environ["PATH"] == beside + os.pathsep + without and Path(os.environ["TORCH_EXTENSIONS_DIR"]).is_dir()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "own")
    folders = {folder}
    for place, version in ((str(tmp_path), sys.version_info), (str(tmp_path), (3, 99, 0, "final", 0))):
        monkeypatch.setattr(sys, "prefix", place)
        monkeypatch.setattr(sys, "version_info", version)
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
        set_deepspeed_environment()
        folders.add(os.environ["TORCH_EXTENSIONS_DIR"])
    assert len(folders) == 3
