"""Memory for weights from the meta device: one tensor for a group, which DeepSpeed takes as it is."""

import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from dstrain.engine.initial import allocate_weights, place_weights_on_meta, return_freed_memory_to_system
from dstrain.engine.patches import flatten_weights_without_copy

SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}


class Net(nn.Module):
    """Marked, frozen and tied weights, a buffer, and a weight that has memory already."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 3)
        self.third = nn.Linear(3, 5, bias=False)
        self.third.weight = self.first.weight
        marked, frozen = nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(2), requires_grad=False)
        marked.mark = frozen.mark = "kept"
        self.marked, self.frozen = marked, frozen
        self.register_buffer("count", torch.arange(4))


@pytest.mark.parametrize("precision", SIZES)
@pytest.mark.parametrize("stage", (0, 1, 2))
def test_a_group_lies_in_one_tensor(stage, precision):
    """Oracle: addresses: one weight behind the other, and room for two elements more; shapes, marks and ties of the
    network that was built; a weight that has memory stays the same object. A frozen one is in no group, and by itself.
    """
    with place_weights_on_meta():
        network = Net()
    assert network.marked.mark == "kept" and network.marked.is_meta
    own = network.own = nn.Parameter(torch.ones(3))
    groups = [
        {"params": [network.first.weight, network.marked, own]},
        {"params": [network.first.bias, network.second.weight, network.second.bias]},
    ]
    before = [[weight.shape for weight in members["params"]] for members in groups]
    settings = {precision: {"enabled": True}} if precision != "fp32" else {}
    allocate_weights(network, groups, {"zero_optimization": {"stage": stage}, **settings})
    held = {id(weight) for weight in network.parameters()}
    assert {id(weight) for members in groups for weight in members["params"]} | {id(network.frozen)} == held
    assert network.third.weight is network.first.weight and groups[0]["params"][2] is own is network.own
    assert network.marked.mark == network.frozen.mark == "kept" and network.count.tolist() == [0, 1, 2, 3]
    assert all(weight.requires_grad for weight in groups[0]["params"]) and not network.frozen.requires_grad
    assert [[weight.shape for weight in members["params"]] for members in groups] == before
    size = SIZES[precision]
    assert (network.frozen.shape, network.frozen.element_size(), network.frozen.is_meta) == ((2,), size, False)
    for members in groups:
        weights = [weight for weight in members["params"] if weight is not own]
        numel = sum(weight.numel() for weight in weights)
        assert {weight.element_size() for weight in weights} == {size}
        assert weights[0].untyped_storage().nbytes() == size * (numel + 2)
        place = weights[0].untyped_storage().data_ptr()
        for weight in weights:
            assert weight.data_ptr() == place and weight.is_contiguous()
            place += size * weight.numel()


def pieces(network: nn.Module) -> list[nn.Parameter]:
    """Four weights of 6, 4, 4 and 2 elements, in order in one tensor that has room for two more."""
    weights = [nn.Parameter(torch.empty(shape, device="meta")) for shape in ((2, 3), (4,), (2, 2), (2,))]
    for number, weight in enumerate(weights):
        setattr(network, f"w{number}", weight)
    groups = [{"params": weights}]
    allocate_weights(network, groups, {})
    for number, weight in enumerate(groups[0]["params"]):
        weight.data.copy_(10 * number + torch.arange(float(weight.numel())).view(weight.shape))
    return groups[0]["params"]


def padding(count: int) -> torch.Tensor:
    return -1 - torch.arange(float(count))


@pytest.mark.parametrize(
    "choose, in_place",
    [
        (lambda w: w, True),
        (lambda w: [*w, padding(2)], True),
        (lambda w: [*w, padding(1), padding(1)], True),
        (lambda w: w[:2], True),
        (lambda w: [*w[:2], padding(2)], True),
        (lambda w: w[:1], True),
        (lambda w: [*w, padding(3)], False),
        (lambda w: w[1:], False),
        (lambda w: [*w[2:], padding(1)], False),
        (lambda w: [w[0], w[2], w[3]], False),
        (lambda w: [w[0], padding(4), w[2], w[3]], False),
        (lambda w: [padding(2), *w], False),
        (lambda w: [padding(4), padding(1)], False),
        (lambda w: w[::-1], False),
        (lambda w: [w[0].detach(), w[1].detach()], False),
        (lambda w: [turned(w[0]), w[1]], False),
        (lambda w: [w[0], turned(w[1].data.view(2, 2)), w[2]], False),
    ],
)
def test_what_deepspeed_flattens(choose, in_place):
    """Oracle: torch.cat of the same tensors; addresses: weights in one tensor, in order and without gaps, and padding
    for which there is room are taken as they lie, everything else is copied, as it is after the with.
    """
    from deepspeed.runtime.zero import stage_1_and_2

    usual, weights = stage_1_and_2._flatten_dense_tensors, pieces(nn.Module())
    tensors = choose(weights)
    expected = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    with flatten_weights_without_copy():
        inside = stage_1_and_2._flatten_dense_tensors
        flat = inside(tensors)
        assert torch.equal(flat, expected) and (flat.data_ptr() == tensors[0].data_ptr()) == in_place
    assert stage_1_and_2._flatten_dense_tensors is usual
    assert inside(weights).data_ptr() != weights[0].data_ptr()


def turned(weight: torch.Tensor) -> torch.Tensor:
    """The same memory, with rows and columns exchanged."""
    view = weight.detach().t()
    view.lies_in_one = True
    return view


def hold_and_free(path):
    """Writes the bytes of this process: with 64 MiB in small pieces, when these but for the last are freed, and after
    give_back.
    """

    def size():
        path.write_text(path.read_text() + Path("/proc/self/statm").read_text().split()[1] + " ")

    path.write_text("")
    pieces = [torch.ones(2**14) for _ in range(2**10)]
    size()
    del pieces[:-1]  # the last one lies behind the others on the heap
    size()
    return_freed_memory_to_system()
    size()


def test_what_is_freed_goes_back_to_the_system(in_fork, tmp_path):
    """Oracle: the process's pages, as Linux counts them: glibc keeps what lies before a block that lives."""
    in_fork(hold_and_free, tmp_path / "pages")
    held, freed, given = map(int, (tmp_path / "pages").read_text().split())
    pages = 2**26 / resource.getpagesize()
    assert freed > held - 0.1 * pages and given < held - 0.9 * pages
