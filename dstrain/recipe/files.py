"""Recipes: YAML file and `key=value` overrides to a checked Run and back, and what differs between two Runs.

All faults are collected and raised together as one ConfigError, each line naming the key, what is wrong and what to
write instead. Overrides are YAML values under dotted keys (`optimizer.betas=[0.9,0.95]`). `model.*` is free here and
checked by the system's own class in `check`, since the systems stand above this file.
"""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from dstrain.recipe.run import ConfigError, Run, Section

Change = tuple[str, Any, Any]                # dotted key, old value, new value

# What other trainers call our keys; names that are close in spelling are found without this table.
_SYNONYMS = {
    "learning_rate": "optimizer.lr", "wd": "optimizer.weight_decay", "max_grad_norm": "optimizer.clip",
    "gradient_clipping": "optimizer.clip", "grad_clip": "optimizer.clip", "warmup_steps": "optimizer.warmup",
    "batch_size": "batch.global", "global_batch_size": "batch.global", "train_batch_size": "batch.global",
    "micro_batch": "batch.micro", "train_micro_batch_size_per_gpu": "batch.micro", "epochs": "steps",
    "max_steps": "steps", "num_steps": "steps", "output_dir": "folder", "results_dir": "folder", "out": "folder",
    "global_seed": "seed", "data_path": "data.path", "data_dir": "data.path", "num_workers": "data.workers",
    "image_size": "data.image_size", "ema_rate": "ema.decays", "ema_decay": "ema.decays", "ckpt": "init_from",
    "use_checkpoint": "model.recompute", "large_size": "model.image_size",
    "log_every": "every.report", "ckpt_every": "every.save", "save_interval": "every.save",
}
# What may not change when a run goes on: it would be another run. Whole sections or single keys.
_FIXED = ("system", "model", "data.image_size", "data.height", "data.num_frames", "data.frame_stride", "data.channels",
          "data.flip", "data.held_out", "data.draft", "batch.global", "seed", "optimizer", "ema")
# The data's path may move, since their fingerprint is compared; these decide how, not what.
_FREE = ("model.recompute", "model.guidance_channels", "model.timestep_respacing", "model.evaluate_steps",
         "model.num_candidates", "model.loss_chunk", "model.decoding.sample_temperature",
         "model.decoding.confidence_temperature", "model.decoding.critic_noise", "model.decoding.critic_noise_schedule",
         "optimizer.decay_steps")
# Null in what was written before these were filled in, and where a first stage is a name on the hub.
# Without a text encoder nothing was encoded in training: one may be named later, for prompts.
_FILLED_IN = ("model.first_stage.scaling_factor", "model.first_stage.shift", "model.first_stage.fingerprint",
              "model.text_encoder", "model.text_encoder_fingerprint", "model.codes.text_encoder",
              "model.tokenizer.path", "model.tokenizer.fingerprint")


def load(recipe: Path | None, overrides: Iterable[str] = ()) -> Run:
    """The Run of a recipe file (None: the schema's defaults) with `key=value` overrides applied."""
    values = _read(recipe) if recipe is not None else {}
    problems: list[str] = []
    given: set[str] = set()
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key:
            problems.append(f"{override!r} is no override: write key=value without spaces, for example steps=500")
            continue
        try:
            _put(values, key, yaml.load(text, _Loader))
            given.add(key)
        except yaml.YAMLError:
            problems.append(f"{key}={text} cannot be read as a value: quote it, for example {key}='\"...\"'")
        except TypeError as error:
            problems.append(str(error))
    problems += _move_init_from(values, given)
    # `optimizer:` with nothing below it is an empty section.
    values = {key: {} if value is None and _section(key) else value for key, value in values.items()}
    try:
        run = Run.model_validate(values)
    except ValidationError as error:
        problems += faults(error, Run, given=given, recipe=recipe)
    if problems:
        raise ConfigError(*problems)
    return run


def check(run: Run, config_class: type[BaseModel]) -> Run:
    """The Run with its model section checked and completed by the system's class: every default written out.

    A class may have `completed(model, run)`, which fills in what the other sections say already.
    """
    try:
        completed = getattr(config_class, "completed", lambda model, run: model)
        model = config_class.model_validate(completed(run.model, run))
    except ValidationError as error:
        raise ConfigError(*faults(error, config_class, prefix="model")) from None
    return run.model_copy(update={"model": _plain(model)})


def dump(run: Run) -> str:
    """YAML that `load` reads back to an equal Run."""
    return yaml.dump(_plain(run), Dumper=_Dumper, sort_keys=False, width=100)


def differences(old: Run, new: Run) -> list[Change]:
    """Every key whose value differs; None where one side does not have it."""
    before, after = _flat(old), _flat(new)
    keys = [*before, *(key for key in after if key not in before)]
    return [(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]


def refused(old: Run, new: Run) -> list[Change]:
    """The differences that would make a resumed run another run; `steps` and intervals may change."""
    changes = [change for change in differences(old, new)
               if any(change[0] == fixed or change[0].startswith(fixed + ".") for fixed in _FIXED)
               and change[0] not in _FREE and not (change[0] in _FILLED_IN and change[1] is None)]
    if "constant" not in (old.optimizer.schedule, new.optimizer.schedule):
        # An open horizon follows `steps`: a longer run would bend the learning rate of the part already trained.
        before, after = (run.optimizer.decay_steps or run.steps for run in (old, new))
        if before != after:
            changes.append(("optimizer.decay_steps", before, after))
    return changes


def refusals(changes: Iterable[Change], folder: Path) -> ConfigError:
    """The error that names what a resumed run may not change, and what to do."""
    lines = []
    for key, old, new in changes:
        remedy = f"write {key}={_text(old)} to keep it"
        if key.startswith("model.codes."):                   # filled in from the data: what is written here is lost
            remedy = "give the data.path of the earlier latents"
        elif key in ("model.first_stage.fingerprint", "model.tokenizer.fingerprint"):
            kind = "autoencoder" if "first_stage" in key else "tokenizer"
            remedy = f"put the earlier {kind} back at {key.removesuffix('fingerprint')}path"
        elif key == "optimizer.decay_steps":
            remedy = f"the learning rate decays until this step; write optimizer.decay_steps={old} to keep it"
        lines.append(f"{key} was {_text(old)} in {folder} and is now {_text(new)}: {remedy}, --allow-change to go on "
                     "with the new value, or another folder= for a new run")
    return ConfigError(*lines)


def suggestion(key: str, known: Iterable[str]) -> str:
    """' (did you mean ...?)' for a key that is unknown among `known` dotted keys, or nothing."""
    known = list(known)
    leaf = key.rpartition(".")[2].lower().replace("-", "_")
    found = [name for name in known if name.rpartition(".")[2] == leaf] or \
            [name for name in (_SYNONYMS.get(leaf),) if name in known]
    if not found:
        beside = [name for name in known if name.rpartition(".")[0] == key.rpartition(".")[0]]
        found = difflib.get_close_matches(key.lower().replace("-", "_"), beside, 1) or \
            difflib.get_close_matches(key.lower().replace("-", "_"), known, 1, 0.75)
        if not found:
            leaves = {name.rpartition(".")[2]: name for name in known}
            found = [leaves[name] for name in difflib.get_close_matches(leaf, leaves, 1)]
    return f" (did you mean {' or '.join(found[:3])}?)" if found else ""


def nearby(path: Path, pattern: str) -> str:
    """What a missing file may have been: the files of its folder, the closest one first."""
    names = sorted(found.name for found in path.parent.glob(pattern)) if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, 1)
    meant = f" (did you mean {path.parent / close[0]}?)" if close else ""
    holds = f"holds {', '.join(names[:12])}" if names else f"has no {pattern}"
    return f"{meant}; {path.parent}/ {holds}"


def _read(recipe: Path) -> dict[str, Any]:
    try:
        values = yaml.load(recipe.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise ConfigError(f"--recipe {recipe}: there is no such file{nearby(recipe, '*.yaml')}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--recipe {recipe} cannot be read as a text file: {error}") from None
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


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key in nested sections."""
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


def _move_init_from(values: dict[str, Any], given: set[str]) -> list[str]:
    """Moves the synonym model.init_from to init_from."""
    model = values.get("model")
    if not isinstance(model, dict) or "init_from" not in model:
        return []
    path = model.pop("init_from")
    if values.get("init_from") in (None, path) or given >= {"model.init_from"} > given & {"init_from"}:
        values["init_from"] = path
        return []
    if "init_from" in given and "model.init_from" not in given:
        return []                                            # the command line's spelling wins over the recipe's
    return [f"init_from={values['init_from']} and its synonym model.init_from={path} differ: give one of them"]


def faults(error: ValidationError, schema: type[BaseModel], prefix: str = "", given: set[str] = frozenset(),
              recipe: Path | None = None) -> list[str]:
    """Pydantic's errors as lines that name key, value, expectation and origin."""
    known = list(_known(schema, prefix))
    lines: list[str] = []
    for item in error.errors():
        key = prefix
        for part in item["loc"]:
            key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
        value = _text(item["input"])
        origin = "command line" if any(key == g or key.startswith((g + ".", g + "[")) for g in given) else recipe
        origin = f" [{origin}]" if origin else ""
        match item["type"]:
            case "extra_forbidden":
                siblings = [name for name in known if name.rpartition(".")[0] == key.rpartition(".")[0]]
                meant = suggestion(key, known) or f"; known here: {', '.join(siblings)}"
                lines.append(f"{key}: there is no such key{meant}{origin}")
            case "value_error" if prefix == "":
                lines += str(item["ctx"]["error"]).splitlines()          # names its keys itself
            case "value_error":
                lines.append(f"{key}: {item['ctx']['error']}{origin}")
            case "string_pattern_mismatch" if key == "name":
                lines.append(f"{key}={value}: letters, digits and . _ - only, since a folder is named by it{origin}")
            case "no_bool":
                lines.append(f"{key} {item['msg']}: give a number or a name{origin}")
            case "missing":
                lines.append(f"{key} is needed and not given{origin}")
            case "model_type" | "model_attributes_type" | "dict_type":
                inner = [name for name in known if name.startswith(key + ".")]
                example = f"; set single entries, for example {inner[0]}=..." if inner else ""
                lines.append(f"{key}={value} is a value where a section is expected{example}{origin}")
            case _:
                text = item["msg"].removeprefix("Value error, ").replace("Input should", "it should")
                lines.append(f"{key}={value}: {text}{origin}")
    return lines


def _known(schema: type[BaseModel], prefix: str = "") -> Iterable[str]:
    """Dotted keys of a schema, sections entered."""
    for name, field in schema.model_fields.items():
        key = f"{prefix}.{field.alias or name}" if prefix else field.alias or name
        yield key
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _known(field.annotation, key)


def _plain(value: Any) -> Any:
    """A model as what YAML can say; pydantic's own JSON mode would turn inf to null."""
    if isinstance(value, BaseModel):
        value = value.model_dump(by_alias=True)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def _section(key: str) -> bool:
    field = Run.model_fields.get(key)
    kind = field.annotation if field else None
    return key == "model" or (isinstance(kind, type) and issubclass(kind, Section))


def _flat(run: Run) -> dict[str, Any]:
    def walk(values: dict[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
        for name, value in values.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value

    return dict(walk(_plain(run), ""))


def _text(value: Any) -> str:
    """A value as it would be written in an override."""
    named = {None: "null", "": "''", True: "true", False: "false"}
    text = named[value] if value is None or isinstance(value, (bool, str)) and value in named else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain scalars (3e-4 is a number, off is a string, no dates), and no key twice."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is no text: put it into quotes", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice, first in line {seen[key]}", key_node.start_mark)
            seen[key] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what _Loader would read as something else than text."""

    yaml_implicit_resolvers: dict[str, Any] = {}


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9][0-9_]*\.[0-9_]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
     r"|[-+]?\.(inf|Inf)|\.(nan|NaN)", "-+.0123456789"),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), list(_first))
