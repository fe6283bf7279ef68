"""Where tensors lie in dstrain's checkpoints, without torch: what engine/fragments.py and checkpoint.py have written.

    PART-RRRRR-of-WWWWW.safetensors    fragments: runs of elements of named tensors, under "kind/name"
    common.safetensors                 buffers, as buffer/PART/NAME

Headers are read, and no data. fragments.Shards reads the values, into whatever partition a network has.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from dstrain.engine.streams import Entry, FLOATS, SIZES, Span, Stored, read_header, stored
from dstrain.recipe import ConfigError

COMMON = "common.safetensors"
SHARD = re.compile(r"(\w[\w.-]*)-\d{5,}-of-(\d{5,})\.safetensors")


def damaged(checkpoint: Path, reason: str) -> ConfigError:
    return ConfigError(f"checkpoint {checkpoint} is damaged ({reason}): take an older one with --step")


class Fragments:
    """The shards of one part: where each tensor's bytes lie. `said`: the manifest's word on the files."""

    def __init__(self, folder: Path, part: str, said: dict[str, dict]) -> None:
        self.part, self.folder = part, folder
        self.files = sorted(name for name in said if (match := SHARD.fullmatch(name)) and match[1] == part)
        self.pieces: dict[str, dict[str, list[tuple[int, Span]]]] = {}       # kind: name: (first element, bytes)
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name in self.files:
            try:
                self._index(folder / name)
            except FileNotFoundError:
                raise damaged(folder, f"{name} is missing") from None
            except (ValueError, KeyError, TypeError) as error:
                raise damaged(folder, f"{name}: {error}") from None

    def decays(self) -> list[float]:
        return [float(kind.removeprefix("ema.")) for kind in self.pieces if kind.startswith("ema.")]

    def tensors(self, kind: str) -> Iterator[tuple[str, Stored]]:
        """Every tensor of a kind, in the order of saving."""
        for name, pieces in self.pieces[kind].items():
            done, spans = 0, []
            for start, span in sorted(pieces, key=lambda piece: (piece[0], -piece[1].nbytes)):
                end = start + span.nbytes // 4
                if start <= done < end:
                    spans.append(Span(span.path, span.offset + 4 * (done - start), 4 * (end - done)))
                    done = end
            if done != math.prod(self.shapes[name]):
                raise damaged(self.folder, f"elements of {kind}/{name} from {done} on are in none of its files")
            yield name, Stored("F32", self.shapes[name], tuple(spans))

    def _index(self, path: Path) -> None:
        header, metadata, data = read_header(path)
        for key, (shape, start, numel) in json.loads(metadata["fragments"]).items():
            kind, name = key.split("/", 1)
            name = name.partition("#")[0]
            (span,) = stored(path, header[key], data).spans
            if header[key]["dtype"] != "F32" or span.nbytes != 4 * numel:
                raise ConfigError(f"{key} is not {numel} numbers of float32")
            if self.shapes.setdefault(name, tuple(shape)) != tuple(shape):
                raise ConfigError(f"{name} has another shape than in the other files")
            self.pieces.setdefault(kind, {}).setdefault(name, []).append((start, span))


def buffers(checkpoint: Path, part: str) -> Iterator[Entry]:
    """Buffers of a part, which all ranks hold alike; floating ones in float32 at least, as networks keep them."""
    try:
        header, _, data = read_header(checkpoint / COMMON)
    except FileNotFoundError:
        raise damaged(checkpoint, f"{COMMON} is missing") from None
    except ConfigError as error:
        raise damaged(checkpoint, f"{COMMON}: {error}") from None
    prefix = f"buffer/{part}/"
    for name, entry in header.items():
        if name.startswith(prefix):
            dtype = "F32" if entry["dtype"] in FLOATS and SIZES[entry["dtype"]] < 4 else entry["dtype"]
            yield Entry(name.removeprefix(prefix), stored(checkpoint / COMMON, entry, data), dtype)
