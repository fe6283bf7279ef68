"""The trained tokenizer that a token model stands on: a Codec of videos, and whether model and tokenizer fit."""

from typing import Any

from dstrain.recipe import ConfigError
from dstrain.systems.codec import Codec


def load_tokenizer(path: str) -> Codec:
    """Loads the exported tokenizer in a folder. Raises ConfigError if it makes no tokens of videos."""
    codec = Codec.load(path, "model.tokenizer.path")
    if codec.kind != "tokens" or not codec.of_videos:
        raise ConfigError(
            f"model.tokenizer.path: {path} is a {codec.run.system}, and videos become tokens by a "
            "phenaki.tokenizer; export a run of that system"
        )
    return codec


def require_fitting_tokenizer(codec: Codec, config: Any) -> None:
    """Raises ConfigError if a model's config asks for another tokenizer than this one."""
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
