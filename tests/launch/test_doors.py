"""The files in launch/ as a launcher starts them: by Python, or by themselves."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT, free_port, run

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
