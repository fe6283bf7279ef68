"""Computes scaled dot-product attention for every system, by torch, in a precision in which the device is fast."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dstrain.nn.sequence import gather_heads_and_split_tokens, gather_tokens_and_split_heads, is_sharing, take_own_part

_HALVES = (torch.bfloat16, torch.float16)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    shared: int = 0,
) -> Tensor:
    """Returns multi-head attention, softmax(query key^T scale + added) value: query (B, heads, N, d), key and value (B,
    heads, M, d) -> (B, heads, N, d). On a CPU, bfloat16 and float16 are computed in float32, which is faster there.

    added    a float bias, broadcast to (B, heads, N, M); or a bool mask, True where a token may be read; None: neither.
    dropout  the share of attention weights that are dropped, also in evaluation mode.
    causal   whether a token reads only itself and those before it; not together with `added`.
    scale    None: 1 / sqrt(d).
    shared   0: this rank has all tokens. Above 0, inside share_tokens (sequence.py): ranks share the tokens, which form
             `shared` stretches of equal length, such as frames, and each rank has its part of every stretch. `added`
             covers all tokens and heads. All ranks that share the tokens call this together.
    """
    exchanges = shared > 0 and is_sharing()
    if exchanges:
        query, key, value = (gather_tokens_and_split_heads(x, shared) for x in (query, key, value))
        if added is not None and added.shape[1] > 1:
            added = take_own_part(added, 1)
    narrow = query.dtype
    if query.device.type == "cpu" and narrow in _HALVES:
        query, key, value = query.float(), key.float(), value.float()
        added = added.float() if added is not None and added.is_floating_point() else added
    out = F.scaled_dot_product_attention(query, key, value, added, dropout, is_causal=causal, scale=scale)
    out = out.to(narrow)
    return gather_heads_and_split_tokens(out, shared) if exchanges else out
