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

from dstrain.disk import atomic
from kit import report

PART_SECONDS = 540.0  # a part ends within them: machines are lent for calls of ten minutes
_DRY = 4  # times a case's limit where two CPU cores do a GPU's work
_LEAST = 20.0  # seconds of a part below which no case is begun
_LINES = 40  # of a failed case's output that the report keeps


@dataclass(frozen=True)
class Case:
    """One process of a part."""

    name: str
    part: int
    work: Callable[..., None]  # takes a report.Record and `options`
    options: dict[str, Any] = field(default_factory=dict)
    limit: float = 200.0  # seconds
    alone: bool = True  # what is timed has the machine to itself


def run_case(case: Case, record: Path, dry: bool, out: Path, load: Callable[[], Any] = lambda: None) -> int:
    """In the case's own process: loads, waits for a line, does the work; 1 if it raised, or if nobody waits for it.

    `load` must leave the GPU alone: another case is timed meanwhile.
    """
    try:
        load()
        if not sys.stdin.readline():
            return 1
        case.work(report.Record(record, dry, out), **case.options)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def run_part(
    part: int,
    title: str,
    cases: Sequence[Case],
    out: Path,
    dry: bool,
    command: list[str],
    seconds: float = PART_SECONDS,
) -> bool:
    """Runs the cases and writes out/partN.json and out/partN.md after each; whether all ended well and met targets.

    `command` is a case's process without its options.
    """
    out.mkdir(parents=True, exist_ok=True)
    end, results, about, lock = time.monotonic() + seconds, [], machine(dry), threading.Lock()

    def finish(process: _Process) -> None:
        result = process.finish(end)
        missed = sum(row["ok"] is False for row in result["rows"])
        with lock:
            results.append(result)
            print(
                f"{result['seconds']:6.1f} s  {result['case']}: {result['status']}, {len(result['rows'])} figures"
                + (f", {missed} missed their target" if missed else ""),
                flush=True,
            )
            content = {"part": part, "title": title, "machine": about, "results": results}
            atomic.write_file(out / f"part{part}.json", json.dumps(content, indent=1) + "\n")
            atomic.write_file(out / f"part{part}.md", report.markdown(f"Part {part}: {title}", about, results))

    # Every case holds a core; those that are not timed share a GPU.
    with ThreadPoolExecutor(max(1, min(6, (os.cpu_count() or 1) // 2))) as pool:
        together = [case for case in cases if not case.alone]
        list(pool.map(lambda case: finish(_Process(case, out, dry, command)), together))
    alone = [case for case in cases if case.alone]
    ahead = _Process(alone[0], out, dry, command) if alone else None
    for after in [*alone[1:], None] if alone else ():
        process, ahead = ahead, None if after is None else _Process(after, out, dry, command)
        finish(process)  # while the next one loads
    print((out / f"part{part}.md").read_text(encoding="ascii"), flush=True)
    return all(
        result["status"] == "done" and all(row["ok"] is not False for row in result["rows"]) for result in results
    )


class _Process:
    """A case's process, which loads libraries at once and begins its work when it is waited for."""

    def __init__(self, case: Case, out: Path, dry: bool, command: list[str]):
        self._case, self._dry = case, dry
        self._folder = tempfile.TemporaryDirectory(prefix="dstrain-kit-")
        self._record, self._log = Path(self._folder.name) / "record", Path(self._folder.name) / "log"
        words = [*command, "--case", case.name, "--record", str(self._record), "--out", str(out)]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [*words, "--dry-run"] if dry else words,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self, end: float) -> dict[str, Any]:
        """The case's rows, details and ending (done, failed, out of time, not run), before
        time.monotonic() is `end`.
        """
        began, left = time.monotonic(), end - time.monotonic()
        limit = min(self._case.limit * (_DRY if self._dry else 1), left)
        status = "not run: the part's time was over"
        try:
            if left > _LEAST:
                self._process.communicate(b"\n", timeout=limit)
                status = "done" if self._process.returncode == 0 else f"failed ({self._process.returncode})"
        except subprocess.TimeoutExpired:
            status = f"out of time after {limit:.0f} s"
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        lines = self._log.read_text(encoding="ascii", errors="replace").splitlines()
        rows, details = report.read(self._record)
        self._folder.cleanup()
        return {
            "case": self._case.name,
            "status": status,
            "seconds": round(time.monotonic() - began, 1),
            "rows": [asdict(row) for row in rows],
            "details": details,
            "error": "" if status == "done" else "\n".join(lines[-_LINES:]),
        }


def machine(dry: bool) -> dict[str, Any]:
    """What a figure belongs to: date, device, versions."""
    import importlib.metadata as metadata

    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else f"no GPU, {os.cpu_count()} CPU cores"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    ).stdout.strip()
    about = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "device": gpu,
        "torch": torch.__version__,
        "deepspeed": metadata.version("deepspeed"),
        "Python": sys.version.split()[0],
    }
    return (
        about
        | ({"commit": commit} if commit else {})
        | ({"dry": "run: sizes are small, no speed counts"} if dry else {})
    )
