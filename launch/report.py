"""Writes the report of one run, or of several side by side: python launch/report.py RUN [RUN ...] [--out FILE]"""

import sys
from pathlib import Path

from dstrain.commands import arguments, exits
from dstrain.distributed.progress import phases
from dstrain.recipe import ConfigError
from dstrain.tracking.report import page

_HELP = """\
Writes the report of a run as one file that any browser opens offline: curves, pictures
through training, evaluations, recipe, DeepSpeed settings, hardware, resumes, faults.

usage:  python launch/report.py RUN [RUN ...] [--out FILE]

  RUN          a run's folder, for example runs/dit-small; it may be training. Several
               are compared: the same curves over steps, samples or hours, what differs
               in their recipes, the same seeds side by side
  --out FILE   where to write (RUN/report.html; for several runs report.html here);
               a folder that is not there is made

Training writes RUN/report.html by itself: every.report_page steps, and at its end.
"""


def _options(argv: list[str] | None = None) -> tuple[list[Path], Path]:
    parser = arguments.Parser(_HELP)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--out", type=Path)
    words = parser.words(argv)
    if not words["runs"]:
        raise ConfigError("name the folder of a run, for example: launch/report.py runs/dit-small")
    alone = len(set(words["runs"])) == 1
    return words["runs"], words["out"] or (words["runs"][0] if alone else Path()) / "report.html"


def main() -> None:
    runs, out = _options()
    phases().at("reading runs and drawing the page")
    folder, known = out.parent, out.parent.exists()
    print(page.write(runs, out))
    if not known:
        print(f"{folder} is a new folder", file=sys.stderr)


if __name__ == "__main__":
    exits.run_main(main)
