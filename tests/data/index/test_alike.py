"""Ranks on machines with other data: noticed at the start, and the difference is named."""

import os
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from dstrain.data.open import open_sources
from dstrain.recipe import ConfigError, Data
from tests.data.cached.test_latents import write
from tests.support import gloo
from tests.support.pictures import folder, picture


def _open(rank: int, views: tuple[Path, Path], data: Data) -> str:
    """Opens the data as seen from a working directory, as on a machine with its own disk."""
    os.chdir(views[rank])
    try:
        source, _ = open_sources(data)
    except ConfigError as error:
        return str(error)
    return source.compute_fingerprint()


def add(root: Path) -> None:
    picture(9).save(root / "c1" / "later.png")


def remove(root: Path) -> None:
    (root / "c0" / "001.png").unlink()


def rename(root: Path) -> None:
    (root / "c0" / "001.png").rename(root / "c0" / "0011.png")


def move(root: Path) -> None:
    (root / "c0" / "001.png").rename(root / "c1" / "0.png")


def change(root: Path) -> None:
    picture(77, 40, 40).save(root / "c0" / "001.png")


def alter(root: Path) -> None:
    path = root / "c0" / "001.png"
    content = bytearray(path.read_bytes())
    content[-20] ^= 1  # as many bytes
    path.write_bytes(content)


def add_class(root: Path) -> None:
    shutil.copytree(root / "c0", root / "c5")


def take_all(root: Path) -> None:
    shutil.rmtree(root)


def touch(root: Path) -> None:
    for path in (root / "c0", root / "c0" / "001.png", root):
        os.utime(path, (1, 1))


def without_time(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.mtime = 0
    return entry


CASES = {
    add: "later.png, which is not on rank 0",
    remove: "no c0/001.png",
    rename: "no c0/001.png",
    move: "no c0/001.png",
    change: "c0/001.png of .* bytes, not ",
    alter: "c0/001.png with another content",
    add_class: "c5/000.png",
    take_all: "no c0/000.png",
    touch: None,
}


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("differ", CASES, ids=lambda differ: differ.__name__)
def test_another_folder_on_rank_1(tmp_path, differ, kept):
    """Oracle: the difference that was made: named on both ranks; a copy with other times is the same data. With an
    index that the machines share, and with one in memory.
    """
    views = tmp_path / "a", tmp_path / "b"
    folder(views[0] / "d", 2, 3)
    shutil.copytree(views[0] / "d", views[1] / "d")
    differ(views[1] / "d")
    index = {"index": str(tmp_path / "index")} if kept else {}
    results = gloo.run(tmp_path, _open, views, Data(path="d", image_size=16, **index))
    if CASES[differ] is None:
        assert results[0] == results[1] and results[0].startswith("images")
        return
    for result in results:
        assert result.startswith("data.path=d is not the same on all machines: rank 1 on "), result
        assert re.search(CASES[differ], result) and "share" in result, result


@pytest.mark.parametrize("kind", ["tar", "captions", "list", "codes"])
def test_other_data_of_other_forms(tmp_path, kind):
    """Oracle: the difference that was made."""
    views = tmp_path / "a", tmp_path / "b"
    for number, view in enumerate(views):
        folder(view / "d", 1, 3)
        path, expected = "d", ""
        if kind == "tar":
            for name in ("0.tar", "1.tar")[: 2 - number]:
                with tarfile.open(view / name, "w") as archive:
                    archive.add(view / "d" / "c0" / "000.png", "0.png", filter=without_time)
            shutil.rmtree(view / "d")
            path, expected = ".", "no 1.tar"
        elif kind == "list":
            (view / "l.csv").write_text(f"path,label\nd/c0/000.png,{number}\nd/c0/001.png,1\n")
            path, expected = "l.csv", "d/c0/000.png of the class 1, not 0"
        elif kind == "codes":
            write(view / "codes", classes=("a", "b"), number=4 + number)
            path, expected = "codes", "codes"
        else:
            (view / "d" / "c0" / "extra.png").write_bytes((view / "d" / "c0" / "000.png").read_bytes() + b"\0" * number)
            expected = "extra.png of"
    size = {"image_size": 16, "channels": 1} if kind == "codes" else {"image_size": 16}
    for result in gloo.run(tmp_path, _open, views, Data(path=path, **size)):
        assert "is not the same on all machines: rank 1" in result and expected in result, result
