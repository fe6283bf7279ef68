"""A wheel without a clone: the command, its recipes and its DeepSpeed JSONs."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import numpy as np
import pytest

from tests.support.launch import ROOT, environment, free_port

SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "dstrain", "launch", "ds_configs")


def outside(**more: str) -> dict[str, str]:
    """The environment of a process that does not see this clone."""
    return {name: value for name, value in environment(**more).items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The bin folder of a fresh environment with dstrain's wheel; other packages are those of this environment."""
    place = tmp_path_factory.mktemp("wheel")
    (place / "source").mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, place / "source" / name)
    build = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    subprocess.run([*build, "-w", place / "out"], cwd=place / "source", env=outside(), check=True, timeout=300)
    venv.create(place / "venv", with_pip=False)
    python = place / "venv" / "bin" / "python"
    install = ["--python", python, "install", "--no-deps", "--no-index", "-q", *(place / "out").glob("*.whl")]
    subprocess.run([sys.executable, "-m", "pip", *install], env=outside(), check=True, timeout=300)
    packages = next((place / "venv" / "lib").glob("python*")) / "site-packages"
    # A folder of a .pth stands behind the environment's own packages; .pth files in it, of an editable dstrain, are
    # not obeyed.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def run(words: list[object], folder: Path, **more: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        list(map(str, words)), cwd=folder, env=outside(**more), text=True, capture_output=True, timeout=300
    )


@pytest.mark.slow
def test_a_wheel_is_whole(installed, tmp_path):
    """Oracle: an empty folder and an environment without the clone: the help fits 24 lines of 80 columns, a run trains
    with a recipe and a JSON that are shipped, another verb finds the run, and data are
    converted.
    """
    shown = run([installed / "dstrain", "--help"], tmp_path)
    lines = shown.stdout.splitlines()
    assert shown.returncode == 0 and len(lines) <= 24 and max(map(len, lines)) <= 80
    found = run([installed / "python", "-c", "import dstrain; print(dstrain.__file__)"], tmp_path).stdout
    assert found.startswith(str(installed.parent))
    tiny = ["steps=4", "batch.global=8", "samples.num=4", "samples.num_steps=2", "samples.metrics_samples=8"]
    done = run([installed / "dstrain", "train", "--ds_config", "zero2.json", *tiny], tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    states = json.loads(run([installed / "dstrain", "watch", "--json"], tmp_path).stdout)
    assert [(state["run"], state["step"]) for state in states] == [("dit-small", 4)]
    plain = run([installed / "dstrain", "train", "--recipe", "launch/recipes/vae-small.yaml", "--dry-run"], tmp_path)
    assert plain.returncode == 0 and plain.stdout.startswith("vae-small: "), plain.stderr
    np.savez(tmp_path / "a.npz", np.zeros((3, 8, 8, 3), np.uint8))
    converted = run([installed / "dstrain", "convert", "npz", "a.npz", "--out", "shards"], tmp_path)
    assert converted.stdout.startswith("3 images in shards"), converted.stderr


@pytest.mark.slow
def test_a_wheel_under_the_launcher(installed, tmp_path):
    """Oracle: the deepspeed launcher starts two ranks of the module, without a file of a clone."""
    launcher = shutil.which("deepspeed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    words = [installed / "python", launcher, "--hostfile", "none", "--num_gpus", 2, "--master_port", free_port()]
    words += ["--module", "dstrain", "train", "steps=3", "batch.global=8", "every.sample=0", "every.metrics=0"]
    done = run(words, tmp_path)
    assert done.returncode == 0 and "rank 0 of 2" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert (tmp_path / "runs" / "dit-small" / "saved").read_text().strip() == "3"
