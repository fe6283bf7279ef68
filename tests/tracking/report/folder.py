"""A run's folder for tests, written by what writes real ones: recipe, settings, Tracker, an evaluation's plot."""

import json
from pathlib import Path

import torch

from dstrain.recipe import Run
from dstrain.runs import folders
from dstrain.tracking import figures
from tests.support.tracking import track_run
from tests.tracking.test_figures import result


def made(folder: Path, *, steps: int = 40, lr: float = 1e-3, clips: bool = False, **entries) -> Run:
    """A run of 8 steps a report that has been resumed at step 16 and has gone back from step 30 to step 24."""
    run = Run(
        name=folder.name,
        folder=folder,
        steps=steps,
        optimizer={"lr": lr},
        batch={"global": 4},
        track={"wandb": "disabled"},
        model={"depth": 2},
        **{"every": {"report": 8, "report_page": 0}} | entries,
    )
    folder.mkdir(parents=True)
    folders.write_run_files(run, {"zero_optimization": {"stage": 2}, "gradient_clipping": lr}, "builtin:fashion n=2")
    tracker = track_run(run, folder)
    for done in range(1, steps + 1):
        tracker.add_terms(
            "denoiser",
            {
                "loss": torch.tensor(1 / done),
                "loss_each": torch.tensor([1 / done, 2 / done]),
                "quartile": torch.tensor([0, 3]),
            },
        )
        if done % 8 == 0:
            tracker.report_means(
                done, {"lr": lr, "images_seen": 4 * done, "samples_per_second": 2.0, "skipped": done // 20}
            )
            tracker.report_scores(done, {"loss": 2 / done, "raw/loss": 3 / done})
            shape = (3, 5, 3, 12, 12) if clips else (3, 3, 12, 12)
            tracker.save_samples(
                done, torch.full(shape, 5 * done, dtype=torch.uint8), captions=["<b>a & b</b>", "", "c"]
            )
        if done == 16:
            tracker.close()
            tracker = track_run(run, folder, resumed_step=16)
    tracker.report_rollback(steps, steps + 6, "a loss of <NaN>")
    tracker.log(f"complete: {steps} steps")
    tracker.close()
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "step_00000040_ema0.99.json").write_text(json.dumps(result()))
    figures.plot_evaluation(folder / "evaluation" / "step_00000040_ema0.99.png", result())
    return run
