"""Hugging Face's data sets: files as `datasets` writes them, and what is hostile or missing in them."""

import io
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.files.local import LocalFiles
from dstrain.data.formats import recognise_layout
from dstrain.data.formats.base import Request
from dstrain.data.open import open_sources
from dstrain.data.source import BadSample
from dstrain.data.sources.images import open_images
from dstrain.encoders.text import unpack_captions
from dstrain.recipe import ConfigError, Data
from tests.support.clips import moving, write
from tests.support.launch import environment
from tests.support.pictures import folder

FEATURES = {
    "image": {"_type": "Image"},
    "label": {"names": ["c0", "c1", "c2"], "_type": "ClassLabel"},
    "caption": {"dtype": "string", "_type": "Value"},
    "captions": {"feature": {"dtype": "string", "_type": "Value"}, "_type": "List"},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("plain"), classes=3, each=7)


def table(plain: Path) -> pa.Table:
    """The pictures of the plain folder in its order, as `datasets` has them."""
    paths = sorted(plain.rglob("*.png"))
    columns = {
        "image": [{"bytes": path.read_bytes(), "path": path.name} for path in paths],
        "label": [int(path.parent.name[1:]) for path in paths],
        "caption": [f"caption of {path.stem}" for path in paths],
        "captions": [[path.stem, path.parent.name] for path in paths],
    }
    metadata = {"huggingface": json.dumps({"info": {"features": FEATURES}})}
    schema = pa.schema(
        [
            ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
            ("label", pa.int64()),
            ("caption", pa.string()),
            ("captions", pa.list_(pa.string())),
        ],
        metadata,
    )
    return pa.table(columns, schema)


def saved(root: Path, content: pa.Table, shards: int = 2) -> Path:
    """What Dataset.save_to_disk writes."""
    root.mkdir(parents=True)
    names = [f"data-{number:05}-of-{shards:05}.arrow" for number in range(shards)]
    each = -(-len(content) // shards)
    for number, name in enumerate(names):
        with pa.OSFile(str(root / name), "wb") as file, pa.ipc.new_stream(file, content.schema) as writer:
            writer.write_table(content.slice(number * each, each), max_chunksize=4)
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return root


def as_parquet(**options):
    def write(root: Path, content: pa.Table) -> Path:
        root.mkdir()
        options_of_datasets = {"compression": "none", "use_dictionary": False, "write_page_index": True}
        for name, rows in (
            ("train-00000-of-00002", content[:11]),
            ("train-00001-of-00002", content[11:]),
            ("test-00000-of-00001", content[:2]),
        ):
            pq.write_table(rows, root / f"{name}.parquet", **{"row_group_size": 5, **options_of_datasets, **options})
        (root / "README.md").write_text("x")
        return root

    return write


def with_paths_first(content: pa.Table) -> pa.Table:
    """The same table, whose structs have the field "path" before "bytes"."""
    kind = pa.struct([("path", pa.string()), ("bytes", pa.binary())])
    rows = [{"path": row["path"], "bytes": row["bytes"]} for row in content["image"].to_pylist()]
    return content.set_column(0, pa.field("image", kind), pa.array(rows, kind))


FORMS = {
    "save_to_disk": saved,
    "stream": lambda root, content: saved(root, content) if (saved(root, content) / "state.json").unlink() else root,
    "parquet of datasets": as_parquet(),
    "parquet, small pages": as_parquet(data_page_size=2000),
    "parquet, paths first": lambda root, content: as_parquet()(root, with_paths_first(content)),
    "parquet, snappy": as_parquet(compression="snappy"),
    "parquet, dictionary": as_parquet(use_dictionary=True),
    "parquet, delta": as_parquet(column_encoding={"image.bytes": "DELTA_LENGTH_BYTE_ARRAY"}),
}


def same(source, plain: Path) -> None:
    """Order, labels, classes and pixels are the plain folder's."""
    expected = open_images(plain, 16)
    source = pickle.loads(pickle.dumps(source))
    assert len(source) == len(expected) and source.classes == expected.classes
    for index in (*range(len(source)), 3, 0):
        assert source[index]["label"] == expected[index]["label"]
        assert (source[index]["image"] == expected[index]["image"]).all()


@pytest.mark.parametrize("form", FORMS)
def test_equal_to_the_plain_folder(tmp_path, plain, form):
    """Oracle: the plain folder with the same files: order, labels, classes, pixels; captions as they were written."""
    root = FORMS[form](tmp_path / "d", table(plain))
    request = Request(SUFFIXES, captions=True)
    same(open_images(root, 16), plain)
    captioned = open_images(root, 16, request=request)
    assert captioned.index.read_captions(8) == ("caption of 001",)
    assert captioned.compute_fingerprint() == open_images(root, 16, request=request).compute_fingerprint()
    on_disk = open_images(root, 16, index=tmp_path / "index")
    same(on_disk, plain)
    same(open_images(root, 16, index=tmp_path / "index"), plain)  # found again, and not listed anew
    several = Request(SUFFIXES, captions=True, columns={"caption": "captions"})
    assert open_images(root, 16, request=several).index.read_captions(8) == ("001", "c1")
    assert open_images(root, 16, request=Request(SUFFIXES, labels="none")).classes == ()


def test_images_that_are_stored_as_they_are_are_read_by_their_bytes(tmp_path, plain):
    """Oracle: the file's own bytes: what `datasets` writes needs no decoding of a row group for a sample."""
    content = table(plain)
    for form, by_bytes in (
        ("parquet of datasets", True),
        ("parquet, small pages", True),
        ("parquet, paths first", True),
        ("parquet, dictionary", True),
        ("parquet, snappy", False),
        ("parquet, delta", False),
    ):
        root = FORMS[form](tmp_path / form, content)
        layout = recognise_layout(str(root), LocalFiles(root), Request(SUFFIXES))
        samples = [sample for part in layout.list_partitions() for sample in layout.iterate_samples(part)]
        assert [sample.place.size >= 0 for sample in samples] == [by_bytes] * 21
        for sample, image in zip(samples, content["image"].to_pylist()):
            if by_bytes:
                file = (root / sample.place.name.rpartition("/")[0]).read_bytes()
                assert file[sample.place.offset : sample.place.offset + sample.place.size] == image["bytes"]
        assert (
            layout.compose_data_advice() == "files of other splits are not among them, test 1"
        )  # row groups are small here


def test_splits(tmp_path, plain):
    """Oracle: DatasetDict: its split train is trained on, validation or else test held out."""
    content = table(plain)
    root = tmp_path / "d"
    for name, rows in (("train", content), ("test", content[:3]), ("validation", content[:5])):
        saved(root / name, rows)
    (root / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test", "validation"]}))
    same(open_images(root, 16), plain)
    layout = recognise_layout(str(root), LocalFiles(root), Request(SUFFIXES))
    assert layout.find_held_out_path() == f"{root}/validation"
    train, unseen = open_sources(Data(path=str(root), image_size=16))
    same(train, plain)
    assert len(unseen) == 5 and unseen.classes == train.classes
    train, unseen = open_sources(Data(path=str(root), image_size=16, held_out=0.3))
    assert len(train) + len(unseen) == 21
    parquet = as_parquet()(tmp_path / "p", content)
    layout = recognise_layout(str(parquet), LocalFiles(parquet), Request(SUFFIXES))
    assert layout.find_held_out_path() == f"{parquet}/test-00000-of-00001.parquet"
    assert len(open_sources(Data(path=str(parquet), image_size=16))[1]) == 2
    same(open_images(f"{parquet}/train-*.parquet", 16), plain)
    (root / "dataset_dict.json").write_text(json.dumps({"splits": ["test", "validation"]}))
    with pytest.raises(ConfigError, match="the splits test, validation, and no train"):
        open_images(root, 16)


def test_what_is_wrong_is_named(tmp_path, plain):
    """Oracle: the columns that are there: a refusal names them, and the entry that chooses."""
    content = table(plain)
    two = content.append_column("mask", content["image"]).replace_schema_metadata()
    two = two.rename_columns(["a", *two.schema.names[1:]])
    pq.write_table(two, tmp_path / "two.parquet")
    with pytest.raises(ConfigError, match=r"several columns of images \(a, mask\).*data.columns={image: NAME}"):
        open_images(tmp_path / "two.parquet", 16)
    assert len(open_images(tmp_path / "two.parquet", 16, request=Request(SUFFIXES, columns={"image": "a"}))) == 21
    with pytest.raises(ConfigError, match="no column label: kind of data.columns; it has a, label"):
        open_images(tmp_path / "two.parquet", 16, request=Request(SUFFIXES, columns={"image": "a", "label": "kind"}))
    secret = content.set_column(1, "label", pa.array([-1] * 21))
    pq.write_table(secret, tmp_path / "secret.parquet")
    with pytest.raises(ConfigError, match="secret.parquet/0 has the label -1, which is no class.*data.labels=none"):
        open_images(tmp_path / "secret.parquet", 16)
    absent = content.to_pylist()
    absent[4]["image"] = None
    pq.write_table(pa.Table.from_pylist(absent, content.schema), tmp_path / "absent.parquet")
    source = open_images(tmp_path / "absent.parquet", 16)
    with pytest.raises(BadSample, match="neither bytes nor a file"):
        source[4]
    assert source[5]["label"] == 0


@pytest.mark.parametrize(
    "labels, classes",
    [
        (pa.array(["b", "a", "b"]).dictionary_encode(), ("a", "b")),
        (pa.array([True, False, True]), ("0", "1")),
        (pa.array([1.0, 0.0, 1.0]), None),
        (pa.array([[1], [0], [1]]), ()),
    ],
)
def test_labels_as_pandas_writes_them(tmp_path, labels, classes):
    """Oracle: labels by hand: categories and truths are classes, fractions are refused, boxes and the like are none."""
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG")
    content = {"image": [image.getvalue()] * 3, "label": labels, "caption": [["x"], [], ["y", "z"]]}
    pq.write_table(pa.table(content), tmp_path / "a.parquet")
    if classes is None:
        with pytest.raises(ConfigError, match="the column label holds double.*data.labels=none"):
            open_images(tmp_path / "a.parquet", 8)
        return
    source = open_images(tmp_path / "a.parquet", 8, request=Request(SUFFIXES, captions=True))
    assert source.classes == classes
    assert [source[index]["label"] for index in (0, 2)] == ([1, 1] if classes else [0, 0])
    with pytest.raises(BadSample, match="its caption is empty"):
        source[1]


def test_clips_in_parquet(tmp_path):
    """Oracle: the same clips as files: frames, labels and captions; a column of pictures beside them is not taken."""
    (tmp_path / "clips").mkdir()
    for number in range(2):
        write(tmp_path / "clips" / f"{number}.mp4", moving(9, seed=number), "libx264")
    clips = [path.read_bytes() for path in sorted((tmp_path / "clips").iterdir())]
    content = {
        "image": [b"a picture"] * 2,
        "video": [{"bytes": clip, "path": "x.mp4"} for clip in clips],
        "label": [1, 0],
        "caption": ["one", "two"],
    }
    pq.write_table(pa.table(content), tmp_path / "a.parquet")
    section = {"num_frames": 5, "image_size": 16}
    source, _ = open_sources(Data(path=str(tmp_path / "a.parquet"), **section))
    plain, _ = open_sources(Data(path=str(tmp_path / "clips"), **section))
    for index in range(2):
        assert (source[index]["video"] == plain[index]["video"]).all() and source[index]["label"] == 1 - index
        assert unpack_captions(source[index]["caption"][None]) == [content["caption"][index]]


def test_files_that_are_cut_off(tmp_path, plain):
    """Oracle: the file's name in the message; compressed Arrow, of which a sample cannot be read alone, is refused."""
    root = saved(tmp_path / "d", table(plain), 1)
    file = root / "data-00000-of-00001.arrow"
    whole = file.read_bytes()
    for size in (len(whole) // 2, len(whole) - 9, 30, 0):
        file.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match="data-00000-of-00001.arrow is no readable Arrow file"):
            open_images(root, 16)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table(plain).schema, options=options) as writer:
        writer.write_table(table(plain))
    with pytest.raises(ConfigError, match="is compressed inside"):
        open_images(root, 16)
    parquet = as_parquet()(tmp_path / "p", table(plain))
    cut = parquet / "train-00001-of-00002.parquet"
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="train-00001-of-00002.parquet is no readable parquet file"):
        open_images(parquet, 16)


_DAMAGE = """
import random, sys
from pathlib import Path
from dstrain.data.files.local import LocalFiles
from dstrain.data.formats import recognise_layout
from dstrain.data.formats.base import Request
files = sorted(path for root in sys.argv[2:] for path in Path(root).iterdir() if path.suffix in (".arrow", ".parquet"))
draw, refused = random.Random(0), 0
for number in range(int(sys.argv[1])):
    path = draw.choice(files)
    root, whole = path.parent, path.read_bytes()
    broken = bytearray(whole)
    for _ in range(draw.randint(1, 6)):
        broken[draw.choice((draw.randrange(len(whole)), draw.randrange(min(2000, len(whole))),
                            -1 - draw.randrange(min(4000, len(whole)))))] = draw.choice((0, 255, 127, 16))
    path.write_bytes(broken)
    try:
        layout = recognise_layout(str(root), LocalFiles(root), Request((".png",), captions=True))
        for part in layout.list_partitions():
            for sample in layout.iterate_samples(part):
                layout.read(sample.place)
    except Exception as error:
        refused += 1
    path.unlink()                              # a new file: the old one may still be mapped
    path.write_bytes(whole)
print("refused", refused)
"""
_BOMB = """
import resource, sys
from dstrain.data.files.local import LocalFiles
from dstrain.data.formats import recognise_layout
from dstrain.data.formats.base import Request
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
for root in sys.argv[1:]:
    layout = recognise_layout(root, LocalFiles(root), Request((".png",)))
    before = peak()
    samples = [sample for part in layout.list_partitions() for sample in layout.iterate_samples(part)]
    listed, error = peak(), ""
    try:
        layout.read(samples[-1].place)
    except Exception as refusal:
        error = refusal
    print(len(samples), listed - before, peak() - before, error)
"""


def test_damaged_files_do_not_end_the_process(tmp_path, plain):
    """Oracle: the process, which lives on after bytes of its files were changed at random: no crash, no huge memory."""
    roots = [
        str(FORMS[form](tmp_path / form, table(plain)))
        for form in ("save_to_disk", "parquet of datasets", "parquet, snappy")
    ]
    program = f"import resource\nresource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n{_DAMAGE}"
    done = subprocess.run(
        [sys.executable, "-c", program, "120", *roots], env=environment(), text=True, capture_output=True, timeout=300
    )
    assert done.stdout.startswith("refused "), f"{done.returncode}\n{done.stderr[-2000:]}"
    assert int(done.stdout.split()[1]) > 20


def test_bombs(tmp_path):
    """Oracle: peak memory of a process: 1.6 GB of images that a dictionary holds in 2 MB, compression in some bytes."""
    value = pa.array([b"\x89PNG" + bytes(2_000_000)] * 100)
    for compression in ("none", "zstd"):
        (tmp_path / compression).mkdir()
        with pq.ParquetWriter(
            tmp_path / compression / "x.parquet",
            pa.schema([("image", pa.binary())]),
            compression=compression,
            dictionary_pagesize_limit=1 << 28,
        ) as writer:
            writer.write_table(pa.table({"image": pa.chunked_array([value] * 8)}), row_group_size=1 << 20)
        assert (tmp_path / compression / "x.parquet").stat().st_size < 3_000_000
    done = subprocess.run(
        [sys.executable, "-c", _BOMB, str(tmp_path / "none"), str(tmp_path / "zstd")],
        env=environment(),
        text=True,
        capture_output=True,
        timeout=300,
    )
    (number, listing, reading, *error), zipped = (line.split() for line in done.stdout.splitlines())
    assert number == "800" and int(listing) < 500 and int(reading) < 500 and not error
    assert zipped[0] == "800" and int(zipped[1]) < 500 and int(zipped[2]) < 1800
    assert "x.parquet has row groups beyond 1.07 GB" in done.stdout


def test_files_of_datasets_itself(tmp_path, plain, monkeypatch):
    """Oracle: `datasets`: what it saves, writes as parquet and fetches by a name (here of a folder, laid out as on the
    hub) is read as the plain folder; needs the package.
    """
    datasets = pytest.importorskip("datasets", reason="pip install datasets (with pandas, 84 MB) to test against it")
    paths = sorted(plain.rglob("*.png"))
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["c0", "c1", "c2"]))
    content = datasets.Dataset.from_dict(
        {"image": [str(path) for path in paths], "label": [int(path.parent.name[1:]) for path in paths]},
        features=features,
    )
    content.save_to_disk(tmp_path / "saved", num_shards=2)
    same(open_images(tmp_path / "saved", 16), plain)
    datasets.DatasetDict(train=content, test=content.select(range(3))).save_to_disk(tmp_path / "both")
    same(open_images(tmp_path / "both", 16), plain)
    content.to_parquet(tmp_path / "content.parquet", batch_size=4)
    same(open_images(tmp_path / "content.parquet", 16), plain)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for split, part in (("train", content), ("test", content.select(range(3)))):
        part.to_parquet(tmp_path / "hub" / "data" / f"{split}-00000-of-00001.parquet")
    train, unseen = open_sources(Data(path=f"hf-dataset:{tmp_path / 'hub'}", image_size=16))
    same(train, plain)
    assert [unseen[index]["label"] for index in range(len(unseen))] == [0, 0, 0]
    assert len(open_images(f"hf-dataset:{tmp_path / 'hub'}:test", 16)) == 3
    arrow = np.array([len(sample["image"].tobytes()) for sample in content])
    assert (arrow == 40 * 30 * 3).all()
