"""Checks before training that all ranks have the same folder, recipe and code, and while training that the folder is
still the run's.

On several machines, each may have another folder under the same name, an older copy of the code, or another version of
a package: training would start all the same, and its checkpoints could not be put together.
"""

import hashlib
import os
import pickle
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dstrain.disk import owner
from dstrain.distributed import group
from dstrain.distributed.progress import get_phases
from dstrain.recipe import ConfigError, NotSaved, Run, list_differences
from dstrain.runs import folders

_LOOK_SECONDS = 5.0
_looked = 0.0  # when this process compared its claim last
_SHOWN = 8  # of what differs; hundreds of ranks may say the same


def require_same_setup_on_all_ranks(run: Run, settings: dict[str, Any], patience: float = 20.0) -> None:
    """Requires that every rank has the same recipe, settings and code as rank 0, and that all ranks share the run's
    folder: within `patience` seconds each must see a file that rank 0 makes there. Call it on all ranks, once rank 0
    has claimed the folder. Does nothing in a single process.

    If something differs, rank 0 raises a ConfigError that names the difference and the remedy, and the other ranks exit
    with the same code. Rank 0 then also removes the folder if it holds no files but locks and leases.
    """
    if group.world() == 1:
        return
    get_phases().enter_phase("comparing the machines of all ranks")
    folder, machine, code = run.directory, socket.gethostname(), _collect_code_versions()
    probe = folder / group.broadcast_from_first(f".shared-{secrets.token_hex(8)}")
    with folders.explain_disk_errors(folder):
        if group.rank() == 0:
            probe.touch()
    host, first_code, config = group.broadcast_from_first((machine, code, pickle.dumps((run, settings))))
    me, first = f"rank {group.rank()} on {machine}", f"rank 0 on {host}"
    # On one machine the code differs only while somebody edits it.
    problems = [
        f"{me} has {name} {version}, {first} has {first_code[name]}: install the same on all machines"
        for name, version in code.items()
        if version != first_code[name] and machine != host
    ]
    if not problems and (changed := _list_setup_differences(*pickle.loads(config), run, settings)):
        problems.append(
            f"{me} has another recipe than {first}: {', '.join(changed)}; give all machines one command"
            ', and where their CPUs differ, true or false for an "auto" of the JSON'
        )
    if not _wait_until_path_exists(probe, patience):
        problems.append(
            f"folder={folder} is not shared: {me} does not see what {first} wrote there; put it on a file "
            "system that all machines mount, folder=/shared/NAME, say"
        )
    problems = [problem for of_rank in group.gather_objects(problems) for problem in of_rank]
    if group.rank() == 0:
        probe.unlink()
        if problems:
            folders.remove_folder_if_unused(folder)
    _end_all_ranks_if_problems(problems)


def run_on_rank_0_or_exit(action: Callable[[], None]) -> None:
    """Calls `action` on rank 0, while the other ranks wait. If `action` raises ConfigError, rank 0 raises a ConfigError
    with the same problems, and the other ranks exit with the same code. Call it on all ranks.
    """
    problems: list[str] = []
    if group.rank() == 0:
        try:
            action()
        except ConfigError as error:
            problems = error.problems
    _end_all_ranks_if_problems(group.broadcast_from_first(problems))


def require_folder_not_lost(folder: Path, patience: float = 2.0) -> None:
    """Raises NotSaved, on all ranks, if the run's folder was moved or removed while the run trains, or now belongs to
    another run. Call it on all ranks. Rank 0 waits up to `patience` seconds for a missing run.yaml, since an editor may
    be writing it, or a network file system may show it late.
    """
    fault = None
    if group.rank() == 0:
        try:
            if not _wait_until_path_exists(folder / "run.yaml", patience):
                fault = (
                    "was moved or removed while training wrote into it (its run.yaml is gone): nothing more is saved; "
                    "move it back and give the same command again"
                )
            else:
                owner.require_claim_not_lost(folder)
        except owner.TakenAway as error:
            fault = (
                f"is no longer this run's ({error.strerror}): nothing more is saved; if this run was moved, give the "
                "same command with folder= where it is now"
            )
        except OSError:  # storage that fails is for the save to report
            pass
    if fault := group.broadcast_from_first(fault):
        raise NotSaved(f"{folder} {fault}")


def has_lost_folder_claim(folder: Path) -> bool:
    """Returns whether a folder that this process has claimed now belongs to another process. Looks at most once in five
    seconds: in between, and if the disk cannot be read, it returns False.
    """
    global _looked
    if time.monotonic() - _looked < _LOOK_SECONDS:
        return False
    try:
        owner.require_claim_not_lost(folder)
    except owner.TakenAway:
        return True
    except OSError:  # storage that fails is for the save to report
        pass
    _looked = time.monotonic()
    return False


def _end_all_ranks_if_problems(problems: list[str]) -> None:
    """Ends all ranks if `problems` is not empty: rank 0 raises a ConfigError with the first 8 of them and the number of
    the others, and the other ranks exit with code 2 after three seconds.
    """
    if problems and group.rank() == 0:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise ConfigError(*problems[:_SHOWN], *more)
    if problems:
        time.sleep(3)  # a launcher ends all its ranks once one has: rank 0 speaks first
        raise SystemExit(2)


def _collect_code_versions() -> dict[str, str]:
    """Returns {package: version} of torch and DeepSpeed, and for dstrain a hash of its source files, since the files
    may change without a new version.
    """
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return {"dstrain": digest.hexdigest()[:12]} | {package: version(package) for package in ("torch", "deepspeed")}


def _list_setup_differences(
    first_run: Run, first_settings: dict[str, Any], run: Run, settings: dict[str, Any]
) -> list[str]:
    """Returns at most 8 entries of the recipe and the DeepSpeed settings in which this rank differs from rank 0, each
    as "KEY=VALUE OF THIS RANK (not VALUE OF RANK 0)".
    """
    changes = list_differences(first_run, run)
    changes += [
        (key, first_settings.get(key), settings.get(key))
        for key in sorted({*first_settings, *settings})
        if first_settings.get(key) != settings.get(key)
    ]
    return [f"{key}={own} (not {first})" for key, first, own in changes[:_SHOWN]]


def _wait_until_path_exists(path: Path, patience: float) -> bool:
    """Waits until a file or folder exists, at most `patience` seconds, and returns whether it does. Opens the folders
    above it meanwhile, so that NFS looks for it anew.
    """
    end = time.monotonic() + patience
    while not path.exists():
        if time.monotonic() > end:
            return False
        for above in reversed(path.parents):
            with suppress(OSError):
                os.scandir(above).close()  # NFS remembers what was not there, and asks when this is opened
        time.sleep(0.2)
    return True
