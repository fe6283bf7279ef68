"""Two short steps of the loop's own on this device, with different micro-batches: for planning/calibration.py."""

from typing import Any

from dstrain.bench.sides import Dstrain, Repeated, system_of
from dstrain.bench.timing import Machine, Times, alternate, keep_memory
from dstrain.distributed import group
from dstrain.engine.start import start
from dstrain.recipe import Run

ROUNDS, STEPS, WARM_UP = 5, 3, 3


def step_seconds(
    run: Run, settings: dict[str, Any], number: int, micros: tuple[int, ...]
) -> tuple[dict[int, float], str]:
    """The least seconds of step `number` with one micro-batch of each size, and the clock in words.

    One engine takes all, and takes no other step: others may be smaller.
    """
    start()
    keep_memory()
    machine, system = Machine(group.device()), system_of(run)
    batches = {micro: Repeated(system, micro, 1) for micro in micros}
    ours = Dstrain(run, settings, system, batches[micros[0]])

    def steps(micro: int) -> Any:
        def step(_: int) -> None:
            ours.batches = batches[micro]
            ours.step(number)

        return step

    times: dict[str, Times] = alternate(
        {str(micro): steps(micro) for micro in micros},
        group.device(),
        number,
        rounds=ROUNDS,
        steps=STEPS,
        warm_up=WARM_UP,
    )
    clock = machine.clock()
    return {micro: times[str(micro)].least(clock) for micro in micros}, machine.described()
