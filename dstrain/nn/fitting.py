"""Fitting weights from elsewhere to a network: what two systems do with published state dicts.

Only names and shapes are read, so that tensors on the meta device do; `shapes` is what the network wants by name.
"""

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from dstrain.recipe import ConfigError

Shapes = dict[str, tuple[int, ...]]
Remedies = Sequence[tuple[str, str]]              # pattern of a weight's name -> the recipe's fields that decide it


def shapes_of(network: nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def require_fit(state: dict[str, Tensor], shapes: Shapes, order: Iterable[str], remedies: Remedies) -> None:
    """Raises ConfigError at the first of the names in `order` (of both sides) whose shape or presence differs.

    The message gives both shapes and the fields of the first remedy whose pattern is found in the name.
    """
    for name in order:
        ours = shapes.get(name, "absent")
        theirs = tuple(state[name].shape) if name in state else "absent"
        if ours != theirs:
            fields = next(fields for pattern, fields in remedies if re.search(pattern, name))
            raise ConfigError(f"weights: {name} is {theirs} in the file and {ours} in the network; "
                              f"set {fields} to those the file was made with")


def other_rows(state: dict[str, Tensor], shapes: Shapes, name: str) -> bool:
    """Whether the table `name` differs from the network's in its number of rows alone."""
    if name not in state or name not in shapes:
        return False
    theirs, ours = tuple(state[name].shape), shapes[name]
    return theirs[1:] == ours[1:] and theirs != ours


def fresh_rows(table: Tensor, shape: tuple[int, ...], std: float) -> Tensor:
    """A table of `shape`, normal with deviation `std`, in the other table's precision; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return (std * torch.randn(shape, generator=generator)).to(table.dtype)
