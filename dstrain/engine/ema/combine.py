"""Makes averages of any width from a run's snapshots (snapshots.py): profiles.py solves for coefficients, and tensors
are combined piece by piece.

Memory holds one chunk of a tensor in float64 for each width, and the positions of the tensors in all snapshots.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dstrain.checkpoint import validate
from dstrain.checkpoint.layout import Fragments
from dstrain.checkpoint.manifest import NAME, Digest, read_manifest
from dstrain.checkpoint.safetensors_io import CHUNK, SIZES, Files, decode_floats, render_safetensors_header
from dstrain.engine.ema.profiles import Average, Solution, solve_combination_coefficients
from dstrain.recipe import ConfigError

MISFIT = 0.1  # above it an average is refused: profiles.Solution


class Snapshot(NamedTuple):
    """A snapshot's folder, its step, and by part the counters that validate.read_part_counters returns."""

    path: Path
    step: int
    parts: dict[str, dict[str, Any]]

    def get_average_counters(self, part: str) -> dict[str, Any]:
        return self.parts[part]["averages"]


def select_combinable_snapshots(paths: Sequence[Path]) -> list[Snapshot]:
    """Returns, in the given order, the snapshots that can be combined with the last one in `paths`: those that have the
    same parts, with averages that began at the same steps. Raises ConfigError if a path is no snapshot of averages by
    width.
    """
    snapshots = [Snapshot(path, read_manifest(path)["step"], validate.read_part_counters(path)) for path in paths]
    for snapshot in snapshots:
        if not all(counters.get("averages") for counters in snapshot.parts.values()):
            raise ConfigError(f"{snapshot.path} holds no averages by width: move it away")
    began = {part: snapshots[-1].get_average_counters(part)["began"] for part in snapshots[-1].parts}
    return [
        snapshot
        for snapshot in snapshots
        if snapshot.parts.keys() == began.keys()
        and all(snapshot.get_average_counters(part)["began"] == began[part] for part in began)
    ]


def hash_snapshots(snapshots: Sequence[Snapshot]) -> str:
    """Returns a hash that stands for the content of snapshots. It is made of their manifests, which hold hashes of all
    files.
    """
    seals = b"".join((snapshot.path / NAME).read_bytes() for snapshot in snapshots)
    return hashlib.blake2b(seals, digest_size=16).hexdigest()


class SnapshotCombiner:
    """Combines the averages of one part in several snapshots into averages of other widths, at the step of the last
    snapshot.
    """

    def __init__(self, snapshots: Sequence[Snapshot], part: str):
        self.part = part
        by_time = {
            snapshot.get_average_counters(part)["updates"]: snapshot for snapshot in snapshots
        }  # of equals the last
        self._time: int = snapshots[-1].get_average_counters(part)["updates"]
        if self._time:  # else the part has not learned yet: its averages are its weights
            by_time.pop(0, None)
        self._sources = [
            (snapshot, Average(time, width))
            for time, snapshot in by_time.items()
            for width in snapshot.get_average_counters(part)["widths"]
        ]
        self._fragments = {
            snapshot.path: Fragments(snapshot.path, part, read_manifest(snapshot.path)["files"])
            for snapshot in by_time.values()
        }

    def solve_coefficients_for_width(self, width: float) -> Solution:
        """Returns the coefficients by which the averages in all snapshots are combined into an average of `width`.
        Raises ConfigError if even the best combination weights the steps of training too differently from the wanted
        average: if their profiles differ by more than 10 %.
        """
        if not self._time:
            return Solution([1.0] + [0.0] * (len(self._sources) - 1), 0.0)
        solution = self._solve_normalised_coefficients(width)
        if solution.misfit > MISFIT:
            own = {average.width for _, average in self._sources}
            steps = {number / 200 for number in range(1, 58)}  # 0.005, 0.01, ... up to the widest, 0.285
            fits = sorted(filter(self.can_make_average, own | steps))
            raise ConfigError(
                f"--ema {width}: the {len(self._fragments)} snapshots up to step {self._last_snapshot.step} make no "
                f"average of that width of {self.part}: the nearest misses its profile by {solution.misfit:.0%}. They "
                f"make those from {fits[0]} to {fits[-1]}; more of them (ema.snapshots) would make others"
            )
        return solution

    def can_make_average(self, width: float) -> bool:
        """Returns whether the snapshots can be combined into an average of this width; then
        `solve_coefficients_for_width` does not raise.
        """
        return not self._time or self._solve_normalised_coefficients(width).misfit <= MISFIT

    def _solve_normalised_coefficients(self, width: float) -> Solution:
        return solve_combination_coefficients(
            [average for _, average in self._sources], Average(self._time, width)
        ).normalise_coefficients()

    @property
    def _last_snapshot(self) -> Snapshot:
        return self._sources[-1][0]

    def list_tensor_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Returns (name, shape) of each tensor of a combined average, in the order in which they are saved."""
        fragments = self._fragments[self._last_snapshot.path]
        return [
            (name, fragments.find_tensor_shape(name))
            for name in fragments.list_tensor_names(f"ema.{self._sources[-1][1].width!r}")
        ]

    @property
    def bytes_per_average(self) -> int:
        """Returns the size in bytes of one combined average, whose values are float32."""
        return sum(4 * math.prod(shape) for _, shape in self.list_tensor_shapes())

    def combine_in_chunks(self, solutions: Sequence[Solution], shares: dict[str, range]) -> Iterator[np.ndarray]:
        """Computes one average for each of W solutions. Yields chunks, float32 (W, n): the values of all W averages for
        n consecutive elements of one tensor.

        solutions   the coefficients of each average, as `solve_coefficients_for_width` returns them
        shares      {tensor's name: range of its elements to compute}; the chunks come in this order
        """
        coefficients = np.array([solution.coefficients for solution in solutions])  # (W, sources)
        with Files() as files:
            for name, share in shares.items():
                for start in share[::CHUNK]:
                    end = min(start + CHUNK, share.stop)
                    total = np.zeros((len(solutions), end - start))
                    for (snapshot, average), weights in zip(self._sources, coefficients.T):
                        values = self._read_elements(files, snapshot, f"ema.{average.width!r}", name, start, end)
                        total += np.multiply.outer(weights, values.astype(np.float64))
                    yield total.astype(np.float32)

    def _read_elements(
        self, files: Files, snapshot: Snapshot, kind: str, name: str, start: int, end: int
    ) -> np.ndarray:
        fragments = self._fragments[snapshot.path]
        raw, done = memoryview(bytearray(SIZES[fragments.dtype] * (end - start))), 0
        for span in fragments.find_byte_spans(kind, name, start, end):
            files.read_span(span, raw[done : done + span.nbytes])
            done += span.nbytes
        return decode_floats(raw, fragments.dtype)

    def write_averages(
        self, paths: Sequence[Path], widths: Sequence[float], rank: int, world: int
    ) -> list[dict[str, Any]]:
        """Writes this rank's share of combined averages into files: one path in `paths` for each of `widths`. Syncs the
        files to the disk. Returns {size, hash} of each file.

        Each of `world` ranks writes an equal share of every tensor. Rank 0 alone writes a tensor that has fewer
        elements than there are ranks. Raises ConfigError if `solve_coefficients_for_width` does.
        """
        solutions, shapes = (
            [self.solve_coefficients_for_width(width) for width in widths],
            dict(self.list_tensor_shapes()),
        )
        shares = {
            name: range(numel * rank // world, numel * (rank + 1) // world)
            for name, shape in shapes.items()
            if (numel := math.prod(shape)) >= world
        }
        shares |= {name: range(math.prod(shape)) for name, shape in shapes.items() if name not in shares and not rank}
        digests = [Digest() for _ in widths]
        with ExitStack() as stack:
            files = [stack.enter_context(open(path, "wb")) for path in paths]

            def append_and_hash(file_number: int, data: bytes) -> None:
                files[file_number].write(data)
                digests[file_number].update(memoryview(data))

            for number, width in enumerate(widths):
                keys = {f"ema.{width!r}/{name}": (shapes[name], share) for name, share in shares.items()}
                index = {key: [list(shape), share.start, len(share)] for key, (shape, share) in keys.items()}
                flat = ((key, "F32", [len(share)]) for key, (_, share) in keys.items())
                metadata = {"part": self.part, "fragments": json.dumps(index, separators=(",", ":"))}
                append_and_hash(number, render_safetensors_header(paths[number], flat, metadata))
            for chunk in self.combine_in_chunks(solutions, shares):
                for number, row in enumerate(chunk):
                    append_and_hash(number, row.tobytes())
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        return [digest.make_manifest_entry() for digest in digests]
