"""Data of others as their own makers write them: CIFAR, MNIST's idx files, LMDB environments."""

import gzip
import struct
from pathlib import Path

import lmdb
import numpy as np


def cifar(root: Path, hundred: bool, draw: np.random.Generator) -> None:
    """What torchvision unpacks: batches by the pickle of Python 2, protocol 2, whose texts are bytes."""
    names = ["train", "test"] if hundred else [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    root.mkdir(parents=True)
    for name in names:
        data = draw.integers(0, 256, (20, 3072), dtype=np.uint8)
        labels = draw.integers(0, 100 if hundred else 10, 20).tolist()
        batch = {"data": data, "filenames": [f"{i}.png" for i in range(20)]}
        (root / name).write_bytes(of_python_2(batch | {"fine_labels" if hundred else "labels": labels}))
        (root / f"{name}.bin").write_bytes(
            b"".join(bytes([0] * hundred + [label]) + row.tobytes() for label, row in zip(labels, data))
        )
    classes = [f"class {i}" for i in range(100 if hundred else 10)]
    meta = {"fine_label_names" if hundred else "label_names": classes}
    (root / ("meta" if hundred else "batches.meta")).write_bytes(of_python_2(meta))


def of_python_2(content: dict) -> bytes:
    """A pickle as Python 2 wrote it: every text and the bytes of an array are its `str`, opcodes U and T."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value

    def value(item: object) -> bytes:
        if isinstance(item, str):
            return text(item.encode())
        if isinstance(item, int):
            return b"K" + bytes([item])
        if isinstance(item, list):
            return b"](" + b"".join(map(value, item)) + b"e"
        if isinstance(item, dict):
            return b"}(" + b"".join(value(key) + value(inner) for key, inner in item.items()) + b"u"
        rows, columns = item.shape
        return (
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\x01b\x87R(K\x01M"
            + struct.pack("<H", rows)
            + b"M"
            + struct.pack("<H", columns)
            + b"\x86cnumpy\ndtype\nU\x02u1K\0K"
            b"\x01\x87R(K\x03U\x01|NNN"
            b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89" + text(item.tobytes()) + b"tb"
        )

    return b"\x80\x02" + value(content) + b"."


def write_idx(root: Path, prefix: str = "", ending: str = "") -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """30 images for training and 12 for the test, with labels up to 9; returns both by their split."""
    draw = np.random.default_rng(2)
    root.mkdir(parents=True)
    expected = {}
    for split, number in (("train", 30), ("test" if prefix else "t10k", 12)):
        images = draw.integers(0, 256, (number, 28, 20), dtype=np.uint8)
        labels = draw.integers(0, 10, number, dtype=np.uint8)
        labels[0] = 9
        expected[split] = images, labels
        for kind, header, array in (
            ("images-idx3", (0x803, *images.shape), images),
            ("labels-idx1", (0x801, number), labels),
        ):
            content = struct.pack(f">{len(header)}I", *header) + array.tobytes()
            path = root / f"{prefix}{split}-{kind}-ubyte{ending}"
            path.write_bytes(gzip.compress(content) if ending else content)
    return expected


def environment(path: Path, values: dict[bytes, bytes]) -> None:
    with lmdb.open(str(path), map_size=1 << 26) as env, env.begin(write=True) as transaction:
        for key, value in values.items():
            transaction.put(key, value)
