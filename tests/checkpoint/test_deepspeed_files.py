"""Consolidation of what real engines have saved on two ranks: DeepSpeed's own checkpoints and dstrain's, all stages."""

import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dstrain.checkpoint import deepspeed_files, torch_files
from dstrain.commands.consolidate import Order, consolidate_weights
from tests.support.checkpoints import convert
from tests.support.launch import ROOT, environment, launch

PRECISIONS = ("fp32", "bf16")
ZERO = [f"plain{stage}-{precision}" for stage in (1, 2, 3) for precision in PRECISIONS]
TIED = {"head.weight": "embed.weight", "again.weight": "frozen.weight"}
FROZEN = {"frozen.weight", "frozen.bias", "again.weight", "conv.weight", "conv.bias"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a launch, and truth.pt: the weights that it saved. What is pickled depends on all that its process
    has imported and run before: not on ranks that are forked from the tests' own.
    """
    folder = tmp_path_factory.mktemp("consolidate")
    launch("tests/checkpoint/check_consolidate.py", folder, num=2)
    return folder, torch.load(folder / "truth.pt")


def merged(source, out, **words) -> dict[str, torch.Tensor]:
    consolidate_weights(Order(source, out, trust_pickle=True, **words))
    tensors = {}
    for path in sorted(out.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def differ(tensors, expected) -> list[str]:
    """Names of tensors that are not bit for bit as expected; weights saved in bf16 are expected in float32."""
    return [
        name
        for name in tensors.keys() | expected.keys()
        if name not in tensors
        or name not in expected
        or not torch.equal(tensors[name], expected[name].to(tensors[name].dtype))
    ]


@pytest.mark.parametrize("case", [*ZERO, "plain1-accumulated", "plain0-fp32"])
def test_deepspeeds_own(saved, tmp_path, case):
    """Oracle: zero_to_fp32, bit for bit, for every weight that it writes; the live weights for the others."""
    folder, truth = saved
    live, oracle = truth[case]["live"], truth[case]["oracle"]
    tensors = merged(folder / case, tmp_path / "out")
    assert differ(tensors, live) == []
    assert differ({name: tensors[name] for name in oracle}, oracle) == []
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32, torch.int64, torch.bool}
    assert torch.equal(tensors["head.weight"], tensors["embed.weight"])
    report = json.loads((tmp_path / "out" / "consolidated.json").read_text())
    assert report["parts"]["model"]["tied"] == ({} if "plain0" in case else TIED)
    assert (report["step"], report["stage"], report["tag"]) == (3, int(case[5]), "third")
    # Where zero_to_fp32 goes wrong: if these lines fail, it was mended, and deepspeed_files.py's docstring is outdated.
    if case.startswith("plain1-") and oracle:
        assert live.keys() - oracle.keys() == FROZEN
    elif oracle:
        assert live.keys() == oracle.keys()
    else:
        assert truth[case]["words"]
    module = [tensor for name, tensor in tensors.items() if name in FROZEN]
    assert all(tensor.abs().sum() > 0 for tensor in module)


def test_loads_into_the_plain_module(saved, tmp_path):
    """Oracle: torch's strict load_state_dict; both names of a tied weight show the trained one."""
    folder, _truth = saved
    program = f"""
import sys, torch
sys.path.insert(0, {str(ROOT)!r})
from safetensors.torch import load_file
from tests.checkpoint.check_consolidate import Plain
truth = torch.load({str(folder / "truth.pt")!r})
for case in sys.argv[2:]:
    network = Plain()
    network.load_state_dict(load_file(f"{{sys.argv[1]}}/{{case}}/model.safetensors"), strict=True)
    assert network.head.weight is network.embed.weight and network.again.weight is network.frozen.weight
    assert torch.equal(network.head.weight, truth[case]["live"]["embed.weight"].float()), case
"""
    for case in ZERO:
        merged(folder / case, tmp_path / case)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), *ZERO],
        env=environment(),
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("case", [f"ours{stage}-{precision}" for stage in range(4) for precision in PRECISIONS])
def test_fragments(saved, tmp_path, case):
    """Oracle: the live masters (raw), the average of full weights in one process (ema), the engine's buffers."""
    folder, truth = saved
    assert truth[case].keys() == {"raw", "ema:0.9", "ema:0.5"}
    for number, (weights, expected) in enumerate(truth[case].items()):
        tensors = merged(folder / case, tmp_path / str(number), weights=weights)
        assert differ(tensors, expected) == [] and {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    if not case.startswith("ours0"):
        native = folder / f"{case}-native"
        assert differ(merged(native, tmp_path / "native", weights="raw"), truth[case]["raw"]) == []
        assert differ(merged(native, tmp_path / "ema", weights="ema:0.5"), truth[case]["ema:0.5"]) == []
        with pytest.raises(ValueError, match="is pickled, and asks for .*deepspeed.* --trust-pickle"):
            consolidate_weights(Order(native, tmp_path / "x", "raw"))
        consolidate_weights(Order(native, tmp_path / "unpickled", "ema"))


@pytest.mark.parametrize("case", ["plain1-fp32", "plain2-bf16", "plain3-bf16", "plain3-fp32"])
def test_universal(saved, tmp_path, case):
    """Oracle: the live weights, after DeepSpeed's own ds_to_universal; faults are named, and code is not run."""
    folder, truth = saved
    universal = tmp_path / "universal"
    convert(folder / case / "third", universal)
    assert differ(merged(universal, tmp_path / "out"), truth[case]["live"]) == []
    report = json.loads((tmp_path / "out" / "consolidated.json").read_text())
    assert (report["step"], report["stage"], report["world"], report["tag"]) == (3, int(case[5]), 2, "universal")
    assert report["parts"]["model"]["tied"] == TIED
    file = universal / "zero" / "norm.weight" / "fp32.pt"
    whole = file.read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            merged(universal, tmp_path / "other")
        assert not (tmp_path / "other").exists()

    run = tmp_path / "run"
    torch.save(Code(run), file)
    refused("norm.weight/fp32.pt holds more than a tensor and plain values")
    for content in ({"param": "text"}, {"weight": torch.ones(6)}):
        torch.save(content, file)
        refused("zero/norm.weight/fp32.pt holds no tensor")
    torch.save({"param": torch.ones(5)}, file)
    refused("norm.weight .6,. takes 24 bytes, not 20")
    file.write_bytes(whole[:-300])
    refused("fp32.pt is truncated, damaged")
    data = whole.index(truth[case]["live"]["norm.weight"].float().numpy().tobytes())
    file.write_bytes(whole[:data] + b"\x01" + whole[data + 1 :])
    refused("fp32.pt is altered")
    file.unlink()
    refused("lacks zero/norm.weight/fp32.pt: copy it here")
    if case.startswith("plain3"):
        (universal / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
        refused("lacks zero_pp_rank_1_mp_rank_00_model_states.pt")
    for model in universal.glob("*_model_states.pt"):
        model.unlink()
    assert deepspeed_files.is_universal_checkpoint(universal)  # for init_from, too
    refused("universal lacks mp_rank_00_model_states.pt .* copy it from the folder that ds_to_universal has read")
    assert not run.exists()


class Code:
    """An object whose pickle makes a file."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


@pytest.mark.parametrize("case", ["plain1-bf16", "plain3-bf16"])
def test_trust(saved, tmp_path, case):
    """Oracle: torch's own list of what weights_only would refuse; without --trust-pickle nothing is written."""
    folder, _ = saved
    asked = set()
    for path in (folder / case / "third").glob("*.pt"):
        unsafe = set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        assert torch_files.load_torch_file(path).asked == unsafe
        asked |= unsafe
    with pytest.raises(ValueError, match="--trust-pickle") as refusal:
        consolidate_weights(Order(folder / case, tmp_path / "out"))
    assert len(asked) >= 2 and all(name in str(refusal.value) for name in asked)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count, more", [(6, ""), (7, " and 1 more"), (9, " and 3 more")])
def test_how_many_classes_are_named(tmp_path, count, more):
    """Oracle: by hand: six names, and how many there are beyond."""
    classes = [type(f"Class{number}", (), {"__module__": __name__}) for number in range(count)]
    for kind in classes:
        globals()[kind.__name__] = kind
    try:
        torch.save({"module": [kind() for kind in classes]}, tmp_path / "mp_rank_00_model_states.pt")
    finally:
        for kind in classes:
            del globals()[kind.__name__]
    with pytest.raises(ValueError, match=rf"asks for (\S+ ){{5}}\S+Class5{more}: if you know"):
        deepspeed_files.read_deepspeed_checkpoint(tmp_path, False, "F32")


def test_older_files(saved, tmp_path):
    """Oracle: the same weights where the files lack what DeepSpeed has added since: slices, ties."""
    folder, truth = saved
    for case in ("plain1-bf16", "plain2-fp32"):
        shutil.copytree(folder / case, tmp_path / case)
        for path in (tmp_path / case / "third").glob("*.pt"):
            content = torch.load(path, weights_only=False)
            content.get("optimizer_state_dict", {}).pop("param_slice_mappings", None)
            content.pop("shared_params", None)
            torch.save(content, path)
        assert differ(merged(tmp_path / case, tmp_path / f"{case}-out"), truth[case]["live"]) == []


@pytest.mark.parametrize("case", ["plain1-fp32", "plain2-bf16", "plain3-bf16"])
def test_altered_bytes(saved, tmp_path, case):
    """Oracle: the live weights. Of 60 flips of one bit in any file none gives wrong weights, or the file is named."""
    folder, truth = saved
    shutil.copytree(folder / case, tmp_path / "in")
    paths, random, named = sorted((tmp_path / "in" / "third").glob("*.pt")), np.random.default_rng(0), 0
    for number in range(60):
        path = paths[random.integers(len(paths))]
        before = path.read_bytes()
        place = random.integers(len(before))
        path.write_bytes(before[:place] + bytes([before[place] ^ 1 << random.integers(8)]) + before[place + 1 :])
        out = tmp_path / f"out{number}"
        try:
            assert differ(merged(tmp_path / "in", out), truth[case]["live"]) == [], (path.name, place)
        except ValueError as error:
            assert path.name in str(error) and not out.exists()
            named += 1
        path.write_bytes(before)
    assert named > 10


def test_refused(saved, tmp_path):
    """Oracle: the fault put in: a missing file or another kind of parallelism is named."""
    folder, _ = saved
    source = tmp_path / "source"

    def refused(case: str, message: str, change=lambda tag: None, **words) -> None:
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(folder / case, source)
        change(source / "third")
        with pytest.raises(ValueError, match=message):
            consolidate_weights(Order(source, tmp_path / "out", **{"trust_pickle": True, **words}))
        assert not (tmp_path / "out").exists()

    def drop(name: str):
        return lambda tag: (tag / name).unlink()

    def copied(name: str, other: str):
        return lambda tag: shutil.copy(tag / name, tag / other)

    def resaved(tag, name: str, **changes) -> None:
        torch.save(torch.load(tag / name, weights_only=False) | changes, tag / name)

    second, model = "zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"
    refused("plain2-fp32", f"lacks {second}: 1 of 2 ranks", drop(second))
    refused("plain3-fp32", f"lacks zero_pp_rank_1_{model}", drop(f"zero_pp_rank_1_{model}"))
    refused("plain2-fp32", f"lacks {model}", drop(model))
    refused(
        "plain2-fp32",
        "holds files of 3 ranks, and was last written by 2: remove .*_rank_2_",
        copied(second, second.replace("rank_1", "rank_2")),
    )
    refused("plain2-fp32", "of one rank: remove those of the older run", copied(second, f"bf16_{second}"))
    refused("plain2-fp32", "is of a tensor-parallel run", copied(model, "mp_rank_01_model_states.pt"))
    refused("plain2-fp32", "pipeline- or tensor-parallel run", lambda tag: resaved(tag, model, mp_world_size=2))
    refused("plain2-fp32", "pipeline- or tensor-parallel run", lambda tag: resaved(tag, model, module=None))
    refused("plain2-fp32", "pipeline-parallel network", copied(model, "layer_01-model_00-model_states.pt"))
    refused("plain2-fp32", "mixture of experts", copied(model, "layer_0_expert_0_mp_rank_00_model_states.pt"))
    refused("plain2-fp32", "--tag fourth: .* holds third", tag="fourth")
    refused("plain2-fp32", "--weights ema: .* holds no averages", weights="ema")
    refused("plain2-fp32", "--part a: .* one network", part="a")
    refused("plain2-fp32", "--step 3: .* give --tag", step=3)
    refused(
        "plain2-fp32",
        "several checkpoints .* --tag second | third",
        lambda tag: (shutil.copytree(tag, tag.with_name("second")), tag.with_name("latest").unlink()),
    )
    for name in ("__metadata__", 3):
        refused(
            "plain2-fp32",
            f"a weight named {name!r}",
            lambda tag: resaved(
                tag, model, module={**torch.load(tag / model, weights_only=False)["module"], name: torch.ones(2)}
            ),
        )
    refused("plain0-bf16", "only in BF16: the fp32 weights of stage 0 are kept without names")
    for name in (second, model):
        refused(
            "plain2-fp32",
            f"{name} is truncated, damaged",
            lambda tag: (tag / name).write_bytes((tag / name).read_bytes()[:-300]),
        )
    everything = [path.name for path in (folder / "plain2-bf16" / "third").glob("*_optim_states.pt")]
    refused(
        "plain2-bf16",
        "lacks zero_pp_rank_0_mp_rank_00_optim_states.pt",
        lambda tag: [(tag / name).unlink() for name in everything],
    )
