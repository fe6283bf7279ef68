"""Run by test_elastic.py: saves at every stage on 2 ranks, loads at others and on other numbers of ranks.

save FOLDER            4 steps at each stage, a checkpoint (padding of NaN is no reason to refuse it, a weight is),
                       10 more steps; what was there goes to FOLDER/truth.pt
load FOLDER OUT.json   loads each pair of stages, compares bit for bit, takes the 10 steps again
"""

import json
import math
import resource
import sys
from pathlib import Path

import torch

from dstrain.distributed import group
from dstrain.engine.checkpoint import Checkpoints, read_weights
from dstrain.engine.ema.shadow import EmaShadow
from dstrain.engine.start import start_process_group
from dstrain.recipe import Save
from tests.engine.check_engines import GLOBAL, batch, decays, gathered, recipe, rows
from tests.support.engines import engines_for, resolve
from tests.support.tiny import Tiny

BEFORE, AFTER = 4, 10
PAIRS = ((0, 3), (1, 1), (1, 2), (2, 2), (2, 3), (3, 2), (3, 3), (3, 0))


class History:
    """Small state beside the weights, as a loss-aware timestep sampler keeps it."""

    def __init__(self):
        self.values = torch.zeros(3)

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


class Trial:
    def __init__(self, stage: int, folder: Path, **words):
        run = recipe(GLOBAL // group.world())
        config = {"zero_optimization": {"stage": stage}}
        if stage == 3:
            config["zero_optimization"] |= {"stage3_param_persistence_threshold": 40, "sub_group_size": 300}
        self.engines = engines_for(lambda: {"tiny": Tiny()}, run, resolve(config, run, group.world(), "cpu"), decays)
        self.ema = EmaShadow(self.engines.masters, run.ema, ("tiny",))
        self.history = History()
        self.saves = Checkpoints(folder, self.engines, self.ema, self.history, **words)
        self.native = Checkpoints(
            folder.with_name(f"native{stage}"),
            self.engines,
            self.ema,
            self.history,
            Save(format="deepspeed"),
            report=[].append,
            trust_pickle=True,
        )

    def steps(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            x, y = batch(step)
            mine = rows(0, GLOBAL // group.world())
            with self.engines.freeze_all_but("tiny") as nets:
                loss = (nets["tiny"](x[mine]) - y[mine]).square().mean()
                self.engines.run_backward_and_step("tiny", loss)
            self.ema.update_averages(step, self.engines.collect_part_change_flags())
            self.history.values += step
            losses.append((group.sum_over_ranks(loss.detach()) / group.world()).item())
        return losses

    def state(self) -> dict[str, torch.Tensor]:
        masters = self.engines.masters["tiny"]
        kinds = {
            "master": masters.flats,
            **{kind: masters.get_moments_in_fp32(kind) for kind in masters.moment_kinds},
            **{f"ema.{decay}": flats for decay, flats in self.ema.flats["tiny"].items()},
        }
        whole = {
            f"{kind}/{name}": value for kind, flats in kinds.items() for name, value in gathered(masters, flats).items()
        }
        return whole | {
            "buffer": self.engines.modules["tiny"].scale.table.clone(),
            "history": self.history.values.clone(),
            "updates": torch.tensor(masters.num_updates),
        }


@torch.no_grad()
def spoil_padding(trial: Trial) -> int:
    """NaN in all that no weight owns, as memory may hold it; the number of such values on this rank."""
    masters = trial.engines.masters["tiny"]
    kept = [view.clone() for _, view in masters.iterate_fragment_views(masters.flats)]
    for flat in masters.flats:
        flat.fill_(math.nan)
    for (_, view), values in zip(masters.iterate_fragment_views(masters.flats), kept):
        view.copy_(values)
    return sum(flat.isnan().sum().item() for flat in masters.flats)


def refuses_nan(trial: Trial) -> bool:
    """Whether a weight that is NaN on the last rank keeps every rank from saving."""
    if group.rank() == group.world() - 1:
        masters = trial.engines.masters["tiny"]
        list(masters.iterate_fragment_views_to_save(masters.flats))[-1][1][-1] = math.nan
    try:
        trial.saves.save(BEFORE + AFTER)
    except FloatingPointError as error:
        return f"step {BEFORE + AFTER} are not finite" in str(error)
    return False


def fails_together(trial: Trial) -> bool:
    """Whether one rank's full disk fails DeepSpeed's own checkpoint on every rank, without a wait for any."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if group.rank() == group.world() - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        trial.native.save(BEFORE + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return trial.native.saver.newest == BEFORE and trial.native.store.list_steps() == [BEFORE]


def save(folder: Path) -> None:
    truth = {}
    for stage in (0, 1, 2, 3):
        trial = Trial(stage, folder / f"stage{stage}")
        padding = spoil_padding(trial)
        assert stage != 3 or group.rank() == 0 or padding, "there is no padding to spoil"
        trial.steps(0, BEFORE)
        trial.native.save(BEFORE)
        trial.saves.save(BEFORE)  # a thread writes it while the steps below change the weights
        truth[stage] = {"state": trial.state(), "losses": trial.steps(BEFORE, BEFORE + AFTER)}
        trial.saves.saver.wait_for_save()
        assert trial.saves.saver.newest == trial.native.saver.newest == BEFORE
        assert fails_together(trial), f"stage {stage} saves half of a checkpoint"
        assert refuses_nan(trial), f"stage {stage} saves NaN"
    if group.rank() == 0:
        torch.save(truth, folder / "truth.pt")


def compare(trial: Trial, truth: dict) -> dict:
    """Loads the trial's checkpoint over other weights; what differs from the truth, then and after 10 steps."""
    trial.steps(50, 51)
    trial.engines.modules["tiny"].scale.table.zero_()
    step = trial.saves.resume()
    state, wanted = trial.state(), truth["state"]
    differ = [name for name in wanted if not torch.equal(state[name], wanted[name])]
    if trial.saves is not trial.native:
        differ += [f"begun: {name}" for name, value in begun(trial).items() if not torch.equal(value, wanted[name])]
    losses = trial.steps(BEFORE, BEFORE + AFTER)
    return {
        "step": step,
        "differ": differ,
        "losses": max(abs(a - b) / abs(b) for a, b in zip(losses, truth["losses"])),
        "trivial": losses[0] == losses[-1],
    }


def begun(trial: Trial) -> dict[str, torch.Tensor]:
    """The state of a trial whose weights are drawn from the checkpoint by slices, as init_from does."""
    for flat in trial.engines.masters["tiny"].flats:
        flat.detach().zero_()
    trial.engines.modules["tiny"].scale.table.zero_()
    path = trial.saves.store.folder / f"step_{BEFORE:08d}"
    trial.engines.initialize_weights({"tiny": read_weights(path, "tiny", load_values=False)})
    return trial.state()


def load(folder: Path, out: Path) -> None:
    truth = torch.load(folder / "truth.pt")
    figures = {}
    for saved, loaded in PAIRS:
        figures[f"{saved}->{loaded}"] = compare(Trial(loaded, folder / f"stage{saved}"), truth[saved])
    for stage in (1, 2, 3):
        trial = Trial(stage, folder / f"stage{stage}")
        trial.saves = trial.native
        try:
            figures[f"native {stage}"] = compare(trial, truth[stage])
        except ValueError as error:  # on another number of ranks
            figures[f"refused {stage}"] = str(error)
    if group.rank() == 0:
        out.write_text(json.dumps(figures))


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    start_process_group()
    save(Path(words[1])) if words[0] == "save" else load(Path(words[1]), Path(words[2]))
