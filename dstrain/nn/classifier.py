"""The small classifier of Fashion-MNIST's ten classes that comes with the package.

The metrics of the built-in data (metrics/builtin.py) and a perceptual distance for them (nn/perceptual.py) use its
features. make_classifier.py has trained it on the whole of Fashion-MNIST and says how good it is.
"""

import itertools
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

FILE = "fashion-classifier.safetensors"
BUILTIN = Path(__file__).parents[1] / "data" / "builtin"


class Classifier(nn.Module):
    """Classifies images float32 (N, 1, 28, 28) in [0, 1]: returns features (N, 64) and logits (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 32, 64, 128, 128)
        self.convolutions = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
            for before, after in itertools.pairwise(widths)
        )
        self.features = nn.Linear(widths[-1] * 9, 64)
        self.logits = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the features (N, 64) and the logits (N, 10) of images, float32 (N, 1, 28, 28) in [0, 1]."""
        features = self.features(self.compute_stage_outputs(images)[-1].flatten(1))
        return features, self.logits(F.relu(features))

    def compute_stage_outputs(self, images: Tensor) -> list[Tensor]:
        """Returns the outputs of the four convolutions, (N, c, h, w) each, for images (N, 1, H, W) of at least 8 x 8
        pixels. Each output after the first has half the side, rounded down: 28, 14, 7, 3.
        """
        x, outputs = images, []
        for number, convolution in enumerate(self.convolutions):
            x = convolution(x if number == 0 else F.max_pool2d(x, 2))  # 28 -> 14 -> 7 -> 3
            outputs.append(x)
        return outputs

    @classmethod
    def load(cls, path: Path) -> "Classifier":
        """Returns the network with the trained weights of the file `path`, in evaluation mode and float32."""
        network = cls()
        network.load_state_dict(load_file(path))
        return network.eval()
