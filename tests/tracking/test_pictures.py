"""Oracle: pixels written out by hand, and Pillow for the file."""

import numpy as np
import pytest
import torch
from PIL import Image

from dstrain.tracking.pictures import choose_grid_columns, make_grid, save_png


def test_every_pixel_of_a_grid():
    """Oracle: all pixels written out by hand, three pictures in two columns with a place left empty."""
    images = torch.tensor([[[[10]]], [[[20]]], [[[30]]]], dtype=torch.uint8).repeat(1, 3, 64, 64)
    pixels = make_grid(images, columns=2)
    expected = np.zeros((134, 134, 3), np.uint8)
    expected[2:66, 2:66], expected[2:66, 68:132], expected[68:132, 2:66] = 10, 20, 30
    assert pixels.dtype == np.uint8 and np.array_equal(pixels, expected)


def test_channels_and_places_within_a_picture():
    """Oracle: the picture handed in, permuted by torch to channels last."""
    image = torch.randint(0, 256, (1, 3, 70, 50), dtype=torch.uint8)
    assert np.array_equal(make_grid(image)[2:-2, 2:-2], image[0].permute(1, 2, 0).numpy())


@pytest.mark.parametrize("size, factor", [(8, 8), (28, 2), (32, 2), (48, 1), (64, 1), (256, 1)])
def test_small_pictures_are_enlarged(size, factor):
    """Oracle: numpy's kron with a block of ones, factors by hand."""
    image = torch.randint(0, 256, (1, 1, size, size), dtype=torch.uint8)
    expected = np.kron(image[0, 0].numpy(), np.ones((factor, factor), np.uint8))
    assert np.array_equal(make_grid(image)[2:-2, 2:-2, 0], expected)


@pytest.mark.parametrize("num, columns", [(1, 1), (2, 2), (3, 2), (4, 2), (7, 3), (12, 4), (16, 4), (40, 8), (64, 8)])
def test_near_square(num, columns):
    """Oracle: numbers of columns written out by hand."""
    assert choose_grid_columns(num) == columns


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(1, 3, 4, 4),
        torch.zeros(1, 2, 4, 4, dtype=torch.uint8),
        torch.zeros(3, 4, 4, dtype=torch.uint8),
        torch.zeros(0, 3, 4, 4, dtype=torch.uint8),
    ],
)
def test_what_is_no_picture_is_refused(images):
    """Oracle: the contract, uint8 (N, 1, 3 or 4, H, W) with N > 0."""
    with pytest.raises(ValueError, match="a grid needs uint8"):
        make_grid(images)


@pytest.mark.parametrize("channels", [1, 3])
def test_png_holds_the_pixels(tmp_path, channels):
    """Oracle: the pixels handed in, read back by Pillow; no other file is left."""
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, channels), dtype=np.uint8)
    path = tmp_path / "samples" / "step.png"
    save_png(path, pixels)
    assert np.array_equal(np.asarray(Image.open(path)).reshape(pixels.shape), pixels)
    assert [p.name for p in path.parent.iterdir()] == ["step.png"]


def test_a_failed_write_leaves_the_older_picture(tmp_path, monkeypatch):
    """Oracle: the older file's bytes, after a write that broke off half-way."""
    path = tmp_path / "step.png"
    save_png(path, np.zeros((4, 4, 3), np.uint8))
    before = path.read_bytes()

    def half(self, file, format):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", half)
    with pytest.raises(OSError):
        save_png(path, np.ones((4, 4, 3), np.uint8))
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["step.png"]
