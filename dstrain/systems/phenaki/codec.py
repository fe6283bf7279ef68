"""Loads the trained tokenizer of a token model, a Codec of videos, and checks that the two fit."""

from typing import Any

from dstrain.recipe import ConfigError
from dstrain.systems.codec import Codec


def load_tokenizer(path: str) -> Codec:
    """Loads the video tokenizer that `dstrain export` has written to the folder `path`. Raises ConfigError if the
    folder holds something else.
    """
    codec = Codec.load(path, "model.tokenizer.path")
    if codec.kind != "tokens" or not codec.of_videos:
        raise ConfigError(
            f"model.tokenizer.path: {path} is a {codec.run.system}, and videos become tokens by a "
            "phenaki.tokenizer; export a run of that system"
        )
    return codec


def require_fitting_tokenizer(codec: Codec, config: Any) -> None:
    """Raises ConfigError if a token model with this config cannot use the tokenizer `codec`: if the model was trained
    with another tokenizer, if the cached tokens were made by another one, or if codebook_size, temporal_patch_size or
    the rows and columns of a frame's tokens differ.
    """
    path, expected = codec.path, config.tokenizer.fingerprint
    if expected not in (None, codec.fingerprint):
        raise ConfigError(
            f"model.tokenizer.path: {path} is the tokenizer {codec.fingerprint}, this model was trained with "
            f"{expected} (tokenizer.fingerprint); put that one back there"
        )
    for name, in_model, in_codec in (
        ("codebook_size", config.codebook_size, codec.codebook_size),
        ("temporal_patch_size", config.temporal_patch_size, codec.temporal_patch_size),
        ("token_shape[1:]", tuple(config.token_shape[1:]), codec.codes_shape[1:]),
    ):
        if in_model != in_codec:
            raise ConfigError(
                f"model.{name}: {in_model} in the model, {in_codec} in the tokenizer at {path}; leave "
                f"model.{name.partition('[')[0]} out, which takes the tokenizer's"
            )
    if config.codes is not None and config.codes.first_stage != codec.fingerprint:
        raise ConfigError(
            f"model.tokenizer.path: {path} is the tokenizer {codec.fingerprint}, the tokens in data.path are "
            f"of {config.codes.first_stage}; name the one that encoded them, or encode with this one"
        )
