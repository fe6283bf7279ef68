"""A DiT of texts: what is read of them, dropped, avoided and refused; cached beside latents; drawn by prompts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain import rng, systems
from dstrain.commands.encode import encode_data
from dstrain.commands.options.encode import EncodeOptions
from dstrain.data.builtin.fashion import FASHION, Fashion, map_captions_to_item_and_shade
from dstrain.data.cached.latents import Latents
from dstrain.data.cached.rows import pack_caption
from dstrain.data.open import fill_in_codes_entry
from dstrain.data.source import pad_and_stack_texts
from dstrain.encoders.text import TextEncoder
from dstrain.recipe import ConfigError, Data, Run, Samples
from dstrain.sampling.requests import make_sampling_request_and_captions
from dstrain.systems.base import Request
from dstrain.systems.dit.config import Config
from dstrain.systems.dit.network import DiT
from dstrain.systems.dit.system import DiTSystem
from tests.support import first_stage, towers
from tests.systems.dit.cases import MODERN, TEXT

WAYS = [
    {"class_dropout_prob": 0.5},
    {"cross_attention": True},
    {"tokens": {"time": 2, "joins": 1}, "block": MODERN["block"] | {"modulation": "none"}},
]


def build(**changes: Any) -> DiTSystem:
    """A tiny flow of texts with five words."""
    return DiTSystem(Config(**(TEXT | {"objective": "flow", "learn_sigma": False} | changes)))


def fill(network: DiT) -> DiT:
    """Gives random weights, so that nothing is hidden by a zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_(std=0.2, generator=generator)
    return network


def captions(*texts: str) -> torch.Tensor:
    return pad_and_stack_texts([pack_caption(text) for text in texts])


def draw(system: DiTSystem, nets: dict[str, DiT], scale: float, conditions: dict[str, torch.Tensor]) -> torch.Tensor:
    """Samples before they are rounded to levels, so that little differences show."""
    request = Request(torch.arange(2), conditions, 2, guidance_scale=scale)
    network = system._make_guided_network(nets, request)
    x = rng.normal(rng.keys_of_seeds(request.seeds), "start", system.shape)
    return network(x, torch.full((2,), 0.7))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("encoded", [False, True])
def test_padding_changes_nothing(way: dict[str, Any], encoded: bool) -> None:
    """Oracle: the same network of the text without its padding, 1e-6; and, with padding of other values, to the bit.
    Each token of the text changes the output; the null text does not, where there is another.
    """
    words = {"text_encodings_dim": 6} if encoded else {}
    network = fill(build(**(way | words)).networks()["denoiser"])
    key = rng.keys(0, 0, torch.arange(3))
    x, t = rng.normal(key, "x", (1, 8, 8)), rng.uniform(key, "t")
    text = rng.normal(key, "text", (5, 6)) if encoded else 1 + rng.integers(key, "text", 39, (5,))
    mask = torch.arange(5) < 3
    cut = network(x, t, text=text[:, :3])
    padded = network(x, t, text=text, mask=mask.expand(3, 5))
    assert torch.allclose(padded, cut, atol=1e-6)
    plain = build(**(way | words | {"class_dropout_prob": 0})).networks()["denoiser"]
    assert not plain.load_state_dict(network.state_dict(), strict=False).missing_keys
    assert torch.allclose(plain(x, t, text=text[:, :3]), cut, atol=1e-6)
    other = torch.cat((text[:, :3], text[:, 3:].roll(1, 0)), dim=1)
    assert torch.equal(network(x, t, text=other, mask=mask.expand(3, 5)), padded)
    for place in range(3):
        changed = text.clone()
        changed[:, place] = text[:, place].roll(1, 0)
        assert ((network(x, t, text=changed, mask=mask.expand(3, 5)) - padded).abs().amax((1, 2, 3)) > 1e-5).all()


def test_hashed_words_are_pooled() -> None:
    """Oracle: by hand, 1e-6: the mean of the rows of the words that are read, through the same two layers; zeros where
    no word is read. In the whole network padding changes nothing, a dropped text is the empty one, and words that only
    the pooled vector tells apart change the output.
    """
    network = fill(build(text_pooled_dim=3).networks()["denoiser"])
    pooled, ids = network.p_embedder, torch.tensor([[4, 9, 9, 0, 0], [7, 0, 0, 0, 0]])
    rows = torch.stack((pooled.words.weight[[4, 9, 9]].mean(0), pooled.words.weight[7], torch.zeros(3)))
    found = torch.cat((pooled(ids, ids != 0), pooled(ids[:1], torch.zeros(1, 5, dtype=torch.bool))))
    assert rows.shape[1] == 3 and torch.allclose(found, pooled.mlp(rows), atol=1e-6)
    assert torch.allclose(pooled(ids[:1, :3], None), found[:1], atol=1e-6)
    x, t = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0.2, 0.8])
    told = network(x, t, text=ids, mask=ids != 0)
    other = ids + (ids == 0) * 5
    assert torch.allclose(network(x, t, text=other, mask=ids != 0), told, atol=1e-6)
    pooled.words.weight.data.zero_()
    assert ((network(x, t, text=ids, mask=ids != 0) - told).abs().amax((1, 2, 3)) > 1e-4).all()
    system, dropped = build(text_pooled_dim=3), build(text_pooled_dim=3, class_dropout_prob=1.0)
    batch = {"key": torch.arange(2), "caption": captions("a red cat", "the moon")}
    batch["image"] = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    nothing = dropped._make_condition_arguments(dropped.encode(batch), drop=True)
    empty = system.network_conditions[0].make_arguments_from_request(
        Request(torch.arange(2), system.conditions_from_texts(["", " "]))
    )
    assert torch.equal(network(x, t, **nothing), network(x, t, **empty))


@pytest.mark.parametrize("way", WAYS)
def test_an_empty_prompt_is_the_null_text(tmp_path: Path, way: dict[str, Any]) -> None:
    """Oracle: what a text becomes where training drops it, to the bit; the null text is learned, and no text's."""
    towers.sentences(tmp_path)
    for words in ({}, {"text_encodings_dim": 12, "text_encoder": str(tmp_path), "max_text_len": 6}):
        system = build(**(way | words))
        nets = {"denoiser": fill(system.networks()["denoiser"])}
        dropped = build(**(way | words | {"class_dropout_prob": 1.0}))
        batch = {"key": torch.arange(2), "caption": captions("a red cat", "the moon")}
        batch["image"] = rng.integers(batch["key"], "image", 256, (1, 8, 8)).to(torch.uint8)
        empty = system.conditions_from_texts(["", " "])
        told = [dropped._make_condition_arguments(dropped.encode(batch), drop=True)]
        told += [
            system.network_conditions[0].make_arguments_from_request(Request(torch.arange(2), conditions))
            for conditions in (empty, {})
        ]
        x, t = batch["image"].float() / 255, torch.tensor([0.2, 0.8])
        outs = [nets["denoiser"](x, t, **arguments) for arguments in told]
        assert torch.equal(outs[0], outs[1]) and torch.allclose(outs[0], outs[2], atol=1e-6)
        read = nets["denoiser"](x, t, **system._make_condition_arguments(system.encode(batch)))
        assert ((read - outs[0]).abs().amax((1, 2, 3)) > 1e-4).all()


def test_texts_are_dropped_by_key() -> None:
    """Oracle: the draws of the key; what is dropped reads nothing; evaluation drops none."""
    system, seen = build(class_dropout_prob=0.25), []

    def network(x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen.append((text, mask))
        return x

    batch = system.synthetic(2000)
    system.loss("denoiser", {"denoiser": network}, system.encode(batch))
    system.evaluate({"denoiser": network}, system.encode(batch))
    dropped = rng.uniform(batch["key"], "drop") < 0.25
    (text, mask), (whole, every) = seen
    assert torch.equal(text, whole) and every.all()  # five words each
    assert torch.equal(mask, ~dropped[:, None].expand_as(mask)) and 0.2 < dropped.float().mean() < 0.3


def test_guidance_leads_away_from_a_negative_prompt() -> None:
    """Oracle: weaker + scale (conditional - weaker) of two plain calls, 1e-5; the empty one is guidance as it is
    without. Swapped prompts swap what is drawn by equal seeds.
    """
    system = build()
    nets = {"denoiser": fill(system.networks()["denoiser"])}
    prompts = system.conditions_from_texts(["a dark bag", "a light bag"])
    plain, away = (
        draw(system, nets, 1.0, system.conditions_from_texts(texts))
        for texts in (["a dark bag", "a light bag"], ["a coat"] * 2)
    )
    guided = draw(system, nets, 3.0, prompts | system.make_negative_prompt_conditions("a coat", 2))
    assert torch.allclose(guided, away + 3 * (plain - away), atol=1e-5)
    usual = draw(system, nets, 3.0, prompts)
    assert torch.equal(usual, draw(system, nets, 3.0, prompts | system.make_negative_prompt_conditions("", 2)))
    assert (usual - guided).abs().max() > 1e-3
    request = Request(torch.tensor([4, 4]), prompts, 2, guidance_scale=2.0)
    swapped = Request(torch.tensor([4, 4]), system.conditions_from_texts(["a light bag", "a dark bag"]), 2, None, 2.0)
    pictures = system.sample(nets, request)
    assert torch.equal(pictures.flip(0), system.sample(nets, swapped)) and not torch.equal(*pictures)


def test_negative_prompts_of_a_request() -> None:
    """Oracle: the condition of the text; a ConfigError where there is no prompt, no guidance, or no use for it."""
    samples = Samples(prompts=("a bag", "a coat"), negative_prompt="a shirt", guidance_scale=2.0)
    request, texts = make_sampling_request_and_captions(samples, build(), 3)
    assert texts == ["a bag", "a coat", "a bag"]
    expected = build().conditions_from_texts(["a shirt"])["words"]
    assert torch.equal(request.conditions["negative_words"], expected.expand(3, -1))
    with pytest.raises(ConfigError, match="it goes with prompts, and none are given"):
        make_sampling_request_and_captions(samples.model_copy(update={"prompts": None}), build(), 3)
    with pytest.raises(ConfigError, match="--negative-prompt changes nothing at --guidance-scale 1"):
        make_sampling_request_and_captions(Samples(prompts=("a bag",)), build(), 3, negative_prompt="a coat")
    with pytest.raises(ValueError, match="samples.guidance_scale=1 is none"):
        Samples(negative_prompt="a shirt")
    phenaki = systems.build("phenaki", {"token_shape": [1, 2, 2], "codebook_size": 8})
    with pytest.raises(ConfigError, match="a PhenakiSystem is led away from no text"):
        make_sampling_request_and_captions(samples, phenaki, 1)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"condition": "label", "text_encodings_dim": 6}, "with condition=label no text is read"),
        ({"condition": "label", "cross_attention": True}, "cross_attention: with condition=label no text is read"),
        ({"text_encoder": "x"}, "give its hidden size"),
        ({"tokens": {"label": 2}}, "tokens.label: with condition=text there is no label"),
        (
            {
                "text_encodings_dim": 7,
                "codes": {"shape": (1, 8, 8), "scaling_factor": 1, "first_stage": "f", "text": (5, 6)},
            },
            "text_encodings_dim 7: the encodings in data.path are 6 wide; set model.text_encodings_dim=6",
        ),
    ],
)
def test_config_errors(changes: dict[str, Any], words: str) -> None:
    """Oracle: a ValueError that names the field and the remedy."""
    with pytest.raises(ValueError, match=words):
        build(**changes)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Oracle: a ConfigError that names the key and the remedy: no captions, no token to read, another width, labels."""
    system = build()
    image = {"key": torch.arange(2), "image": torch.zeros(2, 1, 8, 8, dtype=torch.uint8)}
    with pytest.raises(ConfigError, match="there are no captions.*write X.txt beside X.png.*model.condition=label"):
        system.encode(image)
    with pytest.raises(ConfigError, match=r"labels: \[3\] mean nothing to a model of texts"):
        system.make_conditions(2, (3,))
    without = build(class_dropout_prob=0, text_encodings_dim=6)
    encodings = {"text_encodings": torch.zeros(2, 5, 6), "text_mask": torch.tensor([[True] * 5, [False] * 5])}
    with pytest.raises(ConfigError, match="text_mask no token, and a model with class_dropout_prob 0 has no null text"):
        without.encode(image | encodings)
    with pytest.raises(ConfigError, match="a caption has no words"):
        build(class_dropout_prob=0).encode(image | {"caption": captions("a bag", "?!")})
    for refused in (lambda: without.make_conditions(1), lambda: without.conditions_from_texts(["a", ""])):
        with pytest.raises(ConfigError, match="prompts: .*class_dropout_prob 0"):
            refused()
    with pytest.raises(ConfigError, match="guidance_scale: this model has no null"):
        without.sample(without.networks(), Request(torch.arange(1), {}, 2, guidance_scale=2.0))
    towers.sentences(tmp_path)
    wide = build(text_encoder=str(tmp_path), text_encodings_dim=7, max_text_len=6)
    with pytest.raises(ConfigError, match="12 wide in the data and 7 in the model: set model.text_encodings_dim=12"):
        wide.encode(image | {"caption": captions("a", "b")})
    run = Run(name="x", steps=1, system="dit", model={}, samples=Samples(labels=(1,)))
    assert "a model of texts knows no classes" in " ".join(build().config.list_conflicts(run))


def test_what_is_cut_is_counted() -> None:
    """Oracle: the words of each text, by hand, of which the model reads five."""
    found = build().describe_cut(["a b c d e f g", "a b"], "captions")
    assert found.startswith("captions: 1 of 2 are cut: 5 words of a text are read, and they have up to 7; 2 words")


def test_captions_of_the_built_in_images() -> None:
    """Oracle: the mean of the pixels above the background, by hand, and the labels; no other captions."""
    source = Fashion(28, 1, "train", captioned=True)
    known, seen = map_captions_to_item_and_shade(), set()
    for index in range(len(source)):
        pixels = source.images[index].double()
        light = pixels[pixels > 25].mean() >= 150
        (caption,) = source.read_captions(index)
        assert caption == f"a {'light' if light else 'dark'} {FASHION[source.labels[index]]}"
        assert known[caption] == (source.labels[index], int(light))
        seen.add(caption)
    assert seen == set(known) and not Fashion(28, 1, "train").captioned


def test_cached_texts(tmp_path: Path) -> None:
    """Oracle: the encoder's own states of the captions, as `dstrain encode` stores them beside latents; the section is
    filled in from the index, and training reads no captions and no encoder.
    """
    first_stage.save(tmp_path / "stage")
    towers.sentences(tmp_path / "text")
    encoder = TextEncoder(str(tmp_path / "text"))
    options = EncodeOptions(
        first_stage=str(tmp_path / "stage"),
        data="builtin:fashion",
        image_size=32,
        text_encoder=str(tmp_path / "text"),
        flip=False,
        shard_size=512,
        split="held_out",
        dtype="float32",
        out=tmp_path / "out",
    )
    encode_data(options)
    data = fill_in_codes_entry(Data(path=str(tmp_path / "out"), image_size=32, channels=1, flip=False))
    shape = {name: TEXT[name] for name in ("patch_size", "hidden_size", "depth", "num_heads", "condition")}
    run = Run(name="x", steps=1, system="dit", model=shape | {"patch_size": 1}, data=data)
    config = Config(**Config.complete_section(run.model, run))
    assert (config.text_encodings_dim, config.max_text_len) == (12, 10)
    assert config.text_encoder_fingerprint == encoder.compute_fingerprint() == config.codes.text_encoder
    system, source = DiTSystem(config), Latents(tmp_path / "out")
    system.require_usable_source(source)
    assert system.frozen() == ()
    batch, _ = source.read_batch(torch.arange(3))
    batch["key"] = torch.arange(3)
    texts = [source.read_captions(index)[0] for index in range(3)]
    assert texts == [Fashion(32, 1, "held_out", captioned=True).read_captions(index)[0] for index in range(3)]
    told, expected = system._make_condition_arguments(system.encode(batch)), encoder.encode(texts)
    assert torch.allclose(told["text"].float(), expected["text_encodings"], atol=1e-5)
    assert torch.equal(told["mask"], expected["text_mask"])
