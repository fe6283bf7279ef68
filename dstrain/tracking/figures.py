"""Formats an evaluation as a table and plots its curves by timestep; formats a duration in words.

`result` is what commands/evaluate.py writes as JSON: figures, standard_errors {name: value}, curves {name: values by
timestep}, timesteps, quarters {name: 4 values}; None stands for what is not finite. `vb` is special: bits per dimension
of one timestep, whose sum and prior make the bound.
"""

import os
from itertools import accumulate
from pathlib import Path
from typing import Any

from dstrain.disk.atomic import replace_file

_INK, _SECOND, _FAINT = "#1f4e9c", "#c2571a", "#8a8a8a"


def make_plot_title(result: dict[str, Any]) -> str:
    """Returns the title of an evaluation's plot: the run, the step, which weights, and how many samples were
    evaluated.
    """
    if "system" in result and result["system"] is None:  # a set of images, and no run
        return f"{result['run']}: {result['samples']} images"
    data = Path(result["data"]["path"]).name if result["split"] == "all" else result["split"].replace("_", "-")
    number = f"{result['samples']} {data} samples"
    if result["samples"] < result["samples_of_split"]:
        number = f"{result['samples']} of {result['samples_of_split']} {data} samples"
    chain = f", {len(result['timesteps'])} timesteps" if result["timesteps"] else ""
    precision = "" if result["precision"] == "fp32" else f", {result['precision']}"
    return f"{result['run']} at step {result['step']}, {make_weights_label(result)}: {number}{chain}{precision}"


def make_weights_label(result: dict[str, Any]) -> str:
    """Returns a short name for the weights that were evaluated: such as ema0.995, or raw for the training weights."""
    kinds = [kind for kind in result["weights"].values() if kind != "master"]
    return kinds[0].replace(".", "", 1) if kinds else "raw"


def format_evaluation_table(result: dict[str, Any]) -> str:
    """Formats all figures of an evaluation as a table with a title, one figure in each line."""

    def format_row(name: str, value: float | None, error: float | None = None, unit: str = "") -> str:
        """Formats one line of the table. A value of None was not finite; an error of None is left out."""
        number = "not finite" if value is None else f"{value:.5g}"
        return f"  {name:<26}{number:>11}" + (f" +- {error:<9.2g}" if error is not None else "") + unit

    bits = "  bits/dim" if "vb" in result["curves"] else ""
    lines = [make_plot_title(result)]
    lines += [
        format_row(name, value, result["standard_errors"][name], bits) for name, value in result["figures"].items()
    ]
    for name, curve in result["curves"].items():
        total = None if None in curve else sum(curve)
        mean = None if total is None else total / len(curve)
        lines.append(
            format_row("vb, sum over t", total, None, bits)
            if name == "vb"
            else format_row(f"{name}, mean{' over t' if result['timesteps'] else ''}", mean)
        )
    for name, values in result["quarters"].items():
        numbers = "".join(f"{'-' if value is None else f'{value:.5g}':>11}" for value in values)
        lines.append(f"  {name + ' by quarter of t':<26}{numbers}")
    if result["nonfinite_samples"]:
        lines.append(f"  samples with values that are not finite: {result['nonfinite_samples']}")
    if result["data"]["unreadable"]:
        lines.append(f"  unreadable images, each replaced by the next one: {len(result['data']['unreadable'])}")
    return "\n".join(lines)


def plot_evaluation(path: str | os.PathLike, result: dict[str, Any]) -> None:
    """Writes a PNG of an evaluation, whole or not at all. It shows the curves by timestep, and the similarities of
    embeddings by the number of sampling steps. An evaluation with neither gets a plot of the means by quarter of the
    timesteps.
    """
    panels = [_draw_variational_bound_terms, _draw_cumulative_variational_bound] if "vb" in result["curves"] else []
    others = set(result["curves"]) - {"vb"}
    panels += [_draw_error_curves if result["timesteps"] else _draw_curves_of_sorted_values] if others else []
    panels += [_draw_embedding_similarities] if _list_sampling_steps(result) else []
    _plot_panels(path, make_plot_title(result), panels or [_draw_means_by_timestep_quarter], result)


def plot_curves_of_sorted_values(path: str | os.PathLike, headline: str, curves: dict[str, list[float]]) -> None:
    """Writes a PNG of curves, each sorted from its largest value down, such as the use of each token. curves: {name:
    values}. The file is written whole or not at all.
    """
    _plot_panels(path, headline, [_draw_curves_of_sorted_values], {"curves": curves})


def plot_score_by_ema_width(path: str | os.PathLike, result: dict[str, Any]) -> None:
    """Writes a PNG of a score by the relative width of the average. `result` is what evaluating/sweep.py has measured;
    it names the score, the loss or a metric, as "judge".
    """
    split = result["split"].replace("_", "-")
    _plot_panels(
        path,
        f"{result['run']} at step {result['step']}: {result['samples']} {split} samples",
        [_draw_score_by_ema_width],
        result,
    )


def _plot_panels(path: str | os.PathLike, headline: str, panels: list[Any], result: dict[str, Any]) -> None:
    """Writes a PNG of several panels side by side below a headline. `panels` are functions (axes, result) that draw one
    each.
    """
    from matplotlib.figure import Figure  # slow to import, and only plots need it

    figure = Figure(figsize=(max(4.6 * len(panels), 7.0), 4.0), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        panel(axes, result)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9)
        axes.grid(True, which="major", color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(headline, fontsize=10)
    with replace_file(path) as file:
        figure.savefig(file, format="png", dpi=130)


def _draw_variational_bound_terms(axes: Any, result: dict[str, Any]) -> None:
    """Draws the terms of the variational bound by timestep."""
    values = _convert_none_to_nan(result["curves"]["vb"])
    _draw_curve_by_timestep(axes, result, values, color=_INK)
    _use_log_scale_if_positive(axes, [values])
    axes.set(title="the bound by timestep", ylabel="vb of one timestep, bits/dim")


def _draw_cumulative_variational_bound(axes: Any, result: dict[str, Any]) -> None:
    """Draws the sum of the bound's terms up to each timestep, and a line at the total."""
    values = list(accumulate(_convert_none_to_nan(result["curves"]["vb"])))
    _draw_curve_by_timestep(axes, result, values, color=_INK)
    total, prior = result["figures"].get("total"), result["figures"].get("prior")
    if total is not None and prior is not None:
        axes.axhline(total, color=_FAINT, linestyle="--", linewidth=1)
        axes.annotate(
            f"total {total:.4g} (prior {prior:.2g})",
            (0.03, total),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
            color="#555555",
            fontsize=9,
        )
        axes.set_ylim(min(0.0, *values), 1.1 * max(total, *values))
    axes.set(title="summed up to a timestep", ylabel="bits/dim")


def _draw_error_curves(axes: Any, result: dict[str, Any]) -> None:
    """Draws each curve but vb, such as the mean squared error of eps, by timestep."""
    known = {"mse": "mse of eps", "x_start_mse": "mse of x_start"}
    curves = {name: _convert_none_to_nan(values) for name, values in result["curves"].items() if name != "vb"}
    for (name, values), color in zip(curves.items(), (_INK, _SECOND, "#3a7d44", "#7b4aa0", _FAINT)):
        _draw_curve_by_timestep(axes, result, values, color=color, label=known.get(name, name))
    _use_log_scale_if_positive(axes, list(curves.values()))
    largest = max((value for values in curves.values() for value in values if value == value), default=0.0)
    if axes.get_yscale() == "log" and axes.get_ylim()[0] < 1e-6 * largest:
        axes.set_ylim(bottom=1e-6 * largest)  # errors of eps may be tiny at the timesteps of most noise
    axes.set(title="errors by timestep", ylabel="mean squared error")


def _draw_curves_of_sorted_values(axes: Any, result: dict[str, Any]) -> None:
    """Draws curves whose entries are not timesteps, such as the use of each token. Each is sorted from its largest
    value down.
    """
    for index, (name, values) in enumerate(result["curves"].items()):
        values = sorted(_convert_none_to_nan(values), reverse=True)
        axes.plot(values, label=name, color=(_INK, _SECOND, _FAINT)[index % 3], **_choose_line_style(values))
    axes.set(title="by column", xlabel="rank of the column")


def _draw_score_by_ema_width(axes: Any, result: dict[str, Any]) -> None:
    """Draws the score by the relative width of an average."""
    judge = result["judge"]
    pairs = sorted(zip(result["widths"], _convert_none_to_nan(result["scores"][judge])))
    axes.plot(*zip(*pairs), color=_INK, **_choose_line_style([value for _, value in pairs]))
    axes.set(
        title="averages chosen afterwards",
        xlabel="relative width of the average",
        ylabel="held-out loss" if judge == "loss" else judge,
    )


def _list_sampling_steps(result: dict[str, Any]) -> list[int]:
    """Returns the numbers of sampling steps n for which figures named similarity/n/... were measured, ascending."""
    return sorted(
        {
            int(name.split("/")[1])
            for name in result["figures"]
            if name.startswith("similarity/") and name.split("/")[1].isdigit()
        }
    )


def _draw_embedding_similarities(axes: Any, result: dict[str, Any]) -> None:
    """Draws the cosine similarity of embeddings that a prior samples with those of the image, the text and another
    text, by the number of sampling steps. Draws the similarity of text and image as a baseline, if it was measured.
    """
    figures, steps = result["figures"], _list_sampling_steps(result)
    colors = {"image": _INK, "text": _SECOND, "other_text": "#3a7d44"}
    for kind, color in colors.items():
        values = _convert_none_to_nan([figures.get(f"similarity/{count}/{kind}") for count in steps])
        if any(value == value for value in values):
            axes.plot(range(len(steps)), values, marker="o", markersize=5, color=color, label=kind.replace("_", " "))
    baseline = figures.get("similarity/text_image")
    if baseline is not None:
        axes.axhline(baseline, color=_FAINT, linestyle="--", linewidth=1, label="baseline (text and image)")
    axes.set(
        title="cosine of drawn embeddings with",
        xlabel="sampling steps",
        xticks=range(len(steps)),
        xticklabels=steps,
        xlim=(-0.5, len(steps) - 0.5),
    )


def _draw_means_by_timestep_quarter(axes: Any, result: dict[str, Any]) -> None:
    """Draws the means of each quantity in the four quarters of the timesteps."""
    for index, (name, values) in enumerate(result["quarters"].items()):
        axes.plot(
            range(4), _convert_none_to_nan(values), marker="o", label=name, color=(_INK, _SECOND, _FAINT)[index % 3]
        )
    axes.set(title="by quarter of the timesteps", xticks=range(4), xticklabels=["first", "second", "third", "last"])


def _draw_curve_by_timestep(axes: Any, result: dict[str, Any], values: list[float], **style: Any) -> None:
    """Draws values by timestep. If there are timesteps from 20 on, the horizontal axis is symlog, which spreads the
    first ones.
    """
    timesteps = result["timesteps"] or list(range(len(values)))
    last = timesteps[-1]
    if last >= 20:
        axes.set_xscale("symlog", linthresh=1, linscale=0.5)
        ticks = [0, *(10**power for power in range(len(str(last + 1))))]
        axes.set_xticks(ticks, map(str, ticks))
        axes.minorticks_off()
    axes.set_xlim(-0.08 if last >= 20 else -0.02 * max(last, 1), 1.1 * max(last, 1))
    axes.set_xlabel("timestep t (0 is the least noise)")
    axes.plot(timesteps, values, **_choose_line_style(values), **style)


def _choose_line_style(values: list[float]) -> dict[str, Any]:
    """Returns matplotlib's arguments for the line of a curve. Curves of at most 60 points get markers."""
    return {"linewidth": 1.6, "marker": "o" if len(values) <= 60 else None, "markersize": 3}


def _use_log_scale_if_positive(axes: Any, curves: list[list[float]]) -> None:
    """Makes the vertical axis logarithmic if all values of the curves are positive."""
    if all(value > 0 for values in curves for value in values if value == value):
        axes.set_yscale("log")


def _convert_none_to_nan(values: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def format_duration(seconds: float | None) -> str:
    """Formats a number of seconds for a person: 42 s, 3 min, 5.2 h, 2.1 days. Returns "-" if it is None or not
    finite.
    """
    if seconds is None or not abs(seconds) < float("inf"):
        return "-"
    for unit, length, digits in (("days", 86400, 1), ("h", 3600, 1), ("min", 60, 0)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.{digits}f} {unit}"
    return f"{max(seconds, 0):.0f} s"
