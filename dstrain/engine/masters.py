"""The fp32 weights that this rank owns, as named fragments, and the optimizer's state.

Everything that reaches behind DeepSpeed's public interface stands in this file and in allocation.py. Other files only
call an engine's `backward`, `step`, `is_gradient_accumulation_boundary`, `save_checkpoint` and `load_checkpoint`, and
use its `module` and `optimizer.param_groups`.

A *flat* is one live fp32 tensor that the optimizer steps: a partition of a parameter group under ZeRO, a whole
parameter at stage 0. A fragment is the part of one named parameter that lies in one flat; the rest is padding.

    stage 3           fp32_partitioned_groups_flat, one flat for each sub-group
    stage 1, 2        single_partition_of_fp32_groups, one flat for each parameter group
    stage 0 bf16      fp32_groups, one for each parameter, on every rank
    stage 0 fp32      the parameters themselves, on every rank
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dstrain.engine.fragments import Fragment
from dstrain.ranks import group

MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def full_shape(tensor: Tensor) -> torch.Size:
    """The shape that ZeRO-3 remembers of a partitioned parameter, or the tensor's own."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


def universal_info() -> dict[str, Any]:
    """An entry for DeepSpeed's own checkpoints, from which its tool ds_to_universal sees how weights are split.
    """
    from deepspeed.checkpoint import constants
    return {constants.UNIVERSAL_CHECKPOINT_INFO: {
        constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE}}


@contextmanager
def errors_at_the_end(engines: Iterable[Any]) -> Iterator[None]:
    """Keeps back the errors of files that DeepSpeed cannot write, and raises the first at the end.

    The ranks communicate between the files of a save_checkpoint: a rank that left there would leave them waiting.
    """
    errors: list[OSError | RuntimeError] = []

    def attempt(write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return write(*args, **kwargs)
        except (OSError, RuntimeError) as error:                          # torch.save raises RuntimeError
            errors.append(error)

    writers = [writer for engine in engines
               for writer in ((engine.checkpoint_engine, "save"), (engine, "_copy_recovery_script"))]
    for owner, name in writers:
        setattr(owner, name, partial(attempt, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name in writers:
            delattr(owner, name)                                          # uncovers the class's method
    if errors:
        raise errors[0]


class Masters:
    """fp32 weights of one engine: where they lie, what they are called, how they reach the compute weights."""

    def __init__(self, engine: Any):
        self.engine = engine
        self._names = {id(weight): name for name, weight in engine.module.named_parameters()}
        self._zero = engine.optimizer
        self.flats: list[Tensor] = []
        self.fragments: list[tuple[Fragment, int, int]] = []              # fragment, number of its flat, offset in it
        self.replicated = self.stage == 0
        {0: self._find_stage0, 1: self._find_stage12, 2: self._find_stage12, 3: self._find_stage3}[self.stage]()
        compute = {weight.data_ptr() for weight in self._compute_flats()}
        # In fp32 the masters may be the compute weights themselves: `showing` other values then needs a copy of them.
        self._aliased = any(flat.data_ptr() in compute for flat in self.flats)
        self._overflows: list[bool] = []                                  # of the step that ends, in fp16
        if self._searches_scale:
            self._zero.loss_scaler.raise_error_at_min_scale = False       # course.py sees to skipped steps instead
            self._zero._update_scale = self._overflows.append

    def _find_stage0(self) -> None:
        groups = getattr(self._zero, "fp32_groups", None)
        if groups is None:
            pairs = [(p, p.data) for params in self._zero.param_groups for p in params["params"]]
        else:
            pairs = [(p, master) for ps, masters in zip(self._zero.fp16_groups, groups)
                     for p, master in zip(ps, masters)]
        self._weights = [weight for weight, _ in pairs]
        for number, (weight, master) in enumerate(pairs):
            self.flats.append(master)
            whole = Fragment(self._names[id(weight)], tuple(weight.shape), 0, weight.numel())
            self.fragments.append((whole, number, 0))

    def _find_stage12(self) -> None:
        self.flats = list(self._zero.single_partition_of_fp32_groups)
        for number, weights in enumerate(self._zero.bit16_groups):
            for weight in weights:
                mapping = weight._hp_mapping                              # None where another rank owns all of it
                if mapping is not None:
                    inside, place = mapping.lp_fragment_address, mapping.hp_fragment_address
                    fragment = Fragment(self._names[id(weight)], tuple(weight.shape), inside.start, inside.numel)
                    self.fragments.append((fragment, number, place.start))

    def _find_stage3(self) -> None:
        self.flats = list(self._zero.fp32_partitioned_groups_flat)
        rank = dist.get_rank(self._zero.dp_process_group)
        for weight in chain.from_iterable(self._zero.fp16_groups):
            number, offset, length = self._zero.grad_position[self._zero.get_param_id(weight)]
            start = min(rank * length, weight.ds_numel)                   # the last partition is padded
            numel = min(length, weight.ds_numel - start)
            if numel > 0:
                fragment = Fragment(self._names[id(weight)], tuple(full_shape(weight)), start, numel)
                self.fragments.append((fragment, number, offset))

    def _compute_flats(self) -> Sequence[Tensor]:
        """This rank's shares of the weights that the network computes with, aligned with the flats."""
        if self.replicated:
            return [weight.data for weight in self._weights]
        if hasattr(self._zero, "fp16_partitioned_groups_flat"):
            return self._zero.fp16_partitioned_groups_flat
        partitions = zip(self._zero.parallel_partitioned_bit16_groups, self._zero.real_dp_process_group)
        return [parts[dist.get_rank(owners)] for parts, owners in partitions]

    def views(self, flats: Sequence[Tensor]) -> Iterator[tuple[Fragment, Tensor]]:
        """Each fragment with its elements of `flats`, any tensors of the masters' layout: (numel,) views."""
        for fragment, number, offset in self.fragments:
            yield fragment, flats[number].detach().view(-1).narrow(0, offset, fragment.numel)

    def own_views(self, flats: Sequence[Tensor]) -> Iterator[tuple[Fragment, Tensor]]:
        """`views`, each element of the network on one rank only: what this rank writes into a checkpoint."""
        rank, world = group.rank(), group.world()
        for number, view in enumerate(self.views(flats)):
            if not self.replicated or number % world == rank:
                yield view

    @torch.no_grad()
    def norm(self) -> float:
        """The length of all weights as one vector, on all ranks together."""
        squares = [view.square().sum(dtype=torch.float64) for _, view in self.own_views(self.flats)]
        total = sum(squares, torch.zeros((), dtype=torch.float64, device=self.flats[0].device))
        return group.total(total.to(group.device())).sqrt().item()                # offloaded masters are on the host

    @torch.no_grad()
    def fill(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Sets the masters from full weights by name and ignores other names. `publish` must follow."""
        own: dict[str, list[tuple[Fragment, Tensor]]] = {}
        for fragment, view in self.views(self.flats):
            own.setdefault(fragment.name, []).append((fragment, view))
        for name, value in values:
            for fragment, view in own.get(name, ()):
                view.copy_(value.reshape(-1)[fragment.start: fragment.start + fragment.numel])

    def publish(self) -> None:
        """Writes the masters into the compute weights, on all ranks together."""
        self._show(self.flats)

    @contextmanager
    def showing(self, flats: Sequence[Tensor]) -> Iterator[None]:
        """The network computes with `flats` inside and, bit for bit, with the masters afterwards; on all ranks."""
        masters = [flat.detach().clone() for flat in self.flats] if self._aliased else self.flats
        self._show(flats)
        try:
            yield
        finally:
            self._show(masters)

    @torch.no_grad()
    def _show(self, flats: Sequence[Tensor]) -> None:
        gathers = hasattr(self._zero, "fp16_partitioned_groups_flat")
        if gathers:
            self._zero.checkpoint_event_prologue()                        # releases gathered parameters
        for shown, flat in zip(self._compute_flats(), flats):
            shown.copy_(flat.view_as(shown))
        if gathers:
            for number in range(len(flats)):
                self._zero._unflatten_partitioned_parameters(number)
            self._zero.checkpoint_event_epilogue()                        # gathers the persistent ones again
        elif not self.replicated:
            from deepspeed.runtime.utils import all_gather_dp_groups
            all_gather_dp_groups(groups_flat=self._zero.bit16_groups_flat,
                                 partitioned_param_groups=self._zero.parallel_partitioned_bit16_groups,
                                 dp_process_group=self._zero.real_dp_process_group,
                                 start_alignment_factor=self._zero.nccl_start_alignment_factor,
                                 allgather_bucket_size=self._zero.allgather_bucket_size)

    def _inner(self) -> torch.optim.Optimizer:
        return getattr(self._zero, "optimizer", self._zero)

    def reset_optimizer_state(self) -> None:
        """Drops the optimizer's state; DeepSpeed's stage 0 has taken a step on zero gradients to make it."""
        self._inner().state.clear()

    def moments(self, kind: str) -> list[Tensor]:
        """`exp_avg` or `exp_avg_sq` in the masters' layout; zeros are made where no step was taken yet."""
        return [self._state(number)[kind] for number in range(len(self.flats))]

    def _state(self, number: int) -> dict[str, Any]:
        optimizer, flat = self._inner(), self.flats[number]
        # At stage 0 in fp32 the optimizer steps the parameter itself, and the flat is its data.
        state = optimizer.state[flat if self.checks_gradients else self._weights[number]]
        if not state:
            device = flat.device if optimizer.defaults.get("fused") else "cpu"
            counter = 0 if type(optimizer).__name__ == "DeepSpeedCPUAdam" else torch.tensor(0.0, device=device)
            state.update(step=counter, **{kind: torch.zeros_like(flat.detach()) for kind in MOMENTS})
        return state

    @property
    def updates(self) -> int:
        """Updates that the optimizer has applied: Adam's own count, which skipped steps do not advance."""
        return int(self._state(0)["step"]) if self.flats else 0

    @updates.setter
    def updates(self, count: int) -> None:
        for number in range(len(self.flats)):
            state = self._state(number)
            state["step"] = state["step"].fill_(count) if torch.is_tensor(state["step"]) else count

    @property
    def stage(self) -> int:
        return self.engine.zero_optimization_stage()

    @property
    def checks_gradients(self) -> bool:
        """Whether DeepSpeed itself skips a step whose gradients are not finite: everywhere but at stage 0 in fp32."""
        return self.stage > 0 or hasattr(self._zero, "fp32_groups")

    @property
    def applied(self) -> bool:
        """Whether the latest micro-batch led to an update."""
        return bool(self.engine.was_step_applied())

    def skip_step(self) -> None:
        """Ends a step at stage 0 without an update, counted as DeepSpeed counts the steps that it skips itself."""
        self.engine.zero_grad()
        self.engine._step_applied = False
        self.engine.micro_steps += 1
        self.engine.global_steps += 1
        self.engine.skipped_steps += 1

    @property
    def skipped(self) -> int:
        """Steps that were not applied since the run began."""
        return self.engine.skipped_steps

    @skipped.setter
    def skipped(self, count: int) -> None:
        self.engine.skipped_steps = count

    @property
    def grad_norm(self) -> float | None:
        """Of the latest step before clipping, over all ranks; None where it was not computed."""
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    @grad_norm.setter
    def grad_norm(self, norm: float) -> None:
        self.engine._global_grad_norm = norm

    @property
    def loss_scale(self) -> float | None:
        """The factor of the loss under fp16; None in other precisions."""
        return self._zero.loss_scaler.cur_scale if self.engine.fp16_enabled() else None

    def update_scale(self) -> None:
        """Ends a step: DeepSpeed would raise a scale before it divides by it, and so halve the gradients of that step.
        """
        while self._overflows:
            self._zero.loss_scaler.update_scale(self._overflows.pop())

    @property
    def _searches_scale(self) -> bool:
        return self.engine.fp16_enabled() and self.engine.dynamic_loss_scale()

    @property
    def scaler_state(self) -> dict[str, float]:
        """What a checkpoint keeps of a dynamic loss scale and its history; nothing of a fixed one, which is a setting.
        """
        return {name: getattr(self._zero.loss_scaler, name) for name in _SCALER_STATE if self._searches_scale}

    @scaler_state.setter
    def scaler_state(self, state: dict[str, float]) -> None:
        if self._searches_scale and state.keys() == set(_SCALER_STATE):   # not where the run was in another precision
            vars(self._zero.loss_scaler).update(state)
