"""Labels and classes of files that are not given by class folders.

dataset.json     as dataset_tool of StyleGAN and EDM writes it: {"labels": [["00000/img00000000.png", 6], ...]}. Its
                 numbers are the labels, and folders say nothing. With "labels": null the files have no labels
cat_1.png        ADM's convention is read by data.labels=prefix; a message names it if a model needs labels

A class list (data.class_list) says which classes there are, in the order of their labels, and what people call them.

A line is a class: the name of its folder. If all lines begin with a synset (n01440764), a title may follow it:

    n01440764                                 the synsets in order, as ADM, DiT and others have them
    n01440764 tench, Tinca tinca              LOC_synset_mapping.txt of ILSVRC
    golden retriever                          any other name is the whole line

A label that is a number means the class with that name. If no class has it, the label counts the lines from 0, unless
all lines are numbers.
"""

import io
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstrain.data.files.listing import LABELS
from dstrain.data.source import Source
from dstrain.disk import small
from dstrain.disk.texts import LONGEST_TEXT, decode_text, parse_label, parse_whole_number, strip_space_and_bom
from dstrain.recipe import ConfigError

SYNSET = re.compile(r"n\d{8}")
_TITLED = re.compile(r"(n\d{8})(?:[\s,:]+(.*))?")
_MAX_LABEL = 1 << 20  # labels of a dataset.json are below
MAX_LABELS_BYTES = 1 << 30  # a dataset.json of ten million files
_SEARCHED_NAMES = 2000  # so many are searched for a prefix


@dataclass(frozen=True)
class ClassList:
    """Holds the classes of data.class_list in the order of their labels; none if the recipe names no list.

    where: names the list in messages. places: the label of each class.
    """

    classes: tuple[str, ...] = ()
    titles: tuple[str, ...] = ()  # what people call them, for pictures and exports; empty where none are given
    where: str = "data.class_list"
    places: dict[str, int] = field(init=False)
    numbers: dict[int | None, int] = field(init=False)  # places by the numbers that name classes; None: other names

    def __post_init__(self) -> None:
        places = {name: place for place, name in enumerate(self.classes)}
        object.__setattr__(self, "places", places)
        object.__setattr__(self, "numbers", {parse_whole_number(name): places[name] for name in reversed(places)})

    def find_index_or_keep_label(self, label: int | str, location: str) -> int | str:
        """Returns the label of a class: its index in the list. Returns `label` itself if the list is empty.

        label: the name of the class, or a number. A number means the class that has this number as its name. If there
        is none, the number is the index, unless the names of all classes are numbers. True and False mean the classes
        called true and false, or else the numbers 1 and 0.
        location: says where the label stands, for messages.
        Raises ConfigError if the list does not have the class.
        """
        if isinstance(label, bool):
            label = str(label).lower() if str(label).lower() in self.places else int(label)
        if not self.classes:
            return label
        if isinstance(label, str):
            place = self.places.get(label, -1)
        else:
            place = self.numbers.get(label, label if None in self.numbers else -1)
        if not 0 <= place < len(self.classes):
            raise ConfigError(
                f"{location}: the class {label!r} is not among the {len(self.classes)} of {self.where}: add it "
                "there, or take the sample away"
            )
        return place

    def parse_label_value(self, value: Any, location: str) -> int | str | None:
        """Returns the label that a value of a table or of JSON means: the index of a class in the list, or the value as
        text if the list is empty. Returns None if the value is empty.

        Raises ConfigError if the value is neither a whole number nor a name, or if the list does not have the class.
        """
        if isinstance(value, bool) and self.classes:
            return self.find_index_or_keep_label(value, location)
        try:
            text = parse_label(value, self.places)
        except ValueError as error:
            raise ConfigError(
                f"{location}: {error}: mend it, name the column of labels, data.columns={{label: NAME}}, or write "
                "data.labels=none"
            ) from None
        number = None if text is None or text in self.places or not self.classes else parse_whole_number(text)
        return None if text is None else self.find_index_or_keep_label(text if number is None else number, location)

    def parse_label_from_name(self, file_name: str, location: str) -> int | str:
        """Returns the label of the class with which a file name begins, up to the first `_`, such as cat for cat_1.png
        (as ADM names files). The label is the class's index in the list, or the class's name if the list is empty.

        Raises ConfigError if the name does not begin with a class and `_`, or if the list does not have the class.
        """
        prefix, underscore, _ = file_name.rpartition("/")[2].partition("_")
        if not prefix or not underscore:
            raise ConfigError(
                f"{location}: {file_name} does not begin with its class, as cat_1.png does, and data.labels=prefix "
                "asks for that: rename it, or take it away"
            )
        return self.find_index_or_keep_label(prefix, location)


def read_class_list(path: str | None) -> ClassList:
    """Returns the classes in a text file, one a line, with their titles if each line has a synset and a title. Returns
    an empty list if the path is None.

    Raises ConfigError if the file cannot be read, is empty, has an empty line before its end, or names a class twice.
    """
    if path is None:
        return ClassList()
    where = f"data.class_list={path}"
    try:
        lines = [
            strip_space_and_bom(line) for line in io.StringIO(decode_text(small.read_bytes(path, LONGEST_TEXT)), None)
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{where} cannot be read ({' '.join(str(error).split())}): name a text file (UTF-8) with a class a line"
        ) from None
    while lines and not lines[-1]:
        del lines[-1]
    matches = [_TITLED.fullmatch(line) for line in lines]
    synsets = all(matches)
    classes = tuple(match[1] for match in matches) if synsets else tuple(lines)
    if not lines or not all(classes):
        raise ConfigError(
            f"{where} has {'an empty line' if lines else 'no lines'}: write the class of label 0, 1, 2 ..., one a line"
        )
    if len(set(classes)) < len(classes):
        again = next(name for place, name in enumerate(classes) if name in classes[:place])
        raise ConfigError(f"{where} names {again} twice: leave one line for each class")
    titles = tuple(match[2] or "" for match in matches) if synsets else ()
    return ClassList(classes, titles if all(titles) else (), where)


def read_dataset_json_labels(root: Path, recipe_key: str) -> dict[str, int] | None:
    """Returns {file name: label} from the dataset.json in a folder. Returns {} if its entry "labels" is null or empty:
    the files have no labels. Returns None if there is no dataset.json, or if it has no such entry.

    recipe_key: the key that names the folder, for messages.
    Raises ConfigError if the file cannot be read, or for the faults that `parse_dataset_json_labels` names.
    """
    path = root / LABELS
    if not os.path.lexists(path):
        return None
    try:
        content = small.read_json(path, MAX_LABELS_BYTES, object_pairs_hook=small.build_dict_without_repeated_keys)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{recipe_key}={root}: {LABELS} cannot be read ({' '.join(str(error).split())[:200]}): repair it, "
            "or take it away, and folders are the classes"
        ) from None
    return parse_dataset_json_labels(content, root, recipe_key)


def parse_dataset_json_labels(content: Any, root: str | Path, recipe_key: str) -> dict[str, int] | None:
    """Returns {file name: label} from the parsed `content` of a dataset.json. Returns {} if its entry "labels" is null
    or empty: the files have no labels. Returns None if it has no such entry.

    root, recipe_key: the folder, and the key that names it, for messages.
    Raises ConfigError if a label is no whole number from 0 to 1,048,575, or if a file is named twice.
    """
    if not isinstance(content, dict) or "labels" not in content:
        return None
    rows = content["labels"] or []
    try:
        labels = {
            name: label if type(label) is int else parse_whole_number(parse_label(label) or "") for name, label in rows
        }
    except (TypeError, ValueError):
        labels = {"": None}
    for name, label in labels.items():
        if not (isinstance(name, str) and type(label) is int and 0 <= label < _MAX_LABEL):
            raise ConfigError(
                f"{recipe_key}={root}: the labels in {LABELS} are no whole numbers from 0 to {_MAX_LABEL - 1:,} (of "
                f"{name!r}): write those, or take the file away, and folders are the classes"
            )
    if len(labels) < len(rows):
        twice = Counter(name for name, _ in rows).most_common(1)[0][0]
        raise ConfigError(f"{recipe_key}={root}: {LABELS} names a file twice, {twice}: leave one label for each file")
    return labels


def make_numeric_class_names(labels_by_file: dict[str, int]) -> tuple[str, ...]:
    """Returns the class names "0", "1", ... up to the largest label.

    labels_by_file: {file name: label} of a dataset.json
    """
    return tuple(map(str, range(max(labels_by_file.values()) + 1)))


def require_classes_fit_model(
    path: str,
    source: Source,
    held_out: Source | None,
    num_labels: int | None,
    model_field: str = "",
    labels_off_entry: str = "",
    same_data: bool = False,
) -> None:
    """Raises ConfigError if the classes of the data do not fit a model that learns `num_labels` labels.

    The data must have `num_labels` classes, or none if `num_labels` is 1. If `num_labels` is above 1, the held-out data
    must have classes, too. If `num_labels` is None, the model learns no labels, and all data fit.
    path: the data's path, for messages.
    model_field: the entry of the recipe's `model` that sets the number of labels, for messages.
    labels_off_entry: the recipe's entry that turns labels off, for messages; "" if there is none.
    same_data: True if the held-out samples come from the same data. The message may then advise data.held_out.
    """
    classes = len(source.classes)
    if num_labels is None or classes == num_labels:
        pass
    elif classes:
        count = f"{classes} classes" if classes > 1 else "1 class"
        raise ConfigError(
            f"data.path={path} has {count}, and the model learns {num_labels}: write "
            f"model.{model_field}={classes} (weights of init_from then lose their table of labels)"
        )
    elif num_labels > 1:
        remedy = f", or write {labels_off_entry} for a model without labels" if labels_off_entry else ""
        raise ConfigError(
            f"data.path={path} has no classes, and the model learns {num_labels}: put the images of each "
            f"class into a folder of its own{_suggest_labels_by_name_prefix(source)}, or name a list with a column "
            f"`label`, data.path=FILE.csv{remedy}"
        )
    if num_labels is not None and num_labels > 1 and held_out is not None and not held_out.classes:
        raise ConfigError(_explain_missing_held_out_classes(path, source, held_out, same_data))


def _explain_missing_held_out_classes(path: str, source: Source, held_out: Source, same_data: bool) -> str:
    """Returns the error message for held-out data without classes beside training data with classes.

    same_data: True if the held-out samples come from the same data as the training samples.
    """
    unseen = held_out.where.partition("=")[2]
    share = ", or write data.held_out=0.02, which holds out a share of what is trained on" if same_data else ""
    which = f"the held-out data, {unseen}," if same_data else "the held-out data"
    return (
        f"{which} have no classes, and data.path={path} has {len(source.classes)}: put the files of each class "
        f"into a folder of its own, named as there{share}"
    )


def _suggest_labels_by_name_prefix(source: Source) -> str:
    """Returns advice, for a message, to take classes from file names (data.labels=prefix) if these look like cat_1.png,
    cat_2.png, dog_7.png, dog_8.png; else "". Looks at some 2000 evenly spaced names.
    """
    names = [
        source.name_sample(index).rpartition("/")[2]
        for index in range(0, len(source), -(-len(source) // _SEARCHED_NAMES))
    ]
    prefixes = sorted({name.split("_")[0] for name in names if "_" in name})
    if len(prefixes) < 2 or len(prefixes) > len(names) // 2 or not all("_" in name for name in names):
        return ""
    return f" (what file names begin with, {', '.join(prefixes[:3])}, is not read: write data.labels=prefix for these)"
