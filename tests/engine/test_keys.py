"""Every key of DeepSpeed's JSON is decided: it takes effect as without it, is remarked on, or is refused."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from dstrain.engine import parser, schema, set_deepspeed_environment, settings
from dstrain.recipe import ConfigError, Run
from tests.engine import check_keys
from tests.support.engines import resolve

# Supported keys that are tried on a GPU, by tests/gpu, or with other numbers than those of fp32.
ON_A_GPU = {
    "fp16.enabled": True,
    "fp16.loss_scale": 512.0,
    "fp16.initial_scale_power": 7,
    "fp16.loss_scale_window": 77,
    "fp16.hysteresis": 3,
    "fp16.consecutive_hysteresis": True,
    "fp16.min_loss_scale": 4,
    "zero_optimization.zero_quantized_weights": True,
    "zero_optimization.zero_quantized_gradients": True,
}
IN_OTHER_TRIALS = {"zero_optimization.stage", "bf16.enabled", check_keys.HPZ, check_keys.REDUCE}


def subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for inner in model.__subclasses__():
        yield from subclasses(inner)


def models_within(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a field's annotation names: of an Optional, say."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from models_within(inner)


def fields_of(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = f"{prefix}.{field.alias or name}"
        inner = list(models_within(field.annotation))
        for each in inner:
            yield from fields_of(each, key)
        if not inner:
            yield key


def ask(content: dict[str, Any]) -> tuple[set[str], Exception | None]:
    """What DeepSpeed's parser asks for in a JSON, and how it ends."""
    from deepspeed.runtime.config import DeepSpeedConfig

    asked = parser._KeyRecordingDict({"train_micro_batch_size_per_gpu": 1, **content})
    try:
        DeepSpeedConfig(asked)
    except Exception as error:  # a section where a number is due
        return asked.asked, error
    return asked.asked, None


def installed_keys() -> set[str]:
    """The keys that the installed release reads: no list of ours. Each top-level key is asked for what it asks for
    within a section, or its model is found by the error that an unknown word raises in it.
    """
    set_deepspeed_environment()
    from deepspeed.runtime import config
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    models = {model.__name__: model for model in subclasses(DeepSpeedConfigModel)}
    top, error = ask({})
    assert error is None
    top |= config._REMOVED_TOP_LEVEL_CONFIG_KEYS.keys()
    keys = {f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS}
    for key in top:
        section = parser._KeyRecordingDict({"no_word": 1})
        error = ask({key: section})[1]
        within = {f"{key}.{name}" for name in section.asked}
        if isinstance(error, ValidationError) and error.title in models:
            within |= set(fields_of(models[error.title], key))
        keys |= within or {key}
    return keys


@pytest.fixture(scope="module")
def installed() -> set[str]:
    return installed_keys()


def test_every_key_is_decided(installed):
    """Oracle: the fields of DeepSpeed's models and what its parser asks for, as installed: a key that a new release
    adds fails here.
    """
    assert len(installed) > 100
    assert {"zero_optimization.stage", "timers.throughput", "bf16.enabled", "aio.block_size"} <= installed
    assert "zero_optimization.offload_optimizer.nvme_path" in installed
    undecided = {key for key in installed if schema.find_support_decision_for_key(key) is None}
    sections = {
        key
        for key in undecided
        if any(name.startswith(f"{key}.") for name in schema.collect_support_decisions_by_key())
    }
    assert undecided - sections == set()


def test_no_key_is_made_up(installed):
    """Oracle: the same keys: a decision on a word that DeepSpeed does not know is a typing error in a table."""
    elsewhere = {"sequence_parallel_size", "data_parallel_size", "bfloat16", "timers.throughput"}
    for key in schema.collect_support_decisions_by_key().keys() - elsewhere:
        assert any(f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.") for name in installed), key


def test_every_supported_key_is_tried():
    """Oracle: the table of trials: a key that is supported and tried nowhere, or is tried and not supported."""
    assert schema.SUPPORTED.keys() == check_keys.TRIALS.keys() | ON_A_GPU.keys() | IN_OTHER_TRIALS
    assert {f"zero_optimization.{key}" for key in schema.STAGE_3 if key != "leaf_module"} < schema.SUPPORTED.keys()
    for key in schema.STAGE_3:
        tried = [stages for name, (_, stages) in check_keys.TRIALS.items() if name.split(".")[1:2] == [key]]
        assert set(tried) == {(3,)}, key


def refusal(key: str, value: Any, stage: int = 2) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(check_keys.settings_of(stage, **{key: value}), Run(), 1, "cuda")
    return str(caught.value)


def test_every_other_key_is_refused_or_remarked():
    """Oracle: the decisions: a refusal names the key and its reason, a remark says that it changes nothing."""
    for key, (verdict, words) in schema.collect_support_decisions_by_key().items():
        if verdict == "refused":
            section = key in schema.UNSUPPORTED
            assert f'does not support "{key}": {words}; remove it' in refusal(key, {} if section else True), key
        elif verdict == "no effect" and key != "bfloat16":
            value = key not in schema._ON_ANYWAY
            assert f'"{key}" is {json.dumps(value)}, which changes nothing: {words}' in refusal(key, value), key
            if "offload" not in key and "data_type" not in key and "ops" not in key:  # these take no false
                assert resolve(check_keys.settings_of(2, **{key: not value}), Run(), 1, "cuda"), key
        elif verdict == "remarked":
            config = resolve(
                check_keys.settings_of(3, **{key: 1 if key == "steps_per_print" else True}), Run(), 1, "cuda"
            )
            assert settings.list_settings_remarks(config, "cuda") == [f'"{key}" changes nothing: {words}'], key
            assert settings.list_settings_remarks({**config, "log_level": "info"}, "cuda") == []
    with pytest.raises(ConfigError, match='"bfloat16" is .*: bf16 stands beside it and counts'):
        resolve({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, Run(), 1, "cuda")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_words_of_stage_3(stage):
    """Oracle: DeepSpeed's readers of these keys, all in files of stage 3: one remark at another stage, none there."""
    keys = {key: value for key, (value, stages) in check_keys.TRIALS.items() if stages == (3,) and "offload" not in key}
    config = resolve(check_keys.settings_of(stage, **keys), Run(), 1, "cuda")
    (line,) = settings.list_settings_remarks(config, "cuda")
    assert f"stage {stage}" in line and all(key.split(".")[1] in line for key in keys)
    assert settings.list_settings_remarks(resolve(check_keys.settings_of(3, **keys), Run(), 1, "cuda"), "cuda") == []


@pytest.mark.parametrize("section", ["data_types", "flops_profiler", "timers"])
def test_a_typing_error_within_a_section(section):
    """Oracle: by hand: DeepSpeed reads these sections without looking for words that it does not know."""
    text = refusal(f"{section}.nonsense", 1)
    assert f'"{section}.nonsense" is no key of DeepSpeed, which would ignore it silently' in text
    assert "(did you mean flops_profiler.top_modules?)" in refusal("flops_profiler.top_module", 1)


def test_a_key_of_a_newer_release(monkeypatch):
    """Oracle: a key that DeepSpeed takes, out of our tables; and fields that it takes under a second name."""
    assert resolve(check_keys.settings_of(2, **{"zero_optimization.reduce_scatter": False}), Run(), 1, "cuda")
    monkeypatch.delitem(schema.SUPPORTED, "zero_optimization.reduce_scatter")
    text = refusal("zero_optimization.reduce_scatter", False)
    assert '"zero_optimization.reduce_scatter" is a key that dstrain does not know' in text
    text = refusal("zero_optimization.prefetch_bucket_size", 100, 3)
    assert "did you mean zero_optimization.stage3_prefetch_bucket_size?" in text


@pytest.mark.parametrize("key", ["offload_optimizer", "offload_param"])
def test_secondary_partitions_are_not_offloaded(key):
    """Oracle: reports of users, github.com/deepspeedai/DeepSpeed/issues/5059: a loss of zero."""
    keys = {check_keys.HPZ: 2, f"zero_optimization.{key}.device": "cpu"}
    with pytest.raises(ConfigError, match="zero_hpz_partition_size"):
        resolve(check_keys.settings_of(3, **keys), Run(), 2, "cuda")
    assert resolve(check_keys.settings_of(3, **{check_keys.HPZ: 2}), Run(), 2, "cuda")


def test_what_is_gone():
    """Oracle: DeepSpeed 0.19's own list of what it has removed; the reason says so."""
    set_deepspeed_environment()
    from deepspeed.runtime import config

    removed = [*config._REMOVED_TOP_LEVEL_CONFIG_KEYS]
    removed += [f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS]
    for key in removed:
        for value in (True, False):
            text = refusal(key, value)
            assert f'"{key}": DeepSpeed 0.19 has removed it' in text and "did you mean" not in text, key
    assert "has removed the 1-bit optimizers" in refusal("optimizer.type", "OneBitAdam")


def test_words_of_a_gpu():
    """Oracle: DeepSpeed's own classes of settings: each word of ON_A_GPU arrives there as it is written."""
    from deepspeed.runtime.config import DeepSpeedConfig

    for key, value in ON_A_GPU.items():
        # Another power than DeepSpeed's, so that the search takes fewer steps than faults.max_skipped.
        keys = {"fp16.enabled": True, "fp16.initial_scale_power": 6} if "fp16" in key else {}
        content = check_keys.settings_of(3, **{**keys, key: value})
        config = settings.make_deepspeed_config(resolve(content, Run(), 1, "cuda"))
        parsed, name = DeepSpeedConfig(config), key.split(".")[1]
        section = parsed.float16_config if "fp16" in key else parsed.zero_config
        assert getattr(section, name) == value


def check(found: dict[str, dict[str, float]], folder: Any, profiled: int) -> None:
    """Compares with the bounds; `profiled`: the step that the latest trial with a profile has one of, from 1 on."""
    for name, differences in found.items():
        assert max(differences.values()) <= check_keys.find_bound(name), (name, differences)
    for stage in check_keys.ALL:  # once, and at the end of its step
        text = (folder / f"profile-{stage}.txt").read_text()
        assert text.count("DeepSpeed Flops Profiler") == 1 and f"Profile Summary at step {profiled}:" in text


@pytest.mark.parametrize("world, hpz", [(1, 1), (2, 2)])
def test_no_key_changes_the_numbers(tmp_path, on_ranks, world, hpz):
    """Oracle: the same 4 steps without any key: losses, norms, weights and average are equal to the bit, at stages 1,
    2 and 3, but for the three kinds of keys that have a bound. So they are with ZeRO++'s second copies, hpZ.
    """
    on_ranks(world, check_keys.main, str(tmp_path), False, hpz)
    found = json.loads((tmp_path / "figures.json").read_text())
    assert len(found) == 3 + (hpz > 1) and all(len(found[name]) == 3 for name in ("all", check_keys.REDUCE))
    check(found, tmp_path, check_keys.TRIALS["flops_profiler.profile_step"][0] + 1)


@pytest.mark.faults
@pytest.mark.parametrize("hpz", [2, 4])
def test_second_copies_among_four_ranks(tmp_path, on_ranks, hpz):
    """Oracle: as above, stage 3 without hpZ, to the bit. Buckets of other sizes sum four gradients in other orders, so
    of four ranks this key alone is compared.
    """
    on_ranks(4, check_keys.main, str(tmp_path), False, hpz)
    assert json.loads((tmp_path / "figures.json").read_text())["hpz"] == {"3": 0}


@pytest.mark.faults
@pytest.mark.parametrize("world", [1, 2])
def test_each_key_by_itself(tmp_path, on_ranks, world):
    """Oracle: as above, each key alone beside what it needs; hpZ of all ranks, too."""
    on_ranks(world, check_keys.main, str(tmp_path), True, world)
    check(json.loads((tmp_path / "figures.json").read_text()), tmp_path, 2)  # DeepSpeed's profile_step is 1
