"""data.class_list: which classes there are, in the order of their labels, and what people call them.

A line is a class: the name of its folder, and what may follow it where the first words are all synsets (n01440764):

    n01440764                                 of ADM, DiT and others: the synsets in order
    n01440764 tench, Tinca tinca              LOC_synset_mapping.txt of ILSVRC
    golden retriever                          any other name is the whole line
"""

import re
from dataclasses import dataclass, field

from dstrain.disk import small
from dstrain.recipe import ConfigError

SYNSET = re.compile(r"n\d{8}")
_TITLED = re.compile(r"(n\d{8})(?:[\s,:]+(.*))?")


@dataclass(frozen=True)
class ClassList:
    """The classes by their labels; empty: no list was named, and the data tell their classes. where: for messages."""

    classes: tuple[str, ...] = ()
    titles: tuple[str, ...] = ()  # what people call them, for pictures and exports; empty where none are given
    where: str = "data.class_list"
    places: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", {name: place for place, name in enumerate(self.classes)})

    def number(self, label: int | str, at: str) -> int | str:
        """The label of a class by its name or number, as it is where there is no list. ConfigError: not in the list."""
        if not self.classes:
            return label
        place = label if isinstance(label, int) else self.places.get(label, -1)
        if not 0 <= place < len(self.classes):
            raise ConfigError(
                f"{at}: the class {label!r} is not among the {len(self.classes)} of {self.where}: add it "
                "there, or take the sample away"
            )
        return place

    def prefix(self, name: str, at: str) -> int | str:
        """The class before the first `_` in a file's name, as ADM reads CLASS_name.png. ConfigError: there is none."""
        prefix, underscore, _ = name.rpartition("/")[2].partition("_")
        if not prefix or not underscore:
            raise ConfigError(
                f"{at}: {name} does not begin with its class, as cat_1.png does, and data.labels=prefix "
                "asks for that: rename it, or take it away"
            )
        return self.number(prefix, at)


def read_class_list(path: str | None) -> ClassList:
    """The list in a file; empty for None. ConfigError: it cannot be read, is empty, or names a class twice."""
    if path is None:
        return ClassList()
    where = f"data.class_list={path}"
    try:
        lines = [line.strip() for line in small.read_text(path).lstrip("\ufeff").splitlines()]
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
