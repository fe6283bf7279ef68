"""--images, --against and --reference take the pictures of a folder or a zip that data.path takes, and no other."""

import os
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from dstrain.data.sources.images import open_images
from dstrain.metrics.images import open_image_set


def picture(path: Path, value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (value, 0, 0)).save(path)


LEFT_BEHIND = (
    "b/.ipynb_checkpoints/0-checkpoint.png",
    "b/@eaDir/0.png",
    "__MACOSX/b/0.png",
    ".thumbnails/0.png",
    "b/.hidden.png",
)


def add_strangers(folder: Path) -> None:
    for name in LEFT_BEHIND:
        picture(folder / name)
    (folder / "b" / "._0.png").write_bytes(b"a resource fork")
    (folder / "b" / "notes.txt").write_text("no picture")


def link_class(folder: Path) -> None:
    picture(folder.parent / "elsewhere" / "0.png")
    (folder / "c").symlink_to(folder.parent / "elsewhere")


def link_itself(folder: Path) -> None:
    (folder / "b" / "again").symlink_to(folder)


LAYOUTS = {
    "two classes": lambda folder: None,
    "what programs leave behind": add_strangers,
    "a linked class": link_class,
    "a link to itself": link_itself,
    "deeper folders": lambda folder: picture(folder / "b" / "x" / "y" / "0.png"),
    "large letters": lambda folder: picture(folder / "b" / "3.PNG"),
    "other suffixes": lambda folder: [
        Image.new("RGB", (8, 8)).save(folder / "b" / f"4.{end}", "JPEG") for end in ("jfif", "jpe")
    ],
    "a linked picture": lambda folder: os.symlink(folder / "a" / "0.png", folder / "b" / "5.png"),
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_walker(tmp_path, layout, zipped):
    """Oracle: data.path: the number of its pictures; all of them can be read."""
    folder = tmp_path / "set"
    for name in "ab":
        for number in range(3):
            picture(folder / name / f"{number}.png", 20 * number)
    LAYOUTS[layout](folder)
    path = folder
    if zipped:
        path = tmp_path / "set.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for file in sorted(folder.rglob("*")):
                if file.is_file():
                    archive.write(file, file.relative_to(folder))
    found = open_image_set(path, "--reference")
    assert len(found) == len(open_images(str(path), 8, split="all"))
    assert sum(len(batch.numbers) for batch in found.iterate_batches(4)) == len(found)
