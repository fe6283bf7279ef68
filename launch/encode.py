"""Encodes a data set once, as shards that training reads: deepspeed launch/encode.py RUN --out DIR [...]"""

import argparse
from pathlib import Path

from dstrain.commands import arguments
from dstrain.commands.exits import run_main
from dstrain.recipe import ConfigError

_HELP = """\
Encodes a data set with a trained first stage: latents or token ids as shards, which data.path=DIR then trains on.
docs/guides/encode.md tells more.

usage:  [deepspeed] launch/encode.py RUN | --first-stage PATH  --out DIR [options]

  RUN                   a run of an autoencoder or of a video tokenizer, for example runs/vae-small, or what
                        launch/export.py RUN --format safetensors has made of it
  --first-stage PATH    instead: a diffusers AutoencoderKL, a folder or a name on the hub
  --out DIR             where to write; the same command again makes what is missing or damaged
  --data PATH           a folder of images, of videos for a run that learned from videos, or builtin:... (the run's)
  --split NAME          train, held_out or all (train)
  --held-out FRACTION   share of the folder that is held out (the run's, or 0)
  --image-size N        pixels (the run's)
  --batch N             images or clips of one call of the first stage (32)
  --dtype NAME          of latents and texts: float16 or float32 (float16)
  --precision NAME      of the first stage: fp32, tf32 or bf16 (fp32)
  --crops N             of images: so many random crops of each, of which a step takes one (the centre)
  --crop NAME           these, as data.crop: random (ADM's), random_resized or dalle (random)
  --no-flip             without the mirrored images: half the size, and no data.flip; videos are never mirrored
  --shard-size N        samples of a file (4096)
  --part K/N            the Kth of N ranges of shards, for machines without a launcher: each gives the same command with
                        a K of its own and the same --out (or puts the shards together); the last one writes the index
  --ema NUMBER | --raw  of a run: the average of this decay or width, or the training weights (its first one)
  --checkpoint STEP     of a run: the step to load (the newest whole one)
  --max-bad-fraction F  unreadable files that are replaced before it ends (0.01)

of videos, whose captions are kept, too, and of images with captions:
  --num-captions N      of images with X.txt: keep at most so many captions (lines) of each, of which a step draws one
                        (none, or 1 with --text-encoder)
  --clips N             of videos: so many windows of each, evenly spaced (one, of the middle)
  --captions FILE       of videos: lines of NAME<TAB>CAPTION for --data, where no X.txt stands beside X.mp4
  --text-encoder PATH   what encodes the captions, such as a T5 encoder: a folder or a name on the hub (none)
  --max-text-len N      text tokens (what the encoder takes)

for a prior, pairs of embeddings of captioned images (X.png and X.txt, or tar shards), which data.path=DIR trains on:
  --image-encoder PATH  a CLIP model: a folder or a name on the hub; --data, --batch, --dtype, --shard-size as above
  --text-encoder PATH   the same, or a sentence encoder; --max-text-len as above
  --text-encodings      a vector for each text token, too

examples:
  python launch/encode.py runs/vae-small --out latents/fashion
  deepspeed launch/encode.py --first-stage stabilityai/sd-vae-ft-mse --data /data/imagenet/train --image-size 256 \\
      --out latents/imagenet256
  deepspeed launch/encode.py runs/phenaki-tokenizer-small --out tokens/moving
"""


def _options(argv: list[str] | None = None):
    parser = arguments.Parser(_HELP)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--first-stage", "--first_stage")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--split", choices=("train", "held_out", "all"), default="train")
    parser.add_argument("--held-out", "--held_out", type=arguments.share)
    parser.add_argument("--image-size", "--image_size", type=arguments.positive)
    parser.add_argument("--batch", type=arguments.positive, default=32)
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16")
    parser.add_argument("--no-flip", "--no_flip", action="store_false", dest="flip")
    parser.add_argument("--shard-size", "--shard_size", type=arguments.positive, default=4096)
    parser.add_argument("--part", type=arguments.part)
    parser.add_weights()
    parser.add_precision()
    parser.add_argument("--max-bad-fraction", "--max_bad_fraction", type=arguments.share, default=0.01)
    parser.add_argument("--image-encoder", "--image_encoder")
    parser.add_argument("--text-encoder", "--text_encoder")
    parser.add_argument("--max-text-len", "--max_text_len", type=arguments.positive)
    parser.add_argument("--crops", type=arguments.positive)
    parser.add_argument("--crop", choices=("random", "random_resized", "dalle"), default="random")
    parser.add_argument("--num-captions", "--num_captions", type=arguments.positive)
    parser.add_argument("--clips", type=arguments.positive)
    parser.add_argument("--captions")
    parser.add_argument("--text-encodings", "--text_encodings", action="store_true")
    words = parser.words(argv)
    alone = not (words["run"] or words["first_stage"])  # then texts are one of two towers
    if (
        words["image_encoder"]
        or words["text_encodings"]
        or (alone and (words["text_encoder"] or words["max_text_len"]))
    ):
        return _pairs(words, parser)
    del words["image_encoder"], words["text_encodings"]
    if (words["run"] is None) == (words["first_stage"] is None):
        raise ConfigError("name one first stage: the folder of a run, or --first-stage PATH; --help shows how")
    if words["out"] is None:
        raise ConfigError("name the folder to write into: --out DIR")
    given = words["ema"] is not None or words["raw"] or words["step"] is not None
    if words["first_stage"] is not None and given:
        raise ConfigError(
            "--ema, --raw and --checkpoint choose among a run's weights; leave them out with --first-stage"
        )
    from dstrain.commands.encode import EncodeOptions

    return EncodeOptions(**words)


def _pairs(words: dict, parser: argparse.ArgumentParser):
    """The order for embedding pairs."""
    embeds = {name: words.pop(name) for name in ("image_encoder", "text_encoder", "max_text_len", "text_encodings")}
    kept = {name: words.pop(name) for name in ("out", "data", "batch", "dtype", "shard_size", "max_bad_fraction")}
    for name in ("out", "data"):
        if kept[name] is None:
            raise ConfigError(f"embedding pairs need --{name}: --help shows how")
    for name in ("image_encoder", "text_encoder"):
        if embeds[name] is None:
            raise ConfigError(f"embedding pairs need both towers: give --{name.replace('_', '-')}, too")
    other = [name for name, value in words.items() if value != parser.get_default(name)]
    if other:
        raise ConfigError(f"{', '.join(other)}: not for embedding pairs; leave it out")
    from dstrain.commands.encoding.embeddings import EmbedOptions

    return EmbedOptions(**kept, **embeds)


def main() -> None:
    options = _options()
    from dstrain.commands import encode
    from dstrain.commands.encoding import embeddings
    from dstrain.distributed import group
    from dstrain.engine.start import start_group

    if group.place().world > 1:
        start_group()
    if not isinstance(options, encode.EncodeOptions):
        plan = embeddings.embed(options)
        if group.rank() == 0:
            print(
                f"{plan['pairs']} pairs in {options.out}: image_embed {plan['image_embed_dim']}, text_embed "
                f"{plan['text_embed_dim']}; {plan['unreadable']} unreadable and replaced, {plan['without_caption']} "
                "images without caption"
            )
        group.leave()
        return
    index = encode.encode(options)
    if group.rank() == 0 and index is not None:
        encoding, found = index["encoding"], index["statistics"]
        scale = f", scaling_factor {found['scaling_factor']:.5f}" if "scaling_factor" in found else ""
        scale += f" of {encoding['codebook_size']} ids" if encoding.get("codebook_size") else ""
        texts = ", with captions" if encoding.get("captions") else ""
        texts += f" and text_encodings {encoding['text']['shape']}" if encoding.get("text") else ""
        bad = f", {len(index['bad_files'])} unreadable files replaced" if index["bad_files"] else ""
        print(
            f"{encoding['number']} samples in {options.out}: {encoding['kind']} {encoding['dtype']} "
            f"{encoding['shape']} x {encoding['flips']}{scale}{texts}{bad}"
        )
    group.leave()


if __name__ == "__main__":
    run_main(main)
