"""Makes the index of data on rank 0, and opens it in every later command.

    FOLDER/KEY/            the index; KEY is a hash of the data's path and of what a command asks of them
    FOLDER/KEY.building/   what is listed so far, with journal.jsonl: after an interruption it goes on from there
    FOLDER/KEY.lock        one command at a time lists

FOLDER is data.index, else `index` in the folder of the run, or the user's cache (always for `dstrain index`).
Without data.index, up to 50,000 samples are listed anew by each command and kept in memory, unless buckets need their
sizes, which take longer to read. Rank 0 lists the data while the other ranks wait.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from dstrain.data.files.listing import join_first, map_in_threads
from dstrain.data.files.local import Files, require_files_of_pattern_exist
from dstrain.data.formats import open_data_files, recognise_layout
from dstrain.data.formats.base import Layout, Request
from dstrain.data.index.alike import require_same_data_on_machines
from dstrain.data.index.columns import ELSEWHERE, Columns
from dstrain.data.index.index import CHUNK, VERSION, WATCHED, Index, read_json_if_intact
from dstrain.disk import atomic, lines, sealed
from dstrain.distributed import group
from dstrain.distributed.environment import make_cache_folder
from dstrain.distributed.progress import get_phases
from dstrain.recipe import ConfigError, NotRead, explain_write_errors

_SMALL = 50_000  # samples that are kept in memory
_WATCHED = 10_000  # files and folders that are asked for their time of change
_SYNC = 1.0  # seconds of listing that may be lost
_TICK = 20_000_000  # ns in which a file system's clock may stand still
_BESIDE = ("noun", "key", "cache", "mixed", "upright", "measured")  # fields of a request that do not change an index
_OF_REQUEST = ("data.captions=", "data.class_list=")  # files elsewhere, which are watched, too
_T = TypeVar("_T")


def open_index(
    path: str | Path, request: Request, index_folder: str | Path | None = None, run: Path | None = None
) -> tuple[Layout, Index]:
    """Returns the layout of the data at a path, and the index of their samples. Makes the index if there is none, or if
    the data have changed since it was made. All ranks must call it.

    index_folder: data.index, a folder in which the index is kept, whatever its size.
    run: the run's folder. If `index_folder` is None, an index is looked for there, and a large one is kept there.
    Raises ConfigError if there are no such data, if machines have different data at the path or cannot open the index,
    or if the layout finds a fault in the data.
    """
    layout, index = run_on_rank_0(lambda: _find_or_make_index(str(path), request, index_folder, run))
    missing = None
    try:
        len(index)
    except ConfigError as error:
        missing = error
    if group.is_true_on_any_rank(missing is not None):
        raise missing or ConfigError(
            f"the index of {path} is not to be seen on another machine: write data.index="
            "FOLDER, a folder that all machines share"
        )
    if group.world() > 1:
        watched = group.broadcast_from_first(
            _read_or_choose_watched_files(layout, index) if group.rank() == 0 else None
        )
        require_same_data_on_machines(layout, index, lambda: _read_file_stats(layout, watched))
    return layout, index


def make_index_files_once(index: Index, files_exist: Callable[[], Any], make_files: Callable[[], None]) -> None:
    """Makes files that belong to an index, unless they exist. Only rank 0 makes them, under a lock that other commands
    respect. All ranks must call it.

    files_exist: returns whether the files exist.
    make_files: writes the files.
    Raises ConfigError if the files cannot be written.
    """

    def make_if_missing() -> None:
        """Calls `make_files` under the lock, unless the files are there."""
        if not files_exist():
            with lock_index(index.folder), explain_write_errors(index.folder, ELSEWHERE):
                if not files_exist():
                    make_files()

    run_on_rank_0(make_if_missing)


def run_on_rank_0(function: Callable[[], _T]) -> _T:
    """Calls `function` on rank 0 alone, and returns its result on every rank. If it raises ConfigError or NotRead, all
    ranks raise the same error. All ranks must call this function.
    """
    if group.world() == 1:
        return function()
    value, error = None, None
    if group.rank() == 0:
        try:
            value = function()
        except (ConfigError, NotRead) as problem:
            error = problem
    value, error = group.broadcast_from_first((value, error))
    if error is not None:
        raise error
    return value


def _find_or_make_index(
    path: str, request: Request, index_folder: str | Path | None, run: Path | None
) -> tuple[Layout, Index]:
    """Does on rank 0 what `open_index` says: opens the index on a disk if it still fits the data, else makes one."""
    files, key = open_data_files(path, request), _hash_request(path, request)
    folders = (
        [Path(index_folder) / key]
        if index_folder is not None
        else [folder / key for folder in _list_candidate_index_folders(run)]
    )
    if (
        index_folder is not None
        and not files.far
        and Path(path).resolve() in (place := Path(index_folder).resolve(), *place.parents)
    ):
        raise ConfigError(
            f"data.index={index_folder} lies in {request.key}={path}, where it would count as data: name a folder "
            "beside it"
        )
    for folder in folders:
        found = _open_index_if_current(folder, path, files, request)
        if found is not None:
            return found
    require_files_of_pattern_exist(f"{request.key}={path}", files)
    layout, folder = recognise_layout(path, files, request), folders[0]
    if index_folder is None and not request.measured and not _name_unfinished_folder(folder).exists():
        index = _make_small_index_in_memory(layout)
        if index is not None:
            return layout, index
    with lock_index(folder):
        return _open_index_if_current(folder, path, files, request, print_changes=True) or (
            layout,
            _make_index_on_disk(layout, folder),
        )


def _hash_request(path: str, request: Request) -> str:
    """Returns the name of an index: a hash of the data's path and of what the request asks of the data."""
    own = {name: value for name, value in asdict(request).items() if name not in _BESIDE}
    place = path if "://" in path else os.path.abspath(path)
    return blake2b(json.dumps([place, own], sort_keys=True).encode(), digest_size=8).hexdigest()


def make_index_cache_folder() -> Path:
    """Returns the folder of indexes in the user's cache, for `dstrain index` and for commands without a run."""
    return make_cache_folder("dstrain/index")


def _list_candidate_index_folders(run: Path | None) -> list[Path]:
    """Returns the folders in which an index is looked for: the user's cache, and index/ in the run's folder if there is
    a run.

    A new index is written to the first of them. This is index/ in the run's folder, or the user's cache if there is no
    run or its folder is read-only.
    """
    if run is None:
        return [make_index_cache_folder()]
    existing = next(path for path in (run.absolute(), *run.absolute().parents) if path.exists())
    folders = [run / "index", make_index_cache_folder()]
    return folders if os.access(existing, os.W_OK) else folders[::-1]


def _name_unfinished_folder(folder: Path) -> Path:
    """Returns the folder to which an index is written until it is finished: KEY.building beside KEY."""
    return folder.with_name(f"{folder.name}.building")


@contextmanager
def lock_index(folder: Path) -> Iterator[None]:
    """Within the block, this process alone holds the lock file KEY.lock of the index in `folder`; first waits for other
    commands. Takes no lock if the file system has none. Raises ConfigError if the lock file cannot be written.
    """
    with explain_write_errors(folder.parent, ELSEWHERE):
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = open(folder.with_name(f"{folder.name}.lock"), "a")  # noqa: SIM115
    with file:
        get_phases().enter_phase("waiting for another command that lists the same data")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _open_index_if_current(
    folder: Path, path: str, files: Files, request: Request, print_changes: bool = False
) -> tuple[Layout, Index] | None:
    """Returns the layout and the index in `folder`. Returns None if there is no index, if the index was altered, or if
    the data have changed since it was made.

    print_changes: True to print what has changed, if the caller makes the index anew after None.
    """
    index = Index.open(folder)
    watched = index and read_json_if_intact(folder / WATCHED)
    if not watched:
        return None
    if not index.matches_checksums_if_small():
        if print_changes:
            get_phases().print_lines(f"data: {path}: the index in {folder} was altered; listing the data anew")
        return None
    layout = recognise_layout(path, files, request)
    if index.header["layout"] != type(layout).__name__:  # a list of labels or the like was put beside the data
        return None
    layout.classes, layout.notes = index.classes, index.header["notes"]
    now = _read_file_stats(layout, watched["names"])
    if now == watched["stats"]:
        return layout, index
    if not print_changes:
        return None
    changed = [name for name, old, new in zip(watched["names"], watched["stats"], now) if old != new]
    get_phases().print_lines(
        f"data: {path}: {join_first(changed, 3)} changed since the index was made; listing the data anew"
    )
    return None


def _read_file_stats(layout: Layout, names: list[str]) -> list[list[int | str]]:
    """Returns [size in bytes, version] of each file or folder; [-1, ""] for one that cannot be read. The version is a
    modification time, or a tag that a store such as S3 gives. Raises NotRead if the storage fails.

    names: names in the layout, or KEY=PATH of a file that the recipe names, such as data.class_list=FILE.
    """

    def read_stat(name: str) -> list[int | str]:
        """Returns [size in bytes, version] of one file or folder; [-1, ""] if it cannot be read."""
        try:
            if not name.startswith(_OF_REQUEST):
                return list(layout.files.read_stat(name))
            status = os.stat(name.partition("=")[2])
            return [status.st_size, str(status.st_mtime_ns)]
        except NotRead:
            raise
        except OSError:
            return [-1, ""]

    return list(map_in_threads(read_stat, names))


def _choose_files_to_watch(layout: Layout) -> list[str]:
    """Returns the names of the files and folders to watch: if one of them changes, the index is outdated. These are at
    most 10,000 evenly spaced names of the layout, and the files of captions and of classes that the recipe names.
    """
    request, names = layout.request, layout.list_files_watched_for_changes()
    if len(names) > _WATCHED:
        names = [names[place] for place in np.linspace(0, len(names) - 1, _WATCHED).astype(int).tolist()]
    lists = zip(_OF_REQUEST, (request.captions_file, request.class_list))
    return [*names, *(f"{key}{path}" for key, path in lists if path is not None)]


def _read_or_choose_watched_files(layout: Layout, index: Index) -> list[str]:
    """Returns the names of the files and folders to watch: if one of them changes, the index is outdated. Reads the
    names that are stored with an index on a disk; for an index in memory, chooses them now.
    """
    watched = None if index.folder is None else read_json_if_intact(index.folder / WATCHED)
    return _choose_files_to_watch(layout) if watched is None else watched["names"]


def _make_small_index_in_memory(layout: Layout) -> Index | None:
    """Lists the samples, and returns their index in memory; None as soon as there are more than 50,000 samples."""
    pieces = layout.list_partitions()
    columns = Columns(classes=layout.classes)
    for piece in pieces:
        for sample in layout.iterate_samples(piece):
            columns.add_sample(sample, layout)
            if columns.number > _SMALL:
                return None
    layout.check_after_listing()
    return columns.make_index(layout)


def _make_index_on_disk(layout: Layout, folder: Path) -> Index:
    """Lists the samples, writes their index to `folder`, and returns it. Replaces an index that is there. If an earlier
    command was interrupted and the data are still the same, goes on where it stopped.
    """
    layout.notes.clear()  # They may be those of a listing in memory.
    building, pieces = _name_unfinished_folder(folder), layout.list_partitions()
    watch_list = _choose_files_to_watch(layout)
    _wait_past_modification_times(stats := _read_file_stats(layout, watch_list))
    plan = {
        "version": VERSION,
        "layout": type(layout).__name__,
        "number": len(pieces),
        "watched": [watch_list, stats],
        "parts": blake2b("\0".join(pieces).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest(),
    }
    journal = building / "journal.jsonl"
    columns, done = _resume_columns(building, journal, plan, layout)
    if columns is None:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        lines.append_lines(journal, json.dumps(plan) + "\n")
        columns, done = Columns(building, classes=layout.classes), 0
    _add_samples_of_partitions(layout, columns, pieces, done, journal)
    layout.check_after_listing()
    known = set(watch_list)
    more = [name for name in _choose_files_to_watch(layout) if name not in known]  # folders met while listing
    get_phases().enter_phase(f"writing the index of {layout.root}")
    columns.make_index(layout)
    atomic.write_file(
        building / WATCHED,
        sealed.render_json_with_hash({"names": watch_list + more, "stats": stats + _read_file_stats(layout, more)}),
    )
    if folder.exists():
        old = folder.with_name(f"{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    atomic.flush_and_rename_folder(building, folder)
    return Index.open(folder)


def _add_samples_of_partitions(
    layout: Layout, columns: Columns, partitions: list[str], num_done: int, journal: Path
) -> None:
    """Adds the samples of the partitions from number `num_done` on to the columns, and writes the columns to the disk.

    journal: a file that gets a line with what is on the disk, about once a second, at the end and after an error. From
    its last line, an interrupted listing can be resumed.
    """
    state: dict[str, Any] | None = None
    synced, noun = time.monotonic(), layout.request.noun

    def sync_to_disk() -> None:
        """Writes all columns to the disk, then `state` to the journal."""
        columns.write_to_disk(durable=True)
        lines.append_lines(journal, json.dumps(state) + "\n")

    with tqdm(
        initial=columns.number, unit=f" {noun}", unit_scale=True, delay=2, disable=None, desc=f"listing {layout.root}"
    ) as bar:
        try:
            for number, partition in enumerate(partitions[num_done:], num_done + 1):
                for sample in layout.iterate_samples(partition):
                    columns.add_sample(sample, layout)
                    if columns.number % CHUNK == 0:
                        columns.write_to_disk()
                        bar.update(columns.number - bar.n)
                        get_phases().enter_phase(
                            f"listing {layout.root}: {columns.number:,} {noun}, part {number:,} of {len(partitions):,}"
                        )
                state = {"done": number, "notes": dict(layout.notes)} | columns.get_state()
                if time.monotonic() - synced > _SYNC:
                    sync_to_disk()
                    synced = time.monotonic()
        finally:
            if state is not None:
                sync_to_disk()
        bar.update(columns.number - bar.n)


def _wait_past_modification_times(stats: list[list[int | str]]) -> None:
    """Waits until 20 ms after the latest modification time in `stats`, so that any later change gets a later time.
    stats: the result of `_read_file_stats`.
    """
    times = [int(version) for _, version in stats if str(version).isdecimal()]
    while times and 0 <= time.time_ns() - max(times) < _TICK:
        time.sleep(_TICK / 4e9)


def _resume_columns(
    unfinished_folder: Path, journal: Path, plan: dict[str, Any], layout: Layout
) -> tuple[Columns | None, int]:
    """Returns the columns that an interrupted command has written, and the number of pieces whose samples are in them.
    Restores `layout.notes`, and cuts off what was written after the last line of the journal.

    Returns (None, 0) if there are no such columns, or if the command had another `plan`.
    """
    try:
        lines.remove_partial_last_line(journal)
        first, *rows = [json.loads(line) for line in journal.read_text().splitlines()]
        if first != plan or not rows:
            return None, 0
        for name, size in rows[-1]["sizes"].items():
            if os.stat(unfinished_folder / f"{name}.bin").st_size < size:
                return None, 0
            os.truncate(unfinished_folder / f"{name}.bin", size)
        layout.notes = rows[-1]["notes"]
        return Columns(unfinished_folder, layout.classes, rows[-1]), rows[-1]["done"]
    except (OSError, ValueError, KeyError, TypeError):
        return None, 0
