"""Tries a system before training starts: two samples go through all that training will call, in the order of
systems/base.py.

So a loss of the wrong shape, a sampler that forgets a picture, or a codebook smaller than the ids in the data, is
reported before anything is launched. A small model computes on the CPU; a large one runs on the meta device, whose
tensors have shapes and no values.
"""

import itertools
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module
from torch.overrides import TorchFunctionMode

from dstrain import rng
from dstrain.data.batches import Batches, copy_batch_to_device
from dstrain.recipe import ConfigError, Run, reword_errors
from dstrain.sampling.draw import require_valid_evaluation_terms, require_valid_samples, set_eval_mode
from dstrain.sampling.grids import make_grid_request_and_captions
from dstrain.systems.base import Batch, Example, Nets, System

_SAMPLES = 2
_WEIGHTS, _NUMBERS = 10_000_000, 1 << 16  # of a small model, and of the largest tensor of a sample: a second's work
_TENSORS, _ALL, _WIDEST = 20_000, 10**13, 2**22  # of any model: tensors, numbers in all, and along one axis
_NO_VALUES = re.compile(r"(?<![a-z])meta(?![a-z])", re.IGNORECASE)  # in torch's messages
_CALLS = 16  # of the networks by a sampler
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Torch's messages where one operand is float32 and the other is not.
_OTHER_DTYPE = re.compile(r"same dtype|should be the same|expected scalar type|expected m1 and m2", re.IGNORECASE)
# Torch's messages where an id is not in a table: of embeddings without the id, of targets and indices with it.
_OUT_OF_RANGE = re.compile(r"index out of range in self|(?:Target|index) (-?\d+) is out of bounds")


class _NotChecked(Exception):
    """Is raised if code asks for values, which tensors on the meta device do not have."""


class _Unfilled(TorchFunctionMode):
    """Skips normal fills: on the meta device they change nothing, and the first one imports torch._dynamo, for 2 s."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (torch.Tensor.normal_, torch.nn.init.normal_):
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **kwargs or {})


class _Enough(Exception):
    """Is raised when a sampler calls the networks more than _CALLS times, which is enough to check it."""


def try_system_on_samples(run: Run, system: System, source: Any, precision: str = "fp32") -> list[str]:
    """Tries a system on two samples of `source`: `encode`, the loss of every part that learns at the first or the last
    step, and, if the run does these, evaluation and drawing in two steps. Returns remarks, a line each. Call it on rank
    0 alone. Do not use `system` afterwards: its frozen networks may be on the meta device.

    precision: that of the weights in training: fp32, bf16 or fp16

    Raises ConfigError if the system does or returns something that systems/base.py forbids, or if ids are out of range.
    Other exceptions pass through. Torch's random state, the run's folder and the source stay as they are.
    """
    with torch.random.fork_rng(devices=[]):
        networks = _build_networks_on_meta(run.system, system)
        _require_networks_match_parts(run.system, system, networks)
        weights = sum(weight.numel() for network in networks.values() for weight in network.parameters())
        frozen = sum(weight.numel() for network in system.frozen() for weight in network.parameters())
        batch = _read_first_batch(run, source)
        few = max(values.numel() for values in batch.values()) <= _SAMPLES * _NUMBERS
        encoding, learning = (
            torch.device("cpu" if (few and count <= _WEIGHTS) or not count else "meta")
            for count in (frozen, weights + frozen)
        )
        if learning.type == "meta" and not next(next(iter(networks.values())).parameters()).is_meta:
            return [f"{run.system}: not checked, since its constructors need values, and the model is large"]
        try:
            remarks = _try_losses_and_drawing(run, system, batch, encoding, learning, precision)
        except _NotChecked as error:
            return [f"{error}: not checked, since it needs values, and the model is too large to compute them here"]
    if learning.type == "meta":
        remarks.append(
            f"{run.system} with {(weights + frozen) / 1e6:,.1f} M weights: the shapes of its loss are "
            "checked, its values are not"
        )
    return remarks


def require_feasible_network_sizes(name: str, system: System) -> None:
    """Raises ConfigError if the networks of a system are larger than any machine holds. Call it before reading a
    sample, which may be as large.
    """
    with torch.random.fork_rng(devices=[]):
        _build_networks_on_meta(name, system)


def _build_networks_on_meta(name: str, system: System) -> dict[str, nn.Module]:
    """Builds the networks on the meta device. If a constructor needs values, builds them with values. Raises
    ConfigError if the networks are larger than any machine holds.
    """
    count, numbers = 0, 0

    def require_bounded_tensor(_: Any, entry: str, values: Any) -> None:
        """Counts a tensor that a constructor registers. Raises ConfigError if this tensor, or all tensors so far, are
        too large.
        """
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
        register(require_bounded_tensor)
        for register in (
            module.register_module_parameter_registration_hook,
            module.register_module_buffer_registration_hook,
        )
    ]
    try:
        with _Unfilled():
            return system.build_networks_on_meta()
    except (RuntimeError, TypeError) as error:  # a constructor that asks for values, mostly
        reason = str(error).partition("\n")[0]
        if "overflow" in reason.lower():
            raise ConfigError(
                f"{name}: the model has more than any machine holds ({reason}): lower the sizes in the model section"
            ) from None
        return system.networks()
    finally:
        for hook in hooks:
            hook.remove()


def _read_first_batch(run: Run, source: Any) -> dict[str, Tensor]:
    """Returns the first two samples of training as a batch. Readable samples take the place of unreadable ones, without
    a warning.
    """
    with (
        warnings.catch_warnings(),
        Batches(
            source, global_batch=_SAMPLES, micro_batch=_SAMPLES, seed=run.seed, max_bad_fraction=1.0, flip=run.data.flip
        ) as batches,
    ):
        warnings.filterwarnings("ignore", "cannot be read, replaced")
        return next(batches.read_step(0))


def _try_losses_and_drawing(
    run: Run, system: System, batch: Batch, encode_device: torch.device, train_device: torch.device, precision: str
) -> list[str]:
    """Computes the loss of every part that learns at the first or the last step; then tries saving, evaluation and
    drawing. Returns remarks, a line each.

    encode_device: the device on which `encode` computes
    train_device: the device on which all else computes
    precision: that of the weights in training

    Raises ConfigError if something returns what training cannot use, _NotChecked if values are needed on the meta
    device.
    """
    with train_device, _Unfilled() if train_device.type == "meta" else nullcontext():
        networks = system.networks() if train_device.type == "cpu" else system.build_networks_on_meta()
    half = _HALVES.get(precision)
    if train_device.type == "meta":
        for network in networks.values():
            network.to(half or torch.float32)
            _cache_output_shapes(network)
    for network in system.frozen():
        network.to(encode_device)
    tables = tuple(
        module.num_embeddings
        for network in networks.values()
        for module in network.modules()
        if isinstance(module, nn.Embedding)
    )
    remarks: list[str] = []
    parts, seen = set[str](), set[str]()
    for step in (0, run.steps - 1):  # an adversary may join later
        turns = system.turns(step)
        if parts.issuperset(turns):
            continue
        parts.update(turns)
        with (
            torch.no_grad(),
            _explain_out_of_range_ids(f"{run.system}: encode", _select_id_tensors(batch), encode_device),
        ):
            example = system.encode(copy_batch_to_device(batch, encode_device))
        if live := [name for name, values in example.items() if values.requires_grad]:
            raise ConfigError(
                f"{run.system}: encode returns {', '.join(live)} with a gradient: compute the example "
                "from frozen networks alone, or detach it"
            )
        ids = _select_id_tensors(example)
        example = copy_batch_to_device(example, train_device)
        rng.seed_torch(run.seed, step, 0)
        for part in turns:
            for name, network in networks.items():  # as in a turn: only this part learns
                network.requires_grad_(name == part)
            place = f"{run.system}: loss of {part}"
            with _explain_out_of_range_ids(place, ids, train_device, tables), _explain_cast_errors(place, half):
                terms = system.loss(part, networks, example)
            _require_valid_loss_terms(place, terms, system.watched)
            seen.update(terms)
            if train_device.type == "cpu" and not terms["loss"].isfinite():
                remarks.append(f"{place}: the first one is {terms['loss'].item()}")
    if missing := [name for name in system.watched if name not in seen]:
        raise ConfigError(f"{run.system}: no loss returns {', '.join(missing)}, which `watched` names: return them")
    _try_saving_state(run.system, system)
    held = {name: values for name, values in batch.items() if name != "step"}  # as held-out data come
    with torch.no_grad(), set_eval_mode(networks), suppress(_NotChecked, _Enough):
        with _explain_out_of_range_ids(
            f"{run.system}: encode of held-out data", _select_id_tensors(held), encode_device
        ):
            example = copy_batch_to_device(system.encode(copy_batch_to_device(held, encode_device)), train_device)
        if run.every.evaluate:
            _try_evaluation(run, system, networks, example)
        if run.every.sample or run.every.metrics:
            _try_drawing(run, system, networks, held, example)
    if half and train_device.type == "cpu":
        # Other errors are those of the CPU, which lacks some kernels in half precision.
        for network in networks.values():
            network.to(half)
        part = next(iter(system.parts))
        with (
            torch.no_grad(),
            suppress(RuntimeError, TypeError),
            _explain_cast_errors(f"{run.system}: loss of {part}", half),
        ):
            system.loss(part, networks, example)
    return remarks


def _cache_output_shapes(network: nn.Module) -> None:
    """Replaces the `forward` of a network on the meta device, to save time in later calls. The new one remembers the
    shape and dtype of the output for the shapes and dtypes of the inputs. When these come again, with any first axis
    and while gradients are off, it returns an empty tensor of that shape and computes nothing.
    """
    forward = network.forward
    outputs: dict[Any, Any] = {}

    def run_forward_or_reuse_shape(*values: Any, **named: Any) -> Any:
        """Calls `forward` for new shapes of the inputs, or while gradients are on. Otherwise returns an empty tensor of
        the shape that `forward` has returned for these shapes.
        """
        tensors = [*values, *named.values()]
        if not tensors or not all(torch.is_tensor(value) and value.ndim for value in tensors):
            return forward(*values, **named)
        key = (tuple(named), *((value.shape[1:], value.dtype) for value in tensors))
        if key in outputs and not torch.is_grad_enabled():
            shape, dtype = outputs[key]
            return torch.empty(len(tensors[0]), *shape, dtype=dtype, device="meta")
        out = forward(*values, **named)
        if torch.is_tensor(out) and out.shape[:1] == tensors[0].shape[:1]:
            outputs[key] = out.shape[1:], out.dtype
        return out

    network.forward = run_forward_or_reuse_shape  # type: ignore[method-assign]


def _try_saving_state(name: str, system: System) -> None:
    """Calls `state_dict` of a system and gives the result to `load_state_dict`, as saving and resuming do. Raises
    ConfigError if the result is no dict of tensors, or if `load_state_dict` refuses it.
    """
    state = system.state_dict()
    if not isinstance(state, dict) or not all(map(torch.is_tensor, state.values())):
        raise ConfigError(f"{name}: state_dict returns something else than a dict of tensors: a checkpoint keeps those")
    with reword_errors(f"{name}: what state_dict returns is refused by load_state_dict: "):
        system.load_state_dict(state)


def _try_evaluation(run: Run, system: System, networks: Nets, example: Example) -> None:
    """Calls `evaluate` and `compute_figures` of a system, as training does on held-out data. Raises ConfigError if the
    figures that they return have the wrong form, or if save.best=true and there is no loss to choose by.
    """
    place = f"{run.system}: evaluate"
    with _explain_out_of_range_ids(place, {}, example["key"].device):
        terms = system.evaluate(networks, example)
    require_valid_evaluation_terms(system, terms, _SAMPLES)
    if run.save.best is True and "loss" not in terms:
        raise ConfigError(
            f'{place} returns no "loss" (it returns {", ".join(terms)}), by which save.best=true chooses: return it, '
            "one value a sample, (B,)"
        )
    if example["key"].is_meta:
        return
    figures = system.compute_figures({name: term.double().mean(0) for name, term in terms.items() if term.ndim == 2})
    if not isinstance(figures, dict) or not all(isinstance(figure, (int, float)) for figure in figures.values()):
        raise ConfigError(
            f"{run.system}: compute_figures returns something else than a dict of numbers: return those by name"
        )


def _try_drawing(run: Run, system: System, networks: Nets, data: Batch, example: Example) -> None:
    """Draws two samples in two steps if the system generates, and makes the system's pictures of two samples if it
    begins from data. Raises ConfigError if samples or pictures have a wrong shape or dtype.
    """
    device = example["key"].device
    if system.generates and not system.find_drawing_problem():
        samples = run.samples.model_copy(update={"num": _SAMPLES} if run.samples.prompts else {})
        with _explain_out_of_range_ids(f"{run.system}: conditions", {}, device):
            request, _ = make_grid_request_and_captions(samples, system, data if system.starts_from_data else {})
        few = replace(
            request,
            seeds=request.seeds[:_SAMPLES].to(device),
            conditions={name: values[:_SAMPLES].to(device) for name, values in request.conditions.items()},
            num_steps=min(_SAMPLES, request.num_steps),
        )
        with (
            _explain_out_of_range_ids(f"{run.system}: sample", {}, device),
            suppress(_Enough),
            _limit_network_calls(networks),
        ):
            require_valid_samples(system, system.sample(networks, few), len(few.seeds))
    if system.starts_from_data:
        with _explain_out_of_range_ids(f"{run.system}: pictures", {}, device):
            pictures = system.make_pictures(networks, example)
        for name, images in pictures.items():
            if images.dtype != torch.uint8 or images.ndim not in (4, 5) or len(images) != _SAMPLES:
                raise ConfigError(
                    f"{run.system}: make_pictures returns {name} as {images.dtype} {tuple(images.shape)} for "
                    f"{_SAMPLES} samples: return uint8 (B, C, H, W) or (B, T, C, H, W)"
                )


@contextmanager
def _limit_network_calls(networks: Nets) -> Iterator[None]:
    """Makes the networks raise _Enough within the block from the 17th call on, since a sampler may ignore the number of
    steps.
    """
    calls = itertools.count(1)

    def count_call(*_: Any) -> None:
        """Counts a call of a network, and raises _Enough from the 17th call on."""
        if next(calls) > _CALLS:
            raise _Enough

    modules = [network for network in networks.values() if isinstance(network, nn.Module)]
    hooks = [module.register_forward_pre_hook(count_call) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _explain_cast_errors(place: str, half_dtype: torch.dtype | None) -> Iterator[None]:
    """Turns a RuntimeError of the block into a ConfigError with a remedy, if inputs in float32 have met weights of the
    dtype `half_dtype`. Other errors pass through. Changes nothing if `half_dtype` is None.
    """
    try:
        yield
    except RuntimeError as error:
        line = str(error).partition("\n")[0]
        if half_dtype is None or not _OTHER_DTYPE.search(line):
            raise
        raise ConfigError(
            f"{place}, with weights in {half_dtype}: {line}: inputs come in float32; cast what enters a network to the "
            "precision of its weights, x.to(self.enter.weight.dtype)"
        ) from error


def _require_networks_match_parts(name: str, system: System, networks: dict[str, nn.Module]) -> None:
    """Raises ConfigError unless `networks` has exactly the names of System.parts. Also raises it if `averaged` or
    `turns` has a name that is not among these, or if a weight has no elements.
    """
    parts = list(system.parts)
    if set(networks) != set(parts) or not {*system.averaged, *system.turns(0)} <= set(parts):
        raise ConfigError(
            f"{name}: parts are {', '.join(parts)}, networks() gives {', '.join(networks)}, averaged are "
            f"{', '.join(system.averaged)}, turns are {', '.join(system.turns(0))}: name the same parts"
        )
    for part, network in networks.items():
        for weight, values in network.named_parameters():
            if not values.numel():
                raise ConfigError(f"{name}: {weight} of {part} has no elements, which none can learn: leave it out")


def _require_valid_loss_terms(place: str, terms: dict[str, Tensor], watched: tuple[str, ...]) -> None:
    """Raises ConfigError unless the terms of a loss are a dict of tensors with a scalar "loss" that has a gradient.
    Every other term must be a scalar or have one value for each sample, (B,); those in `watched` may have more axes.
    """
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


def _select_id_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the int64 tensors on the CPU that hold ids, such as labels and tokens: all but "key", "position" and
    "step".
    """
    return {
        name: values
        for name, values in tensors.items()
        if values.dtype == torch.int64 and values.device.type == "cpu" and name not in ("key", "position", "step")
    }


@contextmanager
def _explain_out_of_range_ids(
    place: str, ids: dict[str, Tensor], device: torch.device, table_sizes: tuple[int, ...] = ()
) -> Iterator[None]:
    """Turns an error of the block about an id that is out of range into a ConfigError, which lists the least and the
    greatest id of each tensor in `ids`. On the meta device turns an error about missing values into _NotChecked. Other
    errors pass through.

    table_sizes: the sizes of the embedding tables; if all `ids` fit into them, the error is a bug of the code and
        passes through
    """
    try:
        yield
    except (IndexError, RuntimeError, TypeError) as error:  # also NotImplementedError, which is a RuntimeError
        line = str(error).partition("\n")[0]
        if device.type == "meta" and _NO_VALUES.search(line):
            raise _NotChecked(f"{place} ({line[:150]})") from error
        outside = _OUT_OF_RANGE.search(line)
        if not outside or (outside[1] and not any((values == int(outside[1])).any() for values in ids.values())):
            raise  # a bug, which no other data or table would mend
        if not outside[1] and table_sizes and all(values.max() < min(table_sizes) for values in ids.values()):
            raise  # likewise: every table holds the ids of the data
        ranges = ", ".join(f"{name} {values.min()} to {values.max()}" for name, values in ids.items())
        raise ConfigError(
            f"{place}: an id lies outside of the table that it is looked up in ({line}). The first "
            f"samples hold the ids {ranges or 'of no tensor'}. Enlarge the table in the model section "
            "(codebook_size, num_classes), or give other data"
        ) from error
