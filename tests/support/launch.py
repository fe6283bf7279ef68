"""Real launches for tests: processes of their own, a free port, one thread for each rank."""

import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import IO

import torch

from dstrain.commands import exits
from tests.support.forks import Forked, Server
from tests.support.spawn import place

ROOT = Path(__file__).resolve().parents[2]
KIT_PATH = f"{ROOT}{os.pathsep}{ROOT / 'launch' / 'bench'}"  # a PYTHONPATH with which `from kit import ...` works
SPAWN = str(ROOT / "tests" / "support" / "spawn.py")
PORTS = range(10000, 32000)  # below the ports that Linux gives to outgoing connections


def free_port() -> int:
    """A port that nobody listens on. Each worker of pytest-xdist has its own share, so two never get the same port."""
    worker, count = (
        int(os.environ.get(f"PYTEST_XDIST_WORKER{name}", value).removeprefix("gw"))
        for name, value in (("", "gw0"), ("_COUNT", "1"))
    )
    while True:
        port = random.SystemRandom().choice(PORTS[worker::count])
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def environment(**more: str) -> dict[str, str]:
    """This process's environment without a launcher's variables; one thread, wandb disabled."""
    dropped = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), WANDB_MODE="disabled", PYTHONUNBUFFERED="1")
    # `deepspeed` and `ninja` lie beside the interpreter, whether or not the environment is activated.
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env.update(more)
    return env


def command(script: str, *arguments: str, num: int = 2, launcher: bool = False) -> list[str]:
    """The command line for `num` ranks on this machine.

    launcher: start the ranks by `deepspeed`. Otherwise spawn.py starts several ranks, and plain python a single one, as
    a user may do, too. Both are cheap, see `start`.
    """
    words = [str(ROOT / script), *map(str, arguments)]
    if not launcher:
        return [sys.executable, *([SPAWN, str(num), str(free_port())] * (num > 1)), *words]
    launcher_path = shutil.which("deepspeed", path=environment()["PATH"])
    assert launcher_path, "the `deepspeed` launcher is not installed beside this Python"
    return [
        sys.executable,
        launcher_path,
        "--hostfile",
        "none",
        "--num_gpus",
        str(num),
        "--master_port",
        str(free_port()),
        *words,
    ]


def start(words: list[str], log: IO, **env: str) -> subprocess.Popen | Forked:
    """Starts a command of `command` in a session of its own, which writes to the file `log`.

    Ranks without the launcher are forked from one process that has done their imports, because imports take most of the
    time of a short run. They are fresh processes where torch sees a GPU, or the environment differs by more than
    PYTHONPATH and what a launcher says of a rank, which nothing reads at its import.
    """
    server = None if torch.cuda.is_available() else _server()  # first: it compiles the operator for all
    script = 4 if words[1] == SPAWN else 1
    fresh = env.keys() - {"PYTHONPATH", *place(0, 1, "")}
    if server is None or words[0] != sys.executable or not words[script].endswith(".py") or fresh:
        return subprocess.Popen(
            words,
            env=environment(**env),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    num, port = (int(words[2]), words[3]) if script == 4 else (1, None)
    return server.fork(words[script:], num, port, environment(**env), log.fileno())


def run(words: list[str], timeout: float = 300, **env: str) -> subprocess.CompletedProcess:
    """Starts a command and waits for its end; stdout holds its whole output."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = start(words, log, **env)
        try:
            process.wait(timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        log.seek(0)
        return subprocess.CompletedProcess(words, process.returncode, log.read())


def launch(
    script: str,
    *arguments: str,
    num: int = 2,
    timeout: float = 300,
    check: bool = True,
    launcher: bool = False,
    **env: str,
) -> subprocess.CompletedProcess:
    """Runs a script on `num` ranks to its end; a failure shows its output."""
    done = run(command(script, *arguments, num=num, launcher=launcher), timeout, **env)
    assert not check or done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-6000:]}"
    return done


def _refuse_to_quit(code: int) -> None:
    raise AssertionError(f"{sys.argv} has begun a process group, and ends its process ({code}): take `launch`")


def here(script: str, words: Iterable[object], monkeypatch, capsys, **env: str) -> tuple[int, str, str]:
    """Runs a script of launch/ in this process, as without a launcher: exit code, stdout, stderr. Not a training, which
    would end this process with exit code 0.
    """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    path = str(ROOT / "launch" / script)
    monkeypatch.setattr(exits, "_exit_without_freeing_modules", _refuse_to_quit)
    monkeypatch.setattr(sys, "argv", [path, *map(str, words)])
    try:
        runpy.run_path(path, run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    return code, *capsys.readouterr()


@cache
def _server() -> Server:
    return Server(environment())


def wait_for(path: Path, seconds: float = 120) -> None:
    """Waits until a file is there that another process makes."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"no {path.name} after {seconds} s"
        time.sleep(0.005)
