"""Errors that are made for users."""

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


class ConfigError(ValueError):
    """What a user can mend: in a recipe, an override, a DeepSpeed JSON, a path, a file. Each problem is one line.

    A command shows it without traceback and ends with exit code 2.
    """

    def __init__(self, *problems: str):
        self.problems = list(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))


class NotSaved(OSError):
    """The run ends because its checkpoints cannot be written."""


class NotRead(OSError):
    """The command ends because the storage under its data or checkpoints fails, so that no file is at fault."""


@contextmanager
def reword_errors(prefix: str = "", options: Mapping[str, str] | None = None) -> Iterator[None]:
    """Rewords a ConfigError raised within: puts `prefix` before each line, and options of a command in
    place of keys.
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
    """Turns an OSError raised within into a ConfigError that says that `path` cannot be written, why, and
    the remedy.
    """
    try:
        yield
    except NotRead:  # of what is read meanwhile, with a remedy of its own
        raise
    except IsADirectoryError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.filename2 or error.filename} is a folder where a file "
            "belongs; move it away"
        ) from None
    except OSError as error:
        remedy = advise_writing(error, remedy)
        raise ConfigError(f"{path} cannot be written ({error.strerror or error}): {remedy}") from None


def advise_writing(error: OSError, remedy: str) -> str:
    """Returns the remedy; where permission is missing it says to allow writing instead of to make room."""
    forbidden = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    return remedy.replace("make room", "allow writing") if forbidden else remedy


def require_replaceable(path: Path, named: str, is_own: Callable[[Path], bool]) -> None:
    """Raises ConfigError if `path` holds something that may not be overwritten: neither empty, nor, by `is_own`, a file
    that the command itself has written.
    """
    try:
        if not path.exists() or (path.is_file() and (path.stat().st_size == 0 or is_own(path))):
            return
    except (OSError, ValueError):  # what cannot be read is not known
        pass
    raise ConfigError(
        f"{named} {path} is there, and is no file that this command has written: name another file, or remove that one"
    )
