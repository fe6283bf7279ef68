"""A DiT as diffusers' DiTTransformer2DModel and DiTPipeline, there and back; what they cannot
express, and what is no DiT.
"""

import json
import shutil
from contextlib import nullcontext

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DiffusionPipeline,
    DiTPipeline,
    DiTTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
)
from diffusers.models import embeddings
from diffusers.pipelines.dit import pipeline_dit
from diffusers.schedulers import scheduling_ddpm
from safetensors.torch import load_file, save_file

from dstrain import rng, systems
from dstrain.recipe import ConfigError
from dstrain.runs.weights import read_weights_adapted_to_system
from dstrain.systems.base import Request
from dstrain.systems.dit import to_diffusers
from tests.support import cards, first_stage
from tests.support.checkpoints import edited, lacking

PUBLISHED = embeddings.get_timestep_embedding  # before `exact_timesteps` is put in its place
pytestmark = pytest.mark.usefixtures("exact_timesteps")

SMALL = {
    "patch_size": 2,
    "hidden_size": 32,
    "depth": 3,
    "num_heads": 2,
    "num_classes": 7,
    "time_freq": "diffusers",
    "image_size": 16,
}
FILE = "diffusion_pytorch_model.safetensors"
CLASSES = "y_embedder.embedding_table.weight"
V = {"diffusion": {"schedule": "cosine", "prediction": "v"}, "learn_sigma": False}
PIXELS = {"in_channels": 1}
CASES = {
    "eps": {},
    "v": V,
    "x_start, 100 steps": {"diffusion": {"prediction": "x_start", "num_steps": 100, "schedule": "quad"}},
    "never unconditional": {"class_dropout_prob": 0.0},
    "other scale": {"scale": 0.3},
}


def made(tmp_path, changes=(), latents=True):
    """(system, networks whose weights are all random); of latents of a first stage with 3 channels, or of pixels."""
    changes = dict(changes)
    if latents:
        stage = first_stage.save(tmp_path / "stage", channels=1, depth=2)
        own = json.loads((stage / "config.json").read_text())
        changes |= {
            "first_stage": {
                "path": str(stage),
                "factor": 2 ** (len(own["block_out_channels"]) - 1),
                "scaling_factor": changes.pop("scale", None),
                "shift": changes.pop("shift", None),
            },
            "in_channels": own["latent_channels"],
        }
    system = systems.build("dit", SMALL | changes)
    nets = system.networks()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in nets["denoiser"].parameters():
            weight.copy_(0.15 * torch.randn(weight.shape, generator=generator))
    nets["denoiser"].eval()
    return system, nets


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def probe(system):
    return {"key": system.synthetic(4)["key"]}


# --------------------------------------------------------------------------------------------------------------- there


@pytest.mark.parametrize("case", CASES)
def test_the_pipeline_draws_the_same(tmp_path, monkeypatch, case):
    """Oracle: diffusers' DiTPipeline as a user loads and calls it, with guidance, from the noise that ours starts with:
    the pictures of `sample`, to one level.
    """
    system, nets = made(tmp_path, CASES[case])
    names = [f"class {number}, kind {number}" for number in range(7)]
    to_diffusers.save_export(system, nets, tmp_path / "out", get_class_names=lambda: names)
    errors = to_diffusers.measure_export_errors(system, nets, tmp_path / "out", probe(system))
    assert errors.keys() == {"with label"} | ({"without label"} if system.config.class_dropout_prob else set())
    assert max(errors.values()) < 1e-5
    assert cards.difference(to_diffusers, system, nets, tmp_path / "out") <= 1.01 / 255

    pipeline = DiTPipeline.from_pretrained(tmp_path / "out")
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.get_label_ids(["class 3", "kind 6"]) == [3, 6]
    seeds, labels = torch.arange(5), [6, 0, 3, 3, 1]
    keys = rng.keys_of_seeds(seeds)
    monkeypatch.setattr(pipeline_dit, "randn_tensor", lambda shape, **_: rng.normal(keys, "start", shape[1:]))
    scale = 2.5 if system.config.class_dropout_prob else 1.0
    found = pipeline(labels, guidance_scale=scale, num_inference_steps=20, output_type="np").images
    ours = system.sample(nets, Request(seeds, {"label": torch.tensor(labels)}, 20, "ddim", scale))
    theirs = torch.from_numpy(found).permute(0, 3, 1, 2) * 255
    assert (theirs - ours).abs().max() <= 1 and ours.float().std() > 5


def loaded(folder):
    """The pipeline as diffusers loads it; its classes and components are told by model_index.json alone."""
    pipeline = DiffusionPipeline.from_pretrained(folder, custom_pipeline=str(folder), trust_remote_code=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def levels(x):
    """Pictures in [0, 1] as levels, not rounded."""
    return x * 255


GUIDED = {"guidance_channels": 2, "in_channels": 3, "learn_sigma": True}
ENDS = {"diffusion": {"schedule": "jsd", "num_steps": 25, "prediction": "v"}, "learn_sigma": False}
OURS = {
    "pixels": (PIXELS, False),
    "v": (PIXELS | V, False),
    "noise alone at the end": (PIXELS | ENDS, False),
    "three channels, two guided": (GUIDED, False),
    "shift": ({"shift": 0.5}, True),
    "1,001 labels": ({"num_classes": 1001}, True),
    "normalized channels": (
        {"latents": {"normalize": "channels", "mean": [0.5, -0.2, 1.0], "std": [2.0, 0.5, 1.0]}},
        True,
    ),
}
MODERN = {"norm": "rms", "mlp": "swiglu", "qk_norm": "rms", "rope": True}
TWO_HEADS = {"objective": "flow", "learn_sigma": False, "internal": {"depth": 1}}
WIDE = {"wide": {"hidden_size": 24, "depth": 2, "num_heads": 2}}
TOKENS = {"tokens": {"time": 2, "label": 3, "joins": 1}, "block": MODERN | {"modulation": "none"}}
OF_OUR_CLASS = {
    "official frequencies": (PIXELS | {"time_freq": "official"}, False),
    "narrow MLPs": (PIXELS | {"mlp_ratio": 2.0}, False),
    "modern blocks, latents": ({"block": MODERN, "time_freq": "fourier", "sines": False}, True),
    "condition tokens": (PIXELS | V | TOKENS, False),
    "shared modulation": (PIXELS | {"block": {"modulation": "shared"}, "patch_bottleneck": 3}, False),
    "wide head": (PIXELS | WIDE, False),
    "aligned and routed": (
        PIXELS
        | {"align": {"kind": "layersync", "depth": 1, "target": 3}, "routing": {"start": 2, "end": 2}}
        | {"block": MODERN},
        False,
    ),
}
OURS |= OF_OUR_CLASS


@pytest.mark.parametrize("case", OURS)
def test_our_pipeline_draws_the_same(tmp_path, case):
    """Oracle: `sample` of the trained network from the same noise, and guided, to one level; DiTPipeline draws none."""
    system, nets = made(tmp_path, *OURS[case])
    out, latents = tmp_path / "out", OURS[case][1]
    to_diffusers.save_export(system, nets, out, get_class_names=lambda: [f"kind {number}" for number in range(7)])
    assert (out / "pipeline.py").is_file() and (out / "vae").is_dir() == latents
    name = "ClassTransformer" if case in OF_OUR_CLASS else "DiTTransformer2DModel"
    assert to_diffusers.describe_export(system)[0] == name
    assert cards.difference(to_diffusers, system, nets, out) <= 1.01 / 255
    pipeline = loaded(out)
    assert isinstance(pipeline.scheduler, DDIMScheduler) and pipeline.config.id2label["6"] == "kind 6"
    seeds, labels = torch.arange(3), [1, 5, 2]
    noise = rng.normal(rng.keys_of_seeds(seeds), "start", system.shape)
    for scale, within in ((3.0, None), (1.0, None), (3.0, (0.3, 4.0)), (3.0, (0.0, 0.001))):
        images = pipeline(labels, scale, 25, latents=noise, output_type="pt", guidance_interval=within).images
        ours = system.sample(
            nets, Request(seeds, {"label": torch.tensor(labels)}, 25, "ddim", scale, guidance_interval=within)
        ).float()
        assert (levels(images) - ours).abs().max() <= 1 and ours.std() > 5
    own, pipeline.scheduler = (
        pipeline.scheduler,
        DDIMScheduler.from_config(  # as a card says of this spacing
            pipeline.scheduler.config, timestep_spacing="trailing"
        ),
    )
    images = pipeline(labels, 3.0, 25, latents=noise, output_type="pt").images
    ours = system.sample(nets, Request(seeds, {"label": torch.tensor(labels)}, 25, "ddim", 3.0, spacing="trailing"))
    assert (levels(images) - ours.float()).abs().max() <= 1
    pipeline.scheduler = own
    for label in (system.config.num_classes, system.config.num_classes + 70, -1):
        with pytest.raises(ValueError, match=f"labels are 0 to {system.config.num_classes - 1}"):
            pipeline([0, label], 3.0, 25)
    plain = pipeline(labels, 1.0, 25, latents=noise, output_type="pt").images
    assert not torch.equal(plain, pipeline([5, 5, 5], 1.0, 25, latents=noise, output_type="pt").images)
    grey = pipeline([1], 3.0, 5, torch.Generator().manual_seed(0)).images[0]
    assert grey.mode == ("RGB" if case.startswith("three") else "L") and grey.size == (16, 16)


@pytest.mark.parametrize("changes", [PIXELS, GUIDED | {"guidance_channels": None}])
def test_learned_variances(tmp_path, monkeypatch, changes):
    """Oracle: `sample` by ddpm with our noise: what pipeline.py says of DDPMScheduler, guided."""
    system, nets = made(tmp_path, changes, latents=False)
    to_diffusers.save_export(system, nets, tmp_path / "out")
    pipeline, seeds, drawn = loaded(tmp_path / "out"), torch.arange(3), []
    pipeline.scheduler = DDPMScheduler.from_config(
        pipeline.scheduler.config, variance_type="learned_range", timestep_spacing="linspace"
    )
    keys = rng.keys_of_seeds(seeds)

    def noise(shape, **_):
        drawn.append(rng.normal(keys, f"noise/{len(drawn)}", tuple(shape[1:])))
        return drawn[-1]

    monkeypatch.setattr(scheduling_ddpm, "randn_tensor", noise)
    start = rng.normal(keys, "start", system.shape)
    images = pipeline([1, 5, 2], 2.0, 20, latents=start, output_type="pt").images
    ours = system.sample(nets, Request(seeds, {"label": torch.tensor([1, 5, 2])}, 20, "ddpm", 2.0)).float()
    assert len(drawn) == 19 and (levels(images) - ours).abs().max() <= 1 and ours.std() > 5


FLOWS = {
    "latents": {},
    "pixels": PIXELS,
    "two heads": PIXELS | WIDE | {"internal": {"depth": 2, "scale": 1.7}, "learn_sigma": False},
    "x, as JiT": PIXELS | {"flow": {"prediction": "x", "loss": "velocity", "t_min": 0.05, "time_scale": 1.0}},
    "noise, curved": PIXELS | {"flow": {"path": "gvp", "prediction": "eps", "t_min": 0.01}},
    "x, two heads": PIXELS | {"internal": {"depth": 2, "scale": 1.3}, "flow": {"prediction": "x", "t_min": 0.2}},
}


@pytest.mark.parametrize("case", FLOWS)
def test_flow_matching(tmp_path, case):
    """Oracle: `sample` of the trained network by Euler's steps from the same noise, to one level."""
    latents, changes = case == "latents", {"objective": "flow", "flow": {"shift": 3.0}} | FLOWS[case]
    system, nets = made(tmp_path, changes, latents)
    to_diffusers.save_export(system, nets, tmp_path / "out")
    assert to_diffusers.measure_export_errors(system, nets, tmp_path / "out", probe(system))["with label"] < 1e-5
    assert cards.difference(to_diffusers, system, nets, tmp_path / "out") <= 1.01 / 255
    pipeline, seeds, labels = loaded(tmp_path / "out"), torch.arange(3), [4, 0, 6]
    assert (pipeline.vae is not None) == latents
    noise = rng.normal(rng.keys_of_seeds(seeds), "start", system.shape)
    for within in (None, (0.3, 4.0)):
        images = pipeline(labels, 2.0, 12, latents=noise, output_type="pt", guidance_interval=within).images
        ours = system.sample(
            nets, Request(seeds, {"label": torch.tensor(labels)}, 12, "euler", 2.0, guidance_interval=within)
        ).float()
        assert (levels(images) - ours).abs().max() <= 1 and ours.std() > 5
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path / "out" / "scheduler")
    scheduler.set_timesteps(sigmas=[1 - step / 8 for step in range(8)])
    torch.testing.assert_close(scheduler.sigmas, system.process.make_time_grid(8, torch.zeros(1)))
    scale = system.process.time_scale
    torch.testing.assert_close(scheduler.timesteps, scale * system.process.make_time_grid(8, torch.zeros(1))[:-1])


def test_latents_that_nothing_decodes(tmp_path):
    """Oracle: our DDIM from the same noise, unclipped, to 1e-4: images are the latents, and the note says whose."""
    codes = {"codes": {"shape": [3, 8, 8], "scaling_factor": 0.5, "first_stage": "0123456789abcdef"}, "in_channels": 3}
    system, nets = made(tmp_path, codes, latents=False)
    to_diffusers.save_export(system, nets, tmp_path / "out")
    assert "latents times 0.5, of the autoencoder 0123456789abcdef" in to_diffusers.describe_export(system)[1]
    assert to_diffusers.draw_reference_outputs(system, nets).shape == (2, 3, 8, 8)
    assert cards.difference(to_diffusers, system, nets, tmp_path / "out") < 1e-4


def test_exports_are_kept(tmp_path):
    """Oracle: what an export tolerates, of diffusers' own sinusoids and of some whose exp is 5 units of float32 off."""
    exp = torch.exp
    system, nets = made(tmp_path, PIXELS, latents=False)
    to_diffusers.save_export(system, nets, tmp_path / "out")
    for off in (0.0, 3e-7):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(embeddings, "get_timestep_embedding", PUBLISHED)
            patch.setattr(torch, "exp", lambda x: exp(x) * (1 + off * (x.dtype == torch.float32)))
            found = to_diffusers.measure_export_errors(system, nets, tmp_path / "out", probe(system))
        assert all(found[name] < to_diffusers.TOLERATED[name] for name in found), found


def test_other_weights_are_found(tmp_path):
    """Oracle: a file in which one bias was moved: the error is above what an export tolerates."""
    system, nets = made(tmp_path, PIXELS, latents=False)
    to_diffusers.save_export(system, nets, tmp_path / "out")
    state = load_file(tmp_path / "out" / "transformer" / FILE)
    state["transformer_blocks.1.norm1.linear.bias"][5] += 0.01
    save_file(state, tmp_path / "out" / "transformer" / FILE, {"format": "pt"})
    assert (
        to_diffusers.measure_export_errors(system, nets, tmp_path / "out", probe(system))["with label"]
        > to_diffusers.TOLERATED["with label"]
    )


def test_the_frequencies_do_matter(tmp_path):
    """Oracle: the official network with these very weights: what an export that ignored time_freq would be off by."""
    system, nets = made(tmp_path, PIXELS, latents=False)
    to_diffusers.save_export(system, nets, tmp_path / "out")
    official, others = made(tmp_path, PIXELS | {"time_freq": "official"}, latents=False)
    others["denoiser"].load_state_dict(nets["denoiser"].state_dict())
    assert to_diffusers.measure_export_errors(official, others, tmp_path / "out", probe(official))["with label"] > 0.01


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"embedding_dim": 5},
            "embedding_dim: .* takes labels alone; take --format safetensors",
        ),
        ({"size_conditions": True}, "size_conditions: the pipeline of an export takes labels alone"),
        ({"objective": "flow", "flow": {"time_scale": 0.5}}, "flow.time_scale: 0.5 is no whole number"),
    ],
)
def test_what_diffusers_cannot_express(tmp_path, changes, words):
    """Oracle: a ValueError that names the field, and no folder."""
    system, nets = made(tmp_path, changes)
    with pytest.raises(ValueError, match=words):
        to_diffusers.save_export(system, nets, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_interpolated_positions_are_no_sinusoids(tmp_path):
    """Oracle: positions that `adapt_weights` interpolates, which diffusers would compute anew."""
    small, _ = made(tmp_path, PIXELS, latents=False)
    system, nets = made(tmp_path, PIXELS | {"image_size": 24}, latents=False)
    nets["denoiser"].load_state_dict(system.adapt_weights("denoiser", small.networks()["denoiser"].state_dict())[0])
    with pytest.raises(ValueError, match="pos_embed: .* interpolated"):
        to_diffusers.save_export(system, nets, tmp_path / "out")


# ---------------------------------------------------------------------------------------------------------------- back


@pytest.mark.parametrize(
    "changes, latents",
    [({}, True), ({"class_dropout_prob": 0.0}, True), (PIXELS, False), (PIXELS | {"class_dropout_prob": 0.0}, False)],
)
def test_there_and_back(tmp_path, changes, latents):
    """Oracle: the weights themselves, bit for bit, from the pipeline's folder and from the transformer's."""
    system, nets = made(tmp_path, changes, latents)
    to_diffusers.save_export(system, nets, tmp_path / "out")
    state = nets["denoiser"].state_dict()
    for path in (tmp_path / "out", tmp_path / "out" / "transformer"):
        ((values, notes),) = read_weights_adapted_to_system(path, system).values()
        assert same(values, state)
        counts = f"denoiser: {len(state)} tensors loaded, 0 replaced, 0 left, from "
        assert notes == [f"{counts}{tmp_path / 'out' / 'transformer'} (DiTTransformer2DModel)"]


@pytest.mark.parametrize("case", ["modern blocks, latents", "condition tokens"])
def test_our_class_there_and_back(tmp_path, case):
    """Oracle: the weights themselves, bit for bit; and the predictions and files of a folder that diffusers has read
    and written again, which holds all of its code.
    """
    system, nets = made(tmp_path, *OF_OUR_CLASS[case])
    to_diffusers.save_export(system, nets, tmp_path / "out", get_class_names=lambda: ["kind"] * 7)
    ((values, notes),) = read_weights_adapted_to_system(tmp_path / "out", system).values()
    assert same(values, nets["denoiser"].state_dict()) and notes[0].endswith("(ClassTransformer)") and len(notes) == 1
    other, _ = made(tmp_path, OF_OUR_CLASS[case][0] | {"num_heads": 4}, OF_OUR_CLASS[case][1])
    with pytest.raises(ValueError, match="weights: num_heads is 2 in config.json, and 4 in the recipe's model"):
        read_weights_adapted_to_system(tmp_path / "out", other)
    loaded(tmp_path / "out").save_pretrained(tmp_path / "again")
    assert names_in(tmp_path / "again") == names_in(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    assert max(to_diffusers.measure_export_errors(system, nets, tmp_path / "again", probe(system)).values()) < 1e-5
    assert cards.difference(to_diffusers, system, nets, tmp_path / "again") <= 1.01 / 255


@pytest.mark.parametrize(
    "exported, asked, message",
    [
        (TWO_HEADS, {"internal": {"depth": 2}}, "base_depth is 1 in config.json, and 2 in"),
        (TWO_HEADS, {}, None),
        (
            WIDE,
            {"wide": WIDE["wide"] | {"num_heads": 4}},
            "wide is .*'num_heads': 2.* in config.json, and .*'num_heads': 4",
        ),
        ({"sines_within": [10, 8]}, {"sines_within": [12, 8]}, "sines_within is .10, 8. in config.json, and .12, 8."),
        ({"sines_within": [10, 8]}, {}, None),
    ],
)
def test_choices_that_no_shape_shows(tmp_path, exported, asked, message):
    """Oracle: the recipe that wrote the folder reads it; one with another choice, which would compute something else
    with the same weights, is refused by its name.
    """
    system, nets = made(tmp_path, PIXELS | exported, False)
    to_diffusers.save_export(system, nets, tmp_path / "out")
    other, _ = made(tmp_path, PIXELS | exported | asked, False)
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        read_weights_adapted_to_system(tmp_path / "out", other)


def names_in(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if "__pycache__" not in path.parts)


def theirs(tmp_path, classes=7, **changes):
    """A folder of a random DiTTransformer2DModel that diffusers has made, its blocks' embedders alike."""
    torch.manual_seed(5)
    network = DiTTransformer2DModel(
        **{
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 1,
            "out_channels": 2,
            "num_layers": 3,
            "sample_size": 16,
            "patch_size": 2,
            "num_embeds_ada_norm": classes,
            "norm_eps": 1e-6,
        }
        | changes
    ).eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_(std=0.15)
    for block in network.transformer_blocks[1:]:
        block.norm1.emb.load_state_dict(network.transformer_blocks[0].norm1.emb.state_dict())
    network.save_pretrained(tmp_path / "theirs")
    return network


@pytest.mark.parametrize("form", ["safetensors", "sharded", "bin", "older"])
def test_a_folder_that_diffusers_made(tmp_path, form):
    """Oracle: the outputs of diffusers' network, from each form in which it saves, and under the
    class's former name.
    """
    network = theirs(tmp_path)
    folder = tmp_path / "theirs"
    if form == "sharded":
        (folder / FILE).unlink()
        network.save_pretrained(folder, max_shard_size="40KB")
        assert len(list(folder.glob("*-of-*.safetensors"))) > 1
    elif form == "bin":
        (folder / FILE).unlink()
        network.save_pretrained(folder, safe_serialization=False)
    elif form == "older":
        said = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(said | {"_class_name": "Transformer2DModel"}))
        save_file(
            {name: value + 1 for name, value in load_file(folder / FILE).items()},
            folder / "diffusion_pytorch_model.fp16.safetensors",
        )  # not what is asked for
    system, nets = made(tmp_path, PIXELS, latents=False)
    ((values, notes),) = read_weights_adapted_to_system(folder, system).values()
    nets["denoiser"].load_state_dict(values)
    x, t, y = torch.randn(4, 1, 16, 16), torch.tensor([0, 10, 500, 999]), torch.tensor([0, 6, 7, 3])
    with torch.no_grad():
        torch.testing.assert_close(nets["denoiser"](x, t, y), network(x, t, y).sample, rtol=1e-5, atol=1e-5)
    assert len(notes) == 1


def test_other_sizes(tmp_path):
    """Oracle: 7 classes for 4, 16 pixels for 24: fresh rows, and positions interpolated, both counted and told."""
    theirs(tmp_path)
    system, _ = made(tmp_path, PIXELS | {"num_classes": 4, "image_size": 24, "time_freq": "official"}, latents=False)
    ((values, notes),) = read_weights_adapted_to_system(tmp_path / "theirs", system).values()
    assert notes[0].startswith(f"denoiser: {len(values) - 2} tensors loaded, 2 replaced, 0 left")
    assert [note.partition(":")[0] for note in notes[1:3]] == ["pos_embed", CLASSES]
    assert "need model.time_freq=diffusers" in notes[3]
    system.networks()["denoiser"].load_state_dict(values)


WRONG = {
    "another class": (lambda f: edited(f, _class_name="UNet2DModel"), "of class UNet2DModel, system dit takes DiT"),
    "other heads": (lambda f: edited(f, num_attention_heads=4), "num_attention_heads is 4 in .* 2 by model.num_heads"),
    "other patches": (lambda f: edited(f, patch_size=4), "patch_size is 4 in config.json, and 2 by model.patch_size"),
    "other norm": (lambda f: edited(f, norm_type="ada_norm"), "norm_type is ada_norm in .*this network, which has no"),
    "no side": (lambda f: edited(f, sample_size=None), "sample_size is None in config.json"),
    "no weights": (lambda f: (f / FILE).unlink(), "there is no file"),
    "a layer missing": (lambda f: lacking(f, "transformer_blocks.1.attn1.to_k.bias"), "to_k.bias is missing, num_"),
    "blocks apart": (
        lambda f: lacking(f, "transformer_blocks.2.norm1.emb.timestep_embedder.linear_1.bias", torch.ones(32)),
        "blocks.2.norm1.*is not that of block 0.*trained the copies",
    ),
    "another shape": (
        lambda f: lacking(f, "proj_out_2.weight", torch.ones(4, 32)),
        r"final_layer.linear.weight is \(4, 32\) in the file and \(8, 32\) in the network; set learn_sig",
    ),
    "no json": (lambda f: (f / "config.json").write_text("{"), "config.json is damaged"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(tmp_path, case):
    """Oracle: the fault put in, named with both sides."""
    spoil, words = WRONG[case]
    theirs(tmp_path)
    spoil(tmp_path / "theirs")
    system, _ = made(tmp_path, PIXELS, latents=False)
    with pytest.raises(ValueError, match=words) as caught:
        read_weights_adapted_to_system(tmp_path / "theirs", system)
    assert len(str(caught.value).splitlines()) == 1


def test_a_pipeline_without_a_transformer(tmp_path):
    """Oracle: the contract: what is missing where, of a folder that is a pipeline."""
    (tmp_path / "model_index.json").write_text('{"_class_name": "DDPMPipeline"}')
    with pytest.raises(ValueError, match="holds no transformer/config.json"):
        read_weights_adapted_to_system(tmp_path, made(tmp_path, PIXELS, latents=False)[0])
