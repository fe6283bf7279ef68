"""Prints where all runs in a folder stand, as a table or as JSON, once or again and again: `dstrain watch`."""

import json
import sys
import time
from pathlib import Path

from dstrain.commands.options.watch import WatchOptions
from dstrain.tracking.report import state

_CLEAR = "\033[H\033[2J"  # a terminal's screen


def run_verb(options: WatchOptions) -> None:
    """Prints the state of each run; with --follow again every few seconds, until it is interrupted."""
    while True:
        states = [state.read_run_state(folder) for folder in state.find_runs(list(options.folders) or [Path("runs")])]
        if options.json:
            text = json.dumps(
                [state.convert_state_to_json_object(one) for one in states], indent=None if options.follow else 1
            )
        else:
            text = state.format_states(states) if states else "no run here: a run's folder holds run.yaml"
            if options.follow and sys.stdout.isatty():
                text = _CLEAR + text
        print(text, flush=True)
        if not options.follow:
            return
        time.sleep(max(options.seconds, 0.2))
