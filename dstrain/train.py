"""Trains a run: set_up_training, run_training_steps, take_step, finish_run. Only here learning meets sharding."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dstrain import rng, systems
from dstrain.checkpoint.saver import Saver
from dstrain.data.batches import Batches, iterate_held_out
from dstrain.data.open import describe_data, open_sources
from dstrain.data.source import Source
from dstrain.data.views import Spread
from dstrain.distributed import group
from dstrain.distributed.exit_codes import DONE, STOPPED
from dstrain.distributed.pieces import Pieces, record_piece_of_work
from dstrain.distributed.progress import get_phases
from dstrain.distributed.stops import Stopped, Stops, get_stops
from dstrain.distributed.watchdog import Watchdog
from dstrain.engine.checkpoint import Checkpoints
from dstrain.engine.ema.shadow import EmaShadow
from dstrain.engine.engines import Engines
from dstrain.engine.recovery import Divergence
from dstrain.engine.settings import list_settings_remarks, read_precision
from dstrain.engine.start import start_process_group
from dstrain.metrics.in_training import Quality, build_and_prepare_training_metrics
from dstrain.nn.sequence import share_tokens_among_ranks
from dstrain.recipe import NotSaved, Run, dump_run
from dstrain.runs import folders, hosts
from dstrain.runs.resume import Resume
from dstrain.runs.weights import read_weights_adapted_to_system, write_part_weights
from dstrain.sampling.draw import evaluate_held_out_batches
from dstrain.sampling.grids import draw_grids
from dstrain.systems.base import System
from dstrain.tracking.throughput import Throughput
from dstrain.tracking.tracker import Tracker

_FIRST_STEP = 12.0  # seconds that the first step may take to end, once a stop is asked for: all before it is saved


@dataclass(frozen=True)
class Training:
    """The objects that the training loop uses."""

    run: Run
    system: System
    engines: Engines
    ema: EmaShadow
    saves: Checkpoints
    saver: Saver  # writes the checkpoints
    batches: Batches
    shown: Source  # the source that grids begin from: the held-out one, where there is one
    held_out: Source | None
    quality: Quality | None  # the metrics of every.metrics
    micro: int  # samples of a rank in one call of the networks
    stops: Stops
    pieces: Pieces  # between which work may be left for a stop
    watchdog: Watchdog
    tracker: Tracker
    throughput: Throughput
    course: Divergence  # trouble, and how often the run went back
    first: int  # the step that it begins with

    def close(self) -> None:
        """Waits for a save that is being written, ends the loader's workers, and closes the tracker's outputs."""
        for part in (self.saves, self.throughput, self.batches, self.tracker):
            part.close()


def train(run: Run, settings: dict[str, Any], resume: Resume = Resume()) -> int:
    """Trains a run to its last step, from its newest whole checkpoint or as `resume` says. Returns DONE, or STOPPED if
    asked to stop first. Call it on all ranks. Raises ConfigError, NotSaved or FloatingPointError if it cannot go on.
    """
    first = group.read_rank_and_world().rank == 0
    lock = folders.lock_folder(run.directory) if first else nullcontext()  # one run in a folder
    limits = run.faults.hang_factor, run.faults.hang_seconds, 60 * run.faults.timeout_minutes
    stops = get_stops()
    stops.watch_stop_file_and_launchers(run.directory if first else None, run.faults.orphan_check)
    with lock, Watchdog(run.directory, *limits) as watchdog:
        training = set_up_training(run, settings, resume, watchdog, stops)
        try:
            done, left = run_training_steps(training)
            finish_run(training, done, left)
        except (RuntimeError, FloatingPointError, NotSaved) as error:
            if stops.patience is not None and stops.is_requested():
                raise Stopped from error  # another rank has left at once, too
            watchdog.handle_if_ranks_lost(error)
            training.tracker.log_failure(
                group.explain_error_and_schedule_end(error), write_page=isinstance(error, FloatingPointError)
            )
            raise
        finally:
            training.close()
    return DONE if done == run.steps and not left else STOPPED


def run_training_steps(training: Training) -> tuple[int, bool]:
    """Takes steps until the run is complete or asked to stop. After each, saves, draws and measures what is due.

    Returns how many steps are done, and whether a stop has skipped drawing or measuring after the last of them.
    """
    run, every, done, stop = training.run, training.run.every, training.first, False
    engines, tracker, course, throughput = training.engines, training.tracker, training.course, training.throughput
    training.stops.defer_stops_to_main_thread(_FIRST_STEP)  # all is saved until the first step has ended
    left = finish_resumed_step(training, done)
    intervals = every.save, every.sample, every.evaluate, every.metrics, run.ema.snapshots
    while done < run.steps and not (stop or left):
        training.watchdog.enter_phase(done + 1)
        ballot = group.Ballot(lambda: has_reason_to_stop(training))
        try:
            with training.pieces.allow_stops_between_pieces():
                losses = take_step(
                    done, run, training.system, engines, training.batches, tracker, course.num_dropped, ballot.cast_vote
                )
        except Stopped:  # before the step has changed anything
            training.saves.wait_for_saves()
            if done != training.saver.newest:
                save_and_evaluate_if_due(training, done, stop=True)
            else:
                training.saves.add_rollbacks_to_checkpoint(done)
            left = True
            break
        training.stops.defer_stops_to_main_thread(None)
        training.ema.update_averages(done, engines.collect_part_change_flags())
        done += 1
        throughput.record_step_end(done, losses)
        tracker.move_progress_bar(done)
        training.saves.report_finished_save()  # reports saves that have ended meanwhile
        stop = ballot.await_outcome()  # everyone together
        if trouble := course.record_step(done, engines.collect_part_change_flags().values(), losses, done == run.steps):
            done, stop = roll_back(training, done, trouble), False  # raises where there is no way back
            continue
        last = stop or done == run.steps
        if is_due(every.report, done) or last:
            counts = {"skipped": course.state.skipped, "rollbacks": course.num_rollbacks}
            counts |= training.batches.count_samples_by_source(done)
            tracker.report_means(done, throughput.compute_interval_figures(done) | counts | engines.collect_metrics())
        if last or any(is_due(interval, done) for interval in intervals):
            with throughput.exclude_time_of_block():
                left = save_and_evaluate_if_due(training, done, stop)
    if stop or left:
        training.stops.remove_stop_file()
        raise_if_data_problem(training, done)
    return done, left


def has_reason_to_stop(training: Training) -> bool:
    """Returns whether a stop is requested, the next step has no samples, or (on rank 0) the run's folder is lost."""
    lost = group.rank() == 0 and hosts.has_lost_folder_claim(training.run.directory)
    return lost or training.stops.is_requested() or training.batches.problem is not None


def save_and_evaluate_if_due(training: Training, done: int, stop: bool) -> bool:
    """Saves the checkpoint and averages that are due after step `done` and, unless `stop`, draws and measures what is
    due. Returns True if a stop has interrupted that; the step is then saved. Raises NotSaved if the folder is gone.
    """
    run, every, last = training.run, training.run.every, stop or done == training.run.steps
    hosts.require_folder_not_lost(run.directory)
    training.watchdog.enter_phase(done, "save of step")
    good = training.course.state.has_no_trouble
    saved = last or (is_due(every.save, done) and good)
    if saved:
        training.saves.save(done, last, routine=is_due(every.save, done) and good)  # written while training goes on
    training.saves.averages.write_snapshot_if_due(done, done == run.steps, last)
    left = not stop and not draw_samples_and_measure_metrics(training, done, saved)
    if left:
        training.saves.save_unless_saved(done, routine=is_due(every.save, done) and good)
    return left


def draw_samples_and_measure_metrics(
    training: Training, done: int, saved: bool, already_done: tuple[bool, ...] = (False, False, False)
) -> bool:
    """Draws samples and measures metrics that are due after step `done`. Returns False if a stop has interrupted that.

    `already_done`: whether pictures, held-out figures and metrics exist already; these are left out. `saved`: whether
    the step has a checkpoint, which gets the score for save.best. Without one, saves a checkpoint if the score is best.
    """
    every, last = training.run.every, done == training.run.steps
    tasks: tuple[tuple[Callable[[Training, int], float | None], int, Any], ...] = (
        (draw_and_save_samples, every.sample, training.shown),
        (evaluate_held_out_loss, every.evaluate, training.held_out),
        (measure_sample_quality, every.metrics, training.quality),
    )
    try:
        for (task, interval, source), has in zip(tasks, already_done):
            if source is None or has or not is_due(interval, done, last):
                continue
            with training.pieces.allow_stops_between_pieces():
                score = task(training, done)
            if score is not None and saved:
                training.saver.add_score(done, score)
            elif score is not None and training.saver.is_improvement(score) and training.course.state.has_no_trouble:
                training.saves.save(done, score=score)
    except Stopped:
        return False
    return True


def raise_if_data_problem(training: Training, done: int) -> None:
    """Raises, on all ranks, the ConfigError or NotRead of a rank that has no samples for the next step. Does nothing if
    all ranks have samples. Call it on all ranks after step `done` is saved.
    """
    for problem in filter(None, group.gather_objects(training.batches.problem)):
        training.tracker.log(f"stopped at step {done}, which is saved, since samples cannot be read: {problem}")
        raise problem


def finish_resumed_step(training: Training, done: int) -> bool:
    """Does what an earlier command has left undone after step `done`, from which the run resumes: draws, measures and
    saves averages, if that was due and the run's folder lacks the results. Returns True if a stop has interrupted this.
    """
    held = training.tracker.find_which_results_are_written(done)
    training.saves.averages.write_snapshot_if_due(done, done == training.run.steps, wait=True)
    return done > 0 and not draw_samples_and_measure_metrics(training, done, True, held)


def roll_back(training: Training, done: int, trouble: str) -> int:
    """Loads the newest good checkpoint from before the trouble, a message, and makes training leave out the batches
    that were read since. Returns the checkpoint's step. Raises FloatingPointError if no rollback is possible.
    """
    training.watchdog.enter_phase(done, "way back from step")
    hosts.require_folder_not_lost(training.run.directory)
    step = training.saves.roll_back(done, trouble)
    training.batches.set_step_count(training.run.steps + training.course.num_dropped)
    training.tracker.report_rollback(step, done, trouble)
    training.tracker.log(f"{trouble}: back from step {done} to step {step}, and past the {done - step} batches since")
    training.throughput.start_interval(step)
    return step


def take_step(
    step: int,
    run: Run,
    system: System,
    engines: Engines,
    batches: Batches,
    tracker: Any,
    num_dropped: int = 0,
    cast_vote: Callable[[], None] | None = None,
) -> dict[str, list[Tensor]]:
    """Takes one optimizer step of every part whose turn it is. Returns the losses of this rank's micro-batches by part.

    The batch, and the noise and dropout of its samples, are those of `step + num_dropped` (Divergence.num_dropped); all
    else depends on `step`. `cast_vote`, in which the ranks agree on what comes next, is called on the last micro-batch.
    """
    engines.begin_step(run.optimizer.compute_lr(step, run.steps))
    sequence, watched = run.parallel.sequence, []
    losses: dict[str, list[Tensor]] = {}
    turns = system.turns(step)  # ("denoiser",) or ("autoencoder", "discriminator"); `encode` makes shapes by it
    for micro, batch in enumerate(batches.read_step(step + num_dropped)):  # batch["key"] sets a sample's randomness
        if micro:
            record_piece_of_work()
        if cast_vote and micro + 1 == batches.accumulation:
            cast_vote()
        if num_dropped:
            batch["step"] = batch["step"] - num_dropped  # for schedules of the system's own
        with torch.no_grad():
            example = system.encode(batch)  # frozen encoders; building one draws random weights
        rng.seed_torch(run.seed, step + num_dropped, micro * group.world() + group.rank())  # dropout is torch's own
        for part in turns:
            # This part is live, the others are bare and frozen; ranks that share samples cut their tokens.
            with engines.freeze_all_but(part) as nets, share_tokens_among_ranks(group.get_neighbour_group(sequence)):
                terms = system.loss(part, nets, example)
                engines.run_backward_and_step(part, terms["loss"])  # DeepSpeed updates on the last micro-batch
            terms = {name: term.detach() for name, term in terms.items()}
            losses.setdefault(part, []).append(terms["loss"])
            if own := {name: terms.pop(name) for name in system.watched if name in terms}:
                watched.append(own | {"position": batch["position"]})
            tracker.add_terms(part, terms)
    if watched:  # what a system learns on the side, by all samples
        rows = {name: torch.cat([terms[name] for terms in watched]) for name in watched[0]}
        system.observe(group.gather_rows_by_position(rows.pop("position"), rows, sequence))
    return losses


def set_up_training(run: Run, settings: dict[str, Any], resume: Resume, watchdog: Watchdog, stops: Stops) -> Training:
    """Joins the ranks, builds networks, engines and averages, loads weights, and writes the run's files."""
    folder, say = run.directory, get_phases().print_lines
    start_process_group(run.faults.timeout_minutes)
    watchdog.start_status_exchange()
    options = {f"--{name.replace('_', '-')}": getattr(resume, name) for name in Resume.__dataclass_fields__}
    hosts.require_same_setup_on_all_ranks(run, settings | options)  # before anything is moved or written
    source, held_out_source = open_sources(run.data, run=folder)
    if group.rank() == 0:
        say(*describe_data(run.data, source, held_out_source, folder))
    get_phases().enter_phase("building networks")
    system = systems.build(run.system, run.model)  # networks, losses, sampler: plain torch
    fingerprint = cache(lambda: system.fingerprint(source))  # asks for the sizes of up to 10,000 files
    # Checked before, too; but a run that was waited for may have trained here since then.
    hosts.run_on_rank_0_or_exit(lambda: folders.check_and_prepare_run_folder(run, fingerprint(), resume))
    folders.broadcast_folder_claim(folder)

    for network in system.frozen():
        network.to(group.device())
    engines = build_engines(run, settings, system, draw_weights=False)
    ema = EmaShadow(engines.masters, run.ema, system.averaged)  # shadows the fp32 weights this rank owns
    weights = engines.count_weights_by_part(system.frozen())
    say("weights: " + ", ".join(f"{part} {count:,}" for part, count in weights.items()))
    if run.save.format == "deepspeed":
        say("note: save.format=deepspeed: going on from these checkpoints needs --trust-pickle")
    say(*(f"note: {remark}" for remark in list_settings_remarks(settings, group.device().type)), *engines.notes)
    course = Divergence(run.faults)
    saves = Checkpoints(
        folder / "checkpoints",
        engines,
        ema,
        system,
        run.save,
        say,
        lambda step: folders.write_saved_step(folder, step),
        course,
        resume.trust_pickle,
    )
    first = load_or_initialize_weights(run, engines, ema, saves, system, resume.step)
    if resume.allow_change:
        course.exclude_past_rollbacks_from_limit()
    if first < (earlier := folders.read_last_saved_step(folder)):
        say(f"step {earlier} was saved here, and step {first} is the newest whole checkpoint")
    elif first == 0 and (folder / "metrics.jsonl").exists():
        say("an earlier command ended before it saved anything: training begins at step 1 again")
    hosts.run_on_rank_0_or_exit(lambda: folders.write_run_files(run, settings, fingerprint()))
    micro, sequence = settings["train_micro_batch_size_per_gpu"], run.parallel.sequence
    batches = Batches(
        source,
        global_batch=run.batch.global_,
        micro_batch=micro,
        seed=run.seed,
        rank=group.rank() // sequence,
        world=group.world() // sequence,
        num_workers=run.data.workers,
        device=group.device(),
        folder=folder,
        max_bad_fraction=run.data.max_bad_fraction,
        flip=run.data.flip,
        steps=run.steps + course.num_dropped,
    )
    quality = build_and_prepare_training_metrics(run, system, source, held_out_source)
    tracker = Tracker(
        folder,
        run.track,
        name=run.name,
        steps=run.steps,
        parts=tuple(engines),
        config=run.model_dump(mode="json", by_alias=True),
        recipe=dump_run(run),
        report_page=run.every.report_page,
        patience=15 * run.faults.timeout_minutes,
        resumed_step=first,
        settings=settings,
        weights=weights,
        system=systems.find_external_system_file(run.system),
    )
    saves.saver.report = tracker.log
    throughput = Throughput(
        folder,
        first,
        lambda: batches.wait_seconds,
        batch=run.batch.global_,
        steps=run.steps,
        optimizer=run.optimizer,
        system=system,
        precision=read_precision(settings),
        train_only=run.train_only,
        window=resume.profile,
        note=tracker.log,
    )
    return Training(
        run,
        system,
        engines,
        ema,
        saves,
        saves.saver,
        batches,
        held_out_source or source,
        held_out_source,
        quality,
        micro,
        stops,
        Pieces(stops),
        watchdog,
        tracker,
        throughput,
        course,
        first,
    )


def build_engines(
    run: Run, settings: dict[str, Any], system: System, draw_weights: bool = True, engine_class: type[Engines] = Engines
) -> Engines:
    """Builds the engines of a system's networks as the recipe asks. If not `draw_weights`, the caller sets them."""
    return engine_class(
        system.networks,
        settings,
        system.has_weight_decay,
        system.list_block_classes(),
        optimizer=run.optimizer,
        seed=run.seed,
        train_only=run.train_only,
        recompute=run.model.get("recompute", "none"),
        compile=run.compile,
        channels_last=run.channels_last,
        draw=draw_weights,
    )


def load_or_initialize_weights(
    run: Run, engines: Engines, ema: EmaShadow, saves: Checkpoints, system: System, requested_step: int | None
) -> int:
    """Loads the checkpoint of `requested_step` (None: the newest) and returns its step. If there is none, sets the
    weights from `init_from`, or at random, and returns 0. With `requested_step`, moves later ones into earlier_N.
    """
    step = saves.resume(requested_step)
    folders.require_step_within_run(run, step)
    if requested_step is not None:
        hosts.run_on_rank_0_or_exit(lambda: folders.move_newer_steps_aside(run.directory, step))
    if step == 0:
        loaded = read_weights_adapted_to_system(run.init_from, system) if run.init_from is not None else {}
        get_phases().print_lines(*(f"init_from: {change}" for _, changes in loaded.values() for change in changes))
        engines.initialize_weights({part: values for part, (values, _) in loaded.items()})
        ema.reset_to_masters()
    get_phases().print_lines(
        f"goes on from step {step} of {run.steps}"
        if step
        else f"begins at step 1 of {run.steps}, with weights from {run.init_from or f'seed {run.seed}'}"
    )
    return step


def finish_run(training: Training, done: int, work_left: bool) -> None:
    """Logs how the run ended, writes the last report, and leaves the process group. Gives the weights to the tracker if
    this command saved the run's last step; not if `work_left`, when a stop has skipped the work after that step.
    """
    run, tracker, saved = training.run, training.tracker, training.saver.newest
    training.watchdog.enter_phase(done, "end at step")
    if training.first < saved == run.steps and not work_left:
        checkpoint = run.directory / "checkpoints" / f"step_{run.steps:08d}"
        parts = training.system.averaged or training.engines
        tracker.log_model_to_wandb(done, lambda into: write_part_weights(checkpoint, parts, run.samples.ema, into))
    tracker.log(
        folders.describe_run_end(run, run.directory, training.first, done, saved, training.stops.reason, work_left)
    )
    tracker.write_last_report(done)
    group.leave_process_group()  # signals are still caught and ignored: all is saved


def draw_and_save_samples(training: Training, done: int) -> None:
    """Draws and saves the grid of samples and the system's own pictures, with the average of the weights that the
    recipe names in samples.ema. Seeds and data are the same at each call.
    """
    training.watchdog.enter_phase(done, "samples of step")
    with training.ema.use_averages_as_weights(training.run.samples.ema):
        shown = draw_grids(training.run, training.system, training.engines.modules, training.shown, training.micro)
        for images, name, columns, captions in [*shown]:  # all or none: finish_resumed_step tells by one of them
            training.tracker.save_samples(done, images, name, columns, captions)


def evaluate_held_out_loss(training: Training, done: int) -> float | None:
    """Reports means over held-out samples, such as the loss: of the EMA that samples are drawn from and, as raw/..., of
    the training weights. Reports the EMA's curves, too. Returns the EMA's loss if it decides save.best, else None.
    """
    training.watchdog.enter_phase(done, "evaluation of step")
    run, source = training.run, Spread(training.held_out, training.run.every.evaluate_samples or None)

    def evaluate_all(curves: dict[str, list[float]]) -> dict[str, float]:
        batches = iterate_held_out(source, training.micro, group.rank(), group.world(), group.device(), run.seed)
        return evaluate_held_out_batches(training.system, training.engines.modules, batches, curves)

    raw = {f"raw/{name}": value for name, value in evaluate_all({}).items()}
    curves: dict[str, list[float]] = {}
    with training.ema.use_averages_as_weights(run.samples.ema):
        scores = evaluate_all(curves) | raw
    training.tracker.report_scores(done, scores, curves)
    return scores["loss"] if run.save.best is True else None


def measure_sample_quality(training: Training, done: int) -> float | None:
    """Reports the recipe's metrics of drawn samples for every EMA (without one, for the training weights). Returns the
    score for save.best of the EMA that samples are drawn from, lower is better; None if no metric decides it.
    """
    training.watchdog.enter_phase(done, "metrics of step")
    run, scores = training.run, {}
    first = next(iter(run.ema.decays_and_widths), None) if run.samples.ema is None else run.samples.ema
    for average in run.ema.decays_and_widths or (None,):
        with training.ema.use_averages_as_weights(average):
            figures = training.quality.measure(training.engines.modules, training.micro)
        scores |= {name if average == first else f"ema_{average:g}/{name}": value for name, value in figures.items()}
    training.tracker.report_scores(done, scores, kind="metrics")
    return training.quality.compute_score(scores)


def is_due(interval: int, done: int, last: bool = False) -> bool:
    """Returns whether what comes every `interval` steps (0: never) is due after step `done`, as it is if `last`."""
    return interval > 0 and (done % interval == 0 or last)
