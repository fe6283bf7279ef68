"""The `model` section of a recipe for a diffusion prior: one documented field for each choice."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dstrain.diffusion.schedule import SCHEDULES
from dstrain.encoders.frozen import is_available_offline
from dstrain.recipe import MAY_CHANGE, ConfigError, Run, Section, mark_fixed_once_set
from dstrain.systems.base import SystemConfig

LOSSES = ("l2", "l1", "huber")


class Lucidrains(Section):
    """The network of lucidrains' DALLE2-pytorch, by its constructor's names where it has one."""

    ff_mult: int = Field(4, ge=1)
    """Width of the MLP, in widths of the model."""
    norm_out: bool = True
    """A LayerNorm behind the last block."""
    final_proj: bool = True
    """A linear map of the result."""
    normformer: bool = False
    """A LayerNorm within each MLP."""
    rotary_emb: bool = True
    """Rotary positions, beside the relative bias."""
    cosine_similarity: bool = True
    """Attention by cosines, as from version 1.4 on; false: by products, as in 0.26 to 1.2."""
    timestep_table: bool = True
    """A learned vector for each timestep (num_timesteps); false: sinusoids and an MLP."""
    condition_on_text_encodings: bool = True
    """Whether text encodings are read; without, their max_text_len places hold learned ones."""
    image_cond_drop_prob: float | None = Field(None, ge=0, le=1)
    """Share of training samples whose noisy image embedding is dropped; None means text_cond_drop_prob. Guidance drops
    it together with the text, unless the share is 0."""


class Config(SystemConfig):
    """Defaults are the published sizes of lucidrains' example: CLIP ViT-L/14, 12 blocks of width 768."""

    learns_from = ("pairs",)
    unshared = "a prior has some 80 tokens, which need no sharing"

    image_embed_dim: int = Field(768, ge=1, le=1_000_000)
    """Width of an image embedding."""
    text_embed_dim: int | None = Field(None, ge=1)
    """Width of a text embedding; None means image_embed_dim, as in CLIP."""
    text_encodings_dim: int | None = Field(None, ge=1)
    """Width of a text token's encoding; None means image_embed_dim (diffusers knows no other)."""
    max_text_len: int = Field(77, ge=0, le=100_000)
    """Text tokens that are conditioned on, beside the text embedding; 0 is none."""
    depth: int = Field(12, ge=1)
    """Number of blocks."""
    heads: int = Field(12, ge=1)
    """Attention heads of a block; heads * dim_head is the width."""
    dim_head: int = Field(64, ge=1)
    """Width of a head."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of values dropped behind attention and within the MLP."""
    norm_in: bool = False
    """A LayerNorm before the first block."""
    embedding_proj_norm: bool = False
    """A LayerNorm before the text embedding's projection."""
    self_cond: bool = False
    """Whether the network sees its previous prediction (in training half of the samples; Chen et al. 2022)."""

    lucidrains: Lucidrains | None = None
    """The network of DALLE2-pytorch, which LAION's priors have; None is that of diffusers' PriorTransformer."""

    beta_schedule: Literal[SCHEDULES] = "cosine"
    """Name of the betas."""
    timesteps: int = Field(1000, ge=1, le=100_000)
    """Timesteps of the training chain."""
    prediction: Literal["x_start", "eps", "v"] = "x_start"
    """What the network predicts."""
    loss: Literal[LOSSES] = "l2"
    """Error of the prediction, in scaled embeddings: squared, absolute, or Huber's, which is squared below 1."""
    text_cond_drop_prob: float = Field(0.1, ge=0, le=1)
    """Share of training samples whose text is dropped; 0 leaves out the null text, and with it guidance."""

    normalize_embeds: bool = True
    """Bring image and text embeddings to unit length, as CLIP compares them."""
    image_embed_scale: float | None = Field(None, gt=0)
    """Image embeddings are multiplied by it; None means sqrt(image_embed_dim), about unit variance."""
    image_embed_stats: str | None = None
    """Safetensors file or folder with clip_mean and clip_std (diffusers' priors have them): (embed - mean) / std
    instead of the scale."""
    training_clamp_l2norm: bool = False
    """Predicted x_start is brought to the length of the data before the loss."""
    sampling_clamp_l2norm: bool = False
    """Predicted x_start is brought to the length of the data at each step of a chain."""
    sampling_final_clamp_l2norm: bool = False
    """Samples are brought to the length of the data."""
    init_image_embed_l2norm: bool = False
    """A chain begins from noise of the data's length."""
    num_candidates: Annotated[int, MAY_CHANGE] = Field(2, ge=1, le=10_000)
    """Samples drawn for each text, of which the one nearest to the text embedding is kept."""

    text_encoder: Annotated[str | None, mark_fixed_once_set()] = None
    """Folder or hub name of the encoder of captions: read for prompts, and where the data hold no text embeddings."""
    evaluate_steps: Annotated[tuple[int, ...], MAY_CHANGE] = ()
    """Steps of the chains whose similarities are measured on held-out data in training; () measures the loss alone."""

    @model_validator(mode="after")
    def _require_consistent_fields(self) -> "Config":
        """Raises ConfigError if fields contradict each other, or no network or chain can be built from them. Returns
        the section unchanged, as pydantic asks.
        """
        if self.training_clamp_l2norm and self.prediction != "x_start":
            raise ConfigError(
                f"training_clamp_l2norm clamps a predicted x_start, and prediction is {self.prediction}: "
                "leave it out, or predict x_start"
            )
        clamps = [
            name
            for name in (
                "training_clamp_l2norm",
                "sampling_clamp_l2norm",
                "sampling_final_clamp_l2norm",
                "init_image_embed_l2norm",
            )
            if getattr(self, name)
        ]
        if clamps and (not self.normalize_embeds or self.image_embed_stats):
            raise ConfigError(
                f"{clamps[0]} needs data of one length: with normalize_embeds=false or image_embed_stats "
                "they have none; leave it out"
            )
        if self.image_embed_scale is not None and self.image_embed_stats is not None:
            raise ConfigError("image_embed_scale and image_embed_stats both scale the embeddings: give one of the two")
        if self.beta_schedule == "jsd" and self.prediction == "eps":
            raise ConfigError(
                "prediction=eps and beta_schedule=jsd: its last timestep is noise alone, from which eps "
                "tells nothing of x_start; predict x_start or v"
            )
        outside = [steps for steps in self.evaluate_steps if not 1 <= steps <= self.timesteps]
        if outside:
            raise ConfigError(f"evaluate_steps: {outside} are not between 1 and timesteps={self.timesteps}")
        if self.num_candidates > 1 and self.text_embed_dim not in (None, self.image_embed_dim):
            raise ConfigError(
                f"text_embed_dim={self.text_embed_dim} and image_embed_dim={self.image_embed_dim} "
                "differ, so no candidate can be compared with its text: write model.num_candidates=1"
            )
        if self.lucidrains is not None:
            self._require_consistent_lucidrains_fields()
        if self.heads * self.dim_head < 2:
            raise ConfigError("heads * dim_head is the width, which must be 2 at least")
        return self

    def _require_consistent_lucidrains_fields(self) -> None:
        """Raises ConfigError if a field does not go with the network of DALLE2-pytorch, which the section `lucidrains`
        chooses.
        """
        for field in ("text_embed_dim", "text_encodings_dim"):
            if getattr(self, field) not in (None, self.image_embed_dim):
                raise ConfigError(
                    f"{field}={getattr(self, field)}: in model.lucidrains all embeddings are as wide as "
                    f"image_embed_dim={self.image_embed_dim}; leave it out"
                )
        if self.embedding_proj_norm:
            raise ConfigError(
                "embedding_proj_norm: model.lucidrains has no projection of the text embedding; leave it out"
            )
        if self.dim_head % 2 and self.lucidrains.rotary_emb:
            raise ConfigError(f"dim_head={self.dim_head}: rotary positions turn pairs of channels; take an even width")
        if self.image_embed_dim < 4 or (self.image_embed_dim % 2 and not self.lucidrains.timestep_table):
            raise ConfigError(
                f"image_embed_dim={self.image_embed_dim}: model.lucidrains takes 4 and more, and without "
                "timestep_table even numbers"
            )
        if self.lucidrains.image_cond_drop_prob and not self.text_cond_drop_prob:
            raise ConfigError(
                "lucidrains.image_cond_drop_prob is above 0 and text_cond_drop_prob is 0: guidance drops "
                "both, so raise the latter, or leave the former out"
            )

    @property
    def num_text_tokens(self) -> int:
        """Returns how many encoded text tokens the network reads of each sample, beside the text embedding; 0 if it
        reads none.
        """
        reads = self.lucidrains is None or self.lucidrains.condition_on_text_encodings
        return self.max_text_len if reads else 0

    @property
    def image_drop_prob(self) -> float:
        """Returns the share of training samples whose noisy image embedding is replaced by a learned null input; 0
        without model.lucidrains.
        """
        if self.lucidrains is None:
            return 0.0
        own = self.lucidrains.image_cond_drop_prob
        return self.text_cond_drop_prob if own is None else own

    def list_conflicts(self, run: Run) -> list[str]:
        problems = []
        if run.samples.num_steps > self.timesteps:
            problems.append(
                f"samples.num_steps={run.samples.num_steps} is above model.timesteps={self.timesteps}: take fewer"
            )
        if run.samples.guidance_scale != 1 and not self.text_cond_drop_prob:
            problems.append(
                f"samples.guidance_scale={run.samples.guidance_scale} needs a model that was trained "
                "without texts at times: write samples.guidance_scale=1, or model.text_cond_drop_prob=0.1"
            )
        return problems

    @classmethod
    def drop_missing_networks(cls, run: Run) -> tuple[Run, str]:
        encoder = run.model.get("text_encoder")
        if is_available_offline(encoder):
            return run, ""
        return run.model_copy(update={"model": {**run.model, "text_encoder": None}}), (
            f"note: model.text_encoder={encoder} is not here, and is not counted"
        )

    @classmethod
    def replace_encoders(
        cls, model: dict[str, Any], text_encoder: str | None = None, tokenizer: str | None = None
    ) -> dict[str, Any]:
        if text_encoder is not None:
            model = {**model, "text_encoder": text_encoder}
        return super().replace_encoders(model, tokenizer=tokenizer)

    def make_network_arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments with which the network of this section is built: those of LucidrainsPrior if
        model.lucidrains is set, else those of PriorTransformer.
        """
        if self.lucidrains is not None:
            return self._make_lucidrains_arguments()
        fields = {
            "image_embed_dim",
            "max_text_len",
            "depth",
            "heads",
            "dim_head",
            "dropout",
            "self_cond",
            "norm_in",
            "embedding_proj_norm",
        }
        return {
            **self.model_dump(include=fields),
            "learns_null": self.text_cond_drop_prob > 0,
            "text_embed_dim": self.text_embed_dim or self.image_embed_dim,
            "text_encodings_dim": self.text_encodings_dim or self.image_embed_dim,
        }

    def _make_lucidrains_arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments with which LucidrainsPrior builds the network of this section."""
        own = self.lucidrains
        fields = {"ff_mult", "norm_out", "final_proj", "normformer", "rotary_emb", "cosine_similarity"}
        return {
            **self.model_dump(
                include={"max_text_len", "depth", "heads", "dim_head", "dropout", "self_cond", "norm_in"}
            ),
            **own.model_dump(include=fields),
            "dim": self.image_embed_dim,
            "timesteps": self.timesteps if own.timestep_table else None,
            "reads_encodings": own.condition_on_text_encodings,
            "learns_null": self.text_cond_drop_prob > 0,
            "learns_null_image": self.image_drop_prob > 0,
        }
