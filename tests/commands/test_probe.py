"""The check before a start, on two real samples: wrong losses, terms and ids are named, and nothing is changed."""

import resource
import subprocess
import sys
import warnings

import pytest
import torch

from dstrain import recipe, systems
from dstrain.commands import probe as module
from dstrain.commands.probe import try_system_on_samples
from dstrain.data import source as data_source
from dstrain.data.source import BadSample
from dstrain.recipe import ConfigError
from tests.support import first_stage, tokenizers
from tests.support.cases import CASES
from tests.support.launch import ROOT, environment
from tests.systems.dit.cases import TINY
from tests.systems.phenaki.cases import TOKEN_CLIPS
from tests.systems.vae.cases import PATCHES, POSTERIOR


class Source(data_source.Source):
    """The samples of a batch; those in `bad` cannot be read."""

    def __init__(self, batch, bad=()):
        self.batch = {name: values for name, values in batch.items() if name not in ("key", "position", "step")}
        self.bad = bad

    def __len__(self):
        return len(next(iter(self.batch.values())))

    def __getitem__(self, index):
        if index in self.bad:
            raise BadSample(str(index), "broken on purpose")
        return {name: values[index] for name, values in self.batch.items()}

    def name_sample(self, index):
        return str(index)

    def compute_fingerprint(self):
        return "a batch"


def run_of(system, **sections):
    return recipe.Run.model_validate({"system": system, "data": {"flip": False}, **sections})


@pytest.fixture
def dit():
    return systems.build("dit", TINY)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(tokenizers.save(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(params=[False, True], ids=["computed", "by-shapes"])
def large(request, monkeypatch):
    """Whether the model counts as large, so that it runs on the meta device."""
    if request.param:
        monkeypatch.setattr(module, "_WEIGHTS", 0)
    return request.param


def changed(system, change):
    """The system with other terms of its first part."""
    part, loss = next(iter(system.parts.items()))
    system.parts = system.parts | {part: lambda nets, example: change(loss(nets, example))}
    return system


@pytest.mark.parametrize("name, index", [(name, index) for name, cases in CASES.items() for index in range(len(cases))])
def test_every_system_passes(name, index, large, tokenizer):
    """Oracle: test_contract.py, by which these systems keep the contract; torch's random state before and after."""
    config = CASES[name][index] | ({"tokenizer": {"path": tokenizer}} if name == "phenaki" else {})
    system = systems.build(name, config)
    source, state = Source(system.synthetic(5)), torch.get_rng_state()
    remarks = try_system_on_samples(run_of(name), system, source)
    assert torch.equal(torch.get_rng_state(), state)
    if not large:
        assert remarks == []
    else:
        assert len(remarks) == 1 and "its values are not" in remarks[0]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda terms: terms | {"loss": terms["loss"].expand(2, 1)}, r"has the shape \(2, 1\), and has to be a scalar"),
        (lambda terms: terms | {"loss": terms["loss_each"]}, r"has the shape \(2,\), and has to be a scalar"),
        (lambda terms: {"mse": terms["mse"]}, r'returns no "loss" \(it returns mse\)'),
        (lambda terms: {}, r'returns no "loss" \(it returns nothing\)'),
        (lambda terms: terms | {"loss": terms["loss"].detach()}, r"has no gradient"),
        (lambda terms: terms | {"curve": terms["loss_each"].expand(3, 2)}, r'"curve"\] has the shape \(3, 2\)'),
        (lambda terms: terms | {"curve": terms["loss_each"].expand(2, 2)}, r'"curve"\] has the shape \(2, 2\)'),
    ],
)
def test_terms_that_cannot_be_descended(dit, large, change, message):
    """Oracle: one line with the system, the part and what is wrong with it."""
    with pytest.raises(ConfigError, match="dit: loss of denoiser.*" + message):
        try_system_on_samples(run_of("dit"), changed(dit, change), Source(dit.synthetic(5)))


def test_watched_terms_may_have_any_width(dit, large):
    """Oracle: base.py: `watched` names what `observe` takes, (B, ...)."""
    dit.watched = ("curve",)
    changed(dit, lambda terms: terms | {"curve": terms["loss_each"].expand(3, 2).T.detach()})
    assert len(try_system_on_samples(run_of("dit"), dit, Source(dit.synthetic(5)))) == large


def test_an_example_with_a_gradient(dit, large):
    """Oracle: base.py: encode has no gradient."""
    plain = dit.encode
    dit.encode = lambda batch: {
        name: values.clone().requires_grad_() if name == "x_start" else values for name, values in plain(batch).items()
    }
    with pytest.raises(ConfigError, match="dit: encode returns x_start with a gradient"):
        try_system_on_samples(run_of("dit"), dit, Source(dit.synthetic(5)))


def test_ids_beyond_the_codebook(tokenizer):
    """Oracle: the ids that were put in; without this a bare IndexError ends the first step."""
    system = systems.build("phenaki", TOKEN_CLIPS | {"tokenizer": {"path": tokenizer}})
    batch = system.synthetic(5)
    batch["tokens"] = torch.full_like(batch["tokens"], 80)
    with pytest.raises(ConfigError, match="phenaki: loss of maskgit: an id .*tokens 80 to 80.*codebook_size"):
        try_system_on_samples(run_of("phenaki"), system, Source(batch))


def test_labels_beyond_the_classes(dit):
    """Oracle: the labels that were put in."""
    batch = dit.synthetic(5) | {"label": torch.full((5,), 12)}
    with pytest.raises(ConfigError, match="dit: loss of denoiser: an id .*label 12 to 12.*num_classes"):
        try_system_on_samples(run_of("dit"), dit, Source(batch))


@pytest.mark.parametrize(
    "bug",
    [
        lambda terms: [][0],
        lambda terms: torch.zeros(3)[torch.tensor([7])],
        lambda terms: torch.zeros(2, 3) @ torch.zeros(2, 3),
        lambda terms: terms["absent"],
    ],
)
def test_a_bug_keeps_its_traceback(dit, bug):
    """Oracle: torch's and Python's own exceptions, since neither data nor an embedding table is at fault."""
    with pytest.raises((LookupError, RuntimeError)) as caught:
        try_system_on_samples(run_of("dit"), changed(dit, bug), Source(dit.synthetic(5)))
    assert not isinstance(caught.value, ConfigError)


def test_a_loss_that_is_not_finite(dit):
    """Oracle: the value put in: it is only a remark, because training has its own limit."""
    changed(dit, lambda terms: terms | {"loss": terms["loss"] * float("nan")})
    assert try_system_on_samples(run_of("dit"), dit, Source(dit.synthetic(5))) == [
        "dit: loss of denoiser: the first one is nan"
    ]


def test_one_readable_sample(dit, tmp_path, monkeypatch):
    """Oracle: the file system: bad_files.txt is training's to write; no warning either."""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert try_system_on_samples(run_of("dit"), dit, Source(dit.synthetic(5), bad=(0, 1, 2, 4))) == []
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_joins_late():
    """Oracle: the config, by which the discriminator begins at step 1000: both parts have had a turn."""
    config = {
        "image_size": 16,
        "channels": 1,
        "kl": POSTERIOR | {"discriminator": PATCHES["discriminator"] | {"start": 1000}},
    }
    system, parts = systems.build("vae", config), []
    loss, batch = system.loss, system.synthetic(5)
    system.loss = lambda part, *rest: parts.append(part) or loss(part, *rest)
    assert try_system_on_samples(run_of("vae", steps=2000), system, Source(batch)) == []
    assert parts == ["autoencoder", "autoencoder", "discriminator"]
    parts.clear()
    try_system_on_samples(run_of("vae", steps=10), system, Source(batch))
    assert parts == ["autoencoder"]


def test_a_first_stage(tmp_path, large):
    """Oracle: the device of the first stage's weights: a large one computes nothing."""
    path = first_stage.save(tmp_path / "vae")
    system = systems.build(
        "dit",
        TINY
        | {"image_size": 16, "in_channels": 3, "first_stage": {"path": str(path), "factor": 4, "image_channels": 1}},
    )
    assert len(try_system_on_samples(run_of("dit"), system, Source(system.synthetic(5)))) == large
    assert {weight.device.type for weight in system.first_stage.parameters()} == {"meta" if large else "cpu"}


def test_it_imports_nothing_slow():
    """Oracle: the modules of a fresh interpreter: torch._dynamo alone takes twenty times as long
    as dit-small's probe.
    """
    program = """
import sys
from pathlib import Path
from dstrain import recipe, systems
from dstrain.commands.probe import try_system_on_samples
from dstrain.data.open import open_sources
run = recipe.load_recipe(Path("launch/recipes/dit-small.yaml"))
run = recipe.complete_model_section(run, systems.find_config_class(run.system))
system, (source, _) = systems.build(run.system, run.model), open_sources(run.data)
before = "torch._dynamo" in sys.modules
print(try_system_on_samples(run, system, source), before, "torch._dynamo" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), text=True, capture_output=True, cwd=ROOT, timeout=120
    )
    assert done.stdout.split() == ["[]", "False", "False"], done.stdout + done.stderr


def test_a_large_model_takes_no_memory():
    """Oracle: the kernel's count of this process's memory: DiT-XL/2 would take 2.7 GB."""
    config = {"image_size": 32, "in_channels": 4, "patch_size": 2, "hidden_size": 1152, "depth": 28, "num_heads": 16}
    system = systems.build("dit", config)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (remark,) = try_system_on_samples(run_of("dit"), system, Source(system.synthetic(5)))
    assert remark == "dit with 674.8 M weights: the shapes of its loss are checked, its values are not"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB
