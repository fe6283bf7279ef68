"""Holds the options that say how a command begins in the folder of a run; imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The options that say how a training command begins in its folder. By default it resumes from the newest
    checkpoint.
    """

    from_scratch: bool = False  # begins anew; what the folder holds is moved aside
    allow_change: bool = False  # goes on although the recipe or the data changed
    step: int | None = None  # goes on from this checkpoint; newer ones are moved aside
    trust_pickle: bool = False  # reads DeepSpeed's own files, and runs what is pickled in them
    profile: tuple[int, int, int] | None = None  # steps that are recorded, and of which ranks: tracking/profile.py
