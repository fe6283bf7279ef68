"""Reasons to stop early: real signals, a real file, real launchers that are killed."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dstrain.distributed.stops import SIGNALS, Stops, _is_launcher
from tests.support.launch import environment, wait_for

# A rank: watches until it has a reason, or has looked twenty times since it was left to init; then says what it saw.
RANK = """
import os, sys, time
from pathlib import Path
from dstrain.distributed.stops import Stops
folder, parent = Path(sys.argv[1]), os.getppid()
stops = Stops(folder, watch_launcher=sys.argv[2] == "watch")
(folder / "pid").write_text(f"{os.getpid()}")
(folder / "ready").touch()
looks, end = 0, time.monotonic() + 60
while not stops.is_requested() and looks < 20 and time.monotonic() < end:
    looks += os.getppid() != parent
    time.sleep(0.01)
(folder / ".reason").write_text(repr(stops.reason))
os.rename(folder / ".reason", folder / "reason")
"""
# What starts ranks: runs the command it is given, and waits.
LAUNCHER = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
REMOTE = "deepspeed.launcher.launch"  # what `deepspeed --hostfile` starts on every machine
GONE = repr("the launcher has gone")


@pytest.fixture(autouse=True)
def not_under_nohup():
    """SIGHUP as a terminal's programs have it, even where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def stops(tmp_path):
    made = Stops(tmp_path, watch_launcher=False)
    yield made
    made.restore_handlers_and_end_thread()


@pytest.fixture
def family(tmp_path):
    """start(*names, watch=True): a rank below a line of launchers so named, the first on top; ended in any case."""
    started = []
    (tmp_path / "rank.py").write_text(RANK)

    def start(*words: str, watch: bool = True) -> subprocess.Popen:
        line = [sys.executable, str(tmp_path / "rank.py"), str(tmp_path), "watch" if watch else "ignore"]
        for word in reversed(words):
            script = tmp_path / word
            script.parent.mkdir(exist_ok=True)
            if word.startswith("sshd"):
                line = ["bash", "-c", f'exec -a "{word}" "$@"', "sshd", sys.executable, "-c", LAUNCHER, *line]
            elif word == "sh -c":
                line = ["bash", "-c", f"cd .; {shlex.join(line)}; exit $?"]
            elif "." not in word or word == REMOTE:
                script.write_text(LAUNCHER)
                line = [sys.executable, "-u", str(script), *line]
            else:
                script.write_text(f"{' '.join(line)} &\nwait\n")
                line = ["bash", str(script)]
        process = subprocess.Popen(line, env=environment(), start_new_session=True, stdin=subprocess.DEVNULL)
        started.append(process)
        wait_for(tmp_path / "ready")
        return process

    yield start
    for process in started:
        if (tmp_path / "pid").exists() and not (tmp_path / "reason").exists():
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        process.kill()
        process.wait()


def reason(folder: Path) -> str:
    wait_for(folder / "reason")
    return (folder / "reason").read_text()


def child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_the_reason(stops, number):
    """Oracle: the signal sent; the first one keeps its place."""
    assert not stops.is_requested() and stops.reason is None
    os.kill(os.getpid(), number)
    assert stops.is_requested() and stops.reason == number.name
    for later in set(SIGNALS) - {number, signal.SIGINT}:
        os.kill(os.getpid(), later)
    assert stops.is_requested() and stops.reason == number.name


def test_under_nohup_a_closed_terminal_is_no_reason(tmp_path):
    """Oracle: SIG_IGN, which nohup leaves: it stays, before and after, and the signal asks for nothing."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    made = Stops(tmp_path, watch_launcher=False)
    os.kill(os.getpid(), signal.SIGHUP)
    assert not made.is_requested() and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    made.restore_handlers_and_end_thread()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize("before", [None, signal.SIGTERM, "file"])
def test_a_second_ctrl_c_ends_at_once(stops, tmp_path, before):
    """Oracle: what the module promises, whatever asked first."""
    if before == "file":
        (tmp_path / "stop").touch()
        assert stops.is_requested()
    elif before:
        os.kill(os.getpid(), before)
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_the_stop_file(stops, tmp_path):
    """Oracle: a file made beside the run, which is named."""
    (tmp_path / "stopped").touch()
    assert not stops.is_requested()
    (tmp_path / "stop").touch()
    assert stops.is_requested() and stops.reason == f"the file {tmp_path / 'stop'}"
    (tmp_path / "stop").unlink()
    assert stops.is_requested()  # what was asked once is done


def test_a_folder_named_stop_asks_for_nothing(stops, tmp_path):
    """Oracle: a folder with a file in it: it could not be removed, so that every start would stop; it stays."""
    (tmp_path / "stop").mkdir()
    (tmp_path / "stop" / "mine").touch()
    assert not stops.is_requested()
    stops.remove_stop_file()
    assert (tmp_path / "stop" / "mine").exists()


def test_a_stop_file_is_obeyed_once(stops, tmp_path):
    """Oracle: the same command again, which must go on; a second rank finds the file gone."""
    (tmp_path / "stop").touch()
    assert stops.is_requested()
    for _ in range(2):
        stops.remove_stop_file()
    again = Stops(tmp_path, watch_launcher=False)
    again.restore_handlers_and_end_thread()
    assert not (tmp_path / "stop").exists() and not again.is_requested()


def test_handlers_are_restored(tmp_path):
    """Oracle: the handlers that stood before."""
    before = [signal.getsignal(number) for number in SIGNALS]
    heard = []
    mine = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        made = Stops(tmp_path, watch_launcher=False)
        assert all(signal.getsignal(number) == made._handle_signal for number in SIGNALS)
        made.restore_handlers_and_end_thread()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [1] and made.reason is None
    finally:
        signal.signal(signal.SIGUSR1, mine)
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("name", ["deepspeed", "torchrun"])
def test_a_killed_launcher_is_seen(family, tmp_path, name):
    """Oracle: kill -9 of the real process above the rank, which is reaped."""
    launcher = family(name)
    launcher.kill()
    launcher.wait()
    assert reason(tmp_path) == GONE


def test_a_zombie_launcher_is_gone(family, tmp_path):
    """Oracle: /proc: the launcher that was killed and that nobody waits for has state Z."""
    launcher = family("deepspeed")
    launcher.kill()
    assert reason(tmp_path) == GONE
    assert Path(f"/proc/{launcher.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_launchers_launcher_is_watched(family, tmp_path):
    """Oracle: DeepSpeed's two, runner and launch: the upper is killed, the rank's own parent lives on."""
    runner = family("deepspeed", "torchrun")
    lower = child(runner.pid)
    runner.kill()
    assert reason(tmp_path) == GONE
    os.kill(lower, 0)
    os.kill(lower, signal.SIGKILL)


@pytest.mark.parametrize("line", [("sshd: root@notty", "sh -c", REMOTE), ("sshd-session: me@notty", REMOTE)], ids=str)
def test_the_session_of_a_launcher_elsewhere_is_watched(family, tmp_path, line):
    """Oracle: kill -9 of the session's process, as sshd ends it with its connection; those below it live on."""
    session = family(*line)
    below = child(session.pid)
    session.kill()
    assert reason(tmp_path) == GONE
    os.kill(below, 0)
    os.kill(below, signal.SIGKILL)


@pytest.mark.parametrize("line", [("sshd: me@pts/0", "sweep", REMOTE), ("sshd: me@notty", "night.sh", REMOTE)], ids=str)
def test_the_session_of_whoever_typed_is_not(family, tmp_path, line):
    """Oracle: nohup in an ssh session that is then closed: something of the user's own stands between."""
    session = family(*line)
    session.kill()
    session.wait()
    time.sleep(1)  # a hundred looks
    assert not (tmp_path / "reason").exists()
    os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("above", ["sweep", "deepspeed/sweep", "nightly.sh", "run_deepspeed.sh"])
def test_a_rank_without_a_launcher_goes_on(family, tmp_path, above):
    """Oracle: `nohup python launch/train.py &`: the shell or program above it ends, and no launcher was there."""
    parent = family(above)
    parent.kill()
    parent.wait()
    assert reason(tmp_path) == "None"


def test_who_does_not_watch_goes_on(family, tmp_path):
    """Oracle: faults.orphan_check=false: the launcher is killed, and that is no reason."""
    launcher = family("deepspeed", watch=False)
    launcher.kill()
    launcher.wait()
    assert reason(tmp_path) == "None"


@pytest.mark.parametrize("words, launches", [(("deepspeed",), True), (("--", "deepspeed"), False)], ids=str)
def test_a_supervisor_is_no_launcher(tmp_path, words, launches):
    """Oracle: the command line of launch/keep.py, which has the launcher's behind --: killed alone, it ends no rank."""
    (tmp_path / "keep.py").write_text("print('ready', flush=True); input()")
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "keep.py"), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        process.stdout.readline()
        assert _is_launcher(process.pid) == launches
    finally:
        process.kill()
        process.communicate()
