"""Phenaki's token models as a system: MaskGit and, if the config has one, a critic; Villegas et al. 2022, section 2.2.

Parts: `maskgit`, and `critic` where model.critic is token (a self critic is a head of maskgit). Both see the same
clips: MaskGit's turn draws ids for the masked tokens, and the critic's turn judges the filled clip. With critic_labels
masked the critic learns which of all tokens were masked; with replaced, which of the masked ones got a wrong id.

All masked tokens have the same weight, in whichever clip they are, as in MaskGIT's mean over a batch. Since a sample's
loss must not depend on other samples, its sum is divided by the expected number of masked tokens: 2 / pi times the
number of tokens that may be masked.

All randomness is drawn from the samples' keys, each kind under a name of its own: mask_ratio, mask, drop (of the text),
filled (ids for the critic); in generation those of decoding.py. Where model.beginnings cuts clips depends on the step
alone.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain import rng
from dstrain.encoders.reader import NAMES, Reader, draw_synthetic_texts, select_text_inputs
from dstrain.nn.pixels import convert_to_uint8
from dstrain.recipe import ConfigError
from dstrain.systems.base import Batch, Example, Nets, Request, System, Terms
from dstrain.systems.beginnings import choose_last_kept_latent_frame
from dstrain.systems.codec import Codec
from dstrain.systems.phenaki import codec, masking
from dstrain.systems.phenaki.config import Config
from dstrain.systems.phenaki.decoding import draw_unknown_tokens
from dstrain.systems.phenaki.maskgit import MaskGit, MaskGitOutput, TokenCritic
from dstrain.systems.phenaki.tokenizer.network import mark_latent_frames_without_padding
from dstrain.systems.phenaki.transformer import TransformerBlock


class PhenakiSystem(System):
    """Phenaki's MaskGit and its critic, with the choices in `config`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.parts = {"maskgit": self.compute_maskgit_loss} | (
            {"critic": self.compute_critic_loss} if config.critic == "token" else {}
        )
        self.averaged, self.samplers = tuple(self.parts), config.samplers
        self.num_frames, self.temporal_patch_size = config.num_frames, config.temporal_patch_size
        self.generates = config.tokenizer is not None
        self._tokenizer: Codec | None = None
        self._cut: int | None = None  # the last latent frame of this step's clips
        self.texts = Reader(config)

    def networks(self) -> dict[str, nn.Module]:
        """Builds the new networks by part: "maskgit" and, if the config has a token critic, "critic"."""
        config, trunk = self.config, self.config.make_trunk_arguments()
        networks: dict[str, nn.Module] = {
            "maskgit": MaskGit(
                config.codebook_size,
                self_critic=config.critic == "self",
                chunk=config.loss_chunk,
                label_smoothing=config.label_smoothing,
                **trunk,
            )
        }
        if "critic" in self.parts:
            networks["critic"] = TokenCritic(
                config.codebook_size, **trunk | {"depth": config.critic_depth or config.depth}
            )
        return networks

    @torch.no_grad()
    def encode(self, batch: Batch) -> Example:
        """Returns the batch with changes for the network:

        tokens       int64 (B, t, h, w), in place of videos or images.
        text inputs  in place of captions or encodings, under the names that the network takes.
        real         bool (B, t), False for latent frames with padding; only if the batch has `frames`.

        Raises ConfigError if there are neither videos nor tokens, if tokens have another shape than the model's, or if
        captions that the model reads are missing.
        """
        read = ("video", "image", "tokens", "frames", "caption", "label", "text_embed", *NAMES)
        example = {name: values for name, values in batch.items() if name not in read}
        frames = batch.get("frames")
        if "tokens" in batch:
            example["tokens"] = batch["tokens"]
        elif "video" in batch or "image" in batch:  # an image is a clip of one frame
            video = (batch["video"] if "video" in batch else batch["image"][:, None]).float() / 127.5 - 1
            example["tokens"] = self.get_tokenizer(video.device).encode(video, frames)["tokens"]
        else:
            raise ConfigError(
                "data: phenaki learns from videos or their tokens, and the data give neither: name a "
                "folder of videos, or one that dstrain encode made of them"
            )
        shape = tuple(example["tokens"].shape[1:])
        if shape != self.config.token_shape:
            raise ConfigError(
                f"data: clips have {shape} tokens (latent frames, height, width), the model "
                f"{self.config.token_shape}; leave model.token_shape out, or encode other clips"
            )
        if frames is not None:
            example["real"] = mark_latent_frames_without_padding(frames, self.temporal_patch_size, shape[0])
        return example | self.texts.make_batch_inputs(batch)

    def require_usable_source(self, source: Any) -> None:
        """Encodes the first clip of a data source as a check. Raises ConfigError if captions are missing, if tokens or
        texts do not fit the model, or if the tokenizer or text encoder is missing or does not fit.
        """
        if self.config.tokenizer is not None:
            self.get_tokenizer()
        if self.takes_texts and source.uncaptioned:
            raise ConfigError(
                f"{source.uncaptioned}: no captions are there, and the model reads texts: give X.txt "
                "beside files, class folders or data.captions (clips), or set model.unconditional=true"
            )
        batch = {name: torch.as_tensor(value)[None] for name, value in source.read_first_readable().items()}
        largest = int(self.encode(batch)["tokens"].max())
        if largest >= self.config.codebook_size:
            raise ConfigError(
                f"codebook_size {self.config.codebook_size}: the data hold the token {largest}; set "
                "model.codebook_size to that of the tokenizer that made them"
            )

    def fingerprint(self, source: Any) -> str:
        """Returns a text that changes if the training data or the text encoder change."""
        return source.compute_fingerprint() + self.texts.make_encoder_fingerprint_suffix()

    def get_tokenizer(self, device: torch.device | None = None) -> Codec:
        """Returns the frozen tokenizer, moved to `device` unless it is None. The first call loads it. Raises
        ConfigError if the recipe names no tokenizer, or the tokenizer does not fit the model.
        """
        if self._tokenizer is None:
            if problem := self.find_drawing_problem():
                raise ConfigError(problem)
            self._tokenizer = codec.load_tokenizer(self.config.tokenizer.path)
            codec.require_fitting_tokenizer(self._tokenizer, self.config)
        return self._tokenizer if device is None else self._tokenizer.to(device)

    def find_drawing_problem(self) -> str | None:
        """Returns an error message if the recipe names no tokenizer, which decodes samples; else None."""
        if self.config.tokenizer is None:
            return (
                "model.tokenizer: no tokenizer is named that encodes and decodes videos; set model.tokenizer.path "
                "to its folder (dstrain export RUN --format safetensors), or give --tokenizer FOLDER"
            )
        return None

    def turns(self, step: int) -> tuple[str, ...]:
        """Returns the names of the parts that learn at `step`: all, or only the one in model.train. Also stores, for
        the losses of this step, the last latent frame that clips keep; None for whole clips.
        """
        # The shapes of a step depend on it, and only here does the host know the step.
        self._cut = choose_last_kept_latent_frame(self.config.beginnings, step)
        return tuple(self.parts) if self.config.train == "both" else (self.config.train,)

    def measure_workload(self, step: int) -> tuple[int, ...]:
        """Returns three numbers for `step`: the parts that learn, the latent frames of a clip, and the latent frames
        that may be masked. A larger tuple means more operations.
        """
        cut, longest = choose_last_kept_latent_frame(self.config.beginnings, step), self.config.token_shape[0]
        frames, masked = (longest, longest) if cut is None else (cut + 1, 1)
        return len(self.parts) if self.config.train == "both" else 1, frames, masked

    def compute_maskgit_loss(self, nets: Nets, example: Example) -> Terms:
        """Returns the terms of MaskGit's turn. Texts are dropped with probability cond_drop_prob.

        loss       a scalar with gradient: the weighted cross-entropy of masked tokens, plus the loss of a self critic.
        loss_each  (B,), the loss of each sample, without gradient.
        others     (B,), without gradient.

        Changes the example: cuts its clips if this step is to have shorter ones, and stores the filled tokens for a
        critic.
        """
        self._cut_clips_to_kept_frames(example)
        passed, terms = self._run_maskgit(nets, example, self._draw_text_drop_mask(example))
        loss = passed.total
        if self.config.critic is not None:
            example["filled"] = passed.filled
        if passed.critic is not None:
            judged, weight = self._compute_critic_terms(passed.critic, example), self.config.critic_loss_weight
            loss = loss + weight * judged["loss"].mean()
            terms["loss"] = terms["loss"] + weight * judged["loss"]
            terms |= {f"critic_{name}": value for name, value in judged.items()}
        terms = {name: term.detach() for name, term in terms.items()}
        return terms | {"loss": loss, "loss_each": terms["loss"]}

    def compute_critic_loss(self, nets: Nets, example: Example) -> Terms:
        """Returns the terms of the token critic's turn, in which the critic judges clips whose masked tokens MaskGit
        has drawn: `loss`, a scalar with gradient, loss_each (B,), and the others of `_compute_critic_terms`. If MaskGit
        has no turn in this step, draws its tokens here. Cuts the example's clips if this step is to have shorter ones.
        """
        self._cut_clips_to_kept_frames(example)
        dropped = self._draw_text_drop_mask(example)
        if "filled" not in example:  # where the critic alone learns
            with torch.no_grad():
                example["filled"] = self._run_maskgit(nets, example, dropped)[0].filled
        terms = self._compute_critic_terms(self._run_critic(nets["critic"], example, dropped), example)
        loss = terms.pop("loss")
        return {name: term.detach() for name, term in terms.items()} | {"loss": loss.mean(), "loss_each": loss.detach()}

    @torch.no_grad()
    def evaluate(self, nets: Nets, example: Example) -> Terms:
        """Returns terms of held-out samples, (B,) each, with no text dropped: MaskGit's terms and, if a critic learns,
        the critic's terms under names that begin with critic_. `loss` is MaskGit's; if only the critic learns, the
        critic's.
        """
        example = dict(example)
        passed, terms = self._run_maskgit(nets, example, None)
        if self.config.critic is None or self.config.train == "maskgit":  # no ids were drawn for a critic
            return terms
        logits, example["filled"] = passed.critic, passed.filled
        if "critic" in self.parts:
            logits = self._run_critic(nets["critic"], example, None)
        judged = self._compute_critic_terms(logits, example)
        if self.config.train == "critic":
            terms["loss"] = judged["loss"]
        return terms | {f"critic_{name}": value for name, value in judged.items()}

    def _draw_text_drop_mask(self, example: Example) -> Tensor | None:
        """Returns bool (B,), True for samples whose text is dropped, drawn from the samples' keys with probability
        cond_drop_prob. Returns None if the model has no null text, so that none is dropped.
        """
        return rng.uniform(example["key"], "drop") < self.config.cond_drop_prob if self.config.has_null_text else None

    def _run_maskgit(self, nets: Nets, example: Example, dropped: Tensor | None) -> tuple[MaskGitOutput, Terms]:
        """Runs MaskGit on clips with masked tokens. Returns its MaskGitOutput, and the terms of each sample, (B,) each.
        `dropped`, bool (B,), is True for samples whose text is replaced by the null text; None: for none.
        """
        masked, total = self._get_or_draw_token_mask(example), self._count_maskable_tokens(example)
        weights = 1 / (masking.MEAN_RATIO * total)  # (B,)
        conditions = {"real": example.get("real"), "dropped": dropped} | select_text_inputs(example)
        drawn: dict[str, Any] = {}
        if self.config.critic is not None and self.config.train != "maskgit":
            drawn = {
                "uniforms": rng.uniform(example["key"], "filled", (example["tokens"][0].numel(),)),
                "temperature": self.config.critic_train_sample_temperature,
            }
        passed = nets["maskgit"](example["tokens"], masked, weights / len(weights), **conditions, **drawn)
        count = masked.flatten(1).sum(1)
        return passed, {
            "loss": passed.loss * weights,
            "cross_entropy": passed.loss / count,
            "accuracy": passed.hits / count,
            "quartile": (4 * count // total).clamp(max=3),
        }

    def _get_or_draw_token_mask(self, example: Example) -> Tensor:
        """Returns bool (B, t, h, w), True for the tokens that MaskGit does not see. The first call for an example draws
        this mask from the samples' keys and stores it in the example.
        """
        if "masked" not in example:
            key, shape = example["key"], example["tokens"].shape
            noise, ratio = rng.uniform(key, "mask", (shape[1:].numel(),)), rng.uniform(key, "mask_ratio")
            asked = self._mark_maskable_frames(example)[:, :, None, None].expand(shape)
            example["masked"] = masking.choose_masked_tokens(ratio, noise, asked.flatten(1)).view(shape)
        return example["masked"]

    def _cut_clips_to_kept_frames(self, example: Example) -> None:
        """Cuts the example's clips, in place, after the latent frame that `turns` has stored. Also stores "asked", bool
        (B, t), True for the last real latent frame of each clip: only tokens of this frame are masked. Does nothing if
        this step has whole clips, or the clips are cut already.
        """
        if self._cut is None or "asked" in example:
            return
        kept, real = slice(self._cut + 1), self._mark_real_frames(example)[:, : self._cut + 1]
        last = real.sum(1, keepdim=True) - 1  # (B, 1)
        example["asked"] = torch.arange(real.shape[1], device=real.device) == last
        example |= {name: example[name][:, kept] for name in ("tokens", "real") if name in example}

    def _count_maskable_tokens(self, example: Example) -> Tensor:
        """Returns the number of tokens of each clip that may be masked, int64 (B,)."""
        return self._mark_maskable_frames(example).sum(1) * (self.config.token_shape[1] * self.config.token_shape[2])

    def _mark_maskable_frames(self, example: Example) -> Tensor:
        """Returns bool (B, t), True for latent frames whose tokens may be masked: every frame without padding; in clips
        that `_cut_clips_to_kept_frames` has cut, only the last such frame.
        """
        return example["asked"] if "asked" in example else self._mark_real_frames(example)

    def _mark_real_frames(self, example: Example) -> Tensor:
        """Returns bool (B, t), True for latent frames without padding."""
        return example.get("real", torch.ones_like(example["tokens"][:, :, 0, 0], dtype=torch.bool))

    def _run_critic(self, critic: Any, example: Example, dropped: Tensor | None) -> Tensor:
        """Returns the token critic's logits (B, t, h, w) for the filled tokens of the example."""
        return critic(example["filled"], example.get("real"), dropped, **select_text_inputs(example))

    def _compute_critic_terms(self, logits: Tensor, example: Example) -> Terms:
        """Returns terms of each sample, (B,) each, from the critic's logits (B, t, h, w):

        loss      the critic's loss.
        accuracy  the share of judged tokens that the critic tells rightly.
        replaced  the share of masked tokens for which MaskGit drew a wrong id.
        """
        masked, total = self._get_or_draw_token_mask(example), self._count_maskable_tokens(example)
        replaced = example["filled"] != example["tokens"]
        count = masked.flatten(1).sum(1)
        if self.config.critic_labels == "masked":
            true, judged = masked, self._mark_maskable_frames(example)[:, :, None, None].expand_as(masked)
            number, scale = total, total
        else:
            true, judged, number, scale = replaced, masked, count, masking.MEAN_RATIO * total

        def sum_over_judged_tokens(values):
            """Returns the sum of `values` (B, t, h, w) over the tokens of each clip that the critic's loss counts:
            (B,).
            """
            return torch.where(judged, values, 0.0).flatten(1).sum(1)

        each = F.binary_cross_entropy_with_logits(logits, true.to(logits.dtype), reduction="none")
        return {
            "loss": sum_over_judged_tokens(each) / scale,
            "accuracy": sum_over_judged_tokens(((logits > 0) == true).to(logits.dtype)) / number,
            "replaced": (replaced & masked).flatten(1).sum(1) / count,
        }

    @torch.no_grad()
    def sample(self, nets: Nets, request: Request) -> Tensor:
        """Draws one video for each seed of the request: uint8 (N, T, C, H, W). T is request.num_frames, or the length
        of the longest clip if that is None. The request's conditions may hold:

        text inputs  without them, videos are drawn without a text.
        prime        uint8 (N, K, C, H, W), the frames with which the videos begin.

        Raises ConfigError if T or K does not fit the model, if there is guidance without a null text, or no tokenizer.
        """
        config, device = self.config, request.seeds.device
        if request.guidance_scale != 1 and not config.has_null_text:
            raise ConfigError(
                "guidance_scale: this model has no null text, since it is unconditional or its "
                "cond_drop_prob is 0; sample with guidance_scale 1"
            )
        latent = config.count_latent_frames("num_frames", request.num_frames or self.num_frames)
        tokenizer, prime = self.get_tokenizer(device), request.conditions.get("prime")
        shape = (len(request.seeds), latent, *config.token_shape[1:])
        tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        known = torch.zeros(shape, dtype=torch.bool, device=device)
        if prime is not None:
            first = config.count_latent_frames("prime", prime.shape[1])
            if first >= latent:
                raise ConfigError(f"prime: {prime.shape[1]} frames are as many as are asked for, or more; give fewer")
            tokens[:, :first] = tokenizer.encode(prime.float() / 127.5 - 1)["tokens"]
            known[:, :first] = True
        video = convert_to_uint8(tokenizer.decode(self.draw_tokens(nets, tokens, known, request)))
        return video if prime is None else torch.cat((prime, video[:, prime.shape[1] :]), dim=1)

    def draw_tokens(self, nets: Nets, tokens: Tensor, known: Tensor, request: Request) -> Tensor:
        """Draws the tokens of clips for the request's seeds and conditions, int64 (N, t, h, w). Where `known`, bool (N,
        t, h, w), is True, the tokens given in `tokens`, int64 (N, t, h, w), are kept.
        """
        network, real = nets["maskgit"], request.conditions.get("real")
        text = self.texts.make_batch_inputs(
            select_text_inputs(request.conditions) or self.texts.make_null_text_inputs(len(tokens))
        )
        text = {name: value.to(tokens.device) for name, value in text.items()}

        def crop_real_mask_like(tokens):
            """Returns the condition `real`, bool (N, t), for the latent frames of `tokens`; None if it is not given."""
            return None if real is None else real[:, : tokens.shape[1]]

        def draw_masked_tokens(tokens, uniforms, temperature):
            """Draws an id for each mask token in `tokens`, see decoding.Predict."""
            return network.draw_masked_tokens(
                tokens, crop_real_mask_like(tokens), text, uniforms, temperature, request.guidance_scale
            )

        compute_critic_logits = None
        led_by_critic = self.choose_sampler(request.sampler) == "critic"
        if led_by_critic and self.config.critic == "self":

            def compute_critic_logits(tokens):
                """Returns the self critic's logits for `tokens`, see decoding.Criticize."""
                return network.compute_critic_logits(tokens, crop_real_mask_like(tokens), text)
        elif led_by_critic:

            def compute_critic_logits(tokens):
                """Returns the token critic's logits for `tokens`, see decoding.Criticize."""
                return nets["critic"](tokens, crop_real_mask_like(tokens), None, **text)

        if real is not None:
            known = known | ~real[:, :, None, None]
        return draw_unknown_tokens(
            draw_masked_tokens,
            tokens,
            known,
            network.mask_token,
            rng.keys_of_seeds(request.seeds),
            request.num_steps,
            self.config.decoding,
            compute_critic_logits,
        )

    def make_conditions(self, num: int, labels: tuple[int, ...] | None = None) -> dict[str, Tensor]:
        """Returns the text inputs of `num` empty texts, {name: tensor (num, ...)}. Raises ConfigError if `labels` are
        given, since the model knows no classes, or if the model reads texts and has no null text.
        """
        if labels is not None:
            raise ConfigError(
                f"labels: {list(labels)} mean nothing to phenaki, which knows no classes; leave them out"
                + ("" if self.config.unconditional else ", and give texts (--prompts FILE)")
            )
        return self.texts.make_null_text_inputs(num)

    @property
    def takes_texts(self) -> bool:
        """Returns whether samples can be drawn from texts: they can unless the model is unconditional."""
        return not self.config.unconditional

    def conditions_from_texts(self, texts: list[str]) -> dict[str, Tensor]:
        """Returns the network's inputs for N texts, {name: tensor (N, ...)}."""
        return self.texts.make_text_inputs(texts)

    def describe_cut(self, texts: list[str], what: str) -> str:
        """Returns a note for the user that says how many tokens of long texts are cut off; "" if none is. `what` is the
        note's word for the texts, such as "prompts".
        """
        return self.texts.describe_cut(texts, what)

    def conditions_from(self, images: Tensor) -> dict[str, Tensor]:
        """Returns {"prime": uint8 (N, K, C, H, W)}, the frames with which samples begin. Pictures (N, C, H, W) become
        videos of one frame. Raises ConfigError if the frames do not fit the model or its tokenizer.
        """
        video = images if images.ndim == 5 else images[:, None]
        self.config.count_latent_frames("prime", video.shape[1])
        self.get_tokenizer().require_image_shape(tuple(video.shape[2:]))
        return {"prime": video}

    def has_weight_decay(self, name: str, weight: Tensor) -> bool:
        """Returns whether weight decay applies to the weight `name`: to matrices and filters, but not to embeddings of
        positions or of the null text.
        """
        return weight.ndim >= 2 and not any(part in name for part in ("positions.", "places.", "null."))

    def list_block_classes(self) -> tuple[type[nn.Module], ...]:
        """Returns the class of the transformers' blocks."""
        return (TransformerBlock,)

    def frozen(self) -> tuple[nn.Module, ...]:
        """Returns the tokenizer and the text encoder, each only if it is loaded already."""
        return tuple(network for network in (self._tokenizer, self.texts.encoder) if network is not None)

    def synthetic(self, batch_size: int) -> Batch:
        """Returns a batch of random tokens and texts, in the form of cached data, for clips with random numbers of real
        frames.
        """
        positions = torch.arange(batch_size)
        key = rng.keys(0, 0, positions)
        config = self.config
        batch = {
            "key": key,
            "position": positions,
            "tokens": rng.integers(key, "tokens", config.codebook_size, config.token_shape),
            "frames": 1 + rng.integers(key, "frames", self.num_frames),
        }
        return batch | draw_synthetic_texts(config, key)


def build(config: Config) -> PhenakiSystem:
    """Returns the system that the config describes."""
    return PhenakiSystem(config)
