"""A trained tokenizer, frozen, from the folder that launch/export.py RUN --format safetensors writes."""

from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dstrain.encoders.autoencoder import fingerprint
from dstrain.recipe import ConfigError
from dstrain.systems.phenaki import tokenizer

_FILES = ("recipe.yaml", "tokenizer.safetensors")


class Pretrained(nn.Module):
    """Videos in [-1, 1] to tokens and back, float32, without gradient and always in evaluation mode.

    Attributes: fingerprint, codebook_size, temporal_patch_size, grid (h, w), frame_shape (C, H, W).
    Raises ConfigError where the folder holds no tokenizer.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, config = path, _config(path)
        system = tokenizer.build(config)
        self.network = system.networks()["tokenizer"]
        try:
            self.network.load_state_dict(load_file(Path(path) / _FILES[1]))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise ConfigError(f"tokenizer.path: {Path(path) / _FILES[1]} does not hold the weights that {_FILES[0]} "
                              f"beside it asks for ({' '.join(str(error).split())[:150]}); export the run once "
                              "more") from None
        self.eval().requires_grad_(False)
        self.fingerprint = fingerprint(*system.identity({"tokenizer": self.network}))
        self.codebook_size, self.temporal_patch_size = config.codebook_size, config.temporal_patch_size
        self.frame_shape, self.grid = tuple(config.shape), tuple(self.network.grid)

    def train(self, mode: bool = True) -> "Pretrained":
        """Stays in evaluation mode, whatever the network around it does."""
        return super().train(False)

    @torch.no_grad()
    def encode(self, video: Tensor, frames: Tensor | None = None) -> Tensor:
        """(B, T, C, H, W) float in [-1, 1], int64 (B,) real frames or None, all -> tokens int64 (B, t, h, w).

        ConfigError: frames of another shape, or a number of them that does not fit the temporal patch.
        """
        self.require_frames(tuple(video.shape[2:]))
        if (video.shape[1] - 1) % self.temporal_patch_size:
            raise ConfigError(f"data.num_frames: {video.shape[1]} frames do not fit the tokenizer's temporal patch of "
                              f"{self.temporal_patch_size}; take 1 + a multiple of it")
        return self.network.encode_tokens(video, frames)

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """int64 (B, t, h, w) -> (B, T, C, H, W) in [-1, 1]."""
        return self.network.decode_tokens(tokens)

    def facts(self, num_frames: int) -> dict[str, Any]:
        """What a model of clips of that many frames is told: codebook_size, temporal_patch_size, token_shape."""
        return {"codebook_size": self.codebook_size, "temporal_patch_size": self.temporal_patch_size,
                "token_shape": (1 + (num_frames - 1) // self.temporal_patch_size, *self.grid)}

    def require(self, config: Any) -> None:
        """ConfigError where a model's config is not of this tokenizer."""
        expected = config.tokenizer.fingerprint
        if expected not in (None, self.fingerprint):
            raise ConfigError(f"tokenizer.path: {self.path} is the tokenizer {self.fingerprint}, this model was "
                              f"trained with {expected} (tokenizer.fingerprint); put that one back there")
        for name, ours, theirs in (("codebook_size", config.codebook_size, self.codebook_size),
                                   ("temporal_patch_size", config.temporal_patch_size, self.temporal_patch_size),
                                   ("token_shape[1:]", tuple(config.token_shape[1:]), self.grid)):
            if ours != theirs:
                raise ConfigError(f"{name}: {ours} in the model, {theirs} in the tokenizer at {self.path}; leave "
                                  f"model.{name.partition('[')[0]} out, which takes the tokenizer's")
        if config.codes is not None and config.codes.first_stage != self.fingerprint:
            raise ConfigError(f"tokenizer.path: {self.path} is the tokenizer {self.fingerprint}, the tokens in "
                              f"data.path are of {config.codes.first_stage}; name the one that encoded them, or encode "
                              "with this one")

    def require_frames(self, shape: tuple[int, ...]) -> None:
        """ConfigError where frames are not (channels, height, width) as the tokenizer's are."""
        if shape != self.frame_shape:
            raise ConfigError(f"data: frames are {shape} (channels, height, width), the tokenizer at {self.path} takes "
                              f"{self.frame_shape}; set data.channels, data.height and data.image_size to its own")


def _config(path: str) -> Any:
    """The model section of the run that was exported, checked."""
    folder = Path(path)
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing and (folder / "run.yaml").is_file():
        raise ConfigError(f"tokenizer.path: {path} is a run; export it, launch/export.py {path} --format safetensors "
                          f"--out tokenizers/{folder.name}, and name that folder")
    if missing:
        raise ConfigError(f"tokenizer.path: {path} holds no {' and no '.join(missing)}; write one with "
                          f"launch/export.py RUN --format safetensors --out {path}")
    try:
        recipe = yaml.safe_load((folder / _FILES[0]).read_text(encoding="utf-8"))
        system, section = recipe["system"], recipe["model"]
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError):
        raise ConfigError(f"tokenizer.path: {folder / _FILES[0]} is no recipe with system and model; export the run "
                          "once more") from None
    if system != "phenaki.tokenizer":
        raise ConfigError(f"tokenizer.path: {path} is a {system}, and videos become tokens by a phenaki.tokenizer; "
                          "export a run of that system")
    return tokenizer.Config.model_validate(section)
