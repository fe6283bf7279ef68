"""The diffusion prior as a system: one part, `denoiser`, from text embeddings to image embeddings.

Notation: B samples; D, T and E are the widths of an image embedding, a text embedding and a text encoding; L text
tokens. x_start is the image embedding as the chain sees it, (embed - mean) / std. Without image_embed_stats that is
image_embed_scale * embed.

All randomness is drawn from the samples' keys, each kind under a name of its own: timestep, noise, drop (of the text),
drop_image, self_cond. Generation draws start, then noise/0, noise/1, ... in the chain's order; for candidate j > 0 the
names begin with "candidate/j/".
"""

from collections.abc import Container, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain import rng
from dstrain.diffusion import samplers, schedule
from dstrain.diffusion.gaussian import GaussianDiffusion, Network, upcast_output_to_float32
from dstrain.diffusion.solvers import choose_eta
from dstrain.diffusion.timesteps import UniformSampler
from dstrain.encoders import emoji
from dstrain.encoders.autoencoder import hash_network
from dstrain.encoders.text import TextEncoder, encode_distinct_texts, load_text_encoder, unpack_captions
from dstrain.nn.fitting import Fitted
from dstrain.recipe import ConfigError, Samples
from dstrain.systems.base import CHOICES, Batch, Example, Nets, Progress, Request, System, Terms
from dstrain.systems.prior import weights
from dstrain.systems.prior.config import Config
from dstrain.systems.prior.lucidrains import LucidrainsBlock, LucidrainsPrior
from dstrain.systems.prior.network import PriorBlock, PriorTransformer

TEXT = ("text_embed", "text_encodings", "text_mask")
MEASURED_STEPS = 64  # of the chains of `measure` by default, as in the paper


class PriorSystem(System):
    """The prior of Ramesh et al. 2022, section 2.2, with the choices in `config`."""

    in_pipeline = "prior"
    generates = False  # training draws no grids: embeddings are no pictures
    sampling = CHOICES

    def __init__(self, config: Config) -> None:
        self.config = config
        self.parts = {"denoiser": self.compute_denoiser_loss}
        self.averaged, self.samplers = ("denoiser",), samplers.SAMPLERS
        self.shape, self.draws_embeddings = (config.image_embed_dim,), config.image_embed_dim
        self.diffusion = GaussianDiffusion(
            schedule.make_betas(config.beta_schedule, config.timesteps),
            prediction=config.prediction,
            variance="fixed_small",
        )
        self.timesteps = UniformSampler(config.timesteps)
        self.mean, self.std = weights.read_embedding_statistics(config)  # (D,) each
        self._placed: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._encoder: TextEncoder | None = None

    def networks(self) -> dict[str, nn.Module]:
        kind = PriorTransformer if self.config.lucidrains is None else LucidrainsPrior
        return {"denoiser": kind(**self.config.make_network_arguments())}

    @torch.no_grad()
    def encode(self, batch: Batch) -> Example:
        """Returns the batch as an example, without captions, and with these tensors:

        x_start                    (B, D), the normalized image embeddings, in place of image_embed.
        text_embed                 (B, T).
        text_encodings, text_mask  (B, L, E) and (B, L), if the model reads tokens.
        other_text_embed           (B, T), of the text of another pair, if the batch has one.

        Text inputs that the data lack are made from captions by the text encoder. Raises ConfigError if widths differ
        from the model's, or if captions are needed and missing.
        """
        inputs = ("image_embed", "caption", "other_text_embed", "other_caption", *TEXT)
        example = {name: values for name, values in batch.items() if name not in inputs}
        image = self._require_width(batch["image_embed"].float(), self.config.image_embed_dim, "image_embed_dim")
        image = F.normalize(image, dim=1) if self.config.normalize_embeds else image
        mean, std = self._get_embedding_mean_and_std(image)
        example["x_start"] = (image - mean) / std
        example |= self._prepare_text_inputs(
            {name: batch[name] for name in (*TEXT, "caption") if name in batch}, image.device
        )
        if "other_text_embed" in batch and not self._find_missing_text_input(batch):
            example["other_text_embed"] = self._check_and_normalize_text_embed(batch["other_text_embed"])
        elif "other_caption" in batch:
            example["other_text_embed"] = self._prepare_text_inputs({"caption": batch["other_caption"]}, image.device)[
                "text_embed"
            ]
        return example

    def require_usable_source(self, source: Any) -> None:
        """Encodes the first pair of the data source as a test. Raises ConfigError if the pair's widths differ from the
        model's, or if it lacks texts. Raises ConfigError, too, if a text encoder is needed and model.text_encoder names
        none.
        """
        self.encode({name: values[None] for name, values in source.read_first_readable().items()})

    def fingerprint(self, source: Any) -> str:
        """Returns the fingerprint of the data source. Adds a hash of the embeddings' mean and std if image_embed_stats
        is set, and the fingerprint of the text encoder if captions are encoded while the model trains.
        """
        result = source.compute_fingerprint()
        if self.config.image_embed_stats is not None:
            result += f" image_embed_stats={hash_network({}, {'mean': self.mean, 'std': self.std})}"
        if self._find_missing_text_input(source.read_first_readable()):
            result += f" text_encoder={self.get_text_encoder(torch.device('cpu')).compute_fingerprint()}"
        return result

    def _find_missing_text_input(self, given_names: Container[str]) -> str | None:
        """Returns the first text input of the network, text_embed or text_encodings, that is not among `given_names`
        and so has to be computed from captions; None if none is missing.
        """
        needed = ("text_embed", "text_encodings") if self.config.num_text_tokens else ("text_embed",)
        return next((name for name in needed if name not in given_names), None)

    def _prepare_text_inputs(self, texts: dict[str, Tensor], device: torch.device | None = None) -> dict[str, Tensor]:
        """Returns the network's text inputs, made from cached embeddings and encodings or, if one of them is missing,
        from captions, which are encoded on `device`. Pads encodings to max_text_len.

        Raises ConfigError if captions are missing, or if widths or lengths do not fit.
        """
        tokens = self.config.num_text_tokens
        if missing := self._find_missing_text_input(texts):
            if "caption" not in texts:
                raise ConfigError(
                    f"data: there is neither {missing} nor a caption to each image_embed: cache text "
                    "embeddings, give captions, or (for text_encodings) set model.max_text_len=0"
                )
            texts = self.get_text_encoder(device).encode(unpack_captions(texts["caption"]))
        inputs = {"text_embed": self._check_and_normalize_text_embed(texts["text_embed"])}
        if tokens:
            width = self.config.text_encodings_dim or self.config.image_embed_dim
            encodings = self._require_width(texts["text_encodings"].float(), width, "text_encodings_dim")
            short = tokens - encodings.shape[1]
            if short < 0:
                raise ConfigError(
                    f"data: text_encodings have {encodings.shape[1]} tokens, model.max_text_len is "
                    f"{tokens}: make both equal"
                )
            mask = texts.get("text_mask", torch.ones(encodings.shape[:2], device=encodings.device)).bool()
            inputs["text_encodings"] = F.pad(encodings, (0, 0, 0, short))  # (B, L, E)
            inputs["text_mask"] = F.pad(mask, (0, short))  # (B, L)
        return inputs

    def _check_and_normalize_text_embed(self, embed: Tensor) -> Tensor:
        """Returns text embeddings (B, T) in float32, of unit length if normalize_embeds is set. Raises ConfigError for
        another width than the model's.
        """
        width = self.config.text_embed_dim or self.config.image_embed_dim
        embed = self._require_width(embed.float(), width, "text_embed_dim")
        return F.normalize(embed, dim=1) if self.config.normalize_embeds else embed

    def _require_width(self, values: Tensor, width: int, field: str) -> Tensor:
        """Returns `values` (..., width) unchanged. Raises ConfigError, which names the model's `field`, if they have
        another width.
        """
        if values.shape[-1] != width:
            raise ConfigError(
                f"data: {field.removesuffix('_dim')} is {values.shape[-1]} wide in the data and {width} "
                f"in the model: set model.{field}={values.shape[-1]}, or give other data"
            )
        return values

    def get_text_encoder(self, device: torch.device) -> TextEncoder:
        """Returns the frozen text encoder, on `device`. Only the first call loads it: a run with cached embeddings
        needs none. Raises ConfigError if model.text_encoder names none.
        """
        if self._encoder is None:
            self._encoder = load_text_encoder(self.config.text_encoder, self.config.num_text_tokens or None)
        return self._encoder.to(device)

    def compute_denoiser_loss(self, nets: Nets, example: Example) -> Terms:
        """Returns the terms of a training step: `loss`, the mean over samples; loss_each (B,); and quartile (B,), the
        quarter of the chain, 0 to 3, in which the timestep lies. Draws each sample's timestep and noise from its key.
        Drops its text with probability text_cond_drop_prob.
        """
        terms = self._compute_losses(nets, example, self.config.text_cond_drop_prob)
        return {**terms, "loss": terms["loss"].mean(), "loss_each": terms["loss"].detach()}

    @torch.no_grad()
    def evaluate(self, nets: Nets, example: Example) -> Terms:
        """Returns terms of each sample, (B,): the loss at one random timestep, with no text dropped; the quarter of the
        chain; and similarities of drawn embeddings (see `_measure_drawn_embedding_similarities`), for each number of
        steps in `evaluate_steps`.
        """
        terms = self._compute_losses(nets, example, drop_prob=0.0)
        return terms | self._measure_drawn_embedding_similarities(nets, example, self.config.evaluate_steps)

    @torch.no_grad()
    def measure(self, nets: Nets, example: Example, num_steps: int | None = None, progress: Progress = iter) -> Terms:
        """Returns terms of each sample, (B,): the loss at one random timestep, and similarities of drawn embeddings to
        the true ones (see `_measure_drawn_embedding_similarities`).

        num_steps: the number of steps in which embeddings are drawn. None: each number in evaluate_steps; if that is
        empty, 64, or all timesteps if there are fewer.
        """
        steps = self.config.evaluate_steps or (min(MEASURED_STEPS, self.config.timesteps),)
        terms = self._compute_losses(nets, example, drop_prob=0.0)
        terms.pop("quartile")
        return terms | self._measure_drawn_embedding_similarities(
            nets, example, steps if num_steps is None else (num_steps,), progress
        )

    def _compute_losses(self, nets: Nets, example: Example, drop_prob: float) -> Terms:
        """Returns the loss and the quarter of the chain (`quartile`, 0 to 3) of each sample, (B,), at a random
        timestep. drop_prob: the probability with which a sample's text is dropped.
        """
        x_start, key = example["x_start"], example["key"]
        noise = rng.normal(key, "noise", self.shape)  # (B, D)
        t, _ = self.timesteps.sample(rng.uniform(key, "timestep"))
        x_t = self.diffusion.q_sample(x_start, t, noise)
        image_dropped = rng.uniform(key, "drop_image") < (self.config.image_drop_prob if drop_prob else 0.0)
        inputs = self.make_network_inputs(example, rng.uniform(key, "drop") < drop_prob, image_dropped)
        if self.config.self_cond:
            # Every rank makes both calls, whichever of its samples use the first one's result.
            with torch.no_grad():
                first = upcast_output_to_float32(nets["denoiser"](x_t, t, **inputs, self_cond=torch.zeros_like(x_t)))
            shown = rng.uniform(key, "self_cond") < 0.5
            inputs["self_cond"] = torch.where(shown[:, None], self.diffusion.predict_x_start(first, x_t, t), 0.0)
        prediction = upcast_output_to_float32(nets["denoiser"](x_t, t, **inputs))
        if self.config.training_clamp_l2norm:
            prediction = self._rescale_to_data_norm(prediction)
        target = self.diffusion.compute_training_target(x_start, x_t, t, noise)
        losses = {"l2": F.mse_loss, "l1": F.l1_loss, "huber": F.smooth_l1_loss}
        loss = losses[self.config.loss](prediction, target, reduction="none").mean(dim=1)  # (B,)
        return {"loss": loss, "quartile": 4 * t // self.config.timesteps}

    def make_network_inputs(
        self, conditions: dict[str, Tensor], dropped: Tensor, image_dropped: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Returns the network's keyword arguments for the text inputs among `conditions`.

        dropped        bool (B,), True for samples whose text the network replaces by its null text. Without effect if
                       it has no null text.
        image_dropped  bool (B,), True for samples whose noisy image embedding the network replaces by a null input;
                       None: the same as `dropped`. Without effect if it has no such input.
        """
        inputs = {name: conditions[name] for name in TEXT if name in conditions}
        inputs.setdefault("text_mask", dropped.new_ones(len(dropped), 0))  # attention is causal only with a mask
        inputs |= {"dropped": dropped} if self.config.text_cond_drop_prob else {}
        image_too = {"image_dropped": dropped if image_dropped is None else image_dropped}
        return inputs | (image_too if self.config.image_drop_prob else {})

    def _rescale_to_data_norm(self, x: Tensor) -> Tensor:
        """Returns x (..., D) rescaled to the length that x_start has in the data: normalizes x to unit length, then
        divides by the embeddings' standard deviation.
        """
        return F.normalize(x, dim=-1) / self._get_embedding_mean_and_std(x)[1]

    def _convert_to_image_embedding(self, x: Tensor) -> Tensor:
        """Converts x_start (..., D) back to image embeddings: x_start * std + mean."""
        mean, std = self._get_embedding_mean_and_std(x)
        return x * std + mean

    def _get_embedding_mean_and_std(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean and standard deviation of image embeddings, (D,) each, on the device of `like`. Only the
        first call for a device copies them there.
        """
        if like.device not in self._placed:
            self._placed[like.device] = self.mean.to(like.device), self.std.to(like.device)
        return self._placed[like.device]

    @torch.no_grad()
    def sample(self, nets: Nets, request: Request) -> Tensor:
        """Draws image embeddings, float32 (N, D), one for each seed. Makes num_candidates draws for each, and keeps the
        one that is nearest to the text embedding by cosine.

        The request's conditions are text_embed (N, T) and, if the model reads tokens, text_encodings (N, L, E) and
        text_mask (N, L). Raises ConfigError if text_embed is missing, for more steps than the chain has, and for
        guidance without a null text.
        """
        if "text_embed" not in request.conditions:
            raise ConfigError("prompts: a prior draws for texts; give them with --prompts FILE, one on each line")
        conditions = self._prepare_text_inputs(
            {name: request.conditions[name] for name in TEXT if name in request.conditions}
        )
        keys, count = rng.keys_of_seeds(request.seeds), self.config.num_candidates
        drawn = self._draw_candidate_embeddings(nets, conditions, keys, request, count)  # (count, N, D)
        if count == 1:
            return drawn[0]
        nearest = F.cosine_similarity(drawn, conditions["text_embed"][None], dim=2).argmax(dim=0)
        return drawn[nearest, torch.arange(len(keys), device=nearest.device)]

    def _draw_candidate_embeddings(
        self,
        nets: Nets,
        conditions: dict[str, Tensor],
        keys: Tensor,
        request: Request,
        count: int,
        progress: Progress = iter,
    ) -> Tensor:
        """Draws `count` image embeddings for each of N samples, and returns them as (count, N, D). All are drawn in one
        batch. keys int64 (N,): the samples' seeds, from which their noise is drawn.
        """
        prefixes = ["", *(f"candidate/{j}/" for j in range(1, count))]

        def draw_normal(name):
            return torch.cat([rng.normal(keys, prefix + name, self.shape) for prefix in prefixes])

        repeated = {name: value.repeat(count, *[1] * (value.ndim - 1)) for name, value in conditions.items()}
        network = self._make_guided_network(nets, repeated, request)
        x = draw_normal("start")  # (count * N, D)
        if self.config.init_image_embed_l2norm:
            x = self._rescale_to_data_norm(x)
        sampler, noise = self.choose_sampler(request.sampler), lambda i: draw_normal(f"noise/{i}")
        spacing = request.spacing or ("linspace" if sampler == "ddim" else None)
        timesteps = samplers.choose_timesteps(self.diffusion, sampler, request.num_steps, spacing)
        x = samplers.sample_chain(self.diffusion, network, x, noise, sampler, timesteps, request.eta, progress=progress)
        if self.config.sampling_final_clamp_l2norm:
            x = self._rescale_to_data_norm(x)
        return self._convert_to_image_embedding(x).view(count, len(keys), -1)

    def check_sampling(self, samples: Samples) -> None:
        super().check_sampling(samples)
        choose_eta(self.choose_sampler(samples.sampler, "samples.sampler"), samples.eta)

    def _make_guided_network(self, nets: Nets, conditions: dict[str, Tensor], request: Request) -> Network:
        """Returns a function of x_t and t that returns the denoiser's output for these conditions, with classifier-free
        guidance by the request's scale, interval and rescaling. Use the function for one chain only: with self_cond
        each call reads the x_start that the call before predicted.

        Raises ConfigError if the request asks for guidance and the model has no null text.
        """
        scale, active = (
            request.guidance_scale,
            samplers.make_guidance_mask_function(request.guidance_interval, self.diffusion.compute_noise_ratio),
        )
        if scale != 1 and not self.config.text_cond_drop_prob:
            raise ConfigError(
                "guidance_scale: this model has no null text, since text_cond_drop_prob is 0; sample "
                "with guidance_scale 1, or train with text_cond_drop_prob above 0"
            )
        none = torch.zeros_like(conditions["text_embed"][:, 0], dtype=torch.bool)
        inputs, null = self.make_network_inputs(conditions, none), self.make_network_inputs(conditions, ~none)
        last: list[Tensor] = []

        def predict_guided(x_t: Tensor, t: Tensor) -> Tensor:
            own = {"self_cond": last.pop() if last else torch.zeros_like(x_t)} if self.config.self_cond else {}
            out = upcast_output_to_float32(
                samplers.make_guided_network(
                    nets["denoiser"], inputs | own, null | own, scale, active=active, rescale=request.guidance_rescale
                )(x_t, t)
            )
            x_start = self.diffusion.predict_x_start(
                out, x_t, t
            )  # t is a timestep of the whole chain, as these tables expect
            if self.config.sampling_clamp_l2norm:
                x_start = self._rescale_to_data_norm(x_start)
                out = self.diffusion.compute_training_target(
                    x_start, x_t, t, self.diffusion.predict_eps(x_start, x_t, t)
                )
            last[:] = [x_start]
            return out

        return predict_guided

    def _measure_drawn_embedding_similarities(
        self, nets: Nets, example: Example, steps: tuple[int, ...], progress: Progress = iter
    ) -> Terms:
        """Draws an embedding for each sample, without guidance, once for each number of DDIM steps in `steps`. Returns
        cosines (B,) by name; {} if `steps` is empty. STEPS stands for the number of steps.

        similarity/STEPS/image           of the drawn embedding and the true image embedding.
        similarity/STEPS/text            of the drawn embedding and the text embedding.
        similarity/STEPS/other_text      of the drawn embedding and another pair's text embedding, if the example has
                                         one.
        similarity/text_image            of the text embedding and the true image embedding.
        similarity/STEPS/above_baseline  similarity/STEPS/text minus similarity/text_image.

        Returns only the first if text and image embeddings differ in width.
        """
        if not steps:
            return {}
        image = self._convert_to_image_embedding(example["x_start"])
        text, other = example["text_embed"], example.get("other_text_embed")
        comparable = text.shape[1] == image.shape[1]

        def compute_cosine(a, b):
            return F.cosine_similarity(a, b, dim=1)

        terms = {"similarity/text_image": compute_cosine(text, image)} if comparable else {}
        for count in steps:
            request = Request(example["key"], num_steps=count)
            drawn = self._draw_candidate_embeddings(
                nets, {name: example[name] for name in TEXT if name in example}, example["key"], request, 1, progress
            )[0]
            cosines = {"image": compute_cosine(drawn, image)}
            if comparable:
                cosines["text"] = compute_cosine(drawn, text)
                cosines["above_baseline"] = cosines["text"] - terms["similarity/text_image"]
                if other is not None:
                    cosines["other_text"] = compute_cosine(drawn, other)
            terms |= {f"similarity/{count}/{name}": value for name, value in cosines.items()}
        return terms

    def _read_built_in_text_embeds(self, texts: list[str]) -> Tensor | None:
        """Returns the text embeddings (N, T) that the package holds for captions of its emoji pictures. Returns None if
        a text is not one of these captions, if model.text_encoder is not the encoder that made them, or if max_text_len
        is above 0.
        """
        built_in = self.config.text_encoder == emoji.TEXT_ENCODER and not self.config.max_text_len
        return emoji.look_up_text_embeds(texts) if built_in else None

    def conditions_from_texts(self, texts: list[str]) -> dict[str, Tensor]:
        """Returns the network's text inputs for N texts, (N, ...) each, on the CPU. Reads their embeddings from the
        package if `_read_built_in_text_embeds` finds them; otherwise encodes all texts. Raises ConfigError
        if a text encoder is needed and model.text_encoder names none.
        """
        if (embeds := self._read_built_in_text_embeds(texts)) is not None:
            return self._prepare_text_inputs({"text_embed": embeds})
        encoder = self.get_text_encoder(torch.device("cpu"))
        return encode_distinct_texts(texts, lambda some: self._prepare_text_inputs(encoder.encode(some)))

    def describe_cut(self, texts: list[str], what: str) -> str:
        return (
            ""
            if self._read_built_in_text_embeds(texts) is not None
            else self.get_text_encoder(torch.device("cpu")).describe_cut(texts, what)
        )

    def adapt_weights(self, part: str, state: dict[str, Tensor]) -> Fitted:
        """Returns weights fitted to the network, and notes on what was changed; see weights.adapt_weights."""
        return weights.adapt_weights(state, self.build_part_on_meta(part), self.config, self.mean, self.std)

    def from_diffusers(self, state: dict[str, Tensor], diffusers_config: Mapping[str, Any]) -> Fitted:
        """Returns the state dict unchanged, and no notes: diffusers has the same names. Raises ConfigError if
        diffusers' config.json describes another network than the recipe.
        """
        weights.require_same_config(diffusers_config, self.config)
        return state, []

    def require_expressible_in_diffusers(self) -> None:
        weights.require_expressible_in_diffusers(self.config)

    def has_weight_decay(self, name: str, weight: Tensor) -> bool:
        """Returns whether weight decay applies to the weight `name`: True for matrices of linear layers and tables of
        embeddings; False for all others, such as positions, the learned query and null inputs.
        """
        return weight.ndim >= 2 and name.endswith("weight")

    def list_block_classes(self) -> tuple[type[nn.Module], ...]:
        return (PriorBlock if self.config.lucidrains is None else LucidrainsBlock,)

    def synthetic(self, batch_size: int) -> Batch:
        """Returns a batch of random embeddings: keys, image_embed, text_embed, the text embedding of another pair, and,
        if the model reads tokens, text_encodings with a mask of random lengths.
        """
        config, key = self.config, rng.keys(0, 0, torch.arange(batch_size))
        batch = {"key": key, "image_embed": rng.normal(key, "image", self.shape)}
        for name in ("text_embed", "other_text_embed"):
            batch[name] = rng.normal(key, name, (config.text_embed_dim or config.image_embed_dim,))
        if tokens := config.num_text_tokens:
            width = config.text_encodings_dim or config.image_embed_dim
            batch["text_encodings"] = rng.normal(key, "text_encodings", (tokens, width))
            length = 1 + rng.integers(key, "length", tokens)
            batch["text_mask"] = torch.arange(tokens) < length[:, None]
        return batch
