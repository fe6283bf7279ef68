"""The diffusion transformer of classes or texts as a system: one part, `denoiser`, trained by diffusion or as a flow.

All randomness is drawn from the samples' keys by name: timestep, noise, drop (of the label or text), latent; in
generation start and noise/0, noise/1, ... in the order of the chain.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dstrain import rng
from dstrain.diffusion import samplers
from dstrain.diffusion.gaussian import Network
from dstrain.diffusion.solvers import choose_eta
from dstrain.encoders.autoencoder import draw_latents
from dstrain.encoders.reader import NAMES, Reader
from dstrain.nn.fitting import Fitted
from dstrain.nn.lora import add_adapters
from dstrain.nn.pixels import convert_to_uint8, require_model_input_shape
from dstrain.recipe import ConfigError, Samples, reword_errors
from dstrain.systems.base import CHOICES, Batch, Example, Nets, Progress, Request, System, Terms
from dstrain.systems.dit import sd3, weights
from dstrain.systems.dit.align import Alignment, add_internal_guidance, require_encoder_or_features, warn_if_few_tokens
from dstrain.systems.dit.blocks import Block, JointBlock
from dstrain.systems.dit.clips import PRIME, GivenFrames, decode_clips, encode_clips
from dstrain.systems.dit.conditions import NEGATIVE, ForwardArguments
from dstrain.systems.dit.config import Config
from dstrain.systems.dit.first_stage import load_first_stage
from dstrain.systems.dit.layouts import LAYOUTS, recognise_layout, translate_weights_from_layout
from dstrain.systems.dit.network import DiT
from dstrain.systems.dit.trunk import draw_kept_tokens


class DiTSystem(System):
    """The system of a diffusion transformer (Peebles & Xie 2022). fields.py describes each choice of `config`."""

    in_pipeline = "transformer"
    sampling = CHOICES
    takes_sizes = True

    def __init__(self, config: Config) -> None:
        self.config = config
        self.parts = {"denoiser": self.compute_denoiser_loss}
        self.averaged = ("denoiser",)
        self.process = config.make_process()
        self.samplers, self.diffusion = self.process.samplers, self.process.diffusion
        self.shape = config.get_input_shape()
        self.shapes = {self.shape, *map(config.get_input_shape, config.sizes or ())}
        self.texts = Reader(config)
        self.network_conditions = config.make_conditions(self.texts)
        self.first_stage = None
        if config.first_stage:
            scale = config.get_latent_scale_and_shift()
            self.first_stage = load_first_stage(
                config.first_stage, config.codes, config.in_channels, config.image_size, scale
            )
        self.alignment = Alignment(config.align) if config.align else None
        self.generates = config.codes is None or self.first_stage is not None
        self.starts_from_data, self.takes_embeddings = config.embedding_dim > 0, config.embedding_dim
        # With cached latents the first stage has no encoder; a picture alone does not say its embedding or text.
        self.inverts = config.codes is None and not config.embedding_dim and not config.reads_texts
        if config.video:
            self.num_frames, self.temporal_patch_size = config.video.frames, config.video.patch_frames
            self.inverts = False
        self._end: int | None = None  # of this step's clips, in frames

    def networks(self) -> dict[str, nn.Module]:
        network = DiT(**self.config.make_network_arguments())
        return {"denoiser": add_adapters(network, self.config.lora, ("*.attn.*", "*.attn2.*", "*.cross.*", "*.mlp.*"))}

    @torch.no_grad()
    def encode(self, batch: Batch) -> Example:
        """Returns the example of a batch: x_start, the conditions' tensors, and the batch's other tensors, but no
        latents, captions and pixels (except for model.align's encoder). x_start is (B, C, h, w), or (B, C, T, h, w) for
        clips: latents from the cache or the first stage, or else pixels in [-1, 1]. Raises ConfigError if a condition
        is missing or wrong, if x_start does not fit the network, or if there are images instead of cached latents.
        """
        inputs = ("image", "video", "frames", "latent_mean", "latent_std", "caption", *NAMES)
        example = {name: tensor for name, tensor in batch.items() if name not in inputs}
        self._require_valid_conditions(batch)
        for condition in self.network_conditions:
            example |= condition.make_example_tensors(batch)
        if self.alignment and self.alignment.section.path and "image" in batch:
            example["image"] = batch["image"]
        if "latent_mean" in batch:
            moments = batch["latent_mean"], batch["latent_std"], batch["key"]
            stage, scale = self.first_stage, self.config.get_latent_scale_and_shift()
            example["x_start"] = stage.draw_latents(*moments) if stage else draw_latents(*moments, *scale)
        elif self.config.codes:
            raise ConfigError(
                "data: this model reads cached latents and holds no encoder, the data give images; "
                "encode them with dstrain encode and the same first stage"
            )
        elif self.config.video:
            # A step of short clips encodes no frame that it throws away. Held-out clips have no step, and stay whole.
            video = batch["video"][:, : self._end] if "step" in batch else batch["video"]
            example["x_start"] = self._encode_clips(video, batch["key"])
        else:
            pixels = batch["image"].float() / 127.5 - 1
            example["x_start"] = self.first_stage.encode(pixels, batch["key"]) if self.first_stage else pixels
        x_start, shapes = example["x_start"], self.shapes
        if self.config.video:
            shapes = {self.config.get_input_shape(frames=x_start.shape[2])}
        if tuple(x_start.shape[1:]) not in shapes:
            channels, *_, high, wide = self.shape
            require_model_input_shape(x_start.transpose(1, -3), (channels, high, wide), "in_channels")
        return example

    def _encode_clips(self, video: Tensor, key: Tensor) -> Tensor:
        """Returns x_start (B, C, T, h, w) of clips uint8 (B, T, C, H, W)."""
        return encode_clips(video.float() / 127.5 - 1, key, self.first_stage)

    def compute_denoiser_loss(self, nets: Nets, example: Example) -> Terms:
        """Returns the terms of a training step: `loss`, the mean over samples; loss_each (B,); and those that the
        process reports. Draws each sample's timestep and noise from its key. Drops a sample's conditions with
        probability class_dropout_prob. In a step of short clips also replaces the example's x_start by its first
        frames.
        """
        if self._end is not None:
            example["x_start"] = example["x_start"][:, :, : self._end]
        terms = self._compute_losses(nets, example, training=True)
        return {**terms, "loss": terms["loss"].mean(), "loss_each": terms["loss"].detach()}

    @torch.no_grad()
    def evaluate(self, nets: Nets, example: Example) -> Terms:
        """Returns the loss and other terms of each sample, (B,), at one random timestep, with no condition dropped, no
        token routed and no alignment.
        """
        return self._compute_losses(nets, example)

    @torch.no_grad()
    def measure(self, nets: Nets, example: Example, num_steps: int | None = None, progress: Progress = iter) -> Terms:
        """Returns the bits/dim of each sample for a model of 8-bit pixels, with no condition dropped: by the
        variational bound of a diffusion, or the likelihood of a flow's ODE. For a model of latents returns the terms of
        `evaluate` instead, and raises ConfigError if num_steps is given.
        """
        if self.config.learns_pixels:
            network = partial(nets["denoiser"], **self._make_condition_arguments(example))
            terms = self.process.measure_bits_per_dim(network, example["x_start"], example["key"], num_steps, progress)
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
        # Remembered here, where the host knows the step: the shapes of a step depend on it.
        if self.config.video:
            self._end = self.config.video.count_frames_at_step(step)
        if self.alignment:
            self.alignment.begin_step(step)
        return super().turns(step)

    def measure_workload(self, step: int) -> tuple[int, ...]:
        frames = self.config.video.count_frames_at_step(step) if self.config.video else 1
        return 1, frames, int(self.alignment is not None and self.alignment.is_active_at_step(step))

    def _compute_losses(self, nets: Nets, example: Example, training: bool = False) -> Terms:
        """Returns the loss and other terms of each sample, (B,), at one random timestep and noise. training: whether to
        drop conditions, route tokens and align them, as in training.
        """
        x_start, key = example["x_start"], example["key"]
        patch = self.config.get_network_shape()["patch_size"]
        grid = x_start.shape[-2] // patch, x_start.shape[-1] // patch
        alignment = self.alignment if training and self.alignment and self.alignment.needs_extra_outputs else None
        options: dict[str, Any] = {"extras": True} if self.config.internal or alignment else {}
        if training and self.config.routing:
            count = self.config.count_tokens(tuple(x_start.shape[1:]))
            options["keep"] = draw_kept_tokens(key, count, self.config.routing.ratio)
        options |= self._make_condition_arguments(example, drop=training)
        tapped: dict[str, Tensor] = {}

        def call_denoiser(x_t, t):
            out = nets["denoiser"](x_t, t, **options)
            if "extras" not in options:
                return out
            tapped.update(out)
            return tapped["out"]

        t, noise = self.process.draw_times_and_noise(example)
        terms = self.process.compute_losses(call_denoiser, x_start, t, noise)
        if internal := self.config.internal:  # the second head's, of the same forward pass
            base = self.process.compute_losses(lambda x_t, t: tapped["base"], x_start, t, noise)["loss"]
            terms |= {"loss": terms["loss"] + internal.weight * base, "base": base.detach()}
        if alignment:
            align = alignment.compute_loss(tapped, example, grid, options.get("keep"))
            terms |= {"loss": terms["loss"] + alignment.weight * align, "align": align.detach()}
        return terms

    def _require_valid_conditions(self, batch: Mapping[str, Tensor]) -> None:
        for condition in self.network_conditions:
            condition.require_valid_tensors(batch)

    def _make_condition_arguments(self, example: Example, drop: bool = False) -> ForwardArguments:
        """Returns the network's keyword arguments for the conditions of an example, (B, ...) each. drop: whether all
        conditions of a sample are replaced, with probability class_dropout_prob, by null ones.
        """
        arguments: ForwardArguments = {}
        for condition in self.network_conditions:
            arguments |= condition.make_arguments_from_example(example)
        if drop:
            dropped = rng.uniform(example["key"], "drop") < self.config.class_dropout_prob
            for condition in self.network_conditions:
                for name, value in condition.make_null_arguments(arguments).items():
                    arguments[name] = torch.where(dropped.view(-1, *(1,) * (value.ndim - 1)), value, arguments[name])
        return self._drop_text_mask_if_unused(arguments)

    def _drop_text_mask_if_unused(self, arguments: ForwardArguments) -> ForwardArguments:
        """Returns the arguments without `mask` if the model reads all tokens of every text: attention without a mask
        has faster kernels.
        """
        whole = self.config.reads_text_padding
        return {name: value for name, value in arguments.items() if name != "mask" or not whole}

    def make_conditions(self, num: int, labels: tuple[int, ...] | None = None) -> dict[str, Tensor]:
        """Returns conditions by name for `num` samples, (num, ...) each: null texts if the model reads texts, else what
        System.make_conditions returns. Raises ConfigError if a model of texts is given labels, or has no null text.
        """
        if not self.takes_texts:
            return super().make_conditions(num, labels)
        if labels is not None:
            raise ConfigError(
                f"labels: {list(labels)} mean nothing to a model of texts; leave them out, and give texts (--prompts "
                "FILE, or samples.prompts)"
            )
        return self.texts.make_null_text_inputs(num)

    @property
    def takes_texts(self) -> bool:
        return self.config.reads_texts

    def conditions_from_texts(self, texts: list[str]) -> dict[str, Tensor]:
        """Returns the conditions of N texts by name, (N, ...) each; an empty text means the null text. Raises
        ConfigError if the model reads no texts, and for an empty text if it has no null text.
        """
        if not self.takes_texts:
            return super().conditions_from_texts(texts)
        return self.texts.make_prompt_inputs(texts)

    def make_negative_prompt_conditions(self, text: str, num: int) -> dict[str, Tensor]:
        return {f"{NEGATIVE}{name}": value for name, value in self.conditions_from_texts([text] * num).items()}

    def describe_cut(self, texts: list[str], what: str) -> str:
        return self.texts.describe_cut(texts, what)

    def fingerprint(self, source: Any) -> str:
        return super().fingerprint(source) + self.texts.make_encoder_fingerprint_suffix()

    def conditions_from(self, images: Tensor) -> dict[str, Tensor]:
        """Returns the conditions, by name, of samples that begin from `images`: {"image_embed": float32 (N, E)} for a
        model with embedding_dim; or {"prime": the first frames of clips, uint8 (N, K, C, H, W)}.
        """
        found = [condition.make_conditions_from_images(images) for condition in self.network_conditions]
        return next(filter(None, found), None) or super().conditions_from(images)

    def require_usable_source(self, source: Any) -> None:
        """Raises ConfigError if the data source lacks the embeddings, texts or features that the model reads, or has
        some of another width. Prints a warning if tokens are routed and an image has fewer than 1,000 tokens.
        """
        if self.config.align:
            require_encoder_or_features(self.config.align, source.read_first_readable())
        if self.config.routing:
            warn_if_few_tokens(self.config.count_tokens(self.shape))
        if self.takes_embeddings:
            self._require_valid_conditions(
                {name: value[None] for name, value in source.read_first_readable().items() if name == "image_embed"}
            )
        if self.takes_texts:
            batch = {name: torch.as_tensor(value)[None] for name, value in source.read_first_readable().items()}
            for condition in self.network_conditions:
                condition.make_example_tensors(batch)

    def make_pictures(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """Returns {"data": uint8 (B, C, H, W)}, the example's images decoded from x_start, for a model that draws from
        image embeddings. Returns {} for other models, and if no autoencoder decodes the latents.
        """
        if not self.config.embedding_dim or self.find_drawing_problem():
            return {}
        return {"data": self._decode_to_uint8(example["x_start"])}

    @torch.no_grad()
    def sample(self, nets: Nets, request: Request) -> Tensor:
        """Draws uint8 images (N, C, H, W), or clips (N, T, C, H, W), one for each seed. Without labels in the request,
        seed s draws class s modulo num_classes.

        Of the request's conditions, a model with embedding_dim needs image_embed (N, E), see conditions_from. Clips
        begin with the frames in `prime`, if it is there; images with `invert` begin from the noise that inverting the
        sampler finds for them.

        Raises ConfigError for a sampler that the process does not have, or that cannot invert, for more steps than the
        chain has, for guidance of a model trained without dropped conditions, and for a size that patches do not
        divide.
        """
        if problem := self.find_drawing_problem():
            raise ConfigError(problem)
        steps = self.choose_sampler(request.sampler), request.num_steps, request.spacing, request.eta
        shape, prime = self.config.get_input_shape(request.size, request.num_frames), request.conditions.get(PRIME)
        if prime is not None:
            request = self._add_given_frames(request, prime, shape)
        keys, network = rng.keys_of_seeds(request.seeds), self._make_guided_network(nets, request)

        def draw_noise(step):
            return rng.normal(keys, f"noise/{step}", shape)

        images = request.conditions.get("invert")
        if images is None:
            x = rng.normal(keys, "start", shape)
        else:
            x = self.process.invert(network, self.encode({"image": images, "key": keys})["x_start"], *steps)
        drawn = self._decode_to_uint8(self.process.sample(network, x, draw_noise, *steps))
        return drawn if prime is None else torch.cat((prime, drawn[:, prime.shape[1] :]), dim=1)

    def _add_given_frames(self, request: Request, first_frames: Tensor, shape: tuple[int, ...]) -> Request:
        """Returns the request with one more condition, "given" (N, C + 1, T, H, W): the first frames `first_frames`,
        encoded, then zeros up to a clip of `shape` = (C, T, H, W), and a last channel that is 1 in the first frames.
        """
        (condition,) = (condition for condition in self.network_conditions if isinstance(condition, GivenFrames))
        given = condition.pad_frames_to_clips(self._encode_clips(first_frames, rng.keys_of_seeds(request.seeds)), shape)
        return replace(request, conditions={**request.conditions, "given": given})

    def _decode_to_uint8(self, x_start: Tensor) -> Tensor:
        """Returns uint8 images (B, C, H, W), or clips (B, T, C, H, W), for x_start."""
        if self.config.video:
            return convert_to_uint8(decode_clips(x_start, self.first_stage))
        return convert_to_uint8(self.first_stage.decode(x_start) if self.first_stage else x_start)

    def check_sampling(self, samples: Samples) -> None:
        super().check_sampling(samples)
        with reword_errors("--size or samples.size: "):
            self.config.get_input_shape(samples.size)
        choose_eta(self.choose_sampler(samples.sampler, "samples.sampler"), samples.eta)
        self.process.require_known_spacing(samples.spacing)

    def require_guide(self, other: System) -> None:
        """Raises ConfigError if `other`, whose network is to guide this model's samples, is no DiT, or its config has
        other inputs, conditions or noise. Its width, depth, losses and variances may differ, and its data are not seen.
        """
        if not isinstance(other, DiTSystem):
            raise ConfigError(f"it is a {type(other).__name__}, which guides no DiT: name a run of system dit")
        own, others = self.config.get_fields_shared_with_guide(), other.config.get_fields_shared_with_guide()
        if different := sorted(name for name in own | others if own.get(name) != others.get(name)):
            raise ConfigError(
                f"model.{different[0]} differs, and a guide learns the same from noise of the same kind: "
                "name another run"
            )

    def make_conditional_and_negative_arguments(self, request: Request) -> tuple[ForwardArguments, ForwardArguments]:
        """Returns the network's keyword arguments for the samples of a request, twice: with their conditions, and for
        the prediction that guidance leads away from, with null conditions or negative prompts.
        """
        arguments: ForwardArguments = {}
        for condition in self.network_conditions:
            arguments |= condition.make_arguments_from_request(request)
        null = dict(arguments)
        for condition in self.network_conditions:
            null |= condition.make_negative_arguments(request, arguments)
        return self._drop_text_mask_if_unused(arguments), self._drop_text_mask_if_unused(null)

    def _make_guided_network(self, nets: Nets, request: Request) -> Network:
        guide, internal = nets.get("guide"), self.config.internal
        if request.guidance_scale != 1 and not self.config.class_dropout_prob and guide is None:
            raise ConfigError(
                "guidance_scale: this model has no null label, since class_dropout_prob is 0; sample "
                "with guidance_scale 1, or train with class_dropout_prob above 0"
            )
        self._require_valid_conditions(request.conditions)
        arguments, null = self.make_conditional_and_negative_arguments(request)
        return samplers.make_guided_network(
            add_internal_guidance(nets["denoiser"], internal.scale) if internal else nets["denoiser"],
            arguments,
            null,
            request.guidance_scale,
            self.config.guidance_channels,
            rescale=request.guidance_rescale,
            guide=guide,
            active=samplers.make_guidance_mask_function(request.guidance_interval, self.process.compute_noise_ratio),
        )

    def find_drawing_problem(self) -> str | None:
        if self.config.codes and not self.first_stage:
            return (
                "first_stage: these are latents, and no autoencoder decodes them; set model.first_stage.path to "
                "the folder of the one that encoded them"
            )
        return None

    def adapt_weights(self, part: str, state: dict[str, Tensor]) -> Fitted:
        """Returns weights fitted to the network, and notes on what was changed; see weights.adapt_weights. Leaves out a
        null text in the file if null_text=encoder. Computes the table of positions anew if sines_within is set and the
        file's table is for another number of patches. A learned null text that the file lacks begins as the encoder's
        empty text, projected, if text_projection=mlp and the encoder turns the empty text into one token, as T5 does.
        """
        left = []
        if self.config.null_text == "encoder" and weights.NULL_TEXT in state:
            state = {name: value for name, value in state.items() if name != weights.NULL_TEXT}
            left = [f"{weights.NULL_TEXT}: left out, since null_text is encoder"]
        network, positions = self.build_part_on_meta(part), state.get("pos_embed")
        if network.sines_within and positions is not None and positions.shape[1] != network.grid**2:
            state = {**state, "pos_embed": network.compute_sincos_position_embeddings(network.grid, network.grid)[None]}
            left.append(f"pos_embed: computed for {network.grid} x {network.grid} patches")
        values, notes = weights.adapt_weights(state, network)
        lacks_null = weights.NULL_TEXT in values and weights.NULL_TEXT not in state
        if lacks_null and self.config.text_projection == "mlp" and self.config.text_encoder:
            inputs = self.texts.make_text_inputs([""])
            states = inputs["text_encodings"][inputs["text_mask"]]  # (tokens of the empty text, E)
            if len(states) == 1:
                values[weights.NULL_TEXT] = weights.project_text_states_by_weights(states, values)
                notes = [note for note in notes if not note.startswith(weights.NULL_TEXT)]
                notes.append(
                    f"{weights.NULL_TEXT}: the empty text of {self.config.text_encoder}, from which it learns on"
                )
        return values, notes + left

    def rename_published(self, part: str, state: dict[str, Tensor]) -> Fitted:
        """Returns weights of a published layout under our names, changed to our direction of time, and notes; see
        layouts.py. Returns other weights unchanged. Raises ConfigError if networks of the layout are trained in another
        way than the recipe says, such as for another objective.
        """
        layout = self.config.layout or recognise_layout(state)
        if layout is None:
            return state, []
        LAYOUTS[layout].require_config_fits_layout(layout, self.config)
        network = self.build_part_on_meta(part)
        heads = [network.head_dim, network.final_layer.head_dim] if self.config.wide else [network.head_dim]
        translated = translate_weights_from_layout(
            state,
            layout,
            len(network.blocks),
            network.grid,
            heads if self.config.block.rope else [],
            self.config.interpolation_scale,
        )
        state, notes = sd3.crop_positions_to_grid(*translated, network)
        return state, [f"layout: {layout}", *notes]

    def from_diffusers(self, state: dict[str, Tensor], diffusers_config: Mapping[str, Any]) -> Fitted:
        if diffusers_config.get("_class_name") == "ClassTransformer":  # an export of ours, see to_diffusers.py
            weights.require_same_network(diffusers_config, self.config)
            return state, weights.list_objective_differences(diffusers_config, self.config)
        if diffusers_config.get("_class_name") == sd3.CLASS:
            return sd3.rename_from_diffusers(state, diffusers_config, self.config, self.build_part_on_meta("denoiser"))
        if diffusers_config.get("norm_type") == "ada_norm_single":
            return weights.rename_from_pixart(state, diffusers_config, self.config)
        return weights.rename_from_diffusers(state, diffusers_config, self.config)

    def require_expressible_in_diffusers(self) -> None:
        if self.config.block.joint:
            sd3.require_expressible_in_diffusers(self.config)
        else:
            weights.require_expressible_in_diffusers(self.config)
        self.process.make_diffusers_scheduler_arguments(velocities=not self.config.block.joint)

    def has_weight_decay(self, name: str, weight: Tensor) -> bool:
        """Returns whether weight decay applies to the parameter `name`. It applies to those of two or more axes, except
        learned tokens, the table of the positions of words, and adaLN-single's tables of shifts, scales and gates.
        """
        tokens = ("_tokens.tokens", "_tokens.places.weight", "_tokens.null.weight", "adaLN_modulation.table")
        return super().has_weight_decay(name, weight) and not name.endswith(tokens)

    def list_block_classes(self) -> tuple[type[nn.Module], ...]:
        return (JointBlock if self.config.block.joint else Block,)

    def frozen(self) -> tuple[nn.Module, ...]:
        first_stage = (self.first_stage,) if self.first_stage else ()
        encoder = (self.texts.encoder,) if self.texts.encoder else ()
        return (*first_stage, *encoder, *(self.alignment.frozen() if self.alignment else ()))

    def synthetic(self, batch_size: int) -> Batch:
        """Returns a batch of random content, always the same: keys, conditions, and images or clips of the model's
        largest size. Holds latents instead of images if the model learns latents without encoding them itself. Adds
        features if model.align reads them from the data.
        """
        square = self.config.image_size, (self.config.video and self.config.video.height) or self.config.image_size
        wide, high = max(self.config.sizes or (square,), key=math.prod)
        batch = {"key": rng.keys(0, 0, torch.arange(batch_size))}
        for condition in self.network_conditions:
            batch |= condition.draw_synthetic_tensors(batch["key"], (wide, high))
        if not self.config.codes and (self.first_stage or self.config.learns_pixels):
            channels = self.first_stage.image_channels if self.first_stage else self.config.in_channels
            shape, name = (channels, high, wide), "image"
            if self.config.video:
                shape, name = (self.config.video.frames, *shape), "video"
            batch[name] = rng.integers(batch["key"], name, 256, shape).to(torch.uint8)
        else:
            shape = self.config.get_input_shape((wide, high) if self.config.sizes else None)
            batch["latent_mean"] = rng.normal(batch["key"], "latent_mean", shape)
            batch["latent_std"] = 0.1 * rng.uniform(batch["key"], "latent_std", shape)
        if self.config.align and self.config.align.kind == "repa" and self.config.align.path is None:
            *_, high, wide = (side // self.config.get_network_shape()["patch_size"] for side in self.shape)
            batch["features"] = rng.normal(batch["key"], "features", (high * wide, self.config.align.width))
        return batch
