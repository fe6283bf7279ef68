"""Pairs of image and text embeddings as sources, in the layout of clip-retrieval and img2dataset.

    FOLDER/img_emb/*.npy           float16 or float32 (float64 is rounded) (n, D), the image embeddings
    FOLDER/text_emb/*.npy          (n, T), optional where there are captions
    FOLDER/text_encodings/*.npy    (n, L, E), optional, a vector for each text token
    FOLDER/text_mask/*.npy         bool (n, L), optional, False where an encoding is padding
    FOLDER/metadata/*.parquet      a column caption (or TEXT, text), read where text embeddings are missing

The folders' files are matched in the order of the numbers in their names, which must agree, and row by row. Arrays are
mapped into memory: opening reads headers alone. Items are {"image_embed", "text_embed", ...} float32, and "caption",
UTF-8 as uint8 (bytes,), which a batch fills up with zeros. Held-out items also have the text of another pair, as
other_text_embed and other_caption: that of the next pair, so that over a split each text stands once beside another
pair's image.

The splits train, validation and test are consecutive parts of a fixed permutation of all rows. Their bounds are the
cumulative fractions of the number of rows, rounded.
"""

import json
import lzma
import re
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dstrain.data.cached.rows import FOLDERS, Captions, Table, convert_floats_to_float32, find_faulty_row, pack_caption
from dstrain.data.order import Order
from dstrain.data.source import BadSample, Source
from dstrain.recipe import ConfigError

SPLITS = ("train", "validation", "test")
BUILTIN = "builtin:emoji-pairs"
_FILE = Path(__file__).parents[1] / "builtin" / "emoji-pairs.npz"
PLAN = "pairs.json"  # of `dstrain encode`: what it makes, and whether it is complete
_SCANNED = 1 << 26  # bytes of arrays up to which opening looks through all rows
_COMPARED = 256  # rows of a larger table that enter the fingerprint
_LISTED = 1 << 22  # rows of a split up to which their order is kept as a list


def has_embedding_pairs(path: str | Path) -> bool:
    """Returns whether a data path holds embedding pairs: it names the built-in ones, or is a folder with img_emb/."""
    return str(path) == BUILTIN or (Path(path) / FOLDERS["image_embed"]).is_dir()


def open_pairs(path: str | Path, splits: tuple[float, ...], split: str, world: int = 1) -> "Pairs | None":
    """Opens one split of the pairs (text embedding, image embedding) at `path`. Returns None if the split has no pairs.

    splits: the shares of the splits "train", "validation" and "test"
    split: one of these names, or "all" for every pair
    world: the number of ranks

    Raises ConfigError if the folder has another layout, if files or rows do not match, if the shares do not sum to 1,
    or if a split has fewer pairs than `world`. A row with NaN, infinity or only zeros raises ConfigError here if the
    data have at most 64 MB; if they are larger, reading the row raises BadSample.
    """
    pairs = open_all_pairs(path)
    begin, end = (
        (0, len(pairs)) if split == "all" else _compute_split_bounds(len(pairs), splits, world)[SPLITS.index(split)]
    )
    return Pairs(pairs, split, begin, end) if end > begin else None


def open_all_pairs(path: str | Path) -> "Stored":
    """Opens all pairs (text embedding, image embedding) in a folder, or the built-in ones. Raises ConfigError if the
    folder has another layout, if files or rows do not match, or, in data of up to 64 MB, if a row has NaN, infinity or
    only zeros.
    """
    return open_builtin_pairs() if str(path) == BUILTIN else _open_pairs_folder(Path(path))


def read_encoder_fingerprint(path: str | Path) -> str | None:
    """Returns the fingerprint of the encoder that made the image embeddings in a folder, from its pairs.json. Returns
    "builtin:emoji-pairs" for the built-in pairs, None if pairs.json is missing or names no encoder.
    """
    return (
        BUILTIN if str(path) == BUILTIN else (read_pairs_json_if_intact(Path(path) / PLAN) or {}).get("image_encoder")
    )


def read_data_fingerprint(path: str | Path) -> str | None:
    """Returns the fingerprint of the images from which the embeddings in a folder were made, as its pairs.json holds
    it. Returns None if pairs.json is missing or holds no such fingerprint.
    """
    return (read_pairs_json_if_intact(Path(path) / PLAN) or {}).get("data")


class Pairs(Source):
    """One split of the pairs: the rows of `stored` at the positions `begin` to `end` - 1 of a fixed permutation. Items
    of a split other than "train" also have the text of the next pair, as other_text_embed or other_caption.
    """

    noun = "embedding pairs"

    def __init__(self, stored: "Stored", split: str, begin: int, end: int) -> None:
        self.stored, self.split, self.begin, self.count = stored, split, begin, end - begin
        self.light = stored.size < 1 << 30  # small tables: workers only cost
        self.permutation = Order(len(stored))
        self.rows = self.permutation.find_sample_index(np.arange(begin, end)) if self.count <= _LISTED else None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        item = self.stored.read_row(self._find_row_of_sample(index))
        if self.split != "train" and len(self) > 1:
            other = self.stored.read_row(self._find_row_of_sample((index + 1) % len(self)))
            item |= {f"other_{name}": other[name] for name in ("text_embed", "caption") if name in other}
        return item

    def name_sample(self, index: int) -> str:
        """Returns the name of a pair for messages: FILE[row]."""
        return self.stored.tables["image_embed"].describe_row(self._find_row_of_sample(index))

    def compute_fingerprint(self) -> str:
        return (
            f"embeddings {self.split} n={len(self)} of {len(self.stored)} from {self.begin} "
            f"{self.stored.compute_fingerprint()}"
        )

    def describe_samples(self) -> str:
        """Returns a line with the number of pairs in this split and in all, and which embeddings they have."""
        names = [*self.stored.tables, *(["caption"] if self.stored.captions is not None else [])]
        return f"{len(self):,} of {len(self.stored):,} {self.noun}: {', '.join(names)}"

    def _find_row_of_sample(self, index: int) -> int:
        """Returns the row, in the tables of all pairs, of the sample at `index` of this split."""
        return (
            int(self.rows[index]) if self.rows is not None else self.permutation.find_sample_index(self.begin + index)
        )


class Stored:
    """All rows of embedding pairs. tables: embeddings by their name in a batch. captions: the pairs' captions if models
    read them, else None. Raises ConfigError if the tables have at most 64 MB and a row has NaN, infinity or, as an
    embedding, only zeros.
    """

    def __init__(self, tables: dict[str, Table], captions: Captions | None = None) -> None:
        self.tables, self.captions = tables, captions
        self.size = sum(table.size for table in tables.values())  # bytes
        if self.size <= _SCANNED:
            for table in tables.values():
                table.require_usable_rows()

    def __len__(self) -> int:
        return len(self.tables["image_embed"])

    def read_row(self, row: int) -> dict[str, Tensor]:
        """Returns row `row` of all tables as an item. A missing caption becomes "" if there is a text embedding.

        Raises BadSample if a caption is missing without a text embedding, if a value is not finite, or if an embedding
        is all zeros.
        """
        item = {name: self.read_row_of_table(name, row) for name in self.tables}
        if self.captions is not None:
            try:
                item["caption"] = self.captions[row]
            except BadSample:
                if "text_embed" not in self.tables:
                    raise
                item["caption"] = pack_caption("")  # with a text embedding the pair is of use without a caption
        return item

    def read_row_of_table(self, table_name: str, row: int) -> Tensor:
        """Returns row `row` of the table `table_name`, such as "image_embed": float32, or bool for a mask. Raises
        BadSample if a value is not finite, or if an embedding is all zeros.
        """
        table = self.tables[table_name]
        values = convert_floats_to_float32(table[row])
        if fault := find_faulty_row(values[None], table_name):
            raise BadSample(table.describe_row(row), fault[1])
        return torch.from_numpy(values)

    def compute_fingerprint(self) -> str:
        """Returns "shards=HASH rows=HASH".

        The first hash covers the name, length, first and last row of each file of embeddings, and the name, length,
        size and both ends of each file of captions. The second hash covers rows of embeddings: all if all tables
        together have at most 64 MB, else 256 of each table. It covers no rows of the built-in data.
        """
        digest, rows = blake2b(digest_size=8), blake2b(digest_size=8)
        for part in (*self.tables.values(), *([self.captions] if self.captions else [])):
            part.hash_file_ends_into(digest)
        for table in self.tables.values():
            table.hash_rows_into(rows, None if self.size <= _SCANNED else _COMPARED)
        return f"shards={digest.hexdigest()} rows={rows.hexdigest()}"


def _open_pairs_folder(root: Path) -> Stored:
    """Opens the embeddings in a folder, and also the captions if models read them. Raises ConfigError if the folder has
    another layout, if `dstrain encode` has not finished it, or if files or rows do not match.
    """
    if not has_embedding_pairs(root):
        raise ConfigError(
            f"data.path={root} holds no embedding pairs: give a folder with img_emb/ and text_emb/ of "
            f".npy files (clip-retrieval's layout), or {BUILTIN}"
        )
    if (root / PLAN).is_file() and not (read_pairs_json_if_intact(root / PLAN) or {}).get(
        "complete"
    ):  # other tools write no plan
        raise ConfigError(
            f"data.path={root} is not embedded to the end: give the `dstrain encode` command that "
            "began it once more, and it goes on where it stopped"
        )
    tables = {}
    for key, folder in FOLDERS.items():
        names = _list_files_by_number(root, folder, ".npy")
        if names:
            tables[key] = Table(key, names, root)
    if "image_embed" not in tables:
        raise ConfigError(f"data.path={root}: img_emb/ holds no .npy file")
    names = _list_files_by_number(root, "metadata", ".parquet")
    if "text_embed" not in tables and not names:
        raise ConfigError(f"data.path={root} has neither text_emb/*.npy nor captions in metadata/*.parquet: add one")
    # Beside text embeddings, only models that read text tokens use captions, which may be missing.
    needed = "text_embed" not in tables or (
        "text_encodings" not in tables and names and Captions.has_caption_columns(root, names)
    )
    captions = Captions(root, names) if needed else None
    first = tables["image_embed"]
    for other in (*list(tables.values())[1:], *([captions] if captions else [])):
        _require_matching_tables(first, other)
    if (
        "text_mask" in tables
        and "text_encodings" in tables
        and tables["text_mask"].shape != tables["text_encodings"].shape[:1]
    ):
        raise ConfigError(
            f"data.path={root}: text_mask/ has {tables['text_mask'].shape[0]} tokens a row, "
            f"text_encodings/ {tables['text_encodings'].shape[0]}"
        )
    return Stored(tables, captions)


def read_pairs_json_if_intact(path: Path) -> dict[str, Any] | None:
    """Returns the JSON object in a file pairs.json, in which `dstrain encode` notes what it makes; None if the file is
    missing or damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _require_matching_tables(first: Table, second: Any) -> None:
    """Raises ConfigError unless the files of two tables match one by one: as many files, with as many rows each, and
    with the same numbers at the ends of their names. The message names the first difference.

    Files whose names end in different words, such as part_images and part_texts, match; but if the two tables have any
    ending in common, all endings must be equal.
    """
    ends, others = ([_extract_last_name_part(name) for name in names] for names in (first.names, second.names))
    for a, b, x, y in zip(first.names, second.names, ends, others):
        # Words may name the content (part_images, part_texts), unless both folders use the same words.
        if x != y and ((x.isdigit() and y.isdigit()) or set(ends) & set(others)):
            raise ConfigError(
                f"data.path: {a} and {b} would be pairs, and their names say otherwise: each file needs "
                "its counterpart of the same number"
            )
    for a, b, rows, other_rows in zip(first.names, second.names, first.lengths, second.lengths):
        if rows != other_rows:
            raise ConfigError(
                f"data.path: {a} has {rows} rows and {b} {other_rows}: rows of one number are one pair; "
                "make the files anew from one list of pairs"
            )
    if len(first.names) != len(second.names):
        raise ConfigError(
            f"data.path: {len(first.names)} files like {first.names[0]} and {len(second.names)} like "
            f"{second.names[0]}: each needs its counterpart"
        )


def _list_files_by_number(root: Path, folder: str, suffix: str) -> list[str]:
    """Returns FOLDER/NAME of the files with a suffix in root/FOLDER, ordered by the numbers in their names: img_emb_2
    before img_emb_10. Leaves out hidden files. Returns [] if there is no such folder.
    """
    if not (root / folder).is_dir():
        return []
    names = [path.name for path in (root / folder).iterdir() if path.suffix == suffix and path.name[0] != "."]

    def make_numeric_sort_key(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]

    return [f"{folder}/{name}" for name in sorted(names, key=make_numeric_sort_key)]


def _extract_last_name_part(name: str) -> str:
    """Returns the part of a file's name between its last underscore and its suffix, such as "images". A number loses
    its leading zeros. Returns all before the suffix if there is no underscore.
    """
    word = Path(name).stem.rpartition("_")[2]
    return str(int(word)) if word.isdigit() else word


def open_builtin_pairs() -> Stored:
    """Returns the built-in pairs of embeddings. `map_builtin_captions_to_rows` gives the caption of each row."""
    with np.load(_FILE) as file:
        tables = {}
        for key, name in (("image_embed", "image"), ("text_embed", "text")):
            levels = np.frombuffer(lzma.decompress(file[name].tobytes()), np.int8).reshape(int(file["dim"]), -1).T
            values = levels.astype(np.float32) * file[f"{name}_scale"]
            values /= np.linalg.norm(values, axis=1, keepdims=True)
            tables[key] = Table(key, [f"{BUILTIN}/{name}"], arrays=[values])
    return Stored(tables)


def map_builtin_captions_to_rows() -> dict[str, int]:
    """Returns {caption: row} of the built-in embedding pairs."""
    with np.load(_FILE) as file:
        captions = lzma.decompress(file["captions"].tobytes()).decode().split("\n")
    return {caption: row for row, caption in enumerate(captions)}


def _compute_split_bounds(count: int, splits: tuple[float, ...], world: int) -> list[tuple[int, int]]:
    """Divides `count` rows into the splits "train", "validation" and "test", by their shares `splits`. Returns (first
    row, last row + 1) of each. The bounds are the cumulative shares of `count`, rounded.

    Raises ConfigError if the shares do not sum to 1, or if a split has fewer rows than `world`. Only validation and
    test may have the share 0.
    """
    shares = json.dumps(list(splits))
    parts = [Fraction(str(fraction)) for fraction in splits]
    if len(parts) != len(SPLITS) or min(parts) < 0 or abs(sum(parts) - 1) > Fraction(1, 10**6):
        raise ConfigError(f"data.splits={shares}: give the shares of {', '.join(SPLITS)}, 0 or more, which sum to 1")
    ends = [int(count * sum(parts[: k + 1]) / sum(parts) + Fraction(1, 2)) for k in range(len(parts))]
    bounds = list(zip([0, *ends[:-1]], ends))
    for split, fraction, (begin, end) in zip(SPLITS, parts, bounds):
        if (fraction or split == "train") and end - begin < world:
            raise ConfigError(
                f"data.splits={shares} of {count} pairs leaves {end - begin} for {split}, fewer than the "
                f"{world} ranks: give more pairs, a larger share, or 0 to leave {split} out"
            )
    return bounds
