"""Seconds and memory of launch/consolidate.py against DeepSpeed's zero_to_fp32.py, on synthetic checkpoints.

    python launch/bench/consolidate.py [--parameters 200000000 --rounds 3 --folder DIR]

stage 2, stage 3    DeepSpeed's own files of 2 ranks, bf16: both programs merge them into safetensors files of 5 GB at
                    most; once it is compared that both wrote the same bits
fragments           dstrain's checkpoint of the same weights (master, two moments, one average) of 2 ranks: every hash
                    verified, and the average written

Each is a process of its own, from its start to its end, in turn, A B A B; given are the fastest and the median of the
rounds, the fastest's CPU seconds, which other processes of the machine disturb less, the largest resident set as the
kernel counts it (ru_maxrss; not below this program's own, 37 MB), and the ratios to zero_to_fp32. A round before has
read the files. Ours ends with fsync, DeepSpeed's does not.

Two cores that some twenty busy processes shared, torch 2.15, DeepSpeed 0.19.8, every file that ours writes hashed, too;
50 million in memory (--folder /dev/shm), 200 million on a disk that others wrote to, where the wait for fsync is ours
alone and CPU seconds compare better; seconds, CPU seconds, MB, and their ratios:

    parameters    way          zero_to_fp32          ours                  ratios
    50 million    stage 2      20.5   4.3    960     1.9   0.4   38        0.09   0.10   0.04
                  stage 3      23.0   4.6   1005     2.2   0.5   38        0.10   0.10   0.04
                  fragments                          5.0   1.2   38        0.24   0.28   0.04
    200 million   stage 2      22.3   6.0   2132    11.6   2.2   38        0.52   0.37   0.02
                  stage 3      31.8   6.9   2176     9.9   2.1   38        0.31   0.30   0.02
                  fragments                         35.6   6.7   38        1.60   1.11   0.02

Most of the fragments' time is hashes, of 16 bytes a parameter where 4 are written; zero_to_fp32 verifies nothing.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from dstrain.checkpoint.manifest import NAME, hash_files
from dstrain.checkpoint.safetensors_io import read_safetensors_header
from dstrain.disk.sealed import render_json_with_hash

RANKS = 2


class Figures(NamedTuple):
    """What a process has taken."""

    seconds: float
    cpu: float  # seconds, of user and system
    memory: float  # MB


def main() -> None:
    """Parses the command line, makes the checkpoints, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=200_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the checkpoints are made, 55 bytes a parameter")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder)
        made(root, options.parameters)
        for stage in (2, 3):
            source = root / f"stage{stage}"
            ways = {"zero_to_fp32": deepspeeds(source), "consolidate": dstrains(source)}
            if stage == 2:
                ways["fragments"] = dstrains(root / "fragments", "--weights", "ema")
            report(f"stage {stage}", measured(ways, root / "out", options.rounds))


def root_folder() -> Path:
    return Path(__file__).resolve().parents[2]


def made(root: Path, parameters: int) -> None:
    """Writes the checkpoints in a process of its own, whose memory is not ours."""
    words = [sys.executable, "-c", f"import bench_consolidate as b; b.write({str(root)!r}, {parameters})"]
    paths = f"{root_folder()}{os.pathsep}{root_folder() / 'launch'}"
    subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": paths})


def write(folder: str, parameters: int) -> None:
    """ZeRO-2 and ZeRO-3 files as DeepSpeed lays them out, but for what no merging reads, and dstrain's own."""
    import torch  # not above: this process's memory is the least that is measured

    root, width = Path(folder), 2048
    rows = [width] * (parameters // width**2) + [parameters % width**2 // width]
    shapes = {f"blocks.{i}.weight": torch.Size((n, width)) for i, n in enumerate(rows) if n}
    flat = torch.randn(sum(shape.numel() for shape in shapes.values()))
    part = flat.numel() // RANKS
    starts = dict(zip(shapes, torch.tensor([0, *(shape.numel() for shape in shapes.values())]).cumsum(0).tolist()))
    for stage in (2, 3):
        tag = root / f"stage{stage}" / "tag"
        tag.mkdir(parents=True)
        (tag.parent / "latest").write_text("tag")
        for rank in range(RANKS):
            if stage == 2:
                mine = flat[rank * part : (rank + 1) * part].clone()
                state = {"single_partition_of_fp32_groups": [mine], "zero_stage": 2, "partition_count": [RANKS]}
            else:
                shares = [
                    flat[starts[name] : starts[name] + shape.numel()].chunk(RANKS)[rank]
                    for name, shape in shapes.items()
                ]
                mine = torch.cat(shares)
                state = {"fp32_flat_groups": [mine], "zero_stage": 3, "partition_count": RANKS}
            moments = {"state": {0: {"exp_avg": mine.clone(), "exp_avg_sq": mine.clone()}}}
            key = "base_optimizer_state" if stage == 2 else "optimizer_state_dict"
            torch.save(
                {"optimizer_state_dict": {**state, key: moments}, "ds_version": "0.19.8"},
                tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )
            if rank == 0 or stage == 3:
                module = {
                    name: flat[starts[name] : starts[name] + shape.numel()].view(shape).bfloat16()
                    if stage == 2
                    else torch.empty(0)
                    for name, shape in shapes.items()
                }
                torch.save(
                    {
                        "module": module,
                        "buffer_names": [],
                        "param_shapes": [shapes],
                        "shared_params": {},
                        "frozen_param_shapes": {},
                        "frozen_param_fragments": {},
                        "global_steps": 1,
                        "mp_world_size": 1,
                        "ds_config": {"zero_optimization": {"stage": stage}},
                        "ds_version": "0.19.8",
                    },
                    tag / f"{f'zero_pp_rank_{rank}_' if stage == 3 else ''}mp_rank_00_model_states.pt",
                )
    write_fragments(root / "fragments" / "checkpoints" / "step_00000001", shapes, flat, starts)


def write_fragments(step: Path, shapes: dict[str, Any], flat: Any, starts: dict[str, int]) -> None:
    """dstrain's checkpoint of the weights `flat`; `starts`: where each begins in it."""
    import torch
    from safetensors.torch import save_file

    from dstrain.checkpoint.fragments import Fragment, make_shard_file_name, write_shard

    step.mkdir(parents=True)
    for rank in range(RANKS):
        entries = [
            (
                kind,
                Fragment(name, tuple(shape), rank * (n := shape.numel() // RANKS), n),
                flat[starts[name] + rank * n : starts[name] + (rank + 1) * n],
            )
            for kind in ("master", "exp_avg", "exp_avg_sq", "ema.0.9999")
            for name, shape in shapes.items()
        ]
        write_shard(step / make_shard_file_name("network", rank, RANKS), entries)
    save_file({"system/seen": torch.zeros(1)}, step / "common.safetensors", {"counters": "{}"})
    body: dict[str, Any] = {
        "files": hash_files(step, sorted(path.name for path in step.iterdir())),
        "step": 1,
        "world": RANKS,
        "extra": {},
        "versions": {},
    }
    (step / NAME).write_bytes(render_json_with_hash(body))


def deepspeeds(source: Path) -> Callable[[Path], list[str]]:
    """DeepSpeed's own script, copied into the checkpoint as its engine does."""
    spec = find_spec("deepspeed")
    assert spec and spec.origin
    script = shutil.copy(Path(spec.origin).parent / "utils" / "zero_to_fp32.py", source)
    return lambda out: [sys.executable, script, str(source), str(out), "--safe_serialization"]


def dstrains(source: Path, *options: str) -> Callable[[Path], list[str]]:
    script = str(root_folder() / "launch" / "consolidate.py")
    return lambda out: [sys.executable, script, str(source), "--out", str(out), *options]


def measured(ways: dict[str, Callable[[Path], list[str]]], out: Path, rounds: int) -> dict[str, list[Figures]]:
    """Figures of every round but the first, which brings the files into memory, and is compared."""
    figures: dict[str, list[Figures]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            figures[name].append(run(way(out / name)))
        compared = number == 0 and all(same(out / "zero_to_fp32", out / name) for name in ways)
        assert number or compared, "the programs wrote different bits"
        shutil.rmtree(out)
    return {name: rounds[1:] for name, rounds in figures.items()}


def run(words: list[str]) -> Figures:
    """Runs a process to its end."""
    began = time.perf_counter()
    process = subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root_folder())},
    )
    assert process.stderr
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    assert status == 0, errors[-3000:]
    return Figures(time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3)


def same(a: Path, b: Path) -> bool:
    """Whether two folders hold the same tensors, to the bit."""

    def bits(folder: Path) -> dict[str, bytes]:
        hashes = {}
        for path in sorted(folder.glob("*.safetensors")):
            with open(path, "rb") as file:
                for name, tensor in read_safetensors_header(path)[0].items():
                    file.seek(tensor.spans[0].offset)
                    hashes[f"{name} {tensor.shape}"] = hashlib.blake2b(file.read(tensor.spans[0].nbytes)).digest()
        return hashes

    return bits(a) == bits(b) != {}


def report(title: str, rounds: dict[str, list[Figures]]) -> None:
    """Prints the best of each way's rounds, and its ratios to zero_to_fp32."""
    best = {
        name: Figures(min(f.seconds for f in figures), min(f.cpu for f in figures), max(f.memory for f in figures))
        for name, figures in rounds.items()
    }
    base = best["zero_to_fp32"]
    for name, figures in rounds.items():
        mine, median = best[name], statistics.median(f.seconds for f in figures)
        print(
            f"{title:8} {name:13} {mine.seconds:6.2f} s (median {median:6.2f}), CPU {mine.cpu:6.2f} s, "
            f"{mine.memory:5.0f} MB; ratios {mine.seconds / base.seconds:.3f}, {mine.cpu / base.cpu:.3f}, "
            f"{mine.memory / base.memory:.3f}"
        )


if __name__ == "__main__":
    main()
