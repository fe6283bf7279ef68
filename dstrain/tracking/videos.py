"""Makes clips for a person: animated GIFs, MP4, and strips of frames for places that show still pictures only.

Notation: N clips of T frames, uint8 (N, T, C, H, W); a film is what is written, uint8 (T, H, W, 1 or 3).
"""

import io
import os
import re
import unicodedata
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dstrain.disk import atomic
from dstrain.recipe import ConfigError
from dstrain.tracking.pictures import composite_on_white, enlarge_pictures, make_grid, render_captions, tile_pictures

FPS = 10  # frames a second: a whole number of a GIF's hundredths of a second, too
_STRIP_FRAMES = 9  # of a clip in a strip
_STRIP_CLIPS = 16  # in a strip
_PALETTE_PIXELS = 1 << 16  # from which a palette is made


def convert_clip_to_frames(clip: Tensor) -> np.ndarray:
    """Converts one clip, uint8 (T, 1, 3 or 4, H, W), to an array for `save_gif` and `save_mp4`, (T, H, W, 1 or 3). Lays
    RGBA on white.
    """
    return composite_on_white(clip).detach().cpu().permute(0, 2, 3, 1).numpy()


def make_film_grid(clips: Tensor, columns: int | None = None, captions: Sequence[str] | None = None) -> np.ndarray:
    """Tiles clips into one film, in which they run side by side: uint8 (N, T, C, H, W) -> (T, H', W', C). Enlarges
    small ones and puts captions below, as pictures.make_grid does. Raises ConfigError if `clips` has another dtype or
    shape.
    """
    _require_valid_clips(clips)
    return np.stack([make_grid(frames, columns, captions) for frames in clips.unbind(1)])


def tile_clip_frames(clips: Tensor, captions: Sequence[str] | None = None) -> np.ndarray:
    """Tiles frames of clips into one picture, a row for each clip: uint8 (N, T, C, H, W) -> (H', W', C). Shows at most
    16 clips, and at most 9 evenly spaced frames of each. Raises ConfigError if `clips` has another dtype or shape.
    """
    _require_valid_clips(clips)
    clips = clips[:_STRIP_CLIPS]
    shown = torch.linspace(0, clips.shape[1] - 1, min(_STRIP_FRAMES, clips.shape[1])).round().long()
    rows = np.stack([tile_pictures(enlarge_pictures(clip), len(shown)) for clip in clips[:, shown]])
    if captions:
        rows = np.concatenate((rows, render_captions(captions[:_STRIP_CLIPS], *rows.shape[2:])), axis=1)
    return tile_pictures(rows, 1)


def _require_valid_clips(clips: Tensor) -> None:
    """Raises ConfigError if `clips` is not uint8 (N, T, C, H, W) with 1, 3 or 4 channels C, or is empty."""
    shape = tuple(clips.shape)
    if clips.dtype != torch.uint8 or len(shape) != 5 or shape[2] not in (1, 3, 4) or 0 in shape:
        raise ConfigError(f"clips are uint8 (N, T, 1, 3 or 4, H, W), got {clips.dtype} {shape}")


def save_gif(path: str | os.PathLike, frames: np.ndarray, fps: float = FPS) -> None:
    """Writes frames uint8 (T, H, W, 1 or 3) as a GIF that loops, whole or not at all; makes its folder. Colours are
    kept exactly if the film is grey or has at most 256 of them. Otherwise all frames share one palette of 256 colours.
    """
    # With several palettes still parts would flicker.
    duration = max(2, round(100 / fps)) * 10  # ms; browsers slow frames down that are shorter than 20 ms
    grey = frames.shape[3] == 1 or bool((frames == frames[..., :1]).all())
    pictures = [Image.fromarray(frame[..., 0]) for frame in frames] if grey else _reduce_to_palette(frames)
    # Pillow drops frames that equal the one before. So each frame is written as a file, and the files are joined: each
    # has the same header, of 13 bytes and 256 colours, and ends with one byte.
    files = []
    for number, picture in enumerate(pictures):
        file = io.BytesIO()
        picture.save(file, format="GIF", optimize=False, duration=duration, **({} if number else {"loop": 0}))
        files.append(file.getvalue())
    head = 13 + 3 * 256
    assert all(file[10] & 7 == 7 for file in files), "a palette of fewer colours"
    atomic.write_file(path, b"".join([files[0][:-1], *(file[head:-1] for file in files[1:]), b";"]))


def _reduce_to_palette(frames: np.ndarray) -> list[Image.Image]:
    """Converts frames (T, H, W, 3) to images that share one palette of at most 256 colours. Frames with no more colours
    than that are converted exactly, others by median cut and error diffusion.
    """
    pixels = frames.reshape(-1, 3)
    sample = pixels[:: -(-len(pixels) // _PALETTE_PIXELS)]
    if len(np.unique(_pack_rgb_into_integers(sample))) <= 256:  # spares most large films the sorting of all pixels
        codes, places = np.unique(_pack_rgb_into_integers(pixels), return_inverse=True)
        if len(codes) <= 256:
            colours = np.zeros((256, 3), np.uint8)
            colours[: len(codes)] = np.stack((codes >> 16, codes >> 8 & 255, codes & 255), 1)
            pictures = [Image.fromarray(frame) for frame in places.reshape(frames.shape[:3]).astype(np.uint8)]
            for picture in pictures:
                picture.putpalette(colours.tobytes())  # an L picture becomes a P picture
            return pictures
    palette = Image.fromarray(sample[None]).quantize(256, method=Image.Quantize.MEDIANCUT, kmeans=1)
    palette.putpalette(bytes(palette.getpalette()).ljust(768, b"\0"))  # the sample may hold fewer colours
    return [Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG) for frame in frames]


def _pack_rgb_into_integers(pixels: np.ndarray) -> np.ndarray:
    """Converts each RGB colour to one number that stands for it: uint8 (n, 3) -> uint32 (n,)."""
    red, green, blue = pixels.astype(np.uint32).T
    return red << 16 | green << 8 | blue


def save_mp4(path: str | os.PathLike, frames: np.ndarray, fps: int = FPS) -> None:
    """Writes frames uint8 (T, H, W, 1 or 3) as an MP4 in H.264, which every player knows, whole or not at all; makes
    its folder.

    Odd heights and widths are made even by repeating the last row or column.
    """
    import av  # slow to import, and pictures need none

    height, width = frames.shape[1:3]
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    frames = np.ascontiguousarray(np.broadcast_to(frames, (*frames.shape[:3], 3)))
    options = {"movflags": "+faststart"}
    with atomic.replace_file(path) as temporary, av.open(str(temporary), "w", format="mp4", options=options) as file:
        stream = file.add_stream("libx264", rate=fps, options={"crf": "15"})
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        stream.codec_context.thread_count = 1  # small frames, and ranks beside this one
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode(None))


def make_safe_file_name(text: str) -> str:
    """Converts a text to a part of a file name: lower-case ASCII letters, digits and single dashes, at most 60
    characters.
    """
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub("[^a-z0-9]+", "-", plain.lower()).strip("-")[:60].strip("-")
