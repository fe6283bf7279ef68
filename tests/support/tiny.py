"""A tiny network with shapes that are difficult for ZeRO: odd sizes, a gain, a bias, a buffer."""

import torch
from torch import Tensor, nn


class Scale(nn.Module):
    """A gain that starts at one and a buffer of its own precision."""

    def __init__(self, width: int):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))
        self.register_buffer("table", torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        with torch.no_grad():
            self.table.copy_(torch.linspace(0, 1, self.table.numel()) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.table.to(x.dtype)


class Tiny(nn.Module):
    """(B, 5) -> (B, 3)"""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 17)
        self.scale = Scale(17)
        self.hidden = nn.Sequential(*(nn.Linear(17, 17) for _ in range(2)))
        self.last = nn.Linear(17, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale(torch.tanh(self.first(x.to(self.first.weight.dtype))))
        return self.last(torch.tanh(self.hidden(x))).float()
