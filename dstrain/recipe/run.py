"""The schema of a recipe: Run holds everything that determines a run, as one checked value.

A recipe is a YAML file of these sections; `key=value` overrides change single entries (`batch.global=256`). The recipe
decides what is learned and how (batch, learning rate, betas, clip, steps); the JSON in ds_configs/ decides how it is
sharded (stage, precision, offload). dstrain/engine/settings.py merges both. The mark on a field says whether its value
may change when a run resumes, see section.py.
"""

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator
from pydantic_core import PydanticCustomError

from dstrain.recipe.mixture import Mixture
from dstrain.recipe.patterns import Pattern, matches_weight_pattern
from dstrain.recipe.problems import format_divisors
from dstrain.recipe.section import FIXED, MAY_CHANGE, Count, Fraction, NonNegative, Section, expand_home_in_path
from dstrain.recipe.shapes import Shape, Shaping

WIDEST = 0.288  # relative width of an average by a power of time: all steps count alike at 1 / sqrt(12)


def _raise_failed_checks(*checks: tuple[Any, str]) -> None:
    """Raises ValueError with the messages of all failed checks, if any. A check is (whether it has failed, message)."""
    if messages := [message for wrong, message in checks if wrong]:
        raise ValueError("\n".join(messages))


class Codes(Section):
    """What the index of a cache says: filled in, not written by hand. See dstrain/data/cached/shards.py."""

    kind: Literal["latents", "tokens"]  # what the cache holds
    shape: tuple[PositiveInt, ...]  # of one image's codes: (C, h, w), (h, w); of one video's (t, h, w)
    flips: Literal[1, 2]  # 2: of the mirrored image, too
    scaling_factor: float | None  # of latents: 1 / their standard deviation
    channel_mean: tuple[float, ...] | None = None  # of latents
    channel_std: tuple[float, ...] | None = None
    first_stage: str  # fingerprint of what encoded them
    codebook_size: int | None = None  # of tokens: number of ids that there may be; None: an older index
    text: tuple[PositiveInt, PositiveInt] | None = None  # (L, E) of text_encodings beside them
    text_encoder: str | None = None  # fingerprint of what encoded these


class Cache(Section):
    """Describes the cache on each machine's disk, which its processes share, of data at addresses such as s3://."""

    folder: str | None = None  # None: dstrain/data in the user's cache folder
    gb: Annotated[float, Field(ge=0.01, le=1e9)] = 20.0  # 10^9 bytes, at most; data below 0.8 of it stay there

    @field_validator("folder")
    @classmethod
    def _expand_home(cls, folder: str | None) -> str | None:
        return folder if folder is None else expand_home_in_path(folder)


class Data(Mixture, Shaping):
    path: str = "builtin:fashion"  # a folder: images, clips (a subfolder a class) or a cache; or a built-in
    image_size: Annotated[int, Field(gt=0, le=65536), FIXED] = 32  # pixels, of the square to fit into; clips: width
    height: Annotated[PositiveInt | None, FIXED] = None  # of clips, pixels; None: image_size
    num_frames: Annotated[PositiveInt | None, FIXED] = None  # of clips; None: images
    frame_stride: Annotated[PositiveInt, FIXED] = 1  # of clips: one frame of so many is taken
    captions: str | None = None  # of clips: NAME<TAB>CAPTION lines, or .csv or .jsonl with file and
    # caption; None: X.txt beside X.mp4, else the names of class folders
    labels: Literal["auto", "prefix", "none"] = "auto"  # prefix: ADM's CLASS_name.png; none: no labels at all
    class_list: str | None = None  # a file with a class (folder, synset) a line: their order is the label
    columns: dict[Literal["path", "image", "label", "caption"], str | list[str]] = {}  # of a table, by their names
    images: str | None = None  # a folder of images that are mixed into the clips
    image_share: Fraction = 0.2  # of the training samples, where `images` is given
    channels: Annotated[Literal[1, 3, 4], FIXED] = 3  # 1 converts to grey, 4 keeps transparency (RGBA)
    flip: Annotated[bool, FIXED] = True  # horizontal flips, drawn for each sample and step
    held_out: Annotated[Fraction, FIXED] = 0.0  # share of a folder kept for evaluation; the built-in set has its own
    held_out_path: str | None = None  # a folder for evaluation instead of a share
    # Patterns of captions whose samples are neither trained on nor held out: ["*dark sandal*", "a light bag"]
    leave_out: Annotated[tuple[Pattern, ...], FIXED] = ()
    upright: Annotated[bool, FIXED] = True  # pictures and clips are turned and mirrored as their files say (EXIF,
    # display matrix); false: as runs of earlier versions, which only turn videos
    draft: Annotated[bool, FIXED] = False  # decode large JPEGs at reduced scale: faster, not the exact ADM pixels
    max_bad_fraction: Fraction = 0.01  # share of unreadable files that is replaced before the run ends
    workers: Annotated[int, Field(ge=0, le=1024)] | None = None  # loader processes a rank; 0: none; None chooses
    index: str | None = None  # folder of the list of samples; None: in the run's, or not kept if small
    splits: tuple[Fraction, Fraction, Fraction] = (0.75, 0.15, 0.1)  # of embedding pairs: train, validation, test
    cache: Cache = Cache()  # of data at an address
    embeddings: str | None = None  # of images, from dstrain encode --image-encoder, or builtin:emoji-pairs
    captioned: bool = False  # images are read with their captions; filled in, from what the model reads
    codes: Codes | None = None  # where `path` holds cached codes: filled in from their index

    @field_validator("path", "held_out_path", "captions", "images", "class_list", "index", "embeddings")
    @classmethod
    def _expand_home(cls, path: str | None) -> str | None:
        return path if path is None else expand_home_in_path(path)

    @model_validator(mode="after")
    def _require_consistent_values(self) -> "Data":
        clips = {
            "height": self.height,
            "captions": self.captions,
            "images": self.images,
            "frame_stride": self.frame_stride != 1 or None,
        }
        keys = [f"data.{name}" for name, value in clips.items() if value is not None]
        _raise_failed_checks(
            *self.list_mixture_checks(),
            (
                keys and self.num_frames is None,
                f"{', '.join(keys)}: of clips, not of images: leave it out, or write data.num_frames=17, say",
            ),
            (
                self.num_frames and self.channels == 4,
                "data.channels=4: clips have no transparency: write data.channels=3",
            ),
            (
                self.images and not 0 < self.image_share < 1,
                f"data.image_share={self.image_share:g} lies between 0 and "
                "1: leave data.images out for no images; for images alone write their folder as data.path",
            ),
            *self.list_clip_checks(self.num_frames),
            (
                self.draft and (self.crop != "center" or self.size_conditions),
                "data.draft=true goes with data.crop=center and without data.size_conditions: write data.draft=false",
            ),
            (self.mixture and self.buckets, "data.mixture and data.buckets exclude each other: leave one of them out"),
            (self.held_out == 1, "data.held_out=1 leaves nothing to train on: give a share below 1"),
            (
                self.held_out and self.held_out_path,
                f"data.held_out={self.held_out} and data.held_out_path="
                f"{self.held_out_path} both name held-out images: give one of the two",
            ),
        )
        return self

    def list_sources(self) -> tuple[Self, ...]:
        """Returns a section `data` for each source of data.mixture; () without a mixture. Entries that a source leaves
        out come from this section, except held_out, which is 0 for built-in sources and for those with held_out_path.
        """
        return tuple(
            self.model_copy(
                update={
                    "mixture": None,
                    "path": source.path,
                    "held_out_path": source.held_out_path,
                    "captions": source.captions,
                    "held_out": (
                        source.held_out
                        if source.held_out is not None
                        else 0.0
                        if source.held_out_path or source.path.startswith("builtin:")
                        else self.held_out
                    ),
                }
            )
            for source in self.mixture or ()
        )

    def list_mixture_checks(self) -> list[tuple[Any, str]]:
        """Lists the checks of data.mixture as (whether it has failed, message), for `_raise_failed_checks`."""
        if self.mixture is None:
            return []
        if not self.mixture:
            remedy = "name its sources, [{path: A, weight: 3}, {path: B, weight: 1}], or leave it out"
            return [(True, f"data.mixture=[]: {remedy}")]
        paths = [os.path.normpath(source.path) for source in self.mixture]
        weighted = [source.path for source in self.mixture if source.weight is not None]
        both = [source.path for source in self.mixture if source.held_out and source.held_out_path]
        return [
            (len({*paths}) < len(paths), f"data.mixture names {max(paths, key=paths.count)} twice: name it once"),
            (
                0 < len(weighted) < len(paths),
                f"data.mixture: {', '.join(weighted[:1])} has a weight, and others have "
                "none: give all of them weights, or none, and they are drawn by the numbers of their samples",
            ),
            (both, f"data.mixture: {', '.join(both[:1])} has held_out and held_out_path: give one of the two"),
            (
                self.held_out_path,
                f"data.held_out_path={self.held_out_path}: with data.mixture, write held_out_path "
                "into the source that it belongs to",
            ),
            (
                self.captions or self.images,
                "data.captions and data.images: with data.mixture, write captions into the "
                "source, and a folder of images as one more source",
            ),
        ]


class BatchSize(Section):
    global_: Annotated[int, FIXED] = Field(64, alias="global", gt=0, le=2**24)  # samples of a step, on all ranks
    micro: PositiveInt | None = None  # samples for each rank and forward pass; None: global / world size

    @model_validator(mode="after")
    def _require_consistent_values(self) -> "BatchSize":
        _raise_failed_checks(
            (
                self.micro and self.global_ % self.micro,
                f"batch.global={self.global_} is no multiple of batch.micro="
                f"{self.micro}: micro-batches that fit are {format_divisors(self.global_)}",
            )
        )
        return self


class Parallel(Section):
    # Ranks that share each sample, for sequences longer than one GPU holds: they cut its tokens, and exchange them for
    # heads around attention (Ulysses).
    sequence: PositiveInt = 1


class Optimizer(Section):
    name: Literal["adamw", "muon", "adamw8bit", "lion"] = "adamw"  # what each is: dstrain/engine/optimizers.py
    lr: NonNegative = 1e-4  # peak learning rate; muon takes that of adamw, lion a third to a tenth
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)  # of the moments; lion is published with 0.9, 0.99
    momentum: Fraction = 0.95  # of muon's matrices
    eps: NonNegative = 1e-8  # added to AdamW's denominator
    weight_decay: NonNegative = 0.0  # decoupled; on what System.has_weight_decay names
    clip: NonNegative = 0.0  # global gradient norm is scaled down to this; 0 is none
    warmup: Count = 0  # steps of linear growth from 0 to lr
    schedule: Literal["constant", "cosine", "linear"] = "constant"  # after the warm-up
    final_lr: NonNegative = 0.0  # where cosine and linear end
    decay_steps: Annotated[PositiveInt | None, MAY_CHANGE] = None  # step at which final_lr is reached; None: the last
    # Factors of lr for weights by pattern, as train_only has them; of several that fit, the first: {"blocks.0.*": 0.1}
    rates: dict[Pattern, Annotated[float, Field(gt=0, le=1e3)]] = {}

    @model_validator(mode="after")
    def _require_consistent_values(self) -> "Optimizer":
        _raise_failed_checks(
            (max(self.betas) >= 1, f"optimizer.betas={list(self.betas)} must lie below 1, for example [0.9, 0.999]"),
            (self.momentum == 1, "optimizer.momentum=1 must lie below 1, for example 0.95"),
            (
                self.final_lr > self.lr,
                f"optimizer.final_lr={self.final_lr:g} is above optimizer.lr={self.lr:g}: the "
                "schedules only go down; lower final_lr or raise lr",
            ),
            (
                self.decay_steps and self.warmup >= self.decay_steps,
                f"optimizer.warmup={self.warmup} is not below "
                f"optimizer.decay_steps={self.decay_steps}: shorten the warm-up",
            ),
        )
        return self

    def find_lr_factor(self, part: str, name: str) -> float:
        """Returns the factor on a weight's learning rate: that of the first matching pattern in `rates`, else 1."""
        return next((rate for pattern, rate in self.rates.items() if matches_weight_pattern(pattern, part, name)), 1.0)

    def compute_lr(self, step: int, steps: int) -> float:
        """Returns the learning rate of the update after `step` of `steps` updates: warm-up, then the schedule."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        end = self.decay_steps or steps
        progress = min((step - self.warmup) / max(end - self.warmup, 1), 1.0)
        weight = 1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.final_lr + (self.lr - self.final_lr) * weight


class Ema(Section):
    decays: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = (0.9999,)  # one shadow for each; () is none
    warmup: bool = False  # effective decay min(decay, (1 + step) / (10 + step))
    # Power-function averages by their relative width, ema/profiles.py: [0.05, 0.10], say, and snapshots of them, of
    # which dstrain reconstruct makes those of any width. One shadow for each; () is none.
    profiles: tuple[Annotated[float, Field(ge=0.001, le=WIDEST)], ...] = ()
    snapshots: Annotated[Count, MAY_CHANGE] = 0  # one in so many steps, and of the last; 0 is never
    snapshot_precision: Annotated[Literal["fp32", "bf16"], MAY_CHANGE] = "fp32"  # bf16: see docs/guides/reconstruct.md

    @property
    def decays_and_widths(self) -> tuple[float, ...]:
        """Returns the numbers by which --ema chooses an average: the decays, then the relative widths (up to 0.288)."""
        return (*self.decays, *self.profiles)

    @model_validator(mode="after")
    def _require_consistent_values(self) -> "Ema":
        repeated = {
            name: sorted({value for value in values if values.count(value) > 1})
            for name, values in (("decay", self.decays), ("profile", self.profiles))
        }
        _raise_failed_checks(
            *(
                (values, f"ema.{name}s={list(getattr(self, f'{name}s'))} holds {values} twice: name each {name} once")
                for name, values in repeated.items()
            ),
            (
                self.profiles and min(self.decays, default=1) <= WIDEST,
                f"ema.decays={list(self.decays)}: with "
                f"ema.profiles, --ema takes a number up to {WIDEST} for a width: leave so short a decay out",
            ),
            (
                self.snapshots and not self.profiles,
                f"ema.snapshots={self.snapshots} keeps averages of ema.profiles, "
                "which is empty: write ema.profiles=[0.05,0.10]",
            ),
        )
        return self

    def compute_effective_decay(self, decay: float, step: int) -> float:
        """Returns the decay after `step` updates: `decay`, or with ema.warmup min(decay, (1 + step) / (10 + step))."""
        return min(decay, (1 + step) / (10 + step)) if self.warmup else decay


class Every(Section):
    """Intervals in optimizer steps; 0 is never (the last step is always saved)."""

    report: Count = 50  # a line of metrics.jsonl, the means since the last one
    sample: Count = 500  # a grid of samples
    evaluate: Count = 500  # the held-out loss
    evaluate_samples: Count = 0  # held-out samples of an evaluation, evenly spaced; 0 is all
    metrics: Count = 0  # samples.metrics of samples.metrics_samples drawn pictures, from each EMA
    save: Count = 500  # a checkpoint
    report_page: Count = 5000  # report.html, and also after the last step; a process of its own writes it

    @field_validator("report", "sample", "evaluate", "metrics", "save", "report_page", mode="before")
    @classmethod
    def _refuse_null(cls, value: Any) -> Any:
        if value is None:
            raise PydanticCustomError("never", "it should be a number of steps; 0 is never")
        return value


class Save(Section):
    # fragments resume at any stage and number of ranks; deepspeed writes DeepSpeed's own files, for its tools.
    format: Literal["fragments", "deepspeed"] = "fragments"
    keep: Annotated[int, Field(ge=2)] = 2  # newest checkpoints kept; two, so that a damaged one has a predecessor
    keep_every: Count = 0  # also keep every checkpoint whose step is a multiple; 0 is none
    # Also save and keep the EMA's best step: true is the lowest held-out loss; a metric is one of samples.metrics, of
    # fd and other distances the lowest, of accuracy and clip_score the highest.
    best: bool | str = False
    asynchronous: bool = True  # training waits for a copy in the host's memory only; not with deepspeed


class Samples(Section):
    """The grid drawn during training, always from the same seeds and labels."""

    num: Annotated[int, Field(gt=0, le=100_000)] = 40  # samples of a grid
    labels: tuple[Count, ...] | None = None  # repeated to `num`; None: every class in turn
    prompts: tuple[str, ...] | None = None  # texts, repeated to `num`, for a system that takes them
    negative_prompt: str | None = None  # what guidance leads away from, instead of the null text; of a system that
    # takes one
    num_frames: PositiveInt | None = None  # of videos; None: the model's
    size: Shape | None = None  # width and height of pictures; None: image_size
    sampler: str | None = None  # None: the usual one of the system
    num_steps: PositiveInt = 50  # network evaluations for each picture
    guidance_scale: NonNegative = 1.0  # 1 is none
    guidance_rescale: Fraction = 0.0  # share by which guided predictions get the deviation of plain ones
    guidance_interval: tuple[NonNegative, NonNegative] | None = None  # noise levels sigma / alpha; None: all
    spacing: Literal["leading", "trailing", "linspace", "karras"] | None = None  # None: the sampler's usual
    eta: NonNegative | None = None  # noise of a step; None: the sampler's usual
    seed: Count = 0  # sample i is a function of seed + i
    ema: float | None = None  # decay or width of the EMA to draw from; None: the first
    # For every.metrics: metrics and networks as of dstrain evaluate, see dstrain/metrics/in_training.py. None: fd and
    # accuracy of the built-in data, as far as the model has labels or captions; of other data fid (clips: fvd) with
    # `reference`, else nothing.
    metrics: tuple[str, ...] | None = None
    features: tuple[str, ...] = ()  # KIND:PATH of networks; fd and accuracy have one built in
    metrics_samples: Annotated[int, Field(ge=2)] = 500  # drawn, of all classes or captions in turn
    metrics_split: Literal["train", "held_out"] = "train"  # the data that they are compared with
    reference: str | None = None  # instead of these: statistics (.npz, .pkl), images (.npz), or a path as data.path

    @field_validator("reference")
    @classmethod
    def _expand_home(cls, path: str | None) -> str | None:
        return path if path is None else expand_home_in_path(path)

    @model_validator(mode="after")
    def _require_consistent_values(self) -> "Samples":
        _raise_failed_checks(
            (self.labels == (), "samples.labels=[] names no label: give some, or null for every class in turn"),
            (
                self.prompts is not None and not all(text.strip() for text in self.prompts or ("",)),
                "samples.prompts="
                f"{list(self.prompts or ())} holds no text, or an empty one: give texts, or null for none",
            ),
            (
                self.guidance_interval and self.guidance_interval[0] > self.guidance_interval[1],
                f"samples.guidance_interval={list(self.guidance_interval or ())}: write the lower noise level first",
            ),
            (self.labels and self.prompts, "samples.labels and samples.prompts are both given: give one of the two"),
            (
                self.negative_prompt is not None and self.guidance_scale == 1,
                "samples.negative_prompt: guidance leads away from it, and samples.guidance_scale=1 is none: give a "
                "scale above 1, or leave it out",
            ),
        )
        return self


class Track(Section):
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"  # auto: online with a key, offline without
    project: str = "dstrain"  # of wandb
    entity: str | None = None  # of wandb; None: the usual one of the account
    tags: tuple[str, ...] = ()  # of the run in wandb, beside its name
    group: str | None = None  # wandb shows runs of one group together
    notes: str | None = None  # on the run, for a person
    tensorboard: bool = False  # also write event files for TensorBoard
    artifact: bool = False  # log the trained model to wandb at the end, as an artifact


class Faults(Section):
    max_skipped: PositiveInt = 20  # non-finite steps in a row; one more is trouble: engine/recovery.py
    spike: Annotated[float | None, Field(gt=1)] = None  # a loss above so many running medians is trouble; None: none
    max_rollbacks: Count = 3  # times that a run goes back from trouble, before it ends; 0: none
    orphan_check: bool = True  # save and end when the launcher has gone
    # A rank that waits longer for another ends. Listing data, compiling and saving, while others wait, take less.
    timeout_minutes: Annotated[float, Field(gt=0, le=10080)] = 30
    hang_factor: NonNegative = 20  # times the median step, after which a step hangs; 0: only the timeout
    hang_seconds: NonNegative = 300  # and no step hangs before

    @model_validator(mode="after")
    def _require_consistent_values(self) -> "Faults":
        _raise_failed_checks(
            (
                0 < self.hang_factor < 1,
                f"faults.hang_factor={self.hang_factor:g}: a step that takes less than "
                "usual does not hang: write a number above 1, or 0 for faults.timeout_minutes alone",
            )
        )
        return self


class Run(Section):
    # The run's name, and the folder's in runs/.
    name: str = Field("dit-small", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    system: Annotated[str, FIXED] = "dit"  # a folder of dstrain/systems/, or a package of your own: my_lab.edm
    folder: Path | None = None  # None: runs/NAME
    steps: PositiveInt = 1000  # optimizer steps in all; may grow between runs
    seed: Annotated[Count, FIXED] = 0  # of data order, noise and initial weights
    init_from: Path | None = None  # weights to start from: a published file or a run
    # Patterns of the weights that learn, such as "blocks.*.attn.*"; * takes dots, too. Of several networks PART/PATTERN
    # names one. The others stay as init_from has them. None: all learn, or with model.lora its adapters alone; these
    # learn in any case.
    train_only: Annotated[tuple[Pattern, ...] | None, FIXED] = None
    compile: Literal["auto", "on", "off"] = "auto"  # the repeated block; auto: on a GPU
    channels_last: bool = False  # images enter the networks as NHWC, which GPUs convolve faster
    model: Annotated[dict[str, Any], FIXED] = Field(default_factory=dict)  # the system's own section, its Config
    data: Data = Data()
    batch: BatchSize = BatchSize()
    parallel: Parallel = Parallel()
    optimizer: Annotated[Optimizer, FIXED] = Optimizer()
    ema: Annotated[Ema, FIXED] = Ema()
    every: Every = Every()
    save: Save = Save()
    samples: Samples = Samples()
    track: Track = Track()
    faults: Faults = Faults()

    @property
    def directory(self) -> Path:
        """Returns the folder of the run's checkpoints, samples and logs."""
        return self.folder or Path("runs") / self.name

    @field_validator("folder", "init_from", mode="before")
    @classmethod
    def _expand_home(cls, path: Any) -> Any:
        return expand_home_in_path(str(path)) if isinstance(path, (str, Path)) else path

    @model_validator(mode="after")
    def _require_consistent_values(self) -> "Run":
        ema, profiles = self.samples.ema, list(self.ema.profiles)
        given = {"train_only": self.train_only, "model.lora": self.model.get("lora")}
        freezes = next((key for key, value in given.items() if value is not None), None)
        _raise_failed_checks(
            (self.train_only == (), "train_only=[] lets nothing learn: name patterns, or leave it out"),
            (
                freezes and self.save.format == "deepspeed",
                f"{freezes}: no tool reads frozen weights in DeepSpeed's own files: write save.format=fragments",
            ),
            (
                freezes and self.ema.snapshots,
                f"{freezes}: ema.snapshots keeps no weights that are frozen: write ema.snapshots=0",
            ),
            (
                ema is not None and ema not in self.ema.decays_and_widths,
                f"samples.ema={ema} is none of ema.decays="
                f"{list(self.ema.decays)}{f' and ema.profiles={profiles}' if profiles else ''}: choose one of them, or "
                "add it to ema.decays",
            ),
            (
                self.save.format == "deepspeed" and self.optimizer.name != "adamw",
                "save.format=deepspeed holds "
                f"the moments of adamw, not of {self.optimizer.name}: write save.format=fragments",
            ),
            (
                self.save.best is True and not self.every.evaluate,
                "save.best=true needs held-out losses: set every.evaluate",
            ),
            (
                isinstance(self.save.best, str)
                and not (
                    self.every.metrics and (self.samples.metrics is None or self.save.best in self.samples.metrics)
                ),  # None: all of the set
                f"save.best={self.save.best} needs that metric: set every.metrics, and name it in samples.metrics",
            ),
            (
                self.every.metrics and self.samples.metrics == (),
                f"every.metrics={self.every.metrics}: samples.metrics "
                "names none: write samples.metrics=[fd], say, or every.metrics=0",
            ),
        )
        return self
