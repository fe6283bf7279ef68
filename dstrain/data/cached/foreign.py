"""Latents that other trainers have cached, as a source that launch/encode.py --from-latents takes over.

    fast-DiT        X_features/0.npy and X_labels/0.npy, ...: a sample of the posterior times 0.18215 (1, C, h, w); (1,)
    LightningDiT    *.safetensors with latents (n, C, h, w), labels (n,) and mostly latents_flip, samples of the
                    posterior; beside them latents_stats.pt with their mean and std by channel
    EDM2, REPA      dataset.json with {"labels": [["00000/img-mean-std-00000000.npy", 3], ...]} and these files:
                    (2C, h, w), mean and standard deviation; in a folder, or in a .zip that is never extracted

Items are {"codes": float32 (flips, 2 or 1, C, h, w), "label": int}: mean and deviation of the posterior, or a sample of
it. Nothing is unpickled, and no file is believed to be larger than it is.
"""

import json
import zlib
from abc import abstractmethod
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dstrain.data.files.storage import require_regular, with_retries
from dstrain.data.files.zipped import ZippedArrays
from dstrain.data.source import BadSample, Item, Source, reading
from dstrain.recipe import ConfigError, reworded

_MAX_STATS = 1 << 20  # bytes of latents_stats.pt
_MAX_JSON = 1 << 31  # bytes of dataset.json; ImageNet's has 60 MB
_HASHED = 64  # samples, evenly spaced, whose values enter the fingerprint


class Stats(NamedTuple):
    """Mean and standard deviation of latents by channel, float32 (C, 1, 1)."""

    mean: np.ndarray
    std: np.ndarray


def open_foreign(path: str | Path) -> "Foreign":
    """The latents in a folder. ConfigError: it holds none of a known layout, or its files do not fit each other."""
    root = Path(path)
    if (root / "vae-sd" / "dataset.json").is_file():  # REPA's folder, which has the images beside
        root /= "vae-sd"
    if root.suffix == ".zip" and root.is_file():
        return Edm2Zip(root)
    if not root.is_dir():
        raise ConfigError(f"--from-latents {path} is no folder, and no zip file of EDM2's dataset_tool.py")
    for layout in (Edm2, LightningDiT, FastDiT):
        if layout.recognises(root):
            return layout(root)
    raise ConfigError(
        f"--from-latents {path} holds no latents of a known layout: name a folder with X_features/ and "
        "X_labels/ (fast-DiT), with *.safetensors of latents and labels (LightningDiT), or with "
        "dataset.json and its .npy files (EDM2, REPA)"
    )


class Foreign(Source):
    """Latents below `root`. Attributes: shape (C, h, w), moments (2: mean and deviation, 1: a sample), flips, and
    labelled; scale, by which they have been multiplied.
    """

    noun = "latents"
    trainer = ""  # who writes this layout
    scale = 1.0
    flips = 1
    labelled = True

    def __init__(self, root: Path) -> None:
        self.root, self.stats = root, None  # stats: by which items are normalized; None: not
        self._list()
        if not len(self):
            raise ConfigError(f"--from-latents {root} is empty")
        try:
            self.moments, *self.shape = self._codes(0).shape[1:]
        except BadSample as error:
            raise ConfigError(f"--from-latents {root}: {error.path}: {error.reason}") from None

    @classmethod
    @abstractmethod
    def recognises(cls, root: Path) -> bool:
        """Whether a folder has this layout."""

    @abstractmethod
    def _list(self) -> None:
        """Finds the samples."""

    @abstractmethod
    def _codes(self, index: int) -> np.ndarray:
        """A sample as stored: (flips, moments, C, h, w). BadSample: it cannot be read."""

    @abstractmethod
    def _label(self, index: int) -> int:
        """Its label. BadSample: it cannot be read."""

    def without_flips(self) -> None:
        """Leaves the mirrored latents out."""
        self.flips = 1

    def normalize(self) -> None:
        """Items are normalized by channel from now on. ConfigError: latents_stats.pt is missing, or does not fit."""
        self.stats = stats(self.root, self.shape[0])

    def digest(self) -> str:
        """A hash of the statistics."""
        return blake2b(b"".join(part.tobytes() for part in self.stats), digest_size=8).hexdigest()

    def __getitem__(self, index: int) -> Item:
        codes = self._codes(index)[: self.flips].astype(np.float32) / np.float32(self.scale)
        if codes.shape[1:] != (self.moments, *self.shape):
            raise BadSample(self.name(index), f"{codes.shape[1:]} instead of {(self.moments, *self.shape)}")
        if self.stats is not None:
            codes[:, :1] -= self.stats.mean
            codes /= self.stats.std
        return {"codes": torch.from_numpy(codes), "label": self._label(index)}

    def fingerprint(self) -> str:
        """Of all labels' and files' names and sizes that are listed, and of the values of some samples."""
        digest, count = blake2b(digest_size=8), len(self)
        for index in sorted({place * count // _HASHED for place in range(_HASHED)}):
            try:
                digest.update(self._codes(index).tobytes() + self._label(index).to_bytes(8, "little", signed=True))
            except BadSample as error:
                digest.update(error.path.encode())
        return f"{self.trainer} n={count} values={digest.hexdigest()}"

    def describe(self) -> str:
        kind = "means and deviations" if self.moments == 2 else "samples of posteriors"
        return f"{len(self):,} latents of {self.trainer} ({' x '.join(map(str, self.shape))}, {kind})"


class FastDiT(Foreign):
    """A .npy for each sample and one for its label, of the same name."""

    trainer, scale = "fast-DiT", 0.18215

    @classmethod
    def recognises(cls, root: Path) -> bool:
        return cls._folders(root) is not None

    @staticmethod
    def _folders(root: Path) -> tuple[Path, Path] | None:
        for features in sorted(root.glob("*features")):
            labels = features.with_name(f"{features.name.removesuffix('features')}labels")
            if features.is_dir() and labels.is_dir():
                return features, labels
        return None

    def _list(self) -> None:
        self.features, self.label_files = self._folders(self.root)
        names = [path.stem for path in self.features.glob("*.npy")]
        if strange := next((name for name in names if not name.isdecimal()), None):
            raise ConfigError(f"--from-latents {self.features / strange}.npy has no number for a name: take it away")
        self.numbers = np.sort(np.array(names, np.int64))
        labels = sum(1 for _ in self.label_files.glob("*.npy"))
        if labels != len(names):
            raise ConfigError(
                f"--from-latents {self.root}: {len(names)} files in {self.features.name} and {labels} in "
                f"{self.label_files.name}: each needs its label; extract the features again"
            )

    def __len__(self) -> int:
        return len(self.numbers)

    def name(self, index: int) -> str:
        return f"{self.features.name}/{self.numbers[index]}.npy"

    def _codes(self, index: int) -> np.ndarray:
        array = _array(self.root, self.name(index), 4)
        if len(array) != 1:
            raise BadSample(self.name(index), f"{array.shape} is no (1, C, h, w)")
        return array[None]  # (1, 1, C, h, w)

    def _label(self, index: int) -> int:
        return int(_array(self.root, f"{self.label_files.name}/{self.numbers[index]}.npy", None).reshape(-1)[0])


class Edm2(Foreign):
    """A .npy for each sample, listed with the labels in dataset.json."""

    trainer = "EDM2 and REPA"

    @classmethod
    def recognises(cls, root: Path) -> bool:
        return (root / "dataset.json").is_file()

    def _list(self) -> None:
        path = self.root / "dataset.json"
        try:
            entries = sorted((str(name), label) for name, label in json.loads(self._dataset_json())["labels"])
            self.names = np.array([name.encode() for name, _ in entries])
            self.labelled = bool(entries) and entries[0][1] is not None
            self.labels = np.array([label if self.labelled else 0 for _, label in entries], np.int64)
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, zlib.error) as error:
            raise ConfigError(
                f"--from-latents {path} lists no files with labels ({type(error).__name__}: {error}): "
                "EDM2's dataset_tool.py encode writes it"
            ) from None
        outside = [
            name for name, _ in entries if not name.endswith(".npy") or name[0] == "/" or ".." in Path(name).parts
        ]
        if outside:
            raise ConfigError(
                f"--from-latents {path} lists {outside[0]}, and no .npy below this folder: give it to "
                "--data where these are images, else encode them by EDM2's dataset_tool.py"
            )

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return self.names[index].decode()

    def _dataset_json(self) -> bytes:
        if (self.root / "dataset.json").stat().st_size > _MAX_JSON:
            raise ConfigError(f"is larger than {_MAX_JSON} bytes")
        return (self.root / "dataset.json").read_bytes()

    def _array(self, index: int) -> np.ndarray:  # (2C, h, w)
        return _array(self.root, self.name(index), 3)

    def _codes(self, index: int) -> np.ndarray:
        array = self._array(index)
        if len(array) % 2:
            raise BadSample(self.name(index), f"{len(array)} channels are no pairs of mean and deviation")
        return array.reshape(1, 2, -1, *array.shape[1:])

    def _label(self, index: int) -> int:
        return int(self.labels[index])


class Edm2Zip(Edm2):
    """The same in a zip file, which is what dataset_tool.py writes for a DEST that ends in .zip."""

    def _list(self) -> None:
        with reworded(f"--from-latents {self.root}: "):
            self.arrays = ZippedArrays(self.root)
        super()._list()
        if missing := {name.decode() for name in self.names} - set(self.arrays.places):
            raise ConfigError(f"--from-latents {self.root} lists, and does not hold, {min(missing)}: pack it anew")

    def _dataset_json(self) -> bytes:
        return self.arrays.content("dataset.json", _MAX_JSON)

    def _array(self, index: int) -> np.ndarray:
        with reading(self.name(index), self.root):
            return with_retries(lambda: self.arrays.read(self.name(index)))


class LightningDiT(Foreign):
    """Safetensors files, in the order of their names."""

    trainer = "LightningDiT"

    @classmethod
    def recognises(cls, root: Path) -> bool:
        return next(root.glob("*.safetensors"), None) is not None

    def _list(self) -> None:
        self.files = sorted(path.name for path in self.root.glob("*.safetensors"))
        lengths, flips = [], set()
        for name in self.files:
            shapes = self._shapes(name)
            if not {"latents", "labels"} <= set(shapes) or shapes["labels"][0] != shapes["latents"][0]:
                raise ConfigError(f"--from-latents {self.root / name} holds {shapes}, and no latents with labels")
            lengths.append(shapes["labels"][0])
            flips.add("latents_flip" in shapes)
        if len(flips) > 1:
            raise ConfigError(f"--from-latents {self.root}: latents_flip is in some files alone: extract again")
        self.flips, self.file_ends = 1 + flips.pop(), np.cumsum(lengths)

    def _shapes(self, name: str) -> dict[str, list[int]]:
        try:
            require_regular(self.root / name)
            with safe_open(self.root / name, "pt") as file:
                return {key: file.get_slice(key).get_shape() for key in file.keys()}
        except (SafetensorError, OSError, ConfigError) as error:
            raise ConfigError(
                f"--from-latents {self.root / name} is no whole safetensors file ({error}): copy it "
                "again, or take it away"
            ) from None

    def __len__(self) -> int:
        return int(self.file_ends[-1])

    def _place(self, index: int) -> tuple[str, int]:
        number = int(np.searchsorted(self.file_ends, index, side="right"))
        return self.files[number], index - int(self.file_ends[number - 1] if number else 0)

    def name(self, index: int) -> str:
        file, row = self._place(index)
        return f"{file}[{row}]"

    def _row(self, index: int, key: str) -> Tensor:
        name, row = self._place(index)
        with reading(self.name(index), self.root / name), safe_open(self.root / name, "pt") as file:
            return file.get_slice(key)[row : row + 1]

    def _codes(self, index: int) -> np.ndarray:
        keys = ("latents", "latents_flip")[: self.flips]
        return torch.stack([self._row(index, key) for key in keys]).float().numpy()  # (flips, 1, C, h, w)

    def _label(self, index: int) -> int:
        return int(self._row(index, "labels"))


def stats(root: Path, channels: int) -> Stats:
    """LightningDiT's latents_stats.pt. ConfigError: it is missing, or holds no mean and std of the channels."""
    path = root / "latents_stats.pt"
    try:
        require_regular(path)
        if path.stat().st_size > _MAX_STATS:
            raise ConfigError(f"it has more than {_MAX_STATS} bytes")
        content = torch.load(path, map_location="cpu", weights_only=True)  # tensors alone, and no code
        both = Stats(*(content[name].float().reshape(channels, 1, 1).numpy() for name in ("mean", "std")))
    except FileNotFoundError:
        raise ConfigError(f"--normalize: {path} is missing: LightningDiT's extract_features.py writes it") from None
    except Exception as error:  # whatever a damaged or hostile file makes torch raise
        raise ConfigError(
            f"--normalize: {path} holds no mean and std of {channels} channels ({type(error).__name__})"
        ) from None
    if not (np.isfinite(both.mean).all() and (both.std > 0).all() and np.isfinite(both.std).all()):
        raise ConfigError(f"--normalize: {path} has a standard deviation that is not above 0")
    return both


def _array(root: Path, name: str, dims: int | None) -> np.ndarray:
    """A .npy, mapped first, since its header may promise more than there is. BadSample: it cannot be read."""
    path = root / name

    def read() -> np.ndarray:
        require_regular(path)
        mapped: Any = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(mapped, np.ndarray) or mapped.dtype.kind not in "fiu" or dims not in (None, mapped.ndim):
            raise ConfigError("is no array of numbers of the right shape")
        return np.array(mapped)

    with reading(name, path):
        return with_retries(read)
