"""A process group of the tests' own process: what runs on one rank needs no launch."""

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """This process is the only rank, as after start(); no group, variable or state of DeepSpeed is left behind."""
    from dstrain.engine.start import start
    environment = dict(os.environ)
    start(timeout_minutes=1)
    from deepspeed.comm import comm
    from deepspeed.utils import groups
    yield
    dist.destroy_process_group()
    comm.cdb = None
    # DeepSpeed keeps the groups that it has made in variables of this module, beside its functions and classes.
    for name, value in vars(groups).items():
        if name.endswith("_GROUP") and value is not None:
            setattr(groups, name, {} if isinstance(value, dict) else None)
    os.environ.clear()
    os.environ.update(environment)
