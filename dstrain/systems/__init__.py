"""The systems by name. A system's folder is imported when it is asked for, so that one never needs another's libraries.

A folder exposes `Config`, a pydantic model of its recipe section, and `build(config) -> System`.
"""

import difflib
import importlib
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ValidationError

from dstrain.recipe import ConfigError, faults
from dstrain.systems.base import System

NAMES = {"dit": "dstrain.systems.dit", "iddpm": "dstrain.systems.iddpm",      # name in a recipe -> module
         "vae": "dstrain.systems.vae", "prior": "dstrain.systems.prior",
         "phenaki.tokenizer": "dstrain.systems.phenaki.tokenizer", "phenaki": "dstrain.systems.phenaki"}


def build(name: str, config: dict[str, Any]) -> System:
    """The system `name` from its recipe section. ConfigError: an unknown name or field, or a value out of range."""
    module = _module(name)
    try:
        checked = module.Config.model_validate(config)
    except ValidationError as error:
        raise ConfigError(*faults(error, module.Config, "model")) from None
    return module.build(checked)


def config_class(name: str) -> type[BaseModel]:
    """The model of a system's recipe section: its fields, defaults and their meaning."""
    return _module(name).Config


def _module(name: str) -> ModuleType:
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"system: {name!r} is unknown; one of {', '.join(NAMES)}{hint}")
    return importlib.import_module(NAMES[name])
