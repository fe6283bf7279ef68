"""Frozen image encoders: CLIP's image tower with the preprocessing that its folder names (Radford et al. 2021)."""

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dstrain.encoders.frozen import Frozen, loading
from dstrain.recipe import ConfigError

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class ImageEncoder(Frozen):
    """Images to embeddings, without gradient.

    path    a folder with a CLIP model (config.json, *.safetensors; preprocessor_config.json for another mean and
            deviation than CLIP's), or a name on the hub.

    Attributes: embed_dim (D), image_size (side of the square that it takes, pixels).
    Raises ConfigError where nothing can be loaded from `path`.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.model, self.projection = _load(path)
        self.eval().requires_grad_(False)
        self.embed_dim = self.projection.out_features
        self.image_size = self.model.config.image_size
        file = Path(path) / "preprocessor_config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        for name, values in (("mean", config.get("image_mean", CLIP_MEAN)), ("std", config.get("image_std", CLIP_STD))):
            # float32 even where zero.Init creates tensors in the compute dtype, whose rounding would shift every pixel.
            self.register_buffer(name, torch.tensor(values).float().view(3, 1, 1), persistent=False)

    @torch.no_grad()
    def encode(self, image: Tensor) -> Tensor:
        """uint8 (N, 3, H, W) -> image_embed float32 (N, D), not normalized. Squares of another size are resampled."""
        pixels = image.float() / 255
        if image.shape[-2:] != (self.image_size, self.image_size):
            pixels = F.interpolate(pixels, (self.image_size, self.image_size), mode="bicubic", antialias=True)
            pixels = pixels.clamp(0, 1)
        pixels = (pixels - self.mean) / self.std
        pooled = self.model(pixel_values=pixels.to(self.projection.weight.dtype)).pooler_output
        return self.projection(pooled).float()


def _load(path: str) -> tuple[nn.Module, nn.Module]:
    """CLIP's image tower and its projection."""
    # Slow to import, and only users of images need it.
    from transformers import AutoConfig, CLIPModel, CLIPVisionModelWithProjection

    kinds = {"clip": CLIPModel, "clip_vision_model": CLIPVisionModelWithProjection}
    with loading("CLIP model", "image_encoder", path, "config.json and *.safetensors"):
        kind = AutoConfig.from_pretrained(path).model_type
        if kind not in kinds:
            raise ConfigError(f"it is of type {kind}, and only CLIP is known here")
        model = kinds[kind].from_pretrained(path, use_safetensors=True)
        return model.vision_model, model.visual_projection
