"""Sums of 16-bit gradients over micro-batches, weight by weight; their precision: test_precision.py."""

import pytest
import torch
from torch import Tensor, nn

from dstrain.engine.updates import Updates
from dstrain.recipe import Run
from tests.engine.check_engines import applied, gathered
from tests.support.engines import count_skipped_steps, engines_for, resolve

pytestmark = pytest.mark.usefixtures("alone")

BETA = 0.5
MICROS = (256.0, 0.75, 0.75, 0.75)  # gradients of micro-batches: bf16 sums them to 256, fp32 to 258.25
USES = {"always": (0, 1, 2, 3), "early": (0, 1), "late": (3,), "middle": (1, 2), "never": ()}


class Parts(nn.Module):
    """(B, 3) -> (B,); the micro-batch says which of its layers take part."""

    def __init__(self):
        super().__init__()
        for name in USES:
            setattr(self, name, nn.Linear(3, 1, bias=False))

    def forward(self, x: Tensor, names: list[str]) -> Tensor:
        return sum(getattr(self, name)(x.to(self.always.weight.dtype)).float() for name in names)


@pytest.mark.parametrize("dtype", ["fp32", None, "bf16"])
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_weights_that_take_turns(stage, dtype):
    """Oracle: sums by hand, two steps one after another: in fp32 within one rounding to bf16 of what is reduced; the
    JSON's own bf16 loses what is small. A weight that no micro-batch used has no gradient, and one that takes no part
    in the first adds to none of the step before. Sums are held of the weights used so far, until the last micro-batch.
    """
    run = Run.model_validate(
        {"batch": {"global": 2 * len(MICROS), "micro": 2}, "optimizer": {"lr": 0.0, "betas": (BETA, 0.9)}}
    )
    config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    if dtype:
        config["data_types"] = {"grad_accum_dtype": dtype}
    engines = engines_for(lambda: {"net": Parts()}, run, resolve(config, run, 1, "cpu"), lambda name, weight: False)
    masters, moments = engines.masters["net"], dict.fromkeys(USES, 0.0)
    for step in range(2):
        engines.begin_step(0.0)
        for number, value in enumerate(MICROS):
            names = [name for name, places in USES.items() if number in places]
            with engines.freeze_all_but("net") as nets:
                loss = nets["net"](torch.full((2, 3), value), names).mean()
                engines.run_backward_and_step("net", loss * len(MICROS))  # which DeepSpeed divides by their number
            assert applied(engines) == {"net": number == len(MICROS) - 1}
            if (sums := getattr(engines["net"], "wide_sums", None)) is not None:
                used = sum(any(place <= number for place in places) for places in USES.values())
                assert len(list(sums.get_sums())) == (used if number < len(MICROS) - 1 else 0)
        computed = gathered(masters, masters.get_moments_in_fp32("exp_avg"))
        for name, places in USES.items():
            moments[name] = BETA * moments[name] + (1 - BETA) * sum(MICROS[number] for number in places)
            found, scale = computed[f"{name}.weight"].flatten().tolist(), 1 - BETA ** (step + 1)
            if name == "always" and dtype == "bf16":
                assert found == [256 * scale] * 3
            elif name == "always":
                assert found == pytest.approx([258.25 * scale] * 3, abs=0.3 * scale)
            else:
                assert found == pytest.approx([moments[name]] * 3, abs=0.8 * scale if name == "early" else 1e-9)


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "fp32 sent as bf16", "bf16", "bf16 sums"])
@pytest.mark.parametrize("stage", [1, 2])
def test_one_rank_needs_no_buckets(stage, precision, micros, monkeypatch):
    """Oracle: DeepSpeed's own hooks and buckets, by which the same steps give the same bits, a skipped one included;
    those of stage 2, where micro-batches are summed in fp32, since at stage 1 with several ranks the sum is rounded.
    """

    def steps(stage: int) -> list[Tensor]:
        torch.manual_seed(0)
        run = Run.model_validate({"batch": {"global": 2 * micros, "micro": 2}, "optimizer": {"lr": 1e-2, "clip": 1.0}})
        config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": "fp32" not in precision}}
        if precision == "bf16 sums":
            config["data_types"] = {"grad_accum_dtype": "bf16"}
        elif precision == "fp32 sent as bf16":  # DeepSpeed rounds on one rank, too
            config["communication_data_type"] = "bf16"
        engines = engines_for(lambda: {"net": Parts()}, run, resolve(config, run, 1, "cpu"), lambda name, weight: True)
        for number in range(4 * micros):
            if number % micros == 0:
                engines.begin_step(1e-2)
            value = float("inf") if number // micros == 2 else 1.0 + number % 3
            with engines.freeze_all_but("net") as nets:  # "late" has no gradient in some steps, "never" in all
                names = ["always", "early", *["late"] * (number % 2), "middle"]
                engines.run_backward_and_step(
                    "net", (nets["net"](torch.full((2, 3), value), names) + number).square().mean()
                )
        masters, zero = engines.masters["net"], engines["net"].optimizer
        assert count_skipped_steps(engines) == 1
        spared.append(not zero._grad_acc_hooks and not any(bucket.buffer for bucket in zero.ipg_buckets.values()))
        return [*masters.flats, *masters.get_moments_in_fp32("exp_avg"), *masters.get_moments_in_fp32("exp_avg_sq")]

    spared: list[bool] = []
    ours = [value.clone() for value in steps(stage)]
    monkeypatch.setattr(Updates, "_needs_no_reduction", False)
    theirs = steps(2 if (precision, micros) == ("bf16", 3) else stage)
    assert all(torch.equal(own, other) for own, other in zip(ours, theirs, strict=True))
    assert spared == ["sent" not in precision, False]  # what is sent in another type is rounded
