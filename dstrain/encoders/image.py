"""Frozen image encoders: CLIP's image tower, and towers of local folders (DINOv2 and DINOv3 for images, VideoMAE for
clips), whose features serve metrics and representation alignment. CLIP's preprocessing is that of its folder (Radford
et al. 2021).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dstrain.encoders.autoencoder import hash_network
from dstrain.encoders.frozen import Frozen, load_network, read_config, read_encoder_json, reword_loading_errors
from dstrain.encoders.precision import Precision, cast_weights, choose_default_precision
from dstrain.recipe import ConfigError

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as both were trained
_SIDE = 224
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class ImageEncoder(Frozen):
    """Encodes images to embeddings by CLIP, without gradient.

    path    a folder with a CLIP model (config.json, *.safetensors; preprocessor_config.json for another mean and
            deviation than CLIP's), or a name on the hub.

    Attributes: embed_dim (D), image_size (side of the square that it takes, pixels). Raises ConfigError where nothing
    can be loaded from `path`.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.model, self.projection = _load_clip_image_tower(path)
        self.eval().requires_grad_(False)
        self.embed_dim = self.projection.out_features
        self.image_size: int = self.model.config.image_size
        config = read_encoder_json("image_encoder", path, "preprocessor_config.json") or {}
        for name, values in (("mean", config.get("image_mean", CLIP_MEAN)), ("std", config.get("image_std", CLIP_STD))):
            # float32 even where zero.Init creates tensors in the compute dtype, whose rounding would shift every pixel.
            self.register_buffer(name, torch.tensor(values).float().view(3, 1, 1), persistent=False)

    @torch.no_grad()
    def encode(self, image: Tensor) -> Tensor:
        """Returns CLIP embeddings, float32 (N, D), not normalized, of images uint8 (N, 3, H, W). Images of another size
        than image_size x image_size are resized to it.
        """
        pixels = image.float() / 255
        if image.shape[-2:] != (self.image_size, self.image_size):
            pixels = F.interpolate(pixels, (self.image_size, self.image_size), mode="bicubic", antialias=True)
            pixels = pixels.clamp(0, 1)
        pixels = (pixels - self.mean) / self.std
        pooled = self.model(pixel_values=pixels.to(self.projection.weight.dtype)).pooler_output
        return self.projection(pooled).float()


def _load_clip_image_tower(path: str) -> tuple[nn.Module, nn.Module]:
    """Returns CLIP's image tower, and the linear layer that maps the tower's output to embeddings. Raises ConfigError
    if `path` holds no CLIP that can be loaded.
    """
    # Slow to import, and only users of images need it.
    from transformers import CLIPModel, CLIPVisionModelWithProjection

    kinds = {"clip": CLIPModel, "clip_vision_model": CLIPVisionModelWithProjection}
    with reword_loading_errors("CLIP model", "image_encoder", path, "config.json and *.safetensors"):
        config = read_config(path)
        if config.model_type not in kinds:
            raise ValueError(f"it is of type {config.model_type}, and only CLIP is known here")
        model = load_network(kinds[config.model_type], path, config)
        return model.vision_model, model.visual_projection


class Tokens(NamedTuple):
    """The tokens that a tower computes for each of N images or clips."""

    first: Tensor | None
    """The class token, (N, D); None: it has none."""
    patches: Tensor
    """One for each patch, in rows, (N, T, D)."""
    pooled: Tensor
    """The mean of the patches, (N, D)."""


class VisionTower(Frozen):
    """Computes the tokens of images or clips after the last norm, without gradient.

    folder  holds config.json and *.safetensors.
    kinds   those to accept, of dinov2, dinov3 and videomae.
    key     names the folder in messages.

    Attributes: dim (D), patch_size (pixels), num_frames of a clip (None for images), precision of `set_precision`.
    Raises ConfigError where nothing of these kinds can be loaded from `folder`.
    """

    def __init__(self, folder: Path, kinds: str | tuple[str, ...], key: str = "--features") -> None:
        super().__init__()
        path = str(folder.absolute())  # A name on the hub is none here.
        from transformers import AutoModel  # slow to import, and only its users need it

        kinds = (kinds,) if isinstance(kinds, str) else kinds
        name = " or ".join(kinds)
        with reword_loading_errors(f"{name} model", key, path, "config.json and *.safetensors"):
            config = read_config(path)
            if not config.model_type.startswith(kinds):
                raise ConfigError(
                    f"{key} {name}:{folder}: the folder holds a model of type {config.model_type}; give one of {name}"
                )
            # In fp32, also where the folder's weights are halves.
            self.model = load_network(AutoModel, path, config, dtype=torch.float32, attn_implementation="sdpa")
        self.eval().requires_grad_(False)
        self.dim, self.kind, self.precision = config.hidden_size, config.model_type, "fp32"
        self.patch_size = config.patch_size
        self.num_frames = getattr(config, "num_frames", None)
        self._before = 1 + getattr(config, "num_register_tokens", 0) if self.num_frames is None else 0
        self.register_buffer("mean", torch.tensor(_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(_STD).view(3, 1, 1), persistent=False)

    def describe_encoder(self) -> dict[str, Any]:
        """Returns {"width": length of a token's vector, "fingerprint": hash of the network}, to be compared with a
        recipe's. Call this method before `set_precision`, which changes the weights and so the hash.
        """
        return {"width": self.dim, "fingerprint": hash_network({"kind": self.kind}, self.model.state_dict())}

    def set_precision(self, precision: Precision | None) -> None:
        """Sets the attribute `precision`, and casts the weights to its dtype. None: tf32 if the GPU has it, else fp32.
        Callers of `compute_tokens` must enter `use_precision(tower.precision)` themselves.
        """
        self.precision = precision or choose_default_precision()
        cast_weights(self.model, self.precision)

    @torch.no_grad()
    def compute_tokens(self, images: Tensor, sides: Sequence[int] = (_SIDE, _SIDE), smooth: bool = True) -> Tokens:
        """Returns the tokens that the network computes for images uint8 (N, 3, H, W), or clips (N, T, 3, H, W) with T =
        num_frames. Resizes the pictures first (bicubic), even if their aspect ratio changes.

        sides   (height, width) after resizing, in pixels.
        smooth  whether to antialias when a picture gets smaller.
        """
        pixels = F.interpolate(images.flatten(0, -4).float(), tuple(sides), mode="bicubic", antialias=smooth)
        pixels = ((pixels / 255 - self.mean) / self.std).view(*images.shape[:-2], *sides)
        dtype = next(self.model.parameters()).dtype
        states = self.model(pixel_values=pixels.to(dtype)).last_hidden_state  # (N, tokens, D)
        patches = states[:, self._before :]
        return Tokens(states[:, 0] if self._before else None, patches, patches.mean(1))

    def encode(self, images: Tensor) -> Tensor:
        """Returns embeddings (N, D), in the dtype of the weights, of images or clips resized to 224 x 224 pixels. An
        embedding is the class token (as in FD-DINOv2, Stein et al. 2023), or the mean of all tokens if the network has
        no class token.
        """
        tokens = self.compute_tokens(images)
        return tokens.pooled if tokens.first is None else tokens.first
