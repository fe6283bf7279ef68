"""Lists of files: tables, Hugging Face's metadata and the lists of sets of videos, and what is wrong with them."""

import csv
import json
import os
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from dstrain.data.batches import Batches
from dstrain.data.decode.clips import Cut
from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.files.arrow import ParquetFile
from dstrain.data.files.local import LocalFiles
from dstrain.data.files.tables import open_table
from dstrain.data.formats import recognise_layout
from dstrain.data.formats.base import Request
from dstrain.data.open import open_sources
from dstrain.data.source import Source
from dstrain.data.sources.images import open_images
from dstrain.data.sources.videos import open_videos
from dstrain.encoders.text import unpack_captions
from dstrain.recipe import ConfigError, Data
from tests.support.clips import LOSSLESS, moving, write
from tests.support.pictures import folder, picture
from tests.support.sources import global_batches, same

KINDS = ("csv", "tsv", "jsonl", "parquet")
CAPTIONED = Request(SUFFIXES, captions=True)
Row = dict[str, object]


def write_table(path: Path, rows: list[Row]) -> Path:
    """A table as pandas, json and pyarrow write it."""
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    else:
        with open(path, "w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            table.writeheader()
            table.writerows(rows)
    return path


def rows_of(root: Path, path: str = "path", label: str = "label", caption: str = "caption") -> list[Row]:
    """A row for each picture below a folder of classes, in order."""
    names = sorted(file.relative_to(root).as_posix() for file in root.rglob("*.png"))
    return [{caption: f'"{name}", a\ncaf\u00e9', path: name, label: name.split("/")[0]} for name in names]


def listed(path: Path, request: Request = CAPTIONED) -> list:
    layout = recognise_layout(str(path), LocalFiles(path), request)
    return [sample for part in layout.list_partitions() for sample in layout.iterate_samples(part)]


def test_the_footer_of_a_table_is_read_once(tmp_path, monkeypatch):
    """Oracle: the files that are opened: as many for a table of 100 row groups as for one of 2."""
    opened, init = [], ParquetFile.__init__
    monkeypatch.setattr(ParquetFile, "__init__", lambda self, *words: opened.append(words) or init(self, *words))
    for row in range(3):
        picture(row).save(tmp_path / f"{row}.png")
    for groups in (2, 100):
        rows = [{"path": f"{row % 3}.png", "label": "a"} for row in range(3 * groups)]
        path = write_table(tmp_path / f"{groups}.parquet", rows)
        opened.append(groups)
        assert len(listed(path, Request(SUFFIXES))) == 3 * groups
    assert opened.index(100) - 1 == len(opened) - opened.index(100) - 1 <= 2


@pytest.mark.parametrize(
    "name", [f"list.{kind}" for kind in KINDS] + [f"metadata.{kind}" for kind in KINDS[::2] + KINDS[3:]]
)
def test_a_table_is_the_folder_that_it_lists(tmp_path, name):
    """Oracle: the plain folder of classes: order, names, labels, pixels; and the captions that were written."""
    root = folder(tmp_path / "d", 3, 3)
    plain, whole = open_images(root, 16), name.startswith("metadata")
    rows = rows_of(root, *(("file_name", "label", "text") if whole else ("path", "label", "caption")))
    path = write_table(root / name, rows)
    source = open_images(root if whole else path, 16, request=CAPTIONED)
    assert (len(source), source.classes) == (9, ("c0", "c1", "c2"))
    for index in range(9):
        item, other = source[index], plain[index]
        assert torch.equal(item["image"], other["image"]) and item["label"] == other["label"]
        assert source.name_sample(index) == plain.name_sample(index)
        caption = rows[index]["text" if whole else "caption"]
        assert unpack_captions(item["caption"][None]) == [caption]
    assert "caption" not in open_images(path, 16)[0]


def test_ranks_and_workers_read_a_list_alike(tmp_path):
    """Oracle: one rank, and the plain folder; two ranks read what a worker gets, from an index on a disk, which notices
    another list of the same name.
    """
    root = folder(tmp_path / "d", 2, 8)
    rows = rows_of(root)
    path = write_table(root / "l.parquet", rows)
    source = open_images(path, 16, request=CAPTIONED, index=tmp_path / "index")
    batches = global_batches(source, range(3), global_batch=8)
    assert same(batches, global_batches(pickle.loads(pickle.dumps(source)), range(3), 2, 2, global_batch=8))
    plain = global_batches(open_images(root, 16), range(3), global_batch=8)
    for batch, other in zip(batches, plain):
        assert all(torch.equal(batch[name], other[name]) for name in other) and "caption" in batch
    write_table(path, rows[:5])
    assert len(open_images(path, 16, request=CAPTIONED, index=tmp_path / "index")) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_columns_by_name(tmp_path, kind):
    """Oracle: the rows: columns that data.columns names, numbers as labels, captions in a list and in two columns."""
    root = folder(tmp_path / "d", 2, 3)
    rows = [
        {
            "id": place,
            "url_local": os.path.join(root, name) if place % 2 else f"./{name}",
            "long": f"long {place}",
            "short": [f"a{place}", "", f"b{place}"] if kind in ("jsonl", "parquet") else f"a{place}",
            "category": place * 5,
        }
        for place, name in enumerate(row["path"] for row in rows_of(root))
    ]
    path = write_table(tmp_path / "d" / f"l.{kind}", rows)
    request = Request(
        SUFFIXES, captions=True, columns={"path": "url_local", "caption": ["short", "long"], "label": "category"}
    )
    samples = listed(path, request)
    assert [int(sample.label) for sample in samples] == [0, 5, 10, 15, 20, 25]
    assert [sample.captions for sample in samples] == [
        (*((f"a{n}", f"b{n}") if kind in ("jsonl", "parquet") else (f"a{n}",)), f"long {n}") for n in range(6)
    ]
    source = open_images(path, 16, request=request)
    assert source.classes == tuple(map(str, range(26))) and source.count_samples_by_class().nonzero()[0].tolist() == [
        0,
        5,
        10,
        15,
        20,
        25,
    ]
    assert [source.name_sample(n) for n in range(2)] == [rows[0]["url_local"][2:], rows[1]["url_local"]]
    assert np.array_equal(source[1]["image"], open_images(root, 16)[1]["image"])
    with pytest.raises(ConfigError, match="no column with the paths of images, only id, url_local, long, short, cat"):
        listed(path)
    with pytest.raises(ConfigError, match="no column url, which data.columns names, only id, url_local"):
        listed(path, Request(SUFFIXES, columns={"path": "url"}))


@pytest.mark.parametrize("kind", ("csv", "jsonl", "parquet"))
def test_labels_of_a_table(tmp_path, kind):
    """Oracle: labels are numbers where all are, else names by their order, or by that of data.class_list; `prefix` and
    `none` pass over the column.
    """
    root = tmp_path / "d"
    names = [f"{prefix}_{number}.png" for number, prefix in enumerate(("b", "a", "b"))]
    for number, name in enumerate(names):
        root.mkdir(exist_ok=True)
        picture(number).save(root / name)
    (tmp_path / "order").write_text("cat\nb\n10\na\n9\n")

    def labels(values: list, **entries: str) -> tuple[list[int], tuple[str, ...]]:
        rows = [{"path": name, "label": value} for name, value in zip(names, values)]
        data = Data(path=str(write_table(root / f"l.{kind}", rows)), image_size=16, **entries)
        source = open_sources(data)[0]
        return [source[index]["label"] for index in range(3)], source.classes

    numbers = tuple(map(str, range(11)))
    assert labels(["9", "10", "9"]) == ([9, 10, 9], numbers)
    assert labels([9, 10, 9]) == ([9, 10, 9], numbers)
    assert labels(["9.0", "10.0", "9.0"]) == ([9, 10, 9], numbers)  # pandas, where a column had gaps
    with pytest.raises(ConfigError, match="1.5 is neither a whole number nor a name" if kind == "csv" else "label"):
        labels([1.5, 2.0, 3.0])
    with pytest.raises(ConfigError, match="the label -1 is no number from 0"):
        labels(["-1", "2", "3"])
    assert labels(["9", "cat", "10"]) == ([1, 2, 0], ("10", "9", "cat"))
    order = ("cat", "b", "10", "a", "9")
    assert labels(["9", "cat", "10"], class_list=str(tmp_path / "order")) == ([4, 0, 2], order)
    assert labels([4, 0, 2], class_list=str(tmp_path / "order")) == ([4, 0, 2], order)
    assert labels([9, 9, 9], labels="prefix") == ([1, 0, 1], ("a", "b"))
    assert labels([9, 9, 9], labels="prefix", class_list=str(tmp_path / "order")) == ([1, 3, 1], order)
    assert labels([9, 9, 9], labels="none") == ([0, 0, 0], ())
    for values, message in (
        ([1, None, 1], "[23]: no label"),
        ([5, 0, 0], "the class 5 is not among"),
        (["dog", "b", "b"], "'dog' is not among the 5 of data.class"),
    ):
        with pytest.raises(ConfigError, match=message):
            labels(values, class_list=str(tmp_path / "order"))


def test_files_that_are_not_there(tmp_path):
    """Oracle: the list: rows without a file are replaced and counted, up to data.max_bad_fraction."""
    root = folder(tmp_path / "d", 2, 5)
    rows = rows_of(root)
    for name in ("c0/001.png", "c1/003.png"):
        (root / name).unlink()
    path = write_table(root / "l.csv", [*rows, {"path": "c9/no.png", "label": "c0", "caption": "x"}])
    source = open_images(path, 16)
    for limit, folder_of_run in ((0.3, tmp_path / "run"), (0.2, tmp_path / "other")):
        folder_of_run.mkdir()
        with Batches(
            source, global_batch=11, micro_batch=11, seed=0, folder=folder_of_run, flip=False, max_bad_fraction=limit
        ) as batches:
            if limit == 0.3:
                (batch,) = list(batches.read_step(0))
                assert len(batch["image"]) == 11
            else:
                with pytest.raises(ConfigError, match="more than the 2 that data.max_bad_fraction=0.2"):
                    list(batches.read_step(0))
        listing = (folder_of_run / "bad_files.txt").read_text()
        assert {line.split("\t")[0] for line in listing.splitlines()} == {"c0/001.png", "c1/003.png", "c9/no.png"}
    write_table(root / "l.csv", [row | {"path": f"images/{row['path']}"} for row in rows])
    with pytest.raises(ConfigError, match="none of its first 10 files is there, the first is .*images/c0/000.png"):
        listed(root / "l.csv")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("l.csv", b"path,text\nc0/000.png,x\nc0/001.png,caf\xe9\n", "line 3: byte 0xe9 is no UTF-8.*iconv"),
        ("l.jsonl", '{"path": "a"}\n{"path": "caf\u00e9"}\n'.encode("latin-1"), "line 2: byte 0xe9 is no UTF-8"),
        ("l.csv", "path\n".encode("utf-16"), "line 1: byte 0xff is no UTF-8.*iconv -f UTF-16 "),
        ("l.csv", b"", "l.csv is empty: write a first line with the names"),
        ("l.csv", b"path,text\n", "has no rows"),
        ("l.csv", b"path,text\nc0/000.png,x\n,y\n", "line 3: no path in the column path"),
        ("l.csv", b"path,text\nhttps://x.org/a.png,x\n", "line 2: https://x.org/a.png is an address.*img2dataset"),
        ("l.csv", b'path,text\nc0/000.png,"' + b"x" * 200_000, "is a quotation mark left open"),
        ("l.jsonl", b'{"path": "c0/000.png"}\n[1]\n', "line 2: no JSON object"),
        ("l.jsonl", b'{"path": "c0/000.png", "text": {"a": 1}}\n', "line 1: .*is no caption: name the column"),
        ("l.csv", b"path,label,label\nc0/000.png,1,2\n", "line 1: two columns are called label"),
        ("l.csv", b"path,text\nc0/000.png,a dog, running\n", "line 2: more fields than the first line has"),
        ("l.csv", b"path\nc0/clip.mp4\n", "lists videos: write data.num_frames=17"),
        (
            "metadata.csv",
            b"file_name,text\nc0/000.png,x\n",
            "has metadata.csv and metadata.jsonl: which of them counts",
        ),
        ("l.parquet", b"PAR1" + bytes(100) + b"PAR1", "is no readable parquet file"),
    ],
)
def test_tables_that_cannot_be_read(tmp_path, name, content, message):
    """Oracle: the contract: one sentence with the file, the line and what is wrong."""
    root = folder(tmp_path / "d", 1, 1)
    (root / name).write_bytes(content)
    if name == "metadata.csv":
        (root / "metadata.jsonl").write_text('{"file_name": "c0/000.png", "text": "x"}\n')
    path = root if name == "metadata.csv" else root / name
    with pytest.raises(ConfigError, match=message) as caught:
        listed(path)
    assert str(caught.value).startswith(f"data.path={path}")


def test_rows_are_read_in_bounded_memory(tmp_path):
    """Oracle: tracemalloc and Arrow's own count: the peak of 10,000 rows, 30 MB, is that of 500 within 12 MB."""
    lines = {
        "csv": "a/{0}.png,{0:03000}\n",
        "tsv": "a/{0}.png\t{0:03000}\n",
        "jsonl": '{{"path": "a/{0}.png", "text": "{0:03000}"}}\n',
    }
    for kind in KINDS:
        peaks = []
        for count in (500, 10_000):
            path = tmp_path / f"{count}.{kind}"
            if kind == "parquet":
                columns = {"path": [f"a/{n}.png" for n in range(count)], "text": [f"{n:03000}" for n in range(count)]}
                parquet.write_table(pa.table(columns), path)
            else:
                head = {"csv": "path,text\n", "tsv": "path\ttext\n"}.get(kind, "")
                path.write_text(head + "".join(lines[kind].format(n) for n in range(count)))
            table, before, arrow = open_table(LocalFiles(path), path.name, "x"), pa.total_allocated_bytes(), 0
            tracemalloc.start()
            for number, _ in enumerate(table.iterate_rows(["path", "text"]), 1):
                arrow = max(arrow, pa.total_allocated_bytes() - before) if number % 100 == 0 else arrow
            peaks.append(tracemalloc.get_traced_memory()[1] + arrow)
            tracemalloc.stop()
            assert number == count
        assert peaks[1] < peaks[0] + (12 << 20), (kind, peaks)


def clips(root: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write(root / name, moving(4, seed=number), *LOSSLESS["ffv1.avi"] if name.endswith("avi") else ("libx264",))


def videos(path: Path, **entries: object) -> Source:
    return open_sources(Data(path=str(path), image_size=16, num_frames=2, flip=False, **entries))[0]


def test_lists_of_videos(tmp_path):
    """Oracle: the plain folder of the same clips: pixels; captions and labels as the lists' makers mean them."""
    names = ["000001_000050/a1.mp4", "000051_000100/b2.mp4"]
    clips(tmp_path / "web" / "videos", names)
    plain = open_videos(tmp_path / "web" / "videos", Cut(2, 16, 16))
    rows = [
        {
            "videoid": Path(name).stem,
            "contentUrl": "https://x",
            "duration": "PT1S",
            "name": f"a {name}",
            "page_dir": Path(name).parent.name,
        }
        for name in names
    ]
    (tmp_path / "web" / "metadata").mkdir()
    sora = [{"path": str(tmp_path / "web" / "videos" / name), "text": f"a {name}", "num_frames": 4} for name in names]
    for path, table in ((tmp_path / "web" / "metadata" / "results_2M_train.csv", rows), (tmp_path / "sora.csv", sora)):
        source = videos(write_table(path, table))
        assert source.captioned and len(source) == 2
        for index in range(2):
            assert torch.equal(source[index]["video"], plain[index]["video"])
            assert unpack_captions(source[index]["caption"][None]) == [f"a {names[index]}"]
    names = ["Yo/v_Yo_g01_c01.avi", "Archery/v_Archery_g01_c02.avi", "Yo/v_Yo_g01_c03.avi"]
    clips(tmp_path / "UCF-101", names)
    lists = tmp_path / "ucfTrainTestlist"
    lists.mkdir()
    (lists / "classInd.txt").write_text("1 Archery\r\n2 Yo\r\n")
    (lists / "trainlist01.txt").write_text("".join(f"{name} {2 - n % 2}\r\n" for n, name in enumerate(names)))
    (lists / "testlist01.txt").write_text(f"{names[1]}\n")
    train, unseen = open_sources(
        Data(
            path=str(lists / "trainlist01.txt"),
            image_size=16,
            num_frames=2,
            flip=False,
            held_out_path=str(lists / "testlist01.txt"),
        )
    )
    assert train.classes == unseen.classes == ("Archery", "Yo") and unseen[0]["label"] == 0
    assert [train[index]["label"] for index in range(3)] == [1, 0, 1]
    assert unpack_captions(train[1]["caption"][None]) == ["Archery"]
    (lists / "classInd.txt").write_text("Archery\n")
    with pytest.raises(ConfigError, match="classInd.txt: its lines are not 1 CLASS"):
        videos(lists / "trainlist01.txt")


def test_lines_with_numbers(tmp_path):
    """Oracle: Caffe's lists of ImageNet, PATH NUMBER from 0, whose images lie beside them; a line without either."""
    root = folder(tmp_path / "d", 2, 2)
    names = [row["path"] for row in rows_of(root)]
    (root / "train.txt").write_text("".join(f"{name} {n % 3}\n" for n, name in enumerate(names)))
    source, plain = open_images(root / "train.txt", 16), open_images(root, 16)
    assert [source[n]["label"] for n in range(4)] == [0, 1, 2, 0] and source.classes == ("0", "1", "2")
    assert all(torch.equal(source[n]["image"], plain[n]["image"]) for n in range(4))
    (root / "train.txt").write_text(f"{names[0]} 0\nnonsense\n")
    with pytest.raises(ConfigError, match="line 2: no file and number"):
        open_images(root / "train.txt", 16)
