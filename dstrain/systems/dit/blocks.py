"""The repeated blocks of a DiT and its head: choices of norm, MLP, attention and modulation, and nothing else.

B samples, N tokens of which the first `images` are patches, D = dim. A block takes the tokens and, by position, the
inputs that all blocks of a forward pass share (`BlockInputs`). The names of weights are the published DiT's; xavier
linear layers, and zero for every modulation and for the head, so that each block begins as identity.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dstrain.nn.attention import attend
from dstrain.nn.layers import Linear
from dstrain.nn.tokens import MLPS, MODULATIONS, Attention, build_norm_layer, join_heads, modulate


class BlockInputs(NamedTuple):
    """The inputs that all blocks of a forward pass share. Blocks take them as separate arguments, since hooks and
    graphs look for tensors there.
    """

    c: Tensor | None = None
    """The condition, (B, D), or (B, N, D) for each token."""
    shared: Tensor | None = None
    """Modulation that all blocks share, (B, 6, D)."""
    rotation: Tensor | None = None
    """Cosines and sines of all tokens, (1, 2, N, head_dim); no batch has the length of its first axis but one."""
    text: Tensor | None = None
    """Texts that cross-attention reads, (B, M, D)."""
    mask: Tensor | None = None
    """bool (B, 1, 1, M), True where a text's token is read; without cross-attention of all tokens, (B, 1, 1, N)."""
    images: int | None = None
    """The number of patches, which come first; those of joint blocks end there."""


class Block(nn.Module):
    """Attention and an MLP, each shifted, scaled and gated by the condition; between them cross-attention to texts, if
    any.

    norm          layer, layer_affine or rms.
    mlp           gelu or swiglu.
    qk_norm       see nn.tokens.Attention.
    modulation    own, shared or none.
    text          how it reads texts: none; plain (PixArt); or normed, behind a norm (Wan). The last map begins as zero.
    vectors       how many vectors the modulation computes: 6, or 9 for the image of a dual JointBlock.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        norm: str = "layer",
        mlp: str = "gelu",
        qk_norm: str = "none",
        modulation: str = "own",
        text: str = "none",
        vectors: int = 6,
    ) -> None:
        super().__init__()
        self.norm1 = build_norm_layer(norm, dim)
        self.attn = Attention(dim, num_heads, qk_norm)
        if text != "none":
            self.norm_cross = build_norm_layer("layer_affine", dim) if text == "normed" else nn.Identity()
            self.cross = Attention(dim, num_heads, "rms_all" if qk_norm == "rms_all" else "none", dim, init="zero")
        self.norm2 = build_norm_layer(norm, dim)
        self.mlp = MLPS[mlp](dim, int(dim * mlp_ratio))
        self.adaLN_modulation = MODULATIONS[modulation](dim, vectors)

    def forward(self, x: Tensor, *inputs: Tensor | int | None) -> Tensor:
        """Maps tokens (B, N, D) to tokens (B, N, D). inputs: the fields of `BlockInputs`, in order."""
        c, shared, rotation, text, mask, _ = BlockInputs(*inputs)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c, shared)
        own = mask if text is None else None
        x = x + gate_msa * self.attn(modulate(self.norm1(x), shift_msa, scale_msa), rotation=rotation, mask=own)
        if text is not None:
            x = x + self.cross(self.norm_cross(x), text, mask=mask)
        return x + gate_mlp * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))


class JointBlock(nn.Module):
    """Patches and texts in one sequence, each with weights of their own, attending to both (MMDiT, Esser et al. 2024).

    last   whether this is the last block, which reads the texts but returns the patches alone.
    dual   the patches attend to themselves once more (Stable Diffusion 3.5 medium).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        qk_norm: str = "none",
        last: bool = False,
        dual: bool = False,
    ) -> None:
        super().__init__()
        self.image = Block(dim, num_heads, mlp_ratio, qk_norm=qk_norm, vectors=9 if dual else 6)
        self.text = LastText(dim, num_heads, qk_norm) if last else Block(dim, num_heads, mlp_ratio, qk_norm=qk_norm)
        self.last = last
        if dual:
            self.attn2 = Attention(dim, num_heads, qk_norm)

    def forward(self, x: Tensor, *inputs: Tensor | int | None) -> Tensor:
        """Maps tokens (B, N, D), the image's patches first and the text's tokens behind them, to tokens (B, N, D). The
        last block returns the patches alone. inputs: the fields of `BlockInputs`, in order.
        """
        c, _, _, _, mask, images = BlockInputs(*inputs)
        image, words = x[:, :images], x[:, images:]
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp, *again = self.image.adaLN_modulation(c)
        of_words = self.text.adaLN_modulation(c)
        normed = self.image.norm1(image)
        heads = zip(
            self.image.attn.project_queries_keys_values(modulate(normed, shift_msa, scale_msa)),
            self.text.attn.project_queries_keys_values(modulate(self.text.norm1(words), of_words[0], of_words[1])),
            strict=True,
        )
        read = join_heads(attend(*(torch.cat(pair, dim=2) for pair in heads), mask, shared_stretches=1))
        image = image + gate_msa * self.image.attn.proj(read[:, :images])
        if again:
            shift, scale, gate = again
            image = image + gate * self.attn2(modulate(normed, shift, scale))
        image = image + gate_mlp * self.image.mlp(modulate(self.image.norm2(image), shift_mlp, scale_mlp))
        if self.last:
            return image
        _, _, gate_msa, shift_mlp, scale_mlp, gate_mlp = of_words
        words = words + gate_msa * self.text.attn.proj(read[:, images:])
        words = words + gate_mlp * self.text.mlp(modulate(self.text.norm2(words), shift_mlp, scale_mlp))
        return torch.cat((image, words), dim=1)


class LastText(nn.Module):
    """The weights for the texts in the last joint block, which reads their keys and values but does not change the
    texts. It has weights for their queries, too, without use, since the published files have them.
    """

    def __init__(self, dim: int, num_heads: int, qk_norm: str) -> None:
        super().__init__()
        self.norm1 = build_norm_layer("layer", dim)
        self.attn = Attention(dim, num_heads, qk_norm, project=False)
        self.adaLN_modulation = MODULATIONS["own"](dim, 2)


class FinalLayer(nn.Module):
    """Maps tokens to the values of their patches, (B, N, D) -> (B, N, values); see Block for its choices."""

    def __init__(self, dim: int, values: int, norm: str = "layer", modulation: str = "own") -> None:
        super().__init__()
        self.norm_final = build_norm_layer(norm, dim)
        self.linear = Linear(dim, values, init="zero")
        self.adaLN_modulation = MODULATIONS[modulation](dim, 2)

    def forward(self, x: Tensor, c: Tensor | None, shared: Tensor | None = None) -> Tensor:
        """Maps tokens (B, N, D) to the values of their patches, (B, N, values). c: the condition, (B, D) or (B, N, D).
        shared: modulation that several layers share; None: there is none.
        """
        shift, scale = self.adaLN_modulation(c, shared)
        return self.linear(modulate(self.norm_final(x), shift, scale))
