"""Labels and texts: one rule for each, whatever the form of the data."""

import csv
import io
import json
import tarfile
from pathlib import Path

import pytest

from dstrain.commands.options.arguments import read_nonempty_lines
from dstrain.commands.options.pack import PackOptions
from dstrain.commands.pack import pack_data
from dstrain.data.decode.clips import Cut
from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.formats.base import Request
from dstrain.data.formats.clips import read_captions_file
from dstrain.data.sources.images import open_images
from dstrain.data.sources.videos import open_videos
from dstrain.disk.texts import decode_text, extract_captions, parse_caption_file, parse_label, split_nonblank_lines
from dstrain.encoders.text import unpack_captions
from dstrain.recipe import ConfigError
from tests.support.pictures import picture

LABELS = {  # as they stand in JSON, or in quotation marks in tables -> the classes' numbers
    "numbers": (range(12), list(range(12))),
    "fractions of zero": ([f"{n}.0" for n in range(12)], list(range(12))),
    "floats": ([float(n) for n in range(12)], list(range(12))),
    "texts of numbers": ([f" {n:02} " for n in range(12)], list(range(12))),
    "a byte order mark": ([f"\ufeff{n}\r" for n in range(12)], list(range(12))),
    "gaps": ([9, "10.0", 9.0], [9, 10, 9]),
    "truth": ([True, False, True], [1, 0, 1]),
    "names": (["cat", "10", "9"], [2, 0, 1]),
    "mixed": (["cat", 10, "9.0"], [2, 0, 1]),
    "a name like a number": (["1e3", "inf", "1_0"], [1, 2, 0]),
    "other digits": (["\u0663", "\u0664", "\u0663"], [0, 1, 0]),
}
BREAKS = ("\n", "\r\n", "\r", "\n\n", "\n \r\n")
SEPARATORS = ("\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e")


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def encoded(number: int) -> bytes:
    buffer = io.BytesIO()
    picture(number).save(buffer, "PNG")
    return buffer.getvalue()


def text_of(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def write_form(form: str, root: Path, labels: list[object], captions: list[object]) -> Path:
    """Writes pictures with labels and captions in a form of data."""
    root.mkdir(parents=True)
    names = [f"{number:02}.png" for number in range(len(labels))]
    if form.startswith("tar"):
        members = {}
        for number, (name, label, caption) in enumerate(zip(names, labels, captions)):
            members[name] = encoded(number)
            if form == "tar cls txt":
                members[f"{number:02}.cls"] = text_of(label).encode()
                members[f"{number:02}.txt"] = text_of(caption).encode()
            else:
                members[f"{number:02}.json"] = json.dumps({"label": label, "caption": caption}).encode()
        return write_tar(root / "x.tar", members)
    for number, name in enumerate(names):
        (root / name).write_bytes(encoded(number))
    rows = [{"file_name": name, "label": a, "caption": b} for name, a, b in zip(names, labels, captions)]
    if form == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        table = {"file_name": names, "label": list(map(text_of, labels)), "caption": captions}
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(table), root / "l.parquet")
    elif form == "jsonl":
        (root / "l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with open(root / f"l.{form}", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if form == "tsv" else ",")
            writer.writeheader()
            writer.writerows([row | {"label": text_of(row["label"])} for row in rows])
    return root / f"l.{form}"


def read_form(path: Path) -> tuple[list[int], list[str]]:
    source = open_images(path, 16, split="all", request=Request(SUFFIXES, captions=True))
    items = [source[index] for index in range(len(source))]
    return [item["label"] for item in items], [unpack_captions(item["caption"][None])[0] for item in items]


@pytest.mark.parametrize("form", ["tar cls txt", "tar json", "csv", "tsv", "jsonl", "parquet"])
def test_one_rule_for_labels(tmp_path, form):
    """Oracle: the numbers that the labels say, or the places of their names in sorted order; equal in every form. A
    column of numbers in which names stand is one of names.
    """
    for place, (kind, (labels, expected)) in enumerate(LABELS.items()):
        path = write_form(form, tmp_path / str(place), list(labels), ["a"] * len(labels))
        assert read_form(path)[0] == expected, (form, kind)
    for place, label in enumerate((0.5, "-0.25", ".75")):
        path = write_form(form, tmp_path / f"wrong{place}", [label, label], ["a", "b"])
        with pytest.raises(ConfigError, match="neither a whole number nor a name.*data.labels=none"):
            read_form(path)
    with pytest.raises(ConfigError, match="the label -1 is no number from 0"):
        read_form(write_form(form, tmp_path / "below", [1, "-1"], ["a", "b"]))
    with pytest.raises(ConfigError, match="the label nan is no class, .*data.labels=none"):
        read_form(write_form(form, tmp_path / "missing", ["cat", "nan"], ["a", "b"]))


@pytest.mark.parametrize("form", ["tar json", "csv", "tsv", "jsonl", "parquet"])
def test_one_rule_for_captions(tmp_path, form):
    """Oracle: the captions as they were written, in every form: whole, without blanks and byte order marks around."""
    texts = [f"a cat{mark}on a mat" for mark in (*SEPARATORS, *BREAKS)]
    texts += ['"hello" she said', '5" nails', 'say "x"', '""', '"a"', "x" * 500, "\ufeffa\u00e9 ", "a,b;c\\n"]
    path = write_form(form, tmp_path / "d", [0] * len(texts), texts)
    expected = [text.strip().removeprefix("\ufeff") for text in texts]
    assert read_form(path)[1] == expected


def test_lines_of_a_text(tmp_path):
    """Oracle: line feeds and carriage returns end a caption or a prompt, and nothing else does; UTF-16 is read by its
    mark. So in X.txt, in a tar, and in a file of prompts.
    """
    for mark in BREAKS:
        assert split_nonblank_lines(f"\ufeffa{mark} b ") == ("a", "b")
    for mark in SEPARATORS:
        assert split_nonblank_lines(f"a cat{mark}on a mat\n") == (f"a cat{mark}on a mat",)
    for content in (b"\xef\xbb\xbfa\r\nb\n", "\ufeffa\nb".encode("utf-16-le"), "\ufeffa\nb".encode("utf-16-be")):
        (tmp_path / "x.txt").write_bytes(content)
        assert parse_caption_file("x.txt", content) == read_nonempty_lines(str(tmp_path / "x.txt")) == ("a", "b")
    assert parse_caption_file("x.json", b'\xef\xbb\xbf{"caption": ["\xef\xbb\xbfa\\nb", null, 3, " "]}') == ("a\nb",)
    assert [split_nonblank_lines(decode_text(content)) for content in (b"", b"\xef\xbb\xbf", b" \r\n")] == [()] * 3
    with pytest.raises(ValueError):
        parse_caption_file("x.txt", b"caf\xe9")
    with pytest.raises(ValueError, match="3 is no caption"):
        extract_captions(3)
    (tmp_path / "0.png").write_bytes(encoded(0))
    (tmp_path / "0.txt").write_bytes("\ufeffa cat\u2028on a mat\r\n".encode())
    source = open_images(tmp_path, 16, split="all", request=Request(SUFFIXES, captions=True))
    assert source.read_captions(0) == ("a cat\u2028on a mat",)
    for name, text in (
        ("a.txt", "\ufeffa.mp4\tone\u2028two\n"),
        ("a.csv", '\ufefffile,caption\na.mp4,"one\u2028two"\n'),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert read_captions_file(tmp_path / name) == {"a.mp4": "one\u2028two"}


@pytest.mark.parametrize(
    "content, expected",
    [
        ('0.png\tplain\n1.png\t"5 inch nails\n2.png\ta cat\n3.png\t"hello" she said\n', 4),
        ('0.png\t"a ""b"" c"\n1.png\t""\n2.png\t"x\ty"\n', 3),
        ('0.png\t"one\ntwo"\n1.png\ta\n', 2),
        ('0.png\t"5 inch\n1.png\t7 inch"\n', "line 2: a quotation mark is left open, and the next one is in line 3"),
        ("0.png\ta\tb\n", "line 2: 3 fields, and the first line has 2"),
        ("0.png\n", "line 2: 1 fields, and the first line has 2"),
    ],
)
def test_quotation_marks_between_tabs(tmp_path, content, expected):
    """Oracle: the rows that were written, each with its own text: a mark swallows none, or the line is named."""
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(encoded(number))
    (tmp_path / "l.tsv").write_text(f"file_name\tcaption\n{content}")
    request = Request(SUFFIXES, captions=True)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            open_images(tmp_path / "l.tsv", 16, split="all", request=request)
        return
    source = open_images(tmp_path / "l.tsv", 16, split="all", request=request)
    assert [source.name_sample(index) for index in range(len(source))] == [
        f"{number}.png" for number in range(expected)
    ]


@pytest.mark.parametrize("row", ['0.png,"hello" she said', '0.png,"open\n1.png,a', '0.png,"a\n1.png,"b'])
def test_quotation_marks_between_commas(tmp_path, row):
    """Oracle: the rules of csv: a mark that opens no field or closes none is refused with its line."""
    (tmp_path / "0.png").write_bytes(encoded(0))
    (tmp_path / "l.csv").write_text(f"file_name,caption\n{row}\n")
    with pytest.raises(ConfigError, match="quotation mark"):
        open_images(tmp_path / "l.csv", 16, split="all", request=Request(SUFFIXES, captions=True))


def test_a_label_alone():
    """Oracle: the rules, one by one."""
    assert [parse_label(value) for value in (None, "", " ", float("nan"), "\ufeff 3.0\n", 3.0, 3, "3.", True)] == [
        None,
        None,
        None,
        None,
        "3",
        "3",
        "3",
        "3",
        "true",
    ]
    assert parse_label("1.5", {"1.5": 0}) == "1.5"
    for value in ([1], {"a": 1}, "x" * 1001, 1.5, float("inf")):
        with pytest.raises(ValueError):
            parse_label(value)


def test_a_text_of_several_lines_beside_a_clip(tmp_path):
    """Oracle: one caption a line, the first of which counts for a clip: beside it, in a tar and packed, and with quotes
    in a captions file as in a list.
    """
    root, text = tmp_path / "d", "\ufeff\r\na cat\r\na dog\r\n".encode()
    root.mkdir()
    (root / "0.png").write_bytes(encoded(0))
    (root / "0.txt").write_bytes(text)
    write_tar(tmp_path / "t" / "x.tar", {"0.png": encoded(0), "0.txt": text})
    pack_data(PackOptions(str(root), ("data.num_frames=1",), out=tmp_path / "p"))
    for path in (root, tmp_path / "t", tmp_path / "p"):
        assert open_videos(path, Cut(1, 16, 16)).read_captions(0) == ("a cat",)
    (root / "0.txt").unlink()
    (tmp_path / "c.tsv").write_text('0.png\t"a ""big"" cat"\n')
    assert open_videos(root, Cut(1, 16, 16), captions=tmp_path / "c.tsv").read_captions(0) == ('a "big" cat',)
