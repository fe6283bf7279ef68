"""Describes the machine and the code of a command, for the records of a run."""

import importlib.metadata
import os
import platform
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dstrain import __version__
from dstrain.distributed import group

_LIBRARIES = ("torch", "deepspeed", "diffusers", "transformers", "numpy")


def describe_machine(system_file: Path | None = None) -> dict[str, Any]:
    """Returns facts about this process by name, for the records of a run: world, device, host, cores, versions of
    libraries, commit and dirty (see `read_git_commit`).

    system_file: the file of a system from outside dstrain, whose own commit is added; None if there is none.
    """
    outside = {} if system_file is None else {"system": read_git_commit(system_file)}
    versions = {"dstrain": __version__, "python": platform.python_version(), "cuda": torch.version.cuda}
    for library in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[library] = importlib.metadata.version(library)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _read_processor_name()
    return {
        "world": group.world(),
        "device": device,
        "host": socket.gethostname(),
        "cores": os.cpu_count(),
        "versions": {library: version for library, version in versions.items() if version},
        **read_git_commit(),
        **outside,
    }


def read_git_commit(code_file: Path = Path(__file__).parents[1] / "__init__.py") -> dict[str, Any]:
    """Returns {"commit", "dirty"} of the git checkout that holds a file; {} if git does not track the file or cannot be
    run. dirty is True if the code has untracked files, or changes that are not committed.

    The code is the folder of the file if it is an __init__.py, else the file alone. The folders `launch` and
    `ds_configs` beside it count, too.
    """
    code = code_file.parent if code_file.name == "__init__.py" else code_file

    def run_git(*words: str) -> str:
        """Returns what a git command prints in the code's folder. Raises SubprocessError if it fails."""
        # Without the lock by which `status` would write down what it has seen: somebody may commit at this moment.
        return subprocess.run(
            ["git", "--no-optional-locks", "-C", code.parent, *words],
            check=True,
            timeout=10,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        ).stdout

    try:
        run_git("ls-files", "--error-unmatch", code_file)  # else the repository is somebody else's
        changed = run_git("status", "--porcelain", "--", code.name, "launch", "ds_configs")
        return {"commit": run_git("rev-parse", "HEAD").strip(), "dirty": bool(changed.strip())}
    except (OSError, subprocess.SubprocessError):
        return {}


def describe_memory_use() -> str:
    """Returns a line of text that says how much memory this process uses, and how much is free, in GB. It is the memory
    of the process's GPU or, without a GPU, of the machine.
    """
    own = torch.cuda.is_available()
    held = torch.cuda.memory_allocated() if own else _read_memory_kibibytes().get("VmRSS", 0) * 1024
    return (
        f"memory: rank {group.rank()} holds {held / 1e9:.2f} GB{' of its GPU' if own else ''}; {describe_free_memory()}"
    )


def describe_free_memory() -> str:
    """Returns a line of text that says how much memory is free, in GB: of this process's GPU or, without a GPU, of the
    machine.
    """
    if torch.cuda.is_available():
        left, total = torch.cuda.mem_get_info(group.device())
        return f"{left / 1e9:.2f} of the GPU's {total / 1e9:.2f} GB are free"
    left, total = (_read_memory_kibibytes().get(name, 0) * 1024 / 1e9 for name in ("MemAvailable", "MemTotal"))
    return f"{left:.2f} of {total:.2f} GB of this machine are free"


def _read_memory_kibibytes() -> dict[str, int]:
    """Returns {name: KiB} about the memory of the machine and of this process, by Linux's names in /proc such as
    MemTotal and VmRSS. Returns {} on other systems.
    """
    sizes = {}
    with suppress(OSError):
        for path in ("/proc/meminfo", "/proc/self/status"):
            for name, _, value in (line.partition(":") for line in Path(path).read_text().splitlines()):
                if value.split() and value.split()[0].isdigit():
                    sizes[name] = int(value.split()[0])
    return sizes


def _read_processor_name() -> str:
    """Returns the name of the processor's model."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "cpu"
