"""Where a process stands, and the few words that ranks exchange."""

import itertools
import socket
import subprocess
import sys
import time

import pytest
import torch

from dstrain.distributed import group
from dstrain.distributed.launcher import Place
from tests.support import gloo
from tests.support.launch import SPAWN, environment, free_port

MPICH = {"PMI_RANK": 1, "PMI_SIZE": 2, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 2}
WORDS = (
    *MPICH,
    "PMIX_RANK",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "SLURM_NODEID",
    "SLURM_TASKS_PER_NODE",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_ID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
)
TORCHRUN = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1}
MPIRUN = {"OMPI_COMM_WORLD_RANK": 3, "OMPI_COMM_WORLD_SIZE": 4, "OMPI_COMM_WORLD_LOCAL_RANK": 2}
SBATCH = {"SLURM_PROCID": 0, "SLURM_NTASKS": 16, "SLURM_LOCALID": 0}
SRUN = {"SLURM_PROCID": 9, "SLURM_NTASKS": 16, "SLURM_LOCALID": 1, "SLURM_STEP_ID": 0}

# Rows of two ranks, of uneven numbers, by dtype and shape; rank 1's come after rank 0's.
ROWS = {
    "images": (torch.arange(24, dtype=torch.uint8).view(3, 2, 2, 2), torch.full((1, 2, 2, 2), 255, dtype=torch.uint8)),
    "labels": (torch.tensor([1, -(2**62)]), torch.tensor([3, 4, 5])),
    "flags": (torch.tensor([True]), torch.tensor([False, True])),
    "none here": (torch.empty(0, 3), torch.tensor([[0.5, float("inf"), -0.0]])),
    "none there": (torch.tensor([[1.5], [2.5]], dtype=torch.float64), torch.empty(0, 1, dtype=torch.float64)),
    "none": (torch.empty(0, 2), torch.empty(0, 2)),
    "transposed": (torch.arange(6.0).reshape(2, 3).T, torch.arange(4.0).reshape(2, 2).T),
}


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """The environment of a process that no launcher has started."""
    for word in WORDS:
        monkeypatch.delenv(word, raising=False)


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, Place(0, 1, 0)),
        (TORCHRUN, Place(5, 8, 1)),
        (MPIRUN, Place(3, 4, 2)),
        (SRUN, Place(9, 16, 1)),
        (SBATCH, Place(0, 1, 0)),  # the batch script itself runs once
        (SBATCH | TORCHRUN, Place(5, 8, 1)),
        (SRUN | TORCHRUN, Place(5, 8, 1)),  # a launcher within a job
        (SBATCH | MPIRUN, Place(3, 4, 2)),
        (SRUN | MPIRUN, Place(3, 4, 2)),
        ({"RANK": 0, "WORLD_SIZE": 1}, Place(0, 1, 0)),  # no local rank said
        (TORCHRUN | {"LOCAL_WORLD_SIZE": 4}, Place(5, 8, 1, 4)),
        (TORCHRUN | {"LOCAL_SIZE": 4}, Place(5, 8, 1, 4)),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": 4}, Place(3, 4, 2, 4)),
        (SRUN | {"SLURM_NODEID": 1, "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, Place(9, 16, 1, 8)),
        (SRUN | {"SLURM_NODEID": 2, "SLURM_TASKS_PER_NODE": "4(x2),5,3"}, Place(9, 16, 1, 5)),
        (SRUN | {"SLURM_NODEID": 3, "SLURM_TASKS_PER_NODE": "4(x2),5,3"}, Place(9, 16, 1, 3)),
        (SRUN | {"SLURM_NTASKS_PER_NODE": "8"}, Place(9, 16, 1, 8)),
        (SRUN | TORCHRUN | {"LOCAL_WORLD_SIZE": 2, "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, Place(5, 8, 1, 2)),
        (SBATCH | {"SLURM_TASKS_PER_NODE": "8(x2)"}, Place(0, 1, 0)),
        ({"LOCAL_RANK": 1}, Place(0, 1, 0)),
        ({"WORLD_SIZE": 1}, Place(0, 1, 0)),  # one process needs no rank
        (MPICH, Place(1, 2, 1, 2)),
        (SRUN | MPICH, Place(9, 16, 1)),
        ({"RANK": 3} | MPIRUN, Place(3, 4, 2)),
    ],
    ids=str,
)
def test_place(monkeypatch, environment, expected):
    """Oracle: what torchrun, mpirun, srun and sbatch document of their variables."""
    for word, value in environment.items():
        monkeypatch.setenv(word, str(value))
    assert group.read_rank_and_world() == expected
    assert group.rank() == expected.rank and not group.is_started()
    assert group.world() == 1  # until the process group stands


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"RANK": "abc"}, "RANK=abc"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE=-1"),
        ({"LOCAL_RANK": "1.5"}, "LOCAL_RANK=1.5"),
        ({"LOCAL_WORLD_SIZE": "4(x"}, "LOCAL_WORLD_SIZE=4(x"),
        ({"RANK": "8"}, "RANK=8 is not below WORLD_SIZE=8"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "RANK=0 is not below WORLD_SIZE=0"),
    ],
    ids=str,
)
def test_a_place_that_is_none(monkeypatch, changed, named):
    """Oracle: one error that names the variable of the environment, and what to do."""
    for word, value in (TORCHRUN | changed).items():
        monkeypatch.setenv(word, str(value))
    with pytest.raises(ValueError, match="start the command by a launcher") as caught:
        group.read_rank_and_world()
    assert str(caught.value).startswith(named)


@pytest.mark.parametrize(
    "environment, named",
    [
        ({"RANK": "3"}, "RANK=3"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "WORLD_SIZE=2"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_RANK=1"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4"),
        ({"PMI_RANK": "0"}, "PMI_RANK=0"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0"),
        (SBATCH | {"PMI_RANK": "0"}, "PMI_RANK=0"),
    ],
    ids=str,
)
def test_half_a_place(monkeypatch, environment, named):
    """Oracle: a rank without a world, and a world without a rank, would each train alone: the half that is there."""
    for word, value in environment.items():
        monkeypatch.setenv(word, str(value))
    with pytest.raises(ValueError, match="start the command by a launcher") as caught:
        group.read_rank_and_world()
    assert str(caught.value).startswith(named)


def test_one_process_is_the_identity(monkeypatch):
    """Oracle: the arguments; also before a launched process has met the others."""
    for word, value in TORCHRUN.items():
        monkeypatch.setenv(word, str(value))
    rows = torch.arange(6).reshape(3, 2)
    assert group.gather_rows(rows) is rows and group.sum_over_ranks(rows) is rows
    assert (
        group.is_true_on_any_rank(True) is True
        and group.is_true_on_any_rank(False) is False
        and group.compute_max_over_ranks(-4) == -4
    )
    assert (
        group.gather_objects({"a": 1}) == group.gather_on_first_rank({"a": 1}) == [{"a": 1}]
        and group.broadcast_from_first("b") == "b"
    )
    assert torch.equal(group.gather_rows_on_first_rank(rows, [2]), rows[:2])
    group.barrier()
    wishes = []
    ballot = group.Ballot(lambda: bool(wishes))
    ballot.cast_vote()
    wishes.append("late")
    assert ballot.await_outcome() is True


def voted(rank: int, wishes: int) -> bool:
    """The outcome of a vote, of which the ranks' wishes are bits; after it is cast they exchange something else."""
    ballot = group.Ballot(lambda: bool(wishes >> rank & 1))
    ballot.cast_vote()
    assert group.sum_over_ranks(torch.tensor(1)) == group.world()
    return ballot.await_outcome()


def exchanged(rank: int, rows: dict) -> dict:
    """All that two ranks say to each other, as each of them hears it."""
    mine = torch.tensor([0.5, 1.0 + rank])
    result = {
        "gather": {name: group.gather_rows(parts[rank]) for name, parts in rows.items()},
        "total": group.sum_over_ranks(mine),
        "mine": mine,
        "counts": group.sum_over_ranks(torch.tensor(2**40 + rank)),
        "agree": [group.is_true_on_any_rank(bool(flag >> rank & 1)) for flag in range(4)],
        "votes": [voted(rank, wishes) for wishes in range(4)],
        "max": [group.compute_max_over_ranks(value) for value in (rank, -rank, 2**53 + rank, -(2**60) - rank)],
        "objects": group.gather_objects({"rank": rank, "text": "x" * 1000 * rank}),
        "to first": group.gather_on_first_rank({"rank": rank, "text": "x" * 1000 * rank}),
        "rows": {
            counts: group.gather_rows_on_first_rank(torch.arange(6).view(3, 2) + 10 * rank, list(counts))
            for counts in itertools.product((0, 1, 3), repeat=2)
        },
        "first": [group.broadcast_from_first(value) for value in (f"rank {rank}", None if rank else [1], rank or None)],
        "where": (group.rank(), group.world(), group.is_started(), group.read_rank_and_world().local_rank),
    }
    group.barrier()
    return result


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What rank 0 and rank 1 heard."""
    return gloo.run(tmp_path_factory.mktemp("two"), exchanged, ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_gather(two, name):
    """Oracle: torch.cat of the rows of rank 0 and rank 1, on both."""
    expected = torch.cat(ROWS[name])
    for heard in two:
        found = heard["gather"][name]
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_what_rank_0_alone_receives(two):
    """Oracle: by hand: the values of both ranks in order, and the first rows of each; nothing on rank 1."""
    assert two[0]["to first"] == [{"rank": 0, "text": ""}, {"rank": 1, "text": "x" * 1000}]
    assert two[1]["to first"] is None and set(two[1]["rows"].values()) == {None}
    for (first, second), rows in two[0]["rows"].items():
        expected = torch.arange(6).view(3, 2)
        assert torch.equal(rows, torch.cat((expected[:first], expected[:second] + 10)))


def test_total(two):
    """Oracle: the sum; the argument keeps its values."""
    for rank, heard in enumerate(two):
        assert heard["total"].tolist() == [1.0, 3.0] and heard["mine"].tolist() == [0.5, 1.0 + rank]
        assert heard["counts"].item() == 2**41 + 1 and heard["counts"].dtype == torch.int64


def test_agree_and_agreed_max(two):
    """Oracle: any and max of both ranks' values."""
    for heard in two:
        assert heard["agree"] == heard["votes"] == [False, True, True, True]
        assert heard["max"] == [1, 0, 2**53 + 1, -(2**60)]


def test_objects_and_from_first(two):
    """Oracle: what each rank said, in rank order; what rank 0 said."""
    for heard in two:
        assert heard["objects"] == [{"rank": 0, "text": ""}, {"rank": 1, "text": "x" * 1000}]
        assert heard["first"] == ["rank 0", [1], None]


def test_where(two):
    """Oracle: the number of each process."""
    assert [heard["where"] for heard in two] == [(0, 2, True, 0), (1, 2, True, 1)]


def left(rank: int) -> tuple[float, float]:
    """When this rank was out of the barrier, of which rank 1 hears late, and when it might end."""
    barrier, times = group.barrier, []

    def heard_late() -> None:
        barrier()
        time.sleep(0.7 * rank)
        times.append(time.monotonic())

    group.barrier = heard_late
    group.leave_process_group()
    group.barrier = barrier
    return times[0], time.monotonic()


def test_nobody_leaves_before_all_are_out(tmp_path):
    """Oracle: one clock for both processes: rank 0 may not end while rank 1 has not come out of the last barrier."""
    (out, end), (late, last) = gloo.run(tmp_path, left)
    assert out < late - 0.5 and late <= end and late <= last, "rank 0 ended while rank 1 was among ranks"


# A rank whose thread waits for ever, as one that speaks with ranks that are gone: it falls, and is ended all the same.
FALLEN = """
import sys, threading, torch.distributed as dist
from dstrain.distributed import group
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, int(sys.argv[2]) == 0)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2, timeout=group.timedelta(seconds=2))
group.barrier()
if group.rank() == 1:
    threading.Event().wait(60)                        # alive and silent
try:
    group.is_true_on_any_rank(False)
except RuntimeError as error:
    threading.Thread(target=threading.Event().wait).start()
    print(group.explain_error_and_schedule_end(error, 0.5), flush=True)
    if sys.argv[3] == "end":
        group.end_process(error)
    raise
"""


@pytest.mark.parametrize("ending", ["end", "fall"])
def test_a_rank_that_hears_nothing_ends(ending):
    """Oracle: the clock and the exit code: a peer that is silent, and a thread that never ends, hold nobody back."""
    port, began = free_port(), time.monotonic()
    silent, rank = (
        subprocess.Popen(
            [sys.executable, "-c", FALLEN, str(port), str(number), ending],
            text=True,
            env=environment(RANK=str(number), WORLD_SIZE="2", LOCAL_RANK="0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number in (1, 0)
    )
    try:
        said, errors = rank.communicate(timeout=55)
        assert rank.returncode == 1 and silent.poll() is None, f"{time.monotonic() - began} s\n{errors}"
    finally:
        for process in (silent, rank):
            process.kill()
            process.communicate()
    line = f"rank 0 on {socket.gethostname()} no longer hears from another rank"
    assert said.startswith(line) and said.count("\n") == 1
    assert "Traceback" in errors and f"error: {line}" in errors


@pytest.mark.parametrize(
    "error, expected",
    [
        (
            RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 24000ms for recv"),
            "no longer hears",
        ),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:4242"),
            "has lost its conn",
        ),
        (RuntimeError("[Rank 0]: Ranks 1 failed to pass monitoredBarrier; Gloo timeout"), "no longer hears"),
        (torch.distributed.DistBackendError("NCCL error: unhandled system error"), "has lost its conn"),
        (torch.distributed.DistStoreError("wait timeout after 60000ms, keys: /dstrain/all_out/0"), "no longer hears"),
        (torch.distributed.DistNetworkError("The client socket has timed out after 24000ms"), "no longer hears"),
        (RuntimeError("ProcessGroupGloo does not support bfloat16"), None),
        (torch.distributed.DistBackendError("NCCL error: invalid usage, Duplicate GPU detected"), None),
        (RuntimeError("DataLoader timed out after 60 seconds"), None),
        (RuntimeError("CUDA error: an illegal memory access"), None),
        (torch.OutOfMemoryError("CUDA out of memory"), None),
        (ValueError("gloo"), None),
        (OSError("[Errno 28] No space left on device"), None),
    ],
    ids=str,
)
def test_lost(monkeypatch, error, expected):
    """Oracle: what gloo, NCCL and the store say when a peer is silent or gone, and errors that are no peer's."""
    monkeypatch.setattr(group, "is_started", lambda: True)
    said = group.explain_lost_ranks(error)
    assert said is None if expected is None else expected in said and "the same command goes on" in said


def test_a_rank_that_is_alone():
    """Oracle: the address that it was given, where nobody listens, and the clock."""
    port, program = (
        str(free_port()),
        "from dstrain.commands.exits import run_main_with_exit_code\n"
        "from dstrain.engine.start import start_process_group\n",
    )
    done = subprocess.run(
        [sys.executable, "-c", program + "run_main_with_exit_code(lambda: start_process_group(0.05))"],
        text=True,
        capture_output=True,
        timeout=200,
        env=environment(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
    )
    assert done.returncode == 1 and "Traceback" in done.stderr
    assert f"has not met the other ranks at 127.0.0.1:{port} within faults.timeout_minutes" in done.stderr


def test_a_rank_that_has_gone_says_why_alone(tmp_path):
    """Oracle: by hand: rank 0 says why it ends while rank 1 still looks for it; no traceback of rank 1 follows."""
    (tmp_path / "ranks.py").write_text(
        "import os, psutil, sys, time\n"
        "from torch.distributed import TCPStore\n"
        "from dstrain.commands.exits import run_main_with_exit_code\n"
        "from dstrain.engine.start import start_process_group\n"
        "if os.environ['RANK'] == '1':\n"
        "    run_main_with_exit_code(lambda: start_process_group(1))\n"
        "port = int(os.environ['MASTER_PORT'])\n"
        "store = TCPStore('127.0.0.1', port, 2, True, wait_for_workers=False)\n"
        "def is_met():  # by rank 1 and by its own client\n"
        "    links = psutil.Process().net_connections('tcp')\n"
        "    return sum(link.laddr.port == port and link.status == 'ESTABLISHED' for link in links) == 2\n"
        "while not is_met():\n"
        "    time.sleep(0.05)\n"
        "time.sleep(0.5)\n"
        "print('data.splits: wrong', file=sys.stderr, flush=True)\n"
        "os._exit(2)\n"
    )
    words = [sys.executable, str(SPAWN), "2", str(free_port()), str(tmp_path / "ranks.py")]
    done = subprocess.run(words, text=True, capture_output=True, timeout=200, env=environment())
    assert done.returncode == 2 and "data.splits: wrong" in done.stderr and "Traceback" not in done.stderr, done.stderr


def _teams(rank: int) -> tuple[list[int], bool, dict, dict]:
    team, again = group.get_neighbour_group(2), group.get_neighbour_group(2)
    place, key = torch.tensor([5, 2] if rank < 2 else [1, 7]), torch.tensor([50, 20] if rank < 2 else [10, 70])
    rows = {"key": key, "rank": torch.full((2,), rank)}
    ranks = torch.distributed.get_process_group_ranks(team)
    return (
        ranks,
        team is again,
        group.gather_rows_by_position(place, rows, copies=2),
        group.gather_rows_by_position(place, rows),
    )


def test_neighbours_share_samples(tmp_path):
    """Oracle: by hand: ranks 0, 1 and 2, 3 are teams, and of two ranks that hold the same samples the first one's rows
    count; groups are made once.
    """
    for rank, (ranks, same, once, twice) in enumerate(gloo.run(tmp_path, _teams, world=4)):
        assert ranks == ([0, 1] if rank < 2 else [2, 3]) and same
        assert once["key"].tolist() == [10, 20, 50, 70] and once["rank"].tolist() == [2, 0, 0, 2]
        assert twice["key"].tolist() == [10, 10, 20, 20, 50, 50, 70, 70]
    assert group.get_neighbour_group(1) is None
