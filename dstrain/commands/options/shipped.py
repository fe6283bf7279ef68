"""Finds recipes, DeepSpeed JSONs and converters that come with dstrain: in a clone those of the repository, else those
of the package.
"""

import os
from pathlib import Path

from dstrain.recipe import ConfigError, format_value, suggest_files

RECIPE, DS_CONFIG = "dit-small.yaml", "zero2.json"  # the defaults
_PACKAGE = Path(__file__).parents[2]
_ROOT = _PACKAGE.parent  # the root of a clone
# Where a clone keeps what a wheel has in dstrain/shipped/; setup.py copies it.
_SOURCES = {".yaml": Path("launch", "recipes"), ".json": Path("ds_configs"), ".py": Path("launch", "convert")}


def find_shipped_folder(suffix: str) -> Path:
    """Returns the folder of the shipped recipes (.yaml), DeepSpeed JSONs (.json) or converters (.py)."""
    source = _SOURCES[suffix]
    return _ROOT / source if (_ROOT / source).is_dir() else _PACKAGE / "shipped" / source.name


def find_recipe(path: Path) -> Path:
    """Returns the path of the recipe that --recipe names: an existing file, else a shipped one. Raises ConfigError if
    there is no such file.
    """
    return find_shipped_file(path, ".yaml", "--recipe")


def find_ds_config(path: Path) -> Path:
    """Returns the path of the DeepSpeed JSON that --ds_config names: an existing file, else a shipped one. Raises
    ConfigError if there is no such file.
    """
    return find_shipped_file(path, ".json", "--ds_config")


def find_shipped_file(path: Path, suffix: str, option: str) -> Path:
    """Returns the path of the file that an option names: an existing file, else one that comes with dstrain, whose
    suffix may be left out. In a clone also finds paths below the clone's root, from any folder.

    If only a folder has that name, returns the folder, and the caller fails to read it. Raises ConfigError if there is
    neither.
    """
    folder = find_shipped_folder(suffix)
    candidates = [path, _ROOT / path]
    if path.parent in (Path(), _SOURCES[suffix]):
        name = path.name if path.name.endswith(suffix) else path.name + suffix
        candidates.append(folder / name)
    found = [candidate for candidate in candidates if os.path.exists(candidate)]  # False, too, for what is no path
    files = [candidate for candidate in found if not os.path.isdir(candidate)]
    if files or found:
        return (files or found)[0]
    # A mistyped name is looked for among those that are shipped, unless its own folder has some.
    beside = path if list(path.parent.glob(f"*{suffix}")) else folder / path.name
    raise ConfigError(f"{option} {format_value(str(path))}: there is no such file{suggest_files(beside, f'*{suffix}')}")
