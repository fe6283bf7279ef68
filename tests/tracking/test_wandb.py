"""Oracle: wandb's own record of a run, read back; the clock, for what must not wait."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from dstrain.recipe import Run, Track
from dstrain.tracking import machine, wandb_sink
from dstrain.tracking.tracker import Tracker, read_metrics
from dstrain.tracking.wandb_sink import WandbSink, find_wandb_url, has_api_key, resolve_wandb_mode
from tests.support.launch import ROOT
from tests.support.tracking import track_run
from tests.support.wandb_server import served

KEY = "0123456789" * 4
PATIENCE = 300.0  # seconds, for what is only slow where the machine is loaded


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    for name in (
        "WANDB_MODE",
        "WANDB_API_KEY",
        "WANDB_BASE_URL",
        "WANDB_IDENTITY_TOKEN_FILE",
        "WANDB_CONFIG_DIR",
        "NETRC",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_SILENT", "true")


class Fake:
    """wandb's public face, as far as the sink uses it; `calls` is what was called."""

    Settings = Image = staticmethod(lambda *arguments, **named: (arguments, named))

    def __init__(self, init=None, log=None):
        self.calls: list = []
        self.ids: list[str] = []
        self.arguments: dict = {}
        self._init, self._log = init, log

    def init(self, mode, **arguments):
        self.calls.append(mode)
        self.ids.append(arguments["id"])
        self.arguments = arguments
        if self._init:
            self._init(mode)
        return SimpleNamespace(
            define_metric=lambda *a, **k: None, log=self.log, step=0, finish=lambda: self.calls.append("finish")
        )

    def log(self, values, step, commit):
        if self._log:
            self._log()
        self.calls.append(values)

    def teardown(self):
        self.calls.append("teardown")


def sink(folder, monkeypatch, fake, setting="offline") -> tuple[WandbSink, list[str]]:
    notes: list[str] = []
    monkeypatch.setattr(wandb_sink.importlib, "import_module", lambda name: fake)
    return WandbSink(folder, Track(wandb=setting), name="a", config={}, note=notes.append), notes


def run_of(tmp_path, setting: str = "auto") -> Tracker:
    return track_run(Run(steps=20, track=Track(wandb=setting)), tmp_path)


REAL = """
import signal, sys, torch
from pathlib import Path
from dstrain.recipe import Run, Track
from dstrain.tracking import wandb_sink
from tests.support.tracking import track_run
wandb_sink._INIT_SECONDS = wandb_sink._FINISH_SECONDS = patience = float(sys.argv[3])
handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
run = Run(steps=20, track=Track(wandb=sys.argv[2], tags=["a", "b"], group="sweep", notes="a first try"))
track = track_run(run, Path(sys.argv[1]), settings={"zero_optimization": {"stage": 2}},
                  weights={"denoiser": 7})
track.add_terms("denoiser", {"loss": torch.tensor(0.5)})
track.report_means(10, {"lr": 0.25})
track.save_samples(10, torch.zeros(4, 3, 8, 8, dtype=torch.uint8))
track.save_samples(10, torch.zeros(4, 5, 3, 8, 8, dtype=torch.uint8), "films", captions=["a hat"] * 4)
track.report_scores(10, {"loss": 0.125})
track._wandb.close(patience)
track.close()
assert handlers == [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
"""


def really(folder, wanted="auto", **more) -> subprocess.CompletedProcess:
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "WANDB__SERVICE_WAIT": f"{PATIENCE:g}",
        **more,
    }
    env.pop("WANDB_SILENT")
    return subprocess.run(
        [sys.executable, "-c", REAL, str(folder), wanted, str(PATIENCE)],
        env=env,
        cwd=folder.parent,
        text=True,
        timeout=2 * PATIENCE,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )


def records(data: bytes) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format (blocks of 32 KiB), after a header of 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            yield record
            record = b""


def recorded(folder) -> list[dict]:
    """What wandb's files in the folder hold: name -> value as JSON text, an entry for each log."""
    from wandb.proto import wandb_internal_pb2

    entries = []
    for path in sorted((folder / "wandb").glob("*run-*/*.wandb")):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                entries.append({"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item})
    return entries


def described(folder) -> tuple[list[str], str, str, dict]:
    """Tags, group, notes and config of the first of wandb's runs in a folder."""
    from wandb.proto import wandb_internal_pb2

    path = min((folder / "wandb").glob("*run-*/*.wandb"))
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            run = record.run
            return (
                list(run.tags),
                run.run_group,
                run.notes,
                {item.key: json.loads(item.value_json) for item in run.config.update},
            )
    raise AssertionError("no run is described")


def test_offline_makes_a_run_and_keeps_its_id(tmp_path):
    """Oracle: the values reported, in wandb's own files; one id in the names of the runs of two processes."""
    folder = tmp_path / "run"
    for _ in range(2):
        done = really(folder)
        assert done.returncode == 0, done.stderr
        assert done.stderr == "" and "no API key" not in done.stdout  # it was not asked for
    known = (folder / "wandb_id").read_text().split()[0]
    runs = [path.name for path in (folder / "wandb").glob("offline-run-*")]
    assert runs and all(name.endswith(known) for name in runs)
    entries = recorded(folder)
    tags, group, notes, config = described(folder)
    assert (tags, group, notes) == (["a", "b"], "sweep", "a first try")
    assert config["steps"] == 20 and config["deepspeed"] == {"zero_optimization": {"stage": 2}}
    assert {
        name: config["machine"].get(name) for name in machine.read_git_commit()
    } == machine.read_git_commit()  # git's, where it is
    assert config["machine"]["world"] == 1 and config["machine"]["weights"] == {"denoiser": 7}
    assert config["machine"]["versions"]["torch"] == torch.__version__.partition("+")[0] and config["machine"]["device"]
    train = next(entry for entry in entries if "train/loss" in entry)
    assert (train["train/loss"], train["train/lr"], train["train/step"]) == ("0.5", "0.25", "10")
    assert any(entry.get("held_out/loss") == "0.125" for entry in entries)
    assert any("image-file" in str(entry) for entry in entries)
    films = [entry for entry in entries if any(name.startswith("films") for name in entry)]
    assert films and all("video-file" in str(entry) and ".gif" in str(entry) for entry in films)
    assert list((folder / "wandb").glob("offline-run-*/files/media/videos/films*.gif"))


KILLED = """
import os, signal, sys, time, torch
from pathlib import Path
from dstrain.recipe import Run, Track
from dstrain.tracking import wandb_sink
from tests.support.tracking import track_run
patience = float(sys.argv[5])
wandb_sink._INIT_SECONDS = wandb_sink._FINISH_SECONDS = patience
folder, first, last, kill = Path(sys.argv[1]), *map(int, sys.argv[2:5])
track = track_run(Run(steps=20, track=Track(wandb="offline")), folder, resumed_step=first)
sink = track._wandb
def sent():
    end = time.monotonic() + patience
    while sink._queue.unfinished_tasks and sink._queue.qsize() and time.monotonic() < end:
        time.sleep(0.05)
for done in range(first + 1, last + 1):
    track.add_terms("denoiser", {"loss": torch.tensor(1.0 / done)})
    track.report_means(done, {"lr": 0.25})
    if done == kill:
        sent()
        time.sleep(0.5)
        children = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")).split()
        services = [int(pid) for pid in children if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert services
        for pid in services:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
sent()
sink.close(patience)
track.close()
"""


@pytest.mark.slow
def test_a_resumed_run_is_one_history_and_a_killed_service_ends_nothing(tmp_path):
    """Oracle: the steps reported: each once in wandb's own files, under one id, but those after the kill -9 of its
    service; metrics.jsonl holds all. Then wandb's own command sends these files to a server as one history,
    without a gap.
    """
    folder, out = tmp_path / "run", []
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB__SERVICE_WAIT": f"{PATIENCE:g}"}
    for first, last, kill in ((0, 3, 0), (3, 6, 4), (6, 9, 0)):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, folder, *map(str, (first, last, kill, PATIENCE))],
            env=env,
            cwd=tmp_path,
            text=True,
            timeout=2 * PATIENCE,
            capture_output=True,
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        out.append(done.stdout)
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == list(range(1, 10))
    steps = [int(entry["train/step"]) for entry in recorded(folder) if "train/step" in entry]
    assert len(steps) == len(set(steps)) and {1, 2, 3, 7, 8, 9} <= set(steps) <= {1, 2, 3, 4, 7, 8, 9}
    assert "training goes on" in out[1] and "entries were not logged; metrics.jsonl holds all" in out[1]
    assert "not logged" not in out[0] + out[2]
    known = (folder / "wandb_id").read_text().split()[0]
    names = sorted(path.name for path in (folder / "wandb").glob("offline-run-*"))
    empty = list((folder / "wandb").glob("empty-run-*"))  # where the killed service had written nothing yet
    assert len(names) + len(empty) == 3 and all(name.endswith(known) for name in names)
    with served() as (address, histories):
        done = subprocess.run(
            [sys.executable, "-m", "wandb", "sync", "--yes", *(f"run/wandb/{name}" for name in names)],
            env=env | {"WANDB_SILENT": "false", "WANDB_BASE_URL": address, "WANDB_API_KEY": KEY},
            cwd=tmp_path,
            text=True,
            timeout=2 * PATIENCE,
            capture_output=True,
        )
    assert done.returncode == 0, done
    assert list(histories) == [known], done
    assert [line["train/step"] for line in histories[known]] == steps
    numbers = [line["_step"] for line in histories[known]]  # by which wandb tells its lines apart
    assert numbers == sorted(set(numbers)) and numbers[:3] == [0, 1, 2]


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_model_becomes_an_artifact(tmp_path, monkeypatch):
    """Oracle: wandb's own record of the offline run: the artifact's name, type and file; none where nothing asks."""
    for limit in ("_INIT_SECONDS", "_FINISH_SECONDS"):  # a loaded machine may need longer than a run would wait
        monkeypatch.setattr(wandb_sink, limit, PATIENCE)
    monkeypatch.setenv("WANDB__SERVICE_WAIT", f"{PATIENCE:g}")

    def trained(folder, **track):
        run = Run(name="vae", folder=folder, track=Track(wandb="offline", **track))
        tracker = track_run(run, folder, ("a",))
        tracker.log_model_to_wandb(7, lambda into: (into.mkdir(), (into / "a.safetensors").write_bytes(b"weights")))
        tracker._wandb.close(PATIENCE)
        tracker.close()
        return b"".join(path.read_bytes() for path in (folder / "wandb").rglob("*.wandb"))

    record = trained(tmp_path / "asked", artifact=True)
    assert (tmp_path / "asked" / "model" / "a.safetensors").exists()
    assert b"a.safetensors" in record and b"model" in record and b"vae" in record
    assert b"a.safetensors" not in trained(tmp_path / "silent")
    assert not (tmp_path / "silent" / "model").exists()


def test_a_server_that_is_not_there_means_offline(tmp_path):
    """Oracle: wandb's own files, which hold the report; the clock; a port that nothing listens on."""
    folder = tmp_path / "run"
    begun = time.monotonic()
    done = really(folder, WANDB_API_KEY=KEY, WANDB_BASE_URL=f"http://127.0.0.1:{closed_port()}")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < 90
    assert "wandb: offline, since online failed: URLError" in done.stdout
    assert any("train/loss" in entry for entry in recorded(folder))


def test_a_server_that_never_answers_delays_no_step(tmp_path, monkeypatch):
    """Oracle: the clock, against a probe of 3 s on a socket that never answers; calls by hand."""
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen()
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{hole.getsockname()[1]}")
        monkeypatch.setattr(wandb_sink, "_PROBE_SECONDS", 3.0)
        fake = Fake()
        begun = time.monotonic()
        sent, notes = sink(tmp_path, monkeypatch, fake, "auto")
        sent.log_values({"a": 1.0}, 5)
        assert time.monotonic() - begun < 2  # the probe alone waits 3 s
        sent.close()
        assert fake.calls == ["teardown", "offline", {"train/step": 5, "a": 1.0}, "finish", "teardown"]
        assert "offline, since online failed: TimeoutError" in notes[0] or "timed out" in notes[0]


def test_an_init_that_hangs_delays_no_step(tmp_path, monkeypatch):
    """Oracle: the 500 entries, of which 10 fit and wait in vain; lines by hand; a wait for the
    held init would never end.
    """
    held = threading.Event()
    monkeypatch.setattr(wandb_sink, "_CAPACITY", 10)
    sent, notes = sink(tmp_path, monkeypatch, Fake(init=lambda mode: held.wait()))
    begun = time.monotonic()
    for step in range(500):
        sent.log_values({"a": 1.0}, step)
    assert time.monotonic() - begun < 5  # 10 ms each would be a step's worth
    sent.close(0.3)
    assert time.monotonic() - begun < 30  # the held init would never end
    assert sent.dropped == 500
    assert "not finished after 0.3 s" in notes[0] and "500 entries were not logged" in notes[1]
    held.set()


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_wandb_that_raises_ends_nothing(tmp_path, monkeypatch, kind):
    """Oracle: the lines said, by hand, and the number of entries handed in; nothing is raised here."""

    def fail(*_):
        raise kind("broken\nmore")

    sent, notes = sink(tmp_path, monkeypatch, Fake(init=fail))
    sent.log_values({"a": 1.0}, 1)
    sent.close()
    assert notes == [
        f"wandb: could not start: {kind.__name__}: broken",
        "wandb: 1 entries were not logged; metrics.jsonl holds all",
    ]
    sent.log_values({"a": 1.0}, 2)

    sent, notes = sink(tmp_path, monkeypatch, Fake(log=fail))
    sent.log_values({"a": 1.0}, 1)
    sent.log_media("samples", tmp_path / "none.png", 1)
    sent.close()
    assert sent.dropped == 2


def test_online_that_fails_goes_offline_under_the_same_id(tmp_path, monkeypatch):
    """Oracle: the fake's calls and the line said, by hand; the first attempt's id."""

    def fail(mode):
        if mode == "online":
            raise RuntimeError("401")

    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr(wandb_sink, "_require_server_answer", lambda url: None)
    fake = Fake(init=fail)
    sent, notes = sink(tmp_path, monkeypatch, fake, "online")
    sent.close()
    assert fake.calls == ["online", "teardown", "offline", "finish", "teardown"]
    assert len(fake.ids) == 2 and len(set(fake.ids)) == 1
    assert notes == ["wandb: offline, since online failed: RuntimeError: 401"]


def test_online_without_a_key_asks_nothing(tmp_path, monkeypatch):
    """Oracle: the fake's first call, offline, and the words said."""
    fake = Fake()
    sent, notes = sink(tmp_path, monkeypatch, fake, "online")
    sent.close()
    assert fake.calls[0] == "offline" and "no API key was found" in notes[0]


@pytest.mark.parametrize(
    "entries, variables, name, project",
    [
        ({}, {}, "a", "dstrain"),
        ({}, {"WANDB_PROJECT": "theirs", "WANDB_NAME": "b"}, "b", "theirs"),
        ({"project": "mine"}, {"WANDB_PROJECT": "theirs"}, "a", "mine"),
        ({}, {"WANDB_PROJECT": "", "WANDB_NAME": ""}, "a", "dstrain"),
    ],
)
def test_variables_of_wandb_are_heard(tmp_path, monkeypatch, entries, variables, name, project):
    """Oracle: a table by hand: the recipe's own word, else the variable's; what wandb is given."""
    for variable in ("WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    fake = Fake()
    monkeypatch.setattr(wandb_sink.importlib, "import_module", lambda name: fake)
    WandbSink(tmp_path, Track(wandb="offline", **entries), name="a", config={}, note=print).close()
    assert (fake.arguments["name"], fake.arguments["project"]) == (name, project)


def test_a_wandb_that_is_not_installed_is_said(tmp_path, monkeypatch, capsys):
    """Oracle: the name of Python's import error, in what is printed."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    track = run_of(tmp_path)
    track.report_means(1, {"lr": 1.0})
    track.close()
    assert "wandb: not used: ModuleNotFoundError" in capsys.readouterr().out


def test_disabled_leaves_no_trace(tmp_path, monkeypatch):
    """Oracle: the names of the files that a run without wandb leaves."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    track = run_of(tmp_path, "disabled")
    track.report_means(1, {"lr": 1.0})
    track.close()
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "events.jsonl", "log.txt"}
    assert "wandb" not in (tmp_path / "log.txt").read_text()  # it was not even tried


@pytest.mark.parametrize(
    "setting, spoken, key, mode",
    [
        ("auto", "", False, "offline"),
        ("auto", "", True, "online"),
        ("offline", "", True, "offline"),
        ("auto", "disabled", True, "disabled"),
        ("offline", "online", True, "offline"),
        ("online", "offline", True, "offline"),
        ("disabled", "online", True, "disabled"),
        ("auto", "dryrun", True, "offline"),
        ("auto", "nonsense", False, "offline"),
        ("disabled", "", True, "disabled"),
    ],
)
def test_which_mode(monkeypatch, setting, spoken, key, mode):
    """Oracle: a table by hand: the quieter of the recipe's word and WANDB_MODE's; auto goes by the key."""
    monkeypatch.setenv("WANDB_MODE", spoken)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert resolve_wandb_mode(setting) == mode


def test_a_key_is_found_where_wandb_writes_it(tmp_path, monkeypatch):
    """Oracle: files and variables set by hand, as wandb's login writes them."""
    home = tmp_path / "home"
    (home / ".config" / "wandb").mkdir(parents=True)
    assert not has_api_key() and find_wandb_url() == "https://api.wandb.ai"
    (home / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    (home / ".netrc").chmod(0o600)
    assert has_api_key()
    (home / ".config" / "wandb" / "settings").write_text("[default]\nbase_url = https://wandb.example.org\n")
    assert find_wandb_url() == "https://wandb.example.org" and not has_api_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://api.wandb.ai")
    assert has_api_key()
    (home / ".netrc").write_text("machine\x00 broken {")
    assert not has_api_key()


def test_handlers_of_signals_are_ours(tmp_path, monkeypatch):
    """Oracle: SIGTERM's handler before, under an init that tries to set its own."""
    before = signal.getsignal(signal.SIGTERM)
    sent, _ = sink(tmp_path, monkeypatch, Fake(init=lambda mode: signal.signal(signal.SIGTERM, signal.SIG_IGN)))
    sent.close()
    assert signal.getsignal(signal.SIGTERM) is before  # Python allows it in the main thread only
