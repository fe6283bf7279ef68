"""What the comparisons with diffusers share."""

import pytest
import torch
from diffusers.models import embeddings
from diffusers.utils import dynamic_modules_utils


@pytest.fixture(autouse=True)
def own_modules(tmp_path_factory, monkeypatch):
    """A folder for the code of pipelines, which diffusers copies under one name: tests run beside each other."""
    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))


@pytest.fixture
def exact_timesteps(monkeypatch):
    """diffusers' sinusoids by its own code, frequencies in float64 and rounded once, as ours are.

    In float32 they are as good as the CPU's exp and move a network's prediction by 2e-5 or more: no comparison would
    be closer than that.
    """
    theirs, arange, exp = embeddings.get_timestep_embedding, torch.arange, torch.exp

    def exact(*given, **named):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "arange", lambda *ends, dtype, **more: arange(*ends, dtype=torch.float64, **more))
            patch.setattr(torch, "exp", lambda x: exp(x).float())
            return theirs(*given, **named)

    monkeypatch.setattr(embeddings, "get_timestep_embedding", exact)
