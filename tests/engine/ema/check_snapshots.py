"""Run by test_averages.py: two networks with averages by width, the second of which learns in every other step.

    train FOLDER    2 ranks: steps to HALF, from the checkpoint of SAVED once more, at each of CASES
    go_on FOLDER    1 rank: from there to LAST, each at another stage

Beside them an average of WIDE and every width in DIRECT is tracked in float64 from the whole weights of each step.
"""

import json
from pathlib import Path

import torch

from dstrain import recipe
from dstrain.checkpoint.manifest import read_manifest
from dstrain.commands.reconstruct import ReconstructOptions, make_weight_averages
from dstrain.distributed import group
from dstrain.engine.checkpoint import Checkpoints
from dstrain.engine.ema.shadow import EmaShadow
from dstrain.recipe import Run, Save
from tests.engine import check_engines
from tests.engine.check_elastic import History
from tests.engine.check_engines import GLOBAL, batch, decays, gathered, rows
from tests.engine.ema.test_profiles import published
from tests.support.engines import engines_for, resolve
from tests.support.tiny import Tiny

SAVED, HALF, LAST, EVERY = 12, 24, 80, 2
PARTS = ("a", "b")
DIRECT = (0.05, 0.075, 0.15)
WIDE = 0.2  # tracked directly, too
CASES = {"fp32-0": (0, 3), "fp32-1": (1, 1), "fp32-2": (2, 0), "fp32-3": (3, 2), "bf16-3": (3, 1)}


def run_of(micro: int, folder: Path, **ema) -> Run:
    own = {"folder": folder, "ema": {"decays": (), "profiles": (0.05, 0.1), "snapshots": EVERY, **ema}}
    return Run.model_validate(check_engines.recipe(micro).model_dump(by_alias=True) | own)


class Trial:
    """Engines, averages and checkpoints of a run's folder, and float64 averages of the whole weights."""

    def __init__(self, folder: Path, stage: int, precision: str, **ema):
        run = run_of(GLOBAL // group.world(), folder, **ema)
        config = {"zero_optimization": {"stage": stage}} | ({"bf16": {"enabled": True}} if precision == "bf16" else {})
        if stage == 3:
            config["zero_optimization"] |= {"stage3_param_persistence_threshold": 40, "sub_group_size": 300}
        self.lines: list[str] = []
        self.engines = engines_for(
            lambda: {part: Tiny() for part in PARTS}, run, resolve(config, run, group.world(), "cpu"), decays
        )
        self.ema = EmaShadow(self.engines.masters, run.ema, PARTS)
        self.saves = Checkpoints(
            folder / "checkpoints", self.engines, self.ema, History(), Save(keep=9), self.lines.append
        )
        self.direct = {(part, width): 0.0 for part in PARTS for width in (*DIRECT, WIDE)}
        self.times = dict.fromkeys(PARTS, 0)
        if group.rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "run.yaml").write_text(recipe.dump_run(run))

    def steps(self, first: int, last: int, save: int = 0) -> None:
        for step in range(first, last):
            self.engines.begin_step(0.01)
            x, y = batch(step)
            mine = rows(0, GLOBAL // group.world())
            for part in PARTS if step % 2 else PARTS[:1]:
                with self.engines.freeze_all_but(part) as nets:
                    self.engines.run_backward_and_step(part, (nets[part](x[mine]) - y[mine]).square().mean())
            self.ema.update_averages(step, self.engines.collect_part_change_flags())
            self.track(PARTS if step % 2 else PARTS[:1])
            if step + 1 == save:
                self.saves.save(save)
            self.saves.averages.write_snapshot_if_due(step + 1, last=False, wait=step + 1 == last)
        self.saves.close()

    def track(self, parts: tuple[str, ...]) -> None:
        for part in parts:
            self.times[part] += 1
            weights = self.weights(part)
            for width in (*DIRECT, WIDE):
                kept = (1 - 1 / self.times[part]) ** (published(width) + 1)
                self.direct[part, width] = kept * self.direct[part, width] + (1 - kept) * weights

    def weights(self, part: str) -> torch.Tensor:
        masters = self.engines.masters[part]
        whole = gathered(masters, masters.flats)
        return torch.cat([whole[name].double().flatten() for name in sorted(whole)])

    def truth(self) -> dict:
        return {"direct": self.direct, "times": self.times, "weights": {part: self.weights(part) for part in PARTS}}


def seals(folder: Path) -> dict[str, dict]:
    return {path.name: read_manifest(path)["files"] for path in sorted((folder / "averages").glob("step_*"))}


def train(folder: Path) -> None:
    for name, (stage, _) in CASES.items():
        trial = Trial(folder / name, stage, name[:4])
        assert trial.saves.resume() == 0
        trial.steps(0, HALF, save=SAVED)
        whole, truth = seals(folder / name), trial.truth()
        assert len(whole) == HALF // EVERY
        again = Trial(folder / name, stage, name[:4])
        assert again.saves.resume() == SAVED
        kept = [path for path in seals(folder / name) if not path.endswith(".aside")]
        assert kept == list(whole)[: SAVED // EVERY], "later snapshots are still there"
        group.barrier()
        again.steps(SAVED, HALF, save=HALF)
        assert seals(folder / name) == whole, f"{name}: resumed is not uninterrupted"
        if group.rank() == 0:
            torch.save(truth, folder / name / "truth.pt")
        group.barrier()
    make_weight_averages(ReconstructOptions(folder / "fp32-3", (0.075, 0.15)))


def go_on(folder: Path) -> None:
    for name, (_, stage) in CASES.items():
        trial, truth = Trial(folder / name, stage, name[:4]), torch.load(folder / name / "truth.pt")
        trial.direct, trial.times = truth["direct"], truth["times"]
        assert trial.saves.resume() == HALF
        trial.steps(HALF, LAST, save=LAST)
        torch.save(trial.truth(), folder / name / "truth.pt")
        worlds = [read_manifest(path)["world"] for path in sorted((folder / name / "averages").glob("step_*"))]
        assert worlds == [2] * (HALF // EVERY) + [1] * ((LAST - HALF) // EVERY), json.dumps(worlds)
