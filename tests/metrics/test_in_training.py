"""Metrics in training without training: a system that draws images of the data, on one rank and on two."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dstrain import train
from dstrain.data.builtin.fashion import Fashion, classify_shades, map_captions_to_item_and_shade
from dstrain.distributed.watchdog import Watchdog
from dstrain.engine.ema.shadow import EmaShadow
from dstrain.metrics import table
from dstrain.metrics.features import open_feature_network
from dstrain.metrics.in_training import build_and_prepare_training_metrics, build_training_metrics
from dstrain.recipe import ConfigError, Run
from dstrain.systems.base import Batch, Nets, Request, System
from tests.support import counting, gloo, towers

NUM = 130


class Copies(System):
    """Draws image `seed` of the train split, whose classes come in turn, as do its labels."""

    parts, averaged, calls = {"net": None}, (), 0

    def networks(self) -> dict[str, nn.Module]:
        return {"net": nn.Linear(1, 1)}

    def make_conditions(self, num: int, labels: tuple[int, ...] | None = None) -> dict[str, Tensor]:
        return {"label": torch.arange(num) % 10}

    def synthetic(self, batch_size: int) -> Batch:
        raise NotImplementedError

    def sample(self, nets: Nets, request: Request) -> Tensor:
        self.calls += 1
        return Fashion(28, 1).images[request.seeds][:, None]


def run_in(folder: Path, **sections) -> Run:
    samples = {"metrics": ["fd", "accuracy"], "metrics_samples": NUM, "seed": 3} | sections.pop("samples", {})
    return Run(
        folder=folder,
        data={"path": "builtin:fashion", "image_size": 28, "channels": 1},
        samples=samples,
        **{"every": {"metrics": 5}} | sections,
    )


def measured(rank: int, *folders: str) -> list[tuple[dict[str, float], int, list[str]]]:
    """Of each run its figures, the calls of `sample`, and the files that hold the data's features."""
    results = []
    for folder in folders:
        system, source = Copies(), Fashion(28, 1)
        figures = build_and_prepare_training_metrics(run_in(Path(folder)), system, source, None).measure({}, 16)
        results.append((figures, system.calls, sorted(path.name for path in Path(folder).iterdir())))
    return results


def test_figures_on_one_rank_and_two(tmp_path):
    """Oracle: Frechet's formula in numpy and the classifier's own labels, over images 3 to 132 of the train split."""
    features, logits = open_feature_network("builtin")(Fashion(28, 1).images[:, None])
    labels = logits.argmax(1).numpy()
    rows, drawn = features.double().numpy(), features.double().numpy()[3 : 3 + NUM]
    cross = np.linalg.eigvals(np.cov(drawn.T) @ np.cov(rows.T)).real.clip(0) ** 0.5
    distance = (
        np.square(drawn.mean(0) - rows.mean(0)).sum() + np.trace(np.cov(drawn.T) + np.cov(rows.T)) - 2 * cross.sum()
    )
    shown = (labels[3 : 3 + NUM] == np.arange(NUM) % 10).mean()  # seeds begin at 3, labels at 0
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    alone = measured(0, one)
    two = gloo.run(tmp_path, measured, one, other)  # the first reads what one rank has written
    for (figures, calls, files), expected_calls in zip((*alone, *two[0], *two[1]), (9, 5, 5, 5, 5)):
        assert figures == pytest.approx({"fd": distance, "accuracy": shown}, rel=1e-6)
        assert calls == expected_calls and files == alone[0][2] and len(files) == 1
    assert two[0] == two[1]


class Told(Copies):
    """Draws the same images, told by texts."""

    takes_texts = True

    def conditions_from_texts(self, texts: list[str]) -> dict[str, Tensor]:
        return {"text": torch.zeros(len(texts), 1)}


def told_of(folder: str, samples: dict[str, Any] | None = None, **data: Any) -> Run:
    run = run_in(Path(folder), samples=samples or {})
    return run.model_copy(update={"data": run.data.model_copy(update={"captioned": True, **data})})


def told(rank: int, folder: str, patterns: tuple[str, ...]) -> dict[str, float]:
    run = told_of(folder, leave_out=patterns)
    return build_and_prepare_training_metrics(run, Told(), Fashion(28, 1), None).measure({}, 16)


def test_captions_left_out_are_counted_apart(tmp_path):
    """Oracle: the classifier's items and the pixels' shades of the images that stand at the captions, which come in
    turn; on one rank and on two. Prompts that are all left out are refused.
    """
    asked = [*map_captions_to_item_and_shade().items()]
    images = Fashion(28, 1).images[3 : 3 + NUM]
    items, shades = (
        open_feature_network("builtin")(images[:, None])[1].argmax(1).tolist(),
        classify_shades(images).tolist(),
    )
    expected = {"": [], "_left_out": []}
    for number in range(NUM):
        caption, (item, shade) = asked[number % len(asked)]
        apart = caption == "a dark trouser" or caption.startswith("a light s")
        parts = items[number] == item, shades[number] == shade
        expected["_left_out" if apart else ""].append((all(parts), *parts))
    means = {f"accuracy{name}": np.mean(rows, axis=0).tolist() for name, rows in expected.items()}
    folder, patterns = str(tmp_path / "run"), ("A dark trouser", "*light s*")
    first = told(0, folder, patterns)
    for figures in (first, *gloo.run(tmp_path, told, folder, patterns)):
        for name, values in means.items():
            found = [figures[key] for key in (name, f"{name}_item", f"{name}_shade")]
            assert found == pytest.approx(values, abs=1e-9)
    assert len(expected["_left_out"]) == 25 and len(first) == 7
    whole = told(0, folder, ())
    assert whole["fd"] == first["fd"] and len(whole) == 4
    assert whole["accuracy"] == pytest.approx(np.mean([row[0] for rows in expected.values() for row in rows]))
    run = told_of(folder, {"prompts": ["a red hat"], "metrics": ["clip_score"]}, leave_out=("*hat",), path=".")
    run = run.model_copy(
        update={"samples": run.samples.model_copy(update={"features": (f"clip:{tmp_path / 'clip'}",)})}
    )
    towers.clip(tmp_path / "clip")
    towers.preprocessing(tmp_path / "clip")
    with pytest.raises(ConfigError, match="samples.prompts: data.leave_out names all of them"):
        build_training_metrics(run, Told(), Fashion(28, 1), None)


def test_features_of_the_data_are_kept(tmp_path, monkeypatch):
    """Oracle: the calls that describe data: none for the same ones, one for other ones or where the file is damaged."""
    described, collect = [], table.collect_statistics
    monkeypatch.setattr(
        table, "collect_statistics", lambda *args, **options: described.append(1) or collect(*args, **options)
    )
    source, path = Fashion(28, 1, "held_out"), tmp_path / "run"

    def opened(**samples) -> int:
        described.clear()
        build_and_prepare_training_metrics(run_in(path, samples=samples), Copies(), Fashion(28, 1), source)
        return len(described)

    assert [opened(metrics_split="held_out"), opened(metrics_split="held_out"), opened()] == [1, 0, 1]
    files = sorted(path.iterdir())
    for file in files:
        file.write_bytes(file.read_bytes()[:1000])
    assert opened() == 1 and opened() == 0 and sorted(path.iterdir()) == files


@pytest.mark.parametrize(
    "best, figures, score",
    [
        ("fd", {"fd": 2.5}, 2.5),
        ("accuracy", {"accuracy": 0.75}, -0.75),
        (True, {"fd": 2.5}, None),
        (False, {"fd": 2.5}, None),
    ],
)
def test_the_lowest_score_is_the_best(tmp_path, best, figures, score):
    """Oracle: by hand: a distance counts as it is, an accuracy as its negative; the held-out loss is no metric."""
    quality = build_training_metrics(run_in(tmp_path, save={"best": best}), Copies(), Fashion(28, 1), None)
    assert quality.compute_score(figures) == score


class Still(Copies):
    generates = False


class Enlarging(Copies):
    starts_from_data = True


@pytest.mark.parametrize(
    "system, sections, message",
    [
        (Still, {}, "every.metrics=5: dit draws no pictures while it trains: write every.metrics=0"),
        (Enlarging, {}, "every.metrics=5: dit draws from given pictures"),
        (
            Copies,
            {"samples": {"metrics": ["fid"]}},
            "samples.metrics: fid needs a network: samples.features: inception",
        ),
        (Copies, {"samples": {"metrics": ["beauty"]}}, "samples.metrics: beauty: known are fid"),
        (
            Copies,
            {"samples": {"features": ["dinov2:nowhere"], "metrics": ["fd_dinov2"]}},
            "samples.features: dinov2:nowh",
        ),
        (
            Copies,
            {"samples": {"metrics_split": "held_out"}, "data": {"path": "."}},
            "the built-in classifier is for the",
        ),
        (Copies, {"samples": {"metrics": ["pr"]}, "save": {"best": "pr"}}, "save.best=pr: it may be one of fd, fid"),
        (counting.Counting, {}, "accuracy needs labels or captions"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, system, sections, message):
    """Oracle: the beginning of the line that a user reads before anything is trained."""
    run = run_in(tmp_path, **{name: values for name, values in sections.items() if name != "data"})
    run = run.model_copy(update={"data": run.data.model_copy(update=sections.get("data", {}))})
    instance = system(counting.Config()) if system is counting.Counting else system()
    with pytest.raises(ConfigError) as caught:
        build_training_metrics(run, instance, Fashion(28, 1), None)
    assert message in str(caught.value)


class Unlabelled(Copies):
    def make_conditions(self, num: int, labels: tuple[int, ...] | None = None) -> dict[str, Tensor]:
        return {}


@pytest.mark.parametrize(
    "system, data, steps, metrics",
    [
        (Copies, "builtin:fashion", 5, {"fd", "accuracy"}),
        (Unlabelled, "builtin:fashion", 5, {"fd"}),
        (Copies, ".", 5, None),
        (Still, "builtin:fashion", 5, None),
        (Copies, "builtin:fashion", 0, None),
    ],
)
def test_metrics_by_default(tmp_path, system, data, steps, metrics):
    """Oracle: by hand: what the built-in data and the model allow, where the recipe names none; nothing elsewhere."""
    run = run_in(tmp_path, samples={"metrics": None}, every={"metrics": steps})
    run = run.model_copy(update={"data": run.data.model_copy(update={"path": data})})
    quality = build_training_metrics(run, system(), Fashion(28, 1), None)
    assert quality is None if metrics is None else set(quality.metrics) == metrics


@pytest.mark.parametrize(
    "system, best, message",
    [
        (Copies, "fd", None),
        (Copies, "accuracy", None),
        (Still, "fd", "save.best=fd needs that metric, and"),
        (Unlabelled, "accuracy", "this model have fd by default: name it in samples.metrics"),
        (Copies, "xyz", "save.best=xyz: it may be one of fd, fid"),
        (Still, "xyz", "save.best=xyz: it may be one of"),
    ],
)
def test_the_best_by_a_metric_of_the_default(tmp_path, system, best, message):
    """Oracle: by hand: what is measured where the recipe names no metrics may be chosen by, and nothing else."""
    run = run_in(tmp_path, samples={"metrics": None}, save={"best": best})
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        assert best in build_training_metrics(run, system(), Fashion(28, 1), None).metrics


class Shown:
    """What EmaShadow uses of Masters: one flat, and a way to show another."""

    def __init__(self) -> None:
        self.flats, self.shown = [torch.zeros(1)], 0

    @contextmanager
    def use_flat_tensors_as_weights(self, values: list[Tensor]) -> Iterator[None]:
        self.shown = int(values[0])
        yield
        self.shown = 0


class Shifted(Copies):
    """Draws as many images of the train split further on as its weight says."""

    averaged = ("net",)

    def sample(self, nets: Nets, request: Request) -> Tensor:
        return Fashion(28, 1).images[request.seeds + nets["net"].shown][:, None]


def test_every_average_is_measured(tmp_path):
    """Oracle: Quality.measure of networks with each average's weight, a decay and a width; the first has no prefix."""
    run, masters, reports = run_in(tmp_path, ema={"decays": [0.9], "profiles": [0.1]}), {"net": Shown()}, []
    ema, quality = (
        EmaShadow(masters, run.ema, ("net",)),
        build_and_prepare_training_metrics(run, system := Shifted(), Fashion(28, 1), None),
    )
    expected = {}
    for name, prefix, weight in ((0.9, "", 40.0), (0.1, "ema_0.1/", 700.0)):
        ema.flats["net"][name][0].fill_(weight)
        masters["net"].shown = int(weight)
        expected |= {f"{prefix}{key}": value for key, value in quality.measure(masters, 16).items()}
    with Watchdog(tmp_path, 0, 0, 600) as watchdog:
        tracker = SimpleNamespace(report_scores=lambda done, scores, kind: reports.append((done, scores, kind)))
        train.measure_sample_quality(
            SimpleNamespace(
                run=run,
                system=system,
                ema=ema,
                quality=quality,
                watchdog=watchdog,
                micro=16,
                engines=SimpleNamespace(modules=masters),
                tracker=tracker,
            ),
            5,
        )
    assert reports == [(5, expected, "metrics")] and expected["fd"] != expected["ema_0.1/fd"]


@pytest.mark.parametrize(
    "sections, message",
    [
        ({"save": {"best": "fd"}, "every": {"metrics": 0}}, "save.best=fd needs that metric: set every.metrics"),
        ({"save": {"best": "fd"}, "samples": {"metrics": ["accuracy"]}}, "save.best=fd needs that metric"),
        ({"samples": {"metrics": []}}, "every.metrics=5: samples.metrics names none"),
    ],
)
def test_sections_that_disagree(tmp_path, sections, message):
    """Oracle: the line that names both entries and the remedy."""
    with pytest.raises(ValueError, match=message):
        run_in(tmp_path, **sections)
