"""Means over held-out samples: the same for any batching and number of ranks, and what a plain loop finds."""

import math
import zlib

import numpy as np
import pytest
import torch

from dstrain import rng, systems
from dstrain.commands.evaluate import _open_source_to_measure, average_system_measurements_over_source
from dstrain.commands.options.evaluate import EvaluateOptions
from dstrain.data.batches import iterate_held_out
from dstrain.data.builtin.fashion import Fashion
from dstrain.data.builtin.moving import MovingFashion
from dstrain.data.views import Spread
from dstrain.diffusion import schedule
from dstrain.diffusion.bound import measure_variational_bound
from dstrain.diffusion.gaussian import GaussianDiffusion
from dstrain.recipe import ConfigError, Run
from dstrain.systems.base import Batch, Example, Nets, Progress, System, Terms
from dstrain.tracking.videos import save_gif
from tests.support import counting, gloo
from tests.support.sources import Numbers

MODEL = {
    "image_size": 8,
    "in_channels": 1,
    "patch_size": 4,
    "hidden_size": 16,
    "depth": 1,
    "num_heads": 2,
    "num_classes": 10,
}
PIXELS = MODEL | {"diffusion": {"num_steps": 12, "schedule": "cosine"}}
COUNTS = ((1, 5), (2, 3), (7, 2), (8, 8), (13, 1), (13, 64))  # (samples, batch)


class Known(System):
    """Measures what numpy can tell of Numbers, exact in integers: value i, a curve i, 2 i, 3 i, a quarter i mod 4."""

    parts = {"net": lambda nets, example: {}}
    averaged = ()
    calls = 0

    def networks(self) -> dict:
        return {}

    def synthetic(self, batch_size: int) -> Batch:
        return {"label": torch.arange(batch_size)}

    def encode(self, batch: Batch) -> Example:
        assert "valid" not in batch
        return {"number": batch["label"].float(), "key": batch["key"]}

    def measure(self, nets: Nets, example: Example, num_steps: int | None = None, progress: Progress = iter) -> Terms:
        self.calls += 1
        number = example["number"]
        columns = [number * (1 + step) for step in progress(range(3))]
        return {
            "value": number,
            "curve": torch.stack(columns, 1),
            "quartile": number.long() % 4,
            "timestep": torch.tensor([0, 5, 9]).expand(len(number), -1),
            "noise": (example["key"] % 97).float(),
        }


def expected(size: int) -> dict:
    """What Known gives of `size` samples, by numpy."""
    number = np.arange(size, dtype=np.float64)
    error = None if size == 1 else number.std(ddof=1) / math.sqrt(size)
    quarters = [number[quarter::4].mean() if size > quarter else None for quarter in range(4)]
    return {
        "value": number.mean() if size else None,
        "error": error,
        "curve": [number.mean() * k for k in (1, 2, 3)],
        "quarters": quarters,
    }


def together(rank: int) -> list[tuple[dict, int]]:
    found = []
    for size, batch in COUNTS:
        system = Known()
        found.append(
            (average_system_measurements_over_source(system, {}, Numbers(size), batch=batch, seed=7), system.calls)
        )
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return gloo.run(tmp_path_factory.mktemp("two"), together)


@pytest.mark.parametrize("index", range(len(COUNTS)), ids=lambda index: f"{COUNTS[index][0]} by {COUNTS[index][1]}")
def test_means_of_one_and_two_ranks(two, index):
    """Oracle: numpy over all numbers, in any batching; both ranks know all and have made equally many calls."""
    size, batch = COUNTS[index]
    wanted, alone = (
        expected(size),
        average_system_measurements_over_source(Known(), {}, Numbers(size), batch=batch, seed=7),
    )
    for found, calls in [(alone, None)] + [of[index] for of in two]:
        assert found["figures"]["value"] == pytest.approx(wanted["value"], rel=1e-14)
        assert found["standard_errors"]["value"] == (pytest.approx(wanted["error"]) if size > 1 else None)
        assert found["curves"]["curve"] == pytest.approx(wanted["curve"], rel=1e-14)
        assert found["quarters"]["value"] == wanted["quarters"] and found["timesteps"] == [0, 5, 9]
        assert found["figures"]["noise"] == alone["figures"]["noise"] and found["nonfinite_samples"] == 0
        assert set(found["figures"]) == {"value", "noise"} and set(found["curves"]) == {"curve"}
        assert calls in (None, -(-size // (2 * batch)))


def test_values_that_are_not_finite():
    """Oracle: two of the five roots are NaN and one logarithm is -inf; the filling of the last batch gives none."""

    class Roots(Known):
        def measure(self, nets, example, num_steps=None, progress=iter):
            number = example["number"]
            number = torch.where(torch.arange(len(number)) + number[0] > 4, -9.0, number)  # the filling
            return {"root": (2 - number).sqrt(), "curve": torch.stack((number, number.log()), 1)}

    found = average_system_measurements_over_source(Roots(), {}, Numbers(5), batch=2, seed=0)
    assert found["figures"] == {"root": None} and found["nonfinite_samples"] == 3
    assert found["curves"]["curve"] == [2.0, None]


@pytest.mark.parametrize(
    "size, num, indices",
    [(10, 5, [0, 2, 4, 6, 8]), (10, 3, [0, 3, 6]), (4, None, [0, 1, 2, 3]), (4, 9, [0, 1, 2, 3]), (7, 1, [0])],
)
def test_samples_are_spread(size, num, indices):
    """Oracle: indices counted out by hand; a folder lists class by class, so the first ones would be of one class."""
    spread = Spread(Numbers(size), num)
    assert [spread[i]["label"] for i in range(len(spread))] == indices


# ----------------------------------------------------------------------------------------------------- systems' terms


def network_of(system: System):
    """A network whose every weight is random, in float64, so that batches of any shape round alike."""
    network = system.networks()["denoiser"]
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return network.eval()


@pytest.mark.parametrize("num_steps", [None, 12, 5, 1])
@pytest.mark.parametrize("changes", [{}, {"learn_sigma": False}], ids=["learned", "fixed"])
def test_the_bound_of_a_plain_loop(num_steps, changes):
    """Oracle: bits_per_dim called for one image at a time, each with noise of its own key, averaged by numpy."""
    system, source = systems.build("dit", PIXELS | changes), Spread(Fashion(8, 1, "held_out"), 9)
    network = network_of(system)
    found = average_system_measurements_over_source(
        system, {"denoiser": network}, source, batch=4, seed=3, num_steps=num_steps
    )
    chain = system.diffusion.respace("" if num_steps is None else str(num_steps))
    rows = []
    for index in range(9):
        item = Fashion(8, 1, "held_out")[index * 500 // 9]
        key, label = rng.keys(3, -1, torch.tensor([index])), torch.tensor([item["label"]])
        with torch.no_grad():
            rows.append(
                chain.compute_bits_per_dim(
                    lambda x, t: network(x, t, label),
                    item["image"][None] / 127.5 - 1,
                    lambda i: rng.normal(key, f"bound/{i}", (1, 8, 8)),
                )
            )
    mean = {name: np.mean([row[name][0].numpy().astype(np.float64) for row in rows], axis=0) for name in rows[0]}
    for name in ("total", "prior"):
        assert found["figures"][name] == pytest.approx(mean[name], rel=1e-5, abs=1e-9)
    for name in ("vb", "mse", "x_start_mse"):
        assert found["curves"][name] == pytest.approx(mean[name][::-1], rel=1e-4, abs=1e-7)
    assert found["timesteps"] == schedule.space_timesteps(12, str(num_steps or 12))
    assert sum(found["curves"]["vb"]) + found["figures"]["prior"] == pytest.approx(found["figures"]["total"], rel=1e-6)


@pytest.mark.parametrize("num_steps", [0, 13, -1])
def test_steps_beyond_the_chain(num_steps):
    """Oracle: a ValueError that says how many there are."""
    diffusion = GaussianDiffusion(schedule.make_betas("cosine", 12), variance="fixed_small")
    with pytest.raises(ValueError, match=f"num_steps: {num_steps} is not between 1 and the 12 timesteps of the chain"):
        measure_variational_bound(diffusion, lambda x, t: x, torch.zeros(2, 1, 4, 4), torch.arange(2), num_steps)


def test_progress_is_told():
    """Oracle: the timesteps of the chain, each once."""
    system, shown = systems.build("dit", PIXELS), []
    batch = next(iterate_held_out(Fashion(8, 1, "held_out"), 2))
    del batch["valid"]
    system.measure(
        {"denoiser": network_of(system)},
        system.encode(batch),
        4,
        lambda steps: (shown.append(step) or step for step in steps),
    )
    assert sorted(shown) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "changes", [{"objective": "flow", "in_channels": 4}, {"in_channels": 4}], ids=["flow", "diffusion"]
)
def test_what_has_no_likelihood(changes):
    """Oracle: the terms of `evaluate`; there is no chain to shorten."""
    system = systems.build("dit", MODEL | changes)
    nets, example = {"denoiser": network_of(system)}, system.encode(system.synthetic(5))
    found, wanted = system.measure(nets, example), system.evaluate(nets, example)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(ValueError, match="leave num_steps out"):
        system.measure(nets, example, 10)


def test_quarters_of_flow_matching():
    """Oracle: numpy over the terms of one batch that holds all samples."""
    system, source = systems.build("dit", MODEL | {"objective": "flow"}), Spread(Fashion(8, 1, "held_out"), 30)
    nets = {"denoiser": network_of(system)}
    system.measure = lambda nets, example, *_: system.evaluate(nets, example)  # as of latents, without likelihood
    found = average_system_measurements_over_source(system, nets, source, batch=7, seed=1)
    batch = next(iterate_held_out(source, 30, seed=1))
    del batch["valid"]
    terms = {name: values.numpy() for name, values in system.evaluate(nets, system.encode(batch)).items()}
    assert found["curves"] == {} and found["timesteps"] is None
    for name in found["figures"]:
        assert found["figures"][name] == pytest.approx(terms[name].mean(dtype=np.float64), rel=1e-5)
        for quarter, value in enumerate(found["quarters"][name]):
            assert value == pytest.approx(terms[name][terms["quartile"] == quarter].mean(), rel=1e-5)


@pytest.mark.parametrize("batch", [2, 7])
def test_videos_are_measured(batch):
    """Oracle: numpy over the clips themselves, one by one: how much brighter the middle becomes."""
    source = MovingFashion(5, 8, 9, 1, "held_out")
    system = counting.build(counting.Config())
    found = average_system_measurements_over_source(system, system.networks(), Spread(source, 11), batch=batch, seed=0)
    clips = [source[index * len(source) // 11] for index in range(11)]
    middles = [clip["video"][: clip["frames"], 0, 4, 4].numpy().astype(float) for clip in clips]
    assert found["figures"]["loss"] == pytest.approx(np.mean([middle[-1] - middle[0] for middle in middles]), rel=1e-6)
    assert any(middle[-1] != middle[0] for middle in middles)


def test_other_videos(tmp_path):
    """Oracle: the frames of the files that --data names, all of them; a folder without videos is refused by name."""
    frames = np.arange(5, dtype=np.uint8).reshape(5, 1, 1, 1) + np.zeros((1, *counting.SIZE, 1), np.uint8)
    for number in range(3):
        save_gif(tmp_path / "clips" / f"{number}.gif", frames + 40 * number)
    run = Run(
        data={
            "path": "builtin:moving-fashion",
            "num_frames": 5,
            "height": counting.SIZE[0],
            "channels": 1,
            "image_size": counting.SIZE[1],
            "flip": False,
        }
    )
    source = _open_source_to_measure(EvaluateOptions(tmp_path, data=str(tmp_path / "clips")), run, None)
    assert [source[index]["video"][-1, 0, 2, 3].item() for index in range(len(source))] == [4, 44, 84]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="--data .*empty"):
        _open_source_to_measure(EvaluateOptions(tmp_path, data=str(tmp_path / "empty")), run, None)


@pytest.mark.parametrize("size, num, batch", [(13, 5, 2), (8, None, 3), (5, 5, 64)])
def test_a_source_that_reads_batches_is_asked_for_them(size, num, batch):
    """Oracle: the same source item by item; the number of its reads."""

    class Whole(Numbers):
        batched = True
        reads = 0

        def read_batch(self, index, mirrored=None, random_number=None):
            assert mirrored is None and random_number is None
            self.reads += 1
            return {"label": index.clone()}, []

        def __getitem__(self, index):
            raise AssertionError("item by item")

    whole, known = Whole(size), Known()
    found = average_system_measurements_over_source(known, {}, Spread(whole, num), batch=batch, seed=3)
    assert found == average_system_measurements_over_source(
        Known(), {}, Spread(Numbers(size), num), batch=batch, seed=3
    )
    assert whole.reads == known.calls
