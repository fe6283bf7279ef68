"""The entries of a recipe's section `data` about the shapes of images, and about how images are cropped to them."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from dstrain.recipe.errors import ConfigError
from dstrain.recipe.section import FIXED, Section

Side = Annotated[int, Field(gt=0, le=65536)]
Shape = tuple[Side, Side]  # width and height, pixels
Bucket = Annotated[tuple[Side, ...], Field(min_length=1, max_length=2)]  # a Shape, or the number of frames of clips
Share = Annotated[float, Field(gt=0, le=1)]
Aspect = Annotated[float, Field(gt=0, le=1000)]


def require_divisible_sides(sizes: tuple[Shape, ...] | None, unit: int, unit_explanation: str) -> None:
    """Raises ConfigError if a width or height in `sizes` (model.sizes, from data.buckets) is not a multiple of `unit`
    pixels. `unit_explanation` explains the unit in the message.
    """
    if unfit := [f"{wide} x {high}" for wide, high in sizes or () if wide % unit or high % unit]:
        raise ConfigError(
            f"sizes: the sides of {', '.join(unfit[:5])} in data.buckets are no multiples of {unit}, "
            f"{unit_explanation}: give others, or a rule whose step is a multiple"
        )


class BucketRule(Section):
    """A rule that makes shapes of about the same area, in place of a list of them."""

    pixels: Annotated[int, Field(gt=0, le=2**32)]  # area that none exceeds
    step: Annotated[int, Field(gt=0, le=4096)] = 16  # all sides are multiples of it
    ratio: Annotated[float, Field(ge=1, le=16)] = 2.0  # of the longer side to the shorter one, at most

    def list_shapes(self) -> tuple[tuple[int, int], ...]:
        """Returns the shapes (width, height) that the rule makes, the widest first, each in both orientations. The
        shorter side is any multiple of `step`, and the longer side is the largest multiple of `step` with which the
        area is at most `pixels`. Leaves out shapes whose sides differ by more than the factor `ratio`.
        """
        square = int(self.pixels**0.5) // self.step * self.step
        shapes = set()
        for short in range(self.step, square + 1, self.step):
            long = self.pixels // short // self.step * self.step
            if long <= self.ratio * short:
                shapes |= {(long, short), (short, long)}
        return tuple(sorted(shapes, key=lambda shape: (-shape[0] / shape[1], shape)))


def _parse_buckets(value: Any) -> Any:
    """Returns data.buckets as lists or tuples of one or two numbers: [5, 9] becomes [[5], [9]], and a rule becomes the
    shapes that it makes. Raises PydanticCustomError for a wrong rule.
    """
    if isinstance(value, list):
        return [[entry] if isinstance(entry, int) else entry for entry in value]
    if not isinstance(value, dict):
        return value
    try:
        shapes = BucketRule.model_validate(value).list_shapes()
    except ValidationError as error:
        fault = error.errors()[0]
        reason = f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
        raise PydanticCustomError(
            "buckets",
            "a rule is {example}; {reason}",
            {"example": "{pixels: 65536, step: 16, ratio: 2}", "reason": reason},
        ) from None
    if not shapes:
        raise PydanticCustomError("buckets", "this rule makes no shape: take more pixels, or a smaller step")
    return shapes


class Shaping(Section):
    """The entries of the section `data` about shapes and crops, which Data inherits. docs/guides/buckets.md explains
    them.
    """

    # Shapes as [[256, 256], [320, 192]], width and height, or a rule that makes them, {pixels: 65536, step: 16, ratio:
    # 2}: a batch has one shape, and an image the nearest one. None: squares of image_size. Of clips numbers of frames,
    # [5, 9, 17]: a clip has the longest that it fills. None: num_frames.
    buckets: Annotated[tuple[Bucket, ...] | None, BeforeValidator(_parse_buckets), FIXED] = None
    # Images that their bucket would enlarge more often are left out; None: they stay, and are counted.
    max_upscale: Annotated[float | None, Field(ge=1), FIXED] = None
    # How an image is cut to its shape, see docs/guides/buckets.md.
    crop: Annotated[Literal["center", "random", "random_resized", "dalle", "none"], FIXED] = "center"
    crop_scale: Annotated[tuple[Share, Share] | None, FIXED] = None  # share of an image that a random crop keeps, of
    # its side (random) or area (random_resized); None: 0.8-1 or 0.08-1
    crop_ratio: Annotated[tuple[Aspect, Aspect] | None, FIXED] = None  # width / height that random_resized cuts out,
    # times the target's; None: 3/4-4/3
    size_conditions: Annotated[bool, FIXED] = False  # the model is told an image's original size and its crop

    @property
    def durations(self) -> tuple[int, ...]:
        """Returns the lengths of clips in data.buckets, in frames; () for buckets of images, or without buckets."""
        return tuple(bucket[0] for bucket in self.buckets or () if len(bucket) == 1)

    def list_clip_checks(self, num_frames: int | None) -> tuple[tuple[Any, str], ...]:
        """Lists checks (whether it has failed, message) of data.buckets and of crops: entries about images do not go
        with clips, numbers of frames do not go with images, and the longest must be `num_frames`. `num_frames` is
        data.num_frames, None for images.
        """
        durations, of_clips = list(self.durations), num_frames is not None
        longest = max(durations, default=0)
        return (
            (
                of_clips and (self.crop != "center" or self.size_conditions or self.max_upscale),
                "data.crop, data.max_upscale and data.size_conditions are of images, not of clips: leave them out",
            ),
            (
                of_clips and self.buckets and len(durations) < len(self.buckets),
                "data.buckets of clips are numbers of "
                f"frames, not widths and heights: write data.buckets=[1,{num_frames}], say, or leave it out",
            ),
            (
                of_clips and durations and longest != num_frames,
                f"data.buckets={durations}: the longest one is not "
                f"data.num_frames={num_frames}: write data.num_frames={longest}, or give that bucket, too",
            ),
            (
                durations and not of_clips,
                f"data.buckets={durations} are numbers of frames, of clips: write widths and "
                f"heights, [[256,256],[320,192]], or data.num_frames={longest}",
            ),
        )

    @model_validator(mode="after")
    def _require_consistent_shapes(self) -> "Shaping":
        """Returns the section itself. Raises ValueError if entries about shapes and crops do not go together."""
        pairs = (("crop_scale", self.crop_scale), ("crop_ratio", self.crop_ratio))
        checks = (
            (self.buckets == (), "data.buckets=[] gives no shape: give some, or null for squares"),
            (
                self.buckets and len(set(self.buckets)) < len(self.buckets),
                "data.buckets names a shape twice: name each once",
            ),
            (
                self.max_upscale is not None and not self.buckets,
                f"data.max_upscale={self.max_upscale} is of data.buckets: leave it out, or give buckets",
            ),
            (
                self.crop_scale and self.crop not in ("random", "random_resized"),
                f"data.crop_scale is of data.crop=random and random_resized, not of {self.crop}: leave it out",
            ),
            (
                self.crop_ratio and self.crop != "random_resized",
                f"data.crop_ratio is of data.crop=random_resized, not of {self.crop}: leave it out",
            ),
            (
                self.crop == "dalle" and self.buckets,
                "data.crop=dalle cuts squares: leave data.buckets out, or write data.crop=random",
            ),
            *(
                (pair and pair[0] > pair[1], f"data.{name}={list(pair or ())}: write the lower number first")
                for name, pair in pairs
            ),
        )
        if messages := [message for wrong, message in checks if wrong]:
            raise ValueError("\n".join(messages))
        return self
