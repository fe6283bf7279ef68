"""Writes snapshots of the averages by width, from which averages of any width are made when training is over.

    RUN/averages/step_N/PART-RRRRR-of-WWWWW.safetensors    fragments ema.WIDTH, float32 or bfloat16, of averaged parts
                        common.safetensors, manifest.json  as in a checkpoint; with the updates of each part

A thread writes them while training goes on. None is deleted. After a rollback, snapshots of later steps are renamed, so
that they no longer count, until the run passes these steps again (store.py). Before a checkpoint is written, all
snapshots up to its step are complete, so that a run that resumes from it lacks none.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from dstrain.checkpoint import validate
from dstrain.checkpoint.fragments import write_shard
from dstrain.checkpoint.layout import make_shard_file_name
from dstrain.checkpoint.saver import Entries, Saver
from dstrain.checkpoint.store import Hashes, Store
from dstrain.distributed import group
from dstrain.engine.ema.shadow import EmaShadow
from dstrain.engine.masters import Masters
from dstrain.recipe import Ema

FOLDER = "averages"  # beside the folder of checkpoints


class Averages:
    """Writes snapshots of the averages by width into `folder`. All ranks call each method together.

    common   returns the content of common.safetensors
    report   is called with each line for the user
    """

    def __init__(
        self,
        folder: Path,
        masters: dict[str, Masters],
        shadow: EmaShadow,
        asynchronous: bool,
        common: Callable[[], validate.Common],
        report: Callable[[str], None],
    ):
        self.saver = Saver(
            Store(folder, keep=sys.maxsize, check=validate.require_loadable_checkpoint),
            asynchronous,
            lambda line: report(f"averages: {line}"),
            lambda step: None,
        )
        self._ema: Ema = shadow.ema
        self._masters, self._shadow, self._common = masters, shadow, common

    def write_snapshot_if_due(self, step: int, last: bool = False, wait: bool = False) -> None:
        """Writes a snapshot of the averages at `step` if the recipe asks for one at this step (ema.snapshots), or if it
        is the run's `last` step. Writes none if the averages began at this step, or if a snapshot of it exists. Call it
        on all ranks.

        wait: returns only when the files are written. Raises NotSaved if Saver.save does.
        """
        every = self._ema.snapshots
        if not every or step == self._shadow.began or not (last or step % every == 0):
            return
        if step in group.broadcast_from_first(self.saver.store.list_steps()):
            return  # of an earlier command, which ended before the run went further
        common = self._common()
        entries: Entries = {
            part: [
                (f"ema.{width!r}", fragment, view)
                for width in self._ema.profiles
                for fragment, view in self._masters[part].iterate_fragment_views_to_save(shadows[width])
            ]
            for part, shadows in self._shadow.flats.items()
        }
        dtype = {"fp32": "F32", "bf16": "BF16"}[self._ema.snapshot_precision]

        def write_rank_files(folder: Path, entries: Entries) -> Hashes:
            if group.rank() == 0:
                validate.write_common_tensors_and_counters(folder, common)
            names = {part: make_shard_file_name(part, group.rank(), group.world()) for part in entries}
            return {
                name: write_shard(folder / name, entries[part], {"part": part}, dtype) for part, name in names.items()
            }

        nbytes = sum(4 * view.numel() for own in entries.values() for _, _, view in own)
        self.saver.save(step, entries, write_rank_files, need_bytes=nbytes + (1 << 20), score=None, last=wait)

    def set_newer_steps_aside(self, after: int) -> None:
        """Renames the snapshots of all steps after step `after`, so that they no longer count: the run will take these
        steps again. Raises NotSaved if that fails.
        """
        self.saver.wait_for_save()
        if max(group.broadcast_from_first(self.saver.store.list_steps()), default=0) > after:
            self.saver.store.set_newer_steps_aside(after)
