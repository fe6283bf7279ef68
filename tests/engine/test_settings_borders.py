"""Borders and defaults of the settings: where one value is taken, and the next one refused or remarked on."""

import contextlib
import json
import os
from types import SimpleNamespace

import pytest
import torch

from dstrain import recipe
from dstrain.engine import settings
from dstrain.recipe import ConfigError
from tests.engine.test_settings import ROOT, faults
from tests.support.engines import resolve


def resolved(config, *overrides, world=1, device="cpu"):
    return resolve(config, recipe.load_recipe(None, overrides), world, device)


def zero(stage: int, **more) -> dict:
    return {"zero_optimization": {"stage": stage, **more}}


def test_what_is_not_written():
    """Oracle: DeepSpeed's documentation of the keys: it reports at no step that a run reaches, times no phase, takes
    the optimizer that it is given, on the host as well.
    """
    config = resolved({})
    assert config["steps_per_print"] > 10**9 and config["wall_clock_breakdown"] is False
    assert config["zero_allow_untested_optimizer"] is True and config["zero_force_ds_cpu_optimizer"] is False
    assert resolved({"steps_per_print": 1})["steps_per_print"] == 1
    assert '"steps_per_print" is 0: write a whole number from 1 on' in faults({"steps_per_print": 0})
    assert '"steps_per_print" is -1: write a whole number from 1 on' in faults({"steps_per_print": -1})


def test_automatic_sizes_are_those_of_the_shipped_file():
    """Oracle: ds_configs/zero3.json."""
    shipped = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())["zero_optimization"]
    keys = (
        "reduce_bucket_size",
        "allgather_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    )
    sizes = {key: shipped[key] for key in keys if key in shipped}
    assert len(sizes) >= 3
    automatic = resolved(zero(3, **dict.fromkeys(keys, "auto")))["zero_optimization"]
    assert {key: automatic[key] for key in sizes} == sizes
    assert automatic["allgather_bucket_size"] == automatic["reduce_bucket_size"]


def test_the_other_name_of_bf16():
    """Oracle: DeepSpeed's older name of the section, bfloat16; where both stand, the present name counts."""
    config = resolved({"bfloat16": {"enabled": True}})
    assert settings.read_precision(config) == "bf16" and "bfloat16" not in config
    both = {"bfloat16": {"enabled": True}, "bf16": {"enabled": False}}
    with contextlib.suppress(ConfigError):
        assert settings.read_precision(resolved(both)) == "fp32"


@pytest.mark.parametrize("total, world, fits", [(10, 4, "8 or 12"), (3, 4, "4"), (4, 3, "3 or 6"), (1, 2, "2")])
def test_batches_that_would_fit(total, world, fits):
    """Oracle: the multiples of the world size next to the batch, none of them zero; the JSON is not at fault."""
    text = faults({}, f"batch.global={total}", world=world)
    assert f"write batch.global={fits}, or start" in text and "ds_config" not in text
    micro, accumulation = settings.split_batch_over_ranks(
        recipe.load_recipe(None, ["batch.global=12", "batch.micro=2"]).batch, 3
    )
    assert (micro, accumulation) == (2, 2) and type(accumulation) is int


def lines(config: dict, device: str = "cuda") -> list[str]:
    return settings.list_settings_remarks(config, device)


def test_remarks_on_checks_that_stay():
    """Oracle: DeepSpeed's two switches of its own checks, each remarked on where it is off, at every stage."""
    off, bf16 = {"compute_grad_norm": False}, {"enabled": True, "check_grad_overflow": False}
    for stage in (1, 2, 3):
        assert len(lines(zero(stage, **off))) == 1 and "change nothing here" in lines(zero(stage, **off))[0]
        assert lines(zero(stage)) == lines(zero(stage, compute_grad_norm=True)) == []
        assert len(lines({**zero(stage), "bf16": bf16})) == 1
        assert lines({**zero(stage), "bf16": {"enabled": True}}) == []
        assert lines({**zero(stage), "fp16": {"enabled": True}}) == []
    assert len(lines(zero(0, **off))) == 1 and lines({}) == []
    assert [line.startswith("stage 0 with bf16") for line in lines({**zero(0), "bf16": {"enabled": True}})] == [True]


def test_remarks_on_memory():
    """Oracle: by hand: the sums of an offloaded optimizer are on the GPU at stages 1 and 2, and on the host at 3."""
    for stage, expected in ((1, 1), (2, 1), (3, 0)):
        config = {
            **zero(stage, offload_optimizer={"device": "cpu"}),
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
        }
        assert sum("4 bytes a weight" in line for line in lines(config)) == expected
    config["zero_optimization"] = {"stage": 2}
    assert lines(config) == []


@pytest.mark.parametrize("native", [False, True])
def test_remarks_on_a_cpu(native, monkeypatch):
    """Oracle: a CPU with products of bf16, and one without."""
    monkeypatch.setattr(settings, "can_cpu_multiply_bf16", lambda: native)
    config = {**zero(2), "bf16": {"enabled": True}}
    assert sum("this CPU emulates bf16" in line for line in lines(config, "cpu")) == (not native)
    assert lines(config, "cuda") == lines(zero(2), "cpu") == []


@pytest.mark.parametrize("machine, native", [("x86_64", False), ("aarch64", True), ("arm64", True)])
def test_a_torch_that_does_not_say(machine, native, monkeypatch):
    """Oracle: Arm's CPUs, whose bf16 torch does not ask for; others count as emulating where torch says nothing."""
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, name, raising=False)
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    assert settings.read_precision(resolved({"bf16": {"enabled": "auto"}})) == ("bf16" if native else "fp32")


@pytest.mark.parametrize(
    "text, part",
    [
        ('{"gradient_clipping": NaN}', "NaN is no finite number"),
        ('{"gradient_clipping": -Infinity}', "-Infinity is no finite number"),
        ('{"gradient_clipping": 1e999}', "1e999 is no finite number"),
        (b"\xff\xfe", "codec can't decode"),
    ],
)
def test_numbers_and_bytes_of_a_file(tmp_path, text, part):
    """Oracle: Python's float and its UTF-8 decoder; a finite number is read."""
    path = tmp_path / "ds.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert part in faults(path) and str(path) in faults(path)
    path.write_text('{"gradient_clipping": 0.0}')
    assert resolved(path)["gradient_clipping"] == 0.0


def test_files_that_are_none(tmp_path):
    """Oracle: by hand; for a missing file the nearest one that is there."""
    (tmp_path / "zero2.json").write_text("{}")
    assert "cannot be read as a text file: it is a folder" in faults(tmp_path)
    text = faults(tmp_path / "zero3.json")
    assert "there is no such file" in text and "zero2.json" in text


def test_a_block_of_the_optimizer():
    """Oracle: by hand: what has no effect is refused, and what the recipe does anyway is taken."""
    for block in (3, {"params": 3}, [], {"params": []}):
        assert '"optimizer" is no section' in faults({"optimizer": block})
    assert resolved({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": True}}})
    assert '"optimizer.params.adam_w_mode" has no effect' in faults({"optimizer": {"params": {"adam_w_mode": False}}})
    assert '"optimizer.legacy" has no effect' in faults({"optimizer": {"legacy": True}})


def test_the_search_of_a_scale_by_default():
    """Oracle: DeepSpeed's own defaults of fp16: the scale's power and the patience, and one step of it is no skip."""
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config

    own = DeepSpeedFP16Config()
    skips = own.initial_scale_power + own.hysteresis - 1
    config = {**zero(1), "fp16": {"enabled": True}}
    assert resolved(config, f"faults.max_skipped={skips}", device="cuda")
    assert f"faults.max_skipped={skips}" in faults(config, f"faults.max_skipped={skips - 1}", device="cuda")


def test_two_micro_batches_are_several():
    """Oracle: by hand: a sum of two is a sum, of one is none."""
    for micro, sums in ((4, True), (8, False)):
        config = resolved({**zero(2), "bf16": {"enabled": True}}, "batch.global=8", f"batch.micro={micro}")
        assert ("data_types" in config) == sums


def test_the_word_of_a_stage():
    """Oracle: JSON's true and "2" are no stages; "auto" is named once, and as nothing that is decided."""
    for stage, word in ((True, "true"), ("2", '"2"'), (2.0, "2.0")):
        assert f'"zero_optimization.stage" is {word}: write 0, 1, 2 or 3' in faults(zero(stage))
    text = faults(zero("auto"))
    assert '"zero_optimization.stage" is "auto", which nothing decides' in text and "write 0, 1, 2 or 3" not in text


@pytest.mark.parametrize("key", ["reduce_bucket_size", "allgather_bucket_size"])
def test_a_bucket_holds_an_element(key):
    """Oracle: by hand: a bucket of one element is a bucket, and one of none is not."""
    assert resolved(zero(2, **{key: 1}))
    assert "it is a number of elements" in faults(zero(2, **{key: 0}))


@pytest.mark.parametrize("stage", [1, 2])
def test_the_norm_that_deepspeed_insists_on(stage):
    """Oracle: stage_1_and_2.py, which raises without its norm where it clips or offloads; a JSON without it trains."""
    config = resolved(zero(stage, compute_grad_norm=False), "optimizer.clip=1")
    assert config["zero_optimization"]["compute_grad_norm"] is False  # as the user wrote it
    assert settings.make_deepspeed_config(config)["zero_optimization"] == {"stage": stage}
    bf16 = resolved({**zero(stage), "bf16": {"enabled": True, "check_grad_overflow": False}}, device="cuda")
    assert settings.make_deepspeed_config(bf16)["bf16"] == {"enabled": True}
    assert "zero_optimization" not in settings.make_deepspeed_config(resolved({}))


def test_deepspeeds_clock_stands_still():
    """Oracle: its utils/timer.py, whose clock waits for the GPU where it is enabled; a JSON that
    asks for it gets it.
    """
    from deepspeed.utils.config import get_timers_config

    for section, runs in (
        (None, False),
        ({}, False),
        ({"throughput": {}}, False),
        ({"throughput": {"enabled": True, "synchronized": False}}, True),
    ):
        config = resolved(zero(1) if section is None else {**zero(1), "timers": section})
        clock = get_timers_config(settings.make_deepspeed_config(config))
        assert clock.enabled == runs and (clock.synchronized or runs)
    for section, key in (("x", "timers"), ({"throughput": True}, "timers.throughput")):
        said = faults({**zero(1), "timers": section})
        assert f'"{key}" is {json.dumps(section if key == "timers" else True)}: write a section' in said


def test_machines_of_two_and_ranks_that_are_odd():
    """Oracle: divisibility: 3 ranks are no pairs, nor is one; one, or nothing said, fits any number."""
    for world, fits in ((3, False), (2, True), (1, False)):
        config, words = zero(3, zero_hpz_partition_size=2), "batch.global=12"
        if fits:
            assert resolved(config, words, world=world, device="cuda")
        else:
            assert "zero_hpz_partition_size" in faults(config, words, world=world, device="cuda")
        assert resolved(zero(3, zero_hpz_partition_size=1), words, world=world, device="cuda")
        assert resolved(zero(3), words, world=world, device="cuda")
    assert "belongs to stage 3" in faults(zero(2, zero_hpz_partition_size=2), world=2, device="cuda")
    assert resolved(zero(2, zero_hpz_partition_size=1), world=2, device="cuda")


def test_gradients_that_a_rank_owns_no_part_of():
    """Oracle: DeepSpeed's partition_grads: outside of its bucket such a gradient is freed while the GPU reads it."""
    assert "frees a gradient" in faults(zero(3, contiguous_gradients=False), world=2, device="cuda")
    for level, choice in ((3, True), (2, False)):
        assert resolved(zero(level, contiguous_gradients=choice), world=2, device="cuda")


@pytest.mark.parametrize("name", ["lion", "muon", "adamw8bit"])
def test_offload_is_refused(name):
    """Oracle: docs/guides/training.md: only adamw is offloaded."""
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    with pytest.raises(ConfigError, match=f"optimizer.name is {name}: remove it, or write optimizer.name=adamw"):
        resolved(config, f"optimizer.name={name}")


def test_missing_library(monkeypatch):
    """Oracle: the line that installs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install bitsandbytes"):
        resolved({}, "optimizer.name=adamw8bit")


def test_block_of_the_json():
    """Oracle: the recipe: a block that names its optimizer is allowed, another one is refused."""
    assert resolved({"optimizer": {"type": "Lion"}}, "optimizer.name=lion")
    assert resolved({"optimizer": {"type": "Adam"}}) and resolved({"optimizer": {"type": "auto"}})
    for kind, name in (("AdamW", "lion"), ("Lion", "adamw")):
        with pytest.raises(ConfigError, match="optimizer.type"):
            resolved({"optimizer": {"type": kind}}, f"optimizer.name={name}")


def test_where_a_profile_goes(tmp_path, monkeypatch):
    """Oracle: open() for writing, by hand: a file's name is no folder's, and there are no files below a file. Another
    rank than 0 writes nothing.
    """
    (tmp_path / "file").touch()
    for path, fits in (("new/profile.txt", True), ("file", True), ("", False), ("file/profile.txt", False)):
        config = {"flops_profiler": {"enabled": True, "output_file": f"{tmp_path}/{path}"}}
        if fits:
            assert resolved(config)
        else:
            assert '"flops_profiler.output_file" is ' in faults(config)
            assert resolved({"flops_profiler": {**config["flops_profiler"], "enabled": False}})
            with monkeypatch.context() as patch:
                patch.setenv("RANK", "1")
                patch.setenv("WORLD_SIZE", "2")
                assert resolved(config)
    assert "which cannot be written" in faults({"flops_profiler": {"enabled": True, "output_file": 3}})
