"""Training with DeepSpeed: settings, engines, checkpoints and averages. Only this folder imports DeepSpeed."""

import hashlib
import logging
import os
import sys
from pathlib import Path

from dstrain.distributed.environment import make_private_folder, try_to_make_writable_folder
from dstrain.recipe import ConfigError


def set_deepspeed_environment() -> None:
    """Sets the environment variables that DeepSpeed and torch read when they are imported or compile code:

    DS_ACCELERATOR         cuda if torch finds a GPU, else cpu
    TORCH_EXTENSIONS_DIR   folder of compiled extensions
    TRITON_CACHE_DIR       folder of compiled kernels, only with a GPU
    PATH                   gets the folder of the running Python as its first entry, unless it is among the entries

    Values that the user has set stay. But if a folder cannot be written, or its path is not absolute, the variable is
    set to a private temporary folder. Without a GPU, also silences torch's warning that CUDA is missing.

    Raises ConfigError if the user has set DS_ACCELERATOR to another device than torch finds.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if os.environ.setdefault("DS_ACCELERATOR", device) != device:  # It would guess the same, on a CPU with a warning.
        raise ConfigError(
            f"DS_ACCELERATOR={os.environ['DS_ACCELERATOR']} in the environment, and torch sees "
            f"{'a GPU' if device == 'cuda' else 'no GPU'} here: unset it"
            + (", or hide the GPU by CUDA_VISIBLE_DEVICES=" if device == "cuda" else "")
        )
    if device == "cpu":
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns that there is no CUDA
    # One folder of compiled extensions for each environment, or two of them rebuild over each other.
    environment = f"{sys.prefix}-{sys.version_info[:2]}-{torch.__version__}"
    name = f"dstrain-{hashlib.sha1(environment.encode()).hexdigest()[:12]}"
    _set_variable_to_writable_folder("TORCH_EXTENSIONS_DIR", f"~/.cache/torch_extensions/{name}")
    if device == "cuda":
        _set_variable_to_writable_folder("TRITON_CACHE_DIR", "~/.triton/cache")
    # ninja lies beside python in an environment that was not activated.
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = beside + os.pathsep + os.environ.get("PATH", "")


def _set_variable_to_writable_folder(variable: str, default: str) -> None:
    """Sets an environment variable to a folder that can be written: the one that it names already, or `default` if it
    is not set. If that folder cannot be written, or is no absolute path, sets the variable to a private folder below
    the one for temporary files.
    """
    folder = Path(os.path.expanduser(os.environ.get(variable) or default))
    usable = folder.is_absolute() and try_to_make_writable_folder(folder)
    os.environ[variable] = str(folder if usable else make_private_folder(f"{variable.lower()}-{folder.name}"))
