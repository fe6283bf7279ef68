"""Averages of any width from snapshots that are written here, without training: values, shares of ranks, refusals."""

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from dstrain.checkpoint import validate
from dstrain.checkpoint.fragments import Fragment, Shards, make_shard_file_name, write_shard
from dstrain.checkpoint.manifest import NAME, hash_files
from dstrain.disk.sealed import render_json_with_hash
from dstrain.engine.ema import combine
from dstrain.engine.ema.combine import SnapshotCombiner, hash_snapshots, select_combinable_snapshots
from dstrain.engine.ema.profiles import Solution
from dstrain.recipe import ConfigError
from tests.engine.ema.test_profiles import published_solution

SHAPES = {"block.weight": (5, 7), "bias": (3,), "gain": (), "last": (2, 1, 4)}
WIDTHS = (0.05, 0.1)


def snapshot(
    folder: Path,
    step: int,
    updates: int,
    dtype: str = "F32",
    widths: tuple[float, ...] = WIDTHS,
    parts: tuple[str, ...] = ("net",),
) -> dict[float, dict[str, torch.Tensor]]:
    """Writes a snapshot of a part "net" as two ranks would, every tensor in three pieces; its averages by width."""
    path, generator = folder / f"step_{step:08d}", torch.Generator().manual_seed(step)
    path.mkdir(parents=True)
    truth = {
        width: {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} for width in widths
    }
    for rank in range(2):
        entries = []
        for width, named in truth.items():
            for name, values in named.items():
                edges = [0, values.numel() // 3, values.numel() // 2, values.numel()]
                entries += [
                    (f"ema.{width!r}", Fragment(name, SHAPES[name], start, end - start), values.flatten()[start:end])
                    for number, (start, end) in enumerate(itertools.pairwise(edges))
                    if number % 2 == rank
                ]
        write_shard(path / make_shard_file_name("net", rank, 2), entries, {"part": "net"}, dtype)
    counters = {
        "updates": updates,
        "skipped": 0,
        "stage": 2,
        "scaler": {},
        "averages": {"widths": list(widths), "began": 0, "updates": updates},
    }
    validate.write_common_tensors_and_counters(path, ({}, dict.fromkeys(parts, counters)))
    names = sorted(file.name for file in path.iterdir())
    (path / NAME).write_bytes(render_json_with_hash({"files": hash_files(path, names), "step": step, "world": 2}))
    return truth


def combined(folder: Path) -> SnapshotCombiner:
    return SnapshotCombiner(select_combinable_snapshots(sorted(folder.glob("step_*"))), "net")


def mixed(coefficients, sources: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        name: sum(x * named[name].double() for x, named in zip(coefficients, sources, strict=True)) for name in SHAPES
    }


@pytest.mark.parametrize("world", [1, 3, 8])
def test_what_ranks_write(tmp_path, monkeypatch, synced, world):
    """Oracle: the published linear system, divided by its sum, on the tensors in float64; each rank has an equal share
    of every tensor, and the first one those with fewer elements than ranks; hashes and sizes of the files when they are
    forced to the disk; chunks of any size.
    """
    truth, made = [snapshot(tmp_path, step, step) for step in (10, 20, 30)], (0.07, 0.1)
    part = combined(tmp_path)
    assert part.list_tensor_shapes() == list(SHAPES.items())
    assert part.bytes_per_average == 4 * sum(math.prod(shape) for shape in SHAPES.values())
    for chunk in (4, 1 << 18):
        monkeypatch.setattr(combine, "CHUNK", chunk)
        folders = [tmp_path / f"{width} {chunk}" for width in made]
        for folder in folders:
            folder.mkdir()
        for rank in range(world):
            paths = [folder / make_shard_file_name("net", rank, world) for folder in folders]
            entries = part.write_averages(paths, made, rank, world)
            assert entries == [hash_files(path.parent, [path.name])[path.name] for path in paths]
            assert synced.pop(paths[0].name) == entries[-1]["size"]
    for width in made:
        solution = published_solution([(step, other) for step in (10, 20, 30) for other in WIDTHS], 30, width)
        expected = mixed(solution / solution.sum(), [named for kinds in truth for named in kinds.values()])
        kind, pieces = f"ema.{width!r}", (Shards(tmp_path / f"{width} {chunk}", "net") for chunk in (4, 1 << 18))
        with next(pieces) as small, next(pieces) as large:
            assert small.list_value_kinds() == large.list_value_kinds() == [kind]
            for name, values in expected.items():
                read = large.read(kind, name, shape=SHAPES[name])
                assert torch.equal(small.read(kind, name, shape=SHAPES[name]), read)
                assert torch.allclose(read.double(), values.flatten(), rtol=0, atol=1e-6 * np.abs(solution).sum())
                ends = [(start, start + span.nbytes // 4) for start, span in small.pieces[kind][name]]
                assert [0, *(end for _, end in ends)] == [*(start for start, _ in ends), values.numel()]
                counts = [end - start for start, end in ends]
                assert len(counts) == (world if values.numel() >= world else 1) and max(counts) - min(counts) <= 1
                assert len(counts) > 1 or small.pieces[kind][name][0][1].path.name == make_shard_file_name(
                    "net", 0, world
                )


def test_half_precision(tmp_path):
    """Oracle: torch's rounding to bfloat16 of the tensors, and the published linear system on these."""
    truth = [snapshot(tmp_path, step, step, "BF16") for step in (10, 20)]
    part = combined(tmp_path)
    solution = published_solution([(step, width) for step in (10, 20) for width in WIDTHS], 20, 0.07)
    expected = mixed(
        solution / solution.sum(),
        [{name: values.bfloat16() for name, values in named.items()} for kinds in truth for named in kinds.values()],
    )
    shares = {"block.weight": range(3, 30), "last": range(8)}
    chunks = [
        torch.from_numpy(chunk[0]).double()
        for chunk in part.combine_in_chunks([part.solve_coefficients_for_width(0.07)], shares)
    ]
    for (name, share), values in zip(shares.items(), chunks, strict=True):
        assert torch.allclose(values, expected[name].flatten()[share.start : share.stop], rtol=0, atol=1e-5)


def test_before_the_part_learns(tmp_path):
    """Oracle: the tensors: averages of no time are the weights, of any width; the last snapshot of such a time counts,
    and none of it once the part has learned.
    """
    snapshot(tmp_path, 10, 0)
    truth = snapshot(tmp_path, 20, 0)
    part = combined(tmp_path)
    for width in (0.001, 0.05, 0.2):
        assert part.can_make_average(width)
        shares = {name: range(math.prod(shape)) for name, shape in part.list_tensor_shapes()}
        chunks = part.combine_in_chunks([part.solve_coefficients_for_width(width)], shares)
        for name, chunk in zip(shares, chunks, strict=True):
            assert np.array_equal(chunk[0], truth[0.05][name].flatten().numpy())
        assert part.solve_coefficients_for_width(width) == Solution([1.0, 0.0], 0.0)
    later = snapshot(tmp_path, 30, 4)
    part = combined(tmp_path)
    coefficients = part.solve_coefficients_for_width(0.1).coefficients
    assert coefficients == pytest.approx([0, 1], abs=1e-9)
    (chunk,) = part.combine_in_chunks([Solution(coefficients, 0.0)], {"bias": range(3)})
    assert np.allclose(chunk[0], later[0.1]["bias"].numpy(), atol=1e-6)
    assert not part.can_make_average(0.001)


def test_the_widths_that_are_made(tmp_path, monkeypatch):
    """Oracle: profiles alone: what misses its profile by a tenth is made, and by more is refused, with the widths at
    the ends of those that would be made; the run's own widths are among them.
    """
    for step in (10, 20):
        snapshot(tmp_path, step, step)
    part = combined(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"--ema 0.25: the 2 snapshots up to step 20 make no average of that width of "
        r"net: the nearest misses its profile by (\d+)%",
    ) as error:
        part.solve_coefficients_for_width(0.25)
    assert not part.can_make_average(0.25)
    percent, low, high = re.search(r"by (\d+)%. They make those from ([\d.]+) to ([\d.]+);", str(error.value)).groups()
    misfit = part._solve_normalised_coefficients(0.25).misfit
    assert abs(int(percent) / 100 - misfit) <= 0.005
    usual = [round(0.005 * number, 3) for number in range(1, 58)]
    assert [float(low), float(high)] == [next(filter(part.can_make_average, order)) for order in (usual, usual[::-1])]
    misfits = {width: part._solve_normalised_coefficients(width).misfit for width in usual}
    assert any(0.1 < other < 0.2 for other in misfits.values()) and any(
        0.05 < other <= 0.1 for other in misfits.values()
    )
    assert {width for width, other in misfits.items() if other <= 0.1} == set(filter(part.can_make_average, usual))
    monkeypatch.setattr(combine, "MISFIT", misfit)
    assert part.can_make_average(0.25) and part.solve_coefficients_for_width(0.25).misfit == misfit
    monkeypatch.setattr(combine, "MISFIT", misfit * (1 - 1e-12))
    assert not part.can_make_average(0.25)
    for step in (30, 40):
        snapshot(tmp_path / "odd", step, step, widths=(0.1234,))
    monkeypatch.setattr(combine, "MISFIT", 1e-6)
    with pytest.raises(ConfigError, match="up to step 40 make no .* from 0.1234 to 0.1234;"):
        combined(tmp_path / "odd").solve_coefficients_for_width(0.2)


def test_the_ends_of_the_widths(tmp_path, monkeypatch):
    """Oracle: by hand: multiples of 0.005 up to the widest, 0.288, where snapshots would make all of them."""
    snapshot(tmp_path, 10, 10)
    part = combined(tmp_path)
    monkeypatch.setattr(part, "_solve_normalised_coefficients", lambda width: Solution([], float(width < 0.005)))
    with pytest.raises(ConfigError, match="They make those from 0.005 to 0.285;"):
        part.solve_coefficients_for_width(0.001)


def test_which_snapshots(tmp_path):
    """Oracle: by hand: those of the parts that the last one has; a hash of these very snapshots."""
    for step in (10, 20, 30):
        snapshot(tmp_path, step, step, parts=("net",) if step == 10 else ("net", "other"))
    paths = sorted(tmp_path.glob("step_*"))
    snapshots = select_combinable_snapshots(paths)
    assert [one.step for one in snapshots] == [20, 30] and [
        one.step for one in select_combinable_snapshots(paths[:1])
    ] == [10]
    assert (
        hash_snapshots(snapshots) == hash_snapshots(select_combinable_snapshots(paths)) != hash_snapshots(snapshots[1:])
    )
    assert hash_snapshots(snapshots) != hash_snapshots(snapshots[::-1]) and len(hash_snapshots(snapshots)) == 32


def test_snapshots_at_one_time(tmp_path):
    """Oracle: the tensors: of two snapshots between which the part did not learn, the later one counts."""
    first, _, last = (snapshot(tmp_path, step, updates) for step, updates in ((10, 8), (20, 16), (30, 16)))
    part = combined(tmp_path)
    solution = published_solution([(time, width) for time in (8, 16) for width in WIDTHS], 16, 0.07)
    expected = mixed(solution / solution.sum(), [*first.values(), *last.values()])
    (chunk,) = part.combine_in_chunks([part.solve_coefficients_for_width(0.07)], {"block.weight": range(35)})
    assert torch.allclose(torch.from_numpy(chunk[0]).double(), expected["block.weight"].flatten(), rtol=0, atol=1e-5)
