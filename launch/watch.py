"""Shows where all runs in a folder stand: python launch/watch.py FOLDER [FOLDER ...] [--follow] [--json]"""

import json
import sys
import time
from pathlib import Path

_HELP = """\
Shows where runs stand: step, loss, rate, time left, newest checkpoint, newest picture.

usage:  python launch/watch.py FOLDER [FOLDER ...] [options]

  FOLDER        a run, or a folder of runs (runs)
  --follow      again every few seconds, until Ctrl-C
  --seconds S   how often (5)
  --json        a JSON list; with --follow one line each time

beginning  held, and no report yet         stopped   it saved and ended before its last step
running    a training holds the folder     dead      it ended without a word, or with the error
complete   the last step is done                     below the table
imported   published weights
"""


def _options(argv: list[str] | None = None) -> dict:
    from dstrain.commands import arguments

    parser = arguments.Parser(_HELP)
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--seconds", type=arguments.scale, default=5.0)
    parser.add_argument("--json", action="store_true")
    return parser.words(argv)


def main() -> None:
    from dstrain.tracking.report import state

    options = _options()
    while True:
        states = [state.state(folder) for folder in state.runs(options["folders"] or [Path("runs")])]
        if options["json"]:
            text = json.dumps([state.as_json(one) for one in states], indent=None if options["follow"] else 1)
        else:
            text = state.table(states) if states else "no run here: a run's folder holds run.yaml"
        clear = "\033[H\033[2J" if options["follow"] and not options["json"] and sys.stdout.isatty() else ""
        print(clear + text, flush=True)
        if not options["follow"]:
            return
        time.sleep(max(options["seconds"], 0.2))


if __name__ == "__main__":
    try:  # imports of dstrain stand within, so that Ctrl-C always ends quietly
        from dstrain.commands.exits import run_main

        run_main(main, speaks=False)  # --follow waits in silence
    except KeyboardInterrupt:
        raise SystemExit(130) from None
