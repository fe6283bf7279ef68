"""Finds which hosts of a `deepspeed --hostfile FILE ...` command answer, so that a supervisor can leave out the
others.
"""

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dstrain.disk import small
from dstrain.recipe import ConfigError

_HOSTFILE = ("--hostfile", "-H")
_CHOICES = ("--include", "--exclude", "-i", "-e", "--num_nodes")
_ASK = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_SECONDS = 20  # that a host has in all: one that hangs behind its ssh does not answer


def read_hosts(command: Sequence[str]) -> list[str]:
    """Returns the hosts in a command's hostfile, in the file's order. Raises ConfigError if the command names no
    readable hostfile, or if it has options, such as --include, that choose among the hosts.
    """
    options = {word.partition("=")[0]: place for place, word in enumerate(command)}
    if chosen := next((name for name in _CHOICES if name in options), None):
        raise ConfigError(f"--min-hosts chooses among the hosts itself: leave {chosen} out of the command")
    name = next((name for name in _HOSTFILE if name in options), None)
    if name is None or options[name] + 1 >= len(command):
        raise ConfigError("--min-hosts is for deepspeed --hostfile FILE ...: the command behind -- names no hostfile")
    path = Path(command[options[name]].partition("=")[2] or command[options[name] + 1])
    try:
        lines = small.read_text(path, small.MEGABYTE).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path} cannot be read: {error}") from None
    return [line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#")]


def require_enough_hosts(command: Sequence[str], min_hosts: int) -> None:
    """Raises ConfigError if the hostfile of `command` names fewer than `min_hosts` hosts, or if `read_hosts` refuses
    the command.
    """
    if len(hosts := read_hosts(command)) < min_hosts:
        raise ConfigError(
            f"--min-hosts {min_hosts}: the hostfile names {len(hosts)} hosts; write more into it, "
            "or give a smaller number"
        )


def find_unreachable_hosts(hosts: Sequence[str]) -> list[str]:
    """Returns those of `hosts` on which ssh cannot run a command without a password within 20 seconds, in their given
    order. Tests all hosts at the same time.
    """
    with ThreadPoolExecutor(max(len(hosts), 1)) as threads:
        return [host for host, answers in zip(hosts, threads.map(_can_reach, hosts)) if not answers]


def _can_reach(host: str) -> bool:
    """Returns whether ssh can run a command on a host without a password within 20 seconds."""
    try:
        asked = subprocess.run([*_ASK, host, "true"], capture_output=True, stdin=subprocess.DEVNULL, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


def exclude_hosts_from_command(command: Sequence[str], hosts: Sequence[str], missing: Sequence[str]) -> list[str]:
    """Returns the command with an --exclude option for the `missing` hosts, if there are any. `hosts` are all hosts. If
    only one of several hosts is left, also adds --force_multi, since DeepSpeed would else start the ranks on this
    machine.
    """
    place = next(place for place, word in enumerate(command) if word.partition("=")[0] in _HOSTFILE)
    words = [f"--exclude={'@'.join(missing)}"] if missing else []
    if len(hosts) - len(missing) == 1 and len(hosts) > 1:
        words.append("--force_multi")
    return [*command[:place], *words, *command[place:]]
