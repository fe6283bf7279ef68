"""Steps of training that see only the first frames of their clips, by shares, since such steps cost less."""

from itertools import accumulate

from dstrain.recipe import ConfigError

_GOLDEN = 0.6180339887498949  # (sqrt(5) - 1) / 2: its multiples modulo 1 fill [0, 1) evenly


def find_last_kept_frame(shares: tuple[float, ...], step: int) -> int | None:
    """Returns the number of the last latent frame that a step's clips keep: frame f in a share shares[f] of all steps.
    Returns None in the other steps, which keep whole clips.
    """
    place = step * _GOLDEN % 1.0
    for frame, end in enumerate(accumulate(shares)):
        if place < end:
            return frame
    return None


def require_shares(key: str, shares: tuple[float, ...], latent_frames: int) -> None:
    """Raises ConfigError, which names the model's key, for more shares than the clips have latent frames, for negative
    ones, and for more than 1 together.
    """
    if len(shares) > latent_frames:
        raise ConfigError(
            f"{key} {list(shares)}: clips have {latent_frames} latent frames; "
            f"give as many shares at most, or none: model.{key}=[]"
        )
    if min(shares, default=0) < 0 or sum(shares) > 1 + 1e-9:
        raise ConfigError(
            f"{key} {list(shares)}: shares of the steps are 0 at least, and 1 together "
            "at most; write for example [0.5, 0.2, 0.1], and whole clips are the rest"
        )
