"""Measures a trained run on held-out data: deepspeed launch/evaluate.py RUN [--ema NUMBER] [--steps N] [...]"""

from pathlib import Path

from dstrain.command import arguments, cli

_HELP = """\
Measures a trained run on held-out data: bits/dim and the bound by timestep, as JSON and a plot.

usage:  [deepspeed] launch/evaluate.py RUN [options]

  RUN                   a run's folder, for example runs/dit-small
  --split NAME          held_out, train, or test, which embedding pairs have (held_out)
  --data PATH           all images (videos) of another folder instead, with class folders named as in training
  --num-samples N       as many samples, evenly spaced over the split (all)
  --steps N             evenly spaced timesteps, a shortened chain with a looser bound (the whole chain)
  --ema NUMBER | --raw  weights: the average of this decay or width, or the training weights (its first average)
  --checkpoint STEP     the step to load (the newest whole one)
  --batch N             images of one rank at a time; changes no figure (32)
  --precision NAME      fp32, tf32 or bf16: faster on a GPU, slightly other figures (fp32)
  --out DIR             where to write (RUN/evaluation)

The same question again replaces its own files. A chain of T timesteps calls the network T times for each image.

examples:
  python launch/evaluate.py runs/dit-small --num-samples 100 --steps 100
  deepspeed launch/evaluate.py runs/dit-small --batch 250
"""


def _options(argv: list[str] | None = None):
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
    words = parser.words(argv)
    if words["folder"] is None:
        raise cli.ConfigError("name the folder of a run, for example: launch/evaluate.py runs/dit-small")
    from dstrain.evaluate import EvaluateOptions
    return EvaluateOptions(**words)


def main() -> None:
    options = _options()
    from dstrain import evaluate
    from dstrain.ranks import group
    from dstrain.engine.start import start
    if group.place().world > 1:
        start()
    path, result = evaluate.evaluate(options)
    if group.rank() == 0:
        print(evaluate.report(path, result))
    group.leave()


if __name__ == "__main__":
    cli.run_main(main)
