"""Latents that others have cached, taken over: real files of their layouts, and what does not fit."""

import ast
import gc
import io
import json
import pickle
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dstrain.commands.options.convert import ConvertOptions
from dstrain.data.cached.latents import Latents
from dstrain.data.source import BadSample
from dstrain.encoders.autoencoder import Autoencoder
from dstrain.recipe import ConfigError
from launch.convert.latents import _read_array, convert_latents, open_foreign
from tests.support import first_stage

NUMBER, SHAPE = 23, (3, 4, 4)
LABELS = [(7 * i) % 5 for i in range(NUMBER)]


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    return first_stage.save(tmp_path_factory.mktemp("first_stage") / "vae")


def drawn(seed, count=1):
    return np.random.default_rng(seed).standard_normal((NUMBER, count, *SHAPE)).astype(np.float32)


def fast_dit(root: Path) -> np.ndarray:
    """As fast-DiT's extract_features.py saves them: times 0.18215, numbered, with a batch axis of one."""
    codes = drawn(0)
    for kind in ("features", "labels"):
        (root / f"imagenet256_{kind}").mkdir(parents=True)
    for i in range(NUMBER):
        np.save(root / "imagenet256_features" / f"{i}.npy", codes[i] * np.float32(0.18215))
        np.save(root / "imagenet256_labels" / f"{i}.npy", np.array([LABELS[i]]))
    return codes[:, None]  # (n, flips, moments, ...)


def lightning(root: Path) -> np.ndarray:
    """As LightningDiT's extract_features.py saves them, by two ranks, with the statistics beside."""
    codes = drawn(1, 2)
    root.mkdir(parents=True)
    for rank, rows in enumerate((slice(0, 10), slice(10, NUMBER))):
        save_file(
            {
                "latents": torch.from_numpy(codes[rows, 0].copy()),
                "labels": torch.tensor(LABELS[rows]),
                "latents_flip": torch.from_numpy(codes[rows, 1].copy()),
            },
            root / f"latents_rank{rank:02d}_shard000.safetensors",
            {"dtype": "torch.float32"},
        )
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in ((0.5, -1.0, 2.0), (0.5, 1.0, 4.0)))
    torch.save({"mean": mean, "std": std}, root / "latents_stats.pt")
    return codes[:, :, None]


def edm2(root: Path) -> np.ndarray:
    """As EDM2's dataset_tool.py encode saves them into a folder, which REPA calls vae-sd."""
    codes = np.abs(drawn(2, 2))
    names = [f"{i // 10:05d}/img-mean-std-{i:08d}.npy" for i in range(NUMBER)]
    for i, name in enumerate(names):
        (root / "vae-sd" / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(root / "vae-sd" / name, codes[i].reshape(6, 4, 4))
    entries = [[name, label] for name, label in zip(names, LABELS)]
    (root / "vae-sd" / "dataset.json").write_text(json.dumps({"labels": entries[::-1]}))
    return codes[:, None]


def edm2_zip(root: Path) -> np.ndarray:
    """The same as its dataset_tool.py writes it into a zip file: stored members, dataset.json the last one."""
    codes = edm2(root.with_suffix(".folder"))
    files = sorted(path for path in root.with_suffix(".folder").rglob("*") if path.is_file())
    with zipfile.ZipFile(root, "w") as archive:
        for path in sorted(files, key=lambda path: path.suffix == ".json"):
            archive.write(path, path.relative_to(root.with_suffix(".folder") / "vae-sd"))
    return codes


def options(root, vae, **changes):
    return ConvertOptions(
        "latents",
        **{
            "path": root / "theirs",
            "out": root / "out",
            "first_stage": str(vae),
            "shard_size": 9,
            "dtype": "float32",
        }
        | changes,
    )


@pytest.mark.parametrize("write", [fast_dit, lightning, edm2, edm2_zip])
def test_taken_over(tmp_path, vae, write):
    """Oracle: the plain arrays; the first stage's own fingerprint and size; labels counted by hand."""
    name = "theirs.zip" if write is edm2_zip else "theirs"
    codes, order = write(tmp_path / name), options(tmp_path, vae, path=tmp_path / name)
    index = convert_latents(order)
    source, every = Latents(tmp_path / "out"), torch.arange(NUMBER)
    encoding = index["encoding"]
    assert encoding["first_stage"] == Autoencoder(str(vae)).compute_fingerprint() and encoding["image_size"] == 16
    assert encoding["flips"] == codes.shape[1] and encoding["shape"] == list(SHAPE) and encoding["channels"] == 1
    for side in range(codes.shape[1]):
        batch = source.read_codes(every, torch.full((NUMBER,), bool(side)))
        np.testing.assert_allclose(batch["latent_mean"], codes[:, side, 0], rtol=3e-7)
        deviation = codes[:, side, 1] if codes.shape[2] == 2 else np.zeros_like(codes[:, side, 0])
        assert np.array_equal(batch["latent_std"], deviation) and batch["label"].tolist() == LABELS
    assert source.classes == ("0", "1", "2", "3", "4") and source.count_samples_by_class().tolist() == [5, 4, 5, 4, 5]
    wide = codes.astype(np.float64)
    variance = wide[:, :, 0].var() + ((wide[:, :, 1] ** 2).mean() if codes.shape[2] == 2 else 0.0)
    assert index["statistics"]["std"] == pytest.approx(np.sqrt(variance), rel=1e-6)
    assert convert_latents(order) == index and len(list((tmp_path / "out").glob("shard*"))) == 3


def test_normalized_by_channel(tmp_path, vae):
    """Oracle: (latents - mean) / std by numpy, as LightningDiT's data set; a fingerprint of its own, and no pickle."""
    codes = lightning(tmp_path / "theirs")
    index = convert_latents(options(tmp_path, vae, normalize=True, flip=False))
    batch = Latents(tmp_path / "out").read_codes(torch.arange(NUMBER))
    mean, std = (np.reshape(values, (3, 1, 1)) for values in ((0.5, -1.0, 2.0), (0.5, 1.0, 4.0)))
    np.testing.assert_allclose(batch["latent_mean"], (codes[:, 0, 0] - mean) / std, rtol=1e-5, atol=1e-6)
    assert index["encoding"]["flips"] == 1 and ", normalized by " in index["encoding"]["first_stage"]

    class Hostile:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    path = tmp_path / "theirs" / "latents_stats.pt"
    for content, words in (
        (pickle.dumps(Hostile(), protocol=2), "holds no mean and std of 3 channels"),
        (None, "is missing"),
    ):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            convert_latents(options(tmp_path, vae, normalize=True, out=tmp_path / "none"))
    torch.save({"mean": Hostile(), "std": torch.ones(1, 3, 1, 1)}, path)
    with pytest.raises(ConfigError, match="holds no mean and std"):
        convert_latents(options(tmp_path, vae, normalize=True, out=tmp_path / "none"))
    assert not (tmp_path / "executed").exists() and not (tmp_path / "none").exists()


def test_an_encoder_that_is_not_at_hand(tmp_path):
    """Oracle: the contract: its name is the fingerprint, and the images' size must be told."""
    lightning(tmp_path / "theirs")
    with pytest.raises(ConfigError, match="give --image-size, too"):
        convert_latents(options(tmp_path, "name:vavae-f16d32"))
    index = convert_latents(options(tmp_path, "name:vavae-f16d32", image_size=64, latent_scale=2.0))
    assert index["encoding"]["first_stage"] == "vavae-f16d32" and index["encoding"]["image_size"] == 64
    assert torch.equal(Latents(tmp_path / "out")[3]["latent_mean"], torch.from_numpy(drawn(1, 2)[3, 0] / 2))


def test_what_cannot_be_taken_over(tmp_path, vae):
    """Oracle: the contract: one line that says what is missing, before anything is written."""
    for name, write in (("fast", fast_dit), ("lightning", lightning), ("edm2", edm2)):
        write(tmp_path / name / "theirs")
    wide = first_stage.save(tmp_path / "wide", latent_channels=4)
    fast, shards, listed = (tmp_path / name for name in ("fast", "lightning", "edm2"))
    for root, changes, words in (
        (fast, {"first_stage": str(wide)}, "makes latents of 4 channels, those in .* have 3"),
        (fast, {"image_size": 20}, "stand for 16 pixels"),
        (fast, {"latent_scale": 0.0}, "multiplied by a number above 0"),
        (fast, {"normalize": True}, "latents_stats.pt is missing"),
        (fast, {"path": tmp_path}, "holds no latents of a known layout"),
    ):
        with pytest.raises(ConfigError, match=words):
            convert_latents(options(root, vae, **changes))
    (fast / "theirs" / "imagenet256_labels" / "4.npy").unlink()
    with pytest.raises(ConfigError, match="23 files in imagenet256_features and 22 in imagenet256_labels"):
        convert_latents(options(fast, vae))
    file = shards / "theirs" / "latents_rank01_shard000.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="latents_rank01_shard000.safetensors is no whole safetensors file"):
        convert_latents(options(shards, vae))
    path = listed / "theirs" / "vae-sd" / "dataset.json"
    for text, words in (
        ('{"labels": null}', "lists no files with labels"),
        ("{", "lists no files with labels"),
        ('{"labels": [["../../x.npy", 1]]}', "no .npy below this folder"),
        ('{"labels": [["00000/img00000000.png", 1]]}', "give it as data.path where these are images"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            convert_latents(options(listed, vae))
    archive = tmp_path / "theirs.zip"
    for members, words in (
        ({"a.npy": b"", "dataset.json": b'{"labels": [["b.npy", 1]]}'}, "does not hold, b.npy"),
        ({"a.npy": b""}, "lists no files with labels"),
        (None, "it is no zip file"),
    ):
        with zipfile.ZipFile(archive, "w") as file:
            for name, content in (members or {}).items():
                file.writestr(name, content)
        if members is None:
            archive.write_bytes(b"none")
        with pytest.raises(ConfigError, match=words):
            convert_latents(options(listed, vae, path=archive))
    assert not any((root / "out").exists() for root in (fast, shards, listed))


def test_a_zip_of_latents_believes_no_header(tmp_path):
    """Oracle: the rule of bad_files.py: a header that promises a terabyte, or Python objects, is a bad sample."""
    headers = {
        "0.npy": {"descr": "<f4", "fortran_order": False, "shape": (2, 4, 4)},
        "1.npy": {"descr": "<f4", "fortran_order": False, "shape": (2, 1 << 19, 1 << 19)},
        "2.npy": {"descr": "|O", "fortran_order": False, "shape": (2, 4, 4)},
    }
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name, header in headers.items():
            content = io.BytesIO()
            np.lib.format.write_array_header_1_0(content, header)
            archive.writestr(name, content.getvalue() + bytes(128))
        archive.writestr("dataset.json", json.dumps({"labels": [[name, 3] for name in headers]}))
    source = open_foreign(tmp_path / "a.zip")
    assert source[0]["codes"].shape == (1, 2, 1, 4, 4) and source[0]["label"] == 3
    for index in (1, 2):
        with pytest.raises(BadSample, match=f"{index}.npy"):
            source[index]


def test_damaged_and_hostile_files(tmp_path, vae):
    """Oracle: the rule of bad_files.py; a header that promises a terabyte, a pickle and a short
    file are read by none.
    """
    codes = fast_dit(tmp_path / "theirs")
    features = tmp_path / "theirs" / "imagenet256_features"
    intact = (features / "3.npy").read_bytes()
    (features / "3.npy").write_bytes(intact[:-4])
    (features / "8.npy").write_bytes(intact.replace(b"(1, 3, 4, 4)", b"(1, 3, 9999, 9999999)".ljust(12))[:200])
    np.save(features / "12.npy", np.array([[[[print]]]], dtype=object), allow_pickle=True)
    index = convert_latents(options(tmp_path, vae, max_bad_fraction=0.2))
    assert [name for name, _ in index["bad_files"]] == [f"imagenet256_features/{i}.npy" for i in (12, 3, 8)]
    batch = Latents(tmp_path / "out").read_codes(torch.tensor([3, 8, 12, 13]))
    np.testing.assert_allclose(batch["latent_mean"], codes[[4, 9, 13, 13], 0, 0], rtol=3e-7)
    np.save(features / "0.npy", codes[1, 0])
    assert open_foreign(tmp_path / "theirs").compute_full_fingerprint() != index["encoding"]["data"]


def test_two_threads_that_parse_headers(tmp_path):
    """Oracle: the array. Where garbage is collected while CPython parses, another thread's parsing spoils the first:
    SystemError, AST constructor recursion depth mismatch (CPython's issue 106905). The file is whole, and read again.
    """
    parsed = []

    class Garbage:
        def __init__(self):
            self.circle = self

        def __del__(self):
            if parsed:
                return
            if sys._getframe(1).f_code is not ast.parse.__code__:
                Garbage()
                return
            parsed.append(True)
            thread = threading.Thread(target=ast.literal_eval, args=("1",))
            thread.start()
            thread.join()

    np.save(tmp_path / "a.npy", np.arange(4))
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        Garbage()
        assert _read_array(tmp_path, "a.npy", 1).tolist() == [0, 1, 2, 3]
    finally:
        gc.set_threshold(*thresholds)
    assert parsed
