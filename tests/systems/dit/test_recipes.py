"""The recipes of published transformers, as they would start."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from dstrain import recipe, systems
from dstrain.commands.encode import encode_data
from dstrain.commands.job import JobOptions, prepare_job
from dstrain.commands.options.encode import EncodeOptions
from dstrain.recipe import ConfigError
from dstrain.systems.dit.network import DiT
from tests.data.cached.test_latents import write
from tests.support import clips, first_stage, towers
from tests.support.launch import ROOT
from tests.systems.dit.test_pixart import write as write_pixart
from tests.systems.dit.test_pixart_sizes import make_theirs
from tests.systems.dit.test_sd3 import write as write_sd3


def dry_run(name: str, *words: str) -> list[str]:
    """The remarks of --dry-run on 8 GPUs."""
    path = ROOT / f"launch/recipes/{name}.yaml"
    return prepare_job(JobOptions(path, ROOT / "ds_configs/zero1.json", words, dry_run=True), 8, "cuda").remarks


@pytest.mark.parametrize(
    "name, shape, stage",
    [("lightningdit-xl1-vavae", [32, 16, 16], "vavae"), ("raev2-xl-imagenet256", [1024, 16, 16], "raev2")],
)
def test_a_recipe_of_normalized_latents(tmp_path: Path, name: str, shape: list[int], stage: str) -> None:
    """Oracle: --dry-run on latents as dstrain convert leaves those of others' encoders: all is in order."""
    write(
        tmp_path / "cache",
        number=20,
        size=20,
        shape=shape,
        classes=[f"n{i:04}" for i in range(1000)],
        stage=stage,
        image_size=256,
        channels=3,
    )
    remarks = dry_run(name, f"data.path={tmp_path / 'cache'}", f"folder={tmp_path / 'run'}")
    assert any("20 cached images (latents" in remark for remark in remarks)


def test_repa_sees_images(tmp_path: Path) -> None:
    """Oracle: --dry-run on images with an autoencoder of Stable Diffusion's layout and a DINOv2, both tiny: all is in
    order; without the encoder's folder, on latents, or with another encoder the entry is named.
    """
    stage = first_stage.save(tmp_path / "stage", channels=3, depth=4, latent_channels=4, scaling_factor=0.18215)
    towers.dinov2(tmp_path / "encoder")
    for number in range(4):
        path = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (256, 256), (60 * number, 0, 0)).save(path)
    words = (f"data.path={tmp_path / 'images'}", f"model.first_stage.path={stage}", f"folder={tmp_path / 'run'}")
    words += ("model.num_classes=2", "samples.labels=[0, 1]", "batch.global=8", "data.workers=0")
    encoder = f"model.align.path={tmp_path / 'encoder'}"
    remarks = dry_run("repa-xl2-imagenet256", *words, encoder, "model.align.width=12")
    assert any("4 images" in remark for remark in remarks)
    for more, named in (
        ((encoder,), "model.align.width: 768 in the recipe, 12"),
        (("model.align.path=nowhere",), "model.align.path: there is no folder nowhere"),
        ((encoder, "model.align.width=12", "model.align.depth=29"), "align.depth: 29 is above depth 28"),
    ):
        with pytest.raises(ConfigError, match=named):
            dry_run("repa-xl2-imagenet256", *words, *more)


def test_texts_and_latents_are_cached(tmp_path: Path) -> None:
    """Oracle: --dry-run on what the recipe's first command writes, by a tiny autoencoder and text encoder: all is in
    order; an encoder of another width, or other states than those in the cache, are named.
    """
    stage = first_stage.save(tmp_path / "stage", channels=3, depth=4, latent_channels=4, scaling_factor=0.18215)
    towers.sentences(tmp_path / "text")
    (tmp_path / "images").mkdir()
    for number in range(4):
        Image.new("RGB", (256, 256), (60 * number, 0, 0)).save(tmp_path / "images" / f"{number}.png")
        (tmp_path / "images" / f"{number}.txt").write_text("a red cat on the moon")
    names = {"first_stage": str(stage), "text_encoder": str(tmp_path / "text"), "data": str(tmp_path / "images")}
    encode_data(EncodeOptions(**names, image_size=256, flip=False, out=tmp_path / "cache", batch=4))
    words = (f"data.path={tmp_path / 'cache'}", f"model.first_stage.path={stage}", f"folder={tmp_path / 'run'}")
    words += (f"model.text_encoder={tmp_path / 'text'}", "batch.global=8", "model.max_text_len=10")
    own = "model.text_encodings_dim=12"
    assert any("4 cached images (latents" in remark for remark in dry_run("t2i", *words, own))
    towers.sentences(tmp_path / "other", seed=1)
    for more, named in (
        ((), "text_encodings_dim 1024: the encodings in data.path are 12 wide; set model.text_encodings_dim=12"),
        ((own, "model.max_text_len=8"), "max_text_len 8: the encodings in data.path are of 10 tokens"),
        (
            (own, f"model.text_encoder={tmp_path / 'other'}"),
            "text_encoder: .* is the encoder .*name the one of the data",
        ),
    ):
        with pytest.raises(ConfigError, match=named):
            dry_run("t2i", *words, *more)


def test_pixart_begins_from_published_weights(tmp_path: Path) -> None:
    """Oracle: --dry-run on what the recipe's first command writes, by a tiny autoencoder and T5, from weights of
    diffusers at another size of pictures: all is in order, and nothing begins anew, also where a null text is learned
    from the encoder's; without weights, or with those of another width of text, the entry is named.
    """
    stage = first_stage.save(tmp_path / "stage", channels=3, depth=4, latent_channels=4, scaling_factor=0.18215)
    towers.t5(tmp_path / "text")
    (tmp_path / "images").mkdir()
    for number in range(2):
        Image.new("RGB", (256, 256), (60 * number, 0, 0)).save(tmp_path / "images" / f"{number}.png")
        (tmp_path / "images" / f"{number}.txt").write_text("a red cat on the moon")
    names = {"first_stage": str(stage), "text_encoder": str(tmp_path / "text"), "data": str(tmp_path / "images")}
    encode_data(EncodeOptions(**names, image_size=256, flip=False, out=tmp_path / "cache", batch=4, max_text_len=120))
    words = (f"data.path={tmp_path / 'cache'}", f"model.first_stage.path={stage}", f"folder={tmp_path / 'run'}")
    words += (f"model.text_encoder={tmp_path / 'text'}", "model.text_encodings_dim=12", "batch.global=8")
    assert "init_from=weights/PixArt" in find_error("pixart-xl2-finetune", *words)
    weights = write_pixart(tmp_path / "weights", "folder", caption_channels=12)
    words += (f"init_from={weights}",)
    assert "num_attention_heads is 2 in config.json" in find_error("pixart-xl2-finetune", *words)
    words += ("model.size=null", "model.patch_size=2", "model.hidden_size=16", "model.depth=2", "model.num_heads=2")
    words += ("model.block.modulation=shared", "model.cross_attention=true", "model.text_projection=mlp")
    remarks = dry_run("pixart-xl2-finetune", *words)
    assert any("interpolated from 4 x 4 to 16 x 16" in remark for remark in remarks)
    assert not any("null" in remark for remark in remarks)
    remarks = dry_run("pixart-xl2-finetune", *words, "model.null_text=learned")
    assert any("the empty text of" in remark for remark in remarks)


def test_pixart_is_told_sizes_in_buckets(tmp_path: Path) -> None:
    """Oracle: --dry-run on captioned images of two shapes, from diffusers' network of 1,024 pixels, tiny: all is in
    order, and no condition begins anew; without data.size_conditions the entry is named.
    """
    stage = first_stage.save(tmp_path / "stage", channels=3, depth=4, latent_channels=4, scaling_factor=0.18215)
    towers.t5(tmp_path / "text")
    (tmp_path / "images").mkdir()
    for number, size in enumerate(((1024, 1024), (1280, 768))):
        Image.new("RGB", size, (60 * number, 0, 0)).save(tmp_path / "images" / f"{number}.png")
        (tmp_path / "images" / f"{number}.txt").write_text("a red cat on the moon")
    make_theirs(sample_size=128).save_pretrained(tmp_path / "weights")
    words = (f"data.path={tmp_path / 'images'}", f"model.first_stage.path={stage}", f"folder={tmp_path / 'run'}")
    words += (f"model.text_encoder={tmp_path / 'text'}", "model.text_encodings_dim=12", "batch.global=8")
    words += (f"init_from={tmp_path / 'weights'}", "data.image_size=1024", "model.image_size=1024", "data.workers=0")
    words += ("model.size=null", "model.patch_size=2", "model.hidden_size=24", "model.depth=2", "model.num_heads=2")
    words += ("model.block.modulation=shared", "model.cross_attention=true", "model.text_projection=mlp")
    words += ("model.size_embedding=pixart", "model.interpolation_scale=2", "data.buckets=[[1024,1024],[1280,768]]")
    remarks = dry_run("pixart-xl2-finetune", *words, "data.size_conditions=true")
    assert any("tensors loaded, 0 replaced" in remark for remark in remarks)
    assert not any("begin as zero" in remark for remark in remarks)
    assert "data.size_conditions=true" in find_error("pixart-xl2-finetune", *words)


def test_sd3_is_adapted(tmp_path: Path) -> None:
    """Oracle: --dry-run on what the recipe's first command writes, by a tiny autoencoder and three tiny text encoders,
    from tiny weights of diffusers: all is in order, and fresh are the adapters alone; without weights, and with one
    encoder in the place of three, the entry is named.
    """
    stage = first_stage.save(tmp_path / "stage", channels=3, depth=4, latent_channels=4, scaling_factor=1.5305)
    towers.joined(tmp_path / "texts")
    (tmp_path / "images").mkdir()
    for number in range(2):
        Image.new("RGB", (64, 64), (60 * number, 0, 0)).save(tmp_path / "images" / f"{number}.png")
        (tmp_path / "images" / f"{number}.txt").write_text("a red cat on the moon")
    names = {"first_stage": str(stage), "text_encoder": str(tmp_path / "texts"), "data": str(tmp_path / "images")}
    encode_data(EncodeOptions(**names, image_size=64, flip=False, out=tmp_path / "cache", batch=4))
    words = (f"data.path={tmp_path / 'cache'}", f"model.first_stage.path={stage}", f"folder={tmp_path / 'run'}")
    words += ("data.image_size=64", "model.image_size=64", "batch.global=8", "model.text_encodings_dim=12")
    words += (f"model.text_encoder={tmp_path / 'texts'}",)
    assert "init_from=weights/sd3_medium.safetensors" in find_error("sd3-lora", *words)
    words += (f"init_from={write_sd3(tmp_path / 'weights', 'folder')}",)
    assert "text_pooled_dim: 2048 values do not fit" in find_error("sd3-lora", *words)
    words += ("model.text_pooled_dim=10",)
    assert "sample_size is 8 in config.json, and 128 by model.sines_within" in find_error("sd3-lora", *words)
    tiny = {"size": None, "patch_size": 2, "hidden_size": 16, "depth": 2, "num_heads": 2, "block.joint": "true"}
    tiny |= {"text_projection": "plain", "sines_within": [6, 4], "objective": "flow"}
    words += tuple(f"model.{name}={'null' if value is None else value}" for name, value in tiny.items())
    words += ("model.learn_sigma=false",)
    remarks = dry_run("sd3-lora", *words)
    assert any("26 tensors of adapters begin anew" in remark for remark in remarks), remarks
    assert any("pos_embed: 4 x 4 patches in the middle of the file's 6 x 6, equal" in remark for remark in remarks)
    assert not any("null" in remark for remark in remarks)
    towers.t5(tmp_path / "other")
    other = find_error("sd3-lora", *words, f"model.text_encoder={tmp_path / 'other'}")
    assert "takes 256 tokens, not 334" in other


def test_adapters_begin_from_published_weights(tmp_path: Path) -> None:
    """Oracle: --dry-run on what the recipe's first command writes, by a tiny autoencoder, from a tiny file under the
    published names with 1,000 classes: fresh are the rows of labels and the adapters; without the file,
    the entry is named.
    """
    stage = first_stage.save(tmp_path / "stage", channels=3, depth=4, latent_channels=4, scaling_factor=0.18215)
    (tmp_path / "images").mkdir()
    for number in range(2):
        Image.new("RGB", (256, 256), (60 * number, 0, 0)).save(tmp_path / "images" / f"{number}.png")
    names = {"first_stage": str(stage), "data": str(tmp_path / "images")}
    encode_data(EncodeOptions(**names, image_size=256, out=tmp_path / "cache", batch=4))
    words = (f"data.path={tmp_path / 'cache'}", f"model.first_stage.path={stage}", f"folder={tmp_path / 'run'}")
    assert "init_from=weights/DiT-XL-2-256x256.pt" in find_error("dit-xl2-lora", *words)
    tiny = {"size": None, "patch_size": 2, "hidden_size": 16, "depth": 2, "num_heads": 2}
    network = DiT(input_size=32, patch_size=2, hidden_size=16, depth=2, num_heads=2)
    torch.save(network.state_dict(), tmp_path / "published.pt")
    words += tuple(f"model.{name}={'null' if value is None else value}" for name, value in tiny.items())
    remarks = dry_run("dit-xl2-lora", *words, f"init_from={tmp_path / 'published.pt'}", "batch.global=8")
    assert any(" 31 tensors loaded, 1 replaced" in remark for remark in remarks)
    assert any("y_embedder.embedding_table.weight: 1001 rows" in remark for remark in remarks)
    assert any("16 tensors of adapters begin anew" in remark for remark in remarks)


def find_error(name: str, *words: str) -> str:
    with pytest.raises(ConfigError) as error:
        dry_run(name, *words)
    return str(error.value)


def test_published_settings() -> None:
    """Oracle: the originals' configs and the shapes in their files: REPA's projectors, block and weight; the number of
    LightningDiT's weights with its positions, its cosine term, times and rates.
    """
    run = recipe.load_recipe(ROOT / "launch/recipes/repa-xl2-imagenet256.yaml")
    system = systems.build("dit", {**run.model, "first_stage": None, "image_size": 32})
    network = system.build_part_on_meta("denoiser")
    projectors = [
        tuple(weight.shape) for name, weight in network.state_dict().items() if name.startswith("projectors.")
    ]
    assert projectors == [(2048, 1152), (2048,), (2048, 2048), (2048,), (768, 2048), (768,)]
    assert system.alignment.weight == 0.5 and network.align_depth == 8
    assert (run.optimizer.lr, run.optimizer.clip, run.batch.global_, run.optimizer.betas) == (
        1e-4,
        1,
        256,
        (0.9, 0.999),
    )
    run = recipe.load_recipe(ROOT / "launch/recipes/lightningdit-xl1-vavae.yaml")
    system = systems.build("dit", {**run.model, "image_size": 16, "in_channels": 32})
    state = system.build_part_on_meta("denoiser").state_dict()
    assert sum(weight.numel() for weight in state.values()) == 675_256_736
    assert (run.optimizer.lr, run.optimizer.betas, run.batch.global_, run.steps) == (2e-4, (0.9, 0.95), 1024, 80_000)
    assert system.config.flow.cosine == 1 and system.config.flow.density == "logit_normal"


def test_clips_are_encoded_while_they_train(tmp_path: Path) -> None:
    """Oracle: --dry-run on two captioned clips, by a tiny autoencoder and text encoder: all is in order; clips of
    another length than the model's, and a number of frames that patches do not divide, are named.
    """
    stage = first_stage.save(tmp_path / "stage", channels=3, depth=4, latent_channels=4, scaling_factor=0.18215)
    towers.sentences(tmp_path / "text")
    (tmp_path / "clips").mkdir()
    for number in range(1, 3):  # by their names, one of two is held out
        clips.write_pictures(tmp_path / "clips" / f"{number}.apng", clips.moving(20, 256, 256, seed=number))
        (tmp_path / "clips" / f"{number}.txt").write_text("a red cat on the moon")
    words = (f"data.path={tmp_path / 'clips'}", "data.held_out=0.5", f"folder={tmp_path / 'run'}", "batch.global=8")
    words += (f"model.text_encoder={tmp_path / 'text'}", "model.text_encodings_dim=12", "model.max_text_len=10")
    words += (f"model.first_stage.path={stage}", "data.workers=0")
    assert any("1 clip" in remark for remark in dry_run("t2v", *words))
    for more, named in (
        ("data.num_frames=16", r"video.frames: 16 frames are no 1 \+ k x 4.*take 13 or 17"),
        ("model.video.frames=13", "data.num_frames=17 and model.video.frames=13: make both equal"),
        ("data.buckets=[4, 17]", "data.buckets: 4 is not 1 . a multiple of model.video.patch_frames 4: take 1 or 5"),
    ):
        with pytest.raises(ConfigError, match=named):
            dry_run("t2v", *words, more)
