"""What draws, measures and encodes, and in which precision."""

from pathlib import Path

import pytest
import torch

from dstrain import recipe, rng, systems
from dstrain.commands.encoding.plan import EncodeOptions, plan_encoding
from dstrain.commands.evaluate import evaluate_run
from dstrain.commands.generate import GenerateOptions, generate_samples
from dstrain.commands.options.evaluate import EvaluateOptions
from dstrain.encoders.autoencoder import Autoencoder
from dstrain.encoders.precision import use_precision
from dstrain.recipe import ConfigError
from tests.support import first_stage


def flags() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def test_tf32_is_switched_for_a_while():
    """Oracle: torch's own flags, of products and of convolutions; put back, also after an error."""
    before = flags()
    for precision, inside in (("fp32", ("highest", False)), ("tf32", ("high", True)), ("bf16", ("highest", False))):
        with pytest.raises(OSError), use_precision(precision):
            assert flags() == inside
            raise OSError
        assert flags() == before


@pytest.mark.parametrize(
    "command",
    [
        lambda: generate_samples(GenerateOptions(Path("nowhere"), precision="tf32")),
        lambda: evaluate_run(EvaluateOptions(Path("nowhere"), precision="tf32")),
        lambda: plan_encoding(EncodeOptions(out=Path("out"), first_stage="nowhere", precision="tf32")),
    ],
)
def test_tf32_is_refused_where_there_is_none(monkeypatch, command):
    """Oracle: a machine without a GPU; the complaint comes before anything is read."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--precision tf32: tf32 needs a GPU .* take fp32"):
        command()


def test_a_first_stage_encodes_as_the_recipe_says(tmp_path, monkeypatch):
    """Oracle: the same autoencoder in fp32: bf16 latents lie within 1 % of it, pictures are decoded to the same bits,
    and None is fp32 on this machine; tf32 is refused here for training alone.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = str(first_stage.save(tmp_path))
    model = {
        "patch_size": 2,
        "hidden_size": 16,
        "depth": 1,
        "num_heads": 2,
        "num_classes": 3,
        "in_channels": 3,
        "image_size": 32,
    }
    stages = {
        name: systems.build("dit", model | {"first_stage": {"path": path, "factor": 4, "precision": name}}).first_stage
        for name in (None, "fp32", "bf16")
    }
    image, key = torch.rand(4, 1, 32, 32) * 2 - 1, rng.keys(0, 0, torch.arange(4))
    exact = Autoencoder(path).encode(image, key)
    assert torch.equal(stages[None].encode(image, key), exact) and torch.equal(stages["fp32"].encode(image, key), exact)
    near = stages["bf16"].encode(image, key)
    assert near.dtype == torch.float32 and 0 < (near - exact).norm() < 0.01 * exact.norm()
    assert torch.equal(stages["bf16"].decode(exact), stages["fp32"].decode(exact))
    section = model | {"first_stage": {"path": path, "factor": 4, "precision": "tf32"}}
    assert systems.build("dit", section).first_stage.precision == "tf32"  # it may be needed to decode alone
    run = recipe.load_recipe(None, ["data.image_size=32", "data.channels=1", "samples.guidance_scale=1"])
    assert any(
        "model.first_stage.precision: tf32 needs a GPU" in line
        for line in systems.build_config("dit", section).list_conflicts(run)
    )
