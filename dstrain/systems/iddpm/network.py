"""The UNet of Nichol & Dhariwal 2021 ("Improved Denoising Diffusion Probabilistic Models"), also for super-resolution.

Notation: B samples of C channels. A level is all layers at one resolution; a Stage is what runs between two skip
connections. emb is the sum of the embeddings of timestep and label, (B, E) with E = 4 num_channels. State-dict names
are the published ones, so that published files load unchanged. Initial weights are the published ones, too: torch's
defaults, but zeros in the last layer of every residual branch and of the network.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain.nn.attention import attend
from dstrain.nn.layers import Pointwise, chain_named_layers, compute_timestep_features, make_dropout

GROUPS = 32  # groups of every normalization


class UNet(nn.Module):
    """Predicts noise, or another target of the objective, from noisy images, timesteps and labels; with learn_sigma
    also variances.

    in_channels         channels of the noisy images and of the prediction; learn_sigma doubles those of the output.
    num_channels        channels of the first level; level i has num_channels * channel_mult[i].
    num_res_blocks      residual blocks of a level on the way down; one more on the way up.
    channel_mult        one factor for each level; every level but the last halves the side.
    attention_levels    levels with attention after each residual block; the middle always has it.
    num_heads           attention heads on the way down and in the middle.
    num_heads_upsample  attention heads on the way up; None for the same number.
    dropout             share of values dropped before the last layer of a residual block.
    num_classes         rows of the label table, a null label included; None is unconditional.
    use_scale_shift_norm  emb scales and shifts normalized values; False adds emb before the normalization.
    seen_channels       channels of the input, if it has more than the noisy images; None means in_channels.
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_channels: int = 128,
        num_res_blocks: int = 2,
        channel_mult: Sequence[int] = (1, 2, 3, 4),
        attention_levels: Sequence[int] = (2, 3),
        num_heads: int = 4,
        num_heads_upsample: int | None = None,
        dropout: float = 0.0,
        learn_sigma: bool = False,
        num_classes: int | None = None,
        use_scale_shift_norm: bool = True,
        *,
        seen_channels: int | None = None,
    ) -> None:
        super().__init__()
        self.num_channels, self.num_classes = num_channels, num_classes
        embed = 4 * num_channels
        self.time_embed = nn.Sequential(nn.Linear(num_channels, embed), nn.SiLU(), nn.Linear(embed, embed))
        if num_classes is not None:
            self.label_emb = nn.Embedding(num_classes, embed)

        def make_res_block(inputs, outputs):
            return ResBlock(inputs, outputs, embed, dropout, use_scale_shift_norm)

        channels, last = num_channels, len(channel_mult) - 1
        self.input_blocks = nn.ModuleList([Stage(nn.Conv2d(seen_channels or in_channels, channels, 3, padding=1))])
        skips = [channels]
        for level, factor in enumerate(channel_mult):
            for _ in range(num_res_blocks):
                layers: list[nn.Module] = [make_res_block(channels, factor * num_channels)]
                channels = factor * num_channels
                if level in attention_levels:
                    layers.append(AttentionBlock(channels, num_heads))
                self.input_blocks.append(Stage(*layers))
                skips.append(channels)
            if level < last:
                self.input_blocks.append(
                    Stage(chain_named_layers(op=nn.Conv2d(channels, channels, 3, stride=2, padding=1)))
                )
                skips.append(channels)

        self.middle_block = Stage(
            make_res_block(channels, channels), AttentionBlock(channels, num_heads), make_res_block(channels, channels)
        )

        self.output_blocks = nn.ModuleList()
        for level, factor in reversed(list(enumerate(channel_mult))):
            for index in range(num_res_blocks + 1):
                layers = [make_res_block(channels + skips.pop(), factor * num_channels)]
                channels = factor * num_channels
                if level in attention_levels:
                    layers.append(AttentionBlock(channels, num_heads_upsample or num_heads))
                if level and index == num_res_blocks:
                    layers.append(
                        chain_named_layers(
                            repeat=nn.Upsample(scale_factor=2, mode="nearest"),
                            conv=nn.Conv2d(channels, channels, 3, padding=1),
                        )
                    )
                self.output_blocks.append(Stage(*layers))
        self.out = nn.Sequential(
            build_group_norm(channels), nn.SiLU(), ZeroConv2d(channels, (1 + learn_sigma) * in_channels, 3, padding=1)
        )

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        """Returns the prediction (B, C or 2C, H, W) for noisy images x (B, C, H, W), timesteps t (B,) and labels y
        int64 (B,). Ignores y if the network is unconditional.
        """
        dtype = self.time_embed[0].weight.dtype  # from here on in compute precision
        emb = self.time_embed(compute_timestep_features(t, self.num_channels).to(dtype))  # (B, E)
        if self.num_classes is not None:
            emb = emb + self.label_emb(y)
        h, skips = x.to(dtype), []
        for stage in self.input_blocks:
            h = stage(h, emb)
            skips.append(h)
        h = self.middle_block(h, emb)
        for stage in self.output_blocks:
            h = stage(torch.cat((h, skips.pop()), dim=1), emb)
        return self.out(h)  # (B, C or 2C, H, W)


class SuperResUNet(UNet):
    """A UNet with the small picture as further input channels, stretched bilinearly to the size of the noisy image."""

    def __init__(self, in_channels: int = 3, *arguments, **options) -> None:
        super().__init__(in_channels, *arguments, seen_channels=2 * in_channels, **options)

    def forward(self, x: Tensor, t: Tensor, low_res: Tensor, y: Tensor | None = None) -> Tensor:
        """Returns the prediction (B, C or 2C, H, W) for noisy images x, as UNet does. low_res (B, C, h, w): the small
        pictures that are to be enlarged.
        """
        stretched = F.interpolate(low_res, x.shape[-2:], mode="bilinear", align_corners=False)
        return super().forward(torch.cat((x, stretched.to(x.dtype)), dim=1), t, y)


class Stage(nn.Sequential):
    """Runs its layers one after the other, and gives emb to each ResBlock among them."""

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        for layer in self:
            x = layer(x, emb) if isinstance(layer, ResBlock) else layer(x)
        return x


class ResBlock(nn.Module):
    """Two convolutions, with a shortcut around both; emb enters at the normalization between them."""

    def __init__(self, channels: int, out_channels: int, embed: int, dropout: float, use_scale_shift_norm: bool):
        super().__init__()
        self.use_scale_shift_norm = use_scale_shift_norm
        self.in_layers = nn.Sequential(
            build_group_norm(channels), nn.SiLU(), nn.Conv2d(channels, out_channels, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(embed, (1 + use_scale_shift_norm) * out_channels))
        self.out_layers = nn.Sequential(
            build_group_norm(out_channels),
            nn.SiLU(),
            make_dropout(dropout),
            ZeroConv2d(out_channels, out_channels, 3, padding=1),
        )
        self.skip_connection = nn.Identity() if channels == out_channels else nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.in_layers(x)
        condition = self.emb_layers(emb)[:, :, None, None]  # (B, C or 2C, 1, 1)
        norm, *rest = self.out_layers
        if self.use_scale_shift_norm:
            scale, shift = condition.chunk(2, dim=1)
            h = norm(h) * (1 + scale) + shift
        else:
            h = norm(h + condition)
        for layer in rest:
            h = layer(h)
        return self.skip_connection(x) + h


class AttentionBlock(nn.Module):
    """Self-attention among all pixels of a feature map, with a shortcut: (B, C, H, W) -> (B, C, H, W).

    The rows of `qkv` are ordered as published: query, key and value of the first head, then those of the second. The
    original divides both query and key by the fourth root of a head's width d; torch's attention divides their product
    by sqrt(d), which is the same.
    """

    def __init__(self, channels: int, num_heads: int) -> None:
        super().__init__()
        assert channels % num_heads == 0, f"{num_heads} heads of {channels} channels"
        self.num_heads = num_heads
        self.norm = build_group_norm(channels)
        self.qkv = Pointwise(channels, 3 * channels, 1)
        self.proj_out = ZeroPointwise(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        tokens = self.norm(x).flatten(2).transpose(1, 2)  # (B, N, C)
        qkv = self.qkv(tokens).view(batch, height * width, self.num_heads, 3, channels // self.num_heads)
        query, key, value = qkv.permute(3, 0, 2, 1, 4).unbind(0)  # (B, h, N, d) each
        h = attend(query, key, value)  # (B, h, N, d)
        h = self.proj_out(h.transpose(1, 2).reshape(batch, height * width, channels))  # (B, N, C)
        return x + h.transpose(1, 2).reshape(x.shape)


class ZeroInitialized:
    """A mixin for layers: `reset_parameters` sets weight and bias to zero."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class ZeroPointwise(ZeroInitialized, Pointwise):
    pass


class ZeroConv2d(ZeroInitialized, nn.Conv2d):
    pass


def build_group_norm(channels: int) -> nn.GroupNorm:
    """Returns a GroupNorm over `channels` channels in 32 groups, as the original has everywhere."""
    return nn.GroupNorm(GROUPS, channels, eps=1e-5)
