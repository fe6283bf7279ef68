"""Images by bucket: the images of a source, sorted by the bucket that each belongs to, and cut to its shape.

Which samples a bucket has is worked out once, by rank 0, from the pixel sizes of sizes.py. Beside an index on a disk it
is kept in a file that all ranks and workers map, so that none of them holds a list:

    buckets-KEY/index.json      sealed: how many samples each bucket has, and how many are left out or enlarged
    buckets-KEY/members.bin     the places of the samples in the source, bucket after bucket; in each in their order
"""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dstrain.data.buckets import BucketOrder, nearest, upscale
from dstrain.data.images import Images
from dstrain.data.index import CHUNK, HEADER, read_sealed
from dstrain.data.index_build import from_first
from dstrain.data.sizes import pixel_sizes
from dstrain.data.source import Chance, Item, Source
from dstrain.data.spread import View
from dstrain.disk import atomic, sealed
from dstrain.recipe import ConfigError, write_errors
from dstrain.recipe.shapes import Shape

_OUT = 65535                                   # uint16, the bucket of samples that are left out


@dataclass
class _Members:
    """Places of samples; of a file they are mapped again in another process."""

    path: Path | None = None
    dtype: str = "int64"
    array: np.ndarray | None = field(default=None, repr=False)

    def at(self, index: int | Tensor) -> Any:
        if self.array is None:
            self.array = np.memmap(self.path, self.dtype, "r")
        return self.array[index]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | ({} if self.path is None else {"array": None})


class Bucketed(View):
    """The images of `whole` by bucket. shapes: of the buckets, (width, height); images that one would enlarge more than
    `max_upscale` times are left out, None leaves none out.

    On all ranks together. ConfigError: no image is left.
    """

    ends: tuple[int, ...] = ()                 # behind the last sample of each bucket

    def __init__(self, whole: Images, shapes: tuple[Shape, ...], max_upscale: float | None = None) -> None:
        super().__init__(whole)
        self.chance_name, self.chance_count = whole.chance_name, whole.chance_count
        self.shapes = shapes
        sizes, folder = pixel_sizes(whole.layout, whole.index), whole.index.folder
        if folder is not None:
            key = [shapes, max_upscale, whole.split, whole.chosen.number, whole.chosen.names]
            folder = folder / f"buckets-{blake2b(repr(key).encode(), digest_size=8).hexdigest()}"
        header, self.members = from_first(lambda: _sorted(whole, sizes, shapes, max_upscale, folder))
        self.counts, self.left_out = tuple(header["counts"]), header["left_out"]
        self.enlarged, self.most = header["enlarged"], header["most"]
        if not sum(self.counts):
            raise ConfigError(f"data.max_upscale={max_upscale}: every bucket would enlarge every image of {whole.path} "
                              f"more often, up to {self.most:.1f} times: give smaller data.buckets")
        self.ends = tuple(np.cumsum(self.counts).tolist())

    def __len__(self) -> int:
        return self.ends[-1]

    def place(self, index: int | Tensor) -> int | Tensor:
        return int(self.members.at(index))

    def shape(self, index: int) -> Shape:
        """Width and height of a sample."""
        return self.shapes[int(np.searchsorted(self.ends, index, side="right"))]

    def read(self, index: int, chance: Chance | None = None) -> Item:
        return self.whole.read(self.place(index), chance, self.shape(index))

    def __getitem__(self, index: int) -> Item:
        return self.read(index)

    def order(self, global_batch: int, seed: int) -> BucketOrder:
        return BucketOrder(self.counts, global_batch, seed)

    def squares(self) -> Source:
        return self.whole

    def class_counts(self) -> np.ndarray | None:
        return self.whole.class_counts()

    def contents(self) -> str:
        return self.whole.contents()

    def describe(self) -> str:
        full = [(count, shape) for count, shape in zip(self.counts, self.shapes) if count]
        (least, small), (most, large) = min(full), max(full)
        sides = "{} x {}".format
        words = [self.whole.describe(), f"in {len(full)} of {len(self.shapes)} buckets of {least:,} ({sides(*small)}) "
                 f"to {most:,} ({sides(*large)})"]
        if self.left_out:
            words.append(f"{self.left_out:,} left out by data.max_upscale")
        if self.enlarged:
            words.append(f"{self.enlarged:,} enlarged, up to {self.most:.1f} times (data.max_upscale leaves such out)")
        return ", ".join(words)


def _sorted(whole: Images, sizes: np.ndarray, shapes: tuple[Shape, ...], max_upscale: float | None,
            folder: Path | None) -> tuple[dict[str, Any], _Members]:
    """How many samples the buckets have, and their places; written to the folder, or in memory."""
    dtype = "uint32" if len(whole) < 1 << 32 else "uint64"
    if folder is None:
        buckets = np.empty(len(whole), np.uint16)
        header = _choose(buckets, whole, sizes, shapes, max_upscale)
        return header, _Members(array=_filled(np.empty(sum(header["counts"]), dtype), buckets, header["counts"]))
    header = read_sealed(folder / HEADER)
    if header is None:
        with write_errors(folder, "name another folder for the index with data.index=FOLDER"):
            header = _written(whole, sizes, shapes, max_upscale, folder, dtype)
    return header, _Members(folder / "members.bin", dtype)


def _written(whole: Images, sizes: np.ndarray, shapes: tuple[Shape, ...], max_upscale: float | None, folder: Path,
             dtype: str) -> dict[str, Any]:
    """Makes the folder, which is there at once and whole: other commands may be about the same one."""
    building = folder.with_name(f"{folder.name}.{os.getpid()}")
    building.mkdir(parents=True, exist_ok=True)
    try:
        buckets = np.memmap(building / "by_sample.bin", np.uint16, "w+", shape=(len(whole),))
        header = _choose(buckets, whole, sizes, shapes, max_upscale)
        count = max(sum(header["counts"]), 1)                  # an empty file cannot be mapped
        members = np.memmap(building / "members.bin", dtype, "w+", shape=(count,))
        _filled(members, buckets, header["counts"]).flush()
        (building / "by_sample.bin").unlink()
        atomic.write(building / HEADER, sealed.render(header))
        with suppress(OSError):                                # another command was faster
            atomic.publish(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    if read_sealed(folder / HEADER) is None:
        raise ConfigError(f"{folder} holds no whole list of buckets and cannot be replaced: remove it")
    return header


def _choose(buckets: np.ndarray, whole: Images, sizes: np.ndarray, shapes: tuple[Shape, ...],
            max_upscale: float | None) -> dict[str, Any]:
    """Writes the bucket of each sample, uint16, and counts them."""
    counts, header = np.zeros(len(shapes), np.int64), {"left_out": 0, "enlarged": 0, "most": 1.0}
    targets, members = np.array(shapes), whole.chosen.members
    for start in range(0, len(whole), CHUNK):
        rows = slice(start, min(start + CHUNK, len(whole)))
        own = np.asarray(sizes[rows] if members is None else sizes[members[rows]])
        bucket = nearest(own, shapes, max_upscale or 1.0)
        factor = np.where(own.min(1) > 0, upscale(own, targets[bucket]), 1.0)
        out = factor > max_upscale if max_upscale else np.zeros(len(own), bool)
        buckets[rows] = np.where(out, _OUT, bucket)
        counts += np.bincount(bucket[~out], minlength=len(shapes))
        header["left_out"] += int(out.sum())
        header["enlarged"] += int((factor[~out] > 1).sum())
        header["most"] = max(header["most"], float(factor.max()))
    return header | {"counts": counts.tolist()}


def _filled(members: np.ndarray, buckets: np.ndarray, counts: list[int]) -> np.ndarray:
    """The samples sorted by bucket, some at a time."""
    free = np.cumsum(counts) - counts                          # where the next sample of each bucket goes
    for start in range(0, len(buckets), CHUNK):
        block = np.asarray(buckets[start:start + CHUNK])
        for bucket in np.unique(block[block != _OUT]).tolist():
            own = np.flatnonzero(block == bucket) + start
            members[free[bucket]:free[bucket] + len(own)] = own
            free[bucket] += len(own)
    return members
