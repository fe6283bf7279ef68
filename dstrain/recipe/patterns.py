"""Compares names of weights with the patterns of train_only and optimizer.rates, and captions with those of
data.leave_out.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import Field

Pattern = Annotated[str, Field(min_length=1, max_length=500)]


def fits_pattern(pattern: str, part: str, name: str) -> bool:
    """Returns whether a shell pattern fits a weight's name in the state dict, or PART/NAME with the part it is of. *
    also fits dots.
    """
    return fnmatchcase(name, pattern) or fnmatchcase(f"{part}/{name}", pattern)


def match_caption(patterns: Sequence[str], caption: str) -> list[bool]:
    """Returns for each shell pattern whether it fits the whole caption, in any case of letters."""
    text = caption.casefold()
    return [fnmatchcase(text, pattern.casefold()) for pattern in patterns]


def is_adapter(name: str) -> bool:
    """Returns whether a weight of this name in a state dict is that of a LoRA adapter, see nn/lora.py."""
    return ".lora_A." in name or ".lora_B." in name


def is_learned(train_only: Sequence[str] | None, part: str, name: str, built: bool) -> bool:
    """Returns whether a weight is trained. With patterns in `train_only`: if one of them fits its name, or it is an
    adapter's (nn/lora.py). With None: `built`, its requires_grad as the network was built.
    """
    if train_only is None:
        return built
    return is_adapter(name) or any(fits_pattern(pattern, part, name) for pattern in train_only)
