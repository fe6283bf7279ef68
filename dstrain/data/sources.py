"""The data section of a recipe, opened: images, embedding pairs, or what launch/encode.py has made of images."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from dstrain import ranks
from dstrain.config import Codes, Data
from dstrain.data.embeddings import BUILTIN, is_embeddings, open_pairs
from dstrain.data.images import open_images
from dstrain.data.latents import Latents, is_encoded


def open_sources(data: Data, verify: bool = False) -> tuple[Any, Any | None]:
    """The training source and the held-out one, None where a folder holds nothing out. `verify`: compare hashes, too.

    ValueError as `open_images` and `Latents`, and where the held-out codes are not of the kind that is trained on.
    """
    if is_embeddings(data.path):
        return open_split(data, "train"), open_split(data, "validation")
    if is_encoded(data.path):
        train, unseen = _open_codes(data)
        for codes in (train, unseen) if verify else ():
            if codes is not None:
                codes.verify()
        return train, unseen
    common = dict(channels=data.channels, held_out=data.held_out, held_out_path=data.held_out_path, draft=data.draft)
    train = open_images(data.path, data.image_size, split="train", **common)
    if data.path.startswith("builtin:") or data.held_out or data.held_out_path:
        return train, open_images(data.path, data.image_size, split="held_out", **common)
    return train, None


def open_split(data: Data, split: str) -> Any | None:
    """The train, validation or test split of embedding pairs, None where data.splits gives it nothing.

    ValueError as `open_pairs`, and for data that have no such splits.
    """
    if not is_embeddings(data.path):
        raise ValueError(f"data.path={data.path} has no split {split}: only embedding pairs are split by data.splits; "
                         "images have train and held_out")
    return open_pairs(data.path, data.splits, split, ranks.place().world)


def completed(data: Data) -> Data:
    """The section with what the index of a cache says in `codes`; None there for images.

    ValueError: the index is damaged, or the section says otherwise: image_size, channels, flip.
    """
    if not is_encoded(data.path):
        return data.model_copy(update={"codes": None})
    index = Latents(data.path).index
    encoding = index["encoding"]
    for key in ("image_size", "channels"):
        if getattr(data, key) != encoding[key]:
            raise ValueError(f"data.{key}={getattr(data, key)}: {data.path} was encoded from images of {key} "
                             f"{encoding[key]}; write data.{key}={encoding[key]}")
    if data.flip and encoding["flips"] == 1:
        raise ValueError(f"data.flip=true: {data.path} holds no mirrored images; write data.flip=false, or encode "
                         "without --no-flip")
    codes = Codes(kind=encoding["kind"], shape=encoding["shape"], flips=encoding["flips"],
                  scaling_factor=index["statistics"].get("scaling_factor"), first_stage=encoding["first_stage"])
    return data.model_copy(update={"codes": codes})


def require_kind(data: Data, system: str, fields: Collection[str]) -> None:
    """ValueError where a system, by the fields of its section, does not learn from what the (completed) data hold."""
    if data.codes is not None and "codes" not in fields:
        raise ValueError(f"data.path={data.path} holds cached {data.codes.kind}, and {system} learns from images: give "
                         "a folder of images, or system=dit")
    pairs = is_embeddings(data.path)
    if pairs and "image_embed_dim" not in fields:
        raise ValueError(f"data.path={data.path} holds embedding pairs, and {system} learns from images: give a folder "
                         "of images, or system=prior")
    if not pairs and "image_embed_dim" in fields and (Path(data.path).exists() or data.path.startswith("builtin:")):
        raise ValueError(f"data.path={data.path} holds no embedding pairs, from which alone {system} learns: give a "
                         f"folder with img_emb/ and text_emb/, or {BUILTIN}")
    if pairs and (data.held_out or data.held_out_path):
        raise ValueError("data.held_out and data.held_out_path are for images: embedding pairs are split by "
                         "data.splits")


def _open_codes(data: Data) -> tuple[Latents, Latents | None]:
    if data.held_out_path is None:
        train = Latents(data.path, "train", data.held_out)
        return train, Latents(data.path, "held_out", data.held_out) if data.held_out else None
    if not is_encoded(data.held_out_path):
        raise ValueError(f"data.held_out_path={data.held_out_path} holds images, data.path={data.path} cached codes: "
                         "encode the held-out images with the same first stage")
    train, unseen = Latents(data.path), Latents(data.held_out_path)
    for key in ("first_stage", "kind", "image_size", "channels", "shape"):
        ours, theirs = train.encoding[key], unseen.encoding[key]
        if ours != theirs:
            raise ValueError(f"data.held_out_path={data.held_out_path} has {key} {theirs}, data.path={data.path} has "
                             f"{ours}: encode both alike")
    if unseen.classes != train.classes:
        raise ValueError(f"data.held_out_path={data.held_out_path} has the classes {', '.join(unseen.classes[:5])}, "
                         f"data.path={data.path} {', '.join(train.classes[:5])}: encode the same classes")
    return train, unseen
