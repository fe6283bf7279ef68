"""Iterative decoding of masked tokens: MaskGIT (Chang et al. 2022, section 3.2) and Token-Critic (Lezama et al. 2022,
section 3.2). Given tokens stay as they are.

Notation: B samples of N tokens in the grid (t, h, w), n of them not given; S steps. Step i = 0 .. S - 1 draws ids for
all mask tokens. Then it masks the floor(n cos(pi/2 (i + 1) / S)) tokens of lowest confidence again; the last step masks
none. Annealed values fall as 1 - (i + 1) / S, and are 0 at the last step.

Without a critic a token's confidence is the log-probability with which its id was drawn, plus Gumbel noise times the
confidence temperature, and a token that is not masked again stays to the end. With a critic it is minus the critic's
logit of "was replaced", plus uniform noise times the critic noise, and any token may be masked again.

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
    """How a step draws ids, and which of them it masks again."""

    sample_temperature: float = 0.9               # of the ids, annealed
    confidence_temperature: float = 4.5           # of the confidence without a critic, annealed
    critic_noise: float = 1.0                     # width of the uniform noise with a critic
    critic_noise_schedule: Literal["fixed", "decay", "increase"] = "decay"

    def noise_at(self, step: int, num_steps: int) -> float:
        """The critic noise of a step: constant, falling to 0, or growing to its full width at the last step."""
        done = (step + 1) / num_steps
        return self.critic_noise * {"fixed": 1.0, "decay": 1 - done, "increase": done}[self.critic_noise_schedule]


@torch.no_grad()
def decode(predict: Predict, tokens: Tensor, given: Tensor, mask_token: int, key: Tensor, num_steps: int = 18,
           choices: Choices = Choices(), criticize: Criticize | None = None) -> Tensor:
    """Tokens int64 (B, t, h, w), of which those that are not `given` have been drawn; no mask token is left.

    given  bool (B, t, h, w): tokens that are known (frames to continue) or do not matter (padding).
    key    int64 (B,).
    ConfigError: less than one step.
    """
    if num_steps < 1:
        raise ConfigError(f"num_steps: {num_steps} steps decode nothing; take 1 at least, 18 is usual")
    shape, count = tokens.shape, tokens[0].numel()
    free = ~given.flatten(1)                                                                      # (B, N)
    num_free = free.sum(1)                                                                        # (B,)
    tokens = torch.where(given, tokens, mask_token).flatten(1)                                    # (B, N)
    for step in range(num_steps):
        done = (step + 1) / num_steps
        masked = tokens == mask_token
        uniforms = rng.uniform(key, f"token/{step}", (count,))
        ids, certainty = predict(tokens.view(shape), uniforms, choices.sample_temperature * (1 - done))
        tokens = torch.where(masked, ids.flatten(1), tokens)
        if step == num_steps - 1:
            break
        left = (num_free * ratio(torch.full_like(num_free, done, dtype=torch.float64))).floor().long()
        if criticize is None:
            confidence = certainty.flatten(1) + choices.confidence_temperature * (1 - done) * gumbel(
                key, f"choice/{step}", (count,))
            left = torch.minimum(left, (masked.sum(1) - 1).clamp(min=0))       # each step draws one token at least
            eligible = masked
        else:
            noise = rng.uniform(key, f"critic/{step}", (count,)) - 0.5
            confidence = -criticize(tokens.view(shape)).flatten(1) + choices.noise_at(step, num_steps) * noise
            eligible = free
        again = lowest(torch.where(eligible, confidence, torch.inf), left)
        tokens = torch.where(again, mask_token, tokens)
    return tokens.view(shape)
