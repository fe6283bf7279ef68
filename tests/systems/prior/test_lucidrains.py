"""DALLE2-pytorch's network: what it gives, what is read of its files, what is refused."""

import pytest
import torch
import yaml

from dstrain import systems
from dstrain.recipe import ConfigError
from dstrain.runs import trained, weights
from dstrain.systems.base import Request
from tests.support import golden
from tests.support.launch import here

SIZES = {
    "image_embed_dim": 16,
    "max_text_len": 5,
    "depth": 2,
    "heads": 3,
    "dim_head": 8,
    "timesteps": 8,
    "num_candidates": 1,
}
CASES = {
    "texts": SIZES
    | {
        "norm_in": True,
        "self_cond": True,
        "sampling_clamp_l2norm": True,
        "sampling_final_clamp_l2norm": True,
        "lucidrains": {"normformer": True},
    },
    "timesteps": SIZES
    | {
        "dim_head": 40,
        "prediction": "v",
        "lucidrains": {
            "norm_out": False,
            "final_proj": False,
            "ff_mult": 2,
            "timestep_table": False,
            "condition_on_text_encodings": False,
        },
    },
    "products": SIZES | {"text_cond_drop_prob": 0, "lucidrains": {"rotary_emb": False, "cosine_similarity": False}},
}


def filled(model: dict) -> torch.nn.Module:
    return golden.fill(systems.build("prior", model).networks()["denoiser"]).eval().requires_grad_(False)


def state_of(name: str) -> dict[str, torch.Tensor]:
    """The original's state dict, with its buffers."""
    tensors, meta = golden.load(f"lucidrains_{name}")
    state = {f"net.{key}": values for key, values in filled(CASES[name]).state_dict().items()}
    if "net.null_text_embed" in meta["keys"]:  # its name until version 1.8
        state["net.null_text_embed"] = state.pop("net.null_text_encodings")
    state |= {key: values for key, values in tensors.items() if "rotary" in key}
    state |= {
        key: tensors["betas"] if key.endswith(".betas") else torch.zeros(shape)
        for key, shape in meta["keys"].items()
        if "noise_scheduler" in key
    }
    assert {key: list(values.shape) for key, values in state.items()} == meta["keys"]
    return state


def inputs() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """What the original was given: noisy embeddings, timesteps, texts."""
    tensors, _ = golden.load("lucidrains_texts")

    def stream(name, *shape):
        return golden.stream(name, shape).float()

    mask = torch.nn.functional.pad(tensors["mask"], (0, 1))
    encodings = torch.nn.functional.pad(stream("text_encodings", 3, 4, 16), (0, 0, 0, 1))
    embed = torch.nn.functional.normalize(stream("text_embed", 3, 16), dim=1)
    texts = {"text_embed": embed, "text_encodings": encodings, "text_mask": mask}
    return stream("x", 3, 16), torch.tensor([0, 3, 7]), texts


@pytest.mark.parametrize("name", CASES)
def test_an_original_file(tmp_path, monkeypatch, capsys, name):
    """Oracle: golden/lucidrains_*, made with DALLE2-pytorch 1.15.6 and, products, 1.0.6: its output with texts and
    without, and its whole chain of DDPM with guidance, from a trainer's checkpoint that launch/import.py has made a run
    of. In 1.0.6 dropped texts do not reach the network, so that guidance changes nothing.
    """
    tensors, _ = golden.load(f"lucidrains_{name}")
    state = state_of(name)
    zeros = {key: torch.zeros_like(values) for key, values in state.items()}
    torch.save({"model": zeros, "ema": {"step": torch.ones(1)}, "ema_model": state}, tmp_path / "latest.pth")
    recipe = {
        "name": "published",
        "system": "prior",
        "model": CASES[name],
        "data": {"path": "/data/nowhere"},
        "samples": {"num_steps": 8},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    words = [tmp_path / "latest.pth", "--recipe", tmp_path / "recipe.yaml", "--out", tmp_path / "run"]
    code, out, err = here("import.py", words, monkeypatch, capsys)
    assert code == 0, err
    assert ("cosine_similarity is true from version 1.4" in err + out) == (name == "products")
    run = trained.read_recipe(tmp_path / "run")
    system, at = systems.build(run.system, run.model), trained.find_checkpoint(tmp_path / "run")
    networks = trained.load_networks(
        system, at, trained.choose_raw_or_ema_by_part(system, at, run.samples.ema), torch.float32
    )
    network, (x, t, texts) = networks["denoiser"].eval().requires_grad_(False), inputs()
    if not system.config.num_text_tokens:
        texts = {"text_embed": texts["text_embed"]}
    own = {"self_cond": golden.stream("self_cond", (3, 16)).float()} if system.config.self_cond else {}
    everything = {"dropped": torch.ones(3, dtype=bool), "image_dropped": torch.ones(3, dtype=bool)}

    def close(ours, theirs):
        return torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)

    close(network(x, t, **texts, **own), tensors["out"])
    if drops := system.config.text_cond_drop_prob > 0:
        close(network(x, t, **texts, **own, **everything), tensors["null"])
    monkeypatch.setattr("dstrain.rng.normal", lambda key, name, shape: golden.stream(name, (3, 16)).float())
    request = Request(torch.arange(3), texts, 8, "ddpm", guidance_scale=2.5 if drops else 1.0)
    close(system.sample({"denoiser": network}, request), tensors["chain"])


def test_what_is_refused(tmp_path):
    """Oracle: what differs between the file and the recipe, which the message names."""
    torch.save(state_of("texts"), tmp_path / "file.pth")
    for changes, words in (
        ({"beta_schedule": "jsd"}, "beta_schedule=jsd"),
        ({"timesteps": 9}, "timesteps=9"),
        ({"lucidrains": {}}, "normformer"),
        ({"depth": 3}, "depth"),
        ({"lucidrains": {"normformer": True, "rotary_emb": False}}, "rotary_emb=true"),
        ({"lucidrains": {"normformer": True, "cosine_similarity": False}}, "version 1.9"),
        ({"image_embed_dim": 18}, r"\(16,\) in the file and \(18,\).*set image_embed_dim"),
        ({"max_text_len": 0}, "null_text_encodings is .* absent in the network; set .*max_text_len"),
        ({"lucidrains": None}, "model.lucidrains={}"),
    ):
        with pytest.raises(ConfigError, match=words):
            weights.read_weights_adapted_to_system(
                tmp_path / "file.pth", systems.build("prior", CASES["texts"] | changes)
            )
    for content, words in (
        (state_of("texts") | {"noise_scheduler.betas": torch.zeros(0)}, "the file's 0 betas are not"),
        (state_of("texts") | {"noise_scheduler.betas": torch.tensor(0.1)}, "the file's 1 betas, from"),
        ({"x_embedder.proj.weight": torch.zeros(2, 3)}, "is no prior of DALLE2-pytorch"),
    ):
        torch.save(content, tmp_path / "other.pth")
        with pytest.raises(ConfigError, match=words):
            weights.read_weights_adapted_to_system(tmp_path / "other.pth", systems.build("prior", CASES["texts"]))
    for changes, words in (
        ({"text_embed_dim": 12}, "as wide as"),
        ({"embedding_proj_norm": True}, "no projection"),
        ({"text_cond_drop_prob": 0, "lucidrains": {"image_cond_drop_prob": 0.1}}, "drops both"),
    ):
        with pytest.raises(ValueError, match=words):
            systems.build("prior", CASES["texts"] | changes)
