"""Cached codes of a first stage as a source: latents or token ids that launch/encode.py has written as shards.

Items of images are {"latent_mean", "latent_std": (C, h, w), as stored; "label"}, or {"tokens": int64 (h, w), "label"}.
Codes are never mirrored, since an encoder is not symmetric: the mirrored image was encoded by itself, and `take` reads
the codes of either.

Items of videos are {"tokens": int64 (t, h, w), "frames", "label"}; with captions "caption" uint8 (CAPTION_BYTES,); and
with encoded captions "text_encodings" (L, E), as stored, and "text_mask" bool (L,). Videos are never mirrored.

Opening reads the index and the files' sizes alone; the samples are mapped into memory.
"""

import hashlib
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dstrain import rng
from dstrain.data.rows import CAPTION_BYTES
from dstrain.data.shards import Arrays, Layout, check, is_cache, mapped, read_ahead, read_index
from dstrain.data.source import Bad, Source
from dstrain.recipe import ConfigError

_MAPPED = 4096                # shards that a process keeps mapped: each map holds a descriptor
_COUNTED = 1024               # shards whose labels are counted when a command starts; one takes some 0.1 ms
_VERIFIED = 4 << 30           # bytes whose hashes are compared before a run starts; takes some seconds
_REMEDY = "give the command of launch/encode.py that wrote the folder once more: it makes what is missing or damaged"


def is_encoded(path: str | Path) -> bool:
    """Whether a folder holds cached codes, or a part of them. A folder of images may have an index.json, too."""
    return is_cache(Path(path))


@dataclass
class Latents(Source):
    """The codes in a folder.

    path: what launch/encode.py wrote. split: "train", "held_out" or "all". held_out: share, by the hash of a number.
    Raises ConfigError where the index or a shard is missing, or has not the size that the index says.
    """

    path: str | Path
    split: str = "all"
    held_out: float = 0.0
    batched = True
    expects = True

    def __post_init__(self) -> None:
        self.path = Path(self.path)
        self.index = read_index(self.path)
        self.encoding: dict[str, Any] = self.index["encoding"]
        self.classes = tuple(self.index["classes"])
        self.extras = _extras(self.encoding)                         # shapes of what an item has beside its codes
        self.captioned = "caption" in self.extras
        # Where all files fit into half of the memory, the page cache keeps them, and workers only cost.
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.light = sum(shard["size"] for shard in self.index["shards"]) < memory // 2
        for shard in self.index["shards"]:
            path = self.path / shard["name"]
            if not path.exists():
                raise ConfigError(f"{path} is missing; {_REMEDY}")
            if path.stat().st_size != shard["size"]:
                raise ConfigError(f"{path} has {path.stat().st_size} bytes instead of {shard['size']}; {_REMEDY}")
        self.members = None if self.split == "all" or not self.held_out else self._members()
        self.noun = (f"cached {'clips' if 'num_frames' in self.encoding else 'images'} "
                     f"({self.encoding['kind']} {' x '.join(map(str, self.encoding['shape']))})")
        # shard -> codes (rows * flips, numbers), label (rows,) and extras (rows, ...), in the order of their last use
        self._open: dict[int, Arrays] = {}
        self._layouts: dict[str, Layout] = {}

    def _members(self) -> np.ndarray:
        number = torch.arange(self.encoding["number"])
        held = rng.uniform(rng.keys_of_seeds(number), "held_out") < self.held_out
        members = torch.nonzero(held if self.split == "held_out" else ~held)[:, 0].numpy()
        if not len(members):
            raise ConfigError(f"data.held_out={self.held_out} leaves none of the {len(number)} samples of {self.path} "
                              f"for the {self.split} split: choose another fraction or give data.held_out_path")
        return members

    def __len__(self) -> int:
        return self.encoding["number"] if self.members is None else len(self.members)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        batch = self.take(torch.tensor([index]))
        return {name: values[0] if values.ndim > 1 else int(values[0]) for name, values in batch.items()}

    def take(self, index: Tensor, mirrored: Tensor | None = None) -> dict[str, Tensor]:
        """The samples at `index` int64 (b,) as a batch; `mirrored` bool (b,): those of the mirrored image.

        ConfigError: some are mirrored, and the folder has no mirrored images.
        """
        shards, rows, codes_rows = self._places(index, mirrored)
        groups = np.searchsorted(np.unique(shards), shards) // _most_mapped()                # (b,)
        if groups.any():                                             # a large batch from more shards than may be mapped
            parts = [self.take(index[groups == group], None if mirrored is None else mirrored[groups == group])
                     for group in range(groups.max() + 1)]
            places = torch.from_numpy(np.argsort(np.argsort(groups, kind="stable")))
            return {name: torch.cat([part[name] for part in parts])[places] for name in parts[0]}
        opened = {shard: self._shard(shard) for shard in set(shards.tolist())}

        def gathered(name: str, places: np.ndarray) -> Tensor:
            return torch.from_numpy(_rows({shard: arrays[name] for shard, arrays in opened.items()}, shards, places))

        codes = gathered("codes", codes_rows).view(len(index), *_shape(self.encoding))
        rest = {name: gathered(name, rows) for name in ("label", *self.extras)}
        if self.encoding["kind"] == "tokens":
            return {"tokens": codes.long(), **rest}
        return {"latent_mean": codes[:, 0], "latent_std": codes[:, 1], **rest}

    def _places(self, index: Tensor, mirrored: Tensor | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each sample its shard, its row there, and the row of its codes. ConfigError as `take`."""
        number = index.numpy() if self.members is None else self.members[index.numpy()]
        flip = np.zeros(len(number), np.int64) if mirrored is None else mirrored.numpy().astype(np.int64)
        if flip.any() and self.encoding["flips"] == 1:
            raise ConfigError(f"{self.path} holds no mirrored images: set data.flip=false, or encode without --no-flip")
        shards, rows = np.divmod(number, self.encoding["shard_size"])
        return shards, rows, rows * self.encoding["flips"] + flip

    def expect(self, index: Tensor, mirrored: Tensor | None = None) -> None:
        """As of Source: codes and encoded captions. What is small is read when a shard is opened."""
        shards, rows, codes_rows = self._places(index, mirrored)
        for shard in np.unique(shards).tolist():
            arrays, here = self._shard(shard), shards == shard
            read_ahead(arrays["codes"], codes_rows[here])
            if "text_encodings" in arrays:
                read_ahead(arrays["text_encodings"], rows[here])

    def read_batch(self, index: Tensor, mirrored: Tensor | None = None,
                   chance: Tensor | None = None) -> tuple[dict[str, Tensor], Bad]:
        self.expect(index, mirrored)                                 # the first batches, which nobody has expected
        return self.take(index, mirrored), []

    def describe(self) -> str:
        bad = len(self.index["bad_files"])
        return super().describe() + (f"; {bad:,} unreadable files were replaced when they were encoded" if bad else "")

    def class_counts(self) -> np.ndarray | None:
        shards = range(len(self.index["shards"]))
        if not self.classes or len(shards) > _COUNTED:
            return None
        labels = np.concatenate([self._shard(number)["label"].copy() for number in shards])
        return np.bincount(labels if self.members is None else labels[self.members], minlength=len(self.classes))

    def _shard(self, number: int) -> Arrays:
        arrays = self._open.pop(number, None)
        if arrays is None:
            arrays = self._mapped(number)
            while len(self._open) >= _most_mapped():
                del self._open[next(iter(self._open))]
        self._open[number] = arrays
        return arrays

    def _mapped(self, number: int) -> Arrays:
        path = self.path / self.index["shards"][number]["name"]
        arrays = mapped(path, self._layouts)
        rows = min(self.encoding["shard_size"], self.encoding["number"] - number * self.encoding["shard_size"])
        codes = "tokens" if self.encoding["kind"] == "tokens" else "moments"
        shapes = {codes: (self.encoding["flips"], *_shape(self.encoding)), "label": (), **self.extras}
        for name, shape in shapes.items():
            stored = arrays[name].shape if name in arrays else None
            if stored != (rows, *shape):
                raise ConfigError(f"{path} holds {name} {stored} instead of {(rows, *shape)}; {_REMEDY}")
        for name in ("label", *self.extras):
            if name != "text_encodings":
                read_ahead(arrays[name][None], np.zeros(1, np.int64))
        return arrays | {"codes": arrays[codes].reshape(rows * self.encoding["flips"], -1)}

    def verify(self) -> None:
        """Compares hashes: of all shards where they are small, else of as many random ones as some seconds allow.

        ConfigError names the first that is damaged. launch/encode.py verifies all of them whenever it runs again.
        """
        shards, left = self.index["shards"], _VERIFIED
        order = np.random.default_rng(time.time_ns()).permutation(len(shards))
        if sum(shard["size"] for shard in shards) <= left:
            order.sort()
        for number in order:
            left -= shards[number]["size"]
            if left < 0:
                return
            try:
                check(self.path / shards[number]["name"], shards[number])
            except ConfigError as error:
                raise ConfigError(f"{error}; {_REMEDY}") from None

    def name(self, index: int) -> str:
        number = index if self.members is None else int(self.members[index])
        shard, row = divmod(number, self.encoding["shard_size"])
        return f"{self.index['shards'][shard]['name']}[{row}]"

    def fingerprint(self) -> str:
        hashes = "".join(shard["hash"] for shard in self.index["shards"])
        return (f"codes {self.split} n={len(self)} classes={len(self.classes)} "
                f"shards={hashlib.blake2b(hashes.encode(), digest_size=8).hexdigest()}")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}                 # a worker maps the files by itself


def _most_mapped() -> int:
    """Shards that may be mapped at a time: a quarter of the descriptors that a process may have, at most _MAPPED."""
    return max(1, min(_MAPPED, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


def _rows(opened: dict[int, np.ndarray], shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """A copy of some rows of arrays that lie in several shards: (n, ...)."""
    if len(opened) == 1:
        return next(iter(opened.values()))[rows]
    first = next(iter(opened.values()))
    copy = np.empty((len(rows), *first.shape[1:]), first.dtype)
    for i, (shard, row) in enumerate(zip(shards.tolist(), rows.tolist())):
        copy[i] = opened[shard][row]                         # row by row beats fancy indexing shard by shard (measured)
    return copy


def _extras(encoding: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """What a sample of videos has beside its codes: name -> shape."""
    if "num_frames" not in encoding:
        return {}
    shapes: dict[str, tuple[int, ...]] = {"frames": ()}
    if encoding["captions"]:
        shapes["caption"] = (CAPTION_BYTES,)
    if encoding["text"]:
        length, width = encoding["text"]["shape"]
        shapes |= {"text_encodings": (length, width), "text_mask": (length,)}
    return shapes


def _shape(encoding: dict[str, Any]) -> tuple[int, ...]:
    """The shape of one image's codes."""
    return (2, *encoding["shape"]) if encoding["kind"] == "latents" else tuple(encoding["shape"])
