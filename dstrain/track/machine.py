"""On what a command runs: for the records of a run."""

import importlib.metadata
import os
import platform
import socket
from contextlib import suppress
from typing import Any

import torch

from dstrain import __version__
from dstrain.ranks import group

_LIBRARIES = ("torch", "deepspeed", "diffusers", "transformers", "numpy")


def machine() -> dict[str, Any]:
    """Ranks, device, host and versions of this command; of rank 0 where machines differ."""
    versions = {"dstrain": __version__, "python": platform.python_version(), "cuda": torch.version.cuda}
    for library in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[library] = importlib.metadata.version(library)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    return {"world": group.world(), "device": device, "host": socket.gethostname(), "cores": os.cpu_count(),
            "versions": {library: version for library, version in versions.items() if version}}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "cpu"
