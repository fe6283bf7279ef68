"""Peak memory and time of MaskGit's loss with a large codebook, in chunks and with all logits at once, on this machine.

    python launch/bench/maskgit.py [--batch 4 --tokens 576 --dim 256 --codebook 65536 --chunk 128 --rounds 2]

full       logits of every token, then the cross-entropy of the masked ones, as phenaki-pytorch computes it
masked     logits of the masked tokens alone, all at once
chunked    systems/phenaki/vocabulary.py: of the masked tokens, in chunks, each with its part of the gradient

All take the same states and masks (cosine schedule; no trunk is timed) and must give the same loss and gradients. Each
runs in a process of its own, on one core or on the GPU. Memory is the peak above weights, states and their gradients,
time the fastest round of forward and backward.

On one core of a shared machine, float32, with the defaults (1165 of 2304 tokens masked, 65,536 ids):

                  MB    / full     seconds    / full
    full        1097      1.00       14.45      1.00
    masked       812      0.74        9.28      0.64
    chunked       99      0.09        8.00      0.55

The memory of `chunked` does not grow with the batch. When chunks were computed again in the backward pass, instead of
with their part of the gradient in the forward pass, it took 1.4 times as long as `masked`.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from dstrain import rng
from dstrain.systems.phenaki import masking
from dstrain.systems.phenaki.vocabulary import Vocabulary

WAYS = ("full", "masked", "chunked")


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("batch", 4),
        ("tokens", 576),
        ("dim", 256),
        ("codebook", 65536),
        ("chunk", 128),
        ("rounds", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options)))
        return
    command, measured = [sys.executable, __file__, *sys.argv[1:], "--way"], {}
    for way in WAYS:
        output = subprocess.run([*command, way], check=True, capture_output=True, text=True).stdout
        measured[way] = json.loads(output.splitlines()[-1])
    full = measured["full"]
    for way, figures in measured.items():
        for name in ("loss", "gradient"):
            assert abs(figures[name] - full[name]) <= 1e-4 * abs(full[name]), (way, name, figures, full)
    print(
        f"{options.batch} clips of {options.tokens} tokens, {full['rows']} masked, {options.codebook} ids, width "
        f"{options.dim}\n{'':10}{'MB':>10}{'/ full':>10}{'seconds':>12}{'/ full':>10}"
    )
    for way, figures in measured.items():
        print(
            f"{way:10}{figures['bytes'] / 2**20:10.0f}{figures['bytes'] / full['bytes']:10.2f}"
            f"{figures['seconds']:12.2f}{figures['seconds'] / full['seconds']:10.2f}"
        )


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Figures of one way, in this process."""
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    head = Vocabulary(options.dim, options.codebook, options.chunk).to(device)
    key = rng.keys(0, 0, torch.arange(options.batch)).to(device)
    states = rng.normal(key, "states", (options.tokens, options.dim)).flatten(0, 1).requires_grad_()
    targets = rng.integers(key, "tokens", options.codebook, (options.tokens,)).flatten()
    real = torch.ones(options.batch, options.tokens, dtype=torch.bool, device=device)
    masked = masking.choose_masked_tokens(
        rng.uniform(key, "u"), rng.uniform(key, "mask", (options.tokens,)), real
    ).flatten()
    seconds, before = [], resident(device)
    for _ in range(options.rounds):
        head.zero_grad()
        states.grad = None
        begin = time.perf_counter()
        loss = loss_of(options.way, head, states, targets, masked)
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    gradients = 4 * (head.weight.numel() + states.numel())  # each way makes them
    return {
        "bytes": peak(device) - before - gradients,
        "seconds": min(seconds),
        "loss": loss.item(),
        "rows": int(masked.sum()),
        "gradient": head.weight.grad.norm().item(),
    }


def loss_of(
    way: str, head: Vocabulary, states: torch.Tensor, targets: torch.Tensor, masked: torch.Tensor
) -> torch.Tensor:
    """The mean cross-entropy of the masked tokens."""
    if way == "full":
        logits = F.linear(states, head.weight, head.bias)
        return F.cross_entropy(logits[masked].float(), targets[masked])
    places = masked.nonzero()[:, 0]
    if way == "masked":
        return F.cross_entropy(F.linear(states[places], head.weight, head.bias).float(), targets[places])
    weights = torch.full((len(places),), 1 / len(places), device=places.device)
    return head(states[places], None, 1.0, targets[places], weights).total


def resident(device: torch.device) -> int:
    """Bytes in memory now; on a GPU the peak is counted from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak(device: torch.device) -> int:
    """The most bytes in memory so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
