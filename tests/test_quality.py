"""What evaluate --metrics says of a run: the figures of the pictures that generate writes, on any number of ranks."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dstrain import quality as module
from dstrain import recipe, systems
from dstrain.generate import GenerateOptions, generate
from dstrain.metrics.images import open_set
from dstrain.quality import Drawn, QualityOptions, quality, report, write_reference
from dstrain.recipe import ConfigError
from dstrain.report.record import _evaluations
from dstrain.runs import trained
from tests.metrics.oracles import arrays, detector, noise
from tests.support import checkpoints, counting, gloo
from tests.support.launch import ROOT, here

NUM = 21
METRICS = ("fid", "kid", "pr", "dc")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run of random weights on the built-in images."""
    folder = tmp_path_factory.mktemp("quality")
    run = recipe.load(ROOT / "tests/launch/tiny.yaml", ["samples.num_steps=2"])
    run = recipe.check(run, systems.config_class("dit"))
    networks = systems.build("dit", run.model).networks()
    torch.manual_seed(0)
    for weight in networks["denoiser"].parameters():
        torch.nn.init.normal_(weight, std=0.1)
    return checkpoints.write(folder / "run", run, networks)


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> str:
    return f"torchscript:{detector(tmp_path_factory.mktemp('network') / 'detector.pt')}"


def work(rank: int, folder: Path, words: str, out: Path) -> dict:
    options = QualityOptions(METRICS, (words,), folder, num=NUM, seed=5, batch=4, out=out, split="held_out")
    return quality(options)[1]["figures"]


def test_a_run(run, words, tmp_path):
    """Oracle: the same metrics of the pictures that generate writes, against statistics of the same data; two ranks."""
    generated = generate(GenerateOptions(run, NUM, seed=5, batch=4, out=tmp_path / "pictures", ema=0.9))
    common = {"metrics": METRICS, "features": (words,)}
    data = tmp_path / "data.npz"
    assert "statistics of" in write_reference(QualityOptions(**common, folder=run, split="held_out",
                                                             write_reference=data))
    of_files = quality(QualityOptions(**common, images=generated, reference=data))[1]
    assert report(None, of_files).splitlines()[0] == f"{generated.name}: {NUM} images"
    options = QualityOptions(**common, folder=run, num=NUM, seed=5, batch=4, out=tmp_path / "out", split="held_out")
    path, result = quality(options)
    assert result["figures"] == pytest.approx(of_files["figures"], rel=1e-6) and len(result["figures"]) == 6
    for figures in gloo.run(tmp_path, work, run, words, tmp_path / "two"):
        assert figures == pytest.approx(result["figures"], rel=1e-6)
    other = quality(QualityOptions(**common, images=generated, reference=arrays(tmp_path / "n.npz", noise(30))))[1]
    assert other["figures"]["fid"] < 0.5 * result["figures"]["fid"]          # random weights draw little but noise
    assert json.loads(path.read_text())["figures"] == result["figures"]
    assert f"{result['figures']['fid']:.5g}" in report(path, result)
    (name, text, plot), = _evaluations(tmp_path / "out", remarks := [])
    assert not remarks and "21 drawn samples" in text and "fid" in text and not plot.exists()


def test_clips_are_no_images(tmp_path, words, monkeypatch):
    """Oracle: a message that says which of both the network takes."""
    counting.register(monkeypatch)
    monkeypatch.setattr(module, "manifest", lambda checkpoint: {"step": 3})
    with pytest.raises(ConfigError, match="torchscript: it takes images, and these are clips"):
        quality(QualityOptions(("fid",), (words,), counting.folder(tmp_path / "run"), num=4, out=tmp_path / "out",
                               reference=arrays(tmp_path / "n.npz", noise(9))))


def test_texts_by_the_slice(tmp_path):
    """Oracle: counting's pictures, which show the length of their text and the noise of their seed; texts in turn."""
    texts = ("a", "bb", "ccc")
    run = trained.read(counting.folder(tmp_path / "run", {"prompts": list(texts), "num_frames": 3}))
    system = systems.build(run.system, run.model)
    options = QualityOptions(("fvd",), folder=tmp_path / "run", num=2300, seed=7)
    batches = [*Drawn(options, run, system, system.networks()).batches(300)]
    numbers = torch.cat([batch.numbers for batch in batches])
    clips, captions = torch.cat([batch.images for batch in batches]), [text for b in batches for text in b.captions]
    assert torch.equal(numbers, torch.arange(2300)) and captions == [texts[i % 3] for i in range(2300)]
    assert clips[:, 0, 0, 0, 0].tolist() == [len(text) for text in captions]
    assert torch.equal(clips[:, 0, 0, 0, 1].long(), counting.noise_of(7 + numbers))


def test_adm_files(words, tmp_path):
    """Oracle: with ADM's names FID takes the statistics, and KID the images of the same file."""
    images, other = arrays(tmp_path / "a.npz", noise(20)), noise(18).clamp(90, 190)
    whole = arrays(tmp_path / "b.npz", other)
    mixed = arrays(tmp_path / "adm.npz", other, mu=np.zeros(96), sigma=np.zeros((96, 96)))
    by_images, by_both = (quality(QualityOptions(("fid", "kid"), (words,), images=images, reference=path))[1]["figures"]
                          for path in (whole, mixed))
    assert by_both["kid"] == by_images["kid"]
    (batch,) = open_set(images, "--images").batches(20)
    means = torch.nn.functional.adaptive_avg_pool2d(batch.images.double() / 255, (4, 4)).flatten(1)
    rows = torch.cat((means, means.square()), 1)
    assert by_both["fid"] == pytest.approx((rows.mean(0).square().sum() + rows.var(0).sum()).item(), rel=1e-5)
    np.savez(tmp_path / "c.npz", mu=np.zeros(96), sigma=np.zeros((96, 96)))
    with pytest.raises(ConfigError, match="holds no features for --metrics kid"):
        quality(QualityOptions(("kid",), (words,), images=images, reference=tmp_path / "c.npz"))


@pytest.mark.parametrize("words, message", [
    (["RUN", "--reference", "x"], "--reference is for metrics"),
    (["--images", "x", "RUN", "--metrics", "fid"], "name one of the two"),
    (["RUN", "--metrics", "fid", "--against", "x"], "--against B goes with --images A"),
    (["RUN", "--metrics", "fid", "--data", "x"], "--data is for bits/dim"),
    *((["--images", "x", "--against", "y", "--metrics", "fid", *option.split()], f"{name} changes nothing beside --i")
      for option, name in (("--guidance-scale 3", "--guidance-scale"), ("--labels 3", "--labels"), ("--raw", "--raw"),
                           ("--num-samples 5", "--num-samples"), ("--ema 0.5", "--ema"), ("--split test", "--split"),
                           ("--steps 3", "--steps"), ("--checkpoint 0", "--checkpoint"), ("--seed 0", "--seed"))),
    (["--images", "x", "--against", "y", "--metrics", "fid", "--precision", "bf16"], "--precision bf16 is of a run"),
    (["RUN", "--metrics", "fid", "--reference", "x", "--split", "train"], "--split changes nothing beside --reference"),
    (["--images", "x", "--against", "y", "--metrics", "fid", "--write-reference", "z.npz"],
     "--reference (--against) changes nothing beside --write-reference"),
    (["RUN", "--metrics", "fid", "--eta", "1", "--write-reference", "z.npz"], "--eta changes nothing beside --write"),
    (["RUN", "--metrics", "fid"], "fid needs a network"), ([], "name the folder of a run"),
    (["RUN", "--metrics", "fid", "--write-reference", "x.pt"], "name a file that ends in .npz")])
def test_command_line(words, message, run, monkeypatch, capsys):
    """Oracle: exit code 2 and a line that names the option."""
    code, _, error = here("evaluate.py", [str(run) if word == "RUN" else word for word in words], monkeypatch, capsys)
    assert code == 2 and message in error
