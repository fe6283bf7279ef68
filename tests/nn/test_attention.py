"""Attention as every system calls it, on a CPU in either precision."""

import pytest
import torch

from dstrain.nn.attention import attend

FORMS = {
    "plain": {},
    "causal": {"causal": True},
    "scaled": {"scale": 8.0},
    "added": {"attn_mask": True},
    "seen": {"attn_mask": "bool"},
}


def inputs(form, dtype=torch.float64):
    torch.manual_seed(0)
    query = torch.randn(2, 3, 5, 8).to(dtype).requires_grad_()
    key, value = (torch.randn(2, 3, 5, 8).to(dtype).requires_grad_() for _ in range(2))
    more = dict(FORMS[form])
    if more.get("attn_mask") is True:
        more["attn_mask"] = torch.randn(1, 3, 5, 5).to(dtype).requires_grad_()
    elif more.get("attn_mask") == "bool":
        more["attn_mask"] = torch.rand(2, 1, 5, 5) < 0.7
        more["attn_mask"][..., 0] = True
    return query, key, value, more


@pytest.mark.parametrize("form", FORMS)
def test_formula(form):
    """Oracle: the softmax and the two products written out, in float64, and their gradients."""
    query, key, value, more = inputs(form)
    scores = query @ key.mT * more.get("scale", 8**-0.5)
    added = more.get("attn_mask")
    if added is not None:
        scores = scores.masked_fill(~added, -torch.inf) if added.dtype == torch.bool else scores + added
    if more.get("causal"):
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    expected, found = scores.softmax(-1) @ value, attend(query, key, value, **more)
    torch.testing.assert_close(found, expected)
    leaves = [x for x in (query, key, value, added) if x is not None and x.requires_grad]
    for one, other in zip(
        torch.autograd.grad(found.sin().sum(), leaves), torch.autograd.grad(expected.sin().sum(), leaves)
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_halves(form, dtype):
    """Oracle: float32 of the same halves, rounded once, forward and backward; the dtypes stay those of the inputs."""
    query, key, value, more = inputs(form, dtype)
    wide = [x.detach().float().requires_grad_() for x in (query, key, value)]
    added = more.get("attn_mask")
    leaves, others = [query, key, value], list(wide)
    if added is not None and added.requires_grad:
        more_wide = more | {"attn_mask": added.detach().float().requires_grad_()}
        leaves, others = [*leaves, added], [*others, more_wide["attn_mask"]]
    else:
        more_wide = more
    found, expected = attend(query, key, value, **more), attend(*wide, **more_wide)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected.to(dtype), rtol=0, atol=0)
    gradients = torch.autograd.grad(found, leaves, torch.ones_like(found))
    for one, other in zip(gradients, torch.autograd.grad(expected, others, torch.ones_like(expected))):
        torch.testing.assert_close(one, other.to(dtype), rtol=0, atol=0)


def test_dropout():
    """Oracle: with values 1 the output is the weights' sum: 1 without dropout, about 1 and seldom 1 with it."""
    query, key, _, _ = inputs("plain", torch.bfloat16)
    ones = torch.ones_like(key)
    torch.testing.assert_close(attend(query, key, ones), ones)
    dropped = attend(query, key, ones, dropout=0.3)
    assert bool((dropped != 1).any()) and dropped.float().mean().item() == pytest.approx(1, abs=0.3)
