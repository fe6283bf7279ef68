"""Manages the folder of a run: what it holds, whether a command may start or resume in it, and its lock.

run.yaml           the whole recipe as resolved          ds_config.json   the whole DeepSpeed config as resolved
data.txt           fingerprint of the data               saved            the last step that was saved; 0: none yet
checkpoints/       step_N/, see dstrain/checkpoint/store.py  samples/         step_N.png, grids from the EMA
averages/          snapshots of averages by width        reconstructed/   averages made of these by dstrain reconstruct
metrics.jsonl      a line per report                     log.txt          what was printed
bad_files.txt      unreadable files, with reasons        wandb/           the tracker's own
events.jsonl       starts and rollbacks                 report.html      the run's report for people
earlier_N/         --from-scratch, --step put it here   stop             make this file to stop the run
index/             the list of samples of large data  model/           the weights that track.artifact uploads
.run, .lease-N     whose the folder is, see disk/owner.py
"""

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from dstrain.disk import atomic, owner, small
from dstrain.disk.modes import apply_umask
from dstrain.distributed import group
from dstrain.distributed.progress import get_phases
from dstrain.recipe import (
    ConfigError,
    Run,
    dump_run,
    explain_write_errors,
    list_refused_changes,
    load_recipe,
    make_refused_changes_error,
    require_known_keys,
    reword_errors,
)
from dstrain.runs.lineage import (
    ANCESTORS,
    append_ancestor_runs,
    claim_checkpoint_folder,
    refuse_link_to_foreign_checkpoints,
    require_no_foreign_checkpoints,
)
from dstrain.runs.resume import Resume
from dstrain.systems import find_config_class

# All that a run writes; --from-scratch moves this and nothing else.
OF_RUN = (
    *("run.yaml", "ds_config.json", "data.txt", "saved", "metrics.jsonl", "events.jsonl", owner.IDENTITY),
    *("checkpoints", "averages", "reconstructed", "samples", "evaluation", "log.txt", "bad_files.txt", "restarts.log"),
    *("report.html", "wandb", "wandb_id", "tensorboard", "model", "profile", "stacks", "stop", ANCESTORS),
)
_MARKS = OF_RUN[:7]  # two of them, or one beside checkpoints, are a run's
_BESIDE = re.compile(  # what may lie beside a run, and stays
    r"\..*|earlier_.*|index.*|generated(_\d+)?|metrics_data_.*\.npz"
)


def require_start_allowed_in_folder(run: Run, fingerprint: str, resume: Resume) -> None:
    """Raises ConfigError, with the remedy, if this run may not start or resume in its folder. The folder must not hold
    foreign files, links, imported weights, another run's checkpoints, a run with another recipe or other data, or a run
    that has lost its checkpoints. `resume.allow_change` permits another recipe, other data and another run's
    checkpoints; `resume.from_scratch` skips all checks of an earlier run. Changes nothing.
    """
    folder = run.directory
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"folder={folder} is a file; name a folder")
    if not folder.exists():
        return
    strangers = sorted(
        path.name for path in folder.iterdir() if not _BESIDE.fullmatch(path.name) and path.name not in OF_RUN
    )
    if not _is_run_folder(folder) and (strangers or any((folder / name).exists() for name in OF_RUN)):
        names = strangers or sorted(path.name for path in folder.iterdir() if path.name in OF_RUN)
        raise ConfigError(
            f"folder={folder} is not a run's: it holds {', '.join(names[:3])}; name another folder, since nothing of "
            "this is moved"
        )
    if resume.from_scratch:
        return
    require_no_symbolic_links(folder)
    refuse_link_to_foreign_checkpoints(folder)
    if (folder / "checkpoints" / "step_00000000").is_dir():
        raise ConfigError(
            f"folder={folder} holds imported weights, and no moments to go on with: train in another "
            f"folder= with init_from={folder}"
        )
    if not (folder / "run.yaml").exists():
        if any(os.path.lexists(folder / name) for name in OF_RUN if name != owner.IDENTITY):
            raise ConfigError(
                f"folder={folder} holds what is left of a run, and no run.yaml: put it back from a copy, or begin anew "
                "with --from-scratch, which moves the rest aside"
            )
        return
    if lost := _describe_lost_checkpoints(folder):
        raise ConfigError(
            f"{folder} {lost}: put back what is gone, or begin anew with --from-scratch, which moves the rest aside"
        )
    if not resume.allow_change:
        require_no_foreign_checkpoints(folder, resume.step)
    if resume.allow_change or not read_last_saved_step(folder):  # without a saved step, no run would be changed
        return
    if changes := list_refused_changes(read_recipe(folder), run, system := find_config_class(run.system)):
        raise make_refused_changes_error(changes, folder / "run.yaml", system)
    if not (earlier := small.read_stripped_text(folder / "data.txt")):
        raise ConfigError(
            f"{folder / 'data.txt'} is gone or damaged, and it says on which data the run was trained: "
            f"put it back, or give --allow-change, if these are data.path={run.data.path}"
        )
    if not is_same_data(earlier, fingerprint):
        raise ConfigError(
            f"data.path={run.data.path} is not what {folder} was trained on: {fingerprint!r} now, "
            f"{earlier!r} before; put the files back, name another folder=, or give --allow-change"
        )


def _is_run_folder(folder: Path) -> bool:
    """Returns whether a folder holds, or has held, a run: it holds two of the files that only runs write, or one of
    these and checkpoints, or a run's identity and no step_* beside that. samples/ alone, a common name, is not enough.
    """
    marks = sum(os.path.lexists(folder / name) for name in _MARKS)
    if marks > 1 or (marks > 0 and _list_checkpoint_steps(folder)):
        return True
    return owner.read_run_identity(folder) is not None and not any(folder.glob("step_*"))  # else another's checkpoints


def require_no_symbolic_links(folder: Path) -> None:
    """Raises ConfigError if a file or folder of a run is a symbolic link, through which others' files could be changed.
    `checkpoints` may be a link to a folder, as on a larger disk, unless another run's folder holds that folder.
    """
    for path in (folder / name for name in (*OF_RUN, "index")):
        if not path.is_symlink():
            continue
        target = path.resolve()
        if path.name != "checkpoints" or (target.parent != folder.resolve() and (target.parent / "run.yaml").exists()):
            raise _make_symbolic_link_error(path)


def _make_symbolic_link_error(path: Path) -> ConfigError:
    """Returns a ConfigError: `path`, in a run's folder, is a link, and nothing is written through it."""
    return ConfigError(
        f"{path.parent}: {path.name} is a link to {path.resolve()}, and nothing is written through a link: put what it "
        "names in its place, or remove it"
    )


def check_and_prepare_run_folder(run: Run, fingerprint: str, resume: Resume) -> None:
    """Checks as `require_start_allowed_in_folder` does, then prepares the folder, which this process has locked. Moves
    an earlier run into earlier_N if `resume.from_scratch`. Writes the run's identity, a random id. In a copy of another
    run's folder a new identity replaces the copied one, and the copied wandb_id is removed. Raises ConfigError also if
    the folder cannot be written.
    """
    require_start_allowed_in_folder(run, fingerprint, resume)
    folder, checkpoints = run.directory, run.directory / "checkpoints"
    with explain_disk_errors(folder):
        if resume.from_scratch:
            _require_no_readers(checkpoints.glob("step_*"))
            move_run_aside(folder)
        if linked := checkpoints.is_symlink():
            claim_checkpoint_folder(checkpoints)
            refuse_link_to_foreign_checkpoints(folder)
        earlier = owner.read_run_identity(folder)
        if not resume.from_scratch:
            append_ancestor_runs(folder, resume.allow_change)
        if owner.write_folder_identity(folder).identity != earlier and earlier:
            (folder / "wandb_id").unlink(missing_ok=True)  # it came here with a copy of another run
        if linked:
            owner.write_folder_identity(checkpoints, folder)


def _describe_lost_checkpoints(folder: Path) -> str | None:
    """Returns how the run's checkpoints were lost, such as "has saved step 40 and ..."; None if none were lost."""
    checkpoints, steps, noted = folder / "checkpoints", _list_checkpoint_steps(folder), _read_saved_step(folder)
    if checkpoints.is_symlink() and not checkpoints.exists():
        return f"has the link checkpoints, and {os.readlink(checkpoints)} is not there"
    if checkpoints.exists() and not checkpoints.is_dir():
        return "has a file checkpoints where the folder of this name belongs"
    if steps or noted == 0:
        return None
    if noted:
        return f"has saved step {noted} and holds no checkpoint now"
    if (folder / "saved").exists():
        return "holds no checkpoint, and its file `saved`, which names the last one, is damaged"
    reports, pictures = folder / "metrics.jsonl", folder / "samples"
    if (reports.is_file() and reports.stat().st_size) or (pictures.is_dir() and any(pictures.iterdir())):
        return "holds what training has reported, and neither a checkpoint nor the file `saved`"
    return None


def read_recipe(folder: Path) -> Run:
    """Reads the recipe that a run was trained with, with all defaults, and sets its `folder` to the given one. Raises
    ConfigError if run.yaml cannot be read, is empty or has unknown keys, or if the folder holds links.
    """
    require_no_symbolic_links(folder)
    if small.read_stripped_text(folder / "run.yaml", small.MEGABYTE) == "":
        raise ConfigError(f"{folder / 'run.yaml'} is empty: put it back from a copy, or train anew with --from-scratch")
    with reword_errors(options={"--recipe ": ""}):
        run = load_recipe(folder / "run.yaml")
    with reword_errors(f"{folder}: "):
        system = find_config_class(run.system)
        run = run.model_copy(update={"folder": folder, "model": system.complete_saved_section(run.model)})
        require_known_keys(run, system)
    return run


def is_same_data(earlier_fingerprint: str, fingerprint: str) -> bool:
    """Returns whether two fingerprints are of the same data; of `earlier_fingerprint` an old dstrain may have saved
    only a beginning.
    """
    return f"{fingerprint} ".startswith(f"{earlier_fingerprint} ")


class Claimed:
    """Holds a folder's lock and lease until `close` or the end of its block; only this process writes there then."""

    def __init__(self, folder: Path, lock: IO[str]) -> None:
        self._folder, self._lock = folder, lock

    def close(self) -> None:
        """Releases the lock and the lease of the folder. Later calls do nothing."""
        if not self._lock.closed:
            owner.release_folder_claim(self._folder / "checkpoints")  # claimed where it is a link
            owner.release_folder_claim(self._folder)
            self._lock.close()

    def __enter__(self) -> "Claimed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lock_folder(folder: Path, patience: float = 60.0, busy_message: str | None = None, verb: str = "train") -> Claimed:
    """Claims a folder for this process by a lock and a lease (disk/owner.py), and makes it if it is missing. Call it on
    rank 0 only. Waits up to `patience` seconds while another process has the folder. `verb`, what this command does
    there, is shown to others. Raises ConfigError if the folder cannot be written, or, with the message `busy_message`
    (None: one about training), if another process still has it.
    """
    get_phases().enter_phase(f"waiting for another command in {folder}, {patience:g} s at most")
    end = time.monotonic() + patience
    file = _open_lock_file(folder)
    while True:
        holder = ""
        try:
            with _ignore_unsupported_locks():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:
                with explain_disk_errors(folder):
                    owner.claim_folder(folder, verb)
                    os.utime(file.fileno())  # when this command began, for tracking/report/state.py
                return Claimed(folder, file)
            file.close()  # its last holder removed the folder, and with it this file
            file = _open_lock_file(folder)
        except owner.Held as held:
            holder = f" ({held})"
        except BlockingIOError:
            pass
        if time.monotonic() > end:
            file.close()
            raise ConfigError(
                busy_message
                or f"folder={folder}: another process trains in it{holder}; name another folder=, or "
                f"stop that one first (touch {folder / 'stop'})"
            ) from None
        time.sleep(0.5)


@contextmanager
def _ignore_unsupported_locks() -> Iterator[None]:
    """Suppresses an OSError in the block, as of a file system without locks, except BlockingIOError (lock is held)."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError:
        pass


@contextmanager
def claim_output_folder(out: Path, option: str, verb: str) -> Iterator[None]:
    """Makes the folder `out`, and keeps other commands from writing there within the block. Then waits for all ranks,
    and removes the folder if it is new and empty. Call it on all ranks. `verb`, what this command does, is shown to
    others. Raises ConfigError on all ranks if another command writes there, or if the folder cannot be written; the
    message begins with `option`, such as "--out DIR".
    """
    problem, is_new = None, False
    if group.rank() == 0:
        is_new = not out.exists()
        try:
            with explain_write_errors(option, "name a folder that can be written"):
                out.mkdir(parents=True, exist_ok=True)
                owner.claim_folder(out, verb)
        except owner.Held as held:
            problem = f"{option}: another command writes there, {held}; wait for its end, or name another folder"
        except ConfigError as error:
            problem = str(error)
    try:
        if problem := group.broadcast_from_first(problem):
            raise ConfigError(problem)
        broadcast_folder_claim(out)
        yield
        group.barrier()
    finally:
        owner.release_folder_claim(out)
        if is_new:
            with suppress(OSError):  # a folder that is not empty stays
                out.rmdir()


def broadcast_folder_claim(folder: Path) -> None:
    """Tells every rank of the claim that rank 0 has on the folder; a rank checks it before each write there. Call it on
    all ranks. Waits up to 20 s until this rank sees the folder's identity, which a network file system may show late.
    """
    claim, end = group.broadcast_from_first(owner.find_claim(folder)), time.monotonic() + 20
    while claim and claim.identity and owner.read_run_identity(folder) != claim.identity and time.monotonic() < end:
        time.sleep(0.2)
    owner.register_claim(folder, claim)


def _open_lock_file(folder: Path) -> IO[str]:
    """Opens the folder's .lock for appending, and makes both if they are missing. Raises ConfigError if this fails."""
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / ".lock").is_symlink():
            raise _make_symbolic_link_error(folder / ".lock")
        # Without waiting for the reader of a pipe, and through no link.
        return open(
            folder / ".lock",
            "a",
            encoding="utf-8",
            opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666),
        )


def explain_disk_errors(folder: Path) -> AbstractContextManager[None]:
    """Returns a context manager that turns an OSError (a full disk, say) into a ConfigError that names folder=."""
    return explain_write_errors(f"folder={folder}", "make room there, or name another folder=")


def remove_folder_if_unused(folder: Path) -> None:
    """Removes a folder if it holds nothing but files of locks and leases. Call it on rank 0 only."""
    if all(path.name.startswith((".lock", ".lease-")) for path in folder.iterdir()):
        shutil.rmtree(folder)


def write_run_files(run: Run, settings: dict[str, Any], fingerprint: str) -> None:
    """Writes run.yaml, data.txt and ds_config.json into a run's folder, and `saved` if it is missing or damaged. Call
    it on rank 0 only, after `require_start_allowed_in_folder`. Raises ConfigError if a file cannot be written.
    """
    folder = run.directory
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if _read_saved_step(folder) is None:
            write_saved_step(folder, read_last_saved_step(folder))
        for name, text in (
            ("run.yaml", dump_run(run)),
            ("data.txt", fingerprint + "\n"),
            ("ds_config.json", json.dumps(settings, indent=2) + "\n"),
        ):
            atomic.write_file(folder / name, text)


@contextmanager
def create_output_folder_atomically(out: Path) -> Iterator[Path]:
    """Yields a temporary folder for the block to fill; renames it to `out` at the end, or removes it after an error.

    Raises ConfigError if `out` exists and is not an empty folder, or if it cannot be written.
    """
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ConfigError(f"--out {out} is there already: name a new folder")
    try:
        with atomic.create_folder_atomically(out) as temporary:
            yield temporary
            apply_umask(temporary)
    except (OSError, SafetensorError) as error:  # a full disk raises either
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST) and out.exists():
            raise ConfigError(f"--out {out} was made by another command meanwhile: name a new folder") from None
        raise ConfigError(
            f"--out {out} cannot be written ({getattr(error, 'strerror', None) or error}): name a folder "
            "that can be written and has room"
        ) from None


def require_step_within_run(run: Run, step: int) -> None:
    """Raises ConfigError if `step`, the step of the checkpoint to resume from, is greater than the recipe's `steps`."""
    if step > run.steps:
        raise ConfigError(
            f"steps={run.steps}, and {run.directory / 'checkpoints'} is at step {step} already; raise "
            "steps=, or begin anew with --from-scratch"
        )


def read_last_saved_step(folder: Path) -> int:
    """Returns the largest step that the file `saved` or the name of a checkpoint gives; 0 if there is none."""
    return max(_read_saved_step(folder) or 0, *_list_checkpoint_steps(folder), 0)


def _read_saved_step(folder: Path) -> int | None:
    """Returns the step in the file `saved`, or None if the file is absent or damaged."""
    text = small.read_stripped_text(folder / "saved") or ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _list_checkpoint_steps(folder: Path) -> list[int]:
    """Returns the steps of a run's checkpoints, whole or damaged, in no order. Unfinished ones (*.tmp) are left out."""
    names = [path.name for path in (folder / "checkpoints").glob("step_*[0-9]") if path.is_dir()]
    return [int(name[5:]) for name in names if name[5:].isdigit()]


def read_earlier_deepspeed_settings(folder: Path) -> dict[str, Any]:
    """Returns the content of a run's ds_config.json; {} if no step of the run was saved or the file cannot be read."""
    try:
        settings = small.read_json(folder / "ds_config.json") if read_last_saved_step(folder) else {}
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def write_saved_step(folder: Path, step: int) -> None:
    """Writes `step` into a run's file `saved`. Raises OSError if the folder is gone or cannot be written."""
    atomic.write_file(folder / "saved", f"{step}\n", make_parent=False)  # a run's folder that was taken away stays so


def move_run_aside(folder: Path) -> None:
    """Moves all that an earlier run has written into a new folder earlier_N, so that a new start loses nothing. Other
    files stay. Makes no folder if there is nothing to move. Raises OSError if something cannot be moved.
    """
    if old := [folder / name for name in OF_RUN if os.path.lexists(folder / name)]:
        earlier = _make_folder_for_earlier_run(folder)
        for path in old:
            if path.is_symlink():  # a relative one would name another place from there
                (earlier / path.name).symlink_to(os.path.realpath(path))
                path.unlink()
            else:
                path.rename(earlier / path.name)


def move_newer_steps_aside(folder: Path, step: int) -> None:
    """Moves checkpoints and averages after `step` into a new folder earlier_N, the newest first, with a copy of
    metrics.jsonl. Then writes `step` into `saved`. Does nothing if nothing is newer. Raises ConfigError if another
    command reads what is to be moved, or if the disk fails.
    """
    newer = [
        path
        for kind in ("checkpoints", "averages", "reconstructed/*")
        for path in folder.glob(f"{kind}/step_*")
        if (number := path.name[5:].partition(".")[0]).isdecimal() and int(number) > step and path.suffix != ".tmp"
    ]
    if not newer:
        return
    _require_no_readers(newer)
    with explain_disk_errors(folder):
        earlier = _make_folder_for_earlier_run(folder)
        if (folder / "metrics.jsonl").is_file():
            shutil.copyfile(folder / "metrics.jsonl", earlier / "metrics.jsonl")
        if (folder / "checkpoints").is_symlink():  # on another disk, where they stay
            (earlier / "checkpoints").symlink_to(_make_folder_for_earlier_run((folder / "checkpoints").resolve()))
        for path in sorted(newer, key=lambda path: int(path.name[5:].partition(".")[0]), reverse=True):
            (target := earlier / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        write_saved_step(folder, step)


def _require_no_readers(paths: Iterable[Path]) -> None:
    """Raises ConfigError if another command is reading one of the paths (disk/owner.py), which are to be moved."""
    for path in paths:
        if owner.is_held_by_reader(path):
            raise ConfigError(f"{path} is being read by another command: wait for its end, and give this one again")


def _make_folder_for_earlier_run(folder: Path) -> Path:
    """Makes the first folder earlier_N in `folder` that does not exist yet, and returns its path."""
    number = 1 + sum(1 for _ in folder.glob("earlier_*"))
    while (folder / f"earlier_{number}").exists():
        number += 1
    (folder / f"earlier_{number}").mkdir()
    return folder / f"earlier_{number}"


def describe_run_end(
    run: Run, folder: Path, first_step: int, done: int, saved_step: int, reason: str | None, work_left: bool = False
) -> str:
    """Returns the last line that training prints: how the run ended, and what to do next. This command began at step
    `first_step` and ended at step `done`; `saved_step` is the last saved one. `reason`: why it stopped early; None:
    another rank was stopped. `work_left`: it stopped before the samples and metrics after its last step were made.
    """
    if first_step == run.steps and not work_left:
        return f"{folder} is complete: {run.steps} steps. Raise steps= to train on, or name another folder."
    if done == run.steps and not work_left:
        drawn = f", samples in {folder / 'samples'}" if (folder / "samples").is_dir() else ""
        return f"complete: {done} steps, saved in {folder / 'checkpoints'}{drawn}"
    reason = reason or "another rank was stopped"
    return f"stopped at step {done} ({reason}), step {saved_step} is saved; the same command goes on"
