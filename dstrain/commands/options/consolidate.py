"""Options of `dstrain consolidate`."""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dstrain.commands.options.arguments import parse_file_size
from dstrain.commands.options.command import Command, make_argument_field, make_option_field

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def parse_raw_or_ema(text: str) -> str:
    """Returns `text` unchanged if it is raw, ema or ema:DECAY. Raises argparse.ArgumentTypeError for any other."""
    if not re.fullmatch(r"raw|ema(:.+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither ema, ema:DECAY nor raw")
    return text


def parse_part_name(text: str) -> str | None:
    """Returns the name of a part, or None for "all", which means all parts."""
    return None if text == "all" else text


@dataclass(frozen=True)
class Order(Command):
    """Merges a checkpoint's sharded weights into safetensors files in Hugging Face's layout, streaming, on one CPU.

    It needs neither the GPUs nor the number of ranks of the run, and imports neither torch nor DeepSpeed: some 40 MB
    of memory, whatever the size of the weights. Hashes (DeepSpeed's: checksums) are verified first. --out is written
    whole or not at all. A tied weight stands under each of its names; frozen weights and buffers are there, too.
    """

    usage: ClassVar[str] = "dstrain consolidate RUN|CHECKPOINT --out DIR [options]"
    examples: ClassVar[str] = """
        dstrain consolidate runs/dit-small --weights ema:0.97 --out weights
        dstrain consolidate other/checkpoints --tag global_step1000 --trust-pickle --dtype bfloat16 --out weights
        dstrain train init_from=weights
    """

    source: Path = make_argument_field(
        "RUN|CHECKPOINT",
        "a run's folder, one of its checkpoints/step_N, or a folder that DeepSpeed has saved into (ZeRO 1, 2, 3), of "
        "any program",
        Path,
        missing="name a run's or a checkpoint's folder; --help shows how",
    )
    out: Path = make_option_field(
        None,
        "a new folder: model.safetensors, or model-0000i-of-0000N.safetensors and their index; recipe.yaml and "
        "consolidated.json, which says what these weights are",
        Path,
        metavar="DIR",
        missing="name the folder to write: --out DIR; --help shows how",
    )
    weights: str | None = make_option_field(
        None,
        "ema, ema:DECAY, ema:WIDTH or raw (the run's first average; raw where there is none)",
        parse_raw_or_ema,
        metavar="KIND",
    )
    part: str | None = make_option_field(
        None,
        "one network of the run (all: every one, in a folder each if they are several)",
        parse_part_name,
        metavar="NAME",
    )
    step: int | None = make_option_field(None, "which checkpoint of a run (its newest)", int, metavar="N")
    tag: str | None = make_option_field(None, "which of DeepSpeed's (as its file `latest` says)", metavar="NAME")
    dtype: str = make_option_field(
        "float32",
        "float32, bfloat16 or float16; buffers keep their own",
        metavar="NAME",
        choices=("float32", "bfloat16", "float16"),
    )
    shard_size: int = make_option_field(
        5_000_000_000, "of a file at most, such as 500MB or 2GiB", parse_file_size, metavar="SIZE", shown="5GB"
    )
    trust_pickle: bool = make_option_field(
        False,
        "read DeepSpeed's files although their pickles ask for classes beyond tensors and containers; without it "
        "these are named and nothing is written. Their code is not run in either case",
    )
