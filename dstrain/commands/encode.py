"""Encodes a whole data set once, on all ranks, into shards that training reads instead of encoding online.

Videos are written with their captions and, if a text encoder is named, with its states of them.

Shards are dealt to the ranks in turn. Each is encoded in batches of one fixed shape, cut at the shard's own borders, so
that its bytes depend neither on the number of ranks nor on what was there before. A shard is complete or absent. The
same command again keeps the shards that are whole, makes the others, and ends with the same bytes. See shards.py.

With --part N/PARTS a command makes a range of the shards. Several such commands may run at the same time, on machines
that share the folder; or each machine has a folder of its own, and the shards are put together later. The part that
ends last writes the index.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dstrain import __version__, rng
from dstrain.commands.encoding import embeddings
from dstrain.commands.encoding.folder import (
    SAME_COMMAND,
    count_samples,
    lock_and_prepare_folder,
    make_missing_shards,
    require_few_unreadable_samples,
)
from dstrain.commands.encoding.plan import plan_encoding
from dstrain.commands.options.encode import EncodeOptions
from dstrain.data.cached import shards
from dstrain.data.cached.rows import pack_caption
from dstrain.data.files.listing import map_in_threads
from dstrain.data.source import (
    Bad,
    Item,
    Source,
    collate_items,
    describe_truncated_captions,
    pad_and_stack_texts,
    read_items_or_substitutes,
)
from dstrain.disk import atomic
from dstrain.disk.owner import parse_final_name_from_temporary
from dstrain.disk.sealed import render_json_with_hash
from dstrain.distributed import group
from dstrain.distributed.progress import Bar, get_phases
from dstrain.encoders.precision import use_precision
from dstrain.recipe import ConfigError, explain_write_errors
from dstrain.runs import folders
from dstrain.runs.first_stage import Encoder, FirstStage


def run_verb(options: EncodeOptions) -> None:
    """Encodes the data, or embeds pairs of image and caption if the options ask for that. Prints on rank 0 what was
    written.
    """
    if options.makes_embedding_pairs:
        plan = embeddings.embed_image_caption_pairs(options)
        text = (
            f"{plan['pairs']} pairs in {options.out}: image_embed {plan['image_embed_dim']}, text_embed "
            f"{plan['text_embed_dim']}; {plan['unreadable']} unreadable and replaced, {plan['without_caption']} "
            "images without caption"
        )
    else:
        index = encode_data(options)
        text = "" if index is None else _summarize_index(options.out, index)
    if text and group.rank() == 0:
        print(text)


def _summarize_index(out: Path, index: dict[str, Any]) -> str:
    """Returns a line for the user that says what the cache in `out` holds. `index` is the content of its index."""
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
        name, reason = index["bad_files"][0]
        text += f", {len(index['bad_files'])} unreadable files replaced, such as {name}: {reason}"
    return text


def encode_data(options: EncodeOptions) -> dict[str, Any] | None:
    """Encodes the data into options.out, on all ranks together. Returns the content of the index. With --part returns
    None while shards of other parts are still missing.

    Raises ConfigError if the options contradict the data or each other, if too many files are unreadable, or if the
    folder holds other codes.
    """
    plan = plan_encoding(options)
    encoding = plan.encoding
    if group.rank() == 0:
        of_run = plan.stage.data.path if plan.stage.data is not None else ""
        path = f"{options.data or of_run}, {options.split}"
        print(f"data: {path}: {plan.source.describe_samples()}", flush=True)
        if plan.texts is not None:
            get_phases().print_lines(*describe_truncated_captions(plan.source, plan.texts))
    numbers = _compute_shard_range_of_part(encoding, options.part)

    def prepare_out_folder() -> str | None:
        """Prepares options.out. Returns None, or a message that says why it cannot be used."""
        return _prepare_folder_or_return_problem(options, plan.stage, encoding, numbers)

    with (
        _use_one_cpu_thread(),
        use_precision(options.precision),
        lock_and_prepare_folder(options.out, "encodes", prepare_out_folder, numbers, options.part is not None),
    ):
        encoder = Encoder(plan.stage, plan.texts, encoding)
        records = make_missing_shards(
            numbers,
            lambda number: _remove_shard_if_invalid(options.out, encoding, number),
            lambda missing: _encode_missing_shards(options, encoder, plan.source, numbers, missing),
        )
        return _write_index_if_complete(options, plan.source, encoding, records)


def _compute_shard_range_of_part(encoding: dict[str, Any], part: tuple[int, int] | None) -> range:
    """Returns the numbers of the shards that this command has to make. `part` is (K, N), the value of --part: the Kth
    of N commands, from 1 on, makes the Kth share of the shards. None: all shards.
    """
    count = -(-encoding["number"] // encoding["shard_size"])
    place, parts = part or (1, 1)
    return range(count * (place - 1) // parts, count * place // parts)


@contextmanager
def _use_one_cpu_thread() -> Iterator[None]:
    """Makes torch compute with one CPU thread within the block, if the rank's device is the CPU. The rounding of sums
    would else depend on the number of threads. Restores the number afterwards.
    """
    before = torch.get_num_threads()
    if group.device().type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _prepare_folder_or_return_problem(
    options: EncodeOptions, stage: FirstStage, encoding: dict[str, Any], shard_numbers: range
) -> str | None:
    """Removes half-written files from options.out, and writes the description `encoding` there. Returns None, or a
    message if the folder holds other files or another encoding, or has too little room for the shards in
    `shard_numbers`.
    """
    out = options.out
    path = f"{options.data or 'the data of the run'}, {options.split}"
    names = {"first_stage": stage.name, "data": path}
    if problem := _describe_folder_conflict(out, encoding, names):
        return problem
    own = {shards.name_shard(number) for number in shard_numbers}
    for leftover in out.glob("*.tmp"):
        if (
            options.part is None
            or (parse_final_name_from_temporary(leftover) or leftover.name.lstrip(".").removesuffix(".tmp")) in own
        ):
            leftover.unlink()
    needed = count_samples(shard_numbers, encoding["shard_size"], encoding["number"]) * _estimate_sample_bytes(encoding)
    needed -= sum(shard.stat().st_size for shard in out.glob("shard_*.safetensors") if shard.name in own)
    free = shutil.disk_usage(out).free
    if needed > free:
        return f"--out {out} has {free / 1e9:.2f} GB free, {needed / 1e9:.2f} GB are needed: make room"
    text = json.dumps({"encoding": encoding, "of": names}, sort_keys=True, indent=1)
    atomic.write_file(out / shards.ENCODING, f"{text}\n")
    return None


def _describe_folder_conflict(out: Path, encoding: dict[str, Any], readable_names: dict[str, str]) -> str | None:
    """Returns a message if `out` holds shards of another encoding, or files that `dstrain encode` has not written; else
    None. `readable_names` has names for some keys of the encoding, such as the data's path; the message shows them with
    the values.
    """
    if (earlier := shards.read_encoding_json_or_index(out)) is not None:

        def prefix_readable_name(key: str, value: Any, readable_names: dict[str, str]) -> Any:
            """Returns a value of the encoding for the message, as "NAME (VALUE)" if its key has a readable name."""
            return f"{readable_names[key]} ({value})" if key in readable_names else value

        old, old_names = earlier["encoding"], earlier.get("of", {})
        changes = [
            f"{key} {prefix_readable_name(key, old.get(key), old_names)} there, "
            f"{prefix_readable_name(key, value, readable_names)} here"
            for key in {**old, **encoding}
            if old.get(key) != (value := encoding.get(key))
        ]
        return f"--out {out} holds another encoding: {'; '.join(changes)}. Name another folder" if changes else None
    if strangers := shards.list_entries_not_from_encode(out):
        return f"--out {out} holds {', '.join(strangers[:3])} and no encoding: name a new folder"
    if {shards.read_encoding_hash(shard) for shard in out.glob("shard_*.safetensors")} - {
        None,
        shards.hash_encoding(encoding),
    }:
        return f"--out {out} holds another encoding, and its {shards.ENCODING} is damaged or missing: name another"
    return None


def _estimate_sample_bytes(encoding: dict[str, Any]) -> int:
    """Estimates the bytes of one sample in a shard. Each caption is taken to have shards.CAPTION_BYTES bytes."""
    numbers = math.prod(encoding["shape"]) * encoding["flips"] * encoding.get("crops", 1)
    numbers *= encoding.get("moments", 2) if encoding["kind"] == "latents" else 1
    several, texts = encoding.get("num_captions", 1), shards.CAPTION_BYTES * ("captions" in encoding)
    if text := encoding.get("text"):
        texts += math.prod(text["shape"]) * np.dtype(text["dtype"]).itemsize + text["shape"][0]
    return numbers * np.dtype(encoding["dtype"]).itemsize + 32 + several * texts


def _remove_shard_if_invalid(out: Path, encoding: dict[str, Any], number: int) -> dict[str, Any] | None:
    """Returns the record of shard `number` if its file is whole, has this encoding, and has no captions that an older
    dstrain has shortened. Otherwise removes the file, if there is one, prints why, and returns None.
    """
    path = out / shards.name_shard(number)
    if not path.exists():
        return None
    try:
        facts = shards.read_verified_metadata(path)
        if not _is_shard_of_encoding(facts, encoding, number):
            raise ConfigError(f"{path} is of another encoding")
        if facts["cut"]:
            raise ConfigError(f"{path} has captions that an older dstrain cut")
        return shards.make_shard_record(path, facts)
    except ConfigError as error:
        print(f"{error}; it is made anew", flush=True)
        path.unlink()
        return None


def _is_shard_of_encoding(shard_metadata: dict[str, Any], encoding: dict[str, Any], number: int) -> bool:
    """Returns whether `shard_metadata`, the metadata of a shard, name this encoding and this number."""
    return shard_metadata["encoding"] == shards.hash_encoding(encoding) and shard_metadata["number"] == number


def _encode_missing_shards(
    options: EncodeOptions, encoder: Encoder, source: Source, shard_numbers: range, missing: list[int]
) -> dict[int, dict[str, Any]]:
    """Encodes and writes this rank's share of the shards in `missing`, and returns their records by number.
    `shard_numbers` are all shards of this command, for the progress bar. Raises ConfigError if too many files are
    unreadable.
    """
    mine, encoding, total = missing[group.rank() :: group.world()], encoder.encoding, encoder.encoding["number"]
    shard_rows = {number: range(number * options.shard_size, total)[: options.shard_size] for number in mine}
    samples = _prefetch_samples(source, chain(*shard_rows.values()), encoding, 2 * options.batch)
    own, records = count_samples(shard_numbers, options.shard_size, total), {}
    bad_files: dict[str, str] = {}
    done = own - count_samples(missing, options.shard_size, total)
    with Bar("encoding", total=own, initial=done, unit="clip" if "num_frames" in encoding else "image") as bar:
        for number, rows in shard_rows.items():
            parts: list[Any] = []
            bad: set[tuple[str, str]] = set()
            for start in range(0, len(rows), options.batch):
                items, unread = zip(*islice(samples, len(rows[start : start + options.batch])))
                parts.append(encoder.encode_batch(collate_items(list(items))))
                bad.update(tuple(entry) for entries in unread for entry in entries)
                _require_few_unreadable_files(bad_files | dict(bad), options, own)
                # The other ranks are assumed to be as far.
                bar.update(min(len(items) * min(group.world(), len(missing)), bar.total - bar.n))
            bad_files |= dict(bad)
            records[number] = _write_shard(options.out, number, encoding, shards.join_batch_arrays(parts), sorted(bad))
    return records


def _prefetch_samples(
    source: Source, rows: Iterable[int], encoding: dict[str, Any], num_prefetched: int
) -> Iterator[tuple[Item, Bad]]:
    """Reads the samples in `rows` with threads, at most `num_prefetched` of them in advance. Yields (sample, bad) in
    the order of `rows`. A sample is a dict of tensors, with crops and captions if the encoding has them. If samples
    were unreadable, the next readable one takes their place, and `bad` lists (name, reason) of them.

    Raises ConfigError if the encoding has captions and a sample has none, or, for a text encoder, only empty ones.
    """
    names = [name for name in ("image", "video", "frames", "caption") if name != "caption" or encoding.get("captions")]
    several = encoding.get("num_captions")

    def read_sample(index: int) -> tuple[dict, list]:
        """Reads sample `index`, or the next readable one. Returns it as a dict of tensors, and a list of (name, reason)
        of the unreadable samples in its place.
        """
        crops, bad = _read_crops(source, index, encoding)
        items: list[dict[str, Any]] = [*crops]
        item = items[0]
        row = (index + len(bad)) % len(source)  # an unreadable sample is replaced by the next one
        sample = {name: torch.as_tensor(item[name]) for name in names if name in item}
        if "crops" in encoding:
            sample["image"] = torch.stack([crop["image"] for crop in items])
        if several:
            texts = source.read_captions(row)[:several]
            sample["caption"] = pad_and_stack_texts(
                [pack_caption(text) for text in (*texts, *[""] * (several - len(texts)))]
            )
            sample["captions"] = torch.tensor(len(texts))
        if encoding.get("captions") and ("caption" not in sample or (encoding["text"] and not sample["caption"].any())):
            raise ConfigError(f"{source.name_sample(row)} has no caption, and captions are encoded: write one")
        return sample | {"label": torch.tensor(int(item.get("label", 0))), "source": torch.tensor(row)}, bad

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = 1 if source.light else max(1, min(8, cores // group.read_rank_and_world().local_world))
    yield from map_in_threads(read_sample, rows, threads, num_prefetched)


def _read_crops(source: Source, index: int, encoding: dict[str, Any]) -> tuple[list[Item], Bad]:
    """Reads sample `index` once for each crop of the encoding, or once without crops. The positions of the crops depend
    on `index` alone. Returns the items, and (name, reason) of each unreadable sample that was replaced by a later one.
    """
    if "crops" not in encoding:
        return read_items_or_substitutes(source, [index])
    keys = rng.keys_of_seeds(index * encoding["crops"] + torch.arange(encoding["crops"]))
    chances = rng.uniform(keys, "crop", (source.chance_count,)).tolist()
    first, bad = read_items_or_substitutes(source, [index], chances[:1])
    rest, _ = read_items_or_substitutes(source, [index] * (len(chances) - 1), chances[1:])
    return first + rest, bad


def _write_shard(
    out: Path, number: int, encoding: dict[str, Any], arrays: shards.Arrays, unreadable: list[tuple[str, str]]
) -> dict[str, Any]:
    """Writes shard `number`, whole or not at all, and returns its record for the index. `unreadable` has (name, reason)
    of the unreadable files among the shard's samples. Raises ConfigError if the file cannot be written.
    """
    codes = arrays["tokens" if encoding["kind"] == "tokens" else "moments"]
    facts = {
        "encoding": shards.hash_encoding(encoding),
        "number": number,
        "sums": shards.sum_codes_for_statistics(codes),
        "bad": unreadable,
    }
    if "caption" in arrays:
        facts["caption_bytes"] = arrays["caption"].shape[-1]
    path = out / shards.name_shard(number)
    with explain_write_errors(path, SAME_COMMAND):
        data = shards.pack_shard(arrays, facts)
        atomic.write_file(path, data)
    return shards.make_shard_record(path, shards.verify_and_parse_metadata(data))


def _require_few_unreadable_files(unreadable: Mapping[str, str], options: EncodeOptions, total: int) -> None:
    """Raises ConfigError if more than --max-bad-fraction of the files are unreadable. `unreadable` is {file: reason}.
    `total` is the number of samples; each file gives one, or as many as --clips says.
    """
    # A file is bad in each of its windows, and counts once.
    require_few_unreadable_samples(unreadable, total // (options.clips or 1), options.max_bad_fraction, "files")


def _write_index_if_complete(
    options: EncodeOptions, source: Source, encoding: dict[str, Any], records: dict[int, dict[str, Any]]
) -> dict[str, Any] | None:
    """Writes the index on rank 0 if all shards are there, and returns its content on every rank. If shards of other
    commands' parts (--part) are missing, prints these parts, writes nothing, and returns None.

    Raises ConfigError if too many files are unreadable.
    """
    if options.part is not None:
        records |= group.broadcast_from_first(
            _read_records_of_other_parts(options, encoding, records) if group.rank() == 0 else None
        )
        if missing := _list_missing_parts(options.part, encoding, records):
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
    _require_few_unreadable_files(dict(index["bad_files"]), options, encoding["number"])
    if group.rank() == 0:
        # Two parts that end at the same time write the same index.
        with nullcontext() if options.part is None else folders.lock_folder(options.out):
            atomic.write_file(options.out / shards.INDEX, render_json_with_hash(index))
    return index


def _read_records_of_other_parts(
    options: EncodeOptions, encoding: dict[str, Any], records: dict[int, dict[str, Any]]
) -> dict[int, dict[str, Any]]:
    """Returns {number: record} of the shards of this encoding that commands for other parts (--part) have written.
    Reads only the headers of the shards, and does not compute hashes again.
    """
    others = {}
    for number in _compute_shard_range_of_part(encoding, None):
        path = options.out / shards.name_shard(number)
        facts = None if number in records else shards.read_unverified_metadata(path)
        if facts is not None and _is_shard_of_encoding(facts, encoding, number):
            others[number] = shards.make_shard_record(path, facts)
    return others


def _list_missing_parts(
    part: tuple[int, int], encoding: dict[str, Any], records: dict[int, dict[str, Any]]
) -> list[str]:
    """Lists the parts, such as "3/16", of which a shard has no record. `part` is (K, N): this command makes the Kth of
    N parts.
    """
    return [
        f"{place}/{part[1]}"
        for place in range(1, part[1] + 1)
        if not all(number in records for number in _compute_shard_range_of_part(encoding, (place, part[1])))
    ]
