"""Golden files: outputs of the original implementations, and weights filled from their own names."""

import json
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

FOLDER = Path(__file__).resolve().parents[1] / "golden"


def load(name: str) -> tuple[dict[str, Tensor], dict]:
    """Tensors and metadata of golden/NAME.safetensors."""
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["meta"])


def stream(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal values that are a function of the name."""
    state = np.random.RandomState(zlib.crc32(name.encode()))
    return torch.from_numpy(np.asarray(state.standard_normal(tuple(shape)))).to(dtype)


@torch.no_grad()
def fill(network: nn.Module, keep: tuple[str, ...] = ()) -> nn.Module:
    """Fills every floating-point entry of the state from its name, except those in `keep`."""
    for name, tensor in network.state_dict().items():
        if name in keep or not tensor.is_floating_point():
            continue
        values = stream(name, tuple(tensor.shape))
        if tensor.ndim >= 2:
            values = values / np.sqrt(np.prod(tensor.shape[1:]))
        else:
            values = 0.1 * values + float(name.endswith(("weight", ".g")))
        tensor.copy_(values.to(tensor.dtype))
    return network
