"""Converts data of others once into what training reads: `dstrain convert KIND PATH --out OUT`.

Pictures become shards of encoded files, as `dstrain pack` writes them, with train/ and held_out/ if the data have a
test set of their own; latents become a cache, as `dstrain encode` writes it. Nothing in a file is executed.
"""

import io
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image

from dstrain.commands.options.convert import ConvertOptions
from dstrain.commands.options.shipped import find_shipped_folder
from dstrain.data.formats.labels import read_class_list
from dstrain.data.formats.packed import FORMAT, HELD_OUT, INDEX, PACKING, TRAIN, ShardWriter, hash_file, name_shard
from dstrain.disk import atomic, sealed, small
from dstrain.distributed.progress import Bar
from dstrain.recipe import ConfigError, explain_write_errors

_SHARD_BYTES = 1 << 28  # a shard ends with the sample that brings it above
_REMEDY = "give the same command again once it can"

Sample = tuple[str, bytes | np.ndarray, int | None]  # name, encoded file or pixels uint8 (H, W, C), label


@dataclass
class Pictures:
    """Holds the pictures of one split, in the order in which they are written."""

    number: int  # approximate, for the progress bar
    samples: Iterator[Sample]
    classes: tuple[str, ...] = ()  # empty: labels, where there are some, are numbers without names


def run_verb(options: ConvertOptions) -> None:
    """Converts the data as the options say, and prints what was written."""
    print(convert_data(options))


def convert_data(options: ConvertOptions) -> str:
    """Converts options.path into options.out, and returns a line that says what was written. Raises ConfigError if the
    data do not exist, or are not of options.kind.
    """
    if not options.path.exists():
        raise ConfigError(f"{options.path} does not exist: name the data that are to be converted")
    if options.kind == "latents":
        return _convert_latents(options)
    if options.kind == "imagenet-kit":
        number = load_converter("imagenet").write_table(options.path, options.out)
        return f"{number:,} images in {options.out}, which data.path and data.held_out_path take"
    splits = _open_pictures_by_split(options)
    counts = write_splits_as_shards(options.out, splits, options.kind)
    words = f"{sum(counts.values()):,} images in {options.out}"
    if len(counts) > 1:
        words += f" ({counts['train']:,} to train on, {counts['held_out']:,} held out)"
    return f"{words}: give data.path={options.out}"


def load_converter(name: str) -> ModuleType:
    """Executes the module NAME.py of the converters that are shipped with dstrain, such as "lsun", and returns the
    module.
    """
    path = find_shipped_folder(".py") / f"{name}.py"
    loader = SourceFileLoader(f"dstrain.shipped.convert.{name}", str(path))
    module = ModuleType(loader.name)
    loader.exec_module(module)
    return module


def _open_pictures_by_split(options: ConvertOptions) -> dict[str, Pictures]:
    """Opens the pictures in options.path with the converter for options.kind. Returns them by the name of their split,
    with the class names of --class-list if it is given.
    """
    class_list = read_class_list(options.class_list)
    if options.kind == "lsun":
        return load_converter("lsun").read_lsun(options.path, class_list)
    if options.kind == "npz":
        splits = load_converter("npz").read_npz(options.path)
    elif options.kind == "mnist":
        splits = load_converter("mnist").read_mnist(options.path)
    else:
        splits = load_converter("cifar").read_cifar(options.path, options.kind)
    if class_list.classes:
        for pictures in splits.values():
            pictures.classes = class_list.classes
    return splits


def _convert_latents(options: ConvertOptions) -> str:
    """Converts the latents in options.path into a cache of latents in options.out. Returns a line that says what was
    written.
    """
    index = load_converter("latents").convert_latents(options)
    encoding, bad = index["encoding"], len(index["bad_files"])
    return (
        f"{encoding['number']} samples in {options.out}: latents {encoding['dtype']} {encoding['shape']} x "
        f"{encoding['flips']}, scaling_factor {index['statistics']['scaling_factor']:.5f}"
        + (f", {bad} unreadable files replaced" if bad else "")
    )


def write_splits_as_shards(out: Path, splits: dict[str, Pictures], data_kind: str) -> dict[str, int]:
    """Writes the pictures of each split as shards: a single split into `out` itself, "train" and "held_out" into
    folders of these names in `out`. Returns the number of pictures of each split. `data_kind` is the kind of the data,
    such as "mnist".

    Raises ConfigError if a folder holds other files or cannot be written, or if a label is not below the number of
    classes.
    """
    folders = {split: out / split if len(splits) > 1 else out for split in splits}
    for folder in folders.values():
        _prepare_split_folder(out, folder, data_kind)
    return {split: _write_shards_and_index(folder, splits[split]) for split, folder in folders.items()}


def _prepare_split_folder(out: Path, folder: Path, data_kind: str) -> None:
    """Makes `folder`, which is `out` or a split's folder in it. Writes the kind of the data there, such as "mnist", and
    removes an earlier index. `data_kind` is that kind. Raises ConfigError if the folder holds files, unless an
    interrupted conversion of the same kind has left them.
    """
    with explain_write_errors(f"--out {out}", "name a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)
        known = {INDEX, PACKING, TRAIN, HELD_OUT}
        strangers = sorted(path.name for path in folder.iterdir() if path.name not in known)
        if not (folder / PACKING).exists():
            strangers = [name for name in strangers if not name.startswith(".")]
        else:
            with suppress(ValueError):  # a damaged file, which no conversion of ours leaves
                if small.read_json(folder / PACKING) == {"converted": data_kind}:
                    strangers = []
        if strangers:
            raise ConfigError(f"--out {out} holds {', '.join(strangers[:3])}: name a new folder")
        (folder / INDEX).unlink(missing_ok=True)
        atomic.write_file(folder / PACKING, json.dumps({"converted": data_kind}))


def _write_shards_and_index(folder: Path, pictures: Pictures) -> int:
    """Writes the shards of a split, then its index, and returns the number of pictures. Raises ConfigError if a label
    is not below the number of classes, or if the folder cannot be written.
    """
    records: list[dict[str, Any]] = []
    largest = -1
    with Bar("converting", total=pictures.number, unit=" images", unit_scale=True) as bar:
        for first in pictures.samples:
            path = folder / name_shard(len(records))
            with explain_write_errors(path, _REMEDY), atomic.replace_file(path) as temporary:
                with open(temporary, "wb") as file:
                    writer, number, size = ShardWriter(file), 0, 0
                    for name, content, label in chain([first], pictures.samples):
                        encoded = encode_png(content) if isinstance(content, np.ndarray) else content
                        writer.add_sample(name, encoded, label, ())
                        largest = max(largest, -1 if label is None else label)
                        number, size = number + 1, size + len(encoded)
                        bar.update(1)
                        if size >= _SHARD_BYTES:
                            break
                    writer.close()
                length, digest = temporary.stat().st_size, hash_file(temporary)
            records.append({"name": path.name, "size": length, "hash": digest, "samples": number, "bad": []})
    classes = pictures.classes or tuple(str(number) for number in range(largest + 1))
    if largest >= len(classes):
        raise ConfigError(f"the label {largest} is not among the {len(classes)} classes: name all in --class-list")
    body = {"format": FORMAT, "noun": "images", "number": sum(record["samples"] for record in records)}
    body |= {"classes": list(classes) if largest >= 0 else [], "captions": 0, "shards": records}
    with explain_write_errors(folder, _REMEDY):
        atomic.write_file(folder / INDEX, sealed.render_json_with_hash(body))
    return body["number"]


def encode_png(pixels: np.ndarray) -> bytes:
    """Encodes pixels, uint8 (H, W, C) with 1, 3 or 4 channels, as a PNG file, and returns its bytes."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    image.save(buffer := io.BytesIO(), "PNG")
    return buffer.getvalue()
