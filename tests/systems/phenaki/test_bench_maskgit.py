"""The benchmark of MaskGit's loss: its ways are one loss, and its script prints what its docstring says."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from dstrain.systems.phenaki.vocabulary import Vocabulary
from launch.bench import maskgit as bench_maskgit
from tests.support.launch import ROOT, environment


def test_all_ways_are_one_loss():
    """Oracle: the cross-entropy of all logits, and its gradients."""
    torch.manual_seed(0)
    head, states = Vocabulary(6, 30, 4), torch.randn(25, 6, requires_grad=True)
    targets, masked = torch.randint(30, (25,)), torch.rand(25) < 0.6
    wanted = F.cross_entropy((states @ head.weight.t() + head.bias)[masked], targets[masked])
    inputs = (states, head.weight, head.bias)
    expected = torch.autograd.grad(wanted, inputs)
    for way in bench_maskgit.WAYS:
        loss = bench_maskgit.loss_of(way, head, states, targets, masked)
        torch.testing.assert_close(loss, wanted)
        for ours, theirs in zip(torch.autograd.grad(loss, inputs), expected):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.faults  # in CI: what it measures, above
def test_the_script():
    """Oracle: full logits, which need more memory; it compares loss and gradient itself."""
    said = subprocess.run(
        [
            sys.executable,
            str(ROOT / "launch/bench/maskgit.py"),
            "--batch",
            "4",
            "--tokens",
            "128",
            "--dim",
            "16",
            "--codebook",
            "65536",
            "--chunk",
            "32",
            "--rounds",
            "1",
        ],
        env=environment(),
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert said.returncode == 0, said.stderr[-3000:]
    share = {line.split()[0]: float(line.split()[2]) for line in said.stdout.splitlines()[2:]}
    assert list(share) == list(bench_maskgit.WAYS) and share["chunked"] < 0.6 and share["full"] == 1
