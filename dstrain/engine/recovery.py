"""The course of a run: which steps were in trouble, how often it went back, which batches it passes over.

    Trouble       More than faults.max_skipped steps in a row were not applied. Or, where faults.spike is set, the loss
                  of a step lies above faults.spike times its median over the last WINDOW steps: this is seen a step
                  later.
    Read late     The device says how a step went when the next one has been handed to it; only where one step more
                  would be trouble is it waited for. To look at `state` waits, too, and changes nothing in what follows:
                  a run that saves or stops takes the same way as one that does not.
    The way back  The run loads the newest good checkpoint, and passes over the batches that it has met since: step s
                  learns from batch s + shift, and shift grows so far that the data never go back. Noise and dropout
                  belong to the batch; learning rate, EMA and the systems' own schedules follow s.
    Once more     Trouble before a newer checkpoint is saved: that one is held for bad, and the one before it is taken.
    The end       After faults.max_rollbacks of them since the run began or was changed (--allow-change), or with no
                  checkpoint left, FloatingPointError: exit code 3. The checkpoints that it went back to stay.

All this is the run's state. It stands in the manifest of every checkpoint, and it follows from means over all ranks,
so it is equal on all of them. A run that is killed in the middle of trouble, or just after it went back, meets the same
trouble again from an older checkpoint, and takes the same way.

Values that are not finite (NaN, infinity):

    A step      whose gradient is not finite on any rank changes no weight, no moment and no average, on any rank. The
                norm of all gradients tells, on the device, and the host learns of it a step late (updates.py). With an
                offloaded optimizer, and in bf16 at stage 0, DeepSpeed's own checks tell, at once. In fp16 the loss
                scale falls as well. No setting switches this off.
    The run     counts such steps as `skipped` in its reports, and across resumes.
    A save      that is due while steps are skipped is left out. One that is made then because the run is stopped is
                marked, and pushes out no good one (store.py). `require_finite_weights` refuses a save of weights that
                are not finite, with FloatingPointError. Such weights come from an update that overflows, or bad memory.
    Reports     leave values that are not finite out of the means of losses and count them as `nonfinite`
                (tracking/meter.py). One sample's NaN in a term that is only reported stops nothing.
    Evaluation  leaves nothing out: a held-out mean is NaN if one sample is. It is written as null, beside the number
                of such samples as nonfinite_samples, in training as by `dstrain evaluate`. A score that is not finite
                is never the best checkpoint's, and a finite one always improves on it (saver.py, store.py).
    Data        with values that are not finite are refused where they are read (data/cached/rows.py,
                commands/encoding/embeddings.py).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from dstrain.checkpoint.store import Store
from dstrain.checkpoint.validate import State, parse_state
from dstrain.distributed import group
from dstrain.engine.masters import Masters
from dstrain.engine.updates import AsyncHostCopy, Flag
from dstrain.recipe import Faults

WINDOW, _LEAST_LOSSES = 64, 16  # losses of each part in a running median, and the number from which on it is trusted


class Divergence:
    """Follows the steps of a run, and finds trouble: too many skipped steps in a row, or a spike of the loss. All ranks
    call each method together.
    """

    def __init__(self, faults: Faults = Faults()):
        self.faults, self._state = faults, State()
        self._unread: tuple[int, Sequence[Flag], Mapping[str, AsyncHostCopy]] | None = (
            None  # the latest step, as it is known
        )

    @property
    def state(self) -> State:
        """Returns the record of all steps so far. Waits until the device has ended the latest step."""
        self._read_latest_step()
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state, self._unread = state, None

    @property
    def shift(self) -> int:
        """Returns how many batches the run passes over: step s learns from batch s + shift."""
        return self._state.shift

    @property
    def rollbacks(self) -> int:
        """Returns how often the run went back to an earlier checkpoint."""
        return len(self._state.rollbacks)

    def find_trouble(
        self, done: int, applied: Iterable[Flag], losses: Mapping[str, Sequence[Tensor]], last: bool = False
    ) -> str | None:
        """Records a step, and returns a message on the trouble in it or in the step before; None if there is none.

        done      steps that are done, this one included
        applied   whether the step was applied, for each part that had a turn
        losses    by part, of each of this rank's micro-batches; only used where faults.spike is set
        last      whether no step follows, so that the host waits for this one's result
        """
        state = self.state
        if state.high is None:
            self._unread = done, list(applied), _average_losses(losses) if self.faults.spike else {}
            if last or state.in_a_row >= self.faults.max_skipped:
                self._read_latest_step()
        if state.in_a_row > self.faults.max_skipped:
            return f"{state.in_a_row} steps in a row had gradients that are not finite, and were skipped"
        return state.high[1] if state.high else None

    def _read_latest_step(self) -> None:
        """Waits for the result of the latest step, if it was not read yet, and updates the record by it."""
        if self._unread is None:
            return
        (done, applied, losses), self._unread, state = self._unread, None, self._state
        skipped = not all(applied)
        state.skipped, state.in_a_row = state.skipped + skipped, state.in_a_row + 1 if skipped else 0
        for part, late in losses.items():
            loss, window = late.read(), state.losses.setdefault(part, [])
            usual = median(window) if len(window) >= _LEAST_LOSSES else math.inf
            if 0 < usual * self.faults.spike < loss < math.inf:
                state.high = (
                    done,
                    f"step {done}: {part}'s loss {loss:.4g} is above {self.faults.spike:g} x its median {usual:.4g}",
                )
                return
            if math.isfinite(loss):
                window[:] = [*window, loss][-WINDOW:]

    def find_step_before_trouble(self, done: int) -> int:
        """Returns the last step before the trouble that is seen after `done` steps."""
        return (self.state.high[0] if self.state.high else done) - max(self.state.in_a_row, 1)

    def record_rollback(self, done: int, step: int, saved: Mapping[str, Any]) -> None:
        """Records that the run goes back, from `done` steps to a checkpoint of `step` whose record is `saved`, and
        passes over the batches that it has met since.
        """
        rollbacks, clock = [*self.state.rollbacks, (done, step)], done + self.shift
        self.state = parse_state(saved).model_copy(
            update={"shift": clock - step, "rollbacks": rollbacks, "forgiven": self.state.forgiven}
        )

    def forgive_rollbacks(self) -> None:
        """Makes earlier rollbacks no longer count against faults.max_rollbacks, since a user has changed the run. They
        stay in the record.
        """
        self.state.forgiven = self.rollbacks


def _average_losses(losses: Mapping[str, Sequence[Tensor]]) -> dict[str, AsyncHostCopy]:
    """Returns the mean loss of each part over all micro-batches and ranks, on its way to the host."""
    own = torch.stack([torch.stack([loss.double() for loss in each]).mean() for each in losses.values()])
    return dict(zip(losses, map(AsyncHostCopy, (group.sum_over_ranks(own) / group.world()).unbind())))


def advise_user(store: Store) -> str:
    """Returns advice for a user whose training has diverged, with the steps of the checkpoints in `store`. A rank may
    call it alone.
    """
    steps, aside = store.list_steps(), store.list_steps_put_aside()
    change = "Lower optimizer.lr, set optimizer.clip, or use bf16 in place of fp16"
    if not steps and not aside:
        return f"{store.folder} holds no checkpoint. {change}, and begin anew with --from-scratch"
    listed = ", ".join(map(str, steps)) + (f" (put aside: {', '.join(map(str, aside))})" if aside else "")
    return (
        f"{store.folder} holds the steps {listed}. {change}, and give the same command with --allow-change; "
        "--step N goes on from an earlier one of these, as where the loss of the newest is bad already, and "
        "--from-scratch begins anew"
    )


def require_finite_weights(masters: Mapping[str, Masters], step: int, store: Store) -> None:
    """Raises FloatingPointError on every rank if an fp32 weight on any rank is not finite. Its message advises the user
    by the checkpoints in `store`.

    Only fragments are looked at: at stage 3 DeepSpeed leaves in a flat's padding whatever the memory held.
    """
    finite = are_all_finite([view for part in masters.values() for _, view in part.list_own_views(part.flats)])
    if group.is_true_on_any_rank(not finite):
        raise FloatingPointError(f"the weights of step {step} are not finite and are not saved. {advise_user(store)}")


def are_all_finite(tensors: Sequence[Tensor]) -> bool:
    """Returns whether all elements of all tensors are finite. Waits for the device once if they are, and their sums,
    too.
    """
    sums = [tensor.sum() for tensor in tensors]
    if not sums or torch.isfinite(torch.stack(sums)).all().item():
        return True
    return all(torch.isfinite(tensor).all().item() for tensor in tensors)  # large values may have an infinite sum
