"""Options of `dstrain index`."""

import os
from dataclasses import dataclass
from typing import ClassVar

from dstrain.commands.options.command import Command, make_argument_field, make_option_field, make_remaining_words_field
from dstrain.recipe import ConfigError, Data, load_recipe


@dataclass(frozen=True)
class IndexOptions(Command):
    """Lists data once and for all, and says what they hold: samples, classes, captions, sizes, broken files. Every
    command on the same data then begins at once.

    An interrupted listing goes on where it was.
    """

    usage: ClassVar[str] = "dstrain index DATA [options] [data.key=value ...]"
    examples: ClassVar[str] = """
        dstrain index /data/imagenet/train
        dstrain index /data/clips data.num_frames=17 --check --json
    """

    path: str = make_argument_field(
        "DATA",
        "what a recipe has as data.path",
        missing="name the data: dstrain index DATA; --help shows how",
    )
    overrides: tuple[str, ...] = make_remaining_words_field(
        "data.key=value",
        "as in a recipe: data.num_frames=17 for clips, data.captions=FILE; with data.buckets=[5,9,17], the frames of "
        "clips are counted",
    )
    index: str | None = make_option_field(
        None,
        "where the index is kept (then write data.index=FOLDER in recipes, too); without it, it is kept in the "
        "user's cache, where every command finds it",
        metavar="FOLDER",
    )
    captions: bool = make_option_field(False, "lists the captions of images, too")
    check_all: bool = make_option_field(
        False, "reads every sample whole, and not the headers of images alone", name="check"
    )
    json: bool = make_option_field(False, "prints JSON")

    def check_options(self) -> None:
        """Raises ConfigError if no data are named, or if an override is not of the section data, or is data.path."""
        if self.path.startswith("data.") and "=" in self.path:
            raise ConfigError("name the data: dstrain index DATA; --help shows how")
        for key in (word.partition("=")[0] for word in self.overrides):
            if key == "data.path" or not key.startswith("data."):
                raise ConfigError(
                    f"{key} changes nothing: DATA says what is listed, and data.key=value how; leave it out"
                )

    def make_data_section(self) -> Data:
        """Returns these options as the data section of a recipe. Raises ConfigError if an entry is wrong."""
        changes = {"path": os.path.expanduser(self.path)}
        if self.index is not None:
            changes["index"] = os.path.expanduser(self.index)
        return load_recipe(None, self.overrides).data.model_copy(update=changes)
