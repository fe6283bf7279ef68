"""The optimizers by themselves, in one process, without an engine; sharded, resumed and moved: test_optimizers.py."""

import math

import pytest
import torch
from torch import nn

from dstrain.checkpoint.fragments import Fragment
from dstrain.engine import optimizers, settings
from dstrain.engine.optimizers import ADAM, Lion, Muon
from dstrain.recipe import Run

LR, BETAS, DECAY, MOMENTUM = 0.125, (0.75, 0.5), 0.25, 0.75


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter, self.norm, self.line = nn.Conv1d(2, 3, 3), nn.LayerNorm(4), nn.Linear(3, 4)


class Network(nn.Module):
    """A matrix outside of the blocks, two blocks with a filter, gains, a matrix and biases."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(3, 4), nn.ModuleList(Block() for _ in range(2))


def run_of(name: str) -> Run:
    return Run.model_validate(
        {
            "optimizer": {
                "name": name,
                "lr": LR,
                "betas": BETAS,
                "weight_decay": DECAY,
                "momentum": MOMENTUM,
                "eps": 1e-5,
            }
        }
    )


def decays(name: str, weight: torch.Tensor) -> bool:
    return weight.ndim >= 2


MATRICES = ["blocks.0.filter.weight", "blocks.0.line.weight", "blocks.1.filter.weight", "blocks.1.line.weight"]
GAINS = [
    f"blocks.{number}.{name}"
    for number in range(2)
    for name in ("filter.bias", "norm.weight", "norm.bias", "line.bias")
]


@pytest.mark.parametrize("name, moments", [("adamw", ADAM), ("lion", ("exp_avg",)), ("adamw8bit", ADAM)])
def test_groups_by_decay(name, moments):
    """Oracle: by hand: matrices first, which decay, then gains and biases, which do not; what is kept of each."""
    network = Network()
    names = {id(weight): name for name, weight in network.named_parameters()}
    found = list(optimizers.make_parameter_groups(network, run_of(name).optimizer, decays, (Block,)))
    assert [[names[id(weight)] for weight in group.pop("params")] for group in found] == [
        ["first.weight", *MATRICES],
        ["first.bias", *GAINS],
    ]
    assert found == [{"weight_decay": DECAY, "moments": moments}, {"weight_decay": 0.0, "moments": moments}]


def test_groups_of_muon():
    """Oracle: by hand: matrices that decay and lie in a block; the rest by decay, with AdamW's moments."""
    network = Network()
    names = {id(weight): name for name, weight in network.named_parameters()}
    found = list(
        optimizers.make_parameter_groups(
            network,
            run_of("muon").optimizer,
            lambda name, weight: (decays(name, weight) and name != MATRICES[0]) or name == "first.bias",
            (Block,),
        )
    )
    assert [[names[id(weight)] for weight in group.pop("params")] for group in found] == [
        MATRICES[1:],
        ["first.weight", "first.bias"],
        [MATRICES[0], *GAINS],
    ]
    assert found == [
        {"weight_decay": DECAY, "moments": ("momentum",), "momentum": MOMENTUM},
        {"weight_decay": DECAY, "moments": ADAM},
        {"weight_decay": 0.0, "moments": ADAM},
    ]


@pytest.mark.parametrize("name, kind", [("adamw", torch.optim.AdamW), ("lion", Lion), ("muon", Muon)])
def test_what_is_built(name, kind):
    """Oracle: the classes by name, with the recipe's own values; a step is taken on the device alone."""
    groups = list(optimizers.make_parameter_groups(Network(), run_of(name).optimizer, decays, (Block,)))
    optimizer = optimizers.build_optimizer(groups, run_of(name).optimizer, False)
    assert type(optimizer) is kind and optimizer._step_supports_amp_scaling
    assert all((group["lr"], group["betas"]) == (LR, BETAS) for group in optimizer.param_groups)
    assert name == "lion" or all(group["eps"] == 1e-5 and group["fused"] for group in optimizer.param_groups)


def gradients(step: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("scale", [None, 4.0])
def test_lion(scale):
    """Oracle: algorithm 2 of Chen et al. 2023 in float64; gradients as a scaler hands them over; a step with found_inf
    changes nothing and is not counted.
    """
    weight, still = nn.Parameter(gradients(99, (4, 5))), nn.Parameter(torch.ones(3))
    optimizer = Lion([{"params": [weight, still], "weight_decay": DECAY, "moments": ("exp_avg",)}], LR, BETAS)
    expected, average = weight.detach().double(), torch.zeros(4, 5, dtype=torch.float64)
    if scale is not None:
        optimizer.grad_scale = torch.tensor(scale)
    for step in range(6):
        gradient, infinite = gradients(step, (4, 5)), step == 3
        weight.grad = gradient * (scale or 1)
        if infinite:
            weight.grad[0, 0] = math.inf
        if scale is not None or step >= 3:
            optimizer.found_inf = torch.tensor(float(infinite))
        before = {name: value.clone() for name, value in optimizer.state[weight].items()}
        optimizer.step()
        if infinite:
            assert all(torch.equal(value, before[name]) for name, value in optimizer.state[weight].items())
        else:
            update = torch.sign(BETAS[0] * average + (1 - BETAS[0]) * gradient)
            expected -= LR * (update + DECAY * expected)
            average = BETAS[1] * average + (1 - BETAS[1]) * gradient
        assert torch.allclose(weight.detach().double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.allclose(optimizer.state[weight]["exp_avg"].double(), average, rtol=1e-5, atol=1e-6)
    assert optimizer.state[weight]["step"] == 5 and torch.equal(still, torch.ones(3)) and still not in optimizer.state


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("shape", [(3, 8), (8, 3), (6, 6), (1, 5)])
def test_what_is_nearly_orthogonal(shape, native, monkeypatch):
    """Oracle: torch.linalg.svd: singular values of the result lie between 0.6 and 1.3, and the vectors stay, in bf16
    and where a CPU without it computes in fp32.
    """
    monkeypatch.setattr(settings, "can_cpu_multiply_bf16", lambda: native)
    matrix = gradients(1, shape) * 1e-3
    u, _s, v = torch.linalg.svd(matrix, full_matrices=False)
    found = optimizers.orthogonalize(matrix.bfloat16()).float()
    assert found.shape == matrix.shape and (inner := u.T @ found @ v.T).diagonal().min() > 0.6
    assert inner.diagonal().max() < 1.3 and (inner - inner.diagonal().diag()).abs().max() < 0.1
    assert torch.equal(optimizers.orthogonalize(torch.zeros(shape).bfloat16()), torch.zeros(shape).bfloat16())


@pytest.mark.parametrize("applied", [True, False])
def test_muon(applied):
    """Oracle: torch.optim.Muon of the matrices, torch.optim.AdamW of the rest; a flat holds matrices one behind the
    other, and elements that are none stay. Before matrices are placed, they stay, too.
    """
    shapes = {"a": (3, 8), "b": (8, 2, 2)}
    flat, rest = nn.Parameter(gradients(7, (24 + 32 + 5,))), nn.Parameter(gradients(8, (6,)))
    plain = {
        name: nn.Parameter(flat.detach()[start : start + math.prod(shape)].clone().view(shape[0], -1))
        for (name, shape), start in zip(shapes.items(), (0, 24))
    }
    line = nn.Parameter(rest.detach().clone())
    optimizer = Muon(
        [
            {"params": [flat], "weight_decay": DECAY, "moments": ("momentum",), "momentum": MOMENTUM},
            {"params": [rest], "weight_decay": 0.0, "moments": ADAM},
        ],
        lr=LR,
        betas=BETAS,
        fused=True,
    )
    muon = torch.optim.Muon(
        plain.values(), lr=LR, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW([line], lr=LR, betas=BETAS, weight_decay=0.0, fused=True)
    before = flat.detach().clone()
    flat.grad, rest.grad = torch.zeros_like(flat), None
    optimizer.step()
    assert torch.equal(flat, before) and rest not in optimizer.state
    fragments = [(Fragment("a", (3, 8), 0, 24), 0, 0), (Fragment("b", (8, 2, 2), 0, 32), 0, 24)]
    optimizer.assign_matrices_to_ranks([flat, rest], {0: fragments})
    for step in range(4):
        flat.grad, rest.grad = gradients(10 + step, flat.shape), gradients(20 + step, rest.shape)
        line.grad = rest.grad.clone()
        for weight, start in zip(plain.values(), (0, 24)):
            weight.grad = flat.grad[start : start + weight.numel()].view(weight.shape).clone()
        if not applied and step == 2:
            optimizer.found_inf, kept = torch.tensor(1.0), [flat.detach().clone(), rest.detach().clone()]
            flat.grad[3] = rest.grad[0] = math.nan
            optimizer.step()
            assert torch.equal(flat, kept[0]) and torch.equal(rest, kept[1])
            optimizer.found_inf = torch.tensor(0.0)
            flat.grad, rest.grad = gradients(10 + step, flat.shape), gradients(20 + step, rest.shape)
        for each in (optimizer, muon, adamw):
            each.step()
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
    for weight, start in zip(plain.values(), (0, 24)):
        assert torch.allclose(flat[start : start + weight.numel()].view(weight.shape), weight, rtol=0, atol=2e-2 * LR)
    assert torch.allclose(rest, line, atol=1e-6) and optimizer.state[flat]["step"] == optimizer.state[rest]["step"] == 4
    assert torch.allclose(flat[56:], before[56:] * (1 - LR * DECAY) ** 4)


def test_moments_of_eight_bits():
    """Oracle: the values themselves, within the rounding to 8 bits; small tensors are kept as they are."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    large, small = nn.Parameter(gradients(1, (64, 128))), nn.Parameter(gradients(2, (5,)))
    optimizer = bitsandbytes.optim.AdamW8bit([{"params": [large, small], "moments": ADAM}], lr=LR, betas=BETAS)
    for weight in (large, small):
        state = optimizers.get_or_make_state(optimizer, weight, ADAM)
        assert (
            optimizers.get_or_make_state(optimizer, weight, ADAM) is state
            and len(optimizer.param_groups[0]["params"]) == 2
        )
        for number, kind in enumerate(ADAM):
            assert not optimizers.get_moment_in_fp32(state, kind).any()
            values = gradients(3 + number, weight.shape).abs()
            if weight is small:
                optimizers.get_moment_in_fp32(state, kind).copy_(values)
                optimizers.write_back_8bit_moment(state, kind, values)
                assert torch.equal(optimizers.get_moment_in_fp32(state, kind), values)
                continue
            optimizers.write_back_8bit_moment(state, kind, values)
            read = optimizers.get_moment_in_fp32(state, kind)
            assert read.shape == values.shape and 0 < (read - values).abs().max() < 0.03 * values.max()
