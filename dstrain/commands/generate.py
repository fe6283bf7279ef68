"""Draws from a trained run: pictures or videos, with a grid and the .npz that ADM's evaluation reads; or embeddings.

Runs can be chained: the pictures of the first are what the next one begins from, as in super-resolution, or its
embeddings, as from a prior to its decoder. Videos go on from given frames, and scene after scene, see
sampling/scenes.py. sampling/files.py writes the files.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from dstrain import rng, systems
from dstrain.commands.options.generate import GenerateOptions
from dstrain.data.cached.embeddings import read_encoder_fingerprint
from dstrain.data.cached.rows import read_embeddings
from dstrain.data.decode.pixels import read_pictures
from dstrain.distributed import group
from dstrain.distributed.progress import Bar, get_phases
from dstrain.encoders.precision import choose_weight_dtype, require_supported_precision, use_precision
from dstrain.recipe import ConfigError, Run, explain_write_errors, reword_errors
from dstrain.runs import hosts, trained
from dstrain.runs.folders import claim_output_folder
from dstrain.runs.trained import load_guiding_network, require_outside_run_folders
from dstrain.sampling.draw import count_classes_as_grid_columns, draw_all_samples, draw_samples_in_rounds
from dstrain.sampling.files import (
    FORMATS,
    About,
    Embeddings,
    Pictures,
    choose_samples_folder,
    require_folder_without_samples,
)
from dstrain.sampling.requests import OPTIONS, make_sampling_request_and_captions, make_valid_conditions
from dstrain.sampling.scenes import (
    Length,
    assign_frames_to_scenes,
    choose_clip_length,
    draw_further_scenes,
    read_prime_frames,
)
from dstrain.systems.base import CHOICES, Request, System

Opened = tuple[Path, Run, System]


@dataclass(frozen=True)
class ReadyRun:
    """Holds a run whose weights are loaded."""

    folder: Path
    run: Run
    system: System
    networks: dict[str, nn.Module]


def run_verb(options: GenerateOptions) -> None:
    """Draws the samples, and prints on rank 0 how many were written into which folder."""
    out = generate_samples(options)
    if group.rank() == 0:
        print(f"{options.num} samples in {out}")


def generate_samples(options: GenerateOptions) -> Path:
    """Draws and writes the samples, on all ranks together; returns their folder. Raises ConfigError if the runs cannot
    draw what the options ask for.
    """
    require_supported_precision(options.precision)
    if options.out is not None:
        require_outside_run_folders(options.out)
    first, *then = (_open_run_without_weights(options.folder, options), *map(_open_run_without_weights, options.then))
    _, run, system = first
    sampler = system.choose_sampler(
        *((run.samples.sampler,) if options.sampler is None else (options.sampler, "--sampler"))
    )
    clip = _choose_clip_length(options, run, system)
    images = _read_inputs_of_first_run(options, first, then, clip)
    dtype = choose_weight_dtype(options.precision)
    guide = options.guide and load_guiding_network(options.guide, system, _choose_guidance_scale(options, run), dtype)
    runs = [
        _load_run_weights(*first, dtype, options.step, options.ema, options.raw),
        *(_load_run_weights(*later, dtype) for later in then),
    ]
    if guide:
        runs[0].networks["guide"] = guide
    scenes = _encode_texts_of_later_scenes(options, run, system)
    request, captions = _make_sampling_request(options, run, system, images, clip, sampler)
    out = group.broadcast_from_first(choose_samples_folder(options.out, runs[-1].folder) if group.rank() == 0 else None)
    with (
        explain_write_errors(f"--out {out}", "make room, or name a folder elsewhere"),
        use_precision(options.precision),
    ):
        _write_samples(options, out, runs, request, captions, scenes, clip)
    group.barrier()
    return out


def _choose_guidance_scale(options: GenerateOptions, run: Run) -> float:
    """Returns --guidance-scale if it is given. Otherwise returns the recipe's scale; with --invert returns 1.0, which
    means no guidance, instead of the recipe's.
    """
    if options.guidance_scale is not None:
        return options.guidance_scale
    return run.samples.guidance_scale if options.invert is None else 1.0  # guided chains come back less exactly


def _write_samples(
    options: GenerateOptions,
    out: Path,
    runs: list[ReadyRun],
    request: Request,
    captions: list[str] | None,
    scenes: list[dict[str, Tensor]],
    clip: Length | None,
) -> None:
    """Draws all samples, and writes them into the folder `out`. With --invert also prints how far the drawn pictures
    are from the given ones. Raises ConfigError if the folder holds samples already, or if the runs cannot draw what is
    asked for.
    """
    with ExitStack() as claims, Bar("drawing", total=options.num, unit="sample") as bar:
        rounds = _draw_samples_in_rounds(runs, options, request, scenes, clip)
        with reword_errors(options=OPTIONS):
            first = next(rounds)  # before the folder is made: this may be refused
        claims.enter_context(claim_output_folder(out, f"--out {out}", "generate"))
        # Once more, since another command may have ended there meanwhile.
        hosts.run_on_rank_0_or_exit(lambda: require_folder_without_samples(out))
        about = About(
            options.num,
            options.seed,
            count_classes_as_grid_columns(request),
            request.conditions.get("label"),
            captions,
            assign_frames_to_scenes(options.scenes, clip) if options.scenes and clip else None,
            options.pngs,
            options.formats or FORMATS,
            options.fps,
        )
        files = (Pictures if first[1].dtype == torch.uint8 else Embeddings)(out, about)
        pictures, errors = request.conditions.get("invert"), torch.zeros(2, dtype=torch.float64)
        for numbers, samples in chain([first], rounds):
            files.add_samples(numbers, samples)
            if pictures is not None:
                error = samples.double() - pictures[numbers].double()
                errors += torch.stack((error.abs().flatten(1).mean(1).sum(), error.square().flatten(1).mean(1).sum()))
            bar.update(len(numbers))
        files.close()
    if pictures is not None and group.rank() == 0:
        distance, squares = (errors / options.num).tolist()
        psnr = 10 * math.log10(255**2 / max(squares, 1e-9))
        print(f"--invert: pictures come back to {distance:.3g} of 255 on average, PSNR {psnr:.1f} dB")


def _open_run_without_weights(folder: Path, options: GenerateOptions | None = None) -> Opened:
    """Opens a run, without weights. Returns its folder, its recipe, and its system; `options` may replace the system's
    text encoder. Raises ConfigError if the run cannot draw.
    """
    run = trained.read_recipe(folder)
    with reword_errors(f"{folder}: "):
        if options is not None:
            model = systems.find_config_class(run.system).replace_encoders(
                run.model, options.text_encoder, options.tokenizer
            )
            run = run.model_copy(update={"model": model})
        system = systems.build(run.system, run.model)
    if problem := system.find_drawing_problem():
        raise ConfigError(f"{folder} trains {run.system}, which cannot draw: {problem}")
    return folder, run, system


def _load_run_weights(
    folder: Path,
    run: Run,
    system: System,
    dtype: torch.dtype,
    step: int | None = None,
    ema: float | None = None,
    raw: bool = False,
) -> ReadyRun:
    """Loads the weights of a run's checkpoint at `step`, or of the newest if `step` is None: the average `ema`, or the
    recipe's if `ema` is None; with `raw` the training weights.
    """
    checkpoint = trained.find_checkpoint(folder, step, ema)
    kinds = trained.choose_raw_or_ema_by_part(system, checkpoint, run.samples.ema if ema is None else ema, raw)
    return ReadyRun(folder, run, system, trained.load_networks(system, checkpoint, kinds, dtype))


def _choose_clip_length(options: GenerateOptions, run: Run, system: System) -> Length | None:
    """Returns the length of the clips to draw: the number of their frames, and how many of these are taken over from
    earlier frames. Returns None if the system draws pictures.

    Raises ConfigError if options of videos are given that the system does not support, or that do not fit together.
    """
    values = {
        "--num-frames": options.num_frames,
        "--scenes": options.scenes,
        "--prime": options.prime,
        "--prime-frames": options.prime_frames,
        "--format": options.formats,
    }
    used = [option for option, value in values.items() if value is not None]
    if system.num_frames is None:
        if used:
            raise ConfigError(f"{used[0]}: {options.folder} trains {run.system}, which draws no videos; leave it out")
        return None
    going_on = [option for option in used if option in ("--scenes", "--prime")]
    if going_on and not system.takes_pictures:
        raise ConfigError(
            f"{going_on[0]}: {options.folder} trains {run.system}, which cannot go on from given frames; leave it out"
        )
    if "--prime-frames" in used and not going_on:
        raise ConfigError("--prime-frames says what --scenes and --prime go on from: give one of them, or leave it out")
    if options.scenes is not None and (options.prompts or options.labels):
        raise ConfigError("--scenes gives the texts itself: leave out --prompts and --labels")
    clip = choose_clip_length(
        system, options.num_frames or run.samples.num_frames, options.prime_frames, options.scenes is not None
    )
    if going_on and clip.primed >= clip.frames:
        raise ConfigError(f"{used[0]}: clips of {clip.frames} frames have no room for more; raise --num-frames")
    return clip


def _read_inputs_of_first_run(
    options: GenerateOptions, first: Opened, later_runs: list[Opened], clip: Length | None
) -> Tensor | None:
    """Reads what the first run begins from: pictures uint8 (N, C, h, w), frames (N, K, C, H, W), or embeddings float32
    (N, D). Returns None if it begins from noise.

    Raises ConfigError if the runs cannot be chained, if --low-res or --embeddings is missing, or if one of these is
    given and the run does not begin from such inputs.
    """
    folder, run, system = first
    enlarges = system.starts_from_data and not system.takes_embeddings
    if enlarges and options.low_res is None:
        raise ConfigError(
            f"{folder} draws from smaller pictures: give them as --low-res FILE.npz or FOLDER, or draw "
            f"them from another run, dstrain generate RUN --then {folder}"
        )
    if system.takes_embeddings and options.embeddings is None:
        raise ConfigError(
            f"{folder} draws from image embeddings: give them as --embeddings FILE.npy, or draw them by "
            f"a prior, dstrain generate PRIOR --prompts FILE --then {folder}"
        )
    if options.low_res is not None and not enlarges:
        raise ConfigError(f"--low-res {options.low_res}: {folder} takes no pictures; leave it out")
    if options.embeddings is not None and not system.takes_embeddings:
        raise ConfigError(f"--embeddings {options.embeddings}: {folder} takes no embeddings; leave it out")
    if options.prime is not None and clip is not None:
        exactly = options.prime_frames is not None
        frames = read_prime_frames(options.prime, run.data, system.temporal_patch_size, clip.primed, exactly)
        with reword_errors(f"--prime {options.prime}: "), reword_errors(options={"prime: ": ""}):
            system.conditions_from(frames[:1])  # refused here, under this option's name
        return frames
    if options.invert is not None:
        return _read_pictures_to_invert(options.invert, options, run, system)
    if later_runs and options.size:
        raise ConfigError("--size: a run of --then takes squares; leave it out")
    if later_runs and clip is not None and later_runs[0][2].starts_from_data:
        raise ConfigError(f"--then {later_runs[0][0]}: this run goes on from pictures, and {folder} draws videos")
    for before, later in zip((first, *later_runs), later_runs):
        _require_chainable_runs(before, later)
    if options.embeddings is not None:
        with reword_errors(options={"data.path: ": "--embeddings: "}):
            return read_embeddings(options.embeddings)
    if options.low_res is None:
        return None
    with reword_errors("--low-res "):
        return read_pictures(options.low_res, run.data.channels)


def _require_chainable_runs(before: Opened, after: Opened) -> None:
    """Raises ConfigError if the run `after`, named by --then, cannot begin from what the run `before` draws."""
    (_, run, system), (folder, later, taker) = before, after
    width, size = system.draws_embeddings, run.data.image_size
    if not taker.starts_from_data:
        raise ConfigError(f"--then {folder}: this run begins from noise, not from the pictures of another")
    if bool(width) != bool(taker.takes_embeddings):
        kinds = ("image embeddings", "pictures") if width else ("pictures", "image embeddings")
        raise ConfigError(
            f"--then {folder}: this run begins from {kinds[1]}, and {before[0]} draws {kinds[0]}: name a "
            "run that takes them"
        )
    if not width and size >= later.data.image_size:
        raise ConfigError(
            f"--then {folder} draws pictures of {later.data.image_size} pixels, and is given some of "
            f"{size}: name a run that enlarges them"
        )
    with reword_errors(f"--then {folder}: "):
        taker.conditions_from(
            torch.zeros(1, width) if width else torch.zeros(1, run.data.channels, size, size, dtype=torch.uint8)
        )
    encoders = [
        read_encoder_fingerprint(path) for path in (run.data.path, later.data.embeddings) if width and path is not None
    ]
    if None not in encoders and len({*encoders}) > 1:
        raise ConfigError(
            f"--then {folder}: it was trained on embeddings by {encoders[1]}, and {before[0]} draws "
            f"those by {encoders[0]}: train both with one image encoder"
        )


def _read_pictures_to_invert(path: Path, options: GenerateOptions, run: Run, system: System) -> Tensor:
    """Reads the pictures of --invert, uint8 (N, C, H, W). Raises ConfigError if the system cannot turn pictures into
    noise, if the pictures have another size than the run's, or if options do not go with --invert.
    """
    if not system.inverts:
        raise ConfigError(
            f"--invert: {options.folder} trains {run.system}, which carries no pictures to noise; leave it out"
        )
    if options.low_res is not None or options.then or options.size:
        raise ConfigError("--invert draws the pictures of one run again: leave out --low-res, --then and --size")
    with reword_errors("--invert "):
        images = read_pictures(path, run.data.channels)
    if images.shape[2:] != (run.data.image_size,) * 2:
        raise ConfigError(
            f"--invert {path}: pictures of {images.shape[3]} x {images.shape[2]} pixels; "
            f"{options.folder} draws {run.data.image_size} x {run.data.image_size}: bring them to that "
            "size"
        )
    return images


def _encode_texts_of_later_scenes(options: GenerateOptions, run: Run, system: System) -> list[dict[str, Tensor]]:
    """Encodes the texts of --scenes, and returns the conditions of all scenes but the first: a dict of tensors (1, ...)
    for each. Returns [] without --scenes.

    Raises ConfigError if --scenes or --prompts are given, and the system takes no texts.
    """
    if not system.takes_texts and (options.scenes is not None or options.prompts is not None):
        option = "--scenes" if options.scenes is not None else "--prompts"
        raise ConfigError(f"{option}: {options.folder} trains {run.system}, which takes no texts; leave it out")
    if options.scenes is None:
        return []
    with reword_errors(f"--scenes: {options.folder}: "):
        conditions = system.conditions_from_texts([*options.scenes])
    return [{name: values[i : i + 1] for name, values in conditions.items()} for i in range(1, len(options.scenes))]


def _make_sampling_request(
    options: GenerateOptions, run: Run, system: System, images: Tensor | None, clip: Length | None, sampler: str
) -> tuple[Request, list[str] | None]:
    """Returns the request for the samples that the first run draws, and the caption of each sample, or None if there
    are no captions. Prints a line if the text encoder shortens prompts.
    """
    prompts, option = options.prompts, "" if options.prompts is None else "--prompts: "
    if options.scenes is not None:
        prompts, option = options.scenes[:1], "--scenes: "
    chosen = {name: getattr(options, name) for name in ("num_steps", "size", "negative_prompt", *CHOICES)}
    with reword_errors(f"{option}{options.folder}: ", OPTIONS):
        request, captions = make_sampling_request_and_captions(
            run.samples,
            system,
            options.num,
            options.seed,
            labels=options.labels,
            prompts=prompts,
            images=images if options.invert is None else None,
            sampler=sampler or None,
            num_frames=clip and clip.frames,
            guidance_scale=_choose_guidance_scale(options, run),
            **chosen,
        )
    texts = [*(options.scenes or dict.fromkeys(captions or ()))]
    if texts and (cut := system.describe_cut(texts, option.partition(":")[0] or "samples.prompts")):
        get_phases().print_lines(cut)
    if options.invert is not None and images is not None:
        request.conditions["invert"] = images[torch.arange(options.num) % len(images)]
    return request, captions if options.scenes is None else ["; ".join(options.scenes)] * options.num


def _draw_samples_in_rounds(
    runs: list[ReadyRun],
    options: GenerateOptions,
    request: Request,
    scenes: list[dict[str, Tensor]],
    clip: Length | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draws all samples in rounds, on all ranks together. A round draws all scenes of its samples, or passes its
    samples through all chained runs. Yields (numbers, samples) of each round: the numbers of these samples among all,
    int64 (n,), and the samples (n, ...).
    """
    chunk = min(options.batch, options.num)
    first, *then = runs
    shared = [_choose_labels_of_later_run(request, later, options) for later in then]
    for numbers, samples in draw_samples_in_rounds(first.system, first.networks, request, chunk):
        seeds = request.seeds[numbers]
        if scenes and clip:
            samples = draw_further_scenes(
                first.system,
                samples,
                seeds,
                scenes,
                clip.primed,
                request,
                lambda scene: draw_all_samples(first.system, first.networks, scene, chunk),
            )
        for later, labels in zip(then, shared):
            choice = later.run.samples
            # Other seeds than the first run's: its pictures were made of that noise.
            seeds = rng.keys_of_seeds(seeds)
            conditions = {name: values[numbers] for name, values in labels.items()}
            conditions |= later.system.conditions_from(samples)
            samples = draw_all_samples(
                later.system,
                later.networks,
                Request(
                    seeds,
                    conditions,
                    choice.num_steps,
                    choice.sampler,
                    choice.guidance_scale,
                    **{name: getattr(choice, name) for name in CHOICES},
                ),
                chunk,
            )
        yield numbers, samples


def _choose_labels_of_later_run(request: Request, later_run: ReadyRun, options: GenerateOptions) -> dict[str, Tensor]:
    """Returns the labels of a later run of --then as conditions, {} if that run takes none. Takes the labels that the
    first run draws. If the first run has no labels, takes --labels, or without that the labels in the later run's
    recipe.
    """
    if "label" not in later_run.system.make_conditions(1):
        return {}
    drawn = request.conditions.get("label")
    labels = options.labels or later_run.run.samples.labels if drawn is None else tuple(drawn.tolist())
    with reword_errors(f"--then {later_run.folder}: "):
        return make_valid_conditions(later_run.system, options.num, labels)
