"""Folders of clips, with their captions: in a captions file, or in X.txt beside X.mp4.

A captions file has lines NAME<TAB>CAPTION, or is a .csv or .jsonl with `file` and `caption`. A name is the path of a
clip relative to the folder.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dstrain.data.files.listing import join_first
from dstrain.data.files.local import Files, LocalFiles
from dstrain.data.files.tables import Tsv, match_column_names, open_table
from dstrain.data.formats.base import Request, Sample
from dstrain.data.formats.folders import Folders
from dstrain.data.formats.lists import COLUMNS
from dstrain.data.formats.sidecars import normalize_file_name
from dstrain.disk.texts import extract_captions
from dstrain.recipe import ConfigError


class Clips(Folders):
    """Reads clips in folders, as Folders reads images, and their captions. The index stores the captions of a captions
    file. It does not store captions in .txt files beside the clips; notes["beside"] is then True.
    """

    kind = "folder of clips"

    def __init__(self, root: str, files: Files, request: Request) -> None:
        super().__init__(root, files, request)
        self._captions: dict[str, str] | None = None  # of the captions file

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        return request.noun == "clips" and super().recognises(root, files, request)

    def list_partitions(self) -> list[str]:
        partitions = super().list_partitions()
        file = self.request.captions_file
        self._captions = None if file is None else read_captions_file(Path(file))
        return partitions

    def iterate_samples(self, partition: str) -> Iterator[Sample]:
        samples = list(super().iterate_samples(partition))
        names = [sample.place.name for sample in samples]
        _require_distinct_stems(self.root, names)
        if self._captions is None:
            self._record_whether_clips_have_captions(names)
            yield from samples
            return
        if missing := [name for name in names if name not in self._captions]:
            raise ConfigError(
                f"data.captions={self.request.captions_file}: no caption of {join_first(missing, 1)}, of "
                f"{len(names)} clips in {self.root}: write a line for each"
            )
        self.notes["captioned"] = self.notes.get("captioned", 0) + len(names)
        for sample in samples:
            yield Sample(sample.place, sample.label, (self._captions[sample.place.name],))

    def _record_whether_clips_have_captions(self, clip_names: list[str]) -> None:
        """Sets notes["beside"] to whether the clips of one folder have their captions in .txt files beside them.

        Raises ConfigError if only some of the clips have such a file, or if clips of an earlier folder differ in this.
        """
        beside, first = _have_caption_files(self.root, clip_names), self.notes.setdefault("first", clip_names[0])
        if self.notes.setdefault("beside", beside) != beside:
            raise ConfigError(
                f"{self.root}: no .txt with a caption beside {first if beside else clip_names[0]}, and others "
                "have theirs: write it, or remove the clip; clips have captions all or none"
            )

    def check_after_listing(self) -> None:
        captions, number = self._captions or {}, self.notes.get("captioned", 0)
        if len(captions) > number:
            superfluous = sorted(name for name in captions if not os.path.lexists(os.path.join(self.root, name)))
            raise ConfigError(
                f"data.captions={self.request.captions_file}: {join_first(superfluous or sorted(captions), 1)} "
                f"not among the {number} clips in {self.root}: put the files there, or take out the "
                "lines"
            )

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_captions": None}


def _require_distinct_stems(root: str, names: list[str]) -> None:
    """Raises ConfigError if two of the paths differ only in their suffix, such as X.mp4 and its thumbnail X.jpg, since
    the caption in X.txt would be that of both.
    """
    stems: dict[str, str] = {}
    for name in names:
        other = stems.setdefault(os.path.splitext(name)[0], name)
        if other != name:
            raise ConfigError(f"{root}: {other} and {name} have one name: remove or rename the other")


def _have_caption_files(root: str, clip_names: list[str]) -> bool:
    """Returns True if every clip, such as X.mp4, has a text file X.txt beside it; False if none has.

    Raises ConfigError if only some have one, or if a text file's name is spelled differently from its clip's, such as
    X.TXT.
    """
    texts_in: dict[str, dict[str, str]] = {}  # by one look at each folder, not one at each file
    without = []
    for name in clip_names:
        folder, stem = os.path.split(os.path.splitext(name)[0])
        if folder not in texts_in:
            texts = [name for name in os.listdir(os.path.join(root, folder)) if name.lower().endswith(".txt")]
            texts_in[folder] = {normalize_file_name(name): name for name in texts} | {name: name for name in texts}
        text = f"{stem}.txt"
        found = texts_in[folder].get(text) or texts_in[folder].get(normalize_file_name(text))
        if found is None:
            without.append(name)
        elif found != text:
            raise ConfigError(f"{root}: the text beside {name} is called {found!a}: rename it {text!a}")
    if without and len(without) < len(clip_names):
        raise ConfigError(
            f"{root}: no .txt with a caption beside {join_first(without, 1)}, of {len(clip_names)} clips: write it, "
            "or remove the clip; clips have captions all or none"
        )
    return not without


def read_captions_file(file: Path) -> dict[str, str]:
    """Returns {file name: caption} from a captions file, which has lines NAME<TAB>CAPTION or is a .csv or .jsonl table.

    Raises ConfigError if `file` cannot be read, or if a line lacks the name or the caption, or repeats a name.
    """
    where = f"data.captions={file}"
    if file.exists() and not file.is_file():
        raise ConfigError(f"{where} is no file: name one with a line for each clip")
    texts: dict[str, str] = {}
    for number, name, value in _iterate_caption_rows(file, where):
        captions = extract_captions(value) if isinstance(value, str) else ()
        if not isinstance(name, str) or not name or not captions:
            raise ConfigError(
                f"{where}, line {number}: no file and caption in it; write NAME<TAB>CAPTION, or a .csv "
                "or .jsonl with `file` and `caption`"
            )
        if name in texts:
            raise ConfigError(f"{where}, line {number}: {name} a second time; keep one")
        texts[name] = captions[0]
    return texts


def _iterate_caption_rows(file: Path, display_name: str) -> Iterator[tuple[int, Any, Any]]:
    """Yields (line number, file name, caption) of each row of a captions file. A name or caption that is missing is
    None or "".
    """
    files = LocalFiles(str(file.parent))
    if file.suffix.lower() in (".csv", ".jsonl"):
        table = open_table(files, file.name, display_name)
        columns = [
            match_column_names(COLUMNS[kind], table.list_columns())[:1] or [kind] for kind in ("path", "caption")
        ]
        yield from ((number, *(row.get(name) for (name,) in columns)) for number, row in table.iterate_rows(()))
        return
    for number, (name, *fields) in Tsv(files, file.name, display_name).iterate_records():
        yield number, name, "\t".join(fields)
