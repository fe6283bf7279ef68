"""Initial weights that are a function of (seed, name) alone.

Every module that owns weights sets them in `reset_parameters`. We call that once for each module, on fresh float32
tensors on the CPU and under a seed of its own, and hand out the values by name. So the weights do not depend on the
order of construction, the stage, the precision or the number of ranks, and the fp32 masters start from the full float32
values even where the network itself was built in bf16 or in pieces (DeepSpeed's masters would start from the rounded
ones).
"""

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


def initial_weights(network: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yields (state-dict name, float32 value) of every parameter and floating buffer whose module resets itself.

    The network is left as it was. It may be partitioned by ZeRO-3: only the full shapes of its parameters are read.
    """
    for prefix, module in network.named_modules():
        if resets(module):
            for name, value in _reset(module, seed ^ zlib.crc32(prefix.encode())).items():
                yield (f"{prefix}.{name}" if prefix else name), value


def resets(module: nn.Module) -> bool:
    """Whether a module owns weights or buffers and can set them again."""
    return bool(_own(module)) and callable(getattr(module, "reset_parameters", None))


def constructed_weights(network: nn.Module) -> dict[str, Tensor]:
    """Copies of what `initial_weights` does not give: weights and buffers as the constructors left them, by name."""
    values = {}
    for prefix, module in network.named_modules():
        if not resets(module):
            for name, tensor in _own(module).items():
                values[f"{prefix}.{name}" if prefix else name] = tensor.detach().clone()
    return values


def full_shape(tensor: Tensor) -> torch.Size:
    """The shape that ZeRO-3 remembers of a partitioned parameter, or the tensor's own."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


def _own(module: nn.Module) -> dict[str, Tensor]:
    tensors = {**dict(module._parameters.items()), **module._buffers}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@torch.no_grad()
def _reset(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Values that the module's `reset_parameters` gives its own weights under a seed."""
    kept = dict(module._parameters.items()), dict(module._buffers)
    fresh: dict[str, Tensor] = {}
    try:
        for tensors in (module._parameters, module._buffers):
            for name, old in list(tensors.items()):
                if old is None:
                    continue
                dtype = torch.float32 if old.is_floating_point() else old.dtype
                new = torch.zeros(full_shape(old), dtype=dtype)
                fresh[name] = tensors[name] = nn.Parameter(new) if isinstance(old, nn.Parameter) else new
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module.reset_parameters()
        # Buffers may have been replaced rather than filled.
        return {name: (module._parameters.get(name, module._buffers.get(name))).detach() for name in fresh}
    finally:
        for tensors, olds in zip((module._parameters, module._buffers), kept):
            for name, old in olds.items():
                tensors[name] = old
