"""Reads this process's rank and the world size from the environment that a launcher has set, without torch.

RANK, WORLD_SIZE, LOCAL_RANK           the `deepspeed` launcher (LOCAL_SIZE), torchrun (LOCAL_WORLD_SIZE)
OMPI_COMM_WORLD_*, MV2_*, PMI_*        mpirun of Open MPI, MVAPICH, MPICH and Intel MPI
SLURM_*                                srun
"""

import os
import re
from dataclasses import dataclass

# Names of the rank, the world, the rank on this machine, and the number of ranks on this machine.
_SOURCES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", ("MV2_COMM_WORLD_LOCAL_SIZE",)),
    (
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)),
)
# Ranks of process managers that do not say how many there are, or not by these names.
_RANKS_ALONE = ("PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK")


@dataclass(frozen=True)
class Place:
    """The rank of this process, the world size, its rank among the processes of this machine, and their number."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1


def read_rank_and_world() -> Place:
    """Returns the rank of this process and the number of ranks, in all and on this machine, from the environment
    variables that the launcher has set. Without a launcher this process is rank 0 of 1.

    Raises ValueError if a variable is no number, if the rank is not below the number of ranks, or if only one of the
    two is set: otherwise several processes could each train alone.
    """
    halves = []
    for rank, world, local, sizes in _SOURCES:
        # A batch script's own shell carries SLURM_NTASKS but runs once: only a step (srun) has a procid of several.
        if rank in os.environ and world in os.environ:
            if rank == "SLURM_PROCID" and "SLURM_STEP_ID" not in os.environ:
                continue
            size = next((name for name in sizes if os.environ.get(name)), sizes[0])
            own = Place(
                _read_number_variable(rank),
                _read_number_variable(world),
                _read_number_variable(local),
                _read_task_count_of_node(size, _read_number_variable("SLURM_NODEID")),
            )
            if own.rank >= own.world:
                raise ValueError(
                    f"{rank}={own.rank} is not below {world}={own.world}: ranks count from 0; start "
                    "the command by a launcher, or unset both variables"
                )
            return own
        if rank != "SLURM_PROCID" and (rank in os.environ or _read_number_variable(world) > 1):
            halves.append((rank, world) if rank in os.environ else (world, rank))
    if "SLURM_JOB_ID" not in os.environ:
        halves += [(name, "RANK and WORLD_SIZE") for name in _RANKS_ALONE if name in os.environ]
    for there, missing in halves:
        raise ValueError(
            f"{there}={os.environ[there]} is in the environment, and {missing} is not: start the command by a "
            f"launcher, set {missing}, or unset {there}"
        )
    return Place()


def _read_number_variable(name: str) -> int:
    """Returns an environment variable as an integer from 0 on; 0 if it is not set or empty. Raises ValueError if it is
    no such number.
    """
    text = os.environ.get(name) or "0"
    if not (text.isascii() and text.isdigit()):
        raise ValueError(
            f"{name}={text} in the environment is no number from 0 on: start the command by a launcher, "
            "or unset the variable"
        )
    return int(text)


def _read_task_count_of_node(name: str, node: int) -> int:
    """Returns the number of tasks on node number `node`, from Slurm's list in the environment variable `name`:
    "4(x2),3" means 4, 4 and 3, and "4" means 4 on every node. A node beyond the list has the last number. Returns 1 if
    the variable is not set. Raises ValueError if the list is malformed.
    """
    sizes, numbers = os.environ.get(name) or "1", []
    for word in sizes.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word.strip(), re.ASCII)
        if not match:
            raise ValueError(
                f"{name}={sizes} in the environment is no number of ranks: start the command by a "
                "launcher, or unset the variable"
            )
        numbers += [int(match[1])] * int(match[2] or 1)
    return numbers[min(node, len(numbers) - 1)]
