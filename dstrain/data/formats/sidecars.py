"""Images with their captions beside them, at any depth: X.png with X.txt, or with X.json.

    X.txt      one caption a line: several lines are several captions
    X.json     "caption", "text" or "prompt": a text or a list of texts; X.txt counts first where both are there

Images without either are left out. Where all images lie in folders, the first folder of each is its class, if there is
no dataset.json (labels.py).
"""

import os
import unicodedata
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from dstrain.data.files.listing import convert_oserror_to_config_error, map_in_threads, walk_files
from dstrain.data.files.local import Files
from dstrain.data.files.storage import retry
from dstrain.data.formats.base import UNCAPTIONED, Place, Request, Sample
from dstrain.data.formats.folders import Folders
from dstrain.data.formats.labels import LABELS
from dstrain.data.formats.splits import refuse_split_folders
from dstrain.data.source import BadSample, convert_errors_to_bad_sample
from dstrain.disk import small
from dstrain.disk.texts import LONGEST_TEXT, parse_caption_file

_TEXTS = (".txt", ".json")
_LOOKED = 100  # so many of the first images are searched for captions beside them
_WATCHED = 5000  # so many files with captions, at most, are watched for changes
_UNREADABLE = ("",)  # an empty caption, with which the sample counts as bad


def normalize_file_name(name: str) -> str:
    """Returns a file name in the spelling in which names are compared: in Unicode's NFC, and with its suffix in lower
    case. Macs and cameras may spell the same name in other ways.
    """
    stem, suffix = os.path.splitext(name)
    return unicodedata.normalize("NFC", stem) + suffix.lower()


class Beside(Folders):
    """Reads images that have captions in files beside them. Images without captions are counted as left out."""

    kind = "images with X.txt or X.json"

    def __init__(self, root: str, files: Files, request: Request) -> None:
        super().__init__(root, files, request)
        self._texts: list[str] = []  # files with captions, evenly spaced

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        if request.noun == "clips" or not request.captions or not super().recognises(root, files, request):
            return False
        with convert_oserror_to_config_error(root, request.key):
            first = islice(walk_files(Path(root), "", request.suffixes), _LOOKED)
            stems = {os.path.splitext(name)[0] for name in first}
            stems |= {unicodedata.normalize(form, stem) for stem in stems for form in ("NFC", "NFD")}
            suffixes = [spell(text) for text in _TEXTS for spell in (str.lower, str.upper, str.title)]
            return any(os.path.lexists(os.path.join(root, stem + suffix)) for stem in stems for suffix in suffixes)

    def list_partitions(self) -> list[str]:
        with convert_oserror_to_config_error(self.root, self.request.key):
            refuse_split_folders(Path(self.root), self.request.key)
        self.classes = self.class_list.classes
        if self.request.labels == "auto":
            self._load_dataset_json_labels()
        return [""]

    def iterate_samples(self, partition: str) -> Iterator[Sample]:
        with convert_oserror_to_config_error(self.root, self.request.key):
            files = self._list_files_below("", *_TEXTS)
        texts = {name for name in files if name.lower().endswith(_TEXTS)}
        images = [name for name in files if name not in texts]
        spelled = {key: name for name in texts if (key := normalize_file_name(name)) != name}

        def find_text_file(path: str) -> str | None:
            """Returns the path of a text file as the disk spells it; None if there is no such file."""
            key = normalize_file_name(path)
            return next((text for text in (path, key) if text in texts), spelled.get(key))

        in_folders = self.request.labels == "auto" and all("/" in name for name in images)
        self._require_label_for_each(images)
        self._texts = sorted(texts)[:: 1 + len(texts) // _WATCHED]
        for name, captions in zip(
            images, map_in_threads(lambda name: self._read_sidecar_captions(name, find_text_file), images)
        ):
            own = name.split("/")[0] if in_folders else None
            if self._by_name is not None:
                own = self._by_name.get(name)
            if not captions:
                self.add_left_out_count(UNCAPTIONED)
            else:
                yield Sample(Place(name), self.resolve_label(own, name), captions)

    def _read_sidecar_captions(self, image_name: str, find_text_file: Callable[[str], str | None]) -> tuple[str, ...]:
        """Returns the captions of an image from X.txt, or from X.json if there is no X.txt; () if it has no
        captions. Returns ("",), which makes the sample an unreadable one, if X.txt is empty, or if the file with the
        captions cannot be read.

        find_text_file: given the path of a text file, returns this path as the disk spells it; None if there is no such
        file.
        """
        stem = os.path.splitext(image_name)[0]
        for file in filter(None, (find_text_file(stem + suffix) for suffix in _TEXTS)):
            path = Path(self.root, file)
            try:
                with convert_errors_to_bad_sample(file, path):
                    captions = parse_caption_file(file, retry(partial(small.read_bytes, path, LONGEST_TEXT)))
            except BadSample:
                return _UNREADABLE
            if captions or file.lower().endswith(".txt"):
                return captions or _UNREADABLE
        return ()

    def list_files_watched_for_changes(self) -> list[str]:
        return [".", *([LABELS] if self._by_name else []), *self._deeper, *self._texts]

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_texts": []}
