"""Weights that train_only leaves out, and rates by pattern: ZeRO 0 to 3 against plain torch, saved and resumed."""

import json

import pytest
import torch
from torch import nn

from dstrain.engine.optimizers import freeze_weights, make_parameter_groups
from dstrain.recipe import ConfigError, Optimizer, Run
from tests.engine import check_frozen
from tests.support.tiny import Tiny

CASES = [f"{stage}-{precision}" for stage in range(4) for precision in ("fp32", "bf16")]
OTHERS = ["lion", "adamw8bit", "offload"]
ADAPTED = [*(f"lora-{stage}" for stage in range(4)), "lora-muon-1", "lora-muon-3"]


@pytest.fixture(scope="module", params=[2, 1])
def figures(request, tmp_path_factory, on_ranks):
    folder = tmp_path_factory.mktemp("frozen")
    on_ranks(request.param, check_frozen.main, folder)
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.parametrize("stage", range(4))
def test_weights(figures, stage):
    """Oracle: torch's AdamW on the whole batch in one process, its groups written by hand: within 1e-6."""
    assert figures[f"{stage}-fp32"]["weights"] < 1e-6


@pytest.mark.parametrize("case", ADAPTED)
def test_adapters(figures, case):
    """Oracle: plain torch with W + alpha / rank * B A by hand, by AdamW, or by Muon and AdamW, within 1e-6; A and B
    alone learn.
    """
    found = figures[case]
    assert found["weights"] < 1e-6 and found["still"]
    assert len(found["learned"]) == 8 and all(".lora_" in name for name in found["learned"])


def test_adapters_on_four_ranks(tmp_path, on_ranks):
    """Oracle: as above, on the same batch; and the run that saved and went on, to the bit."""
    on_ranks(4, check_frozen.main_of_adapters, tmp_path)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert sorted(figures) == sorted(ADAPTED)
    for found in figures.values():
        assert found["weights"] < 1e-6 and found["still"] and found["elsewhere"] and found["kept"]
        assert found["resumed"] == {"step": 3, "bits": True, "outputs": True, "further": True}


@pytest.mark.parametrize("case", CASES + OTHERS)
def test_what_learns(figures, case):
    """Oracle: the patterns read by hand; the keyed initialization, in the precision of the network, to the bit."""
    found = figures[case]
    assert found["learned"] == ["first.weight", "hidden.1.bias", "hidden.1.weight", "last.weight"]
    assert found["still"] and found["frozen"] and not found["empty"]
    learned = 5 * 17 + 17 * 17 + 17 + 17 * 3
    whole = sum(weight.numel() for weight in Tiny().parameters())
    assert found["counts"] == {"tiny": learned, "frozen": whole - learned}
    assert found["norm"] == pytest.approx(found["true_norm"], rel=1e-6)


@pytest.mark.parametrize("case", CASES + OTHERS + ADAPTED)
class TestEveryCase:
    def test_resumes(self, figures, case):
        """Oracle: the run that saved and went on, to the bit: all weights, what the network computes, and the weights
        after the further steps.
        """
        assert figures[case]["resumed"] == {"step": 3, "bits": True, "outputs": True, "further": True}

    def test_goes_on_at_another_stage(self, figures, case):
        """Oracle: the weights that were saved, frozen ones included, to the bit."""
        assert figures[case]["elsewhere"]

    def test_is_read_whole(self, figures, case):
        """Oracle: a plain network's names; frozen weights as they were saved, beside masters and averages."""
        assert all(figures[case]["read"]) and figures[case]["kept"]


@pytest.mark.parametrize(
    "train_only, rates, message",
    [
        (["hidden.7.*"], {}, "train_only: hidden.7.* fits no weight of tiny, other; the nearest is hidden.1."),
        (["last*"], {}, "train_only leaves nothing of other that learns: add a pattern for it, such as other/*"),
        (["*"], {"first.wieght": 2.0}, "optimizer.rates: first.wieght fits no weight .* the nearest is first.weight"),
    ],
)
def test_refuses_what_fits_nothing(train_only, rates, message):
    """Oracle: by hand: the key, the pattern, and the remedy."""
    networks = {"tiny": Tiny(), "other": nn.Linear(2, 2)}
    with pytest.raises(ConfigError, match=message):
        freeze_weights(networks, train_only, Optimizer(rates=rates))


def test_muon_needs_matrices_that_learn():
    """Oracle: by hand: biases alone are no matrices; with a matrix of a block it has one, and none that is frozen."""
    network, choice = Tiny(), Optimizer(name="muon")
    freeze_weights({"tiny": network}, ["*.bias"], choice)
    with pytest.raises(ConfigError, match="muon: Tiny has no matrices that learn"):
        list(make_parameter_groups(network, choice, check_frozen.decays, (nn.Linear,)))
    freeze_weights({"tiny": network}, ["hidden.0.*"], choice)
    matrices, rest = make_parameter_groups(network, choice, check_frozen.decays, (nn.Linear,))
    assert matrices["params"] == [network.hidden[0].weight] and rest["params"] == [network.hidden[0].bias]


@pytest.mark.parametrize(
    "words, message",
    [
        ({"train_only": []}, "train_only=.. lets nothing learn"),
        ({"train_only": ["a"], "save": {"format": "deepspeed"}}, "train_only: .* write save.format=fragments"),
        ({"model": {"lora": {}}, "save": {"format": "deepspeed"}}, "model.lora: .* write save.format=fragments"),
        (
            {"train_only": ["a"], "ema": {"profiles": [0.1], "snapshots": 5}},
            "train_only: ema.snapshots keeps .* write ema.snapshots=0",
        ),
        ({"optimizer": {"rates": {"a": 0}}}, "rates"),
    ],
)
def test_refuses_what_does_not_go_with_it(words, message):
    """Oracle: by hand: the key and the remedy."""
    with pytest.raises(ValueError, match=message):
        Run.model_validate(words)


def test_all_learn_without_patterns():
    """Oracle: a network as it was built: what is frozen there stays so, and no group or number changes."""
    network = Tiny()
    network.first.bias.requires_grad_(False)
    freeze_weights({"tiny": network}, None, Optimizer())
    assert [name for name, weight in network.named_parameters() if not weight.requires_grad] == ["first.bias"]
    groups = list(make_parameter_groups(network, Optimizer(), check_frozen.decays, ()))
    assert sum(len(members["params"]) for members in groups) == len(list(network.parameters())) - 1
    assert all("rate" not in members for members in groups) and torch.is_tensor(groups[0]["params"][0])
