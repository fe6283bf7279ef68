"""Reads a clip from a video file: the frames of one window, cropped as images are.

    window      frames start, start + stride, ..., at most num_frames of them; see Cut.choose_frame_window
    clip        uint8 (T, C, H, W) with T = num_frames; a short window is filled up with copies of its last frame

PyAV (FFmpeg) reads mp4, webm, avi, mov and mkv. Pillow reads animated and still pictures; a still one is a clip of one
frame. Frames are numbered as a decoder outputs them, never by time.

A window deep in a file is decoded from the keyframe before it, if the number of that keyframe is certain: in containers
that list their packets, and for codecs whose packets are one picture each. All packets before a keyframe are shown
before it, but pictures that follow the keyframe in the file may be shown before it, too ("leading" pictures of an open
group of pictures). So the number of a keyframe is its position among the packets plus the number of its leading
pictures. Other files are decoded from the start. Both ways give the same frames.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dstrain.data.decode.pixels import (
    FORMATS,
    SUFFIXES,
    convert_mode,
    crop_center,
    open_image,
    require_below_pixel_cap,
    to_tensor,
    turn_upright,
)
from dstrain.data.files.storage import refuse_special_file, retry
from dstrain.recipe import ConfigError

VIDEOS = (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi")  # compared in lower case
PICTURES = (*SUFFIXES, ".gif", ".apng")

_FORMATS = (*FORMATS, "GIF")
_SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM")  # of pictures; WebP's stands further in
# FFmpeg goes by content: it would follow a playlist named .mp4 to other files, or to addresses in the network.
_OPTIONS = {"format_whitelist": "mov,matroska,webm,avi", "protocol_whitelist": "file"}
# Codecs whose packets are one visible picture each. VP8 hides some, and MPEG-4 in AVI packs two into one packet.
_PICTURE_CODECS = ("h264", "hevc", "av1", "vp9", "ffv1", "mjpeg", "rawvideo", "png", "prores")


@dataclass(frozen=True)
class Cut:
    """How a clip is cut out of a file. stride: every stride-th frame is taken. still: only the first frame is taken,
    and repeated.
    """

    num_frames: int
    height: int  # pixels
    width: int
    channels: int = 3  # 1 (grey) or 3 (RGB; transparency is laid on white)
    stride: int = 1
    still: bool = False
    upright: bool = True  # as data.upright

    def count_frames_at_stride(self, total_frames: int) -> int:
        """Returns how many frames of a file are left if every stride-th is taken: total_frames / stride, rounded up."""
        return -(-total_frames // self.stride)

    def choose_frame_window(self, total_frames: int, random_number: float | None = None) -> range:
        """Returns the numbers of the frames to take from a file of `total_frames` >= 1 frames: num_frames of them,
        stride apart; fewer if the file is too short; only frame 0 if `still`.

        random_number: a number in [0, 1) that chooses where the window starts; None takes the middle of the file.
        """
        if self.still:
            return range(1)
        spare = total_frames - (self.num_frames - 1) * self.stride - 1
        if spare < 0:
            return range(0, total_frames, self.stride)
        start = spare // 2 if random_number is None else int(random_number * (spare + 1))
        return range(start, total_frames - spare + start, self.stride)


class Listing(NamedTuple):
    """The number of frames of a file, and the keyframes at which decoding can begin."""

    count: int
    keyframes: tuple[tuple[int, int], ...] = ()  # (place among the packets, time)
    timestamp: str = "dts"  # the attribute of a packet that holds its time
    delay: int = 0  # from that time to the time of showing, by which FFmpeg seeks


def read_clip(
    file: Path | bytes, cut: Cut, random_number: float | None = None, listing: Listing | None = None
) -> tuple[Tensor, int, Listing]:
    """Returns (clip uint8 (T, C, H, W), how many of its frames were read, listing of the file's frames). If the file
    has too few frames, repeats the last one. Tries again if the storage fails.

    file: the path of a video or a picture, or its encoded bytes
    random_number: see `Cut.choose_frame_window`
    listing: what an earlier call for this file has returned, which saves time; None: makes it anew

    Raises ConfigError if the file has no frame, ends early, has a damaged frame, or has too many pixels; any error of
    FFmpeg or Pillow for a broken file.
    """

    def read_frames() -> tuple[list[Tensor], Listing]:
        if _is_picture(file):
            return _read_picture_frames(file, cut, random_number)
        listed = listing or read_frame_listing(file)
        return _decode_frame_window(file, cut, cut.choose_frame_window(listed.count, random_number), listed), listed

    frames, listing = retry(read_frames)
    padding = frames[-1:] * (cut.num_frames - len(frames))
    return torch.stack(frames + padding), len(frames), listing


def _is_picture(file: Path | bytes) -> bool:
    """Returns whether a file is a picture and no video, by the suffix of its path or by its first bytes."""
    if isinstance(file, Path):
        return file.suffix.lower() in PICTURES
    return file.startswith(_SIGNATURES) or (file[:4] == b"RIFF" and file[8:12] == b"WEBP")


def count_frames(file: Path | bytes) -> int:
    """Returns the number of frames of a video or a picture file, given as path or bytes. Raises what `read_clip` raises
    for a broken file.
    """

    def count_once() -> int:
        if not _is_picture(file):
            return read_frame_listing(file).count
        with open_image(file if isinstance(file, Path) else io.BytesIO(file), _FORMATS) as image:
            return getattr(image, "n_frames", 1) - _count_pictures_before_animation(image)

    return retry(count_once)


def read_frame_listing(path: Path | bytes) -> Listing:
    """Counts the frames of a video, and lists its keyframes, at which decoding can begin. Takes both from the file's
    index or packets if these are reliable. Otherwise decodes the whole video to count, and lists no keyframes.

    Raises ConfigError if the file has no frame.
    """
    with _open_video_stream(path) as (container, stream):
        packaged = stream.codec_context.name in _PICTURE_CODECS or stream.codec_context.name == "libdav1d"
        indexed = packaged and "mp4" in container.format.name
        if indexed and stream.frames and stream.frames == len(stream.index_entries):
            entries = [stream.index_entries[place] for place in range(stream.frames)]
            if entries[0].is_keyframe and not any(entry.is_discard for entry in entries):
                delay = (stream.start_time or 0) - entries[0].timestamp
                return Listing(len(entries), _list_keyframe_places_and_times(entries, "timestamp"), delay=delay)
        elif packaged and ("mp4" in container.format.name or "matroska" in container.format.name):
            packets = [packet for packet in container.demux(stream) if packet.size]
            whole = not any(packet.is_discard or packet.is_corrupt or packet.pts is None for packet in packets)
            if packets and packets[0].is_keyframe and whole:
                return Listing(len(packets), _list_keyframe_places_and_times(packets, "pts"), "pts")
    with _open_video_stream(path) as (container, stream):
        count = sum(1 for _ in container.decode(stream))
    if not count:
        raise ConfigError("holds no frame")
    return Listing(count)


def _list_keyframe_places_and_times(packets: list[Any], time_attribute: str) -> tuple[tuple[int, int], ...]:
    """Returns (place in `packets`, time) of each keyframe. packets: a video's packets, or entries of its index.
    time_attribute: the name of their attribute that holds the time.
    """
    return tuple((place, getattr(packet, time_attribute)) for place, packet in enumerate(packets) if packet.is_keyframe)


@contextmanager
def _open_video_stream(file: Path | bytes) -> Iterator[tuple[Any, Any]]:
    """A context manager that opens a video. Yields (PyAV's container, its first video stream that is no cover picture).
    Raises ConfigError if there is no such stream, or if its frames have too many pixels.
    """
    import av  # only videos need it

    if isinstance(file, Path):
        refuse_special_file(file)
    # With "file:", FFmpeg takes no colon in a name for the end of a protocol.
    source = f"file:{file}" if isinstance(file, Path) else io.BytesIO(file)
    # Before its release 19 PyAV raises an error for titles that are no UTF-8.
    lenient = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
    with av.open(source, container_options=_OPTIONS, **lenient) as container:
        covers = av.stream.Disposition.attached_pic
        stream = next((stream for stream in container.streams.video if not stream.disposition & covers), None)
        if stream is None or stream.codec_context is None:
            raise ConfigError("has no video stream that can be decoded")
        require_below_pixel_cap(stream.codec_context.width, stream.codec_context.height)
        stream.codec_context.thread_count = 1  # the workers are the threads
        yield container, stream


def _decode_frame_window(path: Path | bytes, cut: Cut, window: range, listing: Listing) -> list[Tensor]:
    """Returns the frames whose numbers are in `window`, cropped, uint8 (C, H, W) each. Raises ConfigError if one of
    them is damaged, or if the file ends before the last.
    """
    frames: list[Tensor] = []
    number = -1
    for number, frame in _decode_frames_from_keyframe(path, window[0], listing):
        if number in window:
            if frame.is_corrupt:
                raise ConfigError(f"frame {number} is damaged")
            frames.append(_convert_frame_to_tensor(frame, cut))
            if len(frames) == len(window):
                return frames
    raise ConfigError(f"ends after {number + 1} of {listing.count} frames")


def _decode_frames_from_keyframe(path: Path | bytes, first_frame: int, listing: Listing) -> Iterator[tuple[int, Any]]:
    """Yields (number, PyAV's frame) of a video's frames in order. Begins at a keyframe at or before `first_frame`. If
    none has a number that is certain, begins at frame 0.
    """
    places = {time: place for place, time in listing.keyframes}
    before = [time for place, time in listing.keyframes if 0 < place <= first_frame]
    for time in before[:-3:-1]:  # two keyframes: with its leading pictures, one may lie behind `first`
        with _open_video_stream(path) as (container, stream):
            container.seek(time + listing.delay, stream=stream)
            packets = container.demux(stream)
            head, leading = _read_keyframe_and_leading_packets(packets)
            place = places.get(getattr(head[0], listing.timestamp)) if head else None
            if place is None or place + leading > first_frame:
                continue
            shown = (
                frame
                for packet in chain(head, packets)
                for frame in packet.decode()
                if frame.pts is None or frame.pts >= head[0].pts
            )
            keyframe = next(shown, None)
            if keyframe is not None and keyframe.pts == head[0].pts and not keyframe.is_corrupt:
                yield from enumerate(chain([keyframe], shown), place + leading)
                return
    with _open_video_stream(path) as (container, stream):
        yield from enumerate(container.decode(stream))


def _read_keyframe_and_leading_packets(packets: Iterator[Any]) -> tuple[list[Any], int]:
    """Reads a keyframe's packet and those after it, up to the first one that is shown later than the keyframe. Returns
    these packets, and how many of them are shown before the keyframe.

    Returns ([], 0) if the first packet is no keyframe, or if a packet has no timestamp.
    """
    head: list[Any] = []
    for packet in packets:
        if (packet.size and packet.pts is None) or (not head and not packet.is_keyframe):
            return [], 0
        head.append(packet)
        if not packet.size or packet.pts > head[0].pts:
            break
    return head, sum(1 for packet in head if packet.size and packet.pts < head[0].pts)


def _convert_frame_to_tensor(frame: Any, cut: Cut) -> Tensor:
    """Returns PyAV's frame as uint8 (C, H, W), turned as the file says and cropped."""
    transparent = any(component.is_alpha for component in frame.format.components)
    image = Image.fromarray(frame.to_ndarray(format="rgba" if transparent else "rgb24"))
    matrix = frame.side_data.get("DISPLAYMATRIX") if cut.upright else None
    turns = None if matrix is None else _find_transpositions(np.frombuffer(matrix, np.int32))
    if turns is not None:
        for turn in turns:
            image = image.transpose(turn)
    elif frame.rotation % 360:  # of a telephone held upright
        image = image.rotate(frame.rotation, expand=True)
    return _crop_image_to_tensor(image, cut)


def _find_transpositions(display_matrix: np.ndarray) -> list[Image.Transpose] | None:
    """Returns the turns and mirrorings that, one after another, have the effect of a video's display matrix, int32
    (9,). Returns None if the matrix has another effect, such as a turn by 45 degrees.

    The matrix moves the pixel (x, y) to (a x + c y, b x + d y), with a, b, c, d = display_matrix[[0, 1, 3, 4]].
    """
    a, b, c, d = np.sign(display_matrix[[0, 1, 3, 4]]).tolist()
    if (a and d and not (b or c)) or (b and c and not (a or d)):
        across, down = (a, d) if a else (c, b)
        turns = [] if a else [Image.Transpose.TRANSPOSE]
        turns += [Image.Transpose.FLIP_LEFT_RIGHT] * (across < 0) + [Image.Transpose.FLIP_TOP_BOTTOM] * (down < 0)
        return turns
    return None


def _read_picture_frames(file: Path | bytes, cut: Cut, random_number: float | None) -> tuple[list[Tensor], Listing]:
    """Reads a window of frames of a still or animated picture. Returns these frames, uint8 (C, H, W) each, and a
    listing with the number of all frames of the file.
    """
    with open_image(file if isinstance(file, Path) else io.BytesIO(file), _FORMATS) as image:
        skipped = _count_pictures_before_animation(image)
        count, frames = getattr(image, "n_frames", 1) - skipped, []
        for number in cut.choose_frame_window(count, random_number):
            image.seek(number + skipped)
            image.load()
            frames.append(_crop_image_to_tensor(turn_upright(image) if cut.upright else image, cut))
    return frames, Listing(count)


def _count_pictures_before_animation(image: Image.Image) -> int:
    """Returns how many pictures of a file come before its first frame: 1 for an animated PNG that begins with a
    separate still picture, else 0.
    """
    return int(getattr(image, "n_frames", 1) > 1 and bool(image.info.get("default_image")))


def _crop_image_to_tensor(image: Image.Image, cut: Cut) -> Tensor:
    """Returns a Pillow image with the channels of `cut`, scaled until it just covers the size of `cut` and cropped to
    its centre: uint8 (C, H, W).
    """
    return to_tensor(crop_center(convert_mode(image, cut.channels), cut.width, cut.height))
