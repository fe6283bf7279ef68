"""Images in buckets: what a source of several shapes gives, where its members stand, and its batches on any ranks."""

import pickle
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from dstrain import systems
from dstrain.commands.job import complete_and_check_recipe
from dstrain.data.batches import Batches, iterate_held_out
from dstrain.data.decode.pixels import crop_center, to_tensor
from dstrain.data.open import describe_data, open_sources
from dstrain.data.views import Spread
from dstrain.recipe import ConfigError, Data, load_recipe
from tests.support.launch import ROOT

RECIPES = ROOT / "launch" / "recipes"

SHAPES = [[32, 32], [48, 16], [16, 48]]
SIZES = [(40, 40), (90, 30), (30, 90), (64, 60), (100, 30), (31, 80), (20, 20)]
STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes of 20 pictures of several aspects, 3 of them of 20 x 20 pixels."""
    root, generator = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for number in range(40):
        path = root / "ab"[number % 2] / f"{number:02d}.png"
        path.parent.mkdir(exist_ok=True)
        wide, high = SIZES[number % 7] if number < 21 else SIZES[number % 6]
        Image.fromarray(generator.integers(0, 256, (high, wide, 3), np.uint8)).save(path)
    return root


def opened(folder, **entries):
    kept = {"index": str(folder.with_name("index"))}  # else it would be the user's cache
    return open_sources(Data(path=str(folder), image_size=32, **kept | {"buckets": SHAPES} | entries))


def batches(source, rank=0, world=1, micro=4, **options):
    return Batches(source, global_batch=8, micro_batch=micro, seed=3, rank=rank, world=world, steps=STEPS, **options)


def test_samples(folder):
    """Oracle: the shape nearest in log aspect, by hand, and ADM's crop of the file that the name says."""
    source = opened(folder)[0]
    assert len(source) == 40
    by_aspect = {(40, 40): 0, (90, 30): 1, (30, 90): 2, (64, 60): 0, (100, 30): 1, (31, 80): 2, (20, 20): 0}
    names = []
    for index in range(40):
        image = Image.open(folder / source.name_sample(index))
        shape = SHAPES[by_aspect[image.size]]
        assert list(source.find_bucket_shape(index)) == shape
        item = source[index]
        assert torch.equal(item["image"], to_tensor(crop_center(image, *shape)))
        assert item["label"] == "ab".index(source.name_sample(index)[0])
        names.append(source.name_sample(index))
    assert len(set(names)) == 40
    for first, last in zip((0, *source.end_index_by_shape), source.end_index_by_shape):
        assert names[first:last] == sorted(names[first:last])


def test_enlarged_pictures_are_counted_or_left_out(folder):
    """Oracle: by hand: 3 pictures of 20 x 20 are enlarged 1.6 times to 32 x 32, and no other one."""
    words = describe_data(Data(path=str(folder)), *opened(folder))[0]
    assert "3 enlarged, up to 1.6 times" in words and "in 3 of 3 buckets" in words
    left = opened(folder, max_upscale=1.5)[0]
    assert len(left) == 37 and "3 left out by data.max_upscale" in left.describe_samples()
    assert all(Image.open(folder / left.name_sample(index)).size != (20, 20) for index in range(37))
    assert len(opened(folder, max_upscale=1.6)[0]) == 40
    with pytest.raises(ConfigError, match="give smaller data.buckets"):
        opened(folder, buckets=[[512, 512]], max_upscale=2)


def test_an_index_on_a_disk(folder, tmp_path):
    """Oracle: the source that was made first; what a worker receives has no list in it, and needs the folder."""
    plain, kept = opened(folder)[0], opened(folder, index=str(tmp_path))[0]
    again = opened(folder, index=str(tmp_path))[0]
    assert (
        [plain.name_sample(i) for i in range(40)]
        == [kept.name_sample(i) for i in range(40)]
        == [again.name_sample(i) for i in range(40)]
    )
    files = list(tmp_path.glob("*/buckets-*/*"))
    assert {path.name for path in files} == {"index.json", "members.bin", "members.sums"}
    sent = pickle.loads(pickled := pickle.dumps(again))
    assert len(pickled) < 4096 and torch.equal(sent[5]["image"], plain[5]["image"])
    sizes = {path: path.stat().st_size for path in files}
    for path in files:  # damaged, all are made anew
        for damaged in (path.read_bytes()[:-1], path.read_bytes()[:-9] + b"\1" + path.read_bytes()[-8:]):
            path.write_bytes(damaged)
            assert opened(folder, index=str(tmp_path))[0].name_sample(39) == plain.name_sample(39)
            assert path.stat().st_size == sizes[path]
    shutil.rmtree(files[0].parent)
    with pytest.raises(ConfigError, match="members.bin is not to be seen from here, or damaged: remove .*data.index="):
        pickle.loads(pickled)
    assert len(opened(folder, index=str(tmp_path), max_upscale=1.5)[0]) == 37
    assert len(opened(folder, index=str(tmp_path), held_out=0.5)[0]) < 40


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_has_one_shape_on_all_ranks(folder, workers):
    """Oracle: the pictures of all ranks together are those of one rank, at 2 and 4 ranks, in one shape a step; the
    steps of an epoch pass over all pictures, but for what waits for the next one."""
    source = opened(folder)[0]
    alone = [next(iter(batches(source, micro=8).read_step(step))) for step in range(STEPS)]
    for world in (2, 4):
        ranks = [
            batches(source, rank, world, 8 // world, num_workers=workers if world == 2 else 0) for rank in range(world)
        ]
        for step in range(STEPS):
            parts = [next(iter(rank.read_step(step))) for rank in ranks]
            assert torch.equal(torch.cat([part["image"] for part in parts]), alone[step]["image"])
            assert torch.equal(torch.cat([part["key"] for part in parts]), alone[step]["key"])
        for rank in ranks:
            rank.close()
    assert len({tuple(batch["image"].shape) for batch in alone}) == 3


def test_a_run_that_moves_between_ranks(folder):
    """Oracle: one that never stops: 4 steps on 2 ranks, 4 on one, 4 on 4 ranks, with random crops."""
    source = opened(folder, crop="random")[0]
    whole = [next(batches(source, micro=8).read_step(step)) for step in range(STEPS)]
    for step in range(STEPS):
        world = (2, 1, 4)[step // 4]
        parts = [next(batches(source, rank, world, 8 // world).read_step(step)) for rank in range(world)]
        for name, values in whole[step].items():
            assert torch.equal(torch.cat([part[name] for part in parts]), values), name


def test_a_broken_picture_is_replaced_by_one_of_its_shape(folder, tmp_path):
    """Oracle: the next picture of the bucket, cyclically: the batch still has one shape."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    source = opened(copy)[0]
    ends = (0, *source.end_index_by_shape)
    for bucket in range(3):
        last = ends[bucket + 1] - 1
        whole = source[ends[bucket]]["image"]
        path = copy / source.name_sample(last)
        path.write_bytes(path.read_bytes()[:-60])
        batch, bad = source.read_batch(torch.tensor([last - 1, last]))
        assert [name for name, _ in bad] == [source.name_sample(last)]
        assert torch.equal(batch["image"][1], whole)


def test_held_out_batches_have_one_shape(folder):
    """Oracle: every picture once, by any number of ranks; in a round all ranks have the same shape; a share of them
    too."""
    source = opened(folder, held_out=0.5)[1]
    for view in (source, Spread(source, 9)):
        for world in (1, 2, 3):
            ranks = [list(iterate_held_out(view, 3, rank, world)) for rank in range(world)]
            assert len({len(rank) for rank in ranks}) == 1
            positions = []
            for round_ in zip(*ranks):
                assert len({tuple(batch["image"].shape) for batch in round_}) == 1
                positions += [batch["position"][batch["valid"]] for batch in round_]
            assert torch.equal(torch.cat(positions).sort().values, torch.arange(len(view)))


def test_sizes_and_crops_of_a_batch(folder):
    """Oracle: the picture: its size, and where its crop lies in the picture scaled to cover the shape; mirrored, from
    the other side."""
    source = opened(folder, size_conditions=True)[0]
    index = torch.arange(len(source))
    for first, last in zip((0, *source.end_index_by_shape), source.end_index_by_shape):
        plain = source.read_batch(index[first:last])[0]
        turned = source.read_batch(index[first:last], torch.ones(last - first, dtype=torch.bool))[0]
        assert "right" not in plain and torch.equal(plain["image"].flip(-1), turned["image"])
        for row, size in enumerate(plain["size"].tolist()):
            image = Image.open(folder / source.name_sample(first + row))
            wide, high = source.find_bucket_shape(first + row)
            assert size[:2] == [image.height, image.width] and size[4:] == [high, wide]
            scale = max(wide / image.width, high / image.height)
            across, down = round(image.width * scale) - wide, round(image.height * scale) - high
            assert size[2:4] == [down // 2, across // 2]
            assert turned["size"][row].tolist() == [*size[:3], across - across // 2, *size[4:]]


@pytest.mark.parametrize(
    "recipe, entries, words",
    [
        ("vae-small", ["data.buckets=[[32,32]]"], "data.buckets: vae has no use for it"),
        ("iddpm-small", ["data.size_conditions=true"], "data.size_conditions: iddpm .*choose system=dit"),
        ("iddpm-small", ["data.buckets=[[32,33]]"], "32 x 33 in data.buckets are no multiples of"),
        ("iddpm-small-upsampler", ["data.buckets=[[64,32]]"], "leave data.buckets out"),
        ("dit-small", ["data.buckets=[[32,33]]"], "32 x 33 in data.buckets are no multiples of 4"),
        ("dit-small", ["samples.size=[32,33]"], "multiples of 4"),
        ("iddpm-small-upsampler", ["samples.size=[32,32]"], "of one size; leave it out"),
    ],
)
def test_where_sizes_are_refused(recipe, entries, words):
    """Oracle: a line that names the entry and the remedy, before anything is read."""
    with pytest.raises(ConfigError, match=words):
        run, problems = complete_and_check_recipe(load_recipe(RECIPES / f"{recipe}.yaml", entries))
        if problems:
            raise ConfigError(*problems)
        systems.build(run.system, run.model).check_sampling(run.samples)


def test_the_model_knows_its_buckets(folder):
    """Oracle: the entries of `data`; a rule is written out as shapes, which `load_recipe` reads back; built-in images
    have one size."""
    rule = "data.buckets={pixels: 1024, step: 8}"
    run, problems = complete_and_check_recipe(
        load_recipe(
            RECIPES / "dit-small.yaml",
            [f"data.path={folder}", "data.size_conditions=true", rule, "data.channels=3", "model.num_classes=2"],
        )
    )
    assert not problems and run.model["sizes"] == [[40, 24], [32, 32], [24, 40]] and run.model["size_conditions"]
    assert run.data.buckets == tuple(map(tuple, run.model["sizes"]))
    with pytest.raises(ConfigError, match="builtin:fashion have one size"):
        open_sources(Data(buckets=[[32, 32]]))
