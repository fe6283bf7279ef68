"""What metrics compare with: statistics of a file, and images for what the file lacks."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from dstrain.distributed import group
from dstrain.metrics import reference, table
from dstrain.metrics.images import Images, open_set
from dstrain.metrics.network import Features
from dstrain.metrics.statistics import Statistics
from dstrain.recipe import ConfigError

Collect = Callable[[Images, dict[str, Features]], dict[str, Statistics]]


@dataclass(frozen=True)
class Compared:
    """A reference that is opened and not yet read."""

    statistics: dict[str, Statistics] = field(default_factory=dict)  # of a file, by name of their network
    images: Images | None = None
    networks: dict[str, Features] = field(default_factory=dict)  # of metrics whose statistics are taken of `images`
    place: str | None = None  # its name; None: nothing is compared

    def read(self, collect: Collect) -> dict[str, Statistics]:
        """Returns statistics by name of their network; those of the file go before those of the images."""
        statistics = dict(self.statistics)
        if self.images is None:
            return statistics
        for name, other in collect(self.images, self.networks).items():
            mine = statistics.get(name, other)
            statistics[name] = replace(
                other,
                mean=other.mean if mine.mean is None else mine.mean,
                covariance=other.covariance if mine.covariance is None else mine.covariance,
            )
        return statistics


def open_compared(path: Path, networks: dict[str, Features], kept: int) -> Compared:
    """Opens the reference at a path, a file of statistics or a set of images, for the metrics in `networks`.

    Raises ConfigError if it holds less than the metrics need.
    """
    statistics = {}
    if path.suffix in reference.SUFFIXES and path.is_file():
        by_name = {network.name: network for network in networks.values()}
        statistics = reference.read_reference(path, by_name.values(), group.device())
    lacking = table.list_lacking(networks, statistics)
    if lacking and not reference.has_images(path):
        by = " and ".join(dict.fromkeys(networks[name].name for name in lacking))
        raise ConfigError(
            f"--reference {path} holds no {' and no '.join(sorted(table.name_needs(lacking)))} for "
            f"--metrics {','.join(lacking)}, which are taken by {by}: give images, or write it with "
            "--write-reference"
        )
    images = open_set(path, "--reference") if lacking else None
    for name, network in networks.items():
        if "kept" in table.METRICS[name].needs:
            known = images if name in lacking else statistics[network.name].kept
            assert known is not None
            table.require_neighbours((name,), min(len(known), kept), f" of --reference {path}")
    return Compared(statistics, images, {name: networks[name] for name in lacking}, str(path))
