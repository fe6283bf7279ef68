"""LSUN's LMDB environments, whose values are encoded images: one, a file FILE.lmdb, or a folder of several *_lmdb/.

Of several, each is a class: bedroom_train_lmdb is `bedroom`. What is held out are the *_val_lmdb beside others.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from dstrain.commands.convert import Pictures, Sample
from dstrain.data.files.local import Files, LocalFiles
from dstrain.data.formats.base import file_exists, list_first_folder_entries
from dstrain.data.formats.labels import ClassList
from dstrain.data.formats.unconverted import LMDB_DATA
from dstrain.recipe import ConfigError

_FOLDER, _FILES = "_lmdb", (".lmdb", ".mdb")
_HELD_OUT = "_val_lmdb"
_MIN_IMAGE_BYTES = 64  # shorter values are numbers, such as the count of images
_TRIED = 10  # values, of which one must begin as an image does
_BEGINNINGS = (b"\xff\xd8", b"\x89PNG", b"RIFF", b"BM")


def read_lsun(path: Path, class_list: ClassList) -> dict[str, Pictures]:
    """Returns the splits below a path. Raises ConfigError if a file is no environment of images, or is truncated."""
    root = path.parent if path.is_file() else path
    names = sorted(_find_lmdb(LocalFiles(path)), key=lambda name: (_name_class(name), name))
    if not names:
        raise ConfigError(f"{path} holds no LMDB environment: name a folder with a data.mdb, or one of *_lmdb/")
    train = [name for name in names if not name.startswith("test_") and _HELD_OUT not in name]
    splits = {"train": train or names}
    if train and (held_out := [name for name in names if _HELD_OUT in name]):
        splits["held_out"] = held_out
    classes: tuple[str, ...] = ()
    if len(splits["train"]) > 1:
        classes = class_list.classes or tuple(sorted({_name_class(name) for name in splits["train"]}))
        if missing := [name for chosen in splits.values() for name in chosen if _name_class(name) not in classes]:
            raise ConfigError(f"{path}: {missing[0]} is of no class of {', '.join(classes)}: take it away")
    return {
        split: Pictures(
            sum(_count_values(root / name) for name in chosen), _list_samples(root, chosen, classes), classes
        )
        for split, chosen in splits.items()
    }


def _find_lmdb(files: Files) -> list[str]:
    """Returns the data files of LMDB environments, in the order of their names: the folder's own, or of *_lmdb/."""
    top = list_first_folder_entries(files)
    if (LMDB_DATA, False) in top:
        return [LMDB_DATA]
    if top and all(name.endswith(_FILES) and not is_folder for name, is_folder in top):
        return [name for name, _ in top]
    folders = [name for name, is_folder in top if is_folder and name.endswith(_FOLDER)]
    return [f"{name}/{LMDB_DATA}" for name in folders if file_exists(files, f"{name}/{LMDB_DATA}")]


def _list_samples(root: Path, names: list[str], classes: tuple[str, ...]) -> Iterator[Sample]:
    for name in names:
        folder, label = "", None
        if classes:
            folder, label = f"{_name_class(name)}/", classes.index(_name_class(name))
        for key, value in _read_values(root / name):
            yield f"{folder}{key.decode('utf-8', 'backslashreplace')}", value, label


def _read_values(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yields the images of an environment with their keys, in the order of the keys."""
    import lmdb

    try:
        with _open_environment(path) as environment, environment.begin() as transaction:
            images = ((key, value) for key, value in transaction.cursor() if len(value) >= _MIN_IMAGE_BYTES)
            first = list(islice(images, _TRIED))
            if first and not any(value.startswith(_BEGINNINGS) for _, value in first):
                raise ConfigError(f"{path}: its values are no encoded images, as LSUN's are")
            yield from first
            yield from images
    except lmdb.Error as error:
        raise ConfigError(f"{path} is damaged ({error}): fetch it anew") from None


def _count_values(path: Path) -> int:
    with _open_environment(path) as environment:
        return environment.stat()["entries"]


def _open_environment(path: Path) -> Any:
    """Opens an environment for reading, without its lock. Raises ConfigError if it is none, or is truncated."""
    try:
        import lmdb
    except ImportError:
        raise ConfigError(f"{path} is an LMDB: `pip install lmdb` reads it") from None
    try:
        environment = lmdb.open(str(path), subdir=False, readonly=True, lock=False, readahead=False)
    except lmdb.Error as error:
        raise ConfigError(f"{path} is no LMDB of this kind of machine ({error}): fetch it anew") from None
    pages = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if path.stat().st_size < pages:  # reading beyond the end would end the process (SIGBUS)
        environment.close()
        raise ConfigError(f"{path} is truncated: it has {path.stat().st_size:,} bytes, and pages for {pages:,}")
    return environment


def _name_class(part: str) -> str:
    """Returns the class of an environment: that of bedroom_train_lmdb/data.mdb is bedroom."""
    name = Path(part.removesuffix(f"/{LMDB_DATA}")).name
    return name.removesuffix("_lmdb").removesuffix("_train").removesuffix("_val").removesuffix(".lmdb")
