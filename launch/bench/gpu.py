"""Tests and measures dstrain on a machine with a GPU, unattended: python launch/bench/gpu.py --part N.

docs/guides/gpu.md describes it.
"""

import argparse
import difflib
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def main() -> int:
    """0 if every case ended well and met its targets, 1 if not, 2 without a GPU and for names that no case has."""
    options = _options()
    from kit import cases, kit

    known = cases.cases()
    chosen = [case for case in known if options.part in (None, case.part) and _named(case.name, options.only, known)]
    if options.case:
        (case,) = [case for case in known if case.name == options.case]
        from dstrain.engine.patches import import_deepspeed

        return kit.run_case(case, options.record, options.dry_run, options.out, import_deepspeed)
    in_reach = [case.name for case in known if options.part in (None, case.part)]
    for word in options.only.split(",") if options.only else ():
        if not any(_named(name, word, known) for name in in_reach):
            where = f"of part {options.part} " if options.part else ""
            print(
                f"launch/bench/gpu.py: --only {word}: no case {where}has this in its name; the nearest are:",
                *_nearest(word, in_reach),
                sep="\n    ",
                file=sys.stderr,
            )
            return 2
    if options.list:
        for part in sorted({case.part for case in chosen}):
            print(f"part {part}: {cases.TITLES[part]}")
            print("\n".join(f"    {case.name}" for case in chosen if case.part == part))
        return 0
    from dstrain.distributed import group

    if not options.dry_run and group.device().type == "cpu":
        print(
            "launch/bench/gpu.py: there is no GPU here; --dry-run goes through every case at small sizes on the CPU",
            file=sys.stderr,
        )
        return 2
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(
            f"launch/bench/gpu.py: --out {options.out} cannot be made ({error.strerror}): name another folder",
            file=sys.stderr,
        )
        return 2
    good = True
    for part in sorted({case.part for case in chosen}):
        own = [case for case in chosen if case.part == part]
        good &= kit.run_part(
            part,
            cases.TITLES[part],
            own,
            options.out,
            options.dry_run,
            [sys.executable, os.path.abspath(__file__)],
            options.seconds,
        )
    return 0 if good else 1


def _named(name: str, only: str, known: list[Any]) -> bool:
    """Whether --only chooses a case: by its whole name, or by a word that is no whole name and stands in it."""
    whole = {case.name for case in known}
    return not only or any(word == name if word in whole else word in name for word in only.split(","))


def _nearest(word: str, names: list[str]) -> list[str]:
    """The names, those first that hold a stretch most like the word."""

    def likeness(name: str) -> float:
        matcher = difflib.SequenceMatcher(None, name.lower(), word.lower(), autojunk=False)
        longest = matcher.find_longest_match().size
        return longest + matcher.ratio()  # whole stretches count more than scattered letters

    return sorted(names, key=likeness, reverse=True)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is no time: write seconds above 0")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=int, choices=range(1, 10), help="one part, below nine minutes; default: all")
    parser.add_argument("--only", default="", metavar="WORDS", help="cases whose names hold one of these, by commas")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT", "runs/gpu")),
        metavar="FOLDER",
        help="where partN.json and partN.md are written ($OUT, else runs/gpu)",
    )
    parser.add_argument("--dry-run", action="store_true", help="every case at small sizes, also without a GPU")
    parser.add_argument("--list", action="store_true", help="names the cases, and starts nothing")
    parser.add_argument("--seconds", type=_seconds, default=540.0, help="how long a part may take (540)")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # a case's own process
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
