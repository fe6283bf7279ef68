"""Samples a second from cached latents: shards against one .npy file for each sample, on this machine.

    python launch/bench/latents.py [--samples 10000 --batch 256 --channels 4 --size 32 --rounds 50 --dtype float16]

files      one latent a file, float32, and its label in another, as fast-DiT caches them: np.load of both, stacked
shards     data/cached/latents.py: mean and deviation of one of both sides, mapped, gathered into a batch
cold       the same, with the shards dropped from memory before (posix_fadvise; not on tmpfs)
cold files the files, dropped from memory before
expected   cold, where the samples were named to `Latents.prefetch` --step milliseconds earlier, as in training

All read the same indices, drawn anew each round, on one core: the first two after one pass over all that brings them
into memory, in turn, A B A B, then the other two. The table shows the fastest and the median of the rounds. A file of
float32 latents has as many bytes as mean and deviation in float16.

2026-11-22, a virtual disk, medians of 15 rounds on a busy machine: files 2,800 samples a second, shards 410,000; cold
files 760, cold 1,700, expected 150,000. The fastest rounds: 3,300 and 450,000; 2,400, 2,500, 180,000. In memory on a
quieter machine 9,900 and 470,000, on another 8,100 and 200,000 (450,000 where nothing is read in between): there the
bytes of the latents are the limit, which numpy copies at 680,000.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from dstrain.data.cached import shards
from dstrain.data.cached.latents import Latents
from dstrain.disk.sealed import render_json_with_hash


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("samples", 10000),
        ("batch", 256),
        ("channels", 4),
        ("size", 32),
        ("rounds", 50),
        ("shard-size", 4096),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--step", type=float, default=50.0)
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write(root, options)
        compare(root, options)


def compare(root: Path, options: argparse.Namespace) -> None:
    """Prints samples a second of each way and their ratio."""
    source, random = Latents(root / "shards"), np.random.default_rng(0)
    ways = {
        "files": lambda index, side: from_files(root / "files", index),
        "shards": lambda index, side: source.read_codes(index, side),
    }
    every = torch.arange(options.samples)
    for way in ways.values():
        means = way(every[-options.batch :], torch.zeros(options.batch, dtype=torch.bool))["latent_mean"]
        assert torch.allclose(means.float(), stored(every[-options.batch :], options)[:, 0, 0], atol=1e-2)
        for part in every.split(options.batch):
            way(part, torch.ones(len(part), dtype=torch.bool))
    seconds: dict[str, list[float]] = {name: [] for name in (*ways, "cold files", "cold", "expected")}
    drawn = [
        (
            torch.from_numpy(random.integers(0, options.samples, options.batch)),
            torch.from_numpy(random.random(options.batch) < 0.5),
        )
        for _ in range(options.rounds)
    ]
    for index, side in drawn:
        for name, way in ways.items():
            start = time.perf_counter()
            way(index, side)
            seconds[name].append(time.perf_counter() - start)
    source._open.clear()  # pages that are mapped stay in memory
    for index, side in drawn:
        drop(*(root / "files" / f"{i}{kind}.npy" for i in index.tolist() for kind in ("", "_label")))
        start = time.perf_counter()
        ways["files"](index, side)
        seconds["cold files"].append(time.perf_counter() - start)
        for name in ("cold", "expected"):
            drop(*(root / "shards").iterdir())
            fresh = Latents(root / "shards")
            if name == "expected":
                fresh.prefetch(index, side)
                time.sleep(options.step / 1000)
            start = time.perf_counter()
            fresh.read_codes(index, side)
            seconds[name].append(time.perf_counter() - start)
            del fresh
    print(
        f"latents {options.channels} x {options.size} x {options.size}, batches of {options.batch}: samples a second "
        "on one core"
    )
    print(f"{'':12}{'fastest':>12}{'median':>12}{'/ files':>10}")
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(
            f"{name:12}{options.batch / min(values):12.0f}{options.batch / middle[name]:12.0f}"
            f"{middle['files'] / middle[name]:10.1f}"
        )


def drop(*paths: Path) -> None:
    """Drops files from memory."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def stored(index: torch.Tensor, options: argparse.Namespace) -> torch.Tensor:
    """Codes of the samples at `index`, made up: float32 (b, 2, 2, C, h, w)."""
    shape = (len(index), 2, 2, options.channels, options.size, options.size)
    return (index.view(-1, 1, 1, 1, 1, 1) % 97 / 97 + 0.1).expand(shape)


def from_files(folder: Path, index: torch.Tensor) -> dict[str, torch.Tensor]:
    """A batch of samples that lie in two files each."""
    latents = [torch.from_numpy(np.load(folder / f"{i}.npy")) for i in index.tolist()]
    labels = [torch.from_numpy(np.load(folder / f"{i}_label.npy")) for i in index.tolist()]
    return {"latent_mean": torch.stack(latents), "label": torch.stack(labels)}


def write(root: Path, options: argparse.Namespace) -> None:
    """Both caches of the same samples."""
    (root / "files").mkdir()
    (root / "shards").mkdir()
    encoding = {
        "kind": "latents",
        "shape": [options.channels, options.size, options.size],
        "dtype": options.dtype,
        "number": options.samples,
        "flips": 2,
        "image_size": 8 * options.size,
        "channels": 3,
        "shard_size": options.shard_size,
        "batch": 1,
        "first_stage": "none",
        "data": "made up",
    }
    records = []
    for number, index in enumerate(torch.arange(options.samples).split(options.shard_size)):
        codes = stored(index, options).numpy().astype(options.dtype)
        for i, code in zip(index.tolist(), codes):
            np.save(root / "files" / f"{i}.npy", code[0, 0].astype(np.float32))
            np.save(root / "files" / f"{i}_label.npy", np.array(i % 10))
        path = root / "shards" / shards.name_shard(number)
        facts = {
            "encoding": shards.hash_encoding(encoding),
            "number": number,
            "sums": shards.sum_codes_for_statistics(codes),
            "bad": [],
        }
        path.write_bytes(
            shards.pack_shard({"moments": codes, "label": index.numpy() % 10, "source": index.numpy()}, facts)
        )
        records.append(shards.make_shard_record(path, shards.read_verified_metadata(path)))
    body = shards.make_index_body(encoding, [str(i) for i in range(10)], records, {})
    (root / "shards" / shards.INDEX).write_bytes(render_json_with_hash(body))


if __name__ == "__main__":
    main()
