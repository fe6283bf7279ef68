"""Which timestep a training sample meets, and the weight that keeps the expected loss what it was.

Source: Nichol & Dhariwal 2021, section 3.3 (importance sampling of the variational bound, Equation 18).
"""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor


class TimestepSampler(ABC):
    """A distribution over timesteps, sampled by each sample's own uniform number.

    sample(uniforms)    uniforms float32 (B,) in [0, 1), keyed by the sample -> t int64 (B,), weight float32 (B,).
                        t is the inverse of the cumulative distribution at the uniform number: a function of it and of
                        the state alone, never of batch, rank or device. Descending weight * loss averages to the
                        mean over all timesteps. Stays on the uniforms' device and never waits for it.
    observe(t, losses)  what was met since the last call, (N,) each, unweighted: of ALL ranks and micro-batches of the
                        step, ordered by position in the global batch. The caller gathers (t, loss, position) and
                        sorts; the sampler knows no rank. Called with the same values everywhere, it leaves the same
                        state everywhere, however unevenly the batch was split. Entries with t < 0 are padding.
    state_dict()        tensors that a checkpoint keeps; empty where nothing is learned.
    """

    def __init__(self, num_timesteps: int) -> None:
        self.num_timesteps = num_timesteps

    @abstractmethod
    def sample(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) in [0, 1) -> timesteps (B,) int64, weights (B,) float32."""

    def observe(self, t: Tensor, losses: Tensor) -> None:
        """Learns from losses at timesteps, (N,) each, ordered by position in the global batch."""

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, the checkpoint holds {', '.join(sorted(state))}; "
                             "choose the timestep sampler that it was made with")


class UniformSampler(TimestepSampler):
    """Every timestep alike, weight 1."""

    def sample(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        # A product rounded up to T belongs to the last timestep.
        t = (uniforms * self.num_timesteps).long().clamp_(max=self.num_timesteps - 1)
        return t, torch.ones_like(uniforms)


class LossSecondMomentSampler(TimestepSampler):
    """p(t) proportional to sqrt(mean of squared losses), over the last `history_per_term` losses at each t.

    uniform_prob is the share of uniform sampling mixed in, so that no timestep is forgotten. Until every timestep has
    its full history, sampling is uniform.

    The history of a timestep is a ring: its n-th loss lies in slot n modulo the length. A mean of squares does not see
    where the ring begins. Row T is a bin for what is not kept, so that shapes never depend on the values.
    """

    def __init__(self, num_timesteps: int, history_per_term: int = 10, uniform_prob: float = 0.001) -> None:
        super().__init__(num_timesteps)
        self.history_per_term, self.uniform_prob = history_per_term, uniform_prob
        self._history = torch.zeros(num_timesteps + 1, history_per_term, dtype=torch.float64)
        self._seen = torch.zeros(num_timesteps + 1, dtype=torch.int64)
        self._refresh()

    def probabilities(self) -> Tensor:
        """p(t), float64 (T,)."""
        uniform = 1.0 / self.num_timesteps
        weights = self._history[:-1].square().mean(dim=1).sqrt()
        total = weights.sum()
        learned = weights / total * (1 - self.uniform_prob) + self.uniform_prob * uniform
        ready = (self._seen[:-1] >= self.history_per_term).all() & (total > 0)
        return torch.where(ready, learned, uniform)

    def sample(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        self._move(uniforms.device)
        t = torch.searchsorted(self._cumulative, uniforms.double(), right=True)
        t = t.clamp_(max=self.num_timesteps - 1)
        return t, self._weights.index_select(0, t)

    def observe(self, t: Tensor, losses: Tensor) -> None:
        self._move(t.device)
        length, bin_ = self.history_per_term, self.num_timesteps
        t = torch.where(t < 0, bin_, t)
        order = _stable_order(t, bin_)                                   # equal timesteps keep their order
        t, losses = t[order], losses.detach().double()[order]
        counts = torch.zeros_like(self._seen).index_add_(0, t, torch.ones_like(t))
        following = counts.cumsum(0)                                     # where the next timestep's losses begin
        place = torch.arange(len(t), device=t.device)
        nth = place - (following - counts)[t]                            # 0, 1, ... among equal timesteps
        kept = (place >= following[t] - length) & (t < bin_)             # the others are overwritten in this very call
        slot = (self._seen[t] + nth) % length
        self._history[torch.where(kept, t, bin_), slot] = losses
        self._history[bin_] = 0
        self._seen += counts
        self._seen[bin_] = 0
        self._refresh()

    def _refresh(self) -> None:
        p = self.probabilities()
        self._cumulative = torch.cumsum(p, dim=0)
        self._weights = (1 / (self.num_timesteps * p)).float()

    def _move(self, device: torch.device) -> None:
        if self._history.device != device:
            for name in ("_history", "_seen", "_cumulative", "_weights"):
                setattr(self, name, getattr(self, name).to(device))

    def state_dict(self) -> dict[str, Tensor]:
        return {"history": self._history[:-1].clone(), "seen": self._seen[:-1].clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        shape = (self.num_timesteps, self.history_per_term)
        if set(state) != {"history", "seen"} or state["history"].shape != shape:
            found = tuple(state["history"].shape) if "history" in state else "none"
            raise ValueError(f"timestep history: (timesteps, losses of each) {found} in the checkpoint, {shape} in "
                             "this run; keep num_steps and the timestep sampler that it was made with")
        self._history[:-1] = state["history"].to(self._history)
        self._seen[:-1] = state["seen"].to(self._seen)
        self._refresh()


def _stable_order(t: Tensor, largest: int) -> Tensor:
    """Indices that sort t and keep the order of equal entries: (N,) -> (N,)."""
    if t.device.type == "cpu" and largest < 2 ** 15:                     # numpy sorts short integers by radix
        return torch.from_numpy(np.argsort(t.numpy().astype(np.int16), kind="stable"))
    return torch.argsort(t, stable=True)
