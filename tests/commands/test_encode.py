"""Encoding a data set: what the shards hold, what the same command does again, what it refuses."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from dstrain import rng, systems
from dstrain.commands.encode import EncodeOptions, encode_data
from dstrain.commands.encoding.folder import lock_and_prepare_folder
from dstrain.commands.encoding.plan import plan_encoding
from dstrain.data.batches import Batches, iterate_held_out
from dstrain.data.cached import shards
from dstrain.data.cached.latents import Latents, is_codes_cache
from dstrain.data.decode.crops import Crop
from dstrain.data.open import fill_in_codes_entry, open_sources
from dstrain.data.order import Order
from dstrain.data.sources.images import open_images
from dstrain.encoders.text import TextEncoder, unpack_captions
from dstrain.recipe import ConfigError, Data
from tests.support import first_stage, towers
from tests.support.pictures import break_file, folder


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    return first_stage.save(tmp_path_factory.mktemp("first_stage") / "vae")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Thirty pictures of three classes."""
    return folder(tmp_path_factory.mktemp("images") / "data", 3, 10)


def options(path, vae, images, **changes):
    settings = {
        "out": path,
        "first_stage": str(vae),
        "data": str(images),
        "image_size": 16,
        "batch": 4,
        "shard_size": 11,
        "dtype": "float32",
    }
    return EncodeOptions(**settings | changes)


def content(path):
    return {entry.name: entry.read_bytes() for entry in sorted(path.iterdir()) if entry.name[0] != "."}


def test_shards_hold_the_posterior(tmp_path, vae, images):
    """Oracle: diffusers' own posterior of each image and of its mirror image; numpy's statistics of all of them."""
    from diffusers import AutoencoderKL

    index = encode_data(options(tmp_path / "out", vae, images))
    network, source = AutoencoderKL.from_pretrained(vae, low_cpu_mem_usage=False), open_images(images, 16, channels=1)
    found = [load_file(tmp_path / "out" / shard["name"]) for shard in index["shards"]]
    assert [len(shard["label"]) for shard in found] == [11, 11, 8]
    moments, labels, sources = (
        np.concatenate([shard[name] for shard in found]) for name in ("moments", "label", "source")
    )
    assert moments.shape == (30, 2, 2, 3, 4, 4) and moments.dtype == np.float32
    assert sources.tolist() == list(range(30)) and labels.tolist() == [source[i]["label"] for i in range(30)]
    pixels = torch.stack([source[i]["image"] for i in range(30)]).float() / 127.5 - 1
    for side, x in enumerate((pixels, pixels.flip(-1))):
        with torch.no_grad():
            posterior = network.encode(x).latent_dist
        np.testing.assert_allclose(moments[:, side, 0], posterior.mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(moments[:, side, 1], posterior.std, rtol=1e-4, atol=1e-5)
    assert not np.allclose(moments[:, 1], np.flip(moments[:, 0], -1), atol=1e-3), "a mirrored latent is no latent"
    draw = np.random.default_rng(0).standard_normal((400, *moments.shape[:2], 3, 4, 4))
    latents = moments[:, :, 0] + moments[:, :, 1] * draw
    assert index["statistics"]["std"] == pytest.approx(latents.std(), rel=2e-3)
    assert index["statistics"]["scaling_factor"] == 1 / index["statistics"]["std"]
    np.testing.assert_allclose(index["statistics"]["channel_std"], latents.std((0, 1, 2, 4, 5)), rtol=5e-3)
    np.testing.assert_allclose(index["statistics"]["channel_mean"], latents.mean((0, 1, 2, 4, 5)), atol=5e-3)


def test_no_bar_off_a_terminal(tmp_path, vae, images, capsys):
    """Oracle: a log's lines: a bar would write itself over and over into one."""
    encode_data(options(tmp_path / "out", vae, images))
    assert "image/s" not in capsys.readouterr().err


def test_the_same_command_again(tmp_path, vae, images):
    """Oracle: the bytes of the first time: shards that are damaged or missing are made anew, the others not touched."""
    out = tmp_path / "out"
    encode_data(options(out, vae, images))
    before = content(out)
    assert set(before) == {"encoding.json", "index.json", *(f"shard_0000{i}.safetensors" for i in range(3))}
    (out / "index.json").unlink()
    (out / "shard_00000.safetensors").unlink()
    data = bytearray(before["shard_00001.safetensors"])
    data[-5] ^= 1
    (out / "shard_00001.safetensors").write_bytes(data)
    (out / "shard_00001.safetensors.tmp").write_bytes(b"left over")
    kept = (out / "shard_00002.safetensors").stat().st_mtime_ns
    encode_data(options(out, vae, images))
    assert content(out) == before
    assert (out / "shard_00002.safetensors").stat().st_mtime_ns == kept


def test_parts_make_the_whole(tmp_path, vae, images, capsys):
    """Oracle: the bytes of one command, from parts in any order, in one folder and in two that are put together."""
    encode_data(options(tmp_path / "whole", vae, images, shard_size=4))
    whole, out = content(tmp_path / "whole"), tmp_path / "out"

    def part(place, parts, out=out):
        return encode_data(options(out, vae, images, shard_size=4, part=(place, parts)))

    (tmp_path / "out").mkdir()
    assert part(3, 3) is None and "these are not: 1/3, 2/3" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="not encoded to the end"):
        Latents(out)
    (out / ".shard_00004.safetensors.tmp").write_bytes(b"another part writes it now")
    assert part(1, 3) is None and (out / ".shard_00004.safetensors.tmp").exists()
    assert sorted(path.name for path in out.glob("shard*")) == [shards.name_shard(k) for k in (0, 1, 5, 6, 7)]
    part(2, 3, tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere").glob("shard_*"):
        shutil.copy(path, out)
    damaged = out / shards.name_shard(3)
    damaged.write_bytes(damaged.read_bytes()[:50])
    assert part(3, 3) is None and "these are not: 2/3" in capsys.readouterr().out
    index = part(2, 3)
    assert content(out) == whole and index["class_counts"] == Latents(out).count_samples_by_class().tolist() == [10] * 3
    assert part(40, 64)["encoding"] == index["encoding"], "a part of no shard may be the last one"


def test_another_encoding_is_refused(tmp_path, vae, images):
    """Oracle: the contract: what differs is named, with both values, and nothing is touched."""
    out = tmp_path / "out"
    encode_data(options(out, vae, images))
    before = content(out)
    other = first_stage.save(tmp_path / "other", seed=1)
    more = folder(tmp_path / "more", 3, 11)
    edited = Path(shutil.copytree(images, tmp_path / "edited"))
    encode_data(options(out, vae, edited))  # a copy is the same data
    encode_data(options(out, vae, images))
    assert content(out) == before
    next(edited.glob("*/*")).write_bytes(b"another")
    for changes, words in (
        ({"first_stage": str(other)}, f"first_stage {vae} .* there, {other} .* here"),
        ({"data": str(more)}, f"data {images}, train .*n=30.* there, {more}, train .*n=33"),
        ({"data": str(edited)}, f"data {images}, train .*bytes=.* there, {edited}, train .* here"),
        ({"image_size": 32}, "image_size 16 there, 32 here"),
        ({"dtype": "float16"}, "dtype float32 there, float16 here"),
        ({"shard_size": 10}, "shard_size 11 there, 10 here"),
        ({"precision": "bf16"}, "precision None there, bf16 here"),
        ({"flip": False}, "flips 2 there, 1 here"),
    ):
        with pytest.raises(ConfigError, match=words):
            encode_data(options(out, vae, images, **changes))
    assert content(out) == before
    rounded = encode_data(options(tmp_path / "rounded", vae, images, precision="bf16"))
    with pytest.raises(ConfigError, match="precision bf16 there, None here"):
        encode_data(options(tmp_path / "rounded", vae, images))
    assert rounded["encoding"]["first_stage"] == shards.read_index(out)["encoding"]["first_stage"]
    exact, near = (load_file(path / shards.name_shard(0))["moments"] for path in (out, tmp_path / "rounded"))
    assert 0 < np.linalg.norm(near - exact) < 0.02 * np.linalg.norm(exact)


def test_caches_of_the_built_in_set_stay_valid(tmp_path, vae):
    """Oracle: what earlier versions wrote down: the fingerprint that runs keep, too."""
    found = plan_encoding(options(tmp_path, vae, "builtin:fashion")).encoding["data"]
    assert (
        found
        == open_images("builtin:fashion", 16, channels=1).compute_fingerprint()
        == "builtin:fashion train n=2000 crc=4188a2ba"
    )


def test_what_cannot_be_encoded(tmp_path, vae, images):
    """Oracle: the contract: one line with the remedy, before anything is written."""
    out = tmp_path / "out"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    hot = first_stage.save(tmp_path / "hot")
    for changes, words in (
        ({"image_size": 18}, "--image-size 18 is no multiple of 4"),
        ({"data": None}, "--data FOLDER"),
        ({"data": "nowhere"}, "--data nowhere does not exist"),
        ({"first_stage": str(tmp_path / "no")}, "there is no folder"),
        ({"split": "held_out"}, "--held-out"),
        ({"first_stage": "runs/none"}, "--first-stage runs/none: there is no folder.*dstrain export"),
        ({"data": "builtin:fashion", "held_out": 0.1}, "--held-out 0.1: builtin:fashion holds out"),
        ({"out": tmp_path / "full"}, "holds thesis.tex and no encoding"),
    ):
        with pytest.raises(ValueError, match=words):
            encode_data(options(out, vae, images, **changes))
        assert not out.exists()
    (tmp_path / "odd" / "encoding.json").mkdir(parents=True)
    with pytest.raises(ConfigError, match="odd/encoding.json cannot be read or written"):
        encode_data(options(tmp_path / "odd", vae, images))
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file

    weights = load(hot / "diffusion_pytorch_model.safetensors")
    weights["quant_conv.bias"] += 1e6
    save_file(weights, hot / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="not finite in float16: take --dtype float32"):
        encode_data(options(out, hot, images, dtype="float16"))
    encode_data(options(tmp_path / "wide", hot, images))
    with pytest.raises(ConfigError, match="holds cached codes already"):
        encode_data(options(out, vae, tmp_path / "wide"))


def test_unreadable_files(tmp_path, vae):
    """Oracle: the rule of bad_files.py: the next image that can be read, listed, and not too many."""
    root = folder(tmp_path / "data", 2, 10)
    for name in ("c0/003.png", "c0/004.png", "c1/009.png"):
        break_file(root / name, "truncated")
    with pytest.raises(ConfigError, match="2 of 20 files cannot be read, more than --max-bad-fraction 0.05"):
        encode_data(options(tmp_path / "out", vae, root, max_bad_fraction=0.05))
    index = encode_data(options(tmp_path / "more", vae, root, max_bad_fraction=0.2))
    assert [name for name, _ in index["bad_files"]] == ["c0/003.png", "c0/004.png", "c1/009.png"]
    found = [load_file(tmp_path / "more" / shard["name"]) for shard in index["shards"]]
    sources = np.concatenate([shard["source"] for shard in found])
    assert sources.tolist() == [{3: 5, 4: 5, 19: 0}.get(i, i) for i in range(20)]
    assert found[1]["label"][8] == 0 and np.array_equal(found[1]["moments"][8], found[0]["moments"][0])


def test_the_same_bytes_on_any_number_of_threads(tmp_path, images):
    """Oracle: the bytes that one thread writes, of a network wide enough for two to share its sums."""
    wide = first_stage.save(tmp_path / "wide", depth=2, block_out_channels=(64, 128), norm_num_groups=32)
    few, before, found = folder(tmp_path / "few", 1, 4), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            encode_data(options(tmp_path / str(threads), wide, few, image_size=64, batch=2, flip=False))
            assert torch.get_num_threads() == threads, "the caller's own number was not given back"
            found.append(content(tmp_path / str(threads)))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


@pytest.mark.parametrize("damage", [None, "", "{", '{\n "encoding": {\n  "batch', '{"encoding": 3}'])
def test_what_the_folder_is_of_can_be_repaired(tmp_path, vae, images, damage):
    """Oracle: the undamaged bytes: from the index, and without it from what the shards say of themselves."""
    out = tmp_path / "out"
    encode_data(options(out, vae, images))
    before = content(out)

    def spoil(index):
        (out / "encoding.json").unlink() if damage is None else (out / "encoding.json").write_text(damage)
        if not index:
            (out / "index.json").unlink()

    for index in (True, False):
        spoil(index)
        kept = {path: path.stat().st_mtime_ns for path in out.glob("shard_*")}
        assert is_codes_cache(out)
        with pytest.raises(ConfigError, match="holds another encoding.*ame another"):
            encode_data(options(out, vae, images, flip=False))
        encode_data(options(out, vae, images))
        assert content(out) == before and {path: path.stat().st_mtime_ns for path in kept} == kept


def test_files_of_others_are_left_alone(tmp_path, vae, images):
    """Oracle: their bytes; only names that launch/encode.py writes are taken for its own, and only with its words."""
    for name in ("index.json", "encoding.json", "thesis.tmp"):
        out = tmp_path / name.replace(".", "_")
        out.mkdir()
        (out / name).write_text('{"mine": 1}')
        with pytest.raises(ConfigError, match=f"holds {name} and no encoding: name a new folder"):
            encode_data(options(out, vae, images))
        assert content(out) == {name: b'{"mine": 1}'}


def test_the_last_batch_is_like_the_others(tmp_path, vae, images):
    """Oracle: the same images in full batches: padding shows in no bit, whatever stands beside an image."""
    encode_data(options(tmp_path / "whole", vae, images, shard_size=28))
    encode_data(options(tmp_path / "cut", vae, images, shard_size=5))
    whole, cut = Latents(tmp_path / "whole"), Latents(tmp_path / "cut")
    for i in range(30):
        assert all(torch.equal(a, b) for a, b in zip(list(whole[i].values())[:2], list(cut[i].values())[:2]))


def test_several_captions_and_their_states(tmp_path, vae):
    """Oracle: the text encoder by itself on the lines of each file; the caption that the sample's key draws."""
    root, count = folder(tmp_path / "data", 2, 5), [1 + i % 3 for i in range(10)]
    lines = [
        [f"a {towers.WORDS[1 + (i + k) % 3]} {towers.WORDS[4 + (i * k) % 3]}" for k in range(count[i])]
        for i in range(10)
    ]
    for path, texts in zip(sorted(root.glob("*/*.png")), lines):
        path.with_suffix(".txt").write_text("\n".join(texts))
    towers.sentences(tmp_path / "text")
    encoder = TextEncoder(str(tmp_path / "text"))
    words = {"text_encoder": str(tmp_path / "text"), "shard_size": 4, "num_captions": 3}
    encode_data(options(tmp_path / "out", vae, root, **words))
    plain = options(tmp_path / "plain", vae, root, shard_size=4)
    encode_data(plain)
    data = fill_in_codes_entry(Data(path=str(tmp_path / "out"), image_size=16, channels=1))
    assert data.codes.text == (encoder.max_length, encoder.encodings_dim)
    source, images = open_sources(data)[0], Latents(plain.out)
    assert source.captioned and "captions" in source.describe_samples()
    seen = set()
    with Batches(source, global_batch=10, micro_batch=5, seed=2) as batches:
        for step in range(12):
            for batch in batches.read_step(step):
                chance = rng.uniform(batch["key"], "variant", (2,))[:, 1].double()
                index = Order(10, 2).find_sample_index(step * 10 + batch["position"]).tolist()
                chosen = [int(float(u) * count[i]) for u, i in zip(chance, index)]
                seen |= set(zip(index, chosen))
                texts = [lines[i][k] for i, k in zip(index, chosen)]
                assert unpack_captions(batch["caption"]) == texts
                states = encoder.encode(texts)
                torch.testing.assert_close(batch["text_encodings"], states["text_encodings"], rtol=1e-5, atol=1e-6)
                assert torch.equal(batch["text_mask"], states["text_mask"])
                same = images.read_codes(torch.tensor(index), rng.uniform(batch["key"], "flip") < 0.5)
                assert torch.equal(batch["latent_mean"], same["latent_mean"]) and batch["label"].tolist() == [
                    i // 5 for i in index
                ]
    assert seen == {(i, k) for i in range(10) for k in range(count[i])}, "each caption is drawn at some step"
    (first,) = iterate_held_out(source, 10)
    assert unpack_captions(first["caption"]) == [texts[0] for texts in lines]
    one = encode_data(options(tmp_path / "one", vae, root, num_captions=1))
    assert one["encoding"]["text"] is None
    assert unpack_captions(Latents(tmp_path / "one").read_codes(torch.arange(10))["caption"]) == [
        texts[0] for texts in lines
    ]
    with pytest.raises(ConfigError, match="--num-captions: the images of .* have no captions"):
        encode_data(options(tmp_path / "none", vae, folder(tmp_path / "bare", 1, 2), num_captions=2))


def test_several_crops(tmp_path, vae):
    """Oracle: diffusers' posterior of the crops that data.crop's own function cuts by the numbers of each sample and
    crop; the crop that the sample's key draws; the first one, held out; numpy's deviation of all that is
    stored. Parts and shards change no bit.
    """
    from diffusers import AutoencoderKL

    root, network = folder(tmp_path / "data", 2, 4), AutoencoderKL.from_pretrained(vae, low_cpu_mem_usage=False)
    words = {"crops": 3, "crop": "random_resized"}
    encode_data(options(tmp_path / "out", vae, root, **words))
    crop, expected = Crop("random_resized"), []
    for i, path in enumerate(sorted(root.glob("*/*.png"))):
        for j in range(3):
            numbers = rng.uniform(rng.keys_of_seeds(torch.tensor([3 * i + j])), "crop", (crop.num_random_numbers + 1,))[
                0
            ].tolist()
            cut = np.asarray(crop(Image.open(path).convert("L"), 16, 16, numbers[:-1]).image, np.float32)
            pixels = torch.from_numpy(cut)[None, None] / 127.5 - 1
            expected.append([network.encode(x).latent_dist.mean[0] for x in (pixels, pixels.flip(-1))])
    expected = torch.stack([torch.stack(sides) for sides in expected]).detach().view(8, 3, 2, 3, 4, 4)
    assert not torch.allclose(expected[:, 0], expected[:, 1], atol=1e-2)
    source, seen = Latents(tmp_path / "out"), set()
    assert "3 crops each" in source.describe_samples()
    paths = sorted((tmp_path / "out").glob("shard_*"))
    stored = np.concatenate([load_file(path)["moments"] for path in paths]).astype(np.float64)
    std = math.sqrt(stored[:, :, 0].var() + (stored[:, :, 1] ** 2).mean())
    assert source.index["statistics"]["scaling_factor"] == pytest.approx(1 / std, rel=1e-6)
    with Batches(source, global_batch=8, micro_batch=4, seed=2) as batches:
        for step in range(14):
            for batch in batches.read_step(step):
                chosen = (rng.uniform(batch["key"], "variant", (2,))[:, 0].double() * 3).long()
                index = Order(8, 2).find_sample_index(step * 8 + batch["position"])
                side = (rng.uniform(batch["key"], "flip") < 0.5).long()
                torch.testing.assert_close(batch["latent_mean"], expected[index, chosen, side], rtol=1e-4, atol=1e-5)
                seen |= set(zip(index.tolist(), chosen.tolist()))
    assert seen == {(i, j) for i in range(8) for j in range(3)}, "each crop is drawn at some step"
    (first,) = iterate_held_out(source, 8)
    torch.testing.assert_close(first["latent_mean"], expected[:, 0, 0], rtol=1e-4, atol=1e-5)
    for part in ((2, 2), (1, 2)):
        encode_data(options(tmp_path / "parts", vae, root, shard_size=3, part=part, **words))
    every, chance = torch.arange(8), torch.rand(8, 2)
    assert all(
        torch.equal(*pair)
        for pair in zip(
            source.read_codes(every, None, chance).values(),
            Latents(tmp_path / "parts").read_codes(every, None, chance).values(),
        )
    )
    with pytest.raises(ConfigError, match="say how many of each image, such as --crops 4"):
        encode_data(options(tmp_path / "none", vae, root, crop="dalle"))
    with pytest.raises(ConfigError, match="crops None there, 3 here.*|crops 3 there, None here"):
        encode_data(options(tmp_path / "out", vae, root))


def test_training_from_latents_is_training_online(tmp_path, vae, images):
    """Oracle: the same DiT fed with images: the same x_start, bit for bit, mirrored ones included (float32 shards)."""
    encode_data(options(tmp_path / "out", vae, images, image_size=32, batch=6))
    data = Data(path=str(images), image_size=32, channels=1)
    cached = fill_in_codes_entry(data.model_copy(update={"path": str(tmp_path / "out")}))
    model = {
        "patch_size": 1,
        "hidden_size": 32,
        "depth": 1,
        "num_heads": 2,
        "num_classes": 10,
        "in_channels": 3,
        "image_size": 32,
        "first_stage": {"path": str(vae), "factor": 4},
    }
    codes = cached.codes.model_dump(include={"shape", "scaling_factor", "first_stage"})
    online, offline = systems.build("dit", model), systems.build("dit", model | {"codes": codes})
    assert offline.first_stage.vae.encoder is None
    mirrored: list[bool] = []
    sizes = {"global_batch": 12, "micro_batch": 6, "seed": 5}
    with Batches(open_sources(data)[0], **sizes) as one, Batches(open_sources(cached)[0], **sizes) as two:
        for step in range(4):
            for a, b in zip(one.read_step(step), two.read_step(step), strict=True):
                x, y = online.encode(a), offline.encode(b)
                assert x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)
                mirrored += (rng.uniform(a["key"], "flip") < 0.5).tolist()
    assert any(mirrored) and not all(mirrored)


def test_others_are_told_what_writes(tmp_path):
    """Oracle: the lease of a folder while it is encoded, which other machines read: the verb's name."""
    with lock_and_prepare_folder(tmp_path / "out", "encodes", lambda: None):
        (lease,) = (tmp_path / "out").glob(".lease-*")
        assert "encode" in lease.read_text() and "train" not in lease.read_text()
