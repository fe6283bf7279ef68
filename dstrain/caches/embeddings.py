"""The embedding pairs of captioned images, made once by all ranks: what a prior trains on.

The folder has clip-retrieval's layout (see data/embeddings.py): img_emb/, text_emb/, metadata/ with the captions and,
where asked for, text_encodings/ and text_mask/. Shards are dealt to the ranks in turn; each is embedded in batches of
one fixed shape, cut at the shard's own borders, so that its bytes do not depend on the number of ranks. Beside them,

    FOLDER/pairs.json                 what is embedded by what, and whether all of it is there
    FOLDER/done/shard_00000.json      the hash of each file of that shard, and which pairs of it could not be read;
                                      written last: a shard is whole or made again
"""

import hashlib
import io
import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dstrain.data.captioned import open_captioned
from dstrain.data.embeddings import PLAN
from dstrain.data.rows import FOLDERS
from dstrain.data.source import Source, read_items
from dstrain.disk import atomic
from dstrain.encoders.autoencoder import fingerprint
from dstrain.encoders.image import ImageEncoder
from dstrain.encoders.text import TextEncoder, captions_of
from dstrain.ranks import group
from dstrain.recipe import ConfigError
from dstrain.runs import folders


@dataclass(frozen=True)
class EmbedOptions:
    """What to embed, and with what."""

    out: Path                                  # folder of the pairs
    data: str                                  # folder of X.png and X.txt, or of tar shards of such pairs
    image_encoder: str                         # a CLIP model: folder, or name on the hub
    text_encoder: str                          # a CLIP model or sentence encoder
    text_encodings: bool = False               # keep the vector of each text token, too
    max_text_len: int | None = None            # text tokens; None: what the encoder takes
    batch: int = 64                            # pairs of one call of the encoders
    shard_size: int = 16384                    # pairs
    dtype: str = "float16"                     # of embeddings on the disk: float16 or float32
    max_bad_fraction: float = 0.01             # of the pairs, replaced where unreadable


@dataclass(frozen=True)
class Encoders:
    """Both towers."""

    image: ImageEncoder
    text: TextEncoder


def embed(options: EmbedOptions) -> dict[str, Any]:
    """Writes options.out, on all ranks together; what pairs.json says in the end.

    ConfigError: what is asked for cannot be, more pairs than tolerated are unreadable, or the folder holds
    other embeddings.
    """
    try:
        encoders = Encoders(ImageEncoder(options.image_encoder).to(group.device()),
                            TextEncoder(options.text_encoder, options.max_text_len).to(group.device()))
    except ConfigError as error:
        key, _, said = str(error).partition(":")
        raise ConfigError(f"--{key.replace('_', '-')}:{said}") from None
    source = open_captioned(options.data, encoders.image.image_size)
    plan = _plan(options, encoders, source)
    count = -(-plan["pairs"] // options.shard_size)
    with _claimed(options.out) if group.rank() == 0 else nullcontext():
        problem = _prepared(options, plan) if group.rank() == 0 else None
        if problem := group.from_first(problem):
            raise ConfigError(problem)
        mine = range(group.rank(), count, group.world())
        there = {number for some in group.objects([number for number in mine if _whole(options.out, number)])
                 for number in some}
        missing = [number for number in range(count) if number not in there]
        _made(options, encoders, source, missing)
        group.barrier()                          # the notes of all ranks are there
        bad = {tuple(entry) for some in group.objects([entry for number in mine for entry in _bad(options.out, number)])
               for entry in some}
        _tolerate(len(bad), options, plan["pairs"])
        plan |= {"complete": True, "unreadable": len(bad), "without_caption": source.num_uncaptioned}
        if group.rank() == 0:
            atomic.write(options.out / PLAN, json.dumps(plan, sort_keys=True, indent=1) + "\n")
    group.barrier()
    return plan


def _plan(options: EmbedOptions, encoders: Encoders, source: Source) -> dict[str, Any]:
    """All that the bytes depend on."""
    image = encoders.image
    seen = fingerprint({"class": type(image.model).__name__}, image.state_dict() | dict(image.named_buffers()))
    kept = {name: value for name, value in asdict(options).items()
            if name in ("text_encodings", "batch", "shard_size", "dtype")}
    return {**kept, "pairs": len(source), "image_embed_dim": encoders.image.embed_dim,
            "text_embed_dim": encoders.text.embed_dim, "max_text_len": encoders.text.max_length,
            "text_encodings_dim": encoders.text.encodings_dim, "image_encoder": seen,
            "text_encoder": encoders.text.fingerprint(), "complete": False,
            "data": group.from_first(source.fingerprint() if group.rank() == 0 else None)}


def _claimed(out: Path) -> Any:
    try:
        return folders.claim(out, busy=f"--out {out}: another process embeds into it; wait for its end")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be made ({error.strerror}): name a folder that can be written") from None


def _prepared(options: EmbedOptions, plan: dict[str, Any]) -> str | None:
    """Makes the folder ready on rank 0; why it cannot be, else None."""
    path = options.out / PLAN
    if path.exists():
        try:
            there = json.loads(path.read_text(encoding="utf-8"))
            apart = [f"{key} {there.get(key)} there, {value} here" for key, value in plan.items()
                     if key != "complete" and there.get(key) != value
                     and not (key == "data" and folders.same_data(str(there.get(key)), value))]
        except (OSError, ValueError, AttributeError):
            return (f"--out {path} is damaged: delete it if {options.out} is of the same embeddings, or name another "
                    "folder")
        if apart:
            return f"--out {options.out} holds other embeddings: {'; '.join(apart)}. Name another folder"
    elif strangers := sorted(entry.name for entry in options.out.iterdir() if entry.name[0] != "."):
        return f"--out {options.out} holds {', '.join(strangers[:3])} and no {PLAN}: name a new folder"
    for folder in (*FOLDERS.values(), "metadata", "done"):
        if folder in ("text_encodings", "text_mask") and not options.text_encodings:
            continue
        (options.out / folder).mkdir(exist_ok=True)
        for leftover in (options.out / folder).glob("*.tmp"):
            leftover.unlink()
    atomic.write(path, json.dumps(plan, sort_keys=True, indent=1) + "\n")
    return None


def _whole(out: Path, number: int) -> bool:
    """Whether every file of a shard has the hash that was noted when it was written."""
    try:
        noted = json.loads(_note(out, number).read_text(encoding="utf-8"))
        return all(hashlib.blake2b((out / name).read_bytes(), digest_size=32).hexdigest() == digest
                   for name, digest in noted["files"].items())
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return False


def _bad(out: Path, number: int) -> list[list[str]]:
    """Name and reason of each pair of a whole shard that could not be read."""
    return json.loads(_note(out, number).read_text(encoding="utf-8"))["unreadable"]


def _note(out: Path, number: int) -> Path:
    return out / "done" / f"shard_{number:05d}.json"


def _made(options: EmbedOptions, encoders: Encoders, source: Source, missing: list[int]) -> None:
    """Embeds this rank's share of the missing shards."""
    count = 0
    mine, total = missing[group.rank()::group.world()], len(source)
    with tqdm(total=len(mine) * options.shard_size, unit="pair", disable=None if group.rank() == 0 else True) as bar:
        for number in mine:
            _note(options.out, number).unlink(missing_ok=True)
            parts: list[dict[str, Any]] = []
            found: list[tuple[str, str]] = []
            stop = min((number + 1) * options.shard_size, total)
            for start in range(number * options.shard_size, stop, options.batch):
                rows = range(start, min(start + options.batch, stop))
                items, bad = read_items(source, list(rows))
                found += bad
                _tolerate(count + len(set(found)), options, total)
                parts.append(_embedded(options, encoders, items))
                bar.update(len(rows))
            _write(options.out, number, parts, sorted(set(found)))
            count += len(set(found))


@torch.no_grad()
def _embedded(options: EmbedOptions, encoders: Encoders, items: list[dict[str, Tensor]]) -> dict[str, Any]:
    """One batch, filled up by its last pair to a fixed shape: arrays (n, ...) as stored, and captions."""
    full = items + items[-1:] * (options.batch - len(items))
    captions = captions_of(torch.stack([item["caption"] for item in full]))
    image = encoders.image.encode(torch.stack([item["image"] for item in full]).to(group.device()))
    texts = encoders.text.encode(captions)
    wanted = {"image_embed": image, "text_embed": texts["text_embed"]}
    if options.text_encodings:
        wanted |= {"text_encodings": texts["text_encodings"], "text_mask": texts["text_mask"]}
    arrays: dict[str, Any] = {}
    for name, values in wanted.items():
        with np.errstate(over="ignore"):
            arrays[name] = values[:len(items)].cpu().numpy().astype(bool if name == "text_mask" else options.dtype)
        if name != "text_mask" and not np.isfinite(arrays[name]).all():
            raise ConfigError(f"{name} is not finite in {options.dtype}: take --dtype float32, or other encoders")
    return arrays | {"captions": captions[:len(items)]}


def _write(out: Path, number: int, parts: list[dict[str, Any]], bad: list[tuple[str, str]]) -> None:
    """The files of one shard, and last the note that they are whole."""
    noted: dict[str, str] = {}
    try:
        for name in parts[0]:
            if name == "captions":
                path, data = f"metadata/metadata_{number:05d}.parquet", _parquet(
                    [caption for part in parts for caption in part["captions"]])
            else:
                path = f"{FOLDERS[name]}/{FOLDERS[name]}_{number:05d}.npy"
                buffer = io.BytesIO()
                np.save(buffer, np.concatenate([part[name] for part in parts]))
                data = buffer.getvalue()
            atomic.write(out / path, data)
            noted[path] = hashlib.blake2b(data, digest_size=32).hexdigest()
        atomic.write(_note(out, number), json.dumps({"files": noted, "unreadable": bad}, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written ({error.strerror}); what is there is whole: give the same "
                          "command again once it can") from None


def _parquet(captions: list[str]) -> bytes:
    import pyarrow                               # slow to import
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"caption": pyarrow.array(captions, pyarrow.string())}), buffer)
    return buffer.getvalue()


def _tolerate(bad: int, options: EmbedOptions, total: int) -> None:
    if bad > max(options.max_bad_fraction * total, 1 if options.max_bad_fraction else 0):
        raise ConfigError(f"{bad} of {total} pairs cannot be read, more than --max-bad-fraction "
                          f"{options.max_bad_fraction} tolerates: repair or remove them, or raise it")
