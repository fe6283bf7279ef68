"""The networks over video tokens: MaskGIT (Chang et al. 2022) with text, and the token critic (Lezama et al. 2022,
arXiv:2209.04439), as in Phenaki (Villegas et al. 2022).

Notation: B samples, (t, h, w) the grid of a clip's tokens, N = t h w; V the size of the codebook, and also the id of
the mask token; M the number of masked tokens among all B N, which only the device knows; L text tokens of width E.

All weights belong to submodules, none to a network itself. ZeRO-3 gathers a weight while its own module is called, so
that methods other than `forward` can be called, too.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dstrain.nn.layers import Embedding, Linear
from dstrain.nn.sequence import gather_rank_slices, take_rank_slice
from dstrain.systems.phenaki.masking import MEAN_RATIO
from dstrain.systems.phenaki.transformer import ROWS, Transformer
from dstrain.systems.phenaki.vocabulary import Vocabulary

Grid = tuple[int, int, int]


class MaskGitOutput(NamedTuple):
    """The outputs of `MaskGit.forward`, for the loss and for a critic."""

    total: Tensor  # the weighted sum of `loss`, a scalar, with gradient
    loss: Tensor  # cross-entropy in nats, summed over a sample's masked tokens: (B,)
    hits: Tensor  # masked tokens whose likeliest id is the true one: (B,)
    filled: Tensor  # true tokens, drawn ones where masked: int64 (B, t, h, w)
    critic: Tensor | None  # logits of the self critic, float32 (B, t, h, w), if `judged`


class MaskGit(nn.Module):
    """Predicts masked tokens from the other tokens and a text.

    codebook_size  V.
    self_critic    whether a second head judges which tokens were drawn.
    chunk          number of tokens whose logits are in memory at the same time, see Vocabulary.
    label_smoothing  share of the target that is spread over all ids.
    trunk          the keyword arguments of Trunk, except num_tokens.
    """

    def __init__(
        self, codebook_size: int, *, self_critic: bool = False, chunk: int = 512, label_smoothing: float = 0.0, **trunk
    ) -> None:
        super().__init__()
        self.mask_token = codebook_size
        self.trunk = Trunk(codebook_size + 1, **trunk)
        self.to_logits = Vocabulary(trunk["dim"], codebook_size, chunk, label_smoothing)
        self.to_critic = Linear(trunk["dim"], 1, init="normal") if self_critic else None

    def forward(
        self,
        tokens: Tensor,
        masked: Tensor,
        weights: Tensor,
        real: Tensor | None = None,
        dropped: Tensor | None = None,
        uniforms: Tensor | None = None,
        temperature: float = 1.0,
        **text: Tensor,
    ) -> MaskGitOutput:
        """Masks the tokens where `masked`, bool (B, t, h, w), is True, predicts them, and compares them with the true
        `tokens`, int64 (B, t, h, w). Returns a MaskGitOutput: the loss, and what a critic needs.

        weights              (B,), the weight in the total loss of each masked token of a sample.
        real, dropped, text  see Trunk.forward.
        uniforms             (B, N) in [0, 1), by which ids of the masked tokens are drawn at `temperature`, and judged
                             by the self critic, if there is one; None: none are drawn, and MaskGitOutput.filled has
                             the true ids.
        """
        pending = Pending(masked)
        seen = torch.where(masked, self.mask_token, tokens)
        states, critic = self.trunk(seen, real, dropped, **text), None
        places = pending.wait_for_masked_indices()  # (M,)
        of_masked = self.to_logits(
            states.flatten(0, 3)[places],
            None if uniforms is None else uniforms.flatten()[places],
            temperature,
            tokens.flatten()[places],
            weights[places // tokens[0].numel()],
        )
        filled = tokens.flatten().scatter(0, places, of_masked.ids).view_as(tokens)
        if self.to_critic is not None and uniforms is not None:
            # In the same call, since an engine hooks the outputs of one call.
            critic = self.compute_critic_logits(filled, real, text, dropped)

        # scatter writes each place once, so that no order of summation decides the last bits.
        def sum_by_sample(values):
            """Returns the sum of `values` (M,), one a masked token, over the masked tokens of each sample: (B,)."""
            return values.new_zeros(tokens.numel()).scatter(0, places, values).view(len(tokens), -1).sum(1)

        return MaskGitOutput(
            of_masked.total, sum_by_sample(of_masked.loss), sum_by_sample(of_masked.hits), filled, critic
        )

    def draw_masked_tokens(
        self,
        tokens: Tensor,
        real: Tensor | None,
        text: dict[str, Tensor],
        uniforms: Tensor,
        temperature: float,
        guidance_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Draws an id for each mask token in `tokens`, int64 (B, t, h, w), by `uniforms` (B, N) in [0, 1). Returns the
        tokens with these ids, and the log-probability of each, float32 (B, t, h, w), 0 at all other tokens.

        With a guidance_scale other than 1, ids are drawn from null + guidance_scale * (with text - null), where both
        are logits and null is without text.
        """
        if guidance_scale != 1:
            half = torch.arange(2 * len(tokens), device=tokens.device) >= len(tokens)
            both = self.trunk(
                _append_batch_to_itself(tokens),
                _append_batch_to_itself(real),
                half,
                **_append_texts_to_themselves(text),
            )
            with_text, null = both.float().chunk(2)
            states = (null + guidance_scale * (with_text - null)).to(both.dtype)
        else:
            states = self.trunk(tokens, real, None, **text)
        places = (tokens.flatten() == self.mask_token).nonzero()[:, 0]
        ids, certainty = self.to_logits(states.flatten(0, 3)[places], uniforms.flatten()[places], temperature)
        spread = certainty.new_zeros(tokens.numel()).scatter(0, places, certainty)
        return tokens.flatten().scatter(0, places, ids).view_as(tokens), spread.view(tokens.shape)

    def compute_critic_logits(
        self, tokens: Tensor, real: Tensor | None, text: dict[str, Tensor], dropped: Tensor | None = None
    ) -> Tensor:
        """Returns the self critic's logits, float32 (B, t, h, w), for tokens int64 (B, t, h, w). A high logit marks a
        token that was probably drawn, not given; with critic_labels=replaced, a token that is probably wrong.
        """
        return self.to_critic(self.trunk(tokens, real, dropped, **text))[..., 0].float()


class TokenCritic(nn.Module):
    """Judges which tokens of a clip were drawn, with a trunk of its own and one logit for each token. Its input has no
    mask tokens.
    """

    def __init__(self, codebook_size: int, **trunk) -> None:
        super().__init__()
        self.trunk = Trunk(codebook_size, **trunk)
        self.to_critic = Linear(trunk["dim"], 1, init="normal")

    def forward(
        self, tokens: Tensor, real: Tensor | None = None, dropped: Tensor | None = None, **text: Tensor
    ) -> Tensor:
        """Returns the critic's logits, float32 (B, t, h, w), for tokens int64 (B, t, h, w). A high logit marks a token
        that was probably drawn (or is wrong), see MaskGit.compute_critic_logits. All other arguments are those of
        Trunk.forward.
        """
        return self.to_critic(self.trunk(tokens, real, dropped, **text))[..., 0].float()


def _append_batch_to_itself(x: Tensor | None) -> Tensor | None:
    """Returns x concatenated with itself along the batch, (B, ...) -> (2B, ...); None for None."""
    return None if x is None else torch.cat((x, x))


def _append_texts_to_themselves(text: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the text inputs, each concatenated with itself along the batch: (B, ...) -> (2B, ...)."""
    return {name: torch.cat((value, value)) for name, value in text.items()}


class Trunk(nn.Module):
    """Maps tokens to states with attention between all of them: int64 (B, t, h, w) -> (B, t, h, w, dim).

    num_tokens        number of ids, with the mask token if there is one.
    token_shape       the longest (t, h, w); clips may be shorter, down to one frame.
    text              the keyword arguments of Text, except dim; None makes it unconditional.
    gradient_shrink   share of the gradient that reaches the embeddings (Ding et al. 2021, CogView); 1 is all.
    """

    def __init__(
        self,
        num_tokens: int,
        *,
        token_shape: Grid,
        dim: int,
        depth: int,
        heads: int,
        dim_head: int,
        text: dict | None = None,
        peg: bool = True,
        dropout: float = 0.0,
        gradient_shrink: float = 1.0,
    ) -> None:
        super().__init__()
        self.gradient_shrink = gradient_shrink
        self.token_emb = Embedding(num_tokens, dim)
        self.positions = nn.ModuleList(Embedding(side, dim) for side in token_shape)
        self.text = None if text is None else Text(dim=dim, **text)
        self.transformer = Transformer(
            dim, depth, heads, dim_head, None if text is None else dim, peg=peg, dropout=dropout
        )

    def forward(
        self, tokens: Tensor, real: Tensor | None = None, dropped: Tensor | None = None, **text: Tensor
    ) -> Tensor:
        """Returns the transformer's states for tokens: int64 (B, t, h, w) -> (B, t, h, w, dim).

        real     bool (B, t), False for latent frames that are padding; None: none are.
        dropped  bool (B,), True for samples whose text is replaced by the null text; None: none are.
        text     the keyword arguments of Text.forward, except dropped; empty for an unconditional model.
        """
        x = self.token_emb(tokens)
        for axis, (table, side) in enumerate(zip(self.positions, tokens.shape[1:])):
            place = table(torch.arange(side, device=tokens.device))  # (side, dim)
            x = x + place.view(*(side if i == axis else 1 for i in range(3)), -1)
        if self.gradient_shrink != 1:
            x = x * self.gradient_shrink + x.detach() * (1 - self.gradient_shrink)
        context, context_mask = (None, None) if self.text is None else self.text(dropped, **text)
        seen = None if real is None else real[:, :, None, None].expand(tokens.shape)
        return gather_rank_slices(self.transformer(take_rank_slice(x, ROWS), None, seen, context, context_mask), ROWS)


class Text(nn.Module):
    """Makes a context of width dim from texts, for cross-attention; with learns_null a learned null text is put before
    the context.

    num_words, max_text_len  rows of the table of hashed words, and number of positions; or
    encodings_dim            E, the width of text encodings, which are projected to dim.
    learns_null              whether there is a null text, for texts that are dropped or have no words.
    """

    def __init__(
        self, dim: int, num_words: int | None, max_text_len: int, encodings_dim: int | None, learns_null: bool
    ) -> None:
        super().__init__()
        self.words = Embedding(num_words, dim) if num_words else None
        self.places = Embedding(max_text_len, dim) if num_words else None
        self.proj = Linear(encodings_dim, dim) if encodings_dim else None
        self.null = Embedding(1, dim) if learns_null else None

    def forward(
        self,
        dropped: Tensor | None,
        words: Tensor | None = None,
        text_encodings: Tensor | None = None,
        text_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the context for cross-attention, (B, M, dim), and bool (B, M), True for the entries that may be read.
        M is L, or with a null text L + 1.

        dropped         bool (B,), True for samples whose text is replaced by the null text; None: none are.
        words           int64 (B, L), hashed words, 0 for padding; for a model that reads words.
        text_encodings  (B, L, E); for a model that reads text encodings.
        text_mask       bool (B, L), False where text_encodings are padding.

        Only samples with a dropped or empty text may read the null text.
        """
        if self.words is not None:
            context, seen = self.words(words), words != 0
            context = context + self.places(torch.arange(words.shape[1], device=words.device))
        else:
            context, seen = self.proj(text_encodings.to(self.proj.weight.dtype)), text_mask
        if self.null is None:
            return context, seen
        if dropped is not None:
            seen = seen & ~dropped[:, None]
        null = self.null(torch.zeros_like(seen[:, :1], dtype=torch.int64))  # (B, 1, dim)
        return torch.cat((null, context), dim=1), torch.cat((~seen.any(1, keepdim=True), seen), dim=1)


class Pending:
    """Finds the indices where a mask is True, and copies their number to the host while the device works on.

    The copy starts in the constructor and is read in `wait_for_masked_indices`, after the trunk has been launched. So
    the host waits for what was launched before the trunk, and never for the trunk itself.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask.flatten()
        total = self.mask.sum()
        self.total, self.event = total, None
        if total.is_cuda:
            self.total = torch.empty((), dtype=total.dtype, pin_memory=True)
            self.total.copy_(total, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def wait_for_masked_indices(self) -> Tensor:
        """Returns the indices at which the mask is True, int64 (M,), ascending, as soon as the host has received their
        number M. On the meta device M is 2 / pi of all.
        """
        if self.event is not None:
            self.event.synchronize()
        size = round(MEAN_RATIO * self.mask.numel()) if self.mask.is_meta else int(self.total)
        return torch.nonzero_static(self.mask, size=size)[:, 0]
