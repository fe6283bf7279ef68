"""Data that were read wrongly in silence, by kind, as test_silence.py: labels by a list, turned pictures, tables' own
splits and shards, metadata in folders and zips, texts and labels that a mistake hides.
"""

import io
import json
import re
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

from dstrain.data.decode.pixels import to_tensor
from dstrain.data.open import open_sources
from dstrain.data.sources.sizes import read_image_size
from dstrain.metrics.compared import open_recipe_reference
from dstrain.metrics.images import open_image_set
from dstrain.recipe import ConfigError, Data
from tests.data.formats import test_silence
from tests.data.formats.test_silence import encode, make_table, pack_tar, pack_zip, put, put_tables, read

CASES: dict[str, tuple[Callable, str]] = {}
case = partial(test_silence.case, cases=CASES)


# A class list of numbers, in every form.
def put_form(d: Path, form: str, labels: list) -> Path:
    """Two pictures, 10 and 20, with their labels, in one of the forms that have labels."""
    root, files = d / form, {f"{number}.png": encode(10 * number + 10) for number in range(2)}
    root.mkdir()
    rows = [{"file_name": name, "label": label} for name, label in zip(files, labels)]
    listed = json.dumps({"labels": [[row["file_name"], row["label"]] for row in rows]}).encode()
    if form in ("parquet", "arrow"):
        return put_tables(root, {f"0.{form}": make_table((10, 20), labels)})
    if form == "zip":
        pack_zip(root / "x.zip", *files.items(), ("dataset.json", listed))
        return root / "x.zip"
    if form in ("cls", "json"):
        texts = [str(label) if form == "cls" else json.dumps({"label": label}) for label in labels]
        members = {f"{number}.{form}": text.encode() for number, text in enumerate(texts)}
        pack_tar(root / "x.tar", *(files | members).items())
        return root / "x.tar"
    for name, content in files.items():
        (root / name).write_bytes(content)
    if form == "dataset.json":
        (root / form).write_bytes(listed)
        return root
    path = root / form
    if form == "list.parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        lines = {
            "list.jsonl": [json.dumps(row) for row in rows],
            "list.csv": ["file_name,label", *(f"{row['file_name']},{row['label']}" for row in rows)],
            "list.txt": [f"{row['file_name']} {row['label']}" for row in rows],
        }
        path.write_text("\n".join(lines[form]))
    return path


FORMS = ["parquet", "arrow", "zip", "dataset.json", "cls", "json", "list.parquet", "list.jsonl", "list.csv", "list.txt"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "lines, labels, expected",
    [
        ("5 3 9", [3, 5], "10:3 20:5"),
        ("1 0", [0, 1], "10:0 20:1"),
        ("05 03 09", [3, 5], "10:03 20:05"),
        ("1 2 3", [0, 1], "refused: .*the class '?0'? is not among the 3 of data.class_list="),
        ("5 3 9", [2, 3], "refused: .*the class '?2'? is not among the 3 of data.class_list="),
        ("cat 7 dog", [7, 2], "10:7 20:dog"),
        ("cat dog", [1, 0], "10:dog 20:cat"),
        ("cat dog", [1, 2], "refused: .*the class 2 is not among the 2 of data.class_list="),
    ],
)
def test_a_class_list_and_numbers(tmp_path, form, lines, labels, expected):
    """Oracle: the lines of the list: a number is the class of that name in every form of data, else it counts lines,
    where not all are numbers.
    """
    (tmp_path / "classes.txt").write_text("\n".join(lines.split()))
    assert re.match(expected, read(put_form(tmp_path, form, labels), class_list=str(tmp_path / "classes.txt")))


@pytest.mark.parametrize("form", ["parquet", "arrow", "list.parquet", "list.jsonl"])
@pytest.mark.parametrize("lines, expected", [("no yes", "10:yes 20:no"), ("true false", "10:true 20:false")])
def test_a_class_list_and_truth_values(tmp_path, form, lines, expected):
    """Oracle: the lines of the list: true is the class of that name, else 1."""
    (tmp_path / "classes.txt").write_text("\n".join(lines.split()))
    assert read(put_form(tmp_path, form, [True, False]), class_list=str(tmp_path / "classes.txt")) == expected


# Where a picture's file says how it is turned.
def make_exif(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif.tobytes()


def make_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


XMP = '<x:xmpmeta><rdf:Description tiff:Orientation="{}"/></x:xmpmeta>'
PROFILE = "\nexif\n{:8}\n{}\n"
LATE_CHUNKS = {
    "eXIf": lambda turn: (b"eXIf", make_exif(turn)[6:]),
    "iTXt": lambda turn: (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP.format(turn).encode()),
    "zTXt": lambda turn: (
        b"zTXt",
        b"Raw profile type exif\0\0"
        + zlib.compress(PROFILE.format(len(make_exif(turn)), make_exif(turn).hex()).encode()),
    ),
}


def make_turned(place: str, turn: int) -> bytes:
    """A picture of 24 x 8 pixels, black on its left and white on its right, with its orientation at a place."""
    image, file = Image.new("RGB", (24, 8)), io.BytesIO()
    image.paste("white", (12, 0, 24, 8))
    if place in LATE_CHUNKS:
        image.save(file, "PNG")
        at = file.getvalue().rindex(b"IEND") - 4
        return file.getvalue()[:at] + make_chunk(*LATE_CHUNKS[place](turn)) + file.getvalue()[at:]
    form, _, kind = place.partition(" ")
    texts = {"xmp": XMP.format(turn).encode()} if kind == "xmp" else {"exif": make_exif(turn)}
    more = {"icc_profile": bytes(200_000)} if kind == "after a profile" else {}
    image.save(file, form, quality=100, **texts, **more)
    return file.getvalue()


PLACES = [*LATE_CHUNKS, "PNG", "JPEG", "JPEG after a profile", "JPEG xmp", "WEBP", "WEBP xmp"]


@pytest.mark.parametrize("turn", [1, 3, 6, 8, 99])
@pytest.mark.parametrize("place", PLACES)
def test_the_size_of_a_turned_picture(tmp_path, place, turn):
    """Oracle: Pillow's exif_transpose of the whole picture: its size chooses the bucket, wherever it says that it is
    turned; a picture of --reference stands as it does in training.
    """
    content = make_turned(place, turn)
    for name in ("0.png", "1.png"):
        (tmp_path / name).write_bytes(content)
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        plain = to_tensor(image.convert("RGB"))
        upright = to_tensor(ImageOps.exif_transpose(image).convert("RGB"))
    assert upright.shape == ((3, 24, 8) if turn in (6, 8) else (3, 8, 24))
    for data in (Data(path=str(tmp_path), image_size=8, upright=flag) for flag in (True, False)):
        source, expected = open_sources(data)[0], upright if data.upright else plain
        assert read_image_size(source.layout, source.index.read_place(0)) == (expected.shape[2], expected.shape[1])
        (batch,) = open_image_set(tmp_path, "--reference", data.upright).iterate_batches(2)
        assert torch.equal(batch.images, torch.stack([expected] * 2))
    assert torch.equal(next(open_image_set(tmp_path, "--reference").iterate_batches(2)).images[0], upright)


def test_buckets_of_pictures_that_are_not_turned(tmp_path):
    """Oracle: the recipe: one index serves data that are turned and data that are not, and their buckets differ."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "0.jpg").write_bytes(make_turned("JPEG", 6))
    shapes = []
    for upright in (True, False):
        data = Data(
            path=str(tmp_path / "d"),
            image_size=16,
            buckets=[(8, 24), (24, 8)],
            upright=upright,
            index=str(tmp_path / "i"),
        )
        shapes.append(tuple(open_sources(data)[0][0]["image"].shape))
    assert shapes == [(3, 24, 8), (3, 8, 24)]


def test_samples_reference_is_turned_as_the_data(tmp_path):
    """Oracle: the recipe: pictures that a run compares with are turned where its own are."""
    for name in ("0.png", "1.png"):
        (tmp_path / name).write_bytes(make_turned("PNG", 6))
    for upright, expected in ((True, [0, 255]), (False, [0, 0])):
        data = Data(path="builtin:fashion", image_size=8, upright=upright)
        images = open_recipe_reference(str(tmp_path), data, {"fid": object()}, 0).images
        values = next(images.iterate_batches(2)).images[0][0]
        assert [int(values[0, 0]), int(values[-1, 0])] == expected


# Splits and rows that tables name themselves, and shards that are missing.
def put_list(d: Path, form: str, columns: dict[str, list]) -> Path:
    """A list of pictures 10, 20 and 30 with columns, as a table of one of the forms."""
    for number in range(3):
        put(d / f"{number}.png", 10 * number + 10)
    table, path = pa.table({"file_name": ["0.png", "1.png", "2.png"]} | columns), d / form
    if form.endswith(".parquet"):
        pq.write_table(table, path)
    elif form.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        comma = "\t" if form.endswith(".tsv") else ","
        rows = [table.column_names, *(map(str, row.values()) for row in table.to_pylist())]
        path.write_text("".join(comma.join(row) + "\n" for row in rows))
    return d if form.startswith("metadata") else path


@pytest.mark.parametrize(
    "values, read_all",
    [
        (["train", "test", "train"], False),
        (["train", "train", "extra"], False),
        (["Validation", "Train", "Train"], False),
        (["train", "train", "training"], True),
        (["top", "left", "top"], True),
    ],
)
@pytest.mark.parametrize("form", ["l.csv", "l.tsv", "l.jsonl", "l.parquet", "metadata.csv", "x.parquet", "x.arrow"])
def test_a_column_of_splits(tmp_path, form, values, read_all):
    """Oracle: the column: rows of one split are read, and those of several refused, since all would be learned from."""
    columns = {"label": ["a", "b", "a"], "Split": values}
    if form.startswith("x."):
        path = put_tables(tmp_path, {form: make_table((10, 20, 30), columns["label"], Split=values)})
    else:
        path = put_list(tmp_path, form, columns)
    text = read(path)
    if read_all:
        assert text == "10:a 20:b 30:a"
    else:
        first, second = (values[0], next(value for value in values if value != values[0]))
        assert f"is of the split {second}, and rows before it of {first}, and all would be" in text, text
    if not form.startswith("metadata"):
        assert read(path, columns={"label": "Split"}) == " ".join(
            f"{10 * number + 10}:{value}" for number, value in enumerate(values)
        )


@case("10:a 20:b 30:a")
def rows_of_one_split(d):
    tables = {f"{name}.parquet": make_table(values, labels, split=["train"] * len(values))
              for name, values, labels in (("a", (10, 20), ["a", "b"]), ("b", (30,), ["a"]))}  # fmt: skip
    return read(put_tables(d, tables))


@case("refused: data.path=D: b.parquet/0 is of the split test, and rows before it of train")
def rows_of_another_split_in_the_second(d):
    return read(put_tables(d, {"a.parquet": make_table((10,), split=["train"]),
                               "b.parquet": make_table((20,), split=["test"])}))  # fmt: skip


def put_saved(root: Path, value: int, **state: list) -> Path:
    put_tables(root, {"data-00000-of-00001.arrow": make_table((value, value + 1))})
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]} | state
    (root / "state.json").write_text(json.dumps(state))
    return root


def put_saved_splits(d: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        put_saved(d / name, 10 * number)
    (d / "dataset_dict.json").write_text(json.dumps({"splits": names}))
    return d


@case("refused: data.path=D: the splits train and Training are called alike, .*: write data.path=D/train, or join them")
def two_saved_splits_that_mean_one(d):
    return read(put_saved_splits(d, "train", "Training"))


@case("10 11; files of other splits are not among them, validation 1")
def saved_splits(d):
    return read(put_saved_splits(d, "dev", "train"))


@case("refused: data.path=D: state.json chooses rows by _indices_data_files, .*flatten_indices")
def rows_that_were_filtered(d):
    return read(put_saved(d, 10, _indices_data_files=[{"filename": "indices.arrow"}]))


@case("refused: data.path=D: train/state.json chooses rows by _indices_files, .*flatten_indices")
def rows_of_a_split_that_were_filtered(d):
    put_saved_splits(d, "train", "test")
    put_saved(d / "train", 10, _indices_files=[{"filename": "indices.arrow"}])
    return read(d)


@case("10 11")
def rows_that_were_not_filtered(d):
    return read(put_saved(d, 10, _indices_data_files=[], _indices_files=None))


def test_two_sets_of_shards(tmp_path):
    """Oracle: the names: an older set of the same data beside the newer one is named; each alone is read."""
    for number, name in enumerate(("x-00000-of-00001", "x-00000-of-00002", "x-00001-of-00002"), 1):
        put_tables(tmp_path, {f"{name}.parquet": make_table((10 * number,))})
    got = read(tmp_path)
    assert "x-*-of-00001.parquet and x-*-of-00002.parquet are two sets of shards of one name" in got, got
    assert read(tmp_path / "x-*-of-00002.parquet") == "20 30"


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".tar"])
@pytest.mark.parametrize(
    "names, expected",
    [
        ("x-00000-of-00002 x-00001-of-00002", "10 20"),
        ("x-00001-of-00002 x-00002-of-00002", "10 20"),
        ("a/x-00000-of-00002 a/x-00001-of-00002", "10 20"),
        (
            "x-00000-of-00003 x-00002-of-00003",
            r"refused: .*of the 3 shards {0}, 2 are there: .*'D/{0}' for these alone",
        ),
        ("x-00000-of-00002 y-00000-of-00001", r"refused: .*of the 2 shards {0}, 1 are there"),
        ("train-0 train-2", "10 20"),
    ],
)
def test_shards_that_are_missing(tmp_path, suffix, names, expected):
    """Oracle: the names: a folder that lacks some is refused, and of a pattern it is said how many there are not."""
    names = names.split()
    for number, name in enumerate(names, 1):
        if suffix == ".tar":
            pack_tar(tmp_path / f"{name}.tar", (f"{number}.png", encode(10 * number)))
        else:
            put_tables(tmp_path, {f"{name}{suffix}": make_table((10 * number,))})
    shards = f"x-*-of-{names[0][-5:]}{suffix}"
    if suffix == ".tar" and "/" in names[0]:
        return  # tars in a folder of their own are named by it
    got = read(tmp_path).replace(str(tmp_path), "D")
    assert re.match(expected.replace("{0}", re.escape(shards)), got), got
    if expected.startswith("refused"):
        left = int(names[0][-5:]) - len([name for name in names if name[0] == "x"])
        assert read(tmp_path / shards).endswith(f"; {left} shards of {shards} are left out")


# Tables of what files are, in folders within and in zips.
def put_table_within(d: Path, name: str, content: str) -> Path:
    for number, folder in enumerate("ab"):
        put(d / folder / "0.png", 10 * number + 10)
    (d / "a" / name).write_text(content)
    return d


LABELLED = '{"labels": [["0.png", 3]]}'


@pytest.mark.parametrize(
    "name, content, captions, expected",
    [
        ("metadata.csv", "file_name,label\n0.png,cat\n", False, "labels"),
        ("metadata.jsonl", '{"file_name": "0.png", "text": "a", "label": 1}', True, "labels and captions"),
        ("metadata.jsonl", '{"file_name": "0.png", "text": "a"}', True, "captions"),
        ("metadata.jsonl", '{"file_name": "0.png", "text": "a"}', False, None),
        ("metadata.csv", "camera,label\nold,1\n", False, None),
        ("dataset.json", LABELLED, False, "labels"),
        ("dataset.json", '{"labels": null}', False, None),
        ("dataset.json", '{"name": "x"}', False, None),
    ],
)
def test_tables_in_folders_within(tmp_path, name, content, captions, expected):
    """Oracle: the table: what it says of labels and captions that are wanted is not passed over in silence; the remedy
    reads it."""
    root = put_table_within(tmp_path, name, content)
    if expected is None and not captions:
        assert read(root) == "10:a 20:b"
    else:
        text = read(root, captions=captions)
        assert text.startswith(f"refused: data.path={root}: a/{name} tells the {expected} of files"), text
        assert f"write data.path={root / 'a'}, or join" in text
        assert read(root / "a", captions=captions).startswith("10")


@case("10:a 20:b; 1 metadata.csv, which is read beside unpacked files alone, are left out")
def metadata_in_a_zip(d):
    pack_zip(d / "x.zip", ("a/0.png", encode(10)), ("b/1.png", encode(20)), ("a/metadata.csv", b"file_name,label\n"))
    return read(d / "x.zip")


@case("10:a 20:b; 2 dataset.json in a folder within are left out")
def labels_in_folders_of_a_zip(d):
    members = [(f"{folder}/dataset.json", LABELLED.encode()) for folder in "ab"]
    pack_zip(d / "x.zip", ("a/0.png", encode(10)), ("b/0.png", encode(20)), *members)
    return read(d / "x.zip")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("names", [("0.png", "0.png"), ("0.png", "./0.png"), ("dataset.json", "dataset.json")])
def test_two_members_of_one_name_in_a_zip(tmp_path, names):
    """Oracle: the names: nobody can say which of the two is meant, in data and in what metrics read."""
    contents = [encode(10), encode(20)] if names[0] == "0.png" else [b'{"labels": [["2.png", %d]]}' % n for n in (0, 1)]
    pack_zip(tmp_path / "x.zip", ("2.png", encode(30)), *zip(names, contents))
    assert f"it has two members {names[0]}" in read(tmp_path / "x.zip")
    with pytest.raises(ConfigError, match=f"it has two members {names[0]}"):
        open_image_set(tmp_path / "x.zip", "--reference")


@case("10:1=t0 20:0=t1; 1 without a caption are left out")
def labels_beside_captions(d):
    for number in range(3):
        put(d / f"{number}.png", 10 * number + 10)
    for number in range(2):
        (d / f"{number}.txt").write_text(f"t{number}")
    (d / "dataset.json").write_text(json.dumps({"labels": [["0.png", 1], ["1.png", 0], ["2.png", 0]]}))
    return read(d, captions=True)


@case("refused: data.path=D: dataset.json has no label of 1.png, of 2 images")
def labels_of_some_beside_captions(d):
    for number in range(2):
        put(d / f"{number}.png", 10)
        (d / f"{number}.txt").write_text("t")
    (d / "dataset.json").write_text(LABELLED)
    return read(d, captions=True)


# Texts and labels that a mistake hides.
@pytest.mark.parametrize(
    "content, expected",
    [
        (
            'file_name,text\n0.png,"a\n1.png,b\n2.png,c"\n',
            "refused: .*l.csv, line 2: its text holds the line 1.png,b: ",
        ),
        (
            'file_name,text,label\n0.png,"a,1\n1.png,b,2\n2.png,c",3\n',
            "refused: .*line 2: its text holds the line 1.png",
        ),
        ('text,file_name\n"a,0.png\nb,1.png\nc",2.png\n', "refused: .*line 2: its text holds the line a,0.png"),
        ('file_name,text\r\n0.png,"a\r\n1.png,b\r\n2.png,c"\r\n', "refused: .*line 2: its text holds the line 1.png,b"),
        ('note,file_name,text\n"a,0.png,b\nc",1.png,d\n', "refused: .*line 2: its text holds the line a,0.png,b"),
        ('file_name,text\n0.png,"a, b\nc, 1.5, d"\n1.png,d\n', "10=a, b\nc, 1.5, d 20=d"),
        ('file_name,text\n0.png,"as in 1.png and so on,\nwhich is ""x"""\n1.png,d\n', "10=as in 1.png .* 20=d"),
        ('file_name,text\n\n0.png,"a\nb"\n\n1.png,c\n', "10=a\nb 20=c"),
    ],
)
def test_a_quotation_mark_that_is_left_open(tmp_path, content, expected):
    """Oracle: the rows: one that is swallowed by the text before it is noticed by its file; texts of several lines are
    read."""
    for number in range(3):
        put(tmp_path / f"{number}.png", 10 * number + 10)
    (tmp_path / "l.csv").write_text(content, newline="")
    assert re.match(expected, read(tmp_path / "l.csv", captions=True), re.DOTALL)


@pytest.mark.parametrize("form", ["cls", "json", "list.jsonl", "list.csv"])
@pytest.mark.parametrize("labels", [[True, 1], [0, "false"], ["true", 1.0]])
def test_truth_values_beside_numbers(tmp_path, form, labels):
    """Oracle: the labels: true is no third class beside 0 and 1."""
    labels = [str(label).lower() if form in ("cls", "list.csv") else label for label in labels]
    text = read(put_form(tmp_path, form, labels))
    assert "labels are numbers and truth values: write all as numbers" in text, text


@pytest.mark.parametrize("names", [("caf\u00e9", "cafe\u0301"), ("cat", "cat "), ("a  b", "a b")])
def test_classes_that_look_alike(tmp_path, names):
    """Oracle: what people see: two names of one class are no two classes, of folders, tables and columns."""
    for number, name in enumerate(names):
        put(tmp_path / "d" / name / f"{number}.png", 10)
    put_tables(tmp_path / "t", {"0.parquet": make_table((10, 20), [0, 1], list(names))})
    pack_zip(tmp_path / "x.zip", *((f"{name}/{number}.png", encode(10)) for number, name in enumerate(names)))
    for path in (tmp_path / "d", tmp_path / "t", tmp_path / "x.zip"):
        assert "look alike: call both the same" in read(path)
    put(tmp_path / "e" / "A" / "0.png", 10)
    put(tmp_path / "e" / "a" / "1.png", 20)
    assert read(tmp_path / "e") == "10:A 20:a"  # which are letters, say


@pytest.mark.parametrize("names", ["0.cls 0.cls", "0.cls 0.CLS", "0.json 0.json", "0.txt 0.txt"])
def test_two_texts_of_one_name_in_a_tar(tmp_path, names):
    """Oracle: the names: nobody can say which of the two is meant."""
    contents = [b'{"label": 1}', b'{"label": 0}'] if "json" in names else [b"1", b"0"]
    pack_tar(tmp_path / "x.tar", ("0.png", encode(10)), *zip(names.split(), contents))
    assert f"it has two members {names.split()[1]}" in read(tmp_path / "x.tar", captions="txt" in names)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_read_wrongly_in_silence(tmp_path, name):
    """Oracle: by hand, what was written: it is read, or it is said."""
    make, expected = CASES[name]
    got = make(tmp_path).replace(str(tmp_path), "D")
    assert re.fullmatch(expected if not expected.startswith("refused") else f"{expected}.*", got), got
