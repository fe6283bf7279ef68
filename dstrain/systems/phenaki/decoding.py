"""Iterative decoding of masked tokens: MaskGIT (Chang et al. 2022, section 3.2) and Token-Critic (Lezama et al. 2022,
section 3.2). Known tokens stay as they are.

Notation: B samples of N tokens in the grid (t, h, w), n of them unknown; S steps. Step i = 0 .. S - 1 draws ids for all
mask tokens. Then it masks the max(1, floor(n cos(pi/2 (i + 1) / S))) tokens of lowest confidence again; the last step
masks none. Annealed values fall as 1 - (i + 1) / S, and are 0 at the last step.

Without a critic a token's confidence is the log-probability of its id at temperature 1, plus Gumbel noise times the
confidence temperature, and a token that is not masked again stays to the end. With a critic it is minus the critic's
logit, plus uniform noise times the critic noise, and any unknown token may be masked again.

With order=frames the latent frames are decoded in turn, S steps for each. The networks then see the clip up to that
frame, whose earlier frames are known. So each step draws fewer tokens, and the beginning of a clip is the same whatever
its length.

All randomness is drawn from the samples' keys, each kind under a name of its own: token/i, choice/i, critic/i.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dstrain import rng
from dstrain.nn.quantize import draw_gumbel_noise
from dstrain.recipe import ConfigError
from dstrain.systems.phenaki.config import Decoding
from dstrain.systems.phenaki.masking import compute_masked_share, mark_lowest_scores

# Takes tokens int64 (B, t, h, w) with mask tokens, uniforms (B, N) and a temperature. Returns the tokens with ids in
# place of the mask tokens, and the log-probability of each id, (B, t, h, w) both.
Predict = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
Criticize = Callable[[Tensor], Tensor]  # tokens -> the critic's logits, (B, t, h, w) both


@torch.no_grad()
def draw_unknown_tokens(
    predict: Predict,
    tokens: Tensor,
    known: Tensor,
    mask_token: int,
    key: Tensor,
    num_steps: int = 18,
    choices: Decoding = Decoding(),
    criticize: Criticize | None = None,
) -> Tensor:
    """Draws the tokens that are not `known`, in `num_steps` steps, and returns all tokens, int64 (B, t, h, w), without
    mask tokens. If choices.order is "frames", latent frames are drawn one after the other, each in `num_steps` steps.

    predict     predict(tokens, uniforms, temperature) returns the tokens with ids drawn in place of mask tokens, and
                the log-probabilities of these ids.
    tokens      int64 (B, t, h, w); values at unknown places have no effect.
    known       bool (B, t, h, w), True for tokens that stay: given frames, and padding.
    mask_token  the id that stands for an unknown token.
    key         int64 (B,), the samples' keys, from which all noise is drawn.
    criticize   criticize(tokens) returns the critic's logits, which decide the tokens that are masked again. None: the
                log-probabilities decide.

    Raises ConfigError if num_steps is below 1.
    """
    if num_steps < 1:
        raise ConfigError(f"num_steps: {num_steps} steps decode nothing; take 1 at least, 18 is usual")
    if choices.order == "all":
        return _draw_tokens_of_all_frames(predict, tokens, known, mask_token, key, num_steps, choices, criticize)
    for end in range(1, tokens.shape[1] + 1):
        if not known[:, end - 1].all():
            last = torch.arange(end, device=tokens.device)[:, None, None] == end - 1
            begun = _draw_tokens_of_all_frames(
                predict, tokens[:, :end], known[:, :end] | ~last, mask_token, key, num_steps, choices, criticize
            )
            tokens = torch.cat((begun, tokens[:, end:]), dim=1)
    return tokens


def _draw_tokens_of_all_frames(
    predict: Predict,
    tokens: Tensor,
    known: Tensor,
    mask_token: int,
    key: Tensor,
    num_steps: int,
    choices: Decoding,
    criticize: Criticize | None,
) -> Tensor:
    """Draws the tokens that are not `known`, of all latent frames at once, and returns all tokens, int64 (B, t, h, w).
    Each step draws all masked tokens, and all steps but the last then mask the least certain ones again. The arguments
    are those of `draw_unknown_tokens`.
    """
    shape, count = tokens.shape, tokens[0].numel()
    free = ~known.flatten(1)  # (B, N)
    num_free = free.sum(1)  # (B,)
    tokens = torch.where(known, tokens, mask_token).flatten(1)  # (B, N)
    for step in range(num_steps):
        done = (step + 1) / num_steps
        masked = tokens == mask_token
        uniforms = rng.uniform(key, f"token/{step}", (count,))
        ids, certainty = predict(tokens.view(shape), uniforms, choices.compute_temperature(done))
        tokens = torch.where(masked, ids.flatten(1), tokens)
        if step == num_steps - 1:
            break
        share = compute_masked_share(torch.full_like(num_free, done, dtype=torch.float64))
        again = torch.minimum((num_free * share).floor().long().clamp(min=1), num_free)
        if criticize is None:
            confidence = certainty.flatten(1) + choices.confidence_temperature * (1 - done) * draw_gumbel_noise(
                key, f"choice/{step}", (count,)
            )
            again = torch.minimum(again, (masked.sum(1) - 1).clamp(min=0))  # each step draws one token at least
            eligible = masked
        else:
            noise = rng.uniform(key, f"critic/{step}", (count,)) - 0.5
            confidence = -criticize(tokens.view(shape)).flatten(1) + choices.compute_critic_noise_width(done) * noise
            eligible = free
        tokens = torch.where(
            mark_lowest_scores(torch.where(eligible, confidence, torch.inf), again), mask_token, tokens
        )
    return tokens.view(shape)
