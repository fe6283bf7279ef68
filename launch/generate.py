"""Draws pictures from a trained run: deepspeed launch/generate.py RUN [--num-samples N] [--labels 1,2] [...]"""

import argparse
from pathlib import Path

from dstrain import cli

_HELP = """\
Draws pictures from a trained run: PNGs, a grid, and an ADM-style .npz (embeddings: one .npy).

usage:  [deepspeed] launch/generate.py RUN [options]

  RUN                   a run's folder, for example runs/dit-small
  --num-samples N       pictures (16)
  --labels 3,5,5        classes, repeated to as many (every class in turn)
  --prompts FILE        texts, one a line, repeated to as many, for a run that takes them
  --text-encoder PATH   what encodes them, a folder or a name on the hub (the recipe's)
  --then RUN            go on from the pictures with another run, such as super-resolution; may be given again
  --low-res PATH        pictures that RUN itself begins from: a folder, or the .npz of another order
  --seed S              picture i is a function of S + i, on any number of ranks (0)
  --steps N             network evaluations for each picture (the run's samples.num_steps)
  --sampler NAME        ddpm or ddim; euler or heun for flow matching (the run's)
  --guidance-scale S    classifier-free guidance, 1 is none (the run's)
  --ema DECAY | --raw   weights: an average of this decay, or the training weights (the run's first average)
  --checkpoint STEP     the step to load (the newest whole one)
  --batch N             pictures of one rank at a time (16)
  --out DIR             where to write (RUN/generated, generated_2, ...)
  --no-pngs             only the grid and the .npz

examples:
  python launch/generate.py runs/dit-small --num-samples 40 --guidance-scale 4
  python launch/generate.py runs/iddpm-small --then runs/iddpm-small-upsampler
  deepspeed launch/generate.py runs/dit-small --num-samples 50000 --labels 7 --no-pngs --batch 64
"""


def _order(argv: list[str] | None = None):
    parser = cli.Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("-h", "--help", action="store_true")
    # Not `--num` alone: the deepspeed launcher takes that for the beginning of an option of its own.
    parser.add_argument("--num-samples", "--num_samples", "--num", type=cli.positive, default=16, dest="num")
    parser.add_argument("--labels", type=cli.labels)
    parser.add_argument("--prompts", type=cli.lines)
    parser.add_argument("--text-encoder", "--text_encoder")
    parser.add_argument("--then", type=Path, action="append", default=[])
    parser.add_argument("--low-res", "--low_res", type=Path)
    parser.add_argument("--seed", type=cli.count, default=0)
    parser.add_argument("--steps", type=cli.positive, dest="num_steps")
    parser.add_argument("--sampler")
    parser.add_argument("--guidance-scale", "--guidance_scale", type=cli.scale)
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--ema", type=float)
    weights.add_argument("--raw", action="store_true")
    parser.add_argument("--checkpoint", type=cli.count, dest="step")
    parser.add_argument("--batch", type=cli.positive, default=16)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-pngs", action="store_false", dest="pngs")
    parser.add_argument("--local_rank", "--local-rank", type=int)
    words = vars(parser.parse_args(argv))
    if words.pop("help"):
        print(_HELP, end="")
        raise SystemExit(0)
    del words["local_rank"]
    if words["folder"] is None:
        raise cli.ConfigError("name the folder of a run, for example: launch/generate.py runs/dit-small")
    from dstrain.generate import Order
    return Order(**words | {"then": tuple(words["then"])})


def main() -> None:
    order = _order()
    from dstrain import generate, ranks
    from dstrain.engine.engines import start
    if ranks.place().world > 1:
        start()
    out = generate.generate(order)
    if ranks.rank() == 0:
        print(f"{order.num} samples in {out}")


if __name__ == "__main__":
    cli.run_main(main)
