"""Compares two Runs key by key, and finds the changes that a resumed run refuses."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dstrain.recipe.errors import ConfigError
from dstrain.recipe.files import convert_to_plain_values
from dstrain.recipe.problems import OTHER_VERSION, format_value
from dstrain.recipe.run import Run
from dstrain.recipe.section import find_resume_rule, find_section_class, is_known_key

Change = tuple[str, Any, Any]  # dotted key, old value, new value


def list_differences(old: Run, new: Run) -> list[Change]:
    """Lists (dotted key, old value, new value) for each key whose value differs between two Runs. If one Run does not
    have the key, its value there is None.
    """
    before, after = _flatten_run(old), _flatten_run(new)
    keys = [*before, *(key for key in after if key not in before)]
    return [(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]


def list_refused_changes(old: Run, new: Run, system: type[BaseModel]) -> list[Change]:
    """Lists (dotted key, old value, new value) for each key that differs between the two Runs and that a resumed run
    may not change. `system` is the Config class of the section `model`, and gives the defaults of keys that the section
    lacks.

    Lists another system alone. If the learning rates of both Runs decay, and their decay ends at different steps, lists
    this as optimizer.decay_steps.
    """

    def is_change_allowed(key: str, before: Any) -> bool:
        """Returns whether a resumed run may have another value of `key`; `before` is the old value."""
        rule = find_resume_rule(key, Run, system)
        return rule.may_change or (rule.may_be_filled_in and before is None)

    if old.system != new.system:  # decides what all keys of the model mean
        return [("system", old.system, new.system)]
    before, after = (run.model_copy(update={"model": _fill_in_defaults(run.model, system)}) for run in (old, new))
    changes = [change for change in list_differences(before, after) if not is_change_allowed(*change[:2])]
    if "constant" not in (old.optimizer.schedule, new.optimizer.schedule):
        # Without decay_steps the schedule ends at `steps`: more steps would have changed all learning rates so far.
        horizon, other = (run.optimizer.decay_steps or run.steps for run in (old, new))
        if horizon != other:
            changes.append(("optimizer.decay_steps", horizon, other))
    return changes


def _fill_in_defaults(model: dict[str, Any], system: type[BaseModel]) -> dict[str, Any]:
    """Returns a copy of the section `model` in which missing keys have the defaults of the Config class `system`.
    Sections within it that are given as dicts are completed in the same way.
    """
    defaults = system.model_construct().model_dump(mode="json", warnings=False)
    filled = defaults | model
    for key, value in model.items():
        section = find_section_class(system.model_fields[key]) if key in system.model_fields else None
        if section is not None and isinstance(value, dict):
            filled[key] = _fill_in_defaults(value, section)
    return filled


def make_refused_changes_error(changes: Iterable[Change], folder: Path, system: type[BaseModel]) -> ConfigError:
    """Returns a ConfigError about changes that a resumed run may not have. It names each key, its old value, its new
    value and the remedies. `folder` is the place of the old recipe, for the message; `system` is the Config class of
    the section `model`.
    """
    lines = []
    for key, old, new in changes:
        remedy = find_resume_rule(key, Run, system).remedy or f"write {key}={format_value(old)} to keep it"
        if key == "optimizer.decay_steps":
            remedy = f"the learning rate decays until this step; write optimizer.decay_steps={old} to keep it"
        lines.append(
            f"{key} was {format_value(old)} in {folder} and is now {format_value(new)}: {remedy}, --allow-change to go "
            "on with the new value, or another folder= for a new run"
        )
    return ConfigError(*lines)


def require_known_keys(run: Run, system: type[BaseModel]) -> None:
    """Raises ConfigError if the saved recipe of a run has keys that neither the schema nor, in the section `model`, the
    Config class `system` has.
    """
    unknown = [key for key in _flatten_run(run) if not is_known_key(key, Run, system)]
    if unknown:
        raise ConfigError(*(f"{key}: there is no such key; {OTHER_VERSION}" for key in unknown))


def _flatten_run(run: Run) -> dict[str, Any]:
    """Returns all values of a Run as {dotted key: value}. Entries of a list of sections have keys such as
    data.mixture[0].path.
    """

    def iterate_values(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        """Yields (dotted key, value) of a nested dict; each key begins with `prefix`."""
        for name, value in values.items():
            if isinstance(value, dict):
                yield from iterate_values(value, f"{prefix}{name}.")
            elif isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
                for number, part in enumerate(value):
                    yield from iterate_values(part, f"{prefix}{name}[{number}].")
            else:
                yield f"{prefix}{name}", value

    return dict(iterate_values(convert_to_plain_values(run), ""))
