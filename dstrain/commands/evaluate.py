"""Measures a trained run on held-out data: bits/dim of the whole bound if the system has one, written as JSON and a
plot.

A figure is the mean of System.measure over samples. It is the same for any number of ranks and any batch size, up to
the rounding of the networks: the noise of a sample is a function of its key, and sums are float64.
"""

import hashlib
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dstrain import systems
from dstrain.checkpoint.manifest import read_manifest
from dstrain.commands.evaluating import quality
from dstrain.commands.evaluating.results import describe_command_and_machine, print_and_write_result
from dstrain.commands.options.evaluate import EvaluateOptions
from dstrain.data.batches import iterate_held_out
from dstrain.data.cached.embeddings import open_pairs
from dstrain.data.decode.pixels import FORMATS, open_image
from dstrain.data.open import BuiltinData, make_listing_request, open_sources, open_split
from dstrain.data.source import Source
from dstrain.data.sources.images import Images, fetch_encoded_file, open_images
from dstrain.data.views import Spread
from dstrain.distributed import group
from dstrain.distributed.progress import Bar
from dstrain.encoders.precision import choose_weight_dtype, require_supported_precision, use_precision
from dstrain.recipe import ConfigError, Run, reword_errors
from dstrain.runs import trained
from dstrain.sampling.draw import Means, require_valid_evaluation_terms
from dstrain.systems.base import System
from dstrain.tracking import figures

_NUM_CHECKED = 8  # images of --data whose size and colours are checked


def run_verb(options: EvaluateOptions) -> None:
    """Measures a run and prints the figures: on held-out data, or with --metrics by its pictures. --metrics can also
    measure other images. With --write-reference only writes the statistics of a set of images.
    """
    if options.metrics is None:
        evaluate_run(options)
        return
    with reword_errors(options={} if options.against is None else {"--reference ": "--against "}):
        if options.write_reference is None:
            quality.measure_quality(options)
            return
        line = quality.compute_and_write_reference_statistics(options)
        if group.rank() == 0:
            print(line)


def evaluate_run(options: EvaluateOptions) -> tuple[Path, dict[str, Any]]:
    """Measures a run on all ranks together, prints the figures, and writes them as a JSON file with a plot beside it.

    Returns the path of the JSON file, and its content. Raises ConfigError, with the remedy, if something cannot be
    measured.
    """
    require_supported_precision(options.precision)
    begun = time.perf_counter()
    run = trained.read_recipe(options.run_folder)
    system = systems.build(run.system, run.model)
    source = Spread(
        _open_source_to_measure(options, run, systems.build_config(run.system, run.model).num_labels), options.num
    )
    if group.rank() == 0:  # stdout is for the figures
        print(
            f"data: {options.data or run.data.path}, {_get_measured_split_name(options)}: {source.describe_samples()}",
            file=sys.stderr,
        )
    checkpoint = trained.find_checkpoint(options.run_folder, options.step, options.ema)
    kinds = trained.choose_raw_or_ema_by_part(
        system, checkpoint, run.samples.ema if options.ema is None else options.ema, options.raw
    )
    out = options.out or options.run_folder / "evaluation"
    trained.make_writable_folder(out)
    # All facts are read before the measurement: training may remove the checkpoint meanwhile.
    manifest = read_manifest(checkpoint)
    data: dict[str, Any] = {
        "path": options.data or run.data.path,
        "fingerprint": source.whole.compute_fingerprint(),
        "image_size": run.data.image_size,
        "channels": run.data.channels,
    }
    networks = trained.load_networks(system, checkpoint, kinds, choose_weight_dtype(options.precision))
    with use_precision(options.precision):
        means = average_system_measurements_over_source(
            system,
            networks,
            source,
            batch=options.batch,
            seed=run.seed,
            num_steps=options.num_steps,
            show_progress=group.rank() == 0,
        )
    data["unreadable"] = sorted(set().union(*group.gather_objects(source.unreadable)))
    result = {
        "run": run.name,
        "system": run.system,
        "step": manifest["step"],
        "weights": kinds,
        "split": _get_measured_split_name(options),
        "samples": len(source),
        "samples_of_split": len(source.whole),
        "num_steps": options.num_steps,
        **means,
        "data": data,
        "seed": run.seed,
        "trained_with": manifest["versions"],
        **describe_command_and_machine(options, begun),
    }
    path = out / f"{_make_result_file_name(options, result)}.json"
    print_and_write_result(path, result, figures.format_evaluation_table(result), figures.plot_evaluation)
    return path, result


@torch.no_grad()
def average_system_measurements_over_source(
    system: System,
    networks: dict[str, nn.Module],
    source: Source,
    *,
    batch: int,
    seed: int,
    num_steps: int | None = None,
    show_progress: bool = False,
) -> dict[str, Any]:
    """Computes the means of System.measure over all samples of a source, on all ranks together, each of which takes at
    most `batch` samples at a time. `show_progress` draws a progress bar on a terminal. Returns a dict, in which numbers
    that are not finite are None:

    figures: {name: mean}
    standard_errors: {name: standard error}, None for figures that System.compute_figures computes
    curves: {name: [mean at each timestep]}, of terms that have a column for each timestep
    timesteps: these timesteps, or None
    quarters: {name: [mean in each quarter of the timesteps]}
    nonfinite_samples: the number of samples with values that are not finite
    """
    rounds = -(-len(source) // (batch * group.world()))
    batch = -(-len(source) // (rounds * group.world()))  # as little filling as can be
    means = Means()
    with Bar("measuring", show=show_progress, total=rounds, unit="step", desc=f"{len(source)} samples") as bar:
        batches = iterate_held_out(source, batch, group.rank(), group.world(), group.device(), seed)
        for done, samples in enumerate(batches, 1):
            valid = samples.pop("valid")
            terms = system.measure(
                networks, system.encode(samples), num_steps, _make_step_progress_wrapper(bar, rounds)
            )
            require_valid_evaluation_terms(system, terms, len(valid))
            means.add_terms(terms, valid)
            bar.update(bar.total * done // rounds - bar.n)  # a system may have shown no steps of its own
    result = means.average_over_ranks()
    for name, value in system.compute_figures(result["curves"]).items():  # it has no standard error, being no mean
        result["figures"][name], result["standard_errors"][name] = value, None
    return _make_figures_json_compatible(result)


def _make_figures_json_compatible(value: Any) -> Any:
    """Converts nested figures to what JSON can hold: tensors become lists, and numbers that are not finite
    become None.
    """
    if isinstance(value, dict):
        return {key: _make_figures_json_compatible(inner) for key, inner in value.items()}
    if isinstance(value, Tensor):
        return [_make_figures_json_compatible(inner) for inner in value.tolist()]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _make_step_progress_wrapper(bar: Bar, num_batches: int) -> Any:
    """Returns a function that takes the sampling steps of a batch, yields them one by one, and advances the bar after
    each. The function also sets the bar's total to the steps of all `num_batches` batches, each of which takes equally
    many.
    """

    def yield_steps_and_advance_bar(steps: Iterable[int]) -> Iterator[int]:
        """Yields the steps of one batch, and advances the bar after each."""
        steps = list(steps)
        bar.total = num_batches * len(steps)
        for step in steps:
            yield step
            bar.update()

    return yield_steps_and_advance_bar


def _get_measured_split_name(options: EvaluateOptions) -> str:
    """Returns the name of the split that is measured: "all" with --data, else the value of --split, which is "held_out"
    if it is not given.
    """
    return "all" if options.data else options.split or "held_out"


def _open_source_to_measure(options: EvaluateOptions, run: Run, num_classes: int | None) -> Source:
    """Opens the samples to measure: those at --data, or a split of the run's data. `num_classes` is the model's number
    of classes, None if it takes no labels.

    Raises ConfigError if the run has no held-out samples, or if the data do not have the model's classes.
    """
    source: Source | None
    if options.data is not None:
        source = _open_given_data(os.path.expanduser(options.data), options.split, run, num_classes or 1)
    elif options.split == "test":
        source = open_split(run.data, "test")
    else:
        source = open_sources(run.data, run=options.folder)[0 if options.split == "train" else 1]
    if source is None:
        raise ConfigError(
            f"{options.folder} holds no images out: name other images with --data FOLDER, take those it "
            "was trained on with --split train, or train with data.held_out=0.05"
        )
    if num_classes is not None and (len(source.classes) > num_classes or (num_classes > 1 and not source.classes)):
        raise ConfigError(
            f"{options.data or run.data.path} has {len(source.classes) or 'no'} classes, the model "
            f"{num_classes}: its labels would be wrong; name the data that the run was trained on"
        )
    return source


def _open_given_data(path: str, split: str | None, run: Run, num_classes: int) -> Source | None:
    """Opens the images, videos or embedding pairs at `path`, the value of --data, and prepares them as in training.
    `num_classes` is the model's number of classes, 1 if it takes no labels. Returns None if there are no pairs.

    Raises ConfigError if `split` is given, or if the data do not suit the run.
    """
    data, labelled = run.data, num_classes > 1
    pairs = "pairs" in systems.find_config_class(run.system).learns_from
    if split is not None:
        raise ConfigError(f"--data {path} takes all images there: leave out --split {split}")
    if BuiltinData.recognises(data.model_copy(update={"path": path})):
        raise ConfigError(f"--data {path}: name a folder of {'embedding pairs' if pairs else 'images'}")
    with reword_errors(
        options={
            ", and for evaluation data.held_out_path=": " or --data ",
            "data.held_out_path=": "--data ",
            "data.path=": "--data ",
            ", or builtin:fashion": "",
        }
    ):
        if pairs:
            return open_pairs(path, data.splits, "all")
        if data.num_frames is not None:  # with captions of their own
            return open_sources(
                data.model_copy(
                    update={
                        "path": path,
                        "mixture": None,
                        "held_out": 0.0,
                        "images": None,
                        "held_out_path": None,
                        "captions": None,
                        "leave_out": (),
                    }
                )
            )[0]
        if data.path is None:
            raise ConfigError(f"--data {path}: the run has learned from a data.mixture; leave out --data")
        # Labels follow the class names of the training data.
        places = (data.path, "held_out", path) if labelled else (path, "all", None)
        source = open_images(
            places[0],
            data.image_size,
            channels=data.channels,
            split=places[1],
            held_out_path=places[2],
            draft=data.draft,
            request=make_listing_request(data),
            sizes=data.size_conditions,
        )
    if labelled and not source.classes:
        raise ConfigError(
            f"--data {path} has no class folders and the model knows {num_classes} classes: put the images "
            "into folders named as those of the training data"
        )
    named = BuiltinData.recognises(data) or Path(data.path).exists()
    if labelled and not named and len(source.classes) < num_classes:
        raise ConfigError(
            f"--data {path} has {len(source.classes)} classes, the model {num_classes}, and the training "
            f"data that would name them are no longer at {data.path}: put them back"
        )
    if isinstance(source, Images):
        _require_images_suit_run(path, source, run)
    return source


def _require_images_suit_run(path: str, source: Images, run: Run) -> None:
    """Raises ConfigError if images do not suit the run, so that its bits/dim on them would say nothing: all are smaller
    than data.image_size, or all have colours and the run has one channel. Looks at about eight images, spread evenly.
    """
    sides, grey = [], []
    for index in range(0, len(source), -(-len(source) // _NUM_CHECKED)):
        try:
            with open_image(
                fetch_encoded_file(source.layout, source.index.read_place(source.find_row_of_sample(index))), FORMATS
            ) as image:
                grey.append(
                    image.mode in ("1", "L", "LA", "I", "I;16", "F")
                    or len({channel.tobytes() for channel in image.convert("RGB").split()}) == 1
                )
                sides.append(min(image.size))
        except Exception:  # a hostile file may raise anything; it is reported where it is measured
            continue
    size = run.data.image_size
    if sides and max(sides) < size:
        raise ConfigError(f"--data {path} holds images of {max(sides)} pixels, data.image_size is {size}: take others")
    if run.data.channels == 1 and grey and not any(grey):
        raise ConfigError(f"--data {path} holds colour images (3 channels), data.channels is 1: name grey images")


def _make_result_file_name(options: EvaluateOptions, result: dict[str, Any]) -> str:
    """Returns the name, without suffix, of the file for a result. The name holds the step, the weights and the options
    that change the figures, so that the same command replaces its own file.
    """
    words = [f"step_{result['step']:08d}", figures.make_weights_label(result)]
    if options.data is not None:
        digest = hashlib.blake2b(os.path.abspath(options.data).encode(), digest_size=3).hexdigest()
        words.append(f"{Path(options.data).name or 'data'}-{digest}")
    elif result["split"] != "held_out":
        words.append(result["split"])
    if result["samples"] < result["samples_of_split"]:
        words.append(f"n{result['samples']}")
    if options.num_steps is not None:
        words.append(f"steps{options.num_steps}")
    return "_".join([*words, *([options.precision] if options.precision != "fp32" else [])])
