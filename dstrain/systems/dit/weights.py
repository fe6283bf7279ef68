"""Fitting published weights to a network: other resolutions and numbers of classes. Names are the same already."""

import torch.nn.functional as F
from torch import Tensor, nn

from dstrain.nn import fitting

_CLASSES = "y_embedder.embedding_table.weight"

# What decides a weight's shape or presence: pattern of its name -> the recipe's fields.
_REMEDIES = (
    (r"^x_embedder", "in_channels, patch_size and hidden_size (or size)"),
    (r"^final_layer\.linear", "learn_sigma, in_channels, patch_size and hidden_size (or size)"),
    (r"^blocks\.\d+\.mlp", "depth, mlp_ratio and hidden_size (or size)"),
    (r"^blocks", "depth and hidden_size (or size)"),
    (r"", "size, or hidden_size and depth"),
)


def adapt(state: dict[str, Tensor], network: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
    """A state dict that fits `network` (only its names and shapes are read: meta tensors do), and what was changed.

    Positions are interpolated to another resolution (bicubic, on the square grid). A class table with another number of
    rows is replaced by fresh rows, normal(0.02), of which the last, "no label", is kept from the file.
    Raises ValueError at the first other difference, with both shapes and the remedy.
    """
    wanted = fitting.shapes_of(network)
    state, notes = dict(state), []
    if "pos_embed" in state and _same_width(state["pos_embed"], wanted["pos_embed"]):
        state["pos_embed"] = _interpolated(state["pos_embed"], wanted["pos_embed"], notes)
    if fitting.other_rows(state, wanted, _CLASSES):
        state[_CLASSES] = _replaced(state[_CLASSES], wanted[_CLASSES], notes)
    fitting.require_fit(state, wanted, sorted(wanted.keys() | state.keys(), key=_natural), _REMEDIES)
    return state, notes


def _same_width(theirs: Tensor, ours: tuple[int, ...]) -> bool:
    return theirs.ndim == len(ours) and theirs.shape[-1] == ours[-1] and tuple(theirs.shape) != ours


def _interpolated(positions: Tensor, shape: tuple[int, ...], notes: list[str]) -> Tensor:
    old, new = round(positions.shape[1] ** 0.5), round(shape[1] ** 0.5)
    if old * old != positions.shape[1]:
        return positions                          # not a square grid: reported as a difference of shapes
    grid = positions.float().view(1, old, old, -1).permute(0, 3, 1, 2)                            # (1, D, g, g)
    grid = F.interpolate(grid, size=(new, new), mode="bicubic", align_corners=False)
    notes.append(f"pos_embed: interpolated from {old} x {old} to {new} x {new} patches")
    return grid.flatten(2).transpose(1, 2).contiguous().to(positions.dtype)


def _replaced(table: Tensor, shape: tuple[int, ...], notes: list[str]) -> Tensor:
    fresh = fitting.fresh_rows(table, shape, std=0.02)
    fresh[-1] = table[-1]
    notes.append(f"{_CLASSES}: {len(table)} rows in the file, {shape[0]} in the network; replaced by fresh rows, the "
                 "last (no label) kept")
    return fresh


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts blocks.2 before blocks.10, so that the first difference is the lowest block's."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
