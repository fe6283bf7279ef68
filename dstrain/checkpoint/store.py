"""Keeps a folder of checkpoints that survives kill -9, a full disk and damaged files.

    FOLDER/step_00000500/       a whole checkpoint: files and manifest.json
    FOLDER/step_00000550.MARK.tmp/   being written, or left over by a crash; removed at the next begin
    FOLDER/step_00000500.aside/ later than the step of a rollback; kept until a later step is whole again
    FOLDER/newest               the newest step, for people and scripts; resume does not trust it
    FOLDER/best                 likewise: the step whose manifest has the lowest score of one metric

The manifest is written last and synced, and then the folder is renamed. A step whose hashes agree is never written
again. All ranks share the folder. Every method but list_steps() and list_steps_put_aside() is called on all ranks and
has the same outcome on all of them, whatever fails on one rank. What the files must hold is checked by `check` alone.

A rank hashes its own files and sends one list to rank 0, which writes the manifest: a folder holds files of every rank,
and if each of a thousand ranks listed them with their sizes, the file system would get a million requests.
"""

import itertools
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import dstrain
from dstrain.checkpoint.manifest import NAME, find_file_faults, hash_files, read_manifest
from dstrain.disk import atomic, owner
from dstrain.disk.sealed import render_json_with_hash
from dstrain.distributed import group
from dstrain.recipe import ConfigError, NotSaved

Hashes = dict[str, dict[str, Any]]  # size and hash of files by name
_WRITTEN_BY = re.compile(r".*-(\d{5,})-of-\d{5,}\.\w+")

_ASIDE = ".aside"
ROUTINE, STOP, TROUBLE = "routine", "stop", "trouble"  # kinds of checkpoints, see Store.commit_save


class Store:
    """Saves checkpoints in `folder`. Keeps the newest `keep`, the newest `keep` routine ones (see `commit_save`), those
    whose step is a multiple of `keep_every` (0: none), and the best one.

    metric   the name of the score whose lowest value is the best
    check    is called on rank 0 with a checkpoint whose hashes agree; raises an error if its files cannot be used
    finish   is called on all ranks when all have written, and returns {name: {size, hash}} of files that it has added

    After a call that failed, `error` is the reason, on all ranks.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        keep: int = 2,
        keep_every: int = 0,
        check: Callable[[Path], None] = lambda path: None,
        metric: str = "loss",
        finish: Callable[[Path], Hashes] = lambda path: {},
    ) -> None:
        self.folder, self.keep, self.keep_every, self._check = Path(folder), keep, keep_every, check
        self.metric, self._finish = metric, finish
        self._makes_parents = not self.folder.parent.is_dir()  # a run's folder that is taken away stays so
        self.error: str | None = None
        self.damaged: set[int] = set()  # steps that find_newest_checkpoint passed over
        self._mark = ""  # of the step that is written: no other process has a folder of this name

    def save(
        self, step: int, write: Callable[[Path], Hashes | None], extra: dict | None = None, need_bytes: int = 0
    ) -> bool:
        """Saves a step: calls `begin_save`, `write(folder)` on every rank, and `commit_save`. Returns whether there is
        now a whole checkpoint of the step. Call it on all ranks.

        write: writes this rank's files; returns {name: {size, hash}} of files that it has hashed and flushed to the
            disk already
        extra: see `commit_save`
        need_bytes: see `begin_save`
        """
        folder = self.begin_save(step, need_bytes)
        if folder is None:
            return self.error is None
        failed, hashed = None, None
        try:
            hashed = write(folder)
        except Exception as error:  # the other ranks wait in commit
            failed = describe_error(error)
        return self.commit_save(step, extra, failed, hashed)

    def begin_save(self, step: int, need_bytes: int = 0) -> Path | None:
        """Makes an empty temporary folder for the files of `step`, and returns it. Removes temporary folders of earlier
        attempts. Call it on all ranks.

        need_bytes: how many bytes this rank will write

        Returns None if the step has a whole checkpoint already; then `error` is None. Returns None also if the folder
        cannot be made, for example for lack of space; then `error` says why.
        """
        self.error = None
        if self.find_checkpoint_fault(step) is None:
            return None
        needed = sum(group.gather_objects(int(need_bytes)))
        self._mark = group.broadcast_from_first(owner.make_owner_mark())
        tmp = self._make_step_path(step, f".{self._mark}.tmp")

        def prepare_folder() -> None:
            owner.require_claim_not_lost(self.folder)
            self.folder.mkdir(parents=self._makes_parents, exist_ok=True)
            for leftover in self.folder.glob("step_*.tmp"):
                owner.remove_path(leftover)
            free = shutil.disk_usage(self.folder).free
            if needed > free:
                raise ConfigError(f"{self.folder} has {free / 1e6:.1f} MB free, {needed / 1e6:.1f} MB are needed")
            tmp.mkdir()

        self.error = self._run_on_rank_0(prepare_folder)
        return tmp if self.error is None else None

    def commit_save(
        self, step: int, extra: dict | None = None, failed: str | None = None, hashed: Hashes | None = None
    ) -> bool:
        """Turns the files that the ranks have written since `begin_save` into a checkpoint: writes the manifest,
        renames the folder, and deletes outdated checkpoints. Returns whether this succeeded; if not, the temporary
        folder is deleted, and older checkpoints stay. Call it on all ranks.

        failed: why this rank could not write its files; None: it could
        hashed: {name: {size, hash}} of files that this rank has hashed while it wrote them
        extra: a small dict of rank 0 for the manifest, with any of these entries:
            "score", "metric": the score by which the best checkpoint is chosen, and its name (default: loss)
            "kind": ROUTINE (default); STOP, if the run was stopped here; TROUBLE, if steps were not applied
            "stays": further steps whose checkpoints to keep
            "run": the run's identity, set here

        A STOP checkpoint replaces no routine one. A TROUBLE one replaces none, and is deleted after a newer one.
        """
        tmp = self._make_step_path(step, f".{self._mark}.tmp")
        self.error = find_first_failure(group.gather_objects(failed))
        if self.error is None:
            files, self.error = hash_files_across_ranks(tmp, hashed or {}, self._finish)
        if self.error is None:
            claim = owner.find_claim(self.folder.parent)
            writer = {"run": claim.identity} if claim and claim.identity else {}
            body = {
                "files": files,
                "step": step,
                "world": group.world(),
                "extra": writer | (extra or {}),
                "versions": {"dstrain": dstrain.__version__, "torch": torch.__version__},
            }
            self.error = self._run_on_rank_0(lambda: self._publish_step(step, tmp, body))
        if self.error is not None:
            self._run_on_rank_0(lambda: shutil.rmtree(tmp, ignore_errors=True))
            return False
        self.damaged.discard(step)
        # The step is saved, whatever fails from here on.
        self._run_on_rank_0(lambda: self._write_pointer_file("newest", step))
        self._run_on_rank_0(self._delete_outdated_steps)
        return True

    def find_best_checkpoint(self) -> tuple[int, float] | None:
        """Returns (step, score) of the checkpoint with the lowest finite score of this store's `metric`; the first one
        if several have it. Returns None if no checkpoint has a score of this metric.
        """
        scores = {
            step: extra.get("score")
            for step, extra in self._read_manifest_extras().items()
            if extra.get("metric", "loss") == self.metric
        }
        scored = [
            (float(score), step)
            for step, score in scores.items()
            if isinstance(score, (int, float)) and math.isfinite(score)
        ]
        return min(scored)[::-1] if scored else None

    def add_score(self, step: int, score: float) -> None:
        """Writes a score, measured after the step was saved, into the manifest of the step. Does nothing if the step
        has no readable manifest, and ignores failures. Call it on all ranks.
        """
        self.add_manifest_entries(step, score=score, metric=self.metric)

    def add_manifest_entries(self, step: int, **entries: Any) -> None:
        """Adds entries to the dict "extra" in the manifest of a step, then deletes outdated checkpoints. Does nothing
        if the step has no readable manifest, and ignores failures. Call it on all ranks.
        """

        def write_entries() -> None:
            body = read_manifest(self._make_step_path(step))
            body["extra"] |= entries
            atomic.write_file(self._make_step_path(step) / NAME, render_json_with_hash(body), make_parent=False)
            self._delete_outdated_steps()

        self._run_on_rank_0(write_entries)

    def list_possible_rollback_steps(self, before: int, latest_rollback: int | None = None) -> list[int]:
        """Returns the steps, at most `before`, to which a run in trouble may go back: those of routine checkpoints; if
        there are none, those of checkpoints at which the run was stopped. Does not verify their files. Call it on all
        ranks.

        latest_rollback: the step of the latest rollback, which did not help if it is still the newest of these steps:
            then returns only earlier ones. None: there was no rollback
        """
        kinds = {
            step: extra.get("kind", ROUTINE)
            for step, extra in group.broadcast_from_first(self._read_manifest_extras()).items()
        }
        by_kind = [
            [step for step, kind in kinds.items() if kind == wanted and step <= before] for wanted in (ROUTINE, STOP)
        ]
        if latest_rollback is not None and max(by_kind[0] or by_kind[1], default=None) == latest_rollback:
            by_kind = [[step for step in steps if step < latest_rollback] for steps in by_kind]
        return by_kind[0] or by_kind[1]

    def find_newest_checkpoint(
        self, report: Callable[[str], None] = print, among: list[int] | None = None
    ) -> tuple[int, Path] | None:
        """Returns (step, folder) of the newest checkpoint whose files are whole; None if there is none. Passes over a
        damaged one, and adds its step to `damaged`. Call it on all ranks.

        report: is called on rank 0 with a line about each damaged checkpoint
        among: the steps to look at; None: all
        """
        for step in sorted(group.broadcast_from_first(self.list_steps()) if among is None else among, reverse=True):
            reason = self.find_checkpoint_fault(step)
            if reason is None:
                return step, self._make_step_path(step)
            self.damaged.add(step)
            if _is_first_rank():
                report(f"checkpoint {self._make_step_path(step)} is damaged and passed over: {reason}")
        return None

    def list_steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, ascending, whether it is whole or damaged."""
        return self._list_steps_with_suffix("")

    def list_steps_put_aside(self) -> list[int]:
        """Returns the steps whose checkpoints `set_newer_steps_aside` has renamed, ascending."""
        return self._list_steps_with_suffix(_ASIDE)

    def set_newer_steps_aside(self, after: int) -> None:
        """Renames the checkpoints of all steps beyond `after` to step_N.aside, so that a run which resumes ignores
        them. A step_N.aside of an earlier time is replaced. Call it on all ranks. Raises NotSaved if a rename fails.

        Renames the newest first: after a crash in between, the run has all checkpoints up to some step.
        """

        def rename_newer_steps() -> None:
            owner.require_claim_not_lost(self.folder)
            for step in reversed([step for step in self.list_steps() if step > after]):
                with suppress(OSError):
                    owner.remove_path(self._make_step_path(step, _ASIDE))  # of an earlier time
                os.rename(self._make_step_path(step), self._make_step_path(step, _ASIDE))
            atomic.fsync_folder(self.folder)
            self._write_pointer_file("newest", after)

        if reason := self._run_on_rank_0(rename_newer_steps):
            raise NotSaved(f"checkpoints after step {after} in {self.folder} cannot be put aside: {reason}")

    def restore_step_put_aside(self, step: int) -> None:
        """Undoes `set_newer_steps_aside` for one step: gives its checkpoint the old name. Ignores failures. Call it on
        all ranks.
        """
        self._run_on_rank_0(lambda: os.rename(self._make_step_path(step, _ASIDE), self._make_step_path(step)))

    def find_checkpoint_fault(self, step: int) -> str | None:
        """Returns what is damaged, missing or unusable in the checkpoint of a step, as a text; None if it is whole.
        Each rank hashes a share of the files. Call it on all ranks; all get the same result.
        """
        path, body = self._make_step_path(step), {}

        def load_step_manifest() -> None:
            body.update(read_manifest(path))
            if body["step"] != step:
                raise ConfigError(f"{NAME} is of step {body['step']}")

        if reason := self._run_on_rank_0(load_step_manifest):
            return reason
        files = group.broadcast_from_first(body)["files"]
        largest_first = sorted(files, key=lambda name: (-files[name]["size"], name))
        share = largest_first[group.rank() % group.world() :: group.world()]
        problems = list(itertools.chain.from_iterable(group.gather_objects(find_file_faults(path, share, files))))
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        return ", ".join(problems[:3]) + more or self._run_on_rank_0(lambda: self._check(path))

    def _list_steps_with_suffix(self, suffix: str) -> list[int]:
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := re.fullmatch(rf"step_(\d{{8,}}){suffix}", name)))

    def _read_manifest_extras(self) -> dict[int, dict]:
        """Returns {step: the dict "extra" of its manifest}, ascending. Leaves out steps that are in `damaged` or have
        no readable manifest.
        """
        extras = {}
        for step in self.list_steps():
            if step not in self.damaged:
                with suppress(OSError, ValueError):
                    extras[step] = read_manifest(self._make_step_path(step))["extra"]
        return extras

    def _make_step_path(self, step: int, suffix: str = "") -> Path:
        return self.folder / f"step_{step:08d}{suffix}"

    def _publish_step(self, step: int, tmp: Path, body: dict) -> None:
        """Writes the manifest into the temporary folder and renames the folder to step_N, flushed to the disk. A
        damaged checkpoint of this step is renamed first, to be deleted later.
        """
        atomic.write_file(tmp / NAME, render_json_with_hash(body), make_parent=False)
        for folder in [path for path in tmp.rglob("*") if path.is_dir()] + [tmp]:
            atomic.fsync_folder(folder)
        final = self._make_step_path(step)
        owner.require_claim_not_lost(final)
        if final.exists():  # damaged, or `begin_save` would have ended
            os.rename(final, self._make_step_path(step, ".damaged.tmp"))
        os.rename(tmp, final)
        atomic.fsync_folder(self.folder)

    def _write_pointer_file(self, pointer: str, step: int) -> None:
        """Writes the name of a step's folder into the file "newest" or "best"."""
        atomic.write_file(self.folder / pointer, f"{self._make_step_path(step).name}\n", make_parent=False)

    def _delete_outdated_steps(self) -> None:
        """Writes the file `best`, then deletes the checkpoints that need not be kept. A checkpoint that is damaged, or
        was saved in trouble, is deleted once there is a newer one. One that a process is reading is never deleted.
        """
        owner.require_claim_not_lost(self.folder)
        best = self.find_best_checkpoint()
        if best:
            self._write_pointer_file("best", best[0])
        steps, extras = self.list_steps(), self._read_manifest_extras()
        kinds = {step: extra.get("kind", ROUTINE) for step, extra in extras.items()}
        good = [step for step, kind in kinds.items() if kind != TROUBLE]
        routine = [step for step in good if kinds[step] != STOP]
        keep = {best and best[0], *good[-self.keep :], *routine[-self.keep :]}
        keep.update(step for step in good if self.keep_every and step % self.keep_every == 0)
        newest = max(kinds, default=0)
        keep.update(extras.get(newest, {}).get("stays", ()))
        outdated = [(step, "") for step in steps if step not in keep and step < newest]
        for step, suffix in outdated + [(step, _ASIDE) for step in self.list_steps_put_aside() if step <= newest]:
            path, gone = self._make_step_path(step, suffix), self._make_step_path(step, f"{suffix}.gone.tmp")
            if owner.is_held_by_reader(path):
                continue
            # A crash must not leave half a step_N. Whoever has begun to read it meanwhile gets it back.
            os.rename(path, gone)
            if owner.is_held_by_reader(path):
                os.rename(gone, path)
        for gone in self.folder.glob("step_*.tmp"):
            owner.remove_path(gone)

    def _run_on_rank_0(self, action: Callable[[], Any]) -> str | None:
        """Calls `action` on rank 0 and waits for it on all ranks. Returns the description of its error on all ranks;
        None if it succeeded.
        """
        failure = None
        if _is_first_rank():
            try:
                action()
            except Exception as error:
                failure = describe_error(error)
        return group.broadcast_from_first(failure)


def _is_first_rank() -> bool:
    return group.rank() % group.world() == 0  # before the process group is started a rank is alone


def hash_files_across_ranks(
    folder: Path, hashed: Hashes, finish: Callable[[Path], Hashes]
) -> tuple[Hashes, str | None]:
    """Hashes the files in `folder`. Returns ({name: {size, hash}} of all files on rank 0, {} on others; the reason of a
    failure on all ranks, None if there is none). Call it on all ranks.

    hashed: {name: {size, hash}} of files that this rank has hashed while it wrote them; only their sizes are compared
    finish: is called with the folder on all ranks, adds files, and returns their {name: {size, hash}}

    Each other file is hashed, and flushed to the disk, by one rank.
    """
    names, fault = list(hashed), None
    try:
        hashed = hashed | finish(folder)
        names = names or _list_files(folder)
        if short := [name for name in hashed if (folder / name).stat().st_size != hashed[name]["size"]]:
            raise OSError(f"{short[0]} has another size than was written")
    except Exception as error:
        fault = describe_error(error)
    merged, rest, failed = _merge_hashes_of_ranks(folder, group.gather_on_first_rank((hashed, names, fault)))
    if failed is not None:
        return {}, failed
    more = {}
    try:
        own = [name for name in rest if _choose_hashing_rank(name) == group.rank() % group.world()]
        more = hash_files(folder, [name for name in own if (folder / name).is_file()], sync=True)
    except Exception as error:
        fault = describe_error(error)
    merged_more, _, failed = _merge_hashes_of_ranks(folder, group.gather_on_first_rank((more, [], fault)), rest)
    return merged | merged_more, failed


def _merge_hashes_of_ranks(
    folder: Path, gathered: list[tuple[Hashes, list[str], str | None]] | None, expected: list[str] | None = None
) -> tuple[Hashes, list[str], str | None]:
    """Merges the hashes that were gathered on rank 0. Call it on all ranks. Returns:

    {name: {size, hash}} on rank 0, {} on others
    the names of files still to be hashed, on all ranks
    the reason of a failure, or None, on all ranks

    gathered: on rank 0, each rank's (hashes, names of the files that it sees, reason of a failure); None on other ranks
    expected: names that must have a hash by now, else it is a failure. None: files in `folder` without a hash are still
        to be hashed, and a file that rank 0 does not see is a failure
    """
    hashed: Hashes = {}
    rest, failed = [], None
    if gathered is not None:
        hashed = {name: entry for hashes, _, _ in gathered for name, entry in hashes.items()}
        failed = find_first_failure([fault for _, _, fault in gathered])
        try:
            present = set(_list_files(folder)) if expected is None else set(hashed)
            seen = {name for _, names, _ in gathered for name in names} | set(hashed) | set(expected or ())
            if failed is None and (unseen := sorted(seen - present)):
                failed = f"{unseen[0]} is not seen by all ranks: is {folder.parent} shared?"
            rest = sorted(present - set(hashed))
        except OSError as error:
            failed = failed or describe_error(error)
    return hashed, *group.broadcast_from_first((rest, failed))


def find_first_failure(reasons: list[str | None]) -> str | None:
    """Returns the reason of the first rank that has failed, as "rank R: reason" if there are several ranks; None if
    none has. reasons: for each rank its reason, or None if it succeeded.
    """
    for rank, failure in enumerate(reasons):
        if failure is not None:
            return failure if len(reasons) == 1 else f"rank {rank}: {failure}"
    return None


def describe_error(error: Exception) -> str:
    """Returns the message of an error: "Class: message", or the message alone for a ValueError."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _list_files(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _choose_hashing_rank(name: str) -> int:
    """Returns the rank that hashes a file: the rank whose number is in the file's name; for other names, a rank
    computed from the name.
    """
    writer = _WRITTEN_BY.fullmatch(name)
    return (int(writer[1]) if writer else zlib.crc32(name.encode())) % group.world()
