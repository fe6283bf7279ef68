"""Laws of masters and steps at every stage, on one rank in this process; see also test_engines.py."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dstrain.checkpoint.fragments import Fragment
from dstrain.engine.engines import Engines
from dstrain.engine.optimizers import ADAM, build_optimizer, set_bytes_from_reinterpreted_floats
from dstrain.recipe import Run
from tests.engine.check_engines import applied, gathered
from tests.support.engines import count_skipped_steps, engines_for, resolve
from tests.support.tiny import Tiny

pytestmark = pytest.mark.usefixtures("alone")

LR, BETAS, DECAY, EPS, SEED = 0.125, (0.5, 0.75), 0.25, 1e-3, 11
PLACES = [(stage, precision) for stage in range(4) for precision in ("fp32", "bf16")] + [
    (stage, "fp16") for stage in (1, 2, 3)
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
each_place = pytest.mark.parametrize("stage, precision", PLACES)


@pytest.fixture(autouse=True)
def fp16_on_a_cpu(monkeypatch) -> None:
    """The accelerator's word is overruled: DeepSpeed refuses fp16 on a CPU, whose kernels have it."""
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)


def run_of(micros: int = 1, **more) -> Run:
    clip, name = more.pop("clip", 0.0), more.pop("optimizer", "adamw")
    optimizer = {"name": name, "lr": LR, "betas": BETAS, "weight_decay": DECAY, "eps": EPS, "clip": clip}
    batch = {"global": 4 * micros, "micro": 4}
    return Run.model_validate({"seed": SEED, "batch": batch, "optimizer": optimizer, **more})


def engines_of(
    stage: int,
    precision: str = "fp32",
    parts: tuple[str, ...] = ("a", "b"),
    network=Tiny,
    blocks=(),
    scale: dict | None = None,
    **words,
) -> Engines:
    # DeepSpeed's own buckets take two gigabytes of addresses for each engine, and a process of many could not fork.
    config = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}}
    if stage == 3:
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 40, "sub_group_size": 300}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "bf16":
        config[precision]["check_grad_overflow"] = False  # what is not checked by DeepSpeed is by dstrain
    if precision == "fp16":
        config["fp16"] |= scale if scale is not None else {"loss_scale": 1.0}
    run = run_of(**words)
    return engines_for(
        lambda: {part: network() for part in parts},
        run,
        resolve(config, run, 1, "cuda"),
        lambda name, weight: weight.ndim >= 2,
        blocks,
    )


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)


def step(engines: Engines, part: str, factor: float = 1.0, seed: int = 0) -> None:
    x, y = data(seed)
    with engines.freeze_all_but(part) as nets:
        engines.run_backward_and_step(part, (nets[part](x) - y).square().mean() * factor)


def weights(engines: Engines, part: str) -> dict[str, Tensor]:
    return gathered(engines.masters[part], engines.masters[part].flats)


def plain(engines: Engines, part: str, precision: str) -> Tiny:
    """A network of plain torch with a part's fp32 weights, rounded as it computes."""
    network = Tiny()
    network.load_state_dict(weights(engines, part), strict=False)
    return network.to(DTYPES[precision])


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@each_place
def test_parts(stage, precision):
    """Oracle: plain networks: names, order, shapes; every element of every weight lies in one fragment."""
    engines = engines_of(stage, precision)
    shapes = {name: weight.shape for name, weight in Tiny().named_parameters()}
    assert list(engines) == ["a", "b"] and len(engines) == 2 and list(engines.modules) == ["a", "b"]
    assert engines.collect_weight_shapes("a") == engines.collect_weight_shapes("b") == shapes
    numel = sum(shape.numel() for shape in shapes.values())
    assert engines.count_weights_by_part([]) == {"a": numel, "b": numel}
    assert engines.count_weights_by_part([torch.nn.Linear(3, 2), torch.nn.Linear(1, 1)]) == {
        "a": numel,
        "b": numel,
        "frozen": 10,
    }
    for part, masters in engines.masters.items():
        assert engines[part].module is engines.modules[part] and masters.stage == stage
        seen = {name: torch.zeros(shape) for name, shape in shapes.items()}
        for fragment, view in masters.iterate_fragment_views(masters.flats):
            assert view.shape == (fragment.numel,) and view.dtype == torch.float32
            seen[fragment.name].view(-1)[fragment.start : fragment.start + fragment.numel] += 1
        assert all(bool((count == 1).all()) for count in seen.values())


@each_place
def test_before_the_first_step(stage, precision):
    """Oracle: by hand: moments are zeros, nothing was updated or skipped, no gradient has a norm yet."""
    engines = engines_of(stage, precision)
    assert applied(engines) == {} and count_skipped_steps(engines) == 0
    for masters in engines.masters.values():
        assert masters.num_updates == 0 and masters.num_skipped == 0
        for kind in ADAM:
            assert [moment.shape for moment in masters.get_moments_in_fp32(kind)] == [
                flat.shape for flat in masters.flats
            ]
            assert not any(moment.any() for moment in masters.get_moments_in_fp32(kind))
    names = ["param_norm", *(["loss_scale"] if precision == "fp16" else [])]
    assert {name for name in engines.collect_metrics() if "grad_norm" not in name} == {
        f"{part}/{name}" for part in "ab" for name in names
    }


@each_place
def test_a_step_by_hand(stage, precision):
    """Oracle: plain torch's gradient g: moments (1 - b1) g and (1 - b2) g^2, and a weight that decays and moves against
    the gradient's sign; norms; the other part stays.
    """
    engines = engines_of(stage, precision)
    begun, waiting = weights(engines, "a"), weights(engines, "b")
    network, (x, y) = plain(engines, "a", precision), data()
    network.scale.table = engines.modules["a"].scale.table.clone()
    (network(x) - y).square().mean().backward()
    gradients = {name: weight.grad.float() for name, weight in network.named_parameters()}
    engines.begin_step(LR / 2)
    assert all(group["lr"] == LR / 2 for engine in engines.values() for group in engine.optimizer.param_groups)
    step(engines, "a")
    assert applied(engines) == {"a": True} and count_skipped_steps(engines) == 0
    masters, close = engines.masters["a"], {"rtol": 1e-5 if precision == "fp32" else 2e-2, "atol": 1e-7}
    if precision != "fp32":
        close["atol"] = 1e-4
    first, second = (gathered(masters, masters.get_moments_in_fp32(kind)) for kind in ADAM)
    after = weights(engines, "a")
    for name, g in gradients.items():
        torch.testing.assert_close(first[name], (1 - BETAS[0]) * g, **close)
        torch.testing.assert_close(second[name], (1 - BETAS[1]) * g**2, **close)
        decayed = begun[name] * (1 - LR / 2 * (DECAY if g.ndim >= 2 else 0))
        mine = first[name] / (1 - BETAS[0])  # the gradient that the engine has computed itself
        torch.testing.assert_close(after[name], decayed - LR / 2 * mine / (mine.abs() + EPS), rtol=1e-4, atol=1e-6)
    figures = engines.collect_metrics()
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm().item()
    assert figures["a/grad_norm"] == pytest.approx(norm, rel=1e-5 if precision == "fp32" else 2e-2)
    assert figures["a/param_norm"] == pytest.approx(torch.cat([w.flatten() for w in after.values()]).norm().item())
    assert same(weights(engines, "b"), waiting) and engines.masters["b"].num_updates == 0 and masters.num_updates == 1
    engines.begin_step(LR)
    assert applied(engines) == {}
    step(engines, "b")
    assert applied(engines) == {"b": True} and same(weights(engines, "a"), after)
    assert engines.masters["b"].num_updates == masters.num_updates == 1


@each_place
def test_a_gradient_that_is_not_finite(stage, precision):
    """Oracle: the bits before: weights and moments of the part, and its count; the other part goes on."""
    engines = engines_of(stage, precision)
    for number, factor in enumerate((1.0, math.inf, math.nan, 1.0)):
        kept = {part: weights(engines, part) for part in "ab"}
        moments = [moment.clone() for kind in ADAM for moment in engines.masters["b"].get_moments_in_fp32(kind)]
        engines.begin_step(LR)
        step(engines, "a", seed=number)
        step(engines, "b", factor, seed=number)
        assert applied(engines) == {"a": True, "b": factor == 1.0}
        assert not same(weights(engines, "a"), kept["a"])
        if factor != 1.0:
            assert same(weights(engines, "b"), kept["b"])
            after = [moment for kind in ADAM for moment in engines.masters["b"].get_moments_in_fp32(kind)]
            assert all(torch.equal(x, y) for x, y in zip(moments, after, strict=True))
    assert (engines.masters["a"].num_updates, engines.masters["b"].num_updates) == (4, 2)
    assert (
        count_skipped_steps(engines) == engines.masters["b"].num_skipped == 2 and engines.masters["a"].num_skipped == 0
    )
    assert [engine.global_steps for engine in engines.values()] == [4, 4]
    step(engines, "b", math.nan)
    assert engines.masters["b"].num_skipped == 3  # the latest step is counted where it is asked for
    engines.masters["a"].num_skipped = 5
    assert count_skipped_steps(engines) == 5


@pytest.mark.parametrize("name", ["adamw", "muon", "lion"])
def test_optimizers_that_leave_a_step_out_on_the_device(name):
    """Oracle: torch's own mark of optimizers that read found_inf and grad_scale, as updates.py sets them."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2, 2))], "moments": [], "muon": False}]
    assert build_optimizer(groups, run_of(optimizer=name).optimizer, False)._step_supports_amp_scaling


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_moments_of_8_bits(stage, precision):
    """Oracle: the bits before, where a gradient is not finite; the moments that are set, to the 8 bits that keep them.

    The step is DeepSpeed's own here, since this optimizer cannot leave one out on the device.
    """
    pytest.importorskip("bitsandbytes")
    # Blocks of 256 values share a scale. Tensors below 4,096 elements keep 32 bits.
    engines = engines_of(stage, precision, ("a",), lambda: torch.nn.Linear(64, 128, bias=False), optimizer="adamw8bit")
    masters = engines.masters["a"]
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(DTYPES[precision])

    def take(factor: float) -> None:
        with engines.freeze_all_but("a") as nets:
            engines.run_backward_and_step("a", nets["a"](x).square().mean() * factor)

    for factor in (1.0, math.nan, math.inf, 1.0):
        engines.begin_step(LR)
        kept, codes = weights(engines, "a"), [code.clone() for _, _, code in masters.iterate_8bit_moments()]
        take(factor)
        unchanged = same(weights(engines, "a"), kept) and all(
            torch.equal(x, y) for x, (_, _, y) in zip(codes, masters.iterate_8bit_moments())
        )
        assert applied(engines)["a"] == (factor == 1.0) == (not unchanged)
    assert count_skipped_steps(engines) == 2 and codes
    for (kind, fragment, values), (same_kind, name, code) in zip(
        masters.iterate_8bit_moments_to_save(), masters.iterate_8bit_moments(), strict=True
    ):
        assert (kind, fragment) == (same_kind, Fragment(name, (len(values),), 0, len(values)))
        saved = torch.empty_like(code)
        set_bytes_from_reinterpreted_floats(saved, values)
        assert torch.equal(saved, code)
    for kind in masters.moment_kinds:
        values = [
            torch.linspace(0.5, 1.0, moment.numel()).view_as(moment) for moment in masters.get_moments_in_fp32(kind)
        ]
        masters.write_back_8bit_moments(kind, values)
        for value, moment in zip(values, masters.get_moments_in_fp32(kind), strict=True):
            torch.testing.assert_close(moment.flatten(), value.flatten(), rtol=0.03, atol=0)


@pytest.mark.parametrize("stage", range(4))
def test_a_turn(stage):
    """Oracle: by hand: the engine of the part is live, the other is its bare network without gradients to its weights,
    which end the turn as they began it, also where an error ends it.
    """
    engines = engines_of(stage)

    def trainable(part: str) -> list[bool]:
        return [weight.requires_grad for weight in engines.modules[part].parameters()]

    with engines.freeze_all_but("b") as nets:
        assert list(nets) == ["a", "b"] and nets["a"] is engines.modules["a"] and nets["b"] is engines["b"]
        assert not any(trainable("a")) and all(trainable("b"))
    assert all(trainable("a"))
    with pytest.raises(KeyError), engines.freeze_all_but("a"):
        assert all(trainable("a")) and not any(trainable("b"))
        raise KeyError
    assert all(trainable("b"))


@each_place
def test_weights_that_are_set_and_shown(stage, precision):
    """Oracle: a plain network with the same values, rounded as it computes; the masters' bits after each showing."""
    engines = engines_of(stage, precision)
    x, _ = data()
    fresh = Tiny()
    with torch.no_grad():
        for number, value in enumerate(fresh.state_dict().values()):
            value.copy_(torch.linspace(-1, 1, value.numel()).reshape(value.shape) / (number + 1) / 3)

    def mixed() -> Iterator[tuple[str, Tensor]]:
        yield "unknown", torch.zeros(3)
        yield from reversed(fresh.state_dict().items())

    engines.set_weights("a", mixed())
    masters, network = engines.masters["a"], engines.modules["a"]
    table = fresh.scale.table.clone()
    whole = {name: weight.detach().clone() for name, weight in fresh.named_parameters()}
    assert same(weights(engines, "a"), whole)
    assert torch.equal(network.scale.table, table) and network.scale.table.dtype == torch.float32
    fresh.to(DTYPES[precision]).scale.table = table
    with torch.no_grad():
        expected = fresh(x)
        torch.testing.assert_close(network(x), expected, rtol=0, atol=1e-6)
        others = [torch.zeros_like(flat) for flat in masters.flats]
        for error in (None, ValueError):
            try:
                with masters.use_flat_tensors_as_weights(others):
                    assert not network(x).any() and expected.any()
                    if error:
                        raise error
            except ValueError:
                pass
            assert same(weights(engines, "a"), whole)
            torch.testing.assert_close(network(x), expected, rtol=0, atol=1e-6)
        for flat in masters.flats:
            flat.detach().mul_(0)
        masters.copy_masters_to_network()
        # What is too small to be cut at stage 3 is whole between steps, too, so that no step has to gather it.
        kept = [weight for weight in network.parameters() if stage == 3 and weight.ds_persist]
        assert bool(kept) == (stage == 3) and all(weight.numel() == weight.ds_numel for weight in kept)
        assert not network(x).any()


@pytest.mark.parametrize("left", [False, True])
def test_what_a_step_at_stage_3_gathers_and_releases(left, monkeypatch):
    """Oracle: plain torch with the masters' values: so computes the network, also where weights were whole when the
    step began; then DeepSpeed releases them, and else it has nothing to release.
    """
    engines, released = engines_of(3, "bf16", ("a",)), []
    network, zero = engines.modules["a"], engines["a"].optimizer
    cut = [weight for weight in network.parameters() if not weight.ds_persist]
    begin, release = zero._pre_step, zero._partition_all_parameters
    monkeypatch.setattr(zero, "_pre_step", lambda: [begin(), *(weight.all_gather() for weight in cut if left)])
    monkeypatch.setattr(zero, "_partition_all_parameters", lambda: released.append(release()))
    for number in range(2):
        engines.begin_step(LR)
        step(engines, "a", seed=number)
        assert cut and all(weight.numel() == 0 for weight in cut) and len(released) == (number + 1) * left
        theirs, (x, _) = plain(engines, "a", "bf16"), data()
        theirs.scale.table = network.scale.table.clone()
        with torch.no_grad():
            torch.testing.assert_close(network(x), theirs(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage, precision", [(0, "fp32"), (0, "bf16"), (1, "bf16"), (2, "fp32"), (3, "bf16")])
def test_a_count_that_is_set(stage, precision):
    """Oracle: Adam's bias correction by hand: with zero moments and a count of 9, the tenth step takes (1 - b) g over
    1 - b^10.
    """
    engines = engines_of(stage, precision)
    masters = engines.masters["a"]
    masters.num_updates = 9
    assert masters.num_updates == 9 and engines.masters["b"].num_updates == 0
    begun = weights(engines, "a")
    engines.begin_step(LR)
    step(engines, "a")
    assert masters.num_updates == 10
    first, second = (gathered(masters, masters.get_moments_in_fp32(kind)) for kind in ADAM)
    for name, weight in weights(engines, "a").items():
        decayed = begun[name] * (1 - LR * (DECAY if weight.ndim >= 2 else 0))
        moved = first[name] / (1 - BETAS[0] ** 10) / ((second[name] / (1 - BETAS[1] ** 10)).sqrt() + EPS)
        torch.testing.assert_close(weight, decayed - LR * moved, rtol=1e-4, atol=1e-6)
    masters.reset_optimizer_state()
    assert masters.num_updates == 0 and not any(
        moment.any() for kind in ADAM for moment in masters.get_moments_in_fp32(kind)
    )


@pytest.mark.parametrize("stage", range(4))
def test_a_step_of_several_micro_batches_that_is_skipped(stage):
    """Oracle: by hand: one bad gradient of three skips the step, and the next one is of three micro-batches again."""
    engines = engines_of(stage, parts=("a",), micros=3)
    for number, factors in enumerate(((1.0, 1.0, 1.0), (1.0, math.nan, 1.0), (math.inf, 1.0, 1.0), (1.0, 1.0, 1.0))):
        engines.begin_step(LR)
        for micro, factor in enumerate(factors):
            step(engines, "a", factor, seed=3 * number + micro)
            assert applied(engines) == {"a": micro == 2 and factors == (1.0, 1.0, 1.0)}, (number, micro)
    assert (
        engines.masters["a"].num_updates == 2 and count_skipped_steps(engines) == 2 and engines["a"].global_steps == 4
    )
    assert engines["a"].micro_steps == 12


@pytest.mark.parametrize("stage", range(4))
def test_one_part_and_a_clip(stage):
    """Oracle: torch's clip_grad_norm_: moments of the clipped gradient, a figure of the whole one; no prefix."""
    engines = engines_of(stage, parts=("only",), clip=0.01)
    network, (x, y) = plain(engines, "only", "fp32"), data()
    network.scale.table = engines.modules["only"].scale.table.clone()
    (network(x) - y).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 0.01).item()
    engines.begin_step(LR)
    step(engines, "only")
    masters = engines.masters["only"]
    first = gathered(masters, masters.get_moments_in_fp32("exp_avg"))
    for name, weight in network.named_parameters():
        torch.testing.assert_close(first[name], weight.grad * (1 - BETAS[0]), rtol=1e-4, atol=1e-9)
    figures = engines.collect_metrics()
    assert set(figures) == {"grad_norm", "param_norm"} and figures["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > 0.01


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_a_scale_and_its_state(stage):
    """Oracle: DeepSpeed's documented rules: an overflow halves, so many good steps double; what one run keeps, another
    goes on with; a fixed scale keeps nothing, and a run in another precision takes nothing over.
    """
    scale = {"initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 1}
    engines = engines_of(stage, "fp16", scale=scale)
    seen = []
    for number, factor in enumerate((1.0, math.inf, 1.0, 1.0, 1.0, math.inf, math.inf)):
        engines.begin_step(LR)
        network, (x, y) = plain(engines, "a", "fp32"), data(number)
        network.scale.table = engines.modules["a"].scale.table.clone()
        (network(x) - y).square().mean().backward()
        step(engines, "a", factor, seed=number)
        assert applied(engines) == {"a": factor == 1.0}
        if factor == 1.0:  # also where the scale grows at the end of this step
            norm = torch.nn.utils.get_total_norm(weight.grad for weight in network.parameters()).item()
            assert engines.collect_metrics()["a/grad_norm"] == pytest.approx(norm, rel=2e-2)
        seen.append(engines.masters["a"].loss_scale)
    assert (
        seen == [16, 8, 8, 8, 16, 8, 4] and engines.masters["b"].loss_scale == 16 and count_skipped_steps(engines) == 3
    )
    kept = engines.masters["a"].loss_scaler_state
    assert kept["cur_scale"] == 4 and kept["cur_iter"] == 7
    other = engines_of(stage, "fp16", parts=("a",), scale=scale)
    other.masters["a"].loss_scaler_state = kept
    assert other.masters["a"].loss_scaler_state == kept and other.collect_metrics()["loss_scale"] == 4
    other.masters["a"].loss_scaler_state = {}
    assert other.masters["a"].loss_scaler_state == kept
    fixed = engines_of(stage, "fp16", parts=("a",), scale={"loss_scale": 32.0})
    fixed.masters["a"].loss_scaler_state = kept
    assert fixed.masters["a"].loss_scaler_state == {} and fixed.masters["a"].loss_scale == 32
    bf16 = engines_of(stage, "bf16", parts=("a",))
    bf16.masters["a"].loss_scaler_state = kept
    assert bf16.masters["a"].loss_scaler_state == {} and bf16.masters["a"].loss_scale is None
    # At the least scale an overflow is a step that is skipped, and no error.
    for _ in range(4):
        step(other, "a", math.inf)
    assert other.masters["a"].loss_scale == 1 and count_skipped_steps(other) == 4
