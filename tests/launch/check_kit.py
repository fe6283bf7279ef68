"""Run by test_gpu.py: cases of the kit one after another in one process, at the sizes of a dry run; as JSON lines."""

import json
import sys
from pathlib import Path

from kit import cases, report


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for case in cases.cases():
        if case.name in names:
            record = folder / case.name.replace("/", " ")
            case.work(report.Record(record, True, folder), **case.options)
            rows, details = report.read(record)
            print(json.dumps({"case": case.name, "rows": [vars(row) for row in rows], "details": details}), flush=True)


if __name__ == "__main__":
    main()
