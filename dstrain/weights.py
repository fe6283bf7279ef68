"""Weights to start from: published files, exports and dstrain's own runs, read without running what is in them."""

import argparse
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dstrain.engine.checkpoint import ema_decays, read_weights
from dstrain.engine.store import Store
from dstrain.systems.base import System

Adapted = dict[str, tuple[dict[str, Tensor], list[str]]]


def fitted(path: Path, system: System) -> Adapted:
    """Weights in `path` as the system's networks take them: {part: (values by state-dict name, what was changed)}.

    `path` is a run's folder (its newest whole checkpoint; the first EMA where there is one), a checkpoint's folder, or
    a file as `read` takes, for the first part. Other parts may be absent from either: an adversary may join later.
    ValueError: unreadable, or it does not fit, with the remedy.
    """
    if (path / "checkpoints").is_dir():
        newest = Store(path / "checkpoints").newest()
        if newest is None:
            raise ValueError(f"init_from={path}: the run has no whole checkpoint; train it first, or name another")
        path = newest[1]
    elif (path / "manifest.json").exists():
        whole(path)
    if not list(path.glob("*-of-*.safetensors")) or not (path / "manifest.json").exists():
        part = next(iter(system.parts))
        return {part: system.adapt(part, read(path))}
    first, *others = system.parts
    there = [first, *(part for part in others if list(path.glob(f"{part}-*-of-*.safetensors")))]
    found = {part: system.adapt(part, read_weights(path, part, checkpoint_kind(path, part))) for part in there}
    found[first][1].extend(f"{part} is not in {path} and begins anew" for part in others if part not in there)
    return found


def write_parts(checkpoint: Path, parts: Iterable[str], ema: float | None, folder: Path) -> None:
    """FOLDER/PART.safetensors of each part of a checkpoint, in one process: the average asked for, else the first,
    else the training weights; beside them the run's recipe. ValueError, OSError: not there, or not to be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (said := checkpoint.parent.parent / "run.yaml").exists():
        shutil.copyfile(said, folder / "run.yaml")
    for part in parts:
        kind = checkpoint_kind(checkpoint, part, ema if ema in ema_decays(checkpoint, part) else None)
        save_file(read_weights(checkpoint, part, kind), folder / f"{part}.safetensors",
                  metadata={"weights": kind, "checkpoint": checkpoint.name})


def whole(checkpoint: Path) -> Path:
    """The folder of one checkpoint, if every file of it matches its hash. ValueError names what does not."""
    fault = Store(checkpoint.parent).fault(int(checkpoint.name.removeprefix("step_")))
    if fault:
        raise ValueError(f"checkpoint {checkpoint} is damaged ({fault}): take another step")
    return checkpoint


def checkpoint_kind(path: Path, part: str, ema: float | None = None) -> str:
    """The kind of weights to take from a checkpoint: the EMA asked for, else its first, else the weights."""
    decays = ema_decays(path, part)
    if ema is not None and ema not in decays:
        raise ValueError(f"{path} holds no EMA of decay {ema}; it holds {', '.join(map(str, decays)) or 'none'}")
    if ema is None and not decays:
        return "master"
    return f"ema.{decays[0] if ema is None else ema!r}"


def read(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a file or folder, on the CPU.

    Pickled files are read by torch's restricted unpickler: nothing in them is executed. Raises ValueError for a file
    that is missing, damaged, holds other objects than tensors and plain values, or no state dict.
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if path.is_dir() and not files:
        files = sorted(path.glob("prior/*.safetensors"))                 # diffusers' folder of all that a prior is
    if not files or not all(file.is_file() for file in files):
        raise ValueError(f"weights: there is no file {path} (.safetensors or .pt), nor a folder with *.safetensors")
    if all(file.suffix == ".safetensors" for file in files):
        state: dict[str, Tensor] = {}
        for file in files:
            try:
                state |= load_file(file)
            except (SafetensorError, OSError) as error:
                raise ValueError(f"weights: {file} is not a readable safetensors file ({error}); fetch it "
                                 "again") from error
        return _named(state, path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):     # train.py keeps its arguments in the file
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:              # the restricted unpickler meets hostile bytes: it may raise anything
        raise ValueError(f"weights: {path} is no weights file, damaged, or holds more than tensors and plain values "
                         f"({type(error).__name__}), and was not loaded, nor anything in it run; convert it to "
                         "safetensors where it comes from") from None
    if isinstance(content, dict):
        # An empty EMA is none. DALLE-pytorch calls them weights.
        inner = (content.get(name) for name in ("ema", "model", "weights"))
        content = next((state for state in inner if isinstance(state, dict) and state), content)
    return _named(content, path)


def _named(state: object, path: Path) -> dict[str, Tensor]:
    """Weights under their own names, without the prefixes of wrappers."""
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"weights: {path} holds no state dict (name -> tensor), nor one under 'ema', 'model' or "
                         "'weights'; save the network's state_dict() there")
    return {re.sub(r"^(module\.|_orig_mod\.)+", "", name): value for name, value in state.items()}
