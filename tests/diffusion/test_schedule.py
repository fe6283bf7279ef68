"""Noise schedules and respacing."""

import json
import math

import pytest
import torch

from dstrain.diffusion import schedule
from tests.support import golden

SPACED = json.loads((golden.FOLDER / "space_timesteps.json").read_text())


@pytest.mark.parametrize("case", SPACED)
def test_spacing(case):
    """Oracle: the original's subsets."""
    total, spec = case.split(":")
    assert schedule.space_timesteps(int(total), spec) == SPACED[case]


def test_spacing_of_everything_and_of_lists():
    """Oracle: the definition; 11 timesteps in two sections are 6 and 5, in three 4, 4 and 3."""
    assert schedule.space_timesteps(7, "") == list(range(7))
    assert schedule.space_timesteps(11, "2,2") == [0, 5, 6, 10] and schedule.space_timesteps(11, "1,1,1") == [0, 4, 8]
    assert schedule.space_timesteps(7, "1") == [0]
    assert schedule.space_timesteps(300, [10, 15, 20]) == SPACED["300:10,15,20"]


@pytest.mark.parametrize(
    "spec, words",
    [
        ("11", "11 timesteps of section 0: ask for 1 to its 10"),
        ("ddim7", "ddim7"),
        ("0", "0 timesteps of section 0"),
        ("6,4", "6 timesteps of section 0: ask for 1 to its 5"),
    ],
)
def test_impossible_spacing(spec, words):
    """Oracle: a ValueError with both numbers."""
    with pytest.raises(ValueError, match=words):
        schedule.space_timesteps(10, spec)
    with pytest.raises(ValueError, match="'fast' is neither a number"):
        schedule.space_timesteps(10, "fast")


def test_blanks_in_a_spacing():
    """Oracle: the same text without them."""
    for spec in ("ddim5", "3,2", "4"):
        blank = f" {spec.replace(',', ' , ')} "
        assert schedule.space_timesteps(10, blank) == schedule.space_timesteps(10, spec)


def test_even_spec():
    """Oracle: 10 timesteps have a stride for 5 and none for 7."""
    assert [
        schedule.make_even_respacing_spec(10, count, strided) for count, strided in ((5, True), (7, True), (5, False))
    ] == [
        "ddim5",
        "7",
        "5",
    ] and schedule.make_even_respacing_spec(10, 5) == "5"
    for count in (0, 11):
        with pytest.raises(ValueError, match=f"{count} is not between 1 and the 10"):
            schedule.make_even_respacing_spec(10, count)


def test_cosine():
    """Oracle: the original's tables at T = 100 (golden/iddpm_hybrid_cosine)."""
    tensors, _ = golden.load("iddpm_hybrid_cosine")
    betas = schedule.make_betas("cosine", 100)
    torch.testing.assert_close(betas, tensors["table.betas"], rtol=1e-9, atol=1e-12)
    assert torch.equal(betas, schedule.make_betas("squaredcos_cap_v2", 100))


def test_cosine_is_the_papers():
    """Oracle: Equation 17 of Nichol & Dhariwal 2021 by the math library: 1 - f(t) / f(t - 1) for t = 1 ... T, at most
    0.999.
    """
    for steps in (10, 1000):

        def f(t):
            return math.cos((t / steps + 0.008) / 1.008 * math.pi / 2) ** 2

        expected = [min(1 - f(t) / f(t - 1), 0.999) for t in range(1, steps + 1)]
        assert schedule.make_betas("cosine", steps).tolist() == pytest.approx(expected, rel=1e-9)
        kept = torch.cumprod(1 - schedule.make_betas("cosine", steps), 0)[:-1]
        assert kept.tolist() == pytest.approx([f(t) / f(0) for t in range(1, steps)], rel=1e-9)


def test_every_beta_of_the_others():
    """Oracle: DDPM's lists at T = 20, element by element, computed here by the math library; linear also at T = 1000,
    where the paper's own end points stand.
    """
    part = [t / 19 for t in range(20)]
    expected = {
        "linear": [50 * (1e-4 + p * (0.02 - 1e-4)) for p in part],
        "quad": [(0.01 + p * (math.sqrt(0.02) - 0.01)) ** 2 for p in part],
        "warmup10": [1e-4, 0.02] + [0.02] * 18,
        "warmup50": [1e-4 + min(t / 9, 1) * (0.02 - 1e-4) for t in range(20)],
        "const": [0.02] * 20,
        "jsd": [1 / (20 - t) for t in range(20)],
    }
    for name, values in expected.items():
        if name != "linear":  # 50 * 0.02 is 1, and rounding may lie above
            assert schedule.make_betas(name, 20).tolist() == pytest.approx(values, rel=1e-12), name
    for steps in (1000, 250):
        line = [(1e-4 + t / (steps - 1) * (0.02 - 1e-4)) * 1000 / steps for t in range(steps)]
        assert schedule.make_betas("linear", steps).tolist() == pytest.approx(line, rel=1e-12)
    assert schedule.make_betas("warmup10", 5).tolist() == pytest.approx([1e-4] + [0.02] * 4)
    assert [schedule.make_betas(name, 1).tolist() for name in ("warmup10", "warmup50")] == [[pytest.approx(1e-4)]] * 2


def test_closed_forms():
    """Oracle: end points and shapes as DDPM's experiments define them, computed here by hand."""
    linear, quad = schedule.make_betas("linear", 500), schedule.make_betas("quad", 11)
    assert linear[0] == pytest.approx(2e-4) and linear[-1] == pytest.approx(0.04)
    torch.testing.assert_close(linear.diff(), linear.diff()[:1].expand(499))
    assert quad[5] == pytest.approx(((math.sqrt(1e-4) + math.sqrt(0.02)) / 2) ** 2)
    for name, length in (("warmup10", 2), ("warmup50", 10)):
        warmup = schedule.make_betas(name, 20)
        assert warmup[0] == pytest.approx(1e-4) and bool((warmup[length - 1 :] == 0.02).all())
    assert schedule.make_betas("const", 3).tolist() == [0.02] * 3
    torch.testing.assert_close(
        schedule.make_betas("jsd", 4), torch.tensor([1 / 4, 1 / 3, 1 / 2, 1], dtype=torch.float64)
    )


def test_those_of_the_prior():
    """Oracle: the closed forms of lucidrains/DALLE2-pytorch's quadratic and sigmoid, computed here step by step."""
    for steps in (1000, 250):
        begin, end = 1e-4 * 1000 / steps, 0.02 * 1000 / steps
        quadratic, sigmoid = schedule.make_betas("quadratic", steps), schedule.make_betas("sigmoid", steps)
        for t in (0, 1, steps // 3, steps - 1):
            part = t / (steps - 1)
            root = math.sqrt(begin) + part * (math.sqrt(end) - math.sqrt(begin))
            assert quadratic[t] == pytest.approx(root**2)
            assert sigmoid[t] == pytest.approx(begin + (end - begin) / (1 + math.exp(6 - 12 * part)))
    torch.testing.assert_close(schedule.make_betas("quadratic", 1000), schedule.make_betas("quad", 1000))


@pytest.mark.parametrize("name", schedule.SCHEDULES)
def test_respaced_marginals(name):
    """Oracle: alphas_cumprod of the full chain at the kept timesteps."""
    betas = schedule.make_betas(name, 100)
    kept = schedule.space_timesteps(100, "7")
    if name == "jsd":  # whose last beta is 1
        kept = kept[:-1]
    ours = torch.cumprod(1 - schedule.respace_betas(betas, kept), dim=0)
    torch.testing.assert_close(ours, torch.cumprod(1 - betas, dim=0)[kept])


def test_noise_levels_of_edm():
    """Oracle: by hand: both ends, and Equation 5 of Karras et al. 2022 for a number between them."""
    assert schedule.make_karras_noise_levels(1, 0.002, 80.0) == pytest.approx([80.0])
    assert schedule.make_karras_noise_levels(2, 0.002, 80.0) == pytest.approx([80.0, 0.002])
    middle = ((80 ** (1 / 7) + 0.002 ** (1 / 7)) / 2) ** 7
    assert schedule.make_karras_noise_levels(3, 0.002, 80.0) == pytest.approx([80.0, middle, 0.002])
    assert schedule.make_karras_noise_levels(3, 1.0, 4.0, rho=1.0) == pytest.approx([4.0, 2.5, 1.0])


def test_a_chain_coarser_than_its_spacing():
    """Oracle: by hand: the levels 0.001, 0.13, 2.2, 17, 80 of Equation 5 lie nearest to timesteps 0, 1, 1, 2, 8, and
    the last step is 8 once more: those that fall together take the next free one, or at the end the one before.
    """
    assert schedule.choose_timesteps_by_spacing([0.001, 10, 20, 30, 40, 50, 60, 70, 80], 6, "karras") == [
        0,
        1,
        2,
        3,
        7,
        8,
    ]


def test_wrong_names_and_lengths():
    """Oracle: a ValueError that lists what exists."""
    with pytest.raises(ValueError, match="'linera' is unknown; one of linear"):
        schedule.make_betas("linera", 10)
    with pytest.raises(ValueError, match="leaves"):
        schedule.make_betas("linear", 10)
    with pytest.raises(ValueError, match="num_steps"):
        schedule.make_betas("cosine", 0)
