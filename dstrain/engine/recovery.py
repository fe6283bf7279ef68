"""Detects when training diverges, and records skipped steps, rollbacks to earlier checkpoints, and unused batches.

    Trouble       More than faults.max_skipped steps in a row were not applied. Or, where faults.spike is set, the loss
                  of a step lies above faults.spike times its median over the last WINDOW steps: this is seen a step
                  later.
    Late reading  The host reads the result of a step when it has handed the next one to the device. It waits for the
                  result only where one more skipped step would be trouble. Reading `state` waits, too, but does not
                  change later steps: a run that saves or stops trains as one that does not.
    Rollback      The run loads the newest good checkpoint, and does not use the batches since then again: step s
                  learns from batch s + shift, and shift grows so that no batch comes twice. Noise and dropout
                  belong to the batch; learning rate, EMA and the systems' own schedules follow s.
    Once more     If trouble comes before a newer checkpoint is saved, the run loads the checkpoint before that one.
    The end       After faults.max_rollbacks rollbacks since the run began or was changed (--allow-change), or with no
                  checkpoint left, FloatingPointError: exit code 3. Checkpoints that the run went back to are kept.

All this is the run's state. Every checkpoint's manifest contains it. It follows from means over all ranks, so it is
equal on all of them. A run that is killed in the middle of trouble, or just after a rollback, meets the same trouble
again from an older checkpoint, and does the same.

Values that are not finite (NaN, infinity):

    A step      whose gradient is not finite on any rank changes no weight, no moment and no average, on any rank. The
                norm of all gradients decides, on the device, and the host learns of it a step late (updates.py). With
                an offloaded optimizer, and in bf16 at stage 0, DeepSpeed's own checks decide, at once. In fp16 the
                loss scale falls as well. No setting switches this off.
    The run     counts such steps as `skipped` in its reports, and across resumes.
    A save      that is due while steps are skipped is left out. One that is made then because the run is stopped is
                marked, and no good one is deleted for it (store.py). `require_finite_weights` raises FloatingPointError
                in place of a save of weights that are not finite. Such weights come from an update that overflows, or
                bad memory.
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
from dstrain.checkpoint.validate import State, parse_recovery_state
from dstrain.distributed import group
from dstrain.engine.masters import Masters
from dstrain.engine.updates import AsyncHostCopy, Flag
from dstrain.recipe import Faults

WINDOW, _LEAST_LOSSES = 64, 16  # losses of each part in a running median, and the number from which on it is trusted


class Divergence:
    """Records the steps of a run, and finds trouble: too many skipped steps in a row, or a spike of the loss. All ranks
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
        self._add_latest_step_to_record()
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state, self._unread = state, None

    @property
    def num_dropped(self) -> int:
        """Returns the number of batches that the run has left out so far: step s learns from batch s + shift."""
        return self._state.shift

    @property
    def num_rollbacks(self) -> int:
        """Returns how often the run went back to an earlier checkpoint."""
        return len(self._state.rollbacks)

    def record_step(
        self, steps_done: int, applied: Iterable[Flag], losses: Mapping[str, Sequence[Tensor]], last: bool = False
    ) -> str | None:
        """Records a step. Returns a message if this step or the one before it shows trouble: too many skipped steps in
        a row, or a sudden rise of the loss. Returns None otherwise.

        steps_done   number of steps that are done, this one included
        applied      for each part that had a turn, whether its weights were updated
        losses       {part: losses of this rank's micro-batches}; used only if faults.spike is set
        last         True if no step follows; then waits for the result of this one
        """
        state = self.state
        if state.high is None:
            self._unread = steps_done, list(applied), _average_losses_over_ranks(losses) if self.faults.spike else {}
            if last or state.in_a_row >= self.faults.max_skipped:
                self._add_latest_step_to_record()
        if state.in_a_row > self.faults.max_skipped:
            return f"{state.in_a_row} steps in a row had gradients that are not finite, and were skipped"
        return state.high[1] if state.high else None

    def _add_latest_step_to_record(self) -> None:
        """Waits for the result of the latest step and adds it to the record; does nothing if it was added before."""
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

    def find_step_before_trouble(self, steps_done: int) -> int:
        """Returns the number of steps that were done before the trouble began. steps_done: how many were done when it
        was found.
        """
        return (self.state.high[0] if self.state.high else steps_done) - max(self.state.in_a_row, 1)

    def record_rollback(self, steps_done: int, checkpoint_step: int, saved_state: Mapping[str, Any]) -> None:
        """Records that the run goes back, after `steps_done` steps, to the checkpoint of `checkpoint_step`. The batches
        of the steps between are not used again. saved_state: the record of steps that this checkpoint holds.
        """
        rollbacks, clock = (
            [*self.state.rollbacks, (steps_done, checkpoint_step)],
            steps_done + self.num_dropped,
        )
        self.state = parse_recovery_state(saved_state).model_copy(
            update={"shift": clock - checkpoint_step, "rollbacks": rollbacks, "forgiven": self.state.forgiven}
        )

    def exclude_past_rollbacks_from_limit(self) -> None:
        """Makes the rollbacks so far no longer count against faults.max_rollbacks, since a user has changed the run.
        They stay in the record.
        """
        self.state.forgiven = self.num_rollbacks


def _average_losses_over_ranks(losses: Mapping[str, Sequence[Tensor]]) -> dict[str, AsyncHostCopy]:
    """Returns {part: mean loss over all micro-batches and ranks}. The means are copied to the host in the background:
    read them later.
    """
    own = torch.stack([torch.stack([loss.double() for loss in each]).mean() for each in losses.values()])
    return dict(zip(losses, map(AsyncHostCopy, (group.sum_over_ranks(own) / group.world()).unbind())))


def make_divergence_advice(store: Store) -> str:
    """Returns advice for a user whose training has diverged, with the steps of the checkpoints in `store`. Exchanges
    nothing between ranks.
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
    """Raises FloatingPointError on every rank if an fp32 weight on any rank is not finite. The message gives advice,
    with the steps of the checkpoints in `store`. Call it on all ranks.
    """
    # At stage 3 DeepSpeed leaves in the padding of flats whatever the memory held: only weights are checked.
    finite = are_all_finite(
        [view for part in masters.values() for _, view in part.iterate_fragment_views_to_save(part.flats)]
    )
    if group.is_true_on_any_rank(not finite):
        raise FloatingPointError(
            f"the weights of step {step} are not finite and are not saved. {make_divergence_advice(store)}"
        )


def are_all_finite(tensors: Sequence[Tensor]) -> bool:
    """Returns whether all elements of all tensors are finite. If the sum of each tensor is finite, too, reads from the
    device only once.
    """
    sums = [tensor.sum() for tensor in tensors]
    if not sums or torch.isfinite(torch.stack(sums)).all().item():
        return True
    return all(torch.isfinite(tensor).all().item() for tensor in tensors)  # large values may have an infinite sum
