"""Held-out figures by any batch size and number of ranks."""

import pytest

from dstrain.commands.evaluate import average_system_measurements_over_source
from dstrain.data.batches import iterate_held_out
from dstrain.data.sources.images import open_images
from dstrain.data.views import View
from dstrain.sampling.draw import evaluate_held_out_batches
from tests.support import gloo
from tests.systems.vae.test_discrete import build as discrete
from tests.systems.vae.test_discrete import nets_of
from tests.systems.vae.test_kl import GAN
from tests.systems.vae.test_kl import build as kl
from tests.systems.vae.test_kl import nets_of as kl_nets_of

SAMPLES = 11  # no multiple of a batch or a world


class First(View):
    """The first few held-out garments."""

    def __init__(self):
        super().__init__(open_images("builtin:fashion", 16, channels=1, split="held_out"))

    def __len__(self):
        return SAMPLES


def figures(rank, world, batch):
    system, adversarial = discrete(1, kl_weight=1.0), kl(**GAN)
    scores = [
        evaluate_held_out_batches(one, nets, iterate_held_out(First(), batch, rank, world))
        for one, nets in ((system, nets_of(system)), (adversarial, kl_nets_of(adversarial)))
    ]
    return {f"{number}/{name}": value for number, found in enumerate(scores) for name, value in found.items()}


@pytest.fixture(scope="module")
def alone():
    return figures(0, 1, SAMPLES)


@pytest.mark.parametrize("batch", [1, 4])
def test_batch_size(alone, batch):
    """Oracle: all samples in one batch."""
    assert figures(0, 1, batch) == pytest.approx(alone, rel=1e-4, abs=1e-5)
    assert {
        "0/perplexity",
        "0/dead_tokens",
        "0/psnr",
        "0/ssim",
        "0/kl",
        "1/scaling_factor",
        "1/psnr",
        "1/ssim",
        "1/kl",
    } <= alone.keys()


def test_evaluation_says_the_same(alone):
    """Oracle: the figures that training reports."""
    system = discrete(1, kl_weight=1.0)
    found = average_system_measurements_over_source(system, nets_of(system), First(), batch=4, seed=0)["figures"]
    for name in ("perplexity", "dead_tokens", "psnr", "kl"):
        assert found[name] == pytest.approx(alone[f"0/{name}"], rel=1e-4)


@pytest.mark.slow
def test_world_size(alone, tmp_path):
    """Oracle: the same in one process."""
    for found in gloo.run(tmp_path, figures, 2, 3):
        assert found == pytest.approx(alone, rel=1e-4, abs=1e-5)
