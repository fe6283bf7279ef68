"""What a folder that one was sent may not do: no verb imports a package because a run or an export names it."""

import json
import sys

import pytest

import dstrain
from dstrain.recipe import ConfigError
from tests.support.launch import ROOT, here

EDM = (ROOT / "tests" / "newcomer" / "edm" / "__init__.py").read_text()
VERBS = {
    "report": ("report.py", ["RUN"], 0),
    "generate": ("generate.py", ["RUN", "--out", "OUT"], 2),
    "generate --then": ("generate.py", ["OWN", "--then", "RUN", "--out", "OUT"], 2),
    "generate --guide": ("generate.py", ["OWN", "--guide", "RUN", "--guidance-scale", "2", "--out", "OUT"], 2),
    "evaluate": ("evaluate.py", ["RUN"], 2),
    "evaluate --metrics": ("evaluate.py", ["RUN", "--metrics", "fd"], 2),
    "export": ("export.py", ["RUN", "--out", "OUT", "--format", "safetensors"], 2),
    "encode a run": ("encode.py", ["RUN", "--out", "OUT"], 2),
    "encode by an export": ("encode.py", ["EXPORT", "--out", "OUT"], 2),
    "reconstruct": ("reconstruct.py", ["RUN", "--ema", "0.1"], 2),
    "consolidate": ("consolidate.py", ["RUN", "--out", "OUT"], 2),
    "plan by its recipe": ("plan.py", ["--recipe", "RUN/run.yaml"], 2),
    "train by its recipe": ("train.py", ["--recipe", "RUN/run.yaml", "folder=OUT", "--dry-run"], 2),
    "train by an export's recipe": ("train.py", ["--recipe", "EXPORT/recipe.yaml", "folder=OUT", "--dry-run"], 2),
    "train in its folder": ("train.py", ["folder=RUN", "--dry-run"], 2),
    "train on its codes": ("train.py", ["system=phenaki", "model.tokenizer.path=EXPORT", "folder=OUT", "--dry-run"], 2),
}


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """Fills a folder that one was sent, from which one works: a run, an export, and the module that both name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("dstrain.recipe.trust._trusted", set())
    (tmp_path / "strange.py").write_text(EDM + f"\nopen({str(tmp_path / 'imported')!r}, 'w')\n")
    for name, recipe in (("run", "run.yaml"), ("export", "recipe.yaml"), ("own", "run.yaml")):
        (tmp_path / name).mkdir()
        (tmp_path / name / recipe).write_text(f"system: {'dit' if name == 'own' else 'strange'}\nname: {name}\n")
    (tmp_path / "run" / "saved").write_text("2\n")
    (tmp_path / "run" / "checkpoints" / "step_00000002").mkdir(parents=True)
    (tmp_path / "export" / "consolidated.json").write_text(json.dumps({"files": {}}))
    yield tmp_path
    sys.modules.pop("strange", None)


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_imports_what_a_folder_names(sent, monkeypatch, capsys, verb):
    """Oracle: a mark that the module makes when it is imported."""
    script, words, expected = VERBS[verb]
    places = {"RUN": "run", "OWN": "own", "EXPORT": "export", "OUT": "out"}
    for place, name in places.items():
        words = [word.replace(place, str(sent / name)) for word in words]
    code, stdout, stderr = here(script, words, monkeypatch, capsys)
    assert not (sent / "imported").exists() and code == expected, stdout + stderr
    assert "Traceback" not in stderr


def test_a_notebook_imports_what_its_user_names(sent):
    """Oracle: the mark of the module, and the remedy in the refusal."""
    with pytest.raises(ConfigError, match="give --trust-system strange"):
        dstrain.load(sent / "run")
    assert not (sent / "imported").exists()
    with pytest.raises(ConfigError, match="checkpoint"):
        dstrain.load(sent / "run", trust_system="strange")
    assert (sent / "imported").exists()


@pytest.mark.parametrize("words", [("--trust-system", "strange"), ("system=strange",)], ids=" ".join)
def test_a_user_names_a_package(sent, monkeypatch, capsys, words):
    """Oracle: the mark of the module; the same recipe without these words is refused above."""
    here("plan.py", ["--recipe", sent / "run" / "run.yaml", *words], monkeypatch, capsys)
    assert (sent / "imported").exists()
