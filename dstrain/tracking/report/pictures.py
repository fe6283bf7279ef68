"""Makes pictures of a run small enough that many of them fit into a page: as they are, or smaller as WebP."""

import base64
import io
import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from dstrain.disk import small

_LARGEST = 256 * small.MEGABYTE  # bytes of a file that is opened
_WIDTHS = (1600, 1100, 760, 520, 360, 240)  # tried in turn until a picture fits
_FILM_WIDTHS = _WIDTHS[2:]
_FRAMES = 64  # of a film that is made smaller
_NAME = re.compile(r"step_(\d{1,18})(?:_(\w+))?\.(png|gif)")
_KINDS = {"PNG": "image/png", "GIF": "image/gif", "WEBP": "image/webp"}


def find_pictures_by_kind_and_step(samples: Path) -> dict[str, dict[int, Path]]:
    """Returns the pictures in a run's samples/ by kind and step: {"samples": {500: PATH, ...}, "reconstruction": ...}.

    For a video, the path is that of the GIF, and not of the PNG with its frames side by side.
    """
    found: dict[str, dict[int, Path]] = {}
    for path in sorted(samples.glob("step_*"), key=lambda path: (path.suffix == ".gif", path.name)):
        if match := _NAME.fullmatch(path.name):
            found.setdefault(match[2] or "samples", {})[int(match[1])] = path
    return {
        name: dict(sorted(steps.items()))
        for name, steps in sorted(found.items(), key=lambda item: (item[0] != "samples", item[0]))
    }


def select_evenly_spaced_steps(steps: Sequence[int], max_steps: int) -> list[int]:
    """Returns at most `max_steps` of the steps: evenly spaced ones, with the first and the last among them."""
    if len(steps) <= max_steps:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / max(max_steps - 1, 1))] for place in range(max_steps)]


def make_picture_data_url(path: Path, max_bytes: int) -> str:
    """Returns a picture or a GIF as a data: URL. If its file has more than `max_bytes` bytes, encodes it anew in about
    that size.

    Raises OSError or ValueError if it is not a readable PNG, GIF or WebP.
    """
    content = small.read_bytes(path, _LARGEST)
    try:
        with Image.open(io.BytesIO(content), formats=tuple(_KINDS)) as image:
            image.load()
            kind = _KINDS[image.format]
            if len(content) > max_bytes:
                content, kind = _encode_shrunk_picture(image, max_bytes), _KINDS["WEBP"]
    except (SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(error) from None
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _encode_shrunk_picture(image: Image.Image, max_bytes: int) -> bytes:
    """Returns a picture encoded as WebP, as wide as fits into `max_bytes` bytes; if no width in _WIDTHS fits, the
    narrowest. An animation stays one, of at most 64 frames.
    """
    count = getattr(image, "n_frames", 1)
    widths = [min(width, image.width) for width in (_WIDTHS if count == 1 else _FILM_WIDTHS)]
    duration = image.info.get("duration", 100) * count // min(count, _FRAMES)
    frames = []
    for number in select_evenly_spaced_steps(range(count), _FRAMES):
        image.seek(number)
        frames.append(_resize_to_width(image.convert("RGB"), widths[0]))  # as small as may be: a film has many frames
    for width in dict.fromkeys(widths):
        file = io.BytesIO()
        first, *others = (_resize_to_width(frame, width) for frame in frames)
        film = {"save_all": True, "append_images": others, "duration": duration, "loop": 0} if others else {}
        first.save(file, "WEBP", quality=80, method=2, **film)
        if file.tell() <= max_bytes:
            break
    return file.getvalue()


def _resize_to_width(image: Image.Image, width: int) -> Image.Image:
    """Returns a picture resized to this width, with the same aspect ratio; the picture itself if it has that width."""
    return (
        image
        if width == image.width
        else image.resize((width, max(1, round(image.height * width / image.width))), Image.Resampling.LANCZOS)
    )
