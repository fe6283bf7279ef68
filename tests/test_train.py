"""What training shows and says, without its engines: grids of videos and texts, and the last line."""

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from dstrain.commands import job
from dstrain.data.source import Source
from dstrain.recipe import ConfigError, Run
from dstrain.runs.folders import describe_run_end
from dstrain.sampling.draw import draw_all_samples
from dstrain.systems.base import Request, System
from dstrain.tracking.videos import make_film_grid
from dstrain.train import draw_and_save_samples
from tests.support import counting
from tests.support.tracking import track_run


class Clips(Source):
    """Videos of one grey each."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict:
        return {"video": torch.full((5, 1, *counting.SIZE), 10 * index, dtype=torch.uint8), "frames": 5}

    def name_sample(self, index: int) -> str:
        return f"clip {index}"

    def compute_fingerprint(self) -> str:
        return "clips"


def shown(folder: Path, system: System, **samples) -> list[str]:
    """What `show` leaves in a folder."""
    run = Run(samples={"num": 5, "seed": 3} | samples, track={"wandb": "disabled"})
    tracker = track_run(run, folder, ("net",))
    engines, ema = (
        SimpleNamespace(modules=system.networks()),
        SimpleNamespace(use_averages_as_weights=lambda decay: nullcontext()),
    )
    watchdog = SimpleNamespace(enter_phase=lambda step, phase: None)
    draw_and_save_samples(
        SimpleNamespace(
            run=run, system=system, engines=engines, ema=ema, shown=Clips(), micro=2, tracker=tracker, watchdog=watchdog
        ),
        10,
    )
    tracker.close()
    return sorted(path.name for path in (folder / "samples").iterdir())


def frames_of(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.stack([np.asarray(frame.convert("L")) for frame in ImageSequence.Iterator(image)])[..., None]


@pytest.mark.parametrize("prompts", [("a hat", "a coat moving"), None])
def test_videos_are_shown(tmp_path, prompts):
    """Oracle: the system's own clips for the recipe's seeds and texts, which repeat, in the library's own grid."""
    system = counting.build(counting.Config())
    texts = prompts and [prompts[i % 2] for i in range(5)]
    assert shown(tmp_path, system, prompts=prompts, num_frames=3) == ["step_00000010.gif", "step_00000010.png"]
    conditions = {"words": torch.tensor([[len(text)] for text in texts])} if texts else {}
    clips = draw_all_samples(system, system.networks(), Request(3 + torch.arange(5), conditions, num_frames=3), 5)
    found = frames_of(tmp_path / "samples" / "step_00000010.gif")
    assert len(found) == 3 and np.array_equal(found, make_film_grid(clips, None, texts))


def test_pictures_of_videos_are_shown(tmp_path):
    """Oracle: the held-out clips inverted, in the library's own grid; a first stage draws nothing else."""

    class Stage(counting.Counting):
        generates, starts_from_data = False, True

    assert shown(tmp_path, Stage(counting.Config())) == ["step_00000010_inverted.gif", "step_00000010_inverted.png"]
    found = frames_of(tmp_path / "samples" / "step_00000010_inverted.gif")
    clips = torch.stack([255 - Clips()[index]["video"] for index in range(5)])
    assert np.array_equal(found, make_film_grid(clips))


@pytest.mark.parametrize(
    "samples, model, message",
    [
        ({"num_frames": 4}, {}, "samples.num_frames=4: clips of this model have 1 + k * 2 frames"),
        ({"num_frames": 7}, {}, "samples.num_frames=7: this model has 5 at most"),
        ({"prompts": ["a"]}, {"generates": False}, "samples.prompts: counting draws nothing for texts while it trains"),
        ({"num_frames": 3}, {"generates": False}, "samples.num_frames=3: counting draws no videos"),
        ({"num_frames": 3, "prompts": ["a"]}, {"generates": False, "every": 0}, None),
        ({"num_frames": 3, "prompts": ["a"]}, {}, None),
    ],
)
def test_what_cannot_be_shown_is_refused(samples, model, message):
    """Oracle: the beginning of the one line that a user reads before anything is trained."""
    system = type("Changed", (counting.Counting,), model)(counting.Config())
    run = Run(system="counting", samples=samples, every={"sample": model.get("every", 100)})
    with nullcontext() if message is None else pytest.raises(ConfigError, match=re.escape(message)):
        job._require_drawable_samples(run, system)


def test_the_last_line(tmp_path):
    """Oracle: the line written by hand: of samples only where some were drawn."""
    run = Run(steps=20)
    assert (
        describe_run_end(run, tmp_path, 0, 20, 20, None) == f"complete: 20 steps, saved in {tmp_path / 'checkpoints'}"
    )
    (tmp_path / "samples").mkdir()
    assert describe_run_end(run, tmp_path, 0, 20, 20, None).endswith(f"checkpoints, samples in {tmp_path / 'samples'}")
