"""What dstrain changes in DeepSpeed and torch while they run, each change as it was seen on DeepSpeed 0.19.8.

A newer version must be tried with each: tests/engine/test_patches.py fails where the code that is changed, or that a
change relies on, has become another. These files read DeepSpeed's internals beside this one:

    masters.py        where the fp32 weights lie, and how they get into the weights that a network computes with
    updates.py        takes the place of an engine's step, of the end of a backward pass and of hooks of gradients
    initial.py        what zero.Init asks of a module
    schema.py         the classes that parse its settings
    planning/         the groups that it has made; its buffers

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


def import_deepspeed() -> ModuleType:
    """Imports DeepSpeed, with all that its engines import, but for torch's compiler: 1.2 s of every start.

    DeepSpeed decorates its own Muon with torch.compile, and imports it to ask whether an optimizer is one. dstrain's is
    another, see optimizers.py. A DeepSpeed without that module goes its own way. The environment that it reads is
    prepared.
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
    deepspeed.utils.logger.addFilter(_is_news)
    return deepspeed


def _is_news(record: logging.LogRecord) -> bool:
    """Keeps DeepSpeed's warning of any optimizer but its own out of the log: ours are tested at every stage of ZeRO."""
    return "untested" not in record.getMessage()


def remember_device(index: int) -> None:
    """Has DeepSpeed find the current stream of this rank's GPU alone: it asks some thousand times a step, and to find
    the current device takes as long as to find its stream.
    """
    import deepspeed

    deepspeed.get_accelerator().current_stream = lambda device=index: torch.cuda.current_stream(device)


def set_timeout(timeout: timedelta) -> None:
    """Sets the timeout of all process groups: one that is given to the first alone does not hold for those that
    DeepSpeed and we make later.
    """
    groups = torch.distributed.distributed_c10d
    groups.default_pg_timeout = groups.default_pg_nccl_timeout = timeout


def replace_linear() -> None:
    """Replaces the forward pass of ZeRO-3's linear layer, and its question for weights that are away."""
    from deepspeed.runtime.zero import linear

    linear.is_zero_param = _may_be_away
    linear.LinearFunctionForZeroStage3.forward = staticmethod(_linear)


def _linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """For ZeRO-3's linear layer, which takes the place of torch's in the whole process. Its own adds the bias in place
    to the product. recompute=attention keeps that: when it is used again, the bias would be in it twice. And in a
    compiled block torch 2.11 silently loses the gradient of what an autograd function has changed in place: it would
    be 0 for the layer and for all before it (github.com/pytorch/pytorch/issues/180642).
    """
    return torch.ops.aten.linear(values, weight, bias)


def _may_be_away(weight: Tensor) -> bool:
    """Tells the backward pass of ZeRO-3's linear layer whether to gather a weight. In compiled blocks all
    are: to ask for their numbers nevertheless would compile each block anew under torch 2.11.
    """
    return not torch.compiler.is_compiling() and hasattr(weight, "ds_id")


@contextmanager
def flatten_in_place() -> Iterator[None]:
    """Has DeepSpeed's stages 1 and 2 take the weights of a group inside as they lie, where they lie in one tensor."""
    from deepspeed.runtime.zero import stage_1_and_2

    copying, inside = stage_1_and_2._flatten_dense_tensors, True

    def flatten(tensors: Sequence[Tensor]) -> Tensor:
        flat = _find_flat(tensors) if inside else None  # the optimizer keeps this function for gradients
        return copying(tensors) if flat is None else flat

    stage_1_and_2._flatten_dense_tensors = flatten
    try:
        yield
    finally:
        stage_1_and_2._flatten_dense_tensors, inside = copying, False


@torch.no_grad()
def _find_flat(tensors: Sequence[Tensor]) -> Tensor | None:
    """Returns the tensor that weights of `_pack_weights` fill from its beginning, with padding behind them; None if
    they do not.
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
    """Returns an entry for DeepSpeed's own checkpoints, from which its tool ds_to_universal sees how weights are
    split.
    """
    from deepspeed.checkpoint import constants

    return {
        constants.UNIVERSAL_CHECKPOINT_INFO: {
            constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE
        }
    }


@contextmanager
def defer_errors(engines: Iterable[Any]) -> Iterator[None]:
    """Keeps back the errors of files that DeepSpeed cannot write, and raises the first at the end.

    The ranks communicate between the files of a save_checkpoint: a rank that left there would leave them waiting.
    """
    errors: list[OSError | RuntimeError] = []

    def attempt(write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
        setattr(owner, name, partial(attempt, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name in writers:
            delattr(owner, name)  # uncovers the class's method
    if errors:
        raise errors[0]


def forget_powers(optimizer: Any, *_: Any) -> None:
    """Has DeepSpeed's AdamW for the CPU compute its powers of beta from the number of the step, as a resumed run does.

    Where one step follows another, its C++ multiplies the powers of the last step, which no checkpoint holds, by beta:
    other bits than std::pow gives. An update of no elements, at a step that no run reaches, ends that chain.
    """
    nothing = torch.zeros(0)
    betas = optimizer.param_groups[0]["betas"]
    optimizer.ds_opt_adam.adam_update(optimizer.opt_id, 1 << 40, 0.0, *betas, 0.0, 0.0, True, *[nothing] * 4)


def pretend_operators() -> None:
    """Has DeepSpeed run on tensors without values: it compiles and measures nothing, and compares no values."""
    import cpuinfo
    import deepspeed
    from deepspeed.ops import adam
    from deepspeed.runtime.zero import partitioned_param_coordinator

    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda ints: None  # it compares values
    adam.DeepSpeedCPUAdam.step = _first_step
    cpuinfo.get_cpu_info = dict  # it measures the CPU for a second, and DeepSpeed asks for the vendor
    adam.cpu_adam.CPUAdamBuilder = lambda: SimpleNamespace(
        load=lambda: SimpleNamespace(
            **dict.fromkeys(("create_adam", "adam_update", "destroy_adam"), lambda *args: None)
        )
    )  # it would be compiled


@torch.no_grad()
def _first_step(optimizer: Any, closure: Callable | None = None) -> None:
    """Stands in for the step of DeepSpeed's AdamW on the host: makes the moments, as that does, and computes
    nothing.
    """
    for members in optimizer.param_groups:
        for weight in members["params"]:
            state = optimizer.state[weight]
            if not state:
                state["step"] = 0
                state.update((moment, torch.zeros_like(weight.data, device="cpu")) for moment in members["moments"])
