"""Members that a system may add to those that every system has, in groups. System inherits a default for each."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.recipe import ConfigError, Samples
from dstrain.systems.types import Example, Nets, Progress, Terms

CHOICES = ("spacing", "eta", "guidance_rescale", "guidance_interval")  # fields of both Samples and Request


class Figures:
    """Further measures on held-out data, and further pictures in training."""

    def measure(self, nets: Nets, example: Example, num_steps: int | None = None, progress: Progress = iter) -> Terms:
        """Returns the terms that `dstrain evaluate` averages over held-out samples: values (B,), or curves (B, K) such
        as bits by timestep. By default returns the terms of `evaluate`.

        num_steps: how many steps of a chain to take; None takes all steps. progress: shows the progress of such a
        chain.
        """
        return self.evaluate(nets, example)

    def digest(self, means: dict[str, Tensor]) -> dict[str, float]:
        """Returns figures by name, such as the codebook usage, computed from `means`: the curves (K,) that `evaluate`
        returns, each averaged over all held-out samples. {} by default.
        """
        return {}

    def pictures(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """Returns pictures to show beside the samples, such as reconstructions, by name: uint8 (B, C, H, W) or
        (B, T, C, H, W). {} by default.
        """
        return {}


class Stateful:
    """Small state beside the weights, such as a history of losses by timestep. It is saved in checkpoints, and must be
    equal on all ranks.
    """

    watched: tuple[str, ...] = ()  # terms by sample that `observe` sees after a step, and no report

    def observe(self, terms: Terms) -> None:
        """Updates the state after a step from its `watched` terms, (N, ...) each: those of all ranks, in the order of
        the global batch. By default does nothing.
        """

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
        """Returns the conditions for N texts by name, (N, ...) each. Raises ConfigError if the system takes no
        texts.
        """
        raise ConfigError(f"a {type(self).__name__} takes no texts")

    def conditions_to_avoid(self, text: str, num: int) -> dict[str, Tensor]:
        """Returns the conditions of a negative prompt `text` by name, (num, ...) each, for `num` samples. Guidance
        leads the samples away from this prompt. Raises ConfigError by default.
        """
        raise ConfigError(f"a {type(self).__name__} is led away from no text")

    def describe_cut(self, texts: list[str], what: str) -> str:
        """Returns a line that says how many tokens of the texts are cut off, since the model reads only a limited
        number of them; "" if none is, and by default. what: the word for the texts in this line, such as prompts or
        captions.
        """
        return ""

    @property
    def takes_pictures(self) -> bool:
        """Returns whether samples can begin from pictures or frames."""
        return type(self).conditions_from is not Prompted.conditions_from

    def conditions_from(self, images: Tensor) -> dict[str, Tensor]:
        """Returns the conditions, by name, of samples that begin from given pictures, uint8 (N, C, H, W).

        A system of videos takes their first frames, (N, K, C, H, W) with K = 1 + m * temporal_patch_size. A system of
        embeddings takes float32 (N, takes_embeddings).

        Raises ConfigError if the system begins from noise alone, as by default, or if the pictures do not fit.
        """
        raise ConfigError(f"a {type(self).__name__} begins from noise and takes no pictures")


class Sampling:
    """Ways to draw samples, beyond sampler, num_steps and guidance_scale: further choices of Samples and Request, other
    sizes, inversion, and guidance by another network.
    """

    sampling: tuple[str, ...] = ()  # the names of those that `sample` reads, see CHOICES
    takes_sizes: bool = False  # whether it draws pictures of any Request.size
    inverts: bool = False  # whether conditions may hold `invert`, uint8 (N, C, H, W): pictures
    # that are carried to noise, and drawn again from it

    def check_sampling(self, samples: Samples) -> None:
        """Raises ConfigError if a recipe's samples section sets a choice that this system does not read, or that does
        not go with its sampler.
        """
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
        """Raises ConfigError if the network of the system `other`, which `sample` would find in `nets` as `guide`,
        cannot guide this system's samples. By default no system can.
        """
        raise ConfigError(f"a {type(self).__name__} is guided by no other run; leave it out")


class Videos:
    """Samples that are videos."""

    num_frames: int | None = None  # of the longest clip, the default of `sample`; None: no videos
    temporal_patch_size: int = 1  # frames of a latent step: a clip has 1 + k * this


class FirstStage:
    """A first stage: `dstrain encode` caches its codes, other systems learn to draw such codes, and it decodes what
    they draw.
    """

    encodes: bool = False  # whether it has `codes`
    codebook_size: int | None = None  # number of ids that `codes` may give; None: latents

    def codes(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """Returns the codes of example["x_start"] by name, without any noise. For images (B, C, H, W): latent_mean and
        latent_std, float32 (B, C, h, w), or tokens, int64 (B, h, w). For videos (B, T, C, H, W): tokens, int64 (B, t,
        h, w); of each video the first example["frames"] (B,) frames are real. Raises ConfigError by default.
        """
        raise ConfigError(f"a {type(self).__name__} encodes nothing that others learn from")

    def decode(self, nets: Nets, codes: Tensor) -> Tensor:
        """Decodes codes to pixels, float32 in [-1, 1]. Tokens (B, h, w), or latents (B, C, h, w), which are a mean or a
        draw from the posterior, become images (B, C, H, W). Tokens (B, t, h, w) become videos (B, T, C, H, W). Raises
        ConfigError by default.
        """
        raise ConfigError(f"a {type(self).__name__} decodes nothing that others draw")

    def identity(self, nets: Nets) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns what `codes` depends on: the config, whose values JSON can hold, and the weights by name. A hash of
        both is the first stage's fingerprint. Raises ConfigError if the system has no codes, as by default.
        """
        raise ConfigError(f"a {type(self).__name__} encodes nothing that others learn from")


class Imports:
    """Imports weights that other programs have saved, for a system to start from, and says whether diffusers can hold
    the model.
    """

    in_pipeline: str = ""  # where a pipeline of diffusers keeps what `from_diffusers` takes

    def build_part_on_meta(self, part: str) -> nn.Module:
        """Builds the network of a part on the meta device: it has names and shapes, but no values."""
        return self.build_networks_on_meta()[part]

    def build_networks_on_meta(self) -> dict[str, nn.Module]:
        """Builds all networks on the meta device, by part: they have names, shapes and operations, but no values."""
        with torch.device("meta"):
            networks = self.networks()
        for network in networks.values():
            network.to("meta")  # Buffers that numpy has made have values.
        return networks

    def rename_published(self, part: str, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """Returns the weights of a file that dstrain has not written under the names that `adapt` takes, and notes for
        the user. By default returns them unchanged, without notes.
        """
        return state, []

    def adapt(self, part: str, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """Returns weights that other programs have saved, fitted to the part's network, and notes on what was changed.
        By default returns a copy with unchanged values and no notes.

        Raises ConfigError for the first difference of names or shapes that the system cannot bridge (by default any),
        with both shapes and the remedy.
        """
        expected = self.build_part_on_meta(part).state_dict()
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
        """Returns the weights of the first part's network that diffusers has saved, under the names that `adapt` takes,
        and notes for the user. diffusers_config: the content of their config.json.

        Raises ConfigError if the weights are of another class or a field differs from the recipe's, and by default.
        """
        raise ConfigError(
            f"weights: config.json is of class {diffusers_config.get('_class_name')} of diffusers, which "
            f"a {type(self).__name__} does not begin from; give a file or folder of this system"
        )

    def require_expressible(self) -> None:
        """Raises ConfigError if `dstrain export` cannot write this model for diffusers, whatever its weights. By
        default raises it.
        """
        raise ConfigError(f"a {type(self).__name__} has no form in diffusers: take --format safetensors")
