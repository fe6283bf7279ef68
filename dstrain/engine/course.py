"""The course of a run: which steps were in trouble, how often it went back, which batches it passes over.

    Trouble       More than faults.max_skipped steps in a row were not applied. Or, where faults.spike is set, the loss
                  of a step lies above faults.spike times its median over the last WINDOW steps.
    The way back  The run loads the newest good checkpoint, and passes over the batches that it has met since: step s
                  learns from batch s + shift, and shift grows so far that the data never go back. Noise and dropout
                  belong to the batch; learning rate, EMA and the systems' own schedules follow s.
    Once more     Trouble before a newer checkpoint is saved: that one is held for bad, and the one before it is taken.
    The end       After faults.max_rollbacks of them since the run began or was changed (--allow-change), or with no
                  checkpoint left, FloatingPointError: exit code 3. The checkpoints that it went back to stay.

All this is state of the run. It stands in the manifest of every checkpoint, and it follows from means over all ranks,
so it is equal on all of them. A run that is killed in the middle of trouble, or just after it went back, meets the same
trouble again from an older checkpoint, and takes the same way.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from pydantic import BaseModel, FiniteFloat, NonNegativeInt, ValidationError
from torch import Tensor

from dstrain.ranks import group
from dstrain.recipe import ConfigError, Faults

WINDOW, _LEAST = 64, 16     # losses of each part in a running median, and the number from which on it is trusted


class State(BaseModel):
    """What a checkpoint keeps of the course."""

    skipped: NonNegativeInt = 0                             # steps that were not applied
    in_a_row: NonNegativeInt = 0                            # of these the latest
    shift: NonNegativeInt = 0                               # step s learns from batch s + shift
    rollbacks: list[tuple[NonNegativeInt, NonNegativeInt]] = []      # steps done, step of the checkpoint gone back to
    forgiven: NonNegativeInt = 0                            # of these: before a user changed the run
    losses: dict[str, list[FiniteFloat]] = {}               # by part, of the last WINDOW steps; with faults.spike only


class Course:
    """Takes note of every step; on all ranks together."""

    def __init__(self, faults: Faults = Faults()):
        self.faults, self.state = faults, State()

    @property
    def shift(self) -> int:
        return self.state.shift

    @property
    def rollbacks(self) -> int:
        return len(self.state.rollbacks)

    def trouble(self, done: int, applied: bool, losses: Mapping[str, Sequence[Tensor]]) -> str | None:
        """Takes note of the step after which `done` are done: what is wrong, None if nothing is.

        losses: by part, of each of this rank's micro-batches. They are read only where faults.spike is set.
        """
        state = self.state
        state.skipped, state.in_a_row = state.skipped + (not applied), 0 if applied else state.in_a_row + 1
        if state.in_a_row > self.faults.max_skipped:
            return f"{state.in_a_row} steps in a row had gradients that are not finite, and were skipped"
        for part, loss in _means(losses).items() if self.faults.spike else ():
            window = state.losses.setdefault(part, [])
            usual = median(window) if len(window) >= _LEAST else math.inf
            if 0 < usual * self.faults.spike < loss < math.inf:
                return f"step {done}: {part}'s loss {loss:.4g} is above {self.faults.spike:g} x its median {usual:.4g}"
            if math.isfinite(loss):
                window[:] = [*window, loss][-WINDOW:]
        return None

    def before(self, done: int) -> int:
        """The last step that the trouble which is seen after `done` steps had not reached."""
        return done - max(self.state.in_a_row, 1)

    def go_back(self, done: int, step: int, saved: Mapping[str, Any]) -> None:
        """From `done` steps to a checkpoint of `step`, whose course is `saved`."""
        rollbacks, clock = [*self.state.rollbacks, (done, step)], done + self.shift
        self.state = parse(saved).model_copy(update={"shift": clock - step, "rollbacks": rollbacks,
                                                           "forgiven": self.state.forgiven})

    def forgive(self) -> None:
        """A user has changed the run: it may go back as often as a new one."""
        self.state.forgiven = self.rollbacks


def parse(saved: Any) -> State:
    """The state that a checkpoint holds. ConfigError: it is none."""
    try:
        return State.model_validate(saved)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise ConfigError(f"its course is malformed: {where}: {error.errors()[0]['msg']}") from None


def _means(losses: Mapping[str, Sequence[Tensor]]) -> dict[str, float]:
    """The mean loss of each part over all micro-batches and ranks, on the host."""
    own = torch.stack([torch.stack([loss.double() for loss in each]).mean() for each in losses.values()])
    return dict(zip(losses, (group.total(own) / group.world()).tolist()))
