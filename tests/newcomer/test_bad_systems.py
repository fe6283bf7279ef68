"""Systems from outside dstrain: mistakes that a user can mend, and what a bug looks like."""

import sys

import pytest
import yaml

from tests.support.launch import ROOT, here, launch

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
