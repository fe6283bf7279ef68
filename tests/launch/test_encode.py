"""Encoding by the real launcher, and the whole pipeline: autoencoder, export, latents, a DiT, its decoded pictures."""

import json
import os
import re
import signal

import numpy as np
import pytest
import torch
from PIL import Image

from dstrain import systems
from dstrain.commands.encode import EncodeOptions, encode_data
from dstrain.commands.export import ExportOptions as Export
from dstrain.commands.export import export_run
from dstrain.data.cached.latents import Latents
from dstrain.data.cached.shards import read_index
from dstrain.data.sources.images import open_images
from dstrain.engine.checkpoint import read_weights
from dstrain.recipe import ConfigError, load_recipe
from dstrain.runs import trained
from dstrain.runs.weights import read_weights_adapted_to_system
from dstrain.sampling.draw import draw_all_samples
from dstrain.systems.base import Request
from tests.support import clips, first_stage, tokenizer, towers
from tests.support.launch import ROOT, command
from tests.support.pictures import break_file, folder
from tests.support.runs import begin, ds_config, finish, metrics, wait_for, wait_for_end

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A first stage, 240 pictures of which 3 cannot be read, and their codes, made by one process."""
    root = tmp_path_factory.mktemp("made")
    first_stage.save(root / "vae", channels=3, block_out_channels=(16, 16, 16), norm_num_groups=4)
    folder(root / "data", 4, 60)
    for name in ("c0/003.png", "c2/010.png", "c3/059.png"):
        break_file(root / "data" / name, "truncated")
    output = finish(encoding(root, root / "one", num=1))
    assert "240 samples" in output and "3 unreadable files replaced" in output
    return root


def encoding(root, out, *words, num, launcher=False):
    return command(
        "launch/encode.py",
        "--first-stage",
        root / "vae",
        "--data",
        root / "data",
        "--image-size",
        "64",
        "--out",
        out,
        "--batch",
        "8",
        "--shard-size",
        "20",
        "--max-bad-fraction",
        "0.05",
        *words,
        num=num,
        launcher=launcher,
    )


def content(path):
    return {entry.name: entry.read_bytes() for entry in sorted(path.iterdir()) if entry.name[0] != "."}


def test_the_same_bytes_on_two_ranks(made, tmp_path):
    """Oracle: the bytes that one process wrote."""
    finish(encoding(made, tmp_path / "two", num=2))
    assert len(content(made / "one")) == 14 and content(tmp_path / "two") == content(made / "one")


@pytest.mark.parametrize("num, then", [(1, 2), pytest.param(2, 1, marks=pytest.mark.faults)])  # CI: test_videos
def test_killed_in_the_middle(made, tmp_path, num, then):
    """Oracle: the bytes of an undisturbed command. After kill -9 other ranks write the missing shards."""
    out = tmp_path / "out"
    process = begin(encoding(made, out, num=num, launcher=num > 1), tmp_path / "log")
    wait_for(out / "shard_00003.safetensors", process, tmp_path / "log")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_for_end(process.pid)
    modified = {path: path.stat().st_mtime_ns for path in out.glob("shard_*.safetensors")}
    assert 1 <= len(modified) < 12 and not (out / "index.json").exists(), "killed too late to show anything"
    (out / "shard_00009.safetensors.tmp").write_bytes(b"half a shard")
    finish(encoding(made, out, num=then))
    assert content(out) == content(made / "one")
    assert {path: path.stat().st_mtime_ns for path in modified} == modified, "whole shards are made once"


def test_a_part_is_killed(made, tmp_path):
    """Oracle: the bytes of one process, from three parts at the same time, of which one is killed and begun anew."""
    out = tmp_path / "out"
    parts = [begin(encoding(made, out, "--part", f"{k}/3", num=1), tmp_path / f"log{k}") for k in (1, 2, 3)]
    wait_for(out / "shard_00005.safetensors", parts[1], tmp_path / "log2")
    os.killpg(parts[1].pid, signal.SIGKILL)
    for process in parts:
        process.wait()
    assert [process.returncode for process in (parts[0], parts[2])] == [0, 0]
    assert not (out / "index.json").exists(), "killed too late to show anything"
    assert any("these are not: 2/3" in (tmp_path / f"log{k}").read_text() for k in (1, 3))
    assert "240 samples" in finish(encoding(made, out, "--part", "2/3", num=1))
    assert content(out) == content(made / "one")


def test_wrong_words(made, tmp_path):
    """Oracle: exit code 2 and the remedy, from every rank's command alike."""
    for words, message in (
        (["--dtype", "float32"], "dtype float16 there, float32 here"),
        (["--shard-size", "0"], "not a whole number above 0"),
        (["--ema", "0.9"], "choose among a run"),
        (["--clips", "2"], "--clips is for videos"),
        (["--flip"], "--flip: there is no such option (did you mean --no-flip?)"),
    ):
        assert message in finish([*encoding(made, made / "one", num=1), *words], code=2)
    output = finish(command("launch/encode.py", "--out", tmp_path / "x", num=2), code=2)
    assert "name one first stage" in output
    assert "--help shows how" in finish(command("launch/export.py", num=1), code=2)


def same_parts(run, out, kind):
    """Asserts that a safetensors export holds the run's weights and recipe."""
    recipe = trained.read_recipe(run)
    system = systems.build(recipe.system, recipe.model)
    assert {entry.name for entry in out.iterdir()} == {"recipe.yaml", *(f"{part}.safetensors" for part in system.parts)}
    assert load_recipe(out / "recipe.yaml") == recipe
    first = next(iter(system.parts))
    expected = read_weights(trained.find_checkpoint(run), first, kind)
    weights, remarks = read_weights_adapted_to_system(out / f"{first}.safetensors", system)[first]
    assert remarks == [f"{first}: {len(expected)} tensors loaded, 0 replaced, 0 left, from {out / first}.safetensors"]
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_token_ids_of_a_run(tmp_path):
    """Oracle: the most likely tokens by the trained network, read from the checkpoint, of images, mirrored or not."""
    run, out = tmp_path / "dvae", tmp_path / "tokens"
    model = "model={discrete: {num_tokens: 16, codebook_dim: 8, num_layers: 2, hidden_dim: 8}}"
    words = [f"folder={run}", "steps=6", model]
    finish(
        command(
            "launch/train.py",
            "--recipe",
            ROOT / "tests/launch/tiny-vae.yaml",
            "--ds_config",
            ds_config(tmp_path, 1),
            *words,
            num=1,
        )
    )
    refused = finish(command("launch/export.py", run, "--out", tmp_path / "x", num=1), code=2)
    assert "not for a discrete VAE" in refused and "--format safetensors" in refused
    assert not list(tmp_path.glob("x*"))
    words = ["--out", tmp_path / "x", "--format", "safetensors", "--raw"]
    output = finish(command("launch/export.py", run, *words, num=1))
    assert f"safetensors in {tmp_path / 'x'};" in output and "autoencoder 0.0e+00" in output
    same_parts(run, tmp_path / "x", "master")
    words = ["--split", "held_out", "--raw", "--batch", "20"]
    output = finish(command("launch/encode.py", run, "--out", out, *words, num=2))
    assert "500 samples" in output and "tokens int32 [4, 4] x 2" in output
    recipe = trained.read_recipe(run)
    system = systems.build(recipe.system, recipe.model)
    nets = trained.load_networks(system, trained.find_checkpoint(run), {"autoencoder": "master"}, torch.float32)
    images = open_images("builtin:fashion", 16, channels=1, split="held_out")
    pixels = torch.stack([images[i]["image"] for i in range(20)])
    cache = Latents(out)
    assert cache.index["statistics"]["largest"] < 16 and len(cache) == 500
    for side, x in enumerate((pixels, pixels.flip(-1))):
        expected = system.compute_codes(nets, system.encode({"image": x}))["tokens"]
        assert torch.equal(cache.read_codes(torch.arange(20), torch.full((20,), bool(side)))["tokens"], expected)
    index = encode_data(EncodeOptions(tmp_path / "again", run=tmp_path / "x", split="held_out", batch=20))
    assert index["encoding"]["codebook_size"] == 16
    for name, data in content(out).items():  # a run and its export are one first stage
        assert name == "encoding.json" or data == content(tmp_path / "again")[name], name


def test_videos(tmp_path):
    """Oracle: the bytes that one undisturbed process wrote, of two ranks and of one that goes on
    after kill -9 of two.
    """
    (tmp_path / "clips").mkdir()
    for i in range(40):
        clips.write_pictures(tmp_path / "clips" / f"{i:03}.apng", clips.moving(3 + i % 9, 24, 16, seed=i))
        (tmp_path / "clips" / f"{i:03}.txt").write_text(f"the {towers.WORDS[1 + i % 3]} {towers.WORDS[4 + i % 3]}")
    break_file(tmp_path / "clips" / "017.apng", "truncated")
    tokenizer.save(tmp_path / "stage")
    towers.sentences(tmp_path / "text")

    def encoding(out, num):
        return command(
            "launch/encode.py",
            tmp_path / "stage",
            "--data",
            tmp_path / "clips",
            "--out",
            tmp_path / out,
            "--text-encoder",
            tmp_path / "text",
            "--clips",
            "5",
            "--batch",
            "8",
            "--shard-size",
            "8",
            "--max-bad-fraction",
            "0.05",
            num=num,
        )

    output = finish(encoding("one", 1))
    assert "200 samples" in output and "1 unreadable files replaced" in output
    assert "tokens int32 [3, 2, 3] x 1 of 16 ids, with captions and text_encodings [10, 12]" in output
    finish(encoding("two", 2))
    assert content(tmp_path / "two") == content(tmp_path / "one") and len(content(tmp_path / "one")) == 27
    process = begin(encoding("killed", 2), tmp_path / "log")
    wait_for(tmp_path / "killed" / "shard_00002.safetensors", process, tmp_path / "log")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_for_end(process.pid)
    assert not (tmp_path / "killed" / "index.json").exists(), "killed too late to show anything"
    finish(encoding("killed", 1))
    assert content(tmp_path / "killed") == content(tmp_path / "one")


def test_the_whole_way(tmp_path):
    """Oracle: each step's own product: a first stage that diffusers loads, codes that carry its fingerprint, a DiT that
    learns in them (the loss falls below that of predicting nothing), the pictures that the library draws and decodes.
    """
    run, stage, codes, dit = (tmp_path / name for name in ("vae", "first_stage", "latents", "dit"))
    overrides = [f"folder={run}", "model.kl.discriminator=null"]
    assert "complete: 40 steps" in finish(
        command(
            "launch/train.py",
            "--recipe",
            ROOT / "tests/launch/tiny-vae.yaml",
            "--ds_config",
            ds_config(tmp_path, 2),
            *overrides,
            num=2,
        )
    )
    output = finish(command("launch/export.py", run, "--out", stage, num=1))
    scale = float(re.search(r"scaling_factor ([\d.]+)", output)[1])
    assert json.loads((stage / "config.json").read_text())["scaling_factor"] == pytest.approx(scale, abs=1e-5)
    with pytest.raises(ConfigError, match="is there already"):
        export_run(Export(run, stage))

    finish(command("launch/encode.py", run, "--out", codes, "--shard-size", "500", "--no-flip", num=2))
    encode_data(
        EncodeOptions(
            tmp_path / "again",
            first_stage=str(stage),
            data="builtin:fashion",
            image_size=16,
            shard_size=500,
            flip=False,
        )
    )
    assert content(codes).keys() == content(tmp_path / "again").keys()
    for name, data in content(codes).items():  # a run and its export are one first stage
        assert name == "encoding.json" or data == content(tmp_path / "again")[name], name
    index = Latents(codes).index
    assert index["statistics"]["scaling_factor"] == pytest.approx(scale, rel=0.02)
    assert len(read_index(codes)["shards"]) == 4
    measured = tmp_path / "measured"
    assert export_run(Export(run, measured, statistics=codes / "index.json")).statistics == index["statistics"]

    words = [
        "--recipe",
        ROOT / "tests/launch/tiny.yaml",
        "--ds_config",
        ds_config(tmp_path, 2),
        f"folder={dit}",
        f"data.path={codes}",
        "data.image_size=16",
        "data.flip=false",
        "data.held_out=0.1",
        "every.evaluate=60",
        "model.image_size=16",
        "model.in_channels=3",
        "model.patch_size=2",
        f"model.first_stage.path={measured}",
        "model.time_freq=diffusers",
    ]
    assert "complete: 60 steps" in finish(command("launch/train.py", *words, num=2))
    losses = [line["loss"] for line in metrics(dit) if "loss" in line]
    assert losses[0] > 0.8 and losses[-1] < 0.7 and metrics(dit)[-1]["held_out/loss"] < 0.7
    assert Image.open(dit / "samples" / "step_00000060.png").size[0] >= 16
    finish(command("launch/generate.py", dit, "--num-samples", "4", "--out", tmp_path / "pictures", num=2))
    pictures = np.load(tmp_path / "pictures" / "samples_4x16x16x3.npz")["arr_0"].astype(int)
    recipe, system = trained.read_recipe(dit), systems.build("dit", trained.read_recipe(dit).model)
    at = trained.find_checkpoint(dit)
    nets = trained.load_networks(
        system, at, trained.choose_raw_or_ema_by_part(system, at, recipe.samples.ema), torch.float32
    )

    def drawn(system, seeds, labels, guidance_scale=recipe.samples.guidance_scale):
        request = Request(
            torch.tensor(seeds),
            {"label": torch.tensor(labels)},
            recipe.samples.num_steps,
            recipe.samples.sampler,
            guidance_scale,
        )
        return draw_all_samples(system, nets, request, 4).permute(0, 2, 3, 1).numpy().astype(int)

    four = [0, 1, 2, 3]
    assert np.abs(drawn(system, four, four) - pictures).max() <= 1 and drawn(system, four, four).shape[1:3] == (16, 16)
    # Pictures depend on class and on seed. Sixty steps teach little about classes, so strong guidance amplifies it.
    for pictures_of in (drawn(system, [7] * 4, four, 100.0), drawn(system, four, [7] * 4)):
        assert all(np.abs(pictures_of[i] - pictures_of[j]).max() > 1 for i in four for j in four[:i])
    own = recipe.model["first_stage"]
    assert own["scaling_factor"] == pytest.approx(index["statistics"]["scaling_factor"]) and own["shift"] == 0
    other = systems.build("dit", recipe.model | {"first_stage": own | {"scaling_factor": 0.1}})
    assert np.abs(drawn(other, four, four) - pictures).max() > 5, "the scale shows in the pictures"

    done = export_run(Export(dit, tmp_path / "pipeline"))
    assert done.name == "DiTPipeline" and done.errors["code"] <= 1.01 / 255
    ((values, notes),) = read_weights_adapted_to_system(tmp_path / "pipeline", system).values()
    expected = read_weights(at, "denoiser", f"ema.{recipe.samples.ema or recipe.ema.decays[0]!r}")
    assert len(notes) == 1 and values.keys() == expected.keys()
    assert all(torch.equal(values[name], expected[name]) for name in expected)
    card = (tmp_path / "pipeline" / "README.md").read_text()
    assert (dit / "data.txt").read_text().strip() in card and "| Step | 60 of 60 |" in card
    assert (tmp_path / "pipeline" / "samples.png").read_bytes() == (dit / "samples/step_00000060.png").read_bytes()
    assert read_weights_adapted_to_system(tmp_path / "pipeline", systems.build("vae", trained.read_recipe(run).model))[
        "autoencoder"
    ][1][0].endswith(f"0 replaced, 0 left, from {tmp_path / 'pipeline' / 'vae'} (AutoencoderKL)")
    assert export_run(Export(dit, tmp_path / "x", "safetensors", ema=0.99)).errors == {"denoiser": 0.0}
    same_parts(dit, tmp_path / "x", "ema.0.99")
    export_run(Export(run, tmp_path / "y", "safetensors", raw=True))
    same_parts(run, tmp_path / "y", "master")
