"""Writes docs/reference/ from the code: python docs/make_reference.py. tests/docs/ checks that the pages are current.

recipes.md has every key of a recipe, from the fields of the sections: their comments, or the docstrings below them.
commands.md has every verb with its options, from the dataclasses in dstrain/commands/options/.
deepspeed.md has every key of DeepSpeed's JSON, from the tables in dstrain/engine/schema.py.
"""

import inspect
import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dstrain import systems
from dstrain.commands.main import VERBS, find_options_class
from dstrain.commands.options.command import format_help
from dstrain.engine.schema import STAGE_3, collect_support_decisions_by_key
from dstrain.recipe import Run
from dstrain.recipe.section import find_resume_rule, find_section_class

FOLDER = Path(__file__).parent / "reference"
MADE = "<!-- Made by docs/make_reference.py. Do not edit. -->\n"
NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null", Path: "path"}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}

RECIPES = """# Recipe keys

A recipe is a YAML file of these keys, and `KEY=VALUE` on the command line changes any of them. `--print-config` shows
the values of a run. Keys marked *fixed* determine what a run is: a run that resumes refuses another value
(`--allow-change` accepts it). *Fixed, may be filled in*: null may become a value.
"""
COMMANDS = """# Commands

`dstrain VERB` runs a verb in one process. `deepspeed --module dstrain VERB`, or `deepspeed launch/VERB.py` in a clone,
starts it on all GPUs, and so do `torchrun` and `srun` with the files in `launch/`. [Running](../guides/running.md) has
the exit codes.
"""
DEEPSPEED = """# DeepSpeed's JSON

What dstrain does with each key of the file that `--ds_config` names. The recipe owns batch and optimizer; this file
owns stage, precision, offload and buckets. A key that is not here is refused, also one that a newer DeepSpeed has
added. A null is as if the key were left out. `dstrain train --dry-run` names the faults of a file at once.
"""
VERDICTS = {
    "supported": "Keys that take effect\n\nEach was trained with, against the same steps without it. *Stage 3*: at a "
    "lower stage it changes nothing, and a note says so.",
    "remarked": "Keys that change nothing\n\nMany files have them: a note says so.",
    "no effect": "Keys that are refused because they change nothing\n\nA value that asks for nothing is taken.",
    "refused": "Keys that are refused",
}


def make_pages() -> dict[str, str]:
    """Returns the text of each page by its name."""
    return {"recipes.md": make_recipes(), "commands.md": make_commands(), "deepspeed.md": make_deepspeed()}


def make_recipes() -> str:
    """Returns the page of recipe keys."""
    lines = [MADE, RECIPES]
    plain = [name for name, field in Run.model_fields.items() if find_section_class(field) is None and name != "model"]
    lines += ["## The run itself\n", *list_keys(Run, plain, Run, None)]
    for name, field in Run.model_fields.items():
        section = find_section_class(field)
        if section is not None:
            lines += [f"## {name}\n", *describe_section(section), *list_section(section, name, None)]
    lines.append(
        "## The section model\n\nEach system has a `model` section of its own; `system=` chooses the system.\n"
    )
    for name in systems.list_system_names():
        config = systems.find_config_class(name)
        if config.__module__.startswith("dstrain."):
            lines += [f"### {name}\n", *list_section(config, "model", config)]
    return "\n".join(lines)


def describe_section(section: type[BaseModel]) -> list[str]:
    """Returns the first paragraph of a section's own docstring."""
    text = section.__dict__.get("__doc__") or ""
    return [inspect.cleandoc(text).partition("\n\n")[0].replace("\n", " ") + "\n"] if text else []


def list_section(section: type[BaseModel], prefix: str, config: type[BaseModel] | None) -> list[str]:
    """Returns the table of a section's keys."""
    return list_keys(section, list(section.model_fields), section, config, prefix)


def list_keys(
    section: type[BaseModel], names: list[str], root: type[BaseModel], config: type[BaseModel] | None, prefix: str = ""
) -> list[str]:
    """Returns the lines of a table of keys, those of inner sections behind their section."""
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    lines += [" | ".join(row) for row in rows_of(section, names, prefix, config)]
    return [*(line if line.startswith("|") else f"| {line} |" for line in lines), ""]


def rows_of(
    section: type[BaseModel], names: list[str], prefix: str, config: type[BaseModel] | None
) -> Iterator[tuple[str, str, str, str]]:
    """Yields a row for each key of a section."""
    comments = comments_of(section)
    for name in names:
        field = section.model_fields[name]
        key = ".".join(filter(None, (prefix, field.alias or name)))
        text = re.sub(r"\bNone\b", "null", field.description or comments.get(name, "")).replace("\n", " ").strip()
        rule = find_resume_rule(key.replace("[]", ""), Run, config)
        if not rule.may_change:
            text += " *Fixed, may be filled in.*" if rule.may_be_filled_in else " *Fixed.*"
        inner = find_section_class(field)
        if inner is None:
            yield f"`{key}`", show_type(field), show_default(field), escape(text.strip())
            continue
        many = "[]" if "tuple" in str(field.annotation) else ""
        yield f"`{key}`", f"section{' (a list of)' if many else ''}", show_default(field), escape(text.strip())
        yield from rows_of(inner, list(inner.model_fields), f"{key}{many}", config)


def comments_of(section: type[BaseModel]) -> dict[str, str]:
    """Returns the comment of each field of a section and of the sections that it inherits from.

    A comment stands behind its field and goes on below it in lower case, or stands above it.
    """
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if not (isinstance(base, type) and issubclass(base, BaseModel)) or base is BaseModel:
            continue
        above: list[str] = []
        last = None
        for line in inspect.getsource(base).splitlines()[1:]:
            words = line.strip()
            if (
                line.startswith("    ")
                and not line.startswith("     ")
                and words.partition(":")[0] in base.model_fields
            ):
                last = words.partition(":")[0]
                found[last] = " ".join(above)
                above = []
            if words.startswith("#"):
                comment = words[1:].strip()
                if last is not None and found[last] and not above and comment[:1].islower():
                    found[last] += f" {comment}"
                else:
                    above.append(comment)
            elif "  # " in line and last is not None:
                found[last] = f"{found[last]} {line.partition('  # ')[2]}".strip()
            elif words.startswith(("def ", "@")):
                break
    return found


def show_type(field: FieldInfo) -> str:
    """Returns what values a field takes, in words."""
    bounds = [
        f"{words} {getattr(mark, bound):.10g}"
        for mark in field.metadata
        for bound, words in BOUNDS.items()
        if isinstance(getattr(mark, bound, None), (int, float))
    ]
    return escape(", ".join([name_type(field.annotation), *bounds]))


def name_type(kind: Any) -> str:
    """Returns a type in words."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return name_type(inner[0])
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value) if not isinstance(value, str) else value}`" for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(name_type(part) for part in inner))
    if origin is tuple and inner[-1] is Ellipsis:
        return f"list of {name_type(inner[0])}"
    if origin is tuple:
        return f"[{', '.join(name_type(part) for part in inner)}]"
    if origin is dict:
        return "mapping"
    return NAMES.get(kind, "value")


def show_default(field: FieldInfo) -> str:
    """Returns a field's default as a recipe writes it."""
    if field.default is PydanticUndefined:
        return "" if field.default_factory else "required"
    if isinstance(field.default, BaseModel):
        return ""
    value = field.default
    if isinstance(value, str):
        return f"`{value}`" if value else '`""`'
    return f"`{json.dumps(value, default=str)}`"


def escape(text: str) -> str:
    """Returns text for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def make_commands() -> str:
    """Returns the page of commands: what --help shows."""
    lines = [MADE, COMMANDS]
    for name, verb in VERBS.items():
        text = format_help(find_options_class(verb))
        lines += [f"## {name}\n", *(f"    {line}".rstrip() for line in text.splitlines()), ""]
    return "\n".join(lines)


def make_deepspeed() -> str:
    """Returns the page of DeepSpeed's keys: a table for each of the four things that are done with one."""
    lines = [MADE, DEEPSPEED]
    for verdict, text in VERDICTS.items():
        lines += [f"## {text}\n", "| key | what it does |" if verdict == "supported" else "| key | why |", "|---|---|"]
        for key, decision in sorted(collect_support_decisions_by_key().items()):
            if decision.verdict == verdict:
                high = key.startswith("zero_optimization.") and key.split(".")[1] in STAGE_3
                lines.append(f"| `{key}` | {escape(decision.words)}{'. *Stage 3.*' if high else ''} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in make_pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
