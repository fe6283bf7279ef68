"""Run by test_systems.py with a folder and the name of one of PLANS: every system saves, and goes on at other stages
and numbers of ranks; figures as JSON.

    2 ranks, stage 2    BEFORE steps, a checkpoint, AFTER + EXTRA more: the truth
    4, 2, 1 ranks       each of PLACES for some systems: that checkpoint, AFTER steps, compared with the truth
    4 ranks, stage 3    EXTRA steps from there, a checkpoint of its own, which goes BACK to 1 rank and AFTER steps
    2 ranks             checkpoints of save.format=deepspeed, and what DeepSpeed's own tools make of them

What trains is what launch/train.py trains: its checks and settings of the recipe for the number of ranks, built-in
data, the loop's step. The ranks are forked from this process after its imports and before any thread or process group,
so that a group of them costs a second instead of ten.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dstrain import recipe, systems
from dstrain.commands.job import JobOptions, prepare_job
from dstrain.data.batches import Batches
from dstrain.data.open import open_sources
from dstrain.distributed import group
from dstrain.engine import set_deepspeed_environment
from dstrain.engine.checkpoint import Checkpoints
from dstrain.engine.ema.shadow import EmaShadow
from dstrain.engine.start import start_process_group
from dstrain.systems.vae import kl
from dstrain.train import take_step
from tests.engine.check_engines import gathered
from tests.support import tokenizers
from tests.support.engines import count_skipped_steps, engines_for
from tests.support.launch import ROOT, free_port
from tests.support.preload import preload

BEFORE, AFTER, EXTRA = 8, 12, 5
ROUNDING = 1e-7  # the root mean square of a gradient that is nothing else
GAME = 14  # the vae's step from which its adversary plays
NATIVE, LATE = (("vae", 1), ("vae", 2), ("vae", 3), ("dit", 2)), 16  # in DeepSpeed's own files; the step
NATIVE_SAMPLE = (("vae", 3), ("dit", 2))  # of these CI's

# Recipe and overrides. With dropout the micro-batch is named, since masks belong to it; the others' is what each number
# of ranks makes of the global batch. Discriminators begin before the checkpoint, or after it.
#
# Adam divides by the gradient's own size: a weight whose gradient is nothing but rounding, since the loss does
# not depend
# on it (the bias of attention's keys, a bias before a normalization), moves in a direction that the order of summation
# decides, in plain torch as here. Such weights are left out of the comparison of weights, and of nothing else. A token
# that lies between two codes goes to the one or the other by rounding: with its adversary the tokenizer met one in its
# 12th step on one rank (1e-7 before, 1e-4 then, and growing), and none on four. The vae leaves its other self after 9
# steps of its game (1e-5 before, then up to 7e-2). Without an adversary, neither does.
CASES = {
    "dit": ("tiny", []),
    "modern": (
        "tiny",
        [
            "model.objective=flow",
            "model.learn_sigma=false",
            "samples.sampler=euler",
            "model.block={norm: rms, mlp: swiglu, qk_norm: rms, rope: true}",
            "model.tokens={label: 2, joins: 1}",
            "model.internal={depth: 1}",
        ],
    ),
    "decoder": (
        "tiny",
        [
            "data.path=builtin:emoji",
            "data.embeddings=builtin:emoji-pairs",
            "data.channels=3",
            "data.flip=false",
            "model.in_channels=3",
            "model.num_classes=1",
            "model.embedding_dim=384",
        ],
    ),
    "iddpm": ("tiny-iddpm", ["model.history_per_term=1", "model.diffusion_steps=4", "batch.micro=2"]),
    "dvae": (
        "tiny-vae",
        [
            "model.kl=null",
            "model.discrete={num_tokens: 16, codebook_dim: 8, num_layers: 2, "
            "hidden_dim: 8, kl_weight: 1.0, temperature: {steps: 20, minimum: 0.5}}",
        ],
    ),
    "vae": ("tiny-vae", [f"model.kl.discriminator={{start: {GAME}, n_layers: 1, base_channels: 8}}"]),
    "tokenizer": ("tiny-phenaki-tokenizer", []),
    "phenaki": ("tiny-phenaki", ["data.path=builtin:moving-fashion", "data.held_out=0", "batch.micro=2"]),
    "prior": ("tiny-prior", ["batch.micro=2"]),
}


# Ranks and stage: who goes there. Every system goes to more ranks, to one rank without ZeRO, and once to stage 3; those
# with state of their own and two networks to most places.
PLACES = {
    (4, 3): ("dit", "modern", "iddpm", "tokenizer", "phenaki"),
    (4, 1): ("dvae", "vae", "prior"),
    (2, 3): ("dvae", "prior", "decoder"),
    (1, 0): tuple(CASES),
    (1, 3): ("vae",),
}
BACK, RETURNING = (1, 2), ("iddpm", "tokenizer", "phenaki")  # from what 4 ranks saved at stage 3
# Of these CI's: each system goes to a place, DiT in one of its forms, and each place has a system.
PLACES_SAMPLE = {
    (4, 3): ("iddpm",),
    (4, 1): ("vae",),
    (2, 3): ("dvae",),
    (1, 0): ("dit", "tokenizer", "prior", "phenaki"),
    (1, 3): ("vae",),
}
RETURNING_SAMPLE = ("iddpm",)


@dataclass(frozen=True)
class Plan:
    """What is done in one process group after another."""

    places: dict[tuple[int, int], tuple[str, ...]]
    returning: tuple[str, ...]
    native: tuple[tuple[str, int], ...]


PLANS = {
    "sample": Plan(PLACES_SAMPLE, RETURNING_SAMPLE, NATIVE_SAMPLE),
    "all": Plan(PLACES, RETURNING, NATIVE),
}


def steady(case: str, first: int) -> int:
    """How many steps after `first` are compared."""
    return min(AFTER, {"tokenizer": 3, "vae": GAME + 8 - first}.get(case, AFTER))


class Watched:
    """The batches of a rank, and which samples they held: key, position and the sum of the numbers of each."""

    def __init__(self, batches: Batches):
        self.batches, self.seen = batches, []

    def read_step(self, step: int):
        for batch in self.batches.read_step(step):
            content = sum(
                values.double().flatten(1).sum(1)
                for values in batch.values()
                if values.ndim > 1 and values.device.type == "cpu"
            )
            self.seen.append({"key": batch["key"], "position": batch["position"], "content": content})
            yield batch

    def taken(self) -> dict[str, Tensor]:
        """Of the step that has ended, in the order of the global batch; on all ranks together."""
        rows = {name: torch.cat([seen[name] for seen in self.seen]) for name in self.seen[0]}
        self.seen = []
        return group.gather_rows_by_position(rows["position"], rows)


class Trial:
    """Everything that the loop holds, of one case at one stage on this many ranks."""

    def __init__(self, folder: Path, case: str, stage: int, saved: str = "saved", overrides: tuple[str, ...] = ()):
        name, own = CASES[case]
        words = [*own, *overrides, f"folder={folder / case / 'run'}"]
        if name == "tiny-phenaki":
            words.append(f"model.tokenizer.path={folder / 'tokens'}")
        options = JobOptions(ROOT / "tests" / "launch" / f"{name}.yaml", folder / f"zero{stage}.json", tuple(words))
        job = prepare_job(options, group.world(), "cpu")
        self.run, self.settings = job.run, job.settings
        self.system = systems.build(self.run.system, self.run.model)
        self.engines = engines_for(
            self.system.networks, self.run, job.settings, self.system.has_weight_decay, self.system.list_block_classes()
        )
        self.ema = EmaShadow(self.engines.masters, self.run.ema, self.system.averaged)
        self.saves = Checkpoints(
            folder / case / saved, self.engines, self.ema, self.system, self.run.save, trust_pickle=True
        )
        self.batches = Watched(
            Batches(
                open_sources(self.run.data)[0],
                global_batch=self.run.batch.global_,
                seed=self.run.seed,
                rank=group.rank(),
                micro_batch=job.settings["train_micro_batch_size_per_gpu"],
                world=group.world(),
                num_workers=0,
                flip=self.run.data.flip,
            )
        )

    def steps(self, first: int, last: int) -> list[dict]:
        """Of each step the mean loss of every part over all micro-batches and ranks, and the samples."""
        told = []
        for step in range(first, last):
            losses: dict[str, list[Tensor]] = {}

            def add(part, terms):
                return losses.setdefault(part, []).append(terms["loss"].double())

            take_step(step, self.run, self.system, self.engines, self.batches, SimpleNamespace(add_terms=add))
            self.ema.update_averages(step, self.engines.collect_part_change_flags())
            means = {
                part: (group.sum_over_ranks(sum(found)) / len(found) / group.world()).item()
                for part, found in losses.items()
            }
            told.append({"losses": means, "samples": self.batches.taken()})
        return told

    def state(self) -> dict[str, Tensor]:
        """What a run leaves, by kind: master/, exp_avg/, exp_avg_sq/, ema.../, system/, updates/."""
        found = {f"system/{name}": value.clone() for name, value in self.system.state_dict().items()}
        for part, masters in self.engines.masters.items():
            kinds = {
                "master": masters.flats,
                **{kind: masters.get_moments_in_fp32(kind) for kind in masters.moment_kinds},
                **{f"ema.{decay}": flats for decay, flats in self.ema.flats.get(part, {}).items()},
            }
            found |= {
                f"{kind}/{part}/{name}": value
                for kind, flats in kinds.items()
                for name, value in gathered(masters, flats).items()
            }
            found[f"updates/{part}"] = torch.tensor(masters.num_updates)
        return found

    def save(self, step: int) -> None:
        self.saves.save(step, last=True)  # which raises where it fails


def truth(folder: Path, plan: Plan) -> None:
    named = {case for cases in plan.places.values() for case in cases} | {case for case, _ in plan.native}
    for case in (case for case in CASES if case in named):
        trial = Trial(folder, case, 2)
        trial.steps(0, BEFORE)
        trial.save(BEFORE)
        found = {"begun": trial.state(), "steps": trial.steps(BEFORE, BEFORE + AFTER), BEFORE + AFTER: trial.state()}
        found["steps"] += trial.steps(BEFORE + AFTER, BEFORE + AFTER + EXTRA)
        found[BEFORE + AFTER + EXTRA] = trial.state()
        if group.rank() == 0:
            torch.save(found, folder / case / "truth.pt")


def elsewhere(folder: Path, plan: Plan) -> None:
    """Goes on from the 2 ranks' checkpoint at each of this world's stages."""
    figures = {}
    for (world, stage), cases in plan.places.items():
        for case in cases if world == group.world() else ():
            began = time.process_time()
            trial = Trial(folder, case, stage)
            first = trial.saves.resume()
            assert first == BEFORE
            steps = trial.steps(first, first + EXTRA)
            if (world, stage) == (4, 3) and case in plan.returning:
                other = Checkpoints(folder / case / "of4", trial.engines, trial.ema, trial.system)
                other.save(first + EXTRA, last=True)
            steps += trial.steps(first + EXTRA, first + AFTER)
            figures[f"{case} 2/2 -> {group.world()}/{stage}"] = compared(folder, case, trial, first, steps)
            figures[f"{case} 2/2 -> {group.world()}/{stage}"]["seconds"] = time.process_time() - began
    write(folder, figures, f"{group.world()}")


def back(folder: Path, plan: Plan) -> None:
    figures = {}
    for case in plan.returning:
        trial = Trial(folder, case, BACK[1], "of4")
        first = trial.saves.resume()
        assert first == BEFORE + EXTRA
        figures[f"{case} 4/3 -> 1/{BACK[1]}"] = compared(folder, case, trial, first, trial.steps(first, first + AFTER))
    write(folder, figures, "back")


def compared(folder: Path, case: str, trial: Trial, first: int, steps: list[dict]) -> dict:
    """How far the steps after `first` and what they left are from the truth."""
    wanted, state = torch.load(folder / case / "truth.pt"), trial.state()
    there, begun = wanted[first + AFTER], wanted["begun"]
    assert state.keys() == there.keys()
    expected = wanted["steps"][first - BEFORE : first - BEFORE + AFTER]
    off: dict[str, float] = {}
    for a, b in list(zip(steps, expected, strict=True))[: steady(case, first)]:
        assert a["losses"].keys() == b["losses"].keys()
        for part, loss in b["losses"].items():
            off[part] = max(off.get(part, 0.0), abs(a["losses"][part] - loss) / abs(loss))
    kinds = sorted({name.partition("/")[0] for name in there})

    def furthest(a: dict[str, Tensor], b: dict[str, Tensor], kind: str) -> float:
        """Of the elements whose gradient is more than rounding, where the kind has gradients."""
        most = 0.0
        for name in (name for name in there if name.startswith(f"{kind}/")):
            square = there.get(name.replace(kind, "exp_avg_sq", 1))
            off = (a[name] - b[name]).double().abs()
            most = max(most, (off if square is None else off.where(square.sqrt() > ROUNDING, 0.0)).max().item())
        return most

    return {
        "losses": off,
        "compared": steady(case, first),
        "apart": {kind: furthest(state, there, kind) for kind in kinds},
        "moved": {kind: furthest(begun, there, kind) for kind in kinds},
        "same": all(
            torch.equal(a["samples"][name], b["samples"][name])
            for a, b in zip(steps, expected)
            for name in ("key", "position", "content")
        ),
        "distinct": len(torch.cat([step["samples"]["key"] for step in steps]).unique()),
        "batch": [
            group.world(),
            trial.settings["train_micro_batch_size_per_gpu"],
            trial.settings["gradient_accumulation_steps"],
        ],
        "skipped": count_skipped_steps(trial.engines),
    }


def native(folder: Path, plan: Plan) -> None:
    """save.format=deepspeed on 2 ranks: a run's folder for each of NATIVE, gone on from, and by DeepSpeed's own tools.

    What the tools make of it: CASE-STAGE/merged.pt, by zero_to_fp32, and CASE-STAGE/universal/PART, by ds_to_universal.
    """
    figures = {}
    for case, stage in plan.native:
        name = f"{case}-{stage}"
        trial = Trial(folder, case, stage, f"{name}/checkpoints", ("save.format=deepspeed",))
        trial.steps(0, LATE)
        trial.save(LATE)
        wanted, expected = trial.state(), trial.steps(LATE, LATE + 3)
        again = Trial(folder, case, stage, f"{name}/checkpoints", ("save.format=deepspeed",))
        assert again.saves.resume() == LATE
        state, steps = again.state(), again.steps(LATE, LATE + 3)
        figures[name] = {
            "differ": [key for key in wanted if not torch.equal(wanted[key], state[key])],
            "losses": [step["losses"] for step in steps] == [step["losses"] for step in expected],
            "crossed": crossed(folder / case / name, Trial(folder, case, stage), again, wanted),
            "refused": refusal(folder, case, 3 - stage % 2, name),
        }
        if group.rank() == 0:
            torch.save(wanted, folder / case / name / "truth.pt")
            (folder / case / name / "run.yaml").write_text(recipe.dump_run(again.run), encoding="utf-8")
    write(folder, figures, "native")


def crossed(at: Path, plain: Trial, own: Trial, wanted: dict[str, Tensor]) -> list[str]:
    """What is lost, or wrongly reported, where a run goes over to fragments and back to DeepSpeed's own files."""
    said: list[str] = []
    Checkpoints(
        at / "checkpoints", plain.engines, plain.ema, plain.system, report=said.append, trust_pickle=True
    ).resume()
    state = plain.state()
    lost = [key for key in wanted if not torch.equal(wanted[key], state[key])]
    plain.steps(LATE, LATE + 1)
    Checkpoints(at / "crossed", plain.engines, plain.ema, plain.system).save(LATE + 1, last=True)
    Checkpoints(at / "crossed", own.engines, own.ema, own.system, own.run.save, said.append).resume()
    wanted, state = plain.state(), own.state()
    return said + lost + [key for key in wanted if not torch.equal(wanted[key], state[key])]


def tools(folder: Path, plan: Plan) -> None:
    """DeepSpeed's two tools on what `native` left, in one process; and one rank, which cannot go on from it."""
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    figures = {}
    for case, stage in plan.native:
        name = f"{case}-{stage}"
        at = folder / case / name / "checkpoints" / f"step_{LATE:08d}" / "deepspeed"
        parts = sorted(path.name for path in at.iterdir() if path.is_dir())
        merged = {part: get_fp32_state_dict_from_zero_checkpoint(str(at), tag=part) for part in parts}
        torch.save(
            {part: {key: value.clone() for key, value in state.items()} for part, state in merged.items()},
            folder / case / name / "merged.pt",
        )
        for part in parts:
            sys.argv[1:] = [
                "--input_folder",
                str(at / part),
                "--output_folder",
                str(folder / case / name / "universal" / part),
                "--num_extract_workers",
                "1",
                "--num_merge_workers",
                "1",
            ]
            ds_to_universal.main(ds_to_universal.parse_arguments())
        figures[name] = {"refused": refusal(folder, case, stage, name)}
    write(folder, figures, "tools")


def refusal(folder: Path, case: str, stage: int, name: str) -> str:
    try:
        Trial(folder, case, stage, f"{name}/checkpoints", ("save.format=deepspeed",)).saves.resume()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def write(folder: Path, figures: dict, name: str) -> None:
    if group.rank() == 0:
        (folder / f"figures-{name}.json").write_text(json.dumps(figures))


def on_ranks(world: int, work: Callable[..., None], *arguments: Any) -> None:
    """work(*arguments) on `world` forked ranks, to their end."""
    began, port = time.perf_counter(), free_port()
    pids = [fork(rank, world, port, partial(work, *arguments)) for rank in range(world)]
    failed = [os.waitpid(pid, 0)[1] for pid in pids]
    print(f"{work.__name__} on {world} ranks: {time.perf_counter() - began:.1f} s", flush=True)
    assert not any(failed), f"{work.__name__} on {world} ranks ended with {failed}"


def fork(rank: int, world: int, port: int, work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        torch.set_num_threads(1)
        start_process_group()
        work()
        group.leave_process_group()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def main(folder: Path, plan: Plan) -> None:
    set_deepspeed_environment()
    import deepspeed.checkpoint.ds_to_universal  # noqa: F401  once, for all the forks

    kl.get_block_classes()
    preload()
    for stage in range(4):
        zero = {"stage": stage}
        if stage == 3:
            zero |= {"sub_group_size": 3000, "stage3_param_persistence_threshold": 300}
        (folder / f"zero{stage}.json").write_text(json.dumps({"zero_optimization": zero}))
    tokenizers.save(folder / "tokens", patch_size=8)
    on_ranks(2, truth, folder, plan)
    for world in (4, 2, 1):
        on_ranks(world, elsewhere, folder, plan)
    on_ranks(1, back, folder, plan)
    on_ranks(2, native, folder, plan)
    on_ranks(1, tools, folder, plan)


if __name__ == "__main__":
    main(Path(sys.argv[1]), PLANS[sys.argv[2]])
