"""The tokenizer as a system: reconstruction and quantizer, with the losses of nn/picture_loss.py that the config has.

Images are clips of one frame, and one batch holds both: `frames` says how many frames of each clip are real. Each
measure is a mean over a clip's real frames or tokens. Perceptual distance and adversary judge one random real frame of
each clip, so that images and clips of any length have the same cost and weight. An adversary of whole clips would see
how they move, but also where their padding begins.

All randomness is drawn from the samples' keys, each kind under a name of its own: frame (which one is judged), penalty.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dstrain import rng
from dstrain.nn.adversarial import compute_picture_gradient
from dstrain.nn.fitting import collect_weight_shapes, require_matching_shapes
from dstrain.nn.lookup_free import CodeUsage, compute_codebook_bits
from dstrain.nn.measures import compute_perplexity_and_unused_share, measure_psnr_and_ssim, measure_token_shares
from dstrain.nn.picture_loss import PictureLoss, make_loss_from_value_and_gradient
from dstrain.nn.pixels import convert_to_uint8, require_model_input_shape
from dstrain.recipe import ConfigError
from dstrain.systems.base import Batch, Example, Nets, System, Terms
from dstrain.systems.phenaki.tokenizer.config import Config
from dstrain.systems.phenaki.tokenizer.network import (
    CViViT,
    CViViTOutput,
    count_frames_in_full_patches,
    mark_frames_in_full_patches,
    mark_latent_frames_without_padding,
)
from dstrain.systems.phenaki.transformer import TransformerBlock

_REMEDIES = {
    "discriminator": (
        (r"main\.0\.", "channels and discriminator.base_channels"),
        (r"", "discriminator.base_channels and n_layers"),
    ),
    "tokenizer": (
        (r"^vq\.", "quantizer, codebook_size, levels, codebook_dim and dim"),
        (r"^to_", "patch_size, temporal_patch_size, channels and dim"),
        (r"", "spatial_depth, temporal_depth, dim, heads and dim_head"),
    ),
}


class TokenizerSystem(System):
    """A tokenizer of clips, the part `tokenizer`. If the config has a discriminator, it is the part `discriminator`,
    which learns from its start step on.
    """

    generates = False
    starts_from_data = True
    encodes = True
    averaged = ("tokenizer",)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.picture_loss = PictureLoss(
            config.perceptual, config.discriminator, config.discriminator and config.discriminator.penalty
        )
        self.parts = self.picture_loss.collect_part_and_discriminator_losses("tokenizer", self.compute_tokenizer_loss)
        self.codebook_size, self.temporal_patch_size = config.codebook_size, config.temporal_patch_size
        self._usage: CodeUsage | None = None  # running shares of codes, the reference of `diversity`
        if config.quantizer == "lookup_free":
            self._usage = CodeUsage(compute_codebook_bits(config.codebook_size), config.usage_decay)
            self.watched = ("shares",)

    def networks(self) -> dict[str, nn.Module]:
        """Builds the new networks by part: "tokenizer" and, if the config has one, "discriminator"."""
        tokenizer = CViViT(**self.config.make_network_arguments())
        return {"tokenizer": tokenizer} | self.picture_loss.build_networks(self.config.channels)

    @torch.no_grad()
    def encode(self, batch: Batch) -> Example:
        """Replaces videos or images in the batch by `x_start`, float32 (B, T, C, H, W) in [-1, 1]. If the batch has no
        `frames`, the numbers of real frames, int64 (B,), adds T for each clip. Raises ConfigError if the number of
        frames or the shape of a frame does not fit the model.
        """
        example = {name: tensor for name, tensor in batch.items() if name not in ("image", "video")}
        video = batch["video"] if "video" in batch else batch["image"][:, None]  # (B, T, C, H, W)
        require_model_input_shape(video, self.config.frame_shape, "channels")
        total, surplus = video.shape[1], (video.shape[1] - 1) % self.temporal_patch_size
        if surplus:
            raise ConfigError(
                f"data.num_frames: {total} is not 1 + a multiple of temporal_patch_size "
                f"{self.temporal_patch_size}; take {total - surplus}"
            )
        frames = torch.full((len(video),), total, device=video.device)
        return {"frames": frames} | example | {"x_start": video.float() / 127.5 - 1}

    def turns(self, step: int) -> tuple[str, ...]:
        """Returns the parts that learn at `step`: "tokenizer" and, from its start step on, "discriminator"."""
        return self.picture_loss.begin_step_and_list_parts("tokenizer", step)

    def compute_tokenizer_loss(self, nets: Nets, example: Example) -> Terms:
        """Returns the terms of the tokenizer's turn:

        loss    a scalar, the only term with gradient.
        others  (B,) each: the reconstruction error, the perceptual distance and the quantizer's terms; once the
                discriminator learns, also the adversarial terms of one frame.
        shares  for `observe`, the shares of codes in each sample; only with the quantizer lookup_free.
        """
        outputs = nets["tokenizer"](example["x_start"], example["frames"])
        terms, shares = self._select_quantizer_terms(outputs), {}
        if self._usage is not None:
            terms["diversity"] = self._usage.compute_cross_entropy(outputs.shares)
            shares = {"shares": outputs.shares.detach()}
        coding = self._compute_quantizer_loss(terms)
        if not self.picture_loss.adversarial:
            terms |= self._compute_reconstruction_terms(outputs.video, example)
            loss = (self.picture_loss.compute_reconstruction_loss(terms) + coding).mean()
        else:
            judged, pull = self._compute_terms_and_surrogate_loss(nets, outputs.video, example)
            terms |= judged
            value = (
                self.picture_loss.compute_reconstruction_loss(terms)
                + terms["critique_weight"] * terms["critique"]
                + coding
            )
            loss = make_loss_from_value_and_gradient(value, pull + coding)
        return {name: term.detach() for name, term in terms.items()} | {"loss": loss} | shares

    def _compute_terms_and_surrogate_loss(
        self, nets: Nets, reconstruction: Tensor, example: Example
    ) -> tuple[Terms, Tensor]:
        """Returns the terms of reconstructed clips (B, T, C, H, W), and a tensor (B,). The tensor's gradient with
        respect to the clips is the sum of the gradients of reconstruction error, perceptual distance and adversarial
        loss.
        """
        place, x = self._draw_frame_number_per_clip(example), example["x_start"]
        video = reconstruction.detach().requires_grad_()
        terms = {"recon": self._compute_reconstruction_error(video, example)}
        of_recon = compute_picture_gradient(terms["recon"], video)  # (B, T, C, H, W)
        frame, truth = (
            _take_one_frame_each(reconstruction.detach(), place).requires_grad_(),
            _take_one_frame_each(x, place),
        )
        of_frame = torch.zeros_like(frame)
        if perceived := self.picture_loss.measure_perceptual_distance(frame, truth):
            terms |= perceived
            of_frame = self.config.perceptual.weight * compute_picture_gradient(terms["perceptual"], frame)
        # Balanced as if this frame were the whole clip: in the mean over frames both then have the weight 1 / count.
        count = count_frames_in_full_patches(example["frames"], self.temporal_patch_size).view(-1, 1, 1, 1)
        of_mean = count * _take_one_frame_each(of_recon, place) + of_frame
        critique, of_critique = self.picture_loss.compute_critique_terms_and_gradient(
            nets, example, frame, truth, of_mean
        )
        pull = of_recon.index_put(
            (torch.arange(len(place), device=place.device), place), of_frame + of_critique, accumulate=True
        )
        return terms | critique, (reconstruction * pull).flatten(1).sum(1)

    def observe(self, terms: Terms) -> None:
        """Updates the running shares of codes by terms["shares"], the shares in each sample of a global batch."""
        self._usage.update_shares(terms["shares"])

    def _select_quantizer_terms(self, outputs: CViViTOutput) -> Terms:
        """Returns the quantizer's loss terms by name, (B,) each: commitment and entropy for lookup_free, commitment and
        codebook for cosine, none for fsq.
        """
        if self.config.quantizer == "fsq":
            return {}
        other = "codebook" if self._usage is None else "entropy"
        return {"commitment": outputs.commitment, other: getattr(outputs, other)}

    def _compute_quantizer_loss(self, terms: Terms) -> Tensor | float:
        """Returns the quantizer's part of the loss, (B,), or 0 for fsq. If `terms` has no `diversity`, as on held-out
        data, the loss of uneven use of codes is left out.
        """
        config = self.config
        if config.quantizer == "fsq":
            return 0.0
        commitment = config.commitment_weight * terms["commitment"]
        if self._usage is None:
            return commitment + config.codebook_weight * terms["codebook"]
        entropy = terms["entropy"]
        if "diversity" in terms:
            entropy = entropy - config.diversity_gamma * terms["diversity"]
        return commitment + config.entropy_weight * entropy

    def _compute_reconstruction_terms(self, reconstruction: Tensor, example: Example) -> Terms:
        """Returns `recon`, the reconstruction error of each clip (B,), and, if the config has a perceptual loss,
        `perceptual`, (B,), of one random frame of each clip.
        """
        place = self._draw_frame_number_per_clip(example)
        return {
            "recon": self._compute_reconstruction_error(reconstruction, example)
        } | self.picture_loss.measure_perceptual_distance(
            _take_one_frame_each(reconstruction, place), _take_one_frame_each(example["x_start"], place)
        )

    def _compute_reconstruction_error(self, reconstruction: Tensor, example: Example) -> Tensor:
        """Returns the mean squared error of each clip, (B,). Leaves out frames whose latent frame holds padding."""
        return _average_marked_frames(
            (reconstruction - example["x_start"]).square().flatten(2).mean(2),
            self._mark_frames_in_full_patches(example),
        )

    def _draw_frame_number_per_clip(self, example: Example) -> Tensor:
        """Draws the number of a random frame of each clip, int64 (B,), from the samples' keys. Takes only frames that
        lie in latent frames without padding.
        """
        count = count_frames_in_full_patches(example["frames"], self.temporal_patch_size)
        return (rng.uniform(example["key"], "frame") * count).long().minimum(count - 1)

    def _mark_frames_in_full_patches(self, example: Example) -> Tensor:
        """Returns bool (B, T), True for the example's frames that lie in latent frames without padding."""
        return mark_frames_in_full_patches(example["frames"], self.temporal_patch_size, example["x_start"].shape[1])

    @torch.no_grad()
    def evaluate(self, nets: Nets, example: Example) -> Terms:
        """Returns terms of held-out clips:

        loss        (B,), and the terms that it consists of, (B,) each; the discriminator and diversity have no part in
                    it.
        psnr, ssim  (B,), averaged over a clip's frames in latent frames without padding.
        usage       (B, K), the share of each of the K tokens.
        """
        outputs: CViViTOutput = nets["tokenizer"](example["x_start"], example["frames"])
        terms = self._select_quantizer_terms(outputs) | self._compute_reconstruction_terms(outputs.video, example)
        counted, tokens = self._mark_frames_in_full_patches(example), outputs.tokens
        by_frame = measure_psnr_and_ssim(outputs.video.flatten(0, 1), example["x_start"].flatten(0, 1))
        by_clip = {
            name: _average_marked_frames(values.view(counted.shape), counted) for name, values in by_frame.items()
        }
        real = mark_latent_frames_without_padding(
            example["frames"], self.temporal_patch_size, tokens.shape[1]
        )  # (B, t)
        usage = measure_token_shares(tokens, self.codebook_size, real[:, :, None, None].expand_as(tokens))
        return (
            terms
            | {"loss": self.picture_loss.compute_reconstruction_loss(terms) + self._compute_quantizer_loss(terms)}
            | by_clip
            | {"usage": usage}
        )

    def compute_figures(self, means: dict[str, Tensor]) -> dict[str, float]:
        """Returns two figures over all held-out samples: `perplexity` of the codebook, from 1 to K, and `dead_tokens`,
        the share of tokens that never occur.
        """
        return dict(zip(("perplexity", "dead_tokens"), compute_perplexity_and_unused_share(means["usage"])))

    @torch.no_grad()
    def make_pictures(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """Returns {"reconstruction": uint8}, originals and reconstructions side by side, (B, T, C, H, 2W); (B, C, H,
        2W) if clips are single frames. The last real frame of a clip is repeated in place of padding.
        """
        x, frames = example["x_start"], example["frames"]
        last = count_frames_in_full_patches(frames, self.temporal_patch_size)[:, None] - 1
        place = torch.arange(x.shape[1], device=x.device).minimum(last)  # (B, T)
        pairs = torch.cat((x, nets["tokenizer"](x, frames).video), dim=4)
        pairs = convert_to_uint8(pairs[torch.arange(len(x), device=x.device)[:, None], place])
        return {"reconstruction": pairs if x.shape[1] > 1 else pairs[:, 0]}

    @torch.no_grad()
    def compute_codes(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """Encodes the example's clips: {"tokens": int64 (B, t, h, w)}. Tokens of latent frames with padding have no
        meaning.
        """
        return {"tokens": nets["tokenizer"].encode_to_tokens(example["x_start"], example["frames"])}

    @torch.no_grad()
    def decode(self, nets: Nets, codes: Tensor) -> Tensor:
        """Decodes tokens, int64 (B, t, h, w), to clips (B, T, C, H, W) in [-1, 1]."""
        return nets["tokenizer"].decode_tokens(codes)

    def describe_identity(self, nets: Nets) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns all that the tokens of a clip depend on: the architecture, without fields that matter only in
        training or to another quantizer, and the weights by name.
        """
        architecture = self.config.make_network_arguments()
        left_out = {"dropout", "inv_temperature"}
        left_out |= {
            name
            for name, quantizer in (("codebook_dim", "cosine"), ("levels", "fsq"))
            if self.config.quantizer != quantizer
        }
        architecture = {name: value for name, value in architecture.items() if name not in left_out}
        return architecture | {"image_size": list(self.config.frame_size)}, nets["tokenizer"].state_dict()

    def adapt_weights(self, part: str, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """Returns a copy of the weights, and no notes. Raises ConfigError if the file is of phenaki-pytorch, or at the
        first name or shape that differs from the network's.
        """
        if any(".dsconv." in name for name in state):
            raise ConfigError(
                "weights: the file is of phenaki-pytorch, whose position encoder mixes up frames and "
                "places; its weights mean nothing in a network that does not: train anew"
            )
        shapes = collect_weight_shapes(self.build_part_on_meta(part))
        require_matching_shapes(
            state, shapes, [*shapes, *(name for name in state if name not in shapes)], _REMEDIES[part]
        )
        return dict(state), []

    def frozen(self) -> tuple[nn.Module, ...]:
        """Returns the frozen network of the perceptual loss; () if the config has no such loss, or its weights are
        missing here.
        """
        return self.picture_loss.list_frozen_networks()

    def list_block_classes(self) -> tuple[type[nn.Module], ...]:
        """Returns the class of the transformers' blocks."""
        return (TransformerBlock,)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns {"usage": the running shares of codes} for the quantizer lookup_free; {} for others."""
        return {} if self._usage is None else {"usage": self._usage.q}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores the running shares of codes. Raises ConfigError if names or shapes differ from those of
        `state_dict`.
        """
        own, saved = ({name: tuple(q.shape) for name, q in values.items()} for values in (self.state_dict(), state))
        if own != saved:
            raise ConfigError(
                f"the checkpoint's state is {saved}, the model's {own}; set quantizer and "
                "codebook_size to those it was made with"
            )
        if self._usage is not None:
            self._usage.q = state["usage"].clone()

    def synthetic(self, batch_size: int) -> Batch:
        """Returns a batch of random clips, uint8, with the samples' keys and positions. Of every three clips the first
        has real frames only, the second about half, and the third a single one.
        """
        positions, total, p = torch.arange(batch_size), self.config.num_frames, self.temporal_patch_size
        key = rng.keys(0, 0, positions)
        video = rng.integers(key, "video", 256, (total, *self.config.frame_shape)).to(torch.uint8)
        steps = (total - 1) // p
        frames = 1 + p * torch.tensor([steps, steps - steps // 2, 0])[positions % 3]
        return {"key": key, "position": positions, "video": video, "frames": frames}


def _take_one_frame_each(video: Tensor, frame_numbers: Tensor) -> Tensor:
    """Returns one frame of each clip, the one whose number `frame_numbers` gives, int64 (B,): (B, T, C, H, W) -> (B, C,
    H, W).
    """
    return video[torch.arange(len(video), device=frame_numbers.device), frame_numbers]


def _average_marked_frames(values: Tensor, marked: Tensor) -> Tensor:
    """Returns the mean of each clip's `values` (B, T) over the frames where `marked`, bool (B, T), is True: (B,)."""
    return torch.where(marked, values, 0.0).sum(1) / marked.sum(1)
