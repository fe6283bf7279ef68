"""The optimizers that a recipe chooses from, as ZeRO steps them: on flat pieces of the weights.

    adamw       torch's, fused. Where the optimizer is offloaded, DeepSpeed's for the CPU.
    lion        Chen et al. 2023 (arXiv:2302.06675): the sign of a momentum. Half of AdamW's moments.
    adamw8bit   bitsandbytes' AdamW (Dettmers et al. 2022, arXiv:2110.02861): moments of 8 bits, in blocks of 256
                elements of a flat with a scale each. So two layouts agree within the rounding to 8 bits alone. It takes
                no found_inf, so DeepSpeed's own step and its host reads stay (updates.py).
    muon        Jordan et al. 2024 (kellerjordan.github.io/posts/muon): the momentum of a matrix made orthogonal. Steps
                are scaled by 0.2 sqrt(max(rows, columns)) as in Moonlight (arXiv:2502.16982), so that learning rate and
                decay are those of AdamW. Its matrices are the weights with two dimensions or more that decay and lie in
                a repeated block (System.has_weight_decay, System.list_block_classes); a filter counts as (out, the
                rest). AdamW has the rest: embeddings, first and last layers, gains, biases.

DeepSpeed 0.19 has a Muon, too. It is not used: it clips the orthogonal update in place of the gradient, needs
reduce_scatter off at stage 3, and gathers all gradients and momenta whole on every rank there, both before and after.

All but muon change an element by that element's own history, so any partition does. Each parameter group names under
"moments" what its optimizer keeps of a weight; masters.py hands these to checkpoints.
"""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dstrain.distributed import group as ranks
from dstrain.engine import settings
from dstrain.engine.patches import reset_cached_beta_powers
from dstrain.recipe import ConfigError, Optimizer, is_weight_learned, matches_weight_pattern

Group = dict[str, Any]
Decays = Callable[[str, Tensor], bool]
ADAM = ("exp_avg", "exp_avg_sq")
CODES = ("state1", "absmax1", "state2", "absmax2")  # of bitsandbytes: a moment's 8 bits, its blocks' scales
_BLOCK = 256


def get_unpartitioned_shape(tensor: Tensor) -> torch.Size:
    """Returns the shape of the whole tensor, even of a parameter that ZeRO-3 has partitioned."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


def build_optimizer(groups: list[Group], choice: Optimizer, offloaded: bool) -> torch.optim.Optimizer:
    """Returns a new optimizer for parameter groups: the one that the recipe names or, if `offloaded`, DeepSpeed's AdamW
    for the CPU.
    """
    options = {"lr": choice.lr, "betas": tuple(choice.betas), "eps": choice.eps}
    if offloaded:
        import deepspeed

        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
        optimizer.register_step_pre_hook(reset_cached_beta_powers)
        return optimizer
    if choice.name == "lion":
        return Lion(groups, lr=choice.lr, betas=tuple(choice.betas))
    if choice.name == "adamw8bit":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(groups, **options)
    if choice.name == "muon":
        return Muon(groups, fused=True, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


def freeze_weights(networks: Mapping[str, nn.Module], train_only: Sequence[str] | None, choice: Optimizer) -> None:
    """Freezes every weight that no pattern of train_only fits, and lets the other weights learn. Changes none if
    train_only is None. Adapters (nn/lora.py) always learn. networks: {part: network}.

    Raises ConfigError if a pattern of train_only or optimizer.rates fits no weight, or if a part has nothing left to
    learn.
    """
    weights = [(part, *named) for part, network in networks.items() for named in network.named_parameters()]
    for pattern, key in (
        *((each, "train_only") for each in train_only or ()),
        *((r, "optimizer.rates") for r in choice.rates),
    ):
        if not any(matches_weight_pattern(pattern, part, name) for part, name, _ in weights):
            near = difflib.get_close_matches(pattern, [name for _, name, _ in weights], 1, 0.0)
            raise ConfigError(f"{key}: {pattern} fits no weight of {', '.join(networks)}; the nearest is {near[0]}")
    for part, name, weight in weights:
        weight.requires_grad_(is_weight_learned(train_only, part, name, weight.requires_grad))
    learning = {part for part, _, weight in weights if weight.requires_grad}
    for part in networks:
        if part not in learning:
            raise ConfigError(
                f"train_only leaves nothing of {part} that learns: add a pattern for it, such as {part}/*, or leave it "
                "out"
            )


def make_parameter_groups(
    network: nn.Module, choice: Optimizer, decays: Decays, blocks: tuple[type[nn.Module], ...], part: str = ""
) -> Iterator[Group]:
    """Yields the optimizer's parameter groups of a network, without frozen weights. The weights of a group agree in
    three things: whether Muon steps them as matrices, whether they decay, and the factor of their learning rate
    (optimizer.rates).

    Raises ConfigError if a weight has no elements, or if the optimizer is Muon and there are no matrices for it.
    """
    inside = {
        id(weight) for module in network.modules() if isinstance(module, blocks) for weight in module.parameters()
    }
    weights: dict[tuple[bool, bool, float], list[nn.Parameter]] = {}
    for name, weight in network.named_parameters():
        shaped = torch.empty(get_unpartitioned_shape(weight), device="meta")
        if not shaped.numel():
            raise ConfigError(f"system: {name} has no elements, and a checkpoint could not hold it: leave it out")
        if not weight.requires_grad:
            continue
        decayed = decays(name, shaped)
        matrix = choice.name == "muon" and decayed and shaped.ndim >= 2 and id(weight) in inside
        weights.setdefault((not matrix, not decayed, choice.find_lr_factor(part, name)), []).append(weight)
    if choice.name == "muon" and all(rest for rest, *_ in weights):
        raise ConfigError(
            f"optimizer.name=muon: {type(network).__name__} has no matrices that learn in repeated blocks, which "
            "System.list_block_classes names: write optimizer.name=adamw"
        )
    for (rest, undecayed, rate), members in sorted(weights.items(), key=lambda item: item[0]):
        yield {
            "params": members,
            "weight_decay": 0.0 if undecayed else choice.weight_decay,
            "moments": ("exp_avg",) if choice.name == "lion" else ADAM if rest else ("momentum",),
            **({} if rest else {"momentum": choice.momentum}),
            **({} if rate == 1 else {"rate": rate}),
        }


def get_or_make_state(optimizer: torch.optim.Optimizer, weight: Tensor, moments: Sequence[str]) -> dict[str, Any]:
    """Returns the live state that the optimizer keeps for a weight or flat tensor. If there is none yet, makes one: 0
    steps, and zeros for each name in `moments`. (bitsandbytes' 8-bit AdamW makes its own, under other names.)
    """
    state = optimizer.state[weight]
    if not state:
        if type(optimizer).__name__ == "AdamW8bit":
            groups = optimizer.param_groups  # at stage 3 they hold weights within a step only
            optimizer.param_groups = [{**groups[0], "params": [weight]}]
            optimizer.init_state(optimizer.param_groups[0], weight, 0, 0)
            optimizer.param_groups = groups
            return state
        counted = getattr(optimizer, "_step_supports_amp_scaling", False)  # on the device, that is
        counter = torch.tensor(0.0, device=weight.device if counted else "cpu")
        state["step"] = 0 if type(optimizer).__name__ == "DeepSpeedCPUAdam" else counter
        state.update((moment, torch.zeros_like(weight.detach())) for moment in moments)
    return state


def get_moment_in_fp32(state: dict[str, Any], kind: str) -> Tensor:
    """Returns the moment named `kind` from an optimizer's state, in fp32. It is the live tensor; but an 8-bit moment is
    returned as a copy, which `write_back_8bit_moment` can write back.
    """
    if kind in state:
        return state[kind]
    number = 1 + ADAM.index(kind)
    if f"absmax{number}" not in state:  # bitsandbytes keeps small tensors in fp32
        return state[f"state{number}"]
    from bitsandbytes.functional import dequantize_blockwise

    codes = state[f"state{number}"]
    return dequantize_blockwise(
        codes.view(-1), absmax=state[f"absmax{number}"], code=state[f"qmap{number}"], blocksize=_BLOCK
    ).view_as(codes)


def write_back_8bit_moment(state: dict[str, Any], kind: str, values: Tensor) -> None:
    """Quantizes `values` and writes them into the 8-bit moment named `kind` of an optimizer's state. Does nothing if
    the state has no 8-bit moments, since `get_moment_in_fp32` then returns the live tensor itself.
    """
    if "absmax1" not in state:
        return
    from bitsandbytes.functional import quantize_blockwise

    number = 1 + ADAM.index(kind)
    codes, scales = quantize_blockwise(values.reshape(-1), code=state[f"qmap{number}"], blocksize=_BLOCK)
    state[f"state{number}"].view(-1).copy_(codes)
    state[f"absmax{number}"].copy_(scales.absmax)


def reinterpret_bytes_as_floats(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor as a float32 tensor (n,): padded with zeros to a multiple of four bytes, and
    reinterpreted.
    """
    octets = tensor.view(-1).view(torch.uint8)
    return torch.nn.functional.pad(octets, (0, -octets.numel() % 4)).view(torch.float32)


def set_bytes_from_reinterpreted_floats(tensor: Tensor, values: Tensor) -> None:
    """Sets a tensor's bytes to those in `values`, which `reinterpret_bytes_as_floats` has made of a tensor of equal
    size.
    """
    tensor.view(-1).view(torch.uint8).copy_(values.view(torch.uint8)[: tensor.nbytes])


class Lion(torch.optim.Optimizer):
    """Lion, with decoupled decay. Takes grad_scale and found_inf as a fused AdamW of torch does."""

    _step_supports_amp_scaling = True

    def __init__(self, groups: list[Group], lr: float, betas: tuple[float, float]):
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                gradient, applied = _unscale_gradient_unless_step_skipped(self, weight.grad)
                state = get_or_make_state(self, weight, group["moments"])
                average = state["exp_avg"]
                update = average.lerp(gradient, 1 - beta1).sign_()
                weight.mul_(1 - lr * group["weight_decay"] * applied).sub_(update.mul_(lr * applied))
                average.lerp_(gradient, (1 - beta2) * applied)
                state["step"] += applied


def _unscale_gradient_unless_step_skipped(
    optimizer: torch.optim.Optimizer, gradient: Tensor
) -> tuple[Tensor, Tensor | float]:
    """Returns (gradient, applied): the gradient divided by the optimizer's grad_scale, and 1. If the step is skipped,
    because the optimizer's found_inf is 1, returns zeros and 0. If found_inf is set, both are tensors on the device, so
    that the host does not wait.
    """
    found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if scale is not None:
        gradient = gradient / scale
    if found_inf is None:
        return gradient, 1.0
    return torch.where(found_inf > 0, 0.0, gradient), 1 - found_inf


@dataclass
class Piece:
    """Elements `start` .. `start + numel` of a matrix, at `offset` in the flat of `rank`."""

    rank: int
    start: int
    numel: int
    offset: int


@dataclass
class Matrix:
    """A matrix (rows, columns) in pieces, in order. `owner` is the rank that makes the matrix's updates orthogonal."""

    rows: int
    columns: int
    pieces: list[Piece]
    owner: int = 0

    @property
    def lr_factor(self) -> float:
        """Returns 0.2 * sqrt(the longer side), by which the learning rate of this matrix is multiplied. With it, the
        updates of a matrix have about the mean square of AdamW's updates, whatever its shape.
        """
        return 0.2 * math.sqrt(max(self.rows, self.columns))

    @property
    def orthogonalization_cost(self) -> int:
        return self.rows * self.columns * min(self.rows, self.columns)


class Muon(torch.optim.AdamW):
    """Muon for the groups with a "momentum", AdamW for the others.

    The momentum is elementwise, so each rank keeps that of its own flat. The orthogonal update needs whole matrices:
    the rank that holds most of a matrix collects the update in bf16, the precision in which it is computed in any case,
    and sends the slices back. That is two all-to-all exchanges for a flat: at stages 1 and 2 of the matrices that lie
    on several ranks, at stage 3 of all, 2 x 2 bytes for each element that a rank owns. At stage 0 each rank computes
    all updates by itself.
    """

    def __init__(self, groups: list[Group], **options: Any):
        super().__init__(groups, **options)
        self._matrices: dict[Tensor, list[Matrix]] | None = None

    def assign_matrices_to_ranks(
        self, flats: Sequence[Tensor], layouts: Mapping[int, Sequence[tuple[Any, int, int]]]
    ) -> None:
        """Finds on which ranks the elements of each matrix lie, and chooses one of these ranks to make the matrix's
        update orthogonal: the one with the most elements of the matrix, and among equals the one with the least work so
        far. Steps before this call change no matrix.

        flats     this rank's tensors with its share of the matrices
        layouts   {rank: [(fragment of a matrix, index of the rank's tensor, offset in this tensor), ...]}
        """
        # DeepSpeed takes a step on zero gradients when it starts, before this call.
        self._matrices = {flat: [] for flat in flats}
        load = [0] * ranks.world()
        found: dict[tuple[int, str], Matrix] = {}
        for rank, layout in layouts.items():
            for fragment, number, offset in layout:
                rows, *columns = fragment.shape
                matrix = found.setdefault((number, fragment.name), Matrix(rows, math.prod(columns), []))
                matrix.pieces.append(Piece(rank, fragment.start, fragment.numel, offset))
        for (number, _), matrix in found.items():
            most = max(piece.numel for piece in matrix.pieces)
            matrix.owner = min((piece.rank for piece in matrix.pieces if piece.numel == most), key=lambda r: load[r])
            load[matrix.owner] += matrix.orthogonalization_cost
            self._matrices[flats[number]].append(matrix)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        groups = self.param_groups
        self.param_groups = [group for group in groups if "momentum" not in group]
        try:
            if any(group["params"] for group in self.param_groups):
                super().step()
        finally:
            self.param_groups = groups
        for group in groups if self._matrices is not None else ():
            for flat in group["params"] if "momentum" in group else ():
                if flat.grad is not None:
                    self._step_matrices(flat, group)

    def _step_matrices(self, flat: Tensor, group: Group) -> None:
        matrices, lr = self._matrices[flat], group["lr"]
        gradient, applied = _unscale_gradient_unless_step_skipped(self, flat.grad)
        state = get_or_make_state(self, flat, group["moments"])
        momentum = state["momentum"].lerp_(gradient, (1 - group["momentum"]) * applied)
        update = gradient.lerp(momentum, group["momentum"]).bfloat16().view(-1)  # Nesterov's
        for matrix in matrices:
            if len(matrix.pieces) == 1 and matrix.owner == ranks.rank():
                piece = update.narrow(0, matrix.pieces[0].offset, matrix.pieces[0].numel)
                piece.copy_(orthogonalize(piece.view(matrix.rows, matrix.columns)).reshape(-1))
        if shared := [matrix for matrix in matrices if len(matrix.pieces) > 1]:
            orthogonalize_across_ranks(update, shared)
        update.mul_(applied)
        weights = flat.mul_(1 - lr * group["weight_decay"] * applied).view(-1)
        for matrix in matrices:
            for piece in matrix.pieces:
                if piece.rank == ranks.rank():
                    own = weights.narrow(0, piece.offset, piece.numel)
                    own.add_(update.narrow(0, piece.offset, piece.numel), alpha=-lr * matrix.lr_factor)
        state["step"] += applied


def orthogonalize(matrix: Tensor) -> Tensor:
    """Returns a nearly orthogonal matrix with about the singular vectors of `matrix` (rows, columns), and singular
    values of about 0.7 to 1.2. Takes five steps of the quintic Newton-Schulz iteration with the coefficients of Jordan
    et al.

    It computes in the dtype of `matrix`, but in fp32 on a CPU that can only emulate bf16. The result has the dtype of
    `matrix`.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if tall else matrix
    if matrix.device.type == "cpu" and not settings.can_cpu_multiply_bf16():
        wide = wide.float()
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide.T if tall else wide).to(matrix.dtype)


def orthogonalize_across_ranks(update: Tensor, matrices: Sequence[Matrix]) -> None:
    """Makes the matrices that lie on several ranks orthogonal, in place in this rank's tensor `update`. For each
    matrix, its owner collects the pieces from all ranks, orthogonalizes the whole and sends the pieces back. Call it on
    all ranks.
    """
    rank, world = ranks.rank(), ranks.world()
    mine = [
        [
            (matrix, piece)
            for matrix in matrices
            if matrix.owner == owner
            for piece in matrix.pieces
            if piece.rank == rank
        ]
        for owner in range(world)
    ]
    theirs = [
        [
            (matrix, piece)
            for matrix in matrices
            if matrix.owner == rank
            for piece in matrix.pieces
            if piece.rank == other
        ]
        for other in range(world)
    ]
    sent, received = ([sum(piece.numel for _, piece in pieces) for pieces in side] for side in (mine, theirs))
    outgoing = torch.cat(
        [update.new_empty(0), *(update.narrow(0, piece.offset, piece.numel) for pieces in mine for _, piece in pieces)]
    )
    incoming = update.new_empty(sum(received))
    dist.all_to_all_single(incoming, outgoing, received, sent)
    places = [place for pieces in theirs for place in pieces]
    values = list(incoming.split([piece.numel for _, piece in places])) if places else []
    for matrix in matrices:
        if matrix.owner == rank:
            slices = sorted(
                ((piece.start, value) for (owned, piece), value in zip(places, values) if owned is matrix),
                key=lambda item: item[0],
            )
            whole = orthogonalize(torch.cat([value for _, value in slices]).view(matrix.rows, matrix.columns)).reshape(
                -1
            )
            for start, value in slices:
                value.copy_(whole[start : start + value.numel()])
    dist.all_to_all_single(outgoing, incoming, sent, received)
    returned = [piece for pieces in mine for _, piece in pieces]
    for piece, value in zip(returned, outgoing.split([piece.numel for piece in returned]) if returned else ()):
        update.narrow(0, piece.offset, piece.numel).copy_(value)
