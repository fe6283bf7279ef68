"""The forms in which people keep data, in the order in which they are tried; `recognise_layout` chooses one."""

import os
import re
from pathlib import Path

from dstrain.data.files.local import Files, extract_pattern_folder
from dstrain.data.files.remote import SCHEMES, is_remote_address, open_files
from dstrain.data.files.tables import TABLES
from dstrain.data.formats.base import Layout, Request
from dstrain.data.formats.clips import Clips
from dstrain.data.formats.competing import find_data_formats, refuse_mixed_data_formats
from dstrain.data.formats.folders import Folders
from dstrain.data.formats.hugging_face import HUB, ArrowTables, HubTables, ParquetTables
from dstrain.data.formats.lists import Metadata, PathList, TableList, WebVid
from dstrain.data.formats.packed import PackedFiles
from dstrain.data.formats.sidecars import Beside
from dstrain.data.formats.tars import Tars
from dstrain.data.formats.unconverted import refuse_unconverted_data
from dstrain.data.formats.zips import Zips
from dstrain.disk.small import describe_special_file
from dstrain.recipe import ConfigError

LAYOUTS: tuple[type[Layout], ...] = (
    PackedFiles,
    HubTables,
    Tars,
    Zips,
    ArrowTables,
    ParquetTables,
    WebVid,
    TableList,
    PathList,
    Metadata,
    Beside,
    Clips,
    Folders,
)


def is_address_or_pattern(path: str) -> bool:
    """Returns whether a path is an address such as s3://..., a data set of the Hugging Face hub (hf-dataset:NAME), or a
    pattern of file names such as x/*.tar. Returns False for any other path, which is a file or a folder on this
    machine.
    """
    return (
        is_remote_address(path)
        or path.startswith(HUB)
        or (extract_pattern_folder(path) is not None and not Path(path).exists())
    )


def explain_unsupported_address(recipe_key: str, path: str) -> str | None:
    """Returns the error message for an address of an unsupported kind, such as ftp://HOST/DATA; None for any other
    path.

    recipe_key: the key that holds the path, for the message.
    """
    return (
        f"{recipe_key}={path}: an address begins with {'://, '.join(SCHEMES)}://: put the data there, or on a disk"
        if re.match(r"\w+://", path) and not is_address_or_pattern(path)
        else None
    )


def open_data_files(path: str, request: Request) -> Files:
    """Returns an object that lists and reads the files at a path: a file, a folder, a pattern of names, or an address.

    Raises ConfigError if the path does not exist, or is neither a file nor a folder, such as a socket.
    """
    if not (is_address_or_pattern(path) or Path(path).exists()):
        raise ConfigError(
            explain_unsupported_address(request.key, path)
            or f"{request.key}={path} does not exist: give a folder of {request.noun}, or builtin:fashion"
        )
    if os.path.exists(path) and (kind := describe_special_file(path)) not in (None, "a folder"):
        raise ConfigError(f"{request.key}={path} is {kind}: give a folder of {request.noun}, or a list of them")
    return open_files(path, request.cache)


def recognise_layout(path: str, files: Files, request: Request) -> Layout:
    """Returns the reader for the form of the data at a path, such as class folders or tars. It is an instance of the
    first class in LAYOUTS that recognises the data.

    Raises ConfigError if no class recognises the data, if a folder holds several forms of data, if `dstrain convert`
    must convert the data first, or if data.columns has keys that the reader does not use.
    """
    forms = find_data_formats(files, request)
    refuse_mixed_data_formats(path, files, request, forms)
    refuse_unconverted_data(path, files, request, forms)
    for layout in LAYOUTS:
        if layout.recognises(path, files, request):
            unread = [key for key in request.columns if key not in layout.columns_read]
            if unread and request.key == "data.path" and not request.mixed:  # else they may be of the other data
                raise ConfigError(
                    f"data.columns names {', '.join(unread)}, and {path} ({layout.kind}) has "
                    f"{', '.join(layout.columns_read) or 'no columns'}: leave the others out"
                )
            return layout(path, files, request)
    if files.far:
        raise ConfigError(
            f"{request.key}={path}: at an address, tar, zip, parquet and Arrow files and lists are read, "
            "and there are none: correct it, or make tars of a folder on a disk, dstrain pack "
            "FOLDER --format tar --out SHARDS"
        )
    if path.lower().endswith(request.suffixes):
        raise ConfigError(
            f"{request.key}={path} is not a folder, but one of the {request.noun}: name its folder, "
            f"{request.key}={os.path.dirname(os.path.abspath(path))}"
        )
    raise ConfigError(
        f"{request.key}={path} is not a folder, and no file that is read; give a folder of "
        f"{request.noun}, a list of them ({' '.join(TABLES)}, or lines PATH NUMBER), a .tar, .zip, "
        ".parquet or .arrow (docs/guides/data.md has all forms), or builtin:fashion"
    )
