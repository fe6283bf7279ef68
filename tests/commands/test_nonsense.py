"""Every key of a recipe with a value that means nothing: refused before a start, by a line that names the key."""

import functools
from pathlib import Path

import pytest

from dstrain import systems
from dstrain.commands.job import prepare_job
from dstrain.commands.options.train import JobOptions
from dstrain.recipe import ConfigError, Run
from dstrain.recipe.section import iterate_fields
from dstrain.systems.phenaki import codec
from tests.support import tokenizer
from tests.support.sample import sampled

ROOT = Path(__file__).parents[2]
SYSTEM = systems.find_config_class("dit")
KEYS = [key for key, _ in [*iterate_fields(Run), *iterate_fields(SYSTEM, "model")]]
# Of any text: names, words for people, paths that need not be there yet, and what only a model with texts reads.
FREE = {
    *("name", "folder", "data.index", "data.cache.folder", "samples.reference", "samples.negative_prompt"),
    *("track.project", "track.entity", "track.group", "track.notes", "model.text_encoder_fingerprint"),
}
FREE_LISTS = {"track.tags", "train_only"}
PATTERNS = {"optimizer.rates"}  # of weights, whose names --dry-run knows: tests/engine/test_frozen.py
NONSENSE = ("[nonsense]", "{nonsense: 1}", "-7.5", "''", str(2**63 - 1))
# Words of pydantic and of Python's types, which no recipe has.
FOREIGN = ("tuple", "Tuple", "constrained", "literal[", "[key]", ".bool=", ".str=", "dictionary", "instance")


def refuse(tmp_path, *words: str, recipe: str = "tiny") -> list[str]:
    """The lines of the refusal of a recipe with these overrides; [] if it is taken."""
    options = JobOptions(
        ROOT / f"tests/launch/{recipe}.yaml",
        ROOT / "ds_configs/zero2_fp32.json",
        (f"folder={tmp_path / 'run'}", *words),
        print_config=True,
    )
    try:
        prepare_job(options, world=1, device_type="cpu")
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    "value, free",
    [
        ("nonsense", FREE),
        ("[nonsense]", FREE_LISTS),
        ("{nonsense: 1}", PATTERNS),
        ("-7.5", FREE | {"model.flow.logit_mean"}),
        ("''", FREE),
    ],
)
def test_every_key_with_nonsense(tmp_path, monkeypatch, value, free):
    """Oracle: the schema: every key is tried. It is refused unless it takes any text, by a line that names the
    key or its section; nothing is said twice, and in no word of pydantic's. every.metrics is 0 in this recipe, and no
    other data are here: what nobody reads is checked, too."""
    monkeypatch.chdir(tmp_path)
    taken, wrong = set(), []
    for key in KEYS:
        lines = refuse(tmp_path, f"{key}={value}")
        taken |= set() if lines else {key}
        whole = key.rpartition(".")[0] or key
        section = whole.rpartition(".")[2]
        named = any(line.startswith((key, whole, f"{section}:", "model:")) or f"{section}." in line for line in lines)
        named |= any(f"{section}=" in line for line in lines)  # a value stands where the section is no mapping
        foreign = [word for word in FOREIGN if any(word in line for line in lines)]
        if lines and (not named or foreign or len(set(lines)) < len(lines)):
            wrong.append((key, lines))
    assert not wrong, "\n".join(map(str, wrong))
    assert taken <= free | (EMPTY if value == "''" else set())
    assert "samples.metrics" in KEYS and len(KEYS) > 200


EMPTY = {"model.text_encoder"}  # no encoder


# What is taken of nonsense, by system: names that need no file until texts are encoded, lists that may be empty, and
# numbers of which every size has a meaning.
TAKEN = {
    "iddpm": {
        *("model.attention_resolutions=''", "model.timestep_respacing=''", "model.flow.logit_mean=-7.5"),
        *(f"model.{key}={2**63 - 1}" for key in ("recompute", "flow.strata")),
    },
    "vae": {
        f"model.{key}={2**63 - 1}" for key in ("recompute", "kl.discriminator.start", "discrete.temperature.start")
    },
    "phenaki.tokenizer": {
        f"model.{key}={2**63 - 1}"
        for key in ("recompute", "codebook_dim", "discriminator.start", "discriminator.penalty.every")
    },
    "phenaki": {
        *(f"model.text_encoder_fingerprint={value}" for value in ("-7.5", "''", str(2**63 - 1))),
        *(f"model.{key}={2**63 - 1}" for key in ("recompute", "loss_chunk")),
    },
    "prior": {
        *(f"model.text_encoder={value}" for value in ("-7.5", "''", str(2**63 - 1))),
        *(f"model.{key}={2**63 - 1}" for key in ("recompute", "text_encodings_dim")),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    sampled([(system, tried) for system in TAKEN for tried in (2, len(NONSENSE))], [(system, 2) for system in TAKEN]),
    ids=str,
)
def test_the_sections_of_all_systems(tmp_path, monkeypatch, case):
    """Oracle: the schema of each system: every key is tried with so many values, in turn, of nonsense and the largest
    number there is. It is refused by a line that names the key, its section or the model, in no word of pydantic's, or
    is in a list above.
    """
    system, tried = case
    monkeypatch.chdir(tmp_path)
    words: tuple[str, ...] = ()
    if system == "phenaki":
        tokenizer.save(tmp_path / "tokenizer")
        monkeypatch.setattr(codec, "load_tokenizer", functools.cache(codec.load_tokenizer))  # once for all commands
        words = ("data.path=builtin:moving-fashion", "data.image_size=12", "data.height=8", "data.held_out=0")
        words += (f"model.tokenizer.path={tmp_path / 'tokenizer'}", "every.evaluate=0", "every.metrics=0")
    recipe = f"tiny-{system.replace('.', '-')}"
    assert refuse(tmp_path, *words, recipe=recipe) == []
    taken, wrong = set(), []
    for number, (key, _) in enumerate(iterate_fields(systems.find_config_class(system), "model")):
        for value in [NONSENSE[(number * tried + turn) % len(NONSENSE)] for turn in range(tried)]:
            override = f"{key}={value}"
            lines = refuse(tmp_path, *words, override, recipe=recipe)
            taken |= set() if lines else {override}
            beginnings = (key, f"{key.rpartition('.')[0]}:", f"{key.rpartition('.')[0]}=", "model", f"{system}: ")
            foreign = [word for word in FOREIGN if any(word in line for line in lines)]
            if lines and (foreign or not any(line.startswith(beginnings) or key in line for line in lines)):
                wrong.append((override, lines))
    assert not wrong, "\n".join(map(str, wrong))
    assert taken <= TAKEN[system]


@pytest.mark.parametrize(
    "words, line",
    [
        ("ema.decays=0.5", "ema.decays=0.5: it should be a list, such as ema.decays=[0.5] [command line]"),
        ("ema.decays=null", "ema.decays=null: it should be a list [command line]"),
        ("data.splits=[1,0,0,0]", "data.splits=[1, 0, 0, 0]: it should have 3 entries at most [command line]"),
        ("save.best=[]", "save.best=[]: it should be a valid boolean, or a valid string [command line]"),
        ("model.flow.shift=-7", "model.flow.shift=-7: it should be greater than 0, or 'dimension'"),
        ("folder=''", "folder='': it is empty: name a path, or leave it out [command line]"),
        ("model.codes=a", "model.codes=a: it is filled in from the data, here with null: leave it out"),
        ("data.captioned=true", "data.captioned=true: it is filled in from the data, here with false: leave it out"),
        ("samples.features=[foo:bar]", "samples.features: foo:bar: known are builtin, emoji"),
    ],
)
def test_what_a_refusal_says(tmp_path, words, line):
    """Oracle: by hand: one line, with the key, the fault and the remedy."""
    (found,) = refuse(tmp_path, words)
    assert found.startswith(line)


def test_more_than_is_held_out(tmp_path):
    """Oracle: the 500 held-out images of the built-in ones: one more is told, as many are not."""
    for number, told in (
        (501, ["every.evaluate_samples=501: 500 are held out, and all of them are taken"]),
        (500, []),
    ):
        words = (f"folder={tmp_path}", "every.evaluate=5", f"every.evaluate_samples={number}")
        options = JobOptions(
            ROOT / "tests/launch/tiny.yaml", ROOT / "ds_configs/zero2_fp32.json", words, print_config=True
        )
        remarks = prepare_job(options, world=1, device_type="cpu").remarks
        assert [line for line in remarks if "evaluate_samples" in line] == told
