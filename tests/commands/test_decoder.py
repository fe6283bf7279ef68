"""From texts to pictures: a prior's embeddings in a DiT that is conditioned on them, and the metric of the result."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dstrain import notebook, recipe, rng, systems
from dstrain.commands.evaluating.quality import measure_quality
from dstrain.commands.generate import GenerateOptions, generate_samples
from dstrain.commands.job import complete_and_check_recipe
from dstrain.commands.options.evaluate import EvaluateOptions
from dstrain.data.builtin.emoji import Emoji
from dstrain.data.cached.embeddings import map_builtin_captions_to_rows, open_builtin_pairs
from dstrain.encoders.emoji import look_up_text_embeds
from dstrain.metrics.features import open_feature_network
from dstrain.recipe import ConfigError, Run
from dstrain.sampling.requests import make_sampling_request_and_captions
from tests.support import checkpoints, towers

RECIPES = Path(__file__).parents[2] / "launch" / "recipes"
TINY = {"hidden_size": 32, "depth": 1, "num_heads": 2}


def written(folder: Path, run: Run) -> Path:
    """A run with random weights that are nowhere zero."""
    run, problems = complete_and_check_recipe(
        run.model_copy(update={"ema": run.ema.model_copy(update={"decays": (0.9,)})})
    )
    assert not problems
    system = systems.build(run.system, run.model)
    torch.manual_seed(0)
    nets = system.networks()
    with torch.no_grad():
        for weight in (weight for net in nets.values() for weight in net.parameters()):
            weight.copy_(0.2 * torch.randn(weight.shape))
    return checkpoints.write(folder, run, nets)


@pytest.fixture(scope="module")
def prior(tmp_path_factory):
    return written(
        tmp_path_factory.mktemp("prior"), recipe.load_recipe(RECIPES / "prior-small.yaml", ["samples.num_steps=3"])
    )


def decoder_of(folder: Path, *changes: str) -> Path:
    overrides = [f"model.{name}={value}" for name, value in TINY.items()]
    return written(
        folder, recipe.load_recipe(RECIPES / "decoder-small.yaml", [*overrides, "samples.num_steps=3", *changes])
    )


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return decoder_of(tmp_path_factory.mktemp("decoder"))


def arrays(out: Path) -> dict[str, np.ndarray]:
    with np.load(next(out.glob("*.npz"))) as file:
        return dict(file)


def test_texts_become_pictures(prior, decoder, tmp_path):
    """Oracle: both systems called by hand, one after the other; captions of the built-in pairs need no text encoder."""
    texts = ("blue heart", "Dog Face")
    out = generate_samples(GenerateOptions(prior, num=2, prompts=texts, then=(decoder,), seed=5, out=tmp_path / "out"))
    assert len(list((out / "samples").glob("*.png"))) == 2
    assert (out / "prompts.txt").read_text() == "blue heart\nDog Face\n"
    table, rows = (
        open_builtin_pairs().tables["text_embed"],
        [map_builtin_captions_to_rows()[text.lower()] for text in texts],
    )
    assert torch.equal(look_up_text_embeds([*texts]), torch.stack([torch.from_numpy(table[row]) for row in rows]))
    drawn, by_hand = notebook.load(prior).sample(2, prompts=texts, seed=5), notebook.load(decoder)
    seeds = rng.keys_of_seeds(torch.tensor([5, 6]))
    request, _ = make_sampling_request_and_captions(by_hand.recipe.samples, by_hand.system, 2, images=drawn)
    pictures = by_hand.system.sample(by_hand.networks, replace(request, seeds=seeds))
    pictures = pictures.permute(0, 2, 3, 1).numpy()
    assert np.array_equal(arrays(out)["arr_0"], pictures) and not np.array_equal(pictures[0], pictures[1])
    np.save(tmp_path / "two.npy", drawn.numpy())  # other seeds than in the chain
    alone = generate_samples(
        GenerateOptions(decoder, num=2, embeddings=tmp_path / "two.npy", out=tmp_path / "b", pngs=False)
    )
    expected = by_hand.sample(2, images=drawn).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(arrays(alone)["arr_0"], expected)
    with pytest.raises(ConfigError, match="text_encoder"):
        generate_samples(
            GenerateOptions(
                prior, num=1, prompts=("a text that is no caption",), out=tmp_path / "c", text_encoder=str(tmp_path)
            )
        )


def test_chains_that_do_not_fit(prior, decoder, tmp_path):
    """Oracle: a ConfigError that names the option and what would fit."""
    wide = decoder_of(tmp_path / "wide", "model.embedding_dim=12")
    pictures = written(
        tmp_path / "plain",
        recipe.load_recipe(
            RECIPES / "dit-small.yaml",
            [*(f"model.{name}={value}" for name, value in TINY.items()), "samples.num_steps=3"],
        ),
    )
    np.save(tmp_path / "narrow.npy", np.ones((3, 12), np.float32))
    np.save(tmp_path / "zero.npy", np.zeros((3, 384), np.float32))
    for options, message in (
        ({"folder": decoder}, "draws from image embeddings: give them as --embeddings"),
        ({"folder": decoder, "low_res": tmp_path}, "draws from image embeddings|takes no pictures"),
        ({"folder": prior, "embeddings": tmp_path / "narrow.npy"}, "takes no embeddings"),
        ({"folder": decoder, "embeddings": tmp_path / "narrow.npy"}, "12 wide, and model.embedding_dim is 384"),
        ({"folder": decoder, "embeddings": tmp_path / "zero.npy"}, "row 0 is all zeros"),
        ({"folder": prior, "then": (wide,), "prompts": ("blue heart",)}, "--then .*384 wide.*embedding_dim is 12"),
        ({"folder": pictures, "then": (decoder,)}, "begins from image embeddings, and .* draws pictures"),
        ({"folder": prior, "then": (pictures,), "prompts": ("blue heart",)}, "begins from noise"),
    ):
        with pytest.raises(ConfigError, match=message):
            generate_samples(GenerateOptions(num=1, out=tmp_path / "none", **options))


def test_retrieval_of_real_pictures(tmp_path):
    """Oracle: chance, one in a hundred, for pictures of other captions; make_emoji_pairs.py's figure for their own.

    The pictures are those that neither the tower nor any recipe has trained on.
    """
    unseen = Emoji(split="held_out")
    pixels = torch.stack([unseen[i]["image"] for i in range(300)]).permute(0, 2, 3, 1).numpy()
    captions = np.array(unseen.list_captions()[:300])
    values = []
    for name, texts in (("own", captions), ("others", np.roll(captions, 1))):
        np.savez(tmp_path / f"{name}.npz", arr_0=pixels, prompts=texts)
        result = measure_quality(EvaluateOptions(metrics=("retrieval",), images=tmp_path / f"{name}.npz"))[1]["figures"]
        assert result["retrieval_by_chance"] == 0.01
        values.append(result["retrieval"])
    assert values[0] > 0.2 and values[1] < 0.05


def test_retrieval_by_clip(tmp_path):
    """Oracle: a loop over all pictures, of CLIP's own embeddings, with batches of several sizes."""
    towers.clip(tmp_path / "clip")
    words = [f"{a} {b}" for a in towers.WORDS for b in towers.WORDS] + [*towers.WORDS[:4]]
    pixels = np.random.default_rng(0).integers(0, 256, (104, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", arr_0=pixels, prompts=np.array(words))
    network = open_feature_network(f"clip:{tmp_path / 'clip'}")
    unit = torch.nn.functional.normalize
    texts, images = unit(network.embed_texts(words)), unit(network(torch.from_numpy(pixels).permute(0, 3, 1, 2))[0])
    right = 0
    for i, image in enumerate(images):
        others = [j for j in range(100) if j != i][:99]
        right += all(bool(image @ texts[i] > image @ texts[j]) for j in others)
    for batch in (7, 104):
        result = measure_quality(
            EvaluateOptions(
                metrics=("retrieval",), features=(f"clip:{tmp_path / 'clip'}",), images=tmp_path / "x.npz", batch=batch
            )
        )[1]["figures"]
        assert result["retrieval"] == pytest.approx(right / 104)
    np.savez(tmp_path / "y.npz", arr_0=pixels)
    for path, features, message in (
        ("y", (f"clip:{tmp_path / 'clip'}",), "retrieval needs captions"),
        ("x", (), "names of the built-in emoji alone"),
    ):
        with pytest.raises(ConfigError, match=message):
            measure_quality(EvaluateOptions(metrics=("retrieval",), features=features, images=tmp_path / f"{path}.npz"))
