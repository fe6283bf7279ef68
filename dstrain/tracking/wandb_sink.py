"""Sends a run's reports to Weights & Biases beside the training, which never waits for it.

A thread of its own sends entries from a bounded queue; entries that do not fit are dropped and counted. Without a key
or a network, or after an error, wandb runs offline or not at all; it never asks a question or ends the training.
metrics.jsonl holds everything. Steps are logged as `train/step`. wandb's own step counts entries, through all commands
of a run. It drops entries with old steps, and `wandb sync` sends those of an offline part under the numbers in its
file: the entries of a part that counted from 0 again would replace those of the first part.
"""

import configparser
import importlib
import netrc
import os
import queue
import secrets
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from dstrain.disk import atomic
from dstrain.recipe import Track

_CAPACITY = 1000  # entries that wait to be sent
_HEADER = 7  # bytes of wandb's file before its first entry
_RESERVED = 1000  # entries that are written down at a time
_PROBE_SECONDS = 5.0  # for the server's first answer; the three timeouts stay below 40 s in all
_INIT_SECONDS = 18.0  # for wandb.init online
_FINISH_SECONDS = 10.0  # for the last uploads


class WandbSink:
    """Logs to one run of wandb. The file folder/wandb_id holds its id, which stays the same after a resume, and in a
    second line the number of entries reserved so far.

    track.wandb is auto, online, offline or disabled; see `resolve_wandb_mode` for the effect of WANDB_MODE. `note` is
    called with each message for the log.
    """

    def __init__(
        self,
        folder: Path,
        track: Track,
        *,
        name: str,
        config: dict[str, Any],
        note: Callable[[str], None],
    ) -> None:
        self.dropped = 0  # entries that did not fit or were refused
        self._note = note
        self._queue: queue.Queue[Callable[[Any], None]] = queue.Queue(_CAPACITY)  # calls with the run
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._sync = f"wandb sync {folder / 'wandb' / 'offline-run-*'}"  # all of a run's files, oldest first
        mode = resolve_wandb_mode(track.wandb)
        if mode == "disabled":
            return
        if mode == "online" and not has_api_key():
            note(f"wandb: offline, no API key was found; `wandb login`, then `{self._sync}` sends it")
            mode = "offline"
        os.environ.setdefault("WANDB_SILENT", "true")  # also read by wandb's own process
        try:
            # Not in the thread: workers that are forked while it holds an import lock would hang.
            self._wandb = importlib.import_module("wandb")
            _rename_empty_offline_runs(folder / "wandb")
            self._id, self._entries = _read_or_make_run_id(folder)
            self._path, self._reserved = folder / "wandb_id", self._entries
            self._arguments = {
                "id": self._id,
                "dir": str(folder),
                "name": os.environ.get("WANDB_NAME") or name,
                "project": (track.project == Track().project and os.environ.get("WANDB_PROJECT")) or track.project,
                "entity": track.entity,
                "tags": list(track.tags) or None,
                "group": track.group,
                "notes": track.notes,
                "config": config,
                "resume": "allow",
            }
        except Exception as error:
            note(f"wandb: not used: {_format_short_error(error)}")
            return
        self._thread = threading.Thread(target=self._send_queued_entries, args=(mode,), name="wandb", daemon=True)
        self._thread.start()

    def log_values(self, values: dict[str, float], step: int) -> None:
        """Queues {name: number} of step `step` for wandb, and returns at once. If the queue is full, the values are
        lost.
        """
        self._put_in_queue(lambda run: self._send_values(run, {"train/step": step, **values}))

    def log_media(self, name: str, path: Path, step: int) -> None:
        """Queues a picture (PNG) or a video (GIF, MP4) for wandb, and returns at once. The file must stay in place
        until the run ends. If the queue is full, the picture or video is not sent.
        """
        kind = "Image" if path.suffix == ".png" else "Video"
        self._put_in_queue(
            lambda run: self._send_values(run, {"train/step": step, name: getattr(self._wandb, kind)(str(path))})
        )

    @property
    def is_on(self) -> bool:
        """Returns whether values are sent to wandb, online or offline; False if it is disabled, failed to load, or is
        closed.
        """
        return self._thread is not None

    def log_artifact(self, name: str, folder: Path, step: int) -> None:
        """Queues all files of a folder for wandb, as an artifact of type model, and returns at once. If the queue is
        full, the files are not sent.
        """

        def send_artifact(run: Any) -> None:
            model = self._wandb.Artifact(name, type="model", metadata={"step": step})
            model.add_dir(str(folder))
            run.log_artifact(model)

        self._put_in_queue(send_artifact)

    def close(self, seconds: float = 15.0) -> None:
        """Waits at most `seconds` until all queued entries are sent and wandb's run has ended. Logs how many entries
        were lost, if any.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._closing.set()
        thread.join(seconds)
        if thread.is_alive():
            self.dropped += self._queue.qsize()  # they are in no file of wandb's yet
            self._note(f"wandb: not finished after {seconds:g} s; `{self._sync}` sends what is left")
        if self.dropped:
            self._note(f"wandb: {self.dropped} entries were not logged; metrics.jsonl holds all")

    def _put_in_queue(self, send: Callable[[Any], None]) -> None:
        """Queues a function for the thread that talks to wandb; it will be called with wandb's run. If the queue is
        full, counts it as dropped. Does nothing once wandb is off.
        """
        if self._thread is None:
            return
        try:
            self._queue.put_nowait(send)
        except queue.Full:
            self.dropped += 1

    def _send_values(self, run: Any, values: dict[str, Any]) -> None:
        """Logs values to wandb's run as its next entry."""
        if self._entries >= self._reserved:  # written ahead, since a kill leaves no time to write
            self._reserved = self._entries + _RESERVED
            atomic.write_file(self._path, f"{self._id}\n{self._reserved}\n")
        run.log(values, step=self._entries, commit=True)
        self._entries += 1

    def _send_queued_entries(self, mode: str) -> None:
        """Starts wandb's run, sends the queued entries until `close` is called, and finishes the run. Raises no
        error.
        """
        try:
            run = self._start_run(mode)
            self._entries = max(self._entries, run.step)  # of an online run that earlier versions began
        except BaseException as error:  # wandb also raises its own kinds
            self._note(f"wandb: could not start: {_format_short_error(error)}")
            run = None
        while True:
            try:
                send = self._queue.get(timeout=0.2)
            except queue.Empty:
                if self._closing.is_set():
                    break
                continue
            try:
                send(run)
            except BaseException as error:
                if run is not None and not self.dropped:
                    self._note(f"wandb: an entry was refused, and training goes on: {_format_short_error(error)}")
                self.dropped += 1
        try:
            if run is not None:
                run.finish()
                atomic.write_file(self._path, f"{self._id}\n{self._entries}\n")
                self._wandb.teardown()  # waits until wandb's own process has closed the run's file
        except BaseException as error:
            self._note(f"wandb: could not finish: {_format_short_error(error)}")
            with suppress(BaseException):
                self._wandb.teardown()  # or wandb tries it again at the exit, with a traceback

    def _start_run(self, mode: str) -> Any:
        """Starts and returns wandb's run in `mode`. If that is online and fails, starts it in offline mode."""
        if mode == "online":
            try:
                _require_server_answer(find_wandb_url())
                return self._init_wandb("online")
            except BaseException as error:
                self._note(f"wandb: offline, since online failed: {_format_short_error(error)}")
                self._wandb.teardown()  # or the id would still be in use
        return self._init_wandb("offline")

    def _init_wandb(self, mode: str) -> Any:
        """Calls wandb.init in this mode and returns wandb's run."""
        settings = self._wandb.Settings(
            silent=True,
            console="off",
            init_timeout=_INIT_SECONDS,
            finish_timeout=_FINISH_SECONDS,
            login_timeout=_INIT_SECONDS,
            disable_git=True,
            save_code=False,
        )
        run = self._wandb.init(mode=mode, settings=settings, **self._arguments)
        run.define_metric("train/step")
        run.define_metric("*", step_metric="train/step")
        return run


def resolve_wandb_mode(setting: str) -> str:
    """Returns the mode in which wandb is used: online, offline or disabled. If the recipe's `setting` and the
    environment variable WANDB_MODE differ, the one that comes later in this list counts. The setting auto means online
    if there is an API key, else offline.
    """
    if setting == "auto":
        setting = "online" if has_api_key() else "offline"
    variable = os.environ.get("WANDB_MODE", "").strip().lower().replace("dryrun", "offline")
    modes = ("online", "offline", "disabled")  # the last is the quietest
    return max(setting, variable, key=modes.index) if variable in modes else setting


def find_wandb_url() -> str:
    """Returns the URL of wandb's server: WANDB_BASE_URL, else the URL that `wandb login --host` has saved, else the
    public one.
    """
    if url := os.environ.get("WANDB_BASE_URL"):
        return url
    folder = Path(os.environ.get("WANDB_CONFIG_DIR", Path.home() / ".config" / "wandb"))
    settings = configparser.ConfigParser(interpolation=None)
    try:
        settings.read(folder / "settings")
        return settings["default"]["base_url"]
    except (configparser.Error, KeyError, OSError, UnicodeDecodeError):
        return "https://api.wandb.ai"


def has_api_key() -> bool:
    """Returns whether wandb would find an API key for its server without asking the user for one."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    variable = os.environ.get("NETRC")
    for path in [Path(variable)] if variable else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            if netrc.netrc(path).authenticators(urlparse(find_wandb_url()).hostname or ""):
                return True
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            continue
    return False


def _require_server_answer(url: str) -> None:
    """Raises OSError if wandb's server does not answer within five seconds; an HTTP error counts as an answer. Without
    this check, wandb would wait long for the server at exit.
    """
    with suppress(urllib.error.HTTPError):
        urllib.request.urlopen(url, timeout=_PROBE_SECONDS).close()


def _rename_empty_offline_runs(folder: Path) -> None:
    """Renames folders of offline runs that hold no entries to empty-run-*, since `wandb sync` would send no run at all
    if one of them were left. Such folders may be left by kill -9.
    """
    for path in folder.glob("offline-run-*/*.wandb"):
        if path.stat().st_size <= _HEADER:
            path.parent.rename(folder / path.parent.name.replace("offline-run-", "empty-run-", 1))


def _read_or_make_run_id(folder: Path) -> tuple[str, int]:
    """Returns (id, number): the run's id for wandb, and the number of the next entry. If the folder holds no id yet,
    makes one and saves it; the number is then 0.
    """
    path = folder / "wandb_id"
    if path.is_file() and (words := path.read_text().split()):
        return words[0], int(words[1]) if words[1:] and words[1].isdigit() else 0
    fresh = secrets.token_hex(4)
    atomic.write_file(path, fresh + "\n")
    return fresh, 0


def _format_short_error(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
