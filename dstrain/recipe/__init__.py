"""What determines a run: its schema, its file, and what may be wrong in it or change when the run goes on."""

from dstrain.recipe.changes import differences, refusals, refused
from dstrain.recipe.errors import ConfigError, NotRead, NotSaved, reworded, write_errors
from dstrain.recipe.files import check, dump, load
from dstrain.recipe.problems import as_text, divisors, nearby, problems_of, suggestion
from dstrain.recipe.run import WIDEST, BatchSize, Cache, Codes, Data, Ema, Faults, Optimizer, Run, Samples, Save, Track
from dstrain.recipe.section import FIXED, MAY_CHANGE, Recompute, Section, filled_in, fixed

__all__ = [
    "FIXED",
    "MAY_CHANGE",
    "WIDEST",
    "BatchSize",
    "Cache",
    "Codes",
    "ConfigError",
    "Data",
    "Ema",
    "Faults",
    "NotRead",
    "NotSaved",
    "Optimizer",
    "Recompute",
    "Run",
    "Samples",
    "Save",
    "Section",
    "Track",
    "as_text",
    "check",
    "differences",
    "divisors",
    "dump",
    "filled_in",
    "fixed",
    "load",
    "nearby",
    "problems_of",
    "refusals",
    "refused",
    "reworded",
    "suggestion",
    "write_errors",
]
