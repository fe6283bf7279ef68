"""Embedding pairs: splits, layout, captions, what is refused, and means over uneven ranks."""

import pickle
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from dstrain import rng, systems
from dstrain.data.batches import Batches, iterate_held_out
from dstrain.data.cached import embeddings, rows
from dstrain.data.cached.embeddings import BUILTIN, has_embedding_pairs, open_pairs
from dstrain.data.open import open_sources, open_split, require_learnable_contents
from dstrain.data.source import BadSample
from dstrain.encoders.text import unpack_captions
from dstrain.recipe import Data
from dstrain.sampling.draw import evaluate_held_out_batches
from tests.support import gloo
from tests.support.launch import environment

ALL = (1.0, 0.0, 0.0)
TINY = {
    "image_embed_dim": 6,
    "text_embed_dim": 4,
    "text_encodings_dim": 5,
    "max_text_len": 3,
    "depth": 1,
    "heads": 1,
    "dim_head": 8,
    "num_candidates": 1,
}


def make(root: Path, lengths=(5, 7, 3), *, captions=False, encodings=False, dtype=np.float32, text_dim=4) -> Path:
    """Files of rows whose first value is their number; the 11th file would sort before the 2nd by its letters."""
    draw, start = np.random.default_rng(0), 0
    for number, length in zip((0, 2, 11), lengths):

        def save(folder, *shape, kind=dtype):
            values = draw.standard_normal((length, *shape))
            values.reshape(length, -1)[:, 0] = np.arange(start, start + length) + 1
            (root / folder).mkdir(parents=True, exist_ok=True)
            np.save(root / folder / f"{folder}_{number}.npy", values.astype(kind))

        save("img_emb", 6)
        if captions:
            (root / "metadata").mkdir(exist_ok=True)
            table = {"key": list(range(length)), "caption": [f"caption {start + i + 1}" for i in range(length)]}
            pyarrow.parquet.write_table(pyarrow.table(table), root / "metadata" / f"metadata_{number}.parquet")
        else:
            save("text_emb", text_dim)
        if encodings:
            save("text_encodings", 3, 5)
            (root / "text_mask").mkdir(exist_ok=True)
            np.save(root / "text_mask" / f"text_mask_{number}.npy", np.arange(3) < draw.integers(1, 4, (length, 1)))
        start += length
    return root


def number(item) -> int:
    return int(item["image_embed"][0]) - 1


@pytest.mark.parametrize(
    "splits, count, expected",
    [
        ((0.7, 0.2, 0.1), 10, [7, 2, 1]),
        ((0.6, 0.3, 0.1), 10, [6, 3, 1]),
        ((0.75, 0.15, 0.1), 1000, [750, 150, 100]),
        ((0.7, 0.2, 0.1), 15, [11, 3, 1]),
        ((0.7, 0.2, 0.1), 10**15 + 5, [7 * 10**14 + 4, 2 * 10**14 + 1, 10**14]),
        ((1 / 3, 1 / 3, 1 / 3), 9, [3, 3, 3]),
        ((1.0, 0.0, 0.0), 4, [4, 0, 0]),
        ((0.5, 0.5, 0), 3, [2, 1, 0]),
    ],
)
def test_exact_fractions(splits, count, expected):
    """Oracle: counts by hand; each lies within one of its fraction's, and all rows are shared out."""
    bounds = embeddings._compute_split_bounds(count, splits, 1)
    sizes = [end - begin for begin, end in bounds]
    assert sizes == expected and sum(sizes) == count and bounds[0][0] == 0
    for size, fraction in zip(sizes, splits):
        assert abs(size - count * Fraction(str(fraction))) <= 1


@pytest.mark.parametrize(
    "splits, count, world, words",
    [
        ((0.7, 0.2, 0.2), 10, 1, r"\[0.7, 0.2, 0.2\].*sum to 1"),
        ((1.2, -0.2, 0), 10, 1, "0 or more"),
        ((0.9, 0.05, 0.05), 4, 1, "of 4 pairs leaves 0 for validation"),
        ((0.0, 0.5, 0.5), 10, 1, "leaves 0 for train"),
        ((0.8, 0.1, 0.1), 10, 2, "leaves 1 for validation, fewer than the 2 ranks"),
    ],
)
def test_wrong_fractions(splits, count, world, words):
    """Oracle: a ValueError with the numbers, also where a rank would have no pair of its own."""
    with pytest.raises(ValueError, match=words):
        embeddings._compute_split_bounds(count, splits, world)


def test_splits_are_a_partition(tmp_path):
    """Oracle: every row once over the three splits, mixed, in files sorted by number."""
    make(tmp_path, encodings=True)
    parts = [
        [number(item) for item in map(source.__getitem__, range(len(source)))]
        for source in (open_pairs(tmp_path, (0.6, 0.2, 0.2), split) for split in embeddings.SPLITS)
    ]
    assert [len(part) for part in parts] == [9, 3, 3] and sorted(sum(parts, [])) == list(range(15))
    assert sum(parts, []) != list(range(15))
    source = open_pairs(tmp_path, ALL, "train")
    for item in map(source.__getitem__, range(15)):
        assert all(int(item[name].flatten()[0]) - 1 == number(item) for name in ("text_embed", "text_encodings"))
        assert item["image_embed"].dtype == torch.float32 and item["text_mask"].dtype == torch.bool
    assert open_pairs(tmp_path, ALL, "test") is None
    names = [source.name_sample(i) for i in range(15)]
    last = [i for i in range(15) if number(source[i]) > 11]
    assert [names[i] for i in last] == [f"img_emb/img_emb_11.npy[{number(source[i]) - 12}]" for i in last]


def test_other_texts_are_a_derangement(tmp_path):
    """Oracle: over a split each pair meets another's text, and each text is met once; captions likewise."""
    make(tmp_path / "a")
    make(tmp_path / "b", captions=True)
    source = open_pairs(tmp_path / "a", (0.2, 0.8, 0), "validation")
    items = [source[i] for i in range(12)]
    own, other = [number(item) for item in items], [int(item["other_text_embed"][0]) - 1 for item in items]
    assert sorted(own) == sorted(other) and not any(a == b for a, b in zip(own, other))
    source = open_pairs(tmp_path / "b", (0.2, 0.8, 0), "validation")
    item = source[11]
    assert unpack_captions(item["caption"][None]) == [f"caption {number(item) + 1}"]
    assert unpack_captions(item["other_caption"][None]) == [f"caption {number(source[0]) + 1}"]
    assert "other_text_embed" not in open_pairs(tmp_path / "a", ALL, "train")[0]


def test_arrays_stay_on_the_disk(tmp_path):
    """Oracle: numpy's memory map; a worker is sent no array."""
    make(tmp_path)
    source = open_pairs(tmp_path, ALL, "train")
    before = source[3]
    sent = pickle.dumps(source)
    arrays = source.stored.tables["image_embed"].arrays
    assert arrays and all(isinstance(array, np.memmap) for array in arrays.values()) and len(sent) < 4000
    assert torch.equal(pickle.loads(sent)[3]["image_embed"], before["image_embed"])
    for kind in (np.float16, np.float64):
        other = open_pairs(make(tmp_path / kind.__name__, dtype=kind), ALL, "train")[3]["image_embed"]
        assert other.dtype == torch.float32
        torch.testing.assert_close(other, before["image_embed"], rtol=1e-3, atol=1e-3)


_MANY = """
import os, resource, sys
from dstrain.data.cached.embeddings import open_pairs
source = open_pairs(sys.argv[1], (1.0, 0.0, 0.0), "train")              # imports and threads have their files
open_now = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 80, open_now + 200))
source = None
source = open_pairs(sys.argv[1], (1.0, 0.0, 0.0), "train")
print(sorted(int(source[i]["image_embed"][0]) for i in range(len(source))) == list(range(1, 201)))
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, open_now + 200))
try:
    [source[i] for i in range(len(source))]
except ValueError as error:
    print(error)
"""


def test_many_files(tmp_path):
    """Oracle: the system's own limit: 2 x 200 files are read by a process that may open 80 for them, if each folder
    keeps 32; below that limit a ValueError names it."""
    for folder in ("img_emb", "text_emb"):
        (tmp_path / folder).mkdir()
        for i in range(200):
            np.save(tmp_path / folder / f"{folder}_{i}.npy", np.full((1, 4), i + 1, np.float32))
    code = _MANY.replace(
        "import os", "import dstrain.data.cached.rows; dstrain.data.cached.rows._MAPPED = 32\nimport os", 1
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=100
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0] == "True", done.stderr
    assert "too many files are open" in lines[1] and "ulimit -n" in lines[1]
    source = open_pairs(tmp_path, ALL, "train")
    assert (
        all(source[i] for i in range(200))
        and [len(table.arrays) for table in source.stored.tables.values()] == [rows._MAPPED] * 2 == [64] * 2
    )


def test_fingerprint(tmp_path):
    """Oracle: it changes with the split, the fractions, the rows and what is in them, and with nothing else."""
    make(tmp_path / "a")
    make(tmp_path / "b")

    def say(name, splits=ALL):
        return open_pairs(tmp_path / name, splits, "train").compute_fingerprint()

    first = say("a")
    assert first == say("b") and first != say("a", (0.8, 0.1, 0.1))
    array = np.load(tmp_path / "b/img_emb/img_emb_2.npy")
    array[0] += 1
    np.save(tmp_path / "b/img_emb/img_emb_2.npy", array)
    assert say("b") != first
    make(tmp_path / "c", captions=True)
    make(tmp_path / "d", captions=True)
    assert say("c") == say("d")
    table = {"key": list(range(7)), "caption": [f"caption {i}" for i in range(7)]}  # other texts, as many
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "d" / "metadata" / "metadata_2.parquet")
    assert say("c") != say("d")


@pytest.mark.parametrize(
    "scanned, lengths, notices", [(1 << 26, (5, 7, 3), True), (0, (5, 7, 3), True), (0, (5, 700, 3), False)]
)
def test_fingerprint_of_a_row_in_the_middle(tmp_path, monkeypatch, scanned, lengths, notices):
    """Oracle: a changed row between a file's ends: all rows of small data are compared, 256 spaced ones of large data,
    whose files' ends stay as an earlier version wrote them down."""
    monkeypatch.setattr(embeddings, "_SCANNED", scanned)

    def say():
        return open_pairs(make(tmp_path, lengths), ALL, "train").compute_fingerprint()

    before = say()
    assert before == say()
    array = np.load(tmp_path / "text_emb" / "text_emb_2.npy")
    array[1] += 1
    save = np.save
    monkeypatch.setattr(np, "save", lambda path, values: save(path, array if "text_emb_2" in str(path) else values))
    assert (say() != before) == notices and say().split(" rows=")[0] == before.split(" rows=")[0]


def spoil(root: Path, how: str) -> None:
    name = root / "img_emb" / "img_emb_2.npy"
    array = np.load(name)
    if how == "nan":
        array[4, 2] = np.nan
    elif how == "zero":
        array[4] = 0
    elif how == "rows":
        array = array[:-1]
    elif how == "width":
        array = array[:, :-1]
    elif how == "integers":
        array = array.astype(np.int64)
    elif how == "flat":
        array = array[:, 0]
    elif how == "deep":
        array = array[:, None]
    elif how == "huge":
        array = array.astype(np.float64) * 1e300
    np.save(name, array)
    if how in ("number", "word"):
        end = "3" if how == "number" else "x"
        (root / "text_emb" / "text_emb_2.npy").rename(root / "text_emb" / f"text_emb_{end}.npy")
    if how == "word":
        name.rename(root / "img_emb" / "img_emb_y.npy")
        (root / "text_emb" / "text_emb_0.npy").rename(root / "text_emb" / "text_emb_y.npy")
    if how == "missing":
        name.unlink()
    elif how == "truncated":
        name.write_bytes(name.read_bytes()[:60])
    elif how in ("zip", "cut zip"):
        np.savez(root / "x.npz", array)
        data = (root / "x.npz").read_bytes()
        name.write_bytes(data[: len(data) // (2 if how == "cut zip" else 1)])
    elif how == "pickle":
        np.save(name, np.array([{}] * 7, object), allow_pickle=True)


@pytest.mark.parametrize(
    "how, words",
    [
        ("nan", r"img_emb_2.npy\[4\] holds NaN"),
        ("zero", r"img_emb_2.npy\[4\] is all zeros"),
        ("rows", "img_emb_2.npy has 6 rows and text_emb/text_emb_2.npy 7"),
        ("width", r"img_emb_2.npy are \(5,\)"),
        ("integers", "int64"),
        ("flat", r"\(7,\)"),
        ("missing", "img_emb_11.npy and text_emb/text_emb_2.npy"),
        ("truncated", "img_emb_2.npy is no readable"),
        ("pickle", "img_emb_2.npy is no readable"),
        ("zip", r"img_emb_2.npy is a zip file \(.npz"),
        ("cut zip", "img_emb_2.npy is no readable"),
        ("deep", r"\(7, 1, 6\): img_emb holds \(n, D\) of float16 or float32; reshape"),
        ("huge", "NaN or infinity"),
        ("number", "img_emb_2.npy and text_emb/text_emb_3.npy would be pairs"),
        ("word", "img_emb_.*would be pairs"),
    ],
)
def test_bad_files(tmp_path, how, words):
    """Oracle: a ValueError that names file and row."""
    spoil(make(tmp_path), how)
    with pytest.raises(ValueError, match=words):
        open_pairs(tmp_path, ALL, "train")


def test_bad_rows_of_large_data(tmp_path, monkeypatch):
    """Oracle: what is too large to look through is met when it is read: replaced, listed with its row, and bounded."""
    monkeypatch.setattr(embeddings, "_SCANNED", 0)
    spoil(make(tmp_path / "data"), "nan")
    source = open_pairs(tmp_path / "data", ALL, "train")
    where = source.rows.tolist().index(9)
    with pytest.raises(BadSample, match="NaN"):
        source[where]
    with Batches(
        source, global_batch=15, micro_batch=15, seed=0, folder=tmp_path / "run", max_bad_fraction=0.1
    ) as batches:
        batch = next(batches.read_step(0))
    assert torch.isfinite(batch["image_embed"]).all()
    assert (tmp_path / "run" / "bad_files.txt").read_text() == "img_emb/img_emb_2.npy[4]\tholds NaN or infinity\n"
    with pytest.raises(ValueError, match=r"img_emb_2.npy\[4\]: holds NaN"):
        with Batches(source, global_batch=15, micro_batch=15, seed=0, max_bad_fraction=0) as batches:
            next(batches.read_step(0))


@pytest.mark.parametrize(
    "how, words",
    [
        ("text", "neither text_emb.*nor captions in metadata"),
        ("column", "no column caption.*only key"),
        ("rows", "5 rows and metadata"),
        ("broken", "metadata_0.parquet is no readable"),
        ("numbers", "column caption of metadata/metadata_0.parquet holds int64: write captions as strings"),
        ("bytes", "holds binary"),
        ("images", "holds no embedding pairs"),
        ("empty", "no .npy file"),
    ],
)
def test_bad_layouts(tmp_path, how, words):
    """Oracle: a ValueError that says what is missing."""
    make(tmp_path, captions=True)
    first = tmp_path / "metadata" / "metadata_0.parquet"
    if how == "text":
        for file in (tmp_path / "metadata").iterdir():
            file.unlink()
    elif how in ("column", "rows", "numbers", "bytes"):
        table = {
            "column": {"key": [1] * 5},
            "rows": {"caption": ["x"] * 6},
            "numbers": {"caption": [1] * 5},
            "bytes": {"caption": [b"x"] * 5},
        }[how]
        pyarrow.parquet.write_table(pyarrow.table(table), first)
    elif how == "broken":
        first.write_bytes(b"PAR1 and no more")
    elif how == "images":
        (tmp_path / "img_emb").rename(tmp_path / "pictures")
    elif how == "empty":
        for file in (tmp_path / "img_emb").iterdir():
            file.unlink()
    with pytest.raises(ValueError, match=words):
        open_pairs(tmp_path, ALL, "train")


def test_an_empty_caption_is_replaced(tmp_path):
    """Oracle: BadSample, which Batches replaces and counts."""
    make(tmp_path, captions=True)
    pyarrow.parquet.write_table(
        pyarrow.table({"TEXT": ["a", None, "", "b", "c"]}), tmp_path / "metadata/metadata_0.parquet"
    )
    source = open_pairs(tmp_path, ALL, "train")
    for row in (1, 2):
        with pytest.raises(BadSample, match="no caption"):
            source[source.rows.tolist().index(row)]
    assert unpack_captions(source[source.rows.tolist().index(3)]["caption"][None]) == ["b"]


def test_captions_beside_embeddings(tmp_path):
    """Oracle: captions come along where encodings are missing, an empty one as an empty text; files without the column,
    and those beside encodings, are left alone."""
    make(tmp_path / "a")
    make(tmp_path / "b", captions=True)
    folder = tmp_path / "a" / "metadata"
    (tmp_path / "b" / "metadata").rename(folder)
    item = open_pairs(tmp_path / "a", ALL, "train")[2]
    assert unpack_captions(item["caption"][None]) == [f"caption {number(item) + 1}"] and "text_embed" in item
    pyarrow.parquet.write_table(
        pyarrow.table({"caption": [None] * 5}, pyarrow.schema([("caption", pyarrow.string())])),
        folder / "metadata_0.parquet",
    )
    source = open_pairs(tmp_path / "a", ALL, "train")
    assert unpack_captions(source[source.rows.tolist().index(1)]["caption"][None]) == [""]
    pyarrow.parquet.write_table(pyarrow.table({"key": [1] * 5}), folder / "metadata_0.parquet")
    assert "caption" not in open_pairs(tmp_path / "a", ALL, "train")[2]
    make(tmp_path / "c", encodings=True)
    folder.rename(tmp_path / "c" / "metadata")
    assert "caption" not in open_pairs(tmp_path / "c", ALL, "train")[2]


def test_the_data_section(tmp_path):
    """Oracle: train and validation of open_sources, the test split by name; wrong kinds of data are refused."""
    make(tmp_path)
    data = Data(path=str(tmp_path), splits=(0.6, 0.2, 0.2))
    train, unseen = open_sources(data)
    assert (train.split, len(train), unseen.split, len(unseen)) == ("train", 9, "validation", 3)
    assert len(open_split(data, "test")) == 3 and open_sources(data.model_copy(update={"splits": ALL}))[1] is None

    def require(data, system):
        require_learnable_contents(
            data, system, systems.find_config_class(system).learns_from, systems.list_systems_learning_from
        )

    require(data, "prior")
    with pytest.raises(
        ValueError, match="holds embedding pairs, and dit learns from images .*, or choose system=prior$"
    ):
        require(data, "dit")
    with pytest.raises(ValueError, match="holds images, and prior learns from embedding pairs"):
        require(Data(), "prior")
    with pytest.raises(ValueError, match="data.splits"):
        require(data.model_copy(update={"held_out": 0.1}), "prior")


def test_builtin():
    """Oracle: the file's own facts: below 1 MB, unit vectors, pictures nearer to their own names than to others'."""
    assert has_embedding_pairs(BUILTIN)
    file = Path(embeddings.__file__).parents[1] / "builtin" / "emoji-pairs.npz"
    assert file.stat().st_size < 1_000_000 and "Apache" in file.with_name("LICENSE-emoji-pairs.txt").read_text()
    source = open_pairs(BUILTIN, (0.8, 0.1, 0.1), "validation")
    batch = next(iterate_held_out(source, len(source)))
    image, text, other = batch["image_embed"], batch["text_embed"], batch["other_text_embed"]
    for embed in (image, text):
        torch.testing.assert_close(embed.norm(dim=1), torch.ones(len(embed)))
    own, others = (image * text).sum(1).mean(), (image * other).sum(1).mean()
    assert 0.2 < own < 0.9 and own > others + 0.1
    assert len({tuple(row) for row in text.tolist()}) == len(text) > 100


def _means(rank: int, path: str, world: int) -> dict[str, float]:
    system = systems.build("prior", TINY | {"evaluate_steps": [3], "text_embed_dim": 6})
    torch.manual_seed(0)
    nets = system.networks()
    source = open_pairs(path, (0.4, 0.6, 0), "validation", world)
    return evaluate_held_out_batches(system, nets, iterate_held_out(source, 4, rank, world))


def test_means_over_uneven_ranks(tmp_path):
    """Oracle: plain means over the 12 samples one by one; 3 ranks of batches of 4 and 2 ranks (8 + 4) give the same."""
    make(tmp_path / "data", lengths=(8, 8, 4), encodings=True, text_dim=6)
    path = str(tmp_path / "data")
    system = systems.build("prior", TINY | {"evaluate_steps": [3], "text_embed_dim": 6})
    torch.manual_seed(0)
    nets = system.networks()
    source = open_pairs(path, (0.4, 0.6, 0), "validation")
    alone = [system.evaluate(nets, system.encode(batch)) for batch in iterate_held_out(source, 1)]
    names = alone[0].keys() - {"quartile"}
    expected = {name: float(np.mean([float(terms[name]) for terms in alone])) for name in names}
    assert len(alone) == len(source) == 12 and "similarity/3/other_text" in expected
    assert _means(0, path, 1) == pytest.approx(expected, abs=1e-6)
    for world in (2, 3, 5):  # five ranks: the last two have no sample of their own in a round
        for means in gloo.run(tmp_path, _means, path, world, world=world):
            assert means == pytest.approx(expected, abs=1e-6)


def test_width_differs_from_the_models(tmp_path):
    """Oracle: a ValueError that names the field and both widths."""
    source = open_pairs(make(tmp_path), ALL, "train")
    batch = next(iterate_held_out(source, 4))

    def build(**changes):
        return systems.build("prior", TINY | {"max_text_len": 0} | changes)

    build().encode(batch | {"key": rng.keys(0, 0, torch.arange(4))})
    with pytest.raises(ValueError, match="image_embed is 6 wide in the data and 8 in .*model.image_embed_dim=6"):
        build(image_embed_dim=8).encode(batch)
    with pytest.raises(ValueError, match="text_embed is 4 wide.*model.text_embed_dim=4"):
        build(text_embed_dim=6).encode(batch)
    with pytest.raises(ValueError, match="text_encodings"):
        build(max_text_len=3).encode(batch)
    with pytest.raises(ValueError, match="neither text_encodings nor a caption"):
        build(max_text_len=3).require_usable_source(source)
    with pytest.raises(ValueError, match="set model.image_embed_dim=6"):
        build(image_embed_dim=8).require_usable_source(source)
    build().require_usable_source(source)
    captions = open_pairs(make(tmp_path / "captions", captions=True), ALL, "train")
    with pytest.raises(ValueError, match="model.text_encoder: texts are to be encoded and none is named"):
        build().require_usable_source(captions)
