"""Lists the metrics by name, with the networks and statistics that each needs, and computes their values."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dstrain.distributed import group
from dstrain.distributed.progress import get_phases
from dstrain.metrics import distances
from dstrain.metrics.features import BUILT_IN, SOURCES, open_feature_network, require_known_network_kind
from dstrain.metrics.images import Batch, Images, ImagesWithFirstBatch
from dstrain.metrics.network import Features
from dstrain.metrics.reference import INCEPTIONS
from dstrain.metrics.statistics import KEPT, Collector, Statistics
from dstrain.recipe import ConfigError

Figures = dict[str, tuple[float, float | None]]  # name: value, and its deviation over subsets or splits
_IMAGES = (*INCEPTIONS, "dinov2", "clip", "builtin")
_CANDIDATES = 100  # captions among which retrieval looks for an image's own


@dataclass(frozen=True)
class Metric:
    """Describes a metric.

    kinds    the kinds of networks whose features it can use.
    needs    the attributes of Statistics that it reads.
    figures  computes its values from (name, network, statistics of the drawn set, statistics of the reference).
    """

    kinds: Sequence[str]
    needs: Sequence[str]
    figures: Callable[[str, Features, Statistics, Statistics | None], Figures]
    compares: bool = True  # with a reference
    spatial: bool = False  # with the network's `spatial`


def _compute_frechet_figures(name: str, network: Features, drawn: Statistics, reference: Statistics) -> Figures:
    """Returns {name: (Frechet distance between the features of the two sets, None)}."""
    return {
        name: (
            distances.compute_frechet_distance(drawn.mean, drawn.covariance, reference.mean, reference.covariance),
            None,
        )
    }


def _compute_kid_figures(name: str, network: Features, drawn: Statistics, reference: Statistics) -> Figures:
    """Returns {name: (KID, its standard deviation over subsets)}."""
    return {name: distances.compute_kid(drawn.kept, reference.kept)}


def _compute_manifold_figures(name: str, network: Features, drawn: Statistics, reference: Statistics) -> Figures:
    """Returns precision and recall if `name` is pr, else density and coverage, as {name: (value, None)}."""
    values = distances.measure_manifold_overlap(drawn.kept, reference.kept)
    names = ("precision", "recall") if name == "pr" else ("density", "coverage")
    return {name: (values[name], None) for name in names}


def _compute_inception_figures(name: str, network: Features, drawn: Statistics, reference: None) -> Figures:
    """Returns {"inception_score": (mean, its standard deviation over splits)}."""
    return {"inception_score": distances.compute_inception_score(*drawn.scores)}


def _compute_caption_similarity(name: str, network: Features, drawn: Statistics, reference: None) -> Figures:
    """Returns {name: (similarity of images and captions, None)}; {} if it was not measured."""
    return {} if drawn.text_score is None else {name: (drawn.text_score, None)}


def _compute_retrieval_figures(name: str, network: Features, drawn: Statistics, reference: None) -> Figures:
    """Returns {NAME: (share, None), NAME_by_chance: (share, None)}: the share of images that are nearest to their own
    caption among all captions, and the share to expect if the captions were guessed. NAME is `name`.
    """
    share, candidates = drawn.retrieved
    return {name: (share, None), f"{name}_by_chance": (1 / candidates, None)}


def _compute_accuracy_figures(name: str, network: Features, drawn: Statistics, reference: None) -> Figures:
    """Returns shares of images that are right, as {key: (share, None)}; {} if accuracy was not measured. With NAME for
    `name`:

    NAME         all images; right in all parts
    NAME_PART    all images; right in one part, such as the motion
    NAME/CLASS   images of one class, for each class that occurs
    """
    if drawn.right is None:
        return {}
    right, number, *parts = drawn.right
    shares = {
        f"{name}/{label}": (share.item(), None)
        for label, share, count in zip(network.classes, right / number, number)
        if count
    }
    totals = {name: right} | {f"{name}_{part}": counts for part, counts in zip(network.parts, parts)}
    return {key: ((counts.sum() / number.sum()).item(), None) for key, counts in totals.items()} | shares


_MOMENTS, _WITH_LOGITS = ("mean", "covariance"), ("inception", "pytorch-fid", "clean-fid")
METRICS = {
    "fid": Metric(INCEPTIONS, _MOMENTS, _compute_frechet_figures),
    "sfid": Metric(_WITH_LOGITS, _MOMENTS, _compute_frechet_figures, spatial=True),
    "kid": Metric(INCEPTIONS, ("kept",), _compute_kid_figures),
    "is": Metric(_WITH_LOGITS, ("scores",), _compute_inception_figures, compares=False),
    "pr": Metric(_IMAGES, ("kept",), _compute_manifold_figures),
    "dc": Metric(_IMAGES, ("kept",), _compute_manifold_figures),
    "fd_dinov2": Metric(("dinov2",), _MOMENTS, _compute_frechet_figures),
    "fd_clip": Metric(("clip",), _MOMENTS, _compute_frechet_figures),
    "clip_score": Metric(("clip",), ("text_score",), _compute_caption_similarity, compares=False),
    "retrieval": Metric(("emoji", "clip"), ("retrieved",), _compute_retrieval_figures, compares=False),
    "fvd": Metric(("i3d", "videomae"), _MOMENTS, _compute_frechet_figures),
    "fd": Metric(("builtin",), _MOMENTS, _compute_frechet_figures),
    "accuracy": Metric(("builtin",), ("right",), _compute_accuracy_figures, compares=False),
}
_APART = ("accuracy", "clip_score")  # tell pictures of captions that data.leave_out names apart
# Of the metrics with one figure, those of which the lowest is the best, and the highest.
LOWER, HIGHER = ("fd", "fid", "sfid", "kid", "fd_dinov2", "fd_clip", "fvd"), ("accuracy", "clip_score", "retrieval")


def require_known_metrics(metrics: Sequence[str], network_names: Sequence[str]) -> None:
    """Raises ConfigError if one of the metrics is unknown, or the kind of a network. network_names: KIND:PATH or
    the name of a built-in network, each.
    """
    unknown = [name for name in metrics if name not in METRICS]
    if unknown:
        raise ConfigError(
            f"--metrics {','.join(unknown)}: known are {', '.join(METRICS)}; dstrain evaluate takes scenes, too, alone"
        )
    for words in network_names:
        require_known_network_kind(words)


def open_metric_networks(metrics: Sequence[str], network_names: Sequence[str]) -> dict[str, Features]:
    """Returns {metric: its network}, and opens each network once. A metric uses the first of `network_names`
    (KIND:PATH) whose kind suits it, else a built-in network.

    Raises ConfigError if there is no network for a metric, if one of `network_names` is used by no metric, or if
    `require_known_metrics` or `open_feature_network` does.
    """
    require_known_metrics(metrics, network_names)
    chosen = {}
    for name in metrics:
        kinds = METRICS[name].kinds
        chosen[name] = next(
            (words for words in network_names if words.partition(":")[0] in kinds),
            next((kind for kind in kinds if kind in BUILT_IN), None),
        )
        if chosen[name] is None:
            raise ConfigError(
                f"--metrics {name} needs a network: --features "
                + " or ".join(f"{kind}:PATH ({SOURCES[kind]})" for kind in kinds[:2])
            )
    unused = [words for words in network_names if words not in chosen.values()]
    if unused:
        raise ConfigError(f"--features {unused[0]}: no metric of --metrics {','.join(metrics)} takes it; leave it out")
    opened = {words: open_feature_network(words) for words in dict.fromkeys(chosen.values())}
    return {name: opened[words].spatial if METRICS[name].spatial else opened[words] for name, words in chosen.items()}


def collect_statistics(
    images: Images,
    networks: dict[str, Features],
    size: int,
    keep: int = KEPT,
    is_reference: bool = False,
    progress: Callable[[int], Any] = lambda number: None,
    left_out: Sequence[str] = (),
) -> dict[str, Statistics]:
    """Computes the statistics of a set of images that metrics need, and returns {network's name: statistics}. networks:
    {metric: its network}. All ranks call it together.

    size          images of one rank in a batch.
    keep          the most features that are kept, for kid, pr and dc.
    is_reference  True if the set is the reference: only statistics of metrics with a reference are computed.
    progress      called after each batch with the number of its images.
    left_out      patterns of captions; images with such captions are counted apart, in `left_out` of the result.

    Prints a note if images could not be read. Raises ConfigError if the set has fewer than two images, if it has no
    captions or labels where a metric needs them, or if a network takes clips and the set has images, or the reverse.
    """
    require_enough_images(len(images))
    needs = _find_needed_statistics_by_network(networks, is_reference)
    by_name = {network.name: network for network in networks.values()}
    candidates = tuple(islice(dict.fromkeys(images.captions or ()), _CANDIDATES))
    collectors = {
        name: Collector(
            by_name[name],
            len(images),
            keep * ("kept" in of),
            "mean" in of,
            "scores" in of,
            "text_score" in of,
            "right" in of,
            candidates if "retrieved" in of else (),
            left_out,
        )
        for name, of in needs.items()
    }
    for batch in images.iterate_batches(size):
        for name, collector in collectors.items():
            _require_suitable_batch(batch, by_name[name], needs[name])
            collector.add_batch(batch.numbers, batch.images, batch.labels, batch.captions)
        get_phases().record_progress()
        progress(len(batch.numbers))
    unreadable: dict[str, str] = {}
    for of_rank in group.gather_objects(images.get_unreadable_reasons()):
        unreadable |= of_rank
    if unreadable:
        name, reason = next(iter(unreadable.items()))
        get_phases().print_lines(
            f"note: {len(unreadable)} of {len(images)} images of the reference cannot be read, and others count twice "
            f"for them: {name}: {reason}"
        )
    return {name: collector.merge_ranks() for name, collector in collectors.items()}


def check_images_and_read_first_batch(
    images: Images, networks: dict[str, Features], size: int, keep: int = KEPT
) -> Images:
    """Checks that a set of images suits the metrics, and reads this rank's first batch. Returns the set with this
    batch, for one call of `collect_statistics` with the same `size`. The checks that need no image come first. All
    ranks call it together.

    networks   {metric: its network}
    size       images of one rank in a batch
    keep       the most features that are kept, for kid, pr and dc

    Raises ConfigError if `collect_statistics` would, or if there are too few images for pr and dc.
    """
    require_enough_images(len(images))
    require_enough_for_neighbours(networks, min(len(images), keep))
    if images.clips is not None:
        for metric, network in networks.items():
            _require_matching_media_type(network, images.clips)
            if images.clips and images.captions and "right" in METRICS[metric].needs:
                network.require_captions_of_known_classes(images.captions)
    begun, by_name = ImagesWithFirstBatch(images, size), {network.name: network for network in networks.values()}
    if begun.first is not None:
        for name, needs in _find_needed_statistics_by_network(networks).items():
            _require_suitable_batch(begun.first, by_name[name], needs)
    return begun


def require_enough_for_neighbours(metrics: Iterable[str], count: int, count_suffix: str = "") -> None:
    """Raises ConfigError if pr or dc is among the metrics and there are at most 5 images: these metrics look for 5
    neighbours of each image.

    count          number of images
    count_suffix   text that follows the number in the message
    """
    by_neighbours = [name for name in metrics if name in ("pr", "dc")]
    if by_neighbours and count <= distances.NEIGHBOURS:
        raise ConfigError(
            f"--metrics {','.join(by_neighbours)} looks for {distances.NEIGHBOURS} neighbours of each "
            f"image among {count}{count_suffix}: take {distances.NEIGHBOURS + 1} or more, and as much --kept"
        )


def require_enough_images(count: int, option: str = "") -> None:
    """Raises ConfigError if there are fewer than two images. count: their number. option: text with which the message
    begins.
    """
    if count < 2:
        raise ConfigError(f"{option}metrics compare sets of images: give two or more")


def _find_needed_statistics_by_network(
    networks: dict[str, Features], is_reference: bool = False
) -> dict[str, set[str]]:
    """Returns {network's name: attributes of Statistics that the metrics need}. networks: {metric: its network}. With
    `is_reference`, only those metrics count that are compared with a reference.
    """
    needs: dict[str, set[str]] = {}
    for metric, network in networks.items():
        if METRICS[metric].compares or not is_reference:
            needs.setdefault(network.name, set()).update(METRICS[metric].needs)
    return needs


def _require_suitable_batch(batch: Batch, network: Features, needs: set[str]) -> None:
    """Raises ConfigError if a batch does not suit a network: if one has clips and the other takes images, or if
    captions or labels are missing that one of `needs`, attributes of Statistics, is computed from.
    """
    _require_matching_media_type(network, batch.images.ndim == 5)
    shown = batch.captions if batch.labels is None else batch.labels  # captions of built-in data name the item
    for need, metric, kind, values in (
        ("text_score", "clip_score", "captions", batch.captions),
        ("retrieved", "retrieval", "captions", batch.captions),
        ("right", "accuracy", "labels", shown),
    ):
        if need in needs and values is None:
            raise ConfigError(f"--metrics {metric} needs {kind}, and these images have none: leave it out")


def _require_matching_media_type(network: Features, clips: bool) -> None:
    """Raises ConfigError if the network takes images and `clips` is True, or if it takes clips and `clips` is False."""
    if network.videos not in (None, clips):
        kinds = ("clips", "images") if network.videos else ("images", "clips")
        metrics = ", ".join(name for name, metric in METRICS.items() if network.name in metric.kinds)
        raise ConfigError(
            f"--features {network.name} (for the metrics {metrics}): it takes {kinds[0]}, and these are "
            f"{kinds[1]}: choose other metrics"
        )


def list_metrics_without_statistics(networks: dict[str, Features], statistics: dict[str, Statistics]) -> list[str]:
    """Returns those metrics that are compared with a reference, but for which statistics of the reference are missing.

    networks     {metric: its network}
    statistics   {network's name: known statistics of the reference}
    """
    return [
        name
        for name, network in networks.items()
        if METRICS[name].compares
        and any(getattr(statistics.get(network.name), need, None) is None for need in METRICS[name].needs)
    ]


def list_needed_statistic_names(metrics: Sequence[str]) -> set[str]:
    """Returns the names of the reference's statistics that these metrics need, a subset of {"mean", "covariance",
    "features"}. Each metric must be one that is compared with a reference.
    """
    words = {"mean": "mean", "covariance": "covariance", "kept": "features"}
    return {words[need] for name in metrics for need in METRICS[name].needs}


def compute_metrics(
    networks: dict[str, Features], drawn: dict[str, Statistics], reference: dict[str, Statistics]
) -> Figures:
    """Computes the metrics that are the keys of `networks`. Returns {name: (value, its standard deviation or None)}. A
    metric may have several values, such as precision and recall, or one for each class. All ranks call it together.

    networks    {metric: its network}
    drawn       {network's name: statistics of the generated images}
    reference   {network's name: statistics of the reference}

    Images whose captions data.leave_out names are measured apart, as accuracy_left_out and clip_score_left_out.
    """
    values: Figures = {}
    for name, network in networks.items():
        own, metric = drawn[network.name], METRICS[name]
        values |= metric.figures(name, network, own, reference.get(network.name))
        if own.left_out is not None and name in _APART:
            values |= metric.figures(f"{name}_left_out", network, own.left_out, None)
    return values
