"""Values that are not finite (NaN, infinity): everything that is done about them, and what stands elsewhere.

A step      whose gradient is not finite on any rank changes no weight, no moment and no average, on any rank.
            The norm of all gradients tells, on the device, and the host learns of it a step late (updates.py). With
            an offloaded optimizer, and in bf16 at stage 0, DeepSpeed's own checks tell, at once. In fp16 the loss
            scale falls as well. No setting switches this off.
The run     counts such steps as `skipped` in its reports, and across resumes. After more than faults.max_skipped of
            them in a row it goes back to a checkpoint from before, and passes over the batches since (course.py).
            Where that does not help, FloatingPointError ends it with exit code 3 (commands/exits.py): its
            checkpoints are finite, and the user must change something.
A save      that is due while steps are skipped is left out. One because the run is stopped then is marked, and
            pushes out no good one (store.py). A save of weights that are not finite is refused by `check_weights`,
            with FloatingPointError. Such weights come from an update that overflows, or damaged memory.
Reports     leave values that are not finite out of the means of losses and count them as `nonfinite`
            (tracking/meter.py). One sample's NaN in a term that is only reported stops nothing.
Evaluation  leaves nothing out: a held-out mean is NaN if one sample is. It is written as null, beside the number
            of such samples as nonfinite_samples, in training as by launch/evaluate.py. A score that is not finite
            is never the best checkpoint's, and a finite one always improves on it (saver.py, store.py).
Data        with values that are not finite is refused where it is read (cached/rows.py, encoding/embeddings.py).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dstrain.checkpoint.store import Store
from dstrain.distributed import group
from dstrain.engine.masters import Masters


def advise_user(store: Store) -> str:
    """What to do about training that has diverged, by the checkpoints that there are; call on rank 0 at least."""
    steps, aside = store.steps(), store.put_aside()
    change = "Lower optimizer.lr, set optimizer.clip, or use bf16 in place of fp16"
    if not steps and not aside:
        return f"{store.folder} holds no checkpoint. {change}, and begin anew with --from-scratch"
    listed = ", ".join(map(str, steps)) + (f" (put aside: {', '.join(map(str, aside))})" if aside else "")
    return (
        f"{store.folder} holds the steps {listed}. {change}, and give the same command with --allow-change; "
        "--step N goes on from an earlier one of these, as where the loss of the newest is bad already, and "
        "--from-scratch begins anew"
    )


def check_weights(masters: Mapping[str, Masters], step: int, store: Store) -> None:
    """FloatingPointError on every rank if an fp32 weight on any rank is not finite. `store` holds the checkpoints.

    Only fragments are looked at: at stage 3 DeepSpeed leaves in a flat's padding whatever the memory held.
    """
    finite = all_finite([view for part in masters.values() for _, view in part.own_views(part.flats)])
    if group.agree(not finite):
        raise FloatingPointError(f"the weights of step {step} are not finite and are not saved. {advise_user(store)}")


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all elements of all tensors are finite; the device is waited for once in the ordinary case."""
    sums = [tensor.sum() for tensor in tensors]
    if not sums or torch.isfinite(torch.stack(sums)).all().item():
        return True
    return all(torch.isfinite(tensor).all().item() for tensor in tensors)  # large values may have an infinite sum
