"""Makes the embedding pairs of captioned images, on which a prior trains, once and on all ranks.

The folder has clip-retrieval's layout (see cached/embeddings.py): img_emb/, text_emb/, metadata/ with the captions and,
if --text-encodings asks for them, text_encodings/ and text_mask/. Shards are dealt to the ranks in turn; each is
embedded in batches of one fixed shape, cut at the shard's own borders, so that its bytes do not depend on the number of
ranks. Beside them,

    FOLDER/pairs.json                 what is embedded by what, and whether all of it is there
    FOLDER/done/shard_00000.json      the hash of each file of that shard, and which pairs of it could not be read;
                                      written last: a shard is whole or made again
"""

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dstrain.commands.encoding.folder import (
    SAME_COMMAND,
    count_samples,
    describe_changes,
    lock_and_prepare_folder,
    make_missing_shards,
    require_few_unreadable_samples,
)
from dstrain.commands.options.encode import EncodeOptions
from dstrain.data.cached.embeddings import PLAN, read_pairs_json_if_intact
from dstrain.data.cached.rows import FOLDERS
from dstrain.data.index.build import run_on_rank_0
from dstrain.data.source import Source, describe_truncated_captions, pad_and_stack_texts, read_items_or_substitutes
from dstrain.data.sources.captioned import open_captioned_source
from dstrain.disk import atomic
from dstrain.distributed import group
from dstrain.distributed.progress import Bar, get_phases
from dstrain.encoders.autoencoder import hash_network
from dstrain.encoders.image import ImageEncoder
from dstrain.encoders.text import TextEncoder, unpack_captions
from dstrain.recipe import ConfigError, explain_write_errors, reword_errors
from dstrain.runs.folders import is_same_data


@dataclass(frozen=True)
class Encoders:
    """Holds the image encoder and the text encoder."""

    image: ImageEncoder
    text: TextEncoder


def embed_image_caption_pairs(options: EncodeOptions) -> dict[str, Any]:
    """Embeds captioned images and their captions into options.out, on all ranks together. Returns the final content of
    pairs.json.

    Raises ConfigError if the options do not suit the data, if too many pairs are unreadable, or if the folder holds
    other pairs.
    """
    assert options.image_encoder is not None and options.text_encoder is not None and options.data is not None
    with reword_errors(
        options={
            "image_encoder:": "--image-encoder:",
            "model.text_encoder:": "--text-encoder:",
            "max_text_len:": "--max-text-len:",
        }
    ):
        encoders = Encoders(
            ImageEncoder(options.image_encoder).to(group.device()),
            TextEncoder(options.text_encoder, options.max_text_len).to(group.device()),
        )
    earlier = run_on_rank_0(lambda: read_pairs_json_if_intact(options.out / PLAN))
    upright = options.upright and (earlier is None or earlier.get("upright", False))
    source = open_captioned_source(options.data, encoders.image.image_size, upright)
    if group.rank() == 0:
        print(f"data: {options.data}: {source.describe_samples()}", flush=True)
        get_phases().print_lines(*describe_truncated_captions(source, encoders.text))
    plan = _describe_embedding_settings(options, encoders, source) | ({"upright": True} if upright else {})
    count = -(-plan["pairs"] // options.shard_size)
    with lock_and_prepare_folder(options.out, "embeds", lambda: _prepare_folder_or_return_problem(options, plan)):
        notes = make_missing_shards(
            range(count),
            lambda number: _read_record_if_shard_whole(options.out, number),
            lambda missing: _embed_missing_shards(options, encoders, source, missing),
        )
        bad = dict(entry for note in notes.values() for entry in note["unreadable"])
        require_few_unreadable_samples(bad, plan["pairs"], options.max_bad_fraction, "pairs")
        plan |= {"complete": True, "unreadable": len(bad), "without_caption": source.num_uncaptioned}
        if group.rank() == 0:
            atomic.write_file(options.out / PLAN, json.dumps(plan, sort_keys=True, indent=1) + "\n")
    return plan


def _describe_embedding_settings(options: EncodeOptions, encoders: Encoders, source: Source) -> dict[str, Any]:
    """Returns the content of pairs.json before anything is embedded: all settings and fingerprints on which the bytes
    of the folder depend.
    """
    image, text = encoders.image, encoders.text
    weights = image.state_dict() | dict(image.named_buffers())
    return {
        "text_encodings": options.text_encodings,
        "batch": options.batch,
        "shard_size": options.shard_size,
        "dtype": options.dtype,
        "pairs": len(source),
        "image_embed_dim": image.embed_dim,
        "text_embed_dim": text.embed_dim,
        "max_text_len": text.max_length,
        "text_encodings_dim": text.encodings_dim,
        "text_encoder": text.compute_fingerprint(),
        "complete": False,
        "image_encoder": hash_network({"class": type(image.model).__name__}, weights),
        "data": group.broadcast_from_first(source.compute_fingerprint() if group.rank() == 0 else None),
    }


def _prepare_folder_or_return_problem(options: EncodeOptions, plan: dict[str, Any]) -> str | None:
    """Writes pairs.json into options.out, makes the folders beside it, and removes half-written files. Returns None, or
    a message if the folder holds other embeddings or other files.
    """
    out, path = options.out, options.out / PLAN
    if path.exists():
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
            keys = [key for key in plan if key != "complete"]
            if is_same_data(str(earlier.get("data")), plan["data"]):
                keys.remove("data")
            changes = describe_changes(earlier, plan, keys)
        except (OSError, ValueError, AttributeError):
            return f"--out {path} is damaged: delete it if {out} is of the same embeddings, or name another folder"
        if changes:
            return f"--out {out} holds other embeddings: {changes}. Name another folder"
    elif strangers := sorted(entry.name for entry in out.iterdir() if entry.name[0] != "."):
        return f"--out {out} holds {', '.join(strangers[:3])} and no {PLAN}: name a new folder"
    for name in (*FOLDERS.values(), "metadata", "done"):
        if options.text_encodings or name not in ("text_encodings", "text_mask"):
            (out / name).mkdir(exist_ok=True)
            for leftover in (out / name).glob("*.tmp"):
                leftover.unlink()
    atomic.write_file(path, json.dumps(plan, sort_keys=True, indent=1) + "\n")
    return None


def _read_record_if_shard_whole(out: Path, number: int) -> dict[str, Any] | None:
    """Returns the content of a shard's done/shard_N.json. Returns None if that file cannot be read, or if a file of the
    shard has another hash than it says.
    """
    try:
        note = json.loads(_make_shard_record_path(out, number).read_text(encoding="utf-8"))
        whole = all(_hash_bytes((out / name).read_bytes()) == digest for name, digest in note["files"].items())
        return note if whole and isinstance(note["unreadable"], list) else None
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None


def _make_shard_record_path(out: Path, number: int) -> Path:
    """Returns the path of a shard's done/shard_N.json in the folder `out`."""
    return out / "done" / f"shard_{number:05d}.json"


def _hash_bytes(data: bytes) -> str:
    """Returns a BLAKE2b hash of 32 bytes, as hexadecimal text."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def _embed_missing_shards(
    options: EncodeOptions, encoders: Encoders, source: Source, missing: list[int]
) -> dict[int, dict[str, Any]]:
    """Embeds and writes this rank's share of the shards in `missing`. Returns, by shard number, the content of
    done/shard_N.json: hashes of the shard's files, and its unreadable pairs. Raises ConfigError if too many pairs are
    unreadable, or if a file cannot be written.
    """
    notes: dict[int, dict[str, Any]] = {}
    all_bad: dict[str, str] = {}
    mine, total = missing[group.rank() :: group.world()], len(source)
    with Bar("encoding", total=count_samples(mine, options.shard_size, total), unit="pair") as bar:
        for number in mine:
            _make_shard_record_path(options.out, number).unlink(missing_ok=True)
            parts: list[dict[str, Any]] = []
            unreadable: set[tuple[str, str]] = set()
            stop = min((number + 1) * options.shard_size, total)
            for start in range(number * options.shard_size, stop, options.batch):
                rows = range(start, min(start + options.batch, stop))
                items, bad = read_items_or_substitutes(source, list(rows))
                unreadable.update(bad)
                require_few_unreadable_samples(all_bad | dict(unreadable), total, options.max_bad_fraction, "pairs")
                parts.append(_embed_batch(options, encoders, items))
                bar.update(len(rows))
            notes[number] = _write_shard(options.out, number, parts, sorted(unreadable))
            all_bad |= dict(unreadable)
    return notes


@torch.no_grad()
def _embed_batch(options: EncodeOptions, encoders: Encoders, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Embeds n pairs of image and caption, at most a batch. Returns arrays (n, ...) by name in the dtype in which they
    are stored, and the n texts as "captions". Fills up a smaller batch with copies of the last pair. Raises ConfigError
    if a value is not finite in that dtype.
    """
    full = [*items, *[items[-1]] * (options.batch - len(items))]
    captions = unpack_captions(pad_and_stack_texts([item["caption"] for item in full]))
    texts = encoders.text.encode(captions)
    embedded = {"image_embed": encoders.image.encode(torch.stack([item["image"] for item in full]).to(group.device()))}
    embedded |= {
        name: texts[name]
        for name in ("text_embed", "text_encodings", "text_mask")
        if options.text_encodings or name == "text_embed"
    }
    arrays: dict[str, Any] = {}
    for name, values in embedded.items():
        with np.errstate(over="ignore"):
            arrays[name] = values[: len(items)].cpu().numpy().astype(bool if name == "text_mask" else options.dtype)
        if name != "text_mask" and not np.isfinite(arrays[name]).all():
            raise ConfigError(f"{name} is not finite in {options.dtype}: take --dtype float32, or other encoders")
    return arrays | {"captions": captions[: len(items)]}


def _write_shard(
    out: Path, number: int, batches: list[dict[str, Any]], unreadable: list[tuple[str, str]]
) -> dict[str, Any]:
    """Writes the files of one shard, and last its done/shard_N.json. Returns the content of done/shard_N.json: hashes
    of the files, and the unreadable pairs in `unreadable`. `batches` are the shard's batches. Raises ConfigError if a
    file cannot be written.
    """
    note: dict[str, Any] = {"files": {}, "unreadable": unreadable}
    with explain_write_errors(f"--out {out}", SAME_COMMAND):
        for name in batches[0]:
            if name == "captions":
                path = f"metadata/metadata_{number:05d}.parquet"
                data = _encode_captions_as_parquet([caption for part in batches for caption in part["captions"]])
            else:
                path = f"{FOLDERS[name]}/{FOLDERS[name]}_{number:05d}.npy"
                buffer = io.BytesIO()
                np.save(buffer, np.concatenate([part[name] for part in batches]))
                data = buffer.getvalue()
            atomic.write_file(out / path, data)
            note["files"][path] = _hash_bytes(data)
        atomic.write_file(_make_shard_record_path(out, number), json.dumps(note, indent=1) + "\n")
    return note


def _encode_captions_as_parquet(captions: list[str]) -> bytes:
    """Returns the bytes of a Parquet file whose column `caption` holds the captions."""
    import pyarrow  # slow to import
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"caption": pyarrow.array(captions, pyarrow.string())}), buffer)
    return buffer.getvalue()
