"""One contract over every system: what the loop, the engine and the checkpoints rely on."""

import zlib

import pytest
import torch

from dstrain import rng, systems
from dstrain.systems.base import Request, System
from tests.support import tokenizers

TINY = {"image_size": 8, "in_channels": 1, "patch_size": 2, "hidden_size": 32, "depth": 2, "num_heads": 2,
        "num_classes": 10}

UNET = {"image_size": 8, "in_channels": 1, "num_channels": 32, "num_res_blocks": 1, "channel_mult": [1, 1],
        "attention_resolutions": [4], "num_heads": 2, "diffusion_steps": 50, "noise_schedule": "cosine"}

TOKENS = {"num_tokens": 16, "codebook_dim": 8, "num_layers": 2, "hidden_dim": 8, "kl_weight": 1.0}
POSTERIOR = {"block_out_channels": [8, 16], "norm_num_groups": 4, "layers_per_block": 1, "kl_weight": 0.1}
PAIRS = {"image_embed_dim": 12, "max_text_len": 4, "depth": 2, "heads": 2, "dim_head": 16, "text_cond_drop_prob": 0.5,
         "timesteps": 50, "evaluate_steps": [3]}
PATCHES = {"discriminator": {"n_layers": 2, "base_channels": 16}}
CLIPS = {"image_size": 16, "num_frames": 5, "channels": 1, "dim": 32, "codebook_size": 64, "spatial_depth": 1,
         "temporal_depth": 1, "dim_head": 8, "heads": 2}
TOKEN_CLIPS = {"token_shape": [3, 2, 2], "codebook_size": 64, "temporal_patch_size": 2, "dim": 32, "depth": 2, "heads": 2,
               "dim_head": 8, "num_words": 50, "max_text_len": 4, "cond_drop_prob": 0.5}

# Small configs of every system; a system that is added to NAMES must be added here.
CASES = {
    "dit": [TINY, TINY | {"objective": "flow", "learn_sigma": False}, TINY | {"recompute": True, "in_channels": 4},
            TINY | {"learn_sigma": False, "num_classes": 1, "diffusion": {"prediction": "v", "schedule": "cosine"}}],
    "iddpm": [UNET | {"learn_sigma": True, "class_cond": True, "num_classes": 10},
              UNET | {"learn_sigma": True, "use_kl": True, "schedule_sampler": "loss-second-moment"},
              UNET | {"small_size": 4, "class_cond": True, "num_classes": 3, "use_scale_shift_norm": False},
              UNET | {"in_channels": 3, "predict_xstart": True, "sigma_small": True, "recompute": True}],
    "vae": [{"image_size": 16, "channels": 3, "discrete": TOKENS | {"num_resnet_blocks": 1}},
            {"image_size": 8, "channels": 4, "discrete": TOKENS | {"sampling": "reinmax",
                                                                  "reconstruction": "logit_laplace"}},
            {"image_size": 16, "channels": 1, "kl": POSTERIOR | PATCHES},
            {"image_size": 8, "channels": 3, "kl": POSTERIOR | {"reconstruction": "mse", "quant_conv": False}}],
    "prior": [PAIRS, PAIRS | {"self_cond": True, "prediction": "v", "loss": "huber", "recompute": True},
              PAIRS | {"max_text_len": 0, "text_cond_drop_prob": 0, "prediction": "eps", "loss": "l1",
                       "beta_schedule": "sigmoid", "norm_in": True, "embedding_proj_norm": True}],
    "phenaki.tokenizer": [CLIPS, CLIPS | PATCHES | {"image_size": [16, 24], "channels": 3, "recompute": True},
                          CLIPS | {"quantizer": "cosine", "codebook_size": 50, "codebook_dim": 4}],
    "phenaki": [TOKEN_CLIPS, TOKEN_CLIPS | {"critic": "token", "text_encodings_dim": 6, "recompute": True},
                TOKEN_CLIPS | {"critic": "self", "unconditional": True, "peg": False, "gradient_shrink": 0.5}],
}


def request_of(case, system, seeds):
    """Four steps, as each system is drawn from: guided where it can be, from data where it must."""
    name, config = case
    seeds = torch.tensor(seeds)
    if name == "dit":
        return Request(seeds, {}, 4, "heun" if config.get("objective") == "flow" else "ddpm", guidance_scale=1.5)
    if name == "phenaki":
        texts = system.encode(system.synthetic(16))
        conditions = {key: texts[key][seeds] for key in ("words", "text_encodings", "text_mask") if key in texts}
        return Request(seeds, conditions, 4, system.config.samplers[-1], 1.5 if conditions else 1.0)
    conditions = {}
    if name == "prior":
        texts = system.synthetic(16)
        conditions = {name: texts[name][seeds] for name in ("text_embed", "text_encodings", "text_mask") if name in texts}
    if system.starts_from_data:
        shown = system.synthetic(16)["image"][seeds]
        conditions = system.conditions_from(shown) | {"label": seeds % 3}
    return Request(seeds, conditions, 4, "ddpm")


@pytest.fixture(params=[(name, index) for name, cases in CASES.items() for index in range(len(cases))],
                ids=lambda case: f"{case[0]}-{case[1]}")
def case(request):
    name, index = request.param
    config = CASES[name][index]
    return name, config | ({"tokenizer": {"path": request.getfixturevalue("tokenizer")}} if name == "phenaki" else {})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(tokenizers.save(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def system(case):
    return systems.build(*case)


def networks(system):
    """Networks whose weights are all random: zero-initialized layers would hide what a loss reads."""
    nets = system.networks()
    for network in nets.values():
        for name, parameter in network.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return nets


def take(tensors, index):
    return {name: tensor[index] for name, tensor in tensors.items()}


def test_every_system_is_tested():
    """Oracle: the table of systems."""
    assert set(CASES) == set(systems.NAMES)


def test_unknown_system():
    """Oracle: a ValueError that lists the systems and proposes the nearest."""
    with pytest.raises(ValueError, match="'dti' is unknown; one of .*dit.*did you mean dit"):
        systems.build("dti", {})


def test_unknown_field(case):
    """Oracle: a ValueError that names the field."""
    name, config = case
    with pytest.raises(ValueError, match="imagesize"):
        systems.build(name, config | {"imagesize": 3})
    for field in systems.config_class(name).model_fields.values():
        assert field.description


def test_networks_are_the_parts(system):
    """Oracle: `parts`, `averaged` and `turns`."""
    nets = system.networks()
    assert list(nets) == list(system.parts)
    assert set(system.averaged) <= set(nets) and set(system.turns(0)) <= set(nets)
    assert all(parameter.numel() for network in nets.values() for parameter in network.parameters())


def test_blocks_occur(system):
    """Oracle: the modules of the networks."""
    kinds = {type(module) for network in system.networks().values() for module in network.modules()}
    assert set(system.blocks()) <= kinds


def test_every_owner_resets_all_it_owns(system):
    """Oracle: what the constructor left: nothing is initialized by a parent, nothing is forgotten."""
    for network in system.networks().values():
        for name, module in network.named_modules():
            owned = {**module._parameters, **module._buffers}
            owned = {key: tensor for key, tensor in owned.items() if tensor is not None}
            if not owned:
                continue
            with torch.no_grad():
                before = {key: tensor.clone() for key, tensor in owned.items()}
                found = []
                for junk in (7.0, float("nan")):
                    for key, tensor in owned.items():
                        tensor.fill_(junk)
                    torch.manual_seed(0)
                    module.reset_parameters()
                    found.append({key: tensor.clone() for key, tensor in owned.items()})
            for key in owned:
                assert torch.equal(found[0][key], found[1][key]), f"{name}.{key}"
                if owned[key].numel() < 64 and len(before[key].unique()) > 1:
                    continue                      # random, and too few to have a scale
                # The constructor's values, in distribution: same shape, same scale.
                scale = before[key].float().square().mean().sqrt()
                torch.testing.assert_close(found[0][key].float().square().mean().sqrt(), scale, rtol=0.5, atol=1e-6)


def test_buffers_may_be_replaced(system):
    """Oracle: the buffers and parameters of the constructor, after the engine's manner of resetting."""
    for network in system.networks().values():
        for module in network.modules():
            kept = dict(module._buffers)
            for key, buffer in kept.items():
                module._buffers[key] = torch.zeros_like(buffer)
            if kept:
                module.reset_parameters()
            for key, buffer in kept.items():
                assert torch.equal(module._buffers[key], buffer)


def test_loss(system):
    """Oracle: the contract of Terms, and a gradient for every weight that learns."""
    nets = networks(system)
    example = system.encode(system.synthetic(4))
    assert not any(tensor.requires_grad for tensor in example.values())
    for part in system.parts:
        terms = system.loss(part, nets, example)
        assert terms["loss"].shape == () and terms["loss"].requires_grad
        for name, term in terms.items():
            assert bool(term.isfinite().all()), name
            assert name == "loss" or not term.requires_grad, name
            assert term.shape in ((), (4,)) or (name in system.watched and len(term) == 4), name
        terms["loss"].backward()
        for name, parameter in nets[part].named_parameters():
            assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name
            assert bool(parameter.grad.abs().sum() > 0), name


def test_randomness_belongs_to_the_sample(system):
    """Oracle: the terms of the whole batch, sample by sample, however it is split, permuted or repeated."""
    nets = networks(system)
    torch.manual_seed(1)
    batch = system.synthetic(6)
    example = system.encode(batch)
    whole = [system.evaluate(nets, example)] + [
        {k: v for k, v in system.loss(p, nets, example).items() if len(v.shape) and len(v) == 6} for p in system.parts]
    torch.manual_seed(2)                          # a draw from global state would show
    for index in (torch.arange(6), torch.tensor([5, 0, 3, 1, 4, 2]), torch.tensor([2]), torch.tensor([1, 4])):
        example = system.encode(take(batch, index))
        again = [system.evaluate(nets, example)] + [system.loss(p, nets, example) for p in system.parts]
        for terms, expected in zip(again, whole):
            for name in expected:
                torch.testing.assert_close(terms[name], expected[name][index], rtol=1e-5, atol=1e-6)
    parts = [system.loss(part, nets, system.encode(take(batch, slice(3 * half, 3 * half + 3))))["loss"]
             for part in list(system.parts)[:1] for half in range(2)]
    part = next(iter(system.parts))
    expected = system.loss(part, nets, system.encode(batch))["loss"]
    torch.testing.assert_close(sum(parts) / 2, expected, rtol=1e-5, atol=1e-6)


def test_other_keys_draw_other_noise(case, system):
    """Oracle: different terms for different keys; the same where held-out clips are encoded without a draw."""
    nets, batch = networks(system), system.synthetic(3)
    one = system.evaluate(nets, system.encode(batch))["loss"]
    batch["key"] = rng.keys(1, 1, torch.arange(3))
    two = system.evaluate(nets, system.encode(batch))["loss"]
    same = torch.isclose(one, two)
    assert one.shape == (3,) and bool(same.all() if case[0] == "phenaki.tokenizer" else not same.any())


def test_sample(case, system):
    """Oracle: the same seeds drawn alone; one grey level is rounding of the network in another batch shape."""
    nets = networks(system)
    if type(system).sample is System.sample:
        with pytest.raises(ValueError, match="draws no samples"):
            system.sample(nets, Request(torch.arange(1)))
        return
    request = lambda seeds: request_of(case, system, seeds)
    torch.manual_seed(1)
    whole = system.sample(nets, request([3, 1, 4, 15]))
    torch.manual_seed(2)
    assert whole.dtype == (torch.uint8 if system.generates else torch.float32) and whole.shape[0] == 4
    assert torch.equal(system.sample(nets, request([3, 1, 4, 15])), whole)
    alone = torch.cat([system.sample(nets, request([seed])) for seed in (15, 4, 1, 3)]).flip(0)
    if system.generates:
        assert int((alone.int() - whole.int()).abs().max()) <= 1
    else:
        torch.testing.assert_close(alone, whole, rtol=1e-4, atol=1e-4)
    assert not torch.equal(whole[0], whole[1])


def test_pictures(system):
    """Oracle: the same samples shown alone; one grey level is rounding of the network in another batch shape."""
    nets, batch = networks(system), system.synthetic(4)
    whole = system.pictures(nets, system.encode(batch))
    for name, images in whole.items():
        assert images.dtype == torch.uint8 and len(images) == 4 and images.ndim in (4, 5)
        for number in range(4):
            alone = system.pictures(nets, system.encode(take(batch, slice(number, number + 1))))[name]
            assert int((alone[0].int() - images[number].int()).abs().max()) <= 1


def test_round_trip_of_weights_and_state(system):
    """Oracle: the state that was saved; a state of another system is refused."""
    for network in system.networks().values():
        state = network.state_dict()
        assert network.load_state_dict(state).missing_keys == []
    state = system.state_dict()
    system.load_state_dict(state)
    after = system.state_dict()
    assert state.keys() == after.keys() and all(torch.equal(state[name], after[name]) for name in state)
    with pytest.raises(ValueError):
        system.load_state_dict({"unknown": torch.ones(1)})


def test_decay(system):
    """Oracle: biases and gains do not decay, matrices do."""
    for network in system.networks().values():
        decays = {name: system.decays(name, weight) for name, weight in network.named_parameters()}
        assert any(decays.values()) and not any(value for name, value in decays.items() if name.endswith("bias"))


def test_compile_of_blocks(system):
    """Oracle: the eager block; fullgraph, so that no graph break hides."""
    block, nets = system.blocks(), networks(system)
    for network in nets.values():
        module = next((module for module in network.modules() if isinstance(module, block)), None)
        if module is None:
            continue
        calls = []
        hook = module.register_forward_hook(lambda m, inputs, out: calls.append((inputs, out)))
        system.evaluate(nets, system.encode(system.synthetic(2)))
        hook.remove()
        inputs, out = calls[0]
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*inputs), out)
