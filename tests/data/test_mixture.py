"""Mixtures: whose sample comes when, and what becomes of labels, captions and broken samples."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dstrain.commands.job import JobOptions, prepare_job
from dstrain.data.batches import Batches, iterate_held_out
from dstrain.data.cached.shards import read_index
from dstrain.data.mixture import Mixture, MixtureOrder, join_class_names, scale_to_whole_numbers
from dstrain.data.open import describe_data, fill_in_codes_entry, open_sources
from dstrain.recipe import ConfigError, Data, list_refused_changes, load_recipe, make_refused_changes_error
from dstrain.systems import find_config_class
from tests.data.cached.test_latents import write as write_codes
from tests.support.clips import moving, write_pictures
from tests.support.launch import ROOT
from tests.support.pictures import break_file, folder
from tests.support.sources import Numbers, global_batches, same

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

WEIGHTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=6)


@given(weights=WEIGHTS, seed=st.integers(-(2**63), 2**64), begin=st.integers(0, 2**40), number=st.integers(1, 700))
@settings(max_examples=60, deadline=None)
def test_places_and_counts_are_those_of_counting(weights, seed, begin, number):
    """Oracle: counting the stream one sample after the other: over whole blocks each place of each source is taken
    once, in no gap, and `count_samples_by_source` is the count.
    """
    order = MixtureOrder((5,) * len(weights), tuple(weights), seed)
    begin -= begin % 256
    before = order.count_samples_by_source(begin)
    sources, places = order.find_sources_and_positions(np.arange(begin, begin + 3 * 256))
    for k in range(len(weights)):
        own = np.sort(places[sources == k])
        assert np.array_equal(own, np.arange(before[k], before[k] + len(own)))
    counted = np.bincount(sources[:number], minlength=len(weights)) + before
    assert counted.tolist() == order.count_samples_by_source(begin + number)


@given(weights=WEIGHTS, positions=st.integers(0, 2**44))
@settings(max_examples=200, deadline=None)
def test_every_source_has_its_share_at_any_time(weights, positions):
    """Oracle: the exact share, positions * weight / sum, as a fraction; less than one sample for each source away."""
    counts = MixtureOrder((1,) * len(weights), tuple(weights)).count_samples_by_source(positions - positions % 256)
    assert sum(counts) == positions - positions % 256
    for weight, count in zip(weights, counts):
        assert abs(count - Fraction((positions - positions % 256) * weight, sum(weights))) < len(weights)


def test_each_source_passes_through_its_own_epochs():
    """Oracle: counting: whenever a source was met k times its size, as the stream of its own places has it, each of its
    samples was met k times.
    """
    sizes, weights = (7, 40, 100), (3, 1, 2)
    order = MixtureOrder(sizes, weights, 11)
    positions = np.arange(256 * 40)
    index = order.find_sample_index(positions)
    sources, places = order.find_sources_and_positions(positions)
    for k, size in enumerate(sizes):
        own = index[sources == k][np.argsort(places[sources == k])] - sum(sizes[:k])
        assert own.min() == 0 and own.max() == size - 1
        for epoch in own[: len(own) // size * size].reshape(-1, size):
            assert np.array_equal(np.sort(epoch), np.arange(size))
    # Ratios by samples: one pass over all is one pass over each, but for what the last block shuffles.
    natural = MixtureOrder(sizes, scale_to_whole_numbers(sizes), 11)
    assert natural.count_samples_by_source(256 * 147) == [256 * size for size in sizes]


def test_the_order_is_a_function_of_the_position():
    """Oracle: the answer for each position by itself; positions in any order and shape, ints and tensors."""
    order = MixtureOrder((10, 20), (3, 1), 5)
    positions = np.random.default_rng(0).integers(0, 1 << 50, 300)
    one_by_one = [order.find_sample_index(int(p)) for p in positions]
    assert all(type(index) is int for index in one_by_one)
    assert order.find_sample_index(positions).tolist() == one_by_one
    assert order.find_sample_index(torch.from_numpy(positions).view(3, 100)).flatten().tolist() == one_by_one
    assert MixtureOrder((10, 20), (3, 1), 6).find_sample_index(positions).tolist() != one_by_one


def test_the_pattern_does_not_meet_the_ranks():
    """Oracle: the binomial distribution: at weights 3:1, one of four ranks that take every fourth position would get
    all samples of one source, if the slots were not shuffled.
    """
    sources, _ = MixtureOrder((10, 10), (3, 1), 0).find_sources_and_positions(np.arange(4 * 2560))
    for rank in range(4):
        assert abs(sources[rank::4].mean() - 0.25) < 0.05  # six deviations of 2,560 independent samples


@pytest.mark.parametrize(
    "weights,numbers",
    [
        ((3, 1), (3, 1)),
        ((0.3, 0.1), (3, 1)),
        ((2.5, 7.5, 10), (1, 3, 4)),
        ((1e-9, 1), (1, 10**9)),
        ((6, 4), (3, 2)),
        ((1,), (1,)),
    ],
)
def test_weights_are_whole_in_their_ratio(weights, numbers):
    """Oracle: the ratio by hand."""
    assert scale_to_whole_numbers(weights) == numbers


def test_weights_of_any_size_keep_their_ratio():
    """Oracle: the ratio as floats, at sums beyond int64; the smallest does not vanish."""
    numbers = scale_to_whole_numbers((3e18, 1e18, 1))
    assert sum(numbers) <= 2**30 + 3 and numbers[2] == 1
    assert numbers[0] / numbers[1] == pytest.approx(3, rel=1e-8)
    order = MixtureOrder((4, 4, 4), numbers)
    assert sum(order.count_samples_by_source(2**60)) == 2**60  # nothing overflows


# ---------------------------------------------------------------------------------------- sources


class Named(Numbers):
    """Numbers with classes: sample i has the class i % their number."""

    def __init__(self, size: int, classes: str = "", **options) -> None:
        super().__init__(size, **options)
        self.classes = tuple(classes)

    def __getitem__(self, index: int) -> dict:
        item = super().__getitem__(index)
        return item | {"label": index % len(self.classes) if self.classes else 0}


class Captioned(Named):
    captioned = True

    def __getitem__(self, index: int) -> dict:
        return super().__getitem__(index) | {"caption": torch.full((3,), index, dtype=torch.uint8)}


def mixture(*sources, weights=None, rule="same"):
    names = [f"s{k}" for k in range(len(sources))]
    return Mixture(sources, names, weights, join_class_names(sources, names, rule))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_same_global_batch_at_any_world_and_worker_count(num_workers):
    """Oracle: the formula of the order, sample by sample, on one rank, no workers; a count by source of what came."""
    source, steps = mixture(Numbers(50), Numbers(7), Numbers(90), weights=[3, 1, 0.5]), (0, 41)
    expected = global_batches(source, steps)
    order = source.make_sample_order(8, 3)
    for step, batch in zip(steps, expected):
        index = order.find_sample_index(torch.arange(24) + 24 * step)
        pixels = torch.stack([source[i]["image"] for i in index.tolist()])
        mirrored = batch["image"].ne(pixels).flatten(1).any(1)
        pixels[mirrored] = pixels[mirrored].flip(-1)
        assert torch.equal(batch["image"], pixels) and 0 < mirrored.sum() < 24
    for world, micro_batch in ((2, 12),) if num_workers else ((1, 3), (2, 4), (4, 6)):
        assert same(global_batches(source, steps, world, micro_batch, num_workers), expected)
    with Batches(source, global_batch=24, micro_batch=4, seed=3, world=2, rank=1) as batches:
        sources, _ = order.find_sources_and_positions(np.arange(24 * 42))
        assert batches.count_samples_by_source(42) == {f"samples/s{k}": int((sources == k).sum()) for k in range(3)}
    assert Batches(Numbers(50), global_batch=8, micro_batch=8, seed=0).count_samples_by_source(5) == {}


@pytest.mark.parametrize(
    "rule,classes,expected",
    [
        ("same", ("abc", "cab"), {0: "abc", 1: "cab"}),
        ("first", ("abc", "b"), {0: "abc", 1: "b"}),
        ("union", ("ab", "xb"), {0: "ab", 1: "xb"}),
    ],
)
def test_labels_are_those_of_the_names(rule, classes, expected):
    """Oracle: the name of each sample's class in its own source; counts of classes by counting."""
    source = mixture(*(Named(9, names) for names in classes), rule=rule)
    batch, _ = source.read_batch(torch.arange(18).flip(0))
    names = [source.classes[label] for label in batch["label"].tolist()][::-1]
    assert names == [expected[k][i % len(expected[k])] for k in range(2) for i in range(9)]
    assert names == [source.classes[source[i]["label"]] for i in range(18)]
    assert source.classes == tuple(dict.fromkeys("".join(classes))) if rule == "union" else tuple(classes[0])


@pytest.mark.parametrize(
    "rule,classes,message",
    [
        ("same", ("ab", "abc"), "s1 has the class c, which s0 has not"),
        ("same", ("abc", "ab"), "s1 lacks the class c of s0"),
        ("first", ("ab", "c"), "s1 has the class c, which s0 has not.*data.mixture_classes=union"),
        ("union", ("ab", ""), "s0 has classes, and s1 has none"),
        ("same", ("", "ab"), "s0 has no classes, and s1 has some"),
    ],
)
def test_classes_that_differ(rule, classes, message):
    """Oracle: the contract: a ConfigError that names the source, the class and the entry."""
    with pytest.raises(ConfigError, match=message):
        mixture(*(Named(9, names) for names in classes), rule=rule)


def test_captions_are_all_or_none():
    """Oracle: the items of the sources."""
    both, one = mixture(Captioned(5), Captioned(4)), mixture(Captioned(5), Named(4))
    batch, _ = both.read_batch(torch.tensor([8, 0]))
    assert both.captioned and batch["caption"][:, 0].tolist() == [3, 0]
    assert not one.captioned and "caption" not in one[0] and "caption" not in one.read_batch(torch.tensor([0, 6]))[0]


def test_a_broken_sample_is_replaced_within_its_source():
    """Oracle: the next sample of the same source, cyclically; the list names the source."""
    source = mixture(Numbers(5, bad=(4,)), Numbers(6, bad=(0,)))
    batch, bad = source.read_batch(torch.tensor([4, 5, 10]))
    assert batch["label"].tolist() == [0, 1, 5]
    assert bad == [("s0/number 4", "broken on purpose"), ("s1/number 0", "broken on purpose")]
    assert source.name_sample(5) == "s1/number 0" and source.read_first_readable()["label"] == 0
    with pytest.raises(Exception) as caught:
        source[5]
    assert caught.value.path == "s1/number 0"


# ---------------------------------------------------------------------------------------- recipes


def opened(*words):
    data = fill_in_codes_entry(load_recipe(None, words).data)
    return data, *open_sources(data)


def test_folders_with_weights_and_held_out_shares(tmp_path):
    """Oracle: the folders opened by themselves: sizes, classes, held-out names; the whole held-out split is passed."""
    a, b = folder(tmp_path / "a", 2, 20), folder(tmp_path / "b", 3, 10)
    break_file(b / "c0" / "000.png", "text")
    words = (
        f"data.mixture=[{{path: {a}, weight: 3, held_out: 0.3}}, {{path: {b}, weight: 1}}]",
        "data.mixture_classes=union",
        "data.held_out=0.1",
        "data.image_size=16",
    )
    data, train, unseen = opened(*words)
    alone = [open_sources(Data(path=str(path), image_size=16, held_out=share)) for path, share in ((a, 0.3), (b, 0.1))]
    assert data.path == str(a) and train.weights == (3, 1) and train.classes == ("c0", "c1", "c2")
    for mixed, split in ((train, 0), (unseen, 1)):
        own = [
            f"{name}/{pair[split].name_sample(i)}" for name, pair in zip("ab", alone) for i in range(len(pair[split]))
        ]
        assert [mixed.name_sample(i) for i in range(len(mixed))] == own
    text, held = describe_data(data, train, unseen)
    assert f"data: a mixture of 2, {len(train)} images, 3 classes" in text and "75.0% a (" in text
    assert held.startswith(f"held out: a mixture of 2, {len(unseen)} images")
    every = torch.cat([batch["position"][batch["valid"]] for batch in iterate_held_out(unseen, 4)])
    assert every.tolist() == list(range(len(unseen)))
    reads = [Data(path=str(path), image_size=16) for path in (a, b)]
    assert torch.equal(unseen[0]["image"], alone[0][1][0]["image"]) and reads[0].mixture is None
    # By the numbers of samples, and everything that makes other data is in the fingerprint.
    natural = opened(words[0].replace(", weight: 3", "").replace(", weight: 1", ""), *words[1:])[1]
    assert natural.weights == scale_to_whole_numbers([len(pair[0]) for pair in alone])
    other = opened(words[0], words[1], words[3])[1]
    assert len({source.compute_fingerprint() for source in (train, natural, other)}) == 3


def test_clips_are_mixed(tmp_path):
    """Oracle: each folder of clips by itself, with the same chance of the window; captions where both have them."""
    for name, texts in (("a", True), ("b", True), ("c", False)):
        (tmp_path / name).mkdir()
        for i in range(3):
            write_pictures(tmp_path / name / f"{i}.gif", moving(9, seed=i))
            if texts:
                (tmp_path / name / f"{i}.txt").write_text(f"{name} {i}")
    words = ("data.num_frames=3", "data.image_size=16", "data.flip=false")
    paths = [f"{{path: {tmp_path / name}}}" for name in "abc"]
    data, train, _ = opened(f"data.mixture=[{paths[0]}, {paths[1]}]", *words)
    index, chance = torch.tensor([4, 0, 2]), torch.tensor([0.9, 0.1, 0.5])
    batch, bad = train.read_batch(index, None, chance)
    alone = [open_sources(part)[0] for part in data.list_sources()]
    for row, (source, place) in enumerate(((1, 1), (0, 0), (0, 2))):
        item = alone[source].read(place, chance[row].item())
        assert item.keys() == set(batch) and not bad and train.chance_name == "clip"
        assert all(torch.equal(batch[name][row], torch.as_tensor(item[name])) for name in item)
    _, mixed, _ = opened(f"data.mixture=[{paths[0]}, {paths[2]}]", *words)
    assert train.captioned and not mixed.captioned and mixed.uncaptioned == f"data.path={tmp_path / 'c'}"
    assert "caption" not in mixed.read_batch(torch.arange(6))[0]


def test_latents_are_mixed(tmp_path):
    """Oracle: the arrays as they were written; the factor is 1 / the deviation of all values, drawn by the weights."""
    codes = [write_codes(tmp_path / name, number, seed=number) for name, number in (("a", 50), ("b", 30))]
    words = (
        "data.image_size=16",
        "data.channels=1",
        f"data.mixture=[{{path: {tmp_path / 'a'}, weight: 1}}, {{path: {tmp_path / 'b'}, weight: 4}}]",
    )
    data, train, unseen = opened(*words)
    index, side = torch.tensor([0, 79, 50, 12]), torch.tensor([True, False, True, False])
    train.prefetch(index, side)
    batch, _ = train.read_batch(index, side)
    rows = [codes[0][0, 1], codes[1][29, 0], codes[1][0, 1], codes[0][12, 0]]
    assert np.array_equal(batch["latent_mean"], np.stack(rows)[:, 0]) and unseen is None
    assert train.prefetches and batch["label"].tolist() == [0, 29 % 3, 0, 0]
    statistics = [read_index(tmp_path / name)["statistics"] for name in "ab"]
    mean, second = (
        np.average([f(one) for one in statistics], weights=[1, 4])
        for f in (lambda one: one["mean"], lambda one: one["std"] ** 2 + one["mean"] ** 2)
    )
    assert data.codes.scaling_factor == pytest.approx((second - mean**2) ** -0.5, rel=1e-12)
    job = prepare_job(
        JobOptions(
            ROOT / "launch/recipes/dit-small.yaml",
            ROOT / "ds_configs/zero1.json",
            (
                *words,
                "every.sample=0",
                "model.num_classes=3",
                "model.class_dropout_prob=0.1",
                f"folder={tmp_path / 'run'}",
            ),
        ),
        1,
        "cpu",
    )
    assert job.run.model["codes"]["scaling_factor"] == data.codes.scaling_factor


def test_sources_that_do_not_fit(tmp_path):
    """Oracle: the contract: refused before anything is opened, with the source's name and what to do."""
    a, b, x = folder(tmp_path / "a", 2, 4), folder(tmp_path / "b", 2, 4), tmp_path / "x"
    write_codes(x)
    write_codes(tmp_path / "y", stage="other")
    sizes = ("data.image_size=16", "data.channels=1")
    for entries, message, *more in (
        ("[]", r"data.mixture=\[\]: name its sources"),
        (f"[{{path: {a}}}, {{path: {a}}}]", "names .*a twice: name it once"),
        (f"[{{path: {a}}}, {{path: {a}/}}]", "names .*a twice: name it once"),
        (f"[{{path: {a}, weight: 1}}, {{path: {b}}}]", "a has a weight, and others have none"),
        (f"[{{path: {a}, weight: 0}}]", r"data.mixture\[0\].weight=0: it should be greater than 0"),
        (f"[{{path: {a}, held_out: 0.1, held_out_path: {b}}}]", "has held_out and held_out_path"),
        (f"[{{path: {a}}}]", "data.path=b: data.mixture takes its place", "data.path=b"),
        (f"[{{path: {a}, held_out_path: {b / 'c0'}}}]", "held-out data of a have no classes, and those that are"),
        (f"[{{path: {a}}}]", "write held_out_path into the source", "data.held_out_path=b"),
        (f"[{{path: {x}}}, {{path: {a}}}]", "a holds images, .*x cached latents: mix sources of one kind", *sizes),
        (f"[{{path: {x}}}, {{path: {tmp_path / 'y'}}}]", "y has first_stage other, .*x has stage: encode", *sizes),
        ("[{path: 'builtin:emoji-pairs'}]", "holds embedding pairs.*are not mixed"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(f"data.mixture={entries}", *more)
    options = ("data.image_size=16", f"folder={tmp_path / 'run'}", "model.image_size=16")
    for entries, message in (
        (f"[{{path: {a}}}, {{path: {tmp_path / 'none'}}}]", r"data.mixture\[1\].path=.*none does not exist"),
        (f"[{{path: {a}}}, {{path: {b}, held_out_path: {a}}}]", "share files, and evaluation would see"),
        (f"[{{path: {a}, held_out: 0.1}}, {{path: {a / 'c0'}}}]", "share files, and what one holds out"),
        (f"[{{path: {a}}}, {{path: 'builtin:fashion', held_out: 0.1}}]", "holds out images itself"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare_job(
                JobOptions(
                    ROOT / "launch/recipes/dit-small.yaml",
                    ROOT / "ds_configs/zero1.json",
                    (f"data.mixture={entries}", *options),
                ),
                1,
                "cpu",
            )


def test_weights_that_change_are_refused_by_name(tmp_path):
    """Oracle: the contract: weights and shares may not change when a run goes on, paths may."""

    def run(*sources):
        return load_recipe(None, [f"data.mixture=[{', '.join(sources)}]"])

    before, system = run("{path: a, weight: 3}", "{path: b, weight: 1}"), find_config_class("dit")
    assert not list_refused_changes(before, run("{path: c, weight: 3}", "{path: b, weight: 1}"), system)
    for other, key in (
        (run("{path: a, weight: 3}", "{path: b, weight: 2}"), "data.mixture[1].weight"),
        (run("{path: a, weight: 3}"), "data.mixture[1].weight"),
        (run("{path: a, weight: 3, held_out: 0.1}", "{path: b, weight: 1}"), "data.mixture[0].held_out"),
    ):
        changes = list_refused_changes(before, other, system)
        assert [name for name, _, _ in changes] == [key]
        assert f"{key} was " in str(make_refused_changes_error(changes, tmp_path, system))
