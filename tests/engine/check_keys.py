"""Run by test_keys.py on 1, 2 and 4 ranks: trains with each key of DeepSpeed's JSON that dstrain takes, and without."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dstrain.distributed import group
from dstrain.engine.ema.shadow import EmaShadow
from dstrain.recipe import Ema, Run
from tests.engine.check_engines import batch, decays, gathered
from tests.support.engines import engines_for, resolve
from tests.support.tiny import Tiny

STEPS, GLOBAL = 4, 8
ALL, LOW, HIGH = (1, 2, 3), (1, 2), (3,)
# By key, another value than the one that is trained with anyway where there is one, and the stages that take it.
TRIALS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "train_batch_size": (GLOBAL, ALL),
    "train_micro_batch_size_per_gpu": ("auto", ALL),
    "gradient_accumulation_steps": (2, ALL),
    "gradient_clipping": (0.05, ALL),
    "gradient_predivide_factor": (1.0, ALL),
    "optimizer": ({"type": "AdamW", "params": {"lr": 0.01}}, ALL),
    "wall_clock_breakdown": (True, ALL),
    "memory_breakdown": (True, ALL),
    "log_level": ("info", ALL),
    "data_types.grad_accum_dtype": ("fp32", ALL),
    "data_types.param_dtype": ("fp32", ALL),
    "flops_profiler.enabled": (True, ALL),
    "flops_profiler.profile_step": (2, ALL),
    "flops_profiler.recompute_fwd_factor": (1.0, ALL),
    "flops_profiler.module_depth": (2, ALL),
    "flops_profiler.top_modules": (3, ALL),
    "flops_profiler.detailed": (False, ALL),
    "flops_profiler.output_file": ("profile.txt", ALL),
    "timers.throughput.enabled": (True, ALL),
    "timers.throughput.synchronized": (False, ALL),
    "bf16.check_grad_overflow": (False, ALL),
    "zero_optimization.contiguous_gradients": (False, LOW),
    "zero_optimization.reduce_scatter": (False, ALL),
    "zero_optimization.reduce_bucket_size": (100, ALL),
    "zero_optimization.use_multi_rank_bucket_allreduce": (False, ALL),
    "zero_optimization.allgather_partitions": (False, ALL),
    "zero_optimization.allgather_bucket_size": (100, ALL),
    "zero_optimization.overlap_comm": (True, ALL),
    "zero_optimization.compute_grad_norm": (False, LOW),
    "zero_optimization.ignore_unused_parameters": (False, ALL),
    "zero_optimization.enable_sanity_checks": (True, ALL),
    "zero_optimization.offload_optimizer.device": ("cpu", ALL),
    "zero_optimization.offload_optimizer.pin_memory": (False, ALL),
    "zero_optimization.offload_optimizer.ratio": (1.0, ALL),
    "zero_optimization.offload_param.device": ("cpu", HIGH),
    "zero_optimization.offload_param.pin_memory": (False, HIGH),
    "zero_optimization.sub_group_size": (300, HIGH),
    "zero_optimization.stage3_prefetch_bucket_size": (100, HIGH),
    "zero_optimization.stage3_param_persistence_threshold": (40, HIGH),
    "zero_optimization.stage3_model_persistence_threshold": (100, HIGH),
    "zero_optimization.stage3_max_live_parameters": (500, HIGH),
    "zero_optimization.stage3_max_reuse_distance": (100, HIGH),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": (True, HIGH),
    "zero_optimization.stage3_allgather_sequential": (True, HIGH),
    "zero_optimization.leaf_module.classes": (["tests.support.tiny.Scale"], HIGH),
    "zero_optimization.leaf_module.names": (["hidden"], HIGH),
    "zero_optimization.leaf_module.name_suffixes": (["last"], HIGH),
    "zero_optimization.memory_efficient_linear": (False, HIGH),
    "zero_optimization.log_trace_cache_warnings": (True, HIGH),
}
OFFLOAD = "zero_optimization.offload_"
HPZ = "zero_optimization.zero_hpz_partition_size"
REDUCE = "communication_data_type"
# What may differ, and by how much: reductions in fp32 of a network in bf16; the order in which a norm is summed; an
# AdamW of other instructions.
BOUNDS = {REDUCE: 1e-3, "zero_optimization.sub_group_size": 1e-6, OFFLOAD: 1e-6}


def find_bound(name: str) -> float:
    """How far a trial may be from training without its keys: to the bit, but for those of BOUNDS."""
    return next((bound for key, bound in BOUNDS.items() if name.startswith(key)), 0)


def settings_of(stage: int, **keys: Any) -> dict[str, Any]:
    """A JSON of dotted keys."""
    content: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    for key, value in keys.items():
        *sections, name = key.split(".")
        inner = content
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return content


def train(stage: int, folder: str, **keys: Any) -> dict[str, torch.Tensor]:
    """Everything that 4 steps of 2 micro-batches leave: losses, norms, masters, and their average."""
    if "flops_profiler.output_file" in keys:
        keys["flops_profiler.output_file"] = str(Path(folder) / f"profile-{stage}.txt")
    micro = GLOBAL // 2 // group.world()
    run = Run.model_validate(
        {
            "name": "tiny",
            "seed": 3,
            "steps": STEPS,
            "batch": {"global": GLOBAL, "micro": micro},
            "optimizer": {"lr": 0.01, "clip": 0.05},
            "ema": Ema(decays=(0.9,)).model_dump(),
        }
    )
    config = resolve(settings_of(stage, **keys), run, group.world(), "cpu")
    engines = engines_for(lambda: {"tiny": Tiny()}, run, config, decays)
    shadow = EmaShadow(engines.masters, run.ema, ("tiny",))
    figures = []
    for step in range(STEPS):
        engines.begin_step(0.01)
        x, y = batch(step)
        for row in range(group.rank() * micro, GLOBAL, micro * group.world()):
            with engines.freeze_all_but("tiny") as nets:
                loss = (nets["tiny"](x[row : row + micro]) - y[row : row + micro]).square().mean()
                engines.run_backward_and_step("tiny", loss)
            figures.append(loss.item())
        shadow.update_averages(step, engines.collect_part_change_flags())
        figures += [engines.collect_metrics()["grad_norm"], engines.collect_metrics()["param_norm"]]
    masters = engines.masters["tiny"]
    return {
        "figures": torch.tensor(figures),
        **gathered(masters, masters.flats),
        **{f"ema.{name}": value for name, value in gathered(masters, shadow.flats["tiny"][0.9]).items()},
    }


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


def list_trials(stage: int, whole: bool, hpz: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is set beside the stage: all keys at once, without and with offload; of `whole`, each by itself, too.

    hpz     ranks that keep a second copy of the weights. DeepSpeed makes such groups once in a process.
    """
    keys = {key: value for key, (value, stages) in TRIALS.items() if stage in stages}
    yield "all", {key: value for key, value in keys.items() if not find_bound(key)}
    yield f"{OFFLOAD}optimizer and all", keys
    if stage == 3 and hpz > 1:
        yield "hpz", {HPZ: hpz, "zero_optimization.stage3_param_persistence_threshold": 0}
    if whole:
        for key, value in keys.items():
            section = key.rpartition(".")[0]
            beside = {f"{section}.device": "cpu"} if section.startswith(OFFLOAD) else {}
            if section in ("flops_profiler", "timers.throughput"):
                beside = {f"{section}.enabled": True}
            yield key, {**beside, key: value}


def main(folder: str, whole: bool, hpz: int) -> None:
    figures: dict[str, dict[int, float]] = defaultdict(dict)
    for stage in ALL:
        expected = train(stage, folder)
        for name, keys in list_trials(stage, whole, hpz):
            figures[name][stage] = difference(train(stage, folder, **keys), expected)
        rounded = train(stage, folder, **{"bf16.enabled": True})
        reduced = train(stage, folder, **{"bf16.enabled": True, REDUCE: "fp32"})
        figures[REDUCE][stage] = difference(reduced, rounded)
    if group.rank() == 0:
        (Path(folder) / "figures.json").write_text(json.dumps(figures))
