"""Images and clips by bucket: the samples of a source, sorted by the bucket that each belongs to, and cut to its shape.

Rank 0 chooses the bucket of each sample once, from what sizes.py measures, and writes the result beside the index. All
ranks and workers map the file, so that none of them holds a list:

    buckets-KEY/index.json      sealed: how many samples each bucket has, and how many are left out or enlarged
    buckets-KEY/members.bin, .sums
                                numbers of the samples in the source, bucket after bucket; in a bucket they ascend
"""

import shutil
from abc import abstractmethod
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dstrain.data.bucket_order import BucketOrder, choose_buckets, compute_upscale_factors
from dstrain.data.index.build import make_index_files_once
from dstrain.data.index.index import CHUNK, HEADER, read_json_if_intact
from dstrain.data.index.source import Indexed
from dstrain.data.index.verified import (
    Verified,
    open_column_if_intact,
    open_previously_checked_column,
    write_checksums_beside,
)
from dstrain.data.source import Chance, Item, Source
from dstrain.data.sources.images import Images
from dstrain.data.sources.sizes import measure_clip_frame_counts, measure_image_sizes
from dstrain.data.sources.videos import Mixed, Videos
from dstrain.data.views import Remade
from dstrain.disk import atomic, sealed
from dstrain.distributed import group
from dstrain.recipe import ConfigError
from dstrain.recipe.shapes import Shape

_MEMBERS = "members.bin"
_OUT = 65535  # uint16, the bucket of samples that are left out


class Bucketed(Remade):
    """The samples of `whole` sorted by bucket, each read in the shape of its bucket. All ranks must call the
    constructor, which writes the sorted order beside the index unless it is there.

    shapes: one entry for each bucket. table: a row for each sample of the index, by which its bucket is chosen
    (sizes.py). rule: what else the choice depends on; other shapes or another rule have files of their own. header: how
    many samples each bucket has ("counts"), and what `choose_buckets` counts.
    """

    end_index_by_shape: tuple[int, ...] = ()  # behind the last sample of each bucket

    def __init__(self, whole: Indexed, shapes: tuple, table: Verified, rule: Any) -> None:
        super().__init__(whole)
        self.shapes, self.rule = shapes, rule
        key = repr([shapes, rule, whole.split, whole.chosen.number, whole.chosen.names, whole.layout.request.upright])
        folder = whole.index.folder / f"buckets-{blake2b(key.encode(), digest_size=8).hexdigest()}"
        self.dtype = "uint32" if len(whole) < 1 << 32 else "uint64"  # of places in the source
        make_index_files_once(
            whole.index, lambda: _read_header_if_intact(folder, self.dtype), lambda: _write_buckets(self, table, folder)
        )
        self.header = group.broadcast_from_first(
            _read_header_if_intact(folder, self.dtype) if group.rank() == 0 else None
        )
        self.members = open_previously_checked_column(
            folder / _MEMBERS, self.dtype, _compute_members_file_size(self.header, self.dtype)
        )
        self.counts = tuple(self.header["counts"])
        self.end_index_by_shape = tuple(np.cumsum(self.counts).tolist())

    @abstractmethod
    def choose_buckets(self, measures: np.ndarray, counts: dict[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
        """Chooses the buckets of n samples. Returns the number of each sample's bucket, int64 (n,), and which samples
        to leave out, bool (n,), or None if none.

        measures   n rows of the table of measures, such as width and height, one row for each sample.
        counts     a dict, which `describe_omitted_and_altered_samples` shows. Adds the counts of these samples.
        """

    def __len__(self) -> int:
        return self.end_index_by_shape[-1]

    def find_index_in_whole(self, index: int | Tensor) -> int | Tensor:
        """Returns the index in `whole` of the sample at `index` of this source."""
        return int(self.members[int(index)])

    def find_bucket_shape(self, index: int) -> Any:
        """Returns the shape of a sample's bucket, an entry of `shapes`."""
        return self.shapes[int(np.searchsorted(self.end_index_by_shape, index, side="right"))]

    def read(self, index: int, random_number: Chance | None = None) -> Item:
        """Reads one sample in the shape of its bucket."""
        return self.whole.read(self.find_index_in_whole(index), random_number, self.find_bucket_shape(index))

    def make_sample_order(self, global_batch: int, seed: int) -> BucketOrder:
        """Returns the order in which training takes the samples: each global batch from one bucket."""
        return BucketOrder(self.counts, global_batch, seed)

    def make_single_shape_view(self) -> Source:
        """Returns the source before it was sorted, whose samples all have one shape."""
        return self.whole

    def describe_samples(self) -> str:
        """Returns the line about `whole`, and how many samples the smallest and the largest bucket have."""
        full = [(count, shape) for count, shape in zip(self.counts, self.shapes) if count]
        (least, small), (most, large) = min(full), max(full)
        return ", ".join(
            [
                self.whole.describe_samples(),
                f"in {len(full)} of {len(self.shapes)} buckets of {least:,} "
                f"({self.describe_shape(small)}) to {most:,} ({self.describe_shape(large)})",
                *self.describe_omitted_and_altered_samples(),
            ]
        )

    @abstractmethod
    def describe_shape(self, shape: Any) -> str:
        """Returns an entry of `shapes` in words, such as "320 x 192"."""

    @abstractmethod
    def describe_omitted_and_altered_samples(self) -> list[str]:
        """Returns phrases for people about samples that were left out or altered; [] if there are none."""


class Sized(Bucketed):
    """Sorts images into buckets by width and height. All ranks make it together.

    max_upscale: leaves out images that would have to be enlarged more than so many times; None leaves none out.
    Raises ConfigError if no image is left.
    """

    def __init__(self, whole: Images, shapes: tuple[Shape, ...], max_upscale: float | None = None) -> None:
        super().__init__(whole, shapes, measure_image_sizes(whole.layout, whole.index), max_upscale)
        if not sum(self.counts):
            raise ConfigError(
                f"data.max_upscale={max_upscale}: every bucket would enlarge every image of {whole.path} "
                f"more often, up to {self.header['most']:.1f} times: give smaller data.buckets"
            )

    def choose_buckets(self, measures: np.ndarray, counts: dict[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the number of each image's bucket, int64 (n,), and which images to leave out, bool (n,): those that
        their bucket would enlarge more than max_upscale times. measures: int (n, 2), width and height of each image.
        """
        targets, max_upscale = np.array(self.shapes), self.rule
        bucket = choose_buckets(measures, self.shapes, max_upscale or 1.0)
        factor = np.where(measures.min(1) > 0, compute_upscale_factors(measures, targets[bucket]), 1.0)
        out = factor > max_upscale if max_upscale else np.zeros(len(measures), bool)
        counts["left_out"] = counts.get("left_out", 0) + int(out.sum())
        counts["enlarged"] = counts.get("enlarged", 0) + int((factor[~out] > 1).sum())
        counts["most"] = max(counts.get("most", 1.0), float(factor.max()))
        return bucket, out

    def describe_shape(self, shape: Shape) -> str:
        """Returns a bucket's shape in words, such as "320 x 192"."""
        return "{} x {}".format(*shape)

    def describe_omitted_and_altered_samples(self) -> list[str]:
        """Returns phrases about how many images are left out and how many are enlarged; [] if none are."""
        left_out, enlarged = self.header["left_out"], self.header["enlarged"]
        words = [f"{left_out:,} left out by data.max_upscale"] if left_out else []
        return words + (
            [f"{enlarged:,} enlarged, up to {self.header['most']:.1f} times (data.max_upscale leaves such out)"]
            if enlarged
            else []
        )


class Timed(Bucketed):
    """Sorts clips into buckets by their number of frames: each goes into the longest bucket that it fills. A clip that
    fills none goes into the shortest, and its last frame is repeated. A clip that cannot be read is left out. All ranks
    make it together.

    durations: how many frames the clips of each bucket have. The longest bucket comes first, since commands that show
    or try a few samples take the first ones.
    Raises ConfigError if no clip can be read.
    """

    def __init__(self, whole: Videos, durations: tuple[int, ...]) -> None:
        durations = tuple(sorted(durations, reverse=True))
        super().__init__(whole, durations, measure_clip_frame_counts(whole.layout, whole.index), whole.cut.stride)
        if not sum(self.counts):
            raise ConfigError(
                f"{whole.where}: none of its {len(whole):,} clips is sound: `{whole.check}` lists what cannot be read"
            )

    def compute_fingerprint(self) -> str:
        """Returns the fingerprint of the clips, with the lengths and counts of the buckets."""
        return f"{self.whole.compute_fingerprint()}, {self.shapes} frames: {self.counts}"

    def choose_buckets(self, measures: np.ndarray, counts: dict[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the number of each clip's bucket, int64 (n,), and which clips to leave out since they cannot be read,
        bool (n,). The bucket is the longest that the clip fills, or the shortest if it fills none. measures: int (n,
        1), frames of each clip.
        """
        frames, unread = self.whole.cut.count_frames_at_stride(measures[:, 0]), measures[:, 0] == 0
        fills = frames[:, None] >= np.array(self.shapes)  # (n, buckets), False ... True
        counts["unread"] = counts.get("unread", 0) + int(unread.sum())
        counts["short"] = counts.get("short", 0) + int((~fills[:, -1] & ~unread).sum())
        return np.where(fills[:, -1], fills.argmax(1), len(self.shapes) - 1), unread

    def describe_shape(self, shape: int) -> str:
        """Returns a bucket's shape in words, such as "17 frames"."""
        return f"{shape} frame{'s' * (shape != 1)}"

    def describe_omitted_and_altered_samples(self) -> list[str]:
        """Returns phrases about how many clips cannot be read and how many are too short; [] if none are."""
        short, unread, least = self.header["short"], self.header["unread"], self.describe_shape(self.shapes[-1])
        words = [f"{unread:,} left out, which cannot be read"] if unread else []
        return words + ([f"{short:,} shorter than {least}: their last frame is repeated"] if short else [])


def bucket_by_duration(source: Videos | Mixed, durations: tuple[int, ...]) -> Timed | Mixed:
    """Returns a source of the same clips sorted into buckets by length. Images that are mixed into the clips become
    clips of one frame, in a bucket of their own. durations: the number of frames of each bucket.
    """
    if isinstance(source, Mixed):
        return source.bucket_images_separately(Timed(source.videos, durations))
    return Timed(source, durations)


def _read_header_if_intact(folder: Path, dtype: str) -> dict[str, Any] | None:
    """Returns the content of index.json in a folder that `_write_buckets` has written. Returns None if index.json or
    members.bin is missing or damaged.
    """
    header = read_json_if_intact(folder / HEADER)
    return (
        header
        if header and open_column_if_intact(folder / _MEMBERS, dtype, _compute_members_file_size(header, dtype))
        else None
    )


def _compute_members_file_size(header: dict[str, Any], dtype: str) -> int:
    """Returns the size of members.bin in bytes: one number of type `dtype` for each sample, but one number at least,
    since an empty file cannot be mapped.
    """
    return max(sum(header["counts"]), 1) * np.dtype(dtype).itemsize


def _write_buckets(source: Bucketed, table: Verified, folder: Path) -> None:
    """Sorts the samples by bucket and writes the result into `folder`. Fills a temporary folder and renames it at the
    end, so that `folder` is never incomplete. Deletes an earlier `folder` first.
    """
    building = folder.with_name(f"{folder.name}.building")
    for path in (building, folder):  # what an interrupted command has left, or damaged files
        shutil.rmtree(path, ignore_errors=True)
    building.mkdir(parents=True)
    buckets = np.memmap(building / "by_sample.bin", np.uint16, "w+", shape=(len(source.whole),))
    header = _assign_buckets(buckets, source, table)
    number = _compute_members_file_size(header, source.dtype) // np.dtype(source.dtype).itemsize
    members = np.memmap(building / _MEMBERS, source.dtype, "w+", shape=(number,))
    _sort_by_bucket(members, buckets, len(source.shapes))
    members.flush()
    write_checksums_beside(building / _MEMBERS, members)
    (building / "by_sample.bin").unlink()
    atomic.write_file(building / HEADER, sealed.render_json_with_hash(header))
    atomic.flush_and_rename_folder(building, folder)


def _assign_buckets(buckets: np.ndarray, source: Bucketed, table: Verified) -> dict[str, Any]:
    """Fills `buckets` uint16 (N,) with the bucket of each sample, or 65535 if it is left out. Returns the header: the
    counts of `choose_buckets`, and as "counts" the number of samples in each bucket.
    """
    counts, header, members = np.zeros(len(source.shapes), np.int64), {}, source.whole.chosen.members
    for start in range(0, len(buckets), CHUNK):
        rows = slice(start, min(start + CHUNK, len(buckets)))
        bucket, out = source.choose_buckets(table[rows] if members is None else table[members[rows]], header)
        buckets[rows] = bucket if out is None else np.where(out, _OUT, bucket)
        counts += np.bincount(bucket if out is None else bucket[~out], minlength=len(counts))
    return header | {"counts": counts.tolist()}


def _sort_by_bucket(members: np.ndarray, buckets: np.ndarray, num_buckets: int) -> None:
    """Fills `members` with the numbers of the samples, bucket after bucket and ascending within each. buckets: the
    bucket of each sample. num_buckets: how many there are.
    """
    end = 0
    for bucket in range(num_buckets):
        for start in range(0, len(buckets), CHUNK):
            own = np.flatnonzero(buckets[start : start + CHUNK] == bucket) + start
            members[end : end + len(own)] = own
            end += len(own)
