"""The prior of Ramesh et al. 2022 ("Hierarchical Text-Conditional Image Generation with CLIP Latents"), section 2.2.

A causal transformer over the sequence [text encodings, text embed, timestep, noisy image embed, learned query]; its
prediction is the output at the query. Notation: B samples, L text tokens, N = L + 4 tokens, W = heads * dim_head the
width; D, T and E are the widths of an image embedding, a text embedding and a text encoding.

Layout and state-dict names are those of diffusers' PriorTransformer, whose files load unchanged. There are two more
kinds of weights. null_text_* replace the inputs of a dropped text, so that diffusers' network can be given them as its
inputs, too. self_cond_proj adds the previous prediction to the noisy image embedding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain.nn.attention import attend
from dstrain.nn.layers import Linear, chain_named_layers, compute_timestep_features, make_dropout

EXTRA_TOKENS = 4  # text embed, timestep, noisy image embed, learned query
_HIDDEN = -10000.0  # added to the scores of tokens that a token may not see


class PriorTransformer(nn.Module):
    """Predicts image embeddings, or their noise, from noisy image embeddings, timesteps and texts.

    max_text_len        L; with 0 the text embedding is the only condition.
    learns_null         whether there are null_text_embed and null_text_encodings, which replace `dropped` texts.
    self_cond           whether the previous prediction is an input.
    norm_in             whether a LayerNorm stands before the first block.
    embedding_proj_norm whether a LayerNorm stands before the text embedding's projection.
    dropout             share of values dropped after attention and within the MLP.
    """

    def __init__(
        self,
        image_embed_dim: int = 768,
        text_embed_dim: int = 768,
        text_encodings_dim: int = 768,
        max_text_len: int = 77,
        depth: int = 12,
        heads: int = 12,
        dim_head: int = 64,
        dropout: float = 0.0,
        *,
        learns_null: bool = True,
        self_cond: bool = False,
        norm_in: bool = False,
        embedding_proj_norm: bool = False,
    ) -> None:
        super().__init__()
        width = heads * dim_head
        self.width, self.max_text_len = width, max_text_len
        self.time_embedding = TimestepEmbedding(width)
        self.proj_in = Linear(image_embed_dim, width)
        self.embedding_proj_norm = nn.LayerNorm(text_embed_dim) if embedding_proj_norm else None
        self.embedding_proj = Linear(text_embed_dim, width)
        self.encoder_hidden_states_proj = Linear(text_encodings_dim, width) if max_text_len else None
        self.self_cond_proj = Linear(image_embed_dim, width, bias=False, init="zero") if self_cond else None
        self.positional_embedding = nn.Parameter(torch.empty(1, max_text_len + EXTRA_TOKENS, width))
        self.prd_embedding = nn.Parameter(torch.empty(1, 1, width))
        self.null_text_embed = nn.Parameter(torch.empty(1, text_embed_dim)) if learns_null else None
        self.null_text_encodings = (
            nn.Parameter(torch.empty(1, max_text_len, text_encodings_dim)) if learns_null and max_text_len else None
        )
        self.transformer_blocks = nn.ModuleList(PriorBlock(width, heads, dropout) for _ in range(depth))
        self.norm_in = nn.LayerNorm(width) if norm_in else None
        self.norm_out = nn.LayerNorm(width)
        self.proj_to_clip_embeddings = Linear(width, image_embed_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the initial values of positions, learned query and null texts to normal(0.02). All other weights belong
        to submodules, which set their own.
        """
        for table in (self.positional_embedding, self.prd_embedding, self.null_text_embed, self.null_text_encodings):
            if table is not None:
                nn.init.normal_(table, std=0.02)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        text_embed: Tensor,
        text_encodings: Tensor | None = None,
        text_mask: Tensor | None = None,
        dropped: Tensor | None = None,
        self_cond: Tensor | None = None,
    ) -> Tensor:
        """Returns the prediction (B, D) for noisy embeddings x (B, D).

        t               (B,), timesteps.
        text_embed      (B, T), text embeddings.
        text_encodings  (B, L, E), one vector for each text token.
        text_mask       bool (B, L), False for padding, which no token sees. None: every token sees all others, also
                        later ones, as in the published network. PriorSystem always gives a mask.
        dropped         bool (B,), True for samples whose text is replaced by the null text; None: none.
        self_cond       (B, D), the x_start predicted before.
        """
        dtype = self.proj_in.weight.dtype
        if dropped is not None:
            text_embed = torch.where(dropped[:, None], self.null_text_embed, text_embed)
            if self.max_text_len:
                text_encodings = torch.where(dropped[:, None, None], self.null_text_encodings, text_encodings)
                text_mask = text_mask | dropped[:, None]
        text_embed = text_embed.to(dtype)
        if self.embedding_proj_norm is not None:
            text_embed = self.embedding_proj_norm(text_embed)
        image = self.proj_in(x.to(dtype))  # (B, W)
        if self.self_cond_proj is not None:
            image = image + self.self_cond_proj(self_cond.to(dtype))
        tokens = torch.stack((self.embedding_proj(text_embed), self.time_embedding(t), image), dim=1)
        tokens = torch.cat((tokens, self.prd_embedding.expand(len(x), -1, -1)), dim=1)  # (B, 4, W)
        if self.max_text_len:
            tokens = torch.cat((self.encoder_hidden_states_proj(text_encodings.to(dtype)), tokens), dim=1)
        tokens = tokens + self.positional_embedding  # (B, N, W)
        if self.norm_in is not None:
            tokens = self.norm_in(tokens)
        mask = self._make_attention_mask(text_mask, tokens)
        for block in self.transformer_blocks:
            tokens = block(tokens, mask)
        return self.proj_to_clip_embeddings(self.norm_out(tokens)[:, -1])  # (B, D)

    def _make_attention_mask(self, text_mask: Tensor | None, tokens: Tensor) -> Tensor | None:
        """Returns a mask to add to attention scores, (B, 1, N, N): 0 where a token may see another, a large negative
        number where it may not. A token sees itself and earlier tokens, but no padding. Returns None if `text_mask` is
        None.
        """
        if text_mask is None:
            return None
        count = tokens.shape[1]
        later = torch.full((count, count), _HIDDEN, dtype=tokens.dtype, device=tokens.device).triu(1)
        padding = F.pad((~text_mask).to(tokens.dtype) * _HIDDEN, (0, EXTRA_TOKENS))  # (B, N)
        return padding[:, None, None] + later


class PriorBlock(nn.Module):
    """Attention and MLP, each on normalized tokens and added to them."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn1 = Attention(width, heads, dropout)
        self.norm3 = nn.LayerNorm(width)
        self.ff = chain_named_layers(
            net=nn.Sequential(
                chain_named_layers(proj=Linear(width, 4 * width), gelu=nn.GELU()),
                make_dropout(dropout),
                Linear(4 * width, width),
            )
        )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Maps tokens (B, N, W) to tokens (B, N, W). The mask, (B, 1, N, N) or None, is added to the
        attention scores.
        """
        x = x + self.attn1(self.norm1(x), mask)
        return x + self.ff(self.norm3(x))


class Attention(nn.Module):
    """Multi-head self-attention; query, key and value have a layer each, as published: (B, N, W) -> (B, N, W)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = Linear(width, width), Linear(width, width), Linear(width, width)
        self.to_out = nn.Sequential(Linear(width, width), make_dropout(dropout))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Maps tokens (B, N, W) to tokens (B, N, W). The mask, (B, 1, N, N) or None, is added to the
        attention scores.
        """
        batch, count, width = x.shape

        def split_heads(y):
            return y.view(batch, count, self.heads, width // self.heads).transpose(1, 2)

        x = attend(split_heads(self.to_q(x)), split_heads(self.to_k(x)), split_heads(self.to_v(x)), mask)
        return self.to_out(x.transpose(1, 2).reshape(batch, count, width))


class TimestepEmbedding(nn.Module):
    """Embeds timesteps by sinusoids and an MLP: (B,) -> (B, W). The sinusoids are float32, since bfloat16 cannot tell
    timesteps apart.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.linear_1, self.linear_2 = Linear(width, width), Linear(width, width)

    def forward(self, t: Tensor) -> Tensor:
        features = compute_timestep_features(t, self.width).to(self.linear_1.weight.dtype)
        return self.linear_2(F.silu(self.linear_1(features)))
