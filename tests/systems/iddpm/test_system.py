"""What is particular to the IDDPM system: loss-aware timesteps, labels, likelihood, super-resolution."""

import math

import pytest
import torch

from dstrain import rng, systems
from dstrain.diffusion import samplers
from dstrain.diffusion.timesteps import LossSecondMomentSampler
from dstrain.nn.pixels import convert_to_uint8
from dstrain.recipe import Samples
from dstrain.systems.base import Request
from tests.support.tiny_iddpm import AWARE, LABELS, build, random, warm

# -------------------------------------------------------------------------------------------------------------- losses


def test_expectation_of_the_weighed_loss(monkeypatch):
    """Oracle: the mean over all timesteps: the sum of p(t) * (weight * loss)(t), t by t, under known p(t)."""
    system = warm(build(learn_sigma=True, **AWARE))
    nets, p = random(system), system.timesteps.get_probabilities()
    assert float(p.max() / p.min()) > 5  # far from uniform
    one = system.encode(system.synthetic(1))
    example = {name: tensor.expand(20, *tensor.shape[1:]) for name, tensor in one.items()}
    middles = {"aware": (p.cumsum(0) - p / 2).float(), "uniform": (torch.arange(20) + 0.5) / 20}

    def terms(kind):
        monkeypatch.setattr("dstrain.systems.iddpm.system.rng.uniform", lambda key, name: middles[kind])
        return system.compute_denoiser_loss(nets, example) if kind == "aware" else system.evaluate(nets, example)

    aware, uniform = terms("aware"), terms("uniform")
    assert torch.equal(aware["timestep"], torch.arange(20)) and torch.equal(aware["loss_seen"], uniform["loss"])
    for name, term in (("loss", aware["loss_each"]), ("mse", aware["mse"]), ("vb", aware["vb"])):
        torch.testing.assert_close((p * term).sum(), uniform[name].double().mean(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(aware["loss"], aware["loss_each"].mean())
    assert torch.equal(aware["quartile"], torch.arange(20) // 5)


def test_observe():
    """Oracle: a sampler that is told the same; a loss that is not finite leaves no trace."""
    system, other = build(**AWARE), LossSecondMomentSampler(20, 3, 0.01)
    assert system.watched == ("timestep", "loss_seen") and build().watched == ()
    t, losses = torch.tensor([3, 3, 7, 5, 3]), torch.tensor([1.0, math.nan, 2.0, math.inf, 4.0])
    system.observe({"timestep": t, "loss_seen": losses})
    other.observe(t[[0, 2, 4]], losses[[0, 2, 4]])
    found, expected = system.state_dict(), other.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    again = build(**AWARE)
    again.load_state_dict(found)
    assert torch.equal(again.timesteps.get_probabilities(), system.timesteps.get_probabilities())


def test_held_out_figures_know_no_history():
    """Oracle: the evaluation of a system with uniform timesteps, and of the same one before it learned."""
    aware, plain = build(**AWARE), build()
    nets, example = random(plain), plain.encode(plain.synthetic(6))
    before, expected = aware.evaluate(nets, example), plain.evaluate(nets, example)
    trained = aware.loss("denoiser", nets, example)["timestep"]
    warm(aware)
    after = aware.evaluate(nets, example)
    assert all(
        torch.equal(before[name], expected[name]) and torch.equal(after[name], expected[name]) for name in expected
    )
    assert not torch.equal(aware.loss("denoiser", nets, example)["timestep"], trained)
    assert "timestep" not in plain.loss("denoiser", nets, example)


@pytest.mark.parametrize("changes", [{"learn_sigma": True}, {"small_size": 4, "learn_sigma": True} | LABELS])
def test_bfloat16(changes):
    """Oracle: the float32 network with the same (rounded) weights; the loss is float32."""
    system = build(**changes)
    example = system.encode(system.synthetic(16))
    half = system.loss("denoiser", {"denoiser": random(system)["denoiser"].bfloat16()}, example)
    full = system.loss("denoiser", random(system), example)
    assert half["loss"].dtype == torch.float32
    torch.testing.assert_close(half["mse"], full["mse"], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("changes", [AWARE, {"use_kl": True} | AWARE, {"small_size": 4}])
def test_learns(changes):
    """Oracle: a loss that falls: forty steps on constant images of two classes."""
    torch.manual_seed(0)
    system = build(learn_sigma=True, class_cond=True, num_classes=2, **changes)
    nets = system.networks()
    optimizer = torch.optim.AdamW(nets["denoiser"].parameters(), lr=3e-3)
    label = torch.arange(16) % 2
    batch = {"image": (255 * label).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8), "label": label}
    losses = []
    for step in range(40):
        example = system.encode(batch | {"key": rng.keys(0, step, torch.arange(16))})
        terms = system.loss("denoiser", nets, example)
        optimizer.zero_grad()
        terms["loss"].backward()
        optimizer.step()
        if system.watched:
            system.observe({name: terms[name] for name in system.watched})
        losses.append(float(terms["loss"].detach()))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


# -------------------------------------------------------------------------------------------------------------- labels


def test_labels_of_a_request():
    """Oracle: the labels given, else seed modulo num_classes; none reach an unconditional network."""
    seen = []

    def network(x, t, **conditions):
        seen.append([labels.tolist() for labels in conditions.values()])
        return x

    nets, seeds = {"denoiser": network}, torch.tensor([3, 12])
    build(**LABELS).sample(nets, Request(seeds, num_steps=3))
    build(**LABELS).sample(nets, Request(seeds, {"label": torch.tensor([5, 6])}, num_steps=1))
    build().sample(nets, Request(seeds, num_steps=2))
    assert seen == [[[3, 2]]] * 3 + [[[5, 6]]] + [[]] * 2
    assert build(**LABELS).make_conditions(4, (7, 2))["label"].tolist() == [7, 2, 7, 2]
    assert build(**LABELS).make_conditions(11)["label"].tolist() == [*range(10), 0] and build().make_conditions(3) == {}


def test_dropped_labels():
    """Oracle: the draws of the key; the share is class_dropout_prob; evaluation drops none;
    without it there is no row.
    """
    system, seen = build(**LABELS, class_dropout_prob=0.25, schedule_sampler="loss-second-moment"), []

    def network(x, t, y):
        seen.append(y)
        return x

    example = system.encode(system.synthetic(4000))
    system.compute_denoiser_loss({"denoiser": network}, example)
    system.evaluate({"denoiser": network}, example)
    dropped = rng.uniform(example["key"], "drop") < 0.25
    assert torch.equal(seen[0], torch.where(dropped, 10, example["label"])) and torch.equal(seen[1], example["label"])
    assert float(dropped.float().mean()) == pytest.approx(0.25, abs=0.03)

    def rows(**changes):
        return len(build(**changes).networks()["denoiser"].label_emb.weight)

    assert rows(**LABELS, class_dropout_prob=0.1) == 11 and rows(**LABELS) == 10
    assert not hasattr(build(class_dropout_prob=0.1).networks()["denoiser"], "label_emb")
    with pytest.raises(ValueError, match=r"labels: \[10\] are not among the 10 classes"):
        system.make_conditions(1, (10,))


@pytest.mark.parametrize("changes", [{}, {"small_size": 4, "rescale_timesteps": False}])
def test_guidance(changes):
    """Oracle: DDPM by hand: the null's prediction plus scale times the difference, within the interval; the variances
    are the conditional's; guidance 1 is the plain network.
    """
    system = build(**LABELS, class_dropout_prob=0.1, learn_sigma=True, **changes)
    nets, seeds = random(system), torch.tensor([3, 12])
    conditions = {"label": torch.tensor([5, 6])}
    if changes:
        conditions |= system.conditions_from(system.synthetic(2)["image"])
    noise = system.diffusion.tables["sqrt_recipm1_alphas_cumprod"]

    def by_hand(scale, low, high):
        def network(x, t):
            y = conditions["label"]

            def call(y):
                return nets["denoiser"](x, t, **({"low_res": conditions["low_res"]} if changes else {}), y=y)

            plain, null = call(y), call(torch.full_like(y, 10))
            guided = null[:, :1] + scale * (plain[:, :1] - null[:, :1])
            inside = low <= float(noise[round(float(t[0]) * (1 if changes else 20 / 1000))]) <= high
            return torch.cat((guided, plain[:, 1:]), dim=1) if inside else plain

        keys = rng.keys_of_seeds(seeds)

        def draw(name):
            return rng.normal(keys, name, (1, 8, 8))

        x = samplers.sample_ancestral(system.diffusion, network, draw("start"), lambda i: draw(f"noise/{i}"), True)
        return convert_to_uint8(x)

    levels = (float(noise[4]), float(noise[11]))
    for scale, interval in ((3.0, None), (3.0, levels), (1.0, None)):
        found = system.sample(nets, Request(seeds, conditions, 20, "ddpm", scale, guidance_interval=interval))
        expected = by_hand(scale, *(interval or (0, math.inf)))
        assert (found.int() - expected.int()).abs().max() <= 1 and expected.float().std() > 5
    system.check_sampling(Samples(guidance_rescale=0.5, guidance_interval=(1, 2)))


def test_labels_out_of_range():
    """Oracle: a ValueError that names them and the classes there are, wherever labels come from."""
    system, seeds = build(**LABELS), torch.arange(2)
    batch = system.synthetic(2) | {"label": torch.tensor([4, 10])}
    for attempt in (
        lambda: system.make_conditions(2, (4, 10)),
        lambda: system.encode(batch),
        lambda: system.sample(random(system), Request(seeds, {"label": torch.tensor([4, 10])}, 2)),
    ):
        with pytest.raises(ValueError, match=r"labels: \[10\] are not among the 10 classes, 0 to 9"):
            attempt()
    with pytest.raises(ValueError, match="-1"):
        system.make_conditions(2, (-1,))
    with pytest.raises(ValueError, match="knows no classes"):
        build().make_conditions(2, (1,))
    example = system.encode(system.synthetic(2))
    del example["label"]
    with pytest.raises(ValueError, match="class_cond=false"):
        system.loss("denoiser", random(system), example)


# ------------------------------------------------------------------------------------------------ sampling, likelihood


def test_requests_that_do_not_fit():
    """Oracle: a ValueError that names the choices."""
    system, seeds = build(), torch.arange(1)
    nets = random(system)
    for request, words in (
        (Request(seeds, sampler="euler"), "none of dpm.*, ddpm, ddim"),
        (Request(seeds, num_steps=21), "21 is not between 1 and the 20"),
        (Request(seeds, num_steps=5, guidance_scale=2.0), "no null label; .*_scale 1, or train with"),
    ):
        with pytest.raises(ValueError, match=words):
            system.sample(nets, request)
    with pytest.raises(ValueError, match=r"\(1, 8, 8\).*\(3, 8, 8\)"):
        system.encode({"image": torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "key": torch.zeros(1, dtype=torch.int64)})


@pytest.mark.parametrize(
    "respacing, sampler, num_steps, visited",
    [
        ("", "ddim", 5, [16, 12, 8, 4, 0]),
        ("", "ddpm", 5, [19, 14, 10, 5, 0]),
        ("", "ddim", 6, [19, 15, 11, 8, 4, 0]),
        ("2,3", "ddpm", 5, [19, 14, 10, 9, 0]),
        ("2,3", "ddim", 2, [10, 0]),
    ],
)
def test_timesteps_of_a_chain(respacing, sampler, num_steps, visited):
    """Oracle: the timesteps written out; timestep_respacing holds where it keeps as many as the request asks for."""
    seen = []

    def network(x, t):
        seen.append(float(t[0]))
        return x

    system = build(timestep_respacing=respacing, rescale_timesteps=False)
    system.sample({"denoiser": network}, Request(torch.arange(1), num_steps=num_steps, sampler=sampler))
    assert seen == visited


@pytest.mark.parametrize(
    "sampler, spacing, num_steps, visited",
    [
        ("ddim", "trailing", 5, [19, 15, 11, 7, 3]),
        ("unipc", "leading", 2, [10, 0]),
        ("dpm++", None, 2, [10, 0]),
        ("heun", None, 3, [10, 0, 0]),
        ("heun", "linspace", 5, [19, 10, 0, 0]),
    ],
)
def test_spacings_of_a_request(sampler, spacing, num_steps, visited):
    """Oracle: the timesteps written out; timestep_respacing holds where no spacing is named and its number fits."""
    seen = []

    def network(x, t):
        seen.append(int(t[0]))
        return 0 * x

    system = build(timestep_respacing="ddim2", rescale_timesteps=False)
    system.sample({"denoiser": network}, Request(torch.arange(1), {}, num_steps, sampler, spacing=spacing))
    assert seen == visited


def test_pictures_are_inverted():
    """Oracle: the pictures; what an upsampler is given stays."""
    system = build(small_size=4)
    images = torch.randint(100, 156, (2, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    remaining = system.diffusion.tables["alphas_cumprod"].float()

    def network(x, t, low_res):  # optimal for pixels of mean 0 and deviation 0.2
        share = remaining[(t * 20 / 1000).round().long()].view(-1, 1, 1, 1)
        return (1 - share).sqrt() / (share * 0.04 + 1 - share) * x

    conditions = {"invert": images} | system.conditions_from(images)
    back = system.sample({"denoiser": network}, Request(torch.arange(2), conditions, 20))
    # Twenty steps of first order, there and back: contrast is lost, the pattern is not.
    assert float(torch.corrcoef(torch.stack((back.flatten().float(), images.flatten().float())))[0, 1]) > 0.99


def test_measure():
    """Oracle: bits_per_dim with the noise of the key, in ascending order; sample by sample; timestep_respacing."""
    system = build(learn_sigma=True, timestep_respacing="4,4")
    nets, example = random(system), system.encode(system.synthetic(3))
    terms = system.measure(nets, example, 5)

    def noise(i):
        return rng.normal(example["key"], f"bound/{i}", (1, 8, 8))

    expected = system.diffusion.respace("5").compute_bits_per_dim(nets["denoiser"], example["x_start"], noise)
    assert torch.equal(terms["total"], expected["total"]) and torch.equal(terms["vb"], expected["vb"].flip(1))
    assert terms["timestep"].tolist() == [[0, 5, 10, 14, 19]] * 3
    torch.testing.assert_close(terms["total"], terms["prior"] + terms["vb"].sum(1))
    alone = system.measure(nets, {name: tensor[1:2] for name, tensor in example.items()}, 5)
    torch.testing.assert_close(alone["vb"], terms["vb"][1:2], rtol=1e-4, atol=1e-6)
    assert system.measure(nets, example)["timestep"][0].tolist() == [0, 3, 6, 9, 10, 13, 16, 19]
    with pytest.raises(ValueError, match="21 is not between 1 and the 20"):
        system.measure(nets, example, 21)


# ---------------------------------------------------------------------------------------------------- super-resolution


def test_small_pictures_are_means_of_squares():
    """Oracle: the mean of every square of pixels, written out; from data, from pictures of either size."""
    system = build(small_size=4, in_channels=3)
    batch = system.synthetic(2)
    example = system.encode(batch)
    pixels = batch["image"].double() / 127.5 - 1
    means = torch.stack([pixels[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]).mean(0).float()
    torch.testing.assert_close(example["low_res"], means, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(system.conditions_from(batch["image"])["low_res"], means, rtol=1e-6, atol=1e-6)
    small = torch.randint(256, (2, 3, 4, 4), dtype=torch.uint8)
    torch.testing.assert_close(system.conditions_from(small)["low_res"], small / 127.5 - 1)


def test_small_pictures_are_shown():
    """Oracle: squares of pixels that are all the small picture's; a base model shows nothing but its samples."""
    system = build(small_size=2)
    example = system.encode(system.synthetic(2))
    shown = system.make_pictures({}, example)["low_res"]
    expected = ((example["low_res"] + 1) * 127.5).round().to(torch.uint8)
    assert shown.shape == (2, 1, 8, 8)
    for row in range(4):
        assert torch.equal(shown[:, :, row::4, row::4], expected)
    assert build().make_pictures({}, {}) == {}


def test_pictures_that_do_not_fit():
    """Oracle: a ValueError with the sizes that fit, and the way to get them."""
    system, seeds = build(small_size=4), torch.arange(2)
    for shape in ((2, 1, 5, 5), (2, 3, 4, 4)):
        with pytest.raises(ValueError, match=r"low_res: .*\(1, 4, 4\) to \(1, 8, 8\)"):
            system.conditions_from(torch.zeros(shape, dtype=torch.uint8))
    with pytest.raises(ValueError, match="super-resolution needs low_res: .*--then .*--low-res PATH"):
        system.sample(random(system), Request(seeds, num_steps=2))
    with pytest.raises(ValueError, match=r"low_res: \(2, 1, 8, 8\) where .* \(2, 1, 4, 4\)"):
        system.sample(random(system), Request(seeds, {"low_res": torch.zeros(2, 1, 8, 8)}, num_steps=2))
    with pytest.raises(ValueError, match="begins from noise"):
        build().conditions_from(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
    assert system.starts_from_data and not build().starts_from_data


def test_samples_follow_the_small_picture():
    """Oracle: the same seeds with another small picture, which alone differs; evaluation sees it, too."""
    system = build(small_size=4)
    nets, seeds = random(system), torch.arange(2)
    one, two = (
        system.sample(nets, Request(seeds, {"low_res": torch.full((2, 1, 4, 4), value)}, num_steps=2))
        for value in (-0.9, 0.9)
    )
    assert not torch.equal(one, two)
    example = system.encode(system.synthetic(2))
    other = system.evaluate(nets, example | {"low_res": example["low_res"].flip(0)})
    assert not torch.isclose(other["loss"], system.evaluate(nets, example)["loss"]).any()


def test_sizes_that_are_not_square():
    """Oracle: one sample after the other, in loss and gradients; a picture of the size that is asked for, the same in
    any batch; of the model's own size that of a model of squares, to the bit."""
    section = {
        "image_size": 8,
        "in_channels": 1,
        "num_channels": 32,
        "num_res_blocks": 1,
        "channel_mult": [1, 1],
        "attention_resolutions": [4],
        "num_heads": 2,
        "diffusion_steps": 50,
        "learn_sigma": True,
    }
    system, plain = systems.build("iddpm", section | {"sizes": [[8, 8], [12, 6]]}), systems.build("iddpm", section)
    torch.manual_seed(0)
    nets = system.networks()
    with torch.no_grad():
        for weight in nets["denoiser"].parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    assert system.synthetic(2)["image"].shape == (2, 1, 6, 12)
    example = system.encode(system.synthetic(3))
    whole = system.loss("denoiser", nets, example)["loss"]
    gradients = torch.autograd.grad(whole, list(nets["denoiser"].parameters()))
    rows = [{name: values[i : i + 1] for name, values in example.items()} for i in range(3)]
    mean = sum(system.loss("denoiser", nets, row)["loss"] for row in rows) / 3
    for one, other in zip(gradients, torch.autograd.grad(mean, list(nets["denoiser"].parameters()))):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-3)
    seeds = torch.arange(3)
    wide, alone = (system.sample(nets, Request(some, num_steps=3, size=(12, 6))) for some in (seeds, seeds[1:2]))
    assert wide.shape == (3, 1, 6, 12) and (wide[1:2].int() - alone.int()).abs().max() <= 1
    assert torch.equal(
        system.sample(nets, Request(seeds, num_steps=3, size=(8, 8))), plain.sample(nets, Request(seeds, num_steps=3))
    )


def test_a_flow():
    """Oracle: rectified flow written out: x_t = (1 - t) x + t eps at a time of each key, target eps - x, one step of
    Euler's method from noise; a request of a chain's spacing is refused.
    """
    system = build(objective="flow", flow={"logit_std": None}, **LABELS)
    nets, batch = random(system), system.synthetic(4)
    example = system.encode(batch)
    eps, t = rng.normal(batch["key"], "noise", (1, 8, 8)), rng.uniform(batch["key"], "timestep")
    x_t = torch.lerp(example["x_start"], eps, t.view(-1, 1, 1, 1))
    out = nets["denoiser"](x_t, 1000 * t, batch["label"])
    expected = (out - (eps - example["x_start"])).square().flatten(1).mean(1)
    terms = system.compute_denoiser_loss(nets, example)
    torch.testing.assert_close(terms["loss_each"], expected)
    torch.testing.assert_close(system.evaluate(nets, example)["loss"], expected)
    assert torch.equal(terms["quartile"], (4 * t).long())

    seeds = torch.arange(3)
    start = rng.normal(rng.keys_of_seeds(seeds), "start", (1, 8, 8))
    with torch.no_grad():
        drawn = start - nets["denoiser"](start, torch.full((3,), 1000.0), seeds)
    found = system.sample(nets, Request(seeds, num_steps=1, sampler="euler"))
    assert torch.equal(found, convert_to_uint8(drawn))
    assert {"bits_per_dim", "loss"} <= system.measure(nets, example, 4).keys()
    with pytest.raises(ValueError, match="spacing=trailing: a flow"):
        system.check_sampling(Samples(spacing="trailing"))
