"""Wrong recipes, overrides, files and paths end before DeepSpeed starts: named, with the remedy,
exit code 2, no traceback.
"""

import json
import os
import re
import subprocess
import sys
import time

import pytest
from PIL import Image

from dstrain.commands.exits import run_main_with_exit_code
from dstrain.commands.job import prepare_job
from dstrain.commands.options.command import parse_options
from dstrain.commands.options.train import TrainOptions
from tests.support.launch import ROOT, free_port, here
from tests.support.sample import sampled

SCRIPT = ROOT / "launch" / "train.py"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with right and wrong files in it."""
    files = {
        "twice.yaml": "steps: 3\nsteps: 4\n",
        "tab.yaml": "steps: 3\n\tseed: 1\n",
        "open.yaml": "model: [1\n",
        "list.yaml": "- steps\n",
        "typo.yaml": "name: x\noptimiser:\n  lr: 1\n",
        "latin.yaml": b"name: \xe9\n",
        "number.yaml": "1: 2\n",
        "good.yaml": "steps: 3\n",
        "bad.json": '{"bf16": {"enabled": true},}',
        "twice.json": '{"bf16": {}, "bf16": {}}',
        "list.json": "[]",
        "auto.json": '{"fp16": {"enabled": "auto"}}',
        "clip.json": '{"gradient_clipping": 1.0}',
        "batch.json": '{"train_batch_size": 63}',
        "lr.json": '{"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}',
        "sched.json": '{"scheduler": {"type": "WarmupLR"}}',
        "fp16.json": '{"fp16": {"enabled": true}}',
        "both.json": '{"fp16": {"enabled": true}, "bf16": {"enabled": true}}',
        "typo.json": '{"zero_optimisation": {"stage": 2}}',
        "zero.json": '{"zero_optimization": {"stage": 2, "bukets": 1}}',
        "stage.json": '{"zero_optimization": {"stage": 4}}',
        "amp.json": '{"amp": {"enabled": true}}',
        "nvme.json": '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nodisk"}}}',
        "elastic.json": '{"elasticity": {"enabled": true}}',
        "afile": "",
        "mixed/notes.txt": "no image",
        "stranger/thesis.tex": "",
        "lost/run.yaml": "name: lost\n",
        "lost/saved": "500\n",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "empty").mkdir()
    (tmp_path / "classes" / "a").mkdir(parents=True)
    (tmp_path / "classes" / "b").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "classes" / "a" / "0.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(arguments, monkeypatch, capsys, **environment):
    """launch/train.py in this process, which may not get as far as building engines: exit code, stdout, stderr."""
    monkeypatch.setitem(sys.modules, "dstrain.train", None)
    return here("train.py", arguments, monkeypatch, capsys, **environment)


GREETING = r"dstrain [\d.]+: rank \d of \d, process \d+ on \S+, Python 3\.\d+\.\d+\n"
WRONG = {
    # overrides
    "bare key": (["lr=1e-3"], "lr: there is no such key (did you mean optimizer.lr?)"),
    "typo": (["stesp=3"], "did you mean steps?"),
    "typo in a section": (["optimizer.bteas=[0.9,0.9]"], "did you mean optimizer.betas?"),
    "unknown section": (["trainer.gpus=8"], "trainer: there is no such key"),
    "other trainers' name": (["batch_size=64"], "did you mean batch.global?"),
    "word for a number": (["steps=many"], "steps=many: it should be a valid integer"),
    "half a step": (["steps=10.5"], "steps=10.5"),
    "true for a number": (["steps=true"], "steps is true"),
    "never": (["every.sample=null"], "every.sample=null: it should be a number of steps; 0 is never"),
    "negative": (["seed=-1"], "seed=-1: it should be greater than or equal to 0"),
    "no samples": (["batch.global=0"], "batch.global=0: it should be greater than 0"),
    "infinite rate": (["optimizer.lr=.inf"], "optimizer.lr=inf: it should be a finite number"),
    "one beta": (["optimizer.betas=[0.9]"], "optimizer.betas[1]"),
    "beta of one": (["optimizer.betas=[0.9,1.0]"], "must lie below 1"),
    "rising schedule": (["optimizer.final_lr=1"], "lower final_lr or raise lr"),
    "warm-up past decay": (["optimizer.decay_steps=10", "optimizer.warmup=20"], "shorten the warm-up"),
    "unknown schedule": (["optimizer.schedule=cosin"], "'constant', 'cosine' or 'linear'"),
    "decay twice": (["ema.decays=[0.9,0.9]"], "name each decay once"),
    "decay of one": (["ema.decays=[1.0]"], "ema.decays[0]=1.0"),
    "no such EMA": (["samples.ema=0.5"], "add it to ema.decays"),
    "bad name": (["name=a/b"], "letters, digits"),
    "section as value": (["optimizer=adam"], "optimizer.name="),
    "value as section": (["steps.total=5"], "steps is the value"),
    "no equals sign": (["steps", "5"], "write key=value without spaces"),
    "unclosed bracket": (["ema.decays=[0.9"], "quote it"),
    "override as option": (["--steps=5"], "steps=5"),
    "unknown option": (["--recipie", "x.yaml"], "did you mean --recipe?"),
    "override with dashes": (["--steps", "20"], "--steps: overrides are written without dashes: steps=VALUE"),
    "section with dashes": (["--data", "x"], "--data: overrides are written without dashes: data.KEY=VALUE"),
    "option without dashes": (["recipe=good"], "recipe=good: options are written with dashes: --recipe good"),
    "option without value": (["--recipe"], "expected one argument"),
    "profile of no step": (["--profile", "10:10"], "'10:10' holds no step: write A:B with A below B"),
    "profile of a word": (["--profile", "ten"], "'ten' is not A:B or A:B:N, such as 10:13"),
    "profile beyond the end": (["--profile", "5:30", "steps=20"], "--profile: step 30 lies beyond steps=20"),
    "step zero": (["--step", "0"], "'0' is not a whole number above 0"),
    "no such checkpoint": (["--step", "5"], "--step 5: runs/dit-small holds no checkpoint of that step; it holds none"),
    "a step, from scratch": (["--step", "5", "--from-scratch"], "--step 5 and --from-scratch: give one of the two"),
    "file without option": (["ds.json"], "write --ds_config ds.json"),
    "too few checkpoints": (["save.keep=1"], "save.keep=1"),
    "micro-batch": (["batch.global=64", "batch.micro=7"], "1, 2, 4, 8, 16, 32, 64"),
    "held out twice": (["data.held_out=0.1", "data.held_out_path=empty"], "give one of the two"),
    "all held out": (["data.held_out=1"], "share below 1"),
    "two starts": (["init_from=a", "model.init_from=b"], "synonym"),
    # the system
    "unknown system": (["system=ditt"], "did you mean dit?"),
    "unknown size": (["model.size=DiT-XXL/2"], "DiT-XL/2"),
    "typo in the model": (["model.dpeth=3"], "did you mean model.depth?"),
    "heads and width": (["model.hidden_size=189"], "num_heads"),
    "patches and image": (["model.patch_size=5"], "multiple of 5, patch_size"),
    "image sizes differ": (["data.image_size=64", "model.image_size=32"], "make both equal"),
    "label out of range": (["samples.labels=[3,10]"], "labels are 0 to 9"),
    "guidance untrained": (["model.class_dropout_prob=0"], "samples.guidance_scale=1"),
    "prompts for classes": (["samples.prompts=[a hat]"], "samples.prompts: dit draws nothing for texts"),
    "no prompts": (["samples.prompts=[]"], "samples.prompts=[] holds no text"),
    "an empty prompt": (["samples.prompts=[a hat, ' ']"], "or an empty one"),
    "prompts and labels": (["samples.prompts=[a hat]", "samples.labels=[1]"], "give one of the two"),
    "frames of pictures": (["samples.num_frames=5"], "samples.num_frames=5: dit draws no videos"),
    "unknown sampler": (["samples.sampler=dpm"], "samples.sampler=dpm is none of"),
    "too many sampling steps": (
        ["samples.num_steps=2000", "samples.sampler=ddim", "model.objective=diffusion"],
        "samples.num_steps=2000",
    ),
    # files and paths
    "no recipe": (["--recipe", "goood.yaml"], "did you mean good.yaml?"),
    "recipe is a folder": (["--recipe", "empty"], "cannot be read"),
    "key twice": (["--recipe", "twice.yaml"], "twice.yaml:2: the key 'steps' stands twice"),
    "tab": (["--recipe", "tab.yaml"], "tab.yaml:2:"),
    "open bracket": (["--recipe", "open.yaml"], "open.yaml:2:"),
    "recipe is a list": (["--recipe", "list.yaml"], "list.yaml holds a list"),
    "typo in the recipe": (["--recipe", "typo.yaml"], "did you mean optimizer?) [typo.yaml]"),
    "not UTF-8": (["--recipe", "latin.yaml"], "latin.yaml"),
    "number as key": (["--recipe", "number.yaml"], "put it into quotes"),
    "no data": (["data.path=/no/images"], "data.path=/no/images does not exist"),
    "no such address": (
        ["data.path=ftp://x/a.tar"],
        "data.path=ftp://x/a.tar: an address begins with s3://, gs://, hf://",
    ),
    "no data in a mixture": (
        ["data.mixture=[{path: classes}, {path: /no/b}]"],
        "data.mixture[1].path=/no/b does not exist",
    ),
    "no space": (["data.columns={label:kind}"], "{label:kind} lacks a space after the colon: write {label: kind}"),
    "empty data": (["data.path=empty"], "data.path=empty is an empty folder"),
    "no image": (["data.path=mixed"], "data.path=mixed"),
    "empty class": (["data.path=classes"], "class folders without images: b"),
    "data is a file": (["data.path=afile"], "data.path=afile"),
    "videos for images": (
        ["data.path=builtin:moving-fashion"],
        "data.path=builtin:moving-fashion holds videos: write data.num_frames=17, say, for clips",
    ),
    "unknown built-in": (["data.path=builtin:mnist"], "builtin:fashion"),
    "nothing to start from": (["init_from=/no/weights"], "init_from=/no/weights does not exist"),
    "folder is a file": (["folder=afile"], "name another folder"),
    "folder below a file": (["folder=afile/run"], "name another folder"),
    "someone else's folder": (["folder=stranger"], "thesis.tex"),
    "checkpoints gone": (["folder=lost", "name=lost"], "--from-scratch"),
    # the DeepSpeed JSON
    "no JSON": (["--ds_config", "bda.json"], "did you mean bad.json?"),
    "JSON by its other name": (["--deepspeed_config", "bda.json"], "did you mean bad.json?"),
    "trailing comma": (["--ds_config", "bad.json"], "bad.json:1:"),
    "JSON key twice": (["--ds_config", "twice.json"], "'bf16' stands twice"),
    "JSON list": (["--ds_config", "list.json"], "list.json holds a list"),
    "auto in a section": (["--ds_config", "auto.json"], "write true or false"),
    "clip twice": (["--ds_config", "clip.json", "optimizer.clip=0.5"], "optimizer.clip in the recipe is 0.5"),
    "batch twice": (["--ds_config", "batch.json"], "batch.global in the recipe is 32"),
    "rate twice": (["--ds_config", "lr.json", "optimizer.name=adamw"], "optimizer.lr in the recipe is 0.008"),
    "scheduler": (["--ds_config", "sched.json"], "optimizer.warmup"),
    "fp16 on CPU": (["--ds_config", "fp16.json"], "zero2_fp32.json"),
    "two precisions": (["--ds_config", "both.json"], "keep one"),
    "JSON typo": (["--ds_config", "typo.json"], "did you mean zero_optimization?"),
    "ZeRO typo": (["--ds_config", "zero.json"], "zero_optimization.bukets"),
    "stage 4": (["--ds_config", "stage.json"], "zero_optimization.stage"),
    "amp": (["--ds_config", "amp.json"], "does not support"),
    "elasticity": (["--ds_config", "elastic.json"], "does not support"),
    "NVMe": (["--ds_config", "nvme.json"], 'write "cpu"'),
    "whole weights": (
        [
            "--recipe",
            "tests/launch/tiny-phenaki-tokenizer.yaml",
            "--ds_config",
            "ds_configs/zero3.json",
            "model.discriminator.penalty.form=exact",
        ],
        "model.discriminator.penalty.form=exact needs whole weights, ZeRO stage 3 scatters them",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_input_is_named_with_its_remedy(folder, monkeypatch, capsys, case):
    """Oracle: the fault put in; exit code 2, the message on stderr, after the first line alone,
    and nothing left behind.
    """
    arguments, expected = WRONG[case]
    if case == "fp16 on CPU":
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    before = sorted(folder.rglob("*"))
    code, out, err = launch(arguments, monkeypatch, capsys)
    assert code == 2 and expected in err, err
    assert "Traceback" not in err and re.fullmatch(GREETING, out) and sorted(folder.rglob("*")) == before
    assert max(map(len, err.splitlines())) < 400


def test_world_size_and_batch(folder):
    """Oracle: 32 samples on 3 ranks. Rank 0 opens the store of its launch at once, so it is a process of its own."""
    place = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    done, _ = run([sys.executable, str(SCRIPT)], folder, MASTER_PORT=str(free_port()), **place)
    assert done.returncode == 2 and "batch.global=30 or 33" in done.stderr
    assert "1, 2, 4, 8, 16, 32 ranks" in done.stderr


def test_a_resumed_run_may_not_become_another(folder, monkeypatch, capsys):
    """Oracle: the recipe written into the run's folder."""
    from dstrain import recipe

    job = prepare_job(parse_options(TrainOptions, ["folder=run"]))
    (folder / "run").mkdir()
    (folder / "run" / "run.yaml").write_text(recipe.dump_run(job.run))
    (folder / "run" / "saved").write_text("300")
    (folder / "run" / "checkpoints" / "step_00000300").mkdir(parents=True)
    code, _, err = launch(["folder=run", "seed=7", "model.depth=7", "steps=2000"], monkeypatch, capsys)
    assert (
        code == 2
        and "seed was 0" in err
        and "model.depth was 6" in err
        and "--allow-change" in err
        and "steps" not in err
    )
    assert prepare_job(parse_options(TrainOptions, ["folder=run", "seed=7", "--allow-change"])).run.seed == 7
    assert prepare_job(parse_options(TrainOptions, ["folder=run", "seed=7", "--from-scratch"])).run.seed == 7


def test_a_resumed_run_keeps_its_precision(folder, monkeypatch):
    """Oracle: the ds_config.json in the run's folder, on a CPU whose default is another precision."""
    from dstrain.engine import settings
    from dstrain.runs import folders

    monkeypatch.setattr(settings, "can_cpu_multiply_bf16", lambda: True)
    words = ["folder=run", "--allow-change"]  # the data are not asked about

    def precision(*more):
        return settings.read_precision(prepare_job(parse_options(TrainOptions, [*words, *more])).settings)

    job = prepare_job(parse_options(TrainOptions, ["folder=run"]))
    folders.write_run_files(job.run, job.settings | {"bf16": {"enabled": False}}, "builtin:fashion")
    assert precision() == "bf16", "nothing is saved: there is no run to go on with"
    folders.write_saved_step(job.run.directory, 300)
    (job.run.directory / "checkpoints" / "step_00000300").mkdir(parents=True)
    assert precision() == "fp32" and precision("--from-scratch") == "bf16"
    (job.run.directory / "ds_config.json").write_text("[]")
    assert precision() == "bf16"


def test_several_faults_come_together(folder, monkeypatch, capsys):
    """Oracle: the list of faults put in, across model section, paths and JSON."""
    code, _, err = launch(
        [
            "model.size=DiT-Q/2",
            "data.path=/no/images",
            "init_from=/no/weights",
            "--ds_config",
            "batch.json",
            "folder=afile",
        ],
        monkeypatch,
        capsys,
    )
    assert code == 2 and err.startswith("train.py: 5 things are wrong:") and len(err.splitlines()) == 6


def test_another_ranks_fault_is_told_with_its_number(folder, monkeypatch, capsys):
    """Oracle: a fault that only this rank's machine has; other ranks wait first, in case rank 0 reports it, too."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    code, _, err = launch(["data.path=/no/images"], monkeypatch, capsys, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert code == 2 and err.startswith("train.py [rank 1]: error:")


def test_a_launchers_variable_that_is_no_number(folder, monkeypatch, capsys):
    """Oracle: one message that names the variable, and exit code 2."""
    code, _, err = launch(["--dry-run"], monkeypatch, capsys, RANK="abc", WORLD_SIZE="2")
    assert code == 2 and "RANK=abc in the environment" in err and "Traceback" not in err


@pytest.mark.parametrize("words", [("--step", "7"), ("--profile", "1:3"), ("--from-scratch",)])
def test_what_only_a_run_takes(words, monkeypatch, capsys):
    """Oracle: a bench resumes nothing and profiles nothing: --help of it leaves such options out."""
    code, _, errors = here("bench/step.py", words, monkeypatch, capsys)
    assert code == 2 and f"{words[0]}: there is no such option" in errors
    assert words[0] in here("train.py", ("--help",), monkeypatch, capsys)[1]
    assert words[0] not in here("bench/step.py", ("--help",), monkeypatch, capsys)[1]


def test_a_librarys_value_error_keeps_its_traceback():
    """Oracle: float("x") raises a ValueError that is no user's fault."""

    with pytest.raises(ValueError, match="could not convert"):
        run_main_with_exit_code(lambda: float("x"))


def test_help_fits_one_screen(monkeypatch, capsys):
    """Oracle: a screen of 40 lines and 100 columns; every option that is parsed stands in it."""
    code, out, err = launch(["--help"], monkeypatch, capsys)
    assert code == 0 and not err and 24 <= len(out.splitlines()) <= 40 and max(map(len, out.splitlines())) <= 100
    for option in (
        "--recipe",
        "--ds_config",
        "--deepspeed_config",
        "--dry-run",
        "--print-config",
        "--from-scratch",
        "--allow-change",
        "--step",
        "--profile",
        "--trust-pickle",
        "--deepspeed ",
        "--local_rank",
        "--help",
    ):
        assert option in out


def run(command, cwd, timeout=120, **variables):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
    return done, time.perf_counter() - begin


@pytest.mark.parametrize(
    "arguments",
    sampled([["lr=1"], ["--ds_config", "fp16.json"], ["data.path=/no/images", "samples.labels=[10]"]], [["lr=1"]]),
)
def test_a_real_process(folder, arguments):
    """Oracle: the exit code and the streams of `python launch/train.py`."""
    if "fp16.json" in arguments and __import__("torch").cuda.is_available():
        pytest.skip("fp16 is right on a GPU")
    done, _ = run([sys.executable, str(SCRIPT), *arguments], folder)
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stderr.startswith("train.py: ")
    assert re.fullmatch(GREETING, done.stdout)


def test_dry_run_and_print_config_of_a_real_process(folder):
    """Oracle: the same recipe read from what was printed."""
    from dstrain import recipe

    done, _ = run(
        [sys.executable, str(SCRIPT), "--print-config", "steps=7", "--deepspeed", "--local_rank=0", "seed=3"], folder
    )
    first, second = done.stdout.split("# DeepSpeed settings\n")
    (folder / "printed.yaml").write_text(first)
    assert recipe.load_recipe(folder / "printed.yaml").steps == 7 and json.loads(second)["train_batch_size"] == 32
    done, _ = run([sys.executable, str(SCRIPT), "--dry-run"], folder)
    assert done.returncode == 0 and "in order" in done.stdout and not (folder / "runs").exists()


@pytest.mark.slow
def test_the_deepspeed_launcher(folder):
    """Oracle: the exit code of the real launcher on two ranks, and one message, not two."""
    command = [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--num_gpus",
        "2",
        str(SCRIPT),
        "lr=1",
        "--ds_config",
        "fp16.json",
    ]
    done, _ = run(command, folder)
    output = done.stdout + done.stderr
    assert done.returncode and "Traceback" not in output, output
    assert len(re.findall(r"did you mean optimizer\.lr\?", output)) == 1
