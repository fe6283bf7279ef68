"""How commands begin and end, see also launch/test_wrong_input.py and distributed/test_group.py."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support.launch import ROOT, command, environment, free_port, run

PROGRAM = (
    "from dstrain.commands.exits import run_main_with_exit_code; run_main_with_exit_code(lambda: __import__('torch'))"
)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' torch has another OpenMP")
@pytest.mark.parametrize(
    "choice, spins", [({}, "'1000'"), ({"GOMP_SPINCOUNT": "7"}, "'7'"), ({"OMP_WAIT_POLICY": "passive"}, "'0'")]
)
def test_idle_threads_wait_briefly(choice, spins):
    """Oracle: what torch's libgomp says that it has read, and a user's own choice."""
    given = {name: value for name, value in environment().items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=given | {"OMP_DISPLAY_ENV": "verbose"} | choice,
        text=True,
        capture_output=True,
        timeout=120,
    )
    read = [line.split(" = ")[1] for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    assert read == [spins], done.stderr[-2000:]


# A rank that ends while gloo's thread still frees tensors of Python, as it does where DeepSpeed holds the group.
BUSY = """
import sys, torch, torch.distributed as dist
from dstrain.commands.exits import run_main_with_exit_code
from dstrain.engine.start import start_process_group
def main():
    start_process_group(1)
    for _ in range(5000):
        dist.all_reduce(torch.zeros(2000), async_op=True)
    sys.held = dist.group.WORLD
    dist.destroy_process_group()
    if sys.argv[1] == "raise":
        raise KeyError("on purpose")
    raise SystemExit(75)
run_main_with_exit_code(main)
"""


def test_threads_of_a_group_do_not_end_a_rank():
    """Oracle: the exit codes 75 and 1: the interpreter's end would take the lock from gloo's thread, and so abort."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", BUSY, ending],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **shared),
            text=True,
            stderr=subprocess.PIPE,
        )
        for rank, ending in enumerate(("stop", "raise"))
    ]
    errors = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [75, 1], errors
    assert "KeyError: 'on purpose'" in errors[1] and "terminate called" not in "".join(errors)


@pytest.mark.faults
def test_three_hundred_launches(tmp_path):
    """Oracle: exit code 0: of an earlier version, one of 25 launches ended by SIGABRT after `complete`."""
    words = ["--recipe", ROOT / "tests/launch/tiny.yaml", "--ds_config", ROOT / "ds_configs/zero2_fp32.json", "steps=3"]
    for number in range(300):
        done = run(command("launch/train.py", *words, f"folder={tmp_path / str(number)}", num=2))
        assert done.returncode == 0 and "complete" in done.stdout, (number, done.stdout)
        assert "terminate called" not in done.stdout, (number, done.stdout)


def test_a_reader_that_has_gone(tmp_path):
    """Oracle: other programs before `head`: exit code 141, which a shell gives for SIGPIPE, and nothing on stderr; an
    error of another pipe is shown.
    """
    program = "from dstrain.commands.exits import run_main_with_exit_code as run; import os, sys; run(lambda: {})"
    for work, code in (("print(7)", 128 + signal.SIGPIPE), ("os.write(int(sys.argv[1]), b'7')", 1)):
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "wb") as pipe, open(tmp_path / "out", "wb") as file:
            out = pipe if code > 1 else file
            words = [sys.executable, "-c", program.format(work), str(writer)]
            done = subprocess.run(words, stdout=out, stderr=subprocess.PIPE, env=environment(), pass_fds=[writer])
        assert (done.returncode, b"BrokenPipeError" in done.stderr) == (code, code == 1), done.stderr


def test_other_packages_are_silent():
    """Oracle: an empty stderr of a process that imports what diffusers does, on any CPU."""
    pytest.importorskip("bitsandbytes")
    code = "from dstrain.commands.main import silence_bitsandbytes as run; run(); import bitsandbytes"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.returncode == 0 and "gemm_4bit" not in done.stderr
