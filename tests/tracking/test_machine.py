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
@pytest.mark.parametrize("name", ["dstrain/__init__.py", "module.py"])
def test_the_commit_of_the_code_that_runs(tmp_path, name):
    """Oracle: git rev-parse, and what was done to the files: nothing, a change, a file that git ignores, a new one. A
    system from outside has its own, beside that of dstrain.
    """
    file = tmp_path / name
    assert machine.read_git_commit(file) == {}  # no repository
    git(tmp_path, "init", "-q")
    for path in (file, tmp_path / "runs" / "__init__.py"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    assert machine.read_git_commit(file) == {}  # one that does not have the package, such as site-packages
    (tmp_path / ".gitignore").write_text("*.pyc\n")
    git(tmp_path, "add", file, ".gitignore")
    git(tmp_path, "commit", "-qm", "one")
    head = git(tmp_path, "rev-parse", "HEAD").strip()
    (file.parent / "a.pyc").write_text("ignored")
    assert machine.read_git_commit(file) == {"commit": head, "dirty": False}  # runs/ is no code
    if file.name == "__init__.py":
        (file.parent / "new.py").write_text("")
        assert machine.read_git_commit(file) == {"commit": head, "dirty": True}
        (file.parent / "new.py").unlink()
    file.write_text("changed")
    assert machine.read_git_commit(file)["dirty"]
    facts = machine.describe_machine(file)
    assert facts["system"] == {"commit": head, "dirty": True}
    assert {key: facts.get(key) for key in machine.read_git_commit()} == machine.read_git_commit()
    assert "system" not in machine.describe_machine()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells the GPU's memory there")
def test_memory():
    """Oracle: the kernel's own figures of this process and machine, in units of 1024 bytes, and their order."""
    held, free, total = map(float, re.findall(r"\d+\.\d\d", machine.describe_memory_use()))
    with open("/proc/meminfo", encoding="utf-8") as file:
        assert total == pytest.approx(int(file.readline().split()[1]) * 1024 / 1e9, abs=0.01)
    assert 0.05 < held < total and 0 < free < total
