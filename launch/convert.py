"""Converts data of others once into what training reads: dstrain convert KIND PATH --out OUT"""

from pathlib import Path

from dstrain.commands import arguments
from dstrain.commands.exits import run_main
from dstrain.recipe import ConfigError

_HELP = """\
Converts data of others once, into what data.path=OUT then trains on. Nothing in a file is executed.

usage:  dstrain convert KIND PATH --out OUT [options]

  cifar10, cifar100     PATH is cifar-10-batches-py, cifar-100-python, the binary version, or the folder above
  mnist                 a folder with idx files, also .gz: of MNIST, Fashion-MNIST, KMNIST, EMNIST; torchvision's, too
  lsun                  an LMDB environment, a file of one, or a folder with several *_lmdb/, each of which is a class
  npz                   an .npz with arr_0 uint8 (N, H, W, C), and arr_1 as labels, as ADM keeps images
  imagenet-kit          ImageNet's val/ without class folders: OUT is a table of its images, such as val.csv
  latents               latents that fast-DiT, LightningDiT, EDM2 or REPA have cached

  --out OUT             where to write: shards, of which test files are held out (train/ and held_out/)
  --class-list FILE     a class a line: the names of labels that are numbers, or the order of LSUN's

for latents:
  --first-stage PATH    what encoded them: a diffusers AutoencoderKL, or name:NAME where it cannot be read here
  --image-size N        pixels, where the first stage cannot be read
  --latent-scale X      by which they have been multiplied (fast-DiT: 0.18215, others 1); they are divided by it
  --normalize           by channel, with LightningDiT's latents_stats.pt; then no first stage can decode them
  --no-flip             without the mirrored ones
  --dtype NAME          float16 or float32 (float16)
  --shard-size N        samples of a file (4096)
  --max-bad-fraction F  unreadable files that are replaced before it ends (0.01)

examples:
  dstrain convert cifar10 cifar-10-batches-py --out cifar10-shards
  dstrain convert imagenet-kit /data/imagenet/val --out /data/imagenet/val.csv
  dstrain convert latents imagenet256_features --first-stage stabilityai/sd-vae-ft-mse --out latents/imagenet256
"""


def _options(argv: list[str] | None = None):
    parser = arguments.Parser(_HELP)
    parser.add_argument("kind", nargs="?")
    parser.add_argument("path", type=Path, nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--class-list", "--class_list")
    parser.add_argument("--first-stage", "--first_stage")
    parser.add_argument("--image-size", "--image_size", type=arguments.positive)
    parser.add_argument("--latent-scale", "--latent_scale", type=float)
    parser.add_argument("--normalize", action="store_true")
    parser.add_argument("--no-flip", "--no_flip", action="store_false", dest="flip")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16")
    parser.add_argument("--shard-size", "--shard_size", type=arguments.positive, default=4096)
    parser.add_argument("--max-bad-fraction", "--max_bad_fraction", type=arguments.share, default=0.01)
    words = parser.words(argv)
    from dstrain.commands.convert import KINDS, ConvertOptions

    own = {name: words.pop(name) for name in ("kind", "path", "out", "class_list")}
    if own["kind"] not in KINDS:
        raise ConfigError(f"name the kind of the data, one of {', '.join(KINDS)}; --help shows how")
    for name, missing in (("PATH", own["path"] is None), ("--out OUT", own["out"] is None)):
        if missing:
            raise ConfigError(f"name {name}; --help shows how")
    if own["kind"] == "latents":
        if words["first_stage"] is None:
            raise ConfigError("name what encoded the latents: --first-stage PATH, or --first-stage name:NAME")
        return ConvertOptions(**own, latents=words)
    given = [name for name, value in words.items() if value != parser.get_default(name)]
    if given:
        raise ConfigError(f"--{given[0].replace('_', '-')} is for the kind latents: leave it out")
    return ConvertOptions(**own)


def main() -> None:
    options = _options()
    from dstrain.commands.convert import convert

    print(convert(options))


if __name__ == "__main__":
    run_main(main)
