"""Measures a trained run: bits/dim on held-out data, or FID and its like: deepspeed launch/evaluate.py RUN [...]"""

from pathlib import Path

from dstrain.commands import arguments
from dstrain.commands.exits import run_main
from dstrain.recipe import ConfigError, reworded

_HELP = """\
Measures a trained run on held-out data: bits/dim and the bound by timestep, as JSON and a plot. With --metrics it
measures the pictures that a run draws, or two sets of images, by FID and its like (docs/guides/metrics.md).

usage:  [deepspeed] launch/evaluate.py RUN [options]
        [deepspeed] launch/evaluate.py RUN --metrics NAMES [--features KIND:PATH ...] [--reference PATH] [options]
        [deepspeed] launch/evaluate.py --images A --against B --metrics NAMES --features KIND:PATH [options]

  RUN                   a run's folder, for example runs/dit-small
  --split NAME          held_out, train, or test, which embedding pairs have (held_out; of metrics' reference: train)
  --data PATH           all images (videos) of another folder instead, with class folders named as in training
  --num-samples N       as many samples, evenly spaced over the split (all); with --metrics: to draw (50000)
  --steps N             evenly spaced timesteps, a shortened chain with a looser bound (the whole chain); with
                        --metrics: network evaluations for each picture (the run's samples.num_steps)
  --ema NUMBER | --raw  weights: the average of this decay or width, or the training weights (its first average)
  --checkpoint STEP     the step to load (the newest whole one)
  --batch N             images of one rank at a time; changes figures by rounding alone (32)
  --precision NAME      fp32, tf32 or bf16: faster on a GPU, slightly other figures (fp32; features are always fp32)
  --out DIR             where to write (RUN/evaluation)

of pictures:
  --metrics NAMES       fid, sfid, kid, is, pr, dc, fd_dinov2, fd_clip, clip_score, fvd; fd, accuracy of built-in data;
                        retrieval, of pictures with captions (--features clip:FOLDER; of built-in emoji none); or
                        scenes: random stories of four scenes (250), of a run on built-in clips (docs/guides/scenes.md)
  --features KIND:PATH  inception, pytorch-fid, clean-fid, torchscript, i3d (a file), dinov2, clip, videomae (a folder);
                        may be given again
  --reference PATH      statistics (.npz of ADM, EDM, clean-fid or --write-reference; .pkl of EDM2) or images: a folder,
                        .zip or .npz (the run's own data)
  --images A --against B   two sets of images (or B: statistics) instead of a run
  --write-reference OUT.npz   only writes the statistics of RUN's data, or of --images A
  --kept N              features of each set that kid, pr and dc compare (10000)
  --labels 3,5,5 | --prompts FILE, --seed S, --sampler NAME, --guidance-scale S, --guidance-interval LO,HI,
  --guidance-rescale F, --guide RUN, --spacing NAME, --eta E; --prime-frames K, of scenes    as in launch/generate.py

The same question again replaces its own files. A chain of T timesteps calls the network T times for each image.

examples:
  python launch/evaluate.py runs/dit-small --num-samples 100 --steps 100
  deepspeed launch/evaluate.py runs/dit-xl2 --metrics fid,kid,pr,is --features inception:pt_inception.pth \\
      --reference VIRTUAL_imagenet256_labeled.npz --guidance-scale 1.5 --batch 64
"""
_OF_METRICS = (
    "features",
    "reference",
    "images",
    "against",
    "write_reference",
    "kept",
    "labels",
    "prompts",
    "sampler",
    "guidance_scale",
    "spacing",
    "eta",
    "guidance_interval",
    "guidance_rescale",
    "guide",
    "seed",
    "prime_frames",
)
_OF_DRAWING = (
    "num_steps",
    "ema",
    "raw",
    "step",
    "labels",
    "prompts",
    "sampler",
    "guidance_scale",
    "spacing",
    "eta",
    "guidance_interval",
    "guidance_rescale",
    "guide",
    "seed",
    "prime_frames",
)
# Words whose option has another name.
_TYPED = {"num": "num-samples", "num_steps": "steps", "step": "checkpoint"}


def _options(argv: list[str] | None = None):
    """What to measure, and options for those that messages name."""
    parser = arguments.Parser(_HELP)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--split", choices=("held_out", "train", "test"))
    parser.add_argument("--data")
    # Not `--num` alone: the deepspeed launcher takes that for the beginning of an option of its own.
    parser.add_argument("--num-samples", "--num_samples", type=arguments.positive, dest="num")
    parser.add_argument("--steps", type=arguments.positive, dest="num_steps")
    parser.add_weights()
    parser.add_argument("--batch", type=arguments.positive, default=32)
    parser.add_precision()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--metrics", type=lambda text: tuple(dict.fromkeys(text.split(","))))
    parser.add_argument("--features", action="append")
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--write-reference", "--write_reference", type=Path)
    parser.add_argument("--kept", type=arguments.positive)
    parser.add_argument("--labels", type=arguments.labels)
    parser.add_argument("--prompts", type=arguments.lines)
    parser.add_sampling()
    parser.add_argument("--guide", type=arguments.guide)
    parser.add_argument("--seed", type=arguments.count)
    parser.add_argument("--prime-frames", "--prime_frames", type=arguments.positive)
    words = parser.words(argv)
    if words["folder"] is None and words["images"] is None:
        raise ConfigError("name the folder of a run, for example: launch/evaluate.py runs/dit-small")
    metrics = {name: value for name in _OF_METRICS if (value := words.pop(name)) is not None}
    if words["metrics"] is not None:
        return _of_metrics(words, metrics)
    if metrics:
        raise ConfigError(f"--{next(iter(metrics)).replace('_', '-')} is for metrics: name some, as --metrics fid")
    from dstrain.commands.evaluate import EvaluateOptions

    del words["metrics"]
    return EvaluateOptions(**words), {}


def _of_metrics(words: dict, metrics: dict):
    if words.pop("data") is not None:
        raise ConfigError("--data is for bits/dim: with --metrics, name other images as --reference")
    if (words["folder"] is None) == ("images" not in metrics):
        raise ConfigError("--metrics measures what a run draws or --images A: name one of the two")
    if "against" in metrics:
        if "reference" in metrics or "images" not in metrics:
            raise ConfigError("--against B goes with --images A, and is another word for --reference: give one")
    _refuse_unused(words | metrics)
    _refuse_beside_scenes(words | metrics)
    typed = {"--reference ": "--against "} if "against" in metrics else {}
    if typed:
        metrics["reference"] = metrics.pop("against")
    metrics["features"] = tuple(metrics.get("features", ()))
    from dstrain.commands.quality import QualityOptions

    return QualityOptions(**words, **metrics), typed


def _refuse_beside_scenes(words: dict) -> None:
    """ConfigError: stories beside what is no part of them, or their option without them."""
    if "scenes" not in words["metrics"]:
        if "prime_frames" in words:
            raise ConfigError("--prime-frames is of --metrics scenes: leave it out")
        return
    if len(words["metrics"]) > 1:
        raise ConfigError(
            "--metrics scenes draws stories, and all other metrics are of single clips or pictures: ask for it alone"
        )
    for name in ("images", "write_reference", "reference", "split", "features", "kept", "labels", "prompts"):
        if words.get(name) is not None:
            option = _TYPED.get(name, name.replace("_", "-"))
            raise ConfigError(
                f"--{option} changes nothing beside --metrics scenes, which tells its own stories by a "
                "run: leave it out"
            )


def _refuse_unused(words: dict) -> None:
    """ConfigError: an option that would change nothing beside the others."""
    of_run = (*_OF_DRAWING, "split", "num")
    for present, unused in (
        ("images", of_run),
        ("write_reference", (*_OF_DRAWING, "reference", "against", "out")),
        ("reference", ("split",)),
    ):
        for name in unused if words.get(present) is not None else ():
            if (value := words.get(name)) is not None and value is not False:
                option, other = _TYPED.get(name, name.replace("_", "-")), present.replace("_", "-")
                raise ConfigError(f"--{option} changes nothing beside --{other}: leave it out")
    if words["precision"] != "fp32" and (words.get("images") or words.get("write_reference")):
        raise ConfigError(f"--precision {words['precision']} is of a run that draws: leave it out")


def main() -> None:
    options, typed = _options()
    from dstrain.commands import evaluate, quality
    from dstrain.distributed import group
    from dstrain.engine.start import start_group

    if group.place().world > 1:
        start_group()
    with reworded(options=typed):
        if isinstance(options, evaluate.EvaluateOptions):
            text = evaluate.report(*evaluate.evaluate(options))
        elif options.write_reference is not None:
            text = quality.write_reference(options)
        else:
            text = quality.report(*quality.quality(options))
    if group.rank() == 0:
        print(text)
    group.leave()


if __name__ == "__main__":
    run_main(main)
