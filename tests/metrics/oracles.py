"""Weights and images for tests of metrics: a seeded Inception, since the published weights cannot be had here."""

from pathlib import Path

import torch
from torch import Tensor, nn

from dstrain.metrics.inception import Inception


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
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8,
                         generator=torch.Generator().manual_seed(count))
