"""From an official file to what its original gives, by the commands that a user types, and what is refused."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from diffusers import AutoencoderKL
from safetensors.torch import load_file

from dstrain import recipe, systems
from dstrain.checkpoint.store import read_manifest
from dstrain.engine.checkpoint import read_weights
from dstrain.recipe import ConfigError
from dstrain.runs import trained
from dstrain.runs.folders import Resume, require_start_allowed_in_folder
from dstrain.systems.dit.network import DiT
from tests.support import golden
from tests.support.launch import here

NOWHERE = {"path": "/data/nowhere"}  # an import needs no data
DIT = {
    "name": "published",
    "system": "dit",
    "data": NOWHERE | {"image_size": 8, "channels": 4},
    "model": {
        "patch_size": 2,
        "hidden_size": 64,
        "depth": 2,
        "num_heads": 4,
        "in_channels": 4,
        "num_classes": 10,
        "guidance_channels": 3,
    },
}
CLASSES = "y_embedder.embedding_table.weight"


def saved(folder: Path, said: dict, weights: object) -> list[object]:
    """Words for launch/import.py: a file of weights and a recipe."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump(said), encoding="utf-8")
    torch.save(weights, folder / "official.pt")
    return [folder / "official.pt", "--recipe", folder / "recipe.yaml", "--out", folder / "run"]


def dit() -> dict[str, torch.Tensor]:
    """The state dict of the original's tiny DiT, in float32 as published ones are."""
    _, meta = golden.load("dit_tiny")
    network = golden.fill(DiT(**meta["config"]).double(), keep=("pos_embed",))
    return {name: value.float() for name, value in network.state_dict().items()}


def network(folder: Path) -> torch.nn.Module:
    """The first part of an imported run, as every verb builds it."""
    run = trained.read_recipe(folder)
    system = systems.build(run.system, run.model)
    at = trained.find_checkpoint(folder)
    found = trained.load_networks(
        system, at, trained.choose_raw_or_ema_by_part(system, at, run.samples.ema), torch.float32
    )
    return next(iter(found.values())).requires_grad_(False)


def levels(x: torch.Tensor) -> np.ndarray:
    """(N, C, H, W) in [-1, 1] as pictures (N, H, W, C)."""
    return ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def drawn(monkeypatch, capsys, x: torch.Tensor, folder: Path, num: int, *words: object) -> np.ndarray:
    """What launch/generate.py draws where its noise is that of the original, of whose samples (N, ...) the first."""

    def noise(key, name, shape):
        assert len(key) == num and shape == x.shape[1:]
        return (x if name == "start" else golden.stream(name, x.shape))[:num].float()

    with monkeypatch.context() as patched:
        patched.setattr("dstrain.rng.normal", noise)
        said = [folder, "--num", num, "--steps", 10, "--no-pngs", *words]
        code, out, err = here("generate.py", said, patched, capsys)
    assert code == 0, err
    (written,) = Path(out.split(" in ")[1].strip()).glob("*.npz")
    return np.load(written)["arr_0"]


def near(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """The same pictures but for values that lie on the edge of two levels: a chain agrees to 1e-4, a level is 8e-3."""
    apart = np.abs(ours.astype(int) - theirs.astype(int))
    return ours.shape == theirs.shape and apart.max() <= 1 and (apart > 0).mean() < 0.02


def first_stage(folder: Path) -> AutoencoderKL:
    """A decoder of 4 channels to colours, without change of size, whose pictures fill the levels."""
    torch.manual_seed(0)
    vae = AutoencoderKL(block_out_channels=(8,), latent_channels=4, norm_num_groups=4).requires_grad_(False)
    vae.decoder.conv_out.weight.mul_(3)
    vae.save_pretrained(folder)
    return vae


@pytest.mark.parametrize("layout", ["bare", "train.py"])
def test_an_official_dit(tmp_path, monkeypatch, capsys, layout):
    """Oracle: golden/dit_tiny: the original's network output, and its three sampled chains, decoded by diffusers' own
    class, against the pictures that the command line gives.
    """
    tensors, _ = golden.load("dit_tiny")
    vae, state = first_stage(tmp_path / "vae"), dit()
    other = {name: torch.zeros_like(value) for name, value in state.items()}
    words = saved(tmp_path, DIT, state if layout == "bare" else {"model": other, "ema": state, "opt": {}})
    changed = ["data.channels=3", f"model.first_stage={{path: '{tmp_path / 'vae'}', scaling_factor: 1, factor: 1}}"]
    code, out, err = here("import.py", [*words, *changed], monkeypatch, capsys)
    assert code == 0 and out == (
        f"denoiser: {len(state)} tensors loaded, 0 replaced, 0 left, from {words[0]}\n"
        f"published of these weights in {words[-1]}\n"
    ), err
    assert all(torch.equal(value, state[name]) for name, value in network(words[-1]).state_dict().items())
    predicted = network(words[-1])(tensors["x"].float(), tensors["t"], tensors["y"])
    torch.testing.assert_close(predicted.double(), tensors["out"], rtol=1e-4, atol=1e-5)
    assert tensors["y"].tolist() == [0, 9, 10]  # the third has no label, for which no command asks
    chains = {"ddpm10": ["ddpm"], "ddim10": ["ddim"], "ddpm10_cfg4_ch3": ["ddpm", "--guidance-scale", 4]}
    expected = {chain: levels(vae.decode(tensors[f"sample.{chain}"][:2].float()).sample) for chain in chains}
    for chain, said in chains.items():
        found = drawn(monkeypatch, capsys, tensors["x"], words[-1], 2, "--labels", "0,9", "--sampler", *said)
        assert near(found, expected[chain]), chain
        assert all(not near(found, others) for name, others in expected.items() if name != chain)


def test_an_official_iddpm(tmp_path, monkeypatch, capsys):
    """Oracle: golden/iddpm_hybrid_cosine: the original's network output and both chains, from the command line."""
    tensors, meta = golden.load("iddpm_hybrid_cosine")
    flags = {"recompute" if flag == "use_checkpoint" else flag: value for flag, value in meta["flags"].items()}
    said = {
        "name": "published",
        "system": "iddpm",
        "data": NOWHERE | {"image_size": 32},
        "samples": {"num_steps": 10},
        "model": flags | {"channel_mult": [1, 2, 2, 2], "timestep_respacing": "10"},
    }
    official = golden.fill(systems.build("iddpm", said["model"]).networks()["denoiser"])
    words = saved(tmp_path, said, official.state_dict())
    code, _, err = here("import.py", words, monkeypatch, capsys)
    assert code == 0, err
    out = network(words[-1])(tensors["x"], tensors["t"] * 10.0)
    torch.testing.assert_close(out, tensors["out"], rtol=1e-5, atol=5e-6)
    for sampler in ("ddpm", "ddim"):
        found = drawn(monkeypatch, capsys, tensors["x"], words[-1], 2, "--sampler", sampler)
        assert near(found, levels(tensors[f"sample.{sampler}10"])), sampler


def test_an_official_dvae(tmp_path, monkeypatch, capsys):
    """Oracle: golden/dvae_tiny: tokens, logits, relaxed and hard reconstruction of the original."""
    tensors, meta = golden.load("dvae_tiny")
    chosen = {
        name: meta["config"][name]
        for name in ("num_tokens", "codebook_dim", "num_layers", "num_resnet_blocks", "hidden_dim")
    }
    said = {"name": "published", "system": "vae", "data": NOWHERE | {"image_size": 32}, "model": {"discrete": chosen}}
    official = golden.fill(systems.build("vae", {"image_size": 32, "discrete": chosen}).networks()["autoencoder"])
    words = saved(tmp_path, said, {"hparams": meta["config"], "weights": official.state_dict()})
    code, out, err = here("import.py", words, monkeypatch, capsys)
    assert code == 0 and out.startswith(f"autoencoder: {len(official.state_dict())} tensors loaded, 0 replaced"), err
    found, x = network(words[-1]), tensors["x"].float()
    assert torch.equal(found.encode(x).flatten(1), tensors["ids"])
    passed = found(x, tensors["gumbel"].float(), torch.full((2,), 0.7))
    for ours, theirs in (
        (passed.logits, tensors["logits"]),
        (passed.out, tensors["recons"]),
        (found.decode(tensors["ids"].view(2, 4, 4)), (tensors["decoded"] / 2 + 0.5).clamp(0, 1)),
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_what_others_make_of_it(tmp_path, monkeypatch, capsys):
    """Oracle: the file: what export and consolidate write of the imported run, and what init_from reads; the words
    of the file in the card; and no training in the folder.
    """
    state = dit()
    words = saved(tmp_path, DIT, state)
    run = words[-1]
    assert here("import.py", [*words, "model.time_freq=diffusers"], monkeypatch, capsys)[0] == 0
    for script, out, more in (
        ("export.py", "diffusers", ()),
        ("export.py", "parts", ("--format", "safetensors")),
        ("consolidate.py", "whole", ()),
    ):
        code, _, err = here(script, [run, "--out", tmp_path / out, *more], monkeypatch, capsys)
        assert code == 0, err
    card = (tmp_path / "diffusers" / "README.md").read_text()
    assert "| Step | 0, imported from official.pt |" in card and "| Data | unknown |" in card
    assert str(tmp_path) not in card and "nowhere" not in card.partition("## Recipe")[0]
    inside = "diffusers/transformer/diffusion_pytorch_model.safetensors"
    for number, name in enumerate(("diffusers", "diffusers/transformer", inside, "parts", "whole", "run")):
        again = [tmp_path / name, "--recipe", run / "run.yaml", "--out", tmp_path / f"again{number}"]
        code, _, err = here("import.py", again, monkeypatch, capsys)
        assert code == 0, err
        back = read_weights(trained.find_checkpoint(again[-1]), "denoiser")
        assert back.keys() == state.keys() and all(torch.equal(back[key], state[key]) for key in state), name
    with pytest.raises(ConfigError, match="holds imported weights.*init_from="):
        require_start_allowed_in_folder(recipe.load_recipe(run / "run.yaml"), "data", Resume(allow_change=True))


def test_a_part_that_the_file_has_not(tmp_path, monkeypatch, capsys):
    """Oracle: the autoencoder's bits; of the adversary what training would begin with, the same each time."""
    model = {
        "kl": {
            "block_out_channels": [8, 16],
            "layers_per_block": 1,
            "latent_channels": 3,
            "norm_num_groups": 4,
            "discriminator": {"start": 0},
        }
    }
    said = {"name": "published", "system": "vae", "data": NOWHERE | {"image_size": 32}, "model": model}
    words = saved(tmp_path, said, None)
    official = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        block_out_channels=(8, 16),
        latent_channels=3,
        norm_num_groups=4,
    )
    official.save_pretrained(tmp_path / "official")
    found = []
    for number in range(2):
        words = [tmp_path / "official", "--recipe", words[2], "--out", tmp_path / f"run{number}"]
        code, out, err = here("import.py", words, monkeypatch, capsys)
        assert code == 0 and f"discriminator is not in {words[0]} and begins anew" in out, err
        at = trained.find_checkpoint(words[-1])
        found.append({part: read_weights(at, part) for part in ("autoencoder", "discriminator")})
    state = official.state_dict()
    assert all(torch.equal(found[0]["autoencoder"][name], value) for name, value in state.items())
    again = found[1]["discriminator"]
    assert all(torch.equal(value, again[name]) for name, value in found[0]["discriminator"].items())
    assert any(value.std() > 0 for value in again.values())


def test_help(monkeypatch, capsys):
    """Oracle: the help fits one screen and names every option."""
    code, out, _ = here("import.py", ["--help"], monkeypatch, capsys)
    lines = out.splitlines()
    assert code == 0 and len(lines) <= 40 and max(map(len, lines)) <= 120
    assert all(word in out for word in ("WEIGHTS", "--recipe", "--out", "key=value"))


REFUSED = {
    "nothing": ([], "name the file or folder of weights"),
    "no recipe": (["{file}"], "name the recipe: --recipe RECIPE"),
    "no folder": (["{file}", "--recipe", "{recipe}"], "name the folder to write: --out RUN"),
    "no file": (["{file}x", "--recipe", "{recipe}", "--out", "{out}"], "official.ptx does not exist"),
    "no such recipe": (["{file}", "--recipe", "{recipe}x", "--out", "{out}"], "there is no such file"),
    "another depth": (
        ["{file}", "--recipe", "{recipe}", "--out", "{out}", "model.depth=3"],
        "blocks.2.adaLN_modulation.1.bias is absent in the file",
    ),
    "another system": (
        ["{file}", "--recipe", "tests/launch/tiny-vae.yaml", "--out", "{out}"],
        "no weight of this network",
    ),
    "sizes that differ": (
        ["{file}", "--recipe", "{recipe}", "--out", "{out}", "model.image_size=16"],
        "data.image_size=8 and model.image_size=16 differ",
    ),
    "no number": (
        ["{nan}", "--recipe", "{recipe}", "--out", "{out}"],
        f"{CLASSES} of the denoiser holds values that are not finite: fetch the file again",
    ),
    "a folder with things in it": (["{file}", "--recipe", "{recipe}", "--out", "{full}"], "is there already"),
    "below a file": (["{file}", "--recipe", "{recipe}", "--out", "{file}/run"], "name a folder that can be written"),
    "two processes": (["{file}", "--recipe", "{recipe}", "--out", "{out}"], "an import takes one process"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(tmp_path, monkeypatch, capsys, case):
    """Oracle: the fault put in: exit code 2, one message that names it, no traceback, and nothing written."""
    file, _, path, _, out = saved(tmp_path, DIT, dit())
    torch.save(dit() | {CLASSES: torch.full((11, 64), torch.nan)}, tmp_path / "nan.pt")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    before = sorted(tmp_path.rglob("*"))
    words, expected = REFUSED[case]
    names = {"file": file, "recipe": path, "out": out, "nan": tmp_path / "nan.pt", "full": tmp_path / "full"}
    two = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} if case == "two processes" else {}
    code, said, err = here("import.py", [word.format(**names) for word in words], monkeypatch, capsys, **two)
    assert code == 2 and not said and "Traceback" not in err and expected in err, err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk(tmp_path, monkeypatch, capsys):
    """Oracle: a disk that has no room: a message with the figures, and nothing left."""
    words = saved(tmp_path, DIT, dit())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000))
    before = sorted(tmp_path.rglob("*"))
    code, _, err = here("import.py", words, monkeypatch, capsys)
    assert code == 2 and "MB free" in err and "are needed" in err, err
    assert sorted(tmp_path.rglob("*")) == before


def test_control_c(tmp_path, monkeypatch, capsys):
    """Oracle: Ctrl-C while it writes: one line, exit code 130, nothing left."""
    words = saved(tmp_path, DIT, dit())
    before = sorted(tmp_path.rglob("*"))

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("dstrain.commands.import_weights.save_file", interrupted)
    assert here("import.py", words, monkeypatch, capsys) == (130, "", "import.py: interrupted\n")
    assert sorted(tmp_path.rglob("*")) == before


def test_what_an_import_is(tmp_path, monkeypatch, capsys):
    """Oracle: the recipe that was given, without averages; the manifest; float32 whatever the file held."""
    words = saved(
        tmp_path,
        DIT | {"ema": {"decays": [0.9]}, "samples": {"ema": 0.9}},
        {name: value.bfloat16() for name, value in dit().items()},
    )
    assert here("import.py", words, monkeypatch, capsys)[0] == 0
    run = trained.read_recipe(words[-1])
    assert (run.init_from, run.folder, run.ema.decays, run.samples.ema) == (words[0], words[-1], (), None)
    body = read_manifest(trained.find_checkpoint(words[-1]))
    assert body["step"] == 0 and body["extra"] == {"imported": "official.pt"}
    assert sorted(os.listdir(words[-1])) == ["checkpoints", "run.yaml"]
    (part,) = (words[-1] / "checkpoints/step_00000000").glob("denoiser-*.safetensors")
    assert {value.dtype for value in load_file(part).values()} == {torch.float32}
