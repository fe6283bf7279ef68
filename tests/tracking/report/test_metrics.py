"""metrics.jsonl as columns."""

import json

import numpy as np
import pytest

from dstrain.tracking.report import metrics


def test_columns(tmp_path):
    """Oracle: the lines written by hand: half of one, texts, other JSON and steps that are none are counted."""
    path = tmp_path / "metrics.jsonl"
    lines = [
        json.dumps(line)
        for line in (
            {"step": 2, "loss": 0.5, "timing": {"samples_per_second": 8, "time": 100.0}},
            {"step": 2, "held_out/loss": 0.7},
            {"step": 6, "loss": None, "word": "x", "flag": True, "huge": 10**400},
            {"step": 4, "loss": 0.25},
            {"step": True},
            {"step": -1},
            {"loss": 1},
            [1],
            3,
        )
    ]
    path.write_bytes("\n".join([*lines, "free text", "{" * 5000, '{"step": 8, "lo']).encode() + b"\n\xff\n\n")
    columns = metrics.read_metrics_columns(path)
    assert columns.foreign == 10 and columns.steps.tolist() == [2, 2, 4, 6]
    assert [array.tolist() for array in columns.get_steps_and_values("loss")] == [
        [2, 4, 6],
        pytest.approx([0.5, 0.25, np.nan], nan_ok=True),
    ]
    assert (
        columns.get_steps_and_values("samples_per_second")[1].tolist() == [8.0]
        and columns.get_steps_and_values("none")[1].tolist() == []
    )
    assert (
        columns.find_last_finite_value("loss") == 0.25
        and columns.find_last_finite_value("huge") is None
        and columns.find_last_finite_value("flag") is None
    )
    assert columns.times.tolist() == pytest.approx([100.0, np.nan, np.nan, np.nan], nan_ok=True)
    assert len(metrics.read_metrics_columns(tmp_path / "absent").steps) == 0
    latest, when = metrics.read_newest_values(path)
    assert latest["step"] == 4 and latest["samples_per_second"] == 8 and when == 100.0


def test_thinned_curves_look_the_same():
    """Oracle: the extremes of each column of pixels, of all values and of those that are kept."""
    values = np.random.default_rng(0).normal(size=100_000)
    values[70_000:70_400], values[12_345] = np.nan, 50.0
    kept = metrics.select_curve_indices(values, 1000)
    assert len(kept) <= 1002 and kept[0] == 0 and kept[-1] == len(values) - 1 and 12_345 in kept
    for pixel in range(0, len(values), 5000):
        inside = kept[(kept >= pixel) & (kept < pixel + 5000)]
        for extreme in (np.nanmin, np.nanmax):
            assert extreme(values[inside]) == extreme(values[pixel : pixel + 5000])
    assert np.isnan(values[kept]).any()  # a gap stays one
    assert metrics.select_curve_indices(values[:1000], 1000).tolist() == list(range(1000))


@pytest.mark.parametrize(
    "times, starts, seconds",
    [
        ([110, 120, 130], [100.0], [10, 20, 30]),
        ([110, 120, 5130], [100.0, 5120.0], [10, 20, 30]),  # a pause before the second start
        ([110, 120, 9010], [100.0, 500.0, 9000.0], [10, 20, 30]),  # a start that has reported nothing between
        ([None, None, None], [], [4, 8, 12]),  # 8 samples at 2 a second
        ([None, None, 130], [], [4, 8, 12]),
        ([None, 120, 130], [], [4, 8, 18]),
    ],
)
def test_hours(tmp_path, times, starts, seconds):
    """Oracle: seconds counted by hand; without times, samples by their rate."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {
                    "step": 2 * row,
                    "images_seen": 8 * row,
                    "timing": {"samples_per_second": 2} | ({} if time is None else {"time": time}),
                }
            )
            + "\n"
            for row, time in enumerate(times, 1)
        )
    )
    assert metrics.compute_training_hours(metrics.read_metrics_columns(path), starts) * 3600 == pytest.approx(seconds)
    path.write_text('{"step": 1, "loss": 2}\n')
    assert metrics.compute_training_hours(metrics.read_metrics_columns(path), []) is None
