"""The network against diffusers' PriorTransformer, there and back, and chains against its schedulers."""

import pytest
import torch
from diffusers import DDPMScheduler, DiffusionPipeline, UnCLIPScheduler
from diffusers import PriorTransformer as Published
from diffusers.schedulers import scheduling_ddpm, scheduling_unclip

from dstrain import rng, systems
from dstrain.runs.weights import read_state_dict, read_weights_adapted_to_system
from dstrain.systems.base import Request
from dstrain.systems.prior import to_diffusers
from dstrain.systems.prior.network import PriorTransformer
from tests.support import cards

pytestmark = pytest.mark.usefixtures("exact_timesteps")

SIZE = {"image_embed_dim": 12, "max_text_len": 5, "depth": 2, "heads": 2, "dim_head": 8}
THEIRS = {"embedding_dim": 12, "num_embeddings": 5, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8}


def published(**changes):
    """A random PriorTransformer, every weight filled: what is 0 at first would hide a difference."""
    torch.manual_seed(0)
    network = Published(**(THEIRS | changes)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
        network.clip_std.abs_().add_(0.5)
    return network


def inputs(count=6, text_dim=12):
    draw = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    mask = torch.arange(5) < torch.tensor([5, 1, 3, 4, 2, 5])[:count, None]
    return (
        normal(count, 12),
        torch.tensor([0, 1, 10, 500, 998, 999])[:count],
        normal(count, text_dim),
        normal(count, 5, 12),
        mask,
    )


@pytest.mark.parametrize(
    "changes, ours",
    [
        ({}, {}),
        (
            {"norm_in_type": "layer", "embedding_proj_norm_type": "layer"},
            {"norm_in": True, "embedding_proj_norm": True},
        ),
        ({"embedding_proj_dim": 7}, {"text_embed_dim": 7, "num_candidates": 1}),
    ],
)
@pytest.mark.parametrize("masked", [True, False])
def test_the_same_network(changes, ours, masked):
    """Oracle: diffusers' PriorTransformer with random weights, to 1e-5, with and without a text mask."""
    theirs = published(**changes)
    system = systems.build("prior", SIZE | ours | {"text_cond_drop_prob": 0})
    state = theirs.state_dict()
    del state["clip_mean"], state["clip_std"]
    network = PriorTransformer(**system.config.make_network_arguments())
    network.load_state_dict(state)
    x, t, embed, encodings, mask = inputs(text_dim=ours.get("text_embed_dim", 12))
    with torch.no_grad():
        expected = theirs(x, t, embed, encodings, mask if masked else None).predicted_image_embedding
        found = network(x, t, embed, encodings, mask if masked else None)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        # What the test would not see if the inputs did not matter:
        assert not torch.allclose(network(x, t, embed, encodings.flip(1), mask if masked else None), expected)


def test_without_text_tokens():
    """Oracle: diffusers' PriorTransformer whose encoder_hid_proj_type is None, with an empty mask."""
    theirs = published(num_embeddings=0, encoder_hid_proj_type=None)
    state = {name: value for name, value in theirs.state_dict().items() if not name.startswith("clip_")}
    network = PriorTransformer(12, 12, 12, 0, 2, 2, 8, learns_null=False)
    network.load_state_dict(state)
    x, t, embed, _, _ = inputs()
    empty = torch.ones(6, 0, dtype=torch.bool)
    with torch.no_grad():
        expected = theirs(x, t, embed, None, empty).predicted_image_embedding
        torch.testing.assert_close(network(x, t, embed, text_mask=empty), expected, rtol=1e-5, atol=1e-5)


def test_later_tokens_are_not_seen():
    """Oracle: causality: the first token's state, whatever follows; padding changes nothing either."""
    network = PriorTransformer(12, 12, 12, 5, 2, 2, 8, learns_null=False)
    x, t, embed, encodings, mask = inputs()
    seen = []
    hook = network.norm_out.register_forward_hook(lambda module, given, out: seen.append(out))
    with torch.no_grad():
        network(x, t, embed, encodings, torch.ones_like(mask))
        changed = encodings.clone()
        changed[:, 3:] += 1
        network(x + 1, t, embed + 1, changed, torch.ones_like(mask))
        torch.testing.assert_close(seen[0][:, :3], seen[1][:, :3])
        assert not torch.allclose(seen[0][:, 3:], seen[1][:, 3:])
        padded = torch.where(mask[..., None], encodings, 9.0)
        torch.testing.assert_close(network(x, t, embed, padded, mask), network(x, t, embed, encodings, mask))
    hook.remove()


def ours_of(theirs, tmp_path, **changes):
    """The system and network that a published folder becomes, by way of init_from's reader."""
    theirs.save_pretrained(tmp_path / "published")
    path = str(tmp_path / "published")
    system = systems.build("prior", SIZE | {"image_embed_stats": path, "normalize_embeds": False} | changes)
    state, notes = system.adapt_weights("denoiser", read_state_dict(path))
    network = system.networks()["denoiser"]
    network.load_state_dict(state)
    return system, network.eval(), notes


@pytest.mark.parametrize("changes", [{}, {"text_cond_drop_prob": 0}, {"max_text_len": 0}])
def test_there_and_back(tmp_path, changes):
    """Oracle: the output and the statistics of the network that was imported, exported and read by diffusers again."""
    theirs = published(**({"num_embeddings": 0, "encoder_hid_proj_type": None} if "max_text_len" in changes else {}))
    system, network, notes = ours_of(theirs, tmp_path, **changes)
    assert any("null_text_embed" in note for note in notes) == ("text_cond_drop_prob" not in changes)
    out = tmp_path / "exported"
    to_diffusers.save_export(system, {"denoiser": network}, out)
    again = Published.from_pretrained(out / "prior").eval()
    assert again.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value)
    x, t, embed, encodings, mask = inputs()
    texts = (None, mask[:, :0]) if "max_text_len" in changes else (encodings, mask)
    with torch.no_grad():
        assert torch.equal(again(x, t, embed, *texts)[0], theirs(x, t, embed, *texts)[0])
    assert (out / "prior" / "null_text.safetensors").exists() == ("text_cond_drop_prob" not in changes)
    with torch.no_grad():  # as learned, and not the zeros that an absent null text begins with
        for name, weight in network.named_parameters():
            if name.startswith("null_text"):
                weight.normal_()
    to_diffusers.save_export(system, {"denoiser": network}, out)
    for path in (out, out / "prior"):  # what init_from reads
        state, _ = system.adapt_weights("denoiser", read_state_dict(path))
        assert state.keys() == network.state_dict().keys()
        assert all(torch.equal(state[name], value) for name, value in network.state_dict().items())
    example = system.encode(system.synthetic(6))
    found = to_diffusers.measure_export_errors(system, {"denoiser": network}, out, example)
    assert len(found) == 1 + ("text_cond_drop_prob" not in changes) and max(found.values()) < 1e-5
    with torch.no_grad():
        network.norm_out.bias += 1e-3
    assert min(to_diffusers.measure_export_errors(system, {"denoiser": network}, out, example).values()) > 1e-5


CLAMPED = {"sampling_clamp_l2norm": True, "sampling_final_clamp_l2norm": True, "init_image_embed_l2norm": True}
DRAWN = {
    "plain": {},
    "no tokens": {"max_text_len": 0},
    "one candidate": {"num_candidates": 1, "text_embed_dim": 7},
    "never without text": {"text_cond_drop_prob": 0},
    "clamped": CLAMPED,
    "clamped eps": CLAMPED | {"prediction": "eps"},
    "clamped v": CLAMPED | {"prediction": "v"},
    "v, linear": {"prediction": "v", "beta_schedule": "linear"},
}


@pytest.mark.parametrize("case", DRAWN)
def test_the_code_on_the_card(tmp_path, case):
    """Oracle: our chain of the trained network from the same noise, guided, with candidates and clamps, to 1e-3: the
    tables of diffusers' UnCLIPScheduler are float32, in which 1 - beta near the end of the chain keeps four digits.
    """
    torch.manual_seed(2)
    system = systems.build("prior", SIZE | DRAWN[case])
    nets = system.networks()
    with torch.no_grad():
        for weight in nets["denoiser"].parameters():
            weight.normal_(std=0.3)
    nets["denoiser"].eval()
    to_diffusers.save_export(system, nets, tmp_path / "out")
    assert cards.difference(to_diffusers, system, nets, tmp_path / "out") < 1e-3
    ours = to_diffusers.draw_reference_outputs(system, nets)
    assert ours.shape == (2, 12) and not torch.allclose(ours[0], ours[1], rtol=0.1)


def test_short_texts_are_padded(tmp_path):
    """Oracle: the same call with the padding written out: text_encodings of 3 tokens where the prior reads 5."""
    system = systems.build("prior", SIZE)
    to_diffusers.save_export(system, system.networks(), tmp_path / "out")
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out", trust_remote_code=True)
    _, _, embed, encodings, _ = inputs(2)

    def draw(*texts):
        return pipeline(*texts, num_inference_steps=4, generator=torch.Generator().manual_seed(0))

    short = draw(embed, encodings[:, :3])
    mask = torch.arange(5) < torch.tensor([[3], [3]])
    assert torch.equal(short, draw(embed, encodings, mask)) and not torch.equal(short, draw(embed, encodings))


@pytest.mark.parametrize("prediction", ["x_start", "eps"])
@pytest.mark.parametrize("total, steps", [(40, 40), (1000, 25), (1000, 7)])
def test_unclip_scheduler(tmp_path, monkeypatch, prediction, total, steps):
    """Oracle: diffusers' UnCLIPScheduler and network, read from our export, on our noise; guided by the null text."""
    system = systems.build(
        "prior", SIZE | {"prediction": prediction, "timesteps": total, "num_candidates": 1, "normalize_embeds": False}
    )
    torch.manual_seed(2)
    network = system.networks()["denoiser"].eval()
    to_diffusers.save_export(system, {"denoiser": network}, tmp_path / "out")
    theirs = Published.from_pretrained(tmp_path / "out" / "prior").eval()
    scheduler = UnCLIPScheduler.from_pretrained(tmp_path / "out" / "scheduler")
    # Its tables are float32, in which 1 - beta near the end of the chain keeps four digits: the same tables, exact.
    torch.testing.assert_close(scheduler.betas.double(), system.diffusion.tables["betas"], rtol=1e-4, atol=1e-7)
    scheduler.betas = system.diffusion.tables["betas"]
    scheduler.alphas, scheduler.alphas_cumprod = 1 - scheduler.betas, system.diffusion.tables["alphas_cumprod"]
    null = read_state_dict(tmp_path / "out" / "prior" / "null_text.safetensors")

    _, _, embed, encodings, mask = inputs(4)
    seeds = torch.arange(4)
    found = system.sample(
        {"denoiser": network},
        Request(seeds, {"text_embed": embed, "text_encodings": encodings, "text_mask": mask}, steps, "ddpm", 2.0),
    )

    keys, drawn = rng.keys_of_seeds(seeds), []

    def noise(shape, **_):
        drawn.append(rng.normal(keys, f"noise/{len(drawn)}", (12,)))
        return drawn[-1]

    monkeypatch.setattr(scheduling_unclip, "randn_tensor", noise)
    x = rng.normal(keys, "start", (12,))
    scheduler.set_timesteps(steps)
    times = scheduler.timesteps
    with torch.no_grad():
        for i, t in enumerate(times):
            with_text = theirs(x, t, embed, encodings, mask)[0]
            without = theirs(
                x,
                t,
                null["null_text_embed"].expand(4, -1),
                null["null_text_encodings"].expand(4, -1, -1),
                torch.ones_like(mask),
            )[0]
            out = without + 2.0 * (with_text - without)
            following = None if i + 1 == steps else times[i + 1]
            x = scheduler.step(out, t, x, prev_timestep=following).prev_sample
        expected = theirs.post_process_latents(x).float()
    assert len(drawn) == steps - 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_ddpm_scheduler(tmp_path, monkeypatch):
    """Oracle: diffusers' DDPMScheduler, which an export with v-prediction and another schedule names."""
    system = systems.build(
        "prior", SIZE | {"prediction": "v", "beta_schedule": "sigmoid", "timesteps": 60, "num_candidates": 1}
    )
    torch.manual_seed(2)
    network = system.networks()["denoiser"].eval()
    to_diffusers.save_export(system, {"denoiser": network}, tmp_path / "out")
    theirs = Published.from_pretrained(tmp_path / "out" / "prior").eval()
    scheduler = DDPMScheduler.from_pretrained(tmp_path / "out" / "scheduler")
    _, _, embed, encodings, mask = inputs(4)
    embed = torch.nn.functional.normalize(embed, dim=1)
    seeds = torch.arange(4)
    found = system.sample(
        {"denoiser": network},
        Request(seeds, {"text_embed": embed, "text_encodings": encodings, "text_mask": mask}, 60, "ddpm"),
    )
    keys, drawn = rng.keys_of_seeds(seeds), []

    def noise(shape, **_):
        drawn.append(rng.normal(keys, f"noise/{len(drawn)}", (12,)))
        return drawn[-1]

    monkeypatch.setattr(scheduling_ddpm, "randn_tensor", noise)
    x = rng.normal(keys, "start", (12,))
    with torch.no_grad():
        for t in scheduler.timesteps:
            x = scheduler.step(theirs(x, t, embed, encodings, mask)[0], t, x).prev_sample
    torch.testing.assert_close(found, theirs.post_process_latents(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"self_cond": True}, "self_cond"),
        ({"text_encodings_dim": 7}, "text_encodings_dim"),
    ],
)
def test_what_diffusers_cannot_express(tmp_path, changes, words):
    """Oracle: a ValueError that names the field, and no folder."""
    system = systems.build("prior", SIZE | changes)
    with pytest.raises(ValueError, match=words):
        to_diffusers.save_export(system, system.networks(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes, words", [({"heads": 1, "dim_head": 16}, "num_attention_heads is 2 in config.json, and 1 by model.heads")]
)
def test_heads_must_agree(tmp_path, changes, words):
    """Oracle: diffusers' own folder, whose weights fit another number of heads, too."""
    published().save_pretrained(tmp_path / "prior")
    stats = {"image_embed_stats": str(tmp_path / "prior"), "normalize_embeds": False}
    values, notes = read_weights_adapted_to_system(tmp_path, systems.build("prior", SIZE | stats))["denoiser"]
    assert notes[0].endswith(f"from {tmp_path / 'prior'} (PriorTransformer)") and "clip_mean" not in values
    with pytest.raises(ValueError, match=words):
        read_weights_adapted_to_system(tmp_path, systems.build("prior", SIZE | stats | changes))


def test_statistics_must_agree(tmp_path):
    """Oracle: a ValueError that names image_embed_stats; widths and files that do not fit are refused, too."""
    theirs = published()
    theirs.save_pretrained(tmp_path / "published")
    state = read_state_dict(tmp_path / "published")
    with pytest.raises(ValueError, match="set model.image_embed_stats"):
        systems.build("prior", SIZE).adapt_weights("denoiser", state)
    with pytest.raises(ValueError, match="encoder_hidden_states_proj.*max_text_len"):
        systems.build(
            "prior",
            SIZE | {"max_text_len": 0, "image_embed_stats": str(tmp_path / "published"), "normalize_embeds": False},
        ).adapt_weights("denoiser", state)
    with pytest.raises(ValueError, match="12 wide, image_embed_dim is 16"):
        systems.build(
            "prior",
            SIZE | {"image_embed_dim": 16, "image_embed_stats": str(tmp_path / "published"), "normalize_embeds": False},
        )
    with pytest.raises(ValueError, match="no clip_mean"):
        systems.build("prior", SIZE | {"image_embed_stats": str(tmp_path)})
