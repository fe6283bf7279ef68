"""The metrics of the built-in data by nn/classifier.py, a small classifier of Fashion-MNIST's ten classes.

Its features are the 64 inputs of the last layer. The features of a clip are means over its frames, each cropped to the
item (clips.py). Pictures of the built-in emoji are measured by the image tower in this package.
"""

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor
from torch.nn import functional as F

from dstrain.data.builtin import moving
from dstrain.data.builtin.fashion import FASHION, classify_shades, map_captions_to_item_and_shade
from dstrain.encoders import emoji
from dstrain.encoders.precision import use_precision
from dstrain.metrics.clips import average_channels, classify_motions, crop_around_items
from dstrain.metrics.network import Features, convert_to_rgb, count_true_by_class
from dstrain.nn.classifier import BUILTIN, FILE, Classifier
from dstrain.recipe import ConfigError

SIDE = 28  # pixels of an image that the network sees


def convert_to_classifier_input(images: Tensor) -> Tensor:
    """Converts images uint8 (N, C, H, W) to the input of the built-in classifier: luminance (Rec. 601), float32 (N, 1,
    28, 28) in [0, 1].

    Images of 28 x 28 pixels are not resized. Others are resized to 32 x 32, bilinear and antialiased, and cropped to
    the middle 28 x 28, since the built-in data have a border at any size but 28.
    """
    images = convert_to_rgb(images).float() / 255
    images = torch.einsum("nchw,c->nhw", images, images.new_tensor([0.299, 0.587, 0.114]))[:, None]
    if images.shape[-2:] == (SIDE, SIDE):
        return images
    if images.shape[-2:] != (32, 32):
        images = F.interpolate(images, (32, 32), mode="bilinear", antialias=True)
    return images[:, :, 2:-2, 2:-2]


class Builtin(Features):
    """Describes pictures and clips by the built-in classifier."""

    name = "builtin"
    size = 64
    classes = FASHION
    videos = None
    parts = ("item", "motion")  # of what a caption of a clip asks for; of an image's it is item and shade

    def __init__(self, device: torch.device) -> None:
        path = BUILTIN / FILE
        self.fingerprint = blake2b(path.read_bytes(), digest_size=8).hexdigest()
        self._network, self._device = Classifier.load(path).to(device), device

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Returns features (N, 64) and logits (N, 10), float32, of uint8 (N, C, H, W) or of clips (N, T, C, H, W)."""
        images = images.to(self._device)
        with use_precision("fp32"):
            if images.ndim == 4:
                return self._network(convert_to_classifier_input(images))
            features, logits = self._network(crop_around_items(average_channels(images).flatten(0, 1)))
        clips, frames = images.shape[:2]
        return features.view(clips, frames, -1).mean(1), logits.view(clips, frames, -1).mean(1)

    def require_captions_of_known_classes(self, captions: Sequence[str], clips: bool = True) -> None:
        """Raises ConfigError if one of the captions does not occur in the built-in clips or, with clips=False, in the
        built-in images.
        """
        known = moving.map_captions_to_item_and_motion() if clips else map_captions_to_item_and_shade()
        if unknown := [caption for caption in captions if caption not in known]:
            raise ConfigError(
                f"{unknown[0]!r} is no caption of the built-in {'clips' if clips else 'images'}, such as "
                f"{next(iter(known))!r}: ask for those, or leave out the metric accuracy"
            )

    def count_correct_by_class(
        self, images: Tensor, logits: Tensor, labels: Tensor | None, captions: list[str] | None
    ) -> Tensor | None:
        """Counts correct images by the items that their captions name. Returns float64 (4, classes of items): the
        numbers of images that show all that the caption says, of all images, of images with the right item, and of
        images with the right motion (clips) or shade (images). Sets `parts` to the names of the last two rows.

        Images with labels, or without captions, are counted by Features.count_correct_by_class instead. Raises
        ConfigError for a caption that the built-in data do not have.
        """
        clips = images.ndim == 5
        if captions is None or (labels is not None and not clips):
            return super().count_correct_by_class(images, logits, labels, captions)
        self.require_captions_of_known_classes(captions, clips)
        known = moving.map_captions_to_item_and_motion() if clips else map_captions_to_item_and_shade()
        labels, asked = torch.tensor([known[caption] for caption in captions], device=logits.device).T
        item = logits.argmax(1) == labels
        self.parts = ("item", "motion" if clips else "shade")
        if clips:
            second = classify_motions(average_channels(images.to(logits.device))) == asked
        else:
            second = (
                classify_shades((255 * convert_to_classifier_input(images.to(logits.device))[:, 0]).round()) == asked
            )
        return count_true_by_class(labels, len(FASHION), item & second, torch.ones_like(item), item, second)


class Emoji(Features):
    """Embeds pictures by the emoji image tower, comparable with the embeddings of the built-in emoji's names."""

    name = "emoji"
    size = emoji.DIM

    def __init__(self, device: torch.device) -> None:
        self.tower, self._device = emoji.EmojiTower(device), device
        self.fingerprint = self.tower.fingerprint

    def __call__(self, images: Tensor) -> tuple[Tensor, None]:
        with use_precision("fp32"):
            return self.tower.encode(convert_to_rgb(images)), None

    def embed_texts(self, captions: list[str]) -> Tensor:
        """Returns the embeddings, float32 (N, D), of the names of built-in emoji. Raises ConfigError if one of the
        captions is no such name.
        """
        embeds = emoji.look_up_text_embeds(captions)
        if embeds is None:
            raise ConfigError(
                "--features emoji: it knows the names of the built-in emoji alone, and one of these "
                "captions is none of them: draw for those names, or take --features clip:FOLDER"
            )
        return embeds.to(self._device)
