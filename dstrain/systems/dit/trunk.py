"""A chain of blocks. Condition tokens can join the image's tokens on the way, outputs of inner blocks can be read
(taps), and some tokens can skip blocks (routing).
"""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from dstrain import rng
from dstrain.systems.dit.blocks import BlockInputs


class Trunk(nn.ModuleList):
    """Blocks in a row. Condition tokens are appended to the image's tokens after the first `joins` blocks, and removed
    after the last. Attention knows no order, so that networks which put theirs in front compute the same.

    routed   the first and the last of the blocks, counted from 1, that a share of the image's tokens may skip.
    """

    def __init__(self, blocks: Iterable[nn.Module], joins: int = 0, routed: tuple[int, int] = (0, 0)) -> None:
        super().__init__(blocks)
        self.joins, self.routed = joins, routed

    def forward(
        self,
        x: Tensor,
        inputs: BlockInputs,
        tokens: Tensor | None = None,
        taps: Collection[int] = (),
        keep: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Returns the image's tokens after the last block, (B, N, D), and a dict with those after each block in `taps`,
        by the block's number, counted from 1.

        inputs  what all blocks read. Its rotation, and its mask without cross-attention, cover all N + K tokens; each
                block is given the part for its own tokens.
        tokens  condition tokens (B, K, D); None: there are none.
        keep    int64 (B, M), the numbers of the image's tokens that go through the `routed` blocks (TREAD, Krause et
                al. 2025). The others skip these blocks and come back unchanged after the last of them. None: all go
                through. A tap between routed blocks has only M tokens, (B, M, D).
        """
        count, whole, tapped, passing = x.shape[1], inputs.rotation, {}, x
        rotation, mask = whole, inputs.mask if inputs.text is None else None
        joint = inputs.images is not None
        start, end = self.routed if keep is not None else (0, 0)
        for number, block in enumerate(self, 1):
            if number == start:
                passing, x = x[:, :count], torch.cat((gather_kept_tokens(x[:, :count], keep), x[:, count:]), dim=1)
                rotation = _gather_kept_rotations(rotation, keep, count)
                count = keep.shape[1]
            if tokens is not None and number == self.joins + 1:
                x = torch.cat((x, tokens), dim=1)
            if mask is not None:
                inputs = inputs._replace(
                    mask=_crop_attention_mask_to_tokens(mask, x, keep) if number > self.joins else None
                )
            if rotation is not None:
                inputs = inputs._replace(rotation=rotation[:, :, : x.shape[1]])
            if joint:
                inputs = inputs._replace(images=count)
            x = block(x, *inputs)
            if number == end:
                x = torch.cat((_replace_kept_tokens(passing, keep, x[:, :count]), x[:, count:]), dim=1)
                count, rotation = passing.shape[1], whole
            if number in taps:
                tapped[number] = x[:, :count]
        return x if tokens is None else x[:, :count], tapped


def _crop_attention_mask_to_tokens(mask: Tensor, x: Tensor, keep: Tensor | None) -> Tensor:
    """Returns the last entries of a mask (B, 1, 1, N + K), as many as the block's tokens x. The image's N entries come
    first and are all True, so it does not matter which of the image's tokens x lacks. Returns the whole mask if `keep`
    is None.
    """
    return mask if keep is None else mask[..., mask.shape[-1] - x.shape[1] :]


def draw_kept_tokens(key: Tensor, count: int, skipped_share: float) -> Tensor | None:
    """Draws which of the `count` tokens of each sample go through the routed blocks: all but int(skipped_share *
    count). Returns their numbers, ascending, int64 (B, M); None if all go through. key int64 (B,): the samples' seeds.
    """
    if not int(skipped_share * count):
        return None
    order = rng.uniform(key, "route", (count,)).argsort(dim=1, stable=True)
    return order[:, : count - int(skipped_share * count)].sort(dim=1).values


def gather_kept_tokens(x: Tensor, keep: Tensor) -> Tensor:
    """Returns the tokens of x (B, N, D) whose numbers are in `keep`, int64 (B, M): (B, M, D)."""
    return x.gather(1, keep[..., None].expand(-1, -1, x.shape[-1]))


def _replace_kept_tokens(x: Tensor, keep: Tensor, replacements: Tensor) -> Tensor:
    """Returns a copy of x (B, N, D) in which the tokens with the numbers `keep`, int64 (B, M), are replaced by
    `replacements` (B, M, D).
    """
    return x.scatter(1, keep[..., None].expand(-1, -1, x.shape[-1]), replacements)


def _gather_kept_rotations(rotation: Tensor | None, keep: Tensor, num_image_tokens: int) -> Tensor | None:
    """Returns the rotations of the tokens that stay, (B, 2, M + K, d): of the image's `num_image_tokens` tokens those
    with the numbers `keep`, int64 (B, M), and then all K condition tokens. Returns None if `rotation` is None.
    """
    if rotation is None:
        return None
    of_grid = rotation[0, :, keep].transpose(0, 1)  # (B, 2, M, d)
    return torch.cat((of_grid, rotation[:, :, num_image_tokens:].expand(len(keep), -1, -1, -1)), dim=2)
