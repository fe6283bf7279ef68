"""Images a second from JPEG to a training crop: read_image against the plain way, on this machine.

    python launch/bench_data.py [--width 500 --height 375 --size 256 --rounds 100] [--start]

plain      open, convert to RGB, the ADM centre crop by its definition, uint8 (C, H, W)
official   the same, then a random flip, ToTensor and Normalize, as the DiT loader does on the CPU
read_image uint8 (C, H, W), the same pixels as plain
draft      read_image with draft=True, which decodes JPEG at reduced size
--start    seconds until the first batch of four workers, for each way to start processes

The ways are timed in turn, A B C A B C, on one core. The table shows the fastest and the median of the rounds.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dstrain.data.pixels import read_image


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("width", 500), ("height", 375), ("size", 256), ("rounds", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--start", action="store_true", help="time the start of workers instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c0" / "photo.jpg"
        path.parent.mkdir()
        photo(options.width, options.height).save(path, quality=90)
        if options.start:
            starts(folder, options.size)
        else:
            crops(path, options.size, options.rounds)


def crops(path: Path, size: int, rounds: int) -> None:
    """Prints images a second of each way and its ratio to the plain one."""
    ways = {"plain": lambda: plain(path, size), "official": lambda: official(path, size),
            "read_image": lambda: read_image(path, size), "draft": lambda: read_image(path, size, draft=True)}
    assert torch.equal(ways["plain"](), ways["read_image"]()), "the pixels differ"
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    print(f"JPEG -> {size}: images a second on one core")
    print(f"{'':12}{'fastest':>10}{'median':>10}{'/ plain':>10}{'/ official':>12}")
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name:12}{1 / min(values):10.0f}{1 / middle[name]:10.0f}"
              f"{middle['plain'] / middle[name]:10.2f}{middle['official'] / middle[name]:12.2f}")


def by_definition(path: Path, size: int) -> np.ndarray:
    """The crop by its definition, without haste: uint8 (size, size, 3)."""
    with Image.open(path) as image:
        image = image.convert("RGB")
    while min(*image.size) >= 2 * size:
        image = image.resize(tuple(x // 2 for x in image.size), resample=Image.Resampling.BOX)
    scale = size / min(*image.size)
    image = image.resize(tuple(round(x * scale) for x in image.size), resample=Image.Resampling.BICUBIC)
    array = np.array(image)
    y, x = (array.shape[0] - size) // 2, (array.shape[1] - size) // 2
    return array[y:y + size, x:x + size]


def plain(path: Path, size: int) -> torch.Tensor:
    """The crop by its definition as uint8 (3, size, size)."""
    return torch.from_numpy(by_definition(path, size).transpose(2, 0, 1).copy())


def official(path: Path, size: int) -> torch.Tensor:
    """What DiT's loader does for a sample: crop to an image, flip, to [0, 1], to [-1, 1]."""
    image = Image.fromarray(by_definition(path, size))
    if torch.rand(1) < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    return pixels.float().div(255).sub_(0.5).div_(0.5)


def starts(folder: str, size: int) -> None:
    """Prints the seconds until the first batch of four workers, twice for each start method."""
    import multiprocessing

    from dstrain.data import workers
    from dstrain.data.batches import Batches
    from dstrain.data.images import open_images
    source, default = open_images(folder, size), workers.context
    for method in ("fork", "spawn", "forkserver"):
        workers.context = default
        if method != "forkserver":
            workers.context = lambda: multiprocessing.get_context(method)
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            with Batches(source, global_batch=8, micro_batch=8, seed=0, num_workers=4) as batches:
                next(batches.at(0))
                seconds.append(time.perf_counter() - start)
        print(f"{method:12} first {seconds[0]:.2f} s, again {seconds[1]:.2f} s")


def photo(width: int, height: int) -> Image.Image:
    """A smooth picture with grain, which compresses like a photograph."""
    draw = np.random.default_rng(0)
    coarse = Image.fromarray(draw.integers(0, 256, (47, 63, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    grain = draw.integers(-8, 9, smooth.shape)
    return Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))


if __name__ == "__main__":
    main()
