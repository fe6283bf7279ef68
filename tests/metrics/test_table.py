"""Metrics of sets: collected in batches, against numpy over all features at once; files of images and statistics."""

import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from transformers import Dinov2Config, Dinov2Model, VideoMAEConfig, VideoMAEModel

from dstrain.metrics import compared, distances, images, reference, table
from dstrain.metrics.features import open_feature_network
from dstrain.metrics.statistics import Statistics
from dstrain.recipe import ConfigError
from tests.metrics.oracles import Projected, VideoDetector, arrays, detector, measured, noise, two_sets
from tests.support import towers


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> tuple[Path, Path]:
    return two_sets(tmp_path_factory.mktemp("sets"))


def test_of_all_features_at_once(sets):
    """Oracle: numpy over all features: mean, covariance, the split and shuffled Inception Score, accuracy by class."""
    (x, logits), (y, _) = (Projected()(batch) for batch in (noise(103, 6, 5), noise(90, 6, 5).clamp(30, 220)))
    values = measured(*sets, 16)
    first, second = ((rows.double().mean(0), torch.from_numpy(np.cov(rows.double().numpy().T))) for rows in (x, y))
    expected = {
        "fid": distances.compute_frechet_distance(*first, *second),
        "kid": distances.compute_kid(x, y)[0],
        **distances.measure_manifold_overlap(x, y),
    }
    p = logits.double().softmax(1).numpy()[np.random.RandomState(2020).permutation(103)]
    scores = []
    for split in (p[103 * i // 10 : 103 * (i + 1) // 10] for i in range(10)):
        scores.append(np.exp((split * np.log(split / split.mean(0))).sum(1).mean()))
    expected["inception_score"] = np.mean(scores)
    right = logits.argmax(1).numpy() == np.arange(103) % 7
    expected |= {"accuracy": right.mean()}
    expected |= {f"accuracy/{name}": right[i::7].mean() for i, name in enumerate("abcdefg")}
    assert values == pytest.approx(expected, rel=1e-6)
    assert expected["precision"] > 0 and 0 < right.mean() < 1


def test_inception_score_of_torch_fidelity(sets):
    """Oracle: torch-fidelity's function on the same logits."""
    theirs = pytest.importorskip("torch_fidelity.metric_isc")
    expected = theirs.isc_features_to_metric(Projected()(noise(103, 6, 5))[1])
    assert measured(*sets, 16)["inception_score"] == pytest.approx(expected["inception_score_mean"], rel=1e-4)


def test_folder_zip_and_npz(tmp_path):
    """Oracle: the pixels that were written, by name, each file in its own size."""
    pixels, files = noise(5, 6, 5), tmp_path / "files" / "deep"
    files.mkdir(parents=True)
    for number, image in enumerate(pixels):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(files / f"{number}.png")
    Image.fromarray(np.full((9, 4), 7, np.uint8)).save(files / "9.png")
    with zipfile.ZipFile(tmp_path / "files.zip", "w") as archive:
        for file in files.iterdir():
            archive.write(file, file.name)
    for path in (tmp_path / "files", tmp_path / "files.zip", arrays(tmp_path / "a.npz", pixels)):
        batches = [*images.open_image_set(path, "--images").iterate_batches(4)]
        read = {number: image for batch in batches for number, image in zip(batch.numbers.tolist(), batch.images)}
        assert all(torch.equal(read[number], image) for number, image in enumerate(pixels))
        assert len(read) == (5 if path.suffix == ".npz" else 6)
    for name, content in (("x.npz", b"no"), ("empty", None), ("x.zip", b"no"), ("x.txt", b"no")):
        (tmp_path / name).write_bytes(content) if content else (tmp_path / name).mkdir()
        with pytest.raises(ConfigError, match=f"--against .*{name}"):
            images.open_image_set(tmp_path / name, "--against")
    with pytest.raises(ConfigError, match="^--against .*empty holds no images"):  # and nothing before it
        images.open_image_set(tmp_path / "empty", "--against")
    for others, message in (
        ({"arr_1": np.arange(4)}, "arr_1 has 4 entries, and arr_0 5 images"),
        ({"arr_1": np.arange(5) / 2}, "arr_1 is float64, and labels are whole numbers"),
        ({"prompts": np.array(["a"])}, "prompts has 1 entries"),
    ):
        with pytest.raises(ConfigError, match=f"--images .*b.npz.*{message}"):
            images.open_image_set(arrays(tmp_path / "b.npz", pixels, **others), "--images")
    for unfit, message in (
        (pixels[:1], "holds 1 image, and metrics compare sets"),
        (pixels[:, :, :0], "cannot be read .*arr_0 is uint8 .5, 0, 5, 3."),
    ):
        with pytest.raises(ConfigError, match=f"--against .*c.npz {message}"):
            images.open_image_set(arrays(tmp_path / "c.npz", unfit), "--against")


def test_sets_that_are_none(tmp_path):
    """Oracle: the line that names what is there: nothing, a run, pixels in another order, and pixels that a flipped bit
    of the disk has changed, which zip's checksum tells.
    """
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.yaml").write_text("name: x")
    np.savez(tmp_path / "turned.npz", arr_0=np.asfortranarray(noise(5).permute(0, 2, 3, 1).numpy()))
    for name, message in (
        ("nowhere", "there is no such file or folder"),
        ("run", "is a run's folder"),
        ("turned.npz", "cannot be read .*Fortran's order"),
    ):
        with pytest.raises(ConfigError, match=f"--images .*{name}:? {message}"):
            images.open_image_set(tmp_path / name, "--images")
    content = bytearray(arrays(tmp_path / "flipped.npz", noise(5)).read_bytes())
    content[600] ^= 1
    (tmp_path / "flipped.npz").write_bytes(content)
    with pytest.raises(ConfigError, match="--images .*flipped.npz cannot be read .*CRC"):
        [*images.open_image_set(tmp_path / "flipped.npz", "--images").iterate_batches(5)]


@pytest.mark.parametrize(
    "content, message",
    [
        (
            {"mu": np.zeros(24), "sigma": np.ones(24)},
            r"sigma is float64 of shape \(24,\), and numbers of shape \(D, D\)",
        ),
        ({"mu": np.zeros(24), "sigma": np.ones((2, 24))}, r"sigma is float64 of shape \(2, 24\)"),
        ({"mu": np.float64(3), "sigma": np.eye(24)}, r"mu is float64 of shape \(\), and numbers of shape \(D,\)"),
        ({"mu": np.array("x" * 24), "sigma": np.eye(24)}, "mu is <U24"),
        ({"feats": np.zeros(24)}, "kept or feats is"),
        ({"mu": np.zeros(24), "sigma": -np.eye(24)}, "sigma is no covariance"),
        ({"mu": np.zeros(24), "sigma": np.tri(24)}, "sigma is no covariance"),
        ({"mu": np.full(24, np.nan), "sigma": np.eye(24)}, "mu holds values that are not finite"),
        ({"mu": np.zeros(24), "sigma": np.full((24, 24), np.inf)}, "sigma holds values that are not finite"),
    ],
)
def test_statistics_of_other_shapes(tmp_path, content, message):
    """Oracle: the line that names the file, the array and what it should be."""
    np.savez(tmp_path / "f.npz", **content)
    with pytest.raises(ConfigError, match=f"--reference .*f.npz: {message}"):
        reference.read_reference_statistics(tmp_path / "f.npz", [Projected()], torch.device("cpu"))


def test_files_of_statistics(tmp_path):
    """Oracle: the arrays that were written, under ADM's, clean-fid's, EDM2's and our own names."""
    network, device = Projected(), torch.device("cpu")
    rows = noise(50, 6, 4).flatten(1)[:, :24].double().numpy()
    mu, sigma = rows.mean(0), np.cov(rows.T)
    np.savez(tmp_path / "adm.npz", mu=mu, sigma=sigma, mu_s=mu, sigma_s=sigma, arr_0=np.zeros((2, 4, 4, 3), np.uint8))
    np.savez(tmp_path / "clean.npz", mu=mu, sigma=sigma)
    np.savez(tmp_path / "kid.npz", feats=rows)
    statistics = {"fid": {"mu": mu, "sigma": sigma}, "fd_dinov2": {"mu": mu, "sigma": sigma}, "num_images": 50}
    (tmp_path / "edm2.pkl").write_bytes(pickle.dumps(statistics))
    statistics = reference.read_reference_statistics(tmp_path / "adm.npz", [network], device)
    statistics["inception"].kept = torch.from_numpy(rows).float()
    statistics["inception"].count, statistics["inception"].fingerprint = 50, "seeded"
    reference.write_reference_statistics(tmp_path / "ours.npz", statistics)
    for name in ("adm.npz", "clean.npz", "edm2.pkl", "ours.npz"):
        found = reference.read_reference_statistics(tmp_path / name, [network], device)["inception"]
        assert np.array_equal(found.mean, mu) and np.array_equal(found.covariance, sigma)
    for name in ("kid.npz", "ours.npz"):
        found = reference.read_reference_statistics(tmp_path / name, [network], device)["inception"]
        assert np.array_equal(found.kept, rows.astype(np.float32))
    with np.load(tmp_path / "ours.npz") as file:  # other tools know these names
        assert np.array_equal(file["mu"], mu) and np.array_equal(file["sigma"], sigma)
    assert [reference.can_hold_images(tmp_path / name) for name in ("adm.npz", "clean.npz")] == [True, False]
    network.fingerprint = "other"
    with pytest.raises(ConfigError, match="other weights"):
        reference.read_reference_statistics(tmp_path / "ours.npz", [network], device)
    network.size = 7
    with pytest.raises(ConfigError, match="24 features, and inception has 7"):
        reference.read_reference_statistics(tmp_path / "adm.npz", [network], device)
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Path("x")))
    with pytest.raises(ConfigError, match="only arrays are read"):
        reference.read_reference_statistics(tmp_path / "evil.pkl", [network], device)


def test_statistics_that_a_file_lacks_are_taken_of_its_images(tmp_path):
    """Oracle: the features in the file, and mean and covariance of its images as computed from all at once."""
    network, pixels = Projected(), noise(30, 6, 3)
    feats = noise(20, 6, 4).flatten(1)[:, :24].numpy().astype(np.float64)
    path = arrays(tmp_path / "feats.npz", pixels, feats=feats)
    opened = compared.open_reference(path, {"fid": network, "kid": network}, 20)
    rows = network(pixels)[0].double()
    collected = Statistics(rows.mean(0), torch.cov(rows.T), len(rows))
    found = opened.collect_missing_statistics(lambda images, networks: {"inception": collected})["inception"]
    assert list(opened.networks) == ["fid"] and torch.equal(found.mean, rows.mean(0))
    assert np.array_equal(found.kept, feats.astype(np.float32))


def test_towers(tmp_path):
    """Oracle: transformers' models on pixels that were resized and normalized by hand; cosines of CLIP by hand."""
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    dino, video = Dinov2Model(Dinov2Config(**small)).eval(), VideoMAEModel(VideoMAEConfig(**small, num_frames=4)).eval()
    dino.save_pretrained(tmp_path / "dino")
    video.save_pretrained(tmp_path / "video")
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    batch = noise(2, 30, 30)
    pixels = (F.interpolate(batch.float(), (224, 224), mode="bicubic", antialias=True) / 255 - mean) / std
    with torch.no_grad():
        expected = dino(pixel_values=pixels).pooler_output
        moving = video(pixel_values=pixels[:, None].expand(-1, 4, -1, -1, -1)).last_hidden_state.mean(1)
    torch.testing.assert_close(open_feature_network(f"dinov2:{tmp_path / 'dino'}")(batch)[0], expected)
    clips = batch[:, None].expand(-1, 9, -1, -1, -1)
    torch.testing.assert_close(open_feature_network(f"videomae:{tmp_path / 'video'}")(clips)[0], moving)
    with pytest.raises(
        ConfigError, match=r"^--features dinov2:\S+: the folder holds a model of type videomae; give one of dinov2$"
    ):
        open_feature_network(f"dinov2:{tmp_path / 'video'}")

    towers.clip(tmp_path / "clip")
    networks = table.open_metric_networks(("clip_score", "fd_clip"), [f"clip:{tmp_path / 'clip'}"])
    clip, captions = networks["clip_score"], ["a red cat", "the blue dog on the moon"]
    path = arrays(tmp_path / "c.npz", batch, prompts=np.array(captions))
    statistics = table.collect_statistics(images.open_image_set(path, "--images"), networks, 2)
    cosine = torch.cosine_similarity(clip(batch)[0], clip.embed_texts(captions)).mean().item()
    assert table.compute_metrics(networks, statistics, statistics)["clip_score"][0] == pytest.approx(
        max(100 * cosine, 0)
    )
    apart = table.collect_statistics(images.open_image_set(path, "--images"), networks, 2, left_out=("*MOON",))
    figures = table.compute_metrics(networks, apart, statistics)
    for name, row in (("clip_score", 0), ("clip_score_left_out", 1)):
        cosine = torch.cosine_similarity(clip(batch)[0], clip.embed_texts(captions))[row].item()
        assert figures[name][0] == pytest.approx(max(100 * cosine, 0), abs=1e-5)
    alone = table.collect_statistics(images.open_image_set(path, "--images"), networks, 2, left_out=("*a*", "the *"))
    assert {*table.compute_metrics(networks, alone, statistics)} == {"clip_score_left_out", "fd_clip"}
    with pytest.raises(ConfigError, match="clip_score needs captions"):
        table.collect_statistics(images.open_image_set(arrays(tmp_path / "d.npz", batch), "--images"), networks, 2)


def test_networks_are_chosen(tmp_path):
    """Oracle: the first that serves; what is missing, unused or unknown is refused with the remedy."""
    words = f"torchscript:{detector(tmp_path / 'detector.pt')}"
    networks = table.open_metric_networks(("fid", "pr"), [words])
    assert networks["fid"] is networks["pr"] and networks["fid"].size == 96
    for metrics, paths, message in (
        (("is",), (words,), "is needs a network: --features inception:PATH"),
        (("fid",), (words, "clip:x"), "--features clip:x: no metric of --metrics fid"),
        (("fix",), (), "known are fid"),
        (("fd_dinov2",), (), "hf download"),
    ):
        with pytest.raises(ConfigError, match=message):
            table.open_metric_networks(metrics, paths)


def test_torchscript_features(tmp_path):
    """Oracle: means of the quarters, by numpy; grey counts as three equal channels."""
    network = open_feature_network(f"torchscript:{detector(tmp_path / 'detector.pt')}")
    batch = noise(2, 8, 8, channels=1)
    means = batch[:, 0].double().numpy().reshape(2, 4, 2, 4, 2).mean((2, 4)).reshape(2, 16) / 255
    assert np.abs(network(batch)[0][:, :48].numpy() - np.tile(means, 3)).max() < 1e-6
    buffer = io.BytesIO()
    torch.save({}, buffer)
    (tmp_path / "weights.pt").write_bytes(buffer.getvalue())
    with pytest.raises(ConfigError, match="no TorchScript file"):
        open_feature_network(f"torchscript:{tmp_path / 'weights.pt'}")


def test_fvd_of_clips(tmp_path):
    """Oracle: means of channels and frames, and the Frechet distance of their moments, by numpy."""
    words = f"i3d:{detector(tmp_path / 'i3d.pt', VideoDetector)}"
    clips = noise(2 * 14 * 16, 6, 5).view(2, 14, 16, 3, 6, 5)
    networks = table.open_metric_networks(("fvd",), [words])
    paths = [arrays(tmp_path / f"{number}.npz", part) for number, part in enumerate((clips[0], clips[1] // 2))]
    sides = [table.collect_statistics(images.open_image_set(path, "--images"), networks, 4) for path in paths]
    rows = [
        np.concatenate((part.mean((1, 3, 4)), part.mean((2, 3, 4))), 1)
        for part in (clips[0].double().numpy(), (clips[1] // 2).double().numpy())
    ]
    first, second = ((torch.from_numpy(part.mean(0)), torch.from_numpy(np.cov(part.T))) for part in rows)
    assert table.compute_metrics(networks, *sides)["fvd"][0] == pytest.approx(
        distances.compute_frechet_distance(*first, *second), rel=1e-5
    )
    with pytest.raises(ConfigError, match="i3d .*: it takes clips, and these are images"):
        table.collect_statistics(images.open_image_set(arrays(tmp_path / "x.npz", noise(3)), "--images"), networks, 4)


def test_labels_are_needed(tmp_path):
    """Oracle: accuracy without labels is refused with the first batch, and so is a label that is no class."""
    networks = {"accuracy": Projected()}
    for name, others, message in (
        ("x", {}, "accuracy needs labels"),
        ("y", {"arr_1": np.arange(9) % 8}, "a label is 7, and inception knows 7 classes"),
        ("z", {"arr_1": np.arange(9) % 8 - 1}, "a label is -1, and inception knows 7"),
    ):
        path = arrays(tmp_path / f"{name}.npz", noise(9), **others)
        with pytest.raises(ConfigError, match=message):
            table.collect_statistics(images.open_image_set(path, "--images"), networks, 9)
