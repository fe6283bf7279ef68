"""The diffusion transformer of Peebles & Xie 2022 ("Scalable Diffusion Models with Transformers") and later variants:
patches, positions, conditions, a trunk of blocks, and a head, each of which can be chosen.

Notation: B samples, N tokens of p x p patches, D = hidden_size; c is the condition (timestep + label), (B, D), to which
an image embedding adds as in DALL-E 2's decoder (Ramesh et al. 2022, section 2.1). State-dict names are the published
ones, so that their files load unchanged. Weights start as published: xavier linear layers, normal(0.02) embeddings,
zero for every modulation and the last layer, so that each block begins as identity.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain.nn.layers import Embedding, Linear, Patches, chain_named_layers
from dstrain.nn.positions import make_rotary_embedding, make_sincos_frame_positions, make_sincos_positions
from dstrain.nn.sequence import (
    gather_rank_slices,
    reorder_like_gathered_slices,
    take_rank_slice,
    take_rank_slice_of_both_parts,
)
from dstrain.recipe import ConfigError
from dstrain.systems.dit.blocks import Block, BlockInputs, FinalLayer, JointBlock
from dstrain.systems.dit.conditions import (
    SIZE_EMBEDDERS,
    ImageEmbedder,
    LearnedTokens,
    PooledText,
    TextTokens,
    TimestepEmbedder,
)
from dstrain.systems.dit.trunk import Trunk


class DiT(nn.Module):
    """Predicts from noised inputs, times and conditions (and, with learn_sigma, predicts variance values behind the
    rest).

    input_size          height = width of the input, in its own pixels (latents: image size / 8).
    class_dropout_prob  above 0 the label table has one more row, number num_classes: "no label". The caller drops.
    num_classes         0: no labels.
    learn_sigma         twice as many output channels as input channels.
    time_freq           see TimestepEmbedder.
    size_conditions     whether the original size of an image and its crop are conditions, too.
    size_embedding      how these become a vector: sdxl, see SizeEmbedder, or pixart, see SidesEmbedder.
    embedding_dim       width of an image embedding that is a condition, too; 0: none.
    block               choices of every block, see Block; `modulation` and `norm` are the head's, too.
    sines, rope         positions: whether sines are added to tokens; whether queries and keys are rotated.
    interpolation_scale   what positions are divided by before their sines are taken.
    sines_within        (patches along a side of a square, in whose middle the input lies, range of its sines) (SD3).
    tokens              numbers of condition tokens (time, label), and of the blocks that come before them (joins).
    text                the keyword arguments of TextTokens, whose tokens are condition tokens; None: no texts.
    cross_attention     every block reads the text's tokens by cross-attention instead.
    joint, dual         whether blocks are JointBlocks, and how many of these, the first ones, are dual.
    pooled_dim          length of a text's pooled vector, which adds to the condition, see PooledText; 0: none.
    patch_bottleneck    channels between the two maps of a patch (JiT); 0: one map.
    wide                hidden_size, depth and num_heads of RAE's wide head, see WideHead.
    base_depth          a second head, for internal guidance, reads the tokens after this block; 0: none.
    align               depth, widths and hidden of REPA's projectors, see Projector; or depth and target of LayerSync.
    routed              the first and the last block that tokens may skip in training, see Trunk.
    patch_frames        frames of a patch of clips (B, C, T, H, W), see PatchEmbed; 0: inputs are images.
    given               whether first frames of a clip may be given, as channels beside the noised ones.

    Inputs may have other sizes, any multiples of the patch: their positions run over the same range. Clips may have any
    number of patches in time, whose positions are 0, 1, 2, ... Ranks that share samples (nn/sequence.py) each take a
    part of the patches and of the condition tokens, but cannot route tokens.
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
        size_embedding: str = "sdxl",
        embedding_dim: int = 0,
        block: Mapping[str, str] | None = None,
        sines: bool = True,
        sines_within: tuple[int, int] | None = None,
        rope: bool = False,
        tokens: Mapping[str, int] | None = None,
        text: Mapping[str, Any] | None = None,
        cross_attention: bool = False,
        joint: bool = False,
        dual: int = 0,
        pooled_dim: int = 0,
        patch_bottleneck: int = 0,
        wide: Mapping[str, int] | None = None,
        base_depth: int = 0,
        align: Mapping[str, Any] | None = None,
        routed: tuple[int, int] = (0, 0),
        patch_frames: int = 0,
        given: bool = False,
        interpolation_scale: int = 1,
    ) -> None:
        super().__init__()
        if input_size % patch_size:
            raise ConfigError(f"patch_size: {patch_size} does not divide the input's size {input_size}")
        block, tokens = dict(block or {}), dict(tokens or {})
        self.in_channels, self.patch_size, self.num_classes = in_channels, patch_size, num_classes
        self.out_channels = 2 * in_channels if learn_sigma else in_channels
        self.grid, self.head_dim = input_size // patch_size, hidden_size // num_heads
        self.patch_frames, seen_channels = patch_frames, 2 * in_channels + 1 if given else in_channels
        self.x_embedder = PatchEmbed(seen_channels, hidden_size, patch_size, patch_bottleneck, patch_frames)
        self.t_embedder = TimestepEmbedder(hidden_size, time_freq)
        if num_classes:
            self.y_embedder = chain_named_layers(
                embedding_table=Embedding(num_classes + (class_dropout_prob > 0), hidden_size)
            )
        if size_conditions:
            self.s_embedder = SIZE_EMBEDDERS[size_embedding](hidden_size)
        if embedding_dim:
            self.e_embedder = ImageEmbedder(embedding_dim, hidden_size)
        if tokens.get("time"):
            self.t_tokens = LearnedTokens(tokens["time"], hidden_size)
        if tokens.get("label"):
            self.y_tokens = LearnedTokens(tokens["label"], hidden_size)
        self.cross_attention = cross_attention
        if text:
            self.text_tokens = TextTokens(hidden_size, **text)
        if pooled_dim:
            self.p_embedder = PooledText(pooled_dim, hidden_size, (text or {}).get("num_words"))
        if cross_attention:
            block["text"] = "plain"
        if block.get("modulation") == "shared":
            self.t_block = nn.Sequential(nn.SiLU(), Linear(hidden_size, 6 * hidden_size, init="normal"))
        self.joint = joint
        if joint:
            shape = hidden_size, num_heads, mlp_ratio, block.get("qk_norm", "none")
            blocks = [JointBlock(*shape, last=number == depth - 1, dual=number < dual) for number in range(depth)]
        else:
            blocks = [Block(hidden_size, num_heads, mlp_ratio, **block) for _ in range(depth)]
        self.blocks = Trunk(blocks, tokens.get("joins", 0), routed)
        choices = {name: block[name] for name in ("norm", "modulation") if name in block}
        values = max(patch_frames, 1) * patch_size**2 * self.out_channels
        self.wide = wide is not None
        if wide:
            self.final_layer = WideHead(
                patch_size, seen_channels, hidden_size, values, mlp_ratio, wide, block, patch_frames
            )
            choices["modulation"] = "own"
        else:
            self.final_layer = FinalLayer(hidden_size, values, **choices)
        self.base_depth = base_depth
        if base_depth:
            self.base_layer = FinalLayer(hidden_size, values, **choices)
        align = align or {}
        self.align_depth, self.align_target = align.get("depth", 0), align.get("target", 0)
        if align.get("widths"):
            self.projectors = nn.ModuleList(
                Projector(hidden_size, width, align.get("hidden", 0)) for width in align["widths"]
            )
        self.sines, self.rope, self.sines_within, self.range = (
            sines,
            rope,
            sines_within,
            self.grid / interpolation_scale,
        )
        if sines:
            # .float(), since zero.Init would create it in the compute dtype.
            self.register_buffer("pos_embed", torch.empty(1, self.grid**2, hidden_size).float())
        self._positions: dict[tuple[int, ...], Tensor] = {}  # of other grids, of times; few, since a run has few sizes
        self._rotations: dict[tuple[tuple[int, ...], int, int], Tensor] = {}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the table of positions, pos_embed. All weights belong to submodules, which set their own."""
        if self.sines:
            with torch.no_grad():
                self.pos_embed.copy_(self.compute_sincos_position_embeddings(self.grid, self.grid))

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor | None = None,
        size: Tensor | None = None,
        embed: Tensor | None = None,
        text: Tensor | None = None,
        mask: Tensor | None = None,
        extras: bool = False,
        keep: Tensor | None = None,
        given: Tensor | None = None,
    ) -> Tensor | dict[str, Any]:
        """Returns the prediction (B, C or 2C, ...) for noised inputs x, images (B, C, H, W) or clips (B, C, T, H, W),
        at times t (B,).

        y           int64 (B,), labels; None: no labels.
        size        int64 (B, 6), sizes and crops of the images, see SizeEmbedder; None: no sizes.
        embed       (B, E), image embeddings, see ImageEmbedder; None: no embeddings.
        text, mask  see TextTokens; None: no texts.
        keep        int64 (B, M), the numbers of the patches that go through the `routed` blocks; None: all.
        given       (B, C + 1, T, H, W), the first frames of a clip that are given, all others zero, and a last channel
                    that is 1 in the given frames; None: the network takes none.
        extras      whether to return a dict instead, of those that the network computes: `out`, the prediction; `base`,
                    the second head's; `projected`, a list of (B, N, width), one for each projector; `drawn` and
                    `towards`, the tokens (B, N, D) that LayerSync compares, `towards` without a gradient.
        """
        image = x if given is None else torch.cat((x, given.to(x)), dim=1)
        grid = self.compute_patch_grid(x)
        x = self.x_embedder(image)  # (B, N, D)
        if self.sines:
            x = x + self.get_position_embeddings(grid).to(x)
        time = self.t_embedder(t)  # (B, D)
        if text is not None and hasattr(self, "p_embedder"):
            time = time + self.p_embedder(text, mask)
            if text.ndim == 3:
                text, mask = text[:, 1:], None if mask is None else mask[:, 1:]
        label = self.y_embedder(y) if y is not None and hasattr(self, "y_embedder") else None
        words, read = (None, None) if text is None else self.text_tokens(text, mask)
        tokens = self._make_condition_tokens(time, label, None if self.cross_attention else words)
        c = time if label is None else time + label  # (B, D)
        if size is not None:
            c = c + self.s_embedder(size)
        if embed is not None:
            c = c + self.e_embedder(embed)
        if self.wide:
            c = F.silu(c)  # as published: a second time before every modulation
        patches, count = x.shape[1], 0 if tokens is None else tokens.shape[1]
        inputs = BlockInputs(c)
        if hasattr(self, "t_block"):
            inputs = inputs._replace(shared=self.t_block(c).unflatten(-1, (6, -1)))
        if self.rope:
            rotation = self.get_rotary_positions(grid, self.head_dim, count, x.device)
            inputs = inputs._replace(rotation=take_rank_slice_of_both_parts(rotation, patches, 2))
        if words is not None and self.cross_attention:
            inputs = inputs._replace(text=words, mask=None if read is None else read[:, None, None])
        elif read is not None:
            read = F.pad(read, (patches + count - read.shape[1], 0), value=True)
            inputs = inputs._replace(mask=reorder_like_gathered_slices(read, patches, 1)[:, None, None])
        x, tokens = take_rank_slice(x, 1), None if tokens is None else take_rank_slice(tokens, 1)
        if self.joint:
            inputs = inputs._replace(images=x.shape[1])
        taps = {self.base_depth, self.align_depth, self.align_target} if extras else ()
        x, tapped = self.blocks(x, inputs, tokens, taps, keep)
        if self.wide:
            rotation = self.get_rotary_positions(grid, self.final_layer.head_dim, 0, x.device) if self.rope else None
            out = self.final_layer(image, F.silu(time[:, None] + x), rotation)
        else:
            out = self.final_layer(x, c, c[:, None])
        out = self.unpatchify(gather_rank_slices(out, 1), grid)
        if not extras:
            return out
        found: dict[str, Any] = {"out": out}
        if self.base_depth:
            x = tapped[self.base_depth]
            base = self.base_layer(x, F.silu(time[:, None] + x) if self.wide else c, c[:, None])
            found["base"] = self.unpatchify(gather_rank_slices(base, 1), grid)
        if hasattr(self, "projectors"):
            found["projected"] = [
                gather_rank_slices(projector(tapped[self.align_depth]), 1) for projector in self.projectors
            ]
        if self.align_target:
            found["drawn"] = gather_rank_slices(tapped[self.align_depth], 1)
            found["towards"] = gather_rank_slices(tapped[self.align_target].detach(), 1)
        return found

    def _make_condition_tokens(self, time: Tensor, label: Tensor | None, words: Tensor | None) -> Tensor | None:
        """Returns the condition tokens (B, K, D): those of the time, of the label and of the text, in this order; None
        if there are none.
        """
        parts = []
        if hasattr(self, "t_tokens"):
            parts.append(self.t_tokens(time))
        if hasattr(self, "y_tokens") and label is not None:
            parts.append(self.y_tokens(label))
        if words is not None:
            parts.append(words)
        return torch.cat(parts, dim=1) if parts else None

    def compute_patch_grid(self, x: Tensor) -> tuple[int, ...]:
        """Returns the number of patches of inputs x along each axis: (rows, columns), or (times, rows, columns) for
        clips.
        """
        sides = tuple(side // self.patch_size for side in x.shape[-2:])
        return (1 + (x.shape[2] - 1) // self.patch_frames, *sides) if self.patch_frames else sides

    def get_position_embeddings(self, grid: tuple[int, ...]) -> Tensor:
        """Returns the embeddings of the positions in a grid of patches, (1, N, D): the table pos_embed if the grid has
        the network's own rows and columns, else sines of the positions, computed once for each grid. For clips adds
        embeddings of the times, computed once for each number of them: a copy to the device would wait for it.
        """
        *times, high, wide = grid
        positions = self.pos_embed
        if not high == wide == self.grid:
            if (high, wide) not in self._positions:
                self._positions[high, wide] = self.compute_sincos_position_embeddings(high, wide)[None].to(
                    self.pos_embed.device
                )
            positions = self._positions[high, wide]
        for count in times:
            if (count,) not in self._positions:
                of_times = make_sincos_frame_positions(positions.shape[-1], count)
                self._positions[(count,)] = of_times.to(positions.device)
            positions = (self._positions[(count,)][:, None] + positions).flatten(0, 1)[None]
        return positions

    def compute_sincos_position_embeddings(self, rows: int, columns: int) -> Tensor:
        """Returns the sines and cosines that embed the positions in a grid of rows x columns patches, float32 (rows *
        columns, D). Without sines_within each side runs over the same range, whatever its number of patches. With
        sines_within the grid is the middle of a larger square.
        """
        within, base = self.sines_within or (None, self.range)
        return make_sincos_positions(self.pos_embed.shape[-1], rows, columns, base, within)

    def get_rotary_positions(
        self, grid: tuple[int, ...], head_dim: int, unrotated: int, device: torch.device
    ) -> Tensor:
        """Returns the rotary positions (see make_rotary_embedding) of the tokens in a grid of patches, and of
        `unrotated` further tokens, which are not rotated. Rows and columns run over the same range, whatever the number
        of patches. Computes them once and keeps them.
        """
        key = grid, head_dim, unrotated
        if key not in self._rotations:
            bases = (None,) * (len(grid) - 2) + (self.grid, self.grid)
            self._rotations[key] = make_rotary_embedding(grid, head_dim, bases, after=unrotated).to(device)
        return self._rotations[key]

    def unpatchify(self, x: Tensor, grid: tuple[int, ...]) -> Tensor:
        """Joins the values of patches to images, (B, N, p*p*C) -> (B, C, H, W), or to clips, (B, N, f*p*p*C) -> (B, C,
        T, H, W). grid: what `compute_patch_grid` returns for these inputs.
        """
        p, frames, (*times, high, wide) = self.patch_size, max(self.patch_frames, 1), grid
        x = x.view(len(x), *(times or [1]), high, wide, frames, p, p, self.out_channels)
        x = x.permute(0, 7, 1, 4, 2, 5, 3, 6)  # (B, C, t, f, h, p, w, p)
        x = x.reshape(len(x), self.out_channels, -1, high * p, wide * p)
        return x[:, :, frames - 1 :] if times else x[:, :, 0]


class PatchEmbed(nn.Module):
    """Embeds images (B, C, H, W) or clips (B, C, T, H, W) of any precision as tokens (B, N, D) in the precision of the
    weights.

    bottleneck   channels between a map of the patches, without bias, and one to the width (JiT, Li & He 2025); 0: one
                 map alone.
    frames       frames of a patch of clips, T = 1 + k * frames; 0: inputs are images. The first frame, repeated, is a
                 patch of its own (as the first latent frame of Wan and Phenaki), so that it may be given alone, and an
                 image is a clip.
    """

    def __init__(self, in_channels: int, dim: int, patch_size: int, bottleneck: int = 0, frames: int = 0) -> None:
        super().__init__()
        self.frames = frames
        self.proj = Patches(in_channels * max(frames, 1), bottleneck or dim, patch_size, bias=not bottleneck)
        self.wide = Linear(bottleneck, dim) if bottleneck else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        count, x = len(x), x.to(self.proj.weight.dtype)
        if self.frames:
            x = torch.cat((x[:, :, :1].expand(-1, -1, self.frames - 1, -1, -1), x), dim=2)
            x = x.unflatten(2, (-1, self.frames)).transpose(1, 2).flatten(2, 3).flatten(0, 1)  # (B t, C f, H, W)
        tokens = self.proj(x).flatten(2).transpose(1, 2)  # (B t, h w, D)
        return self.wide(tokens.reshape(count, -1, tokens.shape[-1]))


class WideHead(nn.Module):
    """Maps images (B, C, H, W) and a condition for each patch, (B, N, D), to the values of the patches (B, N, values),
    by a second and wider trunk over the image's own patches (RAE's DDT head, Zheng et al. 2025).
    """

    def __init__(
        self,
        patch_size: int,
        in_channels: int,
        dim: int,
        values: int,
        mlp_ratio: float,
        wide: Mapping[str, int],
        block: Mapping[str, str],
        patch_frames: int = 0,
    ) -> None:
        super().__init__()
        width, heads = wide["hidden_size"], wide["num_heads"]
        block = {**block, "modulation": "own", "text": "none"}
        self.head_dim = width // heads
        self.x_embedder = PatchEmbed(in_channels, width, patch_size, frames=patch_frames)
        self.projector = Linear(dim, width) if dim != width else nn.Identity()
        self.blocks = Trunk(Block(width, heads, mlp_ratio, **block) for _ in range(wide["depth"]))
        self.final_layer = FinalLayer(width, values, norm=block.get("norm", "layer"))

    def forward(self, image: Tensor, conditions: Tensor, rotation: Tensor | None) -> Tensor:
        """Returns the values of patches (B, N, values) for images (B, C, H, W) and a condition for each patch, (B, N,
        D). rotation: what DiT.get_rotary_positions returns; None: no rotary positions.
        """
        c, x = self.projector(conditions), take_rank_slice(self.x_embedder(image), 1)
        if rotation is not None:
            rotation = take_rank_slice(rotation, 2)
        x, _ = self.blocks(x, BlockInputs(c, rotation=rotation))
        return self.final_layer(x, c)


class Projector(nn.Sequential):
    """Maps tokens to the features of a frozen encoder, (B, N, D) -> (B, N, width): REPA (Yu et al. 2024).

    hidden   width of the two layers between, under SiLU; 0: one linear map (RAEv2).
    """

    def __init__(self, dim: int, width: int, hidden: int) -> None:
        if hidden:
            layers = Linear(dim, hidden), nn.SiLU(), Linear(hidden, hidden), nn.SiLU(), Linear(hidden, width)
        else:
            layers = (Linear(dim, width),)
        super().__init__(*layers)
