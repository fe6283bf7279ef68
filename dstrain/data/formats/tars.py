"""Tar shards as webdataset writes them: KEY.jpg, KEY.cls, KEY.json, KEY.txt are one sample; also of videos, KEY.mp4.

    data.path=FOLDER                           all its .tar files, in the order of their names
    data.path=FILE.tar
    data.path=shards/{00000..00099}.tar        also {a,b}.tar

A key ends at the first dot of the file's name. Labels are in .cls, else in .json as "label": a number, or a class's
name. Captions are in .txt, one a line, else in .json (see sidecars.py). A tar file is never extracted: one pass over
its headers finds where members lie, and they are read by offset. Names in it are data, never paths. Only regular
members are read; links, devices and sparse files are left out, and counted, as are all images of a key but the first.
Two members with one name are refused. Tar files that were joined by `cat` are read one after the other.
"""

import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO

from dstrain.data.files.local import Files, is_hidden_path
from dstrain.data.files.remote import Missing
from dstrain.data.formats.base import UNCAPTIONED, Layout, Place, Request, Sample, list_first_folder_entries
from dstrain.data.formats.hugging_face import iterate_file_names_by_suffix
from dstrain.data.formats.shards import refuse_or_record_missing_shards
from dstrain.data.formats.splits import find_split_in_path, is_split_name, refuse_split_folders_in_archive
from dstrain.disk import small
from dstrain.disk.texts import (
    LONGEST_TEXT,
    decode_text,
    extract_json_captions,
    split_nonblank_lines,
    strip_space_and_bom,
)
from dstrain.recipe import ConfigError, NotRead

MAX_BYTES = 1 << 28  # a member with more bytes is not read
_MOST_HEADER = 1 << 20  # bytes that a header, such as a long name or further attributes, may have
_UNPACK = {
    ".tar.gz": "gunzip {}",
    ".tgz": "gunzip {}",
    ".tar.bz2": "bunzip2 {}",
    ".tar.xz": "unxz {}",
    ".tar.zst": "unzstd --rm {}",
    ".tar.lz4": "unlz4 --rm {}",
}
_ENDS = (".tar", *_UNPACK)
_TEXTS = ("cls", "json", "txt")


class Tars(Layout):
    """Reads tar shards. A sample is a member of a shard; `offset` and `size` are its bytes there, and its name begins
    with the shard's.

    Where captions are needed, images without one are counted as left out; clips need none.
    """

    kind = "webdataset tars"
    labels_written = True

    def __init__(self, root: str, files: Files, request: Request) -> None:
        super().__init__(root, files, request)
        self._named: set[str] = set()  # folders in the tar files that are called as splits

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        if _has_several_paths(root):
            return _has_tar_suffix(root)
        return any(_has_tar_suffix(name) for name, inner in list_first_folder_entries(files) if not inner)

    def list_partitions(self) -> list[str]:
        """Returns the names of the .tar files.

        Raises ConfigError if there is a compressed tar, such as x.tar.gz, and no x.tar beside it; or if a folder holds
        tars of several splits.
        """
        several = _has_several_paths(self.root)
        top = (name for name, inner in self.files.list_names() if not inner)
        names = [
            name
            for name in (iterate_file_names_by_suffix(self.files, *_ENDS) if several else top)
            if _has_tar_suffix(name)
        ]
        for name in names:
            packed = next((end for end in _UNPACK if name.lower().endswith(end)), None)
            if packed and (name[: -len(packed)] + ".tar") not in names:
                raise ConfigError(
                    f"{self.request.key}={self.root}: {name} is compressed, and its members cannot be "
                    f"read one by one: unpack it, {_UNPACK[packed].format(f'{self.files.root}/{name}')}"
                )
        self.classes = self.class_list.classes
        shards = [name for name in names if name.lower().endswith(".tar")]
        if not (several or self.files.pattern):
            self._refuse_several_splits(shards)
        self._first = shards[0]
        return shards

    def _refuse_several_splits(self, shards: list[str]) -> None:
        """Raises ConfigError if the shards belong to different splits by their names, such as train-0.tar and
        test-0.tar.
        """
        firsts: dict[str, str] = {}
        for name in shards:
            firsts.setdefault(find_split_in_path(name), name)
        if len(firsts) > 1:
            texts = [f"{name} of {split or 'no split'}" for split, name in firsts.items()]
            raise ConfigError(
                f"{self.request.key}={self.root} holds {', '.join(texts)}: name those of one by a pattern, such as "
                f"{self.request.key}='{self.root}/train-*.tar', or all by '{self.root}/*.tar'"
            )

    def list_files_watched_for_changes(self) -> list[str]:
        return ["", *self.list_partitions()]

    def iterate_samples(self, partition: str) -> Iterator[Sample]:
        if partition == self._first:
            self.record_unread_files_beside_shards()
            refuse_or_record_missing_shards(self, self.list_partitions())
        members = self._group_members_by_sample(partition)
        folders = {f"{key.rpartition('/')[0]}/" for key in members}
        refuse_split_folders_in_archive(folders, f"{self.request.key}={self.root}: {partition}")
        if not (self.files.pattern or _has_several_paths(self.root)):  # Else their user has chosen them.
            self._named |= {folder for folder in folders if is_split_name(folder.split("/")[-2])}
            refuse_split_folders_in_archive(self._named, f"{self.request.key}={self.root}")
        labelled = any(_find_label(sample) is not None for sample in members.values())
        for key in sorted(members):
            sample = members[key]
            if "place" not in sample:
                if "dotted" in sample:
                    raise ConfigError(
                        f"{self.request.key}={self.root}: {partition}: {sample['dotted']} has several dots. A "
                        "key ends at the first one, so its suffix is not known: pack it under a name "
                        "with one dot"
                    )
                if "other" not in sample and not sample.keys().isdisjoint(_TEXTS):
                    self.add_left_out_count(f"keys with a text or label and without one of the {self.request.noun}")
                continue
            own = _find_label(sample)
            if labelled and "damaged" in sample and own is None:
                raise ConfigError(
                    f"{self.request.key}={self.root}: {partition}: {sample['damaged']} is empty or damaged, "
                    "and other samples have labels: mend it, take its sample out, or write "
                    "data.labels=none"
                )
            captions = sample.get("txt") or sample.get("captions") or ()
            if self.request.captions and not captions and self.request.noun != "clips":
                self.add_left_out_count(UNCAPTIONED)
                continue
            name = f"{partition}/{key}"
            if self.request.labels == "auto":
                label = self.class_list.parse_label_value(own, f"{self.request.key}={self.root}: {name}")
            else:
                label = self.resolve_label(own, key)
            yield Sample(Place(name, 0, *sample["place"]), label, captions)

    def iterate_file_names(self) -> Iterator[str]:
        for partition in self.list_partitions():
            with self.files.open(partition) as file:
                yield from (f"{partition}/{member.name}" for member in _iterate_member_headers(file) if member.isreg())

    def read(self, place: Place) -> bytes:
        if place.size > MAX_BYTES:
            raise ConfigError(f"its header says {place.size} bytes, above the cap of {MAX_BYTES}")
        end = place.name.lower().index(".tar/") + len(".tar")
        return self.files.read_span(place.name[:end], place.offset, place.size)

    def _group_members_by_sample(self, shard: str) -> dict[str, dict[str, Any]]:
        """Returns what the members of a shard say of each sample, as {key: entries}. The key is the name up to the
        first dot: 0001 for both 0001.jpg and 0001.txt. The entries of a key are those of these that it has:

        "place": the (offset, size) in bytes of the image or clip.
        "txt", "captions": the captions from .txt, and from .json.
        "cls", "label": the label from .cls, and from .json.
        "dotted", "damaged", "other": the name of a member that is not read.
        Counts as left out the members that may be further samples. Raises ConfigError if the shard is no tar file, or
        is damaged.
        """
        members: dict[str, dict[str, Any]] = {}
        others, suffixes = Counter(), self.request.suffixes
        try:
            with self.files.open(shard) as file:
                for member in _iterate_member_headers(file):
                    folder, _, name = member.name.rpartition("/")
                    stem, _, suffix = name.partition(".")
                    suffix = suffix.lower()
                    if not stem or member.isdir() or is_hidden_path(member.name):
                        continue
                    if not member.isreg() or member.issparse():
                        if f".{suffix}" in suffixes:
                            self.add_left_out_count(
                                "links" if member.issym() or member.islnk() else "sparse or special files"
                            )
                        continue
                    sample = members.setdefault(f"{folder}/{stem}" if folder else stem, {})
                    if f".{suffix}" in suffixes:
                        self._add_media_member(sample, f".{suffix}", member)
                    elif suffix in _TEXTS:
                        self._add_text_member(sample, suffix, file, member)
                    elif f".{suffix.rpartition('.')[2]}" in suffixes:
                        sample["dotted"] = member.name
                    else:
                        sample["other"] = member.name
                        others[f".{suffix}"] += 1
        except (NotRead, Missing):
            raise
        except (tarfile.TarError, OSError, ValueError) as error:
            raise ConfigError(
                f"{self.request.key}={self.root}: {shard} is no readable tar file ({error}); make it "
                "anew, or take it away"
            ) from None
        self.record_unread_files(others)
        return members

    def _add_media_member(self, sample: dict[str, Any], suffix: str, member: tarfile.TarInfo) -> None:
        """Stores the (offset, size) in bytes of an image or a clip in `sample`, the entries of its key. Keeps one place
        for a key.

        If a key has several images, keeps the first, and counts the others as left out. If a key has a video and a
        picture, keeps the video. Raises TarError if the key has two members with the suffix `suffix`.
        """
        if suffix in sample.get("suffixes", ()):
            raise tarfile.TarError(f"it has two members {member.name}")
        sample["suffixes"] = (*sample.get("suffixes", ()), suffix)
        is_clip = self.request.noun == "clips"
        rank = self.request.suffixes.index(suffix) if is_clip else 0  # videos stand before pictures
        if "place" not in sample or rank < sample["rank"]:
            sample |= {"place": (member.offset_data, member.size), "rank": rank}
        elif not is_clip:
            self.add_left_out_count(f"further {self.request.noun} of a key")

    def _add_text_member(self, sample: dict[str, Any], suffix: str, file: BinaryIO, member: tarfile.TarInfo) -> None:
        """Reads a .txt, .cls or .json member, and stores its captions or label in `sample`, the entries of its key.
        Does nothing if the request does not ask for these.

        suffix: the suffix without its dot.
        If a .txt cannot be read, stores an empty caption. If another member cannot be read, or a .cls is empty, stores
        the member's name as "damaged".
        Raises TarError if the key has two members of this kind, or if a JSON object repeats one of its keys.
        """
        wants_captions, wants_labels = self.request.captions, self.request.labels != "none"
        if not {"txt": wants_captions, "cls": wants_labels, "json": wants_captions or wants_labels}[suffix]:
            return
        if suffix in sample:
            raise tarfile.TarError(f"it has two members {member.name}")
        file.seek(member.offset_data)
        content = file.read(min(member.size, LONGEST_TEXT + 1))
        sample[suffix] = None
        try:
            if len(content) > LONGEST_TEXT:
                raise ValueError(f"more than {LONGEST_TEXT} bytes")
            text = decode_text(content)
            if suffix == "txt":
                sample["txt"] = split_nonblank_lines(text) or ("",)
            elif suffix == "cls":
                sample["cls"] = strip_space_and_bom(text) or None
                if sample["cls"] is None:
                    sample["damaged"] = member.name
            else:
                section = small.parse_json_without_repeated_keys(text)
                sample["captions"] = extract_json_captions(section) if wants_captions else ()
                label = section.get("label") if wants_labels and isinstance(section, dict) else None
                sample["label"] = label if isinstance(label, str | int | float) else None  # not boxes, say
        except small.RepeatedKey as error:
            raise tarfile.TarError(f"{member.name}: {error}") from None
        except ValueError:
            if suffix == "txt":
                sample["txt"] = ("",)  # a caption that cannot be read: a bad sample
            else:
                sample["damaged"] = member.name


class _SizeCappedFile:
    """Wraps a file from which tarfile reads headers. Reading more than 1 MiB at once, as a hostile header asks for,
    raises ReadError.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self._file, self.mode, self.name = file.seek, file.tell, file, "rb", None

    def read(self, size: int) -> bytes:
        """Returns at most `size` bytes of the file. Raises ReadError if `size` is above 1 MiB."""
        if not 0 <= size <= _MOST_HEADER:
            raise tarfile.ReadError(f"a header says that it has {size:,} bytes")
        return self._file.read(size)


def _iterate_member_headers(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yields the header of each member of a tar file, also of several tar files that were joined by `cat`.

    Raises TarError if a header is damaged, if headers are out of order, or if the file does not end in a block of
    zeros.
    """
    start: int | None = 0
    last = -1
    while start is not None:
        file.seek(start)
        with tarfile.open(fileobj=_SizeCappedFile(file), mode="r:") as archive:
            for member in archive:
                archive.members = []  # tarfile would keep them all in memory
                if member.offset <= last or member.size < 0:
                    raise tarfile.ReadError("a header leads backwards")
                last = member.offset
                yield member
            file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # which tarfile takes for an end
            raise tarfile.ReadError("it is cut off: no block of zeros ends it")
        start = _find_next_nonzero_block(file)


def _find_next_nonzero_block(file: BinaryIO) -> int | None:
    """Returns the offset in bytes of the next 512-byte block that is not all zeros, from the file's current position
    on; None if there is none.
    """
    while content := file.read(_MOST_HEADER):
        if rest := content.lstrip(b"\0"):
            return (file.tell() - len(rest)) // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE
    return None


def _has_several_paths(root: str) -> bool:
    """Returns whether data.path stands for several files: as a pattern with braces, or as addresses with spaces between
    them.
    """
    return ("{" in root and not os.path.exists(root)) or ("://" in root and " " in root)


def _has_tar_suffix(name: str) -> bool:
    """Returns whether a name ends in .tar, or as a compressed tar does, such as .tgz."""
    return name.lower().endswith(_ENDS)


def _find_label(sample: dict[str, Any]) -> Any:
    """Returns the label of a sample from its .cls, or from its .json if there is no .cls; None if it has no label.

    sample: the entries of the sample, as `Tars._group_members_by_sample` returns them.
    """
    return sample.get("cls", sample.get("label"))
