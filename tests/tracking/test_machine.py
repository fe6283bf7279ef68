"""What is written down of the code that runs and of the machine."""

import re
import shutil
import subprocess

import pytest
import torch

from dstrain.tracking import machine


def git(folder, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_the_commit_of_the_code_that_runs(tmp_path):
    """Oracle: git rev-parse, and what was done to the files: nothing, a change, a file that git ignores, a new one."""
    package, runs = tmp_path / "dstrain", tmp_path / "runs"
    assert machine.read_commit(package) == {}  # no repository
    git(tmp_path, "init", "-q")
    for path in (package, runs):
        path.mkdir()
        (path / "__init__.py").write_text("")
    assert machine.read_commit(package) == {}  # one that does not have the package, such as site-packages
    (tmp_path / ".gitignore").write_text("*.pyc\n")
    git(tmp_path, "add", "dstrain", ".gitignore")
    git(tmp_path, "commit", "-qm", "one")
    head = git(tmp_path, "rev-parse", "HEAD").strip()
    (package / "a.pyc").write_text("ignored")
    assert machine.read_commit(package) == {"commit": head, "dirty": False}  # runs/ is no code
    (package / "new.py").write_text("")
    assert machine.read_commit(package) == {"commit": head, "dirty": True}
    (package / "new.py").unlink()
    (package / "__init__.py").write_text("changed")
    assert machine.read_commit(package)["dirty"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells the GPU's memory there")
def test_memory():
    """Oracle: the kernel's own figures of this process and machine, in kB, and their order."""
    held, free, total = map(float, re.findall(r"\d+\.\d\d", machine.describe_memory()))
    with open("/proc/meminfo", encoding="utf-8") as file:
        assert total == pytest.approx(int(file.readline().split()[1]) / 1e6, abs=0.01)
    assert 0.05 < held < total and 0 < free < total
