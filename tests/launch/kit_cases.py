"""Cases for test_gpu.py that end in each way in which a case can; run as launch/bench/gpu.py runs its own processes."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from kit.kit import Case, run_case
from kit.report import Record


def good(record: Record, value: float) -> None:
    record.row("value", value, "m", at_most=2)
    record.speed("speed", value, at_least=5)


def raises(record: Record) -> None:
    record.row("before", 1.0)
    raise ValueError("broken on purpose")


def dies(record: Record) -> None:
    record.row("before", 1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(record: Record) -> None:
    record.row("before", 1.0)
    time.sleep(600)


CASES = [
    Case("good", 1, good, {"value": 1.0}),
    Case("misses", 1, good, {"value": 3.0}, alone=False),
    Case("raises", 1, raises),
    Case("dies", 1, dies),
    Case("hangs", 1, hangs, limit=2.5),
]

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--case")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    (case,) = [case for case in CASES if case.name == options.case]
    sys.exit(run_case(case, options.record, options.dry_run, options.out))
