"""What determines a run: its schema, its file, and what may be wrong in it or change when the run goes on."""

from dstrain.recipe.changes import explain_refused, find_refused, list_differences, require_known_keys
from dstrain.recipe.errors import ConfigError, NotRead, NotSaved, advise_writing, explain_write_errors, reword_errors
from dstrain.recipe.files import check, dump, load
from dstrain.recipe.problems import format_value, list_divisors, list_nearby, list_problems, suggest_key
from dstrain.recipe.run import (
    WIDEST,
    BatchSize,
    Cache,
    Codes,
    Data,
    Ema,
    Faults,
    Optimizer,
    Parallel,
    Run,
    Samples,
    Save,
    Track,
)
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
    "Parallel",
    "Recompute",
    "Run",
    "Samples",
    "Save",
    "Section",
    "Track",
    "advise_writing",
    "check",
    "dump",
    "explain_refused",
    "explain_write_errors",
    "filled_in",
    "find_refused",
    "fixed",
    "format_value",
    "list_differences",
    "list_divisors",
    "list_nearby",
    "list_problems",
    "load",
    "require_known_keys",
    "reword_errors",
    "suggest_key",
]
