"""Writes latents that other trainers have cached as a cache of ours, as `dstrain encode` writes it.

    fast-DiT        X_features/0.npy and X_labels/0.npy, ...: a sample of the posterior times 0.18215 (1, C, h, w); (1,)
    LightningDiT    *.safetensors with latents (n, C, h, w), labels (n,) and mostly latents_flip, samples of the
                    posterior; beside them latents_stats.pt with their mean and std by channel
    EDM2, REPA      dataset.json with {"labels": [["00000/img-mean-std-00000000.npy", 3], ...]} and these files:
                    (2C, h, w), mean and standard deviation; in a folder, or in a .zip that is never extracted

Items are {"codes": float32 (flips, 2 or 1, C, h, w), "label": int}: mean and deviation of the posterior, or a sample of
it. Nothing is unpickled, and no file is believed to be larger than it is.

Their samples of a posterior are kept without a deviation. What has been multiplied is divided again, since a run scales
latents by the factor of its first stage. A shard is complete or absent: the same command again keeps those that are
whole, and makes the others.
"""

import io
import json
import math
import zipfile
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dstrain import __version__
from dstrain.commands.encoding.folder import SAME_COMMAND, lock_and_prepare_folder, require_few_unreadable_samples
from dstrain.commands.options.convert import ConvertOptions
from dstrain.data.cached import shards
from dstrain.data.files.storage import refuse_special_file, retry
from dstrain.data.formats.unconverted import find_features_and_labels_folders
from dstrain.data.source import Bad, BadSample, Item, Source, convert_errors_to_bad_sample, read_items_or_substitutes
from dstrain.disk import atomic
from dstrain.disk.sealed import render_json_with_hash
from dstrain.distributed.progress import Bar
from dstrain.encoders import autoencoder
from dstrain.recipe import ConfigError, explain_write_errors, reword_errors

_MAX_STATS_BYTES = 1 << 20  # of latents_stats.pt
_MAX_TABLE_BYTES = 1 << 31  # of dataset.json; ImageNet's has 60 MB
_MAX_ARRAY_BYTES = 1 << 26  # of a .npy
_HASHED = 64  # samples, evenly spaced, whose values enter the fingerprint
_NAMED = "name:"
_THREADS = 8  # that read samples
_BATCH = 32  # is what encodings state, since those of `dstrain encode` do


class Statistics(NamedTuple):
    """Mean and standard deviation of latents by channel, float32 (C, 1, 1)."""

    mean: np.ndarray
    std: np.ndarray


class Foreign(Source):
    """Latents below `root`. Attributes: shape (C, h, w); moments (2: mean and deviation, 1: a sample); flips; labelled;
    scale, by which they have been multiplied; statistics, by which items are normalized (None: they are not).
    """

    noun = "latents"
    trainer = ""  # who writes this layout
    scale = 1.0
    flips = 1
    labelled = True
    statistics: Statistics | None = None

    def __init__(self, root: Path) -> None:
        self.root = root
        self._list()
        if not len(self):
            raise ConfigError(f"{root} is empty")
        try:
            self.moments, *self.shape = self._read_codes(0).shape[1:]
        except BadSample as error:
            raise ConfigError(f"{root}: {error.path}: {error.reason}") from None

    @abstractmethod
    def _list(self) -> None:
        """Finds the samples."""

    @abstractmethod
    def _read_codes(self, index: int) -> np.ndarray:
        """Returns a sample as stored, (flips, moments, C, h, w). Raises BadSample if it cannot be read."""

    @abstractmethod
    def _read_label(self, index: int) -> int:
        """Returns a label. Raises BadSample if it cannot be read."""

    def normalize(self) -> None:
        """Normalizes items by channel from now on. Raises ConfigError if latents_stats.pt is missing, or of others."""
        self.statistics = _read_statistics(self.root, self.shape[0])

    def hash_statistics(self) -> str:
        return blake2b(b"".join(part.tobytes() for part in self.statistics), digest_size=8).hexdigest()

    def __getitem__(self, index: int) -> Item:
        codes = self._read_codes(index)[: self.flips].astype(np.float32) / np.float32(self.scale)
        if codes.shape[1:] != (self.moments, *self.shape):
            raise BadSample(self.name_sample(index), f"{codes.shape[1:]} instead of {(self.moments, *self.shape)}")
        if self.statistics is not None:
            codes[:, :1] -= self.statistics.mean
            codes /= self.statistics.std
        return {"codes": torch.from_numpy(codes), "label": self._read_label(index)}

    def compute_fingerprint(self) -> str:
        """Returns a hash of the values of some samples."""
        digest, count = blake2b(digest_size=8), len(self)
        for index in sorted({place * count // _HASHED for place in range(_HASHED)}):
            try:
                digest.update(self._read_codes(index).tobytes())
                digest.update(self._read_label(index).to_bytes(8, "little", signed=True))
            except BadSample as error:
                digest.update(error.path.encode())
        return f"{self.trainer} n={count} values={digest.hexdigest()}"

    def describe_samples(self) -> str:
        kind = "means and deviations" if self.moments == 2 else "samples of posteriors"
        return f"{len(self):,} latents of {self.trainer} ({' x '.join(map(str, self.shape))}, {kind})"


class FastDiT(Foreign):
    """A .npy for each sample and one for its label, of the same name."""

    trainer, scale = "fast-DiT", 0.18215

    def _list(self) -> None:
        self.features, self.label_files = find_features_and_labels_folders(self.root)
        names = [path.stem for path in self.features.glob("[!.]*.npy")]
        if strange := next((name for name in names if not name.isdecimal()), None):
            raise ConfigError(f"{self.features / strange}.npy has no number for a name: take it away")
        self.numbers = np.sort(np.array(names, np.int64))
        labels = sum(1 for _ in self.label_files.glob("[!.]*.npy"))
        if labels != len(names):
            raise ConfigError(
                f"{self.root}: {len(names)} files in {self.features.name} and {labels} in {self.label_files.name}: "
                "each needs its label; extract the features again"
            )

    def __len__(self) -> int:
        return len(self.numbers)

    def name_sample(self, index: int) -> str:
        return f"{self.features.name}/{self.numbers[index]}.npy"

    def _read_codes(self, index: int) -> np.ndarray:
        array = _read_array(self.root, self.name_sample(index), 4)
        if len(array) != 1:
            raise BadSample(self.name_sample(index), f"{array.shape} is no (1, C, h, w)")
        return array[None]  # (1, 1, C, h, w)

    def _read_label(self, index: int) -> int:
        name = f"{self.label_files.name}/{self.numbers[index]}.npy"
        return int(_read_array(self.root, name, None).reshape(-1)[0])


class Edm2(Foreign):
    """A .npy for each sample, listed with the labels in dataset.json; in a folder, or in a zip file."""

    trainer = "EDM2 and REPA"

    def _list(self) -> None:
        self.archive = zipfile.ZipFile(self.root) if self.root.is_file() else None
        path = self.root / "dataset.json"
        try:
            entries = sorted((str(name), label) for name, label in json.loads(self._read_table())["labels"])
            self.names = np.array([name.encode() for name, _ in entries])
            self.labelled = bool(entries) and entries[0][1] is not None
            self.labels = np.array([label if self.labelled else 0 for _, label in entries], np.int64)
        except Exception as error:  # of a damaged file, any
            raise ConfigError(
                f"{path} lists no files with labels ({type(error).__name__}: {str(error)[:200]}): EDM2's "
                "dataset_tool.py encode writes it"
            ) from None
        for name, _ in entries:
            if not name.endswith(".npy") or name[0] == "/" or ".." in Path(name).parts:
                raise ConfigError(
                    f"{path} lists {name}, and no .npy below this folder: give it as data.path where these are "
                    "images, else encode them by EDM2's dataset_tool.py"
                )
        if self.archive is not None:
            missing = {name for name, _ in entries} - set(self.archive.namelist())
            if missing:
                raise ConfigError(f"{self.root} lists, and does not hold, {min(missing)}: pack it anew")

    def __len__(self) -> int:
        return len(self.names)

    def name_sample(self, index: int) -> str:
        return self.names[index].decode()

    def _read_table(self) -> bytes:
        if self.archive is not None:
            return _read_member(self.archive, "dataset.json", _MAX_TABLE_BYTES)
        if (self.root / "dataset.json").stat().st_size > _MAX_TABLE_BYTES:
            raise ValueError(f"larger than {_MAX_TABLE_BYTES} bytes")
        return (self.root / "dataset.json").read_bytes()

    def _read_codes(self, index: int) -> np.ndarray:
        array = _read_array(self.root, self.name_sample(index), 3, self.archive)  # (2C, h, w)
        if len(array) % 2:
            raise BadSample(self.name_sample(index), f"{len(array)} channels are no pairs of mean and deviation")
        return array.reshape(1, 2, -1, *array.shape[1:])

    def _read_label(self, index: int) -> int:
        return int(self.labels[index])


class LightningDiT(Foreign):
    """Safetensors files, in the order of their names."""

    trainer = "LightningDiT"

    def _list(self) -> None:
        self.files = sorted(path.name for path in self.root.glob("[!.]*.safetensors"))
        lengths, flips = [], set()
        for name in self.files:
            shapes = self._read_shapes(name)
            if not {"latents", "labels"} <= set(shapes) or shapes["labels"][0] != shapes["latents"][0]:
                raise ConfigError(f"{self.root / name} holds {shapes}, and no latents with labels")
            lengths.append(shapes["labels"][0])
            flips.add("latents_flip" in shapes)
        if len(flips) > 1:
            raise ConfigError(f"{self.root}: latents_flip is in some files alone: extract again")
        self.flips, self.file_ends = 1 + flips.pop(), np.cumsum(lengths)

    def _read_shapes(self, name: str) -> dict[str, list[int]]:
        try:
            refuse_special_file(self.root / name)
            with safe_open(self.root / name, "pt") as file:
                return {key: file.get_slice(key).get_shape() for key in file.keys()}
        except (SafetensorError, OSError, ConfigError) as error:
            raise ConfigError(
                f"{self.root / name} is no whole safetensors file ({error}): copy it again, or take it away"
            ) from None

    def __len__(self) -> int:
        return int(self.file_ends[-1])

    def _place(self, index: int) -> tuple[str, int]:
        number = int(np.searchsorted(self.file_ends, index, side="right"))
        return self.files[number], index - int(self.file_ends[number - 1] if number else 0)

    def name_sample(self, index: int) -> str:
        file, row = self._place(index)
        return f"{file}[{row}]"

    def _read_row(self, index: int, key: str) -> Tensor:
        name, row = self._place(index)
        with (
            convert_errors_to_bad_sample(self.name_sample(index), self.root / name),
            safe_open(self.root / name, "pt") as file,
        ):
            return file.get_slice(key)[row : row + 1]

    def _read_codes(self, index: int) -> np.ndarray:
        keys = ("latents", "latents_flip")[: self.flips]
        return torch.stack([self._read_row(index, key) for key in keys]).float().numpy()  # (flips, 1, C, h, w)

    def _read_label(self, index: int) -> int:
        return int(self._read_row(index, "labels"))


def open_foreign(path: Path) -> Foreign:
    """Opens the latents in a folder or a zip. Raises ConfigError if it holds none of a known layout."""
    root = path
    if (root / "vae-sd" / "dataset.json").is_file():  # REPA's folder, which has the images beside
        root /= "vae-sd"
    if root.suffix == ".zip" and root.is_file():
        if not zipfile.is_zipfile(root):
            raise ConfigError(f"{path}: it is no zip file: pack it anew")
        return Edm2(root)
    if (root / "dataset.json").is_file():
        return Edm2(root)
    if next(root.glob("[!.]*.safetensors"), None) is not None:
        return LightningDiT(root)
    if find_features_and_labels_folders(root):
        return FastDiT(root)
    raise ConfigError(
        f"{path} holds no latents of a known layout: name a folder with X_features/ and X_labels/ (fast-DiT), with "
        "*.safetensors of latents and labels (LightningDiT), or with dataset.json and its .npy files (EDM2, REPA), "
        "or a .zip of EDM2's"
    )


def _read_statistics(root: Path, channels: int) -> Statistics:
    """Returns what LightningDiT's latents_stats.pt says. Raises ConfigError if it is missing, or of other channels."""
    path = root / "latents_stats.pt"
    try:
        refuse_special_file(path)
        if path.stat().st_size > _MAX_STATS_BYTES:
            raise ConfigError(f"it has more than {_MAX_STATS_BYTES} bytes")
        content = torch.load(path, map_location="cpu", weights_only=True)  # tensors alone, and no code
        mean, std = (content[name].float().reshape(channels, 1, 1).numpy() for name in ("mean", "std"))
    except FileNotFoundError:
        raise ConfigError(f"--normalize: {path} is missing: LightningDiT's extract_features.py writes it") from None
    except Exception as error:  # whatever a damaged or hostile file makes torch raise
        raise ConfigError(
            f"--normalize: {path} holds no mean and std of {channels} channels ({type(error).__name__})"
        ) from None
    if not (np.isfinite(mean).all() and (std > 0).all() and np.isfinite(std).all()):
        raise ConfigError(f"--normalize: {path} has a standard deviation that is not above 0")
    return Statistics(mean, std)


def _read_array(root: Path, name: str, dims: int | None, archive: zipfile.ZipFile | None = None) -> np.ndarray:
    """Returns the numbers in a .npy with so many axes (None: any). Raises BadSample if it cannot be read.

    The header is compared with the bytes that there are, since it may promise more, or objects.
    """
    path = root / name

    def read() -> np.ndarray:
        if archive is not None:
            content = _read_member(archive, name, _MAX_ARRAY_BYTES)
        else:
            refuse_special_file(path)
            with open(path, "rb") as file:
                content = file.read(_MAX_ARRAY_BYTES)
        file = io.BytesIO(content)
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            read_header = np.lib.format.read_array_header_2_0
        shape, by_columns, dtype = read_header(file)
        if by_columns or dtype.kind not in "fiu" or dims not in (None, len(shape)):
            raise ConfigError("is no array of numbers of the right shape")
        return np.frombuffer(content, dtype, offset=file.tell()).reshape(shape)

    with convert_errors_to_bad_sample(name, path if archive is None else root):
        return retry(read)


def _read_member(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    if archive.getinfo(name).file_size > most:
        raise ConfigError(f"has more than {most:,} bytes")
    return archive.read(name)


def convert_latents(options: ConvertOptions) -> dict[str, Any]:
    """Writes options.out; returns the body of its index. Raises ConfigError if what is asked for cannot be."""
    if shards.has_encode_output(options.path):
        raise ConfigError(f"{options.path} holds our own codes: give it as data.path")
    if options.latent_scale is not None and not 0 < options.latent_scale < math.inf:
        raise ConfigError(f"--latent-scale {options.latent_scale}: latents have been multiplied by a number above 0")
    source = open_foreign(options.path)
    if not options.flip:
        source.flips = 1
    if options.latent_scale is not None:
        source.scale = options.latent_scale
    if options.normalize:
        source.normalize()
    encoding = _describe_encoding(options, source)
    print(f"data: {options.path}: {source.describe_samples()}", flush=True)
    with lock_and_prepare_folder(options.out, "converts", lambda: _prepare_folder(options, encoding)):
        records = [_write_shard(options, source, encoding, rows) for rows in _list_shards(options, source)]
        versions = {"dstrain": __version__, "torch": torch.__version__}
        index = shards.make_index_body(encoding, None if source.labelled else [], records, versions)
        require_few_unreadable_samples(dict(index["bad_files"]), len(source), options.max_bad_fraction, "files")
        atomic.write_file(options.out / shards.INDEX, render_json_with_hash(index))
    return index


def _describe_encoding(options: ConvertOptions, source: Foreign) -> dict[str, Any]:
    """Returns what the index says of the codes: what encoded them, which they must fit, and the side of its images."""
    channels, side, _ = source.shape
    name, image_size, image_channels = options.first_stage, options.image_size, 3
    if name.startswith(_NAMED):
        if image_size is None:
            raise ConfigError(f"--first-stage {name}: give --image-size, too, the pixels that {side} latents stand for")
        fingerprint = name.removeprefix(_NAMED)
    else:
        with reword_errors(options={"first_stage.path:": f"--first-stage {name}:"}):
            vae = autoencoder.Autoencoder(name)
        fingerprint, image_channels = vae.compute_fingerprint(), vae.image_channels
        if vae.channels != channels:
            raise ConfigError(
                f"--first-stage {name} makes latents of {vae.channels} channels, those in {options.path} have "
                f"{channels}: name the one that encoded them"
            )
        if image_size not in (None, side * vae.factor):
            raise ConfigError(
                f"--image-size {image_size}: {side} latents of {name} stand for {side * vae.factor} pixels: "
                "leave it out"
            )
        image_size = side * vae.factor
    if source.statistics is not None:
        # The first stage cannot decode what is normalized by channel, so that runs refuse it by this fingerprint.
        fingerprint = f"{fingerprint}, normalized by {source.hash_statistics()}"
    return {
        "kind": "latents",
        "shape": source.shape,
        "dtype": options.dtype,
        "number": len(source),
        "flips": source.flips,
        "image_size": image_size,
        "channels": image_channels,
        "shard_size": options.shard_size,
        "batch": _BATCH,
        "first_stage": fingerprint,
        "moments": source.moments,
        "latent_scale": source.scale,
        "data": source.compute_full_fingerprint(),
    }


def _prepare_folder(options: ConvertOptions, encoding: dict[str, Any]) -> str | None:
    """Writes encoding.json; returns what is wrong with the folder, else None."""
    out, earlier = options.out, shards.read_encoding_json_or_index(options.out)
    if earlier is not None:
        old = earlier["encoding"]
        changes = [
            f"{key} {old.get(key)} there, {encoding.get(key)} here"
            for key in {**old, **encoding}
            if old.get(key) != encoding.get(key)
        ]
        if changes:
            return f"--out {out} holds another encoding: {'; '.join(changes)}. Name another folder"
    elif strangers := shards.list_entries_not_from_encode(out):
        return f"--out {out} holds {', '.join(strangers[:3])} and no encoding: name a new folder"
    names = {"first_stage": options.first_stage, "data": str(options.path)}
    text = json.dumps({"encoding": encoding, "of": names}, sort_keys=True, indent=1)
    atomic.write_file(out / shards.ENCODING, f"{text}\n")
    return None


def _list_shards(options: ConvertOptions, source: Foreign) -> list[range]:
    """Returns the samples of each shard."""
    size, total = options.shard_size, len(source)
    return [range(start, min(start + size, total)) for start in range(0, total, size)]


def _write_shard(options: ConvertOptions, source: Foreign, encoding: dict[str, Any], rows: range) -> dict[str, Any]:
    """Writes a shard that is not there and whole; returns its record."""
    number = rows.start // options.shard_size
    path = options.out / shards.name_shard(number)
    try:
        facts = shards.read_verified_metadata(path)
        if facts["encoding"] == shards.hash_encoding(encoding) and facts["number"] == number:
            return shards.make_shard_record(path, facts)
    except ConfigError:
        pass  # it is missing, or damaged

    def read(index: int) -> tuple[list[Item], Bad]:
        return read_items_or_substitutes(source, [index])

    items, bad = [], []
    with ThreadPoolExecutor(_THREADS) as pool, Bar(f"converting {path.name}", total=len(rows), unit=" latents") as bar:
        for (item,), own in pool.map(read, rows):
            items.append(item | {"source": (rows.start + len(items) + len(own)) % len(source)})
            bad += own
            bar.update(1)
    with np.errstate(over="ignore"):
        moments = np.stack([item["codes"].numpy() for item in items]).astype(options.dtype)
    if not np.isfinite(moments).all():
        remedy = " in float16: take --dtype float32" if options.dtype == "float16" else ""
        raise ConfigError(f"{options.path} holds latents that are not finite{remedy}")
    arrays = {"moments": moments}
    arrays |= {name: np.array([item[name] for item in items], np.int64) for name in ("label", "source")}
    facts = {
        "encoding": shards.hash_encoding(encoding),
        "number": number,
        "sums": shards.sum_codes_for_statistics(moments),
        "bad": sorted(set(bad)),
    }
    data = shards.pack_shard(arrays, facts)
    with explain_write_errors(path, SAME_COMMAND):
        atomic.write_file(path, data)
    return shards.make_shard_record(path, shards.verify_and_parse_metadata(data))
