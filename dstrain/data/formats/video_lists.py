"""Lists that come with sets of videos: WebVid's csv, and lines PATH NUMBER as UCF-101's trainlist01.txt has them.

Open-Sora's csv (path, text, ...) is a table like any other, see lists.py.
"""

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from dstrain.data.files.local import Files
from dstrain.data.files.tables import Table, lines, open_table
from dstrain.data.formats.base import Request
from dstrain.data.formats.class_list import ClassList
from dstrain.data.formats.lists import COLUMNS, TableList, exists, is_list
from dstrain.recipe import ConfigError

_LINE = re.compile(r"(\S.*?\.[A-Za-z0-9]{2,5})(?:\s+(\d{1,9}))?\s*")
_CLASSES = "classInd.txt"  # of UCF-101: lines such as 1 ApplyEyeMakeup


class WebVid(TableList):
    """WebVid's csv: videoid, page_dir and the caption `name`; a clip is page_dir/videoid.mp4 in a folder `videos`."""

    kind = "WebVid's csv"
    bases = ("../videos/", "videos/", "", "../")
    known = {"path": ("videoid",), "label": (), "caption": ("name",)}

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        if not is_list(root, files, (".csv",)) or "path" in request.columns:
            return False
        columns = set(open_table(files, os.path.basename(root), f"{request.key}={root}").columns())
        return {"videoid", "page_dir"} <= columns and not columns & set(COLUMNS["path"])

    def _path(self, row: dict[str, Any], columns: Sequence[str], at: str) -> str:
        if not row.get("page_dir") or not row.get("videoid"):
            raise ConfigError(f"{at}: no page_dir and videoid: write them, or take the row out")
        return super()._path({"path": f"{row['page_dir']}/{row['videoid']}.mp4"}, ["path"], at)


class PathList(TableList):
    """Lines PATH, or PATH NUMBER with the label. With a classInd.txt beside, numbers and classes are those in it.

    Without numbers the folder of a file is its class, as in UCF-101's testlist01.txt.
    """

    kind = "lines PATH NUMBER, as UCF-101's trainlist01.txt"
    bases = ("", "../UCF-101/", "UCF-101/", "../", "../videos/", "videos/")

    def __init__(self, root: str, files: Files, request: Request) -> None:
        super().__init__(root, files, request)
        self.from_one = False
        if not self.classes and request.labels == "auto":
            self.names = self._class_index()
            self.classes, self.from_one = self.names.classes, bool(self.names.classes)

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        if not is_list(root, files, (".txt", ".lst")):
            return False
        match = _LINE.fullmatch(next(lines(files, os.path.basename(root), f"{request.key}={root}"), ""))
        return match is not None and match[1].lower().endswith((*request.suffixes, ".avi", ".mp4"))

    def _class_index(self) -> ClassList:
        """The classes of classInd.txt in the order of their numbers; empty where there is no such file."""
        if not exists(self.files, _CLASSES):
            return ClassList()
        where = os.path.join(self.files.root, _CLASSES)
        rows = [line.split() for line in lines(self.files, _CLASSES, where) if line.strip()]
        if [row[:1] for row in rows] != [[str(number)] for number in range(1, len(rows) + 1)] or (
            any(len(row) != 2 for row in rows)
        ):
            raise ConfigError(
                f"{where}: its lines are not 1 CLASS, 2 CLASS, ...: mend it, or write data.class_list=FILE"
            )
        return ClassList(tuple(row[1] for row in rows), where=where)

    def _table(self, name: str) -> Table:
        return _Lines(self.files, name, f"{self.request.key}={self.root}")

    def _label(self, label: Any, at: str) -> int | str:
        if self.from_one and isinstance(label, str) and label.isdigit():
            return self.names.number(int(label) - 1, f"{at}: number {label} counts from 1")
        return super()._label(label, at)

    def _unlabelled(self, path: str, at: str) -> int | str | None:
        folder = os.path.basename(os.path.dirname(path))
        if self.request.labels == "auto" and folder:
            return self.names.number(folder, at)
        return super()._unlabelled(path, at)


class _Lines(Table):
    """Lines PATH or PATH NUMBER as a table; whether there are numbers, the first line says."""

    def columns(self) -> list[str]:
        _, row = next(self.rows(()), (0, {}))
        return list(row)

    def rows(self, columns: Sequence[str], group: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in enumerate(lines(self.files, self.name, self.where), 1):
            match = _LINE.fullmatch(line)
            if match:
                yield number, {"path": match[1]} | ({} if match[2] is None else {"label": match[2]})
            elif line.strip():
                raise ConfigError(f"{self.where}, line {number}: no file and number in it: write PATH or PATH NUMBER")
