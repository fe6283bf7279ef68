"""Improved diffusion as a system: one part, `denoiser`, a UNet on pixels, which draws from noise or enlarges small
pictures.

All randomness is drawn from the samples' keys, each kind under a name of its own: timestep, noise, drop (of the label).
Generation draws start, then noise/0, noise/1, ... in the order of the chain.

Source: Nichol & Dhariwal 2021 (arXiv:2102.09672).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain import rng
from dstrain.diffusion import samplers
from dstrain.diffusion.gaussian import Network
from dstrain.diffusion.solvers import choose_eta
from dstrain.diffusion.timesteps import LossSecondMomentSampler, TimestepSampler, UniformSampler
from dstrain.nn.fitting import Fitted
from dstrain.nn.lora import add_adapters
from dstrain.nn.pixels import convert_to_uint8, require_model_input_shape
from dstrain.recipe import ConfigError, Samples, reword_errors
from dstrain.systems.base import CHOICES, Batch, Example, Nets, Progress, Request, System, Terms
from dstrain.systems.iddpm import weights
from dstrain.systems.iddpm.config import Config
from dstrain.systems.iddpm.network import AttentionBlock, ResBlock, SuperResUNet, UNet


class IDDPMSystem(System):
    """The IDDPM of Nichol & Dhariwal 2021, with the choices in `config`."""

    in_pipeline = "unet"
    sampling, inverts = CHOICES, True

    def __init__(self, config: Config) -> None:
        self.config = config
        self.parts = {"denoiser": self.compute_denoiser_loss}
        self.process = config.make_process()
        self.averaged, self.samplers = ("denoiser",), self.process.samplers
        self.diffusion = self.process.diffusion
        self.starts_from_data = config.small_size is not None
        self.shape = config.get_image_shape()
        self.shapes = {self.shape, *map(config.get_image_shape, config.sizes or ())}
        self.takes_sizes = not self.starts_from_data
        self.timesteps: TimestepSampler = UniformSampler(config.diffusion_steps)
        if config.schedule_sampler == "loss-second-moment":
            self.timesteps = LossSecondMomentSampler(
                config.diffusion_steps, config.history_per_term, config.uniform_prob
            )
            self.watched = ("timestep", "loss_seen")

    def networks(self) -> dict[str, nn.Module]:
        kind = SuperResUNet if self.starts_from_data else UNet
        network = kind(**self.config.make_network_arguments())
        return {"denoiser": add_adapters(network, self.config.lora, ("*.qkv", "*.proj_out"))}

    @torch.no_grad()
    def encode(self, batch: Batch) -> Example:
        """Returns the batch with x_start, the images as (B, C, H, W) in [-1, 1], in place of `image`. For
        super-resolution adds low_res (B, C, small, small): x_start shrunk to small_size by averaging pixels.

        Raises ConfigError if images do not have the model's shape. Also raises it for unknown labels, but checks labels
        only if they are on the CPU.
        """
        example = super().encode(batch)
        if tuple(example["x_start"].shape[1:]) not in self.shapes:
            require_model_input_shape(example["x_start"], self.shape, "in_channels")
        if self.starts_from_data:
            example["low_res"] = self._shrink_to_low_res(example["x_start"])
        if self.config.class_cond and "label" in example and example["label"].device.type == "cpu":
            self.require_labels(example["label"].tolist())  # reading them on an accelerator would wait for it
        return example

    def compute_denoiser_loss(self, nets: Nets, example: Example) -> Terms:
        """Returns the terms of a training step: `loss`, the mean over samples; loss_each (B,); and the other terms of
        the process, (B,) each. Draws each sample's time and noise from its key. Drops labels with probability
        class_dropout_prob.

        With schedule_sampler=loss-second-moment multiplies all terms but `quartile` by a weight, which the sampler
        gives with each timestep. Then adds two terms, (B,) each: `timestep`, and `loss_seen`, the loss before it was
        multiplied.
        """
        if self.config.has_null_label:
            dropped = rng.uniform(example["key"], "drop") < self.config.class_dropout_prob
            example = example | {"label": torch.where(dropped, self.config.num_classes, _get_labels(example))}
        seen = {}
        if self.watched:
            t, weight = self.timesteps.sample(rng.uniform(example["key"], "timestep"))
            terms = self._compute_losses(nets, example, t)
            seen = {"timestep": t, "loss_seen": terms["loss"].detach()}
            terms = {name: term if name == "quartile" else weight * term for name, term in terms.items()}
        else:
            terms = self._compute_losses(nets, example)
        loss = terms["loss"]
        return terms | {"loss": loss.mean(), "loss_each": loss.detach()} | seen

    def observe(self, terms: Terms) -> None:
        """Adds the losses of a step to the history of the timestep sampler, which draws timesteps with large losses
        more often. The sampler ignores losses that are not finite.
        """
        self.timesteps.observe(terms["timestep"], terms["loss_seen"])

    @torch.no_grad()
    def evaluate(self, nets: Nets, example: Example) -> Terms:
        """Returns the loss and other terms of each sample, (B,), at one random time, with no label dropped. Draws
        timesteps uniformly, whatever schedule_sampler says, so that losses of different steps can be compared. Draws
        times of a flow from the flow's own density.
        """
        return self._compute_losses(nets, example)

    def _compute_losses(self, nets: Nets, example: Example, t: Tensor | None = None) -> Terms:
        """Returns the loss and other terms of each sample, (B,), at times t (B,). None: times are drawn at random,
        seeded by each sample's key.
        """
        return self.process.compute_losses_at_drawn_times(self.make_conditional_network(nets, example), example, t)

    def make_conditional_network(self, nets: Nets, conditions: dict[str, Tensor]) -> Network:
        """Returns a function of x_t and t that returns the denoiser's output for these conditions. Ignores conditions
        that the network does not take.
        """
        arguments = self._make_condition_arguments(conditions)
        return lambda x_t, t: nets["denoiser"](x_t, t, **arguments)

    def _make_condition_arguments(self, conditions: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the network's keyword arguments for these conditions: low_res for super-resolution, and y, the
        labels, if the model is class-conditional. Raises ConfigError if such a model is given no labels.
        """
        arguments = {"low_res": conditions["low_res"]} if self.starts_from_data else {}
        return arguments | ({"y": _get_labels(conditions)} if self.config.class_cond else {})

    def make_guided_network(self, nets: Nets, conditions: dict[str, Tensor], request: Request) -> Network:
        """Returns a function of x_t and t that returns the denoiser's output for these conditions, with classifier-free
        guidance by the request's scale, interval and rescaling.

        Raises ConfigError if the request asks for guidance and the model has no null label.
        """
        if request.guidance_scale != 1 and not self.config.has_null_label:
            raise ConfigError(
                "guidance_scale: this model has no null label; sample with guidance_scale 1, or train "
                "with class_cond=true and class_dropout_prob above 0"
            )
        arguments = self._make_condition_arguments(conditions)
        null = {"y": torch.full_like(arguments["y"], self.config.num_classes)} if self.config.has_null_label else {}
        return samplers.make_guided_network(
            nets["denoiser"],
            arguments,
            arguments | null,
            request.guidance_scale,
            rescale=request.guidance_rescale,
            active=samplers.make_guidance_mask_function(request.guidance_interval, self.process.compute_noise_ratio),
        )

    @torch.no_grad()
    def measure(self, nets: Nets, example: Example, num_steps: int | None = None, progress: Progress = iter) -> Terms:
        """Returns terms of each sample with its bits/dim, and for a flow also with the loss of `evaluate`. For
        super-resolution the bits are those of the large image given the small one.

        num_steps: how many timesteps of a chain to visit; None: all, or those that timestep_respacing keeps. For a
        flow: how many calls of the network to make; None: 100.
        """
        network = self.make_conditional_network(nets, example)
        terms = self.process.measure_bits_per_dim(network, example["x_start"], example["key"], num_steps, progress)
        if "mse" not in terms:  # a chain's bound has the error at every timestep
            terms["loss"] = self.evaluate(nets, example)["loss"]
        return terms

    @torch.no_grad()
    def sample(self, nets: Nets, request: Request) -> Tensor:
        """Draws uint8 images (N, C, H, W), one for each seed. Without labels in the request, seed s draws class s
        modulo num_classes.

        Reads these of the request's conditions, too:

        low_res  the small pictures for super-resolution, see `conditions_from`.
        invert   images of the request's size. Each sample then begins from the noise that inverting the sampler finds
                 for its image.

        Raises ConfigError if low_res is missing or has another shape, for unknown labels, for a sampler that the
        process does not have, for more steps than the chain has, and for guidance of a model without a null label.
        """
        sampler, steps = self.choose_sampler(request.sampler), (request.num_steps, request.spacing, request.eta)
        conditions = dict(request.conditions)
        if self.config.class_cond:
            conditions.setdefault("label", request.seeds % self.config.num_classes)
            self.require_labels(conditions["label"].tolist())
        if self.starts_from_data:
            self._require_valid_low_res(conditions, len(request.seeds))
        keys, shape = rng.keys_of_seeds(request.seeds), self.config.get_image_shape(request.size)
        x, network = rng.normal(keys, "start", shape), self.make_guided_network(nets, conditions, request)

        def draw_noise(step):
            return rng.normal(keys, f"noise/{step}", shape)

        if "invert" in conditions:
            x_start = self.encode({"image": conditions["invert"]})["x_start"]
            x = self.process.invert(network, x_start, sampler, *steps)
        return convert_to_uint8(self.process.sample(network, x, draw_noise, sampler, *steps))

    def check_sampling(self, samples: Samples) -> None:
        super().check_sampling(samples)
        with reword_errors("--size or samples.size: "):
            self.config.get_image_shape(samples.size)
        choose_eta(self.choose_sampler(samples.sampler, "samples.sampler"), samples.eta)
        self.process.require_known_spacing(samples.spacing)

    def conditions_from(self, images: Tensor) -> dict[str, Tensor]:
        """Returns {"low_res": float32 (N, C, small, small) in [-1, 1]}, from which super-resolution begins, for
        pictures uint8 (N, C, H, W). Pictures of small_size keep their size; pictures of image_size are shrunk to
        small_size. Raises ConfigError for other shapes, and if the model is not for super-resolution.
        """
        if not self.starts_from_data:
            return super().conditions_from(images)
        small = (self.config.in_channels, self.config.small_size, self.config.small_size)
        shape, pixels = tuple(images.shape[1:]), images.float() / 127.5 - 1
        if shape == self.shape:
            return {"low_res": self._shrink_to_low_res(pixels)}
        if shape != small:
            raise ConfigError(
                f"low_res: pictures (channels, height, width) are {shape}; this upsampler takes {small} "
                f"to {self.shape}: give the one or the other, or train with other sizes"
            )
        return {"low_res": pixels}

    def make_pictures(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """Returns {"low_res": uint8 (N, C, H, W)} for super-resolution: the small pictures from which samples begin,
        enlarged to image_size without smoothing. Returns {} for other models.
        """
        if not self.starts_from_data:
            return {}
        return {"low_res": convert_to_uint8(F.interpolate(example["low_res"], self.config.image_size, mode="nearest"))}

    def _shrink_to_low_res(self, pixels: Tensor) -> Tensor:
        """Returns images (B, C, H, W) shrunk to squares of small_size by averaging pixels."""
        return F.interpolate(pixels, self.config.small_size, mode="area")

    def _require_valid_low_res(self, conditions: dict[str, Tensor], count: int) -> None:
        """Raises ConfigError if conditions["low_res"] is missing, or is not `count` pictures of small_size."""
        if "low_res" not in conditions:
            raise ConfigError(
                "super-resolution needs low_res: the small pictures to begin from; draw them by a run of "
                "their own, generate.py RUN --then THIS_RUN, or give a folder, --low-res PATH"
            )
        shape = tuple(conditions["low_res"].shape)
        expected = (count, self.config.in_channels, self.config.small_size, self.config.small_size)
        if shape != expected:
            raise ConfigError(f"low_res: {shape} where the request's seeds and small_size need {expected}")

    def adapt_weights(self, part: str, state: dict[str, Tensor]) -> Fitted:
        """Returns the state dict with its label table fitted to the network, and notes for the user; see
        weights.adapt_weights.
        """
        return weights.adapt_weights(state, self.build_part_on_meta(part), self.config)

    def from_diffusers(self, state: dict[str, Tensor], diffusers_config: Mapping[str, Any]) -> Fitted:
        return weights.rename_from_diffusers(state, diffusers_config, self.config)

    def require_expressible_in_diffusers(self) -> None:
        """Raises ConfigError if diffusers' classes cannot hold the model: if it is a flow, or if they lack one of the
        choices of its network or chain.
        """
        weights.make_diffusers_arguments(self.config)
        self.process.make_diffusers_scheduler_arguments()
        if self.diffusion is None:
            raise ConfigError("objective: the pipelines of a UNet draw by a chain alone; take --format safetensors")

    def list_block_classes(self) -> tuple[type[nn.Module], ...]:
        return (ResBlock, AttentionBlock)

    def synthetic(self, batch_size: int) -> Batch:
        """Returns a batch of random pixels and keys, and of labels if the model takes them. The images have the largest
        of the model's sizes.
        """
        batch = {"key": rng.keys(0, 0, torch.arange(batch_size))}
        if self.config.class_cond:
            batch["label"] = rng.integers(batch["key"], "label", self.config.num_classes)
        batch["image"] = rng.integers(batch["key"], "image", 256, max(self.shapes, key=math.prod)).to(torch.uint8)
        return batch

    def state_dict(self) -> dict[str, Tensor]:
        return self.timesteps.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.timesteps.load_state_dict(state)


def _get_labels(conditions: dict[str, Tensor]) -> Tensor:
    """Returns the labels among `conditions`, int64 (B,). Raises ConfigError if there are none."""
    if "label" not in conditions:
        raise ConfigError("label: the data hold none, and class_cond is set; give labels, or class_cond=false")
    return conditions["label"]
