"""Ruined checkpoints: found or harmless, never loaded in silence, never waited for; resume takes the step before."""

import json
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.launch import command, run


def corrupt(folder: Path, trials: int, num: int, seed: int) -> list[tuple[str, str, str]]:
    """(kind, file, outcome) of each trial; a resume that did not end is a HANG, and its kind is not tried again."""
    folder.mkdir()
    outcomes, skip = [], set()
    while len(outcomes) < trials:
        done = run(
            command("tests/faults/check_corruptions.py", folder, trials, seed, len(outcomes), *sorted(skip), num=num),
            timeout=1800,
        )
        path = folder / "outcomes"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        outcomes = [(kind, name, outcome) for _, kind, name, outcome in lines]
        if len(outcomes) < trials:
            number, _, fault = (folder / "trial").read_text().partition(" ") if (folder / "trial").exists() else "??"
            assert number == str(len(outcomes)), done.stdout[-4000:]
            kind, _, name = fault.rpartition(" ")
            what = "HANG" if "Timeout" in done.stdout else f"DIED: exit code {done.returncode}: {done.stdout[-300:]}"
            skip.add((kind + "/manifest" * (name == "manifest.json")).replace(" ", "_"))
            with open(path, "a") as file:
                file.write(json.dumps([len(outcomes), kind, name, what]) + "\n")
            outcomes.append((kind, name, what))
    return outcomes


@pytest.mark.parametrize(
    "trials",
    [pytest.param(60, marks=pytest.mark.slow, id="sample"), pytest.param(1000, marks=pytest.mark.faults, id="full")],
)
def test_every_corruption_is_found(tmp_path, trials, table, count):
    """Oracle: the weights, moments and averages that were saved, in memory: after each fault resume takes the older
    step, bit for bit, and names the damaged one; or the newer one, bit for bit, where the fault is harmless.
    """
    began = time.monotonic()
    trials = trials if trials < 100 else count("CORRUPTIONS", trials)
    outcomes = corrupt(tmp_path / "one", trials * 3 // 4, 1, 1) + corrupt(tmp_path / "two", trials // 4, 2, 2)
    wrong = [outcome for outcome in outcomes if outcome[2].split(":")[0].isupper()]
    tally = Counter(outcome for _, _, outcome in outcomes if outcome.islower())
    table(
        f"corruptions: {len(outcomes)} of {len({kind for kind, _, _ in outcomes})} kinds on 1 and 2 ranks: "
        f"{dict(tally)}, {len(wrong)} wrong; {time.monotonic() - began:.0f} s"
    )
    assert not wrong, "\n".join(
        f"{number} x {kind} {name}: {outcome}" for (kind, name, outcome), number in Counter(wrong).most_common()
    )
