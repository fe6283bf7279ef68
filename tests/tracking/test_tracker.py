"""Oracle: the values that were handed in; an uninterrupted run for a resumed one."""

import json
import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from dstrain import recipe
from dstrain.recipe import Run, Track
from dstrain.tracking.pictures import make_grid
from dstrain.tracking.tracker import Tracker, read_metrics
from dstrain.tracking.videos import make_film_grid, tile_clip_frames
from tests.support.tracking import track_run

RUN = Run(steps=20, track=Track(wandb="disabled"))


def tracker(folder, step: int = 0, run: Run = RUN, parts=("denoiser",)) -> Tracker:
    return track_run(run, folder, parts, resumed_step=step)


def train(folder, first: int, last: int) -> None:
    """Steps first .. last, a report each second one, and figures that differ from run to run."""
    track = tracker(folder, first)
    for done in range(first + 1, last + 1):
        track.add_terms(
            "denoiser",
            {
                "loss": torch.tensor(done / 3),
                "mse": torch.arange(2.0),
                "quartile": torch.tensor([0, 3]),
                "loss_each": torch.tensor([done / 7, 1.0]),
            },
        )
        if done % 2 == 0:
            track.report_means(done, {"lr": 1e-4, "samples_per_second": float(np.random.default_rng().random())})
    track.close()


def steady(folder) -> list[str]:
    return [
        json.dumps({**entry, "timing": sorted(entry["timing"])}) for entry in read_metrics(folder / "metrics.jsonl")
    ]


def test_a_report_is_one_line_everywhere(tmp_path, capsys):
    """Oracle: the line and the JSON object written out by hand; json reads the file."""
    track = tracker(tmp_path)
    track.add_terms(
        "denoiser",
        {"loss": torch.tensor(0.123456), "loss_each": torch.tensor([0.5, 1.0]), "quartile": torch.tensor([1, 1])},
    )
    track.report_means(
        10,
        {
            "lr": 1e-4,
            "grad_norm": float("inf"),
            "skipped": 0,
            "samples_per_second": 35.125,
            "data_wait": 0.25,
            "peak_memory_gb": 1.5,
        },
    )
    track.close()
    line = (
        "step 10/20  loss 0.1235  lr 0.0001  grad_norm inf  skipped 0  samples_per_second 35.12  "
        "data_wait 0.25  "
        "peak_memory_gb 1.5\n"
    )
    assert capsys.readouterr().out == line == (tmp_path / "log.txt").read_text()
    assert [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {
            "step": 10,
            "loss": pytest.approx(0.123456),
            "loss_q1": 0.75,
            "lr": 1e-4,
            "grad_norm": None,
            "skipped": 0,
            "timing": {
                "samples_per_second": 35.125,
                "data_wait": 0.25,
                "peak_memory_gb": 1.5,
                "time": pytest.approx(0, abs=1e12),
            },
        }
    ]


def test_scores_and_notes(tmp_path, capsys):
    """Oracle: the lines and the entry written out by hand."""
    track = tracker(tmp_path)
    track.report_scores(10, {"loss": 0.5, "raw/loss": 0.25})
    track.log("complete")
    track.close()
    track.close()
    assert capsys.readouterr().out == "step 10/20  held_out/loss 0.5  held_out/raw/loss 0.25\ncomplete\n"
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 10, "held_out/loss": 0.5, "held_out/raw/loss": 0.25}]


def test_samples_are_a_grid_in_the_folder(tmp_path):
    """Oracle: the library's own grid (see test_pictures), against the files as Pillow reads them."""
    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    track = tracker(tmp_path)
    track.save_samples(500, images)
    track.save_samples(500, images, "reconstructions", columns=5)
    for name, columns in (("step_00000500.png", None), ("step_00000500_reconstructions.png", 5)):
        assert np.array_equal(np.asarray(Image.open(tmp_path / "samples" / name)), make_grid(images, columns))


@pytest.mark.parametrize("captions", [None, ["a hat moving up", "", "a shoe", "a bag", "a coat"]])
def test_videos_are_a_film_in_the_folder(tmp_path, captions):
    """Oracle: the library's own grid and strip (see test_videos), against the files as Pillow reads them."""
    clips = torch.randint(0, 256, (5, 4, 1, 16, 16), dtype=torch.uint8)
    track = tracker(tmp_path)
    track.save_samples(500, clips, columns=5, captions=captions)
    track.save_samples(500, clips[:, :1], "first", captions=captions)  # of one frame: a picture
    folder = tmp_path / "samples"
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_00000500.gif",
        "step_00000500.png",
        "step_00000500_first.png",
    ]
    with Image.open(folder / "step_00000500.gif") as image:
        frames = [np.asarray(frame.convert("L")) for frame in ImageSequence.Iterator(image)]
    assert np.array_equal(np.stack(frames)[..., None], make_film_grid(clips, 5, captions))
    pixels = np.asarray(Image.open(folder / "step_00000500.png"))
    assert np.array_equal(pixels[..., None], tile_clip_frames(clips, captions))
    pixels = np.asarray(Image.open(folder / "step_00000500_first.png"))
    assert np.array_equal(pixels[..., None], make_grid(clips[:, 0], None, captions))


def test_curves_are_drawn(tmp_path):
    """Oracle: a file for each curve, the same for the same values and another for others."""
    track = tracker(tmp_path)
    for done, values in ((1, [0.5, 0.25, 0.25]), (2, [0.25, 0.25, 0.5]), (3, [0.9, 0.1, 0.0])):
        track.report_scores(done, {"loss": 0.5}, {"usage": values})
    files = [tmp_path / "samples" / f"step_0000000{done}_usage.png" for done in (1, 2, 3)]
    assert sorted((tmp_path / "samples").iterdir()) == files
    first, second, third = (np.asarray(Image.open(path))[60:] for path in files)  # below the title
    assert np.array_equal(first, second) and not np.array_equal(first, third)  # by rank


@pytest.mark.parametrize("tail", [b"", b'{"step": 12, "lo', b'{"step": 1', b"\xff\xfe\n\n[]\n3\n{}\n"])
def test_resumed_metrics_equal_those_of_an_uninterrupted_run(tmp_path, tail):
    """Oracle: the undisturbed run's lines, all but timing's values, whatever kill -9 left at the end."""
    train(tmp_path / "whole", 0, 20)
    train(tmp_path / "parts", 0, 13)  # killed at 13; the newest checkpoint is of 10
    with open(tmp_path / "parts" / "metrics.jsonl", "ab") as file:
        file.write(tail)
    train(tmp_path / "parts", 10, 20)
    assert steady(tmp_path / "parts") == steady(tmp_path / "whole")
    assert len(steady(tmp_path / "whole")) == 10
    train(tmp_path / "parts", 0, 4)  # from scratch
    assert steady(tmp_path / "parts") == steady(tmp_path / "whole")[:2]


def test_a_terminal_has_a_bar(tmp_path, monkeypatch, capsys):
    """Oracle: the line and the bar's share and count written by hand; nothing on stdout."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    track = tracker(tmp_path, 4)
    track.move_progress_bar(10)
    track.report_means(10, {"lr": 1e-4})
    track.close()
    printed = capsys.readouterr()
    assert printed.out == "" and "step 10/20  lr 0.0001" in printed.err
    assert re.search(r"50%\|.*10/20", printed.err)
    assert (tmp_path / "log.txt").read_text() == "step 10/20  lr 0.0001\n"


def test_other_ranks_write_nothing(tmp_path, monkeypatch, capsys):
    """Oracle: the run folder's absence and silent streams, with ranks faked as the second of two."""
    from dstrain.distributed import group

    monkeypatch.setattr(group, "rank", lambda: 1)
    monkeypatch.setattr(group, "world", lambda: 2)
    monkeypatch.setattr(group, "sum_over_ranks", lambda values: 2 * values)
    track = tracker(tmp_path / "run")
    track.add_terms("denoiser", {"loss": torch.tensor(1.0)})
    track.report_means(10, {})
    track.report_scores(10, {})
    track.save_samples(10, torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    track.log("x")
    track.close()
    assert not (tmp_path / "run").exists() and capsys.readouterr() == ("", "")


def test_a_folder_that_can_not_be_written_is_said_once(tmp_path, capsys):
    """Oracle: one message for each of two paths that are blocked, over two reports."""
    track = tracker(tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "samples").write_text("a file")
    for done in (1, 2):
        track.report_means(done, {"lr": 1e-4})
        track.save_samples(done, torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
        track.save_samples(done, torch.zeros(1, 2, 3, 8, 8, dtype=torch.uint8))
        track.report_scores(done, {}, {"usage": [1.0, 0.0]})
    track.close()
    printed = capsys.readouterr().out
    assert printed.count("metrics.jsonl can not be written") == printed.count("samples can not be written") == 1
    assert "step 2/20" in printed


def test_half_written_lines_are_dropped_and_reported(tmp_path, capsys):
    """Oracle: the whole lines that were put in: after half of a line, before one, and glued to one."""
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "a": 2.0}\n{"step": 2, "a{"step": 3, "b": 1.0}\n{"step": 4}\n{"st'
    )
    (tmp_path / "log.txt").write_text("one\ntw")
    assert [entry["step"] for entry in read_metrics(tmp_path / "metrics.jsonl")] == [1, 3, 4]
    track = tracker(tmp_path, step=3)
    track.close()
    line = "half-written lines were dropped: 2 of metrics.jsonl, 1 of log.txt\n"
    assert capsys.readouterr().out == line and (tmp_path / "log.txt").read_text() == f"one\n{line}"
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": 2.0}\n{"step": 3, "b": 1.0}\n'
    tracker(tmp_path, step=3).close()
    assert capsys.readouterr().out == ""


def test_tensorboard_that_is_missing_is_named(tmp_path, monkeypatch):
    """Oracle: the command that installs it, in the message of a ValueError."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        tracker(tmp_path, run=RUN.model_copy(update={"track": Track(wandb="disabled", tensorboard=True)}))


def test_tensorboard_holds_the_curves(tmp_path):
    """Oracle: tensorboard's own EventAccumulator: steps and values of scalars, steps of pictures,
    the recipe as YAML.
    """
    pytest.importorskip("tensorboard", reason="tensorboard is optional and not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track = tracker(tmp_path, run=RUN.model_copy(update={"track": Track(wandb="disabled", tensorboard=True)}))
    track.report_means(10, {"lr": 0.5})
    track.report_scores(10, {"loss": 0.25}, {"usage": [0.5, 0.25]})
    track.save_samples(10, torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    track.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("held_out/loss")] == [(10, 0.25)]
    assert events.Images("held_out/usage")[0].step == 10
    texts = {
        name: events.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()
        for name in ("recipe", "machine")
    }
    (tmp_path / "recipe.yaml").write_text(texts["recipe"].strip("`\n"))
    assert recipe.load_recipe(tmp_path / "recipe.yaml").steps == 20 and '"world": 1' in texts["machine"]
    assert [(e.step, e.value) for e in events.Scalars("train/lr")] == [(10, 0.5)]
    assert events.Images("samples")[0].step == 10
