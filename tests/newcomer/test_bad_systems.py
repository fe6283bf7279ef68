"""Systems from outside dstrain: mistakes that a user can mend, and what a bug looks like."""

import json
import os
import sys

import pytest
import torch
import yaml

from dstrain import systems
from dstrain.checkpoint.fragments import open_shards
from dstrain.engine.checkpoint import read_weights
from dstrain.planning import count
from dstrain.recipe import ConfigError, Samples
from dstrain.recipe.trust import trust_system
from dstrain.sampling.requests import make_sampling_request_and_captions
from tests.support.launch import ROOT, here, launch
from tests.systems.dit.cases import TINY as DIT
from tests.systems.iddpm.cases import UNET as IDDPM

RUN = {
    "name": "new",
    "steps": 1,
    "batch": {"global": 4},
    "track": {"wandb": "disabled"},
    "data": {"path": "builtin:fashion", "image_size": 16, "channels": 1, "workers": 0},
    "every": {"evaluate": 0, "sample": 0},
}


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """launch/train.py with a system's package, `text` if it is not None: exit code and output."""

    def begin(text, *words, **run):
        if text is not None:
            (tmp_path / "strange.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "strange", raising=False)
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RUN | {"system": "strange"} | run))
        code, stdout, stderr = here(
            "train.py",
            ["--recipe", tmp_path / "recipe.yaml", f"folder={tmp_path / 'run'}", *words],
            monkeypatch,
            capsys,
        )
        return code, stdout + stderr

    return begin


EDM = (ROOT / "tests" / "newcomer" / "edm" / "__init__.py").read_text()


@pytest.mark.parametrize(
    "text, run, message",
    [
        (None, {"system": "no_such_lab.edm"}, "system: 'no_such_lab.edm' is unknown; one of dit, "),
        (None, {"system": "../edm"}, "system: '../edm' is no name of a package"),
        (EDM + "\nConfig = dict\n", {}, "Config of strange must be a SystemConfig with learns_from"),
        (EDM.replace("return EDM(config)", "return 3"), {}, "build() of strange returns a int: return a System"),
        (
            EDM.replace('averaged, samplers = ("denoiser",)', 'averaged, samplers = ("nett",)'),
            {},
            "name the same parts",
        ),
        (
            EDM.replace('return {"loss": losses.mean(), "loss_each": losses.detach()}', "return losses.mean()"),
            {},
            "loss of denoiser returns a Tensor: return a dict of tensors",
        ),
        (
            EDM.replace("    def sample(self", "    def sample_later(self"),
            {"every": {"sample": 1, "evaluate": 0}},
            "every.sample=1: a EDM draws no samples",
        ),
        (
            EDM.replace("    def evaluate(self", "    def later(self").replace(', "loss_each": losses.detach()', ""),
            {"every": {"evaluate": 1, "sample": 0}},
            "measured by loss_each (B,), which the loss does not return",
        ),
        ("x = 1\n", {}, "the package 'strange' has no Config and no build"),
        (EDM, {"model": {"wdith": 8}}, "model.wdith: there is no such key (did you mean model.width?)"),
        (EDM, {"model": {"image_size": 8}}, "data.image_size=16 and model.image_size=8 differ"),
        (
            EDM,
            {"samples": {"sampler": "dpm"}, "every": {"sample": 1, "evaluate": 0}},
            "samples.sampler=dpm is none of euler, heun",
        ),
        (EDM, {"model": {"num_classes": 4}}, "write model.num_classes=10"),
        (EDM, {"data": {"path": "builtin:emoji-pairs"}}, "holds embedding pairs, and strange learns from images"),
        (EDM.replace('"loss": losses.mean()', '"loss": losses[:, None]'), {}, "loss"),
    ],
)
def test_what_a_user_can_mend(train, text, run, message):
    """Oracle: exit code 2 and one message that names key and remedy; --dry-run finds it already."""
    code, output = train(text, "--dry-run", **run)
    assert code == 2 and message in output and "Traceback" not in output, output


ALL = {"every": {"evaluate": 1, "sample": 1}, "samples": {"num": 24}}
EVALUATE = 'return {"loss": self.losses(nets, example)}'
DRAWN = "return ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)"
SAMPLERS = 'averaged, samplers = ("denoiser",), ("euler", "heun")'
CLASSES = "classes.repeat(-(-num // len(classes)))[:num]"
LEARN = 'return {"loss": losses.mean(), "loss_each": losses.detach()}'
NETWORKS = '        return {"denoiser": UNet(self.config)}\n'
UNET = "        nn.init.zeros_(self.leave.weight)\n"
BROKEN = {
    "scalar evaluation": (EVALUATE, EVALUATE.replace("example)", "example).mean()"), 'terms["loss"] has the shape ()'),
    "evaluation of two axes more": (EVALUATE, 'return {"loss": example["x_start"]}', "return one value a sample, (2,)"),
    "evaluation without terms": (EVALUATE, "return {}", "evaluate of a EDM returns no terms: return a dict"),
    "evaluation of a tensor": (
        EVALUATE,
        EVALUATE[15:-1].replace("self", "return self"),
        "returns Tensor: return a dict",
    ),
    "evaluation of scalars alone": (EVALUATE, 'return {"mean": example["x_start"].mean()}', "the shape ()"),
    "evaluation of numbers": (EVALUATE, 'return {"loss": 3.0}', 'terms["loss"] has the type float'),
    "evaluation that knows the step": (EVALUATE, 'return {"loss": example["step"] * 1.0}', KeyError),
    "evaluation under another name": (EVALUATE, EVALUATE.replace('"loss"', '"mse"'), "by which save.best=true chooses"),
    "three pictures for ten": (DRAWN, f"{DRAWN}.expand(-1, 1, -1, -1)[:1].repeat(3, 1, 1, 1)", "for 2 seeds: return"),
    "a picture short": (DRAWN, f"{DRAWN}[1:]", "sample of a EDM returns torch.uint8 (1, 1, 16, 16) for 2 seeds"),
    "pictures of floats": (DRAWN, "return x", "returns torch.float32 (2, 1, 16, 16) for 2 seeds: return uint8 images"),
    "pictures without channels": (DRAWN, f"{DRAWN}[:, 0]", "(2, 16, 16) for 2 seeds: return uint8 images (2, C, H, W)"),
    "a list of pictures": (DRAWN, f"return list({DRAWN[7:]})", "sample of a EDM returns a list for 2 seeds"),
    "no pictures": (DRAWN, "return None", "sample of a EDM returns a NoneType for 2 seeds"),
    "short conditions": (CLASSES, "classes[:num]", "for 24 samples have label of (10,): return a tensor (24, ...)"),
    "conditions of lists": (CLASSES, f"{CLASSES}.tolist()", "have label of list: return a tensor (24, ...)"),
    "a sampler's letters": (
        SAMPLERS,
        'averaged, samplers = ("denoiser",), ("heun")',
        "samplers of strange is 'heun': write",
    ),
    "a part's letters": (SAMPLERS, 'averaged, samplers = "denoiser", ("heun",)', "averaged of strange is 'denoiser'"),
    "a choice's letters": (
        SAMPLERS,
        SAMPLERS + '\n    sampling = ("eta")',
        "sampling of strange is 'eta': write a tuple",
    ),
    "one watched term": (SAMPLERS, SAMPLERS + '\n    watched = "loss_each"', "watched of strange is 'loss_each'"),
    "a watched term that is not there": (
        SAMPLERS,
        SAMPLERS + '\n    watched = ("timestep",)',
        "no loss returns timestep, which `watched` names",
    ),
    "a network that is frozen whole": (
        UNET,
        UNET + "        self.requires_grad_(False)\n",
        "train_only leaves nothing of denoiser that learns",
    ),
    "a parameter of no size": (
        UNET,
        UNET + "        self.no = nn.Parameter(torch.zeros(0))\n",
        "no of denoiser has no elements",
    ),
    "a state that cannot come back": (
        "    def list_block_classes(self)",
        "    def state_dict(self):\n        return {'count': torch.ones(1)}\n\n    def list_block_classes(self)",
        "what state_dict returns is refused by load_state_dict: EDM keeps no state",
    ),
    "a state of numbers": (
        "    def list_block_classes(self)",
        "    def state_dict(self):\n        return {'count': 1}\n\n    def list_block_classes(self)",
        "state_dict returns something else than a dict of tensors",
    ),
    "figures that are no numbers": (
        EVALUATE,
        'return {"loss": self.losses(nets, example), "use": example["x_start"].flatten(1)}\n\n'
        "    def compute_figures(self, means):\n        return means",
        "compute_figures returns something else than a dict of numbers",
    ),
    "a method under its name of before": (
        "    def list_block_classes(self)",
        "    def blocks(self)",
        "EDM of strange has a method `blocks`, which is called `list_block_classes` now: rename it",
    ),
    "a hook of the section under its name of before": (
        "    def complete_section(cls",
        "    def completed(cls",
        "Config of strange has a method `completed`, which is called `complete_section` now: rename it",
    ),
    "pictures beside samples": (
        SAMPLERS,
        SAMPLERS + "\n    starts_from_data, generates = True, False\n\n    def make_pictures(self, nets, example):\n"
        '        return {"data": example["x_start"]}',
        "make_pictures returns data as torch.float32 (2, 1, 16, 16) for 2 samples: return uint8",
    ),
}


@pytest.mark.parametrize("old, new, message", BROKEN.values(), ids=BROKEN)
def test_a_broken_system(train, old, new, message):
    """Oracle: the contract in base.py, in its words; without the look such a run fails at its first grid, evaluation or
    save, or shows and averages something else. What is a plain bug keeps its traceback.
    """
    assert EDM.count(old) == 1
    run = {**ALL, "save": {"best": True}}
    if isinstance(message, type):
        with pytest.raises(message):
            train(EDM.replace(old, new), "--dry-run", **run)
        return
    code, output = train(EDM.replace(old, new), "--dry-run", **run)
    assert code == 2 and message in output and "Traceback" not in output, output


@pytest.mark.parametrize(
    "line", ["self.level.weight.requires_grad_(False)", "self.tower = nn.Linear(2, 2).requires_grad_(False)"]
)
def test_a_frozen_parameter(tmp_path, line):
    """Oracle: the weight that the first step left, in all kinds of weights of the third; other matrices learned."""
    (tmp_path / "strange.py").write_text(EDM.replace(UNET, f"{UNET}        {line}\n"))
    run = RUN | {"system": "strange", "steps": 3, "save": {"keep": 9}, "samples": {"num": 2, "num_steps": 2}}
    run["every"] = ALL["every"] | {"save": 1, "evaluate_samples": 8}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(run))
    launch(
        "launch/train.py",
        *("--recipe", str(tmp_path / "recipe.yaml"), f"folder={tmp_path / 'run'}"),
        num=1,
        PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}",
    )
    name = line.split(".")[1].split(" ")[0] + ".weight"
    first, third = (tmp_path / "run" / "checkpoints" / f"step_{step:08d}" for step in (1, 3))
    begun = read_weights(first, "denoiser", "master")
    kinds = [kind for kind in open_shards(third, "denoiser").list_value_kinds() if kind.startswith("ema.")]
    for kind in ("master", *kinds):
        weights = read_weights(third, "denoiser", kind)
        kept = [each for each in begun if begun[each].ndim > 1 and torch.equal(weights[each], begun[each])]
        assert kept == [name]


def test_a_sampler_that_ignores_the_number_of_steps(train):
    """Oracle: the calls that the sampler would make: 10,000, of which the look takes few."""
    old = "count = max(request.num_steps // (1 + heun), 2)"
    code, output = train(EDM.replace(old, "count = 10_000"), "--dry-run", **ALL)
    assert EDM.count(old) == 1 and code == 0, output


def test_inputs_are_cast(train, tmp_path):
    """Oracle: torch, which multiplies no float32 by bfloat16; with float32 weights the same system is in order."""
    text = EDM.replace("x = self.enter(x.to(dtype))", "x = self.enter(x)")
    assert text != EDM
    for package, halves, expected in ((text, False, 0), (text, True, 2), (EDM, True, 0)):
        (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": halves}, "zero_optimization": {"stage": 1}}))
        code, output = train(package, "--dry-run", "--ds_config", str(tmp_path / "ds.json"), **ALL)
        assert code == expected, output
        assert ("inputs come in float32; cast what enters a network" in output) == (expected == 2)


def test_buffers_of_numpy(train, tmp_path, monkeypatch, capsys):
    """Oracle: the same buffer made by torch: --dry-run and plan count the same operations and bytes."""
    outputs = []
    for made in ("torch.from_numpy(np.ones(4, dtype=np.float32))", "torch.ones(4)"):
        text = "import numpy as np\n" + EDM.replace(UNET, f"{UNET}        self.register_buffer('scale', {made})\n")
        text = text.replace("x = self.enter(x.to(dtype))", "x = self.enter(x.to(dtype)) * self.scale.mean()")
        code, output = train(text, "--dry-run", **ALL)
        assert code == 0 and "Traceback" not in output, output
        count._get_worker.cache_clear()  # One of an earlier test has another path, and the module as it was.
        code, stdout, stderr = here(
            "plan.py",
            ["--recipe", tmp_path / "recipe.yaml", "--world", 2, f"folder={tmp_path / 'run'}"],
            monkeypatch,
            capsys,
        )
        assert code == 0, stdout + stderr
        # A slow machine says meanwhile that it still counts.
        outputs.append([line for line in (output + stdout).splitlines() if not line.startswith(("now ", "still "))])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("bug", ["a, b = 1, 2, 3", "raise ValueError('not for users')", "int('x')"])
@pytest.mark.parametrize("words", [["--dry-run"], []])
def test_a_bug_shows_its_traceback(train, bug, words):
    """Oracle: the error itself, which the script lets pass: Python then prints its traceback and ends with 1."""
    text = EDM.replace("        losses = self.losses(nets, example)\n", f"        {bug}\n", 1)
    with pytest.raises(ValueError) as raised:
        train(text, *words)
    assert type(raised.value) is ValueError and raised.traceback[-1].path.name == "strange.py"


@pytest.mark.slow
def test_exit_codes(tmp_path):
    """Oracle: docs/guides/running.md: 1 and a traceback for a bug in a loss, 2 and one message for a wrong field."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RUN | {"system": "strange"}))
    for line, words, code in (("raise ValueError('a bug')", [], 1), ("pass", ["model.wdith=8"], 2)):
        (tmp_path / "strange.py").write_text(
            EDM.replace(
                "        losses = self.losses(nets, example)\n",
                f"        {line}\n        losses = self.losses(nets, example)\n",
                1,
            )
        )
        done = launch(
            "launch/train.py",
            "--recipe",
            tmp_path / "recipe.yaml",
            f"folder={tmp_path / 'run'}",
            *words,
            num=1,
            check=False,
            PYTHONPATH=f"{tmp_path}:{ROOT}",
        )
        assert done.returncode == code and ("Traceback" in done.stdout) == (code == 1), done.stdout


@pytest.mark.parametrize("labels", [(10,), (77,), (-1,), (3, 10)])
@pytest.mark.parametrize(
    "name, model",
    [("edm", {}), ("dit", DIT), ("iddpm", IDDPM | {"class_cond": True, "num_classes": 10})],
    ids=lambda x: x,
)
def test_labels_that_are_no_class(monkeypatch, name, model, labels):
    """Oracle: the classes 0 to 9 of every system, checked in one place; edm itself checks none."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "newcomer"))
    trust_system("edm")
    system = systems.build(name, model)
    with pytest.raises(ConfigError, match=r"labels: \[.*\] are not among the 10 classes, 0 to 9"):
        make_sampling_request_and_captions(Samples(), system, 4, labels=labels)
    assert make_sampling_request_and_captions(
        Samples(),
        system,
        3,
        labels=(9, 0),
    )[0].conditions["label"].tolist() == [9, 0, 9]


def test_labels_without_classes():
    """Oracle: a model that has no classes."""
    with pytest.raises(ConfigError, match="labels: a IDDPMSystem of this model section knows no classes"):
        make_sampling_request_and_captions(
            Samples(), systems.build("iddpm", IDDPM | {"class_cond": False}), 4, labels=(1,)
        )
