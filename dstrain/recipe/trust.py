"""Packages outside dstrain that may be imported as systems: only those that the user of this process has named himself.

A name in a recipe, an override or an option comes from the user. A name in a run's folder or an export may come from
somebody else, since such folders are sent around: importing it would run any module of that name in the working
directory.
"""

from pathlib import Path

OPTION = "--trust-system"
_trusted: set[str] = set()


def trust_system(name: str) -> None:
    """Allows this process to import the package `name` as a system."""
    _trusted.add(name)


def list_trusted_packages() -> list[str]:
    """Returns the names of the packages that the user trusts, sorted, so that a child process can be told of them."""
    return sorted(_trusted)


def is_trusted(name: str) -> bool:
    """Returns whether `trust_system` was called with this name in this process."""
    return name in _trusted


def is_in_run_or_export(recipe: Path) -> bool:
    """Returns whether a recipe file lies in a run's folder or an export, which others may have written: it is named
    run.yaml, or it is recipe.yaml beside consolidated.json or weights in safetensors.
    """
    if recipe.name == "run.yaml":
        return True
    beside = ("consolidated.json", "*.safetensors", "*/*.safetensors")
    return recipe.name == "recipe.yaml" and any(any(recipe.parent.glob(pattern)) for pattern in beside)
