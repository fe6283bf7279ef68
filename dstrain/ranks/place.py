"""Where a process stands among those that a launcher has started, read from the environment, without torch.

    RANK, WORLD_SIZE, LOCAL_RANK           the `deepspeed` launcher, torchrun
    OMPI_COMM_WORLD_*, SLURM_*             mpirun, srun
"""

import os
from dataclasses import dataclass

_SOURCES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


@dataclass(frozen=True)
class Place:
    """Where this process stands: rank of world, and its number on this machine."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0


def place() -> Place:
    """This process's place, from the launcher's environment; one process where there is no launcher."""
    for rank, world, local in _SOURCES:
        # A batch script's own shell carries SLURM_NTASKS but runs once: only a step (srun) has a procid of several.
        if rank in os.environ and world in os.environ:
            if rank == "SLURM_PROCID" and "SLURM_STEP_ID" not in os.environ:
                continue
            return Place(int(os.environ[rank]), int(os.environ[world]), int(os.environ.get(local, 0)))
    return Place()
