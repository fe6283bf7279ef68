"""Run by test_kill.py: 2 ranks that save beside each step are killed at random moments, again and again.

The ranks are forked from this process after its imports and before any thread or process group, so that a life lasts a
second instead of ten. Rank 0 writes each step's loss to `losses` as it happens.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from deepspeed.accelerator import get_accelerator
from dstrain.engine.start import start
from dstrain.ranks import group
from tests.engine.check_elastic import Trial
from tests.support.launch import free_port


def live(rank: int, port: int, folder: Path, last: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    start()
    trial = Trial(2, folder / "checkpoints", saved=lambda step: put(folder / "saved", step))
    step = trial.saves.resume()
    if rank == 0:
        put(folder / "resumed", step)
    for step in range(step, last):
        loss = trial.steps(step, step + 1)[0]
        if rank == 0:
            with open(folder / "losses", "a") as file:
                file.write(f"{step} {loss.hex()}\n")
        trial.saves.save(step + 1, last=step + 1 == last)      # written while the next step is trained
        assert trial.saves.saver.newest == (step + 1 if step + 1 == last else step), "a save has failed"
    group.barrier()


def fork(rank: int, port: int, folder: Path, last: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        live(rank, port, folder, last)
        code = 0
    finally:
        os._exit(code)


def put(path: Path, value: int) -> None:
    """Whole or not at all: the writer may be killed between any two calls."""
    path.with_suffix(".new").write_text(str(value))
    os.replace(path.with_suffix(".new"), path)


def number(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


def main(folder: Path, kills: int, seed: int) -> None:
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401       # loads dynamo and inductor: most of a life
    get_accelerator().create_op_builder("ShareMemCommBuilder").load()     # once, for all the forks
    chance, half_written = random.Random(seed), 0
    for _ in range(kills):
        before = number(folder / "saved")
        (folder / "resumed").unlink(missing_ok=True)
        port = free_port()
        pids = [fork(rank, port, folder, 10**6) for rank in (0, 1)]
        try:
            end = time.monotonic() + 120
            while not (folder / "resumed").exists() or number(folder / "saved") <= before:
                assert time.monotonic() < end, "no progress after a kill"
                time.sleep(0.005)
            resumed = number(folder / "resumed")
            assert before <= resumed <= before + 1, f"resumed at {resumed}, saved was {before}"
            time.sleep(chance.uniform(0, 0.15))
        finally:                                     # also where something was wrong: nobody lives on
            for pid in chance.sample(pids, 2):
                os.kill(pid, signal.SIGKILL)
            for pid in pids:
                os.waitpid(pid, 0)
        half_written += any((folder / "checkpoints").glob("step_*.tmp"))
    assert half_written >= kills // 10, f"only {half_written} of {kills} kills met a save that was being written"
    port, last = free_port(), number(folder / "saved") + 5
    pids = [fork(rank, port, folder, last) for rank in (0, 1)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0], "the last life did not end well"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
