"""sFID as ADM's evaluator computes it, with seeded weights: spatial features, their files, and the distance."""

import numpy as np
import pytest
import torch

from dstrain.commands.evaluating.quality import measure_quality
from dstrain.commands.options.evaluate import EvaluateOptions
from tests.metrics.oracles import arrays, noise, seeded_inception


def distance(first: np.ndarray, second: np.ndarray) -> float:
    """Frechet's, of rows (n, D). The roots of the eigenvalues of a product of covariances are singular values here."""
    centred = [(rows - rows.mean(0)) / np.sqrt(len(rows) - 1) for rows in (first, second)]
    cross = np.linalg.svd(centred[0] @ centred[1].T, compute_uv=False).sum()
    return np.square(first.mean(0) - second.mean(0)).sum() + sum(np.square(rows).sum() for rows in centred) - 2 * cross


def test_sfid_of_adm(tmp_path, monkeypatch):
    """Oracle: pytorch-fid's network, hooked where ADM reads `mixed_6/conv:0`: the first 7 channels, channels last,
    2,023 values; numpy's mean and covariance of them in a file with ADM's names, and Frechet's distance.
    """
    theirs = pytest.importorskip("pytorch_fid.inception")
    weights = seeded_inception(tmp_path / "pt_inception.pth")
    monkeypatch.setattr(theirs, "load_state_dict_from_url", lambda *_, **__: torch.load(weights, weights_only=True))
    network, seen = theirs.InceptionV3([2]).eval(), []
    network.blocks[2][6].branch1x1.register_forward_hook(lambda *args: seen.append(args[-1]))
    sets = [noise(4, 299, 299), noise(5, 299, 299).clamp(60, 200)]
    for images in sets:
        with torch.no_grad():
            network(images.float() / 255)
    rows = [maps.permute(0, 2, 3, 1)[..., :7].reshape(len(maps), -1).double().numpy() for maps in seen]
    assert [part.shape for part in rows] == [(4, 2023), (5, 2023)]
    np.savez(tmp_path / "adm.npz", mu_s=rows[1].mean(0), sigma_s=np.cov(rows[1], rowvar=False))
    figures = measure_quality(
        EvaluateOptions(
            metrics=("sfid",),
            features=(f"pytorch-fid:{weights}",),
            images=arrays(tmp_path / "a.npz", sets[0]),
            reference=tmp_path / "adm.npz",
            batch=3,
        )
    )[1]["figures"]
    assert figures == {"sfid": pytest.approx(distance(*rows), rel=1e-4)}
