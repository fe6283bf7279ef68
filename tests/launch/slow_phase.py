"""A verb of dstrain that says when it comes to a phase: slow_phase.py VERB FILE MODULE:NAME:CALL:SECONDS WORDS ...

From the given call on, NAME takes SECONDS longer, or -SECONDS in pieces of one; at that call FILE is made.
"""

import functools
import importlib
import sys
import time
from pathlib import Path

from dstrain.commands.main import start_verb
from dstrain.distributed.progress import get_phases

launched = [word for word in sys.argv if word.startswith("--local_rank")]  # which deepspeed puts first
_, verb, file, place, *words = [word for word in sys.argv if word not in launched]
module, name, first, seconds = place.split(":")
*owner, name = name.split(".")
holder = functools.reduce(getattr, owner, importlib.import_module(module))
original, calls = getattr(holder, name), 0


@functools.wraps(original)
def slow(*arguments, **named):
    global calls
    calls += 1
    if calls >= int(first):
        Path(file).touch()
        for _ in range(-int(float(seconds))):
            get_phases().record_progress()
            time.sleep(1)
        time.sleep(max(0.0, float(seconds)))
    return original(*arguments, **named)


setattr(holder, name, slow)
sys.argv = [f"dstrain {verb}", *launched, *words]
start_verb(verb)
