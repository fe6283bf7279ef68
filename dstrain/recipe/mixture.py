"""The entries of the section data that name several sources instead of one: dstrain/data/mixture.py mixes them."""

import os
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dstrain.recipe.section import FIXED, Fraction, Section, fixed, short_path

_Weight = Annotated[float, Field(gt=0, le=1e9)]


class MixtureSource(Section):
    """One source of data.mixture; what it leaves out is as the section data says."""

    path: str  # as data.path
    # Share of the samples; None: the number of samples.
    weight: Annotated[_Weight | None, fixed("write the weights as they were")] = None
    held_out: Annotated[Fraction | None, fixed("write the shares as they were")] = None  # None: data.held_out
    held_out_path: str | None = None  # a folder for evaluation instead of a share
    captions: str | None = None  # of clips: its captions file

    @field_validator("path", "held_out_path", "captions")
    @classmethod
    def _expand(cls, path: str | None) -> str | None:
        return path and short_path(os.path.expanduser(path))


class Mixture(Section):
    """What the section data inherits.

    Weights may not change when a run goes on. With --allow-change it goes on as if the new weights had held from its
    first step: the place of each source in its own epochs is the one that they give.
    """

    # Several sources, drawn by their weights (all or none has one; none: by the numbers of their samples), instead of
    # data.path, which then is the first one's: [{path: A, weight: 3}, {path: B, weight: 1, held_out: 0.1}]
    mixture: tuple[MixtureSource, ...] | None = None
    # The sources' classes: the same in all; the first's, and the others have none beside; or all that any has.
    mixture_classes: Annotated[Literal["same", "first", "union"], FIXED] = "same"

    @model_validator(mode="before")
    @classmethod
    def _first_path(cls, values: Any) -> Any:
        # What asks for the kind of the data looks at data.path: all sources are of the kind of the first.
        mixture = values.get("mixture") if isinstance(values, dict) else None
        if isinstance(mixture, list) and mixture and isinstance(mixture[0], dict) and "path" in mixture[0]:
            return {**values, "path": mixture[0]["path"]}
        return values

    def parts(self) -> tuple[Self, ...]:
        """The section of each source by itself; () without a mixture."""
        return tuple(
            self.model_copy(
                update={
                    "mixture": None,
                    "path": source.path,
                    "held_out_path": source.held_out_path,
                    "captions": source.captions,
                    "held_out": (
                        source.held_out
                        if source.held_out is not None
                        else 0.0
                        if source.held_out_path or source.path.startswith("builtin:")
                        else self.held_out
                    ),
                }
            )
            for source in self.mixture or ()
        )

    def mixture_problems(self) -> list[tuple[Any, str]]:
        """Checks of the sources, and of entries that belong into them: (whether it is wrong, message)."""
        if self.mixture is None:
            return []
        if not self.mixture:
            return [
                (
                    True,
                    "data.mixture=[]: name its sources, [{path: A, weight: 3}, {path: B, weight: 1}], or leave it out",
                )
            ]
        paths = [os.path.normpath(source.path) for source in self.mixture]
        weighted = [source.path for source in self.mixture if source.weight is not None]
        both = [source.path for source in self.mixture if source.held_out and source.held_out_path]
        return [
            (len({*paths}) < len(paths), f"data.mixture names {max(paths, key=paths.count)} twice: name it once"),
            (
                0 < len(weighted) < len(paths),
                f"data.mixture: {', '.join(weighted[:1])} has a weight, and others have "
                "none: give all of them weights, or none, and they are drawn by the numbers of their samples",
            ),
            (both, f"data.mixture: {', '.join(both[:1])} has held_out and held_out_path: give one of the two"),
            (
                self.held_out_path,
                f"data.held_out_path={self.held_out_path}: with data.mixture, write held_out_path "
                "into the source that it belongs to",
            ),
            (
                self.captions or self.images,
                "data.captions and data.images: with data.mixture, write captions into the "
                "source, and a folder of images as one more source",
            ),
        ]
