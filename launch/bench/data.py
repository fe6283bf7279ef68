"""Images a second from JPEG to a training crop: dstrain against the plain ways, on this machine.

    python launch/bench/data.py [--width 500 --height 375 --size 256 --rounds 100] [--loaders --workers N | --start]

One picture, in turn, A B C A B C, on one core:

plain       open, convert to RGB, the ADM centre crop by its definition, uint8 (C, H, W)
official    the same, then a random flip, ToTensor and Normalize, as the DiT loader does on the CPU
read_image  uint8 (C, H, W), the same pixels as plain
draft       read_image with draft=True, which decodes JPEG at reduced size

--loaders: whole loaders, from --files files to batches of 32. `official` is torchvision's ImageFolder with these
transforms in a DataLoader; folder, tar and shards are dstrain's batches of the folder, and of what launch/pack.py made
of it, with the same pixels. dstrain's are uint8, which the device converts. --workers: processes that read; 0: none.

--start: seconds until the first batch of four workers, for each way to start processes.

The table shows the fastest and the median of the rounds. Without workers CPU time counts, so that what other programs
take does not. Ratios are of the medians.

2026-11-22, two busy cores, --loaders in CPU time, three times: the folder 1.19, 1.23 and 1.35 of official; tar 1.00 to
1.01 and shards 1.01 to 1.02 of the folder. 2026-11-24, an AMD EPYC with two quiet cores: 1.16, tar 1.20, shards 1.21 of
official; Pillow's exact resizing takes two thirds of the time on both sides.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dstrain.commands.pack import PackOptions, pack_data
from dstrain.data.batches import Batches
from dstrain.data.decode.pixels import read_image
from dstrain.data.sources.images import open_images

_BATCH = 32


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("width", 500),
        ("height", 375),
        ("size", 256),
        ("rounds", 100),
        ("files", 256),
        ("workers", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--loaders", action="store_true", help="time whole loaders instead")
    parser.add_argument("--start", action="store_true", help="time the start of workers instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data" / "c0" / "000.jpg"
        path.parent.mkdir(parents=True)
        photo(options.width, options.height).save(path, quality=90)
        if options.start:
            starts(folder, options.size)
        elif options.loaders:
            for number in range(1, options.files):
                copy = path.with_name(f"{number:03}.jpg")
                photo(options.width, options.height, number % 16).save(copy, quality=90)
            loaders(Path(folder), options.size, options.rounds, options.workers)
        else:
            crops(path, options.size, options.rounds)


def crops(path: Path, size: int, rounds: int) -> None:
    """Prints images a second of each way, by CPU time, and its ratio to the plain ones."""
    ways = {
        "plain": lambda: plain(path, size),
        "official": lambda: official(path, size),
        "read_image": lambda: read_image(path, size),
        "draft": lambda: read_image(path, size, draft=True),
    }
    assert torch.equal(ways["plain"](), ways["read_image"]()), "the pixels differ"
    print(f"JPEG -> {size}: images a second of CPU time")
    report(timed(ways, rounds, time.thread_time), 1, "plain", "official")


def loaders(folder: Path, size: int, rounds: int, workers: int) -> None:
    """Prints images a second of each loader, by CPU time or with workers by the clock, and the ratio to others."""
    packed = {"tar": folder / "tar", "shards": folder / "shards"}
    for name, path in packed.items():
        pack_data(PackOptions(str(folder / "data"), out=path, format=name))
    rival = official_loader(folder / "data", size, workers)
    sources = {name: open_images(path, size) for name, path in (("folder", folder / "data"), *packed.items())}
    whole = torch.stack([sources["folder"][i]["image"] for i in range(4)])
    for source in sources.values():
        assert torch.equal(torch.stack([source[i]["image"] for i in range(4)]), whole), "the pixels differ"
    by_rival = torch.stack([rival.dataset[i][0] for i in range(4)])  # mirrored or not
    levels = by_rival.mul(127.5).add(127.5).round().byte()
    assert all(torch.equal(a, b) or torch.equal(a, b.flip(-1)) for a, b in zip(levels, whole)), "the pixels differ"
    each = {"global_batch": _BATCH, "micro_batch": _BATCH, "seed": 0, "num_workers": workers}
    batches = {name: Batches(source, **each) for name, source in sources.items()}
    forever = itertools.chain.from_iterable(iter(lambda: iter(rival), None))
    steps = {name: itertools.count() for name in batches}
    number = 32 * workers or 1  # so that what lies ready counts little
    ways: dict[str, Callable] = {"official": lambda: [next(forever) for _ in range(number)]}
    ways |= {
        name: lambda name=name: [next(batches[name].read_step(next(steps[name]))) for _ in range(number)]
        for name in batches
    }
    timed(ways, 2, time.perf_counter)  # workers start, files come into memory
    print(
        f"JPEG -> {size}, batches of {_BATCH}, {workers} workers: images a second "
        f"{'by the clock' if workers else 'of CPU time'}"
    )
    clock = time.perf_counter if workers else time.process_time
    report(timed(ways, rounds, clock), number * _BATCH, "official", "folder")
    for loader in batches.values():
        loader.close()


def timed(ways: dict[str, Callable], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each call of each way, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = clock()
            way()
            seconds[name].append(clock() - start)
    return seconds


def report(seconds: dict[str, list[float]], images: int, *rivals: str) -> None:
    """Prints images a second of each way, and the ratios of the medians to those of the rivals."""
    print(f"{'':12}{'fastest':>10}{'median':>10}" + "".join(f"{'/ ' + name:>12}" for name in rivals))
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(
            f"{name:12}{images / min(values):10.0f}{images / middle[name]:10.0f}"
            + "".join(f"{middle[rival] / middle[name]:12.2f}" for rival in rivals)
        )


def official_loader(folder: Path, size: int, workers: int) -> torch.utils.data.DataLoader:
    """The loader of DiT's train.py: ImageFolder, ADM's crop, flip, ToTensor, Normalize, in a DataLoader."""
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    transform = transforms.Compose(
        [
            Crop(size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize([0.5] * 3, [0.5] * 3, inplace=True),
        ]
    )
    return torch.utils.data.DataLoader(
        ImageFolder(folder, transform),
        _BATCH,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        persistent_workers=workers > 0,
    )


class Crop:
    """ADM's centre crop as a transform."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Image.Image) -> Image.Image:
        return Image.fromarray(cropped(image, self.size))


def by_definition(path: Path, size: int) -> np.ndarray:
    """The crop by its definition, without haste: uint8 (size, size, 3)."""
    with Image.open(path) as image:
        return cropped(image.convert("RGB"), size)


def cropped(image: Image.Image, size: int) -> np.ndarray:
    """ADM's centre crop of an RGB image by its definition: uint8 (size, size, 3)."""
    while min(*image.size) >= 2 * size:
        image = image.resize(tuple(x // 2 for x in image.size), resample=Image.Resampling.BOX)
    scale = size / min(*image.size)
    image = image.resize(tuple(round(x * scale) for x in image.size), resample=Image.Resampling.BICUBIC)
    array = np.array(image)
    y, x = (array.shape[0] - size) // 2, (array.shape[1] - size) // 2
    return array[y : y + size, x : x + size]


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

    source, default = open_images(f"{folder}/data", size), workers.make_worker_context
    for method in ("fork", "spawn", "forkserver"):
        workers.make_worker_context = default
        if method != "forkserver":
            workers.make_worker_context = partial(multiprocessing.get_context, method)
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            with Batches(source, global_batch=8, micro_batch=8, seed=0, num_workers=4) as batches:
                next(batches.read_step(0))
                seconds.append(time.perf_counter() - start)
        print(f"{method:12} first {seconds[0]:.2f} s, again {seconds[1]:.2f} s")


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth picture with grain, which compresses like a photograph."""
    draw = np.random.default_rng(seed)
    coarse = Image.fromarray(draw.integers(0, 256, (47, 63, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    grain = draw.integers(-8, 9, smooth.shape)
    return Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))


if __name__ == "__main__":
    main()
