"""What all sections of a recipe have in common: how values are checked, and how fields say whether they may change.

A mark in a field's annotation says whether its value may change when a run resumes. The entries of a section inherit
the mark of the section:

    optimizer: Annotated[Optimizer, FIXED] = Optimizer()
    recompute: Annotated[bool, MAY_CHANGE] = False
    codes: Annotated[Codes | None, mark_fixed_on_resume("give the data.path of the earlier latents")] = None
"""

import math
import os
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]  # products of two fit into float32
Count = Annotated[int, Field(ge=0)]


def expand_home_in_path(path: str) -> str:
    """Returns the path with the home folder in place of ~. Raises PydanticCustomError if the path is empty, or too long
    for Linux.
    """
    if not path:  # pathlib takes it for the present folder
        raise PydanticCustomError("no_path", "it is empty: name a path, or leave it out")
    path = os.path.expanduser(path)  # A shell does not expand the ~ of data.path=~/images.
    if len(os.fsencode(path)) > 4000 or max(map(len, os.fsencode(path).split(b"/"))) > 255:
        raise PydanticCustomError("long_path", "it is too long for a path, whose names have 255 bytes at most")
    return path


def _validate_recompute_setting(value: Any) -> Any:
    """Returns a valid value of the field recompute. Converts true and false, which earlier versions wrote, to "all" and
    "none". Raises PydanticCustomError for any other value.
    """
    value = {True: "all", False: "none"}[value] if isinstance(value, bool) else value
    if value in ("none", "attention", "all", "offload") or (isinstance(value, int) and value > 0):
        return value
    raise PydanticCustomError(
        "recompute", "should be none, attention, all, offload, or a number k for every k-th block"
    )


Recompute = Annotated[bool | int | str, BeforeValidator(_validate_recompute_setting)]


@dataclass(frozen=True)
class Resume:
    """The mark of a field that says whether its value may change when a run resumes."""

    may_change: bool  # whether a resumed run may have another value
    may_be_filled_in: bool = False  # null may become a value, which an older dstrain did not write
    remedy: str = ""  # what users should do if it has changed; "": write the earlier value


def mark_fixed_on_resume(remedy: str = "") -> Resume:
    """Returns the mark of a field whose value may not change when a run resumes. `remedy` tells users what to do if it
    has changed.
    """
    return Resume(may_change=False, remedy=remedy)


def mark_fixed_once_set(remedy: str = "") -> Resume:
    """Returns the mark of a field whose value may not change when a run resumes, except from null to a value. `remedy`
    tells users what to do if it has changed.
    """
    return Resume(may_change=False, may_be_filled_in=True, remedy=remedy)


MAY_CHANGE, FIXED = Resume(may_change=True), mark_fixed_on_resume()


class Section(BaseModel):
    """A part of a recipe. The docstring below a field is its description."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_misread_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Returns a value unchanged. Raises PydanticCustomError for true or false in a field of another type than bool,
        for a NUL character in a text, and for a number of 2**63 or more.
        """
        for part in value if isinstance(value, (list, tuple)) else (value,):
            # Python's True is an int: without this `steps: true` would be one step.
            if isinstance(part, bool) and bool not in list_types_of_annotation(
                cls.model_fields[str(info.field_name)].annotation
            ):
                raise PydanticCustomError(
                    "no_bool", "is {value}, which has no meaning here", {"value": str(part).lower()}
                )
            if isinstance(part, str) and "\0" in part:
                raise PydanticCustomError("nul", "it holds a NUL, which no name or path has")
            if isinstance(part, (int, float)) and 2**63 <= abs(part) != math.inf:
                raise PydanticCustomError("too_large", "it should be below 2**63 (9.2e18)")
        return value


def list_types_of_annotation(annotation: Any) -> list[Any]:
    """Lists the types of which a type annotation consists: [int, NoneType] for `int | None`."""
    inner = typing.get_args(annotation)
    return [plain for part in inner for plain in list_types_of_annotation(part)] if inner else [annotation]


def find_section_class(field: FieldInfo) -> type[BaseModel] | None:
    """Returns the class of the section that a field holds, or None if it holds a plain value."""
    kinds = list_types_of_annotation(field.annotation)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def iterate_fields(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields (dotted key, field) for each field of a schema. A section comes before the fields within it."""
    for name, field in schema.model_fields.items():
        key = f"{prefix}.{field.alias or name}" if prefix else field.alias or name
        yield key, field
        if (inner := find_section_class(field)) is not None:
            yield from iterate_fields(inner, key)


def is_known_key(key: str, schema: type[BaseModel], system: type[BaseModel]) -> bool:
    """Returns whether every word of a dotted key names a field of the schema. Does not check words below a field that
    holds a plain value. Keys below `model` are those of the Config class `system`.
    """
    return all(field is not None for field in _iterate_fields_along_key(key, schema, system))


def find_resume_rule(key: str, schema: type[BaseModel], system: type[BaseModel]) -> Resume:
    """Returns the mark that says whether the value of a dotted key may change in a resumed run: that of its field, else
    of the nearest section around it, else MAY_CHANGE. `system` is the Config class of the section `model`.
    """
    rule = MAY_CHANGE
    for field in _iterate_fields_along_key(key, schema, system):
        rule = next((mark for mark in field.metadata if isinstance(mark, Resume)), rule) if field else rule
    return rule


def _iterate_fields_along_key(
    key: str, schema: type[BaseModel] | None, system: type[BaseModel]
) -> Iterator[FieldInfo | None]:
    """Yields the field that each word of a dotted key names, from the outermost section on. Ends with None at the first
    word that names no field. Ends without None after a field that holds a plain value. `system` is the Config class of
    the section `model`.
    """
    for depth, name in enumerate(key.split(".")):
        if schema is None:  # below a value
            return
        entries = {field.alias or own: field for own, field in schema.model_fields.items()}
        field = entries.get(name.partition("[")[0])
        yield field
        if field is None:
            return
        schema = system if depth == 0 and name == "model" else find_section_class(field)
