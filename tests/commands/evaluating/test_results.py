"""A measurement that is finished is not lost: whatever happens to the run's folder or to the disk meanwhile."""

import resource
import shutil
from pathlib import Path

import pytest

from dstrain import recipe, systems
from dstrain.commands.evaluate import evaluate_run
from dstrain.commands.evaluating import quality
from dstrain.commands.evaluating.quality import measure_quality
from dstrain.commands.options.evaluate import EvaluateOptions
from dstrain.recipe import ConfigError
from dstrain.runs import trained
from tests.support import checkpoints
from tests.support.launch import ROOT


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run of random weights on the built-in images."""
    entries = ["samples.num_steps=2", "ema.decays=[0.9]", "samples.ema=0.9"]
    run = recipe.complete_model_section(
        recipe.load_recipe(ROOT / "tests/launch/tiny.yaml", entries), systems.find_config_class("dit")
    )
    return checkpoints.write(tmp_path / "run", run, systems.build("dit", run.model).networks())


MEASURES = {
    "bits": lambda run, out: evaluate_run(EvaluateOptions(run, num=2, num_steps=2, out=out)),
    "pictures": lambda run, out: measure_quality(EvaluateOptions(run, metrics=("accuracy",), num=2, batch=2, out=out)),
    "guided": lambda run, out: measure_quality(
        EvaluateOptions(
            run, metrics=("accuracy",), num=2, batch=2, out=out, guide=(run, "raw", None), guidance_scale=2.0
        )
    ),
}


@pytest.mark.parametrize("kind", MEASURES)
def test_a_folder_that_goes_meanwhile(run, kind, tmp_path, monkeypatch):
    """Oracle: the figures while the folder stays; here it is removed as soon as the last weights are loaded."""
    _, wanted = MEASURES[kind](run, tmp_path / "wanted")
    last = (quality, "load_guiding_network") if kind == "guided" else (trained, "load_networks")

    def goes(load):
        def loaded(*arguments, **named):
            networks = load(*arguments, **named)
            shutil.rmtree(run)
            return networks

        return loaded

    monkeypatch.setattr(*last, goes(getattr(*last)))
    path, found = MEASURES[kind](run, tmp_path / "out")
    assert found["figures"] == wanted["figures"] and found["step"] == 7 and path.is_file()


@pytest.mark.parametrize("kind", ["bits", "pictures"])
def test_a_disk_that_is_full_at_the_end(run, kind, tmp_path, monkeypatch, capsys):
    """Oracle: the lines that are printed with room; the limit of the system on files, as a full disk has it."""
    MEASURES[kind](run, tmp_path / "out")
    wanted = capsys.readouterr().out.splitlines()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"--out .*out cannot be written \(File too large\): make room"):
            MEASURES[kind](run, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    found = capsys.readouterr().out.splitlines()
    assert found == wanted[:-1] and len(found) > 1
