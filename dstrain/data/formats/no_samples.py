"""Explains, for data without samples, what they hold instead and how it can be read."""

import re
import shlex
from collections import Counter
from itertools import islice
from os.path import splitext
from pathlib import Path

from dstrain.data.formats.base import PICTURES, UNCAPTIONED, VIDEOS, Layout
from dstrain.data.formats.unconverted import has_latents
from dstrain.recipe import ConfigError

_EXAMINED_FILES = 1000  # so many files decide what the message says
_FOLDERS_ABOVE = 3  # folders that are searched above a file, since latents may lie in REPA/vae-sd/00000
_REMEDIES = (  # suffixes of files that are no samples as they lie, and the remedy
    (VIDEOS, "data.num_frames=17 reads clips, for a system that learns from them, such as system=phenaki.tokenizer"),
    (PICTURES, "convert them to PNG or JPEG, as `mogrify -format png FILES` of ImageMagick does"),
    (
        (".npy", ".safetensors"),
        "{latents}; pixels are written as uint8 (N, H, W, C) by numpy.savez, for `dstrain convert npz`",
    ),
    (
        (".parquet",),
        "name its column of encoded images, data.columns={{image: NAME}}, or, where it is a list of paths, "
        "write {key}={root}/{name}",
    ),
    (
        (".tar", ".zip", ".csv", ".tsv", ".jsonl"),
        "name the file, {key}={root}/{name}; data.mixture='[{{path: A}}, {{path: B}}]' takes several",
    ),
    ((".npz",), "convert it once with `dstrain convert npz {root}/{name} --out SHARDS`, then give {key}=SHARDS"),
    ((".gz", ".bz2", ".xz", ".zst", ".7z", ".rar"), "unpack it first"),
)
_UNKNOWN = "docs/guides/data.md has all forms that are read, such as a folder of {noun}"


def make_no_samples_error(layout: Layout) -> ConfigError:
    """Returns the error to raise if no sample was found in the data. Its message says what the data hold instead, and
    how to make samples of it or where to look.
    """
    request = layout.request
    noun, where = request.noun, f"{request.key}={layout.root}"
    if uncaptioned := layout.left_out_counts.get(UNCAPTIONED, 0):
        return ConfigError(
            f"{where}: none of its {uncaptioned:,} {noun} has a caption: write X.txt beside X.png, in tars "
            "too, or leave out what asks for captions"
        )
    counts, first, names = Counter(), {}, layout.iterate_file_names()
    for name in islice(names, _EXAMINED_FILES):
        suffix = splitext(name)[1].lower()
        counts[suffix] += 1
        first.setdefault(suffix, name)
    if reasons := [f"{count:,} {reason}" for reason, count in layout.left_out_counts.items() if reason[0] != "."]:
        return ConfigError(f"{where}: no {noun} in it but {', '.join(reasons)}: put the {noun} themselves there")
    if not counts:
        return ConfigError(f"{where}: no {noun} in it, and no other file: put {noun} into it, or name other data")
    known = {suffix: remedy for suffixes, remedy in _REMEDIES for suffix in suffixes if suffix not in request.suffixes}
    suffix = max(counts, key=lambda suffix: (suffix in known, counts[suffix]))
    name, more = first[suffix], counts[suffix] - 1
    others = f" and {more:,}{'' if sum(counts.values()) < _EXAMINED_FILES else ' or more'} like it" if more else ""
    remedy = known.get(suffix, _UNKNOWN)
    if "{root}/{name}" in remedy and (within := re.match(r".*?\.(tar|zip)(?=/)", name, re.IGNORECASE)):
        remedy = f"unpack {within[0]} first"  # since a member of it has no path
    latents = _suggest_latents_conversion(layout.root, name, request.key) if "{latents}" in remedy else ""
    remedy = remedy.format(key=request.key, root=layout.root, name=name, noun=noun, latents=latents)
    return ConfigError(
        f"{where}: no {noun} in it; files ending in {' '.join(request.suffixes)} are read, in any case. "
        f"It holds {name}{others}: {remedy}"
    )


def _suggest_latents_conversion(root: str, file_name: str, recipe_key: str) -> str:
    """Returns advice, for a message, on data without samples of which a file may hold other projects' latents. The
    advice is the command that converts them. If the latents are not recognised, it is the page of the docs that lists
    what can be converted.
    """
    place = Path(root)
    if "://" in root:
        place = None  # they are converted from a disk
    elif not root.endswith(".zip"):
        folders = Path(root, file_name).parents[:_FOLDERS_ABOVE]
        place = next((folder for folder in folders if has_latents(folder)), None)
    if place is None:
        return "docs/guides/encode.md names the latents of others that `dstrain convert latents` converts"
    return (
        f"latents that others have cached are converted once with `dstrain convert latents {shlex.quote(str(place))} "
        f"--first-stage PATH --out DIR`, then give {recipe_key}=DIR"
    )
