"""Measures how good pictures are, by FID and its like: a run's against a reference, or two sets of images.

Nothing is written but the figures: each rank turns the pictures that it draws into features and forgets them.
"""

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from dstrain import systems
from dstrain.checkpoint.manifest import read_manifest
from dstrain.commands.evaluating.results import describe_command_and_machine, print_and_write_result
from dstrain.commands.evaluating.sampled_sets import SAMPLING, Drawn, Stories
from dstrain.commands.options.evaluate import EvaluateOptions
from dstrain.data.open import open_if_builtin, open_sources, open_split
from dstrain.data.source import Source
from dstrain.data.views import Spread
from dstrain.distributed import group
from dstrain.distributed.progress import Bar
from dstrain.encoders.precision import choose_weight_dtype, require_supported_precision, use_precision
from dstrain.metrics import clips, reference, table
from dstrain.metrics.compared import Compared, open_recipe_reference, open_reference
from dstrain.metrics.features import open_feature_network
from dstrain.metrics.images import Images, Sourced, open_image_set
from dstrain.metrics.network import Features
from dstrain.metrics.statistics import KEPT, Statistics
from dstrain.recipe import ConfigError, Run, require_replaceable_file, reword_errors
from dstrain.runs import trained
from dstrain.runs.trained import load_guiding_network
from dstrain.sampling.requests import OPTIONS
from dstrain.tracking import figures


def measure_quality(options: EvaluateOptions) -> tuple[Path | None, dict[str, Any]]:
    """Measures pictures by the metrics of the options, on all ranks together, and prints the figures. Writes them as
    JSON into --out, or into the run's evaluation/; writes nothing if there is neither.

    Returns the path of the JSON file, or None, and its content. Raises ConfigError, with the remedy, if something
    cannot be measured, before anything is drawn.
    """
    require_supported_precision(options.precision)
    begun = time.perf_counter()
    run = trained.read_recipe(options.folder) if options.folder else None
    measured_path = options.folder or options.images
    assert measured_path is not None  # EvaluateOptions.check_options makes sure of it
    out = options.folder / "evaluation" if options.out is None and options.folder else options.out
    if out is not None:
        trained.make_writable_folder(out)
    networks: dict[str, Features]
    place, kept = None, {}
    if options.metrics == ("scenes",):
        networks = {"scenes": open_feature_network("builtin")}
        images, facts = _open_and_describe_measured_images(options, run)
        assert isinstance(images, Stories)
        with use_precision(options.precision), reword_errors(options=OPTIONS):
            values = clips.compute_scene_scores(images.draw_stories_and_sum_scores(networks["scenes"]))
    else:
        _require_enough_samples(options)
        networks = table.open_metric_networks(options.metrics or (), options.features)
        images, facts = _open_and_describe_measured_images(options, run)
        compared = _open_reference_statistics(options, run, networks)
        with use_precision(options.precision), reword_errors(options=OPTIONS):
            images = table.check_images_and_read_first_batch(images, networks, options.batch, options.kept or KEPT)
        known, place = (
            compared.collect_missing_statistics(partial(_compute_image_statistics, options, is_reference=True)),
            compared.place,
        )
        with use_precision(options.precision):
            measured = _compute_image_statistics(
                options, images, networks, caption_patterns=run.data.leave_out if run else ()
            )
        values = table.compute_metrics(networks, measured, known)
        for name, network in networks.items():
            rows = [side[network.name].kept for side in (measured, known) if network.name in side]
            if "kept" in table.METRICS[name].needs:
                kept[name] = [len(side) for side in rows if side is not None]
    result = {
        "run": run.name if run else measured_path.name,
        "system": run and run.system,
        **facts,
        "samples": len(images),
        "samples_of_split": len(images),
        "num_steps": options.num_steps,
        "figures": {name: replace_nonfinite_by_none(value) for name, (value, _) in values.items()},
        "standard_errors": {name: replace_nonfinite_by_none(error) for name, (_, error) in values.items()},
        "curves": {},
        "timesteps": None,
        "quarters": {},
        "nonfinite_samples": 0,
        "data": {"path": str(run.data.path if run else options.images), "unreadable": []},
        "reference": place,
        "networks": {name: f"{network.name} {network.fingerprint}" for name, network in networks.items()},
        "kept": kept,
        **describe_command_and_machine(options, begun),
    }
    path = out and out / f"{_make_result_file_name(options, result)}.json"
    print_and_write_result(path, result, format_report(result))
    return path, result


def require_measurable_run(options: EvaluateOptions) -> None:
    """Raises ConfigError if a run cannot be measured by the metrics of the options: a network or the reference is
    missing or does not suit the metrics, or too few images are asked for. Draws nothing.
    """
    _require_enough_samples(options)
    networks = table.open_metric_networks(options.metrics or (), options.features)
    _open_reference_statistics(options, trained.read_recipe(options.run_folder), networks)


def _require_enough_samples(options: EvaluateOptions) -> None:
    """Raises ConfigError if --num-samples is 1, since metrics compare sets of images."""
    if options.num is not None:
        table.require_enough_images(options.num, f"--num-samples {options.num}: ")


def compute_and_write_reference_statistics(options: EvaluateOptions) -> str:
    """Writes the statistics of a set of images, or of a run's data, to the file options.write_reference, which can be
    given as --reference later. Returns the line to print. Call it on all ranks.

    Raises ConfigError, with the remedy, if the file does not end in .npz or may not be replaced, if no metric compares
    with a reference, or if images or networks cannot be opened.
    """
    path = options.write_reference
    assert path is not None
    if path.suffix != ".npz":
        raise ConfigError(f"--write-reference {path}: name a file that ends in .npz")
    require_replaceable_file(path, "--write-reference", reference.is_written_by_dstrain)
    _require_enough_samples(options)
    trained.make_writable_folder(path.parent, "--write-reference")
    metrics = options.metrics or ()
    networks = table.open_metric_networks(metrics, options.features)
    networks = {name: network for name, network in networks.items() if table.METRICS[name].compares}
    if not networks:
        raise ConfigError(f"--metrics {','.join(metrics)}: these compare with no reference; name fid, say")
    if options.images is None:
        images = _open_data_of_run(options, trained.read_recipe(options.run_folder))
    else:
        images = open_image_set(options.images, "--images")
    statistics = _compute_image_statistics(options, images, networks, is_reference=True)
    if group.rank() == 0:
        reference.write_reference_statistics(path, statistics)
    group.barrier()
    return f"statistics of {len(images):,} images in {path}: {', '.join(statistics)}"


def _open_and_describe_measured_images(options: EvaluateOptions, run: Run | None) -> tuple[Images, dict[str, Any]]:
    """Opens the images that are measured: those of --images, or those that a run will draw. Returns them, and the
    entries of the result that describe them. Raises ConfigError if the run cannot draw them.
    """
    if run is None:
        assert options.images is not None
        return open_image_set(options.images, "--images"), {"step": 0, "weights": {}, "split": "all"}
    system = systems.build(run.system, run.model)
    if problem := system.find_drawing_problem():
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
    source = _open_images_to_enlarge(options, run) if system.starts_from_data else None
    sampler = system.choose_sampler(
        *((run.samples.sampler,) if options.sampler is None else (options.sampler, "--sampler"))
    )
    checkpoint = trained.find_checkpoint(options.run_folder, options.step, options.ema)
    kinds = trained.choose_raw_or_ema_by_part(
        system, checkpoint, run.samples.ema if options.ema is None else options.ema, options.raw
    )
    step = read_manifest(checkpoint)["step"]  # before the measurement, in which training may remove the checkpoint
    networks = trained.load_networks(system, checkpoint, kinds, choose_weight_dtype(options.precision))
    kind = Stories if options.metrics == ("scenes",) else Drawn
    drawn = kind(options, run, system, networks, source)
    choice = {
        name: getattr(drawn.samples, name) if getattr(options, name) is None else getattr(options, name)
        for name in (*SAMPLING, "labels")
    }
    if isinstance(drawn, Stories):
        choice["prime_frames"] = drawn.length.primed
    if options.guide:
        drawn.networks["guide"] = load_guiding_network(
            options.guide, system, choice["guidance_scale"], choose_weight_dtype(options.precision)
        )
        choice["guide"] = [*map(str, options.guide)]
    return drawn, {
        "step": step,
        "weights": kinds,
        "split": "drawn",
        "seed": options.seed or 0,
        "sampling": choice
        | {
            "sampler": sampler,
            "prompts": drawn.prompts and len(drawn.prompts),
            "low_res": source and source.describe_samples(),
        },
    }


def _open_images_to_enlarge(options: EvaluateOptions, run: Run) -> Source:
    """Opens the images on which a super-resolution run is measured: --num-samples held-out ones, evenly spaced, or
    training images if none are held out. Raises ConfigError if --labels is given.
    """
    if options.labels is not None:
        raise ConfigError(f"--labels: {options.folder} draws from images, which have labels of their own: leave it out")
    train, unseen = open_sources(run.data, run=options.folder)
    return Spread(train if unseen is None else unseen, options.num)


def _open_data_of_run(options: EvaluateOptions, run: Run) -> Images:
    """Opens the images of a split of the run's data, cropped as in training, but not mirrored. Opens at most
    --num-samples of them with --write-reference, else all. Raises ConfigError if the run has no such split.
    """
    split = options.split or "train"
    source = (
        None if split == "test" else open_if_builtin(run.data, split)
    )  # codes of them are compared as pictures, too
    if source is None:
        source = (
            open_split(run.data, split)
            if split == "test"
            else open_sources(run.data, run=options.folder)[split == "held_out"]
        )
    if source is None:
        raise ConfigError(f"{options.folder} holds no images out: leave out --split, or name another --reference")
    return Sourced(Spread(source.make_single_shape_view(), None if options.write_reference is None else options.num))


def _open_reference_statistics(options: EvaluateOptions, run: Run | None, networks: dict[str, Features]) -> Compared:
    """Opens the reference with which the metrics compare, or returns an empty one if no metric needs it. Raises
    ConfigError if the reference is missing, or lacks something that a metric needs.
    """
    path = options.reference or options.against
    if not any(table.METRICS[name].compares for name in networks):
        return Compared()
    if path is not None:
        return open_reference(path, networks, options.kept or KEPT, run is None or run.data.upright)
    if run is not None and options.split is None and run.samples.reference is not None:
        return open_recipe_reference(run.samples.reference, run.data, networks, options.kept or KEPT)
    if run is None:
        raise ConfigError("--images A: name what it is compared with, --against B or --reference FILE")
    return Compared({}, _open_data_of_run(options, run), networks, f"{run.data.path}, {options.split or 'train'}")


def _compute_image_statistics(
    options: EvaluateOptions,
    images: Images,
    networks: dict[str, Features],
    is_reference: bool = False,
    caption_patterns: Sequence[str] = (),
) -> dict[str, Statistics]:
    """Computes the statistics of images that the metrics need, and returns them by the name of their network. Draws a
    progress bar.

    is_reference: whether the images are the reference
    caption_patterns: patterns of captions; the images with such captions also get statistics of their own
    """
    share = f"{len(images)} {'of the reference' if is_reference else 'images'}"
    with Bar("taking features", total=len(images), unit="image", desc=share) as bar:
        return table.collect_statistics(
            images,
            networks,
            options.batch,
            options.kept or KEPT,
            is_reference,
            lambda number: bar.update(min(number * group.world(), bar.total - bar.n)),
            caption_patterns,
        )


def replace_nonfinite_by_none(value: float | None) -> float | None:
    """Returns the value, or None if it is None or not finite, since JSON has no NaN."""
    return None if value is None or not math.isfinite(value) else value


def _make_result_file_name(options: EvaluateOptions, result: dict[str, Any]) -> str:
    """Returns the name, without suffix, of the file for a result. The name ends in a hash of the options that change
    the figures, so that the same command replaces its own file.
    """
    question = asdict(options) | {"ema": None, "raw": None, "step": None, "batch": None, "out": None}
    question |= {"seed": options.seed or 0, "kept": options.kept or KEPT}
    question["reference"] = question.pop("against") or options.reference
    del question["data"]
    digest = hashlib.blake2b(json.dumps(question, sort_keys=True, default=str).encode(), digest_size=3).hexdigest()
    words = [f"step_{result['step']:08d}", figures.make_weights_label(result)] if options.folder else [result["run"]]
    return "_".join([*words, *(options.metrics or ()), f"n{result['samples']}", digest])


def format_report(result: dict[str, Any]) -> str:
    """Returns a result as a text of several lines: the figures, the reference, and the number of images that the
    metrics kid, pr and dc compare.
    """
    lines = [figures.format_evaluation_table(result)]
    if result["reference"]:
        lines.append(f"  against {result['reference']}")
    if kept := {count for counts in result["kept"].values() for count in counts}:
        lines.append(f"  kid, pr and dc compare {min(kept):,} to {max(kept):,} images of each set")
    return "\n".join(lines)
