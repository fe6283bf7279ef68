"""Options of `dstrain report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dstrain.commands.options.command import make_option_field, make_remaining_words_field
from dstrain.commands.options.shared import Trusting


@dataclass(frozen=True)
class ReportOptions(Trusting):
    """Writes the report of a run as one file that any browser opens offline: curves, pictures through training,
    evaluations, recipe, DeepSpeed settings, hardware, resumes, faults.

    Training writes RUN/report.html by itself: every.report_page steps, and at its end.
    """

    usage: ClassVar[str] = "dstrain report RUN [RUN ...] [--out FILE]"

    runs: tuple[Path, ...] = make_remaining_words_field(
        "RUN",
        "a run's folder, for example runs/dit-small; it may be training. Several are compared: the same curves over "
        "steps, samples or hours, what differs in their recipes, the same seeds side by side",
        Path,
        missing="name the folder of a run, for example: dstrain report runs/dit-small",
    )
    out: Path | None = make_option_field(
        None,
        "where to write (RUN/report.html; for several runs report.html here); a folder that is not there is made",
        Path,
        metavar="FILE",
    )

    @property
    def page_path(self) -> Path:
        """Returns the path at which the page is written: --out if it is given, else report.html. That lies in the run's
        folder if there is one run, and in the current folder if there are several.
        """
        if self.out is not None:
            return self.out
        alone = len(set(self.runs)) == 1
        return (self.runs[0] if alone else Path()) / "report.html"
