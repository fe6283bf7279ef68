"""Weights that go to DeepSpeed's universal folders, and come back by init_from."""

import pytest
import torch
import yaml

from dstrain import systems
from dstrain.commands.consolidate import Order, consolidate_weights
from dstrain.runs.weights import fit_weights, read_state
from tests.support.checkpoints import convert
from tests.support.runs import RECIPE, finish, train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("stage", [2, 3])
def test_there_and_back(tmp_path, stage):
    """Oracle: the training weights that a run has saved on two ranks, to the bit, after DeepSpeed's ds_to_universal; a
    run begins from the folder. DeepSpeed's own files that are not universal are refused with the remedy, as before.
    """
    folder, universal = tmp_path / "run", tmp_path / "universal"
    words = ["steps=4", "every.save=4", "every.sample=0"]
    finish(train(folder, stage, *words, "save.format=deepspeed"))
    (checkpoint,) = (folder / "checkpoints").glob("step_*")
    (native,) = (path for path in (checkpoint / "deepspeed").iterdir() if path.is_dir())
    convert(native, universal)
    consolidate_weights(Order(folder, tmp_path / "out", "raw", trust_pickle=True))
    expected = read_state(tmp_path / "out")
    system = systems.build("dit", yaml.safe_load(RECIPE.read_text())["model"])
    ((part, (found, notes)),) = fit_weights(universal, system).items()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert notes[0].startswith(f"{part}: {len(expected)} tensors loaded, 0 replaced, 0 left")
    assert f"{len(expected)} tensors loaded" in finish(train(tmp_path / "next", 2, *words, f"init_from={universal}"))
    with pytest.raises(ValueError, match="merge them with `dstrain consolidate"):
        fit_weights(native, system)
