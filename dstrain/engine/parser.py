"""Checks the keys and values of DeepSpeed's JSON against the installed release of DeepSpeed.

DeepSpeed ignores unknown top-level keys silently, and its parser stops at the first fault; here all are named at once.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from dstrain.engine import set_deepspeed_environment
from dstrain.engine.schema import (
    REMOVED,
    SUPPORTED,
    UNSUPPORTED,
    collect_support_decisions_by_key,
    find_support_decision_for_key,
    get_dotted_setting,
    iterate_dotted_keys,
    render_short_json,
)
from dstrain.recipe import suggest_key

# Values that DeepSpeed takes as they are: it would read them as others, or fail on them in a step.
_TRUTHS = (
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "flops_profiler.enabled",
    "flops_profiler.detailed",
    "timers.throughput.enabled",
    "timers.throughput.synchronized",
)
_COUNTS = {  # the least one
    "steps_per_print": 1,
    "flops_profiler.profile_step": 1,
    "flops_profiler.top_modules": 1,
    "flops_profiler.module_depth": -1,
}
_WORDS = {
    "log_level": ("debug", "info", "warning", "error", "critical"),
    "communication_data_type": ("fp32", "bf16", "fp16"),
}
_CORRECT = "correct it, or remove it for its default"


def drop_null_settings(settings: dict[str, Any], prefix: str = "") -> None:
    """Removes, in place, each key of DeepSpeed's JSON whose value is null, which stands for the default; in inner
    sections, too. Keeps zero_optimization.stage and keys that dstrain does not know, so that later checks refuse them.
    """
    for name, value in list(settings.items()):
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            drop_null_settings(value, f"{key}.")
        elif value is None and key != "zero_optimization.stage" and _is_known_key(key):
            del settings[name]


def _is_known_key(key: str) -> bool:
    """Returns whether dstrain knows a key of DeepSpeed's JSON or, if the key is a section, any key within it."""
    return find_support_decision_for_key(key) is not None or any(
        each.startswith(f"{key}.") for each in collect_support_decisions_by_key()
    )


class _KeyRecordingDict(dict):
    """A dict that records in `asked` each key that DeepSpeed looks up: these are the keys that the installed release
    reads.
    """

    def __init__(self, values: dict[str, Any]):
        super().__init__(values)
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> "_KeyRecordingDict":
        return self


def describe_refused_settings(settings: dict[str, Any]) -> Iterator[str]:
    """Yields a message for each value that the installed DeepSpeed refuses or would convert to another type, and for
    each key that DeepSpeed does not know and would ignore.

    If a value has a wrong type, is out of range, or stands where a section belongs, checks only for such values.
    """
    settings = {key: _drop_auto_entries(value) for key, value in settings.items() if key not in UNSUPPORTED}
    set_deepspeed_environment()
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    sections = {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}
    rest = _KeyRecordingDict(
        {
            key: _KeyRecordingDict(value) if isinstance(value, dict) else value
            for key, value in settings.items()
            if key not in sections and value != "auto"
        }
    )
    wrong = [*_describe_values_in_place_of_sections(settings), *_describe_wrong_values(settings)]
    if wrong:  # DeepSpeed's parser would stop at the first, in Python's words
        yield from wrong
        return
    # Accumulation and total follow from the world size, which DeepSpeed takes from a process group not yet started.
    rest.pop("train_batch_size", None)
    try:
        DeepSpeedConfig(rest)
    except ValidationError as error:
        for item in error.errors():
            leaf = ".".join(map(str, item["loc"]))
            key = next((key for key in iterate_dotted_keys(settings) if key.endswith(f".{leaf}")), leaf)
            yield _describe_validation_fault(key, item, collect_support_decisions_by_key())
    except Exception as error:  # it raises asserts, AttributeErrors and its own
        yield f"DeepSpeed refuses these settings: {error}"
    else:
        known = rest.asked | set(sections)
        yield from (
            f'"{key}" is no key of DeepSpeed, which would ignore it silently{suggest_key(key, known)}: correct or '
            "remove it"
            for key in settings
            if key not in known and key != "train_batch_size"
        )
        yield from (
            f'"{name}.{key}" is no key of DeepSpeed, which would ignore it silently'
            f"{suggest_key(f'{name}.{key}', [f'{name}.{each}' for each in section.asked])}: correct or remove it"
            for name, section in rest.items()
            if isinstance(section, _KeyRecordingDict) and section.asked
            for key in section
            if key not in section.asked
        )
    for name, model in sections.items():
        block = settings.get(name, {})
        known = [f"{name}.{field.alias or key}" for key, field in model.model_fields.items()]
        try:
            parsed = model(strict=True, **block)
        except ValidationError as error:
            for item in error.errors():
                key = ".".join([name, *map(str, item["loc"])])
                if key not in REMOVED:  # describe_unsupported_keys names these
                    yield _describe_validation_fault(key, item, [*known, *collect_support_decisions_by_key()])
        except AssertionError as error:
            yield f'"{name}": {error}'
        else:
            yield from _describe_converted_values(name, block, parsed)


def _describe_validation_fault(key: str, error: dict[str, Any], known_keys: Iterable[str]) -> str:
    """Returns a message on what is wrong with a key of DeepSpeed's JSON, and on the remedy.

    error        pydantic's description of the fault
    known_keys   keys that exist: the one most like `key` is suggested
    """
    if error["type"] == "extra_forbidden":
        return f'"{key}" is no key of DeepSpeed{suggest_key(key, known_keys)}: correct or remove it'
    if error["type"] == "enum":  # DeepSpeed's stages have an alias, named twice
        members = dict.fromkeys(error["ctx"]["expected"].replace(" or ", ", ").split(", "))
        members.pop("'nvme'", None)  # settings.py refuses it
        return f'"{key}" is {render_short_json(error["input"])}: write one of {", ".join(members)}'
    if error["type"] in ("int_parsing", "float_parsing"):
        return f'"{key}" is {render_short_json(error["input"])}: write a number, without quotation marks'
    value = f" is {render_short_json(error['input'])}" if error["loc"] else ""  # else the whole section
    return f'"{key}"{value}: {error["msg"].removeprefix("Value error, ")}; {_CORRECT}'


def _describe_converted_values(section: str, block: dict[str, Any], parsed: Any) -> Iterator[str]:
    """Yields a message for each value that DeepSpeed has converted to another type, such as "yes" to true or true to a
    number. (dstrain itself would read the unconverted value.)

    section   name of a section of DeepSpeed's JSON
    block     the section, as the user has written it
    parsed    the pydantic model that DeepSpeed has made of it
    """
    names = {field.alias or name: name for name, field in type(parsed).model_fields.items()}
    for key, value in block.items():
        read = getattr(parsed, names.get(key, key), None)  # those that it has replaced are gone
        if isinstance(value, dict):
            yield from _describe_converted_values(f"{section}.{key}", value, read)
        elif isinstance(read, bool) and not isinstance(value, bool):
            yield f'"{section}.{key}" is {render_short_json(value)}: write true or false'
        elif isinstance(read, (int, float)) and isinstance(value, (bool, str)) and not isinstance(read, bool):
            yield f'"{section}.{key}" is {render_short_json(value)}: write a number, without quotation marks'


def _describe_values_in_place_of_sections(settings: dict[str, Any]) -> Iterator[str]:
    """Yields a message for each key of DeepSpeed's JSON that has a plain value where DeepSpeed reads a section."""
    words = [key.split(".") for key in SUPPORTED]
    for key in dict.fromkeys(".".join(parts[:count]) for parts in words for count in range(1, len(parts))):
        value = get_dotted_setting(settings, key)
        if value is not None and not isinstance(value, dict):
            yield f'"{key}" is {render_short_json(value)}: write a section, {{...}}, or remove it'


def _describe_wrong_values(settings: dict[str, Any]) -> Iterator[str]:
    """Yields a message for each value that has a wrong type or is out of range. Checks only keys that DeepSpeed itself
    does not check.
    """
    for key in _TRUTHS:
        value = get_dotted_setting(settings, key)
        if value not in (None, "auto") and not isinstance(value, bool):
            yield f'"{key}" is {render_short_json(value)}: write true or false'
    for key, least in _COUNTS.items():
        value = get_dotted_setting(settings, key)
        if value not in (None, "auto") and (type(value) is not int or value < least):
            yield f'"{key}" is {render_short_json(value)}: write a whole number from {least} on'
    key = "flops_profiler.recompute_fwd_factor"
    value = get_dotted_setting(settings, key)
    if value not in (None, "auto") and (type(value) not in (int, float) or value < 0):
        yield f'"{key}" is {render_short_json(value)}: write a number from 0 on'
    for key, words in _WORDS.items():
        value = get_dotted_setting(settings, key)
        if value not in (None, "auto", *words):
            yield f'"{key}" is {render_short_json(value)}: write one of {", ".join(words)}'


def _drop_auto_entries(value: Any) -> Any:
    """Returns a copy of a section of DeepSpeed's JSON without the entries that are "auto", in inner sections, too.
    Returns a value that is not a section unchanged.
    """
    if not isinstance(value, dict):
        return value
    return {key: _drop_auto_entries(inner) for key, inner in value.items() if inner != "auto"}
