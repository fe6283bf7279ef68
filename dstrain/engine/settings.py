"""Merges a JSON of ds_configs/ and the recipe into the DeepSpeed settings of a run, and checks them.

The recipe owns batch, learning rate, betas, decay and clip; the JSON owns stage, precision, offload, overlap and
buckets. What the JSON leaves out or sets to "auto" is filled in from the recipe; what both give must agree. DeepSpeed
itself ignores unknown keys, drops "auto" within a section, and clips to 1.0 where no clip is given, all silently: here
the first two are errors and the clip is always written.
"""

import copy
import importlib.util
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dstrain.disk import small
from dstrain.distributed.launcher import read_rank_and_world
from dstrain.engine.parser import describe_refused_settings, drop_null_settings
from dstrain.engine.schema import (
    describe_keys_without_effect,
    describe_unknown_keys,
    describe_unsupported_keys,
    extract_quoted_key,
    render_short_json,
)
from dstrain.recipe import BatchSize, ConfigError, Faults, Optimizer, format_divisors, suggest_files

# Values of ONEDNN_MAX_CPU_ISA within which products of bf16 are emulated, whatever the CPU has.
_EMULATING = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")

Settings = dict[str, Any]

# dstrain's own choices where the JSON says nothing.
_DEFAULTS = {
    "steps_per_print": 10**12,  # dstrain reports; 0 would divide by zero
    "wall_clock_breakdown": False,  # it synchronizes at every phase
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,  # dstrain builds the optimizer, also an offloaded one
}
_ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")
# Decides "auto" of the Hugging Face configurations; buckets as in ds_configs/.
_AUTO_ZERO = {
    "reduce_bucket_size": 50_000_000,
    "allgather_bucket_size": 50_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
}


def resolve_deepspeed_settings(
    ds_config: Path | dict[str, Any],
    world: int,
    device_type: str,
    *,
    batch: BatchSize,
    optimizer: Optimizer,
    faults: Faults,
    sequence: int = 1,
    settings_at_start: Settings | None = None,
) -> Settings:
    """Returns the checked settings for deepspeed.initialize on `world` ranks of a device type ("cuda" or "cpu"): those
    of DeepSpeed's JSON, completed from the recipe.

    ds_config   the JSON's path, or its content
    batch, optimizer, faults    sections of the recipe
    sequence    parallel.sequence of the recipe: number of ranks that share each sample
    settings_at_start    those with which the run began, if it resumes; they decide a precision that is "auto"

    Raises ConfigError with all problems.
    """
    source = "ds_config" if isinstance(ds_config, dict) else str(ds_config)
    settings = copy.deepcopy(ds_config) if isinstance(ds_config, dict) else _read_json(ds_config)
    if "bfloat16" in settings and "bf16" not in settings:
        settings["bf16"] = settings.pop("bfloat16")
    problems = list(describe_unsupported_keys(settings))
    drop_null_settings(settings)
    problems += _describe_optimizer_contradictions(settings.pop("optimizer", {}), optimizer)
    problems += _apply_recipe_and_describe_contradictions(settings, batch, optimizer, world, sequence)
    problems += _replace_auto_and_describe_problems(settings, device_type, settings_at_start)
    for key, value in _DEFAULTS.items():
        settings.setdefault(key, value)
    problems += _describe_size_problems(settings)
    named = {extract_quoted_key(problem) for problem in problems}  # our words come first; a key is named once
    problems += (refusal for refusal in describe_refused_settings(settings) if extract_quoted_key(refusal) not in named)
    if not problems:  # the types are right from here on
        problems += describe_unknown_keys(settings)
        problems += [
            *_describe_combination_problems(settings, optimizer, faults, world, device_type),
            *_set_gradient_sum_type(settings),
        ]
    if problems:
        raise ConfigError(*(f"{source}: {problem}" for problem in problems))
    return settings


def split_batch_over_ranks(batch: BatchSize, world: int, sequence: int = 1) -> tuple[int, int]:
    """Returns how many samples a rank takes in one forward pass, and how many forward passes a rank does in one
    optimizer step. If batch.micro is not set, there is one pass.

    Raises ConfigError if `world` ranks, of which `sequence` share each sample, cannot share the batch evenly.
    """
    if world % sequence:
        raise ConfigError(
            f"parallel.sequence={sequence} does not divide the {world} ranks: write parallel.sequence="
            f"{format_divisors(world)}, or start a multiple of {sequence} ranks"
        )
    total, micro, teams, one, each = batch.global_, batch.micro, world // sequence, "rank", "ranks"
    if sequence > 1:
        one, each = "group", f"groups of parallel.sequence={sequence} ranks"
    if total % teams:
        fits = sorted({total // teams * teams or teams, -(-total // teams) * teams})
        raise ConfigError(
            f"batch.global={total} cannot be split evenly over {teams} {each}: write "
            f"batch.global={' or '.join(map(str, fits))}, or start {format_divisors(total)} {each}"
        )
    share = total // teams
    micro = micro or share
    if share % micro:
        raise ConfigError(
            f"batch.micro={micro} does not divide the {share} samples of a {one} (batch.global={total} "
            f"over {teams} {each}): micro-batches that work are {format_divisors(share)}"
        )
    return micro, share // micro


def read_zero_stage(settings: Settings) -> int:
    """Returns the ZeRO stage of DeepSpeed's settings, 0 to 3; 0 if none is set."""
    return int(settings.get("zero_optimization", {}).get("stage", 0))


def read_precision(settings: Settings) -> str:
    """Returns the precision that DeepSpeed's settings choose for the networks: bf16, fp16 or, if neither is enabled,
    fp32.
    """
    return next((name for name in ("bf16", "fp16") if settings.get(name, {}).get("enabled")), "fp32")


def read_offload_device(settings: Settings, section: str) -> str:
    """Returns the device to which `section`, offload_optimizer or offload_param, is moved: none, cpu or nvme."""
    return str((settings.get("zero_optimization", {}).get(section) or {}).get("device", "none"))


def is_optimizer_offloaded(settings: Settings) -> bool:
    return read_offload_device(settings, "offload_optimizer") != "none"


def needs_own_fp32_sums(settings: Settings) -> bool:
    """Returns whether updates.py, and not DeepSpeed, sums 16-bit gradients in fp32: at stages 0 and 1 with
    grad_accum_dtype fp32, which DeepSpeed does not support there.
    """
    wide = settings.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    return wide and read_zero_stage(settings) < 2 and read_precision(settings) != "fp32"


def make_deepspeed_config(settings: Settings) -> Settings:
    """Returns a copy of the settings for deepspeed.initialize. Leaves out compute_grad_norm and check_grad_overflow, so
    that DeepSpeed checks gradients where it takes the step itself. Leaves out grad_accum_dtype if updates.py sums
    gradients. Switches DeepSpeed's throughput timer off unless the JSON sets it, since it waits for the GPU.
    """
    own = copy.deepcopy(settings)
    own.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
    own.get("zero_optimization", {}).pop("compute_grad_norm", None)
    own.get("bf16", {}).pop("check_grad_overflow", None)
    if needs_own_fp32_sums(own):
        del own["data_types"]["grad_accum_dtype"]
    return own


def list_settings_remarks(settings: Settings, device_type: str) -> list[str]:
    """Returns remarks for the user, one a line, on settings that are allowed, but slow, costly or without effect."""
    zero, bf16 = settings.get("zero_optimization", {}), read_precision(settings) == "bf16"
    checked = settings.get("bf16", {}).get("check_grad_overflow", True) and zero.get("compute_grad_norm", True)
    lines = []
    if read_zero_stage(settings) == 0 and read_precision(settings) != "fp32":
        lines.append(f"stage 0 with {read_precision(settings)} updates weights one by one, slowly: stage 1 does not")
    if not checked:
        lines.append(
            '"bf16.check_grad_overflow" and "zero_optimization.compute_grad_norm" change nothing here: one '
            "norm of all gradients is always computed, and a step where it is not finite is skipped"
        )
    wide = settings.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    if wide and is_optimizer_offloaded(settings) and read_zero_stage(settings) < 3:
        lines.append(
            "gradients are summed in fp32 on the GPU, 4 bytes a weight, at stage 2 over all ranks: for half "
            f'of it, write "data_types": {{"grad_accum_dtype": "{read_precision(settings)}"}}'
        )
    if bf16 and device_type == "cpu" and not can_cpu_multiply_bf16():
        lines.append("this CPU emulates bf16, up to ten times slower than fp32: take ds_configs/zero2_fp32.json")
    asked = {key: value for key, value in settings.items() if _DEFAULTS.get(key) != value}
    return [*lines, *describe_keys_without_effect(asked, read_zero_stage(settings))]


def _read_json(path: Path) -> Settings:
    try:
        settings = small.read_json(
            path,
            object_pairs_hook=_build_section_without_duplicates,
            parse_constant=_parse_finite_number,
            parse_float=_parse_finite_number,
        )
    except FileNotFoundError:
        raise ConfigError(f"--ds_config {path}: there is no such file{suggest_files(path, '*.json')}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}:{error.lineno}: {error.msg} at column {error.colno}; correct the JSON (no comments, "
            "no comma after the last entry)"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--ds_config {path} cannot be read as a text file: {reason}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; correct the JSON") from None
    except KeyError as error:
        raise ConfigError(f"{path}: the key {error} stands twice in one section; remove one") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds a {type(settings).__name__}: DeepSpeed's settings are one {{...}} of sections")
    return settings


def _build_section_without_duplicates(pairs: list[tuple[str, Any]]) -> Settings:
    section: Settings = {}
    for key, value in pairs:
        if key in section:
            raise KeyError(key)
        section[key] = value
    return section


def _parse_finite_number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no finite number")
    return value


def _describe_optimizer_contradictions(block: Any, optimizer: Optimizer) -> Iterator[str]:
    """Yields a message for each entry of the JSON's section optimizer that contradicts the recipe, or that has no
    effect since dstrain builds the optimizer.
    """
    if not isinstance(block, dict) or not isinstance(block.get("params", {}), dict):
        yield '"optimizer" is no section with "type" and "params": remove it, the recipe owns the optimizer'
        return
    kind = str(block.get("type", "auto"))
    if kind.lower() not in ("auto", optimizer.name, "adam" if optimizer.name == "adamw" else "auto"):
        gone = " (DeepSpeed 0.19 has removed the 1-bit optimizers)" if kind.lower() in _ONE_BIT else ""
        yield f'"optimizer.type" is {kind}{gone}, optimizer.name in the recipe is {optimizer.name}: remove the block'
    own = {
        "lr": optimizer.lr,
        "betas": list(optimizer.betas),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
    }
    for key, value in block.get("params", {}).items():
        if key in own:
            yield from _describe_contradiction(f"optimizer.params.{key}", value, f"optimizer.{key}", own[key])
        elif (key, value) != ("adam_w_mode", True):
            yield f'"optimizer.params.{key}" has no effect, since dstrain builds the optimizer: remove it'
    for key in sorted(set(block) - {"type", "params"}):
        yield f'"optimizer.{key}" has no effect, since dstrain builds the optimizer: remove it'


def _apply_recipe_and_describe_contradictions(
    settings: Settings, batch: BatchSize, optimizer: Optimizer, world: int, sequence: int
) -> Iterator[str]:
    """Sets the keys of the JSON that the recipe decides to the recipe's values. Yields a message for each key that had
    another value. Raises ConfigError if the ranks cannot share the batch evenly.
    """
    try:
        micro, accumulation = split_batch_over_ranks(batch, world, sequence)
    except ConfigError as error:
        raise ConfigError(*error.problems) from None  # named by its recipe keys: the JSON is not at fault
    for key, recipe_key, own in (
        ("train_batch_size", "batch.global", batch.global_),
        ("train_micro_batch_size_per_gpu", "batch.micro", micro),
        ("gradient_accumulation_steps", f"batch.global / batch.micro / {world} ranks", accumulation),
        ("gradient_clipping", "optimizer.clip", optimizer.clip),
    ):
        yield from _describe_contradiction(key, settings.get(key, "auto"), recipe_key, own)
        settings[key] = own


def _describe_contradiction(key: str, value: Any, recipe_key: str, recipe_value: Any) -> Iterator[str]:
    if value not in ("auto", recipe_value):
        yield (
            f'"{key}" is {json.dumps(value)}, {recipe_key} in the recipe is {json.dumps(recipe_value)}: write "auto" '
            "in the JSON, which leaves it to the recipe, or make both equal"
        )


def _replace_auto_and_describe_problems(
    settings: Settings, device_type: str, settings_at_start: Settings | None
) -> Iterator[str]:
    """Replaces "auto", in place, by a value for bf16.enabled and for the sizes of buckets. Yields a message for each
    other "auto". settings_at_start: the settings with which the run began, if it resumes, else None.
    """
    if isinstance(settings.get("bf16"), dict) and settings["bf16"].get("enabled") == "auto":
        settings["bf16"]["enabled"] = (
            read_precision(settings_at_start) == "bf16"
            if settings_at_start
            else device_type == "cuda" or can_cpu_multiply_bf16()
        )
    zero = settings.get("zero_optimization")
    if isinstance(zero, dict):
        zero.update({key: own for key, own in _AUTO_ZERO.items() if zero.get(key) == "auto"})
    for key in _iterate_auto_keys(settings, ""):
        section, _, name = key.rpartition(".")
        within = f" within {section}" if section else ""
        yield (
            f'"{key}" is "auto", which DeepSpeed reads as false: write true or false'
            if name == "enabled"
            else f'"{key}" is "auto", which nothing decides{within}: write a value, or remove it for its default'
        )


def _describe_loss_scale_problems(fp16: Settings, faults: Faults) -> Iterator[str]:
    """Yields a message if fp16 may skip more steps in a row than faults.max_skipped until its dynamic loss scale is low
    enough. fp16: this section of DeepSpeed's JSON.
    """
    skips = fp16.get("initial_scale_power", 16) + fp16.get("hysteresis", 2) - 1
    if not fp16.get("loss_scale", 0) and skips > faults.max_skipped:
        yield (
            f'"fp16" may skip {skips} steps in a row until its loss scale is low enough (initial_scale_power + '
            f"hysteresis - 1), and faults.max_skipped={faults.max_skipped} takes them for divergence: lower "
            f'"fp16.initial_scale_power", or write faults.max_skipped={skips}'
        )


def _set_gradient_sum_type(settings: Settings) -> Iterator[str]:
    """Sets data_types.grad_accum_dtype to fp32, in place, if the JSON does not give it, the networks compute in 16
    bits, and a step has several micro-batches. Yields a message for each entry of data_types that does not suit the
    precision of the networks.
    """
    data_types, own = settings.get("data_types", {}), read_precision(settings)
    if (weights := data_types.get("param_dtype", own)) != own:
        yield (
            f'"data_types.param_dtype" is {json.dumps(weights)}, and the networks compute in {own}: remove it, and '
            'enable "bf16" or "fp16" for another precision'
        )
    choice = data_types.get("grad_accum_dtype")
    if choice is None:
        if own != "fp32" and settings["gradient_accumulation_steps"] > 1:
            settings["data_types"] = {**data_types, "grad_accum_dtype": "fp32"}
    elif choice not in (own, "fp32"):
        choices = '"fp32"' if own == "fp32" else f'"fp32" or "{own}"'
        yield (
            f'"data_types.grad_accum_dtype" is {json.dumps(choice)}, and the networks compute in {own}: write '
            f"{choices}, or remove it"
        )


def _iterate_auto_keys(value: Any, key: str) -> Iterator[str]:
    if value == "auto":
        yield key
    elif isinstance(value, dict):
        for name, inner in value.items():
            if (key, name) != ("data_types", "keep_in_fp32_modules"):  # there DeepSpeed knows the word
                yield from _iterate_auto_keys(inner, f"{key}.{name}" if key else name)


def _describe_size_problems(settings: Settings) -> Iterator[str]:
    """Yields a message if the ZeRO stage is neither an integer nor "auto", and one for each size of a bucket or group,
    in elements, that is out of range. DeepSpeed allocates whole buckets: too large a size would fail only in training.
    """
    zero = settings.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    if type(zero.get("stage", 0)) is not int and zero["stage"] != "auto":
        yield f'"zero_optimization.stage" is {json.dumps(zero["stage"])}: write 0, 1, 2 or 3'
    for key, least, most in (
        ("reduce_bucket_size", 1, 10**10),
        ("allgather_bucket_size", 1, 10**10),
        ("stage3_prefetch_bucket_size", 0, 10**10),
        ("sub_group_size", 1, 10**15),
    ):
        value = zero.get(key)
        if isinstance(value, (int, float)) and not least <= value <= most:
            yield (
                f'"zero_optimization.{key}" is {json.dumps(value)[:40]}: it is a number of elements, write '
                f"{min(_AUTO_ZERO.get(key, 10**9), most)}, say"
            )


def _describe_combination_problems(
    settings: Settings, optimizer: Optimizer, faults: Faults, world: int, device_type: str
) -> Iterator[str]:
    """Yields a message for each setting that DeepSpeed or dstrain cannot use together with the others, or on this
    device.
    """
    zero = settings.get("zero_optimization", {})
    enabled = [name for name in ("bf16", "fp16") if settings.get(name, {}).get("enabled")]
    if len(enabled) == 2:
        yield '"bf16.enabled" and "fp16.enabled" are both true: keep one (bf16 needs no loss scale)'
    elif enabled == ["fp16"] and device_type == "cpu":
        yield (
            '"fp16.enabled" is true, and DeepSpeed has no fp16 on CPU: take ds_configs/zero2.json (bf16) or '
            "ds_configs/zero2_fp32.json"
        )
    elif enabled == ["fp16"] and read_zero_stage(settings) == 0:
        yield (
            '"fp16.enabled" is true at stage 0, where DeepSpeed divides the gradients by a loss scale and does not '
            'multiply the loss by it: write "zero_optimization": {"stage": 1}, for one GPU as well'
        )
    elif enabled == ["fp16"]:
        yield from _describe_loss_scale_problems(settings["fp16"], faults)
    for what, least in (("offload_optimizer", 1), ("offload_param", 3)):
        device = read_offload_device(settings, what)
        if device == "nvme":
            yield (
                f'"zero_optimization.{what}.device" is "nvme", where the fp32 weights are out of reach of the EMA, '
                "of initialization and of checkpoints, and where DeepSpeed silently reads nothing into an address that "
                'is no multiple of 512 bytes, and trains on what was there: write "cpu"'
            )
        if device != "none" and read_zero_stage(settings) < least:
            yield (
                f'"zero_optimization.{what}" needs stage {least} or above, "zero_optimization.stage" is '
                f"{read_zero_stage(settings)}: remove it or raise the stage"
            )
    if optimizer.name != "adamw" and is_optimizer_offloaded(settings):
        yield (
            '"zero_optimization.offload_optimizer" steps on the host, where there is AdamW alone; optimizer.name '
            f"is {optimizer.name}: remove it, or write optimizer.name=adamw"
        )
    if optimizer.name == "adamw8bit" and importlib.util.find_spec("bitsandbytes") is None:
        yield "optimizer.name=adamw8bit needs bitsandbytes: pip install bitsandbytes, or write optimizer.name=adamw"
    if read_zero_stage(settings) == 3 and not zero.get("contiguous_gradients", True):
        yield (
            '"zero_optimization.contiguous_gradients" is false at stage 3, where DeepSpeed then frees a gradient of '
            "which a rank owns no part while the GPU still reads it: write true"
        )
    if (factor := settings.get("gradient_predivide_factor", 1.0)) != 1:
        yield (
            f'"gradient_predivide_factor" is {render_short_json(factor)}, and DeepSpeed knows 1 alone with ZeRO: '
            "remove it"
        )
    yield from _describe_profiler_problems(settings.get("flops_profiler", {}))
    if (zero.get("offload_optimizer") or {}).get("ratio", 1.0) < 1:
        yield 'dstrain does not support "zero_optimization.offload_optimizer.ratio" below 1: remove it'
    local = zero.get("zero_hpz_partition_size", 1)
    if local < 1 or world % local:
        yield (
            f'"zero_optimization.zero_hpz_partition_size" is {local}, the ranks are {world}: write the number '
            f"of GPUs of a machine, one of {format_divisors(world)}, or remove it"
        )
    if local > 1 and (is_optimizer_offloaded(settings) or read_offload_device(settings, "offload_param") != "none"):
        yield (
            f'"zero_optimization.zero_hpz_partition_size" is {local} beside "offload_optimizer" or "offload_param", '
            "where others saw losses of zero and nobody has seen right ones: remove one of them"
        )
    for key in ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"):
        if zero.get(key, False) > (key == "zero_hpz_partition_size"):
            if read_zero_stage(settings) != 3:
                yield f'"zero_optimization.{key}" belongs to stage 3, "stage" is {read_zero_stage(settings)}: remove it'
            elif device_type == "cpu" and "quantized" in key:
                yield f'"zero_optimization.{key}" needs a GPU: take ds_configs/zero3.json here'


def _describe_profiler_problems(profiler: Settings) -> Iterator[str]:
    """Yields a message, on rank 0, if flops_profiler is enabled and its output file cannot be written. Without this
    check DeepSpeed would fail in the middle of training.
    """
    path = profiler.get("output_file")
    if not profiler.get("enabled") or not path or read_rank_and_world().rank:
        return
    above = next((folder for folder in Path(str(path)).absolute().parents if folder.exists()), Path("/"))
    target = path if Path(str(path)).is_file() else above
    if not isinstance(path, str) or Path(path).is_dir() or not above.is_dir() or not os.access(target, os.W_OK):
        yield (
            f'"flops_profiler.output_file" is {render_short_json(path)}, which cannot be written: name a file, or '
            "remove it"
        )


def can_cpu_multiply_bf16() -> bool:
    """Returns whether this CPU has instructions that multiply bf16, and oneDNN may use them. If not, bf16 is emulated,
    which is slow. Asks torch and measures nothing, so that all ranks on equal CPUs agree.
    """
    # Ranks would measure different times, and must agree. Measured once, with the default recipe on one thread of an
    # AMD EPYC: 345 samples a second in bf16 and 166 in fp32; with ATen's AVX2 kernels 242 and 150.
    import torch

    if os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper() in _EMULATING:
        return False
    native = (getattr(torch.cpu, f"_is_{name}_supported", lambda: False) for name in ("avx512_bf16", "amx_tile"))
    return any(check() for check in native) or os.uname().machine in ("aarch64", "arm64")
