"""The kit's runner: the cases of a part, each in a process of its own with a time limit, and what they found.

A case that crashes, hangs or runs out of memory takes nothing else with it: how it ended stands in the report.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dstrain.bench import report
from dstrain.disk import atomic

PART_SECONDS = 540.0                         # a part ends within them: machines are lent for calls of ten minutes
_DRY = 4                                     # times a case's limit where two CPU cores do a GPU's work
_LINES = 40                                  # of a failed case's output that the report keeps


@dataclass(frozen=True)
class Case:
    """One process of a part."""

    name: str
    part: int
    work: Callable[..., None]                # takes a report.Record and `options`
    options: dict[str, Any] = field(default_factory=dict)
    limit: float = 200.0                     # seconds
    alone: bool = True                       # what is timed has the machine to itself


def run_case(case: Case, record: Path, dry: bool, out: Path) -> int:
    """In the case's own process: does the work; 1 if it raised."""
    try:
        case.work(report.Record(record, dry, out), **case.options)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def run_part(part: int, title: str, cases: Sequence[Case], out: Path, dry: bool, command: list[str],
             seconds: float = PART_SECONDS) -> bool:
    """Runs the cases and writes out/partN.json and out/partN.md after each; whether all ended well and met targets.

    `command` is a case's process without its options.
    """
    out.mkdir(parents=True, exist_ok=True)
    end, results, about, lock = time.monotonic() + seconds, [], machine(dry), threading.Lock()
    together = [case for case in cases if not case.alone]

    def one(case: Case) -> None:
        result = _one(case, out, dry, command, end)
        missed = sum(row["ok"] is False for row in result["rows"])
        with lock:
            results.append(result)
            print(f"{result['seconds']:6.1f} s  {case.name}: {result['status']}, {len(result['rows'])} figures"
                  + (f", {missed} missed their target" if missed else ""), flush=True)
            content = {"part": part, "title": title, "machine": about, "results": results}
            atomic.write(out / f"part{part}.json", json.dumps(content, indent=1) + "\n")
            atomic.write(out / f"part{part}.md", report.markdown(f"Part {part}: {title}", about, results))

    # Every case holds a core; those that are not timed share a GPU.
    with ThreadPoolExecutor(max(1, min(6, (os.cpu_count() or 1) // 2))) as pool:
        for future in [pool.submit(one, case) for case in together]:
            future.result()
    for case in cases:
        if case.alone:
            one(case)
    print((out / f"part{part}.md").read_text(encoding="ascii") if results else "no such case", flush=True)
    return all(result["status"] == "done" and all(row["ok"] is not False for row in result["rows"])
               for result in results)


def _one(case: Case, out: Path, dry: bool, command: list[str], end: float) -> dict[str, Any]:
    """A case's rows, details and ending: done, failed, out of time, or not run."""
    began, left = time.monotonic(), end - time.monotonic()
    limit = min(case.limit * (_DRY if dry else 1), left)
    with tempfile.TemporaryDirectory(prefix="dstrain-kit-") as folder:
        record, log = Path(folder) / "record", Path(folder) / "log"
        status, error = "not run: the part's time was over", ""
        if left > 20:
            words = [*command, "--case", case.name, "--record", str(record), "--out", str(out)]
            code = _watched([*words, "--dry-run"] if dry else words, log, limit)
            status = {0: "done", None: f"out of time after {limit:.0f} s"}.get(code, f"failed ({code})")
            lines = log.read_text(encoding="ascii", errors="replace").splitlines()
            error = "" if code == 0 else "\n".join(lines[-_LINES:])
        rows, details = report.read(record)
    return {"case": case.name, "status": status, "seconds": round(time.monotonic() - began, 1),
            "rows": [asdict(row) for row in rows], "details": details, "error": error}


def _watched(words: list[str], log: Path, seconds: float) -> int | None:
    """The exit code of a process, or None where it did not end in time and was killed with its children."""
    with open(log, "wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                   start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def machine(dry: bool) -> dict[str, Any]:
    """What a figure belongs to: date, device, versions."""
    import importlib.metadata as metadata

    import torch
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else f"no GPU, {os.cpu_count()} CPU cores"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            cwd=Path(__file__).parent, check=False).stdout.strip()
    about = {"date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "device": gpu, "torch": torch.__version__,
             "deepspeed": metadata.version("deepspeed"), "Python": sys.version.split()[0]}
    return about | ({"commit": commit} if commit else {}) | ({"dry": "run: sizes are small, no speed counts"} if dry
                                                             else {})
