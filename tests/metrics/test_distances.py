"""Figures from features: closed forms and plain numpy, and the reference implementations where they are installed."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from dstrain.metrics import distances


def rows(count: int, size: int, seed: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """Correlated features float32 (count, size)."""
    random = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, size, generator=random) @ torch.randn(size, size, generator=random) / math.sqrt(size)
    return mixed * scale + shift


def moments(features: Tensor) -> tuple[Tensor, Tensor]:
    return features.double().mean(0), torch.cov(features.double().T)


def test_frechet_of_diagonal_gaussians():
    """Oracle: the closed form for covariances that commute: (m - n)^2 + sum of (sqrt s - sqrt t)^2; zero for equals."""
    random = torch.Generator().manual_seed(0)
    m, n, s, t = torch.rand(4, 50, dtype=torch.float64, generator=random)
    s[:20] = t[:10] = 0  # singular, as where images are fewer than features
    turn = torch.linalg.qr(torch.randn(50, 50, dtype=torch.float64, generator=random))[0]
    turned = (turn @ m, turn @ s.diag() @ turn.T, turn @ n, turn @ t.diag() @ turn.T)
    expected = ((m - n).square() + (s.sqrt() - t.sqrt()).square()).sum().item()
    assert distances.compute_frechet_distance(*turned) == pytest.approx(expected, rel=1e-9)
    assert distances.compute_frechet_distance(*turned[:2], *turned[:2]) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("count", [400, 60])
def test_frechet_of_pytorch_fid(count, monkeypatch):
    """Oracle: pytorch-fid's function, also with fewer images than features."""
    reference = pytest.importorskip("pytorch_fid.fid_score")
    root = reference.linalg.sqrtm  # from 1.18 on, scipy's has no `disp`, and gives one value
    monkeypatch.setattr(reference.linalg, "sqrtm", lambda values, disp: (root(values), None))
    first, second = moments(rows(count, 96, 0)), moments(rows(count + 50, 96, 1, 1.2, 0.1))
    expected = reference.calculate_frechet_distance(*(values.numpy() for values in (*first, *second)))
    assert distances.compute_frechet_distance(*first, *second) == pytest.approx(expected, rel=1e-4)


def test_kid_of_whole_sets():
    """Oracle: numpy in float64: the unbiased estimate over all pairs, which every subset of a whole set gives."""
    x, y = rows(80, 12, 0), rows(80, 12, 1, shift=0.2)
    mean, deviation = distances.compute_kid(x, y)
    kernels = [(a.double().numpy() @ b.double().numpy().T / 12 + 1) ** 3 for a, b in ((x, x), (y, y), (x, y))]
    off = ~np.eye(80, dtype=bool)
    assert mean == pytest.approx(kernels[0][off].mean() + kernels[1][off].mean() - 2 * kernels[2].mean(), rel=1e-5)
    assert deviation < 1e-5


def test_kid_of_torch_fidelity():
    """Oracle: torch-fidelity's function on the same features, mean and deviation over subsets."""
    reference = pytest.importorskip("torch_fidelity.metric_kid")
    x, y = rows(1300, 32, 0), rows(1100, 32, 1, shift=0.3)
    expected = reference.kid_features_to_metric(
        x,
        y,
        kid_subsets=100,
        kid_subset_size=1000,
        kid_degree=3,
        kid_gamma=None,
        kid_coef0=1,
        kid_kernel="poly",
        rng_seed=2020,
        verbose=False,
    )
    assert distances.compute_kid(x, y) == pytest.approx(
        (expected["kernel_inception_distance_mean"], expected["kernel_inception_distance_std"]), rel=1e-4
    )


def test_manifold():
    """Oracle: the definitions in numpy, with loops over points, in float64."""
    x, y = rows(150, 6, 0, shift=3.0), rows(130, 6, 1, 1.2, shift=3.0)
    a, b = x.double().numpy(), y.double().numpy()

    def between(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return np.array([[np.linalg.norm(left - right) for right in q] for left in p])

    def radii(p: np.ndarray, number: int) -> np.ndarray:
        return np.sort(between(p, p), 1)[:, number]

    cross = between(a, b)
    expected = {
        "precision": (cross <= radii(b, 3)).any(1).mean(),
        "recall": (cross <= radii(a, 3)[:, None]).any(0).mean(),
        "density": (cross <= radii(b, 5)).sum() / (5 * len(a)),
        "coverage": (cross <= radii(b, 5)).any(0).mean(),
    }
    assert distances.measure_manifold_overlap(x, y) == pytest.approx(expected, rel=1e-6)
    assert 0.2 < expected["recall"] < 0.99 and expected["density"] > 0.2


def test_manifold_of_torch_fidelity():
    """Oracle: torch-fidelity's precision and recall on the same features."""
    reference = pytest.importorskip("torch_fidelity.metric_prc")
    x, y = rows(700, 8, 0), rows(600, 8, 1, 1.2)
    expected = reference.prc_features_to_metric(
        x, y, prc_neighborhood=3, prc_batch_size=10000, save_cpu_ram=False, verbose=False
    )
    values = distances.measure_manifold_overlap(x, y)
    assert values["precision"] == pytest.approx(expected["precision"], rel=1e-4)
    assert values["recall"] == pytest.approx(expected["recall"], rel=1e-4)


def test_manifold_of_too_few():
    """Oracle: five neighbours need six points."""
    assert all(
        math.isnan(value) for value in distances.measure_manifold_overlap(rows(5, 4, 0), rows(50, 4, 1)).values()
    )


def test_inception_score_of_certain_and_of_uncertain_classifiers():
    """Oracle: closed forms: K where every class is met equally and each sample is certain, 1 where none is."""
    counts = torch.tensor([50.0, 50.0]).double()
    certain = torch.full((2, 5), 10.0).double()  # 10 samples of each class, p log p = 0
    assert distances.compute_inception_score(certain, torch.zeros(2).double(), counts) == pytest.approx((5, 0))
    unsure = 50 * math.log(1 / 5) * torch.ones(2).double()
    assert distances.compute_inception_score(certain, unsure, counts) == pytest.approx((1, 0), abs=1e-12)
