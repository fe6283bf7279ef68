"""The codes of a whole data set, made once by all ranks: shards that training reads instead of encoding online.

Of videos also their captions, and the states of a text encoder where one is named.

Shards are dealt to the ranks in turn. Each is encoded in batches of one fixed shape, cut at the shard's own borders, so
that its bytes depend neither on the number of ranks nor on what was there before. A shard is complete or absent. The
same command again keeps the shards that are whole, makes the others, and ends with the same bytes. See shards.py.

Parts are ranges of shards that commands of their own make, at the same time or not, on machines that share the folder
or each in one of their own, whose shards are put together later. The part that ends last writes the index.
"""

import json
import math
import os
import shutil
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dstrain import __version__, rng
from dstrain.commands.encoding import embeddings
from dstrain.commands.encoding.folder import SAME_COMMAND, claimed, of_all_ranks, require_readable
from dstrain.commands.encoding.plan import planned
from dstrain.commands.options.encode import EncodeOptions
from dstrain.data.cached import shards
from dstrain.data.cached.rows import pack_caption
from dstrain.data.source import (
    Bad,
    Item,
    Source,
    collate_items,
    describe_cut_captions,
    read_items,
    stack_texts,
)
from dstrain.disk import atomic
from dstrain.disk.owner import name_target
from dstrain.disk.sealed import render_sealed
from dstrain.distributed import group
from dstrain.distributed.progress import Bar, phases
from dstrain.encoders.precision import compute_in
from dstrain.recipe import ConfigError, explain_write_errors
from dstrain.runs import folders
from dstrain.runs.first_stage import Encoder, FirstStage
from dstrain.systems.base import Batch


def run_verb(options: EncodeOptions) -> None:
    """Encodes, or embeds pairs, and says what was written."""
    if options.makes_pairs:
        plan = embeddings.embed(options)
        text = (
            f"{plan['pairs']} pairs in {options.out}: image_embed {plan['image_embed_dim']}, text_embed "
            f"{plan['text_embed_dim']}; {plan['unreadable']} unreadable and replaced, {plan['without_caption']} "
            "images without caption"
        )
    else:
        index = encode(options)
        text = "" if index is None else _summarize(options.out, index)
    if text and group.rank() == 0:
        print(text)


def _summarize(out: Path, index: dict[str, Any]) -> str:
    encoding, found = index["encoding"], index["statistics"]
    text = (
        f"{encoding['number']} samples in {out}: {encoding['kind']} {encoding['dtype']} {encoding['shape']} x "
        f"{encoding['flips']}"
    )
    if "scaling_factor" in found:
        text += f", scaling_factor {found['scaling_factor']:.5f}"
    if encoding.get("codebook_size"):
        text += f" of {encoding['codebook_size']} ids"
    if encoding.get("captions"):
        text += ", with captions"
    if encoding.get("text"):
        text += f" and text_encodings {encoding['text']['shape']}"
    if index["bad_files"]:
        text += f", {len(index['bad_files'])} unreadable files replaced"
    return text


def encode(options: EncodeOptions) -> dict[str, Any] | None:
    """Writes options.out, on all ranks together; returns the body of its index, None where other parts are missing.

    ConfigError: what is asked for cannot be, too many files are unreadable, or the folder holds others.
    """
    plan = planned(options)
    encoding = plan.encoding
    if group.rank() == 0:
        path = f"{options.data or plan.stage.data.path}, {options.split}"
        print(f"data: {path}: {plan.source.describe()}", flush=True)
        if plan.texts is not None:
            phases().say(*describe_cut_captions(plan.source, plan.texts))
    numbers = _own(encoding, options.part)

    def prepare():
        return _prepare(options, plan.stage, encoding, numbers)

    with (
        _one_thread(),
        compute_in(options.precision),
        claimed(options.out, "encodes", prepare, numbers, options.part is not None),
    ):
        records = _whole(options.out, encoding, numbers[group.rank() :: group.world()])
        whole = set(of_all_ranks(records))
        missing = [number for number in numbers if number not in whole]
        records |= _make(options, Encoder(plan.stage, plan.texts, encoding), plan.source, numbers, missing)
        return _finish(options, plan.source, encoding, dict(of_all_ranks(records.items())))


def _own(encoding: dict[str, Any], part: tuple[int, int] | None) -> range:
    """The numbers of the shards of a part; None: of all."""
    count = -(-encoding["number"] // encoding["shard_size"])
    place, parts = part or (1, 1)
    return range(count * (place - 1) // parts, count * place // parts)


def _samples(encoding: dict[str, Any], numbers: Sequence[int]) -> int:
    """How many samples these shards hold."""
    size = encoding["shard_size"]
    return sum(min(size, encoding["number"] - number * size) for number in numbers)


@contextmanager
def _one_thread() -> Iterator[None]:
    """On the CPU, sums depend on how many threads share them: with one, the bytes do not depend on OMP_NUM_THREADS."""
    before = torch.get_num_threads()
    if group.device().type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _prepare(options: EncodeOptions, stage: FirstStage, encoding: dict[str, Any], numbers: range) -> str | None:
    """Makes the folder ready; returns why it cannot be, else None."""
    out = options.out
    path = f"{options.data or 'the data of the run'}, {options.split}"
    names = {"first_stage": stage.name, "data": path}
    if problem := _conflict(out, encoding, names):
        return problem
    own = {shards.shard_name(number) for number in numbers}
    for leftover in out.glob("*.tmp"):
        if options.part is None or (name_target(leftover) or leftover.name.lstrip(".").removesuffix(".tmp")) in own:
            leftover.unlink()
    needed = _samples(encoding, numbers) * _row_bytes(encoding)
    needed -= sum(shard.stat().st_size for shard in out.glob("shard_*.safetensors") if shard.name in own)
    free = shutil.disk_usage(out).free
    if needed > free:
        return f"--out {out} has {free / 1e9:.2f} GB free, {needed / 1e9:.2f} GB are needed: make room"
    text = json.dumps({"encoding": encoding, "of": names}, sort_keys=True, indent=1)
    atomic.write_file(out / shards.ENCODING, f"{text}\n")
    return None


def _conflict(out: Path, encoding: dict[str, Any], names: dict[str, str]) -> str | None:
    """Why the files in the folder are not of this encoding, else None. `names` explain fingerprints to people."""
    if (earlier := shards.read_earlier(out)) is not None:

        def described(key: str, value: Any, names: dict[str, str]) -> Any:
            return f"{names[key]} ({value})" if key in names else value

        old, old_names = earlier["encoding"], earlier.get("of", {})
        changes = [
            f"{key} {described(key, old.get(key), old_names)} there, {described(key, value, names)} here"
            for key in {**old, **encoding}
            if old.get(key) != (value := encoding.get(key))
        ]
        return f"--out {out} holds another encoding: {'; '.join(changes)}. Name another folder" if changes else None
    if strangers := shards.list_strangers(out):
        return f"--out {out} holds {', '.join(strangers[:3])} and no encoding: name a new folder"
    if {shards.find_encoding(shard) for shard in out.glob("shard_*.safetensors")} - {
        None,
        shards.hash_encoding(encoding),
    }:
        return f"--out {out} holds another encoding, and its {shards.ENCODING} is damaged or missing: name another"
    return None


def _row_bytes(encoding: dict[str, Any]) -> int:
    """The bytes of one sample on the disk."""
    numbers = math.prod(encoding["shape"]) * encoding["flips"] * encoding.get("crops", 1)
    numbers *= encoding.get("moments", 2) if encoding["kind"] == "latents" else 1
    several, texts = encoding.get("num_captions", 1), shards.CAPTION_BYTES * ("captions" in encoding)
    if text := encoding.get("text"):
        texts += math.prod(text["shape"]) * np.dtype(text["dtype"]).itemsize + text["shape"][0]
    return numbers * np.dtype(encoding["dtype"]).itemsize + 32 + several * texts


def _whole(out: Path, encoding: dict[str, Any], numbers: range) -> dict[int, dict[str, Any]]:
    """Records of the shards among `numbers` that are there and whole; those that are damaged are removed."""
    records = {}
    for number in numbers:
        path = out / shards.shard_name(number)
        if path.exists():
            try:
                facts = shards.check_shard(path)
                if facts["encoding"] != shards.hash_encoding(encoding) or facts["number"] != number:
                    raise ConfigError(f"{path} is of another encoding")
                if facts["cut"]:
                    raise ConfigError(f"{path} has captions that an older dstrain cut")
                records[number] = shards.record_shard(path, facts)
            except ConfigError as error:
                print(f"{error}; it is made anew", flush=True)
                path.unlink()
    return records


def _make(
    options: EncodeOptions, encoder: Encoder, source: Source, numbers: range, missing: list[int]
) -> dict[int, dict[str, Any]]:
    """Encodes this rank's share of the missing shards among `numbers`; a record of each."""
    mine, encoding = missing[group.rank() :: group.world()], encoder.encoding
    size, total, own = options.shard_size, encoding["number"], _samples(encoding, numbers)
    jobs = (
        (number, range(start, min(start + options.batch, (number + 1) * size, total)))
        for number in mine
        for start in range(number * size, min((number + 1) * size, total), options.batch)
    )
    records, parts, shard_bad, bad_files = {}, [], set(), set()
    unit = "clip" if "num_frames" in encoding else "image"
    with Bar("encoding", total=own, initial=own - _samples(encoding, missing), unit=unit) as bar:
        for number, rows, batch, bad in _read(source, jobs, encoding):
            parts.append(encoder.arrays(batch))
            shard_bad |= bad
            bad_files |= {name for name, _ in bad}
            _require_readable(bad_files, options, own)
            if rows.stop in ((number + 1) * size, total):
                arrays = shards.join_arrays(parts)
                records[number] = _write(options.out, number, encoding, arrays, sorted(shard_bad))
                parts, shard_bad = [], set()
            # The other ranks are assumed to be as far.
            bar.update(min(len(rows) * min(group.world(), len(missing)), bar.total - bar.n))
    return records


def _read(
    source: Source, jobs: Iterable[tuple[int, range]], encoding: dict[str, Any]
) -> Iterator[tuple[int, range, Batch, set[tuple[str, str]]]]:
    """(shard, rows, samples, bad) of each job, read by threads and ahead; decoders let them run.

    ConfigError: a sample without a caption, where captions are encoded, or where others have one.
    """
    names = [name for name in ("image", "video", "frames", "caption") if name != "caption" or encoding.get("captions")]
    several = encoding.get("num_captions")

    def read(index: int) -> tuple[dict, list]:
        items, bad = _crops(source, index, encoding)
        item = items[0]
        row = (index + len(bad)) % len(source)  # an unreadable sample is replaced by the next one
        sample = {name: torch.as_tensor(item[name]) for name in names if name in item}
        if "crops" in encoding:
            sample["image"] = torch.stack([crop["image"] for crop in items])
        if several:
            texts = source.captions(row)[:several]
            sample["caption"] = stack_texts([pack_caption(text) for text in (*texts, *[""] * (several - len(texts)))])
            sample["captions"] = torch.tensor(len(texts))
        if encoding.get("captions") and ("caption" not in sample or (encoding["text"] and not sample["caption"].any())):
            raise ConfigError(f"{source.name(row)} has no caption, and captions are encoded: write one")
        return sample | {"label": torch.tensor(int(item.get("label", 0))), "source": torch.tensor(row)}, bad

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = 1 if source.light else max(1, min(8, cores // group.read_place().local_world))
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque = deque()
        try:
            for job in chain(jobs, [None, None]):
                if job is not None:
                    waiting.append((*job, [pool.submit(read, index) for index in job[1]]))
                if waiting and (job is None or len(waiting) > 2):
                    number, rows, futures = waiting.popleft()
                    items, bad = zip(*(future.result() for future in futures))
                    yield (
                        number,
                        rows,
                        collate_items(items),
                        {tuple(entry) for entries in bad for entry in entries},
                    )
        finally:
            pool.shutdown(cancel_futures=True)


def _crops(source: Source, index: int, encoding: dict[str, Any]) -> tuple[list[Item], Bad]:
    """A sample in each of its crops, which belong to its number; and those that could not be read before it."""
    if "crops" not in encoding:
        return read_items(source, [index])
    keys = rng.keys_of_seeds(index * encoding["crops"] + torch.arange(encoding["crops"]))
    chances = rng.uniform(keys, "crop", (source.chance_count,)).tolist()
    first, bad = read_items(source, [index], chances[:1])
    rest, _ = read_items(source, [index] * (len(chances) - 1), chances[1:])
    return first + rest, bad


def _write(
    out: Path, number: int, encoding: dict[str, Any], arrays: shards.Arrays, bad: list[tuple[str, str]]
) -> dict[str, Any]:
    """Writes one shard, whole or not at all; its record."""
    codes = arrays["tokens" if encoding["kind"] == "tokens" else "moments"]
    facts = {"encoding": shards.hash_encoding(encoding), "number": number, "sums": shards.sum_codes(codes), "bad": bad}
    if "caption" in arrays:
        facts["caption_bytes"] = arrays["caption"].shape[-1]
    path = out / shards.shard_name(number)
    with explain_write_errors(path, SAME_COMMAND):
        data = shards.pack_shard(arrays, facts)
        atomic.write_file(path, data)
    return shards.record_shard(path, shards.read_facts(data))


def _require_readable(bad: Collection[Any], options: EncodeOptions, total: int) -> None:
    # A file is bad in each of its windows, and counts once.
    require_readable(len(bad), total // (options.clips or 1), options.max_bad_fraction, "files")


def _finish(
    options: EncodeOptions, source: Source, encoding: dict[str, Any], records: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    """The index, written last, by rank 0; None where shards of other parts are missing."""
    if options.part is not None:
        records |= group.from_first(_others(options, encoding, records) if group.rank() == 0 else None)
        if missing := _missing_parts(options.part, encoding, records):
            if group.rank() == 0:
                print(
                    f"part {options.part[0]}/{options.part[1]} is whole; these are not: {', '.join(missing)}. The "
                    "last one writes the index",
                    flush=True,
                )
            return None
    versions = {"dstrain": __version__, "torch": torch.__version__}
    index = shards.make_index_body(
        encoding, list(source.classes), [records[number] for number in sorted(records)], versions
    )
    _require_readable(index["bad_files"], options, encoding["number"])
    if group.rank() == 0:
        # Two parts that end at the same time write the same index.
        with nullcontext() if options.part is None else folders.lock_folder(options.out):
            atomic.write_file(options.out / shards.INDEX, render_sealed(index))
    return index


def _others(
    options: EncodeOptions, encoding: dict[str, Any], records: dict[int, dict[str, Any]]
) -> dict[int, dict[str, Any]]:
    """Records of the shards that other parts have written, as these state; the maker of each has proved it whole."""
    others = {}
    for number in _own(encoding, None):
        path = options.out / shards.shard_name(number)
        facts = None if number in records else shards.read_header_facts(path)
        if facts is not None and facts["encoding"] == shards.hash_encoding(encoding) and facts["number"] == number:
            others[number] = shards.record_shard(path, facts)
    return others


def _missing_parts(part: tuple[int, int], encoding: dict[str, Any], records: dict[int, dict[str, Any]]) -> list[str]:
    """The parts, of as many as there are of this one, whose shards are not all in the records."""
    return [
        f"{place}/{part[1]}"
        for place in range(1, part[1] + 1)
        if not all(number in records for number in _own(encoding, (place, part[1])))
    ]
