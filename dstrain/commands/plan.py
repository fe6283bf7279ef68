"""Says what a run will cost before it is started: bytes, traffic, operations, time; and which change makes it fit."""

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain.commands.job import load_and_check_recipe
from dstrain.commands.options.plan import PlanOptions
from dstrain.commands.options.shipped import find_ds_config
from dstrain.disk import small
from dstrain.distributed.progress import get_phases
from dstrain.distributed.stops import get_stops
from dstrain.engine.settings import read_precision, read_zero_stage, resolve_deepspeed_settings
from dstrain.planning.advice import (
    MAX_RANKS,
    Case,
    find_fit_with_more_gpus,
    find_fit_with_shared_samples,
    find_smallest_fitting_change,
    search_fitting_estimates,
)
from dstrain.planning.counts import Layout
from dstrain.planning.estimate import EFFICIENCY, LAUNCHES, Estimate, describe_memory, find_changed_choices, format_json
from dstrain.recipe import ConfigError, Run
from dstrain.tracking.hardware import parse_chip

_DOES_NOT_FIT = 1  # exit code
_ROWS = 20  # rows of a search's table, which then fits a screen
_HEAD = (
    f"{'stage':>5} {'micro':>6} {'steps x':>8} {'recompute':>10} {'GPU GB':>8} {'free GB':>8} {'s a step':>9} "
    f"{'samples/s':>10}"
)


def run_verb(options: PlanOptions) -> None:
    """Counts the costs of a run, or with --search of many settings, and prints them. Raises SystemExit(1) if the run,
    or with --search each of them, does not fit.
    """
    get_phases().enter_phase("checking the recipe")
    run = load_and_check_recipe(options.recipe, options.overrides, lambda note: print(note, file=sys.stderr))
    ds_config = find_ds_config(options.ds_config)
    get_phases().enter_phase("counting")
    # SIGTERM interrupts as Ctrl-C does, and so ends the process that counts. The thread of `stops` would send it again.
    get_stops().defer_stops_to_main_thread(None)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    asked = make_planning_case(
        run, ds_config, options.world, options.gpus_per_node, options.gpu, options.network, options.efficiency
    )
    text, fits = (find_and_describe_fitting_settings if options.search else describe_costs_and_memory_fit)(
        asked, options.json
    )
    print(text)
    if not fits:
        raise SystemExit(_DOES_NOT_FIT)


def make_planning_case(
    run: Run,
    ds_config: Path,
    world: int,
    gpus_per_node: int,
    gpu: str,
    network: float | None,
    efficiency: float = EFFICIENCY,
) -> Case:
    """Returns the Case to plan for: the run, its settings, its ranks and their GPU.

    ds_config: the path of a DeepSpeed JSON
    world: the number of ranks
    gpu: the name of a GPU, or its memory
    network: Gbit/s of each GPU between machines; None: what is listed for the GPU
    efficiency: the share of the GPU's peak rate that training reaches

    Raises ConfigError if the GPU is unknown, or if the JSON or the recipe does not suit so many ranks.
    """
    if world > MAX_RANKS:
        raise ConfigError(
            f"--world {world}: to count more than {MAX_RANKS:,} ranks takes minutes, since DeepSpeed goes "
            f"over all of them in Python: give --world {MAX_RANKS} or fewer, with batch.global in "
            "proportion; on more GPUs each keeps no more"
        )
    if not 0 < efficiency <= 1:
        raise ConfigError(f"--efficiency {efficiency}: write a share of the chip's rate above 0 and at most 1")
    device = parse_chip(gpu)
    if network is not None and device.name is None:
        raise ConfigError(f"--network: --gpu {gpu} names no chip, so that nothing is timed: leave it out, or name one")
    device = device if network is None else replace(device, network=network * 1e9 / 8)
    resolve_deepspeed_settings(
        ds_config,
        world,
        "cuda",
        batch=run.batch,
        optimizer=run.optimizer,
        faults=run.faults,
        sequence=run.parallel.sequence,
    )  # raises errors that name the file
    return Case(run, small.read_json(ds_config), Layout(world, gpus_per_node), device, efficiency)


def describe_costs_and_memory_fit(case: Case, json: bool = False) -> tuple[str, bool]:
    """Returns the costs of a run as text, or as JSON if `json`, and whether the run fits. If the run does not fit, also
    names the smallest change with which it fits, or says that there is none. Prints progress on stderr.
    """
    estimate = case.estimate_costs()
    change = (
        None
        if estimate.fits
        else find_smallest_fitting_change(estimate, case)
        or find_fit_with_shared_samples(case)
        or find_fit_with_more_gpus(case)
    )
    if json:
        advised = (
            None
            if change is None
            else change.collect_cost_figures() | {"changes": find_changed_choices(estimate, change)}
        )
        return format_json(
            estimate.collect_cost_figures() | ({} if estimate.fits else {"advice": advised})
        ), estimate.fits
    lines = [
        *_describe_run_setup(estimate),
        *_describe_memory(estimate),
        *_describe_step_costs(estimate),
        *_describe_whole_run_costs(estimate),
        *_describe_memory_fit(estimate),
    ]
    if not estimate.fits:
        lines += _describe_change_that_fits(estimate, change)
    return "\n".join(lines), estimate.fits


def find_and_describe_fitting_settings(case: Case, json: bool = False) -> tuple[str, bool]:
    """Estimates many combinations of stage, micro-batch and recomputation. Returns a table of the first 20 that fit,
    the fastest first, and whether any does; if `json`, JSON of all that fit in place of the table. Also prints each row
    on stderr as soon as it is known.
    """
    print(_HEAD, file=sys.stderr, flush=True)
    estimates = search_fitting_estimates(
        case, lambda tried: print(_format_estimate_row(tried), file=sys.stderr, flush=True)
    )
    if json:
        return format_json([estimate.collect_cost_figures() for estimate in estimates]), bool(estimates)
    if not estimates:
        return "no stage, micro-batch and recomputation fits: take more GPUs, or offload", False
    lines = [
        f"{case.run.name} on {_format_gpus_and_machines(estimates[0])}: what fits, "
        + ("the fastest first" if case.chip.name else "the least memory of the host, recomputation and exchange first"),
        _HEAD,
        *map(_format_estimate_row, estimates[:_ROWS]),
    ]
    if len(estimates) > _ROWS:
        lines.append(f"and {len(estimates) - _ROWS} more; --json prints all")
    return "\n".join(lines + _list_step_time_warnings(estimates[0])), True


def _format_estimate_row(estimate: Estimate) -> str:
    """Returns the costs of one combination as a row of the table."""
    time, free = estimate.time, estimate.chip.memory - estimate.device_bytes - estimate.reserved_bytes
    accumulation = estimate.settings["gradient_accumulation_steps"]
    speed = f"{time.total:>9.4g} {estimate.run.batch.global_ / time.total:>10,.0f}" if time else f"{'-':>9} {'-':>10}"
    return (
        f"{read_zero_stage(estimate.settings):>5} {estimate.micro_batch:>6} {accumulation:>8} "
        f"{estimate.collect_choices()['model.recompute']:>10} {estimate.device_bytes / 1e9:>8.2f} {free / 1e9:>8.2f} "
        f"{speed}"
        + (f"  parallel.sequence={estimate.run.parallel.sequence}" if estimate.run.parallel.sequence > 1 else "")
        + ("" if estimate.fits else "  does not fit")
    )


def _format_gpus_and_machines(estimate: Estimate) -> str:
    """Returns the GPUs as text, such as "16 x H100, 8 a machine"."""
    layout, chip = estimate.layout, estimate.chip
    name = chip.name.removeprefix("NVIDIA ") if chip.name else f"{chip.memory / 1e9:.1f} GB"
    each = f", {min(layout.gpus_per_node, layout.world)} a machine" if layout.world > 1 else ""
    return f"{layout.world:,} x {name}{each}"


def _describe_run_setup(estimate: Estimate) -> list[str]:
    """Returns lines on the run's name, sharding, batch and weights."""
    run, settings, sequence = estimate.run, estimate.settings, estimate.run.parallel.sequence
    each = "ranks" if sequence == 1 else f"groups of {sequence} ranks"
    sizes = (
        f"batch {run.batch.global_:,} = {estimate.layout.world // sequence:,} {each} x {estimate.micro_batch} x "
        f"{settings['gradient_accumulation_steps']}"
    )
    host = [name for name, value in estimate.collect_choices().items() if value == "cpu"]
    return [
        f"{run.name} on {_format_gpus_and_machines(estimate)}",
        f"stage {read_zero_stage(settings)}, {read_precision(settings)}, {sizes}, recompute "
        f"{estimate.collect_choices()['model.recompute']}" + (f", {' and '.join(host)} on the host" if host else ""),
        "weights    "
        + ", ".join(f"{part} {_format_number(number)}" for part, number in estimate.counts.weights.items()),
    ]


def _describe_memory(estimate: Estimate) -> list[str]:
    """Returns lines on the memory that a run takes, by kind: a GPU's at the peak of a step, and the host's."""
    lines = ["", "on each GPU, when a step takes most"]
    lines += [f"  {kind:14} {_format_number(size):>10}B" for kind, size in estimate.counts.device.items() if size]
    lines += [
        f"  {kind:14} {'none':>10}    then; at other moments {_format_number(size)}B at most"
        for kind, size in estimate.counts.elsewhen.items()
    ]
    lines += [
        f"  {'counted':14} {_format_number(estimate.device_bytes):>10}B",
        f"  {'reserve':14} {_format_number(estimate.reserved_bytes):>10}B   CUDA context, NCCL, loss of the allocator",
    ]
    hosts = ", ".join(f"{kind} {_format_number(size)}B" for kind, size in estimate.counts.host.items() if size)
    per_machine = estimate.host_bytes * min(estimate.layout.gpus_per_node, estimate.layout.world)
    return [
        *lines,
        f"in the host's memory, of a rank: {hosts or 'nothing'}; of a machine: {_format_number(per_machine)}B",
    ]


def _describe_step_costs(estimate: Estimate) -> list[str]:
    """Returns lines on the operations, the exchanged bytes and the time of a step."""
    counts, time = estimate.counts, estimate.time
    largest = " in the largest bucket" if estimate.run.data.buckets else ""
    lines = [
        "",
        f"a step of a rank{largest}: {_format_number(counts.flops)}FLOP"
        + (f", and {_format_number(counts.recomputed)}FLOP done again" if counts.recomputed else ""),
    ]
    lines += [
        f"  {call.operation:14} {call.count:8.4g} calls {_format_number(call.bytes):>9}B  among {call.ranks:,}"
        for call in counts.collectives
    ]
    if counts.moved:
        lines.append(f"  {'activations':14} {'':14} {_format_number(counts.moved):>9}B  to the host, and back")
    if time:
        lines += [
            f"  it takes {_format_seconds(time.total)}: computing {_format_seconds(time.compute)}, "
            f"links {_format_seconds(time.links)}"
        ]
    return lines + [f"  {line}" for line in _list_step_time_warnings(estimate)]


def _list_step_time_warnings(estimate: Estimate) -> list[str]:
    """Returns a list with one warning if the estimated time of a step is too short to be true, below 5 ms; else []."""
    if estimate.time is None or estimate.time.total >= LAUNCHES:
        return []
    return [
        f"no step is that short: below {_format_seconds(LAUNCHES)} Python and the launches of kernels, which are not "
        "modelled, take most"
    ]


def _describe_whole_run_costs(estimate: Estimate) -> list[str]:
    """Returns lines on the speed, the duration and the energy of the whole run, and on the size of a checkpoint."""
    run, time, figures = estimate.run, estimate.time, estimate.collect_cost_figures()
    checkpoint = f"checkpoint {_format_number(estimate.counts.checkpoint)}B"
    if time is None:
        return ["", f"{checkpoint}; no times, since --gpu names no chip"]
    return [
        "",
        f"{figures['samples_per_second']:,.0f} samples/s (MFU {100 * figures['mfu']:.0f} %), "
        f"{run.steps:,} steps in {_format_days(figures['days'])}, {figures['kwh']:,.4g} kWh of the GPUs",
        checkpoint,
    ]


def _describe_memory_fit(estimate: Estimate) -> list[str]:
    """Returns lines that say whether the run fits into the memory."""
    return ["", f"{'it fits' if estimate.fits else 'IT DOES NOT FIT'}: {describe_memory(estimate)}"]


def _describe_change_that_fits(estimate: Estimate, change: Estimate | None) -> list[str]:
    """Returns a line that names the change with which the run fits. `change` is the estimate after that change. If
    `change` is None, the line says that no change makes the run fit.
    """
    if change is None:
        return [
            "no micro-batch, recomputation, stage and offload makes it fit, nor does any doubling of the GPUs that "
            f"divides batch.global={estimate.run.batch.global_}: take larger GPUs"
        ]
    words = [_format_setting(name, value) for name, value in find_changed_choices(estimate, change).items()]
    speed = f", {_format_seconds(change.time.total)} a step" if change.time else ""
    return [f"with {', '.join(words)} it fits: {describe_memory(change)}{speed}"]


def _format_setting(name: str, value: Any) -> str:
    """Returns a setting as a user writes it: an option (--world 8), an entry of the recipe (batch.micro=4) or, if
    `name` begins with "zero_optimization.", an entry of DeepSpeed's JSON ("stage": 2).
    """
    if name == "world":
        return f"--world {value}"
    if not name.startswith("zero_optimization."):
        return f"{name}={value}"
    key = name.removeprefix("zero_optimization.")
    return f'"{key}": {value}' if key == "stage" else f'"{key}": {{"device": "{value}"}}'


def _format_days(days: float) -> str:
    """Returns a time as text, in days, hours, minutes or seconds."""
    for number, unit in ((days, "days"), (24 * days, "hours"), (24 * 60 * days, "minutes")):
        if number >= 2:
            return f"{number:,.1f} {unit}"
    return f"{24 * 3600 * days:.2g} seconds"


def _format_seconds(seconds: float) -> str:
    """Returns a time as text, in seconds or milliseconds."""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{1000 * seconds:.4g} ms"


def _format_number(number: float) -> str:
    """Formats a number with at most four digits and a prefix (k, M, G, T or P), so that a unit can follow."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.4g} {prefix}"
    return f"{number:.4g} "
