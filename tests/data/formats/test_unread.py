"""What lies beside samples and is not read is said in the line `data:`, and what looks like a split and is none."""

import io
import zipfile

import pytest
from PIL import Image

from dstrain.data.open import open_sources
from dstrain.recipe import Data


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "png")
    return file.getvalue()


PNG = picture()


@pytest.mark.parametrize(
    "files, words",
    [
        ({"A/0.png": PNG, "a/1.png": PNG}, "; the classes A and a differ in capitals alone"),
        ({"A/0.png": PNG, "b/1.png": PNG}, ""),
        (
            {"0.png": PNG, "labels.csv": b"file,label\n0.png,cat\n"},
            "; files of other types are left out, .csv 1: name a list of labels or captions itself, "
            "if they are samples",
        ),
        (
            {"0.png": PNG, "metadata.csv": b"file_name,label,fold\n0.png,cat,3\n"},
            "; the column fold is no split: rows of all its values are read",
        ),
        ({"0.png": PNG, "metadata.csv": b"file_name,label\n0.png,cat\n"}, ""),
    ],
)
def test_what_a_folder_says(tmp_path, files, words):
    """Oracle: by hand: what is unread, or no split, by its name; nothing where there is nothing to say."""
    for name, content in files.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    said = open_sources(Data(path=str(tmp_path / "data"), image_size=8))[0].describe_samples()
    assert said.endswith(words) and (words or "; " not in said)


@pytest.mark.parametrize("captioned, words", [(True, "; 2 captions in X.txt or X.json, which are read"), (False, "")])
def test_captions_in_a_zip(tmp_path, captioned, words):
    """Oracle: by hand: two captions beside images, and a text of none; nothing where no captions are read."""
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as file:
        for name in ("0.png", "1.png"):
            file.writestr(name, PNG)
        for name in ("0.txt", "1.json", "README.txt"):
            file.writestr(name, "a cat")
    said = open_sources(Data(path=str(tmp_path / "data.zip"), image_size=8, captioned=captioned))[0].describe_samples()
    assert said.startswith(f"2 images, no classes, no captions{words}")
    assert captioned or "left out" not in said
