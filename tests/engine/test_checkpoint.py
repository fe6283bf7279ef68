"""Checkpoints of real engines on one rank: which one is loaded, what it restores, what is refused, the way back."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dstrain.checkpoint.manifest import read_manifest
from dstrain.engine.checkpoint import Checkpoints, read_ema_decays, read_weights
from dstrain.engine.ema.shadow import EmaShadow
from dstrain.engine.optimizers import ADAM
from dstrain.engine.recovery import Divergence
from dstrain.recipe import ConfigError, Ema, Faults, NotRead, Save
from tests.engine.test_masters import LR, engines_of, same, step, weights
from tests.support.tiny import Tiny

pytestmark = pytest.mark.usefixtures("alone")


class Net(Tiny):
    """Also a buffer that no state dict holds, in itself and in a child, and one of integers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.scale.register_buffer("cache", torch.ones(3), persistent=False)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))


class Narrow(Net):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(17, 2, bias=False)


class Counted(Net):
    """Another shape of a buffer."""

    def __init__(self):
        super().__init__()
        self.count = torch.zeros(3, dtype=torch.int64)


class System:
    """Small state beside the weights; `refuses` another run's."""

    def __init__(self, refuses: bool = False):
        self.values, self.refuses = torch.zeros(2), refuses

    def state_dict(self) -> dict[str, Tensor]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if self.refuses:
            raise ConfigError("another history")
        self.values = state["values"].clone()


class Trial:
    """Two networks, the first averaged, and their checkpoints in a folder."""

    def __init__(
        self,
        folder: Path,
        stage: int = 0,
        decays=(0.5, 0.9),
        save: Save = Save(keep=9, asynchronous=False),
        network=Net,
        parts=("a", "b"),
        refuses: bool = False,
        trust: bool = False,
        precision: str = "fp32",
        profiles=(),
        **faults,
    ):
        self.lines: list[str] = []
        self.saved: list[int] = []
        self.engines = engines_of(stage, precision, network=network, parts=parts)
        self.ema = EmaShadow(
            self.engines.masters, Ema(decays=decays, profiles=profiles, snapshots=len(profiles)), parts[:1]
        )
        self.system, self.course = System(refuses), Divergence(Faults(**faults))
        self.saves = Checkpoints(
            folder, self.engines, self.ema, self.system, save, self.lines.append, self.saved.append, self.course, trust
        )

    def steps(self, first: int, last: int) -> None:
        for number in range(first, last):
            self.engines.begin_step(LR)
            for part in self.engines:
                step(self.engines, part, seed=number)
            self.ema.update_averages(number, self.engines.collect_part_change_flags())
            self.system.values += 1
            for network in self.engines.modules.values():
                network.scale.table += 1
                network.count += 1
                network.cache += 1

    def state(self) -> dict[str, Tensor]:
        state = {"system": self.system.values.clone()}
        for part, masters in self.engines.masters.items():
            for kind, flats in [
                ("master", masters.flats),
                *((kind, masters.get_moments_in_fp32(kind)) for kind in ADAM),
                *self.ema.flats.get(part, {}).items(),
            ]:
                state |= {f"{part}/{kind}/{number}": flat.detach().clone() for number, flat in enumerate(flats)}
            network = self.engines.modules[part]
            state |= {
                f"{part}/table": network.scale.table.clone(),
                f"{part}/count": network.count.clone(),
                f"{part}/counts": torch.tensor([masters.num_updates, masters.num_skipped]),
            }
        return state


@pytest.fixture
def run(tmp_path) -> Iterator[tuple[Path, dict[int, dict[str, Tensor]]]]:
    """The folder of a run that has saved steps 1 to 4, and what it held at each of them."""
    trial, states = Trial(tmp_path / "run"), {}
    assert trial.saves.resume() == 0
    for number in range(1, 5):
        trial.steps(number, number + 1)
        trial.engines.masters["b"].num_skipped = number
        trial.saves.save(number)
        states[number] = trial.state()
    assert trial.saved == [1, 2, 3, 4] and trial.saves.saver.newest == 4
    return tmp_path / "run", states


def damage(folder: Path, number: int) -> None:
    path = folder / f"step_{number:08d}" / "b-00000-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def test_the_newest_and_others(run):
    """Oracle: what the run held at each step: the newest without a word, another by its name, as often as one likes."""
    folder, states = run
    trial = Trial(folder)
    trial.steps(7, 8)
    assert not same(trial.state(), states[4])
    assert trial.saves.resume() == 4 and trial.saves.saver.newest == 4 and same(trial.state(), states[4])
    for number in (2, 1, 4, 2):
        assert trial.saves.resume(number) == number == trial.saves.saver.newest
        assert same(trial.state(), states[number])
        assert torch.equal(trial.engines.modules["a"].cache, torch.full((2,), 2.0))  # nobody saves it
    with pytest.raises(ConfigError, match="--step 7: .* holds no such checkpoint; it holds 1, 2, 3, 4$"):
        trial.saves.resume(7)
    with pytest.raises(ConfigError, match="it holds none$"):
        Trial(folder / "new").saves.resume(7)
    assert trial.lines == []


def test_damaged_ones(run):
    """Oracle: the altered byte: the step before it is taken; alone, or named, it is refused."""
    folder, states = run
    damage(folder, 4)
    trial = Trial(folder)
    assert trial.saves.resume() == 3 and same(trial.state(), states[3])
    assert len(trial.lines) == 1 and "is damaged and passed over" in trial.lines[0]
    with pytest.raises(ConfigError, match="--step 4: that checkpoint is not whole"):
        Trial(folder).saves.resume(4)
    for number in (1, 2, 3):
        damage(folder, number)
    with pytest.raises(ConfigError, match="none of the 4 checkpoints in .* is whole"):
        Trial(folder).saves.resume()


def test_the_way_back(run):
    """Oracle: by hand: the newest from before the trouble, once more the one before it, then the end; what is left
    behind is put aside, and --step takes it back.
    """
    folder, states = run
    trial = Trial(folder, max_rollbacks=3, max_skipped=2)
    trial.saves.resume()
    for done in (5, 6, 7):
        trouble = trial.course.record_step(done, [False], {})
    assert "3 steps in a row" in trouble
    trial.steps(5, 6)
    assert trial.saves.roll_back(7, trouble) == 4 and same(trial.state(), states[4])
    assert trial.course.num_dropped == 3 and trial.course.num_rollbacks == 1 and trial.saves.saver.newest == 4
    assert trial.saves.roll_back(6, "once more") == 3 and same(trial.state(), states[3])
    assert trial.saves.store.list_steps() == [1, 2, 3] and trial.saves.store.list_steps_put_aside() == [4]
    assert trial.saves.saver.newest == 3
    assert trial.course.state.rollbacks == [(7, 4), (6, 3)] and trial.course.num_dropped == 6
    assert trial.saves.roll_back(4, "again") == 2 and trial.course.num_dropped == 8
    with pytest.raises(
        FloatingPointError,
        match=r"at last. The run has gone back 3 times \(faults.max_rollbacks=3.* "
        r"the steps 1, 2 \(put aside: 3, 4\)",
    ):
        trial.saves.roll_back(3, "at last")
    trial.course.exclude_past_rollbacks_from_limit()
    assert trial.saves.roll_back(3, "forgiven") == 1 and trial.course.state.forgiven == 3
    with pytest.raises(FloatingPointError, match="No checkpoint from before that is left to go back to"):
        trial.saves.roll_back(2, "nothing left")
    other = Trial(folder)
    assert other.saves.resume(3) == 3 and same(other.state(), states[3])
    assert other.saves.store.list_steps() == [1, 3] and other.saves.store.list_steps_put_aside() == [2, 4]
    with pytest.raises(ConfigError, match="it holds 1, 2, 3, 4"):
        other.saves.resume(9)


def test_no_way_back(tmp_path):
    """Oracle: by hand: a run without checkpoints, and one that may not go back."""
    trial = Trial(tmp_path / "none")
    with pytest.raises(FloatingPointError, match="bad. No checkpoint .* holds no checkpoint. .* --from-scratch"):
        trial.saves.roll_back(3, "bad")
    trial = Trial(tmp_path / "never", max_rollbacks=0)
    trial.saves.save(1)
    with pytest.raises(FloatingPointError, match="has gone back 0 times"):
        trial.saves.roll_back(3, "bad")


def test_a_way_back_waits_for_the_save_under_way(tmp_path):
    """Oracle: the values at the call, by a storage that takes its time."""
    trial = Trial(tmp_path, save=Save(keep=9))
    trial.steps(0, 1)
    quick = trial.saves.store.save
    trial.saves.store.save = lambda *words, **more: time.sleep(0.3) or quick(*words, **more)
    trial.saves.save(1)
    state = trial.state()
    trial.steps(1, 2)
    assert trial.saves.roll_back(3, "bad") == 1 and same(trial.state(), state)


def test_the_course_and_kinds(tmp_path):
    """Oracle: by hand: routine, stopped, in trouble; what the run went back to stays however many follow."""
    trial = Trial(tmp_path, save=Save(keep=2, asynchronous=False))
    trial.saves.save(1)
    trial.course.record_step(2, [False], {})
    trial.saves.save(2, routine=False)
    assert read_manifest(tmp_path / "step_00000002")["extra"]["kind"] == "trouble"
    assert trial.saves.roll_back(2, "bad") == 1 and trial.course.num_dropped == 1
    for number in (2, 3, 4, 5):
        trial.saves.save(number, score=10.0 - number, routine=number != 5)
    assert trial.saves.store.list_steps() == [1, 3, 4, 5]
    kinds = {number: read_manifest(tmp_path / f"step_{number:08d}")["extra"] for number in (1, 3, 4, 5)}
    assert [extra["kind"] for extra in kinds.values()] == ["routine", "routine", "routine", "stop"]
    assert [extra["score"] for extra in kinds.values()] == [None, 7.0, 6.0, 5.0] and kinds[5]["stays"] == [1]
    assert ["metric" in extra for extra in kinds.values()] == [False, True, True, True] and kinds[5]["metric"] == "loss"
    assert trial.saves.store.find_best_checkpoint() == (5, 5.0)
    fresh = Trial(tmp_path)
    assert fresh.saves.resume() == 5 and fresh.course.num_dropped == 1 and fresh.course.state.rollbacks == [(2, 1)]


def test_what_one_process_reads(run):
    """Oracle: what the run held: weights and averages by name, buffers that a state dict holds; kinds that it lacks."""
    folder, _states = run
    path, trial = folder / "step_00000003", Trial(folder)
    trial.saves.resume(3)
    read, averaged = read_weights(path, "a"), read_weights(path, "a", "ema.0.9")
    assert read.keys() == averaged.keys() == trial.engines.modules["a"].state_dict().keys()
    for name, value in weights(trial.engines, "a").items():
        assert torch.equal(read[name], value) and not torch.equal(read[name], averaged[name])
    assert torch.equal(read["count"], torch.full((2,), 3)) and torch.equal(read["scale.table"], averaged["scale.table"])
    assert read_ema_decays(path, "a") == [0.5, 0.9] and read_ema_decays(path, "b") == []
    with pytest.raises(ConfigError, match="no ema.0.7 of a; it holds master, exp_avg, exp_avg_sq, ema.0.5, ema.0.9"):
        read_weights(path, "a", "ema.0.7")
    with pytest.raises(ConfigError, match="no file c-"):
        read_weights(path, "c")


def test_what_does_not_fit(run):
    """Oracle: the names that differ, of networks, weights and buffers."""
    folder, _ = run
    for words, message in (
        ({"parts": ("a",)}, "holds the networks a, b; this run trains a:"),
        ({"network": Narrow}, r"fit this a: last.weight is \(3, 17\) there and \(2, 17\) here"),
        ({"network": Counted}, r"does not fit this a: count is \(2,\) there and \(3,\) here"),
    ):
        with pytest.raises(ConfigError, match=message):
            Trial(folder, **words).saves.resume()
    trial = Trial(folder, network=Tiny)
    assert trial.saves.resume() == 4  # buffers that this network lacks are nothing to it


def test_averages_that_were_added_and_left_out(run):
    """Oracle: the weights, from which an added average starts, with a line; one that is left out is nobody's."""
    folder, states = run
    trial = Trial(folder, decays=(0.9, 0.99))
    assert trial.saves.resume() == 4
    masters, flats = trial.engines.masters["a"], trial.ema.flats["a"]
    assert all(torch.equal(x, y) for x, y in zip(flats[0.99], masters.flats, strict=True))
    assert all(torch.equal(flat, states[4][f"a/0.9/{number}"]) for number, flat in enumerate(flats[0.9]))
    assert trial.lines == ["step_00000004 holds no ema.0.99 of a: it starts from the weights"]


def test_a_systems_own_state(run):
    """Oracle: the line on a state that the system refuses; the weights are there all the same."""
    folder, states = run
    trial = Trial(folder, refuses=True)
    assert trial.saves.resume() == 4 and trial.lines == ["the system's own state begins anew: another history"]
    assert same({**trial.state(), "system": states[4]["system"]}, states[4])


class Broken(Checkpoints):
    """Of a storage that fails behind the verification."""

    def load(self, path: Path) -> None:
        raise OSError(5, "Input/output error")


def test_a_storage_that_fails(run):
    """Oracle: the word for it, which is no fault of any file."""
    trial = Trial(run[0])
    trial.saves.__class__ = Broken
    with pytest.raises(NotRead, match="step_00000004 cannot be read, though it verified just now .*Input/output error"):
        trial.saves.resume()
