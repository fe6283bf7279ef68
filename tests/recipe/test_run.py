"""Recipes: reading, overriding, checking, writing back, comparing."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dstrain import recipe
from dstrain.recipe import ConfigError, Run, files, format_divisors
from dstrain.runs import folders
from dstrain.systems import find_config_class
from tests.support import tokenizers
from tests.support.launch import ROOT

DIT = find_config_class("dit")
ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "launch" / "recipes").glob("*.yaml"))

words = st.text(st.characters(codec="ascii", exclude_categories=["Cc", "Cs"]), max_size=12)
tricky = st.sampled_from(
    [
        "on",
        "off",
        "null",
        "~",
        "1e3",
        "3e-4",
        "010",
        "1_000",
        "true",
        ".5",
        "2024-01-01",
        "1:30",
        "",
        " x ",
        "- a",
        "a: b",
        "#",
        "'",
        "\u00e9",
    ]
)
texts = st.one_of(words, tricky)
rates = st.floats(1e-12, 1e3)
leaves = st.one_of(st.none(), st.booleans(), st.integers(-(10**12), 10**12), st.floats(allow_nan=False), texts)
models = st.dictionaries(
    texts,
    st.recursive(
        leaves,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
        max_leaves=6,
    ),
    max_size=4,
)


@st.composite
def runs(draw) -> Run:
    lr = draw(rates)
    decays = draw(st.lists(st.floats(0, 0.99999), unique=True, max_size=3))
    micro, times = draw(st.integers(1, 64)), draw(st.integers(1, 8))
    return Run(
        name=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)),
        folder=draw(st.none() | st.sampled_from(["runs/a", "/tmp/b c", "010"])),
        steps=draw(st.integers(10, 10**9)),
        seed=draw(st.integers(0, 2**63 - 1)),
        init_from=draw(st.none() | st.just("/x/y.safetensors")),
        compile=draw(st.sampled_from(["auto", "on", "off"])),
        model=draw(models),
        data={
            "path": draw(texts.filter(lambda text: text and not text.startswith("~"))),  # "" is refused
            "flip": draw(st.booleans()),
            "held_out": draw(st.floats(0, 0.99)),
        },
        batch={"global": micro * times, "micro": draw(st.sampled_from([None, micro]))},
        optimizer={
            "lr": lr,
            "final_lr": lr * draw(st.floats(0, 1)),
            "betas": (draw(st.floats(0, 0.999)), 0.95),
            "schedule": draw(st.sampled_from(["constant", "cosine", "linear"])),
            "warmup": draw(st.integers(0, 5)),
            "decay_steps": draw(st.none() | st.integers(6, 100)),
        },
        ema={"decays": decays, "warmup": draw(st.booleans())},
        samples={
            "labels": draw(st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=3)),
            "ema": draw(st.sampled_from([None, *decays])),
        },
    )


@settings(max_examples=200, deadline=None)
@given(runs())
def test_a_dumped_run_is_read_back_equal(tmp_path_factory, run):
    """Oracle: the run itself."""
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    path.write_text(recipe.dump_run(run), encoding="utf-8")
    assert recipe.load_recipe(path) == run
    assert not recipe.list_differences(run, recipe.load_recipe(path))


@settings(max_examples=200, deadline=None)
@given(texts, leaves)
def test_an_override_is_yaml(key, value):
    """Oracle: the value that was dumped as the override's text."""
    if not key or set(key) & set("=.") or key.strip() != key or key == "init_from":
        return
    text = yaml.dump({"x": value}, Dumper=files._Dumper, default_flow_style=True, width=10**6)[4:-2]
    assert recipe.load_recipe(None, [f"model.{key}={text}"]).model == {key: value}


def test_a_space_that_is_missing():
    """Oracle: YAML: {a:b} is a key without a value; in quotes, with one, and outside of braces it may be meant."""
    assert files._parse_yaml("{a:b: '', 'c:d': , e: [p:q]}") == {"a:b": "", "c:d": None, "e": ["p:q"]}
    for text in ("{a:b}", "[{a:b}]", "x:\n  - {c: d, a:b}"):
        with pytest.raises(yaml.YAMLError, match="{a:b} lacks a space after the colon: write {a: b}"):
            files._parse_yaml(text)


def stand_in(run):
    """Saves a narrow tokenizer where a recipe expects one, with the geometry of the recipe that trains it."""
    made_by = run.name.replace("phenaki", "phenaki-tokenizer")
    run_of_tokenizer = recipe.load_recipe(next(path for path in RECIPES if path.stem == made_by))
    config = recipe.complete_model_section(run_of_tokenizer, find_config_class(run_of_tokenizer.system)).model
    tokenizers.save(
        Path(run.model["tokenizer"]["path"]),
        **{
            name: config[name]
            for name in ("image_size", "num_frames", "channels", "codebook_size", "patch_size", "temporal_patch_size")
        },
    )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_is_complete(path, tmp_path, monkeypatch):
    """Oracle: the schema, the system's own class, and the three entries that every header has."""
    monkeypatch.chdir(tmp_path)
    text = path.read_text(encoding="ascii")
    run = recipe.load_recipe(path)
    if "tokenizer" in run.model:
        stand_in(run)
    checked = recipe.complete_model_section(run, find_config_class(run.system))
    assert run.name == path.stem
    assert (
        set(run.model) < set(checked.model)
        and recipe.complete_model_section(checked, find_config_class(run.system)) == checked
    )
    assert all(f"# {word}" in text for word in ("Source ", "Launch ", "Expected "))


def test_published_settings_are_the_papers():
    """Oracle: Peebles & Xie 2022, sections 4 and 5, and the constants of the official train.py."""
    for name, steps, size in (("dit-xl2-imagenet256", 7_000_000, 256), ("dit-xl2-imagenet512", 3_000_000, 512)):
        run = recipe.load_recipe(ROOT / "launch" / "recipes" / f"{name}.yaml")
        assert (run.batch.global_, run.optimizer.lr, run.optimizer.weight_decay, run.ema.decays) == (
            256,
            1e-4,
            0,
            (0.9999,),
        )
        assert (run.steps, run.data.image_size, run.optimizer.warmup, run.optimizer.clip) == (steps, size, 0, 0)
        assert run.optimizer.betas == (0.9, 0.999) and run.optimizer.schedule == "constant"
        assert run.model["first_stage"]["scaling_factor"] == 0.18215


@pytest.mark.parametrize(
    "text, key, expected",
    [
        ("3e-4", "optimizer.lr", 3e-4),
        ("1E6", "steps", 10**6),
        ("2_000", "steps", 2000),
        ("off", "compile", "off"),
        ("on", "compile", "on"),
        ("yes", "data.flip", True),
        ("010", "data.path", "010"),
        ("2024", "name", "2024"),
        ("1e-8", "model.eps", 1e-8),
        ("null", "folder", None),
        ("a=b", "data.path", "a=b"),
        ("[.9, .95]", "ema.decays", (0.9, 0.95)),
        ("~/images", "data.path", str(Path("~/images").expanduser())),
    ],
)
def test_values_that_yaml_libraries_misread(text, key, expected):
    """Oracle: YAML 1.2's core schema for plain scalars, and what a user means."""
    value = recipe.load_recipe(None, [f"{key}={text}"]).model_dump(by_alias=True)
    for part in key.split("."):
        value = value[part]
    assert value == expected and type(value) is type(expected)


def test_init_from_has_a_synonym(tmp_path):
    """Oracle: the same run under both spellings; either on the command line wins over either in the recipe."""
    assert recipe.load_recipe(None, ["model.init_from=/a"]) == recipe.load_recipe(None, ["init_from=/a"])
    assert recipe.load_recipe(None, ["model.init_from=/a"]).model == {}
    with pytest.raises(ConfigError, match="differ"):
        recipe.load_recipe(None, ["model.init_from=/a", "init_from=/b"])
    for overrides in (["init_from=/b"], ["model.init_from=/b"]):
        for text in ("init_from: /a\n", "model: {init_from: /a}\n"):
            path = tmp_path / "r.yaml"
            path.write_text(text)
            assert (
                str(recipe.load_recipe(path, overrides).init_from) == "/b"
                and recipe.load_recipe(path, overrides).model == {}
            )


def test_an_override_wins_over_the_recipe(tmp_path):
    """Oracle: the order of the command line, the last one wins, the rest of a section stays."""
    path = tmp_path / "r.yaml"
    path.write_text("init_from: /file\noptimizer:\n  lr: 1\n  eps: 0.5\nema:\n")
    run = recipe.load_recipe(path, ["optimizer.lr=2", "optimizer.lr=3", "model.init_from=/typed"])
    assert (run.optimizer.lr, run.optimizer.eps, str(run.init_from)) == (3, 0.5, "/typed")


def test_all_faults_are_named_at_once():
    """Oracle: the list of faults put in."""
    with pytest.raises(ConfigError) as caught:
        recipe.load_recipe(
            None, ["lr=1", "stesp=2", "optimizer.betas=[0.9]", "steps=many", "ema.decays=[0.9,0.9]", "seed"]
        )
    text = str(caught.value)
    assert len(caught.value.problems) == 6
    for part in ("optimizer.lr?", "steps?", "optimizer.betas[1]", "steps=many", "ema.decays", "'seed' is no override"):
        assert part in text


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("lr", "optimizer.lr"),
        ("learning_rate", "optimizer.lr"),
        ("batch_size", "batch.global"),
        ("optimiser.lr", "optimizer"),
        ("optimizer.LR", "optimizer.lr"),
        ("sampels.num", "samples"),
        ("every.smaple", "every.sample"),
        ("micro", "batch.micro"),
        ("data.flop", "data.flip"),
        ("weight-decay", "optimizer.weight_decay"),
        ("max_steps", "steps"),
        ("guidence_scal", "samples.guidance_scale"),
        ("save.best_one_of_all", "save.best"),
        ("optimizer.learningrate", "optimizer.lr"),
        ("data.Label", "data.labels"),
        ("data.path_held_out", "data.path or data.held_out_path"),
        ("faults.timeout", "faults.timeout_minutes"),
        ("samples.steps", "samples.num_steps or steps"),
    ],
)
def test_did_you_mean(typed, meant):
    """Oracle: the key that a reader would have meant."""
    with pytest.raises(ConfigError, match=rf"\(did you mean {re.escape(meant)}\?\)"):
        recipe.load_recipe(None, [f"{typed}=1"])


def test_a_section_that_is_misspelt_is_of_the_command_line():
    """Oracle: where the words were typed, though the section alone is unknown."""
    with pytest.raises(ConfigError, match=r"bach: .*did you mean batch.*\[command line\]"):
        recipe.load_recipe(ROOT / "tests/launch/tiny.yaml", ["bach.global=4"])


@pytest.mark.parametrize(
    "model, meant", [("patch=4", "patch_size"), ("head=2", "num_heads"), ("hiden_size=2", "hidden_size")]
)
def test_did_you_mean_of_a_model(model, meant):
    """Oracle: the key that a reader would have meant: its words before its letters."""
    run = recipe.load_recipe(None, [f"model.{model}"])
    with pytest.raises(ConfigError, match="there is no such key") as caught:
        recipe.complete_model_section(run, find_config_class("dit"))
    assert f"(did you mean model.{meant}" in str(caught.value)


def test_a_recipe_of_another_version(tmp_path):
    """Oracle: each key that this version does not know, with the remedy, wherever it stands; a user's own recipe with
    the same key is advised another one; values below a key, such as columns, are no keys.
    """
    run = recipe.load_recipe(ROOT / "tests/launch/tiny.yaml", ["data.columns={image: a}"])
    run = recipe.complete_model_section(run, find_config_class(run.system))
    text = recipe.dump_run(run)
    newer = text.replace("optimizer:\n", "optimizer:\n  newer: 3\n") + "novelty: 1\n"
    (tmp_path / "run.yaml").write_text(newer)
    with pytest.raises(ConfigError) as caught:
        folders.read_recipe(tmp_path)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["optimizer.newer", "novelty"]
    assert all("another version" in problem and "did you mean" not in problem for problem in caught.value.problems)
    (tmp_path / "run.yaml").write_text(text.replace("model:\n", "model:\n  novel: {a: 1}\n"))
    with pytest.raises(ConfigError, match=r"model\.novel\.a: there is no such key; another version"):
        folders.read_recipe(tmp_path)
    (tmp_path / "run.yaml").write_text(text)
    assert folders.read_recipe(tmp_path).model == run.model
    (tmp_path / "mine.yaml").write_text(newer)
    with pytest.raises(ConfigError, match="novelty: there is no such key; known here"):
        recipe.load_recipe(tmp_path / "mine.yaml")


def test_runs_of_versions_with_fewer_keys_go_on():
    """Oracle: no refusal where a key of a section within the model, which an older version did not write, has its
    default now; the key where it has another value.
    """
    words = ["model.video={frames: 9, patch_frames: 2, given: 3}", "model.condition=text", "data.num_frames=9"]
    old = recipe.load_recipe(None, words)
    for value, refused in (("[]", []), ("[0.5]", ["model.video.beginnings"])):
        new = recipe.load_recipe(None, [*words, f"model.video.beginnings={value}"])
        assert "beginnings" not in old.model["video"]
        assert [key for key, _, _ in recipe.list_refused_changes(old, new, DIT)] == refused


def test_another_system_is_one_change():
    """Oracle: by hand: `system` alone, though all keys of the models and many others differ."""
    old, new = (recipe.load_recipe(ROOT / f"launch/recipes/{name}.yaml") for name in ("dit-small", "iddpm-small"))
    assert recipe.list_refused_changes(old, new, DIT) == [("system", "dit", "iddpm")]


def test_differences_and_what_a_resumed_run_may_change():
    """Oracle: the list in design section 2: entries that determine the numbers are fixed, others are free."""
    old = recipe.load_recipe(None, ["model.depth=2"])

    def keys(*overrides):
        new = recipe.load_recipe(None, ["model.depth=2", *overrides])
        return [key for key, _, _ in recipe.list_differences(old, new)], [
            key for key, _, _ in recipe.list_refused_changes(old, new, DIT)
        ]

    assert keys() == ([], [])
    free = {
        "steps": 2000,
        "every.save": 3,
        "save.keep": 5,
        "batch.micro": 32,
        "track.project": "x",
        "samples.num": 4,
        "data.workers": 0,
        "folder": "/tmp/x",
        "name": "other",
        "compile": "off",
        "faults.max_skipped": 1,
        "data.path": "/x",
        "init_from": "/x",
        "model.recompute": "true",
    }
    for key, value in free.items():
        assert keys(f"{key}={value}") == ([key], [])
    fixed = {
        "model.depth": 3,
        "model.width": 1,
        "data.image_size": 64,
        "data.channels": 1,
        "seed": 1,
        "data.flip": "false",
        "data.held_out": 0.5,
        "data.draft": "true",
        "batch.global": 128,
        "optimizer.lr": 1,
        "optimizer.warmup": 5,
        "ema.decays": "[0.5]",
        "ema.warmup": "true",
        "system": "iddpm",
    }
    for key, value in fixed.items():
        assert keys(f"{key}={value}") == ([key], [key])
    text = str(
        recipe.make_refused_changes_error(
            recipe.list_refused_changes(old, recipe.load_recipe(None, ["seed=1"]), DIT), Path("runs/x"), DIT
        )
    )
    assert "seed was 0" in text and "seed=0" in text and "--allow-change" in text and "model.depth" in text


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_an_open_horizon_may_not_move(schedule):
    """Oracle: Optimizer.compute_lr: a change is refused if it changes the learning rate of a past step."""

    def run(*overrides):
        return recipe.load_recipe(None, [f"optimizer.schedule={schedule}", *overrides])

    def changes_the_past(old, new):
        return any(
            old.optimizer.compute_lr(step, old.steps) != new.optimizer.compute_lr(step, new.steps)
            for step in range(500)
        )

    for old, new in (
        (run("steps=500"), run("steps=900")),
        (run("steps=500"), run("steps=900", "optimizer.decay_steps=500")),
        (run("steps=500", "optimizer.decay_steps=400"), run("steps=900", "optimizer.decay_steps=400")),
        (run("steps=500", "optimizer.decay_steps=500"), run("steps=500")),
    ):
        assert bool(recipe.list_refused_changes(old, new, DIT)) == changes_the_past(old, new)
    text = str(
        recipe.make_refused_changes_error(
            recipe.list_refused_changes(run("steps=500"), run("steps=900"), DIT), Path("runs/x"), DIT
        )
    )
    assert "optimizer.decay_steps=500" in text and "--allow-change" in text


@given(st.integers(1, 2000))
def test_divisors(number):
    """Oracle: trial division."""
    listed = [int(word) for word in format_divisors(number).split(", ") if word != "..."]
    every = [d for d in range(1, number + 1) if number % d == 0]
    assert listed == every or (len(every) > 16 and listed == every[:8] + every[-7:])
