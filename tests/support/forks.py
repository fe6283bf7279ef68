"""Starts ranks as `python SCRIPT` or spawn.py does, but forked from a process that has imported what they will import.

Imports take most of the time of a short run: seven of the eight seconds of a rank with sixty tiny steps. A fork saves
them. Ranks are forked after the imports and before any thread, process group or device exists. Besides modules, forks
share the hash seed, and so the order of sets of strings; this is one reason why some tests use the real launcher.
Processes stay fresh where torch sees a GPU, which forks cannot share, and for commands with an environment of their own
but for PYTHONPATH: see launch.py.

    tests           Server -> one process of this file, by a socket: words, environment, a file to write to
    this process    forks a guardian, which forks a leader of a new session, waits, and tells its exit code
    the leader      is the rank, or forks several and waits for them as spawn.py does
"""

import atexit
import contextlib
import json
import math
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from pathlib import Path
from typing import NoReturn

from tests.support import spawn
from tests.support.preload import preload

LARGEST = 1 << 17  # bytes of one order; a socket accepts about 200 kB


class Forked:
    """The part of subprocess.Popen's interface that tests use, for a session leader that another process has forked."""

    def __init__(self, orders: socket.socket, order: dict, log: int):
        reader, writer = os.pipe()
        try:
            socket.send_fds(orders, [json.dumps(order).encode()], [log, writer])
        finally:
            os.close(writer)
        self._news, self.returncode = os.fdopen(reader), None
        line = self._news.readline()
        assert line, "tests/support/forks.py has ended"
        self.pid, self.args = int(line), order["words"]

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._news], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            line = self._news.readline()
            assert line, "the exit code of the process is unknown"
            self.returncode = int(line)
            self._news.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process that forks; it ends with this one. The constructor returns when DeepSpeed's operator is compiled."""

    def __init__(self, environment: dict[str, str]):
        self._orders, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forks", str(server_end.fileno())],
                env=environment,
                pass_fds=[server_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        atexit.register(self.close)
        assert self._orders.recv(1), "tests/support/forks.py has ended before it could fork"

    def close(self) -> None:
        self._orders.close()
        self._process.wait()

    def fork(self, words: list[str], num: int, port: str | None, environment: dict[str, str], log: int) -> Forked:
        """`num` ranks of a script with its arguments, which write to the file `log`."""
        os.umask(mask := os.umask(0))  # there is no other way to ask for it
        order = {
            "words": words,
            "num": num,
            "port": port,
            "environment": environment,
            "folder": os.getcwd(),
            "umask": mask,
        }
        return Forked(self._orders, order, log)


def load() -> None:
    """Imports what most commands need, besides what engines do, and unpacks the images that most of them read. A fork
    tears down nothing of that at its end.
    """
    import diffusers  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import transformers  # noqa: F401
    from diffusers import AutoencoderKL  # noqa: F401
    from PIL import Image

    from dstrain import train  # noqa: F401
    from dstrain.commands import evaluate, generate, main, probe  # noqa: F401
    from dstrain.commands import train as _train  # noqa: F401
    from dstrain.data.builtin.fashion import Fashion
    from dstrain.planning import states  # noqa: F401

    preload()
    with contextlib.suppress(ImportError):  # what an engine imports as it is built, in this release of DeepSpeed
        import deepspeed.module_inject.auto_ep_layer
        import deepspeed.ops.op_builder.all_ops
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    Image.preinit()
    Fashion(split="all")
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False


def serve(orders: socket.socket) -> None:
    """Forks a guardian for each order until the socket closes; a fork never returns from here."""
    while True:
        message, files, _, _ = socket.recv_fds(orders, LARGEST, 2)
        with contextlib.suppress(ChildProcessError):  # earlier guardians
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not message:
            return
        if os.fork() == 0:
            orders.close()
            guard(json.loads(message), *files)
        for file in files:
            os.close(file)


def guard(order: dict, log: int, news: int) -> NoReturn:
    leader = os.fork()
    if leader:
        code = os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1])
        with contextlib.suppress(BrokenPipeError):  # nobody waits for the exit code
            os.write(news, f"{code}\n".encode())
        os._exit(0)
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(order["folder"])
    os.umask(order["umask"])
    os.environ.clear()
    os.environ.update(order["environment"])
    os.write(news, f"{os.getpid()}\n".encode())
    os.close(log)
    os.close(news)
    if order["num"] > 1:
        ranks = []
        for rank in range(order["num"]):
            pid = os.fork()
            if pid == 0:
                os.environ.update(spawn.place(rank, order["num"], order["port"]))
                become(order["words"])
            ranks.append(Child(pid))
        os._exit(spawn.watch(ranks) & 255)
    become(order["words"])


class Child:
    """The part of subprocess.Popen's interface that spawn.watch and tests use, for a forked child."""

    def __init__(self, pid: int):
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired([], timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def child(words: list[str], environment: dict[str, str], log: Path) -> "Child | subprocess.Popen":
    """A script with its arguments as a child of this very process, for tests of ranks that know each other by their
    parent; it writes to the end of `log`. A fresh process where torch sees a GPU.
    """
    import torch

    if torch.cuda.is_available():
        with open(log, "ab") as file:
            return subprocess.Popen([sys.executable, *words], env=environment, stdout=file, stderr=subprocess.STDOUT)
    pid = os.fork()
    if pid:
        return Child(pid)
    try:
        atexit._clear()  # what this process does at its end is not the child's to do
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # is read from the environment again
        for name in [name for name in sys.modules if name.partition(".")[0] == "dstrain"]:
            del sys.modules[name]  # modules that hold what belongs to one process
        become(words)
    finally:
        os._exit(1)


def become(words: list[str]) -> NoReturn:
    """Runs a script and ends the process like python, but does not tear down its modules one by one: that would write
    to memory that all forks share, and take most of the time.
    """
    sys.argv, sys.path[0], code = words, str(Path(words[0]).parent), 0
    sys.path[1:1] = [folder for folder in os.environ["PYTHONPATH"].split(os.pathsep) if folder not in sys.path]
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    os._exit(code & 255)


if __name__ == "__main__":
    orders = socket.socket(fileno=int(sys.argv[1]))
    load()
    orders.send(b"!")  # ready
    serve(orders)
    os._exit(0)
