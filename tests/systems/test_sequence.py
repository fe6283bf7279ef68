"""Networks whose tokens ranks share, against the same networks alone."""

import torch
from torch import Tensor, nn

from dstrain import systems
from dstrain.nn.sequence import order_both, own, own_both, whole
from dstrain.systems.dit.blocks import JointBlock, Seen
from dstrain.systems.dit.network import DiT
from tests.support import gloo
from tests.support.sharing import compare


def dit(**choices) -> DiT:
    return DiT(8, 2, 3, 16, 4, 4, num_classes=5, **choices)


def call_dit(network: nn.Module) -> list[Tensor]:
    """Two images of 8 x 8: 16 tokens; with all that the network gives."""
    draw = torch.Generator().manual_seed(1)
    x, t = torch.randn(2, 3, 8, 8, generator=draw), torch.tensor([3.0, 500.0])
    words = {}
    if hasattr(network, "text_tokens"):
        words = {"text": torch.randn(2, 4, 6, generator=draw), "mask": torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])}
    out = network(x, t, torch.tensor([1, 4]), extras=True, **words)
    return [out["out"], *([out["base"]] if "base" in out else []), *out.get("projected", []), *_drawn(out)]


def _drawn(out) -> list[Tensor]:
    return [out["drawn"], out["towards"] - out["drawn"]] if "drawn" in out else []


class Joint(nn.Module):
    """Two joint blocks, the last of which drops the texts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([JointBlock(16, 4, qk_norm="rms", dual=True), JointBlock(16, 4, last=True)])

    def forward(self, x: Tensor, c: Tensor, mask: Tensor, patches: int) -> Tensor:
        ordered = order_both(mask, patches, 1)[:, None, None]
        x = own_both(x, patches, 1)
        seen = Seen(c, mask=ordered, images=own(torch.arange(patches), 0).numel())
        for block in self.blocks:
            x = block(x, *seen)
        return whole(x, 1)


def call_joint(network: nn.Module) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, 18:] = mask[1, 13:15] = False
    x, c = (torch.randn(2, *shape, 16, generator=draw, dtype=torch.float64) for shape in ((20,), ()))
    return [network(x, c, mask, 12)]


CASES = {
    "dit": (dit, call_dit),
    "modern": (
        lambda: dit(
            rope=True,
            sines=False,
            block={"norm": "rms", "mlp": "swiglu", "qk_norm": "rms"},
            tokens={"time": 4, "label": 8, "joins": 2},
            wide={"hidden_size": 24, "depth": 2, "num_heads": 4},
            base_depth=1,
        ),
        call_dit,
    ),
    "texts": (lambda: dit(rope=True, block={"modulation": "own"}, text_dim=6), call_dit),
    "repa": (lambda: dit(align={"depth": 2, "widths": [5], "hidden": 7}), call_dit),
    "layersync": (lambda: dit(align={"depth": 1, "target": 3}), call_dit),
    "joint": (Joint, call_joint),
}


def work(_rank: int) -> dict[str, dict[str, float]]:
    """On all 4 ranks, and on 2 pairs of them."""
    return {
        f"{name} on {ranks}": compare(build, call, ranks) for name, (build, call) in CASES.items() for ranks in (2, 4)
    }


def test_shared_networks_are_the_networks(tmp_path):
    """Oracle: the same network on one rank: outputs and, by the mean over ranks, every weight's gradient, which
    ZeRO takes, both in float64 to 1e-10.
    """
    for figures in gloo.run(tmp_path, work, world=4):
        for name, found in figures.items():
            assert max(found.values()) < 1e-10, (name, found)


def conflicts(name: str, ranks: int, **model) -> list[str]:
    return systems.config(name, model).conflicts_among(ranks)


def test_what_ranks_cannot_share_is_named():
    """Oracle: by hand: 4 heads, 16 tokens, 18 and 8 in two buckets, 6 condition tokens; what divides all of a message's
    numbers; networks without tokens to cut.
    """
    small = {"patch_size": 4, "hidden_size": 16, "depth": 2, "num_heads": 4, "image_size": 16}
    assert conflicts("dit", 4, **small) == conflicts("dit", 1, **small) == []
    assert conflicts("dit", 3, **small) == [
        "parallel.sequence=3 does not divide the 16 tokens of an image: what works is 1, 2, 4",
        "parallel.sequence=3 does not divide the 4 attention heads, num_heads: what works is 1, 2, 4",
    ]
    (text,) = conflicts("dit", 4, **small, sizes=[[24, 12], [8, 16]])
    assert "the 18 tokens of 24 x 12 pixels: what works is 1, 2" in text
    (text,) = conflicts("dit", 4, **small, tokens={"time": 2, "label": 4})
    assert "the 6 condition tokens of model.tokens: what works is 1, 2" in text
    (text,) = conflicts("dit", 4, **small, wide={"hidden_size": 24, "depth": 1, "num_heads": 6})
    assert "the 6 attention heads, model.wide.num_heads: what works is 1, 2" in text
    (text,) = conflicts("dit", 2, **small, routing={"start": 1})
    assert "leave model.routing out, or write parallel.sequence=1" in text
    for name in ("iddpm", "vae", "prior"):
        (text,) = systems.config_class(name).model_construct().conflicts_among(2)
        assert text.startswith("parallel.sequence=2: ") and text.endswith("write parallel.sequence=1")
