"""Chooses, from shares that the recipe gives, the training steps that see only the first frames of their clips, and so
cost less.
"""

from itertools import accumulate

from dstrain.recipe import ConfigError

_GOLDEN = 0.6180339887498949  # (sqrt(5) - 1) / 2: its multiples modulo 1 fill [0, 1) evenly


def choose_last_kept_latent_frame(cut_shares: tuple[float, ...], step: int) -> int | None:
    """Returns the last latent frame, counted from 0, that clips keep in the training step `step`; None if they are kept
    whole.

    cut_shares  cut_shares[f] is the share of all steps in which clips keep the frames 0 to f. These steps are spread
                evenly. In the remaining steps clips are whole.
    """
    place = step * _GOLDEN % 1.0
    for frame, end in enumerate(accumulate(cut_shares)):
        if place < end:
            return frame
    return None


def require_valid_cut_shares(key: str, shares: tuple[float, ...], num_latent_frames: int) -> None:
    """Raises ConfigError if there are more shares than latent frames, if a share is negative, or if their sum is above
    1. `key` is the recipe's name for the shares, for the message.
    """
    if len(shares) > num_latent_frames:
        raise ConfigError(
            f"{key} {list(shares)}: clips have {num_latent_frames} latent frames; "
            f"give as many shares at most, or none: model.{key}=[]"
        )
    if min(shares, default=0) < 0 or sum(shares) > 1 + 1e-9:
        raise ConfigError(
            f"{key} {list(shares)}: shares of the steps are 0 at least, and 1 together "
            "at most; write for example [0.5, 0.2, 0.1], and whole clips are the rest"
        )
