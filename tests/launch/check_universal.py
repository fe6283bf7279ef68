"""Run by test_universal.py: DeepSpeed alone, without dstrain, reads the universal folders that came of our checkpoints.

    python check_universal.py FOLDER

FOLDER/STAGE holds universal/, expected.safetensors (the weights that the run has saved), and groups.json, its parameter
groups: [{"names": [...], "weight_decay": ...}]. Each is loaded at its stage on 1, 2 and 3 ranks, which are forked.
FOLDER/figures.json tells, by stage and ranks, which weights differ, and how many steps the optimizer has done.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import load_file
from torch import Tensor, nn

STAGES = (1, 2, 3)
WORLDS = (1, 2, 3)


def build_network(weights: Mapping[str, Tensor]) -> nn.Module:
    """Builds modules within modules whose parameters have these names and shapes; all are 0."""
    network = nn.Module()
    for name, value in weights.items():
        *path, leaf = name.split(".")
        module = network
        for step in path:
            if not hasattr(module, step):
                module.add_module(step, nn.Module())
            module = getattr(module, step)
        module.register_parameter(leaf, nn.Parameter(torch.zeros_like(value)))
    return network


def load(folder: Path, stage: int) -> dict[str, Any]:
    """Loads a folder as DeepSpeed's manual says; what differs from the weights that were saved."""
    said = json.loads((folder / "groups.json").read_text())
    learned = {name for group in said for name in group["names"]}
    expected = {name: value for name, value in load_file(folder / "expected.safetensors").items() if name in learned}
    network = build_network(expected)
    weights = dict(network.named_parameters())
    groups = [
        {"params": [weights[name] for name in group["names"]], "weight_decay": group["weight_decay"]} for group in said
    ]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": True},
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=config)
    engine.load_checkpoint(str(folder), tag="universal")
    found = {name: safe_get_full_fp32_param(weight) for name, weight in weights.items()}
    moments = [safe_get_full_optimizer_state(weight, "exp_avg_sq") for weight in weights.values()]
    return {
        "differ": [name for name, value in expected.items() if not torch.equal(found[name], value)],
        "learned": sum(bool(moment.count_nonzero()) for moment in moments),
        "number": len(expected),
        "steps": engine.global_steps,
    }


def work(rank: int, world: int, port: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo alone serves, and nothing is compiled
    deepspeed.init_distributed(auto_mpi_discovery=False)
    figures = {str(stage): load(folder / str(stage), stage) for stage in STAGES}
    assert not any(name.partition(".")[0] == "dstrain" for name in sys.modules)
    if rank == 0:
        (folder / f"figures-{world}.json").write_text(json.dumps(figures))
    torch.distributed.barrier()


def main(folder: Path, port: int) -> None:
    for world in WORLDS:
        pids = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    work(rank, world, port, folder)
                    code = 0
                except BaseException:
                    import traceback

                    traceback.print_exc()
                finally:
                    os._exit(code)
            pids.append(pid)
        failed = [os.waitpid(pid, 0)[1] for pid in pids]
        assert not any(failed), f"{world} ranks ended with {failed}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
