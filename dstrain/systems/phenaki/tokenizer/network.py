"""C-ViViT, the tokenizer of Villegas et al. 2022 (Phenaki, section 2.1): it encodes clips of any length to tokens, and
decodes tokens.

The first frame is a latent frame of its own, so that an image is a clip of one frame; later frames are taken p at a
time. A spatial transformer attends within a latent frame, a temporal one to earlier latent frames at the same place.
The decoder has the same two in reverse order. No output of encoder or decoder depends on later latent frames. So the
beginning of a clip has the same tokens and pictures as in the whole clip, and padding at the end changes nothing:
attention needs no mask for it.

Notation: B clips of T = 1 + k p frames, C x H x W pixels in [-1, 1], p = temporal_patch_size; the tokens' grid has t =
1 + k latent frames of h x w places; D = dim. Patches have no LayerNorm, unlike those of phenaki-pytorch.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dstrain.nn.finite_scalar import FiniteScalar
from dstrain.nn.layers import Linear
from dstrain.nn.lookup_free import CosineQuantizer, LookupFree, Quantized
from dstrain.nn.quantize import upcast_to_float32
from dstrain.nn.sequence import gather_rank_slices, take_rank_slice, take_rank_slice_after_gathering
from dstrain.recipe import ConfigError
from dstrain.systems.phenaki.transformer import ROWS, PositionBias, Transformer, build_alibi_bias


class CViViTOutput(NamedTuple):
    """The outputs of one forward pass, for the loss. Terms are means over a clip's real tokens, see
    nn/lookup_free.Quantized.
    """

    video: Tensor  # (B, T, C, H, W); padded frames hold anything
    tokens: Tensor  # int64 (B, t, h, w)
    commitment: Tensor  # (B,)
    codebook: Tensor  # (B,)
    entropy: Tensor  # (B,)
    shares: Tensor  # (B, codes by group)


class CViViT(nn.Module):
    """Encodes clips to tokens, and decodes tokens to clips.

    image_size         pixels, one number or [height, width]; patch_size must divide each.
    spatial_depth      blocks of the spatial transformer, in the encoder and in the decoder; temporal_depth alike.
    quantizer          lookup_free or cosine, see nn/lookup_free, or fsq, see nn/finite_scalar.
    inv_temperature    of lookup_free: sharpness of p(c|z). levels are those of fsq.
    codebook_dim       of cosine: width of an entry.

    Raises ConfigError if patch_size does not divide image_size.
    """

    def __init__(
        self,
        dim: int = 512,
        codebook_size: int = 8192,
        image_size: int | tuple[int, int] = 128,
        patch_size: int = 8,
        temporal_patch_size: int = 2,
        spatial_depth: int = 4,
        temporal_depth: int = 4,
        dim_head: int = 64,
        heads: int = 8,
        channels: int = 3,
        *,
        quantizer: str = "lookup_free",
        levels: tuple[int, ...] | None = None,
        codebook_dim: int = 32,
        inv_temperature: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        if height % patch_size or width % patch_size:
            raise ConfigError(f"patch_size: {patch_size} does not divide image_size {height} x {width}")
        self.grid = (height // patch_size, width // patch_size)
        self.patch_size, self.temporal_patch_size, self.heads = patch_size, temporal_patch_size, heads
        values = channels * patch_size**2

        def build_transformer_over(axes: str) -> Transformer:
            """Returns the transformer that attends over "space" or "time"."""
            depth = spatial_depth if axes == "space" else temporal_depth
            return Transformer(dim, depth, heads, dim_head, causal=True, dropout=dropout, over=axes)

        self.to_patch_emb_first_frame = Linear(values, dim)
        self.to_patch_emb = Linear(temporal_patch_size * values, dim)
        self.spatial_rel_pos_bias = PositionBias(heads, dim)
        self.enc_spatial_transformer, self.enc_temporal_transformer = (
            build_transformer_over("space"),
            build_transformer_over("time"),
        )
        if quantizer == "lookup_free":
            self.vq = LookupFree(dim, codebook_size, inv_temperature)
        elif quantizer == "fsq":
            self.vq = FiniteScalar(dim, levels)
        else:
            self.vq = CosineQuantizer(dim, codebook_size, codebook_dim)
        self.dec_temporal_transformer, self.dec_spatial_transformer = (
            build_transformer_over("time"),
            build_transformer_over("space"),
        )
        self.to_pixels_first_frame, self.to_pixels = Linear(dim, values), Linear(dim, temporal_patch_size * values)

    def forward(self, video: Tensor, frames: Tensor) -> CViViTOutput:
        """Encodes clips (B, T, C, H, W) to tokens and decodes them. The first `frames`, int64 (B,), frames of a clip
        are real, the rest is padding. Returns a CViViTOutput: the reconstructed clips, the tokens, and the quantizer's
        loss terms.
        """
        bias = self.spatial_rel_pos_bias(*self.grid)  # (heads, hw, hw)
        x = self._encode_to_vectors(video, frames, bias)
        real = mark_latent_frames_without_padding(frames, self.temporal_patch_size, x.shape[1])[:, :, None, None]
        quantized: Quantized = self.vq(x, real.expand(x.shape[:-1]).float())
        return CViViTOutput(self._decode_vectors(quantized.x, bias), *quantized[1:])

    def encode_to_tokens(self, video: Tensor, frames: Tensor | None = None) -> Tensor:
        """Encodes clips (B, T, C, H, W) to tokens, int64 (B, t, h, w). `frames`, int64 (B,), is the number of real
        frames of each clip; None: all are real.
        """
        if frames is None:
            frames = torch.full((len(video),), video.shape[1], device=video.device)
        return self.vq.encode(self._encode_to_vectors(video, frames, self.spatial_rel_pos_bias(*self.grid)))

    def decode_tokens(self, tokens: Tensor) -> Tensor:
        """Decodes tokens, int64 (B, t, h, w), to clips (B, T, C, H, W) in [-1, 1]."""
        return self._decode_vectors(self.vq.decode(tokens), self.spatial_rel_pos_bias(*self.grid)).clamp(-1, 1)

    def _encode_to_vectors(self, video: Tensor, frames: Tensor, bias: Tensor) -> Tensor:
        """Returns the encoder's vectors, (B, t, h, w, D), before quantization, of clips (B, T, C, H, W) with `frames`,
        int64 (B,), real frames. `bias` (heads, h w, h w) is that of spatial attention.
        """
        video = video.to(self.to_patch_emb.weight.dtype)
        counted = mark_frames_in_full_patches(frames, self.temporal_patch_size, video.shape[1])  # (B, T)
        video = torch.where(counted[:, :, None, None, None], video, 0.0)  # padding may hold NaN
        # For a single frame the second embedding runs on an empty batch, so that its weights have a gradient, 0.
        first = self.to_patch_emb_first_frame(take_rank_slice(self._cut_patches(video[:, :1], 1), ROWS))
        later = self.to_patch_emb(take_rank_slice(self._cut_patches(video[:, 1:], self.temporal_patch_size), ROWS))
        x = torch.cat((first, later), dim=1)  # (B, t, h, w, D)
        x = self.enc_spatial_transformer(x, bias)
        return gather_rank_slices(self.enc_temporal_transformer(x, build_alibi_bias(self.heads, x.shape[1], x)), ROWS)

    def _decode_vectors(self, x: Tensor, bias: Tensor) -> Tensor:
        """Decodes quantized vectors (B, t, h, w, D) to clips, float32 (B, T, C, H, W). `bias` (heads, h w, h w) is that
        of spatial attention.
        """
        x = take_rank_slice_after_gathering(
            x, ROWS
        )  # the encoder's tokens were gathered for the quantizer, which measures whole clips
        x = self.dec_temporal_transformer(x, build_alibi_bias(self.heads, x.shape[1], x))
        x = self.dec_spatial_transformer(x, bias)
        first = self._join_patches(gather_rank_slices(self.to_pixels_first_frame(x[:, :1]), ROWS), 1)
        later = self._join_patches(gather_rank_slices(self.to_pixels(x[:, 1:]), ROWS), self.temporal_patch_size)
        return upcast_to_float32(torch.cat((first, later), dim=1))

    def _cut_patches(self, video: Tensor, patch_frames: int) -> Tensor:
        """Cuts clips (B, t * patch_frames, C, H, W) into patches of `patch_frames` frames and s x s pixels, s being
        patch_size: (B, t, h, w, patch_frames * C * s * s).
        """
        (h, w), s = self.grid, self.patch_size
        batch, count, channels = video.shape[:3]
        x = video.reshape(batch, count // patch_frames, patch_frames, channels, h, s, w, s)
        return x.permute(0, 1, 4, 6, 2, 3, 5, 7).flatten(4)

    def _join_patches(self, x: Tensor, patch_frames: int) -> Tensor:
        """Inverts `_cut_patches`: (B, t, h, w, patch_frames * C * s * s) -> (B, t * patch_frames, C, H, W)."""
        (h, w), s = self.grid, self.patch_size
        batch, count = x.shape[:2]
        channels = x.shape[-1] // (patch_frames * s * s)
        x = x.reshape(batch, count, h, w, patch_frames, channels, s, s)
        return x.permute(0, 1, 4, 5, 2, 6, 3, 7).reshape(batch, count * patch_frames, channels, h * s, w * s)


def mark_latent_frames_without_padding(frames: Tensor, temporal_patch_size: int, num_latent_frames: int) -> Tensor:
    """Returns bool (B, num_latent_frames), True for the latent frames of each clip that are made of real frames only.
    `frames`, int64 (B,), is the number of real frames of each clip, `num_latent_frames` the number of latent frames.
    """
    return torch.arange(num_latent_frames, device=frames.device) < 1 + (frames[:, None] - 1) // temporal_patch_size


def count_frames_in_full_patches(frames: Tensor, temporal_patch_size: int) -> Tensor:
    """Returns how many frames of each clip lie in latent frames that are made of real frames only, int64 (B,).
    `frames`, int64 (B,), is the number of real frames of each clip.
    """
    return 1 + temporal_patch_size * ((frames - 1) // temporal_patch_size)


def mark_frames_in_full_patches(frames: Tensor, temporal_patch_size: int, num_frames: int) -> Tensor:
    """Returns bool (B, num_frames), True for the frames of each clip that lie in latent frames made of real frames
    only. `frames`, int64 (B,), is the number of real frames of each clip, `num_frames` the number of all frames.
    """
    return (
        torch.arange(num_frames, device=frames.device)
        < count_frames_in_full_patches(frames, temporal_patch_size)[:, None]
    )
