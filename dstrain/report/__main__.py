"""python -m dstrain.report RUN: RUN/report.html, for a run that trains, see track/page.py: it is to disturb nothing."""

import os
import sys
from pathlib import Path

from dstrain.recipe import ConfigError
from dstrain.report import page

if __name__ == "__main__":
    os.nice(19)
    folder = Path(sys.argv[1])
    try:
        page.write([folder], folder / "report.html")
    except ConfigError as error:
        raise SystemExit(str(error)) from None
