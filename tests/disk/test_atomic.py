"""Files that are written whole or not at all, against the file system itself."""

import errno
import os
import stat
import subprocess
import sys

import pytest

from dstrain.disk import atomic
from tests.support.launch import environment


def test_a_file_is_written_and_replaced(tmp_path):
    """Oracle: the bytes that were given; nothing else is left in the folder, which is made."""
    path = tmp_path / "new" / "a.txt"
    for content, expected in (("\u00e4\n", b"\xc3\xa4\n"), (b"\x00\xff", b"\x00\xff"), ("", b"")):
        atomic.write_file(path, content)
        assert path.read_bytes() == expected and os.listdir(path.parent) == ["a.txt"]


def test_an_error_leaves_the_old_file(tmp_path):
    """Oracle: the file as it was before; the half-written one is gone."""
    atomic.write_file(tmp_path / "a", "old")
    with pytest.raises(RuntimeError, match="halfway"), atomic.replace_file(tmp_path / "a") as temporary:
        temporary.write_text("half")
        raise RuntimeError("halfway")
    assert (tmp_path / "a").read_text() == "old" and os.listdir(tmp_path) == ["a"]


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    """Oracle: the file as it was before a process that ended by SIGKILL in the middle; the next write cleans up."""
    atomic.write_file(tmp_path / "a", "old")
    program = (
        "import os, signal, sys\nfrom dstrain.disk import atomic\nwith atomic.replace_file(sys.argv[1]) as file:\n"
        "    file.write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "a")], env=environment(), timeout=60)
    assert done.returncode == -9 and (tmp_path / "a").read_text() == "old" and len(os.listdir(tmp_path)) == 2
    again = [sys.executable, "-c", "import sys\nfrom dstrain.disk import atomic\natomic.write_file(sys.argv[1], 'new')"]
    subprocess.run([*again, str(tmp_path / "a")], env=environment(), timeout=60, check=True)
    assert (tmp_path / "a").read_text() == "new" and os.listdir(tmp_path) == ["a"]


def test_file_and_folder_reach_the_disk(tmp_path, monkeypatch):
    """Oracle: os.fsync, whose calls are recorded: of the file before the rename, then of the folder."""
    synced, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (synced.append(os.fstat(number)), fsync(number)))
    monkeypatch.setattr(os, "replace", lambda old, new: (synced.append("rename"), replace(old, new)))
    atomic.write_file(tmp_path / "a", "1234")
    file, rename, folder = synced
    assert file.st_size == 4 and file.st_ino == (tmp_path / "a").stat().st_ino and rename == "rename"
    assert stat.S_ISDIR(folder.st_mode) and folder.st_ino == tmp_path.stat().st_ino


@pytest.mark.parametrize(
    "number, written",
    [
        (errno.EINVAL, True),
        (errno.EBADF, True),
        (errno.ENOTSUP, True),
        (errno.ENOSYS, True),
        (errno.EACCES, True),
        (errno.EIO, False),
        (errno.ENOSPC, False),
        (errno.EDQUOT, False),
    ],
)
def test_a_folder_that_cannot_be_synced(tmp_path, monkeypatch, number, written):
    """Oracle: POSIX: EINVAL and its likes say that this file does not support fsync, EIO that data may be lost."""
    fsync = os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    if written:
        atomic.write_file(tmp_path / "a", "1234")
        assert (tmp_path / "a").read_text() == "1234"
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            atomic.write_file(tmp_path / "a", "1234")
