"""Opens the frozen first stage of `dstrain encode` (a run, an export of a run, or diffusers' AutoencoderKL or
AutoencoderRAE), and encodes samples with it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dstrain import systems
from dstrain.distributed import group
from dstrain.encoders import autoencoder
from dstrain.encoders.precision import Precision, cast_weights
from dstrain.encoders.text import TextEncoder, unpack_captions
from dstrain.recipe import ConfigError, Data, reword_errors
from dstrain.runs import trained
from dstrain.runs.weights import require_unaltered_files
from dstrain.systems.base import Batch
from dstrain.systems.codec import Codec, require_first_stage_system

_RUN = "RUN"  # the folder's name in the usage of dstrain encode


@dataclass(frozen=True)
class FirstStage:
    """Holds a frozen network that encodes images or clips."""

    name: str  # for messages
    fingerprint: str
    channels: int  # of its images
    # Encodes "image" uint8 (B, C, H, W), or "video" uint8 (B, T, C, H, W) with "frames" int64 (B,). Returns float32
    # (B, 2, c, h, w), mean and deviation, or token ids (B, h, w) or (B, t, h, w).
    codes: Callable[[Batch], np.ndarray]
    codebook_size: int | None = None  # of token ids
    data: Data | None = None  # what a run learned from


def open_run_as_first_stage(
    folder: Path, ema: float | None = None, raw: bool = False, step: int | None = None, precision: Precision = "fp32"
) -> FirstStage:
    """Opens the first stage in a run's folder, or in a folder that `dstrain export RUN --format safetensors` or
    `dstrain consolidate` has written. Moves the network to the rank's device.

    ema: the decay or width of the average to take from a run; None: the recipe's average
    raw: take the training weights of a run
    step: the step of a run's checkpoint; None: the newest

    Raises ConfigError if the folder is neither a run's nor an export, if its system encodes nothing, if weights are
    absent or damaged, or if `ema`, `raw` or `step` is given for an export.
    """
    if not (folder / "run.yaml").exists() and (folder / "recipe.yaml").exists():
        if ema is not None or raw or step is not None:
            raise ConfigError(
                f"{folder} is an export and holds weights of one kind: leave out --ema, --raw and "
                "--checkpoint, or name the run itself"
            )
        require_unaltered_files([folder])
        codec = Codec.load(folder, _RUN)
    else:
        codec = _open_codec_of_checkpoint(folder, ema, raw, step)
    codec.to(group.device())
    cast_weights(codec, precision)

    def encode_samples(batch: Batch) -> np.ndarray:
        """Encodes uint8 images (B, C, H, W) or videos (B, T, C, H, W). Returns token ids, or the means and standard
        deviations of latents, (B, 2, ...).
        """
        pixels = batch["video"] if "video" in batch else batch["image"]
        encoded = codec.encode(pixels.float() / 127.5 - 1, batch.get("frames"))
        if codec.kind == "tokens":
            return encoded["tokens"].cpu().numpy()
        return _stack_mean_and_std(encoded["latent_mean"], encoded["latent_std"])

    return FirstStage(
        str(folder), codec.fingerprint, codec.channels, encode_samples, codec.codebook_size, codec.run.data
    )


def _open_codec_of_checkpoint(folder: Path, ema: float | None, raw: bool, step: int | None) -> Codec:
    """Opens the first stage of a run with the weights of one of its checkpoints, in float32. The arguments and the
    errors are those of `open_run_as_first_stage`.
    """
    run = trained.read_recipe(folder)
    system = systems.build(run.system, run.model)
    require_first_stage_system(system, run, folder, _RUN)
    checkpoint = trained.find_checkpoint(folder, step, ema)
    kinds = trained.choose_raw_or_ema_by_part(system, checkpoint, run.samples.ema if ema is None else ema, raw)
    first = next(iter(system.parts))  # another part, such as a discriminator, encodes nothing
    networks = trained.load_networks(system, checkpoint, {first: kinds[first]}, torch.float32)
    return Codec(networks[first], system, run, str(folder), _RUN)


def open_diffusers_autoencoder(path: str, image_size: int | None, precision: Precision = "fp32") -> FirstStage:
    """Opens an AutoencoderKL or AutoencoderRAE of diffusers on the rank's device. `path` is its folder or its name on
    the hub.

    Raises ConfigError if the autoencoder cannot be loaded, or cannot encode pictures of `image_size` pixels a side.
    Does not check the size if `image_size` is None.
    """
    with reword_errors(
        options={"model.first_stage.path=": "--first-stage ", "model.first_stage.path:": f"--first-stage {path}:"}
    ):
        vae = autoencoder.Autoencoder(path).to(group.device())
    if image_size is not None and vae.image_size not in (None, image_size):
        raise ConfigError(f"--image-size {image_size}: {path} encodes pictures of {vae.image_size} pixels alone")
    if image_size is not None and image_size % vae.factor:
        raise ConfigError(f"--image-size {image_size} is no multiple of {vae.factor}, by which {path} shrinks images")

    def encode_images(batch: Batch) -> np.ndarray:
        """Encodes images, uint8 (B, C, H, W). Returns the means and standard deviations of latents, (B, 2, c, h, w)."""
        return _stack_mean_and_std(*autoencoder.encode_posterior(vae.vae, batch["image"].float() / 127.5 - 1))

    fingerprint = vae.compute_fingerprint()
    vae.set_encode_precision(precision)
    return FirstStage(path, fingerprint, vae.image_channels, encode_images)


def _stack_mean_and_std(mean: Tensor, std: Tensor) -> np.ndarray:
    """Returns the mean and the standard deviation, (b, ...) each, as one float32 array (b, 2, ...)."""
    return torch.stack((mean, std), dim=1).float().cpu().numpy()  # (B, 2, c, h, w)


class Encoder:
    """Encodes samples into the arrays of a shard (data/cached/shards.py), in batches of one fixed shape.

    stage     encodes images or clips
    texts     encodes captions; None: captions are kept as bytes
    encoding  describes the shards; made by commands/encoding/plan.py and kept in the folder's index
    """

    def __init__(self, stage: FirstStage, texts: TextEncoder | None, encoding: dict[str, Any]) -> None:
        self.stage, self.texts, self.encoding = stage, texts, encoding

    def encode_batch(self, batch: Batch) -> dict[str, np.ndarray]:
        """Encodes n samples, at most encoding["batch"], and returns arrays by name:

        "tokens" or "moments": the codes (n, views, ...); the views of a sample are its crops and their mirror images
        "text_encodings" and "text_mask": the encoded captions, if there is a text encoder
        other names: all other entries of the batch except pixels, (n, ...) each

        Fills up a smaller batch with copies of its last sample. Raises ConfigError if a value cannot be stored as a
        finite number.
        """
        encoding, count = self.encoding, len(next(iter(batch.values())))
        rows = torch.arange(encoding["batch"]).clamp(max=count - 1)
        tokens = encoding["kind"] == "tokens"
        codes = self._encode_crops_and_mirror_images({name: values[rows] for name, values in batch.items()})
        arrays = {"tokens" if tokens else "moments": codes}
        if self.texts is not None:
            arrays |= self._encode_texts(batch["caption"][rows])
        arrays = {name: self._convert_for_storage(name, array[:count]) for name, array in arrays.items()}
        inputs = ("image", "video")
        return arrays | {name: values.numpy() for name, values in batch.items() if name not in inputs}

    def _encode_crops_and_mirror_images(self, batch: Batch) -> np.ndarray:
        """Encodes all views of b images or clips: each crop, and its mirror image if encoding["flips"] is 2. Returns
        (b, crops * flips, ...). With several crops the images of the batch are (b, crops, C, H, W).
        """
        on_device = {name: values.to(group.device()) for name, values in batch.items()}
        views = [on_device]
        if "crops" in self.encoding:
            views = [{"image": crop} for crop in on_device["image"].unbind(1)]
        if self.encoding["flips"] == 2:
            views = [side for view in views for side in (view, {"image": view["image"].flip(-1)})]
        return np.stack([self.stage.codes(view) for view in views], axis=1)

    def _encode_texts(self, captions: Tensor) -> dict[str, np.ndarray]:
        """Encodes captions, uint8: one of each of b samples, (b, bytes), or K of each, (b, K, bytes). Returns the
        arrays "text_encodings" and "text_mask" by name, with the leading axes (b, ...) or (b, K, ...).
        """
        several = captions if captions.ndim == 3 else captions[:, None]
        encoded = [self.texts.encode(unpack_captions(several[:, k])) for k in range(several.shape[1])]
        arrays = {
            name: np.stack([texts[name].cpu().numpy() for texts in encoded], axis=1)
            for name in ("text_encodings", "text_mask")
        }
        return arrays if captions.ndim == 3 else {name: array[:, 0] for name, array in arrays.items()}

    def _convert_for_storage(self, name: str, array: np.ndarray) -> np.ndarray:
        """Returns an array in the dtype in which shards store it: int32 for tokens, the dtypes named in `encoding` for
        floats, and unchanged for all else. Raises ConfigError if a float is not finite in that dtype.
        """
        if array.dtype.kind != "f":
            return array.astype(np.int32) if name == "tokens" else array
        dtype = self.encoding["dtype"] if name == "moments" else self.encoding["text"]["dtype"]
        with np.errstate(over="ignore"):
            array = array.astype(dtype)
        if not np.isfinite(array).all():
            origin = f"{self.stage.name} gives latents" if name == "moments" else f"--text-encoder gives {name}"
            remedy = " in float16: take --dtype float32" if dtype == "float16" else ""
            raise ConfigError(f"{origin} that are not finite{remedy}")
        return array
