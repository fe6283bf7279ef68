"""A zip file of images, never extracted: with a dataset.json as dataset_tool of EDM and EDM2 writes it, or with one
folder for each class, or without classes. Samples have the order, names and labels of the folder that was packed.

Members may be stored or deflated. A folder that holds everything else counts as the root.
"""

import os
import stat
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator

from dstrain.data.files.listing import METADATA, convert_oserror_to_config_error, join_first
from dstrain.data.files.local import Files, is_hidden_path
from dstrain.data.files.remote import Missing
from dstrain.data.files.zipped import Members, iterate_zip_members, read_zip_member
from dstrain.data.formats.base import Layout, Place, Request, Sample, list_first_folder_entries
from dstrain.data.formats.labels import LABELS, MAX_LABELS_BYTES, make_numeric_class_names, parse_dataset_json_labels
from dstrain.data.formats.splits import refuse_split_folders_in_archive
from dstrain.data.formats.tars import MAX_BYTES
from dstrain.disk import small
from dstrain.recipe import ConfigError


class Zips(Layout):
    """Reads the images in a zip file. For a sample, `offset` is the byte at which its local header begins, and `size`
    is its compressed size.
    """

    kind = "zip"

    def __init__(self, root: str, files: Files, request: Request) -> None:
        super().__init__(root, files, request)
        self.name = list_first_folder_entries(files)[0][0]

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        names = list_first_folder_entries(files)
        return len(names) == 1 and names[0][0].lower().endswith(".zip") and not names[0][1]

    def list_partitions(self) -> list[str]:
        return [self.name]

    def iterate_samples(self, partition: str) -> Iterator[Sample]:
        """Yields the samples of the zip file, in the order in which the unpacked folder would have them.

        Raises ConfigError if the file is no zip file or a damaged one, if a member is encrypted or compressed by an
        unknown method, if images lie beside class folders, or if dataset.json lacks a label.
        """
        try:
            with convert_oserror_to_config_error(self.root, self.request.key):
                members, labels, top = self._list_members_labels_and_folder(partition)
            members.require_no_overlap()
        except Missing:
            raise
        except ConfigError as error:
            raise self._make_config_error(f"{partition} cannot be read: {error}; pack it anew") from None
        names = [name[len(top) :] for name in members.names]
        if labels is None or self.request.labels != "auto":
            refuse_split_folders_in_archive(names, f"{self.request.key}={self.root}")
        if labels is None and self.request.labels == "auto":
            by_name = self._make_class_lookup(names)
            order = sorted(range(len(names)), key=lambda place: names[place].replace("/", "\0", 1))
        else:
            labels = labels or {}
            if missing := [name for name in names if labels and name not in labels]:
                raise self._make_config_error(
                    f"{LABELS} has no label of {join_first(missing, 1)}, of {len(names)} {self.request.noun}: "
                    "pack it anew"
                )
            if absent := len(labels) - len(set(names)) if labels else 0:
                self.add_left_out_count(f"that {LABELS} names and that are not there", absent)
            if labels:
                self.classes = make_numeric_class_names(labels)
            by_name, order = labels.get, sorted(range(len(names)), key=names.__getitem__)
        self.classes = self.class_list.classes or (self.classes if self.request.labels == "auto" else ())
        for place in order:
            name = names[place]
            yield Sample(
                Place(name, 0, members.offsets[place], members.packed[place]), self.resolve_label(by_name(name), name)
            )

    def iterate_file_names(self) -> Iterator[str]:
        with self.files.open(self.name) as file:
            yield from (f"{self.name}/{member.orig_filename}" for member in iterate_zip_members(file))

    def read(self, place: Place) -> bytes:
        return read_zip_member(self.files, self.name, place.offset, place.size, MAX_BYTES)

    def _list_members_labels_and_folder(self, zip_name: str) -> tuple[Members, dict[str, int] | None, str]:
        """Returns three things: the members that are samples; {name: label} from dataset.json, or None without it; and
        the folder that holds all samples, "" or a path that ends in a slash.

        Counts as left out the members that may be samples and are not read. Raises ConfigError if a sample is encrypted
        or compressed by an unknown method, or if the dataset.json cannot be read.
        """
        members, tables, top, others = Members(), [], None, Counter()
        stems, texts = set(), []  # of samples, and of files that may be their captions
        with self.files.open(zip_name) as file:
            for member in iterate_zip_members(file):
                name = member.orig_filename
                folders, is_sample = name.split("/"), name.lower().endswith(self.request.suffixes)
                is_table = folders[-1] == LABELS
                if is_hidden_path(name):
                    continue
                if not is_sample and not is_table:
                    stem, suffix = os.path.splitext(name)
                    if folders[-1] in METADATA:
                        self.add_left_out_count(f"{folders[-1]}, which is read beside unpacked files alone,")
                    else:
                        others[suffix.lower()] += 1
                    if self.request.captions and suffix.lower() in (".txt", ".json"):
                        texts.append(stem)
                    continue
                is_link = stat.S_ISLNK(member.external_attr >> 16)
                if is_link or ".." in folders or "" in folders:
                    if is_sample:
                        self.add_left_out_count("links" if is_link else "whose names lead outside")
                    continue
                if member.flag_bits & 1:
                    raise ConfigError(f"its member {name[:100]} is encrypted")
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ConfigError(f"its member {name[:100]} is compressed by method {member.compress_type}")
                if is_table:
                    tables.append(member)
                    continue
                folder = name[: name.rfind("/") + 1]
                top = folder if top is None else _find_common_folder(top, folder)
                members.add_member(member)
                if self.request.captions:
                    stems.add(os.path.splitext(name)[0])
        if captions := sum(stem in stems for stem in texts):
            self.add_left_out_count(
                "captions in X.txt or X.json, which are read beside unpacked files and in tars alone,", captions
            )
        self.record_unread_files(others)
        if top is None:  # which is refused in the end
            return members, None, ""
        top = next(
            (
                folder
                for folder in _iterate_parents_and_folder(top)
                if any(folder + LABELS == table.orig_filename for table in tables)
            ),
            top,
        )
        labels = None
        for table in tables:
            if table.orig_filename != top + LABELS:
                self.add_left_out_count(f"{LABELS} in a folder within")
            else:
                size, packed = table.file_size, table.compress_size
                if size > MAX_LABELS_BYTES:
                    raise ConfigError(f"its {LABELS} has {size:,} bytes")
                content = read_zip_member(self.files, zip_name, table.header_offset, packed, max(size, packed))
                try:
                    labels = parse_dataset_json_labels(
                        small.parse_json_without_repeated_keys(content), self.root, self.request.key
                    )
                except ValueError as error:
                    raise ConfigError(f"its {LABELS} cannot be read ({error})") from None
        return members, labels, top

    def _make_class_lookup(self, sample_names: list[str]) -> Callable[[str], str | None]:
        """Returns a function that takes a sample's name and returns its class, which is the name's first folder. Sets
        `classes` to these folders. If no name has a folder, the function always returns None.

        Raises ConfigError if some names have a folder, and others have none.
        """
        classes = sorted({name.partition("/")[0] for name in sample_names if "/" in name})
        if not classes:
            return lambda name: None
        if flat := next((name for name in sample_names if "/" not in name), None):
            raise self._make_config_error(
                f"{self.request.noun} ({flat}) beside class folders ({join_first(classes)}): is this one "
                "class or several? Pack a folder with a folder for each class, or with a dataset.json"
            )
        self.classes = tuple(classes)
        return lambda name: name.partition("/")[0]

    def _make_config_error(self, text: str) -> ConfigError:
        return ConfigError(f"{self.request.key}={self.root}: {text}")


def _find_common_folder(folder: str, other_folder: str) -> str:
    """Returns the innermost folder that contains both folders. Each ends in a slash, except the root, which is ""."""
    common = os.path.commonpath([folder, other_folder])
    return f"{common}/" if common else ""


def _iterate_parents_and_folder(folder: str) -> Iterator[str]:
    """Yields the root and every folder on the way to `folder`, which is the last: "", "a/", "a/b/" for "a/b/"."""
    words = folder.split("/")[:-1]
    return ("".join(f"{word}/" for word in words[:count]) for count in range(len(words) + 1))
