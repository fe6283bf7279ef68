"""How it scales: the only place where DeepSpeed is imported."""

import hashlib
import logging
import os
import sys
from pathlib import Path


def prepare_environment() -> None:
    """Sets the environment that DeepSpeed reads when it is imported; what the user has set stays."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it would guess the same, with a warning
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns that there is no CUDA
    # One folder of compiled extensions for each environment, or two of them rebuild over each other.
    environment = f"{sys.prefix}-{sys.version_info[:2]}-{torch.__version__}"
    name = f"dstrain-{hashlib.sha1(environment.encode()).hexdigest()[:12]}"
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path.home() / ".cache" / "torch_extensions" / name))
    # ninja lies beside python in an environment that was not activated.
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = beside + os.pathsep + os.environ.get("PATH", "")
