"""Data that are not read as they lie, since `dstrain convert` writes them once as shards: how they are recognised.

    cifar10, cifar100   cifar-10-batches-py, cifar-100-python, and the binary version of either
    mnist               idx files: of MNIST, Fashion-MNIST, KMNIST and EMNIST, also as .gz
    lsun                LMDB environments
    npz                 an .npz of images, as ADM keeps them and `dstrain generate` writes them
    imagenet-kit        ImageNet's validation images in one folder, with their labels in a file beside or above it
    latents             latents that fast-DiT, LightningDiT, EDM2 or REPA have cached

Names and places of files decide; no content is read.
"""

import os
import re
import shlex
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dstrain.data.files.local import Files, LocalFiles
from dstrain.data.formats.base import Request, file_exists, peek_names
from dstrain.recipe import ConfigError

# Files of a CIFAR: folder -> (those of training, that of the test, that of the names of the classes).
_TEN = tuple(f"data_batch_{number}" for number in (1, 2, 3, 4, 5))
CIFAR = {
    "cifar-10-batches-py": (_TEN, "test_batch", "batches.meta"),
    "cifar-100-python": (("train",), "test", "meta"),
    "cifar-10-batches-bin": (tuple(f"{name}.bin" for name in _TEN), "test_batch.bin", "batches.meta.txt"),
    "cifar-100-binary": (("train.bin",), "test.bin", "fine_label_names.txt"),
}
IDX = re.compile(r"(?P<set>[a-z]+-[a-z]+-)?(?P<split>train|t10k|test)-images[-.]idx3-ubyte(\.gz)?")
_IDX_FOLDERS = ("", *(f"{name}raw/" for name in ("", "MNIST/", "FashionMNIST/", "KMNIST/", "EMNIST/")))
LMDB_DATA, _LMDB_FOLDER, _LMDB_FILES = "data.mdb", "_lmdb", (".lmdb", ".mdb")
VALIDATION_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.jpe?g", re.IGNORECASE)
_VALIDATION_LABELS = (
    "LOC_val_solution.csv",
    "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt",
    "data/ILSVRC2012_validation_ground_truth.txt",
    "ILSVRC2012_validation_ground_truth.txt",
    "imagenet_2012_validation_synset_labels.txt",
)
_FOLDERS_ABOVE = 5  # in which the file with the labels of val/ is looked for
_ENTRIES = 100  # of a folder that may be val/ are looked at


class Cifar(NamedTuple):
    """Names a CIFAR that was found: a name of CIFAR, and the folder below the root with its files ("" or "NAME/")."""

    form: str
    folder: str


def refuse_unconverted(root: str, files: Files, request: Request) -> None:
    """Checks that data are read as they lie. Raises ConfigError with the command that converts them if they are not."""
    if cifar := find_cifar(root, files):
        kind, what = ("cifar100", "CIFAR-100") if "100" in cifar.form else ("cifar10", "CIFAR-10")
        own_file = os.path.basename(root) in (*CIFAR[cifar.form][0], CIFAR[cifar.form][1])
        folder = os.path.dirname(root) if own_file else root
    elif find_idx(files):
        kind, what, folder = "mnist", "MNIST's idx files", root
    elif find_lmdb(files):
        kind, what, folder = "lsun", "LMDB environments, as LSUN's", root
    elif is_npz(files):
        kind, what, folder = "npz", "the arrays of an .npz", root
    elif request.labels == "auto" and not request.captions and find_validation_labels(root, files):
        _refuse_flat_validation(root, request)
        return
    else:
        return
    raise ConfigError(f"{request.key}={root} holds {what}: {describe_conversion(kind, folder, request.key, files.far)}")


def describe_conversion(kind: str, path: str, key: str, far: bool = False) -> str:
    """Returns the remedy: the command that converts the data at a path, and the entry of a recipe that follows it."""
    name = os.path.basename(path.rstrip("/")) or "data"
    out = f"{kind if kind.startswith('cifar') else os.path.splitext(name)[0]}-shards"
    copied = "copy them to a disk, and " if far else ""
    command = f"dstrain convert {kind} {shlex.quote(path)} --out {shlex.quote(out)}"
    return f"{copied}convert them once with `{command}`, then give {key}={out}"


def _refuse_flat_validation(root: str, request: Request) -> None:
    table = f"{root.rstrip('/')}.csv"
    remedy = f"then give {request.key}={table}"
    if os.path.isdir(Path(root).resolve().parent / "train"):
        remedy += ", or the folder above both, whose training images are in train/"
    raise ConfigError(
        f"{request.key}={root} holds ImageNet's validation images without class folders: list them once with "
        f"`dstrain convert imagenet-kit {shlex.quote(root)} --out {shlex.quote(table)}`, {remedy}"
    )


def find_cifar(root: str, files: Files) -> Cifar | None:
    """Returns the CIFAR in a folder, in the folder of that name below it, or around a file. Returns None for others."""
    own = os.path.basename(root.rstrip("/"))
    top = peek_names(files)
    is_file = top == [(own, False)]
    for form, (train, test, meta) in CIFAR.items():
        if is_file:
            if own in (*train, test) and file_exists(files, meta):
                return Cifar(form, "")
            continue
        for folder, first in (("", (train[0], False)), (f"{form}/", (form, True))):
            if first in top and all(file_exists(files, folder + name) for name in (train[0], test, meta)):
                return Cifar(form, folder)
    return None


def find_idx(files: Files) -> list[str]:
    """Returns the idx files of images: the file itself, or those in the folder and in torchvision's folders below it.

    Where a file is there both packed and unpacked, the unpacked one counts.
    """
    folders, found = {name for name, inner in peek_names(files) if inner}, set()
    for folder in _IDX_FOLDERS:
        if not folder or folder.partition("/")[0] in folders:
            with suppress(FileNotFoundError, NotADirectoryError):
                found |= {folder + name for name, inner in files.names(folder.rstrip("/")) if IDX.fullmatch(name)}
    return sorted(name for name in found if name.removesuffix(".gz") == name or name[:-3] not in found)


def find_lmdb(files: Files) -> list[str]:
    """Returns the data files of LMDB environments, in the order of their names: the folder's own, or of *_lmdb/."""
    top = peek_names(files)
    if (LMDB_DATA, False) in top:
        return [LMDB_DATA]
    if top and all(name.endswith(_LMDB_FILES) and not is_folder for name, is_folder in top):
        return [name for name, _ in top]
    folders = [name for name, is_folder in top if is_folder and name.endswith(_LMDB_FOLDER)]
    return [f"{name}/{LMDB_DATA}" for name in folders if file_exists(files, f"{name}/{LMDB_DATA}")]


def is_npz(files: Files) -> bool:
    """Returns whether the data are a single .npz file."""
    names = peek_names(files)
    return len(names) == 1 and names[0][0].lower().endswith(".npz") and not names[0][1]


def find_validation_labels(root: str, files: Files | None = None) -> Path | None:
    """Returns the nearest file with the labels of ImageNet's validation images, if these lie flat in a folder."""
    if (files is not None and not isinstance(files, LocalFiles)) or not is_flat_validation(root):
        return None
    path = Path(root).resolve()
    for place in [path, *path.parents[:_FOLDERS_ABOVE]]:
        for name in _VALIDATION_LABELS:
            if (place / name).is_file():
                return place / name
    return None


def is_flat_validation(root: str | Path) -> bool:
    """Returns whether one of ImageNet's validation images is among the first entries of a folder."""
    try:
        with os.scandir(root) as entries:
            return any(VALIDATION_IMAGE.fullmatch(entry.name) for entry in islice(entries, _ENTRIES))
    except OSError:
        return False


def holds_latents(folder: Path) -> bool:
    """Returns whether a folder is laid out as the latents of fast-DiT, LightningDiT, EDM2 or REPA."""
    if (folder / "dataset.json").is_file() or next(folder.glob("[!.]*.safetensors"), None) is not None:
        return True
    return find_fast_dit(folder) is not None


def find_fast_dit(folder: Path) -> tuple[Path, Path] | None:
    """Returns fast-DiT's folders NAME_features and NAME_labels."""
    for features in sorted(folder.glob("[!.]*features")):
        labels = features.with_name(f"{features.name.removesuffix('features')}labels")
        if features.is_dir() and labels.is_dir():
            return features, labels
    return None
