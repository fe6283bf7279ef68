"""The environment of a command, as real processes: each variable that cannot work is one line, or it works anyway."""

import multiprocessing.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dstrain.distributed import environment
from dstrain.engine import set_deepspeed_environment
from tests.support import launch
from tests.support.forks import child

# What a command needs of its environment before it imports torch: HOME, a folder, a socket of multiprocessing.
PROGRAM = """
import multiprocessing.connection, os
from pathlib import Path
from dstrain.commands.exits import run_main_with_exit_code
def main():
    (Path.home() / "written").touch()
    multiprocessing.connection.Listener(family="AF_UNIX").close()
    print("it works")
run_main_with_exit_code(main, interactive=False)
"""
TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
REFUSED = [
    ({"MASTER_PORT": "abc"}, "MASTER_PORT=abc"),
    ({"MASTER_PORT": "0"}, "MASTER_PORT=0"),
    ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536"),
    ({"MASTER_PORT": ""}, "MASTER_PORT="),
    ({"MASTER_ADDR": ""}, "MASTER_ADDR"),
    (TWO | {"MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "29500"}, "MASTER_ADDR=nowhere.invalid"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2"),
    ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE=two"),
    ({"PMI_RANK": "1"}, "PMI_RANK=1"),
    (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "MASTER_ADDR is not set"),
    (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "x"}, "OMPI_COMM_WORLD_LOCAL_SIZE=x"),
    ({"TORCH_DISTRIBUTED_DEBUG": "loud"}, "TORCH_DISTRIBUTED_DEBUG=loud"),
    (TWO | {"GLOO_SOCKET_IFNAME": "none0"}, "GLOO_SOCKET_IFNAME=none0"),
]
WORKS = [
    {"HOME": "/dev/null"},
    {"HOME": ""},
    {"HOME": "/none/here"},
    {"SLURM_JOB_ID": "x"},
    {"TMPDIR": "long"},
    {"TMPDIR": "/none/here"},
    {"MASTER_PORT": "29500", "MASTER_ADDR": "nowhere.invalid"},
    {"PMI_RANK": "0", "PMI_SIZE": "1"},
]


def run(tmp_path: Path, variables: dict[str, str]) -> tuple[int, str]:
    """The exit code and output of PROGRAM in an environment with these variables."""
    (tmp_path / "program.py").write_text(PROGRAM)
    if variables.get("TMPDIR") == "long":
        variables = {"TMPDIR": str(tmp_path / ("x" * 100))}
        Path(variables["TMPDIR"]).mkdir()
    process = child([str(tmp_path / "program.py")], launch.environment(**variables), tmp_path / "output")
    return process.wait(60), (tmp_path / "output").read_text()


@pytest.mark.parametrize("variables, named", REFUSED, ids=str)
def test_what_cannot_work_is_one_line(tmp_path, variables, named):
    """Oracle: exit code 2, and one line that names the variable and says what to do."""
    code, output = run(tmp_path, variables)
    head, line = output.splitlines()
    assert code == 2 and head == "program.py: error:" and line.startswith(f"  {named}") and ": " in line
    assert any(word in line for word in ("unset", "write", "start", "set", "name"))


@pytest.mark.parametrize("variables", WORKS, ids=str)
def test_what_can_be_mended_works(tmp_path, variables):
    """Oracle: completion: a HOME that is no folder, sockets in a folder whose name is too long for them."""
    assert run(tmp_path, variables) == (0, "it works\n")


def test_no_folder_for_temporary_files(monkeypatch):
    """Oracle: Python's own search, where it finds none; and where only long ones are there."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])
    assert [line.split(":")[0] for line in environment.find_problems_or_repair_environment()] == ["TMPDIR"]
    monkeypatch.setattr(tempfile, "tempdir", "/proc/" + "x" * 80)
    monkeypatch.setattr(environment, "_SHORT", ("/proc/none",))
    monkeypatch.delitem(multiprocessing.process.current_process()._config, "tempdir", raising=False)
    assert "set TMPDIR to a shorter folder" in "".join(environment.find_problems_or_repair_environment())


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(tmp_path, closed):
    """Oracle: the numbers of closed streams belong to no file that the command opens."""
    program = """
import os, sys
from dstrain.distributed.environment import open_closed_standard_streams
open_closed_standard_streams()
sys.stdout.write("x"); sys.stderr.write("y")
assert open(sys.argv[1], "w").fileno() > 2 and not sys.stdin.read()
"""
    (tmp_path / "program.py").write_text(program)
    words = f"exec {sys.executable} program.py file {closed}"
    done = subprocess.run(
        words, shell=True, cwd=tmp_path, env=launch.environment(), stdin=subprocess.DEVNULL, capture_output=True
    )
    assert done.returncode == 0 and not (tmp_path / "file").read_bytes(), done.stderr
    assert done.stdout == (b"" if ">&-" in closed.replace("2>&-", "") else b"x")


def test_operators_are_built_where_it_can_be_written(tmp_path, monkeypatch):
    """Oracle: the file system: below TMPDIR where the user's folder, or his home, takes no file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for variable, value in (("TORCH_EXTENSIONS_DIR", "/dev/null/x"), ("HOME", "/dev/null")):
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        monkeypatch.setenv(variable, value)
        set_deepspeed_environment()
        folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
        assert folder.is_dir() and folder.is_relative_to(tmp_path)


@pytest.mark.parametrize(
    "variables", [{"XDG_CACHE_HOME": "/dev/null/x"}, {"XDG_CACHE_HOME": "", "HOME": "/dev/null"}], ids=str
)
def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch, variables):
    """Oracle: the file system: an index and data from elsewhere are kept below TMPDIR."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert environment.make_cache_folder("dstrain/index") == tmp_path / f"dstrain-{os.getuid()}" / "dstrain/index"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert environment.make_cache_folder("dstrain/index") == tmp_path / "own" / "dstrain" / "index"


def test_a_private_folder_is_nobody_elses(tmp_path, monkeypatch):
    """Oracle: a link, and a folder that others may write, in the place of ours: operators there would be theirs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"dstrain-{os.getuid()}"
    (tmp_path / "theirs").mkdir()
    own.symlink_to(tmp_path / "theirs")
    assert not environment.make_private_folder("x").resolve().is_relative_to(tmp_path / "theirs")
    own.unlink()
    own.mkdir()
    own.chmod(0o777)
    assert environment.make_private_folder("x").parent != own
    own.chmod(0o700)
    assert environment.make_private_folder("x") == own / "x"


@pytest.mark.parametrize("word, named", [("cuda", "no GPU"), ("xpu", "no GPU")])
def test_another_accelerator_is_refused(monkeypatch, word, named):
    """Oracle: torch, which sees no GPU here: one line that names the variable, before DeepSpeed is imported."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("DS_ACCELERATOR", word)
    with pytest.raises(ValueError, match=f"DS_ACCELERATOR={word} .*{named} here: unset it"):
        set_deepspeed_environment()


@pytest.mark.slow
@pytest.mark.parametrize("size", ["64k", "2m"])
def test_little_shared_memory(tmp_path, size):
    """Oracle: a container's /dev/shm of this size: workers find no room for their data, or for their semaphores."""
    words = ("steps=2", "every.sample=0", "data.workers=2", "batch.global=256", f"folder={tmp_path / 'run'}")
    train = [sys.executable, "launch/train.py", "--recipe", "tests/launch/tiny.yaml", *words]
    script = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    if not shutil.which("unshare") or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("no mount of one's own here")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", *train],
        cwd=launch.ROOT,
        env=launch.environment(),
        text=True,
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert "data.workers=2: workers hand samples over in /dev/shm" in done.stderr and "--shm-size" in done.stderr
