"""dstrain: a DeepSpeed-first trainer for visual generative models.

In a notebook: `run = dstrain.load("runs/dit-small")`, then `run.sample(16)`; see dstrain/notebook.py.
"""

import importlib
from typing import Any

__version__ = "0.2.0"
__all__ = ["TrainedRun", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """Imports `dstrain.notebook` when one of its names is first used, so that `import dstrain` alone does not import
    torch. Raises AttributeError for other names.
    """
    if name in __all__:
        return getattr(importlib.import_module("dstrain.notebook"), name)
    raise AttributeError(f"module 'dstrain' has no attribute {name!r}")
