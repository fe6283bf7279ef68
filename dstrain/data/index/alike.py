"""Checks that all ranks see the same data: rank 0 lists them, and others may read a copy, or another folder.

A view is a machine and the file or folder at the data's path there. One rank of each view other than rank 0's compares
its files with those that rank 0 has listed: the sizes of 10,000 files and both ends of some, then the modification
times of the files that the index watches, which are equal on a shared disk. If the times differ, as for copies, this
rank lists the data again and compares them sample by sample. So the check takes a second at any number of samples,
except for copies of many single files.
"""

import os
import socket
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.data.files.listing import map_in_threads
from dstrain.data.formats import open_data_files, recognise_layout
from dstrain.data.formats.base import Layout
from dstrain.data.index.index import CHUNK, Index
from dstrain.data.source import Source
from dstrain.disk.texts import parse_whole_number
from dstrain.distributed import group
from dstrain.distributed.progress import get_phases
from dstrain.recipe import ConfigError, NotRead

_SIZED = 10_000  # files whose sizes are compared
_READ = 256  # files whose ends are compared
_ENDS = 1 << 16  # bytes at either end


def require_same_data_on_machines(layout: Layout, index: Index, read_stats: Callable[[], list[Any]]) -> None:
    """Raises ConfigError on all ranks if a machine has other data at the path than rank 0; the message names the
    machine and the first difference. All ranks must call it. Does nothing for data at an address such as s3://.

    read_stats: returns the size and the modification time of each file that the index watches.
    """
    if not layout.files.far:
        _require_equal_on_machines(
            layout.root,
            f"{layout.request.key}={layout.root}",
            lambda: _describe_files_for_comparison(layout, index, read_stats()),
            lambda expected, found: _describe_first_difference(layout, index, expected, found),
        )


def require_same_fingerprint_on_machines(source: Source, path: str) -> None:
    """Raises ConfigError on all ranks if the cached data at `path` have different fingerprints on different machines.
    All ranks must call it.
    """
    _require_equal_on_machines(path, f"data.path={path}", source.compute_fingerprint, "{1!r}, not {0!r}".format)


def _require_equal_on_machines(
    root: str, where: str, observe: Callable[[], Any], explain: Callable[[Any, Any], str | None]
) -> None:
    """Calls `observe` on rank 0 and on one rank of each other view, and compares each result with that of rank 0. A
    view is a machine together with the file or folder at `root` there. All ranks must call it. Does nothing if all
    ranks have the same view.

    where: names the data in the message.
    explain: given rank 0's result and another one, returns in words how they differ; None if they count as equal.
    Raises ConfigError on all ranks if results differ, or if `observe` raises ConfigError on a rank other than 0.
    """
    views = group.gather_objects(_identify_machine_and_folder(root))
    if len(set(views)) == 1:
        return
    rank, problem = group.rank(), None
    expected = group.broadcast_from_first(observe() if rank == 0 else None)
    if rank != 0 and views.index(views[rank]) == rank:
        try:
            found = observe()
            problem = None if found == expected else explain(expected, found)
        except ConfigError as error:
            problem = f"other data ({error})"
    for number, fault in enumerate(group.gather_objects(problem)):
        if fault is not None:
            raise ConfigError(
                f"{where} is not the same on all machines: rank {number} on {views[number][0]} sees {fault}: copy the "
                "data anew, or name a folder that all machines share"
            )


def _identify_machine_and_folder(root: str) -> tuple[Any, ...]:
    """Returns a tuple that is equal on two ranks if they see the same file or folder at `root`: the name of the host,
    and the device and inode of `root`. If nothing exists there, as for a pattern, the absolute path replaces device and
    inode.
    """
    try:
        status = os.stat(root)
        return socket.gethostname(), status.st_dev, status.st_ino
    except (OSError, ValueError):  # a pattern, or a name that stands for something else
        return socket.gethostname(), os.path.abspath(root)


def _describe_files_for_comparison(layout: Layout, index: Index, stats: list[Any]) -> dict[str, Any]:
    """Returns a description of the data's files on this machine, for a comparison with rank 0's.

    "watched": the argument `stats`.
    "parts": the names of the layout's partitions, such as shards; [] if each sample is a file of its own.
    "files": {name: (bytes, hash of both ends)} of at most 10,000 evenly spaced files. Only about 256 of them are
    hashed; for the others, the hash is "".
    """
    pieces = [] if index.single else layout.list_partitions()
    count = len(index) if index.single else len(pieces)
    numbers = np.unique(np.linspace(0, count - 1, min(count, _SIZED)).astype(int)).tolist()
    names = [index.read_name(number) if index.single else pieces[number] for number in numbers]
    read = set(names[:: -(-len(names) // _READ)])
    files = map_in_threads(
        lambda name: (count_file_bytes(layout, name), _hash_file_ends(layout, name) if name in read else ""), names
    )
    return {"watched": stats, "files": dict(zip(names, files)), "parts": pieces}


def count_file_bytes(layout: Layout, name: str) -> int:
    """Returns the size of a file in bytes; -1 if the file cannot be read. Raises NotRead if the storage fails."""
    try:
        return layout.files.read_stat(name).size
    except NotRead:
        raise
    except OSError:
        return -1


def _hash_file_ends(layout: Layout, name: str) -> str:
    """Returns a hash of the first and the last 64 KiB of a file; "" if the file cannot be read."""
    try:
        path: Path = layout.files.fetch_local_path(name)
        with open(path, "rb") as file:
            digest = blake2b(file.read(_ENDS), digest_size=8)
            file.seek(-min(_ENDS, os.fstat(file.fileno()).st_size), os.SEEK_END)
            digest.update(file.read(_ENDS))
            return digest.hexdigest()
    except OSError:
        return ""


def _describe_first_difference(
    layout: Layout, index: Index, expected: dict[str, Any], found: dict[str, Any]
) -> str | None:
    """Returns in words the first difference between this machine's files and rank 0's; None if there is none.

    expected, found: the results of `_describe_files_for_comparison` on rank 0 and here. If each sample is a file of
    its own, and only the entries "watched" differ, lists the data anew and compares every sample.
    """
    for name, (size, ends) in expected["files"].items():
        own_size, own_ends = found["files"].get(name, (-1, ""))
        if own_size != size:
            return f"{name} of {own_size:,} bytes, not {size:,}" if own_size >= 0 else f"no {name}"
        if own_ends != ends:
            return f"{name} with another content"
    if found["parts"] != expected["parts"]:
        return f"{len(found['parts']):,} files such as {found['parts'][:1]}, not {len(expected['parts']):,}"
    if not index.single or found["watched"] == expected["watched"]:
        return None
    return next(_iterate_differences_from_index(layout, index), None)


def _iterate_differences_from_index(layout: Layout, index: Index) -> Iterator[str]:
    """Lists the data on this machine anew, and yields in words each difference from the samples in the index."""
    own = recognise_layout(layout.root, open_data_files(layout.root, layout.request), layout.request)
    row = 0
    for piece in own.list_partitions():
        for sample in own.iterate_samples(piece):
            if row % CHUNK == 0:
                get_phases().enter_phase(
                    f"comparing {layout.root} with what rank 0 has listed: {row:,} of {len(index):,}"
                )
            if row == len(index):
                yield f"{sample.place.name}, which is not on rank 0"
            name = index.read_name(row)
            if sample.place.name != name:
                yield f"{sample.place.name} where {name} is on rank 0"
            if isinstance(sample.label, str) and index.classes:
                number, known = parse_whole_number(sample.label), index.classes[index.read_label(row)]
                if known not in (sample.label, str(number)):
                    yield f"{name} of the class {sample.label}, not {known}"
            elif sample.label is not None and sample.label != index.read_label(row):
                yield f"{name} with the label {sample.label}, not {index.read_label(row)}"
            if tuple(map(str, sample.captions)) != index.read_captions(row):
                yield f"{name} with another caption"
            row += 1
    if row < len(index):
        yield f"no {index.read_name(row)}"
