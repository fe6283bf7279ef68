"""Alignment of a DiT's tokens to features, and routing of tokens past blocks. Both act in training alone.

layersync   tokens are drawn to those of a deeper block of the same pass, which get no gradient (arXiv 2510.12581)
repa        through a projector, tokens are drawn to the features of a frozen vision encoder (Yu et al. 2024)
routing     some tokens skip blocks (TREAD, Krause et al. 2025)
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from dstrain.distributed.progress import get_phases
from dstrain.encoders.image import VisionTower
from dstrain.encoders.precision import Precision, use_precision
from dstrain.nn.fitting import Shapes
from dstrain.recipe import MAY_CHANGE, ConfigError, Section, mark_fixed_once_set
from dstrain.systems.base import Example
from dstrain.systems.dit.trunk import gather_kept_tokens

KINDS = ("dinov2", "dinov3")  # of encoders
_WEIGHTS = {"layersync": 0.2, "repa": 0.5}  # the papers'
_FEW = 1000  # tokens
_KEY = "model.align.path"


class Align(Section):
    kind: Literal["layersync", "repa"]
    """To what tokens are drawn: layersync, to those of a deeper block; repa, to a frozen vision encoder's patches."""
    depth: int = Field(8, ge=1)
    """The tokens after this block are drawn, counted from 1."""
    target: int = Field(16, ge=2)
    """layersync: to the tokens after this block, which get no gradient."""
    weight: float | None = Field(None, gt=0)
    """Weight of the alignment beside 1 of the loss; None: 0.2 for layersync and 0.5 for repa."""
    loss: Literal["cosine", "mse"] = "cosine"
    """Minus the cosine of each token and its target, or their squared difference (RAEv2)."""
    until: int = Field(0, ge=0)
    """Steps after which it is off, since late in training it holds a network back; 0: it stays."""
    path: Annotated[str | None, MAY_CHANGE] = None
    """repa: local folder of a vision encoder of transformers, DINOv2 or DINOv3."""
    hidden: int = Field(2048, ge=0)
    """repa: width of the projector's two inner layers; 0: one linear map (RAEv2)."""
    width: Annotated[int | None, mark_fixed_once_set()] = Field(None, ge=1)
    """Width of the encoder's features, filled in from its folder."""
    fingerprint: Annotated[str | None, mark_fixed_once_set(f"put the earlier encoder back at {_KEY}")] = None
    """Fingerprint of the only encoder to accept. None accepts any; that of the folder is written into the run."""
    precision: Annotated[Precision | None, MAY_CHANGE] = None
    """fp32, tf32 or bf16: in which the encoder computes; None: tf32 where the GPU has it."""

    @model_validator(mode="after")
    def _require_consistent_fields(self) -> "Align":
        """Raises ConfigError if fields contradict each other, or repa has no encoder. Returns the section unchanged, as
        pydantic asks.
        """
        if self.kind == "repa" and self.width is None:
            fault = "no encoder is named" if self.path is None else f"there is no folder {self.path}"
            raise ConfigError(
                f"align.path: {fault}; give the local one of a vision encoder, with config.json and *.safetensors, "
                "such as DINOv2's, or take align.kind=layersync, which needs none"
            )
        if self.kind == "layersync" and self.path is not None:
            raise ConfigError(f"align.path: layersync reads no encoder, and {self.path} is named; set align.kind=repa")
        if self.kind == "layersync" and self.target <= self.depth:
            raise ConfigError(f"align.target: {self.target} is not above align.depth {self.depth}; name a deeper block")
        return self

    @classmethod
    def fill_in_encoder_fields(cls, section: dict[str, Any]) -> dict[str, Any]:
        """Returns the recipe's section `align` with two fields filled in: width and fingerprint of the vision encoder
        in the folder `path`. Returns the section unchanged if its kind is not repa, or if there is no such folder.

        Raises ConfigError if the section already gives another width or fingerprint.
        """
        path = section.get("path")
        if section.get("kind") != "repa" or not isinstance(path, str) or not Path(path).is_dir():
            return section
        facts = VisionTower(Path(path), KINDS, _KEY).describe_encoder()
        for name, actual in facts.items():
            if section.get(name) not in (None, actual):
                raise ConfigError(
                    f"model.align.{name}: {section[name]} in the recipe, {actual} of the encoder in {path}; put the "
                    f"other encoder there, or leave align.{name} out in a new run"
                )
        return {**section, **facts}

    def list_data_conflicts(self, cached_latents: bool, channels: int) -> list[str]:
        """Returns the reasons why a model with this alignment cannot learn from the recipe's data; [] if it can.

        cached_latents  whether the data are cached latents.
        channels        number of channels of the data's images.
        """
        if self.kind != "repa":
            return []
        if cached_latents:
            return [
                "model.align: the data are latents and hold no images, which the encoder sees; give images and "
                "model.first_stage.path, which encodes them in every step, or write model.align.kind=layersync"
            ]
        if self.path is not None and channels not in (1, 3):
            return [f"model.align: the encoder sees 1 or 3 channels, and data.channels is {channels}"]
        if self.path is not None and not Path(self.path).is_dir():
            return [
                f"{_KEY}: there is no folder {self.path}; give the local one of a vision encoder, with config.json and "
                "*.safetensors"
            ]
        return []

    def make_network_arguments(self) -> dict[str, Any]:
        """Returns what DiT takes as its argument `align` (network.py): the block whose tokens are aligned, and either
        the block that is the target, or the sizes of the projector.
        """
        if self.kind == "layersync":
            return {"depth": self.depth, "target": self.target}
        return {"depth": self.depth, "widths": [self.width], "hidden": self.hidden}


class Routing(Section):
    ratio: float = Field(0.5, ge=0, lt=1)
    """Share of an image's tokens that pass the blocks by, drawn anew for every sample."""
    start: int = Field(2, ge=1)
    """The first block that they pass by, counted from 1."""
    end: int | None = Field(None, ge=1)
    """The last one; None: the last but one of all."""


def require_valid_block_numbers(
    align: Align | None, routed_blocks: tuple[int, int] | None, second_head_block: int | None, depth: int
) -> None:
    """Raises ConfigError if alignment or routing names a block above `depth`, or if routing ends before it starts. Also
    raises it if the second head follows a routed block other than the last: some tokens are missing there. Blocks count
    from 1.

    align              the alignment; None: there is none.
    routed_blocks      the first and the last block that tokens may skip; None: no routing.
    second_head_block  the block that the second head follows; None: there is no such head.
    depth              number of blocks.
    """
    if align:
        names = ("depth", "target") if align.kind == "layersync" else ("depth",)
        for name in names:
            if (block := getattr(align, name)) > depth:
                raise ConfigError(f"align.{name}: {block} is above depth {depth}; name a block that there is")
    if routed_blocks:
        start, end = routed_blocks
        if not start <= end <= depth:
            raise ConfigError(
                f"routing: blocks {start} to {end} are no part of the {depth} that there are; give start and end "
                "from 1 to depth"
            )
        if second_head_block and start <= second_head_block < end:
            raise ConfigError(
                f"routing: after block {second_head_block} some tokens are elsewhere, and the second head of "
                "internal.depth needs all; give routing.start above it, or another internal.depth"
            )


class Alignment:
    """Computes the alignment loss of a DiT. Loads the frozen vision encoder of kind=repa when it is first needed."""

    def __init__(self, section: Align) -> None:
        self.section, self.active = section, True
        self.weight = section.weight or _WEIGHTS[section.kind]
        self._tower: VisionTower | None = None

    def begin_step(self, step: int) -> None:
        """Sets `active`: whether the loss of training step `step` aligns tokens."""
        self.active = self.is_active_at_step(step)

    def is_active_at_step(self, step: int) -> bool:
        """Returns whether the loss of training step `step` aligns tokens: True in the steps before the section's
        `until`, and in all steps if `until` is 0.
        """
        return not self.section.until or step < self.section.until

    @property
    def needs_extra_outputs(self) -> bool:
        """Returns whether DiT.forward must be called with extras=True: always for kind=repa, otherwise only in steps
        that align tokens.
        """
        return self.active or self.section.kind == "repa"

    def frozen(self) -> tuple[nn.Module, ...]:
        """Returns (encoder,) for kind=repa if the encoder's folder exists; else (), since drawing samples needs no
        encoder.
        """
        if self.section.kind != "repa" or self.section.path is None or not Path(self.section.path).is_dir():
            return ()
        return (self._load_encoder(),)

    def compute_loss(
        self, outputs: Mapping[str, Any], example: Example, grid: tuple[int, int], keep: Tensor | None
    ) -> Tensor:
        """Returns the alignment loss of each sample, float32 (B,): the mean square difference of tokens and targets, or
        minus their mean cosine. For kind=repa the loss is 0 in a step that does not align.

        outputs  what DiT.forward returns with extras=True.
        grid     rows and columns of the image's patches.
        keep     int64 (B, M), the numbers of the tokens that go through the routed blocks; None: all.
        """
        if self.section.kind == "layersync":
            drawn, towards = outputs["drawn"], outputs["towards"]
        else:
            drawn = outputs["projected"][0]
            if not self.active:
                return 0 * drawn.float().mean((1, 2))  # The projectors' gradient is zero, and not absent.
            towards = self.read_or_compute_targets(example, grid)
        if drawn.shape[1] < towards.shape[1]:  # A tap among routed blocks sees some tokens alone.
            towards = gather_kept_tokens(towards, keep)
        elif drawn.shape[1] > towards.shape[1]:
            drawn = gather_kept_tokens(drawn, keep)
        drawn, towards = drawn.float(), towards.float()
        if self.section.loss == "mse":
            return (drawn - towards).square().mean((1, 2))
        return -(F.normalize(drawn, dim=-1) * F.normalize(towards, dim=-1)).sum(-1).mean(1)

    @torch.no_grad()
    def read_or_compute_targets(self, example: Example, grid: tuple[int, int]) -> Tensor:
        """Returns the targets of kind=repa, float32 (B, N, width), for a grid of N patches: the features that the
        example holds, or else those that the encoder computes from the example's images. Moves the encoder to the
        images' device.
        """
        if "features" in example:
            return example["features"]
        tower, image = self._load_encoder(), example["image"]
        if tower.mean.device != image.device:  # also where a recipe's shapes are checked on meta
            tower.to(image.device)
        image = image.expand(-1, 3, -1, -1)
        with use_precision(tower.precision):
            # As REPA resamples, so that a patch of the encoder is one of the network.
            return tower.compute_tokens(image, [side * tower.patch_size for side in grid], smooth=False).patches.float()

    def _load_encoder(self) -> VisionTower:
        """Returns the frozen vision encoder of kind=repa, which the first call loads."""
        if self._tower is None:
            self._tower = VisionTower(Path(self.section.path), KINDS, _KEY)
            self._tower.set_precision(self.section.precision)
        return self._tower


def require_encoder_or_features(section: Align, sample: Mapping[str, Any]) -> None:
    """Raises ConfigError if kind=repa has no targets: the section names no encoder, and `sample`, one sample of the
    data, holds no features.
    """
    if section.kind == "repa" and section.path is None and "features" not in sample:
        raise ConfigError(f"{_KEY}: no encoder is named; give the local folder of one, such as DINOv2's")


def warn_if_few_tokens(num_tokens: int) -> None:
    """Prints a warning if `num_tokens`, the number of tokens of an image, is below 1,000: with fewer tokens routing
    saves little time and makes pictures worse.
    """
    if num_tokens < _FEW:
        get_phases().print_lines(
            f"warning: model.routing: an image has {num_tokens:,} tokens, and routing pays from about {_FEW:,} on; "
            "with fewer, pictures get worse: leave it out"
        )


def adapt_projectors_in_place(state: dict[str, Tensor], shapes: Shapes) -> list[str]:
    """Makes a file's state dict fit the network in REPA's projectors, in place. Deletes them if the network has none.
    Adds initial values, equal on all ranks, if the network has them and the file does not. Returns notes for the user.

    state   the file's weights by name.
    shapes  the shapes of the network's weights by name.
    """
    given, needed = ([name for name in names if name.startswith("projectors.")] for names in (state, shapes))
    if given and not needed:
        for name in given:
            del state[name]
        return [f"projectors: {len(given)} weights of the alignment are left, since none is trained here"]
    if not needed or given:
        return []
    generator = torch.Generator().manual_seed(0)
    for name in needed:
        state[name] = torch.zeros(shapes[name])
        if state[name].ndim > 1:
            nn.init.xavier_uniform_(state[name], generator=generator)
    return ["projectors: not in the file; the alignment's begin anew"]


def add_internal_guidance(network: Callable[..., Any], scale: float) -> Callable[..., Tensor]:
    """Returns a function that predicts with internal guidance: base + scale (out - base), where `out` and `base` are
    the predictions of the network and of its second head in one forward pass. Returns `network` itself for scale 1.
    """
    if scale == 1:
        return network

    def predict_guided(x_t: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        found = network(x_t, t, **conditions, extras=True)
        return torch.lerp(found["base"], found["out"], scale)

    return predict_guided
