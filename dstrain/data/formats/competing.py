"""Refuses folders that hold several forms of data, since only one form would be read, and no message would say so.

    00000.tar beside banner.png; photos.zip beside class folders; data/train.parquet beside assets/teaser.png
    MNIST/raw/ and FashionMNIST/raw/; cifar-10-batches-py/ beside cifar-100-python/; a CIFAR beside pictures

Only the names of some files and folders are looked at, and some tables. What else a large folder holds is counted when
it is listed (base.py).
"""

import os
import shlex
from contextlib import suppress

from dstrain.data.files.listing import join_first
from dstrain.data.files.local import Files, LocalFiles
from dstrain.data.files.tables import open_table
from dstrain.data.formats.base import Request, file_exists, list_first_folder_entries, walk_some_files
from dstrain.data.formats.packed import INDEX
from dstrain.data.formats.unconverted import CIFAR, IDX, LMDB_DATA
from dstrain.recipe import ConfigError

_TABLES = "parquet files"
_TRIED = 8  # so many tables are opened: a table that only lists files is no form of its own
DataFormat = tuple[str, str]  # (what it is called, its folder or file below the root); "": no path names it alone


def refuse_mixed_data_formats(root: str, files: Files, request: Request, formats: dict[DataFormat, list[str]]) -> None:
    """Raises ConfigError if a folder holds several forms of data, such as tars beside class folders. The message lists
    the forms. Does nothing if the data are a single file or a pattern of names.

    formats: the result of `find_data_formats`.
    """
    if files.pattern or not (files.far or os.path.isdir(root)):
        return
    if len(formats) > 1:
        texts = []
        for (noun, place), names in formats.items():
            path = shlex.quote(f"{root.rstrip('/')}/{place}")
            texts.append(f"{noun} ({join_first(names, 2)}{f': {request.key}={path}' if place else ''})")
        raise ConfigError(
            f"{request.key}={root} holds several forms of data, {' and '.join(texts)}: name one of them, or move the "
            "others away; data.mixture='[{path: A}, {path: B}]' takes several"
        )


def find_data_formats(files: Files, request: Request) -> dict[DataFormat, list[str]]:
    """Returns the forms of data in a folder, with the names of some files of each: {(form, path): [file, ...]}, such as
    {("a zip file", "x.zip"): ["x.zip"]}.

    form: what messages call the form.
    path: the path or pattern below the root that selects this form alone; "" if there is none.
    All folders of images count as one form; so do all parquet files, and all Arrow files. Parquet tables that hold no
    images, only file names, are left out if there is another form.
    """
    names = (
        list(walk_some_files(files))
        if isinstance(files, LocalFiles)
        else [name for name, _ in list_first_folder_entries(files)]
    )
    forms: dict[DataFormat, list[str]] = {}
    for name in names:
        if form := _recognise_data_format(name, files, request):
            forms.setdefault(form, []).append(name)
    tables = [name for form in forms if form[0] == _TABLES for name in forms[form]]
    if len(forms) > 1 and tables and not any(_table_has_bytes_column(files, name) for name in tables[:_TRIED]):
        forms = {form: names for form, names in forms.items() if form[0] != _TABLES}
    merged: dict[DataFormat, list[str]] = {}
    for (noun, place), names in forms.items():
        same = [other for other in forms if other[0] == noun]
        several = noun in (request.noun, _TABLES, "Arrow files") and len(same) > 1
        merged.setdefault((noun, "" if several else place), []).extend(names)
    return merged


def _recognise_data_format(name: str, files: Files, request: Request) -> DataFormat | None:
    """Returns the form of data to which a file belongs, judged by its name. Returns None if it belongs to none, as a
    caption or a list does.

    The form is a pair: what messages call it, and the path or pattern below the root that selects it ("" for none).
    """
    folder, _, own = name.rpartition("/")
    if own.lower().endswith(request.suffixes):
        return request.noun, name.partition("/")[0] if folder else ""
    start, suffix = f"{folder}/" if folder else "", os.path.splitext(own)[1].lower()
    if IDX.fullmatch(own):
        return "MNIST's idx files", folder
    for form, (train, test, meta) in CIFAR.items():
        if own in (*train, test) and all(file_exists(files, start + other) for other in (train[0], test, meta)):
            return "CIFAR-100" if "100" in form else "CIFAR-10", folder
    if own == LMDB_DATA or suffix in (".lmdb", ".mdb"):
        return "LMDB environments", ""
    if own == INDEX:
        return "shards of dstrain pack", folder
    if suffix == ".zip":
        return "a zip file", name
    nouns = {".tar": "tar files", ".arrow": "Arrow files", ".parquet": _TABLES}
    return (nouns[suffix], folder or f"*{suffix}") if suffix in nouns else None


def _table_has_bytes_column(files: Files, name: str) -> bool:
    """Returns whether a parquet table holds the bytes of files, such as images; False if it cannot be read."""
    with suppress(ConfigError):  # A table that cannot be read is no form.
        return open_table(files, name, name).has_bytes_column()
    return False
