"""The transformer that tokenizer and token models share."""

import math

import pytest
import torch
import torch.nn.functional as F

from dstrain.systems.phenaki.transformer import (
    Attention,
    FeedForward,
    PositionBias,
    PositionEncoder3d,
    Transformer,
    build_alibi_bias,
)


def by_hand(layer, x, context=None, seen=None, bias=None, causal=False):
    """Attention head by head and query by query, in the words of the paper: a sum over what is seen."""
    normal = F.layer_norm(x, x.shape[-1:], layer.norm.weight, layer.norm.bias)
    source = (
        normal
        if context is None
        else F.layer_norm(context, context.shape[-1:], layer.context_norm.weight, layer.context_norm.bias)
    )

    def unit(v, gain):
        return v / v.norm() * gain

    keys, values = (source @ layer.to_kv.weight.T).chunk(2, -1)
    width = layer.to_q.out_features // layer.heads
    out = torch.zeros(*x.shape[:2], width * layer.heads)
    for b, head, n in torch.cartesian_prod(*map(torch.arange, (len(x), layer.heads, x.shape[1]))).tolist():
        part = slice(head * width, (head + 1) * width)
        query = unit((normal[b, n] @ layer.to_q.weight.T)[part], layer.q_norm.weight)
        weights = {}
        for m in range(source.shape[1]):
            if (seen is None or seen[b, m]) and not (causal and m > n):
                score = 8 * query @ unit(keys[b, m, part], layer.k_norm.weight)
                weights[m] = math.exp(score + (0 if bias is None else bias[head, n, m]))
        for m, weight in weights.items():
            out[b, n, part] += weight / sum(weights.values()) * values[b, m, part]
    return out @ layer.to_out.weight.T


def random(module):
    """With weights that are all random, so that none hides what it does."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return module.eval()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_self_attention(causal, biased, masked):
    """Oracle: the formula by hand."""
    torch.manual_seed(0)
    layer, x = random(Attention(6, 2, 4)), torch.randn(2, 5, 6)
    bias = torch.randn(2, 5, 5) if biased else None
    seen = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]]).bool() if masked else None
    with torch.no_grad():
        torch.testing.assert_close(layer(x, None, seen, bias, causal), by_hand(layer, x, None, seen, bias, causal))


def test_cross_attention():
    """Oracle: the formula by hand; 0 where nothing is seen, whatever the context holds."""
    torch.manual_seed(0)
    layer, x, context = random(Attention(6, 2, 4, context_dim=3)), torch.randn(2, 4, 6), torch.randn(2, 5, 3)
    seen = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0]]).bool()
    with torch.no_grad():
        found = layer(x, context, seen)
        torch.testing.assert_close(found[:1], by_hand(layer, x[:1], context[:1], seen[:1]))
        assert bool((found[1] == 0).all())
        context[~seen] = 1e3
        assert torch.equal(layer(x, context, seen), found)


def test_attention_without_anything_to_see_has_gradients():
    """Oracle: gradients that are 0 and finite, rather than none or NaN."""
    layer, x = Attention(6, 2, 4, context_dim=3), torch.randn(2, 4, 6, requires_grad=True)
    layer(x, torch.randn(2, 5, 3), torch.zeros(2, 5).bool()).sum().backward()
    assert all(bool((weight.grad == 0).all()) for weight in (layer.to_q.weight, layer.to_kv.weight))


def test_feed_forward():
    """Oracle: GEGLU by hand; the weights of a plain one of four times the width, up to a multiple of 8."""
    torch.manual_seed(0)
    layer, x = random(FeedForward(10)), torch.randn(3, 10)
    value, gate = (F.layer_norm(x, (10,), layer.norm.weight, layer.norm.bias) @ layer.widen.weight.T).chunk(2, -1)
    gelu = gate * (1 + torch.erf(gate / math.sqrt(2))) / 2
    torch.testing.assert_close(layer(x), (value * gelu) @ layer.narrow.weight.T)
    assert layer.narrow.in_features == 32 and FeedForward(512).narrow.in_features == 1368


@pytest.mark.parametrize("causal", [False, True])
def test_position_encoder_meets_true_neighbours(causal):
    """Oracle: the 27 products by hand, at a place (t, h, w) with its neighbours in time, height and width."""
    torch.manual_seed(0)
    layer, x = PositionEncoder3d(2, causal), torch.randn(1, 4, 3, 5, 2)
    found = layer(x)
    for t, h, w in ((0, 0, 0), (2, 1, 3), (3, 2, 4)):
        expected = layer.bias.clone()
        for dt, dh, dw in torch.cartesian_prod(*[torch.arange(3)] * 3).tolist():
            at = (t + dt - (2 if causal else 1), h + dh - 1, w + dw - 1)
            if all(0 <= place < side for place, side in zip(at, (4, 3, 5))):
                expected = expected + layer.weight[:, 0, dt, dh, dw] * x[0][at]
        torch.testing.assert_close(found[0, t, h, w], expected)


@pytest.mark.parametrize("sides", [(4, 3), (2, 3, 4), (1, 5)])
def test_position_bias(sides):
    """Oracle: the MLP at sign(d) log(1 + |d|) of each two places."""
    torch.manual_seed(0)
    layer = random(PositionBias(2, 8, len(sides)))
    places = torch.cartesian_prod(*map(torch.arange, sides)).float()
    apart = places[:, None] - places[None]
    expected = layer.net(apart.sign() * apart.abs().log1p()).permute(2, 0, 1)
    found = layer(*sides)
    assert found.shape == (2, math.prod(sides), math.prod(sides))
    torch.testing.assert_close(found, expected)


def test_alibi():
    """Oracle: the published slopes of eight heads, 1/2 to 1/256."""
    found = build_alibi_bias(8, 4, torch.zeros(()))
    torch.testing.assert_close(found[:, 3, 0], torch.tensor([-3 / 2**power for power in range(1, 9)]))
    assert bool((found[:, range(4), range(4)] == 0).all())


@pytest.mark.parametrize("over", ["space", "time"])
def test_causal(over):
    """Oracle: nothing before a changed latent frame moves, all from it on do; without `causal` earlier ones do, too."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 2, 3, 16)
    changed = x.clone()
    changed[:, 3] += torch.randn(2, 2, 3, 16)
    for causal in (True, False):
        network = random(Transformer(16, 2, 2, 8, causal=causal, over=over))
        moved = (network(changed) - network(x)).abs().amax((0, 2, 3, 4)) > 1e-6
        # Two blocks' position encoders reach two frames back, attention over time all.
        first = 3 if causal else 1 if over == "space" else 0
        assert moved.tolist() == [number >= first for number in range(5)]


def test_what_attends_to_what():
    """Oracle: which tokens move with one token, by `over`, without a position encoder."""
    torch.manual_seed(0)
    x = torch.randn(1, 3, 2, 4, 8)
    changed = x.clone()
    changed[0, 1, 0, 2] = torch.randn(8)
    for over, reached in (("all", (slice(None),) * 3), ("space", (1,)), ("time", (slice(None), 0, 2))):
        network = random(Transformer(8, 1, 2, 4, peg=False, over=over))
        expected = torch.zeros(3, 2, 4, dtype=torch.bool)
        expected[reached] = True
        assert torch.equal(((network(changed) - network(x)).abs().amax(-1) > 1e-6)[0], expected), over


def test_masked_tokens_change_nothing():
    """Oracle: other values where the mask hides; those that are seen change all."""
    torch.manual_seed(0)
    network, x = random(Transformer(8, 2, 2, 4, peg=False)), torch.randn(2, 3, 2, 2, 8)
    mask = torch.ones(2, 3, 2, 2, dtype=torch.bool)
    mask[0, 2] = False
    changed = torch.where(mask[..., None], x, 9.0)
    assert torch.equal(network(changed, None, mask)[mask], network(x, None, mask)[mask])


def test_every_weight_learns():
    """Oracle: a gradient that is not 0 for each, whatever there is attention over; none is empty."""
    torch.manual_seed(0)
    for over in ("all", "space", "time"):
        network = random(Transformer(16, 1, 2, 8, context_dim=5, over=over))
        network(torch.randn(2, 3, 2, 2, 16), context=torch.randn(2, 3, 5)).square().sum().backward()
        assert all(weight.numel() and bool(weight.grad.abs().sum() > 0) for weight in network.parameters())


def test_bfloat16():
    """Oracle: the float32 network, to the precision of bfloat16."""
    torch.manual_seed(0)
    network, x = Transformer(16, 2, 2, 8, causal=True, over="time"), torch.randn(2, 3, 2, 2, 16)
    expected = network(x, build_alibi_bias(2, 3, x))
    found = network.bfloat16()(x.bfloat16(), build_alibi_bias(2, 3, x.bfloat16()))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0.1)
