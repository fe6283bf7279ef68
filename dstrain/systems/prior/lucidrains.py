"""The prior's network as in lucidrains' DALLE2-pytorch (DiffusionPriorNetwork), of which LAION has published weights.

Its tokens are those of network.py, with the previous prediction before the query: [text encodings, text embed,
timestep, noisy image embed, (previous prediction), learned query]. All have the width D of an image embedding. Other
differences: positions are rotary, and T5's relative bias is added; all heads share one key and one value, and a learned
null token stands before the others; similarities are cosines; the MLP is SwiGLU; a short text is filled up with learned
encodings, which every later token sees.

Layout and state-dict names are the original's: its files load, whose names begin with `net.`. Notation: B samples, L
text tokens, N tokens in all, d = dim_head.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain.nn.attention import attend
from dstrain.nn.layers import Embedding, Linear, make_dropout

_COSINE_SCALE = 16.0  # the temperature of cosines
_PLAIN_BIAS = 128.0  # versions without cosines multiply the relative bias by this
_BUCKETS, _FARTHEST = 32, 128  # of RelativeBias: rows of its table, and the distance from which all share the last row
_ROTATED = 32  # channels of a head that are rotated, at most
_HIDDEN = -10000.0  # added to the scores of tokens that a token may not see


class LucidrainsPrior(nn.Module):
    """Predicts image embeddings from noisy ones, timesteps and texts, as PriorTransformer does.

    timesteps          rows of the table of timesteps; None embeds them by sinusoids and an MLP.
    reads_encodings    whether text encodings are read; if not, learned ones take their places.
    learns_null        whether there are null_text_embeds, which with null_text_encodings replace `dropped` texts.
    learns_null_image  whether there is a null_image_embed, which replaces noisy embeddings that are `image_dropped`.
    """

    def __init__(
        self,
        dim: int,
        max_text_len: int,
        depth: int,
        heads: int,
        dim_head: int,
        dropout: float = 0.0,
        *,
        timesteps: int | None = 1000,
        ff_mult: int = 4,
        norm_in: bool = False,
        norm_out: bool = True,
        final_proj: bool = True,
        normformer: bool = False,
        rotary_emb: bool = True,
        cosine_similarity: bool = True,
        self_cond: bool = False,
        reads_encodings: bool = True,
        learns_null: bool = True,
        learns_null_image: bool = True,
    ) -> None:
        super().__init__()
        self.dim, self.max_text_len = dim, max_text_len
        self.reads_encodings, self.self_cond = reads_encodings and max_text_len > 0, self_cond
        self.to_time_embeds = nn.Sequential(
            Embedding(timesteps, dim) if timesteps else nn.Sequential(Sinusoids(dim), TimestepMLP(dim))
        )
        self.learned_query = nn.Parameter(torch.empty(dim))
        self.null_text_encodings = nn.Parameter(torch.empty(1, max_text_len, dim)) if max_text_len else None
        self.null_text_embeds = nn.Parameter(torch.empty(1, 1, dim)) if learns_null else None
        self.null_image_embed = nn.Parameter(torch.empty(1, dim)) if learns_null_image else None
        self.causal_transformer = CausalTransformer(
            dim,
            depth,
            heads,
            dim_head,
            ff_mult,
            dropout,
            norm_in=norm_in,
            norm_out=norm_out,
            final_proj=final_proj,
            normformer=normformer,
            rotary_emb=rotary_emb,
            cosine_similarity=cosine_similarity,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the initial values of the learned query and the null inputs to normal(0.02). All other weights belong to
        submodules, which set their own.
        """
        for table in (self.learned_query, self.null_text_encodings, self.null_text_embeds, self.null_image_embed):
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
        image_dropped: Tensor | None = None,
    ) -> Tensor:
        """Returns the prediction (B, D) for noisy embeddings x (B, D).

        t               (B,), timesteps.
        text_embed      (B, D), text embeddings.
        text_encodings  (B, L, D), one vector for each text token.
        text_mask       bool (B, L), False for padding, which is replaced by a learned encoding. None: encodings that
                        are all zeros are padding.
        dropped         bool (B,), True for samples whose text is replaced by null inputs; None: none.
        self_cond       (B, D), the x_start predicted before.
        image_dropped   bool (B,), True for samples whose x is replaced by a null input; None: none.
        """
        dtype = self.learned_query.dtype
        x, text_embed = x.to(dtype), text_embed.to(dtype)
        tokens = []
        if self.max_text_len:
            encodings = self.null_text_encodings.expand(len(x), -1, -1)
            if self.reads_encodings:
                seen = (text_encodings != 0).any(dim=-1) if text_mask is None else text_mask
                seen = seen if dropped is None else seen & ~dropped[:, None]
                encodings = torch.where(seen[:, :, None], text_encodings.to(dtype), encodings)
            tokens.append(encodings)  # (B, L, D)
        if dropped is not None:
            text_embed = torch.where(dropped[:, None], self.null_text_embeds[0], text_embed)
        if image_dropped is not None:
            x = torch.where(image_dropped[:, None], self.null_image_embed, x)
        last = (self_cond.to(dtype),) if self.self_cond else ()
        single = (text_embed, self.to_time_embeds(t), x, *last, self.learned_query.expand(len(x), -1))
        tokens = torch.cat((*tokens, torch.stack(single, dim=1)), dim=1)  # (B, N, D)
        return self.causal_transformer(tokens)[:, -1]


class CausalTransformer(nn.Module):
    """Blocks in which a token sees itself and earlier ones: (B, N, D) -> (B, N, D). The options norm_in, norm_out and
    final_proj add a norm before the first block, a norm behind the last one, and a linear layer at the end.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        dim_head: int,
        ff_mult: int,
        dropout: float,
        *,
        norm_in: bool,
        norm_out: bool,
        final_proj: bool,
        normformer: bool,
        rotary_emb: bool,
        cosine_similarity: bool,
    ) -> None:
        super().__init__()
        self.init_norm = GainNorm(dim) if norm_in else nn.Identity()
        self.rel_pos_bias = RelativeBias(heads)
        self.layers = nn.ModuleList(
            LucidrainsBlock(
                dim,
                heads,
                dim_head,
                ff_mult,
                dropout,
                normformer=normformer,
                rotary_emb=rotary_emb,
                cosine_similarity=cosine_similarity,
            )
            for _ in range(depth)
        )
        self.norm = GainNorm(dim, by_largest=True) if norm_out else nn.Identity()
        self.project_out = Linear(dim, dim, bias=False) if final_proj else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.init_norm(x), self.rel_pos_bias(x.shape[1])
        for block in self.layers:
            x = block(x, bias)
        return self.project_out(self.norm(x))


class LucidrainsBlock(nn.ModuleList):
    """Attention and MLP, each on normalized tokens and added to them. It is a ModuleList for the original's state-dict
    names.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        dim_head: int,
        ff_mult: int,
        dropout: float,
        *,
        normformer: bool,
        rotary_emb: bool,
        cosine_similarity: bool,
    ) -> None:
        inner = ff_mult * dim
        mlp = nn.Sequential(
            GainNorm(dim),
            Linear(dim, 2 * inner, bias=False),
            SwiGLU(),
            GainNorm(inner) if normformer else nn.Identity(),
            make_dropout(dropout),
            Linear(inner, dim, bias=False),
        )
        super().__init__([SharedKeyAttention(dim, heads, dim_head, dropout, rotary_emb, cosine_similarity), mlp])

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        attention, mlp = self
        x = x + attention(x, bias)
        return x + mlp(x)


class SharedKeyAttention(nn.Module):
    """Causal attention whose heads share one key and one value (Shazeer 2019), with a learned null token before all
    others.

    Scores are cosines times 16; without cosine_similarity they are q.k / sqrt(d), and the relative bias is multiplied
    by 128.
    """

    def __init__(
        self, dim: int, heads: int, dim_head: int, dropout: float, rotary_emb: bool, cosine_similarity: bool
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.rotary_emb, self.cosine = heads, dropout, rotary_emb, cosine_similarity
        self.norm = GainNorm(dim)
        self.null_kv = nn.Parameter(torch.empty(2, dim_head))
        self.to_q = Linear(dim, heads * dim_head, bias=False)
        self.to_kv = Linear(dim, 2 * dim_head, bias=False)
        self.to_out = nn.Sequential(Linear(heads * dim_head, dim, bias=False), GainNorm(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.null_kv)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Maps tokens (B, N, D) to tokens (B, N, D). bias: what RelativeBias returns, (heads, N, N + 1), for the
        attention scores.
        """
        batch, count, _ = x.shape
        x = self.norm(x)
        query = self.to_q(x).view(batch, count, self.heads, -1).transpose(1, 2)  # (B, heads, N, d)
        key, value = self.to_kv(x).chunk(2, dim=-1)  # (B, N, d) each
        if self.rotary_emb:
            query, key = apply_rotary_positions(query), apply_rotary_positions(key)
        key, value = (
            torch.cat((null.expand(batch, 1, -1), tokens), dim=1)[:, None].expand(-1, self.heads, -1, -1)
            for null, tokens in zip(self.null_kv, (key, value))
        )  # (B, heads, N + 1, d)
        if self.cosine:
            query, key, scale = F.normalize(query, dim=-1), F.normalize(key, dim=-1), _COSINE_SCALE
        else:
            bias, scale = _PLAIN_BIAS * bias, query.shape[-1] ** -0.5
        later = torch.full((count, count + 1), _HIDDEN, dtype=bias.dtype, device=x.device).triu(2)
        x = attend(
            query, key, value, (bias + later)[None].to(query.dtype), self.dropout if self.training else 0.0, scale=scale
        )
        return self.to_out(x.transpose(1, 2).reshape(batch, count, -1))


class RelativeBias(nn.Module):
    """Computes T5's learned bias by distance (Raffel et al. 2020) for N tokens: (heads, N, N + 1). Key 0 is the null
    token; the distance of query i and key j is max(i - j, 0).
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.relative_attention_bias = Embedding(_BUCKETS, heads, std=1.0)

    def forward(self, count: int) -> Tensor:
        """Returns the bias (heads, N, N + 1) for N = `count` tokens, which attention adds to its scores."""
        places = torch.arange(count + 1, device=self.relative_attention_bias.weight.device)
        distance = (places[:count, None] - places[None]).clamp(min=0)  # (N, N + 1)
        exact = _BUCKETS // 2
        steps = torch.log(distance.clamp(min=exact).float() / exact) / math.log(_FARTHEST / exact) * (_BUCKETS - exact)
        far = (exact + steps.long()).clamp(max=_BUCKETS - 1)
        return self.relative_attention_bias(torch.where(distance < exact, distance, far)).permute(2, 0, 1)


class GainNorm(nn.Module):
    """LayerNorm with a gain and no bias. With `by_largest` values are divided by the largest entry of their token
    before.
    """

    def __init__(self, dim: int, by_largest: bool = False) -> None:
        super().__init__()
        self.by_largest = by_largest
        self.g = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.g)

    def forward(self, x: Tensor) -> Tensor:
        if self.by_largest:
            x = x / x.amax(dim=-1, keepdim=True).detach()
        return F.layer_norm(x, self.g.shape, self.g)


class SwiGLU(nn.Module):
    """Multiplies the first half of the channels by SiLU of the second half: (..., 2 n) -> (..., n)."""

    def forward(self, x: Tensor) -> Tensor:
        x, gate = x.chunk(2, dim=-1)
        return x * F.silu(gate)


class Sinusoids(nn.Module):
    """Embeds timesteps: (B,) -> float32 (B, dim), first sines, then cosines, of frequencies from 1 to 1 / 10000 (both
    included).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, t: Tensor) -> Tensor:
        half = self.dim // 2
        rates = torch.exp(torch.arange(half, device=t.device) * (-math.log(10000) / (half - 1)))
        angles = t.float()[:, None] * rates
        return torch.cat((angles.sin(), angles.cos()), dim=-1)


class TimestepMLP(nn.Module):
    """Three linear layers with SiLU between them, the inner ones of twice the width: (B, dim) -> (B, dim)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Sequential(Linear(dim, 2 * dim), nn.SiLU()),
            nn.Sequential(Linear(2 * dim, 2 * dim), nn.SiLU()),
            Linear(2 * dim, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.to(self.net[2].weight.dtype))


def apply_rotary_positions(x: Tensor) -> Tensor:
    """Returns x (..., N, d) with rotary positions (Su et al. 2021). In the first 32 channels, or in all if there are
    fewer, each pair of neighbouring channels is rotated by an angle that grows with the token's position.
    """
    count, width = x.shape[-2], min(_ROTATED, x.shape[-1])
    rates = 10000.0 ** -(torch.arange(0, width, 2, device=x.device).float() / width)
    angles = torch.arange(count, device=x.device).float()[:, None] * rates  # (N, width / 2)
    pairs = x[..., :width].float().unflatten(-1, (-1, 2))
    even, odd, cos, sin = pairs[..., 0], pairs[..., 1], angles.cos(), angles.sin()
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((turned.to(x.dtype), x[..., width:]), dim=-1)
