"""A process as rank 0 of ranks that do not exist, with tensors that hold no values."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from dstrain.distributed import group
from dstrain.engine.planning.fake_ranks import use_fake_ranks_and_tensors


def values() -> None:
    with use_fake_ranks_and_tensors(4):
        x, whole, mask = torch.ones(5, 3), torch.ones(4, dtype=torch.int32), torch.ones(5, dtype=torch.bool)
        assert isinstance(x, FakeTensor)
        for tensor, zero in ((x.sum(), 0.0), (whole[0], 0), (mask.any(), False), (x.double().mean(), 0.0)):
            assert tensor.item() == zero and type(tensor.item()) is type(zero)
        assert x.nonzero().shape == (0, 2) and mask.nonzero().shape == (0, 1) and mask.nonzero().dtype == torch.int64
        for tensor in (x, whole):
            unique, inverse, counts = torch.unique(tensor, return_inverse=True, return_counts=True)
            assert [part.shape for part in (unique, inverse, counts)] == [(0,)] * 3
            assert (unique.dtype, inverse.dtype, counts.dtype) == (tensor.dtype, torch.int64, torch.int64)
        assert x[mask].shape == (0, 3) and x[x > 0].shape == (0,) and torch.ones(5, 3, 2)[x > 0].shape == (0, 2)
        assert x[torch.tensor([0, 1])].shape == (2, 3) and x[:, torch.tensor([0, 1])].shape == (5, 2)
        assert x[mask].dtype == x.dtype and whole[:, None].expand(4, 2).reshape(-1).shape == (8,)
        assert (x.to(torch.float64).dtype, (x @ x.T).shape) == (torch.float64, (5, 5))
        with unset_fake_temporarily():
            real = torch.arange(4.0)
            assert real.sum().item() == 6 and real[real > 1].tolist() == [2, 3] and len(real.nonzero()) == 3
        assert (real + 1).shape == (4,)


def worlds() -> None:
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    linear = nn.functional.linear
    for world in (8, 1, 3):
        with use_fake_ranks_and_tensors(world):
            assert (dist.get_rank(), dist.get_world_size(), group.rank(), group.world()) == (0, world, 0, world)
            assert dist.get_backend() == "fake" and comm.get_world_size() == world
            named = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
            assert named == {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
            assert groups._get_data_parallel_world_size() == world
            groups._get_expert_parallel_group_dict()["pair"] = dist.new_group([0])
            gathered = torch.empty(2 * world)
            dist.all_gather_into_tensor(gathered, torch.ones(2))
            dist.all_reduce(gathered)
            assert gathered.shape == (2 * world,) and groups._WORLD_GROUP is not None
            nn.functional.linear = None  # as ZeRO-3 puts its own in this place
        assert not dist.is_initialized() and comm.cdb is None and nn.functional.linear is linear
        assert groups._WORLD_GROUP is None and groups._EXPERT_PARALLEL_GROUP == {}
        assert callable(groups._get_data_parallel_group)
        assert not group.is_started() and not isinstance(torch.ones(2), FakeTensor)


def test_values_that_are_not_there(in_fork):
    """Oracle: zero where a value is read, nothing where elements are selected by values, torch's shapes elsewhere."""
    in_fork(values)


def test_one_world_after_another(in_fork):
    """Oracle: the variables, torch's own word for the group, and DeepSpeed's for what it has made in it; nothing of a
    world is left in the next one.
    """
    in_fork(worlds)
