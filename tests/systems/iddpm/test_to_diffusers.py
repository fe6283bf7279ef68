"""An IDDPM as diffusers' UNet2DModel and DDPMPipeline, there and back; what they cannot express; what is none."""

import pytest
import torch
from diffusers import DDIMScheduler, DDPMPipeline, DDPMScheduler, DiffusionPipeline, UNet2DModel
from diffusers.pipelines.ddpm import pipeline_ddpm
from diffusers.schedulers import scheduling_ddpm
from safetensors.torch import load_file, save_file

from dstrain import rng, systems
from dstrain.runs.weights import read_weights_adapted_to_system
from dstrain.systems.base import Request
from dstrain.systems.iddpm import to_diffusers, weights
from tests.support import cards
from tests.support.checkpoints import edited, lacking

pytestmark = pytest.mark.usefixtures("exact_timesteps")

SMALL = {
    "image_size": 8,
    "num_channels": 32,
    "channel_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "attention_resolutions": [4, 2],
    "num_heads": 4,
    "in_channels": 3,
}
FILE = "diffusion_pytorch_model.safetensors"
CASES = {
    "plain": {},
    "learned variance": {"learn_sigma": True},
    "classes, grey": {"class_cond": True, "num_classes": 7, "in_channels": 1, "num_res_blocks": 2},
    "as for LSUN": {
        "use_scale_shift_norm": False,
        "num_heads": 1,
        "attention_resolutions": [8, 4],
        "learn_sigma": True,
        "rescale_timesteps": False,
    },
    "timesteps rescaled": {"diffusion_steps": 400, "noise_schedule": "cosine", "learn_sigma": True, "dropout": 0.1},
    "timesteps as they are": {"diffusion_steps": 400, "noise_schedule": "cosine", "rescale_timesteps": False},
    "super-resolution": {"small_size": 4, "learn_sigma": True, "class_cond": True, "num_classes": 5},
    "null label": {"class_cond": True, "num_classes": 5, "class_dropout_prob": 0.1, "learn_sigma": True},
    "enlarged, null label": {
        "small_size": 4,
        "class_cond": True,
        "num_classes": 5,
        "class_dropout_prob": 0.1,
        "diffusion_steps": 400,
    },
    "noise alone at the end": {
        "class_cond": True,
        "num_classes": 5,
        "class_dropout_prob": 0.1,
        "prediction": "v",
        "noise_schedule": "linear",
        "diffusion_steps": 20,
    },
    "v": {"prediction": "v", "noise_schedule": "quad"},
    "x_start": {"predict_xstart": True, "sigma_small": True},
    "attention in the middle alone": {"attention_resolutions": [], "num_heads_upsample": 8},
}


def made(changes=()):
    """(system, networks whose weights are all random)."""
    system = systems.build("iddpm", SMALL | dict(changes))
    nets, generator = system.networks(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in nets["denoiser"].parameters():
            weight.copy_((0.1 if weight.ndim > 1 else 0.3) * torch.randn(weight.shape, generator=generator))
    nets["denoiser"].eval()
    return system, nets


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def probe(system):
    return {"key": system.synthetic(4)["key"]}


# --------------------------------------------------------------------------------------------------------------- there


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(tmp_path, case):
    """Oracle: UNet2DModel as diffusers loads it, its output, and what the card draws; the weights, bit for bit."""
    system, nets = made(CASES[case])
    to_diffusers.save_export(system, nets, tmp_path / "out")
    errors = to_diffusers.measure_export_errors(system, nets, tmp_path / "out", probe(system))
    assert errors.keys() == {"prediction"} | ({"without label"} if system.config.has_null_label else set())
    assert max(errors.values()) < 1e-5
    assert cards.difference(to_diffusers, system, nets, tmp_path / "out") <= 1.01 / 255
    is_stock = not (system.config.class_cond or system.config.small_size)
    assert (tmp_path / "out" / "pipeline.py").exists() != is_stock
    assert to_diffusers.describe_export(system)[0] == ("DDPMPipeline" if is_stock else "UNet2DModel")
    state = nets["denoiser"].state_dict()
    for path in (tmp_path / "out", tmp_path / "out" / "unet"):
        ((values, notes),) = read_weights_adapted_to_system(path, system).values()
        assert same(values, state)
        assert notes[0] == (
            f"denoiser: {len(state)} tensors loaded, 0 replaced, 0 left, from {tmp_path / 'out' / 'unet'} (UNet2DModel)"
        )
        assert len(notes) == 2 + system.config.has_null_label and notes[-1].startswith("names and shapes fit")
        assert not system.config.has_null_label or notes[1].endswith("6 rows in the file is taken for the null label")


@pytest.mark.parametrize("case", ["learned variance", "as for LSUN", "timesteps rescaled", "x_start", "v"])
def test_the_pipeline_draws_the_same(tmp_path, monkeypatch, case):
    """Oracle: diffusers' DDPMPipeline as a user loads and calls it, given our noise: the pictures of `sample`."""
    system, nets = made(CASES[case])
    to_diffusers.save_export(system, nets, tmp_path / "out")
    pipeline = DDPMPipeline.from_pretrained(tmp_path / "out")
    pipeline.set_progress_bar_config(disable=True)
    seeds, steps, drawn = torch.arange(3), 12, []
    keys = rng.keys_of_seeds(seeds)

    def noise(shape, **_):
        drawn.append(rng.normal(keys, f"noise/{len(drawn)}", tuple(shape[1:])))
        return drawn[-1]

    monkeypatch.setattr(pipeline_ddpm, "randn_tensor", lambda shape, **_: rng.normal(keys, "start", shape[1:]))
    monkeypatch.setattr(scheduling_ddpm, "randn_tensor", noise)
    found = pipeline(batch_size=3, num_inference_steps=steps, output_type="np").images
    ours = system.sample(nets, Request(seeds, {}, steps, "ddpm")).float()
    assert len(drawn) == steps - 1
    assert (torch.from_numpy(found).permute(0, 3, 1, 2) * 255 - ours).abs().max() <= 1 and ours.std() > 5


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
@pytest.mark.parametrize(
    "case", ["super-resolution", "classes, grey", "null label", "enlarged, null label", "noise alone at the end"]
)
def test_labels_and_a_small_picture(tmp_path, monkeypatch, case, sampler):
    """Oracle: `sample` from the same noise and the same conditions, by both schedulers, to one level."""
    system, nets = made(CASES[case])
    to_diffusers.save_export(system, nets, tmp_path / "out", get_class_names=lambda: ["a", "b", "c"])
    pipeline = DiffusionPipeline.from_pretrained(
        tmp_path / "out", custom_pipeline=str(tmp_path / "out"), trust_remote_code=True
    )
    pipeline.set_progress_bar_config(disable=True)
    assert isinstance(pipeline.scheduler, DDPMScheduler) and pipeline.config.id2label["2"] == "c"
    spacing = {"ddim": "trailing"}.get(sampler)
    if spacing:  # as a card names it
        pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, timestep_spacing=spacing)
    for label in (system.config.num_classes, 77, -1):
        with pytest.raises(ValueError, match=f"labels are 0 to {system.config.num_classes - 1}"):
            pipeline([0, label], torch.zeros(2, 3, 4, 4))
    with pytest.raises(ValueError, match="class_labels=None: labels are 0 to"):
        pipeline(low_res=torch.zeros(2, 3, 4, 4))
    with pytest.raises(ValueError, match=r"guidance_interval=\(5, 0.2\): give \(LOW, HIGH\)"):
        pipeline([0, 1], torch.zeros(2, 3, 4, 4), 20, guidance_interval=(5, 0.2))
    seeds, labels, drawn = torch.arange(3), [4, 0, 2], []
    keys = rng.keys_of_seeds(seeds)

    def noise(shape, **_):
        drawn.append(rng.normal(keys, f"noise/{len(drawn)}", tuple(shape[1:])))
        return drawn[-1]

    monkeypatch.setattr(scheduling_ddpm, "randn_tensor", noise)
    small = {"low_res": torch.rand(3, 3, 4, 4) * 2 - 1} if "small_size" in CASES[case] else {}
    start = rng.normal(keys, "start", system.shape)
    if system.config.has_null_label:
        guided = {"guidance_scale": 2.5, "guidance_interval": (0.3, 8.0)}
    else:
        guided = {}
        with pytest.raises(ValueError, match="guidance_scale=2: this unet was trained without dropped labels"):
            pipeline(labels, **small, guidance_scale=2)
    images = pipeline(labels, **small, num_inference_steps=20, latents=start, output_type="pt", **guided).images
    ours = system.sample(
        nets, Request(seeds, {"label": torch.tensor(labels)} | small, 20, sampler, spacing=spacing, **guided)
    ).float()
    assert (images * 255 - ours).abs().max() <= 1 and ours.std() > 5
    if small:
        small["low_res"] = small["low_res"].flip(0)
        others = pipeline(labels, **small, num_inference_steps=20, latents=start, output_type="pt").images
        assert (others - images).abs().max() > 0.1


def test_other_weights_are_found(tmp_path):
    """Oracle: a file in which the queries of one attention have changed heads: the error is above the tolerated one."""
    system, nets = made()
    to_diffusers.save_export(system, nets, tmp_path / "out")
    state = load_file(tmp_path / "out" / "unet" / FILE)
    name = "down_blocks.1.attentions.0.to_q.weight"
    state[name] = state[name].roll(16, dims=0)
    save_file(state, tmp_path / "out" / "unet" / FILE, {"format": "pt"})
    found = to_diffusers.measure_export_errors(system, nets, tmp_path / "out", probe(system))
    assert found["prediction"] > to_diffusers.TOLERATED["prediction"]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"channel_mult": [2, 2, 2]}, "channel_mult: .* begins with 2"),
        ({"attention_resolutions": [8]}, "num_heads: .* 4 heads at levels of different width .* 8 and 16 wide"),
        ({"num_heads_upsample": 2}, "num_heads_upsample: .* 2 and 4"),
        ({"prediction": "previous_x"}, "prediction: prev"),
        ({"objective": "flow"}, "objective: .* take --format safetensors"),
    ],
)
def test_what_diffusers_cannot_express(tmp_path, changes, words):
    """Oracle: a ValueError that names the flag, and no folder."""
    system, nets = made(changes)
    with pytest.raises(ValueError, match=words):
        to_diffusers.save_export(system, nets, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------- back


def theirs(folder, system, **changes):
    """A folder of a random UNet2DModel that diffusers has made, with the fields of a system's network."""
    torch.manual_seed(5)
    network = UNet2DModel(**weights.make_diffusers_arguments(system.config) | changes).eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_(std=0.1)
    network.save_pretrained(folder)
    return network


def test_a_folder_that_diffusers_made(tmp_path):
    """Oracle: the outputs of diffusers' network; a width of heads that says the same is taken."""
    system, nets = made({"class_cond": True, "num_classes": 7, "attention_resolutions": [], "num_heads": 1})
    network = theirs(tmp_path / "theirs", system, attention_head_dim=64)
    ((values, notes),) = read_weights_adapted_to_system(tmp_path / "theirs", system).values()
    nets["denoiser"].load_state_dict(values)
    x, t, y = torch.randn(3, 3, 8, 8), torch.tensor([0, 500, 999]), torch.tensor([0, 6, 3])
    with torch.no_grad():
        torch.testing.assert_close(nets["denoiser"](x, t, y), network(x, t, y).sample, rtol=1e-4, atol=1e-5)
    more, _ = made({"class_cond": True, "num_classes": 9, "attention_resolutions": [], "num_heads": 1})
    ((values, notes),) = read_weights_adapted_to_system(tmp_path / "theirs", more).values()
    assert ", 1 replaced, 0 left" in notes[0] and notes[1].startswith("label_emb.weight: 7 rows in the file, 9 in the")


WRONG = {
    "another class": (
        lambda f: edited(f, _class_name="AutoencoderKL"),
        "of class AutoencoderKL, system iddpm takes UNet",
    ),
    "other heads": (
        lambda f: edited(f, attention_head_dim=8),
        "attention_head_dim is 8 .* makes 8 heads, and model.num_heads is 4",
    ),
    "other shift": (lambda f: edited(f, resnet_time_scale_shift="default"), "model.use_scale_shift_norm"),
    "other sinusoids": (lambda f: edited(f, flip_sin_to_cos=False), "flip_sin_to_cos is False .* True by this network"),
    "other levels": (lambda f: edited(f, block_out_channels=[32, 64, 96]), r"block_out_channels is \[32, 64, 96\]"),
    "other timesteps": (lambda f: edited(f, time_embedding_type="learned"), "rescale_timesteps and diffusion_steps"),
    "labels": (lambda f: edited(f, num_class_embeds=10), "num_class_embeds is 10 in config.json, and None"),
    "labels of another kind": (lambda f: edited(f, class_embed_type="timestep"), "class_embed_type is timestep"),
    "no weights": (lambda f: (f / FILE).unlink(), "there is no file"),
    "a weight missing": (
        lambda f: lacking(f, "down_blocks.1.attentions.0.to_k.weight"),
        "qkv.weight is absent in the file",
    ),
    "another shape": (
        lambda f: lacking(f, "conv_in.weight", torch.ones(32, 1, 3, 3)),
        r"input_blocks.0.0.weight is \(32, 1, 3, 3\) in the file and \(32, 3, 3, 3\) in .* in_channels",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(tmp_path, case):
    """Oracle: the fault put in, named with both sides."""
    spoil, words = WRONG[case]
    system, _ = made()
    theirs(tmp_path / "theirs", system)
    spoil(tmp_path / "theirs")
    with pytest.raises(ValueError, match=words) as caught:
        read_weights_adapted_to_system(tmp_path / "theirs", system)
    assert len(str(caught.value).splitlines()) == 1


def test_timesteps_that_were_trained(tmp_path):
    """Oracle: a table of timesteps that is no longer that of the sinusoids."""
    system, nets = made(CASES["timesteps rescaled"])
    to_diffusers.save_export(system, nets, tmp_path / "out")
    folder = tmp_path / "out" / "unet"
    lacking(folder, "time_proj.weight", load_file(folder / FILE)["time_proj.weight"] + 0.01)
    with pytest.raises(ValueError, match="time_proj.weight holds other timesteps than rescale_timesteps over 400"):
        read_weights_adapted_to_system(folder, system)
