"""Loads a trained run in a notebook: its recipe, system, networks and samples, in one process and without DeepSpeed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dstrain import recipe, systems
from dstrain.data.batches import iterate_held_out
from dstrain.data.open import open_sources
from dstrain.disk import owner
from dstrain.distributed import group
from dstrain.recipe import ConfigError, Run, trust
from dstrain.runs import trained
from dstrain.runs.weights import read_weights_adapted_to_system
from dstrain.sampling.draw import draw_all_samples, evaluate_held_out_batches
from dstrain.sampling.requests import make_sampling_request_and_captions
from dstrain.systems.base import System

_EXPORTED = "recipe.yaml"  # what `export --format safetensors` writes beside the weights


@dataclass(frozen=True, repr=False)
class TrainedRun:
    """Holds a run that `load` has read. Parts that only teach others in training, such as a discriminator, are left
    out.
    """

    folder: Path
    recipe: Run
    system: System  # losses, sampler, conditions: see dstrain/systems/base.py
    networks: dict[str, nn.Module]  # by part, in evaluation mode; {"denoiser": ...} of a DiT
    weights: dict[str, str]  # by part: ema.DECAY, master (the training weights) or exported
    step: int | None  # of the checkpoint; None of an export
    device: torch.device

    def __repr__(self) -> str:
        parts = ", ".join(f"{part}: {kind}" for part, kind in self.weights.items())
        return f"TrainedRun({self.folder}, {self.recipe.system}, step {self.step}, {parts}, {self.device})"

    def sample(
        self,
        num: int = 16,
        *,
        labels: Sequence[int] | None = None,
        prompts: Sequence[str] | None = None,
        images: Tensor | None = None,
        seed: int = 0,
        num_steps: int | None = None,
        sampler: str | None = None,
        guidance_scale: float | None = None,
        num_frames: int | None = None,
        spacing: str | None = None,
        eta: float | None = None,
        guidance_rescale: float | None = None,
        guidance_interval: tuple[float, float] | None = None,
        batch: int = 16,
    ) -> Tensor:
        """Draws `num` samples on the CPU: uint8 images (num, C, H, W), videos (num, T, C, H, W) or float32 embeddings
        (num, D).

        Sample i is a function of seed + i, the same that dstrain generate draws. labels and prompts are repeated to
        `num`. Any other choice that is None is taken from the recipe's `samples` section, which also explains it.
        Raises ConfigError if the system does not support a choice.

        images   what samples begin from, if not from noise alone: smaller images to enlarge, uint8 (N, C, H, W); frames
                 that videos go on from, uint8 (N, K, C, H, W); or for a decoder image embeddings, (N, D)
        batch    samples in one call of the networks
        """
        if images is None and self.system.starts_from_data and self.system.generates:
            kind = "image embeddings" if self.system.takes_embeddings else "smaller pictures"
            raise ConfigError(f"{self.folder} draws from {kind}: give them as images=, uint8 (N, C, H, W), or (N, D)")
        request, _ = make_sampling_request_and_captions(
            self.recipe.samples,
            self.system,
            num,
            seed,
            labels=labels,
            prompts=prompts,
            images=images,
            num_steps=num_steps,
            sampler=sampler,
            guidance_scale=guidance_scale,
            num_frames=num_frames,
            spacing=spacing,
            eta=eta,
            guidance_rescale=guidance_rescale,
            guidance_interval=guidance_interval,
        )
        return draw_all_samples(self.system, self.networks, request, min(batch, num), self.device)

    def evaluate(self, num: int | None = None, batch: int = 16) -> dict[str, float]:
        """Returns {name: mean} of the system's evaluation terms, such as loss, over the first `num` held-out samples;
        None takes all. `batch` is the number of samples in one call of the networks.

        Raises ConfigError if the data are missing, or if none of them are held out.
        """
        source = open_sources(self.recipe.data, run=self.folder)[1]
        if source is None:
            raise ConfigError(f"{self.recipe.data.path} has no held-out samples: data.held_out=0.02 keeps a share")
        return evaluate_held_out_batches(
            self.system,
            self.networks,
            iterate_held_out(source, batch, device=self.device, seed=self.recipe.seed, limit=num),
        )


def load(
    folder: str | Path,
    *,
    ema: float | None = None,
    raw: bool = False,
    step: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    trust_system: str | None = None,
) -> TrainedRun:
    """Loads a run's folder, or a folder that `dstrain export --format safetensors` has written.

    ema            decay or width of the average to take; None for the recipe's choice
    raw            True takes the training weights instead of an average
    step           the checkpoint's step; None for the newest whole one
    device         None for the GPU, if there is one, else the CPU
    dtype          of the weights
    trust_system   a package with a system from outside dstrain that the folder may name, and that is then imported

    Raises ConfigError if the folder is neither, or does not hold these weights.
    """
    if trust_system is not None:
        trust.trust_system(trust_system)
    if raw and ema is not None:
        raise ConfigError("ema= and raw= choose different weights: give one of the two")
    folder = Path(folder)
    device = torch.device(device) if device is not None else group.device()
    exported = (folder / _EXPORTED).exists() and not (folder / "run.yaml").exists()
    run = recipe.load_recipe(folder / _EXPORTED) if exported else trained.read_recipe(folder)
    system = systems.build(run.system, run.model)
    if exported:
        if raw or ema is not None or step is not None:
            raise ConfigError(f"{folder} is an export and holds one set of weights: leave out ema=, raw= and step=")
        states = {
            part: state for part, (state, _) in read_weights_adapted_to_system(folder, system, system.averaged).items()
        }
        networks, kinds = (
            trained.build_networks_from_states(system, states.items(), dtype, device),
            dict.fromkeys(states, "exported"),
        )
    else:
        checkpoint = trained.find_checkpoint(folder, step, ema)
        kinds = trained.choose_raw_or_ema_by_part(system, checkpoint, run.samples.ema if ema is None else ema, raw)
        networks = trained.load_networks(system, checkpoint, kinds, dtype, device)
        owner.release_all_holds()
        step = int(checkpoint.name.removeprefix("step_"))
    return TrainedRun(folder, run, system, networks, kinds, step, device)
