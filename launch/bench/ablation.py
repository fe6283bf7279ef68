"""Measures what the choices of today's DiTs bring in a few minutes on the built-in clothes, over seeds.

    python launch/bench/ablation.py --out runs/ablation [--rows flow recipe --seeds 0 1 2 --steps 800 --equal cpu]
    python launch/bench/ablation.py --out runs/quality --against "recipe before" --rows "recipe before" --steps 1200
    python launch/bench/ablation.py --out runs/quality --against "recipe before" --rows "recipe, guidance 8" \\
        --steps 850

Every row is launch/recipes/dit-small.yaml with the words of ROWS, trained by a process of its own on one thread, and
scored by `dstrain evaluate` with 1,000 pictures against the training images. All rows take as many steps. After that,
`--equal cpu` trains them for as many CPU seconds as the row of `--against` took (the least of its seeds), but for those
that took as many. OUT/results.jsonl keeps a line for each training, which is not repeated, so the command goes on where
it was stopped. At the end it prints a table in Markdown, with mean and deviation over the seeds, and draws
OUT/ablation.png.

A row is better than another where the means of FD differ by more than two deviations of the difference. REPA's encoder
is a small DINOv2, which learns the labels of the training images within a minute.

docs/results.md has such tables and says what to make of them.
"""

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dstrain.data.sources.images import open_images

RECIPE = "launch/recipes/dit-small.yaml"
PLAIN = (
    "model.num_heads=4",
    "model.block={norm: layer, mlp: gelu, qk_norm: none, rope: false}",
    *("model.objective=diffusion", "samples.sampler=ddim", "samples.spacing=trailing"),
)
FLOW = (
    *PLAIN,
    "model.objective=flow",
    "model.flow.density=uniform",
    "samples.sampler=euler",
    "samples.spacing=linspace",
)
NORMAL = (*FLOW, "model.flow.density=logit_normal")
X = "model.flow={density: logit_normal, prediction: x, loss: velocity, t_min: 0.05}"
BLOCK = "model.block={norm: rms, mlp: swiglu, qk_norm: rms, rope: true}"
LAYERSYNC = "model.align={kind: layersync, depth: 2, target: 4}"
INTERNAL = "model.internal={depth: 4, scale: 1.5}"
ROWS = {
    "baseline": PLAIN,
    "flow": FLOW,
    "flow, logit-normal times": NORMAL,
    "flow, logit-normal, prediction of x": (*FLOW, X),
    "modern block": (*PLAIN, BLOCK),
    "LayerSync": (*PLAIN, LAYERSYNC),
    "REPA": (*PLAIN, "model.align={kind: repa, depth: 2, path: %s}"),
    "flow, logit-normal, internal guidance": (*NORMAL, INTERNAL),
    "flow, logit-normal, modern block": (*NORMAL, BLOCK),
    "all": (*NORMAL, BLOCK, LAYERSYNC, INTERNAL),
    "recipe": (),
    "recipe, guidance 8": ("samples.guidance_scale=8", "samples.guidance_interval=[0.2,8]"),
    "recipe before": (
        *PLAIN,
        *("batch.global=64", "optimizer.lr=3e-3", "samples.guidance_scale=5", "samples.guidance_interval=[0.2,5]"),
    ),
}
"""Words by which each row differs from the recipe. The last row is what it was before November 2026."""


def main() -> None:
    """Trains and scores what is missing, then prints the table and draws the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and results.jsonl")
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=tuple(ROWS), metavar="ROW", help="of ROWS")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument(
        "--against", choices=tuple(ROWS), default="baseline", metavar="ROW", help="what rows are compared with"
    )
    parser.add_argument("--steps", type=int, default=800, help="of all rows with equal images; the rate falls in them")
    parser.add_argument("--num-samples", type=int, default=1000, help="pictures that are scored")
    parser.add_argument("--equal", choices=("images", "cpu"), default="images", help="what all rows have alike")
    parser.add_argument("--margin", type=float, default=0.05, help="of CPU seconds, within which rows are equal anyhow")
    parser.add_argument("words", nargs="*", default=(), help="key=value for all rows")
    options = parser.parse_intermixed_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for row in dict.fromkeys((options.against, *options.rows)):
            complete_row(options, row, seed)
    results = read_results(options.out)
    print(format_table(results, options.against))
    draw_plot(results, options.out / "ablation.png")


def complete_row(options: argparse.Namespace, row: str, seed: int) -> None:
    """Trains and scores the row with this seed, unless results.jsonl has it, and writes its line there."""
    done = read_results(options.out)
    equal = "images" if row == options.against else options.equal
    if (row, seed, equal) in {(result["row"], result["seed"], result["equal"]) for result in done}:
        return
    steps = options.steps
    if equal == "cpu":
        # A seed changes no cost, and whatever else the machine does only adds to it: the least is the row's own.
        least: dict[str, float] = {}
        for result in done:
            if result["equal"] == "images" and result["steps"] == options.steps:
                least[result["row"]] = min(result["cpu_seconds"], least.get(result["row"], float("inf")))
        if row not in least:
            raise SystemExit(f"--equal cpu: {row} was not trained with equal images; leave --equal out first")
        share = least[options.against] / least[row]
        if abs(share - 1) < options.margin:
            return
        steps = round(steps * share)
    folder = options.out / f"{row} {equal} {seed}".replace(",", "").replace(" ", "-")
    result = {"row": row, "seed": seed, "equal": equal, "steps": steps, **train(options, folder, row, seed, steps)}
    result |= score(folder, options.num_samples)
    with open(options.out / "results.jsonl", "a") as file:
        print(json.dumps(result), file=file)
    print(f"{row}, seed {seed}, {steps} steps: FD {result['fd']:.1f}, accuracy {result['accuracy']:.1%}", flush=True)


def train(options: argparse.Namespace, folder: Path, row: str, seed: int, steps: int) -> dict[str, float]:
    """Trains a run anew; returns how many images it saw and weights it has, and the CPU seconds of its process."""
    shutil.rmtree(folder, ignore_errors=True)
    words = [word % encoder(options.out) if "%s" in word else word for word in ROWS[row]]
    quiet = [f"every.{name}=0" for name in ("sample", "metrics", "evaluate", "report_page")]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    dstrain(
        "train", "--recipe", RECIPE, "--ds_config", "ds_configs/zero2.json", f"folder={folder.resolve()}",
        f"seed={seed}", f"steps={steps}", f"optimizer.decay_steps={steps}", "track.wandb=disabled",
        f"every.save={steps}", *quiet, *options.words, *words,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    weights = re.search(r"^weights: denoiser ([\d,]+)", (folder / "log.txt").read_text(), re.MULTILINE)
    *_, last = (
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if "images_seen" in line
    )
    return {"images": last["images_seen"], "weights": int(weights[1].replace(",", "")), "cpu_seconds": spent}


def score(folder: Path, num_samples: int) -> dict[str, float]:
    """Returns FD and accuracies, in all and by class, of so many pictures that the run draws as its recipe says."""
    words = "--metrics", "fd,accuracy", "--num-samples", str(num_samples), "--precision", "bf16"
    dstrain("evaluate", str(folder.resolve()), *words)
    [path] = (folder / "evaluation").glob("*fd_accuracy*.json")
    return json.loads(path.read_text())["figures"]


def dstrain(*words: str) -> None:
    """Runs a verb of dstrain on one thread. Raises SystemExit with the end of what it said where it fails."""
    root, environment = Path(__file__).resolve().parents[2], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "dstrain", *words], cwd=root, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"dstrain {' '.join(words)}\n{(done.stdout + done.stderr)[-2000:]}")


def encoder(out: Path) -> str:
    """Returns the folder of REPA's encoder, a DINOv2 of 0.5 M weights with patches of 4 pixels; trains it at first."""
    from transformers import Dinov2Config, Dinov2Model

    folder = out.resolve() / "encoder"
    if folder.is_dir():
        return str(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 28, "patch_size": 4}
    tower = Dinov2Model(Dinov2Config(**shape))
    head = nn.Linear(shape["hidden_size"], 10)
    source = open_images("builtin:fashion", 28, channels=1)
    samples = [source[i] for i in range(len(source))]
    images = torch.stack([torch.as_tensor(sample["image"]) for sample in samples]).expand(-1, 3, -1, -1)
    labels = torch.tensor([int(sample["label"]) for sample in samples])
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    optimizer = torch.optim.AdamW([*tower.parameters(), *head.parameters()], 1e-3)
    for _ in range(400):
        chosen = torch.randint(len(labels), (64,))
        pixels = (images[chosen].float() / 255 - mean) / deviation
        patches = tower(pixel_values=pixels).last_hidden_state[:, 1:]
        loss = nn.functional.cross_entropy(head(patches.mean(1)), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tower.save_pretrained(folder)
    return str(folder)


def read_results(out: Path) -> list[dict[str, Any]]:
    """Reads the lines of results.jsonl; none where it is not there."""
    path = out / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def format_table(results: list[dict[str, Any]], against: str) -> str:
    """Formats a row for each row and each way of being equal, with mean and deviation over the seeds."""
    lines = [
        f"| row | equal | images | weights | CPU seconds | FD | show their label | worst class | against {against} |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base = [result["fd"] for result in results if result["row"] == against]
    for row, equal in dict.fromkeys((result["row"], result["equal"]) for result in results):
        own = [result for result in results if (result["row"], result["equal"]) == (row, equal)]
        distance, right = ([result[name] for result in own] for name in ("fd", "accuracy"))
        seconds = statistics.mean(result["cpu_seconds"] for result in own)
        cells = [row, equal, f"{own[0]['images']:,}", f"{own[0]['weights']:,}", f"{seconds:.0f}", describe(distance)]
        cells += [f"{describe([100 * share for share in right])} %", f"{min(map(find_worst, own)):.0%}"]
        lines.append(f"| {' | '.join(cells)} | {judge(distance, base)} |")
    return "\n".join(lines)


def describe(values: list[float]) -> str:
    """Describes values by their mean and deviation; one value by itself."""
    deviation = f" +- {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


def judge(values: list[float], base: list[float]) -> str:
    """Says whether FDs lie more than two deviations of the difference below, or above, those of the baseline."""
    if min(len(values), len(base)) < 2:
        return "one training"
    deviation = (statistics.variance(values) / len(values) + statistics.variance(base) / len(base)) ** 0.5
    difference = statistics.mean(values) - statistics.mean(base)
    if abs(difference) <= 2 * deviation:
        return "no difference"
    return "better" if difference < 0 else "worse"


def find_worst(result: dict[str, Any]) -> float:
    """Finds the share of pictures that show their label in the class where it is lowest."""
    return min(value for name, value in result.items() if name.startswith("accuracy/"))


def draw_plot(results: list[dict[str, Any]], path: Path) -> None:
    """Writes a PNG: a line for each row, a point for each training, at its FD."""
    from matplotlib.figure import Figure  # slow to import

    names = list(dict.fromkeys(f"{result['row']} ({result['equal']})" for result in results))[::-1]
    figure = Figure(figsize=(8, 0.4 * len(names) + 1.2), layout="constrained")
    axes = figure.subplots()
    for result in results:
        height = names.index(f"{result['row']} ({result['equal']})")
        axes.plot(result["fd"], height, "o", color="#2a5d9f" if result["equal"] == "images" else "#b3541e", alpha=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("FD, a point for each training")
    axes.grid(True, color="#e4e4e4")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
