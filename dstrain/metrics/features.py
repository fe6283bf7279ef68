"""Opens the networks whose features metrics compare, each by KIND:PATH, or by its name if it is built in.

    inception:FILE       Inception as FID needs it, by pytorch-fid's weights (pt_inception-2015-12-05-*.pth) or by those
                         of torch-fidelity (weights-inception-2015-12-05-*.pth); images are resized as in TensorFlow 1,
                         which is what ADM, torch-fidelity, StyleGAN and EDM do
    pytorch-fid:FILE     the same weights, images resized as pytorch-fid does
    clean-fid:FILE       the same weights, images resized as clean-fid does
    torchscript:FILE     a TorchScript detector of StyleGAN and EDM, such as inception-2015-12-05.pt; it resizes itself
    dinov2:FOLDER        a copy of facebook/dinov2-* (config.json, *.safetensors), the features of FD-DINOv2
    clip:FOLDER          a CLIP model with its tokenizer
    videomae:FOLDER      a copy of MCG-NJU/videomae-*, for FVD
    i3d:FILE             the TorchScript I3D of StyleGAN-V (i3d_torchscript.pt), for FVD
    builtin              the classifier in this package, for the built-in clothes
    emoji                the image tower in this package, for pictures of the built-in emoji's names

Nothing is downloaded: if a file or folder is absent, `open_feature_network` raises a ConfigError that says where
to get it.
"""

import os
from pathlib import Path

import torch

from dstrain.distributed import group
from dstrain.metrics import inception, towers
from dstrain.metrics.builtin import Builtin, Emoji
from dstrain.metrics.network import Features
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
BUILT_IN = {"builtin": Builtin, "emoji": Emoji}
_TOWERS = {
    "torchscript": towers.Scripted,
    "i3d": towers.ScriptedVideo,
    "dinov2": towers.Dino,
    "clip": towers.Clip,
    "videomae": towers.VideoMae,
}


def require_known_network_kind(network_name: str) -> None:
    """Raises ConfigError if the name of a network, KIND:PATH or that of a built-in one, begins with an unknown kind.
    The path is not checked.
    """
    if network_name not in BUILT_IN and network_name.partition(":")[0] not in SOURCES:
        known = (*BUILT_IN, *(f"{name}:PATH" for name in SOURCES))
        raise ConfigError(f"--features {network_name}: known are {', '.join(known)}")


def open_feature_network(network_name: str, device: torch.device | None = None) -> Features:
    """Opens a network by its name, such as inception:FILE or builtin, on a device (None: the rank's device).

    Raises ConfigError if the kind is unknown, if the path does not exist, or if the file holds another network.
    """
    require_known_network_kind(network_name)
    kind, _, path = network_name.partition(":")
    device = device or group.device()
    if network_name in BUILT_IN:
        return BUILT_IN[network_name](device)
    path, folder = Path(os.path.expanduser(path)), SOURCES[kind].startswith("a folder")
    if not (path.is_dir() if folder else path.is_file()):
        raise ConfigError(
            f"--features {network_name}: there is no such {'folder' if folder else 'file'}; get "
            f"{SOURCES[kind]}, and give its path"
        )
    return inception.open_inception(kind, path, device) if kind in inception.KINDS else _TOWERS[kind](path, device)
