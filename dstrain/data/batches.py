"""Computes which samples each rank reads at each step, and yields its batches.

    stream position     p = step * global_batch + position,       0 <= position < global_batch
    sample index        order.find_sample_index(p), where order = source.make_sample_order(global_batch, seed)
    key                 rng.keys(seed, step, position): all randomness of the sample
    layout              position = (micro * world + rank) * micro_batch + i

The global batch of a step is thus the same samples with the same keys at any world size, micro-batch and worker count.
Micro-step m of all ranks together is one contiguous block of it. Nothing here has a state to save.

Samples that cannot be read are replaced by others (source.py); their names are written to a list, and a run ends if
they are too many (bad_files.py). A rank prefetches the batches of the next step. So an error in the data ends a run
between two steps, where all ranks can save.
"""

import atexit
import itertools
import os
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dstrain import rng
from dstrain.data import workers
from dstrain.data.bad_files import BadFiles
from dstrain.data.source import Source
from dstrain.distributed.launcher import read_rank_and_world
from dstrain.recipe import ConfigError, NotRead

Batch = dict[str, Tensor]

_ON_HOST = ("caption", "other_caption")  # packed texts, which the host reads: a copy back would make it wait
_HELD_OUT_STEP = -1  # of the keys of held-out samples: a step that training never has
_PREFETCH_BYTES = 1 << 30  # prefetch a whole step, but at most this many bytes of samples
_BAD = "bad"  # entry of a worker's batch: (name, reason) of the samples that it could not read


class Batches(AbstractContextManager):
    """Reads the batches of one rank. A `with` block ends the workers at its end.

    global_batch: samples of one optimizer step over all ranks and micro-steps. micro_batch: samples of one forward pass
    of one rank. num_workers: processes that prefetch; 0 reads in this process; None chooses 0 for a source that is
    cheap to read, else 1 to 8. folder: where bad_files.txt is written; None writes none. max_bad_fraction: fraction of
    the data that may be unreadable (at least one file is tolerated unless it is 0). flip: mirrors a sample with
    probability 0.5, decided by its key. steps: number of steps that can be read; None: no limit.

    Raises ConfigError if global_batch is no multiple of micro_batch * world, if a size is below 1, or if `rank` is not
    in 0 .. world - 1.
    """

    def __init__(
        self,
        source: Source,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        num_workers: int | None = 0,
        device: torch.device | str = "cpu",
        folder: str | Path | None = None,
        max_bad_fraction: float = 0.01,
        flip: bool = True,
        steps: int | None = None,
    ) -> None:
        _require_valid_batch_sizes(global_batch, micro_batch, rank, world)
        self.device = torch.device(device)
        self.accumulation = global_batch // (micro_batch * world)  # micro-steps of one optimizer step
        self.wait_seconds = 0.0  # host time spent waiting for samples
        self.problem: ConfigError | NotRead | None = None  # why there are no samples for the next step
        self.num_workers = _choose_worker_count(num_workers, source)
        self._stream = _Stream(source, source.make_sample_order(global_batch, seed), global_batch, seed, flip)
        self._layout = (global_batch, micro_batch, rank, world)
        self._steps = steps
        self._bad = BadFiles(folder, len(source), max_bad_fraction)
        self._batches: Iterator[Batch] | None = None  # the batches of this and all later steps
        self._next = -1  # the step whose batches come next in it; -1: restart
        self._release: weakref.finalize | None = None  # ends the workers that run now

    def read_step(self, step: int) -> Iterator[Batch]:
        """Yields this rank's `accumulation` micro-batches of the optimizer step `step`. Tensors are on the device, but
        captions on the host. A micro-batch has the entries of the source's items, such as "image" uint8 (b, C, H, W),
        and three more, int64 (b,) each:

        "key": the sample's key, from which all its random numbers are derived
        "position": the sample's position within the step, over all ranks
        "step": the step

        Read the steps in order and to the end. Any other order restarts the workers, which takes time.

        Raises ConfigError or NotRead if samples cannot be read; usually `problem` holds this error one step earlier.
        Raises ConfigError if `step` is beyond the last one.
        """
        if self._steps is not None and step >= self._steps:
            raise ConfigError(f"step {step} lies beyond the last, {self._steps - 1}")
        if step != self._next:
            self._restart_workers(step)
        self._next = -1  # a step that the caller leaves in the middle starts again
        for micro in range(self.accumulation):
            batch = next(self._batches, None)
            if batch is None:
                raise self.problem
            if micro == self.accumulation - 1:  # before the yield: the caller may not ask for more
                self._next = step + 1
            yield batch

    def count_samples_by_source(self, steps: int) -> dict[str, int]:
        """Returns {"samples/NAME": count}: how many samples all ranks together take from each source of a mixture in
        the first `steps` steps. Returns {} if the data are no mixture.
        """
        global_batch, seed, source = self._layout[0], self._stream.seed, self._stream.source
        return {
            f"samples/{name}": count
            for name, count in source.count_samples_by_source(seed, steps * global_batch).items()
        }

    def set_step_count(self, steps: int) -> None:
        """Sets how many steps can be read, for a run that is trained beyond its last step. The next `read_step`
        restarts the workers.
        """
        self._steps, self._next = steps, -1

    def close(self) -> None:
        """Ends the worker processes, if any are running. A later `read_step` starts new ones."""
        if self._release is not None:
            self._release()
            atexit.unregister(self._release)
        self._release, self._batches, self._next = None, None, -1

    def __exit__(self, *_error) -> None:
        self.close()

    def _restart_workers(self, step: int) -> None:
        """Ends the workers and starts new ones that begin with the batches of `step`. Raises ConfigError or NotRead if
        they cannot be started.
        """
        self.close()
        self.problem = None
        options = {}
        if self.num_workers:
            options = {
                "num_workers": self.num_workers,
                "prefetch_factor": 2,
                "worker_init_fn": workers.prepare_worker,
                "multiprocessing_context": workers.make_worker_context(),
            }
        loader = DataLoader(
            self._stream,
            sampler=_iterate_micro_batch_positions(step, self._steps, *self._layout),
            batch_size=None,
            pin_memory=self.device.type == "cuda",
            **options,
        )
        with workers.guard_worker_start() as semaphores:
            try:
                reader = iter(loader)
            except (OSError, RuntimeError) as error:
                self._failed = error  # Its frames hold the half-made reader, whose destructor would fail.
                raise workers.translate_worker_error(error, self.num_workers) from None
        # The workers must end at exit before torch and multiprocessing wait for them, since they ignore SIGTERM. atexit
        # runs backwards, so this hook comes first; weakref's own hook may stand anywhere in that order.
        self._release = weakref.finalize(self, workers.end_loader_workers, reader)
        self._release.atexit = False
        atexit.register(self._release)
        host = self._iterate_prefetched_batches(reader, semaphores)
        self._batches = _copy_batches_to_device_ahead(host, self.device) if self.device.type == "cuda" else host

    def _iterate_prefetched_batches(self, reader: Iterator, semaphores: list) -> Iterator[Batch]:
        """Yields the batches of `reader`, in host memory, and fetches ahead. Before it yields a batch, it has fetched
        the next `accumulation` batches (one step), or fewer if that takes more than 1 GiB, but at least one.

        Ends after the last batch, or before the first one that cannot be read; then `problem` holds the error.
        """
        ahead: deque[Batch] = deque()
        fetched, batch, size = self._iterate_batches_storing_error(reader, semaphores), {}, 0  # size: bytes of a batch
        while True:
            while batch is not None and len(ahead) <= (self.accumulation if len(ahead) * size < _PREFETCH_BYTES else 1):
                if (batch := next(fetched, None)) is not None:
                    ahead.append(batch)
                    size = sum(tensor.nbytes for tensor in batch.values())
            if not ahead:
                return
            yield ahead.popleft()

    def _iterate_batches_storing_error(self, reader: Iterator, semaphores: list) -> Iterator[Batch]:
        """Yields the batches of `reader`. Takes the list of unreadable files out of each batch, and adds it to the
        run's list. Adds the time spent waiting to `wait_seconds`.

        Ends after the last batch, or at an error, which is stored in `problem`. Removes the workers' `semaphores` once
        every worker has delivered a batch.
        """
        for count in itertools.count(1):
            start = time.perf_counter()
            try:
                batch = next(reader, None)
                if batch is not None:
                    self._bad.add_unreadable_samples(batch.pop(_BAD))
                if batch is not None and self.num_workers and self.device.type == "cpu":
                    batch = {name: tensor.clone() for name, tensor in batch.items()}  # a worker's holds a descriptor
            except (ConfigError, NotRead) as error:  # a worker's comes wrapped in the worker's traceback
                kind, text = type(error), str(error).strip()
                self.problem = kind(text.splitlines()[-1].rpartition(f"{kind.__name__}: ")[2])
                return
            except RuntimeError as error:
                self.problem = workers.translate_worker_error(error, self.num_workers)
                return
            if count == self.num_workers:  # workers deliver in turn, so all of them run by now
                workers.unlink_semaphores(semaphores)
            self.wait_seconds += time.perf_counter() - start
            if batch is None:
                return
            yield batch


def iterate_held_out(
    source: Source,
    batch_size: int,
    rank: int = 0,
    world: int = 1,
    device: torch.device | str = "cpu",
    seed: int = 0,
    limit: int | None = None,
) -> Iterator[Batch]:
    """Yields this rank's batches of held-out samples, in the order of their indices, never mirrored. All ranks get
    equally many batches, and their n-th batches have one shape. Samples and keys do not depend on the world size.

    A batch has the entries of the source's items, and three more, (b,) each:
    "key": the sample's key, equal at every call with this `seed`, so that every evaluation has the same noise
    "position": the sample's index
    "valid": False for a repeated sample, which fills up the last batch of a shape

    batch_size: the number of samples in a batch
    limit: takes only the first `limit` samples; None: all

    Warns of samples that could not be read and were replaced. Raises ConfigError if `batch_size` is below 1, or if
    `rank` is not in 0 .. world - 1.
    """
    if batch_size < 1 or not 0 <= rank < world:
        raise ConfigError(f"held-out batches of {batch_size} for rank {rank} of {world}: a batch has at least 1 sample")
    count = len(source) if limit is None else min(limit, len(source))
    for start, end in _iterate_rounds_of_one_shape(source, count, batch_size * world):
        position = start + rank * batch_size + torch.arange(batch_size)
        valid = position < end
        position = position.clamp(max=end - 1)
        distinct = max(int(valid.sum()), 1)
        samples, bad = source.read_batch(position[:distinct])
        if bad:
            warnings.warn(f"held-out samples replaced, since they cannot be read: {bad[:5]}", stacklevel=2)
        filled = torch.arange(batch_size).clamp(max=distinct - 1)
        full = {name: tensor[filled] for name, tensor in samples.items()}
        full |= {"key": rng.keys(seed, _HELD_OUT_STEP, position), "position": position, "valid": valid}
        yield copy_batch_to_device(full, device)


def _iterate_rounds_of_one_shape(source: Source, num_samples: int, round_size: int) -> Iterator[tuple[int, int]]:
    """Divides the first `num_samples` into rounds of at most `round_size` samples of one shape. Yields for each round
    (index of its first sample, index after the last sample of its shape).
    """
    first = 0
    for end in source.end_index_by_shape:
        end = min(end, num_samples)
        for start in range(first, end, round_size):
            yield start, end
        first = end


def copy_batch_to_device(batch: Batch, device: torch.device | str, non_blocking: bool = False) -> Batch:
    """Returns a copy of a batch on a device; captions stay on the host. non_blocking: as in Tensor.to."""
    return {
        name: tensor if name in _ON_HOST else tensor.to(device, non_blocking=non_blocking)
        for name, tensor in batch.items()
    }


class _Stream:
    """The data set of a DataLoader. Its index is a range of stream positions, and its item the micro-batch of these
    positions; if the source prefetches, the item of the next step is prefetched, too.
    """

    def __init__(self, source: Source, order: Any, global_batch: int, seed: int, flip: bool) -> None:
        self.source, self.order, self.flip = source, order, flip
        self.global_batch, self.seed = global_batch, seed

    def __getitem__(self, stream: range) -> dict:
        if self.source.prefetches:  # what the next step takes: the disk reads it during this one
            index, mirrored, key, *_ = self._find_sample_indices_and_keys(
                range(stream.start + self.global_batch, stream.stop + self.global_batch)
            )
            self.source.prefetch(index, mirrored, self._draw_random_numbers(key))
        index, mirrored, key, positions, step = self._find_sample_indices_and_keys(stream)
        batch, bad = self.source.read_batch(index, mirrored, self._draw_random_numbers(key))
        steps = torch.full_like(positions, step)
        return batch | {"key": key, "position": positions, "step": steps, _BAD: bad}

    def _draw_random_numbers(self, key: Tensor) -> Tensor | None:
        """Returns the random numbers in [0, 1) by which the source chooses, for example, a crop of each sample: (b,),
        or (b, n) if it needs n numbers for a sample. Returns None if it needs none.

        key: the samples' keys, from which the numbers are derived
        """
        name, count = self.source.chance_name, self.source.chance_count
        return rng.uniform(key, name, (count,) if count else ()) if name else None

    def _find_sample_indices_and_keys(
        self, stream_positions: range
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, int]:
        """Finds the samples of a micro-batch, given as a range of positions in the endless stream of samples. Returns:

        indices of the samples, int64 (b,)
        whether each is mirrored, bool (b,); None if the stream has no `flip`
        keys of the samples, from which random numbers are derived, int64 (b,)
        positions within the step, int64 (b,)
        the number of the step
        """
        step = stream_positions.start // self.global_batch
        positions = torch.arange(stream_positions.start, stream_positions.stop)  # (b,)
        index = self.order.find_sample_index(positions)
        positions -= step * self.global_batch
        key = rng.keys(self.seed, step, positions)
        mirrored = rng.uniform(key, "flip") < 0.5 if self.flip else None  # (b,)
        return index, mirrored, key, positions, step


def _iterate_micro_batch_positions(
    step: int, steps: int | None, global_batch: int, micro_batch: int, rank: int, world: int
) -> Iterator[range]:
    """Yields, for each micro-batch of a rank, the range of its positions in the endless stream of samples. Begins with
    step `step` and ends before step `steps`; never ends if `steps` is None.
    """
    for number in itertools.count(step) if steps is None else range(step, steps):
        for offset in range(rank * micro_batch, global_batch, world * micro_batch):
            start = number * global_batch + offset
            yield range(start, start + micro_batch)


def _copy_batches_to_device_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yields copies of `batches` on a CUDA device. Copies the next batch, which is in pinned memory, while the caller
    uses the present one.
    """
    side = torch.cuda.Stream(device)
    ahead: list[tuple[Batch, torch.cuda.Event]] = []
    for host in itertools.chain(batches, [None]):  # None: the last copy is still to be handed over
        if host is not None:
            with torch.cuda.stream(side):
                ahead.append((copy_batch_to_device(host, device, non_blocking=True), side.record_event()))
        if len(ahead) > 1 or (ahead and host is None):
            batch, copied = ahead.pop(0)
            current = torch.cuda.current_stream(device)
            current.wait_event(copied)
            for tensor in batch.values():
                if tensor.is_cuda:
                    tensor.record_stream(current)  # or the memory could be used anew too soon
            yield batch


def _require_valid_batch_sizes(global_batch: int, micro_batch: int, rank: int, world: int) -> None:
    """Raises ConfigError if a size is below 1, if `rank` is not in 0 .. world - 1, or if global_batch is no multiple of
    micro_batch * world.
    """
    if min(global_batch, micro_batch, world) < 1 or not 0 <= rank < world:
        raise ConfigError(
            f"batch.global={global_batch} and batch.micro={micro_batch} are at least 1, and rank {rank} "
            f"is one of {world}"
        )
    unit = micro_batch * world
    if global_batch % unit:
        below = global_batch // unit * unit
        advice = f"batch.global={below or unit}" + (f" or {below + unit}" if below else "")
        if global_batch % world == 0:
            share = global_batch // world
            fitting = [n for n in range(min(share, micro_batch), 0, -1) if share % n == 0][:3]
            advice += f", or batch.micro={' or '.join(map(str, fitting))}"
        raise ConfigError(
            f"batch.global={global_batch} is no multiple of batch.micro={micro_batch} x {world} ranks = "
            f"{unit}: choose {advice}"
        )


def _choose_worker_count(num_workers: int | None, source: Source) -> int:
    """Returns how many worker processes to start: `num_workers`, unless it is None. Then returns 0 for a source that is
    cheap to read; for any other source this rank's share of the CPU cores, from 1 to 8.
    """
    if num_workers is not None:
        return num_workers
    if source.light:
        return 0
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux: a job may be bound to some of them
        cores = len(os.sched_getaffinity(0))
    return max(1, min(8, cores // read_rank_and_world().local_world))
