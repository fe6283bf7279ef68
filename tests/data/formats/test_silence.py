"""Data that were read wrongly in silence, by kind: found.md, section B, and variants of each kind.

A case makes a folder D and returns what is read of it: (grey value, class, caption) of each sample, and what the start
of a command says of what is left out; or a refusal.
"""

import csv
import io
import json
import re
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, PngImagePlugin

from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.formats.base import Request
from dstrain.data.open import open_sources
from dstrain.data.source import BadSample
from dstrain.data.sources.images import open_images
from dstrain.encoders.text import unpack_captions
from dstrain.metrics.images import open_image_set
from dstrain.recipe import ConfigError, Data
from launch.convert.mnist import read_mnist

CASES: dict[str, tuple[Callable, str]] = {}


def case(expected: str, cases: dict[str, tuple[Callable, str]] = CASES) -> Callable:
    """Adds a case: `expected` is a pattern of all that is read, or of the refusal."""

    def add(make: Callable) -> Callable:
        cases[make.__name__] = (make, expected)
        return make

    return add


def encode(value: int, form: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (value,) * 3).save(file, form, **options)
    return file.getvalue()


def put(path: Path, value: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(value))
    return path


def pack_tar(path: Path, *members: tuple[str, bytes], links: dict[str, str] | None = None) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = (tarfile.SYMTYPE if name.startswith("s") else tarfile.LNKTYPE), target
            file.addfile(info)
    return path.read_bytes()


def pack_zip(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> bytes:
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members:
            file.writestr(name, content)
    return path.read_bytes()


def make_table(values: tuple, labels: list | None = None, names: list | None = None, **more: list) -> pa.Table:
    """A table as `datasets` writes it; names: those of its ClassLabel."""
    features = {"image": {"_type": "Image"}} | ({"label": {"_type": "ClassLabel", "names": names}} if names else {})
    columns = {"image": [{"bytes": encode(value), "path": None} for value in values]} | more
    table = pa.table(columns | ({} if labels is None else {"label": labels}))
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def put_tables(root: Path, tables: dict[str, pa.Table]) -> Path:
    for name, table in tables.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(table, root / name)
        else:
            with pa.OSFile(str(root / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)
    return root


def put_idx(folder: Path, split: str = "train") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{split}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 0x803, 2, 8, 8) + bytes(128))
    (folder / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, 2) + b"\0\1")


def put_cifar(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "test", "meta") if "100" in folder.name else ("data_batch_1", "test_batch", "batches.meta"):
        (folder / name).write_bytes(b"x")


def read(path: Path, captions: bool = False, **request) -> str:
    """What is read, a sample a word, and what is left out."""
    try:
        source = open_images(path, 8, split="all", request=Request(SUFFIXES, captions=captions, **request))
    except ConfigError as error:
        return f"refused: {error}"
    words = []
    for index in range(len(source)):
        try:
            item = source[index]
        except BadSample as error:
            words.append(f"bad({error.reason})")
            continue
        words.append(f"{int(item['image'][0, 0, 0])}" + (f":{source.classes[item['label']]}" if source.classes else ""))
        words[-1] += f"={unpack_captions(item['caption'][None])[0]}" if captions else ""
    return " ".join(words) + (f"; {source.layout.compose_data_advice()}" if source.layout.compose_data_advice() else "")


# B16: the first part speaks for all.
@case("10:cat 20:dog 30:dog 40:cat")
def class_label_in_another_order(d):
    tables = {f"train-{k:05}-of-00002.parquet": make_table((20 * k + 10, 20 * k + 20), [0, 1], names)
              for k, names in enumerate((["cat", "dog"], ["dog", "cat"]))}  # fmt: skip
    return read(put_tables(d, tables))


@case("10:cat 20:dog 30:dog")
def class_label_in_another_order_in_arrow(d):
    tables = {"a.arrow": make_table((10, 20), [0, 1], ["cat", "dog"]), "b.arrow": make_table((30,), [0], ["dog"])}
    return read(put_tables(d, tables))


@case("10:cat 20:dog 30:dog")
def class_label_of_another_configuration(d):
    tables = {"large/train-0.parquet": make_table((10, 20), [0, 1], ["cat", "dog"]),
              "small/train-0.parquet": make_table((30,), [0], ["dog", "cat"])}  # fmt: skip
    return read(put_tables(d, tables))


@case("refused: .*b.parquet names its labels bird, cat, and a.parquet cat, dog")
def class_label_with_a_new_class(d):
    return read(put_tables(d, {"a.parquet": make_table((10,), [0], ["cat", "dog"]),
                               "b.parquet": make_table((20,), [0], ["bird", "cat"])}))  # fmt: skip


@case("refused: .*b.parquet names its labels not at all, and a.parquet cat, dog")
def labels_without_names_in_the_second(d):
    tables = {"a.parquet": make_table((10,), [0], ["cat", "dog"]), "b.parquet": make_table((20,), [0])}
    return read(put_tables(d, tables))


@case("refused: .*b.parquet has images in image, texts in label, and a.parquet images in image, numbers in label")
def labels_of_another_type_in_the_second(d):
    return read(put_tables(d, {"a.parquet": make_table((10,), [0]), "b.parquet": make_table((20,), ["dog"])}))


@case("refused: .*b.arrow has images in image, numbers in label, and a.arrow images in image: write")
def labels_in_the_second_alone(d):
    return read(put_tables(d, {"a.arrow": make_table((10,)), "b.arrow": make_table((20,), [1])}))


@case("refused: .*b.parquet has .*numbers in label, texts in prompt, and a.parquet .*numbers in label, texts in text")
def captions_of_another_name_in_the_second(d):
    tables = {"a.parquet": make_table((10,), [0], text=["a"]), "b.parquet": make_table((20,), [0], prompt=["b"])}
    return read(put_tables(d, tables), captions=True)


@case("10:0 20:1")
def other_widths_are_no_other_types(d):
    wide = make_table((20,), [1], text=["b"])
    schema = pa.schema([("image", wide.schema.field("image").type), ("text", pa.large_string()), ("label", pa.int8())])
    return read(put_tables(d, {"a.parquet": make_table((10,), [0], text=["a"]), "b.parquet": wide.cast(schema)}))


@case("refused: .*l.jsonl, line 2 has a label, and the first has none")
def a_label_from_the_second_row_on(d):
    put(d / "0.png", 10)
    rows = ({"file_name": "0.png"}, {"file_name": "0.png", "label": "cat"})
    (d / "l.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return read(d / "l.jsonl")


@case("refused: .*metadata.jsonl, line 2 has a text, and the first has none")
def a_caption_from_the_second_row_on(d):
    for name in ("0.png", "1.png"):
        put(d / name, 10)
    rows = ({"file_name": "0.png", "label": 1}, {"file_name": "1.png", "label": 2, "text": "cat"})
    (d / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return read(d, captions=True)


@case("refused: .*l.txt, line 2 has a label, and the first has none")
def a_number_from_the_second_line_on(d):
    put(d / "0.png", 10)
    (d / "l.txt").write_text("0.png\n0.png 3\n")
    return read(d / "l.txt")


# B17: one walker.
def make_set(root: Path) -> Path:
    for number in range(3):
        put(root.parent / "elsewhere" / f"{number}.png", number)
        put(root / "b" / f"{number}.png", number)
    for number, name in enumerate((".ipynb_checkpoints/0.png", "@eaDir/1.png", "._0.png", "__MACOSX/b/0.png")):
        put(root / "b" / name, number)
    (root / "a").symlink_to(root.parent / "elsewhere")
    (root / "b" / "up").symlink_to(root)
    return root


@case("a/0.png a/1.png a/2.png b/0.png b/1.png b/2.png; 0:a 1:a 2:a 0:b 1:b 2:b")
def the_set_that_is_compared(d):
    root = make_set(d / "set")
    return f"{' '.join(open_image_set(root, '--reference').names)}; {read(root)}"


@case("b/0.png b/1.png b/2.png; 0:b 1:b 2:b|b/0.png b/1.png b/2.png; 0 1 2")
def the_zip_that_is_compared(d):
    root = make_set(d / "set")
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.png")]
    names = [name for name in names if not name.startswith("b/up")]
    pack_zip(d / "set.zip", *((name, (root / name).read_bytes()) for name in names))
    return f"{' '.join(open_image_set(d / 'set.zip', '--reference').names)}; {read(d / 'set.zip')}"


@case("0 0 1 1 2 2")
def the_pictures_that_are_given(d):
    from dstrain.data.decode.pixels import read_pictures

    return " ".join(str(int(value)) for value in read_pictures(make_set(d / "set"), 3)[:, 0, 0, 0].sort().values)


@case("a/0.png a/1.png a/2.png b/0.png b/1.png b/2.png")
def the_pictures_that_prime(d):
    from dstrain.sampling.scenes import _list_prime_files

    root = make_set(d / "set")
    return " ".join(path.relative_to(root).as_posix() for path in _list_prime_files(root))


@case("20 10")
def links_back_among_tables(d):
    put_named(d, "b-0", "a/b/c/d/e/0")
    (d / "self").symlink_to(".")
    (d / "a" / "up").symlink_to(d)
    return read(d)


@case("10")
def links_back_beside_tars(d):
    pack_tar(d / "0.tar", ("0.png", encode(10)))
    (d / "self").symlink_to(".")
    return read(d)


@case("clips")
def hidden_pictures_beside_videos(d):
    from dstrain.data.open import find_content_kind

    put(d / "._0.png", 1)
    put(d / "a" / "@eaDir" / "0.png", 1)
    (d / "a" / "0.mp4").write_bytes(b"x")
    return find_content_kind(Data(path=str(d)))


# B18: words in names choose the split.
def put_named(d: Path, *names: str, suffix: str = ".parquet") -> Path:
    return put_tables(d, {f"{name}{suffix}": make_table((10 * number,)) for number, name in enumerate(names, 1)})


@case("refused: .*train.parquet name a split, and bicycle.parquet, bus.parquet do not: write data.path='D/\\*.parquet'")
def words_among_other_words(d):
    return read(put_named(d, "bicycle", "bus", "train"))


@case("10 20 30")
def words_among_other_words_by_a_pattern(d):
    return read(put_named(d, "bicycle", "bus", "train") / "*.parquet")


@case("20; files of other splits are not among them, test 1 held out: 10")
def splits_in_a_folder_called_dev(d):
    put_named(d / "dev", "test-00000", "train-00000")
    unseen = open_images(d, 8, split="held_out")
    return f"{read(d)} held out: {int(unseen[0]['image'][0, 0, 0])}"


def read_both(d: Path) -> str:
    """What is trained on, and what is held out."""
    train, unseen = open_sources(Data(path=str(d), image_size=8))
    values = [[int(source[index]["image"][0, 0, 0]) for index in range(len(source))] for source in (train, unseen)]
    return f"{values[0]} {values[1]}"


@pytest.mark.parametrize(
    "names, expected",
    [
        ("a_train b_train a_test b_test", "[10, 20] [30, 40]"),
        ("x/train-0 y/train-0 x/test-0 y/test-0", "[10, 20] [30, 40]"),
        ("train-0 train-1 test-0 test-1", "[10, 20] [30, 40]"),
        ("train/0 train/1 test/0 test/1", "[10, 20] [30, 40]"),
        ("train-0 test-0 test-x-train-0", "[10] [20, 30]"),
        ("train val", "[10] [20]"),
    ],
)
def test_held_out_splits(tmp_path, names, expected):
    """Oracle: the names: what is held out is the other split, wherever its files lie, and nothing of train."""
    assert read_both(put_named(tmp_path, *names.split())) == expected


@case("10 30; files of other splits are not among them, test 1")
def splits_in_folders(d):
    return read(put_named(d, "train/0", "test/1", "train/2"))


@case("30; files of other splits are not among them, validation 1, test 1")
def splits_at_the_end_of_names(d):
    return read(put_named(d, "mnist_dev", "mnist_test", "mnist_train"))


@case("refused: .*train/1.arrow name a split, and more/0.arrow do not")
def a_folder_beside_splits(d):
    return read(put_named(d, "more/0", "train/1", suffix=".arrow"))


@case("10; files of other splits are not among them, validation 1")
def a_list_beside_splits(d):
    put_named(d, "train-00000-of-00001", "validation-00000-of-00001")
    pq.write_table(pa.table({"path": ["x"]}), d / "index.parquet")
    return read(d)


@case("10 20")
def words_within_words(d):
    return read(put_named(d, "contest", "retrained"))


@case("refused: .*holds x-train-0.tar of train, x-val-0.tar of validation: name those of one by a pattern")
def splits_of_tars(d):
    for name in ("x-train-0", "x-train-1", "x-val-0"):
        pack_tar(d / f"{name}.tar", ("0.png", encode(10)))
    return read(d)


@case("refused: .*holds bus.tar of no split, train.tar of train: name")
def words_in_names_of_tars(d):
    for name in ("bus", "train"):
        pack_tar(d / f"{name}.tar", ("0.png", encode(10)))
    return read(d)


# B19: the first form that fits wins.
SEVERAL = "refused: data.path=D holds several forms of data, "


@case(SEVERAL + ".*FashionMNIST/raw/.*: data.path=D/FashionMNIST/raw.* and .*: data.path=D/MNIST/raw")
def two_idx_sets(d):
    for name in ("MNIST", "FashionMNIST"):
        put_idx(d / name / "raw")
    return read(d)


@case("refused: D holds several sets, FashionMNIST/raw/, MNIST/raw/: name the folder of one")
def two_idx_sets_to_convert(d):
    for name in ("MNIST", "FashionMNIST"):
        put_idx(d / name / "raw")
    try:
        return str(read_mnist(d))
    except ConfigError as error:
        return f"refused: {error}"


@case(SEVERAL + "CIFAR-10 .cifar-10-batches-py/.* and CIFAR-100 .cifar-100-python/.*: data.path=D/cifar-100-python")
def two_cifars(d):
    put_cifar(d / "cifar-10-batches-py")
    put_cifar(d / "cifar-100-python")
    return read(d)


@case(SEVERAL + "images .a/0.png: data.path=D/a. and CIFAR-10 .*data_batch_1, .*: data.path=D/cifar-10-batches-py")
def a_cifar_beside_pictures(d):
    put_cifar(d / "cifar-10-batches-py")
    put(d / "a" / "0.png", 1)
    return read(d)


@case(SEVERAL + "tar files .0.tar: data.path='D/\\*.tar'. and images .assets/teaser.png: data.path=D/assets.: name one")
def a_picture_below_tars(d):
    pack_tar(d / "0.tar", ("0.png", encode(10)))
    put(d / "assets" / "teaser.png", 99)
    return read(d)


@case("10 20")
def a_picture_beside_tars_by_the_remedy(d):
    pack_tar(d / "0.tar", ("0.png", encode(10)))
    pack_tar(d / "1.tar", ("0.png", encode(20)))
    put(d / "banner.png", 99)
    assert SEVERAL[9:] in read(d).replace(str(d), "D")
    return read(d / "*.tar")


@case(SEVERAL + "a zip file .b.zip: data.path=D/b.zip. and images .a/0.png")
def a_zip_beside_class_folders(d):
    put(d / "a" / "0.png", 1)
    pack_zip(d / "b.zip", ("a/0.png", encode(1)))
    return read(d)


@case(SEVERAL + "images .assets/x.png: data.path=D/assets. and parquet files .data/train-0.parquet: data.path=D/data.")
def a_picture_beside_parquet(d):
    put_named(d, "data/train-0")
    put(d / "assets" / "x.png", 1)
    return read(d)


@case(SEVERAL + "tar files .0.tar.* and Arrow files .1.arrow: data.path='D/\\*.arrow'")
def arrow_beside_tars(d):
    pack_tar(d / "0.tar", ("0.png", encode(10)))
    return read(put_named(d, "1", suffix=".arrow"))


@case(SEVERAL + "tar files .a/0.tar: data.path=D/a. and tar files .b/0.tar: data.path=D/b.")
def tars_in_several_folders(d):
    for name in "ab":
        pack_tar(d / name / "0.tar", ("0.png", encode(10)))
    return read(d)


@case("10=a cat")
def tables_and_reports_beside_tars_are_no_form(d):
    """As img2dataset writes them."""
    pack_tar(d / "00000.tar", ("0.png", encode(10)), ("0.txt", b"a cat"))
    pq.write_table(pa.table({"url": ["x"], "caption": ["a cat"]}), d / "00000.parquet")
    (d / "00000_stats.json").write_text("{}")
    return read(d, captions=True)


@case("refused: .*has dataset.json and metadata.csv: which of them counts")
def two_tables_of_labels(d):
    put(d / "0.png", 10)
    (d / "dataset.json").write_text('{"labels": [["0.png", 3]]}')
    (d / "metadata.csv").write_text("file_name,label\n0.png,4\n")
    return read(d)


@case("refused: .*`dstrain generate` wrote this folder, and its samples are in samples_4x8x8x3.npz: convert them once")
def a_folder_of_generate(d):
    put(d / "grid.png", 1)
    (d / "samples_4x8x8x3.npz").write_bytes(b"x")
    return read(d)


# B20: a reader that stops early.
@case("10:1 20:2 30:3")
def joined_tars(d):
    shards = [pack_tar(d / f"{k}.tar", (f"{k}.png", encode(10 * k)), (f"{k}.cls", b"%d" % k)) for k in (1, 2, 3)]
    (d / "all.tar").write_bytes(b"".join(shards))
    return read(d / "all.tar")


@case("refused: .*all.tar is no readable tar file")
def a_tar_with_something_behind_it(d):
    (d / "all.tar").write_bytes(pack_tar(d / "0.tar", ("0.png", encode(1))) + b"something else" * 100)
    return read(d / "all.tar")


def join(d: Path, name: str) -> str:
    parts = []
    for value in (10, 20):
        put_tables(d / "parts", {name: make_table((value,))})
        parts.append((d / "parts" / name).read_bytes())
    (d / name).write_bytes(b"".join(parts))
    return read(d / name)


@case("refused: .*x.arrow goes on behind its end at byte .*keep each as a file of its own")
def joined_arrow_streams(d):
    return join(d, "x.arrow")


@case("refused: .*x.arrow goes on behind its end")
def joined_arrow_files(d):
    table, sink = make_table((10,)), io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    (d / "x.arrow").write_bytes(sink.getvalue())
    assert read(d / "x.arrow") == "10"
    (d / "x.arrow").write_bytes(sink.getvalue() * 2)
    return read(d / "x.arrow")


@case("refused: .*x.parquet goes on behind its end")
def joined_parquet_files(d):
    return join(d, "x.parquet")


@case("refused: .*another zip file stands before it in one file")
def joined_zips(d):
    both = pack_zip(d / "0.zip", ("0.png", encode(10))) + pack_zip(d / "1.zip", ("1.png", encode(20)))
    (d / "all.zip").write_bytes(both)
    return read(d / "all.zip")


# B23: what is passed over is not counted.
@case("10 30; 2 links are left out")
def links_in_a_tar(d):
    pack_tar(d / "x.tar", ("0.png", encode(10)), ("2.png", encode(30)), links={"1.png": "0.png", "s.png": "2.png"})
    return read(d)


@case("refused: data.path=D: no images in it but 1 links: put the images themselves there")
def a_tar_of_links(d):
    pack_tar(d / "x.tar", links={"s.png": "0.png"})
    return read(d)


@case("10; files of other types are left out, .gif 1, .mp4 1: .*")
def pictures_and_videos_beside_tars(d):
    pack_tar(d / "x.tar", ("0.png", encode(10)))
    for name in ("demo.gif", "v/0.mp4", "x.csv"):
        (d / name).parent.mkdir(exist_ok=True)
        (d / name).write_bytes(b"x")
    return read(d)


@case("10; files of other types are left out, .svg 1: .*")
def pictures_beside_tables(d):
    (d / "logo.svg").write_bytes(b"x")
    return read(put_named(d, "train"))


@case("10; 1 sparse or special files are left out")
def sparse_members_of_a_tar(d):
    pack_tar(d / "x.tar", ("0.png", encode(10)))
    content = (d / "x.tar").read_bytes()
    header = bytearray(content[:512])
    header[:5], header[156:157] = b"1.png", tarfile.FIFOTYPE
    header[124:136] = b"00000000000\0"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (d / "x.tar").write_bytes(bytes(header) + content)
    return read(d)


@case("10")
def hidden_folders_in_a_tar(d):
    hidden = (".ipynb_checkpoints/0.png", "__MACOSX/0.png", "a/@eaDir/0.png", "._0.png")
    pack_tar(d / "x.tar", ("./0.png", encode(10)), *((name, encode(20)) for name in hidden))
    return read(d)


@case("10; 1 further images of a key are left out")
def two_pictures_of_a_key(d):
    pack_tar(d / "x.tar", ("0.png", encode(10)), ("0.jpg", encode(20, "JPEG")))
    return read(d)


@case("10; files of other types are left out, .heic 1, .tif 2: convert pictures to PNG or JPEG, if they are samples")
def other_types_in_a_tar(d):
    pack_tar(d / "x.tar", ("0.png", encode(10)), ("1.tif", b"x"), ("2.TIF", b"x"), ("3.heic", b"x"), ("4.md", b"x"))
    return read(d)


@case("10; 1 links are left out; files of other types are left out, .tif 1: convert .*")
def links_and_other_types_in_a_zip(d):
    link = zipfile.ZipInfo("1.png")
    link.create_system, link.external_attr = 3, 0o120777 << 16
    pack_zip(d / "x.zip", ("0.png", encode(10)), (link, b"0.png"), ("2.tif", b"x"), ("__MACOSX/0.png", b"x"))
    return read(d / "x.zip")


@case("10:cat 20:dog")
def a_zip_of_windows(d):
    pack_zip(d / "x.zip", ("cat/0.png", encode(10)), ("dog/0.png", encode(20)))
    content = (d / "x.zip").read_bytes().replace(b"cat/0", b"cat\\0").replace(b"dog/0", b"dog\\0")
    (d / "x.zip").write_bytes(re.sub(rb"PK\x01\x02..", lambda _: b"PK\1\2\x14\0", content, flags=re.DOTALL))
    return read(d / "x.zip")


@case("10:cat 20:dog")
def a_zip_of_dotted_paths(d):
    pack_zip(d / "x.zip", ("./cat/0.png", encode(10)), ("./dog/0.png", encode(20)))
    return read(d / "x.zip")


@case("10 10 10 10 10")
def pictures_of_all_names(d):
    for suffix in ("png", "jfif", "jpe", "pjpeg", "JPEG"):
        (d / f"1.{suffix}").write_bytes(encode(10, "PNG" if suffix == "png" else "JPEG"))
    return read(d)


@case("10; files of other types are left out, .rar 1, .webm 1: read videos by data.num_frames, name archives .*")
def archives_and_videos_in_a_folder(d):
    put(d / "0.png", 10)
    for name in ("a.rar", "b.webm", "c.txt"):
        (d / name).write_bytes(b"x")
    return read(d)


@case("0=a; 3 images without a row in metadata.jsonl are left out")
def some_metadata(d):
    for number in range(4):
        put(d / f"{number}.png", 10 * number)
    (d / "metadata.jsonl").write_text(json.dumps({"file_name": "./0.png", "text": "a"}) + "\n")
    return read(d, captions=True)


@case("0:1 10:2; 1 images without a row in metadata.csv are left out; files of other types are left out, .gif 1: .*")
def some_labels(d):
    for name, value in (("a/0.png", 0), ("a/1.png", 10), ("b/.hidden/2.png", 20), ("b/3.png", 30), ("b/4.gif", 40)):
        put(d / name, value)
    (d / "metadata.csv").write_text("File_Name,Label\na/0.png,1\na/1.png,2\n")
    return read(d)


@case("10:3; 1 that dataset.json names and that are not there are left out")
def labels_of_files_that_are_gone(d):
    put(d / "0.png", 10)
    (d / "dataset.json").write_text('{"labels": [["0.png", 3], ["1.png", 4]]}')
    return read(d)


@case("10:3; 2 that dataset.json names and that are not there are left out")
def labels_of_members_that_are_gone(d):
    labels = json.dumps({"labels": [["0.png", 3], ["1.png", 4], ["2.png", 4]]}).encode()
    pack_zip(d / "x.zip", ("0.png", encode(10)), ("dataset.json", labels))
    return read(d / "x.zip")


@case("10=a; 2 without a caption are left out")
def pictures_without_captions(d):
    for number in (1, 2, 3):
        put(d / f"{number}.png", 10 * number)
    (d / "1.txt").write_text("a")
    return read(d, captions=True)


@case("bad.its texts have more than 1 MB: take them out, as `mogrify -strip FILE` .*")
def a_picture_with_long_texts(d):
    texts = PngImagePlugin.PngInfo()
    texts.add_text("workflow", "x" * (2 << 20), zip=True)
    (d / "0.png").write_bytes(encode(10, pnginfo=texts))
    return read(d)


# B24: remedies that do not help.
@case("refused: .*l.csv, line 1: byte .* is no UTF-8: .*`iconv -f UTF-16 -t UTF-8 OLD > NEW`")
def a_table_in_utf_16(d):
    put(d / "0.png", 10)
    (d / "l.csv").write_text("file_name,label\n0.png,1\n", encoding="utf-16")
    return read(d / "l.csv")


@case("refused: .*l.tsv, line 1: byte 0x0 is no UTF-8: .*`iconv -f UTF-16 -t UTF-8 OLD > NEW`")
def a_table_in_utf_16_without_a_mark(d):
    put(d / "0.png", 10)
    (d / "l.tsv").write_text("file_name\tlabel\n0.png\t1\n", encoding="utf-16-le")
    return read(d / "l.tsv")


@case("refused: .*metadata.csv, line 1: byte .*`iconv -f UTF-16 ")
def metadata_in_utf_16(d):
    put(d / "0.png", 10)
    (d / "metadata.csv").write_text("file_name,label\n0.png,1\n", encoding="utf-16")
    return read(d)


@case("10:cat=a")
def headers_in_capitals(d):
    put(d / "0.png", 10)
    with open(d / "l.csv", "w", newline="") as file:
        csv.writer(file).writerows([("Path", " Label", "CAPTION"), ("0.png", "cat", "a")])
    return read(d / "l.csv", captions=True)


@case("10:1=a")
def columns_in_capitals(d):
    table = make_table((10,), [1], text=["a"]).rename_columns(["Image", "Text", "Label"]).replace_schema_metadata(None)
    return read(put_tables(d, {"x.parquet": table}), captions=True)


# Parts of splits, and held-out data within the training data.
@case("refused: .*:train.:80%. names a part of a split: write data.path=hf-dataset:D:train for all of it, or keep")
def a_part_of_a_split_of_the_hub(d):
    return read(f"hf-dataset:{d}:train[:80%]")


@case("refused: .*names a part of a split: write data.path=hf-dataset:D:train\\+test for all of it")
def a_part_of_joined_splits_of_the_hub(d):
    return read(f"hf-dataset:{d}:train+test[10:20]")


def put_classes(root: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        for place in range(2):
            put(root / name / "cat" / f"{place}.png", 10 * number + place)
    return root


SHARED = "data.held_out_path=.* and data.path=.* share files, and evaluation would see what was trained on: name"


@pytest.mark.parametrize(
    "path, held_out_path, expected",
    [
        ("a", "a", SHARED),
        ("a", "a/cat", SHARED),
        ("a/cat", "a", SHARED),
        ("a", "link", SHARED),
        ("a", "../D/a/", SHARED),
        ("a", "b", None),
        ("s/*.tar", "s/val.tar", SHARED),
        ("s/{train,val}.tar", "s/v*.tar", SHARED),
        ("s/train.tar", "s/{val,val}.tar", None),
        ("t", "t/test-*.parquet", None),
        ("t", "t/train-0.parquet", SHARED),
        ("t", "t", SHARED),
        ("r", "r/val", None),
        ("r", "r/train", SHARED),
        ("r", None, None),
    ],
)
def test_held_out_data_within_the_training_data(tmp_path, path, held_out_path, expected):
    """Oracle: the folders: files that are trained on are refused, and those of another split of one root are not."""
    d = tmp_path / "D"
    put_classes(d, "a", "b")
    put_named(d / "t", "train-0", "test-0")
    for split in ("train", "val"):
        pack_tar(d / "s" / f"{split}.tar", (f"{split}.png", encode(10)))
        for name in "xy":
            put(d / "r" / split / name / "0.png", 10)
    (d / "link").symlink_to("a")
    data = Data(path=str(d / path), held_out_path=held_out_path and str(d / held_out_path), image_size=8)
    if expected is None:
        assert all(len(source) for source in open_sources(data))
    else:
        with pytest.raises(ConfigError, match=expected):
            open_sources(data)


def test_a_folder_twice_in_a_mixture(tmp_path):
    """Oracle: the link: a mixture of a folder and a link to it is refused, with or without held-out samples."""
    put_classes(tmp_path, "a", "b")
    (tmp_path / "link").symlink_to("a")
    for names, share, expected in (
        (("a", "link"), 0, "are the same files: name them once"),
        (("a", "link"), 0.5, "share files, and what one holds out would be"),
        (("a", "b"), 0, None),
    ):
        mixture = [{"path": str(tmp_path / name)} for name in names]
        data = Data.model_validate({"mixture": mixture, "held_out": share, "image_size": 8})
        if expected is None:
            assert len(open_sources(data)[0]) == 4
        else:
            with pytest.raises(ConfigError, match=expected):
                open_sources(data)


# Splits that are read as classes, or all learned from.
@case("refused: data.path=D: train and val are splits, not classes: write data.path=D/train, and for .*=D/val")
def captions_beside_pictures_of_splits(d):
    for number, split in enumerate(("train", "val")):
        put(d / split / f"{number}.png", 10 * number)
        (d / split / f"{number}.txt").write_text("a")
    return read(d, captions=True)


@pytest.mark.parametrize(
    "names, expected",
    [
        ("train held_out", "train"),
        ("train holdout", "train"),
        ("train heldout", "train"),
        ("train held-out", "train"),
        ("Train HeldOut", "Train"),
        ("train evaluation", "train"),
        ("test train unlabeled", "train"),
        ("train2017 unlabeled2017", "train2017"),
        ("test trainval", "trainval"),
        ("testset trainset", "trainset"),
        ("train_large val_large", "train_large"),
        ("train_256x256 val_256x256", "train_256x256"),
        ("cats_test cats_train", "cats_train"),
        ("bus cats_test cats_train", "cats_train"),
        ("cats_test cats_train dogs_test dogs_train", "train"),
        ("freight_train test_tube", None),
        ("bus freight_train steam_train", None),
        ("bus cat unlabeled", None),
        ("train_256x256 val_512x512", None),
        ("held_in out", None),
    ],
)
def test_splits_under_other_names(tmp_path, names, expected):
    """Oracle: the names, in a folder, a zip and a tar: splits of the same data are refused, classes are read."""
    names = names.split()
    put_classes(tmp_path / "d", *names)
    files = {f"{name}/{place}.png": encode(10) for name in names for place in range(2)}
    pack_zip(tmp_path / "x.zip", *files.items())
    pack_tar(tmp_path / "x.tar", *files.items())
    texts = [read(tmp_path / name, labels=labels) for name in ("x.zip", "x.tar") for labels in ("auto", "none")]
    texts += [read(tmp_path / "d", labels=labels) for labels in ("auto", "none")]
    for text in texts:
        assert text.startswith("refused: ") is (expected is not None), text
        assert expected is None or ("are splits" in text and " and name " in text) or f"{expected}" in text, text
    assert expected is None or f"write data.path={tmp_path / 'd' / expected}" in texts[-1]


@case("refused: data.path=D/x.zip: train, val are splits, not classes: pack each by itself")
def splits_in_a_zip_with_prefixes(d):
    pack_zip(d / "x.zip", ("train/cat_0.png", encode(10)), ("val/cat_1.png", encode(20)))
    return read(d / "x.zip", labels="prefix")


@case("refused: data.path=D/x.zip: train, val, in the folder b, are splits, not classes: pack each by itself")
def splits_of_a_class_in_a_zip(d):
    pack_zip(d / "x.zip", ("a/0.png", encode(10)), ("b/train/0.png", encode(10)), ("b/val/1.png", encode(20)))
    return read(d / "x.zip")


@case("refused: data.path=D/x.tar: x.tar: train, val, in the folder a/b, are splits, not classes: pack each by itself")
def splits_deep_in_a_tar(d):
    pack_tar(d / "x.tar", ("a/b/train/0.png", encode(10)), ("a/b/val/1.png", encode(20)))
    return read(d / "x.tar")


@case("refused: data.path=D: train, val are splits, not classes: pack each by itself")
def splits_in_several_tars(d):
    pack_tar(d / "0.tar", ("train/0.png", encode(10)))
    pack_tar(d / "1.tar", ("val/1.png", encode(20)))
    return read(d)


@case("10 20")
def splits_in_several_tars_by_a_pattern(d):
    pack_tar(d / "0.tar", ("train/0.png", encode(10)))
    pack_tar(d / "1.tar", ("val/1.png", encode(20)))
    return read(d / "*.tar")


@case("10; files of other splits are not among them, held_out 1, unlabeled 1")
def other_words_in_names_of_files(d):
    return read(put_named(d, "train-0", "held_out-0", "unlabeled-0"))


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_read_wrongly_in_silence(tmp_path, name):
    """Oracle: by hand, what was written: it is read, or it is said."""
    make, expected = CASES[name]
    got = make(tmp_path).replace(str(tmp_path), "D")
    assert re.fullmatch(expected if not expected.startswith("refused") else f"{expected}.*", got), got


def test_what_is_left_out_is_counted_once(tmp_path, monkeypatch):
    """Oracle: counting by hand: as a large listing moves from memory to the disk, and from the index found again."""
    monkeypatch.setattr("dstrain.data.index.build._SMALL", 3)
    for number in range(6):
        put(tmp_path / "d" / "ab"[number % 2] / f"{number}.png", number)
        (tmp_path / "d" / "ab"[number % 2] / f"{number}.tif").write_bytes(b"x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):
        source = open_sources(Data(path=str(tmp_path / "d"), image_size=8))[0]
        assert source.index.folder and source.layout.left_out_counts == {".tif": 6}


def test_patterns_choose_files(tmp_path):
    """Oracle: the names: a star leaves out what does not fit, is refused where nothing fits, and in a folder's name."""
    for name, value in (("train-0", 10), ("train-1", 20), ("val-0", 30)):
        pack_tar(tmp_path / f"{name}.tar", ("0.png", encode(value)))
    assert read(tmp_path / "train-*.tar") == "10 20" and read(tmp_path / "*-0.tar") == "10 30"
    assert "fits no file: correct the pattern" in read(tmp_path / "test-*.tar")
    assert "a star stands for names of files in one folder" in read(tmp_path / "*" / "train.tar")
