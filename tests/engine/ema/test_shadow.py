"""The arithmetic of the averages, on flats without an engine; with engines see test_engines.py."""

from contextlib import contextmanager

import pytest
import torch

from dstrain.engine.ema.shadow import EmaShadow
from dstrain.engine.updates import Flag
from dstrain.recipe import ConfigError, Ema

STEPS = 12


class Flats:
    """What EmaShadow uses of Masters: flats that an optimizer would step, and a way to show others."""

    def __init__(self, *sizes: int):
        self.flats = [torch.zeros(size) for size in sizes]
        self.shown: list[torch.Tensor] = []

    def step(self, step: int) -> None:
        for number, flat in enumerate(self.flats):
            flat.copy_(torch.arange(len(flat)) + 10.0 * number + step**2)

    @contextmanager
    def use_flat_tensors_as_weights(self, values: list[torch.Tensor]):
        self.shown = values
        yield
        self.shown = []


def test_a_part_without_averages_goes_on():
    """Oracle: by hand: what keeps no averages by width lacks none of them in a checkpoint; another part does."""
    shadow = EmaShadow({"one": Flats(3), "plain": Flats(2)}, Ema(profiles=(0.05, 0.1), snapshots=5), ("one",))
    assert (
        shadow.resume_or_restart_averages("plain", None, 7) is True
        and shadow.resume_or_restart_averages("one", None, 7) is False
    )


@pytest.mark.parametrize("warmup", [False, True])
def test_update(warmup):
    """Oracle: the average of all weights so far by Python floats, d = min(decay, (1 + s) / (10 + s)) in the warm-up;
    a step that was not applied, and a part that waits, leave it as it is.
    """
    masters = {"one": Flats(3, 2), "two": Flats(1), "plain": Flats(2)}
    for flats in masters.values():
        flats.step(7)
    shadow = EmaShadow(masters, Ema(decays=(0.5, 0.9), warmup=warmup), ("one", "two"))
    expected = {
        (part, decay): [flat.tolist() for flat in masters[part].flats]
        for part in ("one", "two")
        for decay in (0.5, 0.9)
    }
    for step in range(STEPS):
        applied = {"one": step != 4, "two": step > 5}
        for flats in masters.values():
            flats.step(step)
        shadow.update_averages(
            step,
            {part: Flag(torch.tensor(float(flag)) if step % 2 else flag) for part, flag in applied.items()}
            if step != 8
            else {},
        )
        for (part, decay), values in expected.items():
            if applied[part] and step != 8:
                d = min(decay, (1 + step) / (10 + step)) if warmup else decay
                expected[part, decay] = [
                    [d * old + (1 - d) * new for old, new in zip(olds, flat.tolist())]
                    for olds, flat in zip(values, masters[part].flats)
                ]
    assert set(shadow.flats) == {"one", "two"}
    for (part, decay), values in expected.items():
        for flat, numbers in zip(shadow.flats[part][decay], values, strict=True):
            assert flat.tolist() == pytest.approx(numbers, rel=1e-6)


def test_profiles():
    """Oracle: the sum of all weights so far by Python floats, those of update s by the integral of the profile over
    s - 1 .. s; steps that were not applied, and those of a part that waits, count nothing, nor do the first weights.
    """
    masters = {"one": Flats(3, 2), "two": Flats(1)}
    for flats in masters.values():
        flats.step(99)
    shadow = EmaShadow(masters, Ema(decays=(0.9,), profiles=(0.05, 0.2)), ("one", "two"))
    history = {"one": [], "two": []}
    for step in range(STEPS):
        applied = {"one": step not in (0, 4), "two": step > 5}
        for flats in masters.values():
            flats.step(step)
        parts = {"one", "two"} if step != 8 else {"two"}
        shadow.update_averages(
            step,
            {
                part: Flag(torch.tensor(float(flag)) if step % 2 else flag)
                for part, flag in applied.items()
                if part in parts
            },
        )
        for part in parts:
            history[part] += [[flat.tolist() for flat in masters[part].flats]] if applied[part] else []
    for part, seen in history.items():
        for width, gamma in ((0.05, 16.97), (0.2, 1.826)):
            power, end = shadow._powers[width], len(seen)
            assert power - 1 == pytest.approx(gamma, abs=0.05)
            shares = [((s + 1) / end) ** power - (s / end) ** power for s in range(end)]
            for number, flat in enumerate(shadow.flats[part][width]):
                sums = [sum(share * flats[number][i] for share, flats in zip(shares, seen)) for i in range(len(flat))]
                assert flat.tolist() == pytest.approx(sums, rel=1e-5)
        assert shadow.collect_counters(part) == {"averages": {"widths": [0.05, 0.2], "began": 0, "updates": len(seen)}}
    assert EmaShadow(masters, Ema(), ("one",)).collect_counters("one") == {}


def test_an_average_goes_on_or_begins_anew():
    """Oracle: an average that was not interrupted, where the checkpoint has all its widths; else, and after a reset,
    the masters of that moment, and a time that counts from there. Averages by decay, and other parts, are left alone.
    """
    masters = {"one": Flats(3, 2), "two": Flats(1)}

    def make(*widths):
        return EmaShadow(masters, Ema(decays=(0.9,), profiles=widths), ("one", "two"))

    def values(shadow, width, part="one"):
        return [flat.tolist() for flat in shadow.flats[part][width]]

    def train(*shadows: EmaShadow, first: int) -> None:
        for step in range(first, first + STEPS):
            masters["one"].step(step)
            for shadow in shadows:
                shadow.update_averages(step, {"one": Flag(True)})

    whole = make(0.05, 0.2)
    train(whole, first=0)
    saved = whole.collect_counters("one")["averages"] | {"began": 3}
    for widths, goes_on in (((0.05, 0.2), True), ((0.2,), True), ((0.2, 0.1), False), ((0.1,), False)):
        again, before = make(*widths), values(whole, 0.2)
        for name in again.flats["one"]:
            for flat, kept in zip(again.flats["one"][name], whole.flats["one"].get(name, masters["one"].flats)):
                flat.copy_(kept + (0 if name in whole.flats["one"] else 1))
        decayed = values(again, 0.9)
        assert again.resume_or_restart_averages("one", saved, 17) is goes_on
        assert values(again, 0.9) == decayed and again.collect_counters("two")["averages"]["updates"] == 0
        counted = {"widths": list(widths), "began": 3 if goes_on else 17, "updates": STEPS if goes_on else 0}
        assert again.collect_counters("one") == {"averages": counted}
        if goes_on:
            assert values(again, 0.2) == before
        else:
            assert all(values(again, width) == [flat.tolist() for flat in masters["one"].flats] for width in widths)
    followed = make(0.2)
    for flat, kept in zip(followed.flats["one"][0.2], whole.flats["one"][0.2]):
        flat.copy_(kept)
    followed.resume_or_restart_averages("one", saved, 17)
    train(whole, followed, first=STEPS)
    assert values(followed, 0.2) == values(whole, 0.2)
    masters["one"].step(40)
    whole.reset_to_masters()
    assert whole.collect_counters("one") == {"averages": {"widths": [0.05, 0.2], "began": 0, "updates": 0}}
    assert values(whole, 0.05) == values(whole, 0.9) == [flat.tolist() for flat in masters["one"].flats]


def test_reset_and_what_is_shown():
    """Oracle: the masters' values, copied, not shared; the averages of the decay that is named, else of the first."""
    masters = {"one": Flats(3), "two": Flats(2)}
    shadow = EmaShadow(masters, Ema(decays=(0.9, 0.5)), ("one",))
    masters["one"].step(3)
    shadow.reset_to_masters()
    masters["one"].step(5)
    for flats in shadow.flats["one"].values():
        assert flats[0].tolist() == [9.0, 10.0, 11.0]
    for decay, chosen in ((None, 0.9), (0.9, 0.9), (0.5, 0.5)):
        with shadow.use_averages_as_weights(decay):
            assert masters["one"].shown is shadow.flats["one"][chosen] and masters["two"].shown == []
    with (
        pytest.raises(ConfigError, match="no EMA of decay or width 0.7; .* has 0.9, 0.5"),
        shadow.use_averages_as_weights(0.7),
    ):
        pass
    with EmaShadow(masters, Ema(decays=()), ("one",)).use_averages_as_weights():
        assert masters["one"].shown == []
