"""Samples that training does not see, by patterns of their captions: data.leave_out."""

from collections.abc import Sequence

import numpy as np

from dstrain.data.source import Source, read_evenly_spaced_captions
from dstrain.recipe import ConfigError, Data
from dstrain.recipe.patterns import match_patterns_to_caption


def match_captions(captions: Sequence[Sequence[str]], patterns: Sequence[str]) -> np.ndarray:
    """Returns bool (patterns, samples): True where a pattern of data.leave_out fits at least one caption of a sample.

    captions: the captions of each sample
    """
    fits = np.zeros((len(patterns), len(captions)), bool)
    for place, texts in enumerate(captions):
        for text in texts:
            fits[:, place] |= match_patterns_to_caption(patterns, text)
    return fits


def require_usable_leave_out_patterns(data: Data, split: tuple[Source, Source | None], in_mixture: bool) -> None:
    """Raises ConfigError if data.leave_out is set but cannot be used: if the captions of the data are not listed, if a
    split has no samples left, or if a pattern fits no caption.

    split: (training source, held-out source or None)
    in_mixture: the data are one source of a mixture; then a pattern may fit no caption here, since it may fit in
        another source
    """
    source, place = split[0], "data.mixture" if data.mixture else data.path
    if data.leave_out and not source.left_out:
        raise ConfigError(
            f"data.leave_out: {data.path} has no captions that are listed (caches have none, and the built-in emoji): "
            "remove the entry, or leave the samples out before they are encoded"
        )
    if data.leave_out and not all(len(part) for part in split if part is not None):
        raise ConfigError(f"data.leave_out fits all captions of {place}: give patterns that fit fewer")
    for pattern, count in () if in_mixture else source.left_out:
        if not count:
            example = "".join(f", such as {text!r}" for text in read_evenly_spaced_captions(source, 1)[:1])
            raise ConfigError(
                f"data.leave_out: {pattern!r} fits no caption of {place}{example}: a pattern fits a whole caption, and "
                "* stands for any text"
            )
