"""Draws pictures or videos from a trained run: deepspeed launch/generate.py RUN [--num-samples N] [--labels 1,2]"""

from pathlib import Path

from dstrain.commands import arguments
from dstrain.commands.exits import run_main
from dstrain.recipe import ConfigError

_HELP = """\
Draws from a trained run: PNGs (videos: GIF and MP4) in DIR/samples, beside it a grid and an ADM-style .npz (embeddings:
one .npy).

usage:  [deepspeed] launch/generate.py RUN [options]

  RUN                   a run's folder, for example runs/dit-small
  --num-samples N       pictures (16)
  --labels 3,5,5        classes, repeated to as many (every class in turn)
  --prompts FILE        texts, one a line, repeated to as many, for a run that takes them
  --text-encoder PATH   what encodes them, a folder or a name on the hub (the recipe's)
  --then RUN            go on from the pictures with another run, such as super-resolution, or from a prior's
                        embeddings with its decoder; may be given again
  --low-res PATH        pictures that RUN itself begins from: a folder, or the .npz of an earlier one
  --embeddings FILE     image embeddings that RUN itself begins from, a .npy (N, D)
  --seed S              picture i is a function of S + i, on any number of ranks (0)
  --size 320x192        width and height of pictures, for a run of system dit (the run's samples.size)
  --steps N             network evaluations for each picture (the run's samples.num_steps); with
                        model.decoding.order=frames for each latent frame of a clip
  --sampler NAME        ddim, ddpm, dpm++, dpm++sde, unipc, heun or edm; for flow matching these but ddim and ddpm,
                        and euler or sde; confidence or critic for videos (the run's)
  --guidance-scale S    classifier-free guidance, 1 is none (the run's)
  --ema NUMBER | --raw  weights: the average of this decay or width, or the training weights (its first average)
  --checkpoint STEP     the step to load (the newest whole one)
  --precision NAME      fp32, tf32 (products in TF32) or bf16 (weights and activations) (fp32)
  --batch N             pictures of one rank at a time (16)
  --out DIR             where to write (RUN/generated, generated_2, ...)
  --no-pngs             only the grid and the .npz

of diffusion and flow matching, explained in docs/guides/samplers.md:
  --spacing NAME        of timesteps: leading, trailing, linspace or karras (the sampler's); --eta E: its noise
  --guidance-interval LO,HI    where guidance acts: noise levels sigma / alpha (all); --guidance-rescale F (0)
  --guide RUN[@STEP][:EMA]    a weaker run, or an earlier checkpoint of RUN, that guides instead of the missing label,
                        by its average of decay or width EMA, or raw
  --invert PATH         pictures to carry to noise and draw again: a folder or an .npz, repeated to N

of videos:
  --tokenizer FOLDER    what decodes their tokens (the recipe's)
  --num-frames N        of a clip, or of a scene, those included that are given (the run's samples.num_frames)
  --scenes FILE         texts, one a line: one long clip for each sample, scene after scene
  --prime PATH          clips or pictures to go on from: a file, a folder, or the .npz of an earlier one
  --prime-frames K      that are given (1 + temporal patch), or that a scene takes over from the one before (1)
  --format gif,mp4      of the files (both); --fps N (10)

examples:
  python launch/generate.py runs/dit-small --num-samples 40 --guidance-scale 4
  python launch/generate.py runs/phenaki-small --scenes story.txt --num-samples 4
  python launch/generate.py runs/iddpm-small-14 --then runs/iddpm-small-upsampler
  python launch/generate.py runs/prior-small --prompts texts.txt --then runs/decoder-small
  deepspeed launch/generate.py runs/dit-small --num-samples 50000 --labels 7 --no-pngs --batch 64
"""


def _options(argv: list[str] | None = None):
    parser = arguments.Parser(_HELP)
    parser.add_argument("folder", type=Path, nargs="?")
    # Not `--num` alone: the deepspeed launcher takes that for the beginning of an option of its own.
    parser.add_argument("--num-samples", "--num_samples", "--num", type=arguments.positive, default=16, dest="num")
    parser.add_argument("--labels", type=arguments.labels)
    parser.add_argument("--prompts", type=arguments.lines)
    parser.add_argument("--text-encoder", "--text_encoder")
    parser.add_argument("--tokenizer")
    parser.add_argument("--then", type=Path, action="append", default=[])
    parser.add_argument("--low-res", "--low_res", type=Path)
    parser.add_argument("--embeddings", type=Path)
    parser.add_argument("--seed", type=arguments.count, default=0)
    parser.add_argument("--size", type=arguments.size)
    parser.add_argument("--steps", type=arguments.positive, dest="num_steps")
    parser.add_sampling()
    parser.add_argument("--guide", type=arguments.guide)
    parser.add_argument("--invert", type=Path)
    parser.add_weights()
    parser.add_precision()
    parser.add_argument("--batch", type=arguments.positive, default=16)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-pngs", action="store_false", dest="pngs")
    parser.add_argument("--num-frames", "--num_frames", type=arguments.positive)
    parser.add_argument("--scenes", type=arguments.lines)
    parser.add_argument("--prime", type=Path)
    parser.add_argument("--prime-frames", "--prime_frames", type=arguments.positive)
    parser.add_argument("--format", type=arguments.one_of("gif", "mp4"), dest="formats")
    parser.add_argument("--fps", type=arguments.positive, default=10)
    words = parser.words(argv)
    if words["folder"] is None:
        raise ConfigError("name the folder of a run, for example: launch/generate.py runs/dit-small")
    from dstrain.commands.generate import GenerateOptions

    return GenerateOptions(**words | {"then": tuple(words["then"])})


def main() -> None:
    options = _options()
    from dstrain.commands import generate
    from dstrain.distributed import group
    from dstrain.engine.start import start_group

    if group.place().world > 1:
        start_group()
    out = generate.generate(options)
    if group.rank() == 0:
        print(f"{options.num} samples in {out}")
    group.leave()


if __name__ == "__main__":
    run_main(main)
