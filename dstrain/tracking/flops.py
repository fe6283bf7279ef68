"""Computes model FLOPs utilization: the useful floating-point operations of a step over what the chips could do
meanwhile.

Useful is what the losses of the parts that learn compute, forward and backward, by torch's own formulas. Not counted:
recomputation in the backward pass, the frozen networks of `encode`, optimizer and averages. The count runs on the meta
device, whose tensors have shapes and no values: it takes about a second once, and no memory.
"""

import copy
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dstrain.data.batches import copy_batch_to_device
from dstrain.distributed import group
from dstrain.recipe import is_weight_learned
from dstrain.systems.base import System
from dstrain.tracking.hardware import find_peak_flops

_SAMPLES = 2  # of a count; operations grow with the number of samples
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SAME = {torch.ops.aten.addmm_: torch.ops.aten.addmm}  # operations that torch has no formula for


class Utilization:
    """Computes TFLOPs and model FLOPs utilization of an interval of training, on rank 0 with a GPU. On other
    ranks and without a GPU it computes nothing: the ranks of a machine share its CPU, and only rank 0 reports. For a
    system whose loss needs values it warns once and then computes nothing.

    batch       samples of a step, on all ranks together
    precision   fp32, bf16 or fp16
    train_only  of the recipe
    """

    def __init__(self, system: System, batch: int, precision: str, train_only: Sequence[str] | None = None) -> None:
        self._system, self._batch, self._train_only, self._flops = system, batch, train_only, {}
        counts = group.device().type == "cuda" and group.rank() == 0
        self._rate = find_or_measure_chip_flops(group.device(), _DTYPES[precision]) if counts else None

    def compute_tflops_and_mfu(self, first_step: int, done: int, seconds: float) -> dict[str, float]:
        """Returns {"tflops", "mfu"} of steps `first_step` + 1 to `done`, which took `seconds`: the useful operations of
        one rank in 10^12 a second, and as a share of the chip's peak. Returns {} on ranks other than 0, and without a
        GPU. If the operations cannot be counted, warns once and returns {} from then on.
        """
        if self._rate is None:
            return {}
        try:
            work = sum(self._count_step_flops(step) for step in range(first_step, done)) / group.world()
        except (RuntimeError, TypeError, ValueError) as error:  # as commands/probe.py meets them on the meta device
            warnings.warn(
                f"mfu is not reported, since the operations of a step cannot be counted: {error}", stacklevel=2
            )
            self._rate = None
            return {}
        return {"tflops": work / seconds / 1e12, "mfu": work / seconds / self._rate}

    def _count_step_flops(self, step: int) -> float:
        """Returns the operations of a step over all ranks. Steps of the same turns and workload are counted once."""
        kind = self._system.turns(step), self._system.measure_workload(step)
        if kind not in self._flops:
            self._flops[kind] = count_step_flops(self._system, self._batch, step, self._train_only)
        return self._flops[kind]


def count_step_flops(system: System, batch: int, step: int = 0, train_only: Sequence[str] | None = None) -> float:
    """Returns the useful floating-point operations of one training step over `batch` samples, on all ranks together.
    Only weights that train_only names count as learned; None means all. The system is not changed.

    Raises RuntimeError, TypeError or ValueError if the system's code reads values of tensors: they are on the meta
    device.
    """
    with torch.random.fork_rng(devices=[]):
        samples = system.synthetic(_SAMPLES)
    system, meta = _copy_system_to_meta(system), torch.device("meta")
    samples |= {"position": torch.arange(_SAMPLES), "step": torch.full((_SAMPLES,), step)}
    with torch.random.fork_rng(devices=[]), meta:
        networks = system.build_networks_on_meta()
        learning = {
            part: [
                weight
                for name, weight in network.named_parameters()
                if is_weight_learned(train_only, part, name, weight.requires_grad)
            ]
            for part, network in networks.items()
        }
        turns = system.turns(step)  # before `encode`, as in a step
        with torch.no_grad():
            example = copy_batch_to_device(system.encode(copy_batch_to_device(samples, meta)), meta)
        with _Useful() as useful:
            for part in turns:
                for network in networks.values():  # as in a turn: only this part learns
                    network.requires_grad_(False)
                for weight in learning[part]:
                    weight.requires_grad_(True)
                useful.backward = False
                loss = system.loss(part, networks, example)["loss"]
                useful.backward = True
                loss.backward()
    return useful.flops * batch / _SAMPLES


class _Useful(TorchDispatchMode):
    """Sums the operations of the calls made within its block, without those that the backward pass recomputes.

    While `backward` is set, calls in no-grad mode belong to the backward pass and are counted; calls in grad mode are a
    recomputed forward pass and are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.backward = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not (self.backward and torch.is_grad_enabled()):
            self.flops += count_operation_flops(func, args, kwargs or {}, out)
        return out


def count_operation_flops(func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    """Returns the floating-point operations of one call of aten, by torch's formulas: of matrix products, convolutions
    and attention; 0 for all else.
    """
    formula = flop_registry.get(_SAME.get(func._overloadpacket, func._overloadpacket))
    return formula(*args, **kwargs, out_val=out) if formula is not None else 0


def _copy_system_to_meta(system: System) -> System:
    """Returns a copy of a system whose frozen networks are on the meta device: they have shapes and no values."""
    tensors = [tensor for network in system.frozen() for tensor in (*network.parameters(), *network.buffers())]
    memo = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in tensors}
    memo |= {
        id(tensor): torch.nn.Parameter(memo[id(tensor)], tensor.requires_grad)
        for tensor in tensors
        if isinstance(tensor, torch.nn.Parameter)
    }
    return copy.deepcopy(system, memo)


def find_or_measure_chip_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the floating-point operations a second that a device can do in a precision. They are from its data sheet
    (for dense matrices) or, if the device is not listed, from a measured matrix product. float32 means TF32 if torch
    may use it.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return find_peak_flops(name, dtype, torch.get_float32_matmul_precision() != "highest") or measure_matmul_flops(
        device, dtype
    )


def measure_matmul_flops(device: torch.device, dtype: torch.dtype, matrix_side: int = 0) -> float:
    """Returns operations a second, measured by the fastest of six products of random square matrices; takes some tens
    of milliseconds. `matrix_side` is the side of the matrices, 0 for one that suits the device.
    """
    matrix_side = matrix_side or (8192 if device.type == "cuda" else 1024)
    a, b = (torch.randn(matrix_side, matrix_side, device=device).to(dtype) for _ in range(2))
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds = []
    for _ in range(6):
        wait()
        begun = time.perf_counter()
        a @ b
        wait()
        seconds.append(time.perf_counter() - begun)
    return 2 * matrix_side**3 / min(seconds)
