"""The first stage of latent diffusion: a frozen KL autoencoder behind one encode and one decode.

Notation of Rombach et al. 2022: latents = (posterior sample - shift) * scaling_factor, so that they have about unit
variance (0.18215 for Stable Diffusion's). The weights are those of a diffusers `AutoencoderKL`.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from dstrain import draws


class Autoencoder(nn.Module):
    """Images in [-1, 1] to latents and back, without gradient and always in evaluation mode.

    path            a folder with an AutoencoderKL (config.json, *.safetensors) or with a pipeline that has one in its
                    vae/, or a name on the Hugging Face hub.
    scaling_factor  None means what the autoencoder's own config says.

    Attributes: channels and factor of the latents (an image of side s has latents of side s / factor).
    Raises ValueError where nothing can be loaded from `path`. Pickled weights are not read.
    """

    def __init__(self, path: str, scaling_factor: float | None = None) -> None:
        super().__init__()
        self.vae = _load(path).eval().requires_grad_(False)
        config = self.vae.config
        self.scaling_factor = config.scaling_factor if scaling_factor is None else scaling_factor
        self.shift = getattr(config, "shift_factor", None) or 0.0
        self.channels = config.latent_channels
        self.factor = 2 ** (len(config.block_out_channels) - 1)

    def train(self, mode: bool = True) -> "Autoencoder":
        """Stays in evaluation mode, whatever the network around it does."""
        return super().train(False)

    @torch.no_grad()
    def encode(self, image: Tensor, key: Tensor) -> Tensor:
        """Float32 latents drawn from the posterior with the samples' own noise: (B, 3, H, W), (B,) -> (B, C, h, w)."""
        moments = self.vae.encode(image.to(self.vae.dtype)).latent_dist.parameters.float()
        mean, log_variance = moments.chunk(2, dim=1)
        noise = draws.normal(key, "latent", tuple(mean.shape[1:]))
        latents = mean + torch.exp(0.5 * log_variance.clamp(-30, 20)) * noise
        return (latents - self.shift) * self.scaling_factor

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Float32 images, about in [-1, 1]: (B, C, h, w) -> (B, 3, H, W)."""
        latents = latents / self.scaling_factor + self.shift
        return self.vae.decode(latents.to(self.vae.dtype)).sample.float()


def _load(path: str) -> nn.Module:
    from diffusers import AutoencoderKL          # slow to import, and only users of a first stage need it

    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").is_file() and (folder / "vae").is_dir():
        folder = folder / "vae"
    if not folder.is_dir() and (folder.is_absolute() or path.startswith(".")):
        raise ValueError(f"first_stage.path: there is no folder {path}; save one there with "
                         "AutoencoderKL.from_pretrained(NAME).save_pretrained(FOLDER), or give a name on the hub")
    try:
        return AutoencoderKL.from_pretrained(str(folder) if folder.is_dir() else path, use_safetensors=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"first_stage.path: no AutoencoderKL can be loaded from {path!r} ({error}); give a folder "
                         "with config.json and *.safetensors, or a hub name that this machine can reach") from error
