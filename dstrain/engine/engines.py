"""Makes one DeepSpeed engine for each trained network, and keeps several engines from disturbing each other.

An engine hooks the outputs of its network, so two engines in one graph give silently wrong gradients at stages 1 and 3:
`freeze_all_but` gives the engine of the part that learns and the bare, frozen networks of the others.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.distributed.group import world
from dstrain.distributed.progress import get_phases
from dstrain.engine.blocks import (
    HostMemory,
    convert_inputs_to_channels_last,
    mark_zero3_leaf_modules,
    require_known_leaf_modules,
    should_compile,
    wrap_block_forwards,
)
from dstrain.engine.initial import Networks, Values, allocate_weights, build_networks, return_freed_memory_to_system
from dstrain.engine.masters import Masters
from dstrain.engine.optimizers import (
    Decays,
    build_optimizer,
    freeze_weights,
    get_unpartitioned_shape,
    make_parameter_groups,
)
from dstrain.engine.patches import flatten_weights_without_copy
from dstrain.engine.settings import (
    is_optimizer_offloaded,
    make_deepspeed_config,
    needs_own_fp32_sums,
    read_zero_stage,
)
from dstrain.engine.updates import Flag, Fp32GradientSums
from dstrain.recipe import Optimizer


class Engines(Mapping[str, Any]):
    """The DeepSpeed engine of each part, in the order in which the parts update; `masters` has the fp32 weights of
    each.
    """

    def __init__(
        self,
        networks: Networks,
        settings: dict[str, Any],
        decays: Decays,
        blocks: tuple[type[nn.Module], ...] = (),
        *,
        optimizer: Optimizer,
        seed: int,
        train_only: Sequence[str] | None = None,
        recompute: str | int = "none",
        compile: str = "auto",
        channels_last: bool = False,
        draw: bool = True,
    ):
        """Builds the networks and an engine for each, with the `settings` that resolve_deepspeed_settings has returned.

        decays      returns whether weight decay applies to a weight, from its name and the weight
        blocks      classes of the networks' repeated blocks
        optimizer, seed, train_only, recompute, compile, channels_last    as in the recipe and its model section
        draw        whether to draw the initial weights; if not, only buffers are set, and the caller loads or draws
                    weights
        """
        self.settings = settings
        self.notes: list[str] = []  # lines for the user
        self._engines: dict[str, Any] = {}
        self._learned: set[str] = set()  # parts that had a turn in this step, that is, since begin_step
        self.masters: dict[str, Masters] = {}
        self.host = HostMemory()  # what model.recompute=offload keeps
        compiled = should_compile(compile)
        if compiled and blocks:
            self.notes.append("note: torch.compile compiles blocks as the first step meets them, for minutes perhaps")
        built = self._build_networks(networks, seed)
        bare = {part: network for part, (network, _) in built.items()}
        freeze_weights(bare, train_only, optimizer)
        require_known_leaf_modules(bare, settings)
        self._initial = {part: values for part, (_, values) in built.items()}
        for part, (network, values) in built.items():
            if channels_last:
                convert_inputs_to_channels_last(network)
            wrap_block_forwards(
                network, blocks, recompute, compiled, zero3=read_zero_stage(settings) == 3, host=self.host
            )
            mark_zero3_leaf_modules(network, settings)
            self._engines[part] = self._initialize_engine(part, network, optimizer, decays, blocks)
            self.masters[part] = Masters(self._engines[part])
            self.masters[part].reset_optimizer_state()
            if not draw:
                self._fill_masters_and_buffers(part, values(()))
        return_freed_memory_to_system()
        if draw:
            self.initialize_weights()

    def _build_networks(self, networks: Networks, seed: int) -> dict[str, tuple[nn.Module, Values]]:
        """Builds new networks. Returns {part: (network, function that yields its initial values)}; initial.Values is
        the type of this function. Adds a note for the user if, at stage 3, every rank had to build the whole networks.
        """
        if read_zero_stage(self.settings) != 3:
            return build_networks(networks, seed)
        return build_networks(
            networks,
            seed,
            lambda reason: self.notes.append(
                f"note: every rank begins with the whole networks in its memory: {reason}; see dstrain/systems/base.py"
            ),
        )

    def initialize_weights(self, known_weights: Mapping[str, Mapping[str, Tensor]] | None = None) -> None:
        """Sets all weights and buffers. Those in `known_weights`, {part: {state-dict name: value}}, get these values.
        The others get initial values that depend only on the seed. Call it on all ranks.

        A rank draws only the modules of which it owns some weights. It gets the other weights from the other ranks.
        """
        for part, values in self._initial.items():
            given = (known_weights or {}).get(part, {})
            owned = self.masters[part].collect_owned_weight_names() - given.keys()
            drawn = ((name, value) for name, value in values(owned) if name not in given)
            self.set_weights(part, chain(drawn, given.items()))

    def _initialize_engine(
        self, part: str, network: nn.Module, choice: Optimizer, decays: Decays, blocks: tuple[type[nn.Module], ...]
    ) -> Any:
        import deepspeed

        get_phases().enter_phase("setting up DeepSpeed's engines")
        groups = list(make_parameter_groups(network, choice, decays, blocks, part))
        config, passes = make_deepspeed_config(self.settings), self.settings["gradient_accumulation_steps"]
        # DeepSpeed counts a sample on each of the ranks that share it.
        config["train_batch_size"] = config["train_micro_batch_size_per_gpu"] * passes * world()
        allocate_weights(network, groups, config)
        optimizer = build_optimizer(groups, choice, is_optimizer_offloaded(self.settings))
        sums = (
            Fp32GradientSums(weight for weight in network.parameters() if weight.requires_grad)
            if needs_own_fp32_sums(self.settings)
            else None
        )
        with flatten_weights_without_copy():
            engine = deepspeed.initialize(
                model=network,
                optimizer=optimizer,
                config=config,
                dist_init_required=False,
            )[0]
        if sums:
            sums.attach_to_engine(engine)
        return engine

    def __getitem__(self, part: str) -> Any:
        return self._engines[part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Returns {part: network}, the plain networks without their DeepSpeed engines, for sampling and evaluation. All
        ranks must call the networks in the same order.
        """
        return {part: engine.module for part, engine in self._engines.items()}

    def collect_weight_shapes(self, part: str) -> dict[str, torch.Size]:
        """Returns {name: shape of the whole weight} for all weights of a part, frozen ones included."""
        return {name: get_unpartitioned_shape(weight) for name, weight in self[part].module.named_parameters()}

    def count_weights_by_part(self, frozen_networks: Iterable[nn.Module]) -> dict[str, int]:
        """Returns {part: number of weights that it trains} and, as "frozen", the number of weights that are not
        trained, those of the networks `frozen_networks` included. The key "frozen" is absent if that number is 0.
        """
        counts = dict.fromkeys(self, 0)
        still = sum(
            get_unpartitioned_shape(weight).numel() for network in frozen_networks for weight in network.parameters()
        )
        for part, network in self.modules.items():
            for weight in network.parameters():
                numel = get_unpartitioned_shape(weight).numel()
                if weight.requires_grad:
                    counts[part] += numel
                else:
                    still += numel
        return counts | ({"frozen": still} if still else {})

    def set_weights(self, part: str, values: Iterable[tuple[str, Tensor]]) -> None:
        """Sets the weights and buffers of a part. `values` are pairs (state-dict name, whole tensor), which are taken
        one at a time. Ignores names that the network does not have. A buffer gets the dtype of its new value. Call it
        on all ranks.
        """
        self._fill_masters_and_buffers(part, values)
        self.masters[part].copy_masters_to_network()

    @torch.no_grad()
    def _fill_masters_and_buffers(self, part: str, values: Iterable[tuple[str, Tensor]]) -> None:
        buffers = dict(self[part].module.named_buffers())

        def set_buffers_and_yield_weights() -> Iterator[tuple[str, Tensor]]:
            for name, value in values:
                if name in buffers:
                    buffers[name].data = value.to(buffers[name].device)
                else:
                    yield name, value

        self.masters[part].fill_masters(set_buffers_and_yield_weights())

    @contextmanager
    def freeze_all_but(self, part: str) -> Iterator[dict[str, Any]]:
        """Freezes the weights of all parts but `part` inside the block. Yields {part: network}, with which to compute a
        loss of `part`. The network of `part` is its DeepSpeed engine; the others are plain networks.
        """
        others = {name: engine.module for name, engine in self._engines.items() if name != part}
        trained = [weight for module in others.values() for weight in module.parameters() if weight.requires_grad]
        for weight in trained:
            weight.requires_grad_(False)
        try:
            yield {name: self._engines[part] if name == part else others[name] for name in self._engines}
        finally:
            for weight in trained:
                weight.requires_grad_(True)

    def run_backward_and_step(self, part: str, loss: Tensor) -> None:
        """Runs the backward pass of a part's loss and, on the last micro-batch of a step, updates the part's weights,
        unless a gradient of the step is not finite.
        """
        self._learned.add(part)
        self.masters[part].update_loss_scale()
        self._engines[part].backward(loss)
        self.masters[part].step()

    def collect_part_change_flags(self) -> dict[str, Flag]:
        """Returns {part: whether its weights changed} for each part that had a turn in this step. The other parts are
        absent.
        """
        return {part: masters.applied for part, masters in self.masters.items() if part in self._learned}

    def begin_step(self, lr: float) -> None:
        """Begins a step: sets the learning rate of each weight to `lr` times the factor of its group (optimizer.rates),
        and forgets which parts had a turn.
        """
        self._learned.clear()
        for engine in self._engines.values():
            for param_group in engine.optimizer.param_groups:
                param_group["lr"] = lr * param_group.get("rate", 1.0)

    def collect_metrics(self) -> dict[str, float]:
        """Returns {name: value} of all parts. With several parts the names are PART/NAME. A value that is not known is
        absent. Call it on all ranks, and only for a report, since it waits for the device.

        grad_norm    norm of the gradients in the latest step, before clipping
        param_norm   norm of the fp32 weights
        loss_scale   the factor by which fp16 multiplies the loss
        """
        figures: dict[str, float] = {}
        for part, masters in self.masters.items():
            prefix = "" if len(self) == 1 else f"{part}/"
            values = {
                "grad_norm": masters.grad_norm,
                "param_norm": masters.compute_weight_norm(),
                "loss_scale": masters.loss_scale,
            }
            figures |= {prefix + name: value for name, value in values.items() if value is not None}
        return figures
