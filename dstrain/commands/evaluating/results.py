"""Prints and writes what was measured, and describes the command and the machine that have measured it."""

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dstrain import __version__
from dstrain.commands.options.evaluate import EvaluateOptions
from dstrain.disk import atomic
from dstrain.distributed import group
from dstrain.recipe import explain_write_errors


def describe_command_and_machine(options: EvaluateOptions, start_time: float) -> dict[str, Any]:
    """Returns entries of a result that describe the command and the machine: precision, ranks, batch, versions, device,
    and the seconds since `start_time`, a value of time.perf_counter().
    """
    return {
        "precision": options.precision,
        "ranks": group.world(),
        "batch": options.batch,
        "versions": {"dstrain": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "seconds": round(time.perf_counter() - start_time, 3),
    }


def print_and_write_result(
    path: Path | None,
    result: dict[str, Any],
    text: str,
    write_plot: Callable[[Path, dict[str, Any]], None] | None = None,
) -> None:
    """Prints `text` on rank 0. Then writes `result` as JSON to `path`, and the plot that `write_plot` draws beside it;
    writes no file if `path` is None. Call it on all ranks. Raises ConfigError if the files cannot be written.
    """
    if group.rank() == 0:
        print(text, flush=True)
    if group.rank() == 0 and path is not None:
        with explain_write_errors(f"--out {path.parent}", "make room, or name another folder; the figures are printed"):
            atomic.write_file(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
            if write_plot is not None:
                write_plot(path.with_suffix(".png"), result)
        print(path if write_plot is None else f"{path} and {path.with_suffix('.png').name}")
    group.barrier()
