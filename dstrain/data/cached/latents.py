"""Cached codes of a first stage as a source: latents or token ids that `dstrain encode` has written as shards.

Items of images are {"latent_mean", "latent_std": (C, h, w), as stored; "label"}, or {"tokens": int64 (h, w), "label"}.
Codes are never mirrored, since an encoder is not symmetric: each image and its mirrored image were encoded separately,
and `read_codes` reads the codes of one of the two.

Items of videos are {"tokens": int64 (t, h, w), "frames", "label"}. Videos are never mirrored. With captions, an item of
either has "caption" uint8 (bytes,), too; with encoded captions "text_encodings" (L, E), as stored, and
"text_mask" bool (L,). If a sample has several crops or captions, its key chooses one of each; held-out samples take the
first ones.

Opening reads only the index and the files' sizes; the samples are mapped into memory. The memory of a rank or worker
does not grow with the samples, except by the size of each shard and the counts of index/held_out.py.
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

from dstrain.data.cached.shards import (
    CAPTION_BYTES,
    Arrays,
    Layout,
    has_encode_output,
    map_shard,
    name_shard,
    prefetch_rows,
    read_index,
    read_verified_metadata,
)
from dstrain.data.index.held_out import Members
from dstrain.data.source import Bad, Source, join_batches
from dstrain.recipe import ConfigError

_MAPPED = 4096  # shards that a process keeps mapped: each map holds a descriptor
_COUNTED = 1024  # shards whose labels are counted when a command starts; one takes some 0.1 ms
_TEXTS = ("caption", "text_encodings", "text_mask")
_VERIFIED = 4 << 30  # bytes whose hashes are compared before a run starts; takes some seconds
_REMEDY = "give the `dstrain encode` command that wrote the folder once more: it makes what is missing or damaged"


def is_codes_cache(path: str | Path) -> bool:
    """Returns whether a folder holds cached latents or tokens of `dstrain encode`, complete or not. Returns False for a
    folder in which another tool has written an index.json.
    """
    return has_encode_output(Path(path))


@dataclass
class Latents(Source):
    """The cached codes of one split of a folder.

    path: a folder that `dstrain encode` has written. split: "train", "held_out" or "all". held_out: share of the
    samples that is held out, chosen by a hash of the sample's number; 0: every split has all samples. Raises
    ConfigError if the index or a shard is missing or damaged, if a shard has another size than the index says, or if
    the split has no samples.
    """

    path: str | Path
    split: str = "all"
    held_out: float = 0.0
    batched = True
    prefetches = True

    def __post_init__(self) -> None:
        self.path = Path(self.path)
        index = read_index(self.path)
        self.index = {name: entry for name, entry in index.items() if name not in ("shards", "bad_files")}
        self.encoding: dict[str, Any] = index["encoding"]
        self.classes = tuple(index["classes"])
        self.extras = _compute_array_shapes_besides_codes(self.encoding)  # shapes of what an item has beside its codes
        self.crops, self.num_captions = self.encoding.get("crops", 1), self.encoding.get("num_captions", 1)
        self.captioned = "caption" in self.extras
        if max(self.crops, self.num_captions) > 1:  # a number for the crop, and one for the caption
            self.chance_name, self.chance_count = "variant", 2
        self.sizes = np.array([shard["size"] for shard in index["shards"]], np.int64)
        widths = enumerate(shard.get("caption_bytes", CAPTION_BYTES) for shard in index["shards"])
        self.wide = {number: width for number, width in widths if width > CAPTION_BYTES}  # of shards with long captions
        self.hash = hashlib.blake2b("".join(shard["hash"] for shard in index["shards"]).encode(), digest_size=8)
        self.hash, self.unreadable = self.hash.hexdigest(), len(index["bad_files"])
        # Where all files fit into half of the memory, the page cache keeps them, and workers only cost.
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.light = bool(self.sizes.sum() < memory // 2)
        for number, size in enumerate(self.sizes.tolist()):
            path = self.path / name_shard(number)
            if not path.exists():
                raise ConfigError(f"{path} is missing; {_REMEDY}")
            if path.stat().st_size != size:
                raise ConfigError(f"{path} has {path.stat().st_size} bytes instead of {size}; {_REMEDY}")
        self.members = None if self.split == "all" or not self.held_out else self._find_split_members()
        self.noun = (
            f"cached {'clips' if 'num_frames' in self.encoding else 'images'} "
            f"({self.encoding['kind']} {' x '.join(map(str, self.encoding['shape']))}"
            f"{f', {self.crops} crops each' if self.crops > 1 else ''})"
        )
        # shard -> codes (rows * crops * flips, numbers), label (rows,) and extras, in the order of their last use
        self._open: dict[int, Arrays] = {}
        self._layouts: dict[tuple[int, int], Layout] = {}  # of shards with so many rows, and bytes of a caption

    def _find_split_members(self) -> Members:
        """Returns which samples are in the split, as Members. Raises ConfigError if none is."""
        members = Members(self.encoding["number"], self.held_out, self.split)
        if not len(members):
            raise ConfigError(
                f"data.held_out={self.held_out} leaves none of the {members.number} samples of "
                f"{self.path} for the {self.split} split: choose another fraction or give "
                "data.held_out_path"
            )
        return members

    def __len__(self) -> int:
        return self.encoding["number"] if self.members is None else len(self.members)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        batch = self.read_codes(torch.tensor([index]))
        return {name: values[0] if values.ndim > 1 else int(values[0]) for name, values in batch.items()}

    def read_codes(
        self, index: Tensor, mirrored: Tensor | None = None, random_number: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Reads the samples at `index` int64 (b,) as a batch.

        mirrored: bool (b,), True to read the codes of the mirrored image; None: mirrors no image
        random_number: float (b, 2) in [0, 1); column 0 chooses a crop of each sample, column 1 a caption. None: takes
            the first ones

        Raises ConfigError if `mirrored` has a True and the folder has no codes of mirrored images.
        """
        shards, rows, codes_rows = self._locate_rows_in_shards(index, mirrored, random_number)
        groups = np.searchsorted(np.unique(shards), shards) // _compute_max_mapped_shards()  # (b,)
        if groups.any():  # a large batch from more shards than may be mapped
            parts = [
                self.read_codes(
                    *(
                        None if values is None else values[groups == group]
                        for values in (index, mirrored, random_number)
                    )
                )
                for group in range(groups.max() + 1)
            ]
            places = torch.from_numpy(np.argsort(np.argsort(groups, kind="stable")))
            return {name: values[places] for name, values in join_batches(parts).items()}
        opened = {shard: self._get_mapped_shard(shard) for shard in set(shards.tolist())}

        def gather_rows(name: str, places: np.ndarray) -> Tensor:
            return torch.from_numpy(
                _copy_rows_from_shards({shard: arrays[name] for shard, arrays in opened.items()}, shards, places)
            )

        codes = gather_rows("codes", codes_rows).view(len(index), *_compute_codes_shape(self.encoding))
        rest = {name: gather_rows(name, rows) for name in ("label", *self.extras) if name not in _TEXTS}
        if self.captioned:
            texts = self._choose_caption_rows(rows, random_number, rest.pop("captions", None))
            rest |= {name: gather_rows(name, texts) for name in self.extras if name in _TEXTS}
        if self.encoding["kind"] == "tokens":
            return {"tokens": codes.long(), **rest}
        std = codes[:, 1] if codes.shape[1] == 2 else torch.zeros_like(codes[:, 0])
        return {"latent_mean": codes[:, 0], "latent_std": std, **rest}

    def _locate_rows_in_shards(
        self, index: Tensor, mirrored: Tensor | None, random_number: Tensor | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Finds samples in the shards. Arguments and errors are as in `read_codes`. Returns for each sample, int64 (b,)
        each:

        the number of its shard
        its row among the samples of the shard
        its row among the codes of the shard, where a sample has one row for each crop and each mirroring
        """
        number = index.numpy() if self.members is None else self.members.find_members_at(index.numpy())
        flip = np.zeros(len(number), np.int64) if mirrored is None else mirrored.numpy().astype(np.int64)
        if flip.any() and self.encoding["flips"] == 1:
            raise ConfigError(f"{self.path} holds no mirrored images: set data.flip=false, or encode without --no-flip")
        shards, rows = np.divmod(number, self.encoding["shard_size"])
        crop = 0 if random_number is None else (random_number[:, 0].double().numpy() * self.crops).astype(np.int64)
        return shards, rows, (rows * self.crops + crop) * self.encoding["flips"] + flip

    def _choose_caption_rows(self, rows: np.ndarray, random_number: Tensor | None, counts: Tensor | None) -> np.ndarray:
        """Chooses a caption of each sample. Returns the rows of these captions in the shards' tables of texts: int64
        (b,).

        rows: the samples' rows in their shards
        random_number: float (b, 2); column 1 chooses a caption
        counts: how many captions each sample has

        If `random_number` or `counts` is None, takes the first caption.
        """
        if counts is None or random_number is None:
            return rows * self.num_captions
        return rows * self.num_captions + (random_number[:, 1].double().numpy() * counts.numpy()).astype(np.int64)

    def prefetch(self, index: Tensor, mirrored: Tensor | None = None, random_number: Tensor | None = None) -> None:
        """Asks the kernel to read what `read_batch` with the same arguments needs, and does not wait. Asks for all
        captions of a sample, whichever `random_number` chooses.
        """
        shards, rows, codes_rows = self._locate_rows_in_shards(index, mirrored, random_number)
        for shard in np.unique(shards).tolist():
            arrays, here = self._get_mapped_shard(shard), shards == shard
            prefetch_rows(arrays["codes"], codes_rows[here])
            for name in ("label", *self.extras):
                texts = self.num_captions if name in _TEXTS else 1
                prefetch_rows(arrays[name].reshape(-1, texts * arrays[name][0].size), rows[here])

    def read_batch(
        self, index: Tensor, mirrored: Tensor | None = None, random_number: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Bad]:
        """Reads the samples at `index` int64 (b,). Returns the batch, and [], since no sample of a cache is replaced.
        See `read_codes`.
        """
        self.prefetch(index, mirrored, random_number)  # needed for the first batches alone, which nobody has prefetched
        return self.read_codes(index, mirrored, random_number), []

    def describe_samples(self) -> str:
        """Returns a line about the cache. The line also says how many unreadable files were replaced when the cache was
        made, and whether captions were cut off.
        """
        words = super().describe_samples()
        if self.unreadable:
            words += f"; {self.unreadable:,} unreadable files were replaced when they were encoded"
        if self.captioned and not self.index.get("whole_captions"):
            words += f"; captions beyond {CAPTION_BYTES} bytes were cut by the dstrain that encoded them: encode anew"
        return words

    def count_samples_by_class(self) -> np.ndarray | None:
        """Returns the number of samples of each class, int64 (classes,); None if there are no classes, or if the split
        has too many shards to count them quickly.
        """
        if not self.classes:
            return None
        if self.members is None and "class_counts" in self.index:
            return np.array(self.index["class_counts"], np.int64)
        if len(self.sizes) > _COUNTED:
            return None
        counts = np.zeros(len(self.classes), np.int64)
        for number in range(len(self.sizes)):
            labels = self._get_mapped_shard(number)["label"]
            first = number * self.encoding["shard_size"]
            own = slice(None) if self.members is None else self.members.contains(np.arange(first, first + len(labels)))
            counts += np.bincount(labels[own], minlength=len(counts))
        return counts

    def _get_mapped_shard(self, number: int) -> Arrays:
        """Returns the arrays of a shard by name, mapped into memory. Keeps the shards that were used last mapped."""
        arrays = self._open.pop(number, None)
        if arrays is None:
            arrays = self._map_shard(number)
            while len(self._open) >= _compute_max_mapped_shards():
                del self._open[next(iter(self._open))]
        self._open[number] = arrays
        return arrays

    def _map_shard(self, number: int) -> Arrays:
        """Returns the arrays of a shard by name, mapped into memory. "codes" has a row for each crop and each mirroring
        of a sample, an array of texts a row for each caption. Raises ConfigError if an array has another shape than the
        encoding says.
        """
        path, encoding = self.path / name_shard(number), self.encoding
        rows = min(encoding["shard_size"], encoding["number"] - number * encoding["shard_size"])
        wide = self.wide.get(number, CAPTION_BYTES)
        arrays = map_shard(path, int(self.sizes[number]), self._layouts, (rows, wide))
        codes = "tokens" if encoding["kind"] == "tokens" else "moments"
        shapes = {codes: (self.crops * encoding["flips"], *_compute_codes_shape(encoding)), "label": (), **self.extras}
        if self.captioned:
            shapes["caption"] = (*shapes["caption"][:-1], wide)
        for name, shape in shapes.items():
            stored = arrays[name].shape if name in arrays else None
            if stored != (rows, *shape):
                raise ConfigError(f"{path} holds {name} {stored} instead of {(rows, *shape)}; {_REMEDY}")
        if "num_captions" in encoding:
            arrays |= {name: arrays[name].reshape(-1, *arrays[name].shape[2:]) for name in _TEXTS if name in arrays}
        return arrays | {"codes": arrays[codes].reshape(rows * self.crops * encoding["flips"], -1)}

    def verify_shards(self) -> None:
        """Checks the shards by their hashes. If all shards together have more than 4 GiB, checks some, chosen at
        random, of at most 4 GiB together. Raises ConfigError, which names the first damaged shard.
        """
        shards, left = read_index(self.path)["shards"], _VERIFIED
        order = np.random.default_rng(time.time_ns()).permutation(len(shards))
        if sum(shard["size"] for shard in shards) <= left:
            order.sort()
        for number in order:
            left -= shards[number]["size"]
            if left < 0:
                return
            try:
                read_verified_metadata(self.path / shards[number]["name"], shards[number])
            except ConfigError as error:
                raise ConfigError(f"{error}; {_REMEDY}") from None

    def name_sample(self, index: int) -> str:
        """Returns the name of a sample for messages: SHARD[row]."""
        number = index if self.members is None else int(self.members.find_members_at(np.array([index]))[0])
        shard, row = divmod(number, self.encoding["shard_size"])
        return f"{name_shard(shard)}[{row}]"

    def compute_fingerprint(self) -> str:
        return f"codes {self.split} n={len(self)} classes={len(self.classes)} shards={self.hash}"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}  # a worker maps the files by itself


def _compute_max_mapped_shards() -> int:
    """Returns how many shards a process may have mapped at a time: a quarter of the files that it may have open, from 1
    to 4096.
    """
    return max(1, min(_MAPPED, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


def _copy_rows_from_shards(shard_arrays: dict[int, np.ndarray], shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the rows shard_arrays[shards[i]][rows[i]] as one array (n, ...), a copy. If shards differ in the length
    of captions, fills the shorter rows up with zeros.

    shard_arrays: the array of each shard, by the shard's number
    """
    if len(shard_arrays) == 1:
        return next(iter(shard_arrays.values()))[rows]
    first = next(iter(shard_arrays.values()))
    shape = np.max([array.shape[1:] for array in shard_arrays.values()], axis=0) if first.ndim > 1 else ()
    copy = np.zeros((len(rows), *shape), first.dtype)
    for i, (shard, row) in enumerate(zip(shards.tolist(), rows.tolist())):
        values = shard_arrays[shard][row]  # row by row beats fancy indexing shard by shard (measured)
        copy[i] = values if values.shape == copy[i].shape else np.pad(values, (0, copy.shape[-1] - len(values)))
    return copy


def _compute_array_shapes_besides_codes(encoding: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns {name: shape} of what a shard holds of one sample besides its codes and its label, such as captions and
    text encodings.
    """
    shapes: dict[str, tuple[int, ...]] = {"frames": ()} if "num_frames" in encoding else {}
    several = (encoding["num_captions"],) if "num_captions" in encoding else ()
    if several:
        shapes["captions"] = ()
    if encoding.get("captions"):
        shapes["caption"] = (*several, CAPTION_BYTES)
    if encoding.get("text"):
        length, width = encoding["text"]["shape"]
        shapes |= {"text_encodings": (*several, length, width), "text_mask": (*several, length)}
    return shapes


def _compute_codes_shape(encoding: dict[str, Any]) -> tuple[int, ...]:
    """Returns the shape of the codes of one image or clip in a shard:

    (2, C, h, w)   latents, as mean and standard deviation
    (1, C, h, w)   latents, sampled once when they were encoded
    (h, w)   tokens of an image
    (t, h, w)   tokens of a clip
    """
    moments = (encoding.get("moments", 2),) if encoding["kind"] == "latents" else ()
    return (*moments, *encoding["shape"])
