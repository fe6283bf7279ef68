"""One contract over every system: what the loop, the engine and the checkpoints rely on."""

import zlib

import pytest
import torch

from dstrain import rng, systems
from dstrain.engine.blocks import wrap_block_forwards
from dstrain.recipe import Samples
from dstrain.systems.base import Request, System
from tests.support import counting
from tests.support.cases import CASES, modules
from tests.support.cases import request as request_of


@pytest.fixture(
    params=[(name, index) for name, cases in CASES.items() for index in range(len(cases))],
    ids=lambda case: f"{case[0]}-{case[1]}",
)
def case(request, tmp_path):
    name, index = request.param
    completed = getattr(modules()[name], "completed", lambda config, folder: config)
    return name, completed(CASES[name][index], tmp_path)


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
    """Oracle: the folders of dstrain/systems that hold a system.py."""
    assert set(CASES) == set(systems.list_system_names())


def test_unknown_system():
    """Oracle: a ValueError that lists the systems and proposes the nearest."""
    with pytest.raises(ValueError, match="'dti' is unknown; one of .*dit.*did you mean dit"):
        systems.build("dti", {})


def test_choices_that_are_not_read(system):
    """Oracle: the choices that the system lists: every other one is refused by its key and its option."""
    choices = {"spacing": "karras", "eta": 0.5, "guidance_rescale": 0.5, "guidance_interval": (1, 2)}
    for name in choices.keys() - set(system.sampling):
        words = rf"samples\.{name}=.*, or --{name.replace('_', '-')}: a {type(system).__name__} does not read it"
        with pytest.raises(ValueError, match=words):
            system.check_sampling(Samples(**{name: choices[name]}))


def test_unknown_field(case):
    """Oracle: a ValueError that names the field."""
    name, config = case
    with pytest.raises(ValueError, match="imagesize"):
        systems.build(name, config | {"imagesize": 3})
    for field in systems.find_config_class(name).model_fields.values():
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
    assert set(system.list_block_classes()) <= kinds


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
                    for tensor in owned.values():
                        tensor.fill_(junk)
                    torch.manual_seed(0)
                    module.reset_parameters()
                    found.append({key: tensor.clone() for key, tensor in owned.items()})
            for key in owned:
                assert torch.equal(found[0][key], found[1][key]), f"{name}.{key}"
                if owned[key].numel() < 64 and len(before[key].unique()) > 1:
                    continue  # random, and too few to have a scale
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


def test_the_default_evaluation_gives_each_figure_once():
    """Oracle: the loss by sample, which training calls loss_each, under the name that all systems give it."""
    system = counting.Counting(counting.Config())
    nets, example = system.networks(), system.encode(system.synthetic(3))
    terms = system.evaluate(nets, example)
    assert terms.keys() == {"loss"} and torch.equal(terms["loss"], system.difference(nets, example)["loss_each"])


def test_randomness_belongs_to_the_sample(system):
    """Oracle: the terms of the whole batch, sample by sample, however it is split, permuted or repeated."""
    nets = networks(system)
    torch.manual_seed(1)
    batch = system.synthetic(6)
    example = system.encode(batch)
    whole = [system.evaluate(nets, example)] + [
        {k: v for k, v in system.loss(p, nets, example).items() if len(v.shape) and len(v) == 6} for p in system.parts
    ]
    torch.manual_seed(2)  # a draw from global state would show
    for index in (torch.arange(6), torch.tensor([5, 0, 3, 1, 4, 2]), torch.tensor([2]), torch.tensor([1, 4])):
        example = system.encode(take(batch, index))
        again = [system.evaluate(nets, example)] + [system.loss(p, nets, example) for p in system.parts]
        for terms, expected in zip(again, whole):
            for name in expected:
                torch.testing.assert_close(terms[name], expected[name][index], rtol=1e-5, atol=1e-6)
    parts = [
        system.loss(part, nets, system.encode(take(batch, slice(3 * half, 3 * half + 3))))["loss"]
        for part in list(system.parts)[:1]
        for half in range(2)
    ]
    part = next(iter(system.parts))
    expected = system.loss(part, nets, system.encode(batch))["loss"]
    torch.testing.assert_close(sum(parts) / 2, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("choice", ["all", "attention", "offload", 2])
def test_recompute(system, choice):
    """Oracle: the gradients of the same blocks that keep everything, to the last bit."""
    found = []
    for recompute in ("none", choice):
        nets = networks(system)
        for network in nets.values():
            wrap_block_forwards(network, system.list_block_classes(), recompute)
        example = system.encode(system.synthetic(2))
        for part in system.parts:
            system.loss(part, nets, example)["loss"].backward()
        found.append([weight.grad for network in nets.values() for weight in network.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_other_keys_draw_other_noise(case, system):
    """Oracle: different terms for different keys; the same where held-out clips are encoded without a draw."""
    nets, batch = networks(system), system.synthetic(3)
    one = system.evaluate(nets, system.encode(batch))["loss"]
    batch["key"] = rng.keys(1, 1, torch.arange(3))
    two = system.evaluate(nets, system.encode(batch))["loss"]
    same = torch.isclose(one, two)
    by_keys = getattr(modules()[case[0]], "EVALUATES_BY_KEYS", True) and "quantizer" not in case[1].get("discrete", {})
    assert one.shape == (3,) and bool(not same.any() if by_keys else same.all())


def test_sample(case, system):
    """Oracle: the same seeds drawn alone; one grey level is rounding of the network in another batch shape."""
    nets = networks(system)
    if type(system).sample is System.sample:
        with pytest.raises(ValueError, match="draws no samples"):
            system.sample(nets, Request(torch.arange(1)))
        return

    def drawn(seeds):
        return system.sample(nets, request_of(case[0], system, seeds))

    torch.manual_seed(1)
    whole = drawn([3, 1, 4, 15])
    torch.manual_seed(2)
    assert whole.dtype == (torch.uint8 if system.generates else torch.float32) and whole.shape[0] == 4
    assert torch.equal(drawn([3, 1, 4, 15]), whole)
    alone = torch.cat([drawn([seed]) for seed in (15, 4, 1, 3)]).flip(0)
    if system.generates:
        assert int((alone.int() - whole.int()).abs().max()) <= 1
    else:
        torch.testing.assert_close(alone, whole, rtol=1e-4, atol=1e-4)
    assert not torch.equal(whole[0], whole[1])


def test_pictures(system):
    """Oracle: the same samples shown alone; one grey level is rounding of the network in another batch shape."""
    nets, batch = networks(system), system.synthetic(4)
    whole = system.make_pictures(nets, system.encode(batch))
    for name, images in whole.items():
        assert images.dtype == torch.uint8 and len(images) == 4 and images.ndim in (4, 5)
        for number in range(4):
            alone = system.make_pictures(nets, system.encode(take(batch, slice(number, number + 1))))[name]
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


# Tables whose rows are added to a token wherever it stands, or stand for a text that is missing: single vectors.
SINGLE_VECTORS = ("positions", "places", "null")


def test_decay(system):
    """Oracle: each weight by the kind of the module that owns it: matrices, filters and tables of classes, tokens,
    words and codes decay; biases, gains of norms, places, and bare vectors of a module do not.
    """
    for network in system.networks().values():
        owners, decays = dict(network.named_modules()), set()
        for name, weight in network.named_parameters():
            above, _, leaf = name.rpartition(".")
            matrix = leaf == "weight" and weight.ndim >= 2 and "Norm" not in type(owners[above]).__name__
            expected = matrix and not any(word in SINGLE_VECTORS for word in above.split("."))
            assert system.has_weight_decay(name, weight) is expected, name
            decays.add(expected)
        assert decays == {True, False}


def test_compile_of_blocks(system):
    """Oracle: the eager block; fullgraph, so that no graph break hides. Compiled training: engine/test_blocks.py."""
    block, nets = system.list_block_classes(), networks(system)
    for network in nets.values():
        module = next((module for module in network.modules() if isinstance(module, block)), None)
        if module is None:
            continue
        calls = []
        hook = module.register_forward_hook(lambda m, inputs, out: calls.append((inputs, out)))
        system.evaluate(nets, system.encode(system.synthetic(2)))
        hook.remove()
        inputs, out = calls[0]
        torch._dynamo.reset()  # cases share the code of a block, and torch compiles one code 8 times at most
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*inputs), out)
