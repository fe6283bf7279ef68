"""Finds the fp32 weights that this rank owns, as named fragments, with the optimizer's state and the frozen weights.

It reads DeepSpeed's internals: see patches.py.

A *flat* is one live fp32 tensor that the optimizer steps: a partition of a parameter group under ZeRO, a whole
parameter at stage 0. A fragment is the part of one named parameter that lies in one flat; the rest of a flat is
padding.

    stage 3           fp32_partitioned_groups_flat, one flat for each sub-group
    stage 1, 2        single_partition_of_fp32_groups, one flat for each parameter group
    stage 0 bf16      fp32_groups, one for each parameter, on every rank
    stage 0 fp32      the parameters themselves, on every rank
"""

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dstrain.checkpoint.fragments import Fragment, read_flattened_slice
from dstrain.distributed import group
from dstrain.engine.optimizers import (
    CODES,
    Muon,
    get_moment_in_fp32,
    get_or_make_state,
    get_unpartitioned_shape,
    reinterpret_bytes_as_floats,
    write_back_8bit_moment,
)
from dstrain.engine.updates import Updates


def locate_weight_pieces_in_shares(
    sizes: Iterable[int], share_size: int, ranks: range
) -> Iterator[Annotated[tuple[int, int, int, int, int], "weight, rank, start, numel, offset in share"]]:
    """Cuts weights that lie one after another into equal shares, one for each rank. Yields the pieces that `ranks` get,
    each as (index of the weight, rank, first element within the weight, number of elements, offset within the rank's
    share).

    sizes        numbers of elements of the weights
    share_size   number of elements of a share
    """
    begin = 0
    for index, size in enumerate(sizes):
        end = begin + size
        for rank in range(max(ranks.start, begin // share_size), min(ranks.stop, -(-end // share_size)) if size else 0):
            first = max(begin, rank * share_size)
            yield index, rank, first - begin, min(end, (rank + 1) * share_size) - first, first - rank * share_size
        begin = end


class Masters(Updates):
    """Locates the fp32 weights (masters) of one engine in its flats, gives them their names, and copies them into the
    weights that the network computes with.
    """

    def __init__(self, engine: Any):
        super().__init__(engine)
        self._names = {id(weight): name for name, weight in engine.module.named_parameters()}
        self.flats: list[Tensor] = []
        self.fragments: list[tuple[Fragment, int, int]] = []  # fragment, number of its flat, offset in it
        self._groups: list[int] = []  # the parameter group of each flat
        self.frozen = list(self._iterate_frozen_fragments())  # weights that do not learn, in the network's precision
        self.replicated = self.stage == 0
        {
            0: self._locate_masters_at_stage0,
            1: self._locate_masters_at_stages12,
            2: self._locate_masters_at_stages12,
            3: self._locate_masters_at_stage3,
        }[self.stage]()
        if isinstance(self._get_inner_optimizer(), Muon):
            self._get_inner_optimizer().assign_matrices_to_ranks(
                [self._get_optimized_tensor(number) for number in range(len(self.flats))],
                self._group_fragments_by_rank(),
            )
        compute = {weight.data_ptr() for weight in self._list_shares_of_network_weights()}
        # In fp32 the masters may be the compute weights: `use_flat_tensors_as_weights` then needs a copy of them.
        self._aliased = any(flat.data_ptr() in compute for flat in self.flats)

    def _locate_masters_at_stage0(self) -> None:
        """Finds the fp32 weights at stage 0, where each rank has all of them. Sets `flats`, one tensor for each weight,
        and `fragments`.
        """
        groups = getattr(self._zero, "fp32_groups", None)
        if groups is None:
            pairs = [[(p, p.data) for p in params["params"]] for params in self._zero.param_groups]
        else:
            pairs = [list(zip(ps, masters)) for ps, masters in zip(self._zero.fp16_groups, groups)]
        self._groups = [group_number for group_number, members in enumerate(pairs) for _ in members]
        pairs = list(chain.from_iterable(pairs))
        self._weights = [weight for weight, _ in pairs]
        for number, (weight, master) in enumerate(pairs):
            self.flats.append(master)
            whole = Fragment(self._names[id(weight)], tuple(weight.shape), 0, weight.numel())
            self.fragments.append((whole, number, 0))

    def _locate_masters_at_stages12(self) -> None:
        """Finds this rank's share of the fp32 weights at stages 1 and 2. Sets `flats`, one tensor for each parameter
        group, and `fragments`, which say which elements of which weights these tensors hold.
        """
        self.flats = list(self._zero.single_partition_of_fp32_groups)
        self._groups = list(range(len(self.flats)))
        self._set_fragments_of_this_rank()

    def _locate_masters_at_stage3(self) -> None:
        """Finds this rank's share of the fp32 weights at stage 3. Sets `flats`, one tensor for each sub-group of the
        weights, and `fragments`, which say which elements of which weights these tensors hold.
        """
        self.flats = list(self._zero.fp32_partitioned_groups_flat)
        self._groups = [self._zero.sub_group_to_group_id[number] for number in range(len(self.flats))]
        self._set_fragments_of_this_rank()

    def _set_fragments_of_this_rank(self) -> None:
        rank = dist.get_rank(self._zero.dp_process_group)
        self.fragments = [fragment for _, fragment in self._iterate_fragments_of_ranks(range(rank, rank + 1))]

    def _iterate_fragments_of_ranks(self, ranks: range) -> Iterator[tuple[int, tuple[Fragment, int, int]]]:
        """Yields (rank, (fragment, number, offset)) for all fragments of weights that these ranks own at stages 1 to 3.
        `number` is the index of the tensor in `flats` that holds the fragment, `offset` is the first element in this
        tensor. Exchanges nothing between ranks.
        """
        zero = self._zero
        runs = []  # weights that are cut together, the number of their flat, where they begin in it, a rank's share
        if self.stage == 3:
            for weight in chain.from_iterable(zero.fp16_groups):
                runs.append(([weight], *zero.grad_position[zero.get_param_id(weight)]))
        else:
            for number, (weights, flat) in enumerate(zip(zero.bit16_groups, self.flats)):
                runs.append((weights, number, 0, flat.numel()))
        for weights, number, begin, share in runs:
            shapes = [tuple(get_unpartitioned_shape(weight)) for weight in weights]
            for index, rank, start, numel, offset in locate_weight_pieces_in_shares(
                map(math.prod, shapes), share, ranks
            ):
                fragment = Fragment(self._names[id(weights[index])], shapes[index], start, numel)
                yield rank, (fragment, number, begin + offset)

    def _iterate_frozen_fragments(self) -> Iterator[tuple[Fragment, Tensor]]:
        """Yields (fragment, values (numel,)) of each frozen weight. At stage 3 these are the elements of the weight
        that this rank holds, else the whole weight.
        """
        for name, weight in self.engine.module.named_parameters():
            if weight.requires_grad:
                continue
            values, start = weight.data.view(-1), 0
            if self.stage == 3:
                values = weight.ds_tensor
                start = min(dist.get_rank(self._zero.dp_process_group) * values.numel(), weight.ds_numel)
                values = values.narrow(0, 0, min(values.numel(), weight.ds_numel - start))  # the last one is padded
            if values.numel():
                yield Fragment(name, tuple(get_unpartitioned_shape(weight)), start, values.numel()), values

    def iterate_frozen_weights_to_save(self) -> Iterator[tuple[Fragment, Tensor]]:
        """Yields (fragment, values) of the frozen weights that this rank writes into a checkpoint. Each element is
        written by one rank only.
        """
        for number, (fragment, values) in enumerate(self.frozen):
            if self.stage == 3 or number % group.world() == group.rank():
                yield fragment, values

    def collect_owned_weight_names(self) -> set[str]:
        """Returns the names of the weights, trained or frozen, of which this rank holds at least one element."""
        return {fragment.name for fragment, *_ in (*self.fragments, *self.frozen)}

    def _group_fragments_by_rank(self) -> dict[int, Sequence[tuple[Fragment, int, int]]]:
        """Returns {rank: [(fragment, number, offset), ...]} of all ranks; at stage 0, where all ranks have the same
        fragments, of this rank alone. `number` is the index of the tensor in `flats` that holds the fragment, `offset`
        is the first element in this tensor.
        """
        if self.replicated:
            return {group.rank(): self.fragments}
        layouts: dict[int, list[tuple[Fragment, int, int]]] = {rank: [] for rank in range(group.world())}
        for rank, fragment in self._iterate_fragments_of_ranks(range(group.world())):
            layouts[rank].append(fragment)
        return layouts

    def _list_shares_of_network_weights(self) -> Sequence[Tensor]:
        """Returns this rank's share of the weights that the network computes with, in the network's precision. Each
        tensor has the elements of the fp32 tensor in `flats` with the same index, in the same order.
        """
        if self.replicated:
            return [weight.data for weight in self._weights]
        if hasattr(self._zero, "fp16_partitioned_groups_flat"):
            return self._zero.fp16_partitioned_groups_flat
        partitions = zip(self._zero.parallel_partitioned_bit16_groups, self._zero.real_dp_process_group)
        return [parts[dist.get_rank(owners)] for parts, owners in partitions]

    def iterate_fragment_views(self, flats: Sequence[Tensor | None]) -> Iterator[tuple[Fragment, Tensor]]:
        """Yields (fragment, view (numel,)) for each fragment of a weight that this rank holds. The view shows the
        fragment's elements in `flats`: a list of tensors laid out like `self.flats`, such as those of an average.
        Leaves out the fragments whose tensor in `flats` is None.
        """
        lines = [None if flat is None else flat.detach().view(-1) for flat in flats]
        for fragment, number, offset in self.fragments:
            if lines[number] is not None:
                yield fragment, lines[number].narrow(0, offset, fragment.numel)

    def iterate_fragment_views_to_save(self, flats: Sequence[Tensor | None]) -> Iterator[tuple[Fragment, Tensor]]:
        """Yields (fragment, view (numel,)) as `iterate_fragment_views` does, but only for the fragments that this rank
        writes into a checkpoint. Each fragment is written by one rank only.
        """
        rank, world = group.rank(), group.world()
        for number, view in enumerate(self.iterate_fragment_views(flats)):
            if not self.replicated or number % world == rank:
                yield view

    @torch.no_grad()
    def compute_weight_norm(self) -> float:
        """Returns, on every rank, the L2 norm of all trained fp32 weights of this part, taken as one vector. Call it on
        all ranks.
        """
        squares = [
            view.square().sum(dtype=torch.float64) for _, view in self.iterate_fragment_views_to_save(self.flats)
        ]
        total = sum(squares, torch.zeros((), dtype=torch.float64, device=self.flats[0].device))
        return group.sum_over_ranks(total.to(group.device())).sqrt().item()  # offloaded masters are on the host

    @torch.no_grad()
    def fill_masters(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Sets the elements that this rank holds of the masters and frozen weights. `values` are pairs (name, whole
        weight). Ignores names that the network does not have. Call `copy_masters_to_network` afterwards.
        """
        own: dict[str, list[tuple[Fragment, Tensor]]] = {}
        for fragment, view in chain(self.iterate_fragment_views(self.flats), self.frozen):
            own.setdefault(fragment.name, []).append((fragment, view))
        for name, value in values:
            for fragment, view in own.get(name, ()):
                view.copy_(read_flattened_slice(value, fragment.start, fragment.numel))

    def copy_masters_to_network(self) -> None:
        """Copies the masters into the weights that the network computes with. Drops ZeRO++'s second copies of frozen
        weights, which would keep earlier values. Call it on all ranks.
        """
        for weight in self.engine.module.parameters():
            if not weight.requires_grad and hasattr(weight, "ds_secondary_tensor"):
                weight.ds_secondary_tensor = None  # ZeRO++'s second copy, of earlier values
        self._copy_flat_tensors_to_network(self.flats)

    @contextmanager
    def use_flat_tensors_as_weights(self, flats: Sequence[Tensor]) -> Iterator[None]:
        """Inside the block, the network computes with the values in `flats` as its weights; these are tensors laid out
        like `self.flats`. After the block it has the masters again, bit for bit. Enter and leave the block on all ranks
        together.
        """
        masters = [flat.detach().clone() for flat in self.flats] if self._aliased else self.flats
        self._copy_flat_tensors_to_network(flats)
        try:
            yield
        finally:
            self._copy_flat_tensors_to_network(masters)

    @torch.no_grad()
    def _copy_flat_tensors_to_network(self, flats: Sequence[Tensor]) -> None:
        gathers = hasattr(self._zero, "fp16_partitioned_groups_flat")
        if gathers:
            self._zero.checkpoint_event_prologue()  # releases gathered parameters
        for shown, flat in zip(self._list_shares_of_network_weights(), flats):
            shown.copy_(flat.view_as(shown))
        if gathers:
            for number in range(len(flats)):
                self._zero._unflatten_partitioned_parameters(number)
            self._zero.checkpoint_event_epilogue()  # gathers the persistent ones again
        elif not self.replicated:
            from deepspeed.runtime.utils import all_gather_dp_groups

            all_gather_dp_groups(
                groups_flat=self._zero.bit16_groups_flat,
                partitioned_param_groups=self._zero.parallel_partitioned_bit16_groups,
                dp_process_group=self._zero.real_dp_process_group,
                start_alignment_factor=self._zero.nccl_start_alignment_factor,
                allgather_bucket_size=self._zero.allgather_bucket_size,
            )

    def reset_optimizer_state(self) -> None:
        """Removes the optimizer's state, so that it begins anew. At stage 0 DeepSpeed has made one by a step on zero
        gradients.
        """
        self._get_inner_optimizer().state.clear()

    def list_optimizer_state(self) -> list[dict[str, Any]]:
        """Returns the optimizer's state, a live dict for each weight or flat that has one."""
        return list(self._get_inner_optimizer().state.values())

    @property
    def moment_kinds(self) -> list[str]:
        """Returns the names of all moments that the optimizer keeps, such as exp_avg. For some weights it may keep only
        some of them.
        """
        return list(
            dict.fromkeys(kind for group_ in self._get_inner_optimizer().param_groups for kind in group_["moments"])
        )

    def get_moments_in_fp32(self, kind: str) -> list[Tensor | None]:
        """Returns the optimizer's moment with the name `kind`, as one tensor for each tensor in `flats`; None where the
        optimizer keeps no such moment. Before the first step a moment is 0.

        The tensors are the optimizer's own. But 8-bit moments are returned as fp32 copies: changes of these take effect
        by `write_back_8bit_moments`.
        """
        return [
            get_moment_in_fp32(self._get_optimizer_state(number), kind)
            if kind in self._get_moment_names_of_flat(number)
            else None
            for number in range(len(self.flats))
        ]

    def write_back_8bit_moments(self, kind: str, values: Sequence[Tensor | None]) -> None:
        for number, flat in enumerate(values):
            if flat is not None:
                write_back_8bit_moment(self._get_optimizer_state(number), kind, flat)

    def iterate_8bit_moments(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yields (kind, name, tensor) for the live tensors of an optimizer with 8-bit moments: their codes and the
        scales of these codes. A run that loads them resumes bit for bit. The name contains a hash of how the weights
        are laid out on this rank.
        """
        # If a resumed run quantized fp32 moments again, the scales would differ.
        for number, flat in enumerate(self.flats):
            state = self._get_optimizer_state(number)
            pieces = [(fragment, offset) for fragment, flat_number, offset in self.fragments if flat_number == number]
            layout = f"{zlib.crc32(repr((flat.numel(), pieces)).encode()):08x}-{number}"
            yield from ((kind, f"{layout}.{kind}", state[kind]) for kind in CODES if "absmax1" in state)

    def iterate_8bit_moments_to_save(self) -> Iterator[tuple[str, Fragment, Tensor]]:
        """Yields (kind, fragment, values) for the 8-bit codes and scales that this rank writes into a checkpoint.
        `values` are the bytes of a tensor, reinterpreted as float32 (n,). At stage 0, where all ranks have the same
        tensors, only one rank writes each.
        """
        for number, (kind, name, tensor) in enumerate(self.iterate_8bit_moments()):
            if not self.replicated or number % group.world() == group.rank():
                values = reinterpret_bytes_as_floats(tensor)
                yield kind, Fragment(name, (values.numel(),), 0, values.numel()), values

    def _get_moment_names_of_flat(self, flat_number: int) -> tuple[str, ...]:
        return self._get_inner_optimizer().param_groups[self._groups[flat_number]]["moments"]

    def _get_optimized_tensor(self, flat_number: int) -> Tensor:
        """Returns the tensor that the optimizer updates when it steps `flats[flat_number]`: this tensor itself, or at
        stage 0 in fp32 the network's parameter, which shares its memory.
        """
        return self._weights[flat_number] if self._torch_fp32 else self.flats[flat_number]

    def _get_optimizer_state(self, flat_number: int) -> dict[str, Any]:
        return get_or_make_state(
            self._get_inner_optimizer(),
            self._get_optimized_tensor(flat_number),
            self._get_moment_names_of_flat(flat_number),
        )

    @property
    def num_updates(self) -> int:
        """Returns the number of updates that the optimizer has applied, without skipped steps. Returns 0 on a rank that
        owns no masters.
        """
        return int(self._get_optimizer_state(0)["step"]) if self.flats else 0

    @num_updates.setter
    def num_updates(self, count: int) -> None:
        for number in range(len(self.flats)):
            state = self._get_optimizer_state(number)
            state["step"] = state["step"].fill_(count) if torch.is_tensor(state["step"]) else count
