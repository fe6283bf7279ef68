"""What evaluate --metrics says of a run: the figures of the pictures that generate writes, on any number of ranks."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dstrain import recipe, systems
from dstrain.commands.evaluating import quality as module
from dstrain.commands.evaluating import sampled_sets
from dstrain.commands.evaluating.quality import (
    Drawn,
    compute_and_write_reference_statistics,
    format_report,
    measure_quality,
)
from dstrain.commands.generate import GenerateOptions, generate_samples
from dstrain.commands.options.evaluate import EvaluateOptions
from dstrain.data.open import open_sources
from dstrain.data.views import Spread
from dstrain.metrics.features import open_feature_network
from dstrain.metrics.images import open_image_set
from dstrain.recipe import ConfigError
from dstrain.runs import trained
from dstrain.tracking.report.record import _read_evaluations
from tests.commands.test_export import begun
from tests.metrics.oracles import VideoDetector, arrays, detector, noise, seeded_inception
from tests.support import checkpoints, counting, gloo, towers
from tests.support.launch import ROOT, here

NUM = 21
METRICS = ("fid", "kid", "pr", "dc")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run of random weights on the built-in images."""
    folder = tmp_path_factory.mktemp("quality")
    run = recipe.load_recipe(ROOT / "tests/launch/tiny.yaml", ["samples.num_steps=2"])
    run = recipe.complete_model_section(run, systems.find_config_class("dit"))
    networks = systems.build("dit", run.model).networks()
    torch.manual_seed(0)
    for weight in networks["denoiser"].parameters():
        torch.nn.init.normal_(weight, std=0.1)
    return checkpoints.write(folder / "run", run, networks)


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> str:
    return f"torchscript:{detector(tmp_path_factory.mktemp('network') / 'detector.pt')}"


def work(rank: int, folder: Path, words: str, out: Path) -> dict:
    options = EvaluateOptions(
        metrics=METRICS, features=(words,), folder=folder, num=NUM, seed=5, batch=4, out=out, split="held_out"
    )
    return measure_quality(options)[1]["figures"]


def test_a_run(run, words, tmp_path):
    """Oracle: the same metrics of the pictures that generate writes, against statistics of the same data; two ranks."""
    generated = generate_samples(GenerateOptions(run, NUM, seed=5, batch=4, out=tmp_path / "pictures", ema=0.9))
    common = {"metrics": METRICS, "features": (words,)}
    data = tmp_path / "data.npz"
    assert "statistics of" in compute_and_write_reference_statistics(
        EvaluateOptions(**common, folder=run, split="held_out", write_reference=data)
    )
    of_files = measure_quality(EvaluateOptions(**common, images=generated, reference=data))[1]
    assert format_report(of_files).splitlines()[0] == f"{generated.name}: {NUM} images"
    options = EvaluateOptions(**common, folder=run, num=NUM, seed=5, batch=4, out=tmp_path / "out", split="held_out")
    path, result = measure_quality(options)
    assert result["figures"] == pytest.approx(of_files["figures"], rel=1e-6) and len(result["figures"]) == 6
    for figures in gloo.run(tmp_path, work, run, words, tmp_path / "two"):
        assert figures == pytest.approx(result["figures"], rel=1e-6)
    other = measure_quality(
        EvaluateOptions(**common, images=generated, reference=arrays(tmp_path / "n.npz", noise(30)))
    )[1]
    assert other["figures"]["fid"] < 0.5 * result["figures"]["fid"]  # random weights draw little but noise
    assert json.loads(path.read_text())["figures"] == result["figures"]
    assert f"{result['figures']['fid']:.5g}" in format_report(result)
    ((_name, text, plot),) = _read_evaluations(tmp_path / "out", remarks := [])
    assert not remarks and "21 drawn samples" in text and "fid" in text and not plot.exists()


def test_images_in_buckets(words, tmp_path):
    """Oracle: the statistics of the same folder without buckets, whose images are cut to squares."""
    pictures, written, generator = tmp_path / "data", [], np.random.default_rng(0)
    pictures.mkdir()
    for number, size in enumerate([(40, 20), (20, 40), (20, 20)] * 3):
        Image.fromarray(generator.integers(0, 256, (*size, 3), np.uint8)).save(pictures / f"{number}.png")
    for buckets in ("null", "[[24,16],[16,24]]"):
        entries = [
            "model.num_classes=null",
            "model.in_channels=3",
            "data.channels=3",
            "samples.guidance_scale=1",
            f"data.path={pictures}",
            f"data.buckets={buckets}",
        ]
        begun = recipe.load_recipe(ROOT / "tests/launch/tiny.yaml", entries)
        (folder := tmp_path / str(len(written))).mkdir()
        (folder / "run.yaml").write_text(recipe.dump_run(begun), encoding="utf-8")
        written.append(tmp_path / f"{len(written)}.npz")
        compute_and_write_reference_statistics(
            EvaluateOptions(metrics=("fid",), features=(words,), folder=folder, batch=4, write_reference=written[-1])
        )
    assert all(map(np.array_equal, *(np.load(path).values() for path in written)))


def test_super_resolution(words, tmp_path, monkeypatch):
    """Oracle: the same metrics of what generate makes of the held-out images with their labels; two ranks; slices."""
    run = recipe.load_recipe(
        ROOT / "tests/launch/tiny-iddpm.yaml", ["model.small_size=8", "samples.ema=0.9", "ema.decays=[0.9]"]
    )
    run = recipe.complete_model_section(run, systems.find_config_class("iddpm"))
    folder = checkpoints.write(tmp_path / "run", run, systems.build("iddpm", run.model).networks())
    unseen = Spread(open_sources(run.data)[1], NUM)
    images, _ = unseen.read_batch(torch.arange(NUM))
    generated = generate_samples(
        GenerateOptions(
            folder,
            NUM,
            labels=tuple(images["label"].tolist()),
            seed=5,
            out=tmp_path / "drawn",
            low_res=arrays(tmp_path / "a.npz", images["image"]),
        )
    )
    of_files = measure_quality(
        EvaluateOptions(
            metrics=METRICS,
            features=(words,),
            images=generated,
            reference=arrays(tmp_path / "all.npz", all_of(open_sources(run.data)[1])),
        )
    )[1]
    monkeypatch.setattr(sampled_sets, "_REQUESTED", 8)
    result = measure_quality(
        EvaluateOptions(metrics=METRICS, features=(words,), folder=folder, num=NUM, seed=5, batch=4, split="held_out")
    )[1]
    assert result["figures"] == pytest.approx(of_files["figures"], rel=1e-6)
    assert result["sampling"]["low_res"].startswith("21 of")
    for figures in gloo.run(tmp_path, work, folder, words, tmp_path / "two"):
        assert figures == pytest.approx(result["figures"], rel=1e-6)
    with pytest.raises(ConfigError, match="--labels: .* draws from images"):
        measure_quality(EvaluateOptions(metrics=METRICS, features=(words,), folder=folder, labels=(3,)))


@pytest.fixture(scope="module")
def drawn_files(run, tmp_path_factory) -> tuple[Path, Path]:
    """A folder of PNGs that generate wrote, and seeded weights of Inception."""
    folder = tmp_path_factory.mktemp("files")
    generated = generate_samples(GenerateOptions(run, 12, seed=5, batch=4, out=folder / "drawn", ema=0.9))
    return generated / "samples", seeded_inception(folder / "pt_inception.pth")


def statistics_of(folder: Path, kind: str, weights: Path, out: Path) -> tuple[np.ndarray, np.ndarray]:
    compute_and_write_reference_statistics(
        EvaluateOptions(metrics=("fid",), features=(f"{kind}:{weights}",), images=folder, write_reference=out)
    )
    with np.load(out) as file:
        return file[f"{kind}.mu"], file[f"{kind}.sigma"]


def test_pytorch_fid_reads_what_generate_writes(drawn_files, tmp_path, monkeypatch):
    """Oracle: pytorch-fid's own mean and covariance of that folder, with the same weights."""
    folder, weights = drawn_files
    theirs, inception = (pytest.importorskip(f"pytorch_fid.{name}") for name in ("fid_score", "inception"))
    monkeypatch.setattr(inception, "load_state_dict_from_url", lambda *_, **__: torch.load(weights, weights_only=True))
    expected = theirs.compute_statistics_of_path(str(folder), inception.InceptionV3([3]), 4, 2048, "cpu", num_workers=0)
    for ours, other in zip(statistics_of(folder, "pytorch-fid", weights, tmp_path / "ours.npz"), expected):
        assert np.abs(ours - other).max() < 1e-4 * np.abs(other).max()


@pytest.mark.faults  # in CI: the networks and resizing alone, in tests/metrics/test_inception.py
def test_clean_fid_reads_what_generate_writes(drawn_files, tmp_path):
    """Oracle: clean-fid's own reading and resizing of that folder, with our network, since it fetches its weights."""
    folder, weights = drawn_files
    theirs = pytest.importorskip("cleanfid.fid")
    network = open_feature_network(f"clean-fid:{weights}")._network
    features = theirs.get_folder_features(
        str(folder),
        lambda batch: network(batch / 128 - 1),
        num_workers=0,
        device=torch.device("cpu"),
        mode="clean",
        verbose=False,
    )
    expected = features.astype(np.float64).mean(0), np.cov(features.astype(np.float64), rowvar=False)
    for ours, other in zip(statistics_of(folder, "clean-fid", weights, tmp_path / "ours.npz"), expected):
        assert np.abs(ours - other).max() < 1e-4 * np.abs(other).max()


@pytest.mark.faults  # in CI: the network alone, in tests/metrics/test_inception.py
def test_torch_fidelity_reads_what_generate_writes(drawn_files):
    """Oracle: torch-fidelity's own Inception Score of that folder, with the same weights."""
    folder, weights = drawn_files
    theirs = pytest.importorskip("torch_fidelity")
    expected = theirs.calculate_metrics(
        input1=str(folder),
        isc=True,
        feature_extractor="inception-v3-compat",
        feature_extractor_weights_path=str(weights),
        cuda=False,
        batch_size=4,
        verbose=False,
        samples_find_deep=False,
    )
    figures = measure_quality(EvaluateOptions(metrics=("is",), features=(f"inception:{weights}",), images=folder))[1][
        "figures"
    ]
    assert figures["inception_score"] == pytest.approx(expected["inception_score_mean"], rel=1e-4)


def all_of(source) -> torch.Tensor:
    return source.read_batch(torch.arange(len(source)))[0]["image"]


def test_a_guide(run, words, tmp_path):
    """Oracle: a run that is guided by itself draws as without guidance, to rounding; no guidance leaves none to do."""
    common = {"features": (words,), "folder": run, "num": NUM, "batch": 7, "out": tmp_path, "split": "held_out"}
    plain = measure_quality(EvaluateOptions(metrics=("fid",), guidance_scale=1.0, **common))[1]
    guided = measure_quality(EvaluateOptions(metrics=("fid",), guidance_scale=3.0, guide=(run, 0.9, 7), **common))[1]
    assert guided["figures"] == pytest.approx(plain["figures"], rel=1e-3)
    assert guided["sampling"]["guide"] == [str(run), "0.9", "7"]
    with pytest.raises(ConfigError, match="--guide .*holds no checkpoint of that step"):
        measure_quality(EvaluateOptions(metrics=("fid",), guidance_scale=3.0, guide=(run, None, 8), **common))
    with pytest.raises(ConfigError, match="--guide .*scale 1 is none"):
        measure_quality(EvaluateOptions(metrics=("fid",), guidance_scale=1.0, guide=(run, None, None), **common))


def test_clips_are_no_images(tmp_path, words, monkeypatch):
    """Oracle: a message that says which of both the network takes."""
    counting.register(monkeypatch)
    monkeypatch.setattr(module, "read_manifest", lambda checkpoint: {"step": 3})
    with pytest.raises(ConfigError, match=r"torchscript .*: it takes images, and these are clips"):
        measure_quality(
            EvaluateOptions(
                metrics=("fid",),
                features=(words,),
                folder=counting.folder(tmp_path / "run"),
                num=4,
                out=tmp_path / "out",
                reference=arrays(tmp_path / "n.npz", noise(9)),
            )
        )


def test_what_is_known_of_clips_is_checked_before_any_is_drawn(tmp_path, monkeypatch):
    """Oracle: a sampler that must not be called: networks that take no clips, captions that are none of the data's."""
    run = counting.folder(tmp_path / "run")
    counting.register(monkeypatch)
    monkeypatch.setattr(module, "read_manifest", lambda checkpoint: {"step": 3})
    monkeypatch.setattr(counting.Counting, "sample", lambda *_: pytest.fail("drawn"))
    for metrics, prompts, message in (
        (("retrieval",), None, r"emoji \(for the metrics retrieval\): it takes images, and"),
        (("accuracy",), ("a cat eating",), "'a cat eating' is no caption of the built-in"),
    ):
        with pytest.raises(ConfigError, match=message):
            measure_quality(EvaluateOptions(metrics=metrics, folder=run, num=4, prompts=prompts, out=tmp_path / "out"))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_steps": 5000}, "^--steps: 5000 is not between 1 and the"),
        ({"labels": (77,)}, "^--labels: .77. are not among"),
        ({"prompts": ("a hat",)}, "^--prompts: .* trains dit, which takes no texts; leave it out"),
        ({"guide": (Path("nowhere"), None, None)}, "^--guide nowhere: nowhere is not a run's folder"),
        ({"num": 1}, "^--num-samples 1: .* give two or more"),
        ({"metrics": ("fid", "pr"), "num": 4}, "pr looks for 5 neighbours .* among 4"),
        ({"metrics": ("fid", "dc"), "kept": 5}, "dc looks for 5 neighbours .* among 5"),
        ({"metrics": ("pr",), "reference": "few"}, "neighbours of each image among 5 of --reference .*few.npz"),
        ({"guidance_interval": (0.2, 5.0), "guidance_scale": 1.0}, "--guidance-interval changes nothing at"),
        ({"reference": Path("nowhere")}, "--reference nowhere: there is no such"),
        ({"folder": None, "images": "mine", "metrics": ("fid", "clip_score")}, "clip_score needs captions"),
        (
            {"folder": None, "images": "mine", "metrics": ("fid", "fvd")},
            r"i3d .*: it takes clips, and these are images",
        ),
    ],
)
def test_refused_before_the_reference_is_read(run, words, tmp_path, monkeypatch, options, message):
    """Oracle: the message; a reference that cannot be read any further than it must be to be opened."""

    def unread(*_):
        raise AssertionError("the reference was read")

    towers.clip(tmp_path / "clip")
    others = {"clip_score": f"clip:{tmp_path / 'clip'}", "fvd": f"i3d:{detector(tmp_path / 'i3d.pt', VideoDetector)}"}
    features = (words, *(others[name] for name in options.get("metrics", ()) if name in others))
    if options.get("reference") == "few":
        options = options | {"reference": arrays(tmp_path / "few.npz", noise(5))}
    if "images" in options:
        options = options | {"images": arrays(tmp_path / "mine.npz", noise(9))}
    monkeypatch.setattr(module.Compared, "collect_missing_statistics", unread)
    with pytest.raises(ConfigError, match=message):
        measure_quality(
            EvaluateOptions(
                **{
                    "metrics": ("fid",),
                    "features": features,
                    "folder": run,
                    "num": NUM,
                    "batch": 4,
                    "out": tmp_path / "out",
                    "reference": arrays(tmp_path / "r.npz", noise(30)),
                    **options,
                }
            )
        )


def test_embeddings_are_no_pictures(tmp_path):
    """Oracle: the message, before the data are read: a prior's pairs, which lie in no file here."""
    folder, _ = begun(tmp_path, "tiny-prior", "samples.ema=0.9")
    with pytest.raises(ConfigError, match="draws embeddings, and metrics are of pictures"):
        measure_quality(EvaluateOptions(metrics=("fd",), folder=folder, num=4))


def test_texts_by_the_slice(tmp_path):
    """Oracle: counting's pictures, which show the length of their text and the noise of their seed; texts in turn."""
    texts = ("a", "bb", "ccc")
    run = trained.read_recipe(counting.folder(tmp_path / "run", {"prompts": list(texts), "num_frames": 3}))
    system = systems.build(run.system, run.model)
    options = EvaluateOptions(metrics=("fvd",), folder=tmp_path / "run", num=2300, seed=7)
    batches = [*Drawn(options, run, system, system.networks()).iterate_batches(300)]
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
    by_images, by_both = (
        measure_quality(EvaluateOptions(metrics=("fid", "kid"), features=(words,), images=images, reference=path))[1][
            "figures"
        ]
        for path in (whole, mixed)
    )
    assert by_both["kid"] == by_images["kid"]
    (batch,) = open_image_set(images, "--images").iterate_batches(20)
    means = torch.nn.functional.adaptive_avg_pool2d(batch.images.double() / 255, (4, 4)).flatten(1)
    rows = torch.cat((means, means.square()), 1)
    assert by_both["fid"] == pytest.approx((rows.mean(0).square().sum() + rows.var(0).sum()).item(), rel=1e-5)
    np.savez(tmp_path / "c.npz", mu=np.zeros(96), sigma=np.zeros((96, 96)))
    with pytest.raises(ConfigError, match="holds no features for --metrics kid, which are taken by torchscript: give"):
        measure_quality(
            EvaluateOptions(metrics=("kid",), features=(words,), images=images, reference=tmp_path / "c.npz")
        )


@pytest.mark.parametrize(
    "words, message",
    [
        (["RUN", "--reference", "x"], "--reference is for metrics"),
        (["--images", "x", "RUN", "--metrics", "fid"], "name one of the two"),
        (["RUN", "--metrics", "fid", "--against", "x"], "--against B goes with --images A"),
        (["RUN", "--metrics", "fid", "--data", "x"], "--data is for bits/dim"),
        *(
            (
                ["--images", "x", "--against", "y", "--metrics", "fid", *option.split()],
                f"{name} changes nothing beside --i",
            )
            for option, name in (
                ("--guidance-scale 3", "--guidance-scale"),
                ("--labels 3", "--labels"),
                ("--raw", "--raw"),
                ("--num-samples 5", "--num-samples"),
                ("--ema 0.5", "--ema"),
                ("--split test", "--split"),
                ("--steps 3", "--steps"),
                ("--checkpoint 0", "--checkpoint"),
                ("--seed 0", "--seed"),
            )
        ),
        (
            ["--images", "x", "--against", "y", "--metrics", "fid", "--precision", "bf16"],
            "--precision bf16 is of a run",
        ),
        (
            ["RUN", "--metrics", "fid", "--reference", "x", "--split", "train"],
            "--split changes nothing beside --reference",
        ),
        (
            ["--images", "x", "--against", "y", "--metrics", "fid", "--write-reference", "z.npz"],
            "--against changes nothing beside --write-reference",
        ),
        *(
            (
                ["--images", str(ROOT / "docs/gallery"), option, "nowhere", "--metrics", "fd"],
                f"{option} nowhere: there is no",
            )
            for option in ("--against", "--reference")
        ),
        (["RUN", "--metrics", "beauty"], "known are fid, sfid, kid, is, pr, dc, "),
        (["RUN", "--metrics", "scene"], "scenes, too"),
        (
            ["RUN", "--metrics", "fid", "--eta", "1", "--write-reference", "z.npz"],
            "--eta changes nothing beside --write",
        ),
        (["RUN", "--metrics", "fid"], "fid needs a network"),
        ([], "name the folder of a run"),
        (["RUN", "--metrics", "fid", "--write-reference", "x.pt"], "name a file that ends in .npz"),
    ],
)
def test_command_line(words, message, run, monkeypatch, capsys):
    """Oracle: exit code 2 and a line that names the option."""
    code, _, error = here("evaluate.py", [str(run) if word == "RUN" else word for word in words], monkeypatch, capsys)
    assert code == 2 and message in error
