"""kill -9 at any moment of a real training run on 2 ranks that saves beside its steps; the same command again."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.faulty import PATIENCE, Life, complete, differences, newest_whole, zero
from tests.support.runs import wait_for_end

MOMENTS = ("start-up", "step", "save", "save", "saved", "saved")
VICTIMS = ("all", "all", "rank 0", "rank 1")


def strike(life: Life, whole: int, folder: Path, chance: random.Random) -> str:
    """Kills one rank or all at a random moment of a random kind; says which."""
    moment, victim = chance.choice(MOMENTS), chance.choice(VICTIMS)
    if moment == "start-up":
        time.sleep(chance.uniform(0, 1.5))
    elif moment == "step":
        life.wait(lambda: life.steps(), "first step")
        time.sleep(chance.uniform(0, 0.3))
    elif moment == "save":
        life.wait(lambda: any((folder / "checkpoints").glob("step_*.tmp")) and life.steps(), "save")
        time.sleep(chance.uniform(0, 0.01))
    else:
        life.wait(lambda: life.saved(), "saved step")
        time.sleep(chance.uniform(0, 0.1))
    ranks = life.ranks()
    assert life.process.poll() is None, f"ended by itself\n{life.text()[-4000:]}"
    if victim != "all" and len(ranks) == 2:
        os.kill(ranks[int(victim[-1])], signal.SIGKILL)
        life.process.wait(PATIENCE)
        wait_for_end(life.process.pid, PATIENCE)
    else:
        victim = "all"
        life.kill()
    return f"{moment}, {victim}"


def kill_again_and_again(folder: Path, settings: dict, kills: int, seed: int) -> dict:
    """Starts a command and kills it `kills` times, each time looking at what the next one finds."""
    chance, tally = random.Random(seed), {"kills": 0, "half-written": 0, "most lost": 0}
    log = folder.parent / "life.log"
    run, before, announced = folder / "killed", 0, 0
    while tally["kills"] < kills:
        whole, damaged = newest_whole(run)
        assert not damaged, f"kill -9 has damaged a checkpoint: {damaged}"
        assert whole >= announced, f"step {announced} was reported as saved, and {whole} is the newest now"
        tally["most lost"] = max(tally["most lost"], before - whole)
        life = Life(run, log, settings, "steps=100000")
        how = strike(life, whole, run, chance)
        steps = life.steps()
        assert not steps or steps[0] == whole + 1, f"went on from {steps[0] - 1}, and {whole} was whole ({how})"
        before, announced = max(steps, default=whole), max(life.saved(), default=whole)
        tally[how] = tally.get(how, 0) + 1
        tally["kills"] += 1
        tally["half-written"] += any((run / "checkpoints").glob("step_*.tmp"))
    return tally


@pytest.mark.parametrize(
    "kills",
    [pytest.param(10, marks=pytest.mark.slow, id="sample"), pytest.param(200, marks=pytest.mark.faults, id="full")],
)
def test_every_kill_resumes(tmp_path, kills, table, count):
    """Oracle: an uninterrupted run: after every kill the same command goes on from the newest whole checkpoint, and in
    the end metrics and checkpoint have the same bits. Nothing that was reported as saved is lost.
    """
    began = time.monotonic()
    kinds = [(3, "fp32")] if kills < 20 else [(0, "fp32"), (1, "bf16"), (2, "bf16"), (3, "fp32")]
    kills = kills if kills < 20 else count("KILLS", kills)
    total: dict[str, int] = {}
    for number, (stage, precision) in enumerate(kinds):
        folder, settings = tmp_path / f"zero{stage}", zero(stage, precision)
        folder.mkdir()
        share = kills * (number + 1) // len(kinds) - kills * number // len(kinds)
        tally = kill_again_and_again(folder, settings, share, number)
        last = newest_whole(folder / "killed")[0] + 5
        complete(folder / "killed", folder / "last.log", settings, f"steps={last}")
        complete(folder / "whole", folder / "whole.log", settings, f"steps={last}")
        assert not differences(folder / "whole", folder / "killed", last)
        for name, value in tally.items():
            total[name] = max(total.get(name, 0), value) if name == "most lost" else total.get(name, 0) + value
    assert total["half-written"] >= kills // 10, "too few kills met a save that was being written"
    table(
        f"kills -9: {total.pop('kills')}, all resumed, 0 checkpoints lost, 0 restarts, 0 hangs, bits equal; at most "
        f"{total.pop('most lost')} steps trained again (saves every 4); {total.pop('half-written')} met a "
        f"half-written save; {time.monotonic() - began:.0f} s"
    )
    table(f"    moments and victims: {dict(sorted(total.items()))}")
