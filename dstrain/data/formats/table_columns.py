"""Which columns of a table are images, labels and captions: by data.columns, by the types that `datasets` has written
beside the schema, or else by their names and Arrow's types.
"""

import json
from typing import Any, NamedTuple

import pyarrow as pa

from dstrain.data.formats.base import Request
from dstrain.recipe import ConfigError

_IMAGES = ("image", "img", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes", "content", "data")
_CLIPS = ("video", "mp4", "clip")
_LABELS = ("label", "labels", "class", "cls", "class_id", "fine_label")
_CAPTIONS = ("caption", "captions", "text", "texts", "prompt", "sentences")


class Columns(NamedTuple):
    image: str
    label: str | None
    captions: tuple[str, ...]
    classes: tuple[str, ...]  # names of a ClassLabel; (): there are none


def columns_of(schema: pa.Schema, request: Request, root: str) -> Columns:
    """Which columns are read. ConfigError: there are none for what is wanted, or several, or one
    that is named is not.
    """
    where = f"{request.key}={root}"
    chosen = {key: [names] if isinstance(names, str) else names for key, names in request.columns.items()}
    for key in ("image", "label"):
        if len(chosen.get(key, ())) > 1:
            raise ConfigError(f"data.columns={{{key}: {', '.join(chosen[key])}}}: a sample has one {key}, so name one")
    if unknown := [f"{key}: {name}" for key, names in chosen.items() for name in names if name not in schema.names]:
        raise ConfigError(
            f"{where} has no column {', '.join(unknown)} of data.columns; it has {', '.join(schema.names)}"
        )
    images = image_columns(schema, request)
    if len(images) != 1:
        raise ConfigError(
            f"{where} has {'several columns' if images else 'no column'} of images"
            f"{' (' + ', '.join(images) + ')' if images else ''} among {', '.join(schema.names)}: name "
            "one, data.columns={image: NAME}"
        )
    features = _features(schema)
    of_classes = [
        name for name, feature in features.items() if feature.get("_type") == "ClassLabel" and name in schema.names
    ]
    label = next((name for name in (*chosen.get("label", ()), *_LABELS) if name in schema.names), None)
    label = label or (of_classes[0] if len(of_classes) == 1 else None)
    if request.labels == "none" or (label is not None and not _is_label(schema.field(label).type)):
        nested = label is not None and pa.types.is_nested(schema.field(label).type)  # boxes, say, and not classes
        if request.labels != "none" and ("label" in chosen or not nested):
            raise ConfigError(
                f"{where}: the column {label} holds {schema.field(label).type}, and labels are whole "
                "numbers or names: name another, data.columns={label: NAME}, or write data.labels=none"
            )
        label = None
    names = features.get(label, {}).get("names") if label else None
    classes = tuple(map(str, names)) if isinstance(names, list) else ()
    captions = (
        tuple(chosen.get("caption", ()))
        or tuple(name for name in _CAPTIONS if name in schema.names and _is_text(schema.field(name).type))[:1]
    )
    return Columns(images[0], label, captions if request.captions else (), classes)


def image_columns(schema: pa.Schema, request: Request) -> list[str]:
    """The columns that may be meant: one, if all is well."""
    if chosen := request.columns.get("image"):
        return [name for name in ([chosen] if isinstance(chosen, str) else chosen) if name in schema.names]
    fitting = [field.name for field in schema if _holds_bytes(field.type)]
    of_clips = request.noun == "clips"
    named = [name for name in (*_CLIPS * of_clips, *_IMAGES) if name in fitting]
    kind = "Video" if of_clips else "Image"
    marked = [name for name, feature in _features(schema).items() if feature.get("_type") == kind and name in fitting]
    return marked or named[:1] or [name for name in fitting if pa.types.is_struct(schema.field(name).type)]


def holds_bytes(schema: pa.Schema) -> bool:
    """Whether a column holds bytes, which may be images under another name."""
    return any(_holds_bytes(field.type) for field in schema)


def _holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _holds_bytes(kind.field("bytes").type)
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_label(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):  # pandas' categories
        kind = kind.value_type
    return any(
        fits(kind) for fits in (pa.types.is_integer, pa.types.is_boolean, pa.types.is_string, pa.types.is_large_string)
    )


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _features(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """The types that `datasets` has written beside the schema: {} where it has not."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
