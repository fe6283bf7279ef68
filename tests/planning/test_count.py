"""The process that counts: it ends with the command that started it."""

import signal
import subprocess
import sys

import psutil
import pytest

from tests.support.launch import ROOT, environment

PROGRAM = """
import os, signal
from dstrain.planning.count import run_in_worker
if __name__ == "__main__":
    print(run_in_worker(os.getpid), flush=True)
    run_in_worker(signal.pause)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_behind(number, tmp_path):
    """Oracle: the process table, after a signal to the command alone in the middle of a count."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, path],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as command:
        worker = psutil.Process(int(command.stdout.readline()))
        command.send_signal(number)
        command.wait(60)
        assert psutil.wait_procs([worker], timeout=60)[1] == []
