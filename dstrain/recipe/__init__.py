"""What determines a run: its schema (run.py), and its file with what may be wrong in it (files.py)."""

from dstrain.recipe.files import check, differences, dump, faults, load, nearby, refusals, refused, suggestion
from dstrain.recipe.run import (BatchSize, Codes, ConfigError, Data, Ema, Every, Faults, NotSaved, Optimizer, Run,
                                Samples, Save, Section, Track, divisors)

__all__ = ["BatchSize", "Codes", "ConfigError", "Data", "Ema", "Every", "Faults", "NotSaved", "Optimizer", "Run",
           "Samples", "Save", "Section", "Track", "check", "differences", "divisors", "dump", "faults", "load",
           "nearby", "refusals", "refused", "suggestion"]
