"""Run by test_costs.py: a few steps of real ranks, and the same steps as dstrain/planning/ counts them; as JSON.

The loss takes the way of a GPU in both, where no value is read.
"""

import gc
import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dstrain import recipe, systems
from dstrain.checkpoint.safetensors_io import read_safetensors_header
from dstrain.commands.job import complete_and_check_recipe
from dstrain.diffusion import gaussian, likelihood
from dstrain.distributed import group
from dstrain.engine.checkpoint import Checkpoints
from dstrain.engine.engines import Engines
from dstrain.planning import rank, states, step
from dstrain.planning.watch import Watch
from dstrain.recipe import Run
from tests.support import tokenizers
from tests.support.engines import resolve
from tests.support.launch import ROOT
from tests.support.live import Live

BUCKET = 20_000
VAE = ("tiny-vae", "model.kl.discriminator={start: 0, n_layers: 1, base_channels: 8}")
DIT = ("tiny", "batch.micro=1", "model.recompute=all", "ema.profiles=[0.1]")
CASES = {
    "dit summed": DIT,
    "dit fp32": ("tiny", "model.recompute=all"),
    "vae": VAE,
    "dit at the host": ("tiny", "batch.micro=2", "model.recompute=offload", "model.depth=3"),
    "iddpm": ("tiny-iddpm", "batch.micro=4"),
    "phenaki": ("tiny-phenaki", "data.path=builtin:moving-fashion", "data.held_out=0"),
    "prior": ("tiny-prior",),
    "tokenizer": ("tiny-phenaki-tokenizer",),
    "muon": ("tiny", "optimizer.name=muon", "batch.micro=2"),
    "8 bits": ("tiny", "model.hidden_size=64", "optimizer.name=adamw8bit"),
    "offloaded summed": ("tiny", "batch.micro=2"),
    "all offloaded": ("tiny",),
    "dit frozen": ("tiny", "train_only=['blocks.*.attn.*', final_layer.*]", "batch.micro=2"),
    "secondary": ("tiny", "model.hidden_size=64", "batch.micro=1"),
}
ON_HOST = {"device": "cpu", "pin_memory": True}
ZERO = {
    "offloaded summed": {"offload_optimizer": ON_HOST},
    "all offloaded": {"offload_optimizer": ON_HOST, "offload_param": ON_HOST},
    "secondary": {"zero_hpz_partition_size": 2, "stage3_max_reuse_distance": 1000},
}
STAGES = {
    1: {"dit summed": (3,), "vae": (0,), "phenaki": (2,)},
    2: {
        "dit summed": range(4),
        "dit fp32": (2,),
        "dit at the host": (2, 3),
        "vae": (2, 3),
        "phenaki": (0, 1),
        "iddpm": (2,),
        "prior": (2,),
        "tokenizer": (1,),
        "muon": (2, 3),
        "8 bits": (3,),
        "offloaded summed": (2,),
        "all offloaded": (3,),
        "dit frozen": range(4),
    },
    4: {"dit summed": (2, 3), "vae": (1,), "phenaki": (3,), "muon": (1,), "secondary": (3,)},
}
# Of these CI's sample: every stage and number of ranks, both precisions, states of a system, two networks, inputs,
# optimizer and parameters on the host, and each optimizer with moments of its own. IDDPM and the prior are `faults`.
SAMPLE = {
    1: {"vae": (0,)},
    2: {
        "dit summed": (2, 3),
        "dit fp32": (2,),
        "dit at the host": (3,),
        "phenaki": (0,),
        "tokenizer": (1,),
        "muon": (3,),
        "8 bits": (3,),
        "offloaded summed": (2,),
        "all offloaded": (3,),
        "dit frozen": (1,),
    },
    4: {"secondary": (3,)},
}
EVERY = {world: dict.fromkeys(("dit summed", "vae", "phenaki"), range(4)) for world in STAGES}


class Blind(Watch):
    """Sees no operation: for ranks whose figures nobody reads, which take half the time so."""

    def __enter__(self) -> "Blind":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def configurations(stages: dict[str, Any]) -> list[tuple[str, int]]:
    """Case and stage."""
    return [(case, stage) for case in stages for stage in stages[case]]


def prepared(folder: Path, case: str, stage: int, world: int, *more: str) -> tuple[Run, dict[str, Any]]:
    gc.collect()  # what earlier ones left is no part of the peak, whenever else it would be collected
    name, *words = CASES[case]
    words += more
    words += [f"model.tokenizer.path={folder / 'tokens'}"] * (name == "tiny-phenaki")
    words += [f"batch.global={2 * world}"] * (case in ("dit summed", "vae"))  # two micro-batches, or two samples
    run, problems = complete_and_check_recipe(recipe.load_recipe(ROOT / "tests" / "launch" / f"{name}.yaml", words))
    assert not problems
    zero = {
        "stage": stage,
        "reduce_bucket_size": BUCKET,
        "stage3_prefetch_bucket_size": BUCKET,
        "stage3_param_persistence_threshold": 1000,
        "stage3_max_live_parameters": BUCKET,
        **ZERO.get(case, {}),
    }
    return run, resolve({"zero_optimization": zero, "bf16": {"enabled": case != "dit fp32"}}, run, world, "cpu")


def without_values() -> None:
    gaussian.can_read_without_device_sync = likelihood.can_read_without_device_sync = lambda values: False


def real(folder: Path, world: int, stages: dict[str, Any]) -> None:
    """On real ranks: what is allocated, by kind and in all, and what a checkpoint takes."""
    without_values()
    watches = group.rank() == 0
    step.Watch = Watch if watches else Blind
    if group.rank() == 0 and not (folder / "tokens").exists():
        tokenizers.save(folder / "tokens")
    group.barrier()
    figures = {}
    for case, stage in configurations(stages):
        run, settings = prepared(folder, case, stage, world)
        system = systems.build(run.system, run.model)
        with Live() if watches else nullcontext() as live:
            measured, engines, ema = step.run_and_measure_step(run, settings, system, Engines)
        group.barrier()  # a thread of gloo may hold the tensor of the last exchange a moment longer
        gc.collect()
        own = asdict(measured) | ({"live": live.peak, "still": live.now} if live else {})
        if stage in (1, 3):
            path = folder / f"{world} {case} {stage}"
            Checkpoints(path, engines, ema, system).save(1, last=True)
            files = [file for file in path.rglob("*.safetensors") if not file.name.startswith("index-")]
            tensors = [tensor for file in files for tensor in read_safetensors_header(file)[0].values()]
            own["checkpoint"] = sum(span.nbytes for tensor in tensors for span in tensor.spans)
            group.barrier()
        figures[f"{case} {stage}"] = own
        del engines, ema
    if group.rank() == 0:
        (folder / f"real {world}.json").write_text(json.dumps(figures))


def counted(folder: Path, stages: dict[int, dict[str, Any]]) -> None:
    """The same, without running it; a world may be as large as it likes."""
    without_values()
    figures = {}
    for world in stages:
        for case, stage in configurations(stages[world]):
            run, settings = prepared(folder, case, stage, world)
            system = systems.build(run.system, run.model)
            measured = asdict(rank.measure_simulated_rank_0_step(run, settings, system, world, "cpu")[0])
            figures[f"{world} {case} {stage}"] = measured | {
                "checkpoint": states.count_weights_and_checkpoint_bytes(run, system)[1],
                "states": states.count_state_bytes_by_kind(run, system, settings, world),
            }
    (folder / "counted.json").write_text(json.dumps(figures))


def many(folder: Path) -> None:
    """Steps of five micro-batches: taken whole, and extended from those of two and three."""
    without_values()
    figures = {}
    for stage in (1, 2, 3):
        run, settings = prepared(folder, "dit summed", stage, 2, "model.depth=1")  # what repeats is the micro-batch
        settings, figures[stage] = {**settings, "gradient_accumulation_steps": 5}, []
        for rank._MICRO_BATCHES in (5, 3):
            system = systems.build(run.system, run.model)
            figures[stage].append(asdict(rank.measure_simulated_rank_0_step(run, settings, system, 2, "cpu")[0]))
    (folder / "many.json").write_text(json.dumps(figures))
