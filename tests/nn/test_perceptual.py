"""LPIPS with random weights in the published files' layouts; the published weights are not at hand."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torchvision.models import vgg16

from dstrain.nn.classifier import BUILTIN, FILE, Classifier
from dstrain.nn.perceptual import CHANNELS, GarmentDistance, Perceptual, load_perceptual_distance


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder as downloaded: torchvision's VGG-16 and the heads of LPIPS; and both as the LPIPS package saves them."""
    folder = tmp_path_factory.mktemp("lpips")
    torch.manual_seed(0)
    features = vgg16(weights=None).features
    heads = {f"lin{number}.model.1.weight": torch.rand(1, width, 1, 1) for number, width in enumerate(CHANNELS)}
    state = {f"features.{name}": tensor for name, tensor in features.state_dict().items()}
    (folder / "apart").mkdir()
    torch.save(state, folder / "apart" / "vgg16-397923af.pth")
    torch.save(heads, folder / "apart" / "vgg.pth")
    starts = (0, 4, 9, 16, 23)
    slices = {}
    for name, tensor in features.state_dict().items():
        number, kind = name.split(".")
        stage = sum(int(number) >= start for start in starts)
        slices[f"net.slice{stage}.{number}.{kind}"] = tensor
    save_file(slices | heads, folder / "package.safetensors")
    return folder, features, heads


def by_hand(features, heads, a, b):
    """The distance of one pair, as the paper writes it."""
    shift = torch.tensor([-0.030, -0.088, -0.188]).view(3, 1, 1)
    scale = torch.tensor([0.458, 0.448, 0.450]).view(3, 1, 1)
    one, other, total, stage = (a - shift) / scale, (b - shift) / scale, 0.0, 0
    one, other = one[None], other[None]
    for number, layer in enumerate(features):
        one, other = layer(one.clone()), layer(other.clone())
        if number in (3, 8, 15, 22, 29):
            difference = (F.normalize(one, dim=1) - F.normalize(other, dim=1)).square()
            total += float((difference * heads[f"lin{stage}.model.1.weight"]).sum(1).mean())
            stage += 1
    return total


@pytest.mark.parametrize("layout", ["apart", "package.safetensors"])
def test_distance(files, layout):
    """Oracle: the formula by hand, with LPIPS' published shift and scale of pictures in [-1, 1]; 0 where equal."""
    folder, features, heads = files
    distance = Perceptual(folder / layout)
    a, b = torch.rand(2, 3, 32, 32) * 2 - 1, torch.rand(2, 3, 32, 32) * 2 - 1
    with torch.no_grad():
        found = distance(a, b)
        expected = torch.tensor([by_hand(features, heads, *pair) for pair in zip(a, b)])
        torch.testing.assert_close(found, expected, rtol=3e-3, atol=0)
        assert bool((distance(a, a) == 0).all())
        grey = [x[:, :1].repeat(1, 3, 1, 1) for x in (a, b)]
        torch.testing.assert_close(distance(a[:, :1], b[:, :1]), distance(*grey))


def test_it_is_frozen(files):
    """Oracle: no weight learns, training mode stays off, and yet the picture has a gradient, finite on flat areas."""
    distance = Perceptual(files[0] / "apart").train()
    assert not distance.training and not any(weight.requires_grad for weight in distance.parameters())
    picture = torch.zeros(1, 3, 16, 16, requires_grad=True)
    distance(picture, torch.rand(1, 3, 16, 16)).sum().backward()
    assert bool(picture.grad.isfinite().all()) and bool(picture.grad.any())


def test_distance_of_the_packaged_classifier():
    """Oracle: cosines of the classifier's features by torch, 2 - 2 cos for unit vectors, 0 where all units are silent;
    colours by their luminance; frozen, and yet with a gradient for the picture.
    """
    distance = load_perceptual_distance("builtin:fashion").train()
    assert isinstance(distance, GarmentDistance) and not distance.training
    assert not any(weight.requires_grad for weight in distance.parameters())
    torch.manual_seed(0)
    picture, truth = (torch.rand(2, 1, 32, 32) * 2 - 1 for _ in range(2))
    picture.requires_grad_()
    network, expected = Classifier.load(BUILTIN / FILE), 0
    x, y = (picture.detach() + 1) / 2, (truth + 1) / 2
    with torch.no_grad():
        for number, layer in enumerate(network.convolutions):
            x, y = (layer(z if number == 0 else F.max_pool2d(z, 2)) for z in (x, y))
            alive = (x.square().sum(1) > 0).float(), (y.square().sum(1) > 0).float()
            expected = expected + (alive[0] + alive[1] - 2 * F.cosine_similarity(x, y)).mean((1, 2)) / 4
    between = distance(picture, truth)
    torch.testing.assert_close(between.detach(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(distance(*(z.repeat(1, 3, 1, 1) for z in (picture, truth))), between)
    between.sum().backward()
    assert bool(picture.grad.isfinite().all()) and bool(picture.grad.any())
    assert bool((distance(truth, truth) == 0).all())


@pytest.mark.parametrize(
    "damage, words",
    [
        ("absent", "no weights are there"),
        ("empty", "no weights are there"),
        ("heads", "heads.0 is absent"),
        ("noise", "cannot be read"),
        ("shape", r"features.0.weight is \(1,\)"),
    ],
)
def test_what_is_refused(files, tmp_path, damage, words):
    """Oracle: a ValueError that names the path, the fault and the remedy."""
    path = tmp_path / "weights"
    path.mkdir()
    if damage == "absent":
        path = tmp_path / "nowhere.pth"
    elif damage == "noise":
        (path / "vgg.pth").write_bytes(b"no pickle")
    elif damage == "heads":
        torch.save(torch.load(files[0] / "apart" / "vgg16-397923af.pth"), path / "vgg16.pth")
    elif damage == "shape":
        torch.save({"features.0.weight": torch.ones(1), **files[2]}, path / "vgg16.pth")
    with pytest.raises(ValueError, match=f"{words}.*perceptual weight to 0"):
        Perceptual(path)
