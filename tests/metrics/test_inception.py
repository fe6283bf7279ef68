"""The Inception of FID against torchvision, torch-fidelity, pytorch-fid and clean-fid, with seeded weights."""

import numpy as np
import pytest
import torch
from torchvision.models import inception

from dstrain.metrics.features import open_feature_network
from dstrain.metrics.inception import resize_as_clean_fid, resize_as_tensorflow
from dstrain.recipe import ConfigError
from tests.metrics.oracles import noise, seeded_inception


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return seeded_inception(tmp_path_factory.mktemp("inception") / "pt_inception.pth")


@torch.no_grad()
def test_blocks_of_torchvision(weights):
    """Oracle: torchvision's blocks, which take the same weights by name; pools differ at the border, and in 7c."""
    network = inception.Inception3(num_classes=1008, aux_logits=False, init_weights=False).eval()
    network.load_state_dict(torch.load(weights, weights_only=True))
    ours = open_feature_network(f"inception:{weights}")._network
    x = torch.rand(1, 3, 107, 123, generator=torch.Generator().manual_seed(0)) * 2 - 1
    y = network.maxpool2(
        network.Conv2d_4a_3x3(
            network.Conv2d_3b_1x1(
                network.maxpool1(network.Conv2d_2b_3x3(network.Conv2d_2a_3x3(network.Conv2d_1a_3x3(x))))
            )
        )
    )
    assert torch.equal(ours(x, until="Mixed_5b"), y)
    for name in ours.blocks[:-1]:
        inner = slice(None) if name in ("Mixed_6a", "Mixed_7a") else slice(1, -1)
        block, expected = getattr(ours, name)(y), getattr(network, name)(y)
        inside = torch.testing.assert_close(block[..., inner, inner], expected[..., inner, inner])
        assert inside is None and (torch.equal(block, expected) == (inner == slice(None)))
        y = expected
    last, expected = ours.Mixed_7c(y), network.Mixed_7c(y)
    assert torch.equal(last[:, :-192], expected[:, :-192]) and not torch.equal(last[:, -192:], expected[:, -192:])


def test_torch_fidelity(weights):
    """Oracle: torch-fidelity's features and logits without bias, of images that are reduced and enlarged."""
    reference = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    extractor = reference.FeatureExtractorInceptionV3(
        "inception-v3-compat", ["2048", "logits_unbiased"], feature_extractor_weights_path=str(weights)
    )
    images = noise(2, 28, 320)
    for ours, theirs in zip(open_feature_network(f"inception:{weights}")(images), extractor(images)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_pytorch_fid(weights, monkeypatch):
    """Oracle: pytorch-fid's features."""
    reference = pytest.importorskip("pytorch_fid.inception")
    monkeypatch.setattr(reference, "load_state_dict_from_url", lambda *_, **__: torch.load(weights, weights_only=True))
    images = noise(2)
    expected = reference.InceptionV3([3]).eval()(images.float() / 255)[0][:, :, 0, 0]
    features, _ = open_feature_network(f"pytorch-fid:{weights}")(images)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)


def test_clean_fid():
    """Oracle: clean-fid's resize."""
    resize = pytest.importorskip("cleanfid.resize").build_resizer("clean")
    images = noise(2, 28, 400)
    expected = np.stack([resize(image.permute(1, 2, 0).numpy()) for image in images])
    assert np.array_equal(resize_as_clean_fid(images.float()).permute(0, 2, 3, 1).numpy(), expected)


def test_tensorflow_resize():
    """Oracle: bilinear by its definition, in numpy: source place = place * size / 299, the last pixel repeated."""
    image = noise(1, 40, 310)[0, 0].double().numpy()
    places = [np.arange(299) * size / 299 for size in image.shape]
    rows, columns = (
        np.minimum(np.stack((np.floor(place), np.floor(place) + 1)), size - 1).astype(int)
        for place, size in zip(places, image.shape)
    )
    down, right = (place - np.floor(place) for place in places)
    above, below = (image[row][:, columns[0]] * (1 - right) + image[row][:, columns[1]] * right for row in rows)
    expected = above * (1 - down[:, None]) + below * down[:, None]
    resized = resize_as_tensorflow(torch.from_numpy(image).float()[None, None])[0, 0]
    assert np.abs(resized.numpy() - expected).max() < 0.01  # places are float32, as in TensorFlow


def test_spatial_features_and_grey(weights):
    """Oracle: a hook on the block that ADM names mixed_6; grey is the same as three equal channels."""
    features = open_feature_network(f"inception:{weights}")
    seen = []
    handle = features._network.Mixed_6d.branch1x1.register_forward_hook(lambda *args: seen.append(args[-1]))
    features(noise(1, channels=1))
    handle.remove()
    spatial, _ = features.spatial(noise(1, channels=1).expand(-1, 3, -1, -1))
    assert torch.equal(spatial.view(17, 17, 7), seen[0][0, :7].permute(1, 2, 0)) and spatial.shape == (1, 2023)


@pytest.mark.parametrize(
    "words, message",
    [
        ("inception:absent.pth", "there is no such file; get pt_inception"),
        ("resnet:x", "known are builtin"),
        ("dinov2:absent", "there is no such folder; get a folder made by"),
        ("inception:{damaged}", "no weights of FID's"),
        ("torchscript:{damaged}", "is no TorchScript file"),
    ],
)
def test_refused(tmp_path, words, message):
    """Oracle: the message names the option and the remedy."""
    (tmp_path / "damaged").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=f"--features .*{message}"):
        open_feature_network(words.format(damaged=tmp_path / "damaged"))
