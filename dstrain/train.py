"""The loop: the only place that holds both what is learned and how it is sharded."""

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dstrain import rng, systems
from dstrain.data.batches import Batches, held_out
from dstrain.data.sources import open_sources
from dstrain.data.spread import Spread
from dstrain.drawing.sampling import class_columns, draw_all, picture_all, score
from dstrain.engine.checkpoint import Checkpoints
from dstrain.engine.ema import EmaShadow
from dstrain.engine.engines import Engines
from dstrain.engine.nonfinite import SkippedSteps
from dstrain.engine.settings import remarks
from dstrain.engine.start import start
from dstrain.ranks import group
from dstrain.ranks.stops import Stops
from dstrain.recipe import ConfigError, Run
from dstrain.runs import folders, hosts
from dstrain.runs.weights import fitted, write_parts
from dstrain.systems.base import Request, System
from dstrain.track.throughput import Throughput
from dstrain.track.tracker import Tracker

DONE, STOPPED = 0, 75       # exit codes; 75 is EX_TEMPFAIL: stopped early and saved, the same command goes on


@dataclass(frozen=True)
class Options:
    """What a command says beside the run itself."""

    from_scratch: bool = False       # moves an earlier run in the folder aside
    allow_change: bool = False       # accepts a recipe that changes the run in the folder


def train(run: Run, settings: dict[str, Any], options: Options = Options()) -> int:
    """Trains to run.steps from wherever the folder's newest whole checkpoint stands; an exit code, DONE or STOPPED."""
    folder = run.directory
    lock = folders.claim(folder) if group.place().rank == 0 else nullcontext()     # one run in a folder
    with lock:
        return _train(run, settings, options, folder)


def _train(run: Run, settings: dict[str, Any], options: Options, folder: Path) -> int:
    start(run.faults.timeout_minutes)
    hosts.check(run, settings)                                    # before anything is moved or written
    source, unseen = open_sources(run.data)
    if group.rank() == 0 and options.from_scratch:
        folders.set_aside(folder)
    group.barrier()
    stops = Stops(folder if group.rank() == 0 else None, run.faults.orphan_check)

    system = systems.build(run.system, run.model)                 # networks, losses, sampler: plain torch
    for network in system.frozen():
        network.to(group.device())
    engines = Engines(system.networks, run, settings, system.decays, system.blocks())
    ema = EmaShadow(engines.masters, run.ema, system.averaged)    # shadows the fp32 weights this rank owns
    notes = [f"note: {remark}" for remark in remarks(settings, group.device().type)] + engines.notes
    saves = Checkpoints(folder / "checkpoints", engines, ema, system, run.save, notes.append,
                        saved=lambda step: folders.note_saved(folder, step))
    first = begin(run, engines, ema, saves, system, notes)
    if group.rank() == 0:
        folders.write_down(run, settings, system.fingerprint(source))
    micro = settings["train_micro_batch_size_per_gpu"]
    batches = Batches(source, global_batch=run.batch.global_, micro_batch=micro, seed=run.seed, rank=group.rank(),
                      world=group.world(), num_workers=run.data.workers, device=group.device(), folder=folder,
                      max_bad_fraction=run.data.max_bad_fraction, flip=run.data.flip, steps=run.steps)
    tracker = Tracker(run, folder, parts=tuple(engines), resumed_step=first)
    for note in notes:
        tracker.note(note)
    saver = saves.saver
    saver.report = tracker.note
    throughput = Throughput(run, first, lambda: batches.wait_seconds)
    skipped = SkippedSteps(run, engines.skipped())
    done = first
    try:
        for step in range(first, run.steps):
            take_step(step, run, system, engines, batches, tracker)
            ema.update(step, engines.applied())
            skipped.count(all(engines.applied().values()))
            done = step + 1
            saver.look()
            stop = group.agree(stops.requested())                 # a signal anywhere stops everyone together
            last = stop or done == run.steps
            if stop:
                stops.settle()
            if due(run.every.report, done) or last:
                tracker.report(done, throughput.figures(done) | {"skipped": skipped.total} | engines.figures())
            if due(run.every.sample, done, last) and not stop:
                with throughput.paused():
                    show(run, system, engines, ema, unseen or source, micro, done, tracker)
            score, best = None, False
            if unseen and due(run.every.evaluate, done, last) and not stop:
                with throughput.paused():
                    scores, curves = held_out_scores(run, system, engines, ema, unseen, micro)
                    tracker.scores(done, scores, curves)
                    score = scores["loss"] if run.save.best else None
                    best = score is not None and saver.improves(score)
            if due(run.every.save, done) or last or best:
                with throughput.paused():
                    saves.save(done, last, score)                 # training goes on while it is written
            if stop:
                break
        if first < saver.newest == run.steps:
            at = saves.store.folder / f"step_{run.steps:08d}"
            tracker.model(done, lambda into: write_parts(at, system.averaged or engines, run.samples.ema, into))
        tracker.note(farewell(run, folder, first, done, saver.newest, stops))
        group.leave()                                             # still deaf to signals: all is saved
    except RuntimeError as error:
        tracker.note(group.fall(error))
        raise
    finally:
        saver.close()
        batches.close()
        tracker.close()
        stops.restore()
    return DONE if done == run.steps else STOPPED


def take_step(step: int, run: Run, system: System, engines: Engines, batches: Batches, tracker: Any) -> None:
    """One optimizer step: every micro-batch, every network whose turn it is."""
    engines.set_lr(run.optimizer.lr_at(step, run.steps))
    seen: list[dict[str, Tensor]] = []
    for micro, batch in enumerate(batches.at(step)):              # batch["key"]: randomness belongs to a sample
        with torch.no_grad():
            example = system.encode(batch)                        # frozen encoders; building one draws random weights
        rng.seed_torch(run.seed, step, micro * group.world() + group.rank())     # dropout is torch's own
        for part in system.turns(step):                           # ("denoiser",) or ("autoencoder", "discriminator")
            with engines.turn(part) as nets:                      # this part is live, the others are bare and frozen
                terms = system.loss(part, nets, example)
                engines.learn(part, terms["loss"])                # DeepSpeed updates on the last micro-batch
            terms = {name: term.detach() for name, term in terms.items()}
            if kept := {name: terms.pop(name) for name in system.watched if name in terms}:
                seen.append(kept | {"position": batch["position"]})
            tracker.add(part, terms)
    if seen:                                                      # what a system learns on the side, by all samples
        rows = {name: torch.cat([kept[name] for kept in seen]) for name in seen[0]}
        system.observe(group.in_order(rows.pop("position"), rows))


def begin(run: Run, engines: Engines, ema: EmaShadow, saves: Checkpoints, system: System, notes: list[str]) -> int:
    """Weights from the newest checkpoint, else from `init_from`, else as initialized; the step to go on from."""
    try:
        step = saves.resume()
    except ConfigError:
        print("\n".join(notes), flush=True)                       # why each checkpoint was passed over
        raise
    if step > run.steps:
        raise ConfigError(f"steps={run.steps}, and {saves.store.folder} is at step {step} already; raise steps=, or "
                          "begin anew with --from-scratch")
    if step == 0:
        if run.init_from is not None:
            for part, (values, changed) in fitted(run.init_from, system).items():
                engines.set_weights(part, values.items())
                notes += [f"init_from: {change}" for change in changed]
        ema.reset()
    return step


def show(run: Run, system: System, engines: Engines, ema: EmaShadow, source: Any, chunk: int, done: int,
         tracker: Tracker) -> None:
    """The grid of the recipe and the system's own pictures, from the EMA: the same seeds and data every time."""
    wanted = run.samples
    chunk = min(chunk, -(-wanted.num // group.world()))
    shown: dict[str, Tensor] = {}
    columns = None                                                # the same of all grids: what belongs together aligns
    if system.starts_from_data:
        shown = next(held_out(source, min(wanted.num, len(source)), seed=run.seed))           # the same on every rank
    with ema.swapped(wanted.ema):
        if system.generates:
            num, captions = len(shown["key"]) if shown else wanted.num, None
            if wanted.prompts:
                captions = [*islice(cycle(wanted.prompts), num)]
                conditions = system.conditions_from_texts(captions)
            else:
                conditions = system.conditions(num, wanted.labels)
            if shown:
                conditions |= system.conditions_from(shown["image"]) | {name: shown[name] for name in conditions}
            request = Request(wanted.seed + torch.arange(num), conditions, wanted.num_steps, wanted.sampler,
                              wanted.guidance_scale, wanted.num_frames)
            images = draw_all(system, engines.modules, request, chunk)
            columns = class_columns(request)
            tracker.samples(done, images, columns=columns, captions=captions)
        if shown:
            for name, images in picture_all(system, engines.modules, shown, chunk).items():
                tracker.samples(done, images, name, columns)


def held_out_scores(run: Run, system: System, engines: Engines, ema: EmaShadow, source: Any,
                    batch: int) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Held-out means from the EMA that samples are drawn from and, as raw/..., from the training weights; the EMA's
    curves, which are no timesteps', such as the use of each token.
    """
    source = Spread(source, run.every.evaluate_samples or None)

    def means(curves: dict[str, list[float]]) -> dict[str, float]:
        return score(system, engines.modules, held_out(source, batch, group.rank(), group.world(), group.device(),
                                                       run.seed), curves)
    raw = {f"raw/{name}": value for name, value in means({}).items()}
    curves: dict[str, list[float]] = {}
    with ema.swapped(run.samples.ema):
        return means(curves) | raw, curves


def due(interval: int, done: int, last: bool = False) -> bool:
    return interval > 0 and (done % interval == 0 or last)


def farewell(run: Run, folder: Path, first: int, done: int, saved: int, stops: Stops) -> str:
    if first == run.steps:
        return f"{folder} is complete: {run.steps} steps. Raise steps= to train on, or name another folder."
    if done == run.steps:
        drawn = f", samples in {folder / 'samples'}" if (folder / "samples").is_dir() else ""
        return f"complete: {done} steps, saved in {folder / 'checkpoints'}{drawn}"
    reason = stops.reason or "another rank was stopped"
    return f"stopped at step {done} ({reason}), step {saved} is saved; the same command goes on"
