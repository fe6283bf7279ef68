"""Recognises data that are not read directly: `dstrain convert` must convert or list them once. By kind of converter:

    cifar10, cifar100   cifar-10-batches-py, cifar-100-python, and the binary version of either
    mnist               idx files: of MNIST, Fashion-MNIST, KMNIST and EMNIST, also as .gz
    lsun                LMDB environments
    npz                 an .npz of images, as ADM keeps them and `dstrain generate` writes them
    imagenet-kit        ImageNet's validation images in one folder, with their labels in a file beside or above it
    latents             latents that fast-DiT, LightningDiT, EDM2 or REPA have cached

Only the names and places of files are looked at, and no content is read.
"""

import os
import re
import shlex
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from dstrain.data.files.local import Files, LocalFiles
from dstrain.data.formats.base import Request, list_first_folder_entries
from dstrain.recipe import ConfigError

# Files of a CIFAR by folder: (training files, test file, file with the names of the classes).
_TEN = tuple(f"data_batch_{number}" for number in (1, 2, 3, 4, 5))
CIFAR = {
    "cifar-10-batches-py": (_TEN, "test_batch", "batches.meta"),
    "cifar-100-python": (("train",), "test", "meta"),
    "cifar-10-batches-bin": (tuple(f"{name}.bin" for name in _TEN), "test_batch.bin", "batches.meta.txt"),
    "cifar-100-binary": (("train.bin",), "test.bin", "fine_label_names.txt"),
}
IDX = re.compile(r"(?P<set>[a-z]+-[a-z]+-)?(?P<split>train|t10k|test)-images[-.]idx3-ubyte(\.gz)?")
LMDB_DATA = "data.mdb"
CONVERTED = {  # what a form is called, and the kind of its converter
    "CIFAR-10": "cifar10",
    "CIFAR-100": "cifar100",
    "MNIST's idx files": "mnist",
    "LMDB environments": "lsun",
}
VALIDATION_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.jpe?g", re.IGNORECASE)
_VALIDATION_LABELS = (
    "LOC_val_solution.csv",
    "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt",
    "data/ILSVRC2012_validation_ground_truth.txt",
    "ILSVRC2012_validation_ground_truth.txt",
    "imagenet_2012_validation_synset_labels.txt",
)
_FOLDERS_ABOVE = 5  # so many folders above val/ are searched for the file with its labels
_ENTRIES = 100  # so many entries of a folder are looked at to recognise val/


def refuse_unconverted_data(root: str, files: Files, request: Request, formats: Iterable[tuple[str, str]]) -> None:
    """Raises ConfigError if a `dstrain convert` command must run before the data can be read: one that converts them,
    or one that lists ImageNet's validation images. The message has the command.

    formats: (what messages call it, its folder or file below `root`) for each form of data that was found.
    """
    for noun, place in formats:
        if kind := CONVERTED.get(noun):
            path = root if os.path.isfile(root) else "/".join(filter(None, (root.rstrip("/"), place)))
            if os.path.isfile(root) and kind.startswith("cifar"):
                path = os.path.dirname(root)
            raise _make_conversion_error(root, noun, kind, path, request.key, files.far)
    if is_single_npz(files):
        raise _make_conversion_error(root, "the arrays of an .npz", "npz", root, request.key, files.far)
    if request.labels == "auto" and not request.captions and find_imagenet_validation_labels(root, files):
        _refuse_flat_imagenet_validation(root, request)


def _make_conversion_error(
    root: str, noun: str, converter: str, path: str, recipe_key: str, is_remote: bool
) -> ConfigError:
    """Returns the error for data that must be converted first.

    root: the data's path, and noun: what messages call the data. The other arguments are those of
    `describe_conversion_command`.
    """
    return ConfigError(
        f"{recipe_key}={root} holds {noun}: {describe_conversion_command(converter, path, recipe_key, is_remote)}"
    )


def describe_conversion_command(converter: str, path: str, recipe_key: str, is_remote: bool = False) -> str:
    """Returns the remedy for a message: the command that converts the data, and what the recipe must then say.

    converter: the kind of data, as `dstrain convert` calls it.
    path: the path of the data.
    recipe_key: the key that names the data.
    is_remote: True if the data are at an address, and must be copied to a disk first.
    """
    name = os.path.basename(path.rstrip("/").removesuffix("/raw")) or "data"
    out = f"{converter if converter.startswith('cifar') else os.path.splitext(name)[0]}-shards"
    copied = "copy them to a disk, and " if is_remote else ""
    command = f"dstrain convert {converter} {shlex.quote(path)} --out {shlex.quote(out)}"
    return f"{copied}convert them once with `{command}`, then give {recipe_key}={out}"


def _refuse_flat_imagenet_validation(root: str, request: Request) -> None:
    """Raises ConfigError for ImageNet's validation images without class folders, with the command that lists them."""
    table = f"{root.rstrip('/')}.csv"
    remedy = f"then give {request.key}={table}"
    if os.path.isdir(Path(root).resolve().parent / "train"):
        remedy += ", or the folder above both, whose training images are in train/"
    raise ConfigError(
        f"{request.key}={root} holds ImageNet's validation images without class folders: list them once with "
        f"`dstrain convert imagenet-kit {shlex.quote(root)} --out {shlex.quote(table)}`, {remedy}"
    )


def is_single_npz(files: Files) -> bool:
    """Returns whether the data are a single file whose name ends in .npz."""
    names = list_first_folder_entries(files)
    return len(names) == 1 and names[0][0].lower().endswith(".npz") and not names[0][1]


def find_imagenet_validation_labels(root: str, files: Files | None = None) -> Path | None:
    """Returns the file with the labels of ImageNet's validation images. Looks in their folder `root` and in the five
    folders above it, and takes the nearest.

    Returns None if there is no such file, if `root` does not hold these images without class folders, or if `files` are
    not on this machine.
    """
    if (files is not None and not isinstance(files, LocalFiles)) or not is_flat_imagenet_validation_folder(root):
        return None
    path = Path(root).resolve()
    for place in [path, *path.parents[:_FOLDERS_ABOVE]]:
        for name in _VALIDATION_LABELS:
            if (place / name).is_file():
                return place / name
    return None


def is_flat_imagenet_validation_folder(root: str | Path) -> bool:
    """Returns whether a folder holds ImageNet's validation images without class folders: one of its first 100 entries
    has a name such as ILSVRC2012_val_00000001.JPEG. Returns False if the folder cannot be listed.
    """
    try:
        with os.scandir(root) as entries:
            return any(VALIDATION_IMAGE.fullmatch(entry.name) for entry in islice(entries, _ENTRIES))
    except OSError:
        return False


def has_latents(folder: Path) -> bool:
    """Returns whether a folder looks like the latents of fast-DiT, LightningDiT, EDM2 or REPA: it holds a dataset.json,
    .safetensors files, or NAME_features beside NAME_labels.
    """
    if (folder / "dataset.json").is_file() or next(folder.glob("[!.]*.safetensors"), None) is not None:
        return True
    return find_features_and_labels_folders(folder) is not None


def find_features_and_labels_folders(folder: Path) -> tuple[Path, Path] | None:
    """Returns the first pair of folders NAME_features and NAME_labels in a folder, as fast-DiT writes latents; None if
    there is none.
    """
    for features in sorted(folder.glob("[!.]*features")):
        labels = features.with_name(f"{features.name.removesuffix('features')}labels")
        if features.is_dir() and labels.is_dir():
            return features, labels
    return None
