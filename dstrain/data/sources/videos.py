"""Videos as sources, with captions or classes, and images mixed into them.

Items are {"video": uint8 (T, C, H, W), "frames": int, how many of the T are real} and, where the folder has such,
{"caption": UTF-8 as uint8 (bytes,), "label": int, index into `classes`}. Captions are the first of these:

    a captions file     formats/clips.py
    X.txt               beside X.mp4, for every clip
    class folders       the name of the folder

In training, the sample's key chooses where in a longer video the window begins. Evaluation takes the middle.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.data.bucket_order import BucketOrder
from dstrain.data.cached.rows import pack_caption
from dstrain.data.decode.clips import PICTURES, VIDEOS, Cut, Listing, read_clip
from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.files.storage import retry
from dstrain.data.formats.base import Layout, Request
from dstrain.data.formats.clips import Clips
from dstrain.data.index.build import open_index
from dstrain.data.index.index import Index
from dstrain.data.index.source import Indexed
from dstrain.data.source import Item, Source, convert_errors_to_bad_sample
from dstrain.data.sources.captioned import hash_captions_into
from dstrain.disk.texts import read_text_file, split_nonblank_lines
from dstrain.recipe import ConfigError

CLIPS = (*VIDEOS, *PICTURES)
_STILL = (".jpg", ".jpeg", ".bmp", ".png")  # suffixes of pictures that are never, or hardly ever, animated
_ASKED = 100  # so many names are looked at to tell whether all clips are still pictures
_MAX_LISTINGS = 1 << 15  # kept by a process: some 100 bytes a clip, and 100 a keyframe


def open_videos(
    path: str | Path,
    cut: Cut,
    *,
    split: str = "train",
    held_out: float = 0.0,
    held_out_path: str | Path | None = None,
    captions: str | Path | None = None,
    images: str | Path | None = None,
    image_share: float = 0.0,
    request: Request | None = None,
    index: str | Path | None = None,
    run: Path | None = None,
    leave_out: tuple[str, ...] = (),
) -> "Videos | Mixed":
    """Opens clips in a form of formats/, on all ranks together.

    cut: what is cut out of each file
    split: "train" or "held_out"
    held_out: fraction of the data that is held out
    held_out_path: other data that are the held-out split instead, with their own captions file of the same name
    captions: a captions file
    images: images to mix into the training clips
    image_share: the share of the training samples that are images
    request: how to list the samples; None: clips and their captions
    index, run: see `open_index`
    leave_out: patterns of captions; clips and images with a caption that fits one are left out

    Raises ConfigError if there are no such clips, or if captions or classes of clips, images and held-out data do not
    match.
    """
    request = request or Request(CLIPS, "clips", captions=True)
    request = replace(request, captions_file=None if captions is None else str(captions))
    opened = partial(open_index, index_folder=index, run=run)
    if held_out_path is None:
        source = Videos(*opened(path, request), cut, split=split, held_out=held_out, leave_out=leave_out)
    else:
        source = Videos(*opened(path, request), cut, leave_out=leave_out)
        if split == "held_out":
            own = None if captions is None else str(Path(held_out_path) / Path(captions).name)
            other = replace(request, captions_file=own, key="data.held_out_path")
            layout, index = opened(held_out_path, other)
            unseen = Videos(layout, index, cut, classes=source.classes, key=other.key, leave_out=leave_out)
            if source.captioned and not unseen.captioned:
                raise ConfigError(
                    f"data.held_out_path={held_out_path} has no captions and data.path={path} has: write "
                    "X.txt beside each X.mp4 there, too"
                )
            return unseen
    if split == "held_out" or images is None:
        return source
    cut = Cut(cut.num_frames, cut.height, cut.width, cut.channels, still=True)
    of_images = replace(request, suffixes=SUFFIXES, captions_file=None, key="data.images")
    layout, index = opened(images, of_images)
    unseen = leave_out if index.most_captions else ()  # Images without captions show no text.
    stills = Videos(layout, index, cut, classes=source.classes, key=of_images.key, leave_out=unseen)
    stills.noun = "images"
    if leave_out and stills.captions_from == "beside":
        raise ConfigError(
            f"data.leave_out: the captions of data.images={images} are files beside them, which are not listed: write "
            "them into its metadata.csv (file_name,text), or leave one of the entries out"
        )
    return Mixed(source, stills, image_share)


class Videos(Indexed):
    """Reads the clips of a layout, as its index lists them; arguments as `Indexed` and `open_videos`."""

    noun = "clips"
    chance_name = "clip"

    def __init__(self, layout: Layout, index: Index, cut: Cut, **choice: Any) -> None:
        super().__init__(layout, index, **choice)
        self.cut, self.labelled = replace(cut, upright=layout.request.upright), index.labelled
        self.captions_from = "classes" if self.labelled else "none"
        if layout.notes.get("beside"):
            self.captions_from = "beside"
        elif index.most_captions:
            self.captions_from = "file"
        self.captioned = self.captions_from != "none"
        self.uncaptioned = None if self.captioned else f"{layout.request.key}={self.path}"
        self._listings: dict[int, Listing] = {}

    def __getitem__(self, index: int) -> Item:
        return self.read(index)

    def read(self, index: int, random_number: float | None = None, frames: int | None = None) -> Item:
        """Reads a sample. Raises BadSample if it cannot be read.

        random_number: a number in [0, 1) that chooses where in a longer video the clip begins; None takes the middle.
        frames: the length of the clip; None for that of `cut`.
        """
        row, cut = self.find_row_of_sample(index), replace(self.cut, num_frames=frames or self.cut.num_frames)
        place = self.index.read_place(row)
        with convert_errors_to_bad_sample(place.name, self.path / place.name):
            file = self.layout.read(place)
            video, real, listing = read_clip(file, cut, random_number, self._listings.get(index))
            caption = self._read_caption(row, file)
        while len(self._listings) >= _MAX_LISTINGS:
            del self._listings[next(iter(self._listings))]
        self._listings[index] = listing
        item = {"video": video, "frames": real} | ({} if caption is None else {"caption": pack_caption(caption)})
        return item | ({"label": self.read_label(row)} if self.labelled else {})

    def read_captions(self, index: int) -> tuple[str, ...]:
        """Returns the caption of a clip as a tuple of one, () if it has none."""
        row = self.find_row_of_sample(index)
        caption = self._read_caption(row, self.path / self.index.read_name(row))
        return () if caption is None else (caption,)

    def _read_caption(self, row: int, file: Path | bytes) -> str | None:
        """Returns the first caption of a clip. If the names of the classes serve as captions, returns the name of its
        class; None if there are no captions. Raises ConfigError if the caption is empty.
        """
        if self.captions_from == "classes":
            return self.classes[self.read_label(row)].replace("_", " ")
        if self.captions_from == "none":
            return None
        captions = self.index.read_captions(row)
        if self.captions_from == "beside":
            captions = split_nonblank_lines(retry(lambda: read_text_file(file.with_suffix(".txt"))))
        if not captions or not captions[0]:
            raise ConfigError("its caption is empty")
        return captions[0]

    def describe_samples(self) -> str:
        """Returns a line about the clips. It says so if their names are those of still pictures."""
        some = {self.name_sample(row).lower().endswith(_STILL) for row in range(0, len(self), -(-len(self) // _ASKED))}
        still = some == {True} and self.cut.num_frames > 1 and not self.cut.still
        return super().describe_samples() + "; they are named as still pictures: one frame each, repeated" * still

    def _compute_fingerprint_prefix(self) -> str:
        """Returns the first part of the fingerprint: split, number of samples and classes, where the captions are, and
        a hash of the samples' names.
        """
        return (
            f"videos {self.split} n={len(self)} classes={len(self.classes)} captions={self.captions_from} "
            f"names={self._hash_names_and_labels(self._iterate_captions_from_captions_file())}"
        )

    def _iterate_captions_from_captions_file(self) -> Iterable[bytes]:
        """Yields all captions of the split's clips as UTF-8 bytes. Yields nothing if the captions are not in a captions
        file.
        """
        if not isinstance(self.layout, Clips) or not self.index.most_captions:
            return ()
        return (
            text.encode()
            for rows, _ in self._iterate_rows_and_labels()
            for row in rows
            for text in self.index.read_captions(int(row))
        )

    def _describe_captions(self) -> str:
        """Returns a phrase that says where the captions are: in text files, a captions file, or the classes' names."""
        file = self.layout.request.captions_file or self.path
        return {
            "beside": "captions beside them",
            "file": f"captions of {file}",
            "classes": "the classes as captions",
            "none": "no captions",
        }[self.captions_from]

    def _hash_texts(self, file_numbers: Sequence[int]) -> bytes:
        """Returns a hash of the captions: of all captions in a captions file, and of the text files beside the clips
        `file_numbers`. For other layouts, returns the hash that any source takes from the index.
        """
        if not isinstance(self.layout, Clips):
            return super()._hash_texts(file_numbers)
        texts, end = blake2b(), 0
        for text in self._iterate_captions_from_captions_file():
            texts.update(text)
        for text in self._iterate_captions_from_captions_file():
            end += len(text)
            texts.update(end.to_bytes(8, "little"))
        for names in self._iterate_file_names(file_numbers) if self.captions_from == "beside" else ():
            hash_captions_into(texts, self.path, names)
        return texts.digest()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_listings": {}}  # every worker makes its own


@dataclass
class Mixed(Source):
    """Joins videos with images: first all videos, then as many slots as make images `share` of the samples of an epoch.
    The random number of a sample chooses which image fills its slot; without one, each slot has an image of its own.

    So every video is met once in an epoch, and images are met by chance. Captions and labels are in the items only if
    both the videos and the images have them. frames: of the clip that an image becomes; None for as many as a video
    has. With a number, the images are the last bucket.
    """

    videos: Source
    images: Videos
    share: float
    frames: int | None = None
    chance_name = "clip"

    def __post_init__(self) -> None:
        self.slots = max(1, round(len(self.videos) * self.share / (1 - self.share)))
        self.classes = self.videos.classes if self.images.labelled else ()
        self.captioned = self.videos.captioned and self.images.captioned
        self.uncaptioned = self.videos.uncaptioned or self.images.uncaptioned
        counts = Counter(dict(self.videos.left_out)) + Counter(dict(self.images.left_out))
        self.left_out = tuple((pattern, counts[pattern]) for pattern, _ in self.videos.left_out)
        self.where = f"{self.videos.where} or {self.images.where}"
        self.dropped = {*([] if self.captioned else ["caption"]), *([] if self.classes else ["label"])}

    def __len__(self) -> int:
        return len(self.videos) + self.slots

    def bucket_images_separately(self, videos: Source) -> "Mixed":
        """Returns a source of the same samples, in which images are clips of one frame, in a bucket behind all others.

        videos: the same videos, sorted into buckets
        """
        return replace(self, videos=videos, frames=1)

    @property
    def end_index_by_shape(self) -> tuple[int, ...]:
        """Returns the index after the last sample of each shape. Images count as one more shape if they have a bucket
        of their own.
        """
        return (len(self),) if self.frames is None else (*self.videos.end_index_by_shape, len(self))

    def make_sample_order(self, global_batch: int, seed: int) -> Any:
        """Returns the order in which training takes the samples; with buckets, each global batch from one bucket."""
        if self.frames is None:
            return super().make_sample_order(global_batch, seed)
        return BucketOrder(tuple(np.diff(self.end_index_by_shape, prepend=0).tolist()), global_batch, seed)

    def make_single_shape_view(self) -> Source:
        """Returns a source of the same samples in which nothing is sorted into buckets."""
        return replace(self, videos=self.videos.make_single_shape_view(), frames=None)

    def __getitem__(self, index: int) -> Item:
        return self.read(index)

    def read(self, index: int, random_number: float | None = None) -> Item:
        """Reads the video at `index`; for an index behind all videos, reads the image that `random_number` chooses. See
        Videos.read.

        For the same `random_number`, neighbouring indices give different images.
        """
        if index < len(self.videos):
            item = self.videos.read(index, random_number)
        else:
            item = self.images.read(self._choose_image_index(index, random_number or 0.0), frames=self.frames)
        return {name: value for name, value in item.items() if name not in self.dropped}

    def read_captions(self, index: int) -> tuple[str, ...]:
        """Returns the captions of the sample at `index`: of a video or, from index len(videos) on, of the image that
        `read` returns for it if no random number is given.
        """
        if index < len(self.videos):
            return self.videos.read_captions(index)
        return self.images.read_captions(self._choose_image_index(index, 0.0))

    def _choose_image_index(self, index: int, random_number: float) -> int:
        """Returns the index in `images` of the image that is read for `index`, which is len(videos) or above: as many
        images behind the one that belongs to `index` as `random_number`, in [0, 1), is a share of all; 0 takes its own.
        """
        return (index - len(self.videos) + int(random_number * len(self.images))) % len(self.images)

    def name_sample(self, index: int) -> str:
        return (
            self.videos.name_sample(index)
            if index < len(self.videos)
            else self.images.name_sample(self._choose_image_index(index, 0.0))
        )

    def compute_fingerprint(self) -> str:
        return f"{self.videos.compute_fingerprint()} + {self.share} {self.images.compute_fingerprint()}"

    def compute_full_fingerprint(self) -> str:
        return f"{self.videos.compute_full_fingerprint()} + {self.share} {self.images.compute_full_fingerprint()}"

    def describe_samples(self) -> str:
        """Returns the line about the videos, then the share of images and the line about them."""
        return (
            f"{self.videos.describe_samples()}; {self.share:.0%} of the samples are images: "
            f"{self.images.describe_samples()}"
        )
