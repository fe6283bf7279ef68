"""Storage that fails: libc answers the trainer's calls with errors, late or by half (shim.c, by LD_PRELOAD)."""

import json
import os
import shutil
import statistics
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from errno import EINTR, EINVAL, EIO, ENOSPC, ESTALE
from pathlib import Path

import pytest

from dstrain.checkpoint.store import Store
from tests.support import pictures
from tests.support.faulty import Life, complete, crashes, torn_lines, zero
from tests.support.forks import Server
from tests.support.launch import ROOT, environment
from tests.support.runs import files, metrics

STEPS = 24
BEFORE = 12  # steps of the run that the cases of `resume` go on with
IMAGES, SHARD, MANIFEST, METRICS = "/images/c", "/denoiser-0", "/.manifest.json.", "/metrics.jsonl"
WORKERS = ("data.workers=1",)


@dataclass(frozen=True)
class Case:
    """Calls that are disturbed: the first calls of a process go well, then `count` fail, all if 0."""

    name: str
    operation: str
    path: str
    action: int | str
    first: int = 0
    count: int = 1
    resume: bool = False  # in a run that goes on from step 12
    overrides: tuple[str, ...] = ()

    @property
    def rule(self) -> str:
        return f"{self.operation}:{self.path}:{self.action}:{self.first}:{self.count}"


CASES = [
    Case("image, EIO on one read", "read", IMAGES, EIO, 9),
    Case("image, EIO on one read of a worker", "read", IMAGES, EIO, 9, overrides=WORKERS),
    Case("image, EIO on all reads", "read", IMAGES, EIO, 60, 0),
    Case("image, EIO on all reads of workers", "read", IMAGES, EIO, 60, 0, overrides=WORKERS),
    Case("image, ESTALE on one open", "open", IMAGES, ESTALE, 9),
    Case("image, ESTALE on all opens", "open", IMAGES, ESTALE, 60, 0),
    Case("image, EINTR on reads", "read", IMAGES, EINTR, 9, 20),
    Case("image, short reads", "read", IMAGES, "short", 9, 200),
    Case("image, slow reads", "read", IMAGES, "slow500", 9, 3),
    Case("shard, EIO on one write", "write", SHARD, EIO, 2),
    Case("shard, EIO on all writes", "write", SHARD, EIO, 2, 0),
    Case("shard, ENOSPC on one write", "write", SHARD, ENOSPC, 2),
    Case("shard, ENOSPC on all writes", "write", SHARD, ENOSPC, 2, 0),
    Case("shard of one rank, EIO on all writes", "write", "denoiser-00001", EIO, 2, 0),
    Case("shard, ESTALE on one open", "open", SHARD, ESTALE, 2),
    Case("shard, EIO on one fsync", "fsync", SHARD, EIO, 2),
    Case("shard, short writes", "write", SHARD, "short", 0, 0),
    Case("shard, EINTR on writes", "write", SHARD, EINTR, 1, 30),
    Case("shard, slow fsync", "fsync", SHARD, "slow5000", 1),
    Case("shard, slow writes", "write", SHARD, "slow1000", 1, 3),
    # safetensors writes beside the file and renames.
    Case("common file, ENOSPC on one write", "write", ".tmp/.tmp", ENOSPC, 2),
    Case("folders, EINVAL on fsync", "fsyncdir", "/", EINVAL, 0, 0),
    Case("folders, EIO on one fsync", "fsyncdir", "/checkpoints", EIO, 2),
    Case("checkpoint, EIO on one rename", "rename", "step_", EIO, 1),
    Case("manifest, EIO on one write", "write", MANIFEST, EIO, 1),
    Case("manifest, ENOSPC on all writes", "write", MANIFEST, ENOSPC, 1, 0),
    Case("manifest, EIO on one fsync", "fsync", MANIFEST, EIO, 1),
    Case("manifest, ESTALE on one open", "open", MANIFEST, ESTALE, 1),
    Case("manifest, short writes", "write", MANIFEST, "short", 0, 0),
    Case("saved, ENOSPC on writes", "write", "/.saved.", ENOSPC, 0, 2),
    Case("metrics, EIO on one write", "write", METRICS, EIO, 5),
    Case("metrics, ENOSPC on all writes", "write", METRICS, ENOSPC, 5, 0),
    Case("metrics, ESTALE on one open", "open", METRICS, ESTALE, 5),
    Case("metrics, short writes", "write", METRICS, "short", 0, 0),
    Case("metrics, slow writes", "write", METRICS, "slow300", 5, 3),
    Case("log, EIO on all writes", "write", "/log.txt", EIO, 3, 0),
    Case("resume, EIO on one read of a shard", "read", SHARD, EIO, 0, 1, True),
    Case("resume, EIO on all reads of shards", "read", SHARD, EIO, 0, 0, True),
    Case("resume, ESTALE on one open of a shard", "open", SHARD, ESTALE, 0, 1, True),
    Case("resume, EIO on reading after it was verified", "read", SHARD, EIO, 6, 1, True),
    Case("resume, EIO on one read of a manifest", "read", "/manifest.json", EIO, 0, 1, True),
    Case("resume, EIO on all reads of manifests", "read", "/manifest.json", EIO, 0, 0, True),
    Case("resume, ESTALE on all opens of manifests", "open", "/manifest.json", ESTALE, 0, 0, True),
    Case("resume, EIO on reading metrics", "read", METRICS, EIO, 0, 1, True),
    Case("resume, EIO on reading run.yaml", "read", "/run.yaml", EIO, 0, 1, True),
    Case("resume, EIO on reading saved", "read", "/saved", EIO, 0, 0, True),
    Case("resume, short reads of everything", "read", "/run/", "short", 0, 0, True),
]
IN_CI = {
    "image, EIO on one read",
    "shard, EIO on one write",
    "metrics, EIO on one write",
    "resume, EIO on one read of a shard",
}


@dataclass
class Ground:
    """What all cases share: a process to fork from, whose libc the shim disturbs, and two undisturbed runs."""

    forks: Server
    folder: Path
    overrides: tuple[str, ...]

    def life(self, folder: Path, log: Path, rule: str, *more: str) -> Life:
        disturbed = {
            "LD_PRELOAD": str(self.folder / "shim.so"),
            "FAULT_RULES": rule,
            "FAULT_LOG": str(log.with_suffix(".faults")),
        }
        return Life(folder, log, zero(2), *self.overrides, f"steps={STEPS}", *more, forks=self.forks, **disturbed)


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    folder = tmp_path_factory.mktemp("storage")
    compiler = next((name for name in ("cc", "gcc", "g++", "clang") if shutil.which(name)), None)
    if compiler is None:
        pytest.skip("no C compiler, which the shim needs")
    built = subprocess.run(
        [
            compiler,
            "-x",
            "c",
            "-shared",
            "-fPIC",
            "-O2",
            "-o",
            folder / "shim.so",
            ROOT / "tests/faults/shim.c",
            "-ldl",
        ],
        capture_output=True,
        text=True,
    )
    if built.returncode:
        pytest.skip(f"the shim cannot be compiled here: {built.stderr[-300:]}")
    pictures.folder(folder / "images", 10, 4)
    overrides = (f"data.path={folder / 'images'}", "data.max_bad_fraction=0.2")
    complete(folder / "whole", folder / "whole.log", zero(2), *overrides, f"steps={STEPS}")
    complete(folder / "half", folder / "half.log", zero(2), *overrides, f"steps={BEFORE}")
    server = Server(environment(LD_PRELOAD=str(folder / "shim.so")))
    yield Ground(server, folder, overrides)
    server.close()


def judge(ground: Ground, case: Case, folder: Path) -> str:
    """Runs a case: how it ended, in small letters where that is right."""
    run, log, whole = folder / "run", folder / "log", ground.folder / "whole"
    if case.resume:
        shutil.copytree(ground.folder / "half", run)
    try:
        life = ground.life(run, log, case.rule, *case.overrides)
        code, text = life.end(), life.text()
    except AssertionError as error:
        return f"HANG: {str(error)[:200]}"
    if not log.with_suffix(".faults").exists():
        return f"NOT MET: exit code {code}"
    store = Store(run / "checkpoints")
    if broken := [fault for step in store.list_steps() if (fault := store.find_checkpoint_fault(step))]:
        return f"BROKEN: {broken}"
    if torn := torn_lines(run / "metrics.jsonl"):
        return f"TORN: {torn[0][:200]}"
    if errors := crashes(text):
        return f"TRACEBACK: {errors[0]}"
    error = isinstance(case.action, int) and case.action not in (EINTR, EINVAL)
    reported = not error or os.strerror(case.action) in text
    outcome = "went on, reported" if error and reported else "went on"
    if code:
        if not reported:
            return f"UNNAMED: exit code {code}: {text[-300:]}"
        outcome = "ended, named"
        try:
            complete(run, folder / "again", zero(2), *ground.overrides, f"steps={STEPS}")
        except AssertionError as error:
            return f"LOST: {str(error)[-300:]}"
    if files(whole, STEPS) != files(run, STEPS):
        return f"OTHER BITS: exit code {code}, {'reported' if reported else 'in silence'}"
    reference, lines = {line["step"]: line for line in metrics(whole)}, metrics(run)
    if any(line != reference.get(line["step"]) for line in lines):
        return "OTHER METRICS"
    if len(lines) < len(reference) and not reported:
        return f"SILENT: {len(lines)} of {len(reference)} lines of metrics"
    return outcome


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(sorted(IN_CI), marks=pytest.mark.slow, id="sample"),
        pytest.param([case.name for case in CASES], marks=pytest.mark.faults, id="full"),
    ],
)
def test_storage_errors(ground, tmp_path, names, table):
    """Oracle: an undisturbed run: each fault is overcome, or named by an end from which the same command goes on: the
    same bits in the end. Checkpoints verify and no line is torn, whatever happens.
    """
    began, wrong, tally = time.monotonic(), [], Counter()
    chosen = [case for case in CASES if case.name in names and os.environ.get("FAULTS_STORAGE", "") in case.name]
    for number, case in enumerate(chosen):
        folder = tmp_path / str(number)
        folder.mkdir()
        outcome = judge(ground, case, folder)
        tally[outcome.partition(":")[0]] += 1
        with open(tmp_path / "outcomes", "a") as file:
            file.write(f"{case.name}: {outcome}\n")
        if outcome.partition(":")[0].isupper():
            wrong.append(f"{case.name}: {outcome}")
        shutil.rmtree(folder / "run", ignore_errors=True)
    table(f"storage errors: {len(chosen)} cases: {dict(tally)}; {time.monotonic() - began:.0f} s")
    assert not wrong, "\n".join(wrong)


@pytest.mark.faults
def test_slow_storage(ground, tmp_path, table):
    """Oracle: the steps before the save: how much longer steps take while a save waits 5 s for fsync. Printed alone,
    since a loaded machine says nothing.
    """
    life = ground.life(tmp_path / "run", tmp_path / "log", f"fsync:{SHARD}:slow5000:0:1", "steps=700", "every.save=300")
    assert life.end() == 0, life.text()[-3000:]
    assert (tmp_path / "log.faults").exists()
    rates = {
        line["step"]: 1 / line["timing"]["samples_per_second"]
        for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    }
    waited = [line for line in life.text().splitlines() if line.startswith("saved step 300")]
    during = statistics.median(rates[step] for step in range(305, 400))
    before = statistics.median(rates[step] for step in range(205, 300))
    table(f"slow storage (fsync of 5 s): a step takes {during / before:.3f} of its usual time meanwhile; {waited[0]}")
