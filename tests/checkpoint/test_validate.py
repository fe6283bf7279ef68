"""What a checkpoint's small files may not say, although they are sealed; a run then goes on from the step before."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dstrain import recipe
from dstrain.checkpoint import validate
from dstrain.checkpoint.manifest import NAME, hash_files, read_manifest
from dstrain.checkpoint.store import Store
from dstrain.disk.sealed import render_json_with_hash
from dstrain.engine.ema import combine
from dstrain.recipe import ConfigError
from tests.support import checkpoints
from tests.support.tiny import Tiny

FINE = {"net": {"updates": 3, "skipped": 1, "stage": 2, "scaler": {"cur_scale": 1.0, "last_overflow_iter": None}}}


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of steps 7 and 9 that are in order."""
    checkpoints.write(tmp_path, recipe.load_recipe(None), {"net": Tiny()})
    shutil.copytree(tmp_path / "checkpoints" / "step_00000007", tmp_path / "checkpoints" / "step_00000009")
    for step in (7, 9):
        seal(tmp_path / "checkpoints" / f"step_{step:08d}", step=step, extra={"score": None})
    return tmp_path / "checkpoints"


def seal(path, counters=json.dumps(FINE), **body) -> None:
    """Seals the folder with these counters and entries of its manifest; `files` None lists what is there."""
    save_file(
        {"history": torch.zeros(2)}, path / "common.safetensors", None if counters is None else {"counters": counters}
    )
    names = [file.name for file in path.glob("*.safetensors")]
    (path / NAME).write_bytes(render_json_with_hash({**read_manifest(path), "files": hash_files(path, names), **body}))


def newest(folder) -> tuple[int, list[str]]:
    lines: list[str] = []
    return Store(folder, check=validate.require_loadable_checkpoint).find_newest_checkpoint(lines.append)[0], lines


@pytest.mark.parametrize(
    "counters",
    [
        None,
        "",
        "null",
        "[]",
        "3",
        '{"net": 1}',
        '{"net": {}}',
        "[" * 3000,
        json.dumps({"net": FINE["net"] | {"updates": -1}}),
        json.dumps({"net": FINE["net"] | {"scaler": []}}),
        json.dumps({"net": FINE["net"] | {"stage": "two"}}),
        json.dumps({"other": FINE["net"]}),
    ],
)
def test_counters(folder, counters):
    """Oracle: the step before, and one line that names the file; in order it is the step itself."""
    assert newest(folder) == (9, [])
    assert validate.read_part_counters(folder / "step_00000009") == FINE
    assert validate.read_recovery_state(folder / "step_00000009").skipped == 1
    seal(folder / "step_00000009", counters)
    step, lines = newest(folder)
    assert step == 7 and len(lines) == 1 and "step_00000009" in lines[0]


@pytest.mark.parametrize(
    "course", [[], 3, {"shift": -1}, {"rollbacks": 1}, {"losses": {"net": [None]}}, {"in_a_row": "x"}]
)
def test_course(folder, course):
    """Oracle: the step before, and a line that says what is malformed."""
    seal(folder / "step_00000009", extra={"course": course})
    step, lines = newest(folder)
    assert step == 7 and "its course is malformed" in lines[0]


def test_files_that_are_not_listed(folder):
    """Oracle: what `load` would read and no hash covers: a shard, the small file, DeepSpeed's own files."""
    path = folder / "step_00000009"
    listed = read_manifest(path)["files"]
    for name in listed:
        seal(path, files={other: entry for other, entry in listed.items() if other != name})
        assert newest(folder)[0] == 7 and f"{name} is not in {NAME}" in newest(folder)[1][0]
    seal(path, world=2)
    assert "net-00000-of-00002.safetensors is not in" in newest(folder)[1][0]
    seal(path, world=1)
    assert newest(folder) == (9, [])
    (path / "deepspeed" / "net").mkdir(parents=True)
    (path / "deepspeed" / "net" / "model.pt").write_bytes(b"pickle")
    assert newest(folder)[0] == 7 and "deepspeed/net/model.pt is not in" in newest(folder)[1][0]


def test_snapshots_that_fit_together(folder):
    """Oracle: by hand: those that began where the last one did; the message where one holds no averages."""

    def counters(began, updates):
        return json.dumps({"net": FINE["net"] | {"averages": {"widths": [0.1], "began": began, "updates": updates}}})

    shutil.copytree(folder / "step_00000009", folder / "step_00000011")
    paths = [folder / f"step_{step:08d}" for step in (7, 9, 11)]
    for path, began, step in zip(paths, (0, 8, 8), (7, 9, 11)):
        seal(path, counters(began, step - began), step=step)
    assert [snapshot.step for snapshot in combine.select_combinable_snapshots(paths)] == [9, 11]
    assert [snapshot.step for snapshot in combine.select_combinable_snapshots(paths[:2])] == [9]
    seal(paths[0], step=7)
    with pytest.raises(ConfigError, match="step_00000007 holds no averages by width"):
        combine.select_combinable_snapshots(paths)


def test_small_tensors_and_counters(tmp_path):
    """Oracle: what was written, by the safetensors library; names behind a prefix."""
    tensors = {"buffer/net/scale": torch.arange(3.0), "system/history": torch.ones(2), "buffer/nets/x": torch.ones(1)}
    validate.write_common_tensors_and_counters(tmp_path, (tensors, FINE))
    loaded = load_file(tmp_path / "common.safetensors")
    assert loaded.keys() == tensors.keys() and all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert validate.read_part_counters(tmp_path) == FINE
    within = validate.select_and_strip_prefix(loaded, "buffer/net/")
    assert list(within) == ["scale"] and torch.equal(within["scale"], tensors["buffer/net/scale"])


def test_shapes(tmp_path):
    """Oracle: the message: which weight differs or lies on one side only, and both shapes; none where equal."""
    validate.require_same_shapes(tmp_path, "net", {"a": (2, 3)}, {"a": (2, 3)})
    for saved, words in (
        ({"a": (3, 2)}, r"a is \(3, 2\) there and \(2, 3\) here"),
        ({}, r"a is absent there and \(2, 3\)"),
        ({"a": (2, 3), "b": (1,)}, r"b is \(1,\) there and absent here"),
    ):
        with pytest.raises(ConfigError, match=f"does not fit this net: {words}"):
            validate.require_same_shapes(tmp_path, "net", saved, {"a": (2, 3)})
