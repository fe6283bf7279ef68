"""A world so small that MaskGit and its critic are known exactly: what decoding makes of the true distribution.

3 x 3 tokens of 6 ids. A clip is black (id 0 everywhere) with probability 0.30, else every token is any id. Given the
tokens that are not masked, both cases have known probabilities, and so has every id; summed over all 512 masks, so has
what a critic learns.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor

from dstrain import rng
from dstrain.systems.phenaki import masking
from dstrain.systems.phenaki.config import Decoding
from dstrain.systems.phenaki.decoding import draw_unknown_tokens

TOKENS, IDS, BLACK = 9, 6, 0.30
MASKS = torch.tensor(list(itertools.product((False, True), repeat=TOKENS)))  # (512, 9)
CLIPS = 600


def chance_of_masks() -> Tensor:
    """Of each mask in training, (512,): the numbers that the schedule gives, all places alike."""
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    numbers = (
        torch.bincount(masking.count_tokens_to_mask(grid, torch.full((20_000,), TOKENS)), minlength=TOKENS + 1) / 20_000
    )
    of_masks = MASKS.sum(1)
    return numbers[of_masks] / torch.tensor([math.comb(TOKENS, int(number)) for number in of_masks])


def exact(tokens: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    """Of clips (..., 9): the chance of what is not masked, (...), and of each id at a masked place, (..., 6)."""
    number, black = (~masked).sum(-1), ((tokens == 0) & ~masked).sum(-1)
    as_black, as_any = BLACK * (number == black).double(), (1 - BLACK) * IDS ** -number.double()
    is_black = as_black / (as_black + as_any)
    ids = ((1 - is_black) / IDS)[..., None].repeat_interleave(IDS, -1)
    ids[..., 0] += is_black
    return as_black + as_any, ids


def predict(tokens: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    flat = tokens.flatten(1)
    masked = flat == IDS
    logits = exact(flat, masked)[1].log()  # (B, 6)
    if temperature:
        ids = (uniforms[..., None] > (logits / temperature).softmax(-1).cumsum(-1)[:, None]).sum(-1).clamp(max=IDS - 1)
    else:
        ids = logits.argmax(-1, keepdim=True).expand_as(flat)
    certainty = torch.where(masked, logits.gather(1, ids), 0.0)
    return torch.where(masked, ids, flat).view(tokens.shape), certainty.view(tokens.shape)


def critic(labels: str):
    """The perfect critic of a label, by Bayes' rule over all masks."""
    chances = chance_of_masks()

    def logits(tokens: Tensor) -> Tensor:
        shown = tokens.flatten(1)[:, None].expand(-1, len(MASKS), -1)  # (B, 512, 9)
        masks = MASKS.expand_as(shown)
        known, ids = exact(shown, masks)
        drawn = ids.gather(2, shown)  # chance of each token
        joint = chances * known * torch.where(masks, drawn, 1.0).prod(-1)  # (B, 512)
        weights = joint[..., None] * masks
        share = weights.sum(1) / joint.sum(1, keepdim=True)
        if labels == "replaced":  # the truth is drawn alike, given what is not masked
            share = (weights * (1 - drawn)).sum(1) / weights.sum(1)
        return torch.logit(share, eps=1e-9).float().view(tokens.shape)

    return logits


def black_clips(choices: Decoding, criticize=None) -> float:
    """The share of black clips among CLIPS that are decoded in nine steps."""
    nothing = torch.zeros(CLIPS, 1, 3, 3, dtype=torch.int64)
    key = rng.keys_of_seeds(torch.arange(CLIPS))
    clips = draw_unknown_tokens(predict, nothing, nothing.bool(), IDS, key, TOKENS, choices, criticize)
    return float((clips == 0).flatten(1).all(1).double().mean())


OLD = Decoding(sample_temperature=0.9, sample_temperature_schedule="decay")


@pytest.mark.parametrize(
    "labels, choices, least, most",
    [
        (None, OLD, 0.50, 0.65),
        (None, Decoding(), 0.30, 0.50),
        (None, Decoding(confidence_temperature=0), 0.95, 1),
        ("replaced", OLD, 0.95, 1),
        ("replaced", Decoding(), 0.95, 1),
        ("masked", OLD, 0.50, 0.75),
        ("masked", Decoding(), 0.30, 0.55),
    ],
)
def test_share_of_black_clips(labels, choices, least, most):
    """Oracle: the world's own 0.30. Drawing as the model has learned, and a critic that tells what was masked, stay
    nearest; a critic that tells what is wrong knows that black ones seldom are.
    """
    assert least < black_clips(choices, labels and critic(labels)) <= most
