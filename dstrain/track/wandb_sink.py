"""Weights & Biases beside the training and never in its way.

A thread of its own sends what a bounded queue holds; what does not fit is dropped and counted. No
key, no network or a fault mean offline mode or nothing, never a question, a wait or an end.
metrics.jsonl stays the truth. Steps are logged as `train/step` and never passed as step=, since
wandb drops what arrives with an older step, as after a resume.
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
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from dstrain.disk import atomic

_CAPACITY = 1000            # entries that wait to be sent
_PROBE_SECONDS = 5.0        # for the server's first answer; with the next two below 30 s in all
_INIT_SECONDS = 18.0        # for wandb.init online
_FINISH_SECONDS = 10.0      # for the last uploads


class WandbSink:
    """One run of wandb; its id stands in folder/wandb_id and is the same after a resume.

    `say` is told what a person should know, at most a few lines in a run. `wanted` is the recipe's
    auto, online, offline or disabled; WANDB_MODE can make that quieter.
    """

    def __init__(self, folder: Path, wanted: str, *, name: str, project: str, entity: str | None,
                 config: dict[str, Any], say: Callable[[str], None]) -> None:
        self.dropped = 0                             # entries that did not fit or were refused
        self._say = say
        self._queue: queue.Queue = queue.Queue(_CAPACITY)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        mode = resolved_mode(wanted)
        if mode == "disabled":
            return
        if mode == "online" and not has_key():
            say("wandb: offline, no API key was found; `wandb login`, then `wandb sync` sends it")
            mode = "offline"
        os.environ.setdefault("WANDB_SILENT", "true")        # also read by wandb's own process
        try:
            # Here and not in the thread: workers forked while it held an import lock would hang.
            self._wandb = importlib.import_module("wandb")
            self._arguments = dict(id=_run_id(folder), dir=str(folder), name=name, project=project,
                                   entity=entity, config=config, resume="allow")
        except Exception as error:
            say(f"wandb: not used: {_brief(error)}")
            return
        self._thread = threading.Thread(target=self._work, args=(mode,), name="wandb", daemon=True)
        self._thread.start()

    def log(self, values: dict[str, float], step: int) -> None:
        """Numbers by name, as of `step`; returns at once."""
        self._put(("numbers", values, step))

    def picture(self, name: str, path: Path, step: int) -> None:
        """A picture file that stays where it is; returns at once."""
        self._put(("picture", {name: str(path)}, step))

    def video(self, name: str, path: Path, step: int) -> None:
        """A GIF or MP4 file that stays where it is; returns at once."""
        self._put(("video", {name: str(path)}, step))

    @property
    def on(self) -> bool:
        """Whether anything is sent, or kept to be sent."""
        return self._thread is not None

    def artifact(self, name: str, folder: Path, step: int) -> None:
        """All files of a folder as a model; returns at once."""
        self._put(("artifact", {name: str(folder)}, step))

    def close(self, seconds: float = 15.0) -> None:
        """Sends what is left, for at most `seconds`."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._closing.set()
        thread.join(seconds)
        if thread.is_alive():
            self._say(f"wandb: not finished after {seconds:g} s; `wandb sync` sends what is left")
        if self.dropped:
            self._say(f"wandb: {self.dropped} entries were not logged; metrics.jsonl holds all")

    def _put(self, entry: tuple) -> None:
        if self._thread is None:
            return
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self.dropped += 1

    # --------------------------------------------------------------------------- in the thread

    def _work(self, mode: str) -> None:
        try:
            run = self._start(mode)
        except BaseException as error:               # wandb also raises its own kinds
            self._say(f"wandb: could not start: {_brief(error)}")
            run = None
        while True:
            try:
                kind, values, step = self._queue.get(timeout=0.2)
            except queue.Empty:
                if self._closing.is_set():
                    break
                continue
            try:
                if kind == "artifact":
                    (name, folder), = values.items()
                    model = self._wandb.Artifact(name, type="model", metadata={"step": step})
                    model.add_dir(folder)
                    run.log_artifact(model)
                    continue
                if kind in ("picture", "video"):
                    made = self._wandb.Image if kind == "picture" else self._wandb.Video       # of files as they are
                    values = {name: made(path) for name, path in values.items()}
                run.log({"train/step": step, **values})
            except BaseException:
                self.dropped += 1
        try:
            if run is not None:
                run.finish()
        except BaseException as error:
            self._say(f"wandb: could not finish: {_brief(error)}")

    def _start(self, mode: str) -> Any:
        if mode == "online":
            try:
                _probe(base_url())
                return self._init("online")
            except BaseException as error:
                self._say(f"wandb: offline, since online failed: {_brief(error)}")
                self._wandb.teardown()               # or the id would still be in use
        return self._init("offline")

    def _init(self, mode: str) -> Any:
        settings = self._wandb.Settings(
            silent=True, console="off", init_timeout=_INIT_SECONDS, finish_timeout=_FINISH_SECONDS,
            login_timeout=_INIT_SECONDS, disable_git=True, save_code=False)
        run = self._wandb.init(mode=mode, settings=settings, **self._arguments)
        run.define_metric("train/step")
        run.define_metric("*", step_metric="train/step")
        return run


def resolved_mode(wanted: str) -> str:
    """online, offline or disabled: the quieter one of the recipe's word and WANDB_MODE's."""
    if wanted == "auto":
        wanted = "online" if has_key() else "offline"
    spoken = os.environ.get("WANDB_MODE", "").strip().lower()
    spoken = {"dryrun": "offline"}.get(spoken, spoken)
    quieter = ("online", "offline", "disabled")
    return max(wanted, spoken, key=quieter.index) if spoken in quieter else wanted


def base_url() -> str:
    """wandb's server: WANDB_BASE_URL, what `wandb login --host` wrote down, or the public one."""
    if url := os.environ.get("WANDB_BASE_URL"):
        return url
    folder = Path(os.environ.get("WANDB_CONFIG_DIR", Path.home() / ".config" / "wandb"))
    settings = configparser.ConfigParser(interpolation=None)
    try:
        settings.read(folder / "settings")
        return settings["default"]["base_url"]
    except (configparser.Error, KeyError, OSError, UnicodeDecodeError):
        return "https://api.wandb.ai"


def has_key() -> bool:
    """Whether wandb would find a key for its server without asking for one."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            if netrc.netrc(path).authenticators(urlparse(base_url()).hostname or ""):
                return True
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            continue
    return False


def _probe(url: str) -> None:
    """Any answer will do. A server that never answers would hold up wandb's own exit for long."""
    try:
        urllib.request.urlopen(url, timeout=_PROBE_SECONDS).close()
    except urllib.error.HTTPError:
        pass


def _run_id(folder: Path) -> str:
    path = folder / "wandb_id"
    if path.is_file() and (known := path.read_text().strip()):
        return known
    fresh = secrets.token_hex(4)
    atomic.write(path, fresh + "\n")
    return fresh


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
