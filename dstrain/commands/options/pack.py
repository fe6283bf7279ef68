"""Options of `dstrain pack`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dstrain.commands.options.arguments import parse_fraction_below_1, parse_size_in_binary_units
from dstrain.commands.options.command import Command, make_argument_field, make_option_field, make_remaining_words_field
from dstrain.recipe import ConfigError, Data, load_recipe


@dataclass(frozen=True)
class PackOptions(Command):
    """Writes data of any form as shards, which data.path=SHARDS then trains on: few large files instead of many small
    ones. The files are copied as they are. Order, labels and captions are kept.

    Several processes (`deepspeed --module dstrain pack ...`) write a share of the shards each.
    """

    usage: ClassVar[str] = "dstrain pack DATA --out SHARDS [options] [data.KEY=VALUE ...]"
    examples: ClassVar[str] = """
        dstrain pack /data/imagenet/train --out /fast/imagenet
        deepspeed --module dstrain pack /data/cc3m --captions --format tar --shard-bytes 1G --out /fast/cc3m
    """

    path: str = make_argument_field(
        "DATA",
        "a folder or a file of data, as data.path",
        missing="name the data; --help shows how",
    )
    overrides: tuple[str, ...] = make_remaining_words_field(
        "data.KEY=VALUE",
        "how DATA is read, as in a recipe: data.labels=prefix, data.captions=FILE, data.index=FOLDER",
    )
    out: Path = make_option_field(
        None,
        "where to write; the same command again makes what is missing or damaged",
        Path,
        metavar="SHARDS",
        missing="name the folder to write: --out SHARDS; --help shows how",
    )
    format: str = make_option_field(
        "shards",
        "shards, read by dstrain with one read a sample, or webdataset tars: tar",
        metavar="NAME",
        choices=("shards", "tar"),
    )
    shard_bytes: int = make_option_field(
        1 << 28,
        "bytes of a shard, about; 256M and 1G are understood",
        parse_size_in_binary_units,
        metavar="N",
        shown="256M",
    )
    captions: bool = make_option_field(False, "captions of images, too; those of videos are always kept")
    images: bool = make_option_field(False, "of a folder with videos among images, the images alone")
    max_bad_fraction: float = make_option_field(
        0.01, "files that may be unreadable; they keep their place, empty", parse_fraction_below_1, metavar="F"
    )

    def check_options(self) -> None:
        """Raises ConfigError if an override is not of the section data."""
        if wrong := [override for override in self.overrides if not override.startswith("data.")]:
            raise ConfigError(f"{wrong[0]}: beside DATA there are entries data.KEY=VALUE alone")

    def make_data_section(self) -> Data:
        """Returns these options as the data section of a recipe. Raises ConfigError if an entry is wrong."""
        return load_recipe(None, [*self.overrides, f"data.path={os.path.expanduser(self.path)}"]).data
