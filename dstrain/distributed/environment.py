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

from dstrain.distributed.launcher import Place, read_rank_and_world

_LONGEST = 75  # letters of a folder for /pymp-12345678/listener-12345678, sockets of multiprocessing
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")
_MPI_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_DEBUG_LEVELS = ("OFF", "INFO", "DETAIL")


def find_problems_or_repair_environment() -> list[str]:
    """Checks the environment of this process. Returns an error message for each fault; with several ranks it may take 5
    s to find one.

    If there is no fault, makes two repairs where they are needed: sets HOME to a private folder if it names no folder,
    and gives the sockets of worker processes a shorter path.
    """
    problems = [
        *_describe_launch_variable_problems(),
        *_describe_temporary_folder_problems(),
        *_describe_debug_level_problems(),
    ]
    if not problems:
        _replace_missing_home()
        problems += _shorten_socket_paths()
    return problems


def open_closed_standard_streams() -> None:
    """Opens each of stdin, stdout and stderr that is closed, on the null device. Otherwise the next file that is opened
    would get the stream's number, and what a library prints there would be written into that file.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # The lowest number that is free is `number`.
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  It stays open.


def make_private_folder(name: str) -> Path:
    """Makes a folder `name` that no other user can write, and returns its path. It lies in dstrain-UID in the folder
    for temporary files, where it may exist already. If dstrain-UID is a link, or another user owns or can write it,
    takes a new folder with a random name instead. Raises OSError if no folder can be made.
    """
    folder = Path(tempfile.gettempdir()) / f"dstrain-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or folder.is_symlink():
        folder = Path(tempfile.mkdtemp(prefix="dstrain-"))
    (folder / name).mkdir(parents=True, exist_ok=True)
    return folder / name


def try_to_make_writable_folder(folder: Path) -> bool:
    """Makes a folder if it is missing. Returns whether it is there and files can be written into it."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def make_cache_folder(name: str) -> Path:
    """Makes a folder `name` for files that later commands find again, and returns its path. It lies in XDG_CACHE_HOME
    or ~/.cache or, if it cannot be written there, in a private folder for temporary files.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / name
    return folder if try_to_make_writable_folder(folder) else make_private_folder(name)


def _describe_launch_variable_problems() -> Iterator[str]:
    """Yields a message for each fault in the environment variables by which the launcher tells the rank, the world size
    and the address of rank 0.
    """
    try:
        place = read_rank_and_world()
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
            yield from _describe_address_problems(host)
        yield from _describe_mpirun_address_problems(place)
        yield from _describe_interface_problems()


def _describe_address_problems(host: str) -> Iterator[str]:
    """Yields a message if no address is found for the host of rank 0, after three attempts in 5 s. Without this check
    torch would try without end.
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


def _describe_mpirun_address_problems(place: Place) -> Iterator[str]:
    """Yields a message if mpirun has started ranks on several machines and MASTER_ADDR is not set, since mpirun does
    not tell the ranks an address.
    """
    by_mpirun = any(os.environ.get(name) for name in _MPI_SIZES)
    if by_mpirun and place.local_world < place.world and "MASTER_ADDR" not in os.environ:
        yield (
            f"MASTER_ADDR is not set, and only {place.local_world} of {place.world} ranks are on this machine: name "
            "the host of rank 0, as by mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500, or by deepspeed --launcher "
            "openmpi --launcher_args='-x MASTER_ADDR=HOST -x MASTER_PORT=29500'"
        )


def _describe_interface_problems() -> Iterator[str]:
    """Yields a message for each network interface that is named in GLOO_SOCKET_IFNAME, but does not exist on this
    machine.
    """
    there = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in there:
            yield f"GLOO_SOCKET_IFNAME={name} is no network interface of this machine: write one of {', '.join(there)}"


def _describe_temporary_folder_problems() -> Iterator[str]:
    """Yields a message if there is no folder for temporary files that can be written."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        yield f"TMPDIR: no folder for temporary files can be written ({error.strerror}): set TMPDIR to one that can"


def _describe_debug_level_problems() -> Iterator[str]:
    """Yields a message if TORCH_DISTRIBUTED_DEBUG has a value with which torch cannot be imported."""
    level = os.environ.get("TORCH_DISTRIBUTED_DEBUG")
    if level and level.upper() not in _DEBUG_LEVELS:
        yield f"TORCH_DISTRIBUTED_DEBUG={level} in the environment is none of {', '.join(_DEBUG_LEVELS)}: unset it"


def _replace_missing_home() -> None:
    """Sets HOME to a private folder if it is empty or names no folder, since libraries write files there."""
    home = os.path.expanduser("~")
    if not os.path.isdir(home) or os.environ.get("HOME") == "":
        os.environ["HOME"] = str(make_private_folder("home"))


def _shorten_socket_paths() -> Iterator[str]:
    """Makes multiprocessing put its sockets into another folder if the path of the folder for temporary files is too
    long for them. (The path of a socket has at most 107 bytes.) Yields a message if no shorter folder can be written.
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
