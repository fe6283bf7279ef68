"""The supervisor, as a real process, over a command that dies as it is told; launch/test_keep.py has real training."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dstrain.commands import keep as keep_module
from dstrain.commands.keep import _Supervisor
from dstrain.commands.options.keep import KeepOptions
from dstrain.recipe import ConfigError, load_recipe
from dstrain.runs import folders
from tests.support.launch import ROOT, here, start

# The command: its n-th start saves a step and ends as the n-th line of `plan` says.
TRAIN = """
import fcntl, os, signal, subprocess, sys, time
from pathlib import Path
from dstrain.distributed import exit_codes as endings
folder = Path(__file__).parent
run = folder / "run"
with open(folder / "starts", "a") as starts:
    starts.write(f"{time.time()} {' '.join(sys.argv[1:])}\\n")
number = len((folder / "starts").read_text().splitlines())
saved, how = (folder / "plan").read_text().splitlines()[number - 1].split()
if how == "early":                            # before the run has a folder
    sys.exit(1)
if how == "moved":
    os.rename(run, folder / "elsewhere")
    sys.exit(1)
run.mkdir(exist_ok=True)
(run / "run.yaml").touch()
if "--from-scratch" in sys.argv:
    (run / f"earlier_{number}").mkdir()
(run / "saved").write_text(saved)
if how == "killed":
    os.kill(os.getpid(), 9)
if how == "orphan":                           # a launcher that dies and leaves a rank, which saves and ends by itself
    rank = "import time; time.sleep(2); open('ended', 'w').write(str(time.time()))"
    subprocess.Popen([sys.executable, "-c", rank], cwd=folder, start_new_session=True)
    os.kill(os.getpid(), 9)
if how == "waits":
    def stopped(number, frame):
        endings.append_exit_code_to_file(75)
        sys.exit(143)
    signal.signal(signal.SIGTERM, stopped)
    (folder / "waiting").touch()
    time.sleep(600)
code, _, noted = how.partition(":")           # of the launcher, and of the ranks
if noted:
    endings.append_exit_code_to_file(int(noted))
sys.exit(int(code))
"""


@pytest.fixture
def keep(tmp_path):
    """keep(plan, *words, options=...): the supervisor's process, which writes to tmp_path/log."""
    (tmp_path / "train.py").write_text(TRAIN)
    started = []

    def begin(
        plan: list[str], *words: str, options: tuple[str, ...] = (), before: tuple[str, ...] = (sys.executable,), **env
    ):
        (tmp_path / "plan").write_text("\n".join(plan))
        line = [
            sys.executable,
            str(ROOT / "launch" / "keep.py"),
            "--backoff",
            "0.1",
            *options,
            "--",
            *before,
            str(tmp_path / "train.py"),
            f"folder={tmp_path / 'run'}",
            "steps=30",
            *words,
        ]
        with open(tmp_path / "log", "w") as log:
            started.append(start(line, log, **env))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


def starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text().splitlines()


@pytest.mark.parametrize(
    "plan, options, code, count",
    [
        (["10 killed", "20 4", "20 0", "30 0"], (), 0, 4),  # 0 before the last step: deepspeed, whose child died
        (["10 247", "30 0"], ("--max-restarts", "1"), 0, 2),
        (["10 247", "20 247", "30 0"], ("--max-restarts", "1"), 247, 2),
        (["0 2"], (), 2, 1),
        (["0 3"], (), 3, 1),
        (["10 75"], (), 75, 1),
        (["10 1:2"], (), 2, 1),
        (["10 1:75"], (), 75, 1),
        (["10 1:1", "30 0"], (), 0, 2),  # torchrun's 1
        (["10 75", "30 0"], ("--restart-on-stop",), 0, 2),
        (["10 1", "10 1", "10 1", "10 1", "10 1", "30 0"], (), 1, 5),
        (["0 1"] * 5, (), 1, 4),
        (["0 0"] * 5, (), 1, 4),
    ],
    ids=str,
)
def test_ends(keep, tmp_path, plan, options, code, count):
    """Oracle: the exit codes of docs/guides/running.md, and the starts; four in a row that save no step end it."""
    assert keep(plan, options=options).wait(120) == code, (tmp_path / "log").read_text()
    assert len(starts(tmp_path)) == count
    log = tmp_path / "run" / "restarts.log"
    lines = log.read_text().splitlines() if log.exists() else []
    assert len(lines) == count - 1 + (code in (1, 247)) and all("step " in line for line in lines)
    assert sum("ended with 0 before the run was complete" in line for line in lines) == sum(
        " 0" in end for end in plan[:-1]
    )


@pytest.mark.parametrize("plan", [["0 early", "0 early", "30 0"], ["0 early", "0 early", "10 1", "30 0"]], ids=len)
def test_restarts_from_before_there_was_a_folder_are_listed(keep, tmp_path, plan):
    """Oracle: the plan: a line for each restart, the first ones too, each once."""
    assert keep(plan).wait(120) == 0
    lines = (tmp_path / "run" / "restarts.log").read_text().splitlines()
    numbers = [line.partition("; restart ")[2].split()[0] for line in lines]
    assert numbers == [str(number) for number in range(1, len(plan))]


def test_a_folder_that_was_moved_is_not_begun_anew(keep, tmp_path):
    """Oracle: the number of starts, and the folder, which is not made again."""
    assert keep(["10 1", "10 moved", "30 0"]).wait(120) == 1
    assert len(starts(tmp_path)) == 2 and not (tmp_path / "run").exists()
    assert "would begin anew" in (tmp_path / "log").read_text().splitlines()[-1]


def test_options_of_one_command_are_not_given_again(keep, tmp_path):
    """Oracle: the command lines of all starts: --from-scratch, in both spellings, --step N and --profile A:B stand in
    the first alone.
    """
    once = ["--from-scratch", "--from_scratch", "--profile", "3:5"]
    keep(["10 1", "30 0"], *once, "seed=3").wait(120)
    first, second = (line.split()[1:] for line in starts(tmp_path))
    assert first == [*second[:2], *once, "seed=3"] and second[2:] == ["seed=3"]


def test_a_signal_is_passed_on(keep, tmp_path):
    """Oracle: exit code 75 of ranks that have saved, though their launcher ends with 143; no restart."""
    process = keep(["10 waits", "30 0"])
    end = time.monotonic() + 120
    while not (tmp_path / "waiting").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 75 and len(starts(tmp_path)) == 1


def test_what_a_launcher_left_behind_ends_first(keep, tmp_path):
    """Oracle: the clock: a rank whose launcher was killed ends before the next start."""
    assert keep(["10 orphan", "30 0"]).wait(120) == 0
    assert float((tmp_path / "ended").read_text()) < float(starts(tmp_path)[1].split()[0])


@pytest.fixture
def training(tmp_path):
    """The supervisor of a run in tmp_path/run, in this process, which starts nothing."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.yaml").touch()
    words = [f"folder={tmp_path / 'run'}", "faults.timeout_minutes=0.05"]
    return _Supervisor(KeepOptions((sys.executable, "train.py", *words)), load_recipe(None, words))


def test_rank_0_elsewhere_may_save_as_long_as_its_timeout(training, tmp_path):
    """Oracle: the clock: the folder's lock is awaited for 3 seconds, which faults.timeout_minutes says; until a signal
    at most; and no longer than another process has it.
    """
    with folders.lock_folder(tmp_path / "run"):
        began = time.monotonic()
        with pytest.raises(ConfigError, match="another process trains in it"):
            training._wait_for_folder_lock()
        assert 3 <= time.monotonic() - began < 20
        training._signal = signal.SIGTERM
        training._wait_for_folder_lock()
    training._signal = None
    training._wait_for_folder_lock()


def test_a_leftover_rank_that_ends_before_it_is_killed(training, monkeypatch):
    """Oracle: the pid of a process that has ended: no error, and one line."""
    ended, lines = subprocess.Popen(["true"]), []
    ended.wait()
    faults = training._run.faults.model_copy(update={"timeout_minutes": -1.0})
    training._run = training._run.model_copy(update={"faults": faults})
    left = [[ended.pid], [ended.pid], []]
    monkeypatch.setattr(keep_module, "list_descendant_pids", lambda pid: left.pop(0))
    monkeypatch.setattr(training, "_print_and_log_line", lines.append)
    training._end_leftover_ranks()
    assert lines == ["1 processes of the last start still run and are killed"]


@pytest.mark.parametrize(
    "words, message",
    [
        (("--", "deepspeed", "launch/generate.py"), "no training is behind --: write"),
        (("dstrain", "train"), "unrecognized arguments: dstrain train"),
        (("deepspeed", "launch/train.py"), "--help shows"),
        (("--", "launch/train.py", "--dry-run"), "without `dstrain keep`"),
        (("--", "launch/train.py", "stepz=3"), "did you mean steps?"),
    ],
)
def test_wrong_input(words, message, monkeypatch, capsys):
    """Oracle: exit code 2 and one message, before anything is started."""
    code, _, errors = here("keep.py", words, monkeypatch, capsys)
    assert code == 2 and message in errors and "Traceback" not in errors


# ssh as a machine answers it: no, while there is a file of its name; and a launcher that writes down its words.
SSH = """#!/bin/sh
for word; do host=$last; last=$word; done
[ ! -e "{folder}/down-$host" ]
"""
LAUNCHER = """#!/bin/sh
echo "$@" >> "{folder}/launched"
rm -f "{folder}/down-b"
while [ "${{1%train.py}}" = "$1" ]; do shift; done
exec "{python}" "$@"
"""


def test_hosts_that_answer(keep, tmp_path):
    """Oracle: the words that reach the launcher: a host that is down is left out, and taken again at the next
    start; with fewer than --min-hosts nothing starts.
    """
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("ssh", SSH), ("deepspeed", LAUNCHER)):
        (tools / name).write_text(text.format(folder=tmp_path, python=sys.executable))
        (tools / name).chmod(0o755)
    (tmp_path / "hosts").write_text("# two\na slots=1\nb slots=1\n")
    for name in ("a", "b"):
        (tmp_path / f"down-{name}").touch()
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    before = ("deepspeed", "--hostfile", str(tmp_path / "hosts"))
    process = keep(["10 247", "30 0"], options=("--min-hosts", "1"), before=before, PATH=path)
    end = time.monotonic() + 60
    while "waiting until 1 of 2 hosts answer" not in (tmp_path / "log").read_text():
        assert time.monotonic() < end and process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    assert not (tmp_path / "launched").exists()
    (tmp_path / "down-a").unlink()
    assert process.wait(60) == 0, (tmp_path / "log").read_text()
    first, second = (tmp_path / "launched").read_text().splitlines()
    assert first.startswith("--exclude=b --force_multi --hostfile ") and second.startswith("--hostfile ")
    assert "no answer from b: starting without them" in (tmp_path / "log").read_text()
    (tmp_path / "none").write_text("# nobody yet\n")
    for least, command, message in (
        (1, (sys.executable,), "names no hostfile"),
        (1, (*before, "--exclude=b"), "leave --exclude out"),
        (3, before, "--min-hosts 3: the hostfile names 2 hosts"),
        (1, ("deepspeed", "--hostfile", str(tmp_path / "none")), "--min-hosts 1: the hostfile names 0 hosts"),
    ):
        refused = keep(["30 0"], options=("--min-hosts", str(least)), before=command, PATH=path)
        assert refused.wait(60) == 2 and message in (tmp_path / "log").read_text()
