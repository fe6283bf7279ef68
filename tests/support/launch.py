"""Real launches for tests: fresh processes, a free port, one thread for each rank."""

import os
import random
import runpy
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives to outgoing connections, which take any."""
    while True:
        port = random.SystemRandom().randrange(10000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def environment(**more: str) -> dict[str, str]:
    """This process's environment without a launcher's words, one thread, no wandb network."""
    dropped = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), WANDB_MODE="disabled", PYTHONUNBUFFERED="1")
    # `deepspeed` and `ninja` lie beside the interpreter, whether or not the environment is activated.
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env.update(more)
    return env


def command(script: str, *arguments: str, num: int = 2, launcher: bool | None = None) -> list[str]:
    """The command line for `num` ranks on this machine.

    launcher: by `deepspeed`; None where several ranks run a script of launch/. Others are started by spawn.py, and one
    alone by plain python, which a user may type as well.
    """
    words = [str(ROOT / script), *map(str, arguments)]
    if launcher is None:
        launcher = num > 1 and script.startswith("launch/")
    if not launcher:
        return [sys.executable, *([str(ROOT / "tests/support/spawn.py"), str(num), str(free_port())] * (num > 1)), *words]
    found = shutil.which("deepspeed", path=environment()["PATH"])
    assert found, "the `deepspeed` launcher is not installed beside this Python"
    return [sys.executable, found, "--hostfile", "none", "--num_gpus", str(num), "--master_port", str(free_port()), *words]


def launch(script: str, *arguments: str, num: int = 2, timeout: float = 300, check: bool = True,
           **env: str) -> subprocess.CompletedProcess:
    """Runs a script on `num` ranks to its end; its output goes into the failure."""
    done = subprocess.run(command(script, *arguments, num=num), env=environment(**env), text=True, timeout=timeout,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    assert not check or done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-6000:]}"
    return done


def here(script: str, words: Iterable[object], monkeypatch, capsys, **env: str) -> tuple[int, str, str]:
    """Runs a script of launch/ in this process, as one without a launcher: exit code, stdout, stderr."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    path = str(ROOT / "launch" / script)
    monkeypatch.setattr(sys, "argv", [path, *map(str, words)])
    try:
        runpy.run_path(path, run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    return code, *capsys.readouterr()
