"""Computes scaled dot-product attention for every system, by torch, in a precision in which the device is fast."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dstrain.nn.sequence import (
    are_tokens_shared_among_ranks,
    gather_heads_and_split_tokens,
    gather_tokens_and_split_heads,
    take_rank_slice,
)

_HALVES = (torch.bfloat16, torch.float16)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    shared_stretches: int = 0,
) -> Tensor:
    """Returns multi-head attention, softmax(query key^T scale + attn_mask) value: query (B, heads, N, d), key and value
    (B, heads, M, d) -> (B, heads, N, d). On a CPU, bfloat16 and float16 are computed in float32, which is faster there.

    attn_mask         a float bias, broadcast to (B, heads, N, M); or a bool mask, True where a token may be read; None:
                      neither.
    dropout           the share of attention weights that are dropped, also in evaluation mode.
    causal            whether a token reads only itself and those before it; not together with `attn_mask`.
    scale             None: 1 / sqrt(d).
    shared_stretches  0: this rank has all tokens. Above 0, inside share_tokens_among_ranks (sequence.py): ranks share
                      the tokens, which form so many stretches of equal length, such as frames, and each rank has its
                      part of every stretch. `attn_mask` covers all tokens and heads. All ranks that share the tokens
                      call this together.
    """
    exchanges = shared_stretches > 0 and are_tokens_shared_among_ranks()
    if exchanges:
        query, key, value = (gather_tokens_and_split_heads(x, shared_stretches) for x in (query, key, value))
        if attn_mask is not None and attn_mask.shape[1] > 1:
            attn_mask = take_rank_slice(attn_mask, 1)
    narrow = query.dtype
    if query.device.type == "cpu" and narrow in _HALVES:
        query, key, value = query.float(), key.float(), value.float()
        attn_mask = attn_mask.float() if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    out = F.scaled_dot_product_attention(query, key, value, attn_mask, dropout, is_causal=causal, scale=scale)
    out = out.to(narrow)
    return gather_heads_and_split_tokens(out, shared_stretches) if exchanges else out
