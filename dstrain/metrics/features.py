"""Networks that turn images into the features which metrics compare, opened by kind and path.

    inception:FILE       Inception as FID needs it, weights of pytorch-fid and torch-fidelity (pt_inception-2015-12-05-*.pth
                         or weights-inception-2015-12-05-*.pth); images resized as in TensorFlow 1: ADM, torch-fidelity, EDM
    pytorch-fid:FILE     the same weights, images resized as pytorch-fid does
    clean-fid:FILE       the same weights, images resized as clean-fid does
    torchscript:FILE     a TorchScript detector of StyleGAN and EDM, such as inception-2015-12-05.pt, which resizes itself
    dinov2:FOLDER        a copy of facebook/dinov2-* (config.json, *.safetensors), the features of FD-DINOv2
    clip:FOLDER          a CLIP model with its tokenizer
    videomae:FOLDER      a copy of MCG-NJU/videomae-*, for FVD
    i3d:FILE             the TorchScript I3D of StyleGAN-V (i3d_torchscript.pt), for FVD
    builtin              the classifier in this package, for the built-in clothes

Nothing is fetched: what is not there is a ConfigError that says where to get it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dstrain.ranks import group
from dstrain.recipe import ConfigError

# Kind: where its weights come from, for the message when they are not there.
SOURCES = {
    "inception": "pt_inception-2015-12-05-6726825d.pth of the releases of github.com/mseitzer/pytorch-fid",
    "pytorch-fid": "pt_inception-2015-12-05-6726825d.pth of the releases of github.com/mseitzer/pytorch-fid",
    "clean-fid": "pt_inception-2015-12-05-6726825d.pth of the releases of github.com/mseitzer/pytorch-fid",
    "torchscript": "inception-2015-12-05.pt, which StyleGAN2-ADA and clean-fid download",
    "dinov2": "a folder made by `hf download facebook/dinov2-large --local-dir FOLDER`",
    "clip": "a folder made by `hf download openai/clip-vit-large-patch14 --local-dir FOLDER`",
    "videomae": "a folder made by `hf download MCG-NJU/videomae-base-finetuned-kinetics --local-dir FOLDER`",
    "i3d": "i3d_torchscript.pt, which StyleGAN-V downloads",
}


class Features(ABC):
    """A frozen network in fp32 that describes each image by a vector.

    name         the kind, such as inception; figures of different kinds are never compared
    size         D, the length of the vector
    fingerprint  a short hash of what decides the features: weights and preprocessing
    classes      names of what the logits tell apart, None where the classes have no use here
    videos       whether it takes clips uint8 (N, T, C, H, W) instead of images
    spatial      for sFID: the network whose features keep positions, None for networks without one
    """

    name: str
    size: int
    fingerprint: str
    classes: tuple[str, ...] | None = None
    videos: bool = False
    spatial: "Features | None" = None

    @abstractmethod
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """uint8 (N, C, H, W) on any device -> features float32 (N, D), and logits float32 (N, K) or None."""

    def texts(self, captions: list[str]) -> Tensor | None:
        """Vectors float32 (N, D) of texts that are comparable with those of images; None: it reads no texts."""
        return None


def open_features(words: str, device: torch.device | None = None) -> Features:
    """The network that KIND:PATH names, on a device (None: the rank's). ConfigError: unknown, absent or another's."""
    kind, _, path = words.partition(":")
    device = device or group.device()
    if kind == "builtin" and not path:
        return _builtin(device)
    if kind not in SOURCES:
        raise ConfigError(f"--features {words}: known are builtin, {', '.join(f'{name}:PATH' for name in SOURCES)}")
    path = Path(path).expanduser()
    if not path.exists() or path.is_dir() != (SOURCES[kind].startswith("a folder")):
        raise ConfigError(f"--features {words}: there is no such {'folder' if 'FOLDER' in SOURCES[kind] else 'file'}; "
                          f"get {SOURCES[kind]}, and give its path")
    return _openers()[kind](path, device)


def _openers() -> dict[str, Callable[[Path, torch.device], Features]]:
    from dstrain.metrics import inception, towers                 # they import this module

    return {kind: inception.open_weights(kind) for kind in ("inception", "pytorch-fid", "clean-fid")} | {
        "torchscript": towers.Scripted, "i3d": towers.ScriptedVideo, "dinov2": towers.Dino, "clip": towers.Clip,
        "videomae": towers.VideoMae}


def _builtin(device: torch.device) -> Features:
    raise ConfigError("--features builtin: this version has no built-in classifier; name another network")


def three_channels(images: Tensor) -> Tensor:
    """Images as RGB, (..., 3, H, W): grey is repeated, RGBA is laid on white, all uint8."""
    channels = images.shape[-3]
    if channels == 4:
        colour, alpha = images[..., :3, :, :].float(), images[..., 3:, :, :].float() / 255
        return (colour * alpha + 255 * (1 - alpha)).round().to(torch.uint8)
    return images.expand(*images.shape[:-3], 3, *images.shape[-2:]) if channels == 1 else images
