"""launch/watch.py: where runs stand."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from dstrain.recipe import ConfigError
from dstrain.runs import folders
from dstrain.tracking.report import record, state
from tests.support.launch import ROOT, environment, here
from tests.tracking.report.folder import made

STOPPED = "stopped at step 32 (SIGTERM), step 32 is saved\nwandb: not finished after 15 s\n"


def test_the_table(tmp_path, monkeypatch, capsys):
    """Oracle: what was done to each folder: trained to its end, locked, stopped, broken, imported,
    filled with rubbish.
    """
    runs = tmp_path / "runs"
    made(runs / "complete", steps=32)
    for name in ("running", "stopped", "dead", "rubbish", "without metrics"):
        shutil.copytree(runs / "complete", runs / "more" / name)
        text = (runs / "complete" / "run.yaml").read_text().replace("steps: 32", "steps: 64")
        (runs / "more" / name / "run.yaml").write_text(text)
    (runs / "more" / "stopped" / "log.txt").write_text(STOPPED)
    with open(runs / "more" / "running" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 32, "timing": {"seconds_left": 77.5}}) + "\n")
    (runs / "more" / "without metrics" / "log.txt").write_text("complete: 64 steps\n")
    (runs / "more" / "without metrics" / "metrics.jsonl").unlink()
    (runs / "more" / "dead" / "log.txt").write_text("the gradient is not finite\n\n")
    for path in (runs / "more" / "rubbish").iterdir():
        if path.is_file():
            path.write_bytes(b"\xff{[\0")
    (runs / "imported" / "checkpoints" / "step_00000000").mkdir(parents=True)
    shutil.copy(runs / "complete" / "run.yaml", runs / "imported")
    (runs / "more" / "running" / "checkpoints" / "step_00000024").mkdir(parents=True)
    capsys.readouterr()
    begun = shutil.copytree(
        runs / "more" / "running", runs / "begun", ignore=shutil.ignore_patterns("*.jsonl", "*.txt")
    )
    with (
        folders.lock_folder(runs / "more" / "running"),
        folders.lock_folder(runs / "complete"),
        folders.lock_folder(begun),
        folders.lock_folder(runs / "checked"),
    ):
        with pytest.raises(ConfigError, match="has not begun yet"):
            record.read_record(runs / "checked")
        assert not any("events.jsonl" in remark for remark in record.read_record(begun).remarks)
        code, out, _ = here("watch.py", [runs, "--json"], monkeypatch, capsys)
        _, shown, _ = here("watch.py", [runs], monkeypatch, capsys)
    states = {one["run"]: one for one in json.loads(out)}
    assert shown.count("damaged") == 1 and "\nrubbish: its run.yaml is missing or damaged" in shown
    stopped = runs / "more" / "stopped"
    for later, word in ((1, "stopped"), (-1, "running")):  # the command that said so holds it still; the next one does
        with folders.lock_folder(stopped):
            when = (stopped / ".lock").stat().st_mtime + later
            os.utime(stopped / "log.txt", (when, when))
            assert state.read_run_state(stopped).state == word
    assert code == 0 and {name: one["state"] for name, one in states.items()} == {
        "complete": "complete",
        "imported": "imported",
        "running": "running",
        "stopped": "stopped",
        "dead": "dead",
        "rubbish": "dead",
        "without metrics": "complete",
        "begun": "beginning",
        "checked": "beginning",
    }
    running = states["running"]
    assert (running["step"], running["steps"], running["checkpoint"]) == (32, 64, 24)
    assert running["seconds_left"] == 77.5
    assert states["dead"]["seconds_left"] == 32 * 4 / 2.0  # without that figure: samples that are left, by their rate
    assert running["picture"] == str(runs / "more" / "running" / "samples" / "step_00000032.png")
    lines = shown.splitlines()
    line = next(line for line in lines if line.startswith("running"))
    assert "32 of 64" in line and "dead: the gradient is not finite" in lines
    code, _, error = here("watch.py", [tmp_path / "absent"], monkeypatch, capsys)
    assert code == 2 and "is no folder: name a run, or a folder of runs" in error
    assert here("watch.py", [tmp_path / "runs" / "more" / "rubbish" / "samples"], monkeypatch, capsys)[1].startswith(
        "no run here"
    )


def test_names_write_no_escape_codes(tmp_path):
    """Oracle: the bytes of the table: no control character but its line breaks, whatever a folder and its log hold."""
    made(tmp_path / "run", steps=8)
    folder = (tmp_path / "run").rename(tmp_path / "a\x1b[2J\x07b\nc")
    (folder / "run.yaml").write_text("rubbish")
    (folder / "log.txt").write_text("it ended \x1b]0;title\x07 \x9b2J\n")
    (folder / "samples" / "step_00000009_\x1b[31m.png").write_bytes(b"")
    text = state.format_states([state.read_run_state(folder)])
    assert not [c for c in text if not c.isprintable() and c != "\n"] and len(text.splitlines()) == 4
    assert "a?[2J?b?c" in text and "it ended ?]0;title? ?2J" in text


def test_control_c(tmp_path):
    """Oracle: a real SIGINT while it follows a run: one line, exit code 130, and torch was never imported."""
    made(tmp_path / "run", steps=8)
    program = (
        "import runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "sys.argv = sys.argv[1:]\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n    print('torch' in sys.modules)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, ROOT / "launch" / "watch.py", tmp_path, "--follow", "--json"],
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert json.loads(process.stdout.readline())[0]["run"] == "run"
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error) == (130, "False\n", "watch.py: interrupted\n")


def test_control_c_at_once(tmp_path):
    """Oracle: a real SIGINT while it imports pydantic: exit code 130, and nothing is printed."""
    program = (
        "import os, runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Finder:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'pydantic':\n            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder)\n"
        "sys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, ROOT / "launch" / "watch.py", tmp_path, "--follow"],
        env=environment(),
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
