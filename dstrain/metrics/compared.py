"""Opens the reference that metrics compare with: statistics of a file, and images for statistics that it lacks."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from dstrain.data.open import open_sources
from dstrain.distributed import group
from dstrain.metrics import reference, table
from dstrain.metrics.images import Images, Sourced, open_image_set
from dstrain.metrics.network import Features
from dstrain.metrics.statistics import Statistics
from dstrain.recipe import ConfigError, Data, reword_errors

Collect = Callable[[Images, dict[str, Features]], dict[str, Statistics]]


@dataclass(frozen=True)
class Compared:
    """Holds an opened reference: the statistics that its file has, and images for the statistics that it lacks."""

    statistics: dict[str, Statistics] = field(default_factory=dict)  # of a file, by name of their network
    images: Images | None = None
    networks: dict[str, Features] = field(default_factory=dict)  # of metrics whose statistics are taken of `images`
    place: str | None = None  # its name; None: nothing is compared
    identity: object = None  # another one where the images may be others

    def collect_missing_statistics(self, collect: Collect) -> dict[str, Statistics]:
        """Returns {network's name: statistics of the reference}: those of its file and, if the reference has images,
        those that `collect(images, networks)` returns. If both have mean and covariance, takes those of the file; if
        both have features, takes those of `collect`.
        """
        statistics = dict(self.statistics)
        if self.images is None:
            return statistics
        for name, other in collect(self.images, self.networks).items():
            mine = statistics.get(name, other)
            statistics[name] = replace(
                other,
                mean=other.mean if mine.mean is None else mine.mean,
                covariance=other.covariance if mine.covariance is None else mine.covariance,
                kept=mine.kept if other.kept is None else other.kept,
            )
        return statistics


def open_reference(path: Path, networks: dict[str, Features], max_features: int, upright: bool = True) -> Compared:
    """Opens the reference for metrics: a file of statistics, or a set of images. Opens images only if the file does not
    hold all statistics that the metrics need.

    networks       {metric: its network}
    max_features   the most features of a set that the metrics kid, pr and dc compare
    upright        as data.upright: whether images are turned and mirrored as their EXIF data say

    Raises ConfigError if the path cannot be read, if the file was made with other weights, if it has neither the
    statistics that the metrics need nor images, or if it has too few images for them.
    """
    statistics = {}
    if path.suffix in reference.SUFFIXES and path.is_file():
        by_name = {network.name: network for network in networks.values()}
        statistics = reference.read_reference_statistics(path, by_name.values(), group.device())
    lacking = table.list_metrics_without_statistics(networks, statistics)
    if lacking and not reference.can_hold_images(path):
        by = " and ".join(dict.fromkeys(networks[name].name for name in lacking))
        raise ConfigError(
            f"--reference {path} holds no {' and no '.join(sorted(table.list_needed_statistic_names(lacking)))} for "
            f"--metrics {','.join(lacking)}, which are taken by {by}: give images, or write it with "
            "--write-reference"
        )
    images = open_image_set(path, "--reference", upright) if lacking else None
    for name, network in networks.items():
        if "kept" in table.METRICS[name].needs:
            known = images if name in lacking else statistics[network.name].kept
            assert known is not None
            table.require_enough_for_neighbours((name,), min(len(known), max_features), f" of --reference {path}")
    status = path.stat()
    identity = [os.path.abspath(path), status.st_size, status.st_mtime_ns, upright]
    return Compared(statistics, images, {name: networks[name] for name in lacking}, str(path), identity)


def open_recipe_reference(location: str, data: Data, networks: dict[str, Features], max_features: int) -> Compared:
    """Opens the reference that the recipe names as samples.reference, for a run on `data`. A path to an .npz, .pkl or
    .zip file is opened by `open_reference`; any other as data.path would be, with images scaled and centre-cropped to
    data.image_size, whatever data.crop and data.buckets say.

    location       samples.reference of the recipe
    networks       {metric: its network}
    max_features   the most features of a set that the metrics kid, pr and dc compare

    Raises ConfigError if no metric compares with a reference, or if the reference cannot be read, holds no pixels, or
    has too few images for the metrics.
    """
    key, path = f"samples.reference={location}", os.path.expanduser(location)
    if not networks:
        raise ConfigError(f"{key}: none of samples.metrics compares with it: leave it out")
    if path.endswith((*reference.SUFFIXES, ".zip")) and (os.path.isfile(path) or not os.path.exists(path)):
        with reword_errors(options={"--reference ": "samples.reference="}):
            return open_reference(Path(path), networks, max_features, data.upright)
    names = ("image_size", "height", "num_frames", "channels", "draft", "upright")
    shape = {name: getattr(data, name) for name in names}
    section = Data(path=path, flip=False, frame_stride=data.frame_stride, index=data.index, cache=data.cache, **shape)
    with reword_errors(options={"data.path=": "samples.reference="}):
        source = open_sources(section)[0].make_single_shape_view()
    if not {"image", "video"} & source.read_first_readable().keys():
        raise ConfigError(f"{key} holds no pictures: name those that its codes were made of, or statistics of them")
    table.require_enough_images(len(source), f"{key}: ")
    table.require_enough_for_neighbours(networks, min(len(source), max_features), f" of {key}")
    return Compared({}, Sourced(source), networks, location, source.compute_fingerprint())
