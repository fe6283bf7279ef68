"""Errors that are made for users."""


class ConfigError(ValueError):
    """What a user can mend: in a recipe, an override, a DeepSpeed JSON, a path, a file. Each problem is one line.

    A command shows it without traceback and ends with exit code 2.
    """

    def __init__(self, *problems: str):
        self.problems = list(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))


class NotSaved(OSError):
    """The run ends because its checkpoints cannot be written."""
