"""Run by test_large_worlds.py: a training that notes what its ranks tell each other, in FILE, a JSON object a line.

    check_exchanges.py FILE WORDS ...

Rank 0 notes: of an exchange of Python values the bytes of its own one, without the host's name, which has any length;
of one of tensors the bytes of the largest.
"""

import functools
import json
import pickle
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dstrain.commands.main import start_verb
from dstrain.distributed.launcher import read_rank_and_world

TENSORS = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "reduce")


def wrap(name: str, size: Callable[..., int]) -> None:
    """Has a function of torch.distributed note its size before it does what it does."""
    function = getattr(dist, name)

    @functools.wraps(function)
    def noting(*arguments: Any, **named: Any) -> Any:
        if read_rank_and_world().rank == 0:
            with open(path, "a") as file:
                file.write(json.dumps({"name": name, "bytes": size(*arguments, *named.values())}) + "\n")
        return function(*arguments, **named)

    setattr(dist, name, noting)


def count_value(value: Any) -> int:
    return len(pickle.dumps(value).replace(socket.gethostname().encode(), b""))


def count_tensors(*arguments: Any) -> int:
    return max(value.nbytes for value in tree_leaves(arguments) if isinstance(value, Tensor))


launched = [word for word in sys.argv if word.startswith("--local_rank")]
_, path, *words = [word for word in sys.argv if word not in launched]
wrap("broadcast_object_list", lambda values, *_: count_value(values[0]))
wrap("all_gather_object", lambda results, value, *_: count_value(value))
wrap("gather_object", lambda value, *_: count_value(value))
for kind in TENSORS:
    wrap(kind, count_tensors)
sys.argv = ["dstrain train", *launched, *words]
start_verb("train")
