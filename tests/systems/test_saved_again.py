"""Exports that diffusers has loaded and saved again, as save_pretrained and push_to_hub do."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from dstrain import systems
from dstrain.systems.dit import to_diffusers as dit
from dstrain.systems.iddpm import to_diffusers as iddpm
from dstrain.systems.prior import to_diffusers as prior
from dstrain.systems.vae import to_diffusers as vae
from tests.support import first_stage

DIT = {
    "image_size": 16,
    "patch_size": 2,
    "hidden_size": 32,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 3,
    "time_freq": "diffusers",
}
UNET = {
    "image_size": 8,
    "num_channels": 32,
    "channel_mult": [1, 2],
    "num_res_blocks": 1,
    "num_heads": 2,
    "attention_resolutions": [4],
    "diffusion_steps": 40,
}
PRIOR = {"image_embed_dim": 12, "max_text_len": 3, "depth": 1, "heads": 2, "dim_head": 8, "timesteps": 20}
EXPORTS = {
    "stock-dit": (dit, "dit", DIT | {"in_channels": 3}),
    "pixels-dit": (dit, "dit", DIT | {"in_channels": 1, "learn_sigma": False}),
    "flow-dit": (dit, "dit", DIT | {"in_channels": 1, "learn_sigma": False, "objective": "flow"}),
    "stock-iddpm": (iddpm, "iddpm", UNET | {"learn_sigma": True}),
    "labels-iddpm": (iddpm, "iddpm", UNET | {"class_cond": True, "num_classes": 3, "class_dropout_prob": 0.1}),
    "enlarging-iddpm": (iddpm, "iddpm", UNET | {"small_size": 4}),
    "prior": (prior, "prior", PRIOR),
    "text-prior": (prior, "prior", PRIOR | {"max_text_len": 0, "text_cond_drop_prob": 0.0}),
    "vae": (vae, "vae", {"image_size": 16, "kl": {"block_out_channels": [4, 8], "norm_num_groups": 2}}),
}
# Draws from FOLDER/NAME by its card's code for each NAME of each FOLDER; saves those of `first` to `again`, and pushes
# them to `pushed`.
PROGRAM = """\
import sys
sys.modules.update(dict.fromkeys(("dstrain", "deepspeed", "bitsandbytes")))
import pathlib, shutil, types
import diffusers, numpy, torch
from diffusers.utils import hub_utils

hub_utils.create_repo = lambda name, **_: types.SimpleNamespace(repo_id=name)
hub_utils.load_or_create_model_card = lambda *_, **__: None
hub_utils.populate_model_card = lambda card: types.SimpleNamespace(save=lambda path: None)
upload = lambda self, folder, repo, **_: shutil.copytree(folder, repo)
for folder in map(pathlib.Path, sys.argv[1:]):
    for code in sorted(pathlib.Path().glob("*.py")):
        name, names = code.stem, {}
        exec(compile(code.read_text().replace("OUT", str(folder / name)), name, "exec"), names)
        drawn = names["images"] if "images" in names else names["image_embeds"]
        drawn = drawn.numpy() if torch.is_tensor(drawn) else numpy.stack([numpy.asarray(image) for image in drawn])
        numpy.save(folder / f"{name}.npy", drawn)
        if folder.name == "first":
            saved = names.get("pipeline", names.get("vae"))
            saved.save_pretrained(f"again/{name}")
            type(saved)._upload_folder = upload
            saved.push_to_hub(f"pushed/{name}")
"""


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """A folder with the code of all exports' cards, and the exports in `first`."""
    root = tmp_path_factory.mktemp("exports")
    stage = {"path": str(first_stage.save(root / "stage", depth=2)), "scaling_factor": 0.5, "factor": 2}
    for number, (name, (writer, system_name, model)) in enumerate(EXPORTS.items()):
        torch.manual_seed(number)
        system = systems.build(system_name, model | ({"first_stage": stage} if name == "stock-dit" else {}))
        nets = system.networks()
        with torch.no_grad():
            for weight in next(iter(nets.values())).parameters():
                if weight.requires_grad:
                    weight.normal_(std=0.1)
        writer.save_export(
            system, nets, root / "first" / name, lambda: {"scaling_factor": 0.7}, lambda: ("a", "b", "c")
        )
        (root / f"{name}.py").write_text(writer.describe_export(system)[2])
    return root


def draw(root, *folders):
    environment = {"HF_MODULES_CACHE": str(root / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PROGRAM, *folders]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-4000:]


def test_an_export_that_is_saved_again_draws_the_same(exports):
    """Oracle: what the export itself draws, value for value: from what save_pretrained and push_to_hub write, in a new
    process without dstrain; the same files, of which that of the class is the same, so that it can be saved for ever.
    """
    draw(exports, "first")
    draw(exports, "again", "pushed")
    for name in EXPORTS:
        first = exports / "first" / name
        files = {str(path.relative_to(first)) for path in first.rglob("*") if path.is_file()}
        assert ("pipeline.py" in files) == (name != "vae" and not name.startswith("stock"))
        for folder in (exports / "again", exports / "pushed"):
            assert np.array_equal(np.load(folder / f"{name}.npy"), np.load(exports / "first" / f"{name}.npy")), name
            assert files == {
                str(path.relative_to(folder / name)) for path in (folder / name).rglob("*") if path.is_file()
            }
            if "pipeline.py" in files:
                assert (folder / name / "pipeline.py").read_text() == (first / "pipeline.py").read_text()
    assert '"b"' in (exports / "pushed" / "labels-iddpm" / "model_index.json").read_text()
