"""Reads the full weights from a checkpoint in DeepSpeed's own format, ZeRO 1, 2 or 3, without DeepSpeed, torch or a
process group.

    mp_rank_00_model_states.pt                    stages 0-2: the module's state dict, in the precision it computes in
    zero_pp_rank_R_mp_rank_00_model_states.pt     stage 3: buffers, and rank R's shares of the frozen weights
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt     rank R's partitions of the fp32 masters, flat
    zero/NAME/fp32.pt                             a universal folder, of ds_to_universal: a whole fp32 master in a file,
                                                  flat at stage 3, in place of the partitions

The weights get the names of the module's state dict, in its order, and a checkpoint that lacks one of them is refused.
Trained weights are taken from the masters, frozen weights and buffers from the model's files, and a tied weight from
the weight that it is tied to. DeepSpeed's own zero_to_fp32 drops frozen weights at stage 1, leaves them in bf16 at 2
and 3, refuses stage 0 and stage 1 with fp32 accumulation, and cannot write tied weights as safetensors.

Source: DeepSpeed 0.19.8, runtime/engine.py, runtime/zero/stage_1_and_2.py and stage3.py, utils/zero_to_fp32.py.
"""

import bisect
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dstrain.checkpoint import torch_files
from dstrain.checkpoint.safetensors_io import FLOATS, SIZES, Entry, Span, Stored
from dstrain.recipe import ConfigError

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_UNSUPPORTED = {
    re.compile(r"layer_\d+-.*model_states\.pt"): "is of a pipeline-parallel network, a file for each layer",
    re.compile(
        r"layer_.*expert_.*_model_states\.pt|expp_rank_.*_optim_states\.pt"
    ): "is of a mixture of experts, a file for each",
}


class Checkpoint(NamedTuple):
    """The full weights in the folder of one tag, as entries to be written, and the files and offsets of their bytes."""

    entries: list[Entry]  # by state-dict name, in its order
    tied: dict[str, str]  # name: the other name of the same weight
    facts: dict[str, Any]  # step, stage, world, the version that wrote it
    sums: dict[Span, int]  # CRC-32 of the storages that the entries lie in


def find_tag_folder(path: Path, tag: str | None = None) -> Path | None:
    """Returns the folder of one saved state in a DeepSpeed checkpoint folder `path`: the subfolder `tag`. Returns None
    if `path` is no folder or holds no checkpoint.

    If `tag` is None, returns the first of these that exists: `path` itself, if it holds the files; the subfolder that
    the file `latest` names; the only subfolder with a checkpoint. Raises ConfigError if there is no checkpoint of this
    tag, or if there are several to choose from.
    """
    if not path.is_dir():
        return None
    if tag is None and _is_checkpoint_folder(path):
        return path
    tags = sorted(child.name for child in path.iterdir() if child.is_dir() and _is_checkpoint_folder(child))
    if not tags:
        return None
    source = "--tag"
    if tag is None and (path / "latest").is_file():
        tag, source = (path / "latest").read_text(encoding="utf-8", errors="replace").strip(), "the file latest says"
    tag = tag or (tags[0] if len(tags) == 1 else None)
    if tag is None:
        raise ConfigError(f"{path} holds several checkpoints and no file latest: choose --tag {' | '.join(tags)}")
    if tag not in tags:
        raise ConfigError(f"{source} {tag}: {path} holds no checkpoint of that tag; it holds {', '.join(tags)}")
    return path / tag


def read_deepspeed_checkpoint(folder: Path, trusted: bool, dtype: str) -> Checkpoint:
    """Returns the full weights in `folder`, the tag folder of a DeepSpeed checkpoint. Reads the pickles, but not yet
    the values of tensors.

    dtype: the dtype to write weights in; buffers keep their own, but those of 16 bits become float32
    trusted: allows pickles that name classes other than those of tensors and plain values; else they raise ConfigError

    Raises ConfigError if files are missing or damaged, or if the checkpoint is of a kind that cannot be merged, such as
    a pipeline-parallel one.
    """
    optimizers, models = _find_optimizer_and_model_files(folder)
    masters = (
        {path.parent.name: path for path in sorted(folder.glob("zero/*/fp32.pt"))}
        if is_universal_checkpoint(folder)
        else {}
    )
    paths = (*models.values(), *optimizers.values(), *masters.values())
    contents = {path: torch_files.load_torch_file(path) for path in paths}
    asked = sorted(set().union(*(content.asked for content in contents.values())))
    if asked and not trusted:
        more = f" and {len(asked) - 6} more" if len(asked) > 6 else ""
        raise ConfigError(
            f"{folder} is pickled, and asks for {', '.join(asked[:6])}{more}: if you know where it comes "
            "from, give --trust-pickle; they are then read as empty shells, and still nothing is run"
        )
    values = {path: content.value for path, content in contents.items()}
    for path in masters.values():
        if contents[path].asked:
            raise ConfigError(f"{path} holds more than a tensor and plain values: do not load it with any program")
    for path in (*models.values(), *optimizers.values()):
        value = values[path]
        key = "module" if path in models.values() else "optimizer_state_dict"
        if not isinstance(value, dict) or key not in value:
            raise ConfigError(f"{path} holds no {key}: DeepSpeed did not write it; restore it, or name another folder")
    try:
        states = {rank: values[path]["optimizer_state_dict"] for rank, path in optimizers.items()}
        if states:
            _require_all_rank_files(folder, optimizers, models, states)
        known = {name: values[path] for name, path in masters.items()} if is_universal_checkpoint(folder) else None
        by_rank = {rank: values[path] for rank, path in models.items()}
        merged = _merge_weights(folder, by_rank, states, known, dtype)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{folder} is no checkpoint of ZeRO 1 to 3 as DeepSpeed 0.9 to 0.19 writes it "
            f"({type(error).__name__}: {error})"
        ) from None
    storages = {path: sorted(content.sums, key=lambda span: span.offset) for path, content in contents.items()}
    for span in {span for entry in merged.entries for span in entry.source.spans}:
        number = bisect.bisect(storages[span.path], span.offset, key=lambda storage: storage.offset) - 1
        storage = storages[span.path][number]
        merged.sums[storage] = contents[span.path].sums[storage]
    return merged


def list_deepspeed_files(folder: Path) -> list[str]:
    """Returns the sorted names of the files *model_states.pt and *optim_states.pt directly in a folder."""
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(("model_states.pt", "optim_states.pt")))


def is_universal_checkpoint(folder: Path) -> bool:
    """Returns whether a folder is a universal checkpoint of DeepSpeed's ds_to_universal: it has zero/ and no optimizer
    files. Returns True also if some of its files are missing.
    """
    if not (folder / "zero").is_dir() or list(folder.glob("*optim_states.pt")):
        return False
    return bool(list_deepspeed_files(folder)) or any(folder.glob("zero/*/fp32.pt"))


def _is_checkpoint_folder(folder: Path) -> bool:
    return bool(list_deepspeed_files(folder)) or is_universal_checkpoint(folder)


def _find_optimizer_and_model_files(folder: Path) -> tuple[dict[int, Path], dict[int, Path]]:
    """Returns {data-parallel rank: optimizer file} and {data-parallel rank: model file} of a folder. Raises ConfigError
    for files of pipeline, tensor or expert parallelism, for two files of one rank, or if rank 0's model file is
    missing.
    """
    optimizers: dict[int, Path] = {}
    models: dict[int, Path] = {}
    parallel = []
    for name in list_deepspeed_files(folder):
        for pattern, reason in _UNSUPPORTED.items():
            if pattern.fullmatch(name):
                raise ConfigError(
                    f"{folder}: {name} {reason}; only data-parallel checkpoints are merged here: see "
                    "DeepSpeed's ds_to_universal.py"
                )
        for pattern, by_rank in ((_OPTIMIZER, optimizers), (_MODEL, models)):
            if match := pattern.fullmatch(name):
                other = by_rank.setdefault(int(match[1] or 0), folder / name).name
                if int(match[2]):
                    parallel.append(name)
                elif other != name:
                    raise ConfigError(f"{folder} holds {other} and {name}, of one rank: remove those of the older run")
    if parallel:
        raise ConfigError(
            f"{folder}: {parallel[0]} is of a tensor-parallel run (mp_rank above 0), whose slices only "
            "the network's own rules put together: see DeepSpeed's ds_to_universal.py"
        )
    if 0 not in models:
        example = next((f"; it holds {path.name}" for path in optimizers.values()), "")
        origin = (
            "the folder that ds_to_universal has read" if is_universal_checkpoint(folder) else "where it was written"
        )
        raise ConfigError(
            f"{folder} lacks mp_rank_00_model_states.pt (stage 3: zero_pp_rank_0_mp_rank_00_model_states.pt and those "
            f"of the other ranks){example}: copy it from {origin}"
        )
    return optimizers, models


def _merge_weights(
    folder: Path, models: Mapping[int, Any], states: Mapping[int, Any], masters: Mapping[str, Any] | None, dtype: str
) -> Checkpoint:
    """Returns the full weights, merged from the files of all ranks. Raises ConfigError for a pipeline- or
    tensor-parallel run, or if no file holds the values of a weight.

    models: by rank, the content of its model file
    states: by rank, the optimizer state in its optimizer file
    masters: by name of a weight, the content of zero/NAME/fp32.pt in a universal folder; None for other folders, which
        have the fp32 weights in `states`
    """
    first = models[0]
    module, buffers = first["module"], set(first["buffer_names"])
    if not isinstance(module, dict) or first.get("mp_world_size") not in (None, 0, 1):
        raise ConfigError(
            f"{folder} is of a pipeline- or tensor-parallel run (mp_world_size "
            f"{first.get('mp_world_size')}), whose pieces are not merged here: see DeepSpeed's "
            "ds_to_universal.py"
        )
    sharded = any("fp32_flat_groups" in state for state in states.values())
    if masters is None:
        trained = _collect_trained_weights(folder, first, states, sharded)
    else:
        sharded = _has_stage3_files(folder, models)
        trained = dict(_collect_universal_weights(folder, first["param_shapes"], masters))
    weights = dict(_collect_frozen_weights(folder, models, sharded)) | trained
    shared = dict(first.get("shared_params") or {})
    names_by_place = (
        {}
        if sharded
        else {
            value.spans: name
            for name, value in reversed(module.items())
            if isinstance(value, Stored) and value.numel and name in trained
        }
    )
    entries, tied, left_out = [], {}, []
    for name in dict.fromkeys((*module, *trained, *weights)):
        value, holder = module.get(name), name
        if not isinstance(name, str) or name == "__metadata__":
            raise TypeError(f"a weight named {name!r}")
        if name not in weights and name not in buffers:
            holder = shared.get(name, name)
        if holder == name and name not in trained and isinstance(value, Stored):
            holder = names_by_place.get(value.spans, name)  # tied, though shared_params does not list it
        if holder != name:
            tied[name] = holder
        if holder in weights:
            source, written = weights[holder], dtype
        elif not isinstance(value, Stored):
            left_out.append(name)  # extra state: objects that are no tensors
            continue
        elif name in buffers:
            source, written = value, "F32" if value.dtype in ("BF16", "F16") else value.dtype
        elif not sharded:
            source, written = value, dtype  # frozen at stage 1, where no list names them
        else:
            raise ConfigError(f"{folder}: {name} is in the network, and neither trained, frozen, tied nor a buffer")
        entries.append(Entry(name, source, written if source.dtype in FLOATS else source.dtype))
    stage = first.get("ds_config", {}).get("zero_optimization", {}).get("stage")
    return Checkpoint(
        entries,
        tied,
        {
            "step": first.get("global_steps"),
            "stage": 3 if sharded else stage,
            "world": first.get("dp_world_size", 1) if masters is not None else len(states) or 1,
            "deepspeed": str(first.get("ds_version")),
            "left_out": left_out,
        },
        {},
    )


def _require_all_rank_files(
    folder: Path, optimizers: Mapping[int, Path], models: Mapping[int, Path], states: Mapping[int, Any]
) -> None:
    """Raises ConfigError if a rank's file is missing, if there are also files of a larger world size, or if the weights
    are partitioned over groups of experts.
    """
    counts = next(iter(states.values()))["partition_count"]
    world = max(counts) if isinstance(counts, (list, tuple)) else int(counts)
    if not 0 < world < 1 << 20:
        raise TypeError(f"partitions of {world} ranks")
    sharded = any("fp32_flat_groups" in state for state in states.values())
    for paths in (optimizers, models) if sharded else (optimizers,):
        rank, name = next((rank, path.name) for rank, path in paths.items())
        missing = [name.replace(f"pp_rank_{rank}_", f"pp_rank_{n}_") for n in range(world) if n not in paths]
        if missing:
            raise ConfigError(f"{folder} lacks {', '.join(missing[:5])}: {len(paths)} of {world} ranks are there")
        if len(paths) > world:
            raise ConfigError(
                f"{folder} holds files of {len(paths)} ranks, and was last written by {world}: remove "
                f"{name.replace(f'pp_rank_{rank}_', f'pp_rank_{world}_')} and those above"
            )
    if any("ds_zero_partition_groups" in state for state in states.values()):
        raise ConfigError(f"{folder} is partitioned over groups of experts: see DeepSpeed's ds_to_universal.py")


class _JoinedFlats:
    """Several 1-D tensors in files, treated as one long tensor. Raises TypeError if they have strides or several
    dtypes.
    """

    def __init__(self, flats: Sequence[Stored]) -> None:
        self.flats = [flat for flat in flats if flat.numel]
        self.numel = sum(flat.numel for flat in self.flats)
        self.dtype = self.flats[0].dtype if self.flats else "F32"
        if any(flat.strides is not None or flat.dtype != self.dtype for flat in self.flats):
            raise TypeError("partitions that are not flat, or of several types")

    def locate_elements(self, start: int, numel: int) -> Iterator[Span]:
        """Yields the byte ranges, in files, of `numel` elements from element `start` on. Raises IndexError if there are
        fewer elements.
        """
        size, done, end = SIZES[self.dtype], 0, start + numel
        if not 0 <= start <= end <= self.numel:
            raise IndexError(f"elements {start} .. {end} of {self.numel}")
        for flat in self.flats:
            first, last = max(start, done), min(end, done + flat.numel)
            if first < last:
                (span,) = flat.spans
                yield Span(span.path, span.offset + size * (first - done), size * (last - first))
            done += flat.numel


def _collect_trained_weights(
    folder: Path, first: Mapping[str, Any], states: Mapping[int, Any], sharded: bool
) -> dict[str, Stored]:
    """Returns the trained weights by name. At ZeRO stages 1 to 3 these are the fp32 masters in the ranks' optimizer
    files. At stage 0, which has no such files, they are the network's own weights. first: the content of rank 0's model
    file.

    Raises ConfigError if optimizer files of stages 1 to 3 are missing, or if the network's own weights have 16 bits.
    """
    if states:
        shapes = [{name: tuple(shape) for name, shape in group.items()} for group in first["param_shapes"]]
        return dict(
            _collect_stage3_weights(folder, shapes, states)
            if sharded
            else _collect_stage12_weights(folder, shapes, states)
        )
    if first.get("param_shapes"):
        raise ConfigError(
            f"{folder} lacks zero_pp_rank_0_mp_rank_00_optim_states.pt and those of other ranks, where "
            "ZeRO keeps the fp32 weights: copy them here"
        )
    weights = {
        name: value
        for name, value in first["module"].items()
        if isinstance(value, Stored) and name not in first["buffer_names"]
    }
    low = [name for name, value in weights.items() if value.dtype in ("BF16", "F16")]
    if low:
        raise ConfigError(
            f"{folder} holds no *_optim_states.pt, and {low[0]} only in {weights[low[0]].dtype}: the "
            "fp32 weights of stage 0 are kept without names; train with zero_optimization.stage 1"
        )
    return weights


def _collect_stage12_weights(
    folder: Path, shapes: list[dict[str, tuple]], states: Mapping[int, Any]
) -> Iterator[tuple[str, Stored]]:
    """Yields (name, tensor) of the weights of ZeRO stages 1 and 2. At these stages the weights of a parameter group
    form one flat tensor, which is cut into one partition for each rank. Raises ConfigError if the size of a weight does
    not fit.
    """
    ranks = range(len(states))
    for number, group in enumerate(shapes):
        parts = [_JoinedFlats([states[rank]["single_partition_of_fp32_groups"][number]]) for rank in ranks]
        whole = _JoinedFlats([flat for part in parts for flat in part.flats])
        paddings = states[0].get("param_alignment_paddings")  # between weights
        gaps = paddings[number] if paddings else ()
        offset = 0
        for (name, shape), gap in itertools.zip_longest(group.items(), gaps, fillvalue=0):  # type: ignore[misc]
            if all("param_slice_mappings" in states[rank] for rank in ranks):
                spans = [
                    span
                    for rank in ranks
                    if (own := states[rank]["param_slice_mappings"][number].get(name))
                    for span in parts[rank].locate_elements(own.start, own.numel)
                ]
            else:  # before DeepSpeed 0.8
                spans = list(whole.locate_elements(offset, math.prod(shape)))
            offset += math.prod(shape) + gap
            yield name, _require_whole_tensor(folder, name, Stored(whole.dtype, shape, tuple(spans)))


def _collect_stage3_weights(
    folder: Path, shapes: list[dict[str, tuple]], states: Mapping[int, Any]
) -> Iterator[tuple[str, Stored]]:
    """Yields (name, tensor) of the weights of ZeRO stage 3. At this stage each weight is cut into equal shares, one for
    each rank, the last one padded. Each rank's file holds its shares of all weights, one after another. Raises
    ConfigError if sizes do not fit, perhaps only after the last weight.
    """
    lines = [_JoinedFlats(states[rank]["fp32_flat_groups"]) for rank in range(len(states))]
    offset = 0
    for name, shape in itertools.chain.from_iterable(group.items() for group in shapes):
        numel = math.prod(shape)
        share = -(-numel // len(lines))
        spans = [
            span
            for rank, line in enumerate(lines)
            for span in line.locate_elements(offset, max(0, min(share, numel - rank * share)))
        ]
        offset += share
        yield name, _require_whole_tensor(folder, name, Stored(lines[0].dtype, shape, tuple(spans)))
    if any(line.numel != offset for line in lines):
        raise ConfigError(
            f"{folder}: its partitions hold {[line.numel for line in lines]} elements, the weights need "
            f"{offset} of each; weights that were offloaded to NVMe are not in a checkpoint"
        )


def _has_stage3_files(folder: Path, models: Mapping[int, Any]) -> bool:
    """Returns whether a universal folder has a model file for each rank, as ZeRO stage 3 writes them. Returns False if
    it has the single model file of other stages. Raises ConfigError if the file of some rank is missing.
    """
    if (folder / "mp_rank_00_model_states.pt").exists():
        return False
    missing = [rank for rank in range(models[0].get("dp_world_size", len(models))) if rank not in models]
    if missing:
        raise ConfigError(f"{folder} lacks zero_pp_rank_{missing[0]}_mp_rank_00_model_states.pt: copy it here")
    return True


def _collect_universal_weights(
    folder: Path, shapes: Sequence[Mapping[str, Sequence[int]]], masters: Mapping[str, Any]
) -> Iterator[tuple[str, Stored]]:
    """Yields (name, tensor) of the trained weights of a universal folder. Raises ConfigError if a weight has no file
    zero/NAME/fp32.pt, or if this file holds no tensor of its size.

    shapes: {name: shape} of each parameter group; weights come in this order
    masters: by name of a weight, the content of zero/NAME/fp32.pt
    """
    for name, shape in itertools.chain.from_iterable(group.items() for group in shapes):
        if name not in masters:
            raise ConfigError(f"{folder} lacks zero/{name}/fp32.pt: copy it here, or run ds_to_universal once more")
        tensor = masters[name].get("param") if isinstance(masters[name], dict) else masters[name]
        if not isinstance(tensor, Stored):
            raise ConfigError(f"{folder}/zero/{name}/fp32.pt holds no tensor: run ds_to_universal once more")
        if tensor.shape != tuple(shape) and tensor.strides is None:
            tensor = tensor._replace(shape=tuple(shape))
        yield name, _require_whole_tensor(folder, name, tensor)


def _collect_frozen_weights(folder: Path, models: Mapping[int, Any], sharded: bool) -> Iterator[tuple[str, Stored]]:
    """Yields (name, tensor) of the frozen weights in the model files. At ZeRO stage 3 (`sharded`) joins the shares of a
    weight from all ranks' files; at other stages takes it from rank 0's file.
    """
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        shares = [models[rank]["frozen_param_fragments"][name] for rank in range(len(models) if sharded else 1)]
        if sharded:
            line = _JoinedFlats(shares)
            spans = tuple(line.locate_elements(0, math.prod(shape)))
            yield name, _require_whole_tensor(folder, name, Stored(line.dtype, tuple(shape), spans))
        else:
            yield name, shares[0]


def _require_whole_tensor(folder: Path, name: str, tensor: Stored) -> Stored:
    """Returns `tensor` unchanged. Raises ConfigError if its bytes in files are more or fewer than its shape needs."""
    actual, expected = sum(span.nbytes for span in tensor.spans), tensor.numel * SIZES[tensor.dtype]
    if actual != expected:
        raise ConfigError(
            f"{folder}: {name} {tensor.shape} takes {expected} bytes, not {actual}: it is damaged, or "
            "written by a version of DeepSpeed that lays out weights in another way"
        )
    return tensor
