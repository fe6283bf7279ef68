"""The networks of a run and their initial weights: equal at every stage, precision and number of ranks.

There are two ways, and `build_networks` chooses one for all networks of a system.

    by modules        Every module draws its own weights in `reset_parameters`, and nobody changes them afterwards. Then
                      the weights are constructed on the meta device, and a run that begins calls `reset_parameters` for
                      each module: on fresh float32 tensors, on the CPU, under a seed made of the run's seed and the
                      module's name. A rank draws the modules of which it owns a part, each once, and none where the
                      values come from files. It holds one module at a time, and the fp32 masters start from full
                      float32 values (DeepSpeed's would start from the rounded ones).
    by constructors   A constructor sets weights in any other way: `nn.init.zeros_(self.out.weight)` in a parent,
                      `self.apply(init)`, a parameter that was replaced, a module without `reset_parameters`. A second
                      `reset_parameters` would undo that. Then every rank builds the whole networks on the CPU, and the
                      weights are exactly those of `torch.manual_seed(seed); networks()` in plain torch.

Which way is right is observed and not declared: see `explain_unresettable_weights`.

Weights on the meta device get their memory in `allocate_weights`, so that no rank ever holds a second copy of them.

    stages 0 to 2    The weights of a parameter group lie one after another in one tensor of the compute dtype. Stages 1
                     and 2 want them so, and DeepSpeed would copy all of them for it: twice 2 bytes a weight in bf16,
                     beside 16 / N for masters, moments and average. patches.flatten_weights_without_copy lets it keep
                     ours.
    stage 3          A weight gets its memory when zero.Init asks for it, which keeps this rank's share and frees the
                     rest before it asks for the next one.

What is allocated is not set: values are drawn, or read from files, once the masters exist.
"""

import ctypes
import sys
import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from dstrain.distributed import group
from dstrain.engine.optimizers import get_unpartitioned_shape
from dstrain.engine.settings import read_precision, read_zero_stage

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PADDING = 2  # elements for each rank: DeepSpeed pads a group to a multiple of it
Weights = Sequence[nn.Parameter]

Networks = Callable[[], dict[str, nn.Module]]
# Called with names of weights, it gives (state-dict name, float32 value) of at least these and all buffers; without, of
# all.
Values = Callable[..., Iterator[tuple[str, Tensor]]]

# In-place operations whose result does not depend on what the tensor held before.
_OVERWRITING = frozenset(
    (
        "zero_",
        "fill_",
        "copy_",
        "normal_",
        "uniform_",
        "random_",
        "bernoulli_",
        "exponential_",
        "log_normal_",
        "cauchy_",
        "geometric_",
    )
)


def build_networks(
    networks: Networks, seed: int, note: Callable[[str], None] = lambda text: None
) -> dict[str, tuple[nn.Module, Values]]:
    """Builds the networks on all ranks. Returns {part: (network, function that yields the initial values of its
    parameters and buffers)}; Values is the type of this function.

    If all modules set their own weights in `reset_parameters`, the parameters are on the meta device, unless a network
    cannot be built there. If some do not, the parameters hold what the constructors have set, and `note` is called with
    the reason. Raises RuntimeError on all ranks if the constructors leave other weights on some rank than on rank 0.
    """
    reason = explain_unresettable_weights(networks)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            with place_weights_on_meta() if reason is None else nullcontext():
                built = networks()
        except Exception:  # a buffer computed from a weight; a real mistake comes again
            if reason is not None:
                raise
            built = networks()
    if reason is None:
        return {part: (network, partial(draw_initial_weights, network, seed)) for part, network in built.items()}
    note(reason)
    copies = {
        part: [
            (_join_names(prefix, name), tensor.detach().clone())
            for prefix, module in network.named_modules()
            for name, tensor in _get_own_tensors(module).items()
        ]
        for part, network in built.items()
    }
    _require_same_on_all_ranks({f"{part}: {name}": value for part, values in copies.items() for name, value in values})
    return {part: (network, partial(_pop_values_one_by_one, copies[part])) for part, network in built.items()}


def draw_initial_weights(
    network: nn.Module, seed: int, names: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Draws initial weights: calls `reset_parameters` of each module, under a seed made of `seed` and the module's
    name. Yields (state-dict name, float32 value) of every parameter and buffer; integers keep their dtype. With
    `names`, draws only modules that own a buffer or one of these parameters.

    The network is not changed. It may be on the meta device or partitioned by ZeRO-3: only the full shapes of its
    parameters are read.
    """
    for prefix, module in network.named_modules():
        own = _get_own_tensors(module)
        if any(names is None or name in module._buffers or _join_names(prefix, name) in names for name in own):
            for name, value in _draw_module_weights(module, seed ^ zlib.crc32(prefix.encode())).items():
                yield _join_names(prefix, name), value


def _pop_values_one_by_one(values: list[tuple[str, Tensor]], *_: object) -> Iterator[tuple[str, Tensor]]:
    """Yields the (name, value) pairs of `values`. Removes each pair from the list, so that its memory can be freed; a
    second call yields nothing. Ignores further arguments: `draw_initial_weights` takes names in the same place.
    """
    while values:
        yield values.pop(0)


@contextmanager
def place_weights_on_meta() -> Iterator[None]:
    """Inside the block, moves each parameter that a module registers to the meta device, where it takes no memory and
    its initialization no time. Buffers stay on their device.
    """
    moved: Any = WeakTensorKeyDictionary()  # tied weights stay tied

    def move_to_meta(module: nn.Module, name: str, weight: nn.Parameter | None) -> nn.Parameter | None:
        if weight is None or weight.is_meta:
            return None
        if weight not in moved:
            moved[weight] = nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad)
            vars(moved[weight]).update(vars(weight))
        return moved[weight]

    hook = register_module_parameter_registration_hook(move_to_meta)
    try:
        yield
    finally:
        hook.remove()


def explain_unresettable_weights(networks: Networks) -> str | None:
    """Returns None if each module draws its own initial weights in `reset_parameters`. Otherwise returns the reason why
    the weights must stay as the constructors leave them, for example that the networks cannot be built on the meta
    device.

    Builds the networks on the meta device, which costs no memory, and watches every operation on a tensor. Modules draw
    their own weights if each parameter and buffer was set last by the `reset_parameters` of its module.
    """
    writes = _WriteRecorder()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), writes:
            built = networks()
    except Exception as error:  # meta tensors have no values; a real mistake comes again in the real construction
        return f"networks() cannot run on the meta device ({type(error).__name__}: {error})"
    seen = set()  # of tied weights, DeepSpeed trains the first name
    for part, network in built.items():
        for prefix, module in network.named_modules():
            for name, tensor in _get_own_tensors(module).items():
                if id(tensor) not in seen and writes.find_last_resetting_module(tensor) is not module:
                    return f"{part}: {_join_names(prefix, name)} is set by a constructor"
                seen.add(id(tensor))
    return None


class _WriteRecorder(TorchDispatchMode):
    """Inside the block, records for each storage which module's `reset_parameters` changed it last, and whether that
    method has set all of it.

    Storages are the right key: views, `.data` and nn.Parameter share the storage of the tensor that they come from.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[int, tuple[nn.Module | None, dict[tuple, int]]] = {}  # writer, bytes set in each view
        self._storages: list[Any] = []  # kept alive: an address must not be used twice

    def find_last_resetting_module(self, tensor: Tensor) -> nn.Module | None:
        """Returns the module whose `reset_parameters` was the last to write to the tensor's memory. Returns None if the
        last writer was no such method, or did not write all of this memory.
        """
        storage = tensor.untyped_storage()
        writer, views = self._last.get(storage._cdata, (None, {}))
        return writer if sum(views.values()) >= storage.nbytes() else None

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        overwrites = op._schema.name.split("::")[1] in _OVERWRITING
        for number, argument in enumerate(op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[number] if number < len(args) else kwargs.get(argument.name)
                self._record_write(value, overwrites or argument.is_out)
        if all(returned.alias_info is None for returned in op._schema.returns):
            self._record_write(result, True)  # new tensors; the others are views or arguments
        return result

    def _record_write(self, value: Any, overwrites: bool) -> None:
        resetting = _find_resetting_module()
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages.append(storage)
                writer, views = self._last.get(storage._cdata, (None, {}))
                views = views if writer is resetting else {}
                if overwrites:
                    views[(tensor.storage_offset(), *tensor.shape, *tensor.stride())] = tensor.nbytes
                self._last[storage._cdata] = resetting, views


def _find_resetting_module() -> nn.Module | None:
    """Returns the module whose `reset_parameters` is running now, as the call stack shows; if several are, the
    innermost. Returns None if none is, or if the method takes arguments: a later call could not repeat it.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "reset_parameters" and code.co_argcount:
            module = frame.f_locals.get(code.co_varnames[0])
            if isinstance(module, nn.Module):
                return module if code.co_argcount + code.co_kwonlyargcount == 1 else None
        frame = frame.f_back
    return None


def _require_same_on_all_ranks(values: dict[str, Tensor]) -> None:
    sums = {name: zlib.crc32(value.cpu().reshape(-1).view(torch.uint8).numpy()) for name, value in values.items()}
    first = group.broadcast_from_first(sums)
    different = [name for name in sums if sums[name] != first.get(name)]
    if group.is_true_on_any_rank(bool(different)):
        where = f"; here {different[0]}" if different else ""
        raise RuntimeError(
            "constructors leave other weights on some ranks than on rank 0: a network may draw random "
            f"numbers from torch alone, which every rank seeds alike{where}"
        )


def _join_names(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _get_own_tensors(module: nn.Module) -> dict[str, Tensor]:
    # By items() alone: indexing ZeRO-3's own kind of dict gathers a partitioned parameter.
    return {
        name: tensor
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    }


@torch.no_grad()
def _draw_module_weights(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Returns {name: value} of a module's own weights and buffers, as its `reset_parameters` sets them under a seed, on
    the CPU. The module is not changed.
    """
    originals = [
        (tensors, name, tensor)
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    try:
        for tensors, name, old in originals:
            new = torch.zeros(
                get_unpartitioned_shape(old), dtype=torch.float32 if old.is_floating_point() else old.dtype
            )
            tensors[name] = nn.Parameter(new) if isinstance(old, nn.Parameter) else new
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module.reset_parameters()
        return {name: tensors.get(name).detach() for tensors, name, _ in originals}  # a buffer may have been replaced
    finally:
        for tensors, name, old in originals:
            tensors[name] = old


def allocate_weights(network: nn.Module, groups: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """Allocates weights for those parameters of a network that are on the meta device, without setting their values.
    Puts the new parameters into the modules and into "params" of the optimizer's groups. At stage 3, each rank
    allocates only its share of each weight.

    Weights on other devices stay; buffers move to the rank's device. Call it on all ranks, before the optimizer is
    made.
    """
    options = {"dtype": _DTYPES[read_precision(settings)], "device": group.device()}
    for buffer in network.buffers():
        buffer.data = buffer.data.to(group.device())
    on_meta = [weight for weight in network.parameters() if weight.is_meta]
    if read_zero_stage(settings) == 3 and on_meta:
        import deepspeed

        pieces = _LazyParameters(on_meta, options)
        deepspeed.zero.Init(module=pieces, config_dict_or_path=settings)
        fresh = pieces.made
    else:
        in_groups = [[weight for weight in members["params"] if weight.is_meta] for members in groups]
        frozen = [weight for weight in on_meta if not weight.requires_grad]
        on_meta = [weight for weights in (*in_groups, frozen) for weight in weights]
        fresh = [weight for weights in in_groups for weight in _allocate_in_one_tensor(weights, options)]
        fresh += [_make_parameter_like(weight, torch.empty(weight.shape, **options)) for weight in frozen]
    new = dict(zip(map(id, on_meta), fresh, strict=True))
    for module in network.modules():
        for name, weight in list(module._parameters.items()):
            if id(weight) in new:
                setattr(module, name, new[id(weight)])
    for members in groups:
        members["params"] = [new.get(id(weight), weight) for weight in members["params"]]


class _LazyParameters(nn.Module):
    """A module for zero.Init whose `parameters()` allocates a new parameter for each of `weights` only when it is asked
    for the next one; afterwards they are in `made`.
    """

    def __init__(self, weights: Weights, options: dict[str, Any]) -> None:
        super().__init__()
        self.made: list[nn.Parameter] = []
        self._weights, self._options = weights, options

    def parameters(self, *_: Any, **__: Any) -> Iterator[nn.Parameter]:
        for weight in self._weights:
            self.made.append(_make_parameter_like(weight, torch.empty(weight.shape, **self._options)))
            yield self.made[-1]


def _allocate_in_one_tensor(weights: Weights, options: dict[str, Any]) -> Iterator[nn.Parameter]:
    """Yields a new parameter for each weight, without setting its values. The parameters are views of one new tensor,
    in which they lie one after another. At its end, this tensor has room for DeepSpeed's padding.
    """
    counts = [weight.numel() for weight in weights]
    flat = torch.empty(sum(counts) + _PADDING * group.world(), **options)
    for weight, values in zip(weights, flat[: sum(counts)].split(counts)):
        fresh = _make_parameter_like(weight, values.view(weight.shape))
        fresh.lies_in_one = True
        yield fresh


def _make_parameter_like(weight: nn.Parameter, values: Tensor) -> nn.Parameter:
    fresh = nn.Parameter(values, requires_grad=weight.requires_grad)
    vars(fresh).update(vars(weight))
    return fresh


def return_freed_memory_to_system() -> None:
    """Gives memory that this process has freed back to the system, if the C library is glibc; does nothing otherwise.
    glibc would keep the memory of weights that each rank has allocated whole for a moment at stage 3.
    """
    # With 8 ranks, glibc would keep as much memory as a rank needs in all.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
