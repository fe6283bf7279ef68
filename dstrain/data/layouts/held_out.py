"""What a form of data holds out by itself, such as CIFAR's test batch."""

from pathlib import Path

from dstrain.data.files import LocalFiles
from dstrain.data.layouts.base import Layout, Request
from dstrain.data.layouts.cifar import Cifar
from dstrain.data.layouts.idx import Idx
from dstrain.data.layouts.lmdbs import Lmdbs
from dstrain.data.pixels import SUFFIXES

_KINDS: tuple[type[Layout], ...] = (Cifar, Idx, Lmdbs)


def held_out_by(path: str | Path) -> str | None:
    """The path of the samples that these data hold out; None: none, or the data are at an address."""
    if "://" in str(path):
        return None
    files, request = LocalFiles(path), Request(SUFFIXES)
    kind = next((kind for kind in _KINDS if kind.recognises(str(path), files, request)), None)
    return kind(str(path), files, request).unseen() if kind is not None else None
