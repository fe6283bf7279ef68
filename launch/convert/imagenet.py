"""The labels of ImageNet's validation images, which lie in one folder, as a table beside it; no image is copied.

LOC_val_solution.csv                                                                Kaggle's
ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt with meta.mat     the development kit
imagenet_2012_validation_synset_labels.txt                                          TensorFlow's, a synset a line
"""

import csv
import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.data.formats.labels import SYNSET
from dstrain.data.formats.unconverted import VALIDATION_IMAGE, find_imagenet_validation_labels
from dstrain.disk import atomic, small
from dstrain.recipe import ConfigError, explain_write_errors, require_replaceable_file

_MOST_BYTES = 1 << 24  # of a file of the kit


def write_table(path: Path, out: Path) -> int:
    """Writes a table of the images in a folder and their synsets, `path,label`; returns how many there are.

    Raises ConfigError if the folder holds other images, or no file with the labels is beside or above it.
    """
    labels_file = find_imagenet_validation_labels(str(path))
    if labels_file is None:
        raise ConfigError(
            f"{path}: name the folder with ILSVRC2012_val_00000001.JPEG, and put its labels beside or above it: "
            "ILSVRC2012_devkit_t12/, LOC_val_solution.csv or imagenet_2012_validation_synset_labels.txt"
        )
    synsets = _read_synsets(labels_file)
    rows = []
    for name in sorted(os.listdir(path)):
        match = VALIDATION_IMAGE.fullmatch(name)
        if match is None:
            if name.lower().endswith((".jpg", ".jpeg", ".png", ".webp", ".bmp")) and name[0] != ".":
                raise ConfigError(f"{path}: {name} is none of ImageNet's validation images: take it away")
            continue
        number = int(match[1])
        if not 1 <= number <= len(synsets):
            raise ConfigError(f"{labels_file} has no label of {name}, only of {len(synsets)} images")
        rows.append((os.path.relpath(path / name, out.parent), synsets[number - 1]))
    require_replaceable_file(out, "--out", _is_table)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("path", "label"), *rows])
    with explain_write_errors(f"--out {out}", "name a file that can be written"):
        atomic.write_file(out, text.getvalue())
    return len(rows)


def _is_table(path: Path) -> bool:
    with open(path, encoding="utf-8") as file:
        head, first = file.readline(), file.readline()
    return head == "path,label\n" and VALIDATION_IMAGE.fullmatch(os.path.basename(first.partition(",")[0])) is not None


def _read_synsets(path: Path) -> list[str]:
    """Returns the synset of each image in the order of their numbers. Raises ConfigError if the file has others."""
    try:
        lines = small.read_text(path, _MOST_BYTES).split("\n")
        pairs = list(csv.reader(lines)) if path.suffix == ".csv" else []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read ({' '.join(str(error).split())}): take the kit's own file") from None
    if path.suffix == ".csv":
        numbered = {}
        for row in pairs:
            if len(row) == 2 and (match := VALIDATION_IMAGE.fullmatch(f"{row[0]}.JPEG")):
                numbered[int(match[1])] = row[1].partition(" ")[0]
        synsets = [numbered.get(number, "") for number in range(1, len(numbered) + 1)]
    else:
        synsets = [line.strip() for line in lines if line.strip()]
        if path.name.startswith("ILSVRC2012"):
            by_number = _read_numbers(path.parent / "meta.mat")
            synsets = [by_number.get(number, "") for number in synsets]
    for place, synset in enumerate(synsets or [""], 1):
        if not SYNSET.fullmatch(synset):
            raise ConfigError(f"{path}: no synset such as n01440764 for image {place}: take the kit's own file")
    return synsets


def _read_numbers(path: Path) -> dict[str, str]:
    """Returns the synset of each class by its ILSVRC2012_ID, from the kit's meta.mat."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise ConfigError(
            f"{path} is MATLAB's: `pip install scipy` reads it; or put LOC_val_solution.csv beside val/"
        ) from None
    try:
        small.read_bytes(path, _MOST_BYTES)
        rows: Any = np.atleast_1d(loadmat(path, squeeze_me=True, variable_names=["synsets"])["synsets"])
        return {str(int(row["ILSVRC2012_ID"])): str(row["WNID"]) for row in rows if int(row["num_children"]) == 0}
    except Exception as error:  # whatever a damaged file makes scipy raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(f"{path} cannot be read ({reason}): take the kit's own file") from None
