"""Run by test_step_counts.py: what a step of training asks of the device, of other ranks and of the host; as JSON.

This process is rank 0 of eight; the others are torch's fake process group, whose exchanges change nothing. The shipped
JSONs are resolved as for a GPU. Two modes see every call of aten, every collective, and every number that is read by
the host: on a CPU it is the same call as on a GPU.
"""

import json
import os
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from dstrain import systems
from dstrain.commands.job import JobOptions, prepare_job
from dstrain.diffusion import gaussian, likelihood
from dstrain.engine import set_deepspeed_environment
from dstrain.engine.ema.shadow import EmaShadow
from dstrain.engine.recovery import Divergence
from dstrain.engine.updates import AsyncHostCopy
from dstrain.planning.synthetic import NoTracker, Repeated
from dstrain.train import take_step
from tests.support.engines import engines_for
from tests.support.launch import ROOT

WORLD, WARM = 8, 3  # ranks; steps before the one that is counted
DEEP = ("tiny", "model.depth=28")  # as many weights as DiT-XL/2: 291
WIDE = ("tiny", "model.hidden_size=384", "ema.decays=[0.9]")  # weights above zero3.json's threshold
VAE = ("tiny-vae", "model.kl.discriminator={start: 0, n_layers: 1, base_channels: 8}")
TOKENIZER = ("tiny-phenaki-tokenizer",)
CASES = {
    "zero1": (*DEEP, 1),
    "zero3": (*DEEP, 1),
    "zero2_fp32": (*DEEP, 1),
    "zero2_fp16": (*DEEP, 1),
    "zero0": ("tiny", 1),
    "zero1 accumulated": ("tiny", 2),
    "zero2 accumulated": ("tiny", 2),
    "zero3 accumulated": (*WIDE, 2),
    "zero1 vae": (*VAE, 1),
    "zero3 tokenizer": (*TOKENIZER, 1),
}
READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal")


class HostReads(TorchFunctionMode):
    """Counts what the dispatcher does not see on a CPU, and apart from it what is read a step late."""

    def __init__(self):
        super().__init__()
        self.now = self.late = 0
        self._read = AsyncHostCopy.read

    def __enter__(self):
        def read(late: AsyncHostCopy):
            self.now, self.late = self.now - 1, self.late + 1
            return self._read(late)

        AsyncHostCopy.read = read
        return super().__enter__()

    def __exit__(self, *error):
        AsyncHostCopy.read = self._read
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.now += getattr(func, "__name__", "") in ("tolist", "numpy")
        return func(*args, **(kwargs or {}))


class Calls(TorchDispatchMode):
    """Counts calls by name, and of collectives the elements, too."""

    def __init__(self):
        super().__init__()
        self.names, self.elements = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition(".")[0]
        self.names[name] += 1
        if func.namespace == "c10d":
            values = [value for arg in args[:2] for value in (arg if isinstance(arg, (list, tuple)) else [arg])]
            self.elements[name] += max(value.numel() for value in values if isinstance(value, torch.Tensor))
        return func(*args, **(kwargs or {}))

    def report(self) -> dict:
        return {
            "calls": sum(self.names.values()),
            "reads": sum(self.names[name] for name in READS),
            "collectives": {
                name.removeprefix("c10d::").strip("_"): [self.names[name], count]
                for name, count in self.elements.items()
            },
        }


def measure(folder: Path, case: str, recipe: str, *overrides: str | int) -> dict:
    *words, accumulation = overrides
    config = ROOT / "ds_configs" / f"{case.split()[0]}.json"
    if case == "zero0":
        config = folder / "zero0.json"
        config.write_text("{}")
    words += [f"batch.global={WORLD * accumulation}", "batch.micro=1", f"folder={folder / 'run'}"]
    job = prepare_job(JobOptions(ROOT / "tests" / "launch" / f"{recipe}.yaml", config, tuple(words)), WORLD, "cuda")
    run, system = job.run, systems.build(job.run.system, job.run.model)
    engines = engines_for(system.networks, run, job.settings, system.has_weight_decay, system.list_block_classes())
    ema, course = EmaShadow(engines.masters, run.ema, system.averaged), Divergence(run.faults)
    batches = Repeated(system, 1, accumulation)
    update = Counter()
    for masters in engines.masters.values():

        def counted(original=masters.step) -> None:
            with Calls() as calls:
                original()
            update["calls"] += calls.report()["calls"]

        masters.step = counted

    def step(number: int) -> None:
        losses = take_step(number, run, system, engines, batches, NoTracker())
        ema.update_averages(number, engines.collect_part_change_flags())
        assert course.record_step(number + 1, engines.collect_part_change_flags().values(), losses) is None

    for number in range(WARM):
        step(number)
    update.clear()
    with HostReads() as host, Calls() as calls:
        step(WARM)
    with Calls() as averaging:
        ema.update_averages(WARM, engines.collect_part_change_flags())
    sizes = [shape.numel() for part in engines for shape in engines.collect_weight_shapes(part).values()]
    return calls.report() | {
        "update": update["calls"] + averaging.report()["calls"],
        "reads": calls.report()["reads"] + host.now,
        "late": host.late,
        "sizes": sizes,
        "parts": len(engines),
        "accumulation": accumulation,
        "padded": sum(flat.numel() for masters in engines.masters.values() for flat in masters.flats) * WORLD,
    }


def main(folder: Path) -> None:
    set_deepspeed_environment()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(WORLD))
    import deepspeed

    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # its kernels have it on a CPU, too
    gaussian.can_read_without_device_sync = likelihood.can_read_without_device_sync = lambda values: (
        False
    )  # the loss as on a GPU
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False, verbose=False)
    figures = {case: measure(folder, case, *words) for case, words in CASES.items()}
    (folder / "figures.json").write_text(json.dumps(figures))
