"""Pictures of others, converted once: the samples that their files hold, and nothing of a pickle executed."""

import pickle
import re
import shlex
from pathlib import Path

import lmdb
import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from dstrain.commands import convert as convert_verb
from dstrain.commands.convert import ConvertOptions, convert_data
from dstrain.data.formats.packed import PACKING
from dstrain.data.open import open_sources
from dstrain.data.sources.images import open_images
from dstrain.recipe import ConfigError, Data
from launch.convert.cifar import _as_array, _unpickle
from tests.data.formats.test_containers import CLASSES, EACH, assert_equal, files_of, plain  # noqa: F401
from tests.support.foreign import cifar, environment, of_python_2, write_idx
from tests.support.launch import here
from tests.support.pictures import folder


def converted(kind: str, path: Path, out: Path, **more) -> Path:
    convert_data(ConvertOptions(kind, path, out, **more))
    return out


def command_of(**entries) -> list[str]:
    """The command that a refusal of data names, behind `dstrain convert`."""
    with pytest.raises(ConfigError) as caught:
        open_sources(Data(image_size=16, **entries))
    return shlex.split(re.search(r"`dstrain convert (.*?)`", str(caught.value)).group(1))


@pytest.mark.parametrize("hundred", [False, True])
def test_cifar(tmp_path, hundred, monkeypatch):
    """Oracle: torchvision's own reader of the same files (its check of the download's MD5 apart); the binary files."""
    name, kind = ("cifar-100-python", "cifar100") if hundred else ("cifar-10-batches-py", "cifar10")
    data = tmp_path / "data"
    cifar(data / name, hundred, np.random.default_rng(1))
    original = torchvision.datasets.CIFAR100 if hundred else torchvision.datasets.CIFAR10
    monkeypatch.setattr(original, "_check_integrity", lambda self: True)
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda *_: True)
    binary = tmp_path / "bin" / ("cifar-100-binary" if hundred else "cifar-10-batches-bin")
    binary.mkdir(parents=True)
    for path in sorted((data / name).glob("*.bin")):
        path.rename(binary / path.name)
    names = [f"class_{i}\n" for i in range(100 if hundred else 10)]
    (binary / ("fine_label_names.txt" if hundred else "batches.meta.txt")).write_text("".join(names))
    for number, path in enumerate((data, data / name, binary.parent, binary)):
        inner = (data / name, binary)[number // 2]
        assert command_of(path=str(path)) == [kind, str(inner), "--out", f"{kind}-shards"]
        out = converted(kind, path, tmp_path / "out" / str(number))
        train, unseen = open_sources(Data(path=str(out), image_size=32))
        for source, of_train in ((train, True), (unseen, False)):
            expected = original(str(data), train=of_train)
            assert len(source) == len(expected)
            for i in (0, 7, len(expected) - 1):
                image, label = expected[i]
                assert torch.equal(source[i]["image"], torch.from_numpy(np.array(image)).permute(2, 0, 1))
                assert source[i]["label"] == label
            assert [text.replace("_", " ") for text in source.classes] == expected.classes
    own = open_sources(Data(path=str(out), image_size=32, held_out=0.5))[1]
    assert 0 < len(own) < len(train) and own.name_sample(0).startswith(("data_batch", "train"))
    test = "test" if hundred else "test_batch"
    assert command_of(path=str(data / name / test)) == [kind, str(data / name), "--out", f"{kind}-shards"]
    with pytest.raises(ConfigError, match=f"{'train' if hundred else 'train and held_out in it'}.*are splits"):
        open_images(out, 32, split="all")
    with pytest.raises(ConfigError, match="is no cifar1"):
        converted("cifar10" if hundred else "cifar100", data / name, tmp_path / "none")
    (data / name / ("train" if hundred else "data_batch_1")).write_bytes(
        pickle.dumps({"data": Path("x"), "labels": [0], "fine_labels": [0]})
    )
    with pytest.raises(ConfigError, match=r"cannot be read as a file of CIFAR \(.*\): fetch it anew"):
        converted(kind, data / name, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_pickles_of_python_3(protocol):
    """Oracle: pickle itself. Protocol 2 writes the bytes as a text that stands for them."""
    data = np.arange(64, dtype=np.uint8).reshape(4, 16)
    batch = _unpickle(pickle.dumps({"data": data, "labels": [1, 2, 3, 2**40], "more": (None, True, 1.5)}, protocol))
    assert batch["labels"] == [1, 2, 3, 2**40] and batch["more"] == (None, True, 1.5)
    np.testing.assert_array_equal(_as_array(batch["data"]), data)
    assert _unpickle(of_python_2({"label_names": ["a"]})) == {"label_names": [b"a"]}


@pytest.mark.parametrize(
    "below, ending",
    [("MNIST/raw", ""), ("EMNIST/raw", ""), ("FashionMNIST/raw", ".gz"), ("KMNIST/raw", ""), ("", ".gz")],
)
def test_mnist(tmp_path, below, ending):
    """Oracle: torchvision's reader of the same files, and the arrays that were written."""
    prefix = "emnist-letters-" if below == "EMNIST/raw" else ""
    data = tmp_path / "data"
    expected = write_idx(data / below, prefix, ending)
    out = f"{below.removesuffix('/raw') or 'data'}-shards"
    assert command_of(path=str(data)) == ["mnist", str(data / below), "--out", out]
    out = converted("mnist", data, tmp_path / "out")
    for source, (images, labels) in zip(
        open_sources(Data(path=str(out), image_size=20, channels=1)), expected.values(), strict=True
    ):
        assert len(source) == len(images) and source.labels.tolist() == labels.tolist()
        assert source.classes == tuple("0123456789")
        for i in range(len(source)):
            np.testing.assert_array_equal(source[i]["image"][0], images[i, 4:24])
    if below == "MNIST/raw":
        np.testing.assert_array_equal(torchvision.datasets.MNIST(str(data)).data, expected["train"][0])
    test = next((data / below).glob(f"{prefix}t*0k-images*" if not prefix else f"{prefix}test-images*"))
    (tmp_path / "names").write_text("".join(f"class {number}\n" for number in range(10)))
    alone = converted("mnist", test, tmp_path / "alone", class_list=str(tmp_path / "names"))
    source, none = open_sources(Data(path=str(alone), image_size=20, channels=1))
    assert len(source) == 12 and none is None and source.classes[9] == "class 9"
    if prefix:
        write_idx(data / "two" / "raw", "emnist-digits-")
        for path in (data / "two" / "raw").iterdir():
            path.rename(data / below / path.name)
        with pytest.raises(ConfigError, match="several sets, EMNIST/raw/emnist-digits, EMNIST/raw/emnist-letters"):
            converted("mnist", data, tmp_path / "none")


def test_lsun(tmp_path, plain):
    """Oracle: the folder, of which each class became an environment by the lmdb package; LSUN's names of splits."""
    root = tmp_path / "lsun"
    root.mkdir()
    for name in sorted(path.name for path in plain.iterdir()):
        values = {file.name.encode(): file.read_bytes() for file in (plain / name).iterdir()}
        environment(root / f"{name}_train_lmdb", values | {b"length": b"4"})
        environment(root / f"{name}_val_lmdb", dict(list(values.items())[:1]))
    environment(root / "test_lmdb", values)
    for file in root.rglob("lock.mdb"):
        file.unlink()
    assert command_of(path=str(root)) == ["lsun", str(root), "--out", "lsun-shards"]
    out = converted("lsun", root, tmp_path / "out")
    assert_equal(out, plain)
    train, unseen = open_sources(Data(path=str(out), image_size=16))
    assert len(unseen) == CLASSES and unseen.classes == train.classes and sorted(unseen.labels) == [0, 1, 2]
    one, none = open_sources(Data(path=str(converted("lsun", root / "a_train_lmdb", tmp_path / "one")), image_size=16))
    assert len(one) == EACH and one.classes == () and none is None
    assert not list(root.rglob("lock.mdb"))
    (tmp_path / "list").write_text("c d\nnone\na\na-b\n")
    listed = open_sources(
        Data(path=str(converted("lsun", root, tmp_path / "listed", class_list=str(tmp_path / "list"))), image_size=16)
    )[0]
    assert listed.classes == ("c d", "none", "a", "a-b") and listed.count_samples_by_class().tolist() == [4, 0, 4, 4]
    with (
        lmdb.open(str(tmp_path / "a.lmdb"), map_size=1 << 26, subdir=False, lock=False) as env,
        env.begin(write=True) as transaction,
    ):
        for file in (plain / "a").iterdir():
            transaction.put(file.name.encode(), file.read_bytes())
    assert command_of(path=str(tmp_path / "a.lmdb"))[0] == "lsun"
    alone = open_images(converted("lsun", tmp_path / "a.lmdb", tmp_path / "alone"), 16)
    assert len(alone) == EACH and all(torch.equal(alone[i]["image"], one[i]["image"]) for i in range(EACH))
    (root / "a-b_val_lmdb" / "data.mdb").unlink()  # a class without images that are held out
    unseen = open_sources(Data(path=str(converted("lsun", root, tmp_path / "fewer")), image_size=16))[1]
    assert unseen.count_samples_by_class().tolist() == [1, 0, 1]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("labels", ["numbers", "one-hot", "none"])
def test_npz(tmp_path, save, labels):
    """Oracle: the folder of the same pixels; numpy wrote the file as ADM does."""
    root = folder(tmp_path / "plain", 2, 5)
    pixels = [np.asarray(Image.open(path)) for path in files_of(root)]
    numbers = np.repeat([0, 1], 5)
    path = tmp_path / "samples_10x30x40x3.npz"
    save(path, np.stack(pixels), *{"numbers": [numbers], "one-hot": [np.eye(2)[numbers]], "none": []}[labels])
    assert command_of(path=str(path)) == ["npz", str(path), "--out", "samples_10x30x40x3-shards"]
    out = converted("npz", path, tmp_path / "out")
    assert_equal(out, root, names=False, classes=labels != "none")
    assert open_sources(Data(path=str(out), image_size=16))[1] is None


@pytest.mark.parametrize("channels", [1, 4])
def test_npz_of_other_channels(tmp_path, channels):
    """Oracle: the pixels that were written."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, 16, 16, channels), dtype=np.uint8)
    pixels[..., 3:] = 255
    np.savez(tmp_path / "a.npz", pixels)
    source = open_images(converted("npz", tmp_path / "a.npz", tmp_path / "out"), 16, channels=channels)
    for number in range(2):
        np.testing.assert_array_equal(source[number]["image"].permute(1, 2, 0), pixels[number])


@pytest.mark.parametrize(
    "labels", [[0.5, 1.7], [0, np.nan], [0, np.inf], [0, -1], [[0, 0], [0, 1]], [[0.3, 0.7], [0, 1]], [[3], [2]]]
)
def test_labels_of_an_npz_that_are_none(tmp_path, labels):
    """Oracle: the contract: labels are whole numbers or one-hot rows, and nothing else is rounded to one."""
    np.savez(tmp_path / "a.npz", np.zeros((2, 8, 8, 3), np.uint8), np.array(labels))
    with pytest.raises(ConfigError, match="neither whole numbers .* nor one-hot"):
        converted("npz", tmp_path / "a.npz", tmp_path / "out")


def test_shards_begin_anew(tmp_path, monkeypatch):
    """Oracle: the arrays, from an interrupted conversion that is repeated; no other folder is written into."""
    monkeypatch.setattr(convert_verb, "_SHARD_BYTES", 500)
    pixels = np.random.default_rng(0).integers(0, 256, (9, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", pixels)
    hashes = iter(["hash of the first"])
    with monkeypatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(convert_verb, "hash_file", lambda path: next(hashes))
        converted("npz", tmp_path / "a.npz", tmp_path / "out")
    with pytest.raises(ConfigError, match="is not packed to the end"):
        open_images(tmp_path / "out", 8)
    source = open_images(converted("npz", tmp_path / "a.npz", tmp_path / "out"), 8)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    for number in range(9):
        np.testing.assert_array_equal(source[number]["image"].permute(1, 2, 0), pixels[number])
    with pytest.raises(ConfigError, match="holds other.txt: name a new folder"):
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "other.txt").touch()
        converted("npz", tmp_path / "a.npz", tmp_path / "other")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / PACKING).write_text("{")  # as a full disk leaves it
    assert len(open_images(converted("npz", tmp_path / "a.npz", tmp_path / "torn"), 8)) == 9
    with pytest.raises(ConfigError, match="holds files_00000.safetensors"):
        write_idx(tmp_path / "idx")
        converted("mnist", next((tmp_path / "idx").glob("t10k-images*")), tmp_path / "out")
    np.savez(tmp_path / "b.npz", pixels, np.arange(9))
    (tmp_path / "list").write_text("a\nb\n")
    with pytest.raises(ConfigError, match="label 8 is not among the 2 classes"):
        converted("npz", tmp_path / "b.npz", tmp_path / "b", class_list=str(tmp_path / "list"))


def test_the_command(tmp_path, monkeypatch, capsys):
    """Oracle: the contract of a command: what there is, in a line, or what is wrong, without a traceback."""
    np.savez(tmp_path / "a.npz", np.zeros((3, 8, 8, 3), np.uint8))
    words = ["npz", tmp_path / "a.npz", "--out", tmp_path / "out"]
    code, out, _ = here("convert.py", words, monkeypatch, capsys)
    assert code == 0 and f"3 images in {tmp_path / 'out'}: give data.path={tmp_path / 'out'}" in out
    for words, message in (
        ([], "name the kind of the data, one of cifar10, cifar100, mnist, lsun, npz, imagenet-kit, latents"),
        (["npz"], "name PATH"),
        (["npz", "x"], "name --out OUT"),
        (["npz", "x", "--out", "y"], "x does not exist"),
        (["npz", "x", "--out", "y", "--normalize"], "--normalize is for the kind latents"),
        (["latents", "x", "--out", "y"], "name what encoded the latents: --first-stage PATH"),
        (["mnist", tmp_path / "a.npz", "--out", tmp_path / "y"], "holds no idx files of images"),
        (["lsun", tmp_path / "a.npz", "--out", tmp_path / "y"], "holds no LMDB environment"),
    ):
        code, out, error = here("convert.py", words, monkeypatch, capsys)
        assert code == 2 and message in error and "Traceback" not in error, (words, error)
