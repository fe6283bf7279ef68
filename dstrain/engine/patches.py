"""What dstrain changes in DeepSpeed and torch while they run: all of it stands here, and nowhere else in dstrain.

REPLACED names by function what it takes the place of, as it was seen on the releases in SEEN_ON. A newer one must be
tried: tests/engine/test_patches.py fails where the code that is changed, or that a change relies on, has become
another, and where another file changes DeepSpeed. These files read DeepSpeed's internals beside this one:

    masters.py        where the fp32 weights lie, and how they get into the weights that a network computes with
    updates.py        what an engine's step, and the end of its backward pass, work on; it counts steps as engines do
    initial.py        what zero.Init asks of a module
    parser.py         the classes that parse its settings
    planning/         its buffers; there torch says without looking whether there is a GPU

Other files only call an engine's `backward`, `step`, `is_gradient_accumulation_boundary`, `save_checkpoint` and
`load_checkpoint`, and use its `module` and `optimizer.param_groups`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dstrain.engine import set_deepspeed_environment

SEEN_ON = ("0.19.8",)
_ENGINE, _ZERO12, _ZERO3 = (
    "runtime/engine.py:DeepSpeedEngine",
    "runtime/zero/stage_1_and_2.py:DeepSpeedZeroOptimizer",
    "runtime/zero/stage3.py:DeepSpeedZeroOptimizer_Stage3",
)
# By function of this file: what it replaces, or works on, as FILE:NAME in DeepSpeed; torch.NAME in torch.
REPLACED = {
    "import_deepspeed": ("runtime/compiler.py:compile",),
    "replace_current_stream_lookup": ("accelerator/cuda_accelerator.py:CUDA_Accelerator.current_stream",),
    "set_default_group_timeout": ("torch.distributed.distributed_c10d.default_pg_timeout",),
    "forget_process_groups_at_end": ("comm/comm.py:init_distributed", "utils/groups.py:_clone_world_group"),
    "replace_linear_of_zero3": (
        "runtime/zero/linear.py:LinearFunctionForZeroStage3",
        "runtime/zero/utils.py:is_zero_param",
    ),
    "flatten_weights_without_copy": (f"{_ZERO12}.flatten_dense_tensors_aligned",),
    "make_universal_checkpoint_entry": ("checkpoint/ds_to_universal.py:_check_for_required_state",),
    "defer_write_errors": (f"{_ENGINE}._copy_recovery_script",),
    "reset_cached_beta_powers": ("ops/adam/cpu_adam.py:DeepSpeedCPUAdam.step",),
    "patch_deepspeed_for_fake_tensors": (
        "ops/adam/cpu_adam.py:DeepSpeedCPUAdam.step",
        "runtime/zero/utils.py:assert_ints_same_as_other_ranks",
    ),
    "call_before_gradient_reduction": (f"{_ENGINE}.allreduce_gradients",),
    "restore_gradient_reduction": (f"{_ENGINE}.allreduce_gradients",),
    "replace_optimizer_step": (f"{_ENGINE}.clip_fp32_gradients", f"{_ZERO12}.step", f"{_ZERO3}.step"),
    "make_device_await_reductions": (
        f"{_ZERO12}.independent_gradient_partition_epilogue",
        f"{_ZERO12}.reduce_ipg_grads",
        f"{_ZERO3}.independent_gradient_partition_epilogue",
    ),
    "skip_gradient_reduction": (
        f"{_ZERO12}.reduce_gradients",
        f"{_ZERO12}.overlapping_partition_gradients_reduce_epilogue",
    ),
    "disable_loss_scale_updates": (
        f"{_ZERO12}._update_scale",
        "runtime/fp16/loss_scaler.py:DynamicLossScaler.update_scale",
    ),
}


def import_deepspeed() -> ModuleType:
    """Imports DeepSpeed with all that its engines need, and returns the module. Sets the environment variables first
    (set_deepspeed_environment). Leaves out torch's compiler, whose import takes 1.2 s, and silences DeepSpeed's warning
    of untested optimizers.
    """
    # DeepSpeed decorates its own Muon with torch.compile, and imports that class only to recognize it as an optimizer;
    # dstrain has another Muon (optimizers.py). A release of DeepSpeed without that module is imported as it is.
    set_deepspeed_environment()
    import deepspeed
    from deepspeed.runtime import compiler

    original, compiler.compile = compiler.compile, lambda *_, **__: lambda function: function
    try:
        with suppress(ImportError):
            import deepspeed.runtime.zero.muon.original_muon
        with suppress(ImportError):
            # The destructor of an engine imports it, perhaps amid another import, where that is a KeyError (gh-106176).
            import deepspeed.module_inject.auto_ep_comm
    finally:
        compiler.compile = original
    deepspeed.utils.logger.addFilter(_is_worth_logging)
    return deepspeed


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Returns False for DeepSpeed's warning that an optimizer is untested, and True for all other log records."""
    return "untested" not in record.getMessage()


def replace_current_stream_lookup(gpu_index: int) -> None:
    """Makes DeepSpeed take torch's current stream of GPU `gpu_index`, without looking up first which GPU is current.
    DeepSpeed asks for the stream some thousand times a step, and the look-up doubles the time.
    """
    import deepspeed

    deepspeed.get_accelerator().current_stream = lambda device=gpu_index: torch.cuda.current_stream(device)


def set_default_group_timeout(timeout: timedelta) -> None:
    """Sets the timeout of all process groups that are made from now on, also of those that DeepSpeed makes."""
    groups = torch.distributed.distributed_c10d
    groups.default_pg_timeout = groups.default_pg_nccl_timeout = timeout


@contextmanager
def forget_process_groups_at_end() -> Iterator[None]:
    """At the end of the block, makes DeepSpeed forget its process groups, so that new ones can be made, and restores
    torch.nn.functional.linear, which ZeRO-3 replaces.
    """
    linear = torch.nn.functional.linear
    try:
        yield
    finally:
        from deepspeed.comm import comm
        from deepspeed.utils import groups

        comm.cdb = None
        for name, value in vars(groups).items():  # beside its functions and classes
            if name.endswith("_GROUP") and value is not None:
                setattr(groups, name, {} if isinstance(value, dict) else None)
        torch.nn.functional.linear = linear


def replace_linear_of_zero3() -> None:
    """Replaces the forward pass of ZeRO-3's linear layer by `_apply_linear`, and the layer's test whether a weight is
    partitioned by `_needs_gathering`, in the whole process.
    """
    from deepspeed.runtime.zero import linear

    linear.is_zero_param = _needs_gathering
    linear.LinearFunctionForZeroStage3.forward = staticmethod(_apply_linear)


def _apply_linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns values @ weight.T + bias, computed by one operation of torch. It replaces the forward pass of ZeRO-3's
    linear layer, which adds the bias in place to the product.
    """
    # recompute=attention keeps the product: when it is used again, it would contain the bias twice. And in a compiled
    # block torch 2.11 silently loses the gradient of what an autograd function has changed in place: it would be 0 for
    # the layer and for all before it (github.com/pytorch/pytorch/issues/180642).
    return torch.ops.aten.linear(values, weight, bias)


def _needs_gathering(weight: Tensor) -> bool:
    """Returns whether ZeRO-3 manages a weight, so that its values must be gathered for the backward pass. Always
    returns False in compiled blocks, whose weights are gathered already.
    """
    # Under torch 2.11 the check would compile each block anew.
    return not torch.compiler.is_compiling() and hasattr(weight, "ds_id")


@contextmanager
def flatten_weights_without_copy() -> Iterator[None]:
    """Inside the block, DeepSpeed's stages 1 and 2 do not copy the weights of a parameter group into a new tensor, if
    these weights lie one after another in one tensor already (initial.py). DeepSpeed then uses that tensor.
    """
    from deepspeed.runtime.zero import stage_1_and_2

    copying, inside = stage_1_and_2._flatten_dense_tensors, True

    def flatten_or_reuse(tensors: Sequence[Tensor]) -> Tensor:
        flat = _find_common_flat_tensor(tensors) if inside else None  # the optimizer keeps this function for gradients
        return copying(tensors) if flat is None else flat

    stage_1_and_2._flatten_dense_tensors = flatten_or_reuse
    try:
        yield
    finally:
        stage_1_and_2._flatten_dense_tensors, inside = copying, False


@torch.no_grad()
def _find_common_flat_tensor(tensors: Sequence[Tensor]) -> Tensor | None:
    """Returns the tensor (n,) in which the weights in `tensors` lie one after another from its beginning, followed by
    DeepSpeed's padding. `tensors` are first the weights and then the padding, which is copied to the end of the result.

    Returns None if the weights do not lie so, or if their memory has no room for the padding.
    """
    weights = [tensor for tensor in tensors if getattr(tensor, "lies_in_one", False)]
    padding = sum(tensor.numel() for tensor in tensors[len(weights) :])
    first, end = tensors[0], 0
    for tensor, weight in zip(tensors, weights):
        if tensor is not weight or tensor.storage_offset() != end or not tensor.is_contiguous():
            return None
        end += tensor.numel()
    if not weights or (end + padding) * first.element_size() > first.untyped_storage().nbytes():
        return None
    flat = first.detach().as_strided((end + padding,), (1,), 0)
    for tensor in tensors[len(weights) :]:
        flat[end : end + tensor.numel()] = tensor
        end += tensor.numel()
    return flat


def make_universal_checkpoint_entry() -> dict[str, Any]:
    """Returns the entry of a checkpoint that DeepSpeed's tool ds_to_universal requires: the version of the universal
    format.
    """
    from deepspeed.checkpoint import constants

    return {
        constants.UNIVERSAL_CHECKPOINT_INFO: {
            constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE
        }
    }


@contextmanager
def defer_write_errors(engines: Iterable[Any]) -> Iterator[None]:
    """Inside the block, the engines catch OSError and RuntimeError while they write the files of a checkpoint. At the
    end of the block the first of these errors is raised. So a rank with an error still takes part in the exchanges
    between ranks while the checkpoint is written.
    """
    # The ranks communicate between the files of a save_checkpoint: a rank that raised at once would leave the others
    # waiting.
    errors: list[OSError | RuntimeError] = []

    def call_and_keep_error(write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return write(*args, **kwargs)
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError
            errors.append(error)

    writers = [
        writer
        for engine in engines
        for writer in ((engine.checkpoint_engine, "save"), (engine, "_copy_recovery_script"))
    ]
    for owner, name in writers:
        setattr(owner, name, partial(call_and_keep_error, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name in writers:
            delattr(owner, name)  # uncovers the class's method
    if errors:
        raise errors[0]


def reset_cached_beta_powers(optimizer: Any, *_: Any) -> None:
    """Makes DeepSpeed's AdamW for the CPU compute the powers of its betas for the next step anew from the step's
    number, as it does after a resume. Otherwise it would multiply those of the last step by beta, which differs in the
    last bits.
    """
    # No checkpoint holds the powers, and products differ from std::pow in the last bits. An update of no elements, at a
    # step that no run reaches, resets them.
    nothing = torch.zeros(0)
    betas = optimizer.param_groups[0]["betas"]
    optimizer.ds_opt_adam.adam_update(optimizer.opt_id, 1 << 40, 0.0, *betas, 0.0, 0.0, True, *[nothing] * 4)


def patch_deepspeed_for_fake_tensors() -> None:
    """Makes DeepSpeed run on fake tensors, which have no values. From now on it compiles no operators, does not measure
    the CPU, and compares no values between ranks.
    """
    import cpuinfo
    import deepspeed
    from deepspeed.ops import adam
    from deepspeed.runtime.zero import partitioned_param_coordinator

    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda ints: None  # it compares values
    adam.DeepSpeedCPUAdam.step = _make_zero_moments
    cpuinfo.get_cpu_info = dict  # it measures the CPU for a second, and DeepSpeed asks for the vendor
    adam.cpu_adam.CPUAdamBuilder = lambda: SimpleNamespace(
        load=lambda: SimpleNamespace(
            **dict.fromkeys(("create_adam", "adam_update", "destroy_adam"), lambda *args: None)
        )
    )  # it would be compiled


@torch.no_grad()
def _make_zero_moments(optimizer: Any, closure: Callable | None = None) -> None:
    """Makes moments of zeros for each weight that has none, and updates no weight. It replaces the step of DeepSpeed's
    AdamW for the CPU (see `patch_deepspeed_for_fake_tensors`).
    """
    for members in optimizer.param_groups:
        for weight in members["params"]:
            state = optimizer.state[weight]
            if not state:
                state["step"] = 0
                state.update((moment, torch.zeros_like(weight.data, device="cpu")) for moment in members["moments"])


def call_before_gradient_reduction(engine: Any, prepare: Callable[[], None]) -> None:
    """Makes an engine call `prepare` each time before it reduces gradients."""
    reduce = engine.allreduce_gradients

    def prepare_and_reduce(*args: Any, **kwargs: Any) -> Any:
        prepare()
        return reduce(*args, **kwargs)

    engine.allreduce_gradients = prepare_and_reduce


def restore_gradient_reduction(engine: Any) -> None:
    """Restores an engine's own reduction of gradients, which `call_before_gradient_reduction` has replaced."""
    del engine.allreduce_gradients


def replace_optimizer_step(engine: Any, step: Callable[[], None] | None) -> None:
    """Replaces the step of an engine's ZeRO optimizer by the function `step`. None is for an engine with an optimizer
    of torch: it keeps its step, and only the engine's clipping of gradients is switched off.
    """
    if step is None:
        engine.clip_fp32_gradients = lambda: None
    else:
        engine.optimizer.step = step


class _DeviceWaitStream(torch.cuda.Stream):
    """A CUDA stream whose `synchronize` makes the current stream wait for it, and not the host. ZeRO-3 calls
    `synchronize` at the end of a backward pass, to wait for its reductions.
    """

    def synchronize(self) -> None:
        torch.cuda.current_stream().wait_stream(self)


def make_device_await_reductions(zero: Any, stage: int) -> None:
    """Makes the device, and no longer the host, wait for DeepSpeed's reductions of gradients at the end of each
    backward pass: later work on the device begins after the reductions. zero: DeepSpeed's ZeRO optimizer.
    """
    if stage == 3 and torch.cuda.is_available():
        zero.reduce_and_partition_stream = _DeviceWaitStream()
    elif stage < 3:
        zero.independent_gradient_partition_epilogue = partial(
            _end_backward_without_host_wait, zero, zero.independent_gradient_partition_epilogue
        )


def _end_backward_without_host_wait(zero: Any, epilogue: Callable[[], None]) -> None:
    """Ends a backward pass at stages 1 and 2. It replaces a method of DeepSpeed, which is passed as `epilogue`, and
    calls it. With overlap_comm, DeepSpeed's method makes the host wait for the whole device; here only later work on
    the device waits for the reductions of gradients.
    """
    zero.reduce_ipg_grads()
    if torch.cuda.is_available():
        torch.cuda.current_stream().wait_stream(zero.reduction_stream)
    zero._clear_previous_reduced_grads()
    zero.overlap_comm = False
    try:
        epilogue()
    finally:
        zero.overlap_comm = True


def skip_gradient_reduction(zero: Any) -> None:
    """Makes DeepSpeed leave the gradients in `weight.grad` at stages 1 and 2. It is for a run on a single rank, which
    has nothing to reduce. zero: DeepSpeed's ZeRO optimizer.
    """
    # This saves DeepSpeed's buckets, which copy all gradients, and 0.1 ms of the host for each weight.
    for hook in zero._grad_acc_hooks:
        hook.remove()
    zero._grad_acc_hooks.clear()
    zero.reduce_gradients = lambda **options: None  # stage 1
    zero.overlapping_partition_gradients_reduce_epilogue = lambda: None  # stage 2


def disable_loss_scale_updates(zero: Any) -> None:
    """Keeps DeepSpeed from changing a dynamic loss scale, since updates.py does this, and from raising an error when
    the scale is at its minimum. zero: DeepSpeed's ZeRO optimizer.
    """
    zero.loss_scaler.raise_error_at_min_scale = False
    zero._update_scale = lambda overflow: None
