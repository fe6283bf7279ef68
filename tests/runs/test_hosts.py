"""What ranks on several machines must have in common: two real processes whose folders, recipes or code differ."""

import io
import os
import threading
import time
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from dstrain.recipe import ConfigError, NotSaved, Run
from dstrain.runs import hosts
from tests.support import gloo
from tests.support.forks import child
from tests.support.launch import ROOT, environment, free_port
from tests.support.runs import RECIPE

SETTINGS = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
CODES = (
    {"dstrain": "aaa", "torch": "2.11", "deepspeed": "0.19.8"},
    {"dstrain": "bbb", "torch": "2.11", "deepspeed": "1"},
)
RUN = Path("root/run")  # a mount is this: one name for all, and perhaps other folders

# What differs, by the name of the case; all else is the same.
CASES = {
    "one": {},
    "own": {"patience": 0.5, "roots": ("one", "another")},
    "own, held": {"patience": 0.5, "roots": ("one", "another"), "held": ("run.yaml", "earlier_1")},
    "late": {"patience": 60, "roots": ("one", "another"), "late": 1.5},
    "recipe": {"words": ({"seed": 3}, {"seed": 4}), "settings": (SETTINGS, SETTINGS | {"bf16": {"enabled": False}})},
    "code": {"codes": CODES, "names": ("a", "b")},
    "code, here": {"codes": CODES},
}


def checked(rank: int, folder: Path) -> dict[str, tuple]:
    """By case: how this rank comes out of the check, and what it says."""
    return {name: _checked(rank, folder / name, **case) for name, case in CASES.items()}


def _checked(
    rank: int,
    folder: Path,
    *,
    roots=("one", "one"),
    words=({}, {}),
    settings=(SETTINGS, SETTINGS),
    codes=None,
    names=None,
    patience=20.0,
    late=0.0,
    held=(),
) -> tuple:
    for root in roots:
        (folder / root).mkdir(parents=True, exist_ok=True)
    os.chdir(folder / roots[rank])
    if rank == 0:
        RUN.mkdir(parents=True)
        for name in (".lock", *held):
            (RUN / name).touch()
    elif late:
        threading.Timer(late, RUN.parent.symlink_to, [folder / roots[0] / RUN.parent]).start()
    real, said, began = (hosts._collect_code_versions, hosts.socket.gethostname), io.StringIO(), time.monotonic()
    if codes:
        hosts._collect_code_versions = lambda: codes[rank]
    if names:
        hosts.socket.gethostname = lambda: names[rank]
    try:
        with redirect_stderr(said):
            hosts.require_same_setup_on_all_ranks(Run(folder=RUN, **words[rank]), settings[rank], patience)
    except ConfigError as error:
        return "refused", error.problems
    except SystemExit as ended:
        return "ended", ended.code, said.getvalue()
    finally:
        hosts._collect_code_versions, hosts.socket.gethostname = real
    return "in order", time.monotonic() - began


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """(folder, what rank 0 says by case, what rank 1 says)."""
    folder = tmp_path_factory.mktemp("two")
    return folder, *gloo.run(folder, checked, folder)


def held(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def refusal(two, case: str) -> list[str]:
    """What rank 0 says; rank 1 ends with the same code and without a word."""
    assert two[2][case] == ("ended", 2, "") and two[1][case][0] == "refused"
    return two[1][case][1]


def test_one_folder_recipe_and_code(two):
    """Oracle: two ranks of one machine: nothing is refused, and the folder is as it was."""
    assert two[1]["one"][0] == two[2]["one"][0] == "in order"
    assert held(two[0] / "one/one" / RUN) == {".lock"}


def test_one_process_looks_at_nothing(tmp_path):
    """Oracle: a folder that does not exist, and still does not afterwards."""
    hosts.require_same_setup_on_all_ranks(Run(folder=tmp_path / "none"), {})
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("case", ["own", "own, held"])
def test_a_folder_for_each_machine(two, case):
    """Oracle: the folders: rank 1's is not made, rank 0's is as before, and gone where only the claim had made it."""
    (problem,) = refusal(two, case)
    assert "folder=root/run is not shared: rank 1 on " in problem and "put it on a file system" in problem
    assert not held(two[0] / case / "another")
    if "held" in case:
        assert held(two[0] / case / "one" / RUN) == {".lock", "run.yaml", "earlier_1"}
    else:
        assert not held(two[0] / case / "one" / RUN.parent)


def test_a_folder_that_is_seen_late(two):
    """Oracle: rank 1's folder comes late, as on NFS, whose clients may learn of it after seconds: both go on."""
    assert two[1]["late"][0] == two[2]["late"][0] == "in order"
    assert min(two[1]["late"][1], two[2]["late"][1]) > 1
    assert held(two[0] / "late/one" / RUN) == {".lock"}


def test_another_recipe(two):
    """Oracle: the two entries that differ, each with both values; one in the recipe, one in the DeepSpeed settings."""
    (problem,) = refusal(two, "recipe")
    assert problem.startswith("rank 1 on ") and "seed=4 (not 3)" in problem
    assert "bf16={'enabled': False} (not {'enabled': True})" in problem


def test_another_code(two):
    """Oracle: the versions given to each rank; those that agree are not named, nor is one machine's file in editing."""
    same = "install the same on all machines"
    assert refusal(two, "code") == [
        f"rank 1 on b has dstrain bbb, rank 0 on a has aaa: {same}",
        f"rank 1 on b has deepspeed 1, rank 0 on a has 0.19.8: {same}",
    ]
    assert two[1]["code, here"][0] == two[2]["code, here"][0] == "in order"


def test_the_code_is_known_by_its_files(tmp_path, monkeypatch):
    """Oracle: one character more in one file, one file more, one renamed: each is another code; versions are there."""
    package = tmp_path / "dstrain"
    (package / "inner").mkdir(parents=True)
    (package / "inner" / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(hosts, "__file__", str(package / "hosts.py"))
    seen = [hosts._collect_code_versions()]
    (package / "inner" / "a.py").write_text("x = 12\n")
    seen.append(hosts._collect_code_versions())
    (package / "b.py").touch()
    seen.append(hosts._collect_code_versions())
    (package / "b.py").rename(package / "c.py")
    seen.append(hosts._collect_code_versions())
    (package / "notes.txt").write_text("no code")
    assert len({code["dstrain"] for code in seen}) == 4 and hosts._collect_code_versions() == seen[-1]
    assert set(seen[0]) == {"dstrain", "torch", "deepspeed"}


@pytest.mark.parametrize("taken", ["nothing", "for a moment", "the folder", "run.yaml"])
def test_a_folder_that_was_taken_away(tmp_path, taken):
    """Oracle: the folder, moved by hand: one line that names it and the remedy, and no folder made anew. An editor's
    moment without run.yaml passes.
    """
    folder, away = tmp_path / "run", tmp_path / "away"
    folder.mkdir()
    (folder / "run.yaml").touch()
    if taken == "the folder":
        folder.rename(away)
    elif taken != "nothing":
        (folder / "run.yaml").rename(away)
    if taken in ("the folder", "run.yaml"):
        with pytest.raises(NotSaved, match=f"^{folder} was moved or removed .* same command again$"):
            hosts.require_folder_not_lost(folder, patience=0.3)
        assert folder.exists() == (taken == "run.yaml")
        return
    if taken == "for a moment":
        threading.Timer(0.3, away.rename, [folder / "run.yaml"]).start()
    hosts.require_folder_not_lost(folder, patience=30)


def test_options_of_one_rank_alone(tmp_path):
    """Oracle: the option that one of two real commands was given: both end with 2, and rank 0 names it."""
    words = ("--profile=1:2", "--from-scratch")
    shared = environment(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    command = [str(ROOT / "launch" / "train.py"), "--recipe", str(RECIPE), f"folder={tmp_path / 'run'}"]
    ranks = [
        child(
            [*command, words[rank]], {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, tmp_path / f"output-{rank}"
        )
        for rank in (0, 1)
    ]
    codes = [rank.wait(120) for rank in ranks]
    output = (tmp_path / "output-0").read_text()
    assert codes == [2, 2], output
    assert "--from-scratch=True (not False)" in output and "--profile=None (not (1, 2, 1))" in output
