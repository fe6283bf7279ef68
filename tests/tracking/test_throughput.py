"""Rates of a run, by a clock that the test sets."""

import re
import time
from pathlib import Path

import pytest
import torch

from dstrain import recipe
from dstrain.tracking.throughput import Throughput
from tests.support.tracking import time_run


class Time:
    """perf_counter, and the seconds that the batches were waited for."""

    def __init__(self):
        self.now, self.waited = 1000.0, 5.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hands(monkeypatch):
    made = Time()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


def throughput(hands: Time, first: int = 0) -> Throughput:
    run = recipe.load_recipe(None, ["batch.global=64", "optimizer.lr=0.5", "optimizer.warmup=10"])
    return time_run(run, first, lambda: hands.waited)


def test_rates(hands):
    """Oracle: 10 steps of 64 samples in 4 s of which 1 s was waiting: 160 a second, a quarter; then all begins anew."""
    made = throughput(hands)
    hands.now += 4
    hands.waited += 1
    figures = made.compute_interval_figures(10)
    assert figures["samples_per_second"] == 160 and figures["data_wait"] == 0.25
    assert figures["images_seen"] == 640
    hands.now += 2
    hands.waited += 2
    figures = made.compute_interval_figures(12)
    assert figures["samples_per_second"] == 64 and figures["data_wait"] == 1 and figures["images_seen"] == 768


def test_a_resumed_run_counts_from_where_it_began(hands):
    """Oracle: 20 steps in 10 s, though the run is at step 520; images seen are those of the whole run."""
    made = throughput(hands, 500)
    hands.now += 10
    figures = made.compute_interval_figures(520)
    assert figures["samples_per_second"] == 128 and figures["images_seen"] == 520 * 64


def test_paused_time_is_left_out(hands):
    """Oracle: 2 s of 99 s were training; a pause counts for its own interval, also one that ends in an error."""
    made = throughput(hands)
    hands.now += 1
    with made.exclude_time_of_block():
        hands.now += 90
    with pytest.raises(OSError), made.exclude_time_of_block():
        hands.now += 7
        raise OSError
    hands.now += 1
    assert made.compute_interval_figures(1)["samples_per_second"] == 32
    hands.now += 2
    assert made.compute_interval_figures(2)["samples_per_second"] == 32


def test_the_time_left(hands):
    """Oracle: by hand: the steps that are left at 0.5 s each; then at the 2 s of the last reports, pauses included."""
    made = throughput(hands)
    steps = made._steps
    hands.now += 5
    assert made.compute_interval_figures(10)["seconds_left"] == 0.5 * (steps - 10)
    with made.exclude_time_of_block():
        hands.now += 15
    hands.now += 5
    assert made.compute_interval_figures(20)["seconds_left"] == 2 * (steps - 20)
    made.start_interval(15)  # the run went back
    hands.now += 15
    assert made.compute_interval_figures(20)["seconds_left"] == 3 * (steps - 20)
    assert made.compute_interval_figures(steps)["seconds_left"] == 0


def test_the_first_step_is_told(hands):
    """Oracle: one line, of the first step of this command, with the mean of its micro-batches by hand."""
    lines: list[str] = []
    made = time_run(recipe.load_recipe(None, []), 7, note=lines.append)
    hands.now += 2
    for done in (8, 9):
        made.record_step_end(done, {"a": [torch.tensor(1.0), torch.tensor(2.0)], "b": [torch.tensor(3.0)]})
    assert lines == ["first step: 2.0 s, loss of a 1.5, b 3"]


def test_the_end_of_compiling_is_told():
    """Oracle: this test's clock around a compiler that takes 0.3 s: the line names what compiling took of the step."""

    def compiler(graph, _):
        time.sleep(0.3)
        return graph.forward

    lines: list[str] = []
    made = time_run(recipe.load_recipe(None, []), 7, note=lines.append)
    began = time.perf_counter()
    assert torch.compile(lambda x: x + 1, backend=compiler)(torch.ones(1)) == 2
    took = time.perf_counter() - began
    made.record_step_end(8, {"a": [torch.tensor(1.0)]})
    words = re.fullmatch(r"first step: ([\d.]+) s, blocks compiled in ([\d.]+) s of it, loss of a 1", lines[0])
    assert 0.3 <= float(words[2]) <= took + 0.05 and float(words[2]) <= float(words[1])


def test_no_time_at_all(hands):
    """Oracle: a clock that stands still divides by nothing."""
    assert throughput(hands).compute_interval_figures(1)["samples_per_second"] > 0


def test_the_rate_is_the_one_of_the_last_step(hands):
    """Oracle: Optimizer.compute_lr of the step that was taken last: lr * 3 / 10 after three of ten warm-up steps."""
    made = throughput(hands)
    assert made.compute_interval_figures(3)["lr"] == pytest.approx(0.15)
    assert made.compute_interval_figures(100)["lr"] == 0.5


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts the GPU's memory there")
def test_peak_memory_of_this_process(hands):
    """Oracle: the kernel's own high-water mark, VmHWM of /proc/self/status in kB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    expected = int(lines["VmHWM"].split()[0]) * 1024 / 1e9
    assert throughput(hands).compute_interval_figures(1)["peak_memory_gb"] == pytest.approx(expected, rel=0.02)
