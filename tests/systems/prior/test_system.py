"""What is particular to the prior: losses, drops, clamps, guidance, candidates, similarities, captions."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from dstrain import rng, systems
from dstrain.data.cached.rows import pack_caption
from dstrain.data.source import pad_and_stack_texts
from dstrain.diffusion import samplers
from dstrain.encoders.text import TextEncoder
from dstrain.systems.base import Request
from dstrain.systems.prior.config import Config
from dstrain.systems.prior.network import PriorTransformer
from tests.support import towers

TINY = {
    "image_embed_dim": 6,
    "text_encodings_dim": 5,
    "max_text_len": 3,
    "depth": 1,
    "heads": 2,
    "dim_head": 4,
    "timesteps": 50,
    "num_candidates": 1,
}


def build(**changes):
    return systems.build("prior", TINY | changes)


class Recorder:
    """A network of known answers that keeps what it is told."""

    def __init__(self, answer=lambda x, t, **said: x):
        self.answer, self.calls = answer, []

    def __call__(self, x, t, **said):
        self.calls.append({"x": x, "t": t, **said})
        return self.answer(x, t, **said)


def batch_of(system, count=8):
    return system.encode(system.synthetic(count))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"prediction": "x0"}, "x_start"),
        ({"beta_schedule": "cubic"}, "sigmoid"),
        ({"loss": "l3"}, "huber"),
        ({"training_clamp_l2norm": True, "prediction": "v"}, "training_clamp_l2norm clamps"),
        ({"sampling_clamp_l2norm": True, "normalize_embeds": False}, "data of one length"),
        ({"image_embed_scale": 2.0, "image_embed_stats": "x"}, "give one of the two"),
        ({"beta_schedule": "jsd", "prediction": "eps"}, "predict x_start or v"),
        ({"evaluate_steps": [99]}, "between 1 and"),
        ({"image_embed_stats": "./nowhere"}, "nowhere"),
        ({"text_embed_dim": 4, "num_candidates": 2}, "write model.num_candidates=1"),
    ],
)
def test_config_errors(changes, words):
    """Oracle: a ValueError that names the field and the remedy."""
    with pytest.raises(ValueError, match=words):
        build(**changes)


@pytest.mark.parametrize(
    "config, millions",
    [
        (Config(), 88.7),
        (Config(depth=24, heads=32, dim_head=64, max_text_len=256), 1_224.0),
    ],
)
def test_sizes(config, millions):
    """Oracle: parameters counted by hand: 12 W^2 a block, and the maps in and out.

    The first is as wide and deep as the original's example config, which has 101.8 M (one KV head, SwiGLU).
    """
    with torch.device("meta"):
        network = PriorTransformer(**config.make_network_arguments())
    width, dim, tokens = config.heads * config.dim_head, 768, config.max_text_len
    block = 12 * width**2 + 13 * width
    around = 2 * (width**2 + width) + 3 * (dim * width + width) + (width * dim + dim) + 2 * width
    free = (tokens + 4) * width + width + dim + tokens * dim
    counted = sum(weight.numel() for weight in network.parameters())
    assert counted == config.depth * block + around + free and counted / 1e6 == pytest.approx(millions, abs=0.06)


def test_the_embeddings_are_scaled_and_left_alone():
    """Oracle: sqrt(dim) times the unit vector; the batch as it was (the original scales the caller's tensor)."""
    system = build(image_embed_dim=64, text_embed_dim=6)
    batch = system.synthetic(5)
    before = {name: value.clone() for name, value in batch.items()}
    example = system.encode(batch)
    assert all(torch.equal(batch[name], before[name]) for name in before)
    torch.testing.assert_close(example["x_start"], 8 * F.normalize(before["image_embed"], dim=1))
    torch.testing.assert_close(example["text_embed"].norm(dim=1), torch.ones(5))
    plain = build(normalize_embeds=False, image_embed_scale=3.0).encode(build().synthetic(5))
    torch.testing.assert_close(plain["x_start"], 3 * build().synthetic(5)["image_embed"])


@pytest.mark.parametrize("prediction", ["x_start", "eps", "v"])
@pytest.mark.parametrize(
    "loss, function",
    [
        ("l2", lambda e: e**2),
        ("l1", lambda e: e.abs()),
        ("huber", lambda e: torch.where(e.abs() < 1, e**2 / 2, e.abs() - 0.5)),
    ],
)
def test_losses(prediction, loss, function):
    """Oracle: the closed forms of targets and losses, from alphas_cumprod alone."""
    system = build(prediction=prediction, loss=loss)
    example, network = batch_of(system), Recorder(lambda x, t, **_: 0.3 * x)
    found = system.evaluate({"denoiser": network}, example)["loss"]
    t, x_start = network.calls[0]["t"], example["x_start"]
    noise = rng.normal(example["key"], "noise", (6,))
    signal2 = system.diffusion.tables["alphas_cumprod"].float()[t][:, None]
    signal, sigma = signal2.sqrt(), (1 - signal2).sqrt()
    x_t = signal * x_start + sigma * noise
    torch.testing.assert_close(network.calls[0]["x"], x_t)
    target = {"x_start": x_start, "eps": noise, "v": signal * noise - sigma * x_start}[prediction]
    torch.testing.assert_close(found, function(0.3 * x_t - target).mean(1), rtol=1e-4, atol=1e-5)


def test_training_clamp():
    """Oracle: the loss of the prediction brought to the data's length."""
    system = build(training_clamp_l2norm=True)
    example = batch_of(system)
    found = system.evaluate({"denoiser": Recorder(lambda x, t, **_: 5 * x)}, example)["loss"]
    network = Recorder()
    build().evaluate({"denoiser": network}, example)
    guess = math.sqrt(6) * F.normalize(network.calls[0]["x"], dim=1)
    torch.testing.assert_close(found, (guess - example["x_start"]).square().mean(1))


def test_only_texts_are_dropped():
    """Oracle: the draws of the key; the noisy image embedding of a dropped text is whole; evaluation drops none."""
    system, network = build(text_cond_drop_prob=0.25), Recorder()
    example = batch_of(system, 2000)
    system.loss("denoiser", {"denoiser": network}, example)
    system.evaluate({"denoiser": network}, example)
    dropped = rng.uniform(example["key"], "drop") < 0.25
    assert torch.equal(network.calls[0]["dropped"], dropped) and not bool(network.calls[1]["dropped"].any())
    assert float(dropped.float().mean()) == pytest.approx(0.25, abs=0.04)
    assert torch.equal(network.calls[0]["x"], network.calls[1]["x"])


def test_the_null_text():
    """Oracle: the network's own answer to the null parameters as inputs; no text of a dropped sample reaches it."""
    torch.manual_seed(0)
    system = build()
    network, example = system.networks()["denoiser"], batch_of(system, 4)
    x, t, all_of = torch.randn(4, 6), torch.arange(4), torch.ones(4, dtype=torch.bool)
    said = {name: example[name] for name in ("text_embed", "text_encodings", "text_mask")}
    found = network(x, t, **said, dropped=all_of)
    expected = network(
        x,
        t,
        network.null_text_embed.expand(4, -1),
        network.null_text_encodings.expand(4, -1, -1),
        torch.ones(4, 3, dtype=torch.bool),
    )
    torch.testing.assert_close(found, expected)
    assert torch.equal(network(x, t, **said, dropped=~all_of), network(x, t, **said))
    assert not torch.allclose(found, network(x, t, **said))
    names = dict(build(text_cond_drop_prob=0).networks()["denoiser"].named_parameters())
    assert not any(name.startswith("null") for name in names)


def request(system, count=4, **changes):
    texts = system.synthetic(16)
    conditions = {name: texts[name][:count] for name in ("text_embed", "text_encodings", "text_mask") if name in texts}
    return Request(**{"seeds": torch.arange(count), "conditions": conditions, "num_steps": 7} | changes)


def test_guidance():
    """Oracle: null + scale * (conditional - null), from two networks' answers."""
    system = build(prediction="eps")
    network = Recorder(lambda x, t, **said: torch.where(said["dropped"][:, None], 0.1 * x, 0.3 * x))
    found = system.sample({"denoiser": network}, request(system, guidance_scale=2.5))
    plain = system.sample({"denoiser": lambda x, t, **_: (0.1 + 2.5 * 0.2) * x}, request(system))
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="text_cond_drop_prob"):
        build(text_cond_drop_prob=0).sample({"denoiser": network}, request(system, guidance_scale=2.0))


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_num_steps_and_their_alphas(sampler):
    """Oracle: the number of calls, from the last timestep to 0; the shared samplers' alphas (faults 6, 11)."""
    system, network = build(timesteps=1000), Recorder(lambda x, t, **_: 0.5 * x)
    for steps in (64, 1, 1000):
        network.calls.clear()
        found = system.sample({"denoiser": network}, request(system, sampler=sampler, num_steps=steps))
        times = [int(call["t"][0]) for call in network.calls]
        assert len(times) == steps and times == sorted(times, reverse=True) and times[0] == 999
        assert steps == 1 or times[-1] == 0
    chain = system.diffusion.respace("1000")
    keys = rng.keys_of_seeds(torch.arange(4))
    x, noise = rng.normal(keys, "start", (6,)), lambda i: rng.normal(keys, f"noise/{i}", (6,))
    plain = (
        samplers.sample_ddim(chain, lambda x, t: 0.5 * x, x)
        if sampler == "ddim"
        else samplers.sample_ancestral(chain, lambda x, t: 0.5 * x, x, noise)
    )
    torch.testing.assert_close(found, plain / math.sqrt(6))


@pytest.mark.parametrize("sampler", ["dpm++", "dpm++sde", "unipc", "heun", "edm"])
def test_solvers_reach_a_perfect_prediction(sampler):
    """Oracle: a network that knows x_start; with self_cond and a guidance interval every call sees the one before."""
    system, x_start = build(timesteps=200, self_cond=True), torch.linspace(-3, 3, 6)
    network = Recorder(lambda x, t, **_: x_start.expand_as(x))
    found = system.sample(
        {"denoiser": network},
        request(
            system, sampler=sampler, num_steps=9, guidance_scale=2.0, guidance_interval=(0.1, 3.0), guidance_rescale=0.5
        ),
    )
    torch.testing.assert_close(found, (x_start / math.sqrt(6)).expand_as(found), rtol=1e-3, atol=1e-4)
    assert len(network.calls) in (8, 9)


@pytest.mark.parametrize("prediction", ["x_start", "eps", "v"])
def test_perfect_predictions_are_reached(prediction):
    """Oracle: a network that knows x_start, of components far above 1: nothing is clamped to [-1, 1] (fault 12)."""
    system = build(prediction=prediction, timesteps=200)
    goal = 4 * torch.randn(4, 6, generator=torch.Generator().manual_seed(0))

    def knows(x, t, **_):
        return system.diffusion.compute_training_target(goal, x, t, system.diffusion.predict_eps(goal, x, t))

    for sampler in ("ddim", "ddpm"):
        found = system.sample({"denoiser": knows}, request(system, sampler=sampler, num_steps=20))
        torch.testing.assert_close(found, goal / math.sqrt(6), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "prediction, schedule",
    [("x_start", "cosine"), ("eps", "cosine"), ("v", "cosine"), ("x_start", "jsd"), ("v", "jsd")],
)  # eps with jsd is refused
def test_clamps(prediction, schedule):
    """Oracle: lengths: of the noise that a chain begins from, of x_start at each step, and of what is drawn."""
    changes = {"prediction": prediction, "beta_schedule": schedule}
    network = Recorder(lambda x, t, **_: 0.2 * x)
    system = build(init_image_embed_l2norm=True, **changes)
    assert torch.isfinite(system.sample({"denoiser": network}, request(system))).all()
    torch.testing.assert_close(network.calls[0]["x"].norm(dim=1), torch.full((4,), math.sqrt(6)))
    free = build(**changes).sample({"denoiser": network}, request(system))
    assert not torch.allclose(free.norm(dim=1), torch.ones(4), rtol=1e-2)
    for name in ("sampling_final_clamp_l2norm", "sampling_clamp_l2norm"):
        system = build(**{name: True}, **changes)
        for sampler in ("ddim", "ddpm"):
            found = system.sample({"denoiser": network}, request(system, sampler=sampler))
            torch.testing.assert_close(found.norm(dim=1), torch.ones(4), rtol=1e-4, atol=1e-4)


def test_best_of_candidates():
    """Oracle: candidates drawn one by one from their own names, and the argmax of their cosines with the text."""
    torch.manual_seed(0)
    system, one = build(num_candidates=5), build()
    nets = system.networks()
    asked = request(system, 6, sampler="ddpm")
    found, text = system.sample(nets, asked), asked.conditions["text_embed"]
    keys = rng.keys_of_seeds(asked.seeds)
    drawn = system._draw_candidate_embeddings(nets, one._prepare_text_inputs(asked.conditions), keys, asked, 5)
    cosines = F.cosine_similarity(drawn, text[None], dim=2)
    torch.testing.assert_close(F.cosine_similarity(found, text, dim=1), cosines.max(0).values)
    torch.testing.assert_close(drawn[0], one.sample(nets, asked), rtol=1e-5, atol=1e-5)
    assert len(cosines.argmax(0).unique()) > 1 and not torch.allclose(drawn[0], drawn[1])
    third = Request(asked.seeds[2:3], {name: value[2:3] for name, value in asked.conditions.items()}, 7, "ddpm")
    torch.testing.assert_close(found[2:3], system.sample(nets, third), rtol=1e-5, atol=1e-5)


def test_self_conditioning():
    """Oracle: what the network is told: in training its own first answer for half of the samples, in a chain its last
    x_start; 0 at first."""
    system = build(self_cond=True, prediction="v")
    network = Recorder(lambda x, t, **_: 0.5 * x)
    example = batch_of(system, 400)
    system.loss("denoiser", {"denoiser": network}, example)
    first, second = network.calls
    seen = rng.uniform(example["key"], "self_cond") < 0.5
    assert not bool(first["self_cond"].any()) and 150 < int(seen.sum()) < 250
    expected = torch.where(
        seen[:, None], system.diffusion.predict_x_start(0.5 * first["x"], first["x"], first["t"]), 0.0
    )
    torch.testing.assert_close(second["self_cond"], expected)
    network.calls.clear()
    system.sample({"denoiser": network}, request(system, guidance_scale=2.0))
    before = torch.zeros(8, 6)
    for call in network.calls:
        torch.testing.assert_close(call["self_cond"], before)
        before = system.diffusion.predict_x_start(0.5 * call["x"], call["x"], call["t"])
    torch.manual_seed(0)
    learned = system.networks()["denoiser"]
    with torch.no_grad():
        learned.self_cond_proj.weight.normal_()
    said = {name: example[name][:4] for name in ("text_embed", "text_encodings", "text_mask")}
    x, t = torch.randn(4, 6), torch.arange(4)
    assert not torch.allclose(learned(x, t, **said, self_cond=x), learned(x, t, **said, self_cond=torch.zeros(4, 6)))


def test_similarities():
    """Oracle: cosines by hand of a network that always answers the same embedding."""
    system = build(evaluate_steps=[2, 5])
    goal = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    example = batch_of(system)
    terms = system.evaluate({"denoiser": lambda x, t, **_: goal}, example)

    def cosine(a, b):
        return F.cosine_similarity(a, b, dim=1)

    image, text = example["x_start"], example["text_embed"]
    expected = {"similarity/text_image": cosine(text, image)}
    for steps in (2, 5):
        expected |= {
            f"similarity/{steps}/image": cosine(goal, image),
            f"similarity/{steps}/text": cosine(goal, text),
            f"similarity/{steps}/other_text": cosine(goal, example["other_text_embed"]),
            f"similarity/{steps}/above_baseline": cosine(goal, text) - cosine(text, image),
        }
    assert terms.keys() == expected.keys() | {"loss", "quartile"}
    for name, value in expected.items():
        torch.testing.assert_close(terms[name], value, rtol=1e-4, atol=1e-4)
    shown = []

    def watch(steps):
        return shown.extend(steps) or steps

    measured = system.measure({"denoiser": lambda x, t, **_: goal}, example, 3, watch)
    assert "similarity/3/text" in measured and "similarity/2/text" not in measured and len(shown) == 3
    assert torch.equal(measured["loss"], terms["loss"]) and "similarity/50/text" in build().measure(
        {"denoiser": lambda x, t, **_: goal}, example
    )
    assert "similarity/text_image" not in build().evaluate({"denoiser": lambda x, t, **_: goal}, example)


def test_requests_that_do_not_fit():
    """Oracle: a ValueError that names the choices."""
    system = build()
    nets = system.networks()
    with pytest.raises(ValueError, match="--prompts"):
        system.sample(nets, Request(torch.arange(2)))
    with pytest.raises(ValueError, match="none of .*ddpm, ddim"):
        system.sample(nets, request(system, sampler="euler"))
    with pytest.raises(ValueError, match="51 is not between 1 and the 50"):
        system.sample(nets, request(system, num_steps=51))
    with pytest.raises(ValueError, match="model.text_encoder"):
        system.conditions_from_texts(["a cat"])


class Encoder:
    """Texts of known answers: their lengths. Keeps what it is given."""

    def __init__(self):
        self.calls = []

    def to(self, device):
        self.device = device
        return self

    def encode(self, captions):
        self.calls.append(captions)
        texts = torch.tensor([[float(len(text)), 1, 0, 0, 0, 0] for text in captions])
        return {
            "text_embed": texts,
            "text_encodings": torch.ones(len(texts), 2, 5),
            "text_mask": torch.tensor([[True, False]]).expand(len(texts), -1),
        }


def test_captions_are_encoded_where_texts_are_missing():
    """Oracle: the encoder's own answers; cached embeddings never ask for it, and short encodings are filled up."""
    system = build()
    system._encoder = Encoder()
    batch = {
        "key": torch.arange(2),
        "image_embed": torch.randn(2, 6),
        "caption": pad_and_stack_texts([pack_caption("abc"), pack_caption("de")]),
        "other_caption": pad_and_stack_texts([pack_caption("de"), pack_caption("abc")]),
    }
    example = system.encode(batch)
    expected = F.normalize(torch.tensor([[3.0, 1, 0, 0, 0, 0], [2.0, 1, 0, 0, 0, 0]]), dim=1)
    torch.testing.assert_close(example["text_embed"], expected)
    torch.testing.assert_close(example["other_text_embed"], expected.flip(0))
    assert example["text_encodings"].shape == (2, 3, 5) and example["text_mask"].tolist() == [[True, False, False]] * 2
    assert set(example) == {"key", "x_start", "text_embed", "text_encodings", "text_mask", "other_text_embed"}
    cached = {name: torch.randn(2, 6) for name in ("text_embed", "other_text_embed")}
    again = system.encode(batch | cached)  # there are no encodings: both are of one encoder
    assert all(torch.equal(again[name], example[name]) for name in example if name != "key")
    alone = build(max_text_len=0).encode(batch | cached)
    for name, values in cached.items():
        torch.testing.assert_close(alone[name], F.normalize(values, dim=1))
    with pytest.raises(ValueError, match="neither text_embed nor a caption"):
        build().encode({"image_embed": torch.randn(2, 6)})
    with pytest.raises(ValueError, match="model.text_encoder"):
        build().encode(batch)
    build().encode(build().synthetic(2))  # no encoder is named, and none is asked for
    system.encode(batch | {"image_embed": batch["image_embed"].to("meta")})  # captions stay on the host
    assert system._encoder.device.type == "meta"


def test_what_is_written_down_of_encoders(tmp_path):
    """Oracle: TextEncoder's own fingerprint, of captions that are not cached; another seed's weights have another."""
    image = {"image_embed": torch.randn(12)}
    cached, live = (
        SimpleNamespace(read_first_readable=lambda item=item: image | item, compute_fingerprint=lambda: "pairs")
        for item in ({"text_embed": torch.randn(12)}, {"caption": pack_caption("a cat")})
    )
    found = {}
    for seed in (0, 1):
        towers.sentences(tmp_path / str(seed), seed)
        system = build(image_embed_dim=12, max_text_len=0, text_encoder=str(tmp_path / str(seed)))
        assert system.fingerprint(cached) == "pairs"
        found[seed] = system.fingerprint(live)
        assert found[seed] == f"pairs text_encoder={TextEncoder(str(tmp_path / str(seed))).compute_fingerprint()}"
    assert found[0] != found[1]
    reads_tokens = build(image_embed_dim=12, text_encodings_dim=12, text_encoder=str(tmp_path / "0"))
    assert (
        reads_tokens.fingerprint(
            SimpleNamespace(
                read_first_readable=lambda: cached.read_first_readable() | live.read_first_readable(),
                compute_fingerprint=lambda: "pairs",
            )
        )
        == found[0]
    )
    for value in (1.0, 2.0, 1.0):
        save_file({"clip_mean": torch.zeros(12), "clip_std": torch.full((12,), value)}, tmp_path / "s.safetensors")
        system = build(
            image_embed_dim=12,
            max_text_len=0,
            normalize_embeds=False,
            image_embed_stats=str(tmp_path / "s.safetensors"),
        )
        found.setdefault(value * 10, system.fingerprint(cached))
    assert found[10].startswith("pairs image_embed_stats=") and found[10] != found[20]
    assert system.fingerprint(cached) == found[10]


def test_prompts_are_encoded_once():
    """Oracle: the encoder's answers one by one; 200 samples of 3 prompts are one call of 3, 130 prompts three calls."""
    system = build()
    system._encoder = Encoder()
    texts = ["a", "bcd", "ef"] * 66 + ["a", "bcd"]
    found = system.conditions_from_texts(texts)
    assert system._encoder.calls == [["a", "bcd", "ef"]] and found["text_encodings"].shape == (200, 3, 5)
    for text, embed in zip(texts, found["text_embed"]):
        torch.testing.assert_close(embed, system.conditions_from_texts([text])["text_embed"][0])
    system._encoder.calls.clear()
    system.conditions_from_texts(["x" * i for i in range(130)])
    assert [len(call) for call in system._encoder.calls] == [64, 64, 2]


def test_bfloat16():
    """Oracle: the float32 network with the same (rounded) weights; the loss is float32."""
    system = build(dim_head=32)
    torch.manual_seed(0)
    network = system.networks()["denoiser"]
    example = batch_of(system, 64)
    full = system.loss("denoiser", {"denoiser": network}, example)
    half = system.loss("denoiser", {"denoiser": network.bfloat16()}, example)
    assert half["loss"].dtype == torch.float32
    torch.testing.assert_close(half["loss"], full["loss"], rtol=0.02, atol=0.02)


def test_learns():
    """Oracle: held-out pairs of a known rule (the image is the text, turned), which its samples must follow."""
    torch.manual_seed(0)
    system = build(image_embed_dim=8, max_text_len=0, text_cond_drop_prob=0.1, dim_head=16)
    nets, turn = system.networks(), torch.linalg.qr(torch.randn(8, 8)).Q
    optimizer = torch.optim.AdamW(nets["denoiser"].parameters(), lr=5e-3)

    def example(step, count):
        key = rng.keys(0, step, torch.arange(count))
        text = rng.normal(key, "text", (8,))
        return system.encode(
            {"key": key, "image_embed": text @ turn, "text_embed": text, "other_text_embed": text.roll(1, 0)}
        )

    for step in range(300):
        loss = system.loss("denoiser", nets, example(step, 128))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    terms = system.measure(nets, example(1000, 64), 10)
    assert float(terms["similarity/10/image"].mean()) > 0.9
    assert abs(float(terms["similarity/10/other_text"].mean())) < 0.2
