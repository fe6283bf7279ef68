"""A GPU that computes nothing: torch's CUDA code runs, with its streams, events, pinned memory and checks, and no
kernel does. It shows what fails, waits or lies on another device, before there is a GPU, and it compiles Triton's code
for an H100. It shows no value and no speed.

    python -m tests.gpu launch/bench/gpu.py --part 1           # any command of Python on it

GPU_GIB=140 gives it another size than 80 GiB. With GPU_CACHED=1 torch caches its memory as on a GPU. Then peaks are a
GPU's, and values are what the memory held.

It stands in for the CUDA libraries of the torch that is installed: runtime.c and driver.c answer what must be answered,
and every other function that torch calls returns success. It needs gcc, and torch's build for CUDA 13.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
_PACKAGES = Path(sysconfig.get_paths()["purelib"])
_TORCH = Path(torch.__file__).parent / "lib"
_LIBRARIES = (
    "libtorch_cuda.so",
    "libc10_cuda.so",
    "libtorch_python.so",
    "libtorch_cuda_linalg.so",
    "libcaffe2_nvrtc.so",
)
_OWNERS = ("cuda", "__cudaLaunch", "__cudaGetKernel", "__cudaInitModule", "cublas", "cudnn", "nccl")
_INCLUDED = (_PACKAGES / "nvidia/cu13/include", _PACKAGES / "triton/backends/nvidia/include")  # that has crt/


def missing() -> str | None:
    """Why it cannot be built here; None where it can."""
    if not (shutil.which("gcc") and shutil.which("nm")):
        return "gcc and nm are needed: install gcc"
    if torch.version.cuda is None or not torch.version.cuda.startswith("13."):
        return f"this torch is built for CUDA {torch.version.cuda}, and not for 13"
    return next((f"{folder} is not there" for folder in _INCLUDED if not folder.exists()), None)


def build(folder: Path) -> dict[str, str]:
    """Compiles both libraries into `folder`; the variables by which a process gets them."""
    called = subprocess.run(
        ["nm", "-D", "--undefined-only", *(_TORCH / name for name in _LIBRARIES)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    runtime = {name for name in re.findall(r" U (\w+)", called) if name.startswith(_OWNERS)}
    texts = [(_TORCH / name).read_bytes() for name in _LIBRARIES[:3]]
    texts.append((_INCLUDED[1].parent / "driver.c").read_bytes())  # what Triton asks the driver
    driver = {name.decode() for text in texts for name in re.findall(rb"\b(cu[A-Z]\w+)\b", text)}
    driver |= set(re.findall(r" U (cu[A-Z]\w+)", called))
    _compile(folder / "runtime.so", "runtime.c", runtime)
    _compile(folder / "libcuda.so.1", "driver.c", driver, "-Wl,-soname,libcuda.so.1")
    path = os.pathsep.join(filter(None, (str(HERE / "site"), os.environ.get("PYTHONPATH"))))
    # Without torch's cache of memory, what no kernel has written is zero.
    uncached = {} if os.environ.get("GPU_CACHED") == "1" else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return uncached | {
        "LD_PRELOAD": str(folder / "runtime.so"),
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": path,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "DS_ACCELERATOR": "cuda",
    }


def _compile(library: Path, source: str, names: set[str], *options: str) -> None:
    text = (HERE / source).read_text(encoding="ascii")
    answered = set(re.findall(r"^(?:static )?[\w ]+[ *](\w+)\(", text, re.MULTILINE))
    stubs = "".join(f"int {name}() {{ return 0; }}\n" for name in sorted(names - answered))
    major, minor = torch.version.cuda.split(".")[:2]
    whole = library.with_suffix(f".{os.getpid()}")  # other processes may start with the one that is there
    subprocess.run(
        [
            "gcc",
            "-shared",
            "-fPIC",
            "-O1",
            "-w",
            "-x",
            "c",
            "-",
            "-o",
            whole,
            *options,
            f"-DCUDA_VERSION={int(major) * 1000 + int(minor) * 10}",
            *(f"-I{folder}" for folder in _INCLUDED),
        ],
        input=text + stubs,
        text=True,
        check=True,
    )
    whole.replace(library)


def main(words: list[str]) -> None:
    """Goes on as that command of Python, with both libraries in a folder of the user's cache."""
    if not words:
        raise SystemExit("tests.gpu: give a command, such as launch/bench/gpu.py --part 1; it is one GPU of one rank")
    if not words[0].startswith("-") and not Path(words[0]).exists():
        raise SystemExit(
            f"tests.gpu: there is no file {words[0]}; give a command, such as launch/bench/gpu.py --part 1"
        )
    if reason := missing():
        raise SystemExit(f"tests.gpu: {reason}")
    folder = Path.home() / ".cache" / "dstrain-tests-gpu"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(build(folder))
    os.execv(sys.executable, [sys.executable, *words])
