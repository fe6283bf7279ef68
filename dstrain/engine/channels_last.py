"""Images as NHWC, the layout in which a GPU's convolutions are fastest (recipe: channels_last)."""

import torch
from torch import Tensor, nn


def use_channels_last(network: nn.Module) -> None:
    """Has a network receive its images, inputs (B, C, H, W), as NHWC. The layers that follow keep the layout.

    The weights keep theirs: they lie in ZeRO's flat buffers, which know one layout only.
    """
    network.register_forward_pre_hook(
        lambda _, inputs: tuple(_nhwc(x) if torch.is_tensor(x) and x.ndim == 4 else x for x in inputs)
    )


def _nhwc(x: Tensor) -> Tensor:
    if x.shape[1] != 1:
        return x.contiguous(memory_format=torch.channels_last)
    # With one channel both layouts are the same bytes, and torch keeps the strides of NCHW: set those of NHWC.
    x, (_, _, height, width) = x.contiguous(), x.shape
    return x.as_strided(x.shape, (height * width, 1, width, 1))
