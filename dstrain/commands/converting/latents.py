"""Writes latents that other trainers have cached as a cache of ours, as `dstrain encode` writes it; see foreign.py.

Their samples of a posterior are kept without a deviation. What has been multiplied is divided again, since a run scales
latents by the factor of its first stage. A shard is complete or absent: the same command again keeps those that are
whole, and makes the others.
"""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from dstrain import __version__
from dstrain.commands.converting.foreign import Foreign, open_foreign
from dstrain.commands.encoding.folder import SAME_COMMAND, claimed, require_readable
from dstrain.commands.options.convert import ConvertOptions
from dstrain.data.cached import shards
from dstrain.data.source import Bad, Item, read_items
from dstrain.disk import atomic
from dstrain.disk.sealed import render_sealed
from dstrain.distributed.progress import Bar
from dstrain.encoders import autoencoder
from dstrain.recipe import ConfigError, reworded, write_errors

_NAMED = "name:"
_THREADS = 8  # that read samples
_BATCH = 32  # is what encodings state, since those of `dstrain encode` do


def convert_latents(options: ConvertOptions) -> dict[str, Any]:
    """Writes options.out; returns the body of its index. Raises ConfigError if what is asked for cannot be."""
    if shards.is_cache(options.path):
        raise ConfigError(f"{options.path} holds our own codes: give it as data.path")
    if options.latent_scale is not None and not 0 < options.latent_scale < math.inf:
        raise ConfigError(f"--latent-scale {options.latent_scale}: latents have been multiplied by a number above 0")
    source = open_foreign(options.path)
    if not options.flip:
        source.flips = 1
    if options.latent_scale is not None:
        source.scale = options.latent_scale
    if options.normalize:
        source.normalize()
    encoding = _describe_encoding(options, source)
    print(f"data: {options.path}: {source.describe()}", flush=True)
    with claimed(options.out, "converts", lambda: _prepare_folder(options, encoding)):
        records = [_write_shard(options, source, encoding, rows) for rows in _list_shards(options, source)]
        versions = {"dstrain": __version__, "torch": torch.__version__}
        index = shards.body_of(encoding, None if source.labelled else [], records, versions)
        require_readable(len(index["bad_files"]), len(source), options.max_bad_fraction, "files")
        atomic.write_file(options.out / shards.INDEX, render_sealed(index))
    return index


def _describe_encoding(options: ConvertOptions, source: Foreign) -> dict[str, Any]:
    """Returns what the index says of the codes: what encoded them, which they must fit, and the side of its images."""
    channels, side, _ = source.shape
    name, image_size, image_channels = options.first_stage, options.image_size, 3
    if name.startswith(_NAMED):
        if image_size is None:
            raise ConfigError(f"--first-stage {name}: give --image-size, too, the pixels that {side} latents stand for")
        fingerprint = name.removeprefix(_NAMED)
    else:
        with reworded(options={"first_stage.path:": f"--first-stage {name}:"}):
            vae = autoencoder.Autoencoder(name)
        fingerprint, image_channels = vae.fingerprint(), vae.image_channels
        if vae.channels != channels:
            raise ConfigError(
                f"--first-stage {name} makes latents of {vae.channels} channels, those in {options.path} have "
                f"{channels}: name the one that encoded them"
            )
        if image_size not in (None, side * vae.factor):
            raise ConfigError(
                f"--image-size {image_size}: {side} latents of {name} stand for {side * vae.factor} pixels: "
                "leave it out"
            )
        image_size = side * vae.factor
    if source.statistics is not None:
        # The first stage cannot decode what is normalized by channel, so that runs refuse it by this fingerprint.
        fingerprint = f"{fingerprint}, normalized by {source.hash_statistics()}"
    return {
        "kind": "latents",
        "shape": source.shape,
        "dtype": options.dtype,
        "number": len(source),
        "flips": source.flips,
        "image_size": image_size,
        "channels": image_channels,
        "shard_size": options.shard_size,
        "batch": _BATCH,
        "first_stage": fingerprint,
        "moments": source.moments,
        "latent_scale": source.scale,
        "data": source.contents(),
    }


def _prepare_folder(options: ConvertOptions, encoding: dict[str, Any]) -> str | None:
    """Writes encoding.json; returns what is wrong with the folder, else None."""
    out, earlier = options.out, shards.earlier(options.out)
    if earlier is not None:
        old = earlier["encoding"]
        changes = [
            f"{key} {old.get(key)} there, {encoding.get(key)} here"
            for key in {**old, **encoding}
            if old.get(key) != encoding.get(key)
        ]
        if changes:
            return f"--out {out} holds another encoding: {'; '.join(changes)}. Name another folder"
    elif strangers := shards.strangers(out):
        return f"--out {out} holds {', '.join(strangers[:3])} and no encoding: name a new folder"
    names = {"first_stage": options.first_stage, "data": str(options.path)}
    text = json.dumps({"encoding": encoding, "of": names}, sort_keys=True, indent=1)
    atomic.write_file(out / shards.ENCODING, f"{text}\n")
    return None


def _list_shards(options: ConvertOptions, source: Foreign) -> list[range]:
    """Returns the samples of each shard."""
    size, total = options.shard_size, len(source)
    return [range(start, min(start + size, total)) for start in range(0, total, size)]


def _write_shard(options: ConvertOptions, source: Foreign, encoding: dict[str, Any], rows: range) -> dict[str, Any]:
    """Writes a shard that is not there and whole; returns its record."""
    number = rows.start // options.shard_size
    path = options.out / shards.shard_name(number)
    try:
        facts = shards.check(path)
        if facts["encoding"] == shards.short(encoding) and facts["number"] == number:
            return shards.record(path, facts)
    except ConfigError:
        pass  # it is missing, or damaged

    def read(index: int) -> tuple[list[Item], Bad]:
        return read_items(source, [index])

    items, bad = [], []
    with ThreadPoolExecutor(_THREADS) as pool, Bar(f"converting {path.name}", total=len(rows), unit=" latents") as bar:
        for (item,), own in pool.map(read, rows):
            items.append(item | {"source": (rows.start + len(items) + len(own)) % len(source)})
            bad += own
            bar.update(1)
    with np.errstate(over="ignore"):
        moments = np.stack([item["codes"].numpy() for item in items]).astype(options.dtype)
    if not np.isfinite(moments).all():
        remedy = " in float16: take --dtype float32" if options.dtype == "float16" else ""
        raise ConfigError(f"{options.path} holds latents that are not finite{remedy}")
    arrays = {"moments": moments}
    arrays |= {name: np.array([item[name] for item in items], np.int64) for name in ("label", "source")}
    facts = {
        "encoding": shards.short(encoding),
        "number": number,
        "sums": shards.sums(moments),
        "bad": sorted(set(bad)),
    }
    data = shards.pack(arrays, facts)
    with write_errors(path, SAME_COMMAND):
        atomic.write_file(path, data)
    return shards.record(path, shards.facts_of(data))
