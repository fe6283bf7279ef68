"""Metrics while a run trains (every.metrics): the same as of dstrain evaluate --metrics, with fewer pictures.

Pictures are drawn with the recipe's sampler, for all classes or captions in turn. Each depends on its seed alone, so
the metrics are equal on any number of ranks. The pictures are compared with the run's own data, or with
samples.reference, whose statistics are computed once and cached in the run's folder.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path

from torch import Tensor

from dstrain.data.builtin.fashion import FASHION_PATH
from dstrain.data.builtin.moving import MOVING
from dstrain.data.open import find_path_before_encoding, open_if_builtin
from dstrain.data.source import Source
from dstrain.distributed import group
from dstrain.distributed.progress import get_phases
from dstrain.metrics import reference, table
from dstrain.metrics.compared import Compared, open_recipe_reference
from dstrain.metrics.images import Batch, Images, Sourced
from dstrain.metrics.network import Features
from dstrain.metrics.statistics import KEPT, Statistics
from dstrain.recipe import ConfigError, Run, reword_errors
from dstrain.recipe.patterns import match_patterns_to_caption
from dstrain.sampling.draw import draw_samples_of_rank
from dstrain.sampling.requests import (
    adapt_samples_section_for_metrics,
    list_built_in_captions,
    make_sampling_request_and_captions,
)
from dstrain.systems.base import Nets, Request, System

_BATCH = 100  # pictures of the data that are described at once
_OPTIONS = {"--features ": "samples.features: ", "--metrics ": "samples.metrics: "}  # the recipe's words


class Quality:
    """Measures metrics of pictures that a model draws while it trains. Call `prepare_reference` once before `measure`.

    The constructor raises ConfigError if the system or the data do not suit the metrics, or if networks or the
    reference cannot be opened; it draws nothing.
    """

    def __init__(self, run: Run, metrics: Sequence[str], system: System, train: Source, unseen: Source | None) -> None:
        samples, data, key = run.samples, run.data, f"every.metrics={run.every.metrics}"
        self.metrics, self._run, self._system = tuple(metrics), run, system
        if not system.generates or (reason := system.find_drawing_problem()):
            raise ConfigError(
                f"{key}: {run.system} draws no pictures while it trains"
                f"{f' ({reason})' if system.generates else ''}: write every.metrics=0"
            )
        if system.starts_from_data:
            raise ConfigError(
                f"{key}: {run.system} draws from given pictures: write every.metrics=0, and measure it "
                "by dstrain evaluate RUN --metrics"
            )
        with reword_errors(options=_OPTIONS):
            self._networks = table.open_metric_networks(metrics, samples.features)
        own = open_if_builtin(data, samples.metrics_split)
        if own is None and any(network.name == "builtin" for network in self._networks.values()):
            raise ConfigError(
                f"samples.metrics: {', '.join(metrics)} by the built-in classifier is for the "
                f"built-in clothes, and {data.path} holds other data: write samples.metrics=[fid] "
                "samples.features=[inception:FILE], say, or every.metrics=0"
            )
        compared = {name: network for name, network in self._networks.items() if table.METRICS[name].compares}
        if samples.reference is None:
            self._compared = _open_run_data_as_reference(
                run, compared, own, train if samples.metrics_split == "train" else unseen
            )
        else:
            with reword_errors(options=_OPTIONS):
                self._compared = open_recipe_reference(samples.reference, data, compared, KEPT)
        self._request, self._captions = make_sampling_request_and_captions(
            adapt_samples_section_for_metrics(samples, data, system), system, samples.metrics_samples, samples.seed
        )
        if "accuracy" in metrics and self._captions is None and "label" not in self._request.conditions:
            raise ConfigError(
                "samples.metrics: accuracy needs labels or captions, and this model is told none: leave it out"
            )
        counted_apart = [
            any(match_patterns_to_caption(data.leave_out, caption)) for caption in dict.fromkeys(self._captions or ())
        ]
        if counted_apart and all(counted_apart) and {"accuracy", "clip_score"} & {*metrics}:
            raise ConfigError(
                "samples.prompts: data.leave_out names all of them, and what these metrics tell of pictures is of the "
                "others: add one of the others"
            )

    def prepare_reference(self, folder: Path) -> None:
        """Gets the statistics of the reference ready for `measure`: reads them from the file that an earlier command
        has written into the run's folder, or computes them and writes this file. All ranks call it together.
        """
        get_phases().enter_phase("describing the data for every.metrics")
        self._data = self._compared.collect_missing_statistics(partial(self._read_or_collect_statistics, folder))

    def _read_or_collect_statistics(
        self, folder: Path, images: Images, compared: dict[str, Features]
    ) -> dict[str, Statistics]:
        """Returns {network's name: statistics of the reference}, on the rank's device. Reads them from the run's folder
        if a file there is of the same images and networks. Otherwise computes them from `images`, and rank 0 writes the
        file; a full disk is no error.

        compared: {metric: its network}. Prints a note if earlier metrics of the run were compared with another
        reference. All ranks call it together.
        """
        networks = {network.name: network for network in compared.values()}
        data = self._run.data
        key = json.dumps(
            [
                {name: network.fingerprint for name, network in networks.items()},
                sorted(table.list_needed_statistic_names(list(compared))),
                self._compared.identity,
                [data.image_size, data.height, data.num_frames, data.channels, data.draft, data.upright],
            ]
        )
        path = folder / f"metrics_data_{hashlib.blake2b(key.encode(), digest_size=6).hexdigest()}.npz"
        statistics = {}
        if group.rank() == 0 and path.exists():
            with suppress(ConfigError):  # a damaged file is written anew
                statistics = reference.read_reference_statistics(path, networks.values(), "cpu")
        statistics = group.broadcast_from_first(statistics)
        if table.list_metrics_without_statistics(compared, statistics):
            if group.rank() == 0 and not path.exists() and any(folder.glob("metrics_data_*.npz")):
                get_phases().print_lines(
                    f"note: every.metrics: {self._compared.place} is not what earlier figures of this run were "
                    "compared with, by its files, size or networks: figures from here on stand apart from those"
                )
            statistics = table.collect_statistics(images, compared, _BATCH, is_reference=True)
            if group.rank() == 0:
                with suppress(ConfigError):  # a full disk: the next start describes them again
                    reference.write_reference_statistics(path, statistics)
        return {name: _move_statistics_to_device(values) for name, values in statistics.items()}

    def measure(self, nets: Nets, max_batch: int) -> dict[str, float]:
        """Draws pictures with the networks `nets`, and measures them. Returns {metric: value}, the same on all ranks.
        `max_batch` is the most pictures that a rank draws at a time. Leaves out values of single classes. All ranks
        call it together.
        """
        drawn = _Drawn(self, nets)
        chunk = min(max_batch, -(-len(drawn) // group.world()))
        measured = table.collect_statistics(drawn, self._networks, chunk, left_out=self._run.data.leave_out)
        values = table.compute_metrics(self._networks, measured, self._data)
        return {name: value for name, (value, _) in values.items() if "/" not in name}

    def compute_score(self, figures: dict[str, float]) -> float | None:
        """Returns the score by which checkpoints are compared, of which the lowest is the best. It is the value in
        `figures` of the metric that save.best names, negated if a high value is good. Returns None if save.best names
        no metric.

        figures   {metric: value}, as `measure` returns it
        """
        best = self._run.save.best
        if not isinstance(best, str):
            return None
        return -figures[best] if best in table.HIGHER else figures[best]


class _Drawn(Images):
    """The set of images that the networks draw for the request of a Quality; each rank draws its share."""

    def __init__(self, quality: Quality, nets: Nets) -> None:
        self.quality, self.nets = quality, nets
        self.captions = quality._captions

    def __len__(self) -> int:
        return len(self.quality._request.seeds)

    def iterate_batches(self, batch_size: int) -> Iterator[Batch]:
        quality = self.quality
        return draw_batches(quality._system, self.nets, quality._request, self.captions, batch_size)


def draw_batches(
    system: System, nets: Nets, request: Request, captions: list[str] | None, batch_size: int
) -> Iterator[Batch]:
    """Draws the samples of a request on all ranks. Yields this rank's share in batches of at most `batch_size`. All
    ranks must call it and take all batches.

    captions   one for each sample, None: there are none
    """
    labels, count = request.conditions.get("label"), len(request.seeds)
    for numbers, images in draw_samples_of_rank(system, nets, request, batch_size):
        numbers = numbers[numbers < count]
        if len(numbers):
            yield Batch(
                numbers,
                images[: len(numbers)],
                None if labels is None else labels[numbers],
                captions and [captions[number] for number in numbers.tolist()],
            )


def _open_run_data_as_reference(
    run: Run, compared: dict[str, Features], builtin: Source | None, source: Source | None
) -> Compared:
    """Opens the run's own data as the reference of its metrics.

    builtin  built-in pictures of the split; None if the data are not built-in
    source   the data of the split, which are used, in one shape, if `builtin` is None; None if no data are held out

    Raises ConfigError if both are None, or if `builtin` is None and the data are cached codes instead of pictures.
    """
    data = run.data
    if builtin is None and source is None:
        raise ConfigError(f"samples.metrics_split=held_out: {data.path} holds nothing out: write train")
    if builtin is None and data.codes is not None:
        raise ConfigError(
            f"every.metrics={run.every.metrics}: {data.path} holds codes, and not the pictures to compare with: name "
            "those as samples.reference=FOLDER, or statistics of them as samples.reference=FILE.npz"
        )
    chosen = builtin or source.make_single_shape_view()
    return Compared({}, Sourced(chosen), compared, data.path, chosen.compute_fingerprint())


def _move_statistics_to_device(statistics: Statistics) -> Statistics:
    """Moves the tensors in `statistics` to the rank's device, in place, and returns the same object."""
    for field in fields(statistics):
        if isinstance(value := getattr(statistics, field.name), Tensor):
            setattr(statistics, field.name, value.to(group.device()))
    return statistics


def build_training_metrics(run: Run, system: System, train: Source, unseen: Source | None) -> Quality | None:
    """Returns a Quality, which measures once in `every.metrics` steps; its `prepare_reference` is not called yet.
    Returns None if every.metrics is 0 or there is no metric.

    If samples.metrics is None, the metrics are chosen. With a samples.reference they are fid or, for videos, fvd.
    Without one, they are fd for the built-in clothes and clips, and also accuracy if samples are drawn from labels or
    captions; there are none for other data.

    Raises ConfigError if the constructor of Quality does. Also raises it, even with every.metrics=0, if a metric or a
    network is unknown, or if save.best names a metric that is not measured.
    """
    metrics = run.samples.metrics
    with reword_errors(options=_OPTIONS):
        table.require_known_metrics(metrics or (), run.samples.features)
    if run.every.metrics and metrics is None and run.samples.reference is not None:
        metrics = ("fid",) if system.num_frames is None else ("fvd",)
    elif run.every.metrics and metrics is None:
        draws = system.generates and not system.starts_from_data and not system.find_drawing_problem()
        name = find_path_before_encoding(run.data)
        asked = list_built_in_captions(run.data, system) or (
            name == FASHION_PATH and "label" in system.make_conditions(1)
        )
        metrics = ()
        if draws and name in (FASHION_PATH, MOVING):
            metrics = ("fd", "accuracy") if asked else ("fd",)
    best, measures = run.save.best, run.every.metrics and metrics
    quality = Quality(run, metrics, system, train, unseen) if measures else None
    if isinstance(best, str) and best not in (*table.LOWER, *table.HIGHER):
        raise ConfigError(f"save.best={best}: it may be one of {', '.join((*table.LOWER, *table.HIGHER))}")
    if isinstance(best, str) and best not in (metrics or ()):
        raise ConfigError(
            f"save.best={best} needs that metric, and these data and this model have "
            f"{' and '.join(metrics or ('none',))} by default: name it in samples.metrics"
        )
    return quality


def build_and_prepare_training_metrics(
    run: Run, system: System, train: Source, unseen: Source | None
) -> Quality | None:
    """Returns the Quality of `build_training_metrics`, ready to measure; None if the run measures no metrics. Calls
    `prepare_reference`, which may compute statistics of the whole reference. All ranks call it together. Raises
    ConfigError if `build_training_metrics` does.
    """
    quality = build_training_metrics(run, system, train, unseen)
    if quality is not None:
        quality.prepare_reference(run.directory)
    return quality
