"""Samplers of training timesteps. Each gives a sample its timestep, and a weight that keeps the expected loss
unchanged.

Source: Nichol & Dhariwal 2021, section 3.3 (importance sampling of the variational bound, Equation 18).
"""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from dstrain.recipe import ConfigError

Array = np.ndarray | Tensor


class TimestepSampler(ABC):
    """Declares a distribution over timesteps, sampled by each sample's own uniform number."""

    def __init__(self, num_timesteps: int) -> None:
        self.num_timesteps = num_timesteps

    @abstractmethod
    def sample(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Draws training timesteps int64 (B,) and returns them with their loss weights, float32 (B,). `uniforms`,
        float32 (B,) in [0, 1), is the only source of randomness. With these weights, the expected loss is the mean loss
        over all timesteps.
        """

    def observe(self, t: Tensor, losses: Tensor) -> None:
        """Updates the distribution of timesteps after a training step. By default does nothing.

        t       int64 (N,), the timesteps of all samples of the step, in the order of the global batch; below 0:
                ignored.
        losses  (N,), the samples' losses without weights; those that are not finite are ignored.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the tensors that a checkpoint saves, by name; {} for a sampler that learns nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Raises ConfigError if `state` is not empty, since this sampler learns nothing."""
        if state:
            raise ConfigError(
                f"{type(self).__name__} keeps no state, the checkpoint holds {', '.join(sorted(state))}; "
                "choose the timestep sampler that it was made with"
            )


class UniformSampler(TimestepSampler):
    """Draws every timestep with equal probability and weight 1."""

    def sample(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Returns timesteps int64 (B,), floor(T * uniforms), and weights 1, float32 (B,)."""
        # The largest float32 below 1 is 1 - 2^-24. Its product with T is below T by at least half the spacing of floats
        # at T, and is never rounded up to T.
        return (uniforms * self.num_timesteps).long(), torch.ones_like(uniforms)


class LossSecondMomentSampler(TimestepSampler):
    """Draws timesteps with probability p(t) proportional to sqrt(mean of squared losses), over the last
    `history_per_term` losses at each t.

    uniform_prob is the share of uniform sampling mixed in, so that every timestep is drawn now and then. Until every
    timestep has its full history, sampling is uniform.

    The history of a timestep is a ring: its n-th loss lies in row n modulo the length, column t of one table. The mean
    of squares does not depend on where the ring begins. Column T takes the losses that are not kept, so that on an
    accelerator no shape depends on values. On the CPU numpy handles the kept losses alone, in a tenth of the time.
    """

    def __init__(self, num_timesteps: int, history_per_term: int = 10, uniform_prob: float = 0.001) -> None:
        super().__init__(num_timesteps)
        self.history_per_term, self.uniform_prob = history_per_term, uniform_prob
        self._history = torch.zeros(history_per_term, num_timesteps + 1, dtype=torch.float64)
        self._seen = torch.zeros(num_timesteps + 1, dtype=torch.int64)
        self._update_probabilities()

    def get_probabilities(self) -> Tensor:
        """Returns a copy of the probability of each timestep, float64 (T,)."""
        return torch.as_tensor(self._p).clone()

    def _update_probabilities(self) -> None:
        """Computes the probabilities of all timesteps, and their cumulative sums, anew from the history of losses."""
        on_host, history, seen = _can_numpy_read(self._history), self._history, self._seen
        if on_host:
            history, seen = history.numpy(), seen.numpy()
        weights = (history * history).sum(0)[:-1] ** 0.5  # the root mean square, times a constant
        total = weights.sum()
        ready = (seen[:-1].min() >= self.history_per_term) & (total > 0)  # 0 or 1, never read by the host
        learned = ready * (1 - self.uniform_prob) / (total + ~ready)
        self._p: Array = weights * learned + (ready * self.uniform_prob + ~ready) / self.num_timesteps
        if on_host:
            cumulative = torch.from_numpy(self._p).cumsum(dim=0)  # three times as fast as numpy's
        else:  # in integers: a GPU scans floats in no fixed order
            cumulative = (self._p * 2.0**52).long().cumsum(dim=0).double() * 2.0**-52
        cumulative[-1:] = torch.inf  # rounding may leave the last one below 1
        self._cumulative: Array = cumulative.numpy() if on_host else cumulative
        self._guide: np.ndarray | None = None  # made by the first large draw

    def sample(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Draws timesteps int64 (B,) from the learned distribution, by uniform numbers (B,) in [0, 1). Returns them and
        the weights 1 / (T * p(t)), float32 (B,).
        """
        self._move_history_to_device(uniforms.device)
        if _can_numpy_read(uniforms):
            t = self._convert_uniforms_to_timesteps(uniforms.numpy())
            weights = 1 / (self.num_timesteps * self._p.take(t))
            return torch.from_numpy(t), torch.from_numpy(weights.astype(np.float32))
        cumulative, p = torch.as_tensor(self._cumulative), torch.as_tensor(self._p)
        t = torch.searchsorted(cumulative, uniforms.double(), right=True)
        return t, (self.num_timesteps * p.index_select(0, t)).reciprocal().float()

    def _convert_uniforms_to_timesteps(self, uniforms: np.ndarray) -> np.ndarray:
        """Returns the timestep, int64 (B,), of each uniform number: the first whose cumulative probability is above the
        number. Equals numpy's searchsorted, and is faster by a guide table (Chen & Asau 1974).
        """
        if 8 * len(uniforms) < self.num_timesteps:  # the table would cost more than it saves
            return self._cumulative.searchsorted(uniforms, side="right")
        buckets = 1 << (4 * self.num_timesteps - 1).bit_length()  # a power of two: products with it are exact
        if self._guide is None:
            first = np.ceil(self._cumulative[:-1] * buckets).astype(np.intp)  # the first to begin beyond t
            self._guide = np.bincount(first, minlength=buckets).cumsum()
        t = self._guide.take((uniforms * uniforms.dtype.type(buckets)).astype(np.intp))
        t += self._cumulative.take(t) <= uniforms
        crowded = np.flatnonzero(self._cumulative.take(t) <= uniforms)  # more than one timestep ends in the bucket
        t[crowded] = self._cumulative.searchsorted(uniforms[crowded], side="right")
        return t

    def observe(self, t: Tensor, losses: Tensor) -> None:
        """Adds losses (N,) at timesteps t (N,) to the history, and computes the probabilities anew. Ignores samples
        with t < 0 or a loss that is not finite.
        """
        self._move_history_to_device(t.device)
        losses = losses.detach().double()
        if _can_numpy_read(t):
            self._append_losses_on_cpu(t.numpy(), losses.numpy())
        else:
            self._append_losses_on_device(t, losses)
        self._update_probabilities()

    def _append_losses_on_cpu(self, t: np.ndarray, losses: np.ndarray) -> None:
        """Adds losses (N,) at timesteps t (N,) to the history by numpy. Ignores samples with t < 0 or a loss that is
        not finite.
        """
        length, history, seen = self.history_per_term, self._history.numpy(), self._seen.numpy()
        valid = (t >= 0) & np.isfinite(losses)
        if not valid.all():
            t, losses = t[valid], losses[valid]
        # Equal timesteps keep their order. Short integers are sorted by radix, which is faster.
        order = np.argsort(t.astype(np.int16) if self.num_timesteps <= 2**15 else t, kind="stable")
        t, losses = t[order], losses[order]
        counts = np.bincount(t, minlength=self.num_timesteps + 1)
        following = counts.cumsum()  # where the next timestep's losses begin
        place = np.arange(len(t))
        nth = place + (seen - following + counts).take(t)  # number of earlier losses of this timestep
        if counts.max() > length:  # all but the last are overwritten at once
            late = place >= (following - length).take(t)
            t, losses, nth = t[late], losses[late], nth[late]
        history.reshape(-1)[nth % length * len(seen) + t] = losses
        seen += counts

    def _append_losses_on_device(self, t: Tensor, losses: Tensor) -> None:
        """Adds losses (N,) at timesteps t (N,) to the history on an accelerator, without waiting for it. Ignores
        samples with t < 0 or a loss that is not finite.
        """
        length, unused = self.history_per_term, self.num_timesteps
        t = torch.where((t >= 0) & losses.isfinite(), t, unused)
        order = torch.argsort(t, stable=True)
        t, losses = t[order], losses[order]
        counts = torch.zeros_like(self._seen).index_add_(0, t, torch.ones_like(t))
        following = counts.cumsum(0)
        place = torch.arange(len(t), device=t.device)
        nth = place + (self._seen - following + counts)[t]
        late = (place >= (following - length)[t]) & (t < unused)
        self._history[nth % length, torch.where(late, t, unused)] = losses
        self._history[:, unused] = 0
        self._seen += counts
        self._seen[unused:] = 0  # with a number as index, a GPU would be waited for

    def _move_history_to_device(self, device: torch.device) -> None:
        """Moves the history of losses to `device`, if it is on another one, and computes the probabilities there."""
        if self._history.device != device:
            self._history, self._seen = self._history.to(device), self._seen.to(device)
            self._update_probabilities()

    def state_dict(self) -> dict[str, Tensor]:
        """Returns {"history": the last losses at each timestep, float64 (T, history_per_term), "seen": how many losses
        there have been at each timestep, int64 (T,)}.
        """
        return {"history": self._history[:, :-1].t().contiguous(), "seen": self._seen[:-1].clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores the history of losses from `state_dict`, and computes the probabilities anew. Raises ConfigError if
        `state` has other names than "history" and "seen", or a history of another shape.
        """
        shape = (self.num_timesteps, self.history_per_term)
        if set(state) != {"history", "seen"} or state["history"].shape != shape:
            saved = tuple(state["history"].shape) if "history" in state else "none"
            raise ConfigError(
                f"timestep history: (timesteps, losses of each) {saved} in the checkpoint, {shape} in "
                "this run; keep num_steps and the timestep sampler that it was made with"
            )
        self._history[:, :-1] = state["history"].to(self._history).t()
        self._seen[:-1] = state["seen"].to(self._seen)
        self._update_probabilities()


def _can_numpy_read(values: Tensor) -> bool:
    """Returns whether a tensor is a plain one on the CPU, whose values numpy can read."""
    return type(values) is Tensor and values.device.type == "cpu"  # other types may have no values
