"""The diffusion transformer of Peebles & Xie 2022 ("Scalable Diffusion Models with Transformers"), adaLN-Zero.

Notation: B samples, N tokens of p x p patches, D = hidden_size; c is the condition (timestep + label), (B, D), to which
an image embedding adds as in DALL-E 2's decoder (Ramesh et al. 2022, section 2.1).
State-dict names are the published ones, so that their files load unchanged. Weights start as published: xavier linear
layers, normal(0.02) embeddings, zero for every modulation and the last layer, so that each block begins as identity.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain.nn.layers import (
    Embedding,
    Linear,
    Mlp,
    Patches,
    SelfAttention,
    name_layers,
    sincos_positions,
    timestep_features,
)
from dstrain.recipe import ConfigError

TIME_FEATURES = 256  # number of sinusoids of a timestep

# Table 1 of the paper: name -> hidden_size, depth, num_heads; times patch sizes 2, 4 and 8.
_WIDTHS = {"S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16), "XL": (1152, 28, 16)}
SIZES = {
    f"DiT-{letter}/{patch}": {"patch_size": patch, "hidden_size": width, "depth": depth, "num_heads": heads}
    for letter, (width, depth, heads) in _WIDTHS.items()
    for patch in (2, 4, 8)
}


class DiT(nn.Module):
    """Noised input, timesteps and labels to a prediction (and, with learn_sigma, variance values).

    input_size          height = width of the input, in its own pixels (latents: image size / 8).
    class_dropout_prob  above 0 the label table has one more row, number num_classes: "no label". The caller drops.
    learn_sigma         twice as many output channels as input channels.
    time_freq           official, or diffusers (whose frequencies are spaced a little wider).
    size_conditions     the original size of an image and its crop are conditions, too.
    embedding_dim       width of an image embedding that is a condition, too; 0: none.

    Inputs may have other sizes, any multiples of the patch: their positions run over the same range.
    """

    def __init__(
        self,
        input_size: int = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        class_dropout_prob: float = 0.1,
        num_classes: int = 1000,
        learn_sigma: bool = True,
        *,
        time_freq: str = "official",
        size_conditions: bool = False,
        embedding_dim: int = 0,
    ) -> None:
        super().__init__()
        if input_size % patch_size:
            raise ConfigError(f"patch_size: {patch_size} does not divide the input's size {input_size}")
        self.in_channels, self.patch_size, self.num_classes = in_channels, patch_size, num_classes
        self.out_channels = 2 * in_channels if learn_sigma else in_channels
        self.grid = input_size // patch_size
        self.x_embedder = PatchEmbed(in_channels, hidden_size, patch_size)
        self.t_embedder = TimestepEmbedder(hidden_size, time_freq)
        self.y_embedder = name_layers(embedding_table=Embedding(num_classes + (class_dropout_prob > 0), hidden_size))
        if size_conditions:
            self.s_embedder = SizeEmbedder(hidden_size)
        if embedding_dim:
            self.e_embedder = ImageEmbedder(embedding_dim, hidden_size)
        self.blocks = nn.ModuleList(DiTBlock(hidden_size, num_heads, mlp_ratio) for _ in range(depth))
        self.final_layer = FinalLayer(hidden_size, patch_size, self.out_channels)
        # .float(), since zero.Init would create it in the compute dtype.
        self.register_buffer("pos_embed", torch.empty(1, self.grid**2, hidden_size).float())
        self._positions: dict[tuple[int, int], Tensor] = {}  # of other grids; few, since a run has few sizes
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Positions only: all weights belong to submodules."""
        with torch.no_grad():
            self.pos_embed.copy_(sincos_positions(self.pos_embed.shape[-1], self.grid, self.grid))

    def forward(
        self, x: Tensor, t: Tensor, y: Tensor, size: Tensor | None = None, embed: Tensor | None = None
    ) -> Tensor:
        """Takes size int64 (B, 6), see SizeEmbedder, and embed (B, E), see ImageEmbedder; None: no such conditions."""
        high, wide = (side // self.patch_size for side in x.shape[2:])
        x = self.x_embedder(x)  # (B, N, D)
        x = x + self.positions(high, wide).to(x)
        c = self.t_embedder(t) + self.y_embedder(y)  # (B, D)
        if size is not None:
            c = c + self.s_embedder(size)
        if embed is not None:
            c = c + self.e_embedder(embed)
        for block in self.blocks:
            x = block(x, c)
        return self.unpatchify(self.final_layer(x, c), high, wide)  # (B, C or 2C, H, W)

    def positions(self, high: int, wide: int) -> Tensor:
        """Returns the positions of the square grid, or float32 (1, N, D) of another one over the same range."""
        if high == wide == self.grid:
            return self.pos_embed
        if (high, wide) not in self._positions:
            positions = sincos_positions(self.pos_embed.shape[-1], high, wide, self.grid)[None]
            self._positions[high, wide] = positions.to(self.pos_embed.device)
        return self._positions[high, wide]

    def unpatchify(self, x: Tensor, high: int, wide: int) -> Tensor:
        """Tokens of p * p * C values to an image: (B, N, p*p*C) -> (B, C, H, W)."""
        p = self.patch_size
        x = x.view(len(x), high, wide, p, p, self.out_channels).permute(0, 5, 1, 3, 2, 4)  # (B, C, h, p, w, p)
        return x.reshape(len(x), self.out_channels, high * p, wide * p)


class DiTBlock(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by the condition."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.attn = SelfAttention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), Linear(dim, 6 * dim, init="zero"))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        modulation = self.adaLN_modulation(c)[:, None]  # (B, 1, 6D)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation.chunk(6, dim=-1)
        x = x + gate_msa * self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        return x + gate_mlp * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))


class FinalLayer(nn.Module):
    """Tokens to the values of their patches."""

    def __init__(self, dim: int, patch_size: int, out_channels: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.linear = Linear(dim, patch_size**2 * out_channels, init="zero")
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), Linear(dim, 2 * dim, init="zero"))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c)[:, None].chunk(2, dim=-1)
        return self.linear(modulate(self.norm_final(x), shift, scale))  # (B, N, p*p*C)


class PatchEmbed(nn.Module):
    """(B, C, H, W) in any precision -> tokens (B, N, D) in the precision of the weights."""

    def __init__(self, in_channels: int, dim: int, patch_size: int) -> None:
        super().__init__()
        self.proj = Patches(in_channels, dim, patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x.to(self.proj.weight.dtype)).flatten(2).transpose(1, 2)


class TimestepEmbedder(nn.Module):
    """(B,) -> (B, D); the sinusoids in float32, since bfloat16 cannot tell timesteps apart."""

    def __init__(self, dim: int, time_freq: str) -> None:
        super().__init__()
        if time_freq not in ("official", "diffusers"):
            raise ConfigError(f"time_freq: {time_freq!r} is unknown; one of official, diffusers")
        self.shift = int(time_freq == "diffusers")
        self.mlp = nn.Sequential(Linear(TIME_FEATURES, dim, init="normal"), nn.SiLU(), Linear(dim, dim, init="normal"))

    def forward(self, t: Tensor) -> Tensor:
        features = timestep_features(t, TIME_FEATURES, shift=self.shift)
        return self.mlp(features.to(self.mlp[0].weight.dtype))


class SizeEmbedder(nn.Module):
    """The original height and width of an image, the top and left of its crop and the crop's height and width, in
    pixels, int64 (B, 6) -> (B, D): SDXL's micro-conditioning (Podell et al. 2023). It begins as zero.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        first, last = Linear(6 * TIME_FEATURES, dim, init="normal"), Linear(dim, dim, init="zero")
        self.mlp = nn.Sequential(first, nn.SiLU(), last)

    def forward(self, size: Tensor) -> Tensor:
        features = timestep_features(size.flatten(), TIME_FEATURES).view(len(size), -1)  # (B, 6 x 256)
        return self.mlp(features.to(self.mlp[0].weight.dtype))


class ImageEmbedder(nn.Module):
    """Image embeddings (B, E), or zeros for none, to (B, D). Only their direction counts. It begins as zero."""

    def __init__(self, embedding_dim: int, dim: int) -> None:
        super().__init__()
        first, last = Linear(embedding_dim, dim, init="normal"), Linear(dim, dim, init="zero")
        self.mlp = nn.Sequential(first, nn.SiLU(), last)

    def forward(self, embed: Tensor) -> Tensor:
        unit_variance = F.normalize(embed.float(), dim=1) * embed.shape[1] ** 0.5
        return self.mlp(unit_variance.to(self.mlp[0].weight.dtype))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift
