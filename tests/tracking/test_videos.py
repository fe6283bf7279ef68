"""Oracle: frames handed in, against files as Pillow and FFmpeg read them."""

import re
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageSequence

from dstrain.tracking.pictures import enlarge_pictures, make_grid, render_captions, tile_pictures
from dstrain.tracking.videos import (
    convert_clip_to_frames,
    make_film_grid,
    make_safe_file_name,
    save_gif,
    save_mp4,
    tile_clip_frames,
)


def gif(path) -> tuple[np.ndarray, dict]:
    """Frames uint8 (T, H, W, 3), and loop and duration of the last one."""
    with Image.open(path) as image:
        frames = np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)])
        return frames, {"loop": image.info["loop"], "duration": image.info["duration"]}


def gradients(frames: int = 6, height: int = 28, width: int = 30) -> np.ndarray:
    """Some thousand colours that move, (T, H, W, 3)."""
    t, y, x = np.meshgrid(*(np.linspace(0, 1, size) for size in (frames, height, width)), indexing="ij")
    return (255 * np.stack((x * (1 - t), y * x, t * y), -1)).round().astype(np.uint8)


FILMS = {
    "grey": gradients()[..., :1],
    "grey in colours": gradients()[..., :1].repeat(3, 3),
    "few colours": gradients() // 64 * 64,
    "still": gradients()[:1, ..., :1].repeat(4, 0),
    "one frame": gradients()[:1] // 64 * 64,
    "two colours": (gradients()[..., :1] > 99) * np.uint8([9, 200, 77]),
}


@pytest.mark.parametrize("name", FILMS)
def test_a_gif_keeps_grey_and_few_colours(tmp_path, name):
    """Oracle: the film itself, to the bit and frame by frame, also where a frame equals the one before; Pillow's words
    for playing without end at 10 frames a second; no other file.
    """
    save_gif(tmp_path / "deeper" / "a.gif", FILMS[name])
    decoded, info = gif(tmp_path / "deeper" / "a.gif")
    assert np.array_equal(decoded, np.broadcast_to(FILMS[name], decoded.shape)) and len(decoded) == len(FILMS[name])
    assert info == {"loop": 0, "duration": 100}
    assert [path.name for path in (tmp_path / "deeper").iterdir()] == ["a.gif"]


def test_a_gif_of_many_colours(tmp_path):
    """Oracle: the film within what 256 colours allow: small in the mean over blocks of 4 x 4, which the eye mixes."""
    frames = gradients()
    assert len(np.unique(frames.reshape(-1, 3), axis=0)) > 1000
    save_gif(tmp_path / "a.gif", frames, fps=25)
    decoded, info = gif(tmp_path / "a.gif")
    assert decoded.shape == frames.shape and info["duration"] == 40
    error = decoded.astype(float) - frames
    blocks = error[:, :28, :28].reshape(6, 7, 4, 7, 4, 3).mean((2, 4))
    assert np.abs(error).mean() < 8 and np.sqrt((blocks**2).mean()) < 4
    save_gif(tmp_path / "b.gif", frames[..., ::-1])
    assert np.abs(gif(tmp_path / "b.gif")[0].astype(float) - frames).mean() > 20  # a test that can fail


def test_a_sample_of_pixels_may_miss_colours(tmp_path):
    """Oracle: number and size of frames: 300 colours in one line of three large frames, all else black and grey."""
    frames = np.zeros((3, 1024, 1024, 3), np.uint8)
    frames[0, 0, :300], frames[1] = np.random.default_rng(0).integers(0, 256, (300, 3)), 40
    save_gif(tmp_path / "a.gif", frames)
    decoded, _ = gif(tmp_path / "a.gif")
    assert decoded.shape == frames.shape and np.abs(decoded[1:].astype(int) - frames[1:]).max() <= 4


@pytest.mark.parametrize(
    "name, height, width", [("few colours", 28, 30), ("grey", 7, 5), ("grey", 1, 1), ("still", 9, 8)]
)
def test_mp4(tmp_path, name, height, width):
    """Oracle: the film within H.264's loss, even sides; FFmpeg's words for codec, pixels and rate."""
    frames = FILMS[name][:, :height, :width]
    save_mp4(tmp_path / "a.mp4", frames, fps=12)
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert stream.average_rate == Fraction(12) and stream.frames == len(frames)
        decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
    assert decoded.shape == (len(frames), height + height % 2, width + width % 2, 3)
    error = np.abs(decoded[:, :height, :width].astype(int) - frames)
    assert error.mean() < (6 if "colours" in name else 2)
    assert np.abs(decoded[:, -1, -1].astype(int) - frames[:, -1, -1]).max() <= 24  # the doubled line
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]


def test_a_failed_write_leaves_the_older_film(tmp_path, monkeypatch):
    """Oracle: the older files' bytes, after writes that broke off in the middle."""
    paths = [tmp_path / "a.gif", tmp_path / "a.mp4"]
    save_gif(paths[0], FILMS["grey"])
    save_mp4(paths[1], FILMS["grey"])
    before = [path.read_bytes() for path in paths]

    def half(self, content):
        with open(self, "wb") as file:
            file.write(content[:40])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(Path, "write_bytes", half)
        save_gif(paths[0], FILMS["still"])
    with pytest.raises(ValueError):
        save_mp4(paths[1], FILMS["still"].astype(np.float64))  # refused once the file is begun
    assert [path.read_bytes() for path in paths] == before and sorted(tmp_path.iterdir()) == paths


# ----------------------------------------------------------------------------------------------------- grids and strips


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_grid_of_clips(channels):
    """Oracle: the library's own grid of each frame's pictures, see test_pictures."""
    clips = torch.randint(0, 256, (3, 4, channels, 6, 8), dtype=torch.uint8)
    joined = make_film_grid(clips, 2)
    assert len(joined) == 4 and all(np.array_equal(joined[t], make_grid(clips[:, t], 2)) for t in range(4))


def test_a_strip():
    """Oracle: pixels written out by hand: 9 of 17 frames, the first and the last among them, a row for each clip."""
    clips = (torch.arange(17)[None] + torch.tensor([[0], [100]])).to(torch.uint8)
    whole = tile_clip_frames(clips[:, :, None, None, None].expand(-1, -1, 1, 64, 64))
    assert whole.shape == (2 * (68 + 2) + 2, 9 * 66 + 2 + 4, 1)
    for row, column in np.ndindex(2, 9):
        picture = whole[4 + 70 * row :][:64, 4 + 66 * column :][:, :64]
        assert (picture == 2 * column + 100 * row).all()
    assert tile_clip_frames(torch.zeros(40, 1, 3, 64, 64, dtype=torch.uint8)).shape == (16 * 70 + 2, 68 + 4, 3)


@pytest.mark.parametrize(
    "clips",
    [
        torch.zeros(1, 2, 3, 4, 4),
        torch.zeros(1, 2, 2, 4, 4, dtype=torch.uint8),
        torch.zeros(2, 3, 4, 4, dtype=torch.uint8),
        torch.zeros(1, 0, 3, 4, 4, dtype=torch.uint8),
    ],
)
def test_what_is_no_clip_is_refused(clips):
    """Oracle: the contract, uint8 (N, T, 1, 3 or 4, H, W) with N, T > 0."""
    for draw in (make_film_grid, tile_clip_frames):
        with pytest.raises(ValueError, match="clips are uint8"):
            draw(clips)


def test_a_film_of_its_own_size():
    """Oracle: the clip, channels last; transparent pixels are white."""
    clip = torch.randint(0, 256, (3, 3, 5, 4), dtype=torch.uint8)
    assert np.array_equal(convert_clip_to_frames(clip), clip.permute(0, 2, 3, 1).numpy())
    assert (convert_clip_to_frames(torch.cat((clip, torch.zeros(3, 1, 5, 4, dtype=torch.uint8)), 1)) == 255).all()


# ------------------------------------------------------------------------------------------------------------- captions


def test_captions_stand_below():
    """Oracle: the same pictures without captions above the bars; letters within a bar, none where the text is empty."""
    images = torch.randint(0, 256, (3, 1, 32, 32), dtype=torch.uint8)
    texts = ["a sneaker moving left and then, after a while, right", "", "hat"]
    pictures, bars = enlarge_pictures(images, 128), render_captions(texts, 128, 1)
    assert pictures.shape[1:3] == (128, 128) and bars.shape == (3, 26, 128, 1)  # two lines of 12, and 2
    assert (bars[0, 15:] > 128).any() and not bars[1].any()
    assert (bars[2, :12] > 128).any() and not bars[2, 15:].any()
    assert np.array_equal(make_grid(images, 2, texts), tile_pictures(np.concatenate((pictures, bars), 1), 2))
    assert np.array_equal(render_captions(texts, 128, 3)[..., 2], bars[..., 0])


@given(st.lists(st.text(max_size=80), min_size=1, max_size=3), st.integers(8, 200))
def test_any_caption_can_be_drawn(texts, width):
    """Oracle: the shape, of at most four lines, whatever the text is."""
    bars = render_captions(texts, width, 3)
    assert bars.shape[0] == len(texts) and bars.shape[2:] == (width, 3) and bars.shape[1] in (14, 26, 38, 50)


@given(st.text())
def test_safe_names(text):
    """Oracle: a pattern: letters, digits and single dashes, none at an end, at most 60; a safe name is its own."""
    name = make_safe_file_name(text)
    assert re.fullmatch("([a-z0-9]+(-[a-z0-9]+)*)?", name) and len(name) <= 60 and make_safe_file_name(name) == name


@pytest.mark.parametrize(
    "text, name",
    [
        ("a sneaker moving left", "a-sneaker-moving-left"),
        ("../../etc/passwd", "etc-passwd"),
        ("\u6f22\u5b57", ""),
        ("A T-shirt, \u00e0 l'\u00e9t\u00e9!", "a-t-shirt-a-l-ete"),
        ("x" * 59 + " y z", "x" * 59),
        ("a\0b\nc", "a-b-c"),
    ],
)
def test_names_by_hand(text, name):
    """Oracle: names written out by hand."""
    assert make_safe_file_name(text) == name
