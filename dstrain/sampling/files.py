"""The files that dstrain generate writes, round by round: the ranks share the single files, rank 0 writes the rest.

samples/000000.png              pictures; of videos .gif and .mp4. With a caption 000000-a-sneaker-moving-left.gif.
                                The folder holds nothing else: tools that score a folder take all of it
grid.png, grid.gif              the first pictures; of videos the .png shows frames side by side
samples_NxHxWx3.npz             arr_0, as ADM's evaluator reads it, of videos (N, T, H, W, 3); arr_1, the labels
                                int64 (N,) of a class-conditional run; prompts, where there were texts
prompts.txt, captions.jsonl     the texts, and which file of samples/, seed and frames belong to them
embeddings.npy                  of a prior, instead of all pictures
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dstrain.data.files.listing import SAMPLES
from dstrain.disk.atomic import replace_file, write_file
from dstrain.distributed import group
from dstrain.recipe import ConfigError
from dstrain.sampling.scenes import Scene
from dstrain.tracking.pictures import Album, composite_on_white, make_grid, save_png
from dstrain.tracking.videos import (
    FPS,
    convert_clip_to_frames,
    make_film_grid,
    make_safe_file_name,
    save_gif,
    save_mp4,
    tile_clip_frames,
)

FORMATS = ("gif", "mp4")
_IN_GRID = 256  # pictures
_CLIPS_IN_GRID = 64  # clips


@dataclass(frozen=True)
class About:
    """Describes all samples of a command, and says which files are written and how."""

    num: int
    seed: int = 0
    columns: int | None = None  # of the grid
    labels: Tensor | None = None  # int64 (num,)
    captions: Sequence[str] | None = None  # one a sample
    scenes: Sequence[Scene] | None = None  # of every sample
    files: bool = True  # one for each sample, too
    formats: Sequence[str] = FORMATS  # of videos
    fps: int = FPS

    def make_file_stem(self, number: int) -> str:
        """Returns the file name of a sample, without the suffix: its seed in six digits and its caption, if any."""
        caption = make_safe_file_name(self.captions[number]) if self.captions else ""
        return f"{self.seed + number:06d}" + (f"-{caption}" if caption else "")


class Pictures:
    """Writes pictures uint8 (n, C, H, W) or videos (n, T, C, H, W) into the folder `out`. All ranks call it, each with
    all samples.
    """

    def __init__(self, out: Path, about: About) -> None:
        self.out, self.about = out, about
        self.first: list[Tensor] = []
        self.album: Album | None = None
        self.videos = False

    def add_samples(self, numbers: Tensor, samples: Tensor) -> None:
        """Saves the samples (n, ...) with these numbers, each rank its share, unless about.files is false. Rank 0 also
        keeps them for the grid and the .npz. All ranks call this with the same samples, in the order of the numbers.
        Videos of one frame are saved as pictures.
        """
        if samples.ndim == 5 and samples.shape[1] == 1:
            samples = samples[:, 0]
        self.videos = samples.ndim == 5
        for number, sample in zip(numbers.tolist(), samples) if self.about.files else ():
            if number % group.world() == group.rank():
                self._save_sample(self.out / SAMPLES / self.about.make_file_stem(number), sample)
        if group.rank() == 0:
            if sum(map(len, self.first)) < (_CLIPS_IN_GRID if self.videos else _IN_GRID):
                self.first.append(samples)
            # The layout of ADM's evaluator: channels last, grey repeated.
            samples = composite_on_white(samples)
            array = samples.expand(*samples.shape[:-3], 3, *samples.shape[-2:]).movedim(-3, -1).contiguous().numpy()
            self.album = self.album or Album(self.out, (self.about.num, *array.shape[1:]))
            self.album.add_pictures(array)

    def _save_sample(self, stem: Path, sample: Tensor) -> None:
        if not self.videos:
            save_png(f"{stem}.png", sample.permute(1, 2, 0).numpy())
            return
        frames = convert_clip_to_frames(sample)
        for kind in self.about.formats:
            {"gif": save_gif, "mp4": save_mp4}[kind](f"{stem}.{kind}", frames, self.about.fps)

    def close(self) -> None:
        """Writes, on rank 0, the files about all samples: the grid, then the prompts and captions if there are texts,
        and last the .npz. Does nothing on other ranks.
        """
        if group.rank() != 0:
            return
        about, first = self.about, torch.cat(self.first)[: _CLIPS_IN_GRID if self.videos else _IN_GRID]
        captions = about.captions and about.captions[: len(first)]
        if self.videos:
            save_gif(self.out / "grid.gif", make_film_grid(first, about.columns, captions), about.fps)
        save_png(
            self.out / "grid.png",
            tile_clip_frames(first, captions) if self.videos else make_grid(first, about.columns, captions),
        )
        arrays = {} if about.labels is None else {"arr_1": about.labels.cpu().numpy().astype(np.int64)}
        if about.captions:
            _write_prompts(self.out, [scene.caption for scene in about.scenes] if about.scenes else about.captions)
            kind = (about.formats[0] if self.videos else "png") if about.files else None
            lines = (
                {
                    "file": kind and f"{about.make_file_stem(number)}.{kind}",
                    "caption": caption,
                    "seed": about.seed + number,
                }
                | ({"scenes": [asdict(scene) for scene in about.scenes]} if about.scenes else {})
                for number, caption in enumerate(about.captions)
            )
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            write_file(self.out / "captions.jsonl", text)
            arrays["prompts"] = np.array(about.captions)
        self.album.close(**arrays)


class Embeddings:
    """Collects embeddings float32 (n, D), and writes them with the texts that they were drawn for."""

    def __init__(self, out: Path, about: About) -> None:
        self.out, self.about, self.rows = out, about, []

    def add_samples(self, numbers: Tensor, embeddings: Tensor) -> None:
        """Keeps embeddings (n, D) until `close` writes them in the order of the calls. `numbers` has no effect."""
        self.rows.append(embeddings)

    def close(self) -> None:
        """Writes, on rank 0, all embeddings that were added to embeddings.npy, and the texts, if any, to
        prompts.txt.
        """
        if group.rank() == 0:
            with replace_file(self.out / "embeddings.npy") as temporary, open(temporary, "wb") as file:
                np.save(file, torch.cat(self.rows).float().numpy())
            if self.about.captions:
                _write_prompts(self.out, self.about.captions)


def _write_prompts(out: Path, texts: Sequence[str]) -> None:
    write_file(out / "prompts.txt", "".join(f"{' '.join(text.split())}\n" for text in texts))


def choose_samples_folder(out: Path | None, parent: Path) -> Path:
    """Returns the folder into which samples are written, which need not exist: `out`, or if it is None the first of
    PARENT/generated, PARENT/generated_2, ... that holds no samples and is no symbolic link.

    Raises ConfigError if `out` cannot be written, or holds samples already.
    """

    if out is None:
        paths = (parent / name for name in chain(["generated"], (f"generated_{number}" for number in count(2))))
        return next(path for path in paths if not (_has_samples(path) or path.is_symlink()))
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out} cannot be made below {existing}: name a folder that can be written")
    require_folder_without_samples(out)
    return out


def require_folder_without_samples(out: Path) -> None:
    """Raises ConfigError if the folder `out` holds samples already."""
    if _has_samples(out):
        raise ConfigError(f"--out {out} holds samples already: name another folder, or empty it")


def _has_samples(path: Path) -> bool:
    """Returns whether a folder holds samples: an .npz of samples, embeddings.npy, or anything in its folder of
    pictures.
    """
    # Pictures alone are those of a command that was stopped: they would mix with others.
    return path.is_dir() and any(
        chain(path.glob("samples_*.npz"), path.glob("embeddings.npy"), path.glob(f"{SAMPLES}/*"))
    )
