"""Writes pictures as shards of encoded files, the format of `dstrain pack`: one set, or train/ and held_out/."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dstrain.data.formats.packed import FORMAT, HELD_OUT, INDEX, PACKING, TRAIN, ShardWriter, hash_file, name_shard
from dstrain.disk import atomic, sealed
from dstrain.distributed.progress import Bar
from dstrain.recipe import ConfigError, write_errors

_SHARD_BYTES = 1 << 28  # a shard ends with the sample that brings it above
_REMEDY = "give the same command again once it can"

Sample = tuple[str, bytes | np.ndarray, int | None]  # name, encoded file or pixels uint8 (H, W, C), label


@dataclass
class Pictures:
    """The pictures of one split, in the order that they keep."""

    number: int  # about, for the progress bar
    samples: Iterator[Sample]
    classes: tuple[str, ...] = ()  # empty: labels, where there are some, are numbers without names


def write_splits(out: Path, splits: dict[str, Pictures], of: str) -> dict[str, int]:
    """Writes each split: "train" and "held_out" into folders of these names, a single one into `out` itself.

    Returns how many pictures each has.

    Raises ConfigError if the folder holds other files, or a label does not belong to a class.
    """
    folders = {split: out / split if len(splits) > 1 else out for split in splits}
    for folder in folders.values():
        _prepare_folder(out, folder, of)
    return {split: _write_shards(folder, splits[split]) for split, folder in folders.items()}


def _prepare_folder(out: Path, folder: Path, of: str) -> None:
    """Makes a folder that holds nothing but what an interrupted conversion has left."""
    with write_errors(f"--out {out}", "name a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)
        known = {INDEX, PACKING, TRAIN, HELD_OUT}
        strangers = sorted(path.name for path in folder.iterdir() if path.name not in known)
        if not (folder / PACKING).exists():
            strangers = [name for name in strangers if not name.startswith(".")]
        elif json.loads((folder / PACKING).read_text()) == {"converted": of}:
            strangers = []
        if strangers:
            raise ConfigError(f"--out {out} holds {', '.join(strangers[:3])}: name a new folder")
        (folder / INDEX).unlink(missing_ok=True)
        atomic.write_file(folder / PACKING, json.dumps({"converted": of}))


def _write_shards(folder: Path, pictures: Pictures) -> int:
    """Writes the shards of a split, then its index; returns how many pictures there are."""
    records: list[dict[str, Any]] = []
    largest = -1
    with Bar("converting", total=pictures.number, unit=" images", unit_scale=True) as bar:
        for first in pictures.samples:
            path = folder / name_shard(len(records))
            with write_errors(path, _REMEDY), atomic.replace_file(path) as temporary:
                with open(temporary, "wb") as file:
                    writer, number, size = ShardWriter(file), 0, 0
                    for name, content, label in chain([first], pictures.samples):
                        encoded = encode_png(content) if isinstance(content, np.ndarray) else content
                        writer.add(name, encoded, label, ())
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
    with write_errors(folder, _REMEDY):
        atomic.write_file(folder / INDEX, sealed.render_sealed(body))
    return body["number"]


def encode_png(pixels: np.ndarray) -> bytes:
    """Returns pixels uint8 (H, W, 1, 3 or 4) as a PNG."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    image.save(buffer := io.BytesIO(), "PNG")
    return buffer.getvalue()
