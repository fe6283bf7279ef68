"""How engines are built and what they refuse, on one rank in this process: layouts, blocks, odd weights, files."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dstrain.engine.engines import Engines
from dstrain.engine.patches import defer_write_errors, make_universal_checkpoint_entry
from dstrain.recipe import ConfigError
from tests.engine.check_engines import applied
from tests.engine.test_masters import DECAY, LR, engines_of, step, weights
from tests.support.tiny import Tiny

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("stage", (0, 2))
def test_files_that_cannot_be_written(stage, tmp_path):
    """Oracle: the first error, after every engine has tried; DeepSpeed's own methods are back afterwards."""
    engines = engines_of(stage)
    order: list[str] = []

    def attempt(work) -> None:
        with defer_write_errors(engines.values()):
            for part, engine in engines.items():
                engine.save_checkpoint(str(tmp_path / part / "x"), tag="t", save_latest=False)
                order.append(part)
            work()

    model = Path("x", "t", "mp_rank_00_model_states.pt")
    (tmp_path / "a" / model).mkdir(parents=True)  # a folder, where a file is to be written
    with pytest.raises((OSError, RuntimeError)):
        attempt(lambda: None)
    assert order == ["a", "b"] and (tmp_path / "b" / model).is_file()
    (tmp_path / "a" / model).rmdir()
    attempt(lambda: None)
    assert (tmp_path / "a" / model).is_file()
    with pytest.raises(ZeroDivisionError):
        attempt(lambda: 1 / 0)
    for engine in engines.values():
        assert "save" not in vars(engine.checkpoint_engine) and "_copy_recovery_script" not in vars(engine)


def test_what_deepspeeds_tool_asks_for():
    """Oracle: DeepSpeed's own constants."""
    from deepspeed.checkpoint.constants import (
        UNIVERSAL_CHECKPOINT_INFO,
        UNIVERSAL_CHECKPOINT_VERSION_KEY,
        UNIVERSAL_CHECKPOINT_VERSION_VALUE,
    )

    expected = {UNIVERSAL_CHECKPOINT_INFO: {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE}}
    assert make_universal_checkpoint_entry() == expected


class Pictures(nn.Module):
    """(B, 1, 4, 4) twice, joined and filtered -> (B, 2, 4, 4); notes how what is joined lies in memory."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor, low_res: Tensor) -> Tensor:
        x = torch.cat((x, low_res), dim=1)
        self.last = x.is_contiguous(memory_format=torch.channels_last)
        return self.filter(x)


@pytest.mark.parametrize("on", (False, True))
def test_how_pictures_lie(on):
    """Oracle: torch's own word on the layout of what a positional and a named input are joined to. Each has one
    channel, whose bytes lie alike in both layouts.
    """
    engines = engines_of(0, network=Pictures, parts=("a",), channels_last=on)
    engines["a"](torch.zeros(1, 1, 4, 4), low_res=torch.zeros(1, 1, 4, 4))
    assert engines.modules["a"].last == on


def test_blocks_are_compiled_where_the_recipe_says():
    """Oracle: the forward pass that a block was given in its own name: the blocks, and nothing else."""

    def marked(engines: Engines) -> set[str]:
        return {name for name, module in engines.modules["a"].named_modules() if "forward" in vars(module)}

    linear = {name for name, module in Tiny().named_modules() if isinstance(module, nn.Linear)}
    compiled, without = (engines_of(0, parts=("a",), blocks=blocks, compile="on") for blocks in ((nn.Linear,), ()))
    assert marked(compiled) == linear and marked(without) == set()
    assert any("compiles blocks as the first step meets them" in note for note in compiled.notes) and not without.notes
    for word in ("off", "auto"):
        expected = linear if word == "auto" and torch.cuda.is_available() else set()
        assert marked(engines_of(0, parts=("a",), blocks=(nn.Linear,), compile=word)) == expected


class Empty(Tiny):
    def __init__(self):
        super().__init__()
        self.nothing = nn.Linear(0, 3, bias=False)


def test_weights_that_cannot_be_trained():
    """Oracle: the name of the weight."""
    with pytest.raises(ConfigError, match="nothing.weight has no elements"):
        engines_of(1, network=Empty)


class Idle(Tiny):
    """A weight that takes no part in the loss."""

    def __init__(self):
        super().__init__()
        self.idle = nn.Linear(3, 3)


@pytest.mark.parametrize("stage", range(4))
def test_a_weight_without_a_gradient(stage):
    """Oracle: plain AdamW: what has no gradient, or one of zeros, moves by no more than its decay."""
    engines = engines_of(stage, network=Idle, parts=("a",))
    begun = weights(engines, "a")
    engines.begin_step(LR)
    step(engines, "a")
    after = weights(engines, "a")
    assert applied(engines) == {"a": True} and math.isfinite(engines.collect_metrics()["grad_norm"])
    torch.testing.assert_close(after["idle.bias"], begun["idle.bias"], rtol=0, atol=0)
    assert not torch.equal(after["last.weight"], begun["last.weight"])


class Matrices(nn.Sequential):
    """(B, 5) -> (B, 3) without a bias, so that all weights decay and the optimizer has one group."""

    def __init__(self):
        super().__init__(nn.Linear(5, 4, bias=False), nn.Linear(4, 3, bias=False))


@pytest.mark.parametrize("stage", range(4))
def test_one_group_of_weights(stage):
    """Oracle: torch's norm of the weights; the only group of the optimizer has the recipe's decay."""
    engines = engines_of(stage, parts=("a",), network=Matrices)
    whole = torch.cat([weight.flatten() for weight in weights(engines, "a").values()])
    assert engines.collect_metrics()["param_norm"] == pytest.approx(whole.norm().item())
    assert [group["weight_decay"] for group in engines["a"].optimizer.param_groups] == [DECAY]
