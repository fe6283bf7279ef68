"""Exceptions whose messages users see, and functions that raise or reword them."""

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


class ConfigError(ValueError):
    """An error that a user can mend: in a recipe, an override, a DeepSpeed JSON, a path, a file. Each problem is one
    line; problems that are given twice are shown once.

    A command shows the lines without traceback and ends with exit code 2.
    """

    def __init__(self, *problems: str):
        self.problems = list(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))


class NotSaved(OSError):
    """Ends a run whose checkpoints cannot be written."""


class NotRead(OSError):
    """Ends a command whose data or checkpoints cannot be read because the storage fails: no file is at fault."""


@contextmanager
def reword_errors(prefix: str = "", options: Mapping[str, str] | None = None) -> Iterator[None]:
    """Rewords a ConfigError that its block raises. Puts `prefix` before each line, and replaces each key of `options`
    in the text by its value: {"data.path=": "--data "} names an option of a command in place of a recipe's key.
    """
    try:
        yield
    except ConfigError as error:
        lines = [prefix + line for line in error.problems]
        for key, option in (options or {}).items():
            lines = [line.replace(key, option) for line in lines]
        raise ConfigError(*lines) from None


@contextmanager
def explain_write_errors(path: object, remedy: str) -> Iterator[None]:
    """Turns an OSError that the block raises into a ConfigError, which says that `path` cannot be written, why, and
    what to do. If a folder has the name of the file, the advice is to move the folder away; otherwise it is `remedy`,
    adapted by `choose_write_remedy`. NotRead passes through unchanged.
    """
    try:
        yield
    except NotRead:  # it is about files that the block reads, and has a remedy of its own
        raise
    except IsADirectoryError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.filename2 or error.filename} is a folder where a file "
            "belongs; move it away"
        ) from None
    except OSError as error:
        remedy = choose_write_remedy(error, remedy)
        raise ConfigError(f"{path} cannot be written ({error.strerror or error}): {remedy}") from None


def choose_write_remedy(error: OSError, remedy: str) -> str:
    """Returns `remedy`, the advice to users after a write has failed. Replaces "make room" in it by "allow writing" if
    permission is missing or the file system is read-only.
    """
    forbidden = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    return remedy.replace("make room", "allow writing") if forbidden else remedy


def require_replaceable_file(path: Path, option: str, is_own: Callable[[Path], bool]) -> None:
    """Raises ConfigError unless a command may replace what is at `path`: nothing, an empty file, or a file that this
    command has written, for which `is_own` returns True. Also raises ConfigError if the file cannot be read. `option`
    is the one that gives the path, for the message.
    """
    try:
        if not path.exists() or (path.is_file() and (path.stat().st_size == 0 or is_own(path))):
            return
    except (OSError, ValueError):  # a file that cannot be read may be anybody's
        pass
    raise ConfigError(
        f"{option} {path} is there, and is no file that this command has written: name another file, or remove that one"
    )
