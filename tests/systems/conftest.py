"""What the comparisons with diffusers share."""

import pytest
import torch
from diffusers.models import embeddings


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
