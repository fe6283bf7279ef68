"""Which keys and values DeepSpeed itself takes, read from the installed release, and which of them dstrain does not.

DeepSpeed ignores unknown top-level keys silently, and its parser stops at the first fault; here all are named at once.
"""

import json
from collections.abc import Iterator
from typing import Any

from dstrain.engine import prepare_environment
from dstrain.recipe import suggest_key

# Sections of DeepSpeed that dstrain does not support, and why or what instead. Some it refuses itself.
UNSUPPORTED = {
    "scheduler": "the recipe owns the learning rate: optimizer.schedule, optimizer.warmup",
    "torch_autocast": "networks compute in the precision of bf16 or fp16; enable one of these",
    "activation_checkpointing": "recomputation belongs to the network: model.recompute=all",
    "compile": "compilation belongs to the recipe: compile=on",
    "tensorboard": "tracking belongs to the recipe: track.tensorboard=true",
    "wandb": "tracking belongs to the recipe: track.wandb",
    "csv_monitor": "metrics are written to the run folder anyway",
    "comet": "tracking belongs to the recipe: track",
    "data_efficiency": "which sample goes where is a function of seed and step",
    "dataloader_drop_last": "which sample goes where is a function of seed and step",
    "elasticity": "a run resumes at any world size as it is",
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
            "amp",
            "use_data_before_expert_parallelism",
            "weight_quantization",
            "compression_training",
            "nebula",
            "sparse_gradients",
            "sparse_attention",
            "curriculum_learning",
            "progressive_layer_drop",
            "quantize_training",
            "eigenvalue",
            "graph_harvesting",
            "sequence_parallel_size",
        ),
        "its systems are trained by data parallelism and ZeRO",
    ),
}
UNSUPPORTED_WITHIN = {
    "prescale_gradients": "DeepSpeed refuses it with ZeRO, and its gradients are means already",
    "bf16.bf16_master_weights_and_grads": "EMA and checkpoints shadow fp32 masters",
    "bf16.bf16_optimizer_states": "checkpoints hold fp32 moments",
    "fp16.fp16_master_weights_and_grads": "EMA and checkpoints shadow fp32 masters",
    "fp16.auto_cast": "loss, timesteps and their features stay float32 at the network's boundary",
    "zero_optimization.round_robin_gradients": "it mixes up the order of weights in the flat masters, from 2 ranks on",
    "zero_optimization.parameter_alignment": "it pads between weights, and one rank would take gradients for others'",
    "zero_optimization.zero_quantized_nontrainable_weights": "no network that trains holds weights that do not",
    "zero_optimization.stage3_module_granularity_threshold": "it gathers the weights of our blocks too late",
    "zero_optimization.zenflow": "it updates weights out of step with the EMA",
    "zero_optimization.offload_optimizer.super_offload": "it updates weights out of reach of EMA and checkpoints",
    "zero_optimization.cpu_offload": "write offload_optimizer",
    "zero_optimization.cpu_offload_param": "write offload_param",
    "zero_optimization.legacy_stage1": "use stage 1 as it is",
    "zero_optimization.elastic_checkpoint": "a run resumes at any world size as it is",
}


def list_unsupported(settings: dict[str, Any]) -> Iterator[str]:
    """Yields sections and switches that DeepSpeed may know and dstrain does not."""
    for key, reason in UNSUPPORTED.items():
        if key in settings:
            yield f'dstrain does not support "{key}": {reason}; remove it'
    for key, reason in UNSUPPORTED_WITHIN.items():
        value: Any = settings
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value not in (None, False):  # an empty section is one, too
            yield f'dstrain does not support "{key}": {reason}; remove it'


class _Asked(dict):
    """A dict that notes which keys DeepSpeed asks it for: these are the legal ones in the installed release."""

    def __init__(self, values: dict[str, Any]):
        super().__init__(values)
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> "_Asked":
        return self


def list_refusals(settings: dict[str, Any]) -> Iterator[str]:
    """Yields what DeepSpeed's own parser says, and top-level keys that it never asks for."""
    settings = {key: _without_auto(value) for key, value in settings.items() if key not in UNSUPPORTED}
    prepare_environment()
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    sections = {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}
    rest = _Asked({key: value for key, value in settings.items() if key not in sections})
    # Accumulation and total follow from the world size, which DeepSpeed takes from a process group not yet started.
    rest.pop("train_batch_size", None)
    try:
        DeepSpeedConfig(rest)
    except ValidationError as error:
        yield from (
            f'"{".".join(map(str, item["loc"]))}" in a section ({error.title}): {item["msg"]}'
            for item in error.errors()
        )
    except Exception as error:  # it raises asserts, AttributeErrors and its own
        yield f"DeepSpeed refuses these settings: {error}"
    else:
        known = rest.asked | set(sections)
        yield from (
            f'"{key}" is no key of DeepSpeed, which would ignore it silently{suggest_key(key, known)}'
            for key in settings
            if key not in known and key != "train_batch_size"
        )
    for name, model in sections.items():
        block = settings.get(name, {})
        if not isinstance(block, dict):
            yield f'"{name}" is {json.dumps(block)}: write a section, for example {{"{name}": {{...}}}}'
            continue
        known = [f"{name}.{field.alias or key}" for key, field in model.model_fields.items()]
        try:
            model(strict=True, **block)
        except ValidationError as error:
            for item in error.errors():
                key = ".".join([name, *map(str, item["loc"])])
                if item["type"] == "extra_forbidden":
                    yield f'"{key}" is no key of DeepSpeed{suggest_key(key, known)}'
                elif item["type"] == "enum":  # DeepSpeed's stages have an alias, named twice
                    members = dict.fromkeys(item["ctx"]["expected"].replace(" or ", ", ").split(", "))
                    yield f'"{key}" is {json.dumps(item["input"], default=str)[:60]}: write one of {", ".join(members)}'
                else:
                    yield f'"{key}" is {json.dumps(item["input"], default=str)[:60]}: {item["msg"]}'
        except AssertionError as error:
            yield f'"{name}": {error}'


def _without_auto(value: Any) -> Any:
    """Returns a section without its "auto" entries: these are named elsewhere."""
    if not isinstance(value, dict):
        return value
    return {key: _without_auto(inner) for key, inner in value.items() if inner != "auto"}
