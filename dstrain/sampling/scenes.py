"""Long videos: they go on from given frames, and scene after scene, each from the last frames of the scene before.

Notation: a clip has T frames, of which K are given, K = 1 + m * p with p the system's temporal_patch_size. Villegas et
al. 2022 (Phenaki, arXiv 2210.02399), section 2.2: the tokens of given frames are kept, those behind them are drawn.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dstrain import rng
from dstrain.data.decode.clips import PICTURES, VIDEOS, Cut, read_clip
from dstrain.data.decode.pixels import find_samples_npz, read_samples_npz
from dstrain.data.files.listing import walk_files
from dstrain.recipe import ConfigError, Data, reword_errors
from dstrain.systems.base import Request, System

_LATEST = 1 - 2**-53  # of read_clip's chances: the last window of a file


@dataclass(frozen=True)
class Length:
    """Holds the number of frames of one clip, and `primed`: how many of them are given, the last frames of an earlier
    clip.
    """

    frames: int
    primed: int


@dataclass(frozen=True)
class Scene:
    """A part of a long clip, its frames first .. first + frames - 1."""

    caption: str
    first: int
    frames: int


def choose_clip_length(system: System, frames: int | None, primed: int | None, has_scenes: bool) -> Length:
    """Returns the number of frames of a clip, and how many of them are given (`primed`).

    frames  None: as many as the system's longest clip has.
    primed  None: 1 with `has_scenes`. Otherwise 1 + p, where p is the system's temporal_patch_size, or 1 if the clip
            has no more than 1 + p frames.

    Raises ConfigError if the system's clips cannot have so many frames, or so many given ones.
    """
    unit, frames = system.temporal_patch_size, frames or system.num_frames
    if (frames - 1) % unit:
        below = frames - (frames - 1) % unit
        raise ConfigError(
            f"--num-frames {frames}: clips of this model have 1 + k * {unit} frames: ask for {below} or {below + unit}"
        )
    if frames > system.num_frames:
        raise ConfigError(
            f"--num-frames {frames}: clips of this model have {system.num_frames} at most: ask for no "
            "more, and go on from the last ones (--scenes)"
        )
    if primed is None:
        return Length(frames, 1 + unit if 1 + unit < frames and not has_scenes else 1)
    if (primed - 1) % unit or primed >= frames:
        raise ConfigError(f"--prime-frames {primed}: give 1 + m * {unit} of the {frames} frames, and not all")
    return Length(frames, primed)


def assign_frames_to_scenes(captions: tuple[str, ...], length: Length) -> list[Scene]:
    """Returns a Scene for each caption of a long video, with the frames that are drawn for it: length.frames for the
    first scene, length.frames - length.primed for each later one.
    """
    ends = [length.frames + number * (length.frames - length.primed) for number in range(len(captions))]
    return [Scene(caption, first, end - first) for caption, first, end in zip(captions, [0, *ends], ends)]


def draw_further_scenes(
    system: System,
    clips: Tensor,
    seeds: Tensor,
    scenes: list[dict[str, Tensor]],
    primed: int,
    request: Request,
    draw_clips: Callable[[Request], Tensor],
) -> Tensor:
    """Continues clips uint8 (N, T, C, H, W) by one scene after the other, and returns the whole videos, (N, T', C, H,
    W).

    seeds       int64 (N,), the seeds of `clips`, from which the seeds of further scenes are derived.
    scenes      the conditions of each further scene, {name: (N, ...), or (1, ...) for all clips}.
    primed      how many last frames each scene begins with; these are not drawn again.
    request     gives the sampler, steps and guidance of all scenes.
    draw_clips  draw_clips(request) returns the N clips of a request, uint8 (N, T, C, H, W).
    """
    for texts in scenes:
        seeds = rng.keys_of_seeds(seeds)
        conditions = {name: values.expand(len(clips), *values.shape[1:]) for name, values in texts.items()}
        conditions |= system.conditions_from(clips[:, -primed:])
        scene = draw_clips(replace(request, seeds=seeds, conditions=conditions))
        clips = torch.cat((clips, scene[:, primed:]), dim=1)
    return clips


def read_prime_frames(path: Path, data: Data, temporal_patch_size: int, primed: int, require_all: bool) -> Tensor:
    """Reads the last K frames of each clip, from which videos are continued: uint8 (N, K, C, H, W). `path` is a video
    or picture, a folder of them, or an .npz of samples.

    primed       K, if all clips have so many frames.
    require_all  whether ConfigError is raised if a clip has fewer; if not, K is the largest 1 + m * temporal_patch_size
                 that all clips have.

    Videos and pictures are scaled and cropped to the size of the run's data. Raises ConfigError, with the file's name,
    if a file cannot be read, or an .npz has another size.
    """
    path = find_samples_npz(path)
    clips = (
        _read_npz_clips(path, data)
        if path.suffix == ".npz"
        else [_read_last_frames(file, data, primed) for file in _list_prime_files(path)]
    )
    shortest = min(map(len, clips))
    if require_all and shortest < primed:
        raise ConfigError(
            f"--prime {path}: there are {shortest} frames, and --prime-frames {primed} are to be given: "
            "give a longer clip, or fewer frames"
        )
    count = min(primed, shortest - (shortest - 1) % temporal_patch_size)
    return torch.stack([clip[-count:] for clip in clips])


def _list_prime_files(path: Path) -> list[Path]:
    """Returns [path] for a file; for a folder its videos and pictures, without an .mp4 if there is a .gif of the same
    name. Raises ConfigError if the folder holds none.
    """
    if not path.is_dir():
        return [path]
    files = [path / name for name in sorted(walk_files(path, "", (*VIDEOS, *PICTURES)))]
    # generate writes each clip as a GIF, which is exact, and as an MP4.
    files = [file for file in files if file.suffix != ".mp4" or file.with_suffix(".gif") not in files]
    if not files:
        raise ConfigError(f"--prime {path} holds no video and no picture: give files such as .mp4, .gif or .png")
    return files


def _read_last_frames(file: Path, data: Data, max_frames: int) -> Tensor:
    """Returns the last `max_frames` frames of a video or picture, or all if it has fewer, in the size of the run's
    data. Raises ConfigError if the file cannot be read.
    """
    try:
        clip, real, _ = read_clip(
            file, Cut(max_frames, *_get_frame_size(data), data.channels, upright=data.upright), _LATEST
        )
    except Exception as error:  # a hostile file may raise anything
        raise ConfigError(
            f"--prime {file} cannot be read ({' '.join(str(error).split())[:150]}): give a video or a picture"
        ) from None
    return clip[:real]


def _read_npz_clips(path: Path, data: Data) -> Tensor:
    """Returns the videos or pictures in an .npz, uint8 (N, T, C, H, W), T being 1 for pictures. Raises ConfigError if
    they have another dtype or size than the run's data.
    """
    with reword_errors("--prime "):
        array = read_samples_npz(path)
    array = array[:, None] if array.ndim == 4 else array
    size = _get_frame_size(data)
    if array.dtype != np.uint8 or array.ndim != 5 or array.shape[2:4] != size or array.shape[4] != 3 or not len(array):
        raise ConfigError(
            f"--prime {path}: arr_0 is {array.dtype} {array.shape}, and this run goes on from uint8 "
            f"(N, T, {size[0]}, {size[1]}, 3)"
        )
    channels = array[..., :1] if data.channels == 1 else array  # grey is written as three equal channels
    return torch.from_numpy(channels).permute(0, 1, 4, 2, 3)


def _get_frame_size(data: Data) -> tuple[int, int]:
    """Returns the height and the width of a frame in pixels."""
    return data.height or data.image_size, data.image_size
