"""Pictures and clips stand as a browser shows them: turned, mirrored, and transparent where their files say so."""

import io
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from PIL import ExifTags, Image

from dstrain import recipe
from dstrain.commands.job import complete_and_check_recipe
from dstrain.data.decode.clips import Cut, read_clip
from dstrain.data.decode.pixels import SUFFIXES, decode_uncropped_image
from dstrain.data.formats.base import Request
from dstrain.data.index.build import open_index
from dstrain.data.open import make_listing_request
from dstrain.data.sources.images import open_images
from dstrain.data.sources.sizes import measure_image_sizes
from dstrain.recipe import Data, Run

# Of each EXIF orientation: the pixels of the shown picture by those of the stored one (TIFF 6.0, page 36).
TURNS = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a),
}


def quarters(width: int = 64, height: int = 32) -> np.ndarray:
    """Red, green, blue and white quarters, uint8 (height, width, 3)."""
    image = np.full((height, width, 3), 255, np.uint8)
    image[: height // 2, : width // 2] = (255, 0, 0)
    image[: height // 2, width // 2 :] = (0, 255, 0)
    image[height // 2 :, : width // 2] = (0, 0, 255)
    return image


def near(image: np.ndarray, other: np.ndarray) -> bool:
    return image.shape == other.shape and np.abs(image.astype(int) - other).mean() < 12


def with_orientation(value: int) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = value
    return exif.tobytes()


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
@pytest.mark.parametrize("turn", TURNS)
def test_orientation_of_pictures(tmp_path, suffix, turn):
    """Oracle: the table of TIFF 6.0, on numpy: pixels, sizes by which buckets are chosen, and clips of one frame."""
    plain, (first, second) = quarters(), (tmp_path / "a", tmp_path / "b")
    for folder in (first, second):
        folder.mkdir()
        Image.fromarray(plain).save(folder / f"x.{suffix}", exif=with_orientation(turn), quality=95)
    shown = TURNS[turn](plain)
    image = np.asarray(decode_uncropped_image(first / f"x.{suffix}", 3))
    assert near(image, shown)
    assert near(np.asarray(decode_uncropped_image(first / f"x.{suffix}", 3, upright=False)), plain)
    for folder, upright, expected in ((first, True, shown), (second, False, plain)):
        request = Request(SUFFIXES, upright=upright, measured=True)
        layout, index = open_index(folder, request, tmp_path / f"index-{folder.name}")
        assert measure_image_sizes(layout, index)[0].tolist() == [expected.shape[1], expected.shape[0]]
        item = open_images(folder, 32, split="all", request=request)[0]["image"].permute(1, 2, 0).numpy()
        side = np.asarray(Image.fromarray(np.ascontiguousarray(expected)))
        middle = [(side.shape[axis] - 32) // 2 for axis in (0, 1)]
        assert near(item, side[middle[0] : middle[0] + 32, middle[1] : middle[1] + 32])
        height, width = expected.shape[:2]
        video = read_clip(folder / f"x.{suffix}", Cut(1, height, width, upright=upright))[0][0]
        assert near(video.permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("exif", [with_orientation(9), with_orientation(0), b"Exif\0\0nonsense", b"Exif\0\0"])
def test_nonsense_turns_nothing(exif):
    """Oracle: the stored picture."""
    buffer = io.BytesIO()
    Image.fromarray(quarters()).save(buffer, "JPEG", exif=exif, quality=95)
    buffer.seek(0)
    assert near(np.asarray(decode_uncropped_image(buffer, 3)), quarters())


@pytest.mark.parametrize("turn", TURNS)
def test_display_matrix_of_clips(tmp_path, turn):
    """Oracle: the same table, for the matrices of ISO 14496-12 that put pixels so; data.upright=false turns without
    mirroring, as earlier versions did.
    """
    av = pytest.importorskip("av")
    plain = quarters(64, 64)
    with av.open(str(tmp_path / "x.mp4"), "w") as file:
        stream = file.add_stream("libx264", rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for number in range(2):
            frame = av.VideoFrame.from_ndarray(plain, format="rgb24")
            frame.pts = number
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    content = (tmp_path / "x.mp4").read_bytes()
    at = content.index(b"tkhd") + 44
    # (a, b, c, d): the pixel (x, y) goes to (a x + c y, b x + d y).
    a, b, c, d = {
        1: (1, 0, 0, 1),
        2: (-1, 0, 0, 1),
        3: (-1, 0, 0, -1),
        4: (1, 0, 0, -1),
        5: (0, 1, 1, 0),
        6: (0, 1, -1, 0),
        7: (0, -1, -1, 0),
        8: (0, -1, 1, 0),
    }[turn]
    matrix = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    (tmp_path / "x.mp4").write_bytes(content[:at] + matrix + content[at + 36 :])
    cut = Cut(1, 64, 64)
    shown = read_clip(tmp_path / "x.mp4", cut)[0][0].permute(1, 2, 0).numpy()
    assert near(shown, TURNS[turn](plain))
    if turn in (1, 3, 6, 8):
        before = read_clip(tmp_path / "x.mp4", replace(cut, upright=False))[0][0]
        assert torch.equal(before.permute(1, 2, 0), torch.from_numpy(shown))


def png(depth: int, colour: int, values: list[int], clear: bytes) -> io.BytesIO:
    """A PNG of one row with a tRNS chunk, written chunk by chunk."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    width = len(values) // (3 if colour == 2 else 1)
    bits = "".join(f"{value:0{depth}b}" for value in values)
    row = b"\0" + int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")
    head = struct.pack(">2I5B", width, 1, depth, colour, 0, 0, 0)
    return io.BytesIO(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"tRNS", clear)
        + chunk(b"IDAT", zlib.compress(row))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_a_transparent_grey(depth):
    """Oracle: the PNG specification: pixels of the value in tRNS are transparent, so they show white; all others keep
    their grey.
    """
    most = 2**depth - 1
    values = [0, most] if depth == 1 else [0, 1, most // 2, most]
    for clear in values:
        file = png(depth, 0, values, struct.pack(">H", clear))
        expected = [255 if value == clear else round(value * 255 / most) for value in values]
        for channels in (1, 3):
            image = np.asarray(decode_uncropped_image(file, channels)).reshape(len(values), channels)
            assert (image == np.array(expected)[:, None]).all(), (clear, image)
        alpha = np.asarray(decode_uncropped_image(file, 4))[0, :, 3]
        assert alpha.tolist() == [0 if value == clear else 255 for value in values]


@pytest.mark.parametrize("depth", [8, 16])
def test_a_transparent_colour(depth):
    """Oracle: as for grey."""
    most = 2**depth - 1
    file = png(depth, 2, [most, 0, 0, 0, most, 0], struct.pack(">3H", 0, most, 0))
    assert np.asarray(decode_uncropped_image(file, 3))[0].tolist() == [[255, 0, 0], [255, 255, 255]]


def test_older_runs_keep_theirs(tmp_path):
    """Oracle: the key: a recipe means true, and a run's folder that does not say so means false, also for the command
    that goes on with it; what a run says is kept.
    """
    (tmp_path / "recipe.yaml").write_text(f"folder: {tmp_path / 'run'}\ndata: {{path: builtin:fashion}}\n")

    def upright(path) -> bool:
        return recipe.load_recipe(path).data.upright

    assert Run().data.upright and upright(tmp_path / "recipe.yaml") and make_listing_request(Data()).upright
    run = recipe.load_recipe(tmp_path / "recipe.yaml")
    assert complete_and_check_recipe(run)[0].data.upright
    assert yaml.safe_load(recipe.dump_run(run))["data"]["upright"] is True
    (tmp_path / "run").mkdir()
    for text, expected in (("{}", False), ("{upright: true}", True), ("{upright: false}", False)):
        (tmp_path / "run" / "run.yaml").write_text(f"data: {text}\n")
        assert upright(tmp_path / "run" / "run.yaml") is expected
        assert complete_and_check_recipe(run)[0].data.upright is expected
    own = recipe.load_recipe(tmp_path / "recipe.yaml", ["data.upright=true"])
    assert complete_and_check_recipe(own)[0].data.upright is True
