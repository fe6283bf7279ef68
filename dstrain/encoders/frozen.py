"""What all frozen encoders share: how they stay frozen, and the messages about a folder that holds none."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from torch import nn

from dstrain.recipe import ConfigError


class Frozen(nn.Module):
    """A network that is never trained: it stays in evaluation mode, whatever the network around it does."""

    def train(self, mode: bool = True) -> Self:
        return super().train(False)


@contextmanager
def explain_loading(kind: str, key: str, path: str, content: str) -> Iterator[None]:
    """Explains what fails in a block that loads a `kind` of network from a folder with `content`, or by a hub name.

    Raises ConfigError, which names the `key`, if the path looks like a folder and is none, or the block fails to read.
    """
    if (path.startswith((".", "/", "~")) or path.count("/") > 1) and not Path(path).is_dir():
        raise ConfigError(f"{key}: there is no folder {path}; give one that holds {content}, or a name on the hub")
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}: no {kind} can be loaded from {path!r} ({shorten_error(error)}); give a folder with "
            f"{content}, or a hub name that this machine can reach"
        ) from error


def shorten_error(error: Exception) -> str:
    """Returns an error's message without line breaks, at most 200 characters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
