"""Whose checkpoints lie in a run's folder: a run goes on from its own and its ancestors', no others."""

import shutil
from pathlib import Path

import pytest

from dstrain.checkpoint.manifest import read_manifest
from dstrain.checkpoint.store import Store
from dstrain.disk import owner
from dstrain.recipe import ConfigError
from dstrain.runs import folders
from dstrain.runs.lineage import ANCESTORS
from tests.runs.test_folders import MARK, prepare, run


def start(folder: Path, *steps: int, **flags: bool) -> None:
    """One command: it claims the folder, begins there, saves steps, and gives it back."""
    with folders.lock_folder(folder, patience=0):
        folders.check_and_prepare_run_folder(run(folder), MARK, folders.Resume(**flags))
        prepare(run(folder))
        for step in steps:
            store = Store(folder / "checkpoints", keep=9)
            assert store.save(step, lambda path: (path / "weights").write_text(f"{folder.name} {step}") and None)
            folders.write_saved_step(folder, step)


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step:08d}"


def put(source: Path, step: int, target: Path) -> Path:
    return shutil.copytree(checkpoint(source, step), checkpoint(target, step))


@pytest.fixture
def runs(tmp_path) -> tuple[Path, Path]:
    """Two runs of one recipe: the first has saved steps 10 and 30, the second step 20."""
    first, second = tmp_path / "a", tmp_path / "b"
    for folder, steps in ((first, (10, 30)), (second, (20,))):
        folder.mkdir()
        start(folder, *steps)
    return first, second


def test_a_manifest_names_its_run(runs):
    """Oracle: `.run` of the folder; a store outside of a run names none."""
    for folder, step in zip(runs, (10, 20)):
        assert read_manifest(checkpoint(folder, step))["extra"] == {"run": owner.read_run_identity(folder)}
        assert not (folder / ANCESTORS).exists()
    bare = Store(runs[0].parent / "bare")
    assert bare.save(1, lambda path: None) and read_manifest(bare.folder / "step_00000001")["extra"] == {}


@pytest.mark.parametrize("flags", [{}, {"step": 10}])
def test_a_checkpoint_of_another_run(runs, flags):
    """Oracle: by hand: refused before anything is written, by its name and both identities; moved away, or accepted
    once with --allow-change, the run goes on, and is not asked again; it may be asked for by --step, too."""
    first, second = runs
    step = flags.get("step", 30)
    before = {path.name for path in second.iterdir()}
    put(first, step, second)
    with pytest.raises(
        ConfigError, match=rf"step_{step:08d} was written by another run \(.*--allow-change.*init_from="
    ):
        start(second, **flags)
    assert {path.name for path in second.iterdir()} == before
    shutil.rmtree(checkpoint(second, step))
    start(second)
    put(first, step, second)
    start(second, allow_change=True)
    start(second, 40)
    assert read_manifest(checkpoint(second, 40))["extra"] == {"run": owner.read_run_identity(second)}


def test_copies_go_on(runs, tmp_path):
    """Oracle: the steps of the original: a copy, a copy of that copy, and one without hidden files go on from them,
    again and again, whether they have saved since or not. A later step of the original may come to its copy, and none
    of a copy to the original."""
    first, _ = runs
    copies = [shutil.copytree(first, tmp_path / "copy")]
    start(copies[0])
    copies.append(shutil.copytree(copies[0], tmp_path / "again"))
    copies.append(shutil.copytree(first, tmp_path / "bare", ignore=shutil.ignore_patterns(".*")))
    for copy in copies:
        start(copy)
        assert owner.read_run_identity(copy) != owner.read_run_identity(first)
        start(copy)
        start(copy, 40)
        start(copy)
    start(first, 50)
    put(first, 50, copies[0])
    start(copies[0])  # of its ancestor
    put(copies[1], 40, first)
    with pytest.raises(ConfigError, match="step_00000040 was written by another run"):
        start(first)


def test_runs_of_earlier_versions(runs):
    """Oracle: manifests of earlier versions, which name no run: nothing is asked. The same without `.run`, and where a
    manifest is damaged or names something else."""
    first, second = runs
    path = put(first, 30, second)
    (second / owner.IDENTITY).rename(second / "kept")
    (second / "kept").unlink()
    start(second)
    (path / "manifest.json").write_text("{")
    start(second)


def test_a_new_run_knows_no_ancestors(runs):
    """Oracle: by hand: --from-scratch moves the list aside with what it is of."""
    first, second = runs
    put(first, 30, second)
    start(second, allow_change=True)
    assert (second / ANCESTORS).read_text() == f"{owner.read_run_identity(first)}\n"
    start(second, 10, from_scratch=True)
    assert (second / "earlier_1" / ANCESTORS).exists() and not (second / ANCESTORS).exists()
    put(first, 30, second)
    with pytest.raises(ConfigError, match="step_00000030"):
        start(second)
