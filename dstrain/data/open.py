"""Opens the data that the data section of a recipe names. The first class of KINDS that recognises data.path decides
which kind of data it is: it fills in `codes`, opens the sources, and refuses entries that have no effect on such data.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dstrain.data.bad_files import count_listed_bad_files
from dstrain.data.builtin.emoji import EMOJI
from dstrain.data.builtin.fashion import FASHION_PATH, Fashion
from dstrain.data.builtin.moving import MOVING, MovingFashion
from dstrain.data.cached.codes import fill_codes_entry_from_cache, open_cached_codes
from dstrain.data.cached.embeddings import BUILTIN, has_embedding_pairs, open_pairs
from dstrain.data.cached.latents import is_codes_cache
from dstrain.data.cached.shards import read_index
from dstrain.data.decode.clips import VIDEOS, Cut
from dstrain.data.decode.crops import Crop
from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.files.local import LocalFiles
from dstrain.data.formats.base import Layout, Request, walk_some_files
from dstrain.data.formats.imagenet import find_split_paths
from dstrain.data.index.alike import require_same_fingerprint_on_machines
from dstrain.data.index.build import make_index_cache_folder, open_index, run_on_rank_0
from dstrain.data.index.index import Index
from dstrain.data.left_out import require_usable_leave_out_patterns
from dstrain.data.mixture import merge_codes_entries_of_sources, open_mixture
from dstrain.data.overlap import find_overlaps
from dstrain.data.source import Source
from dstrain.data.sources.buckets import Sized, bucket_by_duration
from dstrain.data.sources.embedded import add_embeddings
from dstrain.data.sources.images import Images, open_images
from dstrain.data.sources.videos import CLIPS, open_videos
from dstrain.distributed import group
from dstrain.distributed.progress import get_phases
from dstrain.recipe import ConfigError, Data

BUILTINS = (FASHION_PATH, EMOJI, MOVING, BUILTIN)  # what data.path may be beside a folder
CONTENTS = {  # what a system may learn from: its name and the remedy, for messages
    "images": ("images", "give a folder of images"),
    "clips": ("videos", "give a folder of videos, with data.num_frames=17, say"),
    "latents": ("cached latents", "give what `dstrain encode` makes by a KL autoencoder"),
    "image_tokens": ("cached tokens of images", "give what `dstrain encode` makes by a discrete VAE"),
    "clip_tokens": ("cached tokens of videos", "give what `dstrain encode` makes by a phenaki.tokenizer"),
    "pairs": ("embedding pairs", f"give a folder with img_emb/ and text_emb/, or {BUILTIN}"),
}

Split = tuple[Source, Source | None]  # the training source and the held-out one


class DataKind(ABC):
    """Base class of kinds of data. A subclass recognises data sections of its kind and opens their sources."""

    labelled_anew = False  # data.labels, data.class_list and data.columns may give such data other labels and captions

    def __init__(self, data: Data) -> None:
        self.data = data

    @classmethod
    @abstractmethod
    def recognises(cls, data: Data) -> bool:
        """Returns whether a recipe's data section names data of this kind. Ask the kinds in the order of KINDS."""

    @abstractmethod
    def get_content_kind(self) -> str:
        """Returns what the data hold: "images", "clips", "latents", "image_tokens", "clip_tokens" or "pairs"."""

    @abstractmethod
    def open_sources(self, verify: bool, run: Path | None, in_mixture: bool) -> Split:
        """Opens the source to train on, and the held-out one or None. Arguments and errors are as in `open_sources`."""

    def fill_in_codes_entry(self) -> Data:
        """Returns a copy of the section with `codes` as `fill_in_codes_entry` sets it; here None: nothing is cached."""
        return self.data.model_copy(update={"codes": None})

    def open_split(self, split: str) -> Source | None:
        """Opens one split of data.splits, such as "test". Raises ConfigError unless the data are embedding pairs."""
        raise ConfigError(
            f"data.path={self.data.path} has no split {split}: only embedding pairs are split by data.splits; "
            "images have train and held_out"
        )

    def open_layout_and_index(self, captions: bool) -> tuple[Layout, Index]:
        """Returns the samples' layout and index; see `open_layout_and_index` of this module."""
        data = self.data
        request = make_listing_request(data, captions=captions)
        if data.num_frames is not None:
            request = make_listing_request(data, CLIPS, noun="clips", captions=True, captions_file=data.captions)
        path, _ = find_split_paths(data.path, data.held_out, data.held_out_path, as_one_set=True)
        return open_index(path, request, data.index or make_index_cache_folder())

    def find_path_before_encoding(self) -> str:
        """Returns data.path; for cached codes the path that was encoded; for several sources "a mixture"."""
        return self.data.path

    def require_no_label_settings(self, in_mixture: bool) -> None:
        """Raises ConfigError if labels, class_list or columns is set, but has no effect on data of this kind. Does
        nothing if `in_mixture` or with a held_out_path, since the setting may be meant for the other data.
        """
        names = [
            f"data.{name}"
            for name in ("labels", "class_list", "columns")
            if getattr(self.data, name) != Data.model_fields[name].default
        ]
        if names and not self.labelled_anew and not in_mixture and self.data.held_out_path is None:
            raise ConfigError(
                f"{', '.join(names)}: the labels and captions of {self.data.path} are as they were made: leave it out"
            )


class MixedData(DataKind):
    """Data mixed from several sources of one kind, which data.mixture lists."""

    labelled_anew = True  # one of the sources may use these entries

    @classmethod
    def recognises(cls, data: Data) -> bool:
        return bool(data.mixture)

    def get_content_kind(self) -> str:
        return find_content_kind(self.data.list_sources()[0])

    def fill_in_codes_entry(self) -> Data:
        data, parts = self.data, [fill_in_codes_entry(part) for part in self.data.list_sources()]
        contents = [find_content_kind(part) for part in parts]
        for part, own in zip(parts, contents):
            if own != contents[0] or own == "pairs":
                remedy = "pairs are not mixed" if own == "pairs" else "mix sources of one kind"
                raise ConfigError(
                    f"data.mixture: {part.path} holds {CONTENTS[own][0]}, {data.path} {CONTENTS[contents[0]][0]}: "
                    f"{remedy}"
                )
        return merge_codes_entries_of_sources(data, parts)

    def open_sources(self, verify: bool, run: Path | None, in_mixture: bool) -> Split:
        return open_mixture(self.data, lambda part: open_sources(part, verify, run, in_mixture=True))

    def find_path_before_encoding(self) -> str:
        return "a mixture"


class BuiltinData(DataKind):
    """Data that are part of the package, data.path=builtin:NAME: images, clips or embedding pairs."""

    @classmethod
    def recognises(cls, data: Data) -> bool:
        return data.path.startswith("builtin:")

    def get_content_kind(self) -> str:
        if self.data.path == BUILTIN:
            return "pairs"
        return "clips" if self.data.path == MOVING or self.data.num_frames is not None else "images"

    def open_sources(self, verify: bool, run: Path | None, in_mixture: bool) -> Split:
        if self.data.path == BUILTIN:
            return PairsData(self.data).open_sources(verify, run, in_mixture)
        if self.data.num_frames is not None:
            return self._open_clips()
        if self.data.path == MOVING:
            raise _make_missing_frames_error(self.data)
        return _open_images(self.data, run, in_mixture, holds_out=True)

    def _open_clips(self) -> Split:
        """Opens the built-in clips. Raises ConfigError if a setting, or data.num_frames, does not fit them."""
        data = self.data
        if data.buckets:
            raise ConfigError(
                f"data.buckets: the clips of {data.path} have one length: leave it out, or give a folder of videos"
            )
        if data.path != MOVING:
            raise ConfigError(
                f"data.num_frames={data.num_frames}: {data.path} holds no clips: leave it out, or write "
                f"data.path={MOVING}"
            )
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
        return open_if_builtin(data, "train", data.leave_out), open_if_builtin(data, "held_out", data.leave_out)

    def open_split(self, split: str) -> Source | None:
        return PairsData(self.data).open_split(split) if self.data.path == BUILTIN else super().open_split(split)

    def open_layout_and_index(self, captions: bool) -> tuple[Layout, Index]:
        raise ConfigError(
            f"data.path={self.data.path} is in the package, and neither listed nor packed: name data of your own"
        )


class PairsData(DataKind):
    """Pairs of text and image embeddings, divided into splits by data.splits."""

    @classmethod
    def recognises(cls, data: Data) -> bool:
        return has_embedding_pairs(data.path)

    def get_content_kind(self) -> str:
        return "pairs"

    def open_sources(self, verify: bool, run: Path | None, in_mixture: bool) -> Split:
        return self.open_split("train"), self.open_split("validation")

    def open_split(self, split: str) -> Source | None:
        return open_pairs(self.data.path, self.data.splits, split, group.read_rank_and_world().world)


class CodesData(DataKind):
    """Cached codes of images or clips."""

    @classmethod
    def recognises(cls, data: Data) -> bool:
        return is_codes_cache(data.path)

    def get_content_kind(self) -> str:
        encoding = read_index(Path(self.data.path))["encoding"]
        return _name_contents_of_codes(encoding["kind"], encoding["shape"])

    def fill_in_codes_entry(self) -> Data:
        return fill_codes_entry_from_cache(self.data)

    def open_sources(self, verify: bool, run: Path | None, in_mixture: bool) -> Split:
        return open_cached_codes(self.data, verify)

    def find_path_before_encoding(self) -> str:
        return read_index(Path(self.data.path))["encoding"]["data"].split()[0]  # a fingerprint begins with the name


class ClipsData(DataKind):
    """Videos in one of the layouts of data/formats, with captions or classes."""

    labelled_anew = True

    @classmethod
    def recognises(cls, data: Data) -> bool:
        return data.num_frames is not None or _has_videos_but_no_images(data.path)

    def get_content_kind(self) -> str:
        return "clips"

    def open_sources(self, verify: bool, run: Path | None, in_mixture: bool) -> Split:
        data = _fill_in_split_paths(self.data)
        if data.num_frames is None:
            raise _make_missing_frames_error(data)
        cut = Cut(data.num_frames, data.height or data.image_size, data.image_size, data.channels, data.frame_stride)
        timed = data.buckets is not None
        common = {
            "held_out": data.held_out,
            "held_out_path": data.held_out_path,
            "captions": data.captions,
            "request": make_listing_request(data, CLIPS, noun="clips", captions=True, mixed=in_mixture, measured=timed),
            "index": data.index,
            "run": run,
            "leave_out": data.leave_out,
        }
        train = open_videos(data.path, cut, split="train", images=data.images, image_share=data.image_share, **common)
        unseen = None
        if data.held_out or data.held_out_path:
            unseen = open_videos(data.path, cut, split="held_out", **common)
        if not data.buckets:
            return train, unseen
        return bucket_by_duration(train, data.durations), unseen and bucket_by_duration(unseen, data.durations)


class ImagesData(DataKind):
    """Images in one of the layouts of data/formats. Recognises every path, since it is the last of KINDS."""

    labelled_anew = True

    @classmethod
    def recognises(cls, data: Data) -> bool:
        return True

    def get_content_kind(self) -> str:
        return "images"

    def open_sources(self, verify: bool, run: Path | None, in_mixture: bool) -> Split:
        data = _fill_in_split_paths(self.data)
        if ClipsData.recognises(data):  # the paths of train/ and val/ in a root are known only now
            raise _make_missing_frames_error(data)
        return _open_images(data, run, in_mixture, holds_out=bool(data.held_out or data.held_out_path))


KINDS: tuple[type[DataKind], ...] = (MixedData, BuiltinData, PairsData, CodesData, ClipsData, ImagesData)


def recognise_data_kind(data: Data) -> DataKind:
    """Returns the kind of the data that a recipe's data section names. Looks at files on this rank alone."""
    return next(kind(data) for kind in KINDS if kind.recognises(data))


def find_content_kind(data: Data) -> str:
    """Returns what the data of a section hold: a key of CONTENTS such as "images". Call `fill_in_codes_entry` first."""
    return (
        recognise_data_kind(data).get_content_kind()
        if data.codes is None
        else _name_contents_of_codes(data.codes.kind, data.codes.shape)
    )


def fill_in_codes_entry(data: Data) -> Data:
    """Returns a copy of a recipe's data section whose entry `codes` describes the cached latents or tokens at
    data.path, from their index. The entry is None if the data are not cached.

    Raises ConfigError if the index is damaged, if sizes, channels, frames or flips of the section differ from the
    encoded ones, or if data.embeddings is set and the data are not one source of square images.
    """
    kind = recognise_data_kind(data)
    if data.embeddings is not None and kind.get_content_kind() != "images":
        raise ConfigError(
            f"data.embeddings={data.embeddings} goes with images, and data.path={data.path} holds "
            "others: leave it out, or give the images"
        )
    if data.embeddings is not None and (data.mixture or data.buckets):
        raise ConfigError(
            f"data.embeddings={data.embeddings} goes with one source of squares: leave data.mixture and "
            "data.buckets out"
        )
    return kind.fill_in_codes_entry()


def require_learnable_contents(
    data: Data, system: str, learns_from: Sequence[str], list_learners: Callable[[str], list[str]]
) -> None:
    """Raises ConfigError if `system` cannot learn from what the data hold, or if held_out or held_out_path is set for
    embedding pairs. Does nothing if data.path does not exist. Call `fill_in_codes_entry` first.

    learns_from: the keys of CONTENTS from which `system` learns. list_learners: returns the systems that learn from one
    """
    contents = find_content_kind(data)
    if contents == "pairs" and (data.held_out or data.held_out_path):
        raise ConfigError("data.held_out and data.held_out_path are for images: pairs are split by data.splits")
    exists = BuiltinData.recognises(data) or Path(data.path).exists()
    if contents in learns_from or not exists:  # opening a missing path raises its own error
        return
    if contents == "images" and "clips" in learns_from:
        raise ConfigError(f"{system} learns from clips: write data.num_frames=17, say (1: images)")
    expected = f"{system} learns from {' or '.join(CONTENTS[own][0] for own in learns_from)}"
    systems = " or ".join(f"system={name}" for name in list_learners(contents))
    choice = f", or choose {systems}" if systems else ""
    if contents == "clips" and data.num_frames:
        raise ConfigError(f"data.num_frames={data.num_frames}: {expected}, not from clips: leave it out{choice}")
    remedy = " or ".join(CONTENTS[own][1] for own in learns_from)
    raise ConfigError(f"data.path={data.path} holds {CONTENTS[contents][0]}, and {expected}: {remedy}{choice}")


def open_sources(data: Data, verify: bool = False, run: Path | None = None, in_mixture: bool = False) -> Split:
    """Opens the source to train on and the held-out one, None if nothing is held out. All ranks must call it.

    verify: also compares hashes of cached codes. run: the run's folder, which may hold an index. in_mixture: `data` is
    one source of a mixture. Raises ConfigError if the data cannot be opened, if settings have no effect on them, or if
    held-out files are also trained on.
    """
    if not in_mixture and (data.mixture or data.held_out_path) and (bad := run_on_rank_0(lambda: find_overlaps(data))):
        raise ConfigError(*bad)
    kind = recognise_data_kind(data)
    kind.require_no_label_settings(in_mixture)
    if not data.mixture:
        get_phases().enter_phase(f"listing {data.path}")
    split = kind.open_sources(verify, run, in_mixture)
    require_usable_leave_out_patterns(data, split, in_mixture)
    if isinstance(kind, PairsData | CodesData) or data.embeddings is not None:
        for source in split:
            if source is not None and not data.path.startswith("builtin:"):  # those are the package's own
                require_same_fingerprint_on_machines(source, data.embeddings or data.path)
    return split


def open_split(data: Data, split: str) -> Source | None:
    """Opens the "train", "validation" or "test" split of embedding pairs; None if its share in data.splits is 0. Raises
    ConfigError as `open_pairs`, and if the data are not embedding pairs.
    """
    return recognise_data_kind(data).open_split(split)


def open_layout_and_index(data: Data, captions: bool = False) -> tuple[Layout, Index]:
    """Returns the layout of the samples of a data section, which reads their files, and their index. If there is no
    index, makes it in data.index, else in the user's cache. All ranks must call it.

    captions: lists captions of images too, not only of clips. Raises ConfigError as `open_index` and for built-in data.
    """
    return recognise_data_kind(data).open_layout_and_index(captions)


def open_if_builtin(data: Data, split: str, leave_out: tuple[str, ...] = ()) -> Source | None:
    """Opens a split of the built-in images or clips if the data are these, or codes encoded from them; else returns
    None. leave_out: patterns; clips whose caption fits one are left out (images never).
    """
    origin = find_path_before_encoding(data)
    if origin == FASHION_PATH:
        return Fashion(data.image_size, data.channels, split)
    if origin == MOVING:
        height = data.height or data.image_size
        return MovingFashion(data.num_frames, height, data.image_size, data.channels, split, leave_out)
    return None


def find_path_before_encoding(data: Data) -> str:
    """Returns data.path; for cached codes the path that was encoded; for several sources "a mixture"."""
    return recognise_data_kind(data).find_path_before_encoding()


def describe_data(data: Data, source: Source, held_out: Source | None, folder: Path | None = None) -> list[str]:
    """Returns two lines for the start of a command, about the data to train on and the held-out data. The first also
    says how many unreadable files are listed in the run's `folder`.
    """
    bad = count_listed_bad_files(folder) if folder is not None else 0
    known = f"; {bad:,} unreadable files are listed in {folder / 'bad_files.txt'}" if bad else ""
    place = f"{data.held_out_path}: " if data.held_out_path else ""
    unseen = f"{place}{held_out.describe_samples()}" if held_out is not None else "nothing"
    path = "" if data.mixture else f"{data.path}: "
    return [f"data: {path}{source.describe_samples()}{known}", f"held out: {unseen}"]


def make_listing_request(data: Data, suffixes: tuple[str, ...] = SUFFIXES, **fields: Any) -> Request:
    """Returns the Request that says how to list the samples of a section. fields: further ones of Request."""
    return Request(
        suffixes,
        labels=data.labels,
        class_list=data.class_list,
        columns=data.columns,
        cache=data.cache,
        upright=data.upright,
        **fields,
    )


def _open_images(data: Data, run: Path | None, in_mixture: bool, holds_out: bool) -> Split:
    """Opens images; the held-out source is None unless `holds_out`. Other arguments are as in `open_sources`."""
    captions = data.captioned or data.embeddings is not None or bool(data.leave_out)
    bucketed = data.buckets is not None
    common = {
        "channels": data.channels,
        "held_out": data.held_out,
        "held_out_path": data.held_out_path,
        "draft": data.draft,
        "request": make_listing_request(data, captions=captions, mixed=in_mixture, measured=bucketed),
        "index": data.index,
        "run": run,
        "crop": Crop.from_data_section(data),
        "sizes": data.size_conditions,
        "leave_out": data.leave_out,
    }
    train = _add_embeddings_or_buckets(data, open_images(data.path, data.image_size, split="train", **common))
    if not holds_out:
        return train, None
    return train, _add_embeddings_or_buckets(data, open_images(data.path, data.image_size, split="held_out", **common))


def _add_embeddings_or_buckets(data: Data, source: Source) -> Source:
    """Returns `source` with embeddings or sorted into buckets, or unchanged, as the section asks. All ranks call it."""
    if data.embeddings is not None:
        return add_embeddings(source, data.embeddings)
    if data.buckets is None:
        return source
    if not isinstance(source, Images):
        raise ConfigError(
            f"data.buckets: the images of {data.path} have one size: leave it out, or give a folder of images"
        )
    return Sized(source, data.buckets, data.max_upscale)


def _fill_in_split_paths(data: Data) -> Data:
    """Returns a copy of the data section. If data.path holds splits such as train/ and val/, sets its path to the
    first, and its held_out_path to the second, unless held_out or held_out_path is set. Call it on all ranks.
    """
    path, held_out_path = run_on_rank_0(
        lambda: find_split_paths(data.path, data.held_out, data.held_out_path, cache=data.cache)
    )
    return data.model_copy(update={"path": path, "held_out_path": held_out_path})


def _name_contents_of_codes(kind: str, shape: Sequence[int]) -> str:
    """Returns "latents", "clip_tokens" or "image_tokens". shape: of one sample's codes."""
    if kind == "latents":
        return "latents"
    return "clip_tokens" if len(shape) == 3 else "image_tokens"


def _make_missing_frames_error(data: Data) -> ConfigError:
    return ConfigError(f"data.path={data.path} holds videos: write data.num_frames=17, say, for clips")


def _has_videos_but_no_images(path: str) -> bool:
    """Returns whether some of a folder's first files have suffixes of videos, and none has one of images."""
    if not os.path.isdir(path):
        return False
    suffixes = {os.path.splitext(name)[1].lower() for name in walk_some_files(LocalFiles(path))}
    return suffixes.isdisjoint(SUFFIXES) and not suffixes.isdisjoint((*VIDEOS, ".gif"))
