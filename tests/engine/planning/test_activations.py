"""What a pass keeps and what it costs, counted on the meta device."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dstrain.engine.blocks import wrap_block_forwards
from dstrain.engine.planning.activations import _run_fused_attention, count_activation_bytes, count_flops
from dstrain.nn.tokens import Attention, Mlp

B, N, D, H, DEPTH = 2, 8, 16, 24, 3  # samples, tokens, widths, blocks
TOKENS = B * N


def counted(block, recompute):
    """Bytes and FLOPs of several blocks with a shortcut, on a batch with a gradient, in float32."""
    with torch.device("meta"):
        network = nn.Sequential(*(block() for _ in range(DEPTH)))
        x = torch.empty(B, N, D, requires_grad=True)
    wrap_block_forwards(network, (type(network[0]),), recompute)

    def loss():
        return network(x).sum()

    return count_activation_bytes(loss, [x, *network.parameters()]), count_flops(loss)


@pytest.mark.parametrize(
    "recompute, numbers, products",
    [
        ("none", 2 * DEPTH * TOKENS * H + (DEPTH - 1) * TOKENS * D, 6),
        ("all", (DEPTH - 1) * TOKENS * D, 7),
        ("attention", DEPTH * TOKENS * (H + D), 6),
    ],
)
def test_a_feed_forward(recompute, numbers, products):
    """Oracle: by hand, in float32. What enters a layer is kept, or what leaves each product; the first input is not
    counted, the loss is. Two products forward, four backward; of the second pass the last product is left out.
    """
    size, work = counted(lambda: Mlp(D, H), recompute)
    assert size == 4 * (numbers + 1) and work == DEPTH * products * 2 * TOKENS * D * H


@pytest.mark.parametrize("recompute, with_weights, attention", [("none", 12, 3), ("attention", 12, 4), ("all", 15, 4)])
def test_the_work_of_attention(recompute, with_weights, attention):
    """Oracle: by hand: four products of D x D for a token, once forward and twice backward, three of them in a second
    pass; scores and their sum over values, 4 N^2 D for a sample, which `attention` computes a second time, too.
    """
    _, work = counted(lambda: Attention(D, 2), recompute)
    assert work == DEPTH * (with_weights * 2 * TOKENS * D * D + attention * 4 * B * N * N * D)


def test_fused_attention():
    """Oracle: by hand: no score is kept, but input, queries, keys and values, the result, a float for each row of
    scores, and some bytes of the generator. The plain products would keep 2 N^2 for each head.
    """
    size, _ = counted(lambda: Attention(D, 2), "none")
    assert 0 <= size - 4 * ((DEPTH - 1) * TOKENS * D + DEPTH * TOKENS * (4 * D + 2) + 1) <= 64 * DEPTH


def test_masks_of_fused_attention():
    """Oracle: torch's own function, of which the stand-in has the signature: kept is what is true, or what is added."""
    with torch.device("meta"):
        q, k, v = (torch.empty(B, 2, N, 8) for _ in range(3))
        allowed = torch.empty(B, 1, N, N, dtype=torch.bool)
        for mask in (None, allowed, torch.empty(B, 1, 1, N)):
            assert _run_fused_attention(q, k, v, mask).shape == F.scaled_dot_product_attention(q, k, v, mask).shape
    seen = []

    class Masks(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if "efficient_attention" in str(op):
                seen.append(args[3])
                return torch.empty_like(args[0]), None, None, None
            return op(*args, **(kwargs or {}))

    kept_ones = torch.tensor([True, False, True, True])
    q = torch.ones(1, 1, 4, 8)
    added = torch.tensor([0.5, -1.0, 0.0, 2.0])
    with Masks():
        _run_fused_attention(q, q, q, kept_ones)
        _run_fused_attention(q, q, q, added)
    assert seen[0][0, 0].tolist() == [[0.0, -math.inf, 0.0, 0.0]] * 4 and seen[1][0, 0].tolist() == [added.tolist()] * 4
