"""Averages chosen afterwards: trained on 2 ranks, gone on with on 1 at another stage, made of the snapshots of both."""

import math

import pytest
import torch
from safetensors.torch import load_file

from dstrain.checkpoint.fragments import Shards
from dstrain.checkpoint.manifest import read_manifest
from dstrain.commands.reconstruct import ReconstructOptions, list_usable_snapshots, make_weight_averages
from dstrain.engine.checkpoint import read_weights
from dstrain.engine.ema.combine import SnapshotCombiner
from dstrain.recipe import ConfigError
from tests.engine.ema import check_snapshots
from tests.engine.ema.check_snapshots import CASES, DIRECT, EVERY, HALF, LAST, PARTS, SAVED, WIDE, Trial, seals
from tests.engine.ema.test_profiles import published_solution

pytestmark = pytest.mark.usefixtures("trained")
WIDTHS = (0.05, 0.1)


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory, on_ranks):
    """The folder of all runs. Ranks are forked before this process becomes one."""
    folder = tmp_path_factory.mktemp("averages")
    on_ranks(2, check_snapshots.train, folder)
    request.getfixturevalue("alone")
    check_snapshots.go_on(folder)
    return folder


def flat(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([state[name].double().flatten() for name in sorted(state) if name != "scale.table"])


@pytest.mark.parametrize("case", CASES)
def test_any_width(trained, case):
    """Oracle: the average of that width, tracked directly in float64 from the whole weights of every step; and the
    published linear system, solved here and divided by its sum, applied to the same snapshots.
    """
    run, truth = trained / case, torch.load(trained / case / "truth.pt")
    assert truth["times"] == {"a": LAST, "b": LAST // 2}
    made = make_weight_averages(ReconstructOptions(run, DIRECT))
    paths = sorted((run / "averages").glob("step_*"))
    for one in made:
        assert one.path == run / "reconstructed" / repr(one.width) / f"step_{LAST:08d}" and one.misfit < 0.01
        for part in PARTS:
            values = flat(read_weights(one.path, part, f"ema.{one.width!r}"))
            direct, weights = truth["direct"][part, one.width], truth["weights"][part]
            assert (values - direct).norm() < 1e-3 * (direct - weights).norm(), (one.width, part)
            times = [LAST // len(paths) * (number + 1) / (1 + (part == "b")) for number in range(len(paths))]
            known = [(time, width) for time in times for width in WIDTHS]
            stored = [flat(read_weights(path, part, f"ema.{width!r}")) for path in paths for width in WIDTHS]
            solution = published_solution(known, times[-1], one.width)
            expected = sum(x * values for x, values in zip(solution / solution.sum(), stored))
            assert (values - expected).norm() < 1e-6 * expected.norm()
            assert (direct - weights).norm() > 5e-3 * weights.norm(), "the average is the weights"


def test_few_snapshots(trained):
    """Oracle: the average tracked directly in float64: 8 snapshots meet it to less than the misfit that is printed."""
    run = trained / "fp32-0"
    truth = torch.load(run / "truth.pt")
    for part in PARTS:
        combined = SnapshotCombiner(list_usable_snapshots(run, None)[4::5], part)
        solution, shares = (
            combined.solve_coefficients_for_width(WIDE),
            {name: range(math.prod(shape)) for name, shape in combined.list_tensor_shapes()},
        )
        chunks = zip(shares, combined.combine_in_chunks([solution], shares), strict=True)
        values = flat({name: torch.from_numpy(chunk[0]) for name, chunk in chunks})
        direct, weights = truth["direct"][part, WIDE], truth["weights"][part]
        error = (values - direct).norm() / (direct - weights).norm()
        assert error < solution.misfit < 0.1


def test_ranks_share_the_work(trained):
    """Oracle: one process on the same snapshots: what 2 ranks have made is the same to the bit, half of it by each."""
    run = trained / "fp32-3"
    for width in (0.075, 0.15):
        path = run / "reconstructed" / repr(width) / f"step_{HALF:08d}"
        for part in PARTS:
            combined = SnapshotCombiner(list_usable_snapshots(run, HALF), part)
            shares = {name: range(math.prod(shape)) for name, shape in combined.list_tensor_shapes()}
            whole = [
                torch.from_numpy(chunk[0])
                for chunk in combined.combine_in_chunks([combined.solve_coefficients_for_width(width)], shares)
            ]
            state = read_weights(path, part, f"ema.{width!r}")
            assert all(torch.equal(state[name].flatten(), values) for name, values in zip(shares, whole, strict=True))
            sizes = [
                entry["size"] for name, entry in read_manifest(path)["files"].items() if name.startswith(f"{part}-")
            ]
            assert len(sizes) == 2 and max(sizes) < 1.2 * min(sizes)


def test_bytes_of_a_snapshot(trained):
    """Oracle: arithmetic: 4 bytes for each weight and width on all ranks together, and headers; none of the moments."""
    path = trained / "fp32-3" / "averages" / f"step_{HALF:08d}"
    with Shards(path, "a") as shards:
        assert shards.list_value_kinds() == [f"ema.{width!r}" for width in WIDTHS]
        weights = sum(math.prod(shards.find_tensor_shape(name)) for name in shards.list_tensor_names("ema.0.05"))
    sizes = [entry["size"] for name, entry in read_manifest(path)["files"].items() if name.startswith("a-")]
    assert len(sizes) == 2 and 0 < sum(sizes) - 4 * weights * len(WIDTHS) < 2 * 3000


def test_earlier_and_again(trained, monkeypatch):
    """Oracle: the snapshot itself, whose own averages are taken as they are; what was made stays, unless it was made of
    other snapshots.
    """
    run = trained / "fp32-1"
    path = make_weight_averages(ReconstructOptions(run, (0.1,), SAVED))[0].path
    snapshot = run / "averages" / path.name
    for part in PARTS:
        values, own = (flat(read_weights(folder, part, "ema.0.1")) for folder in (path, snapshot))
        assert (values - own).norm() < 1e-7 * own.norm()
    assert load_file(path / "common.safetensors").keys() == {f"buffer/{part}/scale.table" for part in PARTS} | {
        "system/values"
    }
    before = path.stat().st_ino
    assert make_weight_averages(ReconstructOptions(run, (0.1,), SAVED))[0].path.stat().st_ino == before
    (run / "averages" / f"step_{EVERY:08d}").rename(run / "elsewhere")
    make_weight_averages(ReconstructOptions(run, (0.1,), SAVED))
    assert read_manifest(path)["extra"]["snapshots"] == list(range(2 * EVERY, SAVED + 1, EVERY))
    (run / "elsewhere").rename(run / "averages" / f"step_{EVERY:08d}")


def test_refusals(trained, tmp_path, capsys):
    """Oracle: the messages: nothing to make it of, a step without, before the first; a width that
    is not in them; damage.
    """
    run = trained / "fp32-0"
    for step, text in ((EVERY - 1, "lies before the first snapshot"), (EVERY + 1, "is of no snapshot")):
        with pytest.raises(ConfigError, match=rf"--step {step} {text} of .*; there are 2, 4, 6, ..., 76, 78, 80"):
            make_weight_averages(ReconstructOptions(run, (0.1,), step))
    with pytest.raises(
        ConfigError,
        match=r"--ema 0.25: the 2 snapshots up to step 4 make no average .* of a: .*\d%. "
        r"They make those from 0.0\d+ to 0.1\d* *",
    ):
        make_weight_averages(ReconstructOptions(run, (0.1, 0.25), 4))
    assert not (run / "reconstructed" / "0.25").exists()
    with pytest.raises(ConfigError, match="holds no snapshots of averages: the first is written at step 2"):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "run.yaml").write_text((run / "run.yaml").read_text())
        make_weight_averages(ReconstructOptions(tmp_path / "run", (0.1,)))
    broken = run / "averages" / f"step_{EVERY:08d}" / "common.safetensors"
    content = broken.read_bytes()
    broken.write_bytes(content[:-1])
    try:
        assert [snapshot.step for snapshot in list_usable_snapshots(run, 6)] == [4, 6]
        assert "the snapshot of step 2" in capsys.readouterr().err
        with pytest.raises(ConfigError, match="snapshot of step 2 .* is damaged"):
            list_usable_snapshots(run, EVERY)
    finally:
        broken.write_bytes(content)


def test_profiles_that_begin_later(tmp_path):
    """Oracle: an average tracked directly since that step: with ema.profiles switched on at step 6, widths are shares
    of the updates since, and snapshots from before, had there been some, are not used; said when the run goes on.
    """
    early = Trial(tmp_path, 2, "fp32", profiles=(), snapshots=0)
    early.saves.resume()
    early.steps(0, 6, save=6)
    assert not (tmp_path / "averages").exists()
    late = Trial(tmp_path, 2, "fp32")
    assert late.saves.resume() == 6
    assert sum("of a begin at step 6: widths are shares of the updates since then" in line for line in late.lines) == 1
    late.saves.averages.write_snapshot_if_due(6, last=True)
    assert not (tmp_path / "averages").exists(), "of no time"
    late.steps(6, 66, save=66)
    [made] = make_weight_averages(ReconstructOptions(tmp_path, (0.075,)))
    direct, weights = late.direct["a", 0.075], late.weights("a")
    values = flat(read_weights(made.path, "a", "ema.0.075"))
    assert (values - direct).norm() < 1e-3 * (direct - weights).norm()
    again = Trial(tmp_path, 2, "fp32", profiles=(0.05, 0.2))
    assert again.saves.resume() == 66
    again.steps(66, 72)
    assert [snapshot.step for snapshot in list_usable_snapshots(tmp_path, 72)] == [68, 70, 72]
    assert next(snapshot.step for snapshot in list_usable_snapshots(tmp_path, 66)) == 8


def test_the_way_back(tmp_path):
    """Oracle: the store: snapshots of steps behind which the run has gone back are put aside, and replaced when it has
    passed them again.
    """
    trial = Trial(tmp_path, 1, "fp32")
    trial.saves.resume()
    trial.steps(0, 8, save=4)
    before = seals(tmp_path)
    assert trial.saves.roll_back(8, "trouble") == 4
    assert [name for name in seals(tmp_path) if name.endswith(".aside")] == [
        "step_00000006.aside",
        "step_00000008.aside",
    ]
    assert [snapshot.step for snapshot in list_usable_snapshots(tmp_path, None)] == [2, 4]
    trial.steps(50, 52)
    trial.steps(4, 8)
    after = seals(tmp_path)
    assert [name for name in after if name.startswith("step_0000000")] == list(before)
    assert after["step_00000004"] == before["step_00000004"] and after["step_00000008"] != before["step_00000008"]


def test_half_precision(tmp_path):
    """Oracle: float32 snapshots of the same run: bfloat16 halves the bytes and costs what its 8 bits cost."""
    runs = {precision: tmp_path / precision for precision in ("fp32", "bf16")}
    for precision, folder in runs.items():
        trial = Trial(folder, 2, "fp32", snapshot_precision=precision)
        trial.saves.resume()
        trial.steps(0, 40)
    sizes = [sum(file.stat().st_size for file in (folder / "averages").glob("*/a-*")) for folder in runs.values()]
    assert sizes[1] < 0.75 * sizes[0]
    whole, half = (
        flat(read_weights(make_weight_averages(ReconstructOptions(folder, (0.075,)))[0].path, "a", "ema.0.075"))
        for folder in runs.values()
    )
    assert 0 < (half - whole).norm() < 2**-8 * whole.norm()
    part = SnapshotCombiner(list_usable_snapshots(runs["bf16"], None), "a")
    assert abs(sum(part.solve_coefficients_for_width(0.075).coefficients) - 1) < 1e-3
