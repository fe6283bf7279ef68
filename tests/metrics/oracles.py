"""Networks and images for tests of metrics; Inception is seeded, since the published weights cannot be had here."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dstrain.metrics import images, table
from dstrain.metrics.inception import Inception
from dstrain.metrics.network import Features


def seeded_inception(path: Path) -> Path:
    """Writes weights whose features neither vanish nor grow, with batch norms that are not the identity."""
    random = torch.Generator().manual_seed(0)
    network = Inception()
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, generator=random)
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1, generator=random)
            module.running_var.uniform_(0.5, 1.5, generator=random)
            module.bias.data.normal_(0, 0.1, generator=random)
    nn.init.normal_(network.fc.weight, std=0.01, generator=random)
    torch.save(network.state_dict(), path)
    return path


def noise(count: int, height: int = 40, width: int = 64, channels: int = 3) -> Tensor:
    """Images uint8 (count, channels, height, width)."""
    return torch.randint(
        0, 256, (count, channels, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(count)
    )


class Detector(nn.Module):
    """Means over a grid of 4 x 4 and their squares: what a TorchScript detector is called like, with 96 features."""

    def forward(self, x: Tensor, return_features: bool = False) -> Tensor:
        means = nn.functional.adaptive_avg_pool2d(x.float() / 255, (4, 4)).flatten(1)
        return torch.cat((means, means * means), 1)


class VideoDetector(nn.Module):
    """As the I3D of StyleGAN-V is called: float clips (N, 3, T, H, W) of 0 to 255; means of channels and frames."""

    def forward(self, x: Tensor, rescale: bool = False, resize: bool = False, return_features: bool = False) -> Tensor:
        assert rescale and resize and return_features
        return torch.cat((x.mean((2, 3, 4)), x.mean((1, 3, 4))), 1)


def detector(path: Path, network: type[nn.Module] = Detector) -> Path:
    """Writes a detector as a file."""
    torch.jit.script(network()).save(str(path))
    return path


class Projected(Features):
    """A random projection of the pixels, with a classifier of 7 classes on top."""

    name, size, fingerprint, classes = "inception", 24, "seeded", tuple("abcdefg")

    def __call__(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(1)
        pixels = batch.flatten(1).float() / 64
        features = pixels @ torch.randn(pixels.shape[1], 24, generator=random) / 8
        return features, features @ torch.randn(24, 7, generator=random)


def arrays(path: Path, pixels: Tensor, **others: np.ndarray) -> Path:
    """Writes images as generate does."""
    np.savez_compressed(path, arr_0=pixels.movedim(-3, -1).numpy(), **others)
    return path


def two_sets(folder: Path) -> tuple[Path, Path]:
    """Files of 103 images with labels, and of 90."""
    return (
        arrays(folder / "a.npz", noise(103, 6, 5), arr_1=np.arange(103) % 7),
        arrays(folder / "b.npz", noise(90, 6, 5).clamp(30, 220)),
    )


def measured(first: Path, second: Path, size: int, keep: int = 10_000) -> dict[str, float]:
    """Figures of two files in batches of a size."""
    networks = dict.fromkeys(("fid", "kid", "pr", "dc", "is", "accuracy"), Projected())
    sides = [
        table.collect_statistics(images.open_image_set(path, "--images"), networks, size, keep, compared)
        for path, compared in ((first, False), (second, True))
    ]
    return {name: value for name, (value, _) in table.compute_metrics(networks, *sides).items()}
