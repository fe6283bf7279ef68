"""Frozen image encoders: CLIP's image tower with the preprocessing that its folder names (Radford et al. 2021); and
towers whose features metrics compare: DINOv2 for images, VideoMAE for clips, from local folders.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dstrain.encoders.frozen import Frozen, explain_loading, read_config, read_json, read_network
from dstrain.recipe import ConfigError

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as both were trained
_SIDE = 224
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
        self.model, self.projection = _load_tower(path)
        self.eval().requires_grad_(False)
        self.embed_dim = self.projection.out_features
        self.image_size: int = self.model.config.image_size
        config = read_json("image_encoder", path, "preprocessor_config.json") or {}
        for name, values in (("mean", config.get("image_mean", CLIP_MEAN)), ("std", config.get("image_std", CLIP_STD))):
            # float32 even where zero.Init creates tensors in the compute dtype, whose rounding would shift every pixel.
            self.register_buffer(name, torch.tensor(values).float().view(3, 1, 1), persistent=False)

    @torch.no_grad()
    def encode(self, image: Tensor) -> Tensor:
        """Returns image_embed float32 (N, D), not normalized, of uint8 (N, 3, H, W). Another size is resampled."""
        pixels = image.float() / 255
        if image.shape[-2:] != (self.image_size, self.image_size):
            pixels = F.interpolate(pixels, (self.image_size, self.image_size), mode="bicubic", antialias=True)
            pixels = pixels.clamp(0, 1)
        pixels = (pixels - self.mean) / self.std
        pooled = self.model(pixel_values=pixels.to(self.projection.weight.dtype)).pooler_output
        return self.projection(pooled).float()


def _load_tower(path: str) -> tuple[nn.Module, nn.Module]:
    """Returns CLIP's image tower and its projection."""
    # Slow to import, and only users of images need it.
    from transformers import CLIPModel, CLIPVisionModelWithProjection

    kinds = {"clip": CLIPModel, "clip_vision_model": CLIPVisionModelWithProjection}
    with explain_loading("CLIP model", "image_encoder", path, "config.json and *.safetensors"):
        config = read_config(path)
        if config.model_type not in kinds:
            raise ConfigError(f"it is of type {config.model_type}, and only CLIP is known here")
        model = read_network(kinds[config.model_type], path, config)
        return model.vision_model, model.visual_projection


class VisionTower(Frozen):
    """Images or clips to one vector each, without gradient.

    folder  holds config.json and *.safetensors
    kind    dinov2: the class token after the last norm, as FD-DINOv2 takes it (Stein et al. 2023); videomae: the mean
            of all tokens

    Attributes: dim (D), num_frames of a clip (None for images).
    Raises ConfigError where nothing of that kind can be loaded from `folder`.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        super().__init__()
        path = str(folder.absolute())  # A name on the hub is none here.
        from transformers import AutoModel  # slow to import, and only its users need it

        with explain_loading(f"{kind} model", "--features", path, "config.json and *.safetensors"):
            config = read_config(path)
            if not config.model_type.startswith(kind):
                raise ConfigError(f"--features {kind}:{folder}: the folder holds a model of type {config.model_type}")
            # In fp32, also where the folder's weights are halves.
            self.model = read_network(AutoModel, path, config, dtype=torch.float32, attn_implementation="sdpa")
        self.eval().requires_grad_(False)
        self.dim, self.kind = config.hidden_size, kind
        self.num_frames = getattr(config, "num_frames", None)
        self.register_buffer("mean", torch.tensor(_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(_STD).view(3, 1, 1), persistent=False)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Returns float32 (N, D) of uint8 (N, 3, H, W), of clips (N, T, 3, H, W) with T of num_frames.

        They are resized to 224 x 224 pixels, bicubic and smoothed, whatever their aspect, as EDM2 does.
        """
        pixels = F.interpolate(images.flatten(0, -4).float(), (_SIDE, _SIDE), mode="bicubic", antialias=True)
        pixels = ((pixels / 255 - self.mean) / self.std).view(*images.shape[:-2], _SIDE, _SIDE)
        states = self.model(pixel_values=pixels).last_hidden_state  # (N, tokens, D)
        return states[:, 0] if self.num_frames is None else states.mean(1)
