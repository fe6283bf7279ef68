"""The paths of a data section, checked before anything is opened."""

import os

from dstrain.data.formats import explain_unsupported_address, is_address_or_pattern
from dstrain.data.open import BUILTINS, BuiltinData
from dstrain.recipe import Data


def find_path_problems(data: Data) -> list[str]:
    """Returns a message for each data.path or data.held_out_path, of all sources, that does not exist or holds no data,
    and for data.held_out of built-in data; [] if there are none. Does not check addresses and patterns.
    """
    parts = data.list_sources() or (data,)
    sections = [f"data.mixture[{number}]" for number in range(len(parts))] if data.mixture else ["data"]
    problems = []
    for section, part in zip(sections, parts):
        for key, path in ((f"{section}.path", part.path), (f"{section}.held_out_path", part.held_out_path)):
            if path is not None and (problem := _describe_unusable_path(key, path)):
                problems.append(problem)
    for part in parts:
        if part.held_out and BuiltinData.recognises(part):
            problems.append(f"data.held_out={part.held_out}: {part.path} holds out images itself: leave it out")
    return problems


def _describe_unusable_path(key: str, path: str) -> str | None:
    """Returns a message, which begins with `key`, if a path does not exist, holds no data, or names no built-in data;
    else None. Does not check addresses and patterns.
    """
    if BuiltinData.recognises(Data(path=path)):
        return None if path in BUILTINS else f"{key}={path}: the built-in data sets are {', '.join(BUILTINS)}"
    if is_address_or_pattern(path):  # whether it is there shows when it is listed
        return None
    if not os.path.exists(path):
        return (
            explain_unsupported_address(key, path)
            or f"{key}={path} does not exist: give data, as the header of the recipe says, or builtin:fashion"
        )
    if not os.path.isdir(path) and not os.path.isfile(path):
        return f"{key}={path} is a pipe or a device: give a folder of data, or builtin:fashion"
    if all(os.path.exists(os.path.join(path, name)) for name in ("run.yaml", "checkpoints")):
        return f"{key}={path} is the folder of a run, which holds no data: give a folder of data, or builtin:fashion"
    try:
        empty = os.path.isdir(path) and not any(os.scandir(path))
    except OSError as error:
        return f"{key}={path} cannot be listed ({error.strerror}): give a folder that you may read"
    if empty:
        return (
            f"{key}={path} is an empty folder: put images into it, those of a class in a folder of its own, or "
            "name other data (docs/guides/data.md has all forms), or builtin:fashion"
        )
    return None
