"""Which sample goes where, and what becomes of broken ones."""

import itertools
import os

import pytest
import torch

from dstrain import rng
from dstrain.data import bad_files
from dstrain.data.bad_files import BadFiles
from dstrain.data.batches import Batches, copy_batch_to_device, iterate_held_out
from dstrain.data.order import Order
from dstrain.data.sources.images import open_images
from dstrain.recipe import ConfigError, NotRead
from tests.support.pictures import BROKEN, break_file, folder
from tests.support.sources import Numbers, global_batches, same

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def test_samples_and_keys_are_the_formula():
    """Oracle: the contract: order.find_sample_index(step * global + position), rng.keys, the flip by the
    key.
    """
    source, position = Numbers(100), torch.arange(24)
    for step, batch in zip((0, 1, 77), global_batches(source, (0, 1, 77))):
        assert torch.equal(batch["position"], position)
        assert torch.equal(batch["label"], Order(100, 3).find_sample_index(step * 24 + position))
        assert torch.equal(batch["key"], rng.keys(3, step, position))
        flipped = rng.uniform(batch["key"], "flip") < 0.5
        assert 3 < flipped.sum() < 21
        for image, label, flip in zip(batch["image"], batch["label"].tolist(), flipped):
            expected = source[label]["image"]
            assert torch.equal(image, expected.flip(-1) if flip else expected)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_same_global_batch_at_any_world_and_worker_count(num_workers):
    """Oracle: one rank without workers; from a step in the middle, over an epoch's end (50 samples,
    24 a step).
    """
    source, steps = Numbers(50), (5, 6, 7)
    expected = global_batches(source, steps)
    layouts = ((2, 4), (4, 6)) if num_workers else ((1, 24), (1, 3), (2, 4), (4, 3), (4, 6))
    for world, micro_batch in layouts:
        assert same(global_batches(source, steps, world, micro_batch, num_workers), expected)


def test_an_epoch_is_every_sample_once():
    """Oracle: counting, at a data set size that the global batch does not divide."""
    batches = global_batches(Numbers(50), range(25))
    labels = torch.cat([batch["label"] for batch in batches])
    for epoch in labels.split(50):
        assert torch.equal(epoch.sort().values, torch.arange(50))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_any_step_in_any_order(num_workers):
    """Oracle: a fresh loader at that step: after a jump, a repetition, a step left in the middle,
    and close().
    """
    sizes = {"global_batch": 24, "micro_batch": 8, "seed": 3}
    with Batches(Numbers(50), **sizes, num_workers=num_workers) as batches:
        for step in (0, 1, 9, 9, 2):
            assert same(list(batches.read_step(step)), list(Batches(Numbers(50), **sizes).read_step(step)))
        next(batches.read_step(3))  # left after one of three micro-batches
        assert next(batches.read_step(4))["key"][0] == rng.keys(3, 4, torch.arange(1))[0]
        batches.close()
        assert len(list(batches.read_step(5))) == batches.accumulation == 3
        assert batches.wait_seconds > 0


def test_in_sequence_the_loader_runs_on():
    """Oracle: the identity of the running iterator, also for a caller that takes one micro-batch
    with next().
    """
    batches = Batches(Numbers(50), global_batch=8, micro_batch=8, seed=0)
    next(batches.read_step(0))
    running = batches._batches
    next(batches.read_step(1))
    assert batches._batches is running


def test_the_last_step_ends():
    """Oracle: the contract: `steps` bounds what is read, and asking beyond it is an error."""
    with Batches(Numbers(50), global_batch=8, micro_batch=4, seed=0, steps=3, num_workers=1) as batches:
        assert sum(len(list(batches.read_step(step))) for step in range(3)) == 6
        with pytest.raises(ValueError, match="beyond the last"):
            next(batches.read_step(3))


def test_no_flip():
    """Oracle: the source's own pixels."""
    source = Numbers(50)
    batch = global_batches(source, (0,), flip=False)[0]
    plain = torch.stack([source[i]["image"] for i in batch["label"].tolist()])
    assert torch.equal(batch["image"], plain)


@pytest.mark.parametrize(
    "sizes,advice",
    [
        ({"global_batch": 30, "micro_batch": 8, "world": 4}, "batch.global=32"),
        ({"global_batch": 40, "micro_batch": 8, "world": 4}, "batch.global=32 or 64, or batch.micro=5 or 2 or 1"),
        ({"global_batch": 64, "micro_batch": 64, "world": 2}, "batch.micro=32"),
        ({"global_batch": 0, "micro_batch": 1, "world": 1}, "at least 1"),
        ({"global_batch": 4, "micro_batch": 1, "world": 2, "rank": 2}, "rank 2"),
    ],
)
def test_batch_sizes_that_do_not_fit(sizes, advice):
    """Oracle: the contract: a ValueError that names sizes that do fit."""
    with pytest.raises(ValueError, match=advice):
        Batches(Numbers(100), seed=0, **sizes)


# ---------------------------------------------------------------------------------------- held out


@pytest.mark.parametrize("world,batch", [(1, 7), (2, 8), (3, 5), (4, 64), (8, 1)])
@pytest.mark.parametrize("size", [1, 16, 33])
def test_held_out_is_exact(world, batch, size):
    """Oracle: each sample is valid exactly once over all ranks; same calls, same shapes; keys as on
    one rank.
    """
    ranks = [list(iterate_held_out(Numbers(size), batch, rank, world, seed=5)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    every = [b for batches in ranks for b in batches]
    assert all(len(b[name]) == batch for b in every for name in ("label", "valid", "image"))
    labels = torch.cat([b["label"][b["valid"]] for b in every])
    assert torch.equal(labels.sort().values, torch.arange(size))
    keys = torch.cat([b["key"][b["valid"]] for b in every])[labels.argsort()]
    assert torch.equal(keys, rng.keys(5, -1, torch.arange(size)))
    assert sum(len(b["label"]) for b in iterate_held_out(Numbers(33), 4, limit=10)) == 12


# -------------------- broken files


def test_five_percent_bad_is_the_same_everywhere(tmp_path):
    """Oracle: world 1 without workers; 5 % of the files broken in every way: complete, equal, each
    listed once.
    """
    root = folder(tmp_path / "data", 2, 50)
    broken = {f"c{i % 2}/{7 * i + 3:03}.png": how for i, how in enumerate(BROKEN)}
    source = open_images(root, 16)  # listed before they break, as on a failing disk
    for name, how in broken.items():
        break_file(root / name, how)
    runs = {}
    for world, num_workers in ((1, 0), (4, 0), (4, 1)):
        listed = tmp_path / f"run{world}{num_workers}"
        runs[world, num_workers] = global_batches(
            source, range(5), world, 3, num_workers, folder=listed, max_bad_fraction=0.05
        )
        lines = (listed / "bad_files.txt").read_text().splitlines()
        assert sorted(line.split("\t")[0] for line in lines) == sorted(broken)
        assert all(line.split("\t")[1] for line in lines)
    assert same(runs[1, 0], runs[4, 0]) and same(runs[1, 0], runs[4, 1])


@pytest.mark.filterwarnings("ignore:cannot be read")
def test_the_substitute_is_the_next_that_reads():
    """Oracle: by hand: 3 and 4 give 5, the last gives the first."""
    source = Numbers(10, bad=(3, 4, 9))
    batches = Batches(source, global_batch=10, micro_batch=10, seed=1, max_bad_fraction=1.0)
    batch = next(batches.read_step(0))
    indices = Order(10, 1).find_sample_index(torch.arange(10)).tolist()
    assert batch["label"].tolist() == [{3: 5, 4: 5, 9: 0}.get(index, index) for index in indices]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_too_many_bad_files_end_the_run(tmp_path, num_workers):
    """Oracle: the contract: the error names count, limit, list and key."""
    message = r"6 of 100 .* the 5 that data.max_bad_fraction=0.05 .*bad_files.txt"
    with (
        Batches(
            Numbers(100, bad=tuple(range(6))),
            global_batch=20,
            micro_batch=20,
            seed=0,
            num_workers=num_workers,
            folder=tmp_path,
            max_bad_fraction=0.05,
        ) as batches,
        pytest.raises(ValueError, match=message),
    ):
        for step in range(5):
            list(batches.read_step(step))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind, error", [("bad", ConfigError), ("failing", NotRead)])
def test_what_cannot_be_read_is_known_a_step_before(tmp_path, num_workers, kind, error):
    """Oracle: the formula of the order: all batches before the step that meets the sample are handed out, each as
    without the fault; `problem` is set when the last one before it is, and only then.
    """
    number = int(Order(60, 7).find_sample_index(torch.tensor([40]))[0])  # at step 3, of rank 1
    options = {"global_batch": 12, "micro_batch": 3, "rank": 1, "world": 2, "seed": 7}
    with Batches(
        Numbers(60, **{kind: (number,)}), folder=tmp_path, num_workers=num_workers, max_bad_fraction=0.0, **options
    ) as batches:
        clean = Batches(Numbers(60), **options)
        for step in range(3):
            assert same(list(batches.read_step(step)), list(clean.read_step(step)))
            assert (batches.problem is not None) == (step == 2)
        with pytest.raises(error, match=f"number {number}"):
            list(batches.read_step(3))


def test_the_limit_counts_all_ranks_together(tmp_path):
    """Oracle: 3 + 3 different bad files of two ranks exceed a limit of 5, none by itself; also
    after a resume.
    """
    one, two = (BadFiles(tmp_path, 100, 0.05) for _ in range(2))
    one.add_unreadable_samples([(f"a{i}", "x") for i in range(3)])
    one.add_unreadable_samples([("a0", "again")])
    with pytest.raises(ValueError, match="6 of 100"):
        two.add_unreadable_samples([(f"b{i}", "y") for i in range(3)])
    assert len((tmp_path / "bad_files.txt").read_text().splitlines()) == 6
    with pytest.raises(ValueError, match="7 of 100"):
        BadFiles(tmp_path, 100, 0.05).add_unreadable_samples([("c\n\td", "z\nz")])
    with open(tmp_path / "bad_files.txt", "a") as file:
        file.write("half a li")  # another rank writes at this moment
    with pytest.raises(ValueError, match="8 of 100"):
        two.add_unreadable_samples([("e", "x")])


def test_a_long_list_is_read_once(tmp_path, monkeypatch):
    """Oracle: the bytes that are read, which are counted: each of the list's once, whatever is added."""
    (tmp_path / "bad_files.txt").write_text("".join(f"{i:06d}.png\tx\n" for i in range(20_000)))
    files, count = BadFiles(tmp_path, 10**6, 0.5), []
    split = bad_files._parse_listed_names
    monkeypatch.setattr(bad_files, "_parse_listed_names", lambda lines: count.append(len(lines)) or split(lines))
    for number in range(50):
        files.add_unreadable_samples([(f"new {number}", "y")])
    assert len(files.names) == 20_050 and sum(count) < 20_000 * 13 + 50 * 20


def test_texts_stay_on_the_host():
    """Oracle: devices: packed texts are read by the host, all else goes."""
    batch = {"caption": torch.zeros(2, 5), "other_caption": torch.zeros(2, 5), "tokens": torch.zeros(2, 3)}
    assert {name: tensor.device.type for name, tensor in copy_batch_to_device(batch, "meta").items()} == {
        "caption": "cpu",
        "other_caption": "cpu",
        "tokens": "meta",
    }


def test_limits():
    """Oracle: the contract: at least one is tolerated, unless the fraction is 0."""
    assert [BadFiles(None, 10, fraction).limit for fraction in (0, 0.01, 0.29, 1)] == [0, 1, 2, 10]
    assert BadFiles(None, 100, 0.29).limit == 29
    with pytest.warns(UserWarning, match="a.png"):
        BadFiles(None, 10, 0.01).add_unreadable_samples([("a.png", "x")])
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="1 of 10"):
        BadFiles(None, 10, 0.0).add_unreadable_samples([("a.png", "x")])
    with pytest.raises(ValueError, match="data.max_bad_fraction"):
        BadFiles(None, 10, 1.5)


def test_nothing_can_be_read():
    """Oracle: the contract: the search for a substitute is bounded and its end an error."""
    with pytest.raises(ValueError, match="10 samples in a row"):
        next(Batches(Numbers(10, tuple(range(10))), global_batch=2, micro_batch=2, seed=0).read_step(0))


def test_a_fault_of_the_source_is_not_hidden():
    """Oracle: only BadSample is replaced; any other error comes through a worker as it is."""
    for num_workers in (0, 1):
        with Batches(Numbers(10), global_batch=2, micro_batch=2, seed=0, num_workers=num_workers) as batches:
            batches._stream.source.bad = None  # `in None` raises TypeError
            with pytest.raises(TypeError):
                list(itertools.islice(batches.read_step(0), 1))


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
def test_workers_share_the_cores_of_a_machine(tmp_path, monkeypatch, name):
    """Oracle: this process's cores, divided by the ranks that torchrun or the `deepspeed` launcher has started here."""
    source = open_images(folder(tmp_path), 8)
    for word, value in {"RANK": 0, "WORLD_SIZE": 2000, name: 1}.items():
        monkeypatch.setenv(word, str(value))
    alone = Batches(source, global_batch=8, micro_batch=8, seed=0, num_workers=None).num_workers
    monkeypatch.setenv(name, "1000")
    shared = Batches(source, global_batch=8, micro_batch=8, seed=0, num_workers=None).num_workers
    assert (alone, shared) == (min(8, len(os.sched_getaffinity(0))), 1)
