"""Consolidation in one process: the layout, types, what is refused, what hostile and damaged files do. With files of
DeepSpeed at every stage: tests/checkpoint/test_deepspeed_files.py."""

import json
import math
import os
import pickle
import resource
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import load_torch_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dstrain import systems
from dstrain.checkpoint import safetensors_io, torch_files
from dstrain.checkpoint.fragments import Fragment, make_shard_file_name, write_shard
from dstrain.checkpoint.manifest import NAME, hash_files
from dstrain.commands.consolidate import Order, consolidate_weights
from dstrain.disk.sealed import render_json_with_hash
from dstrain.runs.weights import read_weights_adapted_to_system
from tests.support.cases import CASES
from tests.support.launch import ROOT, environment

KINDS = ("master", "ema.0.9", "ema.0.5")
MODEL = {
    "patch_size": 8,
    "hidden_size": 32,
    "depth": 2,
    "num_heads": 2,
    "image_size": 32,
    "in_channels": 1,
    "num_classes": 10,
}
GAN = {
    "kl": {
        "block_out_channels": [8, 16],
        "layers_per_block": 1,
        "latent_channels": 3,
        "norm_num_groups": 4,
        "discriminator": {"base_channels": 8, "n_layers": 1, "start": 0},
    },
    "image_size": 16,
    "channels": 1,
}


def values(network: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """A state dict whose every value is another: fresh weights hold many zeros."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=generator).to(value.dtype)
        for name, value in network.state_dict().items()
    }


def checkpoint(
    run: Path,
    nets: dict[str, torch.nn.Module],
    world: int = 3,
    step: int = 7,
    averaged: tuple[str, ...] = ("denoiser", "autoencoder"),
) -> dict[str, dict[str, dict]]:
    """A run's folder with one checkpoint, written by the engine's own writers; {part: {kind: state dict}}."""
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (run / "run.yaml").write_text("name: made\nsystem: dit\nseed: 5\n")
    (run / "data.txt").write_text("builtin:fashion crc=1\n")
    truth, common = {}, {"system/history": torch.zeros(2)}
    for number, (part, network) in enumerate(nets.items()):
        trained = dict(network.named_parameters())
        kinds = KINDS if part in averaged else KINDS[:1]
        truth[part] = {kind: values(network, 10 * number + i) for i, kind in enumerate(kinds)}
        buffers = {name: value for name, value in truth[part]["master"].items() if name not in trained}
        for state in truth[part].values():
            state |= buffers
        common |= {f"buffer/{part}/{name}": value for name, value in buffers.items()}
        for rank in range(world):
            entries = []
            for kind in kinds:
                for name, value in truth[part][kind].items():
                    share = math.ceil(value.numel() / world)
                    start = min(rank * share, value.numel())
                    numel = min(share, value.numel() - start)
                    if name in trained:
                        entries.append(
                            (
                                kind,
                                Fragment(name, tuple(value.shape), start, numel),
                                value.flatten()[start : start + numel],
                            )
                        )
            write_shard(folder / make_shard_file_name(part, rank, world), entries, {"part": part})
    save_file(common, folder / "common.safetensors", {"counters": "{}"})
    seal(folder, step, world)
    return truth


def seal(folder: Path, step: int = 7, world: int = 3) -> None:
    names = sorted(path.name for path in folder.iterdir() if path.name != NAME)
    body = {
        "files": hash_files(folder, names),
        "step": step,
        "world": world,
        "extra": {"score": None},
        "versions": {"dstrain": "0", "torch": "0"},
    }
    (folder / NAME).write_bytes(render_json_with_hash(body))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    run = tmp_path_factory.mktemp("consolidate") / "run"
    return run, checkpoint(run, systems.build("dit", MODEL).networks())["denoiser"]


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def all_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


# ------------------------------------------------------------------------------------------------------------ fragments


@pytest.mark.parametrize(
    "weights, kind", [("raw", "master"), ("ema", "ema.0.9"), ("ema:0.50", "ema.0.5"), (None, "ema.0.9")]
)
def test_fragments(made, tmp_path, weights, kind):
    """Oracle: the tensors that the shards were cut from; torch's strict loading; the run's own words."""
    run, truth = made
    consolidate_weights(Order(run, tmp_path / "out", weights))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert same(found, truth[kind])
    systems.build("dit", MODEL).networks()["denoiser"].load_state_dict(found, strict=True)
    said = json.loads((tmp_path / "out" / "consolidated.json").read_text())
    assert (said["step"], said["seed"], said["system"], said["world"]) == (7, 5, "dit", 3)
    assert said["parts"]["denoiser"]["weights"] == kind.replace("ema.", "ema:").replace("master", "raw")
    assert said["data"] == "builtin:fashion crc=1" and len(said["checkpoint"]) == 64
    assert (tmp_path / "out" / "recipe.yaml").read_text() == (run / "run.yaml").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_sharded(made, tmp_path):
    """Oracle: huggingface_hub's own reader, strict, and the sizes of the files."""
    run, truth = made
    consolidate_weights(Order(run, tmp_path / "out", "raw", shard_size=40_000))
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in truth["master"].values())
    for path in files:
        with safe_open(path, "pt") as file:
            sizes = [file.get_tensor(name).nbytes for name in file.keys()]
            assert {index["weight_map"][name] for name in file.keys()} == {path.name}
            assert file.metadata()["format"] == "pt"
        assert sum(sizes) <= 40_000 or len(sizes) == 1
    network = systems.build("dit", MODEL).networks()["denoiser"]
    load_torch_model(network, tmp_path / "out", strict=True)
    assert same(dict(network.state_dict()), truth["master"])


def test_several_parts(tmp_path):
    """Oracle: each network's own state; the part without average is taken as trained; init_from reads it all."""
    system = systems.build("vae", GAN)
    truth = checkpoint(tmp_path / "run", system.networks())
    first, second = truth
    done = consolidate_weights(Order(tmp_path / "run", tmp_path / "out", "ema:0.5", shard_size=3000))
    assert done.weights == {first: "ema:0.5", second: "raw"}
    assert same(all_of(tmp_path / "out" / first), truth[first]["ema.0.5"])
    assert same(all_of(tmp_path / "out" / second), truth[second]["master"])
    found = read_weights_adapted_to_system(tmp_path / "out", system)
    said = json.loads((tmp_path / "out" / "consolidated.json").read_text())["files"]
    assert said == hash_files(tmp_path / "out", list(said)) and len(said) > 4
    assert all(same(found[part][0], all_of(tmp_path / "out" / part)) for part in truth)
    consolidate_weights(Order(tmp_path / "run", tmp_path / "one", "raw", second))
    assert same(all_of(tmp_path / "one"), truth[second]["master"])
    with pytest.raises(ValueError, match=f"--weights ema: .* holds no average of {second}: take --weights raw"):
        consolidate_weights(Order(tmp_path / "run", tmp_path / "x", "ema", second))
    with pytest.raises(ValueError, match=f"--part encoder: .* holds {first}, {second}"):
        consolidate_weights(Order(tmp_path / "run", tmp_path / "x", part="encoder"))
    (tmp_path / "out" / first / "model-00002-of-00009.safetensors").unlink(missing_ok=True)
    gone = sorted((tmp_path / "out" / first).glob("model-00001*"))[0]
    gone.unlink()
    with pytest.raises(ValueError, match=f"is damaged .*{gone.name} is missing"):
        read_weights_adapted_to_system(tmp_path / "out", system)
    (tmp_path / "out" / "consolidated.json").unlink()
    with pytest.raises(ValueError, match=f"no file .*{gone.name}"):
        read_weights_adapted_to_system(tmp_path / "out", system)
    consolidate_weights(Order(tmp_path / "run", tmp_path / "first", "raw", first))
    ((values, notes),) = read_weights_adapted_to_system(tmp_path / "first", system).values()
    assert same(values, truth[first]["master"])
    assert notes[-1] == f"{second} is not in {tmp_path / 'first'} and begins anew"


@pytest.mark.parametrize("shard_size", [10**9, 30_000])
def test_trains_from_it(made, tmp_path, shard_size):
    """Oracle: the weights themselves, as init_from= reads the folder."""
    run, truth = made
    consolidate_weights(Order(run, tmp_path / "out", "raw", shard_size=shard_size))
    found, changed = read_weights_adapted_to_system(tmp_path / "out", systems.build("dit", MODEL))["denoiser"]
    assert same(found, truth["master"]) and not [line for line in changed if "anew" in line]


def test_types():
    """Oracle: torch's own casts, of values that round, overflow, vanish, and of what is no number."""
    edge = [0.0, -0.0, 1e-45, 1e-8, 65504.0, 3.38e38, 1.00390625, 1.01171875, math.inf, -math.inf, math.nan]
    values = torch.cat([torch.tensor(edge), torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 100])
    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
    for source in names:
        for target in names:
            given = values.to(names[source])
            raw = memoryview(given.view(torch.uint8).numpy().tobytes())
            entry = safetensors_io.Entry("w", safetensors_io.Stored(source, tuple(given.shape), ()), target)
            cast = torch.frombuffer(bytearray(safetensors_io._cast_floats(raw, source, entry)), dtype=names[target])
            want = given.float().to(names[target]) if source == "F64" and target == "BF16" else given.to(names[target])
            torch.testing.assert_close(cast, want, rtol=0, atol=0, equal_nan=True, msg=f"{source} {target}")


def test_lower_precision(made, tmp_path):
    """Oracle: torch's cast of the weights; buffers keep their precision; what float16 cannot hold is refused."""
    run, truth = made
    consolidate_weights(Order(run, tmp_path / "out", "raw", dtype="bfloat16"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    trained = dict(systems.build("dit", MODEL).networks()["denoiser"].named_parameters())
    assert same(
        found, {name: value.bfloat16() if name in trained else value for name, value in truth["master"].items()}
    )
    assert {found[name].dtype for name in found.keys() - trained.keys()} == {torch.float32}
    large = tmp_path / "large"
    network = torch.nn.Linear(2, 2)
    state = checkpoint(large, {"denoiser": network})
    folder = large / "checkpoints" / "step_00000007"
    value = torch.full((4,), 1e5)
    write_shard(folder / make_shard_file_name("denoiser", 0, 3), [("master", Fragment("weight", (2, 2), 0, 4), value)])
    for rank in (1, 2):
        write_shard(folder / make_shard_file_name("denoiser", rank, 3), [])
    seal(folder)
    assert state
    with pytest.raises(ValueError, match="weight holds values beyond F16"):
        consolidate_weights(Order(large, tmp_path / "x", "raw", dtype="float16"))
    assert not list(tmp_path.glob("x*"))


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_flipped_byte(made, tmp_path):
    """Oracle: the contract: any file of the checkpoint, one bit: it is named, and nothing is left."""
    run, _ = made
    folder = run / "checkpoints" / "step_00000007"
    for name in sorted(path.name for path in folder.iterdir()):
        path = folder / name
        before = path.read_bytes()
        for place in (3, len(before) // 2, len(before) - 1):
            path.write_bytes(before[:place] + bytes([before[place] ^ 4]) + before[place + 1 :])
            try:
                with pytest.raises(ValueError, match=f"is damaged .*{name}"):
                    consolidate_weights(Order(run, tmp_path / "out"))
            finally:
                path.write_bytes(before)
        path.unlink()
        try:
            with pytest.raises(ValueError, match=f"is damaged .*{name} is missing"):
                consolidate_weights(Order(run, tmp_path / "out"))
        finally:
            path.write_bytes(before)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words, message",
    [
        ({"weights": "ema:0.7"}, "holds no average of denoiser of that decay; it holds ema:0.9, ema:0.5, and raw"),
        ({"weights": "ema:x"}, "x is no decay; write ema:0.9999"),
        ({"part": "critic"}, "--part critic: .* holds denoiser"),
        ({"step": 9}, "--step 9: .* holds none of that step, but 7"),
        ({"tag": "t"}, "leave it out, or choose with --step"),
    ],
)
def test_refused(made, tmp_path, words, message):
    """Oracle: the contract: one line that names the option and what there is."""
    with pytest.raises(ValueError, match=message):
        consolidate_weights(Order(made[0], tmp_path / "out", **words))
    assert not list(tmp_path.iterdir())


def test_no_checkpoint(made, tmp_path):
    """Oracle: the contract; a folder that is there already is not touched."""
    with pytest.raises(ValueError, match="is not a folder"):
        consolidate_weights(Order(tmp_path / "none", tmp_path / "out"))
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match="holds no checkpoint: neither"):
        consolidate_weights(Order(tmp_path / "run", tmp_path / "out"))
    (tmp_path / "run" / "run.yaml").write_text("name: x")
    with pytest.raises(ValueError, match="holds no checkpoint yet: train first"):
        consolidate_weights(Order(tmp_path / "run", tmp_path / "out"))
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="is there already: name a new folder"):
        consolidate_weights(Order(made[0], tmp_path / "out"))
    plain = tmp_path / "plain"
    checkpoint(plain, {"denoiser": torch.nn.Linear(2, 2)}, averaged=())
    assert consolidate_weights(Order(plain / "checkpoints" / "step_00000007", tmp_path / "o")).weights == {
        "denoiser": "raw"
    }
    with pytest.raises(ValueError, match="--weights ema: .* holds no average of denoiser"):
        consolidate_weights(Order(plain, tmp_path / "x", "ema"))


@pytest.mark.parametrize("name", ["run.yaml", "data.txt"])
@pytest.mark.parametrize("content", [b": [", b"\xff\xfe"])
def test_damaged_words(tmp_path, name, content):
    """Oracle: one line that names the file, and what helps: moved away, the weights are there."""
    run = tmp_path / "run"
    checkpoint(run, {"denoiser": torch.nn.Linear(2, 2)}, averaged=())
    (run / name).write_bytes(content)
    if (name, content) != ("data.txt", b": ["):  # which is a text as good as another
        with pytest.raises(ValueError, match=f"{name} is damaged .*move it away") as refusal:
            consolidate_weights(Order(run, tmp_path / "out"))
        assert len(str(refusal.value).splitlines()) == 1 and not (tmp_path / "out").exists()
        (run / name).unlink()
    assert consolidate_weights(Order(run, tmp_path / "out")).weights == {"denoiser": "raw"}


def test_looks_before_it_reads(made, tmp_path, monkeypatch):
    """Oracle: no byte is verified before --out is found to be writable and the disk large enough, nor by many ranks."""
    told = []
    with pytest.raises(ValueError, match="--out /proc/x/y was not written: .* name another folder"):
        consolidate_weights(Order(made[0], Path("/proc/x/y")), lambda total: told.append)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(ValueError, match="does not fit on its disk"):
        consolidate_weights(Order(made[0], tmp_path / "out"), lambda total: told.append)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="takes one process: dstrain consolidate"):
        consolidate_weights(Order(made[0], tmp_path / "out"), lambda total: told.append)
    assert not told and not list(tmp_path.iterdir())


def test_control_c(made, tmp_path):
    """Oracle: a real SIGINT while it writes: one line, exit code 130, nothing left."""
    program = (
        "import os, runpy, signal, sys\n"
        "from dstrain.checkpoint import safetensors_io as streams\nput = streams._write_all_bytes\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "streams._write_all_bytes = lambda *words: (put(*words), os.kill(os.getpid(), signal.SIGINT))\n"
        "sys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    )
    words = [
        sys.executable,
        "-c",
        program,
        str(ROOT / "launch" / "consolidate.py"),
        str(made[0]),
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(words, env=environment(), text=True, capture_output=True, timeout=60)
    assert done.returncode == 130 and len(done.stderr.splitlines()) == 1 and "interrupted" in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def test_disk_full(made, tmp_path):
    """Oracle: a process whose files may not grow beyond 100 kB: exit code 2, one message, nothing left."""
    words = [sys.executable, str(ROOT / "launch" / "consolidate.py"), str(made[0]), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        words,
        env=environment(),
        text=True,
        capture_output=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert done.returncode == 2 and "does not fit on its disk" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_interrupted(made, tmp_path):
    """Oracle: the contract: whole or not at all, whenever it is stopped."""
    for after in range(3):

        def stop(total):
            left = [after]

            def told(count):
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt

            return told

        with pytest.raises(KeyboardInterrupt):
            consolidate_weights(Order(made[0], tmp_path / "out"), stop)
        assert not list(tmp_path.iterdir())
    told = []
    done = consolidate_weights(Order(made[0], tmp_path / "out"), lambda total: told.append(total) or told.append)
    assert told[0] == sum(told[1:]) == done.to_verify + done.nbytes


def test_imports_and_memory(made, tmp_path):
    """Oracle: a fresh interpreter: neither torch, DeepSpeed nor a process group; its memory is small."""
    program = (
        "import re, runpy, sys\nsys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "print([name for name in ('torch', 'deepspeed', 'safetensors') if name in sys.modules],"
        " re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read())[1])"
    )
    words = [
        sys.executable,
        "-c",
        program,
        str(ROOT / "launch" / "consolidate.py"),
        str(made[0]),
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(words, env=environment(), text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    assert last.startswith("[] ") and int(last.split()[-1]) < 60_000  # kB; torch alone takes 600,000


def test_help_and_words(made, tmp_path):
    """Oracle: the help fits one screen; wrong words get one line that says what would be right."""
    script = str(ROOT / "launch" / "consolidate.py")
    done = subprocess.run([sys.executable, script, "--help"], env=environment(), text=True, capture_output=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) <= 32 and "--trust-pickle" in done.stdout
    for words, message in (
        (["--weights", "avg"], "neither ema, ema:DECAY nor raw"),
        (["--outt", "x"], "--outt"),
        (["--shard-size", "5X"], "no size"),
        (["--dtype", "int8"], "--dtype"),
        ([], "--out DIR"),
    ):
        done = subprocess.run(
            [sys.executable, script, str(made[0]), *words], env=environment(), text=True, capture_output=True
        )
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("name", sorted(CASES))
def test_systems_tie_nothing(name):
    """Oracle: a state dict's names: the fragments of a checkpoint, which are of named_parameters, and the buffers there
    are all of them. A tied or a frozen weight would have no values, or not under all its names.
    """
    for config in CASES[name]:
        for network in systems.build(name, config).networks().values():
            held = {name for name, weight in network.named_parameters() if weight.requires_grad}
            assert network.state_dict().keys() <= held | {name for name, _ in network.named_buffers()}


# ------------------------------------------------------------------------------------------------------ files of torch


def test_files_of_torch(tmp_path):
    """Oracle: torch.load of the same file: types, views, strides, scalars, empties, parameters, containers."""
    base = torch.arange(24, dtype=torch.float32)
    content = {
        "view": base[5:17],
        "turned": base.reshape(4, 6).t(),
        "every other": base[::2],
        "wide": base[:1].expand(3),
        "nothing": torch.empty(0, 3),
        "one": torch.tensor(3),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "last": torch.randn(1, 3, 4, 4).to(memory_format=torch.channels_last),
        "nested": [OrderedDict(a=(1, 2.5, None, True, "x", torch.Size([2, 3])))],
    }
    for dtype in (
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.uint16,
        torch.float8_e4m3fn,
    ):
        content[str(dtype)] = torch.tensor([0, 1, 1, 0]).to(dtype)
    torch.save(content, tmp_path / "a.pt")
    read, asked, sums = torch_files.load_torch_file(tmp_path / "a.pt")
    assert (
        not any(torch_files.are_bytes_altered(span, crc) for span, crc in sums.items())
        and len(sums) == len(content) - 4
    )
    assert not asked and read["nested"] == [OrderedDict(a=(1, 2.5, None, True, "x", (2, 3)))]
    entries = [
        safetensors_io.Entry(name, value, value.dtype)
        for name, value in read.items()
        if isinstance(value, safetensors_io.Stored)
    ]
    safetensors_io.write_huggingface_model(tmp_path / "o", entries, 10**9, {}, lambda _: None)
    found = load_file(tmp_path / "o" / "model.safetensors")
    assert same(found, {name: value.detach().contiguous() for name, value in content.items() if name != "nested"})


def test_without_checksums(tmp_path):
    """Oracle: a file that torch was told to write without them: read as any other, and nothing is found wrong."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(5)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    content = torch_files.load_torch_file(tmp_path / "a.pt")
    assert set(content.sums.values()) == {0} and not torch_files.are_bytes_altered(*next(iter(content.sums.items())))
    data = (tmp_path / "a.pt").read_bytes()
    (span,) = content.value["w"].spans
    assert np.frombuffer(data[span.offset : span.offset + span.nbytes], "<i8").tolist() == [0, 1, 2, 3, 4]


class Payload:
    def __init__(self, what, *args):
        self.what, self.args = what, args

    def __reduce__(self):
        return self.what, self.args


def test_hostile_pickles(tmp_path):
    """Oracle: the effects that the payloads would have: none; and torch's list of what a file asks for."""
    mark = tmp_path / "executed"
    payloads = [
        Payload(os.system, f"touch {mark}"),
        Payload(exec, f"open({str(mark)!r}, 'w')"),
        Payload(eval, f"open({str(mark)!r}, 'w')"),
        Payload(subprocess.Popen, ["touch", str(mark)]),
        Payload(open, str(mark), "w"),
        Payload(getattr, dict, "fromkeys"),
        Payload(__import__, "this"),
        Payload(pickle.loads, pickle.dumps(Payload(os.system, f"touch {mark}"))),
        Payload(np.load, str(mark)),
        Payload(torch.load, str(mark)),
        Payload(Path, "x"),
    ]
    for number, payload in enumerate(payloads):
        path = tmp_path / f"{number}.pt"
        torch.save({"module": {"w": torch.ones(2)}, "x": payload}, path)
        content = torch_files.load_torch_file(path)
        assert content.asked and not mark.exists() and isinstance(content.value["x"], torch_files.Shell)
        wanted = set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        assert {name.rpartition(".")[2] for name in wanted} <= {name.rpartition(".")[2] for name in content.asked}


def test_a_pickle_alters_no_reader(tmp_path):
    """Oracle: the file that is read after it: BUILD on what rebuilds tensors is refused, for all that pickles name."""
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    for number, (module, name) in enumerate(
        [("torch._utils", name) for name in torch_files._REBUILDS]
        + [("builtins", "dict"), ("collections", "OrderedDict"), ("torch", "Size"), ("torch", "float32")]
    ):
        for state in (b"N}\x8c\x0c__defaults__)s\x86", b"}\x8c\x0c__defaults__)s"):
            hostile = b"\x80\x04c" + f"{module}\n{name}\n".encode() + state + b"b."
            with zipfile.ZipFile(tmp_path / "a.pt") as whole, zipfile.ZipFile(tmp_path / f"{number}.pt", "w") as file:
                for info in whole.infolist():
                    file.writestr(info, hostile if info.filename.endswith("data.pkl") else whole.read(info))
            with pytest.raises(ValueError, match=f"{number}.pt"):
                torch_files.load_torch_file(tmp_path / f"{number}.pt")
    assert torch_files.load_torch_file(tmp_path / "a.pt").value["w"].shape == (2,)
    assert not hasattr(torch_files._Tensor(), "__dict__")


def test_foreign_files(tmp_path):
    """Oracle: the file that DeepSpeed did not write is named; a `latest` without a word is none."""
    model = "mp_rank_00_model_states.pt"
    torch.save([1], tmp_path / model)
    with pytest.raises(ValueError, match=f"{model} holds no module: DeepSpeed did not write it"):
        consolidate_weights(Order(tmp_path, tmp_path / "out"))
    torch.save({"module": {}}, tmp_path / model)
    torch.save({"state": {}}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(ValueError, match="rank_00_optim_states.pt holds no optimizer_state_dict: DeepSpeed did not"):
        consolidate_weights(Order(tmp_path, tmp_path / "out"))
    for tag in "ab":
        (tmp_path / "many" / tag).mkdir(parents=True)
        torch.save([1], tmp_path / "many" / tag / model)
    (tmp_path / "many" / "latest").write_text("\n")
    with pytest.raises(ValueError, match="no file latest that names one: choose with --tag a | b"):
        consolidate_weights(Order(tmp_path / "many", tmp_path / "out"))


def test_damaged_files_of_torch(tmp_path):
    """Oracle: 300 random changes of a real file: tensors that lie within the file, or a ValueError; never a crash."""
    torch.save({"a": torch.randn(50), "b": {"c": torch.arange(7)}, "d": "text"}, tmp_path / "a.pt")
    whole, random = (tmp_path / "a.pt").read_bytes(), np.random.default_rng(0)
    refusals = 0
    for _ in range(300):
        data = bytearray(whole)
        for place in random.integers(0, len(whole), 3):
            data[place] = random.integers(256)
        (tmp_path / "b.pt").write_bytes(bytes(data[: random.integers(1, len(data))] if random.random() < 0.2 else data))
        try:
            value = torch_files.load_torch_file(tmp_path / "b.pt").value
            stack = [value]
            while stack:
                item = stack.pop()
                if isinstance(item, safetensors_io.Stored):
                    assert all(s.offset >= 0 and s.offset + s.nbytes <= len(whole) for s in item.spans)
                elif isinstance(item, dict):
                    stack += item.values()
        except ValueError as error:
            assert "b.pt" in str(error)
            refusals += 1
    assert refusals > 30
    # No Linear: DeepSpeed's stage 3 replaces F.linear for the whole process, and its own cannot be scripted.
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), tmp_path / "j.pt")
    with pytest.raises(ValueError, match="TorchScript"):
        torch_files.load_torch_file(tmp_path / "j.pt")
    torch.save([torch.ones(2)], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="not of torch.save's zip format"):
        torch_files.load_torch_file(tmp_path / "old.pt")
