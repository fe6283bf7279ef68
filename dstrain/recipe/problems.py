"""Explains what is wrong with a recipe, in lines that name the key, the fault, and what to write instead."""

import difflib
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from dstrain.recipe.section import iterate_fields
from dstrain.recipe.trust import is_in_run_or_export

# Names that other trainers use -> our keys. Names that are similar in spelling are found without this table.
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
    "sequence_parallel_size": "parallel.sequence",
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
    """Converts pydantic's errors to lines for the user. Each names the key, its value, what the value should be, and,
    in brackets, where it was given.

    schema: the class that was validated
    prefix: the dotted key of the section that the class describes; "": the whole recipe
    overridden: the keys that the command line sets
    recipe: the file that gives all other keys; None: say nothing of where those were given
    """
    known = [key for key, _ in iterate_fields(schema, prefix)]
    lines: list[str] = []
    for item in _merge_type_errors(error.errors()):
        key = _make_dotted_key(item["loc"], prefix)
        typed = any(_is_same_or_below(key, name) or _is_same_or_below(name, key) for name in overridden)
        origin = "command line" if typed else recipe
        if item["type"] == "extra_forbidden" and recipe and not typed and is_in_run_or_export(recipe):
            lines.append(f"{key}: there is no such key [{recipe}]; {OTHER_VERSION}")
            continue
        lines += [
            f"{line} [{origin}]" if origin and not line.startswith(_NAMES_ITS_KEY) else line
            for line in _describe_problem(item, key, prefix, known)
        ]
    return [line.removeprefix(_NAMES_ITS_KEY) for line in lines]


_MANY_CHOICES, _NEAR_CHOICES = 12, 8  # if there are more names than the first, the second says how many are listed
_NAMES_ITS_KEY = "\0"  # stands before a message that names its key itself, since a validator of the Run has written it


OTHER_VERSION = "another version of dstrain or of the system has written it: take that one, see events.jsonl beside it"


# The words that pydantic adds to the location of an error for each type that it has tried: they are no keys.
_TRIED = re.compile(r"bool|int|float|str|\[key\]|(constrained|function|lax|literal|list|tuple|dict|nullable)\W.*")


def _merge_type_errors(errors: Iterable[Any]) -> list[Any]:
    """Returns pydantic's errors, at most one for each value. Where a value may have several types, pydantic reports an
    error for each type; these become one.
    """
    merged: list[Any] = []
    for item in errors:
        whole = item["loc"]
        tried = next((i for i, part in enumerate(whole) if isinstance(part, str) and _TRIED.fullmatch(part)), None)
        location = whole[:tried]
        if tried is not None and merged and merged[-1]["loc"] == location:
            of_entry = any(isinstance(part, int) for part in whole[tried:])
            wanted = "a list of such values" if of_entry else item["msg"].removeprefix("Input should be ")
            if item["type"] == "tuple_type":
                wanted = "a list"
            elif item["type"] in ("too_long", "too_short"):
                wanted = "a list of another length"
            if not merged[-1]["msg"].endswith(f", or {wanted}"):  # each entry of a list has an error of its own
                merged[-1]["msg"] = f"{merged[-1]['msg'].partition(', unable')[0]}, or {wanted}"
        else:
            merged.append({**item, "loc": location})
    return merged


def _is_same_or_below(key: str, section: str) -> bool:
    """Returns whether a dotted key is `section` itself or lies below it."""
    return key == section or key.startswith((f"{section}.", f"{section}["))


def _make_dotted_key(location: Iterable[Any], prefix: str) -> str:
    """Returns a pydantic location as a dotted key: with the prefix "data", ("mixture", 0, "path") becomes
    "data.mixture[0].path".
    """
    key = prefix
    for part in location:
        key += f"[{part}]" if isinstance(part, int) else f".{part}"
    return key.removeprefix(".")


def _describe_problem(error: Any, key: str, prefix: str, known: list[str]) -> list[str]:
    """Returns the lines that describe one of pydantic's errors, about the dotted `key`. `known` are all keys of the
    schema, for suggestions.
    """
    value = format_value(error["input"])
    match error["type"]:
        case "extra_forbidden":
            siblings = [name for name in known if name.rpartition(".")[0] == key.rpartition(".")[0]]
            meant = suggest_key(key, known) or f"; known here: {', '.join(siblings)}"
            return [f"{key}: there is no such key{meant}"]
        case "value_error" if prefix == "":
            return [_NAMES_ITS_KEY + line for line in str(error["ctx"]["error"]).splitlines()]
        case "value_error":
            return [f"{key}: {error['ctx']['error']}"]
        case "string_pattern_mismatch" if key == "name":
            return [f"{key}={value}: letters, digits and . _ - only, since a folder is named by it"]
        case "no_bool":
            return [f"{key} {error['msg']}: give a number or a name"]
        case "literal_error" if len(choices := re.findall(r"'([^']+)'", error["ctx"]["expected"])) > _MANY_CHOICES:
            near = difflib.get_close_matches(str(error["input"]), choices, _NEAR_CHOICES, 0.0)
            return [f"{key}={value}: it should be one of {len(choices)} names, such as {', '.join(near)}"]
        case "missing":
            return [f"{key} is needed and not given"]
        case "model_type" | "model_attributes_type" | "dict_type":
            entry = next((name for name in known if name.startswith(key + ".")), None)
            example = f"; set single entries, for example {entry}=..." if entry else ""
            return [f"{key}={value} is a value where a section is expected{example}"]
        case "tuple_type" | "list_type":
            example = "" if error["input"] in (None, "") else f", such as {key}=[{value}]"
            return [f"{key}={value}: it should be a list{example}"]
        case "too_long" if "max_length" in error["ctx"]:
            return [f"{key}={value}: it should have {error['ctx']['max_length']} entries at most"]
        case "too_short":
            return [f"{key}={value}: it should have {error['ctx']['min_length']} entries or more"]
        case _:
            text = error["msg"].removeprefix("Value error, ").replace("Input should", "it should")
            return [f"{key}={value}: {text}"]


def suggest_key(key: str, known: Iterable[str]) -> str:
    """Returns " (did you mean ...?)" with at most three of the `known` keys that are similar to an unknown dotted key,
    or "" if none is similar. Compares only the last words of the keys.
    """
    known = list(known)
    section, _, leaf = key.lower().replace("-", "_").rpartition(".")
    leaves = {name: name.rpartition(".")[2].lower() for name in known}
    siblings = [name for name in known if name.rpartition(".")[0].lower() == section]
    same = [name for name in known if _remove_underscores(leaves[name]) == _remove_underscores(leaf)]
    meant = [name for name in same if name in siblings]
    meant = meant or [
        name
        for word, name in _SYNONYMS.items()
        if _remove_underscores(word) == _remove_underscores(leaf) and name in known
    ]
    if not meant:
        close = difflib.get_close_matches(leaf, [leaves[name] for name in siblings], 1, 0.85)
        meant = [name for name in siblings if leaves[name] in close or _has_only_words_of(leaf, leaves[name])] + same
    for names, alike in ((siblings, 0.54), (known, 0.6)):
        close = [] if meant else difflib.get_close_matches(leaf, [leaves[name] for name in names], 1, alike)
        meant = meant or [name for name in names if leaves[name] in close]
    return f" (did you mean {' or '.join(meant[:3])}?)" if meant else ""


def _remove_underscores(word: str) -> str:
    """Returns a word without its underscores."""
    return word.replace("_", "")


def _has_only_words_of(name: str, other_name: str) -> bool:
    """Returns whether all words of `name`, split at underscores, are words of `other_name`, as "patch" is of
    "patch_size". Also returns True if `name` begins with `other_name` and an underscore.
    """
    return set(name.split("_")) <= set(other_name.split("_")) or name.startswith(f"{other_name}_")


def suggest_files(path: Path, pattern: str) -> str:
    """Returns the end of a message about the missing file `path`: the file in its folder with the most similar name, if
    any, and the names of up to twelve files there that match `pattern`.
    """
    names = sorted(file.name for file in path.parent.glob(pattern)) if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, 1)
    meant = f" (did you mean {path.parent / close[0]}?)" if close else ""
    more = f" and {len(names) - 12} more" * (len(names) > 12)
    holds = f"holds {', '.join(names[:12])}{more}" if names else f"has no {pattern}"
    return f"{meant}; {path.parent}/ {holds}"


def format_divisors(number: int) -> str:
    """Returns the divisors of a number as text, "1, 2, 4", for messages about batch sizes. If there are more than 16,
    the text has the first eight, "..." and the last seven.
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    all_of_them = sorted({*small, *(number // d for d in small)})
    return ", ".join(map(str, all_of_them if len(all_of_them) <= 16 else [*all_of_them[:8], "...", *all_of_them[-7:]]))


def format_value(value: Any) -> str:
    """Returns a value as text, as it is written in an override, such as null for None. If the text has more than 60
    characters, it is cut to 57 and ends with "...".
    """
    if isinstance(value, str):
        value = value.replace("\0", "\\0")
    named = {None: "null", "": "''", True: "true", False: "false"}
    if isinstance(value, (list, tuple)):
        text = f"[{', '.join(map(format_value, value))}]"
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {format_value(inner)}" for key, inner in value.items()) + "}"
    elif value is None or (isinstance(value, (bool, str)) and value in named):
        text = named[value]
    else:
        text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
