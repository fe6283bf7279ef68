"""From a video file to a clip: RGB frames of one window, cropped as images are, of exact number.

    window      frames start, start + stride, ..., at most num_frames of them; see Cut.window
    clip        uint8 (T, C, H, W) with T = num_frames; after the last real frame, that one repeated

PyAV (FFmpeg) reads mp4, webm, avi, mov and mkv, Pillow animated and still pictures; a still one is a clip of one frame.
Frames are counted as a decoder gives them out, never by time. A window deep in a file is read from the keyframe before
it, where that one's number is certain: containers that say it, and codecs of which a packet is a picture. In decoding
order all that stands before a keyframe is also shown before it, while pictures that follow it may be shown before it
("leading", of an open group of pictures): so its number is its place among the packets plus its leading pictures.
Anything else is decoded from the start. Both give the same frames.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from dstrain.data.pixels import PIXEL_CAP, SUFFIXES, center_crop, patiently, to_mode, to_tensor
from dstrain.recipe import ConfigError

VIDEOS = (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi")        # compared in lower case
PICTURES = (*SUFFIXES, ".gif", ".apng")

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
# By content: a playlist that calls itself .mp4 would have FFmpeg read other files, or addresses in the network.
_OPTIONS = {"format_whitelist": "mov,matroska,webm,avi", "protocol_whitelist": "file"}
# Codecs of which each packet is one picture that is shown; VP8 hides some, and MPEG-4 in AVI packs two into one.
_ONE_EACH = ("h264", "hevc", "av1", "vp9", "ffv1", "mjpeg", "rawvideo", "png", "prores")


@dataclass(frozen=True)
class Cut:
    """What is taken of a file. stride: one frame of so many; still: only the first frame, repeated."""

    num_frames: int
    height: int                                   # pixels
    width: int
    channels: int = 3                             # 1 (grey) or 3 (RGB; what is transparent is laid on white)
    stride: int = 1
    still: bool = False
    pixel_cap: int = PIXEL_CAP                    # of one frame of the file

    def window(self, count: int, chance: float | None = None) -> range:
        """The frames to take of `count` >= 1; as many as there are, where that is fewer than num_frames.

        A longer file's window starts by `chance` in [0, 1), uniformly; None takes the middle.
        """
        if self.still:
            return range(1)
        spare = count - (self.num_frames - 1) * self.stride - 1
        if spare < 0:
            return range(0, count, self.stride)
        start = spare // 2 if chance is None else int(chance * (spare + 1))
        return range(start, count - spare + start, self.stride)


class Listing(NamedTuple):
    """How many frames a file gives, and where decoding may begin: (packet's place, its time) of the keyframes."""

    count: int
    keys: tuple[tuple[int, int], ...] = ()
    clock: str = "dts"                            # which time of a packet
    delay: int = 0                                # from that time to the one of showing, by which FFmpeg seeks


def read_clip(path: Path, cut: Cut, chance: float | None = None,
              listing: Listing | None = None) -> tuple[Tensor, int, Listing]:
    """A clip uint8 (T, C, H, W), how many of its frames are real, and the listing, which spares the next call work.

    Raises whatever FFmpeg or Pillow raise on a broken file, ConfigError for one without a frame, one that ends early,
    a damaged frame, and one above the cap.
    """
    return patiently(lambda: _read(path, cut, chance, listing))


def _read(path: Path, cut: Cut, chance: float | None, listing: Listing | None) -> tuple[Tensor, int, Listing]:
    if path.suffix.lower() in PICTURES:
        frames, listing = _pictures(path, cut, chance)
    else:
        listing = listing or list_frames(path, cut.pixel_cap)
        frames = _video(path, cut, cut.window(listing.count, chance), listing)
    last = frames[-1:] * (cut.num_frames - len(frames))
    return torch.stack(frames + last), len(frames), listing


# --------------------------------------------------------------------------------------------------------------- FFmpeg


def list_frames(path: Path, pixel_cap: int = PIXEL_CAP) -> Listing:
    """Counts the frames of a video: from its index, else from its packets, else by decoding all of it."""
    with _opened(path, pixel_cap) as (container, stream):
        packaged = stream.codec_context.name in _ONE_EACH or stream.codec_context.name == "libdav1d"
        indexed = packaged and "mp4" in container.format.name
        if indexed and stream.frames and stream.frames == len(stream.index_entries):
            entries = [stream.index_entries[place] for place in range(stream.frames)]
            if entries[0].is_keyframe and not any(entry.is_discard for entry in entries):
                delay = (stream.start_time or 0) - entries[0].timestamp
                return Listing(len(entries), _keys(entries, "timestamp"), delay=delay)
        elif packaged and ("mp4" in container.format.name or "matroska" in container.format.name):
            packets = [packet for packet in container.demux(stream) if packet.size]
            whole = not any(packet.is_discard or packet.is_corrupt or packet.pts is None for packet in packets)
            if packets and packets[0].is_keyframe and whole:
                return Listing(len(packets), _keys(packets, "pts"), "pts")
    with _opened(path, pixel_cap) as (container, stream):
        count = sum(1 for _ in container.decode(stream))
    if not count:
        raise ConfigError("holds no frame")
    return Listing(count)


def _keys(packets: list[Any], clock: str) -> tuple[tuple[int, int], ...]:
    return tuple((place, getattr(packet, clock)) for place, packet in enumerate(packets) if packet.is_keyframe)


@contextmanager
def _opened(path: Path, pixel_cap: int) -> Iterator[tuple[Any, Any]]:
    import av                                     # only videos need it

    # "file:", or a colon in a name would be the end of a protocol's.
    with av.open(f"file:{path}", container_options=_OPTIONS, metadata_errors="replace") as container:
        covers = av.stream.Disposition.attached_pic
        stream = next((stream for stream in container.streams.video if not stream.disposition & covers), None)
        if stream is None or stream.codec_context is None:
            raise ConfigError("has no video stream that can be decoded")
        if stream.codec_context.width * stream.codec_context.height > pixel_cap:
            raise ConfigError(f"{stream.codec_context.width} x {stream.codec_context.height} pixels exceed the cap of "
                              f"{pixel_cap}")
        stream.codec_context.thread_count = 1     # the workers are the threads
        yield container, stream


def _video(path: Path, cut: Cut, window: range, listing: Listing) -> list[Tensor]:
    frames: list[Tensor] = []
    number = -1
    for number, frame in _frames(path, cut.pixel_cap, window[0], listing):
        if number in window:
            if frame.is_corrupt:
                raise ConfigError(f"frame {number} is damaged")
            frames.append(_pixels(frame, cut))
            if len(frames) == len(window):
                return frames
    raise ConfigError(f"ends after {number + 1} of {listing.count} frames")


def _frames(path: Path, pixel_cap: int, first: int, listing: Listing) -> Iterator[tuple[int, Any]]:
    """(number, frame) from `first` or some frame before it on."""
    places = {time: place for place, time in listing.keys}
    before = [time for place, time in listing.keys if 0 < place <= first]
    for time in before[:-3:-1]:                   # the second where leading pictures put the first behind `first`
        with _opened(path, pixel_cap) as (container, stream):
            container.seek(time + listing.delay, stream=stream)
            packets = container.demux(stream)
            head, leading = _head(packets)
            place = places.get(getattr(head[0], listing.clock)) if head else None
            if place is None or place + leading > first:
                continue
            shown = (frame for packet in chain(head, packets) for frame in packet.decode()
                     if frame.pts is None or frame.pts >= head[0].pts)
            key = next(shown, None)
            if key is not None and key.pts == head[0].pts and not key.is_corrupt:
                yield from enumerate(chain([key], shown), place + leading)
                return
    with _opened(path, pixel_cap) as (container, stream):
        yield from enumerate(container.decode(stream))


def _head(packets: Iterator[Any]) -> tuple[list[Any], int]:
    """A keyframe and what is needed to count its leading pictures; nothing where `packets` begin with something else.
    """
    head: list[Any] = []
    for packet in packets:
        if packet.size and packet.pts is None or not head and not packet.is_keyframe:
            return [], 0
        head.append(packet)
        if not packet.size or packet.pts > head[0].pts:
            break
    return head, sum(1 for packet in head if packet.size and packet.pts < head[0].pts)


def _pixels(frame: Any, cut: Cut) -> Tensor:
    transparent = any(component.is_alpha for component in frame.format.components)
    image = Image.fromarray(frame.to_ndarray(format="rgba" if transparent else "rgb24"))
    if frame.rotation % 360:                      # of a telephone held upright
        image = image.rotate(frame.rotation, expand=True)
    return _cropped(image, cut)


# --------------------------------------------------------------------------------------------------------------- Pillow


def _pictures(path: Path, cut: Cut, chance: float | None) -> tuple[list[Tensor], Listing]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)                    # our own cap follows
        with Image.open(path, formats=_FORMATS) as image:
            if image.width * image.height > cut.pixel_cap:
                raise ConfigError(f"{image.width} x {image.height} pixels exceed the cap of {cut.pixel_cap}")
            count = getattr(image, "n_frames", 1)
            # An animated PNG may hold one picture more, for those who cannot animate it.
            skipped = int(count > 1 and bool(image.info.get("default_image")))
            frames = []
            for number in cut.window(count - skipped, chance):
                image.seek(number + skipped)
                image.load()
                frames.append(_cropped(image, cut))
    return frames, Listing(count - skipped)


def _cropped(image: Image.Image, cut: Cut) -> Tensor:
    return to_tensor(center_crop(to_mode(image, cut.channels), cut.width, cut.height))
