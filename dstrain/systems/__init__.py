"""Finds and builds systems by name. A system's package is imported only when it is needed, so that one system never
needs the libraries of another.

A name is one of three: a folder beside this file with a system.py (`dit`, `phenaki.tokenizer`); an entry point of the
group `dstrain.systems`; or a package that can be imported (`my_lab.edm`), if the user himself has named it
(recipe/trust.py). base.py says what such a package holds.
"""

import difflib
import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from pydantic import ValidationError

from dstrain.recipe import ConfigError, list_problems
from dstrain.recipe.trust import OPTION, is_trusted
from dstrain.systems.base import Kind, System, SystemConfig, require_current_method_names, require_valid_attributes

_GROUP = "dstrain.systems"


def list_system_names() -> list[str]:
    """Returns the names of dstrain's own systems and of those that installed packages register as entry points, in
    alphabetical order.
    """
    root = Path(__file__).parent
    own = [".".join(path.parent.relative_to(root).parts) for path in root.rglob("system.py")]
    return sorted({*own, *_get_entry_points_by_name()})


def list_systems_learning_from(data_kind: str) -> list[str]:
    """Returns the names of dstrain's own systems that can learn from a kind of data, such as "images" (see
    types.Kind).
    """
    return [
        name
        for name in list_system_names()
        if name not in _get_entry_points_by_name() and data_kind in find_config_class(name).learns_from
    ]


def build(name: str, model: dict[str, Any]) -> System:
    """Builds the system `name` from the `model` section of a recipe.

    Raises ConfigError if the name is unknown, a field of the section is unknown or out of range, or the package's own
    build() does not return a valid System.
    """
    section = build_config(name, model)
    system = import_system_package(name).build(section)
    if not isinstance(system, System):
        raise ConfigError(f"system: build() of {name} returns a {type(system).__name__}: return a System")
    require_current_method_names(name, type(system))
    require_valid_attributes(name, system)
    system.num_labels = section.num_labels
    return system


def build_config(name: str, model: dict[str, Any]) -> SystemConfig:
    """Returns the `model` section of a recipe as the Config of the system `name`: checked, and with defaults for the
    fields that are left out. Raises ConfigError if the name or a field is unknown, or a value is out of range.
    """
    schema = find_config_class(name)
    try:
        return schema.model_validate(model)
    except ValidationError as error:
        raise ConfigError(*list_problems(error, schema, "model")) from None


def find_config_class(name: str) -> type[SystemConfig]:
    """Imports the package of the system `name`, and returns its Config class, which declares the fields of the recipe's
    `model` section. Raises ConfigError as `import_system_package` does.
    """
    return import_system_package(name).Config


def _get_entry_points_by_name() -> dict[str, importlib.metadata.EntryPoint]:
    """Returns the entry points by which installed packages register systems, by the system's name."""
    return {point.name: point for point in importlib.metadata.entry_points(group=_GROUP)}


def import_system_package(name: str) -> ModuleType:
    """Imports the package of the system `name`, and returns it.

    Raises ConfigError if there is no such package, if it lacks Config or build, or if Config.learns_from is no tuple of
    known kinds of data. Also raises it for a package that is neither dstrain's nor an installed entry point, unless the
    user has named it himself (recipe/trust.py). An exception while an entry point is imported gets a note with its
    name.
    """
    if not all(word.isidentifier() for word in name.replace("-", "_").split(".")) or len(name) > 200:
        raise ConfigError(f"system: {name[:200]!r} is no name of a package: write letters, digits and dots")
    if (Path(__file__).parent.joinpath(*name.split(".")) / "system.py").is_file():
        return importlib.import_module(f"{__name__}.{name}")
    if (point := _get_entry_points_by_name().get(name)) is not None:
        try:
            module = point.load()
        except Exception as error:
            error.add_note(f"This is the entry point {name} = {point.value} of the group {_GROUP}.")
            raise
    elif not is_trusted(name) and name not in sys.modules:
        raise ConfigError(
            f"system: {name!r} is unknown; one of {', '.join(list_system_names())}"
            f"{_format_name_suggestion(name)}. A package that only "
            f"a folder names is not imported: if you know it, give {OPTION} {name}"
        )
    elif _can_be_imported(name):
        module = importlib.import_module(name)
    else:
        raise ConfigError(
            f"system: {name!r} is unknown; one of {', '.join(list_system_names())}, or a package on "
            f"PYTHONPATH{_format_name_suggestion(name)}"
        )
    missing = [word for word in ("Config", "build") if not hasattr(module, word)]
    if missing:
        raise ConfigError(
            f"system: the package {name!r} has no {' and no '.join(missing)}, see "
            "dstrain/systems/base.py; name one that holds a system"
        )
    kinds = getattr(module.Config, "learns_from", None)
    if not (isinstance(kinds, tuple) and kinds and set(kinds) <= set(get_args(Kind))):
        raise ConfigError(
            f"system: Config of {name} must be a SystemConfig with learns_from, a tuple of {', '.join(get_args(Kind))}"
        )
    require_current_method_names(name, module.Config)
    return module


def find_external_system_file(name: str) -> Path | None:
    """Returns the path of the Python file that defines a system, or None if the system is dstrain's own. Imports the
    package, and raises ConfigError as `import_system_package` does.
    """
    file = Path(import_system_package(name).__file__ or "")
    return None if Path(__file__).parent in file.parents else file


def _format_name_suggestion(name: str) -> str:
    """Returns "; did you mean NAME?" with the system's name that is most similar to `name`, or "" if none is
    similar.
    """
    near = difflib.get_close_matches(name, list_system_names(), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _can_be_imported(name: str) -> bool:
    """Returns whether Python finds a package of this name; its parent packages are imported to find it. An error within
    a parent package, such as a missing library, is raised.
    """
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            return False
        raise
