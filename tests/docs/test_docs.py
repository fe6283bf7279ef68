"""README and docs/: links, commands, options, recipe keys and files that they name exist; pages of code are current."""

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from dstrain import systems
from dstrain.commands.main import VERBS, find_options_class
from dstrain.commands.options.command import format_help
from dstrain.recipe import Run
from dstrain.recipe.section import iterate_fields
from tests.support.launch import ROOT

PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *sorted(ROOT.glob("docs/**/*.md")),
    )
]
FIRST = "pip install -e . && deepspeed --hostfile hosts launch/train.py --ds_config ds_configs/zero2.json"
SECOND = "pip install -e '.[test]' && pytest"
SECTIONS = "data|batch|optimizer|ema|every|save|samples|track|faults|model"
KEY = re.compile(rf"(?<![\w./-])(?:{SECTIONS})(?:\.[a-z][a-z0-9_]*)+(?![\w(/-])")
NO_KEYS = ("data.key", ".mdb", ".safetensors", ".npz", ".json", ".jsonl", ".py", ".yaml", ".pt", ".bin", ".md", ".csv")
PATH = re.compile(r"(?:dstrain|launch|tests|docs|ds_configs)/[\w./-]+")
INNER = re.compile(r"[a-z_]+(?:/[a-z_]+)+\.py")
NOT_HERE = ("dstrain/data", "dstrain/index")  # in the user's cache


def read_page(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def find_code(text: str) -> Iterator[str]:
    """Yields lines of code blocks, with their continuation lines, and what stands between backquotes."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("    ") and not line.lstrip().startswith(("- ", "* ")):
            while line.endswith("\\"):
                line = f"{line[:-1]} {next(lines).strip()}"
            yield line.strip()
    # A span may be broken by the end of a line, not by an empty line.
    prose = "\n".join("" if line.startswith("    ") else line for line in text.splitlines())
    for span in re.findall(r"`([^`]+)`", prose):
        if "\n\n" not in span:
            yield " ".join(span.split())


def find_anchors(page: str) -> set[str]:
    """Returns the anchors of a page's headings, as mkdocs and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", read_page(page), flags=re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in plain}


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    """Oracle: the files of the repository and the headings of the pages."""
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", read_page(page))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        if not path.exists():
            wrong.append(f"{target}: no such file")
        elif anchor and anchor not in find_anchors(path.resolve().relative_to(ROOT.resolve()).as_posix()):
            wrong.append(f"{target}: no such heading")
    assert not wrong


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named(page):
    """Oracle: the files of the repository; a path that begins with a room is one below dstrain/."""
    code = list(find_code(read_page(page)))
    names = {name.rstrip(".,:/-_") for line in code for name in PATH.findall(line)}
    names |= {f"dstrain/{line}" for line in code if INNER.fullmatch(line) and not PATH.match(line)}
    wrong = [name for name in names if not (ROOT / name).exists() and not list(ROOT.glob(f"{name}*"))]
    assert not [name for name in wrong if name not in NOT_HERE and not re.search(r"[A-Z]{3}", name)]


@pytest.mark.parametrize("page", PAGES)
def test_modules(page):
    """Oracle: the modules that `python -m` and `from ... import` name are there."""
    text = "\n".join(find_code(read_page(page)))
    names = re.findall(r"(?:python -m|from) ((?:dstrain|tests)[\w.]*)", text)
    wrong = [name for name in names if importlib.util.find_spec(name) is None]
    assert not wrong


@cache
def find_keys() -> dict[str, set[str]]:
    """Returns the dotted keys of a recipe, "", and of each system's section model."""
    found = {"": {key for key, _ in iterate_fields(Run)}}
    for name in systems.list_system_names():
        if systems.find_config_class(name).__module__.startswith("dstrain."):
            found[name] = {key for key, _ in iterate_fields(systems.find_config_class(name), "model")}
    return found


def unknown_keys(text: str, names: list[str]) -> list[str]:
    """Returns the keys in a text that neither Run nor one of the systems has."""
    known = find_keys()[""].union(*(find_keys()[name] for name in names))
    found = {key for code in find_code(text) for key in KEY.findall(code) if not key.endswith(NO_KEYS)}
    return sorted(key for key in found if key not in known)


@pytest.mark.parametrize("page", PAGES)
def test_keys(page):
    """Oracle: the fields of Run and of the systems' Configs; on a page of several systems, of those that it names."""
    names = [name for name in find_keys() if name]
    wrong = []
    for part in re.split(r"^## ", read_page(page), flags=re.MULTILINE):
        said = re.search(r"\bSystems?: ((?:`[\w.]+`(?:, )?)+)", part)
        wrong += unknown_keys(part, re.findall(r"`([\w.]+)`", said[1]) if said else names)
    assert not wrong


@cache
def find_options(verb: str) -> set[str]:
    """Returns the options of a verb as --help shows them, and those of launchers."""
    text = format_help(find_options_class(VERBS[verb]))
    return {"--help", "--local_rank", *re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}


def command_words(code: str) -> Iterator[tuple[str, list[str]]]:
    """Yields (verb, words behind it) of each command in a line of code."""
    for part in re.split(r"&&|;|\|(?!\w)", re.sub(r"\s#.*", "", code)):
        try:
            words = shlex.split(part)
        except ValueError:
            continue
        for place, word in enumerate(words):
            script = re.fullmatch(r"launch/([a-z_]+)\.py", word)
            typed = word == "dstrain" and (place == 0 or words[place - 1] == "--module")
            if script or (typed and place + 1 < len(words) and re.fullmatch(r"[a-z]+", words[place + 1])):
                verb, behind = (script[1], place + 1) if script else (words[place + 1], place + 2)
                rest = words[behind:]
                if "--" in rest:
                    yield from command_words(shlex.join(rest[rest.index("--") + 1 :]))
                    rest = rest[: rest.index("--")]
                yield verb, rest
                break


SCRIPTS = ("fetch_emoji_clips", "convert")  # files of launch/ that are no verbs


def check_command(verb: str, words: list[str]) -> list[str]:
    """Returns what a verb does not have: itself, an option, or a key of the recipe."""
    if verb in SCRIPTS:
        return []
    if verb not in VERBS:
        return [f"{verb}: no such verb"]
    wrong = [
        f"{verb} {word}: no such option"
        for word in words
        if word.startswith("--") and word.partition("=")[0] not in find_options(verb)
    ]
    tops = {key for key in find_keys()[""] if "." not in key}
    for word in words:
        key, equals, _ = word.partition("=")
        if equals and re.fullmatch(r"[a-z_]+", key) and key not in tops:
            wrong.append(f"{verb} {word}: no such key")
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_commands(page):
    """Oracle: the verbs, their options as --help shows them, and the keys of a recipe."""
    commands = [command for code in find_code(read_page(page)) for command in command_words(code)]
    assert not [line for verb, words in commands for line in check_command(verb, words)]


@pytest.mark.parametrize("recipe", sorted(path.name for path in (ROOT / "launch/recipes").glob("*.yaml")))
def test_commands_of_recipes(recipe):
    """Oracle: as of pages: the commands in a recipe's header name verbs and options that there are, and recipes."""
    lines = (ROOT / "launch/recipes" / recipe).read_text(encoding="utf-8").splitlines()
    header = "\n".join(line.lstrip("# ").removeprefix("Launch").strip() for line in lines if line.startswith("#"))
    header = header.replace("\\\n", " ")
    commands = [command for line in header.splitlines() if "launch/" in line for command in command_words(line)]
    assert not [line for verb, words in commands for line in check_command(verb, words)]
    named = re.findall(r"(?:launch/recipes|ds_configs)/[\w-]+\.\w+", header)
    assert not [name for name in named if not (ROOT / name).exists()]


def test_wrong_pages_are_seen():
    """Oracle: pages with a fault each; without this the tests above might see none."""
    text = "Type\n\n    deepspeed launch/train.py --resume x stpes=3  # or\n    dstrain drwa x\n\nor `model.dpeth=3`."
    commands = [command for code in find_code(text) for command in command_words(code)]
    assert [line for verb, words in commands for line in check_command(verb, words)] == [
        "train --resume: no such option",
        "train stpes=3: no such key",
        "drwa: no such verb",
    ]
    assert unknown_keys(text, ["dit"]) == ["model.dpeth"]
    assert unknown_keys("`model.learn_sigma=` `model.class_cond=`", ["dit"]) == ["model.class_cond"]


def test_the_readme():
    """Oracle: at most 200 lines; the two commands; every recipe and file of ds_configs in its table, and no other."""
    text = read_page("README.md")
    assert len(text.splitlines()) <= 200
    assert f"    {FIRST}\n" in text and f"    {SECOND}\n" in text
    recipes = {path.stem for path in (ROOT / "launch/recipes").glob("*.yaml")}
    named, last = set(), ""
    for line in text.partition("## Recipes")[2].splitlines():
        for name in re.findall(r"`([\w-]+)`", line.split("|")[1]) if line.startswith("| `") else ():
            if name.startswith("-"):
                words = last.split("-")
                starts = ["-".join(words[:count]) for count in range(len(words), 0, -1)]
                name = next(start + name for start in starts if start + name in recipes)
            else:
                last = name
            named.add(name)
    assert named == recipes
    configs = set(re.findall(r"^\| `(\w+\.json)`", text, flags=re.MULTILINE))
    assert configs == {path.name for path in (ROOT / "ds_configs").glob("*.json")}


def test_the_reference_is_current():
    """Oracle: what docs/make_reference.py makes of today's code."""
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs/make_reference.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    for name, text in maker.make_pages().items():
        page = read_page(f"docs/reference/{name}")
        assert page == text, f"docs/reference/{name} is not current: run python docs/make_reference.py"


def test_the_sections_that_tests_cite():
    """Oracle: the headings of docs/design.md, and "design section N" in docstrings of tests."""
    headings = set(re.findall(r"^## (\d+)\.", read_page("docs/design.md"), flags=re.MULTILINE))
    cited = {
        number
        for path in ROOT.glob("tests/**/*.py")
        for words in re.findall(r"design sections? (\d+(?:(?:, | and )\d+)*)", path.read_text(encoding="utf-8"))
        for number in re.findall(r"\d+", words)
    }
    assert cited and cited <= headings


@pytest.mark.slow
def test_the_site(tmp_path):
    """Oracle: mkdocs build --strict, which refuses pages that are not in the navigation and links that lead nowhere."""
    pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Path(tmp_path, "site", "index.html").is_file()
