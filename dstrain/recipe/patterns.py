"""Patterns of weights' names, as train_only and optimizer.rates have them, and of captions, as data.leave_out has."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import Field

Pattern = Annotated[str, Field(min_length=1, max_length=500)]


def fits_pattern(pattern: str, part: str, name: str) -> bool:
    """Tells whether a pattern of the shell fits a weight's name in the state dict, or PART/NAME. * takes dots, too."""
    return fnmatchcase(name, pattern) or fnmatchcase(f"{part}/{name}", pattern)


def fits_caption(patterns: Sequence[str], caption: str) -> list[bool]:
    """Tells which patterns of the shell fit a whole caption. Capitals and small letters are the same."""
    text = caption.casefold()
    return [fnmatchcase(text, pattern.casefold()) for pattern in patterns]


def is_adapter(name: str) -> bool:
    """Tells whether a weight of a state dict is an adapter's, see nn/lora.py."""
    return ".lora_A." in name or ".lora_B." in name


def is_learned(train_only: Sequence[str] | None, part: str, name: str, built: bool) -> bool:
    """Tells whether a weight learns: one that a pattern names, or of an adapter (nn/lora.py). Without patterns it is as
    its network was `built`.
    """
    if train_only is None:
        return built
    return is_adapter(name) or any(fits_pattern(pattern, part, name) for pattern in train_only)
