"""What is wrong with a recipe, in lines that name the key, what is wrong, and what to write instead."""

import difflib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from dstrain.recipe.section import list_fields

# What other trainers call our keys; names that are close in spelling are found without this table.
_SYNONYMS = {
    "learning_rate": "optimizer.lr",
    "wd": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.clip",
    "gradient_clipping": "optimizer.clip",
    "grad_clip": "optimizer.clip",
    "warmup_steps": "optimizer.warmup",
    "batch_size": "batch.global",
    "global_batch_size": "batch.global",
    "train_batch_size": "batch.global",
    "micro_batch": "batch.micro",
    "train_micro_batch_size_per_gpu": "batch.micro",
    "epochs": "steps",
    "max_steps": "steps",
    "num_steps": "steps",
    "output_dir": "folder",
    "results_dir": "folder",
    "out": "folder",
    "global_seed": "seed",
    "data_path": "data.path",
    "data_dir": "data.path",
    "num_workers": "data.workers",
    "image_size": "data.image_size",
    "ema_rate": "ema.decays",
    "ema_decay": "ema.decays",
    "ckpt": "init_from",
    "log_every": "every.report",
    "ckpt_every": "every.save",
    "save_interval": "every.save",
}


def list_problems(
    error: ValidationError,
    schema: type[BaseModel],
    prefix: str = "",
    overridden: Iterable[str] = (),
    recipe: Path | None = None,
) -> list[str]:
    """Pydantic's errors as lines that name key, value, expectation and origin.

    `overridden`: the keys that the command line gives; all others come from the file `recipe`.
    """
    known = [key for key, _ in list_fields(schema, prefix)]
    lines: list[str] = []
    for item in error.errors():
        key = _join_location(item["loc"], prefix)
        typed = any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in overridden)
        origin = "command line" if typed else recipe
        lines += [
            f"{line} [{origin}]" if origin and not line.startswith(_NAMES_ITS_KEY) else line
            for line in _explain_item(item, key, prefix, known)
        ]
    return [line.removeprefix(_NAMES_ITS_KEY) for line in lines]


_NAMES_ITS_KEY = "\0"  # before a message that a validator of the Run has written whole


def _join_location(location: Iterable[Any], prefix: str) -> str:
    key = prefix
    for part in location:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
    return key


def _explain_item(item: Any, key: str, prefix: str, known: list[str]) -> list[str]:
    """Puts one of pydantic's errors into our words."""
    value = format_value(item["input"])
    match item["type"]:
        case "extra_forbidden":
            siblings = [name for name in known if name.rpartition(".")[0] == key.rpartition(".")[0]]
            meant = suggest_key(key, known) or f"; known here: {', '.join(siblings)}"
            return [f"{key}: there is no such key{meant}"]
        case "value_error" if prefix == "":
            return [_NAMES_ITS_KEY + line for line in str(item["ctx"]["error"]).splitlines()]
        case "value_error":
            return [f"{key}: {item['ctx']['error']}"]
        case "string_pattern_mismatch" if key == "name":
            return [f"{key}={value}: letters, digits and . _ - only, since a folder is named by it"]
        case "no_bool":
            return [f"{key} {item['msg']}: give a number or a name"]
        case "missing":
            return [f"{key} is needed and not given"]
        case "model_type" | "model_attributes_type" | "dict_type":
            entry = next((name for name in known if name.startswith(key + ".")), None)
            example = f"; set single entries, for example {entry}=..." if entry else ""
            return [f"{key}={value} is a value where a section is expected{example}"]
        case _:
            text = item["msg"].removeprefix("Value error, ").replace("Input should", "it should")
            return [f"{key}={value}: {text}"]


def suggest_key(key: str, known: Iterable[str]) -> str:
    """Returns ' (did you mean ...?)' for a key that is unknown among `known` dotted keys, or nothing."""
    known, key = list(known), key.lower().replace("-", "_")
    section, _, leaf = key.rpartition(".")
    meant = [name for name in known if name.rpartition(".")[2] == leaf] or [
        name for name in (_SYNONYMS.get(leaf),) if name in known
    ]
    if not meant:
        siblings = [name for name in known if name.rpartition(".")[0] == section]
        meant = difflib.get_close_matches(key, siblings, 1) or difflib.get_close_matches(key, known, 1, 0.75)
    if not meant:
        leaves = {name.rpartition(".")[2]: name for name in known}
        meant = [leaves[name] for name in difflib.get_close_matches(leaf, leaves, 1)]
    return f" (did you mean {' or '.join(meant[:3])}?)" if meant else ""


def list_nearby(path: Path, pattern: str) -> str:
    """Says what a missing file may have been: the files of its folder, the closest one first."""
    names = sorted(file.name for file in path.parent.glob(pattern)) if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, 1)
    meant = f" (did you mean {path.parent / close[0]}?)" if close else ""
    holds = f"holds {', '.join(names[:12])}" if names else f"has no {pattern}"
    return f"{meant}; {path.parent}/ {holds}"


def list_divisors(number: int) -> str:
    """Lists the divisors of a number as text, for messages: the batch sizes that would work."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    all_of_them = sorted({*small, *(number // d for d in small)})
    return ", ".join(map(str, all_of_them if len(all_of_them) <= 16 else [*all_of_them[:8], "...", *all_of_them[-7:]]))


def format_value(value: Any) -> str:
    """Returns a value as it would be written in an override."""
    if isinstance(value, str):
        value = value.replace("\0", "\\0")
    named = {None: "null", "": "''", True: "true", False: "false"}
    text = named[value] if value is None or (isinstance(value, (bool, str)) and value in named) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
