"""Checks what the small files of a checkpoint hold. The hashes of its manifest prove only that files are unchanged, and
any program can write a manifest.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, FiniteFloat, NonNegativeInt, TypeAdapter, ValidationError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dstrain.checkpoint.layout import COMMON, make_shard_file_name
from dstrain.checkpoint.manifest import NAME, read_manifest
from dstrain.disk.modes import apply_umask
from dstrain.recipe import ConfigError

Common = tuple[dict[str, Tensor], dict[str, dict[str, Any]]]  # small tensors by name, the counters of each part


class _Averages(BaseModel):
    """Counters of a part's averages by width: their widths, the step at which they began, the part's updates since."""

    widths: list[float]
    began: NonNegativeInt
    updates: NonNegativeInt


class _Counters(BaseModel):
    """The counters of one part in common.safetensors."""

    updates: NonNegativeInt
    skipped: NonNegativeInt
    stage: NonNegativeInt
    scaler: dict[str, float | bool | None]
    averages: _Averages | None = None


class State(BaseModel):
    """The record of skipped steps, rollbacks and recent losses in a checkpoint's manifest (engine/recovery.py)."""

    skipped: NonNegativeInt = 0  # steps that were not applied
    in_a_row: NonNegativeInt = 0  # of these the latest
    shift: NonNegativeInt = 0  # step s learns from batch s + shift
    rollbacks: list[tuple[NonNegativeInt, NonNegativeInt]] = []  # steps done, step of the checkpoint gone back to
    forgiven: NonNegativeInt = 0  # of these: before a user changed the run
    losses: dict[str, list[FiniteFloat]] = {}  # by part, of the last WINDOW steps; with faults.spike only
    high: tuple[NonNegativeInt, str] | None = None  # the latest step, if a loss of it was too high, and which

    @property
    def has_no_trouble(self) -> bool:
        """Returns whether the latest step was applied and its losses were not too high."""
        return not self.in_a_row and self.high is None


def parse_recovery_state(saved: Any) -> State:
    """Returns the record of skipped steps and rollbacks from the manifest's entry "course". Raises ConfigError if it is
    malformed.
    """
    try:
        return State.model_validate(saved)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise ConfigError(f"its course is malformed: {where}: {error.errors()[0]['msg']}") from None


def read_part_counters(path: Path) -> dict[str, dict[str, Any]]:
    """Returns {part: counters} from the metadata of common.safetensors in a checkpoint folder: for example how many
    updates were made and skipped. Raises ConfigError if the counters are missing or malformed.
    """
    with safe_open(path / COMMON, "pt") as file:
        values = json.loads((file.metadata() or {}).get("counters", "null"))
    try:
        TypeAdapter(dict[str, _Counters]).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("counters", *first["loc"])))
        raise ConfigError(f"{COMMON} is malformed: {where}: {first['msg']}") from None
    return values


def read_recovery_state(path: Path) -> State:
    """Returns the record of skipped steps and rollbacks of a checkpoint folder, from its manifest. Raises ConfigError
    if the manifest, the record or the counters are malformed.

    Earlier versions wrote no record. Then the number of skipped steps is the largest among the parts' counters, and
    other fields have their defaults.
    """
    skipped = max((part["skipped"] for part in read_part_counters(path).values()), default=0)
    return parse_recovery_state(read_manifest(path)["extra"].get("course", {"skipped": skipped}))


def write_common_tensors_and_counters(folder: Path, common: Common) -> None:
    """Writes common.safetensors into a folder: small tensors, and the counters of each part as metadata. Call it on one
    rank only.
    """
    tensors, by_part = common
    save_file(tensors, folder / COMMON, metadata={"counters": json.dumps(by_part)})
    apply_umask(folder / COMMON)


def require_loadable_checkpoint(path: Path) -> None:
    """Raises ConfigError if a checkpoint whose hashes agree cannot be loaded all the same: if its recovery state or
    counters are malformed, or if its manifest does not list a file that loading would read.
    """
    read_recovery_state(path)
    body, parts = read_manifest(path), list(read_part_counters(path))
    required = {
        COMMON,
        *(make_shard_file_name(part, rank, body["world"]) for part in parts for rank in range(body["world"])),
    }
    present = [*path.glob("*.safetensors"), *(file for part in parts for file in (path / "deepspeed" / part).glob("*"))]
    names = {file.relative_to(path).as_posix() for file in present if not file.is_dir()}
    if unlisted := sorted((required | names) - body["files"].keys()):
        raise ConfigError(f"{unlisted[0]} is not in {NAME}")


def select_and_strip_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the tensors whose names begin with `prefix`, under their names without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def require_same_shapes(path: Path, part: str, saved: dict[str, tuple], expected: dict[str, tuple]) -> None:
    """Raises ConfigError if the `saved` and the `expected` {name: shape} of a part's tensors differ. path: the
    checkpoint, for the message.
    """
    for name in [*expected, *saved]:
        if saved.get(name) != expected.get(name):
            raise ConfigError(
                f"{path} does not fit this {part}: {name} is {saved.get(name, 'absent')} there and "
                f"{expected.get(name, 'absent')} here; set the model section as it was, or begin anew "
                "with --from-scratch"
            )
