"""Tiny configs of every system, each from cases.py in the folder of that system's tests.

Such a file defines CASES, a list of model sections. It may also define:
    request(system, seeds)       a Request, where four steps without conditions do not fit
    completed(config, folder)    the section with the files that it needs
    EVALUATES_BY_KEYS = False    where evaluation on held-out data uses no noise
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
    """The Request with which tests draw from a tiny system."""
    own = getattr(modules()[name], "request", None)
    return own(system, seeds) if own else Request(torch.tensor(seeds), {}, 4)
