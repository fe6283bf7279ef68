"""Takes the optimizer's step of one engine: one norm also checks the gradients, and the host reads the result a step
late.

DeepSpeed checks each gradient by itself, computes each norm in fp64, and reads both on the host. Here a step computes
one norm over the flat gradients of all ranks, which decides whether they are finite, and by how much they are clipped.
The norm stays on the device: the optimizer gets it as `found_inf` and `grad_scale`, as torch's GradScaler gives them to
a fused AdamW, and where found_inf is 1 the optimizer changes no weight, no moment and no count. The host learns of it a
step later.

This needs an optimizer that takes both, and says so by `_step_supports_amp_scaling`, as torch's do. With any other
optimizer, with one that is offloaded, and at stage 0 in bf16, DeepSpeed's own step and checks run, even where the JSON
switches the checks off.

Gradients of 16 bits are summed in fp32 over the micro-batches of a step, since a 16-bit sum loses precision with each
of them. At stages 2 and 3 DeepSpeed's `data_types.grad_accum_dtype` does so: it adds each reduced gradient to a
partition in fp32. At stage 0 DeepSpeed refuses the key, and at stage 1 in bf16 the key makes it use an optimizer with
other checkpoints. There Fp32GradientSums keeps the sum in fp32 beside the weights, and moves it into the weights'
gradients on the last micro-batch, in the precision of the network, which is also that of the reduction. One rank has
nothing to reduce: its gradients are summed where the optimizer reads them, and the sum is not rounded.

It reads DeepSpeed's internals; patches.py replaces some of them.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dstrain.distributed import group
from dstrain.engine.patches import (
    call_before_gradient_reduction,
    disable_loss_scale_updates,
    make_device_await_reductions,
    replace_optimizer_step,
    restore_gradient_reduction,
    skip_gradient_reduction,
)


class Fp32GradientSums:
    """Sums the gradients of `weights` in fp32 over the micro-batches of a step. Create it before the engine, so that
    its hooks run before DeepSpeed's.
    """

    def __init__(self, weights: Iterable[nn.Parameter]):
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._engine: Any = None
        self._hooks = [weight.register_post_accumulate_grad_hook(self._add_gradient_to_sum) for weight in weights]

    def attach_to_engine(self, engine: Any) -> None:
        """Connects the sums to a DeepSpeed engine, which knows which micro-batch is the last of a step. From now on,
        `_move_sums_into_grads` is called each time before the engine reduces gradients.
        """
        self._engine, engine.wide_sums = engine, self
        call_before_gradient_reduction(engine, self._move_sums_into_grads)

    def _move_sums_into_grads(self) -> None:
        """On the last micro-batch of a step, moves the sums of those weights that have no gradient in this micro-batch
        into the weights' `grad`. Does nothing on other micro-batches.
        """
        if self._engine.is_gradient_accumulation_boundary():
            for weight in list(self._sums):
                weight.grad = self._sums.pop(weight).to(weight.dtype)

    def detach_from_engine(self) -> None:
        """Stops summing gradients: removes the hooks from the weights, and disconnects the sums from the engine."""
        for hook in self._hooks:
            hook.remove()
        restore_gradient_reduction(self._engine)
        del self._engine.wide_sums

    def get_sums(self) -> Iterable[Tensor]:
        """Returns the live fp32 sums of gradients in this step so far, of the weights that have had a gradient."""
        return self._sums.values()

    @torch.no_grad()
    def _add_gradient_to_sum(self, weight: nn.Parameter) -> None:
        """Adds a weight's gradient of this micro-batch to its fp32 sum and sets the gradient to None. On the last
        micro-batch of the step, sets the gradient to the whole sum instead.
        """
        total = self._sums.pop(weight, None)
        if self._engine.is_gradient_accumulation_boundary():
            if total is not None:
                weight.grad = total.add_(weight.grad).to(weight.dtype)
        else:
            self._sums[weight] = weight.grad.float() if total is None else total.add_(weight.grad)
            weight.grad = None


@torch.no_grad()
def move_gradients_to_master(master: Tensor, weights: Sequence[nn.Parameter]) -> None:
    """Adds the gradients of `weights` to `master.grad`, a tensor in which they lie one after another. Then sets the
    gradients of `weights` to None. Allocates `master.grad` if it is None.
    """
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    sizes = [weight.numel() for weight in weights]
    places = master.grad[: sum(sizes)].split(sizes)
    used = [(place, weight.grad.reshape(-1)) for place, weight in zip(places, weights) if weight.grad is not None]
    if used:
        torch._foreach_add_(*map(list, zip(*used)))
    for weight in weights:
        weight.grad = None


_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_ROW = 1 << 14  # elements in one sum of squares: on a CPU, a longer one in fp32 loses digits


class AsyncHostCopy:
    """Starts to copy values to the host. `read` waits until the copy is done, and not for later work of the device."""

    def __init__(self, values: Tensor):
        self._host = values.to("cpu", non_blocking=True)  # page-locked memory, where they cross
        self._copied = torch.cuda.current_stream().record_event() if values.is_cuda else None

    def read(self) -> Any:
        """Waits until the copy is done. Returns the copied values, a number or a nested list as of Tensor.tolist."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()


class Flag:
    """Whether an update was applied. `value` is 1.0 or 0.0, a number or a tensor on the device. If it is a tensor, the
    first bool(flag) waits for the device.
    """

    def __init__(self, value: Tensor | bool):
        self.value = value if isinstance(value, Tensor) else float(value)
        self._late = AsyncHostCopy(value) if isinstance(value, Tensor) else None
        self._applied = bool(value) if self._late is None else None

    def __bool__(self) -> bool:
        if self._applied is None:
            self._applied = bool(self._late.read())
        return self._applied


class Updates:
    """Takes the optimizer's steps of one engine, and skips steps whose gradients are not finite."""

    def __init__(self, engine: Any):
        self.engine, self._zero = engine, engine.optimizer
        self.applied = Flag(False)  # whether the latest micro-batch led to an update
        self._unread: Flag | None = None  # of the latest step, where it is not yet counted
        self._norm: Tensor | None = None  # of the latest step's gradients, before clipping
        self._sum_into_masters = False  # micro-batches' gradients in those of the masters
        self._torch_fp32 = self.stage == 0 and not hasattr(self._zero, "fp32_groups")  # fp32: torch's optimizer
        self._check_on_device = getattr(self._get_inner_optimizer(), "_step_supports_amp_scaling", False) and (
            self._torch_fp32 or self.stage > 0
        )
        if self._check_on_device and self._torch_fp32:
            replace_optimizer_step(engine, None)
        elif self._check_on_device:
            replace_optimizer_step(engine, self._step_at_stage3 if self.stage == 3 else self._step_at_stages12)
            if self._needs_no_reduction:
                self._skip_gradient_reduction()
            elif engine.zero_overlap_comm() if self.stage == 3 else self._zero.overlap_comm:
                make_device_await_reductions(self._zero, self.stage)
        if self._has_dynamic_scale:
            disable_loss_scale_updates(self._zero)  # `record_last_step_result` changes it

    def step(self) -> None:
        """Ends a micro-batch after its backward pass. On the last micro-batch of a step, takes the optimizer's step,
        unless a gradient is not finite. Sets `applied`, which says whether this micro-batch has updated the weights.
        """
        if self._sum_into_masters:
            for master, weights in zip(self._zero.single_partition_of_fp32_groups, self._zero.bit16_groups):
                move_gradients_to_master(master, weights)
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()
            self.applied = Flag(False)
            return
        self.record_last_step_result()
        if self._torch_fp32:
            # DeepSpeed has just averaged the gradients over all ranks, so that all of them see the same norm.
            self._set_gradient_norm_and_scale(
                [
                    _compute_chunk_norms(weight.grad)
                    for weight in self.engine.module.parameters()
                    if weight.grad is not None
                ],
                None,
            )
        if self._torch_fp32 and not self._check_on_device and not self._norm.isfinite().item():
            self._skip_step()
        else:
            self.engine.step()
        self.applied = Flag(self._norm.isfinite().float() if self._check_on_device else self.engine.was_step_applied())
        self._unread = self.applied

    def record_last_step_result(self) -> None:
        """Counts the latest step as skipped or applied, and raises or lowers a dynamic loss scale by this result. Does
        nothing if the step was counted before. Waits for the device.
        """
        # The scale changes after the step: DeepSpeed would raise it before it divides by it, and so halve the gradients
        # of that step.
        if self._unread is not None:
            flag, self._unread = self._unread, None
            if self._check_on_device:
                self.engine.skipped_steps += not flag
            if self._has_dynamic_scale:
                self._zero.loss_scaler.update_scale(not flag)

    def update_loss_scale(self) -> None:
        """Raises or lowers a dynamic loss scale by the result of the latest step, unless this was done before. Call it
        before the backward pass, for which the loss is multiplied by the scale.
        """
        if self._has_dynamic_scale:
            self.record_last_step_result()

    @torch.no_grad()
    def _set_gradient_norm_and_scale(self, norms: Sequence[Tensor], process_group: dist.ProcessGroup | None) -> None:
        """Computes the norm of all gradients, before clipping and without the loss scale, and sets `_norm` to it. If
        the optimizer can skip a step on the device, also sets two of its attributes: `found_inf`, 1 if the norm is not
        finite, else 0; and `grad_scale`, the number by which the optimizer divides gradients for the loss scale and for
        clipping.

        norms           norms of those pieces of the gradients that this rank has
        process_group   the process group over which the pieces lie; None: this rank has all of them
        """
        scale, clip = self.loss_scale or 1.0, self.engine.gradient_clipping()
        norm = torch.linalg.vector_norm(torch.cat(list(norms)))
        if process_group is not None and dist.get_world_size(process_group) > 1:
            square = norm.square()
            dist.all_reduce(square, group=process_group)
            norm = square.sqrt()
        self._norm = norm / scale
        if self._check_on_device:
            inner = self._get_inner_optimizer()
            inner.found_inf = (~self._norm.isfinite()).float()
            factor = ((self._norm + 1e-6) / clip).clamp(min=1.0) * scale if clip > 0 else None
            inner.grad_scale = torch.full_like(norm, scale) if factor is None and scale != 1 else factor

    @cached_property
    def _needs_no_reduction(self) -> bool:
        """Returns whether gradients need no exchange between ranks and no rounding: at stage 1 or 2 with a single rank,
        if DeepSpeed would reduce gradients in their own dtype.
        """
        zero = self._zero
        return (
            0 < self.stage < 3
            and dist.get_world_size(zero.dp_process_group) == 1
            and zero.communication_data_type == zero.dtype
        )

    def _skip_gradient_reduction(self) -> None:
        """Makes DeepSpeed leave the gradients of a single rank in `weight.grad`, and removes Fp32GradientSums, if it is
        in use. If gradients of several micro-batches are summed in fp32, the sums are from now on in `grad` of the fp32
        weights.
        """
        skip_gradient_reduction(self._zero)
        aside = getattr(self.engine, "wide_sums", None)
        if aside:
            aside.detach_from_engine()
        self._sum_into_masters = bool(aside) or self._zero.gradient_accumulation_dtype != self._zero.dtype

    def _list_gradient_pieces(self, group_number: int, master: Tensor) -> list[Tensor]:
        """Returns the gradient of `master`, a tensor of fp32 weights at stages 1 and 2, in consecutive pieces of one
        dimension. `group_number` is the index of its parameter group.
        """
        zero = self._zero
        if not self._needs_no_reduction:
            flat = zero._get_preflattened_grad_partition(group_number)  # fp32 sums over micro-batches lie so already
            return [piece.reshape(-1) for piece in zero.averaged_gradients[group_number]] if flat is None else [flat]
        if self._sum_into_masters:
            return [master.grad]
        pieces = [
            weight.new_zeros(weight.numel()) if weight.grad is None else weight.grad.reshape(-1)
            for weight in zero.bit16_groups[group_number]
        ]
        padding = master.numel() - sum(piece.numel() for piece in pieces)
        return [*pieces, pieces[0].new_zeros(padding)] if padding else pieces

    @torch.no_grad()
    def _step_at_stages12(self) -> None:
        """Takes the optimizer's step at stages 1 and 2. It replaces DeepSpeed's method, with the same result, but
        computes only one norm and makes no second copy of the gradients.
        """
        zero, norms = self._zero, []
        masters = zero.single_partition_of_fp32_groups
        for number, master in enumerate(masters):
            pieces = self._list_gradient_pieces(number, master)
            if len(pieces) == 1:
                master.grad = pieces[0].to(master.dtype)
            else:
                master.grad = torch.empty_like(master)
                torch._foreach_copy_(master.grad.split([piece.numel() for piece in pieces]), pieces)
            # A GPU takes all pieces at once, and reads half the bytes where they are of 16 bits.
            norms.append(
                torch.stack(torch._foreach_norm(pieces, dtype=torch.float32))
                if master.is_cuda
                else _compute_chunk_norms(master.grad)
            )
            zero.averaged_gradients[number] = zero.all_grad_tensors[number] = None
            zero.free_grad_in_param_list(zero.bit16_groups[number])
            del pieces
        self._set_gradient_norm_and_scale(norms, zero.dp_process_group)
        zero.optimizer.step()
        for master in masters:
            master.grad = None
        zero._lazy_init_hp_params_optimizer_state()
        zero.update_lp_params()

    @torch.no_grad()
    def _step_at_stage3(self) -> None:
        """Takes the optimizer's step at stage 3. It replaces DeepSpeed's method, with the same result, but computes
        only one norm, and gathers all small weights, which stay whole on each rank, in one exchange.
        """
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        zero = self._zero
        zero._pre_step()
        if any(weight.ds_status is not ZeroParamStatus.NOT_AVAILABLE for weight in self._partitioned_weights):
            zero._partition_all_parameters()
        self._set_gradient_norm_and_scale(
            [_compute_chunk_norms(zero.grad_partitions_flat_buffer)], zero.dp_process_group
        )
        zero.zero_grad(set_to_none=True)
        for number, master in enumerate(zero.fp32_partitioned_groups_flat):
            zero._prepare_sub_group(number, set())
            zero._optimizer_step(number)
            zero.fp16_partitioned_groups_flat[number].copy_(master)  # its pieces are the weights' shares
            zero._release_sub_group(number, set())
        zero.grad_partitions_flat_buffer.zero_()  # for weights that take no part in the next step
        if weights := zero.persistent_parameters:
            # With offload_param the shares lie in the host's memory.
            own = torch.cat([weight.ds_tensor for weight in weights]).to(group.device())
            world = dist.get_world_size(zero.dp_process_group)
            if world > 1:
                whole = own.new_empty(world * own.numel())
                dist.all_gather_into_tensor(whole, own, group=zero.dp_process_group)
                own = whole
            shares = own.view(world, -1).split([weight.ds_tensor.numel() for weight in weights], dim=1)
            for weight, share in zip(weights, shares):
                padded = share.numel() > weight.ds_numel
                weight.data = (share.reshape(-1)[: weight.ds_numel] if padded else share).reshape(weight.ds_shape)
                weight.ds_status = ZeroParamStatus.AVAILABLE
        zero.invalidate_secondary_tensor()

    @cached_property
    def _partitioned_weights(self) -> list[Tensor]:
        """Returns the weights that stage 3 partitions and gathers where they are used. Small weights, which stay whole
        on each rank, are not among them.
        """
        return [weight for weight in self.engine.module.parameters() if not weight.ds_persist]

    def _skip_step(self) -> None:
        """Ends a step at stage 0 in fp32 without an update of weights, and increases the engine's counters as DeepSpeed
        does when it skips a step.
        """
        self.engine.zero_grad()
        self.engine._step_applied = False
        self.engine.micro_steps += 1
        self.engine.global_steps += 1
        self.engine.skipped_steps += 1

    def _get_inner_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self._zero, "optimizer", self._zero)

    @property
    def stage(self) -> int:
        return self.engine.zero_optimization_stage()

    @property
    def num_skipped(self) -> int:
        """Returns the number of steps since the run began that were skipped, because a gradient was not finite."""
        self.record_last_step_result()
        return self.engine.skipped_steps

    @num_skipped.setter
    def num_skipped(self, count: int) -> None:
        self._unread = None
        self.engine.skipped_steps = count

    @property
    def grad_norm(self) -> float | None:
        """Returns the norm of all gradients of the latest step, over all ranks and before clipping. It is inf if it is
        not finite, and None if it was not computed. Waits for the device.
        """
        norm = self.engine.get_global_grad_norm() if self._norm is None else self._norm
        if norm is None:
            return None
        return float(norm) if math.isfinite(norm) else math.inf

    @property
    def loss_scale(self) -> float | None:
        """Returns the factor by which fp16 multiplies the loss of the next step; None in other precisions."""
        self.update_loss_scale()
        return self._zero.loss_scaler.cur_scale if self.engine.fp16_enabled() else None

    @property
    def _has_dynamic_scale(self) -> bool:
        return self.engine.fp16_enabled() and self.engine.dynamic_loss_scale()

    @property
    def loss_scaler_state(self) -> dict[str, float]:
        """Returns the dynamic loss scale and its counters, by DeepSpeed's names, for a checkpoint; {} if the scale is
        fixed or there is none.
        """
        self.record_last_step_result()
        return {name: getattr(self._zero.loss_scaler, name) for name in _SCALER_STATE if self._has_dynamic_scale}

    @loss_scaler_state.setter
    def loss_scaler_state(self, state: dict[str, float]) -> None:
        if self._has_dynamic_scale and state.keys() == set(_SCALER_STATE):  # not where the run was in another precision
            self._unread = None
            vars(self._zero.loss_scaler).update(state)


def _compute_chunk_norms(values: Tensor) -> Tensor:
    """Returns the fp32 norms (n,) of consecutive pieces of a tensor, 16,384 elements each; the last piece may be
    shorter. The norm of these norms is the norm of the tensor.
    """
    values = values.reshape(-1)
    whole = values.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(values[:whole].view(-1, _ROW), dim=1, dtype=torch.float32)
    return torch.cat((rows, torch.linalg.vector_norm(values[whole:], dtype=torch.float32)[None]))
