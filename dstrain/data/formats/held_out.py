"""What a form of data holds out by itself, such as CIFAR's test batch."""

from pathlib import Path

from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.files.local import require_there
from dstrain.data.files.remote import files_at
from dstrain.data.formats.base import Layout, Request
from dstrain.data.formats.cifar import Cifar
from dstrain.data.formats.hugging_face import ArrowTables, HubTables, ParquetTables
from dstrain.data.formats.idx import Idx
from dstrain.data.formats.lmdbs import Lmdbs
from dstrain.recipe import Cache

_KINDS: tuple[type[Layout], ...] = (HubTables, Cifar, Idx, Lmdbs, ArrowTables, ParquetTables)


def held_out_by(path: str | Path, cache: Cache | None = None) -> str | None:
    """The path of the samples that these data hold out; None: none. cache: of data at an address."""
    files, request = files_at(path, cache), Request(SUFFIXES)
    require_there(f"data.path={path}", files)
    kind = next((kind for kind in _KINDS if kind.recognises(str(path), files, request)), None)
    return kind(str(path), files, request).unseen() if kind is not None else None
