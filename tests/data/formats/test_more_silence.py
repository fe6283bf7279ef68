"""Data that were read wrongly in silence, by kind, as test_silence.py: labels by a list, turned pictures, tables' own
splits and shards, metadata in folders and zips, texts and labels that a mistake hides.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.formats import test_silence
from tests.data.formats.test_silence import encode, make_table, pack_tar, pack_zip, put_tables, read

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


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_read_wrongly_in_silence(tmp_path, name):
    """Oracle: by hand, what was written: it is read, or it is said."""
    make, expected = CASES[name]
    got = make(tmp_path).replace(str(tmp_path), "D")
    assert re.fullmatch(expected if not expected.startswith("refused") else f"{expected}.*", got), got
