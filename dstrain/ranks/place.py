"""Where a process stands among those that a launcher has started, read from the environment, without torch.

    RANK, WORLD_SIZE, LOCAL_RANK           the `deepspeed` launcher (LOCAL_SIZE), torchrun (LOCAL_WORLD_SIZE)
    OMPI_COMM_WORLD_*, SLURM_*             mpirun, srun
"""

import os
from dataclasses import dataclass

# Names of the rank, the world, the rank on this machine, and the number of ranks on this machine.
_SOURCES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE",
                                                       "SLURM_NTASKS_PER_NODE")),
)


@dataclass(frozen=True)
class Place:
    """Where this process stands: rank of world, its number on this machine, and how many ranks this machine has."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1


def place() -> Place:
    """This process's place, from the launcher's environment; one process where there is no launcher."""
    for rank, world, local, sizes in _SOURCES:
        # A batch script's own shell carries SLURM_NTASKS but runs once: only a step (srun) has a procid of several.
        if rank in os.environ and world in os.environ:
            if rank == "SLURM_PROCID" and "SLURM_STEP_ID" not in os.environ:
                continue
            size = next((os.environ[name] for name in sizes if os.environ.get(name)), "1")
            node = int(os.environ.get("SLURM_NODEID") or 0)
            return Place(int(os.environ[rank]), int(os.environ[world]), int(os.environ.get(local, 0)),
                         _on_node(size, node))
    return Place()


def _on_node(sizes: str, node: int) -> int:
    """The entry of one node in Slurm's list of tasks for each node, such as "4(x2),3"; a plain number is itself."""
    numbers: list[int] = []
    for word in sizes.split(","):
        number, _, times = word.rstrip(")").partition("(x")
        numbers += [int(number)] * int(times or 1)
    return numbers[min(node, len(numbers) - 1)]
