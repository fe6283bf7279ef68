"""Runs that meet trouble: they go back, pass over what led there, and end with the same bits, disturbed or not.

The runs are of tests/support/brittle.py: two networks, and images whose place in the stream of batches is known.
"""

import contextlib
import json
import pickle
import re
import shutil
from functools import partial
from pathlib import Path

import pytest

from dstrain.checkpoint.manifest import NAME, hash_files, read_manifest
from dstrain.checkpoint.store import Store
from dstrain.disk import sealed
from dstrain.engine.settings import resolve_deepspeed_settings
from dstrain.recipe import ConfigError, load_recipe
from tests.support import brittle
from tests.support.launch import ROOT, launch, wait_for
from tests.support.runs import assert_equal_runs, files, finish, metrics, train

pytestmark = pytest.mark.slow

BAD = ("faults.max_skipped=2", "faults.max_rollbacks=5", "faults.spike=20")
BAD_PLACES = (12, 13, 14, *range(22, 28))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[Path, Path]:
    """The recipe of data with four bad places, and the folder of its run on 2 ranks that nobody disturbs."""
    folder = tmp_path_factory.mktemp("rollback")
    recipe = brittle.prepare(folder, white=BAD_PLACES, black=[45])
    finish(train(folder / "whole", 2, *BAD, recipe=recipe))
    return recipe, folder / "whole"


def course(folder: Path, step: int) -> dict:
    return read_manifest(folder / "checkpoints" / f"step_{step:08d}")["extra"]["course"]


def test_bad_data_are_passed_over(undisturbed):
    """Oracle: the steps by hand: three bad batches, six that need two ways back, one high loss;
    one rank within 1e-6.
    """
    recipe, two = undisturbed
    one = two.with_name("one")
    finish(train(one, 2, *BAD, "data.workers=1", recipe=recipe, num=1))
    for folder in (one, two):
        end = course(folder, 40)
        # Batches 12-14 are steps 13-15. From step 10 and batch 15 on, batches 22-24 are steps 18-20; from step 15 on,
        # 25-27 are steps 16-18, and no newer checkpoint is there: back to 10. Batch 45 is then step 28, seen at 29.
        assert end["rollbacks"] == [[15, 10], [20, 15], [18, 10], [29, 25]] and end["shift"] == 5 + 5 + 8 + 4
        assert end["skipped"] == end["in_a_row"] == 0
        lines = metrics(folder)
        assert [line["step"] for line in lines] == list(range(5, 41, 5)) and lines[-1]["rollbacks"] == 4
        assert all(line["first/loss"] < 1 and "nonfinite" not in line for line in lines)
        log = (folder / "log.txt").read_text()
        assert log.count(": back from step ") == 4 and "back from step 18 to step 10, and past the 8 batches" in log
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        assert [[event["done"], event["step"]] for event in events if event["event"] == "rollback"] == end["rollbacks"]
        assert [event["world"] for event in events if event["event"] == "start"] == [1 if folder == one else 2]
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
            "newest",
            "step_00000010",
            "step_00000015",
            "step_00000025",
            "step_00000035",
            "step_00000040",
        ]
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a == pytest.approx(b, rel=1e-6)


def list_cpu_configs() -> list[str]:
    """The files of ds_configs/ that train on a CPU."""
    run, names = load_recipe(None), []
    for path in sorted((ROOT / "ds_configs").glob("*.json")):
        with contextlib.suppress(ConfigError):
            resolve_deepspeed_settings(path, 2, "cpu", batch=run.batch, optimizer=run.optimizer, faults=run.faults)
            names.append(path.name)
    return names


# CI takes the file that computes the step on the host and shares all weights. On the device
# test_live_engines_go_back_exactly goes back at all stages in both precisions, and the tests beside it stop and go back
# at stage 2 in fp32.
SAMPLED = ("zero3_offload.json",)


@pytest.mark.parametrize(
    "name", [name if name in SAMPLED else pytest.param(name, marks=pytest.mark.faults) for name in list_cpu_configs()]
)
def test_killed_and_stopped_in_trouble(tmp_path, name):
    """Oracle: the undisturbed run: with every file of ds_configs/ the same bits after kill -9 while steps are skipped,
    after a stop there, and after each kind of way back.
    """
    recipe = brittle.prepare(tmp_path, white=BAD_PLACES, black=[45])
    whole, folder = tmp_path / "whole", tmp_path / "killed"

    def go_on(folder: Path, *words: str, code: int = 0) -> None:
        finish(train(folder, ROOT / "ds_configs" / name, *BAD, *words, recipe=recipe), code=code)

    go_on(whole)
    killed = partial(go_on, folder, "save.asynchronous=false")
    killed("model.kill_after=14", code=247)  # at step 15, after two that are skipped
    assert Store(folder / "checkpoints").list_steps() == [5, 10]
    killed("model.kill_after=5", code=247)  # from step 10: at the first step behind the way back
    assert Store(folder / "checkpoints").list_steps() == [5, 10]
    killed("model.stop_after=2", code=75)  # from step 10: seen at 14, the second that is skipped
    assert Store(folder / "checkpoints").list_steps() == [5, 10, 14] and course(folder, 14)["in_a_row"] == 2
    assert read_manifest(folder / "checkpoints" / "step_00000014")["extra"]["kind"] == "trouble"
    killed("model.kill_after=14", code=247)  # behind the second and third way back
    assert Store(folder / "checkpoints").list_steps() == [10] and Store(
        folder / "checkpoints"
    ).list_steps_put_aside() == [15]
    killed("model.stop_after=1", code=75)  # from step 10: a stop where all is well
    assert Store(folder / "checkpoints").list_steps() == [10, 13]
    killed("model.stop_after=42", "model.kill_after=0", code=75)  # long behind the last way back, from 29 to 25
    assert Store(folder / "checkpoints").list_steps()[-1] == 35
    killed("model.stop_after=0")
    assert files(folder, 40) == files(whole, 40) and metrics(folder) == metrics(whole)
    assert course(folder, 40) == course(whole, 40)


def test_stopped_behind_a_way_back(tmp_path):
    """Oracle: the undisturbed run, after stops within a step: one just behind the way back, whose record is kept, and
    one before the step that the command began with, which is saved.
    """
    recipe = brittle.prepare(tmp_path, white=BAD_PLACES, black=[45])
    whole, folder = tmp_path / "whole", tmp_path / "stopped"

    def go_on(folder: Path, stop_after: int, code: int = 75) -> None:
        words = (*BAD, "batch.micro=2", f"model.stop_after={stop_after}")
        finish(train(folder, 2, *words, recipe=recipe, num=1), code=code)

    go_on(whole, 0, code=0)
    go_on(folder, 13)
    assert Store(folder / "checkpoints").list_steps() == [5, 10, 13] and course(folder, 13)["in_a_row"] == 1
    shutil.copytree(folder, tmp_path / "other")
    go_on(folder, 2)  # steps 14 and 15 are skipped, and the run is at step 10 again
    assert Store(folder / "checkpoints").list_steps() == [5, 10] and course(folder, 10)["rollbacks"] == [[15, 10]]
    go_on(tmp_path / "other", 4)  # two steps later
    assert Store(tmp_path / "other" / "checkpoints").list_steps() == [5, 10, 12]
    for stopped in (folder, tmp_path / "other"):
        go_on(stopped, 0, code=0)
        assert files(stopped, 40) == files(whole, 40) and course(stopped, 40) == course(whole, 40)


def test_trouble_without_end(tmp_path):
    """Oracle: the shipped bound of three ways back; then exit code 3, whole checkpoints, and the way that it names."""
    recipe = brittle.prepare(tmp_path, white=range(12, 80))
    folder = tmp_path / "run"
    words = ("every.save=2", "save.keep=6", "faults.max_skipped=2")
    output = finish(train(folder, 1, *words, recipe=recipe, num=1), code=3)
    assert "3 steps in a row had gradients that are not finite" in output and "has gone back 3 times" in output
    assert "holds the steps 2, 4, 6, 8 (put aside: 10, 12)" in output and "--step N" in output
    assert "Traceback" not in output
    aside = hash_files(folder / "checkpoints" / "step_00000012.aside", sorted(files(folder, 8)))
    store = Store(folder / "checkpoints")
    assert all(store.find_checkpoint_fault(step) is None for step in store.list_steps())
    output = finish(train(folder, 1, *words, "--step", "11", recipe=recipe, num=1), code=2)
    assert "--step 11" in output and "it holds 2, 4, 6, 8, 10, 12" in output
    finish(train(folder, 1, *words, "--step", "10", "steps=12", recipe=recipe, num=1))
    assert files(folder, 12) == aside
    assert [path.name for path in (folder / "earlier_1" / "checkpoints").iterdir()] == ["step_00000012.aside"]
    output = finish(
        train(
            tmp_path / "new", 1, "faults.max_skipped=2", "every.save=20", "every.report_page=1000", recipe=recipe, num=1
        ),
        code=3,
    )
    wait_for(tmp_path / "new" / "report.html", 300)  # a busy machine writes it beside the end
    assert "No checkpoint from before that is left" in output and "holds no checkpoint" in output
    assert "--from-scratch" in output and "--step" not in output


def test_from_an_older_checkpoint(undisturbed):
    """Oracle: the undisturbed run: from a step before the last it ends with the same bits, as often as it is typed."""
    recipe, whole = undisturbed
    folder = whole.with_name("older")
    shutil.copytree(whole, folder)
    before = files(whole, 40)
    for number in (1, 2):
        finish(train(folder, 2, *BAD, "--step", "35", recipe=recipe))
        assert files(folder, 40) == before and metrics(folder) == metrics(whole)
        earlier = folder / f"earlier_{number}"
        assert hash_files(earlier / "checkpoints" / "step_00000040", sorted(before)) == before
        assert [line["step"] for line in metrics(earlier)] == list(range(5, 41, 5))


def test_a_fault_in_drawing_loses_nothing(tmp_path):
    """Oracle: a run that draws: the checkpoint of the step whose grid fails is whole, and going on makes up for it."""
    recipe = brittle.prepare(tmp_path, white=[])
    words = ("steps=20", "every.sample=10", "every.evaluate=10", "every.save=10", "data.held_out=0.1", "samples.num=4")
    finish(train(tmp_path / "whole", 2, *words, recipe=recipe, num=1))
    folder = tmp_path / "run"
    output = finish(train(folder, 2, *words, "model.draws=false", recipe=recipe, num=1), code=1)
    assert "broken on purpose" in output and Store(folder / "checkpoints").find_newest_checkpoint(pytest.fail)[0] == 10
    finish(train(folder, 2, *words, "model.draws=true", recipe=recipe, num=1))
    assert_equal_runs(tmp_path / "whole", folder, 20)
    assert [line["step"] for line in metrics(folder) if "held_out/loss" in line] == [10, 20]


def test_a_rate_that_is_too_high(tmp_path):
    """Oracle: finding C2: a learning rate of 1000 ends with 3; --step, a lower rate and --allow-change go on."""
    folder, words = tmp_path / "run", ("every.sample=0", "every.save=5", "save.keep=4", "faults.max_skipped=5")
    finish(train(folder, 2, *words, "steps=10", num=1))
    output = finish(train(folder, 2, *words, "steps=60", "optimizer.lr=1000", "--allow-change", num=1), code=3)
    assert "--step N" in output and "--allow-change" in output and "holds the steps 5 (put aside: 10" in output
    finish(train(folder, 2, *words, "steps=20", "--step", "10", "--allow-change", num=1))
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [5, 10, 15, 20] and all(line["loss"] < 2 for line in lines)


def test_weights_that_are_destroyed_and_finite(tmp_path):
    """Oracle: finding C2 as it mostly happens, by a rate that grows: the checkpoints that the run went back to outlive
    those of destroyed weights, and the advice works: a lower rate, --allow-change and --step.
    """
    # The rate grows fast enough: at a 30th of it, the network falls silent instead with the rounding of some CPUs.
    folder, words = (
        tmp_path / "run",
        ("every.sample=0", "every.save=5", "every.report=5", "faults.max_skipped=2", "optimizer.clip=0"),
    )
    output = finish(
        train(folder, 1, *words, "steps=3000", "optimizer.lr=40000", "optimizer.warmup=900000", num=1), code=3
    )
    assert "has gone back 3 times" in output and "a higher number lets it go back again" in output
    targets = [int(word) for word in re.findall(r"back from step \d+ to step (\d+)", output)]
    assert len(targets) == 3 and set(targets) <= set(Store(folder / "checkpoints").list_steps())
    finish(
        train(
            folder,
            1,
            *words,
            f"steps={min(targets) + 5}",
            "optimizer.lr=1e-4",
            "optimizer.warmup=0",
            "--allow-change",
            "--step",
            str(min(targets)),
            num=1,
        )
    )
    assert metrics(folder)[-1]["loss"] < 2


class Payload:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def reseal(path: Path) -> None:
    """Seals whatever the folder of a checkpoint holds, as an attacker would."""
    names = [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file() and file.name != NAME]
    (path / NAME).write_bytes(sealed.render_json_with_hash({**read_manifest(path), "files": hash_files(path, names)}))


def test_nothing_is_unpickled_unasked(tmp_path):
    """Oracle: a payload that would make a file: not where it is sealed into a checkpoint, without --trust-pickle; with
    it DeepSpeed's own files resume, and the run goes back to them.
    """
    recipe, folder, mark = brittle.prepare(tmp_path, white=[12, 13, 14]), tmp_path / "run", tmp_path / "executed"
    words = ("save.format=deepspeed", "faults.max_skipped=2")
    finish(train(folder, 2, *words, "steps=10", recipe=recipe, num=1))
    good = folder.with_name("good")
    shutil.copytree(folder, good)
    victim = folder / "checkpoints" / "step_00000010"
    (next((victim / "deepspeed" / "first").glob("mp_rank*.pt"))).write_bytes(pickle.dumps(Payload(mark)))
    reseal(victim)
    output = finish(train(folder, 2, *words, "steps=20", recipe=recipe, num=1), code=2)
    assert "give --trust-pickle" in output and "Traceback" not in output and not mark.exists()
    plain = tmp_path / "plain"
    finish(train(plain, 2, "steps=5", recipe=recipe, num=1))
    victim = plain / "checkpoints" / "step_00000005" / "deepspeed" / "first"
    victim.mkdir(parents=True)
    (victim / "mp_rank_00_model_states.pt").write_bytes(pickle.dumps(Payload(mark)))
    reseal(victim.parents[1])
    output = finish(train(plain, 2, "steps=6", recipe=recipe, num=1), code=2)
    assert "give --trust-pickle" in output and not mark.exists()
    output = finish(train(good, 2, *words, "steps=20", "--trust-pickle", recipe=recipe, num=1))
    assert "back from step 15 to step 10" in output and "complete: 20 steps" in output
    added = good / "checkpoints" / "step_00000020" / "deepspeed" / "first" / "more.pt"
    added.write_bytes(pickle.dumps(Payload(mark)))
    output = finish(train(good, 2, *words, "steps=21", "--trust-pickle", recipe=recipe, num=1))
    assert "deepspeed/first/more.pt is not in manifest.json" in output and not mark.exists()


def test_live_engines_go_back_exactly(tmp_path):
    """Oracle: a fresh process that resumes from that checkpoint with that shift: the same bits at every stage."""
    launch("tests/engine/check_rollback.py", tmp_path, num=1, timeout=1500)
    figures = {
        name: place
        for world in (1, 2)
        for name, place in json.loads((tmp_path / f"figures-{world}.json").read_text()).items()
    }
    assert len(figures) == 4 + 5 + 4 + 2
    for name, place in figures.items():
        assert place["skipped"] and place["losses"] and place["applied"] and place["count"] == 0, name
        assert place["begun"] == place["differ"] == [], name
        assert len(place["parts"]) == (1 if "iddpm" in name or "dvae" in name else 2), name
