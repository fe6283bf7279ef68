"""Writes RUN/report.html for a run that trains: python -m dstrain.tracking.report RUN NICENESS, see tracking/page.py.

The writer disturbs no training and outlives its run: DeepSpeed's launcher ends all processes that descend from its
ranks as soon as one of these has ended with a code other than 0. So no rank is the parent of the writer. At its end it
prints "written", or nothing if there was a fault.
"""

import os
import sys
from pathlib import Path


def main(folder: Path, niceness: int) -> None:
    """Writes FOLDER/report.html in a child process with this niceness. The child prints "written" at its end, unless
    the report could not be written. This process exits at once and does not wait for the child.
    """
    if os.fork():
        os._exit(0)
    os.nice(niceness)
    from dstrain.recipe import ConfigError  # takes long
    from dstrain.tracking.report import page

    try:
        page.write_report([folder], folder / "report.html")
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    sys.stdout.write("written")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
