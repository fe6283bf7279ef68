"""Training runs that tests disturb: what their output says, how they end, and what their folders then hold."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

from dstrain.checkpoint.store import Store
from tests.support.forks import Server
from tests.support.launch import ROOT, command, environment, start
from tests.support.runs import RECIPE, files, members, metrics, wait_for_end

PATIENCE = 300  # seconds until something that does not happen is a hang
SHORT = ("steps=40", "every.sample=10")  # for tests that compare with the fixture `whole`
# Each step is reported and every fourth saved; a start costs a second.
QUICK = ("every.report=1", "every.save=4", "every.sample=0", "data.workers=0")


_lives: list["Life"] = []


class Life:
    """One start of a training command, in a session of its own."""

    def __init__(
        self,
        folder: Path,
        log: Path,
        settings: dict,
        *overrides: str,
        num: int = 2,
        forks: Server | None = None,
        **env: str,
    ):
        """settings: the DeepSpeed JSON. forks: forks the ranks, if not the usual process, with the variables `env`."""
        self.log, ds_config = log, log.with_suffix(".json")
        ds_config.write_text(json.dumps(settings))
        with open(log, "w") as file:
            words = command(
                "launch/train.py",
                "--recipe",
                RECIPE,
                "--ds_config",
                ds_config,
                f"folder={folder}",
                *QUICK,
                *overrides,
                num=num,
            )
            if forks is None:
                self.process = start(words, file)
            else:
                ranks, port = (num, words[3]) if num > 1 else (1, None)
                self.process = forks.fork(
                    words[words.index(str(ROOT / "launch/train.py")) :], ranks, port, environment(**env), file.fileno()
                )
        _lives.append(self)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def steps(self) -> list[int]:
        """Steps that this life has reported."""
        return [int(step) for step in re.findall(r"^step (\d+)/", self.text(), re.M)]

    def saved(self) -> list[int]:
        """Steps that this life has reported as saved."""
        return [int(step) for step in re.findall(r"^saved step (\d+) in", self.text(), re.M)]

    def ranks(self) -> list[int]:
        """Process ids of the ranks, children of the session's leader, in rank order once all were forked."""
        pids = []
        for pid in members(self.process.pid):
            try:
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(stat[1]) == self.process.pid:
                pids.append(pid)
        return sorted(pids)

    def wait(self, ready, what: str) -> bool:
        """Waits until ready() is true; False: the process ended before."""
        end = time.monotonic() + PATIENCE
        while not ready():
            if self.process.poll() is not None:
                return bool(ready())
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"HANG: no {what} after {PATIENCE} s\n{self.text()[-4000:]}")
            time.sleep(0.002)
        return True

    def end(self) -> int:
        """Waits for the end of every process; the exit code."""
        self.wait(lambda: self.process.poll() is not None, "end")
        wait_for_end(self.process.pid, PATIENCE)
        return self.process.returncode

    def kill(self) -> None:
        """kill -9 to the whole session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        wait_for_end(self.process.pid, PATIENCE)

    def signal(self, number: int) -> None:
        """To every process of the session."""
        for pid in members(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def kill_all() -> None:
    """Ends every life that has not ended."""
    while _lives:
        life = _lives.pop()
        if life.process.poll() is None:
            life.kill()


def zero(stage: int, precision: str = "fp32") -> dict:
    """A DeepSpeed JSON of small buckets."""
    bf16 = {"bf16": {"enabled": True}} if precision == "bf16" else {}
    return {"zero_optimization": {"stage": stage, "sub_group_size": 5000}} | bf16


def complete(folder: Path, log: Path, settings: dict, *overrides: str, num: int = 2) -> str:
    """Runs a command to its end, which must be good; its output."""
    life = Life(folder, log, settings, *overrides, num=num)
    code = life.end()
    assert code == 0, f"exit code {code}\n{life.text()[-6000:]}"
    return life.text()


def newest_whole(folder: Path) -> tuple[int, list[str]]:
    """The newest step that verifies, 0 without any, and a line for each damaged one."""
    damaged: list[str] = []
    newest = Store(folder / "checkpoints").find_newest_checkpoint(damaged.append)
    return (newest[0] if newest else 0), damaged


def differences(whole: Path, disturbed: Path, step: int) -> list[str]:
    """In what two runs differ: the bytes of a checkpoint, the lines of metrics.jsonl."""
    problems = [] if files(whole, step) == files(disturbed, step) else [f"the checkpoints of step {step} differ"]
    return problems + ([] if metrics(whole) == metrics(disturbed) else ["metrics.jsonl differ"])


def crashes(text: str) -> list[str]:
    """The errors at the ends of tracebacks, but for those of ranks that have lost another one."""
    errors = re.findall(r"^((?:\w+\.)*\w*(?:Error|Exception)): (.*)", text, re.M) if "Traceback" in text else []
    return [
        f"{kind}: {message[:200]}"
        for kind, message in errors
        if "closed by peer" not in message and "reset by peer" not in message and "pair closure" not in message
    ]


def torn_lines(path: Path) -> list[str]:
    """Lines of a .jsonl file that are not JSON."""
    torn = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            json.loads(line)
        except ValueError:
            torn.append(line)
    return torn
