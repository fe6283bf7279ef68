"""Tiny configs of every system, each from cases.py in the folder of that system's tests.

Such a file holds CASES, a list of model sections, and may hold: request(system, seeds), a Request that differs from four
steps without conditions; completed(config, folder), the section with files that it needs; EVALUATES_BY_KEYS = False where
held-out data are measured without noise.
"""

import importlib
from types import ModuleType

import torch

from dstrain.systems.base import Request
from tests.support.launch import ROOT


def modules() -> dict[str, ModuleType]:
    """The cases.py of each system, by the system's name."""
    folder = ROOT / "tests" / "systems"
    names = [".".join(path.parent.relative_to(folder).parts) for path in sorted(folder.rglob("cases.py"))]
    return {name: importlib.import_module(f"tests.systems.{name}.cases") for name in names}


CASES = {name: module.CASES for name, module in modules().items()}


def request(name: str, system, seeds: list[int]) -> Request:
    """What to draw of a tiny system."""
    own = getattr(modules()[name], "request", None)
    return own(system, seeds) if own else Request(torch.tensor(seeds), {}, 4)
