"""What all frozen encoders share: how they stay frozen, and how they speak of a folder that does not hold one."""

from pathlib import Path
from typing import Self

from torch import nn

from dstrain.recipe import ConfigError


class Frozen(nn.Module):
    """A network that is never trained: it stays in evaluation mode, whatever the network around it does."""

    def train(self, mode: bool = True) -> Self:
        return super().train(False)


def require_folder(key: str, path: str, content: str) -> None:
    """ConfigError where `path` looks like a folder and is none; any other path may be a name on the hub."""
    if (path.startswith((".", "/", "~")) or path.count("/") > 1) and not Path(path).is_dir():
        raise ConfigError(f"{key}: there is no folder {path}; give one that holds {content}, or a name on the hub")


def one_line(error: Exception) -> str:
    """An error's message without line breaks, at most 200 characters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
