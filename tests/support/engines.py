"""Engines and settings of a whole recipe, for tests: they pass on the sections that each is made of."""

from pathlib import Path
from typing import Any

from torch import nn

from dstrain.engine.engines import Engines
from dstrain.engine.initial import Networks
from dstrain.engine.optimizers import Decays
from dstrain.engine.settings import resolve_deepspeed_settings
from dstrain.recipe import Run


def count_skipped_steps(engines: Engines) -> int:
    """Returns the number of steps that were skipped because a gradient was not finite: of the part with most."""
    return max(masters.num_skipped for masters in engines.masters.values())


def resolve(
    ds_config: Path | dict[str, Any], run: Run, world: int, device_type: str, before: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the settings of a recipe on `world` ranks."""
    return resolve_deepspeed_settings(
        ds_config,
        world,
        device_type,
        batch=run.batch,
        optimizer=run.optimizer,
        faults=run.faults,
        sequence=run.parallel.sequence,
        settings_at_start=before,
    )


def engines_for(
    networks: Networks,
    run: Run,
    settings: dict[str, Any],
    decays: Decays,
    blocks: tuple[type[nn.Module], ...] = (),
    draw: bool = True,
) -> Engines:
    """Builds the engines of any networks as a recipe asks."""
    return Engines(
        networks,
        settings,
        decays,
        blocks,
        optimizer=run.optimizer,
        seed=run.seed,
        train_only=run.train_only,
        recompute=run.model.get("recompute", "none"),
        compile=run.compile,
        channels_last=run.channels_last,
        draw=draw,
    )
