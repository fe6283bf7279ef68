"""Times attention's forms on this device, forward and backward: python launch/bench/attention.py [--threads N]

Each shape is (samples, heads, tokens, width of a head); the first rows are those of the small recipes. `attend` is what
networks call, and should be near the least. `plain` is matmul, softmax, matmul.

2026-11-22, one thread of an AMD EPYC with AVX512_BF16, milliseconds, the least of seven:

                          bf16: fused    widened    plain      fp32: fused    plain
    (64, 4, 49, 32)           26.6       6.3        2.9              5.7        5.4
    (64, 4, 64, 32)           29.2       8.7        3.1              7.7        8.0
    (64, 4, 256, 32)           123        98        120               92        242
    (16, 8, 256, 64)            88        91         36               88        161
    (8, 4, 1024, 64)           249       339        279              341        657

plain's softmax is rounded to bf16, and where products of bf16 are emulated it takes 7 to 10 times as long as `widened`.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dstrain.commands.exits import run_main_with_exit_code
from dstrain.nn.attention import attend

SHAPES = ((64, 4, 49, 32), (64, 4, 64, 32), (64, 4, 256, 32), (16, 8, 256, 64), (8, 4, 1024, 64))
REPEATS = 7


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def widened(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return fused(query.float(), key.float(), value.float()).to(query.dtype)


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value


def milliseconds(form: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: str) -> float:
    """The least time of a forward and a backward pass, on tensors that lie as a network's do."""
    batch, heads, count, width = shape
    inputs = torch.randn(batch, count, 3, heads, width, device=device).to(dtype).permute(2, 0, 3, 1, 4).unbind(0)
    inputs = [x.requires_grad_() for x in inputs]
    upstream = torch.randn(batch, count, heads, width, device=device).to(dtype).transpose(1, 2)
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        torch.autograd.grad(form(*inputs), inputs, upstream)
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 1e3 * best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="of the CPU; by default as many as torch takes")
    threads = parser.parse_args().threads
    if threads:
        torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    columns = [
        (name, form, dtype)
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
        for form in (attend, fused, widened, plain)
        if (name, form) != ("fp32", widened)
    ]
    print(f"{device}, {torch.get_num_threads()} threads, ms: " + ", ".join(f"{n} {f.__name__}" for n, f, _ in columns))
    for shape in SHAPES:
        print(
            f"{shape!s:20}"
            + "".join(f"{milliseconds(form, shape, dtype, device):10.2f}" for _, form, dtype in columns),
            flush=True,
        )


if __name__ == "__main__":
    run_main_with_exit_code(main)
