"""Loads frozen networks of other projects by transformers and diffusers, without running code that comes with them.

A folder of an encoder may come from anybody. Of its files only JSON, safetensors and vocabularies are read: its code is
not imported (auto_map), its pickles are not opened, no other library is loaded because its config names it, no question
is put to the user, and the internet is not used for a folder that is on this machine.
"""

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from torch import nn

from dstrain.recipe import ConfigError

_ATTENTION = (None, "eager", "sdpa")  # others are kernels, which transformers would download and load


class Frozen(nn.Module):
    """A network that is never trained: it stays in evaluation mode, also when `train` is called for a network that
    contains it.
    """

    def train(self, mode: bool = True) -> Self:
        """Puts the network in evaluation mode, whatever `mode` says, and returns the network."""
        return super().train(False)


def is_available_offline(path: Any) -> bool:
    """Returns whether the network at `path`, a value from a recipe, can be read without the internet: `path` is a local
    folder, or the hub's cache on this machine has its config.json or model_index.json. Does not look for weights.

    Returns True if `path` is not a string, since it then names no network. Returns False for a string that is neither a
    folder nor a possible name on the hub.
    """
    if not isinstance(path, str) or Path(path).is_dir():
        return True
    from huggingface_hub import try_to_load_from_cache

    try:
        return any(isinstance(try_to_load_from_cache(path, name), str) for name in ("config.json", "model_index.json"))
    except ValueError:  # The path is no name of the hub.
        return False


@contextmanager
def reword_loading_errors(kind: str, key: str, path: str, content: str, remedy: str = "") -> Iterator[None]:
    """Turns any exception of its `with` block, which loads a network, into a ConfigError that says what could not be
    loaded. Lets a ConfigError of the block pass as it is. Raises ConfigError before the block if `path` is neither a
    folder nor a possible hub name, or if the folder holds an adapter.

    kind     what is loaded, such as "text encoder".
    key      the recipe's key whose value is `path`.
    content  the files that the folder must hold.
    remedy   the advice if `path` is neither a folder nor a hub name; "": a general one. With a remedy, only OWNER/NAME
             counts as a hub name.
    """
    if not (Path(path).is_dir() or (_can_be_hub_name(path) and ("/" in path or not remedy))):
        remedy = remedy or f"give one that holds {content}, or a name on the hub"
        raise ConfigError(f"{key}: there is no folder {path}; {remedy}")
    if (Path(path) / "adapter_config.json").is_file():
        raise ConfigError(
            f"{key}: {path} holds an adapter, and the network under it would come from elsewhere: merge it"
        )
    try:
        yield
    except ConfigError:
        raise  # It names its own key and remedy.
    except Exception as error:  # A damaged or hostile folder makes these libraries raise anything.
        raise ConfigError(
            f"{key}: no {kind} can be loaded from {path!r} ({shorten_error_message(error)}); give a folder with "
            f"{content}, or a hub name that this machine can reach"
        ) from error


def load_pretrained(loader: Any, path: str, **options: Any) -> Any:
    """Returns a network, tokenizer or config, loaded by from_pretrained. Never runs code that comes with the files.
    Raises the errors of transformers.

    loader   the class of transformers whose from_pretrained is called.
    path     a local folder, which is read offline, or a name on the hub.
    options  further arguments of from_pretrained.
    """
    from transformers import dynamic_module_utils

    # A class that is not told trust_remote_code would ask, and run code for a "y". At 0 seconds it does not ask.
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    return loader.from_pretrained(path, trust_remote_code=False, local_files_only=Path(path).is_dir(), **options)


def read_config(path: str, folder: str = "") -> Any:
    """Returns the config of transformers for the network at `path`, or in the subfolder `folder` of `path`. Raises
    ValueError if the config asks for an attention kernel that would be downloaded, or for quantized weights.
    """
    from transformers import AutoConfig  # slow to import, and only users of such networks need it

    config = load_pretrained(AutoConfig, path, subfolder=folder)
    for part in (config, *(getattr(config, name, None) for name in ("text_config", "vision_config"))):
        if getattr(part, "_attn_implementation", None) not in _ATTENTION:
            raise ValueError(f"config.json asks for the kernel {part._attn_implementation}; leave it out there")
        require_unquantized_weights(vars(part) if part is not None else {})
    return config


def require_no_missing_weights(missing: Iterable[str], unread: tuple[str, ...]) -> None:
    """Raises ValueError if a file lacks weights that the network uses. Without this check libraries fill them with
    random values.

    missing  names of the weights that the file lacks.
    unread   parts of names. Weights whose names contain one of these are never used, and may be missing.
    """
    if lacking := [name for name in sorted(missing) if not any(part in name for part in unread)]:
        raise ValueError(f"its weights lack {len(lacking)} of the network's, such as {lacking[0]}")


def load_network(loader: Any, path: str, config: Any, **options: Any) -> nn.Module:
    """Returns a network of transformers with the weights at `path`. Reads only safetensors. Raises ValueError if
    weights are missing.

    loader   the network's class.
    config   what `read_config` returned.
    options  further arguments of from_pretrained.
    """
    options |= {"config": config, "use_safetensors": True, "output_loading_info": True}
    network, report = load_pretrained(loader, path, **options)
    # Unread are T5's decoder and BERT's pooled state.
    require_no_missing_weights(report["missing_keys"], unread=("pooler.", "decoder."))
    return network


def require_unquantized_weights(config: Mapping[str, Any]) -> None:
    """Raises ValueError if a model's config says that its weights are quantized."""
    if config.get("quantization_config") is not None:
        raise ValueError("config.json has a quantization_config, and quantized weights are not read")


def read_encoder_json(key: str, path: str, name: str) -> Any:
    """Returns the content of the JSON file `name` at `path`, an encoder's folder or hub name. Returns None if there is
    no such file, or if the hub cannot be reached. Raises ConfigError if the file is not valid JSON. key: the recipe's
    key, with which the message begins.
    """
    from transformers.utils import cached_file

    file = cached_file(
        path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    try:
        return None if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError:
        raise ConfigError(f"{key}: {name} of {path} is no JSON; fetch it again") from None


def shorten_error_message(error: Exception) -> str:
    """Returns an error's message in one line of at most 200 characters, cut between words, or the name of the error's
    class if it has no message.
    """
    return textwrap.shorten(str(error), 200, placeholder=" ...") or type(error).__name__


def _can_be_hub_name(path: str) -> bool:
    """Returns whether a path that is no folder can be a name on the hub: NAME or OWNER/NAME. Returns False if its first
    part is "runs", or exists as a file or folder in the working folder, so that the hub is not asked for such paths.
    """
    owner = path.partition("/")[0]
    return bool(re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", path)) and owner != "runs" and not Path(owner).exists()
