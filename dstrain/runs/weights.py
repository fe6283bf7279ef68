"""Reads weights to start from: published files, exports and dstrain's own runs. Executes no code from pickled files."""

import argparse
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file, save_file
from torch import Tensor

from dstrain.checkpoint import deepspeed_files, torch_files
from dstrain.checkpoint.fragments import StoredWeight
from dstrain.checkpoint.layout import RECONSTRUCTED
from dstrain.checkpoint.manifest import CONSOLIDATED, find_file_faults
from dstrain.checkpoint.safetensors_io import CHUNK, Files, iterate_converted_bytes, render_safetensors_header
from dstrain.checkpoint.store import Store
from dstrain.checkpoint.validate import require_loadable_checkpoint
from dstrain.disk import owner
from dstrain.disk.modes import apply_umask
from dstrain.disk.small import read_json
from dstrain.distributed import group
from dstrain.engine.checkpoint import read_ema_decays, read_weights
from dstrain.engine.ema import snapshots
from dstrain.recipe import WIDEST, ConfigError, reword_errors
from dstrain.recipe.patterns import is_adapter_weight
from dstrain.systems.base import System

Adapted = dict[str, tuple[dict[str, Tensor], list[str]]]
_INDEX = "model.safetensors.index.json"
_MODEL = "diffusion_pytorch_model"  # what diffusers calls its files
_INDICES = (_INDEX, f"{_MODEL}.safetensors.index.json")


def read_weights_adapted_to_system(path: Path, system: System, parts: Iterable[str] | None = None) -> Adapted:
    """Reads weights from `path` and adapts them to the system's networks. Returns {part: (values by state-dict name,
    notes)}. The notes say what was changed; the first counts what was loaded, replaced and left out.

    path: a run's folder (its newest whole checkpoint; of this the first average, if any), a checkpoint's folder, or a
        consolidated or exported folder. For the first part alone also a folder of diffusers (a network or a pipeline),
        a universal folder of DeepSpeed, or what `read_state_dict` takes.
    parts: the parts to read; None: all. Parts other than the first may be absent from `path`.

    Raises ConfigError, with the remedy, if weights are unreadable or damaged, or do not fit.
    """
    first, *others = (part for part in system.parts if parts is None or part in parts)
    if path.name in (f"{_MODEL}.safetensors", f"{_MODEL}.bin") and (path.parent / "config.json").is_file():
        path = path.parent  # the names in it are those of diffusers
    if (path / "checkpoints").is_dir():
        with protect_checkpoints_while_choosing((path / "checkpoints").glob("step_*[0-9]")) as keep:
            newest = Store(path / "checkpoints", check=require_loadable_checkpoint).find_newest_checkpoint()
            if newest is None:
                raise ConfigError(f"init_from={path}: the run has no whole checkpoint; train it first, or name another")
            path = keep(newest[1])
    elif (path / "manifest.json").exists():
        require_whole_checkpoint(path)
    notes: list[str] = []
    if (path / "manifest.json").exists() and list(path.glob("*-of-*.safetensors")):
        adapted, notes = _read_checkpoint_weights(path, system, first, others)
    elif files := _find_consolidated_parts(path, first, others):
        require_unaltered_files(files.values(), on_all_ranks=True)
        adapted = {part: _adapt_part_weights(system, part, read_state_dict(file), file) for part, file in files.items()}
    elif config_file := _find_diffusers_config(path, system):
        config = read_json(config_file)
        state, notes = system.from_diffusers(read_state_dict(config_file.parent), config)
        adapted = {first: _adapt_part_weights(system, first, state, f"{config_file.parent} ({config['_class_name']})")}
    elif path.is_dir() and deepspeed_files.is_universal_checkpoint(path):
        adapted = {first: _adapt_part_weights(system, first, _read_universal_checkpoint(path), path)}
    else:
        if list(path.glob("*model_states.pt")) or list(path.glob("*/*model_states.pt")):
            raise ConfigError(
                f"init_from={path} holds DeepSpeed's own files: merge them with "
                f"`dstrain consolidate {path} --trust-pickle --out DIR`, and name DIR"
            )
        require_unaltered_files([path], on_all_ranks=True)
        state = read_state_dict(path)
        if not (path.parent / CONSOLIDATED).exists():
            state, notes = system.rename_published(first, state)
        adapted = {first: _adapt_part_weights(system, first, state, path)}
    adapted[first][1].extend(notes)
    adapted[first][1].extend(
        f"{part} is not in {path} and begins anew"
        for part in others
        if part not in adapted and not any(note.startswith(f"{part} lies") for note in notes)
    )
    return adapted


def _read_checkpoint_weights(
    path: Path, system: System, first_part: str, others: list[str]
) -> tuple[Adapted, list[str]]:
    """Reads and adapts the parts of one of dstrain's checkpoints: the first average of each part, or its training
    weights if it has no average. Returns these, and a note on each part that is left out because only DeepSpeed's own
    files hold it. Raises ConfigError if the first part is absent.
    """
    parts = {file.name.rpartition("-of-")[0].rpartition("-")[0] for file in path.glob("*-of-*.safetensors")}
    if first_part not in parts:
        recipe = path.parent.parent / "run.yaml"
        text = recipe.read_text(encoding="utf-8", errors="replace") if recipe.is_file() else ""
        name = re.search(r"^system: *(\w+)", text, re.MULTILINE)
        raise ConfigError(
            f"init_from={path} is of a run of {f'system {name[1]}' if name else 'another system'}, which "
            f"trains {', '.join(sorted(parts))} and no {first_part}; name a run of this recipe's system"
        )
    adapted, notes = {}, []
    for part in (part for part in (first_part, *others) if part in parts):
        kind = choose_raw_or_ema_weights(path, part)
        if part != first_part and kind == "master" and (path / "deepspeed").is_dir():
            notes.append(f"{part} lies in DeepSpeed's own files in {path} and begins anew")
        else:
            adapted[part] = _adapt_part_weights(system, part, read_weights(path, part, kind, load_values=False), path)
    return adapted, notes


def _find_consolidated_parts(path: Path, first_part: str, others: list[str]) -> dict[str, Path]:
    """Returns, by part, the file or folder of weights in a folder that `dstrain consolidate` or `dstrain export` has
    written; {} if the first part is not there. Other parts that are absent are left out.
    """
    if (path / first_part / "model.safetensors").exists() or (path / first_part / _INDEX).exists():
        return {part: path / part for part in (first_part, *others) if part == first_part or (path / part).is_dir()}
    files = {part: path / f"{part}.safetensors" for part in (first_part, *others)}
    return {part: file for part, file in files.items() if file.exists()} if files[first_part].exists() else {}


def require_unaltered_files(paths: Iterable[Path], on_all_ranks: bool = False) -> None:
    """Compares files of a consolidated folder with their recorded hashes. Raises ConfigError if a file was altered or
    the record is damaged. Does nothing if the first path is in no consolidated folder.

    paths: files in the folder, or folders, of which all recorded files are checked
    on_all_ranks: whether all ranks call it: then each rank checks a share of the files, and all raise the same error
    """
    paths = [path.absolute() for path in paths]
    above = (paths[0], *paths[0].parents)[:3]  # a file, its part's folder, all parts' folder
    folder = next((folder for folder in above if (folder / CONSOLIDATED).is_file()), None)
    if folder is None:
        return
    try:
        files = read_json(folder / CONSOLIDATED).get("files", {})
        names = [name for name in files if any((folder / name).is_relative_to(path) for path in paths)]
        share = names[group.rank() % group.world() :: group.world()] if on_all_ranks else names
        wrong = find_file_faults(folder, share, files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        wrong = [f"{CONSOLIDATED} is damaged"]
    wrong = list(dict.fromkeys(chain.from_iterable(group.gather_objects(wrong)))) if on_all_ranks else wrong
    if wrong:
        raise ConfigError(f"weights: {folder} is damaged ({', '.join(wrong)}): copy it again, or consolidate once more")


def _read_universal_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Reads fp32 weights and buffers, by state-dict name, from a folder that DeepSpeed's ds_to_universal has made.
    Executes nothing that is pickled there. Raises ConfigError if a file is damaged.
    """
    merged = deepspeed_files.read_deepspeed_checkpoint(folder, trusted=True, dtype="F32")
    for span, crc in merged.sums.items():
        if torch_files.are_bytes_altered(span, crc):
            raise ConfigError(f"weights: {folder} is damaged ({span.path} is altered): copy it again")
    state, buffer = {}, memoryview(bytearray(CHUNK))
    with Files() as files:
        for entry in merged.entries:
            header = render_safetensors_header(folder, [(entry.name, entry.dtype, entry.source.shape)], {})
            pieces = (bytes(piece) for piece in iterate_converted_bytes(entry, files, buffer))
            state |= load_bytes(b"".join([header, *pieces]))
    return state


def _adapt_part_weights(
    system: System, part: str, state: dict[str, Tensor], origin: object
) -> tuple[dict[str, Tensor], list[str]]:
    """Adapts the weights `state` of a part to its network, by the system's `adapt_weights`. Returns the values by
    state-dict name, and notes; the first note counts the tensors that were loaded, replaced and left out. If `state`
    has no LoRA adapters, leaves them out of the values, so that they keep their initial ones. Raises ConfigError if
    `state` has other adapters than the network.
    """
    adapters = {
        name: value for name, value in system.build_part_on_meta(part).state_dict().items() if is_adapter_weight(name)
    }
    given = {name: tuple(value.shape) for name, value in state.items() if is_adapter_weight(name)}
    if given and given != {name: tuple(value.shape) for name, value in adapters.items()}:
        raise ConfigError(
            f"weights: the file holds other adapters than the network, such as {min(given)} {given[min(given)]}: set "
            "model.lora to what it was made with, or name what dstrain export --format safetensors writes of that run, "
            "which is merged"
        )
    with reword_errors(options={"weights: ": f"weights of {origin}: "}):
        values, notes = system.adapt_weights(part, state | ({} if given else adapters))
    if not given and adapters:
        values = {name: value for name, value in values.items() if name not in adapters}
        notes = [*notes, f"{len(adapters)} tensors of adapters begin anew"]
    before, after = ({_compute_storage_identity(tensor) for tensor in tensors.values()} for tensors in (state, values))
    loaded = sum(_compute_storage_identity(tensor) in before for tensor in values.values())
    left = sum(_compute_storage_identity(tensor) not in after for name, tensor in state.items() if name not in values)
    counts = f"{loaded} tensors loaded, {len(values) - loaded} replaced, {left} left"
    return values, [f"{part}: {counts}, from {origin}", *notes]


def _compute_storage_identity(tensor: Tensor) -> int:
    """Returns a number that is the same for tensors that share their memory, and for the same StoredWeight."""
    return id(tensor) if isinstance(tensor, StoredWeight) else tensor.data_ptr()


def _find_diffusers_config(path: Path, system: System) -> Path | None:
    """Returns the path of the config.json of a diffusers network. `path` is the network's folder or that of a pipeline
    with the network. Returns None if `path` is neither.

    Raises ConfigError if the file is damaged, or if `path` is a pipeline without the network that this system needs.
    """
    inner = path / system.in_pipeline / "config.json"
    for config in (path / "config.json", inner):
        try:
            if config.is_file() and read_json(config).get("_class_name"):
                return config
        except (OSError, ValueError, AttributeError):
            raise ConfigError(f"weights: {config} is damaged: copy it again from where it comes") from None
    if (path / "model_index.json").is_file():
        raise ConfigError(
            f"weights: {path} is a pipeline of diffusers and holds no {inner.relative_to(path)}, which "
            "this system begins from; name the folder of one network"
        )
    return None


def write_part_weights(checkpoint: Path, parts: Iterable[str], ema: float | None, folder: Path) -> None:
    """Writes FOLDER/PART.safetensors of each part of a checkpoint, in one process, and copies the run's run.yaml there
    if it exists. Takes of each part the average `ema` if the checkpoint has it, else the first average, else the
    training weights. Raises ConfigError or OSError if weights cannot be read or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (recipe := checkpoint.parent.parent / "run.yaml").exists():
        shutil.copyfile(recipe, folder / "run.yaml")
    for part in parts:
        kind = choose_raw_or_ema_weights(checkpoint, part, ema if ema in read_ema_decays(checkpoint, part) else None)
        save_file(
            read_weights(checkpoint, part, kind),
            folder / f"{part}.safetensors",
            metadata={"weights": kind, "checkpoint": checkpoint.name},
        )
    apply_umask(folder)


@contextmanager
def protect_checkpoints_while_choosing(candidates: Iterable[Path]) -> Iterator[Callable[[Path], Path]]:
    """Keeps training runs from removing the checkpoint folders `candidates` within the block. Yields a function: called
    with the chosen folder, it returns that folder, and protects it also after the block, until this process ends or
    calls `owner.release_all_holds`. Call it on all ranks; only rank 0 writes.
    """
    held = {path: owner.Hold(path) for path in candidates} if group.rank() == 0 else {}

    def protect_chosen_folder(path: Path) -> Path:
        """Protects the chosen folder from removal also after the block, and returns it."""
        if group.rank() == 0:
            held.pop(path, None) or owner.Hold(path)
        return path

    try:
        yield protect_chosen_folder
    finally:
        for hold in held.values():
            hold.release()


def require_whole_checkpoint(checkpoint: Path) -> Path:
    """Compares a checkpoint's files with their hashes. Returns `checkpoint`, or raises ConfigError if a file is missing
    or damaged.
    """
    if fault := Store(checkpoint.parent, check=require_loadable_checkpoint).find_checkpoint_fault(
        int(checkpoint.name.removeprefix("step_"))
    ):
        raise ConfigError(f"checkpoint {checkpoint} is damaged ({fault}): take another step")
    return checkpoint


def choose_raw_or_ema_weights(path: Path, part: str, ema: float | None = None) -> str:
    """Returns the kind of weights to take of a part of the checkpoint `path`: "ema.DECAY" of the average `ema`, or of
    the first average if `ema` is None. Returns "master" if `ema` is None and the part has no averages. Raises
    ConfigError if the checkpoint lacks the average `ema`.
    """
    decays = read_ema_decays(path, part)
    if ema is not None and ema not in decays:
        raise ConfigError(
            f"{path} holds no EMA of {'width' if ema <= WIDEST else 'decay'} {ema}; it holds "
            f"{', '.join(map(str, decays)) or 'none'}{_describe_available_averages(path.parent.parent, ema)}"
        )
    if ema is None and not decays:
        return "master"
    return f"ema.{decays[0] if ema is None else ema!r}"


def _describe_available_averages(run: Path, ema: float) -> str:
    """Returns the end of an error message about the missing average `ema` of a run: the widths that `dstrain
    reconstruct` has made, and whether it can make this one. Returns "" if it has made none and cannot.
    """
    made = sorted((path.name for path in (run / RECONSTRUCTED).glob("*") if any(path.glob("step_*"))), key=float)
    makes = ema <= WIDEST and any((run / snapshots.FOLDER).glob("step_*"))
    return (f"; reconstructed: {', '.join(made)}" if made else "") + (
        f"; dstrain reconstruct {run} --ema {ema} makes one of its snapshots" if makes else ""
    )


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Reads the state dict in a file, or in the files of a folder, on the CPU. If the file holds an average beside the
    training weights, reads the average. Removes the prefixes of DataParallel and torch.compile from the names.

    Executes nothing in pickled files. Raises ConfigError if a file is missing or damaged, holds other objects than
    tensors and plain values, or holds no state dict.
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if path.is_dir() and not files:
        files = sorted(path.glob("prior/*.safetensors"))  # diffusers' folder of all that a prior is
    if (plain := path / f"{_MODEL}.safetensors") in files:  # beside it in other precisions
        files = [file for file in files if file == plain or not file.name.startswith(f"{_MODEL}.")]
    elif not files and (path / f"{_MODEL}.bin").exists():
        files = [path := path / f"{_MODEL}.bin"]
    for index in (path / name for name in _INDICES):
        if index.exists():
            files = _list_weights_files_in_index(index)
    if not files or not all(file.is_file() for file in files):
        absent = next((file for file in files if file.parent == path and not file.is_file()), path)
        raise ConfigError(f"weights: there is no file {absent} (.safetensors or .pt), nor a folder with *.safetensors")
    if all(file.suffix == ".safetensors" for file in files):
        state: dict[str, Tensor] = {}
        for file in files:
            try:
                state |= load_file(file)
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"weights: {file} is no safetensors file ({error}): fetch it again") from error
        return _strip_name_prefixes(state, path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # train.py keeps its arguments in the file
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_memory_mappable(path))
    except Exception as error:  # the restricted unpickler meets hostile bytes: it may raise anything
        raise ConfigError(
            f"weights: {path} is no weights file, damaged, or holds more than tensors and plain values "
            f"({type(error).__name__}), and was not loaded, nor anything in it run; convert it to "
            "safetensors where it comes from"
        ) from None
    if isinstance(content, dict):
        # An empty "ema" is no average. DALLE-pytorch's key is "weights"; DALLE2-pytorch's average is "ema_model".
        # JiT's averages are model_ema1 and model_ema2, of which it publishes the figures of the first. PixArt's keys
        # are the last two.
        inner = map(content.get, ("ema_model", "ema", "model_ema1", "model", "weights", "state_dict_ema", "state_dict"))
        content = next((state for state in inner if isinstance(state, dict) and state), content)
    return _strip_name_prefixes(content, path)


def _is_memory_mappable(path: Path) -> bool:
    """Returns whether torch can map a weights file into memory: it must be a zip archive without compression, as
    torch.save writes it today.
    """
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return all(member.compress_type == zipfile.ZIP_STORED for member in archive.infolist())


def _list_weights_files_in_index(index: Path) -> list[Path]:
    """Returns the paths of the weights files that the JSON index `index` names, each once and sorted. Raises
    ConfigError if the index is damaged.
    """
    try:
        names = read_json(index)["weight_map"].values()
        return [index.parent / name for name in sorted({Path(name).name for name in names})]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"weights: {index} is damaged: copy it again from where it comes") from None


def _strip_name_prefixes(state: object, path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a state dict without the prefixes that DataParallel and torch.compile put before names.
    Raises ConfigError if `state` is no state dict.
    """
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(
            f"weights: {path} holds no state dict (name -> tensor), nor one under 'ema', 'model' or "
            "'weights'; save the network's state_dict() there"
        )
    return {re.sub(r"^(module\.|_orig_mod\.)+", "", name): value for name, value in state.items()}
