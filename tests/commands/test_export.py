"""Exports to diffusers without a run: what is written, read back, measured and refused. Whole runs: tests/launch."""

import importlib
import json
import resource
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file, save_file

from dstrain import recipe, systems
from dstrain.checkpoint.fragments import Fragment, write_shard
from dstrain.checkpoint.manifest import NAME, hash_files, read_manifest
from dstrain.checkpoint.safetensors_io import read_safetensors_header
from dstrain.commands.consolidate import Order as Consolidation
from dstrain.commands.consolidate import consolidate_weights
from dstrain.commands.encode import EncodeOptions, encode_data
from dstrain.commands.export import (
    ExportOptions,
    _export_to_diffusers,
    _iterate_encoded_samples,
    _measure_latent_statistics,
    _read_latent_statistics,
    export_run,
)
from dstrain.commands.job import JobOptions, complete_and_check_recipe, prepare_job
from dstrain.data.open import open_sources
from dstrain.data.views import Shuffled
from dstrain.disk.sealed import render_json_with_hash
from dstrain.encoders.autoencoder import Autoencoder, hash_network
from dstrain.recipe import ConfigError
from dstrain.runs import first_stage
from dstrain.runs.weights import read_weights_adapted_to_system
from dstrain.systems.dit.presets import PRESETS
from dstrain.systems.iddpm import to_diffusers as unets
from dstrain.systems.optional import Imports
from dstrain.systems.vae import to_diffusers
from tests.support import checkpoints
from tests.support.first_stage import save as save_autoencoder
from tests.support.launch import ROOT
from tests.support.pictures import folder as folder_of_pictures
from tests.support.pictures import picture


@pytest.fixture
def trained(tmp_path):
    """A run of a KL autoencoder over a folder of 50 images, and networks whose weights are all random."""
    torch.manual_seed(0)
    folder_of_pictures(tmp_path / "data", 2, 25)
    words = [f"data.path={tmp_path / 'data'}", "model.kl.norm_num_groups=2"]
    run = recipe.load_recipe(ROOT / "tests/launch/tiny-vae.yaml", words)
    run = recipe.complete_model_section(run, systems.find_config_class("vae"))
    system = systems.build("vae", run.model)
    return run, system, system.networks()


def test_the_folder_is_the_network(tmp_path, trained):
    """Oracle: diffusers' own class, read from the folder: the same bits, the scale that was given, our decode."""
    _, system, nets = trained
    to_diffusers.save_export(system, nets, tmp_path / "out", lambda: {"scaling_factor": 0.75})
    read = Autoencoder(str(tmp_path / "out"))
    assert (read.scaling_factor, read.vae.config.sample_size, read.image_channels, read.factor) == (0.75, 16, 1, 2)
    assert read.compute_fingerprint() == hash_network(*system.describe_identity(nets))
    example = system.encode(system.synthetic(4))
    errors = to_diffusers.measure_export_errors(system, nets, tmp_path / "out", example)
    assert errors.keys() == {"mean", "std", "decoded"} and max(errors.values()) < 1e-6
    latents = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(read.decode(latents), nets["autoencoder"].decode(latents / 0.75).detach())


def test_other_weights_are_found(tmp_path, trained):
    """Oracle: a file in which one weight was moved by its last bit."""
    _, system, nets = trained
    to_diffusers.save_export(system, nets, tmp_path / "out", lambda: {"scaling_factor": 1.0})
    path = tmp_path / "out" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    name = "decoder.conv_out.bias"
    weights[name] = torch.nextafter(weights[name], torch.tensor(9.0))
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ValueError, match="was read back as the first stage"):
        to_diffusers.measure_export_errors(system, nets, tmp_path / "out", system.encode(system.synthetic(2)))


def test_statistics(tmp_path, trained):
    """Oracle: the index of launch/encode.py over the same images; another first stage's index is refused."""
    run, system, nets = trained
    to_diffusers.save_export(system, nets, tmp_path / "out", lambda: {"scaling_factor": 1.0})
    options = EncodeOptions(
        tmp_path / "codes",
        first_stage=str(tmp_path / "out"),
        data=run.data.path,
        image_size=16,
        flip=False,
        dtype="float32",
    )
    index = encode_data(options)
    measured = _measure_latent_statistics(50, run, system, nets)
    assert measured.keys() == index["statistics"].keys()
    for name, value in index["statistics"].items():
        np.testing.assert_allclose(measured[name], value, rtol=1e-5, atol=1e-6)
    with_statistics = ExportOptions(tmp_path / "run", tmp_path / "x", statistics=tmp_path / "codes" / "index.json")
    assert (
        _read_latent_statistics(with_statistics.statistics, with_statistics.run, system, nets)
        == index["statistics"]
        == _read_latent_statistics(tmp_path / "codes", tmp_path / "run", system, nets)
    )
    away = run.model_copy(update={"data": run.data.model_copy(update={"path": str(tmp_path / "nowhere")})})
    done = _export_to_diffusers(with_statistics, away, system, nets, to_diffusers, tmp_path / "told")
    assert done.statistics == index["statistics"] and max(done.errors.values()) < 1e-6
    other = system.networks()
    with pytest.raises(ConfigError, match="these codes are of the first stage .* name the cache"):
        _read_latent_statistics(with_statistics.statistics, with_statistics.run, system, other)


def test_measured_over_all_classes(trained):
    """Oracle: the files' own classes: the folder lists 25 of the one, then 25 of the other; and no mode left behind."""
    run, system, _ = trained
    labels, classes = [], []
    for example in _iterate_encoded_samples(12, run, system):
        assert torch.is_grad_enabled()
        labels += example["label"][example["valid"]].tolist()
    source, shuffled = open_sources(run.data)[0], Shuffled(open_sources(run.data)[0], run.seed)
    classes = [shuffled[i]["label"] for i in range(50)]
    assert [source[i]["label"] for i in range(50)] == [0] * 25 + [1] * 25 and sorted(classes) == [0] * 25 + [1] * 25
    assert labels == classes[:12] and set(labels) == {0, 1}


def test_what_has_no_form_in_diffusers(tmp_path, trained):
    """Oracle: the contract: a refusal that says what is supported."""
    with pytest.raises(ConfigError, match="a Newcomer has no form in diffusers: take --format safetensors"):
        type("Newcomer", (Imports,), {})().require_expressible_in_diffusers()
    discrete = {"discrete": {"num_tokens": 8, "codebook_dim": 4, "num_layers": 1, "hidden_dim": 4}, "image_size": 8}
    system = systems.build("vae", discrete)
    with pytest.raises(ValueError, match="for model.kl alone, not for a discrete VAE: take --format safetensors"):
        to_diffusers.save_export(system, system.networks(), tmp_path / "out", dict)
    with pytest.raises(ConfigError, match="--statistics gives .* leave it out"):
        export_run(ExportOptions(tmp_path, tmp_path / "out", "safetensors", statistics=tmp_path))


# ----------------------------------------------------------------------------------------------------- whole exports

DIT = ["model.time_freq=diffusers", "model.diffusion.num_steps=100", "samples.ema=0.9"]


def begun(tmp_path, name, *words):
    """(folder, networks) of a run of tests/launch/NAME.yaml, whose weights are all random, with grids of two steps."""
    torch.manual_seed(0)
    run = recipe.load_recipe(ROOT / f"tests/launch/{name}.yaml", list(words))
    run = recipe.complete_model_section(run, systems.find_config_class(run.system))
    nets = systems.build(run.system, run.model).networks()
    with torch.no_grad():
        for network in nets.values():
            for weight in network.parameters():
                weight.normal_(std=0.1)
    written = checkpoints.write(tmp_path / name, run, nets, data="n=2000 crc=12345678")
    (written / "samples").mkdir()
    for number in (90, 120):
        picture(number).save(written / "samples" / f"step_{number:08d}.png")
    picture(5).save(written / "samples" / "step_00000120_bound.png")  # a curve, and no grid
    return written, nets


@pytest.mark.parametrize(
    "name, words, kind, own",
    [
        (
            "tiny",
            [
                *DIT,
                "samples.num_steps=5",
                "samples.guidance_scale=3",
                "samples.guidance_interval=[0.2, 5]",
                "samples.sampler=ddim",
                "samples.spacing=trailing",
            ],
            "DiTTransformer2DModel",
            "5 steps of ddim, guidance_scale=3, guidance_interval=(0.2, 5.0), and `pipeline.scheduler = DDIMScheduler."
            'from_config(pipeline.scheduler.config, timestep_spacing="trailing")`, which comes from diffusers',
        ),
        (
            "tiny",
            [
                *DIT[1:],
                "model.block={norm: rms, mlp: swiglu, qk_norm: rms, rope: true}",
                "samples.num_steps=5",
                "samples.sampler=ddim",
            ],
            "ClassTransformer",
            "5 steps of ddim, guidance_scale=2",
        ),
        (
            "tiny-iddpm",
            ["samples.ema=0.9", "samples.num_steps=7", "samples.sampler=unipc", "samples.spacing=karras"],
            "UNet2DModel",
            "7 steps of unipc, spacing=karras, which the pipeline does not know",
        ),
        ("tiny-prior", ["model.self_cond=false"], "PriorTransformer", ""),
    ],
)
def test_an_export_and_its_card(tmp_path, name, words, kind, own):
    """Oracle: the run's own folder: recipe, step, fingerprint, seed, newest grid; the Python of the card, which an
    export runs (as test_saved_again.py does); and init_from, which takes the export for the weights bit for bit.
    """
    folder, nets = begun(tmp_path, name, *words, f"folder={tmp_path / name}")
    out = tmp_path / "exported"
    done = export_run(ExportOptions(folder, out))
    assert done.name == kind and max(done.errors.values()) < 1e-3
    card, run = (out / "README.md").read_text(), recipe.load_recipe(folder / "run.yaml")
    facts = dict(line.strip("| ").split(" | ", 1) for line in card.splitlines() if line[:2] == "| " and line != "| | |")
    assert facts["Step"] == f"7 of {run.steps:,}" and facts["Seed"] == "0" and facts["System"].endswith(kind)
    assert facts["Data"] == f"{Path(run.data.path).name} (n=2000 crc=12345678)" and "decay 0.9" in facts["Weights"]
    assert facts["Trained with"] == "dstrain 0.0, torch 2.99" and "diffusers 0." in facts["Exported with"]
    assert all(f"{error:.1e} ({of})" in facts["Difference"] for of, error in done.errors.items())
    (tmp_path / "again.yaml").write_text(card.split("```yaml\n")[1].split("```")[0])
    named = run.data.model_copy(update={"path": Path(run.data.path).name})
    assert recipe.load_recipe(tmp_path / "again.yaml") == run.model_copy(update={"folder": None, "data": named})
    assert str(tmp_path) not in card and "init_from" not in card, "a path of this machine"
    assert (out / "samples.png").read_bytes() == (folder / "samples" / "step_00000120.png").read_bytes()
    code = card.split("```python\n")[1].split("```")[0]
    assert facts["Difference"].count("(code)") == 1 and "This code was run on this folder" in card
    assert card.count(f"The run's own pictures take {own}.") == bool(own)
    writer = importlib.import_module(f"dstrain.systems.{run.system}.to_diffusers")
    system = systems.build(run.system, run.model)
    first = next(iter(system.parts))
    assert code.rstrip("\n") == writer.describe_export(system)[2].replace('"OUT', '"exported').rstrip("\n")
    values, notes = read_weights_adapted_to_system(out, system)[first]
    state = nets[first].state_dict()
    assert values.keys() == state.keys() and all(torch.equal(values[key], state[key]) for key in state)
    assert notes[0].startswith(f"{first}: {len(state)} tensors loaded, 0 replaced")
    assert {path.name for path in tmp_path.iterdir()} == {name, "exported", "again.yaml"}


@pytest.mark.parametrize("path", sorted((ROOT / "launch" / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_that_diffusers_cannot_express(tmp_path, path):
    """Oracle: the recipe's own header: `Export    Not to diffusers` where an export is refused, and nowhere else."""
    run, _ = complete_and_check_recipe(recipe.load_recipe(path))
    latents = {"first_stage": None}
    if run.model.get("null_text") == "encoder":  # PixArt's and SD3's pipelines need an autoencoder
        latent_channels = PRESETS[run.model["size"]].get("in_channels", 4)
        latents = {
            "first_stage": {
                "path": str(save_autoencoder(tmp_path, channels=3, depth=4, latent_channels=latent_channels)),
                "factor": 8,
            }
        }
    of_data = {"dit": latents, "phenaki": {"token_shape": [5, 4, 4], "codebook_size": 64}}
    system = systems.build(run.system, run.model | of_data.get(run.system, {}))
    with pytest.raises(ConfigError) if "# Export    Not to diffusers" in path.read_text() else nullcontext():
        system.require_expressible_in_diffusers()


def test_a_dry_run_says_what_cannot_be_exported(tmp_path):
    """Oracle: the system's own refusal, among the remarks of a dry run alone."""
    flow = "model.objective=flow", "model.flow.time_scale=0.5", "samples.sampler=heun"
    words = (f"folder={tmp_path / 'run'}", *flow)
    job = JobOptions(ROOT / "tests/launch/tiny.yaml", ROOT / "ds_configs/zero2_fp32.json", words, dry_run=True)
    said = [remark for remark in prepare_job(job, 1, "cpu").remarks if "`dstrain export`" in remark]
    assert len(said) == 1 and said[0].startswith(
        "`dstrain export` will not write this run for diffusers: flow.time_scale: "
    )
    for other in (replace(job, dry_run=False), replace(job, overrides=words[:1])):
        assert not [remark for remark in prepare_job(other, 1, "cpu").remarks if "`dstrain export`" in remark]


def other_weights(out):
    path = out / "unet" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights["conv_in.weight"] *= 1.01
    save_file(weights, path, {"format": "pt"})


def other_chain(out):
    """Predictions stay the same; what is drawn from them does not."""
    path = out / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"beta_schedule": "scaled_linear"}))


@pytest.mark.parametrize("spoil, name", [(other_weights, "prediction"), (other_chain, "code")])
def test_an_export_that_does_not_agree(tmp_path, monkeypatch, spoil, name):
    """Oracle: what was changed between writing and reading: the error is said, and nothing is left behind."""
    folder, _ = begun(tmp_path, "tiny-iddpm", "samples.ema=0.9")
    save = unets.save_export

    def spoiled(system, nets, out, *rest):
        save(system, nets, out, *rest)
        spoil(out)

    monkeypatch.setattr(unets, "save_export", spoiled)
    with pytest.raises(ValueError, match=rf"differs from the trained network by \S+ \({name}\): nothing is kept"):
        export_run(ExportOptions(folder, tmp_path / "deep" / "out"))
    assert list((tmp_path / "deep").iterdir()) == []


def test_a_refused_export_leaves_nothing(tmp_path):
    """Oracle: a condition that no pipeline takes, and the remedy."""
    folder, _ = begun(tmp_path, "tiny", "samples.ema=0.9", "model.embedding_dim=4")
    with pytest.raises(ValueError, match="embedding_dim: .*--format safetensors"):
        export_run(ExportOptions(folder, tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_parts_of_an_export_are_read_apart(tmp_path):
    """Oracle: each network's own weights: a GAN's two parts from the folder that --format safetensors writes."""
    discriminator = "model.kl.discriminator={base_channels: 8, n_layers: 1, start: 0}"
    folder, nets = begun(tmp_path, "tiny-vae", discriminator)
    export_run(ExportOptions(folder, tmp_path / "out", "safetensors"))
    run = recipe.load_recipe(folder / "run.yaml")
    found = read_weights_adapted_to_system(tmp_path / "out", systems.build("vae", run.model))
    assert found.keys() == nets.keys() == {"autoencoder", "discriminator"}
    for part, (values, notes) in found.items():
        state = nets[part].state_dict()
        assert values.keys() == state.keys() and all(torch.equal(values[name], state[name]) for name in state)
        assert notes == [
            f"{part}: {len(state)} tensors loaded, 0 replaced, 0 left, from {tmp_path / 'out' / part}.safetensors"
        ]
    (tmp_path / "out" / "discriminator.safetensors").unlink()
    ((_, notes),) = read_weights_adapted_to_system(tmp_path / "out", systems.build("vae", run.model)).values()
    assert notes[1] == f"discriminator is not in {tmp_path / 'out'} and begins anew"


DISCRIMINATOR = "model.kl.discriminator={base_channels: 8, n_layers: 1, start: 0}"


def in_deepspeeds_files(folder, part):
    """Makes of a checkpoint one of save.format=deepspeed, of whose parts only `part` has an average."""
    at = folder / "checkpoints" / "step_00000007"
    for path in at.glob("*-of-*.safetensors"):
        name, index = path.name.partition("-")[0], json.loads(read_safetensors_header(path)[1]["fragments"])
        state = load(path.read_bytes())  # not mapped: the file is written anew
        entries = [
            (key.split("/")[0], Fragment(key.split("/", 1)[1], tuple(shape), start, numel), state[key])
            for key, (shape, start, numel) in index.items()
            if name == part and not key.startswith("master/")
        ]
        write_shard(path, entries, {"part": name})
    (at / "deepspeed").mkdir()
    (at / "deepspeed" / "files.pt").write_bytes(b"DeepSpeed's own")
    names = [path.relative_to(at).as_posix() for path in at.rglob("*") if path.is_file() and path.name != NAME]
    (at / NAME).write_bytes(render_json_with_hash(read_manifest(at) | {"files": hash_files(at, names)}))


def test_two_parts_in_deepspeeds_files(tmp_path):
    """Oracle: the first part's average, which lies in fragments: exported, encoded with and begun from, though the
    discriminator lies in DeepSpeed's files alone; what needs these says how they are merged.
    """
    folder, nets = begun(tmp_path, "tiny-vae", DISCRIMINATOR)
    in_deepspeeds_files(folder, "autoencoder")
    system, state = (
        systems.build("vae", recipe.load_recipe(folder / "run.yaml").model),
        nets["autoencoder"].state_dict(),
    )
    assert export_run(ExportOptions(folder, tmp_path / "out")).name == "AutoencoderKL"
    ((values, notes),) = read_weights_adapted_to_system(folder, system).values()
    assert all(torch.equal(values[name], state[name]) for name in state)
    assert "discriminator lies in DeepSpeed's own files" in notes[-1] and notes[-1].endswith("begins anew")
    exact, near = (first_stage.open_run_as_first_stage(folder, precision=precision) for precision in ("fp32", "bf16"))
    assert exact.fingerprint == near.fingerprint == hash_network(*system.describe_identity(nets))
    exact, near = (stage.codes({"image": system.synthetic(3)["image"]}) for stage in (exact, near))
    assert 0 < np.linalg.norm(near - exact) < 0.02 * np.linalg.norm(exact)
    with pytest.raises(
        ValueError,
        match=r"autoencoder in DeepSpeed's own files: merge .*dstrain consolidate .* "
        "--weights raw --trust-pickle --out DIR",
    ):
        export_run(ExportOptions(folder, tmp_path / "x", raw=True))


def test_a_consolidated_folder_is_a_first_stage(tmp_path):
    """Oracle: the fingerprint of the run's own networks, from one part alone and from both; a flipped bit is named."""
    folder, nets = begun(tmp_path, "tiny-vae", DISCRIMINATOR)
    wanted = hash_network(*systems.build("vae", recipe.load_recipe(folder / "run.yaml").model).describe_identity(nets))
    for name, part in (("both", None), ("one", "autoencoder")):
        consolidate_weights(Consolidation(folder, tmp_path / name, part=part))
        assert first_stage.open_run_as_first_stage(tmp_path / name).fingerprint == wanted
    path = tmp_path / "both" / "autoencoder" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match="is damaged .autoencoder/model.safetensors has altered bytes"):
        first_stage.open_run_as_first_stage(tmp_path / "both")
    system = systems.build("vae", recipe.load_recipe(folder / "run.yaml").model)
    for given in (tmp_path / "both", path.parent, path):  # the folder, one part's of it, one file
        with pytest.raises(ValueError, match="is damaged .autoencoder/model.safetensors has altered bytes"):
            read_weights_adapted_to_system(given, system)


@pytest.mark.parametrize("format", ["diffusers", "safetensors"])
def test_a_full_disk(tmp_path, format):
    """Oracle: a process whose files may not grow beyond 4 kB: what is wrong, in a line, and nothing left."""
    folder, _ = begun(tmp_path, "tiny-vae")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        with pytest.raises(ConfigError, match="--out .*/out cannot be written .*File too large.* and has room"):
            export_run(ExportOptions(folder, tmp_path / "out", format))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-vae"]


def test_statistics_are_an_autoencoders(tmp_path):
    """Oracle: the option named, and nothing left, where what is exported encodes nothing."""
    folder, _ = begun(tmp_path, "tiny", *DIT)
    with pytest.raises(ConfigError, match="--statistics: .* trains dit, which has no scaling_factor: leave it out"):
        export_run(ExportOptions(folder, tmp_path / "out", statistics=tmp_path))
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported_is_statistics_of_cache(tmp_path):
    """Oracle: the faults put in: a folder that cannot be written, a checkpoint that is damaged."""
    folder, _ = begun(tmp_path, "tiny", *DIT)
    with pytest.raises(ConfigError, match="--out /proc/x/y cannot be written .*: name a folder that can be written"):
        export_run(ExportOptions(folder, Path("/proc/x/y"), "safetensors"))
    (folder / "checkpoints" / "step_00000007" / "common.safetensors").write_bytes(b"none")
    with pytest.raises(ConfigError, match=r"none of its checkpoints \(7\) is whole"):
        export_run(ExportOptions(folder, tmp_path / "out"))
