"""Writes any data as shards of encoded files, or as webdataset tars: [deepspeed] launch/pack.py DATA --out SHARDS"""

import os
from pathlib import Path

from dstrain.commands import arguments
from dstrain.commands.exits import run_main
from dstrain.recipe import ConfigError

_HELP = """\
Writes data of any form as shards, which data.path=SHARDS then trains on: few large files instead of many small ones.
The files are copied as they are; pixels in arrays (.npz, CIFAR, idx) become PNG. Order, labels and captions are kept.

usage:  [deepspeed] launch/pack.py DATA --out SHARDS [options] [data.KEY=VALUE ...]

  DATA                  a folder or a file of data, as data.path (docs/guides/data.md lists the forms)
  --out SHARDS          where to write; the same command again makes what is missing or damaged
  --format NAME         shards, read by dstrain with one read a sample (shards), or webdataset tars (tar)
  --shard-bytes N       bytes of a shard, about; 256M and 1G are understood (256M)
  --captions            captions of images, too; those of videos are always kept
  --images              of a folder with videos among images, the images alone
  --max-bad-fraction F  files that may be unreadable; they keep their place, empty (0.01)
  data.KEY=VALUE        how DATA is read, as in a recipe: data.labels=prefix, data.captions=FILE, data.index=FOLDER

Several processes (`deepspeed launch/pack.py ...`) write a share of the shards each.

examples:
  python launch/pack.py /data/imagenet/train --out /fast/imagenet
  deepspeed launch/pack.py /data/cc3m --captions --format tar --shard-bytes 1G --out /fast/cc3m
"""


def _size(text: str) -> int:
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper())
    return arguments.positive(text[:-1] if factor else text) * (factor or 1)


def _options(argv: list[str] | None = None):
    parser = arguments.Parser(_HELP)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--format", choices=("shards", "tar"), default="shards")
    parser.add_argument("--shard-bytes", "--shard_bytes", type=_size, default=1 << 28)
    parser.add_argument("--captions", action="store_true")
    parser.add_argument("--images", action="store_true")
    parser.add_argument("--max-bad-fraction", "--max_bad_fraction", type=arguments.share, default=0.01)
    words = parser.values(parser.parse_intermixed_args(argv))
    path, *overrides = words.pop("words") or [None]
    if path is None or words["out"] is None:
        raise ConfigError(
            f"name {'the data' if path is None else 'the folder to write: --out SHARDS'}; --help shows how"
        )
    if wrong := [override for override in overrides if not override.startswith("data.")]:
        raise ConfigError(f"{wrong[0]}: beside DATA there are entries data.KEY=VALUE alone")
    from dstrain.commands.pack import PackOptions
    from dstrain.recipe import load

    return PackOptions(load(None, [*overrides, f"data.path={os.path.expanduser(path)}"]).data, **words)


def main() -> None:
    options = _options()
    from dstrain.commands import pack
    from dstrain.distributed import group
    from dstrain.engine.start import start_group

    if group.place().world > 1:
        start_group()
    index = pack.pack(options)
    if group.rank() == 0:
        shards = index["shards"]
        bad = [entry for shard in shards for entry in shard["bad"]]
        kind = options.format.removesuffix("s") + "s" * (len(shards) != 1)
        print(
            f"{index['number']:,} {index['noun']} in {options.out}: {len(shards):,} {kind}, "
            f"{sum(shard['size'] for shard in shards) / 1e9:.3f} GB"
            + (f"; {len(bad)} could not be read and are empty, such as {bad[0][0]} ({bad[0][1]})" if bad else "")
        )
    group.leave()


if __name__ == "__main__":
    run_main(main)
