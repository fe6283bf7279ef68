"""The merge of ds_configs/*.json with a recipe."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from dstrain import recipe
from dstrain.engine import settings
from dstrain.recipe import ConfigError, Run
from tests.support.engines import resolve

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "ds_configs").glob("*.json"))
# stage, precision, offload of each file, by its name
NAMED = {
    "zero1": (1, "bf16", False),
    "zero2": (2, "bf16", False),
    "zero3": (3, "bf16", False),
    "zero2_fp32": (2, "fp32", False),
    "zero2_fp16": (2, "fp16", False),
    "zero2_offload": (2, "bf16", True),
    "zero3_offload": (3, "bf16", True),
    "zeropp": (3, "bf16", False),
}


def faults(ds_config, *overrides, world=1, device="cpu"):
    with pytest.raises(ConfigError) as caught:
        resolve(ds_config, recipe.load_recipe(None, overrides), world, device)
    return str(caught.value)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_file_is_what_its_name_says(path):
    """Oracle: the file's name, and DeepSpeed's own DeepSpeedConfig."""
    from deepspeed.runtime.config import DeepSpeedConfig

    given_ = json.loads(path.read_text())
    world = given_["zero_optimization"].get("zero_hpz_partition_size", 1)
    run = recipe.load_recipe(None, [f"batch.global={48 * world}", "optimizer.clip=0.5"])
    resolved = resolve(given_, run, world, "cuda")
    found = (
        settings.read_zero_stage(resolved),
        settings.read_precision(resolved),
        settings.is_optimizer_offloaded(resolved),
    )
    assert found == NAMED[path.stem]
    assert "auto" not in json.dumps(resolved)
    assert resolved["train_batch_size"] == 48 * world
    parsed = DeepSpeedConfig({**resolved, "train_batch_size": 48})  # of the one rank that there is
    assert (parsed.train_batch_size, parsed.train_micro_batch_size_per_gpu, parsed.gradient_accumulation_steps) == (
        48,
        48,
        1,
    )
    assert (parsed.gradient_clipping, parsed.zero_optimization_stage) == (0.5, found[0])
    assert (parsed.bfloat16_config.enabled, parsed.float16_config.enabled) == (found[1] == "bf16", found[1] == "fp16")
    assert resolve(resolved, run, world, "cuda") == resolved  # what is saved reads back


def test_files_hold_mechanism_only():
    """Oracle: invariant 2 of the design: what the recipe owns is "auto", and no file has an optimizer or scheduler."""
    assert {path.stem for path in FILES} == set(NAMED)
    for path in FILES:
        content = json.loads(path.read_text())
        assert not {"optimizer", "scheduler"} & set(content)
        owned = (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
        )
        assert all(content[key] == "auto" for key in owned)


@profile(max_examples=60, deadline=None)
@given(st.integers(1, 512), st.integers(1, 16), st.none() | st.integers(1, 64), st.integers(1, 4))
def test_batch_arithmetic(total, world, micro, sequence):
    """Oracle: DeepSpeed's identity train = micro * accumulation * world, where groups of `sequence` ranks stand for the
    ranks; a refusal names numbers that do work.
    """
    if micro and total % micro:
        return
    run, ranks = Run(batch={"global": total, "micro": micro}), world * sequence
    try:
        found, accumulation = settings.split_batch_over_ranks(run.batch, ranks, sequence)
    except ConfigError as error:
        text = str(error)
        if total % world:
            first = text.split("write batch.global=")[1].split(",")[0].split(" or ")
            each = "ranks" if sequence == 1 else f"groups of parallel.sequence={sequence} ranks"
            assert all(int(number) % world == 0 for number in first) and f"over {world} {each}" in text
        else:
            works = [int(word) for word in text.rsplit(" are ", 1)[1].split(", ") if word != "..."]
            assert works and all(total // world % number == 0 for number in works) and micro not in works
        return
    assert found * accumulation * world == total and (micro is None or found == micro)


def test_ranks_that_share_samples():
    """Oracle: by hand: 8 samples over 2 groups of 2 ranks; 6 ranks make no groups of 4; DeepSpeed's own keys for it."""
    run = recipe.load_recipe(None, ["batch.global=8", "batch.micro=2", "parallel.sequence=2"])
    found = resolve({}, run, 4, "cpu")
    assert (found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]) == (2, 2)
    assert found["train_batch_size"] == 8 and resolve(found, run, 4, "cpu") == found
    text = faults({}, "parallel.sequence=4", world=6)
    assert "parallel.sequence=4 does not divide the 6 ranks: write parallel.sequence=1, 2, 3, 6" in text
    for key in ("sequence_parallel_size", "data_parallel_size"):
        assert "write parallel.sequence=N" in faults({key: 2}, world=2)


def test_clip_is_always_written():
    """Oracle: DeepSpeed clips to 1.0 when gradient_clipping is absent (runtime/constants.py)."""
    assert resolve({}, Run(), 1, "cpu")["gradient_clipping"] == 0.0


def test_what_agrees_is_accepted():
    """Oracle: the recipe's own values, written in both places."""
    run = recipe.load_recipe(
        None, ["batch.global=12", "batch.micro=2", "optimizer.clip=1", "optimizer.betas=[0.9,0.95]"]
    )
    both = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": "auto"},
        },
    }
    resolved = resolve(both, run, 2, "cpu")
    assert "optimizer" not in resolved and resolved["gradient_accumulation_steps"] == 3


@pytest.mark.parametrize(
    "key, value, owner",
    [
        ("train_batch_size", 65, "batch.global"),
        ("train_micro_batch_size_per_gpu", 4, "batch.micro"),
        ("gradient_accumulation_steps", 2, "batch.global / batch.micro"),
        ("gradient_clipping", 1.0, "optimizer.clip"),
    ],
)
def test_what_disagrees_is_named_with_both_places_and_values(tmp_path, key, value, owner):
    """Oracle: invariant 2 of the design."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({key: value}))
    text = faults(path)
    assert str(path) in text and f'"{key}" is {value}' in text and owner in text and '"auto"' in text


@pytest.mark.parametrize("name, value", [("lr", 3), ("betas", [0.9, 0.95]), ("eps", 1e-6), ("weight_decay", 0.1)])
def test_an_optimizer_block_must_agree(name, value):
    """Oracle: invariant 2 of the design."""
    text = faults({"optimizer": {"type": "Adam", "params": {name: value}}})
    assert f"optimizer.params.{name}" in text and f"optimizer.{name} in the recipe" in text


def test_auto_is_decided_or_refused():
    """Oracle: DeepSpeed drops "auto" within a section, so that bf16.enabled "auto" is false."""
    run = Run()
    zero = resolve(
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}},
        run,
        1,
        "cpu",
    )
    assert zero["zero_optimization"]["reduce_bucket_size"] == 50_000_000
    assert "write true or false" in faults({"fp16": {"enabled": "auto"}})
    assert settings.read_precision(resolve({"bf16": {"enabled": "auto"}}, run, 1, "cuda")) == "bf16"
    assert "zero_optimization.offload_optimizer.device" in faults(
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "auto"}}}
    )


def auto(device="cpu", before=None):
    return settings.read_precision(resolve({"bf16": {"enabled": "auto"}}, Run(), 1, device, before))


def test_auto_precision_of_a_cpu(monkeypatch):
    """Oracle: the flags of the CPU, and oneDNN's documented limits: below AVX512_CORE_BF16 products are emulated."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    native = "avx512_bf16" in flags or "amx_tile" in flags or os.uname().machine in ("aarch64", "arm64")
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    assert auto() == ("bf16" if native else "fp32")
    for name in ("DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA"):  # the second one is heard where both are set
        for limit in ("AVX512_CORE", "avx2"):
            monkeypatch.setenv(name, limit)
            assert auto() == "fp32" and auto("cuda") == "bf16", limit
        monkeypatch.setenv(name, "ALL")
        assert auto() == ("bf16" if native else "fp32")


@pytest.mark.parametrize("native", [False, True])
def test_a_run_that_goes_on_keeps_its_precision(native, monkeypatch):
    """Oracle: what the run was resolved to, on any CPU; true and false in the JSON are obeyed."""
    monkeypatch.setattr(settings, "can_cpu_multiply_bf16", lambda: native)
    for enabled in (False, True):
        before = resolve({"bf16": {"enabled": enabled}}, Run(), 1, "cpu")
        assert auto(before=before) == ("bf16" if enabled else "fp32")
        other = resolve({"bf16": {"enabled": not enabled}}, Run(), 1, "cpu", before)
        assert settings.read_precision(other) == ("fp32" if enabled else "bf16")
    assert auto(before={}) == ("bf16" if native else "fp32")


@pytest.mark.parametrize(
    "content, parts",
    [
        ({"zero_optimisation": {"stage": 2}}, ("zero_optimization?",)),
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, ("overlap_comm?",)),
        ({"zero_optimization": {"stage": 7}}, ("zero_optimization.stage", "7")),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "disk"}}},
            ("offload_optimizer.device\" is \"disk\": write one of 'none', 'cpu'",),
        ),
        ({"zero_optimization": True}, ("write a section",)),
        ({"zero_optimization": {"stage": 3, "zeropp_loco_param": None}}, ("zeropp_loco_param", "has removed it")),
        ({"elasticity": None}, ('"elasticity"', "has removed it")),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": True}}, ("offload_optimizer", "write a section")),
        ({"flops_profiler": 5}, ('"flops_profiler" is 5', "write a section")),
        (
            {"flops_profiler": {"enabled": True, "profile_step": -1}},
            ("flops_profiler.profile_step", "write a whole number from 1 on"),
        ),
        ({"comms_logger": {"enable": True}}, ("comms_logger.enable", "comms_logger.enabled?")),
        ({"timers": {"throughput": {"enable": True}}}, ("timers.throughput.enable", "timers.throughput.enabled?")),
        ({"log_level": "loud"}, ('"log_level" is "loud"', "warning")),
        ({"bf16": {"enabled": "perhaps"}}, ("bf16.enabled", "boolean")),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, ("keep one",)),
        ({"fp16": {"enabled": True}}, ("CPU", "zero2_fp32.json")),
        ({"scheduler": {"type": "WarmupLR"}}, ("scheduler", "optimizer.warmup")),
        ({"amp": {"enabled": True}}, ("does not support", "amp")),
        ({"pipeline": {}}, ("does not support",)),
        ({"sparse_gradients": True}, ("does not support",)),
        *(
            ({"zero_optimization": {"stage": 2, key: value}}, ("does not support", f'"zero_optimization.{key}"'))
            for key, value in (
                ("round_robin_gradients", True),
                ("zenflow", {}),
                ("parameter_alignment", True),
                ("zero_quantized_nontrainable_weights", True),
            )
        ),
        (
            {"zero_optimization": {"stage": 3, "stage3_module_granularity_threshold": 1}},
            ("granularity_threshold", "remove it"),
        ),
        ({"prescale_gradients": True}, ("does not support", "prescale_gradients")),
        ({"curriculum_learning": {}}, ("does not support",)),
        ({"compression_training": {}}, ("does not support",)),
        ({"elasticity": {}}, ("any world size",)),
        ({"compile": {"deepcompile": True}}, ("compile=on",)),
        ({"wandb": {"enabled": True}}, ("track.wandb",)),
        ({"torch_autocast": {"enabled": True}}, ("bf16",)),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, ("fp32 masters",)),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, ("offload_optimizer",)),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, ("stage 1 or above",)),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, ("stage 3",)),
        ({"zero_optimization": {"stage": 1, "zero_quantized_weights": True}}, ("stage 3",)),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, ("needs a GPU",)),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, ("ratio",)),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/none/here"}}},
            ("out of reach", 'write "cpu"'),
        ),
        ({"optimizer": {"type": "Lamb"}}, ("Lamb", "adamw")),
        ({"optimizer": {"params": {"fused": True}}}, ("no effect",)),
        ({"gradient_predivide_factor": 2.0}, ("gradient_predivide_factor", "remove it")),
        ({"data_types": {"param_dtype": "bf16"}}, ("data_types.param_dtype", "fp32")),
        ({"comms_logger": {"enabled": True, "bunk": 1}}, ("bunk",)),
        ({"timers": 3}, ('"timers" is 3: write a section', "remove it")),
        (
            {"zero_optimization": {"overlap_comm": "yes"}},
            ('overlap_comm" is "yes": write true or false',),
        ),
        ({"zero_optimization": {"stage": 2, "overlap_comm": 1}}, ('overlap_comm" is 1: write true or false',)),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": "8"}},
            ('size" is "8": write a number',),
        ),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "500"}}, ('bucket_size" is "500": write a number',)),
        ({"fp16": {"enabled": False, "loss_scale": True}}, ('"fp16.loss_scale" is true: ',)),
        (
            {"fp16": {"enabled": False, "loss_scale": -1}},
            ('loss_scale" is -1: fp16.loss_scale must be', "correct it"),
        ),
        (
            {"zero_optimization": {"compute_grad_norm": False}},
            ('"zero_optimization": compute_grad_norm=false is',),
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": "no"}}},
            ('offload_optimizer.pin_memory" is "no": write true or false',),
        ),
        ({"zero_optimization": {"leaf_module": {"name": []}}}, ('leaf_module.name" is no key', "correct or remove it")),
        ({"wall_clock_breakdown": "yes"}, ('"wall_clock_breakdown" is "yes": write true or false',)),
        ({"timers": {"throughput": {"enabled": "no"}}}, ('timers.throughput.enabled" is "no": write true or false',)),
        ({"flops_profiler": {"enabled": 1}}, ('"flops_profiler.enabled" is 1: write true or false',)),
        ({"flops_profiler": {"enabled": True, "module_depth": "all"}}, ("module_depth", "a whole number from -1 on")),
        ({"flops_profiler": {"enabled": True, "top_modules": 1.5}}, ("top_modules", "a whole number from 1 on")),
        (
            {"flops_profiler": {"recompute_fwd_factor": "x"}},
            ('recompute_fwd_factor" is "x": write a number from 0',),
        ),
        ({"steps_per_print": "ten"}, ('"steps_per_print" is "ten": write a whole number from 1 on',)),
        ({"communication_data_type": "int8"}, ('"communication_data_type" is "int8": write one of fp32, bf16, fp16',)),
        ({"zero_optimisation": None}, ("zero_optimization?",)),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_a_wrong_file_is_refused(content, parts):
    """Oracle: DeepSpeed's behaviour in shared/deepspeed.md, which accepts, ignores or trips over each of these."""
    text = faults(content)
    assert all(part in text for part in parts), text
    assert "'nvme'" not in text  # no remedy: it is refused, too


@pytest.mark.parametrize(
    "content",
    [
        {"zero_optimization": None, "bf16": None, "fp16": None, "optimizer": None, "bfloat16": None},
        {"gradient_clipping": None, "train_batch_size": None, "steps_per_print": None, "log_level": None},
        {
            "flops_profiler": None,
            "timers": None,
            "data_types": None,
            "comms_logger": None,
            "wall_clock_breakdown": None,
        },
        {"timers": {"throughput": None}, "communication_data_type": None, "zero_allow_untested_optimizer": None},
        {"zero_optimization": {"reduce_bucket_size": None, "overlap_comm": None, "zenflow": None}},
        {"zero_optimization": {"offload_optimizer": None, "leaf_module": None, "zero_hpz_partition_size": None}},
        {"zero_optimization": {"offload_param": {"device": None, "nvme_path": None}, "leaf_module": {"names": None}}},
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_null_chooses_nothing(content):
    """Oracle: the same settings without these keys, which is what files that other programs write mean by them."""
    run = recipe.load_recipe(None, ())

    def drop(value):
        if not isinstance(value, dict):
            return value
        return {key: drop(inner) for key, inner in value.items() if inner is not None}

    assert resolve(content, run, 1, "cpu") == resolve(drop(content), run, 1, "cpu")


def test_all_faults_of_a_file_are_named_at_once():
    """Oracle: the list of faults put in."""
    text = faults(
        {
            "gradient_clipping": 1.0,
            "amp": {},
            "fp16": {"enabled": "auto"},
            "zero_optimisation": {},
            "zero_optimization": {"stage": 9},
            "optimizer": {"params": {"lr": 1}},
        }
    )
    assert len(text.splitlines()) == 6


def test_secondary_partition_divides_the_ranks():
    """Oracle: deepspeed/utils/groups.py, _ensure_divisibility."""
    zero = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}
    assert "1, 2, 3, 6" in faults(zero, "batch.global=60", world=6, device="cuda")
    assert resolve(zero, Run(), 8, "cuda") and resolve(zero, Run(), 4, "cuda")
    for local, world in ((4, 2), (8, 4), (0, 1), (0, 4)):  # DeepSpeed would take the ranks there are, or divide by zero
        zero["zero_optimization"]["zero_hpz_partition_size"] = local
        said = faults(zero, "batch.global=8", world=world, device="cuda")
        assert f'"zero_optimization.zero_hpz_partition_size" is {local}, the ranks are {world}: write' in said


@pytest.mark.parametrize(
    "text, part",
    [
        ('{"a": 1,}', ":1:"),
        ('{"bf16": {}, "bf16": {}}', "twice"),
        ("[1]", "list"),
        ('{\n\n"a" 1}', ":3:"),
        ("", ":1:"),
        (b"\xff\xfe", "text file"),
    ],
)
def test_a_broken_file_is_named(tmp_path, text, part):
    """Oracle: the file's name and the line of the fault."""
    path = tmp_path / "ds.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = faults(path)
    assert str(path) in found and part in found


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sums_of_gradients(precision):
    """Oracle: fp32 where a step has several micro-batches; the JSON's own choice; DeepSpeed refuses the key at stage 0
    (engine.py, _do_optimizer_sanity_check), and takes an optimizer with other files at stage 1 in bf16.
    """

    def resolved(stage, *words, **own):
        config = {precision: {"enabled": True}, "zero_optimization": {"stage": stage}, **own}
        return resolve(config, recipe.load_recipe(None, ["batch.global=8", *words]), 1, "cuda")

    several, own = "batch.micro=2", {"data_types": {"grad_accum_dtype": precision}}
    for stage in (1, 2, 3):
        assert "data_types" not in resolved(stage)
        wide = resolved(stage, several)
        assert wide["data_types"] == {"grad_accum_dtype": "fp32"} and settings.needs_own_fp32_sums(wide) == (stage == 1)
        assert settings.make_deepspeed_config(wide).get("data_types") == ({} if stage == 1 else wide["data_types"])
        assert resolved(stage, several, **own)["data_types"] == own["data_types"]
        assert not settings.needs_own_fp32_sums(resolved(stage, several, **own))
    other = {"bf16": "fp16", "fp16": "bf16"}[precision]
    text = faults(
        {precision: {"enabled": True}, "zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": other}},
        device="cuda",
    )
    assert f'"{other}", and the networks compute in {precision}' in text and f'write "fp32" or "{precision}"' in text
    offloaded = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert any(
        "4 bytes a weight" in line for line in settings.list_settings_remarks(resolved(2, several, **offloaded), "cuda")
    )
    assert settings.list_settings_remarks(resolved(2, **offloaded), "cuda") == []


def test_fp32_sums_are_nothing_to_decide():
    """Oracle: by hand: networks in fp32 sum in fp32, and in nothing else."""
    assert "data_types" not in resolve({}, recipe.load_recipe(None, ["batch.micro=2"]), 1, "cpu")
    assert 'compute in fp32: write "fp32", or' in faults({"data_types": {"grad_accum_dtype": "bf16"}})


def test_fp16_and_its_scale():
    """Oracle: FP16_UnfusedOptimizer of DeepSpeed's stage 0 divides by a scale that engine.backward has not applied; and
    the skips by hand: 2 ** 19 halves to 1 in 19 steps, after hysteresis - 1 that do not halve.
    """
    assert '"stage": 1' in faults({"fp16": {"enabled": True}}, device="cuda")
    fp16 = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "initial_scale_power": 19, "hysteresis": 2}}
    assert resolve(fp16, recipe.load_recipe(None, ["faults.max_skipped=20"]), 1, "cuda")
    text = faults(fp16, "faults.max_skipped=19", device="cuda")
    assert "initial_scale_power" in text and "faults.max_skipped=20" in text
    fp16["fp16"]["loss_scale"] = 128
    assert resolve(fp16, recipe.load_recipe(None, ["faults.max_skipped=1"]), 1, "cuda")


@pytest.mark.parametrize(
    "key, least, most",
    [
        ("reduce_bucket_size", 1, 10**10),
        ("allgather_bucket_size", 1, 10**10),
        ("stage3_prefetch_bucket_size", 0, 10**10),
        ("sub_group_size", 1, 10**15),
    ],
)
def test_bounds_of_sizes(key, least, most):
    """Oracle: the bounds by hand: what lies on them is taken, what lies beyond is refused with the key."""
    for value in (least, most):
        zero = resolve({"zero_optimization": {"stage": 3, key: value}}, recipe.load_recipe(None), 1, "cuda")
        assert zero["zero_optimization"][key] == value
    for value in (least - 1, most + 1):
        assert f'"zero_optimization.{key}" is {value}' in faults({"zero_optimization": {"stage": 3, key: value}})


def test_the_callers_dict_stays():
    """Oracle: a copy taken before."""
    content = {"train_batch_size": "auto", "optimizer": {"params": {"lr": "auto"}}, "zero_optimization": {"stage": 2}}
    before = json.loads(json.dumps(content))
    resolve(content, Run(), 1, "cpu")
    assert content == before


def test_remarks():
    """Oracle: the cases of shared/deepspeed.md in which DeepSpeed is slow, and keys that updates.py overrules."""
    assert settings.list_settings_remarks({}, "cpu") == []  # stage 0: dstrain looks itself
    assert any("stage 0" in line for line in settings.list_settings_remarks({"bf16": {"enabled": True}}, "cuda"))
    guarded = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    assert settings.list_settings_remarks(guarded, "cuda") == []
    guarded["bf16"]["check_grad_overflow"] = False
    assert any("change nothing here" in line for line in settings.list_settings_remarks(guarded, "cuda"))


def test_an_auto_that_nothing_decides():
    """Oracle: by hand: the key, the section that it stands in, and the remedy; a switch would be read as false."""
    for settings_, words in (
        ({"steps_per_print": "auto"}, '"steps_per_print" is "auto", which nothing decides: write'),
        (
            {"zero_optimization": {"stage": 2, "round_robin_gradients": "auto"}},
            '"zero_optimization.round_robin_gradients" is "auto", which nothing decides within '
            "zero_optimization: write a value",
        ),
        ({"fp16": {"enabled": "auto"}}, '"fp16.enabled" is "auto", which DeepSpeed reads as false'),
    ):
        assert words in faults(settings_)
