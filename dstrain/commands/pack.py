"""Packs the samples of any data as shards of encoded files, or as webdataset tars: `dstrain pack`.

The files are copied as they are, and nothing is decoded. Samples are dealt to the shards in their order, so many each,
and shards to the ranks in turn. A shard is complete or absent, and its bytes are a function of the data alone. The same
command again keeps the shards that are whole and makes the others.
"""

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from dstrain.commands.encoding.folder import (
    SAME_COMMAND,
    count_samples,
    describe_changes,
    lock_and_prepare_folder,
    make_missing_shards,
    require_few_unreadable_samples,
)
from dstrain.commands.options.pack import PackOptions
from dstrain.data.decode.pixels import FORMATS
from dstrain.data.files.listing import map_in_threads
from dstrain.data.files.storage import refuse_special_file, retry
from dstrain.data.formats import packed
from dstrain.data.formats.base import Layout
from dstrain.data.formats.packed import FORMAT, INDEX, PACKING, ShardWriter, hash_file
from dstrain.data.index.build import run_on_rank_0
from dstrain.data.index.index import Index
from dstrain.data.index.source import Indexed
from dstrain.data.open import BuiltinData, find_content_kind, open_layout_and_index
from dstrain.data.source import BadSample, Item, convert_errors_to_bad_sample
from dstrain.data.sources.captioned import hash_captions_beside
from dstrain.disk import atomic, sealed, small
from dstrain.disk.texts import read_text_file, split_nonblank_lines
from dstrain.distributed import group
from dstrain.distributed.progress import Bar
from dstrain.recipe import ConfigError, Data, explain_write_errors

_SAMPLED = 1000  # files whose sizes say how many samples a shard of --shard-bytes has
_MOST_BYTES = 1 << 28  # bytes of one file at most
_THREADS = 8  # threads that read ahead
_TARS = "tars.json"  # as pack.json, beside tars
_CLASSES = "classes.txt"  # beside tars, which hold the numbers of classes: their names, a line each
_RECORDS = ".records"  # a record of each shard that is written, until pack.json has them all


class _Packable(Indexed):
    """Gives the samples of an index as files, which are not decoded. Computes a fingerprint of their names, labels,
    captions and sizes.
    """

    def __init__(self, layout: Layout, index: Index) -> None:
        super().__init__(layout, index)
        self.noun, self.captioned = layout.request.noun, self.has_caption_files or index.most_captions > 0

    @property
    def has_caption_files(self) -> bool:
        """Returns whether the captions of clips lie in files beside them, and not in the index."""
        return bool(self.layout.notes.get("beside"))

    def read_captions(self, row: int) -> tuple[str, ...]:
        """Returns the captions of the sample in a row. If captions lie in files beside the clips, returns the first
        line of the clip's file, or "" if the file is empty. Raises OSError or ConfigError if that file cannot be read.
        """
        if not self.has_caption_files:
            return self.index.read_captions(row)
        return split_nonblank_lines(read_text_file((self.path / self.index.read_name(row)).with_suffix(".txt")))[
            :1
        ] or ("",)

    def _hash_texts(self, file_numbers: Sequence[int]) -> bytes:
        """Returns a hash of the captions of the rows `file_numbers`."""
        return (
            hash_captions_beside(self.path, self._iterate_file_names(file_numbers))
            if self.has_caption_files
            else super()._hash_texts(file_numbers)
        )

    def __getitem__(self, index: int) -> Item:
        raise NotImplementedError("files are copied, and not decoded")

    def _compute_fingerprint_prefix(self) -> str:
        """Returns a line with the number of samples and a hash of their names, for the fingerprint."""
        return f"{self.layout.request.noun} n={len(self)} names={self._hash_names_and_labels()}"


Sampled = tuple[str, bytes, int | None, tuple[str, ...]]  # name, encoded bytes, label, captions


def run_verb(options: PackOptions) -> None:
    """Packs the data, and prints on rank 0 what was written."""
    index = pack_data(options)
    if group.rank() != 0:
        return
    shards = index["shards"]
    bad = [entry for shard in shards for entry in shard["bad"]]
    kind = options.format.removesuffix("s") + "s" * (len(shards) != 1)
    text = (
        f"{index['number']:,} {index['noun']} in {options.out}: {len(shards):,} {kind}, "
        f"{sum(shard['size'] for shard in shards) / 1e9:.3f} GB"
    )
    if bad:
        text += f"; {len(bad)} could not be read and are empty, such as {bad[0][0]} ({bad[0][1]})"
    print(text)


def pack_data(options: PackOptions) -> dict[str, Any]:
    """Packs the data into options.out, on all ranks together. Returns the content of pack.json. Raises ConfigError if
    the data cannot be packed, the folder cannot be written, or too many files are unreadable.
    """
    data = options.make_data_section()
    layout, index = _open_index(options, data)
    first = group.rank() == 0
    files = _Packable(layout, index)  # on all ranks together
    plan = run_on_rank_0(lambda: _plan_packing(options, files))
    if first:
        print(f"data: {data.path}: {files.describe_samples()}; {plan['shard_samples']:,} a shard", flush=True)
    with lock_and_prepare_folder(options.out, "packs", lambda: _prepare_folder_or_return_problem(options, plan)):
        plan = run_on_rank_0(lambda: _read_packing_plan(options.out))  # an earlier command may have counted other sizes
        count = -(-len(index) // plan["shard_samples"])
        earlier = run_on_rank_0(lambda: _read_finished_shard_records(options.out))
        records = make_missing_shards(
            range(count),
            lambda number: _remove_shard_if_invalid(options.out, plan["format"], number, earlier),
            lambda missing: _pack_missing_shards(options, plan, files, missing),
        )
        return _write_index(options, plan, index, records)


def _open_index(options: PackOptions, data: Data) -> tuple[Layout, Index]:
    """Opens the index of the data that are packed, or makes it. Raises ConfigError if the data are built in or a
    mixture, or if --out lies within them.
    """
    if BuiltinData.recognises(data) or data.mixture:
        raise ConfigError(
            f"{data.path}: what is built in is not packed; name a folder or a file of data"
            if not data.mixture
            else "data.mixture: pack its sources one by one, and mix what was packed"
        )
    if "://" not in data.path and Path(data.path).resolve() in (out := options.out.resolve(), *out.parents):
        raise ConfigError(
            f"--out {options.out} lies in {data.path}, where the shards would count as data: name a folder beside it"
        )
    clips = not options.images and find_content_kind(data) == "clips"
    return open_layout_and_index(data.model_copy(update={"num_frames": 1 if clips else None}), options.captions)


def _plan_packing(options: PackOptions, files: _Packable) -> dict[str, Any]:
    """Returns the settings that determine the shards, for packing.json. Estimates how many samples make a shard from
    the sizes of up to 1000 files.
    """
    layout, index = files.layout, files.index
    rows = np.unique(np.linspace(0, len(index) - 1, _SAMPLED).astype(int)).tolist()
    sizes = [len(content) for _, content, _, _ in _prefetch_samples(files, rows, lambda name, reason: None)]
    samples = max(1, round(options.shard_bytes / max(float(np.mean(sizes)), 1.0)))
    return {
        "format": options.format,
        "noun": layout.request.noun,
        "number": len(index),
        "shard_samples": samples,
        "shard_bytes": options.shard_bytes,
        "classes": len(index.classes),
        "captions": 1 if files.has_caption_files else index.most_captions,
        "data": files.compute_full_fingerprint(),
    }


def _prepare_folder_or_return_problem(options: PackOptions, plan: dict[str, Any]) -> str | None:
    """Writes packing.json into options.out, unless it is there already. Returns None, or a message if the folder holds
    other shards or other files.
    """
    out = options.out
    if (out / PACKING).exists():
        try:
            before = _read_packing_plan(out)
            changes = describe_changes(before, plan, [key for key in plan if key != "shard_samples"])
        except (OSError, ValueError, KeyError, TypeError):
            return f"--out {out} has a {PACKING} that cannot be read: name another folder"
        return f"--out {out} holds other shards: {changes}. Name another folder" if changes else None
    if strangers := sorted(path.name for path in out.iterdir() if path.name[0] != "."):
        return f"--out {out} holds {', '.join(strangers[:3])}, which `dstrain pack` has not written: name a new folder"
    atomic.write_file(out / PACKING, json.dumps({"plan": plan, "of": options.path}, indent=1, sort_keys=True) + "\n")
    return None


def _read_packing_plan(out: Path) -> dict[str, Any]:
    """Returns the settings in a folder's packing.json."""
    return small.read_json(out / PACKING)["plan"]


def _make_shard_path(out: Path, kind: str, number: int) -> Path:
    """Returns the path of shard `number`. `kind` is "shards" or "tar"."""
    return out / (packed.name_shard(number) if kind == "shards" else f"files-{number:06d}.tar")


def _make_shard_record_path(out: Path, number: int) -> Path:
    """Returns the path at which the record of shard `number` lies until the index is written."""
    return out / _RECORDS / f"{number}.json"


def _read_finished_shard_records(out: Path) -> dict[int, dict[str, Any]]:
    """Returns the records of all shards, by number, if an earlier command has finished and written its index;
    else {}.
    """
    for name in (INDEX, _TARS):
        body = sealed.parse_json_if_hash_matches((out / name).read_bytes()) if (out / name).is_file() else None
        if body is not None:
            return dict(enumerate(body["shards"]))
    return {}


def _remove_shard_if_invalid(
    out: Path, kind: str, number: int, earlier_records: dict[int, dict[str, Any]]
) -> dict[str, Any] | None:
    """Returns the record of shard `number` if its file has the recorded size and hash. Otherwise removes the file, if
    there is one, with a message, and returns None. `earlier_records` is {number: record} of a command that has finished
    before, else {}; other records are read from the disk.
    """
    path, record = _make_shard_path(out, kind, number), _make_shard_record_path(out, number)
    known = earlier_records.get(number) or (
        sealed.parse_json_if_hash_matches(record.read_bytes()) if record.is_file() else None
    )
    if (
        known is not None
        and path.is_file()
        and path.stat().st_size == known["size"]
        and hash_file(path) == known["hash"]
    ):
        return known
    if path.exists():
        print(f"{path} is damaged, or was not finished; it is made anew", flush=True)
        path.unlink()
    return None


def _pack_missing_shards(
    options: PackOptions, plan: dict[str, Any], files: _Packable, missing: list[int]
) -> dict[int, dict[str, Any]]:
    """Writes this rank's share of the shards in `missing`, and returns their records by number. Raises ConfigError if
    too many files are unreadable.
    """
    mine, size, total = missing[group.rank() :: group.world()], plan["shard_samples"], len(files)
    bad: list[tuple[str, str]] = []
    rows = (row for number in mine for row in range(number * size, min((number + 1) * size, total)))
    samples = _prefetch_samples(files, rows, lambda name, reason: bad.append((name, reason)))
    write = _write_shard if plan["format"] == "shards" else _write_tar
    records = {}
    done = total - count_samples(missing, size, total)
    with Bar("packing", total=total, initial=done, unit=f" {plan['noun']}", unit_scale=True) as bar:
        for number in mine:
            here, before = min(size, total - number * size), len(bad)
            path = _make_shard_path(options.out, plan["format"], number)
            with explain_write_errors(path, SAME_COMMAND), atomic.replace_file(path) as temporary:
                with open(temporary, "wb") as file:
                    write(file, islice(samples, here), number * size, files.layout.request.suffixes)
                record = {
                    "name": path.name,
                    "size": temporary.stat().st_size,
                    "hash": hash_file(temporary),
                    "samples": here,
                    "bad": [list(entry) for entry in bad[before:]],
                }
            require_few_unreadable_samples(dict(bad), total, options.max_bad_fraction, "files")
            with explain_write_errors(options.out, SAME_COMMAND):
                atomic.write_file(_make_shard_record_path(options.out, number), sealed.render_json_with_hash(record))
            records[number] = record
            # The other ranks are assumed to be as far.
            bar.update(min(here * min(group.world(), len(missing)), bar.total - bar.n))
    return records


def _prefetch_samples(
    files: _Packable, rows: Iterator[int] | list[int], report_unreadable: Callable[[str, str], None]
) -> Iterator[Sampled]:
    """Reads the samples in `rows` with threads, and yields them in that order. A sample that cannot be read has no
    bytes; calls `report_unreadable` with its name and the reason.
    """
    layout, index = files.layout, files.index

    def read_sample(row: int) -> tuple[Sampled, str | None]:
        """Reads the sample in `row`. Returns (sample, None), or, if it cannot be read, (the sample without bytes, the
        reason).
        """
        place, captions, problem = index.read_place(row), (), None
        try:
            with convert_errors_to_bad_sample(place.name, Path(layout.root, place.name)):
                content = retry(lambda: _read_bytes(layout.read(place)))
                captions = retry(lambda: files.read_captions(row))
        except BadSample as error:
            content, problem = b"", error.reason
        return (place.name, content, index.read_label(row) if index.labelled else None, captions), problem

    results: Iterator[tuple[Sampled, str | None]] = map_in_threads(read_sample, rows, _THREADS, 2 * _THREADS)
    for sample, problem in results:
        if problem is not None:
            report_unreadable(sample[0], problem)
        yield sample


def _read_bytes(content: Path | bytes) -> bytes:
    """Returns the bytes of a file, or `content` itself if it is bytes. Raises ConfigError if the bytes are none or more
    than 256 MiB, or if the path is no regular file.
    """
    if isinstance(content, Path):
        refuse_special_file(content)
        with open(content, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
    if not 0 < len(content) <= _MOST_BYTES:
        raise ConfigError(f"has {len(content)} bytes or more; a file has at least 1 and at most {_MOST_BYTES}")
    return content


def _write_shard(file: BinaryIO, samples: Iterator[Sampled], first_number: int, suffixes: tuple[str, ...]) -> None:
    """Writes samples as a shard of dstrain's own form. `first_number` and `suffixes` are ignored; only `_write_tar`
    uses them.
    """
    writer = ShardWriter(file)
    for name, content, label, captions in samples:
        writer.add_sample(name, content, label, captions)
    writer.close()


def _write_tar(file: BinaryIO, samples: Iterator[Sampled], first_number: int, suffixes: tuple[str, ...]) -> None:
    """Writes samples into a tar, with names as in webdataset: for sample 12 the members 000000012.jpg, 000000012.cls
    with the number of its class, and 000000012.txt with its caption. Several captions, or one of several lines, go into
    a .json instead, as "caption". `first_number` is the number of the first sample; `suffixes` are those that a file
    may have.
    """
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for number, (name, content, label, captions) in enumerate(samples, first_number):
            members = {_choose_suffix(name, content, suffixes): content}
            if label is not None:
                members["cls"] = str(label).encode()
            if len(captions) == 1 and split_nonblank_lines(captions[0]) == captions:
                members["txt"] = captions[0].encode("utf-8", "replace")
            elif captions:
                members["json"] = json.dumps({"caption": captions}).encode()
            for suffix, member in members.items():
                entry = tarfile.TarInfo(f"{number:09d}.{suffix}")  # without times and owners: the same bytes
                entry.size = len(member)
                archive.addfile(entry, io.BytesIO(member))


def _choose_suffix(name: str, content: bytes, suffixes: tuple[str, ...]) -> str:
    """Returns the suffix, without a dot, of a sample's file in a tar: the suffix of `name` if that is one of
    `suffixes`, else the format of the image in `content`, else the first of `suffixes`.
    """
    own = os.path.splitext(name)[1].lower()
    if own in suffixes:
        return own[1:]
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            kind = (image.format or "").lower()
            return {"jpeg": "jpg"}.get(kind, kind)
    except Exception:  # an unreadable image, which is reported when it is read again
        return suffixes[0][1:]


def _write_index(
    options: PackOptions, plan: dict[str, Any], index: Index, records: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    """Writes the index of all shards (pack.json, or tars.json for tars) on rank 0, and removes the records of the
    single shards. Returns the content of the index. Raises ConfigError if too many files are unreadable.
    """
    body = {
        "format": FORMAT,
        "noun": plan["noun"],
        "number": len(index),
        "classes": list(index.classes),
        "captions": plan["captions"],
        "shards": [records[number] for number in sorted(records)],
    }
    bad = dict(entry for record in body["shards"] for entry in record["bad"])
    require_few_unreadable_samples(bad, len(index), options.max_bad_fraction, "files")
    if group.rank() == 0:
        with explain_write_errors(options.out, SAME_COMMAND):
            if plan["format"] == "tar" and index.classes:
                atomic.write_file(options.out / _CLASSES, "".join(f"{name}\n" for name in index.classes))
            atomic.write_file(
                options.out / (INDEX if plan["format"] == "shards" else _TARS), sealed.render_json_with_hash(body)
            )
            for number in records:
                _make_shard_record_path(options.out, number).unlink(missing_ok=True)
            if (options.out / _RECORDS).is_dir():
                (options.out / _RECORDS).rmdir()
    return body
