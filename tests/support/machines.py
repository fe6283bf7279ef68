"""Three hosts on one machine: a network namespace each, sshd in all, and cables between them that can be pulled.

    host-a, 10.77.0.1 --- switch --- host-b, 10.77.0.2
                             +------ host-c, 10.77.0.3

A host has its own interfaces, name, processes and mounts. Its files are this machine's, so all hosts share every
folder until one of them mounts something over it. Nothing outlives a test: the namespaces have no names and end with
their processes, the processes end with the host's first one, sshd, and sshd ends with the test's process.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.launch import ROOT, environment

TOOLS = {
    "ip": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "pdsh": "pdsh",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
}
NAMES = ("host-a", "host-b", "host-c")
TIED = ("setpriv", "--pdeathsig", "KILL")  # ends when the process that started it ends
APART = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")

SSHD = """\
ListenAddress 0.0.0.0
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
LogLevel ERROR
ClientAliveInterval 3
ClientAliveCountMax 3
"""
SSH = """\
IdentityFile {folder}/key
IdentitiesOnly yes
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""
# Runs when a host starts; the mounts belong to this host only. $1 name, $2 folder, $3 the path of sshd.
BOOT = """\
set -e
hostname "$1"
mount -t tmpfs tmpfs /run
mkdir -m 755 /run/sshd
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2/hosts.txt" /etc/hosts
mount --bind "$2/ssh_config" /etc/ssh/ssh_config
exec "$3" -D -e -f "$2/sshd_config"
"""


def _tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin")


def missing() -> str | None:
    """Why there can be no hosts here; None where there can."""
    if os.geteuid() != 0:
        return "several hosts on one machine need root"
    packages = sorted({package for tool, package in TOOLS.items() if not _tool(tool)})
    if packages:
        return f"several hosts on one machine need {', '.join(packages)}: apt-get install {' '.join(packages)}"
    attempt = "mount -t tmpfs tmpfs /run && ip link add name bridge type bridge && ip link add name eth0 type veth"
    tried = subprocess.run([*TIED, *APART, "sh", "-c", attempt], capture_output=True, text=True)
    return f"this machine gives no network of one's own: {tried.stderr.strip()}" if tried.returncode else None


class Host:
    """One of the hosts: runs commands, lists its processes, unplugs and plugs in its cable."""

    def __init__(self, name: str, folder: Path):
        self.name = name
        with open(folder / f"{name}.log", "w") as log:
            self._outer = subprocess.Popen(
                [*TIED, *APART, "sh", "-c", BOOT, "sh", name, str(folder), _tool("sshd")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._first = self._child(folder / f"{name}.log")
        except BaseException:
            self._outer.kill()
            raise
        self._id = os.readlink(f"/proc/{self._first}/ns/pid")

    def _child(self, log: Path) -> int:
        """Waits until the host's first process, sshd, accepts connections; its process id."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            assert self._outer.poll() is None, f"{self.name} did not start:\n{log.read_text()}"
            words = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
            if words and ":0016 00000000:0000 0A" in Path(f"/proc/{words[0]}/net/tcp").read_text():  # port 22, open
                return int(words[0])
            time.sleep(0.02)
        raise AssertionError(f"{self.name} has no sshd:\n{log.read_text()}")

    def words(self, *words: str, folder: Path = Path("/")) -> list[str]:
        """A command line that runs `words` on this host, in a folder."""
        return [
            "nsenter",
            f"--target={self._first}",
            "--net",
            "--uts",
            "--pid",
            "--mount",
            "--",
            "sh",
            "-c",
            'cd "$1" && shift && exec "$@"',
            "sh",
            str(folder),
            *map(str, words),
        ]

    def run(self, *words: str) -> str:
        done = subprocess.run(
            self.words(*words), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def processes(self) -> dict[int, list[str]]:
        """Command lines by process id, without sshd and its processes for open connections."""
        commands = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") == self._id:
                    words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
                    if words and "sshd" not in words[0]:  # no words: a zombie
                        commands[int(entry.name)] = words
            except OSError:  # it has just ended
                continue
        return commands

    def link(self, state: str) -> None:
        """Unplugs the cable ("down") or plugs it in ("up")."""
        self.run("ip", "link", "set", "eth0", state)

    def plug(self, number: int, switch: int) -> None:
        """Connects the host to the switch, which is a process in a network of its own."""
        inside = ["nsenter", f"--target={switch}", "--net", "ip", "link"]
        for words in (
            ["add", "name", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", self._first],
            ["set", f"port{number}", "master", "bridge", "up"],
        ):
            subprocess.run([*inside, *map(str, words)], check=True)
        self.run("ip", "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            self.run("ip", "link", "set", link, "up")

    def end(self) -> None:
        self._outer.kill()  # --kill-child ends sshd too, and sshd's end ends the rest
        self._outer.wait()
        end = time.monotonic() + 10
        while self.processes() and time.monotonic() < end:
            time.sleep(0.05)
        assert not self.processes(), f"{self.processes()} live on"


@contextmanager
def start_hosts(folder: Path) -> Iterator[tuple[Host, ...]]:
    """Three hosts that reach each other by name over ssh, without a password; keys and settings lie in `folder`."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
    (folder / "sshd_config").write_text(SSHD.format(folder=folder))
    (folder / "ssh_config").write_text(SSH.format(folder=folder))
    (folder / "hosts.txt").write_text(
        "127.0.0.1 localhost\n" + "".join(f"10.77.0.{number} {name}\n" for number, name in enumerate(NAMES, 1))
    )
    hosts: list[Host] = []
    switch = subprocess.Popen(
        [
            *TIED,
            "unshare",
            "--net",
            "sh",
            "-c",
            "ip link add name bridge type bridge && ip link set bridge up && echo ready && exec sleep infinity",
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert switch.stdout.readline() == b"ready\n", "there is no switch"
        for number, name in enumerate(NAMES, 1):
            hosts.append(Host(name, folder))
            hosts[-1].plug(number, switch.pid)
        yield tuple(hosts)
    finally:
        for host in hosts:
            host.end()
        switch.kill()
        switch.wait()
        switch.stdout.close()


def workplace(folder: Path, count: int, **variables: str) -> Path:
    """A folder from which the README's command starts: launch/, ds_configs/, .deepspeed_env, and the hostfile with the
    first `count` hosts.
    """
    folder.mkdir()
    for name in ("launch", "ds_configs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "hosts").write_text("".join(f"{name} slots=1\n" for name in NAMES[:count]))
    inherited = {name: os.environ[name] for name in ("TORCH_EXTENSIONS_DIR",) if name in os.environ}
    settings = {
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        **inherited,
        **variables,
    }
    (folder / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    return folder


def deepspeed(*words: object) -> list[str]:
    """The launcher's command line, by this Python."""
    launcher = shutil.which("deepspeed", path=environment()["PATH"])
    assert launcher, "the `deepspeed` launcher is not installed beside this Python"
    return [sys.executable, launcher, *map(str, words)]
