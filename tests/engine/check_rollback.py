"""Run by test_rollback.py: a run that goes back in the middle against a fresh one from the same checkpoint; as JSON.

At each place a trial takes GOOD steps, a checkpoint, and MORE steps, the last of them with a gradient that is not
finite; it goes back, and takes AFTER steps from the batches behind those. A fresh trial loads the checkpoint and takes
the same steps from the same batches. The ranks are forked, as in check_systems.py.
"""

import json
import sys
import time
from pathlib import Path

import torch

from dstrain.distributed import group
from dstrain.engine.checkpoint import Checkpoints
from dstrain.engine.recovery import Divergence
from dstrain.engine.updates import Flag
from dstrain.train import take_step
from tests.engine import check_systems
from tests.engine.check_systems import Trial, on_ranks, write
from tests.support import tokenizers
from tests.support.engines import count_skipped_steps
from tests.support.preload import preload

GOOD, MORE, AFTER = 5, 3, 4
# Number of ranks: case, stage, precision, save.format. Two tiny networks at every stage in every precision, so that any
# two of number of ranks, stage and precision meet; where the systems have state of their own, these too. The
# discriminator of vae begins behind the checkpoint.
EVERYWHERE = {
    world: [("brittle", stage, ("fp32", "bf16")[(stage + world) % 2], "fragments") for stage in range(4)]
    for world in (1, 2)
}
PLACES = {
    1: [
        *EVERYWHERE[1],
        ("brittle", 3, "bf16", "deepspeed"),
        ("vae", 2, "fp32", "fragments"),
        ("tokenizer", 3, "fp32", "fragments"),
        ("iddpm", 1, "bf16", "fragments"),
        ("dvae", 0, "bf16", "fragments"),
    ],
    2: [*EVERYWHERE[2], ("brittle", 1, "bf16", "deepspeed"), ("brittle", 2, "fp32", "deepspeed")],
}
check_systems.CASES["brittle"] = (
    "tiny",
    [
        "system=tests.support.brittle",
        "model={}",
        "data.image_size=4",
        "data.flip=false",
        "samples.sampler=null",
        "every.sample=0",
    ],
)


class Nobody:
    def add_terms(self, part: str, terms: dict) -> None:
        pass


def trial(folder: Path, case: str, stage: int, precision: str, form: str) -> Trial:
    config = folder / f"zero{stage}.json"
    settings = json.loads(config.read_text())
    settings.pop("bf16", None)
    if precision == "bf16":
        settings["bf16"] = {"enabled": True}
    group.barrier()
    if group.rank() == 0:
        config.write_text(json.dumps(settings))
    group.barrier()
    words = ("model.kl.discriminator.start=6",) if case == "vae" else ()
    made = Trial(folder, case, stage, overrides=(f"save.format={form}", *words))
    at = folder / case / f"{group.world()}-{stage}-{precision}-{form}"
    made.saves = Checkpoints(
        at, made.engines, made.ema, made.system, made.run.save, course=Divergence(made.run.faults), trust_pickle=True
    )
    return made


def steps(trial: Trial, first: int, last: int, broken: int | None = None) -> list:
    """Losses, and whether the step was applied; at step `broken` the losses are infinite on one rank."""
    loss, results = trial.system.loss, []
    for step in range(first, last):
        if step == broken and group.rank() == 0:
            trial.system.loss = lambda *words: {
                name: term * torch.inf if name == "loss" else term for name, term in loss(*words).items()
            }
        losses = take_step(
            step,
            trial.run,
            trial.system,
            trial.engines,
            trial.batches,
            Nobody(),
            trial.saves.course.num_dropped,
        )
        trial.system.loss = loss
        trial.ema.update_averages(step, trial.engines.collect_part_change_flags())
        results.append(
            (
                all(trial.engines.collect_part_change_flags().values()),
                {part: [value.item() for value in each] for part, each in losses.items()},
            )
        )
    return results


def compare(folder: Path) -> None:
    figures = {}
    for place in PLACES[group.world()]:
        began = time.process_time()
        live = trial(folder, *place)
        steps(live, 0, GOOD)
        live.saves.save(GOOD)
        bad = steps(live, GOOD, GOOD + MORE, broken=GOOD + MORE - 1)
        course = live.saves.course
        assert course.record_step(GOOD + MORE, [Flag(bad[-1][0])], {}) is None and course.state.in_a_row == 1
        assert live.saves.roll_back(GOOD + MORE, "trouble") == GOOD and course.num_dropped == MORE
        fresh = trial(folder, *place)
        assert fresh.saves.resume() == GOOD and fresh.saves.course.num_dropped == 0
        went_back, resumed = live.state(), fresh.state()
        begun = [key for key, value in went_back.items() if not torch.equal(value, resumed[key])]
        fresh.saves.course.state.shift = MORE
        a, b = (steps(each, GOOD, GOOD + AFTER) for each in (live, fresh))
        at_end, expected = live.state(), fresh.state()
        name = " ".join(map(str, (group.world(), *place)))
        figures[name] = {
            "skipped": [applied for applied, _ in bad] == [True] * (MORE - 1) + [False],
            "begun": begun,
            "losses": a == b,
            "applied": all(applied for applied, _ in a),
            "parts": sorted(a[-1][1]),
            "differ": [key for key in expected if not torch.equal(at_end[key], expected[key])],
            "count": count_skipped_steps(live.engines),
            "seconds": time.process_time() - began,
        }
    write(folder, figures, f"{group.world()}")


def main(folder: Path) -> None:
    check_systems.kl.get_block_classes()  # once, for all the forks, as what follows
    preload()
    for stage in range(4):
        zero = {"stage": stage}
        if stage == 3:
            zero |= {"sub_group_size": 300, "stage3_param_persistence_threshold": 30}
        (folder / f"zero{stage}.json").write_text(json.dumps({"zero_optimization": zero}))
    tokenizers.save(folder / "tokens", patch_size=8)
    for world in PLACES:
        on_ranks(world, compare, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
