"""Drawing and scoring by several ranks: the same pictures and the same means as one process alone."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dstrain.data.batches import iterate_held_out
from dstrain.sampling.draw import (
    count_classes_as_grid_columns,
    draw_all_samples,
    draw_samples_for_first_rank,
    draw_samples_in_rounds,
    evaluate_held_out_batches,
    make_pictures_for_first_rank,
    set_eval_mode,
)
from dstrain.systems.base import Batch, Example, Nets, Request, System, Terms
from tests.support import gloo
from tests.support.sources import Numbers

SIZES = (1, 2, 7, 8, 13)  # of held-out sets
REQUESTS = ((1, 1), (5, 2), (6, 3), (7, 1), (4, 16), (12, 5))  # (samples, chunk)


class Sums(System):
    """One network, x -> 3 x. Exact in integers, so that equal means equal bits however samples are batched."""

    parts = {"net": lambda nets, example: {"loss": nets["net"](example["x_start"]).mean()}}
    averaged = ()
    calls = 0

    def networks(self) -> dict[str, nn.Module]:
        with torch.no_grad():
            net = nn.Linear(1, 1, bias=False)
            net.weight.fill_(3.0)
        return {"net": net}

    def encode(self, batch: Batch) -> Example:
        assert "valid" not in batch, "what is data is no business of a system's"
        return {"x_start": batch["label"].float()[:, None], "key": batch["key"]}

    def evaluate(self, nets: Nets, example: Example) -> Terms:
        self.calls += 1
        tripled = nets["net"](example["x_start"])[:, 0]
        return {
            "loss": tripled,
            "odd": example["x_start"][:, 0] % 2,
            "noise": (example["key"] % 97).float(),
            "quartile": torch.zeros(len(tripled), dtype=torch.int64),
            "scalar": tripled.sum(),
        }

    def sample(self, nets: Nets, request: Request) -> Tensor:
        """(N, 1, 2, 2): a function of each sample's seed and label and of the request's choices."""
        self.calls += 1
        tripled = nets["net"](request.seeds.float()[:, None])[:, 0].long()
        label = request.conditions["label"]
        told = request.num_steps + 10 * int(request.guidance_scale) + len(request.sampler)
        values = torch.stack((tripled, label, request.seeds // 7, torch.full_like(label, told)), 1)
        return (values % 256).to(torch.uint8).view(-1, 1, 2, 2)

    def make_pictures(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        return {"tripled": nets["net"](example["x_start"]).to(torch.uint8).view(-1, 1, 1, 1)}

    def synthetic(self, batch_size: int) -> Batch:
        return {"label": torch.arange(batch_size), "key": torch.arange(batch_size)}


def request(num: int, seed: int = 100) -> Request:
    return Request(seed + torch.arange(num), {"label": torch.arange(num) % 3}, 4, "heun", 2.0)


def pictures(num: int, seed: int = 100) -> Tensor:
    """What Sums draws of `request`, by numpy."""
    seeds = seed + np.arange(num)
    rows = np.stack((3 * seeds % 256, np.arange(num) % 3, seeds // 7, np.full(num, 4 + 20 + 4)), 1)
    return torch.from_numpy(rows.astype(np.uint8)).view(-1, 1, 2, 2)


def uneven(rank: int) -> list[Batch]:
    """Batches of different sizes on each rank, padded where they are told: 5 samples of data in all."""

    def batch(labels: list[int], valid: list[bool]) -> Batch:
        return {"label": torch.tensor(labels), "key": torch.tensor(labels), "valid": torch.tensor(valid)}

    if rank == 0:
        return [batch([1, 2, 99], [True, True, False]), batch([3], [True]), batch([50, 60], [False, False])]
    return [batch([4, 77, 5, 88], [True, False, True, False])]


def together(rank: int) -> dict:
    """What one of two ranks draws and scores."""
    system, nets = Sums(), Sums().networks()
    result = {
        "scores": {
            size: evaluate_held_out_batches(system, nets, iterate_held_out(Numbers(size), 2, rank, 2, seed=7))
            for size in SIZES
        },
        "uneven": evaluate_held_out_batches(system, nets, uneven(rank)),
        "draws": {},
        "pictures": {size: make_pictures_for_first_rank(system, nets, system.synthetic(size), 3) for size in SIZES},
        "on first": {
            sizes: draw_samples_for_first_rank(system, nets, request(sizes[0]), sizes[1]) for sizes in REQUESTS
        },
    }
    for num, chunk in REQUESTS:
        system.calls = 0
        rounds = list(draw_samples_in_rounds(system, nets, request(num), chunk))
        result["draws"][num, chunk] = (
            [numbers.tolist() for numbers, _ in rounds],
            torch.cat([im for _, im in rounds]),
            system.calls,
        )
    return result


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return gloo.run(tmp_path_factory.mktemp("two"), together)


# ------------------------------------------------------------------------------------------------------------- scoring


@pytest.mark.parametrize("size", SIZES)
def test_scores_of_two_ranks(two, size):
    """Oracle: one process that takes the samples one by one, and the mean of 3 i; a set may be smaller than a batch."""
    expected = evaluate_held_out_batches(Sums(), Sums().networks(), iterate_held_out(Numbers(size), 1, seed=7))
    assert expected["loss"] == 3 * (size - 1) / 2 and expected["odd"] == (size // 2) / size
    for found in two:
        assert found["scores"][size] == pytest.approx(expected, rel=1e-15)


def test_curves_of_scores():
    """Oracle: numpy's mean of each column over what is valid; without a place for them they are left out."""

    class Columns(Sums):
        def evaluate(self, nets: Nets, example: Example) -> Terms:
            return {"loss": example["x_start"][:, 0], "usage": example["x_start"] * torch.tensor([1.0, 10.0, 100.0])}

    curves: dict[str, list[float]] = {}
    assert (evaluate_held_out_batches(Columns(), {}, uneven(0), curves), curves) == (
        {"loss": 2.0},
        {"usage": [2.0, 20.0, 200.0]},
    )
    assert evaluate_held_out_batches(Columns(), {}, uneven(0)) == {"loss": 2.0}


def test_every_word_of_a_request_arrives():
    """Oracle: the request itself, chunk by chunk, all but what is dealt out by sample."""
    seen = []

    class Watched(Sums):
        def sample(self, nets: Nets, request: Request) -> Tensor:
            seen.append(request)
            return super().sample(nets, request)

    asked = dataclasses.replace(request(5), num_frames=9)
    draw_all_samples(Watched(), Sums().networks(), asked, 2)
    for field in dataclasses.fields(Request):
        if field.name not in ("seeds", "conditions"):
            assert [getattr(part, field.name) for part in seen] == [getattr(asked, field.name)] * 3, field.name


def test_scores_of_uneven_ranks(two):
    """Oracle: the mean over 1, 2, 3, 4, 5; what only fills up counts nowhere."""
    for found in two:
        assert found["uneven"] == {"loss": 9.0, "odd": 0.6, "noise": 3.0}


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9999), st.booleans()), min_size=1, max_size=6), min_size=1, max_size=5)
)
def test_scores_of_padded_batches(batches):
    """Oracle: numpy's mean over what is valid."""
    valid = np.array([label for batch in batches for label, there in batch if there], dtype=np.float64)
    assume(len(valid))
    given = [
        {
            "label": torch.tensor([label for label, _ in batch]),
            "key": torch.tensor([label for label, _ in batch]),
            "valid": torch.tensor([there for _, there in batch]),
        }
        for batch in batches
    ]
    found = evaluate_held_out_batches(Sums(), Sums().networks(), given)
    assert set(found) == {"loss", "odd", "noise"}  # no quartile, and no mean over a batch
    assert found["loss"] == pytest.approx(3 * valid.mean(), rel=1e-12)
    assert found["odd"] == pytest.approx((valid % 2).mean(), rel=1e-12)
    assert found["noise"] == pytest.approx((valid % 97).mean(), rel=1e-12)


def test_filling_may_be_anything():
    """Oracle: the mean of the valid ones, though the filling gives NaN; a NaN of the data is told."""

    class Roots(Sums):
        def evaluate(self, nets: Nets, example: Example) -> Terms:
            return {"loss": example["x_start"][:, 0].sqrt()}

    def batch(*labels: int) -> Batch:
        return {"label": torch.tensor(labels), "key": torch.tensor(labels), "valid": torch.tensor([True, True, False])}

    assert evaluate_held_out_batches(Roots(), {}, [batch(4, 16, -1)]) == {"loss": 3.0}
    broken = evaluate_held_out_batches(Roots(), {}, [batch(4, -16, 1), batch(-1, -16, 1)])
    assert np.isnan(broken["loss"]) and broken["nonfinite_samples"] == 3


def test_many_samples_lose_no_digits():
    """Oracle: the exact sum of integers: in float32 a million values around 3e7 would lose their last digits."""
    size = 1 << 17
    labels = 10_000_000 + torch.arange(size) % 3
    batches = [
        {"label": part, "key": part, "valid": torch.ones(len(part), dtype=torch.bool)} for part in labels.split(4096)
    ]
    exact = (3 * labels).float().double().mean().item()
    assert evaluate_held_out_batches(Sums(), Sums().networks(), batches)["loss"] == pytest.approx(exact, rel=1e-14)


# ------------------------------------------------------------------------------------------------------------- drawing


@pytest.mark.parametrize("num, chunk", REQUESTS)
def test_draws_of_two_ranks(two, num, chunk):
    """Oracle: one process's pictures; both ranks receive all of them, and call the networks equally often."""
    expected = pictures(num)
    for numbers, images, calls in (found["draws"][num, chunk] for found in two):
        assert [number for some in numbers for number in some] == list(range(num))
        assert images.dtype == torch.uint8 and torch.equal(images, expected)
        assert calls == -(-num // (2 * chunk)) == len(numbers)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 10**6))
def test_draws_in_chunks(num, chunk, seed):
    """Oracle: numpy, sample by sample: numbers are complete and in order, the filling of the last chunk is dropped."""
    system, nets = Sums(), Sums().networks()
    rounds = list(draw_samples_in_rounds(system, nets, request(num, seed), chunk))
    assert torch.cat([numbers for numbers, _ in rounds]).tolist() == list(range(num))
    assert all(len(numbers) == len(images) <= chunk for numbers, images in rounds) and system.calls == len(rounds)
    assert torch.equal(draw_all_samples(system, nets, request(num, seed), chunk), pictures(num, seed))
    assert torch.equal(torch.cat([images for _, images in rounds]), pictures(num, seed))


def test_drawing_and_scoring_need_no_gradient():
    """Oracle: torch's own flag within the networks' calls."""
    seen = []

    class Watched(Sums):
        def sample(self, nets: Nets, request: Request) -> Tensor:
            seen.append(torch.is_grad_enabled())
            return super().sample(nets, request)

        def evaluate(self, nets: Nets, example: Example) -> Terms:
            seen.append(torch.is_grad_enabled())
            return super().evaluate(nets, example)

    draw_all_samples(Watched(), Sums().networks(), request(3), 2)
    evaluate_held_out_batches(Watched(), Sums().networks(), uneven(0))
    assert seen == [False] * 5


@pytest.mark.parametrize(
    "labels, num, expected",
    [
        ((0, 1, 2), 6, 3),
        ((0, 1, 2), 7, 3),
        ((7, 3), 40, 2),
        (tuple(range(10)), 40, 10),
        (tuple(range(20)), 21, 20),
        (tuple(range(21)), 42, None),  # too wide to look at
        ((5,), 8, None),
        ((0, 1, 2), 3, None),
        ((0, 1, 2), 2, None),  # one class, or no second row
        ((3, 5, 5), 9, None),
        ((1, 1, 2), 12, None),
        ((1, 2, 1, 3), 12, None),  # a class twice: columns would mix
    ],
)
def test_class_columns(labels, num, expected):
    """Oracle: the columns of a grid of that width, each of which must hold one class and no two the same."""
    label = torch.tensor(labels).repeat(-(-num // len(labels)))[:num]
    found = count_classes_as_grid_columns(Request(torch.arange(num), {"label": label}))
    assert found == expected
    if found:
        columns = [set(label[column::found].tolist()) for column in range(found)]
        assert all(len(classes) == 1 for classes in columns) and len(set.union(*columns)) == found
    assert count_classes_as_grid_columns(Request(torch.arange(num))) is None


# ------------------------------------------------------------------------------------------- pictures, and no dropout


@pytest.mark.parametrize("size", SIZES)
def test_pictures_of_two_ranks(two, size):
    """Oracle: 3 i for sample i, on rank 0 alone, whatever was filled up to make equal calls; and in one process."""
    assert two[0]["pictures"][size]["tripled"].flatten().tolist() == [3 * i for i in range(size)]
    assert two[1]["pictures"][size] == {"tripled": None}
    alone = make_pictures_for_first_rank(Sums(), Sums().networks(), Sums().synthetic(size), 3)["tripled"]
    assert torch.equal(alone, two[0]["pictures"][size]["tripled"])


@pytest.mark.parametrize("num, chunk", REQUESTS)
def test_draws_on_the_first_rank(two, num, chunk):
    """Oracle: numpy, sample by sample, on rank 0 alone."""
    assert torch.equal(two[0]["on first"][num, chunk], pictures(num)) and two[1]["on first"][num, chunk] is None


def test_nothing_drops_out_in_evaluation():
    """Oracle: the input itself, which a dropout of one half would hit; afterwards each module is as it was."""
    net = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5)).eval())
    x = torch.ones(100)
    with set_eval_mode({"net": net, "engine": lambda x: x}):
        assert torch.equal(net(x), x)
    assert [module.training for module in net.modules()] == [True, True, False, False]
    assert not torch.equal(net(x), x)
    seen = []
    net[0].register_forward_hook(lambda module, *_: seen.append(module.training))

    class Dropping(Sums):
        def evaluate(self, nets: Nets, example: Example) -> Terms:
            return {"loss": nets["net"](example["x_start"][:, 0])}

    dropping = Dropping()
    assert evaluate_held_out_batches(
        dropping, {"net": net}, [batch | {"valid": batch["key"] >= 0} for batch in [dropping.synthetic(9)]]
    )
    draw_all_samples(dropping, Sums().networks() | {"other": net}, request(2), 2)
    assert seen == [False] and net.training
