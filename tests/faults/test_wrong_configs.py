"""Configs that were made to break a reader: each ends with exit code 2 and a line that names its key or file.

Usual mistakes stand in tests/launch/test_wrong_input.py; here are values that no user means: absurd sizes, deep or
endless files, types that Python confuses, paths that are none.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.support.launch import ROOT, environment, here

HUGE, LONG = 10**30, "9" * 5000
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 30)
)


def json_text(**settings: object) -> str:
    return json.dumps(settings)


FILES = {
    "deep.yaml": "model: " + "[" * 3000 + "]" * 3000 + "\n",
    "deep_map.yaml": "{a: " * 3000 + "1" + "}" * 3000,
    "deep_block.yaml": "".join(" " * level + "- \n" for level in range(3000)),
    "bomb.yaml": BOMB,
    "itself.yaml": "model: &a\n  b: *a\n",
    "anchors.yaml": "model: {size: &a 1, depth: *b}\n",
    "object.yaml": "name: !!python/object/apply:os.system ['touch marker']\n",
    "name.yaml": "name: !!python/name:os.system\n",
    "set.yaml": "model: !!set {a, b}\n",
    "int.yaml": "steps: !!int 'x'\n",
    "binary.yaml": bytes(range(256)) * 8,
    "nul.yaml": "name: a\0b\n",
    "huge.yaml": "# " + "x" * (2 << 20) + "\nsteps: 3\n",
    "utf16.yaml": "steps: 3\n".encode("utf-16"),
    "two.yaml": "steps: 3\n---\nsteps: 4\n",
    "text.yaml": "steps\n",
    "digits.yaml": f"steps: {LONG}\n",
    "half.yaml": "optimizer: {lr: 0.1",
    "many.yaml": f"model: [{'1, ' * 120_000}]\n",
    "deep.json": "[" * 3000 + "]" * 3000,
    "deep_map.json": '{"a": ' * 3000 + "1" + "}" * 3000,
    "section.json": '{"zero_optimization": ' + '{"a": ' * 200 + "1" + "}" * 200 + "}",
    "nan.json": '{"gradient_clipping": NaN}',
    "inf.json": '{"gradient_clipping": 1e400}',
    "digits.json": '{"zero_optimization": {"reduce_bucket_size": ' + LONG + "}}",
    "binary.json": bytes(range(256)),
    "empty.json": "",
    "text.json": '"zero2"',
    "null.json": "null",
    "huge.json": '{"a": "' + "x" * (17 << 20) + '"}',
    "true.json": json_text(zero_optimization={"stage": True}),
    "word.json": json_text(zero_optimization={"stage": "2"}),
    "half.json": json_text(zero_optimization={"stage": 2.5}),
    "stage_null.json": json_text(zero_optimization={"stage": None}),
    "bucket.json": json_text(zero_optimization={"stage": 2, "reduce_bucket_size": HUGE}),
    "wide.json": json_text(zero_optimization={"stage": 2, "reduce_bucket_size": 10**400}),
    "gather.json": json_text(zero_optimization={"stage": 2, "allgather_bucket_size": 2**63}),
    "negative.json": json_text(zero_optimization={"stage": 2, "reduce_bucket_size": -1}),
    "none.json": json_text(zero_optimization={"stage": 2, "reduce_bucket_size": 0}),
    "prefetch.json": json_text(zero_optimization={"stage": 3, "stage3_prefetch_bucket_size": HUGE}),
    "group.json": json_text(zero_optimization={"stage": 3, "sub_group_size": 0}),
    "list.json": json_text(zero_optimization=[2]),
    "enabled.json": json_text(bf16={"enabled": "yes"}),
    "one.json": json_text(bf16={"enabled": 1}),
    "clip.json": json_text(gradient_clipping="much"),
    "batch.json": json_text(train_batch_size=True),
    "optimizer.json": json_text(optimizer="AdamW"),
    "print.json": json_text(steps_per_print=0),
    "scale.json": json_text(fp16={"enabled": True, "initial_scale_power": 10**6}),
    "run_empty/run.yaml": "",
    "run_list/run.yaml": "- 1\n",
    "run_deep/run.yaml": "[" * 3000,
    "run_binary/run.yaml": bytes(range(256)),
}

WRONG = {
    # numbers beyond what arithmetic holds
    "steps of 1e400": (["steps=1e400"], "steps=inf"),
    "steps of 1e300": (["steps=1e300"], "steps="),
    "steps of 5,000 digits": ([f"steps={LONG}"], "steps="),
    "steps of 2**63": ([f"steps={2**63}"], "steps="),
    "steps of 400 digits": (["steps=" + "9" * 400], "steps="),
    "batch of 10**30": ([f"batch.global={HUGE}"], "batch.global="),
    "batch of 2**63": ([f"batch.global={2**63}"], "batch.global="),
    "micro of 10**30": ([f"batch.global={HUGE}", f"batch.micro={HUGE}"], "batch.micro="),
    "rate of 1e38": (["optimizer.lr=1e38"], "optimizer.lr="),
    "rate of 1e400": (["optimizer.lr=1e400"], "optimizer.lr=inf"),
    "rate of nan": (["optimizer.lr=.nan"], "optimizer.lr=nan"),
    "decay of 1e300": (["optimizer.weight_decay=1e300"], "optimizer.weight_decay="),
    "eps of inf": (["optimizer.eps=.inf"], "optimizer.eps=inf"),
    "beta of nan": (["optimizer.betas=[.nan, 0.9]"], "optimizer.betas[0]=nan"),
    "clip of inf": (["optimizer.clip=.inf"], "optimizer.clip=inf"),
    "EMA of nan": (["ema.decays=[.nan]"], "ema.decays[0]=nan"),
    "guidance of 1e300": (["samples.guidance_scale=1e300"], "samples.guidance_scale="),
    "share of nan": (["data.max_bad_fraction=.nan"], "data.max_bad_fraction=nan"),
    "minutes of inf": (["faults.timeout_minutes=.inf"], "faults.timeout_minutes=inf"),
    "a hang before its time": (["faults.hang_factor=0.5"], "faults.hang_factor=0.5"),
    "seed of 10**30": ([f"seed={HUGE}"], "seed="),
    "warm-up of 10**30": ([f"optimizer.warmup={HUGE}"], "optimizer.warmup="),
    "save every 10**30": ([f"every.save={HUGE}"], "every.save="),
    "label of 10**30": ([f"samples.labels=[{HUGE}]"], "samples.labels"),
    "seed of samples": ([f"samples.seed={HUGE}"], "samples.seed"),
    "10**12 samples": (["samples.num=1000000000000"], "samples.num="),
    "10**12 workers": (["data.workers=1000000000000"], "data.workers="),
    # sizes that no machine holds
    "width of 10**30": ([f"model.hidden_size={HUGE}"], "model.hidden_size"),
    "width of 2**62": ([f"model.hidden_size={2**62}", "model.num_heads=2"], "model has more than"),
    "width of 6*10**8": (["model.hidden_size=600000000"], "model has more than any machine holds"),
    "depth of 10**30": ([f"model.depth={HUGE}"], "model.depth"),
    "depth of 10**8": (["model.depth=100000000"], "model has more than any machine holds"),
    "classes of 10**15": (["model.num_classes=1000000000000000"], "write model.num_classes=10"),
    "image of 65,536": (["data.image_size=65536"], "model has more than any machine holds"),
    "image of 10**9": (["data.image_size=1000000000"], "data.image_size="),
    "image of 2**63": ([f"data.image_size={2**63}"], "data.image_size="),
    "negative width": (["model.hidden_size=-192"], "model.hidden_size=-192"),
    "no heads": (["model.num_heads=0"], "model.num_heads=0"),
    "ratio of nan": (["model.mlp_ratio=.nan"], "model.mlp_ratio=nan"),
    "ratio of 1e300": (["model.mlp_ratio=1e300"], "model.mlp_ratio"),
    # types that Python confuses
    "true for steps": (["steps=true"], "steps is true"),
    "true for a rate": (["optimizer.lr=true"], "optimizer.lr is true"),
    "true in a list": (["optimizer.betas=[true, 0.9]"], "optimizer.betas"),
    "a list for a number": (["steps=[3]"], "steps="),
    "a section for a number": (["steps={a: 1}"], "steps="),
    "a list for a path": (["data.path=[a]"], "data.path="),
    "a number for a switch": (["data.flip=2"], "data.flip=2"),
    "a list for a section": (["data=[1]"], "data="),
    "a tag": (["name=!!python/object/apply:os.system ['touch marker']"], "name="),
    "an alias": (["name=*a"], "name="),
    "brackets 3,000 deep": (["model=" + "[" * 3000 + "]" * 3000], "model="),
    "keys 3,000 deep": (["model" + ".a" * 3000 + "=1"], "model.a"),
    "an empty key": (["=3"], "=3"),
    "dots": (["..=3"], "..=3"),
    # recipes as files
    **{f"recipe {name}": (["--recipe", name], name) for name in FILES if name.endswith(".yaml") and "/" not in name},
    "recipe of no end": (["--recipe", "/dev/zero"], "/dev/zero"),
    "recipe a pipe": (["--recipe", "pipe"], "pipe"),
    "recipe in a circle": (["--recipe", "circle"], "circle"),
    "recipe of a NUL": (["--recipe", "a\0b"], "--recipe"),
    "recipe of a long name": (["--recipe", "x" * 5000], "--recipe"),
    # DeepSpeed's JSON
    **{f"settings {name}": (["--ds_config", name], name) for name in FILES if name.endswith(".json")},
    "settings of no end": (["--ds_config", "/dev/zero"], "/dev/zero"),
    "settings a pipe": (["--ds_config", "pipe"], "pipe"),
    "settings a folder": (["--ds_config", "empty"], "empty"),
    "settings of a NUL": (["--ds_config", "a\0b"], "--ds_config"),
    # paths
    "folder in /proc": (["folder=/proc/x"], "folder=/proc/x"),
    "folder of a NUL": (['folder="a\\0b"'], "folder="),
    "folder a pipe": (["folder=pipe"], "folder=pipe"),
    "folder a dangling link": (["folder=dangling"], "folder=dangling"),
    "folder below a dangling link": (["folder=dangling/run"], "folder=dangling/run"),
    "folder in a circle": (["folder=circle"], "folder=circle"),
    "folder of a long name": (["folder=" + "x" * 300], "folder="),
    "folder a device": (["folder=/dev/null"], "folder=/dev/null"),
    "data of a NUL": (['data.path="a\\0b"'], "data.path="),
    "data a pipe": (["data.path=pipe"], "data.path=pipe"),
    "data a device": (["data.path=/dev/zero"], "data.path=/dev/zero"),
    "data in a circle": (["data.path=circle"], "data.path=circle"),
    "data of a long name": (["data.path=" + "x" * 5000], "data.path="),
    "held-out a pipe": (["data.held_out_path=pipe"], "data.held_out_path=pipe"),
    "weights a pipe": (["init_from=pipe"], "pipe"),
    "weights a device": (["init_from=/dev/zero"], "/dev/zero"),
    "weights of a NUL": (['init_from="a\\0b"'], "init_from="),
    "weights in a circle": (["init_from=circle"], "init_from=circle"),
    "weights an empty folder": (["init_from=empty"], "empty"),
    "data a run's folder": (["data.path=a_run"], "data.path=a_run is the folder of a run"),
    "weights of something else": (["init_from=other.pt"], "weights of other.pt: they hold a, and no weight"),
    "name of 300 letters": (["name=" + "x" * 300], "name="),
    "system in a path": (["system=../../etc"], "system"),
    "system of a NUL": (['system="a\\0b"'], "system"),
    "system of a module": (["system=os"], "os"),
    # a run's own files
    **{
        f"{name}": ([f"folder={name.partition('/')[0]}"], name.partition("/")[0])
        for name in FILES
        if name.endswith("run.yaml")
    },
    "run.yaml a pipe": (["folder=run_pipe"], "run.yaml"),
    "run.yaml a folder": (["folder=run_folder"], "run.yaml"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with the hostile files; no case may leave anything in it."""
    folder = tmp_path_factory.mktemp("configs")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for name in ("empty", "run_pipe", "run_folder/run.yaml"):
        (folder / name).mkdir(parents=True)
    for name in ("pipe", "run_pipe/run.yaml"):
        os.mkfifo(folder / name)
    (folder / "a_run" / "checkpoints").mkdir(parents=True)
    (folder / "a_run" / "run.yaml").touch()
    torch.save({"a": torch.zeros(3)}, folder / "other.pt")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "circle").symlink_to("circle")
    for path in folder.glob("run_*"):
        (path / "saved").write_text("3\n")
        (path / "checkpoints" / "step_00000003").mkdir(parents=True)
    return folder


def beyond_greeting(out: str) -> list[str]:
    """What is printed besides the first line, which comes before anything is read."""
    return [line for line in out.splitlines() if not line.startswith("dstrain ")]


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_config_is_named(folder, monkeypatch, capsys, case):
    """Oracle: the fault put in: exit code 2, its name on stderr, no traceback, nothing made and nothing executed."""
    arguments, name = WRONG[case]
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "dstrain.train", None)  # a start would end in an ImportError
    before = sorted(folder.rglob("*"))
    code, out, err = here("train.py", arguments, monkeypatch, capsys)
    assert code == 2 and name in err and "Traceback" not in err and not beyond_greeting(out), err[-2000:]
    assert sorted(folder.rglob("*")) == before
    assert max(map(len, err.splitlines())) < 600 and len(err.splitlines()) < 6, err


@pytest.mark.parametrize("case", ["recipe bomb.yaml", "settings deep.json"])
def test_a_real_process(folder, case):
    """Oracle: the exit code and the streams of `python launch/train.py`."""
    arguments, name = WRONG[case]
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "train.py"), *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2 and name in done.stderr and "Traceback" not in done.stderr
    assert not beyond_greeting(done.stdout)


def test_the_table_is_whole():
    """Oracle: issue 13 asks for 60 wrong configs."""
    assert len(WRONG) >= 60
