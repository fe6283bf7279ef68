"""Sections of a DiT's config: diffusion, blocks, condition tokens, and heads beside the usual one."""

from typing import Annotated, Literal

from pydantic import Field

from dstrain.diffusion.schedule import SCHEDULES
from dstrain.recipe import MAY_CHANGE, Section


class Diffusion(Section):
    schedule: Literal[SCHEDULES] = "linear"
    """Name of the betas; cosine and squaredcos_cap_v2 are the same."""
    num_steps: int = Field(1000, ge=1)
    """Timesteps of the training chain."""
    prediction: Literal["eps", "x_start", "v"] = "eps"
    """What the network predicts."""
    loss: Literal["mse", "rescaled_mse", "kl", "rescaled_kl"] = "mse"
    """mse adds the variational bound where learn_sigma is set; rescaled_mse weighs it by num_steps / 1000."""
    min_snr: float | None = Field(None, gt=0)
    """Weighs the squared error of data by min(SNR, this), so that easy timesteps count less (Hang et al. 2023: 5);
    None: the error is of what is predicted, and not weighed."""
    fixed_variance: Literal["fixed_small", "fixed_large"] = "fixed_large"
    """Sampling variance without learn_sigma: the posterior's, or beta."""


class BlockChoices(Section):
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm without weights, or RMSNorm."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """Two layers, or a gated MLP with two thirds of the hidden width, so as many weights."""
    qk_norm: Literal["none", "rms", "layer"] = "none"
    """Norm of each head's queries and keys: the cure for divergence in bf16 at a billion weights."""
    rope: bool = False
    """Whether queries and keys turn with their patch's row and column (RoPE)."""
    modulation: Literal["own", "shared", "none"] = "own"
    """By the condition through a layer of each block's own; through one layer for all, to which each block adds a table
    (PixArt); or not at all: then give condition tokens."""
    joint: bool = False
    """Whether texts have layers of their own in every block, beside those of the patches, and all attend to all (SD3).
    """
    dual: int = Field(0, ge=0)
    """In so many joint blocks, the first ones, patches attend to themselves once more (SD3.5 medium: 13)."""


class Tokens(Section):
    time: int = Field(0, ge=0)
    """Condition tokens of the timestep."""
    label: int = Field(0, ge=0)
    """Condition tokens of the label."""
    joins: int = Field(0, ge=0)
    """Number of blocks before condition tokens join those of the image."""


class Wide(Section):
    hidden_size: int = Field(ge=4)
    """Width of the head's own tokens."""
    depth: int = Field(ge=1)
    """Its blocks, beside `depth` of the trunk."""
    num_heads: int = Field(ge=1)
    """Its attention heads."""


class Internal(Section):
    depth: int = Field(ge=1)
    """The second head reads the tokens after this block, counted from 1."""
    weight: float = Field(1.0, gt=0)
    """Weight of its loss, beside 1 of the whole network's."""
    scale: Annotated[float, MAY_CHANGE] = Field(1.0, gt=0)
    """Sampling takes base + scale (whole - base), in one forward pass (RAEv2: 1.78); 1: the whole network alone."""
