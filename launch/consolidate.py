"""Merges a checkpoint's sharded weights into safetensors files in Hugging Face's layout, streaming, on one CPU.

usage:  python launch/consolidate.py RUN|CHECKPOINT --out DIR [options]

  RUN | CHECKPOINT        a run's folder, one of its checkpoints/step_N, or a folder that DeepSpeed has saved into
                          (ZeRO 1, 2, 3), of any program
  --out DIR               a new folder: model.safetensors, or model-0000i-of-0000N.safetensors and their index;
                          recipe.yaml and consolidated.json, which says what these weights are
  --weights KIND          ema, ema:DECAY, ema:WIDTH or raw (the run's first average; raw where there is none)
  --part NAME             one network of the run; all (unless given): every one, in a folder each if they are several
  --dtype NAME            float32 (unless given), bfloat16 or float16; buffers keep their own
  --shard-size SIZE       of a file at most: 5GB (unless given), 500MB, 2GiB
  --step N | --tag NAME   which checkpoint: of a run (its newest), of DeepSpeed's (as its file `latest` says)
  --trust-pickle          read DeepSpeed's files although their pickles ask for classes beyond tensors and containers;
                          without it these are named and nothing is written. Their code is not run in either case

It needs neither the GPUs nor the number of ranks of the run, and imports neither torch nor DeepSpeed: some 40 MB of
memory, whatever the size of the weights. Hashes (DeepSpeed's: checksums) are verified first. --out is written whole or
not at all. A tied weight stands under each of its names; frozen weights and buffers are there, too.

examples:
  python launch/consolidate.py runs/dit-small --weights ema:0.9999 --out weights
  python launch/consolidate.py other/checkpoints --tag global_step1000 --trust-pickle --dtype bfloat16 --out weights
  deepspeed launch/train.py init_from=weights
"""

import argparse
import re
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dstrain.commands import consolidate
from dstrain.distributed.bars import Bar
from dstrain.distributed.progress import phases
from dstrain.recipe import ConfigError

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ConfigError(f"{message}; --help shows what there is")


def _size(text: str) -> int:
    """Bytes, as 5GB or 2GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if not match or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 5GB, 500MB or 2GiB")
    return max(1, int(float(match[1]) * _UNITS[match[2].upper()]))


def _weights(text: str) -> str:
    if not re.fullmatch(r"raw|ema(:.+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither ema, ema:DECAY nor raw")
    return text


def _order(argv: list[str] | None = None) -> consolidate.Order:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--weights", type=_weights)
    parser.add_argument("--part")
    parser.add_argument("--step", type=int)
    parser.add_argument("--tag")
    parser.add_argument("--dtype", choices=tuple(consolidate.DTYPES), default="float32")
    parser.add_argument("--shard-size", "--shard_size", type=_size, default=_size("5GB"), dest="shard_size")
    parser.add_argument("--trust-pickle", "--trust_pickle", action="store_true", dest="trust_pickle")
    parser.add_argument("--local_rank", "--local-rank", type=int)
    words = vars(parser.parse_args(argv))
    if words.pop("help"):
        print(__doc__, end="")
        raise SystemExit(0)
    del words["local_rank"]  # the environment says it, too
    for name, option in (("source", "a run's or a checkpoint's folder"), ("out", "the folder to write: --out DIR")):
        if words[name] is None:
            raise ConfigError(f"name {option}; --help shows how")
    words["part"] = None if words["part"] == "all" else words["part"]
    return consolidate.Order(**words)


def _bar(stack: ExitStack) -> Callable[[int], Callable[[int], Any]]:
    def begin(total: int) -> Callable[[int], Any]:
        bar = Bar("verifying and writing bytes", total=total, unit="B", unit_scale=True, desc="verify, write")
        return stack.enter_context(bar).update

    return begin


def main() -> None:
    """Parses the command line, consolidates and says what was written."""
    order = _order()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what removes half a folder
    with phases(), ExitStack() as stack:
        done = consolidate.consolidate(order, _bar(stack))
    for part, entries in done.parts.items():
        name = f"{part} " if part else ""
        tied = f", {len(done.tied[part])} of them tied" if done.tied.get(part) else ""
        print(
            f"{name}{done.weights[part]} of step {done.facts['step']}: {len(entries)} tensors{tied}, "
            f"{sum(entry.nbytes for entry in entries) / 1e6:.1f} MB"
        )
    left = done.facts.get("left_out")
    print(f"in {order.out}" + (f"; left out, for they are no tensors: {', '.join(left)}" if left else ""))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("consolidate.py: interrupted; nothing was left of what was written", file=sys.stderr)
        raise SystemExit(130) from None
    except OSError as error:
        print(f"consolidate.py: error:\n  {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except ConfigError as error:
        print(f"consolidate.py: error:\n  {error}", file=sys.stderr)
        raise SystemExit(2) from None
