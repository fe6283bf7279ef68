"""How commands begin and end, see also launch/test_wrong_input.py and distributed/test_group.py."""

import subprocess
import sys

import pytest

from tests.support.launch import environment

PROGRAM = "from dstrain.commands.exits import run_main; run_main(lambda: __import__('torch'))"


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
