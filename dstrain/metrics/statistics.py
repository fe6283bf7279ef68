"""Collects statistics of a set of images: mean and covariance of the features, some features, and sums for scores.

Memory does not grow with the number of images, except by 8 bytes for each image if an Inception Score is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dstrain.distributed import group
from dstrain.metrics.network import Features
from dstrain.recipe.patterns import match_patterns_to_caption

KEPT = 10_000  # features of a set that KID, precision and recall compare
_ROWS = 512  # features that enter the moments at a time
_SPLITS = 10  # of an Inception Score
_SEED = 2020  # of its shuffle, torch-fidelity's
_APART = "left out: "  # before the names of sums over images that are counted apart


@dataclass
class Statistics:
    """Statistics of a set of images, computed from the features of one network. Statistics not collected are None."""

    mean: Tensor | None = None  # float64 (D,)
    covariance: Tensor | None = None  # float64 (D, D), of the population, divided by count - 1
    count: int | None = None  # images
    kept: Tensor | None = None  # float32 (n, D), evenly spaced over the set
    fingerprint: str | None = None  # of the network; None in files of others
    scores: tuple[Tensor, Tensor, Tensor] | None = None  # arguments of distances.compute_inception_score
    right: Tensor | None = None  # float64 (2 or more, classes), see Features.count_correct_by_class
    text_score: float | None = None  # 100 times the mean cosine with the captions, at least 0
    retrieved: tuple[float, int] | None = None  # share of images whose caption is the nearest of so many
    left_out: "Statistics | None" = None  # `right` and `text_score` of images whose captions data.leave_out names


@dataclass
class Collector:
    """Collects the statistics of a set for one network: `add_batch` adds a batch of this rank, and `merge_ranks`
    returns the statistics over all ranks.
    """

    network: Features
    total: int  # images of the set on all ranks
    keep: int = 0  # features, evenly spaced
    moments: bool = True
    scores: bool = False  # sums of an Inception Score
    texts: bool = False  # compare images with their captions
    right: bool = False  # count those that show their label
    candidates: Sequence[str] = ()  # captions, among which each image's own is looked for
    left_out: Sequence[str] = ()  # patterns of captions whose images are counted apart, of `texts` and `right`
    _slots: list[Tensor] = field(default_factory=list)
    _rows: list[Tensor] = field(default_factory=list)
    _waiting: list[Tensor] = field(default_factory=list)  # features that the moments do not hold yet
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _texts: list[Tensor] = field(default_factory=list)  # embeddings of the candidates, once they are needed

    def __post_init__(self) -> None:
        if self.scores:
            self._split = np.empty(self.total, dtype=np.int64)
            borders = np.arange(_SPLITS + 1) * self.total // _SPLITS
            self._split[np.random.RandomState(_SEED).permutation(self.total)] = np.repeat(
                np.arange(_SPLITS), np.diff(borders)
            )

    def add_batch(
        self, numbers: Tensor, images: Tensor, labels: Tensor | None = None, captions: list[str] | None = None
    ) -> None:
        """Adds a batch to the statistics. Raises ConfigError if `count_correct_by_class` or `embed_texts` of the
        network does.

        numbers    int64 (n,), the indices of the images within the set
        images     uint8 (n, C, H, W), or clips (n, T, C, H, W)
        labels     int64 (n,)
        captions   one for each image
        """
        features, logits = self.network(images)
        self._add_to_sum("count", torch.tensor(len(features), dtype=torch.float64, device=features.device))
        if self.moments:
            self._waiting.append(features)
            self._add_waiting_features_to_moments(min_features=_ROWS)
        self._keep_evenly_spaced_features(numbers, features)
        if self.scores:
            self._add_inception_score_sums(torch.from_numpy(self._split[numbers.numpy()]), logits.double())
        if captions is None or not self.left_out:
            self._add_correct_and_cosines("", images, features, logits, labels, captions)
        else:
            apart = np.array([any(match_patterns_to_caption(self.left_out, caption)) for caption in captions])
            for prefix, rows in (("", ~apart), (_APART, apart)):
                own = torch.from_numpy(rows.nonzero()[0])
                here = own.to(features.device)
                if len(own):
                    self._add_correct_and_cosines(
                        prefix,
                        images[own.to(images.device)],
                        features[here],
                        None if logits is None else logits[here],
                        None if labels is None else labels[own.to(labels.device)],
                        [captions[place] for place in own.tolist()],
                    )
        if self.candidates:
            self._add_to_sum("retrieved", self._mark_images_nearest_own_caption(features, captions).double().sum())

    def _add_correct_and_cosines(
        self,
        prefix: str,
        images: Tensor,
        features: Tensor,
        logits: Tensor | None,
        labels: Tensor | None,
        captions: list[str] | None,
    ) -> None:
        """Adds a batch to two sums. If `right` is set, adds the result of `count_correct_by_class` to the sum
        PREFIXright. If `texts` is set and there are captions, adds the cosines between images and captions, and their
        number, to the sum PREFIXtext.
        """
        if self.right and (right := self.network.count_correct_by_class(images, logits, labels, captions)) is not None:
            self._add_to_sum(f"{prefix}right", right)
        if self.texts and captions is not None:
            cosines = F.cosine_similarity(features, self.network.embed_texts(captions)).double()
            self._add_to_sum(f"{prefix}text", torch.stack((cosines.sum(), torch.ones_like(cosines).sum())))

    def _mark_images_nearest_own_caption(self, features: Tensor, captions: list[str]) -> Tensor:
        """Returns bool (n,): for each image, whether its features are nearer (in cosine) to the embedding of its own
        caption than to those of all other candidates. If its caption is no candidate, the last candidate is left out,
        so that each image is compared with equally many captions.
        """
        if not self._texts:
            self._texts.append(F.normalize(self.network.embed_texts([*self.candidates]), dim=1))  # (K, D)
        own = F.normalize(self.network.embed_texts(captions), dim=1)  # (n, D)
        place = {caption: place for place, caption in enumerate(self.candidates)}
        at = torch.tensor([place.get(caption, len(place) - 1) for caption in captions], device=features.device)
        cosines = features @ self._texts[0].T  # (n, K)
        mine = (features * own).sum(1, keepdim=True)
        return (cosines.scatter(1, at[:, None], -torch.inf) < mine).all(1)

    def _add_to_sum(self, name: str, values: Tensor) -> None:
        """Adds values to the sum with this name, or begins it with them."""
        self._sums[name] = values if name not in self._sums else self._sums[name].add_(values)

    def _add_waiting_features_to_moments(self, min_features: int) -> None:
        """Adds the features in `_waiting` to the sums for mean and covariance, and empties `_waiting`. Does nothing if
        it holds fewer than `min_features` features.
        """
        # A product of few rows costs as much as one of many.
        if sum(map(len, self._waiting)) >= min_features:
            rows, self._waiting = torch.cat(self._waiting).double(), []
            self._add_to_sum("sum", rows.sum(0))
            self._add_to_sum("products", rows.T @ rows)

    def _keep_evenly_spaced_features(self, sample_numbers: Tensor, features: Tensor) -> None:
        """Keeps some of a batch's features: those whose sample numbers are among `keep` numbers evenly spaced over
        the whole set.
        """
        keep = min(self.keep, self.total)
        slots = sample_numbers * keep // self.total
        chosen = (
            slots != (sample_numbers - 1) * keep // self.total
            if keep
            else torch.zeros(len(sample_numbers), dtype=torch.bool)
        )
        self._slots.append(slots[chosen])
        self._rows.append(features[chosen.to(features.device)])

    def _add_inception_score_sums(self, split: Tensor, logits: Tensor) -> None:
        """Adds a batch's logits to the sums of an Inception Score. split: int64 (n,), the split of the set to which
        each image belongs.
        """
        logs = logits.log_softmax(1)
        zeros, split = torch.zeros(_SPLITS, dtype=logs.dtype, device=logs.device), split.to(logs.device)
        self._add_to_sum("p", logs.new_zeros(_SPLITS, logs.shape[1]).index_add_(0, split, logs.exp()))
        self._add_to_sum("p log p", zeros.index_add(0, split, (logs.exp() * logs).sum(1)))
        self._add_to_sum("p count", zeros.index_add(0, split, torch.ones_like(logs[:, 0])))

    def merge_ranks(self) -> Statistics:
        """Returns the statistics of the whole set, merged from the batches that all ranks have added. All ranks must
        call it together, even those that have added none.
        """
        self._add_waiting_features_to_moments(min_features=1)
        self._add_zeros_for_missing_sums()
        sums = {name: group.sum_over_ranks(self._sums[name]) for name in sorted(self._sums)}
        count, result = sums["count"].item(), Statistics(fingerprint=self.network.fingerprint)
        result.count = int(count)
        if self.moments:
            result.mean = sums["sum"] / count
            result.covariance = (sums["products"] - count * torch.outer(result.mean, result.mean)) / (count - 1)
        if self.keep:
            slots = group.gather_rows(torch.cat(self._slots).to(sums["count"].device))
            result.kept = group.gather_rows(torch.cat(self._rows))[slots.argsort()]
        if "p" in sums:
            result.scores = (sums["p"], sums["p log p"], sums["p count"])
        result.left_out = Statistics() if any(name.startswith(_APART) for name in sums) else None
        for prefix, of in (("", result), (_APART, result.left_out)):
            if f"{prefix}right" in sums:
                of.right = sums[f"{prefix}right"].cpu()
            if f"{prefix}text" in sums:
                total, number = sums[f"{prefix}text"].tolist()
                of.text_score = max(100 * total / number, 0.0)
        if "retrieved" in sums:
            result.retrieved = sums["retrieved"].item() / count, len(self.candidates)
        return result

    def _add_zeros_for_missing_sums(self) -> None:
        """Adds zeros for each sum that only other ranks have, so that all ranks reduce the same tensors. All ranks call
        it together.
        """
        shapes = {}
        for sums in group.gather_objects({name: tuple(values.shape) for name, values in self._sums.items()}):
            shapes |= sums
        for name, shape in shapes.items():
            if name not in self._sums:
                self._sums[name] = torch.zeros(shape, dtype=torch.float64, device=group.device())
        if not self._rows:
            self._slots.append(torch.zeros(0, dtype=torch.int64))
            self._rows.append(torch.zeros(0, self.network.size, device=group.device()))
