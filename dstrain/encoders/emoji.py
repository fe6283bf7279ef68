"""Encodes images and captions for the built-in emoji pairs: by an image tower in the package, and a table of known
captions.

make_emoji_pairs.py has trained the tower on the pairs that data.splits=[0.8,0.1,0.1] trains on, and says how good it
is. Its embeddings are comparable with those of texts by all-MiniLM-L6-v2, which the package does not contain.
"""

import itertools
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from dstrain.data.cached import embeddings

TEXT_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"  # made the text embeddings of the pairs
FILE = Path(embeddings.__file__).parents[1] / "builtin" / "emoji-tower.safetensors"
SIDE, DIM = 32, 384  # pixels of a picture that the tower sees; width of an embedding
WIDTHS = (3, 24, 48, 96, 160)


class Tower(nn.Sequential):
    """Maps pictures float32 (N, 3, 32, 32) in [-1, 1] to embeddings (N, 384), not normalized."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS, dropout: float = 0.0) -> None:
        stages = [
            layer
            for before, after in itertools.pairwise(widths)
            for layer in (nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.GELU())
        ]
        super().__init__(*stages, nn.Flatten(), nn.Dropout(dropout), nn.Linear(4 * widths[-1], DIM))


class EmojiTower:
    """Embeds pictures by the trained tower of the package. Attribute fingerprint: a short hash of the tower's file."""

    def __init__(self, device: torch.device) -> None:
        self.fingerprint = blake2b(FILE.read_bytes(), digest_size=8).hexdigest()
        self._network, self._device = Tower(), device
        self._network.load_state_dict({name: weight.float() for name, weight in load_file(FILE).items()})
        self._network.eval().requires_grad_(False).to(device)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Returns embeddings float32 (N, 384) of unit length, of images uint8 (N, 3, H, W) of any size."""
        pixels = images.to(self._device).float()
        if pixels.shape[-2:] != (SIDE, SIDE):
            pixels = F.interpolate(pixels, (SIDE, SIDE), mode="bilinear", antialias=True)
        return F.normalize(self._network(pixels / 127.5 - 1), dim=1)


def look_up_text_embeds(captions: list[str]) -> Tensor | None:
    """Returns the text embeddings, float32 (N, 384), that the package holds for captions of its emoji pictures; None if
    any of the captions is not among them. Upper case and extra spaces do not matter.
    """
    known = embeddings.map_builtin_captions_to_rows()
    rows = [known.get(" ".join(caption.lower().split())) for caption in captions]
    if None in rows:
        return None
    table = embeddings.open_builtin_pairs().tables["text_embed"]
    return torch.stack([torch.from_numpy(table[row].copy()) for row in rows])
