"""Data that were read wrongly in silence, by kind, as test_silence.py: names, labels, keys and splits that people spell
in several ways, files that are left out, and remedies that did not help.
"""

import json
import os
import re
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dstrain.data.formats.clips import _have_caption_files
from dstrain.recipe import ConfigError, choose_write_remedy, load_recipe
from tests.data.formats import test_silence
from tests.data.formats.test_more_silence import put_form
from tests.data.formats.test_silence import encode, make_table, pack_tar, pack_zip, put, put_tables, read

CASES: dict[str, tuple[Callable, str]] = {}
case = partial(test_silence.case, cases=CASES)


def put_list(d: Path, columns: str, *values: str, suffix: str = ".png") -> Path:
    """A .csv with a picture for each of the values, which stand behind its name."""
    for number in range(len(values)):
        put(d / f"{number}{suffix}", 10 * number + 10)
    rows = [f"{number}{suffix},{value}" for number, value in enumerate(values)]
    (d / "l.csv").write_text("\n".join([f"file_name,{columns}", *rows]))
    return d / "l.csv"


# Splits in a column, whatever it is called and however they are written.
@pytest.mark.parametrize(
    "column, values, expected",
    [
        ("split", "0 0 1", "refused"),
        ("split", "0 0.0 0", "read"),
        ("split", "a b c", "read"),
        ("partition", "0 1 2", "refused"),
        ("is_training_image", "1 1 0", "refused"),
        ("is_train", "True true False", "refused"),
        ("is_train", "True true TRUE", "read"),
        ("Subset", "train train val", "refused"),
        ("data set", "train valid test", "refused"),
        ("Usage", "Training PublicTest PrivateTest", "refused"),
        ("set", "imagenet laion imagenet", "read"),
        ("fold", "0 1 2", "read"),
        ("note", "train val test", "read"),
    ],
)
def test_splits_in_a_column(tmp_path, column, values, expected):
    """Oracle: the rows, in a list and in parquet with pictures: those of several splits are never learned from as
    one.
    """
    values = values.split()
    put_tables(tmp_path / "t", {"0.parquet": make_table((10, 20, 30), **{column: values})})
    for path in (put_list(tmp_path, column, *values), tmp_path / "t"):
        text = read(path)
        assert text.startswith("refused") == (expected == "refused"), text
        assert expected == "read" or f"or give the column `{column}` another name" in text, text


def test_splits_in_columns_of_numbers_and_truth_values(tmp_path):
    """Oracle: the rows: what Arrow has as numbers and truth values says what its texts say."""
    for number, values in enumerate(([0, 1], [True, False], [0.0, 1.0])):
        put_tables(tmp_path / str(number), {"0.parquet": make_table((10, 20), split=values)})
        assert "and all would be learned from" in read(tmp_path / str(number))


# Keys of JSON that stand twice.
TWICE = '{"label": 1, "caption": "a", "label": 0, "caption": "b"}'


@case("refused: data.path=D/l.jsonl, line 2: the key label stands there twice, with two values: keep one")
def two_labels_in_a_line(d):
    put(d / "0.png", 10)
    (d / "l.jsonl").write_text('{"file_name": "0.png", "label": 1}\n{"file_name": "0.png", "label": 1, "label": 0}')
    return read(d / "l.jsonl")


@case("10:1")
def one_label_twice_in_a_line(d):
    put(d / "0.png", 10)
    (d / "l.jsonl").write_text('{"file_name": "0.png", "label": 1, "label": 1}')
    return read(d / "l.jsonl")


@case("refused: data.path=D/x.tar: x.tar is no readable tar file .0.json: the key label stands there twice")
def two_labels_in_a_tar(d):
    pack_tar(d / "x.tar", ("0.png", encode(10)), ("0.json", TWICE.encode()))
    return read(d / "x.tar")


@case("10")
def two_labels_in_a_tar_that_nobody_wants(d):
    pack_tar(d / "x.tar", ("0.png", encode(10)), ("0.json", TWICE.encode()))
    return read(d / "x.tar", labels="none")


@case("bad.*caption.*")
def two_captions_beside_a_picture(d):
    put(d / "0.png", 10)
    (d / "0.json").write_text(TWICE)
    return read(d, captions=True)


@case("refused: data.path=D: dataset.json cannot be read .the key labels stands there twice")
def two_lists_in_a_dataset_json(d):
    put(d / "0.png", 10)
    (d / "dataset.json").write_text('{"labels": [["0.png", 1]], "labels": [["0.png", 0]]}')
    return read(d)


@case("refused: data.path=D/x.zip: .*dataset.json cannot be read .the key labels stands there twice")
def two_lists_in_a_zip(d):
    listed = b'{"labels": [["0.png", 1]], "labels": [["0.png", 0]]}'
    pack_zip(d / "x.zip", ("0.png", encode(10)), ("dataset.json", listed))
    return read(d / "x.zip")


@case("refused: data.path=D: dataset.json names a file twice, 0.png: leave")
def a_file_twice_in_a_dataset_json(d):
    put(d / "0.png", 10)
    (d / "dataset.json").write_text('{"labels": [["0.png", 1], ["0.png", 0]]}')
    return read(d)


# Labels and captions that say that there is none.
@pytest.mark.parametrize("form", ["cls", "json", "list.jsonl", "list.csv", "parquet", "arrow"])
@pytest.mark.parametrize("missing", ["nan", "NaN", "<NA>", "[1, 0.5]"])
def test_labels_that_say_that_there_is_none(tmp_path, form, missing):
    """Oracle: what pandas and numpy write of a missing value, and lists: none is a class in any form."""
    if form == "list.csv":
        missing = f'"{missing}"'
    text = read(put_form(tmp_path, form, ["cat", missing]))
    assert "is no class, but a value that is not there, or a list" in text, text


@case("10:dog 20:nan")
def a_class_that_is_called_nan(d):
    (d / "classes.txt").write_text("dog\nnan\n")
    return read(put_list(d, "label", "dog", "nan"), class_list=str(d / "classes.txt"))


@case("10:bird 20:nan")
def a_folder_that_is_called_nan(d):
    put(d / "nan" / "0.png", 20)
    put(d / "bird" / "0.png", 10)
    return read(d)


@case("10=a bad.*caption.* 30=banana")
def captions_that_say_that_there_is_none(d):
    return read(put_list(d, "text", "a", "nan", "banana"), captions=True)


@pytest.mark.parametrize("labels", [b"\1\0\0\0 \0\0\0\0", b"1\n2 3\n4", b"cat\t1 dog\t2"])
def test_labels_that_are_no_line_of_text(tmp_path, labels):
    """Oracle: the bytes of .cls: binary numbers and several lines are no names of classes."""
    members = [(f"{number}.cls", label) for number, label in enumerate(labels.split(b" "))]
    pack_tar(tmp_path / "x.tar", ("0.png", encode(10)), ("1.png", encode(20)), *members)
    text = read(tmp_path / "x.tar")
    assert text.startswith("refused") or ":" not in text, text  # where none can be read, there are no classes


@pytest.mark.parametrize("name, fault", [(b"a\nb", "a line break"), (b"caf\xe9", "bytes that are no UTF-8")])
def test_class_folders_that_no_list_can_name(tmp_path, name, fault):
    """Oracle: the names: classes are written into lists and reports, a line each, in UTF-8."""
    put(tmp_path / "a" / "0.png", 10)
    os.mkdir(os.fsencode(tmp_path) + b"/" + name)
    put(Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)) / "0.png", 20)
    assert f"holds {fault}" in read(tmp_path)
    assert set(read(tmp_path, labels="none").split()) == {"10", "20"}


@case("refused: .*the classes 'True' and 'true' look alike: call both the same")
def truth_values_in_two_spellings(d):
    return read(put_list(d, "label", "True", "true", "False"))


# Texts beside pictures, however their names are spelled.
@pytest.mark.parametrize("text", ["{}.txt", "{}.TXT", "{}.Txt", "{}.json", "{}.JSON"])
@pytest.mark.parametrize("forms", ["NFC NFC", "NFC NFD", "NFD NFC", "NFD NFD"])
def test_texts_are_found_in_any_spelling(tmp_path, text, forms):
    """Oracle: the names as a person reads them."""
    image, beside = (unicodedata.normalize(form, "caf\u00e9") for form in forms.split())
    for name, stem, value in ((image, beside, 10), ("b", "b", 20)):
        put(tmp_path / f"{name}.PNG", value)
        content = f"t{value}"
        file = tmp_path / text.format(stem)
        file.write_text(json.dumps({"caption": content}) if "json" in text.lower() else content)
    assert sorted(read(tmp_path, captions=True).split()) == ["10=t10", "20=t20"]


def test_texts_beside_clips_in_another_spelling(tmp_path):
    """Oracle: the name: a caption in X.TXT is no reason to take the name of the class for it."""
    for name in ("0.mp4", "1.mp4", "0.txt", "1.TXT"):
        (tmp_path / name).write_text("t")
    with pytest.raises(ConfigError, match=r"the text beside 1.mp4 is called '1.TXT': rename it '1.txt'"):
        _have_caption_files(str(tmp_path), ["0.mp4", "1.mp4"])


@case("10=t; 1 without a caption are left out")
def a_picture_without_a_text_in_a_tar(d):
    pack_tar(d / "x.tar", ("0.png", encode(10)), ("0.txt", b"t"), ("1.png", encode(20)))
    return read(d / "x.tar", captions=True)


@case(r"bad\(its caption is empty, or cannot be read\)")
def a_wide_text_without_its_mark(d):
    pack_tar(d / "x.tar", ("0.png", encode(10)), ("0.txt", "t".encode("utf-16-le")))
    return read(d / "x.tar", captions=True)


@pytest.mark.parametrize("captions", [True, False])
def test_inner_labels_beside_captions(tmp_path, captions):
    """Oracle: the file: its labels are wanted, with captions as without."""
    put(tmp_path / "a" / "0.png", 10)
    (tmp_path / "a" / "0.txt").write_text("t")
    (tmp_path / "a" / "dataset.json").write_text('{"labels": [["0.png", 1]]}')
    assert "a/dataset.json tells the labels of files" in read(tmp_path, captions=captions)


# What is left out is counted.
@case("20:1; 2 keys with a text or label and without one of the images are left out")
def labels_without_a_picture(d):
    members = [("0.cls", b"0"), ("1.cls", b"1"), ("1.png", encode(20)), ("2.json", b'{"label": 1}'), ("3.npy", b"x")]
    pack_tar(d / "x.tar", *members)
    return read(d / "x.tar")


@case("20; files of other types are left out, .tif 1: .*")
def labels_of_a_picture_of_another_type(d):
    pack_tar(d / "x.tar", ("0.cls", b"0"), ("0.tif", b"x"), ("1.png", encode(20)))
    return read(d / "x.tar").replace(":1", "")


@case("10; 5 files whose names go on behind a suffix, .*, are left out; 1 files without a suffix are left out")
def names_that_go_on_behind_a_suffix(d):
    put(d / "0.png", 10)
    for name in ("1.png~", "2.jpg.1", "3.PNG?w=640", "4.jpg_large", "5.jpg!d", "6", "7.png.json", "8.jpg.xmp"):
        (d / name).write_bytes(encode(20))
    return read(d)


# Remedies that help.
@pytest.mark.parametrize(
    "content, remedy",
    [
        ("file_name;label\n0.png;1\n", "put commas between fields, and not ';'"),
        ("file_name\tlabel\n0.png\t1\n", "put commas between fields, and not '\\t'"),
        ("0.png,1\n1.png,0\n", "write a line with the names of the columns, as file_name,label, above it"),
        ("id,label\n0.png,1\n", "name it, data.columns={path: NAME}"),
        ("file_name,label\r0.png,1\r", "if lines end in carriage returns, write line feeds"),
        ("file_name,label\n0.png,a\0\n", "line 2: a NUL is in no text: take it away"),
    ],
)
def test_a_table_that_is_written_otherwise(tmp_path, content, remedy):
    """Oracle: by hand: what is wrong with the table."""
    put(tmp_path / "0.png", 10)
    (tmp_path / "l.csv").write_text(content, newline="")
    assert remedy in read(tmp_path / "l.csv")


@pytest.mark.parametrize("text", ['"a\n1,b\n2,c"', '"a\r\n1,b\r\n2,c"'])
def test_a_quotation_mark_that_swallows_names_without_a_suffix(tmp_path, text):
    """Oracle: the rows: a line of a text that names a file which is there is a row of its own."""
    for number in range(3):
        put(tmp_path / str(number), 10 * number + 10)
    (tmp_path / "l.csv").write_text(f"file_name,text\n0,{text}\n", newline="")
    assert "line 2: its text holds the line 1,b: if a quotation mark" in read(tmp_path / "l.csv", captions=True)
    (tmp_path / "l.csv").write_text('file_name,text\n0,"a, big\ncat, say"\n1,b\n')
    assert read(tmp_path / "l.csv", captions=True) == "10=a, big\ncat, say 20=b"


def test_labels_that_cannot_be_read_name_the_file_once(tmp_path):
    """Oracle: by hand."""
    pq.write_table(make_table((10,), [0.5]), tmp_path / "0.parquet")
    assert read(tmp_path).count("data.path=") == 1


@pytest.mark.parametrize(
    "number, remedy", [(28, "make room there, or"), (13, "allow writing there, or"), (30, "allow")]
)
def test_the_remedy_for_what_cannot_be_written(number, remedy):
    """Oracle: the errors of the system: no room is of help where nobody may write."""
    assert choose_write_remedy(OSError(number, os.strerror(number)), "make room there, or name another").startswith(
        remedy
    )


def test_a_path_that_is_no_text(tmp_path):
    """Oracle: by hand: no quotation mark helps a path whose bytes are no UTF-8."""
    with pytest.raises(ConfigError, match="it holds bytes that are no UTF-8: rename the file or folder, or name a lin"):
        load_recipe(None, [f"data.path={tmp_path}/caf\udce9"])


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_read_wrongly_in_silence(tmp_path, name):
    """Oracle: by hand, what was written: it is read, or it is said."""
    make, expected = CASES[name]
    got = make(tmp_path).replace(str(tmp_path), "D")
    assert re.fullmatch(expected if not expected.startswith("refused") else f"{expected}.*", got), got
