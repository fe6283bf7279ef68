"""Sets `codes` in a data section whose path is a cache of codes, and opens its sources."""

from typing import Any

from dstrain.data.cached.latents import Latents, is_codes_cache
from dstrain.data.cached.shards import ENCODED_ALIKE
from dstrain.recipe import Codes, ConfigError, Data


def fill_codes_entry_from_cache(data: Data) -> Data:
    """Returns a copy of the data section whose entry `codes` describes the cached latents or tokens at its path.

    Raises ConfigError as `Latents`, if sizes, channels, frames or flips of the section differ from the encoded ones, or
    if it sets buckets, crop or size_conditions, which have no effect on codes.
    """
    if data.buckets or data.size_conditions or data.crop != "center":
        content = "images" if data.num_frames is None else "clips"
        raise ConfigError(
            f"data.buckets, data.crop, data.size_conditions: {data.path} holds codes of {content} that were "
            f"cut to one size: leave them out, or give the {content}"
        )
    index = Latents(data.path).index
    encoding = index["encoding"]
    _require_same_settings_as_encoding(data, encoding)
    _require_mirrored_codes_for_flip(data, encoding)
    text = encoding.get("text") or {}
    codes = Codes(
        kind=encoding["kind"],
        shape=encoding["shape"],
        flips=encoding["flips"],
        **{name: index["statistics"].get(name) for name in ("scaling_factor", "channel_mean", "channel_std")},
        first_stage=encoding["first_stage"],
        codebook_size=encoding.get("codebook_size"),
        text=text.get("shape"),
        text_encoder=text.get("encoder"),
    )
    return data.model_copy(update={"codes": codes})


def _require_same_settings_as_encoding(data: Data, encoding: dict[str, Any]) -> None:
    """Raises ConfigError if sizes, channels, or number or stride of frames in the section differ from those in
    `encoding`, with which the cached samples were encoded.
    """
    videos = "num_frames" in encoding
    of_images = {"num_frames": None, "frame_stride": 1, "height": data.image_size}
    for key in ("image_size", "channels", *of_images):
        value = getattr(data, key) or of_images.get(key)
        encoded = encoding.get(key, of_images.get(key))
        if value != encoded:
            raise ConfigError(
                f"data.{key}={value}: {data.path} was encoded from {'clips' if videos else 'images'} of "
                f"{key} {encoded}; write data.{key}={'null' if encoded is None else encoded}"
            )


def _require_mirrored_codes_for_flip(data: Data, encoding: dict[str, Any]) -> None:
    """Raises ConfigError if data.flip is true and the cache holds no codes of mirrored samples."""
    if data.flip and "num_frames" in encoding:
        raise ConfigError(
            f"data.flip=true: {data.path} holds no mirrored videos, since captions name directions; "
            "write data.flip=false"
        )
    if data.flip and encoding["flips"] == 1:
        raise ConfigError(
            f"data.flip=true: {data.path} holds no mirrored images; write data.flip=false, or encode without --no-flip"
        )


def open_cached_codes(data: Data, verify: bool) -> tuple[Latents, Latents | None]:
    """Opens the cached codes at data.path. Returns (training source, held-out source, or None if nothing is held out).
    verify: also compares hashes, see `Latents.verify_shards`.

    Raises ConfigError as `Latents`, and if the codes at data.held_out_path were encoded in another way than those at
    data.path, or have other classes.
    """
    if data.held_out_path is not None:
        train, unseen = _open_train_and_held_out_caches(data)
    else:
        train = Latents(data.path, "train", data.held_out)
        unseen = Latents(data.path, "held_out", data.held_out) if data.held_out else None
    for codes in (train, unseen) if verify else ():
        if codes is not None:
            codes.verify_shards()
    return train, unseen


def _open_train_and_held_out_caches(data: Data) -> tuple[Latents, Latents]:
    """Opens the caches at data.path and data.held_out_path. Raises ConfigError if the latter is no cache, or if the two
    differ in encoding or classes.
    """
    if not is_codes_cache(data.held_out_path):
        raise ConfigError(
            f"data.held_out_path={data.held_out_path} holds images, data.path={data.path} cached codes: "
            "encode the held-out images with the same first stage"
        )
    train, unseen = Latents(data.path), Latents(data.held_out_path)
    for key in ENCODED_ALIKE:
        if train.encoding.get(key) != unseen.encoding.get(key):
            raise ConfigError(
                f"data.held_out_path={data.held_out_path} has {key} {unseen.encoding.get(key)}, "
                f"data.path={data.path} has {train.encoding.get(key)}: encode both alike"
            )
    if unseen.classes != train.classes:
        raise ConfigError(
            f"data.held_out_path={data.held_out_path} has the classes {', '.join(unseen.classes[:5])}, "
            f"data.path={data.path} {', '.join(train.classes[:5])}: encode the same classes"
        )
    return train, unseen
