"""Makes the index of data, and describes it: how many samples of what, their classes, captions, sizes and
broken files.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tqdm import tqdm

from dstrain.commands.options.index import IndexOptions
from dstrain.data.decode.clips import Cut
from dstrain.data.files.listing import map_in_threads
from dstrain.data.formats.base import Layout, Place
from dstrain.data.index.index import CHUNK, Index
from dstrain.data.index.verified import Verified
from dstrain.data.open import open_layout_and_index
from dstrain.data.source import BadSample
from dstrain.data.sources.images import Images
from dstrain.data.sources.sizes import (
    count_sample_frames,
    measure_clip_frame_counts,
    measure_image_sizes,
    read_image_size,
)
from dstrain.data.sources.videos import Videos
from dstrain.recipe import Data

_SHOWN = 5  # classes at either end
_SIZES = 10  # sizes that most images have
_BROKEN = 1000  # unreadable files that are named
_LONGEST = 1 << 14  # bytes of a caption, in the table of lengths
_RATIOS = {
    "1:2": 1 / 2,
    "9:16": 9 / 16,
    "2:3": 2 / 3,
    "3:4": 3 / 4,
    "1:1": 1.0,
    "4:3": 4 / 3,
    "3:2": 3 / 2,
    "16:9": 16 / 9,
    "2:1": 2.0,
}
_SIDES = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # pixels


def run_verb(options: IndexOptions) -> None:
    """Makes the index, and prints what it holds, as text or as JSON."""
    result = index_and_summarize_data(options.make_data_section(), options.captions, options.check_all)
    print(json.dumps(result, indent=1) if options.json else format_report(result))


def index_and_summarize_data(data: Data, with_captions: bool = False, check_samples: bool = False) -> dict[str, Any]:
    """Makes the index of the data, or opens the existing one. Returns a dict for JSON that describes what it holds.

    with_captions: whether to list the captions of images, too
    check_samples: whether to read every sample, to find unreadable ones

    Raises ConfigError if the data cannot be indexed, see `open_index`.
    """
    layout, index = open_layout_and_index(data, with_captions)
    images = data.num_frames is None
    result = {
        "path": data.path,
        "layout": layout.kind,
        "samples": len(index),
        "index": str(index.folder),
        "bytes": sum(index.header["columns"].values()),
        "classes": _summarize_classes(index),
        "captions": _summarize_captions(layout, index),
        "captions_listed": with_captions or not images,
        "advice": layout.compose_data_advice(),
        "checked": check_samples,
    }
    broken: Iterator[tuple[str, str]] | None = None
    if images:
        sizes = measure_image_sizes(layout, index)
        result |= _count_images_by_size(sizes)
        broken = _iterate_unmeasurable_samples(layout, index, sizes, read_image_size)
    elif data.buckets:
        frames = measure_clip_frame_counts(layout, index)
        result["frames"] = _count_clips_by_duration(frames, data)
        broken = _iterate_unmeasurable_samples(layout, index, frames, count_sample_frames)
    if check_samples:
        broken = _iterate_unreadable_samples(data, with_captions, layout, index)
    named = [list(entry) for _, entry in zip(range(_BROKEN), broken or ())]
    number = None if broken is None else len(named) + sum(1 for _ in broken)
    return result | {"unreadable": number, "unreadable_names": named}


def _summarize_classes(index: Index) -> dict[str, Any] | None:
    """Returns a dict on the classes: how many there are, how many are empty, the median number of samples in a class,
    and {name: number of samples} of the 5 smallest and of the 5 largest. Returns None if the samples have no labels.
    """
    if not index.labelled:
        return None
    counts = np.array(index.header["counts"])
    order = np.argsort(counts, kind="stable")
    ends = {"smallest": order[:_SHOWN], "largest": order[::-1][:_SHOWN]}
    return {"number": len(counts), "empty": int((counts == 0).sum()), "median": float(np.median(counts))} | {
        end: {index.classes[place]: int(counts[place]) for place in places} for end, places in ends.items()
    }


def _summarize_captions(layout: Layout, index: Index) -> dict[str, Any] | None:
    """Returns a dict on the captions: the share of samples that have one, the number of all captions and of the most in
    one sample, and quantiles of their lengths in bytes. Returns {"beside": True} if captions lie in files beside the
    samples, and None if the index holds none.
    """
    if layout.notes.get("beside"):
        return {"beside": True}
    if not index.most_captions:
        return None
    lengths, number, captioned = np.zeros(_LONGEST + 1, np.int64), 0, 0
    for row in range(len(index)):
        own = [len(text.encode()) for text in index.read_captions(row)]
        captioned += any(own)
        number += len(own)
        np.add.at(lengths, np.minimum(own, _LONGEST), 1)
    below = lengths.cumsum()
    quantiles = {
        name: int(np.searchsorted(below, share * number))
        for name, share in (("shortest", 1e-12), ("median", 0.5), ("95%", 0.95), ("longest", 1.0))
    }
    return {"share": captioned / len(index), "number": number, "most": index.most_captions, "bytes": quantiles}


def _count_clips_by_duration(frames: Verified, data: Data) -> dict[str, int]:
    """Counts clips by duration, as {"17 or more": number}: a clip counts for the longest duration in data.buckets that
    it fills, in frames. "fewer" counts the clips that are too short for any. Leaves out unreadable clips.
    """
    cut, table = Cut(data.num_frames or 1, 1, 1, stride=data.frame_stride), Counter[int]()
    for start in range(0, len(frames), CHUNK):
        counts = frames[start : start + CHUNK][:, 0]
        for count in map(cut.count_frames_at_stride, counts[counts > 0].tolist()):
            table[max((duration for duration in data.durations if duration <= count), default=0)] += 1
    return {f"{least} or more" if least else "fewer": table[least] for least in sorted(table, reverse=True)}


def _count_images_by_size(sizes: Verified) -> dict[str, Any]:
    """Counts images by size. Leaves out images with a side of 0, which could not be read. Returns a dict:

    "sizes": {"WIDTHxHEIGHT": number} of the ten most common sizes
    "other_sizes": how many other sizes there are
    "shorter_sides": the number of images by the range of their shorter side, in pixels
    "aspect_ratios": the number of images by the nearest of nine ratios of width to height, such as "16:9"
    """
    exact, sides, ratios = Counter[str](), Counter[str](), Counter[str]()
    names, logs = list(_RATIOS), np.log(list(_RATIOS.values()))
    for start in range(0, len(sizes), CHUNK):
        block = np.array(sizes[start : start + CHUNK])
        block = block[block.min(1) > 0]
        pairs, counts = np.unique(block, axis=0, return_counts=True)
        for (width, height), count in zip(pairs.tolist(), counts.tolist()):
            exact[f"{width}x{height}"] += count
            sides[next((f"below {side}" for side in _SIDES if min(width, height) < side), f"{_SIDES[-1]} or more")] += (
                count
            )
            ratios[names[int(np.abs(logs - np.log(width / height)).argmin())]] += count
    order = [*(f"below {side}" for side in _SIDES), f"{_SIDES[-1]} or more"]
    return {
        "sizes": dict(exact.most_common(_SIZES)),
        "other_sizes": max(0, len(exact) - _SIZES),
        "shorter_sides": {name: sides[name] for name in order if sides[name]},
        "aspect_ratios": {name: ratios[name] for name in names if ratios[name]},
    }


def _iterate_unmeasurable_samples(
    layout: Layout, index: Index, table: Verified, measure: Callable[[Layout, Place], Any]
) -> Iterator[tuple[str, str]]:
    """Yields (name, reason) of each sample whose size or number of frames could not be read; `table` has 0 for these.
    Calls `measure` on the sample once more to learn the reason.
    """
    for start in range(0, len(index), CHUNK):
        for row in (np.flatnonzero(table[start : start + CHUNK][:, 0] == 0) + start).tolist():
            try:
                measure(layout, index.read_place(row))
            except BadSample as error:
                yield error.path, error.reason


def _iterate_unreadable_samples(data: Data, captions: bool, layout: Layout, index: Index) -> Iterator[tuple[str, str]]:
    """Reads every sample, and yields (name, reason) of each that cannot be read. Of a clip decodes only the middle
    frame.
    """
    clips = data.num_frames is not None
    source = Videos(layout, index, Cut(1, 64, 64)) if clips else Images(layout, index, 64, captions=captions)

    def find_read_error(row: int) -> tuple[str, str] | None:
        """Returns (name, reason) if the sample in `row` cannot be read, else None."""
        try:
            source.read(row)
        except BadSample as error:
            return error.path, error.reason
        return None

    rows = map_in_threads(find_read_error, range(len(index)))
    for entry in tqdm(rows, total=len(index), unit=f" {layout.request.noun}", disable=None, delay=2, desc="checking"):
        if entry is not None:
            yield entry


def format_report(result: dict[str, Any]) -> str:
    """Returns the dict of `index_and_summarize_data` as a text of several lines."""
    lines = [
        f"{result['path']}: {result['layout']}, {result['samples']:,} sample{'s' * (result['samples'] != 1)}",
        f"index: {result['index']}, {result['bytes'] / 1e6:,.1f} MB",
    ]
    if (classes := result["classes"]) is None:
        lines.append("classes: none")
    else:
        empty = f", {classes['empty']:,} of them empty" if classes["empty"] else ""
        lines += [
            f"classes: {classes['number']:,}{empty}, {classes['median']:,.0f} samples in the median",
            f"  smallest: {_format_counts(classes['smallest'])}",
            f"  largest:  {_format_counts(classes['largest'])}",
        ]
    unlisted = result["captions"] is None and not result["captions_listed"]
    hint = "; --captions lists those of images, such as X.txt beside X.png" if unlisted else ""
    lines.append(f"captions: {_format_caption_summary(result['captions'])}{hint}")
    for name in ("frames", "sizes", "shorter_sides", "aspect_ratios"):
        if table := result.get(name):
            others = result["other_sizes"] if name == "sizes" else 0
            lines.append(
                f"{name.replace('_', ' ')}: {_format_counts(table)}" + (f", {others:,} other sizes" if others else "")
            )
    if result["advice"]:
        lines.append(f"note: {result['advice']}")
    quick = "frames were counted" if "frames" in result else "headers alone were read"
    how = "read whole" if result["checked"] else f"{quick}; --check reads all"
    if result["unreadable"] is None:
        return "\n".join([*lines, "unreadable: --check looks for them"])
    lines += [
        f"unreadable: {result['unreadable']:,} ({how})",
        *(f"  {name}: {reason}" for name, reason in result["unreadable_names"]),
    ]
    return "\n".join(lines)


def _format_counts(table: dict[str, int]) -> str:
    """Returns the counts of a table as text, such as "cat 12, dog 7"."""
    return ", ".join(f"{name} {count:,}" for name, count in table.items())


def _format_caption_summary(captions: dict[str, Any] | None) -> str:
    """Returns the result of `_summarize_captions` as a phrase."""
    if captions is None:
        return "none in the index"
    if "beside" in captions:
        return "beside all samples"
    lengths = ", ".join(f"{name} {value:,}" for name, value in captions["bytes"].items())
    return (
        f"{captions['share']:.1%} of the samples, {captions['number']:,} in all, at most {captions['most']} a "
        f"sample; bytes: {lengths}"
    )
