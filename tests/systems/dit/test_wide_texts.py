"""RAEv2's trunk, told by a text, with RAE's wide head on it: no golden file has both together."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dstrain.systems.dit.config import Config
from dstrain.systems.dit.layouts import translate_weights_from_layout
from dstrain.systems.dit.network import DiT
from dstrain.systems.dit.system import DiTSystem
from tests.systems.dit.test_published import CASES, arguments, read

Weights = dict[str, Tensor]


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def rms(w: Weights, name: str, x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w[f"{name}.weight"]


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns pairs of neighbours by the tables of a file, (N, d)."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos + torch.stack((-b, a), -1).flatten(-2) * sin


def block(
    w: Weights, name: str, x: Tensor, heads: int, tables: list[Tensor], c: Tensor | None = None, read: Any = None
) -> Tensor:
    """A block by its formulas; c: the condition of each token, None: no modulation; read: bool (B, N)."""
    one = torch.zeros(1, 1, 1)
    values = [one, one, one + 1] * 2
    if c is not None:
        values = list(linear(w, f"{name}.adaLN_modulation.1", F.silu(c)).chunk(6, -1))
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = values
    y = rms(w, f"{name}.norm1", x) * (1 + scale) + shift
    q, k, v = linear(w, f"{name}.attn.qkv", y).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    if f"{name}.attn.q_norm.weight" in w:
        q, k = rms(w, f"{name}.attn.q_norm", q), rms(w, f"{name}.attn.k_norm", k)
    q, k = turn(q, *tables), turn(k, *tables)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if read is not None:
        scores = scores.masked_fill(~read[:, None, None], -torch.inf)
    y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    x = x + gate * linear(w, f"{name}.attn.proj", y)
    y = rms(w, f"{name}.norm2", x) * (1 + scale_mlp) + shift_mlp
    first, second = linear(w, f"{name}.mlp.w12", y).chunk(2, -1)
    return x + gate_mlp * linear(w, f"{name}.mlp.w3", F.silu(first) * second)


def embed(w: Weights, name: str, x: Tensor, patch: int) -> Tensor:
    weight = w[f"{name}.proj.weight"].reshape(len(w[f"{name}.proj.weight"]), -1, patch, patch)
    return F.conv2d(x, weight, w[f"{name}.proj.bias"], stride=patch).flatten(2).transpose(1, 2)


def tell_time(w: Weights, t: Tensor) -> Tensor:
    angles = 2 * math.pi * w["t_embedder.W"] * t[:, None]
    features = torch.cat((angles.sin(), angles.cos()), 1)
    return linear(w, "t_embedder.mlp.2", F.silu(linear(w, "t_embedder.mlp.0", features)))


def read_text(w: Weights, tensors: Weights, tables: list[Tensor], patch: int = 2) -> tuple[Tensor, Tensor]:
    """RAEv2's trunk: the image's tokens behind its last block, and the embedding of the time."""
    x, time = embed(w, "x_embedder", tensors["in/x"], patch), tell_time(w, tensors["in/t"])
    count = x.shape[1]
    of_time = w["t_tokens.tokens"] + time[:, None]
    words = linear(w, "text_tokens.proj", rms(w, "text_tokens.norm", tensors["in/text"]))
    x = torch.cat((x, of_time, words), 1)
    read = F.pad(tensors["in/mask"].bool(), (count + of_time.shape[1], 0), value=True)
    for number in range(2):
        x = block(w, f"blocks.{number}", x, 2, tables, read=read)
    return x[:, :count], time


def draw_wide(w: Weights, image: Tensor, tokens: Tensor, time: Tensor, tables: list[Tensor], patch: int) -> Tensor:
    """RAE's head: the image's own patches under the condition of each token."""
    c = linear(w, "final_layer.projector", F.silu(time[:, None] + tokens))
    x = block(w, "final_layer.blocks.0", embed(w, "final_layer.x_embedder", image, patch), 2, tables, c)
    shift, scale = linear(w, "final_layer.final_layer.adaLN_modulation.1", F.silu(c)).chunk(2, -1)
    normed = rms(w, "final_layer.final_layer.norm_final", x) * (1 + scale) + shift
    return linear(w, "final_layer.final_layer.linear", normed)


def join(x: Tensor, patch: int) -> Tensor:
    side = math.isqrt(x.shape[1])
    x = x.unflatten(1, (side, side)).unflatten(3, (patch, patch, -1))
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


@torch.no_grad()
def test_wide_head_behind_texts() -> None:
    """Oracle: the formulas, which give the outputs of the originals from both golden files; RAEv2's trunk with a text
    and RAE's head together, 1e-5, by the network that the config makes. Masked words change nothing, others do.
    """
    state, tensors, _ = read("raev2_text")
    tables = [state["rope.freqs_cos"], state["rope.freqs_sin"]]
    w, _ = translate_weights_from_layout(state, "raev2", 2, 2, [8])
    tokens, _ = read_text(w, tensors, tables)
    drawn = join(linear(w, "final_layer.linear", rms(w, "final_layer.norm_final", tokens)), 2)
    assert torch.allclose(drawn, tensors["out/x_pred"], atol=1e-5)

    old, other, config_of_rae = read("rae_ddt")
    shape = arguments("rae_ddt", config_of_rae)
    rae = DiT(**shape)
    v, _ = translate_weights_from_layout(old, CASES["rae_ddt"][0], 2, rae.grid, [8, 12])
    time = tell_time(v, other["in/t"])
    c = F.silu(time + v["y_embedder.embedding_table.weight"][other["in/y"]])[:, None]
    x = embed(v, "x_embedder", other["in/x"], 1) + v["pos_embed"]
    for number in range(2):
        x = block(v, f"blocks.{number}", x, 2, [old["enc_feat_rope.freqs_cos"], old["enc_feat_rope.freqs_sin"]], c)
    wide = [old["dec_feat_rope.freqs_cos"], old["dec_feat_rope.freqs_sin"]]
    assert torch.allclose(join(draw_wide(v, other["in/x"], x, time, wide, 1), 1), other["out/forward"], atol=1e-5)

    both = Config(
        image_size=4,
        patch_size=2,
        hidden_size=16,
        depth=2,
        num_heads=2,
        objective="flow",
        learn_sigma=False,
        condition="text",
        class_dropout_prob=0.0,
        text_encodings_dim=10,
        max_text_len=5,
        sines=False,
        time_freq="fourier",
        tokens={"time": 2},
        block={"norm": "rms", "mlp": "swiglu", "qk_norm": "rms", "rope": True, "modulation": "none"},
        wide={"hidden_size": 24, "depth": 1, "num_heads": 2},
    )
    network = DiTSystem(both).networks()["denoiser"]
    for name, weight in network.named_parameters():
        draw = torch.Generator().manual_seed(weight.numel() + len(name))
        weight.add_(0.3 * torch.randn(weight.shape, generator=draw))
    taken = {name: value for name, value in w.items() if name in network.state_dict() and "final_layer" not in name}
    network.load_state_dict(taken, strict=False)
    full = network.state_dict()
    assert set(full) - set(taken) == {name for name in full if name.startswith("final_layer.")}
    tokens, time = read_text(full, tensors, tables)
    angles = network.get_rotary_positions((2, 2), 12, 0, torch.device("cpu"))
    assert angles.shape[2] == 4
    tables_of_head = [angles[0, 0], angles[0, 1]]
    expected = join(draw_wide(full, tensors["in/x"], tokens, time, tables_of_head, 2), 2)
    given = {"text": tensors["in/text"], "mask": tensors["in/mask"].bool()}
    found = network(tensors["in/x"], tensors["in/t"], **given)
    assert expected.std() > 0.1 and torch.allclose(found, expected, atol=1e-5)
    for changed, same in ((~given["mask"], True), (given["mask"], False)):
        text = given["text"] + changed[..., None]
        again = network(tensors["in/x"], tensors["in/t"], text=text, mask=given["mask"])
        assert torch.allclose(again, found, atol=1e-6) == same
