"""The UNet's layers: attention, conditioning, initialization, recomputation, precision, layout, super-resolution."""

import math

import pytest
import torch
import torch.nn.functional as F

from dstrain.engine.blocks import convert_inputs_to_channels_last
from dstrain.systems.iddpm.network import AttentionBlock, ResBlock, SuperResUNet, UNet

SMALL = {
    "in_channels": 1,
    "num_channels": 32,
    "num_res_blocks": 1,
    "channel_mult": (1, 2),
    "attention_levels": (1,),
    "num_heads": 2,
}


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random(network, scale=0.1):
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * scale)
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter += 1  # gains of the normalizations
    return network


@pytest.fixture
def inputs():
    return randn(3, 1, 8, 8), torch.tensor([0, 7, 900])


@pytest.mark.parametrize("num_heads", [1, 2, 4])
def test_attention(num_heads):
    """Oracle: the original's formula: heads interleaved in qkv, query and key divided by the fourth root of d each."""
    block = random(AttentionBlock(32, num_heads).double())
    x = randn(2, 32, 3, 5).double()
    qkv = F.conv1d(block.norm(x).flatten(2), block.qkv.weight, block.qkv.bias)
    width, found = 32 // num_heads, []
    for head in range(num_heads):
        query, key, value = qkv[:, 3 * width * head : 3 * width * (head + 1)].split(width, dim=1)  # (B, d, N) each
        scale = 1 / math.sqrt(math.sqrt(width))
        weight = torch.softmax(torch.einsum("bct,bcs->bts", query * scale, key * scale), dim=-1)
        found.append(torch.einsum("bts,bcs->bct", weight, value))
    expected = x + F.conv1d(torch.cat(found, 1), block.proj_out.weight, block.proj_out.bias).view_as(x)
    torch.testing.assert_close(block(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scale_shift", [True, False])
def test_residual_block(scale_shift):
    """Oracle: the formula of either conditioning, with the block's own layers."""
    block = random(ResBlock(32, 64, 128, 0.0, scale_shift).double())
    x, emb = randn(2, 32, 4, 4).double(), randn(2, 128, seed=1).double()
    h = block.in_layers[2](F.silu(block.in_layers[0](x)))
    condition = block.emb_layers[1](F.silu(emb)).view(2, -1, 1, 1)
    if scale_shift:
        h = block.out_layers[0](h) * (1 + condition[:, :64]) + condition[:, 64:]
    else:
        h = block.out_layers[0](h + condition)
    expected = block.skip_connection(x) + block.out_layers[3](F.silu(h))
    torch.testing.assert_close(block(x, emb), expected, rtol=1e-10, atol=1e-10)


def test_initialization():
    """Oracle: the original's: zeros at the end of every branch and of the network, else torch's defaults."""
    network = UNet(**SMALL, num_classes=5)
    for name, weight in network.named_parameters():
        if ".out_layers.3." in name or ".proj_out." in name or name.startswith("out.2."):
            assert not bool(weight.any()), name
        elif weight.ndim == 1 and ("norm" in name or "_layers.0" in name or name.startswith("out.0")):
            assert bool((weight == float(name.endswith("weight"))).all()), name
        elif name == "label_emb.weight":
            assert float(weight.detach().std()) == pytest.approx(1, rel=0.1)
        elif weight.ndim > 1:
            bound = 1 / math.sqrt(weight[0].numel())  # kaiming uniform with a = sqrt(5)
            assert 0.9 * bound < float(weight.detach().abs().max()) <= bound, name
    assert not bool(network(randn(2, 1, 8, 8), torch.tensor([1, 2]), torch.tensor([3, 4])).any())


def test_labels(inputs):
    """Oracle: the timestep's embedding plus the label's row is the condition; an unconditional network has no table."""
    network = random(UNet(**SMALL, num_classes=4))
    labels = torch.tensor([0, 1, 3])
    out = network(*inputs, labels)
    assert not torch.allclose(out, network(*inputs, torch.tensor([0, 2, 3])))
    with torch.no_grad():
        network.time_embed[2].bias += network.label_emb.weight[2]
        network.label_emb.weight -= network.label_emb.weight[2].clone()
        torch.testing.assert_close(network(*inputs, labels), out, rtol=1e-4, atol=1e-4)
    assert "label_emb.weight" not in UNet(**SMALL).state_dict()


def test_super_resolution():
    """Oracle: a plain UNet of twice the input channels that is given x and the stretched picture side by side."""
    network = random(SuperResUNet(**SMALL))
    x, low_res, t = randn(2, 1, 8, 8), randn(2, 1, 4, 4, seed=1), torch.tensor([3, 40])
    plain = random(UNet(**SMALL, seen_channels=2))
    # Bilinear about the centres of pixels: halfway between two small pixels, a large one is 3/4 of the nearer.
    nearer = torch.arange(8) // 2
    further = (nearer + torch.where(torch.arange(8) % 2 == 0, -1, 1)).clamp(0, 3)
    rows = 0.75 * low_res[:, :, nearer] + 0.25 * low_res[:, :, further]
    stretched = 0.75 * rows[..., nearer] + 0.25 * rows[..., further]
    out = network(x, t, low_res)
    torch.testing.assert_close(out, plain(torch.cat((x, stretched), 1), t), rtol=1e-5, atol=1e-5)
    assert float((network(x, t, low_res + 0.1) - out).detach().abs().max()) > 0.01


def test_heads_of_the_way_up(inputs):
    """Oracle: the attention blocks of each half; another number of heads is another function."""
    network = random(UNet(**SMALL, num_heads_upsample=4))
    heads = {
        name.split(".")[0]: layer.num_heads
        for name, layer in network.named_modules()
        if isinstance(layer, AttentionBlock)
    }
    assert heads == {"input_blocks": 2, "middle_block": 2, "output_blocks": 4}
    assert not torch.allclose(network(*inputs), random(UNet(**SMALL))(*inputs))


def test_first_factor_above_one(inputs):
    """Oracle: the shapes of the layers at the end, where the original assumed a factor of 1."""
    network = random(UNet(**SMALL | {"channel_mult": (2, 3)}, learn_sigma=True))
    assert network.out[2].weight.shape == (2, 64, 3, 3) and network(*inputs).shape == (3, 2, 8, 8)


def test_precision(inputs):
    """Oracle: the float32 network; bfloat16 cannot tell timesteps 900 and 901 apart, their float32 sinusoids can."""
    network = random(UNet(**SMALL, learn_sigma=True), 0.05)
    full = network(*inputs)
    half = random(UNet(**SMALL, learn_sigma=True), 0.05).bfloat16()
    out = half(*inputs)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), full, rtol=0.05, atol=0.05)
    seen = []
    half.time_embed.register_forward_pre_hook(lambda _, given: seen.append(given[0].float()))
    half(inputs[0][:2], torch.tensor([900, 901]))
    assert float((seen[0][0] - seen[0][1]).abs().max()) > 0.3


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", [UNet, SuperResUNet])
def test_channels_last(kind, channels):
    """Oracle: the same network without the engine's option, whose layers all see the other layout; also of grey images,
    whose two layouts are the same bytes.
    """
    network, seen = random(kind(**SMALL | {"in_channels": channels})), []
    network.out.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    given = [randn(3, channels, 8, 8), torch.tensor([0, 7, 900])]
    named = {"low_res": randn(3, channels, 4, 4, seed=1)} if kind is SuperResUNet else {}
    out = network(*given, **named)
    convert_inputs_to_channels_last(network)
    torch.testing.assert_close(network(*given, **named), out, rtol=1e-4, atol=1e-5)
    assert [h.is_contiguous(memory_format=torch.channels_last) for h in seen] == [False, True]
