"""Writes the report of one run, or of several side by side: `dstrain report`."""

import sys

from dstrain.commands.options.report import ReportOptions
from dstrain.distributed.progress import get_phases
from dstrain.tracking.report import page


def run_verb(options: ReportOptions) -> None:
    """Writes the page, and prints its path. If the page's folder did not exist, prints on stderr that it was made."""
    get_phases().enter_phase("reading runs and drawing the page")
    out = options.page_path
    folder, known = out.parent, out.parent.exists()
    print(page.write_report(options.runs, out))
    if not known:
        print(f"{folder} is a new folder", file=sys.stderr)
