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
        as bits by timestep. By default those of `evaluate`.

        num_steps  how many steps of a chain are measured; None: all. Only some systems read it.
        progress   wraps the loop over these steps, like tqdm.
        """
        return self.evaluate(nets, example)

    def compute_figures(self, means: dict[str, Tensor]) -> dict[str, float]:
        """Returns figures by name, such as the codebook's perplexity, computed from `means`: the curves (K,) of
        `evaluate`, averaged over all held-out samples. {} by default.
        """
        return {}

    def make_pictures(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """Returns further pictures that training shows, such as reconstructions, {name: uint8 (B, C, H, W) or (B, T, C,
        H, W)}. {} by default.
        """
        return {}


class Stateful:
    """Small state beside the weights, such as a history of losses by timestep. It is saved in checkpoints, and must be
    equal on all ranks.
    """

    watched: tuple[str, ...] = ()  # terms by sample that `observe` sees after a step, and no report

    def observe(self, terms: Terms) -> None:
        """Updates the system's own state after a step. `terms` holds the terms named in `watched`, (N, ...) each, for
        all N samples of the global batch, in its order. By default does nothing.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the system's own state, beside the weights, for checkpoints: tensors by name; {} by default."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores the state that `state_dict` has returned. By default raises ConfigError if `state` is not empty."""
        if state:
            raise ConfigError(f"{type(self).__name__} keeps no state, the checkpoint holds {', '.join(sorted(state))}")


class Prompted:
    """Samples that begin from texts, pictures or frames."""

    starts_from_data: bool = False  # whether samples or `make_pictures` need data: reconstruction, upsampling

    takes_embeddings: int = 0  # width of the image embeddings that samples begin from; 0: of none
    draws_embeddings: int = 0  # width of the embeddings that `sample` draws; 0: it draws pictures

    @property
    def takes_texts(self) -> bool:
        """Returns whether samples can be drawn from texts."""
        return type(self).conditions_from_texts is not Prompted.conditions_from_texts

    def conditions_from_texts(self, texts: list[str]) -> dict[str, Tensor]:
        """Returns the conditions for N texts, {name: tensor (N, ...)}. By default raises ConfigError: the system takes
        no texts.
        """
        raise ConfigError(f"a {type(self).__name__} takes no texts")

    def make_negative_prompt_conditions(self, text: str, num: int) -> dict[str, Tensor]:
        """Returns the conditions of a negative prompt, from which guidance leads samples away, for `num` samples:
        {name: tensor (num, ...)}. By default raises ConfigError.
        """
        raise ConfigError(f"a {type(self).__name__} is led away from no text")

    def describe_cut(self, texts: list[str], what: str) -> str:
        """Returns a note for the user: how many tokens are cut off from texts that are longer than the model can read;
        "" if none is. `what` is the note's word for the texts, such as "prompts". By default returns "".
        """
        return ""

    @property
    def takes_pictures(self) -> bool:
        """Returns whether samples can begin from given pictures or frames."""
        return type(self).conditions_from is not Prompted.conditions_from

    def conditions_from(self, images: Tensor) -> dict[str, Tensor]:
        """Returns the conditions of samples that begin from given pictures, {name: tensor (N, ...)}. `images` is one
        of:

        pictures    uint8 (N, C, H, W).
        videos      uint8 (N, K, C, H, W), their first K = 1 + m * temporal_patch_size frames, for a system of videos.
        embeddings  float32 (N, takes_embeddings), for a system with takes_embeddings above 0.

        Raises ConfigError if `images` do not fit the system. By default always raises it.
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
        """Raises ConfigError if the recipe's `samples` section sets a field that this system does not read, or one that
        does not go with the chosen sampler.
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
        """Raises ConfigError if the network of the system `other` cannot guide this system's samples (autoguidance). By
        default always raises it.
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

    encodes: bool = False  # whether it has `compute_codes`
    codebook_size: int | None = None  # number of ids that `compute_codes` may give; None: latents

    def compute_codes(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """Encodes example["x_start"] without noise, for `dstrain encode`. Returns {"latent_mean", "latent_std":
        float32} or {"tokens": int64}. By default raises ConfigError. The shapes:

        images  (B, C, H, W) give latents (B, c, h, w) or tokens (B, h, w).
        videos  (B, T, C, H, W) give tokens (B, t, h, w). example["frames"] (B,) says how many first frames are real;
                the rest is padding.
        """
        raise ConfigError(f"a {type(self).__name__} encodes nothing that others learn from")

    def decode(self, nets: Nets, codes: Tensor) -> Tensor:
        """Decodes codes to pixels, float32 in [-1, 1]: tokens (B, h, w) or latents (B, C, h, w) to images (B, C, H, W),
        tokens (B, t, h, w) to videos (B, T, C, H, W). By default raises ConfigError.
        """
        raise ConfigError(f"a {type(self).__name__} decodes nothing that others draw")

    def describe_identity(self, nets: Nets) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns all that the result of `compute_codes` depends on: a config that JSON can hold, and the weights by
        name. A hash of both identifies the first stage. By default raises ConfigError.
        """
        raise ConfigError(f"a {type(self).__name__} encodes nothing that others learn from")


class Imports:
    """Imports weights that other programs have saved, for a system to start from, and says whether diffusers can hold
    the model.
    """

    in_pipeline: str = ""  # where a pipeline of diffusers keeps what `from_diffusers` takes

    def build_part_on_meta(self, part: str) -> nn.Module:
        """Builds the network of a part on the meta device: it has names and shapes of weights, but no values."""
        return self.build_networks_on_meta()[part]

    def build_networks_on_meta(self) -> dict[str, nn.Module]:
        """Builds all networks on the meta device, by part: they have names and shapes of weights, but no values."""
        with torch.device("meta"):
            networks = self.networks()
        for network in networks.values():
            network.to("meta")  # Buffers that numpy has made have values.
        return networks

    def rename_published(self, part: str, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """Returns the weights of a file that another program has written, under the names that `adapt_weights` takes,
        and notes for the user. By default returns them unchanged, without notes.
        """
        return state, []

    def adapt_weights(self, part: str, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """Returns weights that another program has saved, fitted to the part's network, and notes for the user on what
        was changed. By default returns a copy without notes.

        Raises ConfigError at the first name or shape that does not fit the network and cannot be adapted.
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
        """Returns weights that diffusers has saved, under the names that `adapt_weights` takes for the first part, and
        notes for the user. `diffusers_config` is the content of the config.json beside the weights.

        Raises ConfigError if config.json does not fit the recipe. By default always raises it.
        """
        raise ConfigError(
            f"weights: config.json is of class {diffusers_config.get('_class_name')} of diffusers, which "
            f"a {type(self).__name__} does not begin from; give a file or folder of this system"
        )

    def require_expressible_in_diffusers(self) -> None:
        """Raises ConfigError if diffusers has no class for this model, so that it cannot be exported for diffusers. By
        default always raises it.
        """
        raise ConfigError(f"a {type(self).__name__} has no form in diffusers: take --format safetensors")
