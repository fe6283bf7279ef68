"""A long run with saves, pictures and evaluations: what its processes hold stays the same."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.support.faulty import PATIENCE, Life, crashes, zero
from tests.support.runs import members

SLACK = {"descriptors": 8, "threads": 0, "processes": 0, "shared": 8}  # batches on their way from a worker vary
KB_PER_STEP = 2.0  # of a rank's memory; ten thousand steps more are 20 MB


@dataclass(frozen=True)
class Usage:
    """What all processes of a run hold after a step."""

    step: int
    memory: float  # kB that the largest process has written to
    descriptors: int
    threads: int
    processes: int
    shared: int  # files of /dev/shm that they have mapped
    names: frozenset[str]  # of these


def look(session: int, step: int) -> Usage | None:
    """None: a process has ended meanwhile."""
    memory, descriptors, threads, shared, pids = [], 0, 0, set(), members(session)
    try:
        for pid in pids:
            status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            memory.append(int(status["RssAnon"].split()[0]))
            threads += int(status["Threads"])
            files = os.listdir(f"/proc/{pid}/fd")
            descriptors += len(files)
            shared.update(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))
    except (OSError, KeyError):
        return None
    return Usage(step, max(memory, default=0), descriptors, threads, len(pids), len(shared), frozenset(shared))


def last_step(log: Path) -> int:
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        steps = re.findall(rb"^step (\d+)/", file.read(), re.M)
    return int(steps[-1]) if steps else 0


def watch(life: Life) -> list[Usage]:
    """Looks at a run after each report until it ends."""
    usages, last, end = [], 0, time.monotonic() + PATIENCE
    while life.process.poll() is None:
        step = last_step(life.log)
        if step > last:
            if usage := look(life.process.pid, step):
                usages.append(usage)
            last, end = step, time.monotonic() + PATIENCE
        assert time.monotonic() < end, f"HANG after step {last}"
        time.sleep(0.02)
    assert life.end() == 0 and not crashes(life.text()), life.text()[-4000:]
    return usages


def window(usages: list[Usage], first: int, last: int) -> dict[str, int]:
    """The least of each figure between two steps: threads that save, and their files, come and go."""
    within = [usage for usage in usages if first <= usage.step <= last]
    assert len(within) >= 5, f"{len(within)} looks between steps {first} and {last}"
    return {name: min(getattr(usage, name) for usage in within) for name in SLACK}


@pytest.mark.parametrize(
    "steps, num, stage",
    [
        pytest.param(600, 1, 2, marks=pytest.mark.slow),
        pytest.param(3000, 1, 2, marks=pytest.mark.faults),
        pytest.param(3000, 2, 3, marks=pytest.mark.faults),
    ],
)
def test_nothing_grows(tmp_path, steps, num, stage, table, count):
    """Oracle: the same run at a sixth of its steps: descriptors, threads, processes and shared memory are those of its
    end, or less; memory grows by less than KB_PER_STEP.
    """
    steps = steps if steps < 1000 else count("STEPS", steps)
    began = time.monotonic()
    life = Life(
        tmp_path / "run",
        tmp_path / "log",
        zero(stage),
        f"steps={steps}",
        "every.save=20",
        "every.report=5",
        f"every.sample={steps // 30}",
        f"every.evaluate={steps // 30}",
        "every.evaluate_samples=32",
        "data.workers=1",
        num=num,
    )
    usages = watch(life)
    sixth = steps // 6
    early, late = window(usages, sixth, 2 * sixth), window(usages, 5 * sixth, 6 * sixth)
    later = [usage for usage in usages if usage.step >= sixth]
    slope = np.polyfit([usage.step for usage in later], [usage.memory for usage in later], 1)[0]
    table(
        f"{steps} steps on {num} rank(s) at stage {stage}, saves every 20: {early} at step {sixth}..{2 * sixth}, "
        f"{late} at {5 * sixth}..{steps}; memory {later[0].memory / 1e3:.0f} to {later[-1].memory / 1e3:.0f} MB, "
        f"{slope:+.2f} kB a step; {time.monotonic() - began:.0f} s"
    )
    assert all(late[name] <= early[name] + SLACK[name] for name in early)
    assert steps < 1000 or slope < KB_PER_STEP, f"{slope:.2f} kB a step"
    left = [path for usage in usages for path in usage.names if Path(path).exists()]
    assert not left, f"left in /dev/shm: {sorted(set(left))[:5]}"
