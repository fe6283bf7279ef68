"""Files of lines: a line is there whole or not at all."""

import subprocess
import sys

import pytest

from dstrain.disk import lines
from tests.support.launch import environment

FULL = """
import resource, signal, sys
from dstrain.disk import lines
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
written = 0
for number in range(30):
    try:
        lines.append_lines(sys.argv[1], f"line {number} of a file\\n")
        written += 1
    except OSError as error:
        assert written == number
        break
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    lines.append_lines(sys.argv[1], "short\\n")
except OSError:
    pass
print(written)
"""


def test_lines_follow_each_other(tmp_path):
    """Oracle: the text that was given, also after a line that a crash has torn."""
    path = tmp_path / "a"
    for text in ("one\n", "\u00e4\ntwo\n"):
        lines.append_lines(path, text)
    assert path.read_text() == "one\n\u00e4\ntwo\n"
    path.write_text("one\nhal")
    lines.append_lines(path, "two\n")
    assert path.read_text() == "one\nhal\ntwo\n"


def test_no_room_leaves_no_part_of_a_line(tmp_path):
    """Oracle: the kernel's limit of a file's size, 100 bytes, which cuts the write of one line in two."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path / "a"], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "a").read_text()
    whole = [f"line {number} of a file\n" for number in range(int(done.stdout))]
    assert text in ("".join(whole), "".join(whole) + "short\n") and 80 < len(text) <= 100 and len(whole) == 5


@pytest.mark.parametrize(
    "content, left",
    [
        ("", ""),
        ("a", ""),
        ("a\n", "a\n"),
        ("a\nb", "a\n"),
        ("\n\nb", "\n\n"),
        ("x" * 200_000, ""),
        ("a\n" + "x" * 200_000, "a\n"),
        ("x" * 65535 + "\n" + "y", "x" * 65535 + "\n"),
        ("x" * 65536 + "\n" + "y" * 65536, "x" * 65536 + "\n"),
    ],
)
def test_a_torn_tail_is_cut(tmp_path, content, left):
    """Oracle: str.rpartition."""
    assert left == "".join(content.rpartition("\n")[:2])
    path = tmp_path / "a"
    path.write_text(content)
    assert lines.remove_partial_last_line(path) == len(content) - len(left) and path.read_text() == left
    assert lines.remove_partial_last_line(tmp_path / "absent") == 0 and not (tmp_path / "absent").exists()
