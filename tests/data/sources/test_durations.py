"""Clips in buckets by how many frames they have: which one each belongs to, and batches of one length on any ranks."""

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from dstrain.commands.job import complete_and_check_recipe
from dstrain.data.batches import Batches, iterate_held_out
from dstrain.data.open import describe_data, open_sources
from dstrain.data.views import Spread
from dstrain.recipe import ConfigError, Data, load_recipe
from tests.support.clips import LOSSLESS, LOSSY, moving, write, write_pictures
from tests.support.launch import ROOT
from tests.support.pictures import folder as folder_of_images

LENGTHS = (11, 5, 3, 1, 9, 8, 2, 12, 7, 6, 4, 10, 9, 5, 3)  # frames of the clips
KINDS = ("clip.webp", "ffv1.avi", "h264.mp4", "vp9.webm", "clip.gif")  # some say it in a header, some are counted
BUCKETS = [3, 9, 5]
BY_LENGTH = {1: 3, 2: 3, 3: 3, 4: 3, 5: 5, 6: 5, 7: 5, 8: 5, 9: 9, 10: 9, 11: 9, 12: 9}  # by hand
STEPS = 10


def write_clips(root: Path, lengths=LENGTHS) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for number, count in enumerate(lengths):
        kind, frames = KINDS[number % len(KINDS)], moving(count, 16, 16, seed=number)
        path = root / f"v{number:02d}_{kind.replace('clip', '')}"
        if kind in LOSSLESS:
            write(path, frames, *LOSSLESS[kind])
        elif kind in LOSSY:
            codec, options = LOSSY[kind]
            write(path, frames, codec, options=options)
        else:
            write_pictures(path, frames)
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("clips") / "data")


def opened(folder, buckets=BUCKETS, run=None, **entries):
    entries.setdefault("index", str(Path(folder).with_name("index")))  # else it would be the user's cache
    return open_sources(
        Data(path=str(folder), image_size=16, num_frames=max(buckets), buckets=buckets, **entries), run=run
    )


def batches(source, rank=0, world=1, micro=4, **options):
    return Batches(source, global_batch=4, micro_batch=micro, seed=3, rank=rank, world=world, steps=STEPS, **options)


def number_of(source, index):
    return int(source.name_sample(index)[1:3])


def test_samples(folder):
    """Oracle: by hand: the longest bucket that a clip fills; and the clip that is read without buckets, cut to as many
    frames from its middle."""
    source = opened(folder)[0]
    assert source.shapes == (9, 5, 3) and source.counts == (5, 5, 5) and source.end_index_by_shape == (5, 10, 15)
    for index in range(15):
        count = LENGTHS[number_of(source, index)]
        item, frames = source[index], BY_LENGTH[count]
        plain = open_sources(Data(path=str(folder), image_size=16, num_frames=frames))[0]
        (place,) = [place for place in range(15) if plain.name_sample(place) == source.name_sample(index)]
        assert item["video"].shape == (frames, 3, 16, 16) and item["frames"] == min(count, frames)
        assert torch.equal(item["video"], plain[place]["video"])
    assert sorted(source.name_sample(index) for index in range(15)) == sorted(path.name for path in folder.iterdir())
    words = describe_data(Data(path=str(folder)), source, None)[0]
    assert "in 3 of 3 buckets of 5 (3 frames) to 5 (9 frames), 2 shorter than 3 frames" in words


def test_a_stride_takes_longer_clips(folder):
    """Oracle: by hand: of n frames every second one is ceil(n / 2) frames."""
    source = opened(folder, frame_stride=2)[0]
    for index in range(15):
        usable = -(-LENGTHS[number_of(source, index)] // 2)
        assert source.find_bucket_shape(index) == BY_LENGTH[usable] and source[index]["frames"] == min(
            usable, source.find_bucket_shape(index)
        )


def test_an_index_on_a_disk(folder, tmp_path, monkeypatch):
    """Oracle: by hand; frames are counted once for both splits and all later commands, and a
    worker receives no list.
    """
    plain, run = opened(folder)[0], tmp_path / "run"
    kept = opened(folder, index=None, run=run)[0]
    (table,) = run.glob("index/*/frames.bin")
    assert np.fromfile(table, np.int32).tolist() == [LENGTHS[number] for number in range(15)]
    monkeypatch.setattr("dstrain.data.sources.sizes.count_frames", None)  # a second count would fail
    opened(folder, index=None, run=run, held_out=0.5)
    again = opened(folder, index=None, run=run)[0]
    assert (
        [plain.name_sample(i) for i in range(15)]
        == [kept.name_sample(i) for i in range(15)]
        == [again.name_sample(i) for i in range(15)]
    )
    sent = pickle.loads(pickled := pickle.dumps(again))
    assert len(pickled) < 4096 and torch.equal(sent[7]["video"], plain[7]["video"])
    assert opened(folder, [5, 1], index=None, run=run)[0].counts == (10, 5)  # another rule, by the same table


def test_one_length_a_step_at_any_number_of_ranks(folder):
    """Oracle: one rank that never stops: 2, 1 and 4 ranks in turn, and workers, have the same batches of one length
    each, with windows by the key; an epoch meets every clip once."""
    source = opened(folder)[0]
    whole = [next(batches(source).read_step(step)) for step in range(STEPS)]
    assert {batch["video"].shape[1] for batch in whole} == {3, 5, 9}
    for step in range(STEPS):
        world = (2, 1, 4)[step % 3]
        parts = [next(batches(source, rank, world, 4 // world).read_step(step)) for rank in range(world)]
        for name, values in whole[step].items():
            assert torch.equal(torch.cat([part[name] for part in parts]), values), name
    with batches(source, num_workers=2) as read:
        assert all(torch.equal(next(read.read_step(step))["video"], whole[step]["video"]) for step in range(STEPS))
    for epoch in range(4):  # 5 samples a step fit into each bucket
        taken = source.make_sample_order(5, 3).find_sample_index(torch.arange(15 * epoch, 15 * epoch + 15))
        assert sorted(taken.tolist()) == list(range(15))


def test_held_out_batches_have_one_length(folder):
    """Oracle: every clip once, by any number of ranks, and of one length on all of them."""
    source = opened(folder, held_out=0.5)[1]
    for view, world in ((source, 2), (Spread(source, 4), 3)):
        ranks = [list(iterate_held_out(view, 2, rank, world)) for rank in range(world)]
        positions = []
        for turn in zip(*ranks, strict=True):
            assert len({batch["video"].shape for batch in turn}) == 1
            positions += [batch["position"][batch["valid"]] for batch in turn]
        assert torch.cat(positions).sort().values.tolist() == list(range(len(view)))


def test_a_broken_clip_is_replaced_by_one_of_its_length(folder, tmp_path):
    """Oracle: the next one of the bucket; one that could not be counted is in no bucket."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "v07_.webm").unlink(missing_ok=True)
    first = opened(copy)[0]
    broken, longest = copy / first.name_sample(0), first[1]["video"]
    broken.write_bytes(b"not a video")
    batch, bad = first.read_batch(torch.tensor([0, 1]))
    assert [name for name, _ in bad] == [broken.name] and torch.equal(batch["video"][0], longest)
    anew = opened(copy, index=str(tmp_path / "anew"))[0]
    assert broken.name not in {anew.name_sample(index) for index in range(len(anew))} and len(anew) == len(first) - 1
    assert anew.header["unread"] == 1 and "1 left out, which cannot be read" in anew.describe_samples()
    assert anew.compute_fingerprint() != first.compute_fingerprint()


def test_images_are_a_bucket_of_their_own(folder, tmp_path):
    """Oracle: by hand: 15 clips and a quarter of 20 samples as images, which have one frame and no padding; the
    pictures are those of the folder."""
    images = folder_of_images(tmp_path / "images", 2, 4)
    source = opened(folder, images=str(images), image_share=0.25)[0]
    assert len(source) == 20 and source.end_index_by_shape == (5, 10, 15, 20)
    assert [source[index]["video"].shape[0] for index in (0, 5, 10, 15, 19)] == [9, 5, 3, 1, 1]
    assert {source.make_single_shape_view()[index]["video"].shape[0] for index in range(len(source))} == {9}
    assert source[15]["frames"] == 1 and source.name_sample(15) in {
        path.relative_to(images).as_posix() for path in images.rglob("*.png")
    }
    steps = [
        [next(batches(source, rank, 2, 2).read_step(step))["video"].shape[1] for rank in range(2)] for step in range(4)
    ]
    assert all(len(set(ranks)) == 1 for ranks in steps) and sorted(ranks[0] for ranks in steps) == [1, 3, 5, 9]
    assert opened(folder, images=str(images), held_out=0.5)[1].end_index_by_shape[-1] < 15


@pytest.mark.parametrize(
    "recipe, entries, words",
    [
        (
            "phenaki-tokenizer-small",
            ["data.num_frames=5", "data.buckets=[4,5]"],
            "data.buckets: 4 is not 1 \\+ a multiple of model.temporal_patch_size 2: take 3 or 5",
        ),
        (
            "phenaki-small",
            ["data.num_frames=5", "data.buckets=[1,5]", "model.beginnings=[]"],
            "data.buckets: phenaki takes clips of one length: leave it out, or choose system=phenaki.tokenizer",
        ),
        ("dit-small", ["data.buckets=[1,5]"], "numbers of frames, of clips"),
    ],
)
def test_where_durations_are_refused(recipe, entries, words):
    """Oracle: a line that names the entry and the remedy, before anything is read."""
    with pytest.raises(ConfigError, match=words):
        _run, problems = complete_and_check_recipe(load_recipe(ROOT / "launch" / "recipes" / f"{recipe}.yaml", entries))
        raise ConfigError(*problems)


def test_built_in_clips_have_one_length():
    """Oracle: a line that names the entry and the remedy."""
    with pytest.raises(
        ConfigError, match="data.buckets: the clips of builtin:moving-fashion have one length: leave it"
    ):
        opened("builtin:moving-fashion", flip=False)
