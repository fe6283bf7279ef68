"""Merges a checkpoint's sharded weights into safetensors files in Hugging Face's layout, by streaming.

    a run, a checkpoint    dstrain's named fragments: the training weights or an average; nothing is pickled
    anything else          DeepSpeed's own ZeRO-1/2/3 checkpoint, see checkpoint/deepspeed_files.py; also the training
                           weights of dstrain's checkpoints with save.format=deepspeed

Memory holds one buffer of 256 kB of the weights, or one tensor if DeepSpeed has not stored it in row-major order.
Neither torch nor DeepSpeed is imported, and there is no process group. A tied weight is written under each of its
names, as readers with strict loading need it; dstrain's own networks tie none.

Output: model.safetensors, or model-00001-of-0000N.safetensors and model.safetensors.index.json, with a folder for each
part if there are several; recipe.yaml, as the run resolved it; consolidated.json, which describes the rest.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstrain import __version__
from dstrain.checkpoint import deepspeed_files, layout, safetensors_io, torch_files
from dstrain.checkpoint.layout import COMMON, SHARD
from dstrain.checkpoint.manifest import CONSOLIDATED, NAME, find_file_faults, read_manifest
from dstrain.checkpoint.safetensors_io import Entry
from dstrain.commands.options.consolidate import DTYPES, Order
from dstrain.disk import atomic, small
from dstrain.disk.owner import Hold
from dstrain.distributed.launcher import read_rank_and_world
from dstrain.distributed.progress import Bar
from dstrain.recipe import ConfigError

Update = Callable[[int], Any]  # as tqdm.update: called with the bytes done since the last call
_STEP = re.compile(r"step_(\d{8,})")


@dataclass
class Plan:
    """Describes what a consolidation writes, and how the source is verified before anything is written."""

    parts: dict[str, list[Entry]]  # the name is "" for DeepSpeed's one network
    weights: dict[str, str]  # part: raw or ema:DECAY
    facts: dict[str, Any]  # for consolidated.json
    tied: dict[str, dict[str, str]] = field(default_factory=dict)
    recipe: Path | None = None
    verify: Callable[[Update], None] = lambda _: None  # reads the source, checks hashes
    to_verify: int = 0  # bytes

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all tensors that are written."""
        return sum(entry.nbytes for entries in self.parts.values() for entry in entries)


def run_verb(order: Order) -> None:
    """Consolidates the checkpoint that the options name, and prints what was written. On SIGTERM removes half-written
    files and ends with exit code 143. Raises ConfigError if nothing can be written.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that half a folder is removed
    bars = []

    def start_progress_bar(total: int) -> Update:
        """Opens a progress bar for `total` bytes, and returns the function that advances it."""
        bars.append(Bar("verifying and writing bytes", total=total, unit="B", unit_scale=True, desc="verify, write"))
        return bars[0].update

    try:
        done = consolidate_weights(order, start_progress_bar)
    except OSError as error:
        raise ConfigError(str(error)) from None
    finally:
        for bar in bars:
            bar.close()
    for part, entries in done.parts.items():
        name = f"{part} " if part else ""
        tied = f", {len(done.tied[part])} of them tied" if done.tied.get(part) else ""
        print(
            f"{name}{done.weights[part]} of step {done.facts['step']}: {len(entries)} tensors{tied}, "
            f"{sum(entry.nbytes for entry in entries) / 1e6:.1f} MB"
        )
    left = done.facts.get("left_out")
    print(f"in {order.out}" + (f"; left out, for they are no tensors: {', '.join(left)}" if left else ""))


def consolidate_weights(order: Order, start_progress_bar: Callable[[int], Update] | None = None) -> Plan:
    """Writes the merged weights to order.out, whole or not at all, and returns the plan that was carried out.

    start_progress_bar: called once with the number of bytes to verify and write; returns a function that is called with
        the number of bytes done since its last call. None: no progress is shown.

    Raises ConfigError if there are several processes, if the source is missing, damaged or cannot be merged, or if the
    folder order.out exists already or does not fit on the disk.
    """
    if read_rank_and_world().world > 1:
        raise ConfigError("a consolidation takes one process: dstrain consolidate ...")
    if order.out.exists() or order.out.is_symlink():
        raise ConfigError(f"--out {order.out} is there already: name a new folder")
    plan = plan_consolidation(order)
    update = start_progress_bar(plan.to_verify + plan.nbytes) if start_progress_bar else lambda _: None
    try:
        with atomic.create_folder_atomically(order.out) as folder:
            _write_planned_files(order, plan, folder, update)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ConfigError(
                f"--out {order.out} does not fit on its disk ({error.strerror}), and nothing was left "
                "there: make room, or name a folder elsewhere"
            ) from None
        raise ConfigError(f"--out {order.out} was not written: {error}; if it cannot be, name another folder") from None
    return plan


def _write_planned_files(order: Order, plan: Plan, out: Path, update: Update) -> None:
    """Verifies the source, then writes weights, recipe.yaml and consolidated.json into the folder `out`. Calls `update`
    with the number of bytes done since the last call. Raises OSError if the disk has too little room, ConfigError if
    the source is damaged.
    """
    free = shutil.disk_usage(out).free
    if free < plan.nbytes:
        raise OSError(errno.ENOSPC, f"{plan.nbytes / 1e9:.3g} GB are needed, {free / 1e9:.3g} GB free")
    plan.verify(update)
    files: dict[str, dict[str, Any]] = {}
    for part, entries in plan.parts.items():
        metadata = {"weights": plan.weights[part], "step": str(plan.facts["step"])}
        metadata |= {"part": part} if part else {}
        folder = out / part if len(plan.parts) > 1 else out
        written = safetensors_io.write_huggingface_model(folder, entries, order.shard_size, metadata, update)
        files |= {path.relative_to(out).as_posix(): entry for path, entry in written.items()}
    if plan.recipe:
        (out / "recipe.yaml").write_bytes(small.read_bytes(plan.recipe, small.MEGABYTE))
    description = json.dumps({**_describe_consolidation(order, plan), "files": files}, indent=2)
    (out / CONSOLIDATED).write_text(description + "\n", encoding="utf-8")


def plan_consolidation(order: Order) -> Plan:
    """Plans the consolidation that the options ask for. Reads only the headers of files. Raises ConfigError if the
    source is missing or damaged, or holds nothing that fits the options.
    """
    source = order.source
    if not source.is_dir():
        raise ConfigError(f"{source} is not a folder: name a run's, a checkpoint's, or one of DeepSpeed's")
    checkpoint = _find_reconstructed_average(order) or _find_checkpoint(source, order.step)
    if checkpoint is None:
        folder = deepspeed_files.find_tag_folder(source, order.tag)
        if folder is None:
            raise ConfigError(
                f"{source} holds no checkpoint: neither a run's (run.yaml, checkpoints/) nor DeepSpeed's "
                "(*_model_states.pt)"
            )
        return _plan_consolidation_of_deepspeed_checkpoint(order, folder)
    if order.tag is not None:
        raise ConfigError(
            f"--tag {order.tag} names one of DeepSpeed's checkpoints, and {source} is dstrain's: leave "
            "it out, or choose with --step"
        )
    Hold(checkpoint)
    return _plan_consolidation_of_dstrain_checkpoint(order, checkpoint)


def _find_checkpoint(source: Path, step: int | None) -> Path | None:
    """Returns the folder of dstrain's checkpoint at `step`, or of the newest if `step` is None. `source` is a run's
    folder, a folder of checkpoints, or a single checkpoint. Returns None if `source` is none of these.

    Raises ConfigError if there is no checkpoint at `step`, or if the run has none yet.
    """
    if (source / NAME).exists() or (source / COMMON).exists():
        match = _STEP.fullmatch(source.name)
        if step not in (None, int(match[1]) if match else None):
            raise ConfigError(f"--step {step}: {source} is one checkpoint, of another step; name the run's folder")
        return source
    steps = _find_checkpoints_by_step(source / "checkpoints") or _find_checkpoints_by_step(source)
    if not steps and (source / "run.yaml").exists():
        raise ConfigError(f"{source} holds no checkpoint yet: train first")
    if not steps:
        return None
    if step is not None and step not in steps:
        raise ConfigError(f"--step {step}: {source} holds none of that step, but {', '.join(map(str, steps))}")
    return steps[max(steps) if step is None else step]


def _find_reconstructed_average(order: Order) -> Path | None:
    """Returns the folder in which `dstrain reconstruct` has written the average that --weights ema:WIDTH asks for.
    Returns None if --weights gives no number, if the run's own checkpoint holds that average, or if it was never
    written.
    """
    try:
        width = float((order.weights or "").partition(":")[2])
    except ValueError:
        return None
    steps = _find_checkpoints_by_step(order.source / "checkpoints")
    own = steps.get(max(steps, default=0) if order.step is None else order.step)
    return layout.find_reconstructed_average(order.source, width, order.step, own)


def _find_checkpoints_by_step(store: Path) -> dict[int, Path]:
    """Returns {step: folder} of dstrain's checkpoints in `store`, ascending. Leaves out DeepSpeed's own checkpoints,
    whose names may look the same.
    """
    paths = sorted(store.iterdir()) if store.is_dir() else []
    return {
        int(match[1]): path
        for path in paths
        if (match := _STEP.fullmatch(path.name)) and path.is_dir() and not deepspeed_files.list_deepspeed_files(path)
    }


def _plan_consolidation_of_dstrain_checkpoint(order: Order, checkpoint: Path) -> Plan:
    """Plans the consolidation of a checkpoint that dstrain has written. Raises ConfigError if the checkpoint is
    damaged, or lacks the part or the average that the options name.
    """
    try:
        body = read_manifest(checkpoint)
    except ConfigError as error:
        raise layout.make_damage_error(checkpoint, str(error)) from None
    files: dict[str, dict] = body["files"]
    parts = sorted({match[1] for name in files if (match := SHARD.fullmatch(name))})
    if order.part is not None and order.part not in parts:
        raise ConfigError(f"--part {order.part}: {checkpoint} holds {', '.join(parts)}")
    above = checkpoint.parent.parent, checkpoint.parent, checkpoint.parent.parent.parent  # the last: reconstructed
    recipe = next((folder / "run.yaml" for folder in above if (folder / "run.yaml").exists()), None)
    plan = Plan({}, {}, _describe_checkpoint(checkpoint, body, recipe), recipe=recipe)
    parts = [order.part] if order.part else parts
    fragments_of = {part: layout.Fragments(checkpoint, part, files) for part in parts}
    decays = {part: fragments.list_average_decays() for part, fragments in fragments_of.items()}
    used = {COMMON}
    for part, fragments in fragments_of.items():
        kind = _choose_raw_or_ema_weights(order, checkpoint, part, decays)
        native = checkpoint / "deepspeed" / part  # with save.format=deepspeed the training weights are there
        if kind == "master" and kind not in fragments.pieces:
            if not native.is_dir():
                raise layout.make_damage_error(checkpoint, f"deepspeed/{part}/, which holds its weights, is missing")
            used |= {name for name in files if name.startswith(f"deepspeed/{part}/")}
            merged = deepspeed_files.read_deepspeed_checkpoint(native, order.trust_pickle, DTYPES[order.dtype])
            plan.parts[part], plan.tied[part] = merged.entries, merged.tied
        else:
            used |= set(fragments.files)
            entries = [Entry(name, tensor, DTYPES[order.dtype]) for name, tensor in fragments.iterate_tensors(kind)]
            plan.parts[part] = entries + list(layout.iterate_buffers(checkpoint, part))
        plan.weights[part] = "raw" if kind == "master" else kind.replace("ema.", "ema:", 1)
    plan.to_verify = sum(files[name]["size"] for name in used)

    def verify_hashes(update: Update) -> None:
        """Compares the files that the plan reads with their hashes in the manifest. Raises ConfigError for the first
        file that differs. Calls `update` with the size of each file.
        """
        for name in sorted(used):
            if problems := find_file_faults(checkpoint, [name], files):
                raise layout.make_damage_error(checkpoint, problems[0])
            update(files[name]["size"])

    plan.verify = verify_hashes
    return plan


def _describe_checkpoint(checkpoint: Path, manifest: dict, recipe: Path | None) -> dict[str, Any]:
    """Returns the entries of consolidated.json that describe a checkpoint: step, seed, system, data, versions and more.
    Entries from the run's recipe or data.txt are None if that file is missing. Raises ConfigError if recipe or data.txt
    is damaged.
    """
    import yaml

    run = _parse_file_if_present(recipe, yaml.safe_load)
    run = run if isinstance(run, dict) else {}
    return {
        "step": manifest["step"],
        "seed": run.get("seed"),
        "system": run.get("system"),
        "run": run.get("name"),
        "world": manifest["world"],
        "versions": manifest["versions"],
        "score": manifest["extra"].get("score"),
        "data": _parse_file_if_present(recipe and recipe.with_name("data.txt"), str.strip),
        "checkpoint": hashlib.blake2b((checkpoint / NAME).read_bytes(), digest_size=32).hexdigest(),
    }


def _choose_raw_or_ema_weights(order: Order, checkpoint: Path, part: str, decays: dict[str, list[float]]) -> str:
    """Returns the kind of weights that --weights chooses for `part`: "master" (the training weights) for raw, else
    "ema.DECAY". Without a number in --weights, DECAY is that of the part's first average. A part without averages has
    "master". `decays` has the decays of the averages of each part.

    Raises ConfigError if --weights asks for an average and no part has one, or if the averages of `part` have other
    decays.
    """
    weights, _, text = (order.weights or "").partition(":")
    if weights == "raw":
        return "master"
    if weights and not any(decays.values()):
        raise ConfigError(
            f"--weights {order.weights}: {checkpoint} holds no average of {', '.join(decays)}: take --weights raw"
        )
    own = decays[part]
    try:
        decay = float(text) if text else (own or [math.nan])[0]
    except ValueError:
        raise ConfigError(f"--weights {order.weights}: {text} is no decay; write ema:0.9999") from None
    if own and text and decay not in own:
        raise ConfigError(
            f"--weights {order.weights}: {checkpoint} holds no average of {part} of that decay; it holds "
            f"{', '.join(f'ema:{d!r}' for d in own)}, and raw"
        )
    return f"ema.{decay!r}" if own else "master"


def _parse_file_if_present(path: Path | None, parse: Callable[[str], Any]) -> Any:
    """Returns what `parse` makes of a file's text, or None if there is no such file. Raises ConfigError if the file is
    a link, is larger than 1 MB, or cannot be read or parsed.
    """
    if path is None or not os.path.lexists(path):
        return None
    import yaml

    try:
        if path.is_symlink():
            raise OSError("it is a link, which is not followed")
        return parse(small.read_text(path, small.MEGABYTE))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        reason = str(getattr(error, "problem", None) or getattr(error, "strerror", None) or error)
        reason = "no UTF-8" if isinstance(error, UnicodeDecodeError) else reason
        raise ConfigError(f"{path} is damaged ({' '.join(reason.split())}): restore it, or move it away") from None


def _plan_consolidation_of_deepspeed_checkpoint(order: Order, folder: Path) -> Plan:
    """Plans the consolidation of a checkpoint that DeepSpeed itself has written. Raises ConfigError if it cannot be
    read, or if the options name a part, a step or an average, which such a checkpoint does not have.
    """
    for option, value, reason in (("--part", order.part, "one network"), ("--step", order.step, "tags: give --tag")):
        if value is not None:
            raise ConfigError(f"{option} {value}: {folder} is DeepSpeed's own checkpoint, which knows {reason}")
    if order.weights not in (None, "raw"):
        raise ConfigError(
            f"--weights {order.weights}: {folder} is DeepSpeed's own checkpoint, which holds no "
            "averages: take --weights raw"
        )
    merged = deepspeed_files.read_deepspeed_checkpoint(folder, order.trust_pickle, DTYPES[order.dtype])
    facts = {"seed": None, **merged.facts, "tag": folder.name}

    def verify_checksums(update: Update) -> None:
        """Compares the bytes of the source with their CRC-32. Raises ConfigError for the first altered file."""
        for span, crc in merged.sums.items():
            if torch_files.are_bytes_altered(span, crc):
                raise ConfigError(f"checkpoint {folder} is damaged ({span.path.name} is altered): take another --tag")
            update(span.nbytes)

    return Plan(
        {"": merged.entries},
        {"": "raw"},
        facts,
        {"": merged.tied},
        verify=verify_checksums,
        to_verify=sum(span.nbytes for span in merged.sums),
    )


def _describe_consolidation(order: Order, plan: Plan) -> dict[str, Any]:
    """Returns the content of consolidated.json, except the list of files."""
    parts = {
        part or "model": {
            "weights": plan.weights[part],
            "tensors": len(entries),
            "parameters": sum(entry.source.numel for entry in entries),
            "bytes": sum(entry.nbytes for entry in entries),
            "tied": plan.tied.get(part, {}),
        }
        for part, entries in plan.parts.items()
    }
    return {
        "written_by": f"dstrain {__version__}",
        "source": order.source.name,
        "dtype": order.dtype,
        "parts": parts,
        **plan.facts,
    }
