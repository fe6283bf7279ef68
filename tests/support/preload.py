"""What engines import, imported once for all the processes that are forked from this one."""

import functools
import gc
import importlib


def preload() -> None:
    """Imports it, and builds DeepSpeed's operator for exchanges on the CPU; starts no thread.

    ZeRO-3 collects garbage for each engine: not among all these modules, which a fork would so copy.
    """
    from dstrain import systems
    from dstrain.engine.patches import import_deepspeed

    deepspeed = import_deepspeed()
    for name in ("deepspeed.runtime.zero.stage3", "torch._dynamo"):  # torch's optimizers import the second
        importlib.import_module(name)
    for name in systems.list_system_names():
        systems.import_system_package(name)
    _remember_cpu()
    accelerator = deepspeed.accelerator.get_accelerator()
    if accelerator.device_name() == "cpu":
        accelerator.create_op_builder("ShareMemCommBuilder").load()
    gc.collect()
    gc.freeze()


def _remember_cpu() -> None:
    """Asks once what CPU this is. For each optimizer that is offloaded DeepSpeed asks up to three times, and the answer
    takes a process of a second, which is longer than a short run.
    """
    import cpuinfo

    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
        cpuinfo.get_cpu_info()
