"""Cached codes as a source: what a batch holds, held-out shares, damage, and what a recipe says beside an index."""

import ctypes
import json
import mmap
import pickle
import subprocess
import sys
import time
from argparse import Namespace

import numpy as np
import pytest
import torch

from dstrain import recipe, rng, systems
from dstrain.commands.job import JobOptions, prepare_job
from dstrain.data.batches import Batches, iterate_held_out
from dstrain.data.cached import shards
from dstrain.data.cached.latents import Latents, is_codes_cache
from dstrain.data.open import fill_in_codes_entry, open_sources
from dstrain.data.order import Order
from dstrain.disk.sealed import render_json_with_hash
from dstrain.encoders.autoencoder import Autoencoder
from dstrain.recipe import ConfigError, Data
from dstrain.systems.base import Request
from launch.bench import latents as bench_latents
from tests.support import first_stage, pictures
from tests.support.launch import ROOT, environment

DIT = systems.find_config_class("dit")

FEW_FILES = """
import resource, sys
import numpy as np, torch
from dstrain.data.cached.latents import Latents
codes, source = np.load(sys.argv[2]), Latents(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
for batch in (300, 40):
    for index in torch.randperm(300, generator=torch.Generator().manual_seed(0)).split(batch):
        taken = source.read_codes(index)
        assert np.array_equal(taken["latent_mean"], codes[index.numpy(), 0, 0]) and len(source._open) <= 16
        assert torch.equal(taken["label"], index % 3)
print(source.describe_samples().split(", ")[1])
"""

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def write(
    folder,
    number=50,
    size=16,
    flips=2,
    kind="latents",
    seed=0,
    classes=("a", "b", "c"),
    stage="stage",
    image_size=16,
    shape=None,
    channels=1,
):
    """A folder as dstrain encode leaves it, with random codes; and all of these in one array."""
    folder.mkdir(parents=True)
    rng, shape = np.random.default_rng(seed), shape or ([3, 4, 4] if kind == "latents" else [4, 4])
    encoding = {
        "kind": kind,
        "shape": shape,
        "dtype": "float16" if kind == "latents" else "int32",
        "number": number,
        "flips": flips,
        "image_size": image_size,
        "channels": channels,
        "shard_size": size,
        "batch": 4,
        "first_stage": stage,
        "data": "random",
    }
    records, every = [], []
    for k in range(-(-number // size)):
        rows = min(size, number - k * size)
        if kind == "latents":
            codes = rng.standard_normal((rows, flips, 2, *shape)).astype(np.float16)
            codes[:, :, 1] = np.abs(codes[:, :, 1])
        else:
            codes = rng.integers(0, 99, (rows, flips, *shape), dtype=np.int32)
        label = (np.arange(k * size, k * size + rows) % len(classes)).astype(np.int64)
        path = folder / shards.name_shard(k)
        path.write_bytes(
            shards.pack_shard(
                {"moments" if kind == "latents" else "tokens": codes, "label": label, "source": np.arange(rows)},
                {
                    "encoding": shards.hash_encoding(encoding),
                    "number": k,
                    "bad": [],
                    "sums": shards.sum_codes_for_statistics(codes),
                },
            )
        )
        records.append(shards.make_shard_record(path, shards.read_verified_metadata(path)))
        every.append(codes)
    (folder / shards.INDEX).write_bytes(
        render_json_with_hash(shards.make_index_body(encoding, list(classes), records, {}))
    )
    return np.concatenate(every)


def test_items_and_batches_are_what_was_stored(tmp_path):
    """Oracle: the arrays that were written; mirrored samples are the second side's."""
    codes = write(tmp_path / "x")
    source = Latents(tmp_path / "x")
    assert len(source) == 50 and source.classes == ("a", "b", "c") and source.light
    assert is_codes_cache(tmp_path / "x") and not is_codes_cache(tmp_path)
    item = source[37]
    assert item["label"] == 37 % 3 and item["latent_mean"].dtype == torch.float16
    assert np.array_equal(item["latent_mean"], codes[37, 0, 0]) and np.array_equal(item["latent_std"], codes[37, 0, 1])
    index, mirrored = torch.tensor([49, 0, 16, 15, 16]), torch.tensor([True, False, True, False, False])
    batch = pickle.loads(pickle.dumps(source)).read_codes(index, mirrored)
    expected = codes[index.numpy(), mirrored.numpy().astype(int)]
    assert np.array_equal(batch["latent_mean"], expected[:, 0]) and np.array_equal(batch["latent_std"], expected[:, 1])
    assert batch["label"].tolist() == (index % 3).tolist()
    assert source.name_sample(17) == "shard_00001.safetensors[1]"
    with pytest.raises(IndexError):
        source[50]


def test_token_ids(tmp_path):
    """Oracle: the ids that were written, as int64, and the side that the key's flip asks for."""
    codes = write(tmp_path / "x", kind="tokens")
    batches = Batches(Latents(tmp_path / "x"), global_batch=20, micro_batch=20, seed=1)
    (batch,) = batches.read_step(0)
    side = (rng.uniform(batch["key"], "flip") < 0.5).long().numpy()
    index = Order(50, 1).find_sample_index(torch.arange(20)).numpy()
    assert batch["tokens"].dtype == torch.int64 and np.array_equal(batch["tokens"], codes[index, side])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_global_batch_at_any_world_and_worker_count(tmp_path, num_workers):
    """Oracle: the formula of the order, the keys and the flip, on one rank without workers."""
    codes, position = write(tmp_path / "x"), torch.arange(24)
    for world, micro in ((1, 24), (2, 4)):
        parts = []
        for rank in range(world):
            with Batches(
                Latents(tmp_path / "x"),
                global_batch=24,
                micro_batch=micro,
                seed=3,
                rank=rank,
                world=world,
                num_workers=num_workers,
            ) as batches:
                parts += batches.read_step(7)
        whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        rows = whole["position"].argsort()
        key, index = rng.keys(3, 7, position), Order(50, 3).find_sample_index(7 * 24 + position).numpy()
        side = (rng.uniform(key, "flip") < 0.5).long().numpy()
        assert 0 < side.sum() < 24 and torch.equal(whole["key"][rows], key)
        assert np.array_equal(whole["latent_mean"][rows], codes[index, side, 0])
        assert np.array_equal(whole["latent_std"][rows], codes[index, side, 1])


def test_more_shards_than_a_process_may_open(tmp_path):
    """Oracle: the codes that were written, in batches over 300 shards, by a process that may open 64 files; and what
    the size of each shard takes.
    """
    codes = write(tmp_path / "x", number=300, size=1, flips=1)
    np.save(tmp_path / "codes.npy", codes)
    done = subprocess.run(
        [sys.executable, "-c", FEW_FILES, tmp_path / "x", tmp_path / "codes.npy"],
        text=True,
        capture_output=True,
        env=environment(),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3 classes of 100\n"
    write(tmp_path / "few", number=10, size=1, flips=1)
    few, many = Latents(tmp_path / "few", "train", 0.1), Latents(tmp_path / "x", "train", 0.1)
    for source in (few, many):
        source.read_batch(torch.arange(len(source)))
    assert len(pickle.dumps(many)) - len(pickle.dumps(few)) < 290 * 10, "a worker gets 8 bytes a shard, and no list"


def test_a_share_is_held_out(tmp_path):
    """Oracle: the two splits part the whole; a share by the hash, near the fraction, the same at every opening."""
    codes = write(tmp_path / "x", number=1000, size=300)
    train, unseen = (Latents(tmp_path / "x", split, 0.2) for split in ("train", "held_out"))
    members, others = (view.members.find_members_at(np.arange(len(view))) for view in (unseen, train))
    held = rng.uniform(rng.keys_of_seeds(torch.arange(1000)), "held_out") < 0.2
    assert members.tolist() == held.nonzero()[:, 0].tolist() and others.tolist() == (~held).nonzero()[:, 0].tolist()
    assert 150 < len(unseen) < 250 and np.array_equal(unseen[7]["latent_mean"], codes[members[7], 0, 0])
    assert train.count_samples_by_class().tolist() == np.bincount(others % 3).tolist()
    assert unseen.name_sample(7).endswith(f"[{members[7] % 300}]")
    assert train.compute_fingerprint() != unseen.compute_fingerprint() != Latents(tmp_path / "x").compute_fingerprint()
    seen = list(iterate_held_out(unseen, 64))
    rows = torch.cat([batch["latent_mean"][batch["valid"]] for batch in seen])
    assert np.array_equal(rows, codes[members, 0, 0]), "held-out samples are never mirrored"
    with pytest.raises(ValueError, match="leaves none of the 1000"):
        Latents(tmp_path / "x", "held_out", 1e-9)


def test_the_benchmark_reads_the_same(tmp_path, capsys):
    """Oracle: each other: both sides of launch/bench/latents.py give the latents that were made up for it."""
    options = Namespace(samples=30, batch=8, channels=2, size=4, rounds=2, shard_size=12, dtype="float32", step=0.0)
    bench_latents.write(tmp_path, options)
    index = torch.tensor([29, 0, 13, 12])
    from_shards = Latents(tmp_path / "shards").read_codes(index)
    from_files = bench_latents.from_files(tmp_path / "files", index)
    for name in ("latent_mean", "label"):
        assert torch.equal(from_shards[name], from_files[name])
    bench_latents.compare(tmp_path, options)
    text = capsys.readouterr().out
    assert "files" in text and "shards" in text and "/ files" in text


# -------------------------------------------------------------------------------------------------------------- damage


def test_missing_and_truncated_shards(tmp_path):
    """Oracle: the contract: an error when the source is opened, naming the file and the remedy."""
    write(tmp_path / "x")
    path = tmp_path / "x" / "shard_00001.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    with pytest.raises(ValueError, match=r"shard_00001.safetensors has \d+ bytes instead of .*dstrain encode"):
        Latents(tmp_path / "x")
    path.unlink()
    with pytest.raises(ValueError, match="shard_00001.safetensors is missing.*dstrain encode"):
        Latents(tmp_path / "x")


def test_any_altered_byte_is_found(tmp_path):
    """Oracle: the bytes that were written: 300 flips anywhere in a shard, all found by its hash, none by accident."""
    write(tmp_path / "x")
    path = tmp_path / "x" / "shard_00002.safetensors"
    data, rng = path.read_bytes(), np.random.default_rng(0)
    Latents(tmp_path / "x").verify_shards()
    header = 8 + int.from_bytes(data[:8], "little")
    for place in [*range(8), *rng.integers(0, header, 140), *rng.integers(header, len(data), 160)]:
        altered = bytearray(data)
        altered[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(altered)
        with pytest.raises(ValueError, match="shard_00002.safetensors has altered"):
            Latents(tmp_path / "x").verify_shards()
    path.write_bytes((tmp_path / "x" / "shard_00001.safetensors").read_bytes())
    with pytest.raises(ValueError, match="shard_00002.safetensors"):
        Latents(tmp_path / "x").verify_shards()


def test_damaged_index(tmp_path):
    """Oracle: the contract: an index that is altered, cut, of another format or not there yet is no index."""
    write(tmp_path / "x")
    path = tmp_path / "x" / "index.json"
    text = path.read_text()
    for wrong in (text.replace('"scaling_factor": 0', '"scaling_factor": 1'), text[:-9], "{}", "[1]", "\0"):
        assert wrong != text
        path.write_text(wrong)
        with pytest.raises(ValueError, match="index.json is truncated or altered"):
            Latents(tmp_path / "x")
    path.write_bytes(render_json_with_hash(json.loads(text)["body"] | {"format": 9}))
    with pytest.raises(ValueError, match="has format 9"):
        Latents(tmp_path / "x")
    path.unlink()
    with pytest.raises(ValueError, match="holds no index.json"):
        Latents(tmp_path / "x")
    (tmp_path / "x" / "encoding.json").write_text("{}")
    with pytest.raises(ValueError, match="not encoded to the end"):
        Latents(tmp_path / "x")


# ------------------------------------------------------------------------------------------------------- in a recipe


@pytest.fixture
def stage(tmp_path):
    """A first stage, latents that say they are of it, and the overrides of a recipe that reads them."""
    from dstrain.encoders.autoencoder import Autoencoder

    path = first_stage.save(tmp_path / "vae")
    write(tmp_path / "x", stage=Autoencoder(str(path)).compute_fingerprint())
    words = [
        f"data.path={tmp_path / 'x'}",
        "data.image_size=16",
        "data.channels=1",
        "model.patch_size=1",
        "model.hidden_size=32",
        "model.depth=1",
        "model.num_heads=2",
        "model.num_classes=3",
        f"folder={tmp_path / 'run'}",
    ]
    return tmp_path, path, words


def prepared(words):
    recipes = ROOT / "launch" / "recipes"
    return prepare_job(JobOptions(recipes / "dit-small.yaml", ROOT / "ds_configs/zero1.json", tuple(words)), 1, "cpu")


def test_the_index_fills_in_the_recipe(stage):
    """Oracle: what the index says: channels, factor, scale; the encoder is dropped, the written run reads back."""
    folder, path, words = stage
    run = prepared([*words, f"model.first_stage.path={path}"]).run
    index = Latents(folder / "x").index
    assert run.model["in_channels"] == 3 and run.model["first_stage"]["factor"] == 4
    assert run.model["codes"]["scaling_factor"] == index["statistics"]["scaling_factor"]
    (folder / "run.yaml").write_text(recipe.dump_run(run))
    system = systems.build("dit", recipe.load_recipe(folder / "run.yaml").model)
    batch = next(Batches(open_sources(run.data)[0], global_batch=4, micro_batch=4, seed=0).read_step(0))
    example = system.encode(batch)
    noise = rng.normal(batch["key"], "latent", (3, 4, 4))
    expected = (batch["latent_mean"].float() + batch["latent_std"].float() * noise) * 0.5
    assert torch.equal(example["x_start"], expected) and system.first_stage.vae.encoder is None
    alone = systems.build("dit", prepared([*words, "every.sample=0"]).run.model)
    torch.testing.assert_close(alone.encode(batch)["x_start"], expected / 0.5 * index["statistics"]["scaling_factor"])
    assert not alone.generates and alone.frozen() == ()
    for built in (system, alone):
        with pytest.raises(ValueError, match="the data give images; encode them with dstrain encode"):
            built.encode({"image": torch.zeros(2, 1, 16, 16, dtype=torch.uint8), "key": batch["key"][:2]})
    with pytest.raises(ValueError, match="no autoencoder decodes them; set model.first_stage.path"):
        alone.sample(alone.networks(), Request(torch.arange(2)))


@pytest.mark.parametrize(
    "name, side", [("dit-b4-imagenet256", 32), ("dit-xl2-imagenet256", 32), ("dit-xl2-imagenet512", 64)]
)
def test_the_published_recipes_read_latents(tmp_path, name, side):
    """Oracle: --dry-run of each recipe on what its first command leaves of an autoencoder of Stable Diffusion's layout:
    all is in order, and the samples are the cached ones.
    """
    path = first_stage.save(tmp_path / "stage", channels=3, depth=4, latent_channels=4)
    write(
        tmp_path / "cache",
        number=20,
        size=20,
        shape=[4, side, side],
        classes=[f"n{i:04}" for i in range(1000)],
        stage=Autoencoder(str(path)).compute_fingerprint(),
        image_size=8 * side,
        channels=3,
    )
    options = JobOptions(
        ROOT / f"launch/recipes/{name}.yaml",
        ROOT / "ds_configs/zero1.json",
        (f"data.path={tmp_path / 'cache'}", f"model.first_stage.path={path}", f"folder={tmp_path / 'run'}"),
        dry_run=True,
    )
    job = prepare_job(options, 8, "cuda")
    assert job.run.data.codes.shape == (4, side, side) and job.run.data.workers is None
    assert any("20 cached images (latents" in remark for remark in job.remarks)


def test_recipes_that_do_not_fit(stage):
    """Oracle: the contract: refused before anything starts, each with the key and the remedy."""
    folder, path, words = stage
    other = first_stage.save(folder / "other", seed=1)
    coarse = first_stage.save(folder / "coarse", depth=4)
    write(folder / "plain", flips=1)
    write(folder / "ids", kind="tokens")
    write(folder / "unseen", stage="another")
    write(folder / "larger", stage=Latents(folder / "x").encoding["first_stage"], image_size=32)
    given = f"model.first_stage.path={path}"
    for more, message in (
        ([], "every.sample=400: pictures need the autoencoder.*model.first_stage.path"),
        ([f"model.first_stage.path={other}"], f"{other} is the autoencoder .* the latents in data.path are of"),
        ([f"model.first_stage.path={coarse}"], "first_stage.factor: 4 in the recipe, 8 in autoencoder"),
        ([given, "model.first_stage.factor=8"], "set image_size to .*, or first_stage.factor to 4"),
        ([given, "model.in_channels=4"], "set in_channels to 3"),
        ([given, "model.patch_size=3"], "multiple of 12"),
        ([given, "data.image_size=32"], "write data.image_size=16"),
        ([given, "data.channels=3"], "write data.channels=1"),
        ([given, f"data.path={folder / 'plain'}", "data.flip=true"], "write data.flip=false"),
        (
            [given, f"data.path={folder / 'ids'}"],
            "holds cached tokens of images, and dit learns from images or cached latents",
        ),
        ([given, f"data.held_out_path={folder / 'unseen'}"], "has first_stage another"),
        ([given, f"data.held_out_path={folder / 'larger'}"], "has image_size 32, .*has 16"),
        ([given, "model.first_stage.scaling_factor=0"], "model.first_stage.scaling_factor=0.*greater than 0"),
        ([given, "model.num_classes=2"], "has 3 classes"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepared([*words, *more])
    shard = folder / "x" / "shard_00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 4
    shard.write_bytes(data)
    with pytest.raises(ConfigError, match="shard_00000.safetensors has altered.*dstrain encode"):
        prepared([*words, given])


def test_another_export_to_the_same_path(stage):
    """Oracle: the values of both exports, in the refusal to go on; a finished run draws with those it learned in."""
    folder, path, words = stage
    words = [*words, f"model.first_stage.path={path}"]
    images = [
        *words,
        "data.path=builtin:fashion",
        "model.first_stage.factor=4",
        "model.in_channels=3",
        "model.num_classes=10",
    ]
    online, cached = prepared(images).run, prepared(words).run
    (folder / "run.yaml").write_text(recipe.dump_run(online))
    old, fixed = recipe.load_recipe(folder / "run.yaml"), online.model["first_stage"]
    assert (fixed["scaling_factor"], fixed["shift"]) == (0.5, 0.0) and recipe.list_refused_changes(
        old, prepared(images).run, DIT
    ) == []
    assert fixed["fingerprint"] == cached.model["first_stage"]["fingerprint"] == cached.model["codes"]["first_stage"]

    first_stage.save(path, scaling_factor=0.75, shift_factor=0.25)
    for before, given in ((old, images), (cached, words)):
        text = str(
            recipe.make_refused_changes_error(
                recipe.list_refused_changes(before, prepared(given).run, DIT), folder, DIT
            )
        )
        assert "first_stage.scaling_factor was 0.5" in text and "is now 0.75: write model.first_stage.scaling_f" in text
        assert "first_stage.shift was 0.0" in text and "is now 0.25" in text and "fingerprint" not in text
        keep = ["model.first_stage.scaling_factor=0.5", "model.first_stage.shift=0.0"]
        assert recipe.list_refused_changes(before, prepared([*given, *keep]).run, DIT) == []
        built = systems.build("dit", before.model).first_stage
        assert (built.scaling_factor, built.shift) == (0.5, 0.0)

    first_stage.save(path, seed=1)
    (change,) = recipe.list_refused_changes(old, prepared(images).run, DIT)
    assert change[0] == "model.first_stage.fingerprint" and change[1] == fixed["fingerprint"] != change[2]
    assert "put the earlier autoencoder back at model.first_stage.path" in str(
        recipe.make_refused_changes_error([change], folder, DIT)
    )
    with pytest.raises(ValueError, match=f"is the autoencoder {change[2]}, .* trained with {change[1]}"):
        systems.build("dit", old.model)


def test_other_latents_when_a_run_goes_on(stage):
    """Oracle: the contract: what the data fill in is kept by the data, not by writing it down."""
    folder, path, words = stage
    write(folder / "y", seed=1, stage=Latents(folder / "x").encoding["first_stage"])
    words = [*words, f"model.first_stage.path={path}"]
    changes = recipe.list_refused_changes(prepared(words).run, prepared([*words, f"data.path={folder / 'y'}"]).run, DIT)
    text = str(recipe.make_refused_changes_error(changes, folder, DIT))
    assert [key for key, _, _ in changes] == ["model.codes.scaling_factor"]
    assert "give the data.path of the earlier latents" in text and "write model.codes" not in text


def test_an_image_folder_may_have_an_index(tmp_path):
    """Oracle: the same folder without it: somebody's own JSON makes no cache of pictures, nor a
    cache's damage images.
    """
    root = pictures.folder(tmp_path / "data", 2, 3)
    data = Data(path=str(root), image_size=16, channels=1)
    for name in ("index.json", "encoding.json"):
        for text in ("{}", '{"body": {}}', '{"hash": "abc"}', "", '["encoding"]'):
            (root / name).write_text(text)
            assert (
                not is_codes_cache(root) and fill_in_codes_entry(data).codes is None and len(open_sources(data)[0]) == 6
            )
    write(tmp_path / "x")
    index = tmp_path / "x" / "index.json"
    for damaged in (index.read_text()[:150], "", "{}"):
        index.write_text(damaged)
        assert is_codes_cache(tmp_path / "x")
        with pytest.raises(ValueError, match="truncated or altered: repeat the `dstrain encode`") as caught:
            open_sources(data.model_copy(update={"path": str(tmp_path / "x")}))
        assert "delete" not in str(caught.value)


def test_images_have_no_codes(tmp_path):
    """Oracle: the section: what an index once filled in is not kept for a folder of images."""
    write(tmp_path / "x")
    data = fill_in_codes_entry(Data(path=str(tmp_path / "x"), image_size=16, channels=1))
    assert data.codes.shape == (3, 4, 4) and data.codes.first_stage == "stage"
    assert fill_in_codes_entry(data.model_copy(update={"path": "builtin:fashion"})).codes is None


def resident(array) -> bool:
    """Whether all pages of a mapped array are in memory, by mincore(2)."""
    begin = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    length = array.ctypes.data + array.nbytes - begin
    pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    assert ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(length), pages) == 0
    return all(page & 1 for page in pages)


def test_what_is_expected_is_read_from_the_disk(tmp_path):
    """Oracle: the kernel's own table of pages: samples at both ends of a large shard, and no others."""
    index = torch.tensor([3, 5990])
    write(tmp_path / "cache", number=6000, size=6000)
    bench_latents.drop(*(tmp_path / "cache").iterdir())
    source = Latents(tmp_path / "cache")
    codes = source._get_mapped_shard(0)["codes"].reshape(6000, 2, -1)
    wanted = [codes[3, 1], codes[5990, 1]]
    if any(map(resident, wanted)) or resident(codes):
        pytest.skip("this file system is in memory")
    source.prefetch(index, torch.tensor([True, True]))
    end = time.monotonic() + 60
    while not all(map(resident, wanted)):
        assert time.monotonic() < end, "nothing was read"
        time.sleep(0.01)
    assert not resident(codes)


def test_a_step_names_the_samples_of_the_next(tmp_path):
    """Oracle: the batches themselves: what a step takes was expected one step earlier, mirrored where it is, once the
    run has begun or gone on; and naming them changes no batch.
    """

    class Observed(Latents):
        def prefetch(self, index, mirrored=None, random_number=None):
            seen.append(("expected", *zip(index.tolist(), mirrored.tolist())))
            super().prefetch(index, mirrored, random_number)

        def read_codes(self, index, mirrored=None, random_number=None):
            seen.append(("taken", *zip(index.tolist(), mirrored.tolist())))
            return super().read_codes(index, mirrored, random_number)

    write(tmp_path / "cache")
    settings = {
        "global_batch": 8,
        "micro_batch": 2,
        "seed": 3,
        "rank": 1,
        "world": 2,
        "num_workers": 0,
        "flip": True,
        "steps": 9,
    }
    plain = Latents(tmp_path / "cache")
    plain.prefetches = False
    for first in (0, 5):
        seen = []
        made = Batches(Observed(tmp_path / "cache"), **settings)
        batches = [list(made.read_step(step)) for step in range(first, first + 3)]
        for step, expected in zip(range(first, first + 3), batches):
            for batch, other in zip(Batches(plain, **settings).read_step(step), expected):
                assert all(torch.equal(batch[name], other[name]) for name in batch)
        takes = [place for place, event in enumerate(seen) if event[0] == "taken"]
        assert len(takes) >= 6
        for number, place in enumerate(takes[2:], 2):  # two micro-batches a step
            assert ("expected", *seen[place][1:]) in seen[: takes[number - 2]]
