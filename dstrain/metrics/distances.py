"""Computes metrics of two sets of features, or of one. All ranks must call them with the same arguments.

The ranks share the work in pieces of a fixed size, so that a result does not depend on the number of ranks.
"""

import math

import numpy as np
import torch
from torch import Tensor

from dstrain.distributed import group
from dstrain.encoders.precision import use_precision

NEIGHBOURS = 5  # the farthest that precision and its like look for
_ROWS = 512  # of a matrix of distances at a time
_SEED = 2020  # of the choices below, torch-fidelity's


def compute_frechet_distance(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> float:
    """Returns the squared Frechet distance between two Gaussians (Dowson & Landau 1982), from their float64 means (D,)
    and covariances (D, D).

    The trace of sqrt(S T) is the sum of the singular values of A^T B, where S = A A^T and T = B B^T. So no eigenvalue
    comes out negative, even with fewer samples than D.
    """
    cross = torch.linalg.svdvals(_factor_covariance(covariance).T @ _factor_covariance(other_covariance)).sum()
    distance = (mean - other_mean).square().sum() + covariance.trace() + other_covariance.trace() - 2 * cross
    return max(distance.item(), 0.0)


def _factor_covariance(covariance: Tensor) -> Tensor:
    """Returns a matrix A (D, r) with S = A A^T, for a covariance S (D, D). r is the rank of S within rounding."""
    values, vectors = torch.linalg.eigh(covariance)
    real = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
    return vectors[:, real] * values[real].sqrt()


def compute_kid(features: Tensor, reference: Tensor, subsets: int = 100, size: int = 1000) -> tuple[float, float]:
    """Returns the kernel distance (KID, Binkowski et al. 2018) between features float32 (N, D) and (M, D): its mean and
    its standard deviation over random subsets.

    The estimate is unbiased, with the kernel (x y / D + 1)^3. Each subset has `size` rows of either set, or as many as
    the smaller set has. The subsets are drawn as in torch-fidelity. Each rank computes its share of the subsets; all
    ranks must call it.
    """
    size = min(size, len(features), len(reference))
    random, values = np.random.RandomState(_SEED), torch.zeros(subsets, dtype=torch.float64, device=features.device)
    for number in range(subsets):
        chosen = [torch.from_numpy(random.choice(len(rows), size, replace=False)) for rows in (features, reference)]
        if number % group.world() == group.rank():
            x, y = features[chosen[0].to(features.device)], reference[chosen[1].to(reference.device)]
            values[number] = _average_kid_kernel(x, x) + _average_kid_kernel(y, y) - 2 * _average_kid_kernel(x, y)
    values = group.sum_over_ranks(values)
    return values.mean().item(), values.std(correction=0).item()


def _average_kid_kernel(x: Tensor, y: Tensor) -> Tensor:
    """Returns the mean of the kernel (x y / D + 1)^3 over all pairs of a row of x (N, D) and a row of y (M, D), a
    float64 scalar. If x and y are the same tensor, pairs of a row with itself are left out.
    """
    with use_precision("fp32"):
        kernel = (x @ y.T / x.shape[1] + 1).double().pow_(3)
    if x is not y:
        return kernel.mean()
    return (kernel.sum() - kernel.trace()) / (len(x) * (len(x) - 1))


def measure_manifold_overlap(
    features: Tensor, reference: Tensor, neighbours: int = 3, density_neighbours: int = NEIGHBOURS
) -> dict[str, float]:
    """Returns precision, recall, density and coverage, by name, of features float32 (N, D) against a reference (M, D).
    All four are NaN if a set has no more than `density_neighbours` rows. Each row of a set is the centre of a ball,
    whose radius is the distance to the k-th nearest other row of this set. Each rank computes its share; all ranks must
    call it.

    precision  share of features within a ball of the reference, k = `neighbours` (Kynkaanniemi et al. 2019).
    recall     share of the reference's rows within a ball of the features, k = `neighbours`.
    density    mean number of the reference's balls that contain a feature, divided by k = `density_neighbours`
               (Naeem et al. 2020).
    coverage   share of the reference's balls that contain a feature, k = `density_neighbours`.
    """
    if min(len(features), len(reference)) <= density_neighbours:
        return dict.fromkeys(("precision", "recall", "density", "coverage"), math.nan)
    center = reference.mean(0)  # distances lose no digits to what all features share
    features, reference = features - center, reference - center
    own = _compute_squared_radii(features, (neighbours,))[0]
    other, wide = _compute_squared_radii(reference, (neighbours, density_neighbours))  # squared, as all distances here
    inside = torch.zeros(3, dtype=torch.float64, device=features.device)  # in precision, in density; covered
    recalled, nearest = torch.zeros_like(other), torch.full_like(other, math.inf)
    for rows in _list_row_slices_of_rank(len(features)):
        squares = _compute_squared_distances(features[rows], reference)  # (rows, M)
        inside[0] += (squares <= other).any(1).sum()
        inside[1] += (squares <= wide).sum()
        recalled = torch.maximum(recalled, (squares <= own[rows, None]).any(0).float())
        nearest = torch.minimum(nearest, squares.amin(0))
    inside, recalled = group.sum_over_ranks(inside), group.sum_over_ranks(recalled) > 0
    covered = group.sum_over_ranks((nearest <= wide).float()) > 0
    return {
        "precision": inside[0].item() / len(features),
        "recall": recalled.double().mean().item(),
        "density": inside[1].item() / (density_neighbours * len(features)),
        "coverage": covered.double().mean().item(),
    }


def _list_row_slices_of_rank(count: int) -> list[slice]:
    """Returns this rank's share of `count` rows, as slices of at most 512 rows each."""
    return [
        slice(begin, min(begin + _ROWS, count)) for begin in range(group.rank() * _ROWS, count, _ROWS * group.world())
    ]


def _compute_squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Returns the squared distances (N, M) between the rows of x (N, D) and those of y (M, D)."""
    with use_precision("fp32"):
        products = x @ y.T
    return products.mul_(-2).add_(x.square().sum(1)[:, None]).add_(y.square().sum(1)).clamp_(min=0)


def _compute_squared_radii(features: Tensor, neighbours: tuple[int, ...]) -> Tensor:
    """Returns (len(neighbours), N): for each n in `neighbours`, the squared distance from each row of `features` (N, D)
    to its n-th nearest other row. Each rank computes its share of the rows; all ranks must call it.
    """
    radii = torch.zeros(len(neighbours), len(features), device=features.device)
    for rows in _list_row_slices_of_rank(len(features)):
        smallest = (
            _compute_squared_distances(features[rows], features).topk(max(neighbours) + 1, largest=False).values
        )  # itself first
        for index, number in enumerate(neighbours):
            radii[index, rows] = smallest[:, number]
    return group.sum_over_ranks(radii)


def compute_inception_score(probabilities: Tensor, entropies: Tensor, counts: Tensor) -> tuple[float, float]:
    """Returns the Inception Score (Salimans et al. 2016), exp(mean KL to the marginal): its mean and its standard
    deviation over S splits of the samples. Let p be the probabilities of the K classes for a sample.

    probabilities  float64 (S, K): the sum of p over the samples of each split.
    entropies      float64 (S,): the sum of p log p over the samples and classes of each split.
    counts         float64 (S,): the number of samples of each split.
    """
    counts = counts.clamp(min=1)
    marginal = probabilities / counts[:, None]
    information = entropies / counts - torch.special.xlogy(marginal, marginal).sum(1)
    scores = information.exp()
    return scores.mean().item(), scores.std(correction=0).item()
