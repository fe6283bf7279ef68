"""The forms in which people keep data, in the order in which they are tried; `recognised` chooses one."""

from pathlib import Path

from dstrain.data.files import Files, base_of
from dstrain.data.layouts.base import Layout, Request
from dstrain.data.layouts.folders import Folders
from dstrain.data.layouts.hub import HUB, HubTables
from dstrain.data.layouts.hugging_face import ArrowTables, ParquetTables
from dstrain.data.remote import files_at, is_address
from dstrain.recipe import ConfigError

LAYOUTS: tuple[type[Layout], ...] = (HubTables, ArrowTables, ParquetTables, Folders)


def files_of(path: str, request: Request) -> Files:
    """Access to the files at a path. ConfigError: nothing is there."""
    if not (is_address(path) or path.startswith(HUB) or Path(base_of(path)).exists()):
        raise ConfigError(f"{request.key}={path}: does not exist; give a folder of {request.noun}, or builtin:fashion")
    return files_at(path, request.cache)


def recognised(path: str, files: Files, request: Request) -> Layout:
    """The layout of the data at a path. ConfigError: they have none of the forms above."""
    for layout in LAYOUTS:
        if layout.recognises(path, files, request):
            return layout(path, files, request)
    raise ConfigError(f"{request.key}={path}: is not a folder; give a folder of {request.noun}, or builtin:fashion")
