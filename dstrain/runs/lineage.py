"""Checks which run has written the checkpoints in a run's folder: this run, the run that it is a copy of, or another
one.

Each manifest names the run that has written it, by its identity (disk/owner.py), as extra["run"]. The folder's file
`.ancestors` lists other identities, one a line, whose checkpoints also belong to this run: a copy of a run gets a new
identity, and lists the identity of the original. A folder without an identity, such as one whose hidden files were
deleted, accepts all checkpoints in it.
"""

import re
import time
from contextlib import suppress
from pathlib import Path

from dstrain.checkpoint.manifest import read_manifest
from dstrain.checkpoint.store import Store
from dstrain.disk import atomic, owner, small
from dstrain.recipe import ConfigError

ANCESTORS = ".ancestors"
_NEWEST = 10  # checkpoints that are looked at: a run goes on from one of them


def require_no_foreign_checkpoints(folder: Path, step: int | None) -> None:
    """Raises ConfigError if another run has written one of the ten newest checkpoints in the folder, or the one at
    `step`. Compares the identity of the run, a random id in its folder, with the identities in the checkpoints. Accepts
    checkpoints without an identity, and accepts all if the folder has no identity.
    """
    own = owner.read_run_identity(folder)
    if own is None:
        return
    known = {own, *_read_ancestor_runs(folder)}
    writers = _read_checkpoint_writers(folder, step)
    foreign = [number for number, writer in writers.items() if writer not in known]
    if not foreign:
        return
    path = folder / "checkpoints" / f"step_{foreign[0]:08d}"
    raise ConfigError(
        f"{path} was written by another run ({writers[foreign[0]][:8]}, and {folder} is {own[:8]}): move it away, or "
        "give --allow-change if the run is to go on from it; to begin with another run's weights, name it as "
        "init_from= of a new folder"
    )


def append_ancestor_runs(folder: Path, adopt_checkpoint_writers: bool) -> None:
    """Appends to the folder's .ancestors the identities (random ids) of other runs from whose checkpoints this run may
    resume: the folder's own identity if the folder is a copy of another run's, and, if `adopt_checkpoint_writers` or if
    the folder has no identity yet, those of the writers of the ten newest checkpoints. Writes nothing if all are listed
    already.

    Call it before the folder gets a new identity. Raises OSError if the file cannot be written.
    """
    own, known = owner.read_run_identity(folder), _read_ancestor_runs(folder)
    found = {own} if own and owner.find_other_owning_run(folder, folder) else set()  # a copy's, which is renewed
    if adopt_checkpoint_writers or own is None:
        found |= {*_read_checkpoint_writers(folder, None).values()} - {own}
    if new := sorted(found - {*known}):
        atomic.write_file(folder / ANCESTORS, "".join(f"{identity}\n" for identity in [*known, *new]))


def refuse_link_to_foreign_checkpoints(folder: Path) -> None:
    """Raises ConfigError if the folder's `checkpoints` is a symbolic link to checkpoints of another run. A copy of a
    run's folder can hold such a link.
    """
    checkpoints = folder / "checkpoints"
    if checkpoints.is_symlink() and (other := owner.find_other_owning_run(checkpoints, folder)):
        target = checkpoints.resolve()
        raise ConfigError(
            f"{folder}: checkpoints is a link to {target}, which are also the checkpoints of {other}: copy them, and "
            f"let the link name the copy; or, if that run is no more, remove {target / owner.IDENTITY}"
        )


def claim_checkpoint_folder(checkpoints: Path) -> None:
    """Claims a folder of checkpoints on another disk for this process. Waits up to 35 s for another process that has
    claimed it. Raises ConfigError if that process still has it then.
    """
    end = time.monotonic() + owner.SILENT_SECONDS + owner.BEAT_SECONDS
    while True:
        try:
            owner.claim_folder(checkpoints, "train")
            return
        except owner.Held as held:
            if time.monotonic() > end:
                raise ConfigError(
                    f"{checkpoints} is a link to {checkpoints.resolve()}, into which another process trains ({held}): "
                    "copy these checkpoints, and let the link name the copy"
                ) from None
        time.sleep(0.5)


def _read_ancestor_runs(folder: Path) -> list[str]:
    """Returns the identities (random ids of runs) in the folder's .ancestors; [] if the file is missing or cannot be
    read.
    """
    with suppress(OSError, UnicodeDecodeError):
        return small.read_text(folder / ANCESTORS, small.MEGABYTE).split()
    return []


def _read_checkpoint_writers(folder: Path, step: int | None) -> dict[int, str]:
    """Returns {step: identity} for the ten newest checkpoints and, unless `step` is None, for the one at `step`. The
    identity is the random id of the run that has written the checkpoint. Leaves out damaged checkpoints, and those of
    earlier versions, which name no run.
    """
    writers: dict[int, str] = {}
    steps = Store(folder / "checkpoints").list_steps()
    for number in sorted({*steps[-_NEWEST:], *(one for one in steps if one == step)}, reverse=True):
        with suppress(OSError, ConfigError):  # a damaged one is passed over where it is read
            writer = read_manifest(folder / "checkpoints" / f"step_{number:08d}")["extra"].get("run")
            if isinstance(writer, str) and re.fullmatch("[0-9a-f]{32}", writer):
                writers[number] = writer
    return writers
