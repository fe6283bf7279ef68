"""The commands that a run of fe4c14d is put through, by make.py with that commit, and by tests/launch/test_old_runs.py.

`figures` reads what they left: losses of the steps that followed, held-out figures, and sums of drawn samples and of
exported and consolidated weights.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

RUNS = ("dit", "iddpm", "vae", "dvae", "tokenizer", "prior", "phenaki")
# What each system draws here. An autoencoder and a tokenizer reconstruct, which `evaluate` measures; the prior's texts
# would need a text encoder.
DRAWS = {
    "dit": ("--num-samples", "2", "--labels", "3,7"),
    "iddpm": ("--num-samples", "2", "--labels", "3,7"),
    "phenaki": ("--num-samples", "2", "--prompts", "texts.txt", "--tokenizer", "tokenizer-export"),
}
TEXTS = "a bag moving up\na trouser moving right\n"
TENSORS = 40  # of a file whose sums are kept, evenly spaced


def commands(run: str, ds_config: str) -> Iterator[tuple[str, ...]]:
    """Yields script and arguments, for a working directory that holds the run's folder."""
    yield "train.py", "--recipe", f"{run}/run.yaml", "--ds_config", ds_config, f"folder={run}", "steps=4"
    yield "evaluate.py", run, "--num-samples", "8"
    if run == "phenaki":
        yield "export.py", "tokenizer", "--format", "safetensors", "--out", "tokenizer-export"
    if run in DRAWS:
        yield "generate.py", run, *DRAWS[run], "--out", "drawn"
    yield "export.py", run, "--format", "safetensors", "--out", "exported"
    yield "consolidate.py", run, "--weights", "raw", "--out", "consolidated"


def figures(run: str, folder: Path) -> dict[str, float]:
    """Returns the numbers by name that the commands left in `folder`."""
    found: dict[str, float] = {}
    for line in (folder / run / "metrics.jsonl").read_text().splitlines():
        report = json.loads(line)
        if report.get("step", 0) > 2:
            found |= {
                f"step {report['step']}: {name}": value
                for name, value in report.items()
                if name.endswith(("loss", "grad_norm")) and isinstance(value, int | float)
            }
    for path in sorted((folder / run / "evaluation").glob("*.json")):
        held_out = json.loads(path.read_text())["figures"]
        found |= {f"held out: {name}": value for name, value in held_out.items() if isinstance(value, int | float)}
    for path in sorted((folder / "drawn").rglob("*.np[yz]")):
        content = np.load(path)
        drawn = content["arr_0"] if path.suffix == ".npz" else content
        found[f"drawn: {path.suffix} mean"] = float(np.float64(drawn).mean())
        found[f"drawn: {path.suffix} deviation"] = float(np.float64(drawn).std())
    for place in ("exported", "consolidated"):
        for path in sorted((folder / place).rglob("*.safetensors")):
            tensors = load_file(path)
            names = sorted(tensors)[:: max(1, len(tensors) // TENSORS)]
            for name in names:
                key = f"{path.relative_to(folder).as_posix()}: {name}"
                found[key] = float(np.abs(tensors[name].astype(np.float64)).sum())
    return found
