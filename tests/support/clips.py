"""Writes clips of known frames: by PyAV in any codec, by Pillow in any animated format."""

from pathlib import Path

import av
import numpy as np
from PIL import Image

from tests.support.pictures import picture

LOSSLESS = {
    "ffv1.avi": ("ffv1", "bgr0"),
    "ffv1.mkv": ("ffv1", "bgr0"),
    "raw.avi": ("rawvideo", "bgr24"),
    "png.mov": ("png", "rgb24"),
}
LOSSY = {
    "h264.mp4": ("libx264", {"crf": "12", "g": "12", "bf": "3"}),
    "h264.mkv": ("libx264", {"crf": "12", "g": "12"}),
    "h265.mp4": ("libx265", {"crf": "12", "g": "12", "x265-params": "log-level=none:keyint=12"}),
    "vp9.webm": ("libvpx-vp9", {"crf": "10", "b": "0", "g": "12", "cpu-used": "8"}),
    "vp8.webm": ("libvpx", {"b": "4M", "g": "12", "auto-alt-ref": "1", "lag-in-frames": "16"}),
    "mpeg4.avi": ("mpeg4", {"b": "8M", "bf": "2", "g": "12"}),
    "open.mp4": ("libx264", {"crf": "12", "g": "12", "bf": "3", "x264-params": "open-gop=1:scenecut=0"}),
    "open.mkv": ("libx264", {"crf": "12", "g": "12", "bf": "3", "x264-params": "open-gop=1:scenecut=0"}),
    "refresh.mkv": ("libx264", {"crf": "12", "g": "12", "x264-params": "intra-refresh=1"}),
}


def moving(count: int, width: int = 48, height: int = 32, seed: int = 0) -> np.ndarray:
    """Frames that all differ: a window that slides over a picture, uint8 (count, height, width, 3)."""
    wide = np.asarray(picture(seed, width + 2 * count, height))
    return np.stack([wide[:, 2 * i : 2 * i + width] for i in range(count)])


def write(
    path: Path,
    frames: np.ndarray,
    codec: str,
    pixels: str = "yuv420p",
    options: dict[str, str] | None = None,
    rate: int = 10,
) -> Path:
    """Frames uint8 (N, H, W, 3) or (N, H, W, 4) as a video file."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, options=options or {})
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], pixels
        for frame in frames:
            layout = "rgb24" if frame.shape[2] == 3 else "rgba"
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format=layout)))
        container.mux(stream.encode())
    return path


def write_pictures(path: Path, frames: np.ndarray, **options) -> Path:
    """Frames as an animated GIF, PNG or WebP, by the file's name; lossless, except that GIF has only 256 colours."""
    images = [Image.fromarray(frame) for frame in frames]
    if path.suffix == ".webp":
        options = {"lossless": True, "exact": True} | options
    if path.suffix == ".apng":
        options = {"format": "PNG"} | options
    images[0].save(path, save_all=True, append_images=images[1:], duration=100, **options)
    return path
