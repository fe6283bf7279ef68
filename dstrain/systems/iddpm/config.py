"""The `model` section of a recipe for an IDDPM: one documented field for each choice, named as the original's flags."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from dstrain.diffusion import schedule
from dstrain.diffusion.gaussian import LOSSES, PREDICTIONS, GaussianDiffusion
from dstrain.diffusion.process import ChainProcess, Flow, Process
from dstrain.nn.lora import Lora, list_lora_conflicts
from dstrain.recipe import MAY_CHANGE, ConfigError, Run, mark_fixed_on_resume
from dstrain.recipe.shapes import Shape, require_divisible_sides
from dstrain.systems.base import SystemConfig
from dstrain.systems.iddpm.network import GROUPS

# image_size -> channel_mult; 32, 64 and 256 as published with the paper, 128 of the same authors' guided-diffusion.
CHANNEL_MULT = {256: (1, 1, 2, 2, 4, 4), 128: (1, 1, 2, 3, 4), 64: (1, 2, 3, 4), 32: (1, 2, 2, 2)}


class Config(SystemConfig):
    unshared = "convolutions need the neighbours of each pixel, and its tokens are not cut"
    without_labels = "model.class_cond=false samples.guidance_scale=1"
    adapters_field = "lora"

    image_size: int = Field(64, ge=1)
    """Side of the images in pixels; with small_size that of the large ones."""
    small_size: int | None = Field(None, ge=1)
    """Side of the pictures that super-resolution begins from; None draws from noise alone."""
    in_channels: Literal[1, 3] = 3
    """Channels of the images: 3 for colour, 1 for grey."""
    num_channels: int = Field(128, ge=1)
    """Channels of the first level; a multiple of 32, the groups of every normalization."""
    num_res_blocks: int = Field(2, ge=1)
    """Residual blocks of a level (one more on the way up)."""
    channel_mult: tuple[int, ...] | None = None
    """Width of each level / num_channels, as [1, 2, 3, 4] or "1,2,3,4"; None: by image_size, for 32, 64, 128, 256."""
    attention_resolutions: tuple[int, ...] = (16, 8)
    """Sides of the levels that have attention, as [16, 8] or "16,8"; the middle always has it."""
    num_heads: int = Field(4, ge=1)
    """Attention heads."""
    num_heads_upsample: int = Field(-1, ge=-1)
    """Attention heads on the way up; -1 means num_heads."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of values dropped in a residual block."""
    lora: Lora | None = None
    """Adapters that learn in the place of the weights of init_from; None: all weights learn."""
    learn_sigma: bool = False
    """Whether the network also predicts variances (twice the output channels)."""
    class_cond: bool = False
    """Whether the network sees labels."""
    num_classes: int = Field(1000, ge=1)
    """Number of labels; read where class_cond is set."""
    class_dropout_prob: float = Field(0.0, ge=0, le=1)
    """Share of training samples without label, which guidance needs; above 0 the label table has a null row, its last.
    Read where class_cond is set."""
    use_scale_shift_norm: bool = True
    """Whether the condition scales and shifts normalized values, rather than being added before."""

    objective: Literal["diffusion", "flow"] = "diffusion"
    """Discrete-time diffusion, or flow matching (with learn_sigma its second half of channels is unused)."""
    flow: Flow = Flow()
    """Read where objective is flow; of what follows then only sizes."""
    diffusion_steps: int = Field(1000, ge=1, le=100_000)
    """Timesteps of the training chain."""
    noise_schedule: Literal[schedule.SCHEDULES] = "linear"
    """Name of the betas; the paper's are linear and cosine."""
    timestep_respacing: Annotated[str, MAY_CHANGE] = ""
    """Timesteps of samples and bits/dim: "250", "ddim50", sections "10,15,20", "" for all. Training takes all."""
    use_kl: bool = False
    """Descend the variational bound (L_vlb) rather than the squared error."""
    rescale_learned_sigmas: bool = True
    """Weigh the bound within the hybrid loss by diffusion_steps / 1000; read where learn_sigma is set."""
    predict_xstart: bool = False
    """Whether the network predicts x_start rather than eps."""
    sigma_small: bool = False
    """Sampling variance without learn_sigma: the posterior's rather than beta."""
    rescale_timesteps: bool = True
    """The network sees t * 1000 / diffusion_steps."""
    prediction: Literal[PREDICTIONS] | None = None
    """What the network predicts, by name; None: by predict_xstart."""
    loss: Literal[LOSSES] | None = None
    """Loss by name; None: rescaled_kl with use_kl, else rescaled_mse with rescale_learned_sigmas, else mse."""

    schedule_sampler: Literal["uniform", "loss-second-moment"] = "uniform"
    """How training draws timesteps: all alike, or more often where losses are large, which then weigh less."""
    history_per_term: int = Field(10, ge=1, le=1000)
    """Losses remembered of each timestep; until each has so many, loss-second-moment draws uniformly."""
    uniform_prob: float = Field(0.001, ge=0, le=1)
    """Share of timesteps that loss-second-moment draws uniformly."""

    sizes: Annotated[tuple[Shape, ...] | None, mark_fixed_on_resume("give the earlier data.buckets")] = None
    """Widths and heights of the images that it learns from, filled in from data.buckets; None: image_size squared.
    attention_resolutions name the levels that they are at image_size."""

    @field_validator("attention_resolutions", "channel_mult", mode="before")
    @classmethod
    def _split_comma_separated_flag(cls, value: Any) -> Any:
        """Converts a value written as a flag of the original's command line to a tuple: "16,8" to ("16", "8"), and 16
        to (16,). Returns any other value unchanged.
        """
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return (value,) if isinstance(value, int) else value

    @field_validator("timestep_respacing", mode="before")
    @classmethod
    def _join_respacing_sections(cls, value: Any) -> Any:
        """Converts a list of numbers for timestep_respacing to text, as the original writes it: [10, 15, 20] to
        "10,15,20". Returns any other value unchanged.
        """
        return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value

    @model_validator(mode="after")
    def _require_consistent_fields(self) -> "Config":
        """Raises ConfigError if fields contradict each other or no network can be built from them. Returns the section
        unchanged, as pydantic asks.
        """
        if self.predict_xstart and self.prediction not in (None, "x_start"):
            raise ConfigError(f"predict_xstart is true and prediction is {self.prediction}: give one of the two")
        if self.use_kl and self.loss not in (None, "kl", "rescaled_kl"):
            raise ConfigError(f"use_kl is true and loss is {self.loss}: give one of the two")
        if self.channel_mult is None and self.image_size not in CHANNEL_MULT:
            raise ConfigError(
                f"channel_mult must be given where image_size is {self.image_size}, for example "
                f"{_propose_channel_mult(self.image_size)}; it is known for {', '.join(map(str, CHANNEL_MULT))}"
            )
        mults, sides = self.resolved_channel_mult, self.feature_map_sides
        if not mults or min(mults) < 1:
            raise ConfigError(
                f"channel_mult {list(mults)} needs a factor of 1 or more for each level, for example "
                f"{_propose_channel_mult(self.image_size)}"
            )
        unit = 2 ** (len(mults) - 1)
        if self.image_size % unit:
            raise ConfigError(
                f"image_size {self.image_size} is no multiple of {unit}, by which the {len(mults)} "
                f"levels of channel_mult {list(mults)} divide it; take another size, or fewer levels"
            )
        require_divisible_sides(self.sizes, unit, f"by which the levels of channel_mult {list(mults)} divide them")
        if self.sizes and self.small_size is not None:
            raise ConfigError("small_size: super-resolution is of squares: leave data.buckets out")
        unknown = [side for side in self.attention_resolutions if side not in sides]
        if unknown:
            raise ConfigError(
                f"attention_resolutions: {_join_with_commas(unknown)} never occurs; the levels of image_size "
                f"{self.image_size} are {_join_with_commas(sides)}"
            )
        if self.num_channels % GROUPS:
            raise ConfigError(
                f"num_channels {self.num_channels} is no multiple of {GROUPS}, the groups of every "
                f"normalization; take {max(round(self.num_channels / GROUPS), 1) * GROUPS}"
            )
        if self.num_heads_upsample == 0:
            raise ConfigError("num_heads_upsample 0 is no number of heads; -1 means num_heads")
        self._require_heads_divide_channels()
        if self.small_size is not None and (self.image_size % self.small_size or self.small_size == self.image_size):
            raise ConfigError(
                f"small_size {self.small_size} does not divide image_size {self.image_size} into a "
                "smaller picture; take a half or a quarter of it"
            )
        if self.objective == "flow" and (self.timestep_respacing or self.schedule_sampler != "uniform"):
            raise ConfigError(
                "objective: a flow has no timesteps of a chain; leave timestep_respacing and schedule_sampler out, or "
                "set objective=diffusion"
            )
        schedule.make_betas(self.noise_schedule, self.diffusion_steps)  # some schedules need more steps
        try:
            self.count_respaced_steps()
        except ValueError as error:
            raise ConfigError(
                f"timestep_respacing {self.timestep_respacing!r} does not fit {self.diffusion_steps} "
                f"diffusion_steps ({error}); write 250, ddim50 or sections as 10,15,20"
            ) from None
        return self

    def _require_heads_divide_channels(self) -> None:
        """Raises ConfigError if num_heads, or num_heads_upsample, does not divide the channels of a level that has
        attention.
        """
        with_attention = {
            factor
            for factor, side in zip(self.resolved_channel_mult, self.feature_map_sides)
            if side in self.attention_resolutions
        }
        for key, heads, factors in (
            ("num_heads", self.num_heads, with_attention | {self.resolved_channel_mult[-1]}),
            ("num_heads_upsample", self.resolved_heads_upsample, with_attention),
        ):
            widths = [factor * self.num_channels for factor in sorted(factors)]
            if indivisible := [width for width in widths if width % heads]:
                raise ConfigError(
                    f"{key} {heads} does not divide {_join_with_commas(indivisible)}, the channels of a level with "
                    "attention; take another number of heads or num_channels"
                )

    @classmethod
    def complete_section(cls, model: dict[str, Any], run: Run) -> dict[str, Any]:
        """Returns the recipe's section `model` with image_size and in_channels filled in from the data, where the
        section leaves them out. Always sets `sizes` to data.buckets.
        """
        return {"image_size": run.data.image_size, "in_channels": run.data.channels, **model, "sizes": run.data.buckets}

    def list_conflicts(self, run: Run) -> list[str]:
        problems, samples = self.list_unequal_fields(run, image_size="image_size", channels="in_channels"), run.samples
        problems += list_lora_conflicts(self.lora, run)
        if self.objective == "flow":
            problems += self.flow.list_strata_conflicts(run.batch.global_)
        elif samples.num_steps > self.diffusion_steps:
            problems.append(
                f"samples.num_steps={samples.num_steps} is above model.diffusion_steps="
                f"{self.diffusion_steps}: take fewer"
            )
        elif self.timestep_respacing and samples.num_steps != self.count_respaced_steps():
            problems.append(
                f"samples.num_steps={samples.num_steps} and model.timestep_respacing="
                f"{self.timestep_respacing}, which keeps {self.count_respaced_steps()}, differ: make both equal"
            )
        if samples.guidance_scale != 1 and not self.has_null_label:
            problems.append(
                f"samples.guidance_scale={samples.guidance_scale:g}: this model has no null label: write "
                "samples.guidance_scale=1, or model.class_cond=true model.class_dropout_prob=0.1"
            )
        if samples.labels and not self.class_cond:
            problems.append("samples.labels names classes, and model.class_cond is false: leave them out, or set it")
        return problems

    def get_image_shape(self, size: Shape | None = None) -> tuple[int, int, int]:
        """Returns the shape (C, H, W) of images of `size` = (width, height) in pixels; None: squares of image_size.
        Raises ConfigError if a side is no multiple of 2 ** (levels - 1), since each further level of the network halves
        it.
        """
        wide, high = size or (self.image_size, self.image_size)
        unit = 2 ** (len(self.resolved_channel_mult) - 1)
        if wide % unit or high % unit:
            raise ConfigError(f"{wide} x {high}: both sides must be multiples of {unit}")
        return self.in_channels, high, wide

    @property
    def num_labels(self) -> int | None:
        """Returns the number of classes; None if the network sees no labels."""
        return self.num_classes if self.class_cond else None

    @property
    def has_null_label(self) -> bool:
        """Returns whether the label table has a row for "no label": the last, behind one row for each class."""
        return self.class_cond and self.class_dropout_prob > 0

    @property
    def resolved_channel_mult(self) -> tuple[int, ...]:
        """Returns, for each level, its width as a multiple of num_channels: channel_mult or, if that is None, the
        published one for image_size.
        """
        return self.channel_mult if self.channel_mult is not None else CHANNEL_MULT[self.image_size]

    @property
    def feature_map_sides(self) -> tuple[int, ...]:
        """Returns the side of each level's feature maps for images of image_size, in pixels, the largest first."""
        return tuple(self.image_size // 2**level for level in range(len(self.resolved_channel_mult)))

    @property
    def resolved_heads_upsample(self) -> int:
        """Returns the number of attention heads in the blocks on the way up: num_heads_upsample, or num_heads if that
        is -1.
        """
        return self.num_heads if self.num_heads_upsample == -1 else self.num_heads_upsample

    def count_respaced_steps(self) -> int:
        """Returns the number of timesteps that sampling takes by timestep_respacing. Raises ValueError if
        timestep_respacing does not fit diffusion_steps.
        """
        return len(schedule.space_timesteps(self.diffusion_steps, self.timestep_respacing))

    def make_network_arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments with which UNet, or SuperResUNet, builds the network of this section."""
        fields = {
            "in_channels",
            "num_channels",
            "num_res_blocks",
            "num_heads",
            "dropout",
            "learn_sigma",
            "use_scale_shift_norm",
        }
        return {
            **self.model_dump(include=fields),
            "channel_mult": self.resolved_channel_mult,
            "num_classes": self.num_classes + self.has_null_label if self.class_cond else None,
            "attention_levels": [self.feature_map_sides.index(side) for side in self.attention_resolutions],
            "num_heads_upsample": self.resolved_heads_upsample,
        }

    def make_diffusion_arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments of GaussianDiffusion for this section, all but the betas."""
        loss = "rescaled_kl" if self.use_kl else "rescaled_mse" if self.rescale_learned_sigmas else "mse"
        variance = "learned_range" if self.learn_sigma else "fixed_small" if self.sigma_small else "fixed_large"
        return {
            "prediction": self.prediction or ("x_start" if self.predict_xstart else "eps"),
            "variance": variance,
            "loss": self.loss or loss,
            "rescale_timesteps": self.rescale_timesteps,
        }

    def make_process(self) -> Process:
        """Returns the process that adds noise to data and whose reverse the network learns: a flow by the section
        `flow` if objective is flow, else a diffusion chain of diffusion_steps timesteps.
        """
        if self.objective == "flow":
            return self.flow.make_process(self.get_image_shape())
        betas = schedule.make_betas(self.noise_schedule, self.diffusion_steps)
        diffusion = GaussianDiffusion(betas, **self.make_diffusion_arguments())
        return ChainProcess(diffusion, self.noise_schedule, clip=True, respacing=self.timestep_respacing)


def _propose_channel_mult(image_size: int) -> list[int]:
    """Returns a channel_mult for error messages to propose: [1, 2, 2, ...], one number for each level. Each further
    level halves the side of the image; there are up to six, and a side is halved only if it is even and above 8.
    """
    levels = 1
    while levels < 6 and image_size % 2**levels == 0 and image_size // 2 ** (levels - 1) > 8:
        levels += 1
    return [1] + [2] * (levels - 1)


def _join_with_commas(numbers: Any) -> str:
    """Returns numbers as text, separated by commas: "16, 8"."""
    return ", ".join(map(str, numbers))
