"""Replaces the forward methods of a network's repeated blocks, so that torch compiles each block by itself and the
backward pass recomputes activations.

A block keeps its place in the network and the names of its weights; only its `forward` is replaced, so that hooks of
modules stay outside of what is compiled. ZeRO-3 has hooks before and after each module, which Dynamo cannot trace: a
block whose layers have hooks is split into several graphs at each of them. Such hooks may not run within
recompute=attention either, which expects the same operations again. `wrap_block_forwards` makes such blocks leaf
modules: one hook gathers the weights of the whole block.

Tried for a DiT of 4 blocks at stage 3: as leaf modules, one graph and no break; DeepSpeed's `engine.compile`, of the
whole network, 35 graphs and 44 breaks. Its DeepCompile is built for CUDA alone, and has not been tried.

Dynamo keeps at most eight graphs of each code object, and checks their guards one after the other. So each kind of
block gets a copy of the function: a kind is a structure, the shapes of its inputs, and whether gradients are recorded.
Without gradients the batch may have any size: then a kind has a graph for batches of one and another for all longer
ones, and evaluation, the last short batch and a batch doubled by guidance share it.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dstrain.engine.masters import get_unpartitioned_shape
from dstrain.engine.patches import replace_linear_of_zero3
from dstrain.engine.settings import read_zero_stage
from dstrain.recipe import ConfigError

# What recompute=attention keeps: products with weights, which are most of the work and few of the bytes. The products
# within attention that some of torch's implementations make are batched ones (bmm), and not kept.
PRODUCTS = ("mm", "addmm", "convolution")


def wrap_block_forwards(
    network: nn.Module,
    blocks: tuple[type[nn.Module], ...],
    recompute: str | int = "none",
    compiled: bool = False,
    zero3: bool = False,
    host: "HostMemory | None" = None,
) -> None:
    """Replaces the forward method of each repeated block of a network by one that is compiled, or that recomputes its
    activations in the backward pass, as the recipe asks. A block for which the recipe asks neither stays as it is. Call
    it before deepspeed.initialize.

    blocks      classes of the repeated blocks
    recompute   model.recompute: none, attention, all, offload, or a number k: all for every k-th block, none for the
                others
    compiled    whether torch.compile compiles the blocks
    zero3       whether ZeRO-3 will partition the weights; if so, blocks that are compiled or have recompute=attention
                become leaf modules
    host        keeps the first inputs of blocks with recompute=offload; None: a new HostMemory

    If blocks are compiled or have recompute=attention, ZeRO-3's linear layer is replaced in the whole process
    (patches.replace_linear_of_zero3).
    """
    host = host or HostMemory()
    repeated = [module for module in network.modules() if isinstance(module, blocks)]
    if zero3 and repeated and (compiled or recompute == "attention"):
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(network, list({type(module) for module in repeated}))
        for module in repeated:
            module.register_forward_pre_hook(_make_input_require_grad)  # before DeepSpeed's own hooks
    if repeated and (compiled or recompute == "attention"):  # at every stage: its layer outlives a ZeRO-3
        replace_linear_of_zero3()
    graphs = Graphs()
    for number, module in enumerate(repeated, 1):
        keeps = recompute
        if isinstance(recompute, int):  # every so many blocks
            keeps = "none" if number % recompute else "all"
        if compiled:
            plain = partial(
                graphs.run_compiled_block, module, "none" if keeps == "offload" else keeps, make_structure_key(module)
            )
            module.forward = partial(host.run_with_offloaded_input, plain) if keeps == "offload" else plain
        elif keeps == "offload":
            module.forward = partial(host.run_with_offloaded_input, partial(type(module).forward, module))
        elif keeps != "none":
            module.forward = partial(run_block_forward, module, keeps)


def require_known_leaf_modules(networks: Mapping[str, nn.Module], settings: dict[str, Any]) -> None:
    """Checks zero_optimization.leaf_module of DeepSpeed's JSON at stage 3; DeepSpeed would only warn. Raises
    ConfigError if one of its lists is empty, or if it names a class, module or suffix that no module of any network
    has.
    """
    chosen = settings.get("zero_optimization", {}).get("leaf_module")
    if not chosen or read_zero_stage(settings) < 3:
        return
    names, classes = [], []
    for network in networks.values():
        for name, module in network.named_modules():
            kind = type(module)
            names += [name] if name else []
            classes += [kind.__name__, f"{kind.__module__}.{kind.__qualname__}"]
    for key, words in chosen.items():
        if not words:
            raise ConfigError(
                f'--ds_config: "zero_optimization.leaf_module.{key}" is empty, which fits no module of '
                f"{', '.join(networks)}: write what there is, or remove it"
            )
        known = classes if key == "classes" else names
        for word in [words] if isinstance(words, str) else words:
            fits = word in known
            if key == "name_suffixes":
                fits = any(name.endswith(word) for name in names)
            if not word or not fits:
                near = difflib.get_close_matches(word, known, 1, 0.0)[0]
                raise ConfigError(
                    f'--ds_config: "zero_optimization.leaf_module.{key}" is "{word}", which fits no module of '
                    f"{', '.join(networks)}; the nearest is {near}: write what there is, or remove it"
                )


def mark_zero3_leaf_modules(network: nn.Module, settings: dict[str, Any]) -> None:
    """At stage 3, marks the modules that zero_optimization.leaf_module of DeepSpeed's JSON names as ZeRO's leaf
    modules: all weights inside such a module are gathered together. Adds a hook to each of them that makes one of its
    inputs require a gradient. Does nothing at lower stages or without that section. Call it before
    deepspeed.initialize.
    """
    chosen = settings.get("zero_optimization", {}).get("leaf_module")
    if not chosen or read_zero_stage(settings) < 3:
        return
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config

    for module in apply_zero_leaf_module_config(network, DeepSpeedZeroLeafModuleConfig(**chosen)):
        module.register_forward_pre_hook(_make_input_require_grad_or_raise)


def _make_input_require_grad_or_raise(module: nn.Module, inputs: tuple) -> tuple:
    """Returns the inputs of a module, with one that requires a gradient, as `_make_input_require_grad` does. Raises
    ConfigError if gradients are recorded and no input can require one, since none is a floating-point tensor.
    """
    inputs = _make_input_require_grad(module, inputs)
    if torch.is_grad_enabled() and not any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
        raise ConfigError(
            f'--ds_config: "zero_optimization.leaf_module" names a {type(module).__name__}, which is given no '
            "tensor of fractions in its place; DeepSpeed would release its weights before its backward pass: remove it"
        )
    return inputs


def _make_input_require_grad(_: nn.Module, inputs: tuple) -> tuple:
    """Returns the inputs of a module, as a hook before its forward pass. If gradients are recorded and no input
    requires one, replaces the first floating-point tensor among the inputs by a detached view that requires a gradient.
    Without such an input, DeepSpeed would release a leaf module's weights before its backward pass.
    """
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in tensors):
        return inputs
    first = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    return tuple(value.detach().requires_grad_() if value is first and first is not None else value for value in inputs)


def should_compile(choice: str) -> bool:
    """Returns whether to compile blocks on this machine. `choice` is on, off or auto; auto means only with a GPU."""
    return choice == "on" or (choice == "auto" and torch.cuda.is_available())


def run_block_forward(module: nn.Module, recompute: str, *inputs: Any, **named: Any) -> Any:
    """Returns the output of a block's own forward method. If gradients are recorded, `recompute` says what the backward
    pass computes again, instead of keeping it in memory:

    none        nothing
    attention   everything but the products with weights
    all         everything

    The second computation has the same dropout masks as the first.
    """
    plain = partial(type(module).forward, module)
    if recompute == "none" or not torch.is_grad_enabled():
        return plain(*inputs, **named)
    if recompute == "attention":
        return checkpoint(plain, *inputs, use_reentrant=False, context_fn=_make_selective_checkpoint_contexts, **named)
    return checkpoint(plain, *inputs, use_reentrant=False, **named)


def _make_selective_checkpoint_contexts() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts([getattr(torch.ops.aten, name).default for name in PRODUCTS])


class HostMemory:
    """Runs blocks and keeps the first input of each in the host's memory until the backward pass
    (model.recompute=offload).
    """

    def run_with_offloaded_input(self, run_forward: Callable, *inputs: Any, **named: Any) -> Any:
        """Returns the output of `run_forward`, the forward pass of a block. If gradients are recorded, keeps only the
        block's first input, as a copy in the host's memory; the backward pass fetches it and computes the block again.
        The other inputs, which blocks share, stay on their device.
        """
        if not torch.is_grad_enabled():
            return run_forward(*inputs, **named)
        others = inputs[1:]
        # Within, torch.utils.checkpoint has hooks of its own: these get what it keeps of the inputs alone.
        with saved_tensors_hooks(self.send_to_host, self.fetch_from_host):
            return checkpoint(lambda *first: run_forward(*first, *others, **named), *inputs[:1], use_reentrant=False)

    def send_to_host(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        """Starts to copy a tensor to the host's memory. Returns the device of the tensor and the copy, without waiting
        for it.
        """
        return tensor.device, _copy_to_device(torch.device("cpu"), tensor)

    def fetch_from_host(self, sent: tuple[torch.device, Tensor]) -> Tensor:
        """Returns a copy of a tensor on the device from which `send_to_host` took it. `sent` is what that method
        returned.
        """
        return _copy_to_device(*sent)


@torch.no_grad()
def _copy_to_device(device: torch.device, tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor on a device, with the same strides. The copy may still be in progress when this
    function returns. Returns a meta tensor as it is, since it has no values.
    """
    # torch.autograd.graph.save_on_cpu would turn NHWC into NCHW, so that other kernels would compute the block again.
    if tensor.is_meta:  # It has no values that could go anywhere.
        return tensor
    pinned = device.type == "cpu" != tensor.device.type
    return torch.empty_like(tensor, device=device, pin_memory=pinned).copy_(tensor, non_blocking=True)


class Graphs:
    """Compiles the forward passes of a network's blocks. All calls of one kind share a graph: calls with the same
    structure of the block, the same recomputation and shapes of inputs, all with or all without gradients.
    """

    def __init__(self) -> None:
        self._by_kind: dict[tuple, Callable] = {}

    def run_compiled_block(
        self, module: nn.Module, recompute: str, structure: tuple, *inputs: Any, **named: Any
    ) -> Any:
        """Returns what `run_block_forward` returns, computed by a compiled graph. The first call compiles the graph.
        A later call uses it again if `structure`, `recompute`, the shapes of the inputs and whether gradients are
        recorded are all the same. If gradients are not recorded, the first dimension of the inputs may differ.

        recompute   what backward computes again, see `run_block_forward`
        structure   the structure of the module, as `make_structure_key` returns it
        """
        tensors = [value for value in (*inputs, *named.values()) if isinstance(value, Tensor) and value.ndim]
        records = torch.is_grad_enabled()
        kind = (structure, recompute, records, *(tensor.shape if records else tensor.shape[1:] for tensor in tensors))
        compiled = self._by_kind.get(kind)
        if compiled is None:
            compiled = self._by_kind[kind] = torch.compile(_copy_function(run_block_forward), dynamic=False)
        if not records:
            for tensor in tensors:
                if len(tensor) == len(tensors[0]):
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(module, recompute, *inputs, **named)


def _copy_function(function: FunctionType) -> FunctionType:
    """Returns a copy of a function with a code object of its own, since torch keeps compiled graphs by code object."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def make_structure_key(block: nn.Module) -> tuple:
    """Returns a hashable description of a block, equal for blocks that can share a compiled graph. It holds for each
    module in the block: its class, its attributes that are numbers, strings or None (without `training`), and the names
    and whole shapes of its weights.
    """

    def iterate_settings_and_shapes() -> Iterator[tuple]:
        for module in block.modules():
            settings = (
                (name, value)
                for name, value in vars(module).items()
                if name != "training" and isinstance(value, (int, float, str, type(None)))
            )
            shapes = (
                (name, tuple(get_unpartitioned_shape(weight)))
                for name, weight in module.named_parameters(recurse=False)
            )
            yield type(module), *settings, *shapes

    return tuple(iterate_settings_and_shapes())


def convert_inputs_to_channels_last(network: nn.Module) -> None:
    """Adds a hook that converts all positional and named inputs with four dimensions to torch's memory format
    channels_last (NHWC): images (B, C, H, W), whose format the network's layers keep. Of token ids (B, t, h, w), too,
    only the strides change.

    Torch joins images of two formats to one of NCHW, so each must be converted. The weights keep their format: they are
    views of ZeRO's flat buffers, which have one layout only.
    """
    network.register_forward_pre_hook(
        lambda _, inputs, named: tree_map_only(
            lambda x: torch.is_tensor(x) and x.ndim == 4, _convert_to_channels_last, (inputs, named)
        ),
        with_kwargs=True,
    )


def _convert_to_channels_last(images: Tensor) -> Tensor:
    """Returns images (B, C, H, W) in torch's memory format channels_last."""
    # `contiguous` would keep the strides of images of one channel, whose bytes lie alike in both formats.
    return torch.empty_like(images, memory_format=torch.channels_last).copy_(images)
