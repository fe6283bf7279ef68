"""The type of a network that turns images into the features which metrics compare."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from dstrain.recipe import ConfigError


class Features(ABC):
    """Describes each image by a vector, by a frozen network in fp32.

    name         the kind, such as inception; figures of different kinds are never compared
    size         D, the length of the vector
    fingerprint  a short hash of what decides the features: weights and preprocessing
    classes      names of what the logits tell apart, None where the classes have no use here
    videos       whether it takes clips uint8 (N, T, C, H, W) instead of images; None: it takes both
    spatial      for sFID: the network whose features keep positions, None for networks without one
    parts        names of what `count_correct` tells beside the classes
    """

    name: str
    size: int
    fingerprint: str
    classes: tuple[str, ...] | None = None
    videos: bool | None = False
    spatial: "Features | None" = None
    parts: tuple[str, ...] = ()

    @abstractmethod
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns features float32 (N, D), and logits float32 (N, K) or None, of uint8 (N, C, H, W) on any device."""

    def embed_texts(self, captions: list[str]) -> Tensor | None:
        """Returns vectors float32 (N, D) of texts, comparable with those of images; None: it reads no texts."""
        return None

    def require_captions(self, captions: Sequence[str]) -> None:
        """Raises ConfigError if `count_correct` does not know these captions of clips. By default it knows all."""

    def count_correct(
        self, images: Tensor, logits: Tensor, labels: Tensor | None, captions: list[str] | None
    ) -> Tensor | None:
        """Returns for each class how many images the network assigns to their label, and how many images have this
        label: float64 (2, classes). logits (n, classes), labels (n,).

        A subclass may use the captions, and may add a row for each of `parts`: the number of images that show this part
        rightly. Here only labels are used. Returns None if they are None. Raises ConfigError if a label is no class.
        """
        if labels is None:
            return None
        labels = labels.to(logits.device)
        wrong = labels[(labels < 0) | (labels >= len(self.classes))]
        if len(wrong):
            raise ConfigError(
                f"a label is {int(wrong[0])}, and {self.name} knows {len(self.classes)} classes: "
                "leave out the metric accuracy"
            )
        right = logits.argmax(1) == labels
        return sum_by_class(labels, len(self.classes), right, torch.ones_like(right))


def sum_by_class(labels: Tensor, classes: int, *rows: Tensor) -> Tensor:
    """Returns for each of the rows, bool (n,), how many of its values are True in each class of labels (n,): float64
    (rows, classes).
    """
    sums = torch.zeros(len(rows), classes, dtype=torch.float64, device=labels.device)
    return sums.index_add_(1, labels, torch.stack(rows).double())


def make_rgb(images: Tensor) -> Tensor:
    """Returns images uint8 (..., 1, 3 or 4, H, W) as RGB (..., 3, H, W): repeats a grey channel, and blends RGBA with
    a white background.
    """
    channels = images.shape[-3]
    if channels == 4:
        colour, alpha = images[..., :3, :, :].float(), images[..., 3:, :, :].float() / 255
        return (colour * alpha + 255 * (1 - alpha)).round().to(torch.uint8)
    return images.expand(*images.shape[:-3], 3, *images.shape[-2:]) if channels == 1 else images
