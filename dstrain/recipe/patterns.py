"""Compares names of weights with the patterns of train_only and optimizer.rates, and captions with those of
data.leave_out.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import Field

Pattern = Annotated[str, Field(min_length=1, max_length=500)]


def matches_weight_pattern(pattern: str, part: str, name: str) -> bool:
    """Returns whether a shell pattern matches all of `name`, a weight's name in the state dict of a part's network, or
    all of PART/NAME. A * also matches dots. Upper and lower case differ.
    """
    return fnmatchcase(name, pattern) or fnmatchcase(f"{part}/{name}", pattern)


def match_patterns_to_caption(patterns: Sequence[str], caption: str) -> list[bool]:
    """Returns, for each shell pattern, whether it matches all of the caption. Ignores case."""
    text = caption.casefold()
    return [fnmatchcase(text, pattern.casefold()) for pattern in patterns]


def is_adapter_weight(name: str) -> bool:
    """Returns whether `name`, a weight's name in a state dict, is that of a LoRA adapter's weight (nn/lora.py)."""
    return ".lora_A." in name or ".lora_B." in name


def is_weight_learned(train_only: Sequence[str] | None, part: str, name: str, requires_grad: bool) -> bool:
    """Returns whether a weight is trained: if a pattern of `train_only` matches its name, or if it belongs to a LoRA
    adapter. If `train_only` is None, returns `requires_grad`, the weight's requires_grad when its network was built.
    """
    if train_only is None:
        return requires_grad
    return is_adapter_weight(name) or any(matches_weight_pattern(pattern, part, name) for pattern in train_only)
