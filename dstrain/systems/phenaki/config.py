"""The `model` section of a recipe for Phenaki's token models: a documented field for each choice."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dstrain.encoders.frozen import is_available_offline
from dstrain.encoders.reader import ReadsTexts, derive_text_fields_from_cache, replace_text_encoder
from dstrain.recipe import MAY_CHANGE, ConfigError, Run, Section, mark_fixed_on_resume, mark_fixed_once_set
from dstrain.systems.base import SystemConfig, list_indivisible_counts
from dstrain.systems.beginnings import require_valid_cut_shares
from dstrain.systems.phenaki import codec

SAMPLERS = ("confidence", "critic")


class Tokenizer(Section):
    path: Annotated[str, mark_fixed_once_set()]
    """Folder of a trained tokenizer: dstrain export RUN --format safetensors --out FOLDER."""
    fingerprint: Annotated[
        str | None, mark_fixed_once_set("put the earlier tokenizer back at model.tokenizer.path")
    ] = None
    """The only tokenizer that is accepted; None accepts any, and writes down that of the folder."""


class Codes(Section):
    shape: tuple[int, ...]
    """Latent frames, height and width of a clip's tokens."""
    codebook_size: int | None
    """Number of ids; None in an older index."""
    first_stage: str
    """Fingerprint of the tokenizer that made them."""
    text: tuple[int, int] | None
    """Tokens and width of the text encodings beside them; None: there are none."""
    text_encoder: Annotated[str | None, mark_fixed_once_set("give the data.path of the earlier latents")] = None
    """Fingerprint of the encoder that made these."""


class Decoding(Section):
    """How a decoding step draws ids, and which of them it masks again, see decoding.py."""

    order: Annotated[Literal["all", "frames"], MAY_CHANGE] = "all"
    """all: tokens of all latent frames at once; frames: each latent frame in turn, all steps for each, after those
    before it. A model that is to draw so learns from `beginnings`."""
    sample_temperature: Annotated[float, MAY_CHANGE] = Field(1.0, ge=0)
    """Of the drawn ids; 1 draws as the model has learned (MaskGIT)."""
    sample_temperature_schedule: Annotated[Literal["fixed", "decay"], MAY_CHANGE] = "fixed"
    """Over the steps: fixed, or decay (to 0 at the last, as in phenaki-pytorch), which draws likely ids too often."""
    confidence_temperature: Annotated[float, MAY_CHANGE] = Field(4.5, ge=0)
    """Weight of the Gumbel noise on confidences at the first step; falls to 0 at the last."""
    critic_noise: Annotated[float, MAY_CHANGE] = Field(1.0, ge=0)
    """Width of the uniform noise on the critic's logits."""
    critic_noise_schedule: Annotated[Literal["fixed", "decay", "increase"], MAY_CHANGE] = "decay"
    """Over the steps: fixed, decay (to 0 at the last), or increase (from 0)."""

    def compute_temperature(self, progress: float) -> float:
        """Returns the temperature at which a decoding step draws ids. `progress`, above 0 and up to 1, is the share of
        all decoding steps that are complete after this step.
        """
        return self.sample_temperature * (1 - progress if self.sample_temperature_schedule == "decay" else 1)

    def compute_critic_noise_width(self, progress: float) -> float:
        """Returns the width of the uniform noise that a decoding step adds to the critic's logits. `progress`, above 0
        and up to 1, is the share of all decoding steps that are complete after this step.
        """
        return (
            self.critic_noise * {"fixed": 1.0, "decay": 1 - progress, "increase": progress}[self.critic_noise_schedule]
        )


class Config(SystemConfig, ReadsTexts):
    """Defaults are the sizes of lucidrains' README; token_shape and codebook_size come from the tokenizer or cache."""

    learns_from = ("clips", "clip_tokens")
    no_captions = "give X.txt beside each video, data.captions=FILE or class folders, or set model.unconditional=true"

    token_shape: tuple[int, int, int]
    """Latent frames, height and width of the longest clip's tokens; filled in from the cache or the tokenizer."""
    codebook_size: int = Field(ge=2)
    """Number of ids of the tokenizer, without the mask token; filled in as above."""
    temporal_patch_size: int = Field(2, ge=1)
    """Frames of each latent frame after the first, which is one frame; filled in as above."""
    tokenizer: Tokenizer | None = None
    """Encodes videos and decodes samples; None: the model learns from cached tokens and draws nothing."""
    codes: Annotated[Codes | None, mark_fixed_on_resume("give the data.path of the earlier latents")] = None
    """What the index of data.path says of cached tokens, filled in; None: the data hold none."""

    dim: int = Field(512, ge=1)
    """Width of a token."""
    depth: int = Field(6, ge=1)
    """Number of blocks."""
    heads: int = Field(8, ge=1)
    """Attention heads of a block."""
    dim_head: int = Field(64, ge=1)
    """Width of a head."""
    peg: bool = True
    """A position encoder (a depthwise convolution over time and place) in each block."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of values dropped in attention and feed-forward."""
    gradient_shrink: float = Field(1.0, gt=0, le=1)
    """Share of the gradient that reaches the embeddings; the original's 0.1 steadies large models."""
    loss_chunk: Annotated[int, MAY_CHANGE] = Field(512, ge=1)
    """Masked tokens whose logits are in memory at once."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target that is spread over all ids."""
    beginnings: tuple[float, ...] = ()
    """Shares of the steps whose clips end with the first, the second, ... latent frame (a clip of 9 frames has 5). Of
    that frame alone tokens are masked, as decoding.order=frames and frames to go on from ask for. Such steps cost less,
    as their clips are shorter; a clip that ends before keeps its end. The other steps have whole clips, any tokens
    masked: leave a share to them, or to each frame, since a frame that no step has shown is drawn at random."""

    unconditional: bool = False
    """Whether the model reads no texts and has no weights for them."""
    cond_drop_prob: float = Field(0.25, ge=0, le=1)
    """Share of training samples whose text is dropped; 0 leaves out the null text, and with it guidance."""

    critic: Literal["token", "self"] | None = None
    """Guides decoding: token, a network of its own; self, a head on MaskGit; None, the confidence alone."""
    critic_depth: int | None = Field(None, ge=1)
    """Blocks of the token critic; None means depth."""
    critic_train_sample_temperature: float = Field(1.0, ge=0)
    """Of the ids that MaskGit draws for its critic to judge."""
    critic_labels: Literal["masked", "replaced"] = "masked"
    """What the critic tells: which of all tokens were masked (Token-Critic), or which masked ones are not true."""
    critic_loss_weight: float = Field(1.0, ge=0)
    """Weight of the self critic's loss beside MaskGit's; a token critic has an optimizer of its own."""
    train: Literal["both", "maskgit", "critic"] = "both"
    """Parts that learn; the other keeps its weights (see init_from)."""
    decoding: Decoding = Decoding()
    """How samples are drawn."""

    @model_validator(mode="after")
    def _require_consistent_fields(self) -> "Config":
        """Returns the section. Raises ConfigError if fields of the section contradict each other."""
        if min(self.token_shape) < 1:
            raise ConfigError(f"token_shape {list(self.token_shape)}: latent frames, height and width are 1 at least")
        require_valid_cut_shares("beginnings", self.beginnings, self.token_shape[0])
        self.require_text_encodings_dim()
        if self.unconditional and (self.text_encoder or self.text_encodings_dim):
            raise ConfigError(
                "unconditional: the model reads no texts, and text_encoder or text_encodings_dim is "
                "given; leave them out, or set unconditional=false"
            )
        if self.train == "critic" and self.critic is None:
            raise ConfigError("train=critic: there is no critic; set critic=token")
        if self.train != "both" and self.critic == "self":
            raise ConfigError(
                f"train={self.train}: the self critic shares MaskGit's weights, and both learn together; "
                "set train=both, or critic=token"
            )
        if self.critic_depth is not None and self.critic != "token":
            raise ConfigError("critic_depth is the token critic's: set model.critic=token, or model.critic_depth=null")
        if self.critic is None and self.critic_labels != "masked":
            raise ConfigError(
                f"critic_labels={self.critic_labels}: there is no critic; set model.critic=token, or leave it out"
            )
        if self.codes is not None:
            self._require_fitting_cached_codes(self.codes)
        return self

    def _require_fitting_cached_codes(self, codes: Codes) -> None:
        """Raises ConfigError if the cached tokens or text encodings, which `codes` describes, do not fit the model."""
        if codes.codebook_size not in (None, self.codebook_size):
            raise ConfigError(
                f"codebook_size {self.codebook_size}: the tokens in data.path are of a codebook of "
                f"{codes.codebook_size}; set model.codebook_size={codes.codebook_size}"
            )
        if tuple(codes.shape) != self.token_shape:
            raise ConfigError(
                f"token_shape {list(self.token_shape)}: the tokens in data.path are {list(codes.shape)} "
                "(latent frames, height, width); leave model.token_shape out, or encode other clips"
            )
        self.require_matching_cached_texts(codes.text, codes.text_encoder)
        expected = self.tokenizer and self.tokenizer.fingerprint
        if expected not in (None, codes.first_stage):
            raise ConfigError(
                f"model.tokenizer.path: {self.tokenizer.path} is the tokenizer {expected}, the tokens in "
                f"data.path are of {codes.first_stage}; name the one that encoded them, or use this one"
            )

    @classmethod
    def complete_saved_section(cls, model: dict[str, Any]) -> dict[str, Any]:
        """Returns `model`, the section of a saved run.yaml. If it is of an older version, which wrote no critic_labels,
        adds the choices that this version had made.
        """
        if "critic_labels" in model:
            return model
        decoding = {"sample_temperature_schedule": "decay", **(model.get("decoding") or {})}
        return {**model, "decoding": decoding, "critic_labels": "replaced" if model.get("critic") else "masked"}

    @classmethod
    def drop_missing_networks(cls, run: Run) -> tuple[Run, str]:
        """Leaves out the tokenizer and the text encoder, each if its files are missing on this machine and cached
        tokens or encodings replace it. Returns the run, and a note for the user that names what is left out, or "".
        """
        stage, encoder, every, absent = run.model.get("tokenizer"), run.model.get("text_encoder"), run.every, {}
        path = stage.get("path") if isinstance(stage, dict) else None
        if not is_available_offline(path) and run.model.get("token_shape"):
            absent["tokenizer"] = f"model.tokenizer.path={path}"
            every = run.every.model_copy(update={"sample": 0})  # Nothing decodes what would be drawn.
        if not is_available_offline(encoder) and run.model.get("text_encodings_dim"):
            absent["text_encoder"] = f"model.text_encoder={encoder}"
        if not absent:
            return run, ""
        model = run.model | dict.fromkeys(absent)
        return run.model_copy(update={"model": model, "every": every}), (
            f"note: {' and '.join(absent.values())} not here: the network learns from cached tokens and encodings, and "
            "what made them is not counted"
        )

    @classmethod
    def complete_section(cls, model: dict[str, Any], run: Run) -> dict[str, Any]:
        """Fills in the fields that the section `model` leaves out, from the tokenizer and the cache. Returns the
        section. Its field `codes` always describes the cache of these data; None without cached tokens. Raises
        ConfigError if there are no cached tokens and neither a tokenizer nor token_shape is given.
        """
        stage, codes, frames = model.get("tokenizer"), run.data.codes, run.data.num_frames or 1
        cached = codes is not None and codes.kind == "tokens"
        if not stage and not cached and not model.get("token_shape"):
            raise ConfigError(
                f"model.tokenizer: data.path={run.data.path} holds no cached tokens, and no tokenizer is "
                "named that encodes it; set model.tokenizer.path, or cache tokens with dstrain encode"
            )
        added: dict[str, Any] = {}
        if isinstance(stage, dict) and isinstance(stage.get("path"), (str, int, float)):
            tokenizer = codec.load_tokenizer(str(stage["path"]))
            p = tokenizer.temporal_patch_size
            added = {
                "codebook_size": tokenizer.codebook_size,
                "temporal_patch_size": p,
                "token_shape": (1 + (frames - 1) // p, *tokenizer.codes_shape[1:]),
            }
            stage = {**stage, "fingerprint": stage.get("fingerprint") or tokenizer.fingerprint}
        if cached:
            added["token_shape"] = codes.shape
            if codes.shape[0] > 1 and frames > 1:
                added.setdefault("temporal_patch_size", max((frames - 1) // (codes.shape[0] - 1), 1))
            if codes.codebook_size:
                added["codebook_size"] = codes.codebook_size
            if not model.get("unconditional"):
                added |= derive_text_fields_from_cache(model, codes)
        # Always from the index of these data: a section that a run wrote down may be of another cache.
        index = codes.model_dump(include=set(Codes.model_fields)) if cached else None
        return added | model | {"codes": index} | ({"tokenizer": stage} if stage else {})

    def list_conflicts_among_ranks(self, ranks: int) -> list[str]:
        """Returns an error message for each number that cannot be divided by `ranks`, the ranks that would share a
        clip's tokens: rows of tokens, heads, and with `peg` channels. [] if all can.
        """
        counts = {"rows of tokens, token_shape": self.token_shape[1], "attention heads, heads": self.heads}
        if self.peg:
            counts["channels, dim"] = self.dim
        return list_indivisible_counts(ranks, counts)

    def list_conflicts(self, run: Run) -> list[str]:
        """Returns an error message for each conflict with the rest of the recipe, mostly with its section `samples`; []
        if there are none.
        """
        problems, samples = [], run.samples
        if samples.guidance_scale != 1 and not self.has_null_text:
            problems.append(
                f"samples.guidance_scale={samples.guidance_scale} needs a model that was trained without "
                "texts at times: write samples.guidance_scale=1, or model.cond_drop_prob=0.25"
            )
        if self.train == "critic" and run.init_from is None:
            problems.append(
                "model.train=critic: the critic would judge what untrained weights draw: give the run of a "
                "trained MaskGit, init_from=RUN"
            )
        if samples.prompts and self.unconditional:
            problems.append("samples.prompts: model.unconditional=true reads none: leave out one of the two")
        keys = [f"samples.{name}" for name in ("prompts", "num_frames") if getattr(samples, name)]
        if keys and run.every.sample and self.tokenizer is None:
            problems.append(
                f"{', '.join(keys)}: no tokenizer is named that decodes what is drawn; set "
                "model.tokenizer.path to its folder, or every.sample=0"
            )
        if samples.labels:
            problems.append(
                f"samples.labels={list(samples.labels)}: phenaki knows no classes; leave it out"
                + ("" if self.unconditional else ", and give samples.prompts")
            )
        draws = run.every.sample and self.tokenizer is not None
        if draws and not samples.prompts and not self.unconditional and not self.cond_drop_prob:
            problems.append("samples.prompts: no null text to draw without, as model.cond_drop_prob=0; give prompts")
        return problems

    @classmethod
    def replace_encoders(
        cls, model: dict[str, Any], text_encoder: str | None = None, tokenizer: str | None = None
    ) -> dict[str, Any]:
        """Returns the section `model` with another text encoder and another tokenizer, given by folder or name; None
        keeps the one in the section.
        """
        if text_encoder is not None:
            model = replace_text_encoder(model, text_encoder, not model.get("unconditional"))
        if tokenizer is not None:
            model = model | {"tokenizer": (model.get("tokenizer") or {}) | {"path": tokenizer}}
        return model

    @property
    def samplers(self) -> tuple[str, ...]:
        """Returns ("confidence",), or for a model with a critic ("confidence", "critic"). The last one is the
        default.
        """
        return SAMPLERS if self.critic else SAMPLERS[:1]

    @property
    def reads_texts(self) -> bool:
        """Returns whether the model learns from texts: it does unless it is unconditional."""
        return not self.unconditional

    @property
    def num_frames(self) -> int:
        """Returns the number of frames of the longest clip that the model can draw, in frames of the video (not latent
        ones).
        """
        return 1 + (self.token_shape[0] - 1) * self.temporal_patch_size

    def count_latent_frames(self, field: str, frames: int) -> int:
        """Returns the number of latent frames of a clip of `frames` frames. Raises ConfigError, whose message begins
        with `field`, if `frames` is not 1 + a multiple of temporal_patch_size, or more than the longest clip has.
        """
        step, most = self.temporal_patch_size, self.num_frames
        if frames < 1 or (frames - 1) % step:
            raise ConfigError(
                f"{field}: {frames} frames do not fit the temporal patch of {step}: take 1 + a multiple "
                f"of {step}, for example {1 + max((frames - 1) // step, 0) * step}"
            )
        if frames > most:
            raise ConfigError(
                f"{field}: {frames} frames, and the model has places for {most}; take {most} at most and "
                "go on from the last ones (--scenes)"
            )
        return 1 + (frames - 1) // step

    def make_trunk_arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments with which this section builds the transformer maskgit.Trunk, except
        num_tokens.
        """
        text = self.make_text_embedder_arguments() if self.reads_texts else None
        same = ("token_shape", "dim", "depth", "heads", "dim_head", "peg", "dropout", "gradient_shrink")
        return {**{name: getattr(self, name) for name in same}, "text": text}
