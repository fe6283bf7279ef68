"""Weights that go to DeepSpeed's universal folders, to plain DeepSpeed there, and come back by init_from."""

import json
import pathlib
import shutil
import sys

import pytest
import torch
import yaml
from safetensors.torch import save_file

from dstrain import recipe, systems
from dstrain.commands.consolidate import Order, consolidate_weights
from dstrain.engine.optimizers import make_parameter_groups
from dstrain.runs.weights import read_state_dict, read_weights_adapted_to_system
from tests.launch import check_universal
from tests.support.checkpoints import convert
from tests.support.launch import ROOT, free_port, run
from tests.support.runs import RECIPE, finish, train

pytestmark = pytest.mark.slow

STEPS = 4
WORDS = (f"steps={STEPS}", f"every.save={STEPS}", "every.sample=0")
FORMAT = "save.format=deepspeed"


@pytest.fixture(scope="module")
def system():
    return systems.build("dit", yaml.safe_load(RECIPE.read_text())["model"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory, system):
    """A folder with STAGE/universal, which DeepSpeed's ds_to_universal made of a run on two ranks, and what the run has
    saved: STAGE/expected.safetensors, STAGE/groups.json. STAGE/native is DeepSpeed's own checkpoint.
    """
    folder = tmp_path_factory.mktemp("universal")
    network, choice = system.build_part_on_meta("denoiser"), recipe.load_recipe(RECIPE).optimizer
    names = {id(weight): name for name, weight in network.named_parameters()}
    groups = [
        {"names": [names[id(weight)] for weight in group["params"]], "weight_decay": group["weight_decay"]}
        for group in make_parameter_groups(network, choice, system.has_weight_decay, system.list_block_classes())
    ]
    for stage in check_universal.STAGES:
        (at := folder / str(stage)).mkdir()
        finish(train(at / "run", stage, *WORDS, FORMAT))
        native = at / "run" / "checkpoints" / f"step_{STEPS:08d}" / "deepspeed" / "denoiser"
        (at / "native").symlink_to(native)
        convert(native, at / "universal")
        consolidate_weights(Order(at / "run", at / "merged", "raw", trust_pickle=True))
        save_file(read_state_dict(at / "merged"), at / "expected.safetensors")
        (at / "groups.json").write_text(json.dumps(groups))
    return folder


def test_plain_deepspeed_reads_our_checkpoints(folders):
    """Oracle: the training weights that a run on two ranks has saved, to the bit: DeepSpeed in a process without
    dstrain finds them in the universal folder at the run's stage on 1, 2 and 3 ranks, with moments and the step.
    """
    words = [sys.executable, str(ROOT / "tests/launch/check_universal.py"), str(folders), str(free_port())]
    done = run(words, timeout=400, WANDB_MODE="disabled")  # a variable more: a fresh process, not a fork of ours
    assert done.returncode == 0, done.stdout[-6000:]
    for world in check_universal.WORLDS:
        for stage, found in json.loads((folders / f"figures-{world}.json").read_text()).items():
            assert found["differ"] == [] and found["steps"] == STEPS, (world, stage, found)
            assert found["learned"] == found["number"] > 20


@pytest.mark.parametrize("stage", check_universal.STAGES)
def test_there_and_back(folders, system, tmp_path, stage):
    """Oracle: the training weights that a run has saved on two ranks, to the bit, after DeepSpeed's ds_to_universal; a
    run begins from the folder. DeepSpeed's own files that are not universal are refused with the remedy, as before.
    """
    at = folders / str(stage)
    expected = read_state_dict(at / "expected.safetensors")
    ((part, (found, notes)),) = read_weights_adapted_to_system(at / "universal", system).items()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert notes[0].startswith(f"{part}: {len(expected)} tensors loaded, 0 replaced, 0 left")
    with pytest.raises(ValueError, match="merge them with `dstrain consolidate"):
        read_weights_adapted_to_system((at / "native").resolve(), system)
    part = shutil.copytree(at / "universal", tmp_path / "part", ignore=shutil.ignore_patterns("*_model_states.pt"))
    with pytest.raises(ValueError, match="part lacks mp_rank_00_model_states.pt .*: copy it from the folder"):
        read_weights_adapted_to_system(part, system)
    words = train(tmp_path / "next", 2, *WORDS, f"init_from={at / 'universal'}")
    assert f"{len(expected)} tensors loaded" in finish(words)


class Code:
    """An object whose pickle makes a file."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def test_code_in_a_universal_folder_is_not_run(folders, tmp_path):
    """Oracle: the file that the code would make; the command ends with 2 and names the file that holds it."""
    universal, made = folders / "3" / "universal", tmp_path / "made"
    file = sorted((universal / "zero").glob("*/fp32.pt"))[0]
    whole = file.read_bytes()
    torch.save(Code(made), file)
    try:
        said = finish(train(tmp_path / "run", 3, *WORDS, f"init_from={universal}"), code=2)
    finally:
        file.write_bytes(whole)
    assert f"{file.parent.name}/fp32.pt holds more than a tensor and plain values" in said and not made.exists()
