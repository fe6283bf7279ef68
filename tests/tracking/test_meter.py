"""Oracle: numpy's means over the concatenation of all batches of all ranks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dstrain.tracking.meter import Meter
from tests.support import gloo


def batch(seed: int, size: int, bad: float = 0.0) -> dict[str, torch.Tensor]:
    draw = np.random.default_rng(seed)
    mse, each = draw.normal(size=(2, size)).astype(np.float32)
    mse[draw.random(size) < bad] = np.nan
    each[draw.random(size) < bad] = np.inf
    return {
        "loss": torch.tensor(draw.normal(), dtype=torch.float32),
        "mse": torch.from_numpy(mse),
        "loss_each": torch.from_numpy(each),
        "quartile": torch.from_numpy(draw.integers(0, 4, size)),
    }


def expected(batches: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    def mean(values: np.ndarray) -> float:
        values = values[np.isfinite(values)]
        return values.mean() if len(values) else math.nan

    joined = {
        name: np.concatenate([b[name].numpy() for b in batches]).astype(np.float64)
        for name in ("mse", "loss_each", "quartile")
    }
    sizes = [len(b["mse"]) for b in batches]
    means = {"loss": np.average([b["loss"].item() for b in batches], weights=sizes), "mse": mean(joined["mse"])}
    for q in range(4):
        chosen = joined["quartile"] == q
        means[f"mse_q{q}"] = mean(joined["mse"][chosen])
        means[f"loss_q{q}"] = mean(joined["loss_each"][chosen])
    bad = sum((~np.isfinite(joined[name])).sum() for name in ("mse", "loss_each"))
    return {name: float(value) for name, value in means.items() if not math.isnan(value)} | (
        {"nonfinite": float(bad)} if bad else {}
    )


def same(means: dict[str, float], reference: dict[str, float]) -> bool:
    return means.keys() == reference.keys() and all(
        math.isclose(means[name], reference[name], rel_tol=1e-12, abs_tol=1e-13) for name in reference
    )


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    seed=st.integers(0, 999),
    bad=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
)
def test_means_over_uneven_batches(sizes, seed, bad):
    """Oracle: numpy's means over the joined batches, not finite ones left out; nothing once they were taken."""
    batches = [batch(seed + i, size, bad) for i, size in enumerate(sizes)]
    meter = Meter(["net"])
    for terms in batches:
        meter.add_terms("net", terms)
    means = meter.compute_means()
    assert same(means, expected(batches)), (means, expected(batches))
    assert meter.compute_means() == {}
    meter.add_terms("net", batches[0])
    assert same(meter.compute_means(), expected(batches[:1]))


def test_each_part_has_its_names():
    """Oracle: names and means by hand, two parts."""
    meter = Meter(["net", "critic"])
    meter.add_terms("net", {"loss": torch.tensor(1.0), "kl": torch.tensor([1.0, 3.0])})
    meter.add_terms("critic", {"loss": torch.tensor(5.0)})
    meter.add_terms("critic", {"loss": torch.tensor(6.0)})
    assert meter.compute_means() == {"net/loss": 1.0, "net/kl": 2.0, "critic/loss": 5.5}


def test_a_term_that_is_never_finite_is_counted_alone():
    """Oracle: by hand: one value is not finite, its name is left out, the other's mean stays."""
    meter = Meter(["net"])
    meter.add_terms("net", {"loss": torch.tensor(math.nan), "mse": torch.ones(3)})
    assert meter.compute_means() == {"mse": 1.0, "nonfinite": 1.0}


def test_half_precision_and_gradients_are_taken():
    """Oracle: the values handed in, which bfloat16 holds exactly."""
    meter = Meter(["net"])
    meter.add_terms("net", {"loss": torch.tensor(1.5, dtype=torch.bfloat16), "mse": torch.ones(2, requires_grad=True)})
    assert meter.compute_means() == {"loss": 1.5, "mse": 1.0}


def test_a_long_interval_loses_nothing():
    """Oracle: the closed form (1e8 + 1000) / 1001, exactly; a float32 sum would stay at 1e8."""
    meter = Meter(["net"])
    for value in [1e8] + [1.0] * 1000:
        meter.add_terms("net", {"loss": torch.tensor(value)})
    assert meter.compute_means()["loss"] == (1e8 + 1000) / 1001


@pytest.mark.parametrize(
    "terms",
    [
        {"mse": torch.ones(2, 3)},
        {"mse": torch.ones(2), "kl": torch.ones(3)},
        {"mse": torch.ones(2), "quartile": torch.zeros(3, dtype=torch.int64)},
    ],
)
def test_other_shapes_are_refused(terms):
    """Oracle: the contract, scalars or one value a sample, of one batch size."""
    with pytest.raises(ValueError, match="scalars or one value a sample"):
        Meter(["net"]).add_terms("net", terms)


class NoWait(TorchDispatchMode):
    """Refuses what makes a GPU's host wait: values, or shapes that depend on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indexed = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        assert not indexed and name not in ("_local_scalar_dense", "nonzero", "masked_select")
        return func(*args, **(kwargs or {}))


def test_adding_never_waits_for_the_device(monkeypatch):
    """Oracle: a dispatch mode that refuses item, nonzero and masks; first that it does refuse two of them."""
    terms = batch(0, 8, 0.3)
    for name in ("tolist", "numpy", "cpu", "item", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *a, name=name, **k: pytest.fail(f"Tensor.{name} waits"))
    with NoWait():
        with pytest.raises(AssertionError):
            terms["mse"][terms["quartile"] == 0]
        with pytest.raises(AssertionError):
            torch.masked_select(terms["mse"], terms["quartile"] == 0)
        meter = Meter(["net"])
        meter.add_terms("net", terms)
        meter.add_terms("net", terms)


def reported(rank: int) -> dict[str, float]:
    meter = Meter(["net"])
    for terms in of_rank(rank):
        meter.add_terms("net", terms)
    return meter.compute_means()


def of_rank(rank: int) -> list[dict[str, torch.Tensor]]:
    return [batch(10 * rank + i, size, 0.1) for i, size in enumerate(((3, 5), (7, 2, 4))[rank])]


def test_ranks_with_uneven_counts(tmp_path):
    """Oracle: numpy's means over both ranks' batches joined, the same on both ranks."""
    first, second = gloo.run(tmp_path, reported)
    assert first == second
    assert same(first, expected(of_rank(0) + of_rank(1)))
