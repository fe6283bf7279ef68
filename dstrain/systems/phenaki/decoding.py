"""Iterative decoding of masked tokens: MaskGIT (Chang et al. 2022, section 3.2) and Token-Critic (Lezama et al. 2022,
section 3.2), with given tokens that stay.

Notation: B samples of N tokens in the grid (t, h, w), n of them to be found; S steps; a step i = 0 .. S - 1 draws an id
for every mask token and then masks the least trusted floor(n cos(pi/2 (i + 1) / S)) tokens again, the last step none.
What anneals falls as 1 - (i + 1) / S: it is 0 at the last step.

Trust is, without a critic, the logarithm of the probability that an id was drawn with, plus Gumbel noise times the
confidence temperature; what has once been kept stays. With a critic it is minus its logit of "was replaced", plus
uniform noise times the critic noise; then a token that was kept may be masked again.

All randomness is drawn from the samples' keys by name: token/i, choice/i, critic/i.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dstrain import rng
from dstrain.nn.quantize import gumbel
from dstrain.recipe import ConfigError
from dstrain.systems.phenaki.masking import lowest, ratio

# Tokens int64 (B, t, h, w) with mask tokens, uniforms (B, N) and a temperature -> ids in place of the mask tokens, and
# the logarithm of each one's probability, (B, t, h, w) both.
Predict = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
Criticize = Callable[[Tensor], Tensor]            # tokens -> logits of "was replaced", (B, t, h, w) both

NOISE_SCHEDULES = ("fixed", "decay", "increase")


@dataclass(frozen=True)
class Choices:
    """How a step draws and keeps."""

    sample_temperature: float = 0.9               # of the ids, annealed
    confidence_temperature: float = 4.5           # of the trust without a critic, annealed
    critic_noise: float = 1.0                     # width of the uniform noise of the trust with a critic
    critic_noise_schedule: Literal["fixed", "decay", "increase"] = "decay"

    def noise_at(self, step: int, num_steps: int) -> float:
        """The critic noise of a step: the same, falling to 0, or growing to its width at the last step."""
        done = (step + 1) / num_steps
        return self.critic_noise * {"fixed": 1.0, "decay": 1 - done, "increase": done}[self.critic_noise_schedule]


@torch.no_grad()
def decode(predict: Predict, tokens: Tensor, given: Tensor, mask_token: int, key: Tensor, num_steps: int = 18,
           choices: Choices = Choices(), criticize: Criticize | None = None) -> Tensor:
    """Tokens int64 (B, t, h, w) in which what is not `given` has been found; no mask token is left.

    given  bool (B, t, h, w): tokens that are known (frames to go on from) or do not matter (padding).
    key    int64 (B,).
    Raises ConfigError for less than one step.
    """
    if num_steps < 1:
        raise ConfigError(f"num_steps: {num_steps} steps decode nothing; take 1 at least, 18 is usual")
    shape, count = tokens.shape, tokens[0].numel()
    free = ~given.flatten(1)                                                                      # (B, N)
    wanted = free.sum(1)                                                                          # (B,)
    tokens = torch.where(given, tokens, mask_token).flatten(1)                                    # (B, N)
    for step in range(num_steps):
        done = (step + 1) / num_steps
        masked = tokens == mask_token
        uniforms = rng.uniform(key, f"token/{step}", (count,))
        ids, certainty = predict(tokens.view(shape), uniforms, choices.sample_temperature * (1 - done))
        tokens = torch.where(masked, ids.flatten(1), tokens)
        if step == num_steps - 1:
            break
        left = (wanted * ratio(torch.full_like(wanted, done, dtype=torch.float64))).floor().long()
        if criticize is None:
            trust = certainty.flatten(1) + choices.confidence_temperature * (1 - done) * gumbel(
                key, f"choice/{step}", (count,))
            left = torch.minimum(left, (masked.sum(1) - 1).clamp(min=0))       # each step finds a token at least
            eligible = masked
        else:
            noise = rng.uniform(key, f"critic/{step}", (count,)) - 0.5
            trust = -criticize(tokens.view(shape)).flatten(1) + choices.noise_at(step, num_steps) * noise
            eligible = free
        again = lowest(torch.where(eligible, trust, torch.inf), left)
        tokens = torch.where(again, mask_token, tokens)
    return tokens.view(shape)
