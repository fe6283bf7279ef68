"""What an index of very many samples costs: python -m tests.data.index.check_index_scale [SAMPLES]

It makes an index of SAMPLES (100,000,000) entries directly, whose names are those of 1,000 real pictures again and
again, and one of 1,000 entries. It measures each in processes of their own: seconds from opening to the first batch,
and the memory of the rank and of 8 workers that belongs to them alone (anonymous and shared, by proportion; not the
page cache). Needs 50 bytes of disk a sample, in a temporary folder.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch

from dstrain.data.batches import Batches, _Stream
from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.formats import open_data_files
from dstrain.data.formats.base import Request
from dstrain.data.formats.folders import Folders
from dstrain.data.index.build import _hash_request, _read_file_stats
from dstrain.data.index.columns import Columns
from dstrain.data.index.index import CHUNK, WATCHED, hash_name
from dstrain.data.order import Order
from dstrain.data.sources.images import Images, open_images
from dstrain.disk import atomic, sealed
from tests.support.pictures import folder as folder_of_pictures

FILES, CLASSES = 1000, 10
_KINDS = ((2, 0), (4, 0), (1, 1), (1, 3), (2, 1), (4, 3))  # ranks, workers of each


def make_index(root: Path, number: int, kept: Path) -> None:
    """An index of `number` samples, kept where `open_images(root, index=kept)` looks for it."""
    request = Request(SUFFIXES)
    files = open_data_files(str(root), request)
    layout = Folders(str(root), files, request)
    names = [sample.place.name for part in layout.list_partitions() for sample in layout.iterate_samples(part)]
    encoded = [name.encode() for name in names]
    length, labels = len(encoded[0]), np.array([int(name[1]) for name in names], np.int32)
    hashes = np.array([hash_name(name) for name in encoded], np.uint64)
    assert {len(name) for name in encoded} == {length} and len(names) == FILES
    building = kept / "building"
    building.mkdir(parents=True)
    sizes = {"names": number * length, "name_ends": number * 8, "name_hash": number * 8, "label": number * 4}
    with (
        open(building / "names.bin", "wb") as texts,
        open(building / "name_ends.bin", "wb") as ends,
        open(building / "name_hash.bin", "wb") as hashed,
        open(building / "label.bin", "wb") as numbers,
    ):
        for start in range(0, number, CHUNK * FILES):
            count = min(CHUNK * FILES, number - start)
            texts.write(b"".join(encoded) * (count // FILES) + b"".join(encoded[: count % FILES]))
            ends.write(
                ((np.arange(start, start + count, dtype=np.uint64) + np.uint64(1)) * np.uint64(length)).tobytes()
            )
            hashed.write(np.resize(hashes, count).tobytes())
            numbers.write(np.resize(labels, count).tobytes())
    state = {"number": number, "sizes": sizes, "kinds": ["int", False], "classes": [], "most": 0}
    Columns(building, state=state).make_index(layout)
    watched = layout.list_files_watched_for_changes()
    atomic.write_file(
        building / WATCHED, sealed.render_json_with_hash({"names": watched, "stats": _read_file_stats(layout, watched)})
    )
    building.rename(kept / _hash_request(str(root), request))


def memory() -> float:
    """MB of this process and all below it that are not the page cache's."""
    total = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        rows = dict(line.split(":") for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:])
        total += sum(int(rows[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))
    return total / 1024


def measure(root: Path, kept: Path, num_workers: int, held_out: float) -> dict[str, float]:
    start = time.perf_counter()
    source = open_images(root, 16, index=kept, held_out=held_out)
    fingerprint = source.compute_fingerprint()
    opened = time.perf_counter() - start
    with Batches(source, global_batch=64, micro_batch=64, seed=1, num_workers=num_workers) as batches:
        next(batches.read_step(0))
        first = time.perf_counter() - start
        for step in range(1, 40):
            list(batches.read_step(step))
        return {
            "opened": round(opened, 2),
            "first": round(first, 2),
            "MB": round(memory(), 1),
            "samples": len(source),
            "fingerprint": fingerprint,
        }


def require_one_order(source: Images, kinds: tuple[tuple[int, int], ...] = _KINDS) -> None:
    """The samples of 3 steps are the same at each (ranks, workers) as at (1, 0); at 1,024 ranks, by counting."""

    def taken(world: int, num_workers: int) -> list[dict[str, torch.Tensor]]:
        steps = []
        for rank in range(world):
            with Batches(
                source, global_batch=16, micro_batch=4, seed=5, rank=rank, world=world, num_workers=num_workers
            ) as batches:
                steps.append(
                    [
                        {name: value.clone() for name, value in batch.items()}
                        for step in range(3)
                        for batch in batches.read_step(step)
                    ]
                )
        rows = {name: torch.cat([batch[name] for batches in steps for batch in batches]) for name in steps[0][0]}
        order = (rows["step"] * 16 + rows["position"]).argsort()
        return {name: values[order] for name, values in rows.items()}

    expected = taken(1, 0)
    for world, num_workers in kinds:
        other = taken(world, num_workers)
        assert all(torch.equal(expected[name], other[name]) for name in expected), (world, num_workers)
    stream = _Stream(source, Order(len(source), 5), 2048, 5, True)
    whole = stream._find_sample_indices_and_keys(range(2048, 4096))[0]
    ranks = [
        stream._find_sample_indices_and_keys(range(2048 + rank * 2, 2048 + rank * 2 + 2))[0] for rank in range(1024)
    ]
    assert torch.equal(torch.cat(ranks), whole) and len(set(whole.tolist())) == 2048


def main(number: int) -> None:
    work = Path(tempfile.mkdtemp())
    try:
        root = folder_of_pictures(work / "data", CLASSES, FILES // CLASSES)
        for name, count in (("small", FILES), ("large", number)):
            make_index(root, count, work / name)
            for num_workers, held_out in ((0, 0.0), (8, 0.0), (8, 0.02)):
                for _attempt in range(1 + (held_out > 0)):  # the first one makes the split
                    words = [str(root), str(work / name), str(num_workers), str(held_out)]
                    out = subprocess.run(
                        [sys.executable, "-m", "tests.data.index.check_index_scale", "--measure", *words],
                        capture_output=True,
                        text=True,
                        check=True,
                    ).stdout
                    print(f"{count:,} entries, {num_workers} workers, {held_out} held out: {out.strip()}", flush=True)
        require_one_order(open_images(root, 16, index=work / "large"))
        print("one order at 1, 2, 4 and 1,024 ranks, with 0, 1 and 3 workers")
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        root, kept, num_workers, held_out = sys.argv[2:]
        print(json.dumps(measure(Path(root), Path(kept), int(num_workers), float(held_out))))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000_000)
