"""Starts ranks as `python SCRIPT` or spawn.py does, but forked from a process that has imported what they will import.

Imports are most of a short run: of the eight seconds that a rank of sixty tiny steps costs, seven, which a fork saves.
It is taken after the imports, before any thread, process group or device; what it shares with the others beyond modules
is the order of sets of strings, for which, among other things, tests use the real launcher, too. Where torch sees a
GPU, which no fork can share, and for commands with an environment of their own, processes stay fresh: see launch.py.

    tests           Server -> one process of this file, by a socket: words, environment, a file to write to
    this process    forks a guardian, which forks a leader of a new session, waits, and tells its exit code
    the leader      is the rank, or forks several and waits for them as spawn.py does
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

from tests.support import spawn

LARGEST = 1 << 17                                 # bytes of one order; a socket takes 200 kB


class Forked:
    """What tests use of subprocess.Popen, for the leader of a session that somebody else has forked."""

    def __init__(self, orders: socket.socket, order: dict, log: int):
        told, tells = os.pipe()
        try:
            socket.send_fds(orders, [json.dumps(order).encode()], [log, tells])
        finally:
            os.close(tells)
        self._news, self.returncode = os.fdopen(told), None
        said = self._news.readline()
        assert said, "tests/support/forks.py has ended"
        self.pid, self.args = int(said), order["words"]

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._news], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            said = self._news.readline()
            assert said, "nobody knows how the process has ended"
            self.returncode = int(said)
            self._news.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process that forks; ready once made, and with it DeepSpeed's operator compiled. It ends with this one."""

    def __init__(self, environment: dict[str, str]):
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-m", "tests.support.forks", str(theirs.fileno())],
                                             env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                                             stdout=subprocess.DEVNULL, start_new_session=True)
        atexit.register(self.close)
        assert self._orders.recv(1), "tests/support/forks.py has ended before it could fork"

    def close(self) -> None:
        self._orders.close()
        self._process.wait()

    def fork(self, words: list[str], num: int, port: str | None, environment: dict[str, str], log: int) -> Forked:
        """`num` ranks of a script with its arguments, which write to the file `log`."""
        order = {"words": words, "num": num, "port": port, "environment": environment, "folder": os.getcwd()}
        return Forked(self._orders, order, log)


def load() -> None:
    """What most ranks import, and the operator that all need; nothing that starts a thread."""
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  imports torch's compiler, as every engine does
    import diffusers  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import transformers  # noqa: F401
    from deepspeed.accelerator import get_accelerator
    from diffusers import AutoencoderKL  # noqa: F401

    from dstrain import train
    from dstrain.command import cli  # noqa: F401
    get_accelerator().create_op_builder("ShareMemCommBuilder").load()
    gc.collect()
    gc.freeze()                                   # a collection in a fork would write to all of it, and so copy it


def serve(orders: socket.socket) -> None:
    """Until there is nothing more to do; a fork never returns."""
    while True:
        message, files, _, _ = socket.recv_fds(orders, LARGEST, 2)
        with contextlib.suppress(ChildProcessError):                      # earlier guardians
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
        with contextlib.suppress(BrokenPipeError):                        # nobody asks any more
            os.write(news, f"{code}\n".encode())
        os._exit(0)
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(order["folder"])
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
    """What spawn.watch asks of subprocess.Popen, for a child that was forked."""

    def __init__(self, pid: int):
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def become(words: list[str]) -> NoReturn:
    """Runs a script as python does, and ends as it does, but that its modules are not taken apart, one by one: for what
    was never written to, and is shared with all other forks, that is most of the work.
    """
    sys.argv, sys.path[0], code = words, str(Path(words[0]).parent), 0
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
    given = socket.socket(fileno=int(sys.argv[1]))
    load()
    given.send(b"!")                              # ready
    serve(given)
    os._exit(0)
