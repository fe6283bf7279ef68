"""Which columns of a table are images, labels and captions: by data.columns, by the types that `datasets` has written
into the schema's metadata, or else by their names and Arrow's types.
"""

import json
from typing import Any, NamedTuple

import pyarrow as pa

from dstrain.data.files.arrow import can_hold_bytes
from dstrain.data.files.tables import match_column_names
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
    kinds: tuple[str, ...]  # what the columns hold, in this order

    def describe(self) -> str:
        """Returns in words what the columns hold and their names, for messages: "images in image, numbers in label"."""
        names = (self.image, *filter(None, [self.label]), *self.captions)
        return ", ".join(f"{kind} in {name}" for name, kind in zip(names, self.kinds))


def choose_columns(schema: pa.Schema, request: Request, display_name: str) -> Columns:
    """Returns which columns of a table hold the images (or clips), the labels and the captions. The captions are ()
    unless the request asks for them.

    schema: the table's Arrow schema.
    display_name: names the table in messages.
    Raises ConfigError if no column or more than one may hold the images, if data.columns names a column that does not
    exist, if it names several columns for the image or for the label, or if the labels are neither whole numbers nor
    texts.
    """
    chosen = {key: [names] if isinstance(names, str) else names for key, names in request.columns.items()}
    for key in ("image", "label"):
        if len(chosen.get(key, ())) > 1:
            raise ConfigError(f"data.columns={{{key}: {', '.join(chosen[key])}}}: a sample has one {key}, so name one")
    if unknown := [f"{key}: {name}" for key, names in chosen.items() for name in names if name not in schema.names]:
        raise ConfigError(
            f"{display_name} has no column {', '.join(unknown)} of data.columns; it has {', '.join(schema.names)}"
        )
    images = find_image_columns(schema, request)
    if len(images) != 1:
        found = f"several columns of images ({', '.join(images)})" if images else "no column of images"
        raise ConfigError(
            f"{display_name} has {found} among {', '.join(schema.names)}: name one, data.columns={{image: NAME}}"
        )
    label = _choose_label_column(schema, chosen, request, display_name)
    names = _read_hugging_face_features(schema).get(label, {}).get("names") if label else None
    classes = tuple(map(str, names)) if isinstance(names, list) else ()
    captions = tuple(chosen.get("caption", ()))
    if not captions:
        texts = [
            name for name in match_column_names(_CAPTIONS, schema.names) if _can_hold_captions(schema.field(name).type)
        ]
        captions = tuple(texts[:1])
    captions = captions if request.captions else ()
    kinds = ["images", *(_describe_column_type(schema.field(name).type) for name in (label, *captions) if name)]
    return Columns(images[0], label, captions, classes, tuple(kinds))


def find_image_columns(schema: pa.Schema, request: Request) -> list[str]:
    """Returns the columns that may hold the images, or the clips if the request asks for clips; [] if there are none.

    Returns the first of these:
    - the columns that data.columns names; if it names any, no other columns count,
    - the columns that Hugging Face's `datasets` has marked with the type Image (or Video),
    - the first column with a usual name, such as "image",
    - all columns of structs that can hold bytes.
    """
    if chosen := request.columns.get("image"):
        return [name for name in ([chosen] if isinstance(chosen, str) else chosen) if name in schema.names]
    fitting = [field.name for field in schema if can_hold_bytes(field.type)]
    of_clips = request.noun == "clips"
    if marked := [
        name for name in _find_columns_by_feature_type(schema, "Video" if of_clips else "Image") if name in fitting
    ]:
        return marked
    named = match_column_names((*_CLIPS * of_clips, *_IMAGES), fitting)
    return named[:1] or [name for name in fitting if pa.types.is_struct(schema.field(name).type)]


def _choose_label_column(
    schema: pa.Schema, named_columns: dict[str, list[str]], request: Request, display_name: str
) -> str | None:
    """Returns the name of the column of labels.

    Returns None if there is no such column, if data.labels=none, or if the column holds lists or structs, such as
    boxes, and data.columns does not name it.
    named_columns: data.columns, each value as a list.
    Raises ConfigError if the column holds anything else than integers, booleans or texts.
    """
    if request.labels == "none":
        return None
    marked = _find_columns_by_feature_type(schema, "ClassLabel")
    found = [
        *named_columns.get("label", ()),
        *match_column_names(_LABELS, schema.names),
        *(marked if len(marked) == 1 else ()),
    ]
    label = found[0] if found else None
    if label is None or _can_hold_labels(schema.field(label).type):
        return label
    if "label" not in named_columns and pa.types.is_nested(schema.field(label).type):
        return None  # These are boxes, say, and not classes.
    raise ConfigError(
        f"{display_name}: the column {label} holds {schema.field(label).type}, and labels are whole "
        "numbers or names: name another, data.columns={label: NAME}, or write data.labels=none"
    )


def _can_hold_labels(arrow_type: pa.DataType) -> bool:
    """Returns whether a column of this Arrow type can hold labels: integers, booleans or texts, also as categories."""
    if pa.types.is_dictionary(arrow_type):  # Categories of pandas come so.
        arrow_type = arrow_type.value_type
    return pa.types.is_integer(arrow_type) or pa.types.is_boolean(arrow_type) or _is_string_type(arrow_type)


def _describe_column_type(arrow_type: pa.DataType) -> str:
    """Returns "texts", "numbers" or "lists": what a column of labels or captions holds, judged by its Arrow type. Types
    that differ only in width, such as int32 and int64, give the same word.
    """
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    if _is_string_type(arrow_type):
        return "texts"
    return "numbers" if pa.types.is_integer(arrow_type) or pa.types.is_boolean(arrow_type) else "lists"


def _can_hold_captions(arrow_type: pa.DataType) -> bool:
    """Returns whether a column of this Arrow type can hold captions: texts, or lists of texts."""
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type):
        arrow_type = arrow_type.value_type
    return _is_string_type(arrow_type)


def _is_string_type(arrow_type: pa.DataType) -> bool:
    return pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type)


def _find_columns_by_feature_type(schema: pa.Schema, feature_type: str) -> list[str]:
    """Returns the columns that Hugging Face's `datasets` has marked with a type such as "ClassLabel"; [] if none."""
    features = _read_hugging_face_features(schema)
    return [name for name in features if features[name].get("_type") == feature_type and name in schema.names]


def _read_hugging_face_features(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """Returns what Hugging Face's `datasets` has written about each column into the schema's metadata: {"label":
    {"_type": "ClassLabel", "names": [...]}}. Returns {} if the metadata have no such entry, or cannot be parsed.
    """
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
