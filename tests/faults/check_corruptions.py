"""Run by test_corruptions.py on each rank: FOLDER COUNT SEED FIRST [KIND ...]. Ruins the newest of two checkpoints in
one way after another, but for the kinds that are named, resumes by the trainer's own path, and writes what happened to
FOLDER/outcomes, a line each. A resume that takes too long ends the process with all stacks; FOLDER/outcomes then lacks
its line, and FOLDER/trial names it.
"""

import faulthandler
import json
import random
import shutil
import sys
from pathlib import Path

import torch

from dstrain.distributed import group
from dstrain.engine.start import start_process_group
from tests.engine.check_elastic import Trial
from tests.faults.corruptions import HARMLESS, NAMED, corrupt

OLDER, NEWER = 2, 4
LIMIT = 20.0  # seconds of one resume, which takes a hundredth of one


def judge(kind: str, name: str, step: int, truth: dict, state: dict, reports: list[str]) -> str:
    """ "harmless", "passed over", or what is wrong."""
    different = [key for key in truth.get(step, ()) if not torch.equal(state[key], truth[step][key])]
    if step not in truth:
        return f"FRESH: resumed at step {step}"
    if different:
        return f"SILENT: resumed at step {step} with other {', '.join(different[:3])}"
    if step == NEWER:
        return "harmless" if kind in HARMLESS else f"UNSEEN: step {NEWER} was taken"
    told = any("damaged" in line and f"step_{OLDER:08d} " not in line for line in reports)
    return "passed over" if told or group.rank() or kind in NAMED else f"UNTOLD: {reports}"


def attempt(trial: Trial, kind: str, name: str, truth: dict) -> str:
    reports: list[str] = []
    trial.saves.saver.report = reports.append
    trial.steps(50, 51)  # other weights, so that nothing but the files can be right
    try:
        step = trial.saves.resume()
    except ValueError as error:  # ConfigError among them
        text = f"{type(error).__name__}: {str(error)[:200]}"
        return "named" if kind in NAMED and type(error).__name__ == "ConfigError" else f"RAISED: {text}"
    except Exception as error:
        return f"RAISED: {type(error).__name__}: {str(error)[:200]}"
    return judge(kind, name, step, truth, trial.state(), reports)


def main(folder: Path, trials: int, seed: int, first: int, skip: set[str]) -> None:
    start_process_group()
    work, pristine = folder / "work" / "checkpoints", folder / "pristine"
    if group.rank() == 0:
        shutil.rmtree(folder / "work", ignore_errors=True)
    group.barrier()
    trial, truth = Trial(2, work), {}
    for step in (OLDER, NEWER):
        trial.steps(step - 2, step)
        trial.saves.save(step, last=True)
        truth[step] = trial.state()
    if group.rank() == 0:
        shutil.rmtree(pristine, ignore_errors=True)
        shutil.copytree(work, pristine)
    for number in range(first, trials):
        kind = name = ""
        if group.rank() == 0:
            shutil.rmtree(work)
            shutil.copytree(pristine, work)
            kind, name = corrupt(work, OLDER, NEWER, random.Random(f"{seed} {number}"), skip)
            (folder / "trial").write_text(f"{number} {kind} {name}")
        kind, name = group.broadcast_from_first((kind, name))
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        outcomes = group.gather_objects(attempt(trial, kind, name, truth))
        faulthandler.cancel_dump_traceback_later()
        if group.rank() == 0:
            worst = next((outcome for outcome in outcomes if outcome.split(":")[0].isupper()), outcomes[0])
            with open(folder / "outcomes", "a") as file:
                file.write(json.dumps([number, kind, name, worst]) + "\n")
    group.leave_process_group()


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    main(Path(words[0]), int(words[1]), int(words[2]), int(words[3]), set(words[4:]))
