"""Times the metrics on synthetic features: python launch/bench/metrics.py [--num 50000] [--size 2048] [--kept 10000]

Two sets of seeded features go through the code that --metrics uses. Printed are seconds and the peak memory of the
process. With a launcher, ranks share the work.
"""

import argparse
import resource
import time

import torch
from torch import Tensor

from dstrain.distributed import group
from dstrain.engine.start import start_process_group
from dstrain.metrics import distances
from dstrain.metrics.network import Features
from dstrain.metrics.statistics import KEPT, Collector, Statistics


class Synthetic(Features):
    """Correlated features of an image's number; the image is not looked at."""

    name, fingerprint = "synthetic", "seeded"

    def __init__(self, size: int, scale: float) -> None:
        random = torch.Generator().manual_seed(0)
        self.size, self.device = size, group.device()
        self.mixing = (torch.randn(64, size, generator=random) * scale).to(self.device)

    def __call__(self, images: Tensor) -> tuple[Tensor, None]:
        random = torch.Generator().manual_seed(int(images[0]))
        few = torch.randn(len(images), 64, generator=random).to(self.device)
        noise = torch.rand(len(images), self.size, generator=random).to(self.device)
        return (few @ self.mixing + noise).relu(), None


def collected(num: int, size: int, kept: int, scale: float) -> Statistics:
    collector = Collector(Synthetic(size, scale), num, kept)
    for begin in range(group.rank() * 250, num, 250 * group.world()):
        numbers = torch.arange(begin, min(begin + 250, num))
        collector.add_batch(numbers, numbers)
    return collector.merge_ranks()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=50_000)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--kept", type=int, default=KEPT)
    parser.add_argument("--local_rank", "--local-rank", type=int)
    options = parser.parse_args()
    if group.read_rank_and_world().world > 1:
        start_process_group()
    begin, cpu = time.perf_counter(), time.process_time()

    def tell(what: str) -> None:
        if group.rank() == 0:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
            seconds, of_cpu = time.perf_counter() - begin, time.process_time() - cpu
            print(f"{seconds:7.1f} s  {of_cpu:7.1f} s CPU  {memory:5.2f} GiB  {what}", flush=True)

    tell(f"{group.world()} ranks, {torch.get_num_threads()} threads, {group.device().type}")
    first = collected(options.num, options.size, options.kept, 0.1)
    tell("the first set collected")
    second = collected(options.num, options.size, options.kept, 0.12)
    tell("the second set collected")
    tell(f"fid {distances.compute_frechet_distance(first.mean, first.covariance, second.mean, second.covariance):.6g}")
    tell("kid {:.6g} +- {:.2g}".format(*distances.compute_kid(first.kept, second.kept)))
    tell(
        ", ".join(
            f"{name} {value:.6g}" for name, value in distances.measure_manifold_overlap(first.kept, second.kept).items()
        )
    )
    group.leave_process_group()


if __name__ == "__main__":
    main()
