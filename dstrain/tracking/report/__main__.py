"""python -m dstrain.tracking.report RUN NICENESS: RUN/report.html, for a run that trains, see tracking/page.py.

It is to disturb nothing, and to outlive its run: DeepSpeed's launcher ends all that descends from its ranks as soon as
one of them has ended with a code other than 0. So the writer is a process that no rank is the parent of. At its end it
prints "written", or nothing where there was a fault.
"""

import os
import sys
from pathlib import Path


def main(folder: Path, niceness: int) -> None:
    """Starts a detached process that writes the page, and exits at once."""
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
