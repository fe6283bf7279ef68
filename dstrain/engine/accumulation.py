"""Gradients of 16 bits, summed in fp32 over the micro-batches of a step, at ZeRO stages 0 and 1, and 2 on one rank.

A 16-bit sum loses precision with each micro-batch. At stages 2 and 3 DeepSpeed's `data_types.grad_accum_dtype` prevents
that: it adds each reduced gradient to a partition in fp32. At stage 0 DeepSpeed refuses the key, and at stage 1 in bf16
it changes over to an optimizer with other checkpoints, so here the sum is held in fp32 beside the weights and handed to
DeepSpeed on the last micro-batch, in the precision of the network, which is also that of the reduction. Where one rank
has nothing to reduce (updates.py), gradients are summed where the optimizer takes them, and the sum is not rounded.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class WideSums:
    """fp32 sums of the gradients of `weights`; make it before the engine, so that its hooks run before DeepSpeed's."""

    def __init__(self, weights: Iterable[nn.Parameter]):
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._engine: Any = None
        self._hooks = [weight.register_post_accumulate_grad_hook(self._take) for weight in weights]

    def attach(self, engine: Any) -> None:
        """Begins to sum: `engine` says which micro-batch is the last and reduces what it leaves in the weights."""
        self._engine, reduce, engine.wide_sums = engine, engine.allreduce_gradients, self

        def reduce_all(*args: Any, **kwargs: Any) -> Any:
            if engine.is_gradient_accumulation_boundary():  # of weights without a part in the last one
                for weight in list(self._sums):
                    weight.grad = self._sums.pop(weight).to(weight.dtype)
            return reduce(*args, **kwargs)

        engine.allreduce_gradients = reduce_all

    def detach(self) -> None:
        """Leaves the gradients alone from now on."""
        for hook in self._hooks:
            hook.remove()
        del self._engine.allreduce_gradients, self._engine.wide_sums

    def held(self) -> Iterable[Tensor]:
        """The sums so far."""
        return self._sums.values()

    @torch.no_grad()
    def _take(self, weight: nn.Parameter) -> None:
        """Moves a micro-batch's gradient into the sum, and on the last micro-batch the sum into the gradient."""
        total = self._sums.pop(weight, None)
        if self._engine.is_gradient_accumulation_boundary():
            if total is not None:
                weight.grad = total.add_(weight.grad).to(weight.dtype)
        else:
            self._sums[weight] = weight.grad.float() if total is None else total.add_(weight.grad)
            weight.grad = None


@torch.no_grad()
def add_gradients(master: Tensor, weights: Sequence[nn.Parameter]) -> None:
    """Adds the gradients of a micro-batch to `master.grad`, where they lie flat, one behind the other."""
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    sizes = [weight.numel() for weight in weights]
    places = master.grad[: sum(sizes)].split(sizes)
    used = [(place, weight.grad.reshape(-1)) for place, weight in zip(places, weights) if weight.grad is not None]
    if used:
        torch._foreach_add_(*map(list, zip(*used)))
    for weight in weights:
        weight.grad = None
