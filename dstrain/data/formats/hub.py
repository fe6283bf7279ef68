"""Data sets of the Hugging Face hub, which `datasets` downloads into its own cache as Arrow files.

    data.path=hf-dataset:USER/NAME             its split train; held out is validation or test
    data.path=hf-dataset:USER/NAME:SPLIT

Without a network what is in the cache of `datasets` is read.
"""

import os
from typing import Any

from dstrain.data.files.local import Files, LocalFiles
from dstrain.data.formats.base import Request
from dstrain.data.formats.hugging_face import SPLITS, ArrowTables, of_images
from dstrain.recipe import ConfigError

HUB = "hf-dataset:"


class HubTables(ArrowTables):
    """A data set of the hub, which `datasets` downloads into its own cache as Arrow files; each machine has its own."""

    kind = "hf-dataset:USER/NAME"

    def __init__(self, root: str, files: Files, request: Request) -> None:
        super().__init__(root, files, request)
        self._load()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not os.path.isdir(self.files.root):  # this is another machine
            self._load()

    def _load(self) -> None:
        self._by_split = hub_files(self.root, self.request)
        folders = [os.path.dirname(path) for paths in self._by_split.values() for path in paths]
        self.files = LocalFiles(os.path.commonpath(folders))

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        return root.startswith(HUB) and of_images(request)

    def _splits(self) -> dict[str, list[str]]:
        return {
            SPLITS.get(split.lower(), split): [os.path.relpath(path, self.files.root) for path in paths]
            for split, paths in self._by_split.items()
        }

    def _path_of(self, split: str, names: list[str]) -> str:
        return f"{self.root}:{next(name for name in self._by_split if SPLITS.get(name.lower()) == split)}"


def hub_files(root: str, request: Request) -> dict[str, list[str]]:
    """The Arrow files of each split of a data set of the hub, downloaded where they are not in the cache yet."""
    name, _, split = root.removeprefix(HUB).partition(":")
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{request.key}={root} needs datasets: pip install 'dstrain[hf]'") from None
    try:
        data = datasets.load_dataset(name, split=split or None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(
            f"{request.key}={root} cannot be loaded ({text}): without a network only what `datasets` has "
            "in its cache is there; give a folder of parquet files, or what save_to_disk wrote"
        ) from None
    splits = {split: data} if split else dict(data)
    return {split: [entry["filename"] for entry in part.cache_files] for split, part in splits.items()}
