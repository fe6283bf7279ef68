"""Transparency that is kept: data.channels 4."""

import numpy as np
import pytest
import torch
from PIL import Image

from dstrain.data.decode.pixels import read_image
from dstrain.data.sources.images import open_images
from dstrain.tracking.pictures import make_grid


def save(path, array, mode="RGBA"):
    Image.fromarray(array, mode).save(path)
    return path


@pytest.fixture
def noise():
    return np.random.default_rng(0).integers(0, 256, (70, 90, 4), dtype=np.uint8)


def test_opaque_pictures(tmp_path, noise):
    """Oracle: the same colours read as RGB; alpha 255 everywhere, also where the file has no alpha at all."""
    noise[..., 3] = 255
    with_alpha, without = save(tmp_path / "a.png", noise), tmp_path / "b.png"
    Image.fromarray(noise[..., :3]).save(without)
    rgb = read_image(without, 32, 3)
    for path in (with_alpha, without):
        pixels = read_image(path, 32, 4)
        assert pixels.shape == (4, 32, 32) and bool((pixels[3] == 255).all())
        assert torch.equal(pixels[:3], rgb)


def test_size_that_needs_no_resizing(tmp_path):
    """Oracle: every value that was written, where it is visible."""
    array = np.random.default_rng(1).integers(1, 256, (16, 16, 4), dtype=np.uint8)
    pixels = read_image(save(tmp_path / "a.png", array), 16, 4).permute(1, 2, 0).numpy().astype(int)
    assert np.array_equal(pixels[..., 3], array[..., 3])
    # Colours are held times alpha in 8 bits, so what is nearly invisible is coarse.
    assert (np.abs(pixels[..., :3] - array[..., :3]) <= 255 // array[..., 3:].astype(int) + 1).all()


def test_what_is_invisible_does_not_show(tmp_path):
    """Oracle: only red is visible, so that no scaled pixel may have green in it, however the green lies beside it."""
    array = np.zeros((100, 100, 4), np.uint8)
    array[..., 1], array[30:70, 30:70] = 255, (255, 0, 0, 255)  # invisible green about a red square
    pixels = read_image(save(tmp_path / "a.png", array), 23, 4)
    visible = pixels[3] > 0
    assert bool(visible.any()) and not bool(visible.all())
    assert int(pixels[1][visible].max()) == 0 and int(pixels[0][visible].min()) >= 250


@pytest.mark.parametrize("mode", ["P", "LA", "L", "I;16"])
def test_other_modes(tmp_path, mode):
    """Oracle: Pillow's own conversion of the 8-bit picture; alpha of a palette and of LA is kept."""
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    if mode == "I;16":
        image, alpha = Image.fromarray(grey.astype(np.uint16) * 257), 255
    elif mode == "LA":
        image, alpha = Image.merge("LA", (Image.fromarray(grey), Image.new("L", (16, 16), 255))), 255
        image.putpixel((0, 15), (240, 0))
    else:
        image, alpha = Image.fromarray(grey), 255
        if mode == "P":
            image = image.convert("P")
            image.info["transparency"] = 240
    image.save(tmp_path / "a.png")
    pixels = read_image(tmp_path / "a.png", 16, 4)
    assert int(pixels[3, 3, 3]) == alpha and int(pixels[3, 15, 0]) == (0 if mode in ("P", "LA") else 255)
    assert torch.equal(pixels[0, :15], torch.from_numpy(grey[:15]))


def test_folders_and_the_built_in_set(tmp_path, noise):
    """Oracle: shapes, and the grey pictures on opaque ground."""
    save(tmp_path / "a.png", noise)
    source = open_images(tmp_path, 16, channels=4)
    assert source[0]["image"].shape == (4, 16, 16)
    for size in (28, 32, 20):
        pixels = open_images("builtin:fashion", size, channels=4)[3]["image"]
        grey = open_images("builtin:fashion", size, channels=1)[3]["image"]
        assert torch.equal(pixels, torch.cat((grey.expand(3, -1, -1), torch.full_like(grey, 255))))


def test_a_grid_lies_on_white():
    """Oracle: by hand: opaque colours as they are, invisible ones white, half-visible ones between."""
    image = torch.tensor([[200, 100, 0], [200, 100, 0], [0, 100, 0], [255, 0, 51]], dtype=torch.uint8)
    shown = make_grid(image.view(1, 4, 1, 3).repeat_interleave(64, 2).repeat_interleave(64, 3))[2:-2, 2:-2]
    assert shown[0, ::64].tolist() == [[200, 200, 0], [255, 255, 255], [204, 204, 204]]
