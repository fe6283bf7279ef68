"""Keyed randomness: its distribution, its independence, and that it belongs to a sample."""

import math
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dstrain import rng

SEEDS = st.integers(min_value=0, max_value=2**63 - 1)
STEPS = st.integers(min_value=0, max_value=10**7)
COUNT = 4096


def keyed(seed, step, count=8):
    return rng.keys(seed, step, torch.arange(count))


def distance(values, cdf):
    """The Kolmogorov-Smirnov statistic times sqrt(n); above 2.2 with probability 1e-4."""
    ordered = values.double().flatten().sort().values
    count = len(ordered)
    ideal, ranks = cdf(ordered), torch.arange(count + 1, dtype=torch.float64) / count
    return float(torch.maximum(ideal - ranks[:-1], ranks[1:] - ideal).max()) * math.sqrt(count)


def correlation(one, other):
    """Pearson's correlation times sqrt(n): a standard normal number where both are independent."""
    one, other = one.double().flatten(), other.double().flatten()
    return float(torch.corrcoef(torch.stack((one, other)))[0, 1]) * math.sqrt(len(one))


@settings(deadline=None, max_examples=25, derandomize=True)
@given(SEEDS, STEPS)
def test_uniform(seed, step):
    """Oracle: the uniform distribution, by Kolmogorov-Smirnov and its range."""
    values = rng.uniform(keyed(seed, step), "timestep", (COUNT,))
    assert values.dtype == torch.float32 and float(values.min()) >= 0 and float(values.max()) < 1
    assert distance(values, lambda x: x) < 2.4


@settings(deadline=None, max_examples=25, derandomize=True)
@given(SEEDS, STEPS)
def test_normal(seed, step):
    """Oracle: the normal distribution, by Kolmogorov-Smirnov and the first four moments."""
    values = rng.normal(keyed(seed, step), "noise", (COUNT,))
    assert values.dtype == torch.float32 and bool(values.isfinite().all())
    assert distance(values, torch.special.ndtr) < 2.4
    values, count = values.double().flatten(), values.numel()
    # Standard errors of the mean of x, x^2, x^3, x^4: the variances are 1, 2, 15, 96.
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((values**power).mean()) - mean) < 4.5 * math.sqrt(variance / count)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(SEEDS, STEPS)
def test_one_draw_of_each_key(seed, step):
    """Oracle: the distributions, of the first draw over many keys (what timesteps and label drops are made of)."""
    key = keyed(seed, step, 8 * COUNT)
    assert len(key.unique()) == len(key)
    assert distance(rng.uniform(key, "timestep"), lambda x: x) < 2.4
    assert distance(rng.normal(key, "noise", (1,)), torch.special.ndtr) < 2.4
    assert distance(rng.uniform(rng.keys_of_seeds(torch.arange(8 * COUNT) + seed % 10**9), "start"), lambda x: x) < 2.4


@settings(deadline=None, max_examples=25, derandomize=True)
@given(SEEDS, STEPS)
def test_independence(seed, step):
    """Oracle: no correlation between neighbours of any kind."""

    def noise(key, name="noise"):
        return rng.normal(key, name, (COUNT,))

    key = keyed(seed, step)
    base = noise(key)
    others = {
        "name": noise(key, "noise/0"),
        "step": noise(keyed(seed, step + 1)),
        "seed": noise(keyed((seed + 1) % 2**63, step)),
        "position": noise(key.roll(1)),
        "element": base.roll(1, dims=1),
        "halves": base.roll(COUNT // 2, dims=1),
    }
    for what, other in others.items():
        assert abs(correlation(base, other)) < 5, what
        assert abs(correlation(base.square(), other.square())) < 5, what


NAMES = ("noise", "noise/0", "timestep", "drop", "bound/1", "bound/2")
DRAWS = {
    "uniform": lambda key, name, count: rng.uniform(key, name, (count,)),
    "normal": lambda key, name, count: torch.special.ndtr(rng.normal(key, name, (count,))),
    "integers": lambda key, name, count: rng.integers(key, name, 1 << 30, (count,)) / (1 << 30),
}


def cube(draw: str, seed: int) -> torch.Tensor:
    """Uniform numbers of seeds x steps x positions x names x elements, a dimension for each; 2, 4, 8, 6, 40 long."""
    batches = [[keyed((seed + 1000 * high) % 2**63, step) for step in range(4)] for high in range(2)]
    return torch.stack(
        [
            torch.stack([torch.stack([DRAWS[draw](key, name, 40) for name in NAMES], 1) for key in steps])
            for steps in batches
        ]
    )


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_no_value_is_drawn_twice(draw, seed):
    """Oracle: the birthday problem: among 15,360 values, which have 24 bits or more, about 7 pairs are equal by chance;
    were one dimension blind, or each value drawn twice, there would be thousands.
    """
    values = cube(draw, seed)
    assert values.numel() == 15_360 and values.numel() - len(values.unique()) < 40


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_pairs_are_independent(draw, seed):
    """Oracle: chi-square of pairs in 8 x 8 cells, 63 degrees of freedom; above 128 with probability 2e-6. Pairs lie
    side by side, two apart, or half a length apart, along each dimension: seeds, steps, positions, names, elements.
    """
    cells = (cube(draw, seed) * 8).long()
    for dimension, size in enumerate(cells.shape):
        for lag in {1, 2, size // 2} - {0, size}:
            one, other = cells.narrow(dimension, lag, size - lag), cells.narrow(dimension, 0, size - lag)
            counts = torch.bincount((8 * one + other).flatten(), minlength=64).double()
            expected = one.numel() / 64
            assert float(((counts - expected) ** 2 / expected).sum()) < 128, (dimension, lag)


def test_all_bits_of_keys_are_even():
    """Oracle: a fair coin for each of the 64 bits, by itself and with each other bit: counts within 5.5 deviations."""
    for key in (rng.keys(3, 5, torch.arange(COUNT)), rng.keys_of_seeds(torch.arange(COUNT))):
        bits = (key[:, None] >> torch.arange(64) & 1).double() - 0.5
        assert float(bits.sum(0).abs().max()) < 5.5 * 0.5 * math.sqrt(COUNT)
        pairs = (bits.t() @ bits).fill_diagonal_(0)
        assert float(pairs.abs().max()) < 5.5 * 0.25 * math.sqrt(COUNT)
    assert not set(rng.keys(0, 0, torch.arange(COUNT)).tolist()) & set(rng.keys_of_seeds(torch.arange(COUNT)).tolist())


@given(SEEDS, st.integers(1, 12), st.integers(0, 12), st.integers(0, 40))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_a_draw_belongs_to_its_sample(seed, count, cut, step):
    """Oracle: the same draws for the whole batch, bit for bit."""
    key, cut = keyed(seed, step, count), min(cut, count)
    functions = (
        lambda key: rng.normal(key, "noise", (3, 5)),
        lambda key: rng.uniform(key, "drop"),
        lambda key: rng.integers(key, "label", 1000, (2,)),
    )
    for function in functions:
        whole = function(key)
        assert torch.equal(torch.cat((function(key[:cut]), function(key[cut:]))), whole)
        assert torch.equal(function(key.flip(0)), whole.flip(0))


@given(SEEDS, st.integers(1, 2**31))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_integers(seed, high):
    """Oracle: the range, and the uniform distribution of integer / high."""
    values = rng.integers(keyed(seed, 0), "label", high, (COUNT,))
    assert values.dtype == torch.int64 and int(values.min()) >= 0 and int(values.max()) < high
    if high > 10**6:  # fine enough to be told from no continuous distribution
        assert distance(values / high, lambda x: x) < 2.4


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (1, 28, 28), (0,)])
def test_shapes(shape):
    """Oracle: the contract (B,) -> (B, *shape), odd numbers of elements and none included."""
    key = keyed(0, 0, 5)
    assert rng.uniform(key, "a", shape).shape == (5, *shape)
    assert rng.normal(key, "a", shape).shape == (5, *shape)
    assert rng.integers(key, "a", 10, shape).shape == (5, *shape)
    assert rng.normal(key[:0], "a", shape).shape == (0, *shape)


def test_fixed_values():
    """Oracle: values noted down when this was written: a change would break every resumed run."""
    key = rng.keys(0, 1, torch.arange(2))
    assert key.tolist() == KEYS
    assert rng.keys_of_seeds(torch.arange(2)).tolist() == KEYS_OF_SEEDS
    assert [rng.keys(seed, 3, torch.arange(1)).item() for seed in range(6)] == KEYS_OF_OTHERS
    torch.testing.assert_close(rng.uniform(key, "timestep"), torch.tensor(UNIFORM), rtol=0, atol=0)
    assert [rng.uniform(key[:1], name).item() for name in DRAWN] == list(DRAWN.values())
    torch.testing.assert_close(rng.normal(key, "noise", (2,)), torch.tensor(NORMAL), rtol=1e-6, atol=1e-6)


def mixed(z: int) -> int:
    """splitmix64's finalizer, by Python's whole numbers."""
    z %= 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def test_normal_is_box_muller():
    """Oracle: Box and Muller's formula by the math library, of the high and the low 24 bits of each number; small
    angles show the last of these bits.
    """
    (key,) = rng.keys(0, 0, torch.arange(1)).tolist()
    bits = [mixed(mixed(key ^ mixed(zlib.crc32(b"noise"))) + mixed(j * 0x9E3779B97F4A7C15)) for j in range(1, 2001)]
    radius = [math.sqrt(-2 * math.log1p(-(z >> 40) / 2**24)) for z in bits]
    angle = [2 * math.pi * (z % 2**24) / 2**24 for z in bits]
    cosines, sines = rng.normal(torch.tensor([key]), "noise", (4000,)).double().view(2, 2000).tolist()
    assert cosines == pytest.approx([r * math.cos(a) for r, a in zip(radius, angle)], rel=0, abs=5e-6)
    assert sines == pytest.approx([r * math.sin(a) for r, a in zip(radius, angle)], rel=0, abs=5e-6)
    small = [i for i, a in enumerate(angle) if a < 0.03]
    assert len(small) > 4 and any(bits[i] % 2 for i in small)
    assert [sines[i] for i in small] == pytest.approx([radius[i] * math.sin(angle[i]) for i in small], rel=3e-6)


@pytest.mark.parametrize("seed, step", [(0, 0), (5, 7), (2**63 - 1, 10**7), (2**64 - 1, 1), (-1, 1)])
def test_every_bit(seed, step):
    """Oracle: the formulas of the module's docstring by whole numbers that do not wrap around; a seed counts modulo
    2^64. The largest `high` but one shows each of the 32 bits that a whole number is made of.
    """
    golden, positions, high = 0x9E3779B97F4A7C15, range(0, 640, 10), 2**31 - 1
    key = rng.keys(seed, step, torch.tensor(positions))
    expected = [mixed(position * golden + mixed(mixed(seed) + step)) for position in positions]
    assert [value % 2**64 for value in key.tolist()] == expected
    for name in ("label", "drop"):
        bits = [
            [mixed(mixed(k ^ mixed(zlib.crc32(name.encode()))) + mixed(j * golden)) for j in (1, 2, 3)]
            for k in expected
        ]
        assert rng.integers(key, name, high, (3,)).tolist() == [[(z >> 32) * high >> 32 for z in row] for row in bits]
        assert rng.uniform(key, name, (3,)).tolist() == [[(z >> 40) / 2**24 for z in row] for row in bits]


KEYS = [8841707400507832957, -4616330145664149646]
KEYS_OF_SEEDS = [2902805962516761537, 4203286574363722061]
KEYS_OF_OTHERS = [
    -2886753501206757670,
    -6400793611187006664,
    -6463196824536088664,
    -2249575271523755086,
    7777147340439072764,
    -9203513702717006441,
]
DRAWN = {"noise": 0.31587088108062744, "drop": 0.7294688820838928, "label": 0.9568849205970764}
UNIFORM = [0.043516457080841064, 0.6614988446235657]
NORMAL = [[0.8026838302612305, -0.33899253606796265], [-1.9127699136734009, 0.8567013144493103]]


def test_seed_of_dropout():
    """Oracle: torch's own generator: the same place draws the same mask, every other place another one; two seeds that
    were written down, since another would break every resumed run.
    """

    def drawn(*place: int) -> float:
        rng.seed_torch(*place)
        return torch.rand((), dtype=torch.float64).item()

    places = [(seed, step, micro) for seed in (0, 1, 2**62) for step in (0, 1, 9) for micro in (0, 1, 7)]
    found = [drawn(*place) for place in places]
    assert found == [drawn(*place) for place in places] and len(set(found)) == len(places)
    for place, seed in (((0, 1, 2), 12710902581723598493), ((5, 0, 0), 10538720666668445182)):
        rng.seed_torch(*place)
        assert torch.initial_seed() == seed
