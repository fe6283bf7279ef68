"""The map from states to a codebook's logits, of which only some rows stand in memory at once.

A clip has thousands of tokens and a codebook up to 65,536 ids: all logits of a batch would be the largest tensor of the
whole training step, and their gradient another. Here rows are taken in chunks, and each chunk's part of the gradient is
computed while its logits are there; backwards it is only scaled. So nothing is computed twice, and what lies there in
between is a gradient of the weights, which backward needs in any case. launch/bench_maskgit.py compares.

Notation: M rows x of width dim, V ids, chunks of C rows. Logits and what follows are float32 at least.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dstrain.nn.layers import Linear
from dstrain.nn.quantize import wide


class Found(NamedTuple):
    """What is known of the rows."""

    total: Tensor                                 # the weighted sum of `loss`, a scalar, with gradient
    loss: Tensor                                  # cross-entropy of the targets in nats, (M,), without
    hits: Tensor                                  # 1 where the likeliest id is the target, float (M,)
    ids: Tensor                                   # drawn ids, int64 (M,); the targets where none are drawn


class Vocabulary(Linear):
    """A linear layer with V outputs that gives no logits, but what is asked of them."""

    def __init__(self, dim: int, count: int, chunk: int = 512, label_smoothing: float = 0.0) -> None:
        super().__init__(dim, count, init="normal")
        self.chunk, self.label_smoothing = chunk, label_smoothing

    def forward(self, x: Tensor, uniforms: Tensor | None, temperature: float = 1.0, targets: Tensor | None = None,
                weights: Tensor | None = None) -> Found | tuple[Tensor, Tensor]:
        """With targets Found, else drawn ids and the logarithms of their probabilities, (M,) both; of x (M, dim).

        uniforms  (M,) in [0, 1): an id is drawn from softmax(logits / temperature) by the inverse of its distribution,
                  for one random number a row where the Gumbel trick takes V; temperature 0 takes the likeliest id.
        targets   int64 (M,), whose cross-entropy is computed.
        weights   (M,), of each row in the total.
        """
        if targets is not None:
            learns = torch.is_grad_enabled()      # within a Function it is always off
            return Found(*_CrossEntropy.apply(x, self.weight, self.bias, targets, weights, uniforms, temperature,
                                              self.label_smoothing, self.chunk, learns))
        ids, certainty = [uniforms.new_zeros(0, dtype=torch.int64)], [uniforms.new_zeros(0)]
        for rows, logits in _chunks(x, self.weight, self.bias, self.chunk):
            ids.append(_draw(logits, uniforms[rows], temperature))
            certainty.append(logits.gather(1, ids[-1][:, None])[:, 0] - logits.logsumexp(1))
        return torch.cat(ids), torch.cat(certainty)


def _chunks(x: Tensor, weight: Tensor, bias: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Logits (C, V) of each chunk of rows; the product has the precision of the layer, as any other's."""
    for first in range(0, len(x), size):
        rows = slice(first, first + size)
        yield rows, wide(torch.addmm(bias, x[rows], weight.t()))


def _draw(logits: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    if temperature == 0:
        return logits.argmax(1)
    # Two rows at least: CUDA scans a single one another way, and what is drawn would depend on the rows beside it.
    rows = logits.expand(max(len(logits), 2), -1)
    upto = (rows / temperature).softmax(1).cumsum(1)[:len(logits)]                                # (C, V)
    return (upto <= uniforms[:, None] * upto[:, -1:]).sum(1).clamp(max=logits.shape[1] - 1)


class _CrossEntropy(torch.autograd.Function):
    """With q the smoothed target, (1 - s) [id = target] + s / V: the loss is logsumexp(l) - <q, l>, its gradient
    softmax(l) - q.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, targets, weights, uniforms, temperature, smoothing, chunk, learns):
        loss = x.new_empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32))
        hits, ids = torch.empty_like(loss), targets.clone()
        # The largest weight is taken out of the products: float16 would lose a mean over thousands of rows.
        largest = weights.amax() if len(weights) else weights.new_ones(())
        share = (weights / largest).to(loss.dtype)
        if learns:                                # sums over many chunks: bfloat16 would lose the small ones
            to_x, to_bias = torch.empty_like(x), torch.zeros_like(bias, dtype=loss.dtype)
            to_weight = torch.zeros_like(weight, dtype=loss.dtype)
        for rows, logits in _chunks(x, weight, bias, chunk):
            right, spread = targets[rows, None], logits.logsumexp(1)
            loss[rows] = spread - (1 - smoothing) * logits.gather(1, right)[:, 0]
            if smoothing:
                loss[rows] -= smoothing * logits.mean(1)
            hits[rows] = (logits.argmax(1) == right[:, 0]).to(hits.dtype)
            if uniforms is not None:
                ids[rows] = _draw(logits, uniforms[rows], temperature)
            if not learns:
                continue
            pull = logits.sub_(spread[:, None]).exp_()
            if smoothing:
                pull -= smoothing / len(weight)
            pull.scatter_add_(1, right, torch.full_like(right, smoothing - 1, dtype=pull.dtype))
            pull *= share[rows, None]
            to_bias += pull.sum(0)
            pull = pull.to(x.dtype)
            to_x[rows] = pull @ weight
            if to_weight.dtype == pull.dtype:
                to_weight.addmm_(pull.t(), x[rows])
            else:
                to_weight += pull.t() @ x[rows]
        ctx.largest = largest
        ctx.save_for_backward(*((to_x, to_weight, to_bias) if learns else ()))
        ctx.dtypes = weight.dtype, bias.dtype
        ctx.mark_non_differentiable(loss, hits, ids)
        return (loss * weights).sum(), loss, hits, ids

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        to_x, to_weight, to_bias = ctx.saved_tensors
        scale = (grad * ctx.largest).to(to_weight.dtype)
        return ((to_x * scale).to(to_x.dtype), (to_weight * scale).to(ctx.dtypes[0]),
                (to_bias * scale).to(ctx.dtypes[1]), *(None,) * 7)
