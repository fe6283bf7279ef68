"""The networks: logits in chunks, padding, texts, guidance, the two inputs of a self critic."""

import pytest
import torch
import torch.nn.functional as F

from dstrain.nn.layers import Linear
from dstrain.systems.phenaki import vocabulary
from dstrain.systems.phenaki.maskgit import MaskGit, Pending, TokenCritic
from dstrain.systems.phenaki.vocabulary import Vocabulary

TEXT = {"num_words": 30, "max_text_len": 4, "encodings_dim": None, "learns_null": True}
TRUNK = {"token_shape": (4, 2, 3), "dim": 24, "depth": 2, "heads": 2, "dim_head": 12, "text": TEXT}


def network(kind=MaskGit, ids=11, **changes):
    torch.manual_seed(0)
    found = kind(ids, **TRUNK | changes)
    with torch.no_grad():
        for weight in found.parameters():
            weight.add_(0.2 * torch.randn(weight.shape))
    return found


def clip(batch=3, t=4, seed=1):
    torch.manual_seed(seed)
    tokens = torch.randint(11, (batch, t, 2, 3))
    return tokens, torch.rand(tokens.shape) < 0.6, torch.randint(1, 30, (batch, 4))


# ------------------------------------------------------------------------------------------------------------- the head


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_chunks(chunk, smoothing, dtype, tolerance):
    """Oracle: torch's cross-entropy of all logits at once, its value and its gradients, each row weighed by itself."""
    torch.manual_seed(0)
    head = Vocabulary(5, 23, chunk, smoothing).to(dtype)
    torch.nn.init.normal_(head.weight)
    torch.nn.init.normal_(head.bias)
    x, targets = torch.randn(17, 5, dtype=dtype, requires_grad=True), torch.randint(23, (17,))
    weights = torch.rand(17, dtype=dtype)
    wanted = F.cross_entropy(x @ head.weight.t() + head.bias, targets, reduction="none", label_smoothing=smoothing)
    expected = torch.autograd.grad((wanted * weights).sum(), (x, head.weight, head.bias))
    drawn = head(x, None, 1.0, targets, weights)
    torch.testing.assert_close(drawn.loss, wanted.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(drawn.total, (wanted * weights).sum(), rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(torch.autograd.grad(3 * drawn.total, (x, head.weight, head.bias)), expected):
        torch.testing.assert_close(ours, 3 * theirs, rtol=tolerance, atol=tolerance)
    assert torch.equal(drawn.hits.bool(), (x @ head.weight.t() + head.bias).argmax(1) == targets)
    assert torch.equal(drawn.ids, targets)
    with torch.no_grad():
        silent = head(x, None, 1.0, targets, weights)
    assert not silent.total.requires_grad and torch.equal(silent.loss, drawn.loss)


def test_no_row_is_scanned_alone(monkeypatch):
    """Oracle: the shapes that cumsum meets; the ids of rows together are those of each by itself."""
    seen, scan = [], torch.Tensor.cumsum
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda x, dim: seen.append(len(x)) or scan(x, dim))
    torch.manual_seed(0)
    head, x, uniforms = Vocabulary(5, 23, 4), torch.randn(9, 5), torch.rand(9)
    with torch.no_grad():
        ids, _ = head(x, uniforms)
        alone = [head(x[i : i + 1], uniforms[i : i + 1])[0] for i in range(9)]
    assert torch.equal(ids, torch.cat(alone)) and len(ids.unique()) > 3
    assert seen[:3] == [4, 4, 2] and set(seen[3:]) == {2}


@pytest.mark.parametrize("count, filled", [(0, 0), (1, 1), (17, 18), (70, 72), (512, 512), (513, 576), (3001, 3008)])
def test_few_numbers_of_rows(monkeypatch, count, filled):
    """Oracle: by hand: an eighth more rows at most, multiples of 64 from 512 on; the added ones change nothing."""
    seen, chunks = [], vocabulary._iterate_logit_chunks
    monkeypatch.setattr(vocabulary, "_iterate_logit_chunks", lambda x, *rest: seen.append(len(x)) or chunks(x, *rest))
    torch.manual_seed(0)
    head, x, targets = Vocabulary(5, 23, 512), torch.randn(count, 5), torch.randint(0, 23, (count,))
    found = head(x, None, 1.0, targets, torch.ones(count))
    wanted = torch.nn.functional.cross_entropy(x @ head.weight.t() + head.bias, targets, reduction="sum")
    assert seen == [filled] and len(found.loss) == len(found.ids) == count
    torch.testing.assert_close(found.total, wanted)


def test_bfloat16():
    """Oracle: float32 from the same rounded logits: loss is float32, gradients bfloat16, summed before rounding."""
    torch.manual_seed(0)
    head = Vocabulary(8, 40, 4)
    torch.nn.init.normal_(head.weight, std=0.5)
    head = head.bfloat16()
    x, targets = torch.randn(33, 8).bfloat16().requires_grad_(), torch.randint(40, (33,))
    weights = torch.full((33,), 1e-6)  # of a mean over many: nothing is lost below a small weight
    found = head(x, None, 1.0, targets, weights)
    assert found.loss.dtype == found.total.dtype == torch.float32
    logits = torch.addmm(head.bias, x, head.weight.t()).detach().float()
    torch.testing.assert_close(found.loss, F.cross_entropy(logits, targets, reduction="none"))
    (1e6 * found.total).backward()
    pull = (logits.softmax(1) - F.one_hot(targets, 40)).bfloat16().float()
    assert head.weight.grad.dtype == x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(head.weight.grad.float(), pull.t() @ x.detach().float(), rtol=2e-2, atol=2e-2)


def test_ids_are_drawn_by_their_probability():
    """Oracle: softmax(logits / temperature), by counting over evenly spaced uniforms, to one id's share of rounding."""
    torch.manual_seed(0)
    head, x = Vocabulary(4, 6, 64), torch.randn(1, 4)
    torch.nn.init.normal_(head.weight)
    uniforms = (torch.arange(20_000) + 0.5) / 20_000
    for temperature in (1.0, 0.5, 3.0):
        ids, certainty = head(x.expand(20_000, -1), uniforms, temperature)
        logits = (x @ head.weight.t() + head.bias)[0]
        counted = torch.bincount(ids, minlength=6) / 20_000
        torch.testing.assert_close(counted, (logits / temperature).softmax(0), atol=2e-4, rtol=0)
        torch.testing.assert_close(certainty, logits.log_softmax(0)[ids])
        again = head(x.expand(20_000, -1), uniforms, temperature, torch.zeros_like(ids), torch.ones(20_000))
        assert torch.equal(again.ids, ids)
    assert set(head(x.expand(9, -1), torch.rand(9), 0.0)[0].tolist()) == {int(logits.argmax())}


def test_no_rows():
    """Oracle: empty answers and zero gradients: a rank may have nothing to draw."""
    head = Vocabulary(4, 6)
    assert head(torch.zeros(0, 4), torch.zeros(0))[0].shape == (0,)
    head(
        torch.zeros(0, 4, requires_grad=True), None, 1.0, torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    ).total.backward()
    assert not bool(head.weight.grad.any())


def test_places():
    """Oracle: torch.nonzero."""
    mask = torch.rand(3, 2, 5) < 0.3
    assert torch.equal(Pending(mask).wait_for_masked_indices(), mask.flatten().nonzero()[:, 0])


# -------------------------------------------------------------------------------------------------------- the networks


def test_loss_is_of_masked_tokens():
    """Oracle: cross-entropy of all logits, from the network's own trunk and weights, summed where tokens are masked."""
    net, (tokens, masked, words) = network(), clip()
    weights = torch.tensor([1.0, 2.0, 0.5])
    passed = net(tokens, masked, weights, words=words)
    states = net.trunk(torch.where(masked, 11, tokens), words=words)
    logits = states @ net.to_logits.weight.t() + net.to_logits.bias
    each = F.cross_entropy(logits.permute(0, 4, 1, 2, 3), tokens, reduction="none") * masked
    torch.testing.assert_close(passed.loss, each.sum((1, 2, 3)).detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(passed.total, (each.sum((1, 2, 3)) * weights).sum(), rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(
        torch.autograd.grad(passed.total, list(net.parameters())),
        torch.autograd.grad((each.sum((1, 2, 3)) * weights).sum(), list(net.parameters())),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert torch.equal(passed.hits, ((logits.argmax(-1) == tokens) & masked).sum((1, 2, 3)).float())
    assert torch.equal(passed.filled, tokens) and passed.critic is None
    drawn = net(tokens, masked, weights, uniforms=torch.rand(3, 24), words=words).filled
    assert torch.equal(drawn[~masked], tokens[~masked]) and not torch.equal(drawn, tokens)


def test_the_true_tokens_behind_masks_are_not_seen():
    """Oracle: the states of the same clip with other tokens there: nothing of what is to be found leaks in."""
    net, (tokens, masked, words) = network(), clip()
    uniforms = torch.rand(3, 24)
    other = torch.where(masked, (tokens + 1) % 11, tokens)
    one, two = (net(x, masked, torch.ones(3), uniforms=uniforms, words=words).filled for x in (tokens, other))
    assert torch.equal(one, two)


@pytest.mark.parametrize("peg", [True, False])
@pytest.mark.parametrize("kind", [MaskGit, TokenCritic])
def test_padding_changes_nothing(kind, peg):
    """Oracle: the clip without its padding, and the same clip with other tokens in the padding."""
    net, (tokens, _, words) = network(kind, peg=peg), clip()
    real = torch.arange(4) < torch.tensor([4, 2, 1])[:, None]

    def run(x, real, words):
        return net.trunk(x, real, words=words)

    found = run(tokens, real, words)
    other = torch.where(real[:, :, None, None], tokens, (tokens + 5) % 11)
    assert torch.equal(run(other, real, words)[real], found[real])
    for row, count in enumerate((4, 2, 1)):
        alone = run(tokens[row : row + 1, :count], None, words[row : row + 1])
        torch.testing.assert_close(found[row, :count], alone[0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(run(tokens, None, words)[1, :2], found[1, :2])


def test_texts():
    """Oracle: the null text for dropped texts and for texts without words; words matter, and so does their order."""
    net, (tokens, _, words) = network(), clip()

    def run(words, dropped=None):
        return net.trunk(tokens, None, dropped, words=words)

    null = run(torch.zeros_like(words))
    dropped = torch.tensor([True, False, True])
    found = run(words, dropped)
    torch.testing.assert_close(found[dropped], null[dropped])
    torch.testing.assert_close(found[~dropped], run(words)[~dropped])
    assert not torch.allclose(run(words), null) and not torch.allclose(run(words), run(words.flip(1)), atol=1e-3)
    padded = torch.cat((words[:, :2], torch.zeros_like(words[:, :2])), 1)
    torch.testing.assert_close(run(padded), run(words[:, :2]))


def test_unconditional_has_no_weights_for_texts():
    """Oracle: the names of the weights."""
    names = [name for name, _ in network(text=None).named_parameters()]
    assert not [name for name in names if "text" in name or "cross" in name or "null" in name]
    assert [name for name, _ in network().named_parameters() if "trunk.text" in name]


def test_guidance():
    """Oracle: null + s (text - null) of logits, each from a pass of its own."""
    net, (tokens, masked, words) = network(), clip()
    hidden = torch.where(masked, 11, tokens)
    logits = [
        net.trunk(hidden, None, torch.full((3,), dropped), words=words) @ net.to_logits.weight.t() + net.to_logits.bias
        for dropped in (False, True)
    ]
    mixed = logits[1] + 3.0 * (logits[0] - logits[1])
    ids, certainty = net.draw_masked_tokens(hidden, None, {"words": words}, torch.rand(3, 24), 0.0, 3.0)
    assert torch.equal(ids[masked], mixed.argmax(-1)[masked]) and torch.equal(ids[~masked], tokens[~masked])
    torch.testing.assert_close(certainty[masked], mixed.log_softmax(-1).max(-1).values[masked], rtol=1e-4, atol=1e-4)
    assert not bool(certainty[~masked].any())
    assert not torch.equal(net.draw_masked_tokens(hidden, None, {"words": words}, torch.rand(3, 24), 0.0)[0], ids)


def test_both_inputs_of_the_self_critic():
    """Oracle: a pass of each by itself; gradients are the sum of both. Without uniforms none is judged."""
    net, (tokens, masked, words) = network(self_critic=True), clip()
    real, dropped = torch.arange(4) < torch.tensor([4, 3, 4])[:, None], torch.tensor([True, False, False])
    said = {"real": real, "dropped": dropped, "words": words}
    passed = net(tokens, masked, torch.ones(3), **said, uniforms=torch.rand(3, tokens[0].numel()))
    alone, filled = net(tokens, masked, torch.ones(3), **said), passed.filled
    assert alone.critic is None and not torch.equal(filled, tokens)
    judged = net.to_critic(net.trunk(filled, **said))[..., 0]
    torch.testing.assert_close(passed.loss, alone.loss)
    torch.testing.assert_close(passed.critic, judged)
    weights = list(net.parameters())
    once = torch.autograd.grad(passed.total + passed.critic.square().sum(), weights)
    apart = torch.autograd.grad(alone.total + judged.square().sum(), weights)
    for ours, theirs in zip(once, apart):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        net.compute_critic_logits(filled, real, {"words": words})[1:], judged[1:], rtol=1e-4, atol=1e-5
    )


def test_gradient_shrink():
    """Oracle: the gradients of the network that shrinks none: a tenth at the embeddings, the same behind them."""
    tokens, masked, words = clip()
    grads = []
    for share in (1.0, 0.1):
        net = network(gradient_shrink=share)
        net(tokens, masked, torch.ones(3), words=words).total.backward()
        grads.append({name: weight.grad for name, weight in net.named_parameters()})
    for name, grad in grads[0].items():
        embeds = "token_emb" in name or "positions" in name
        torch.testing.assert_close(grads[1][name], (0.1 if embeds else 1.0) * grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dim, depth, millions", [(512, 6, 34.1)])
def test_size(dim, depth, millions):
    """Oracle: weights of the original README's MaskGit, counted by hand: attention twice, GEGLU, PEG, tables."""
    with torch.device("meta"):
        net = MaskGit(
            8192,
            token_shape=(9, 8, 8),
            dim=dim,
            depth=depth,
            heads=8,
            dim_head=64,
            text=TEXT | {"num_words": None, "encodings_dim": 768},
        )
    hidden = 1368
    attention = 4 * dim * dim + 2 * dim + 128
    block = 28 * dim + 2 * attention + 2 * dim + 2 * dim + 3 * hidden * dim
    around = 8193 * dim + 25 * dim + 768 * dim + dim + dim + 2 * dim + 8192 * dim + 8192
    counted = sum(weight.numel() for weight in net.parameters())
    assert counted == depth * block + around and counted / 1e6 == pytest.approx(millions, abs=0.05)
    assert isinstance(net.to_logits, Linear)
