"""Initial weights: what a constructor sets is never undone, and every system of ours draws by modules."""

import json

import pytest
import torch
from torch import nn

from dstrain import systems
from dstrain.engine.initial import build_networks, draw_initial_weights, explain_unresettable_weights
from tests.engine import check_initial
from tests.engine.check_initial import Zeroed
from tests.support import tokenizers
from tests.support.tiny import Scale, Tiny
from tests.systems.test_contract import CASES

SEED = 7


class Parent(nn.Module):
    """Two layers; `alter` is what the rest of the constructor does."""

    def __init__(self, alter=lambda parent: None):
        super().__init__()
        self.body, self.out = nn.Linear(4, 4), nn.Linear(4, 2)
        alter(self)


class OwnWeight(nn.Linear):
    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        nn.init.ones_(self.weight)


class Careful(nn.Linear):
    """Fills its weight row by row, and all of it, in its own reset_parameters."""

    def reset_parameters(self) -> None:
        for row in range(self.out_features):
            nn.init.constant_(self.weight[row], row)
        nn.init.zeros_(self.bias)


class Careless(nn.Linear):
    """Sets one row of what the constructor must have set before."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight[0])
        nn.init.zeros_(self.bias)


class Measured(nn.Linear):
    """Keeps in a buffer, which is real from the start, what it reads from its weight."""

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.register_buffer("mean", torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "mean"):
            with torch.no_grad():
                self.mean.copy_(self.weight.mean())


class Scaled(nn.Linear):
    """Has a reset_parameters that others may call with a scale of their own."""

    def reset_parameters(self, std: float = 1.0) -> None:
        nn.init.normal_(self.weight, std=std)
        nn.init.zeros_(self.bias)


class Named(nn.Linear):
    """The same, with one that is given by name only."""

    def reset_parameters(self, std: float = 1.0, *, bias: float = 0.0) -> None:
        nn.init.normal_(self.weight, std=std)
        nn.init.constant_(self.bias, bias)


class Replacing(nn.Module):
    """Makes its weight and its buffer anew in its own reset_parameters."""

    def __init__(self):
        super().__init__()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.gain = nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("steps", torch.arange(4).cumsum(0))


class Zeroing(nn.Module):
    """Sets another module's weight in its own reset_parameters, which is called for none but owners of weights."""

    def __init__(self):
        super().__init__()
        self.gain, self.out = nn.Parameter(torch.empty(3)), nn.Linear(4, 2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.out.weight)


def init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)


def replace(parent: Parent) -> None:
    parent.out.weight = nn.Parameter(torch.zeros(2, 4))


def scale(parent: Parent) -> None:
    with torch.no_grad():
        parent.out.weight *= 0.1


def give_a_scale(parent: Parent) -> None:
    parent.out = Scaled(4, 2)
    parent.out.reset_parameters(0.1)


def read_a_value(parent: Parent) -> None:
    nn.init.constant_(parent.out.weight, torch.full((3,), 0.5).tolist()[1])


def a_buffer(parent: Parent) -> None:
    parent.body = nn.BatchNorm1d(4)
    parent.body.running_var.fill_(2)


def draw_again(parent: Parent) -> None:
    parent.out.reset_parameters()


def tie(parent: Parent) -> None:
    parent.out = nn.Linear(4, 4, bias=False)
    parent.out.weight = parent.body.weight


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda: Parent(lambda parent: nn.init.zeros_(parent.out.weight)), "out.weight"),
        (lambda: Parent(lambda parent: nn.init.zeros_(parent.out.weight[:1])), "out.weight"),
        (lambda: Parent(lambda parent: parent.out.bias.data.fill_(1)), "out.bias"),
        (lambda: Parent(lambda parent: torch._foreach_zero_([parent.out.bias.data])), "out.bias"),
        (lambda: Parent(lambda parent: parent.apply(init)), "body.weight"),
        (lambda: Parent(replace), "out.weight"),
        (lambda: Parent(scale), "out.weight"),
        (lambda: Parent(a_buffer), "body.running_var"),
        (lambda: Parent(give_a_scale), "out.weight"),
        (lambda: nn.Sequential(OwnWeight(3, 3)), "0.weight"),
        (lambda: nn.Sequential(Careless(3, 3)), "0.weight"),
        (Zeroing, "out.weight"),
        (lambda: nn.MultiheadAttention(4, 1), "in_proj_weight"),
        (lambda: nn.TransformerEncoderLayer(4, 1, 8), "self_attn.in_proj_weight"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), "parametrizations.weight.original0"),
        (Zeroed, "shift"),
        (lambda: nn.Sequential(Named(3, 3)), "0.weight"),
        (lambda: Parent(lambda parent: torch.zeros(2, 4, out=parent.out.weight.data)), "out.weight"),
    ],
)
def test_constructors_that_set_weights(make, name):
    """Oracle: the first weight or buffer that the constructor leaves otherwise than its owner's reset_parameters."""
    assert explain_unresettable_weights(lambda: {"part": make()}) == f"part: {name} is set by a constructor"


def test_values_in_a_constructor():
    """Oracle: a constructor that reads a tensor's values, which none on the meta device has."""
    reason = explain_unresettable_weights(lambda: {"part": Parent(read_a_value)})
    assert reason.startswith("networks() cannot run on the meta device (")


@pytest.mark.parametrize(
    "make",
    [
        Parent,
        Tiny,
        lambda: Scale(3),
        lambda: Parent(draw_again),
        lambda: Parent(tie),
        lambda: nn.Sequential(Careful(2, 3), nn.Embedding(5, 2, padding_idx=1)),
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.GroupNorm(1, 2)),
        lambda: nn.LSTM(2, 3),
        Replacing,
    ],
)
def test_modules_that_draw_their_own(make):
    """Oracle: the layers of torch and ours whose reset_parameters gives what the constructor leaves."""
    assert explain_unresettable_weights(lambda: {"part": make()}) is None


@pytest.mark.parametrize("name, index", [(name, index) for name in CASES for index in range(len(CASES[name]))])
def test_every_system_draws_by_modules(name, index, tmp_path):
    """Oracle: no rank needs a whole network; runs and checkpoints that exist keep their initial weights."""
    more = {"tokenizer": {"path": str(tokenizers.save(tmp_path))}} if name == "phenaki" else {}
    assert explain_unresettable_weights(systems.build(name, CASES[name][index] | more).networks) is None


def test_build():
    """Oracle: torch.manual_seed and the constructor, all parts together, if one sets weights; else each module."""
    before = torch.get_rng_state()
    for networks in (lambda: {"a": Tiny(), "b": Parent(scale)}, lambda: {"a": Tiny(), "b": Parent(a_buffer)}):
        torch.manual_seed(SEED)
        expected = {part: network.state_dict() for part, network in networks().items()}
        torch.set_rng_state(before)
        reasons = []
        for part, (network, values) in build_networks(networks, SEED, note=reasons.append).items():
            torch.testing.assert_close(dict(values()), dict(expected[part]), rtol=0, atol=0)
            torch.testing.assert_close(dict(network.state_dict()), dict(expected[part]), rtol=0, atol=0)
        assert len(reasons) == 1 and torch.equal(torch.get_rng_state(), before)
    for make, on_meta in ((Tiny, True), (lambda: nn.Sequential(Measured(3, 2)), False)):
        ((_, (network, values)),) = build_networks(lambda: {"a": make()}, SEED).items()
        torch.testing.assert_close(dict(values()), dict(draw_initial_weights(make(), SEED)), rtol=0, atol=0)
        assert all(weight.is_meta == on_meta for weight in network.parameters())
        assert not any(buffer.is_meta for buffer in network.buffers())
    tied = build_networks(lambda: {"a": Parent(tie)}, SEED)["a"][0]
    assert tied.out.weight is tied.body.weight and tied.out.weight.is_meta


@pytest.mark.parametrize(
    "make",
    [Tiny, lambda: Tiny().bfloat16(), Replacing, nn.LSTM, lambda: nn.Sequential(nn.BatchNorm2d(2), nn.Linear(2, 2))],
)
def test_values_that_modules_draw(make):
    """Oracle: the network's own state dict for names, shapes and types; float32 whatever the network is in; the network
    is left as it was, to the object and the bit; every seed and every module draws other values.
    """
    network = make() if make is not nn.LSTM else make(2, 3)
    tensors = {
        name: (tensor, tensor.detach().clone())
        for name, tensor in [*network.named_parameters(), *network.named_buffers()]
    }
    values, others = (dict(draw_initial_weights(network, seed)) for seed in (0, 1))
    assert values.keys() == tensors.keys()
    for name, (tensor, before) in tensors.items():
        assert torch.equal(tensor, before) and values[name].shape == tensor.shape
        assert values[name].dtype == (torch.float32 if tensor.is_floating_point() else tensor.dtype)
        assert not values[name].requires_grad and not (tensor.ndim > 1 and torch.equal(values[name], others[name]))
    now = dict([*network.named_parameters(), *network.named_buffers()])
    assert all(now[name] is tensor for name, (tensor, _) in tensors.items())
    if isinstance(network, Tiny):
        assert not torch.equal(values["hidden.0.weight"], values["hidden.1.weight"])
        assert all(torch.equal(values[name], value) for name, value in draw_initial_weights(Tiny(), 0))
        assert torch.equal(values["scale.gain"], torch.ones(17))
    if isinstance(network, Replacing):
        assert values["gain"].tolist() == [2.0] * 3 and values["steps"].tolist() == [0, 1, 3, 6]


def test_only_what_is_asked_for_is_drawn():
    """Oracle: by hand: the layer that owns the weight, whole, and each module with a buffer, whatever is asked for."""
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    norm = {"2.weight", "2.bias", "2.running_mean", "2.running_var", "2.num_batches_tracked"}
    assert dict(draw_initial_weights(network, SEED, {"1.bias"})).keys() == {"1.weight", "1.bias"} | norm
    assert dict(draw_initial_weights(network, SEED, ())).keys() == norm


@pytest.mark.parametrize("world", (2, 1))
def test_first_loss(request, on_ranks, tmp_path, world):
    """Oracle: plain torch, seeded and constructed: every weight to the bit, the first loss within 1e-6, ZeRO 0 to 3;
    weights that only the rank decides are refused.
    """
    if world == 1:
        request.getfixturevalue("alone")
        check_initial.main(str(tmp_path / "figures.json"))
    else:
        on_ranks(2, check_initial.main, str(tmp_path / "figures.json"))
    figures = json.loads((tmp_path / "figures.json").read_text())
    refusals = figures.pop("refusals")
    assert [
        ("constructors leave other weights" in refusal, "here tiny: last.weight" in refusal) for refusal in refusals
    ] == {1: [(False, False)], 2: [(True, False), (True, True)]}[world]
    for stage, found in figures.items():
        assert found["different"] == [] and found["loss"] == pytest.approx(found["plain"], rel=0, abs=1e-6), stage
        assert [("shift is set by a constructor" in note) for note in found["notes"]] == [True] * (stage == "3")
