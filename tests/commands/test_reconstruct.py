"""Averages of any width as the verbs take them: found by their number, told from decays, refused
where there is none.
"""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import dstrain
from dstrain import systems
from dstrain.checkpoint import validate
from dstrain.checkpoint.fragments import Fragment, make_shard_file_name, write_shard
from dstrain.checkpoint.manifest import NAME, hash_files, read_manifest
from dstrain.commands.consolidate import Order, consolidate_weights
from dstrain.commands.evaluate import evaluate_run
from dstrain.commands.evaluating.quality import measure_quality
from dstrain.commands.evaluating.sweep import format_report, measure_loss_by_ema_width, measure_metric_by_ema_width
from dstrain.commands.export import ExportOptions, export_run
from dstrain.commands.generate import GenerateOptions, generate_samples
from dstrain.commands.options.evaluate import EvaluateOptions
from dstrain.commands.reconstruct import USUAL, ReconstructOptions, list_usable_snapshots, make_weight_averages
from dstrain.disk.sealed import render_json_with_hash
from dstrain.engine.checkpoint import read_weights
from dstrain.engine.ema.combine import hash_snapshots
from dstrain.recipe import ConfigError
from dstrain.runs import first_stage
from dstrain.runs.weights import read_weights_adapted_to_system
from tests.commands.test_export import DISCRIMINATOR, begun
from tests.engine.ema.test_profiles import published_solution
from tests.runs.test_weights import here
from tests.support.launch import ROOT, environment

WIDTHS, STEPS = (0.05, 0.1), tuple(range(1, 8))  # the run's checkpoint is of step 7
AVERAGES = ("ema.profiles=[0.05,0.1]", "ema.snapshots=1")


def snapshots(folder: Path, nets: dict[str, torch.nn.Module], steps=STEPS) -> dict[str, torch.Tensor]:
    """A snapshot of each step, around the run's weights; what the paper's system, divided by
    its sum, makes of them at 0.15, by name."""
    generator, values = torch.Generator().manual_seed(1), []
    for step in steps:
        at = folder / "averages" / f"step_{step:08d}"
        at.mkdir(parents=True)
        counters, buffers = {}, {}
        for part, network in nets.items():
            trained = dict(network.named_parameters())
            kinds = {
                f"ema.{width}": {
                    name: weight.detach() + 0.01 * torch.randn(weight.shape, generator=generator)
                    for name, weight in trained.items()
                }
                for width in WIDTHS
            }
            values += [{f"{part}/{name}": value.double() for name, value in kind.items()} for kind in kinds.values()]
            write_shard(
                at / make_shard_file_name(part, 0, 1),
                [
                    (kind, Fragment(name, tuple(value.shape), 0, value.numel()), value.flatten())
                    for kind, named in kinds.items()
                    for name, value in named.items()
                ],
                {"part": part},
            )
            counters[part] = {
                "updates": step,
                "skipped": 0,
                "stage": 0,
                "scaler": {},
                "averages": {"widths": WIDTHS, "began": 0, "updates": step},
            }
            buffers |= {
                f"buffer/{part}/{name}": value for name, value in network.state_dict().items() if name not in trained
            }
        validate.write_common_tensors_and_counters(at, (buffers, counters))
        body = {"files": hash_files(at, sorted(path.name for path in at.iterdir())), "step": step, "world": 1}
        (at / NAME).write_bytes(render_json_with_hash(body))
    solution = published_solution([(step, width) for step in steps for width in WIDTHS], steps[-1], 0.15)
    solution = solution / solution.sum()
    return {name: sum(x * value[name] for x, value in zip(solution, values)) for name in values[0]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with the averages of 0.05 and 0.15 made, and what that of 0.15 is to be."""
    folder, nets = begun(tmp_path_factory.mktemp("made"), "tiny", *AVERAGES)
    truth = snapshots(folder, nets)
    make_weight_averages(ReconstructOptions(folder, (0.05, 0.15)))
    return folder, truth


def close(state: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], part: str = "denoiser") -> bool:
    names = [name for name in truth if name.startswith(f"{part}/")]
    return bool(names) and all(
        torch.allclose(state[name.partition("/")[2]].double(), truth[name], rtol=0, atol=1e-6) for name in names
    )


def test_every_verb_takes_it(made, tmp_path):
    """Oracle: the published linear system on the same snapshots: its weights reach a notebook, an export and merged
    files; pictures and figures are those of the folder that was made, under its number.
    """
    folder, truth = made
    run = dstrain.load(folder, ema=0.15)
    assert run.weights == {"denoiser": "ema.0.15"} and run.step == 7
    assert close(run.networks["denoiser"].state_dict(), truth)
    assert not close(dstrain.load(folder).networks["denoiser"].state_dict(), truth)
    export_run(ExportOptions(folder, tmp_path / "export", "safetensors", ema=0.15))
    assert close(load_file(tmp_path / "export" / "denoiser.safetensors"), truth)
    consolidate_weights(Order(folder, tmp_path / "merged", "ema:0.15"))
    assert close(load_file(tmp_path / "merged" / "model.safetensors"), truth)
    assert (tmp_path / "merged" / "recipe.yaml").read_bytes() == (folder / "run.yaml").read_bytes()
    path, result = evaluate_run(EvaluateOptions(folder, num=4, num_steps=2, ema=0.15, out=tmp_path / "figures"))
    assert result["weights"] == {"denoiser": "ema.0.15"} and "ema0.15" in path.name
    out = generate_samples(GenerateOptions(folder, num=1, num_steps=2, ema=0.15, out=tmp_path / "pictures"))
    drawn = torch.tensor(list(Image.open(out / "samples" / "000000.png").convert("L").tobytes()))
    assert torch.equal(drawn, run.sample(1, num_steps=2).flatten().long())


def test_its_own_average_stays_that_of_the_checkpoint(made, tmp_path, capsys):
    """Oracle: the checkpoint: what it holds itself is taken from it, and of another step what was made there, said; a
    run begins from what was made.
    """
    folder, _ = made
    nets = {"denoiser": dstrain.load(folder, raw=True).networks["denoiser"]}
    other = dstrain.load(folder, ema=0.9)
    assert torch.equal(*(next(net["denoiser"].parameters()) for net in (nets, other.networks)))
    make_weight_averages(ReconstructOptions(folder, (0.075,), 5))
    capsys.readouterr()
    assert dstrain.load(folder, ema=0.075).step == 5
    assert "--ema 0.075 is of step_00000005; dstrain reconstruct has made none of step_00000007" in (
        capsys.readouterr().err
    )
    assert dstrain.load(folder, ema=0.075, step=5).step == 5
    with pytest.raises(
        ConfigError,
        match=r"holds no EMA of width 0.075; it holds 0.9; reconstructed: 0.05, 0.075, 0.15; "
        r"dstrain reconstruct .* --ema 0.075 makes one of its snapshots",
    ):
        dstrain.load(folder, ema=0.075, step=7)
    with pytest.raises(ConfigError, match="holds no EMA of decay 0.99; it holds 0.9; reconstructed"):
        generate_samples(GenerateOptions(folder, num=1, ema=0.99, out=tmp_path / "x"))
    system = systems.build("dit", other.recipe.model)
    begins = read_weights_adapted_to_system(folder / "reconstructed" / "0.15" / "step_00000007", system)["denoiser"][0]
    assert all(
        torch.equal(begins[name], value)
        for name, value in dstrain.load(folder, ema=0.15).networks["denoiser"].state_dict().items()
    )
    with pytest.raises(ConfigError, match="holds no average of denoiser of that decay; it holds ema:0.9, and raw"):
        consolidate_weights(Order(folder, tmp_path / "x", "ema:0.2"))


def test_the_identity_of_snapshots(made):
    """Oracle: by hand: the same for the same snapshots, another for fewer of them."""
    snapshots = list_usable_snapshots(made[0], None)
    assert (
        hash_snapshots(snapshots)
        == hash_snapshots(list_usable_snapshots(made[0], None))
        != hash_snapshots(snapshots[:-1])
    )


def test_two_parts(tmp_path):
    """Oracle: the published system for the autoencoder; the discriminator has no average, and is left out."""
    folder, nets = begun(tmp_path, "tiny-vae", DISCRIMINATOR, *AVERAGES)
    truth = snapshots(folder, {"autoencoder": nets["autoencoder"]})
    make_weight_averages(ReconstructOptions(folder, (0.15,)))
    state = read_weights(folder / "reconstructed/0.15/step_00000007", "autoencoder", "ema.0.15")
    assert close(state, truth, "autoencoder")
    export_run(ExportOptions(folder, tmp_path / "out", "safetensors", ema=0.15))
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == ["autoencoder.safetensors"]
    assert first_stage.open_run_as_first_stage(folder, 0.15).fingerprint not in (
        first_stage.open_run_as_first_stage(folder).fingerprint,
        None,
    )


def test_sweep(made, capsys):
    """Oracle: each average's own held-out loss, as a notebook measures it; the lowest is named; only widths that the
    snapshots make are taken; more samples than are held out are told, as many are not.
    """
    folder, _ = made
    widths = [one.width for one in make_weight_averages(ReconstructOptions(folder))]
    assert set(WIDTHS) <= set(widths) <= set(USUAL) and 0.01 not in widths
    path, result = measure_loss_by_ema_width(folder, 7, widths[:3], num_samples=16, batch=8)
    assert json.loads(path.read_text()) == result and Image.open(path.with_suffix(".png")).width > 300
    losses = result["scores"]["loss"]
    assert len(losses) == 3 and all(map(math.isfinite, losses)) and len(set(losses)) == 3
    assert result["best"] == widths[losses.index(min(losses))] and f"best: --ema {result['best']}" in format_report(
        result
    )
    assert losses[1] == pytest.approx(
        measure_loss_by_ema_width(folder, 7, widths[1:2], num_samples=16, batch=16)[1]["scores"]["loss"][0], rel=1e-6
    )
    number = measure_loss_by_ema_width(folder, 7, widths[:1], batch=16)[1]["samples"]
    for asked, told in (
        (number, ""),
        (number + 1, f"--num-samples {number + 1}: {number} are held out"),
    ):
        capsys.readouterr()
        assert measure_loss_by_ema_width(folder, 7, widths[:1], num_samples=asked, batch=16)[1]["samples"] == number
        assert capsys.readouterr().err.startswith(told) and bool(told) == ("--num-samples" in told)


def test_sweep_by_a_metric(made):
    """Oracle: the metric of each average alone, as launch/evaluate.py takes it; the lowest FD, the highest accuracy."""
    folder, _ = made
    for metric, choose in (("fd", min), ("accuracy", max)):
        options = EvaluateOptions(metrics=(metric,), folder=folder, num=8, step=7, batch=4)
        path, result = measure_metric_by_ema_width(options, WIDTHS)
        alone = [measure_quality(replace(options, ema=width))[1]["figures"][metric] for width in WIDTHS]
        assert result["scores"][metric] == alone and result["best"] == WIDTHS[alone.index(choose(alone))]
        assert json.loads(path.read_text()) == result and path.with_suffix(".png").exists()
        assert f"{metric} of 8 samples at step 7" in format_report(result)
    with pytest.raises(ConfigError, match="--metric pr: name one of fd, fid"):
        measure_metric_by_ema_width(replace(options, metrics=("pr",)), WIDTHS)


WRONG = {
    "no widths": (["{run}"], "name the widths to make: --ema 0.05,0.10"),
    "a decay": (["{run}", "--ema", "0.999"], "'0.999': a width lies from 0.001 to 0.288, such as 0.05,0.10,0.15"),
    "no snapshots": (
        ["{plain}", "--ema", "0.1"],
        "holds no snapshots of averages, of which others are made: train with "
        "ema.profiles=[0.05,0.10] and ema.snapshots=N",
    ),
    "before the first": (["{run}", "--ema", "0.1", "--step", "0"], "--step 0 lies before the first snapshot"),
    "too narrow": (
        ["{run}", "--ema", "0.005"],
        "--ema 0.005: the 7 snapshots up to step 7 make no average of that width",
    ),
    "too few": (["{run}", "--num-samples", "3", "--ema", "0.1"], "--num-samples is of --sweep"),
    "no sweep": (["{run}", "--metric", "fd", "--ema", "0.1"], "--metric is of --sweep"),
    "an unknown metric": (["{run}", "--sweep", "--ema", "0.1", "--metric", "pr"], "--metric pr: name one of fd, fid"),
    "no network": (["{run}", "--sweep", "--ema", "0.1", "--metric", "fid"], "--metric fid needs a network"),
    "one sample": (
        ["{run}", "--sweep", "--ema", "0.1", "--metric", "fd", "--num-samples", "1"],
        "--num-samples 1: metrics compare sets of images: give two or more",
    ),
    "no reference": (
        ["{run}", "--sweep", "--ema", "0.1", "--metric", "fd", "--reference", "nowhere"],
        "--reference nowhere: there is no such file or folder",
    ),
    "no metric": (["{run}", "--sweep", "--reference", "x.npz"], "--reference is of --metric"),
}


def test_the_script(made, tmp_path, monkeypatch, capsys):
    """Oracle: the fault put in: exit code 2, one message that names it, no traceback, and nothing is written; without
    one, a line for each width.
    """
    plain, _ = begun(tmp_path, "tiny")
    code, out, _ = here("reconstruct.py", [made[0], "--ema", "0.05,0.15,0.150"], monkeypatch, capsys)
    assert code == 0 and [line.partition(":")[0] for line in out.splitlines()] == ["--ema 0.05", "--ema 0.15"]
    names, before = {"run": made[0], "plain": plain}, sorted((made[0] / "reconstructed").rglob("*"))
    for words, expected in WRONG.values():
        code, out, err = here("reconstruct.py", (word.format(**names) for word in words), monkeypatch, capsys)
        assert code == 2 and not out and "Traceback" not in err and expected in err, err
    assert sorted((made[0] / "reconstructed").rglob("*")) == before and not (plain / "reconstructed").exists()


def test_memory(tmp_path):
    """Oracle: the weights' bytes: what a reconstruction holds at its peak stays far below one copy of them."""
    network = torch.nn.Linear(3000, 3000, bias=False)  # 36 MB, and four times as much in snapshots
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.yaml").write_text("name: made\n")
    snapshots(run, {"net": network}, steps=(6, 7))
    assert read_manifest(run / "averages" / "step_00000007")["files"]["net-00000-of-00001.safetensors"]["size"] > 7e7
    program = f"""
import resource
from pathlib import Path
from dstrain.commands.reconstruct import ReconstructOptions, make_weight_averages
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
options = ReconstructOptions(Path({str(run)!r}), (0.06, 0.075))
before = peak()
make_weight_averages(options)
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 32_000  # KB
