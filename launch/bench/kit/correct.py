"""Whether a system trains right on this machine: against plain PyTorch in fp32, and against itself, resumed.

Cases of the kit; each runs at the sizes of the small recipes, on a GPU as in a dry run.
"""

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dstrain.distributed import group
from dstrain.engine.checkpoint import Checkpoints
from dstrain.engine.start import start_process_group
from dstrain.planning.synthetic import Repeated
from dstrain.recipe import Run, Save
from kit import jobs
from kit.report import Record
from kit.sides import Dstrain, Losses, Plain, apart, system_of

HALF = 4  # steps before the checkpoint, and after it
State = dict[str, Tensor]

# Where DeepSpeed itself awaits a stream of ZeRO-3: for weights that one GPU need not gather, with nothing in it, and
# lest the host run too far ahead of the exchanges.
_HELD = tuple(
    f"deepspeed.runtime.zero.{name}"
    for name in (
        "partition_parameters.NoGatherHandle.wait",
        "partition_parameters.NoGatherCoalescedHandle.wait",
        "partitioned_param_coordinator.PartitionedParameterCoordinator._fetch_sub_module_impl",
        "stage3.DeepSpeedZeroOptimizer_Stage3.__reduce_and_partition_ipg_grads",
    )
)

# What reads a value late, by an event recorded after its copy to the host: that awaits no work launched afterwards.
_LATE = ("dstrain.engine.updates.AsyncHostCopy.read", "dstrain.systems.phenaki.maskgit.Pending.wait_for_masked_indices")


class Trial:
    """What the loop holds of one run, with checkpoints in `folder`."""

    def __init__(self, run: Run, stage: int, precision: str, folder: Path):
        self.system = system_of(run)
        batches = Repeated(self.system, run.batch.global_, 1, count=2 * HALF)
        self.trained = Dstrain(run, jobs.settings(run, stage, precision), self.system, batches)
        self.lines: list[str] = []
        self.saves = Checkpoints(folder, self.trained.engines, self.trained.ema, self.system, Save(), self.lines.append)

    def steps(self, first: int, last: int) -> list[Losses]:
        return [self.trained.step(number) for number in range(first, last)]

    def state(self) -> State:
        """Copies of masters, moments and averages by name, whatever the layout, and the system's own."""
        values = {f"system/{name}": value.clone() for name, value in self.system.state_dict().items()}
        return values | {
            f"{part}/{kind}/{fragment.name}": value.clone()
            for part, entries in self.saves._collect_fragments_to_save().items()
            for kind, fragment, value in entries
        }


def check(record: Record, system: str, precision: str, stages: tuple[int, ...], compiled: bool) -> None:
    """A curve of losses, averages, a save beside training, and ways on from it, at each stage."""
    _begin()
    if precision == "fp16" and group.device().type == "cpu":
        return record.left_out("fp16 needs a GPU")
    run = jobs.small(system, [f"compile={'on' if compiled else 'off'}"])
    reference, most = _plain(run, torch.float32), 1e-4
    if precision != "fp32":  # more than rounding makes of plain torch, since a code's sign may turn
        most = 4 * apart(_plain(run, torch.bfloat16), reference) + 2e-3
    for stage in stages:
        with tempfile.TemporaryDirectory(prefix="dstrain-kit-") as folder:
            _check_stage(record, run, stage, precision, Path(folder), reference, most)


def _plain(run: Run, dtype: torch.dtype) -> list[Losses]:
    """The curve of the plain loop, eager."""
    system = system_of(run)
    plain = Plain(
        run.model_copy(update={"compile": "off"}), system, Repeated(system, run.batch.global_, 1, 2 * HALF), dtype
    )
    return [plain.step(number) for number in range(2 * HALF)]


def _check_stage(
    record: Record, run: Run, stage: int, precision: str, folder: Path, reference: list[Losses], most: float
) -> None:
    """`most`: how far a loss may be from the reference."""
    name = f"stage {stage}"
    trial = Trial(run, stage, precision, folder)
    averages = _Averages(trial)
    losses = [averages.after(trial, number) for number in range(HALF)]
    record.row(f"{name}: EMA, from its formula in float64", averages.apart(trial), at_most=1e-6)
    saved = trial.state()
    trial.saves.save(HALF)
    buffers = trial.saves.saver._snapshot._buffers
    record.row(f"{name}: saved beside training, from copies", bool(buffers), at_least=1)
    if group.device().type == "cuda":
        record.row(f"{name}: page-locked copies", all(buffer.is_pinned() for buffer in buffers.values()), at_least=1)
    losses += trial.steps(HALF, 2 * HALF)
    trial.saves.saver.wait_for_save()
    record.row(f"{name}: loss of {2 * HALF} steps, from plain torch in fp32", apart(losses, reference), at_most=most)
    ended = trial.state()

    resumed = Trial(run, stage, precision, folder)
    record.row(f"{name}: resumed at", resumed.saves.resume(), "steps", at_least=HALF)
    record.row(f"{name}: values that differ when resumed", _differ(resumed.state(), saved), at_most=0)
    again = resumed.steps(HALF, 2 * HALF)
    record.row(f"{name}: losses of resumed steps, from the uninterrupted", apart(again, losses[HALF:]), at_most=0)
    record.row(f"{name}: values that differ {HALF} steps later", _differ(resumed.state(), ended), at_most=0)

    other = 3 if stage < 3 else 1
    moved = Trial(run, other, precision, folder)
    moved.saves.resume()
    record.row(f"{name}: values that differ at stage {other}", _differ(moved.state(), saved), at_most=0)
    record.row(
        f"{name}: losses at stage {other}, from the uninterrupted",
        apart(moved.steps(HALF, 2 * HALF), losses[HALF:]),
        at_most=most,
    )


def no_reads(record: Record, system: str, precision: str, stages: tuple[int, ...]) -> None:
    """Steps in which the host waits for the GPU for nothing; without a GPU, how often it reads a value."""
    _begin(deterministic=False)
    run = jobs.small(system, ["compile=off"])
    for stage in stages:
        with tempfile.TemporaryDirectory(prefix="dstrain-kit-") as folder:
            trial = Trial(run, stage, precision, Path(folder))
            trial.steps(0, HALF)
            with _Reads() as reads:
                trial.steps(HALF, HALF + 1)
            record.row(f"stage {stage}: host reads a step", reads.count, at_most=0, here=not record.dry)
            if group.device().type == "cuda":
                with _on_sync("error"), waits() as counts:
                    trial.steps(HALF + 1, 2 * HALF)
                record.row(f"stage {stage}: steps without a read that torch reports", HALF - 1, at_least=HALF - 1)
                record.detail(f"stage {stage}: who waited", dict(counts))
                record.row(
                    f"stage {stage}: host waits in {HALF - 1} steps, but for late reads",
                    unexpected(counts, len(trial.system.parts) * (HALF - 1)),
                    at_most=0,
                )


def _begin(deterministic: bool = True) -> None:
    """Sums in a fixed order, so that a resumed run can have the same bits, and no TF32. Attention keeps to one only
    where torch is told to raise an error for what has none.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    start_process_group()


def _differ(ours: State, theirs: State) -> int:
    """Elements that are not the same bits, NaN included."""
    assert ours.keys() == theirs.keys()
    return sum(int((~(ours[name].cpu() == theirs[name].cpu())).sum()) for name in ours)


class _Averages:
    """Averages by their formula, in float64, beside those of a trial."""

    def __init__(self, trial: Trial):
        self.shadows = {
            part: {decay: [flat.double() for flat in flats] for decay, flats in by_decay.items()}
            for part, by_decay in trial.trained.ema.flats.items()
        }

    def after(self, trial: Trial, number: int) -> Losses:
        """The losses of one step, after which the averages follow."""
        losses = trial.trained.step(number)
        applied, ema = trial.trained.engines.collect_part_change_flags(), trial.trained.run.ema
        for part, by_decay in self.shadows.items():
            for decay, shadow in by_decay.items() if applied.get(part) else ():
                keep = ema.compute_effective_decay(decay, number)
                for own, flat in zip(shadow, trial.trained.engines.masters[part].flats):
                    own.mul_(keep).add_(flat.detach(), alpha=1 - keep)
        return losses

    def apart(self, trial: Trial) -> float:
        return max(
            (own - flat).abs().max().item()
            for part, by_decay in trial.trained.ema.flats.items()
            for decay, flats in by_decay.items()
            for own, flat in zip(self.shadows[part][decay], flats)
        )


class _Reads(TorchDispatchMode):
    """Counts values that the host reads out of tensors of the device: .item(), bool(tensor), float(tensor)."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        reads = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        self.count += func in reads and args[0].device.type == group.device().type
        return func(*args, **(kwargs or {}))


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """Counts by caller how often the host waits for the device, a stream or an event; torch's debug mode, which would
    end the step at some of them, does not see these.
    """
    counts: Counter[str] = Counter()

    def counted(wait: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            if caller.f_globals["__name__"].startswith("deepspeed.accelerator."):  # who calls it is of interest
                caller = caller.f_back
            counts[f"{caller.f_globals['__name__']}.{caller.f_code.co_qualname}"] += 1
            with _on_sync("default") if torch.cuda.is_available() else nullcontext():
                return wait(*args, **kwargs)

        return noted

    originals = {owner: owner.synchronize for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event)}
    try:
        for owner, wait in originals.items():
            owner.synchronize = counted(wait)
        yield counts
    finally:
        for owner, wait in originals.items():
            owner.synchronize = wait


def unexpected(counts: Counter[str], late: int) -> int:
    """The waits of `counts` but for `late` late reads of each kind, one a network and step, and those of _HELD."""
    return sum(
        max(count - late, 0) if caller in _LATE else count for caller, count in counts.items() if caller not in _HELD
    )


@contextmanager
def _on_sync(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
