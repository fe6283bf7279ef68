"""The conditions of a DiT: times, labels, sizes, image embeddings and texts, each embedded as vectors of width D, or as
tokens.

The modules here embed conditions in the network. A Condition reads one of them from batches and requests for the
system.

B samples, D = dim. Weights start as published: normal(0.02), and zero for the last map of a condition that is added to
a network which was trained without it.
"""

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain import rng
from dstrain.encoders.reader import Reader, TextInputs, draw_synthetic_texts, select_text_inputs
from dstrain.nn.layers import Embedding, Linear, compute_timestep_features
from dstrain.nn.tokens import RMSNorm
from dstrain.recipe import ConfigError
from dstrain.recipe.shapes import Shape
from dstrain.systems.base import Batch, Example, Request

ForwardArguments = dict[str, Tensor]
NEGATIVE = "negative_"  # stands before the names of a negative prompt's inputs in a request
TIME_FEATURES = 256  # number of sinusoids of a timestep, or of random frequencies


class TimestepEmbedder(nn.Module):
    """Embeds times (B,) as (B, D). Computes the sinusoids in float32, since bfloat16 cannot tell timesteps apart.

    time_freq   official; diffusers, whose frequencies are spaced a little wider; or fourier, random frequencies of a
                normal distribution, drawn from a fixed seed and never trained.
    """

    def __init__(self, dim: int, time_freq: str) -> None:
        super().__init__()
        if time_freq not in ("official", "diffusers", "fourier"):
            raise ConfigError(f"time_freq: {time_freq!r} is unknown; one of official, diffusers, fourier")
        self.shift = int(time_freq == "diffusers")
        features = TIME_FEATURES
        if time_freq == "fourier":
            features *= 2
            # .float(), since zero.Init would create it in the compute dtype.
            self.register_buffer("W", torch.empty(TIME_FEATURES).float())
            self.reset_parameters()
        self.mlp = nn.Sequential(Linear(features, dim, init="normal"), nn.SiLU(), Linear(dim, dim, init="normal"))

    def reset_parameters(self) -> None:
        """Sets the random frequencies `W` from a fixed seed. Does nothing unless time_freq=fourier, since only then `W`
        exists.
        """
        if hasattr(self, "W"):
            with torch.no_grad():
                self.W.copy_(torch.from_numpy(np.random.default_rng(0).standard_normal(TIME_FEATURES)))

    def _apply(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Applies `change` to all tensors, as nn.Module does, but keeps the frequencies `W` in float32 when the network
        is cast to bfloat16 or float16.
        """
        frequencies = getattr(self, "W", None)
        super()._apply(change, recurse)
        if frequencies is not None and self.W.dtype in (torch.bfloat16, torch.float16):
            self.W = frequencies.to(self.W.device)
        return self

    def forward(self, t: Tensor) -> Tensor:
        if hasattr(self, "W"):
            angles = 2 * math.pi * t[:, None].to(self.W.dtype) * self.W
            features = torch.cat((angles.sin(), angles.cos()), dim=1)
        else:
            features = compute_timestep_features(t, TIME_FEATURES, shift=self.shift)
        return self.mlp(features.to(self.mlp[0].weight.dtype))


class SizeEmbedder(nn.Module):
    """Embeds int64 (B, 6) as (B, D): the original height and width of an image, the top and left of its crop, and the
    crop's height and width, all in pixels. This is SDXL's micro-conditioning (Podell et al. 2023). Its output begins as
    zero.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        first, last = Linear(6 * TIME_FEATURES, dim, init="normal"), Linear(dim, dim, init="zero")
        self.mlp = nn.Sequential(first, nn.SiLU(), last)

    def forward(self, size: Tensor) -> Tensor:
        features = compute_timestep_features(size.flatten(), TIME_FEATURES).view(len(size), -1)  # (B, 6 x 256)
        return self.mlp(features.to(self.mlp[0].weight.dtype))


class SidesEmbedder(nn.Module):
    """Embeds three numbers, each in a third of (B, D): the original height and width of an image, and height / width of
    its crop, read from int64 (B, 6) as in SizeEmbedder (PixArt-alpha's network of 1,024 pixels, Chen et al. 2023). Its
    output begins as zero.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.sides, self.ratio = (
            nn.Sequential(
                Linear(TIME_FEATURES, dim // 3, init="normal"), nn.SiLU(), Linear(dim // 3, dim // 3, init="zero")
            )
            for _ in range(2)
        )

    def forward(self, size: Tensor) -> Tensor:
        numbers = torch.cat((size[:, :2].float(), size[:, 4:5] / size[:, 5:6]), dim=1)  # (B, 3)
        features = compute_timestep_features(numbers.flatten(), TIME_FEATURES).unflatten(0, numbers.shape)
        features = features.to(self.sides[0].weight.dtype)
        return torch.cat((self.sides(features[:, :2]).flatten(1), self.ratio(features[:, 2])), dim=1)


SIZE_EMBEDDERS = {"sdxl": SizeEmbedder, "pixart": SidesEmbedder}


class PooledText(nn.Module):
    """Embeds the pooled vector of a text, `width` values, as (B, D).

    num_words  None: the text is float (B, L, E), and its first row begins with the pooled vector. The vector is zeros
               where the first entry of the mask is False (SD3). Else the text is ids of hashed words, int64 (B, L), and
               the vector is the mean of their rows in a learned table of num_words rows (as Imagen pools its text). It
               is zeros if no word is read.
    """

    def __init__(self, width: int, dim: int, num_words: int | None = None) -> None:
        super().__init__()
        self.width = width
        self.words = Embedding(num_words, width) if num_words else None
        self.mlp = nn.Sequential(Linear(width, dim, init="normal"), nn.SiLU(), Linear(dim, dim, init="normal"))

    def forward(self, text: Tensor, mask: Tensor | None) -> Tensor:
        """Returns vectors (B, D) for texts (B, L, E) or (B, L). mask: bool (B, L); None: all True."""
        if mask is None:
            mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
        if self.words is None:
            pooled = text[:, 0, : self.width] * mask[:, :1]
        else:
            read = mask[..., None].to(self.words.weight.dtype)
            pooled = (self.words(text) * read).sum(1) / read.sum(1).clamp(min=1)
        return self.mlp(pooled.to(self.mlp[0].weight.dtype))


class ImageEmbedder(nn.Module):
    """Embeds image embeddings (B, E), zeros for none, as (B, D). Brings each to length sqrt(E) first, so that only its
    direction counts. Its output begins as zero.
    """

    def __init__(self, embedding_dim: int, dim: int) -> None:
        super().__init__()
        first, last = Linear(embedding_dim, dim, init="normal"), Linear(dim, dim, init="zero")
        self.mlp = nn.Sequential(first, nn.SiLU(), last)

    def forward(self, embed: Tensor) -> Tensor:
        unit_variance = F.normalize(embed.float(), dim=1) * embed.shape[1] ** 0.5
        return self.mlp(unit_variance.to(self.mlp[0].weight.dtype))


class LearnedTokens(nn.Module):
    """Returns `count` learned tokens for each sample, with a condition (B, D) added to each: (B, count, D). The tokens
    begin as normal(0.02).
    """

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(count, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.tokens, std=0.02)

    def forward(self, condition: Tensor) -> Tensor:
        return self.tokens + condition[:, None]


class TextTokens(nn.Module):
    """Embeds texts as tokens (B, M, D), and says by bool (B, M) which of them are read.

    encodings_dim             E, the width of a text encoder's states; None: texts are ids of hashed words.
    projection                how states are mapped to D: linear, by one layer behind a norm; or without a norm: mlp, by
                              two layers (PixArt), or plain, by one (SD3).
    num_words, max_text_len   of hashed words: the number of ids, and the largest number of words of a text.
    learns_null               whether a learned token stands in front, which is read where no token of the text is.
    """

    def __init__(
        self,
        dim: int,
        num_words: int | None = None,
        max_text_len: int = 0,
        encodings_dim: int | None = None,
        learns_null: bool = False,
        projection: str = "linear",
    ) -> None:
        super().__init__()
        if encodings_dim and projection == "mlp":
            self.fc1, self.fc2 = Linear(encodings_dim, dim, init="normal"), Linear(dim, dim, init="normal")
        elif encodings_dim:
            if projection == "linear":
                self.norm = RMSNorm(encodings_dim)
            self.proj = Linear(encodings_dim, dim, init="normal")
        else:
            self.words = Embedding(num_words, dim)
            self.places = Embedding(max_text_len, dim)
        self.null = Embedding(1, dim) if learns_null else None

    def forward(self, text: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Embeds texts as tokens (B, L, D), and returns them with a mask bool (B, L), True where a token is read. With
        learns_null both have length L + 1: the null text's token comes first, and is read only if no other token of the
        sample is.

        text  int64 (B, L), ids of words, or (B, L, E), states of a text encoder.
        mask  bool (B, L); None: all tokens are read, and the returned mask is None, too, unless learns_null is set.
        """
        if text.ndim == 2:
            tokens = self.words(text) + self.places(torch.arange(text.shape[1], device=text.device))
        else:
            tokens = self.project_text_states(text)
        if self.null is None:
            return tokens, None if mask is None else mask.bool()
        read = torch.ones_like(tokens[..., 0], dtype=torch.bool) if mask is None else mask.bool()
        null = self.null(torch.zeros_like(read[:, :1], dtype=torch.int64))  # (B, 1, D)
        return torch.cat((null, tokens), dim=1), torch.cat((~read.any(1, keepdim=True), read), dim=1)

    def project_text_states(self, states: Tensor) -> Tensor:
        """Maps a text encoder's states to the network's width: (..., E) -> (..., D)."""
        if hasattr(self, "fc1"):
            return self.fc2(F.gelu(self.fc1(states.to(self.fc1.weight.dtype)), approximate="tanh"))
        states = states.to(self.proj.weight.dtype)
        return self.proj(self.norm(states) if hasattr(self, "norm") else states)


class Condition:
    """One condition of the network: reads it from a batch or a request, and returns it as keyword arguments of the
    network, (B, ...) each. Class attributes: `name`, the condition's key in a batch, and `argument`, the keyword.
    """

    name: ClassVar[str]
    argument: ClassVar[str]

    def require_valid_tensors(self, batch: Mapping[str, Tensor]) -> None:
        """Raises ConfigError if `batch`, tensors of a batch or of a request, lacks this condition or holds it with a
        wrong shape. By default checks nothing.
        """

    def make_example_tensors(self, batch: Batch) -> Example:
        """Returns the tensors, by name, that this condition adds to the example made from a batch, such as texts
        encoded now. {} by default.
        """
        return {}

    def make_arguments_from_example(self, example: Example) -> ForwardArguments:
        """Returns the network's keyword arguments for this condition, (B, ...) each, from an example. Conditions that
        data may lack raise ConfigError if the example lacks them.
        """
        return {self.argument: example[self.name]}

    def make_arguments_from_request(self, request: Request) -> ForwardArguments:
        """Returns the network's keyword arguments for this condition, (N, ...) each, from a request for N samples."""
        return {self.argument: request.conditions[self.name]}

    def make_null_arguments(self, arguments: ForwardArguments) -> ForwardArguments:
        """Returns keyword arguments that mean "no condition", such as the label for none, with the shapes of
        `arguments`. By default returns {}, which means that the condition is never dropped.
        """
        return {}

    def make_negative_arguments(self, request: Request, arguments: ForwardArguments) -> ForwardArguments:
        """Returns the keyword arguments for the prediction that guidance leads samples away from. For texts they are
        those of the request's negative prompt, if there is one. By default returns what `make_null_arguments` does.
        """
        return self.make_null_arguments(arguments)

    def make_conditions_from_images(self, images: Tensor) -> dict[str, Tensor]:
        """Returns the conditions of a request, by name, for samples that begin from `images`: pictures, clips or
        embeddings. By default returns {}: this condition is not made from images. Other conditions raise ConfigError if
        the images do not fit.
        """
        return {}

    def draw_synthetic_tensors(self, key: Tensor, size: Shape) -> dict[str, Tensor]:
        """Returns random tensors of this condition, by name, for a synthetic batch of images of `size` = (width,
        height) pixels. key int64 (B,): the samples' seeds, from which the values are drawn.
        """
        raise NotImplementedError


class Label(Condition):
    """The number of a class, int64 (B,); the number num_classes means no label."""

    name, argument = "label", "y"

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes

    def make_arguments_from_example(self, example: Example) -> ForwardArguments:
        """Returns {"y": int64 (B,)}, the example's labels; zeros if it has none and there is only one class. Raises
        ConfigError if it has none and there are several.
        """
        if "label" in example:
            return {"y": example["label"]}
        if self.num_classes == 1:
            return {"y": torch.zeros_like(example["key"])}
        raise ConfigError(
            f"label: the data hold none, and num_classes is {self.num_classes}; give labels, or "
            "set num_classes to 1 for an unconditional model"
        )

    def make_arguments_from_request(self, request: Request) -> ForwardArguments:
        """Returns {"y": int64 (N,)}, the request's labels; if it has none, each sample's seed modulo num_classes."""
        return {"y": request.conditions.get("label", request.seeds % self.num_classes)}

    def make_null_arguments(self, arguments: ForwardArguments) -> ForwardArguments:
        return {"y": torch.full_like(arguments["y"], self.num_classes)}

    def draw_synthetic_tensors(self, key: Tensor, size: Shape) -> dict[str, Tensor]:
        return {"label": rng.integers(key, "label", self.num_classes)}


class Sizes(Condition):
    """The original size and the crop of an image, int64 (B, 6), see SizeEmbedder. Samples are drawn as images that had
    the requested size and were not cropped.
    """

    name, argument = "size", "size"

    def __init__(self, image_size: int) -> None:
        self.image_size = image_size

    def make_arguments_from_example(self, example: Example) -> ForwardArguments:
        if "size" not in example:
            raise ConfigError("size_conditions: the data say no sizes; write data.size_conditions=false")
        return {"size": example["size"]}

    def make_arguments_from_request(self, request: Request) -> ForwardArguments:
        return {"size": self._make_uncropped_sizes(request.size or (self.image_size, self.image_size), request.seeds)}

    def draw_synthetic_tensors(self, key: Tensor, size: Shape) -> dict[str, Tensor]:
        return {"size": self._make_uncropped_sizes(size, key)}

    def _make_uncropped_sizes(self, size: Shape, like: Tensor) -> Tensor:
        """Returns the size condition of images that were not cropped: int64 (B, 6), B = len(like), on the device of
        `like`. size: (width, height) of all images in pixels.
        """
        wide, high = size
        return torch.tensor([high, wide, 0, 0, high, wide], device=like.device).repeat(len(like), 1)


class ImageEmbedding(Condition):
    """The embedding of an image, (B, width); zeros mean no embedding."""

    name, argument = "image_embed", "embed"

    def __init__(self, width: int) -> None:
        self.width = width

    def require_valid_tensors(self, batch: Mapping[str, Tensor]) -> None:
        """Raises ConfigError if the batch has no image_embed, or one of another width."""
        actual = batch["image_embed"].shape[1] if "image_embed" in batch else 0
        if not actual:
            raise ConfigError(
                "image_embed: this model draws from image embeddings: give images with theirs, "
                "data.embeddings=PAIRS; to draw, --embeddings FILE.npy, or a prior's run, generate.py "
                "PRIOR --then THIS_RUN"
            )
        if actual != self.width:
            raise ConfigError(
                f"image_embed: these are {actual} wide, and model.embedding_dim is {self.width}: give others, "
                f"or train with model.embedding_dim={actual}"
            )

    def make_null_arguments(self, arguments: ForwardArguments) -> ForwardArguments:
        return {"embed": torch.zeros_like(arguments["embed"])}

    def make_conditions_from_images(self, images: Tensor) -> dict[str, Tensor]:
        if images.ndim != 2:
            raise ConfigError("image_embed: this model begins from image embeddings, not from pictures")
        conditions = {"image_embed": images.float()}
        self.require_valid_tensors(conditions)
        return conditions

    def draw_synthetic_tensors(self, key: Tensor, size: Shape) -> dict[str, Tensor]:
        return {"image_embed": rng.normal(key, "image_embed", (self.width,))}


class Text(Condition):
    """A text: ids of hashed words int64 (B, L), or encodings (B, L, E), with a mask bool (B, L), True where a token is
    read. If no token of a text is read, the sample has no text.
    """

    name, argument = "text", "text"

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def make_example_tensors(self, batch: Batch) -> Example:
        """Returns the texts of a batch, encoded if it holds captions: {"text": ids (B, L) or encodings (B, L, E),
        "text_mask": bool (B, L)}. Raises ConfigError if a text has no token and the model no null text.
        """
        example = self._replace_empty_texts(_make_text_arguments(self.reader.make_batch_inputs(batch)))
        # A model without a null text waits for the device here; others have something to read in any case.
        if not self.reader.config.has_null_text and not example["text"].is_meta and not example["mask"].any(1).all():
            raise ConfigError(
                "data: a caption has no words, or its text_mask no token, and a model with class_dropout_prob 0 has no "
                "null text to read instead: give each sample a caption, or train with class_dropout_prob above 0"
            )
        return {"text": example["text"], "text_mask": example["mask"]}

    def make_arguments_from_example(self, example: Example) -> ForwardArguments:
        return {"text": example["text"], "mask": example["text_mask"]}

    def make_arguments_from_request(self, request: Request) -> ForwardArguments:
        inputs = select_text_inputs(request.conditions) or self.reader.make_null_text_inputs(len(request.seeds))
        arguments = self._replace_empty_texts(
            _make_text_arguments(self.reader.make_batch_inputs({**inputs, "key": request.seeds}))
        )
        return {name: value.to(request.seeds.device) for name, value in arguments.items()}

    def make_null_arguments(self, arguments: ForwardArguments) -> ForwardArguments:
        return self._replace_empty_texts({"text": arguments["text"], "mask": torch.zeros_like(arguments["mask"])})

    def make_negative_arguments(self, request: Request, arguments: ForwardArguments) -> ForwardArguments:
        """Returns the network's arguments for the negative prompts of a request, held there in tensors whose names
        begin with `negative_`. Returns those of the null text if the request has no such tensors.
        """
        inputs = {name: value for name, value in request.conditions.items() if name.startswith(NEGATIVE)}
        if not inputs:
            return self.make_null_arguments(arguments)
        negative = _make_text_arguments({name.removeprefix(NEGATIVE): value for name, value in inputs.items()})
        negative = self._replace_empty_texts(negative)
        return {name: value.to(arguments[name].device) for name, value in negative.items()}

    def _replace_empty_texts(self, arguments: ForwardArguments) -> ForwardArguments:
        """Returns the arguments with each text of which no token is read replaced by the encoder's empty text. Returns
        the arguments unchanged if the null text is a learned token, or if the network has none.
        """
        config = self.reader.config
        if config.learns_null_text or not config.has_null_text:
            return arguments
        text, mask = arguments["text"], arguments["mask"]
        empty = _make_text_arguments(self.reader.encode_empty_text(text.device))
        read = mask.any(1)[:, None]
        return {
            "text": torch.where(read[..., None], text, empty["text"].to(text.dtype)),
            "mask": torch.where(read, mask, empty["mask"]),
        }

    def draw_synthetic_tensors(self, key: Tensor, size: Shape) -> dict[str, Tensor]:
        return draw_synthetic_texts(self.reader.config, key)


def _make_text_arguments(inputs: TextInputs) -> ForwardArguments:
    """Returns text inputs under the names of the network's arguments: text and mask. For hashed words the mask is True
    where the id is not 0.
    """
    if "words" in inputs:
        return {"text": inputs["words"], "mask": inputs["words"] != 0}
    return {"text": inputs["text_encodings"], "mask": inputs["text_mask"]}
