"""Makes folders of small images, intact and broken."""

import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image


def picture(seed: int, width: int = 40, height: int = 30, mode: str = "RGB") -> Image.Image:
    """A smooth random picture with some grain, in any mode that Pillow converts RGB to."""
    draw = np.random.default_rng(seed)
    coarse = Image.fromarray(draw.integers(0, 256, (4, 5, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    grain = draw.integers(-9, 10, smooth.shape)
    return Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).convert(mode)


def folder(root: Path, classes: int = 2, each: int = 10) -> Path:
    """root/c0/000.png ...: `classes` folders of `each` pictures."""
    for label in range(classes):
        (root / f"c{label}").mkdir(parents=True)
        for i in range(each):
            picture(1000 * label + i).save(root / f"c{label}" / f"{i:03}.png")
    return root


def bomb(width: int = 60000, height: int = 60000) -> bytes:
    """A PNG of a few bytes whose header promises width x height pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def break_file(path: Path, how: str) -> None:
    """Ruins a file: truncated, empty, text, bomb or missing."""
    sound = path.read_bytes()
    if how == "missing":
        path.unlink()
        return
    path.write_bytes(
        {"truncated": sound[: len(sound) // 2], "empty": b"", "text": b"not an image\n" * 50, "bomb": bomb()}[how]
    )


BROKEN = ("truncated", "empty", "text", "bomb", "missing")
