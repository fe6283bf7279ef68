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

from dstrain.engine import prepare_environment

SEEN_ON = ("0.19.8",)
_ENGINE, _ZERO12, _ZERO3 = (
    "runtime/engine.py:DeepSpeedEngine",
    "runtime/zero/stage_1_and_2.py:DeepSpeedZeroOptimizer",
    "runtime/zero/stage3.py:DeepSpeedZeroOptimizer_Stage3",
)
# By function of this file: what it replaces, or works on, as FILE:NAME in DeepSpeed; torch.NAME in torch.
REPLACED = {
    "import_deepspeed": ("runtime/compiler.py:compile",),
    "replace_current_stream": ("accelerator/cuda_accelerator.py:CUDA_Accelerator.current_stream",),
    "set_group_timeout": ("torch.distributed.distributed_c10d.default_pg_timeout",),
    "forget_groups_at_end": ("comm/comm.py:init_distributed", "utils/groups.py:_clone_world_group"),
    "replace_linear_of_zero3": (
        "runtime/zero/linear.py:LinearFunctionForZeroStage3",
        "runtime/zero/utils.py:is_zero_param",
    ),
    "flatten_in_place": (f"{_ZERO12}.flatten_dense_tensors_aligned",),
    "make_universal_info": ("checkpoint/ds_to_universal.py:_check_for_required_state",),
    "defer_errors": (f"{_ENGINE}._copy_recovery_script",),
    "forget_beta_powers": ("ops/adam/cpu_adam.py:DeepSpeedCPUAdam.step",),
    "prepare_for_fake_tensors": (
        "ops/adam/cpu_adam.py:DeepSpeedCPUAdam.step",
        "runtime/zero/utils.py:assert_ints_same_as_other_ranks",
    ),
    "call_before_reduction": (f"{_ENGINE}.allreduce_gradients",),
    "restore_reduction": (f"{_ENGINE}.allreduce_gradients",),
    "replace_step": (f"{_ENGINE}.clip_fp32_gradients", f"{_ZERO12}.step", f"{_ZERO3}.step"),
    "await_reductions_on_device": (
        f"{_ZERO12}.independent_gradient_partition_epilogue",
        f"{_ZERO12}.reduce_ipg_grads",
        f"{_ZERO3}.independent_gradient_partition_epilogue",
    ),
    "skip_reduction": (
        f"{_ZERO12}.reduce_gradients",
        f"{_ZERO12}.overlapping_partition_gradients_reduce_epilogue",
    ),
    "disable_scale_updates": (f"{_ZERO12}._update_scale", "runtime/fp16/loss_scaler.py:DynamicLossScaler.update_scale"),
}


def import_deepspeed() -> ModuleType:
    """Imports DeepSpeed with all that its engines need, and returns it. Torch's compiler, whose import takes 1.2 s, is
    not imported. Sets the environment variables first (prepare_environment). Drops DeepSpeed's warning of untested
    optimizers.

    DeepSpeed decorates its own Muon with torch.compile, and imports that class only to recognize it as an optimizer;
    dstrain has another Muon (optimizers.py). A release of DeepSpeed without that module is imported as it is.
    """
    prepare_environment()
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
    """Returns False for DeepSpeed's warning that an optimizer is untested, since dstrain's are tested at every stage of
    ZeRO; True for all other log records.
    """
    return "untested" not in record.getMessage()


def replace_current_stream(index: int) -> None:
    """Makes DeepSpeed ask torch for the current stream of GPU `index`. Otherwise it would first look up which GPU is
    current, some thousand times a step, which doubles the time.
    """
    import deepspeed

    deepspeed.get_accelerator().current_stream = lambda device=index: torch.cuda.current_stream(device)


def set_group_timeout(timeout: timedelta) -> None:
    """Sets the timeout of all process groups that are made from now on. A timeout given to the first group alone would
    not apply to those that DeepSpeed and dstrain make later.
    """
    groups = torch.distributed.distributed_c10d
    groups.default_pg_timeout = groups.default_pg_nccl_timeout = timeout


@contextmanager
def forget_groups_at_end() -> Iterator[None]:
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
    partitioned by `_is_partitioned`, in the whole process.
    """
    from deepspeed.runtime.zero import linear

    linear.is_zero_param = _is_partitioned
    linear.LinearFunctionForZeroStage3.forward = staticmethod(_apply_linear)


def _apply_linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns values @ weight.T + bias, by one operation of torch. It is the forward pass of ZeRO-3's linear layer in
    place of DeepSpeed's, which adds the bias in place to the product.

    recompute=attention keeps the product: when it is used again, it would contain the bias twice. And in a compiled
    block torch 2.11 silently loses the gradient of what an autograd function has changed in place: it would be 0 for
    the layer and for all before it (github.com/pytorch/pytorch/issues/180642).
    """
    return torch.ops.aten.linear(values, weight, bias)


def _is_partitioned(weight: Tensor) -> bool:
    """Returns whether ZeRO-3 manages a weight, whose values must then be gathered for the backward pass. Always returns
    False in compiled blocks: their weights are gathered, and under torch 2.11 the check would compile each block anew.
    """
    return not torch.compiler.is_compiling() and hasattr(weight, "ds_id")


@contextmanager
def flatten_in_place() -> Iterator[None]:
    """Inside the block, DeepSpeed's stages 1 and 2 make no copy of the weights of a parameter group if these lie one
    after another in one tensor (initial.py): it uses that tensor.
    """
    from deepspeed.runtime.zero import stage_1_and_2

    copying, inside = stage_1_and_2._flatten_dense_tensors, True

    def flatten(tensors: Sequence[Tensor]) -> Tensor:
        flat = _find_common_flat(tensors) if inside else None  # the optimizer keeps this function for gradients
        return copying(tensors) if flat is None else flat

    stage_1_and_2._flatten_dense_tensors = flatten
    try:
        yield
    finally:
        stage_1_and_2._flatten_dense_tensors, inside = copying, False


@torch.no_grad()
def _find_common_flat(tensors: Sequence[Tensor]) -> Tensor | None:
    """Returns the flat tensor (n,) in which the weights among `tensors` lie one after another from its beginning, as
    initial.py's `_allocate_in_one_tensor` places them. Copies the tensors that follow the weights, DeepSpeed's padding,
    into its end. Returns None if the weights do not lie so, or if there is no room for the padding.
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


def make_universal_info() -> dict[str, Any]:
    """Returns the entry that a checkpoint of DeepSpeed must contain for its tool ds_to_universal: the version of the
    universal format. The tool needs no more, since ZeRO alone splits the weights.
    """
    from deepspeed.checkpoint import constants

    return {
        constants.UNIVERSAL_CHECKPOINT_INFO: {
            constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE
        }
    }


@contextmanager
def defer_errors(engines: Iterable[Any]) -> Iterator[None]:
    """Inside the block, the engines catch OSError and RuntimeError while they write the files of a checkpoint. The end
    of the block raises the first of these errors.

    The ranks communicate between the files of a save_checkpoint: a rank that raised at once would leave the others
    waiting.
    """
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


def forget_beta_powers(optimizer: Any, *_: Any) -> None:
    """Makes DeepSpeed's AdamW for the CPU compute the powers of beta for the next step from the number of the step, as
    it does after a resume.

    In consecutive steps its C++ multiplies the powers of the last step, which no checkpoint holds, by beta, and the
    result differs in the last bits from std::pow. An update of no elements, at a step that no run reaches, resets them.
    """
    nothing = torch.zeros(0)
    betas = optimizer.param_groups[0]["betas"]
    optimizer.ds_opt_adam.adam_update(optimizer.opt_id, 1 << 40, 0.0, *betas, 0.0, 0.0, True, *[nothing] * 4)


def prepare_for_fake_tensors() -> None:
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
    """Makes moments of zeros for each weight that has none, and updates no weight. It takes the place of the step of
    DeepSpeed's AdamW for the CPU.
    """
    for members in optimizer.param_groups:
        for weight in members["params"]:
            state = optimizer.state[weight]
            if not state:
                state["step"] = 0
                state.update((moment, torch.zeros_like(weight.data, device="cpu")) for moment in members["moments"])


def call_before_reduction(engine: Any, prepare: Callable[[], None]) -> None:
    """Makes an engine call `prepare` each time before it reduces gradients."""
    reduce = engine.allreduce_gradients

    def reduce_prepared(*args: Any, **kwargs: Any) -> Any:
        prepare()
        return reduce(*args, **kwargs)

    engine.allreduce_gradients = reduce_prepared


def restore_reduction(engine: Any) -> None:
    """Restores an engine's own reduction of gradients, which `call_before_reduction` has replaced."""
    del engine.allreduce_gradients


def replace_step(engine: Any, step: Callable[[], None] | None) -> None:
    """Replaces the step of an engine's ZeRO optimizer by `step`. If `step` is None, the engine's optimizer is torch's
    own and keeps its step; only the engine's clipping of gradients is switched off.
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


def await_reductions_on_device(zero: Any, stage: int) -> None:
    """From now on, later work on the device waits for DeepSpeed's reductions at the end of each backward pass, and the
    host no longer does. zero: DeepSpeed's ZeRO optimizer.
    """
    if stage == 3 and torch.cuda.is_available():
        zero.reduce_and_partition_stream = _DeviceWaitStream()
    elif stage < 3:
        zero.independent_gradient_partition_epilogue = partial(
            _end_backward, zero, zero.independent_gradient_partition_epilogue
        )


def _end_backward(zero: Any, epilogue: Callable[[], None]) -> None:
    """Ends a backward pass at stages 1 and 2 in place of DeepSpeed's method, which is `epilogue`. With overlap_comm,
    that method makes the host wait for the whole device; this function makes later work on the device wait for the
    reductions.
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


def skip_reduction(zero: Any) -> None:
    """Makes DeepSpeed leave the gradients in `weight.grad` at stages 1 and 2, for a run on a single rank. This saves
    DeepSpeed's buckets, which copy all gradients, and 0.1 ms of the host for each weight. zero: DeepSpeed's ZeRO
    optimizer.
    """
    for hook in zero._grad_acc_hooks:
        hook.remove()
    zero._grad_acc_hooks.clear()
    zero.reduce_gradients = lambda **options: None  # stage 1
    zero.overlapping_partition_gradients_reduce_epilogue = lambda: None  # stage 2


def disable_scale_updates(zero: Any) -> None:
    """Keeps DeepSpeed from changing a dynamic loss scale, since updates.py changes it. Also keeps DeepSpeed from
    raising an error when the scale is at its minimum, since recovery.py counts the skipped steps.
    """
    zero.loss_scaler.raise_error_at_min_scale = False
    zero._update_scale = lambda overflow: None
