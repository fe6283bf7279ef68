"""Recipes at their edges: files that are none, where a problem comes from, the words of errors, models, marks."""

import math
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from dstrain import recipe
from dstrain.recipe import ConfigError, NotRead, Run, files, problems
from dstrain.recipe.section import (
    MAY_CHANGE,
    Resume,
    Section,
    find_section_class,
    iterate_fields,
    mark_fixed_on_resume,
    mark_fixed_once_set,
)
from dstrain.systems.base import SystemConfig

# Overrides that pass, and the nearest that do not; % stands between several. Bounds of numbers:
# test_values.py; what does
# not fit something else: test_refusals.py.
EDGES = [
    ("data.channels=4", "data.channels=2"),
    ("data.channels=1", "data.channels=0"),
    ("optimizer.betas=[0,0]", "optimizer.betas=[0]"),
    ("every.save=0", "every.save=null"),
    ("every.report=0", "every.report=null"),
    ("every.report_page=0", "every.report_page=null"),
    ("every.evaluate=0", "every.evaluate=null"),
    ("every.sample=0", "every.sample=null"),
    ("every.metrics=0", "every.metrics=null"),
    ("samples.guidance_interval=null", "samples.guidance_interval=[1]"),
    ("samples.spacing=karras", "samples.spacing=karas"),
    ("channels_last=true", "channels_last=1.5"),
    ("data.flip=false", "data.flip=3"),
    ("name=a.b_c-1", "name=-a"),
    (f"name={'x' * 200}", f"name={'x' * 201}"),
    ("name=9", "name=_"),
    (f"data.path={'x' * 255}", f"data.path={'x' * 256}"),
    (f"data.path={('x' * 249 + '/') * 16}", f"data.path={('x' * 249 + '/') * 16}x"),
    ("model.recompute=1", "model.recompute=0"),
    ("model.recompute=attention", "model.recompute=atention"),
    ("model.recompute=true", "model.recompute=1.5"),
]


@pytest.mark.parametrize("passes, fails", EDGES, ids=[fails for _, fails in EDGES])
def test_edges(passes, fails):
    """Oracle: by hand: the last value that means something, the first that does not, which the error names."""

    def load(words: str) -> Run:
        return recipe.complete_model_section(recipe.load_recipe(None, words.split("%")), Even)

    load(passes)
    with pytest.raises(ConfigError) as caught:
        load(fails)
    key = fails.split("%")[-1].partition("=")[0]
    assert len(caught.value.problems) == 1 and key in str(caught.value)


def test_keys_of_the_schema():
    """Oracle: a section and its entries by hand: aliases, order, and what may change within a section that is fixed."""
    keys = dict(iterate_fields(Run))
    assert list(keys)[:3] == ["name", "system", "folder"] and {"batch", "batch.global", "batch.micro"} <= set(keys)
    assert "batch.global_" not in keys and list(keys).index("batch") + 1 == list(keys).index("batch.global")
    assert find_section_class(keys["batch"]).__name__ == "BatchSize" and find_section_class(keys["steps"]) is None
    assert list(dict(iterate_fields(find_section_class(keys["ema"]), "a.b")))[:2] == ["a.b.decays", "a.b.warmup"]
    assert [mark for mark in keys["optimizer.decay_steps"].metadata if isinstance(mark, Resume)] == [MAY_CHANGE]

    def rule(key):
        return recipe.section.find_resume_rule(key, Run, BaseModel)

    assert rule("optimizer.decay_steps").may_change and not rule("optimizer.betas").may_change
    assert rule("data.path").may_change and not rule("data.flip").may_change and rule("save.keep").may_change
    assert not rule("optimizer.unknown").may_change and rule("unknown.key").may_change


def test_values_as_text():
    """Oracle: what an override would say, by hand; 60 characters stay, more are cut to 57 and three dots."""
    for value, text in (
        (None, "null"),
        (True, "true"),
        (False, "false"),
        ("", "''"),
        (1, "1"),
        (0, "0"),
        (1.0, "1.0"),
        ([1, "a", None, True, []], "[1, a, null, true, []]"),
        ({"a": {"b": (0.5, "")}}, "{a: {b: [0.5, '']}}"),
        ("a\0b", "a\\0b"),
        ("a" * 60, "a" * 60),
        ("a" * 61, "a" * 57 + "..."),
    ):
        assert problems.format_value(value) == text


def test_divisors_at_the_edge():
    """Oracle: by hand: 120 has 16 divisors, all listed; 144 has 15; 180 has 18, of which 8 and 7 are."""
    assert recipe.format_divisors(120) == "1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 24, 30, 40, 60, 120"
    assert recipe.format_divisors(144).count(",") == 14 and "..." not in recipe.format_divisors(144)
    assert recipe.format_divisors(180) == "1, 2, 3, 4, 5, 6, 9, 10, ..., 20, 30, 36, 45, 60, 90, 180"
    assert recipe.format_divisors(1) == "1" and recipe.format_divisors(49) == "1, 7, 49"


def test_what_lies_nearby(tmp_path):
    """Oracle: by hand: the closest name, then the first twelve in order; a folder without any says so."""
    assert recipe.suggest_files(tmp_path / "a.yaml", "*.yaml") == f"; {tmp_path}/ has no *.yaml"
    for number in range(13):
        (tmp_path / f"file{number:02d}.yaml").touch()
    (tmp_path / "other.txt").touch()
    listed = ", ".join(f"file{number:02d}.yaml" for number in range(12))
    assert recipe.suggest_files(tmp_path / "qqqq", "*.yaml") == f"; {tmp_path}/ holds {listed} and 1 more"
    found = recipe.suggest_files(tmp_path / "file7.yaml", "*.yaml")
    assert found.startswith(f" (did you mean {tmp_path / 'file07.yaml'}?); ")
    assert recipe.suggest_files(tmp_path / "none" / "a.yaml", "*.yaml").endswith("/none/ has no *.yaml")


@pytest.mark.parametrize(
    "text, words",
    [
        ("- 1\n- 2\n", "holds a list: a recipe is sections"),
        ("steps: 1\nsteps: 2\n", ":2: the key 'steps' stands twice, first in line 1"),
        ("1: 2\n", ":1: the key 1 is no text"),
        ("a: [\n", ":2: "),
        ("steps: 1\n  b: 2\n", ":2: "),
        ("data:\n  flop: 1\n", "data.flop: there is no such key .did you mean data.flip"),
    ],
)
def test_recipes_that_are_none(tmp_path, text, words):
    """Oracle: by hand: file, line and what is wrong there."""
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        recipe.load_recipe(path)
    assert str(path) in str(caught.value) and len(caught.value.problems) == 1


def test_how_much_aliases_may_unfold_to():
    """Oracle: by hand: the text is a list, in it 200 lists of 98 entries, and single entries: 20,000 are taken."""
    row = f"&r [{', '.join('0' * 98)}]"  # 99 nodes, as often as it is named
    for single, fits in ((199, True), (200, False)):
        assert 1 + 200 * 99 + single == 20_000 + (not fits)
        text = f"[{row}{', *r' * 199}{', 0' * single}]"
        if fits:
            assert len(files._parse_yaml(text)) == 399
        else:
            with pytest.raises(yaml.YAMLError, match="more than 20000 entries"):
                files._parse_yaml(text)
    with pytest.raises(yaml.YAMLError, match="it holds more than 20000 entries"):  # and without aliases
        files._parse_yaml(f"[{'0, ' * 20_001}]")
    with pytest.raises(yaml.YAMLError, match="aliases unfolded"):  # all are read, the list is one more
        files._parse_yaml(f"[{'0, ' * 20_000}]")
    assert len(files._parse_yaml(f"[{'0, ' * 19_999}]")) == 19_999


def test_recipes_that_cannot_be_read(tmp_path):
    """Oracle: by hand: the reason of the system, and the file; what lies nearby where there is none."""
    (tmp_path / "dir.yaml").mkdir()
    (tmp_path / "binary.yaml").write_bytes(b"steps: \xff")
    for name, reason in (
        ("dir", "cannot be read as a text file: it is a folder, and no file"),
        ("binary", "cannot be read as a text file: 'utf-8' codec can't decode"),
        ("none", ": there is no such file"),
    ):
        with pytest.raises(ConfigError) as caught:
            recipe.load_recipe(tmp_path / f"{name}.yaml")
        assert str(caught.value).startswith(f"--recipe {tmp_path}/{name}.yaml") and reason in str(caught.value)


@pytest.mark.parametrize("text", ["&x [*x]", "&x {a: *x}", "&x [[*x]]", "!!python/none 1", "9" * 5000])
def test_values_that_are_none(text):
    """Oracle: by hand: what holds itself has no end, tags are not ours, and CPython reads 4,300 digits at most."""
    with pytest.raises(ConfigError, match="^model.a=.* cannot be read as a value: quote it, for example model.a="):
        recipe.load_recipe(None, [f"model.a={text}"])


def test_how_deep_a_recipe_may_be():
    """Oracle: by hand: 32 lists in each other and 32 names in a key are taken, one more is not."""
    assert (
        files._parse_yaml("[" * 32 + "]" * 32) and len(files._apply_overrides({}, [".".join("a" * 32) + "=1"])[0]) == 1
    )
    with pytest.raises(yaml.YAMLError, match="nested deeper than 32 levels"):
        files._parse_yaml("[" * 33 + "]" * 33)
    row = "[" + "0, " * 50  # neighbours are no deeper than each other
    assert files._parse_yaml(row + "[" * 31 + "]" * 32)
    with pytest.raises(yaml.YAMLError, match="nested deeper than 32 levels"):
        files._parse_yaml(row + "[" * 32 + "]" * 33)
    assert files._apply_overrides({}, [".".join("a" * 33) + "=1"])[1]


def test_where_a_problem_comes_from(tmp_path):
    """Oracle: the file or the command line, whichever gave the value; nothing where a rule names its keys itself."""
    path = tmp_path / "r.yaml"
    path.write_text("steps: 0\nevery: {save: -1}\nema: {decays: [0.5, 2]}\n")
    with pytest.raises(ConfigError) as caught:
        recipe.load_recipe(path, ["every.report=-1", "steps=0.5", "optimizer.betas=[1, 2]"])
    lines = {line.partition("=")[0].partition(":")[0]: line for line in caught.value.problems}
    assert set(lines) == {"steps", "every.save", "every.report", "ema.decays[1]", "optimizer.betas[1]"}
    for key, line in lines.items():
        origin = path if key in ("every.save", "ema.decays[1]") else "command line"
        assert line.endswith(f" [{origin}]"), line
    with pytest.raises(ConfigError, match=r"^batch.global=64 is no multiple of batch.micro=3") as caught:
        recipe.load_recipe(None, ["batch.micro=3"])
    assert "[" not in str(caught.value)


def test_overrides_of_what_is_no_section():
    """Oracle: by hand: the path that is a value, and what to write."""
    for key in ("model.a.b.c", "model.a.b.c.d.e"):
        with pytest.raises(
            ConfigError, match=f"^{key}: model.a.b is the value 3 and has no entries; write model.a.b=..."
        ):
            recipe.load_recipe(None, ["model.a.b=3", f"{key}=4"])
    assert recipe.load_recipe(None, ["model.a.b=3", "model.a.c=4"]).model == {"a": {"b": 3, "c": 4}}
    for words in ("steps", "=5", " =5"):
        with pytest.raises(ConfigError, match="is no override: write key=value"):
            recipe.load_recipe(None, [words])
    for words in ("folder=", "data.path= "):
        with pytest.raises(
            ConfigError, match="gives nothing, as where a variable of the shell is not set: write a value"
        ):
            recipe.load_recipe(None, [words])
    assert recipe.load_recipe(None, ["folder=null"]).folder is None
    with pytest.raises(ConfigError, match=r"^steps=\[ cannot be read as a value: quote it, for example steps="):
        recipe.load_recipe(None, ["steps=["])


def test_home_is_expanded_in_every_path():
    """Oracle: Path.expanduser; other paths stay as they are."""
    home = str(Path("~").expanduser())
    run = recipe.load_recipe(None, ["data.path=~/a", "data.held_out_path=~/b", "folder=~/c", "init_from=~/d"])
    assert (run.data.path, run.data.held_out_path) == (f"{home}/a", f"{home}/b")
    assert (run.folder, run.init_from) == (Path(home, "c"), Path(home, "d")) and run.directory == Path(home, "c")
    assert recipe.load_recipe(None, ["data.path=a/~b", "name=n"]).data.path == "a/~b"
    assert recipe.load_recipe(None, ["name=n"]).directory == Path("runs/n")


class Own(Section):
    width: float = Field(1.0, alias="wide")
    """How wide it is."""
    title: str = "a"


def test_what_every_section_has_in_common():
    """Oracle: the contract of Section: values never change, unknown keys and infinities are refused, a number may stand
    where a text is meant, a field goes by its own name and by its alias, and the docstring below it describes it.
    """
    assert Own(wide=2).width == Own(width=2).width == 2 and Own(title=2024).title == "2024"
    assert Own.model_fields["width"].description == "How wide it is."
    for values in ({"wide": math.inf}, {"wide": math.nan}, {"wide": True}, {"height": 1}):
        with pytest.raises(ValidationError):
            Own(**values)
    with pytest.raises(ValidationError, match="frozen"):
        Own().title = "b"


class Even(SystemConfig):
    width: int = 2
    """Even."""
    name: Literal["a", "b"] = "a"
    """One of two."""
    inner: Own = Own()
    """A section of its own."""

    @model_validator(mode="after")
    def _even(self) -> "Even":
        if self.width % 2:
            raise ValueError("width: odd")
        return self


@pytest.mark.parametrize(
    "model, message",
    [
        ({"width": 3}, "model: width: odd"),
        ({"width": "x"}, "model.width=x: it should be a valid integer, unable to parse string as an integer"),
        ({"weight": 1}, "model.weight: there is no such key (did you mean model.width?)"),
        (
            {"q" * 30: 1},
            f"model.{'q' * 30}: there is no such key; known here: model.recompute, model.width, "
            "model.name, model.inner",
        ),
        (
            {"inner": {"q" * 30: 1}},
            f"model.inner.{'q' * 30}: there is no such key; known here: model.inner.wide, model.inner.title",
        ),
        (
            {"inner": 3},
            "model.inner=3 is a value where a section is expected; set single entries, for example "
            "model.inner.wide=...",
        ),
        ({"name": "c"}, "model.name=c: it should be 'a' or 'b'"),
        ({"name": True}, "model.name is true, which has no meaning here: give a number or a name"),
    ],
)
def test_what_is_wrong_in_a_model(model, message):
    """Oracle: by hand: one line with the dotted key, the value, and what may stand there."""
    with pytest.raises(ConfigError) as caught:
        recipe.complete_model_section(Run(model=model), Even)
    assert caught.value.problems == [message]


def test_a_model_that_is_right():
    """Oracle: the section with every default written out; the rest of the run as it was."""
    run = Run(model={"width": 4}, steps=7)
    checked = recipe.complete_model_section(run, Even)
    assert checked.model == {"recompute": "none", "width": 4, "name": "a", "inner": {"wide": 1.0, "title": "a"}}
    assert checked.model_copy(update={"model": {}}) == run.model_copy(update={"model": {}})


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "optimizer=3",
            "optimizer=3 is a value where a section is expected; set single entries, for example "
            "optimizer.name=... [command line]",
        ),
        ("model=3", "model=3 is a value where a section is expected [command line]"),
        ("name=a b", "name=a b: letters, digits and . _ - only, since a folder is named by it [command line]"),
        (
            "data.codes={kind: latents, shape: [1], flips: 1, scaling_factor: 1}",
            "data.codes.first_stage is needed and not given [command line]",
        ),
        ("saev=1", "saev: there is no such key (did you mean save?) [command line]"),
        ("report=1", "report: there is no such key (did you mean every.report?) [command line]"),
        ("epochs=1", "epochs: there is no such key (did you mean steps?) [command line]"),
        (
            "data.mixture=[]",
            "data.mixture=[]: name its sources, [{path: A, weight: 3}, {path: B, weight: 1}], or leave it out",
        ),
    ],
)
def test_what_is_wrong_in_a_recipe(words, message):
    """Oracle: by hand."""
    with pytest.raises(ConfigError) as caught:
        recipe.load_recipe(None, [words])
    assert caught.value.problems == [message]


def test_errors_in_other_words(tmp_path):
    """Oracle: by hand: lines with prefix and options instead of keys, none twice; an OSError with path and remedy."""
    with pytest.raises(ConfigError) as caught, recipe.reword_errors("RUN: ", {"batch.micro": "--batch"}):
        raise ConfigError("batch.micro=3", "b", "batch.micro=3")
    assert caught.value.problems == ["RUN: --batch=3", "RUN: b"] and str(caught.value) == "RUN: --batch=3\nRUN: b"
    with pytest.raises(ConfigError, match=r"^x cannot be written \(No such file or directory\): mend it$"):
        with recipe.explain_write_errors("x", "mend it"):
            (tmp_path / "none" / "x").write_text("")
    with (
        pytest.raises(ConfigError, match="run/saved is a folder where a file belongs"),
        recipe.explain_write_errors("folder=run", "make room"),
    ):
        raise IsADirectoryError(21, "Is a directory", "run/.saved.tmp", None, "run/saved")
    with pytest.raises(NotRead, match="^altered: remove it$"), recipe.explain_write_errors("x", "y"):
        raise NotRead("altered: remove it")
    with recipe.reword_errors(), recipe.explain_write_errors("x", "y"):
        pass


class Marked(Own):
    once: Annotated[int | None, mark_fixed_once_set("give the old one")] = None
    never: Annotated[int, mark_fixed_on_resume("begin anew")] = 0
    free: Annotated[int, MAY_CHANGE] = 0
    plain: int = 0


def test_what_may_change_by_its_mark():
    """Oracle: by hand: what is filled in may come but not go or change; the remedy of the mark stands in the error."""

    def keys(old: dict, new: dict) -> list[str]:
        return [key for key, _, _ in recipe.list_refused_changes(Run(model=old), Run(model=new), Marked)]

    assert keys({"once": None}, {"once": 1}) == [] and keys({}, {"once": 1}) == [] and keys({}, {"free": 1}) == []
    assert keys({"once": 1}, {"once": 2}) == keys({"once": 1}, {"once": None}) == ["model.once"]
    assert keys({"never": None}, {"never": 1}) == ["model.never"]
    assert keys({"plain": 0}, {"plain": 1}) == ["model.plain"]
    for name, remedy in (("once", "give the old one"), ("never", "begin anew"), ("plain", "write model.plain=1")):
        error = recipe.make_refused_changes_error([(f"model.{name}", 1, 2)], Path("runs/x"), Marked)
        assert f"model.{name} was 1 in runs/x and is now 2: {remedy}" in str(error)
