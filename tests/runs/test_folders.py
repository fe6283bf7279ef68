"""The folder of a run: what may go on in it, what is refused, and that nothing is lost."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dstrain import recipe
from dstrain.recipe import ConfigError, Run
from dstrain.runs import folders
from tests.support.launch import environment

MARK = "images: 60"


def run(folder: Path, *overrides: str) -> Run:
    return recipe.load_recipe(None, [f"folder={folder}", "model.depth=2", *overrides])


def check(wanted: Run, mark: str = MARK, *, from_scratch: bool = False, allow_change: bool = False) -> None:
    folders.require_start_allowed_in_folder(
        wanted, mark, folders.Resume(from_scratch=from_scratch, allow_change=allow_change)
    )


def refusal(wanted: Run, mark: str = MARK, **flags: bool) -> str:
    before = contents(wanted.directory)
    with pytest.raises(ConfigError) as caught:
        check(wanted, mark, **flags)
    assert contents(wanted.directory) == before
    return str(caught.value)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder; the file itself where it is none."""
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else [folder]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files if path.exists()}


def prepare(wanted: Run, mark: str = MARK, from_scratch: bool = False) -> None:
    if from_scratch and wanted.directory.exists():
        folders.move_run_aside(wanted.directory)
    folders.write_run_files(wanted, {"train_batch_size": 64}, mark)


@pytest.fixture
def begun(tmp_path) -> Path:
    """A folder in which a run has begun."""
    folder = tmp_path / "runs" / "a"
    prepare(run(folder))
    (folder / "checkpoints" / "step_00000100").mkdir(parents=True)
    folders.write_saved_step(folder, 100)
    return folder


def test_a_fresh_folder(tmp_path):
    """Oracle: the run, settings and fingerprint that were handed over, read back from what was written."""
    wanted = run(tmp_path / "runs" / "a", "seed=3")
    for there in (False, True):  # not there, and there but empty
        check(wanted)
        assert list(tmp_path.iterdir()) == [] or there
        wanted.directory.mkdir(parents=True, exist_ok=True)
    prepare(wanted)
    assert recipe.load_recipe(wanted.directory / "run.yaml") == wanted
    assert json.loads((wanted.directory / "ds_config.json").read_text()) == {"train_batch_size": 64}
    assert set(contents(wanted.directory)) == {"run.yaml", "ds_config.json", "data.txt", "saved"}
    check(wanted)
    assert folders.read_last_saved_step(wanted.directory) == 0


def test_a_file_where_the_folder_should_be(tmp_path):
    """Oracle: the file, which stays, with and without --from-scratch."""
    (tmp_path / "a").write_text("mine")
    for flag in (False, True):
        assert "is a file; name a folder" in refusal(run(tmp_path / "a"), from_scratch=flag)


FOREIGN = {
    "a thesis": ["thesis.tex", "b/notes.txt", ".hidden"],
    "other runs": ["dit/run.yaml", "dit/saved", "dit/checkpoints/step_00000001/manifest.json"],
    "keys": [".ssh/id", "bin/sh"],
    "another program's run": ["checkpoints/last.pt", "samples/a.png", "wandb/run", "log.txt"],
    "a project with a recipe": ["run.yaml", "samples/a.png", "main.py"],
    "one run's file": ["metrics.jsonl"],
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_foreign_folder_stays_as_it_is(tmp_path, case):
    """Oracle: files that no run has made, to the byte; the refusal names one, and no option that moves them."""
    for name in FOREIGN[case]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    before = contents(tmp_path)
    for flags in ({}, {"allow_change": True}, {"from_scratch": True}):
        text = refusal(run(tmp_path), **flags)
        assert any(name.partition("/")[0] in text for name in FOREIGN[case])
        assert "--from-scratch" not in text and "another folder" in text
    assert contents(tmp_path) == before


def test_from_scratch_moves_what_is_a_runs_alone(begun):
    """Oracle: strangers beside a run, to the byte: notes, keys, another run in a folder, an index of data."""
    strangers = ["notes.txt", ".ssh/id", "other/run.yaml", "index/header.json", "generated_2/samples/0.png"]
    for name in strangers:
        (begun / name).parent.mkdir(parents=True, exist_ok=True)
        (begun / name).write_text(name)
    folders.write_saved_step(begun, 3)
    folders.move_run_aside(begun)
    assert {*strangers, "earlier_1/run.yaml", "earlier_1/saved"} <= contents(begun).keys()
    assert not (begun / "run.yaml").exists()


LINKS = [
    "samples",
    "log.txt",
    "events.jsonl",
    "report.html",
    "reconstructed",
    "wandb",
    "evaluation",
    "index",
    "model",
    "run.yaml",
]


@pytest.mark.parametrize("name", LINKS)
def test_a_run_with_links_is_refused(begun, tmp_path, name):
    """Oracle: what the link names, unread and unwritten; the message names the link."""
    (tmp_path / "mine").write_text("mine")
    (begun / name).unlink(missing_ok=True)
    (begun / name).symlink_to(tmp_path / "mine")
    assert f"{name} is a link to {tmp_path / 'mine'}" in refusal(run(begun))
    with pytest.raises(ConfigError, match="is a link"):
        folders.read_recipe(begun)
    folders.move_run_aside(begun)
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_lock_that_is_a_link_is_named(begun, tmp_path):
    """Oracle: the words for every other link of a run; what it names is not made."""
    (begun / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"\.lock is a link to .*mine, and nothing is written through a link"):
        folders.lock_folder(begun, patience=0)
    assert not (tmp_path / "mine").exists()


def test_checkpoints_may_lie_on_another_disk_and_not_in_another_run(begun, tmp_path):
    """Oracle: a folder without a recipe beside it is another disk; one beside run.yaml is another run's."""
    for place in ("disk", "victim"):
        (tmp_path / place / "checkpoints").mkdir(parents=True)
    (tmp_path / "victim" / "run.yaml").write_text("")
    shutil.rmtree(begun / "checkpoints")
    (begun / "checkpoints").symlink_to(tmp_path / "disk" / "checkpoints")
    folders.require_no_symbolic_links(begun)
    (begun / "checkpoints").unlink()
    (begun / "checkpoints").symlink_to(tmp_path / "victim" / "checkpoints")
    assert "checkpoints is a link to" in refusal(run(begun))


def start(folder: Path, **how: object) -> folders.Claimed:
    """Does what a command does before it trains; closing gives the folder back."""
    claimed = folders.lock_folder(folder, patience=0)
    try:
        folders.check_and_prepare_run_folder(run(folder), MARK, folders.Resume(**how))
    except BaseException:
        claimed.close()
        raise
    return claimed


@pytest.fixture
def linked(begun, tmp_path) -> Path:
    """A run whose checkpoints lie on another disk, by a relative link."""
    (tmp_path / "disk").mkdir()
    (begun / "checkpoints").rename(tmp_path / "disk" / "a")
    (begun / "checkpoints").symlink_to("../../disk/a")
    return begun


@pytest.mark.parametrize("living", [False, True])
def test_a_copy_does_not_share_checkpoints(linked, tmp_path, living):
    """Oracle: `cp -r`: what the link names is the original's alone, whether it trains or not; the remedy helps."""
    first, copy, disk = start(linked), linked.with_name("b"), tmp_path / "disk" / "a"
    if not living:
        first.close()
    shutil.copytree(linked, copy, symlinks=True)
    with pytest.raises(ConfigError, match=rf"which are also the checkpoints of {linked}: copy them"):
        start(copy)
    shutil.copytree(disk, tmp_path / "disk" / "b")
    (copy / "checkpoints").unlink()
    (copy / "checkpoints").symlink_to("../../disk/b")
    for _ in range(2):
        start(copy).close()
    first.close()
    start(linked).close()
    assert not list(tmp_path.rglob(".lease-*"))


def test_two_runs_of_an_earlier_version_do_not_share_checkpoints(linked, monkeypatch):
    """Oracle: two copies without any record: one that begins while the other trains, and one that begins later."""
    monkeypatch.setattr(folders.owner, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(folders.owner, "BEAT_SECONDS", 0.1)
    copy = linked.with_name("b")
    shutil.copytree(linked, copy, symlinks=True)
    with start(linked):
        (linked.resolve() / "checkpoints" / ".run").rename(linked / "x")  # as if both were just beginning
        with pytest.raises(ConfigError, match="into which another process trains"):
            start(copy)
        (linked / "x").rename(linked / "checkpoints" / ".run")
    with pytest.raises(ConfigError, match="are also the checkpoints of"):
        start(copy)


def test_a_run_with_linked_checkpoints_is_moved(linked, tmp_path):
    """Oracle: the same run, at another place: it goes on; and a copy of it is refused all the same."""
    (linked / "checkpoints").unlink()
    (linked / "checkpoints").symlink_to(tmp_path / "disk" / "a")
    start(linked).close()
    identity = folders.owner.read_run_identity(linked)
    linked.rename(moved := tmp_path / "moved")
    shutil.copytree(moved, tmp_path / "copy", symlinks=True)
    with pytest.raises(ConfigError, match=rf"or, if that run is no more, remove {tmp_path / 'disk' / 'a' / '.run'}"):
        start(tmp_path / "copy")
    start(moved).close()
    assert folders.owner.read_run_identity(moved) == identity
    with pytest.raises(ConfigError, match=f"are also the checkpoints of {moved}"):
        start(tmp_path / "copy")


def test_from_scratch_keeps_a_relative_link_whole(linked, tmp_path):
    """Oracle: the step that the link led to, from the place it was moved to; the new run has a folder of its own."""
    start(linked).close()
    start(linked, from_scratch=True).close()
    assert (linked / "earlier_1" / "checkpoints" / "step_00000100").is_dir()
    assert (linked / "earlier_1" / "checkpoints").resolve() == tmp_path / "disk" / "a"
    assert not (linked / "checkpoints").exists()


def test_later_steps_on_another_disk_stay_there(linked, tmp_path, monkeypatch):
    """Oracle: os.rename between two disks, which fails: earlier_1 leads to the steps, and they are not copied."""
    (linked / "metrics.jsonl").write_text("5")
    rename = Path.rename

    def rename_here(path: Path, target: Path) -> Path:
        if ("disk" in path.resolve().parts) != ("disk" in Path(target).parent.resolve().parts):
            raise OSError(18, "Invalid cross-device link")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_here)
    (linked / "checkpoints" / "step_00000050").mkdir()
    folders.move_newer_steps_aside(linked, 50)
    assert [path.name for path in (tmp_path / "disk" / "a" / "earlier_1").iterdir()] == ["step_00000100"]
    assert (linked / "earlier_1" / "checkpoints" / "step_00000100").is_dir()
    assert folders.read_last_saved_step(linked) == 50


def test_a_copy_has_its_own_run_of_wandb(begun):
    """Oracle: `wandb_id`, which stays in the original, and after a move."""
    (begun / "wandb_id").write_text("abc\n")
    start(begun).close()
    shutil.copytree(begun, begun.with_name("b"))
    start(begun.with_name("b")).close()
    begun.rename(moved := begun.with_name("moved"))
    start(moved).close()
    assert (moved / "wandb_id").exists() and not (begun.with_name("b") / "wandb_id").exists()


def test_hidden_files_make_no_foreign_folder(tmp_path):
    """Oracle: what a desktop or an earlier --from-scratch leaves behind."""
    (tmp_path / ".DS_Store").touch()
    (tmp_path / "earlier_1").mkdir()
    check(run(tmp_path))


@pytest.mark.parametrize(
    "key, old, new",
    [
        ("seed", "0", "7"),
        ("model.depth", "2", "3"),
        ("batch.global", "64", "128"),
        ("optimizer.lr", "0.0001", "0.5"),
        ("data.flip", "true", "false"),
        ("ema.decays", "[0.9999]", "[0.5]"),
    ],
)
def test_a_change_of_what_the_run_is(begun, key, old, new):
    """Oracle: the key, the value in run.yaml and the one typed; --allow-change and --from-scratch let it pass."""
    wanted = run(begun, f"{key}={new}")
    text = refusal(wanted)
    assert f"{key} was {old} in {begun / 'run.yaml'} and is now {new}: write {key}={old}" in text
    assert "--allow-change" in text and "another folder=" in text and len(text.splitlines()) == 1
    check(wanted, allow_change=True)
    check(wanted, from_scratch=True)
    prepare(wanted)
    check(wanted)  # what was accepted is the run from now on
    assert f"{key} was" in refusal(run(begun))


def test_all_changes_are_named_together(begun):
    """Oracle: the keys that were changed."""
    text = refusal(run(begun, "seed=7", "model.depth=3", "steps=9", "every.save=1"))
    assert [line.split(" was ")[0] for line in text.splitlines()] == ["seed", "model.depth"]


@pytest.mark.parametrize(
    "free",
    [
        "steps=100000",
        "every.save=3",
        "save.keep=9",
        "batch.micro=8",
        "samples.num=4",
        "data.workers=0",
        "track.wandb=disabled",
        "faults.orphan_check=false",
    ],
)
def test_steps_and_what_only_reports_may_change(begun, free):
    """Oracle: design section 2: none of these determines the numbers of a step."""
    check(run(begun, free))


def test_other_data(begun):
    """Oracle: both fingerprints; where none was kept, nobody can tell."""
    text = refusal(run(begun), "images: 61")
    assert "'images: 61' now" in text and "'images: 60' before" in text and "--allow-change" in text
    check(run(begun), "images: 61", allow_change=True)
    check(run(begun), "images: 60 bytes=7")  # an earlier version said less
    refusal(run(begun), "images: 600")
    for damage in (lambda path: path.write_bytes(b"\xff\xfe"), Path.unlink):
        damage(begun / "data.txt")
        text = refusal(run(begun), "images: 61")
        assert "data.txt is gone or damaged" in text and "put it back" in text and "--allow-change" in text
        check(run(begun), "images: 61", allow_change=True)


def test_nothing_trained_is_nothing_to_change(tmp_path):
    """Oracle: a first command that failed before it saved: the corrected one is a fresh start."""
    prepare(run(tmp_path / "a"))
    check(run(tmp_path / "a", "seed=7", "model.depth=3"), "images: 61")


@pytest.mark.parametrize("left", [(), ("newest",), ("step_00000500.tmp",), ("step_00000500.gone.tmp",)])
def test_saved_without_checkpoints(begun, left):
    """Oracle: `saved` says 500: what is left in checkpoints/ is no checkpoint, so a resume would begin at step 0."""
    folders.write_saved_step(begun, 500)
    assert folders.read_last_saved_step(begun) == 500
    (begun / "checkpoints" / "step_00000100").rmdir()
    for name in left:
        (begun / "checkpoints" / name).mkdir()
    for flag in (False, True):
        text = refusal(run(begun), allow_change=flag)
        assert "saved step 500" in text and "put back what is gone" in text and "--from-scratch" in text
    check(run(begun), from_scratch=True)
    (begun / "checkpoints" / "step_00000400").mkdir()
    check(run(begun))


GARBAGE = ["", "12\n34", "\0" * 4, "half", "-5", "1e3", "9" * 5000, "\u0664"]


@pytest.mark.parametrize("text", GARBAGE)
def test_a_damaged_saved_beside_checkpoints(begun, text):
    """Oracle: the checkpoint's own name: what may not change is asked of it, and the file is written anew."""
    (begun / "saved").write_text(text)
    assert folders.read_last_saved_step(begun) == 100
    check(run(begun))
    assert "seed was" in refusal(run(begun, "seed=7"))
    prepare(run(begun))
    assert (begun / "saved").read_text() == "100\n"


def lose(folder: Path, case: str) -> None:
    """Takes from the folder of a run with a checkpoint, or alters, what `case` says; `;` between several."""
    for word in case.split("; "):
        kind, _, name = word.partition(" ")
        path = folder / name.partition(":")[0]
        if path.is_dir() and kind != "put":
            shutil.rmtree(path)
        elif kind != "put":
            path.unlink()
        if kind == "empty":
            path.touch()
        if kind == "emptied":
            path.mkdir()
        if kind == "linked":
            path.symlink_to("nowhere")
        if kind == "put":
            path.mkdir(exist_ok=True) if ":" not in name else path.write_text(name.partition(":")[2])


LOST = {
    "gone checkpoints": "saved step 100",
    "emptied checkpoints": "saved step 100",
    "empty checkpoints": "a file checkpoints",
    "linked checkpoints": "nowhere is not there",
    "emptied checkpoints; put checkpoints/step_00000200.tmp": "saved step 100",
    "emptied checkpoints; put checkpoints/newest:step_00000100": "saved step 100",
    "gone checkpoints; gone saved": "neither a checkpoint nor the file `saved`",
    "gone checkpoints; gone saved; gone metrics.jsonl": "neither a checkpoint nor the file `saved`",
    "gone checkpoints; gone saved; gone samples": "neither a checkpoint nor the file `saved`",
    "emptied checkpoints; gone saved; put checkpoints/step_00000200.tmp": "neither a checkpoint nor the file `saved`",
    **{f"gone checkpoints; put saved:{text}": "`saved`, which names the last one, is damaged" for text in GARBAGE},
    "gone checkpoints; put saved:999999999999": "saved step 999999999999",
    "gone run.yaml": "no run.yaml",
    "gone run.yaml; gone checkpoints; gone saved": "no run.yaml",
    "empty run.yaml": "run.yaml is empty",
    "emptied run.yaml": "run.yaml cannot be read",
    "put run.yaml:\0\0\0": "run.yaml",
}


@pytest.mark.parametrize("case", LOST)
def test_what_was_lost_is_not_trained_again_in_silence(begun, case):
    """Oracle: reports and pictures of 100 steps, which a start at step 1 would overwrite."""
    (begun / "metrics.jsonl").write_text('{"step": 100, "loss": 1.0}\n')
    (begun / "samples").mkdir()
    (begun / "samples" / "step_00000100.png").touch()
    lose(begun, case)
    text = refusal(run(begun))
    assert LOST[case] in text and len(text.splitlines()) == 1
    assert "--from-scratch" in text or case == "emptied run.yaml" or case.startswith("put run.yaml")
    check(run(begun), from_scratch=True)


@pytest.mark.parametrize("metrics", ["", '{"step": 10}\n'])
def test_a_command_that_ended_before_its_first_save_begins_again(tmp_path, metrics):
    """Oracle: `saved`, which is 0 from the start, tells it from a run that has lost its checkpoints."""
    prepare(run(tmp_path))
    (tmp_path / "metrics.jsonl").write_text(metrics)
    (tmp_path / "checkpoints" / "step_00000020.tmp").mkdir(parents=True)
    check(run(tmp_path))
    check(run(tmp_path, "seed=7"))
    (tmp_path / "saved").unlink()
    if metrics:
        refusal(run(tmp_path))
    else:
        check(run(tmp_path))


def test_a_damaged_recipe_is_named(begun):
    """Oracle: the file and the line that was broken."""
    (begun / "run.yaml").write_text("name: a\nseed: [1\n")
    assert f"{begun / 'run.yaml'}:" in refusal(run(begun))
    check(run(begun), from_scratch=True)


def test_from_scratch_loses_nothing(begun):
    """Oracle: every byte of what stood there, also after the third time."""
    (begun / "checkpoints" / "step_00000500").mkdir(parents=True)
    (begun / "checkpoints" / "step_00000500" / "manifest.json").write_text("{}")
    (begun / "earlier_7").mkdir()
    (begun / "earlier_7" / "run.yaml").write_text("old")
    kept: dict[str, bytes] = {"earlier_7/run.yaml": b"old"}
    for number in range(1, 4):
        folders.write_saved_step(begun, number)
        before = {name: text for name, text in contents(begun).items() if not name.startswith("earlier_")}
        prepare(run(begun, f"seed={number}"), from_scratch=True)
        now = contents(begun)
        fresh = {name for name in now if name not in kept and not name.startswith("earlier_")}
        assert fresh == {"run.yaml", "ds_config.json", "data.txt", "saved"} and folders.read_last_saved_step(begun) == 0
        moved = {
            name.partition("/")[2]: text
            for name, text in now.items()
            if name.startswith("earlier_") and name not in kept
        }
        assert moved == before
        assert all(now[name] == text for name, text in kept.items())
        kept = {name: text for name, text in now.items() if name.startswith("earlier_")}
    check(run(begun, "seed=3"))


def test_from_scratch_where_nothing_stands(tmp_path):
    """Oracle: a fresh run: no earlier_1 for an empty folder."""
    (tmp_path / "a").mkdir()
    for name in ("a", "b"):
        prepare(run(tmp_path / name), from_scratch=True)
        assert set(contents(tmp_path / name)) == {"run.yaml", "ds_config.json", "data.txt", "saved"}


def test_later_steps_are_moved_aside(begun):
    """Oracle: the folder before: checkpoints and averages of later steps are in earlier_1, at their places; earlier
    ones, half-written ones and what lies beside them stay.
    """
    later = [
        "checkpoints/step_00000100",
        "averages/step_00000080.aside",
        "averages/step_00000060",
        "reconstructed/0.1/step_00000060",
    ]
    kept = [
        "checkpoints/step_00000050",
        "averages/step_00000050",
        "reconstructed/0.1/step_00000050",
        "averages/step_00000070.tmp",
        "reconstructed/0.1/newest",
    ]
    for name in later + kept:
        (begun / name).mkdir(parents=True, exist_ok=True)
    folders.move_newer_steps_aside(begun, 50)
    assert all((begun / "earlier_1" / name).is_dir() and not (begun / name).exists() for name in later)
    assert all((begun / name).is_dir() for name in kept) and (begun / "saved").read_text() == "50\n"
    before = sorted(begun.rglob("*"))
    folders.move_newer_steps_aside(begun, 50)
    assert sorted(begun.rglob("*")) == before


def test_going_on_keeps_what_is_there(begun):
    """Oracle: the files of the run."""
    for name in ("log.txt", "metrics.jsonl", "saved", "stop"):
        (begun / name).write_text("5")
    before = contents(begun)
    prepare(run(begun, "steps=77"))
    after = contents(begun)
    assert before.keys() == after.keys() and recipe.load_recipe(begun / "run.yaml").steps == 77
    assert {name for name in after if after[name] != before[name]} == {"run.yaml"}


def refuse_lock(*_: object) -> None:
    """Stands in for fcntl.flock on a file system without locks."""
    raise OSError(37, "No locks available")


@pytest.mark.parametrize("locks", [True, False])
def test_one_run_in_a_folder(tmp_path, monkeypatch, locks):
    """Oracle: a real process that holds the folder until it is killed, also on a file system without locks; the name of
    the remedy in the meantime.
    """
    folder = tmp_path / "runs" / "a"
    without = (
        "" if locks else "import fcntl\ndef flock(*_): raise OSError(37, 'No locks available')\nfcntl.flock = flock\n"
    )
    if not locks:
        monkeypatch.setattr("fcntl.flock", refuse_lock)
    program = without + (
        "import sys, time; from dstrain.runs import folders; from pathlib import Path\n"
        "lock = folders.lock_folder(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, str(folder)], env=environment(), stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="another process trains in it.*; name another folder="):
            folders.lock_folder(folder, patience=0)
    finally:
        holder.kill()
        holder.communicate()
    with folders.lock_folder(folder, patience=0):
        check(run(folder))  # the lock makes no foreign folder
        with pytest.raises(ConfigError):
            folders.lock_folder(folder, patience=0)
        prepare(run(folder), from_scratch=True)
        prepare(run(folder), from_scratch=True)
        with pytest.raises(ConfigError):
            folders.lock_folder(folder, patience=0)  # nor is it moved aside
    folders.lock_folder(folder, patience=0).close()


def test_a_folder_is_waited_for(tmp_path):
    """Oracle: the clock: who holds it lets go after 0.2 s."""
    held = folders.lock_folder(tmp_path)
    begin = time.monotonic()
    threading.Timer(0.2, held.close).start()
    folders.lock_folder(tmp_path, patience=30).close()
    assert 0.15 < time.monotonic() - begin < 10


def test_a_claim_waits_for_one_who_takes_the_folder_away(tmp_path):
    """Oracle: a third command, which is refused: who waited while the folder went holds the one that is there now."""
    folder = tmp_path / "run"
    held, got = folders.lock_folder(folder), []
    waiting = threading.Thread(target=lambda: got.append(folders.lock_folder(folder, patience=30)))
    waiting.start()
    time.sleep(0.2)
    folders.remove_folder_if_unused(folder)
    assert not folder.exists()
    held.close()
    waiting.join()
    with pytest.raises(ConfigError, match="another process trains in it"):
        folders.lock_folder(folder, patience=0)
    got[0].close()


def test_only_an_empty_folder_is_let_go(tmp_path):
    """Oracle: its files: with anything beside the claim it stays as it is."""
    with folders.lock_folder(tmp_path / "run"):
        (tmp_path / "run" / "run.yaml").touch()
        folders.remove_folder_if_unused(tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "run.yaml"}


@pytest.fixture
def events(monkeypatch):
    """What is forced to the disk and renamed, in order: ("sync", inode), ("rename", name)."""
    seen, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (seen.append(("sync", os.fstat(number).st_ino)), fsync(number)))
    for name in ("replace", "rename"):
        move = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda old, new, move=move: (move(old, new), seen.append(("rename", Path(new).name)))
        )
    return seen


def test_state_reaches_the_disk(tmp_path, events):
    """Oracle: POSIX: a file survives a power loss when it is synced, then renamed, and then its folder is synced; so
    are run.yaml, data.txt, ds_config.json and saved written, when they are new and when they are replaced.
    """
    for new in (True, False):
        events.clear()
        prepare(run(tmp_path / "a"))
        folders.write_saved_step(tmp_path / "a", 3)
        names = [name for kind, name in events if kind == "rename"]
        assert names == [*["saved"] * new, "run.yaml", "data.txt", "ds_config.json", "saved"]
        names = names[new:]  # the first `saved`, of no step, is replaced by the second
        expected = [
            [
                ("sync", (tmp_path / "a" / name).stat().st_ino),
                ("rename", name),
                ("sync", (tmp_path / "a").stat().st_ino),
            ]
            for name in names
        ]
        assert events[3 * new :] == sum(expected, [])
        assert {path.name for path in (tmp_path / "a").iterdir()} == set(names)


def test_a_new_folder_reaches_the_disk(tmp_path, events):
    """Oracle: as above: all files and folders in it before the rename, the folder that holds it afterwards; an empty
    folder of that name gives way, an error leaves nothing.
    """
    (tmp_path / "out").mkdir()
    with folders.create_output_folder_atomically(tmp_path / "out") as folder:
        (folder / "inner").mkdir()
        for name in ("a", "inner/b"):
            (folder / name).write_text(name)
    inodes = {path.stat().st_ino for path in (tmp_path / "out", *(tmp_path / "out").rglob("*"))}
    assert events[-2:] == [("rename", "out"), ("sync", tmp_path.stat().st_ino)] and len(inodes) == 4
    assert {inode for kind, inode in events[:-2]} == inodes
    with pytest.raises(RuntimeError), folders.create_output_folder_atomically(tmp_path / "other") as folder:
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("critic, labels", [("token", "replaced"), (None, "masked")])
def test_a_run_of_an_older_dstrain_keeps_its_ways(tmp_path, critic, labels):
    """Oracle: what Phenaki did before it had these entries, which a run.yaml of that time lacks."""
    (tmp_path / "run.yaml").write_text(
        recipe.dump_run(Run(system="phenaki", model={"critic": critic, "decoding": {"sample_temperature": 0.9}}))
    )
    model = folders.read_recipe(tmp_path).model
    assert model["critic_labels"] == labels
    assert model["decoding"] == {"sample_temperature": 0.9, "sample_temperature_schedule": "decay"}


def test_an_output_without_anything_goes_again(tmp_path):
    """Oracle: by hand: a full disk leaves no new folder behind; what was there before, or was written, stays."""
    there = tmp_path / "there"
    there.mkdir()
    for out, written in ((tmp_path / "new", False), (tmp_path / "half", True), (there, False)):
        with pytest.raises(OSError, match="full"), folders.claim_output_folder(out, "--out", "generate"):
            if written:
                (out / "0.png").touch()
            raise OSError(28, "full")
    assert not (tmp_path / "new").exists() and (tmp_path / "half" / "0.png").exists() and there.is_dir()
