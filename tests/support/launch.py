"""Real `deepspeed` launches for tests: fresh processes, a free port, one thread for each rank."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**more: str) -> dict[str, str]:
    """This process's environment without a launcher's words, one thread, no wandb network."""
    dropped = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), WANDB_MODE="disabled", PYTHONUNBUFFERED="1")
    # `deepspeed` and `ninja` lie beside the interpreter, whether or not the environment is activated.
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env.update(more)
    return env


def command(script: str, *arguments: str, num: int = 2) -> list[str]:
    """The launcher's command line for `num` ranks on this machine."""
    launcher = shutil.which("deepspeed", path=environment()["PATH"])
    assert launcher, "the `deepspeed` launcher is not installed beside this Python"
    return [sys.executable, launcher, "--hostfile", "none", "--num_gpus", str(num), "--master_port", str(free_port()),
            str(ROOT / script), *map(str, arguments)]


def launch(script: str, *arguments: str, num: int = 2, timeout: float = 300, check: bool = True,
           **env: str) -> subprocess.CompletedProcess:
    """Runs a script on `num` ranks to its end; its output goes into the failure."""
    done = subprocess.run(command(script, *arguments, num=num), env=environment(**env), text=True, timeout=timeout,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    assert not check or done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-6000:]}"
    return done
