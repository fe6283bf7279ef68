"""Starts ranks as a launcher does, without one: python spawn.py NUM PORT SCRIPT [arguments].

The `deepspeed` launcher imports deepspeed twice before it starts a rank, which takes five seconds. Only tests of the
launcher itself need that. Like the launcher, this script ends all ranks when one has failed.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any


def place(rank: int, num: int, port: str) -> dict[str, str]:
    """The environment variables that a launcher sets for a rank on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num),
        "LOCAL_WORLD_SIZE": str(num),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def watch(ranks: Sequence[Any]) -> int:
    """Waits for ranks, which are like Popen: the exit code of the first that failed, else 0."""
    while None in [rank.poll() for rank in ranks]:  # all are polled: a rank may wait for one that has ended
        failed = [rank.returncode for rank in ranks if rank.returncode]
        if failed:
            end = time.monotonic() + 2  # let the others print their message, too
            while None in [rank.poll() for rank in ranks] and time.monotonic() < end:
                time.sleep(0.02)
            for rank in ranks:
                rank.kill()
            return failed[0]
        time.sleep(0.01)
    return next((rank.returncode for rank in ranks if rank.returncode), 0)


def main(num: int, port: str, words: list[str]) -> int:
    """The exit code of the first rank that failed, else 0."""
    return watch(
        [
            subprocess.Popen([sys.executable, "-u", *words], env={**os.environ, **place(rank, num, port)})
            for rank in range(num)
        ]
    )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
