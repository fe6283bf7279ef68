"""The kit for a GPU: its runner, its figures, and a dry run of its cases, on the CPU."""

import contextlib
import inspect
import json
import math
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from dstrain.engine.updates import AsyncHostCopy
from dstrain.planning.synthetic import Repeated
from dstrain.recipe import ConfigError
from dstrain.systems.dit.network import DiT
from dstrain.systems.phenaki.maskgit import Pending
from kit import cases, correct, jobs, kit, precisions, report, speed
from kit.sides import apart, system_of
from kit.speed import idle_share
from tests.launch.kit_cases import CASES
from tests.support.launch import KIT_PATH, ROOT, environment, here

# Through launch/bench/gpu.py, each in its own process: one that shares the machine, and two that have it to themselves.
TRIED = ("dvae fp32", "DiT-XL/2 B=256 dstrain stock", "stall")

# Left to others, since they take minutes: training, saves and waits of every system, but for one, to tests/engine and
# tests/gpu, the first command to tests/launch/test_resume.py.
ELSEWHERE = ("check", "no_reads", "first_command")

# Of the cases that time DiT-XL/2, those that CI runs: every side, precision and kind of switch, and the stages 1 to 3.
# The others are left to pytest -m faults. They differ by one value of the recipe or of the JSON, which
# test_every_switch_is_accepted reads.
SHORT = (
    "B=32 dstrain plain stock accelerate fast-DiT",
    "with the recipe as shipped",
    "with model.recompute=attention",
    "with stage 2",
    "with stage 3, overlap_comm=False",
    "with fp16",
)


@pytest.mark.slow
def test_dry_run(tmp_path):
    """Oracle: the kit's own targets of correctness, which hold on any device; and the same rows in JSON and table."""
    done = subprocess.run(
        [sys.executable, ROOT / "launch/bench/gpu.py", "--dry-run", "--only", ",".join(TRIED), "--out", tmp_path],
        env=environment(),
        text=True,
        capture_output=True,
        timeout=600,
    )
    results = {}
    for path in sorted(tmp_path.glob("part*.json")):
        content = json.loads(path.read_text())
        table = path.with_suffix(".md").read_text()
        for result in content["results"]:
            results[result["case"]] = result
            assert result["status"] == "done", result["error"]
            assert result["rows"]
            for row in result["rows"]:
                assert row["ok"] is not False, (result["case"], row)
                assert f"| {result['case']} | {row['what']} | " in table
    assert results.keys() == set(TRIED)
    assert done.returncode == 0, done.stdout + done.stderr
    judged = {row["what"]: row for row in results["dvae fp32"]["rows"]}
    for stage in (0, 2):  # two of the strict ones are really there
        assert judged[f"stage {stage}: values that differ when resumed"]["ok"] is True
        assert judged[f"stage {stage}: loss of 8 steps, from plain torch in fp32"]["target"] == "<= 0.0001"
    speed = {row["what"]: row for row in results[TRIED[1]]["rows"]}
    assert (speed["dstrain: samples/s"]["target"], speed["dstrain: samples/s"]["ok"]) == (">= 780", None)
    assert {"stock: share of matmul", "dstrain / stock", "stock: idle share"} <= speed.keys()


@pytest.mark.parametrize(
    "count", [pytest.param("sample", marks=pytest.mark.slow), pytest.param("full", marks=pytest.mark.faults)]
)
def test_every_case(tmp_path, count):
    """Oracle: the kit's own targets that hold on any device, in every case but those that others try; a case without
    rows says what it needs.
    """
    names = [case.name for case in cases.cases() if case.work.__name__ not in ELSEWHERE or case.name == "dvae waits"]
    if count == "sample":
        timed = {case.name for case in cases.cases() if case.options.get("recipe") == "DiT-XL/2"}
        kept = {f"DiT-XL/2 {name}" for name in SHORT}
        assert kept < timed
        names = [name for name in names if (name not in timed or name in kept) and name not in TRIED]
    done = subprocess.run(
        [sys.executable, "-m", "tests.launch.check_kit", tmp_path, *names],
        cwd=ROOT,
        env=environment(PYTHONPATH=KIT_PATH),
        text=True,
        capture_output=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result["case"] for result in results] == names
    for result in results:
        assert result["rows"] or "needs" in result["details"].get("left out", ""), result
        assert not [row for row in result["rows"] if row["ok"] is False], result
    for precision, least, most in (("fp32", 1e-8, 1e-3), ("bf16", 1e-3, 0.3)):
        rounded = [
            row["value"]
            for result in results
            for row in result["rows"]
            if precision in row["what"] and "from float64" in row["what"]
        ]
        assert len(rounded) == 12 and all(least < value < most for value in rounded), rounded


def note_precisions(path):
    """Writes, for each case, torch's flags and the weights' dtype whenever a network is called;
    the first is float64's.
    """
    seen = []

    def spy(owner, name, network_of):
        real = getattr(owner, name)

        def noted(*args, **kwargs):
            dtype = str(next(network_of(args[0]).parameters()).dtype)
            seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, dtype))
            return real(*args, **kwargs)

        setattr(owner, name, noted)

    precisions.find_precision_problem = lambda precision, key: None  # tf32 as if this machine had it
    spy(DiT, "forward", lambda network: network)
    spy(precisions, "encode_posterior", lambda vae: vae.encoder)
    record, found = report.Record(path.with_suffix(".record"), True, path.parent), []
    for work, *options in ((precisions.gradients, "dit", 1e-5), (precisions.draw,), (precisions.encode,)):
        work(record, *options)
        found.append([seen[0][2], *dict.fromkeys(seen[1:])])
        seen.clear()
    path.write_text(json.dumps(found))


def test_precisions_are_taken(in_fork, tmp_path):
    """Oracle: torch's own flags and the weights' dtype where a network computes, which encoders/precision.py names."""
    in_fork(note_precisions, tmp_path / "found.json")
    for exact, *others in json.loads((tmp_path / "found.json").read_text()):
        assert exact == "torch.float64"
        assert others == [
            ["highest", False, "torch.float32"],
            ["high", True, "torch.float32"],
            ["highest", False, "torch.bfloat16"],
        ]


def test_every_switch_is_accepted():
    """Oracle: the checks of the recipe and of the settings, for what each case that is timed names."""
    timed = [case.options for case in cases.cases() if case.work is speed.beside]
    assert len(timed) > 20
    for options in timed:
        if options.get("precision") == "fp16":  # refused on a CPU
            continue
        batch = 2 * options.get("accumulation", 1)
        words = [f"batch.global={batch}", "batch.micro=2", *options.get("overrides", ())]
        run = jobs.published(options["recipe"], True, words)
        try:
            jobs.settings(run, options.get("stage", 1), options.get("precision", "bf16"), **options.get("zero", {}))
        except ConfigError as error:  # the case says so, see test_a_refused_choice_is_left_out
            assert options.get("overrides") and " needs " in error.problems[0]


def test_cases():
    """Oracle: unique names, by which a process finds its case; a title for each part; the options
    that its work takes.
    """
    known = cases.cases()
    assert len({case.name for case in known}) == len(known)
    assert {case.part for case in known} == cases.TITLES.keys()
    for case in known:
        inspect.signature(case.work).bind(None, **case.options)


@pytest.mark.parametrize("system", ["vae", "tokenizer"])
def test_rounding_stays_small(system):
    """Oracle: the same loop with float64 networks: what rounding makes of a curve with an adversary is far below the
    kit's targets.
    """
    run = jobs.small(system, ["compile=off"])
    exact, wide, narrow = (correct._plain(run, dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16))
    assert 0 < apart(wide, exact) < 2e-5  # the target is 1e-4
    assert apart(narrow, exact) < 1e-2  # a quarter of the target


def test_a_part_survives_its_cases(tmp_path, monkeypatch):
    """Oracle: cases that end well, miss a target, raise, die and hang: what they wrote before is kept."""
    monkeypatch.setenv("PYTHONPATH", KIT_PATH)
    good = kit.run_part(
        1, "ways to end", CASES, tmp_path, True, [sys.executable, str(ROOT / "tests/launch/kit_cases.py")], seconds=400
    )
    assert not good
    content = json.loads((tmp_path / "part1.json").read_text())
    results = {result["case"]: result for result in content["results"]}
    assert content["machine"]["torch"] and results.keys() == {case.name for case in CASES}
    assert results["good"]["status"] == "done"
    assert results["good"]["rows"] == [
        {"what": "value", "value": 1.0, "unit": "m", "target": "<= 2", "ok": True},
        {"what": "speed", "value": 1.0, "unit": "", "target": ">= 5", "ok": None},
    ]
    assert results["misses"]["rows"][0]["ok"] is False
    assert results["raises"]["status"] == "failed (1)"
    assert "ValueError: broken on purpose" in results["raises"]["error"]
    assert results["dies"]["status"] == "failed (-9)"
    assert results["hangs"]["status"].startswith("out of time after ")
    for name in ("raises", "dies", "hangs"):
        assert [row["what"] for row in results[name]["rows"]] == ["before"]
    table = (tmp_path / "part1.md").read_text()
    assert "| misses | value | 3 m | <= 2 | **missed** |" in table
    assert "## raises: failed (1)" in table and "broken on purpose" in table


def test_a_part_ends_in_time(tmp_path):
    """Oracle: a part without time left, whose report says which cases were not run."""
    assert not kit.run_part(1, "late", CASES[:1], tmp_path, False, ["false"], seconds=1)
    (result,) = json.loads((tmp_path / "part1.json").read_text())["results"]
    assert result["status"] == "not run: the part's time was over"


def test_targets(tmp_path):
    """Oracle: the definition of <= and >=; a value that is not finite meets none."""
    record = report.Record(tmp_path / "record", False, tmp_path)
    for value in (1.0, 3.0, math.nan):
        record.row("at most", value, at_most=2)
        record.speed("at least", value, at_least=2)
    record.detail("why", {"kernel": 1})
    with open(tmp_path / "record", "a") as file:
        file.write('{"row": {"what": "to')  # of a process that was killed
    rows, details = report.read(tmp_path / "record")
    assert [row.ok for row in rows] == [True, False, False, True, False, False]
    assert details == {"why": {"kernel": 1}}


@pytest.mark.parametrize(
    "spans, share",
    [([(0, 10)], 0.0), ([(0, 4), (6, 10)], 0.2), ([(6, 10), (0, 5), (1, 2)], 0.1), ([(0, 8), (2, 3), (7, 10)], 0.0)],
)
def test_idle_share(spans, share):
    """Oracle: gaps counted by hand; overlapping and nested kernels, in any order."""
    assert idle_share(spans) == pytest.approx(share)
    assert math.isnan(idle_share([]))


def test_switches_are_read_off_the_recipe():
    """Oracle: the recipe's own types: every other value of a choice gets a case; numbers and unknown fields none."""
    assert cases.choices("compile") == ["compile=on", "compile=off"]
    assert cases.choices("save.format") == ["save.format=deepspeed"]
    assert cases.choices("track.tensorboard") == ["track.tensorboard=true"]
    assert cases.choices("model.learn_sigma") == ["model.learn_sigma=false"]
    assert cases.choices("optimizer.lr") == cases.choices("optimizer.unknown") == []


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize("name", jobs.PUBLISHED)
def test_published_recipes_stand_without_data(name, dry):
    """Oracle: the checks of the recipes themselves, and the settings that every part asks for."""
    run = jobs.published(name, dry, ["batch.global=4"])
    assert run.data.path == "no/data"  # none that lies on a user's disk changes the recipe
    for stage in (0, 1, 2, 3):
        assert jobs.settings(run, stage, "bf16")["zero_optimization"]["stage"] == stage


@pytest.fixture
def kit_says(monkeypatch, capsys):
    """kit_says(*words): exit code, output and errors of launch/bench/gpu.py."""
    return lambda *words: here("bench/gpu.py", words, monkeypatch, capsys)


def test_without_a_gpu(kit_says, tmp_path):
    """Oracle: docs/guides/gpu.md: code 2 and the remedy; --list starts nothing."""
    if os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU")
    code, _, errors = kit_says("--part", "3", "--out", tmp_path / "out")
    assert code == 2 and "--dry-run" in errors and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words, remedy",
    [
        (("--seconds", "0"), "seconds above 0"),
        (("--seconds", "nan"), "above 0"),
        (("--out", __file__), "name another folder"),
    ],
)
def test_wrong_words(kit_says, words, remedy):
    """Oracle: by hand: code 2, what was written, and the remedy."""
    code, _, errors = kit_says("--dry-run", "--only", "stall", *words)
    assert code == 2 and words[1] in errors and remedy in errors


def test_names_of_cases(kit_says, tmp_path):
    """Oracle: docs/guides/gpu.md: a name of no case ends with 2, beside the nearest names; --list keeps to a part."""
    code, _, text = kit_says("--dry-run", "--only", "stall,mvae fp32", "--out", tmp_path / "out")
    assert code == 2 and "--only mvae fp32: no case" in text and not (tmp_path / "out").exists()
    assert text.splitlines()[1].strip() == "vae fp32"
    assert len(text.splitlines()) == 1 + len(cases.cases())
    for part, title in cases.TITLES.items():
        code, text, _ = kit_says("--list", "--part", part)
        assert code == 0 and text.startswith(f"part {part}: {title}\n")
    code, text, _ = kit_says("--list", "--part", 4)
    (case,) = [case for case in cases.cases() if case.part == 4]
    assert (code, text.splitlines()) == (0, [f"part 4: {cases.TITLES[4]}", f"    {case.name}"])


def test_waits_are_counted():
    """Oracle: waits made by hand, each once; of late reads, those of dstrain and MaskGit, so many are expected."""
    late, pending = AsyncHostCopy(torch.ones(1)), Pending(torch.ones(1, dtype=torch.bool))
    before = torch.cuda.synchronize, torch.cuda.Stream.synchronize, torch.cuda.Event.synchronize
    with correct.waits() as counts:
        late._copied = pending.event = SimpleNamespace(synchronize=partial(torch.cuda.Event.synchronize, None))
        for wait in (
            torch.cuda.synchronize,
            partial(torch.cuda.Stream.synchronize, None),
            partial(torch.cuda.Event.synchronize, None),
            late.read,
            late.read,
            pending.wait_for_masked_indices,
        ):
            with contextlib.suppress(Exception):  # counted first; then it fails without a GPU or a stream
                wait()
    assert before == (torch.cuda.synchronize, torch.cuda.Stream.synchronize, torch.cuda.Event.synchronize)
    assert sum(counts.values()) == 6
    assert [correct.unexpected(counts, late) for late in (0, 1, 2)] == [6, 4, 3]


def test_a_side_holds_its_moments(tmp_path):
    """Oracle: AdamW's two moments a weight, which it makes in its first step: they are held before a side is timed."""
    run = jobs.published("DiT-XL/2", True, ["batch.global=2"])
    system, settings = system_of(run), jobs.settings(run, 1, "bf16")
    step = speed._side(
        report.Record(tmp_path / "record", True, tmp_path), "plain", run, settings, system, Repeated(system, 2, 1), 1
    )
    network = step.__self__.networks["denoiser"]
    moments = [state[name] for state in network.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert sum(moment.numel() for moment in moments) == 2 * sum(weight.numel() for weight in network.weights)


def test_a_refused_choice_is_left_out(tmp_path, monkeypatch):
    """Oracle: the settings' own message; what a recipe ships with must be accepted, and raises."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as where it is not installed
    record = report.Record(tmp_path / "record", True, tmp_path)
    speed.beside(record, "DiT-XL/2", 256, ("dstrain",), overrides=("optimizer.name=adamw8bit",))
    rows, details = report.read(tmp_path / "record")
    assert not rows and "optimizer.name=adamw8bit needs bitsandbytes" in details["left out"]
    with pytest.raises(ConfigError, match="offload_param"):
        speed.beside(record, "DiT-XL/2", 256, ("dstrain",), zero={"offload_param": {"device": "cpu"}})


@pytest.mark.parametrize(
    "words, problem",
    [
        (("--batch", "0"), "--batch: '0' is not a whole number above 0"),
        (("dit-small", "dit-smal"), "RECIPE dit-smal: there is no such name"),
    ],
)
def test_wrong_words_for_recomputation(words, problem, monkeypatch, capsys):
    """Oracle: exit code 2 and the argument's own name, before the table begins."""
    code, output, errors = here("bench/recompute.py", words, monkeypatch, capsys)
    assert (code, output) == (2, "")
    assert problem in errors and "Traceback" not in errors
