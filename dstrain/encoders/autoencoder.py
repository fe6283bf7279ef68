"""The first stage of latent diffusion: a frozen autoencoder behind one encode and one decode, KL or of representations.

Notation of Rombach et al. 2022: latents = (posterior sample - shift) * scaling_factor, so that they have about unit
variance (0.18215 for Stable Diffusion's). Both are one number, or one for each channel (LightningDiT). The weights are
those of a diffusers `AutoencoderKL`, or of an `AutoencoderRAE`, whose latents are a frozen vision encoder's patches
(Zheng et al. 2025): it normalizes them itself, and its posterior has no width.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dstrain import rng
from dstrain.distributed.group import copy_to_device
from dstrain.encoders.frozen import (
    Frozen,
    require_no_missing_weights,
    require_unquantized_weights,
    reword_loading_errors,
)
from dstrain.encoders.precision import Precision, cast_weights, choose_default_precision, use_precision
from dstrain.recipe import ConfigError

# The keys of AutoencoderKL's config that decide the codes, with diffusers' defaults. Only other values than these enter
# a fingerprint, so that an autoencoder keeps its fingerprint where another version of diffusers adds or lacks a key.
# Left out are keys that apply after the codes (scaling_factor, shift_factor, latents_mean, latents_std) and those that
# do not change them (sample_size, force_upcast).
_DIFFUSERS_DEFAULTS = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"],
    "up_block_types": ["UpDecoderBlock2D"],
    "block_out_channels": [64],
    "layers_per_block": 1,
    "act_fn": "silu",
    "latent_channels": 4,
    "norm_num_groups": 32,
    "use_quant_conv": True,
    "use_post_quant_conv": True,
    "mid_block_add_attention": True,
}


_OF_REPRESENTATIONS = "AutoencoderRAE"
_ENCODING = ("encoder", "quant_conv")  # the networks that encode; an AutoencoderRAE has no second one
Values = float | Sequence[float]  # one number, or one for each channel


class Autoencoder(Frozen):
    """Encodes images in [-1, 1] to latents and decodes latents to images, without gradient.

    path            a folder with an AutoencoderKL or AutoencoderRAE (config.json, *.safetensors), or with a pipeline
                    that has one in its vae/, or a name on the Hugging Face hub.
    scaling_factor  None: that of the autoencoder's own config; 1 for AutoencoderRAE, which scales by itself.
    shift           None: shift_factor of that config, 0 if it has none.

    Attributes: channels and factor of the latents (an image of side s has latents of side s / factor), image_channels,
    image_size (the only side of its images; None: any). Raises ConfigError where nothing can be loaded from `path`.
    Pickled weights are not read.
    """

    def __init__(self, path: str, scaling_factor: Values | None = None, shift: Values | None = None) -> None:
        super().__init__()
        self.vae, self.precision = _load_autoencoder(path).eval().requires_grad_(False), "fp32"
        config, own_scale = self.vae.config, 1.0
        self.of_representations = is_representation_autoencoder(self.vae)
        self.image_size: int | None = None
        if self.of_representations:
            self.image_size = self.vae.decoder_image_size
            self.channels, self.image_channels = config.encoder_hidden_size, config.num_channels
            self.factor = config.patch_size
        else:
            own_scale = config.scaling_factor
            self.channels, self.image_channels = config.latent_channels, config.in_channels
            self.factor = 2 ** (len(config.block_out_channels) - 1)
        self.scaling_factor = own_scale if scaling_factor is None else scaling_factor
        self.shift = (getattr(config, "shift_factor", None) or 0.0) if shift is None else shift

    def encode(self, image: Tensor, key: Tensor) -> Tensor:
        """Returns float32 latents (B, c, h, w) of images (B, C, H, W) in [-1, 1]: draws from the posterior, then shifts
        and scales. key int64 (B,): each sample's seed, from which its noise is drawn.
        """
        with use_precision(self.precision):
            return self.draw_latents(*encode_posterior(self.vae, image), key)

    def draw_latents(self, mean: Tensor, std: Tensor, key: Tensor) -> Tensor:
        """Draws float32 latents (B, c, h, w) as `encode` does, but from a posterior computed before. mean, std (B, c,
        h, w): the posterior's. key int64 (B,): each sample's seed, from which its noise is drawn.
        """
        return draw_latents(mean, std, key, self.scaling_factor, self.shift)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decodes latents (B, c, h, w), as `encode` returns them, to float32 images (B, C, H, W). Their values lie
        about in [-1, 1].
        """
        latents = latents / broadcast_over_pixels(self.scaling_factor, latents) + broadcast_over_pixels(
            self.shift, latents
        )
        image = self.vae.decode(latents.to(_get_weight_dtype(self.vae.decoder))).sample.float()
        return 2 * image - 1 if self.of_representations else image

    def compute_fingerprint(self) -> str:
        """Returns a hash of the architecture and the weights, 32 hexadecimal digits, see `hash_network`. Call this
        method before `drop_encoder` and `set_encode_precision`, which change the weights.
        """
        return hash_network(*get_config_and_weights_to_hash(self.vae))

    def describe_latents(self) -> dict[str, Any]:
        """Returns {scaling_factor, shift, fingerprint}, on which the latents of an image depend."""
        return {"scaling_factor": self.scaling_factor, "shift": self.shift, "fingerprint": self.compute_fingerprint()}

    def read_channel_means_and_stds(self) -> tuple[list[float], list[float]] | None:
        """Returns the mean and the standard deviation of each latent channel, from the autoencoder's own config.
        Returns None if the config gives none, or for an AutoencoderRAE, which normalizes its latents itself.
        """
        means, deviations = (getattr(self.vae.config, name, None) for name in ("latents_mean", "latents_std"))
        if self.of_representations or not means or not deviations:
            return None
        return [float(value) for value in means], [float(value) for value in deviations]

    def set_encode_precision(self, precision: Precision | None) -> None:
        """Sets the precision in which `encode` computes, and casts the encoder's weights to it. None: tf32 if the GPU
        has it, else fp32. `decode` stays in float32.
        """
        self.precision = precision = precision or choose_default_precision()
        for name in _ENCODING:
            if getattr(self.vae, name, None) is not None:
                cast_weights(getattr(self.vae, name), precision)

    def drop_encoder(self) -> None:
        """Removes the encoder and frees its memory, for runs whose latents come from a cache."""
        for name in _ENCODING:
            setattr(self.vae, name, None)


@torch.no_grad()
def encode_posterior(vae: nn.Module, image: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean and the standard deviation of an autoencoder's posterior, float32 (B, c, h, w) each, for images
    (B, C, H, W) in [-1, 1]. The deviation is 0 for an AutoencoderRAE.
    """
    if is_representation_autoencoder(vae):
        mean = vae.encode((image.to(_get_weight_dtype(vae.encoder)) + 1) / 2).latent.float()
        return mean, torch.zeros_like(mean)
    moments = vae.encode(image.to(_get_weight_dtype(vae.encoder))).latent_dist.parameters.float()
    mean, log_variance = moments.chunk(2, dim=1)
    return mean, torch.exp(0.5 * log_variance.clamp(-30, 20))


def draw_latents(mean: Tensor, std: Tensor, key: Tensor, scaling_factor: Values, shift: Values = 0.0) -> Tensor:
    """Returns float32 latents (B, c, h, w): draws from the posterior with `mean` and `std` (B, c, h, w), subtracts
    `shift` and multiplies by `scaling_factor`. key int64 (B,): each sample's seed, from which its noise is drawn.
    """
    noise = rng.normal(key, "latent", tuple(mean.shape[1:]))
    return (mean.float() + std.float() * noise - broadcast_over_pixels(shift, noise)) * broadcast_over_pixels(
        scaling_factor, noise
    )


def broadcast_over_pixels(values: Values, like: Tensor) -> float | Tensor:
    """Returns `values` in a form that broadcasts over latents (B, C, H, W): one number unchanged, or one number for
    each channel as a tensor (C, 1, 1) with the dtype and device of `like`.
    """
    if isinstance(values, float | int):
        return values
    return copy_to_device(torch.tensor(values, dtype=like.dtype).view(-1, 1, 1), like.device)


def is_representation_autoencoder(vae: nn.Module) -> bool:
    """Returns whether an autoencoder is diffusers' AutoencoderRAE, which takes images in [0, 1] and has
    no posterior.
    """
    return type(vae).__name__ == _OF_REPRESENTATIONS


def get_config_and_weights_to_hash(vae: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns what is to be hashed of an autoencoder: the config's keys that matter and differ from diffusers'
    defaults, and the weights under diffusers' names.

    Leaves out shift and scale of the latents, which are applied after encoding. For an AutoencoderRAE returns the whole
    config without private keys, latents_mean and latents_std, and with the class's name as "class".
    """
    if is_representation_autoencoder(vae):
        own = {name: value for name, value in vae.config.items() if not name.startswith(("_", "latents_"))}
        return {"class": _OF_REPRESENTATIONS, **json.loads(json.dumps(own))}, vae.state_dict()
    config = json.loads(json.dumps({name: vae.config[name] for name in _DIFFUSERS_DEFAULTS if name in vae.config}))
    return {name: value for name, value in config.items() if value != _DIFFUSERS_DEFAULTS[name]}, vae.state_dict()


def hash_network(config: dict[str, Any], weights: dict[str, Tensor]) -> str:
    """Returns a hash of a frozen network, 32 hexadecimal digits. It covers the config, as JSON, and the names, dtypes,
    shapes and bytes of the weights.
    """
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16)
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _get_weight_dtype(network: nn.Module) -> torch.dtype:
    """Returns the dtype of a network's first parameter."""
    return next(network.parameters()).dtype


def _load_autoencoder(path: str) -> nn.Module:
    """Returns the AutoencoderKL or AutoencoderRAE of diffusers at `path`: a folder, a pipeline's folder with a vae/, or
    a name on the hub. Raises ConfigError if none can be loaded there.
    """
    import diffusers  # slow to import, and only users of a first stage need it

    remedy = (
        "where it lies elsewhere, give model.first_stage.path=FOLDER; "
        f"else export one with dstrain export RUN --out {path}, save one there with "
        "AutoencoderKL.from_pretrained(NAME).save_pretrained(FOLDER), or give a name on the hub, as "
        "stabilityai/sd-vae-ft-mse"
    )
    with reword_loading_errors(
        "AutoencoderKL", "model.first_stage.path", path, "config.json and *.safetensors", remedy
    ):
        folder = Path(path)
        if not (folder / "config.json").is_file() and (folder / "vae").is_dir():
            folder = folder / "vae"
        local = folder.is_dir()
        config = diffusers.AutoencoderKL.load_config(str(folder), local_files_only=local)
        require_unquantized_weights(config)
        name = _OF_REPRESENTATIONS if config.get("_class_name") == _OF_REPRESENTATIONS else "AutoencoderKL"
        if not hasattr(diffusers, name):
            raise ConfigError(
                f"model.first_stage.path: {path} is an {name}, which comes with diffusers 0.42: install that"
            )
        # low_cpu_mem_usage=False keeps diffusers from warning that accelerate is missing.
        options = {"use_safetensors": True, "low_cpu_mem_usage": False, "output_loading_info": True}
        vae, report = getattr(diffusers, name).from_pretrained(str(folder), local_files_only=local, **options)
        require_no_missing_weights(report["missing_keys"], unread=())
        return vae
