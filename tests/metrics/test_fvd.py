"""FVD by networks that a user gives: a folder of VideoMAE and a TorchScript file; on one rank and on two."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import VideoMAEConfig, VideoMAEModel

from dstrain.commands.evaluating.quality import measure_quality
from dstrain.commands.options.evaluate import EvaluateOptions
from tests.metrics.oracles import VideoDetector, arrays, detector, noise
from tests.metrics.test_sfid import distance
from tests.support import gloo


def work(rank: int, words: str, first: Path, second: Path) -> float:
    return measure_quality(
        EvaluateOptions(metrics=("fvd",), features=(words,), images=first, reference=second, batch=2)
    )[1]["figures"]["fvd"]


@pytest.mark.parametrize("kind", ["videomae", "i3d"])
def test_fvd(tmp_path, kind):
    """Oracle: transformers' model on frames resized and normalized by hand, or plain means, and Frechet's distance of
    numpy's moments; two ranks, of which one has fewer clips.
    """
    clips = [noise(4 * number, 20, 20).view(number, 4, 3, 20, 20) // divisor for number, divisor in ((7, 1), (5, 2))]
    paths = [arrays(tmp_path / f"{number}.npz", part) for number, part in enumerate(clips)]
    if kind == "i3d":
        words = f"i3d:{detector(tmp_path / 'i3d.pt', VideoDetector)}"
        rows = [torch.cat((part.float().mean((1, 3, 4)), part.float().mean((2, 3, 4))), 1) for part in clips]
    else:
        torch.manual_seed(0)
        small = {
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "num_frames": 4,
        }
        model = VideoMAEModel(VideoMAEConfig(**small)).eval()
        model.save_pretrained(tmp_path / "video")
        words = f"videomae:{tmp_path / 'video'}"
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        frames = [
            F.interpolate(part.flatten(0, 1).float(), (224, 224), mode="bicubic", antialias=True) for part in clips
        ]
        with torch.no_grad():
            rows = [
                model(((part / 255 - mean) / std).view(-1, 4, 3, 224, 224)).last_hidden_state.mean(1) for part in frames
            ]
    expected = distance(*(part.double().numpy() for part in rows))
    alone = work(0, words, *paths)
    assert np.isfinite(expected) and alone == pytest.approx(expected, rel=1e-4)
    assert gloo.run(tmp_path, work, words, *paths) == [pytest.approx(alone, rel=1e-6)] * 2
