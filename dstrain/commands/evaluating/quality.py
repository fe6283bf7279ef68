"""How good a run's pictures are: FID and its like, of what it draws against a reference, or of two sets of images.

Nothing is written but the figures: each rank turns the pictures that it draws into features and forgets them.
"""

import hashlib
import json
import math
import platform
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dstrain import __version__, systems
from dstrain.checkpoint.manifest import read_manifest
from dstrain.commands.options.evaluate import EvaluateOptions
from dstrain.data.open import open_builtin, open_sources, open_split
from dstrain.data.source import Source
from dstrain.data.views import Spread
from dstrain.disk import atomic
from dstrain.distributed import group
from dstrain.distributed.progress import Bar
from dstrain.encoders.precision import choose_dtype, compute_in, require_precision
from dstrain.metrics import clips, reference, table
from dstrain.metrics.features import open_features
from dstrain.metrics.images import Images, Sourced, open_set
from dstrain.metrics.network import Features
from dstrain.metrics.sampled_sets import SAMPLING, Drawn, QualityOptions, Stories
from dstrain.metrics.statistics import Statistics
from dstrain.recipe import ConfigError, Run, reword_errors
from dstrain.runs import trained
from dstrain.runs.trained import load_guide
from dstrain.sampling.requests import OPTIONS
from dstrain.tracking import figures


def measure_pictures(options: EvaluateOptions) -> str:
    """Measures pictures as `dstrain evaluate --metrics` asks, or writes a reference; returns the lines to print."""
    asked = options.as_quality(QualityOptions)
    return format_report(*measure_quality(asked)) if asked.write_reference is None else write_reference(asked)


def measure_quality(options: QualityOptions) -> tuple[Path | None, dict[str, Any]]:
    """Measures on all ranks together: the JSON file written, None where there is none, and what it holds.

    ConfigError: what cannot be, with the remedy, before anything is drawn.
    """
    require_precision(options.precision)
    start = time.perf_counter()
    run = trained.read_recipe(options.folder) if options.folder else None
    out = options.out or (options.folder / "evaluation" if run else None)
    if out is not None:
        trained.require_writable(out)
    if options.metrics == ("scenes",):
        networks, place, kept = {"scenes": open_features("builtin")}, None, {}
        images, facts = _open_measured(options, run)
        with compute_in(options.precision), reword_errors(options=OPTIONS):
            values = clips.score_scenes(images.sums(networks["scenes"]))
    else:
        _require_enough(options)
        networks = table.choose_networks(options.metrics, options.features)
        images, facts = _open_measured(options, run)
        compared = _open_reference(options, run, networks)
        with compute_in(options.precision), reword_errors(options=OPTIONS):
            images = table.begin_set(images, networks, options.batch, options.kept)
        known, place = compared.read(options), compared.place
        with compute_in(options.precision):
            measured = _collect_statistics(images, networks, options)
        values = table.compute_figures(networks, measured, known)
        kept = {
            name: [len(side[network.name].kept) for side in (measured, known)]
            for name, network in networks.items()
            if "kept" in table.METRICS[name].needs
        }
    result = {
        "run": run.name if run else options.images.name,
        "system": run and run.system,
        **facts,
        "samples": len(images),
        "samples_of_split": len(images),
        "num_steps": options.num_steps,
        "figures": {name: _keep_finite(value) for name, (value, _) in values.items()},
        "standard_errors": {name: _keep_finite(error) for name, (_, error) in values.items()},
        "curves": {},
        "timesteps": None,
        "quarters": {},
        "nonfinite_samples": 0,
        "data": {"path": str(run.data.path if run else options.images), "unreadable": []},
        "reference": place,
        "networks": {name: f"{network.name} {network.fingerprint}" for name, network in networks.items()},
        "kept": kept,
        "precision": options.precision,
        "ranks": group.world(),
        "batch": options.batch,
        "versions": {"dstrain": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "seconds": round(time.perf_counter() - start, 3),
    }
    path = out and out / f"{_name_result(options, result)}.json"
    if path is not None and group.rank() == 0:
        atomic.write_file(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
    group.barrier()
    return path, result


def require_measurable(options: QualityOptions) -> None:
    """ConfigError: a network or the reference is not there, or does not serve the metrics, or one image is to be drawn.

    Nothing is drawn.
    """
    _require_enough(options)
    _open_reference(
        options, trained.read_recipe(options.folder), table.choose_networks(options.metrics, options.features)
    )


def _require_enough(options: QualityOptions) -> None:
    if options.num is not None:
        table.require_enough(options.num, f"--num-samples {options.num}: ")


def write_reference(options: QualityOptions) -> str:
    """Writes the statistics of a set, of images or of a run's data, for later --reference: the line to print.

    ConfigError: what cannot be, with the remedy.
    """
    path = options.write_reference
    if path.suffix != ".npz":
        raise ConfigError(f"--write-reference {path}: name a file that ends in .npz")
    _require_enough(options)
    trained.require_writable(path.parent, "--write-reference")
    networks = {
        name: network
        for name, network in table.choose_networks(options.metrics, options.features).items()
        if table.METRICS[name].compares
    }
    if not networks:
        raise ConfigError(f"--metrics {','.join(options.metrics)}: these compare with no reference; name fid, say")
    run = trained.read_recipe(options.folder) if options.folder else None
    images = _open_own_data(options, run) if run else open_set(options.images, "--images")
    statistics = _collect_statistics(images, networks, options, compared=True)
    if group.rank() == 0:
        reference.write_reference(path, statistics)
    group.barrier()
    return f"statistics of {len(images):,} images in {path}: {', '.join(statistics)}"


def _open_measured(options: QualityOptions, run: Run | None) -> tuple[Images, dict[str, Any]]:
    """What is measured, and the entries of the result that say so."""
    if run is None:
        return open_set(options.images, "--images"), {"step": 0, "weights": {}, "split": "all"}
    system = systems.build(run.system, run.model)
    if problem := system.cannot_draw():
        raise ConfigError(f"{options.folder} trains {run.system}, which cannot draw: {problem}")
    if system.takes_embeddings:
        raise ConfigError(
            f"{options.folder} draws from what another run draws: do so by dstrain generate RUN --then "
            f"{options.folder}, and measure what it wrote with --images"
        )
    if options.prompts and not system.takes_texts:
        raise ConfigError(f"--prompts: {options.folder} trains {run.system}, which takes no texts; leave it out")
    if system.draws_embeddings:
        raise ConfigError(f"{options.folder} draws embeddings, and metrics are of pictures: leave out --metrics")
    source = _open_low_res(options, run) if system.starts_from_data else None
    sampler = system.sampler(*((run.samples.sampler,) if options.sampler is None else (options.sampler, "--sampler")))
    checkpoint = trained.find_checkpoint(options.folder, options.step, options.ema)
    kinds = trained.choose_kinds(
        system, checkpoint, run.samples.ema if options.ema is None else options.ema, options.raw
    )
    networks = trained.load_networks(system, checkpoint, kinds, choose_dtype(options.precision))
    kind = Stories if options.metrics == ("scenes",) else Drawn
    drawn = kind(options, run, system, networks, source)
    choice = {
        name: getattr(drawn.samples, name) if getattr(options, name) is None else getattr(options, name)
        for name in (*SAMPLING, "labels")
    }
    if isinstance(drawn, Stories):
        choice["prime_frames"] = drawn.length.primed
    if options.guide:
        drawn.networks["guide"] = load_guide(
            options.guide, system, choice["guidance_scale"], choose_dtype(options.precision)
        )
        choice["guide"] = [*map(str, options.guide)]
    return drawn, {
        "step": read_manifest(checkpoint)["step"],
        "weights": kinds,
        "split": "drawn",
        "seed": options.seed,
        "sampling": choice
        | {
            "sampler": sampler,
            "prompts": drawn.prompts and len(drawn.prompts),
            "low_res": source and source.describe(),
        },
    }


def _open_low_res(options: QualityOptions, run: Run) -> Source:
    """The images that super-resolution begins from: held-out ones, of the training set where none are held out."""
    if options.labels is not None:
        raise ConfigError(f"--labels: {options.folder} draws from images, which have labels of their own: leave it out")
    train, unseen = open_sources(run.data, run=options.folder)
    return Spread(train if unseen is None else unseen, options.num)


def _open_own_data(options: QualityOptions, run: Run) -> Images:
    """Images of a split of the run's data, cropped as in training; never mirrored."""
    split = options.split or "train"
    source = None if split == "test" else open_builtin(run.data, split)  # codes of them are compared as pictures, too
    if source is None:
        source = (
            open_split(run.data, split)
            if split == "test"
            else open_sources(run.data, run=options.folder)[split == "held_out"]
        )
    if source is None:
        raise ConfigError(f"{options.folder} holds no images out: leave out --split, or name another --reference")
    return Sourced(Spread(source.squares(), None if options.write_reference is None else options.num))


@dataclass(frozen=True)
class _Reference:
    """What the metrics compare with, opened, not yet read: statistics of a file, and images for the rest."""

    statistics: dict[str, Statistics] = field(default_factory=dict)
    images: Images | None = None
    networks: dict[str, Features] = field(default_factory=dict)  # of metrics whose statistics are taken of `images`
    place: str | None = None  # its name; None: nothing is compared

    def read(self, options: QualityOptions) -> dict[str, Statistics]:
        """Statistics by name of their network; those of the file before those of the images."""
        if self.images is None:
            return self.statistics
        statistics = dict(self.statistics)
        for name, other in _collect_statistics(self.images, self.networks, options, compared=True).items():
            mine = statistics.get(name, other)
            statistics[name] = replace(
                other,
                mean=other.mean if mine.mean is None else mine.mean,
                covariance=other.covariance if mine.covariance is None else mine.covariance,
            )
        return statistics


def _open_reference(options: QualityOptions, run: Run | None, networks: dict[str, Features]) -> _Reference:
    """ConfigError: there is none, or it holds less than the metrics need."""
    path = options.reference
    if not any(table.METRICS[name].compares for name in networks):
        return _Reference()
    if path is None:
        if run is None:
            raise ConfigError("--images A: name what it is compared with, --against B or --reference FILE")
        return _Reference({}, _open_own_data(options, run), networks, f"{run.data.path}, {options.split or 'train'}")
    statistics = {}
    if path.suffix in reference.SUFFIXES and path.is_file():
        statistics = reference.read_reference(
            path, {network.name: network for network in networks.values()}.values(), group.device()
        )
    lacking = table.list_lacking(networks, statistics)
    if lacking and not reference.has_images(path):
        by = " and ".join(dict.fromkeys(networks[name].name for name in lacking))
        raise ConfigError(
            f"--reference {path} holds no {' and no '.join(sorted(table.name_needs(lacking)))} for "
            f"--metrics {','.join(lacking)}, which are taken by {by}: give images, or write it with "
            "--write-reference"
        )
    images = open_set(path, "--reference") if lacking else None
    for name, network in networks.items():
        if "kept" in table.METRICS[name].needs:
            count = len(images if name in lacking else statistics[network.name].kept)
            table.require_neighbours((name,), min(count, options.kept), f" of --reference {path}")
    return _Reference(statistics, images, {name: networks[name] for name in lacking}, str(path))


def _collect_statistics(
    images: Images, networks: dict[str, Features], options: QualityOptions, compared: bool = False
) -> dict[str, Statistics]:
    share = f"{len(images)} {'of the reference' if compared else 'images'}"
    with Bar("taking features", total=len(images), unit="image", desc=share) as bar:
        return table.collect_statistics(
            images,
            networks,
            options.batch,
            options.kept,
            compared,
            lambda number: bar.update(min(number * group.world(), bar.total - bar.n)),
        )


def _keep_finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _name_result(options: QualityOptions, result: dict[str, Any]) -> str:
    """One name for one question: other options write another file, the same ones replace their own."""
    question = asdict(options) | {"ema": None, "raw": None, "step": None, "batch": None, "out": None}
    digest = hashlib.blake2b(json.dumps(question, sort_keys=True, default=str).encode(), digest_size=3).hexdigest()
    words = [f"step_{result['step']:08d}", figures.name_weights(result)] if options.folder else [options.images.name]
    return "_".join([*words, *options.metrics, f"n{result['samples']}", digest])


def format_report(path: Path | None, result: dict[str, Any]) -> str:
    """The lines that are printed in the end."""
    lines = [figures.format_table(result)] if path is None else [figures.format_table(result), f"{path}"]
    against = [f"  against {result['reference']}"] if result["reference"] else []
    kept = {count for counts in result["kept"].values() for count in counts}
    few = [f"  kid, pr and dc compare {min(kept):,} to {max(kept):,} images of each set"] if kept else []
    return "\n".join([lines[0], *against, *few, *lines[1:]])
