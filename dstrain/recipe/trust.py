"""Packages from outside that may be imported as systems: those that the user of this process has named himself.

A recipe, an override or an option is the user's word. What a run's folder or an export says is not: such folders are
sent around, and a name in them would run any module that lies in the working directory.
"""

from pathlib import Path

OPTION = "--trust-system"
_trusted: set[str] = set()


def trust_system(name: str) -> None:
    """Lets this process import the package `name` as a system."""
    _trusted.add(name)


def list_trusted_packages() -> list[str]:
    """Lists the packages that the user trusts as systems, to pass them on to another process."""
    return sorted(_trusted)


def is_trusted(name: str) -> bool:
    """Returns whether the user trusts this package as a system."""
    return name in _trusted


def lies_in_run_or_export(recipe: Path) -> bool:
    """Returns whether a recipe lies in a run's folder or in an export, which others may have written."""
    if recipe.name == "run.yaml":
        return True
    beside = ("consolidated.json", "*.safetensors", "*/*.safetensors")
    return recipe.name == "recipe.yaml" and any(any(recipe.parent.glob(pattern)) for pattern in beside)
