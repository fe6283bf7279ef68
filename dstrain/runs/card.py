"""Writes the model card of an export: README.md, which says what a folder holds, how it was trained and how to draw
from it.

The card's table is made from the run's folder (folders.py) and the checkpoint's manifest. The publisher adds the
licence.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from dstrain import __version__
from dstrain.checkpoint.manifest import read_manifest
from dstrain.recipe import Run, Samples, dump_run
from dstrain.systems.base import System

GRID = "samples.png"
_KINDS = {"master": "the training weights", "ema": "an average of the training weights, decay"}
_LIBRARIES = ("torch", "diffusers", "safetensors")
_KIND_AND_PATH = re.compile(r"((?:\w[\w.+-]*:)?)(.*)", re.DOTALL)  # KIND: of samples.features, or nothing, and a path
# Runs the code argv[1] and writes what it drew to argv[2]. dstrain cannot be imported, nor can what only it needs: for
# diffusers, bitsandbytes is seconds of importing.
_RUNNER = """\
import sys
sys.modules.update(dict.fromkeys(("dstrain", "deepspeed", "bitsandbytes")))
import numpy, torch
torch.backends.cudnn.allow_tf32 = False
names = {}
exec(compile(open(sys.argv[1], encoding="utf-8").read(), "README.md", "exec"), names)
drawn = names["images"] if "images" in names else names["image_embeds"]
drawn = drawn.cpu().numpy() if torch.is_tensor(drawn) else numpy.stack([numpy.asarray(image) for image in drawn])
numpy.save(sys.argv[2], drawn)
"""


def run_example_code(folder: Path, title: str, code: str) -> np.ndarray:
    """Runs the Python example of a model card in a new process that does not import dstrain. Returns the array that the
    example draws: float32 (N, ...), or pictures as uint8 (N, H, W) or (N, H, W, 3).

    folder: the export
    title: the name by which the process finds the export in its working folder; takes the place of "OUT" in the code
    code: the Python example

    Raises RuntimeError if the code fails.
    """
    with tempfile.TemporaryDirectory(prefix="dstrain-card-") as name:
        place = Path(name)
        (place / "code.py").write_text(_replace_out_placeholder(code, title), encoding="utf-8")
        (place / "here").mkdir()
        (place / "here" / title).symlink_to(folder.absolute())
        # The code of pipelines is ours, and is copied into a cache, which several exports at a time would share.
        environment = {
            "HF_MODULES_CACHE": str(place / "modules"),
            "DIFFUSERS_DISABLE_REMOTE_CODE": "false",
            "HF_HUB_OFFLINE": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", _RUNNER, place / "code.py", place / "drawn.npy"],
            cwd=place / "here",
            capture_output=True,
            text=True,
            env=os.environ | environment,
        )
        if done.returncode:
            raise RuntimeError(f"the code of the model card fails:\n{code}\n{done.stderr[-4000:]}")
        return np.load(place / "drawn.npy")


def _replace_out_placeholder(code: str, title: str) -> str:
    """Returns the code with `title`, escaped as in JSON, instead of each OUT that follows a double quote."""
    return code.replace('"OUT', json.dumps(title, ensure_ascii=False)[:-1])


def write_model_card(
    out: Path,
    title: str,
    run: Run,
    folder: Path,
    checkpoint: Path,
    kinds: Mapping[str, str],
    class_name: str,
    note: str,
    code: str,
    errors: Mapping[str, float],
    limit: float,
    system: System,
) -> None:
    """Writes OUT/README.md, and copies the run's newest grid of samples into OUT if there is one. The recipe in the
    card has no paths of this machine. Raises ConfigError if the checkpoint's manifest is damaged.

    title: the name that the export gets
    folder: the run's folder
    kinds: {part: kind of the weights taken from `checkpoint`}, such as "master" or "ema.0.9999"
    class_name: the class of diffusers that draws from the export
    note: a warning for users; "" for none
    code: the Python example, which draws from the folder "OUT"
    errors: the relative errors of the export by name; errors["code"] is that of what `code` draws
    limit: the relative error above which an export is refused
    """
    sealed, run = read_manifest(checkpoint), _remove_local_paths(run)
    imported = sealed["extra"].get("imported")  # of dstrain import's: not trained here
    versions = ", ".join(f"{library} {version}" for library, version in sealed["versions"].items())
    here = ", ".join(
        [f"dstrain {__version__}", *(f"{library} {importlib.metadata.version(library)}" for library in _LIBRARIES)]
    )
    data = (folder / "data.txt").read_text(encoding="utf-8").strip() if (folder / "data.txt").exists() else "unknown"
    facts = {
        "System": f"{run.system}, as diffusers' {class_name}",
        "Run": run.name,
        "Step": f"0, imported from {imported}" if imported else f"{sealed['step']:,} of {run.steps:,}",
        "Weights": "; ".join(
            f"{part}: {'as imported' if imported else _describe_weights_kind(kind)}" for part, kind in kinds.items()
        ),
        "Seed": str(run.seed),
        "Data": "unknown" if imported else f"{run.data.path} ({data})",
        "Imported with" if imported else "Trained with": versions,
        "Exported with": here,
        "Difference": ", ".join(f"{error:.1e} ({name})" for name, error in errors.items())
        + ", relative, of what diffusers computes from this folder and the trained network",
    }
    lines = ["---", "library_name: diffusers", f"tags: [dstrain, {run.system}]", "---", "", f"# {run.name}", ""]
    if (grid := _find_newest_sample_grid(folder / "samples")) is not None:
        shutil.copyfile(grid, out / GRID)
        lines += [f"![samples of {grid.stem.replace('_', ' ')}]({GRID})", ""]
    cells = {key: value.replace("|", "\\|").replace("\n", " ") for key, value in facts.items()}
    lines += ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in cells.items()), ""]
    lines += ["```python", *_replace_out_placeholder(code, title).splitlines(), "```", ""]
    lines += [
        "This code was run on this folder when it was written, without dstrain. What it drew differs by "
        f"{errors['code']:.1e} (relative to the largest value) from what the trained network draws in dstrain "
        f"from the same noise; above {limit:.1e} the export would have been refused."
        + f" The run's own pictures take {_describe_sampling(run.samples, system, class_name)}."
        * ("images = pipeline" in code),
        "",
    ]
    lines += [f"Note: {note}.", ""] if note else []
    recipe = [line for line in dump_run(run).splitlines() if line not in ("folder: null", "init_from: null")]
    lines += [
        "## Recipe",
        "",
        "```yaml",
        *recipe,
        "```",
        "",
        "## Licence",
        "",
        "Not stated: whoever publishes these weights says here under which licence, and what that of the data allows.",
        "",
    ]
    (out / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _describe_sampling(samples: Samples, system: System, class_name: str) -> str:
    """Returns a phrase that says how a run draws its samples: steps, sampler, guidance and spacing, in the words of
    diffusers' pipelines. It says which of these settings the pipeline `class_name` does not have.
    """
    sampler = system.choose_sampler(samples.sampler)
    words = [f"{samples.num_steps} steps of {sampler}"]
    words += [
        f"{name}={value:g}, which the pipeline does not know"
        for name in ("eta", "guidance_rescale")
        if (value := getattr(samples, name))
    ]
    if samples.guidance_scale != 1:
        words.append(f"guidance_scale={samples.guidance_scale:g}")
        if samples.guidance_interval:
            unknown = ", which DiTPipeline does not know" if class_name == "DiTPipeline" else ""
            words.append(f"guidance_interval={samples.guidance_interval}{unknown}")
    if samples.spacing:
        # DDIMScheduler's steps are of equal length, T // N, whatever its spacing; DDPMPipeline knows no DDIM.
        if (
            samples.spacing in ("leading", "trailing")
            and sampler == "ddim"
            and class_name != "DDPMPipeline"
            and system.diffusion.num_timesteps % samples.num_steps == 0
        ):
            words.append(
                "and `pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, "
                f'timestep_spacing="{samples.spacing}")`, which comes from diffusers'
            )
        else:
            words.append(f"spacing={samples.spacing}, which the pipeline does not know")
    return ", ".join(words)


def _remove_local_paths(run: Run) -> Run:
    """Returns a copy of the recipe without the paths of this machine. `folder` and `init_from` become None. Of
    data.path, data.held_out_path and each absolute path elsewhere only the last part stays.
    """
    run = _shorten_absolute_paths(run)
    places = {"path": run.data.path, "held_out_path": run.data.held_out_path}
    last = {key: place and _keep_last_path_part(place) for key, place in places.items()}
    return run.model_copy(update={"folder": None, "init_from": None, "data": run.data.model_copy(update=last)})


def _shorten_absolute_paths(value: Any) -> Any:
    """Shortens each absolute path in a value to its last part, and returns the result. Looks into sections, dicts,
    lists and tuples, and behind a prefix: "dinov2:/models/dinov2" becomes "dinov2:dinov2".
    """
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: _shorten_absolute_paths(inner) for name, inner in value})
    if isinstance(value, dict):
        return {key: _shorten_absolute_paths(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_shorten_absolute_paths(inner) for inner in value)
    if isinstance(value, (str, Path)):
        kind, path = _KIND_AND_PATH.fullmatch(str(value)).groups()
        if os.path.isabs(os.path.expanduser(path)) and not path.startswith("//"):
            return type(value)(kind + str(_keep_last_path_part(path)))
    return value


def _keep_last_path_part(path: Any) -> Any:
    """Returns the last part of a path, as str or Path like the path itself. Returns a path without parts, such as /,
    unchanged.
    """
    return type(path)(Path(path).name) if Path(path).name else path


def _describe_weights_kind(kind: str) -> str:
    """Describes a kind of weights in words: "ema.0.9999" becomes "an average of the training weights, decay 0.9999",
    and "master" becomes "the training weights".
    """
    name, _, decay = kind.partition(".")
    return f"{_KINDS[name]} {decay}".rstrip()


def _find_newest_sample_grid(samples: Path) -> Path | None:
    """Returns the newest grid of samples in `samples`, a run's folder samples/. If there is none, returns the newest
    grid of reconstructions, or None if there is none either.
    """
    for pattern in (r"step_\d+\.png", r"step_\d+_reconstruction\w*\.png"):
        grids = [path for path in samples.glob("step_*.png") if re.fullmatch(pattern, path.name)]
        if grids:
            return max(grids, key=lambda path: int(path.name.split("_")[1].removesuffix(".png")))
    return None
