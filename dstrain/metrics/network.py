"""The type of a network that turns images into the features which metrics compare."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from dstrain.recipe import ConfigError


class Features(ABC):
    """A frozen network that computes one feature vector of each image or clip, in fp32.

    name         the kind of network, such as inception; statistics of different kinds are never compared
    size         D, the length of a feature vector
    fingerprint  a short hash of the weights and the preprocessing; statistics are compared only if it is equal
    classes      names of the classes of the logits; None if accuracy cannot be measured with this network
    videos       True: the network takes clips uint8 (N, T, C, H, W); False: images; None: both
    spatial      the network that sFID needs, whose features keep positions within the image; None: there is none
    parts        names of the rows that `count_correct_by_class` returns after the first two
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
        """Returns the embeddings of captions, float32 (N, D), which can be compared with features of images. This
        default returns None: the network has no text encoder.
        """
        return None

    def require_captions_of_known_classes(self, captions: Sequence[str]) -> None:
        """Raises ConfigError if one of the captions is such that `count_correct_by_class` cannot count clips with it.
        This default never raises.
        """

    def count_correct_by_class(
        self, images: Tensor, logits: Tensor, labels: Tensor | None, captions: list[str] | None
    ) -> Tensor | None:
        """Returns float64 (2, classes): for each class, how many images with this label the network assigns to the
        class, and how many images have this label. Returns None if `labels` is None.

        logits     float (n, classes), the network's output for `images`
        labels     int64 (n,)
        captions   not used here; a subclass may use them

        A subclass may add a row for each of `parts`, such as the motion: how many images show it right. Raises
        ConfigError if a label is below 0 or too large.
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
        return count_true_by_class(labels, len(self.classes), right, torch.ones_like(right))


def count_true_by_class(labels: Tensor, classes: int, *rows: Tensor) -> Tensor:
    """Returns float64 (len(rows), classes): how many items of each class are True in each row.

    labels   int64 (n,), the class of each item
    rows     bool (n,), one value for each item
    """
    sums = torch.zeros(len(rows), classes, dtype=torch.float64, device=labels.device)
    return sums.index_add_(1, labels, torch.stack(rows).double())


def convert_to_rgb(images: Tensor) -> Tensor:
    """Converts images uint8 (..., 1, 3 or 4, H, W) to RGB uint8 (..., 3, H, W): repeats a grey channel, blends RGBA
    with a white background, and returns RGB as it is.
    """
    channels = images.shape[-3]
    if channels == 4:
        colour, alpha = images[..., :3, :, :].float(), images[..., 3:, :, :].float() / 255
        return (colour * alpha + 255 * (1 - alpha)).round().to(torch.uint8)
    return images.expand(*images.shape[:-3], 3, *images.shape[-2:]) if channels == 1 else images
