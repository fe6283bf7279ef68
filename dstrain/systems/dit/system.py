"""The class-conditional diffusion transformer as a system: one part, `denoiser`, trained by diffusion or flow matching.

All randomness is drawn from the samples' keys by name: timestep, noise, drop (of the label), latent; in generation
start and noise/0, noise/1, ... in the order of the chain.
"""

import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from dstrain import rng
from dstrain.diffusion import samplers
from dstrain.diffusion.gaussian import Network
from dstrain.diffusion.solvers import eta_of
from dstrain.encoders.autoencoder import Autoencoder, draw_latents
from dstrain.nn.fitting import Fitted
from dstrain.nn.pixels import require_shape, to_uint8
from dstrain.recipe import ConfigError, Samples, reword_errors
from dstrain.systems.base import CHOICES, Batch, Example, Nets, Progress, Request, System, Terms
from dstrain.systems.dit import weights
from dstrain.systems.dit.align import Alignment, require_features, warn_of_few_tokens
from dstrain.systems.dit.blocks import Block
from dstrain.systems.dit.config import Config
from dstrain.systems.dit.layouts import LAYOUTS, recognise_layout, translate
from dstrain.systems.dit.network import DiT
from dstrain.systems.dit.trunk import choose_tokens


class DiTSystem(System):
    """Peebles & Xie 2022. `config` says what each choice means."""

    in_pipeline = "transformer"
    sampling = CHOICES
    takes_sizes = True

    def __init__(self, config: Config) -> None:
        self.config = config
        self.parts = {"denoiser": self.denoise}
        self.averaged = ("denoiser",)
        self.process = config.make_process()
        self.samplers, self.diffusion = self.process.samplers, self.process.diffusion
        self.shape = config.shape()
        self.shapes = {self.shape, *map(config.shape, config.sizes or ())}
        self.first_stage = _load_first_stage(config)
        self.alignment = Alignment(config.align) if config.align else None
        self.generates = config.codes is None or self.first_stage is not None
        self.starts_from_data, self.takes_embeddings = config.embedding_dim > 0, config.embedding_dim
        # With cached latents the first stage has no encoder; a picture alone does not say its embedding.
        self.inverts = config.codes is None and not config.embedding_dim

    def networks(self) -> dict[str, nn.Module]:
        return {"denoiser": DiT(**self.config.network_arguments())}

    @torch.no_grad()
    def encode(self, batch: Batch) -> Example:
        """Sets x_start: latents drawn from cached moments or by the first stage; without either pixels in [-1, 1]."""
        inputs = ("image", "latent_mean", "latent_std")
        example = {name: tensor for name, tensor in batch.items() if name not in inputs}
        self._require_embedding(batch)
        if self.alignment and self.alignment.section.path and "image" in batch:
            example["image"] = batch["image"]
        if "latent_mean" in batch:
            moments = batch["latent_mean"], batch["latent_std"], batch["key"]
            scale = self.config.codes.scaling_factor if self.config.codes else 1.0
            example["x_start"] = self.first_stage.draw(*moments) if self.first_stage else draw_latents(*moments, scale)
        elif self.config.codes:
            raise ConfigError(
                "data: this model reads cached latents and holds no encoder, the data give images; "
                "encode them with dstrain encode and the same first stage"
            )
        else:
            pixels = batch["image"].float() / 127.5 - 1
            example["x_start"] = self.first_stage.encode(pixels, batch["key"]) if self.first_stage else pixels
        if tuple(example["x_start"].shape[1:]) not in self.shapes:
            require_shape(example["x_start"], self.shape, "in_channels")
        return example

    def denoise(self, nets: Nets, example: Example) -> Terms:
        """Computes the training loss: a timestep and a noise for each sample, its conditions dropped at times."""
        dropped = rng.uniform(example["key"], "drop") < self.config.class_dropout_prob
        y = torch.where(dropped, self.config.num_classes, self._labels(example, example["x_start"]))
        if self.config.embedding_dim:
            example = example | {"image_embed": torch.where(dropped[:, None], 0, example["image_embed"])}
        terms = self._losses(nets, example, y, learns=True)
        return {**terms, "loss": terms["loss"].mean(), "loss_each": terms["loss"].detach()}

    @torch.no_grad()
    def evaluate(self, nets: Nets, example: Example) -> Terms:
        """Computes the training loss with every label in place, one value a sample (B,)."""
        return self._losses(nets, example, self._labels(example, example["x_start"]))

    @torch.no_grad()
    def measure(self, nets: Nets, example: Example, num_steps: int | None = None, progress: Progress = iter) -> Terms:
        """Measures bits/dim with every label in place: of diffusion over 8-bit pixels the whole bound, of a flow over
        them by its ODE; else the terms of `evaluate`. Raises ConfigError for num_steps of a model of latents.
        """
        if self.config.models_pixels:
            y = self._labels(example, example["x_start"])

            def network(x_t, t):
                return nets["denoiser"](x_t, t, y, **self._conditions(example))

            terms = self.process.measured_bits(network, example["x_start"], example["key"], num_steps, progress)
            if "mse" not in terms:  # a chain's bound has the error at every timestep
                terms["loss"] = self.evaluate(nets, example)["loss"]
            return terms
        if num_steps is not None:
            raise ConfigError(
                f"num_steps: {num_steps} timesteps are asked for, but only models of pixels are measured "
                "along a chain; this model's terms take none, so leave num_steps out"
            )
        return self.evaluate(nets, example)

    def turns(self, step: int) -> tuple[str, ...]:
        if self.alignment:
            self.alignment.begin(step)
        return super().turns(step)

    def workload(self, step: int) -> tuple[int, ...]:
        return 1, int(self.alignment is not None and self.alignment.is_due(step))

    def _losses(self, nets: Nets, example: Example, y: Tensor, learns: bool = False) -> Terms:
        """Returns the terms of a timestep and a noise, (B,) each; `learns`: with what training alone adds."""
        x_start, key = example["x_start"], example["key"]
        patch = self.config.network_shape()["patch_size"]
        grid = x_start.shape[2] // patch, x_start.shape[3] // patch
        alignment = self.alignment if learns and self.alignment and self.alignment.wanted else None
        options: dict[str, Any] = {"extras": True} if self.config.internal or alignment else {}
        if learns and self.config.routing:
            options["keep"] = choose_tokens(key, grid[0] * grid[1], self.config.routing.ratio)
        tapped: dict[str, Tensor] = {}

        def network(x_t, t):
            out = nets["denoiser"](x_t, t, y, **self._conditions(example), **options)
            if "extras" not in options:
                return out
            tapped.update(out)
            return tapped["out"]

        terms = self.process.draw_losses(network, x_start, key)
        if internal := self.config.internal:  # the second head's, of the same forward pass
            base = self.process.draw_losses(lambda x_t, t: tapped["base"], x_start, key)["loss"]
            terms |= {"loss": terms["loss"] + internal.weight * base, "base": base.detach()}
        if alignment:
            align = alignment.loss(tapped, example, grid, options.get("keep"))
            terms |= {"loss": terms["loss"] + alignment.weight * align, "align": align.detach()}
        return terms

    def _conditions(self, example: Example) -> dict[str, Tensor]:
        """Returns what the network is told beside labels: sizes, int64 (B, 6), and image embeddings (B, E)."""
        conditions = {"embed": example["image_embed"]} if self.config.embedding_dim else {}
        if not self.config.size_conditions:
            return conditions
        if "size" not in example:
            raise ConfigError("size_conditions: the data say no sizes; write data.size_conditions=false")
        return conditions | {"size": example["size"]}

    def _require_embedding(self, batch: dict[str, Tensor]) -> None:
        """Raises ConfigError if the model is conditioned on an image embedding, and there is none of its width."""
        width, actual = self.config.embedding_dim, batch["image_embed"].shape[1] if "image_embed" in batch else 0
        if width and not actual:
            raise ConfigError(
                "image_embed: this model draws from image embeddings: give images with theirs, "
                "data.embeddings=PAIRS; to draw, --embeddings FILE.npy, or a prior's run, generate.py "
                "PRIOR --then THIS_RUN"
            )
        if width and actual != width:
            raise ConfigError(
                f"image_embed: these are {actual} wide, and model.embedding_dim is {width}: give others, "
                f"or train with model.embedding_dim={actual}"
            )

    def conditions_from(self, images: Tensor) -> dict[str, Tensor]:
        """Returns image_embed float32 (N, E), the embeddings that samples of a model with embedding_dim begin from."""
        if not self.config.embedding_dim:
            return super().conditions_from(images)
        if images.ndim != 2:
            raise ConfigError("image_embed: this model begins from image embeddings, not from pictures")
        conditions = {"image_embed": images.float()}
        self._require_embedding(conditions)
        return conditions

    def accepts(self, source: Any) -> None:
        """Raises ConfigError for embeddings of another width, or none. Says where routing does not pay."""
        if self.config.align:
            require_features(self.config.align, source.first())
        if self.config.routing:
            warn_of_few_tokens(math.prod(self.shape[1:]) // self.config.network_shape()["patch_size"] ** 2)
        if self.config.embedding_dim:
            self._require_embedding(
                {name: values[None] for name, values in source.first().items() if name == "image_embed"}
            )

    def pictures(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """Returns `data`, the images of the embeddings that samples are drawn from."""
        if not self.config.embedding_dim or self.cannot_draw():
            return {}
        x_start = example["x_start"]
        return {"data": to_uint8(self.first_stage.decode(x_start) if self.first_stage else x_start)}

    def _labels(self, conditions: dict[str, Tensor], like: Tensor) -> Tensor:
        if "label" in conditions:
            return conditions["label"]
        if self.config.num_classes == 1:
            return torch.zeros(len(like), dtype=torch.int64, device=like.device)
        raise ConfigError(
            f"label: the data hold none, and num_classes is {self.config.num_classes}; give labels, or "
            "set num_classes to 1 for an unconditional model"
        )

    @torch.no_grad()
    def sample(self, nets: Nets, request: Request) -> Tensor:
        """Draws uint8 images (N, C, H, W). Without labels in the request, seed s draws class s modulo num_classes.

        A model with embedding_dim needs image_embed (N, E) in the request's conditions, see conditions_from.
        Samplers: those of diffusion/samplers.py, for flow matching of flow.py. ConfigError: another sampler, more steps
        than the chain has, guidance of a model that was trained without dropped labels, a sampler that is not inverted,
        a size that patches do not fill.
        """
        if problem := self.cannot_draw():
            raise ConfigError(problem)
        sampler, count, spacing = self.sampler(request.sampler), request.num_steps, request.spacing
        keys, network = rng.keys_of_seeds(request.seeds), self._guided(nets, request)
        shape = self.config.shape(request.size)

        def noise(i):
            return rng.normal(keys, f"noise/{i}", shape)

        images = request.conditions.get("invert")
        x_start = None if images is None else self.encode({"image": images, "key": keys})["x_start"]
        if images is None:
            x = rng.normal(keys, "start", shape)
        else:
            x = self.process.invert(network, x_start, sampler, count, spacing, request.eta)
        x_start = self.process.sample(network, x, noise, sampler, count, spacing, request.eta)
        return to_uint8(self.first_stage.decode(x_start) if self.first_stage else x_start)

    def check_sampling(self, samples: Samples) -> None:
        super().check_sampling(samples)
        with reword_errors("--size or samples.size: "):
            self.config.shape(samples.size)
        eta_of(self.sampler(samples.sampler), samples.eta)
        self.process.check_spacing(samples.spacing)

    def require_guide(self, other: System) -> None:
        """Refuses a guide of other data or noise; its width, depth and variances may differ."""
        if not isinstance(other, DiTSystem):
            raise ConfigError(f"it is a {type(other).__name__}, which guides no DiT: name a run of system dit")
        own, others = self.config.guide_fields(), other.config.guide_fields()
        if different := sorted(name for name in own | others if own.get(name) != others.get(name)):
            raise ConfigError(
                f"model.{different[0]} differs, and a guide learns the same from noise of the same kind: "
                "name another run"
            )

    def _guided(self, nets: Nets, request: Request) -> Network:
        y, guide = request.conditions.get("label", request.seeds % self.config.num_classes), nets.get("guide")
        if request.guidance_scale != 1 and not self.config.class_dropout_prob and guide is None:
            raise ConfigError(
                "guidance_scale: this model has no null label, since class_dropout_prob is 0; sample "
                "with guidance_scale 1, or train with class_dropout_prob above 0"
            )
        null, size, embed, no_embed = torch.full_like(y, self.config.num_classes), {}, {}, {}
        self._require_embedding(request.conditions)
        if self.config.embedding_dim:
            embed["embed"] = request.conditions["image_embed"]
            no_embed["embed"] = torch.zeros_like(embed["embed"])
        if self.config.size_conditions:  # a picture that had this size, and was not cut
            wide, high = request.size or (self.config.image_size,) * 2
            size["size"] = torch.tensor([high, wide, 0, 0, high, wide], device=y.device).expand(len(y), -1)
        internal = self.config.internal
        return samplers.guide_network(
            guide_internally(nets["denoiser"], internal.scale) if internal else nets["denoiser"],
            {"y": y} | size | embed,
            {"y": null} | size | no_embed,
            request.guidance_scale,
            self.config.guidance_channels,
            rescale=request.guidance_rescale,
            guide=guide,
            active=samplers.limit_guidance(request.guidance_interval, self.process.noise_of),
        )

    def cannot_draw(self) -> str | None:
        if self.config.codes and not self.first_stage:
            return (
                "first_stage: these are latents, and no autoencoder decodes them; set model.first_stage.path to "
                "the folder of the one that encoded them"
            )
        return None

    def adapt(self, part: str, state: dict[str, Tensor]) -> Fitted:
        """Fits weights whose positions and class table may differ, see weights.py."""
        return weights.adapt_weights(state, self.on_meta(part))

    def rename_published(self, part: str, state: dict[str, Tensor]) -> Fitted:
        """Gives weights of a published layout our names, time and direction, see layouts.py.

        Raises ConfigError if the objective is not the one that they were trained for.
        """
        layout = self.config.layout or recognise_layout(state)
        if layout is None:
            return state, []
        self._require_objective_of(layout)
        network = self.on_meta(part)
        heads = [network.head_dim, network.final_layer.head_dim] if self.config.wide else [network.head_dim]
        state, notes = translate(
            state, layout, len(network.blocks), network.grid, heads if self.config.block.rope else []
        )
        return state, [f"layout: {layout}", *notes]

    def _require_objective_of(self, layout: str) -> None:
        """Raises ConfigError if the flow is not that of a published layout's networks."""
        for field, needed in LAYOUTS[layout].needed_fields().items():
            if (found := attrgetter(field)(self.config)) != needed:
                raise ConfigError(
                    f"model.{field}={found}: weights of {layout} were trained with {needed}; "
                    f"write model.{field}={needed}"
                )

    def from_diffusers(self, state: dict[str, Tensor], diffusers_config: Mapping[str, Any]) -> Fitted:
        return weights.rename_from_diffusers(state, diffusers_config, self.config)

    def require_expressible(self) -> None:
        weights.require_expressible(self.config)
        self.process.scheduler_arguments()

    def decays(self, name: str, weight: Tensor) -> bool:
        """Returns what System says, but no learned token decays."""
        return super().decays(name, weight) and not name.endswith("_tokens.tokens")

    def blocks(self) -> tuple[type[nn.Module], ...]:
        return (Block,)

    def frozen(self) -> tuple[nn.Module, ...]:
        first_stage = (self.first_stage,) if self.first_stage else ()
        return (*first_stage, *(self.alignment.frozen() if self.alignment else ()))

    def synthetic(self, batch_size: int) -> Batch:
        """Labels, keys and pixels; latents where the model reads cached ones, or where its input cannot be pixels. Of
        several sizes it is the largest.
        """
        wide, high = max(self.config.sizes or ((self.config.image_size,) * 2,), key=math.prod)
        batch = {"key": rng.keys(0, 0, torch.arange(batch_size))}
        batch["label"] = rng.integers(batch["key"], "label", self.config.num_classes)
        if not self.config.codes and (self.first_stage or self.config.models_pixels):
            channels = self.first_stage.image_channels if self.first_stage else self.config.in_channels
            batch["image"] = rng.integers(batch["key"], "image", 256, (channels, high, wide)).to(torch.uint8)
        else:
            shape = self.config.shape((wide, high) if self.config.sizes else None)
            batch["latent_mean"] = rng.normal(batch["key"], "latent_mean", shape)
            batch["latent_std"] = 0.1 * rng.uniform(batch["key"], "latent_std", shape)
        if self.config.align and self.config.align.kind == "repa" and self.config.align.path is None:
            _, high, wide = (side // self.config.network_shape()["patch_size"] for side in self.shape)
            batch["features"] = rng.normal(batch["key"], "features", (high * wide, self.config.align.width))
        if self.config.embedding_dim:
            batch["image_embed"] = rng.normal(batch["key"], "image_embed", (self.config.embedding_dim,))
        if self.config.size_conditions:
            batch["size"] = torch.tensor([high, wide, 0, 0, high, wide]).repeat(batch_size, 1)
        return batch


def guide_internally(network: Callable[..., Any], scale: float) -> Callable[..., Tensor]:
    """Returns the network whose second head is led away from: base + scale (whole - base), in one forward pass."""
    if scale == 1:
        return network

    def guided(x_t: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        found = network(x_t, t, **conditions, extras=True)
        return torch.lerp(found["base"], found["out"], scale)

    return guided


def _load_first_stage(config: Config) -> Autoencoder | None:
    if config.first_stage is None:
        return None
    section, path = config.first_stage, config.first_stage.path
    autoencoder = Autoencoder(path, section.scaling_factor, section.shift)
    for name, configured, actual in (
        ("first_stage.factor", section.factor, autoencoder.factor),
        ("in_channels", config.in_channels, autoencoder.channels),
        ("data.channels", section.image_channels, autoencoder.image_channels),
    ):
        if configured not in (None, actual):
            raise ConfigError(f"{name}: {configured} in the recipe, {actual} in autoencoder {path}: make both equal")
    # Hashing all weights takes a while, so it is done once and only where there is something to compare with.
    hashed = autoencoder.fingerprint() if config.codes is not None or section.fingerprint is not None else None
    if section.fingerprint not in (None, hashed):
        raise ConfigError(
            f"first_stage.path: {path} is the autoencoder {hashed}, this model was trained with "
            f"{section.fingerprint} (first_stage.fingerprint); put that one back there"
        )
    if config.codes is not None:
        if hashed != config.codes.first_stage:
            raise ConfigError(
                f"first_stage.path: {path} is the autoencoder {hashed}, the latents in data.path are of "
                f"{config.codes.first_stage}; name the one that encoded them, or encode with this one"
            )
        autoencoder.drop_encoder()
    else:
        autoencoder.encode_in(section.precision)
    return autoencoder
