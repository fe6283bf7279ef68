"""Makes this process rank 0 of any number of ranks, of which the others do not exist, with tensors that hold no values.

DeepSpeed runs unchanged. Its collectives run in torch's fake process group, which returns at once and changes nothing.
Its tensors are torch's fake ones, with shapes, types and devices: networks of any size take no memory. Where code reads
a value, it gets zero, and where it selects elements by their values, none.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

from dstrain.distributed import group
from dstrain.engine.engines import Engines
from dstrain.engine.initial import Networks, Values, place_weights_on_meta
from dstrain.engine.patches import forget_process_groups_at_end, import_deepspeed, patch_deepspeed_for_fake_tensors


@contextmanager
def use_fake_ranks_and_tensors(world: int) -> Iterator[None]:
    """Inside the block, this process is rank 0 of `world` ranks and its tensors are fake. Another block with another
    `world` may follow. The environment variables of rank and world size, and the changes to DeepSpeed for fake tensors,
    stay after the block.
    """
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    deepspeed = import_deepspeed()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    patch_deepspeed_for_fake_tensors()
    asked = torch.cuda.is_available
    found = asked()
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    with forget_process_groups_at_end():
        try:
            # Fake tensors ask at each operation, and each answer loads a library.
            torch.cuda.is_available = lambda: found
            deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False, verbose=False)
            with FakeTensorMode(allow_non_fake_inputs=True), _Views(), _Zeros():
                yield
        finally:
            dist.destroy_process_group()
            torch.cuda.is_available = asked
            group.clear_group_caches()


class _Zeros(TorchDispatchMode):
    """Inside the block, returns zero where a value of a fake tensor is read, and an empty tensor where elements are
    selected by a mask.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return _make_zero_of_dtype(args[0])
        if func is aten.nonzero.default and isinstance(args[0], FakeTensor):
            return torch.empty((0, args[0].ndim), dtype=torch.int64, device=args[0].device)
        if func is aten._unique2.default and isinstance(args[0], FakeTensor):  # of none, where they are selected
            return tuple(
                torch.empty(0, dtype=dtype, device=args[0].device)
                for dtype in (args[0].dtype, torch.int64, torch.int64)
            )
        if func is aten.index.Tensor and isinstance(args[1][0], FakeTensor) and args[1][0].dtype == torch.bool:
            return args[0].new_empty((0, *args[0].shape[args[1][0].ndim :]))
        return func(*args, **(kwargs or {}))


class _Views(TorchDispatchMode):
    """Inside the block, makes views of fake tensors as torch makes views of real ones. Most operations of a step are
    views, and torch's own way for fake tensors takes up to forty times as long: it derives each new shape and offset in
    Python.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _VIEWS and isinstance(args[0], FakeTensor) and args[0].constant is None:
            mode = args[0].fake_mode
            with in_kernel_invocation_manager(mode):
                return FakeTensor(mode, func(*args, **(kwargs or {})), args[0].fake_device)
        return func(*args, **(kwargs or {}))


_aten = torch.ops.aten
_VIEWS = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.view.dtype,
        _aten.slice.Tensor,
        _aten.select.int,
        _aten.detach.default,
        _aten.alias.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
        _aten.expand.default,
        _aten.as_strided.default,
    }
)


def _make_zero_of_dtype(tensor: torch.Tensor) -> bool | int | float:
    return False if tensor.dtype == torch.bool else 0.0 if tensor.dtype.is_floating_point else 0


class FakeEngines(Engines):
    """Engines whose networks have neither values nor memory before DeepSpeed gets them. They draw no weights."""

    def _build_networks(self, networks: Networks, seed: int) -> dict[str, tuple[nn.Module, Values]]:
        with unset_fake_temporarily(), place_weights_on_meta():
            built = networks()
        for network in built.values():
            for module in network.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=group.device())
            # All lies where it belongs. torch cannot move fake weights that something else holds, too.
            network._apply = lambda function, recurse=True, network=network: network
        return {part: (network, lambda names=(): iter(())) for part, network in built.items()}
