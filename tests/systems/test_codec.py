"""Our own first stages, frozen: tiny networks with random weights, exported by
dstrain.commands.export and read back.
"""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from dstrain import systems
from dstrain.commands.consolidate import Order as Consolidation
from dstrain.commands.consolidate import consolidate_weights
from dstrain.commands.export import ExportOptions, export_run
from dstrain.encoders.autoencoder import Autoencoder, hash_network
from dstrain.recipe import ConfigError, Run
from dstrain.runs import first_stage
from dstrain.systems.codec import Codec
from dstrain.systems.vae import to_diffusers
from tests.support import checkpoints

SECTIONS = {
    "discrete": (
        "vae",
        {
            "image_size": 8,
            "channels": 3,
            "discrete": {
                "num_tokens": 16,
                "codebook_dim": 8,
                "num_layers": 2,
                "hidden_dim": 8,
                "reconstruction": "logit_laplace",
            },
        },
    ),
    "kl": (
        "vae",
        {
            "image_size": 8,
            "channels": 1,
            "kl": {
                "block_out_channels": [4, 4],
                "norm_num_groups": 2,
                "layers_per_block": 1,
                "latent_channels": 3,
                "discriminator": {"n_layers": 1, "base_channels": 4},
            },
        },
    ),
    "tokenizer": (
        "phenaki.tokenizer",
        {
            "image_size": [16, 24],
            "num_frames": 5,
            "channels": 1,
            "dim": 16,
            "codebook_size": 64,
            "spatial_depth": 1,
            "temporal_depth": 1,
            "dim_head": 8,
            "heads": 2,
            "dropout": 0.5,
        },
    ),
}
FACTS = {  # kind, of_videos, codebook_size, temporal_patch_size, shape, codes_shape
    "discrete": ("tokens", False, 16, 1, (3, 8, 8), (2, 2)),
    "kl": ("latents", False, None, 1, (1, 8, 8), (3, 4, 4)),
    "tokenizer": ("tokens", True, 64, 2, (1, 16, 24), (3, 2, 3)),
}


def trained(folder, kind):
    """(system, networks) of a run that is written to `folder` with random weights."""
    name, section = SECTIONS[kind]
    run = Run.model_validate({"name": "tiny", "system": name, "model": section})
    system = systems.build(name, section)
    torch.manual_seed(0)
    nets = system.networks()
    with torch.no_grad():
        for network in nets.values():
            for weight in network.parameters():
                weight.add_(0.2 * torch.randn(weight.shape))
            network.eval()
    checkpoints.write(folder, run, nets)
    return system, nets


@pytest.fixture(scope="module", params=SECTIONS)
def exported(request, tmp_path_factory):
    """(kind, system, networks, folder of the export)"""
    root = tmp_path_factory.mktemp(request.param)
    system, nets = trained(root / "run", request.param)
    export_run(ExportOptions(root / "run", root / "export", "safetensors"))
    return request.param, system, nets, root / "export"


def test_what_it_encodes_and_decodes(exported):
    """Oracle: the trained network itself, called as its own class says; System.decode of the same networks, too."""
    kind, system, nets, folder = exported
    codec, network = Codec.load(folder), next(iter(nets.values()))
    example = system.encode(system.synthetic(4))
    pixels = example["x_start"]
    with torch.no_grad():
        if kind == "discrete":
            tokens = network.encode((pixels + 1) / 2)
            expected, picture = {"tokens": tokens}, 2 * network.decode(tokens) - 1
        elif kind == "kl":
            mean, log_variance = network.encode(pixels)
            expected = {"latent_mean": mean, "latent_std": (log_variance / 2).exp()}
            picture = network.decode(mean).clamp(-1, 1)
        else:
            passed = network(pixels, example["frames"])
            expected, picture = {"tokens": passed.tokens}, passed.video.clamp(-1, 1)
    codes = codec.encode(pixels, example.get("frames"))
    assert codes.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(codes[name], value)
    decoded = codec.decode(next(iter(codes.values())))
    torch.testing.assert_close(decoded, picture)
    assert decoded.dtype == torch.float32 and decoded.shape == pixels.shape and decoded.abs().max() <= 1
    torch.testing.assert_close(system.decode(nets, next(iter(codes.values()))), decoded)
    assert not torch.equal(decoded[0], decoded[1]), "other codes are other pictures"


def test_what_is_known_of_it(exported):
    """Oracle: the recipe's own numbers, the shapes of real codes, and the fingerprint of the trained network."""
    kind, system, nets, folder = exported
    codec = Codec.load(str(folder), "tokenizer.path")
    facts = (
        codec.kind,
        codec.of_videos,
        codec.codebook_size,
        codec.temporal_patch_size,
        codec.shape,
        codec.codes_shape,
    )
    assert facts == FACTS[kind] and codec.channels == codec.shape[0]
    example = system.encode(system.synthetic(2))
    assert next(iter(system.compute_codes(nets, example).values())).shape[1:] == codec.codes_shape
    assert (codec.path, codec.run.system, codec.key) == (str(folder), SECTIONS[kind][0], "tokenizer.path")
    assert codec.fingerprint == hash_network(*system.describe_identity(nets))


def test_it_stays_frozen(exported):
    """Oracle: the same codes and pictures in a network that trains (the tokenizer has dropout), and no gradient."""
    _, system, _, folder = exported
    codec = Codec.load(folder)
    pixels = system.encode(system.synthetic(2))["x_start"]
    before = next(iter(codec.encode(pixels).values()))
    around = torch.nn.ModuleList([codec]).train()
    assert around.training and not any(module.training for module in codec.modules())
    codec.train()
    assert not any(module.training for module in codec.modules())
    assert not any(weight.requires_grad or weight.dtype != torch.float32 for weight in codec.parameters())
    after = next(iter(codec.encode(pixels.requires_grad_()).values()))
    assert torch.equal(after, before) and not after.requires_grad and not codec.decode(before).requires_grad


def test_a_consolidated_run(tmp_path):
    """Oracle: the export of the same run: its fingerprint, with both parts, with one, and in several files."""
    system, nets = trained(tmp_path / "run", "kl")
    for name, part, size in (("both", None, 10**9), ("one", "autoencoder", 10**9), ("files", "autoencoder", 2000)):
        consolidate_weights(Consolidation(tmp_path / "run", tmp_path / name, part=part, shard_size=size))
        assert Codec.load(tmp_path / name).fingerprint == hash_network(*system.describe_identity(nets))
    assert len(list((tmp_path / "files").glob("*.safetensors"))) > 1
    consolidate_weights(Consolidation(tmp_path / "run", tmp_path / "teacher", part="discriminator"))
    with pytest.raises(ConfigError, match="does not hold the weights of autoencoder"):
        Codec.load(tmp_path / "teacher")


def test_videos_of_any_length():
    """Oracle: the whole clip's tokens and frames, on whose beginnings later frames have no influence."""
    name, section = SECTIONS["tokenizer"]
    system = systems.build(name, section)
    run = Run.model_validate({"name": "tiny", "system": name, "model": section})
    codec = Codec(system.networks()["tokenizer"], system, run, "here", "tokenizer.path")
    video = system.encode(system.synthetic(3))["x_start"]
    tokens = codec.encode(video)["tokens"]
    assert torch.equal(codec.encode(video[:, :3])["tokens"], tokens[:, :2])
    assert torch.equal(codec.encode(video[:, 0])["tokens"], tokens[:, :1]), "an image is a clip of one frame"
    frames = torch.tensor([5, 3, 1])
    noise = torch.randn(video.shape)
    padded = torch.where(torch.arange(5)[:, None, None, None] < frames.view(3, 1, 1, 1, 1), video, noise)
    encoded = codec.encode(padded, frames)["tokens"]
    assert all(torch.equal(encoded[i, :count], tokens[i, :count]) for i, count in enumerate((3, 2, 1)))
    torch.testing.assert_close(codec.decode(tokens[:, :2]), codec.decode(tokens)[:, :3])


# ------------------------------------------------------------------------------------------------------------- refusals


def test_pixels_and_codes_that_do_not_fit(exported):
    """Oracle: the shapes and numbers that were put in, the folder, the key that named it, and the remedy."""
    kind, _, _, folder = exported
    codec, place = Codec.load(folder, "model.codec.path"), re.escape(str(folder))
    shape = re.escape(str(FACTS[kind][4]))
    with pytest.raises(ConfigError, match=rf"data: .* are \(2, 4, 4\) .* {place} takes {shape}; set data.channels"):
        codec.encode(torch.zeros(1, 2, 4, 4))
    if kind == "tokenizer":
        with pytest.raises(
            ConfigError, match=f"data.num_frames: 4 frames do not fit the temporal patch of 2 in {place}"
        ):
            codec.encode(torch.zeros(1, 4, *codec.shape))
    else:
        with pytest.raises(ConfigError, match=f"model.codec.path: .* {place} encodes images, .* give videos; name"):
            codec.encode(torch.zeros(1, 5, *codec.shape))
    dtype = torch.float32 if kind == "kl" else torch.int64
    codes = torch.zeros(2, *codec.codes_shape, dtype=dtype)
    codec.decode(codes)
    other = torch.int64 if kind == "kl" else torch.float32
    words = rf"model.codec.path: codes are .* {place} decodes {codec.kind} .*; name the one that encoded them"
    for wrong in (codes[..., 1:], codes[:, None], codes[0], codes.to(other)):
        with pytest.raises(ConfigError, match=words):
            codec.decode(wrong)
    if codec.kind == "tokens":
        for value in (-1, codec.codebook_size):
            low, high = min(value, 0), max(value, 0)
            codes[1, -1, -1] = value
            with pytest.raises(ConfigError, match=f"ids go from {low} to {high}, .* 0 to {codec.codebook_size - 1};"):
                codec.decode(codes)


def test_folders_that_hold_none(tmp_path):
    """Oracle: one ConfigError for each, in one line, with the key, the folder and the remedy."""
    system, nets = trained(tmp_path / "run", "kl")
    export_run(ExportOptions(tmp_path / "run", tmp_path / "out", "safetensors"))
    weights = tmp_path / "out" / "autoencoder.safetensors"
    whole, text = load_file(weights), (tmp_path / "out" / "recipe.yaml").read_text()

    def refused(folder, words):
        with pytest.raises(ConfigError, match=f"^model.first_stage.path: {words}") as caught:
            Codec.load(folder)
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)

    refused(tmp_path / "nowhere", "there is no folder .*; write one with dstrain export RUN --format safetensors")
    refused(tmp_path / "run", ".*/run is a run and no export; write one with dstrain export RUN --format")
    to_diffusers.save_export(system, nets, tmp_path / "theirs", lambda: {"scaling_factor": 1.0})
    assert Autoencoder(str(tmp_path / "theirs")).compute_fingerprint() == Codec.load(tmp_path / "out").fingerprint
    refused(tmp_path / "theirs", ".* holds weights of diffusers and no recipe.yaml; write one with dstrain export")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", ".* holds no recipe.yaml; write one with dstrain export RUN")
    lost = {name: value for name, value in whole.items() if name != "decoder.conv_out.bias"}
    for state in (lost, whole | {"more": torch.zeros(1)}, whole | {"decoder.conv_out.bias": torch.zeros(7)}):
        save_file(state, weights)
        refused(tmp_path / "out", ".* does not hold the weights of autoencoder .*; export the run once more")
    weights.write_bytes(b"broken")
    refused(tmp_path / "out", ".* does not hold the weights of autoencoder .*; export the run once more")
    weights.unlink()
    refused(tmp_path / "out", ".*there is no autoencoder.safetensors.*; export the run once more")
    for damaged in (
        "- 3\n",
        "system: [\n",
        text.replace("system: vae", "system: vea"),
        text.replace("norm_num_groups: 2", "norm_num_groups: 3"),
    ):
        (tmp_path / "out" / "recipe.yaml").write_text(damaged)
        refused(tmp_path / "out", ".*recipe.yaml is no recipe of a run .*; export the run once more")


def test_a_system_without_codes(tmp_path):
    """Oracle: a DiT, which encodes nothing: its name, the key and the remedy; for dstrain encode also of the run."""
    section = {"image_size": 8, "in_channels": 1, "patch_size": 2, "hidden_size": 32, "depth": 1, "num_heads": 2}
    run = Run.model_validate({"name": "tiny", "system": "dit", "model": section})
    checkpoints.write(tmp_path / "run", run, systems.build("dit", section).networks())
    export_run(ExportOptions(tmp_path / "run", tmp_path / "out", "safetensors"))
    with pytest.raises(
        ConfigError, match="k: .*out is of the system dit, which encodes nothing .* name one of an auto"
    ):
        Codec.load(tmp_path / "out", "k")
    for name in ("run", "out"):
        with pytest.raises(ConfigError, match=f"RUN: .*{name} is of the system dit, which encodes nothing"):
            first_stage.open_run_as_first_stage(tmp_path / name)
