"""Inception v3 as FID needs it (Szegedy et al. 2015; Heusel et al. 2017).

The weights of pytorch-fid and torch-fidelity were converted from the TensorFlow graph of 2015-12-05. It differs from
torchvision's network: average pools do not count the padding, the last block pools by maximum, and there are 1008
classes.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from dstrain.encoders.autoencoder import hash_network
from dstrain.encoders.precision import use_precision
from dstrain.metrics.network import Features, convert_to_rgb
from dstrain.recipe import ConfigError

SIDE = 299  # pixels of what the network sees
_SPATIAL = "Mixed_6d"  # ADM's mixed_6: the block whose first branch sFID compares
_SPATIAL_CHANNELS = 7  # that enter sFID, as in ADM's evaluator

# Blocks: convolutions by name as (input, channels, kernel[, stride]). An input is x, the pooled x, or another
# convolution. What no convolution takes as its input is the output, in this order.
Convolutions = dict[str, tuple]


def _list_block_a_convolutions(pooled: int) -> Convolutions:
    """Returns the convolutions, by name, of one of Inception's blocks Mixed_5b to Mixed_5d. pooled: output channels of
    the branch with the pool.
    """
    return {
        "branch1x1": ("x", 64, 1),
        "branch5x5_1": ("x", 48, 1),
        "branch5x5_2": ("branch5x5_1", 64, 5),
        "branch3x3dbl_1": ("x", 64, 1),
        "branch3x3dbl_2": ("branch3x3dbl_1", 96, 3),
        "branch3x3dbl_3": ("branch3x3dbl_2", 96, 3),
        "branch_pool": ("pool", pooled, 1),
    }


def _list_block_c_convolutions(width: int) -> Convolutions:
    """Returns the convolutions, by name, of one of Inception's blocks Mixed_6b to Mixed_6e. width: channels between the
    7 x 7 convolutions.
    """
    return {
        "branch1x1": ("x", 192, 1),
        "branch7x7_1": ("x", width, 1),
        "branch7x7_2": ("branch7x7_1", width, (1, 7)),
        "branch7x7_3": ("branch7x7_2", 192, (7, 1)),
        "branch7x7dbl_1": ("x", width, 1),
        "branch7x7dbl_2": ("branch7x7dbl_1", width, (7, 1)),
        "branch7x7dbl_3": ("branch7x7dbl_2", width, (1, 7)),
        "branch7x7dbl_4": ("branch7x7dbl_3", width, (7, 1)),
        "branch7x7dbl_5": ("branch7x7dbl_4", 192, (1, 7)),
        "branch_pool": ("pool", 192, 1),
    }


def _define_blocks() -> dict[str, tuple[str, Convolutions]]:
    """Returns {block: (pool, convolutions)} of Inception, in the network's order. The pools "mean" and "max" have
    stride 1 and keep the size; "halved" is the maximum with stride 2.
    """
    e = {
        "branch1x1": ("x", 320, 1),
        "branch3x3_1": ("x", 384, 1),
        "branch3x3_2a": ("branch3x3_1", 384, (1, 3)),
        "branch3x3_2b": ("branch3x3_1", 384, (3, 1)),
        "branch3x3dbl_1": ("x", 448, 1),
        "branch3x3dbl_2": ("branch3x3dbl_1", 384, 3),
        "branch3x3dbl_3a": ("branch3x3dbl_2", 384, (1, 3)),
        "branch3x3dbl_3b": ("branch3x3dbl_2", 384, (3, 1)),
        "branch_pool": ("pool", 192, 1),
    }
    b = {
        "branch3x3": ("x", 384, 3, 2),
        "branch3x3dbl_1": ("x", 64, 1),
        "branch3x3dbl_2": ("branch3x3dbl_1", 96, 3),
        "branch3x3dbl_3": ("branch3x3dbl_2", 96, 3, 2),
    }
    d = {
        "branch3x3_1": ("x", 192, 1),
        "branch3x3_2": ("branch3x3_1", 320, 3, 2),
        "branch7x7x3_1": ("x", 192, 1),
        "branch7x7x3_2": ("branch7x7x3_1", 192, (1, 7)),
        "branch7x7x3_3": ("branch7x7x3_2", 192, (7, 1)),
        "branch7x7x3_4": ("branch7x7x3_3", 192, 3, 2),
    }
    return {
        "Mixed_5b": ("mean", _list_block_a_convolutions(32)),
        "Mixed_5c": ("mean", _list_block_a_convolutions(64)),
        "Mixed_5d": ("mean", _list_block_a_convolutions(64)),
        "Mixed_6a": ("halved", b),
        "Mixed_6b": ("mean", _list_block_c_convolutions(128)),
        "Mixed_6c": ("mean", _list_block_c_convolutions(160)),
        "Mixed_6d": ("mean", _list_block_c_convolutions(160)),
        "Mixed_6e": ("mean", _list_block_c_convolutions(192)),
        "Mixed_7a": ("halved", d),
        "Mixed_7b": ("mean", e),
        "Mixed_7c": ("max", e),
    }


class Convolution(nn.Module):
    """A convolution without bias, then batch norm and ReLU. `padded`: with padding for stride 1 that keeps the size."""

    def __init__(
        self, before: int, after: int, kernel: int | tuple[int, int], stride: int = 1, padded: bool = True
    ) -> None:
        super().__init__()
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2) if padded else 0
        self.conv = nn.Conv2d(before, after, (height, width), stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(after, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        """Returns ReLU of the normalized convolution of x (N, C, h, w)."""
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Block(nn.Module):
    """One block of `_define_blocks`: (N, before, h, w) -> (N, width, h, w), half the size if `pool` is halved."""

    def __init__(self, before: int, pool: str, convolutions: Convolutions) -> None:
        super().__init__()
        self.pool = pool
        self.inputs = {name: spec[0] for name, spec in convolutions.items()}
        widths = {"x": before, "pool": before} | {name: spec[1] for name, spec in convolutions.items()}
        for name, (source, after, kernel, *stride) in convolutions.items():
            self.add_module(name, Convolution(widths[source], after, kernel, *stride, padded=not stride))
        self.outputs = [name for name in (*convolutions, "pool") if name not in self.inputs.values()]
        self.width = sum(widths[name] for name in self.outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs of the block's branches for x (N, C, h, w), joined along the channels."""
        if self.pool == "mean":
            pooled = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
        else:
            pooled = F.max_pool2d(x, 3, 2) if self.pool == "halved" else F.max_pool2d(x, 3, 1, 1)
        values = {"x": x, "pool": pooled}
        for name, source in self.inputs.items():
            values[name] = getattr(self, name)(values[source])
        return torch.cat([values[name] for name in self.outputs], 1)


class Inception(nn.Module):
    """Turns float32 (N, 3, 299, 299) in [-1, 1] into features (N, 2048); the weights are named as torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Convolution(3, 32, 3, 2, padded=False)
        self.Conv2d_2a_3x3 = Convolution(32, 32, 3, padded=False)
        self.Conv2d_2b_3x3 = Convolution(32, 64, 3)
        self.Conv2d_3b_1x1 = Convolution(64, 80, 1)
        self.Conv2d_4a_3x3 = Convolution(80, 192, 3, padded=False)
        width, self.blocks = 192, list(_define_blocks())
        for name, (pool, convolutions) in _define_blocks().items():
            self.add_module(name, Block(width, pool, convolutions))
            width = getattr(self, name).width
        self.fc = nn.Linear(width, 1008)

    def forward(self, x: Tensor, until: str | None = None) -> Tensor:
        """Returns the features (N, 2048) of the last pool. If `until` names a block, returns the input (N, C, h, w) of
        this block instead.
        """
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(F.max_pool2d(x, 3, 2)))
        x = F.max_pool2d(x, 3, 2)
        for name in self.blocks:
            if name == until:
                return x
            x = getattr(self, name)(x)
        return x.mean((2, 3))


def resize_as_tensorflow(images: Tensor) -> Tensor:
    """Resizes images float32 (N, C, h, w) to 299 x 299 as TensorFlow 1 does: bilinear, without antialiasing. Pixel i of
    the result is read at i * size / 299 of the image.
    """
    for axis in (-1, -2):
        size = images.shape[axis]
        place = torch.arange(SIDE, dtype=torch.float32, device=images.device) * (size / SIDE)
        low = place.long()
        share = (place - low).view((-1,) if axis == -1 else (-1, 1))
        first, second = (images.index_select(axis, index) for index in (low, (low + 1).clamp(max=size - 1)))
        images = first + (second - first) * share
    return images


def resize_as_pytorch_fid(images: Tensor) -> Tensor:
    """Resizes images float32 (N, C, h, w) to 299 x 299 by torch's bilinear interpolation without antialiasing
    (align_corners False).
    """
    return F.interpolate(images, (SIDE, SIDE), mode="bilinear", align_corners=False)


def resize_as_clean_fid(images: Tensor) -> Tensor:
    """Resizes images float32 (N, C, h, w) to 299 x 299 by Pillow's antialiased bicubic filter in floats, and clamps
    them to [0, 255] (Parmar 2022). Runs on the CPU; returns the result on the device of `images`.
    """
    planes = images.flatten(0, 1).cpu().numpy()
    resized = [np.asarray(Image.fromarray(plane).resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for plane in planes]
    values = torch.from_numpy(np.stack(resized)).clamp(0, 255)
    return values.view(*images.shape[:2], SIDE, SIDE).to(images.device)


# Resize filter, and the value that becomes 0; 0 becomes -1.
KINDS = {
    "inception": (resize_as_tensorflow, 128.0),
    "pytorch-fid": (resize_as_pytorch_fid, 127.5),
    "clean-fid": (resize_as_clean_fid, 128.0),
}


class InceptionFeatures(Features):
    """Computes the features of Inception's last pool (N, 2048), and the logits (N, 1008) without the bias, as the
    Inception Score needs them.
    """

    size = 2048

    def __init__(self, kind: str, network: Inception, digest: str) -> None:
        self.name, self.fingerprint, self._network = kind, digest, network
        self._resize, self._middle = KINDS[kind]
        self.spatial = InceptionSpatial(self)

    def prepare_images(self, images: Tensor) -> Tensor:
        """Converts images uint8 (N, C, h, w) to the network's input, float32 (N, 3, 299, 299) in about [-1, 1]."""
        images = convert_to_rgb(images).to(self._network.fc.weight.device).float()
        return self._resize(images) / self._middle - 1

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with use_precision("fp32"):
            features = self._network(self.prepare_images(images))
            return features, features @ self._network.fc.weight.T


class InceptionSpatial(Features):
    """Computes the features for sFID (Nash et al. 2021): seven maps of 17 x 17 from the middle of Inception, as ADM."""

    name, size = "inception-spatial", 17 * 17 * _SPATIAL_CHANNELS

    def __init__(self, whole: InceptionFeatures) -> None:
        self._whole, self.fingerprint = whole, whole.fingerprint

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, None]:
        network = self._whole._network
        with use_precision("fp32"):
            maps = getattr(network, _SPATIAL).branch1x1(network(self._whole.prepare_images(images), until=_SPATIAL))
        return maps[:, :_SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1), None  # TensorFlow's order: channels last


def open_inception(kind: str, path: Path, device: torch.device) -> InceptionFeatures:
    """Opens a file with Inception's weights. kind: a key of KINDS, which decides how images are resized. Raises
    ConfigError if the file cannot be read or does not hold the weights of this network.
    """
    network = Inception()
    try:
        network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # a damaged file may raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ConfigError(
            f"--features {kind}:{path}: these are no weights of FID's Inception ({reason}); give "
            "pt_inception-2015-12-05-6726825d.pth, or a TorchScript file as torchscript:FILE"
        ) from None
    digest = hash_network({"kind": kind}, network.state_dict())
    return InceptionFeatures(kind, network.eval().requires_grad_(False).to(device), digest)
