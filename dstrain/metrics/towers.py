"""Networks for metrics from files: DINOv2, CLIP and VideoMAE, and the TorchScript detectors of StyleGAN and EDM."""

import warnings
from pathlib import Path

import torch
from torch import Tensor

from dstrain.encoders.autoencoder import hash_network
from dstrain.encoders.image import ImageEncoder, VisionTower
from dstrain.encoders.precision import use_precision
from dstrain.encoders.text import TextEncoder
from dstrain.metrics.network import Features, convert_to_rgb
from dstrain.recipe import ConfigError, reword_errors


class Dino(Features):
    """Computes the class token of DINOv2 (N, D)."""

    name = "dinov2"

    def __init__(self, path: Path, device: torch.device) -> None:
        self.tower = VisionTower(path, self.name).to(device)
        self.size, self.fingerprint = self.tower.dim, hash_network({"kind": self.name}, self.tower.state_dict())

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, None]:
        with use_precision("fp32"):
            return self.tower.encode(convert_to_rgb(images).to(self.tower.mean.device)), None


class VideoMae(Dino):
    """Computes the mean token of VideoMAE (N, D). From each clip it takes as many evenly spaced frames as the network
    has inputs, and repeats frames of shorter clips.
    """

    name, videos = "videomae", True

    def __call__(self, images: Tensor) -> tuple[Tensor, None]:
        places = torch.arange(self.tower.num_frames) * images.shape[1] // self.tower.num_frames
        return super().__call__(images[:, places])


class Clip(Features):
    """Computes CLIP's embeddings of images, which are not normalized, and of texts. The text encoder is opened at the
    first use.
    """

    name = "clip"

    def __init__(self, path: Path, device: torch.device) -> None:
        with reword_errors(options={"image_encoder: ": "--features: "}):
            self.tower = ImageEncoder(str(path)).float().to(device)
        self._path, self._reader = str(path), None
        self.size, self.fingerprint = self.tower.embed_dim, hash_network({"kind": self.name}, self.tower.state_dict())

    def __call__(self, images: Tensor) -> tuple[Tensor, None]:
        with use_precision("fp32"):
            return self.tower.encode(convert_to_rgb(images).to(self.tower.mean.device)), None

    def embed_texts(self, captions: list[str]) -> Tensor:
        if self._reader is None:
            self._reader = TextEncoder(self._path).float().to(self.tower.mean.device)
        with use_precision("fp32"):
            return self._reader.encode(captions)["text_embed"]


class Scripted(Features):
    """Runs a TorchScript detector of StyleGAN or EDM on uint8 images of any size, which the detector resizes. The
    constructor raises ConfigError if the file is no TorchScript.
    """

    name = "torchscript"
    _probe = (1, 3, 64, 64)

    def __init__(self, path: Path, device: torch.device) -> None:
        try:
            with warnings.catch_warnings(action="ignore", category=FutureWarning):  # such files are old
                self.network = torch.jit.load(str(path), map_location=device).eval()
        except RuntimeError as error:
            reason = str(error).splitlines()[0].split(". ")[0]
            raise ConfigError(
                f"--features {self.name}:{path} is no TorchScript file ({reason}); pickled detectors "
                "(.pkl) are not read"
            ) from None
        self.device, weights = device, self.network.state_dict()
        self.fingerprint = hash_network({"kind": self.name, "code": self.network.code}, weights)
        self.size = self(torch.zeros(self._probe, dtype=torch.uint8))[0].shape[1]

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, None]:
        with use_precision("fp32"):
            return self.network(convert_to_rgb(images).to(self.device), return_features=True).float(), None


class ScriptedVideo(Scripted):
    """Computes the features for FVD (Unterthiner et al. 2018) by StyleGAN-V's I3D, of clips of 10 or more frames."""

    name, videos = "i3d", True
    _probe = (1, 16, 3, 64, 64)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, None]:
        clips = convert_to_rgb(images).to(self.device).transpose(1, 2).float()  # (N, 3, T, H, W)
        with use_precision("fp32"):
            return self.network(clips, rescale=True, resize=True, return_features=True).float(), None
