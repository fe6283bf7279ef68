"""What a system may add to the members that every system has, in groups. All have defaults, which System inherits."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.recipe import ConfigError, Samples
from dstrain.systems.types import Example, Nets, Progress, Terms

CHOICES = ("spacing", "eta", "guidance_rescale", "guidance_interval")  # fields of both Samples and Request


class Figures:
    """Figures beyond the held-out loss, and pictures beside the samples."""

    def measure(self, nets: Nets, example: Example, num_steps: int | None = None, progress: Progress = iter) -> Terms:
        """Measures what dstrain evaluate averages over held-out samples: values (B,), curves (B, K) such as bits by
        timestep.

        `num_steps` shortens a chain, None takes the whole. By default the terms of `evaluate`.
        """
        return self.evaluate(nets, example)

    def digest(self, means: dict[str, Tensor]) -> dict[str, float]:
        """Returns figures of the means (K,) of `evaluate`'s curves over all held-out samples, such as codebook
        usage.
        """
        return {}

    def pictures(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """Returns pictures beside the samples, such as reconstructions: uint8 (B, C, H, W) or (B, T, C, H, W) each."""
        return {}


class Stateful:
    """Small state that is no weight, such as a history of losses by timestep. It is saved, and equal on all ranks."""

    watched: tuple[str, ...] = ()  # terms by sample that `observe` sees after a step, and no report

    def observe(self, terms: Terms) -> None:
        """Learns from the `watched` terms of a step, (N, ...) each, of all ranks, in the order of the global batch."""

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state:
            raise ConfigError(f"{type(self).__name__} keeps no state, the checkpoint holds {', '.join(sorted(state))}")


class Prompted:
    """Samples that begin from texts, pictures or frames."""

    starts_from_data: bool = False  # whether samples or `pictures` need data: reconstruction, upsampling

    takes_embeddings: int = 0  # width of the image embeddings that samples begin from; 0: of none
    draws_embeddings: int = 0  # width of the embeddings that `sample` draws; 0: it draws pictures

    @property
    def takes_texts(self) -> bool:
        """Returns whether samples can begin from texts."""
        return type(self).conditions_from_texts is not Prompted.conditions_from_texts

    def conditions_from_texts(self, texts: list[str]) -> dict[str, Tensor]:
        """Returns the conditions of each text, (N, ...). Raises ConfigError if the system takes no texts."""
        raise ConfigError(f"a {type(self).__name__} takes no texts")

    def conditions_to_avoid(self, text: str, num: int) -> dict[str, Tensor]:
        """Returns the conditions of a negative prompt, from which guidance leads `num` samples away, (num,
        ...) each.
        """
        raise ConfigError(f"a {type(self).__name__} is led away from no text")

    def describe_cut(self, texts: list[str], what: str) -> str:
        """Returns a line that says how much of `texts` (`what`: prompts, captions) is cut because the model does not
        read it; "" if nothing is.
        """
        return ""

    @property
    def takes_pictures(self) -> bool:
        """Returns whether samples can begin from pictures or frames."""
        return type(self).conditions_from is not Prompted.conditions_from

    def conditions_from(self, images: Tensor) -> dict[str, Tensor]:
        """Returns the conditions of given pictures, uint8 (N, C, H, W), from which samples begin.

        A system of videos takes their first frames, (N, K, C, H, W) with K = 1 + m * temporal_patch_size. A system of
        embeddings takes float32 (N, takes_embeddings).

        Raises ConfigError if the system begins from noise, or the pictures do not fit.
        """
        raise ConfigError(f"a {type(self).__name__} begins from noise and takes no pictures")


class Sampling:
    """Choices of Samples and Request beyond sampler, num_steps and guidance_scale, and other ways
    to begin or to guide.
    """

    sampling: tuple[str, ...] = ()  # the names of those that `sample` reads, see CHOICES
    takes_sizes: bool = False  # whether it draws pictures of any Request.size
    inverts: bool = False  # whether conditions may hold `invert`, uint8 (N, C, H, W): pictures
    # that are carried to noise, and drawn again from it

    def check_sampling(self, samples: Samples) -> None:
        """Raises ConfigError for choices that this system does not read, or that do not go with its sampler."""
        usual, kind, problems = Samples(), type(self).__name__, []
        if samples.size is not None and not self.takes_sizes:
            problems.append(
                f"samples.size={list(samples.size)}, or --size: a {kind} draws pictures of one size; leave it out"
            )
        for name in CHOICES:
            value = getattr(samples, name)
            if value != getattr(usual, name) and name not in self.sampling:
                option = f"--{name.replace('_', '-')}"
                problems.append(f"samples.{name}={value}, or {option}: a {kind} does not read it; leave it out")
        if problems:
            raise ConfigError(*problems)

    def require_guide(self, other: Any) -> None:
        """Raises ConfigError if the networks of the system `other`, as `guide` in `nets`, cannot guide this one's
        samples.
        """
        raise ConfigError(f"a {type(self).__name__} is guided by no other run; leave it out")


class Videos:
    """Samples that are videos."""

    num_frames: int | None = None  # of the longest clip, the default of `sample`; None: no videos
    temporal_patch_size: int = 1  # frames of a latent step: a clip has 1 + k * this


class FirstStage:
    """A first stage: dstrain encode caches its codes, other systems learn from them, and decode what they draw."""

    encodes: bool = False  # whether it has `codes`
    codebook_size: int | None = None  # number of ids that `codes` may give; None: latents

    def codes(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """Returns the codes of images, before any noise: latent_mean and latent_std float32 (B, C, h, w), or tokens
        int64 (B, h, w); of videos (B, T, C, H, W), of which example["frames"] (B,) are real, tokens (B, t, h, w).
        """
        raise ConfigError(f"a {type(self).__name__} encodes nothing that others learn from")

    def decode(self, nets: Nets, codes: Tensor) -> Tensor:
        """Returns the pixels of `codes`, float32 in [-1, 1]: of tokens, or of latents that are a mean or a draw from
        the posterior. Images (B, C, H, W); of tokens (B, t, h, w) videos (B, T, C, H, W).
        """
        raise ConfigError(f"a {type(self).__name__} decodes nothing that others draw")

    def identity(self, nets: Nets) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the config, as JSON, and the weights by name, on which the `codes` depend. Their hash tells first
        stages apart. Raises ConfigError if the system has no codes.
        """
        raise ConfigError(f"a {type(self).__name__} encodes nothing that others learn from")


class Imports:
    """Weights that were trained elsewhere, or go there."""

    in_pipeline: str = ""  # where a pipeline of diffusers keeps what `from_diffusers` takes

    def on_meta(self, part: str) -> nn.Module:
        """Returns a part's network without values, for its names and shapes."""
        return self.networks_on_meta()[part]

    def networks_on_meta(self) -> dict[str, nn.Module]:
        """Builds the networks without values, for their names, shapes and operations."""
        with torch.device("meta"):
            networks = self.networks()
        for network in networks.values():
            network.to("meta")  # Buffers that numpy has made have values.
        return networks

    def rename_published(self, part: str, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """Returns weights of a file that dstrain has not written, renamed as `adapt` takes them, and notes for the
        user.
        """
        return state, []

    def adapt(self, part: str, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """Returns weights from elsewhere fitted to the part's network, and notes on what was changed.

        Raises ConfigError for the first difference that cannot be bridged, with both shapes and the remedy.
        """
        expected = self.on_meta(part).state_dict()
        for name in [*expected, *state]:
            in_network, in_file = (
                tuple(weights[name].shape) if name in weights else "absent" for weights in (expected, state)
            )
            if in_network != in_file:
                raise ConfigError(
                    f"weights: {name} is {in_file} in the file and {in_network} in the network; set the "
                    "model section to what the file was made with"
                )
        return dict(state), []

    def from_diffusers(
        self, state: dict[str, Tensor], diffusers_config: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Returns weights of the first part under diffusers' names, renamed as `adapt` takes them, and notes for the
        user.

        Raises ConfigError for another class, or a field that differs from the recipe's.
        """
        raise ConfigError(
            f"weights: config.json is of class {diffusers_config.get('_class_name')} of diffusers, which "
            f"a {type(self).__name__} does not begin from; give a file or folder of this system"
        )

    def require_expressible(self) -> None:
        """Raises ConfigError if dstrain export cannot write such a model for diffusers, whatever its weights are."""
        raise ConfigError(f"a {type(self).__name__} has no form in diffusers: take --format safetensors")
