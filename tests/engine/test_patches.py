"""DeepSpeed's internals as they were when dstrain's changes of them were made: what has become another is named."""

import ast
import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from dstrain.engine import patches

# What dstrain replaces, or relies on where it replaces something: by file, the name and a hash of its source in 0.19.8.
SEEN = {
    "runtime/compiler.py": {
        "compile": "a7ffdbca",
    },
    "runtime/zero/linear.py": {
        "LinearFunctionForZeroStage3": "ea16cd2c",
        "zero3_linear_wrap": "c442a889",
    },
    "runtime/zero/utils.py": {
        "is_zero_param": "bc4464ab",
        "assert_ints_same_as_other_ranks": "50132da6",
    },
    "runtime/zero/partitioned_param_coordinator.py": {
        "PartitionedParameterCoordinator.fetch_sub_module": "072f3e0b",
    },
    "runtime/zero/stage_1_and_2.py": {
        "DeepSpeedZeroOptimizer.step": "050c36d7",
        "DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned": "c94d0611",
        "DeepSpeedZeroOptimizer.independent_gradient_partition_epilogue": "40809d01",
        "DeepSpeedZeroOptimizer.reduce_ipg_grads": "ae2e2d51",
        "DeepSpeedZeroOptimizer.reduce_gradients": "0624f9e1",
        "DeepSpeedZeroOptimizer.overlapping_partition_gradients_reduce_epilogue": "ff4e4459",
        "DeepSpeedZeroOptimizer.update_lp_params": "8bc8a81d",
        "DeepSpeedZeroOptimizer._update_scale": "3c44b6c9",
    },
    "runtime/zero/stage3.py": {
        "DeepSpeedZeroOptimizer_Stage3.step": "dfc83b79",
        "DeepSpeedZeroOptimizer_Stage3.independent_gradient_partition_epilogue": "cba07463",
        "DeepSpeedZeroOptimizer_Stage3._pre_step": "0dda9466",
        "DeepSpeedZeroOptimizer_Stage3._prepare_sub_group": "5eba716a",
        "DeepSpeedZeroOptimizer_Stage3._optimizer_step": "94c2aceb",
        "DeepSpeedZeroOptimizer_Stage3._release_sub_group": "b9ca6a69",
        "DeepSpeedZeroOptimizer_Stage3._unflatten_partitioned_parameters": "13c90528",
        "DeepSpeedZeroOptimizer_Stage3.checkpoint_event_prologue": "77e9cc9a",
        "DeepSpeedZeroOptimizer_Stage3.checkpoint_event_epilogue": "4a0e20d6",
    },
    "runtime/engine.py": {
        "DeepSpeedEngine.destroy": "5692b3b7",
        "DeepSpeedEngine.step": "6a46940d",
        "DeepSpeedEngine.allreduce_gradients": "f139ba33",
        "DeepSpeedEngine.clip_fp32_gradients": "7167d72d",
        "DeepSpeedEngine._copy_recovery_script": "b9bd261b",
    },
    "runtime/fp16/loss_scaler.py": {
        "DynamicLossScaler.update_scale": "1c959aef",
    },
    "runtime/utils.py": {
        "all_gather_dp_groups": "476fa614",
    },
    "ops/adam/cpu_adam.py": {
        "DeepSpeedCPUAdam.step": "4efb7d98",
    },
    "accelerator/cuda_accelerator.py": {
        "CUDA_Accelerator.current_stream": "84a7ef33",
    },
    "checkpoint/ds_to_universal.py": {
        "_check_for_required_state": "cab5a543",
    },
    "comm/comm.py": {
        "init_distributed": "3f79e2fc",
    },
    "utils/groups.py": {
        "_clone_world_group": "cefc41f8",
    },
}
ROOT = Path(importlib.util.find_spec("deepspeed").submodule_search_locations[0])


def read_source(text: str, name: str) -> str:
    """The source of a function, or of a class's method, decorators left out."""
    body, node = ast.parse(text).body, None
    for part in name.split("."):
        node = next((each for each in body if getattr(each, "name", None) == part), None)
        body = node.body if node else []
    return ast.get_source_segment(text, node) if node else ""


@pytest.mark.parametrize("path", SEEN)
def test_what_is_changed_is_as_it_was(path):
    """Oracle: hashes of DeepSpeed 0.19.8: where one differs, dstrain/engine/patches.py and updates.py must be looked at
    before the new hash is written here.
    """
    text = (ROOT / path).read_text(encoding="utf-8")
    found = {name: hashlib.sha256(read_source(text, name).encode()).hexdigest()[:8] for name in SEEN[path]}
    assert found == SEEN[path]


def test_every_change_is_held():
    """Oracle: the functions of patches.py: each names what it replaces, and a hash of that stands above."""
    tree = ast.parse(Path(patches.__file__).read_text(encoding="utf-8"))
    public = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
    assert patches.REPLACED.keys() == public
    for place in {place for places in patches.REPLACED.values() for place in places if not place.startswith("torch.")}:
        path, name = place.split(":")
        assert name in SEEN.get(path, {}), place


def test_another_release_is_tried():
    """Oracle: the releases that the hashes above are of: the installed one is among them."""
    assert importlib.metadata.version("deepspeed") in patches.SEEN_ON


# What other files of engine/ set in an engine of DeepSpeed: counts of steps, and what is dstrain's own.
COUNTS = {"_step_applied", "micro_steps", "global_steps", "skipped_steps", "wide_sums"}


def list_changes(path: Path) -> list[str]:
    """Attributes that a file sets in objects or modules of DeepSpeed, by the names that engine/ has for these."""
    theirs = {"zero", "_zero", "engine", "_engine", "deepspeed", "groups", "comm"}
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else []
        for target in [each for top in targets for each in getattr(top, "elts", [top])]:
            if isinstance(target, ast.Attribute) and target.attr not in COUNTS:
                owners = ast.unparse(target.value).split(".")
                found += [ast.unparse(target)] if theirs.intersection(owners) else []
    return found


def test_nothing_is_changed_elsewhere():
    """Oracle: the syntax trees of engine/: patches.py alone sets what is DeepSpeed's."""
    folder = Path(patches.__file__).parent
    assert len(list_changes(folder / "patches.py")) > 5
    for path in sorted(folder.rglob("*.py")):
        assert path.name == "patches.py" or list_changes(path) == [], path


def test_the_powers_of_beta():
    """Oracle: cpu_adam.h of 0.19.8, whose chain of products patches.forget_powers breaks: a step that does not follow
    the last takes std::pow.
    """
    text = (ROOT / "ops/csrc/includes/cpu_adam.h").read_text(encoding="utf-8")
    body = text[text.index("void IncrementStep") : text.index("void update_state")]
    assert body.count("std::pow") == 4 and "step == _step + 1" in body
