"""The data section of a recipe, opened: images, clips, embedding pairs, or what launch/encode.py has made of them."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dstrain.data.bad_files import listed
from dstrain.data.builtin.emoji import EMOJI
from dstrain.data.builtin.moving import MOVING, MovingFashion
from dstrain.data.cached.embeddings import BUILTIN, is_embeddings, open_pairs
from dstrain.data.cached.latents import Latents, is_encoded
from dstrain.data.decode.clips import VIDEOS, Cut
from dstrain.data.decode.crops import Crop
from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.files.listing import class_folders, listing
from dstrain.data.formats.base import Layout, Request
from dstrain.data.formats.imagenet import taken_apart
from dstrain.data.index.build import cache_folder, from_first, open_index
from dstrain.data.index.index import Index
from dstrain.data.mixture import open_mixture, with_codes_of
from dstrain.data.source import Source
from dstrain.data.sources.buckets import Sized, by_duration
from dstrain.data.sources.embedded import with_embeddings
from dstrain.data.sources.images import Images, open_images
from dstrain.data.sources.videos import CLIPS, open_videos
from dstrain.distributed import group
from dstrain.distributed.progress import phases
from dstrain.recipe import Codes, ConfigError, Data

BUILTINS = ("builtin:fashion", EMOJI, MOVING, BUILTIN)  # what data.path may be beside a folder
KINDS = {  # what data may hold: its name and the remedy, for messages
    "images": ("images", "give a folder of images"),
    "clips": ("videos", "give a folder of videos, with data.num_frames=17, say"),
    "latents": ("cached latents", "give what launch/encode.py makes by a KL autoencoder"),
    "image_tokens": ("cached tokens of images", "give what launch/encode.py makes by a discrete VAE"),
    "clip_tokens": ("cached tokens of videos", "give what launch/encode.py makes by a phenaki.tokenizer"),
    "pairs": ("embedding pairs", f"give a folder with img_emb/ and text_emb/, or {BUILTIN}"),
}


def open_sources(
    data: Data, verify: bool = False, run: Path | None = None, mixed: bool = False
) -> tuple[Source, Source | None]:
    """The training source and the held-out one, None where a folder holds nothing out; on all ranks together.

    verify: compare hashes, too. run: folder of the run that the command is about, where the index is kept. mixed: the
    section is of one source of a mixture.

    ConfigError as `open_images` and `Latents`, and where the held-out codes are not of the kind that is trained on.
    """
    if data.mixture:
        return open_mixture(data, lambda part: open_sources(part, verify, run, mixed=True))
    _require_read(data, mixed)
    phases().at(f"listing {data.path}")
    if is_embeddings(data.path):
        return open_split(data, "train"), open_split(data, "validation")
    if is_encoded(data.path):
        train, unseen = _open_codes(data)
        for codes in (train, unseen) if verify else ():
            if codes is not None:
                codes.verify()
        return train, unseen
    if not data.path.startswith("builtin:"):
        path, held_out_path = from_first(
            lambda: taken_apart(data.path, data.held_out, data.held_out_path, cache=data.cache)
        )
        data = data.model_copy(update={"path": path, "held_out_path": held_out_path})
    if data.num_frames is not None:
        return _open_clips(data, run, mixed)
    if data.path == MOVING or holds_videos(data.path):
        raise ConfigError(f"data.path={data.path} holds videos: write data.num_frames=17, say, for clips")
    request = request_of(data, captions=data.embeddings is not None, mixed=mixed, measured=data.buckets is not None)
    common = {
        "channels": data.channels,
        "held_out": data.held_out,
        "held_out_path": data.held_out_path,
        "draft": data.draft,
        "request": request,
        "index": data.index,
        "run": run,
        "crop": Crop.of(data),
        "sizes": data.size_conditions,
    }
    train = open_images(data.path, data.image_size, split="train", **common)
    if data.path.startswith("builtin:") or data.held_out or data.held_out_path:
        return _completed(data, train), _completed(
            data, open_images(data.path, data.image_size, split="held_out", **common)
        )
    return _completed(data, train), None


def _require_read(data: Data, mixed: bool) -> None:
    """ConfigError: entries about labels and columns of data that have their own."""
    own = data.path.startswith("builtin:") or is_encoded(data.path) or is_embeddings(data.path)
    entries = [
        f"data.{name}"
        for name in ("labels", "class_list", "columns")
        if getattr(data, name) != Data.model_fields[name].default
    ]
    if own and entries and not mixed and data.held_out_path is None:
        raise ConfigError(
            f"{', '.join(entries)}: the labels and captions of {data.path} are as they were made: leave it out"
        )


def _completed(data: Data, source: Source) -> Source:
    """With its embeddings, or in buckets, where the section asks for them."""
    if data.embeddings is not None:
        return with_embeddings(source, data.embeddings)
    if data.buckets is None:
        return source
    if not isinstance(source, Images):
        raise ConfigError(
            f"data.buckets: the images of {data.path} have one size: leave it out, or give a folder of images"
        )
    return Sized(source, data.buckets, data.max_upscale)


def request_of(data: Data, suffixes: tuple[str, ...] = SUFFIXES, **more: Any) -> Request:
    """What the section asks of the form of its data."""
    return Request(
        suffixes, labels=data.labels, class_list=data.class_list, columns=data.columns, cache=data.cache, **more
    )


def described(data: Data, source: Source, held_out: Source | None, folder: Path | None = None) -> list[str]:
    """What a command has found, a line each: what it trains on and what is held out; `folder` is the run's, whose list
    of unreadable files counts.
    """
    bad = listed(folder) if folder is not None else 0
    known = f"; {bad:,} unreadable files are listed in {folder / 'bad_files.txt'}" if bad else ""
    place = f"{data.held_out_path}: " if data.held_out_path else ""
    unseen = f"{place}{held_out.describe()}" if held_out is not None else "nothing"
    path = "" if data.mixture else f"{data.path}: "
    return [f"data: {path}{source.describe()}{known}", f"held out: {unseen}"]


def index_of(data: Data, captions: bool = False) -> tuple[Layout, Index]:
    """The form and the index of what a section names, which is kept on the disk. ConfigError as `open_index`.

    captions: of images, too; clips always have theirs.
    """
    if data.path.startswith("builtin:"):
        raise ConfigError(
            f"data.path={data.path} is in the package, and neither listed nor packed: name data of your own"
        )
    request = request_of(data, captions=captions)
    if data.num_frames is not None:
        request = request_of(data, CLIPS, noun="clips", captions=True, captions_file=data.captions)
    path, _ = taken_apart(data.path, data.held_out, data.held_out_path, whole=True)
    return open_index(path, request, data.index or cache_folder())


def _open_clips(data: Data, run: Path | None, mixed: bool) -> tuple[Source, Source | None]:
    height = data.height or data.image_size
    if data.path.startswith("builtin:") and data.buckets:
        raise ConfigError(
            f"data.buckets: the clips of {data.path} have one length: leave it out, or give a folder of videos"
        )
    if data.path == MOVING:
        settings = {
            "frame_stride": data.frame_stride != 1,
            "captions": data.captions,
            "images": data.images,
            "held_out_path": data.held_out_path,
        }
        unused = [f"data.{name}" for name, value in settings.items() if value]
        if unused:
            raise ConfigError(f"{', '.join(unused)}: {MOVING} makes all that itself: leave it out")
        if data.flip:
            raise ConfigError(
                f"data.flip=true: captions of {MOVING} say left and right, which a mirrored clip would "
                "belie: write data.flip=false"
            )
        size = (data.num_frames, height, data.image_size, data.channels)
        return MovingFashion(*size, "train"), MovingFashion(*size, "held_out")
    if data.path.startswith("builtin:"):
        raise ConfigError(
            f"data.num_frames={data.num_frames}: {data.path} holds no clips: leave it out, or write data.path={MOVING}"
        )
    cut = Cut(data.num_frames, height, data.image_size, data.channels, data.frame_stride)
    request = request_of(data, CLIPS, noun="clips", captions=True, mixed=mixed, measured=data.buckets is not None)
    common = {
        "held_out": data.held_out,
        "held_out_path": data.held_out_path,
        "captions": data.captions,
        "request": request,
        "index": data.index,
        "run": run,
    }
    train = open_videos(data.path, cut, split="train", images=data.images, image_share=data.image_share, **common)
    unseen = None
    if data.held_out or data.held_out_path:
        unseen = open_videos(data.path, cut, split="held_out", **common)
    if not data.buckets:
        return train, unseen
    return by_duration(train, data.durations), unseen and by_duration(unseen, data.durations)


def holds_videos(path: str) -> bool:
    """Whether a folder, or its first class, has videos in it and no images."""
    root, has_videos = Path(path), False
    with listing(root):
        classes = class_folders(root)[:1]
    for name in ("", *classes) if root.is_dir() else ():
        with listing(root), os.scandir(root / name) as entries:
            for entry in entries:
                suffix = os.path.splitext(entry.name)[1].lower()
                if suffix in SUFFIXES:
                    return False
                has_videos = has_videos or suffix in VIDEOS or suffix == ".gif"
    return has_videos


def open_split(data: Data, split: str) -> Source | None:
    """The train, validation or test split of embedding pairs, None where data.splits gives it nothing.

    ConfigError as `open_pairs`, and for data that have no such splits.
    """
    if not is_embeddings(data.path):
        raise ConfigError(
            f"data.path={data.path} has no split {split}: only embedding pairs are split by data.splits; "
            "images have train and held_out"
        )
    return open_pairs(data.path, data.splits, split, group.place().world)


def completed(data: Data) -> Data:
    """The section with what the index of a cache says in `codes`; None there for images and videos.

    ConfigError: the index is damaged, or the section says otherwise: sizes, channels, frames, flip.
    """
    if data.embeddings is not None and (is_encoded(data.path) or kind_of(data) != "images"):
        raise ConfigError(
            f"data.embeddings={data.embeddings} goes with images, and data.path={data.path} holds "
            "others: leave it out, or give the images"
        )
    if data.embeddings is not None and (data.mixture or data.buckets):
        raise ConfigError(
            f"data.embeddings={data.embeddings} goes with one source of squares: leave data.mixture and "
            "data.buckets out"
        )
    if data.mixture:
        parts = [completed(part) for part in data.parts()]
        for part, kind in zip(parts, kinds := [kind_of(part) for part in parts]):
            if kind != kinds[0] or kind == "pairs":
                remedy = "pairs are not mixed" if kind == "pairs" else "mix sources of one kind"
                raise ConfigError(
                    f"data.mixture: {part.path} holds {KINDS[kind][0]}, {data.path} {KINDS[kinds[0]][0]}: {remedy}"
                )
        return with_codes_of(data, parts)
    if not is_encoded(data.path):
        return data.model_copy(update={"codes": None})
    if data.buckets or data.size_conditions or data.crop != "center":
        kind = "images" if data.num_frames is None else "clips"
        raise ConfigError(
            f"data.buckets, data.crop, data.size_conditions: {data.path} holds codes of {kind} that were "
            f"cut to one size: leave them out, or give the {kind}"
        )
    index = Latents(data.path).index
    encoding = index["encoding"]
    videos = "num_frames" in encoding
    of_images = {"num_frames": None, "frame_stride": 1, "height": data.image_size}
    for key in ("image_size", "channels", *of_images):
        value = getattr(data, key) or of_images.get(key)
        encoded = encoding.get(key, of_images.get(key))
        if value != encoded:
            raise ConfigError(
                f"data.{key}={value}: {data.path} was encoded from {'clips' if videos else 'images'} of "
                f"{key} {encoded}; write data.{key}={'null' if encoded is None else encoded}"
            )
    if data.flip and videos:
        raise ConfigError(
            f"data.flip=true: {data.path} holds no mirrored videos, since captions name directions; "
            "write data.flip=false"
        )
    if data.flip and encoding["flips"] == 1:
        raise ConfigError(
            f"data.flip=true: {data.path} holds no mirrored images; write data.flip=false, or encode without --no-flip"
        )
    text = encoding.get("text") or {}
    codes = Codes(
        kind=encoding["kind"],
        shape=encoding["shape"],
        flips=encoding["flips"],
        scaling_factor=index["statistics"].get("scaling_factor"),
        first_stage=encoding["first_stage"],
        codebook_size=encoding.get("codebook_size"),
        text=text.get("shape"),
        text_encoder=text.get("encoder"),
    )
    return data.model_copy(update={"codes": codes})


def kind_of(data: Data) -> str:
    """What the (completed) data hold to learn from: a key of KINDS."""
    if data.codes is not None:
        tokens = "clip_tokens" if len(data.codes.shape) == 3 else "image_tokens"
        return "latents" if data.codes.kind == "latents" else tokens
    if is_embeddings(data.path):
        return "pairs"
    return "clips" if data.num_frames is not None or data.path == MOVING or holds_videos(data.path) else "images"


def require_kind(data: Data, system: str, learns_from: Sequence[str], learners: Callable[[str], list[str]]) -> None:
    """ConfigError where a system does not learn from what the (completed) data hold.

    `learners` gives the systems that learn from a kind, for the remedy.
    """
    kind = kind_of(data)
    if kind == "pairs" and (data.held_out or data.held_out_path):
        raise ConfigError("data.held_out and data.held_out_path are for images: pairs are split by data.splits")
    exists = data.path.startswith("builtin:") or Path(data.path).exists()
    if kind in learns_from or not exists:  # opening a missing path raises its own error
        return
    if kind == "images" and "clips" in learns_from:
        raise ConfigError(f"{system} learns from clips: write data.num_frames=17, say (1: images)")
    expected = f"{system} learns from {' or '.join(KINDS[own][0] for own in learns_from)}"
    systems = " or ".join(f"system={name}" for name in learners(kind))
    choice = f", or choose {systems}" if systems else ""
    if kind == "clips" and data.num_frames:
        raise ConfigError(f"data.num_frames={data.num_frames}: {expected}, not from clips: leave it out{choice}")
    remedy = " or ".join(KINDS[own][1] for own in learns_from)
    raise ConfigError(f"data.path={data.path} holds {KINDS[kind][0]}, and {expected}: {remedy}{choice}")


def _open_codes(data: Data) -> tuple[Latents, Latents | None]:
    if data.held_out_path is None:
        train = Latents(data.path, "train", data.held_out)
        return train, Latents(data.path, "held_out", data.held_out) if data.held_out else None
    if not is_encoded(data.held_out_path):
        raise ConfigError(
            f"data.held_out_path={data.held_out_path} holds images, data.path={data.path} cached codes: "
            "encode the held-out images with the same first stage"
        )
    train, unseen = Latents(data.path), Latents(data.held_out_path)
    for key in (
        "first_stage",
        "kind",
        "image_size",
        "channels",
        "shape",
        "num_frames",
        "frame_stride",
        "captions",
        "text",
    ):
        if train.encoding.get(key) != unseen.encoding.get(key):
            raise ConfigError(
                f"data.held_out_path={data.held_out_path} has {key} {unseen.encoding.get(key)}, "
                f"data.path={data.path} has {train.encoding.get(key)}: encode both alike"
            )
    if unseen.classes != train.classes:
        raise ConfigError(
            f"data.held_out_path={data.held_out_path} has the classes {', '.join(unseen.classes[:5])}, "
            f"data.path={data.path} {', '.join(train.classes[:5])}: encode the same classes"
        )
    return train, unseen
