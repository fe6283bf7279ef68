"""What a case of the kit finds out: rows of a table, each with its target; written as JSON lines, shown as Markdown."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One figure. `ok`: whether it meets its target; None without one."""

    what: str
    value: float
    unit: str = ""
    target: str = ""
    ok: bool | None = None


class Record:
    """Takes the rows of a case, and writes each at once: those before a crash are kept."""

    def __init__(self, path: Path, dry: bool, out: Path):
        self.dry, self.out = dry, out  # small sizes on whatever device is here; where pictures may be left
        self._path = path

    def row(
        self,
        what: str,
        value: float,
        unit: str = "",
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        here: bool = True,
    ) -> None:
        """`here`: whether the target holds on this machine; one of speed is shown, and not judged, in a dry run."""
        target = f"<= {at_most:g}" if at_most is not None else f">= {at_least:g}" if at_least is not None else ""
        ok = None
        if target and here:
            ok = math.isfinite(value) and (value <= at_most if at_most is not None else value >= at_least)
        self._write({"row": asdict(Row(what, float(value), unit, target, ok))})

    def speed(self, what: str, value: float, unit: str = "", **target: float) -> None:
        """A row whose target is the GPU's."""
        self.row(what, value, unit, here=not self.dry, **target)

    def detail(self, name: str, content: Any) -> None:
        """What explains the rows, for the JSON alone."""
        self._write({"detail": {name: content}})

    def left_out(self, reason: str) -> None:
        self.detail("left out", reason)

    def _write(self, line: dict[str, Any]) -> None:
        with open(self._path, "a", encoding="ascii") as file:
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """Rows and details of a record; a torn last line, of a case that was killed, is left out."""
    rows, details = [], {}
    for line in path.read_text(encoding="ascii").splitlines() if path.exists() else ():
        try:
            content = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows += [Row(**content["row"])] if "row" in content else []
        details |= content.get("detail", {})
    return rows, details


def markdown(title: str, machine: dict[str, Any], results: Iterable[dict[str, Any]]) -> str:
    """A table of all rows, what missed its target marked, then how each failed case ended."""
    lines = [
        f"# {title}",
        "",
        ", ".join(f"{name} {value}" for name, value in machine.items()),
        "",
        "| case | figure | value | target | |",
        "|---|---|---|---|---|",
    ]
    endings = []
    for result in results:
        for row in result["rows"]:
            mark = {True: "ok", False: "**missed**", None: ""}[row["ok"]]
            lines.append(
                f"| {result['case']} | {row['what']} | {row['value']:.4g} {row['unit']} | {row['target']} | {mark} |"
            )
        if "left out" in result["details"]:
            lines.append(f"| {result['case']} | left out: {result['details']['left out']} | | | |")
        if result["status"] != "done":
            lines.append(f"| {result['case']} | | | | **{result['status']}** |")
            endings += ["", f"## {result['case']}: {result['status']}", "", "```", result["error"], "```"]
    return "\n".join(lines + endings) + "\n"
