"""Images with their captions beside them, at any depth: X.png with X.txt, or with X.json.

    X.txt      one caption a line: several lines are several captions
    X.json     "caption", "text" or "prompt": a text or a list of texts; X.txt counts first where both are there

Images without either are left out. Where all images lie in folders, the first folder of each is its class, if there is
no dataset.json (labels.py).
"""

import os
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from dstrain.data.files.listing import ask_each, listing_errors, walk_files
from dstrain.data.files.local import Files
from dstrain.data.files.storage import retry
from dstrain.data.formats.base import UNCAPTIONED, Place, Request, Sample
from dstrain.data.formats.folders import Folders
from dstrain.data.formats.labels import LABELS
from dstrain.data.formats.splits import refuse_splits
from dstrain.data.source import BadSample, reading
from dstrain.disk import small
from dstrain.disk.texts import LONGEST_TEXT, parse_sidecar

_TEXTS = (".txt", ".json")
_LOOKED = 100  # first images beside which captions are looked for
_WATCHED = 5000  # files with captions whose changes are noticed
_UNREADABLE = ("",)  # the sample will count as bad, as one whose caption is empty


class Beside(Folders):
    """Images with captions beside them; others are left out, and counted."""

    kind = "images with X.txt or X.json"

    def __init__(self, root: str, files: Files, request: Request) -> None:
        super().__init__(root, files, request)
        self._texts: list[str] = []  # files with captions, evenly spaced

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        if request.noun == "clips" or not request.captions or not super().recognises(root, files, request):
            return False
        with listing_errors(root, request.key):
            first = islice(walk_files(Path(root), "", request.suffixes), _LOOKED)
            return any(
                os.path.lexists(f"{os.path.join(root, os.path.splitext(name)[0])}{text}")
                for name in first
                for text in _TEXTS
            )

    def parts(self) -> list[str]:
        with listing_errors(self.root, self.request.key):
            refuse_splits(Path(self.root), self.request.key)
        self.classes = self.class_list.classes
        if self.request.labels == "auto":
            self._read_labels()
        return [""]

    def samples(self, part: str) -> Iterator[Sample]:
        with listing_errors(self.root, self.request.key):
            files = self._below("", *_TEXTS)
        beside = {name for name in files if name.lower().endswith(_TEXTS)}
        images = [name for name in files if name not in beside]
        in_folders = self.request.labels == "auto" and all("/" in name for name in images)
        self._require_labels(images)
        self._texts = sorted(beside)[:: 1 + len(beside) // _WATCHED]
        for name, captions in zip(images, ask_each(lambda name: self._captions(name, beside), images)):
            own = name.split("/")[0] if in_folders else None
            if self._by_name is not None:
                own = self._by_name.get(name)
            if not captions:
                self.leave_out(UNCAPTIONED)
            else:
                yield Sample(Place(name), self.label(own, name), captions)

    def _captions(self, name: str, beside: set[str]) -> tuple[str, ...]:
        """Returns the captions of an image, () where there are none beside it."""
        stem = os.path.splitext(name)[0]
        for file in (f"{stem}{suffix}" for suffix in _TEXTS if f"{stem}{suffix}" in beside):
            path = Path(self.root, file)
            try:
                with reading(file, path):
                    captions = parse_sidecar(file, retry(partial(small.read_bytes, path, LONGEST_TEXT)))
            except BadSample:
                return _UNREADABLE
            if captions or file.endswith(".txt"):
                return captions or _UNREADABLE
        return ()

    def watched(self) -> list[str]:
        return [".", *([LABELS] if self._by_name else []), *self._deeper, *self._texts]

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_texts": []}
