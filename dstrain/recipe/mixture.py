"""The entries of the section `data` that name several sources instead of one. dstrain/data/mixture.py mixes the
sources.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from dstrain.recipe.section import FIXED, Fraction, Section, expand_home_in_path, mark_fixed_on_resume

_Weight = Annotated[float, Field(gt=0, le=1e9)]


class MixtureSource(Section):
    """One source of data.mixture. An entry that it does not give has the value of the section `data`."""

    path: str  # as data.path
    # Share of the samples; None: the number of samples.
    weight: Annotated[_Weight | None, mark_fixed_on_resume("write the weights as they were")] = None
    # None: data.held_out
    held_out: Annotated[Fraction | None, mark_fixed_on_resume("write the shares as they were")] = None
    held_out_path: str | None = None  # a folder for evaluation instead of a share
    captions: str | None = None  # of clips: its captions file

    @field_validator("path", "held_out_path", "captions")
    @classmethod
    def _expand_home(cls, path: str | None) -> str | None:
        """Returns the path with the home folder in place of ~; None stays."""
        return path if path is None else expand_home_in_path(path)


class Mixture(Section):
    """The entries about several sources, which Data inherits.

    A resumed run refuses other weights. With --allow-change it takes them, and each source goes on at that place of its
    epochs which it would have if the new weights had held from the first step.
    """

    # Several sources, drawn by their weights (all or none has one; none: by the numbers of their samples), instead of
    # data.path, which then is the first one's: [{path: A, weight: 3}, {path: B, weight: 1, held_out: 0.1}]
    mixture: tuple[MixtureSource, ...] | None = None
    # The sources' classes: the same in all; the first's, and the others have none beside; or all that any has.
    mixture_classes: Annotated[Literal["same", "first", "union"], FIXED] = "same"

    @model_validator(mode="before")
    @classmethod
    def _fill_in_first_source_path(cls, values: Any) -> Any:
        """Returns the section's values. If they have a mixture, sets `path` to that of the first source."""
        # What asks for the kind of the data looks at data.path: all sources are of the kind of the first.
        mixture = values.get("mixture") if isinstance(values, dict) else None
        if isinstance(mixture, list) and mixture and isinstance(mixture[0], dict) and "path" in mixture[0]:
            return {**values, "path": mixture[0]["path"]}
        return values
