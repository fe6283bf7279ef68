"""What a block of code imports, runs, asks, connects to or writes, as Python's own audit events tell it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PROGRAMS = {"git", "nvidia-smi", "ldconfig", "gcc", "c++", os.path.basename(sys.executable)}  # what libraries ask
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_watches: list["_Watch"] = []


class _Watch:
    def __init__(self, root: Path, out: Path) -> None:
        self.root, self.out, self.found = os.path.realpath(root), os.path.realpath(out), []

    def is_within(self, path: object, folder: str) -> bool:
        if not isinstance(path, (str, bytes)) or path[:1] in ("<", b"<"):  # the code of no file
            return False
        return (os.path.realpath(os.path.join(os.getcwd(), os.fsdecode(path))) + "/").startswith(folder + "/")

    def see(self, event: str, args: tuple) -> None:
        found = None
        if event == "exec" and self.is_within(args[0].co_filename, self.root):
            found = args[0].co_filename
        elif event == "import" and self.is_within(args[1], self.root):
            found = args[0]
        elif event == "open" and self.is_within(args[0], self.root) and not self.is_within(args[0], self.out):
            modes = isinstance(args[1], str) and set(args[1]) & set("wax+")
            found = args[0] if modes or (args[1] is None and (args[2] or 0) & _WRITES) else None
        elif event == "subprocess.Popen" and os.path.basename(os.fsdecode(args[0])) not in _PROGRAMS:
            found = args[1]
        elif (
            event == "pickle.find_class" and args[0] in ("os", "posix", "subprocess", "builtins", "evil")
        ) or event in ("builtins.input", "os.system", "os.exec", "os.posix_spawn", "socket.getaddrinfo"):
            found = args
        if found is not None:
            self.found.append(f"{event} {found}")


def _hear(event: str, args: tuple) -> None:
    for watch in _watches:
        watch.see(event, args)


@contextmanager
def watched(root: Path, out: Path) -> Iterator[list[str]]:
    """Lists what the block does below `root` that only code in a file of `root` would do; it may write below `out`."""
    if _hear not in vars(sys).setdefault("_dstrain_hooks", []):  # a hook stays until the process ends
        sys._dstrain_hooks.append(_hear)
        sys.addaudithook(_hear)
    watch = _Watch(root, out)
    _watches.append(watch)
    try:
        yield watch.found
    finally:
        _watches.remove(watch)
