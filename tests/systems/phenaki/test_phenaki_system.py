"""MaskGit and its critics as a system: losses, texts, the frozen tokenizer, samples, refusals."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from dstrain import recipe, rng, systems
from dstrain.data.cached.rows import pack_caption
from dstrain.data.source import pad_and_stack_texts
from dstrain.encoders.reader import hash_words
from dstrain.encoders.text import TextEncoder
from dstrain.recipe import Codes, ConfigError, Run
from dstrain.systems.base import Request
from dstrain.systems.phenaki import codec
from dstrain.systems.phenaki.config import Config
from dstrain.systems.phenaki.maskgit import MaskGitOutput
from tests.support import tokenizers, towers

TINY = {
    "token_shape": [3, 2, 2],
    "codebook_size": 64,
    "dim": 16,
    "depth": 1,
    "heads": 2,
    "dim_head": 8,
    "num_words": 40,
    "max_text_len": 5,
}


def build(**changes):
    return systems.build("phenaki", TINY | changes)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(tokenizers.save(tmp_path_factory.mktemp("tokenizer")))


def networks(system):
    torch.manual_seed(0)
    found = system.networks()
    with torch.no_grad():
        for network in found.values():
            for weight in network.parameters():
                weight.add_(0.2 * torch.randn(weight.shape))
    return found


class Recorder:
    """A network of known answers that keeps what it is told."""

    def __init__(self, answer):
        self.answer, self.calls = answer, []

    def __call__(self, *inputs, **said):
        self.calls.append((inputs, said))
        return self.answer(*inputs, **said)


def silent(tokens, masked, weights, uniforms=None, judges=False, **said):
    """What MaskGit might answer, a self critic with it where it judges: the next id of those drawn at even places."""
    even = (torch.arange(tokens[0].numel()) % 2 == 0).view(tokens.shape[1:])
    filled = torch.where(masked & even, (tokens + 1) % 64, tokens) if uniforms is not None else tokens
    zeros = torch.zeros(len(tokens))
    critic = torch.full(tokens.shape, 2.0) if judges else None
    return MaskGitOutput(torch.zeros((), requires_grad=True), zeros, zeros, filled, critic)


# ----------------------------------------------------------------------------------------------------------------- loss


def test_texts_are_dropped_at_their_probability():
    """Oracle: 0.25 of 4000 samples to three deviations, through the loss; the draws of the keys; none in evaluation."""
    for part, extra in (("maskgit", {}), ("critic", {"critic": "token"}), ("maskgit", {"critic": "self"})):
        system = build(cond_drop_prob=0.25, **extra)
        example = system.encode(system.synthetic(4000))
        maskgit = Recorder(partial(silent, judges="self" in extra.values()))
        critic = Recorder(lambda tokens, real, dropped, **said: torch.zeros(tokens.shape, requires_grad=True))
        nets = {"maskgit": maskgit, "critic": critic}
        system.loss(part, nets, example)
        inputs, said = (maskgit if part == "maskgit" else critic).calls[-1]
        dropped = said["dropped"] if part == "maskgit" else inputs[2]
        assert abs(float(dropped.float().mean()) - 0.25) < 3 * math.sqrt(0.25 * 0.75 / 4000)
        assert torch.equal(dropped, rng.uniform(example["key"], "drop") < 0.25)
        system.evaluate({"maskgit": maskgit, **({"critic": critic} if "token" in extra.values() else {})}, example)
        assert maskgit.calls[-1][1]["dropped"] is None


def test_a_dropped_text_reaches_nothing():
    """Oracle: the loss of the same clip with another caption: equal where the draw drops it, different elsewhere."""
    system = build(cond_drop_prob=0.5)
    nets, batch = networks(system), system.synthetic(32)
    losses = []
    for text in ("a sneaker moving left", "a trouser that moves right"):
        batch["caption"] = pack_caption(text).expand(32, -1)
        losses.append(system.loss("maskgit", nets, system.encode(batch))["cross_entropy"])
    dropped = rng.uniform(batch["key"], "drop") < 0.5
    assert torch.equal(losses[0] == losses[1], dropped) and 0 < int(dropped.sum()) < 32


def test_every_masked_token_counts_alike():
    """Oracle: sums over masked tokens / (2 / pi of the real ones), cross-entropies of full logits, padding included."""
    system = build(unconditional=True, token_shape=[3, 2, 2])
    nets, example = networks(system), system.encode(build(unconditional=True).synthetic(6))
    terms = system.evaluate(nets, example)
    net, tokens, key = nets["maskgit"], example["tokens"], example["key"]
    real, u = example["real"].repeat_interleave(4, dim=1), rng.uniform(key, "mask_ratio")
    assert int((~real).sum()) > 0
    for i in range(6):
        total = int(real[i].sum())
        count = max(1, round(total * math.cos(math.pi / 2 * u[i].item())))
        noise = torch.where(real[i], rng.uniform(key, "mask", (12,))[i], 9.0)
        masked = torch.zeros(12, dtype=torch.bool)
        masked[noise.argsort()[:count]] = True
        hidden = torch.where(masked, 64, tokens[i].flatten()).view(1, 3, 2, 2)
        states = net.trunk(hidden, example["real"][i : i + 1]).flatten(0, 3)
        each = F.cross_entropy(
            states @ net.to_logits.weight.t() + net.to_logits.bias, tokens[i].flatten(), reduction="none"
        )[masked]
        assert terms["loss"][i].item() == pytest.approx(each.sum().item() / (2 / math.pi * total), rel=1e-5)
        assert terms["cross_entropy"][i].item() == pytest.approx(each.mean().item(), rel=1e-5)
        assert terms["quartile"][i].item() == min(4 * count // total, 3)
    trained = system.loss("maskgit", nets, example)
    torch.testing.assert_close(trained["loss"], terms["loss"].mean())
    torch.testing.assert_close(trained["loss_each"], terms["loss"])


@pytest.mark.parametrize("labels", ["masked", "replaced"])
@pytest.mark.parametrize("critic", ["token", "self"])
def test_labels_of_the_critic(critic, labels):
    """Oracle: a case by hand. Of masked tokens MaskGit replaces those at even places; the critic's logit is 2 anywhere.

    With s(x) the sigmoid, each token of the label costs -log s(2), each other one -log s(-2). "masked": all real tokens
    teach. "replaced": a token that was drawn right is not, and one that was not masked teaches nothing.
    """
    system = build(critic=critic, critic_labels=labels, unconditional=True)
    example = system.encode(
        system.synthetic(3) | {"frames": torch.tensor([3, 5, 1])}
        if labels == "masked"
        else {name: value for name, value in system.synthetic(3).items() if name != "frames"}
    )
    maskgit = Recorder(partial(silent, judges=critic == "self"))
    critic_net = Recorder(lambda tokens, real, dropped: torch.full(tokens.shape, 2.0, requires_grad=True))
    nets = {"maskgit": maskgit} | ({"critic": critic_net} if critic == "token" else {})
    terms = system.loss("maskgit", nets, example)
    if critic == "token":
        terms = {f"critic_{name}": value for name, value in system.loss("critic", nets, example).items()}
        shown = critic_net.calls[0][0][0]
    else:
        assert len(maskgit.calls) == 1
        shown = example["filled"]
    masked = maskgit.calls[0][0][1].flatten(1)
    even = torch.arange(12) % 2 == 0
    assert torch.equal(shown.flatten(1) != example["tokens"].flatten(1), masked & even)
    replaced, real = (masked & even).sum(1), torch.tensor([8, 12, 4])  # 2 x 2 tokens of each latent frame
    label, all_judged, scale = (
        (masked.sum(1), real, real) if labels == "masked" else (replaced, masked.sum(1), 2 / math.pi * 12)
    )
    costs = label * math.log(1 + math.exp(-2)) + (all_judged - label) * math.log(1 + math.exp(2))
    torch.testing.assert_close(terms["critic_accuracy"], label / all_judged)
    torch.testing.assert_close(terms["critic_replaced"], replaced / masked.sum(1))
    expected = (costs / scale).mean()
    found = terms["critic_loss"].mean() if critic == "self" else terms["critic_loss"]
    torch.testing.assert_close(found, expected.to(found.dtype))


def test_the_critic_alone_meets_the_same_tokens():
    """Oracle: its loss behind MaskGit's turn; the turns that `train` names."""
    both, alone = build(critic="token"), build(critic="token", train="critic")
    nets, batch = networks(both), both.synthetic(5)
    example = both.encode(batch)
    both.loss("maskgit", nets, example)
    wanted = both.loss("critic", nets, example)
    found = alone.loss("critic", nets, alone.encode(batch))
    assert torch.equal(found["loss"], wanted["loss"]) and float(wanted["replaced"].mean()) > 0.5
    assert (both.turns(0), alone.turns(0)) == (("maskgit", "critic"), ("critic",))
    assert build(critic="token", train="maskgit").turns(7) == ("maskgit",)
    assert "filled" not in example or torch.equal(
        example["tokens"][~example["masked"]], example["filled"][~example["masked"]]
    )


def test_held_out_terms_are_of_what_learns():
    """Oracle: the terms of both; a critic that does not learn has none, one that learns alone gives the loss."""
    systems_ = {train: build(critic="token", train=train) for train in ("both", "maskgit", "critic")}
    nets, batch = networks(systems_["both"]), systems_["both"].synthetic(5)
    found = {train: system.evaluate(nets, system.encode(batch)) for train, system in systems_.items()}
    both = found["both"]
    assert not any(name.startswith("critic") for name in found["maskgit"]) and "critic_accuracy" in both
    assert all(torch.equal(value, both[name]) for name, value in found["maskgit"].items())
    assert found["critic"].keys() == both.keys() and not torch.equal(both["loss"], both["critic_loss"])
    for name, value in found["critic"].items():
        assert torch.equal(value, both["critic_loss" if name == "loss" else name])


def test_the_critic_has_a_part_and_average_of_its_own():
    """Oracle: parts and averages; a self critic is in MaskGit's part."""
    assert list(build(critic="token", critic_depth=3).networks()) == ["maskgit", "critic"]
    assert build(critic="token").averaged == ("maskgit", "critic")
    assert len(build(critic="token", critic_depth=3).networks()["critic"].trunk.transformer.layers) == 3
    assert list(build(critic="self").networks()) == ["maskgit"]


def test_temperature_of_the_critic_s_samples():
    """Oracle: at temperature 0 the likeliest ids of full logits."""
    system = build(critic="token", critic_train_sample_temperature=0, cond_drop_prob=0)
    nets, example = networks(system), system.encode(system.synthetic(4))
    system.loss("maskgit", nets, example)
    hidden, net = torch.where(example["masked"], 64, example["tokens"]), nets["maskgit"]
    states = net.trunk(hidden, example["real"], words=example["words"])
    likeliest = (states @ net.to_logits.weight.t() + net.to_logits.bias).argmax(-1)
    assert torch.equal(example["filled"], torch.where(example["masked"], likeliest, example["tokens"]))


# ---------------------------------------------------------------------------------------------------------------- texts


def test_words():
    """Oracle: crc32 by hand; case and signs do not matter; 0 fills up; long texts are cut."""
    import zlib

    found = hash_words(["A sneaker, moving LEFT!", "", "a a a a a a a"], 40, 5)
    wanted = [1 + zlib.crc32(word) % 39 for word in (b"a", b"sneaker", b"moving", b"left")]
    assert found.tolist() == [[*wanted, 0], [0] * 5, wanted[:1] * 5]
    system = build()
    texts = ["a bag moving up", "a bag moving up", "a coat"]
    batch = system.synthetic(3) | {"caption": pad_and_stack_texts([pack_caption(text) for text in texts])}
    assert torch.equal(system.encode(batch)["words"], system.conditions_from_texts(texts)["words"])
    assert torch.equal(system.make_conditions(2)["words"], torch.zeros(2, 5, dtype=torch.int64))


def test_an_encoder_by_path(tmp_path):
    """Oracle: the encoder's own encodings and mask; cached ones are taken as they are and no encoder is loaded."""
    towers.sentences(tmp_path)
    system = build(text_encoder=str(tmp_path), text_encodings_dim=12, max_text_len=6)
    texts = ["a red cat", "the moon on the house", "a red cat"]
    found = system.conditions_from_texts(texts)
    wanted = system.texts.encoder.encode(texts)
    assert found.keys() == {"text_encodings", "text_mask"} and found["text_mask"].sum(1).tolist()[0] < 6
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name])
    batch = system.synthetic(3) | {"caption": pad_and_stack_texts([pack_caption(text) for text in texts])}
    cached = {name: batch.pop(name) for name in ("text_encodings", "text_mask")}
    torch.testing.assert_close(system.encode(batch)["text_encodings"], wanted["text_encodings"])
    assert system.frozen() == (system.texts.encoder,) and not system.texts.encoder.training
    lazy = build(text_encodings_dim=12, max_text_len=6)
    assert torch.equal(lazy.encode(batch | cached)["text_encodings"], cached["text_encodings"])
    assert lazy.texts.encoder is None
    null = system.make_conditions(2)
    assert set(null) == {"text_encodings", "text_mask"} and not bool(null["text_mask"].any())


def test_another_encoder_is_refused(tmp_path):
    """Oracle: the encoder's fingerprint; another seed's weights of the same width are none of the data's encodings."""
    for seed in (0, 1):
        towers.sentences(tmp_path / str(seed), seed)
    own = TextEncoder(str(tmp_path / "0"), 5).compute_fingerprint()
    model = {"text_encodings_dim": 12, "text_encoder_fingerprint": own}
    found = build(text_encoder=str(tmp_path / "0"), **model).conditions_from_texts(["a cat"])
    assert found["text_encodings"].shape == (1, 5, 12)
    with pytest.raises(ValueError, match=f"text_encoder: {tmp_path}/1 is the encoder .* are of {own} .*name the one"):
        build(text_encoder=str(tmp_path / "1"), **model).conditions_from_texts(["a cat"])
    source = SimpleNamespace(compute_fingerprint=lambda: "clips")  # what a run that encodes captions writes down
    for seed in (0, 1):
        live = build(text_encoder=str(tmp_path / str(seed)), text_encodings_dim=12, max_text_len=5)
        assert (live.fingerprint(source) == f"clips text_encoder={own}") == (seed == 0)
    assert (
        build().fingerprint(source)
        == "clips"
        == build(text_encodings_dim=12, max_text_len=6, codes=CODES | {"text": (6, 12)}).fingerprint(source)
    )


def test_prompts_are_encoded_once(tmp_path):
    """Oracle: the encoder's own encodings; it is gone behind them, and nothing is there to load it from again."""
    towers.sentences(tmp_path / "text")
    codes = CODES | {"text": (6, 12)}
    system = build(text_encoder=str(tmp_path / "text"), text_encodings_dim=12, max_text_len=6, codes=codes)
    texts = ["a red cat", "the moon", "a red cat"]
    wanted = TextEncoder(str(tmp_path / "text"), 6).encode(texts)
    first = system.conditions_from_texts(texts)
    assert system.texts.encoder is None and system.frozen() == ()
    (tmp_path / "text").rename(tmp_path / "gone")
    again, one = system.conditions_from_texts(texts), system.conditions_from_texts(["the moon"])
    for name, value in first.items():
        torch.testing.assert_close(value, wanted[name])
        assert torch.equal(again[name], value) and torch.equal(one[name], value[1:2])
    with pytest.raises(ValueError, match="there is no folder"):
        system.conditions_from_texts(["a dog"])


def test_captions_stay_on_the_host():
    """Oracle: devices: the words of captions on the CPU go where the batch's keys are."""
    system, batch = build(), build().synthetic(3)
    sent = {name: value if name == "caption" else value.to("meta") for name, value in batch.items()}
    found = system.encode(sent)
    assert found["words"].device.type == "meta" and found["words"].shape == system.encode(batch)["words"].shape


def test_null_texts_are_guidance_s_own():
    """Oracle: a sample without a text is the sample of the empty text, and other than a text's."""
    system = build()
    nets, tokens = networks(system), torch.zeros(4, 3, 2, 2, dtype=torch.int64)

    def run(conditions):
        return system.draw_tokens(nets, tokens, tokens.bool(), Request(torch.arange(4), conditions, 5, "confidence"))

    assert torch.equal(run({}), run(system.conditions_from_texts([""] * 4)))
    assert not torch.equal(run({}), run(system.conditions_from_texts(["a bag"] * 4)))


# ------------------------------------------------------------------------------------------------ tokenizer and samples


def test_the_tokenizer_is_what_was_trained(tokenizer):
    """Oracle: the tokenizer system's own codes and fingerprint; videos with frames, and images as clips of one."""
    theirs = systems.build("phenaki.tokenizer", tokenizers.TINY)
    net = theirs.networks()["tokenizer"]
    net.load_state_dict(load_file(f"{tokenizer}/tokenizer.safetensors"))
    batch = theirs.synthetic(4)
    wanted = theirs.compute_codes({"tokenizer": net}, theirs.encode(batch))["tokens"]
    system = build(tokenizer={"path": tokenizer}, unconditional=True)
    example = system.encode(batch)
    assert torch.equal(example["tokens"], wanted) and example["real"].shape == (4, 3)
    cached = system.encode({"key": batch["key"], "tokens": wanted, "frames": batch["frames"]})
    assert all(torch.equal(cached[name], example[name]) for name in ("tokens", "real"))
    image = build(tokenizer={"path": tokenizer}, unconditional=True, token_shape=[1, 2, 2])
    assert torch.equal(image.encode({"key": batch["key"], "image": batch["video"][:, 0]})["tokens"], wanted[:, :1])
    loaded = codec.load_tokenizer(tokenizer)
    assert not loaded.training and not any(weight.requires_grad for weight in loaded.train().parameters())
    from dstrain.encoders.autoencoder import hash_network

    assert loaded.fingerprint == hash_network(*theirs.describe_identity({"tokenizer": net}))
    assert system.frozen() == (system.get_tokenizer(),)


def test_samples_go_on_from_given_frames(tokenizer):
    """Oracle: the given frames, bit for bit; behind them other seeds and texts differ; their tokens are kept."""
    system = build(tokenizer={"path": tokenizer})
    nets = networks(system)
    prime = rng.integers(rng.keys_of_seeds(torch.arange(2)), "v", 256, (3, 1, 16, 16)).to(torch.uint8)
    conditions = system.conditions_from(prime) | system.conditions_from_texts(["a bag moving up", "a coat"])
    request = Request(torch.tensor([5, 6]), conditions, 4, "confidence")
    video = system.sample(nets, request)
    assert video.shape == (2, 5, 1, 16, 16) and torch.equal(video[:, :3], prime)
    other = system.sample(nets, Request(torch.tensor([7, 8]), conditions, 4, "confidence"))
    assert torch.equal(other[:, :3], prime) and not torch.equal(other[:, 3:], video[:, 3:])
    tokens = system.get_tokenizer().encode(prime.float() / 127.5 - 1)["tokens"]
    given = torch.zeros(2, 3, 2, 2, dtype=torch.bool)
    given[:, :2] = True
    found = system.draw_tokens(nets, F.pad(tokens, (0, 0, 0, 0, 0, 1)), given, request)
    assert torch.equal(found[:, :2], tokens)
    pictures = system.conditions_from(prime[:, 0])  # a picture is a video of one frame
    assert torch.equal(pictures["prime"], prime[:, :1])


@pytest.mark.parametrize(
    "critic, sampler", [(None, "confidence"), ("token", "critic"), ("token", "confidence"), ("self", "critic")]
)
def test_other_lengths(tokenizer, critic, sampler):
    """Oracle: shapes; an image is one frame; the longest is the model's."""
    system = build(tokenizer={"path": tokenizer}, critic=critic)
    nets, conditions = networks(system), system.make_conditions(3)
    for frames, expected in ((None, 5), (5, 5), (3, 3), (1, 1)):
        request = Request(torch.arange(3), conditions, 4, sampler, 2.0, num_frames=frames)
        assert system.sample(nets, request).shape == (3, expected, 1, 16, 16)
    with pytest.raises(ValueError, match="7 frames, and the model has places for 5"):
        system.sample(nets, Request(torch.arange(3), conditions, 4, sampler, num_frames=7))
    with pytest.raises(ValueError, match="4 frames do not fit the temporal patch of 2.*for example 3"):
        system.sample(nets, Request(torch.arange(3), conditions, 4, sampler, num_frames=4))


@pytest.mark.parametrize("critic", [None, "token", "self"])
def test_padding_in_decoding(critic):
    """Oracle: the clip decoded without its padding: what is hidden is never changed and changes nothing."""
    system = build(critic=critic, unconditional=True)
    nets, tokens = networks(system), torch.randint(64, (2, 3, 2, 2), generator=torch.Generator().manual_seed(0))
    given = torch.zeros(tokens.shape, dtype=torch.bool)

    def request(**conditions):
        return Request(torch.arange(2), conditions, 6, system.config.samplers[-1])

    real = torch.tensor([[True, True, False], [True, True, True]])
    found = system.draw_tokens(nets, tokens, given, request(real=real))
    assert torch.equal(found[0, 2], tokens[0, 2])
    other = tokens.clone()
    other[0, 2] = (other[0, 2] + 7) % 64
    assert torch.equal(system.draw_tokens(nets, other, given, request(real=real))[real], found[real])


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"codebook_size": None}, "codebook_size"),
        ({"token_shape": [3, 0, 2]}, "are 1 at least"),
        ({"text_encoder": "x"}, "give its hidden size"),
        ({"unconditional": True, "text_encodings_dim": 4}, "reads no texts"),
        ({"train": "critic"}, "set critic=token"),
        ({"train": "maskgit", "critic": "self"}, "both learn together"),
        ({"critic_depth": 2, "critic": "self"}, "critic_depth is the token critic's"),
        ({"critic_labels": "replaced"}, "there is no critic; set model.critic=token"),
        ({"critic": "x"}, "'token' or 'self'"),
    ],
)
def test_config_errors(changes, words):
    """Oracle: a ValueError that names the field and the remedy."""
    with pytest.raises(ValueError, match=words):
        build(**changes)


CODES = {"shape": (3, 2, 2), "codebook_size": 64, "first_stage": "abc", "text": None}


@pytest.mark.parametrize(
    "codes, changes, words",
    [
        ({"codebook_size": 8192}, {}, "codebook_size 64: .* of a codebook of 8192; set model.codebook_size=8192"),
        ({"shape": (9, 2, 2)}, {}, r"token_shape \[3, 2, 2\]: the tokens in data.path are \[9, 2, 2\]"),
        ({"text": (4, 7)}, {"text_encodings_dim": 5}, "are 7 wide; set model.text_encodings_dim=7"),
        ({"text": (4, 7)}, {"text_encodings_dim": 7}, "max_text_len 5: .* of 4 tokens"),
        (
            {"text": (5, 7), "text_encoder": "t5"},
            {"text_encodings_dim": 7, "text_encoder_fingerprint": "clip"},
            "text_encoder_fingerprint clip: .* of the text encoder t5",
        ),
        (
            {"first_stage": "other"},
            {"tokenizer": {"path": "x", "fingerprint": "abc"}},
            "tokenizer abc, the tokens .* of other",
        ),
    ],
)
def test_codes_of_another_model(codes, changes, words):
    """Oracle: a ValueError with both values and the remedy."""
    build(codes=CODES)
    with pytest.raises(ValueError, match=words):
        build(codes=CODES | codes, **changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"codebook_size": 128}, "codebook_size: 128 in the model, 64 in the tokenizer at"),
        ({"temporal_patch_size": 4}, "temporal_patch_size: 4 in the model, 2 in the tokenizer"),
        ({"token_shape": [3, 4, 4]}, r"token_shape\[1:\]: \(4, 4\) in the model, \(2, 2\) in the tokenizer"),
        ({"codes": CODES}, "the tokens in data.path are of abc; name the one that encoded them"),
    ],
)
def test_another_tokenizer(tokenizer, changes, words):
    """Oracle: a ValueError with both values, where videos are first encoded."""
    with pytest.raises(ValueError, match=words):
        build(tokenizer={"path": tokenizer}, **changes).get_tokenizer()


def test_a_replaced_tokenizer(tokenizer, tmp_path):
    """Oracle: the fingerprint: another seed's weights in the same place are refused, the same weights are not."""
    own = codec.load_tokenizer(tokenizer).fingerprint
    build(tokenizer={"path": tokenizer, "fingerprint": own}).get_tokenizer()
    other = str(tokenizers.save(tmp_path, seed=1))
    with pytest.raises(ValueError, match=f"was trained with {own}.*put that one back there"):
        build(tokenizer={"path": other, "fingerprint": own}).get_tokenizer()


def test_folders_without_a_tokenizer(tmp_path):
    """Oracle: a ConfigError that names tokenizer.path and the remedy; other folders are refused in test_codec.py."""
    with pytest.raises(ConfigError, match=f"tokenizer.path: {tmp_path} holds no recipe.yaml; write one with"):
        codec.load_tokenizer(str(tmp_path))
    recipe_of_vae = "name: x\nsystem: vae\nmodel: {image_size: 8, discrete: {num_tokens: 4, hidden_dim: 4}}\n"
    (tmp_path / "recipe.yaml").write_text(recipe_of_vae)
    network = systems.build("vae", recipe.load_recipe(tmp_path / "recipe.yaml").model).networks()["autoencoder"]
    save_file(network.state_dict(), tmp_path / "autoencoder.safetensors")
    with pytest.raises(ConfigError, match="is a vae, and videos become tokens by a phenaki.tokenizer; export a run"):
        codec.load_tokenizer(str(tmp_path))


def source(**item):
    return SimpleNamespace(read_first_readable=lambda: item, uncaptioned=None)


def test_data_that_do_not_fit(tokenizer):
    """Oracle: ValueErrors with the remedy before anything is trained."""
    tokens = torch.zeros(3, 2, 2, dtype=torch.int64)
    build(unconditional=True).require_usable_source(source(tokens=tokens, label=3))
    for words, system, item in (
        ("there are no captions.*unconditional=true", build(), {"tokens": tokens}),
        (r"clips have \(2, 2, 2\) tokens .* the model \(3, 2, 2\)", build(unconditional=True), {"tokens": tokens[:2]}),
        ("codebook_size 64: the data hold the token 64", build(unconditional=True), {"tokens": tokens + 64}),
        ("give neither", build(), {"label": 3}),
        (
            "no tokenizer is named .* set model.tokenizer.path",
            build(unconditional=True),
            {"video": torch.zeros(5, 1, 16, 16, dtype=torch.uint8)},
        ),
        (
            r"frames are \(3, 16, 16\)",
            build(unconditional=True, tokenizer={"path": tokenizer}),
            {"video": torch.zeros(5, 3, 16, 16, dtype=torch.uint8)},
        ),
        (
            "4 frames do not fit",
            build(unconditional=True, tokenizer={"path": tokenizer}),
            {"video": torch.zeros(4, 1, 16, 16, dtype=torch.uint8)},
        ),
        (
            "are 3 wide in the data and 5 in the model",
            build(text_encodings_dim=5),
            {"tokens": tokens, "text_encodings": torch.zeros(2, 3)},
        ),
        (
            "none is named; give the folder",
            build(text_encodings_dim=5),
            {"tokens": tokens, "caption": pack_caption("a")},
        ),
    ):
        with pytest.raises(ValueError, match=words):
            system.require_usable_source(source(**item))


def test_samples_that_cannot_be(tokenizer):
    """Oracle: ValueErrors with the remedy."""

    def frames(count):
        return torch.zeros(1, count, 1, 16, 16, dtype=torch.uint8)

    def request(system, **changes):
        return Request(**{"seeds": torch.arange(1), "sampler": "confidence", "num_steps": 2} | changes)

    plain, silent_ = build(tokenizer={"path": tokenizer}), build(unconditional=True)
    certain = build(cond_drop_prob=0, tokenizer={"path": tokenizer})
    for words, system, changes in (
        ("no tokenizer is named", silent_, {}),
        ("sampler=ddim is none of confidence", plain, {"sampler": "ddim"}),
        ("sampler=critic is none of", plain, {"sampler": "critic"}),
        ("no null text", silent_, {"guidance_scale": 2.0}),
        ("no null text", certain, {"guidance_scale": 2.0}),
        ("draws for texts alone", certain, {}),
        ("2 frames do not fit the temporal patch of 2", plain, {"conditions": {"prime": frames(2)}}),
        ("as many as are asked for", plain, {"conditions": {"prime": frames(5)}}),
        ("num_steps: 0", plain, {"num_steps": 0}),
    ):
        with pytest.raises(ValueError, match=words):
            system.sample(networks(system), request(system, **changes))
    assert not silent_.generates and plain.generates
    with pytest.raises(ValueError, match="unconditional and reads no texts"):
        silent_.conditions_from_texts(["a bag"])
    assert plain.takes_texts and not silent_.takes_texts
    with pytest.raises(ValueError, match=r"labels: \[1\] mean nothing to phenaki.* give texts"):
        plain.make_conditions(1, (1,))
    with pytest.raises(ValueError, match="2 frames do not fit the temporal patch"):
        plain.conditions_from(frames(2))
    with pytest.raises(ValueError, match=r"frames are \(3, 16, 16\)"):
        plain.conditions_from(torch.zeros(1, 1, 3, 16, 16, dtype=torch.uint8))


# ---------------------------------------------------------------------------------------------------- what is filled in


def run_of(model, **sections):
    return Run.model_validate({"name": "x", "system": "phenaki", "model": model} | sections)


SILENT = {name: value for name, value in TINY.items() if name not in ("token_shape", "codebook_size", "max_text_len")}


def test_filled_in_from_tokenizer_and_cache(tokenizer):
    """Oracle: the tokenizer's recipe and the cache's index; what is written down fixes the fingerprint."""
    data = {"num_frames": 5, "channels": 1, "image_size": 16, "flip": False}
    run = run_of(SILENT | {"tokenizer": {"path": tokenizer}}, data=data)
    found = Config.model_validate(recipe.complete_model_section(run, Config).model)
    assert (found.token_shape, found.codebook_size, found.temporal_patch_size) == ((3, 2, 2), 64, 2)
    assert found.tokenizer.fingerprint == codec.load_tokenizer(tokenizer).fingerprint and found.codes is None
    codes = Codes(
        kind="tokens",
        shape=(2, 2, 2),
        flips=1,
        scaling_factor=None,
        first_stage="abc",
        codebook_size=32,
        text=(4, 6),
        text_encoder="t5",
    )
    cached = run_of(SILENT).model_copy(update={"data": run.data.model_copy(update={"codes": codes, "num_frames": 5})})
    found = Config.model_validate(recipe.complete_model_section(cached, Config).model)
    assert (found.token_shape, found.codebook_size, found.temporal_patch_size) == ((2, 2, 2), 32, 4)
    assert found.text_encodings_dim == 6 and found.codes.first_stage == "abc" and found.num_frames == 5
    assert (found.max_text_len, found.text_encoder_fingerprint, found.codes.text_encoder) == (4, "t5", "t5")
    with pytest.raises(ConfigError, match="max_text_len 5: .* of 4 tokens.* set model.max_text_len=4, or encode with"):
        recipe.complete_model_section(cached.model_copy(update={"model": SILENT | {"max_text_len": 5}}), Config)
    hashes = Config.model_validate(
        recipe.complete_model_section(
            cached.model_copy(update={"model": SILENT | {"max_text_len": 5, "text_encodings_dim": None}}), Config
        ).model
    )
    assert (hashes.text_encodings_dim, hashes.max_text_len, hashes.text_encoder_fingerprint) == (None, 5, None)
    with pytest.raises(ConfigError, match="codebook_size 8192.*of a codebook of 32; set model.codebook_size=32"):
        recipe.complete_model_section(cached.model_copy(update={"model": SILENT | {"codebook_size": 8192}}), Config)
    with pytest.raises(ValueError, match="there is no folder"):
        recipe.complete_model_section(run_of(SILENT | {"tokenizer": {"path": f"{tokenizer}/nothing"}}), Config)
    with pytest.raises(ValueError, match="no tokenizer is named that encodes it; set model.tokenizer.path"):
        recipe.complete_model_section(run_of(SILENT), Config)
    with pytest.raises(ConfigError, match="tokens in data.path are of abc"):
        recipe.complete_model_section(
            cached.model_copy(update={"model": SILENT | {"tokenizer": {"path": tokenizer}}}), Config
        )


@pytest.mark.parametrize(
    "changes, samples, words",
    [
        ({"cond_drop_prob": 0}, {"sampler": "confidence", "guidance_scale": 3.0}, "model.cond_drop_prob=0.25"),
        ({"cond_drop_prob": 0}, {"sampler": "confidence"}, "no null text to draw without"),
        ({"unconditional": True}, {"sampler": "confidence", "prompts": ["a bag"]}, "reads none"),
        (
            {},
            {"sampler": "confidence", "labels": [1]},
            "samples.labels=[1]: phenaki knows no classes; leave it out, and give",
        ),
        (
            {"tokenizer": None},
            {"prompts": ["a bag"], "num_frames": 5},
            "samples.prompts, samples.num_frames: no tokenizer is named that decodes what is drawn; "
            "set model.tokenizer.path",
        ),
        (
            {"critic": "token", "train": "critic"},
            {},
            "model.train=critic: the critic would judge what untrained weights draw",
        ),
    ],
)
def test_conflicts(changes, samples, words):
    """Oracle: a line that names the key and the remedy; none without the fault."""
    config = Config.model_validate(TINY | {"tokenizer": {"path": "x"}} | changes)
    assert any(words in line for line in config.list_conflicts(run_of({}, samples=samples)))
    quiet = Config.model_validate(TINY | {"tokenizer": None})
    assert quiet.list_conflicts(run_of({}, samples={"prompts": ["a bag"]}, every={"sample": 0})) == []
    fine = Config.model_validate(TINY | {"tokenizer": {"path": "x"}})
    assert (
        fine.list_conflicts(run_of({}, samples={"sampler": "confidence", "guidance_scale": 3.0, "prompts": ["a"]}))
        == []
    )
