"""Blocks that are compiled, and blocks that compute again what they do not keep."""

import json
import operator
import weakref
from functools import cache, partial

import pytest
import torch
from deepspeed.runtime.zero import linear
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config
from torch import nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from dstrain.engine import blocks
from dstrain.engine.blocks import (
    _make_input_require_grad,
    make_structure_key,
    require_known_leaf_modules,
    wrap_block_forwards,
)
from dstrain.recipe import ConfigError
from dstrain.systems.dit.blocks import Block
from dstrain.systems.dit.network import DiT
from dstrain.systems.iddpm.network import AttentionBlock, ResBlock, UNet
from tests.engine import check_blocks
from tests.support import counting
from tests.support.sample import wants_all
from tests.support.tiny import Tiny

# System, index of its CASES, stage, model.recompute, entries of the recipe. Every system, stage and choice occurs.
CASES = [
    ["dit", 0, 3, "attention"],
    ["dit", 7, 3, "attention"],
    ["iddpm", 2, 1, "all", "channels_last=true"],
    ["vae", 3, 3, "none"],
    ["phenaki", 2, 0, "attention"],
    ["phenaki.tokenizer", 0, 2, 1],
    ["prior", 1, 3, "all"],
    ["dit", 0, 3, "offload"],
]
# Graphs, and where they are cut, are the same for both backends. Inductor takes most of a minute a case: in CI it
# compiles the blocks of test_by_inductor alone.
SAMPLE = {"aot_eager": CASES, "inductor": []}
UNET = {
    "in_channels": 1,
    "num_channels": 32,
    "num_res_blocks": 1,
    "channel_mult": (1, 1),
    "attention_levels": (1,),
    "num_heads": 2,
}

OWN = LinearFunctionForZeroStage3.forward  # before any test: what replaces it stays for the whole process


def gradients(recompute):
    """Of a small UNet with dropout."""
    torch.manual_seed(0)
    network = UNet(**UNET, dropout=0.3)
    for weight in network.parameters():
        nn.init.normal_(weight, std=0.2)
    wrap_block_forwards(network, (ResBlock, AttentionBlock), recompute)
    torch.manual_seed(1)
    network(torch.randn(2, 1, 8, 8), torch.tensor([1, 2])).square().mean().backward()
    return [weight.grad for weight in network.parameters()]


def test_which_blocks_may_share_a_graph():
    """Oracle: by hand: equal sizes do; another width, another setting or another class do not."""
    same, again = Block(32, 4, 2.0), Block(32, 4, 2.0)
    others = [Block(64, 4, 2.0), Block(32, 8, 2.0), Block(32, 4, 4.0), nn.Linear(32, 32)]
    assert make_structure_key(same) == make_structure_key(again.eval()) and make_structure_key(same) not in map(
        make_structure_key, others
    )


@pytest.mark.parametrize("recompute, compiled", [("none", False), ("attention", False), ("none", True), ("all", True)])
def test_whose_linear_is_in_place(recompute, compiled, monkeypatch):
    """Oracle: DeepSpeed's own function, which eager blocks keep, but for recomputation of the attention alone."""
    monkeypatch.setattr(LinearFunctionForZeroStage3, "forward", staticmethod(OWN))
    wrap_block_forwards(UNet(**UNET), (ResBlock, AttentionBlock), recompute, compiled)
    assert (LinearFunctionForZeroStage3.forward is OWN) == (recompute == "none" and not compiled)


@pytest.mark.parametrize("recompute", ["none", "all", "attention"])
@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3)], ids=str)
def test_a_compiled_linear_layer_of_zero_3(recompute, shape, monkeypatch):
    """Oracle: the gradients of torch's own layer, eager, to fp32 rounding. And no graph adds in place: torch 2.11 makes
    gradients of 0 of that, where later ones make no mistake.
    """
    monkeypatch.setattr(LinearFunctionForZeroStage3, "forward", staticmethod(OWN))
    targets = []

    def reading(graph, inputs):
        targets.extend(
            node.target for part in graph.modules() if isinstance(part, GraphModule) for node in part.graph.nodes
        )
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=reading))
    found = []
    for function in (nn.functional.linear, linear.zero3_linear_wrap):
        monkeypatch.setattr(nn.functional, "linear", function)
        torch.manual_seed(0)
        network, x = nn.Sequential(check_blocks.Layer(), check_blocks.Layer()), torch.randn(shape, requires_grad=True)
        wrap_block_forwards(network, (check_blocks.Layer,), recompute, compiled=function is linear.zero3_linear_wrap)
        network(x).square().sum().backward()
        found.append([x.grad, *(weight.grad for weight in network.parameters())])
    assert targets and operator.iadd not in targets
    for expected, grad in zip(*found, strict=True):
        assert torch.allclose(grad, expected, rtol=1e-5, atol=1e-6) and expected.norm() > 0.1


@pytest.mark.parametrize("recompute", ["all", "attention", "offload", 2])
def test_the_same_dropout(recompute, monkeypatch):
    """Oracle: the gradients without recomputation, to the last bit. Without the generator's state they are others."""
    plain, again = gradients("none"), gradients(recompute)
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    checkpoint = blocks.checkpoint
    monkeypatch.setattr(
        blocks, "checkpoint", lambda *inputs, **named: checkpoint(*inputs, **named, preserve_rng_state=False)
    )
    careless = gradients(recompute)
    assert not all(torch.equal(one, other) for one, other in zip(plain, careless, strict=True))


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(3)), 0

    def forward(self, x):
        self.calls += 1
        return torch.sin(x * self.weight)


@pytest.mark.parametrize(
    "recompute, calls",
    [
        ("none", [1] * 5),
        ("all", [2] * 5),
        ("offload", [2] * 5),
        (2, [1, 2, 1, 2, 1]),
        (1, [2] * 5),
        (4, [1, 1, 1, 2, 1]),
    ],
)
def test_which_blocks_are_computed_again(recompute, calls):
    """Oracle: by hand: every k-th block is called twice in a training step, and once where nothing is learned."""
    network = nn.Sequential(*(Counted() for _ in range(5)))
    wrap_block_forwards(network, (Counted,), recompute)
    network(torch.ones(2, 3)).sum().backward()
    assert [block.calls for block in network] == calls
    with torch.no_grad():
        network(torch.ones(2, 3))
    assert [block.calls - 1 for block in network] == calls


class Filtered(nn.Module):
    """Images (B, 2, 4, 4) and a table of the same size, which all blocks share."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x, table):
        return torch.tanh(self.filter(x)) + table


@pytest.mark.parametrize("compiled", [False, True])
def test_what_goes_to_the_host(compiled, monkeypatch):
    """Oracle: by hand: one input a block, with its strides, and no table, in copies that end with the backward pass;
    where nothing is learned, nothing goes. And the gradients of blocks that keep their inputs, to the last bit.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    table = torch.randn(3, 2, 4, 4, requires_grad=True)
    given, found, copies = [], [], []
    for recompute in ("all", "offload"):
        torch.manual_seed(0)
        network, host = nn.ModuleList(Filtered() for _ in range(3)), blocks.HostMemory()
        send = host.send_to_host

        def sending(tensor, send=send):
            device, copy = send(tensor)
            given.append((tensor.data_ptr(), copy.data_ptr(), tensor.stride(), copy.stride()))
            copies.append(weakref.ref(copy))
            return device, copy

        host.send_to_host = sending
        wrap_block_forwards(network, (Filtered,), recompute, compiled, host=host)
        x = torch.randn(3, 2, 4, 4).contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            network[0](x, table)
        assert given == []
        first = x.data_ptr()
        for block in network:
            x = block(x, table=table)
        sent = len(given)
        x.square().mean().backward()
        found.append([table.grad, *(weight.grad for weight in network.parameters())])
        table.grad = None
    assert sent == 3 and len(copies) == 3 and all(copy() is None for copy in copies)
    assert given[0][0] == first and all(one != other for one, other, *_ in given)
    assert [own for *_, own, _ in given] == [copy for *_, copy in given] and given[0][2] == (32, 1, 8, 2)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("world", (1, 2))
def test_offloaded_inputs_at_every_stage(on_ranks, tmp_path, world):
    """Oracle: blocks that keep their inputs where they are: the weights after two steps, to the last bit."""
    on_ranks(world, check_blocks.offloaded, tmp_path / "figures.json")
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found == dict.fromkeys(map(str, range(4)), True)


def test_names_of_the_choice():
    """Oracle: docs/guides/training.md; true and false are the names of all and none in older recipes."""
    for value, name in ((True, "all"), (False, "none"), (3, 3), ("attention", "attention"), ("offload", "offload")):
        assert counting.Config(recompute=value).recompute == name
    for value in (0, -1, "blocks", 1.5, None):
        with pytest.raises((ConfigError, ValueError), match="none, attention, all, offload, or a number k"):
            counting.Config(recompute=value)


@pytest.fixture(scope="module")
def figures(in_fork, tmp_path_factory, request):
    """backend -> its figures by case: a fork measures all of them at the first call."""

    @cache
    def measure(backend):
        folder = tmp_path_factory.mktemp("blocks")
        in_fork(check_blocks.main, folder, CASES if wants_all(request) else SAMPLE[backend], backend)
        return json.loads((folder / "figures.json").read_text())

    return measure


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend, case",
    [
        pytest.param(
            backend,
            case,
            id="-".join(map(str, [backend, *case])),
            marks=[] if case in cases else [pytest.mark.faults],
        )
        for backend, cases in SAMPLE.items()
        for case in CASES
    ],
)
def test_compiled(figures, backend, case):
    """Oracle: eager blocks that keep everything: losses and weights of two steps. No block is cut, each kind has three
    graphs at most (training, drawing and evaluation, and of the DiT a batch of one), and going on compiles nothing.
    """
    found = figures(backend)["-".join(map(str, case))]
    assert found["breaks"] == [] and found["later"] == 0
    assert 0 < found["graphs"] == sum(found["each"]) and max(found["each"]) <= 3
    # Near zero, AdamW's first steps are a gradient's sign times the learning rate, 0.01. Inductor rounds elsewhere.
    assert found["apart"] < (1e-4 if backend == "aot_eager" else 0.01)
    assert found["losses"]["on"] == pytest.approx(found["losses"]["off"], rel=1e-5)


@pytest.mark.parametrize("world", (1, 2))
def test_scattered_weights(on_ranks, tmp_path, world):
    """Oracle: blocks that keep everything: two steps at stage 3, for every choice of recomputation."""
    on_ranks(world, check_blocks.scattered, tmp_path / "figures.json")
    found = json.loads((tmp_path / "figures.json").read_text())
    assert len(found) == 11 and max(found.values()) < 1e-5, found


def test_by_inductor():
    """Oracle: the gradient of eager blocks that keep everything, to fp32 rounding; both blocks share one graph."""
    found, before = [], counters["stats"]["unique_graphs"]
    for recompute, compiled in (("none", False), ("attention", True)):
        torch.manual_seed(0)
        network = DiT(8, 2, 1, 32, 2, 2, num_classes=10)
        for weight in network.parameters():
            nn.init.normal_(weight, std=0.2)
        wrap_block_forwards(network, (Block,), recompute, compiled)
        network(torch.randn(4, 1, 8, 8), torch.arange(4), torch.arange(4)).square().mean().backward()
        found.append(torch.cat([weight.grad.flatten() for weight in network.parameters()]))
    assert (found[1] - found[0]).norm() < 1e-5 * found[0].norm()
    assert counters["stats"]["unique_graphs"] == before + 1


class Scaled(nn.Module):
    """(B, 3), a table (5, 3) and a number: the table's length has nothing to do with the batch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x, table, factor):
        return torch.sin(x * self.weight) * factor + table.sum(0)


def test_graphs_without_gradients(monkeypatch):
    """Oracle: the formula; torch's count of graphs: one for a batch of one and one for all longer ones, whichever block
    computes; with gradients one for each size of the batch.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    network, table = nn.ModuleList(Scaled() for _ in range(2)), torch.randn(5, 3)
    wrap_block_forwards(network, (Scaled,), compiled=True)

    def graphs(*batches: int) -> int:
        before = counters["stats"]["unique_graphs"]
        for batch in batches:
            x = torch.randn(batch, 3)
            for block in network:
                found = block(x, table, factor=torch.tensor(2.0))
                assert torch.allclose(found, torch.sin(x) * 2 + table.sum(0))
        return counters["stats"]["unique_graphs"] - before

    with torch.no_grad():
        assert [graphs(4), graphs(7, 2, 9, 12), graphs(1), graphs(3, 1)] == [1, 0, 1, 0]
    assert [graphs(4), graphs(7), graphs(4, 7)] == [1, 1, 0]


def test_a_compiled_block_looks_for_no_weight(monkeypatch):
    """Oracle: by hand: eager, ZeRO-3's linear layer gathers what is away; in a compiled block nothing is, and to look
    at a weight's number would compile each block anew (under torch 2.11, where test_compiled then counts four graphs).
    """
    monkeypatch.setattr(linear, "is_zero_param", linear.is_zero_param)
    wrap_block_forwards(UNet(**UNET), (ResBlock, AttentionBlock), compiled=True, zero3=True)
    plain, away = torch.ones(1), torch.ones(1)
    away.ds_id = 7
    assert [linear.is_zero_param(plain), linear.is_zero_param(away)] == [False, True]

    @partial(torch.compile, backend="eager", fullgraph=True)
    def doubled_if_away(weight):
        return weight * (2 if linear.is_zero_param(weight) else 1)

    assert doubled_if_away(away) == 1


def test_inputs_without_fractions_stay():
    """Oracle: the inputs themselves: whole numbers cannot require a gradient, and None is no tensor."""
    inputs = torch.arange(3), None
    assert all(value is given for value, given in zip(_make_input_require_grad(Tiny(), inputs), inputs, strict=True))
    _, first, _ = _make_input_require_grad(Tiny(), (None, torch.ones(2), torch.ones(2)))
    assert first.requires_grad


@pytest.mark.parametrize(
    "key, words, nearest",
    [
        ("names", ["first", "hiden.1"], "hidden.1"),
        ("names", [""], ""),
        ("name_suffixes", ["den.2"], "hidden"),
        ("classes", "Scales", "Scale"),
    ],
)
def test_leaves_that_are_not_there(key, words, nearest):
    """Oracle: by hand: names of Tiny's modules; DeepSpeed only warns of others. Nothing is gathered below stage 3."""
    config = {"zero_optimization": {"stage": 3, "leaf_module": {key: words}}}
    with pytest.raises(ConfigError, match=f'leaf_module.{key}" is .* fits no module of tiny; the nearest is {nearest}'):
        require_known_leaf_modules({"tiny": Tiny()}, config)
    require_known_leaf_modules({"tiny": Tiny()}, {"zero_optimization": {**config["zero_optimization"], "stage": 2}})


@pytest.mark.parametrize("words", [[], ""])
def test_no_leaves_at_all(words):
    """Oracle: the message names the key, what it is, and the remedy."""
    config = {"zero_optimization": {"stage": 3, "leaf_module": {"names": words}}}
    with pytest.raises(ConfigError, match='leaf_module.names" is empty, which fits no module of tiny: .*remove it'):
        require_known_leaf_modules({"tiny": Tiny()}, config)


def test_leaves_that_are_there():
    """Oracle: DeepSpeed's own search, which marks as many modules as by hand."""
    words = {"names": ["hidden.0"], "name_suffixes": "n.1", "classes": ["Scale", "tests.support.tiny.Scale"]}
    config = {"zero_optimization": {"stage": 3, "leaf_module": words}}
    network = Tiny()
    require_known_leaf_modules({"tiny": network, "other": nn.Linear(1, 1)}, config)
    assert (
        len(apply_zero_leaf_module_config(network, DeepSpeedZeroConfig(**config["zero_optimization"]).leaf_module)) == 3
    )


def test_leaves_whose_inputs_have_no_gradient(on_ranks, tmp_path):
    """Oracle: the same 20 steps on two ranks without leaves, to the bit: DeepSpeed releases the weights of such a leaf
    before its backward pass, which then fails. A leaf that takes whole numbers alone cannot be helped, and is refused.
    """
    on_ranks(2, check_blocks.lead, tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["x_embedder"] == found["blocks.0.attn,final_layer"] == found[""]
    assert "names a TimestepEmbedder, which is given no tensor of fractions in its place" in found["t_embedder"]
