"""The codes of a whole data set, made once by all ranks: shards that training reads instead of encoding online.

Of videos also what stands beside them: captions, and the states of a text encoder where one is named.

Shards are dealt to the ranks in turn; each is encoded in batches of one fixed shape, cut at the shard's own borders, so
that its bytes depend neither on the number of ranks nor on what was there before. A shard is complete or absent. The
same command again keeps the shards that are whole, makes the others, and ends with the same bytes. The format stands in
dstrain/data/shards.py.
"""

import json
import math
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from dstrain import __version__
from dstrain.caches.plan import EncodeOptions, planned
from dstrain.data import shards
from dstrain.data.rows import CAPTION_BYTES
from dstrain.data.source import Source, read_items
from dstrain.disk import atomic
from dstrain.disk.sealed import render
from dstrain.ranks import group
from dstrain.recipe import ConfigError
from dstrain.runs import folders
from dstrain.runs.first_stage import Encoder, FirstStage
from dstrain.systems.base import Batch


def encode(options: EncodeOptions) -> dict[str, Any]:
    """Writes options.out, on all ranks together; the body of its index.

    ConfigError: what is asked for cannot be, more files than tolerated are unreadable, or the folder holds
    another encoding.
    """
    plan = planned(options)
    stage, encoding = plan.stage, plan.encoding
    count = -(-encoding["number"] // options.shard_size)
    with _one_thread(), _claimed(options.out) if group.rank() == 0 else nullcontext():
        problem = _prepared(options, stage, encoding) if group.rank() == 0 else None
        if problem := group.from_first(problem):
            raise ConfigError(problem)
        records = _whole(options.out, encoding, range(group.rank(), count, group.world()))
        there = {number for some in group.objects(sorted(records)) for number in some}
        missing = [number for number in range(count) if number not in there]
        records |= _made(options, Encoder(stage, plan.texts, encoding), plan.source, missing)
        found = [record for some in group.objects(records) for record in some.items()]
        index = _finish(options, plan.source, encoding, found)
    group.barrier()
    return index


@contextmanager
def _one_thread() -> Iterator[None]:
    """On the CPU, sums depend on how many threads share them: the bytes would be of OMP_NUM_THREADS, too."""
    before = torch.get_num_threads()
    if group.device().type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ----------------------------------------------------------------------------------------------------------- the folder


def _claimed(out: Path) -> Any:
    try:
        return folders.claim(out, busy=f"--out {out}: another process encodes into it; wait for its end")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be made ({error.strerror}): name a folder that can be written") from None


def _prepared(options: EncodeOptions, stage: FirstStage, encoding: dict[str, Any]) -> str | None:
    """Makes the folder ready on rank 0; why it cannot be, else None."""
    try:
        return _refused(options, stage, encoding)
    except OSError as error:
        return f"--out {error.filename or options.out} cannot be read or written ({error.strerror}): name another folder"


def _refused(options: EncodeOptions, stage: FirstStage, encoding: dict[str, Any]) -> str | None:
    out, path = options.out, options.out / shards.ENCODING
    of = {"first_stage": stage.name, "data": f"{options.data or 'the data of the run'}, {options.split}"}
    if (there := shards.earlier(out)) is not None:
        names = there.get("of", {})
        pairs = [(key, there["encoding"].get(key), value) for key, value in encoding.items()]
        say = lambda key, value, named: f"{named[key]} ({value})" if key in named else value
        apart = [f"{key} {say(key, old, names)} there, {say(key, new, of)} here"
                 for key, old, new in pairs if old != new]
        if apart:
            return f"--out {out} holds another encoding: {'; '.join(apart)}. Name another folder"
    elif strangers := shards.strangers(out):
        return f"--out {out} holds {', '.join(strangers[:3])} and no encoding: name a new folder"
    elif {shards.encoding_of(shard) for shard in out.glob("shard_*.safetensors")} - {None, shards.short(encoding)}:
        return f"--out {out} holds another encoding, and its {path.name} is damaged or missing. Name another folder"
    for leftover in out.glob("*.tmp"):
        leftover.unlink()
    numbers = math.prod(encoding["shape"]) * encoding["flips"] * (2 if encoding["kind"] == "latents" else 1)
    row = numbers * np.dtype(encoding["dtype"]).itemsize + 16 + (8 + CAPTION_BYTES) * ("captions" in encoding)
    if text := encoding.get("text"):
        row += math.prod(text["shape"]) * np.dtype(text["dtype"]).itemsize + text["shape"][0]
    needed = encoding["number"] * row
    needed -= sum(shard.stat().st_size for shard in out.glob("shard_*.safetensors"))
    free = shutil.disk_usage(out).free
    if needed > free:
        return (f"--out {out} has {free / 1e9:.2f} GB free, {needed / 1e9:.2f} GB are needed: make room, or name "
                "another disk")
    atomic.write(path, json.dumps({"encoding": encoding, "of": of}, sort_keys=True, indent=1) + "\n")
    return None


def _whole(out: Path, encoding: dict[str, Any], numbers: range) -> dict[int, dict[str, Any]]:
    """Records of the shards among `numbers` that are there and whole; those that are damaged are removed."""
    found = {}
    for number in numbers:
        path = out / shards.shard_name(number)
        if path.exists():
            try:
                facts = shards.check(path)
                if facts["encoding"] != shards.short(encoding) or facts["number"] != number:
                    raise ConfigError(f"{path} is of another encoding")
                found[number] = shards.record(path, facts)
            except ConfigError as error:
                print(f"{error}; it is made anew", flush=True)
                path.unlink()
    return found


# ---------------------------------------------------------------------------------------------------------- the shards


def _made(options: EncodeOptions, encoder: Encoder, source: Source, missing: list[int]) -> dict[int, dict[str, Any]]:
    """Encodes this rank's share of the missing shards; a record of each."""
    mine, encoding = missing[group.rank()::group.world()], encoder.encoding
    size, total = options.shard_size, encoding["number"]
    jobs = [(number, range(start, min(start + options.batch, (number + 1) * size, total)))
            for number in mine for start in range(number * size, min((number + 1) * size, total), options.batch)]
    found, parts, shard_bad, bad_files = {}, [], set(), set()
    done = total - sum(min(size, total - number * size) for number in missing)
    unit = "clip" if "num_frames" in encoding else "image"
    with tqdm(total=total, initial=done, unit=unit, disable=None if group.rank() == 0 else True) as bar:
        for number, rows, batch, bad in _read(source, jobs, encoding):
            parts.append(encoder.arrays(batch))
            shard_bad |= bad
            bad_files |= {name for name, _ in bad}
            _tolerate(len(bad_files), options, total)
            if rows.stop in ((number + 1) * size, total):
                arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
                found[number] = _write(options.out, number, encoding, arrays, sorted(shard_bad))
                parts, shard_bad = [], set()
            bar.update(min(len(rows) * min(group.world(), len(missing)), bar.total - bar.n))      # as the others, too
    return found


def _read(source: Source, jobs: list[tuple[int, range]],
          encoding: dict[str, Any]) -> Iterator[tuple[int, range, Batch, set[tuple[str, str]]]]:
    """(shard, rows, samples, bad) of each job, read by threads and ahead; decoders let them run.

    ConfigError: a sample without a caption, where captions are encoded, or where others have one.
    """
    names = [name for name in ("image", "video", "frames", "caption")
             if name != "caption" or encoding.get("captions")]

    def one(index: int) -> tuple[dict, list]:
        (item,), bad = read_items(source, [index])
        at = (index + len(bad)) % len(source)                              # every unreadable one is a step further
        kept = {name: torch.as_tensor(item[name]) for name in names if name in item}
        if encoding.get("captions") and ("caption" not in kept or encoding["text"] and not kept["caption"].any()):
            raise ConfigError(f"{source.name(at)} has no caption, and captions are encoded: write one, or take it "
                              "away")
        return kept | {"label": torch.tensor(int(item.get("label", 0))), "source": torch.tensor(at)}, bad

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = 1 if source.light else max(1, min(8, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque = deque()
        try:
            for job in [*jobs, None, None]:
                if job is not None:
                    waiting.append((*job, [pool.submit(one, index) for index in job[1]]))
                if waiting and (job is None or len(waiting) > 2):
                    number, rows, futures = waiting.popleft()
                    items, bad = zip(*(future.result() for future in futures))
                    yield (number, rows, {name: torch.stack([item[name] for item in items]) for name in items[0]},
                           {tuple(entry) for some in bad for entry in some})
        finally:
            pool.shutdown(cancel_futures=True)


def _write(out: Path, number: int, encoding: dict[str, Any], arrays: shards.Arrays,
           bad: list[tuple[str, str]]) -> dict[str, Any]:
    """One shard, whole or not at all."""
    codes = arrays["tokens" if encoding["kind"] == "tokens" else "moments"]
    facts = {"encoding": shards.short(encoding), "number": number, "sums": shards.sums(codes), "bad": bad}
    path = out / shards.shard_name(number)
    try:
        data = shards.pack(arrays, facts)
        atomic.write(path, data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); what is there is whole: give the same command "
                          "again once it can") from None
    return shards.record(path, shards.facts_of(data))


def _tolerate(bad: int, options: EncodeOptions, total: int) -> None:
    total //= options.clips or 1                                             # a file is bad in each of its windows
    if bad > max(options.max_bad_fraction * total, 1 if options.max_bad_fraction else 0):
        raise ConfigError(f"{bad} of {total} files cannot be read, more than --max-bad-fraction "
                          f"{options.max_bad_fraction} tolerates: repair or remove them, or raise it")


def _finish(options: EncodeOptions, source: Source, encoding: dict[str, Any], found: list[tuple[int, dict]]) -> dict[str, Any]:
    """The index, written last, by rank 0."""
    records = [record for _, record in sorted(found, key=lambda entry: entry[0])]
    index = shards.body_of(encoding, list(source.classes), records,
                           {"dstrain": __version__, "torch": torch.__version__})
    _tolerate(len(index["bad_files"]), options, encoding["number"])
    if group.rank() == 0:
        atomic.write(options.out / shards.INDEX, render(index))
    return index
