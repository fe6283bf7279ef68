"""Checks and changes a state dict from elsewhere so that a network can load it, for several systems with published
weights.

Only names and shapes are read, so a network on the meta device is enough. `shapes` are those of its weights, by name.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.recipe import ConfigError

Fitted = tuple[dict[str, Tensor], list[str]]  # a state dict as a network takes it, and notes for the user
Shapes = dict[str, tuple[int, ...]]
Remedies = Sequence[tuple[str, str]]  # pattern of a weight's name -> the recipe's fields that decide it


def collect_weight_shapes(network: nn.Module) -> Shapes:
    """Returns the shape of each weight and buffer in a network's state dict, by name."""
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def require_matching_shapes(
    state: dict[str, Tensor], shapes: Shapes, names_to_check: Iterable[str], remedies: Remedies
) -> None:
    """Raises ConfigError if `state` and `shapes` have no name in common, or else at the first name in `names_to_check`
    that is in only one of them, or whose shapes differ. Names that are not in `names_to_check` are not checked.

    state     the weights of a file, by name.
    shapes    the shapes that the network needs, by name.
    remedies  pairs (pattern, fields): if the pattern is found in the name, the message tells the user to set these
              fields.
    """
    if not state.keys() & shapes.keys():
        names = ", ".join(sorted(state)[:3]) or "nothing"
        raise ConfigError(
            f"weights: they hold {names}, and no weight of this network: name weights that were made with it"
        )
    for name in names_to_check:
        in_file = tuple(state[name].shape) if name in state else "absent"
        in_network = shapes.get(name, "absent")
        if in_file != in_network:
            fields = next(fields for pattern, fields in remedies if re.search(pattern, name))
            raise ConfigError(
                f"weights: {name} is {in_file} in the file and {in_network} in the network; "
                f"set {fields} to those the file was made with"
            )


def make_natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Returns a sort key for a weight's dotted name, which sorts blocks.2 before blocks.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def redraw_resized_embedding_table(
    state: dict[str, Tensor], shapes: Shapes, name: str, std: float, keep_last: bool = False
) -> list[str]:
    """Replaces the table `name` in `state` by random rows, if it differs from the table in `shapes` in the number of
    rows alone. Returns [one note for the user], or [] if nothing is replaced.

    std        the rows' standard deviation; they are normal with mean 0, and the same on every rank.
    keep_last  whether the last row, which stands for "no label", is copied from the old table.
    """
    if name not in state or name not in shapes:
        return []
    table, shape = state[name], shapes[name]
    if tuple(table.shape[1:]) != shape[1:] or len(table) == shape[0]:
        return []
    fresh = (std * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(table.dtype)
    if keep_last:
        fresh[-1] = table[-1]
    state[name] = fresh
    return [
        f"{name}: {len(table)} rows in the file, {shape[0]} in the network; replaced by fresh rows"
        + (", the last (no label) kept" if keep_last else "")
    ]


def describe_unused_weights(names: Iterable[str]) -> list[str]:
    """Returns [one note for the user] that gives the number of weights in `names`, which the network does not use, and
    the first three names; [] if `names` is empty.
    """
    names = sorted(names)
    if not names:
        return []
    return [f"{len(names)} weights of the folder have no place here and are left: {', '.join(names[:3])}"]


def require_matching_diffusers_config(
    diffusers_config: Mapping[str, Any],
    classes: Sequence[str],
    system: str,
    expected: dict[str, Any],
    fields: Mapping[str, str],
) -> None:
    """Raises ConfigError if the class in a diffusers network's config.json is not in `classes`, or at the first field
    whose value differs from that in `expected`.

    system    the name of the system, for the message.
    expected  {field of config.json: the value that this network needs}.
    fields    {field of config.json: the field of the recipe's `model` that decides it}, for the message.
    """
    kind = diffusers_config.get("_class_name")
    if kind not in classes:
        raise ConfigError(
            f"weights: config.json is of class {kind}, system {system} takes {classes[0]}, or a pipeline that holds one"
        )
    for name, value in expected.items():
        loaded = diffusers_config.get(name)
        if (tuple(loaded) if isinstance(loaded, list) else loaded) != value:
            remedy = (
                f"model.{fields[name]}; set it to what the file was made with"
                if name in fields
                else "this network, which has no other"
            )
            raise ConfigError(f"weights: {name} is {loaded} in config.json, and {value} by {remedy}")
