"""The files in launch/ as a launcher starts them: by Python, or by themselves."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT, free_port, run

# Does for the ranks of this host what Open MPI 5 does: gives each the variables behind -x, and its place in the world.
MPIRUN = """#!/bin/sh
while [ "$1" != "{python}" ]; do
    [ "$1" = -x ] && export "$2"
    shift
done
export OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1
exec "$@"
"""
DOORS = [path for path in sorted((ROOT / "launch").glob("*.py")) if "start_verb(" in path.read_text()]


def test_every_door_runs_by_itself():
    """Oracle: the system's loader, which wants an interpreter in the first line and the right to run the file."""
    assert len(DOORS) > 10
    for path in DOORS:
        assert path.read_text().startswith("#!/usr/bin/env python3\n") and os.access(path, os.X_OK), path


@pytest.mark.slow
def test_one_machine_without_ssh(tmp_path):
    """Oracle: docs/guides/multinode.md: a hostfile of this machine alone, no sshd, and doors that the launcher starts
    without Python. Two ranks say that all is in order.
    """
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    (tmp_path / "ssh").write_text("#!/bin/sh\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "--hostfile", str(tmp_path / "hosts")]
    launcher += ["--no_ssh_check", "--master_addr", "127.0.0.1", "--master_port", str(free_port()), "--no_python"]
    words = [str(ROOT / "launch" / "train.py")]
    words += ["--recipe", str(ROOT / "tests/launch/tiny.yaml"), f"folder={tmp_path / 'run'}", "--dry-run"]
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = run([*launcher, *words], PATH=path)
    assert done.returncode == 0 and "in order" in done.stdout, done.stdout


@pytest.mark.slow
def test_openmpi_on_several_machines(tmp_path):
    """Oracle: docs/guides/multinode.md: DeepSpeed's launcher passes --master_addr on to no rank of Open MPI. Without
    MASTER_ADDR in its own arguments the ranks end with 2 and the remedy, with which all is in order.
    """
    (tmp_path / "hosts").write_text("localhost slots=1\nother slots=1\n")
    for name, text in (("mpirun", MPIRUN.format(python=sys.executable)), ("ompi_info", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    launcher = [sys.executable, str(Path(sys.executable).parent / "deepspeed"), "--hostfile", str(tmp_path / "hosts")]
    launcher += ["--no_ssh_check", "--launcher", "openmpi", "--master_addr", "127.0.0.1"]
    words = [str(ROOT / "launch" / "train.py"), "--recipe", str(ROOT / "tests/launch/tiny.yaml")]
    words += [f"folder={tmp_path / 'run'}", "--dry-run"]
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = run([*launcher, *words], PATH=path)
    assert done.returncode == 2 and "MASTER_ADDR is not set, and only 1 of 2 ranks are on this machine" in done.stdout
    told = f"-x MASTER_ADDR=127.0.0.1 -x MASTER_PORT={free_port()}"
    assert f"deepspeed --launcher openmpi --launcher_args='{told.split()[0]} MASTER_ADDR=HOST" in done.stdout
    done = run([*launcher, f"--launcher_args={told}", *words], PATH=path)
    assert done.returncode == 0 and "in order" in done.stdout, done.stdout
