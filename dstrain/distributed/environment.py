"""Checks the environment of a command before torch is imported: a value that cannot work gets one line of error.

It repairs what it can: closed streams, a HOME that is no folder, a path too long for the sockets of worker processes.
launcher.py reads the launcher's variables, and engine/ reads those of DeepSpeed.
"""

import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dstrain.distributed.launcher import Place, read_place

_LONGEST = 75  # letters of a folder for /pymp-12345678/listener-12345678, sockets of multiprocessing
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")
_MPI_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_DEBUG_LEVELS = ("OFF", "INFO", "DETAIL")


def check_and_repair_environment() -> list[str]:
    """Checks the environment of this process, and returns an error message for each fault. If there is none, sets HOME
    to a private folder if it is no folder, and moves the sockets of worker processes to a shorter path if theirs is too
    long. With several ranks it looks up the host of rank 0, which takes up to 5 s if it fails.
    """
    problems = [*_check_launch_variables(), *_check_temporary_folder(), *_check_debug_level()]
    if not problems:
        _replace_home()
        problems += _shorten_socket_paths()
    return problems


def open_closed_standard_streams() -> None:
    """Opens each closed standard stream on the null device. Otherwise the next file that is opened would get the number
    of stderr, and what a library prints there would be written into that file.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # The lowest number that is free is `number`.
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  It stays open.


def make_private_folder(name: str) -> Path:
    """Makes the folder `name` below dstrain-UID in the folder for temporary files, unless it is there, and returns its
    path.

    Nobody else can have put a file into it: if another user owns or can write dstrain-UID, or if that is a link, uses a
    new folder with a random name instead. Raises OSError if no folder can be made.
    """
    folder = Path(tempfile.gettempdir()) / f"dstrain-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or folder.is_symlink():
        folder = Path(tempfile.mkdtemp(prefix="dstrain-"))
    (folder / name).mkdir(parents=True, exist_ok=True)
    return folder / name


def can_write(folder: Path) -> bool:
    """Makes a folder if it is missing, and returns whether files can be made in it."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def make_cache_folder(name: str) -> Path:
    """Makes and returns a folder for files that later commands find again: `name` below XDG_CACHE_HOME or ~/.cache. If
    that cannot be written, uses `name` below a private folder for temporary files.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / name
    return folder if can_write(folder) else make_private_folder(name)


def _check_launch_variables() -> Iterator[str]:
    """Yields a message for each fault in the variables by which the launcher gives the rank, the world size and the
    address of rank 0.
    """
    try:
        place = read_place()
    except ValueError as error:
        yield str(error)
        return
    port = os.environ.get("MASTER_PORT")
    if port is not None and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        yield f"MASTER_PORT={port} in the environment is no port: write a number from 1 to 65535, or unset it"
    host = os.environ.get("MASTER_ADDR")
    if host == "":
        yield "MASTER_ADDR in the environment is empty: write the host of rank 0, or unset it"
    if place.world > 1:
        if host:
            yield from _check_address(host)
        yield from _check_mpirun_address(place)
        yield from _check_interfaces()


def _check_address(host: str) -> Iterator[str]:
    """Yields a message if the host of rank 0 has no address, after three attempts in 5 s. Without this check torch
    would try again and again.
    """
    fault: Exception | None = None
    for patience in (1, 4, 0):  # seconds: a name server may be slow when hundreds of ranks ask at once
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            fault = error
        time.sleep(patience)
    yield f"MASTER_ADDR={host} in the environment has no address ({fault}): write the host of rank 0, or unset it"


def _check_mpirun_address(place: Place) -> Iterator[str]:
    """Yields a message if mpirun starts ranks on several machines and MASTER_ADDR is not set, since mpirun gives the
    ranks no address.
    """
    by_mpirun = any(os.environ.get(name) for name in _MPI_SIZES)
    if by_mpirun and place.local_world < place.world and "MASTER_ADDR" not in os.environ:
        yield (
            f"MASTER_ADDR is not set, and only {place.local_world} of {place.world} ranks are on this machine: name "
            "the host of rank 0, as by mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500, or by deepspeed --launcher "
            "openmpi --launcher_args='-x MASTER_ADDR=HOST -x MASTER_PORT=29500'"
        )


def _check_interfaces() -> Iterator[str]:
    """Yields a message for each network interface in GLOO_SOCKET_IFNAME that this machine lacks."""
    there = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in there:
            yield f"GLOO_SOCKET_IFNAME={name} is no network interface of this machine: write one of {', '.join(there)}"


def _check_temporary_folder() -> Iterator[str]:
    """Yields a message if no folder for temporary files can be written."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        yield f"TMPDIR: no folder for temporary files can be written ({error.strerror}): set TMPDIR to one that can"


def _check_debug_level() -> Iterator[str]:
    """Yields a message if TORCH_DISTRIBUTED_DEBUG has a value with which torch cannot be imported."""
    level = os.environ.get("TORCH_DISTRIBUTED_DEBUG")
    if level and level.upper() not in _DEBUG_LEVELS:
        yield f"TORCH_DISTRIBUTED_DEBUG={level} in the environment is none of {', '.join(_DEBUG_LEVELS)}: unset it"


def _replace_home() -> None:
    """Sets HOME to a private folder if it is empty or no folder, since libraries write files there."""
    home = os.path.expanduser("~")
    if not os.path.isdir(home) or os.environ.get("HOME") == "":
        os.environ["HOME"] = str(make_private_folder("home"))


def _shorten_socket_paths() -> Iterator[str]:
    """Makes multiprocessing put its sockets into a folder with a short path, if the folder for temporary files has a
    long one: the path of a socket has at most 107 bytes. Yields a message if no short folder can be written.
    """
    own = tempfile.gettempdir()
    if len(os.fsencode(own)) <= _LONGEST:
        return
    import multiprocessing.util

    for folder in _SHORT:
        with suppress(OSError):
            tempfile.tempdir = folder
            multiprocessing.util.get_temp_dir()
            break
    else:
        yield (
            f"TMPDIR={own} has {len(os.fsencode(own))} letters, and the sockets of worker processes fit below "
            f"{_LONGEST}: set TMPDIR to a shorter folder"
        )
    tempfile.tempdir = own
