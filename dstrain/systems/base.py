"""What a system is: the contract between one generative model and the loop.

Two words are our own. A *part* is a network with an optimizer of its own. A *turn* is the moment within a step at which
a part learns. A system says what is learned and never how it is sharded: it knows no rank, no engine and no file.

A system touches weights only by calling its networks, since under ZeRO-3 nothing else is there (`nets` maps a part's
name to a DeepSpeed engine, or to a bare module in tests and sampling). All randomness comes from `example["key"]`
(see dstrain/rng.py), so that it belongs to a sample and not to a rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.recipe import ConfigError

Batch = dict[str, Tensor]     # from data, on the device: image uint8 (B, C, H, W), label int64 (B,), ..., and of each
                              # sample key, position in the global batch and (in training) step, int64 (B,)
Example = dict[str, Tensor]   # what a loss reads: x_start float32 (B, C, ...), conditions, key int64 (B,)
Terms = dict[str, Tensor]     # "loss", the scalar to descend; all others detached, a scalar or one value a sample (B,):
                              # loss_each, the loss by sample; quartile, int64 0..3, by which these are split, too
Nets = Mapping[str, Callable[..., Tensor]]
Loss = Callable[[Nets, Example], Terms]       # may leave in the example what a later turn of the micro-batch reads
Progress = Callable[[Iterable[int]], Iterable[int]]                   # tqdm and the like; `iter` shows nothing


@dataclass(frozen=True)
class Request:
    """What to draw: one sample for each seed."""

    seeds: Tensor                                                     # (N,) int64; a sample is a function of its seed
    conditions: dict[str, Tensor] = field(default_factory=dict)       # for example label (N,) int64
    num_steps: int = 50                                               # network evaluations for each sample
    sampler: str = "ddim"
    guidance_scale: float = 1.0                                       # 1 is none
    num_frames: int | None = None                                     # of videos; None: the model's


class System(ABC):
    """One generative model: networks, losses, sampler. Plain torch: no rank, no engine, no file."""

    parts: dict[str, Loss]                        # trained networks and their losses, in update order
    averaged: tuple[str, ...]                     # parts that have an EMA
    watched: tuple[str, ...] = ()                 # terms by sample that `observe` sees after a step, and no report
    generates: bool = True                        # whether training draws grids of `sample`; an autoencoder shows its
                                                  # `pictures` alone, embeddings are none
    starts_from_data: bool = False                # whether samples or pictures need data: reconstruction, upsampling
    encodes: bool = False                         # whether there are `codes`, which launch/encode.py caches
    codebook_size: int | None = None              # number of ids that `codes` may give; None: latents, or no codes
    samplers: tuple[str, ...] = ()                # what Request.sampler may be; () where there is no choice
    num_frames: int | None = None                 # of the longest clips, which `sample` draws unasked; None: no videos
    temporal_patch_size: int = 1                  # frames of a latent step: a clip has 1 + k * this
    in_pipeline: str = ""                         # where a pipeline of diffusers keeps what `from_diffusers` takes

    @abstractmethod
    def networks(self) -> dict[str, nn.Module]:
        """Fresh modules, keys as `parts`; may run under deepspeed's zero.Init."""

    def sample(self, nets: Nets, request: Request) -> Tensor:
        """Draws uint8 images (N, C, H, W) or videos (N, T, C, H, W), or float32 embeddings (N, D), from the request's
        seeds; ranks call alike.
        """
        raise ConfigError(f"a {type(self).__name__} draws no samples")

    @abstractmethod
    def synthetic(self, batch_size: int) -> Batch:
        """A batch of the right shapes and random content, for plan, bench and tests."""

    def turns(self, step: int) -> tuple[str, ...]:
        """The parts that learn at `step`, in order."""
        return tuple(self.parts)

    def encode(self, batch: Batch) -> Example:
        """What a loss reads of a batch: images to [-1, 1]. No gradient."""
        example = {name: tensor for name, tensor in batch.items() if name != "image"}
        example["x_start"] = batch["image"].float() / 127.5 - 1
        return example

    def accepts(self, source: Any) -> None:
        """Meets a source before anything is trained. ConfigError: its items do not fit the model, with the remedy."""

    def fingerprint(self, source: Any) -> str:
        """What is learned from, as a run writes it down to notice a change: the source's own words, then those of what
        the recipe names without fixing it, such as the encoder of captions that are not cached.
        """
        return source.fingerprint()

    def loss(self, part: str, nets: Nets, example: Example) -> Terms:
        return self.parts[part](nets, example)

    def evaluate(self, nets: Nets, example: Example) -> Terms:
        """Terms on held-out data, one value a sample (B,) each; by default those of the first part's loss.

        Curves (B, K) are averaged, too, and go to `digest`.
        """
        return self.loss(next(iter(self.parts)), nets, example)

    def measure(self, nets: Nets, example: Example, num_steps: int | None = None, progress: Progress = iter) -> Terms:
        """What launch/evaluate.py averages over held-out samples: values (B,), curves (B, K) such as bits by timestep.

        `num_steps` shortens a chain, None takes the whole. By default the terms of `evaluate`.
        """
        return self.evaluate(nets, example)

    def digest(self, means: dict[str, Tensor]) -> dict[str, float]:
        """Figures that follow from the means over all held-out samples of the curves (K,) of `evaluate`, as codebook
        usage does, which is no mean of a sample's. By default none.
        """
        return {}

    def observe(self, seen: Terms) -> None:
        """Learns from the `watched` terms of a step, (N, ...) each, of all ranks, in the order of the global batch."""

    def pictures(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """Pictures beside the samples, uint8 (N, C, H, W) or (N, T, C, H, W) each: reconstructions and the like. By
        default none.
        """
        return {}

    def codes(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """What this first stage makes of images, before any noise: latent_mean and latent_std float32 (B, C, h, w), or
        tokens int64 (B, h, w); of videos (B, T, C, H, W), of which example["frames"] (B,) are real, (B, t, h, w).
        """
        raise ConfigError(f"a {type(self).__name__} encodes nothing that others learn from")

    def identity(self, nets: Nets) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What decides the `codes`: a config, as JSON, and weights by name. Their hash tells first stages apart."""
        raise ConfigError(f"a {type(self).__name__} encodes nothing that others learn from")

    def conditions(self, num: int, labels: tuple[int, ...] | None = None) -> dict[str, Tensor]:
        """Conditions for `num` samples, (num, ...) each: the labels in turn, None for a choice of the system's own."""
        return {}

    def conditions_from_texts(self, texts: list[str]) -> dict[str, Tensor]:
        """Conditions for one sample for each text, (N, ...) each. ConfigError: the system takes none."""
        raise ConfigError(f"a {type(self).__name__} takes no texts")

    @property
    def takes_texts(self) -> bool:
        """Whether there are conditions of texts."""
        return type(self).conditions_from_texts is not System.conditions_from_texts

    def conditions_from(self, images: Tensor) -> dict[str, Tensor]:
        """Conditions that begin from pictures, uint8 (N, C, H, W): those of another run, or of the data. Of a system
        that draws videos, from their first frames, (N, K, C, H, W) with K = 1 + m * temporal_patch_size.

        ConfigError: the system begins from noise, or the pictures do not fit.
        """
        raise ConfigError(f"a {type(self).__name__} begins from noise and takes no pictures")

    def adapt(self, part: str, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """A state dict from elsewhere as the part's network takes it, and what was changed in words.

        ConfigError: the first difference that cannot be bridged, both shapes, and the remedy.
        """
        with torch.device("meta"):
            wanted = self.networks()[part].state_dict()
        for name in [*wanted, *state]:
            ours, theirs = (tuple(of[name].shape) if name in of else "absent" for of in (wanted, state))
            if ours != theirs:
                raise ConfigError(f"weights: {name} is {theirs} in the file and {ours} in the network; set the model "
                                  "section to what the file was made with")
        return dict(state), []

    def from_diffusers(self, state: dict[str, Tensor],
                       diffusers_config: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
        """Weights of the first part under diffusers' names, renamed as `adapt` takes them, and notes on them.

        diffusers_config: the config.json beside them. ConfigError: another class, or a field that differs from the
        recipe's.
        """
        raise ConfigError(f"weights: config.json is of class {diffusers_config.get('_class_name')} of diffusers, which "
                          f"a {type(self).__name__} does not begin from; give a file or folder of this system")

    def decays(self, name: str, weight: Tensor) -> bool:
        """Whether weight decay applies to a parameter: matrices and filters, not biases and gains."""
        return weight.ndim >= 2

    def blocks(self) -> tuple[type[nn.Module], ...]:
        """The repeated unit of the networks: what is compiled, recomputed and planned by."""
        return ()

    def frozen(self) -> tuple[nn.Module, ...]:
        """Networks that are moved to the device and never trained, averaged or saved."""
        return ()

    def state_dict(self) -> dict[str, Tensor]:
        """Small state that is not a weight, equal on all ranks, such as a history of losses by timestep."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state:
            raise ConfigError(f"{type(self).__name__} keeps no state, the checkpoint holds {', '.join(sorted(state))}")


