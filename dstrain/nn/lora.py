"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) around layers of a network, under peft's names.

A layer of weight W, which is frozen, computes (W + alpha / rank * B A) x. A and B are children of the layer, so that
its own weights keep their names: NAME.weight, NAME.lora_A.weight, NAME.lora_B.weight; peft writes base_model.model.
before them. A starts as torch's layers do (Kaiming), B at zero: a network computes at first what it did.

    linear        A (rank, in), B (out, rank)
    Pointwise     A (rank, in, 1), B (out, rank, 1)
    convolution   A (rank, in, height, width) with the layer's stride and padding, B (out, rank, 1, 1)
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from pydantic import Field
from torch import Tensor, nn

from dstrain.nn.layers import Linear, Pointwise, make_dropout
from dstrain.recipe import ConfigError, Run, Section
from dstrain.recipe.patterns import Pattern, is_adapter_weight

# The attention of all networks here, and of a DiT the MLPs of its blocks.
ATTENTION = ("*.attn.*", "*.attn2.*", "*.cross.*", "*blocks.*.mlp.*", "*.qkv", "*.proj_out")


class Lora(Section):
    """Adapters that learn in the place of the network, whose weights init_from gives and which are frozen."""

    rank: int = Field(16, ge=1)
    """Inner width of an adapter."""
    alpha: float = Field(16.0, gt=0)
    """An adapter's output is multiplied by this / rank."""
    targets: tuple[Pattern, ...] | None = ATTENTION
    """Patterns of the layers' names, such as blocks.*.attn.*; * takes dots, too. By default the attention, and of a DiT
    the MLPs of blocks. None: as runs that were begun before took them, with the MLPs of a DiT's embedders."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's inputs that is dropped in training."""

    @property
    def output_factor(self) -> float:
        """Returns alpha / rank, by which an adapter's output is multiplied."""
        return self.alpha / self.rank


def list_lora_conflicts(lora: Lora | None, run: Run) -> list[str]:
    """Returns [one error message] if the recipe has LoRA adapters but no `init_from`, which gives the weights that they
    adapt; [] otherwise. `lora` is None if there are no adapters.
    """
    if lora is not None and run.init_from is None:
        return ["model.lora adapts trained weights, and init_from names none: write init_from=FILE"]
    return []


class _ZeroPointwise(Pointwise):
    def reset_parameters(self) -> None:
        """Sets the weight to 0."""
        nn.init.zeros_(self.weight)


class _ZeroConv2d(nn.Conv2d):
    def reset_parameters(self) -> None:
        """Sets the weight to 0."""
        nn.init.zeros_(self.weight)


def add_adapters(network: nn.Module, lora: Lora | None, default_patterns: Sequence[str]) -> nn.Module:
    """Freezes a network, adds LoRA adapters in place to the layers whose names match lora.targets, and returns the
    network. If `lora` is None, returns it unchanged. `default_patterns` are taken if lora.targets is None.

    Raises ConfigError if no layer gets an adapter, or a pattern that the user wrote matches no layer.
    """
    if lora is None:
        return network
    layers = {name: module for name, module in network.named_modules() if _can_be_adapted(module)}
    chosen: dict[str, nn.Module] = {}
    for pattern in lora.targets or default_patterns:
        found = {name: module for name, module in layers.items() if fnmatchcase(name, pattern)}
        if lora.targets not in (None, ATTENTION) and not found:
            raise ConfigError(
                f"model.lora.targets: {pattern} fits no linear layer or convolution, such as {', '.join(layers)[:300]}"
            )
        chosen |= found
    if not chosen:
        raise ConfigError("model.lora: this network has no attention: write model.lora.targets")
    network.requires_grad_(False)
    for layer in chosen.values():
        layer.lora_A, layer.lora_B = _make_adapter_factors(layer, lora.rank)
        layer.lora_dropout, layer.lora_scale = make_dropout(lora.dropout), lora.output_factor
        layer.register_forward_hook(_add_adapter_output)
    return network


def _can_be_adapted(module: nn.Module) -> bool:
    """Returns whether a module is a linear layer or a convolution with one group, the only layers that take
    an adapter.
    """
    return isinstance(module, (nn.Linear, Pointwise)) or (isinstance(module, nn.Conv2d) and module.groups == 1)


def _make_adapter_factors(layer: Any, rank: int) -> tuple[nn.Module, nn.Module]:
    """Returns the two new layers of a LoRA adapter for a linear layer or convolution: A, which maps its input to `rank`
    values, and B, which maps these to its output. B starts at 0.
    """
    if isinstance(layer, nn.Linear):
        factors = nn.Linear(layer.in_features, rank, bias=False), Linear(rank, layer.out_features, False, "zero")
    elif isinstance(layer, Pointwise):
        factors = (
            Pointwise(layer.in_channels, rank, 1, bias=False),
            _ZeroPointwise(rank, layer.out_channels, 1, bias=False),
        )
    else:
        shape = layer.in_channels, rank, layer.kernel_size, layer.stride, layer.padding
        factors = nn.Conv2d(*shape, bias=False), _ZeroConv2d(rank, layer.out_channels, 1, bias=False)
    return factors


def _add_adapter_output(layer: Any, inputs: tuple, output: Tensor) -> Tensor:
    """Returns the layer's output plus alpha / rank times that of its adapter. This is the layer's forward hook."""
    return output + layer.lora_scale * layer.lora_B(layer.lora_A(layer.lora_dropout(inputs[0])))


def merge_adapters_into_weights(state: dict[str, Tensor], lora: Lora) -> dict[str, Tensor]:
    """Returns a state dict without adapters, in which the product of each adapter's two weights, times alpha / rank, is
    added to the weight of its layer. A network without adapters then computes the same. `state` is not changed.
    """
    merged = {name: value for name, value in state.items() if not is_adapter_weight(name)}
    for name, down in state.items():
        if ".lora_A." in name:
            up, base = state[name.replace(".lora_A.", ".lora_B.")], name.replace(".lora_A.", ".")
            update = up.flatten(1) @ down.flatten(1)  # (out, in, or in times the filter's pixels)
            merged[base] = merged[base] + lora.output_factor * update.view(merged[base].shape)
    return merged


def convert_adapters_to_peft(
    state: Mapping[str, Tensor], lora: Lora, base: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns two dicts for files that peft reads: the LoRA weights in `state` under peft's names, and the content of
    adapter_config.json. `base` is the name or path of the network that the adapters belong to.
    """
    adapters = {
        f"base_model.model.{name}": value.contiguous() for name, value in state.items() if is_adapter_weight(name)
    }
    return adapters, {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": [name.removesuffix(".lora_A.weight") for name in state if ".lora_A." in name],
        "bias": "none",
        "task_type": None,
        "inference_mode": True,
    }
