"""Makes dstrain/data/builtin/fashion-mini.npz, the data set inside the package, from Debian's dataset-fashion-mnist.

    python launch/builtin/make_fashion.py [OUTPUT]

2,000 images of the training set and 500 of the test set, the first of each class, classes in turn, so that any stretch
of the file is balanced. Keys: train, held_out (LZMA of the pixels, which beat PNG, WebP and LZMA of predicted pixels),
train_label, held_out_label (uint8).

Source: https://github.com/zalandoresearch/fashion-mnist (MIT, see LICENSE-fashion-mnist.txt).
"""

import gzip
import lzma
import sys
from pathlib import Path

import numpy as np

BUILTIN = Path(__file__).parents[2] / "dstrain" / "data" / "builtin"
SOURCE = Path("/usr/share/datasets/fashion-mnist")
# split -> the original data's name of it, images of each class
SPLITS = {"train": ("train", 200), "held_out": ("t10k", 50)}


def main(output: Path) -> None:
    """Writes the file and prints its size."""
    arrays = {}
    for split, (name, count) in SPLITS.items():
        images, labels = select(name, count)
        arrays[split] = np.frombuffer(pack(images), np.uint8)
        arrays[f"{split}_label"] = labels
    np.savez_compressed(output, **arrays)
    print(f"{output}: {output.stat().st_size:,} bytes")


def select(name: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first `count` images of each class, classes in turn: uint8 (10 * count, 28, 28), labels uint8."""
    images = read(f"{name}-images-idx3-ubyte.gz", header=16).reshape(-1, 28, 28)
    labels = read(f"{name}-labels-idx1-ubyte.gz", header=8)
    chosen = np.stack([np.flatnonzero(labels == label)[:count] for label in range(10)], axis=1)
    return images[chosen.reshape(-1)], labels[chosen.reshape(-1)]


def read(name: str, header: int) -> np.ndarray:
    """The bytes of an idx file behind its header."""
    return np.frombuffer(gzip.decompress((SOURCE / name).read_bytes()), np.uint8, offset=header)


def pack(images: np.ndarray) -> bytes:
    """Pixels, LZMA compressed; lc=4 predicts from more of the neighbour than the preset does."""
    coder = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}
    return lzma.compress(images.tobytes(), filters=[coder])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else BUILTIN / "fashion-mini.npz")
