"""The perceptual distance LPIPS (Zhang et al. 2018, "The unreasonable effectiveness of deep features").

The features after the last ReLU of each stage of a classifier are scaled to unit length over channels. Their squared
differences are weighted by heads, averaged over places and summed over stages. Published are VGG-16 with heads that
were fitted to people's judgement; these weights must be on this machine. The package has a small classifier of its own,
for data like the built-in garments; all its channels count alike (LPIPS without fitted heads).
"""

import os
import pickle
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dstrain.nn.classifier import BUILTIN as CLASSIFIER
from dstrain.nn.classifier import FILE, Classifier
from dstrain.recipe import ConfigError

CHANNELS = (64, 128, 256, 512, 512)  # of the five stages
_ENDS = (3, 8, 15, 22, 29)  # their last ReLU, as torchvision numbers VGG-16's features
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of pictures in [0, 1]
BUILTIN = "builtin:fashion"  # in place of a path: the package's classifier
REMEDY = (
    "give a folder (or a .safetensors or .pt file) with torchvision's VGG-16 (vgg16-397923af.pth) and the heads "
    f"of LPIPS 0.1 (vgg.pth), for garments like the built-in ones {BUILTIN}, or without it set the perceptual "
    "weight to 0"
)


class PerceptualDistance(nn.Module):
    """Measures the distance of pictures by the features of a frozen network. A subclass sets `heads`, a weight for each
    channel of a stage, and computes the stages' features.
    """

    heads: nn.ParameterList

    def train(self, mode: bool = True) -> "PerceptualDistance":
        """Sets evaluation mode whatever `mode` is, since this network is frozen. Returns the network."""
        return super().train(False)

    def forward(self, picture: Tensor, truth: Tensor) -> Tensor:
        """Returns the perceptual distance of each picture from its truth: two (B, 1 or 3, H, W) in [-1, 1] -> float32
        (B,).
        """
        distance = picture.new_zeros(len(picture), dtype=torch.float32)
        for features, true_features, head in zip(
            self._compute_stage_features(picture), self._compute_stage_features(truth), self.heads
        ):
            difference = (
                _scale_to_unit_length(features) - _scale_to_unit_length(true_features)
            ).square()  # (B, c, h, w)
            distance = distance + torch.einsum("bchw,c->bhw", difference, head).mean((1, 2)).float()
        return distance

    def _compute_stage_features(self, x: Tensor) -> list[Tensor]:
        """Returns the features of each stage of the network, (B, c, h, w) each, for pictures (B, 1 or 3, H, W) in [-1,
        1]. Subclasses implement it.
        """
        raise NotImplementedError


class GarmentDistance(PerceptualDistance):
    """Measures the distance by the package's classifier of garments, which gets the pictures' luminance. The distance
    is a mean over four stages, between 0 and 2.
    """

    def __init__(self) -> None:
        super().__init__()
        self.classifier = Classifier.load(CLASSIFIER / FILE)
        widths = [convolution[0].out_channels for convolution in self.classifier.convolutions]
        self.heads = nn.ParameterList(torch.full((width,), 1 / len(widths)) for width in widths)
        self.register_buffer("luminance", torch.tensor([0.299, 0.587, 0.114]), persistent=False)  # Rec. 601
        self.requires_grad_(False).eval()

    def _compute_stage_features(self, x: Tensor) -> list[Tensor]:
        """Returns the features of the classifier's four stages, (B, c, h, w) each, for the luminance of pictures (B, 1
        or 3, H, W) in [-1, 1].
        """
        x = (x.expand(-1, 3, -1, -1).to(self.luminance.dtype) + 1) / 2
        return self.classifier.compute_stage_outputs(torch.einsum("bchw,c->bhw", x, self.luminance)[:, None])


class Perceptual(PerceptualDistance):
    """Measures LPIPS 0.1 with VGG-16. Raises ConfigError, with the remedy, if weights are missing at `path` or do not
    fit.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        from torchvision.models import vgg16  # slow to import, and only this distance needs it

        with torch.device("meta"):  # its classifier, the largest part, is not needed
            features = vgg16(weights=None, init_weights=False).features[: _ENDS[-1] + 1]
        self.features = features.to_empty(device="cpu")
        for layer in self.features:
            if isinstance(layer, nn.ReLU):
                layer.inplace = False  # it would overwrite features that are read
        self.heads = nn.ParameterList(torch.full((channels,), 1.0 / channels) for channels in CHANNELS)
        self.register_buffer("mean", torch.tensor(_MEAN).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(_STD).view(1, 3, 1, 1), persistent=False)
        self._load_weights(Path(os.path.expanduser(path)))
        self.requires_grad_(False).eval()

    def _compute_stage_features(self, x: Tensor) -> list[Tensor]:
        """Returns VGG-16's features after the last ReLU of each of its five stages, (B, c, h, w) each, for pictures (B,
        1 or 3, H, W) in [-1, 1].
        """
        x = (x.expand(-1, 3, -1, -1).to(self.std.dtype) + 1) / 2
        x, features = (x - self.mean) / self.std, []
        for number, layer in enumerate(self.features):
            x = layer(x)
            if number in _ENDS:
                features.append(x)
        return features

    def _load_weights(self, path: Path) -> None:
        """Loads VGG-16 and the heads of LPIPS from a weights file, or from all in a folder. Raises ConfigError if
        weights are missing or have another shape.
        """
        files = sorted(path.glob("*.safetensors")) + sorted(path.glob("*.pt*")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise ConfigError(f"model.perceptual.path={path}: no weights are there: {REMEDY}")
        weights: dict[str, Tensor] = {}
        for file in files:
            weights |= _rename_perceptual_weights(_read_weights(file))
        needed = self.state_dict()
        for name, tensor in needed.items():
            shape = tuple(weights[name].shape) if name in weights else "absent"
            if shape != tuple(tensor.shape):
                raise ConfigError(
                    f"model.perceptual.path: {name} is {shape} at {path}, and {tuple(tensor.shape)} is needed: {REMEDY}"
                )
        self.load_state_dict({name: weights[name].float() for name in needed})


def load_perceptual_distance(path: str) -> PerceptualDistance:
    """Returns the network that measures perceptual distance: for "builtin:fashion" the package's own, otherwise LPIPS
    with the weights in the file or folder `path`. Raises ConfigError if weights are missing or do not fit.
    """
    return GarmentDistance() if path == BUILTIN else Perceptual(path)


def _scale_to_unit_length(features: Tensor) -> Tensor:
    """Scales the feature vector at each place to length 1 over channels, (B, c, h, w); a vector of zeros stays zero."""
    # clamp: where no unit is active, the gradient of the root would be infinite.
    return features / (features.square().sum(1, keepdim=True).clamp(min=1e-20).sqrt() + 1e-10)


def _read_weights(file: Path) -> dict[str, Tensor]:
    """Returns the state dict in a .safetensors file or one of torch.save. Raises ConfigError if the file cannot be read
    or holds no state dict.
    """
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise RuntimeError("no state dict")
        return state
    except (SafetensorError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"model.perceptual.path: {file} cannot be read as weights ({type(error).__name__}): {REMEDY}"
        ) from None


def _rename_perceptual_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the VGG weights and LPIPS heads in `state` under the names of the class Perceptual. Flattens the heads,
    and drops all other weights. `state` has the names of torchvision's VGG (features.N) or of the LPIPS package
    (net.sliceM.N, linM.model.1).
    """
    weights = {}
    for name, tensor in state.items():
        if match := re.fullmatch(r"(?:net\.slice\d|features)\.(\d+)\.(weight|bias)", name):
            weights[f"features.{match[1]}.{match[2]}"] = tensor
        elif match := re.fullmatch(r"lins?\.?(\d)\.model\.1\.weight", name):
            weights[f"heads.{match[1]}"] = tensor.flatten()
    return weights
