"""Exports a trained run as a folder, reads it back, and compares it with the trained networks.

diffusers      a pipeline that draws, written by systems/SYSTEM/to_diffusers.py; with a model card, README.md, whose
               code was run on the folder by a process without dstrain, and drew what the trained network draws
safetensors    PART.safetensors of every part, which init_from takes, and the run's recipe.yaml: of any system
peft           the adapters of model.lora as peft's adapter_model.safetensors and adapter_config.json
diffusers-lora the same by the names of diffusers' transformer, and the file that its pipeline's load_lora_weights takes
"""

import importlib
import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dstrain import recipe, systems
from dstrain.commands.options.export import ADAPTER_FORMATS, ExportOptions
from dstrain.data.batches import iterate_held_out
from dstrain.data.cached.shards import INDEX, compute_latent_statistics, read_index, sum_codes_for_statistics
from dstrain.data.formats.imagenet import read_class_titles
from dstrain.data.open import open_sources
from dstrain.data.views import Shuffled
from dstrain.distributed import group
from dstrain.distributed.progress import get_phases
from dstrain.encoders.autoencoder import hash_network
from dstrain.engine.checkpoint import read_weights
from dstrain.nn.lora import Lora, convert_adapters_to_peft, merge_adapters_into_weights
from dstrain.nn.measures import measure_relative_error
from dstrain.recipe import ConfigError, Run
from dstrain.runs import card, trained
from dstrain.runs.folders import create_output_folder_atomically
from dstrain.runs.weights import read_state_dict
from dstrain.systems.base import Example, System

_BATCH = 32  # samples of the data at a time
_PROBE = 4  # random samples that are compared
_TOLERATED = 1e-5  # relative; the same float32 operations in the same order agree to the bit


@dataclass(frozen=True)
class Exported:
    """Describes an export that was written."""

    name: str  # diffusers' class, or the format
    errors: dict[str, float]  # relative, against the trained network
    statistics: dict[str, Any]  # what was measured or read on the way
    note: str = ""  # what its user has to know


def run_verb(options: ExportOptions) -> None:
    """Exports the run, and prints where it is and how far it differs from the trained network."""
    exported = export_run(options)
    errors = ", ".join(f"{name} {error:.1e}" for name, error in exported.errors.items())
    scale = f", scaling_factor {exported.statistics['scaling_factor']:.5f}" if exported.statistics else ""
    print(f"{exported.name} in {options.out}{scale}; relative difference from the trained network: {errors}")
    if exported.note:
        print(exported.note)


def export_run(options: ExportOptions) -> Exported:
    """Writes the export to options.out, whole or not at all, and returns a description of it. Raises ConfigError if the
    format cannot express the run, or if the export, read back, differs from the trained network.
    """
    if group.read_rank_and_world().world > 1:
        raise ConfigError("an export takes one process: dstrain export ...")
    if options.statistics and options.format != "diffusers":
        raise ConfigError("--statistics gives a scaling_factor, which --format diffusers alone writes: leave it out")
    run = trained.read_recipe(options.run)
    config = systems.build_config(run.system, run.model)
    field = config.adapters_field
    lora = getattr(config, field) if field else None
    if options.format in ADAPTER_FORMATS:
        _require_lora_adapters(options, run, lora)
    if lora is not None:  # what is written has none
        run = run.model_copy(update={"model": {key: value for key, value in run.model.items() if key != field}})
    system = systems.build(run.system, run.model)
    writer = None
    if options.format == "diffusers":
        writer = _import_diffusers_writer(run, system)
    if options.statistics and not system.encodes:
        raise ConfigError(f"--statistics: {options.run} trains {run.system}, which has no scaling_factor: leave it out")
    checkpoint = trained.find_checkpoint(options.run, options.step, options.ema)
    ema = run.samples.ema if options.ema is None else options.ema
    kinds = trained.choose_raw_or_ema_by_part(system, checkpoint, ema, options.raw, include_unaveraged=True)
    if writer is not None:  # diffusers' classes are of the first part alone
        first = next(iter(system.parts))
        kinds = {first: kinds[first]}
    get_phases().enter_phase(f"writing {options.out}")
    with create_output_folder_atomically(options.out) as folder:
        if options.format in ADAPTER_FORMATS and lora is not None:
            exported = _export_adapters(options, run, system, checkpoint, kinds, lora, folder)
        elif writer is None:
            exported = _export_parts_as_safetensors(run, checkpoint, kinds, lora, folder)
        else:
            states = ((part, _read_merged_weights(checkpoint, part, kind, lora)) for part, kind in kinds.items())
            nets = trained.build_networks_from_states(system, states, torch.float32, group.device())
            exported = _export_to_diffusers(options, run, system, nets, writer, folder)
        _require_small_errors(options.run, exported, getattr(writer, "TOLERATED", {}))
        if writer is not None:
            # What takes a process of its own comes last.
            get_phases().enter_phase("drawing from the export in a process without dstrain")
            title, code = options.out.absolute().name, writer.describe_export(system)[2]
            drawn = card.run_example_code(folder, title, code)
            with _force_float32_convolutions():
                exported.errors["code"] = _measure_relative_difference(
                    drawn, writer.draw_reference_outputs(system, nets)
                )
            _require_small_errors(options.run, exported, writer.TOLERATED)
            card.write_model_card(
                folder,
                title,
                run,
                options.run,
                checkpoint,
                kinds,
                exported.name,
                exported.note,
                code,
                exported.errors,
                writer.TOLERATED["code"],
                system,
            )
    return exported


def _import_diffusers_writer(run: Run, system: System) -> ModuleType:
    """Imports the module that writes models of a system for diffusers, and returns it. Raises ConfigError if diffusers
    cannot express this model.
    """
    system.require_expressible_in_diffusers()
    return importlib.import_module(f"{systems.import_system_package(run.system).__name__}.to_diffusers")


def _force_float32_convolutions() -> AbstractContextManager[None]:
    """Returns a context manager in which convolutions compute in float32. A GPU would otherwise round their inputs to
    TF32.
    """
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=False)


def _measure_relative_difference(drawn: np.ndarray, expected: torch.Tensor) -> float:
    """Returns the largest absolute difference between `drawn` and `expected`, divided by the largest magnitude in
    `expected`.

    drawn: what the code of an exported model card has drawn
    expected: what the trained network draws, (B, ...); for uint8 pictures (B, C, H, W), `drawn` is (B, H, W, C), or (B,
        H, W) if C is 1
    """
    found = torch.from_numpy(drawn)
    if expected.dtype == torch.uint8:  # pictures come as they are saved, (B, H, W[, C])
        found = found.view(len(found), *expected.shape[2:], -1).movedim(-1, 1)
    return measure_relative_error(found.float(), expected.float().cpu())


def _require_small_errors(folder: Path, exported: Exported, limits: dict[str, float]) -> None:
    """Raises ConfigError if the export differs from the trained network: if one of its relative errors, by name, is NaN
    or above the limit of that name in `limits` (1e-5 if there is none). `folder` is the run's folder, for the message.
    """
    excess = [
        f"{error:.1e} ({name})" for name, error in exported.errors.items() if not error <= limits.get(name, _TOLERATED)
    ]
    if excess:
        raise ConfigError(
            f"{folder} read back from {exported.name} differs from the trained network by "
            f"{', '.join(excess)}: nothing is kept"
        )


def _require_lora_adapters(options: ExportOptions, run: Run, lora: Lora | None) -> None:
    """Raises ConfigError if a run has no LoRA adapters, or has also trained other weights."""
    if lora is None:
        raise ConfigError(
            f"--format {options.format}: {options.run} was trained without model.lora: take --format safetensors"
        )
    if run.train_only is not None:
        raise ConfigError(
            f"--format {options.format} holds adapters alone, and {options.run} has also learned "
            f"train_only={list(run.train_only)}: take --format safetensors, which is merged"
        )


def _read_merged_weights(checkpoint: Path, part: str, kind: str, lora: Lora | None) -> dict[str, torch.Tensor]:
    """Reads the weights of a part; `kind` is "master" or an average such as "ema.0.9999". If `lora` is given, merges
    the adapters into the weights.
    """
    weights = read_weights(checkpoint, part, kind)
    return merge_adapters_into_weights(weights, lora) if lora else weights


def _export_adapters(
    options: ExportOptions,
    run: Run,
    system: System,
    checkpoint: Path,
    kinds: dict[str, str],
    lora: Lora,
    out: Path,
) -> Exported:
    """Writes the LoRA adapters of the first part as peft does, into adapter_model.safetensors and adapter_config.json.
    With --format diffusers-lora uses diffusers' names of weights. If diffusers' pipeline can load adapters, then also
    writes pytorch_lora_weights.safetensors.

    Raises ConfigError if the system has no diffusers names for adapters.
    """
    part, kind = next(iter(kinds.items()))
    state, into_pipeline = read_weights(checkpoint, part, kind), False
    if options.format == "diffusers-lora":
        writer = _import_diffusers_writer(run, system)
        if not hasattr(writer, "rename_adapters_to_diffusers"):
            raise ConfigError(
                f"--format diffusers-lora: not of {run.system}; take --format peft, whose names are our network's, or "
                "--format diffusers, which merges the adapters"
            )
        state, into_pipeline = writer.rename_adapters_to_diffusers(system, state)
    adapters, described = convert_adapters_to_peft(state, lora, str(run.init_from))
    save_file(adapters, out / "adapter_model.safetensors", metadata={"format": "pt"})
    (out / "adapter_config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
    if into_pipeline:
        _save_adapters_for_pipeline(state, lora, described, out / "pytorch_lora_weights.safetensors")
    copy = load_file(out / "adapter_model.safetensors")
    same = all(torch.equal(copy[name], value) for name, value in adapters.items())
    return Exported(options.format, {part: 0.0 if same else math.inf}, {})


def _save_adapters_for_pipeline(
    adapters: dict[str, torch.Tensor], lora: Lora, adapter_config: dict[str, Any], path: Path
) -> None:
    """Writes adapters into the file `path` as diffusers' save_lora_weights does. Multiplies their scale into lora_B and
    stores the rank as alpha, since earlier versions of diffusers do not read alpha from the file.
    """
    fields = adapter_config | {"lora_alpha": lora.rank}
    fields = {f"transformer.{field}": value for field, value in fields.items() if value is not None}
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(fields, indent=2, sort_keys=True)}
    scaled = {
        f"transformer.{name}": (value * lora.output_factor if ".lora_B." in name else value).contiguous()
        for name, value in adapters.items()
    }
    save_file(scaled, path, metadata=metadata)


def _export_parts_as_safetensors(
    run: Run, checkpoint: Path, kinds: dict[str, str], lora: Lora | None, out: Path
) -> Exported:
    """Writes recipe.yaml, and PART.safetensors of each part in `kinds`, {part: kind of weights}, with LoRA adapters
    merged. Reads the files back: the error of a part is 0 if its weights are equal, else infinite.
    """
    (out / "recipe.yaml").write_text(recipe.dump_run(run), encoding="utf-8")
    assert recipe.load_recipe(out / "recipe.yaml") == run
    errors = {}
    for part, kind in kinds.items():
        path, weights = out / f"{part}.safetensors", _read_merged_weights(checkpoint, part, kind, lora)
        save_file(weights, path, metadata={"weights": kind, "checkpoint": checkpoint.name})
        copy = read_state_dict(path)
        same = copy.keys() == weights.keys() and all(torch.equal(copy[name], weights[name]) for name in weights)
        errors[part] = 0.0 if same else math.inf
    return Exported("safetensors", errors, {})


def _export_to_diffusers(
    options: ExportOptions, run: Run, system: System, nets: dict[str, nn.Module], writer: ModuleType, out: Path
) -> Exported:
    """Writes the networks as models of diffusers by the module `writer`. Returns a description of the export; it holds
    the relative errors that diffusers' models make on a few synthetic samples.
    """
    scale: dict[str, Any] = {}  # stays empty where the writer does not ask

    def read_or_measure_statistics() -> dict[str, Any]:
        """Returns the statistics of latents: those in the cache that --statistics names, or, without it, those of
        training samples, which it encodes.
        """
        scale.update(
            _read_latent_statistics(options.statistics, options.run, system, nets)
            if options.statistics
            else _measure_latent_statistics(options.num, run, system, nets)
        )
        return scale

    writer.save_export(system, nets, out, read_or_measure_statistics, lambda: _read_class_names(run))
    synthetic = {name: tensor.to(group.device()) for name, tensor in system.synthetic(_PROBE).items()}
    with _force_float32_convolutions():
        errors = writer.measure_export_errors(system, nets, out, system.encode(synthetic))
    name, note, _ = writer.describe_export(system)
    return Exported(name, errors, scale, note)


def _read_class_names(run: Run) -> tuple[str, ...]:
    """Returns the names of the classes in the run's data; () if the data are gone, or their classes have no names."""
    try:
        classes = tuple(open_sources(run.data, run=run.directory)[0].classes)
        return read_class_titles(run.data.path, run.data.class_list, classes)
    except (ValueError, OSError, AttributeError):
        return ()


def _read_latent_statistics(path: Path, run: Path, system: System, nets: dict[str, nn.Module]) -> dict[str, Any]:
    """Returns the statistics of latents in the index of a cache that `dstrain encode` has written. Raises ConfigError
    if the cache was encoded by other weights than those that are exported.
    """
    index = read_index(path.parent if path.name == INDEX else path)
    own, encoder = hash_network(*system.describe_identity(nets)), index["encoding"]["first_stage"]
    if own != encoder:
        raise ConfigError(
            f"--statistics {path}: these codes are of the first stage {encoder}, "
            f"{run} exports {own}; name the cache that it encoded (and its --ema or --raw)"
        )
    return index["statistics"]


@torch.no_grad()
def _measure_latent_statistics(num: int, run: Run, system: System, nets: dict[str, nn.Module]) -> dict[str, Any]:
    """Returns the statistics of latents (mean, std, scaling_factor and more), measured on the posteriors of `num`
    training samples.
    """
    shards, count = [], 0
    for example in _iterate_encoded_samples(num, run, system):
        codes = system.compute_codes(nets, example)
        moments = torch.stack((codes["latent_mean"], codes["latent_std"]), dim=1)[:, None].cpu().numpy()
        shards.append(sum_codes_for_statistics(moments[example["valid"].cpu().numpy()]))
        count += int(example["valid"].sum()) * moments[0, 0, 0, 0].size
    return compute_latent_statistics(shards, count)


def _iterate_encoded_samples(num: int, run: Run, system: System) -> Iterator[Example]:
    """Yields `num` training samples, shuffled, in batches that System.encode has encoded. Prints a line on the data."""
    source = Shuffled(open_sources(run.data, run=run.directory)[0], run.seed)
    print(f"data: {run.data.path}: {min(num, len(source)):,} of {source.describe_samples()}", flush=True)
    for batch in iterate_held_out(source, min(_BATCH, num), device=group.device(), seed=run.seed, limit=num):
        with torch.no_grad():  # around the yield it would also hold in the caller's loop
            example = system.encode(batch)
        yield example
