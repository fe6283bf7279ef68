"""Image sources: the built-in data, folders, decoding and the crop."""

import gzip
import importlib.util
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dstrain.data.builtin import fashion
from dstrain.data.builtin.fashion import FASHION
from dstrain.data.decode import pixels
from dstrain.data.decode.pixels import crop_center, read_image, to_tensor
from dstrain.data.index import source as folder_module
from dstrain.data.source import BadSample, read_items_or_substitutes
from dstrain.data.sources.images import open_images
from dstrain.recipe import ConfigError
from tests.support import clips
from tests.support.launch import ROOT
from tests.support.pictures import BROKEN, bomb, break_file, folder, picture

BUILTIN = Path(fashion.__file__).parent
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
needs_debian = pytest.mark.skipif(not DEBIAN.exists(), reason="Debian's dataset-fashion-mnist is not installed")


def reference_crop(image: Image.Image, size: int) -> np.ndarray:
    """The definition of ADM's centre crop, step by step."""
    while min(*image.size) >= 2 * size:
        image = image.resize(tuple(x // 2 for x in image.size), resample=Image.BOX)
    scale = size / min(*image.size)
    image = image.resize(tuple(round(x * scale) for x in image.size), resample=Image.BICUBIC)
    array = np.array(image)
    y, x = (array.shape[0] - size) // 2, (array.shape[1] - size) // 2
    return array[y : y + size, x : x + size]


# ---------------------------------------------------------------------------------------- built-in


def test_builtin_is_balanced_and_small():
    """Oracle: the brief: 2,000 + 500 images, every class equally often, file below 1 MB."""
    train = open_images("builtin:fashion", 32)
    held = open_images("builtin:fashion", 32, split="held_out")
    assert np.bincount(train.labels).tolist() == [200] * 10
    assert np.bincount(held.labels).tolist() == [50] * 10
    assert len(open_images("builtin:fashion", 32, split="all")) == 2500
    assert (BUILTIN / "fashion-mini.npz").stat().st_size < 1_000_000
    assert train.classes == FASHION and len(FASHION) == 10
    assert train.compute_fingerprint() != held.compute_fingerprint()


@needs_debian
def test_builtin_is_what_the_script_makes(tmp_path):
    """Oracle: the script that made the file, run anew on Debian's package."""
    spec = importlib.util.spec_from_file_location("make_fashion", ROOT / "launch" / "builtin" / "make_fashion.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(tmp_path / "again.npz")
    with np.load(tmp_path / "again.npz") as again, np.load(BUILTIN / "fashion-mini.npz") as packaged:
        assert sorted(again) == sorted(packaged)
        for split in ("train_label", "held_out_label"):
            assert np.array_equal(again[split], packaged[split])
        # the pixels, since another liblzma may pack differently
        for split in ("train", "held_out"):
            assert module.lzma.decompress(again[split]) == module.lzma.decompress(packaged[split])


@needs_debian
def test_builtin_pixels_are_real():
    """Oracle: the first trouser of Debian's test set is held-out sample 1, at 28 and within the
    border at 32.
    """
    with gzip.open(DEBIAN / "t10k-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(), np.uint8, offset=16)
    with gzip.open(DEBIAN / "t10k-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    first = torch.tensor(pixels.reshape(-1, 28, 28)[np.flatnonzero(labels == 1)[0]])
    at28 = open_images("builtin:fashion", 28, channels=1, split="held_out")[1]
    at32 = open_images("builtin:fashion", 32, channels=3, split="held_out")[1]
    assert at28["label"] == at32["label"] == 1
    assert torch.equal(at28["image"], first[None])
    for channel in at32["image"]:
        assert torch.equal(channel[2:-2, 2:-2], first)
    assert at32["image"].sum() == 3 * first.sum(dtype=torch.int64)  # the border is black


@pytest.mark.parametrize("size", [8, 16, 28, 32, 64])
@pytest.mark.parametrize("channels", [1, 3])
def test_builtin_at_any_size(size, channels):
    """Oracle: the size that was asked for, and the mean brightness, which a resize keeps."""
    source = open_images("builtin:fashion", size, channels=channels)
    small = open_images("builtin:fashion", 28)
    items = torch.stack([source[i]["image"] for i in range(20)])
    assert items.shape[1:] == (channels, size, size)
    usual = torch.stack([small[i]["image"] for i in range(20)]).float().mean()
    border = 1 if size == 28 else 28**2 / 32**2  # the share that is not border
    assert abs(items.float().mean() - usual * border) < 2


# -------------------- crop and decoding


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_crop_is_bit_exact(mode):
    """Oracle: the definition written out above, over random shapes from tiny to tall, wide and
    odd.
    """
    draw = np.random.default_rng(0)
    for _ in range(250):
        width, height = (int(n) for n in np.exp(draw.uniform(np.log(5), np.log(320), 2)))
        size = int(draw.integers(4, 140))
        image = Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))
        image, shape = image.convert(mode), (width, height, size)
        assert np.array_equal(crop_center(image, size), reference_crop(image, size)), shape


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (640, 427), (427, 640), (333, 500), (256, 256), (1300, 975)])
def test_jpeg_pixels_are_those_of_the_original(tmp_path, size):
    """Oracle: open, convert to RGB, crop by definition, as the original loader does, at common
    photo sizes.
    """
    picture(1, *size).save(tmp_path / "a.jpg", quality=90)
    with Image.open(tmp_path / "a.jpg") as image:
        expected = reference_crop(image.convert("RGB"), 256)
    assert np.array_equal(read_image(tmp_path / "a.jpg", 256).permute(1, 2, 0).numpy(), expected)


def test_draft_is_close_but_not_the_same(tmp_path):
    """Oracle: the exact crop; a DCT-scaled decode of a smooth picture stays near it and keeps the
    shape.
    """
    picture(2, 500, 375).save(tmp_path / "a.jpg", quality=95)
    exact = read_image(tmp_path / "a.jpg", 64).float()
    draft = read_image(tmp_path / "a.jpg", 64, draft=True).float()
    assert exact.shape == draft.shape and not torch.equal(exact, draft)
    assert (exact - draft).abs().mean() < 4


@pytest.mark.parametrize(
    "mode,suffix",
    [
        ("RGB", ".png"),
        ("L", ".png"),
        ("LA", ".png"),
        ("P", ".png"),
        ("1", ".png"),
        ("RGBA", ".webp"),
        ("CMYK", ".jpg"),
        ("RGB", ".BMP"),
        ("RGB", ".JPEG"),
    ],
)
def test_every_mode_becomes_rgb(tmp_path, mode, suffix):
    """Oracle: Pillow's own conversion to RGB of the saved file (all opaque here)."""
    path = tmp_path / f"a{suffix}"
    picture(3, 32, 32, mode).save(path)
    with Image.open(path) as image:
        expected = np.array(image.convert("RGB"))
    assert np.array_equal(read_image(path, 32).permute(1, 2, 0).numpy(), expected)
    assert read_image(path, 32, channels=1).shape == (1, 32, 32)


def test_transparency_is_laid_on_white(tmp_path):
    """Oracle: by hand: alpha 0 is white whatever lies beneath, alpha 255 the colour; also for a
    palette.
    """
    pixels = np.zeros((8, 8, 4), np.uint8)
    pixels[:, 4:] = (10, 200, 30, 255)
    Image.fromarray(pixels).save(tmp_path / "rgba.png")
    palette = Image.fromarray((np.arange(64).reshape(8, 8) >= 32).astype(np.uint8), "P")
    palette.putpalette([0, 0, 0, 10, 200, 30])
    palette.save(tmp_path / "p.png", transparency=0)
    rgba, p = read_image(tmp_path / "rgba.png", 8), read_image(tmp_path / "p.png", 8)
    assert rgba[:, 0, 0].tolist() == p[:, 0, 0].tolist() == [255, 255, 255]
    assert rgba[:, 0, 7].tolist() == p[:, 7, 0].tolist() == [10, 200, 30]


def test_sixteen_bits_are_scaled(tmp_path):
    """Oracle: round(v / 257) of 16-bit grey; Pillow's own conversion clips at 255."""
    values = np.linspace(0, 65535, 64).round().astype(np.uint16).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / "a.png")
    expected = (values / 257).round().astype(np.uint8)
    assert np.array_equal(read_image(tmp_path / "a.png", 8)[0].numpy(), expected)


@pytest.mark.parametrize("how", BROKEN)
def test_broken_files_are_named(tmp_path, how):
    """Oracle: the contract: BadSample with the relative path and a reason of one line."""
    source = open_images(folder(tmp_path / "d", 1, 2), 16)
    break_file(tmp_path / "d/c0/001.png", how)
    with pytest.raises(BadSample) as caught:
        source[1]
    assert caught.value.path == "c0/001.png"
    assert "\n" not in caught.value.reason and str(tmp_path) not in caught.value.reason
    assert pickle.loads(pickle.dumps(caught.value)).reason == caught.value.reason


def test_a_broken_member_of_an_archive(tmp_path):
    """Oracle: the contract: a reason that says the same of the same file each time, so without an address in memory."""
    break_file(folder(tmp_path / "d", 1, 2) / "c0/001.png", "text")
    source = open_images(shutil.make_archive(tmp_path / "packed", "zip", tmp_path / "d"), 16)
    with pytest.raises(BadSample) as caught:
        source[1]
    assert caught.value.path.endswith("001.png")
    assert caught.value.reason == "UnidentifiedImageError: it is no image that Pillow can read"


def test_a_truncated_jpeg_is_bad(tmp_path):
    """Oracle: the contract: no grey lower half is ever learned."""
    picture(5, 300, 200).save(tmp_path / "a.jpg")
    data = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(OSError, match="truncated"):
        read_image(tmp_path / "a.jpg", 64)


def test_a_bomb_is_refused_by_its_header(tmp_path, monkeypatch):
    """Oracle: the contract: refused by our cap before a pixel is decoded, with the sizes in the
    message.
    """
    # 169 megapixels: Pillow only warns of that
    (tmp_path / "a.png").write_bytes(bomb(13000, 13000))
    with pytest.raises(ValueError, match="13000 x 13000 pixels exceed the cap"):
        read_image(tmp_path / "a.png", 64)
    # 196 megapixels: Pillow refuses by itself
    (tmp_path / "c.png").write_bytes(bomb(14000, 14000))
    with pytest.raises(ConfigError, match=f"exceed the cap of {pixels.PIXEL_CAP}: .*196000000 pixels"):
        read_image(tmp_path / "c.png", 64)
    picture(6, 40, 30).save(tmp_path / "b.png")
    monkeypatch.setattr(pixels, "PIXEL_CAP", 1000)
    with pytest.raises(ValueError, match="cap of 1000"):
        read_image(tmp_path / "b.png", 16)


def test_tensor_layout():
    """Oracle: numpy's transpose of the same image."""
    image = picture(7)
    assert np.array_equal(to_tensor(image).numpy(), np.array(image).transpose(2, 0, 1))


# ---------------------------------------------------------------------------------------- folders


def test_classes_and_order(tmp_path):
    """Oracle: sorted folders and paths, any depth, any case of suffix; hidden and other files are
    passed over.
    """
    for name in ("dog/2.PNG", "dog/deep/er/1.png", "cat/9.webp", "cat/._9.png", "cat/readme.txt", ".git/x.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if name.lower().endswith("png") or name.endswith("webp"):
            picture(1).save(tmp_path / name)
        else:
            (tmp_path / name).write_text("no image")
    source = open_images(tmp_path, 16)
    assert source.classes == ("cat", "dog")
    names = [source.name_sample(i) for i in range(len(source))]
    assert names == ["cat/9.webp", "dog/2.PNG", "dog/deep/er/1.png"]
    assert [source[i]["label"] for i in range(3)] == [0, 1, 1]
    assert source[2]["image"].shape == (3, 16, 16)


def test_flat_folder_and_links(tmp_path):
    """Oracle: the contract: no class folders is one class, 0; a link that leads back ends."""
    for i in range(3):
        picture(i).save(tmp_path / f"{i}.png")
    assert open_images(tmp_path, 16).labels.tolist() == [0, 0, 0]
    looped = folder(tmp_path / "looped", 1, 2)
    os.symlink(looped / "c0", looped / "c0" / "again")
    assert 2 <= len(open_images(looped, 16)) <= 4


def write(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"no picture")


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda root: None, "does not exist"),
        (lambda root: root.mkdir(), "no images in it, and no other file: put images into it"),
        (lambda root: (root / "a").mkdir(parents=True), "no images in it, and no other file"),
        (lambda root: write(root / "a.mp4"), "files ending in .png .* It holds a.mp4: data.num_frames=17 reads clips"),
        (
            lambda root: (write(root / "a/x.TIF"), write(root / "a/y.tif")),
            "holds a/.* and 1 like it: convert them to PNG",
        ),
        (
            lambda root: write(root / "0.npy"),
            "holds 0.npy: docs/guides/encode.md names the latents of others that .*dstrain convert npz",
        ),
        (
            lambda root: (write(root / "a.zip"), write(root / "b.zip")),
            r"a zip file \(a.zip: data.path=.*/a.zip\) and a zip file \(b.zip: .*/b.zip\): name one .*data.mixture=",
        ),
        (lambda root: (write(root / "readme"), write(root / "a.rar")), "holds a.rar: unpack it first"),
        (lambda root: write(root / "a.bin"), "holds a.bin: docs/guides/data.md has all forms that are read"),
        (lambda root: (folder(root), (root / "c9").mkdir()), "without images: c9"),
        (lambda root: (folder(root), picture(0).save(root / "x.png")), "beside class folders"),
        (lambda root: root.write_text("a file"), "is not a folder"),
    ],
)
def test_unusable_folders(tmp_path, make, message):
    """Oracle: the contract: a ValueError with the path and what to do."""
    make(tmp_path / "root")
    with pytest.raises(ValueError, match=message) as caught:
        open_images(tmp_path / "root", 16)
    assert str(tmp_path / "root") in str(caught.value)


def test_held_out_fraction_moves_nothing(tmp_path):
    """Oracle: train and held-out are a partition, near the fraction, and a new file leaves all
    others where they are.
    """
    root = folder(tmp_path / "d", 2, 100)
    parts = [open_images(root, 16, split=split, held_out=0.2) for split in ("train", "held_out")]
    train, held = ({part.name_sample(i) for i in range(len(part))} for part in parts)
    assert not train & held and len(train | held) == 200 and 20 <= len(held) <= 60
    picture(0).save(root / "c0" / "000a.png")
    again = open_images(root, 16, split="held_out", held_out=0.2)
    assert {again.name_sample(i) for i in range(len(again))} - {"c0/000a.png"} == held
    assert parts[1].labels.tolist() == [int(name[1]) for name in sorted(held)]


def test_held_out_path_keeps_the_labels(tmp_path):
    """Oracle: a held-out folder with only class c1 gets label 1, as in training; an unknown class
    is an error.
    """
    train, held = folder(tmp_path / "t", 2, 2), folder(tmp_path / "h", 2, 2)
    for name in ("000.png", "001.png"):
        (held / "c0" / name).unlink()
    (held / "c0").rmdir()
    source = open_images(train, 16, split="held_out", held_out_path=held)
    assert source.labels.tolist() == [1, 1] and source.classes == ("c0", "c1")
    (held / "c1").rename(held / "zebra")
    with pytest.raises(ValueError, match="zebra"):
        open_images(train, 16, split="held_out", held_out_path=held)
    with pytest.raises(ValueError, match="held_out_path"):
        open_images(train, 16, split="held_out")


def test_fingerprint_notices_changes(tmp_path):
    """Oracle: the same folder, and a copy of it, give the same string, one renamed file or another size another."""
    root = folder(tmp_path / "d", 2, 3)
    before = open_images(root, 16).compute_fingerprint()
    shutil.copytree(root, tmp_path / "copy", copy_function=shutil.copyfile)
    assert (
        open_images(root, 32).compute_fingerprint()
        == before
        == open_images(tmp_path / "copy", 16).compute_fingerprint()
    )
    (root / "c0" / "000.png").rename(root / "c0" / "zzz.png")
    assert open_images(root, 16).compute_fingerprint() != before
    source = open_images(tmp_path / "copy", 16)
    picture(7, 50, 40).save(tmp_path / "copy" / "c1" / "001.png")
    assert source.compute_fingerprint() != before and source.compute_fingerprint() == source.compute_full_fingerprint()


def test_some_sizes_stand_for_many(tmp_path, monkeypatch):
    """Oracle: os.stat, whose calls are counted; of six files three are looked at, the first and the last among them."""
    source = open_images(folder(tmp_path / "d", 2, 3), 16)
    asked, stat = [], os.stat
    monkeypatch.setattr(folder_module, "_ASKED", 3)
    monkeypatch.setattr(os, "stat", lambda path, **words: asked.append(Path(path).name) or stat(path, **words))
    sampled = source.compute_fingerprint()
    assert sorted(asked) == sorted(Path(source.name_sample(index)).name for index in (0, 2, 5))
    asked.clear()
    assert sampled != source.compute_full_fingerprint() and len(asked) == 6


@pytest.mark.parametrize("wrong", [{"channels": 2}, {"split": "test"}, {"held_out": 1.0}])
def test_wrong_arguments(tmp_path, wrong):
    """Oracle: the contract: a ValueError that names the argument."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        open_images(folder(tmp_path / "d", 1, 1), 16, **wrong)
    with pytest.raises(ValueError, match="builtin:fashion"):
        open_images("builtin:mnist", 28)


@pytest.mark.parametrize("name", ["ffv1.avi", "ffv1.mkv", "png.mov", "h264.mp4", "vp9.webm"])
def test_a_video_under_the_name_of_a_picture(tmp_path, name):
    """Oracle: real files of each container: all samples are videos, and the refusal says which
    systems learn from them.
    """
    codec, pixels = (clips.LOSSLESS | {key: (own, "yuv420p") for key, (own, _) in clips.LOSSY.items()})[name]
    clip = clips.write(tmp_path / name, clips.moving(3), codec, pixels)
    (tmp_path / "d").mkdir()
    shutil.copy(clip, tmp_path / "d" / "a.png")
    with pytest.raises(ConfigError, match="it is a video, and no picture: choose a system that learns from clips"):
        read_items_or_substitutes(open_images(tmp_path / "d", 16), [0])
