"""Reads a recipe from a YAML file and `key=value` overrides as a checked Run, and writes a Run as YAML.

All problems are collected and raised together as one ConfigError. Overrides are YAML values under dotted keys
(`optimizer.betas=[0.9,0.95]`). `load_recipe` accepts any mapping as the section `model`; `complete_model_section`
checks it by the Config class of the system.
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import BaseModel, ValidationError

from dstrain.disk import small
from dstrain.recipe.errors import ConfigError
from dstrain.recipe.problems import format_value, list_problems, suggest_files
from dstrain.recipe.run import Run
from dstrain.recipe.section import find_section_class
from dstrain.recipe.trust import is_in_run_or_export

_LARGEST, _DEEPEST = 20_000, 32  # entries and levels of a recipe, far above any


def load_recipe(recipe: Path | None, overrides: Iterable[str] = ()) -> Run:
    """Reads a recipe file, applies `key=value` overrides to it, and returns the checked Run. If `recipe` is None, the
    schema's defaults take the place of the file. In the file of a run or an export, a section `data` without `upright`
    gets upright=False. Raises ConfigError with every problem that was found.
    """
    values = _read_recipe(recipe) if recipe is not None else {}
    if recipe is not None and is_in_run_or_export(recipe) and isinstance(values.get("data"), dict):
        values["data"].setdefault("upright", False)  # earlier versions did not write this key
    overridden, problems = _apply_overrides(values, overrides)
    problems += _move_init_from_out_of_model(values, overridden)
    # `optimizer:` with nothing below it is an empty section.
    sections = {"model", *(key for key, field in Run.model_fields.items() if find_section_class(field) is not None)}
    values = {key: {} if value is None and key in sections else value for key, value in values.items()}
    try:
        run = Run.model_validate(values)
    except ValidationError as error:
        problems += list_problems(error, Run, overridden=overridden, recipe=recipe)
    if problems:
        raise ConfigError(*problems)
    if run.data.mixture and "data.path" in overridden and values["data"]["path"] is not None:
        raise ConfigError(
            f"data.path={values['data']['path']}: data.mixture takes its place: leave one of them out, "
            "or write data.mixture=null, too"
        )
    return run


def complete_model_section(run: Run, config_class: Any, overrides: Iterable[str] = ()) -> Run:
    """Returns the Run with a complete section `model`: filled in from the rest of the recipe, checked by the system's
    Config, and with all defaults written out. Raises ConfigError if the section is wrong, or if one of `overrides`,
    those of the command line, has another value than the data give.
    """
    completed = config_class.complete_section(run.model, run)
    if replaced := describe_replaced_entries("model", run.model, completed, overrides):
        raise ConfigError(*replaced)
    try:
        model = config_class.model_validate(completed)
    except ValidationError as error:
        raise ConfigError(*list_problems(error, config_class, prefix="model")) from None
    return run.model_copy(update={"model": convert_to_plain_values(model)})


def describe_replaced_entries(
    section: str, given: dict[str, Any], completed: dict[str, Any], overrides: Iterable[str]
) -> list[str]:
    """Returns a message for each entry of a section that an override sets, and to which the data have given another
    value.

    given: the entries as the user set them
    completed: the entries after filling in from the data
    overrides: the overrides, such as "model.num_classes=10"

    Leaves out entries that are null in `given`, and those that only the recipe file sets.
    """
    keys = [override.partition("=")[0].strip().split(".") for override in overrides]
    names = {key[1] for key in keys if key[0] == section and len(key) > 1}
    problems = []
    for name in sorted(names & given.keys()):
        value, filled = convert_to_plain_values((given[name], completed.get(name)))
        if value is not None and not _keeps_given_value(value, filled):
            problems.append(
                f"{section}.{name}={format_value(value)}: it is filled in from the data, here with "
                f"{format_value(filled)}: leave it out"
            )
    return problems


def _keeps_given_value(given: Any, completed: Any) -> bool:
    """Returns whether a completed value is still the one that the user gave. Two sections count as the same if
    `completed` keeps each entry of `given` that is not null.
    """
    if isinstance(given, dict) and isinstance(completed, dict):
        return all(value is None or _keeps_given_value(value, completed.get(name)) for name, value in given.items())
    return bool(given == completed)


def dump_run(run: Run) -> str:
    """Returns a Run as YAML text. `load_recipe` reads it back as an equal Run."""
    return yaml.dump(convert_to_plain_values(run), Dumper=_Dumper, sort_keys=False, width=100)


def convert_to_plain_values(value: Any) -> Any:
    """Converts a value to dicts, lists and scalars that YAML can write. Pydantic models become dicts, tuples become
    lists, and paths become texts, at every depth.
    """
    if isinstance(value, BaseModel):
        value = value.model_dump(by_alias=True)
    if isinstance(value, dict):
        return {key: convert_to_plain_values(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [convert_to_plain_values(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def _read_recipe(recipe: Path) -> dict[str, Any]:
    """Reads a recipe file into a nested dict, {} if the file is empty. Raises ConfigError if the file cannot be read or
    parsed, or does not hold a mapping.
    """
    try:
        values = _parse_yaml(small.read_text(recipe, small.MEGABYTE))
    except FileNotFoundError:
        raise ConfigError(f"--recipe {recipe}: there is no such file{suggest_files(recipe, '*.yaml')}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--recipe {recipe} cannot be read as a text file: {reason}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{recipe}:{mark.line + 1}" if mark else str(recipe)
        raise ConfigError(f"{where}: {error.problem or error.context}; correct the YAML of this line") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{recipe}: {' '.join(str(error).split())}; correct the YAML") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{recipe} holds a {type(values).__name__}: a recipe is sections of `key: value`")
    return values


def _apply_overrides(values: dict[str, Any], overrides: Iterable[str]) -> tuple[set[str], list[str]]:
    """Sets the values of `key=value` overrides in the nested dict `values`, in place. Returns the keys that were set,
    and a line for each override that is wrong.
    """
    overridden: set[str] = set()
    problems: list[str] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        shown, names = f"{format_value(key)}={format_value(text)}", key.split(".")
        if not equals or not all(names) or len(names) > _DEEPEST:
            recipe = ", or --recipe before the name of a recipe" if override.endswith((".yaml", ".yml")) else ""
            problems.append(
                f"{format_value(override)!r} is no override: write key=value without spaces{recipe}, "
                "for example steps=500"
            )
            continue
        if not text.strip():
            problems.append(
                f"{key}= gives nothing, as where a variable of the shell is not set: write a value, "
                f"{key}=null for none, or {key}='\"\"' for an empty text"
            )
            continue
        try:
            _set_dotted_key(values, key, _parse_yaml(text))
            overridden.add(key)
        except _Unspaced as error:
            problems.append(f"{shown}: {error.problem}")
        except yaml.YAMLError:
            remedy = f"quote it, for example {format_value(key)}='\"...\"'"
            if re.search("[\ud800-\udfff]", text):  # Python's surrogates for bytes of an argument that are no UTF-8
                remedy = "it holds bytes that are no UTF-8: rename the file or folder, or name a link to it"
            problems.append(f"{shown} cannot be read as a value: {remedy}")
        except TypeError as error:
            problems.append(str(error))
    return overridden, problems


def _set_dotted_key(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets the value of a dotted key in a nested dict, in place, and makes missing sections. Raises TypeError if a
    plain value stands in the place of a section.
    """
    *sections, leaf = key.split(".")
    for depth, name in enumerate(sections):
        inner = values.get(name)
        if inner is None:
            inner = values[name] = {}
        if not isinstance(inner, dict):
            path = ".".join(sections[: depth + 1])
            raise TypeError(f"{key}: {path} is the value {inner!r} and has no entries; write {path}=...")
        values = inner
    values[leaf] = value


def _move_init_from_out_of_model(values: dict[str, Any], overridden: set[str]) -> list[str]:
    """Renames the key model.init_from to its synonym init_from, in place. If both are given with different values,
    keeps the one that only the command line sets. Returns a list with one problem if the command line sets neither or
    both, else [].
    """
    model = values.get("model")
    if not isinstance(model, dict) or "init_from" not in model:
        return []
    path = model.pop("init_from")
    if values.get("init_from") in (None, path) or overridden >= {"model.init_from"} > overridden & {"init_from"}:
        values["init_from"] = path
        return []
    if "init_from" in overridden and "model.init_from" not in overridden:
        return []  # the command line's spelling wins over the recipe's
    return [f"init_from={values['init_from']} and its synonym model.init_from={path} differ: give one of them"]


def _parse_yaml(text: str) -> Any:
    """Returns the value of a YAML text, read by _Loader. Raises YAMLError if the text cannot be parsed."""
    try:
        return yaml.load(text, _Loader)
    except ValueError as error:  # a number of thousands of digits
        raise yaml.YAMLError(error) from None


class _Unspaced(yaml.constructor.ConstructorError):
    """The error for a key such as {label:name}: without a space, YAML reads it as a key without a value."""


class _Loader(yaml.SafeLoader):
    """Reads YAML with the scalars of YAML 1.2: 3e-4 is a number, off is a text, there are no dates. Raises YAMLError
    for repeated keys, keys that are no texts, tags, and texts that are too large or too deeply nested.

    The size of a text includes the node of an alias once for each use, since a few lines of nested aliases can unfold
    to more than memory holds.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._sizes: dict[yaml.Node, int] = {}  # nodes within a node, aliases unfolded

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """Reads one YAML node. Raises ComposerError for tags, and for texts that are too large or too deeply nested."""
        event, self._depth = self.peek_event(), self._depth + 1
        tag = getattr(event, "tag", None)
        for is_wrong, problem in (
            (tag, f"the tag {tag} is none of a recipe's"),
            (self._depth > _DEEPEST, f"it is nested deeper than {_DEEPEST} levels"),
            (len(self._sizes) >= _LARGEST, f"it holds more than {_LARGEST} entries"),
        ):
            if is_wrong:
                raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        inner = (
            [part for pair in node.value for part in pair]
            if isinstance(node, yaml.MappingNode)
            else node.value
            if isinstance(node, yaml.SequenceNode)
            else []
        )
        if isinstance(event, yaml.AliasEvent):  # to a node around it, which has no size yet: endless
            size = self._sizes.get(node, math.inf)
        else:
            size = self._sizes[node] = 1 + sum(map(self._sizes.__getitem__, inner))
        if size > _LARGEST:
            problem = f"with its aliases unfolded it holds more than {_LARGEST} entries"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Makes a dict of a YAML mapping. Raises ConstructorError for repeated keys, and for keys that are no texts."""
        seen: dict[Any, int] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is no text: put it into quotes", key_node.start_mark
                )
            name, colon, value = key.partition(":")
            empty = value_node.value == "" and value_node.tag.endswith(":null")  # '' has no such tag
            if node.flow_style and colon and key_node.style is None and empty:
                problem = f"{{{key}}} lacks a space after the colon: write {{{name}: {value}}}"
                raise _Unspaced(None, None, problem, key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice, first in line {seen[key]}", key_node.start_mark
                )
            seen[key] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes YAML, and quotes each text that _Loader would read as a number, a bool or null."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*\.[0-9_]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf)|\.(nan|NaN)",
        "-+.0123456789",
    ),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), list(_first))
