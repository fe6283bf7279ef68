"""Layers that two systems use."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from dstrain.nn.layers import Linear, Patches, compute_timestep_features
from dstrain.nn.positions import make_sincos_positions
from dstrain.nn.tokens import Attention


def test_attention():
    """Oracle: torch's own multi-head attention with the same weights."""
    torch.manual_seed(0)
    ours, theirs = Attention(16, 4), nn.MultiheadAttention(16, 4, batch_first=True)
    theirs.load_state_dict(
        {
            "in_proj_weight": ours.qkv.weight,
            "in_proj_bias": ours.qkv.bias,
            "out_proj.weight": ours.proj.weight,
            "out_proj.bias": ours.proj.bias,
        }
    )
    x = torch.randn(2, 7, 16)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="num_heads: 3 does not divide hidden_size 16"):
        Attention(16, 3)


@pytest.mark.parametrize("shift", [0, 1])
def test_timestep_features(shift):
    """Oracle: the formula, in Python floats; shift 1 is diffusers' own embedding."""
    t = torch.tensor([0, 1, 417, 999])
    features = compute_timestep_features(t, 8, shift=shift)
    assert features.dtype == torch.float32
    for row, time in zip(features.double(), t.tolist()):
        angles = [time * 10000 ** (-i / (4 - shift)) for i in range(4)]
        expected = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
        torch.testing.assert_close(row, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-4)
    from diffusers.models.embeddings import get_timestep_embedding

    theirs = get_timestep_embedding(t, 8, flip_sin_to_cos=True, downscale_freq_shift=shift)
    torch.testing.assert_close(features, theirs, rtol=0, atol=1e-4)  # its exp is in float32: as good as the CPU's
    assert compute_timestep_features(t, 7).shape == (4, 7)


def test_timestep_features_on_any_cpu():
    """Oracle: numpy with a frequency rounded once: one more unit in its last place is 6e-5 in the phase at t = 999."""
    t = np.arange(1000, dtype=np.float32)
    frequencies = np.exp(-math.log(10000) * np.arange(128) / 128).astype(np.float32)
    angles = (t[:, None] * frequencies).astype(np.float64)
    expected = torch.from_numpy(np.concatenate((np.cos(angles), np.sin(angles)), axis=1))
    torch.testing.assert_close(
        compute_timestep_features(torch.from_numpy(t), 256).double(), expected, rtol=0, atol=1e-6
    )


def test_positions():
    """Oracle: the formula at one place of a grid that is not square; all rows differ."""
    table = make_sincos_positions(8, 2, 3)
    assert table.shape == (6, 8) and table.dtype == torch.float32 and len(table.unique(dim=0)) == 6
    halves = [f(x * w) for x in (2, 1) for f in (math.sin, math.cos) for w in (1.0, 0.01)]  # row 1, column 2
    torch.testing.assert_close(table[5].double(), torch.tensor(halves, dtype=torch.float64), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="multiple of 4"):
        make_sincos_positions(6, 2, 2)


def test_patches():
    """Oracle: one matrix on each flattened patch."""
    torch.manual_seed(0)
    patches, x = Patches(3, 5, 2), torch.randn(1, 3, 4, 4)
    flat = x[0, :, 2:4, 0:2].reshape(-1)
    torch.testing.assert_close(patches(x)[0, :, 1, 0], patches.weight.view(5, -1) @ flat)


def test_unknown_initialization():
    """Oracle: a ValueError that lists what exists."""
    with pytest.raises(ValueError, match="'zeros' is unknown; one of xavier, normal, zero"):
        Linear(2, 2, init="zeros")
