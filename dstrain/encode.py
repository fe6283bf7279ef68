"""The codes of a whole data set, made once by all ranks: shards that training reads instead of encoding online.

Shards are dealt to the ranks in turn; each is encoded in batches of one fixed shape, cut at the shard's own borders, so
that its bytes depend neither on the number of ranks nor on what was there before. A shard is complete or absent. The
same command again keeps the shards that are whole, makes the others, and ends with the same bytes. The format stands in
dstrain/data/shards.py.
"""

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dstrain import __version__, folders, ranks, runs, systems
from dstrain.config import ConfigError
from dstrain.data import shards
from dstrain.data.bad_files import read_items
from dstrain.data.images import open_images
from dstrain.data.latents import is_encoded
from dstrain.encoders import autoencoder
from dstrain.engine.manifest import replace, sync_folder, write_synced


@dataclass(frozen=True)
class Order:
    """What to encode, and with what."""

    out: Path                                  # folder of the shards
    run: Path | None = None                    # of a system that encodes; or
    first_stage: str | None = None             # a diffusers AutoencoderKL: folder, or name on the hub
    data: str | None = None                    # folder of images, or builtin:fashion; None: the run's
    split: str = "train"                       # train, held_out or all
    held_out: float | None = None              # share of the folder that is held out; None: the run's
    image_size: int | None = None              # pixels; None: the run's
    batch: int = 32                            # images of one call of the first stage
    shard_size: int = 4096                     # samples
    dtype: str = "float16"                     # of latents on the disk: float16 or float32
    flip: bool = True                          # encode the mirrored images, too
    ema: float | None = None                   # of a run: decay; None: its choice
    raw: bool = False                          # of a run: the training weights instead of an average
    step: int | None = None                    # of a run: checkpoint; None: the newest whole one
    max_bad_fraction: float = 0.01             # of the images, replaced where unreadable


@dataclass(frozen=True)
class FirstStage:
    """A frozen network that encodes, whatever it is."""

    name: str                                  # for messages
    fingerprint: str
    channels: int                              # of its images
    codes: Callable[[Tensor], np.ndarray]      # uint8 (B, C, H, W) -> float32 (B, 2, c, h, w), mean and deviation, or
                                               # token ids (B, h, w)


def encode(order: Order) -> dict[str, Any]:
    """Writes order.out, on all ranks together; the body of its index.

    ConfigError, ValueError: what is asked for cannot be, more images than tolerated are unreadable, or the folder holds
    another encoding.
    """
    stage = _of_run(order) if order.run is not None else _of_folder(order)
    source, encoding = _plan(order, stage)
    count = -(-encoding["number"] // order.shard_size)
    with _one_thread(), _claimed(order.out) if ranks.rank() == 0 else nullcontext():
        problem = _prepared(order, stage, encoding) if ranks.rank() == 0 else None
        if problem := ranks.from_first(problem):
            raise ConfigError(problem)
        records = _whole(order.out, encoding, range(ranks.rank(), count, ranks.world()))
        there = {number for some in ranks.objects(sorted(records)) for number in some}
        missing = [number for number in range(count) if number not in there]
        records |= _made(order, stage, source, encoding, missing)
        index = _finish(order, source, encoding, [record for some in ranks.objects(records) for record in some.items()])
    ranks.barrier()
    return index


@contextmanager
def _one_thread() -> Iterator[None]:
    """On the CPU, sums depend on how many threads share them: the bytes would be of OMP_NUM_THREADS, too."""
    before = torch.get_num_threads()
    if ranks.device().type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------------ the first stage


def _of_run(order: Order) -> FirstStage:
    run = runs.read(order.run)
    system = systems.build(run.system, run.model)
    if not system.encodes:
        raise ConfigError(f"{order.run} trains {run.system}, which encodes nothing that others learn from: name a run "
                          "of an autoencoder, or a diffusers AutoencoderKL as --first-stage")
    checkpoint = runs.checkpoint(order.run, order.step)
    kinds = runs.kinds(system, checkpoint, run.samples.ema if order.ema is None else order.ema, order.raw)
    networks = runs.networks(system, checkpoint, kinds, torch.float32)

    def codes(images: Tensor) -> np.ndarray:
        example = {"image": images, "key": torch.zeros(len(images), dtype=torch.int64, device=images.device)}
        found = system.codes(networks, system.encode(example))
        if "tokens" in found:
            return found["tokens"].cpu().numpy()
        return _moments(found["latent_mean"], found["latent_std"])

    return FirstStage(str(order.run), autoencoder.fingerprint(*system.identity(networks)), run.data.channels, codes)


def _of_folder(order: Order) -> FirstStage:
    try:
        vae = autoencoder.Autoencoder(order.first_stage).to(ranks.device())
    except ValueError as error:
        raise ConfigError(str(error).replace("first_stage.path:", f"--first-stage {order.first_stage}:")) from None
    if order.image_size is not None and order.image_size % vae.factor:
        raise ConfigError(f"--image-size {order.image_size} is no multiple of {vae.factor}, by which "
                          f"{order.first_stage} shrinks images")
    codes = lambda images: _moments(*autoencoder.posterior(vae.vae, images.float() / 127.5 - 1))
    return FirstStage(order.first_stage, vae.fingerprint(), vae.image_channels, codes)


def _moments(mean: Tensor, std: Tensor) -> np.ndarray:
    return torch.stack((mean, std), dim=1).float().cpu().numpy()                                  # (B, 2, c, h, w)


# ------------------------------------------------------------------------------------------------------------- the plan


def _plan(order: Order, stage: FirstStage) -> tuple[Any, dict[str, Any]]:
    """The images, and what their encoding is: all that its bytes depend on."""
    data, size, share, beside = order.data, order.image_size, order.held_out or 0.0, None
    if order.run is not None:
        own = runs.read(order.run).data
        size = size or own.image_size
        if data is None:
            data, beside = own.path, own.held_out_path
            share = own.held_out if order.held_out is None else order.held_out
    if data is None or size is None:
        raise ConfigError("name the images: --data FOLDER (or builtin:fashion) and --image-size PIXELS")
    if data.startswith("builtin:") and order.held_out:
        raise ConfigError(f"--held-out {order.held_out}: {data} holds out images itself: leave it out")
    if is_encoded(data):
        raise ConfigError(f"--data {data} holds cached codes already: name a folder of images")
    try:
        source = open_images(data, size, channels=stage.channels, split=order.split, held_out=share,
                             held_out_path=beside)
    except ValueError as error:
        raise ConfigError(str(error).replace("data.path=", "--data ").replace("data.held_out", "--held-out")) from None
    probe = stage.codes(torch.zeros(order.batch, *source.shape, dtype=torch.uint8, device=ranks.device()))
    tokens = probe.ndim == 3
    return source, {
        "kind": "tokens" if tokens else "latents", "shape": list(probe.shape[1:] if tokens else probe.shape[2:]),
        "dtype": "int32" if tokens else order.dtype, "number": len(source), "flips": 2 if order.flip else 1,
        "image_size": size, "channels": stage.channels, "shard_size": order.shard_size, "batch": order.batch,
        "first_stage": stage.fingerprint, "data": source.fingerprint()}


def _claimed(out: Path) -> Any:
    try:
        return folders.claim(out, busy=f"--out {out}: another process encodes into it; wait for its end")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be made ({error.strerror}): name a folder that can be written") from None


def _prepared(order: Order, stage: FirstStage, encoding: dict[str, Any]) -> str | None:
    """Makes the folder ready on rank 0; why it cannot be, else None."""
    try:
        return _refused(order, stage, encoding)
    except OSError as error:
        return f"--out {error.filename or order.out} cannot be read or written ({error.strerror}): name another folder"


def _refused(order: Order, stage: FirstStage, encoding: dict[str, Any]) -> str | None:
    out, path = order.out, order.out / shards.ENCODING
    of = {"first_stage": stage.name, "data": f"{order.data or 'the data of the run'}, {order.split}"}
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
    numbers = int(np.prod(encoding["shape"])) * encoding["flips"] * (2 if encoding["kind"] == "latents" else 1)
    needed = encoding["number"] * (numbers * np.dtype(encoding["dtype"]).itemsize + 16)
    needed -= sum(shard.stat().st_size for shard in out.glob("shard_*.safetensors"))
    free = shutil.disk_usage(out).free
    if needed > free:
        return (f"--out {out} has {free / 1e9:.2f} GB free, {needed / 1e9:.2f} GB are needed: make room, or name "
                "another disk")
    replace(path, json.dumps({"encoding": encoding, "of": of}, sort_keys=True, indent=1) + "\n")
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
                    raise ValueError(f"{path} is of another encoding")
                found[number] = shards.record(path, facts)
            except ValueError as error:
                print(f"{error}; it is made anew", flush=True)
                path.unlink()
    return found


# ---------------------------------------------------------------------------------------------------------- the shards


def _made(order: Order, stage: FirstStage, source: Any, encoding: dict[str, Any],
          missing: list[int]) -> dict[int, dict[str, Any]]:
    """Encodes this rank's share of the missing shards; a record of each."""
    mine = missing[ranks.rank()::ranks.world()]
    size, total = order.shard_size, encoding["number"]
    jobs = [(number, range(start, min(start + order.batch, (number + 1) * size, total)))
            for number in mine for start in range(number * size, min((number + 1) * size, total), order.batch)]
    found, parts, bad_files = {}, [], set()
    done = total - sum(min(size, total - number * size) for number in missing)
    with tqdm(total=total, initial=done, unit="image", disable=ranks.rank() != 0) as bar:
        for number, rows, images, labels, sources, bad in _read(source, jobs):
            parts.append((_codes(order, stage, images, encoding), labels, sources, bad))
            bad_files |= {name for name, _ in bad}
            _tolerate(len(bad_files), order, total)
            if rows.stop in ((number + 1) * size, total):
                found[number] = _write(order.out, number, encoding, parts)
                parts = []
            bar.update(min(len(rows) * min(ranks.world(), len(missing)), bar.total - bar.n))      # as the others, too
    return found


def _read(source: Any, jobs: list[tuple[int, range]]) -> Iterator[tuple]:
    """(shard, rows, images, labels, sources, bad) of each job, read by threads and ahead; decoders let them run."""
    def one(index: int) -> tuple[dict, int, list]:
        (item,), bad = read_items(source, [index])
        return item, (index + len(bad)) % len(source), bad                 # every unreadable one is a step further

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
                    items, sources, bad = zip(*(future.result() for future in futures))
                    yield (number, rows, torch.stack([item["image"] for item in items]),
                           [int(item.get("label", 0)) for item in items], list(sources),
                           [list(entry) for some in bad for entry in some])
        finally:
            pool.shutdown(cancel_futures=True)


def _codes(order: Order, stage: FirstStage, images: Tensor, encoding: dict[str, Any]) -> np.ndarray:
    """Of both sides of some images, in batches of one shape, filled up by the last: (n, flips, ...) as stored."""
    rows = torch.arange(order.batch).clamp(max=len(images) - 1)
    full = images[rows].to(ranks.device())
    sides = [stage.codes(full if side == 0 else full.flip(-1))[:len(images)] for side in range(encoding["flips"])]
    with np.errstate(over="ignore"):
        found = np.stack(sides, axis=1).astype(encoding["dtype"])
    if encoding["kind"] == "latents" and not np.isfinite(found).all():
        raise ConfigError(f"{stage.name} gives latents that are not finite in {order.dtype}: take --dtype float32"
                          if order.dtype == "float16" else f"{stage.name} gives latents that are not finite")
    return found


def _write(out: Path, number: int, encoding: dict[str, Any], parts: list[tuple]) -> dict[str, Any]:
    """One shard, whole or not at all."""
    codes, labels, sources, bad = zip(*parts)
    codes = np.concatenate(codes)
    arrays = {"tokens" if encoding["kind"] == "tokens" else "moments": codes,
              "label": np.concatenate(labels).astype(np.int64), "source": np.concatenate(sources).astype(np.int64)}
    facts = {"encoding": shards.short(encoding), "number": number, "sums": shards.sums(codes),
             "bad": sorted({tuple(entry) for some in bad for entry in some})}
    path = out / shards.shard_name(number)
    tmp = path.with_name(path.name + ".tmp")
    try:
        data = shards.pack(arrays, facts)
        write_synced(tmp, data)
        os.replace(tmp, path)
        sync_folder(out)
    except OSError as error:
        tmp.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written ({error.strerror}); what is there is whole: give the same command "
                          "again once it can") from None
    return shards.record(path, shards.facts_of(data))


def _tolerate(bad: int, order: Order, total: int) -> None:
    if bad > max(order.max_bad_fraction * total, 1 if order.max_bad_fraction else 0):
        raise ConfigError(f"{bad} of {total} images cannot be read, more than --max-bad-fraction "
                          f"{order.max_bad_fraction} tolerates: repair or remove them, or raise it")


def _finish(order: Order, source: Any, encoding: dict[str, Any], found: list[tuple[int, dict]]) -> dict[str, Any]:
    """The index, written last, by rank 0."""
    records = [record for _, record in sorted(found, key=lambda entry: entry[0])]
    index = shards.body_of(encoding, list(source.classes), records,
                           {"dstrain": __version__, "torch": torch.__version__})
    _tolerate(len(index["bad_files"]), order, encoding["number"])
    if ranks.rank() == 0:
        replace(order.out / shards.INDEX, shards.render(index))
        sync_folder(order.out)
    return index
