"""Shards of encoded samples: the format that dstrain/commands/encode.py writes and data/cached/latents.py reads.

    FOLDER/encoding.json               what is encoded by what, written first, so that no other encoding is mixed in
    FOLDER/shard_00000.safetensors     `shard_size` samples each, the last one fewer
    FOLDER/index.json                  written last: the same, statistics, size and hash of each shard

A shard holds, for its n samples in the order of the data,

    moments   float16 or float32 (n, flips, 2, C, h, w)    latent mean and standard deviation, of the plain image and,
                                                           with flips 2, of the mirrored one; (n, flips, 1, C, h, w)
                                                           where samples of the posterior were taken over from others
    tokens    int32 (n, flips, h, w)                       instead of moments, where the codes are discrete
    label     int64 (n,)                                   class
    source    int64 (n,)                                   index in the data; the substitute's if a file was unreadable

With several crops, one follows the other, each with its mirrored one: (n, crops * flips, ...). For videos, tokens are
int32 (n, 1, t, h, w), and there are frames int64 (n,), how many of a clip's frames are real; padding follows. Texts are

    caption   uint8 (n, W)                                 UTF-8 filled up with zeros; for images (n, K, W). W is 512,
                                                           and more in a shard with a longer caption
    captions  int64 (n,)                                   for images: how many of the K captions are there
    text_encodings float16 or float32 (n, L, E), text_mask bool (n, L)     the last states of a text encoder's tokens,
                                                           for images (n, K, L, E) and (n, K, L)

The header holds, as JSON under `shard`, sums for the statistics, the unreadable files, and a hash of the whole shard. A
shard is thus a function of its content alone and proves by itself that it is whole. What is used together (mean and
deviation of one image) lies together on the disk.
"""

import hashlib
import io
import json
import math
import mmap
import re
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from dstrain.data.files.storage import retry
from dstrain.disk import sealed
from dstrain.recipe import ConfigError, NotRead

INDEX, ENCODING = "index.json", "encoding.json"
FORMAT = 1
# Entries of the encodings of caches, by name, that are equal where one is trained on and the other held out.
ENCODED_ALIKE = (
    "first_stage",
    "kind",
    "image_size",
    "channels",
    "shape",
    "num_frames",
    "frame_stride",
    "captions",
    "text",
)
CAPTION_BYTES = 512  # of the captions of a shard, where none is longer
_DTYPES = {"F16": np.float16, "F32": np.float32, "I32": np.int32, "I64": np.int64, "U8": np.uint8, "BOOL": np.bool_}
_NAMES = re.compile(r"(index\.json|encoding\.json|shard_\d{5,}\.safetensors)(\.tmp)?")

Arrays = dict[str, np.ndarray]


def name_shard(number: int) -> str:
    return f"shard_{number:05d}.safetensors"


def pack_shard(arrays: Arrays, facts: dict[str, Any]) -> bytes:
    """Packs arrays into a shard, a safetensors file, and returns its bytes. The header holds the JSON values `facts`,
    and a hash of facts and arrays.
    """
    # safetensors writes an array's memory as it lies, so the layout must be C-contiguous.
    arrays = {name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)}
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=32)
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array)
    # One metadata entry: safetensors writes several in random order.
    return save(arrays, {"shard": json.dumps({**facts, "hash": digest.hexdigest()}, sort_keys=True)})


def verify_and_parse_metadata(data: bytes) -> dict[str, Any]:
    """Checks the bytes of a shard against their hash, and returns its metadata: the `facts` given to `pack_shard`, and

    "hash": the hash of facts and arrays
    "labels": (label, how often it occurs) of each label
    "cut": whether an older version of dstrain may have cut captions off

    Raises ConfigError if a byte is missing or altered.
    """
    try:
        facts, arrays = json.loads(_read_header(io.BytesIO(data))["__metadata__"]["shard"]), load(data)
        whole = pack_shard(arrays, {name: value for name, value in facts.items() if name != "hash"}) == data
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError):
        whole = False
    if not whole:  # The facts and arrays are packed again: not even a byte of padding may differ.
        raise ConfigError("has altered or missing bytes")
    cut = "caption" in arrays and "caption_bytes" not in facts and bool(arrays["caption"][..., -4:].any())
    return facts | {"labels": _count_labels(arrays["label"]), "cut": cut}


def read_unverified_metadata(path: Path) -> dict[str, Any] | None:
    """Returns the metadata of a shard, without comparing its hash: the `facts` given to `pack_shard`, "hash", and
    "labels", which is (label, how often it occurs) of each label. Returns None if the file cannot be read or is no
    shard.
    """
    try:
        if not path.is_file():  # a FIFO would wait for ever
            return None
        with open(path, "rb") as file:
            header = _read_header(file)
            begin, end = header["label"]["data_offsets"]
            file.seek(begin, io.SEEK_CUR)
            return json.loads(header["__metadata__"]["shard"]) | {
                "labels": _count_labels(np.frombuffer(file.read(end - begin), np.int64))
            }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _count_labels(labels: np.ndarray) -> list[tuple[int, int]]:
    """Returns (label, how often it occurs) of each label."""
    values, counts = np.unique(labels, return_counts=True)
    return list(zip(values.tolist(), counts.tolist()))


def read_verified_metadata(path: Path, entry: dict[str, Any] | None = None) -> dict[str, Any]:
    """Checks every byte of a shard, and returns its metadata as `verify_and_parse_metadata` does. Raises ConfigError,
    which names the file, if the shard is missing or damaged, or if its hash is not that of `entry`.

    entry: the shard's entry in index.json; None if there is no index yet
    """
    try:
        facts = verify_and_parse_metadata(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing") from None
    except ConfigError as error:
        raise ConfigError(f"{path} {error}") from None
    if entry is not None and facts["hash"] != entry["hash"]:
        raise ConfigError(f"{path} is another shard than the index was written for")
    return facts


def read_encoding_hash(path: Path) -> str | None:
    """Returns the hash of the encoding (see `hash_encoding`) that a shard's header holds. Returns None if the header
    cannot be read or holds none.
    """
    return (read_unverified_metadata(path) or {}).get("encoding")


def make_shard_record(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the record of a shard that `make_index_body` takes: "name", "size" in bytes, and from `facts` those of
    "hash", "sums", "bad", "labels" and "caption_bytes" that it has.
    """
    return {
        "name": path.name,
        "size": path.stat().st_size,
        **{key: facts[key] for key in ("hash", "sums", "bad", "labels", "caption_bytes") if key in facts},
    }


def join_batch_arrays(parts: list[Arrays]) -> Arrays:
    """Joins the arrays of several batches, by name, to the arrays of one shard. Captions are filled up with zeros to
    the length of the longest, and to 512 bytes at least.
    """
    wide = max(CAPTION_BYTES, *(part["caption"].shape[-1] for part in parts if "caption" in part), 0)
    return {name: np.concatenate([_pad_if_captions(part[name], name, wide) for part in parts]) for name in parts[0]}


def _pad_if_captions(array: np.ndarray, name: str, width: int) -> np.ndarray:
    """Returns `array` filled up with zeros to `width` bytes if `name` is "caption"; any other array unchanged."""
    missing = width - array.shape[-1] if name == "caption" else 0
    return np.pad(array, [*[(0, 0)] * (array.ndim - 1), (0, missing)]) if missing else array


Layout = dict[str, tuple[slice, type, list[int]]]  # of each array: bytes after the header, dtype, shape


def map_shard(path: Path, size: int, layouts: dict[Any, Layout], layout_key: tuple[int, int]) -> Arrays:
    """Maps a shard into memory, read-only, and returns its arrays by name.

    size: the file's size in bytes
    layouts: the layouts that are known, by key; an unknown one is read from the header and added
    layout_key: (number of samples, bytes of a caption); shards of one folder and one key have the same layout

    Raises ConfigError, which names the file, if it is missing or no shard; NotRead if the storage fails.
    """

    def map_content() -> np.ndarray:
        with open(path, "rb") as file:
            if layout_key not in layouts:
                layouts[layout_key] = _read_layout(file)
            # Not np.memmap, whose indexing runs Python code for each row.
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)

    try:
        whole = retry(map_content)
        entries = layouts[layout_key]
        begin = size - max(place.stop for place, _, _ in entries.values())
        if len(whole) != size or begin < 0:
            raise ValueError
        return {
            name: whole[begin + place.start : begin + place.stop].view(dtype).reshape(shape)
            for name, (place, dtype, shape) in entries.items()
        }
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing") from None
    except OSError as error:
        raise NotRead(f"{path} cannot be read ({error}): mend the storage, then give the same command again") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{path} is no shard, or its header is damaged") from None


def prefetch_rows(array: np.ndarray, rows: np.ndarray) -> None:
    """Asks the kernel to read rows of an array from `map_shard` into memory, and does not wait. rows: int64 (n,)."""
    # Without this, reading each row would wait for the disk.
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    begin, size, memory = array.ctypes.data - whole.ctypes.data, array[0].nbytes, memoryview(whole.base).obj
    for offset in (begin + rows * size).tolist():
        page = offset // mmap.PAGESIZE * mmap.PAGESIZE
        memory.madvise(mmap.MADV_WILLNEED, page, offset + size - page)


def _read_layout(file: BinaryIO) -> Layout:
    """Returns {name: (range of bytes, counted from the end of the header, dtype, shape)} of the arrays of an open
    shard.
    """
    header = _read_header(file)
    header.pop("__metadata__", None)
    return {
        name: (slice(*entry["data_offsets"]), _DTYPES[entry["dtype"]], entry["shape"]) for name, entry in header.items()
    }


def _read_header(file: BinaryIO) -> dict[str, Any]:
    """Returns the JSON header of an open shard. Leaves the file's position at the first array. Raises ConfigError if
    the header is missing or cut off, ValueError if it is not JSON.
    """
    word = file.read(8)
    length = int.from_bytes(word, "little")
    if len(word) < 8 or length > 1 << 26:
        raise ConfigError("no safetensors header")
    text = file.read(length)
    if len(text) < length:
        raise ConfigError("a truncated safetensors header")
    return json.loads(text)


def sum_codes_for_statistics(codes: np.ndarray) -> dict[str, Any]:
    """Returns sums over the codes of one shard, for statistics of all shards:

    "first": for latents, the sum of the means of each channel
    "second": for latents, the sum of mean^2 + variance of each channel
    "largest": for tokens, the largest id

    codes: int32 tokens; or latents (n, views, 1 or 2, C, h, w): the mean, and if there are 2 the standard deviation. A
        view is a crop, mirrored or not.
    """
    if codes.dtype == np.int32:
        return {"largest": int(codes.max())}
    mean = codes[:, :, 0].astype(np.float64)  # (n, flips, C, h, w)
    variance = codes[:, :, 1].astype(np.float64) ** 2 if codes.shape[2] == 2 else 0.0
    rest = (0, 1, 3, 4)
    return {"first": mean.sum(rest).tolist(), "second": (mean**2 + variance).sum(rest).tolist()}


def compute_latent_statistics(shards: list[dict[str, list[float]]], count: int) -> dict[str, Any]:
    """Returns statistics of the latents of all shards: "mean", "std", "channel_mean", "channel_std", and
    "scaling_factor" = 1 / std (Rombach et al. 2022, appendix G). The order of the shards does not matter.

    shards: what `sum_codes_for_statistics` returns for each shard
    count: the number of values of one channel in all shards

    Raises ConfigError if std is 0 or not finite.
    """
    first = [math.fsum(values) for values in zip(*(shard["first"] for shard in shards))]
    second = [math.fsum(values) for values in zip(*(shard["second"] for shard in shards))]

    def compute_mean_and_std(total: float, total_squares: float, number: int) -> tuple[float, float]:
        mean = total / number
        return mean, math.sqrt(max(total_squares / number - mean**2, 0.0))

    channels = [compute_mean_and_std(a, b, count) for a, b in zip(first, second)]
    mean, std = compute_mean_and_std(math.fsum(first), math.fsum(second), count * len(first))
    if not 0 < std < math.inf:
        raise ConfigError(f"the latents have a standard deviation of {std}: the first stage has learned nothing")
    return {
        "mean": mean,
        "std": std,
        "channel_mean": [mean for mean, _ in channels],
        "channel_std": [std for _, std in channels],
        "scaling_factor": 1 / std,
    }


def hash_encoding(encoding: dict[str, Any]) -> str:
    """Returns a hash of `encoding`, the dict that says what was encoded, by which model and how. The header of each
    shard holds this hash.
    """
    return hashlib.blake2b(json.dumps(encoding, sort_keys=True).encode(), digest_size=16).hexdigest()


def make_index_body(
    encoding: dict[str, Any], classes: list[str] | None, records: list[dict[str, Any]], versions: dict[str, str]
) -> dict[str, Any]:
    """Returns the content of a cache's index.json: the encoding, statistics of the codes, classes and their counts, the
    shards, and the files that could not be read.

    classes: names of the classes; None: the numbers from 0 to the largest label
    records: what `make_shard_record` returns for each shard, in order
    versions: version of each package

    Raises ConfigError if the latents' standard deviation is 0 or not finite.
    """
    summed = [record["sums"] for record in records]
    if encoding["kind"] == "tokens":
        summary = {"largest": max(shard["largest"] for shard in summed)}
    else:
        views = encoding.get("crops", 1) * encoding["flips"]
        summary = compute_latent_statistics(summed, encoding["number"] * views * math.prod(encoding["shape"][1:]))
    counts = Counter()
    for record in records:
        counts.update(dict(record["labels"]))
    if classes is None:
        classes = [str(label) for label in range(max(counts) + 1)]
    return {
        "format": FORMAT,
        "encoding": encoding,
        "classes": classes,
        "statistics": summary,
        "versions": versions,
        "class_counts": [counts[label] for label in range(len(classes))],
        "whole_captions": all("caption_bytes" in record for record in records),
        "shards": [
            {key: record[key] for key in ("name", "size", "hash", "caption_bytes") if key in record}
            for record in records
        ],
        "bad_files": sorted({tuple(entry) for record in records for entry in record["bad"]}),
    }


def has_encode_output(folder: Path) -> bool:
    """Returns whether `dstrain encode` has written into a folder. Looks into the files, since other tools may write
    files of the same names.
    """
    for name, begins in ((INDEX, rb'\{"hash": "[0-9a-f]{64}",\n"body": '), (ENCODING, rb'\{\s*"encoding": \{')):
        try:
            if not (folder / name).is_file():  # a FIFO would wait for ever
                continue
            with open(folder / name, "rb") as file:
                if re.match(begins, file.read(128)):
                    return True
        except OSError:
            continue
    return read_encoding_hash(folder / name_shard(0)) is not None


def read_encoding_json_or_index(folder: Path) -> dict[str, Any] | None:
    """Returns the content of encoding.json in a folder. If that file is missing or damaged, returns {"encoding": ...}
    with the encoding in index.json. Returns None if index.json is missing or damaged, too.
    """
    try:
        content = json.loads((folder / ENCODING).read_text(encoding="utf-8"))
        if isinstance(content["encoding"], dict) and isinstance(content.get("of", {}), dict):
            return content
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    try:
        return {"encoding": read_index(folder)["encoding"]}
    except ValueError:
        return None


def list_entries_not_from_encode(folder: Path) -> list[str]:
    """Returns the sorted names of a folder's entries, without those that `dstrain encode` uses if it has written into
    this folder. Leaves out hidden entries.
    """
    names = sorted(entry.name for entry in folder.iterdir() if entry.name[0] != ".")
    return [name for name in names if not _NAMES.fullmatch(name)] if has_encode_output(folder) else names


def read_index(folder: Path) -> dict[str, Any]:
    """Returns the content of index.json in a folder. Raises ConfigError if it is missing, cut off or altered, or if
    another version of dstrain has written it in another format.
    """
    path = folder / INDEX
    try:
        body = sealed.parse_json_if_hash_matches(path.read_bytes())
    except FileNotFoundError:
        if (folder / ENCODING).exists():
            raise ConfigError(
                f"{folder} is not encoded to the end: give the `dstrain encode` command that began it "
                "once more, and it goes on where it stopped"
            ) from None
        raise ConfigError(f"{folder} holds no {INDEX}: name a folder that `dstrain encode` has written") from None
    except OSError:
        body = None
    if body is None:
        raise ConfigError(f"{path} is truncated or altered: repeat the `dstrain encode` that wrote it")
    if body.get("format") != FORMAT:
        raise ConfigError(f"{path} has format {body.get('format')}, this version reads {FORMAT}: encode again")
    return body
