"""Files of the original trainers: what fits, what is taken of them, what is refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from dstrain.runs.weights import read_state_dict, read_weights_adapted_to_system
from tests.support.golden import fill
from tests.systems.vae.test_discrete import build as discrete
from tests.systems.vae.test_discrete import nets_of
from tests.systems.vae.test_kl import build as kl
from tests.systems.vae.test_kl import theirs_of


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["vae.pt", "dalle.pt", "deepspeed"])
def test_files_of_dalle_pytorch(tmp_path, kind):
    """Oracle: the state dict that was written, as train_vae and train_dalle write theirs."""
    system = discrete(num_resnet_blocks=1)
    state = nets_of(system)["autoencoder"].state_dict()
    hparams = {"image_size": 16, "num_tokens": 16}
    transformer = {"text_emb.weight": torch.ones(3, 2), "to_logits.1.weight": torch.ones(4, 2)}
    inside = {f"vae.{name}": tensor for name, tensor in state.items()} | transformer
    torch.save(
        {
            "vae.pt": {"hparams": hparams, "weights": state},
            "dalle.pt": {"hparams": {"dim": 2}, "vae_params": hparams, "weights": inside, "epoch": 3},
            "deepspeed": {"weights": {f"module.{name}": tensor for name, tensor in state.items()}},
        }[kind],
        tmp_path / "file.pt",
    )
    values, notes = read_weights_adapted_to_system(tmp_path / "file.pt", system)["autoencoder"]
    assert same(values, state)
    system.networks()["autoencoder"].load_state_dict(values)
    taken = f"{len(state)} weights of the part vae. were taken, 2 others left out"
    counts = f"autoencoder: {len(state)} tensors loaded, 0 replaced, {2 * (kind == 'dalle.pt')} left, from "
    assert notes[0].startswith(counts) and notes[1:] == ([taken] if kind == "dalle.pt" else [])


def test_placeholders_of_zero3(tmp_path):
    """Oracle: a ValueError with the reason and the remedy, for a file such as issue 211 of DALLE-pytorch shows."""
    system = discrete()
    state = {name: torch.ones(1) for name in nets_of(system)["autoencoder"].state_dict()}
    torch.save({"hparams": {}, "weights": state}, tmp_path / "vae.pt")
    with pytest.raises(ValueError, match=r"codebook.weight has shape \(1,\).*placeholder.*ZeRO-3.*zero_to_fp32"):
        read_weights_adapted_to_system(tmp_path / "vae.pt", system)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_tokens": 32}, r"codebook.weight is \(16, 8\) in the file and \(32, 8\).*discrete.num_tokens"),
        ({"codebook_dim": 4}, r"codebook.weight is \(16, 8\) in the file and \(16, 4\).*discrete.codebook_dim"),
        ({"num_resnet_blocks": 2}, "absent.*discrete.num_resnet_blocks"),
        ({"num_layers": 1}, "num_layers"),
    ],
)
def test_what_does_not_fit(changes, words):
    """Oracle: the message names the first differing key, both shapes and the fields to change."""
    state = nets_of(discrete(num_resnet_blocks=1))["autoencoder"].state_dict()
    with pytest.raises(ValueError, match=words):
        discrete(**{"num_resnet_blocks": 1} | changes).adapt_weights("autoencoder", state)


@pytest.mark.parametrize("old", [False, True])
def test_diffusers_folders(tmp_path, old):
    """Oracle: a folder that diffusers saved; with `old` its attention is named and shaped as in Stable Diffusion's."""
    system = kl(3)
    theirs = fill(theirs_of(system))
    theirs.save_pretrained(tmp_path)
    if old:
        names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
        state = {}
        for name, tensor in theirs.state_dict().items():
            for new, former in names.items():
                if f".{new}." in name:
                    name = name.replace(f".{new}.", f".{former}.")
                    tensor = tensor[:, :, None, None] if tensor.ndim == 2 else tensor
            state[name] = tensor.contiguous()
        assert len(state.keys() - theirs.state_dict().keys()) == 16
        save_file(state, tmp_path / "diffusion_pytorch_model.safetensors")
    values, notes = read_weights_adapted_to_system(tmp_path, system)["autoencoder"]
    assert same(values, theirs.state_dict())
    assert notes == [f"autoencoder: {len(values)} tensors loaded, 0 replaced, 0 left, from {tmp_path} (AutoencoderKL)"]
    system.networks()["autoencoder"].load_state_dict(values)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"latent_channels": 8}, "kl.latent_channels"),
        ({"quant_conv": False}, "quant_conv.*kl.quant_conv"),
        ({"mid_block_add_attention": False}, "kl.mid_block_add_attention"),
        ({"layers_per_block": 2}, "kl.layers_per_block"),
        ({"block_out_channels": [16, 16]}, "kl.block_out_channels"),
    ],
)
def test_what_does_not_fit_diffusers(changes, words):
    """Oracle: the message names the fields to change."""
    state = theirs_of(kl(3)).state_dict()
    with pytest.raises(ValueError, match=words):
        kl(3, **changes).adapt_weights("autoencoder", state)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"_class_name": "PriorTransformer"}, "of class PriorTransformer, system vae takes AutoencoderKL"),
        ({"norm_num_groups": 1}, "norm_num_groups is 1 in config.json, and .*model.kl.norm_num_groups"),
        ({"act_fn": "gelu"}, "act_fn is gelu in config.json, and silu by this network"),
    ],
)
def test_what_weights_do_not_show(tmp_path, changes, words):
    """Oracle: the fault put in config.json, beside weights that fit, in a pipeline's folder."""
    system = kl(3)
    theirs_of(system).save_pretrained(tmp_path / "vae")
    assert read_weights_adapted_to_system(tmp_path, system)["autoencoder"][1][0].endswith(
        f"0 left, from {tmp_path / 'vae'} (AutoencoderKL)"
    )
    said = json.loads((tmp_path / "vae" / "config.json").read_text())
    (tmp_path / "vae" / "config.json").write_text(json.dumps(said | changes))
    with pytest.raises(ValueError, match=words):
        read_weights_adapted_to_system(tmp_path, system)


def test_a_state_dict_with_a_weight_called_weights(tmp_path):
    """Oracle: the state dict that was written."""
    torch.save({"weights": torch.ones(2), "model": torch.zeros(1)}, tmp_path / "w.pt")
    assert read_state_dict(tmp_path / "w.pt").keys() == {"weights", "model"}


def test_a_file_of_the_other_kind(tmp_path):
    """Oracle: a ValueError that names the section to give; a part of the right kind with other
    widths is not called so.
    """
    kinds = {"discrete": discrete(), "kl": kl()}
    for theirs, ours in (("discrete", "kl"), ("kl", "discrete")):
        save_file(
            {name: tensor.contiguous() for name, tensor in nets_of(kinds[theirs])["autoencoder"].state_dict().items()},
            tmp_path / f"{theirs}.safetensors",
        )
        with pytest.raises(ValueError, match=f"the file is a {theirs} autoencoder.*set model.{theirs}"):
            read_weights_adapted_to_system(tmp_path / f"{theirs}.safetensors", kinds[ours])
