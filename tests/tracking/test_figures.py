"""The table and the plot of an evaluation."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from dstrain.tracking import figures


def result(**changes) -> dict:
    """A bound over five timesteps, as evaluate gives it."""
    return {
        "run": "tiny",
        "step": 60,
        "weights": {"denoiser": "ema.0.99"},
        "split": "held_out",
        "samples": 20,
        "samples_of_split": 500,
        "precision": "fp32",
        "data": {"path": "builtin:fashion", "unreadable": []},
        "figures": {"total": 3.25, "prior": 0.25},
        "standard_errors": {"total": 0.125, "prior": None},
        "curves": {"vb": [2.0, 0.5, 0.25, 0.125, 0.125], "mse": [0.9, 0.5, 0.3, 0.2, 0.1]},
        "timesteps": [0, 250, 500, 749, 999],
        "quarters": {},
        "nonfinite_samples": 0,
    } | changes


QUARTERS = {
    "curves": {},
    "timesteps": None,
    "figures": {"loss": 0.5},
    "standard_errors": {"loss": 0.01},
    "quarters": {"loss": [0.1, 0.2, 0.7, None]},
}
CASES = {
    "bound": ({}, 3),
    "no bound": ({"curves": {"mse": [0.9, 0.5]}, "timesteps": [0, 1]}, 1),
    "quarters": (QUARTERS, 1),
    "not finite": (
        {
            "curves": {"vb": [1.0, None], "mse": [None, 0.5]},
            "timesteps": [0, 9],
            "figures": {"total": None, "prior": 0.1},
            "nonfinite_samples": 2,
        },
        3,
    ),
    "below zero": ({"curves": {"vb": [1.0, -0.1], "mse": [0.0, 0.5]}, "timesteps": [0, 9]}, 3),
    "one timestep": ({"curves": {"vb": [3.0], "mse": [0.5]}, "timesteps": [0]}, 3),
    "nothing": ({"curves": {}, "timesteps": None, "figures": {}, "standard_errors": {}}, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_plot(tmp_path, case):
    """Oracle: Pillow reads one picture, as wide as its panels, with ink in each; nothing else is left in the folder."""
    changes, panels = CASES[case]
    figures.plot_evaluation(tmp_path / "plot.png", result(**changes))
    pixels = np.asarray(Image.open(tmp_path / "plot.png").convert("L"))
    assert pixels.shape[1] == pytest.approx(130 * max(4.6 * panels, 7.0), abs=2)
    assert all((part < 100).any() for part in np.array_split(pixels, panels, axis=1))
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]


def test_a_curve_is_drawn_where_its_values_lie(tmp_path):
    """Oracle: the bytes of the same picture for the same values, of another one for other values of either curve."""

    def drawn(name: str, **curves) -> bytes:
        figures.plot_evaluation(tmp_path / name, result(curves=result()["curves"] | curves))
        return (tmp_path / name).read_bytes()

    assert drawn("a.png") == drawn("b.png")
    for name in ("vb", "mse"):
        assert drawn("c.png", **{name: [9.0, 0.01, 0.25, 0.3, 0.1]}) != drawn("a.png")


def test_similarities_are_drawn(tmp_path, monkeypatch):
    """Oracle: the lines that matplotlib is given: a cosine for each number of steps, and the baseline."""
    measured = {"loss": 0.5, "similarity/text_image": 0.34}
    for steps, image in ((64, 0.42), (8, 0.31)):
        measured |= {
            f"similarity/{steps}/image": image,
            f"similarity/{steps}/text": image + 0.1,
            f"similarity/{steps}/other_text": 0.1,
            f"similarity/{steps}/above_baseline": image - 0.24,
        }
    seen = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: (seen.append(figure), Path(path).touch()))
    figures.plot_evaluation(tmp_path / "plot.png", result(curves={}, timesteps=None, figures=measured))
    (axes,) = seen[0].axes
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert lines == {
        "image": [0.31, 0.42],
        "text": pytest.approx([0.41, 0.52]),
        "other text": [0.1, 0.1],
        "baseline (text and image)": [0.34, 0.34],
    }
    assert [label.get_text() for label in axes.get_xticklabels()] == ["8", "64"]


def test_table():
    """Oracle: the lines by hand: errors beside the figures, the sum of vb, the mean of other curves."""
    lines = figures.format_evaluation_table(result()).splitlines()
    assert lines[0] == "tiny at step 60, ema0.99: 20 of 500 held-out samples, 5 timesteps"
    assert [line.split() for line in lines[1:]] == [
        ["total", "3.25", "+-", "0.12", "bits/dim"],
        ["prior", "0.25", "bits/dim"],
        ["vb,", "sum", "over", "t", "3", "bits/dim"],
        ["mse,", "mean", "over", "t", "0.4"],
    ]
    lines = figures.format_evaluation_table(
        result(
            **QUARTERS,
            weights={"denoiser": "master"},
            precision="bf16",
            samples=500,
            nonfinite_samples=2,
            data={"path": "/x/photos", "unreadable": ["a", "b"]},
            split="all",
        )
    ).splitlines()
    assert lines[0] == "tiny at step 60, raw: 500 photos samples, bf16"
    assert lines[1].split() == ["loss", "0.5", "+-", "0.01"]
    assert lines[2].split() == ["loss", "by", "quarter", "of", "t", "0.1", "0.2", "0.7", "-"]
    assert lines[3] == "  samples with values that are not finite: 2"
    assert lines[4] == "  unreadable images, each replaced by the next one: 2"
