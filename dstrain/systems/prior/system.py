"""The diffusion prior as a system: one part, `denoiser`, from text embeddings to image embeddings.

Notation: B samples, D an image embedding, T a text embedding, L text tokens of E values. x_start is the image embedding
as the chain sees it, (embed - mean) / std; with the default scale s that is s * embed.

All randomness is drawn from the samples' keys by name: timestep, noise, drop (of the text), self_cond; in generation
start and noise/0, noise/1, ... in the order of the chain, of candidate j > 0 behind "candidate/j/".
"""

from collections.abc import Container, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain import rng
from dstrain.diffusion import samplers, schedule
from dstrain.diffusion.gaussian import GaussianDiffusion, Network, at_boundary
from dstrain.diffusion.timesteps import UniformSampler
from dstrain.encoders.autoencoder import fingerprint
from dstrain.encoders.text import TextEncoder, captions_of
from dstrain.recipe import ConfigError
from dstrain.systems.base import Batch, Example, Nets, Progress, Request, System, Terms
from dstrain.systems.prior import weights
from dstrain.systems.prior.config import Config, SAMPLERS
from dstrain.systems.prior.network import PriorBlock, PriorTransformer

TEXT = ("text_embed", "text_encodings", "text_mask")
MEASURED_STEPS = 64                               # of the paper's samples
_PROMPTS = 64                                     # texts that are encoded at once


class PriorSystem(System):
    """Ramesh et al. 2022, section 2.2. `config` says what each choice means."""

    in_pipeline = "prior"
    generates = False                             # embeddings are no pictures to look at

    def __init__(self, config: Config) -> None:
        self.config = config
        self.parts = {"denoiser": self.denoise}
        self.averaged, self.samplers, self.shape = ("denoiser",), SAMPLERS, (config.image_embed_dim,)
        self.diffusion = GaussianDiffusion(schedule.betas(config.beta_schedule, config.timesteps),
                                           prediction=config.prediction, variance="fixed_small")
        self.timesteps = UniformSampler(config.timesteps)
        self.mean, self.std = weights.statistics(config)                                          # (D,) each
        self._placed: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._encoder: TextEncoder | None = None

    def networks(self) -> dict[str, nn.Module]:
        return {"denoiser": PriorTransformer(**self.config.network_arguments())}

    # ----------------------------------------------------------------------------------------------------------- data

    @torch.no_grad()
    def encode(self, batch: Batch) -> Example:
        """x_start (B, D), text_embed (B, T) and, where conditioned on, text_encodings (B, L, E), text_mask (B, L).

        Captions are encoded here where the data lack text embeddings, or encodings that are read: then both are one
        encoder's. ConfigError: widths that differ from the model's, or texts that the data lack.
        """
        read = ("image_embed", "caption", "other_text_embed", "other_caption", *TEXT)
        example = {name: values for name, values in batch.items() if name not in read}
        image = self._fitting(batch["image_embed"].float(), self.config.image_embed_dim, "image_embed_dim")
        image = F.normalize(image, dim=1) if self.config.normalize_embeds else image
        mean, std = self._statistics(image)
        example["x_start"] = (image - mean) / std
        example |= self._texts({name: batch[name] for name in (*TEXT, "caption") if name in batch}, image.device)
        if "other_text_embed" in batch and not self._lacks(batch):
            example["other_text_embed"] = self._text_embed(batch["other_text_embed"])
        elif "other_caption" in batch:
            other = self._texts({"caption": batch["other_caption"]}, image.device)
            example["other_text_embed"] = other["text_embed"]
        return example

    def accepts(self, source: Any) -> None:
        """Encodes the first pair: widths, texts that are missing, and the encoder of captions where one is needed."""
        self.encode({name: values[None] for name, values in source.first().items()})

    def fingerprint(self, source: Any) -> str:
        """With the encoder of captions that are not cached, and the statistics of image embeddings."""
        stats = {} if self.config.image_embed_stats is None else {"mean": self.mean, "std": self.std}
        said = [f" image_embed_stats={fingerprint({}, stats)}"] if stats else []
        if self._lacks(source.first()):
            said.append(f" text_encoder={self.text_encoder(torch.device('cpu')).fingerprint()}")
        return source.fingerprint() + "".join(said)

    def _lacks(self, given: Container[str]) -> str | None:
        """What has to be made of captions, None where all is there."""
        wanted = ("text_embed", "text_encodings") if self.config.max_text_len else ("text_embed",)
        return next((name for name in wanted if name not in given), None)

    def _texts(self, given: dict[str, Tensor], device: torch.device | None = None) -> dict[str, Tensor]:
        """What the network is told of texts, from embeddings or from captions, which are encoded on the device."""
        tokens = self.config.max_text_len
        if missing := self._lacks(given):
            if "caption" not in given:
                raise ConfigError(f"data: there is neither {missing} nor a caption to each image_embed: cache text "
                                  "embeddings, give captions, or (for text_encodings) set model.max_text_len=0")
            given = self.text_encoder(device).encode(captions_of(given["caption"]))
        found = {"text_embed": self._text_embed(given["text_embed"])}
        if tokens:
            encodings = given["text_encodings"].float()
            width = self.config.text_encodings_dim or self.config.image_embed_dim
            self._fitting(encodings, width, "text_encodings_dim")
            short = tokens - encodings.shape[1]
            if short < 0:
                raise ConfigError(f"data: text_encodings have {encodings.shape[1]} tokens, model.max_text_len is "
                                  f"{tokens}: make both equal")
            mask = given.get("text_mask", torch.ones(encodings.shape[:2], device=encodings.device)).bool()
            found["text_encodings"] = F.pad(encodings, (0, 0, 0, short))                          # (B, L, E)
            found["text_mask"] = F.pad(mask, (0, short))                                          # (B, L)
        return found

    def _text_embed(self, embed: Tensor) -> Tensor:
        width = self.config.text_embed_dim or self.config.image_embed_dim
        embed = self._fitting(embed.float(), width, "text_embed_dim")
        return F.normalize(embed, dim=1) if self.config.normalize_embeds else embed

    def _fitting(self, values: Tensor, width: int, field: str) -> Tensor:
        if values.shape[-1] != width:
            raise ConfigError(f"data: {field.removesuffix('_dim')} is {values.shape[-1]} wide in the data and {width} "
                              f"in the model: set model.{field}={values.shape[-1]}, or give other data")
        return values

    def text_encoder(self, device: torch.device) -> TextEncoder:
        """The frozen encoder, loaded where captions are first met: cached embeddings need none."""
        if self._encoder is None:
            if self.config.text_encoder is None:
                raise ConfigError("model.text_encoder: texts are to be encoded and none is named; give the folder or "
                                  "hub name of the encoder of the data's embeddings (generate: --text-encoder)")
            self._encoder = TextEncoder(self.config.text_encoder, self.config.max_text_len or None)
        return self._encoder.to(device)

    # ------------------------------------------------------------------------------------------------------- training

    def denoise(self, nets: Nets, example: Example) -> Terms:
        """The training loss: one timestep and one noise for each sample, its text dropped now and then."""
        dropped = rng.uniform(example["key"], "drop") < self.config.text_cond_drop_prob
        terms = self._losses(nets, example, dropped)
        return {**terms, "loss": terms["loss"].mean(), "loss_each": terms["loss"].detach()}

    @torch.no_grad()
    def evaluate(self, nets: Nets, example: Example) -> Terms:
        """The training loss with every text in place and the similarities of `evaluate_steps`, values (B,)."""
        terms = self._losses(nets, example, torch.zeros_like(example["key"], dtype=torch.bool))
        return terms | self._similarities(nets, example, self.config.evaluate_steps)

    @torch.no_grad()
    def measure(self, nets: Nets, example: Example, num_steps: int | None = None, progress: Progress = iter) -> Terms:
        """The loss and the similarities after chains of num_steps; None takes evaluate_steps, or 64 where it is ()."""
        steps = self.config.evaluate_steps or (min(MEASURED_STEPS, self.config.timesteps),)
        terms = self._losses(nets, example, torch.zeros_like(example["key"], dtype=torch.bool))
        terms.pop("quartile")
        return terms | self._similarities(nets, example, steps if num_steps is None else (num_steps,), progress)

    def _losses(self, nets: Nets, example: Example, dropped: Tensor) -> Terms:
        x_start, key = example["x_start"], example["key"]
        noise = rng.normal(key, "noise", self.shape)                                            # (B, D)
        t, _ = self.timesteps.sample(rng.uniform(key, "timestep"))
        x_t = self.diffusion.q_sample(x_start, t, noise)
        said = self.said(example, dropped)
        if self.config.self_cond:
            # Every rank makes both calls, whichever samples see the first one's answer.
            with torch.no_grad():
                first = at_boundary(nets["denoiser"](x_t, t, **said, self_cond=torch.zeros_like(x_t)))
            seen = rng.uniform(key, "self_cond") < 0.5
            said["self_cond"] = torch.where(seen[:, None], self.diffusion.x_start_of(first, x_t, t), 0.0)
        prediction = at_boundary(nets["denoiser"](x_t, t, **said))
        if self.config.training_clamp_l2norm:
            prediction = self._of_length(prediction)
        target = self.diffusion.target(x_start, x_t, t, noise)
        losses = {"l2": F.mse_loss, "l1": F.l1_loss, "huber": F.smooth_l1_loss}
        loss = losses[self.config.loss](prediction, target, reduction="none").mean(dim=1)         # (B,)
        return {"loss": loss, "quartile": 4 * t // self.config.timesteps}

    def said(self, conditions: dict[str, Tensor], dropped: Tensor) -> dict[str, Tensor]:
        """The network's keyword arguments; the image embedding is never dropped, nor the text without a null one."""
        said = {name: conditions[name] for name in TEXT if name in conditions}
        # A mask makes attention causal; with no text tokens there is none to hide.
        said.setdefault("text_mask", dropped.new_ones(len(dropped), 0))
        return said | ({"dropped": dropped} if self.config.text_cond_drop_prob else {})

    def _of_length(self, x: Tensor) -> Tensor:
        """An embedding brought to the length of the data, which is that of unit vectors times the scale."""
        return F.normalize(x, dim=-1) / self._statistics(x)[1]

    def _embedding(self, x: Tensor) -> Tensor:
        """What the chain knows as x_start (..., D), as the data have it."""
        mean, std = self._statistics(x)
        return x * std + mean

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation on a device, where they are sent once: a copy a step would wait for the device."""
        if like.device not in self._placed:
            self._placed[like.device] = self.mean.to(like.device), self.std.to(like.device)
        return self._placed[like.device]

    # ----------------------------------------------------------------------------------------------------- generation

    @torch.no_grad()
    def sample(self, nets: Nets, request: Request) -> Tensor:
        """Image embeddings float32 (N, D), for each text the best of num_candidates by similarity with its embedding.

        Conditions: text_embed (N, T) and, where the model has text tokens, text_encodings (N, L, E), text_mask (N, L).
        ConfigError: no text, more steps than the chain has, guidance of a model that never saw a dropped text.
        """
        if "text_embed" not in request.conditions:
            raise ConfigError("prompts: a prior draws for texts; give them with --prompts FILE, one on each line")
        conditions = self._texts({name: request.conditions[name] for name in TEXT if name in request.conditions})
        keys, count = rng.keys_of_seeds(request.seeds), self.config.num_candidates
        drawn = self._draw(nets, conditions, keys, request, count)                                # (count, N, D)
        if count == 1:
            return drawn[0]
        nearest = F.cosine_similarity(drawn, conditions["text_embed"][None], dim=2).argmax(dim=0)
        return drawn[nearest, torch.arange(len(keys), device=nearest.device)]

    def _draw(self, nets: Nets, conditions: dict[str, Tensor], keys: Tensor, request: Request, count: int,
              progress: Progress = iter) -> Tensor:
        """`count` candidates for each key, one chain over all: (count, N, D)."""
        total, steps = self.config.timesteps, request.num_steps
        if not 1 <= steps <= total:
            raise ConfigError(f"num_steps: {steps} is not between 1 and the {total} timesteps of the chain")
        names = ["", *(f"candidate/{j}/" for j in range(1, count))]
        normal = lambda name: torch.cat([rng.normal(keys, before + name, self.shape) for before in names])
        every = {name: value.repeat(count, *[1] * (value.ndim - 1)) for name, value in conditions.items()}
        network = self._chained(nets, every, request.guidance_scale)
        x = normal("start")                                                                       # (count * N, D)
        if self.config.init_image_embed_l2norm:
            x = self._of_length(x)
        chain = self.diffusion.respaced(str(steps))
        if self.sampler(request.sampler) == "ddim":
            x = samplers.ddim(chain, network, x, progress=progress)
        else:
            x = samplers.ancestral(chain, network, x, lambda i: normal(f"noise/{i}"), progress=progress)
        if self.config.sampling_final_clamp_l2norm:
            x = self._of_length(x)
        return self._embedding(x).view(count, len(keys), -1)

    def _chained(self, nets: Nets, conditions: dict[str, Tensor], scale: float) -> Network:
        """The guided network of one chain, which remembers its last x_start where it conditions itself."""
        if scale != 1 and not self.config.text_cond_drop_prob:
            raise ConfigError("guidance_scale: this model has no null text, since text_cond_drop_prob is 0; sample "
                              "with guidance_scale 1, or train with text_cond_drop_prob above 0")
        there = torch.zeros(len(conditions["text_embed"]), dtype=torch.bool, device=conditions["text_embed"].device)
        said, null = self.said(conditions, there), self.said(conditions, ~there)
        last: list[Tensor] = []

        def network(x_t: Tensor, t: Tensor) -> Tensor:
            own = {"self_cond": last.pop() if last else torch.zeros_like(x_t)} if self.config.self_cond else {}
            out = at_boundary(samplers.guided(nets["denoiser"], said | own, null | own, scale)(x_t, t))
            x_start = self.diffusion.x_start_of(out, x_t, t)             # t is of the whole chain, as are these tables
            if self.config.sampling_clamp_l2norm:
                x_start = self._of_length(x_start)
                out = self.diffusion.target(x_start, x_t, t, self.diffusion.eps_of(x_start, x_t, t))
            last[:] = [x_start]
            return out

        return network

    def _similarities(self, nets: Nets, example: Example, steps: tuple[int, ...], progress: Progress = iter) -> Terms:
        """Cosines (B,) of DDIM's predictions, one candidate without guidance, with what they should be near and not."""
        if not steps:
            return {}
        image = self._embedding(example["x_start"])
        text, other = example["text_embed"], example.get("other_text_embed")
        comparable = text.shape[1] == image.shape[1]
        cosine = lambda a, b: F.cosine_similarity(a, b, dim=1)
        terms = {"similarity/text_image": cosine(text, image)} if comparable else {}
        for count in steps:
            request = Request(example["key"], num_steps=count)
            drawn = self._draw(nets, {name: example[name] for name in TEXT if name in example}, example["key"], request,
                               1, progress)[0]
            found = {"image": cosine(drawn, image)}
            if comparable:
                found["text"] = cosine(drawn, text)
                found["above_baseline"] = found["text"] - terms["similarity/text_image"]
                if other is not None:
                    found["other_text"] = cosine(drawn, other)
            terms |= {f"similarity/{count}/{name}": value for name, value in found.items()}
        return terms

    # ------------------------------------------------------------------------------------------------------------ facts

    def conditions_from_texts(self, texts: list[str]) -> dict[str, Tensor]:
        """What the frozen encoder makes of texts, on the CPU. ConfigError: the recipe names no encoder."""
        encoder, places = self.text_encoder(torch.device("cpu")), {}
        rows = torch.tensor([places.setdefault(text, len(places)) for text in texts])
        once = list(places)
        batches = [self._texts(encoder.encode(once[i:i + _PROMPTS])) for i in range(0, len(once), _PROMPTS)]
        return {name: torch.cat([batch[name] for batch in batches])[rows] for name in batches[0]}

    def adapt(self, part: str, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """Statistics are compared with the recipe's and null texts may be missing, see weights.py."""
        with torch.device("meta"):
            network = self.networks()[part]
        return weights.adapt(state, network, self.mean, self.std)

    def from_diffusers(self, state: dict[str, Tensor], said: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
        """The names are ours already."""
        weights.require_same(said, self.config)
        return state, []

    def decays(self, name: str, weight: Tensor) -> bool:
        """Matrices alone: positions, query and nulls are single vectors."""
        return weight.ndim >= 2 and name.endswith("weight")

    def blocks(self) -> tuple[type[nn.Module], ...]:
        return (PriorBlock,)

    def synthetic(self, batch_size: int) -> Batch:
        """Embeddings, texts of random lengths, and the text of another pair."""
        arguments = self.config.network_arguments()
        key = rng.keys(0, 0, torch.arange(batch_size))
        batch = {"key": key, "image_embed": rng.normal(key, "image", self.shape)}
        for name in ("text_embed", "other_text_embed"):
            batch[name] = rng.normal(key, name, (arguments["text_embed_dim"],))
        if tokens := arguments["max_text_len"]:
            batch["text_encodings"] = rng.normal(key, "text_encodings", (tokens, arguments["text_encodings_dim"]))
            length = 1 + rng.integers(key, "length", tokens)
            batch["text_mask"] = torch.arange(tokens) < length[:, None]
        return batch


def build(config: Config) -> PriorSystem:
    """The system of a config. Raises ConfigError where its statistics cannot be read or do not fit."""
    return PriorSystem(config)
