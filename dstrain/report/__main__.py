"""python -m dstrain.report RUN NICENESS: RUN/report.html, for a run that trains, see track/page.py.

It is to disturb nothing, and to outlive its run: DeepSpeed's launcher ends all that descends from its ranks as soon as
one of them has ended with a code other than 0. So the writer is a process that no rank is the parent of. At its end it
prints "written", or nothing where there was a fault.
"""

import os
import sys
from pathlib import Path

if os.fork():
    os._exit(0)
os.nice(int(sys.argv[2]))

from dstrain.recipe import ConfigError  # noqa: E402: takes long
from dstrain.report import page  # noqa: E402

folder = Path(sys.argv[1])
try:
    page.write([folder], folder / "report.html")
except ConfigError as error:
    raise SystemExit(str(error)) from None
sys.stdout.write("written")
