"""launch/plan.py: what it says, and what it refuses."""

import json
import subprocess
import sys

import psutil
import pytest

from tests.support.launch import ROOT, environment, here
from tests.support.sample import sampled

SIZES = "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters"
TINY = "--recipe", ROOT / "tests/launch/tiny.yaml"


@pytest.mark.parametrize(
    "words, names",
    [
        (["--gpu", "h300"], ["--gpu h300", "h200, h100, a100, 4090"]),
        (["--world", "3"], ["batch.global=8", "3 ranks"]),
        (["--world", "0"], ["--world"]),
        (["--efficiency", "0"], ["--efficiency 0.0", "above 0 and at most 1"]),
        (["--efficiency", "nan"], ["--efficiency nan", "above 0 and at most 1"]),
        (["--world", "100000"], ["--world 100000", "give --world 4096 or fewer"]),
        (["--ds_config", "{file}"], ["wrong.json", '"zero_optimization.stage" is 7: write one of 0, 1, 2, 3\n']),
        (["model.depth=none"], ["model.depth"]),
        (["launch/recipes/dit-small.yaml"], ["write --recipe launch/recipes/dit-small.yaml"]),
    ],
)
def test_wrong_input(words, names, tmp_path, monkeypatch, capsys):
    """Oracle: exit code 2 and one message that names the entry, before anything is counted."""
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"zero_optimization": {"stage": 7}}')
    code, out, err = here("plan.py", [*TINY, *(word.format(file=wrong) for word in words)], monkeypatch, capsys)
    assert code == 2 and out == "" and all(name in err for name in names), err


def test_a_search_that_is_stopped():
    """Oracle: rows come while it counts; after SIGTERM the process table holds no child, and the last words are the
    command's own: none of semaphores that it left.
    """
    with subprocess.Popen(
        [sys.executable, ROOT / "launch" / "plan.py", *TINY, "--search"],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        row = next(line for line in command.stderr if line.split()[:1] == ["1"])
        assert len(row.split()) == 8
        children = psutil.Process(command.pid).children(recursive=True)
        command.terminate()
        out, err = command.communicate(timeout=60)
    assert command.returncode == 130 and out == "" and children
    assert err.endswith("plan.py: interrupted\n")
    assert psutil.wait_procs(children, timeout=60)[1] == []


FITS = [
    (0, 4, ["batch.global=4", "model.recompute=all"], {"zero_optimization.stage": 2}),
    (3, 4, ["batch.global=4", "model.recompute=all"], {"zero_optimization.offload_optimizer": "cpu"}),
    (3, 2, ["batch.global=4", "batch.micro=1", "model.recompute=all", "optimizer.name=lion"], {"world": 4}),
]


# In CI another stage and offload are planning/test_advice.py's; more GPUs are looked for after all other changes.
@pytest.mark.parametrize("fit", sampled(FITS, FITS[2:]), ids=lambda fit: next(iter(fit[-1])))
def test_what_makes_it_fit(fit, tmp_path, monkeypatch, capsys):
    """Oracle: GPUs of exactly the bytes that the changed run takes: what the command names changes this choice alone,
    and with what it names the same command says that it fits. Weights too large for the stage, and so large that only
    offload, or more GPUs where the optimizer has none, helps; smaller micro-batches: tests/planning/test_advice.py.
    """
    stage, world, words, change = fit

    def planned(change, gpu):
        zero = {"stage": change.get("zero_optimization.stage", stage), "reduce_bucket_size": 10**6}
        if device := change.get("zero_optimization.offload_optimizer"):
            zero["offload_optimizer"] = {"device": device, "pin_memory": True}
        file = tmp_path / "ds_config.json"
        file.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": zero}))
        code, out, err = here(
            "plan.py",
            [
                *map(str, TINY),
                "--json",
                "--ds_config",
                str(file),
                "--world",
                str(change.get("world", world)),
                "--gpu",
                str(gpu),
                "model.hidden_size=1024",
                "model.depth=1",
                *words,
            ],
            monkeypatch,
            capsys,
        )
        values = json.loads(out)
        assert code == (0 if values["fits"] else 1), err
        return values

    changed = planned(change, "900TB")
    memory = changed["device_bytes"] + changed["reserve_bytes"]
    before = planned({}, memory)
    assert not before["fits"] and before["advice"]["changes"].keys() == change.keys()
    assert planned(before["advice"]["changes"], memory)["fits"]
