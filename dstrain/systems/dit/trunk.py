"""A chain of blocks, condition tokens that join and leave it, and taps into it."""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from dstrain.systems.dit.blocks import Seen


class Trunk(nn.ModuleList):
    """Blocks in a row. Condition tokens join behind the image's before block number `joins`, and leave after the last:
    attention does not ask for an order, so that networks which put theirs in front compute the same.
    """

    def __init__(self, blocks: Iterable[nn.Module], joins: int = 0) -> None:
        super().__init__(blocks)
        self.joins = joins

    def forward(
        self, x: Tensor, seen: Seen, tokens: Tensor | None = None, taps: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Returns the image's tokens (B, N, D), and those after each of the blocks `taps`, which count from 1.

        tokens: (B, K, D). seen.rotation is of N + K tokens; those that are not there yet are cut off.
        """
        count, rotation, tapped = x.shape[1], seen.rotation, {}
        for number, block in enumerate(self, 1):
            if tokens is not None and number == self.joins + 1:
                x = torch.cat((x, tokens), dim=1)
            if rotation is not None:
                seen = seen._replace(rotation=rotation[:, :, : x.shape[1]])
            x = block(x, *seen)
            if number in taps:
                tapped[number] = x[:, :count]
        return x if tokens is None else x[:, :count], tapped
