"""samples.reference: what every.metrics compares with, where the run's own data are codes, or are no good reference."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dstrain.commands.evaluating.quality import compute_and_write_reference_statistics
from dstrain.commands.options.evaluate import EvaluateOptions
from dstrain.data.builtin.fashion import Fashion
from dstrain.metrics import table
from dstrain.metrics.in_training import build_and_prepare_training_metrics, build_training_metrics
from dstrain.recipe import ConfigError, Run
from dstrain.recipe.run import Codes
from dstrain.systems.base import Nets, Request
from tests.metrics.oracles import arrays, detector, noise
from tests.metrics.test_in_training import Copies
from tests.support import gloo

NUM = 24


class Painter(Copies):
    """Draws pictures of 32 pixels, as a model in latents does by its autoencoder."""

    def sample(self, nets: Nets, request: Request) -> Tensor:
        return Fashion(32, 3).images[request.seeds % NUM][:, None].expand(-1, 3, -1, -1)


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> str:
    return f"torchscript:{detector(tmp_path_factory.mktemp('network') / 'detector.pt')}"


def drawn() -> Tensor:
    return Painter().sample({}, Request(torch.arange(NUM), {}, 1, "", 1.0))


def pictures_in(folder: Path, enlarged: int = 1) -> Path:
    """Writes what Painter draws as PNGs, each pixel enlarged, with bars at both sides that training crops away."""
    folder.mkdir(parents=True)
    for place, image in enumerate(drawn().permute(0, 2, 3, 1).numpy()):
        large = image.repeat(enlarged, 0).repeat(enlarged, 1)
        bar = 0 if enlarged == 1 else 4
        Image.fromarray(np.pad(large, ((0, 0), (bar, bar), (0, 0)), constant_values=255)).save(
            folder / f"{place:03}.png"
        )
    return folder


def run_on_codes(folder: Path, words: str, place: object, **samples) -> Run:
    """A run on latents of other pictures, whose metrics compare with `place`."""
    entries = {"metrics": ["fid"], "features": [words], "metrics_samples": NUM, "reference": str(place)} | samples
    run = Run(folder=folder, data={"image_size": 32}, samples=entries, every={"metrics": 5})
    codes = Codes(kind="latents", shape=(3, 8, 8), flips=1, scaling_factor=1.0, first_stage="none")
    return run.model_copy(update={"data": run.data.model_copy(update={"path": "latents", "codes": codes})})


def statistics_file(tmp_path: Path, words: str) -> Path:
    options = EvaluateOptions(
        metrics=("fid", "kid"),
        features=(words,),
        images=pictures_in(tmp_path / "of"),
        write_reference=tmp_path / "f.npz",
    )
    compute_and_write_reference_statistics(options)
    return tmp_path / "f.npz"


REFERENCES = {
    "statistics": statistics_file,
    "an array of images": lambda tmp_path, words: arrays(tmp_path / "a.npz", drawn()),
    "a folder": lambda tmp_path, words: pictures_in(tmp_path / "p"),
    "a folder of larger images": lambda tmp_path, words: pictures_in(tmp_path / "p", 2),
    "a folder of classes": lambda tmp_path, words: pictures_in(tmp_path / "p" / "cats").parent,
    "a folder beside hidden ones": lambda tmp_path, words: hide(pictures_in(tmp_path / "p")),
    "a folder that links to another": lambda tmp_path, words: link(pictures_in(tmp_path / "elsewhere"), tmp_path),
}


def hide(folder: Path) -> Path:
    """Adds what other programs leave behind: copies that no form of data.path counts."""
    for name in (".ipynb_checkpoints", "@eaDir"):
        (folder / name).mkdir()
        Image.new("RGB", (32, 32)).save(folder / name / "x.png")
    (folder / "._000.png").write_bytes(b"a resource fork")
    return folder


def link(folder: Path, tmp_path: Path) -> Path:
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "class").symlink_to(folder)
    return tmp_path / "linked"


@pytest.mark.parametrize("kind", REFERENCES)
def test_what_a_run_on_codes_compares_with(tmp_path, words, kind):
    """Oracle: FID of a set with itself, which is 0 to rounding; with noise it is not; the second start reads again."""
    place = REFERENCES[kind](tmp_path, words)
    run = run_on_codes(tmp_path / "run", words, place)
    run.directory.mkdir()
    first = build_and_prepare_training_metrics(run, Painter(), None, None).measure({}, 7)
    other = build_and_prepare_training_metrics(
        run_on_codes(tmp_path / "run", words, arrays(tmp_path / "n.npz", noise(20))), Painter(), None, None
    )
    assert first["fid"] < 1e-3 < 1 < other.measure({}, 7)["fid"]
    assert build_and_prepare_training_metrics(run, Painter(), None, None).measure({}, 7) == first


def test_images_are_described_once(tmp_path, words, monkeypatch):
    """Oracle: the calls that take features: one of a folder, none at the next start, one after a picture has changed;
    none of a file that holds statistics.
    """
    described, collect = [], table.collect_statistics
    monkeypatch.setattr(
        table, "collect_statistics", lambda *args, **options: described.append(1) or collect(*args, **options)
    )
    folder, file = pictures_in(tmp_path / "p"), statistics_file(tmp_path, words)
    (tmp_path / "run").mkdir()

    def opened(place: Path) -> int:
        described.clear()
        build_and_prepare_training_metrics(run_on_codes(tmp_path / "run", words, place), Painter(), None, None)
        return len(described)

    array = arrays(tmp_path / "a.npz", noise(9))
    assert [opened(folder), opened(folder), opened(file), opened(array), opened(array)] == [1, 0, 0, 1, 0]
    Image.new("RGB", (32, 32)).save(folder / "999.png")
    os.utime(array, ns=(1, 1))
    assert [opened(folder), opened(array)] == [1, 1]


def work(rank: int, folder: Path, words: str, place: Path) -> dict[str, float]:
    return build_and_prepare_training_metrics(run_on_codes(folder, words, place), Painter(), None, None).measure({}, 7)


def test_two_ranks(tmp_path, words):
    """Oracle: one rank's figures."""
    place = pictures_in(tmp_path / "p", 2)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    alone = work(0, tmp_path / "one", words, place)
    for figures in gloo.run(tmp_path, work, tmp_path / "two", words, place):
        assert figures == pytest.approx(alone, abs=1e-4)


REFUSED = {
    "absent": (lambda tmp_path: tmp_path / "absent", {}, "samples.reference={place}"),
    "an absent file": (lambda tmp_path: tmp_path / "absent.npz", {}, "samples.reference={place}: there is no such"),
    "no images": (lambda tmp_path: (tmp_path / "empty").mkdir() or tmp_path / "empty", {}, "samples.reference={place}"),
    "one image": (lambda tmp_path: arrays(tmp_path / "one.npz", noise(1)), {}, "samples.reference={place}"),
    "a torn file": (lambda tmp_path: torn(tmp_path / "torn.npz"), {}, "samples.reference={place} cannot be read"),
    "few": (
        lambda tmp_path: arrays(tmp_path / "few.npz", noise(5)),
        {"metrics": ["pr"]},
        "5 neighbours of each image among 5 of samples.reference={place}",
    ),
    "nothing that compares": (
        lambda tmp_path: arrays(tmp_path / "a.npz", noise(9)),
        {"metrics": ["clip_score"]},
        "samples.reference={place}: none of samples.metrics compares with it",
    ),
    "statistics of another network": (
        lambda tmp_path: np.savez(tmp_path / "s.npz", mu=np.zeros(3), sigma=np.eye(3)) or tmp_path / "s.npz",
        {},
        "samples.reference={place} holds statistics of 3 features",
    ),
    "none": (lambda tmp_path: None, {}, "every.metrics=5: latents holds codes, and not the pictures to compare with"),
}


def torn(path: Path) -> Path:
    arrays(path, noise(9))
    path.write_bytes(path.read_bytes()[:500])
    return path


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_at_the_start(tmp_path, words, kind, monkeypatch):
    """Oracle: the key, the path and the fault, before anything is drawn or described."""
    make, entries, message = REFUSED[kind]
    place = make(tmp_path)
    run = run_on_codes(tmp_path / "run", words, place, **entries)
    if place is None:
        run = run.model_copy(update={"samples": run.samples.model_copy(update={"reference": None})})
    if entries.get("metrics") == ["clip_score"]:
        monkeypatch.setattr(
            table, "open_feature_network", lambda words: type("Clip", (), {"name": "clip", "fingerprint": ""})
        )
        run = run.model_copy(update={"samples": run.samples.model_copy(update={"features": ("clip:x",)})})
    with pytest.raises(ConfigError) as caught:
        build_training_metrics(run, Painter(), Fashion(32, 3), None)
    assert message.format(place=place) in str(caught.value) and "--reference " not in str(caught.value)


def test_metrics_where_a_reference_is_all_that_is_named(tmp_path, words):
    """Oracle: the guide: fid of pictures."""
    run = run_on_codes(tmp_path / "run", words, arrays(tmp_path / "a.npz", noise(9)), metrics=None)
    assert build_training_metrics(run, Painter(), Fashion(32, 3), None).metrics == ("fid",)


def test_a_reference_that_changes_or_cannot_be_read_is_said(tmp_path, words, capsys):
    """Oracle: the files: one that is broken is counted and named, and a start with other files says that figures stand
    apart; one with the same files says nothing.
    """
    place = pictures_in(tmp_path / "p")
    run = run_on_codes(tmp_path / "run", words, place)
    run.directory.mkdir()
    (place / "005.png").write_bytes(b"none")
    for expected in (["1 of 24 images", "005.png"], []):
        build_and_prepare_training_metrics(run, Painter(), None, None)
        notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
        assert len(notes) == bool(expected) and all(word in "".join(notes) for word in expected), notes
    (place / "005.png").unlink()
    build_and_prepare_training_metrics(run, Painter(), None, None)
    assert f"note: every.metrics: {place} is not what earlier figures" in capsys.readouterr().out
