"""The classifier in the package: how good it is, what it takes, and whether samples show what was asked for."""

import numpy as np
import pytest
import torch

from dstrain.data.builtin.fashion import FASHION, Fashion
from dstrain.data.builtin.moving import MOTIONS, MovingFashion
from dstrain.metrics import distances
from dstrain.metrics.builtin import BUILTIN, FILE
from dstrain.metrics.features import open_feature_network
from dstrain.recipe import ConfigError

WEIGHTS = 1_000_000  # bytes, the most that the package may carry


@pytest.fixture(scope="module")
def network():
    return open_feature_network("builtin", torch.device("cpu"))


def images_of(split: str, size: int = 28, channels: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    source = Fashion(size, channels, split)
    images = torch.stack([source[number]["image"] for number in range(len(source))])
    return images, torch.from_numpy(source.labels).long()


@pytest.mark.parametrize("size, channels, least", [(28, 1, 0.93), (32, 3, 0.93), (64, 4, 0.92), (16, 1, 0.9)])
def test_accuracy_on_test_images(network, size, channels, least):
    """Oracle: the labels of the 500 packaged test images, at every size and number of channels that data can have."""
    images, labels = images_of("held_out", size, channels)
    features, logits = network(images)
    assert features.shape == (500, network.size) and features.dtype == logits.dtype == torch.float32
    assert (logits.argmax(1) == labels).float().mean() >= least
    assert (BUILTIN / FILE).stat().st_size < WEIGHTS and network.classes == FASHION


def test_sizes_and_colours_do_not_matter(network):
    """Oracle: the images of 28 pixels: a border of two, and three equal channels, are the same images."""
    features = network(images_of("held_out")[0][:50])[0]
    torch.testing.assert_close(network(images_of("held_out", 32, 3)[0][:50])[0], features, atol=1e-4, rtol=1e-5)


def test_distances_tell_pictures_apart(network):
    """Oracle: the order by construction: unseen images, blurred ones, three classes, and noise against the data."""

    def moments(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = network(images)[0].double()
        return features.mean(0), features.T.cov()

    train, unseen = moments(images_of("train")[0]), images_of("held_out")[0]
    noise = torch.randint(0, 256, unseen.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    blurred = torch.nn.functional.avg_pool2d(unseen.float(), 5, 1, 2).byte()
    shoes = unseen[[number for number in range(500) if number % 10 in (5, 7, 9)]]
    found = [distances.compute_frechet_distance(*train, *moments(images)) for images in (unseen, blurred, shoes, noise)]
    assert found == sorted(found) and found[0] < 3 and found[1] > 3 * found[0] and found[-1] > 100


def test_labels_by_class(network):
    """Oracle: numpy's counts of the largest logit, by class; a label beyond the classes is refused."""
    images, labels = images_of("held_out")
    labels = torch.where(torch.arange(500) < 250, labels, (labels + 1) % 10)
    logits = network(images)[1]
    right, number = network.count_correct_by_class(images, logits, labels, None).numpy()
    hits = (logits.argmax(1) == labels).numpy()
    assert right.tolist() == [hits[labels.numpy() == label].sum() for label in range(10)]
    assert (
        number.tolist() == np.bincount(labels).tolist()
        and network.count_correct_by_class(images, logits, None, None) is None
    )
    with pytest.raises(ConfigError, match="a label is 10, and builtin knows 10 classes"):
        network.count_correct_by_class(images, logits, labels + 1, None)


def test_images_show_their_captions(network):
    """Oracle: the captions of true images, by item and by shade; with the other shade none is right. Images with a
    border and three channels show the same.
    """
    source = Fashion(28, 1, "held_out", captioned=True)
    images, captions = source.images[:, None], [source.read_captions(n)[0] for n in range(len(source))]
    logits = network(images)[1]
    both, number, item, shade = network.count_correct_by_class(images, logits, None, captions).sum(1).tolist()
    assert number == shade == 500 and both == item > 400 and network.parts == ("item", "shade")
    other = {"dark": "light", "light": "dark"}
    swapped = [text.replace(word, other[word]) for text in captions for word in text.split()[1:2]]
    assert network.count_correct_by_class(images, logits, None, swapped).sum(1).tolist() == [0, 500, item, 0]
    bordered = Fashion(32, 3, "held_out")
    images = torch.stack([bordered[n]["image"] for n in range(500)])
    assert network.count_correct_by_class(images, logits, None, captions).sum(1)[3] == 500
    with pytest.raises(ConfigError, match="'a hat' is no caption of the built-in images, such as 'a dark t-shirt'"):
        network.count_correct_by_class(images[:1], logits[:1], None, ["a hat"])


def test_clips_show_their_captions(network):
    """Oracle: the captions of true clips, by item and by motion; those of the clips before them are mostly wrong."""
    source = MovingFashion(9, 24, 24, 1, "held_out")
    numbers = range(0, len(source), 25)
    clips, captions = torch.stack([source[n]["video"] for n in numbers]), [source.compose_caption(n) for n in numbers]
    features, logits = network(clips)
    assert features.shape == (100, network.size)
    both, number, item, motion = network.count_correct_by_class(clips, logits, None, captions).sum(1).tolist()
    assert number == motion == 100 and both == item > 75 and network.parts == ("item", "motion")
    both, _, item, motion = (
        network.count_correct_by_class(clips, logits, None, captions[1:] + captions[:1]).sum(1).tolist()
    )
    words = [tuple(motion for motion in MOTIONS if caption.endswith(motion)) for caption in captions]
    assert motion == sum(a == b for a, b in zip(words, words[1:] + words[:1])) and both <= min(item, motion) < 40
    with pytest.raises(ConfigError, match="'a hat' is no caption of the built-in clips, such as 'a t-shirt moving"):
        network.count_correct_by_class(clips[:1], logits[:1], None, ["a hat"])
