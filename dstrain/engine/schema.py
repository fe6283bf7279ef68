"""What dstrain does with each key of DeepSpeed's JSON; parser.py says what the installed release takes.

Every key has its place in one of the tables below: tests/engine/test_keys.py walks all that the installed release
knows, and docs/make_reference.py makes a page of them.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from dstrain.recipe import suggest_key

# Keys that take effect, and what they do. Some hold for one value alone: settings.py checks them.
SUPPORTED = {
    "train_batch_size": 'must be batch.global of the recipe, or "auto"',
    "train_micro_batch_size_per_gpu": 'must be batch.micro of the recipe, or "auto"',
    "gradient_accumulation_steps": 'must follow from batch.global, batch.micro and the ranks, or "auto"',
    "gradient_clipping": 'must be optimizer.clip of the recipe, or "auto"',
    "gradient_predivide_factor": "1 alone",
    "optimizer": "must agree with the section optimizer of the recipe",
    "communication_data_type": "the type in which gradients are reduced: fp32 rounds less than bf16",
    "wall_clock_breakdown": "prints the time of each phase, and waits for the GPU at each",
    "memory_breakdown": "prints the memory at each phase",
    "log_level": "how much DeepSpeed prints: debug, info, warning, error",
    "data_types.grad_accum_dtype": "the type in which gradients of micro-batches are summed: fp32 where it is left out",
    "data_types.param_dtype": "the precision of bf16 or fp16 alone",
    "flops_profiler.enabled": "prints operations and times of each module, once",
    "flops_profiler.profile_step": "of the step behind so many",
    "flops_profiler.recompute_fwd_factor": "how many forward passes recomputation adds",
    "flops_profiler.module_depth": "to which depth of modules; -1 is all",
    "flops_profiler.top_modules": "how many modules at each depth",
    "flops_profiler.detailed": "false: the sums alone",
    "flops_profiler.output_file": "writes to this file",
    "timers.throughput.enabled": "DeepSpeed's own clock, which waits for the GPU; off where it is left out",
    "timers.throughput.synchronized": "false: that clock does not wait",
    "bf16.enabled": 'networks compute in bf16; "auto" where the device multiplies it',
    "bf16.check_grad_overflow": "changes nothing: gradients are always checked",
    "fp16.enabled": "networks compute in fp16, on a GPU",
    "fp16.loss_scale": "a fixed scale of the loss; 0 searches one",
    "fp16.initial_scale_power": "the search begins at 2 to this power",
    "fp16.loss_scale_window": "steps until the scale is doubled",
    "fp16.hysteresis": "steps that overflow before the scale is halved",
    "fp16.consecutive_hysteresis": "counts them anew after each step that does not",
    "fp16.min_loss_scale": "the least scale",
    "zero_optimization.stage": "0, 1, 2 or 3",
    "zero_optimization.contiguous_gradients": "true alone at stage 3",
    "zero_optimization.reduce_scatter": "false reduces gradients to all ranks, and not to their owner",
    "zero_optimization.reduce_bucket_size": "elements of a bucket of gradients",
    "zero_optimization.use_multi_rank_bucket_allreduce": "false reduces a bucket for each owner",
    "zero_optimization.allgather_partitions": "false gathers weights by broadcasts",
    "zero_optimization.allgather_bucket_size": "elements of a bucket of weights",
    "zero_optimization.overlap_comm": "reduces gradients beside the backward pass",
    "zero_optimization.compute_grad_norm": "changes nothing: one norm is always computed",
    "zero_optimization.ignore_unused_parameters": "false: a weight without a gradient is an error",
    "zero_optimization.enable_sanity_checks": "compares counts of weights between ranks",
    "zero_optimization.offload_optimizer.device": "cpu: masters and moments lie in host memory, which steps them",
    "zero_optimization.offload_optimizer.pin_memory": "page-locked memory",
    "zero_optimization.offload_optimizer.ratio": "1 alone",
    "zero_optimization.offload_param.device": "cpu: weights lie in host memory",
    "zero_optimization.offload_param.pin_memory": "page-locked memory",
    "zero_optimization.sub_group_size": "elements that the optimizer steps at a time",
    "zero_optimization.stage3_prefetch_bucket_size": "elements that are gathered ahead",
    "zero_optimization.stage3_param_persistence_threshold": "a weight below it is whole on every rank",
    "zero_optimization.stage3_model_persistence_threshold": "at most so many elements of such weights",
    "zero_optimization.stage3_max_live_parameters": "at most so many elements are gathered",
    "zero_optimization.stage3_max_reuse_distance": "a weight that is used again sooner stays gathered",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": "gathers by sums",
    "zero_optimization.stage3_allgather_sequential": "gathers one weight after another",
    "zero_optimization.leaf_module.classes": "modules of these classes are gathered whole",
    "zero_optimization.leaf_module.names": "so are those of these names",
    "zero_optimization.leaf_module.name_suffixes": "so are those whose names end so",
    "zero_optimization.zero_hpz_partition_size": "a second share of the weights within each so many ranks",
    "zero_optimization.zero_quantized_weights": "gathers weights in 8 bits, on a GPU",
    "zero_optimization.zero_quantized_gradients": "reduces gradients in 4 bits, on a GPU",
    "zero_optimization.memory_efficient_linear": "false keeps gathered weights for the backward pass",
    "zero_optimization.log_trace_cache_warnings": "prints where the order of modules changes",
}
# Of these a remark says so at a lower stage: people change the stage of one file.
STAGE_3 = (
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
    "leaf_module",
    "memory_efficient_linear",
    "log_trace_cache_warnings",
)
# Keys that change nothing, and that many files have: a remark says so.
REMARKED = {
    "steps_per_print": "dstrain reports, at every.report",
    "dump_state": "dstrain train --print-config shows the settings",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "dstrain export writes whole weights",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "dstrain export writes whole weights",
}
_NVME = "it is of NVMe, which dstrain does not support"
# Keys that change nothing, and are refused where their value asks for something.
NO_EFFECT = {
    "bfloat16": "bf16 stands beside it and counts",
    "vocabulary_size": "DeepSpeed only compares it with a multiple of 8",
    "disable_allgather": "DeepSpeed no longer reads it",
    "seq_parallel_communication_data_type": "it is of DeepSpeed's own sequence parallelism",
    "zero_allow_untested_optimizer": "the optimizers of dstrain are tested with ZeRO",
    "zero_force_ds_cpu_optimizer": "an offloaded optimizer is always DeepSpeed's for the CPU",
    "data_types.buffer_dtype": "buffers keep the type that their module gives them",
    "data_types.keep_in_fp32_modules": "buffers keep the type that their module gives them",
    **dict.fromkeys(
        ("comms_logger.verbose", "comms_logger.prof_all", "comms_logger.prof_ops", "comms_logger.debug"),
        "DeepSpeed's log of exchanges is off",
    ),
    "bf16.immediate_grad_update": "it is of an optimizer of DeepSpeed that does not run here",
    "zero_optimization.load_from_fp32_weights": "a run always goes on from fp32 weights",
    "zero_optimization.cpu_offload_use_pin_memory": "write pin_memory in offload_optimizer",
    "zero_optimization.pipeline_loading_checkpoint": "dstrain reads checkpoints itself",
    "zero_optimization.override_module_apply": "weights are drawn without Module.apply",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "Muon is dstrain's own",
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "it is of SuperOffload",
    **dict.fromkeys(
        (
            "zero_optimization.offload_optimizer.nvme_path",
            "zero_optimization.offload_optimizer.buffer_count",
            "zero_optimization.offload_optimizer.pipeline_read",
            "zero_optimization.offload_optimizer.pipeline_write",
            "zero_optimization.offload_optimizer.fast_init",
            "zero_optimization.offload_param.nvme_path",
            "zero_optimization.offload_param.buffer_count",
            "zero_optimization.offload_param.buffer_size",
            "zero_optimization.offload_param.max_in_cpu",
        ),
        _NVME,
    ),
}
_ON_ANYWAY = {
    "zero_allow_untested_optimizer",
    "zero_optimization.load_from_fp32_weights",
    "zero_optimization.override_module_apply",
    "comms_logger.prof_all",
}
_GONE = "DeepSpeed 0.19 has removed it"
# Keys of earlier releases, refused with any value.
REMOVED = {
    **dict.fromkeys(
        ("zero_optimization.mics_shard_size", "zero_optimization.mics_hierarchical_params_gather"),
        f"{_GONE} with all of MiCS; zero_optimization.zero_hpz_partition_size is what is left",
    ),
    "zero_optimization.zeropp_loco_param": f"{_GONE} with all of LoCo",
}
# Sections of DeepSpeed that dstrain does not support, and why or what instead. Some it refuses itself.
UNSUPPORTED = {
    "scheduler": "the recipe owns the learning rate: optimizer.schedule, optimizer.warmup",
    "torch_autocast": "networks compute in the precision of bf16 or fp16; enable one of these",
    "activation_checkpointing": "recomputation belongs to the network: model.recompute=all, or offload to the host",
    "compile": "compilation belongs to the recipe: compile=on",
    "tensorboard": "tracking belongs to the recipe: track.tensorboard=true",
    "wandb": "tracking belongs to the recipe: track.wandb",
    "csv_monitor": "metrics are written to the run folder anyway",
    "comet": "tracking belongs to the recipe: track",
    "data_efficiency": "which sample goes where is a function of seed and step",
    "dataloader_drop_last": "which sample goes where is a function of seed and step",
    "elasticity": f"{_GONE}, and a run resumes at any world size as it is",
    "aio": _NVME,
    "checkpoint": "checkpoints belong to the recipe: save.format, save.keep",
    "datastates_ckpt": "checkpoints belong to the recipe: save.format, save.keep",
    "gradient_allreduce_op": "a loss is a mean over the global batch",
    "managed_gradient_accumulation": "accumulation follows from batch.global and batch.micro",
    **dict.fromkeys(
        (
            "pipeline",
            "tensor_parallel",
            "expert_parallel",
            "hybrid_engine",
            "autotuning",
            "use_data_before_expert_parallelism",
            "weight_quantization",
        ),
        "its systems are trained by data parallelism and ZeRO",
    ),
    **dict.fromkeys(
        (
            "amp",
            "compression_training",
            "nebula",
            "sparse_gradients",
            "sparse_attention",
            "curriculum_learning",
            "progressive_layer_drop",
            "quantize_training",
            "eigenvalue",
            "graph_harvesting",
        ),
        _GONE,
    ),
    **dict.fromkeys(
        ("sequence_parallel_size", "data_parallel_size"),
        "DeepSpeed averages gradients wrongly by it at stages 0 to 2; for N ranks that share each sample write "
        "parallel.sequence=N in the recipe",
    ),
}
UNSUPPORTED_WITHIN = {
    "disable_python_gc": "nothing calls DeepSpeed's collector, so that memory would grow with the steps",
    "comms_logger.enabled": "DeepSpeed prints it only to a program that asks, and holds more of it with each step",
    "prescale_gradients": "DeepSpeed refuses it with ZeRO, and its gradients are means already",
    "bf16.bf16_master_weights_and_grads": "EMA and checkpoints shadow fp32 masters",
    "bf16.bf16_optimizer_states": "checkpoints hold fp32 moments",
    "fp16.fp16_master_weights_and_grads": "EMA and checkpoints shadow fp32 masters",
    "fp16.auto_cast": "loss, timesteps and their features stay float32 at the network's boundary",
    "zero_optimization.round_robin_gradients": "it mixes up the order of weights in the flat masters, from 2 ranks on",
    "zero_optimization.parameter_alignment": "it pads between weights, and one rank would take gradients for others'",
    "zero_optimization.zero_quantized_nontrainable_weights": "frozen weights are saved as they are",
    "zero_optimization.stage3_module_granularity_threshold": "it gathers the weights of our blocks too late",
    "zero_optimization.zenflow": "it updates weights out of step with the EMA",
    "zero_optimization.offload_optimizer.super_offload": "it updates weights out of reach of EMA and checkpoints",
    "zero_optimization.cpu_offload": "write offload_optimizer",
    "zero_optimization.cpu_offload_param": "write offload_param",
    "zero_optimization.legacy_stage1": "use stage 1 as it is",
    "zero_optimization.elastic_checkpoint": "a run resumes at any world size as it is",
}


class Decision(NamedTuple):
    """What dstrain does with a key of DeepSpeed's JSON, and in words what the key does or why it is refused."""

    verdict: str  # supported, remarked, no effect, refused
    words: str


_TABLES = {
    "supported": (SUPPORTED,),
    "remarked": (REMARKED,),
    "no effect": (NO_EFFECT,),
    "refused": (UNSUPPORTED, UNSUPPORTED_WITHIN, REMOVED),
}


def find_support_decision_for_key(key: str) -> Decision | None:
    """Returns what dstrain does with a key of DeepSpeed's JSON, such as "zero_optimization.stage": the decision on the
    key, or on a section that contains it. Returns None if dstrain knows neither.
    """
    parts = key.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    for verdict, tables in _TABLES.items():
        for name in names:
            for table in tables:
                if name in table:
                    return Decision(verdict, table[name])
    return None


def collect_support_decisions_by_key() -> dict[str, Decision]:
    """Returns {key: what dstrain does with it} for each key of DeepSpeed's JSON that dstrain knows."""
    return {
        key: Decision(verdict, words)
        for verdict, tables in _TABLES.items()
        for table in tables
        for key, words in table.items()
    }


def describe_unsupported_keys(settings: dict[str, Any]) -> Iterator[str]:
    """Yields a message for each key of DeepSpeed's JSON that dstrain does not support, or whose value has no effect."""
    for key, reason in UNSUPPORTED.items():
        if key in settings:
            yield f'dstrain does not support "{key}": {reason}; remove it'
    zero = settings.get("zero_optimization")
    given = {f"zero_optimization.{name}" for name in zero} if isinstance(zero, dict) else set()
    for key, reason in (UNSUPPORTED_WITHIN | REMOVED).items():
        value = get_dotted_setting(settings, key)
        # An empty section is one, too; and DeepSpeed stops at what it has removed with any value, null included.
        if (value is not None and value is not False) or (key in REMOVED and key in given):
            yield f'dstrain does not support "{key}": {reason}; remove it'
    for key, reason in NO_EFFECT.items():
        value, device = (
            get_dotted_setting(settings, key),
            get_dotted_setting(settings, f"{key.rpartition('.')[0]}.device"),
        )
        if reason is _NVME and device == "nvme":
            continue  # the device itself is refused
        if value not in (None, [], "auto", key in _ON_ANYWAY):
            yield f'"{key}" is {render_short_json(value)}, which changes nothing: {reason}; remove it'


def describe_keys_without_effect(settings: dict[str, Any], stage: int) -> Iterator[str]:
    """Yields messages on keys of DeepSpeed's JSON that change nothing, but that many files have: one for each key of
    REMARKED, such as steps_per_print, unless log_level is info or debug, and one for all keys that only stage 3 reads,
    if the ZeRO stage `stage` is lower.
    """
    if settings.get("log_level") not in ("info", "debug"):  # there DeepSpeed prints what it is asked for
        for key, reason in REMARKED.items():
            if get_dotted_setting(settings, key) not in (None, False):
                yield f'"{key}" changes nothing: {reason}'
    higher = [key for key in STAGE_3 if key in settings.get("zero_optimization", {})]
    if higher and stage < 3:
        yield f'"zero_optimization" has words of stage 3 that change nothing at stage {stage}: {", ".join(higher)}'


def describe_unknown_keys(settings: dict[str, Any]) -> Iterator[str]:
    """Yields a message for each key of DeepSpeed's JSON that dstrain does not know, such as one of a newer release."""
    for key in iterate_dotted_keys(settings):
        if find_support_decision_for_key(key) is None:
            yield (
                f'"{key}" is a key that dstrain does not know, and that was never tried with it'
                f"{suggest_key(key, SUPPORTED)}: remove it"
            )


def iterate_dotted_keys(section: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys of all plain values in a section and its inner sections, with `prefix` before each."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from iterate_dotted_keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def render_short_json(value: Any) -> str:
    """Returns a value as JSON, cut after 60 characters."""
    return json.dumps(value, default=str)[:60]


def get_dotted_setting(settings: Any, key: str) -> Any:
    """Returns the value in `settings` of a key such as "zero_optimization.stage"; None if the key is absent."""
    for name in key.split("."):
        settings = settings.get(name) if isinstance(settings, dict) else None
    return settings


def extract_quoted_key(problem: str) -> str:
    """Returns the text within the first pair of quotation marks in a message, such as a key of the JSON; "" if there is
    none.
    """
    return problem.partition('"')[2].partition('"')[0]
