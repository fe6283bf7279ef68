"""The layer from states to the logits of a codebook, which holds only some rows of logits in memory at the same time.

A clip has thousands of tokens and a codebook up to 65,536 ids: all logits of a batch would be the largest tensor of the
whole training step, and their gradient another. Here rows are taken in chunks. Each chunk's part of the gradient is
computed in the forward pass, while its logits exist; the backward pass only scales it. Nothing is computed twice, and
only the gradient stays in memory, which the backward pass needs in any case. The benchmark maskgit.py measures time and
memory.

The number of rows changes with each batch. Rows are added so that few different numbers occur, since an allocator that
meets thousands of sizes keeps memory for all of them: on a CPU, 1.7 GB grew to 5.8 GB in 500 steps.

Notation: M rows x of width dim, V ids, chunks of C rows. Logits and what is computed from them are float32 at least.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dstrain.nn.layers import Linear
from dstrain.nn.quantize import upcast_to_float32

_ROW_MULTIPLE = 64  # from 512 rows on their number is padded to a multiple of it, below to one of a smaller power of 2


class TokenLoss(NamedTuple):
    """The loss of M rows, and the ids that were drawn for them."""

    total: Tensor  # the weighted sum of `loss`, a scalar, with gradient
    loss: Tensor  # cross-entropy of the targets in nats, (M,), without gradient
    hits: Tensor  # 1 where the likeliest id is the target, float (M,)
    ids: Tensor  # drawn ids, int64 (M,); the targets where none are drawn


class Vocabulary(Linear):
    """A linear layer with V outputs that returns losses and drawn ids instead of its logits."""

    def __init__(self, dim: int, count: int, chunk: int = 512, label_smoothing: float = 0.0) -> None:
        super().__init__(dim, count, init="normal")
        self.chunk, self.label_smoothing = chunk, label_smoothing

    def forward(
        self,
        x: Tensor,
        uniforms: Tensor | None,
        temperature: float = 1.0,
        targets: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> TokenLoss | tuple[Tensor, Tensor]:
        """Returns the TokenLoss of states x (M, dim) if `targets` are given; otherwise a pair: drawn ids, int64 (M,),
        and their log-probabilities at temperature 1, (M,).

        uniforms  (M,) in [0, 1), by which ids are drawn from softmax(logits / temperature); temperature 0 takes the
                  most likely id. None draws no ids, and needs targets.
        targets   int64 (M,), the true ids.
        weights   (M,), the weight of each row in the total loss; needed with targets.
        """
        count = len(x)
        x, uniforms, targets, weights = (_pad_rows_to_multiple(rows) for rows in (x, uniforms, targets, weights))
        if targets is not None:
            needs_gradients = torch.is_grad_enabled()  # asked here, since it is always False within a Function
            total, *of_rows = _CrossEntropyAndDraws.apply(
                x,
                self.weight,
                self.bias,
                targets,
                weights,
                uniforms,
                temperature,
                self.label_smoothing,
                self.chunk,
                needs_gradients,
            )
            return TokenLoss(total, *(rows[:count] for rows in of_rows))
        ids, certainty = [uniforms.new_zeros(0, dtype=torch.int64)], [uniforms.new_zeros(0)]
        for rows, logits in _iterate_logit_chunks(x, self.weight, self.bias, self.chunk):
            ids.append(_draw_token_ids(logits, uniforms[rows], temperature))
            certainty.append(logits.gather(1, ids[-1][:, None])[:, 0] - logits.logsumexp(1))
        return torch.cat(ids)[:count], torch.cat(certainty)[:count]


def _pad_rows_to_multiple(rows: Tensor | None) -> Tensor | None:
    """Adds rows of zeros, at most an eighth of the rows, so that few different sizes occur: (M, ...) -> (M', ...).
    Returns None for None.
    """
    if rows is None:
        return None
    step = min(_ROW_MULTIPLE, 1 << max(len(rows).bit_length() - 4, 0))  # a power of 2
    return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, -len(rows) % step))


def _iterate_logit_chunks(x: Tensor, weight: Tensor, bias: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields, for each chunk of `size` rows of x (M, dim), the slice of the rows and their logits (C, V), float32 at
    least.
    """
    for first in range(0, len(x), size):
        rows = slice(first, first + size)
        yield rows, upcast_to_float32(torch.addmm(bias, x[rows], weight.t()))


def _draw_token_ids(logits: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    """Draws an id from softmax(logits / temperature) for each row of logits (C, V) by uniform numbers (C,) in [0, 1):
    int64 (C,). Temperature 0 takes the most likely id.
    """
    if temperature == 0:
        return logits.argmax(1)
    # Two rows at least: CUDA sums a single row in another order, and the ids would depend on the size of the chunk.
    rows = logits.expand(max(len(logits), 2), -1)
    cumulative = (rows / temperature).softmax(1).cumsum(1)[: len(logits)]  # (C, V)
    return (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(1).clamp(max=logits.shape[1] - 1)


class _CrossEntropyAndDraws(torch.autograd.Function):
    """Computes the cross-entropy l -> lse(l) - <q, l> with the smoothed target q = (1 - s) [id = target] + s / V, whose
    gradient is softmax(l) - q.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, targets, weights, uniforms, temperature, smoothing, chunk, needs_gradients):
        """Returns the weighted total loss, a scalar, and three tensors (M,), with one value for each row: the loss; 1
        if the most likely id is the target, else 0; and a drawn id, or the target if `uniforms` is None. If
        `needs_gradients` is true, also computes the gradients that `backward` returns.
        """
        loss = x.new_empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32))
        hits, ids = torch.empty_like(loss), targets.clone()
        # Weights are divided by the largest: products with a mean over thousands of rows would vanish in float16.
        largest = weights.amax() if len(weights) else weights.new_ones(())
        share = (weights / largest).to(loss.dtype)
        if needs_gradients:  # these sum over many chunks in float32, since bfloat16 would lose small terms
            to_x, to_bias = torch.empty_like(x), torch.zeros_like(bias, dtype=loss.dtype)
            to_weight = torch.zeros_like(weight, dtype=loss.dtype)
        for rows, logits in _iterate_logit_chunks(x, weight, bias, chunk):
            target, log_norm = targets[rows, None], logits.logsumexp(1)
            loss[rows] = log_norm - (1 - smoothing) * logits.gather(1, target)[:, 0]
            if smoothing:
                loss[rows] -= smoothing * logits.mean(1)
            hits[rows] = (logits.argmax(1) == target[:, 0]).to(hits.dtype)
            if uniforms is not None:
                ids[rows] = _draw_token_ids(logits, uniforms[rows], temperature)
            if not needs_gradients:
                continue
            gradient = logits.sub_(log_norm[:, None]).exp_()
            if smoothing:
                gradient -= smoothing / len(weight)
            gradient.scatter_add_(1, target, torch.full_like(target, smoothing - 1, dtype=gradient.dtype))
            gradient *= share[rows, None]
            to_bias += gradient.sum(0)
            gradient = gradient.to(x.dtype)
            to_x[rows] = gradient @ weight
            if to_weight.dtype == gradient.dtype:
                to_weight.addmm_(gradient.t(), x[rows])
            else:
                to_weight += gradient.t() @ x[rows]
        ctx.largest = largest
        ctx.save_for_backward(*((to_x, to_weight, to_bias) if needs_gradients else ()))
        ctx.dtypes = weight.dtype, bias.dtype
        ctx.mark_non_differentiable(loss, hits, ids)
        return (loss * weights).sum(), loss, hits, ids

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        """Returns the gradients of x, weight and bias that `forward` has computed, times the gradient of the total."""
        to_x, to_weight, to_bias = ctx.saved_tensors
        scale = (grad * ctx.largest).to(to_weight.dtype)
        return (
            (to_x * scale).to(to_x.dtype),
            (to_weight * scale).to(ctx.dtypes[0]),
            (to_bias * scale).to(ctx.dtypes[1]),
            *(None,) * 7,
        )
