"""One look before a start: two samples go through a system's `encode` and `loss` as in a training step.

So a loss of the wrong shape, or a codebook smaller than the ids in the data, is reported before anything is launched. A
small model computes on the CPU; a large one runs on the meta device, whose tensors have shapes and no values.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module
from torch.overrides import TorchFunctionMode

from dstrain import rng
from dstrain.data.batches import Batches, place_batch
from dstrain.recipe import ConfigError, Run
from dstrain.systems import System

_SAMPLES = 2
_WEIGHTS, _NUMBERS = 10_000_000, 1 << 16  # of a small model, and of the largest tensor of a sample: a second's work
_TENSORS, _ALL, _WIDEST = 20_000, 10**13, 2**22  # of any model: tensors, numbers in all, and along one axis
# Torch's messages where an id is not in a table: of embeddings without the id, of targets and indices with it.
_OUT_OF_RANGE = re.compile(r"index out of range in self|(?:Target|index) (-?\d+) is out of bounds")


class _NotChecked(Exception):
    """Code asks for values, which tensors on the meta device do not have."""


class _Unfilled(TorchFunctionMode):
    """Skips normal fills: on the meta device they change nothing, and the first one imports torch._dynamo, for 2 s."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (torch.Tensor.normal_, torch.nn.init.normal_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs or {})


def probe(run: Run, system: System, source: Any) -> list[str]:
    """Takes two samples of `source` to the loss of every part that ever has a turn; returns remarks, a line each.

    Call it on rank 0 alone, and last with this `system`: its frozen networks may be on the meta device afterwards.
    Torch's random state, the run's folder and the source stay as they are.

    ConfigError: terms that break the contract of `System.loss`, ids out of range. Other exceptions pass through.
    """
    with torch.random.fork_rng(devices=[]):
        networks = _build_networks(run.system, system)
        _require_parts(run.system, system, networks)
        weights = sum(weight.numel() for network in networks.values() for weight in network.parameters())
        frozen = sum(weight.numel() for network in system.frozen() for weight in network.parameters())
        batch = _read_batch(run, source)
        few = max(values.numel() for values in batch.values()) <= _SAMPLES * _NUMBERS
        encoding, learning = (
            torch.device("cpu" if (few and count <= _WEIGHTS) or not count else "meta")
            for count in (frozen, weights + frozen)
        )
        if learning.type == "meta" and not next(next(iter(networks.values())).parameters()).is_meta:
            return [f"{run.system}: not checked, since its constructors need values, and the model is large"]
        try:
            remarks = _try_parts(run, system, batch, encoding, learning)
        except _NotChecked as error:
            return [f"{error}: not checked, since it needs values, and the model is too large to compute them here"]
    if learning.type == "meta":
        remarks.append(
            f"{run.system} with {(weights + frozen) / 1e6:,.1f} M weights: the shapes of its loss are "
            "checked, its values are not"
        )
    return remarks


def _build_networks(name: str, system: System) -> dict[str, torch.nn.Module]:
    """The system's networks, on the meta device where they can be. ConfigError: no machine holds them."""
    count, numbers = 0, 0

    def bounded(_: Any, entry: str, values: Any) -> None:
        nonlocal count, numbers
        if isinstance(values, Tensor):
            count, numbers = count + 1, numbers + values.numel()
            if count > _TENSORS or numbers > _ALL or max(values.shape, default=0) > _WIDEST:
                raise ConfigError(
                    f"{name}: the model has more than any machine holds ({count:,} tensors, "
                    f"{numbers:.2g} numbers, {entry} of {list(values.shape)}): lower the sizes in the "
                    "model section"
                )

    hooks = [
        register(bounded)
        for register in (
            module.register_module_parameter_registration_hook,
            module.register_module_buffer_registration_hook,
        )
    ]
    try:
        with torch.device("meta"), _Unfilled():
            return system.networks()
    except (RuntimeError, TypeError) as error:  # a constructor that asks for values, mostly
        if "overflow" in str(error):
            raise ConfigError(
                f"{name}: the model has more than any machine holds ({error}): lower the sizes in the model section"
            ) from None
        return system.networks()
    finally:
        for hook in hooks:
            hook.remove()


def _read_batch(run: Run, source: Any) -> dict[str, Tensor]:
    """The first samples that training takes. What cannot be read is replaced."""
    with (
        warnings.catch_warnings(),
        Batches(
            source, global_batch=_SAMPLES, micro_batch=_SAMPLES, seed=run.seed, max_bad_fraction=1.0, flip=run.data.flip
        ) as batches,
    ):
        warnings.filterwarnings("ignore", "cannot be read, replaced")
        return next(batches.at(0))


def _try_parts(
    run: Run, system: System, batch: dict[str, Tensor], encoding: torch.device, learning: torch.device
) -> list[str]:
    """One turn of every part, with `encode` on one device and `loss` on another or the same."""
    with learning, _Unfilled() if learning.type == "meta" else nullcontext():
        networks = system.networks()
    for network in system.frozen():
        network.to(encoding)
    tables = tuple(
        module.num_embeddings
        for network in networks.values()
        for module in network.modules()
        if isinstance(module, torch.nn.Embedding)
    )
    remarks, parts = [], set()
    for step in (0, run.steps - 1):  # an adversary may join later
        turns = system.turns(step)
        if parts.issuperset(turns):
            continue
        parts.update(turns)
        with torch.no_grad(), _explain_errors(f"{run.system}: encode", _list_ids(batch), encoding):
            example = system.encode(place_batch(batch, encoding))
        if live := [name for name, values in example.items() if values.requires_grad]:
            raise ConfigError(
                f"{run.system}: encode returns {', '.join(live)} with a gradient: compute the example "
                "from frozen networks alone, or detach it"
            )
        ids = _list_ids(example)
        example = place_batch(example, learning)
        rng.seed_torch(run.seed, step, 0)
        for part in turns:
            for name, network in networks.items():  # as in a turn: only this part learns
                network.requires_grad_(name == part)
            place = f"{run.system}: loss of {part}"
            with _explain_errors(place, ids, learning, tables):
                terms = system.loss(part, networks, example)
            _require_terms(place, terms, system.watched)
            if run.every.evaluate and part == next(iter(system.parts)) and type(system).evaluate is System.evaluate:
                system.evaluate(networks, example)
            if learning.type == "cpu" and not terms["loss"].isfinite():
                remarks.append(f"{place}: the first one is {terms['loss'].item()}")
    return remarks


def _require_parts(name: str, system: System, networks: dict[str, torch.nn.Module]) -> None:
    """ConfigError: networks, parts, averages and turns that do not go together."""
    parts = list(system.parts)
    if set(networks) != set(parts) or not {*system.averaged, *system.turns(0)} <= set(parts):
        raise ConfigError(
            f"{name}: parts are {', '.join(parts)}, networks() gives {', '.join(networks)}, averaged are "
            f"{', '.join(system.averaged)}, turns are {', '.join(system.turns(0))}: name the same parts"
        )


def _require_terms(place: str, terms: dict[str, Tensor], watched: tuple[str, ...]) -> None:
    """ConfigError: terms that the loop cannot descend or report."""
    if not isinstance(terms, dict) or not all(map(torch.is_tensor, terms.values())):
        raise ConfigError(f'{place} returns a {type(terms).__name__}: return a dict of tensors, its "loss" a scalar')
    if "loss" not in terms:
        raise ConfigError(
            f'{place} returns no "loss" (it returns {", ".join(terms) or "nothing"}): return the '
            "scalar to descend by that name"
        )
    loss = terms["loss"]
    if loss.shape != ():
        raise ConfigError(
            f'{place}: terms["loss"] has the shape {tuple(loss.shape)}, and has to be a scalar, (): '
            "return its mean, and the values by sample as loss_each (B,)"
        )
    if not loss.requires_grad:
        raise ConfigError(
            f'{place}: terms["loss"] has no gradient: compute it from the output of nets[...] without '
            "detach() and torch.no_grad()"
        )
    for name, term in terms.items():
        if term.shape != () and (len(term) != _SAMPLES or (term.ndim > 1 and name not in watched)):
            raise ConfigError(
                f'{place}: terms["{name}"] has the shape {tuple(term.shape)} for {_SAMPLES} samples: a '
                "term is a scalar, (), or one value a sample, (B,); only System.watched may hold more"
            )


def _list_ids(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: values
        for name, values in tensors.items()
        if values.dtype == torch.int64 and values.device.type == "cpu" and name not in ("key", "position", "step")
    }


@contextmanager
def _explain_errors(
    place: str, ids: dict[str, Tensor], device: torch.device, tables: tuple[int, ...] = ()
) -> Iterator[None]:
    """An id out of range becomes a ConfigError that says what ids there are; a need of values becomes _NotChecked."""
    try:
        yield
    except (IndexError, RuntimeError) as error:  # also NotImplementedError, which is a RuntimeError
        line = str(error).partition("\n")[0]
        if device.type == "meta" and re.search(r"\bmeta\b", line):
            raise _NotChecked(f"{place} ({line[:150]})") from error
        outside = _OUT_OF_RANGE.search(line)
        if not outside or (outside[1] and not any((values == int(outside[1])).any() for values in ids.values())):
            raise  # a bug, which no other data or table would mend
        if not outside[1] and tables and all(values.max() < min(tables) for values in ids.values()):
            raise  # likewise: every table holds the ids of the data
        ranges = ", ".join(f"{name} {values.min()} to {values.max()}" for name, values in ids.items())
        raise ConfigError(
            f"{place}: an id lies outside of the table that it is looked up in ({line}). The first "
            f"samples hold the ids {ranges or 'of no tensor'}. Enlarge the table in the model section "
            "(codebook_size, num_classes), or give other data"
        ) from error
