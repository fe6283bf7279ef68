"""What a system is: the contract between one generative model and everything else. Read this to add one.

A system is one generative model in plain torch: its networks, their losses, its sampler. It says what is learned and
never how it is sharded, so it knows no rank, no engine and no file. A system is a package with two names:

    Config          a SystemConfig: the `model` section of a recipe, a documented field for each choice
    build(config)   the System of a config

Nothing has to be registered. A system is a folder in dstrain/systems/ with a system.py, a package of your own that the
recipe names (`system: my_lab.edm`), or an entry point of the group `dstrain.systems`. All commands then work
with it as with every system. tests/newcomer/ holds two whole systems of about a hundred lines each.

A *part* is a network with an optimizer of its own. A *turn* is the moment within a step at which a part learns.

What sharding asks of a system:
- It touches weights only by calling networks: under ZeRO-3 they are gathered for the call alone. `nets` maps a part to
  a DeepSpeed engine, or to a bare module where samples are drawn.
- Inputs of networks are float32 (images, noise) or int64 (labels, ids); weights may be bfloat16 or float16. A network
  casts what enters to the precision of its weights, `x.to(self.enter.weight.dtype)`, and a loss computes in float32.
- It draws all randomness from `example["key"]`, by dstrain.rng. So noise belongs to a sample and not to a rank.
- A parameter learns, unless its requires_grad is False or the recipe's train_only leaves it out: then it is sharded
  and saved, and has no moments and no average. What is never saved is a network of its own in `frozen()`.
- A loss is a mean over samples. No term of a sample depends on another sample.
- Constructors may set weights in any way, those of their children too (`nn.init.zeros_(self.out.weight)`,
  `self.apply(init)`). Training then starts from exactly `torch.manual_seed(run.seed); networks()` of plain torch, at
  every stage; every rank then begins with the networks whole, and at stage 3 the log says so. For a large network let
  each module that owns weights or buffers set all of them in its `reset_parameters(self)`, called in its constructor,
  and let nobody change them afterwards, as torch's own layers and nn/layers.py do: no rank then holds more than its
  share, resuming draws nothing, and the weights are a function of (seed, name). Set what `reset_parameters` reads
  before it is called.
- What a user can mend is a ConfigError with field and remedy. Any other exception is a bug and shows its traceback.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from dstrain.recipe import MAY_CHANGE, ConfigError, Recompute, Run, Section, format_divisors
from dstrain.systems.optional import CHOICES, Figures, FirstStage, Imports, Prompted, Sampling, Stateful, Videos
from dstrain.systems.types import Batch, Example, Kind, Loss, Nets, Progress, Request, Terms

__all__ = [
    "CHOICES",
    "Batch",
    "Example",
    "Kind",
    "Loss",
    "Nets",
    "Progress",
    "Request",
    "System",
    "SystemConfig",
    "Terms",
]


class SystemConfig(Section):
    """The `model` section of a recipe. The docstring below a field is its description.

    A resumed run must keep the value of a field, unless the field is marked Annotated[..., MAY_CHANGE], see
    recipe/section.py.
    """

    learns_from: ClassVar[tuple[Kind, ...]] = ("images",)  # which data the system takes
    num_labels_field: ClassVar[str] = "num_classes"  # the field that is the number of labels, for messages
    without_labels: ClassVar[str] = ""  # the override that makes a model learn none, if any
    learns_durations: ClassVar[bool] = False  # batches of clips may differ in their number of frames
    adapters_field: ClassVar[str | None] = None  # the field of adapters (nn/lora.py), which an export merges
    unshared: ClassVar[str] = "this system cuts no tokens"  # why ranks cannot share a sample

    recompute: Annotated[Recompute, MAY_CHANGE] = "none"
    """What the repeated blocks compute again in backward instead of keeping it: none; attention, all but products with
    weights; all; offload, all with each block's input in the host's memory; or a number k, all of every k-th block."""

    @classmethod
    def complete_section(cls, model: dict[str, Any], run: Run) -> dict[str, Any]:
        """Fills in the fields that `model`, the section of a recipe, leaves out, from the rest of the recipe, such as
        the image size. Returns the section, which is saved in the run's folder. By default returns it unchanged.

        `run.data.codes` describes the cache that the data are read from; None if the data are no cache.
        """
        return model

    @classmethod
    def complete_saved_section(cls, model: dict[str, Any]) -> dict[str, Any]:
        """Returns `model`, the section of a saved run.yaml, with values for fields that older versions of dstrain did
        not write, so that old runs go on unchanged. By default returns it as it is.
        """
        return model

    @classmethod
    def drop_missing_networks(cls, run: Run) -> tuple[Run, str]:
        """Returns the run for `dstrain plan`, without frozen networks whose files are missing on this machine, if it
        trains the same networks without them; and a note for the user about them, or "". By default returns the run
        unchanged and "".
        """
        return run, ""

    def list_conflicts(self, run: Run) -> list[str]:
        """Returns an error message for each conflict between this section and the rest of the recipe, with the keys and
        the remedy; [] if there are none, as by default.
        """
        return []

    def list_conflicts_at_stage(self, stage: int) -> list[str]:
        """Returns an error message for each reason why this section cannot be trained at a ZeRO stage, 0 to 3; [] by
        default.
        """
        return []

    def list_conflicts_among_ranks(self, ranks: int) -> list[str]:
        """Returns an error message for each reason why `ranks` ranks cannot share the tokens of a sample
        (parallel.sequence); [] if they can. By default returns a message that the system shares no tokens. A system
        whose networks can share tokens returns the result of list_indivisible_counts.
        """
        return [
            f"parallel.sequence={ranks}: {self.unshared}, and the systems that share tokens are dit, phenaki and "
            "phenaki.tokenizer; write parallel.sequence=1"
        ]

    @property
    def num_labels(self) -> int | None:
        """Returns the number of classes on which samples are conditioned; None if the model reads no labels. The data
        must have as many classes. For a single class the data need no labels.
        """
        return None

    @property
    def reads_texts(self) -> bool:
        """Returns whether samples are conditioned on texts, so that data are read with their captions."""
        return False

    @classmethod
    def replace_encoders(
        cls, model: dict[str, Any], text_encoder: str | None = None, tokenizer: str | None = None
    ) -> dict[str, Any]:
        """Returns `model`, the section of a recipe, with other folders or hub names for its frozen networks. These are
        the values of the options --text-encoder and --tokenizer of `dstrain generate`; None if an option is not given.
        Raises ConfigError if an option is given that the model has no use for.
        """
        if text_encoder is not None:
            raise ConfigError("--text-encoder: the model takes no texts; leave it out")
        if tokenizer is not None:
            raise ConfigError("--tokenizer: the model decodes no tokens; leave it out")
        return model

    def list_unequal_fields(self, run: Run, **fields: str) -> list[str]:
        """Compares fields of the run's data with fields of this section: the keyword argument KEY="FIELD" compares
        data.KEY with model.FIELD. Returns an error message for each pair that differs; [] if none does. For use in
        `list_conflicts`.
        """
        pairs = ((key, getattr(run.data, key), field, getattr(self, field)) for key, field in fields.items())
        return [
            f"data.{key}={of_data} and model.{field}={of_model} differ: make both equal"
            for key, of_data, field, of_model in pairs
            if of_data != of_model
        ]


def list_indivisible_counts(ranks: int, counts: Mapping[str, int]) -> list[str]:
    """Returns an error message for each number in `counts` that cannot be divided by `ranks`; [] if all can. The keys
    of `counts` say what is counted. For use in `list_conflicts_among_ranks`.
    """
    fits = format_divisors(math.gcd(*counts.values()))
    return [
        f"parallel.sequence={ranks} does not divide the {count} {what}: what works is {fits}"
        for what, count in counts.items()
        if count % ranks
    ]


_RENAMED = {
    "completed": "complete_section",
    "recorded": "complete_saved_section",
    "without_files": "drop_missing_networks",
    "conflicts": "list_conflicts",
    "conflicts_at": "list_conflicts_at_stage",
    "conflicts_among": "list_conflicts_among_ranks",
    "with_encoders": "replace_encoders",
    "workload": "measure_workload",
    "accepts": "require_usable_source",
    "decays": "has_weight_decay",
    "blocks": "list_block_classes",
    "cannot_draw": "find_drawing_problem",
    "conditions": "make_conditions",
    "digest": "compute_figures",
    "pictures": "make_pictures",
    "codes": "compute_codes",
    "identity": "describe_identity",
    "adapt": "adapt_weights",
    "conditions_to_avoid": "make_negative_prompt_conditions",
    "require_expressible": "require_expressible_in_diffusers",
}


def require_current_method_names(name: str, user_class: type) -> None:
    """Raises ConfigError if `user_class`, the Config or the System class of the system `name`, has a method under the
    name that it had in version 0.2.0. It would never be called.
    """
    for old, new in _RENAMED.items():
        if callable(getattr(user_class, old, None)):
            raise ConfigError(
                f"system: {user_class.__name__} of {name} has a method `{old}`, which is called `{new}` now: rename it"
            )


class System(Figures, Stateful, Prompted, Sampling, Videos, FirstStage, Imports, ABC):
    """One generative model. The members below are those of every system; optional.py has the optional ones."""

    parts: dict[str, Loss]  # trained networks and their losses, in update order
    averaged: tuple[str, ...]  # parts that have an EMA
    samplers: tuple[str, ...] = ()  # what Request.sampler may be, the usual one last; () is no choice
    generates: bool = True  # whether training draws grids of `sample`, that is, of pictures
    num_labels: int | None = None  # the config's, set by systems.build

    @abstractmethod
    def networks(self) -> dict[str, nn.Module]:
        """Builds the networks with new weights, and returns them by the names of `parts`. The caller may have set the
        meta device as the default, for all tensors or for parameters alone.
        """

    @abstractmethod
    def synthetic(self, batch_size: int) -> Batch:
        """Returns a batch of random content in the right shapes, for benchmarks, exports and tests."""

    def sample(self, nets: Nets, request: Request) -> Tensor:
        """Draws one sample for each seed of the request: uint8 images (N, C, H, W) or videos (N, T, C, H, W), or
        float32 embeddings (N, D). By default raises ConfigError.
        """
        raise ConfigError(f"a {type(self).__name__} draws no samples")

    def encode(self, batch: Batch) -> Example:
        """Converts a batch of data to the example that the losses read. By default replaces "image", uint8, by
        "x_start", float32 in [-1, 1], and keeps all other tensors. No gradient flows through the example.
        """
        example = {name: tensor for name, tensor in batch.items() if name != "image"}
        example["x_start"] = batch["image"].float() / 127.5 - 1
        return example

    def loss(self, part: str, nets: Nets, example: Example) -> Terms:
        """Returns the terms of a part's loss on an example, with `loss`, the scalar to minimize, among them."""
        return self.parts[part](nets, example)

    def evaluate(self, nets: Nets, example: Example) -> Terms:
        """Scores held-out samples. Returns terms by name, (B,) each, with `loss` among them; curves (B, K) are allowed,
        too.

        By default returns the terms of the first part's loss, without scalars, and with loss_each as `loss`. Raises
        ConfigError if that loss returns no loss_each. Examples of held-out data have no `step`.
        """
        terms = self.loss(next(iter(self.parts)), nets, example)
        if "loss_each" not in terms:
            raise ConfigError(
                f"{type(self).__name__}: held-out data are measured by loss_each (B,), which the loss "
                "does not return: return it, or write `evaluate`"
            )
        by_sample = {name: term for name, term in terms.items() if term.ndim}
        loss = by_sample.pop("loss_each")
        return by_sample | {"loss": loss}

    def turns(self, step: int) -> tuple[str, ...]:
        """Returns the names of the parts that learn at `step`, in order. By default all. Training calls it once a step,
        before `encode`, which may shape its example by the step.
        """
        return tuple(self.parts)

    def measure_workload(self, step: int) -> tuple[int, ...]:
        """Returns a tuple of numbers that is larger for steps that need more operations, and equal only for steps that
        need equally many. By default the number of parts that learn.
        """
        return (len(self.turns(step)),)

    def make_conditions(self, num: int, labels: tuple[int, ...] | None = None) -> dict[str, Tensor]:
        """Returns conditions for `num` samples, {name: tensor (num, ...)}. By default {"label": int64 (num,)}, which
        repeats `labels`, or all classes if `labels` is None; {} if the model has no classes. Raises ConfigError if a
        label is no class.
        """
        self.require_labels(labels or ())
        if self.num_labels is None:
            return {}
        classes = torch.tensor(labels or tuple(range(self.num_labels)))
        return {"label": classes.repeat(-(-num // len(classes)))[:num]}

    def require_labels(self, labels: Iterable[int]) -> None:
        """Raises ConfigError if a label is not the number of a class, or if labels are given and the model has no
        classes.
        """
        unknown = sorted(label for label in set(labels) if not 0 <= label < (self.num_labels or 0))
        if unknown and self.num_labels is None:
            raise ConfigError(f"labels: a {type(self).__name__} of this model section knows no classes; leave them out")
        if unknown:
            raise ConfigError(
                f"labels: {unknown} are not among the {self.num_labels} classes, 0 to {self.num_labels - 1}: choose "
                "others, or train with more classes"
            )

    def require_usable_source(self, source: Any) -> None:
        """Raises ConfigError if the samples of a data source do not fit the model; called before the training starts.
        By default does nothing.
        """

    def fingerprint(self, source: Any) -> str:
        """Returns a text that changes if the training data change, so that a resumed run notices it. By default the
        source's own hash. A system adds hashes of whatever else its samples depend on, such as the encoder of captions.
        """
        return source.compute_fingerprint()

    def has_weight_decay(self, name: str, weight: Tensor) -> bool:
        """Returns whether weight decay applies to the weight `name`. By default it applies to weights of two or more
        axes (matrices, filters), not to biases and gains.
        """
        return weight.ndim >= 2

    def list_block_classes(self) -> tuple[type[nn.Module], ...]:
        """Returns the classes of the networks' repeated blocks, which are compiled and recomputed one by one; () by
        default. The first argument of a block must be the output of the block before it.
        """
        return ()

    def frozen(self) -> tuple[nn.Module, ...]:
        """Returns the frozen networks: they are moved to the device, but never trained, averaged or saved. () by
        default.
        """
        return ()

    def find_drawing_problem(self) -> str | None:
        """Returns the reason why `sample` cannot be called, with the remedy; None if it can be called."""
        return None if type(self).sample is not System.sample else f"a {type(self).__name__} draws no samples"

    def choose_sampler(self, name: str | None, key: str = "sampler") -> str:
        """Returns `name` if it is one of `samplers`. For None returns the last of `samplers`, which is the default, or
        "" if there is no choice. Raises ConfigError, whose message begins with `key`, for any other name.
        """
        if name is None:
            return self.samplers[-1] if self.samplers else ""
        if not self.samplers:
            raise ConfigError(f"{key}={name}: a {type(self).__name__} has one way to draw; leave it out")
        if name not in self.samplers:
            raise ConfigError(f"{key}={name} is none of {', '.join(self.samplers)}: name one of them")
        return name


def require_valid_attributes(name: str, system: System) -> None:
    """Raises ConfigError if `averaged`, `samplers`, `sampling` or `watched` of the system `name` is no tuple or list of
    strings, or `parts` is no dict or is empty.
    """
    for member in ("averaged", "samplers", "sampling", "watched"):
        names = getattr(system, member, None)
        if not isinstance(names, (tuple, list)) or not all(isinstance(item, str) for item in names):
            example = repr((names if isinstance(names, str) else "name",))
            raise ConfigError(f"system: {member} of {name} is {names!r}: write a tuple of names, such as {example}")
    if not isinstance(getattr(system, "parts", None), dict) or not system.parts:
        raise ConfigError(f"system: {name} has no parts: set the dict of its trained networks and their losses")
