"""Machines that join and leave a run under torchrun, as docs/guides/multinode.md has it: an agent for each of them."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dstrain.distributed.processes import list_descendant_pids
from tests.support.launch import ROOT, environment, free_port
from tests.support.runs import RECIPE, ds_config, finish, metrics, read_world, train

pytestmark = pytest.mark.slow

STEPS = 60
WORDS = (f"steps={STEPS}", "batch.global=12", "every.save=5", "every.report=1", "every.sample=0")
WORDS += ("optimizer.eps=1e-4",)  # a small one divides rounding, which differs between numbers of ranks, by rounding
SLOW = ("train", "{folder}/began", "dstrain.train:take_step:1:0.2")  # a step takes 0.2 s, in which others may join
# An agent of torchrun that has done its imports, and joins when there is a file.
AGENT = """
import pathlib, sys, time
from torch.distributed.run import main
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
main(sys.argv[2:])
"""


class Agents:
    """The agents of a run, of one rank each; they are started, and killed with their ranks."""

    def __init__(self, folder: Path):
        self.folder, self._port = folder, free_port()
        self.agents: list[subprocess.Popen] = []

    def start(self, when: Path) -> subprocess.Popen:
        """Starts an agent that joins when the file `when` is there."""
        options = f"last_call_timeout=3,keep_alive_interval=2,timeout=400,is_host={int(not self.agents)}"
        words = ["--nnodes", "2:3", "--nproc_per_node", "1", "--rdzv_backend", "c10d", "--local_addr", "127.0.0.1"]
        words += ["--rdzv_endpoint", f"127.0.0.1:{self._port}", "--rdzv_conf", options, "--max-restarts", "20"]
        words += [str(ROOT / "tests/launch/slow_phase.py"), *(word.format(folder=self.folder.parent) for word in SLOW)]
        words += ["--recipe", str(RECIPE), "--ds_config", str(ds_config(self.folder.parent, 2))]
        with open(self.folder.parent / f"agent{len(self.agents)}.log", "w") as log:
            agent = subprocess.Popen(
                [sys.executable, "-c", AGENT, str(when), *words, f"folder={self.folder}", *WORDS],
                env=environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.agents.append(agent)
        return agent

    def kill(self, agent: subprocess.Popen) -> None:
        """Kills an agent and its ranks at once, as where their machine is lost."""
        below = list_descendant_pids(agent.pid)
        agent.kill()
        for pid in below:
            subprocess.run(["kill", "-9", str(pid)], check=False)
        agent.wait()

    def output(self) -> str:
        """The end of what each agent and its ranks have written."""
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.parent.glob("agent*.log")))

    def wait(self, reached: Callable[[], bool], what: str, seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < end, f"{what}: not within {seconds} s\n{self.output()}"
            assert all(agent.poll() in (None, 0, -9) for agent in self.agents), f"{what}: ended\n{self.output()}"
            time.sleep(0.02)


@pytest.fixture
def agents(tmp_path):
    agents = Agents(tmp_path / "run")
    yield agents
    for agent in agents.agents:
        agents.kill(agent)


@pytest.mark.faults  # in CI: test_keep.py under torchrun, test_machines.py and engine/test_elastic.py
def test_a_machine_is_lost_and_another_joins(agents, tmp_path):
    """Oracle: an uninterrupted run on one rank: losses of all steps to 1e-5, though one of three agents is killed with
    its rank, the others go on alone, and one that joins has them begin again with it.
    """
    here, later = tmp_path / "here", tmp_path / "later"
    here.touch()
    agents.start(here)
    _, lost = agents.start(here), agents.start(here)
    agents.wait(lambda: read_world(agents.folder) == 3, "three ranks save")
    agents.kill(lost)
    agents.start(later)
    agents.wait(lambda: read_world(agents.folder) == 2, "two ranks save")
    later.touch()
    agents.wait(lambda: read_world(agents.folder) == 3, "three ranks save again")
    agents.wait(lambda: [agent.poll() for agent in agents.agents] == [0, 0, -9, 0], "all end")
    assert f"complete: {STEPS} steps" in (agents.folder / "log.txt").read_text()

    whole = tmp_path / "whole"
    finish(train(whole, 2, *WORDS, num=1))
    found, wanted = ([(line["step"], line["loss"]) for line in metrics(run)] for run in (agents.folder, whole))
    assert [step for step, _ in found] == [step for step, _ in wanted] == [*range(1, STEPS + 1)]
    assert np.allclose(found, wanted, rtol=1e-5, atol=0)
