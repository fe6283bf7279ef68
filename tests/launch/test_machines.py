"""Several hosts, each with its own network, name and processes, and the README's command for several machines.

    deepspeed --hostfile hosts launch/train.py --ds_config ds_configs/zero3.json ...

Faults that a run on one machine cannot have: a lost launcher, a cut link, a folder that is not shared.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dstrain.checkpoint.manifest import find_file_faults, read_manifest
from tests.support import machines
from tests.support.launch import ROOT, command, environment
from tests.support.runs import RECIPE, files, finish, metrics, read_world, wait_for
from tests.support.sample import sampled

pytestmark = [pytest.mark.slow, pytest.mark.skipif(machines.missing() is not None, reason=str(machines.missing()))]

STEPS = 60
PATIENCE = 30  # seconds that a rank waits for others; a slow start needs some
RUN = (
    "--recipe",
    RECIPE,
    "--ds_config",
    "ds_configs/zero3.json",
    f"steps={STEPS}",
    "every.sample=0",
    "every.save=10",
    f"faults.timeout_minutes={PATIENCE / 60}",
)
KEEP = (sys.executable, "launch/keep.py", "--backoff", "10", "--")
# The ssh options of multinode.md: a connection that is silent for six seconds ends.
ALIVE = {"PDSH_SSH_ARGS_APPEND": "-o ServerAliveInterval=2 -o ServerAliveCountMax=3"}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with machines.start_hosts(tmp_path_factory.mktemp("hosts")) as three:
        yield three


class Driven:
    """A training that was started by the launcher on the first host."""

    def __init__(
        self, hosts: tuple[machines.Host, ...], place: Path, *words: object, before: tuple = (), run: tuple = RUN
    ):
        self.hosts, self.log = hosts, place / "output"
        line = [
            *before,
            *machines.deepspeed(
                "--hostfile", "hosts", f"--enable_each_rank_log={place / 'ranks'}", "launch/train.py", *run, *words
            ),
        ]
        with open(self.log, "w") as output:
            self.process = subprocess.Popen(
                hosts[0].words(*line, folder=place),
                env=environment(**ALIVE),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._place = place

    def saved(self, folder: Path, step: int) -> None:
        """Waits until a step is saved."""
        wait_for(folder / "checkpoints" / f"step_{step:08d}", self.process, self.log, 240)

    def ends(self, seconds: float) -> int:
        """Waits until nothing of the training runs on any host; the launcher's exit code."""
        code, end = self.process.wait(seconds), time.monotonic() + seconds
        while left := [words for host in self.hosts for words in host.processes().values()]:
            assert time.monotonic() < end, f"{left} live on"
            time.sleep(0.1)
        return code

    def output_of_ranks(self) -> dict[int, str]:
        """The last log of each rank, read from its file: over a broken link the launcher gets none."""
        logs = sorted((self._place / "ranks").iterdir())
        return {rank: [log.read_text() for log in logs if log.name.endswith(f"_rank{rank}.log")][-1] for rank in (0, 1)}


@pytest.fixture
def train(hosts, tmp_path):
    """Starts trainings on two hosts or three; after the test every process that is left is killed."""
    started = []

    def start(*words: object, before: tuple = (), count: int = 2, run: tuple = RUN) -> Driven:
        place = tmp_path / f"place{count}"
        if not place.exists():
            machines.workplace(place, count)
        started.append(Driven(hosts, place, *words, before=before, run=run))
        return started[-1]

    yield start
    for host in hosts:
        host.link("up")
        for pid in host.processes():
            os.kill(pid, signal.SIGKILL)
    for driven in started:
        driven.process.wait(20)


def assert_whole(folder: Path) -> int:
    """Asserts that every checkpoint of a run agrees with its manifest; returns the last one's step."""
    steps = sorted(path for path in (folder / "checkpoints").glob("step_*") if path.suffix != ".tmp")
    for path in steps:
        hashes = read_manifest(path)["files"]
        assert not find_file_faults(path, sorted(hashes), hashes)
    return int(steps[-1].name.removeprefix("step_"))


def kill(host: machines.Host, matches: Callable[[list[str]], bool]) -> int:
    """Kills (-9) the processes of a host whose command line matches; returns how many."""
    pids = [pid for pid, words in host.processes().items() if matches(words)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return len(pids)


@pytest.mark.faults  # in CI: distributed/test_stops.py, test_group.py, and the lost host below
def test_a_lost_launcher_a_cut_link_and_the_same_command(train, hosts, tmp_path):
    """Oracle: an uninterrupted run on one machine: after both faults the same command ends with the same bits."""
    folder = tmp_path / "run"

    # The launcher dies, and its ssh connections with it: the ranks save the same step and end by themselves.
    driven = train(f"folder={folder}", "--from-scratch")
    driven.saved(folder, 10)
    assert kill(hosts[0], lambda words: words[0] in ("pdsh", "ssh") or words[1:2] == [machines.deepspeed()[1]]) >= 4
    driven.ends(90)
    at, log = int((folder / "saved").read_text()), (folder / "log.txt").read_text()
    assert f"stopped at step {at} (the launcher has gone" in log or f"stopped at step {at} (another rank" in log, log
    assert assert_whole(folder) == at < STEPS - 20

    # The link is cut: each rank waits for faults.timeout_minutes, prints what happened, and ends. When the
    # link is back,
    # launch/keep.py on the first host starts both again.
    driven = train(f"folder={folder}", before=KEEP)
    driven.saved(folder, (at // 10 + 1) * 10)
    hosts[1].link("down")
    wait_for(folder / "restarts.log", driven.process, driven.log, PATIENCE + 120)
    for (rank, text), host in zip(driven.output_of_ranks().items(), machines.NAMES):
        assert f"error: rank {rank} on {host} no longer hears from another rank" in text, text[-3000:]
        assert "Traceback" in text and "faults.timeout_minutes" in text
    assert "rank 0 on host-a no longer hears" in (folder / "log.txt").read_text()
    assert at < assert_whole(folder) < STEPS

    hosts[1].link("up")
    assert driven.ends(300) == 0, driven.output_of_ranks()
    assert f"complete: {STEPS} steps" in (folder / "log.txt").read_text()

    whole = tmp_path / "whole"
    finish(
        command(
            "launch/train.py",
            *RUN[:2],
            "--ds_config",
            ROOT / "ds_configs/zero3.json",
            *RUN[4:],
            f"folder={whole}",
            num=2,
            launcher=False,
        )
    )
    assert files(folder, STEPS) == files(whole, STEPS)
    assert metrics(folder)[-1] == metrics(whole)[-1]


@pytest.mark.faults  # in CI: runs/test_hosts.py, two ranks with a folder of their own each
def test_a_folder_that_is_not_shared_is_refused(train, hosts, tmp_path):
    """Oracle: nothing is left on either host; one message names the folder and the host."""
    shared = tmp_path / "runs"
    (shared / "run").mkdir(parents=True)
    hosts[1].run("mount", "-t", "tmpfs", "tmpfs", str(shared))
    try:
        driven = train(f"folder={shared / 'run'}", "--from-scratch")
        assert driven.ends(150) == 2
        listing = hosts[1].run("ls", "-A", str(shared))
    finally:
        hosts[1].run("umount", str(shared))
    output = driven.output_of_ranks()
    assert (
        f"folder={shared / 'run'} is not shared: rank 1 on host-b does not see what rank 0 on host-a wrote there; "
        "put it on a file system that all machines mount"
    ) in output[0], output[0][-3000:]
    assert "not shared" not in output[1] and "Traceback" not in output[0] + output[1]
    assert listing == "" and list((shared / "run").glob("*")) == []


@pytest.mark.parametrize("count", sampled((2, 3), (2,)))  # of three hosts, two are left, which have a launcher each
def test_a_host_is_taken_away_and_given_back(train, hosts, tmp_path, count):
    """Oracle: an uninterrupted run on one rank: losses of all steps to 1e-5, though the supervisor goes on without the
    one of its hosts that no longer answers, and takes it again at the next start.
    """
    folder, recipe = tmp_path / "run", ("--recipe", RECIPE, "--ds_config", ROOT / "ds_configs/zero2_fp32.json")
    words = (f"steps={STEPS}", "batch.global=12", "batch.micro=1", "every.report=1", "every.save=5", "every.sample=0")
    words += ("faults.timeout_minutes=1", "optimizer.eps=1e-4")  # see test_elastic.py
    keep = (*KEEP[:2], "--backoff", "1", "--min-hosts", str(count - 1), "--")
    driven = train(f"folder={folder}", *words, before=keep, count=count, run=recipe)

    def wait(world: int) -> None:
        """Waits until so many ranks have saved."""
        end = time.monotonic() + 300
        while read_world(folder) != world:
            assert driven.process.poll() is None and time.monotonic() < end, driven.log.read_text()[-6000:]
            time.sleep(0.01)

    *_, left, last = hosts[:count]
    wait(count)
    kill(last, lambda words: True)
    time.sleep(0.5)  # it still says that its connections are closed: a cut link is the test above
    last.link("down")
    wait(count - 1)
    last.link("up")
    kill(left, lambda words: any(word.startswith("--local_rank") for word in words))
    wait(count)
    assert driven.ends(300) == 0, driven.log.read_text()[-6000:]
    first, without, second = (folder / "restarts.log").read_text().splitlines()
    assert "restart 1 of" in first and "restart 2 of" in second
    assert f"no answer from {last.name}: starting without them" in without

    whole = tmp_path / "whole"
    finish(command("launch/train.py", *recipe, *words, f"folder={whole}", num=1))
    found, wanted = ([(line["step"], line["loss"]) for line in metrics(run)] for run in (folder, whole))
    assert [step for step, _ in found] == [step for step, _ in wanted] == [*range(1, STEPS + 1)]
    assert np.allclose(found, wanted, rtol=1e-5, atol=0)
