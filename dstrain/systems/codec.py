"""A frozen first stage that dstrain trained: an exported discrete VAE, KL autoencoder or video tokenizer.

Latents are those of the posterior, neither scaled nor shifted. A model that wants them at unit variance scales them
itself and undoes it before `decode`, as encoders/autoencoder.py does with scaling_factor and shift.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dstrain import recipe, systems
from dstrain.encoders.autoencoder import hash_network
from dstrain.encoders.frozen import Frozen, shorten_error_message
from dstrain.recipe import ConfigError, Run
from dstrain.systems.base import System


class Codec(Frozen):
    """Encodes images or videos in [-1, 1] to codes, and decodes codes, in float32 and without gradient.

    network  the trained network of the system's first part, the only one that is kept.
    run      the recipe that it was trained with.
    path     the folder that it comes from, for messages.
    key      what names that folder, for messages: a key of the recipe, or an option.

    Attributes, beside run, path and key:
        fingerprint          a hash of architecture and weights, by which first stages differ
        kind                 "latents" or "tokens"
        codebook_size        number of token ids; None for latents
        of_videos            whether it takes videos; an image is then a video of one frame
        temporal_patch_size  a video has 1 + k * this frames
        shape, channels      (C, H, W) of an image or frame, and its C
        codes_shape          latents (c, h, w), tokens of images (h, w), tokens of the longest video (t, h, w)
    """

    def __init__(
        self, network: nn.Module, system: System, run: Run, path: str, key: str = "model.first_stage.path"
    ) -> None:
        super().__init__()
        self.run, self.path, self.key, self._system = run, path, key, system
        self.network = network.float()
        self.eval().requires_grad_(False)
        part = next(iter(system.parts))
        self._nets = {part: self.network}
        self.fingerprint = hash_network(*system.describe_identity(self._nets))
        self.codebook_size, self.temporal_patch_size = system.codebook_size, system.temporal_patch_size
        batch = system.synthetic(1)
        self.of_videos = "video" in batch
        pixels = batch["video" if self.of_videos else "image"]
        self.shape, self.channels = tuple(pixels.shape[-3:]), pixels.shape[-3]
        with torch.device("meta"):  # computes shapes and nothing else
            example = {"x_start": torch.empty(pixels.shape), "frames": torch.full((1,), pixels.shape[1])}
            codes = system.compute_codes({part: system.networks()[part]}, example)
        self.kind = "tokens" if "tokens" in codes else "latents"
        self.codes_shape = tuple(next(iter(codes.values())).shape[1:])

    @classmethod
    def load(cls, path: str | Path, key: str = "model.first_stage.path") -> "Codec":
        """Loads a trained first stage from a folder that `dstrain export --format safetensors` or `dstrain consolidate`
        has written. `key` names the folder in messages: a key of the recipe, or an option.

        Raises ConfigError if the folder is absent, holds no such export or damaged weights, or if its system is no
        first stage.
        """
        folder = Path(path)
        _require_export_folder(folder, key)
        try:
            run = recipe.load_recipe(folder / "recipe.yaml")
            system = systems.build(run.system, run.model)
        except ConfigError as error:
            raise ConfigError(
                f"{key}: {folder / 'recipe.yaml'} is no recipe of a run ({shorten_error_message(error)}); "
                "export the run once more"
            ) from None
        require_first_stage_system(system, run, path, key)
        part = next(iter(system.parts))
        network = system.networks()[part]
        try:
            network.load_state_dict(_read_weights(folder, part))
        except (OSError, SafetensorError, RuntimeError) as error:  # the last where names or shapes differ
            raise ConfigError(
                f"{key}: {path} does not hold the weights of {part} that its recipe.yaml asks for "
                f"({shorten_error_message(error)}); export the run once more"
            ) from None
        return cls(network, system, run, str(path), key)

    @torch.no_grad()
    def encode(self, pixels: Tensor, frames: Tensor | None = None) -> dict[str, Tensor]:
        """Encodes pixels to codes: {"tokens": int64}, or {"latent_mean", "latent_std": float32}, (B, *codes_shape)
        each.

        pixels  images (B, C, H, W) or videos (B, T, C, H, W), float in [-1, 1]. A first stage of videos also takes
                images, as videos of one frame.
        frames  int64 (B,), how many frames of each video are real; None: all. Tokens of padding have no meaning.

        Raises ConfigError if the first stage does not take this shape or number of frames, or takes images and gets
        videos.
        """
        self.require_image_shape(tuple(pixels.shape[-3:]))
        if pixels.ndim == 5 and not self.of_videos:
            raise ConfigError(
                f"{self.key}: the first stage at {self.path} encodes images, and the data give videos; "
                "name the export of a phenaki.tokenizer"
            )
        if pixels.ndim == 4 and self.of_videos:
            pixels = pixels[:, None]
        count = pixels.shape[1]
        if self.of_videos and (count - 1) % self.temporal_patch_size:
            raise ConfigError(
                f"data.num_frames: {count} frames do not fit the temporal patch of "
                f"{self.temporal_patch_size} in {self.path}; take 1 + a multiple of it"
            )
        if frames is None:
            frames = torch.full((len(pixels),), count, device=pixels.device)
        return self._system.compute_codes(self._nets, {"x_start": pixels, "frames": frames})

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Decodes codes (B, *codes_shape), int64 tokens or float latents, to images (B, C, H, W) or videos (B, T, C, H,
        W), float32 in [-1, 1]. Videos may have another number of latent frames.

        Raises ConfigError if the codes have another dtype or shape, or hold token ids beyond the codebook.
        """
        of_tokens, inner = self.kind == "tokens", 2 if self.of_videos else 1
        if (
            codes.ndim != len(self.codes_shape) + 1
            or codes.shape[inner:] != self.codes_shape[inner - 1 :]
            or codes.is_floating_point() == of_tokens
        ):
            raise ConfigError(
                f"{self.key}: codes are {tuple(codes.shape[1:])} of {codes.dtype}, the first stage at "
                f"{self.path} decodes {self.kind} {self.codes_shape}; name the one that encoded them"
            )
        if of_tokens and codes.numel():
            low, high = (int(limit) for limit in torch.aminmax(codes))
            if low < 0 or high >= self.codebook_size:
                raise ConfigError(
                    f"{self.key}: token ids go from {low} to {high}, the first stage at {self.path} "
                    f"decodes 0 to {self.codebook_size - 1}; name the one that encoded them"
                )
        return self._system.decode(self._nets, codes)

    def require_image_shape(self, shape: tuple[int, ...]) -> None:
        """Raises ConfigError if `shape`, (channels, height, width) of images or frames, is not that of this first
        stage.
        """
        if shape != self.shape:
            raise ConfigError(
                f"data: images or frames are {shape} (channels, height, width), the first stage at "
                f"{self.path} takes {self.shape}; set data.channels, data.height and data.image_size "
                "(--image-size) to its own"
            )


def require_first_stage_system(system: System, run: Run, path: str | Path, key: str) -> None:
    """Raises ConfigError if the system of the run at `path` is no first stage: it has no codes for other systems to
    learn from. `key` is the option or recipe key that gives `path`, for the message.
    """
    if not system.encodes:
        raise ConfigError(
            f"{key}: {path} is of the system {run.system}, which encodes nothing that others learn from; "
            "name one of an autoencoder (vae) or of a video tokenizer (phenaki.tokenizer)"
        )


def _require_export_folder(folder: Path, key: str) -> None:
    """Raises ConfigError if the folder does not exist or is no export, which holds a recipe.yaml. `key` is the option
    or recipe key that gives the folder, for the message.
    """
    if (folder / "recipe.yaml").is_file():
        return
    problem = f"{folder} holds no recipe.yaml"
    if not folder.is_dir():
        problem = f"there is no folder {folder}"
    elif (folder / "run.yaml").is_file():
        problem = f"{folder} is a run and no export"
    elif any((folder / name).is_file() for name in ("config.json", "model_index.json")):
        problem = f"{folder} holds weights of diffusers and no recipe.yaml"
    raise ConfigError(f"{key}: {problem}; write one with dstrain export RUN --format safetensors --out FOLDER")


def _read_weights(folder: Path, part: str) -> dict[str, Tensor]:
    """Returns the state dict of a part: from PART.safetensors if the folder has one (an export), else from
    model*.safetensors in the folder PART or, without that, in the folder itself (a consolidated run). Raises OSError if
    there is no such file.
    """
    files = [folder / f"{part}.safetensors"]
    if not files[0].is_file():
        files = sorted((folder / part if (folder / part).is_dir() else folder).glob("model*.safetensors"))
    if not files:
        raise OSError(f"there is no {part}.safetensors")
    return {name: value for file in files for name, value in load_file(file).items()}
