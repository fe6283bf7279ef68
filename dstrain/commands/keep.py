"""Supervises a training command: starts it again until its run is complete, with any launcher."""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import datetime
from types import FrameType

from dstrain.commands.options.keep import KeepOptions
from dstrain.commands.options.shipped import find_recipe
from dstrain.disk.lines import append_lines
from dstrain.distributed import exit_codes
from dstrain.distributed.processes import list_descendant_pids
from dstrain.recipe import ConfigError, Run, load_recipe
from dstrain.runs import folders
from dstrain.runs.hostfile import exclude_hosts_from_command, find_unreachable_hosts, read_hosts, require_enough_hosts

FRUITLESS = 4  # starts in a row that save no step, after which it gives up
_LONGEST = 300.0  # seconds between two starts
# Options of one command alone, with the number of words that they take.
_ONCE = {"--from-scratch": 0, "--from_scratch": 0, "--step": 1, "--profile": 1}
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_SUBREAPER = 36  # prctl: orphans below this process become its children


def run_verb(options: KeepOptions) -> None:
    """Keeps the training command running, and raises SystemExit with the exit code of its last start. Raises
    ConfigError if the command's hostfile names fewer hosts than --min-hosts.
    """
    job = options.training_options
    if options.min_hosts:
        require_enough_hosts(options.words, options.min_hosts)
    raise SystemExit(keep_command_running(options, load_recipe(find_recipe(job.recipe), job.overrides)))


def keep_command_running(options: KeepOptions, run: Run) -> int:
    """Runs the command, and restarts it whenever it has died, until the run is complete or a restart is of no use.
    Returns the exit code of the last start, 0 if the run is complete.
    """
    return _Supervisor(options, run).keep_command_running()


class _Supervisor:
    def __init__(self, options: KeepOptions, run: Run):
        self._options, self._run, self._folder = options, run, run.directory
        self._signal: int | None = None  # that was passed on: no restart after it
        self._process: subprocess.Popen | None = None
        self._new = not (self._folder / "run.yaml").exists()
        self._before = self._read_earlier_folders_and_step()
        self._unwritten: list[str] = []  # lines for restarts.log, until the folder is a run's

    def keep_command_running(self) -> int:
        """Starts the command again and again, until it ends in a way that a restart would not change, or until
        --max-restarts, or until 4 starts in a row have saved no step. Returns the exit code of the last start.
        """
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._forward_signal)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
        fruitless, words = 0, list(self._options.words)
        for restart in range(self._options.max_restarts + 1):
            saved = folders.read_last_saved_step(self._folder)
            code = self._run_command(self._exclude_unreachable_hosts(words))
            self._flush_lines_to_log()
            now = folders.read_last_saved_step(self._folder)
            fruitless = 0 if now > saved else fruitless + 1
            if self._must_not_restart(code, now):
                return _convert_to_shell_exit_code(code)
            end = f"{_describe_exit(code)}, step {now} is saved ({now - saved:+d})"
            if saved and not (self._folder / "run.yaml").exists():
                self._print_and_log_line(
                    f"{end}; no further restart, which would begin anew: {self._folder} is no longer there"
                )
                break
            if fruitless == FRUITLESS or restart == self._options.max_restarts:
                why = (
                    f"{FRUITLESS} starts in a row have saved no step"
                    if fruitless == FRUITLESS
                    else f"--max-restarts {restart} is reached"
                )
                self._print_and_log_line(f"{end}; no further restart: {why}")
                break
            pause = min(self._options.backoff * 2**fruitless, _LONGEST)
            words = self._make_restart_command()
            self._print_and_log_line(
                f"{end}; restart {restart + 1} of {self._options.max_restarts} in {pause:g} s: {shlex.join(words)}"
            )
            self._wait_unless_signalled(pause)
            if self._signal:
                break
        return _convert_to_shell_exit_code(code) or exit_codes.BUG  # 0, and the run is not complete

    def _exclude_unreachable_hosts(self, words: list[str]) -> list[str]:
        """Returns the command without the hosts that do not answer. Waits as long as fewer than --min-hosts answer, and
        writes a line about the missing ones. Returns the command unchanged without --min-hosts, or after a signal.
        """
        least, told = self._options.min_hosts, None
        while least and not self._signal:
            hosts = read_hosts(words)
            missing = find_unreachable_hosts(hosts)
            enough = len(hosts) - len(missing) >= least
            if missing and missing != told:
                what = "starting without them" if enough else f"waiting until {least} of {len(hosts)} hosts answer"
                self._print_and_log_line(f"no answer from {', '.join(missing)}: {what}")
            if enough:
                return exclude_hosts_from_command(words, hosts, missing)
            told = missing
            self._wait_unless_signalled(min(max(self._options.backoff, 1.0), _LONGEST))
        return words

    def _run_command(self, words: list[str]) -> int:
        """Runs the command, and waits until all its processes have ended and the lock of the run's folder is free.
        Returns the command's exit code, negative if a signal has killed it. If that code says too little, returns the
        code that a rank has recorded.
        """
        with tempfile.NamedTemporaryFile(prefix="dstrain-ended-") as file:
            try:
                self._process = subprocess.Popen(
                    words, env=exit_codes.make_exit_code_environment(file.name), start_new_session=True
                )
            except OSError as error:
                raise ConfigError(
                    f"{words[0]} cannot be started ({error.strerror}): name the launcher behind --, such "
                    "as deepspeed or python"
                ) from None
            if self._signal:  # it came while the command was being started
                self._forward_signal(self._signal, None)
            code = self._process.wait()
            self._end_leftover_ranks()
            if (self._folder / "run.yaml").exists():
                self._wait_for_folder_lock()
            noted = exit_codes.read_exit_codes(file.name)
        if self._signal and exit_codes.STOPPED in noted:
            return exit_codes.STOPPED
        # torchrun turns every code into 1, as does deepspeed after a signal; and into 0 where its own child was killed.
        vague = code == exit_codes.BUG or (
            code == exit_codes.DONE and folders.read_last_saved_step(self._folder) < self._run.steps
        )
        return next((number for number in exit_codes.DELIBERATE if number in noted), code) if vague else code

    def _end_leftover_ranks(self) -> None:
        """Waits until the ranks that a launcher has left running have saved and ended. Kills them if they still run
        after faults.timeout_minutes.
        """
        end = time.monotonic() + 60 * self._run.faults.timeout_minutes
        while rest := list_descendant_pids(os.getpid()):
            if time.monotonic() > end:
                self._print_and_log_line(f"{len(rest)} processes of the last start still run and are killed")
                end = time.monotonic() + _LONGEST  # a process that waits for its disk or GPU cannot end at once
                for pid in rest:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)
        while True:  # those that ended as orphans are its children
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    return
            except ChildProcessError:
                return

    def _wait_for_folder_lock(self) -> None:
        """Waits until no process has the run's folder: rank 0 may run on another machine. Gives up after a signal, and
        raises ConfigError after faults.timeout_minutes.
        """
        end = time.monotonic() + 60 * self._run.faults.timeout_minutes
        while not self._signal:
            try:
                return folders.lock_folder(self._folder, 1.0).close()
            except ConfigError:
                if time.monotonic() > end:
                    raise

    def _must_not_restart(self, code: int, saved_step: int) -> bool:
        """Returns whether the command is not to be started again: after a signal to this process, wrong input,
        divergence, a stop on purpose (without --restart-on-stop), or a complete run. `saved_step` is the last saved
        step.
        """
        if self._signal or code in (exit_codes.WRONG_INPUT, exit_codes.DIVERGED):
            return True
        return (code == exit_codes.STOPPED and not self._options.restart_on_stop) or (
            code == exit_codes.DONE and saved_step >= self._run.steps
        )

    def _make_restart_command(self) -> list[str]:
        """Returns the command for a restart. Leaves out --from-scratch, --step and --profile, which hold for a single
        start, once a start has saved a step or moved files aside, or if the folder held no run at first.
        """
        words = list(self._options.words)
        if self._new or self._read_earlier_folders_and_step() != self._before:
            for option, values in _ONCE.items():
                words = [word for word in words if not word.startswith(f"{option}=")]
                while option in words:
                    del words[words.index(option) : words.index(option) + 1 + values]
        return words

    def _read_earlier_folders_and_step(self) -> tuple[set[str], int]:
        """Returns two marks of progress: the names of the folders earlier_N, into which a start with --from-scratch or
        --step moves files, and the run's last saved step.
        """
        return {path.name for path in self._folder.glob("earlier_*")}, folders.read_last_saved_step(self._folder)

    def _forward_signal(self, number: int, frame: FrameType | None) -> None:
        """Sends a signal on to the command's process group. Sends the first SIGINT (Ctrl-C) or SIGHUP as SIGTERM, since
        torchrun would double a SIGINT, and a rank that gets two ends without saving.
        """
        first, self._signal = self._signal is None, number
        if number in (signal.SIGINT, signal.SIGHUP) and first:
            number = signal.SIGTERM
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _wait_unless_signalled(self, seconds: float) -> None:
        """Waits for some seconds, or until a signal has come."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._signal:
            time.sleep(0.1)

    def _print_and_log_line(self, text: str) -> None:
        """Writes a line, with the time, to stderr and to restarts.log. Until the folder holds a run, lines for
        restarts.log are kept in memory.
        """
        line = f"{datetime.now().astimezone().isoformat(timespec='seconds')} keep: {text}"
        print(line, file=sys.stderr, flush=True)
        self._unwritten.append(line + "\n")
        self._flush_lines_to_log()

    def _flush_lines_to_log(self) -> None:
        """Appends the lines that wait in memory to restarts.log, if the folder holds a run. Prints an error on stderr
        if the file cannot be written.
        """
        if self._unwritten and (self._folder / "run.yaml").exists():
            try:
                append_lines(self._folder / "restarts.log", "".join(self._unwritten))
                self._unwritten.clear()
            except OSError as error:
                print(f"keep: restarts.log cannot be written: {error}", file=sys.stderr)


def _convert_to_shell_exit_code(code: int) -> int:
    """Converts the exit code of a command to that of this process: -N, which says that signal N has killed the command,
    becomes 128 + N.
    """
    return code if code >= 0 else 128 - code


def _describe_exit(code: int) -> str:
    """Returns in words how a command ended. `code` is its exit code, negative if a signal has killed the launcher. If
    signal N has killed a rank, deepspeed's code is 256 - N, and a shell's 128 + N; 255 is an error of ssh.
    """
    names = {number.value: number.name for number in signal.Signals}
    if code < 0:
        return f"the launcher was killed by {names.get(-code, -code)}"
    number = 256 - code if code >= 192 else code - 128
    if number in names and 128 < code < 255:
        return f"ended with {code} ({names[number]})"
    remark = {exit_codes.DONE: " before the run was complete", exit_codes.HUNG: " (a rank hung: see stacks/)"}
    return f"ended with {code}{remark.get(code, '')}"
