"""The tokenizer as a system: reconstruction and quantizer, with a perceptual distance and an adversary where wanted.

Images are clips of one frame, and one batch holds both: `frames` says how many frames of each clip are real. Whatever
is measured is a mean over a clip's real frames or tokens. Perceptual distance and adversary look at one random real
frame of each clip: so images and clips of any length cost and count alike. An adversary of whole clips would see how
they move, but also where their padding begins.

The two engines of an adversarial run stay apart as in every system here: the tokenizer's loss ends at its video, where
gradients are taken on a detached copy, and the sum of video * gradient is what descends. The discriminator learns from
that same frame, detached, which the first turn leaves in the example.

All randomness is drawn from the samples' keys by name: frame (which one is judged), penalty.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dstrain import rng
from dstrain.nn import adversarial
from dstrain.nn.adversarial import PatchDiscriminator
from dstrain.nn.fitting import require_fit, shapes_of
from dstrain.nn.lookup_free import Usage, bits_of
from dstrain.nn.measures import codebook_usage, histogram, likeness
from dstrain.nn.perceptual import Perceptual
from dstrain.nn.pixels import require_shape, to_uint8
from dstrain.recipe import ConfigError
from dstrain.systems.base import Batch, Example, Nets, System, Terms
from dstrain.systems.phenaki.tokenizer.config import Config
from dstrain.systems.phenaki.tokenizer.network import CViViT, Pass, covered, real_frames
from dstrain.systems.phenaki.transformer import TransformerBlock

_REMEDIES = {"discriminator": (
    (r"main\.0\.", "channels and discriminator.base_channels"),
    (r"", "discriminator.base_channels and n_layers"),
), "tokenizer": (
    (r"^vq\.", "quantizer, codebook_size, codebook_dim and dim"),
    (r"^to_", "patch_size, temporal_patch_size, channels and dim"),
    (r"", "spatial_depth, temporal_depth, dim, heads and dim_head"),
)}


class TokenizerSystem(System):
    """The part `tokenizer` and, where the config has one, the part `discriminator`, which waits for its start."""

    generates = False
    starts_from_data = True
    encodes = True
    averaged = ("tokenizer",)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.parts = {"tokenizer": self.learn}
        if config.discriminator:
            self.parts["discriminator"] = self.discriminate
        self.codebook_size, self.temporal_patch_size = config.codebook_size, config.temporal_patch_size
        self._usage: Usage | None = None                                  # of codes, what `diversity` is measured to
        if config.quantizer == "lookup_free":
            self._usage, self.watched = Usage(bits_of(config.codebook_size), config.usage_decay), ("shares",)
        self._perceptual: Perceptual | None = None                        # loaded where it is first needed
        self._adversarial = config.discriminator is not None              # both: at the step that `turns` was asked for
        self._penalized = self._adversarial and config.discriminator.penalty is not None
        self.values = config.channels * config.size[0] * config.size[1]  # of a frame

    def networks(self) -> dict[str, nn.Module]:
        networks: dict[str, nn.Module] = {"tokenizer": CViViT(**self.config.network_arguments())}
        if config := self.config.discriminator:
            networks["discriminator"] = PatchDiscriminator(self.config.channels, config.base_channels, config.n_layers)
        return networks

    # ------------------------------------------------------------------------------------------------------- training

    @torch.no_grad()
    def encode(self, batch: Batch) -> Example:
        """x_start (B, T, C, H, W) in [-1, 1] and frames (B,), of clips or of images. ConfigError: they do not fit."""
        example = {name: tensor for name, tensor in batch.items() if name not in ("image", "video")}
        video = batch["video"] if "video" in batch else batch["image"][:, None]                   # (B, T, C, H, W)
        require_shape(video, self.config.shape, "channels")
        p = self.config.temporal_patch_size
        if (video.shape[1] - 1) % p:
            raise ConfigError(f"data.num_frames: {video.shape[1]} is not 1 + a multiple of temporal_patch_size {p}; "
                              f"take {video.shape[1] - (video.shape[1] - 1) % p}")
        example["x_start"] = video.float() / 127.5 - 1
        if "frames" not in example:
            example["frames"] = torch.full((len(video),), video.shape[1], device=video.device)
        return example

    def turns(self, step: int) -> tuple[str, ...]:
        """The discriminator learns, and is learned from, from its start on."""
        # Kept from here, where the step is known to the host: a look at example["step"] would wait for the device.
        config = self.config.discriminator
        self._adversarial = config is not None and step >= config.start
        self._penalized = self._adversarial and config.penalty is not None and step % config.penalty.every == 0
        return ("tokenizer", "discriminator") if self._adversarial else ("tokenizer",)

    def learn(self, nets: Nets, example: Example) -> Terms:
        """Reconstruction and quantizer; from the discriminator's start on its critique of one frame, too."""
        config, passed = self.config, nets["tokenizer"](example["x_start"], example["frames"])
        terms = self._of_codes(passed)
        if self._usage is not None:
            terms["diversity"] = self._usage.diversity(passed.shares, bits_of(config.codebook_size))
        coding = self._coding(terms)
        if not self._adversarial:
            terms |= self._distances(passed.video, example)
            loss = self._distance(terms) + coding
            terms = {name: term.detach() for name, term in terms.items()} | {"loss": loss.mean()}
        else:
            terms, descended = self._judged(nets, passed, example, terms)
            value = self._distance(terms) + terms["critique_weight"] * terms["critique"] + coding.detach()
            descended = descended + coding
            terms["loss"] = (value + (descended - descended.detach())).mean()
        return terms | ({"shares": passed.shares.detach()} if self._usage is not None else {})

    def _judged(self, nets: Nets, passed: Pass, example: Example, terms: Terms) -> tuple[Terms, Tensor]:
        """The terms with those of the video, detached, and what is to descend so that it moves by them, (B,)."""
        config, place = self.config, self._place(example)
        video = passed.video.detach().requires_grad_()
        recon = self._recon(video, example)
        of_recon = adversarial.gradient(recon, video)                                             # (B, T, C, H, W)
        frame = _frame(passed.video.detach(), place).requires_grad_()
        terms["recon"] = recon
        of_frame = torch.zeros_like(frame)
        if config.perceives:
            terms["perceptual"] = self._perceived(frame, _frame(example["x_start"], place))
            of_frame = config.perceptual.weight * adversarial.gradient(terms["perceptual"], frame)
        terms["critique"] = -nets["discriminator"](frame).flatten(1).mean(1)
        of_critique = adversarial.gradient(terms["critique"], frame)
        # Balanced as if this frame were the whole clip: in the mean over frames both then weigh by 1 / their number.
        count = covered(example["frames"], self.temporal_patch_size).view(-1, 1, 1, 1)
        of_mean = count * _frame(of_recon, place) + of_frame
        weight = adversarial.critique_weight(of_mean, of_critique, config.discriminator.weight, self.values)
        of_frame = of_frame + weight.view(-1, 1, 1, 1) * of_critique
        pull = of_recon.index_put((torch.arange(len(place), device=place.device), place), of_frame, accumulate=True)
        example["reconstruction"] = frame.detach()
        terms = {name: term.detach() for name, term in terms.items()} | {"critique_weight": weight}
        return terms, (passed.video * pull).flatten(1).sum(1)

    def discriminate(self, nets: Nets, example: Example) -> Terms:
        """The hinge loss on one original frame of each clip and on what the tokenizer made of it in its turn; mean
        logits of both; at some steps the squared slope at the originals, `slope`.
        """
        assert "reconstruction" in example, "the tokenizer's turn comes before the discriminator's"
        truth, count = _frame(example["x_start"], self._place(example)), len(example["x_start"])
        both, slope = torch.cat((truth, example["reconstruction"])), None
        penalty = self.config.discriminator.penalty if self._penalized else None
        if penalty and penalty.form == "exact":
            logits, slope = nets["discriminator"](both, count)
        elif penalty:
            step = penalty.sigma * rng.normal(example["key"], "penalty", self.config.shape)
            logits = nets["discriminator"](torch.cat((both, truth + step)))
            slope = adversarial.slope_between(logits[:count], logits[2 * count:], penalty.sigma)
        else:
            logits = nets["discriminator"](both)
        real, fake = logits[:count], logits[count: 2 * count]
        loss = adversarial.hinge(real, fake)
        terms = {name: logit.detach().flatten(1).mean(1) for name, logit in (("real", real), ("fake", fake))}
        if penalty:
            loss = loss + penalty.every * penalty.weight / 2 * slope
            terms["slope"] = slope.detach()
        return terms | {"loss": loss.mean()}

    def observe(self, seen: Terms) -> None:
        """The shares of codes in one global batch."""
        self._usage.observe(seen["shares"])

    def _of_codes(self, passed: Pass) -> Terms:
        """What the quantizer gives that its weights can move."""
        names = ("commitment", "entropy") if self._usage is not None else ("commitment", "codebook")
        return {name: getattr(passed, name) for name in names}

    def _coding(self, terms: Terms) -> Tensor:
        """What codes cost: (B,). Without `diversity`, whose measure moves, it can be compared between steps."""
        config = self.config
        cost = config.commitment_weight * terms["commitment"]
        if self._usage is None:
            return cost + config.codebook_weight * terms["codebook"]
        spread = terms["entropy"]
        if "diversity" in terms:
            spread = spread - config.diversity_gamma * terms["diversity"]
        return cost + config.entropy_weight * spread

    def _distances(self, video: Tensor, example: Example) -> Terms:
        terms = {"recon": self._recon(video, example)}
        if self.config.perceives:
            place = self._place(example)
            terms["perceptual"] = self._perceived(_frame(video, place), _frame(example["x_start"], place))
        return terms

    def _distance(self, terms: Terms) -> Tensor:
        """What a video costs: (B,)."""
        if self.config.perceives:
            return terms["recon"] + self.config.perceptual.weight * terms["perceptual"]
        return terms["recon"]

    def _recon(self, video: Tensor, example: Example) -> Tensor:
        """Mean square error over real frames: (B,)."""
        return _mean((video - example["x_start"]).square().flatten(2).mean(2), self._shown(example))

    def _perceived(self, frame: Tensor, truth: Tensor) -> Tensor:
        if self._perceptual is None:              # encoding and exporting a finished run do without
            self._perceptual = Perceptual(self.config.perceptual.path).to(frame.device)
        return self._perceptual(frame, truth)

    def _place(self, example: Example) -> Tensor:
        """The number of a random real frame of each clip: int64 (B,)."""
        count = covered(example["frames"], self.temporal_patch_size)
        return (rng.uniform(example["key"], "frame") * count).long().minimum(count - 1)

    def _shown(self, example: Example) -> Tensor:
        """Which frames tokens stand for: bool (B, T)."""
        count = covered(example["frames"], self.temporal_patch_size)
        return count[:, None] > torch.arange(example["x_start"].shape[1], device=count.device)

    # ------------------------------------------------------------------------------------------------------ held out

    @torch.no_grad()
    def evaluate(self, nets: Nets, example: Example) -> Terms:
        """Terms without adversary and diversity; psnr and ssim, means over real frames; shares of tokens, usage (B, K).
        """
        passed: Pass = nets["tokenizer"](example["x_start"], example["frames"])
        terms = self._of_codes(passed) | self._distances(passed.video, example)
        shown = self._shown(example)
        by_frame = likeness(passed.video.flatten(0, 1), example["x_start"].flatten(0, 1))
        by_clip = {name: _mean(values.view(shown.shape), shown) for name, values in by_frame.items()}
        real = real_frames(example["frames"], self.temporal_patch_size, passed.tokens.shape[1])   # (B, t)
        usage = histogram(passed.tokens, self.codebook_size, real[:, :, None, None].expand_as(passed.tokens))
        return terms | {"loss": self._distance(terms) + self._coding(terms)} | by_clip | {"usage": usage}

    def digest(self, means: dict[str, Tensor]) -> dict[str, float]:
        """perplexity of the codebook over all samples, and dead_tokens, the fraction that none of them used."""
        perplexity, dead = codebook_usage(means["usage"])
        return {"perplexity": perplexity, "dead_tokens": dead}

    @torch.no_grad()
    def pictures(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """reconstruction: original and reconstruction side by side, (B, T, C, H, 2W), of single frames (B, C, H, 2W).

        After its last real frame a clip stands still.
        """
        x = example["x_start"]
        video = nets["tokenizer"](x, example["frames"]).video
        last = covered(example["frames"], self.temporal_patch_size)[:, None] - 1
        place = torch.arange(x.shape[1], device=x.device).minimum(last)                           # (B, T)
        shown = torch.cat((x, video), dim=4)[torch.arange(len(x), device=x.device)[:, None], place]
        shown = to_uint8(shown)
        return {"reconstruction": shown if x.shape[1] > 1 else shown[:, 0]}

    # ------------------------------------------------------------------------------------------------------------ facts

    @torch.no_grad()
    def codes(self, nets: Nets, example: Example) -> dict[str, Tensor]:
        """tokens: int64 (B, t, h, w); those of frames that are not real mean nothing."""
        return {"tokens": nets["tokenizer"].encode_tokens(example["x_start"], example["frames"])}

    @torch.no_grad()
    def decode(self, nets: Nets, codes: Tensor) -> Tensor:
        return nets["tokenizer"].decode_tokens(codes)

    def identity(self, nets: Nets) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Architecture and all weights; neither how many frames nor how it was trained."""
        architecture = self.config.network_arguments()
        left_out = {"dropout", "recompute", "inv_temperature"}
        if self.config.quantizer != "cosine":
            left_out.add("codebook_dim")
        architecture = {name: value for name, value in architecture.items() if name not in left_out}
        return architecture | {"image_size": list(self.config.size)}, nets["tokenizer"].state_dict()

    def adapt(self, part: str, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """Names and shapes must be ours, which are the same for any image_size and num_frames. ConfigError: the first
        that differs, or a file of phenaki-pytorch.
        """
        if any(".dsconv." in name for name in state):
            raise ConfigError("weights: the file is of phenaki-pytorch, whose position encoder mixes up frames and "
                              "places; its weights mean nothing in a network that does not: train anew")
        with torch.device("meta"):
            shapes = shapes_of(self.networks()[part])
        require_fit(state, shapes, [*shapes, *(name for name in state if name not in shapes)], _REMEDIES[part])
        return dict(state), []

    def blocks(self) -> tuple[type[nn.Module], ...]:
        return (TransformerBlock,)

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self._usage is None else {"usage": self._usage.q}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        ours, theirs = ({name: tuple(q.shape) for name, q in of.items()} for of in (self.state_dict(), state))
        if ours != theirs:
            raise ConfigError(f"the checkpoint's state is {theirs}, the model's {ours}; set quantizer and "
                              "codebook_size to those it was made with")
        if self._usage is not None:
            self._usage.q = state["usage"].clone()

    def synthetic(self, batch_size: int) -> Batch:
        """Clips with keys, every third whole, every third half, every third an image; all images where clips have one
        frame.
        """
        positions, total, p = torch.arange(batch_size), self.config.num_frames, self.temporal_patch_size
        key = rng.keys(0, 0, positions)
        video = rng.integers(key, "video", 256, (total, *self.config.shape)).to(torch.uint8)
        steps = (total - 1) // p
        frames = 1 + p * torch.tensor([steps, steps - steps // 2, 0])[positions % 3]
        return {"key": key, "position": positions, "video": video, "frames": frames}


def _frame(video: Tensor, place: Tensor) -> Tensor:
    """One frame of each clip: (B, T, C, H, W), int64 (B,) -> (B, C, H, W)."""
    return video[torch.arange(len(video), device=place.device), place]


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """Over the frames that count: two (B, T) -> (B,)."""
    return torch.where(counted, values, 0.0).sum(1) / counted.sum(1)
