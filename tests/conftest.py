"""Whole runs share the cores: workers of pytest-xdist, a file to each at a time, the longest files first.

One file alone runs in this process, which is sooner ready than workers are.
"""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from dstrain.distributed.progress import get_phases

# Before torch is loaded: its threads gain nothing on tiny networks, and those of several workers and ranks only fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# nohup and a shell's `&` hand down SIGINT ignored, and launches of tests are interrupted by it.
signal.signal(signal.SIGINT, signal.default_int_handler)

WORKERS = 4  # at most: a launch of two ranks fills two cores by itself
# The longest files first, and beside those that compute, those that wait for a timeout, a link or an end: workers
# that all compute, or all wait, leave cores to each other or to nobody.
LONGEST = (
    "planning/test_costs.py",
    "docs/test_printed_commands.py",
    "launch/test_machines.py",
    "launch/test_encode.py",
    "engine/test_systems.py",
    "launch/test_gpu.py",
    "launch/test_stops.py",
    "launch/test_wheel.py",
    "engine/test_rollback.py",
    "launch/test_own_images.py",
    "launch/test_phenaki.py",
    "launch/test_resume.py",
    "launch/test_universal.py",
    "engine/test_blocks.py",
    "launch/test_iddpm.py",
    "launch/test_keep.py",
    "launch/test_readers.py",
    "distributed/test_watchdog.py",
    "launch/test_evaluate.py",
    "launch/test_prior.py",
    "launch/test_other_data.py",
    "launch/test_old_runs.py",
    "bench/test_bench.py",
    "faults/test_storage.py",
    "planning/test_advice.py",
    "engine/test_phenaki.py",
    "engine/test_turns.py",
    "commands/test_export.py",
    "gpu/test_gpu.py",
    "runs/test_second_command.py",
    "faults/test_kills.py",
    "faults/test_wrong_configs.py",
    "engine/ema/test_snapshots.py",
    "launch/test_moved.py",
    "engine/test_optimizers.py",
    "distributed/test_presence.py",
    "newcomer/test_newcomer.py",
    "launch/test_modes.py",
    "launch/test_data_ends.py",
    "launch/test_vae.py",
    "launch/test_plan.py",
    "faults/test_leaks.py",
    "engine/test_phenaki_turns.py",
    "engine/test_precision.py",
    "commands/test_reconstruct.py",
    "systems/test_saved_again.py",
    "commands/test_nonsense.py",
    "runs/test_hosts.py",
    "systems/test_contract.py",
    "tracking/test_wandb.py",
    "newcomer/test_bad_systems.py",
    "engine/test_alignment.py",
    "engine/test_frozen.py",
    "engine/test_sequence.py",
    "launch/test_wrong_input.py",
    "systems/dit/test_to_diffusers.py",
    "tracking/report/test_page.py",
)


def pytest_xdist_auto_num_workers(config):
    """None for one file or its tests, else one for each core and one more: many tests wait, for a timeout or a link."""
    named = {Path(word.partition("::")[0]) for word in config.args}
    if len(named) == 1 and named.pop().is_file():
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(WORKERS, cores + 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Stops the garbage collector while tests are collected: it would look through imports and nine thousand tests,
    none of them garbage, which takes each worker a third of its collection.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config, items):
    """LONGEST first, in its order; a file that begins last holds up the end. Full counts of faults only where -m or a
    test's whole name asks for them.
    """
    if "faults" not in config.option.markexpr:
        names = {word.partition("::")[2] for word in config.args}
        left_out = [
            item for item in items if item.get_closest_marker("faults") and item.nodeid.partition("::")[2] not in names
        ]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    root = Path(__file__).parent
    rank = {root / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish():
    """Autograd begins before a test pretends a GPU, as torch's fake tensors do. It would start a thread for that GPU,
    and no process forked from this one could compute a gradient. And the modules are kept out of the way of the garbage
    collector, which would look through them for a third of a second wherever a test or a fork collects.
    """
    if torch := sys.modules.get("torch"):
        torch.ones((), requires_grad=True).backward()
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    """A test's log begins without the lines that an earlier test's code has said in this process."""
    get_phases().take_printed_lines()
